"""Conversion of constraints that vLLM enforces exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...constraints import Allow, Constraint
from ...constraints.grammar import Grammar
from ...errors import GrammarError


@dataclass(frozen=True)
class Structured:
    """A constraint as vLLM's structured outputs accept it: a grammar, or a set of token ids.

    Args:
        unsupported: description of a constraint that vLLM would not enforce exactly; None
            otherwise.
        lark: grammar in llguidance's format.
        allowed: token ids; end tokens are added.
    """

    unsupported: str | None = None
    lark: str = ""
    allowed: frozenset[int] = frozenset()

    def arguments(self, stop_ids: frozenset[int]) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's SamplingParams."""
        if self.allowed:
            return {"allowed_token_ids": sorted(self.allowed | stop_ids)}
        from vllm.sampling_params import StructuredOutputsParams

        return {"structured_outputs": StructuredOutputsParams(grammar=self.lark)}


@lru_cache(maxsize=64)
def structured(constraint: Constraint, *, by_guidance: bool) -> Structured:
    """Convert a constraint to vLLM's format.

    Args:
        constraint: the constraint.
        by_guidance: vLLM matches by llguidance and ends texts by the same token as Weft. Otherwise
            grammars are unsupported.
    """
    if isinstance(constraint, Allow):
        return Structured(allowed=constraint.ids)
    what = f"the constraint {type(constraint).__name__}"
    if not isinstance(constraint, Grammar) or not by_guidance:
        return Structured(unsupported=what)
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = as_lark(constraint.grammar())
        if any_to_lark(lark) != lark or LLMatcher.validate_grammar(
            LLMatcher.grammar_from_lark(lark), None
        ):
            return Structured(unsupported=what)  # for example, it names special tokens
    except (GrammarError, ValueError):
        return Structured(unsupported=what)
    return Structured(lark=lark)


def as_lark(text: str) -> str:
    """Return llguidance's own form of a grammar as Lark text."""
    if not text.startswith("{"):
        return text
    (grammar,) = json.loads(text)["grammars"]
    lark: str | None = grammar.get("lark_grammar")
    return lark if lark is not None else f"start: %json {json.dumps(grammar['json_schema'])}"
