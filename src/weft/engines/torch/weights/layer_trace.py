"""Trace one small forward: which linear layers run, and with which inputs."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .packed import version_of

_log = logging.getLogger("weft.engines.torch")
_IDS = (5, 9, 2, 7)
_ATTRIBUTE = "weft_trace"


class _Call(NamedTuple):
    """A layer and its input. version: changes if the input is written to."""

    layer: nn.Module
    x: Tensor  # kept alive, so that its id stays unique
    version: tuple[int, int]


class _Trace:
    """Recorded calls in order, and the ids of layers whose weights other code read."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.read: set[int] = set()
        self.inside: nn.Module | None = None


class _Tracing(nn.Module):
    """Mixin of a layer that records its calls, and that other code reads its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Record the call and its input, then run the layer."""
        trace: _Trace = self.__dict__[_ATTRIBUTE]
        trace.calls.append(_Call(self, x, version_of(x)))
        trace.inside = self
        try:
            out: Tensor = super().forward(x)
        finally:
            trace.inside = None
        return out

    def __getattr__(self, name: str) -> Any:
        trace: _Trace = self.__dict__[_ATTRIBUTE]
        if name == "weight" and trace.inside is not self:
            trace.read.add(id(self))
        return super().__getattr__(name)


class _TracedLinear(_Tracing, nn.Linear):
    """A linear layer that records its calls."""


class _TracedConv1D(_Tracing, Conv1D):
    """GPT-2's kind of linear layer, recording its calls."""


_TRACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _TracedLinear,
    Conv1D: _TracedConv1D,
}


def called_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> set[int]:
    """Return the ids of layers that run for text, and whose weights no other code reads.

    Layers for images do not run. A model that multiplies with a layer's weight itself depends on
    its memory layout. Empty if the forward fails.
    """
    trace = _trace(model, layers)
    return {id(call.layer) for call in trace.calls} - trace.read


def shared_input_groups(
    model: PreTrainedModel, layers: Sequence[nn.Linear]
) -> list[list[nn.Linear]]:
    """Return groups of two or more layers that get the same input tensor, in order.

    Each layer runs once, and the tensor is not written to before the last one.
    """
    trace = _trace(model, layers)
    n_calls = Counter(id(call.layer) for call in trace.calls)
    groups: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for call in trace.calls:
        if n_calls[id(call.layer)] == 1:
            groups[id(call.x), *call.version].append(call.layer)
    return [alike for alike in groups.values() if len(alike) > 1]


@torch.no_grad()  # not inference mode: a model may keep tensors of this forward
def _trace(model: PreTrainedModel, layers: Sequence[nn.Module]) -> _Trace:
    """Run a few tokens, and return the trace; an empty one if that fails."""
    trace = _Trace()
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.__dict__[_ATTRIBUTE] = trace
        layer.__class__ = _TRACED[kind]
    try:
        n_vocab = model.get_input_embeddings().num_embeddings
        ids = torch.tensor([[token % n_vocab for token in _IDS]], device=model.device)
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        _log.debug("%s fails on a first forward: %r", type(model).__name__, error)
        return _Trace()
    else:
        return trace
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            del layer.__dict__[_ATTRIBUTE]
