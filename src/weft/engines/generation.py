"""Runs that an engine generates by itself: what it is asked for, and what it tells.

An engine with a loop of its own (a server, vLLM) samples, batches and stops without the host. The
scheduler hands it every run that needs no decision of the host between two tokens, and hears of
the tokens as they come::

    scheduler            start(GenerationRequest, tell)             cancel(handle, 1)
                              │                                  │
    engine       tell(0, tokens) tell(1, tokens) tell(0, end) … tell(1, end)

Siblings are told of in any order, each in its own order of tokens, and each once of its end.
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
    """Siblings to generate after one path; they differ in their random streams alone.

    tokens: the whole path. params: how to draw; its n, seed and max_tokens say nothing here, its
    `stop` strings are a hint: the text up to and with one is wanted, whoever looks at the tokens
    ends the run. streams: one a sibling, 64 bits, what their seeds are made of; a greedy run has
    one sibling. stop_ids: end tokens. max_tokens: at most so many new ones.
    adapter: whose weights, as `Engine.add_adapter` named them.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    streams: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """News of one sibling: tokens, its end, or both; with tokens, they come before the end.

    tokens: the new ones, without the end token. logprobs, entropies: one a token, of the raw
    distribution over the full vocabulary, natural log; None where the engine does not know them.
    end: why it is over; None while it goes on. ended_by: the end token that ended it.
    error: what made it fail; it is over then, too.
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
        """Nothing more comes of this sibling."""
        return self.end is not None or self.error is not None


EventCallback = Callable[[GenerationEvent], None]


class EngineGenerator(ABC):
    """The loop of an engine: `Engine.native`. Called by the thread that steps, and no other.

    most: siblings that may be on their way at once; the others wait here, the oldest first.
    """

    most: int = 256

    @abstractmethod
    def unsupported_params(self, params: SamplingParams) -> str | None:
        """Say which of the parameters it would not honour exactly, with its value; None: all.

        What is refused is run step by step, where the engine has steps. `params.constraint` is
        asked for at its beginning, and checked token by token on the host all the same.
        """

    @abstractmethod
    def start(self, run: GenerationRequest, tell: EventCallback) -> Any:
        """Begin; return what `cancel` names it by. Does not wait for the first token.

        tell: may be called by any thread, from now on until every sibling is over. Raises what
        keeps it from beginning; then nothing is told.
        """

    @abstractmethod
    def cancel(self, handle: Any, sibling: int) -> None:
        """Ask for an early end of a sibling; its last event comes all the same. Does not wait."""
