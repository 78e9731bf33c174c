from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from weft._core.sampling.history import History
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import Sampler


def counted(history: History) -> dict[int, int]:
    return dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))


def naive(prompt: list[int], generated: list[int], last_n: int | None) -> dict[int, int]:
    """Return how often each of the last tokens was generated, by scanning them."""
    marked = [(token, 0) for token in prompt] + [(token, 1) for token in generated]
    recent = marked if last_n is None else marked[max(len(marked) - last_n, 0) :]
    out = {token: 0 for token, _ in recent}
    out.update(Counter(token for token, once in recent if once))
    return out


@pytest.mark.parametrize("last_n", [None, 1, 2, 7, 64, 1000])
def test_history_equals_a_scan_of_the_last_tokens(last_n: int | None) -> None:
    rng = np.random.default_rng(0)
    prompt, generated = rng.integers(0, 40, 90).tolist(), list[int]()
    history = History(last_n)
    history.add_prompt(prompt)
    assert counted(history) == naive(prompt, [], last_n)
    for token in rng.integers(0, 200, 300).tolist():
        twin = history.copy()
        history.add_generated(token)
        assert counted(twin) == naive(prompt, generated, last_n)
        generated.append(token)
        assert counted(history) == naive(prompt, generated, last_n)


def test_sampler_with_penalty_last_n_counts_only_the_last_n_tokens() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1, penalty_last_n=3), 0)
    sampler.add_prompt(range(10))
    sampler.accept(5)
    assert sampler.history is not None
    assert counted(sampler.history) == {8: 0, 9: 0, 5: 1}
    assert counted(sampler.clone().history) == {8: 0, 9: 0, 5: 1}
