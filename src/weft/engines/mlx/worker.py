"""The one thread of a process that runs MLX for Weft.

Streams of MLX belong to threads, and so do the functions that it has compiled. It is one thread for
all engines, and it never ends: MLX drops a thread's compiled functions when the thread is gone, and
where that meets the end of the interpreter the process aborts.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from ...errors import ForwardError

Value = TypeVar("Value")

END_S = 30.0  # how long the end of the process waits for a model call that is running
_PARKING_S = 0.02


class Task:
    """A call that waits to be made, and then its outcome."""

    __slots__ = ("done", "error", "value", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Make the call; any error is kept for who waits."""
        try:
            self.value = self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.release()


class MlxWorker:
    """Makes calls one after the other; get it by `owner`."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[Task | None] = SimpleQueue()
        self._parked = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="weft-mlx", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def call(self, work: Callable[[], Value]) -> Value:
        """Call `work` on the thread, wait for it, and return its value or raise its error.

        Ctrl-C meanwhile is raised when the call is over. Raises: ForwardError in a forked process.
        """
        if threading.current_thread() is self._thread:
            return work()
        if os.getpid() != self._pid:
            raise ForwardError(
                "MLX was in use when this process was forked, and does not work here; start"
                ' processes afresh (multiprocessing: the "spawn" method)'
            )
        if self._parked.is_set():
            raise ForwardError("the interpreter is ending; MLX runs no more")
        errand = Task(work)
        self._errands.put(errand)
        interrupt = _wait(errand.done)
        if errand.error is not None:
            raise errand.error
        if interrupt is not None:
            raise interrupt
        value: Value = errand.value
        return value

    def _work(self) -> None:
        while True:
            errand = self._errands.get()
            if errand is None:
                self._parked.set()
            else:
                errand.run()
                del errand  # what it holds may go now

    def _end(self) -> None:
        """Let the thread wait, where it is out of the interpreter, when that goes away."""
        if os.getpid() == self._pid:
            self._errands.put(None)
            self._parked.wait(END_S)
            time.sleep(_PARKING_S)


def _wait(lock: threading.Lock) -> KeyboardInterrupt | None:
    interrupt = None
    while True:
        try:
            lock.acquire()
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            return interrupt


_starting = threading.Lock()
_owners: list[MlxWorker] = []


def owner() -> MlxWorker:
    """Return the thread, started with the first call."""
    with _starting:
        if not _owners:
            _owners.append(MlxWorker())
        return _owners[0]
