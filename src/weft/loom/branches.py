"""Branches: the children that one growing call made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..errors import ConstraintError
    from .heddle import Heddle

# Branches that a representation shows before it says how many more there are.
_SCREEN = 20


class Branches(list["Heddle"]):
    """The children a call made, in branch order.

    skipped: terminal nodes left alone. failed: why branches are missing that their constraint left
    no token; a call of which no branch is left raises instead.
    """

    def __init__(
        self,
        made: Iterable[Heddle] = (),
        *,
        skipped: Iterable[Heddle] = (),
        failed: Iterable[ConstraintError] = (),
    ) -> None:
        super().__init__(made)
        self.skipped: list[Heddle] = list(skipped)
        self.failed: list[ConstraintError] = list(failed)

    def __repr__(self) -> str:
        lines = [f"[{at}] {node.mean_p:.2f}  {node!r}" for at, node in enumerate(self[:_SCREEN])]
        lines += [f"… {len(self) - _SCREEN} more"] * (len(self) > _SCREEN)
        lines += [f"{len(self.skipped)} terminal nodes left alone"] * bool(self.skipped)
        lines += [f"failed: {error}" for error in self.failed]
        return "\n".join(lines) or "no branches"

    def _repr_html_(self) -> str:
        from ..viz import cards

        return cards.branches(self)
