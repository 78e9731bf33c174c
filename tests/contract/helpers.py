"""Asking an LM in the scheduler's own terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft._core.kv.place import Place
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import Sampler
from weft._core.sched.work import Extend, Logits, Run, RunResult, Want
from weft.lm.lm import LM

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.02}

PROMPT = "Use 4 9 10 13 to make 24."
STORY = "Tell me a story about a fox."


def prompt_ids(lm: LM, text: str = PROMPT) -> list[int]:
    shown = lm.format_chat([{"role": "user", "content": text}])
    return lm.text.encode(shown, special=True, add_bos=False)


def ask(lm: LM, place: Place, *wants: Want, tokens: Sequence[int] = ()) -> list[Any]:
    tickets = lm.submit([Extend(place, tokens, wants)])
    lm.drive(tickets)
    answers: list[Any] = tickets[0].result()
    return answers


def logits_at(lm: LM, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after all of `ids`."""
    result: NDArray[np.float32] = ask(lm, lm.place(ids), Logits(len(ids)))[0]
    return result


def sampler(seed: int, index: int = 0, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), stream_of(seed, (index,)))


def run_item(lm: LM, place: Place, seed: int, index: int = 0, **options: Any) -> Run:
    """A run; `stop_ids` and `max_tokens` are the run's, the rest sampling parameters."""
    max_tokens = options.pop("max_tokens", 16)
    stop_ids = options.pop("stop_ids", lm.text.stop_ids)
    sink = options.pop("sink", None)
    return Run(
        place,
        sampler(seed, index, **options),
        stop_ids=stop_ids,
        max_tokens=max_tokens,
        sink=sink,
    )


def run_all(lm: LM, items: Sequence[Run]) -> list[RunResult]:
    tickets = lm.submit(items)
    lm.drive(tickets)
    return [ticket.result() for ticket in tickets]


def drawn_by_weft(lm: LM) -> LM:
    """The LM, where its runs are drawn by Weft's rule; the test skips where they are not."""
    if lm.info.own_random:
        pytest.skip(f"the {lm.info.name} engine draws runs by random numbers of its own")
    return lm


class Exactness:
    """How near two answers are that should be one; `--engine` may name one in half precision."""

    dtype = "float32"


def within(lower_bound: float = 0.0) -> float:
    """Return the tolerance of the engine's dtype, at least this."""
    return max(lower_bound, TOLERANCE[Exactness.dtype])


def assert_close(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    worst = float(np.abs(got - want).max())
    assert worst <= within(), f"logits differ by {worst:.2e}"
