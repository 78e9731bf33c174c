from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run
from weft._core.kv.place import Place
from weft._core.sched import driver as driver_module
from weft._core.sched.driver import Channel
from weft._core.sched.loop_bridge import MAX_PER_PASS, EventLoopBridge, Waiter
from weft._core.sched.work import Extend, FinishReason, Logits, RunState
from weft.errors import Cancelled, ConfigError, StaleHandle


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "IDLE_S", 0.02)


async def answer(rig: Rig, item: Any) -> Any:
    tickets = await rig.driver.asubmit([item])
    await rig.driver.adrive(tickets)
    return tickets[0].result()


def logits_item(rig: Rig, ids: list[int]) -> Extend:
    return Extend(rig.place(ids), (), (Logits(len(ids)),))


def test_calls_submitted_in_one_loop_pass_run_in_one_step(make: MakeRig) -> None:
    """Some callers are a pass or two behind the first: they are waited for, without a timer."""
    engine = MemoryEngine()
    rig = make(engine, n_batch=64)

    async def one(i: int) -> list[float]:
        if i % 2:
            await asyncio.sleep(0)
        logits: list[float] = (await answer(rig, logits_item(rig, [i, i])))[0].tolist()
        return logits

    async def all_of() -> list[list[float]]:
        return await asyncio.gather(*(one(i) for i in range(8)))

    assert asyncio.run(all_of()) == [logits_after([i, i]).tolist() for i in range(8)]
    assert engine.sizes == [16]


def test_gathered_calls_run_in_one_step(make: MakeRig) -> None:
    """The thread is there and awake while eight callers enter one by one."""
    engine = MemoryEngine()
    rig = make(engine, n_batch=64)
    submit = rig.driver.submit

    def slow(*args: Any, **options: Any) -> Any:
        tickets = submit(*args, **options)
        time.sleep(0.005)
        return tickets

    rig.driver.submit = slow  # type: ignore[method-assign]

    async def all_of() -> None:
        await asyncio.gather(*(answer(rig, logits_item(rig, [i, i])) for i in range(8)))

    asyncio.run(all_of())
    assert engine.sizes == [16]


def test_failed_submission_raises_in_its_own_caller_only(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1])

    async def main() -> list[Any]:
        bad = rig.driver.asubmit([run(place)], atomic=True)
        good = answer(rig, run(place, max_tokens=2))
        return await asyncio.gather(bad, good, return_exceptions=True)

    error, result = asyncio.run(main())
    assert isinstance(error, ConfigError)
    assert len(result.tokens) == 2


def test_task_cancelled_before_its_work_enters_leaves_no_work(make: MakeRig) -> None:
    """Before its work entered, and right after that; nothing goes on before all are cancelled."""
    rig = make()
    proceed = threading.Event()

    def sink(state: RunState) -> FinishReason | None:
        proceed.wait()
        return None

    item = run(rig.place([1]), max_tokens=40, stop_ids=frozenset(), sink=sink)

    async def main(n_passes: int) -> None:
        task = asyncio.create_task(answer(rig, item))
        for _ in range(n_passes):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for n_passes in (1, 2, 3):
        asyncio.run(main(n_passes))
    proceed.set()
    while not rig.scheduler.is_idle:
        time.sleep(0.001)
    assert rig.scheduler.counters.decoded <= 4  # of two runs that had begun


def test_two_loops_in_two_threads_get_their_own_answers(make: MakeRig) -> None:
    rig = make()
    got: dict[int, list[float]] = {}

    def work(first: int) -> None:
        async def several() -> None:
            for i in range(first, first + 4):
                got[i] = (await answer(rig, logits_item(rig, [1, i])))[0].tolist()

        asyncio.run(several())

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: logits_after([1, i]).tolist() for i in range(12)}


def test_new_event_loops_during_delivery_of_results_break_nothing(make: MakeRig) -> None:
    """The table of loops is read by one thread and grown by others, switched as often as can be."""
    rig = make(n_batch=1)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for j in range(6):
                asyncio.run(answer(rig, logits_item(rig, [i, j])))
        except BaseException as error:
            failures.append(error)

    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not failures
    assert rig.driver._thread is not None
    assert rig.driver._thread.is_alive()


def test_table_of_loops_is_read_under_the_lock_that_guards_its_growth(make: MakeRig) -> None:
    rig = make()

    class Watched(dict[Any, Any]):
        def items(self) -> Any:
            assert rig.driver._changed._is_owned()  # type: ignore[attr-defined]
            return super().items()

        def __setitem__(self, key: Any, value: Any) -> None:
            assert rig.driver._changed._is_owned()  # type: ignore[attr-defined]
            super().__setitem__(key, value)

    rig.driver._loops = Watched()  # type: ignore[assignment]
    asyncio.run(answer(rig, logits_item(rig, [1])))
    assert len(rig.driver._loops) == 1


def test_cancelling_a_task_cancels_its_tickets(make: MakeRig) -> None:
    rig = make()
    proceed = threading.Event()

    def sink(state: RunState) -> FinishReason | None:
        proceed.wait()
        return None

    async def main() -> Any:
        tickets = await rig.driver.asubmit([run(rig.place([1]), sink=sink, max_tokens=50)])
        task = asyncio.create_task(rig.driver.adrive(tickets))
        for _ in range(3):  # it waits by then
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proceed.set()
        await rig.driver.adrive(tickets)
        return tickets[0].result()

    result = asyncio.run(main())
    assert result.finish_reason == "cancelled"
    assert result.end.ids() == [1, *result.tokens]


def test_apump_yields_what_pump_yields(make: MakeRig) -> None:
    rig = make()
    channel = Channel()

    def sink(state: RunState) -> FinishReason | None:
        channel.put(state.tokens[-1])
        return None

    async def main() -> tuple[list[int], Any]:
        tickets = await rig.driver.asubmit([item])
        heard = [token async for part in rig.driver.apump(channel, tickets) for token in part]
        return heard, tickets[0].result()

    item = run(rig.place([1]), sink=sink)
    heard, result = asyncio.run(main())
    assert heard == result.tokens
    assert_result(rig, item, result)


def test_waiting_for_what_is_done_returns_at_once(make: MakeRig) -> None:
    rig = make()

    async def main() -> None:
        tickets = await rig.driver.asubmit([logits_item(rig, [1])])
        await rig.driver.adrive(tickets)
        n_steps = rig.scheduler.counters.steps
        await rig.driver.adrive(tickets)
        assert rig.driver.when_done(tickets).done()
        assert rig.scheduler.counters.steps == n_steps
        assert tickets[0].done

    asyncio.run(main())


def test_closed_driver_rejects_async_work_and_cancels_waiting_tasks(make: MakeRig) -> None:
    rig = make()
    inside, proceed = threading.Event(), threading.Event()

    def sink(state: RunState) -> FinishReason | None:
        inside.set()
        proceed.wait()
        return None

    async def main() -> None:
        tickets = await rig.driver.asubmit([run(rig.place([1]), sink=sink, max_tokens=50)])
        waiting = asyncio.create_task(rig.driver.adrive(tickets))
        await asyncio.to_thread(inside.wait)
        closing = asyncio.create_task(asyncio.to_thread(rig.driver.close))
        while not rig.driver.closed:
            await asyncio.sleep(0)
        proceed.set()
        await waiting
        await closing
        with pytest.raises(Cancelled):
            tickets[0].result()
        with pytest.raises(StaleHandle):
            await rig.driver.asubmit([logits_item(rig, [2])])

    asyncio.run(main())


def test_flush_of_a_closed_loop_sets_no_future() -> None:
    loop = asyncio.new_event_loop()
    bridge = EventLoopBridge(list.clear)
    waiter = Waiter(bridge, loop)
    loop.close()
    waiter.wake()
    bridge.flush(loop)
    bridge.flush(loop)
    assert not waiter.future.done()


def test_flush_sets_only_futures_that_still_wait() -> None:
    bridge = EventLoopBridge(list.clear)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gone, waiting = Waiter(bridge, loop), Waiter(bridge, loop)
        gone.future.cancel()
        gone.wake()
        waiting.wake()
        bridge.flush(loop)
        await waiting.future
        assert gone.future.cancelled()

    asyncio.run(main())


def test_many_calls_start_in_several_loop_passes_and_run_in_one_step(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=4096)
    n, passes = 5 * MAX_PER_PASS + 3, list[int]()

    async def one(i: int, began: list[int]) -> float:
        if (turn := rig.driver.start_call()) is not None:
            await turn
        began[-1] += 1
        logits = (await answer(rig, logits_item(rig, [i % 7, i % 11, i % 13])))[0]
        return float(logits[0])

    async def main() -> list[float]:
        tasks = [asyncio.create_task(one(i, passes)) for i in range(n)]
        passes.append(0)
        while sum(passes) < n:
            await asyncio.sleep(0)
            passes.append(0)
        return await asyncio.gather(*tasks)

    values = asyncio.run(main())
    assert values == [float(logits_after([i % 7, i % 11, i % 13])[0]) for i in range(n)]
    assert max(passes) <= MAX_PER_PASS
    assert len(engine.sizes) <= 3  # a node that others pass is computed before them


def test_call_cancelled_before_its_turn_takes_no_turn(make: MakeRig) -> None:
    rig = make()

    async def begin() -> None:
        if (turn := rig.driver.start_call()) is not None:
            await turn

    async def main() -> int:
        tasks = [asyncio.create_task(begin()) for _ in range(3 * MAX_PER_PASS)]
        await asyncio.sleep(0)
        for task in tasks[MAX_PER_PASS : 2 * MAX_PER_PASS]:
            task.cancel()
        for n_passes in range(100):
            if all(task.done() for task in tasks):
                return n_passes
            await asyncio.sleep(0)
        raise AssertionError("some never got their turn")

    assert asyncio.run(main()) < 10


def test_event_loop_never_waits_for_the_schedulers_lock(make: MakeRig) -> None:
    rig = make()
    locked, proceed = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.scheduler.lock:
            locked.set()
            proceed.wait()

    async def main() -> list[Any]:
        holder = threading.Thread(target=hold)
        holder.start()
        await asyncio.to_thread(locked.wait)
        tasks = [asyncio.create_task(answer(rig, logits_item(rig, [1, i]))) for i in range(4)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        proceed.set()
        return await asyncio.gather(*tasks)

    assert [row[0].tolist() for row in asyncio.run(main())] == [
        logits_after([1, i]).tolist() for i in range(4)
    ]


def test_work_that_ends_between_steps_is_reported_to_its_loop(make: MakeRig) -> None:
    """Its namespace is dropped while it waits; no step follows that could report it."""
    rig = make()
    item = Extend(Place(rig.tree.holds, "adapter", None, [1, 2]), (), (Logits(2),))

    async def main() -> None:
        await answer(rig, logits_item(rig, [1]))  # the thread is there, and idle
        tickets, jobs = rig.scheduler.prepare([item])
        waiting = asyncio.create_task(rig.driver.adrive(tickets))
        await asyncio.sleep(0)

        def end() -> None:
            rig.scheduler.enqueue(jobs)
            rig.scheduler.drop_namespace("adapter", "it is gone")

        await asyncio.to_thread(rig.driver.exclusive, end)
        await waiting
        with pytest.raises(StaleHandle, match="it is gone"):
            tickets[0].result()

    asyncio.run(main())


def test_work_that_enters_a_driver_closed_meanwhile_raises(make: MakeRig) -> None:
    rig = make()

    async def main() -> None:
        tickets = await rig.driver.asubmit([logits_item(rig, [1, 2])])
        rig.driver.close()  # before the pass of the loop is over that hands it over
        await rig.driver.adrive(tickets)
        with pytest.raises((Cancelled, StaleHandle)):
            tickets[0].result()

    asyncio.run(main())


def test_driver_closed_when_a_wait_starts_ends_the_wait(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    start = rig.driver.start

    async def main() -> None:
        tickets = await rig.driver.asubmit([run(rig.place([1, 2]), max_tokens=50)])

        def start_and_close() -> None:
            start()
            rig.driver.close()

        monkeypatch.setattr(rig.driver, "start", start_and_close)
        await rig.driver.adrive(tickets)
        assert tickets[0].done

    asyncio.run(main())
