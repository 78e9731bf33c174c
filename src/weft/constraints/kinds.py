"""What users hand in as a constraint, and constraints as JSON data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, FormatError
from .allow import Allow
from .base import Constraint
from .grammar import GBNF, Choice, JsonSchema, Lark, Regex, is_pydantic
from .lazy import Lazy

_ALLOWED = (
    "a Pydantic class, a JSON-schema dict, JsonSchema, Regex, Lark, GBNF, Choice, Allow or Lazy of "
    "weft.constraints, or a set of token ids"
)


def as_constraint(value: Any) -> Constraint:
    """Return what a user handed in as a constraint. Raises: ConfigError, GrammarError."""
    if isinstance(value, Constraint):
        return value
    if isinstance(value, Mapping) or is_pydantic(value):
        return JsonSchema(value)
    if isinstance(value, set | frozenset):
        return Allow(value)
    hint = 'a text may be many things: say Regex("…"), Lark("…"), GBNF("…") or Choice(["…"])'
    raise ConfigError(
        f"constraint is {value!r}; allowed is {_ALLOWED}",
        hint=hint if isinstance(value, str) else "",
    )


def from_dict(data: Mapping[str, Any]) -> Constraint:
    """Return a constraint from what `to_dict` wrote. Raises: FormatError."""
    kinds: dict[str, Any] = {
        "json_schema": JsonSchema,
        "regex": Regex,
        "lark": Lark,
        "gbnf": GBNF,
        "choice": Choice,
        "allow": Allow,
    }
    if isinstance(data, Mapping) and "lazy" in data:
        triggers = [_trigger(each) for each in data.get("triggers", ())]
        return Lazy(from_dict(data["lazy"]), triggers)
    if isinstance(data, Mapping) and len(data) == 1:
        name, value = next(iter(data.items()))
        if name in kinds:
            made: Constraint = kinds[name](value)
            return made
    raise FormatError(f"{data!r} is no saved constraint")


def _trigger(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    try:
        return re.compile(data["pattern"], data.get("flags", 0))
    except (re.error, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"{data!r} is no saved pattern: {error}") from error
