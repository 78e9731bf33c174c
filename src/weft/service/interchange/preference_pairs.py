"""Preference pairs as JSON: two siblings, of which one is preferred."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ...errors import ConfigError
from ...loom import Heddle
from ...loom.sibling_order import rating_of
from .selection import Selection
from .turns import ROLE, messages_of

Rank = Callable[[Heddle], float | None]
Label = Callable[[Heddle], str | None]

BOOKMARK = "bookmark"  # key in a node's meta: its label


def bookmark_of(node: Heddle) -> str | None:
    """Return the label of a node's bookmark, which its meta contains; None without one."""
    label = node.meta.get(BOOKMARK)
    return None if not label else label if isinstance(label, str) else BOOKMARK


def ranking(by: str | Rank, bookmark: Label) -> Rank:
    """Return a function that returns a node's rank among its siblings; higher is better.

    Args:
        by: "score", "rating" (`meta["rating"]`), "bookmark" (nodes with a bookmark first), or a
            function of a node.
        bookmark: returns a node's bookmark, or None.

    Raises: ConfigError for another value of `by`.
    """
    if callable(by):
        return by
    if by == "score":
        return lambda node: node.score
    if by == "bookmark":
        return lambda node: float(bookmark(node) is not None)
    if by == "rating":
        return rating_of
    raise ConfigError(
        f'by is {by!r}; allowed are "score", "rating", "bookmark" or a function of a node'
    )


def pair_lines(
    part: Selection, *, by: str | Rank = "score", bookmark: Label = bookmark_of
) -> Iterator[str]:
    """Yield JSON lines with preference pairs: {"prompt", "chosen", "rejected"}, as for DPO.

    Of each node's children, the best is chosen. Each other text with a lower rank is rejected once.
    The values are lists of messages for a loom of chat turns, else texts.

    Args:
        part: the part of the loom.
        by: how siblings are ranked; see `ranking`.
        bookmark: returns a node's bookmark, or None.

    Raises: ConfigError if no siblings differ.
    """
    rank, is_chat = ranking(by, bookmark), _is_chat(part)
    lines = [
        json.dumps(_pair(node, chosen, rejected, is_chat), ensure_ascii=False) + "\n"
        for node in part.top.walk()
        for chosen, rejected in _siblings(node, rank)
    ]
    if not lines:
        name = by if isinstance(by, str) else "the function"
        raise ConfigError(
            f"no siblings differ by {name}, so there are no preference pairs to write",
            hint="give nodes scores, or choose what ranks them: score, bookmark, or a function",
        )
    return iter(lines)


def _siblings(node: Heddle, rank: Rank) -> Iterator[tuple[Heddle, Heddle]]:
    ranked = [(value, child) for child in node.children if (value := rank(child)) is not None]
    ranked = [(value, child) for value, child in ranked if value == value]  # nan ranks nothing
    if not ranked:
        return
    best, chosen = max(ranked, key=lambda each: each[0])
    texts = {chosen.text}
    for value, child in ranked:
        if value < best and child.text not in texts:
            texts.add(child.text)
            yield chosen, child


def _is_chat(part: Selection) -> bool:
    return part.loom.chat_template_used or ROLE in part.loom.meta


def _pair(node: Heddle, chosen: Heddle, rejected: Heddle, is_chat: bool) -> dict[str, object]:
    if not is_chat:
        prompt = "".join(each.text for each in node.path)
        return {"prompt": prompt, "chosen": chosen.text, "rejected": rejected.text}
    context = messages_of(node.path)
    answers = [messages_of(each.path) for each in (chosen, rejected)]
    # Both may continue an answer that the prompt contains: trainers need that answer complete.
    extends_prompt = all(messages[: len(context)] == context for messages in answers)
    shared = len(context) if extends_prompt else len(context) - 1
    return {
        "prompt": context[:shared],
        "chosen": answers[0][shared:],
        "rejected": answers[1][shared:],
    }
