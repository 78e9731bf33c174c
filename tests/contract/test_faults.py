"""A forward that fails: its tickets fail, nothing half-made stays, the next call works."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from contract.conftest import Make
from contract.helpers import logits_at, prompt_ids, run_all, run_item
from fakes import Boom, BrokenEngine, LateFake
from weft._core.sched.work import Extend, Logits
from weft.engines.base import Engine, Output, Row
from weft.errors import Cancelled, ForwardError, StaleHandle, WeftError


def broken(*numbers: int) -> Callable[[Engine], Engine]:
    return lambda engine: BrokenEngine(engine, set(numbers))


def test_failing_prefill_fails_its_tickets_and_the_next_call_works(make: Make) -> None:
    lm = make("numpy", broken(0))
    ids = prompt_ids(lm)
    tickets = lm.submit([Extend(lm.place(ids), (), (Logits(len(ids)),)) for _ in range(2)])
    lm.drive(tickets)
    for ticket in tickets:
        with pytest.raises(ForwardError, match="Boom: forward 0") as caught:
            ticket.result()
        assert isinstance(caught.value.__cause__, Boom)
    del tickets, ticket, caught
    gc.collect()  # a raised error and its frame are a cycle
    lm.tree.drain_released()
    lm.tree.check()
    assert (lm.tree.n_nodes, lm.tree.budget.unevictable, lm.stats().kv_tokens) == (0, 0, 0)
    assert logits_at(lm, ids).shape == (lm.info.n_vocab,)


@pytest.mark.parametrize("number", [1, 4])
def test_failing_decode_step_fails_its_runs_only(make: Make, number: int) -> None:
    lm = make("numpy", broken(number))
    place = lm.place(prompt_ids(lm))
    tickets = lm.submit([run_item(lm, place, 1, i) for i in range(3)])
    lm.drive(tickets)
    for ticket in tickets:
        with pytest.raises(ForwardError, match=f"forward {number}"):
            ticket.result()
    lm.tree.check()
    assert lm.tree.budget.unevictable == 0
    assert len(run_all(lm, [run_item(lm, place, 1, max_tokens=4)])[0].tokens) == 4


@pytest.mark.parametrize("number", range(6))
def test_late_failure_of_a_step_fails_the_step_launched_after_it(make: Make, number: int) -> None:
    lm = make("numpy", lambda engine: LateFake(engine, {number}))
    place = lm.place(prompt_ids(lm))
    tickets = lm.submit([run_item(lm, place, 1, i, stop_ids=frozenset()) for i in range(3)])
    lm.drive(tickets)
    for ticket in tickets:
        with pytest.raises(ForwardError, match="Boom"):
            ticket.result()
    lm.tree.check()
    assert lm.tree.budget.unevictable == 0
    engine = lm.engine
    assert isinstance(engine, LateFake)
    assert not engine.outstanding
    (result,) = run_all(lm, [run_item(lm, place, 1, max_tokens=4)])
    assert len(result.tokens) == 4


def test_steps_do_overlap(make: Make) -> None:
    lm = make("late")
    engine = lm.engine
    assert isinstance(engine, LateFake)
    place = lm.place(prompt_ids(lm))
    run_all(lm, [run_item(lm, place, 1, i, stop_ids=frozenset()) for i in range(3)])
    assert engine.n_overlapped >= 12
    lm.tree.check()


def test_failing_sink_fails_its_own_run_only(kind: str, make: Make) -> None:
    lm = make(kind)
    place = lm.place(prompt_ids(lm))

    def sink(state: object) -> None:
        raise Boom("sink")

    bad, good = lm.submit([run_item(lm, place, 1, 0, sink=sink), run_item(lm, place, 1, 1)])
    lm.drive([bad, good])
    with pytest.raises(Boom, match="sink"):
        bad.result()
    assert good.result().tokens


def test_cancelled_extends_raise_and_leave_nothing_pinned(kind: str, make: Make) -> None:
    lm = make(kind, n_batch=4)
    ids = prompt_ids(lm)
    one, two = lm.submit([Extend(lm.place(ids), (), (Logits(len(ids)),)) for _ in range(2)])
    if lm.tree.fragments is not None:  # a hidden engine would be done by then
        lm.scheduler.step()
    one.cancel()
    lm.drive([one, two])
    with pytest.raises(Cancelled):
        one.result()
    assert two.result()[0].shape == (lm.info.n_vocab,)
    assert lm.tree.budget.unevictable == 0


def test_ctrl_c_keeps_generated_tokens(make: Make) -> None:
    import signal

    lm = make("numpy")
    place = lm.place(prompt_ids(lm))
    n_tokens = 0

    def sink(state: object) -> None:
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens == 6:
            signal.raise_signal(signal.SIGINT)

    tickets = lm.submit([run_item(lm, place, 1, i, sink=sink, max_tokens=50) for i in range(2)])
    with pytest.raises(KeyboardInterrupt):
        lm.drive(tickets)
    for ticket in tickets:
        result = ticket.result()
        assert result.finish_reason == "interrupted"
        assert len(result.tokens) == 3
    lm.tree.check()
    assert lm.tree.budget.unevictable == 0
    assert run_all(lm, [run_item(lm, place, 1, max_tokens=3)])[0].tokens


def test_step_that_fails_at_launch_is_waited_for(make: Make) -> None:
    """Its forward runs on although its draws failed: its fragments may not go before it."""

    class BadDraw(LateFake):
        def forward(self, rows: Sequence[Row]) -> Output:
            output = super().forward(rows)
            if len(self.calls) == 4:
                monkey.setattr(output, "draw", no_draw)
            return output

    def no_draw(batch: object) -> None:
        raise Boom("draw")

    with pytest.MonkeyPatch.context() as monkey:
        lm = make("numpy", BadDraw)
        place = lm.place(prompt_ids(lm))
        tickets = lm.submit([run_item(lm, place, 1, i, stop_ids=frozenset()) for i in range(3)])
        lm.drive(tickets)
        for ticket in tickets:
            with pytest.raises(ForwardError, match="Boom: draw"):
                ticket.result()
    lm.tree.check()
    assert lm.tree.budget.unevictable == 0
    assert len(run_all(lm, [run_item(lm, place, 1, max_tokens=4)])[0].tokens) == 4


def test_cancelled_run_releases_its_tokens_without_a_step(make: Make) -> None:
    lm = make("numpy")
    tickets = lm.submit([run_item(lm, lm.place(prompt_ids(lm)), 1)])
    for _ in range(3):
        lm.scheduler.step()
    tickets[0].cancel()
    lm.clear_cache()
    assert len(tickets[0].result().tokens) == 3
    del tickets
    gc.collect()
    lm.tree.drain_released()
    assert lm.tree.n_nodes == 0


@pytest.mark.parametrize("own_thread", [False, True])
@pytest.mark.parametrize("what", ["drive", "clear_cache", "close"])
def test_sink_that_waits_for_its_lm_raises(make: Make, what: str, own_thread: bool) -> None:
    lm = make("numpy")
    ids = prompt_ids(lm)

    def sink(state: object) -> None:
        if what == "drive":
            lm.drive(lm.submit([Extend(lm.place([*ids, 5]))]))
        else:
            getattr(lm, what)()

    if own_thread:
        lm.driver.start()
    (ticket,) = lm.submit([run_item(lm, lm.place(ids), 1, sink=sink)])
    lm.drive([ticket])
    with pytest.raises(RuntimeError, match="must not wait for the LM that calls it"):
        ticket.result()
    assert not lm.closed


def test_system_exit_in_an_engine_does_not_end_the_driver_thread(make: Make) -> None:
    class Exits(BrokenEngine):
        def forward(self, rows: Sequence[Row]) -> Output:
            if not self.calls:
                self.calls.append([])
                raise SystemExit(3)
            return super().forward(rows)

    lm = make("numpy", lambda engine: Exits(engine, set()))
    lm.driver.start()
    (ticket,) = lm.submit([Extend(lm.place(prompt_ids(lm)))])
    lm.drive([ticket])
    with pytest.raises(ForwardError, match="SystemExit"):
        ticket.result()
    assert logits_at(lm, prompt_ids(lm)).shape == (lm.info.n_vocab,)


def test_error_of_the_driver_thread_wakes_all_callers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> None:
        raise Boom("plan")

    def recover(error: BaseException) -> None:
        raise error

    lm = make("numpy")
    with monkeypatch.context() as broken:
        broken.setattr(lm.scheduler, "_schedule", plan)
        broken.setattr(lm.scheduler, "_recover", recover)
        lm.driver.start()
        (ticket,) = lm.submit([Extend(lm.place(prompt_ids(lm)))])
        lm.drive([ticket])

        async def later() -> None:
            await lm.adrive([ticket])
            with pytest.raises(StaleHandle):
                await lm.asubmit([])

        asyncio.run(later())
    with pytest.raises(WeftError, match="the scheduler failed: Boom: plan"):
        ticket.result()
    assert lm.closed
    lm.scheduler.close()


def test_no_step_runs_after_a_close(make: Make) -> None:
    lm = make("numpy")
    (ticket,) = lm.submit([Extend(lm.place(prompt_ids(lm)))])
    in_turn = lm.driver._in_turn

    def close_first(work: Callable[[], Any]) -> Any:
        lm.driver._in_turn = in_turn  # type: ignore[method-assign]
        lm.driver.close()
        lm.scheduler.submit([Extend(lm.tree.hold(lm.tree.root()), [5])])  # overtaken by the close
        return in_turn(work)

    lm.driver._in_turn = close_first  # type: ignore[method-assign, assignment]
    lm.drive([ticket])
    with pytest.raises(Cancelled):
        ticket.result()
    assert (lm.stats().steps, lm.tree.budget.unevictable) == (0, 0)
