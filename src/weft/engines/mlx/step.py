"""One step: how a model's forward meets KV, and what it leaves there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import mlx.core as mx

from ...errors import ForwardError
from ..base import Row, Span
from ..full_sequences import calls, rows_of
from ..packing import DecodeGroup, PrefillGroup
from ..padded_pool import own
from .attention import (
    AttentionSpec,
    PartialAttention,
    apply_sinks,
    bias_of,
    join,
    meet,
    merge,
)
from .hook import Recorder, RunningCall
from .kv import Arrays, MlxFragment, MlxMemory, RowTailBuffer
from .shared_prefixes import LongRow, PieceMask, plan_step

if TYPE_CHECKING:
    from .model import MakeCache, ModelHead


# Tokens of one model call of whole paths, padding included; a longer path runs alone.
CALL_TOKENS = 2048


class PackedStep(ABC):
    """One forward over all tokens of its rows, one after the other.

    starts: packed index of each row's first token, by row number. fresh: the new keys and values
    [T, K, D], by layer. n_written: packed tokens whose slots are written on the way.
    """

    starts: list[int]

    def __init__(self, rows: Sequence[Row], memory: MlxMemory) -> None:
        self.rows = rows
        self.memory = memory
        self.fresh: dict[int, tuple[mx.array, mx.array]] = {}
        self.n_written = 0

    @abstractmethod
    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Return the hidden states [T, 1, E] of the rows' tokens, packed; nothing is evaluated."""

    def state(self) -> list[mx.array]:
        """All arrays that the step made or changed: to be evaluated before it is over."""
        return [array for pair in self.fresh.values() for array in pair]

    def release(self) -> None:
        """Let go of views of KV that is going to be written."""
        return None

    def commit(self) -> None:
        """The forward went well: its slots stay, and the fragments of its rows have grown."""
        self.release()
        written: Arrays = []
        grown = []
        for row, start in zip(self.rows, self.starts, strict=True):
            if row.kv_out is None:
                continue
            kv = own(row.kv_out, MlxFragment)
            grown.append((kv, row.n_tokens))
            if start >= self.n_written:
                span = slice(start, start + row.n_tokens)
                layers = (self.fresh[layer] for layer in range(len(self.fresh)))
                parts = [array[span].swapaxes(0, 1) for pair in layers for array in pair]
                self.memory.append(kv, parts)
                written += self.memory.arrays_of(kv)
        mx.eval(written)
        for kv, n in grown:
            self.memory.count_written(kv, n)


class TreeStep(PackedStep):
    """All tokens are one batch of single tokens [T, 1], and every span is met once for all."""

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, call: RunningCall) -> None:
        super().__init__(rows, memory)
        self.call = call
        self.plan = plan = plan_step(rows, memory)
        self.starts = plan.starts
        self.n_written = plan.n_decode_tokens
        self.positions: list[int] = []
        for i in plan.order:
            self.positions += range(rows[i].position, rows[i].position + rows[i].n_tokens)
        self.offsets = mx.array(self.positions)
        self._lengths = [[tail.length for tail in lane.tails] for lane in plan.decode_groups]
        self._masks: dict[int | None, list[list[PieceMask | None]]] = {}
        self._bank_masks: dict[tuple[int, int | None], tuple[int, mx.array | None]] = {}
        self._squares: dict[tuple[int, int | None], mx.array | None] = {}

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        packed = [token for i in self.plan.order for token in tokens[i]]
        self.call.step = self
        try:
            return head.hidden(mx.array(packed)[:, None], self.call.caches)
        finally:
            self.call.step = None

    def state(self) -> list[mx.array]:
        changed = super().state() if self.plan.prefill_groups or self.plan.longs else []
        for lane in self.plan.decode_groups:
            changed += lane.buffer.slots
        return changed

    def release(self) -> None:
        if self.plan.prefill_groups or self.plan.longs:  # not for the next step
            self.plan.levels, self.plan.longs = [], []

    # What the model calls, layer by layer

    def take(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Take a layer's new slots [T, K, 1, D]; those of bank rows are written at once."""
        k, v = keys[:, :, 0], values[:, :, 0]
        self.fresh[layer] = k, v
        for lane, lengths in zip(self.plan.decode_groups, self._lengths, strict=True):
            for array, new in zip(lane.buffer.slots[2 * layer :], (k, v), strict=False):
                new = new[lane.start : lane.stop]
                rows = slice(lane.first, lane.first + len(lengths))
                if min(lengths) == max(lengths):
                    array[rows, :, lengths[0]] = new
                else:
                    array[mx.arange(rows.start, rows.stop), :, mx.array(lengths)] = new

    def attend(self, layer: int, queries: mx.array, how: AttentionSpec) -> mx.array:
        """Let a layer's scaled queries [T, H, 1, D] meet what they may see: [T, H, 1, Dv]."""
        k, v = self.fresh[layer]
        n_tokens, n_heads, _, size = queries.shape
        heads = k.shape[1]
        q = queries.reshape(n_tokens, heads, n_heads // heads, size)
        results: list[mx.array] = []
        if self.plan.n_lanes:
            found = self._lanes(layer, q, k, v, how)
            results.append(found.out if how.sinks is None else apply_sinks(found, how.sinks))
        results += [self._long(row, layer, q, k, v, how) for row in self.plan.longs]
        out = results[0] if len(results) == 1 else mx.concatenate(results, axis=0)
        return out.astype(v.dtype).reshape(n_tokens, n_heads, 1, -1)

    # Tokens among themselves, and with their live tails

    def _lanes(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, how: AttentionSpec
    ) -> PartialAttention:
        plan = self.plan
        results = [
            self._bank(number, lane, layer, q, how)
            for number, lane in enumerate(plan.decode_groups)
        ]
        results += [self._chunk(lane, q, k, v, how) for lane in plan.prefill_groups]
        found = join([each.out for each in results], [each.lse for each in results])
        if not plan.levels:
            return found
        found = PartialAttention(found.out.astype(mx.float32), found.lse)
        above = q[: plan.n_lanes]
        for level, masks in zip(plan.levels, self._visible(how.window), strict=True):
            other = level.meet(layer, above, how, masks)
            if other is not None:
                found = merge(found, other)
        return found

    def _bank(
        self,
        number: int,
        lane: DecodeGroup[MlxFragment, RowTailBuffer],
        layer: int,
        q: mx.array,
        how: AttentionSpec,
    ) -> PartialAttention:
        """Let each row meet its tail, its new slot too; one product for the bank."""
        rows = slice(lane.first, lane.first + lane.stop - lane.start)
        low, bias = self._bank_mask(number, how.window)
        high = max(self._lengths[number]) + 1
        keys, values = (
            array[rows, :, low:high] for array in lane.buffer.slots[2 * layer : 2 * layer + 2]
        )
        return PartialAttention(*meet(q[lane.start : lane.stop], keys, values, how.is_latent, bias))

    def _bank_mask(self, number: int, window: int | None) -> tuple[int, mx.array | None]:
        """First slot that any row sees, and a bias [n, 1, 1, S] if rows differ in what they see."""
        found = self._bank_masks.get((number, window))
        if found is None:
            lengths = self._lengths[number]
            low = 0 if window is None else max(0, min(lengths) - window + 1)
            bias = None
            if min(lengths) != max(lengths):
                slots = mx.arange(low, max(lengths) + 1)[None]
                last = mx.array(lengths)[:, None]
                seen = slots <= last
                if window is not None:
                    seen = seen & (slots > last - window)
                bias = bias_of(seen)[:, None, None]
            found = self._bank_masks[(number, window)] = low, bias
        return found

    def _chunk(
        self, lane: PrefillGroup, q: mx.array, k: mx.array, v: mx.array, how: AttentionSpec
    ) -> PartialAttention:
        """Let the new tokens of each row meet each other; rows are padded to the longest."""
        n_rows, longest = len(lane.sizes), max(lane.sizes)
        padded, kept = _places(lane, longest)
        if padded is None:
            q, k, v = (array[lane.start : lane.stop] for array in (q, k, v))
        else:
            q, k, v = q[padded], k[padded], v[padded]
        _, heads, group, size = q.shape
        q = q.reshape(n_rows, longest, heads, group, size).transpose(0, 2, 3, 1, 4)
        q = q.reshape(n_rows, heads, group * longest, size)
        k, v = (a.reshape(n_rows, longest, heads, -1).transpose(0, 2, 1, 3) for a in (k, v))
        square = self._square(longest, how.window)
        bias = None if square is None else mx.concatenate([square] * group, axis=0)
        out, lse = meet(q, k, v, how.is_latent, bias)
        out = out.reshape(n_rows, heads, group, longest, -1).transpose(0, 3, 1, 2, 4)
        lse = lse.reshape(n_rows, heads, group, longest).transpose(0, 3, 1, 2)
        out = out.reshape(n_rows * longest, heads, group, -1)
        lse = lse.reshape(n_rows * longest, heads, group)
        return (
            PartialAttention(out, lse) if kept is None else PartialAttention(out[kept], lse[kept])
        )

    def _square(self, n: int, window: int | None) -> mx.array | None:
        """A bias [n, n]: what tokens of one row see of each other; None for one token."""
        if n == 1:
            return None
        if (n, window) not in self._squares:
            behind = mx.arange(n)[:, None] - mx.arange(n)[None]
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            self._squares[n, window] = bias_of(seen)
        return self._squares[n, window]

    def _long(
        self, row: LongRow, layer: int, q: mx.array, k: mx.array, v: mx.array, how: AttentionSpec
    ) -> mx.array:
        """Let a long row meet its path and itself by MLX's own attention: [n, K, g, Dv]."""
        own_part = slice(row.start, row.stop)
        n, (_, heads, group, size) = row.stop - row.start, q.shape
        keys, values = [], []
        for kv, length in row.spans:
            above = self.memory.views(kv, length)
            keys.append(above[2 * layer])
            values.append(above[2 * layer + 1])
        keys.append(k[own_part].swapaxes(0, 1))
        values.append(v[own_part].swapaxes(0, 1))
        all_k, all_v = mx.concatenate(keys, axis=1), mx.concatenate(values, axis=1)
        mask: mx.array | str = "causal"
        window = how.window
        if window is not None and all_k.shape[1] > window:
            total = all_k.shape[1]
            low = max(0, total - n - window + 1)
            all_k, all_v = all_k[:, low:], all_v[:, low:]
            behind = mx.arange(total - n, total)[:, None] - mx.arange(low, total)[None]
            mask = (behind >= 0) & (behind < window)
        if how.is_latent:
            all_k, all_v = mx.concatenate([all_k, all_v], axis=-1), all_k
        folded = q[own_part].reshape(n, heads * group, size).swapaxes(0, 1)
        out = mx.fast.scaled_dot_product_attention(
            folded[None], all_k[None], all_v[None], scale=1.0, mask=mask, sinks=how.sinks
        )
        return out[0].swapaxes(0, 1).reshape(n, heads, group, -1)

    # Spans above

    def _visible(self, window: int | None) -> list[list[PieceMask | None]]:
        """What a window shows of the spans, level by level; found once a step."""
        if window not in self._masks:
            self._masks[window] = [
                level.masks(window, self.positions) for level in self.plan.levels
            ]
        return self._masks[window]


class PathStep(PackedStep):
    """Each row runs alone, over a cache of the model's own kind that holds all of its path.

    For models whose attention the tree cannot carry. KV is kept and shared as for others; it is
    copied together for each row of each step.
    """

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, make_cache: MakeCache) -> None:
        super().__init__(rows, memory)
        self.make_cache = make_cache
        self.starts = [0, *accumulate(row.n_tokens for row in rows)][: len(rows)]

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        hidden: list[mx.array] = []
        fresh: list[list[tuple[mx.array, mx.array]]] = []
        for row, ids in zip(self.rows, tokens, strict=True):
            tail = [] if row.kv_out is None else [Span(row.kv_out, row.kv_out.length)]
            spans = [*row.prefix, *tail]
            caches = [Recorder(cache) for cache in self.memory.cache(spans, self.make_cache)]
            hidden.append(head.hidden(mx.array([ids]), caches)[0][:, None])
            fresh.append([cache.taken() for cache in caches])
        for layer, found in enumerate(zip(*fresh, strict=True)):
            keys, values = (mx.concatenate(list(each)) for each in zip(*found, strict=True))
            self.fresh[layer] = keys, values
        return mx.concatenate(hidden, axis=0)


class WholeStep(PackedStep):
    """Rows carry whole paths, which run in padded batches and leave nothing.

    For models whose state is not KV of single tokens. Padding is on the right, which no decoder
    sees.
    """

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, make_cache: MakeCache) -> None:
        super().__init__(rows, memory)
        if any(row.prefix or row.kv_out is not None for row in rows):
            raise ForwardError("this model has no KV that fragments could hold: rows carry paths")
        self.make_cache = make_cache
        self.starts = [0, *accumulate(row.n_tokens for row in rows)][: len(rows)]

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        hidden: dict[int, mx.array] = {}
        for paths in calls(rows_of(tuple(ids) for ids in tokens), CALL_TOKENS):
            longest = max(len(path.ids) for path in paths)
            padded = [[*path.ids, *path.ids[-1:] * (longest - len(path.ids))] for path in paths]
            states = head.hidden(mx.array(padded), self.make_cache())
            mx.eval(states)  # a call's working memory goes before the next one's comes
            for number, path in enumerate(paths):
                for row in path.rows:
                    hidden[row] = states[number, : len(tokens[row])]
        packed = [hidden[row] for row in range(len(tokens))]
        return mx.concatenate(packed, axis=0)[:, None]


def _places(lane: PrefillGroup, longest: int) -> tuple[mx.array | None, mx.array | None]:
    """Packed index of every padded token, and padded index of every packed one; None: the same."""
    if min(lane.sizes) == longest:
        return None, None
    padded, kept, start = [], [], lane.start
    for number, size in enumerate(lane.sizes):
        padded += [start + min(i, size - 1) for i in range(longest)]
        kept += [number * longest + i for i in range(size)]
        start += size
    return mx.array(padded), mx.array(kept)
