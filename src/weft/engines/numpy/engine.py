"""The NumPy engine: the engine protocol over plain arrays, readable from end to end."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from ...checks import one_of
from ...cores import idle_cores, usable_cores
from ...errors import ConfigError, ForwardError, Unsupported
from ...sampling import metrics
from ..abilities import OWN
from ..base import Engine, EngineInfo, HostOutput, Row, Score, ScoreSpan
from ..checkpoint import Checkpoint, open_checkpoint, read_config
from ..source import Progress
from .config import LlamaConfig, parse_config
from .kv import NumpyFragments
from .model import Floats, Model, read_weights
from .step import Plan

Answer = TypeVar("Answer")


class NumpyEngine(Engine):
    """A Llama-family model in float32; usually made by `load`."""

    fragments: NumpyFragments

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LlamaConfig,
        *,
        threads: int | str = "auto",
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._threads = BlasThreads(threads)
        weights = read_weights(checkpoint, config, progress=progress)
        self._model: Model | None = Model(config, weights)
        self._plan: Plan | None = None
        self.fragments = NumpyFragments(config)
        self.info = EngineInfo(
            name="numpy",
            model=str(checkpoint.folder),
            n_layers=config.n_layers,
            n_vocab=config.n_vocab,
            n_positions=config.n_positions,
            kv_bytes_per_token=config.kv_bytes_per_token,
            dtype="float32",
            fingerprint=checkpoint.fingerprint(),
            n_embd=weights.embed.shape[1],
            abilities=OWN["numpy"],
        )

    @classmethod
    def refuse(cls, folder: Path) -> None:
        """Refuse what is not of the Llama family; see `Engine.refuse`."""
        parse_config(read_config(folder))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        threads: int | str = "auto",
        progress: Progress | None = None,
    ) -> NumpyEngine:
        """Load a Transformers-format folder; weights in any float format are computed in float32.

        Args:
            device: "auto" or "cpu", which are the same.
            n_ctx: a context shorter than the model's own.
            threads: BLAS threads of a forward; "auto" finds them, or does as the environment says.
            progress: called with "load", layers read, layers in all and "".

        Raises:
            ModelLoadError: files are missing, broken or do not belong together.
            Unsupported: the architecture, or a dtype other than "auto" and "float32".
            ConfigError: n_ctx or threads is out of range, or the device is another one.
        """
        one_of("device", device, ("auto", "cpu"), ': the numpy engine runs on the CPU; try "torch"')
        if dtype not in ("auto", "float32"):
            raise Unsupported(
                f"dtype is {dtype!r}; allowed are 'auto' and 'float32', in which the numpy engine"
                ' computes; try engine="torch"'
            )
        checkpoint = open_checkpoint(Path(folder))
        config = parse_config(checkpoint.config, n_ctx=n_ctx)
        return cls(checkpoint, config, threads=threads, progress=progress)

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Run all rows in one pass over the layers.

        Raises:
            ForwardError: a token id, a position or a wanted index is out of range, or paths and
                positions disagree. No fragment's length has changed then.
        """
        if not rows:
            self._open_model()
            return HostOutput(np.empty((0, self.info.n_vocab), np.float32), [])

        def answers(model: Model, plan: Plan, hidden: Floats) -> HostOutput:
            scores = [
                [self._score(model, hidden, plan.first(index), span) for span in row.scores]
                for index, row in enumerate(rows)
            ]
            return HostOutput(model.logits(hidden[plan.wanted]), scores)

        return self._run(rows, answers)

    def hidden_states(self, rows: Sequence[Row]) -> list[Floats]:
        """Run rows and return their final hidden states, after the last norm."""

        def states(model: Model, plan: Plan, hidden: Floats) -> list[Floats]:
            found, starts = model.normed(hidden), [plan.first(i) for i in range(len(rows))]
            return [found[at : at + row.n_tokens] for at, row in zip(starts, rows, strict=True)]

        return self._run(rows, states)

    def _run(self, rows: Sequence[Row], answer: Callable[[Model, Plan, Floats], Answer]) -> Answer:
        """Run rows and keep their KV; `answer` makes of the hidden states [T, E] what is asked."""
        model = self._open_model()
        with self._threads.limited(sum([row.n_tokens for row in rows])):
            plan, self._plan = self._plan, None
            if plan is None or not plan.serves(rows):
                plan = Plan(rows, self._config, self.fragments)
            ids = plan.begin(rows)
            _check_ids(ids, self.info.n_vocab)
            found = answer(model, plan, model.hidden(ids, plan))
            plan.commit()
            self._plan = plan
        return found

    def close(self) -> None:
        """Drop weights and KV; idempotent."""
        self._model = self._plan = None
        self.fragments = NumpyFragments(self._config)

    def _open_model(self) -> Model:
        if self._model is None:
            raise ForwardError("the engine is closed; load the model again")
        return self._model

    def _score(self, model: Model, hidden: Floats, start: int, span: ScoreSpan) -> Score:
        return metrics.score_span(
            span,
            self.info.n_vocab,
            lambda first, last: model.logits(hidden[start + first : start + last]),
        )


def _check_ids(ids: NDArray[np.int64], n_vocab: int) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_vocab:
        wrong = ids[(ids < 0) | (ids >= n_vocab)][0]
        raise ForwardError(
            f"token id {wrong} is outside the model's vocabulary of {n_vocab}; "
            f"ids are 0 to {n_vocab - 1}"
        )


_MOST = 8  # beyond, matrices of this engine's models are too small
_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_PAID_BACK = 20  # a trial may take a twentieth of the time
_APART = 8  # forwards between two trials, at least
_ENOUGH = 3  # trials before the choice moves on


class Account:
    """What trials have lost and forwards have not paid back yet, in seconds, for all sizes."""

    def __init__(self) -> None:
        self.owed_s = 0.0


class ThreadChoice:
    """A number of threads for forwards of about one size, found while they run.

    It begins with one thread, as more are far slower where the machine is busy with something else:
    they wait for each other. Now and then a forward is a trial with the next number up or down, up
    only where so many cores are idle. The number moves on when trials were faster in the median;
    what a trial lost is paid back twenty times before the next one.
    """

    def __init__(self, most: int, account: Account, idle: Callable[[], int]) -> None:
        """most: the highest number; tried are the powers of two below, and itself."""
        self._account = account
        self._idle = idle
        self.counts = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        self.at = 0
        self._way = -1
        self._trial: int | None = None
        self._times: deque[float] = deque(maxlen=5)  # a token, with the present number
        self._ratios: dict[int, deque[float]] = {}  # of trials to that
        self._rest = 0  # forwards before the next trial

    @property
    def threads(self) -> int:
        """Return the number for the next forward."""
        return self.counts[self.at if self._trial is None else self._trial]

    def ran(self, seconds: float, n_tokens: int) -> None:
        """Learn how long a forward with `threads` took, and choose for the next one."""
        each = seconds / n_tokens
        if self._trial is not None:
            self._judge(self._trial, each, n_tokens)
            return
        times = self._times
        is_slow = len(times) >= 2 and min(times[-1], each) > 2 * statistics.median(times)
        times.append(each)
        self._rest -= 1
        self._account.owed_s = max(self._account.owed_s - seconds, 0.0)
        if self.at and is_slow:  # twice: somebody else came, and fewer cost little to try
            self._times = deque([times[-2], each], maxlen=5)
            self._ratios.clear()
            self._trial = self.at - 1
        elif len(times) < 2:
            return
        elif self._rest <= 0 and not self._account.owed_s:
            self._trial = self._next()

    def _next(self) -> int | None:
        """Return which number to try: the next one up and the next one down, in turn; None: none.

        More than there are idle cores is not tried, but where trials have begun well: the library's
        own threads spin for a while after each, and count as somebody else's.
        """
        self._way = -self._way
        there = self.at + self._way
        if not 0 <= there < len(self.counts):
            there = self.at - self._way
        if there > self.at and not self._began_well(there) and self.counts[there] > self._idle():
            self._rest = _APART
            return self.at - 1 if self.at else None
        return there

    def _began_well(self, trial: int) -> bool:
        """Whether a number was faster so far, and a few trials more may prove it."""
        ratios = self._ratios.get(trial, ())
        return 0 < len(ratios) < _ENOUGH and statistics.median(ratios) < 0.95

    def _judge(self, trial: int, each: float, n_tokens: int) -> None:
        self._trial = None
        usual = statistics.median(self._times)
        ratios = self._ratios.setdefault(trial, deque(maxlen=5))
        ratios.append(each / usual)
        ratio = statistics.median(ratios)
        if (len(ratios) >= _ENOUGH and ratio < 0.95) or ratio < 0.5:
            self.at = trial
            self._times.clear()
            self._ratios.clear()
            self._rest = 0
        else:
            self._rest = 2 if len(ratios) < _ENOUGH else _APART
            self._account.owed_s += _PAID_BACK * max(each - usual, 0.0) * n_tokens


class BlasThreads:
    """Limits the BLAS during a forward and gives its setting back afterwards.

    threads: a number, or "auto": found while running (see `ThreadChoice`), at most as many as the
    process may use; or as many as the environment says.
    """

    def __init__(self, threads: int | str) -> None:
        self.limit: int | None = None
        self._most = 0
        self._choices: dict[int, ThreadChoice] = {}  # by size of the forward, in powers of two
        if threads == "auto":
            if not any(os.environ.get(name) for name in _VARIABLES):
                self._most = min(_MOST, usable_cores())
            self._account = Account()
        elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
            self.limit = threads
        else:
            raise ConfigError(f'threads is {threads!r}; allowed are "auto" and numbers from 1 on')
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers

    @contextmanager
    def limited(self, n_tokens: int) -> Iterator[None]:
        """Limit the BLAS inside a block that runs so many tokens. Cost: about 10 µs."""
        if not self._most:
            with self._set(self.limit):
                yield
        elif n_tokens <= 1 or self._most == 1:  # vectors gain nothing
            with self._set(1):
                yield
        else:
            size = n_tokens.bit_length()
            choice = self._choices.setdefault(
                size, ThreadChoice(self._most, self._account, idle_cores)
            )
            with self._set(choice.threads):
                began = time.perf_counter()
                yield
                choice.ran(time.perf_counter() - began, n_tokens)

    @contextmanager
    def _set(self, limit: int | None) -> Iterator[None]:
        if limit is None:
            yield
            return
        before = [(library, library.get_num_threads()) for library in self._libraries]
        changed = [(library, n) for library, n in before if n != limit]
        for library, _ in changed:
            library.set_num_threads(limit)
        try:
            yield
        finally:
            for library, n in changed:
                library.set_num_threads(n)
