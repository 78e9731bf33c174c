"""What a user says at a node: the next turn of a chat, or text that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle

SAID = "said"  # in a node's meta: what the user said, without the template around it


def say(
    lm: LM, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
) -> Heddle:
    """Add what the user says at a node.

    chat: as a turn, in which special tokens are letters; None: as the loom's prompt was given.
    special: read those of a text that is no turn.
    """
    loom = node.path[0]
    if not text:
        raise ConfigError("there is nothing to say: the text is empty")
    if not (getattr(loom, "chat_template_used", False) if chat is None else chat):
        return node.add(text, special=special)
    refuse_special(special)
    if lm.text.chat_template is None:
        raise ConfigError(
            "this model has no chat template: it continues text and does not answer",
            hint="--raw adds the text as it is",
        )
    said = node.add(lm.turn_delta([{"role": "user", "content": text}]))
    said.meta[SAID] = text
    return said


def refuse_special(special: bool) -> None:
    """Refuse --special for what is said in a chat."""
    if special:
        raise ConfigError(
            "what is said in a chat is text, special tokens in it too",
            hint="--raw --special gives the text as it is",
        )


def said_at(node: Heddle) -> str | None:
    """Return what the user said at this node; None for what a model made or was added as text."""
    said = node.meta.get(SAID)
    return said if isinstance(said, str) else None


def written(nodes: list[Heddle]) -> str:
    """Return the text of nodes below a root, turns set apart."""
    parts = []
    for node in nodes:
        said = said_at(node)
        parts.append(node.text if said is None else f"\n\n> {said}\n\n")
    return "".join(parts)
