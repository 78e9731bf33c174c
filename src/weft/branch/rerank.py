"""`Rerank`: score documents for a query by the model's probability of "yes" against "no"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING

from .._core.sched.work import Extend, Logits, Ticket
from .._core.validation import check_int
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lm.lm import LM

QUESTION = (
    "Query: {query}\n\nDocument: {document}\n\n"
    "Does the document answer the query? Say yes or no, nothing else."
)


@dataclass(frozen=True, slots=True)
class Ranked:
    """One result of `Rerank.rank`: a document, its index in the input, and its score."""

    index: int
    score: float
    document: str

    @property
    def p(self) -> float:
        """The score as a probability, 0 to 1, of the first word against the second."""
        return 0.5 * (1.0 + math.tanh(self.score / 2))


class Rerank:
    """Scores how well documents answer a query, with a language model as the cross-encoder.

    The score is the log-odds of "yes" over "no" after a question about the document. Nothing is
    generated. The common beginning of the prompts runs once, then the documents run in batches. A
    score is unbounded; higher is better.
    """

    def __init__(
        self,
        lm: LM,
        *,
        question: str = QUESTION,
        words: tuple[str, str] = ("yes", "no"),
        system: str | None = None,
        n_at_once: int = 64,
    ) -> None:
        """Create a reranker.

        Args:
            question: a text with {query} before {document}.
            words: the positive and the negative answer, compared at their first different token.
            system: a system message before the question.
            n_at_once: documents per batch; their logits are on the host at the same time.

        Raises: ConfigError.
        """
        if "{query}" not in question or "{document}" not in question:
            raise ConfigError(f"question is {question!r}; it needs {{query}} and {{document}}")
        n_at_once = check_int("n_at_once", n_at_once, 1)
        good, bad = (lm.text.continuation(word) for word in words)
        self._shared = commonprefix([good, bad])
        n = len(self._shared)
        if n in (len(good), len(bad)):
            raise ConfigError(f"one of the words {words!r} begins with the other; take others")
        self.lm = lm
        self.question = question
        self.n_at_once = n_at_once
        self._good, self._bad = good[n], bad[n]
        self._first = [] if system is None else [{"role": "system", "content": system}]

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return each document's score, in order.

        Raises: ContextOverflow for a document that is too long.
        """
        scores: list[float] = []
        for items in self._batches(query, documents):
            tickets = self.lm.submit(items)
            self.lm.drive(tickets)
            scores += map(self._log_odds, tickets)
        return scores

    async def ascore(self, query: str, documents: Sequence[str]) -> list[float]:
        """The async form of `score`."""
        scores: list[float] = []
        for items in self._batches(query, documents):
            tickets = await self.lm.asubmit(items)
            await self.lm.adrive(tickets)
            scores += map(self._log_odds, tickets)
        return scores

    def rank(self, query: str, documents: Sequence[str], top: int | None = None) -> list[Ranked]:
        """Return the `top` best documents (None: all), best first; equal ones in input order."""
        return _sort_by_score(documents, self.score(query, documents), top)

    async def arank(
        self, query: str, documents: Sequence[str], top: int | None = None
    ) -> list[Ranked]:
        """The async form of `rank`."""
        return _sort_by_score(documents, await self.ascore(query, documents), top)

    def _batches(self, query: str, documents: Sequence[str]) -> Iterator[list[Extend]]:
        """Yield the work items of each batch of documents."""
        if isinstance(documents, str):
            raise ConfigError("documents is one text; give a list of texts")
        for first in range(0, len(documents), self.n_at_once):
            group = documents[first : first + self.n_at_once]
            places = [self.lm.place(self._prompt(query, document)) for document in group]
            yield [Extend(place, (), (Logits(place.depth),)) for place in places]

    def _prompt(self, query: str, document: str) -> list[int]:
        """Return the token ids of the question about a document and of the words' shared tokens."""
        text = self.lm.text
        before, _, after = self.question.partition("{document}")
        question = before.replace("{query}", query) + document + after.replace("{query}", query)
        if text.chat_template is None:
            return [*text.encode(question), *self._shared]
        messages = [*self._first, {"role": "user", "content": question}]
        return [*text.encode_chat(messages), *self._shared]

    def _log_odds(self, ticket: Ticket) -> float:
        """Return the log-odds of the first word from an item's result."""
        logits = ticket.result()[0]
        return float(logits[self._good]) - float(logits[self._bad])


def _sort_by_score(documents: Sequence[str], scores: list[float], top: int | None) -> list[Ranked]:
    """Return the `top` best documents (None: all), best first."""
    ranked = [Ranked(i, score, documents[i]) for i, score in enumerate(scores)]
    return sorted(ranked, key=lambda document: -document.score)[:top]
