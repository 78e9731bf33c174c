"""Sequential Monte Carlo: weighted particles that grow together and are resampled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle
from .core import Prompt, branches, whole
from .driver import Search
from .judge import Judge
from .options import SearchOptions, Settings
from .particles import Particles
from .propose import Proposer
from .result import SearchResult
from .score import Value
from .steps import Steps, awaitable, plain

# A verdict of 0 is a low weight, not an impossible one: the model errs.
FLOOR = 1e-6


@plain
def smc(
    lm: LM,
    prompt: Prompt,
    *,
    n: int = 32,
    potential: Value | None = None,
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


class _Potential(Judge):
    """Scores a node with its log potential."""

    def __init__(self, lm: LM, search: Search, potential: Value | None) -> None:
        super().__init__(lm, search.task, search.meter, potential, as_share=True)

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        if self.value is None and self.task is None:
            return [0.0] * len(nodes)
        found = yield from super()._scores(nodes)
        return found if self.value is not None else [math.log(max(v, FLOOR)) for v in found]
