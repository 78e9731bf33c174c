"""Constraints in vLLM's words, where these mean exactly the same."""

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
    """A constraint as vLLM takes it. refusal: what it would not honour exactly; None: it would.

    lark: of a grammar. allowed: token ids, to which the end tokens come.
    """

    refusal: str | None = None
    lark: str = ""
    allowed: frozenset[int] = frozenset()

    def arguments(self, stop_ids: frozenset[int]) -> dict[str, Any]:
        """Return the keywords of vLLM's SamplingParams."""
        if self.allowed:
            return {"allowed_token_ids": sorted(self.allowed | stop_ids)}
        from vllm.sampling_params import StructuredOutputsParams

        return {"structured_outputs": StructuredOutputsParams(grammar=self.lark)}


@lru_cache(maxsize=64)
def structured(constraint: Constraint, *, by_guidance: bool) -> Structured:
    """Return a constraint in vLLM's words. by_guidance: vLLM matches by llguidance, and ends a text
    by the same token as Weft; else grammars are refused.
    """
    if isinstance(constraint, Allow):
        return Structured(allowed=constraint.ids)
    what = f"the constraint {type(constraint).__name__}"
    if not isinstance(constraint, Grammar) or not by_guidance:
        return Structured(refusal=what)
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = as_lark(constraint.grammar())
        if any_to_lark(lark) != lark or LLMatcher.validate_grammar(
            LLMatcher.grammar_from_lark(lark), None
        ):
            return Structured(refusal=what)  # it names special tokens, say
    except (GrammarError, ValueError):
        return Structured(refusal=what)
    return Structured(lark=lark)


def as_lark(text: str) -> str:
    """Return llguidance's own form of a grammar as Lark text."""
    if not text.startswith("{"):
        return text
    (made,) = json.loads(text)["grammars"]
    lark: str | None = made.get("lark_grammar")
    return lark if lark is not None else f"start: %json {json.dumps(made['json_schema'])}"
