"""What a search returns: the best node, its text, the tree, and what it cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..loom import Heddle, Loom

Limit = Literal["tokens", "seconds", "kv"]
_SCREEN = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """What a search has spent.

    tokens: generated ones, end tokens and all proposals included. prompt_tokens: of the questions
    that valued candidates, read but not generated. stopped: the budget that ended the search early.
    """

    tokens: int
    seconds: float
    candidates: int = 0
    valued: int = 0
    prompt_tokens: int = 0
    stopped: Limit | None = None

    def __str__(self) -> str:
        parts = [f"{self.tokens:,} token{'s' * (self.tokens != 1)}", f"{self.seconds:.2f} s"]
        if self.candidates:
            parts.append(f"{self.candidates:,} candidate{'s' * (self.candidates != 1)}")
        if self.stopped is not None:
            parts.append(f"stopped by the budget of {self.stopped}")
        return " · ".join(parts).replace(",", " ")


@dataclass(frozen=True, slots=True)
class Level:
    """What a search reports of a round: its new candidates, those kept, best first, the cost."""

    depth: int
    candidates: tuple[Heddle, ...]
    kept: tuple[Heddle, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer and the branches that gave it; `mean_logprob` is that of the likeliest of them."""

    answer: Hashable
    nodes: tuple[Heddle, ...]
    mean_logprob: float

    @property
    def count(self) -> int:
        """How many branches gave this answer."""
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"Vote({self.answer!r}: {self.count}, mean_logprob {self.mean_logprob:z.3f})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best node of a search, its text after the prompt, the whole tree, and the cost.

    solved: what the verifier or the task's checker says of the answer; None where there is none.
    False: nothing that was found is right, and `best` is only what looked best.
    votes: best-of-n only, most votes first.
    log_evidence: smc only, the log of the estimated mean potential; in nats.
    states: the state of each node, where the search went over states of the caller's own.
    """

    best: Heddle
    text: str
    loom: Loom
    cost: Cost
    solved: bool | None = None
    votes: tuple[Vote, ...] = ()
    log_evidence: float | None = None
    states: Mapping[Heddle, Any] = field(default_factory=dict)

    @property
    def state(self) -> Any:
        """The state of the best node; None where the search went over lines."""
        return self.states.get(self.best)

    def __repr__(self) -> str:
        verdict = {None: "", True: "solved · ", False: "not solved · "}[self.solved]
        votes = [f"  {vote.count:>4}  {vote.answer!r}" for vote in self.votes[:_SCREEN]]
        if len(self.votes) > _SCREEN:
            votes.append(f"  … {len(self.votes) - _SCREEN} more")
        return "\n".join([self.text, f"({verdict}{self.cost})", *votes])

    def _repr_html_(self) -> str:
        from ..viz import cards

        return cards.search_result(self)
