"""Base classes and validation of all requests and responses."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..._core.validation import as_index, find_lone_surrogate, lone_surrogate_message

Json = dict[str, Any]


_EXACT = 2.0**53  # below it floats represent integers exactly
_NOTES = ("meta",)  # stored as they are, including lone surrogates


def validate_json(value: object, *, is_text: bool = True) -> object:
    """Return a field's value if it is valid JSON; Python's parser accepts more.

    is_text: also reject lone surrogates in strings, which models, names and searches cannot have.

    Raises: ValueError for NaN, infinities and lone surrogates.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"it has {item}, which is not a JSON number; leave it out")
        elif is_text and isinstance(item, str) and (at := find_lone_surrogate(item)) is not None:
            raise ValueError(lone_surrogate_message("it", item, at))
    return value


def as_json(value: object) -> object:
    """Convert a Python value to JSON types: tuples and sets to lists, NumPy integers to int.

    Integer keys become strings.
    """
    if isinstance(value, dict):
        return {_key(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    number = as_index(value)
    return value if number is None else number


def _key(key: object) -> object:
    """Convert an integer key of a dict to a text."""
    number = as_index(key)
    return key if number is None else str(number)


class RequestModel(BaseModel):
    """Base of requests: unknown fields are rejected by name, never ignored.

    Types are strict: "2" and true are not numbers. An integral float counts as an integer.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _validate_json(cls, value: object, info: ValidationInfo) -> object:
        """Reject NaN, infinities and lone surrogates in any field."""
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
            value = int(value)  # JSON's 2.0 is an integer; a float field accepts it, too
        return validate_json(as_json(value), is_text=info.field_name not in _NOTES)


class ResponseModel(BaseModel):
    """Base of responses; a later server may add fields."""

    model_config = ConfigDict(extra="ignore")


class ErrorDetail(ResponseModel):
    """An error. `message`, `type`, `param` and `code` are OpenAI's fields."""

    message: str = Field(description="What is wrong, what is allowed and what to do.")
    type: str = Field(description="The kind of error, such as invalid_request_error.")
    code: str = Field(description="The error code, such as node_not_found.")
    param: str | None = Field(
        default=None, description="The invalid parameter, if the error is about one."
    )
    details: Json = Field(default_factory=dict, description="Values such as n_ctx or the revision.")
    hint: str = Field(default="", description="What to do.")
    request_id: str = Field(default="", description="The request's id in the server's log.")


class ErrorReply(ResponseModel):
    """The body of every response with a status other than 2xx."""

    error: ErrorDetail
