"""Tools of a chat: the offered functions, the choice, and the constraint for valid calls."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ....constraints import AnyOf
from ....constraints.tool_calls import call_constraint, loose_tool
from ..errors import RequestError
from .constraints import TextConstraint
from .field_errors import check_field, invalid
from .request_fields import OpenAIModel

if TYPE_CHECKING:
    from ...._core.tokens.chat import ToolCall
    from ....constraints.base import Constraint
    from ....lm.chat import ChatPrompt
    from ....lm.lm import LM

Json = dict[str, Any]
_log = logging.getLogger(__name__)


class FunctionTool(OpenAIModel):
    """A function that the model may call.

    strict: reject a schema that cannot be compiled, instead of enforcing only names and types.
    """

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(OpenAIModel):
    """A function that a chat request offers to the model."""

    type: Literal["function"]
    function: FunctionTool
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")

    def plain(self) -> Json:
        """Return the tool as a dict, as chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {}, **function}}


class NamedFunction(OpenAIModel):
    """The name of a function, in a `tool_choice`."""

    name: str = Field(min_length=1)


class NamedTool(OpenAIModel):
    """A `tool_choice` that names the function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def resolve_tool_choice(choice: ToolChoice | None, tools: Sequence[Json] | None) -> str | None:
    """Return the `tool_choice` in Weft's own form: a mode, or the name of a function.

    None without tools. Raises: RequestError.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice: there are no tools to call")
        return None
    requested = "auto" if choice is None else choice
    name = requested if isinstance(requested, str) else requested.function.name
    names = [tool["function"]["name"] for tool in tools]
    if not isinstance(requested, str) and name not in names:
        raise invalid(
            "tool_choice", f"tool_choice is {name!r:.80}; the tools are {', '.join(names)}"
        )
    return name


async def answer_constraint(
    lm: LM,
    prompt: ChatPrompt,
    choice: str | None,
    form: Constraint | None,
    *,
    strict: Sequence[str] = (),
    parallel: bool | None,
) -> Constraint | None:
    """Return the compiled constraint of a turn: valid calls, text of the format, or either.

    Args:
        choice: the result of `resolve_tool_choice`.
        form: the constraint of a turn without calls; `None` for free text.
        strict: names of tools whose schemas must be enforced. A schema of another tool that cannot
            be compiled is replaced by the names and types of its arguments.
        parallel: allow several calls; `None` if the template has a format of its own.

    Raises: RequestError.
    """
    if choice is None or choice == "none":
        return form
    is_either = choice == "auto" and form is not None
    wanted = "required" if is_either else choice

    async def compiled_calls(tools: Sequence[Json], wanted: str) -> Constraint | None:
        def calls() -> Constraint | None:
            return call_constraint(
                lm.text,
                prompt.form,
                tools,
                wanted,
                parallel=parallel,
                thinking_open=prompt.thinking_open,
            )

        constraint = check_field("tools", calls)
        return None if constraint is None else await TextConstraint("tools", constraint).compile(lm)

    try:
        constraint = await compiled_calls(prompt.tools, wanted)
    except RequestError as error:
        if error.code != "invalid_json_schema":
            raise
        usable = []
        for tool in prompt.tools:
            name = tool["function"]["name"]
            try:
                await compiled_calls([tool], name)
            except RequestError as fault:
                if name in strict:
                    raise
                _warn_not_enforced(name, str(fault))
                tool = loose_tool(tool)
            usable.append(tool)
        constraint = await compiled_calls(usable, wanted)
    return AnyOf([form, constraint]) if is_either else constraint


@lru_cache(maxsize=256)
def _warn_not_enforced(name: str, why: str) -> None:
    """Log a warning, once per tool, that its schema is not enforced. why: the reason."""
    _log.warning("the schema of the tool %r is not enforced, only names and types: %s", name, why)


def call_object(call: ToolCall) -> Json:
    """Convert a tool call to the object of an answer. A call without an id gets a new one."""
    return {
        "id": call.id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
