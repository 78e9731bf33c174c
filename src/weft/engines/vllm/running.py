"""A running vLLM engine, started by Weft or by the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM

from ..._core.validation import check_int
from ...errors import ConfigError, ForwardError, WeftError
from .log_filter import starting
from .loop import EngineLoop
from .native import as_forward_error
from .rows import Floats, LogitsReader
from .shared_logits import SharedLogitsBuffer
from .vllm_internals import cancel_output_handler, idle_tokens, max_num_seqs

_PROBE = (0,)  # a path that every model has
_SAME = 0.25  # of the logits' deviation: coarse kernels differ less, other paths more
_log = logging.getLogger("weft.engines")


class RunningEngine:
    """An AsyncLLM, its event loop, and the buffer that its workers write to.

    It has no reference to the VllmEngine, so that an unused VllmEngine is collected.

    Attributes:
        engine: the AsyncLLM; None once closed.
        loop: its event loop.
        buffer: memory shared with its workers, or None.
    """

    def __init__(self, engine: Any, loop: EngineLoop, buffer: SharedLogitsBuffer | None) -> None:
        self.engine = engine
        self.loop = loop
        self.buffer = buffer
        self.closed = False
        self._reader: LogitsReader | None = None
        self._pid = os.getpid()

    @classmethod
    def start(
        cls, args: Any, buffer: SharedLogitsBuffer | None, options: Mapping[str, Any]
    ) -> RunningEngine:
        """Start vLLM's processes. Raises the error that prevents it."""
        loop = EngineLoop()

        async def begin() -> Any:
            return AsyncLLM.from_engine_args(args)

        try:
            with starting(options.values()):
                engine = loop.call(begin())
        except BaseException:
            loop.close()
            raise
        return cls(engine, loop, buffer)

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the engine if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def reader(self, sessions: int | str, rows: str) -> LogitsReader:
        """Create a reader of logits, and test it if this thread may wait for the loop.

        sessions, rows: see `VllmEngine.load`.

        Raises:
            ForwardError: logits cannot be read.
            ConfigError: `sessions` is out of range, or `rows` is "board" without shared memory.
        """
        config = self.engine.vllm_config
        n_vocab = config.model_config.get_vocab_size()
        buffer = None if rows == "logprobs" else self.buffer
        if buffer is not None and buffer.n_vocab != n_vocab:
            buffer = None
        if rows == "board" and buffer is None:
            raise ConfigError('rows is "board", but there is no shared memory; use "auto"')
        reader = LogitsReader(
            self.engine,
            n_vocab,
            buffer=buffer,
            max_idle=max_sessions(sessions, config),
            max_idle_tokens=idle_tokens(config),
        )
        self._reader = reader
        if self.loop.may_wait:
            self._test_reader(reader, rows)
        return reader

    def _test_reader(self, reader: LogitsReader, rows: str) -> None:
        """Read logits as a test, and switch off features of the reader that do not work.

        These are the shared buffer, unless `rows` is "board", and open requests.
        Raises: ForwardError if logits cannot be read.
        """
        try:
            self._read_row(reader, _PROBE)
        except ForwardError:
            if rows == "board" or reader.buffer is None:
                raise
            _log.warning("vLLM's workers share no memory with this process: logits are slow")
            reader.buffer = None
            self._read_row(reader, _PROBE)
        if reader.max_idle and not self._may_stay_open(reader):
            _log.warning("vLLM's requests cannot stay open: every row needs its own request")
            reader.max_idle = 0

    def _may_stay_open(self, reader: LogitsReader) -> bool:
        """Return True if an open request returns the same logits after a given token as a new
        request.
        """
        first = self._read_row(reader, _PROBE)
        path = (*_PROBE, int(first.argmin()))  # not the token that vLLM samples
        try:
            open_row = self._read_row(reader, path)
        except ForwardError:
            return False
        self.loop.call(reader.close())
        fresh = self._read_row(reader, path)
        return bool(np.abs(open_row - fresh).max() < _SAME * float(fresh.std()))

    def _read_row(self, reader: LogitsReader, ids: tuple[int, ...]) -> Floats:
        """Read the logits after one path, with errors converted to ForwardError."""
        try:
            (row,) = self.loop.call(reader.rows([(None, ids)], {None: None}))
        except WeftError:
            raise
        except Exception as error:
            raise as_forward_error(error) from error
        return row

    def close(self) -> None:
        """Stop what this process started. Idempotent; any thread may call it."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if not self.loop.is_own:
            self._release()
        elif self.loop.is_current_thread():  # collected by the loop's own thread
            threading.Thread(target=self._shut_down, daemon=True).start()
        else:
            self._shut_down()

    def _release(self) -> None:
        """Close the open requests of this process; the engine itself belongs to the caller."""
        if self._reader is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.post(_run_in_background, self._reader.close())
        self.engine = None

    def _shut_down(self) -> None:
        """Stop vLLM's processes and the loop. The buffer is freed with this object."""
        with contextlib.suppress(Exception):
            self.loop.post(cancel_output_handler, self.engine)
            # vLLM's workers on CPUs do not exit within its own timeout.
            self.engine.shutdown(timeout=0)
        self.engine = None
        if self._reader is not None:
            self._reader.engine = None
        self.loop.close()


def _run_in_background(work: Coroutine[Any, Any, None]) -> None:
    """Start a coroutine on the running loop, and keep a reference until it ends."""
    _tasks.add(task := asyncio.ensure_future(work))
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()  # event loops only have weak references


def max_sessions(sessions: int | str, config: Any) -> int:
    """Return the maximum number of idle open requests; each occupies a place in the batch."""
    n_seqs = max_num_seqs(config)
    n_sessions = n_seqs // 4 if sessions == "auto" else check_int("sessions", sessions, 0)
    if n_sessions > n_seqs // 2:
        raise ConfigError(
            f"sessions is {n_sessions}, but vLLM runs {n_seqs} requests at once; allowed is at most"
            " half of them (engine_options max_num_seqs)"
        )
    return n_sessions if idle_tokens(config) else 0
