"""What an owner puts in the place of a parameter, a buffer or a module: an engine would not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Parts:
    """The parameters, saved buffers and modules of a model as they are now.

    An engine's copy shares all but the modules. Buffers that are not saved are the model's own to
    replace, as those of rotary embeddings are; see `Unsaved`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], str, Any, str]] = []
        for path, module in model.named_modules():
            unsaved = module._non_persistent_buffers_set
            for parts in (module._parameters, module._buffers, module._modules):
                for name, part in parts.items():
                    if parts is not module._buffers or name not in unsaved:
                        self._held.append((parts, name, part, f"{path}.{name}".lstrip(".")))

    def replaced(self) -> str:
        """Return the name of one that is another by now, "" where none is: 0.05 µs each."""
        for parts, name, part, path in self._held:
            if parts.get(name) is not part:
                return path
        return ""


class Unsaved:
    """The numbers that a model holds beside its weights, as rotary frequencies, as they are now.

    An engine's copy has its own, so that it alone keeps their digits where the owner converts the
    model, and turns it back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = next((p for p in model.parameters() if p.is_floating_point()), None)
        self._keeping = None if self._watched is None else self._watched.detach()  # and its place
        self._held: list[tuple[dict[str, Any], str, Tensor, str]] = []
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                is_unsaved = name in module._non_persistent_buffers_set
                if is_unsaved and buffer is not None and buffer.is_floating_point():
                    self._held.append((module._buffers, name, buffer, f"{path}.{name}".lstrip(".")))

    def rounded(self) -> str:
        """Return the name of one that has other numbers since the model was converted, or moved; ""
        where none has: they are looked at where the first parameter is not where it was.
        """
        watched, keeping = self._watched, self._keeping
        if watched is None or keeping is None or watched.data_ptr() == keeping.data_ptr():
            return ""
        for buffers, name, was, path in self._held:
            now = buffers.get(name)
            if now is not was and (now is None or not _is_equal(now, was)):
                return path
        self._keeping = watched.detach()
        return ""


@torch.inference_mode()
def _is_equal(now: Tensor, was: Tensor) -> bool:
    return now.dtype == was.dtype and torch.equal(now.to(was.device), was)
