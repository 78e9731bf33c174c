"""Constraints: what text a generation may produce.

    from weft.constraints import Choice, JsonSchema, Regex
    loom.grow(n=4, constraint=Regex("[0-9]+"))

`constraint=` also takes a Pydantic class, a function, a JSON-schema dict, or a set of token ids.
Other types work too: `int`, `Literal["yes", "no"]`, `list[str]`, a dataclass, a TypedDict.
"""

from __future__ import annotations

from .any_of import AnyOf
from .base import Constraint, Matcher
from .grammar import GBNF, Choice, Lark, Regex
from .json_schema import JsonSchema
from .json_schema_gbnf import json_schema_to_grammar
from .kinds import Allow, Lazy, as_constraint, from_dict
from .lines import EachLine
from .token_limits import TokenLimits

__all__ = [
    "GBNF",
    "Allow",
    "AnyOf",
    "Choice",
    "Constraint",
    "EachLine",
    "JsonSchema",
    "Lark",
    "Lazy",
    "Matcher",
    "Regex",
    "TokenLimits",
    "as_constraint",
    "from_dict",
    "json_schema_to_grammar",
]
