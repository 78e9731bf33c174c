"""Stop strings: detect them in text that arrives token by token, and report a branch's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.sampling.params import SamplingParams
from .._core.sched.driver import Channel
from .._core.sched.work import FinishReason, RunState, Ticket

if TYPE_CHECKING:
    from ..constraints.base import Constraint
    from ..lm.lm import LM


class Event(NamedTuple):
    """One new token of a branch, or the end of the branch."""

    branch: int  # its number in the call
    token: int | None  # None: the branch has ended
    logprob: float | None = None  # nats; None if the engine does not report it
    entropy: float | None = None  # nats; None if the engine does not report it
    stop: str | None = None  # the stop string that the token completes; the branch ends here
    legal_logmass: float | None = None  # None without a constraint


class StopStrings:
    """Detects stop strings in text that arrives token by token, also across token boundaries.

    Args:
        stops: the stop strings.
        constraint: stop strings are ignored until its `min_tokens` are reached; None: no minimum.

    Cost: for each stop string one search in the new bytes and a tail shorter than the longest one.
    """

    __slots__ = ("_n_tail", "_stops", "_tail", "_unwatched")

    def __init__(self, stops: tuple[str, ...], constraint: Constraint | None = None) -> None:
        self._unwatched = 0 if constraint is None else constraint.min_tokens
        self._stops = tuple((stop, stop.encode()) for stop in stops)
        self._n_tail = max((len(encoded) - 1 for _, encoded in self._stops), default=0)
        self._tail = b""

    def push(self, piece: bytes) -> str | None:
        """Append the bytes of one token; return the stop string that they complete, or None.

        If they complete several, return the one that ends first; if several end there, the longest.
        """
        tail, self._unwatched = self._tail, self._unwatched - 1
        window = tail + piece
        self._tail = window[-self._n_tail :] if self._n_tail else b""
        if self._unwatched < 0:
            for _, encoded in self._stops:
                if encoded in window:
                    return self._first_match(window, len(tail))
        return None

    def _first_match(self, window: bytes, n_tail: int) -> str | None:
        """Return the first stop string that ends in the piece; None if all end in the tail."""
        # window:  tail (searched before) │ piece        a match must end in the piece
        matches: list[tuple[int, int, str]] = []
        for stop, encoded in self._stops:
            size = len(encoded)
            at = window.find(encoded, max(0, n_tail - size + 1))
            if at >= 0:
                matches.append((at + size, -size, stop))
        return min(matches)[2] if matches else None


class StopWatcher:
    """Callback after each token of a branch: detects stop strings, and sends events.

    It has no reference to a node, because the scheduler may keep it longer than the tree exists.

    Args:
        branch: index of the branch in the call.
        lm: the LM.
        params: the sampling parameters, with the stop strings.
        channel: receives an `Event` per token; None: only stop strings are detected.
    """

    def __init__(
        self, branch: int, lm: LM, params: SamplingParams, channel: Channel | None
    ) -> None:
        self.branch = branch
        self.stopped: str | None = None
        self.decode = lm.text.decode
        self._token_bytes = lm.text.token_bytes
        self._stops = StopStrings(params.stop, params.constraint) if params.stop else None
        self._channel = channel

    def __call__(self, state: RunState) -> FinishReason | None:
        token = state.tokens[-1]
        if self._stops is not None:
            self.stopped = self._stops.push(self._token_bytes(token))
        if self._channel is not None:
            logprob = state.logprobs[-1] if state.logprobs else None
            entropy = state.entropies[-1] if state.entropies else None
            legal = state.legal_logmass[-1] if state.legal_logmass else None
            event = Event(self.branch, token, logprob, entropy, self.stopped, legal)
            self._channel.put(event)
        return "stop" if self.stopped is not None else None

    def on_end(self, ticket: Ticket) -> None:
        """Send the event that the branch has ended; the scheduler calls this after all tokens."""
        if self._channel is not None:
            self._channel.put(Event(self.branch, None))
