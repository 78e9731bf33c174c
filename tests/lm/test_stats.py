from __future__ import annotations

from dataclasses import replace

import pytest

from fakes import HiddenFake
from rig import MemoryEngine, Rig, run
from weft._core.sched.work import Extend
from weft.lm.stats import Stats, format_bytes, gather_stats


def stats_of(rig: Rig) -> Stats:
    return gather_stats(rig.scheduler)


def test_stats_count_the_work_done() -> None:
    rig = Rig(capacity=40)
    rig.drive(Extend(rig.place([1, 2, 3, 4])), Extend(rig.place([1, 2, 3, 5, 6])))
    stats = stats_of(rig)
    assert (stats.prefilled, stats.reused, stats.decoded, stats.recomputed) == (6, 3, 0, 0)
    assert (stats.kv_tokens, stats.kv_bytes, stats.kv_budget_bytes) == (6, 6, 40)
    assert stats.kv_bytes_unshared == 4 + 5
    rig.drive(run(rig.place([1, 2, 3, 4]), max_tokens=3))
    stats = stats_of(rig)
    assert (stats.prefilled, stats.reused, stats.decoded, stats.recomputed) == (6, 7, 3, 1)
    assert stats.pinned_tokens == stats.evicted == stats.parked == 0
    assert stats.seconds == pytest.approx(stats.plan_s + stats.forward_s + stats.deliver_s)
    assert stats.tokens_per_s == pytest.approx(3 / stats.seconds)
    rig.finish()


def test_tails_of_live_runs_count_as_used_and_pinned() -> None:
    rig = Rig()
    tickets = rig.submit(*(run(rig.place([1, 2]), i, max_tokens=9) for i in range(2)))
    rig.step(4)
    stats = stats_of(rig)
    assert stats.kv_tokens == 2 + 2 * 3
    assert stats.pinned_tokens >= stats.kv_tokens
    assert stats.kv_bytes_unshared == 2 * (2 + 3)
    rig.driver.drive(tickets)
    rig.finish()


def test_engine_without_visible_kv_has_no_kv_stats() -> None:
    rig = Rig(HiddenFake(MemoryEngine()))
    rig.drive(run(rig.place([1])))
    stats = stats_of(rig)
    assert (stats.kv_tokens, stats.kv_bytes, stats.kv_bytes_allocated) == (0, 0, 0)
    assert stats.kv_budget_bytes is None


def test_unknown_values_are_left_out_of_the_text() -> None:
    stats = replace(stats_of(Rig()), decoded=5)
    assert "KV" not in str(replace(stats, knows_kv=False))
    assert str(replace(stats, knows_prefill=False, knows_kv=False)) == "decoded 5 · 0 tok/s"
    rig = Rig(HiddenFake(MemoryEngine()))
    assert (stats_of(rig).knows_prefill, stats_of(rig).knows_kv) == (True, False)


def test_fresh_lm_has_done_nothing_in_no_time() -> None:
    stats = stats_of(Rig())
    assert stats.seconds == stats.tokens_per_s == 0
    assert str(stats) == "prefilled 0 · reused 0 · decoded 0 · KV 0 B (0 B unshared)"
    assert "prefilled 12,345" in str(replace(stats, prefilled=12345))


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (123_456, "123 kB"),
        (5_500_000, "5.5 MB"),
        (64 * 10**9, "64.0 GB"),
        (3 * 10**12, "3.0 TB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes_are_shown_in_the_unit_people_read(n_bytes: int, shown: str) -> None:
    assert format_bytes(n_bytes) == shown


def test_recomputed_tokens_are_counted_and_shown_without_prefix_caching() -> None:
    rig = Rig(HiddenFake(MemoryEngine()))
    rig.drive(run(rig.place([1, 2, 3]), max_tokens=4))
    stats = stats_of(rig)
    assert not stats.prefix_caching
    assert (stats.prefilled, stats.reused, stats.decoded) == (3, 0, 4)
    assert stats.recomputed == 3 + 4 + 5  # of the paths of 4, 5 and 6 tokens
    assert str(stats).startswith("prefilled 3 · reused 0 · decoded 4 · run again 12 (prefix")
    rig.finish()
