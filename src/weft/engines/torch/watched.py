"""Which linear layers a model's forward goes through, seen in one small plain forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

_log = logging.getLogger("weft.engines.torch")
_IDS = (5, 9, 2, 7)


class _Watched(nn.Linear):
    """A linear layer that notes that it is called, and that others look at its weight."""

    is_called = False
    is_read = False

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["is_called"] = True
        return F.linear(x, self._parameters["weight"], self._parameters["bias"])

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.__dict__["is_read"] = True
        return super().__getattr__(name)


@torch.inference_mode()
def only_called(model: PreTrainedModel, layers: Sequence[nn.Linear]) -> set[int]:
    """Return the ids of those layers that text goes through, and whose weights nobody else reads.

    Layers of a part that reads images are not called; a model that multiplies with a layer's
    weight by itself counts on how it lies. None where the forward fails: others say why.
    """
    n_vocab = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([[token % n_vocab for token in _IDS]], device=model.device)
    for layer in layers:
        layer.__class__ = _Watched
    try:
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        _log.debug("%s fails on a first forward: %r", type(model).__name__, error)
        return set()
    else:
        return {id(each) for each in layers if _is_only_called(each)}
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            for note in ("is_called", "is_read"):
                layer.__dict__.pop(note, None)


def _is_only_called(layer: nn.Linear) -> bool:
    notes = layer.__dict__
    return bool(notes.get("is_called")) and not notes.get("is_read")
