"""Errors about one field of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ....errors import ConfigError, ConstraintError, ContextOverflow, GrammarError
from ..errors import RequestError

Value = TypeVar("Value")


def invalid(
    param: str, message: str, *, code: str = "invalid_parameter", hint: str = ""
) -> RequestError:
    """Return the error for an invalid value of a field.

    param: the field's path in the request. message: starts with the field's name.
    """
    return RequestError(400, code, message, param=param, hint=hint)


def unsupported(param: str, why: str, hint: str = "") -> RequestError:
    """Return the error for a field that would change the answer and is not supported.

    param: the field's path in the request. why: the rest of the message.
    """
    return invalid(param, f"{param}: {why}", code="unsupported_parameter", hint=hint)


def check_field(
    param: str, make: Callable[[], Value], code_of_grammar: str = "invalid_json_schema"
) -> Value:
    """Call `make` and return its result; an error that it raises then names the field.

    param: the field's path in the request. code_of_grammar: error code of a GrammarError.
    """
    try:
        return make()
    except (ConfigError, ConstraintError) as error:
        code = code_of_grammar if isinstance(error, GrammarError) else "invalid_parameter"
        raise invalid(param, str(error), code=code, hint=error.hint) from error


@contextmanager
def translate_overflow(param: str, n_new: int = 0) -> Iterator[None]:
    """Turn ContextOverflow in the `with` block into RequestError 400, in words that clients match.

    litellm matches "maximum context length is", langchain "prompt is too long".

    Args:
        param: the field that holds the prompt.
        n_new: the number of requested new tokens; 0 if only the prompt counts.
    """
    try:
        yield
    except ContextOverflow as error:
        if not error.n_ctx:
            raise
        bound = "at least " if "at least" in str(error) else ""  # the prompt was not tokenized
        parts = f" ({error.n_tokens} in the {param}, {n_new} in the completion)" if n_new else ""
        raise RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {error.n_ctx} tokens. However, you requested"
            f" {bound}{error.n_tokens + n_new} tokens{parts}: the prompt is too long. Please reduce"
            f" the length of the {param}{' or the completion' if n_new else ''}.",
            param=param,
            hint=error.hint if error.n_tokens < error.n_ctx else "",
            details={"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx},
        ) from error


def check_room(n_prompt: int, n_new: int, n_ctx: int) -> None:
    """Raise ContextOverflow if a prompt and the requested new tokens exceed the context.

    Servers of OpenAI's protocol reject such requests. Clients then shorten the prompt.
    """
    if n_prompt + n_new > n_ctx:
        raise ContextOverflow(
            f"the prompt has {n_prompt} tokens and max_tokens is {n_new}, but the context is"
            f" {n_ctx}",
            n_tokens=n_prompt,
            n_ctx=n_ctx,
            hint="reduce max_tokens; -1 generates until the context is full",
        )
