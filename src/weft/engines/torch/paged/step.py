"""Steps of the paged backend: new tokens are stored first, and attended to like all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from ....errors import ConfigError
from ...base import Fragment, FutureTokens, Row, Usage
from ..kv_backend import (
    Activation,
    AttentionSpec,
    AttentionStep,
    MoEWeights,
    RotaryArgs,
    RotaryLayout,
    RouterSpec,
)
from ..layout import Layout
from .attention_metadata import TreeAttentionMetadata
from .elementwise import (
    act_and_mul,
    apply_rotary,
    rms_norm,
    rotary_and_store_kv,
    rotary_angles,
    store,
    supports_act_and_mul,
    supports_rms_norm,
    supports_rotary,
)
from .experts import fused_experts, supports_fused_experts
from .kernel import BROAD, TILES, WIDE, Work, has_broad, is_interpreted, tree_attention
from .pool import PagedFragment, SlotPool, as_paged
from .routers import select_experts, supports_routing

# Larger tiles of float32 do not fit a processor of sm_90.
_LARGEST_IN_FLOAT32 = 256
_SMALL_CHUNK = 16  # slots; the load check's long path has 40 such chunks
_MAX_MOVED = 4096  # moved lists that an unused plan may accumulate


class PagedBackend(SlotPool):
    """The paged KV pool with its steps."""

    def __init__(self, layout: Layout, largest: int = BROAD) -> None:
        """largest: rows of the largest tiles, one of TILES; BROAD does not support all head sizes.

        Raises: ConfigError for shapes that the kernels do not support.
        """
        _check_layout(layout)
        super().__init__(layout)
        self._largest = largest if largest < BROAD or has_broad(layout) else WIDE
        self._plan: TreeAttentionMetadata | None = None
        self._temporary: list[PagedFragment] = []  # of rows that keep nothing
        self.groups: set[int] = set()  # query heads a KV head, of every kind of layer

    @contextmanager
    def small_chunks(self) -> Iterator[None]:
        """Make steps in a block split paths into many short chunks, as long paths are."""
        self._drop_plan()
        self.chunk = _SMALL_CHUNK
        try:
            yield
        finally:
            self.chunk = None
            self._drop_plan()

    def with_smaller_tiles(self) -> PagedBackend | None:
        """Return an empty backend with smaller tiles; None if there are none."""
        smaller = [n_rows for n_rows in TILES if n_rows < self._largest]
        return PagedBackend(self.layout, max(smaller)) if smaller else None

    def start_step(self, rows: Sequence[Row]) -> PagedStep:
        """Return a step of these rows; the plan of the last step is updated if it fits."""
        self.free_temporary()
        self._copies.release()
        fragments, sizes = [row.kv_out for row in rows], _sizes(rows)
        if max(sizes, default=0) != 1 or None in fragments:
            plan = self._new_plan(rows, sizes)
            plan.drop()
            if self._plan is None or len(self.table.moved) > _MAX_MOVED:
                self._drop_plan()
            return PagedStep(rows, plan, self)
        if not self._update_plan(rows, fragments):
            self._drop_plan()
            self._plan = self._new_plan(rows, sizes)
            self.table.moved.clear()
        assert self._plan is not None
        return PagedStep(rows, self._plan, self)

    def _update_plan(self, rows: Sequence[Row], fragments: Sequence[Fragment | None]) -> bool:
        """Return True if the cached plan serves these rows now."""
        try:
            return self._plan is not None and self._plan.update(rows, fragments)
        except BaseException:
            self._drop_plan()  # partly updated
            raise

    def _drop_plan(self) -> None:
        """Release the cached plan and its regions of the table."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.drop()
        self.table.moved.clear()

    def _new_plan(self, rows: Sequence[Row], sizes: list[int]) -> TreeAttentionMetadata:
        """Create the metadata of these rows. sizes: number of tokens of each row."""
        lists = [PagedFragment() if row.kv_out is None else as_paged(row.kv_out) for row in rows]
        self._temporary = [kv for row, kv in zip(rows, lists, strict=True) if row.kv_out is None]
        for kv, n in zip(lists, sizes, strict=True):
            if kv.length + n > len(kv.slots):
                self.reserve(kv, n)
        return TreeAttentionMetadata(rows, sizes, lists, self, self._largest)

    def free_temporary(self) -> None:
        """Free the slots of rows that keep no KV: their step has ended or failed."""
        passing, self._temporary = self._temporary, []
        for kv in passing:
            self.free(kv)

    def usage(self) -> Usage:
        """Return the memory in use, without the slots of rows that keep no KV."""
        n_slots, n_bytes = super().usage()  # other threads may call this during a step
        n_temporary = sum(len(kv.slots) for kv in self._temporary)
        return Usage(n_slots, n_bytes - n_temporary * self.layout.slot_bytes)

    def clear(self) -> None:
        """Remove all fragments and the cached plan."""
        self._drop_plan()
        self._temporary = []
        super().clear()


class PagedStep(AttentionStep):
    """One forward over the paged pool; implements `AttentionStep`'s operations with Triton kernels.

    In each layer it stores the new slots, then attends with one kernel per tile class, then merges
    the parts of each token.
    """

    has_fused_ops = True

    def __init__(
        self, rows: Sequence[Row], plan: TreeAttentionMetadata, memory: PagedBackend
    ) -> None:
        self.rows, self._plan, self._memory = rows, plan, memory
        self.order, self.starts = plan.order, plan.starts

    # Replayed steps need neither of these: the runner copies their int32 forms into its buffers.

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the packed tokens: int64 [T]."""
        return self._plan.positions.long()

    @cached_property
    def slots(self) -> Tensor:
        """Slot of each packed token: int64 [T]."""
        return self._plan.slots.long()

    @property
    def short_positions(self) -> Tensor:
        """The same as `positions`, int32 [T]."""
        return self._plan.positions

    @property
    def short_slots(self) -> Tensor:
        """The same as `slots`, int32 [T]."""
        return self._plan.slots

    def work(self, group: int) -> Work:
        """Return the work items for `group` query heads per KV head."""
        self._memory.groups.add(group)
        return self._plan.work(group)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Store new keys and values, and attend; see `AttentionStep.attend`."""
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        store(key[0], value[0], self.slots, keys, values)
        work = self.work(query.shape[1] // key.shape[1])
        return tree_attention(query[0], keys, values, work, spec)[None]

    def attend_qkv(
        self,
        layer: int,
        heads: Tensor,
        rotary: RotaryArgs,
        spec: AttentionSpec,
    ) -> Tensor:
        """Apply norms and rotary embedding, store, and attend; see `AttentionStep.attend_qkv`."""
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        work = self.work(rotary.n_queries // keys.shape[1])
        query = rotary_and_store_kv(heads, rotary, self.slots, keys, values)
        return tree_attention(query.transpose(0, 1), keys, values, work, spec)

    def rotary_angles(
        self, positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
    ) -> Tensor:
        """Return scaled cosines, then sines: [T, D]."""
        return rotary_angles(positions, frequencies, scaling, dtype)

    def supports_rotary(self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int) -> bool:
        """Return True if `apply_rotary` supports these shapes and strides."""
        return supports_rotary(heads, cos, sin, axis)

    def apply_rotary(
        self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout
    ) -> tuple[Tensor, ...]:
        """Apply rotary embedding; see `AttentionStep.apply_rotary`."""
        return apply_rotary(heads, cos, sin, axis, pairs)

    def supports_rms_norm(self, x: Tensor, weight: Tensor | None) -> bool:
        """Return True if `rms_norm` supports x [..., E] and weight [E]."""
        return supports_rms_norm(x, weight)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        shift: float = 0.0,
        *,
        is_centred: bool = False,
    ) -> Tensor:
        """Return the RMS norm of rows; see `AttentionStep.rms_norm`."""
        return rms_norm(x, weight, eps, shift, is_centred=is_centred)

    def supports_act_and_mul(self, gate: Tensor, up: Tensor) -> bool:
        """Return True if `act_and_mul` supports the shapes and strides of `gate` and `up`."""
        return supports_act_and_mul(gate, up)

    def act_and_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up."""
        return act_and_mul(gate, up, activation)

    def supports_routing(self, logits: Tensor, bias: Tensor | None, router: RouterSpec) -> bool:
        """Return True if `select_experts` supports logits [T, X] and bias [X]."""
        return supports_routing(logits, bias, router)

    def select_experts(
        self, logits: Tensor, bias: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        """Return the selected experts and their weights, [T, k] each."""
        return select_experts(logits, bias, router)

    def supports_fused_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights
    ) -> bool:
        """Return True if `fused_experts` supports these and is faster than the module."""
        return supports_fused_experts(x, chosen, shares, experts)

    def fused_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights
    ) -> Tensor:
        """Return the weighted sum of the selected experts' outputs: [T, E]."""
        return fused_experts(x, chosen, shares, experts)

    def commit(self) -> None:
        """Keep the new slots: the rows' fragments grow."""
        if self._plan.is_steady:
            self._memory.grow_all_by_one(self._plan.lists)
            return
        for row, kv in zip(self.rows, self._plan.lists, strict=True):
            if row.kv_out is not None:
                self._memory.grew(kv, row.n_tokens)
        self._memory.free_temporary()


def _sizes(rows: Sequence[Row]) -> list[int]:
    """Return the number of tokens of each row."""
    tokens = [row.tokens for row in rows]
    if FutureTokens not in set(map(type, tokens)):
        return list(map(len, tokens))
    return [1 if type(each) is FutureTokens else len(each) for each in tokens]


def _check_layout(layout: Layout) -> None:
    """Raise ConfigError for layouts that the kernels do not support.

    These are bfloat16 in Triton's interpreter, whose products are wrong, and float32 heads that
    exceed the tiles on a GPU.
    """
    dtypes = {dtype for shape, _ in layout.groups for dtype in shape[-2:]}
    if is_interpreted():
        if torch.bfloat16 in dtypes:
            raise ConfigError(
                "Triton's interpreter multiplies bfloat16 wrongly; load the model with dtype"
                " 'float32' or 'float16', or leave kv out"
            )
        return
    largest = max([max(shape.key_dim, shape.value_dim) for shape, _ in layout.groups], default=0)
    if torch.float32 in dtypes and largest > _LARGEST_IN_FLOAT32:
        raise ConfigError(
            f"heads have {largest} numbers, and kv='paged' takes {_LARGEST_IN_FLOAT32} at most in"
            " float32; load the model with dtype 'bfloat16' or 'float16', or leave kv out"
        )
