"""Samples under a check of prefixes: `smc(prefix_check=…)`, and AWRS of genlm-control.

    python benchmarks/awrs.py [--particles 8] [--tokens 400] [--repeats 3]

genlm-control runs over `weft.AsyncLM`, so that both have the same model and the same cache of
prefixes. The check allows stories about a fox without an "x". Neither resamples. `checks a
token` counts calls of the check per generated token, and CPU time is that of the process. Samples
end by themselves: at `--tokens` genlm-control would check the full vocabulary. It is left out where
it is not installed (`make test-clients` installs it).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import median, report

import weft
from weft import Loom

PROMPT = "Tell me a story about a fox."


@dataclass
class Counter:
    """A check that counts its calls."""

    calls: int = 0

    def __call__(self, text: str, ended: bool) -> bool:
        self.calls += 1
        return "x" not in text


def main() -> None:
    options = arguments()
    jobs: dict[str, Callable[..., tuple[int, float]]] = {"weft": by_weft}
    if importlib.util.find_spec("genlm") is not None:
        jobs["genlm-control"] = by_genlm
    rows = []
    with weft.load("tiny") as lm:
        for name, job in jobs.items():
            runs = [run(lm, job, options, seed) for seed in range(options.repeats)]
            rows.append(
                {
                    "sampler": name,
                    "checks a token": median([row[0] for row in runs]),
                    "CPU ms a sample": median([row[1] for row in runs]),
                    "log evidence": median([row[2] for row in runs]),
                }
            )
    report("awrs", rows, particles=options.particles, tokens=options.tokens)


def run(
    lm: weft.LM, job: Callable[..., tuple[int, float]], options: argparse.Namespace, seed: int
) -> tuple[float, float, float]:
    """Return checks a token, milliseconds of CPU time a sample, and the log evidence."""
    lm.clear_cache()
    check, start = Counter(), time.process_time()
    n_tokens, log_evidence = job(lm, check, options.particles, options.tokens, seed)
    seconds = time.process_time() - start
    return check.calls / n_tokens, 1000 * seconds / options.particles, log_evidence


def by_weft(
    lm: weft.LM, check: Counter, particles: int, tokens: int, seed: int
) -> tuple[int, float]:
    """Return the number of generated tokens and the log evidence."""
    result = weft.search.smc(
        lm,
        PROMPT,
        n=particles,
        ess=0.0,
        depth=1,
        stop=None,
        max_tokens=tokens,
        answer_tokens=0,
        seed=seed,
        prefix_check=check,
    )
    assert result.log_evidence is not None
    result.loom.close()
    return result.cost.tokens, result.log_evidence


def by_genlm(
    lm: weft.LM, check: Counter, particles: int, tokens: int, seed: int
) -> tuple[int, float]:
    """Return the number of generated tokens and the log evidence."""
    from genlm.control import AWRS, Potential, PromptedLLM

    class Condition(Potential):  # type: ignore[misc]
        async def prefix(self, context: Any) -> float:
            return self._verdict(context, ended=False)

        async def complete(self, context: Any) -> float:
            return self._verdict(context, ended=True)

        def _verdict(self, context: Any, *, ended: bool) -> float:
            spelled = b"".join(bytes(getattr(each, "byte_string", each)) for each in context)
            return 0.0 if check(spelled.decode(errors="ignore"), ended) else -math.inf

    llm = PromptedLLM(weft.AsyncLM(lm))
    llm.prompt_ids = Loom(lm, PROMPT).tokens
    sampler = AWRS(llm, Condition(llm.vocab), seed=seed)
    samples = asyncio.run(sampler.smc(n_particles=particles, ess_threshold=0.0, max_tokens=tokens))
    return sum(len(each) for each in samples.contexts), float(samples.log_ml)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Adaptive weighted rejection sampling")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
