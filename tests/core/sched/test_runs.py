from __future__ import annotations

from typing import Any

import pytest

from fakes import Boom, BrokenEngine, HiddenFake, LateFake
from rig import MakeRig, MemoryEngine, assert_result, run, text_after
from weft._core.sched.work import FinishReason, RunState
from weft.errors import DeadEnd, ForwardError, KVFull

FORBIDDEN: dict[str, Any] = {"logit_bias": {i: float("-inf") for i in range(16)}}


def test_stop_id_that_ends_a_run_is_reported_and_in_no_list(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1, 2])
    tokens, _ = text_after([1, 2], run(place, max_tokens=20), rig.n_ctx)
    stop = tokens[5]
    item = run(place, max_tokens=20, stop_ids=frozenset({stop}))
    (result,) = rig.drive(item)
    assert (result.finish_reason, result.ended_by) == ("stop", stop)
    assert stop not in result.tokens
    assert_result(rig, item, result)


def test_stop_id_drawn_first_ends_a_run_without_tokens(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1, 2])
    first = text_after([1, 2], run(place), rig.n_ctx)[0][0]
    (result,) = rig.drive(run(place, stop_ids=frozenset({first})))
    assert (result.tokens, result.ended_by, result.end.ids()) == ([], first, [1, 2])


@pytest.mark.parametrize("late", [False, True])
def test_sink_ends_its_own_run_only(make: MakeRig, late: bool) -> None:
    """With late results one more draw is in flight by then: its result is dropped."""
    rig = make(LateFake(MemoryEngine()) if late else MemoryEngine())
    token_lists: list[list[int]] = []

    def sink(state: RunState) -> FinishReason | None:
        token_lists.append(list(state.tokens))
        return "stop" if len(state.tokens) == 3 else None

    place = rig.place([1, 2])
    short, long = run(place, 0, sink=sink, max_tokens=9), run(place, 1, max_tokens=9)
    one, two = rig.drive(short, long)
    assert (len(one.tokens), one.finish_reason) == (3, "stop")
    assert token_lists == [one.tokens[:n] for n in (1, 2, 3)]
    assert one.tokens == text_after([1, 2], short, rig.n_ctx)[0][:3]
    assert_result(rig, long, two)


def test_failing_sink_fails_only_its_member_of_a_merged_run(make: MakeRig) -> None:
    rig = make()

    def sink(state: RunState) -> FinishReason | None:
        if len(state.tokens) == 2:
            raise Boom("sink")
        return None

    place = rig.place([1, 2])
    bad, good = run(place, temperature=0, sink=sink), run(place, temperature=0)
    tickets = rig.submit(bad, good)
    rig.driver.drive(tickets)
    with pytest.raises(Boom, match="sink"):
        tickets[0].result()
    assert_result(rig, good, tickets[1].result())
    assert rig.scheduler.counters.decoded == 6


@pytest.mark.parametrize("n_batch", [1, 3, 5])
def test_step_with_room_for_some_runs_advances_the_oldest(make: MakeRig, n_batch: int) -> None:
    rig = make(n_batch=n_batch)
    place = rig.place([1, 2, 3])
    items = [run(place, i, max_tokens=5) for i in range(7)]
    tickets = rig.submit(*items)
    while not any(ticket.done for ticket in tickets):
        n_drawn = [ticket.job.n_drawn for ticket in tickets]
        assert n_drawn == sorted(n_drawn, reverse=True), (
            "an older run has drawn less than a younger one"
        )
        rig.step()
    rig.driver.drive(tickets)
    for item, ticket in zip(items, tickets, strict=True):
        assert_result(rig, item, ticket.result())


@pytest.mark.parametrize("engine", [MemoryEngine, lambda: HiddenFake(MemoryEngine())])
def test_run_at_the_context_limit_draws_nothing_and_before_it_what_fits(
    make: MakeRig, engine: Any
) -> None:
    rig = make(engine(), n_ctx=6)
    full, near = run(rig.place([1] * 6)), run(rig.place([2] * 4), max_tokens=9)
    one, two = rig.drive(full, near)
    assert (one.tokens, one.finish_reason) == ([], "context")
    assert (len(two.tokens), two.finish_reason) == (2, "context")
    assert_result(rig, near, two)


def test_run_that_stops_at_the_context_limit_reports_its_own_reason(
    make: MakeRig,
) -> None:
    rig = make(n_ctx=6)
    short = run(rig.place([2] * 4), temperature=0, max_tokens=2)
    long = run(rig.place([2] * 4), temperature=0, max_tokens=3)
    one, two = rig.drive(short, long)
    assert (one.finish_reason, two.finish_reason) == ("length", "context")
    assert one.tokens == two.tokens


def test_run_without_a_legal_token_fails_alone(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1, 2])
    items = [run(place, i, **(FORBIDDEN if i == 1 else {})) for i in range(3)]
    tickets = rig.submit(*items)
    rig.driver.drive(tickets)
    with pytest.raises(DeadEnd, match="leave no token"):
        tickets[1].result()
    for i in (0, 2):
        assert_result(rig, items[i], tickets[i].result())


def test_failed_step_drops_the_tails_of_its_runs(make: MakeRig) -> None:
    rig = make(BrokenEngine(MemoryEngine(), {3}))
    place = rig.place([1, 2])
    tickets = rig.submit(run(place, 0), run(place, 1))
    rig.driver.drive(tickets)
    for ticket in tickets:
        with pytest.raises(ForwardError, match="forward 3"):
            ticket.result()
    assert not rig.tree.tails
    assert rig.tree.fragments.usage().slots == 2
    item = run(place, 0)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)


def test_rows_of_a_hidden_engine_contain_their_full_path(make: MakeRig) -> None:
    memory = MemoryEngine()
    rig = make(HiddenFake(memory))
    item = run(rig.place([1, 2, 3]))
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    assert memory.sizes == [3, 4, 5, 6, 7, 8]


def test_later_run_reuses_kv_of_an_earlier_one(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine)
    first = run(rig.place([1, 2]), temperature=0, max_tokens=12)
    (result,) = rig.drive(first)
    engine.sizes = []
    continuation = run(rig.place([1, 2, *result.tokens[:6]]), temperature=0, max_tokens=2)
    (more,) = rig.drive(continuation)
    assert more.tokens == result.tokens[6:8]
    assert engine.sizes == [1, 1]  # one token read again for its logits, one drawn and run


def test_preempted_run_recomputes_evicted_kv_and_resumes(make: MakeRig) -> None:
    rig = make(capacity=14)
    items = [run(rig.place([i] * 3), i, max_tokens=9) for i in range(3)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    counters = rig.scheduler.counters
    assert counters.preempted > 0
    assert counters.recomputed > 0
    assert rig.tree.n_evicted > 0


def test_penalties_of_a_preempted_run_resume_unchanged(make: MakeRig) -> None:
    rig = make(capacity=14)
    options = {"repetition_penalty": 1.8, "frequency_penalty": 0.6, "max_tokens": 9}
    items = [run(rig.place([i] * 3), i, **options) for i in range(3)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert rig.scheduler.counters.preempted > 0


def test_live_run_that_outgrows_the_capacity_fails_and_frees_its_kv(make: MakeRig) -> None:
    rig = make(capacity=8)
    (ticket,) = rig.submit(run(rig.place([1, 2, 3]), max_tokens=30))
    rig.driver.drive([ticket])
    with pytest.raises(KVFull):
        ticket.result()
    assert rig.tree.budget.unevictable == 0
    assert not rig.tree.tails
