"""Runs the scheduler's steps: on the calling thread, or on one thread for the LM's lifetime."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its slow enums: a hot path
import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import wraps
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from ...errors import StaleHandle
from .jobs import Job
from .loop_bridge import EventLoopBridge, Waiter
from .scheduler import Scheduler
from .work import Item, Ticket

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Params = ParamSpec("Params")
IDLE_S = 0.5  # the driver thread checks this often whether its LM still exists
MAX_EXIT_WAIT_S = 30.0  # an exiting program waits at most this long for a model call


class Channel:
    """A thread-safe queue of events, from callbacks during steps to one reader.

    waiter: wakes the reader, if it is a task that awaits the next event; else None.
    """

    __slots__ = ("_events", "waiter")

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self.waiter: Waiter | None = None

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Any) -> None:
        """Add an event and wake the reader. Any thread may call it."""
        self._events.append(event)
        if self.waiter is not None:
            self.notify()

    def notify(self, _ticket: Ticket | None = None) -> None:
        """Wake the task that awaits the next event, if there is one. Any thread may call it."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.wake()

    def drain(self) -> list[Any]:
        """Remove and return all events."""
        take = self._events.popleft  # the only reader: other threads add events meanwhile
        return [take() for _ in range(len(self._events))]


class Driver:
    """Runs the scheduler's steps until the tickets of a call are done.

    While one thread uses the LM synchronously, that thread runs the steps: no extra thread, no
    context switch. One daemon thread takes over for good with the first async call, a second
    calling thread, or an engine that needs its own thread.

    A model call is never interrupted: Ctrl-C takes effect between steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.closed = False
        self._thread: threading.Thread | None = None
        self._thread_pid = 0  # the process of the thread
        self._created_pid = os.getpid()
        self._fork_locks: list[Any] = []  # locks acquired for a fork
        self._forked_mid_step = False  # this process was forked during another thread's step
        self._stops_at_exit = False
        self._caller: int | None = None
        self._stepping = threading.Lock()  # acquired by the thread that steps
        self._stepper: int | None = None  # the id of that thread
        self._changed = threading.Condition()  # new work, a finished step, or a close
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopBridge]
        self._loops = weakref.WeakKeyDictionary()
        self._last_loop: tuple[weakref.ref[asyncio.AbstractEventLoop], EventLoopBridge] | None = (
            None
        )
        scheduler.tree.holds.on_backlog = drain_callback(weakref.ref(self))
        _DRIVERS.add(self)

    # Sync -------------------------------------------------------------------------------------

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items; see `Scheduler.submit`. Raises: StaleHandle if the LM is closed."""
        self._check_not_forked()
        if self.closed:
            raise StaleHandle("this LM is closed; load it again")
        tickets = self.scheduler.submit(items, atomic=atomic)
        if self.closed:  # closed meanwhile: no step will follow
            raise StaleHandle("the LM was closed while this was submitted")
        if self._thread is not None:
            self._wake()
        return tickets

    def drive(self, tickets: Sequence[Ticket]) -> None:
        """Block until all tickets are done; step on this thread if it may.

        On Ctrl-C, cancel the tickets, wait until they are done, and raise KeyboardInterrupt.
        """
        try:
            self._step_until(lambda: _all_done(tickets))
        except KeyboardInterrupt:
            for ticket in tickets:
                ticket.cancel("interrupted")
            self._step_until(lambda: _all_done(tickets))
            raise

    def pump(self, channel: Channel, tickets: Sequence[Ticket]) -> Iterator[list[Any]]:
        """Yield the events of `channel`, one list per step, until all tickets are done.

        Closing the generator early cancels no ticket: the caller does that.
        """
        while True:
            events = channel.drain()
            if events:
                yield events
            elif _all_done(tickets):
                return
            else:
                self._step_until(lambda: bool(channel) or _all_done(tickets))

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        """Block until `is_done()` returns True.

        Steps on this thread if it may, else waits for the driver thread.
        """
        self._check_not_forked()
        self._check_not_nested()
        if not self._may_step_inline():
            self._wait(is_done)
            return

        def step() -> None:
            if not is_done():  # the LM may have been closed meanwhile
                self.scheduler.step()

        done = is_done()
        with deferred_interrupt() as check:
            while not done and self._thread is None:
                self._in_turn(step)
                done = is_done()
                check()
            if self._thread is not None:  # started meanwhile: waiting callers may be done already
                self._notify_all()
        if not done:
            self._wait(is_done)

    def exclusive(self, work: Callable[[], Result]) -> Result:
        """Call `work` between steps, under the lock and with nothing in flight; return its value.

        If the engine needs its own thread, the driver thread calls it.
        """
        self._check_not_forked()
        if self.scheduler.engine.info.same_thread_only:
            return self._call_on_driver_thread(lambda: self._run_between_steps(work))
        return self._run_between_steps(work)

    def _run_between_steps(self, work: Callable[[], Result]) -> Result:
        """Call `work` on this thread, while no step runs; return its value."""

        @deferred_interrupt()
        def finish_and_work() -> Result:
            self.scheduler.finish_in_flight()
            with self.scheduler.lock:
                self.scheduler.admission.pressure.relax()
                return work()

        value = self._in_turn(finish_and_work)
        self._flush_loops()
        return value

    def try_drain(self) -> None:
        """Release the holds of unreferenced places and close unreferenced sequences.

        Does nothing while a step is running, because every step does the same.
        """
        if self._forked_mid_step:
            return
        if not self.scheduler.engine.info.same_thread_only and self._stepping.acquire(
            blocking=False
        ):
            try:
                with self.scheduler.lock:
                    self.scheduler.sequences.close_released()
                    self.scheduler.tree.drain_released()
            finally:
                self._stepping.release()

    def _call_on_driver_thread(self, work: Callable[[], Result]) -> Result:
        """Let the driver thread call `work`; wait for it and return its value or raise its error.

        Raises: StaleHandle if the driver thread has ended.
        """
        if threading.current_thread() is self._thread:
            return work()
        self.start()
        future: Future[Result] = Future()
        self._tasks.append((future, work))
        self._wake()
        while True:
            is_gone = self._thread is None or not self._thread.is_alive()
            if future.done():
                return future.result()
            if is_gone:
                raise StaleHandle("this LM is closed; load it again")
            wait([future], IDLE_S)

    def _run_tasks(self) -> bool:
        """Run the functions queued by `_call_on_driver_thread`; return True if there were any."""
        any_run = bool(self._tasks)
        while self._tasks:
            future, work = self._tasks.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        return any_run

    def _in_turn(self, work: Callable[[], Result]) -> Result:
        """Call `work` while no other thread steps; return its value.

        While the program exits, threads that may not step any more block here forever.
        """
        self._check_not_nested()
        with self._stepping:
            if self._may_step_at_exit() or threading.current_thread() is self._thread:
                self._stepper = threading.get_ident()
                try:
                    return work()
                finally:
                    self._stepper = None
        _block_forever()

    def _may_step_at_exit(self) -> bool:
        """Return True if the program is not exiting, or this is the exiting thread."""
        if _exit_thread is None or self.scheduler.engine.info.same_thread_only:
            return True
        return _exit_thread == threading.get_ident()

    def _check_not_nested(self) -> None:
        """Raise an error if this thread is inside a step, in a callback."""
        if self._stepper == threading.get_ident():
            raise RuntimeError("a sink or callback must not wait for the LM that calls it")

    def _check_not_forked(self) -> None:
        """Raise StaleHandle in a process that was forked from the one with the driver thread.

        No thread would step here, and locks that the driver thread had acquired stay locked.
        """
        if self._forked_mid_step:
            raise StaleHandle(
                "this process was forked in the middle of a step of this LM in another thread; load"
                " the model in this process, which may be started by 'spawn'"
            )
        if self._thread is not None and os.getpid() != self._thread_pid:
            raise StaleHandle(
                f"this LM is run by a thread of process {self._thread_pid}, and this process was"
                " forked from it; load the model in this one, which may be started by 'spawn', or"
                " fork before the LM is first used from a second thread or with await"
            )

    def _may_step_inline(self) -> bool:
        """Return True if the calling thread may step; start the driver thread if it may not."""
        if self._thread is not None:
            return False
        me = threading.get_ident()
        if _exit_thread is not None and not self.scheduler.engine.info.same_thread_only:
            return True  # only the exiting thread steps now; others block in `_in_turn`
        with deferred_interrupt(), self._changed:
            if self._caller is None and not self.scheduler.engine.info.same_thread_only:
                self._caller = me
        if self._caller == me:
            return True
        self.start()
        return False

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Block until `is_done()` returns True, while the driver thread steps."""
        self._wake()
        # Ctrl-C between acquiring the condition and the `with` body would leave it locked.
        with deferred_interrupt() as check, self._changed:
            while not is_done():
                self._changed.wait(IDLE_S)
                check()
                if self.closed and not is_done():
                    raise StaleHandle("the LM was closed while this waited")

    # The thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the driver thread, if there is none; it ends with the LM."""
        if self._thread is not None or not self._may_step_at_exit():
            return
        with deferred_interrupt(), self._changed:
            if self._thread is None and not self.closed:
                name = f"weft-{self.scheduler.engine.info.name}"
                self._thread_pid = os.getpid()
                self._thread = threading.Thread(
                    target=run_thread,
                    args=(weakref.ref(self), self._changed),
                    name=name,
                    daemon=True,
                )
                try:
                    self._thread.start()
                except BaseException:  # out of memory: the next call tries again
                    self._thread = None
                    raise

    @property
    def should_stop(self) -> bool:
        """True if the driver thread has to end."""
        return self.closed or self._stops_at_exit

    def stop_at_exit(self) -> None:
        """End the driver thread between two steps, because the program exits.

        Otherwise Python would kill the thread inside a library, which aborts the process. Later
        work is stepped on the calling thread. An engine that needs its own thread keeps it.
        """
        thread = self._thread
        if (
            thread is None
            or self._thread_pid != os.getpid()
            or self.scheduler.engine.info.same_thread_only
        ):
            return
        self._stops_at_exit = True
        self._wake()
        thread.join(MAX_EXIT_WAIT_S)
        if not thread.is_alive():
            self._thread = self._caller = None
            self._stops_at_exit = False

    def wait_for_inline_step(self) -> None:
        """Wait until another calling thread has finished its step, because the program exits.

        Otherwise Python would kill that thread inside a library, which aborts the process.
        """
        is_mine = self._stepper == threading.get_ident() or self._created_pid != os.getpid()
        if not is_mine and self._stepping.acquire(timeout=MAX_EXIT_WAIT_S):
            self._stepping.release()

    def before_fork(self) -> None:
        """Acquire the driver's locks before a fork, so that no other thread is inside a step.

        The child process has only the forking thread: a lock of another thread would stay locked.
        """
        if self._forked_mid_step:
            return
        is_mine = self._stepper == threading.get_ident()
        for lock in (self._stepping, self.scheduler.lock, self._changed):
            if not (is_mine and lock is self._stepping) and lock.acquire(timeout=MAX_EXIT_WAIT_S):
                self._fork_locks.append(lock)

    def after_fork(self) -> None:
        """Release the locks after a fork, in the parent process."""
        while self._fork_locks:
            self._fork_locks.pop().release()

    def after_fork_in_child(self) -> None:
        """Release the locks in the child process; mark the LM unusable if a step was running."""
        is_mine = self._stepper == threading.get_ident()
        self._forked_mid_step = self._forked_mid_step or (
            not is_mine and self._stepping not in self._fork_locks
        )
        self.after_fork()

    def _close_scheduler(self, last: Callable[[], None] | None) -> None:
        """Fail unfinished work, drop all KV, and call `last`."""

        def close() -> None:
            self.closed = True
            self.scheduler.close()
            if last is not None:
                last()

        self._in_turn(close)

    def _wake(self) -> None:
        """Wake the driver thread."""
        with deferred_interrupt(), self._changed:
            self._changed.notify_all()

    def run_once(self) -> bool:
        """Run queued tasks, then one step if the scheduler has work.

        Called by the driver thread. Returns True if there was anything to do.
        """
        ran_tasks = self._run_tasks()
        if not self._in_turn(self._try_step):
            return ran_tasks
        self._notify_all()
        return True

    def _try_step(self) -> bool:
        """Run one step, whatever the engine raises; return False if the scheduler has no work."""
        if self.scheduler.is_idle:
            return False
        try:
            self.scheduler.step()
        except (KeyboardInterrupt, SystemExit):  # raised by the engine; the tickets have it
            _log.exception("the engine raised SystemExit; the step has failed")
        return True

    def _notify_all(self) -> None:
        """Wake everything that waits, in threads and in event loops."""
        self._wake()
        self._flush_loops()

    def _flush_loops(self) -> None:
        """Let all event loops wake their waiting tasks."""
        with self._changed:  # other threads add and remove their loops
            bridges = list(self._loops.items())
        for loop, bridge in bridges:
            bridge.flush(loop)

    def abort(self, error: BaseException) -> None:
        """Close the LM after an error outside steps: fail all tickets with it and wake callers."""
        _log.error("a step failed outside the model call; this LM is closed", exc_info=error)
        self.closed = True
        self.scheduler.abandon(error)
        self._notify_all()

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Stop stepping, fail unfinished work and drop all KV. Later calls do nothing.

        last: called at the end, on the thread that steps. None calls nothing.
        """
        if self.closed:
            return
        if self._forked_mid_step:  # the state is unusable, and no thread has to be joined
            self.closed = True
            return
        self._check_not_nested()
        owned = self.scheduler.engine.info.same_thread_only
        if owned:
            with suppress(StaleHandle):  # another thread closed it meanwhile
                self._call_on_driver_thread(lambda: self._close_scheduler(last))
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if not owned:
            self._close_scheduler(last)
        self._notify_all()

    # Async ------------------------------------------------------------------------------------

    def start_call(self) -> Awaitable[None] | None:
        """Return None if a call from an event loop may start now, else an awaitable to await first.

        It limits how many calls start in one iteration of the loop. The submissions of delayed
        calls still enter the same step.
        """
        loop = asyncio.get_running_loop()
        return self._bridge_of(loop).start_call(loop)

    async def asubmit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items from an event loop; return one ticket per item (see `Scheduler.submit`).

        All submissions of one loop iteration enter the same step.
        """
        self._check_not_forked()
        if self.closed:
            raise StaleHandle("this LM is closed; load it again")
        loop = asyncio.get_running_loop()
        self.start()
        tickets, jobs = self.scheduler.prepare(items, atomic=atomic)
        self._bridge_of(loop).submit(loop, jobs)
        return tickets

    def _enter(self, jobs: list[Job]) -> None:
        """Enqueue the jobs that an event loop has collected, and wake the driver thread."""
        self.scheduler.enqueue(jobs)
        if self.closed:  # closed meanwhile: no step will follow
            self.scheduler.abandon(StaleHandle("this LM was closed while this was submitted"))
            self._flush_loops()
        self._wake()

    async def adrive(self, tickets: Sequence[Ticket]) -> None:
        """Wait for tickets without blocking the loop; cancelling the task cancels them."""
        if not _all_done(tickets):
            loop = asyncio.get_running_loop()
            await self._wait_in_loop(Waiter(self._bridge_of(loop), loop, tickets), tickets)

    def when_done(self, tickets: Sequence[Ticket]) -> asyncio.Future[None]:
        """Return a future of the running loop that is set once all tickets are done."""
        loop = asyncio.get_running_loop()
        if _all_done(tickets):
            future = loop.create_future()
            future.set_result(None)
            return future
        return Waiter(self._bridge_of(loop), loop, tickets).future

    async def apump(self, channel: Channel, tickets: Sequence[Ticket]) -> AsyncIterator[list[Any]]:
        """Async form of `pump`."""
        loop = asyncio.get_running_loop()
        bridge = self._bridge_of(loop)
        for ticket in tickets:
            ticket.on_done(channel.notify)
        while True:
            events = channel.drain()
            if not events:
                waiter = channel.waiter = Waiter(bridge, loop)
                events = channel.drain()  # after the waiter is set: no event can be missed
            if events:
                yield events
            elif _all_done(tickets):
                return
            else:
                await self._wait_in_loop(waiter, tickets)

    async def _wait_in_loop(self, waiter: Waiter, tickets: Sequence[Ticket]) -> None:
        """Await a waiter; cancel the tickets if the task is cancelled."""
        self.start()
        if self.closed:  # no step will follow; `close` has resolved all tickets
            self._flush_loops()
        try:
            await waiter.future
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.cancel()
            self._wake()
            raise

    def _bridge_of(self, loop: asyncio.AbstractEventLoop) -> EventLoopBridge:
        """Return the bridge of an event loop; create it at the first call."""
        last = self._last_loop
        if last is not None and last[0]() is loop:
            return last[1]
        bridge = self._loops.get(loop)
        if bridge is None:
            with self._changed:
                bridge = self._loops[loop] = EventLoopBridge(
                    self._enter
                )  # no other thread uses this loop
        self._last_loop = weakref.ref(loop), bridge
        return bridge


def _block_forever() -> NoReturn:
    """Block this daemon thread of a program that has ended."""
    while True:
        threading.Event().wait()


def _all_done(tickets: Sequence[Ticket]) -> bool:
    """Return True if all tickets are done."""
    for ticket in tickets:
        if not ticket.done:
            return False
    return True


def drain_callback(driver_ref: weakref.ref[Driver]) -> Callable[[], None]:
    """Return a callback that calls `Driver.try_drain` without keeping the driver alive."""

    def drain() -> None:
        driver = driver_ref()
        if driver is not None:
            driver.try_drain()

    return drain


_DRIVERS = weakref.WeakSet[Driver]()
_exit_thread: int | None = None  # the thread that runs exit handlers, once the program exits


@atexit.register
def _stop_drivers() -> None:
    """Stop all drivers at exit, and wait until no thread is inside a model call.

    Ctrl-C takes effect after that.
    """
    global _exit_thread
    with deferred_interrupt():
        for driver in list(_DRIVERS):
            driver.stop_at_exit()
        _exit_thread = threading.get_ident()
        for driver in list(_DRIVERS):
            driver.wait_for_inline_step()


_fork_lock = threading.Lock()  # one fork at a time
_forking_drivers: list[Driver] = []


def _before_fork() -> None:
    """Acquire the locks of all drivers before `os.fork`."""
    with deferred_interrupt():
        _fork_lock.acquire()
        for driver in list(_DRIVERS):
            _forking_drivers.append(driver)
            driver.before_fork()


def _after_fork(after_fork: Callable[[Driver], None]) -> None:
    """Call `after_fork` for all drivers, after `os.fork`."""
    with deferred_interrupt():
        while _forking_drivers:
            after_fork(_forking_drivers.pop())
        _fork_lock.release()


if hasattr(os, "register_at_fork"):  # pragma: no branch (Windows has no fork)
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(Driver.after_fork),
        after_in_child=lambda: _after_fork(Driver.after_fork_in_child),
    )


def run_thread(driver_ref: weakref.ref[Driver], changed: threading.Condition) -> None:
    """The driver thread: step while there is work, sleep while there is none.

    It references the driver only for one iteration at a time, so that an unreferenced LM ends it.
    """
    while True:
        driver = driver_ref()
        if driver is None or driver.should_stop:
            return
        try:
            worked = driver.run_once()
        except BaseException as error:
            driver.abort(error)
            return
        if not worked:
            with changed:
                if driver.should_stop:
                    return
                if driver.scheduler.is_idle and not driver._tasks:
                    del driver
                    changed.wait(IDLE_S)
                    continue
        del driver


class _DeferredInterrupt:
    """Context manager and decorator that defers Ctrl-C; see `deferred_interrupt`.

    It is a class, because a generator-based context manager is slower on this hot path.
    """

    __slots__ = ("_pending", "_previous")

    def __init__(self) -> None:
        self._previous: Any = None  # the signal's handler before
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Callable[[], None]:
        if threading.get_ident() == threading.main_thread().ident:
            previous = _signal.getsignal(_signal.SIGINT)
            if callable(previous):
                self._previous = previous
                _signal.signal(_signal.SIGINT, self._defer)
        return self._check

    def __exit__(self, *_error: object) -> None:
        if self._previous is not None:
            _signal.signal(_signal.SIGINT, self._previous)
            if self._pending is not None:
                self._check()

    def __call__(self, function: Callable[Params, Result]) -> Callable[Params, Result]:
        """Return a function that calls `function` and defers Ctrl-C during the call."""

        @wraps(function)
        def deferred(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            with _DeferredInterrupt():
                return function(*args, **kwargs)

        return deferred

    def _defer(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: remember Ctrl-C."""
        if self._pending is None:
            self._pending = number, frame

    def _check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._previous(*pending)


def deferred_interrupt() -> _DeferredInterrupt:
    """Defer Ctrl-C on the main thread until the block ends.

    Use it with `with` or as a decorator. The value of the `with` statement is a function that
    raises a deferred Ctrl-C at once. On other threads, which receive no signals, it does nothing.
    """
    return _DeferredInterrupt()
