"""Sequential Monte Carlo: weighted particles that grow together and are resampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Unpack

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle
from .core import Prompt, branches, whole
from .driver import Search, Want
from .judge import Judge, Value
from .options import SearchOptions, Settings
from .propose import Proposer
from .result import SearchResult
from .steps import Steps, awaitable, plain

Potential = Callable[[list[Heddle]], Sequence[float]]
# A verdict of 0 is a low weight, not an impossible one: the model errs.
FLOOR = 1e-6


@plain
def smc(
    lm: LM,
    prompt: Prompt,
    *,
    n: int = 32,
    potential: Potential | None = None,
    ess: float = 0.5,
    depth: int = 32,
    answer_tokens: int = 256,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Grow `n` weighted particles line by line, resampling, and return the heaviest one's end.

    The particles aim at the model's own distribution times exp(potential). After each line a
    particle's weight changes by the change of its potential; when the effective sample size falls
    below `ess * n`, particles are resampled in proportion to their weights (systematically) and
    share the KV of their parents. `log_evidence` of the result estimates the log of the mean
    exp(potential) under the model; exp of it is unbiased. A particle that ended keeps its weight.

    Args:
        potential: nodes → log potentials of whole paths, -inf for impossible, the prompt's is 0.
            None: on a task the log of the model's verdict, and of the checker's for an answer;
            without a task 0 everywhere.
        ess: from 0, never resample, to 1, always.
        depth: lines at most.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 1.0 and end at a newline
            (`stop`) unless given. With filters or a `constraint` the model's distribution is what
            they leave of it, made to sum to 1 token by token.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    if not 0 <= ess <= 1:
        raise ConfigError(f"ess is {ess!r}; allowed is a share from 0 to 1")
    settings = Settings.read(options, temperature=1.0, max_tokens=40)
    n = branches("n", n)
    search = Search(lm, prompt, settings, "smc", n=n, numbers=(ess, depth, answer_tokens))
    proposer = Proposer(
        lm,
        None,
        search.meter,
        propose="continue",
        n_continue=1,
        n_suggest=0,
        sampling=settings.sampling,
        reserve=whole("answer_tokens", answer_tokens),
        merges=False,
    )
    judge = _Potential(lm, search, potential)
    algorithm = Particles(n, ess, whole("depth", depth))
    result = yield from search.run(algorithm, judge, proposer, tries=n)
    return replace(result, log_evidence=algorithm.log_evidence(search))


asmc = awaitable(smc)


class Particles:
    """The filter: `state["at"]` has each round's particles (id, log weight) and log evidence."""

    def __init__(self, n: int, ess: float, depth: int) -> None:
        self.n = n
        self.ess = ess
        self.depth = depth

    def ask(self, search: Search) -> Sequence[Want]:
        """Ask for one line for each particle that goes on and can still count."""
        if search.round >= self.depth:
            return []
        rows = Counter(node for node, weight in self._now(search) if weight > -math.inf)
        return [Want(node, n=times) for node, times in rows.items() if not node.terminal]

    def tell(self, search: Search, told: Sequence[Heddle]) -> Sequence[Heddle]:
        """Move the particles to their new nodes, weigh them, and resample where it is needed."""
        new = defaultdict[str, list[Heddle]](list)
        for node in reversed(search.in_order(told)):
            assert node.parent is not None
            new[node.parent.id].append(node)
        moved: list[tuple[Heddle, float]] = []
        for node, weight in self._now(search):
            child = new[node.id].pop() if new[node.id] else node
            rise = 0.0 if weight == -math.inf or child is node else _rise(node, child, search)
            moved.append((child, weight + rise))
        log_z = self._log_z(search)
        weights = [weight for _, weight in moved]
        if max(weights) > -math.inf and effective_size(weights) < self.ess * self.n:
            log_z += log_mean_exp(weights)
            picked = systematic(weights, search.rng())
            moved = [(moved[index][0], 0.0) for index in picked]
        kept = {"particles": [[node.id, _json(weight)] for node, weight in moved], "log_z": log_z}
        search.state.setdefault("at", {})[str(search.round + 1)] = kept
        return self._by_weight(moved)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the particles' nodes: right answers first, then ends, the heaviest first."""
        nodes = self._by_weight(self._now(search)) if search.round else []
        return sorted(nodes, key=lambda node: (not search.is_solved(node), not node.terminal))

    def log_evidence(self, search: Search) -> float:
        """Return the log of the estimated mean of exp(potential); nats."""
        return self._log_z(search) + log_mean_exp([weight for _, weight in self._now(search)])

    def _now(self, search: Search) -> list[tuple[Heddle, float]]:
        if not search.round:
            return [(search.start, 0.0)] * self.n
        found = search.state["at"][str(search.round)]["particles"]
        nodes = search.found([node_id for node_id, _ in found])
        return [(node, float(w)) for node, (_, w) in zip(nodes, found, strict=True)]

    def _log_z(self, search: Search) -> float:
        return float(search.state["at"][str(search.round)]["log_z"]) if search.round else 0.0

    def _by_weight(self, particles: Sequence[tuple[Heddle, float]]) -> list[Heddle]:
        mass = defaultdict[Heddle, float](float)
        top = max(weight for _, weight in particles)
        for node, weight in particles:
            mass[node] += math.exp(weight - top) if top > -math.inf else 1.0
        return sorted(mass, key=lambda node: -mass[node])


class _Potential(Judge):
    """Scores a node with its log potential."""

    def __init__(self, lm: LM, search: Search, potential: Value | None) -> None:
        super().__init__(lm, search.task, search.meter, potential, as_share=True)

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        if self.value is None and self.task is None:
            return [0.0] * len(nodes)
        found = yield from super()._scores(nodes)
        return found if self.value is not None else [math.log(max(v, FLOOR)) for v in found]


def effective_size(log_weights: Sequence[float]) -> float:
    """Return (sum of weights)² / sum of squares; n when all are equal."""
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)


def log_mean_exp(log_weights: Sequence[float]) -> float:
    """Return the log of the mean of the weights; -inf when all are 0."""
    top = max(log_weights)
    if top == -math.inf:
        return -math.inf
    mean = math.fsum(math.exp(weight - top) for weight in log_weights) / len(log_weights)
    return top + math.log(mean)


def systematic(log_weights: Sequence[float], rng: Random) -> list[int]:
    """Return as many indices as weights: each within 1 of its share, from one random number."""
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    step = math.fsum(weights) / len(weights)
    at, total, picked = rng.random() * step, 0.0, list[int]()
    for index, weight in enumerate(weights):
        total += weight
        while at < total and len(picked) < len(weights):
            picked.append(index)
            at += step
    return picked + [len(weights) - 1] * (len(weights) - len(picked))


def _rise(node: Heddle, child: Heddle, search: Search) -> float:
    before = 0.0 if node is search.start else (node.score or 0.0)
    return (child.score or 0.0) - before


def _json(weight: float) -> float | str:
    return weight if math.isfinite(weight) else str(weight)
