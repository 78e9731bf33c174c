"""The seam between the torch engine and where its KV lies: a memory, and one step over it.

`padded` has settled fragments in blocks and live tails side by side in banks, `paged` lists of
slots of a pool; `memories` chooses. The engine, the hook and the fused decoders know no more of
them than stands here.
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

# What gates go through: GELU is by the error function, or by a tanh.
Activation = Literal["silu", "gelu", "gelu_tanh"]


class AttentionSpec(NamedTuple):
    """How one layer attends, as its attention module says. scale: above 0."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


class RotaryArgs(NamedTuple):
    """What is done to heads before they attend: normed where there are weights for it, then turned.

    n_queries: how many of the heads are queries; keys and values share the rest. angles: their
    cosines, then their sines, [T, D]. query_norm, key_norm: [D]; eps: of both.
    """

    n_queries: int
    angles: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


class RotaryLayout(NamedTuple):
    """Which numbers of a head turn with each other: of the first n, those of its halves, or
    neighbours. every: so many numbers, beside each other, have one cosine.
    """

    n: int
    are_neighbours: bool = False
    every: int = 1


class GatedActivation(NamedTuple):
    """What is done to gates and ups: activation(gate) * (up + shift).

    limit: gates are at most that, ups that far from zero at most; None: as they are. slope: of
    "silu", which is gate * sigmoid(slope * gate). are_neighbours: a gate and its up are beside each
    other; else gates are the first half.
    """

    activation: Activation
    limit: float | None = None
    slope: float = 1.0
    shift: float = 0.0
    are_neighbours: bool = False


class MoEWeights(NamedTuple):
    """A mixture's experts, and what each does: down(gate of up) or down(between(up)).

    up: [X, 2 I, E] with a gate; else [X, I', E]. down: [X, E, I]. Either may lie the other way
    round. Biases [X, ·]. between: makes rows of I of rows of I'. is_grouped: the module's own code
    is a library's product over groups of rows.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: GatedActivation | None = None
    between: Callable[[Tensor], Tensor] | None = None
    is_grouped: bool = False


class ExpertGroups(NamedTuple):
    """Experts in groups of the same size, beside each other; only those of some groups are chosen.

    n_kept: of how many. by: the two largest scores in it, added, or the largest.
    """

    n: int
    n_kept: int
    by: Literal["two", "one"]


class RouterSpec(NamedTuple):
    """How experts are chosen by logits, and what their shares are.

    top_k: those of the largest scores are chosen. by_logits: scores are logits, else what function
    makes of them; biases may be added. A share is what function makes of the logit, a softmax over
    all experts, divided by the sum of the chosen if is_normed, times scale. dtype: of shares.
    """

    top_k: int
    function: Literal["softmax", "sigmoid"]
    is_normed: bool
    by_logits: bool
    groups: ExpertGroups | None = None
    scale: float = 1.0
    dtype: torch.dtype = torch.float32


class AttentionStep(ABC):
    """One forward over a memory: all tokens of its rows, packed into one sequence.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    positions: of every packed token: int64 [T] on the device, for this step alone. turns: whether
    it has `angles`, `attend_turned`, `turned`, `normed`, `gated`, `chosen` and `mixed`, which do
    in a kernel or a few what PyTorch does in many.
    """

    turns = False

    order: list[int]
    starts: list[int]
    positions: Tensor

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Let one layer's queries meet what they may see, layers in turn; take its new slots.

        query: [1, H, T, D]; key, value: [1, K, T, …]. Returns [1, T, H, Dv].
        """

    def angles(
        self, positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
    ) -> Tensor:
        """Return cosines and sines of positions [T] times frequencies [D / 2], float32 both, scaled
        and then rounded: [T, D], a half each.
        """
        raise NotImplementedError

    def attend_turned(
        self,
        layer: int,
        heads: Tensor,
        turn: RotaryArgs,
        spec: AttentionSpec,
    ) -> Tensor:
        """Turn heads, then do as `attend`: [T, H + 2 K, D], side by side: queries, keys, values.

        Returns [T, H, D].
        """
        raise NotImplementedError

    def supports_rotary(self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int) -> bool:
        """Whether `turned` takes these: cosines [1, T, …], numbers of a head beside each other."""
        raise NotImplementedError

    def turned(
        self, heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout
    ) -> tuple[Tensor, ...]:
        """Turn one or two tensors of heads.

        heads: [1, H, T, D] each with axis 1, [1, T, H, D] with 2. cos, sin: [1, T, n], or n / 2.
        """
        raise NotImplementedError

    def supports_rms_norm(self, x: Tensor, weight: Tensor | None) -> bool:
        """Whether `normed` takes x, [..., E], and weight, [E]: numbers of a row beside each other,
        two axes of rows at most.
        """
        raise NotImplementedError

    def normed(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        shift: float = 0.0,
        *,
        is_centred: bool = False,
    ) -> Tensor:
        """Return the root mean square norm of rows, less their mean if is_centred, times weight +
        shift, if there is one: contiguous, as x.
        """
        raise NotImplementedError

    def supports_gating(self, gate: Tensor, up: Tensor) -> bool:
        """Whether `gated` takes these: [T, I] or [1, T, I] both, a token's numbers beside each
        other.
        """
        raise NotImplementedError

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up: contiguous."""
        raise NotImplementedError

    def supports_routing(self, logits: Tensor, bias: Tensor | None, router: RouterSpec) -> bool:
        """Whether `chosen` takes these: logits [T, X], and biases, [X]."""
        raise NotImplementedError

    def chosen(
        self, logits: Tensor, bias: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        """Return the experts that a router chooses for each token, int64, those of the largest
        scores first, and their shares: [T, k] both.
        """
        raise NotImplementedError

    def supports_fused_experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights
    ) -> bool:
        """Whether `mixed` takes these, and is what should: x [T, E], chosen and shares [T, k]."""
        raise NotImplementedError

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights) -> Tensor:
        """Return the sum of what a token's chosen experts make of it, each times its share: [T, E].

        Experts that are none, of numbers below 0 or above the last, add nothing.
        """
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """The forward went well: its slots stay, and the fragments of its rows have grown.

        A step without a commit has changed no fragment's length.
        """


class KVBackend(Fragments):
    """The fragments of one engine, and the steps over them."""

    layout: Layout

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> AttentionStep:
        """Return the step that runs these rows. Raises: ConfigError for what are no fragments."""

    @abstractmethod
    def views(self, fragment: Fragment, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return a fragment's first slots, keys and values, a layer each: [1, K, length, D].

        They may be copies.
        """

    def cut_small(self) -> AbstractContextManager[None]:
        """Have steps inside a block cut what a row meets into many parts, as long paths are."""
        return nullcontext()

    def give_back(self) -> None:
        """Give memory back that is kept for later, where no fragment has any of it."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""
