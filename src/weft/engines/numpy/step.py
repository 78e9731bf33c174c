"""One step: packing of rows, positions of new slots, and attention over the tree.

The tokens of all rows are packed into one matrix, in this order::

    │ decode rows: one token each, in buffer order │ prefill rows, one after the other │

The matrix is cut into blocks of queries that are attended to together, so that scores stay small.

The keys of a query are in several parts: the nodes of its path, and its own new slots. The softmax
over all of them is exact. The largest score over all parts is computed first. Partial sums and
partial outputs, all relative to that maximum, are then added (a log-sum-exp merge with a common
shift).

Shapes: queries [K, N, G, D] with G query heads per KV head and N tokens of a block; scores
[K, n, G, S].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ForwardError, Unsupported
from ..base import FutureTokens, Row, Span, check_rows
from .config import LlamaConfig
from .kv import NumpyFragment, NumpyFragments, TailBuffer

_MAX_SCORES = 1 << 21  # scores of one block: 8 MB
_MIN_BLOCK, _MAX_BLOCK = 16, 256  # queries
# A span up to MAX_SHORT slots is copied at every step if others have the same queries, up to
# MAX_COPIED slots in all.
MAX_SHORT = 256
MAX_COPIED = 4096

_Range = tuple[int, int]


class PackedRow(NamedTuple):
    """One row's place in the packed matrix of all tokens of a step.

    `row`: index in the caller's list. `lo`, `hi`: its tokens are packed tokens lo … hi - 1. The
    other fields are copied from the `Row`, to recognise its continuation.
    """

    row: int
    lo: int
    hi: int
    prefix: tuple[Span, ...]
    kv_out: NumpyFragment | None
    position: int
    logits_at: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Number of the row's tokens."""
        return self.hi - self.lo


class QueryBlock(NamedTuple):
    """The packed queries lo … hi-1 and the parts of KV that they attend to.

    n_tails: queries of decode rows in the block; if not 0, own[0] covers their tails in the buffer.
    own: tails and new tokens, each query in exactly one part.
    shared: spans of prefixes, each for some of the queries.
    """

    lo: int
    hi: int
    n_tails: int
    own: list[KVPart]
    shared: list[KVPart]


class StepPlan:
    """Packing and views of one step, reused while the same tails grow on the same prefixes.

    The constructor reserves capacity for the new slots. No fragment's length changes before
    `commit`.

    Attributes:
        positions: int64 [N], positions of the packed tokens.
        logits_indices: int64, packed indices of the requested logits, in the order of `Output`.
    """

    def __init__(self, rows: Sequence[Row], config: LlamaConfig, fragments: NumpyFragments) -> None:
        check_rows(rows)
        for row in rows:
            _check_row(row, config)
        self._config = config
        self._fragments = fragments
        # Bodies first: making room for one may take its tail out of the buffer.
        prefills = [self._prefill(row) for row in rows if not _is_decode(row)]
        fragments.reserve_tails(
            [cast(NumpyFragment, row.kv_out) for row in rows if _is_decode(row)]
        )
        self._packed = _pack(rows)
        self._lo = {packed.row: packed.lo for packed in self._packed}
        kv_outs = [packed.kv_out for packed in self._packed if _is_decode(packed)]
        self._prefills = list(zip(self._packed[len(kv_outs) :], prefills, strict=True))
        self._tails = TailRows(cast("list[NumpyFragment]", kv_outs), fragments.buffer)
        self._version = fragments.version
        self._age = 0
        self.positions = np.concatenate(
            [np.arange(p.position, p.position + p.n_tokens) for p in self._packed]
        )
        logits_indices = [
            self._lo[index] + at for index, row in enumerate(rows) for at in row.logits_at
        ]
        self.logits_indices = np.array(logits_indices, np.int64)
        self._blocks = [self._query_block(lo, hi) for lo, hi in self._block_ranges()]

    def fits(self, rows: Sequence[Row]) -> bool:
        """Return True if this plan can run `rows`: each continues its row of the last step."""
        return (
            len(rows) == len(self._packed) == self._tails.n
            and self._version == self._fragments.version
            and self._tails.has_room
            and all(self._continues(rows[packed.row], packed) for packed in self._packed)
        )

    def start(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """Prepare the next step. Return the packed token ids: int64 [N].

        rows: those of the constructor, or rows that `fits` accepted.
        """
        if self._tails.n:
            self._tails.start()
        for block in self._blocks:
            if block.n_tails:
                block.own[0] = self._tails.part(block.lo, block.lo + block.n_tails)
        ids: list[int] = []
        for packed in self._packed:
            ids.extend(token_ids(rows[packed.row]))
        return np.array(ids, np.int64)

    def write(self, layer: int, kv: Floats) -> None:
        """Store the keys and values of all new tokens in one layer. kv: [N, 2, K, D]."""
        n_tails = self._tails.n
        if n_tails:
            self._tails.write(layer, kv[:n_tails])
        for packed, prefill in self._prefills:
            prefill.write(layer, kv[packed.lo : packed.hi])

    def attend(self, layer: int, queries: Floats, out: Floats) -> None:
        """Write the attention output of all queries in one layer to `out`, after `write`.

        queries, out: [K, N, G, D].
        """
        for lo, hi, _, own, shared in self._blocks:
            attend(queries[:, lo:hi], own, shared, layer, out[:, lo:hi])

    def first(self, index: int) -> int:
        """Return the packed index of the first token of `rows[index]`."""
        return self._lo[index]

    def commit(self) -> None:
        """Extend the fragments by the written slots; advance the plan to the next step."""
        n_tails = self._tails.n
        for packed in self._packed[:n_tails]:
            self._fragments.count_written(cast(NumpyFragment, packed.kv_out), 1, to_body=False)
        for packed, _ in self._prefills:
            if packed.kv_out is not None:
                self._fragments.count_written(packed.kv_out, packed.n_tokens, to_body=True)
        self._tails.commit()
        self.positions += 1
        self._age += 1

    # ---- construction

    def _continues(self, row: Row, packed: PackedRow) -> bool:
        """Return True if `row` continues a packed row, so that its packing can be reused.

        It must have the same prefix, `kv_out` and `logits_at`, one token at the next position, and
        no scores.
        """
        return (
            row.prefix is packed.prefix
            and row.kv_out is packed.kv_out
            and row.position == packed.position + self._age < self._config.context_length
            and row.n_tokens == 1
            and row.logits_at == packed.logits_at
            and not row.scores
        )

    def _prefill(self, row: Row) -> PrefillRow:
        """Reserve slots for the new tokens of a row that is not a decode row.

        Without `kv_out` all layers write to the same temporary memory.
        """
        n_tokens, config = row.n_tokens, self._config
        if row.kv_out is not None:
            kv_out = cast(NumpyFragment, row.kv_out)
            return PrefillRow(self._fragments.reserve_body(kv_out, n_tokens), n_tokens)
        # The slots are not kept, so all layers may write to the same memory.
        room = np.empty((2, config.n_kv_heads, n_tokens, config.head_dim), np.float32)
        strides = (0, *room.strides)
        layers = np.lib.stride_tricks.as_strided(room, (config.n_layers, *room.shape), strides)
        return PrefillRow(layers, n_tokens)

    def _block_ranges(self) -> list[_Range]:
        """Return the (first, end) ranges of packed tokens that are attended to together.

        Their scores have at most `_MAX_SCORES` numbers, if the minimum block size allows it.
        """
        n_tokens, longest = self._packed[-1].hi, int(self.positions.max()) + 1
        size = _MAX_SCORES // (self._config.n_heads * longest)
        size = min(max(size, _MIN_BLOCK), _MAX_BLOCK)
        return [(lo, min(lo + size, n_tokens)) for lo in range(0, n_tokens, size)]

    def _query_block(self, lo: int, hi: int) -> QueryBlock:
        """Return packed queries lo … hi - 1 with the parts of KV that they attend to."""
        n_tails = min(max(self._tails.n - lo, 0), hi - lo)
        own: list[KVPart] = [cast(KVPart, None)] if n_tails else []  # set by `start`, at every step
        for packed, prefill in self._prefills:
            first, last = max(lo, packed.lo), min(hi, packed.hi)
            if first < last:
                own.append(prefill.part(first - packed.lo, last - packed.lo, first - lo))
        return QueryBlock(lo, hi, n_tails, own, list(self._shared(lo, hi)))

    def _shared(self, lo: int, hi: int) -> Iterable[KVPart]:
        """Yield the spans on the prefixes of queries lo … hi-1, one part per set of queries.

        Short spans of one set are copied into one array.
        """
        paths: dict[int, tuple[tuple[Span, ...], list[_Range]]] = {}
        spans: dict[Span, list[_Range]] = {}
        for packed in self._packed:
            first, last = max(lo, packed.lo), min(hi, packed.hi)
            if first >= last:
                continue
            where = (first - lo, last - lo)
            paths.setdefault(id(packed.prefix), (packed.prefix, []))[1].append(where)
            if _is_decode(packed) and packed.kv_out is not None and packed.kv_out.body:
                spans.setdefault(Span(packed.kv_out, packed.kv_out.body), []).append(where)
        for path, ranges in paths.values():
            for span in path:
                if span.length:
                    spans.setdefault(span, []).extend(ranges)
        groups: dict[tuple[_Range, ...], list[Floats]] = {}
        for (fragment, length), ranges in spans.items():
            views = self._fragments.views(cast(NumpyFragment, fragment), length)
            groups.setdefault(_merged(ranges), []).extend(views)
        n_left = MAX_COPIED
        for merged, views in groups.items():
            short, others = _split_short(views, n_left)
            n_left -= sum(view.shape[3] for view in short)
            if short:
                others.append(np.concatenate(short, axis=3))
            yield SpanPart(others, _query_selector(merged))


def _split_short(views: list[Floats], max_slots: int) -> tuple[list[Floats], list[Floats]]:
    """Split views into (views to copy into one array, other views).

    Each view that is not copied costs a product per layer and head, however short it is. Views of
    up to MAX_SHORT slots are copied, `max_slots` in all; a single short view is not.
    """
    short, others = list[Floats](), list[Floats]()
    for view in views:
        n = view.shape[3]
        is_copied = n <= min(MAX_SHORT, max_slots)
        max_slots -= n if is_copied else 0
        (short if is_copied else others).append(view)
    return (short, others) if len(short) > 1 else ([], views)


def token_ids(row: Row) -> Sequence[int]:
    """Return the row's token ids on the host; waits for future tokens."""
    if isinstance(row.tokens, FutureTokens):
        return [int(row.tokens.draws.result().ids[row.tokens.number])]
    return row.tokens


def _is_decode(row: Row | PackedRow) -> bool:
    """Return True if the row runs one token and keeps its KV."""
    return row.n_tokens == 1 and row.kv_out is not None


def _pack(rows: Sequence[Row]) -> list[PackedRow]:
    """Order the rows (decode rows first, by buffer row) and return the packed range of each."""
    order = sorted(range(len(rows)), key=lambda index: _buffer_row(rows[index]))
    packed, lo = [], 0
    for index in order:
        row = rows[index]
        hi = lo + row.n_tokens
        kv_out = cast("NumpyFragment | None", row.kv_out)
        packed.append(PackedRow(index, lo, hi, row.prefix, kv_out, row.position, row.logits_at))
        lo = hi
    return packed


def _buffer_row(row: Row) -> float:
    """Sort key: the row's index in the tail buffer; infinity for rows that are not decode rows."""
    return cast(NumpyFragment, row.kv_out).row if _is_decode(row) else np.inf


def _merged(ranges: list[_Range]) -> tuple[_Range, ...]:
    """Sort ranges and merge adjacent ones."""
    merged: list[_Range] = []
    for lo, hi in sorted(ranges):
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def _query_selector(ranges: tuple[_Range, ...]) -> Where:
    """Convert ranges of queries to a slice (one range) or an array of indices (several)."""
    if len(ranges) == 1:
        return slice(*ranges[0])
    return np.concatenate([np.arange(lo, hi) for lo, hi in ranges])


def _check_row(row: Row, config: LlamaConfig) -> None:
    """Raise Unsupported for a row with an adapter, ForwardError for one beyond the context."""
    end = row.position + row.n_tokens
    if row.adapter is not None:
        raise Unsupported(f"the NumPy engine has no adapters; row asks for {row.adapter!r}")
    if end > config.context_length:
        raise ForwardError(f"a row ends at position {end}; the model has {config.context_length}")


class TailRows:
    """Access to the tails of all decode rows of a step: n adjacent rows of the tail buffer."""

    __slots__ = ("_buffer", "_first", "_lengths", "_mask", "_scatter", "_slots", "_width", "n")

    def __init__(self, kv_outs: list[NumpyFragment], buffer: TailBuffer) -> None:
        self.n = len(kv_outs)
        self._buffer = buffer
        self._first = kv_outs[0].row if kv_outs else 0
        self._lengths = np.array([kv_out.tail for kv_out in kv_outs], np.int64)
        self._width = int(self._lengths.max(initial=-1)) + 1

    @property
    def has_room(self) -> bool:
        """True if the buffer has a free slot for the next token of every tail."""
        return self._width <= self._buffer.width

    def start(self) -> None:
        """Take views of the tail buffer for the next step, including the new slot of each tail.

        Call it before `part` and `write` of every step, because the buffer may have been
        reallocated.
        """
        lengths, width = self._lengths, self._width
        visible = np.arange(width) <= lengths[:, None]
        if bool(visible.all()):
            self._mask = None
            rows = slice(self._first, self._first + self.n)
            self._slots = list(self._buffer.data[:, :, rows, :, width - 1].swapaxes(2, 3))
        else:
            self._mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
            self._slots = list(self._buffer.data)
        rows_at = self._first + np.arange(self.n)
        self._scatter = (slice(None), rows_at, slice(None), lengths)

    def part(self, lo: int, hi: int) -> TailPart:
        """Return the keys and values of tails lo … hi - 1 for attention, including their new
        slots.
        """
        mask = None if self._mask is None else self._mask[lo:hi]
        rows = slice(self._first + lo, self._first + hi)
        tails = self._buffer.data[:, :, rows, :, : self._width]
        return TailPart(tails, slice(0, hi - lo), mask)

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens in one layer. kv: [n, 2, K, D]."""
        if self._mask is None:
            self._slots[layer][...] = kv.transpose(1, 2, 0, 3)
        else:
            self._slots[layer][self._scatter] = kv

    def commit(self) -> None:
        """Add the written slot to the length of each tail, for the next step."""
        self._lengths += 1
        self._width += 1


class PrefillRow:
    """Access to the new slots of one row with several tokens, or without a `kv_out`.

    `room`: [L, 2, K, S, D], a body whose last `n_tokens` slots are the new ones.
    """

    __slots__ = ("_n_before", "_room", "_slots")

    def __init__(self, room: Floats, n_tokens: int) -> None:
        self._room = room
        self._n_before = room.shape[3] - n_tokens
        self._slots = list(room[:, :, :, self._n_before :])

    def part(self, lo: int, hi: int, start: int) -> SpanPart:
        """Return the row's own keys and values for the queries of its new tokens lo … hi - 1.

        start: index of the query of token lo in its `QueryBlock`.
        """
        visible = self._room[:, :, :, : self._n_before + hi]
        return SpanPart([visible], slice(start, start + hi - lo), causal_mask(hi - lo))

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens in one layer. kv: [n, 2, K, D]."""
        self._slots[layer][...] = kv.transpose(1, 2, 0, 3)


@lru_cache(maxsize=8)
def causal_mask(n: int) -> Floats:
    """Return the causal mask of n tokens: [n, 1, n], 0 up to the token itself and -inf after it."""
    return np.triu(np.full((n, n), -np.inf, np.float32), k=1)[:, None]


Floats = NDArray[np.float32]
Where = slice | NDArray[np.int64]

_MAX_VECTORS = (
    2  # query heads up to which a matrix-vector product each is faster (half the time, measured)
)


class KVPart(Protocol):
    """A part of the stored KV, and the queries of a `QueryBlock` that attend to it.

    `where`: slice or indices of these n queries in the block.
    """

    where: Where

    def scores(self, queries: Floats, layer: int) -> Floats:
        """Return the scores of one layer as a new array [K, n, G, S]; -inf where a key is masked.

        queries: [K, N, G, D] of the full block; the part selects its n queries by `where`.
        """
        ...

    def weighted_values(self, weights: Floats, layer: int) -> Floats:
        """Return the values of one layer, summed with `weights`: [K, n, G, D].

        weights: [K, n, G, S], exponentials of the shifted scores, not normalised.
        """
        ...


class SpanPart:
    """Slots that all of its queries attend to, such as a shared prefix: one product per span and KV
    head.

    Args:
        spans: views, [L, 2, K, S, D] each.
        where: slice or indices of the queries in their `QueryBlock`.
        causal_mask: [n, 1, n], added to the last n slots if they are the queries' own.
    """

    __slots__ = ("_keys", "_causal_mask", "_values", "where")

    def __init__(
        self, spans: Sequence[Floats], where: Where, causal_mask: Floats | None = None
    ) -> None:
        self.where: Where = where
        self._keys = list(zip(*(span[:, 0] for span in spans), strict=True))
        self._values = list(zip(*(span[:, 1] for span in spans), strict=True))
        self._causal_mask = causal_mask

    def scores(self, queries: Floats, layer: int) -> Floats:
        """Return the scores of one layer: [K, n, G, S]."""
        picked = queries[:, self.where]
        k, n, g, d = picked.shape
        flat = picked.reshape(k, n * g, d)
        pieces = [_scores_of(flat, keys) for keys in self._keys[layer]]
        scores: Floats = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
        scores = scores.reshape(k, n, g, -1)
        if self._causal_mask is not None:
            scores[..., -n:] += self._causal_mask
        return scores

    def weighted_values(self, weights: Floats, layer: int) -> Floats:
        """Return the weighted sums of the values of one layer: [K, n, G, D]."""
        k, n, g, s = weights.shape
        flat = weights.reshape(k, n * g, s)
        first, *others = self._values[layer]
        hi = first.shape[1]
        mixed = _weighted_sum(flat[..., :hi], first)
        for values in others:
            lo, hi = hi, hi + values.shape[1]
            mixed += _weighted_sum(flat[..., lo:hi], values)
        return mixed.reshape(k, n, g, -1)


class TailPart:
    """Slots that belong to one query each (its tail), padded to one length: one batched product.

    Args:
        tails: a view, [L, 2, n, K, S, D].
        where: slice of the queries in their `QueryBlock`.
        mask: [n, 1, S], added to the scores: 0 or -inf. None: all slots count.
    """

    __slots__ = ("_keys", "_mask", "_values", "where")

    def __init__(self, tails: Floats, where: slice, mask: Floats | None = None) -> None:
        self.where: Where = where
        by_head = tails.swapaxes(2, 3)[:, :, :, :, None]  # [L, 2, K, n, 1, S, D]
        self._keys = list(by_head[:, 0])
        self._values = list(by_head[:, 1])
        self._mask = mask

    def scores(self, queries: Floats, layer: int) -> Floats:
        """Return the scores of one layer: [K, n, G, S]."""
        scores: Floats = np.matvec(self._keys[layer], queries[:, self.where])
        if self._mask is not None:
            scores += self._mask
        return scores

    def weighted_values(self, weights: Floats, layer: int) -> Floats:
        """Return the weighted sums of the values of one layer: [K, n, G, D]."""
        mixed: Floats = np.vecmat(weights, self._values[layer])
        return mixed


def attend(
    queries: Floats, own: Sequence[KVPart], shared: Sequence[KVPart], layer: int, out: Floats
) -> None:
    """Compute exact attention of one `QueryBlock` over all its parts, and write it to `out`.

    Args:
        queries: [K, N, G, D].
        own: parts that cover every query exactly once.
        shared: further parts, each for any of the queries.
        layer: index of the layer.
        out: [K, N, G, D], receives the output.
    """
    top = np.empty(queries.shape[:3], np.float32)
    scored = []
    for part in own:
        scores = part.scores(queries, layer)
        top[:, part.where] = np.maximum.reduce(scores, axis=-1)
        scored.append(scores)
    for part in shared:
        scores = part.scores(queries, layer)
        top[:, part.where] = np.maximum(top[:, part.where], np.maximum.reduce(scores, axis=-1))
        scored.append(scores)
    total = np.empty_like(top)
    for index, (part, weights) in enumerate(zip([*own, *shared], scored, strict=True)):
        where = part.where
        weights -= top[:, where, :, None]
        np.exp(weights, out=weights)
        if index < len(own):
            total[:, where] = np.add.reduce(weights, axis=-1)
            out[:, where] = part.weighted_values(weights, layer)
        else:
            total[:, where] += np.add.reduce(weights, axis=-1)
            out[:, where] += part.weighted_values(weights, layer)
    out /= total[..., None]


def _scores_of(queries: Floats, keys: Floats) -> Floats:
    """Return the scores [K, m, S] of queries [K, m, D] and keys [K, S, D]."""
    if queries.shape[1] <= _MAX_VECTORS:
        scores: Floats = np.matvec(keys[:, None], queries)
        return scores
    return np.matmul(queries, keys.swapaxes(1, 2))


def _weighted_sum(weights: Floats, values: Floats) -> Floats:
    """Return the sums [K, m, D] of values [K, S, D] with weights [K, m, S]."""
    if weights.shape[1] <= _MAX_VECTORS:
        result: Floats = np.vecmat(weights, values[:, None])
        return result
    return np.matmul(weights, values)
