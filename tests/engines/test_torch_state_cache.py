"""The ends of recent paths: which are matched, which are reused, which are evicted first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from transformers import DynamicCache  # noqa: E402

from weft.engines.torch.recompute.state_cache import StateCache  # noqa: E402

pytestmark = pytest.mark.torch

BYTES = 2 * 4 * 4 * 3  # of a path of three tokens: keys and values, four floats a token


def cache_of(*values: float, n_tokens: int = 3) -> DynamicCache:
    """A cache of one layer; the rows hold the values."""
    rows = torch.tensor(values)[:, None, None, None].expand(-1, 1, n_tokens, 4).contiguous()
    cache = DynamicCache()
    cache.update(rows, rows.clone(), 0)
    return cache


def values_of(cache: DynamicCache) -> list[float]:
    return cache.layers[0].keys[:, 0, 0, 0].tolist()


def keys(*paths: Sequence[int]) -> list[tuple[None, tuple[int, ...]]]:
    return [(None, tuple(path)) for path in paths]


def test_longest_cached_prefix_within_the_limit_is_returned() -> None:
    ends = StateCache(1 << 20)
    ends.keep(cache_of(1.0, n_tokens=2), keys([5, 6]))
    ends.keep(cache_of(2.0), keys([5, 6, 7]))
    actual = [ends.find(None, (5, 6, 7, 8), max_n) for max_n in (4, 3, 2, 1)]
    assert [None if end is None else end.length for end in actual] == [3, 3, 2, None]
    assert ends.find("an adapter", (5, 6, 7), 3) is None


def test_batch_is_reused_only_if_all_its_rows_continue() -> None:
    ends = StateCache(1 << 20)
    cache = cache_of(1.0, 2.0)
    ends.keep(cache, keys([1, 2, 3], [1, 2, 4]))
    end = ends.find(None, (1, 2, 3), 3)
    assert end is not None
    for rows, alone in (([0], True), ([1, 0], True), ([0, 1], False), ([0, 0, 1], True)):
        taken = ends.take(end.batch, rows, is_only_user=alone)
        assert taken is not cache
        assert values_of(taken) == [[1.0, 2.0][row] for row in rows]
    assert ends.take(end.batch, [0, 1], is_only_user=True) is cache
    assert ends.find(None, (1, 2, 3), 3) is None


def test_batches_of_full_runs_are_copied() -> None:
    ends = StateCache(1 << 20)
    ends.keep(cache_of(1.0), keys([1, 2, 3]), is_full_run=True)
    end = ends.find(None, (1, 2, 3), 3)
    assert end is not None
    taken = ends.take(end.batch, [0], is_only_user=True)
    taken.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
    repeated = ends.find(None, (1, 2, 3), 3)
    assert repeated is not None
    assert repeated.batch.cache.get_seq_length() == 3


def test_batch_used_last_is_evicted_last() -> None:
    ends = StateCache(2 * BYTES)
    ends.keep(cache_of(1.0), keys([1, 2, 3]), is_full_run=True)
    ends.keep(cache_of(2.0), keys([4, 5, 6]), is_full_run=True)
    end = ends.find(None, (1, 2, 3), 3)
    assert end is not None
    ends.take(end.batch, [0], is_only_user=True)
    ends.keep(cache_of(3.0), keys([7, 8, 9]))
    left = [ends.find(None, path, 3) for path in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    assert [end is not None for end in left] == [True, False, True]
    ends.keep(cache_of(*range(3)), keys([1, 1, 1], [2, 2, 2], [3, 3, 3]))
    assert len(ends) == 2  # what has no room at all takes no other's


def test_newer_state_of_a_path_survives_the_older_one() -> None:
    ends = StateCache(2 * BYTES)
    ends.keep(cache_of(1.0), keys([1, 2, 3]))
    ends.keep(cache_of(2.0), keys([1, 2, 3]))
    ends.keep(cache_of(3.0), keys([4, 5, 6]))  # the first one goes
    end = ends.find(None, (1, 2, 3), 3)
    assert end is not None
    assert values_of(end.batch.cache) == [2.0]
    ends.clear()
    assert len(ends) == 0
    assert ends.find(None, (1, 2, 3), 3) is None
