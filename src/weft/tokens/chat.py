"""Chat messages to prompt text, by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# What a template may fail with when the messages are not what it expects.
_RUNTIME_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as a list of dicts, each with a role and a content.

    Raises: ConfigError if there are none, or one is not a message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(
            f"messages are {_brief(messages)}; allowed is a list like "
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
    """Return the prompt text; special tokens are in it as text.

    options: further variables for the template (tools, documents, enable_thinking, …).
    Raises: ConfigError with the template's own message when it refuses.
    """
    from jinja2 import TemplateError

    checked = check_messages(messages)
    try:
        return _compiled(template).render(
            messages=checked,
            bos_token=bos_token,
            eos_token=eos_token,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
    except (TemplateError, *_RUNTIME_ERRORS) as error:
        raise ConfigError(
            f"the model's chat template refused the messages: {error}. Change the messages, "
            "or give the prompt as plain text with template=False"
        ) from error


def check_variables(template: str, given: Iterable[str]) -> None:
    """Refuse variables that the template never reads: they would have no effect.

    Raises: ConfigError naming what it reads.
    """
    known = _variables(template) - {"messages", "add_generation_prompt", "raise_exception"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"this chat template does not read {unknown[0]!r}, which would have no effect;"
            f" it reads: {', '.join(sorted(known)) or 'nothing but the messages'}"
        )


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"message {index} is {_brief(message)}; allowed is a mapping with role and content"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"message {index} has role {role!r}; allowed is a name such as 'user'")
    # An assistant that only calls tools says nothing.
    silent = content is None and message.get("tool_calls")
    if not (isinstance(content, str | list) or silent):
        raise ConfigError(
            f"message {index} has content {_brief(content)}; allowed is a string or a list of parts"
        )
    return dict(message)


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except TemplateError as error:
        raise ConfigError(f"the chat template is no template: {error}") from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@cache
def _environment() -> Environment:
    """Return the environment that chat templates are written for: Transformers' own names."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; here it is transparent."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter: that one escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
