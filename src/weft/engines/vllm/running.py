"""A vLLM engine that runs: started by Weft, or by somebody else."""

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
from .native import as_failure
from .rows import Floats, RowReader
from .shared_logits import SharedLogitsBuffer
from .vllm_internals import idle_tokens, n_places, stop_listening

_PROBE = (0,)  # a path that every model has
_SAME = 0.25  # of a row's deviation: coarse kernels differ by less, other paths by more
_log = logging.getLogger("weft.engines")


class Running:
    """An AsyncLLM, the loop it lives on, and the board its workers write to.

    It knows no VllmEngine, so that this one is collected when nobody has it. engine: None once
    closed.
    """

    def __init__(self, engine: Any, loop: EngineLoop, board: SharedLogitsBuffer | None) -> None:
        self.engine = engine
        self.loop = loop
        self.board = board
        self.closed = False
        self._reader: RowReader | None = None
        self._pid = os.getpid()

    @classmethod
    def start(
        cls, args: Any, board: SharedLogitsBuffer | None, options: Mapping[str, Any]
    ) -> Running:
        """Start vLLM's processes. Raises what keeps it from starting."""
        loop = EngineLoop()

        async def begin() -> Any:
            return AsyncLLM.from_engine_args(args)

        try:
            with starting(options.values()):
                engine = loop.call(begin())
        except BaseException:
            loop.close()
            raise
        return cls(engine, loop, board)

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close when something fails in the block."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def reader(self, sessions: int | str, rows: str) -> RowReader:
        """Return the reader of logits rows, once it has read one.

        Raises: ForwardError where none can be had, ConfigError for sessions out of range.
        """
        config = self.engine.vllm_config
        n_vocab = config.model_config.get_vocab_size()
        board = None if rows == "logprobs" else self.board
        if board is not None and board.n_vocab != n_vocab:
            board = None
        if rows == "board" and board is None:
            raise ConfigError('rows is "board", and there is no memory for one; leave it "auto"')
        reader = RowReader(
            self.engine,
            n_vocab,
            board=board,
            most=most_sessions(sessions, config),
            most_tokens=idle_tokens(config),
        )
        self._reader = reader
        if self.loop.may_wait:
            self._try(reader, rows)
        return reader

    def _try(self, reader: RowReader, rows: str) -> None:
        """Read a row; without the board where the workers do not see it."""
        try:
            self._ask(reader, _PROBE)
        except ForwardError:
            if rows == "board" or reader.board is None:
                raise
            _log.warning("vLLM's workers share no memory with this process: logits come slowly")
            reader.board = None
            self._ask(reader, _PROBE)
        if reader.most and not self._may_stay_open(reader):
            _log.warning("vLLM's requests cannot stay open: every row is a request of its own")
            reader.most = 0

    def _may_stay_open(self, reader: RowReader) -> bool:
        """Whether an open request gives, after a token of the host's, what a fresh one gives."""
        first = self._ask(reader, _PROBE)
        path = (*_PROBE, int(first.argmin()))  # not what vLLM draws
        try:
            open_row = self._ask(reader, path)
        except ForwardError:
            return False
        self.loop.call(reader.close())
        fresh = self._ask(reader, path)
        return bool(np.abs(open_row - fresh).max() < _SAME * float(fresh.std()))

    def _ask(self, reader: RowReader, ids: tuple[int, ...]) -> Floats:
        try:
            (row,) = self.loop.call(reader.rows([(None, ids)], {None: None}))
        except WeftError:
            raise
        except Exception as error:
            raise as_failure(error) from error
        return row

    def close(self) -> None:
        """End what this process started; idempotent, any thread."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if not self.loop.is_own:
            self._leave()
        elif self.loop.is_here():  # collected by the loop's own thread
            threading.Thread(target=self._shut_down, daemon=True).start()
        else:
            self._shut_down()

    def _leave(self) -> None:
        """Let somebody else's engine go on without the requests that are open here."""
        if self._reader is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.post(_start, self._reader.close())
        self.engine = None

    def _shut_down(self) -> None:
        with contextlib.suppress(Exception):
            self.loop.post(stop_listening, self.engine)
            # vLLM's workers on CPUs do not end by themselves within its own patience.
            self.engine.shutdown(timeout=0)
        self.engine = None
        if self._reader is not None:
            self._reader.engine = None
        self.loop.close()


def _start(work: Coroutine[Any, Any, None]) -> None:
    _going.add(task := asyncio.ensure_future(work))
    task.add_done_callback(_going.discard)


_going: set[asyncio.Task[None]] = set()  # a loop itself holds its tasks weakly


def most_sessions(asked: int | str, config: Any) -> int:
    """Return how many requests may stay open while nobody asks: each holds a place in the batch."""
    places = n_places(config)
    most = places // 4 if asked == "auto" else check_int("sessions", asked, 0)
    if most > places // 2:
        raise ConfigError(
            f"sessions is {most}, and vLLM runs {places} requests at once; half of them is the most"
            " (engine_options max_num_seqs)"
        )
    return most if idle_tokens(config) else 0
