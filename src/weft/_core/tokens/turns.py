"""Tokens between the turns of a chat: the separator after an answer, and those of new turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from .tokenizer import Tokenizer

# Words that no template writes. NOTE: control characters would be blank, and trimmed by templates.
_FIRST, _SECOND, _QUESTION = "\ue000weft.1\ue001", "\ue000weft.2\ue001", "\ue000weft.0\ue001"

Messages = Sequence[Mapping[str, Any]]


def turn_separator(text: Tokenizer, **options: Any) -> list[int]:
    """Return the tokens that close an assistant's turn before the next one may start.

    These are the end token and the whitespace that the template writes after it. If the template
    cannot be rendered, it is the end token alone.

    options: variables of the template.

    Raises: ConfigError if the tokenizer has no end token either.
    """
    between = _text_between_turns(text, options)
    ids = text.encode(between, special=True, add_bos=False) if between is not None else []
    ends = [index for index, token in enumerate(ids) if token in text.stop_ids]
    if ends:
        stop = ends[0] + 1
        while stop < len(ids) and text.token_text(ids[stop]).isspace():
            stop += 1
        return ids[:stop]
    if text.eos_token_id is not None:
        return [text.eos_token_id]
    if text.stop_ids:
        return [min(text.stop_ids)]
    raise ConfigError("this model's files name no end token, so nothing closes a turn")


def turn_delta(
    text: Tokenizer,
    new: Messages,
    *,
    history: Messages | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """Return the tokens that `new` messages add to a chat whose last turn was generated.

    The tokens so far plus the delta equal the fully rendered chat. "So far" ends with the last
    token of the assistant's answer. An automatic system block of the template is not repeated.

    history: the chat so far; its last message is the assistant's, without its end token. None works
    if turns look the same at every position.

    Raises: ConfigError if the template rejects the messages, or leaves out earlier answers.
    """
    if history is None:
        history = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _FIRST}]
    if not new or not history:
        which = "new messages" if history else "messages in the history"
        raise ConfigError(f"there are no {which}; format_chat renders a chat's first prompt")
    last = history[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ConfigError(
            f"the last message of the history is of {last.get('role')!r}; it must be the"
            " assistant's, with text: put what the assistant has not answered among the new ones"
        )
    # A mark replaces the last answer, so that its end can be located in the rendered chat, however
    # the template trims the answer.
    marked = [*history[:-1], {**last, "content": _FIRST}, *new]
    pieces = text.render_pieces(marked, add_generation_prompt=add_generation_prompt, **options)
    rest: list[tuple[str, bool]] = []
    is_after_mark = False
    for piece, is_content in pieces:
        if not is_after_mark:
            _, mark, piece = piece.partition(_FIRST)
            is_after_mark = bool(mark)
        if is_after_mark and piece:
            rest.append((piece, is_content))
    if not is_after_mark:
        raise ConfigError(
            "this model's chat template leaves out earlier answers, so a turn cannot be added to"
            " what was run; render the full chat with format_chat"
        )
    return text.chat_ids(rest)


def _text_between_turns(text: Tokenizer, options: Mapping[str, Any]) -> str | None:
    """Return the text that the template writes between an answer and the next user message.

    That is the end of the assistant's turn and the start of the user's. None if the template cannot
    be rendered.
    """
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _FIRST},
        {"role": "user", "content": _SECOND},
    ]
    try:
        rendered = text.apply_chat_template(messages, add_generation_prompt=False, **options)
    except ConfigError:
        return None
    _, first, rest = rendered.partition(_FIRST)
    between, second, _ = rest.partition(_SECOND)
    return between if first and second else None
