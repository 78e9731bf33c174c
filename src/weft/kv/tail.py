"""The private end of a generation: a growing fragment that content matching does not see."""

from __future__ import annotations

from ..engines.base import Fragment
from .cursor import Cursor


class Tail:
    """Slots that one run writes, after `cursor`. `length` counts those that the tree knows of."""

    __slots__ = ("cursor", "fragment", "length")

    def __init__(self, cursor: Cursor, fragment: Fragment) -> None:
        self.cursor = cursor
        self.fragment = fragment
        self.length = 0
