"""Ctrl-C is handled between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rig import MakeRig, run
from weft._core.sched import driver as driver_module
from weft._core.sched.driver import deferred_interrupt
from weft._core.sched.work import FinishReason, RunState


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """Ctrl-C's handler, replaced by one that notes and raises."""
    before = signal.getsignal(signal.SIGINT)
    heard: list[int] = []

    def note(number: int, frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    yield heard
    assert signal.getsignal(signal.SIGINT) is note
    signal.signal(signal.SIGINT, before)


def interrupt_before(heard: list[int], then: Callable[[Callable[[], None]], None]) -> None:
    with deferred_interrupt() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        assert heard == []
        then(check)


def test_ctrl_c_waits_for_the_end_of_a_step(handler: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_before(handler, lambda check: check())
    assert handler == [signal.SIGINT]


def test_ctrl_c_in_the_last_step_is_raised_after_it(handler: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_before(handler, lambda check: None)
    assert handler == [signal.SIGINT]


def test_ctrl_c_in_nested_scopes_is_raised_once_by_the_outer(handler: list[int]) -> None:
    def nested(check: Callable[[], None]) -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
        assert handler == []

    with pytest.raises(KeyboardInterrupt):
        interrupt_before(handler, nested)
    assert handler == [signal.SIGINT]


def test_decorated_function_defers_ctrl_c_in_every_call(handler: list[int]) -> None:
    reached = []

    @deferred_interrupt()
    def work(depth: int, *, name: str) -> None:
        """Work."""
        if depth:
            work(depth - 1, name=name)
        else:
            signal.raise_signal(signal.SIGINT)
        reached.append((depth, len(handler), name))

    for calls in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            work(1, name="x")
        assert len(handler) == calls
    assert reached == [(0, 0, "x"), (1, 0, "x"), (0, 1, "x"), (1, 1, "x")]
    assert work.__doc__ == "Work."


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_handler_that_is_not_pythons_is_unchanged(ignored: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, ignored)
    try:
        with deferred_interrupt() as check:
            assert signal.getsignal(signal.SIGINT) is ignored
            check()
        assert signal.getsignal(signal.SIGINT) is ignored
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_touch_the_handler(handler: list[int]) -> None:
    handlers: list[object] = []

    def work() -> None:
        with deferred_interrupt() as check:
            check()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_ctrl_c_while_the_thread_steps_keeps_the_tokens_of_the_run(
    make: MakeRig, handler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed while the caller waits; the step that it falls in ends when the caller has heard."""
    monkeypatch.setattr(driver_module, "IDLE_S", 0.02)
    rig = make()
    rig.driver.start()
    inside, wait = threading.Event(), rig.driver._wait

    def waits(is_done: Callable[[], bool]) -> None:
        inside.set()
        wait(is_done)

    rig.driver._wait = waits  # type: ignore[method-assign]

    def sink(state: RunState) -> FinishReason | None:
        if len(state.tokens) == 4:
            assert inside.wait()
            signal.raise_signal(signal.SIGINT)
            while not tickets[0].cancelled:
                time.sleep(0.001)
        return None

    item = run(rig.place([1]), sink=sink, max_tokens=60, stop_ids=frozenset())
    tickets = rig.submit(item)
    with pytest.raises(KeyboardInterrupt):
        rig.driver.drive(tickets)
    result = tickets[0].result()
    assert result.finish_reason == "interrupted"
    assert len(result.tokens) == 4
    assert handler == [signal.SIGINT]


class Struck(threading.Condition):
    """Ctrl-C comes on the main thread just when it has taken the condition for time `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.n_left = at

    def __enter__(self) -> bool:
        taken = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            self.n_left -= 1
            if not self.n_left:
                signal.raise_signal(signal.SIGINT)
        return taken

    def is_free(self) -> bool:
        """Return True once the lock can be taken; called by another thread."""
        self.acquire()  # hangs if an interrupt has left it taken
        self.release()
        return True


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ctrl_c_in_a_waiting_caller_leaves_no_lock_taken(make: MakeRig, at: int) -> None:
    """The thread keeps stepping and answers the next call."""
    rig = make()
    news = rig.driver._changed = Struck(at)
    rig.driver._caller = 0  # another thread has called before
    with pytest.raises(KeyboardInterrupt):
        rig.drive(run(rig.place([1, 2]), 0, max_tokens=40))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(news.is_free).result()
    rig.drive(run(rig.place([1, 2]), 1))
