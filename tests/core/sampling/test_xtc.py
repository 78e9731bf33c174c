from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from core.sampling import naive
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import keys_of, stream_of, xtc_numbers
from weft._core.sampling.sampler import BatchSampler, Sampler, probabilities

LOGITS = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], dtype=np.float32))


def drawn(n: int, positions: int = 1, **options: float) -> list[int]:
    """Return the tokens of n streams at some positions each, all from the same logits."""
    samplers = [Sampler(SamplingParams(**options), stream_of(5, (i,))) for i in range(n)]
    batch, rows = BatchSampler(samplers), np.zeros(n, dtype=np.int64)
    ids = [batch.draw(LOGITS, rows, np.full(n, at, np.uint64)).ids for at in range(positions)]
    return np.concatenate(ids).tolist()


def test_probability_1_drops_all_top_choices_but_the_last() -> None:
    """Tokens 0 to 2 have at least 0.14; 2 is the least likely of them."""
    counts = Counter(drawn(500, xtc_probability=1.0, xtc_threshold=0.14))
    assert set(counts) == {2, 3, 4}


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_shares_of_drawn_tokens_equal_the_mixture(probability: float) -> None:
    """20,000 draws: χ² of five tokens is below 27.9 in all but 1 of 80,000 correct runs.

    A rule that used XTC in 3 % more or fewer draws would pass with less than 1 %.
    """
    options = {"xtc_probability": probability, "xtc_threshold": 0.14}
    n = 20_000
    counts = Counter(drawn(n // 20, 20, **options))
    expected = n * probabilities(LOGITS[0], SamplingParams(**options))
    assert sum((counts[i] - want) ** 2 / want for i, want in enumerate(expected)) < 27.9


def test_probabilities_are_the_mean_of_both_kinds_of_draws() -> None:
    row = LOGITS[0].tolist()
    both = [naive.softmax(x) for x in (row, naive.xtc(row, 0.14))]
    mixture = [0.75 * plain + 0.25 * cut for plain, cut in zip(*both, strict=True)]
    params = SamplingParams(xtc_probability=0.25, xtc_threshold=0.14)
    assert probabilities(LOGITS[0], params) == pytest.approx(mixture, abs=1e-6)


def test_one_or_no_top_choice_changes_nothing() -> None:
    for threshold in (0.4, 0.41, 1.0):
        options = {"xtc_probability": 1.0, "xtc_threshold": threshold}
        assert drawn(300, **options) == drawn(300)


def test_draw_depends_on_stream_position_and_logits_only() -> None:
    """The same stream and position give the same token alone, in a batch, and after others."""
    options = {"xtc_probability": 0.5, "xtc_threshold": 0.1}
    together = drawn(40, 3, **options)
    for at in (2, 0, 1):
        for i in (7, 39):
            alone = BatchSampler([Sampler(SamplingParams(**options), stream_of(5, (i,)))])
            one = alone.draw(LOGITS, np.array([0]), np.array([at], dtype=np.uint64))
            assert one.ids[0] == together[40 * at + i]


def test_numbers_that_decide_equal_the_naive_twin_and_are_uniform() -> None:
    """10,000 numbers: their mean is within 0.0125 of ½ in all but 1 of 70,000 correct runs."""
    streams = np.array([stream_of(1, (i,)) for i in range(100)], dtype=np.uint64)
    values = np.concatenate(
        [xtc_numbers(keys_of(streams, np.full(100, at, np.uint64))) for at in range(100)]
    )
    assert values[105] == naive.xtc_number(int(streams[5]), 1)
    assert abs(values.mean() - 0.5) < 0.0125


def test_kept_logprob_is_that_among_the_tokens_of_this_draw() -> None:
    chain = Sampler(SamplingParams(xtc_probability=1.0, xtc_threshold=0.14), 3)
    result = BatchSampler([chain]).draw(
        LOGITS, np.array([0]), np.array([0], dtype=np.uint64), kept=True
    )
    shares = naive.softmax(naive.xtc(LOGITS[0].tolist(), 0.14))
    assert result.kept is not None
    assert result.kept[0] == pytest.approx(np.log(shares[result.ids[0]]), abs=1e-5)
