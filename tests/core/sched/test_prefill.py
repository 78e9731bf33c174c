from __future__ import annotations

import numpy as np
import pytest

from fakes import HiddenFake, LateFake
from rig import MakeRig, MemoryEngine, logits_after, score_of
from weft._core.sched.prefill import LogitsRequest, PathClaim
from weft._core.sched.work import Extend, Logits, Scores

PATH = [3, 1, 2, 2, 1, 3, 0, 1, 2, 0, 3]


def test_step_runs_no_more_tokens_than_the_budget(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=4)
    rig.drive(*(Extend(rig.place([i, *PATH])) for i in range(3)))
    assert max(engine.sizes) == 4
    assert sum(engine.sizes) == 3 * (len(PATH) + 1)


def test_cached_path_is_read_in_chunks_within_the_budget(make: MakeRig) -> None:
    """Two score requests over the full path run three tokens a step and write no slot."""
    engine = MemoryEngine()
    rig = make(engine, n_batch=3, row_cache_bytes=0)
    rig.ask(PATH)
    slots, engine.sizes = rig.tree.fragments.usage().slots, []
    n = len(PATH)
    wants = (Scores(1, n, 2), Logits(2), Scores(4, 9))
    first, logits, second = rig.ask(PATH, *wants)
    np.testing.assert_array_equal(first.logprobs, score_of(PATH, 1, n, 2).logprobs)
    np.testing.assert_array_equal(first.top_ids, score_of(PATH, 1, n, 2).top_ids)
    np.testing.assert_array_equal(second.logprobs, score_of(PATH, 4, 9, 0).logprobs)
    np.testing.assert_array_equal(logits, logits_after(PATH[:2]))
    assert max(engine.sizes) == 3
    assert rig.tree.fragments.usage().slots == slots


def test_equal_work_in_one_step_is_one_row(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=64)
    wants = (Logits(5), Scores(2, 5))
    answers = rig.drive(*(Extend(rig.place(PATH), (), wants) for _ in range(4)))
    assert engine.sizes == [len(PATH)]
    for logits, scores in answers:
        np.testing.assert_array_equal(logits, logits_after(PATH[:5]))
        np.testing.assert_array_equal(scores.logprobs, score_of(PATH, 2, 5, 0).logprobs)


def test_final_tokens_of_one_path_are_scored_in_one_row(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=64)
    n = len(PATH)
    items = [Extend(rig.place(PATH), (), (Scores(n, n + 1, final=token),)) for token in range(4)]
    answers = rig.drive(*items)
    assert engine.sizes == [n]
    for token, (score,) in enumerate(answers):
        expected = score_of([*PATH, token], n, n + 1, 0)
        np.testing.assert_array_equal(score.logprobs, expected.logprobs)


def test_final_token_is_scored_in_steps_smaller_than_the_path(make: MakeRig) -> None:
    rig = make(MemoryEngine(), n_batch=3)
    n = len(PATH)
    for first in (1, 3, n):
        (score,) = rig.ask(PATH, Scores(first, n + 1, 2, final=1))
        expected = score_of([*PATH, 1], first, n + 1, 2)
        np.testing.assert_array_equal(score.logprobs, expected.logprobs)
        np.testing.assert_array_equal(score.top_ids, expected.top_ids)


def test_work_whose_path_is_in_flight_waits_for_it(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine, n_batch=64)
    (first,) = rig.submit(Extend(rig.place(PATH), (), (Logits(len(PATH)),)))
    rig.step()
    assert rig.scheduler.in_flight is not None
    (second,) = rig.submit(Extend(rig.place(PATH), (), (Logits(len(PATH)),)))
    rig.driver.drive([first, second])
    assert sum(row.n_tokens for rows in engine.calls for row in rows) == len(PATH)
    assert first.result()[0].tolist() == second.result()[0].tolist()


def test_hidden_engine_gets_one_row_for_all_open_wants_of_a_path(make: MakeRig) -> None:
    engine = HiddenFake(MemoryEngine())
    rig = make(engine, n_batch=64)
    logits, score = rig.ask(PATH, Logits(4), Scores(2, 7))
    np.testing.assert_array_equal(logits, logits_after(PATH[:4]))
    np.testing.assert_array_equal(score.logprobs, score_of(PATH, 2, 7, 0).logprobs)
    assert [[row.n_tokens for row in rows] for rows in engine.calls] == [[6]]


def test_hidden_task_that_waits_for_its_answers_gets_no_second_row(make: MakeRig) -> None:
    rig = make(HiddenFake(MemoryEngine()), n_batch=64)
    (ticket,) = rig.submit(Extend(rig.place(PATH), (), (Logits(4),)))
    queues = rig.scheduler.queues
    rig.scheduler.drain_inbox()
    rig.scheduler.admission.admit(may_evict=True)
    queues.advance()
    (part,) = queues.prefill.plan(queues.prefill_order(64), 64, queues)
    assert queues.prefill.plan(queues.prefill_order(64), 64, queues) == []
    part.discard(queues)
    rig.driver.drive([ticket])
    assert ticket.result()[0].tolist() == logits_after(PATH[:4]).tolist()


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ((0, 10), []),
        ((2, 4), [(4, 8)]),
        ((5, 6), [(2, 5), (6, 8)]),
        ((7, 12), [(2, 7)]),
        ((8, 9), [(2, 8)]),
    ],
)
def test_part_taken_from_a_want_is_no_longer_open(
    make: MakeRig, taken: tuple[int, int], left: list[tuple[int, int]]
) -> None:
    """The need is [2, 8)."""
    rig = make()
    (ticket,) = rig.submit(Extend(rig.place(PATH)))
    request = LogitsRequest(PathClaim(ticket.job, rig.place(PATH)), 2, 8, 0)
    got = request.pop_range(*taken)
    assert request.remaining == left
    assert sum(b - a for a, b in [*got, *left]) == 6
