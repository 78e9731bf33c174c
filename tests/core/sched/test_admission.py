from __future__ import annotations

import pytest

from fakes import LateFake, SequenceFake
from rig import MakeRig, MemoryEngine, Rig, assert_result, run
from weft._core.sched.work import Commit, Extend, Logits
from weft.errors import KVFull


def ages(rig: Rig) -> list[int]:
    """Of the jobs that wait for admission, the one that comes next first."""
    return [age for age, job in sorted(rig.scheduler.queues.waiting) if not job.done]


def test_younger_job_does_not_overtake_a_waiting_one(make: MakeRig) -> None:
    rig = make(capacity=10, n_batch=2)
    paths = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13]]
    tickets = rig.submit(*(Extend(rig.place(path)) for path in paths))
    ended: list[int] = []
    for i, ticket in enumerate(tickets):
        ticket.on_done(lambda _, i=i: ended.append(i))
    rig.step()
    assert ages(rig) == [2, 3]
    rig.driver.drive(tickets)
    assert sorted(ended) == [0, 1, 2]
    assert ended[0] == 0


def test_preempted_job_returns_to_its_place_by_age(make: MakeRig) -> None:
    rig = make(capacity=14)
    items = [run(rig.place([i]), i, max_tokens=9) for i in range(3)]
    tickets = rig.submit(*items)
    while not rig.scheduler.counters.preempted:
        rig.step()
    late = run(rig.place([9]), 9, max_tokens=3)
    tickets += rig.submit(late)
    rig.step()
    assert len(ages(rig)) > 1
    rig.driver.drive(tickets)
    for item, ticket in zip([*items, late], tickets, strict=True):
        assert_result(rig, item, ticket.result())


def test_run_of_full_capacity_ends_after_an_extend_has_continued_its_prompt(make: MakeRig) -> None:
    """The extend's KV grows the prompt's node; the run must not keep it pinned."""
    rig = make(capacity=12, n_batch=4)
    prompt = rig.place([1, 2, 3, 4])
    long = run(prompt, max_tokens=8, temperature=0)
    tickets = rig.submit(long, Extend(prompt.fork(), [5, 6]))
    rig.driver.drive(tickets)
    assert_result(rig, long, tickets[0].result())


def test_commit_of_full_capacity_ends_after_an_extend_has_continued_its_path(make: MakeRig) -> None:
    """Two steps: an admitted commit must not keep the KV of the extend pinned."""
    rig = make(capacity=7, n_batch=3)
    path = rig.place([1, 2, 3, 4])
    owners = [Rig, MemoryEngine]
    sequences = [rig.scheduler.sequences.create(owner, path.fork()) for owner in owners]
    tickets = rig.submit(Commit(sequences, [5, 6], [None, None]), Extend(path.fork(), [7, 8]))
    rig.driver.drive(tickets)
    assert [len(ticket.result()) for ticket in tickets] == [2, 0]
    assert [sequence.end().ids() for sequence in sequences] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]


@pytest.mark.parametrize("growth", [1, 4])
def test_admitted_jobs_are_older_than_all_waiting_ones(make: MakeRig, growth: int) -> None:
    """Room for a run and a half: the oldest go on, and none is parked for a queued one."""
    engine = MemoryEngine()
    engine.kv.growth = growth
    rig = make(engine, capacity=13, n_batch=4)
    items = [run(rig.place([i, i]), i, max_tokens=9) for i in range(4)]
    tickets = rig.submit(*items)
    while not all(ticket.done for ticket in tickets):
        rig.step()
        admitted = [job.age for job in rig.scheduler.queues.admitted]
        queued = ages(rig)
        assert max(admitted, default=0) < min(queued, default=99)
        rig.tree.check()
    for item, ticket in zip(items, tickets, strict=True):
        assert_result(rig, item, ticket.result())
    assert rig.scheduler.counters.preempted > 0


def test_single_run_uses_the_last_slots_below_its_reservation(
    make: MakeRig,
) -> None:
    engine = MemoryEngine()
    engine.kv.growth = 4
    rig = make(engine, capacity=8)
    item = run(rig.place([1, 2]), max_tokens=7)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    (ticket,) = rig.submit(run(rig.place([1, 2]), max_tokens=8))
    rig.driver.drive([ticket])
    with pytest.raises(KVFull):
        ticket.result()


def test_path_that_can_never_fit_fails_and_the_next_job_is_admitted(make: MakeRig) -> None:
    rig = make(capacity=4)
    big, small = rig.submit(Extend(rig.place([1] * 5)), Extend(rig.place([2, 3])))
    rig.driver.drive([big, small])
    with pytest.raises(KVFull, match="this path of 5 tokens") as caught:
        big.result()
    assert (caught.value.needed, caught.value.capacity) == (5, 4)
    assert "kv_budget" in caught.value.hint
    assert small.result() == []


def test_job_that_needs_slots_of_others_waits_for_the_step_in_flight(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine, capacity=6)
    place = rig.place([1, 2, 3, 4])
    rig.drive(Extend(place))
    (first,) = rig.submit(Extend(rig.place([5])))
    rig.step()
    assert rig.scheduler.in_flight is not None
    (second,) = rig.submit(Extend(rig.place([6, 7, 8])))
    rig.driver.drive([first, second])
    assert second.result() == []
    assert rig.tree.n_evicted >= 2


def test_resident_paths_do_not_exceed_the_limit_of_the_engine(make: MakeRig) -> None:
    """The fake counts them before every forward."""
    rig = make(SequenceFake(MemoryEngine(), 3))
    items = [run(rig.place([i, 1, 2]), i) for i in range(6)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)


def test_evicted_path_is_loaded_from_the_host_without_a_forward(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, capacity=8, host_capacity=10)
    one, two = rig.place([1, 2, 3, 4, 5]), rig.place([6, 7, 8, 9, 10])
    rig.drive(Extend(one))
    rig.drive(Extend(two))
    engine.sizes = []
    rig.drive(Extend(one))
    assert engine.sizes == []
    assert rig.tree.n_evicted == 10


def test_idle_kv_above_its_limit_is_offloaded_and_not_recomputed(
    make: MakeRig,
) -> None:
    engine = MemoryEngine(idle_slots=4)
    rig = make(engine, capacity=20)
    one, two = rig.place([1, 2, 3, 4, 5]), rig.place([6, 7, 8, 9, 10])
    rig.drive(Extend(one))
    assert rig.tree.host.slots == 0
    rig.drive(Extend(two))
    assert (rig.tree.host.slots, rig.tree.budget.resident) == (5, 5)
    engine.sizes = []
    (ticket,) = rig.submit(Extend(one))
    rig.driver.drive([ticket])
    assert engine.sizes == []
    assert ticket.reused == 5


def test_idle_kv_on_device_and_host_does_not_exceed_the_capacity(make: MakeRig) -> None:
    rig = make(MemoryEngine(idle_slots=4), capacity=12)
    for first in range(1, 25, 4):
        rig.drive(Extend(rig.place([*range(first, first + 4)])))
        rig.drive(Extend(rig.place([first])))
    assert rig.tree.host.slots > 0
    assert rig.tree.host.slots + rig.tree.budget.used <= 12


def test_host_copies_are_freed_when_the_device_needs_their_slots(make: MakeRig) -> None:
    rig = make(MemoryEngine(idle_slots=4), capacity=12)
    for first in range(1, 13, 4):
        rig.drive(Extend(rig.place([*range(first, first + 4)])))
    long = rig.place([*range(30, 40)])
    rig.drive(Extend(long))
    rig.tree.pin_for(long, rig)
    rig.drive(Extend(rig.place([30])))
    assert rig.tree.host.slots + rig.tree.budget.used <= 12


def test_idle_kv_stays_on_the_device_for_engines_without_a_limit(make: MakeRig) -> None:
    rig = make(capacity=20)
    rig.drive(Extend(rig.place([1, 2, 3, 4, 5])))
    rig.drive(Extend(rig.place([6, 7, 8, 9, 10])))
    assert (rig.tree.host.slots, rig.tree.budget.resident) == (0, 10)


def test_length_of_a_path_includes_drawn_tokens_of_a_run(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1, 2])
    extend, drawing = rig.submit(Extend(place, [3]), run(rig.place([4], place), max_tokens=9))
    job, reading = drawing.job, extend.job
    reading.prepare(rig.tree)
    assert reading.longest_path() == job.longest_path() == 3
    rig.step(4)
    assert job.longest_path() == 3 + job.n_drawn > 3


def test_ticket_reports_how_many_tokens_were_reused(make: MakeRig) -> None:
    rig = make()
    first, longer = [1, 2, 3], [1, 2, 3, 4, 5]
    (ticket,) = rig.submit(Extend(rig.place(first)))
    assert ticket.reused is None
    rig.driver.drive([ticket])
    tickets = rig.submit(Extend(rig.place(longer)), run(rig.place(longer), 1, max_tokens=2))
    rig.driver.drive(tickets)
    assert [ticket.reused, *(each.reused for each in tickets)] == [0, 3, 5]


def test_ticket_of_an_engine_without_visible_kv_reports_no_reuse(make: MakeRig) -> None:
    rig = make(MemoryEngine(hidden=True))
    (ticket,) = rig.submit(Extend(rig.place([1, 2]), (), (Logits(2),)))
    rig.driver.drive([ticket])
    assert ticket.reused is None
