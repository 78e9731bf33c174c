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
    """Return the refusal of a field's value."""
    return RequestError(400, code, message, param=param, hint=hint)


def unsupported(param: str, why: str, hint: str = "") -> RequestError:
    """Return the refusal of a field that would change the answer and is not honoured here."""
    return invalid(param, f"{param}: {why}", code="unsupported_parameter", hint=hint)


def named(
    param: str, make: Callable[[], Value], grammar_code: str = "invalid_json_schema"
) -> Value:
    """Call what checks one field's value; its complaint then names the field.

    grammar_code: the error code of a GrammarError.
    """
    try:
        return make()
    except (ConfigError, ConstraintError) as error:
        code = grammar_code if isinstance(error, GrammarError) else "invalid_parameter"
        raise invalid(param, str(error), code=code, hint=error.hint) from error


@contextmanager
def overflow_named(param: str, n_new: int) -> Iterator[None]:
    """Report a prompt that is too long in the words that clients search for.

    litellm reads "maximum context length is", langchain "prompt is too long".

    param: the field that holds the prompt. n_new: the new tokens that the request asks for.
    """
    try:
        yield
    except ContextOverflow as error:
        if not error.n_ctx:
            raise
        at_least = "at least " if "at least" in str(error) else ""  # it was not tokenised
        raise RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {error.n_ctx} tokens. However, you requested"
            f" {at_least}{error.n_tokens + n_new} tokens ({error.n_tokens} in the {param}, {n_new}"
            f" in the completion): the prompt is too long. Please reduce the length of the {param}"
            " or the completion.",
            param=param,
            details={"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx},
        ) from error
