"""One text of the corpus."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """user: None for plain prose. answer: the number that a right answer gives, if there is one."""

    user: str | None
    assistant: str
    answer: int | None = None
