"""Tokenize text without banned tokens, also if a vocabulary lacks single bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

TokenOf = Callable[[bytes], int | None]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The shortest tokenization of the rest of a text, from each of its positions.

    tokens: by position, the first token of the tokenization that starts there.

    ends: by position, the position after that token.

    costs: by position, the sum over the tokens. inf if there is no tokenization, 0 from the goal
    on.
    """

    tokens: Sequence[int]
    ends: Sequence[int]
    costs: Sequence[float]

    def has_cut(self, position: int) -> bool:
        """Return True if some tokenization leads from a position to the goal or beyond."""
        return self.costs[position] < math.inf

    def from_start(self) -> list[int]:
        """Return the tokens of the full text; [] if there is no tokenization."""
        cut: list[int] = []
        position = 0
        while self.has_cut(0) and self.costs[position]:
            cut.append(self.tokens[position])
            position = self.ends[position]
        return cut


class Vocabulary:
    """Looks up tokens by their bytes, and tokenizes text with the fewest tokens.

    spellings: the bytes of each token id; b"" for ids that write no text.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._ids: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}
        for token, spelled in enumerate(spellings):
            first = self._ids.setdefault(spelled, token)
            if first != token and spelled:
                self._duplicates.setdefault(spelled, [first]).append(token)
        self._ids.pop(b"", None)
        self._longest = max(map(len, self._ids), default=1)

    def token(self, spelled: bytes, banned: Set[int] = frozenset()) -> int | None:
        """Return the lowest id of a token with exactly these bytes that is not banned, or None."""
        token = self._ids.get(spelled)
        if token in banned:
            others = self._duplicates.get(spelled, ())
            return next((other for other in others if other not in banned), None)
        return token

    def tokens(self, spelled: bytes) -> list[int]:
        """Return the ids of all tokens with exactly these bytes."""
        token = self._ids.get(spelled)
        return [] if token is None else self._duplicates.get(spelled, [token])

    def cuts(self, text: bytes, goal: int, banned: Set[int]) -> Cuts:
        """Compute the shortest tokenizations of a text without banned tokens.

        Cost: O(length of the text * length of the longest token) lookups.

        Args:
            text: the text in UTF-8.
            goal: a position in the text; a tokenization may end there or later.
            banned: tokens that it must not have.
        """
        return self._search(text, goal, lambda spelled: self.token(spelled, banned), None)

    def cut(self, text: bytes, missing: int) -> list[int]:
        """Tokenize the full text with as few unknown bytes as possible, then as few tokens.

        missing: a byte without a token has the id `missing` + byte.
        """
        return self._search(text, len(text), self.token, missing).from_start()

    def _search(self, text: bytes, goal: int, token_of: TokenOf, missing: int | None) -> Cuts:
        """Compute the shortest tokenizations by dynamic programming from the end of the text.

        token_of: returns the token of given bytes, or None. missing: as for `cut`; None: no unknown
        bytes.
        """
        n = len(text)
        tokens, ends, costs = [-1] * n, [n] * n, [math.inf] * n + [0.0]
        for start in reversed(range(n)):
            if start >= goal:
                costs[start] = 0.0
                continue
            if missing is not None:
                costs[start] = 1.0 + n + costs[start + 1]
                tokens[start], ends[start] = missing + text[start], start + 1
            for end in range(min(n, start + self._longest), start, -1):
                if costs[end] + 1 >= costs[start]:
                    continue
                token = token_of(text[start:end])
                if token is not None:
                    tokens[start], ends[start], costs[start] = token, end, costs[end] + 1
        return Cuts(tokens, ends, costs)
