"""Which linear layers a model's forward goes through, seen in one small plain forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_log = logging.getLogger("weft.engines.torch")
_IDS = (5, 9, 2, 7)


class _Watching(nn.Module):
    """Notes that a layer is called, and that others look at its weight."""

    is_called = False
    is_read = False
    is_inside = False

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__.update(is_called=True, is_inside=True)
        try:
            out: Tensor = super().forward(x)
        finally:
            self.__dict__["is_inside"] = False
        return out

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self.is_inside:
            self.__dict__["is_read"] = True
        return super().__getattr__(name)


class _WatchedLinear(_Watching, nn.Linear):
    pass


class _WatchedConv1D(_Watching, Conv1D):
    pass


_WATCHED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _WatchedLinear,
    Conv1D: _WatchedConv1D,
}


@torch.no_grad()  # what a model keeps of it is to be tensors like any other
def only_called(model: PreTrainedModel, layers: Sequence[nn.Module]) -> set[int]:
    """Return the ids of those layers that text goes through, and whose weights nobody else reads.

    Layers of a part that reads images are not called; a model that multiplies with a layer's
    weight by itself counts on how it lies. None of them where the forward fails.
    """
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.__class__ = _WATCHED[kind]
    try:
        n_vocab = model.get_input_embeddings().num_embeddings
        ids = torch.tensor([[token % n_vocab for token in _IDS]], device=model.device)
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        _log.debug("%s fails on a first forward: %r", type(model).__name__, error)
        return set()
    else:
        return {id(each) for each in layers if _is_only_called(each)}
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            for note in ("is_called", "is_read", "is_inside"):
                layer.__dict__.pop(note, None)


def _is_only_called(layer: nn.Module) -> bool:
    notes = layer.__dict__
    return bool(notes.get("is_called")) and not notes.get("is_read")
