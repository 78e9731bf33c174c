"""Work items that callers submit to the scheduler, and the tickets that return their results."""

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
    """Request for the raw logits after the path's first `depth` tokens.

    The result is a read-only float32 array [V], shared with other callers.

    cached: the result is a LogitsRow instead: nothing is copied from the device, but the cache may
    evict the logits before they are read.

    pinned: the result is a RetainedRow instead: the logits stay where they are, usually on the
    device, while the caller refers to it.
    """

    depth: int
    cached: bool = False
    pinned: bool = False


class Scores(NamedTuple):
    """Request for scores of the path's own tokens from depth `first` to `last` - 1.

    Depths count from the root; `first` is at least 1. The result is one `engines.base.Score` over
    last - first tokens. It lists the `top` most likely ids at each of them.

    final: a token to score after the path's end, without running it. `last` then counts it.
    """

    first: int
    last: int
    top: int = 0
    final: int | None = None


Want = Logits | Scores


@dataclass(slots=True, eq=False)
class Extend:
    """Work item: run `tokens` after `place`, and return logits or scores of the path.

    Without tokens it only reads. The result is a list with one value per entry of `wants`.
    """

    place: Place
    tokens: Sequence[int] = ()
    wants: tuple[Want, ...] = ()

    def namespaces(self) -> list[str | None]:
        """Return the namespace of the tree that it works in."""
        return [self.place.namespace]


# Called after each token of a run, under the scheduler's lock. Returns why the run ends, or None.
Sink = Callable[["RunState"], FinishReason | None]


@dataclass(slots=True, eq=False)
class Run:
    """Work item: generate tokens after `place` until a stop id, `max_tokens`, or the sink ends it.

    The result is a RunResult.

    stop_ids: end tokens; a drawn one is not part of the result.

    sink: see `Sink`. An exception that it raises fails this run only.
    """

    place: Place
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 256
    sink: Sink | None = None

    def namespaces(self) -> list[str | None]:
        """Return the namespace of the tree that it works in."""
        return [self.place.namespace]


@dataclass(slots=True, eq=False)
class Commit:
    """Work item: run one token after each of several sequences; a failure changes none of them.

    samplers: draw the next token from the same step; None draws nothing.

    The result is one `commits.Committed` per sequence.
    """

    sequences: Sequence[TokenSequence]
    tokens: Sequence[int]
    samplers: Sequence[Sampler | None]

    def namespaces(self) -> list[str | None]:
        """Return the namespaces of the trees that it works in."""
        return [sequence.base.namespace for sequence in self.sequences]


Item = Extend | Run | Commit


class RunState:
    """Tokens of a run so far, for sinks to read; the lists grow together.

    logprobs, entropies: one per token; empty if the engine does not report them.

    legal_logmass: under a constraint one per token, and one for a drawn end token; otherwise empty.
    See `RunResult`.

    kept: one per token if the sampler reports it; otherwise empty. See `RunResult`.

    ended_by: the stop id that ended the run, if one did; its logprob is not recorded.
    """

    __slots__ = (
        "ended_by",
        "entropies",
        "finish_reason",
        "kept",
        "legal_logmass",
        "logprobs",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self.legal_logmass: list[float] = []
        self.kept: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.ended_by: int | None = None


@dataclass(slots=True, eq=False)
class RunResult:
    """The result of a run. A cancelled run has one too (finish_reason "cancelled"), with its tokens
    so far.

    end: the place after its last token.

    logprobs, entropies: raw, over the full vocabulary, in nats. One per token; empty if the engine
    does not report them.

    legal_logmass: under a constraint, the log of the model's raw probability of all allowed tokens,
    in nats. One per token, and one more for a drawn end token if the text could continue. A token
    that the constraint forces has its own logprob. Empty without a constraint.

    kept: log-probabilities among the tokens that the filters keep, after temperature, biases and
    penalties. One per token if `Sampler.reports_kept` is set and the engine reports them.
    """

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason
    ended_by: int | None
    end: Place
    legal_logmass: list[float]
    kept: list[float]


class Ticket:
    """The future result of one submitted item. Callbacks run under the scheduler's lock.

    reused: how many of the item's path tokens had KV at its first admission. None before that, and
    for engines that do not expose their KV.
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
        self.job: Job | None = None  # the job that resolves it
        self.reused: int | None = None
        self._inbox = inbox
        self.done = False
        self.cancelled = False
        self.cancel_reason: FinishReason = "cancelled"
        self.value: Any = None
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """Request that the next step ends the item early.

        A run then has a result with its tokens so far; an extend or a commit raises `Cancelled`.

        reason: the `finish_reason` of a run.
        """
        if not (self.done or self.cancelled):
            self.cancel_reason = reason
            self.cancelled = True
            self._inbox.append(self)

    def result(self) -> Any:
        """Return the item's result or raise its error. Call it only when `done` is True."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise Cancelled("the ticket is not done yet; drive the LM first")
        return self.value

    def on_done(self, callback: Callable[[Ticket], None]) -> None:
        """Call `callback` once the ticket is done; immediately if it is done already."""
        self._callbacks.append(callback)
        if self.done and callback in self._callbacks:  # another thread resolved it meanwhile
            self._callbacks.remove(callback)
            callback(self)

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the result or the error, and call the callbacks; later calls do nothing.

        Called by the scheduler.
        """
        if self.done:
            return
        self.value, self.error, self.done = value, error, True
        self.job = None  # breaks the reference cycle, so that a dropped ticket frees its places
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


@dataclass(slots=True)
class Counters:
    """Totals of a scheduler since its start; seconds are wall clock."""

    prefilled: int = 0  # prompt tokens computed
    reused: int = 0  # prompt tokens whose KV was cached
    decoded: int = 0  # tokens drawn or committed
    recomputed: int = 0  # tokens computed a second time
    steps: int = 0  # steps finished
    drafted: int = 0  # draft tokens that steps verified
    draft_accepted: int = 0  # draft tokens that were drawn
    preempted: int = 0  # jobs preempted
    plan_s: float = 0.0  # seconds spent scheduling
    forward_s: float = 0.0  # seconds spent in the engine
    deliver_s: float = 0.0  # seconds spent processing outputs
