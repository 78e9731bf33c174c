"""One step of the padded backend: attention of rows in decode and prefill groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...base import Row
from ...packing import DecodeGroup, Packing, PrefillGroup, group_rows
from ...padded_pool import own
from ..input_tensors import IncrementingTensor
from ..kv_backend import AttentionSpec, AttentionStep
from .attention import (
    CausalBand,
    Mask,
    apply_sinks,
    attend,
    attend_causal,
    can_use_flash,
    causal_bands,
)
from .kv import PaddedKVFragment, PaddedKVPool, SingleSequenceCache, TorchTailBuffer
from .shared_prefixes import (
    Positions,
    PrefixBatch,
    PrefixBatchView,
    PrefixGroup,
    PrefixGroupView,
    load_prefixes,
    mask_bias,
)

_POSITIONS = -1


class PaddedBackend(PaddedKVPool):
    """The padded KV pool with its steps."""

    def start_step(self, rows: Sequence[Row]) -> PaddedStep:
        """Return a step of these rows; the plan of the last step is reused if it fits."""
        return PaddedStep(rows, self)


class PaddedStep(AttentionStep):
    """One forward: attention of all rows, layer by layer.

    Decode rows write their KV during attention; that of prefill rows is kept until `commit`.
    Intermediate results are [T*g, K, Dv], for T packed tokens and g query heads of each of K KV
    heads. "Folded" queries are [K, T*g, D].
    """

    def __init__(self, rows: Sequence[Row], store: PaddedKVPool) -> None:
        self.rows = rows
        self.store = store
        self.plan = plan = plan_step(rows, store)
        self.single_sequence = store.single_sequence_for(rows)
        self.order, self.starts = plan.order, plan.starts
        self._places: list[int] = []
        for i in plan.order:
            self._places += range(rows[i].position, rows[i].position + rows[i].n_tokens)
        self.device = store.layout.device
        self.positions = plan.incrementing(_POSITIONS, self.device).at(self._places)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._lengths = [[t.length for t in decode.tails] for decode in plan.decode_groups]
        self._writes = [
            self._write_index(number, decode.first, n)
            for number, (decode, n) in enumerate(
                zip(plan.decode_groups, self._lengths, strict=True)
            )
        ]
        self._gathers: dict[int, tuple[Tensor, Tensor]] = {}
        self._bands: dict[tuple[int, int | None], list[CausalBand]] = {}
        self._views: dict[tuple[int | None, int], list[PrefixGroupView | PrefixBatchView]] = {}
        self._decode_masks: dict[tuple[int, int | None], tuple[int, Tensor | None]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Attend all rows in one layer; see `AttentionStep.attend`."""
        q, k, v = query[0], key[0], value[0]
        if self.single_sequence is not None and _is_plain(q, v, spec):
            return self._run_alone(self.single_sequence, layer, q, k, v, spec)
        n_heads, n_tokens, _ = q.shape
        group = n_heads // k.shape[0]
        folded = q.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2)
        if self.plan.prefill_groups:
            self.keys[layer], self.values[layer] = k, v
        out, lse = self._own(layer, q, folded, k, v, spec)
        for view in self._visible(spec.window, group, q):
            view.attend(layer, folded, group, out, lse, spec)
        if spec.sinks is not None:
            apply_sinks(out, lse, spec.sinks.view(-1, group).t().repeat(n_tokens, 1).float())
        return (
            out.to(v.dtype)
            .unflatten(0, (n_tokens, group))
            .transpose(1, 2)
            .reshape(1, n_tokens, n_heads, -1)
        )

    def _run_alone(
        self,
        single_sequence: SingleSequenceCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """Attend the only row of a step over its contiguous path."""
        if self.plan.prefill_groups:
            self.keys[layer], self.values[layer] = k, v
        else:
            (decode,) = self.plan.decode_groups
            self._write(decode.buffer.keys[layer], self._writes[0], k)
            self._write(decode.buffer.values[layer], self._writes[0], v)
        return single_sequence.attend(layer, q, k, v, spec)

    def commit(self) -> None:
        """Keep the new slots: the rows' fragments grow."""
        if self.plan.prefill_groups:
            self._write_chunks()
        for row in self.rows:
            if isinstance(row.kv_out, PaddedKVFragment):
                self.store.count_written(row.kv_out, row.n_tokens)
        if self.single_sequence is not None:
            self.single_sequence.n += 1

    def _write_chunks(self) -> None:
        """Write the KV of prefill rows; decode rows have written theirs."""
        keys, values = (
            [by_layer[layer] for layer in range(len(by_layer))]
            for by_layer in (self.keys, self.values)
        )
        n_decode_tokens = self.plan.n_decode_tokens
        for row, start in zip(self.rows, self.starts, strict=True):
            if isinstance(row.kv_out, PaddedKVFragment) and start >= n_decode_tokens:
                self.store.append(row.kv_out, keys, values, start, start + row.n_tokens)

    # Attention among new tokens, and to their tails

    def _own(
        self, layer: int, q: Tensor, folded: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend from all rows to their own tails and new tokens.

        Returns the output [T*g, K, Dv] and log-sum-exp [T*g, K], to merge prefixes into.
        """
        plan = self.plan
        results = [
            self._decode(number, decode, layer, folded, k, v, spec)
            for number, decode in enumerate(plan.decode_groups)
        ]
        results += [self._prefill(prefill, q, k, v, spec) for prefill in plan.prefill_groups]
        if len(results) == 1:
            out, lse = results[0]
        else:
            out, lse = torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])
        return (out.float() if plan.spans else out), lse

    def _decode(
        self,
        number: int,
        decode: DecodeGroup[PaddedKVFragment, TorchTailBuffer],
        layer: int,
        folded: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor]:
        """Write the new slot of each row of a decode group, then attend each row to its tail.

        This is one product for the buffer. number: index of the group.
        Returns output and log-sum-exp as `_own` does.
        """
        n_rows = decode.stop - decode.start
        own = slice(decode.first, decode.first + n_rows)
        keys, values = decode.buffer.keys[layer], decode.buffer.values[layer]
        self._write(keys, self._writes[number], k[:, decode.start : decode.stop])
        self._write(values, self._writes[number], v[:, decode.start : decode.stop])
        low, bias = self._decode_mask(number, spec.window, k)
        high = max(self._lengths[number]) + 1
        group = folded.shape[1] // k.shape[1]
        queries = folded[:, decode.start * group : decode.stop * group].unflatten(
            1, (n_rows, group)
        )
        out, lse = attend(
            queries.transpose(0, 1),
            keys[own, low:high].transpose(1, 2),
            values[own, low:high].transpose(1, 2),
            spec,
            None if bias is None else Mask(bias),
        )
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _write_index(
        self, number: int, first: int, lengths: list[int]
    ) -> tuple[slice, int] | tuple[Tensor, Tensor]:
        """Return the index (rows, slots) of a decode group's new slots in its buffer.

        It is one column if all tails have one length; else tensors of rows and slots.

        Args:
            number: index of the group.
            first: buffer row of its first tail.
            lengths: length of each tail.
        """
        if min(lengths) == max(lengths):
            return slice(first, first + len(lengths)), lengths[0]
        return (
            torch.arange(first, first + len(lengths), device=self.device),
            self.plan.incrementing(number, self.device).at(lengths),
        )

    def _write(
        self, buffer: Tensor, at: tuple[slice, int] | tuple[Tensor, Tensor], fresh: Tensor
    ) -> None:
        """Write new slots into one layer of a buffer. at: index of rows and slots."""
        buffer[at] = fresh.transpose(0, 1)

    def _decode_mask(
        self, number: int, window: int | None, like: Tensor
    ) -> tuple[int, Tensor | None]:
        """Return the first slot that any row of a decode group attends to, and a bias [n, 1, 1, S].

        The bias is None if all rows attend to the same slots from there on.

        Args:
            number: index of the group.
            window: size of the sliding window; None for full attention.
            like: the bias gets its dtype and device.
        """
        mask = self._decode_masks.get((number, window))
        if mask is None:
            lengths = self._lengths[number]
            low = 0 if window is None else max(0, min(lengths) - window + 1)
            bias = None
            if min(lengths) != max(lengths):
                slots = torch.arange(low, max(lengths) + 1, device=self.device)[None]
                last = self.plan.incrementing(number, self.device).at(lengths)[:, None]
                hidden = slots > last
                if window is not None:
                    hidden |= slots <= last - window
                bias = mask_bias(hidden, like)[:, None, None]
            mask = self._decode_masks[(number, window)] = low, bias
        return mask

    def _prefill(
        self, prefill: PrefillGroup, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend the new tokens of each row to each other; rows are padded to the longest."""
        n_rows, longest = len(prefill.sizes), max(prefill.sizes)
        is_even = min(prefill.sizes) == longest
        index = None if is_even else self._gather(prefill, longest)
        queries, keys, values = (
            (t[:, prefill.start : prefill.stop] if index is None else t[:, index[0]])
            .unflatten(1, (n_rows, longest))
            .transpose(0, 1)
            for t in (q, k, v)
        )
        if longest == 1:
            out, lse = self._single(queries, keys, values, spec)
        else:
            out, lse = attend_causal(queries, keys, values, spec, self._bands_for(longest, spec, q))
        group = q.shape[0] // k.shape[0]
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        if index is not None:
            out, lse = out[index[1]], lse[index[1]]
        return (
            out.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1),
            lse.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1),
        )

    def _single(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend rows of one token: each query sees only its own key."""
        n_rows, n_heads = q.shape[:2]
        out, lse = attend(q.reshape(n_rows, k.shape[1], -1, q.shape[-1]), k, v, spec)
        return out.reshape(n_rows, n_heads, 1, -1), lse.reshape(n_rows, n_heads, 1)

    def _bands_for(self, n: int, spec: AttentionSpec, like: Tensor) -> list[CausalBand] | None:
        """Return cached blocks of causal attention over n tokens; None: no blocks are needed."""
        window = spec.window if spec.window is not None and spec.window < n else None
        if window is None and spec.softcap is None and like.device.type == "cpu":
            return None
        key = (n, window)
        if key not in self._bands:
            self._bands[key] = causal_bands(n, window, like)
        return self._bands[key]

    def _gather(self, prefill: PrefillGroup, longest: int) -> tuple[Tensor, Tensor]:
        """Return indices that pad the rows of a group to one length, and that remove the padding.

        These are the packed index of every padded token, and the padded index of every packed one.
        longest: length of the group's longest row.
        """
        index = self._gathers.get(prefill.start)
        if index is None:
            padded, packed, start = [], [], prefill.start
            for number, size in enumerate(prefill.sizes):
                padded += [start + min(i, size - 1) for i in range(longest)]
                packed += [number * longest + i for i in range(size)]
                start += size
            index = (
                torch.tensor(padded, device=self.device),
                torch.tensor(packed, device=self.device),
            )
            self._gathers[prefill.start] = index
        return index

    # Attention to shared prefixes

    def _visible(
        self, window: int | None, group: int, like: Tensor
    ) -> list[PrefixGroupView | PrefixBatchView]:
        """Return the prefixes that a window leaves visible, with their masks; computed once a step.

        Args:
            window: size of the sliding window; None for full attention.
            group: query heads per KV head.
            like: the queries; masks get their dtype and device.
        """
        key = (window, group)
        if key not in self._views:
            at = Positions(self._places, self.positions)
            views = (s.visible(window, group, at, like) for s in self.plan.spans)
            self._views[key] = [view for view in views if view is not None]
        return self._views[key]


def _is_plain(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return True if a layer has no window and no sinks, and the fused operation supports it."""
    return spec.window is None and spec.sinks is None and can_use_flash(q, v, spec)


@dataclass(slots=True)
class PaddedPlan(Packing[PaddedKVFragment, TorchTailBuffer]):
    """How one set of rows is packed, and which prefixes they attend to.

    load_prefixes: called once, when `spans` is first read; never if a row steps alone.
    """

    load_prefixes: Callable[[], list[PrefixGroup | PrefixBatch]] = list
    _spans: list[PrefixGroup | PrefixBatch] | None = None
    _incrementing: dict[int, IncrementingTensor] = field(default_factory=dict)

    def incrementing(self, number: int, device: torch.device) -> IncrementingTensor:
        """Return numbers that increase by one a step: lengths in decode group `number`, or
        _POSITIONS.
        """
        numbers = self._incrementing.get(number)
        if numbers is None:
            numbers = self._incrementing[number] = IncrementingTensor(device)
        return numbers

    @property
    def spans(self) -> list[PrefixGroup | PrefixBatch]:
        """The shared prefixes above the rows, and the queries below each."""
        if self._spans is None:
            self._spans = self.load_prefixes()
        return self._spans


def plan_step(rows: Sequence[Row], store: PaddedKVPool) -> PaddedPlan:
    """Return a plan for the rows: the cached one if it fits, else a new one.

    A new plan moves tails to their buffers in `store`, and is cached there.
    """
    cached = store.plan
    if cached is not None and cached.fits(rows, large_batch=store.is_large_batch()):
        return cached
    store.plan = None  # tails move below, so the cached plan is invalid even if that fails
    plan = _build(rows, store)
    store.plan = plan if not plan.prefill_groups else None
    return plan


def _build(rows: Sequence[Row], store: PaddedKVPool) -> PaddedPlan:
    """Group the rows, assign tails to buffers, and return a new plan."""
    dests = [None if row.kv_out is None else own(row.kv_out, PaddedKVFragment) for row in rows]
    plan = PaddedPlan(
        [(r.prefix, d) for r, d in zip(rows, dests, strict=True)], [], [0] * len(rows)
    )
    for (kind, size), members in group_rows(rows, dests, store).items():
        start = stop = sum(rows[i].n_tokens for i in plan.order)
        for i in members:
            plan.starts[i] = stop
            stop += rows[i].n_tokens
        plan.order += members
        if kind == "decode":
            tails = [d for i in members if (d := dests[i]) is not None]
            plan.decode_groups.append(
                DecodeGroup(*store.buffer_for(tails, size), tails, start, stop)
            )
        else:
            plan.prefill_groups.append(
                PrefillGroup(tuple(rows[i].n_tokens for i in members), start, stop)
            )
    query_spans = plan.query_spans(rows, PaddedKVFragment, sum(row.n_tokens for row in rows))
    plan.load_prefixes = lambda: load_prefixes(query_spans, store)
    return plan
