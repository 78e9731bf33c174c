"""What pictures say of a node besides its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..loom import Loom

if TYPE_CHECKING:
    from ..loom import Heddle

NOTHING = "(ended at once)"


def headline(node: Heddle) -> str:
    """Return the text that stands for a node: of a root, what was asked."""
    # A class of one's own says itself what it shows.
    if isinstance(node, Loom) and type(node).display_text is Loom.display_text:
        return node.user_prompt or node.text
    return node.display_text()


def facts(node: Heddle) -> list[str]:
    """Return a node's figures, shortest first to read: tokens, mean p, score, how it ended."""
    found = [f"{len(node.tokens)} tok"]
    if node.logprobs:
        found.append(f"p {node.mean_p:.2f}")
    if node.score is not None:
        tiny = 0 < abs(node.score) < 0.001
        found.append("score 0.000" if tiny else f"score {node.score:.3g}")
    if node.terminal:
        found.append("end")
    elif node.finish_reason is not None:
        found.append(node.finish_reason)
    return found


def counted(n: int, one: str, many: str = "") -> str:
    """Return a count and its noun."""
    return f"{n:,} {one if n == 1 else many or one + 's'}".replace(",", " ")
