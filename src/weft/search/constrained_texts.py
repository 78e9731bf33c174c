"""Check texts that were not sampled under a mask against the constraint of a search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .._core.sampling.params import SamplingParams
from ..constraints import EachLine, Matcher, as_constraint
from ..lm.lm import LM
from ..loom import Heddle
from ..loom.constrained_text import allow_moved_spaces, constrained_tokens


class ConstrainedTexts:
    """Applies a search's constraint to texts that were not sampled under it.

    These are texts of functions, tasks and other models. The nodes that `add` creates have `params`
    with the constraint, so that it continues after the node's text instead of starting again.
    """

    def __init__(self, lm: LM, constraint: Any) -> None:
        self.lm = lm
        self.constraint = as_constraint(constraint)
        self.params = SamplingParams.resolve({"constraint": self.constraint}, SamplingParams())

    def tokens_below(self, node: Heddle, text: str, *, ends: bool = False) -> list[int] | None:
        """Tokenize a text that is to follow a node; return None if the constraint forbids it.

        ends: the constraint must also allow the text to end there.
        """
        matcher = self._matcher(node)
        for tokens in self._tokenizations(text):
            if matcher.takes(tokens):
                is_complete = _advanced(matcher.clone(), tokens).may_end
                return tokens if is_complete or not ends else None
        return None

    def add(self, node: Heddle, text: str) -> Heddle:
        """Add a text as a child of a node, and return the child.

        Sampling below the child continues the constraint, if the constraint allows the text.
        """
        tokens = self.tokens_below(node, text)
        if tokens is None:
            return node.add(text)
        child = node.add(tokens)
        child.params = self.params
        return child

    def must_end(self, node: Heddle) -> bool:
        """Return True if the constraint allows no further text after the node."""
        tokens = constrained_tokens(node, self.constraint)
        return bool(tokens) and self._matcher(node).must_end

    def _matcher(self, node: Heddle) -> Matcher:
        """Return the constraint's matcher in its state after a node's text."""
        matcher = self.lm.constraints.matcher(allow_moved_spaces(node, self.constraint))
        return _advanced(matcher, constrained_tokens(node, self.constraint))

    def _tokenizations(self, text: str) -> Iterator[list[int]]:
        """Yield the usual tokenization, then one that cuts tokens at line ends."""
        continuation = self.lm.text.continuation
        yield continuation(text)
        if isinstance(self.constraint, EachLine):
            ends = sorted(self.constraint.ends, key=len, reverse=True)
            pieces = re.split(f"({'|'.join(map(re.escape, ends))})", text)
            yield [token for piece in pieces if piece for token in continuation(piece)]


def _advanced(matcher: Matcher, tokens: Sequence[int]) -> Matcher:
    """Advance the matcher by these tokens, in place, and return it."""
    for token in tokens:
        matcher.accept(token)
    return matcher
