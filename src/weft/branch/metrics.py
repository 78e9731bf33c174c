"""What a branch tells of its tokens: one record an accepted token, and figures over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Base = Literal["nats", "bits"]
LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Produced:
    """A token that a branch drew and has not committed.

    text: what committing it adds; an unfinished character waits for the next token.
    is_stop: it ends the text; do not commit it.
    logprob: raw, full vocabulary. kept_logprob: among what the filters left. Nats.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    kept_logprob: float

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a branch.

    position: tokens of the path. n_accepted: those accepted, on this branch and before its forks.
    perplexity, sampling_perplexity: over accepted tokens, of the model and of what the filters
    left; inf without any. kv_tokens: tokens of the path whose KV is resident; kv_bytes: its size.
    """

    position: int
    n_accepted: int
    perplexity: float
    sampling_perplexity: float
    kv_tokens: int
    kv_bytes: int


class Accepted:
    """An accepted token and the sums up to it; a chain that forks share and rewinds walk back.

    position: index of the token in the path. Surprisals in nats, None where unknown.
    """

    __slots__ = ("before", "kept", "n", "n_kept", "n_raw", "position", "raw", "token")

    def __init__(
        self,
        before: Accepted | None,
        position: int,
        token: int,
        surprisal: float | None,
        kept_surprisal: float | None,
    ) -> None:
        self.before = before
        self.position = position
        self.token = token
        self.n: int = 1 if before is None else before.n + 1
        raw: float = 0.0 if before is None else before.raw
        kept: float = 0.0 if before is None else before.kept
        n_raw: int = 0 if before is None else before.n_raw
        n_kept: int = 0 if before is None else before.n_kept
        if surprisal is not None and math.isfinite(surprisal):
            raw, n_raw = raw + max(surprisal, 0.0), n_raw + 1
        if kept_surprisal is not None and math.isfinite(kept_surprisal):
            kept, n_kept = kept + max(kept_surprisal, 0.0), n_kept + 1
        self.raw: float = raw
        self.n_raw: int = n_raw
        self.kept: float = kept
        self.n_kept: int = n_kept

    def own(self) -> tuple[float | None, float | None]:
        """Return the surprisals of this token alone, None where unknown."""
        before = self.before
        raw, n_raw = (before.raw, before.n_raw) if before is not None else (0.0, 0)
        kept, n_kept = (before.kept, before.n_kept) if before is not None else (0.0, 0)
        return (
            self.raw - raw if self.n_raw > n_raw else None,
            self.kept - kept if self.n_kept > n_kept else None,
        )


def chain(last: Accepted | None) -> Iterator[Accepted]:
    """Yield accepted tokens, the last one first."""
    while last is not None:
        yield last
        last = last.before


def tokens_of(last: Accepted | None) -> list[int]:
    """Return the accepted tokens in order. Cost: O(tokens)."""
    return [each.token for each in chain(last)][::-1]


def perplexity(total: float, n: int) -> float:
    """Return exp of the mean surprisal; inf without any."""
    return math.exp(total / n) if n else math.inf


def in_base(nats: float, base: str) -> float:
    """Return nats in the base asked for. Raises: ValueError for another base."""
    if base not in ("nats", "bits"):
        raise ValueError(f'base is {base!r}; allowed are "nats" and "bits"')
    return nats / LN2 if base == "bits" else nats
