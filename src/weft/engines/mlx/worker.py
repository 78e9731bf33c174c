"""The one thread of a process that runs MLX for Weft.

MLX's streams and compiled functions belong to threads. All engines share one thread, which never
ends: MLX drops a thread's compiled functions when the thread ends, and the process aborts if that
happens while the interpreter shuts down.
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

SHUTDOWN_TIMEOUT_S = 30.0  # wait for a running model call when the process exits
_STOP_DELAY_S = 0.02


class Task:
    """A queued call and its result."""

    __slots__ = ("done", "error", "value", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Make the call; store its value or its error for the waiting thread."""
        try:
            self.value = self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.release()


class MlxWorker:
    """Runs calls one after the other. `worker` returns the only instance."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="weft-mlx", daemon=True)
        self._thread.start()
        atexit.register(self._shut_down)

    def call(self, work: Callable[[], Value]) -> Value:
        """Call `work` on the thread, wait for it, and return its value or raise its error.

        Ctrl-C is raised after the call has finished.

        Raises:
            ForwardError: in a forked process, or while the interpreter shuts down.
        """
        if threading.current_thread() is self._thread:
            return work()
        if os.getpid() != self._pid:
            raise ForwardError(
                "MLX was in use when this process was forked, and does not work here; start new"
                ' processes instead (multiprocessing: the "spawn" method)'
            )
        if self._stopped.is_set():
            raise ForwardError("the interpreter is shutting down; MLX has stopped")
        task = Task(work)
        self._tasks.put(task)
        interrupt = _acquire_despite_interrupt(task.done)
        if task.error is not None:
            raise task.error
        if interrupt is not None:
            raise interrupt
        value: Value = task.value
        return value

    def _work(self) -> None:
        """Run queued calls until shutdown; the body of the thread."""
        while True:
            task = self._tasks.get()
            if task is None:
                self._stopped.set()
            else:
                task.run()
                del task  # release its arrays before the next wait

    def _shut_down(self) -> None:
        """Stop the thread in a blocking wait before the interpreter shuts down."""
        if os.getpid() == self._pid:
            self._tasks.put(None)
            self._stopped.wait(SHUTDOWN_TIMEOUT_S)
            time.sleep(_STOP_DELAY_S)


def _acquire_despite_interrupt(lock: threading.Lock) -> KeyboardInterrupt | None:
    """Acquire the lock. Return the KeyboardInterrupt that arrived meanwhile, or None."""
    interrupt = None
    while True:
        try:
            lock.acquire()
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            return interrupt


_starting = threading.Lock()
_workers: list[MlxWorker] = []


def worker() -> MlxWorker:
    """Return the worker; the first call starts its thread."""
    with _starting:
        if not _workers:
            _workers.append(MlxWorker())
        return _workers[0]
