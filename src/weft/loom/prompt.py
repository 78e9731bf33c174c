"""From what a caller calls a prompt to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chat import ChatPrompt
from ..errors import ConfigError
from .edit import token_ids

if TYPE_CHECKING:
    from ..tokens.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]

_EMPTY = "the prompt is empty: there are no tokens to continue. Give it some text"


class Prompt(NamedTuple):
    """ids: what the root holds. user_prompt: what the user asked, untemplated."""

    ids: list[int]
    user_prompt: str
    chat_template_used: bool


def read(
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    template: bool = True,
    special: bool | None = None,
    reads_special: bool = False,
    system: str | None = None,
) -> Prompt:
    """Return the prompt as token ids. A template's error is raised, never worked around.

    A str goes through the chat template when there is one and `template` is true; messages need
    one; token ids, and what `format_chat` gives, are taken as they are. special: read special
    tokens in a str that is taken as it is; None: as `reads_special` says.
    """
    if isinstance(prompt, ChatPrompt):
        if system is not None:
            raise ConfigError("the prompt is a rendered chat; give format_chat the system message")
        return Prompt(list(prompt.ids), prompt.user_prompt, True)
    is_raw = isinstance(prompt, str) and not (template and tokenizer.chat_template is not None)
    if special and not is_raw:
        raise ConfigError(
            "special=True is for a text that is taken as it is: give it with template=False. What"
            " is said in a chat stays text, and token ids are what they are"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError(_EMPTY)
        if is_raw:
            reads = reads_special if special is None else special
            made = _from_text(tokenizer, prompt, reads, system)
        else:
            messages = [{"role": "user", "content": prompt}]
            made = _from_messages(tokenizer, messages, template, system)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
        made = _from_messages(tokenizer, list(prompt), template, system)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if system is not None:
            raise ConfigError("system needs a text prompt; put it into the token ids yourself")
        ids = token_ids(prompt)  # type: ignore[arg-type]
        made = Prompt(ids, tokenizer.decode(ids) if _all_known(tokenizer, ids) else "", False)
    else:
        raise ConfigError(
            "a prompt is a text, a list of chat messages or a list of token ids, "
            f"not {type(prompt).__name__}"
        )
    if not made.ids:
        raise ConfigError(_EMPTY)
    return made


def _from_text(tokenizer: Tokenizer, text: str, special: bool, system: str | None) -> Prompt:
    if system is not None:
        raise ConfigError(
            "system needs a chat template: this model has none, or template=False. Put it into "
            "the prompt"
        )
    ids, begin = tokenizer.encode(text, special=special), tokenizer.bos_token_id
    # A text that says its own begin token needs no second one.
    is_doubled = special and begin is not None and ids[:2] == [begin, begin]
    return Prompt(ids[1:] if is_doubled else ids, text, False)


def _from_messages(
    tokenizer: Tokenizer, messages: list[Any], template: bool, system: str | None
) -> Prompt:
    if not template or tokenizer.chat_template is None:
        raise ConfigError(
            "chat messages need a chat template: this model has none, or template=False. Give a "
            "text"
        )
    if system is not None:
        if messages[0].get("role") == "system":
            raise ConfigError("there is a system message already; leave system out, or the message")
        messages = [{"role": "system", "content": system}, *messages]
    ids = tokenizer.encode_chat(messages)  # with its BOS, if the template writes one
    asked = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    user_prompt = asked[-1] if asked and isinstance(asked[-1], str) else ""
    return Prompt(ids, user_prompt, True)


def _all_known(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return all(0 <= token < tokenizer.n_vocab for token in ids)
