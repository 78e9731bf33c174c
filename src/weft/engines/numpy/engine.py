"""The NumPy engine: the engine protocol over plain arrays, readable from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...checks import one_of
from ...errors import ForwardError, Unsupported
from ...sampling import metrics
from ..abilities import OWN
from ..base import Engine, EngineInfo, HostOutput, Row, Score, ScoreSpan
from ..checkpoint import Checkpoint, open_checkpoint, read_config
from ..source import Progress
from ..threads import BlasThreads
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
            extra={"max_threads": self._threads.max_threads},
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
