"""Prompt lookup: n-grams of the token tree, and the text that followed them, as drafts of runs."""

from __future__ import annotations

from collections.abc import Sequence

LONG, SHORT = 5, 2  # lengths of the n-grams
CONTEXT = 16  # tokens before new ones that matches are compared with
MAX_TOKENS = 1 << 16  # tokens whose n-grams are remembered; older ones are forgotten
# A sequence of token ids, and the index after an n-gram in it.
Match = tuple[Sequence[int], int]


class NGramIndex:
    """The latest occurrence of each n-gram in the paths of an LM.

    Between `MAX_TOKENS` and half of them are remembered. Cost: O(1) per token.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[int, ...], Match] = {}
        self._older: dict[tuple[int, ...], Match] = {}
        self._n_recent = 0

    def add(self, ids: Sequence[int], end: int) -> None:
        """Add the n-grams of `ids` that end before index `end`, which must have a token."""
        for n in (SHORT, LONG):
            if end >= n:
                self._recent[tuple(ids[end - n : end])] = (ids, end)
        self._n_recent += 1
        if self._n_recent >= MAX_TOKENS // 2:
            self._recent, self._older, self._n_recent = {}, self._recent, 0

    def add_path(self, ids: Sequence[int], first: int) -> None:
        """Add the n-grams that end before the tokens of `ids` from index `first` on."""
        for end in range(max(first, SHORT), len(ids)):
            self.add(ids, end)

    def find(self, ids: Sequence[int]) -> Match | None:
        """Return the latest occurrence of the n-gram that `ids` ends with, preferring long ones."""
        for n in (LONG, SHORT):
            if len(ids) >= n:
                key = tuple(ids[-n:])
                match = self._recent.get(key) or self._older.get(key)
                if match is not None:
                    return match
        return None


class Acceptance:
    """Acceptance rates of draft tokens, by the length of the match that they follow.

    Recent tokens count more. `rate` starts at an assumed rate, and approaches the counted one.
    """

    __slots__ = ("_base", "_hits", "_limit", "_trials")

    # Lengths from `LIMITS[i]` on count as kind i; `_PRIOR` are their assumed rates.
    LIMITS = (2, 3, 4, 6, 9, 16)
    _KIND = [0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5]
    _PRIOR = (0.1, 0.2, 0.3, 0.5, 0.6, 0.8)
    _PRIOR_TRIALS = 4.0

    def __init__(self, base: Acceptance | None = None, *, limit: float = 200.0) -> None:
        """Create the counts of an LM, or those of a run.

        Args:
            base: the counts of the LM: the prior of a run's rates, and also updated by `count`.
                None: this object has the counts of the LM.
            limit: trials after which all counts are halved.
        """
        self._base = base
        self._limit = limit
        self._hits = [0.0] * len(self.LIMITS)
        self._trials = [0.0] * len(self.LIMITS)

    def count(self, n_matched: int, is_hit: bool) -> None:
        """Count one token after a match of `n_matched` tokens."""
        kind = self._KIND[min(n_matched, CONTEXT)]
        self._hits[kind] += is_hit
        self._trials[kind] += 1
        if self._trials[kind] > self._limit:
            self._hits[kind] /= 2
            self._trials[kind] /= 2
        if self._base is not None:
            self._base.count(n_matched, is_hit)

    def decay(self, factor: float) -> None:
        """Multiply the counts by a factor below 1, so that the rates approach the assumed ones."""
        self._hits = [factor * hits for hits in self._hits]
        self._trials = [factor * trials for trials in self._trials]

    def rate(self, n_matched: int) -> float:
        """Return the estimated acceptance of the token after a match of `n_matched` tokens."""
        kind = self._KIND[min(n_matched, CONTEXT)]
        prior = self._PRIOR[kind] if self._base is None else self._base.rate(n_matched)
        n = self._PRIOR_TRIALS
        return (self._hits[kind] + n * prior) / (self._trials[kind] + n)


class RunLookup:
    """Draft tokens of a run by prompt lookup: they followed the run's last tokens in earlier text.

    The object follows the earlier text token by token as long as the run draws the same tokens. So
    it measures the acceptance even while no drafts are verified.
    """

    __slots__ = (
        "_acceptance",
        "_end",
        "_ids",
        "_index",
        "_n_drawn",
        "_n_drawn_before",
        "_n_matched",
        "_source",
    )

    def __init__(self, index: NGramIndex, context: Sequence[int], acceptance: Acceptance) -> None:
        """Start after a prompt.

        Args:
            index: the LM's index; the run's tokens are added to it.
            context: the last `CONTEXT` tokens of the prompt.
            acceptance: the counts of the run.
        """
        self._index = index
        self._ids = list(context)
        self._acceptance = acceptance
        self._source: Sequence[int] | None = None
        self._end = self._n_matched = 0
        self._n_drawn = 0  # matched tokens that were drawn: forced ones predict nothing
        self._n_drawn_before = list(range(len(context) + 1))  # by index in `_ids`

    def push(self, token: int, *, is_forced: bool = False) -> None:
        """Append a token of the run, and find the text that may go on after it. Cost: O(1).

        is_forced: the constraint allowed only this token, so that it does not count as accepted.
        """
        source, ids = self._source, self._ids
        if source is not None:
            is_hit = source[self._end] == token
            if not is_forced:
                self._acceptance.count(self._n_drawn, is_hit)
                self._n_drawn += 1
            self._end, self._n_matched = self._end + 1, self._n_matched + 1
            if not is_hit:
                self._source = None
        ids.append(token)
        self._n_drawn_before.append(self._n_drawn_before[-1] + (not is_forced))
        if source is not None and self._end >= len(source):
            self._source = None
        # An n-gram is added when its next token is known. So a match always has one.
        self._index.add(ids, len(ids) - 1)
        if self._source is None or self._n_matched < LONG:
            self._find()

    def _find(self) -> None:
        """Use the latest occurrence of the last n-gram as source, unless it is a shorter match."""
        match = self._index.find(self._ids)
        if match is None:
            return
        source, end = match
        n_matched, n = SHORT, min(CONTEXT, end, len(self._ids))
        while n_matched < n and source[end - 1 - n_matched] == self._ids[-1 - n_matched]:
            n_matched += 1
        if self._source is None or n_matched > self._n_matched:
            self._source, self._end, self._n_matched = source, end, n_matched
            self._n_drawn = self._n_drawn_before[-1] - self._n_drawn_before[-1 - n_matched]

    def draft(self, n: int) -> list[int]:
        """Return at most `n` tokens that followed the last tokens of the run in earlier text.

        If they reach the end of the run itself, they repeat from there, as in a periodic text.
        """
        source, end, tokens = self._source, self._end, list[int]()
        if source is None:
            return tokens
        tokens += source[end : end + n]
        if source is self._ids:
            while len(tokens) < n:
                tokens.append(tokens[end + len(tokens) - len(source)])
        return tokens

    def chances(self, forced: Sequence[bool]) -> list[float]:
        """Return, for each draft token, the probability that all up to it are accepted.

        forced: for each of these tokens, True if the constraint allows only that token.
        """
        chances, chance, n_drawn = [], 1.0, self._n_drawn
        for is_forced in forced:
            if not is_forced:
                chance *= self._acceptance.rate(n_drawn)
                n_drawn += 1
            chances.append(chance)
        return chances
