"""The author's note of a loom: text that growth inserts into the context, but not into the nodes.

A note changes the context of generated tokens. So a run starts at another place of the token tree:
the path's tokens with the note inserted. Up to the note, the KV is that of the path. The KV after
it belongs to the note's path and is not shared with the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._core.validation import check_int
from ..errors import ConfigError
from .node import is_chat, lm_of

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from ..lm.lm import LM
    from .heddle import Heddle

AUTHOR_NOTE = "author_note"  # key in a root's meta: {"text": …, "depth": …}
DEPTH = 4


@dataclass(frozen=True, slots=True)
class AuthorNote:
    """Text that is inserted into the context while a loom grows.

    Attributes:
        text: the note.
        depth: the number of messages after the note in a chat, or of line breaks in other text. 0
            inserts the note at the end.
    """

    text: str
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise ConfigError(f"the text of a note is {self.text!r:.80}; it must be a text")
        check_int("depth", self.depth, 0)


def note_of(meta: dict[str, Any]) -> AuthorNote | None:
    """Return the note in the meta of a root; None without one.

    Raises: ConfigError for a value that is no note.
    """
    value = meta.get(AUTHOR_NOTE)
    if value is None:
        return None
    if not isinstance(value, dict) or not value.keys() <= {"text", "depth"} or "text" not in value:
        raise ConfigError(
            f'{AUTHOR_NOTE} in the loom\'s meta is {value!r:.80}; it must be {{"text": …, "depth":'
            f" {DEPTH}}}"
        )
    return AuthorNote(value["text"], value.get("depth", DEPTH))


def place_with_note(node: Heddle, note: AuthorNote) -> Place:
    """Return the place in the token tree after a node's path with a note inserted.

    Raises: ContextOverflow if path and note are longer than the context.
    """
    ids = tokens_with_note(node, note)
    return lm_of(node).place(ids, namespace=node.path[0].adapter)  # type: ignore[attr-defined]


def tokens_with_note(node: Heddle, note: AuthorNote) -> list[int]:
    """Return the token ids of a node's path with a note inserted."""
    lm, path = lm_of(node), list(node.path)
    ids = [each.tokens for each in path]
    at = _with_note_in_message(lm, path, note) if is_chat(node) else None
    if at is None:
        return _with_note_in_text(lm, [token for each in ids for token in each], note)
    index, replacement = at
    ids[index] = replacement
    return [token for each in ids for token in each]


def _with_note_in_message(
    lm: LM, path: Sequence[Heddle], note: AuthorNote
) -> tuple[int, list[int]] | None:
    """Insert the note into a user message; return its index in the path and its new tokens.

    The note precedes the message that has `depth` messages from there to the end. Templates may
    reject a system message there, so the note is a paragraph of the nearest user message.

    Returns None if the prompt is not what the template makes of its messages.
    """
    is_user = [index == 0 or "said" in each.meta for index, each in enumerate(path)]
    # The start of each message: consecutive other nodes are one answer.
    starts = [at for at, by_user in enumerate(is_user) if by_user or is_user[at - 1]]
    position = max(len(starts) - note.depth, 0)
    is_before = position < len(starts) and is_user[starts[position]]
    earlier = (at for at in reversed(starts[:position]) if is_user[at])
    index = starts[position] if is_before else next(earlier)

    def join(message: str) -> str:
        return f"{note.text}\n\n{message}" if is_before else f"{message}\n\n{note.text}"

    if index:
        role = path[index].meta.get("role") or "user"
        message = {"role": role, "content": join(str(path[index].meta["said"]))}
        return index, lm.turn_delta([message])
    messages = prompt_messages(path[0])
    last = messages[-1]["content"] if messages else None
    if not isinstance(last, str) or list(lm.format_chat(messages).ids) != path[0].tokens:
        return None
    changed = [*messages[:-1], {**messages[-1], "content": join(last)}]
    return 0, list(lm.format_chat(changed).ids)


def prompt_messages(root: Any) -> list[dict[str, Any]]:
    """Return the chat messages of a root's prompt."""
    noted = root.meta.get("messages")
    return list(noted) if noted is not None else [{"role": "user", "content": root.user_prompt}]


def _with_note_in_text(lm: LM, tokens: list[int], note: AuthorNote) -> list[int]:
    """Insert the note and a line break after the `depth`-th last line break.

    Depth 1 is before the last line, 0 a line after the end. A text with fewer line breaks gets the
    note at its beginning, after the BOS token.
    """
    if not note.depth:
        return [*tokens, *lm.text.encode(f"\n{note.text}\n", add_bos=False)]
    at, n_breaks = len(tokens), 0
    while at and n_breaks < note.depth:
        n_breaks += lm.text.token_text(tokens[at - 1]).count("\n")
        at -= n_breaks < note.depth
    if not at and tokens[0] == lm.text.bos_token_id:
        at = 1
    return [*tokens[:at], *lm.text.encode(f"{note.text}\n", add_bos=False), *tokens[at:]]
