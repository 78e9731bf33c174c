"""The interface between the torch engine and its KV storage: `KVBackend` and `AttentionStep`.

`padded` keeps finished fragments in blocks and growing tails in padded buffers. `paged` keeps slots
of a pool and uses Triton kernels. `select_backend` chooses one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..base import Fragment, Fragments, Row
from .layout import Layout

# "gelu" uses the error function, "gelu_tanh" its tanh approximation.
Activation = Literal["silu", "gelu", "gelu_tanh"]


class AttentionSpec(NamedTuple):
    """Parameters of one layer's attention: scale, soft-cap, sliding window and attention sinks."""

    scale: float  # factor of the logits, above 0
    softcap: float | None = None
    window: int | None = None  # tokens that a query sees, itself included; None: all
    sinks: Tensor | None = None  # logits of attention sinks, [H]


class RotaryArgs(NamedTuple):
    """Arguments of `AttentionStep.attend_qkv`: query and key norms, and rotary angles."""

    n_queries: int  # query heads; keys and values share the other heads equally
    rotary_angles: Tensor  # cosines, then sines: [T, D]
    query_norm: Tensor | None = None  # RMS norm weights, [D]
    key_norm: Tensor | None = None
    eps: float = 0.0  # of both norms


class RotaryLayout(NamedTuple):
    """Pairing of a head's dimensions for rotary embedding: which of them are rotated together."""

    n: int  # leading dimensions that are rotated
    are_neighbours: bool = False  # pairs are (0, 1), (2, 3), …; else dimension i and i + n / 2
    every: int = 1  # adjacent dimensions that share one cosine


class GatedActivation(NamedTuple):
    """A gated activation: `activation(gate) * (up + shift)`."""

    activation: Activation
    limit: float | None = None  # clamps gate to at most limit, and up to ±limit
    slope: float = 1.0  # of "silu": gate * sigmoid(slope * gate)
    shift: float = 0.0
    are_neighbours: bool = False  # gate and up alternate; else gates are the first half


class MoEWeights(NamedTuple):
    """Weights of one mixture layer's experts: `down(gated up)`, or `down(between(up))`."""

    # [X, 2 I, E] with a gate, else [X, I', E]. `up` and `down` may also be stored transposed.
    up: Tensor
    # [X, E, I].
    down: Tensor
    # [X, 2 I] or [X, I'].
    up_bias: Tensor | None = None
    # [X, E].
    down_bias: Tensor | None = None
    # The gated activation; None: `between` is used.
    gate: GatedActivation | None = None
    # Maps rows [n, I'] to rows [n, I].
    between: Callable[[Tensor], Tensor] | None = None
    # The module itself uses a library's grouped matrix product.
    is_grouped: bool = False


class ExpertGroups(NamedTuple):
    """Grouped routing: adjacent groups of equal size, of which only the best are used."""

    n: int  # groups
    n_kept: int  # groups whose experts may be selected
    by: Literal["two", "one"]  # score of a group: sum of its two largest scores, or the largest


class RouterSpec(NamedTuple):
    """Rule by which a mixture's router selects experts for a token and weights them."""

    # Number of experts a token.
    top_k: int
    # Maps logits to weights.
    function: Literal["softmax", "sigmoid"]
    # Divide the weights by the sum over the selected experts.
    is_normed: bool
    # Rank experts by logits, else by the function of the logits. Biases are added to either.
    by_logits: bool
    # None: no groups.
    groups: ExpertGroups | None = None
    # Factor of the weights.
    scale: float = 1.0
    # Of the weights.
    dtype: torch.dtype = torch.float32


class AttentionStep(ABC):
    """One forward over a KV backend. Tokens of all rows are packed into one sequence of T tokens.

    If `has_fused_ops`, the step has one or two kernels for each operation below: `rotary_angles`,
    `attend_qkv`, `apply_rotary`, `rms_norm`, `act_and_mul`, `select_experts`, `fused_experts`.
    """

    has_fused_ops = False

    order: list[int]  # row numbers in packed order
    starts: list[int]  # packed index of each row's first token, by row number
    positions: Tensor  # of the packed tokens: int64 [T] on the device, valid for this step

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Store a layer's new keys and values, and attend. Layers must come in order.

        query: [1, H, T, D]; key, value: [1, K, T, …]. Returns [1, T, H, Dv].
        """

    def rotary_angles(
        self, positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
    ) -> Tensor:
        """Return scaled cosines and sines of positions [T] times frequencies [D / 2]: [T, D].

        Computed in float32 and then rounded; the first half of each row is the cosines.
        """
        raise NotImplementedError

    def attend_qkv(
        self, layer: int, heads: Tensor, rotary: RotaryArgs, spec: AttentionSpec
    ) -> Tensor:
        """Apply norms and rotary embedding to packed heads, then do as `attend`.

        heads: [T, H + 2 K, D]: queries, keys, values. Returns [T, H, D].
        """
        raise NotImplementedError

    def supports_rotary(self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int) -> bool:
        """Return True if `apply_rotary` supports these shapes and strides."""
        raise NotImplementedError

    def apply_rotary(
        self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout
    ) -> tuple[Tensor, ...]:
        """Apply rotary embedding to one or two tensors of heads.

        heads: [1, H, T, D] each if axis is 1, [1, T, H, D] if 2. cos, sin: [1, T, n], or n / 2.
        """
        raise NotImplementedError

    def supports_rms_norm(self, x: Tensor, weight: Tensor | None) -> bool:
        """Return True if `rms_norm` supports x [..., E] and weight [E].

        Rows must be contiguous, and have at most two strided axes.
        """
        raise NotImplementedError

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        shift: float = 0.0,
        *,
        is_centred: bool = False,
    ) -> Tensor:
        """Return the RMS norm of rows times (weight + shift), contiguous, in the shape of x.

        is_centred: subtract each row's mean first.
        """
        raise NotImplementedError

    def supports_act_and_mul(self, gate: Tensor, up: Tensor) -> bool:
        """Return True if `act_and_mul` supports these: [T, I] or [1, T, I], contiguous rows."""
        raise NotImplementedError

    def act_and_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, contiguous."""
        raise NotImplementedError

    def supports_routing(self, logits: Tensor, bias: Tensor | None, router: RouterSpec) -> bool:
        """Return True if `select_experts` supports logits [T, X] and bias [X]."""
        raise NotImplementedError

    def select_experts(
        self, logits: Tensor, bias: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        """Return the selected experts of each token, best first, and their weights.

        Expert ids are int64; both are [T, k].
        """
        raise NotImplementedError

    def supports_fused_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights
    ) -> bool:
        """Return True if `fused_experts` supports these and is faster than the module.

        x: [T, E]; chosen, shares: [T, k].
        """
        raise NotImplementedError

    def fused_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights
    ) -> Tensor:
        """Return the weighted sum of the selected experts' outputs: [T, E].

        Expert ids below 0 or beyond the last expert add nothing.
        """
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Keep the new slots: the rows' fragments grow. A step that failed is never committed."""


class KVBackend(Fragments):
    """KV storage of one engine: fragments, and steps over them."""

    layout: Layout

    @abstractmethod
    def start_step(self, rows: Sequence[Row]) -> AttentionStep:
        """Return a step that runs these rows. Raises: ConfigError for foreign fragments."""

    @abstractmethod
    def views(self, fragment: Fragment, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of a fragment's first slots, by layer: [1, K, length, D] each.

        They may be copies.
        """

    def small_chunks(self) -> AbstractContextManager[None]:
        """Make steps in a block split paths into many short chunks, as long paths are."""
        return nullcontext()

    def release_unused(self) -> None:
        """Release memory that is reserved for later, if no fragment uses it."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all fragments."""
