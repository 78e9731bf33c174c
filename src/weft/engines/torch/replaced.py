"""What an owner puts in the place of a parameter or a module, which an engine would never see."""

from __future__ import annotations

from typing import Any

from torch import nn


class Parts:
    """The parameters and modules of a model as they are now: an engine's copy shares the former."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], str, Any, str]] = []
        for path, module in model.named_modules():
            for parts in (module._parameters, module._modules):
                for name, part in parts.items():
                    self._held.append((parts, name, part, f"{path}.{name}".lstrip(".")))

    def replaced(self) -> str:
        """Return the name of one that is another by now, "" where none is: 0.05 µs each."""
        for parts, name, part, path in self._held:
            if parts.get(name) is not part:
                return path
        return ""
