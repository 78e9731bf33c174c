from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fakes import LateFake
from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run
from weft._core.kv.place import MAX_BACKLOG
from weft._core.sched import driver as driver_module
from weft._core.sched.driver import Channel
from weft._core.sched.work import Extend, FinishReason, Logits, RunState, Ticket
from weft.engines.base import Output, Row
from weft.errors import Cancelled, ForwardError, StaleHandle, WeftError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "IDLE_S", 0.02)


class Threads(MemoryEngine):
    """Notes which threads it is called from."""

    def __init__(self, *, same_thread_only: bool = False) -> None:
        super().__init__(same_thread_only=same_thread_only)
        self.threads: set[int] = set()
        self.during: Callable[[], None] = lambda: None

    def forward(self, rows: list[Row]) -> Output:  # type: ignore[override]
        self.threads.add(threading.get_ident())
        self.during()
        return super().forward(rows)


def start_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join()
        assert not thread.is_alive()


def logits_item(rig: Rig, ids: list[int]) -> Extend:
    return Extend(rig.place(ids), (), (Logits(len(ids)),))


def in_a_fork(work: Callable[[], list[str]]) -> list[str]:
    """Run `work` in a fork of this process and return its result."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(300)  # ends a child that hangs
        try:
            os.write(writes, "\n".join(work()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return text.split("\n") if text else []


# Who steps ------------------------------------------------------------------------------------


def test_start_without_memory_for_a_thread_raises_and_the_next_one_succeeds(make: MakeRig) -> None:
    engine = Threads()
    rig = make(engine=engine)
    size = threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            rig.driver.start()
    finally:
        threading.stack_size(size)
    rig.driver.start()
    rig.drive(logits_item(rig, [1]))
    assert engine.threads.isdisjoint({threading.get_ident()})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_call_in_a_forked_process_raises_that_the_thread_is_of_its_parent(make: MakeRig) -> None:
    """The call would wait forever: no thread runs the step or releases the lock."""
    rig = make(engine=Threads())
    calls = [
        lambda: rig.driver.drive(rig.driver.submit([logits_item(rig, [1, 2, 3])])),
        lambda: rig.driver.exclusive(lambda: None),
    ]
    awaited_calls = [lambda: asyncio.run(rig.driver.asubmit([logits_item(rig, [1, 2, 3])]))]

    def errors() -> list[str]:
        messages = []
        for call in calls if rig.driver._thread is None else calls + awaited_calls:
            try:
                call()
            except StaleHandle as error:
                messages.append(str(error))
        return messages

    assert errors() == []
    assert in_a_fork(errors) == []  # without a thread a fork works like its parent
    rig.driver.start()
    assert errors() == []
    errors_of_fork = in_a_fork(errors)
    assert len(errors_of_fork) == 3
    assert all(f"by a thread of process {os.getpid()}" in each for each in errors_of_fork)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("has_thread", [False, True])
def test_fork_waits_for_the_step_of_another_thread(make: MakeRig, *, has_thread: bool) -> None:
    """Otherwise its locks stay locked in the other process, where close() hangs."""
    engine = Threads()
    rig, begun, forking = make(engine), threading.Event(), threading.Event()
    pause = rig.driver.before_fork

    def slow() -> None:
        begun.set()
        forking.wait()

    def pause_of_fork() -> None:
        forking.set()
        pause()

    engine.during = slow
    rig.driver.before_fork = pause_of_fork  # type: ignore[method-assign]
    if has_thread:
        rig.driver.start()
    thread = start_thread(lambda: rig.drive(logits_item(rig, [1, 2])))
    assert begun.wait()

    def closed() -> list[str]:
        engine.during = lambda: None
        states = [str(rig.driver._stepping.locked())]
        if not has_thread:
            rig.drive(logits_item(rig, [5, 6]))
        rig.driver.close()
        return [*states, str(rig.driver.closed)]

    assert in_a_fork(closed) == ["False", "True"]
    join(thread)
    rig.drive(logits_item(rig, [3]))  # no lock is taken in this process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_fork_during_a_step_that_does_not_end_soon_raises(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "MAX_EXIT_WAIT_S", 0.05)
    engine = Threads()
    rig, begun, proceed = make(engine), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        proceed.wait()

    engine.during = slow
    thread = start_thread(lambda: rig.drive(logits_item(rig, [1, 2])))
    assert begun.wait()

    def errors_of_calls() -> list[str]:
        messages = []
        for call in (
            lambda: rig.drive(logits_item(rig, [3])),
            lambda: rig.driver.exclusive(lambda: None),
            rig.driver.try_drain,
            lambda: messages.extend(in_a_fork(lambda: error_in_second_fork())),
            rig.driver.close,
        ):
            try:
                call()
            except StaleHandle as error:
                messages.append(str(error))
        return messages

    def error_in_second_fork() -> list[str]:
        with pytest.raises(StaleHandle) as caught:
            rig.drive(logits_item(rig, [3]))
        return [str(caught.value)]

    errors = in_a_fork(errors_of_calls)
    assert len(errors) == 3
    assert all("in the middle of a step" in each for each in errors)
    proceed.set()
    join(thread)


@pytest.mark.parametrize("has_thread", [False, True])
def test_exit_during_a_step_that_does_not_end_soon_stops_waiting(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, *, has_thread: bool
) -> None:
    monkeypatch.setattr(driver_module, "MAX_EXIT_WAIT_S", 0.05)
    engine = Threads()
    rig, begun, proceed = make(engine), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        proceed.wait()

    engine.during = slow
    if has_thread:
        rig.driver.start()
    thread = start_thread(lambda: rig.drive(logits_item(rig, [1, 2])))
    assert begun.wait()
    rig.driver.stop_at_exit()
    rig.driver.wait_for_inline_step()
    assert thread.is_alive()
    assert (rig.driver._thread is not None) == has_thread  # it may not be used without that thread
    proceed.set()
    join(thread)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_sink_may_fork(make: MakeRig) -> None:
    """The step belongs to the thread that forks, so the fork does not wait for it."""
    engine = Threads()
    rig = make(engine)
    results: list[list[str]] = []
    engine.during = lambda: results.append(in_a_fork(lambda: ["there"]))
    rig.drive(logits_item(rig, [1]))
    assert results == [["there"]]
    engine.during = lambda: None
    rig.drive(logits_item(rig, [2]))


def test_single_thread_steps_inline(make: MakeRig) -> None:
    engine = Threads()
    rig = make(engine)
    before = set(threading.enumerate())
    rig.drive(logits_item(rig, [1]))
    assert engine.threads == {threading.get_ident()}
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


def test_second_thread_moves_all_work_to_the_driver_thread(make: MakeRig) -> None:
    engine = Threads()
    rig = make(engine)
    rig.drive(logits_item(rig, [1]))
    join(start_thread(lambda: rig.drive(logits_item(rig, [2]))))
    engine.threads.clear()
    rig.drive(logits_item(rig, [3]))
    assert threading.get_ident() not in engine.threads
    assert len(engine.threads) == 1


def test_engine_that_wants_its_own_thread_is_called_from_one_only(make: MakeRig) -> None:
    engine = Threads(same_thread_only=True)
    rig = make(engine)
    join(*(start_thread(lambda i=i: rig.drive(logits_item(rig, [i]))) for i in range(3)))
    rig.drive(logits_item(rig, [7]))
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    assert {rig.driver.exclusive(threading.get_ident)} == engine.threads


def test_exclusive_work_on_an_engine_thread_raises_in_the_caller(
    make: MakeRig,
) -> None:
    rig = make(MemoryEngine(same_thread_only=True))
    with pytest.raises(ZeroDivisionError):
        rig.driver.exclusive(lambda: 1 / 0)
    rig.driver.close()
    with pytest.raises(StaleHandle, match="closed"):
        rig.driver.exclusive(lambda: None)


def test_two_threads_that_close_an_lm_with_its_own_thread_both_return(make: MakeRig) -> None:
    """The second one's errand comes when the thread has gone."""
    engine = Threads(same_thread_only=True)
    rig = make(engine)
    last: list[int] = []
    start = rig.driver.start

    def start_and_close() -> None:
        rig.driver.start = start  # type: ignore[method-assign]
        start()
        rig.driver.close(lambda: last.append(threading.get_ident()))

    rig.driver.start = start_and_close  # type: ignore[method-assign]
    rig.driver.close()
    assert rig.driver.closed
    assert len(last) == 1
    assert last[0] != threading.get_ident()


def test_caller_that_steps_lets_the_driver_thread_take_over_between_steps(make: MakeRig) -> None:
    engine = Threads()
    rig = make(engine)
    others: list[threading.Thread] = []

    def second_caller() -> None:
        if not others:
            others.append(start_thread(lambda: rig.drive(logits_item(rig, [5]))))
            while rig.driver._thread is None:
                time.sleep(0.001)

    engine.during = second_caller
    item = run(rig.place([1]), max_tokens=20)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    join(*others)
    assert len(engine.threads) == 2


class Reads:
    """A ticket that reports when a caller has read whether it is done."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.read = threading.Event()

    @property
    def done(self) -> bool:
        done = self.ticket.done
        self.read.set()
        return done


def test_caller_whose_work_ends_before_its_turn_runs_no_step(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, steps = make(), list[int]()
    monkeypatch.setattr(rig.scheduler, "step", lambda: steps.append(1))
    (ticket,) = rig.submit(Extend(rig.place([1, 2], namespace="law")))
    reads, callers = Reads(ticket), list[threading.Thread]()

    def drop() -> None:
        callers.append(start_thread(lambda: rig.driver.drive([reads])))  # type: ignore[list-item]
        reads.read.wait()  # that thread steps next
        rig.scheduler.drop_namespace("law", "law was removed")

    rig.driver.exclusive(drop)
    join(*callers)
    assert isinstance(ticket.error, StaleHandle)
    assert not steps


def test_awaited_work_done_in_another_threads_inline_step_is_delivered(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step starts the driver thread but does all work itself, so the thread has none."""
    rig = make(MemoryEngine())
    driver, step = rig.driver, rig.scheduler.step
    begun, entered = threading.Event(), threading.Event()
    other: list[threading.Thread] = []
    results: list[object] = []

    async def ask() -> None:
        tickets = await driver.asubmit([Extend(rig.place([4, 5]), (), (Logits(2),))])
        await driver.when_done(tickets)
        results.append(tickets[0].result())

    def stepping() -> None:
        if not begun.is_set():
            begun.set()  # before the other thread: its work may enter at once
            other.append(start_thread(lambda: asyncio.run(ask())))
            entered.wait()
        step()

    inner = rig.scheduler.enqueue

    def entering(jobs: list[Any]) -> None:
        inner(jobs)
        if begun.is_set() and jobs:
            entered.set()

    monkeypatch.setattr(rig.scheduler, "step", stepping)
    monkeypatch.setattr(rig.scheduler, "enqueue", entering)
    (ticket,) = driver.submit([Extend(rig.place([1, 2, 3]), (), (Logits(3),))])
    driver.drive([ticket])
    join(*other)
    assert len(results) == 1


def test_work_submitted_while_the_thread_sleeps_wakes_it(make: MakeRig) -> None:
    rig = make()
    rig.driver.start()
    rig.driver.start()
    done = threading.Event()
    (ticket,) = rig.submit(logits_item(rig, [1, 2]))
    ticket.on_done(lambda _: done.set())
    assert done.wait()
    assert ticket.result()[0].tolist() == logits_after([1, 2]).tolist()


# Sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["caller", "thread", "owner"])
@pytest.mark.parametrize("what", ["drive", "exclusive", "close"])
def test_sink_that_waits_for_its_own_lm_raises(make: MakeRig, what: str, who: str) -> None:
    """It would wait for ever for the step that it is part of."""
    rig = make(MemoryEngine(same_thread_only=who == "owner"))
    if who == "thread":
        rig.driver.start()

    def sink(state: RunState) -> FinishReason | None:
        if what == "drive":
            rig.drive(logits_item(rig, [3]))
        elif what == "exclusive":
            rig.driver.exclusive(lambda: None)
        else:
            rig.driver.close()
        return None

    good = run(rig.place([1]), 1)
    tickets = rig.submit(run(rig.place([1]), 0, sink=sink), good)
    rig.driver.drive(tickets)
    with pytest.raises(RuntimeError, match="must not wait"):
        tickets[0].result()
    assert_result(rig, good, tickets[1].result())
    assert not rig.driver.closed


def test_pump_yields_a_list_a_step_until_all_is_done(make: MakeRig) -> None:
    rig = make()
    channel = Channel()

    def sink(state: RunState) -> FinishReason | None:
        channel.put(state.tokens[-1])
        return None

    place = rig.place([1])
    tickets = rig.submit(*(run(place, i, temperature=0.5, sink=sink) for i in range(2)))
    heard = list(rig.driver.pump(channel, tickets))
    assert [len(events) for events in heard] == [2] * 6
    for i, ticket in enumerate(tickets):
        assert [events[i] for events in heard] == ticket.result().tokens
    assert channel.drain() == []


def test_leaving_a_pump_early_cancels_nothing(make: MakeRig) -> None:
    rig = make()
    channel = Channel()

    def sink(state: RunState) -> FinishReason | None:
        channel.put(state.tokens[-1])
        return None

    item = run(rig.place([1]), sink=sink)
    tickets = rig.submit(item)
    for _ in rig.driver.pump(channel, tickets):
        break
    rig.driver.drive(tickets)
    assert_result(rig, item, tickets[0].result())


# Exclusive ------------------------------------------------------------------------------------


def test_exclusive_work_runs_with_no_step_in_flight(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    item = run(rig.place([1]))
    tickets = rig.submit(item)
    rig.step(3)
    assert engine.outstanding
    assert rig.driver.exclusive(lambda: len(engine.outstanding)) == 0
    rig.driver.drive(tickets)
    assert_result(rig, item, tickets[0].result())


def test_exclusive_work_that_fails_lets_the_next_step_run(make: MakeRig) -> None:
    rig = make()
    with pytest.raises(ZeroDivisionError):
        rig.driver.exclusive(lambda: 1 / 0)
    assert rig.ask([1], Logits(1))[0].tolist() == logits_after([1]).tolist()


# The end --------------------------------------------------------------------------------------


def test_submit_to_a_closed_driver_raises_and_a_second_close_changes_nothing(make: MakeRig) -> None:
    rig = make()
    rig.driver.close()
    rig.driver.close()
    with pytest.raises(StaleHandle, match="closed"):
        rig.submit(logits_item(rig, [1]))
    rig.driver.start()
    assert rig.driver._thread is None


def test_close_ends_the_thread_and_cancels_its_work(make: MakeRig) -> None:
    rig = make()
    inside, proceed = threading.Event(), threading.Event()

    def sink(state: RunState) -> FinishReason | None:
        inside.set()
        assert proceed.wait()
        return None

    rig.driver.start()
    thread = rig.driver._thread
    assert thread is not None
    (ticket,) = rig.submit(run(rig.place([1]), sink=sink, max_tokens=30))
    assert inside.wait()
    closing = start_thread(rig.driver.close)
    proceed.set()
    join(closing, thread)
    with pytest.raises(Cancelled, match="closed"):
        ticket.result()


def test_wait_for_work_of_a_closed_lm_raises(make: MakeRig) -> None:
    rig, other = make(), make()
    rig.driver.start()
    foreign = other.submit(logits_item(other, [1]))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            rig.driver.drive(foreign)
        except StaleHandle as error:
            errors.append(error)

    inside, wait_of_driver = threading.Event(), rig.driver._wait

    def enter_wait(is_done: Callable[[], bool]) -> None:
        inside.set()
        wait_of_driver(is_done)

    rig.driver._wait = enter_wait  # type: ignore[method-assign]
    waiting = start_thread(wait)
    inside.wait()
    rig.driver.close()
    join(waiting)
    assert "closed while this waited" in str(errors[0])
    other.driver.drive(foreign)


def test_garbage_collected_lm_ends_its_thread() -> None:
    rig = Rig()
    rig.driver.start()
    thread = rig.driver._thread
    assert thread is not None
    rig.drive(logits_item(rig, [1]))
    del rig
    gc.collect()
    join(thread)


def test_lm_closed_while_its_thread_looks_for_work_ends_it(make: MakeRig) -> None:
    """Closed after a turn without work, before the thread sleeps."""
    rig = make()
    turn = rig.driver.run_once

    def last_turn() -> bool:
        worked = turn()
        rig.driver.closed = True
        return worked

    rig.driver.run_once = last_turn  # type: ignore[method-assign]
    rig.driver.start()
    assert rig.driver._thread is not None
    join(rig.driver._thread)
    rig.driver.closed = False


def test_work_submitted_before_the_thread_sleeps_is_done_at_once(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted after a turn without work: the thread checks for work before it sleeps."""
    monkeypatch.setattr(driver_module, "IDLE_S", 1e6)
    rig = make()
    turn, tickets = rig.driver.run_once, []

    def turn_then_work() -> bool:
        worked = turn()
        if not tickets:
            tickets.extend(rig.scheduler.submit([logits_item(rig, [1])]))  # wakes no thread
        return worked

    rig.driver.run_once = turn_then_work  # type: ignore[method-assign]
    rig.driver.start()
    while not (tickets and tickets[0].done):
        time.sleep(0.001)
    assert tickets[0].result()[0].tolist() == logits_after([1]).tolist()


def test_system_exit_in_a_step_fails_its_tickets_and_the_thread_continues(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    class Fatal(Threads):
        def forward(self, rows: list[Row]) -> Output:  # type: ignore[override]
            if not self.threads:
                self.threads.add(0)
                raise SystemExit("fatal")
            return super().forward(rows)

    rig = make(Fatal())
    rig.driver.start()
    (ticket,) = rig.drive_quietly(logits_item(rig, [1]))
    with pytest.raises(ForwardError, match="SystemExit: fatal"):
        ticket.result()
    assert rig.ask([2], Logits(1))[0].tolist() == logits_after([2]).tolist()
    assert "raised SystemExit" in caplog.text


def test_defect_that_ends_the_thread_fails_all_tickets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(n_batch=1)
    tickets = rig.submit(logits_item(rig, [1, 2, 3]), run(rig.place([4])))
    rig.step()

    def defect() -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(rig.scheduler, "step", defect)
    rig.driver.start()
    assert rig.driver._thread is not None
    join(rig.driver._thread)
    rig.driver.drive(tickets)
    for ticket in tickets:
        with pytest.raises(WeftError, match="LookupError: a defect"):
            ticket.result()
    assert "this LM is closed" in caplog.text
    with pytest.raises(StaleHandle):
        rig.submit(logits_item(rig, [1]))


def test_work_submitted_during_close_raises(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    submit = rig.scheduler.submit

    def late(*args: object, **options: object) -> object:
        rig.driver.close()
        return submit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.scheduler, "submit", late)
    with pytest.raises(StaleHandle, match="while this was submitted"):
        rig.submit(logits_item(rig, [1]))


def test_places_copied_and_dropped_without_a_step_do_not_accumulate(make: MakeRig) -> None:
    rig = make()
    rig.drive(Extend(rig.place([1, 2, 3])))
    place = rig.place([1, 2, 3])
    rig.drive(Extend(place))
    n_steps = rig.scheduler.counters.steps
    for i in range(3 * MAX_BACKLOG):
        place.fork() if i % 2 else place.at(2)
    assert len(rig.tree.holds.released) <= MAX_BACKLOG + 1
    assert len(rig.tree.holds.alive) <= MAX_BACKLOG + 8
    assert rig.scheduler.counters.steps == n_steps
    rig.tree.check()


def test_places_released_during_a_step_are_drained_after_it(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine)
    places = [rig.place([1, 2, n]) for n in range(3)]
    rig.drive(*(Extend(place) for place in places))
    forward, left = engine.forward, []

    def dropping(rows: Sequence[Row]) -> Output:
        places.clear()
        rig.driver.try_drain()
        left.append(rig.tree.holds.released)
        return forward(rows)

    engine.forward = dropping  # type: ignore[method-assign]
    rig.ask([1, 2, 3, 4], Logits(4))
    rig.driver.try_drain()
    assert left
    assert not rig.tree.holds.released


def test_place_may_outlive_the_driver() -> None:
    rig = Rig()
    relieve = rig.tree.holds.on_backlog
    assert relieve is not None
    rig.driver.close()
    rig.driver = None  # type: ignore[assignment]
    gc.collect()
    relieve()
