"""What all requests and replies share."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..._core.validation import as_index, find_lone_surrogate, lone_surrogate_message

Json = dict[str, Any]


_EXACT = 2.0**53  # below it floats are the numbers that were written
_NOTES = ("meta",)  # kept as they are, halves of characters, too


def validate_json(value: object, *, is_text: bool = True) -> object:
    """Return a field's value; Python reads more from JSON than that has, and than is text.

    is_text: what is in it is for a model, a name or a search. Raises: ValueError for NaN,
    infinities, and halves of characters.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.keys())
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"it has {each}, which is no number of JSON; leave it out")
        elif is_text and isinstance(each, str) and (at := find_lone_surrogate(each)) is not None:
            raise ValueError(lone_surrogate_message("it", each, at))
    return value


def as_json(value: object) -> object:
    """Return what a program hands over as JSON would have it.

    Tuples and sets are lists, NumPy's integers whole numbers, and numbers as keys texts.
    """
    if isinstance(value, dict):
        return {_key(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    number = as_index(value)
    return value if number is None else number


def _key(key: object) -> object:
    number = as_index(key)
    return key if number is None else str(number)


class RequestModel(BaseModel):
    """A request: what is not known in it is refused by name, never ignored.

    Nor is it taken for something else: "2" and true are no numbers. A whole number is a float.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _validate_json(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
            value = int(value)  # 2.0 is a whole number of JSON; a float takes it, too
        return validate_json(as_json(value), is_text=info.field_name not in _NOTES)


class ResponseModel(BaseModel):
    """A reply. A later server may tell more."""

    model_config = ConfigDict(extra="ignore")


class ErrorDetail(ResponseModel):
    """What went wrong. `message`, `type`, `param` and `code` are OpenAI's fields."""

    message: str = Field(description="What was wrong, what is allowed and what to do.")
    type: str = Field(description="The kind of error, as invalid_request_error.")
    code: str = Field(description="The error, as node_not_found.")
    param: str | None = Field(
        default=None, description="The parameter that is wrong, where it is one."
    )
    details: Json = Field(default_factory=dict, description="Figures, as n_ctx or the revision.")
    hint: str = Field(default="", description="What to do.")
    request_id: str = Field(
        default="", description="The request, for who looks into the server's log."
    )


class ErrorReply(ResponseModel):
    """The body of every reply that is not 2xx."""

    error: ErrorDetail
