"""OpenAI's chat messages, and the prompts that they become."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ...._core.tokens.chat import check_variables, template_reads
from ....errors import ConfigError
from ....lm.chat import ChatPrompt
from .field_errors import check_field, invalid, unsupported
from .request_fields import OpenAIModel

if TYPE_CHECKING:
    from ....lm.lm import LM

Json = dict[str, Any]
# Variables by which chat templates switch reasoning.
_THINKING = ("enable_thinking", "thinking")


class TextPart(OpenAIModel):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")
    id: str | None = None
    # Fields of unsupported parts, accepted so that the error can name the part's type.
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None
    refusal: str | None = None


class CalledFunction(OpenAIModel):
    """A function's name, and its arguments as JSON text."""

    name: str = Field(min_length=1)
    arguments: str = "{}"


class MessageCall(OpenAIModel):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # sent back by clients that copy streamed calls
    cache_control: Any = None
    extra_content: Any = None


class ChatMessage(OpenAIModel):
    """A message of a chat request: a role, and content or tool calls."""

    role: str = Field(min_length=1, description="system, developer, user, assistant or tool.")
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="The assistant's reasoning.")
    refusal: str | None = None
    id: str | None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        """Remove null fields before validation."""
        if not isinstance(given, Mapping):
            return given
        fields = {name: value for name, value in given.items() if value is not None}
        if isinstance(fields.get("reasoning"), str):  # vLLM's name
            fields.setdefault("reasoning_content", fields.pop("reasoning"))
        return fields

    def plain(self, number: int) -> Json:
        """Return the message as templates take it.

        Raises: RequestError for parts that are not text.
        """
        message: Json = {"role": "system" if self.role == "developer" else self.role}
        content = self.content
        if isinstance(content, list):
            content = "\n".join(
                _part_text(number, place, part) for place, part in enumerate(content)
            )
        if content is None and not self.tool_calls:
            content = self.refusal or ""
        message["content"] = content
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["content"] = content or ""
            message["tool_calls"] = [
                call.model_dump(
                    exclude_none=True, exclude={"index", "cache_control", "extra_content"}
                )
                for call in self.tool_calls
            ]
        return message


def _part_text(number: int, place: int, part: TextPart) -> str:
    """Return the text of a part. Raises: RequestError for images, files, audio and video."""
    param = f"messages.{number}.content.{place}"
    is_text = part.type in ("text", "input_text", "output_text")
    if not is_text and part.type != "refusal":
        raise unsupported(param, f"is {part.type!r:.40}; only text is supported")
    name = "text" if is_text else "refusal"
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid(f"{param}.{name}", f"{param}.{name} is missing")
    return text


class TemplateFields(NamedTuple):
    """Request fields that become variables of the chat template.

    kwargs: the request's `chat_template_kwargs`. Other fields are None if the request has none.
    """

    kwargs: Mapping[str, Any]
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    def variables(self, template: str) -> dict[str, Any]:
        """Return the variables to pass to a template.

        A neutral value of a variable that the template does not read is left out.
        Raises: RequestError for another value of a variable that the template does not read.
        """
        variables = dict(self.kwargs)
        for name in _THINKING:
            if variables.get(name) is False and not template_reads(template, name):
                del variables[name]
        check_field("chat_template_kwargs", lambda: check_variables(template, list(variables)))
        given = {
            **self._reasoning_variables(template),
            **self._variable(template, "verbosity", "medium"),
        }
        return {**given, **variables}

    def _reasoning_variables(self, template: str) -> dict[str, Any]:
        """Return the variables for the request's reasoning effort."""
        switch = next((name for name in _THINKING if template_reads(template, name)), None)
        effort = self.reasoning_effort
        variables: dict[str, Any] = {}
        if switch is None or template_reads(template, "reasoning_effort"):
            variables = self._variable(template, "reasoning_effort", "none", "minimal")
        elif effort is not None and effort != "minimal":
            variables = {switch: effort != "none"}
        if self.enable_thinking is None:
            return variables
        if switch is not None:
            return {**variables, switch: self.enable_thinking}
        if self.enable_thinking:
            check_field("enable_thinking", lambda: check_variables(template, ["enable_thinking"]))
        return variables

    def _variable(self, template: str, name: str, *neutral: str) -> dict[str, Any]:
        """Return a field as a variable of the template; nothing for a neutral or missing value."""
        value = getattr(self, name)
        if value is None or (value in neutral and not template_reads(template, name)):
            return {}
        check_field(name, lambda: check_variables(template, [name]))
        return {name: value}


def chat_prompt(
    lm: LM,
    messages: Sequence[Json],
    *,
    tools: Sequence[Json] | None = None,
    fields: TemplateFields,
    add_generation_prompt: bool = True,
    continues: bool = False,
) -> ChatPrompt:
    """Render the prompt of a chat with the model's chat template.

    Args:
        messages: as templates take them.
        tools: the offered tools, as templates take them.
        fields: request fields that become variables of the template.
        add_generation_prompt: end with the beginning of an assistant's turn.
        continues: leave the last message open, so that the model continues it.

    Raises: RequestError if the model has no template or the template rejects the messages;
    ContextOverflow.
    """
    template = lm.text.chat_template
    if template is None:
        raise unsupported("messages", "this model has no chat template; use /v1/completions")
    if tools:
        check_field("tools", lambda: lm.text.check_chat_options(["tools"]))
    variables = fields.variables(template)
    if not continues:
        return check_field(
            "messages",
            lambda: lm.format_chat(
                messages,
                tools=tools,
                template_kwargs=variables,
                add_generation_prompt=add_generation_prompt,
                fits=True,
            ),
        )
    return check_field("messages", lambda: _open_ended(lm, messages, tools, variables))


def reads_variable(lm: LM, name: str) -> bool:
    """Return True if the model's chat template reads the variable `name`."""
    return template_reads(lm.text.chat_template or "", name)


def latest_turns(messages: Sequence[Json], fits: Callable[[list[Json]], bool]) -> list[Json]:
    """Drop as few of the oldest turns as possible, so that the other messages fit.

    A turn begins with a user message. System messages and the last turn are never dropped.
    fits: returns True if these messages fit.
    """
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
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
    """Render the chat without the end of its last message, so that the model continues it.

    template_kwargs: variables of the template.
    """
    last = messages[-1]
    if last["role"] != "assistant" or not last.get("content"):
        raise invalid(
            "continue_final_message",
            "continue_final_message: the last message must be an assistant message with content",
        )
    # Alphanumeric: no template trims or escapes it.
    marker = f"weft{secrets.token_hex(8)}"
    messages_with_marker = [*messages[:-1], {**last, "content": last["content"] + marker}]
    options: dict[str, Any] = dict(template_kwargs or {})
    if tools:
        options["tools"] = list(tools)
    pieces = []
    for piece, is_text in lm.text.render_pieces(
        messages_with_marker, add_generation_prompt=False, **options
    ):
        before, is_last, _ = piece.partition(marker)
        pieces.append((before, is_text))
        if is_last:
            break
    else:
        raise ConfigError("the chat template omits the last message, so it cannot be continued")
    lm.check_length("".join(piece for piece, _ in pieces))
    user_texts = [message["content"] for message in messages if message["role"] == "user"]
    return ChatPrompt.from_pieces(
        lm.text,
        [piece for piece in pieces if piece[0]],
        user_prompt=user_texts[-1] if user_texts else "",
        template=None,
        tools=tools,
        tool_choice=None,
    )
