"""The prompts of a completion: text, token ids, and the node that choices grow from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ....loom import Heddle, Loom
from .field_errors import check_field, invalid
from .request_fields import check_token_ids

if TYPE_CHECKING:
    from ....lm.lm import LM

_SHORT = 2000  # characters
Given = str | list[str] | list[int] | list[list[int]] | None


class TextPrompt:
    """A prompt of a completion.

    ids: its token ids. text: None if the prompt was given as token ids.
    node: the end of its path, from which choices grow.
    """

    def __init__(self, lm: LM, ids: list[int], text: str | None) -> None:
        self._lm = lm
        self.ids = ids
        self._given = text
        check_token_ids(lm, "prompt", ids)
        self.node: Heddle = check_field("prompt", lambda: Loom(lm, ids))

    @property
    def is_text(self) -> bool:
        """True if the prompt was given as text, not as tokens."""
        return self._given is not None

    @cached_property
    def text(self) -> str:
        """The prompt as `echo` returns it."""
        return self._lm.text.decode(self.ids, first=True) if self._given is None else self._given

    def loom(self) -> Loom:
        """Create a loom with this prompt. Its user prompt has no begin token."""
        loom = Loom(self._lm, self.ids)
        has_begin = self.ids[0] == self._lm.text.bos_token_id and len(self.ids) > 1
        decode = self._lm.text.decode
        loom.user_prompt = self._given or (decode(self.ids[1:], first=True) if has_begin else "")
        loom.user_prompt = loom.user_prompt or self.text
        return loom

    def offsets(self) -> list[int]:
        """Return the index of the character in `text` at which each token begins."""
        stream = self._lm.text.stream(first=True)
        bos = self._lm.text.bos_token_id
        offsets, at, end = [], 0, len(self.text)
        for number, token in enumerate(self.ids):
            offsets.append(min(at, end))
            # A begin token that the tokenizer added is not part of the given text.
            is_silent = number == 0 and token == bos and self._has_added_bos()
            at += 0 if is_silent else len(stream.push(token))
        return offsets

    def _has_added_bos(self) -> bool:
        """Return True if the first token is a begin token that the text does not contain."""
        bos = self._lm.text.token_text(self.ids[0])
        return self._given is not None and not self._given.startswith(bos)


def read_prompts(lm: LM, given: Given, *, adds_begin: bool = True) -> list[TextPrompt]:
    """Return the prompts of a request. Special tokens in texts are recognized.

    given: a text, token ids, or a list of these.
    adds_begin: add the begin token before a text, if the tokenizer adds one.

    Raises: RequestError for an empty text without a begin token; ContextOverflow.
    """
    if given is None or isinstance(given, str):
        return [_text_prompt(lm, given or "", adds_begin)]
    if isinstance(given[0], int):
        return [TextPrompt(lm, [token for token in given if isinstance(token, int)], None)]
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(_text_prompt(lm, prompt, adds_begin))
        elif isinstance(prompt, list):
            prompts.append(TextPrompt(lm, prompt, None))
    return prompts


def is_short(given: Given) -> bool:
    """Return True if the prompts are so short that tokenizing them does not need a thread."""
    return given is None or (isinstance(given, str) and len(given) <= _SHORT)


def _text_prompt(lm: LM, text: str, adds_begin: bool) -> TextPrompt:
    """Tokenize one text. Raises: RequestError for an empty one without a begin token."""
    check_field("prompt", lambda: lm.check_length(text))
    add_bos = None if adds_begin else False
    ids = lm.text.encode(text, special=True, add_bos=add_bos)
    bos = lm.text.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]  # the text has its own begin token
    if not ids and bos is not None and adds_begin:
        ids = [bos]
    if not ids:
        raise invalid("prompt", "prompt is empty, and the model has no begin token; send some text")
    return TextPrompt(lm, ids, text)


def n_tokens(prompts: Sequence[TextPrompt]) -> int:
    """Return the number of tokens of all prompts."""
    return sum(len(prompt.ids) for prompt in prompts)
