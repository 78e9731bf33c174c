"""Which linear layers a model's forward goes through, and what they are given, seen in one small
plain forward.
"""

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
_WATCH = "weft_watch"


class _Call(NamedTuple):
    """A layer, and what it was given: `mark` is another once somebody has written there."""

    layer: nn.Module
    x: Tensor  # held, so that no other has its id
    mark: tuple[int, int]


class _Watch:
    """What was seen: calls in turn, and the ids of layers whose weights others looked at."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.read: set[int] = set()
        self.inside: nn.Module | None = None


class _Watching(nn.Module):
    """Notes that a layer is called, and that others look at its weight."""

    def forward(self, x: Tensor) -> Tensor:
        watch: _Watch = self.__dict__[_WATCH]
        watch.calls.append(_Call(self, x, version_of(x)))
        watch.inside = self
        try:
            out: Tensor = super().forward(x)
        finally:
            watch.inside = None
        return out

    def __getattr__(self, name: str) -> Any:
        watch: _Watch = self.__dict__[_WATCH]
        if name == "weight" and watch.inside is not self:
            watch.read.add(id(self))
        return super().__getattr__(name)


class _WatchedLinear(_Watching, nn.Linear):
    pass


class _WatchedConv1D(_Watching, Conv1D):
    pass


_WATCHED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _WatchedLinear,
    Conv1D: _WatchedConv1D,
}


def called_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> set[int]:
    """Return the ids of those layers that text goes through, and whose weights nobody else reads.

    Layers of a part that reads images are not called; a model that multiplies with a layer's
    weight by itself counts on how it lies. None of them where the forward fails.
    """
    watch = _watched(model, layers)
    return {id(call.layer) for call in watch.calls} - watch.read


def shared_input_groups(
    model: PreTrainedModel, layers: Sequence[nn.Linear]
) -> list[list[nn.Linear]]:
    """Return those layers, two or more, that are given one and the same tensor, in their order.

    Each is called once, and nobody writes to the tensor before the last one is.
    """
    watch = _watched(model, layers)
    n_calls = Counter(id(call.layer) for call in watch.calls)
    found: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for call in watch.calls:
        if n_calls[id(call.layer)] == 1:
            found[id(call.x), *call.mark].append(call.layer)
    return [alike for alike in found.values() if len(alike) > 1]


@torch.no_grad()  # what a model keeps of it is to be tensors like any other
def _watched(model: PreTrainedModel, layers: Sequence[nn.Module]) -> _Watch:
    """Run a few tokens, and return what layers were given; nothing where that fails."""
    watch = _Watch()
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.__dict__[_WATCH] = watch
        layer.__class__ = _WATCHED[kind]
    try:
        n_vocab = model.get_input_embeddings().num_embeddings
        ids = torch.tensor([[token % n_vocab for token in _IDS]], device=model.device)
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        _log.debug("%s fails on a first forward: %r", type(model).__name__, error)
        return _Watch()
    else:
        return watch
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            del layer.__dict__[_WATCH]
