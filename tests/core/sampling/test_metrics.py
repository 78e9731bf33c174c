from __future__ import annotations

import numpy as np
import pytest

from core.sampling import naive
from weft._core.sampling.metrics import BufferPool, log_softmax, moments, score, score_span
from weft.engines.base import ScoreSpan
from weft.errors import ForwardError


def some_logits(n: int = 6, n_vocab: int = 300, scale: float = 3) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((n, n_vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize("shift", [0, 1e4, -1e4])
@pytest.mark.parametrize("scale", [0, 3, 100])
def test_logprob_and_entropy_equal_their_naive_twins(shift: float, scale: float) -> None:
    logits = (some_logits(scale=scale) + np.float32(shift)).astype(np.float32)
    logits[1, 5:50] = -np.inf
    ids = np.arange(6) * 3
    scores = score(logits, ids)
    assert scores.logprobs.dtype == scores.entropies.dtype == np.float32
    rows = zip(logits.tolist(), ids, scores.logprobs, scores.entropies, strict=True)
    for row, at, p, h in rows:
        assert p == pytest.approx(naive.logprob(row, at), abs=1e-5, rel=1e-5)
        assert h == pytest.approx(naive.entropy(row), abs=1e-5)


def test_entropy_is_never_negative_and_a_forbidden_token_has_no_probability() -> None:
    logits = np.full((2, 50), -np.inf, dtype=np.float32)
    logits[:, 7] = 3
    logits[1, 8] = 3 - 80
    scores = score(logits, np.array([7, 9]))
    assert scores.logprobs.tolist() == [0, -np.inf]
    assert scores.entropies[0] == 0
    assert scores.entropies.min() >= 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_raise(bad: float) -> None:
    logits = some_logits()
    logits[2, 3] = bad
    with pytest.raises(ForwardError, match="logits"):
        moments(logits)
    with pytest.raises(ForwardError, match="nothing but -inf"):
        moments(np.full((1, 4), -np.inf, dtype=np.float32))


def test_log_softmax_equals_its_naive_twin() -> None:
    logits = some_logits(2, 40)
    for row, got in zip(logits.tolist(), log_softmax(logits), strict=True):
        assert got == pytest.approx([naive.logprob(row, i) for i in range(40)], abs=1e-5)


@pytest.mark.parametrize("top", [0, 1, 5, 300, 400])
def test_score_agrees_with_sorting_everything(top: int) -> None:
    logits = np.round(some_logits())
    logits[0, 10:20] = -np.inf
    targets = np.array([10, 0, 299, 5, 6, 7])
    answer = score(logits, targets, top)
    n_top = min(top, 300)
    assert answer.top_ids.shape == answer.top_logprobs.shape == (6, n_top)
    assert answer.ranks.dtype == answer.top_ids.dtype == np.int64
    assert answer.top_logprobs.dtype == np.float32
    for row, target, rank, ids in zip(
        logits.tolist(), targets, answer.ranks, answer.top_ids, strict=True
    ):
        order = naive.by_likelihood(row)
        assert rank == order.index(target)
        assert ids.tolist() == order[:n_top]
    assert np.allclose(answer.logprobs, log_softmax(logits)[np.arange(6), targets], atol=1e-5)
    expected = np.take_along_axis(log_softmax(logits), answer.top_ids, axis=1)
    assert np.allclose(answer.top_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("target", [-1, 300])
def test_score_of_a_target_outside_the_vocabulary_raises(target: int) -> None:
    logits = some_logits(2, 300)
    with pytest.raises(ForwardError, match="ids are 0 to 299"):
        score_span(ScoreSpan(0, (7, target), 0), 300, lambda first, last: logits[first:last])


def test_moments_with_reused_memory_are_the_same_and_input_is_unchanged() -> None:
    logits = some_logits()
    logits.flags.writeable = False
    scratch = BufferPool()
    for n in (6, 3, 6):
        kept, fresh = moments(logits[:n], scratch), moments(logits[:n])
        assert all(np.array_equal(a, b) for a, b in zip(kept, fresh, strict=True))


def test_buffer_pool_reuses_small_buffers_and_frees_large_ones() -> None:
    scratch = BufferPool()
    assert scratch.get("a", (2, 3), np.float32) is scratch.get("a", (2, 3), np.float32)
    assert scratch.get("a", (2, 4), np.float32).shape == (2, 4)
    large = (3, 1 << 20)
    assert scratch.get("b", large, np.float32) is not scratch.get("b", large, np.float32)
