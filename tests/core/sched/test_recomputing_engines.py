"""Engines that keep nothing between forwards: a step counts every token that they compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes import HiddenFake
from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run, sampler
from weft._core.sched.work import Commit, Extend, Logits, RunState, Ticket
from weft.engines.base import EngineInfo
from weft.errors import ConfigError

PATH = [3, 1, 2, 2, 1, 3, 0, 1, 2]


class Owner:
    """Owner of a sequence."""


def shapes(engine: HiddenFake) -> list[tuple[int, int]]:
    """The rows and tokens of each forward."""
    return [(len(rows), sum(row.n_tokens for row in rows)) for rows in engine.calls]


def assert_within(engine: HiddenFake, n_batch: int) -> None:
    assert all(n_rows == 1 or n_tokens <= n_batch for n_rows, n_tokens in shapes(engine))


def test_step_of_runs_has_no_more_tokens_than_the_budget(make: MakeRig) -> None:
    engine = HiddenFake(MemoryEngine())
    rig = make(engine, n_batch=40)
    items = [run(rig.place(PATH), i) for i in range(12)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert_within(engine, 40)
    assert max(n_rows for n_rows, _ in shapes(engine)) == 4  # 10 tokens each after the first draw


def test_runs_that_do_not_fit_in_one_step_take_turns(make: MakeRig) -> None:
    rig = make(HiddenFake(MemoryEngine()), n_batch=24)
    lengths: dict[int, list[int]] = {}

    def watch(number: int):
        def sink(state: RunState) -> None:
            lengths[number] = state.tokens

        return sink

    items = [run(rig.place(PATH), i, max_tokens=9, sink=watch(i)) for i in range(6)]
    tickets = rig.submit(*items)
    while not all(ticket.done for ticket in tickets):
        rig.step()
        counts = [len(tokens) for tokens in lengths.values()]
        assert not counts or max(counts) - min(counts) <= 1
    for item, ticket in zip(items, tickets, strict=True):
        assert_result(rig, item, ticket.result())


def test_new_work_starts_next_to_a_run_longer_than_the_budget(make: MakeRig) -> None:
    engine = HiddenFake(MemoryEngine())
    rig = make(engine, n_batch=8)
    long = run(rig.place(PATH * 3), 1, max_tokens=30)
    (ticket,) = rig.submit(long)
    rig.step(3)
    (ticket_of_extend,) = rig.submit(Extend(rig.place([1, 2, 3]), (), (Logits(3),)))
    rig.step(3)
    np.testing.assert_array_equal(ticket_of_extend.result()[0], logits_after([1, 2, 3]))
    assert not ticket.done
    rig.driver.drive([ticket])
    assert_result(rig, long, ticket.result())


def _commit(rig: Rig, n_sequences: int) -> Ticket:
    owners = [Owner() for _ in range(n_sequences)]
    sequences = [rig.scheduler.sequences.create(owner, rig.place(PATH)) for owner in owners]
    (ticket,) = rig.submit(
        Commit(sequences, [i % 4 for i in range(n_sequences)], [sampler()] * n_sequences)
    )
    rig.driver.drive([ticket])
    for i, result in enumerate(ticket.result()):
        row = rig.scheduler.logits_cache.read(result.row)
        np.testing.assert_array_equal(row, logits_after([*PATH, i % 4]))
    return ticket


@pytest.mark.parametrize(("n_batch", "max_rows"), [(32, 3), (5, 1)])
def test_commit_of_many_sequences_takes_as_many_steps_as_its_paths_need(
    make: MakeRig, n_batch: int, max_rows: int
) -> None:
    engine = HiddenFake(MemoryEngine())
    _commit(make(engine, n_batch=n_batch), 9)
    assert_within(engine, n_batch)
    assert max(n_rows for n_rows, _ in shapes(engine)) == max_rows


def test_many_prompts_take_as_many_steps_as_their_tokens_need(make: MakeRig) -> None:
    engine = HiddenFake(MemoryEngine())
    rig = make(engine, n_batch=30)
    paths = [[i, *PATH] for i in range(8)]
    answers = rig.drive(*(Extend(rig.place(path), (), (Logits(len(path)),)) for path in paths))
    for path, (row,) in zip(paths, answers, strict=True):
        np.testing.assert_array_equal(row, logits_after(path))
    assert shapes(engine) == [(3, 30), (3, 30), (2, 20)]


def test_engine_that_caches_prefixes_counts_new_tokens_only(make: MakeRig) -> None:
    engine = MemoryEngine(hidden=True)
    rig = make(engine, n_batch=8)
    items = [run(rig.place(PATH), i) for i in range(8)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert engine.sizes == [9, 80, 88, 96, 104, 112]
    _commit(rig, 8)
    assert engine.sizes[6:] == [80]


def test_continued_paths_count_new_tokens_if_the_engine_caches_state(make: MakeRig) -> None:
    engine = HiddenFake(MemoryEngine())
    engine.info = replace(engine.info, caches_state=True)
    rig = make(engine, n_batch=20)
    items = [run(rig.place([i, *PATH]), i) for i in range(4)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    prompts = [shape for shape in shapes(engine) if shape[1] % len([0, *PATH]) == 0]
    assert prompts[0] == (2, 20)  # complete, as they are new
    assert max(n_rows for n_rows, _ in shapes(engine)) == 4  # the runs, though of 44 tokens
    _commit(rig, 12)
    assert shapes(engine)[-1] == (12, 120)
    with pytest.raises(ConfigError, match="caches_state"):
        replace(engine.info, no_prefix_cache=False)


def test_path_counts_the_number_of_tokens_the_engine_reports(make: MakeRig) -> None:
    class Knowing(HiddenFake):
        def n_tokens_to_run(self, tokens, first: int, adapter: str | None) -> int:
            assert (first, adapter) == (len(tokens) - 1, None)
            return 2 if tokens[0] % 2 else len(tokens)

    engine = Knowing(MemoryEngine())
    rig = make(engine, n_batch=10)
    paths = [[1 + 2 * (i < 6), *PATH[:4], i] for i in range(6)] + [[2, *PATH, i] for i in range(2)]
    rig.drive(*(Extend(rig.place(path), (), (Logits(len(path)),)) for path in paths))
    assert shapes(engine) == [(5, 30), (2, 6 + 11), (1, 11)]


def test_no_prefix_cache_of_an_engine_with_fragments_raises() -> None:
    given = {"name": "x", "model": "x", "n_layers": 1, "n_vocab": 4, "context_length": 8}
    more = {"kv_bytes_per_token": 1, "dtype": "float32", "fingerprint": "x"}
    with pytest.raises(ConfigError, match="no_prefix_cache"):
        EngineInfo(**given, **more, no_prefix_cache=True)


def test_row_computed_meanwhile_for_another_ticket_is_not_run_twice(make: MakeRig) -> None:
    """Both want the same, and a step has room for one of them."""
    engine = MemoryEngine(hidden=True)
    rig = make(engine, n_batch=1)
    rows = rig.drive(*(Extend(rig.place([1, 2, 3]), (), (Logits(3),)) for _ in range(3)))
    assert [each[0].tolist() for each in rows] == [logits_after([1, 2, 3]).tolist()] * 3
    assert engine.sizes == [3]
