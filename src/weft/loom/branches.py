"""Branches: the children that one growing call made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .heddle import Heddle

# Branches that a representation shows before it says how many more there are.
_SCREEN = 20


class Branches(list["Heddle"]):
    """The children a call made, in branch order; `skipped` are terminal nodes left alone."""

    def __init__(self, made: Iterable[Heddle] = (), *, skipped: Iterable[Heddle] = ()) -> None:
        super().__init__(made)
        self.skipped: list[Heddle] = list(skipped)

    def __repr__(self) -> str:
        lines = [f"[{at}] {node.mean_p:.2f}  {node!r}" for at, node in enumerate(self[:_SCREEN])]
        lines += [f"… {len(self) - _SCREEN} more"] * (len(self) > _SCREEN)
        lines += [f"{len(self.skipped)} terminal nodes left alone"] * bool(self.skipped)
        return "\n".join(lines) or "no branches"

    def _repr_html_(self) -> str:
        from ..viz import cards

        return cards.branches(self)
