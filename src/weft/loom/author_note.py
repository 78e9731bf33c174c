"""The author's note of a loom: text that the model reads near the end of the context.

The note steers what is generated, but belongs to no node: looms show and save texts without it.
Generation with a note starts at another place of the token tree, which has the path's tokens with
the note inserted. KV up to the note is shared with the path; KV after the note is not.
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
    """A note and its position, counted from the end of the context.

    Attributes:
        text: the note.
        depth: in a chat, the number of messages after the note; in other text, the number of lines.
            0 is the end of the context.

    Raises: ConfigError for an empty text or a negative depth.
    """

    text: str
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise ConfigError(f"the text of a note is {self.text!r:.80}; it must be a text")
        check_int("depth", self.depth, 0)


def note_of(meta: dict[str, Any]) -> AuthorNote | None:
    """Return the note that a loom's `meta["author_note"]` describes; None without this key.

    meta: the `meta` of the root; the value is {"text": …, "depth": …}, with an optional depth.

    Raises: ConfigError for another value.
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
    """Return the place in the token tree from which a node grows with a note.

    The place has the path's tokens with the note inserted: into a user message of a chat, else
    between two lines. A chat whose prompt was not rendered by the template gets it as text.

    Raises: ContextOverflow if path and note are longer than the context.

    Cost: O(tokens of the path).
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
    """Insert the note into a user message of a chat.

    The position is before the `depth`-th last message. Templates may reject a system message
    there, so the note is a paragraph of the user message at or before this position.

    Returns the index in the path of the node with this message, and its new tokens. None if the
    prompt's tokens differ from the rendered messages, so that they cannot be rendered with the
    note.
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
    """Return the messages that a loom's prompt was rendered from; one user message by default."""
    noted = root.meta.get("messages")
    return list(noted) if noted is not None else [{"role": "user", "content": root.user_prompt}]


def _with_note_in_text(lm: LM, tokens: list[int], note: AuthorNote) -> list[int]:
    """Return the tokens of a text with the note as a line of its own inserted.

    The line follows the `depth`-th last line break: 1 is before the last line, 0 after the end. A
    text with fewer line breaks gets the note at its beginning, after the BOS token.
    """
    if not note.depth:
        return [*tokens, *lm.text.encode(f"\n{note.text}\n", add_bos=False)]
    at, n_breaks = len(tokens), 0
    while at and n_breaks < note.depth:
        n_breaks += lm.text.token_text(tokens[at - 1]).count("\n")
        at -= n_breaks < note.depth
    if not at and tokens[:1] == [lm.text.bos_token_id]:
        at = 1
    return [*tokens[:at], *lm.text.encode(f"{note.text}\n", add_bos=False), *tokens[at:]]
