"""A rendered chat: the prompt's text, its tokens, and what an answer to it may look like."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from .._core.tokens.form import ChatForm
from .._core.tokens.parse import ChatOutput, parse_chat_output
from .._core.tokens.tokenizer import Tokenizer
from ..constraints.base import Constraint
from ..constraints.calls import call_constraint


class ChatPrompt(str):
    """The text of a rendered chat. It is a str, and knows how it came to be.

    ids: its tokens; names of special tokens in what was said are letters in them. `lm.tokenize`
    gives them for the whole prompt, and a Loom takes it as it is. What is cut or joined is a plain
    str. user_prompt: what the user said last.
    """

    ids: tuple[int, ...]
    user_prompt: str
    tools: tuple[Any, ...]
    tool_choice: Any
    _text: Tokenizer
    _template: str | None

    @classmethod
    def of(
        cls,
        text: Tokenizer,
        pieces: Sequence[tuple[str, bool]],
        *,
        user_prompt: str,
        template: str | None,
        tools: Sequence[Any] | None,
        tool_choice: Any,
    ) -> Self:
        """Make it from what `Tokenizer.render_pieces` gives."""
        made = cls("".join(piece for piece, _ in pieces))
        made.ids = tuple(text.chat_ids(pieces))
        made.user_prompt = user_prompt
        made.tools, made.tool_choice = tuple(tools or ()), tool_choice
        made._text, made._template = text, template
        if tool_choice is not None:
            made.constraint  # noqa: B018 what cannot be had is said here
        return made

    @cached_property
    def form(self) -> ChatForm:
        """How the template writes an assistant's turn."""
        return self._text.chat_form(self._template)

    @property
    def thinking_open(self) -> bool:
        """Whether the prompt ends inside the reasoning."""
        return self.rstrip().endswith(self.form.think[0])

    @cached_property
    def constraint(self) -> Constraint | None:
        """What makes calls valid: for `constraint=` of every face; None without tools.

        After tool_choice: free text until a call begins ("auto", also where it was left out), a
        call at once ("required", or a name), or no constraint ("none").
        """
        if not self.tools and self.tool_choice in (None, "none"):
            return None
        return call_constraint(
            self._text,
            self.form,
            self.tools,
            "auto" if self.tool_choice is None else self.tool_choice,
            thinking_open=self.thinking_open,
        )

    def parse(self, text: str, *, is_partial: bool = False, reads_calls: bool = True) -> ChatOutput:
        """Take an answer to this prompt apart; see `parse_chat_output`."""
        return parse_chat_output(
            text,
            thinking_open=self.thinking_open,
            is_partial=is_partial,
            form=self.form,
            tools=self.tools,
            reads_calls=reads_calls,
        )
