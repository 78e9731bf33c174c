"""Who calls the scheduler's step: the caller itself, or one thread for the LM's life."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without enums: every call comes by here
import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from ...errors import StaleHandle
from .jobs import Job
from .loop_bridge import EventLoopBridge, Waiter
from .scheduler import Scheduler
from .work import Item, Ticket

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Params = ParamSpec("Params")
IDLE_S = 0.5  # how long the thread sleeps at most before it looks whether its LM is still there
MAX_EXIT_WAIT_S = 30.0  # how long a program that ends waits at most for a model call


class Channel:
    """Events that sinks put in during steps, for one reader.

    waiter: who waits for the next one in an event loop.
    """

    __slots__ = ("_events", "waiter")

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self.waiter: Waiter | None = None

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Any) -> None:
        """Add an event; any thread."""
        self._events.append(event)
        self.notify()

    def notify(self, _ticket: Ticket | None = None) -> None:
        """Wake who waits, if anybody does; any thread."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.wake()

    def drain(self) -> list[Any]:
        """Return what is there and empty the channel."""
        out = []
        while self._events:
            out.append(self._events.popleft())
        return out


class Driver:
    """Steps the scheduler until tickets are done.

    Inline while one thread uses the LM synchronously: no thread, no switch. With the first async
    call, a second calling thread, or an engine that wants its own thread, one daemon thread takes
    over for good.
    A model call is never interrupted: Ctrl-C is seen between steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.closed = False
        self._thread: threading.Thread | None = None
        self._thread_pid = 0  # the process that has it
        self._created_pid = os.getpid()
        self._held: list[Any] = []  # locks, while the process forks
        self._forked_mid_step = False  # forked in the middle of another thread's step
        self._stops_at_exit = False
        self._caller: int | None = None
        self._stepping = threading.Lock()  # held by whoever steps
        self._stepper: int | None = None  # that thread
        self._changed = threading.Condition()  # work came, a step ended, or the driver closed
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
        """Queue items; see Scheduler.submit."""
        self._check_not_forked()
        if self.closed:
            raise StaleHandle("this LM is closed; load it again")
        tickets = self.scheduler.submit(items, atomic=atomic)
        if self.closed:  # meanwhile: nobody will step again
            raise StaleHandle("the LM was closed while this was submitted")
        if self._thread is not None:
            self._wake()
        return tickets

    def drive(self, tickets: Sequence[Ticket]) -> None:
        """Block until all tickets are done. Ctrl-C cancels them, lets them end, then is raised."""
        try:
            self._step_until(lambda: _all_done(tickets))
        except KeyboardInterrupt:
            for ticket in tickets:
                ticket.cancel("interrupted")
            self._step_until(lambda: _all_done(tickets))
            raise

    def pump(self, channel: Channel, tickets: Sequence[Ticket]) -> Iterator[list[Any]]:
        """Yield what sinks put into `channel`, a list a step, until all tickets are done.

        Leaving early cancels nothing: that is the caller's word.
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
        """Step, or wait for the thread that steps, until `is_done()`."""
        self._check_not_forked()
        self._check_not_nested()
        if not self._may_step_inline():
            self._wait(is_done)
            return
        done = is_done()
        with deferred_interrupt() as check:
            while not done and self._thread is None:
                with self._stepping_turn():
                    if not is_done():  # a close may have come first
                        self.scheduler.step()
                done = is_done()
                check()
            if self._thread is not None:  # it came meanwhile: who waits may be answered already
                self._notify_all()
        if not done:
            self._wait(is_done)

    def exclusive(self, work: Callable[[], Result]) -> Result:
        """Call `work` between steps, with the lock held and nothing in flight; return its value.

        An engine that wants its own thread is touched by the driver thread alone.
        """
        self._check_not_forked()
        if self.scheduler.engine.info.same_thread_only:
            return self._on_thread(lambda: self._run_between_steps(work))
        return self._run_between_steps(work)

    def _run_between_steps(self, work: Callable[[], Result]) -> Result:
        with self._stepping_turn(), deferred_interrupt():
            self.scheduler.finish_in_flight()
            with self.scheduler.lock:
                self.scheduler.admission.pressure.relax()
                value = work()
        self._flush_loops()
        return value

    def try_drain(self) -> None:
        """Let go of what nobody holds any more, unless a step is running: that will do it."""
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

    def _on_thread(self, work: Callable[[], Result]) -> Result:
        """Let the driver thread call `work`; wait for it and return its value."""
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
        """Do what other threads asked this one for; return whether there was something."""
        any_run = bool(self._tasks)
        while self._tasks:
            future, work = self._tasks.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        return any_run

    @contextmanager
    def _stepping_turn(self) -> Iterator[None]:
        """Be the one who steps."""
        self._check_not_nested()
        with self._stepping:
            if self._may_step_at_exit() or threading.current_thread() is self._thread:
                self._stepper = threading.get_ident()
                try:
                    yield
                    return
                finally:
                    self._stepper = None
        threading.Event().wait()  # for ever: this is a daemon thread of a program that has ended

    def _may_step_at_exit(self) -> bool:
        """Whether the program goes on, or this is the thread that does what is last in it."""
        if _exit_thread is None or self.scheduler.engine.info.same_thread_only:
            return True
        return _exit_thread == threading.get_ident()

    def _check_not_nested(self) -> None:
        if self._stepper == threading.get_ident():
            raise RuntimeError("a sink or callback must not wait for the LM that calls it")

    def _check_not_forked(self) -> None:
        """Raise StaleHandle in a process that was forked from the one that has the thread: nobody
        would ever step, and a lock that the thread held is held for ever.
        """
        if self._forked_mid_step:
            raise StaleHandle(
                "this process was forked in the middle of a step that another thread made with"
                " this LM; load the model in this one, which may be started by 'spawn'"
            )
        if self._thread is not None and os.getpid() != self._thread_pid:
            raise StaleHandle(
                f"this LM is run by a thread of process {self._thread_pid}, and this process was"
                " forked from it; load the model in this one, which may be started by 'spawn', or"
                " fork before the LM is first used from a second thread or with await"
            )

    def _may_step_inline(self) -> bool:
        """Whether the calling thread may step inline; starts the driver thread when it may not."""
        if self._thread is not None:
            return False
        me = threading.get_ident()
        if _exit_thread is not None and not self.scheduler.engine.info.same_thread_only:
            return True  # to one; all others stay in their turn
        with deferred_interrupt(), self._changed:
            if self._caller is None and not self.scheduler.engine.info.same_thread_only:
                self._caller = me
        if self._caller == me:
            return True
        self.start()
        return False

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self._wake()
        # Ctrl-C between taking a condition and going on with it would leave it taken for ever.
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
                except BaseException:  # no memory for one: who comes next tries again
                    self._thread = None
                    raise

    @property
    def should_stop(self) -> bool:
        """Whether the thread is to end."""
        return self.closed or self._stops_at_exit

    def stop_at_exit(self) -> None:
        """End the thread between two steps: a thread that dies within a library aborts the process.

        What somebody still asks for then is stepped inline. An engine that wants its own thread
        keeps it.
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
        """Wait for a step that some thread makes inline: it would die within it, as above."""
        is_mine = self._stepper == threading.get_ident() or self._created_pid != os.getpid()
        if not is_mine and self._stepping.acquire(timeout=MAX_EXIT_WAIT_S):
            self._stepping.release()

    def before_fork(self) -> None:
        """Before a fork: wait until no other thread is in the middle of anything, and hold what it
        would have held; there is no such thread in the process that comes.
        """
        if self._forked_mid_step:
            return
        is_mine = self._stepper == threading.get_ident()
        for lock in (self._stepping, self.scheduler.lock, self._changed):
            if not (is_mine and lock is self._stepping) and lock.acquire(timeout=MAX_EXIT_WAIT_S):
                self._held.append(lock)

    def after_fork(self) -> None:
        """After the fork."""
        while self._held:
            self._held.pop().release()

    def after_fork_in_child(self) -> None:
        """After the fork, in the process that has come."""
        is_mine = self._stepper == threading.get_ident()
        self._forked_mid_step = self._forked_mid_step or (
            not is_mine and self._stepping not in self._held
        )
        self.after_fork()

    def _close_scheduler(self, last: Callable[[], None] | None) -> None:
        with self._stepping_turn():
            self.closed = True
            self.scheduler.close()
            if last is not None:
                last()

    def _wake(self) -> None:
        with deferred_interrupt(), self._changed:
            self._changed.notify_all()

    def run_once(self) -> bool:
        """Run errands, and a step if there is work. Returns whether there was any."""
        ran_tasks = self._run_tasks()
        with self._stepping_turn():
            if self.scheduler.is_idle:
                return ran_tasks
            try:
                self.scheduler.step()
            except (KeyboardInterrupt, SystemExit):  # the engine's; the step's tickets have it
                _log.exception("the engine asked to exit; the step it did so in has failed")
        self._notify_all()
        return True

    def _notify_all(self) -> None:
        """Wake all who wait, in threads and in event loops."""
        self._wake()
        self._flush_loops()

    def _flush_loops(self) -> None:
        with self._changed:  # other threads' loops come and go
            bridges = list(self._loops.items())
        for loop, bridge in bridges:
            bridge.flush(loop)

    def abort(self, error: BaseException) -> None:
        """The thread ends by an error that no ticket has: whoever waits must not wait for ever."""
        _log.error("a step failed outside the model call; this LM is closed", exc_info=error)
        self.closed = True
        self.scheduler.abandon(error)
        self._notify_all()

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Stop stepping and fail what is left, then call `last`; idempotent."""
        if self.closed:
            return
        if self._forked_mid_step:  # nothing here is of any use, and nothing is waited for
            self.closed = True
            return
        self._check_not_nested()
        owned = self.scheduler.engine.info.same_thread_only
        if owned:
            with suppress(StaleHandle):  # somebody else closed it meanwhile
                self._on_thread(lambda: self._close_scheduler(last))
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
        """Return what a call from an event loop waits for before it begins; None: nothing.

        Of many calls that one pass of the loop makes, some begin later. What is submitted by all of
        them enters one step all the same.
        """
        loop = asyncio.get_running_loop()
        return self._bridge(loop).start_call(loop)

    async def asubmit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items from an event loop; all that one pass of the loop submits enters one step."""
        self._check_not_forked()
        if self.closed:
            raise StaleHandle("this LM is closed; load it again")
        loop = asyncio.get_running_loop()
        self.start()
        tickets, jobs = self.scheduler.prepare(items, atomic=atomic)
        self._bridge(loop).submit(loop, jobs)
        return tickets

    def _enter(self, jobs: list[Job]) -> None:
        """Let jobs enter that an event loop has handed over."""
        self.scheduler.enqueue(jobs)
        if self.closed:  # meanwhile: nobody will step again
            self.scheduler.abandon(StaleHandle("this LM was closed while this was submitted"))
            self._flush_loops()
        self._wake()

    async def adrive(self, tickets: Sequence[Ticket]) -> None:
        """Wait for tickets without blocking the loop; cancelling the task cancels them."""
        if not _all_done(tickets):
            loop = asyncio.get_running_loop()
            await self._wait_in_loop(Waiter(self._bridge(loop), loop, tickets), tickets)

    def when_done(self, tickets: Sequence[Ticket]) -> asyncio.Future[None]:
        """Return a future of the running loop that is set once all tickets are done."""
        loop = asyncio.get_running_loop()
        if _all_done(tickets):
            future = loop.create_future()
            future.set_result(None)
            return future
        return Waiter(self._bridge(loop), loop, tickets).future

    async def apump(self, channel: Channel, tickets: Sequence[Ticket]) -> AsyncIterator[list[Any]]:
        """The async form of `pump`."""
        loop = asyncio.get_running_loop()
        bridge = self._bridge(loop)
        for ticket in tickets:
            ticket.on_done(channel.notify)
        while True:
            events = channel.drain()
            if not events:
                waiter = channel.waiter = Waiter(bridge, loop)
                events = channel.drain()  # after the waiter: what comes from now on is heard
            if events:
                yield events
            elif _all_done(tickets):
                return
            else:
                await self._wait_in_loop(waiter, tickets)

    async def _wait_in_loop(self, waiter: Waiter, tickets: Sequence[Ticket]) -> None:
        self.start()
        if self.closed:  # nobody will step again; who closed it has told of all there was
            self._flush_loops()
        try:
            await waiter.future
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.cancel()
            self._wake()
            raise

    def _bridge(self, loop: asyncio.AbstractEventLoop) -> EventLoopBridge:
        last = self._last_loop
        if last is not None and last[0]() is loop:
            return last[1]
        bridge = self._loops.get(loop)
        if bridge is None:
            with self._changed:
                bridge = self._loops[loop] = EventLoopBridge(
                    self._enter
                )  # no other thread has this loop
        self._last_loop = weakref.ref(loop), bridge
        return bridge


def _all_done(tickets: Sequence[Ticket]) -> bool:
    for ticket in tickets:
        if not ticket.done:
            return False
    return True


def drain_callback(driver_ref: weakref.ref[Driver]) -> Callable[[], None]:
    """Return what lets go of dropped places between steps, without keeping the driver alive."""

    def drain() -> None:
        driver = driver_ref()
        if driver is not None:
            driver.try_drain()

    return drain


_DRIVERS = weakref.WeakSet[Driver]()
_exit_thread: int | None = None  # the one that does what is last in a program, once that ends


@atexit.register
def _stop_drivers() -> None:
    """Let no thread be within a model call as it ends; Ctrl-C waits for that, too."""
    global _exit_thread
    with deferred_interrupt():
        for driver in list(_DRIVERS):
            driver.stop_at_exit()
        _exit_thread = threading.get_ident()
        for driver in list(_DRIVERS):
            driver.wait_for_inline_step()


_fork_lock = threading.Lock()  # one thread at a time
_forking_drivers: list[Driver] = []


def _before_fork() -> None:
    with deferred_interrupt():
        _fork_lock.acquire()
        for driver in list(_DRIVERS):
            _forking_drivers.append(driver)
            driver.before_fork()


def _after_fork(after_fork: Callable[[Driver], None]) -> None:
    with deferred_interrupt():
        while _forking_drivers:
            after_fork(_forking_drivers.pop())
        _fork_lock.release()


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(Driver.after_fork),
        after_in_child=lambda: _after_fork(Driver.after_fork_in_child),
    )


def run_thread(driver_ref: weakref.ref[Driver], changed: threading.Condition) -> None:
    """The driver thread: step while there is work, sleep while there is none.

    Holds the driver only for a turn at a time, so that a forgotten LM ends its thread.
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
    """One time that Ctrl-C is held back. A class: it comes by several times a step."""

    __slots__ = ("_before", "_held")

    def __init__(self) -> None:
        self._before: Any = None  # what the signal did, where it is held back
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Callable[[], None]:
        if threading.get_ident() == threading.main_thread().ident:
            before = _signal.getsignal(_signal.SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(_signal.SIGINT, self._hold)
        return self._check

    def __exit__(self, *_error: object) -> None:
        if self._before is not None:
            _signal.signal(_signal.SIGINT, self._before)
            if self._held is not None:
                self._check()

    def __call__(self, function: Callable[Params, Result]) -> Callable[Params, Result]:
        """Hold Ctrl-C back in every call of a function."""

        @wraps(function)
        def held(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            with _DeferredInterrupt():
                return function(*args, **kwargs)

        return held

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._held = number, frame

    def _check(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._before(*held)


def deferred_interrupt() -> _DeferredInterrupt:
    """Hold Ctrl-C back on the main thread; the function given raises it, between steps.

    For `with`, and as a decorator. On other threads, which no signal meets, it does nothing.
    """
    return _DeferredInterrupt()
