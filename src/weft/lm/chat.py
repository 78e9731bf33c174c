"""`ChatPrompt`: a rendered chat with its token ids and the format of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from .._core.tokens.parse import ChatOutput, parse_chat_output
from .._core.tokens.tokenizer import Tokenizer
from .._core.tokens.tool_call_format import ChatForm
from ..constraints.base import Constraint
from ..constraints.tool_calls import call_constraint


class ChatPrompt(str):
    """The text of a rendered chat: a str with its token ids and the format of its answer.

    `lm.tokenize` returns `ids` for the full prompt, and a Loom accepts it as a prompt. Slices and
    concatenations are plain str.

    Attributes:
        ids: the token ids. Special tokens that users typed are encoded as plain text.
        user_prompt: the last user message.
        tools, tool_choice: as passed to `format_chat`.
    """

    ids: tuple[int, ...]
    user_prompt: str
    tools: tuple[Any, ...]
    tool_choice: Any
    _text: Tokenizer
    _template: str | None

    @classmethod
    def from_pieces(
        cls,
        text: Tokenizer,
        pieces: Sequence[tuple[str, bool]],
        *,
        user_prompt: str,
        template: str | None,
        tools: Sequence[Any] | None,
        tool_choice: Any,
    ) -> Self:
        """Create a prompt from the rendered pieces of a chat.

        Args:
            text: the tokenizer.
            pieces: (text, flag) from `Tokenizer.render_pieces`. The flag is True for the name of a
                special token in a message, which is encoded as plain text.
            user_prompt: the last user message.
            template: the Jinja template that rendered the pieces; None: the model's.
            tools, tool_choice: as passed to `format_chat`.
        """
        prompt = cls("".join(piece for piece, _ in pieces))
        prompt.ids = tuple(text.chat_ids(pieces))
        prompt.user_prompt = user_prompt
        prompt.tools, prompt.tool_choice = tuple(tools or ()), tool_choice
        prompt._text, prompt._template = text, template
        if tool_choice is not None:
            prompt.constraint  # noqa: B018 raises here for an impossible choice
        return prompt

    @cached_property
    def form(self) -> ChatForm:
        """The format of an assistant's turn in this template, with reasoning and tool calls."""
        return self._text.chat_form(self._template)

    @property
    def thinking_open(self) -> bool:
        """True if the prompt opens a section of reasoning, which the answer continues."""
        return self.rstrip().endswith(self.form.think[0])

    @cached_property
    def constraint(self) -> Constraint | None:
        """A value for `constraint=` that makes tool calls in the answer valid; None without tools.

        With tool_choice "auto", the default, text is free until a call starts. "required", or a
        tool's name, demands a call; "none" gives no constraint.
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
        """Split an answer to this prompt into text, reasoning and tool calls.

        Args:
            text: the answer to this prompt.
            is_partial: the answer is not complete yet, as in a stream.
            reads_calls: False leaves tool calls in the text.
        """
        return parse_chat_output(
            text,
            thinking_open=self.thinking_open,
            is_partial=is_partial,
            form=self.form,
            tools=self.tools,
            reads_calls=reads_calls,
        )
