"""One step: how a model's forward attends to KV, and which KV it adds."""

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
    attend,
    concatenate_queries,
    mask_to_bias,
    merge,
)
from .hook import ForwardContext, RecordingCache
from .kv import Arrays, MlxFragment, MlxMemory, RowTailBuffer
from .shared_prefixes import KeyMask, LongRow, plan_step

if TYPE_CHECKING:
    from .model import MakeCache, ModelHead


# Tokens of one model call of full paths, padding included; a longer path runs alone.
CALL_TOKENS = 2048


class PackedStep(ABC):
    """One forward over all tokens of its rows, packed one after the other.

    Attributes:
        rows: rows of the step.
        memory: the KV memory.
        starts: packed index of each row's first token, by row number.
        new_kv: new keys and values [T, K, D], by layer.
        n_written: packed tokens whose slots are written during the forward.
    """

    starts: list[int]

    def __init__(self, rows: Sequence[Row], memory: MlxMemory) -> None:
        self.rows = rows
        self.memory = memory
        self.new_kv: dict[int, tuple[mx.array, mx.array]] = {}
        self.n_written = 0

    @abstractmethod
    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Return the hidden states [T, 1, E] of the packed tokens, without evaluating them."""

    def state(self) -> list[mx.array]:
        """Return all arrays that the step created or changed; evaluate them before it ends."""
        return [array for pair in self.new_kv.values() for array in pair]

    def release(self) -> None:
        """Release views of KV that is about to be written."""
        return None

    def commit(self) -> None:
        """Write the new slots and extend the fragments, after a successful forward."""
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
                layers = (self.new_kv[layer] for layer in range(len(self.new_kv)))
                parts = [array[span].swapaxes(0, 1) for pair in layers for array in pair]
                self.memory.append(kv, parts)
                written += self.memory.arrays_of(kv)
        mx.eval(written)
        for kv, n in grown:
            self.memory.count_written(kv, n)


class TreeStep(PackedStep):
    """A step of a model with tree caches: all tokens are a batch of single tokens, [T, 1].

    Each span of KV is attended to once per layer, by all queries below it.
    """

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, context: ForwardContext) -> None:
        super().__init__(rows, memory)
        self.context = context
        self.plan = plan = plan_step(rows, memory)
        self.starts = plan.starts
        self.n_written = plan.n_decode_tokens
        self.positions: list[int] = []
        for i in plan.order:
            self.positions += range(rows[i].position, rows[i].position + rows[i].n_tokens)
        self.offsets = mx.array(self.positions)
        self._lengths = [[tail.length for tail in group.tails] for group in plan.decode_groups]
        self._masks: dict[int | None, list[list[KeyMask | None]]] = {}
        self._tail_masks: dict[tuple[int, int | None], tuple[int, mx.array | None]] = {}
        self._causal_biases: dict[tuple[int, int | None], mx.array | None] = {}

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Run all tokens as one batch [T, 1]; return the hidden states [T, 1, E], not evaluated."""
        packed = [token for i in self.plan.order for token in tokens[i]]
        self.context.step = self
        try:
            return head.hidden(mx.array(packed)[:, None], self.context.caches)
        finally:
            self.context.step = None

    def state(self) -> list[mx.array]:
        """Return the new slots and the changed buffers, to be evaluated."""
        changed = super().state() if self.plan.prefill_groups or self.plan.long_rows else []
        for group in self.plan.decode_groups:
            changed += group.buffer.slots
        return changed

    def release(self) -> None:
        """Release the plan's views of buffers."""
        if self.plan.prefill_groups or self.plan.long_rows:  # not for the next step
            self.plan.levels, self.plan.long_rows = [], []

    # Called by the model, layer by layer

    def store_kv(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store a layer's new slots [T, K, 1, D]. Decode rows' slots are written to their buffers
        at once.

        Args:
            layer: index of the layer.
            keys: [T, K, 1, D].
            values: [T, K, 1, D].
        """
        k, v = keys[:, :, 0], values[:, :, 0]
        self.new_kv[layer] = k, v
        for group, lengths in zip(self.plan.decode_groups, self._lengths, strict=True):
            for array, new in zip(group.buffer.slots[2 * layer :], (k, v), strict=False):
                new = new[group.start : group.stop]
                rows = slice(group.first, group.first + len(lengths))
                if min(lengths) == max(lengths):
                    array[rows, :, lengths[0]] = new
                else:
                    array[mx.arange(rows.start, rows.stop), :, mx.array(lengths)] = new

    def attend(self, layer: int, queries: mx.array, spec: AttentionSpec) -> mx.array:
        """Return the attention output [T, H, 1, Dv] of a layer's scaled queries [T, H, 1, D]."""
        k, v = self.new_kv[layer]
        n_tokens, n_heads, _, size = queries.shape
        heads = k.shape[1]
        q = queries.reshape(n_tokens, heads, n_heads // heads, size)
        results: list[mx.array] = []
        if self.plan.n_grouped:
            result = self._attend_grouped(layer, q, k, v, spec)
            results.append(result.out if spec.sinks is None else apply_sinks(result, spec.sinks))
        results += [self._attend_long(row, layer, q, k, v, spec) for row in self.plan.long_rows]
        out = results[0] if len(results) == 1 else mx.concatenate(results, axis=0)
        return out.astype(v.dtype).reshape(n_tokens, n_heads, 1, -1)

    # Attention to the step's own tokens and to their tails

    def _attend_grouped(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec
    ) -> PartialAttention:
        """Attend from all packed tokens, except those of long rows, to all of their keys."""
        plan = self.plan
        results = [
            self._attend_tails(number, group, layer, q, spec)
            for number, group in enumerate(plan.decode_groups)
        ]
        results += [self._attend_prefill(group, q, k, v, spec) for group in plan.prefill_groups]
        result = concatenate_queries([each.out for each in results], [each.lse for each in results])
        if not plan.levels:
            return result
        result = PartialAttention(result.out.astype(mx.float32), result.lse)
        above = q[: plan.n_grouped]
        for level, masks in zip(plan.levels, self._level_masks(spec.window), strict=True):
            other = level.attend(layer, above, spec, masks)
            if other is not None:
                result = merge(result, other)
        return result

    def _attend_tails(
        self,
        number: int,
        decode: DecodeGroup[MlxFragment, RowTailBuffer],
        layer: int,
        q: mx.array,
        spec: AttentionSpec,
    ) -> PartialAttention:
        """Attend from each row of a decode group to its tail and new slot, in one product.

        number: index of the group.
        """
        rows = slice(decode.first, decode.first + decode.stop - decode.start)
        low, bias = self._tail_mask(number, spec.window)
        high = max(self._lengths[number]) + 1
        keys, values = (
            array[rows, :, low:high] for array in decode.buffer.slots[2 * layer : 2 * layer + 2]
        )
        return PartialAttention(
            *attend(q[decode.start : decode.stop], keys, values, spec.is_latent, bias)
        )

    def _tail_mask(self, number: int, window: int | None) -> tuple[int, mx.array | None]:
        """Return the first slot that any row of a decode group attends to, and a bias [n, 1, 1, S].

        The bias is None if all rows attend to the same slots from there on.

        Args:
            number: index of the group.
            window: size of the sliding window; None for full attention.
        """
        mask = self._tail_masks.get((number, window))
        if mask is None:
            lengths = self._lengths[number]
            low = 0 if window is None else max(0, min(lengths) - window + 1)
            bias = None
            if min(lengths) != max(lengths):
                slots = mx.arange(low, max(lengths) + 1)[None]
                last = mx.array(lengths)[:, None]
                visible = slots <= last
                if window is not None:
                    visible = visible & (slots > last - window)
                bias = mask_to_bias(visible)[:, None, None]
            mask = self._tail_masks[(number, window)] = low, bias
        return mask

    def _attend_prefill(
        self, prefill: PrefillGroup, q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec
    ) -> PartialAttention:
        """Attend from the new tokens of each row to each other; rows are padded to the longest."""
        n_rows, longest = len(prefill.sizes), max(prefill.sizes)
        padded, kept = _padding_indices(prefill, longest)
        if padded is None:
            q, k, v = (array[prefill.start : prefill.stop] for array in (q, k, v))
        else:
            q, k, v = q[padded], k[padded], v[padded]
        _, heads, group, size = q.shape
        q = q.reshape(n_rows, longest, heads, group, size).transpose(0, 2, 3, 1, 4)
        q = q.reshape(n_rows, heads, group * longest, size)
        k, v = (a.reshape(n_rows, longest, heads, -1).transpose(0, 2, 1, 3) for a in (k, v))
        square = self._causal_bias(longest, spec.window)
        bias = None if square is None else mx.concatenate([square] * group, axis=0)
        out, lse = attend(q, k, v, spec.is_latent, bias)
        out = out.reshape(n_rows, heads, group, longest, -1).transpose(0, 3, 1, 2, 4)
        lse = lse.reshape(n_rows, heads, group, longest).transpose(0, 3, 1, 2)
        out = out.reshape(n_rows * longest, heads, group, -1)
        lse = lse.reshape(n_rows * longest, heads, group)
        return (
            PartialAttention(out, lse) if kept is None else PartialAttention(out[kept], lse[kept])
        )

    def _causal_bias(self, n: int, window: int | None) -> mx.array | None:
        """Return a causal bias [n, n], within the window; None for one token."""
        if n == 1:
            return None
        if (n, window) not in self._causal_biases:
            behind = mx.arange(n)[:, None] - mx.arange(n)[None]
            visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            self._causal_biases[n, window] = mask_to_bias(visible)
        return self._causal_biases[n, window]

    def _attend_long(
        self, row: LongRow, layer: int, q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec
    ) -> mx.array:
        """Attend from a long row to its path and itself by MLX's own attention: [n, K, g, Dv]."""
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
        window = spec.window
        if window is not None and all_k.shape[1] > window:
            total = all_k.shape[1]
            low = max(0, total - n - window + 1)
            all_k, all_v = all_k[:, low:], all_v[:, low:]
            behind = mx.arange(total - n, total)[:, None] - mx.arange(low, total)[None]
            mask = (behind >= 0) & (behind < window)
        if spec.is_latent:
            all_k, all_v = mx.concatenate([all_k, all_v], axis=-1), all_k
        folded = q[own_part].reshape(n, heads * group, size).swapaxes(0, 1)
        out = mx.fast.scaled_dot_product_attention(
            folded[None], all_k[None], all_v[None], scale=1.0, mask=mask, sinks=spec.sinks
        )
        return out[0].swapaxes(0, 1).reshape(n, heads, group, -1)

    # Attention to shared prefixes

    def _level_masks(self, window: int | None) -> list[list[KeyMask | None]]:
        """Return the masks of all levels for a window; computed once per step."""
        if window not in self._masks:
            self._masks[window] = [
                level.masks(window, self.positions) for level in self.plan.levels
            ]
        return self._masks[window]


class PathStep(PackedStep):
    """Runs each row alone, with a cache of the model's own type that contains its full path.

    For models whose attention cannot use tree caches. KV is stored and shared as in other models,
    and copied into one cache for each row of each step.
    """

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, make_cache: MakeCache) -> None:
        super().__init__(rows, memory)
        self.make_cache = make_cache
        self.starts = [0, *accumulate(row.n_tokens for row in rows)][: len(rows)]

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Run rows one by one, with a cache of each path; return the hidden states [T, 1, E]."""
        hidden: list[mx.array] = []
        new_kv: list[list[tuple[mx.array, mx.array]]] = []
        for row, ids in zip(self.rows, tokens, strict=True):
            tail = [] if row.kv_out is None else [Span(row.kv_out, row.kv_out.length)]
            spans = [*row.prefix, *tail]
            caches = [RecordingCache(cache) for cache in self.memory.cache(spans, self.make_cache)]
            hidden.append(head.hidden(mx.array([ids]), caches)[0][:, None])
            new_kv.append([cache.new_slots() for cache in caches])
        for layer, pairs in enumerate(zip(*new_kv, strict=True)):
            keys, values = (mx.concatenate(list(each)) for each in zip(*pairs, strict=True))
            self.new_kv[layer] = keys, values
        return mx.concatenate(hidden, axis=0)


class FullSequenceStep(PackedStep):
    """Runs full paths in padded batches and stores nothing.

    For models whose state is not KV of single tokens. Padding is on the right, where causal
    attention ignores it.
    """

    def __init__(self, rows: Sequence[Row], memory: MlxMemory, make_cache: MakeCache) -> None:
        super().__init__(rows, memory)
        if any(row.prefix or row.kv_out is not None for row in rows):
            raise ForwardError("this model has no KV for fragments; rows must have full paths")
        self.make_cache = make_cache
        self.starts = [0, *accumulate(row.n_tokens for row in rows)][: len(rows)]

    def run(self, head: ModelHead, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Run full paths in padded batches; return the hidden states [T, 1, E]."""
        hidden: dict[int, mx.array] = {}
        for paths in calls(rows_of(tuple(ids) for ids in tokens), CALL_TOKENS):
            longest = max(len(path.ids) for path in paths)
            padded = [[*path.ids, *path.ids[-1:] * (longest - len(path.ids))] for path in paths]
            states = head.hidden(mx.array(padded), self.make_cache())
            mx.eval(states)  # release the call's working memory before the next one
            for number, path in enumerate(paths):
                for row in path.rows:
                    hidden[row] = states[number, : len(tokens[row])]
        packed = [hidden[row] for row in range(len(tokens))]
        return mx.concatenate(packed, axis=0)[:, None]


def _padding_indices(
    prefill: PrefillGroup, longest: int
) -> tuple[mx.array | None, mx.array | None]:
    """Return indices that pad the rows of a group to one length, and that remove the padding.

    Args:
        prefill: the group.
        longest: length of its longest row.

    Returns:
        The packed index of every padded token, and the padded index of every packed token. Both
        are None if all rows have one length.
    """
    if min(prefill.sizes) == longest:
        return None, None
    padded, kept, start = [], [], prefill.start
    for number, size in enumerate(prefill.sizes):
        padded += [start + min(i, size - 1) for i in range(longest)]
        kept += [number * longest + i for i in range(size)]
        start += size
    return mx.array(padded), mx.array(kept)
