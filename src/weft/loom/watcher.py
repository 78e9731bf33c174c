"""Who shows branches while they grow, as the growing call sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..sched.work import FinishReason


class Watcher(Protocol):
    """Shows the branches of a call while they grow."""

    def open(self) -> None:
        """Show that it begins."""
        ...

    def push(
        self, branch: int, pieces: list[tuple[str, float]], ended: FinishReason | None
    ) -> None:
        """Take the new tokens of a branch: their texts and logprobs."""
        ...

    def close(self) -> None:
        """Show how it ended. Branches without an end were stopped."""
        ...
