"""A model that its owner handed over, as it was then: an engine runs a copy of its modules."""

from __future__ import annotations

from torch import nn

from .adapted import Switches
from .listeners import Hooked
from .replaced import Parts, Unsaved


class Owned:
    """What an owner may change in a model without an engine's copy of it changing, too.

    shares_weights: whether the copy has the owner's own parameters.
    """

    def __init__(self, model: nn.Module, *, shares_weights: bool) -> None:
        self._parts = Parts(model) if shares_weights else None
        self._unsaved = Unsaved(model) if shares_weights else None
        self._switches = Switches(model)
        self._hooked = Hooked(model)

    def replaced(self) -> str:
        """Return what is another than it was, as a sentence's beginning; "" if nothing is."""
        if self._parts is not None and (path := self._parts.replaced()):
            return f"{path} of the model was replaced by another"
        if self._unsaved is not None and (path := self._unsaved.rounded()):
            return f"{path} of the model was given other numbers (it was converted and turned back)"
        if path := self._switches.switched():
            return f"the PEFT adapters of {path} were switched, scaled, merged or unmerged"
        if (hooked := self._hooked.changed()) is not None:
            return f"the hooks on {hooked or 'the model'} became others"
        return ""
