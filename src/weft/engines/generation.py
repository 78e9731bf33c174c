"""Runs that an engine generates by itself: requests and events.

An engine with its own generation loop (a server, vLLM) samples, batches and stops without the host.
The scheduler submits every run that needs no decision of the host between two tokens. The engine
reports the tokens by a callback::

    scheduler            start(GenerationRequest, on_event)      cancel(handle, 1)
                              │                                  │
    engine       on_event(tokens of 0)  on_event(tokens of 1)  on_event(end of 0) … (end of 1)

Events of different siblings arrive in any order. Events of one sibling arrive in token order, and
its last event reports its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .._core.sampling.params import SamplingParams

NativeEnd = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to generate siblings after one path. They differ only in their random streams.

    Args:
        tokens: token ids of the full path.
        params: sampling parameters. Their n, seed and max_tokens are ignored. Their `stop` strings
            are a hint: the engine must return the text up to and including one; the host ends the
            run.
        streams: one 64-bit number per sibling, from which its seed is derived. Greedy requests have
            one sibling.
        max_tokens: maximum number of new tokens.
        stop_ids: ids that end a sibling.
        adapter: name passed to `Engine.add_adapter`; None for the model itself.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    streams: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """New tokens of one sibling, its end, or both (the tokens come first).

    Args:
        sibling: index in `GenerationRequest.streams`.
        tokens: new token ids, without the end token.
        logprobs: one per token, from the raw distribution over the full vocabulary, natural
            logarithm; None if the engine does not report them.
        entropies: one per token, of the same distribution; None if the engine does not report them.
        end: reason of the end; None while the sibling continues.
        ended_by: id of the end token.
        error: error that ended the sibling.
    """

    sibling: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    entropies: Sequence[float] | None = None
    end: NativeEnd | None = None
    ended_by: int | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """True if this is the sibling's last event."""
        return self.end is not None or self.error is not None


EventCallback = Callable[[GenerationEvent], None]


class EngineGenerator(ABC):
    """Generation loop of an engine (`Engine.native`). Only the thread that steps calls it.

    Attributes:
        max_in_flight: maximum number of siblings submitted at once. The scheduler queues the
            others, oldest first.
    """

    max_in_flight: int = 256

    @abstractmethod
    def unsupported_params(self, params: SamplingParams) -> str | None:
        """Return the reason why this engine cannot honour a parameter exactly; None if it can.

        The reason names the first such parameter.

        The scheduler runs such requests step by step, if the engine has steps. `params.constraint`
        is passed in its initial state. The host also checks it token by token.
        """

    @abstractmethod
    def start(self, request: GenerationRequest, on_event: EventCallback) -> Any:
        """Submit a request. Return a handle for `cancel`. Does not wait for the first token.

        Raises the error that prevents the request; `on_event` is not called then.

        Args:
            request: siblings to generate.
            on_event: callback for events. Any thread may call it until every sibling has ended.
        """

    @abstractmethod
    def cancel(self, handle: Any, sibling: int) -> None:
        """Request an early end of a sibling. Its last event is still reported. Does not wait."""
