"""The private end of a generation: a growing fragment that content matching does not see."""

from __future__ import annotations

from ..engines.base import Fragment
from .cursor import Cursor


class Tail:
    """Slots that one run writes, after `cursor`. `reserved`: how many it may write so far."""

    __slots__ = ("cursor", "fragment", "reserved")

    def __init__(self, cursor: Cursor, fragment: Fragment) -> None:
        self.cursor = cursor
        self.fragment = fragment
        self.reserved = 0
