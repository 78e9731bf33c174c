"""Values that calls return: frozen, with a representation that fits on one screen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .._core.sched.work import FinishReason
    from ..loom import Heddle

Normalize = Literal["none", "tokens", "bytes"]

_SCREEN = 20  # rows that a representation lists before it counts the rest


@dataclass(frozen=True, slots=True)
class TokenProb:
    """One token of a next-token distribution."""

    id: int
    text: str
    bytes: bytes
    logprob: float  # natural logarithm of `p`
    p: float  # probability before any filter
    rank: int  # 0 for the likeliest token

    def __repr__(self) -> str:
        return f"TokenProb({self.rank}: {self.text!r} p={self.p:.4f} id={self.id})"

    def _repr_html_(self) -> str:
        from ..viz.notebook import token_prob_card

        return token_prob_card(self)


class Distribution(tuple[TokenProb, ...]):
    """The likeliest next tokens, likeliest first: a tuple of `TokenProb`, from `Heddle.next`."""

    __slots__ = ()

    def p_of(self, text: str) -> float:
        """Return the total probability of the listed tokens with this text; 0.0 without any."""
        return sum(entry.p for entry in self if entry.text == text)

    def __repr__(self) -> str:
        lines = [f"{e.rank:>4}  {e.p:7.2%}  {e.id:>7}  {e.text!r}" for e in self[:_SCREEN]]
        return "\n".join([*lines, *_more(len(self))])

    def _repr_html_(self) -> str:
        from ..viz.notebook import distribution_card

        return distribution_card(self)


@dataclass(frozen=True, slots=True, repr=False)
class TextScore:
    """The log-probability of a text under the model, as `Heddle.measure` and `LM.score` return it.

    tokens: token ids of the text.
    texts: the text of each token.
    logprobs: the logprob of each token, in nats, before any filter.
    ranks: the rank of each token, 0 for the likeliest; None if the engine does not report it.
    n_bytes: UTF-8 length of the text.
    normalize: what `score` divides the logprob by.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...] | None = None
    n_bytes: int = 0
    normalize: Normalize = "none"

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the text."""
        return len(self.tokens)

    @property
    def score(self) -> float:
        """The logprob, divided by the number of tokens or bytes if `normalize` says so."""
        if self.normalize == "none":
            return self.total
        return self.total / (self.n_tokens if self.normalize == "tokens" else self.n_bytes)

    @property
    def is_greedy(self) -> bool | None:
        """True if greedy decoding gives this text; None if the engine reports no ranks."""
        return None if self.ranks is None else not any(self.ranks)

    @property
    def logprob(self) -> float:
        """The logprob of the full text: the sum of the logprobs."""
        return math.fsum(self.logprobs)

    @property
    def total(self) -> float:
        """Same as `logprob`."""
        return self.logprob

    @property
    def mean(self) -> float:
        """The mean logprob per token."""
        return self.total / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-mean); infinite if a token is impossible."""
        try:
            return math.exp(-self.mean)
        except OverflowError:
            return math.inf

    def __repr__(self) -> str:
        return (
            f"TextScore({len(self.tokens)} tokens, logprob {self.total:z.3f}, "
            f"mean {self.mean:z.3f}, perplexity {self.perplexity:.3f})"
        )

    def __str__(self) -> str:
        """Return a table: the summary, and the logprob and text of each token."""
        rows = zip(self.texts[:_SCREEN], self.logprobs, strict=False)
        lines = [f"  {logprob:z9.3f}  {text!r}" for text, logprob in rows]
        return "\n".join([repr(self), *lines, *_more(len(self.tokens))])

    def _repr_html_(self) -> str:
        from ..viz.notebook import text_score_card

        return text_score_card(self)


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """The candidate that `LM.choose` selected, with the scores of all.

    text: the selected candidate; the text of its tokens if it was given as token ids.
    index: its index in the candidates.
    method: the method of the choice.
    values: what the method compared, one value per candidate. The values of
        "greedy_token_selection" are tuples, which compare token by token.
    scores: the score of each candidate after the prompt.
    """

    text: str
    index: int
    method: str
    values: tuple[float | tuple[float, ...], ...]
    scores: tuple[TextScore, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The probability of each candidate, given that the text is one of them.

        It is the softmax of the candidates' total logprobs (`scores[i].total`). It does not depend
        on `method`, so the selected candidate can have a lower one than another.
        """
        highest = max(score.total for score in self.scores)
        weights = [math.exp(score.total - highest) for score in self.scores]
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)

    def __repr__(self) -> str:
        return f"Selection({self.text!r}, {self.index} of {len(self.scores)}, by {self.method})"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The new tokens of one branch of a stream.

    Attributes:
        branch: index of the branch in the call, counted over all grown nodes.
        node: the branch's heddle. Its tokens grow with the deltas; it is attached to its parent
            once `finish_reason` is set.
        token_ids: all new tokens since the last delta of the branch, often one.
        text: their text. An incomplete character arrives with the delta that completes it.
        logprobs: of the new tokens, in nats; empty if the engine does not report them.
        finish_reason: None while the branch grows; "error" if it failed and is not attached.
        entropies: of the new tokens, in nats; empty if the engine does not report them.
        texts: the text of each new token. Joined they equal `text`, except that the last delta's
            `text` also has what an incomplete character at the branch's end decodes to.
    """

    branch: int
    node: Heddle
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    entropies: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()


def _more(length: int) -> list[str]:
    """Return a last line that counts the rows beyond a screen, as a list; [] if all fit."""
    return [f"  … {length - _SCREEN} more"] if length > _SCREEN else []
