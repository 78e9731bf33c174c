from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakes import Boom, BrokenEngine, HiddenFake, LateFake, Wrapped
from rig import MakeRig, MemoryEngine, assert_result, logits_after, run
from weft._core.sched.batch import as_forward_error
from weft._core.sched.work import Extend, Logits, Run
from weft.engines.base import Engine, Output, Row
from weft.errors import Cancelled, ConfigError, ForwardError, KVFull, WeftError


class Raising(Wrapped):
    """Raises what it was given at its first forward."""

    def __init__(self, inner: Engine, error: BaseException) -> None:
        super().__init__(inner)
        self.error: BaseException | None = error

    def forward(self, rows: Sequence[Row]) -> Output:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.inner.forward(rows)


def test_atomic_call_of_runs_raises(make: MakeRig) -> None:
    rig = make()
    with pytest.raises(ConfigError, match="extends only"):
        rig.submit(run(rig.place([1])), atomic=True)
    assert rig.scheduler.is_idle


def test_empty_call_has_no_tickets_and_no_work(make: MakeRig) -> None:
    rig = make()
    assert rig.submit(atomic=True) == []
    assert rig.scheduler.is_idle


def test_join_over_the_start_of_a_run_does_not_stop_it(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight nodes of one token become one in the step that draws the run's first token."""
    rig = make(n_batch=2, row_cache_bytes=0)
    monkeypatch.setattr(
        rig.tree, "growable_leaf", lambda node: None
    )  # as if siblings had been there
    path = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    places = [rig.place(path[:n]) for n in range(1, 8)]
    for place in places:
        rig.drive(Extend(place))
    item = run(rig.place(path[:3]), temperature=0)
    tickets = rig.submit(item, Extend(rig.place(path[:8])), Extend(rig.place(path)))
    before = rig.tree.n_nodes
    rig.step()
    assert rig.tree.n_nodes < before
    rig.driver.drive(tickets)
    assert_result(rig, item, tickets[0].result())


@pytest.mark.parametrize("n_batch", [1, 2, 3])
@pytest.mark.parametrize("capacity", [7, 8, 9])
def test_runs_in_little_room_are_preempted_and_finish_normally(
    make: MakeRig, capacity: int, n_batch: int
) -> None:
    rig = make(n_batch=n_batch, capacity=capacity)
    items = [run(rig.place([1]), i, max_tokens=5) for i in range(3)]
    results = rig.drive(*items)
    if n_batch == 3 or capacity < 9:
        assert (rig.scheduler.counters.preempted > 0) == (n_batch > 1)
    for item, result in zip(items, results, strict=True):
        assert_result(rig, item, result)


def test_work_that_cannot_progress_fails_instead_of_looping(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(capacity=4)
    tickets = rig.submit(Extend(rig.place([1])), Extend(rig.place([2, 3, 4, 5])))
    monkeypatch.setattr(rig.scheduler.queues.prefill, "plan", lambda claims, budget, queues: [])
    rig.driver.drive(tickets)
    for ticket in tickets:
        with pytest.raises(WeftError, match="report this as a bug"):
            ticket.result()


def test_cancelled_member_of_equal_greedy_runs_leaves_the_others(make: MakeRig) -> None:
    rig = make()
    items = [run(rig.place([1, 2]), temperature=0, max_tokens=8) for _ in range(3)]
    tickets = rig.submit(*items)
    rig.step(4)
    tickets[1].cancel()
    tickets[1].cancel()
    rig.step()
    assert tickets[1].done
    assert tickets[1].result().finish_reason == "cancelled"
    rig.driver.drive(tickets)
    assert_result(rig, items[0], tickets[0].result())
    assert_result(rig, items[2], tickets[2].result())
    result = tickets[1].result()
    assert result.tokens == tickets[0].result().tokens[: len(result.tokens)]
    assert result.end.ids() == [1, 2, *result.tokens]


def test_ticket_that_is_done_cannot_be_cancelled(make: MakeRig) -> None:
    rig = make()
    item = run(rig.place([1]), max_tokens=1)
    (ticket,) = rig.submit(item)
    ticket.cancel()  # on its way when the step answers the run
    ticket.resolve(error=Boom("first"))
    rig.step()
    with pytest.raises(Boom, match="first"):
        ticket.result()


def test_run_cancelled_in_the_queue_has_no_tokens(make: MakeRig) -> None:
    rig = make(capacity=6)
    first, second = run(rig.place([1, 2, 3])), run(rig.place([4, 5, 6, 7]))
    tickets = rig.submit(first, second)
    rig.step()
    assert len(rig.scheduler.queues.waiting) == 1
    tickets[1].cancel("interrupted")
    rig.step()
    result = tickets[1].result()
    assert (result.tokens, result.finish_reason) == ([], "interrupted")
    assert result.end.ids() == [4, 5, 6, 7]


def test_preempted_run_that_is_cancelled_keeps_its_tokens(make: MakeRig) -> None:
    rig = make(capacity=12)
    items = [run(rig.place([i + 1]), i, max_tokens=9) for i in range(2)]
    tickets = rig.submit(*items)
    while not rig.scheduler.counters.preempted:
        rig.step()
    tickets[1].cancel()
    rig.step()
    result = tickets[1].result()
    assert 0 < len(result.tokens) < 9
    assert result.end.ids() == [2, *result.tokens]
    rig.driver.drive(tickets)
    assert_result(rig, items[0], tickets[0].result())


def test_one_cancelled_extend_of_an_atomic_call_cancels_all(make: MakeRig) -> None:
    rig = make(n_batch=2)
    tickets = rig.submit(*(Extend(rig.place([i, 2, 3])) for i in range(3)), atomic=True)
    rig.step()
    tickets[2].cancel()
    rig.driver.drive(tickets)
    for ticket in tickets:
        with pytest.raises(Cancelled, match="before it was done"):
            ticket.result()


def test_failing_step_after_its_work_was_cancelled_changes_nothing(make: MakeRig) -> None:
    rig = make(LateFake(MemoryEngine(), {0}))
    (ticket,) = rig.submit(Extend(rig.place([1, 2]), (), (Logits(2),)))
    rig.step()
    assert rig.scheduler.in_flight is not None
    ticket.cancel()
    rig.step(2)
    with pytest.raises(Cancelled):
        ticket.result()
    assert rig.ask([1, 2], Logits(2))[0].tolist() == logits_after([1, 2]).tolist()


def test_interrupt_inside_a_forward_fails_its_tickets_and_is_raised(make: MakeRig) -> None:
    rig = make(Raising(MemoryEngine(), KeyboardInterrupt()))
    (ticket,) = rig.submit(Extend(rig.place([1])))
    with pytest.raises(KeyboardInterrupt):
        rig.driver.drive([ticket])
    with pytest.raises(ForwardError, match="KeyboardInterrupt"):
        ticket.result()
    assert rig.ask([1], Logits(1))[0].tolist() == logits_after([1]).tolist()


def test_error_raised_by_an_engine_reaches_the_ticket_unchanged(make: MakeRig) -> None:
    error = ForwardError("the device is gone")
    rig = make(Raising(MemoryEngine(), error))
    (ticket,) = rig.submit(Extend(rig.place([1])))
    rig.driver.drive([ticket])
    assert ticket.error is error
    other = as_forward_error(ValueError("no"))
    assert isinstance(other.__cause__, ValueError)


def test_failed_read_of_a_hidden_engine_leaves_nothing_pinned(make: MakeRig) -> None:
    rig = make(BrokenEngine(HiddenFake(MemoryEngine()), {0}))
    (ticket,) = rig.submit(Extend(rig.place([1, 2]), (), (Logits(2),)))
    rig.driver.drive([ticket])
    with pytest.raises(ForwardError, match="Boom"):
        ticket.result()
    assert rig.ask([1, 2], Logits(2))[0].tolist() == logits_after([1, 2]).tolist()


def test_each_adapter_has_its_own_forward_and_its_own_kv(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine)
    items: list[Run] = []
    for name in (None, "law", "law"):
        items.append(run(rig.place([1, 2], namespace=name), len(items), max_tokens=4))
    extend = Extend(rig.place([1, 2, 3], namespace="law"), (), (Logits(3),))
    *results, answers = rig.drive(*items, extend)
    for item, result in zip(items, results, strict=True):
        assert_result(rig, item, result)
        assert result.end.namespace == item.place.namespace
    assert answers[0].tolist() == logits_after([1, 2, 3]).tolist()
    assert all(len(names) == 1 for names in engine.adapters)
    assert {name for names in engine.adapters for name in names} == {None, "law"}
    assert engine.sizes[:2] == [2, 3] or engine.sizes[:2] == [2, 2]
    assert rig.scheduler.counters.prefilled == 2 + 3


def test_launch_that_fails_half_way_waits_for_the_launched_half(
    make: MakeRig,
) -> None:
    """The second adapter's forward raises while the first one's still runs on the device."""
    engine = LateFake(BrokenEngine(MemoryEngine(), {1}))
    rig = make(engine)
    tickets = rig.submit(*(Extend(rig.place([1, 2], namespace=name)) for name in (None, "law")))
    rig.driver.drive(tickets)
    for ticket in tickets:
        with pytest.raises(ForwardError, match="forward 1"):
            ticket.result()
    assert not engine.outstanding
    assert rig.ask([1, 2], Logits(2))[0].tolist() == logits_after([1, 2]).tolist()


def test_close_fails_waiting_work_and_work_in_flight(make: MakeRig) -> None:
    rig = make(LateFake(MemoryEngine()), capacity=5)
    tickets = rig.submit(
        Extend(rig.place([1, 2, 3]), (), (Logits(3),)), Extend(rig.place([4, 5, 6]))
    )
    (live,) = rig.submit(run(rig.place([7, 8, 9])))
    rig.step()
    assert rig.scheduler.in_flight is not None
    rig.driver.close()
    assert tickets[0].result()[0].tolist() == logits_after([1, 2, 3]).tolist()
    for ticket in (tickets[1], live):
        with pytest.raises(Cancelled, match="closed"):
            ticket.result()
    assert rig.scheduler.is_idle


def test_single_run_that_outgrows_the_capacity_raises_kv_full(make: MakeRig) -> None:
    rig = make(capacity=5)
    (ticket,) = rig.submit(run(rig.place([1, 2]), max_tokens=30))
    rig.driver.drive([ticket])
    with pytest.raises(KVFull, match="this path of 6 tokens cannot fit") as caught:
        ticket.result()
    assert (caught.value.needed, caught.value.capacity) == (6, 5)
