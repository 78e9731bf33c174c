"""What all searches share: where they begin, the budget, and growth that stays within it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from random import Random
from typing import Any

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle, Loom
from ..sampling.params import MAX_N
from ..sampling.rng import fresh_seed
from .game24 import Game24
from .result import Cost, Limit
from .score import text_of
from .steps import Grow, Steps
from .task import Lines, Task

_COUNTS = ("tokens", "candidates", "valued", "prompt_tokens", "draws")
# A text, chat messages, token ids, or a node to search below.
Prompt = str | Sequence[dict[str, Any]] | Sequence[int] | Heddle


@dataclass(frozen=True, slots=True)
class Budget:
    """The most a search may spend; None is no limit. kv_bytes: what all its tree's KV takes."""

    tokens: int | None = None
    seconds: float | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        tokens, seconds = self.tokens, self.seconds
        if tokens is not None:
            whole("budget_tokens", tokens)
        if self.kv_bytes is not None:
            whole("budget_kv_bytes", self.kv_bytes)
        if seconds is not None and not (
            isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0
        ):
            raise ConfigError(f"budget_s is {seconds!r}; allowed is a number of seconds above 0")


class Meter:
    """Counts what a search spends and grows nodes within its budget."""

    def __init__(
        self, budget: Budget, seed: int | None, held: Callable[[], int] = lambda: 0
    ) -> None:
        """held: how many bytes the KV of the whole tree takes now; `slot_bytes` is a token's."""
        self.budget = budget
        self.seed = fresh_seed() if seed is None else whole("seed", seed, low=0)
        self.held = held
        self.slot_bytes = 1
        self.tokens = 0
        self.candidates = 0
        self.valued = 0
        self.prompt_tokens = 0
        self.stopped: Limit | None = None
        self.draws = 0
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to count on in another process."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"seed": self.seed, "seconds": self.seconds, **counts}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from a state."""
        self.seed = state["seed"]
        self._start = time.perf_counter() - state["seconds"]
        for name in _COUNTS:
            setattr(self, name, state[name])

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the search began."""
        return time.perf_counter() - self._start

    def cost(self) -> Cost:
        """Return what was spent so far."""
        return Cost(
            tokens=self.tokens,
            seconds=self.seconds,
            candidates=self.candidates,
            valued=self.valued,
            prompt_tokens=self.prompt_tokens,
            stopped=self.stopped,
        )

    def out_of_time(self) -> bool:
        """Say whether the seconds are spent, and note it."""
        if self.budget.seconds is not None and self.seconds >= self.budget.seconds:
            self.stopped = "seconds"
        return self.stopped == "seconds"

    def room(self) -> float:
        """Return how many tokens may still be generated."""
        return math.inf if self.budget.tokens is None else self.budget.tokens - self.tokens

    def free(self) -> float:
        """Return how many tokens the tree may still take in."""
        if self.budget.kv_bytes is None:
            return math.inf
        return max(self.budget.kv_bytes - self.held(), 0) // self.slot_bytes

    def longest(self) -> float:
        """Return how many tokens one more row may have; note the budget that says 0."""
        most = min(self.room(), self.free())
        if most < 1:
            self.stopped = "tokens" if self.room() < 1 else "kv"
        return most

    def rows(self, n: int, max_tokens: int, reserve: int = 0) -> int:
        """Return how many of `n` rows of full length may be begun; note the budget that says 0."""
        paid, held = max(self.room() - reserve, 0), self.free()
        if min(paid, held) < max_tokens:
            self.stopped = "tokens" if paid < max_tokens else "kv"
        return int(min(n * max_tokens, paid, held)) // max_tokens

    def grow(
        self, at: Sequence[Heddle], *, max_tokens: int, reserve: int = 0, **sampling: Any
    ) -> Steps[list[Heddle]]:
        """Grow one continuation of each node listed (a node may be listed often), in one batch.

        Never begins more rows than the tokens left, less `reserve`, pay for at full length; what
        shorter rows leave over goes to the rows that had to wait, in order.
        """
        made: list[Heddle] = []
        waiting = list(at)
        is_over = None if self.budget.seconds is None else self.out_of_time
        while waiting and not self.out_of_time():
            n_rows = self.rows(len(waiting), max_tokens, reserve)
            if not n_rows:
                break
            rows, waiting = waiting[:n_rows], waiting[n_rows:]
            seed = self._next_seed()
            options = {"max_tokens": max_tokens, "seed": seed, **sampling}
            new = yield Grow(rows, options, is_over)
            # An end token was generated too, though no node holds it.
            self.tokens += sum(len(node.tokens) + node.terminal for node in new)
            made += new
        return made

    def _next_seed(self) -> int:
        self.draws += 1
        return Random(f"{self.seed}/{self.draws}").getrandbits(63)


def begin(lm: LM, prompt: Prompt) -> tuple[Heddle, Loom]:
    """Return the node to search below, and its loom."""
    start = prompt if isinstance(prompt, Heddle) else Loom(lm, prompt)
    root = start.path[0]
    if not isinstance(root, Loom):
        raise ConfigError("the node to search below stands in no loom; give one that does")
    if root.lm is not lm:
        raise ConfigError("the loom to search in belongs to another model; give lm=loom.lm")
    return start, root


def read_task(loom: Loom) -> Task | None:
    """Return the task that a prompt states, if it is one that is known."""
    return Game24.read(loom.user_prompt)


def lines_of(node: Heddle) -> Lines:
    """Return the lines after the prompt, down to the node, without their line ends."""
    text = text_of(node)
    return tuple(text.split("\n")) if text else ()


def whole(name: str, value: int, *, low: int = 1, high: int | None = None) -> int:
    """Return a whole number, or refuse it."""
    most = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= most:
        allowed = f"from {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}; allowed is a whole number {allowed}")
    return int(value)


def branches(name: str, value: int, *, low: int = 1) -> int:
    """Return how many branches one node shall have, or refuse it."""
    return whole(name, value, low=low, high=MAX_N)
