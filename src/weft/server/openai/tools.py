"""Functions that a chat may call: what is offered, which must be, and what makes calls valid."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ...constraints.calls import call_constraint
from .fields import OpenAIModel
from .refusals import invalid, named

if TYPE_CHECKING:
    from ...chat import ChatPrompt
    from ...constraints.base import Constraint
    from ...lm import LM
    from ...tokens.chat import ToolCall

Json = dict[str, Any]


class FunctionTool(OpenAIModel):
    """A function that may be called. `strict` is taken: calls are always valid here."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(OpenAIModel):
    """A tool of a chat request."""

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> Json:
        """Return it as templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {}, **function}}


class NamedFunction(OpenAIModel):
    """A function by its name."""

    name: str = Field(min_length=1)


class NamedTool(OpenAIModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def chosen(choice: ToolChoice | None, tools: Sequence[Json] | None) -> str | None:
    """Return what must be called, as Weft has it; None without tools. Raises: Refused."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice: there are no tools to call")
        return None
    wanted = "auto" if choice is None else choice
    name = wanted if isinstance(wanted, str) else wanted.function.name
    known = [each["function"]["name"] for each in tools]
    if not isinstance(wanted, str) and name not in known:
        raise invalid(
            "tool_choice", f"tool_choice is {name!r:.80}; the tools are {', '.join(known)}"
        )
    return name


def constraint_of(
    lm: LM, prompt: ChatPrompt, choice: str | None, *, parallel: bool
) -> Constraint | None:
    """Return what makes calls valid; None where none may come. Raises: Refused."""
    if choice is None or choice == "none":
        return None
    return named(
        "tools",
        lambda: call_constraint(
            lm.text,
            prompt.form,
            prompt.tools,
            choice,
            parallel=parallel,
            thinking_open=prompt.thinking_open,
        ),
    )


def call_object(call: ToolCall) -> Json:
    """Return a call as an answer has it; one without an id gets one."""
    return {
        "id": call.id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
