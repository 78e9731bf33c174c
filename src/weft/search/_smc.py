"""Sequential Monte Carlo: weighted particles that grow together and are resampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Unpack

from .._core.atomic_files import json_number
from .._core.validation import check_int, check_number
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle
from .callbacks import Callback
from .core import (
    Particle,
    Prompt,
    SearchOptions,
    SearchResult,
    Settings,
    Steps,
    awaitable,
    blocking,
    check_branches,
    text_of,
)
from .driver import FORBIDDEN, Search, WorkItem
from .judge import Judge
from .propose import Proposer

if TYPE_CHECKING:
    from .checked_growth import Check

# A value of 0 is a low weight, not an impossible one, because models err.
FLOOR = 1e-6


@blocking
def smc(
    lm: LM | None,
    prompt: Prompt,
    *,
    n: int = 32,
    potential: Callable[[Any], Any] | None = None,
    prefix_check: Check | Sequence[Check] | None = None,
    ess: float = 0.5,
    depth: int = 32,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Sample texts from the model reweighted by a potential, with sequential Monte Carlo.

    This is a particle filter: `n` texts (particles) grow line by line, and their weights change
    with the potential. Use it for a weighted sample of many texts instead of one best text.

    The target distribution is the model's times exp(potential), conditioned on a `constraint` if
    there is one. After each line, a particle's log weight changes by the change of its potential
    and by its `legal_logmass`. If the effective sample size falls below `ess * n`, particles are
    resampled systematically; copies share KV. A particle that has ended keeps its weight.

    The texts of a `Choice` are drawn by their exact, measured probabilities. That needs at most 512
    texts, none a prefix of another, and neutral temperature, filters and bias.

    Args:
        lm, prompt: as for `tot`.
        n: number of particles.
        potential: nodes → log potentials of full paths; -inf for impossible; the prompt has 0.
            None: the log of `value`, of `score`, or of the model's verdict and the checker's;
            without these, 0 everywhere.
        prefix_check: (text, ended) → True if the text after the prompt may become an allowed one.
            With `ended` the text itself must be allowed. Several functions must all return True.
            Tokens are drawn by adaptive weighted rejection sampling, so few are checked. A
            `constraint` masks tokens before they are checked.
        ess: resample below this share of effective particles: 0 never, 1 always.
        depth: maximum number of lines.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 1.0 and end at a newline
            (`stop`) unless given. Filters, a bias or another temperature change the model's
            distribution; a constraint weighs by the raw distribution. A particle draws one of a
            function's proposals, uniformly.

    Returns: a SearchResult. `best` is the end of the text with the largest total weight.
    `particles` has all texts with their weights. `log_evidence` estimates the log of the mean of
    exp(potential) under the model, where violating the constraint or the check counts as 0. Its exp
    is unbiased.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = Settings.read(smc, options, temperature=1.0, max_tokens=40)
    ess = check_number("ess", ess, low=0, high=1)
    n = check_branches("n", n)
    numbers = (ess, depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "smc", n=n, numbers=numbers)
    proposer = Proposer(
        search, n_continue=1, n_suggest=0, merges=False, draws=True, default="continue"
    )
    if prefix_check is not None:
        from .checked_growth import CheckedGrowth, validate_checks

        _check_own_lines(proposer)
        proposer.grow = CheckedGrowth(search, validate_checks(prefix_check)).grow
    from .exact_choice import exact_choice

    if prefix_check is None and (choice := exact_choice(search, proposer.sources)) is not None:
        proposer.draw_exactly = choice.draw_below
    judge = Potential(search, potential)
    algorithm = Particles(n, ess, check_int("depth", depth, 1))
    result = yield from search.run(algorithm, judge, proposer, tries=n, depth=depth)
    particles = algorithm.particles(search)
    weight = math.fsum(each.weight for each in particles if each.text == result.text)
    prefix = "it passes the check, and " if result.solved else ""
    return replace(
        result,
        particles=particles,
        log_evidence=algorithm.log_evidence(search),
        measure="particle weight",
        reason=f"{prefix}it has {weight:.0%} of the weight of {n} particles",
    )


asmc = awaitable(smc)


def _check_own_lines(proposer: Proposer) -> None:
    """Raise ConfigError unless the search's own model writes all lines."""
    if any(source.lm is not proposer.lm or source.call is not None for source in proposer.sources):
        raise ConfigError(
            "prefix_check= applies to lines of the search's own model; leave out propose="
        )


class Potential(Judge):
    """The judge of `smc`: a node's score is its log potential.

    That is the result of the caller's `potential`, or the log of the node's value. It is 0 if there
    is neither, and no checker.
    """

    def __init__(self, search: Search, potential: Callable[[Any], Any] | None) -> None:
        if potential is not None:
            if search.value is not None:
                raise ConfigError("potential and value both weigh; leave out one")
            search.value = Callback("potential", potential, "nodes")
        super().__init__(search, as_share=True, checks_ends=search.value is None)
        self.is_given = potential is not None

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        search = self.search
        if search.value is None and self.task is None and not search.checks:
            return [0.0] * len(nodes)
        if search.value is None and self.task is None:
            # Partial paths have no value; only the checker's verdict on full ones counts.
            values = [float(search.is_solved(n)) if search.is_complete(n) else 1.0 for n in nodes]
        else:
            values = yield from super()._scores(nodes)
        return values if self.is_given else [math.log(max(each, FLOOR)) for each in values]


class Particles:
    """The algorithm behind `smc`, a particle filter.

    `search.state["at"]` has, for each round, the particles as (node id, log weight), and the log
    evidence of all resamplings so far. `ess` is the share of effective particles to resample below.
    """

    def __init__(self, n: int, ess: float, depth: int) -> None:
        self.n = n
        self.ess = ess
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: one new line for each unfinished particle of nonzero weight."""
        if search.round >= self.depth:
            return []
        rows = Counter(node for node, weight in self._particles(search) if weight > -math.inf)
        return [WorkItem(node, n=times) for node, times in rows.items() if not search.is_end(node)]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Move the particles to their new nodes, update their weights, and resample if necessary.

        candidates: the new nodes, at most one per particle. Other particles keep their node.

        Return the nodes of the particles, heaviest first.
        """
        new = defaultdict[str, list[Heddle]](list)
        for node in reversed(search.in_order(candidates)):
            assert node.parent is not None
            new[node.parent.id].append(node)
        moved: list[tuple[Heddle, float]] = []
        for node, weight in self._particles(search):
            child = new[node.id].pop() if new[node.id] else node
            moved.append((child, weight + _weight_change(node, child, search)))
        log_z = self._past_evidence(search)
        weights = [weight for _, weight in moved]
        if max(weights) > -math.inf and effective_size(weights) < self.ess * self.n:
            log_z += log_mean_exp(weights)
            indices = resample(weights, search.rng())
            moved = [(moved[index][0], 0.0) for index in indices]
        kept = {
            "particles": [[node.id, json_number(weight)] for node, weight in moved],
            "log_z": log_z,
        }
        search.state.setdefault("at", {})[str(search.round + 1)] = kept
        return self._heaviest_first(moved)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the particles' nodes: correct answers, then ended texts, then others."""
        nodes = self._heaviest_first(self._particles(search)) if search.round else []
        return sorted(nodes, key=lambda node: (not search.is_solved(node), not node.terminal))

    def log_evidence(self, search: Search) -> float:
        """Return the log of the estimated mean of exp(potential) under the model, in nats."""
        return self._past_evidence(search) + log_mean_exp(
            [weight for _, weight in self._particles(search)]
        )

    def particles(self, search: Search) -> tuple[Particle, ...]:
        """Return the particles, heaviest first, with weights that sum to 1."""
        current = self._particles(search)
        top = max(weight for _, weight in current)
        weights = [math.exp(weight - top) if top > -math.inf else 0.0 for _, weight in current]
        total = math.fsum(weights) or 1.0
        pairs = zip(current, weights, strict=True)
        particles = [Particle(node, weight / total) for (node, _), weight in pairs]
        return tuple(sorted(particles, key=lambda each: -each.weight))

    def _particles(self, search: Search) -> list[tuple[Heddle, float]]:
        """Return the particles of the last finished round as (node, log weight)."""
        if not search.round:
            return [(search.start, 0.0)] * self.n
        entries = search.state["at"][str(search.round)]["particles"]
        nodes = search.nodes_by_id([node_id for node_id, _ in entries])
        return [(node, float(w)) for node, (_, w) in zip(nodes, entries, strict=True)]

    def _past_evidence(self, search: Search) -> float:
        """Return the log evidence that resamplings have moved out of the weights, in nats."""
        return float(search.state["at"][str(search.round)]["log_z"]) if search.round else 0.0

    def _heaviest_first(self, particles: Sequence[tuple[Heddle, float]]) -> list[Heddle]:
        """Return the particles' distinct nodes, largest total weight of their text first.

        particles: pairs of a node and a log weight.
        """
        mass = defaultdict[str, float](float)
        top = max(weight for _, weight in particles)
        texts = {node: text_of(node) for node, _ in particles}
        for node, weight in particles:
            mass[texts[node]] += math.exp(weight - top) if top > -math.inf else 1.0
        return sorted(texts, key=lambda node: -mass[texts[node]])


def _weight_change(node: Heddle, child: Heddle, search: Search) -> float:
    """Return the change of a particle's log weight as it moves from `node` to `child`, in nats.

    It is the change of the potential plus the `legal_logmass` of the child's tokens. A particle
    without a new line keeps its weight if its text has ended or the budget is used up. Otherwise
    its constrained line came to a dead end, whose texts have probability 0.
    """
    if child is node:
        is_dead = search.constrained_texts is not None and not search.is_end(node)
        return -math.inf if is_dead and search.meter.stopped is None else 0.0
    if child.meta.get("closed") == FORBIDDEN:
        return -math.inf
    before = 0.0 if node is search.start else (node.score or 0.0)
    measured_logmass: float = child.meta.get("legal_logmass", 0.0)
    return (child.score or 0.0) - before + math.fsum(child.legal_logmass) + measured_logmass


def effective_size(log_weights: Sequence[float]) -> float:
    """Return the effective sample size: (sum of weights)² / sum of squared weights.

    It is the number of weights if all are equal, and 1 if one weight dominates.
    """
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)


def log_mean_exp(log_weights: Sequence[float]) -> float:
    """Return the log of the mean of the weights; -inf if all are 0."""
    top = max(log_weights)
    if top == -math.inf:
        return -math.inf
    mean = math.fsum(math.exp(weight - top) for weight in log_weights) / len(log_weights)
    return top + math.log(mean)


def resample(log_weights: Sequence[float], rng: Random, n: int | None = None) -> list[int]:
    """Draw `n` indices in proportion to the weights, by systematic resampling.

    Each index occurs as often as expected, rounded up or down.

    n: None means the number of weights.
    """
    n = len(log_weights) if n is None else n
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    step = math.fsum(weights) / n
    at, total, indices = rng.random() * step, 0.0, list[int]()
    for index, weight in enumerate(weights):
        total += weight
        while at < total and len(indices) < n:
            indices.append(index)
            at += step
    return indices + [len(weights) - 1] * (n - len(indices))
