"""Chat messages to prompt text, by the model's own template."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..atomic_files import PARSE_ERRORS, read_text

if TYPE_CHECKING:
    from jinja2 import Template


ROLES = ("system", "user", "assistant", "tool")
# How templates and callers name what an assistant thought.
REASONING = ("reasoning_content", "reasoning", "thinking")
_ROLE = re.compile(r"[\w-]+")  # a special token's name is none


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call in a model's answer.

    name: the function.
    arguments: the JSON text of an object.
    id: the id that the model wrote; "" if it wrote none.
    """

    name: str
    arguments: str
    id: str = ""

    def message(self) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`, in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        known = {"id": self.id} if self.id else {}
        return {**known, "type": "function", "function": function}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as a list of dicts, each with a role and a content.

    Raises: ConfigError if there are none, or one is not a message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(
            f"messages are {_short_repr(messages)}; allowed is a list like "
            '[{"role": "user", "content": "Hello"}]'
        )
    if not messages:
        raise ConfigError("there are no messages; give at least one")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """Render a chat by a Jinja template: return the prompt text, with special tokens as text.

    options: further variables for the template (tools, documents, enable_thinking, …).

    Raises: ConfigError with the template's own message when it raises an error.
    """
    from jinja2 import TemplateError

    from .sandbox import render

    checked = check_messages(messages)
    names = {
        "messages": checked,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
        **options,
    }
    try:
        return render(_compile_cached(template), names)
    except (TemplateError, *PARSE_ERRORS, MemoryError) as error:
        raise ConfigError(
            f"the model's chat template rejected the messages{_line_note(error)}: "
            f"{_reason(error)}. Change the messages, or give the prompt as plain text with "
            "template=False"
        ) from error


def read_chat_template(given: str | os.PathLike[str]) -> str:
    """Return a chat template: text with a brace is the template, anything else names its file.

    Raises: ConfigError for a file that cannot be read, and for text that is not a template.
    """
    if not isinstance(given, str | os.PathLike) or given == "":
        raise ConfigError(
            f"chat_template is {given!r:.80}; allowed are a file and the text of a Jinja template"
        )
    is_text = isinstance(given, str) and "{" in given
    template = str(given) if is_text else read_text(given, ConfigError)
    if "{" not in template:
        raise ConfigError(f"{given} has no Jinja braces, so it is not a chat template")
    _variables(template)
    return template


def needs_form(message: Mapping[str, Any]) -> bool:
    """Return True if a message has tool calls, a tool's result or reasoning.

    Templates read these in different forms (see `ChatForm`).
    """
    return (
        bool(message.get("tool_calls"))
        or message["role"] == "tool"
        or any(message.get(name) for name in REASONING)
    )


def check_roles(
    template: str, messages: Sequence[Mapping[str, Any]], rendered: str, **options: Any
) -> None:
    """Raise ConfigError for a message whose role the template does not know or does not render.

    A role is known if the template contains its name. The usual roles (`ROLES`) are also known if
    the message's text is in the prompt. "user" and "assistant" are always accepted.

    Args:
        template: the chat template.
        messages: the chat.
        rendered: the prompt that the template wrote for it.
        options: further variables of the template.
    """
    words = template_words(template)
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        # Of other roles a template may well leave earlier messages out.
        if (role in words and _ROLE.fullmatch(role)) or role in ("user", "assistant"):
            continue
        text = content.strip() if isinstance(content, str) else ""
        if role in ROLES and text in rendered:
            continue
        fault = "leaves out" if role in ROLES else "does not know"
        raise ConfigError(
            f"message {index} has role {role!r}, which this chat template {fault}; allowed are"
            f" {', '.join(_rendered_roles(template, options))}"
        )


def template_reads(template: str, name: str) -> bool:
    """Return True if a template reads the variable `name`."""
    return name in _variables(template)


def check_variables(template: str, given: Iterable[str]) -> None:
    """Raise ConfigError for variables that the template never reads, so have no effect.

    The message lists the variables that it reads.

    given: the names of the variables.
    """
    known = _variables(template) - {"messages", "add_generation_prompt", "raise_exception"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"this chat template does not read {unknown[0]!r}, which would have no effect;"
            f" it reads: {', '.join(sorted(known)) or 'nothing but the messages'}"
        )


def _short_repr(value: object) -> str:
    """Return a shortened `repr` for error messages."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _check_message(index: int, message: object) -> dict[str, Any]:
    """Validate one message; return it as a dict.

    index: its index, for error messages.
    """
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"message {index} is {_short_repr(message)}; allowed is a mapping with role and content"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"message {index} has role {role!r}; allowed is a name such as 'user'")
    # An assistant that only calls tools says nothing.
    silent = content is None and bool(message.get("tool_calls"))
    if not (isinstance(content, str | list) or silent):
        raise ConfigError(
            f"message {index} has content {_short_repr(content)}; allowed is a string or a list of "
            "parts"
        )
    checked = dict(message)
    calls = checked.get("tool_calls")
    if calls:
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
            raise ConfigError(
                f"message {index} has tool_calls {_short_repr(calls)}; allowed is a list of calls"
            )
        checked["tool_calls"] = [
            each.message() if isinstance(each, ToolCall) else each for each in calls
        ]
    return checked


@lru_cache(maxsize=64)
def template_words(template: str) -> frozenset[str]:
    """Return the string constants in a template's expressions, such as names of roles."""
    from jinja2 import TemplateError, nodes

    from .sandbox import environment

    try:
        parsed = environment().parse(template)
    except (TemplateError, *PARSE_ERRORS, MemoryError):
        return frozenset()
    return frozenset(
        each.value for each in parsed.find_all(nodes.Const) if isinstance(each.value, str)
    )


def _rendered_roles(template: str, options: Mapping[str, Any]) -> list[str]:
    """Return the roles whose messages a template renders in test chats."""
    roles = dict.fromkeys((*ROLES, *sorted(_compared_roles(template))))
    return [
        role
        for role in roles
        if role in ("user", "assistant") or _is_rendered(template, role, options)
    ]


def _is_rendered(template: str, role: str, options: Mapping[str, Any]) -> bool:
    """Return True if the template renders the messages of a role, in some test chat."""
    probe, question = (
        {"role": role, "content": "weftsaid"},
        {"role": "user", "content": "weftasked"},
    )
    call = ToolCall("weftcalled", "{}", "weftid001").message()
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {**probe, "tool_call_id": "weftid001", "name": "weftcalled"}
    answered = {"role": "assistant", "content": "weftanswered"}
    chats: tuple[list[dict[str, Any]], ...] = (
        [probe, question],
        [question, probe],
        [question, calling, answer],
        [question, answered, probe],
    )
    for chat in chats:
        try:
            if probe["content"] in render_chat(template, chat, **options):
                return True
        except ConfigError:
            continue
    return False


@lru_cache(maxsize=64)
def _compared_roles(template: str) -> frozenset[str]:
    """Return the names that a template compares a message's role with."""
    from jinja2 import TemplateError, nodes

    from .sandbox import environment

    def is_role(part: nodes.Node) -> bool:
        """Return True if an expression of the template is a message's role."""
        return (
            (isinstance(part, nodes.Getattr) and part.attr == "role")
            or (isinstance(part, nodes.Name) and part.name == "role")
            or (isinstance(part, nodes.Getitem) and part.arg == nodes.Const("role"))
        )

    try:
        compared = list(environment().parse(template).find_all(nodes.Compare))
    except (TemplateError, *PARSE_ERRORS, MemoryError):
        return frozenset()
    parts = (op.expr for each in compared if is_role(each.expr) for op in each.ops)
    constants = (const for part in parts for const in (part, *part.find_all(nodes.Const)))
    names = (each.value for each in constants if isinstance(each, nodes.Const))
    return frozenset(each for each in names if isinstance(each, str) and _ROLE.fullmatch(each))


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    from jinja2 import TemplateError, meta

    from .sandbox import environment

    try:
        return frozenset(meta.find_undeclared_variables(environment().parse(template)))
    except (TemplateError, *PARSE_ERRORS) as error:
        raise ConfigError(
            f"the chat template is no template{_line_note(error)}: {_reason(error)}"
        ) from error


@lru_cache(maxsize=64)
def _compile_cached(template: str) -> Template:
    """Compile a template; the results are cached."""
    from .sandbox import compiled

    return compiled(template)


def _line_note(error: BaseException) -> str:
    """Return " in its line N" for an error that a template's line caused; "" if unknown."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        # So jinja calls what came from a string.
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in its line {line}"


def _reason(error: BaseException) -> str:
    """Return the message of an error in a template, for our own message."""
    if isinstance(error, RecursionError):
        return "it goes too deep"
    return "it needs too much memory" if isinstance(error, MemoryError) else str(error)
