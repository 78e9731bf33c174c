"""Chat messages as OpenAI writes them, and the prompt that they make."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ...._core.tokens.chat import check_variables, template_reads
from ....errors import ConfigError
from ....lm.chat import ChatPrompt
from .field_errors import invalid, named, unsupported
from .request_fields import OpenAIModel

if TYPE_CHECKING:
    from ....lm.lm import LM

Json = dict[str, Any]
# Variables that chat templates switch reasoning by.
_THINKING = ("enable_thinking", "thinking")


class TextPart(OpenAIModel):
    """A part of a message; only text can be read here."""

    type: str
    text: str | None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")
    id: str | None = None
    # Of parts that are refused, so that the refusal can say what they are.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class CalledFunction(OpenAIModel):
    """A function's name, and its arguments as JSON text."""

    name: str = Field(min_length=1)
    arguments: str = "{}"


class MessageCall(OpenAIModel):
    """A call that an assistant's turn held."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of streamed ones that are sent back
    cache_control: Any = None
    extra_content: Any = None


class ChatMessage(OpenAIModel):
    """One turn."""

    role: str = Field(min_length=1, description="system, developer, user, assistant or tool.")
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="What the assistant thought.")
    refusal: str | None = None
    id: str | None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        made = {name: value for name, value in given.items() if value is not None}
        if isinstance(made.get("reasoning"), str):  # vLLM's name
            made.setdefault("reasoning_content", made.pop("reasoning"))
        return made

    def plain(self, number: int) -> Json:
        """Return the message as templates take it. Raises: Refused for parts that are no text."""
        made: Json = {"role": "system" if self.role == "developer" else self.role}
        content = self.content
        if isinstance(content, list):
            content = "\n".join(_text_of(number, place, each) for place, each in enumerate(content))
        if content is None and not self.tool_calls:
            content = self.refusal or ""
        made["content"] = content
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name):
                made[name] = getattr(self, name)
        if self.tool_calls:
            made["content"] = content or ""
            made["tool_calls"] = [
                each.model_dump(
                    exclude_none=True, exclude={"index", "cache_control", "extra_content"}
                )
                for each in self.tool_calls
            ]
        return made


def _text_of(number: int, place: int, part: TextPart) -> str:
    if part.type in ("text", "input_text", "output_text") and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    raise unsupported(
        f"messages[{number}].content[{place}]", f"is {part.type!r:.40}; only text is read here"
    )


class TemplateFields(NamedTuple):
    """Fields of a request that become variables of the chat template."""

    kwargs: Mapping[str, Any]
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    def variables(self, template: str) -> dict[str, Any]:
        """Return the variables of a template. Raises: Refused for one that it does not read.

        Neutral values of unread variables are left out.
        """
        made = dict(self.kwargs)
        for name in _THINKING:
            if made.get(name) is False and not template_reads(template, name):
                del made[name]
        named("chat_template_kwargs", lambda: check_variables(template, list(made)))
        given = {**self._thinking(template), **self._read(template, "verbosity", "medium")}
        return {**given, **made}

    def _thinking(self, template: str) -> dict[str, Any]:
        switch = next((name for name in _THINKING if template_reads(template, name)), None)
        effort = self.reasoning_effort
        made: dict[str, Any] = {}
        if switch is None or template_reads(template, "reasoning_effort"):
            made = self._read(template, "reasoning_effort", "none", "minimal")
        elif effort is not None and effort != "minimal":
            made = {switch: effort != "none"}
        if self.enable_thinking is None:
            return made
        if switch is not None:
            return {**made, switch: self.enable_thinking}
        if self.enable_thinking:
            named("enable_thinking", lambda: check_variables(template, ["enable_thinking"]))
        return made

    def _read(self, template: str, name: str, *neutral: str) -> dict[str, Any]:
        value = getattr(self, name)
        if value is None or (value in neutral and not template_reads(template, name)):
            return {}
        named(name, lambda: check_variables(template, [name]))
        return {name: value}


def chat_prompt(
    lm: LM,
    messages: Sequence[Json],
    *,
    tools: Sequence[Json] | None = None,
    asked: TemplateFields,
    add_generation_prompt: bool = True,
    continues: bool = False,
) -> ChatPrompt:
    """Return the prompt of a chat. continues: the last message is open, and is gone on with.

    Raises: Refused for messages that the template does not take, and for a model without one;
    ContextOverflow.
    """
    template = lm.text.chat_template
    if template is None:
        raise unsupported(
            "messages", "this model has no chat template; use /v1/completions with a plain text"
        )
    if tools:
        named("tools", lambda: lm.text.check_chat_options(["tools"]))
    variables = asked.variables(template)
    if not continues:
        return named(
            "messages",
            lambda: lm.format_chat(
                messages,
                tools=tools,
                template_kwargs=variables,
                add_generation_prompt=add_generation_prompt,
                fits=True,
            ),
        )
    return named("messages", lambda: _open_ended(lm, messages, tools, variables))


def reads_variable(lm: LM, name: str) -> bool:
    """Return True if the model's chat template reads a variable."""
    return template_reads(lm.text.chat_template or "", name)


def latest_turns(messages: Sequence[Json], fits: Callable[[list[Json]], bool]) -> list[Json]:
    """Return the messages without as few of the oldest turns as possible, so that they fit.

    A turn begins with a user message. System messages and the last turn stay.
    """
    starts = [i for i, each in enumerate(messages) if each["role"] == "user"] or [0]
    starts[0] = 0

    def latest(turn: int) -> list[Json]:
        first = starts[turn]
        return [m for i, m in enumerate(messages) if i >= first or m["role"] == "system"]

    turns = range(len(starts) - 1)
    return latest(bisect_left(turns, True, key=lambda turn: fits(latest(turn))))


def _open_ended(
    lm: LM,
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> ChatPrompt:
    """Render the chat and cut it where the last message's content ends."""
    last = messages[-1]
    if last["role"] != "assistant" or not last.get("content"):
        raise invalid(
            "continue_final_message",
            "continue_final_message: the last message must be an assistant's, with some content",
        )
    # Letters and figures alone: no template trims or escapes them.
    mark = f"weft{secrets.token_hex(8)}"
    marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
    options: dict[str, Any] = dict(template_kwargs or {})
    if tools:
        options["tools"] = list(tools)
    pieces = []
    for piece, is_text in lm.text.render_pieces(marked, add_generation_prompt=False, **options):
        before, found, _ = piece.partition(mark)
        pieces.append((before, is_text))
        if found:
            break
    else:
        raise ConfigError("the chat template leaves the last message out: it cannot go on")
    lm.check_length("".join(piece for piece, _ in pieces))
    asked = [each["content"] for each in messages if each["role"] == "user"]
    return ChatPrompt.of(
        lm.text,
        [each for each in pieces if each[0]],
        user_prompt=asked[-1] if asked else "",
        template=None,
        tools=tools,
        tool_choice=None,
    )
