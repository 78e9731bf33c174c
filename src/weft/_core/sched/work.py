"""What faces ask of the scheduler: extends and runs, and the tickets that answer them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...errors import Cancelled

if TYPE_CHECKING:
    from ..kv.place import Place
    from ..sampling.sampler import Sampler
    from .jobs import Job
    from .sequences import TokenSequence

FinishReason = Literal["stop", "length", "context", "cancelled", "interrupted", "error"]


class Logits(NamedTuple):
    """Want the raw logits after the path's first `depth` tokens.

    Answered by float32 [V], read-only: other callers get the same array. kept: answered by the
    store's LogitsRow, wherever the engine has its numbers. lent: answered by a RetainedRow, where
    the
    row is now: it stays there for as long as that is held.
    """

    depth: int
    cached: bool = False
    pinned: bool = False


class Scores(NamedTuple):
    """Want the path's own tokens first+0, first+1, … last-1 scored (absolute depths, first >= 1).

    Answered by one `engines.base.Score` over last - first targets, with the `top` likeliest ids.
    """

    first: int
    last: int
    top: int = 0


Want = Logits | Scores


@dataclass(slots=True, eq=False)
class Extend:
    """Run `tokens` after `place` and answer `wants`; depths may lie anywhere on the whole path.

    No tokens: a read. The result is a list, one answer a want.
    """

    place: Place
    tokens: Sequence[int] = ()
    wants: tuple[Want, ...] = ()

    def namespaces(self) -> list[str | None]:
        """Return whose tree it works in."""
        return [self.place.namespace]


# Called after each token of a run, under the scheduler's lock: why the run ends, or None to go on.
Sink = Callable[["RunState"], FinishReason | None]


@dataclass(slots=True, eq=False)
class Run:
    """Generate after `place`: to a stop id, a limit, or the sink's word.

    stop_ids: end tokens; the one drawn is not part of the result.
    sink: see Sink; exceptions raised by it fail this run only.
    """

    place: Place
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 256
    sink: Sink | None = None

    def namespaces(self) -> list[str | None]:
        """Return whose tree it works in."""
        return [self.place.namespace]


@dataclass(slots=True, eq=False)
class Commit:
    """Run one token after each of some lines, all or none: a failure changes none of them.

    samplers: draw the token after that from the same step; None draws nothing.
    The result is one `jobs.Committed` a line.
    """

    sequences: Sequence[TokenSequence]
    tokens: Sequence[int]
    samplers: Sequence[Sampler | None]

    def namespaces(self) -> list[str | None]:
        """Return whose trees it works in."""
        return [sequence.base.namespace for sequence in self.sequences]


Item = Extend | Run | Commit


class RunState:
    """The tokens of a run so far; lists grow in step. Sinks read it, nobody else writes it.

    logprobs, entropies: one a token; empty where the engine does not tell them.
    legal_logmass: under a constraint one a token, and one for an end token that was drawn; empty
    otherwise. See `RunResult`.
    ended_by: the stop id that ended the run, if one did; its logprob is not recorded.
    """

    __slots__ = ("ended_by", "entropies", "finish_reason", "legal_logmass", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self.legal_logmass: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.ended_by: int | None = None


@dataclass(slots=True, eq=False)
class RunResult:
    """What a run made. `end` is the place after its last token, held for the caller.

    logprobs, entropies: raw, full vocabulary, nats; one a token, or empty where the engine does
    not tell them.
    legal_logmass: under a constraint, the log of the model's raw probability of all tokens that
    constraint and bans allowed, in nats: one a token, and one more for a drawn end token where the
    text could go on. A token that the constraint forces has its own logprob. Empty without a
    constraint.
    A cancelled run is a result too (finish_reason "cancelled"), with what it had made.
    """

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason
    ended_by: int | None
    end: Place
    legal_logmass: list[float]


class Ticket:
    """The answer to one item, when it comes. Callbacks run under the scheduler's lock.

    reused: how many of the item's path tokens had their KV when its work began; None before that,
    and on engines that keep their KV to themselves.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_inbox",
        "cancel_reason",
        "cancelled",
        "done",
        "error",
        "item",
        "job",
        "reused",
        "value",
    )

    def __init__(self, item: Item, inbox: deque[Any]) -> None:
        self.item: Any = item
        self.job: Job | None = None  # the scheduler's
        self.reused: int | None = None
        self._inbox = inbox
        self.done = False
        self.cancelled = False
        self.cancel_reason: FinishReason = "cancelled"
        self.value: Any = None
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """Ask for an early end, at the next step. A run keeps what it made, an extend raises."""
        if not (self.done or self.cancelled):
            self.cancel_reason = reason
            self.cancelled = True
            self._inbox.append(self)

    def result(self) -> Any:
        """Return the answer or raise the error; only when `done`."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise Cancelled("the ticket is not done yet; drive the LM first")
        return self.value

    def on_done(self, callback: Callable[[Ticket], None]) -> None:
        """Call back once done (now, if it is)."""
        self._callbacks.append(callback)
        if self.done and callback in self._callbacks:  # answered meanwhile, on another thread
            self._callbacks.remove(callback)
            callback(self)

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the answer once; the scheduler's part."""
        if self.done:
            return
        self.value, self.error, self.done = value, error, True
        self.job = None  # no cycle: a dropped ticket frees its places at once
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


@dataclass(slots=True)
class Counters:
    """What a scheduler has done so far: tokens, steps, and seconds a phase (wall clock)."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    recomputed: int = 0
    steps: int = 0
    preempted: int = 0
    evicted: int = 0
    plan_s: float = 0.0
    forward_s: float = 0.0
    deliver_s: float = 0.0
