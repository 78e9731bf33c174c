"""A step: which queries meet which keys, where new slots go, and attention over the tree.

The tokens of all rows are packed into one matrix, in this order::

    │ tails: one token each, in bank order │ chunks: the other rows, one after the other │

and cut into blocks of queries that are attended together, so that scores stay small.

A query's keys lie in several parts: the nodes on its path and its own new slots. Softmax over all
of them is exact without bringing them together: the largest score over the parts is known before
anything is exponentiated, so that partial sums and partial outputs, all relative to that one
maximum, merge by addition (a log-sum-exp merge whose shift is agreed beforehand).

Shapes: queries [K, N, G, D], G query heads to a KV head, N tokens of a block; scores [K, n, G, S].
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
from .kv import NumpyFragment, NumpyFragments, TailBank

_MAX_SCORES = 1 << 21  # scores of one block: 8 MB
_MIN_BLOCK, _MAX_BLOCK = 16, 256  # queries
# A span up to so many slots is copied where others have the same queries, step by step; all of them
# have no more than MOST_COPIED.
SHORT = 256
MOST_COPIED = 4096

_Range = tuple[int, int]


class Packed(NamedTuple):
    """One row's tokens in the packed matrix: lo … hi-1. `row`: its place in the caller's list."""

    row: int
    lo: int
    hi: int
    prefix: tuple[Span, ...]
    kv_out: NumpyFragment | None
    position: int
    logits_at: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return self.hi - self.lo


class QueryBlock(NamedTuple):
    """Queries lo … hi-1 and what they meet; own[0] is the tails' part if `n_tails` is not 0."""

    lo: int
    hi: int
    n_tails: int
    own: list[KeyPart]
    shared: list[KeyPart]


class Plan:
    """Made for one step; serves the next ones too, while the same tails grow on the same paths.

    Making it reserves room for the new slots; no fragment's length changes before `commit`.

    Attributes:
        positions: int64 [N], of the packed tokens.
        wanted: int64, packed indices of the wanted logits rows, in the order of `Output`.
    """

    def __init__(self, rows: Sequence[Row], config: LlamaConfig, fragments: NumpyFragments) -> None:
        check_rows(rows)
        for row in rows:
            _check(row, config)
        self._config = config
        self._fragments = fragments
        # Bodies first: making room for one may take its tail out of the bank.
        chunks = [self._chunk(row) for row in rows if not _is_tail(row)]
        fragments.reserve_tails([cast(NumpyFragment, row.kv_out) for row in rows if _is_tail(row)])
        self._packed = _pack(rows)
        self._lo = {packed.row: packed.lo for packed in self._packed}
        dests = [packed.kv_out for packed in self._packed if _is_tail(packed)]
        self._chunks = list(zip(self._packed[len(dests) :], chunks, strict=True))
        self._tails = Tails(cast("list[NumpyFragment]", dests), fragments.bank)
        self._version = fragments.version
        self._age = 0
        self.positions = np.concatenate(
            [np.arange(p.position, p.position + p.n_tokens) for p in self._packed]
        )
        wanted = [self._lo[index] + at for index, row in enumerate(rows) for at in row.logits_at]
        self.wanted = np.array(wanted, np.int64)
        self._blocks = [self._block(lo, hi) for lo, hi in self._cuts()]

    def serves(self, rows: Sequence[Row]) -> bool:
        """Whether `rows` are the next step of the very rows that this plan was made for."""
        return (
            len(rows) == len(self._packed) == self._tails.n
            and self._version == self._fragments.version
            and self._tails.has_room
            and all(self._continues(rows[packed.row], packed) for packed in self._packed)
        )

    def begin(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """Get ready for a step; return the packed token ids: int64 [N]."""
        if self._tails.n:
            self._tails.begin()
        for block in self._blocks:
            if block.n_tails:
                block.own[0] = self._tails.part(block.lo, block.lo + block.n_tails)
        ids: list[int] = []
        for packed in self._packed:
            ids.extend(token_ids(rows[packed.row]))
        return np.array(ids, np.int64)

    def write(self, layer: int, kv: Floats) -> None:
        """Store the new tokens' keys and values of one layer: [N, 2, K, D]."""
        n_tails = self._tails.n
        if n_tails:
            self._tails.write(layer, kv[:n_tails])
        for packed, chunk in self._chunks:
            chunk.write(layer, kv[packed.lo : packed.hi])

    def attend(self, layer: int, queries: Floats, out: Floats) -> None:
        """Attend all queries of one layer: both [K, N, G, D]; `write` comes first."""
        for lo, hi, _, own, shared in self._blocks:
            attend(queries[:, lo:hi], own, shared, layer, out[:, lo:hi])

    def first(self, index: int) -> int:
        """The packed index of row `index`'s first token."""
        return self._lo[index]

    def commit(self) -> None:
        """Count the written slots, and make ready for the same rows' next step."""
        n_tails = self._tails.n
        for packed in self._packed[:n_tails]:
            self._fragments.appended(cast(NumpyFragment, packed.kv_out), 1, to_body=False)
        for packed, _ in self._chunks:
            if packed.kv_out is not None:
                self._fragments.appended(packed.kv_out, packed.n_tokens, to_body=True)
        self._tails.commit()
        self.positions += 1
        self._age += 1

    # ---- making it

    def _continues(self, row: Row, packed: Packed) -> bool:
        return (
            row.prefix is packed.prefix
            and row.kv_out is packed.kv_out
            and row.position == packed.position + self._age < self._config.context_length
            and row.n_tokens == 1
            and row.logits_at == packed.logits_at
            and not row.scores
        )

    def _chunk(self, row: Row) -> Chunk:
        n_tokens, config = row.n_tokens, self._config
        if row.kv_out is not None:
            kv_out = cast(NumpyFragment, row.kv_out)
            return Chunk(self._fragments.reserve_body(kv_out, n_tokens), n_tokens)
        # Nothing is kept, so all layers may write to the same place.
        room = np.empty((2, config.n_kv_heads, n_tokens, config.head_dim), np.float32)
        strides = (0, *room.strides)
        layers = np.lib.stride_tricks.as_strided(room, (config.n_layers, *room.shape), strides)
        return Chunk(layers, n_tokens)

    def _cuts(self) -> list[_Range]:
        n_tokens, longest = self._packed[-1].hi, int(self.positions.max()) + 1
        size = _MAX_SCORES // (self._config.n_heads * longest)
        size = min(max(size, _MIN_BLOCK), _MAX_BLOCK)
        return [(lo, min(lo + size, n_tokens)) for lo in range(0, n_tokens, size)]

    def _block(self, lo: int, hi: int) -> QueryBlock:
        n_tails = min(max(self._tails.n - lo, 0), hi - lo)
        own: list[KeyPart] = (
            [cast(KeyPart, None)] if n_tails else []
        )  # set by `begin`, at every step
        for packed, chunk in self._chunks:
            first, last = max(lo, packed.lo), min(hi, packed.hi)
            if first < last:
                own.append(chunk.part(first - packed.lo, last - packed.lo, first - lo))
        return QueryBlock(lo, hi, n_tails, own, list(self._shared(lo, hi)))

    def _shared(self, lo: int, hi: int) -> Iterable[KeyPart]:
        """The distinct spans on the queries' paths, one part for each set of queries."""
        paths: dict[int, tuple[tuple[Span, ...], list[_Range]]] = {}
        spans: dict[Span, list[_Range]] = {}
        for packed in self._packed:
            first, last = max(lo, packed.lo), min(hi, packed.hi)
            if first >= last:
                continue
            where = (first - lo, last - lo)
            paths.setdefault(id(packed.prefix), (packed.prefix, []))[1].append(where)
            if _is_tail(packed) and packed.kv_out is not None and packed.kv_out.body:
                spans.setdefault(Span(packed.kv_out, packed.kv_out.body), []).append(where)
        for path, ranges in paths.values():
            for span in path:
                if span.length:
                    spans.setdefault(span, []).extend(ranges)
        groups: dict[tuple[_Range, ...], list[Floats]] = {}
        for (fragment, length), ranges in spans.items():
            views = self._fragments.views(cast(NumpyFragment, fragment), length)
            groups.setdefault(_merged(ranges), []).extend(views)
        n_left = MOST_COPIED
        for merged, views in groups.items():
            short, others = _short(views, n_left)
            n_left -= sum(view.shape[3] for view in short)
            if short:
                others.append(np.concatenate(short, axis=3))
            yield SpanPart(others, _where(merged))


def _short(views: list[Floats], most: int) -> tuple[list[Floats], list[Floats]]:
    """Return the views that are better copied into one, of `most` slots, and the others.

    On its own each is a product a layer and head, however short.
    """
    short, others = list[Floats](), list[Floats]()
    for view in views:
        n = view.shape[3]
        is_copied = n <= min(SHORT, most)
        most -= n if is_copied else 0
        (short if is_copied else others).append(view)
    return (short, others) if len(short) > 1 else ([], views)


def token_ids(row: Row) -> Sequence[int]:
    """Return the row's token ids on the host; waits for a late one."""
    if isinstance(row.tokens, FutureTokens):
        return [int(row.tokens.draws.result().ids[row.tokens.number])]
    return row.tokens


def _is_tail(row: Row | Packed) -> bool:
    return row.n_tokens == 1 and row.kv_out is not None


def _pack(rows: Sequence[Row]) -> list[Packed]:
    order = sorted(range(len(rows)), key=lambda index: _bank_row(rows[index]))
    packed, lo = [], 0
    for index in order:
        row = rows[index]
        hi = lo + row.n_tokens
        kv_out = cast("NumpyFragment | None", row.kv_out)
        packed.append(Packed(index, lo, hi, row.prefix, kv_out, row.position, row.logits_at))
        lo = hi
    return packed


def _bank_row(row: Row) -> float:
    return cast(NumpyFragment, row.kv_out).row if _is_tail(row) else np.inf


def _merged(ranges: list[_Range]) -> tuple[_Range, ...]:
    """The same indices in as few ranges as can be, in order."""
    merged: list[_Range] = []
    for lo, hi in sorted(ranges):
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def _where(ranges: tuple[_Range, ...]) -> Where:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return np.concatenate([np.arange(lo, hi) for lo, hi in ranges])


def _check(row: Row, config: LlamaConfig) -> None:
    end = row.position + row.n_tokens
    if row.adapter is not None:
        raise Unsupported(f"the NumPy engine has no adapters; row asks for {row.adapter!r}")
    if end > config.context_length:
        raise ForwardError(f"a row ends at position {end}; the model has {config.context_length}")


class Tails:
    """The rows that add one token each to a tail: n rows of the bank side by side, in its order."""

    __slots__ = ("_bank", "_first", "_lengths", "_mask", "_scatter", "_slots", "_width", "n")

    def __init__(self, dests: list[NumpyFragment], bank: TailBank) -> None:
        self.n = len(dests)
        self._bank = bank
        self._first = dests[0].row if dests else 0
        self._lengths = np.array([kv_out.tail for kv_out in dests], np.int64)
        self._width = int(self._lengths.max(initial=-1)) + 1

    @property
    def has_room(self) -> bool:
        return self._width <= self._bank.width

    def begin(self) -> None:
        """Look at the bank up to the longest tail's new slot."""
        lengths, width = self._lengths, self._width
        seen = np.arange(width) <= lengths[:, None]
        if bool(seen.all()):
            self._mask = None
            rows = slice(self._first, self._first + self.n)
            self._slots = list(self._bank.data[:, :, rows, :, width - 1].swapaxes(2, 3))
        else:
            self._mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
            self._slots = list(self._bank.data)
        rows_at = self._first + np.arange(self.n)
        self._scatter = (slice(None), rows_at, slice(None), lengths)

    def part(self, lo: int, hi: int) -> TailPart:
        """What tails lo … hi-1 see of their own, the new slot included."""
        mask = None if self._mask is None else self._mask[lo:hi]
        rows = slice(self._first + lo, self._first + hi)
        tails = self._bank.data[:, :, rows, :, : self._width]
        return TailPart(tails, slice(0, hi - lo), mask)

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens: [n, 2, K, D]."""
        if self._mask is None:
            self._slots[layer][...] = kv.transpose(1, 2, 0, 3)
        else:
            self._slots[layer][self._scatter] = kv

    def commit(self) -> None:
        """The slots written are kept."""
        self._lengths += 1
        self._width += 1


class Chunk:
    """A row with its own array: `room`, [L, 2, K, S, D], whose last slots are the new ones."""

    __slots__ = ("_n_before", "_room", "_slots")

    def __init__(self, room: Floats, n_tokens: int) -> None:
        self._room = room
        self._n_before = room.shape[3] - n_tokens
        self._slots = list(room[:, :, :, self._n_before :])

    def part(self, lo: int, hi: int, start: int) -> SpanPart:
        """What its new tokens lo … hi-1 see of their own; they are the queries from `start` on."""
        seen = self._room[:, :, :, : self._n_before + hi]
        return SpanPart([seen], slice(start, start + hi - lo), triangle(hi - lo))

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens: [n, 2, K, D]."""
        self._slots[layer][...] = kv.transpose(1, 2, 0, 3)


@lru_cache(maxsize=8)
def triangle(n: int) -> Floats:
    """Causal mask of n tokens among themselves: [n, 1, n], 0 up to itself and -inf after."""
    return np.triu(np.full((n, n), -np.inf, np.float32), k=1)[:, None]


Floats = NDArray[np.float32]
Where = slice | NDArray[np.int64]

_FEW = 2  # query heads up to which a matrix-vector product each is faster (half the time, measured)


class KeyPart(Protocol):
    """Keys and values of every layer, for the queries `where` of a block."""

    where: Where

    def scores(self, queries: Floats, layer: int) -> Floats:
        """Return a new [K, n, G, S]; -inf where a query may not look."""
        ...

    def mix(self, weights: Floats, layer: int) -> Floats:
        """Return the weighted sum of values: [K, n, G, D]."""
        ...


class SpanPart:
    """Slots seen by all of its queries: one product a span and KV head.

    spans: [L, 2, K, S, D] each, views. triangle: [n, 1, n] added to the last n slots, where they
    are the queries' own (0 up to itself, -inf after).
    """

    __slots__ = ("_keys", "_triangle", "_values", "where")

    def __init__(
        self, spans: Sequence[Floats], where: Where, triangle: Floats | None = None
    ) -> None:
        self.where: Where = where
        self._keys = list(zip(*(span[:, 0] for span in spans), strict=True))
        self._values = list(zip(*(span[:, 1] for span in spans), strict=True))
        self._triangle = triangle

    def scores(self, queries: Floats, layer: int) -> Floats:
        picked = queries[:, self.where]
        k, n, g, d = picked.shape
        flat = picked.reshape(k, n * g, d)
        pieces = [_meet(flat, keys) for keys in self._keys[layer]]
        scores: Floats = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
        scores = scores.reshape(k, n, g, -1)
        if self._triangle is not None:
            scores[..., -n:] += self._triangle
        return scores

    def mix(self, weights: Floats, layer: int) -> Floats:
        k, n, g, s = weights.shape
        flat = weights.reshape(k, n * g, s)
        first, *others = self._values[layer]
        hi = first.shape[1]
        mixed = _blend(flat[..., :hi], first)
        for values in others:
            lo, hi = hi, hi + values.shape[1]
            mixed += _blend(flat[..., lo:hi], values)
        return mixed.reshape(k, n, g, -1)


class TailPart:
    """Each query has slots of its own, padded to one length: one batched product.

    tails: [L, 2, n, K, S, D], a view. mask: [n, 1, S] added, 0 or -inf; None: all slots count.
    """

    __slots__ = ("_keys", "_mask", "_values", "where")

    def __init__(self, tails: Floats, where: slice, mask: Floats | None = None) -> None:
        self.where: Where = where
        by_head = tails.swapaxes(2, 3)[:, :, :, :, None]  # [L, 2, K, n, 1, S, D]
        self._keys = list(by_head[:, 0])
        self._values = list(by_head[:, 1])
        self._mask = mask

    def scores(self, queries: Floats, layer: int) -> Floats:
        scores: Floats = np.matvec(self._keys[layer], queries[:, self.where])
        if self._mask is not None:
            scores += self._mask
        return scores

    def mix(self, weights: Floats, layer: int) -> Floats:
        mixed: Floats = np.vecmat(weights, self._values[layer])
        return mixed


def attend(
    queries: Floats, own: Sequence[KeyPart], shared: Sequence[KeyPart], layer: int, out: Floats
) -> None:
    """Write the attention output of one block to `out`: [K, N, G, D].

    Args:
        own: parts that cover every query exactly once.
        shared: further parts, each for any of the queries.
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
            out[:, where] = part.mix(weights, layer)
        else:
            total[:, where] += np.add.reduce(weights, axis=-1)
            out[:, where] += part.mix(weights, layer)
    out /= total[..., None]


def _meet(queries: Floats, keys: Floats) -> Floats:
    """[K, m, D] with [K, S, D]: [K, m, S]."""
    if queries.shape[1] <= _FEW:
        met: Floats = np.matvec(keys[:, None], queries)
        return met
    return np.matmul(queries, keys.swapaxes(1, 2))


def _blend(weights: Floats, values: Floats) -> Floats:
    """[K, m, S] with [K, S, D]: [K, m, D]."""
    if weights.shape[1] <= _FEW:
        blended: Floats = np.vecmat(weights, values[:, None])
        return blended
    return np.matmul(weights, values)
