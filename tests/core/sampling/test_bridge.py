from __future__ import annotations

import numpy as np
import pytest

from weft._core.sampling import metrics
from weft._core.sampling.metrics import join_scores
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BatchSampler, Sampler, draw_batch, draw_rows
from weft.engines.base import Score

FIELDS = ("logprobs", "entropies", "ranks", "top_ids", "top_logprobs")


def logits(n: int, n_vocab: int = 40) -> np.ndarray:
    return (np.random.default_rng(n).standard_normal((n, n_vocab)) * 2).astype(np.float32)


def samplers(n: int) -> list[Sampler]:
    return [Sampler(SamplingParams(), stream_of(3, (i,))) for i in range(n)]


def test_batch_of_consecutive_rows_keeps_the_positions() -> None:
    chain = BatchSampler(samplers(3))
    batch = draw_batch(chain, 4, [10, 20, 1 << 40])
    assert batch.sampler is chain
    assert (batch.rows.dtype, batch.rows.tolist()) == (np.int64, [4, 5, 6])
    assert (batch.positions.dtype, batch.positions.tolist()) == (np.uint64, [10, 20, 1 << 40])


def test_draws_from_a_list_of_rows_equal_those_of_each_row_alone() -> None:
    """Sampler i draws from row i, whichever rows are the same object."""
    table = logits(3)
    rows = [table[0], table[1], table[0], table[2], table[1]]
    rows[2] = rows[0]
    positions = [5, 6, 7, 8, 9]
    together = draw_rows(rows, samplers(5), positions)
    for i in range(5):
        alone = draw_rows([rows[i]], [samplers(5)[i]], [positions[i]])
        assert alone.ids[0] == together.ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
        assert alone.entropies[0] == together.entropies[i]


def test_equal_row_objects_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    real = BatchSampler.draw

    def draw(self: BatchSampler, table: np.ndarray, *rest: np.ndarray, kept: bool) -> object:
        shapes.append(table.shape)
        return real(self, table, *rest, kept=kept)

    monkeypatch.setattr(BatchSampler, "draw", draw)
    row = logits(1)[0]
    draw_rows([row] * 6, samplers(6), range(6))
    assert shapes == [(1, 40)]


@pytest.mark.parametrize("cuts", [[], [1], [2, 5], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("top", [0, 3])
def test_joined_scores_of_parts_equal_the_scores_of_all_rows(cuts: list[int], top: int) -> None:
    table, targets = logits(7), np.arange(7)
    expected = metrics.score(table, targets, top)
    edges = [0, *cuts, 7]
    parts: list[Score] = [
        metrics.score(table[a:b], targets[a:b], top) for a, b in zip(edges, edges[1:], strict=False)
    ]
    joined = join_scores(parts)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(joined, name), getattr(expected, name))
