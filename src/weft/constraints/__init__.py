"""Constraints: what text a generation may produce.

    from weft.constraints import Choice, JsonSchema, Regex
    loom.grow(n=4, constraint=Regex("[0-9]+"))

`constraint=` of every face takes one of these, a Pydantic class, a JSON-schema dict, or a set of
token ids.
"""

from __future__ import annotations

from .allow import Allow
from .base import Constraint, Matcher
from .grammar import GBNF, Choice, JsonSchema, Lark, Regex
from .kinds import as_constraint, from_dict
from .lazy import Lazy
from .schema import json_schema_to_grammar

__all__ = [
    "GBNF",
    "Allow",
    "Choice",
    "Constraint",
    "JsonSchema",
    "Lark",
    "Lazy",
    "Matcher",
    "Regex",
    "as_constraint",
    "from_dict",
    "json_schema_to_grammar",
]
