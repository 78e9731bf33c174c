"""What a user says at a node: the next turn of a chat, or text that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle

SAID = "said"  # in a node's meta: what the user said, without the template around it
_ANSWER = "weft0answer0weft"


def say(lm: LM, node: Heddle, text: str, *, chat: bool | None = None) -> Heddle:
    """Add what the user says at a node. chat: as a turn; None: as the loom's prompt was given."""
    loom = node.path[0]
    if not text:
        raise ConfigError("there is nothing to say: the text is empty")
    if not (getattr(loom, "chat_template_used", False) if chat is None else chat):
        return node.add(text)
    said = node.add(turn_ids(lm, text))
    said.meta[SAID] = text
    return said


def turn_ids(lm: LM, text: str) -> list[int]:
    """Return what stands between an answer and the next: its end, the turn, the next one's start.

    A template only renders whole chats, so the turn is what it writes after a made-up answer.
    """
    if lm.text.chat_template is None:
        raise ConfigError(
            "this model has no chat template: it continues text and does not answer",
            hint="--raw adds the text as it is",
        )
    rendered = lm.format_chat(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": text},
        ]
    )
    _, found, turn = rendered.partition(_ANSWER)
    if not found:
        raise ConfigError("this model's chat template writes no earlier answers: one turn is all")
    return lm.tokenize(turn, special=True, add_bos=False)


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
