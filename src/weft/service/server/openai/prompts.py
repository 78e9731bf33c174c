"""The prompts of a completion: as text, as token ids, and as the nodes that choices grow from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ....loom import Heddle, Loom
from .field_errors import invalid, named

if TYPE_CHECKING:
    from ....lm.lm import LM

_SHORT = 2000  # letters
Given = str | list[str] | list[int] | list[list[int]] | None


class TextPrompt:
    """One prompt. ids: all of its tokens. text: as it was given, else as the ids are written.

    node: where the choices go on; None until somebody asks for a place.
    """

    def __init__(self, lm: LM, ids: list[int], text: str | None) -> None:
        self._lm = lm
        self.ids = ids
        self._given = text
        self.node: Heddle = named("prompt", lambda: Loom(lm, ids))

    @property
    def is_text(self) -> bool:
        """Whether it was given as text, not as tokens."""
        return self._given is not None

    @cached_property
    def text(self) -> str:
        """The prompt as `echo` tells it."""
        return self._lm.text.decode(self.ids, first=True) if self._given is None else self._given

    def loom(self) -> Loom:
        """Make a loom of it, whose prompt is what was asked, without a begin token."""
        made = Loom(self._lm, self.ids)
        has_begin = self.ids[0] == self._lm.text.bos_token_id and len(self.ids) > 1
        decode = self._lm.text.decode
        made.user_prompt = self._given or (decode(self.ids[1:], first=True) if has_begin else "")
        made.user_prompt = made.user_prompt or self.text
        return made

    def offsets(self) -> list[int]:
        """Return where the text of each token begins, in letters of `text`."""
        stream = self._lm.text.stream(first=True)
        begin = self._lm.text.bos_token_id
        found, at, end = [], 0, len(self.text)
        for number, token in enumerate(self.ids):
            found.append(min(at, end))
            # A begin token that the tokenizer put there is no part of a text that was given.
            is_silent = number == 0 and token == begin and self._is_added()
            at += 0 if is_silent else len(stream.push(token))
        return found

    def _is_added(self) -> bool:
        begin = self._lm.text.token_text(self.ids[0])
        return self._given is not None and not self._given.startswith(begin)


def read_prompts(lm: LM, given: Given, *, adds_begin: bool = True) -> list[TextPrompt]:
    """Return the prompts of a request. Special tokens that stand in a text are read as such.

    adds_begin: put the begin token before a text, where the tokenizer does.
    Raises: Refused for an empty text that nothing can begin, and for ids that are no tokens;
    ContextOverflow.
    """
    if given is None or isinstance(given, str):
        return [_of_text(lm, given or "", adds_begin)]
    if isinstance(given[0], int):
        return [TextPrompt(lm, [token for token in given if isinstance(token, int)], None)]
    made = []
    for each in given:
        if isinstance(each, str):
            made.append(_of_text(lm, each, adds_begin))
        elif isinstance(each, list):
            made.append(TextPrompt(lm, each, None))
    return made


def is_short(given: Given) -> bool:
    """Whether reading it takes no longer than a thread's turn beside the model's would."""
    return given is None or (isinstance(given, str) and len(given) <= _SHORT)


def _of_text(lm: LM, text: str, adds_begin: bool) -> TextPrompt:
    named("prompt", lambda: lm.check_length(text))
    add_bos = None if adds_begin else False
    ids = lm.text.encode(text, special=True, add_bos=add_bos)
    begin = lm.text.bos_token_id
    if begin is not None and ids[:2] == [begin, begin]:
        ids = ids[1:]  # a text that says its own begin token needs no second one
    if not ids and begin is not None and adds_begin:
        ids = [begin]
    if not ids:
        raise invalid("prompt", "prompt is empty, and nothing stands before it; give it some text")
    return TextPrompt(lm, ids, text)


def n_tokens(prompts: Sequence[TextPrompt]) -> int:
    """Return how many tokens they have together."""
    return sum(len(each.ids) for each in prompts)
