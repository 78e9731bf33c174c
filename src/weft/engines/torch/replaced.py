"""What an owner puts in the place of a parameter, a buffer or a module: an engine would not see."""

from __future__ import annotations

from typing import Any

from torch import nn


class Parts:
    """The parameters, saved buffers and modules of a model as they are now.

    An engine's copy shares all but the modules. Buffers that are not saved are the model's own to
    replace, as those of rotary embeddings are.
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
