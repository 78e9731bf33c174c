"""The NumPy engine: the engine protocol over plain arrays, readable from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ForwardError, Unsupported
from ...sampling import metrics
from ..base import Engine, EngineInfo, Row, Score, ScoreSpan
from ..checkpoint import Checkpoint, open_checkpoint, read_config
from ..host import HostOutput
from ..source import Progress
from .config import LlamaConfig, parse_config
from .fragments import NumpyFragments
from .model import Model
from .plan import Plan
from .threads import BlasThreads
from .weights import Floats, read_weights

_SCORE_ROWS = 64  # logits rows that exist at once while given tokens are scored


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
        dtype: str = "auto",
        n_ctx: int | None = None,
        threads: int | str = "auto",
        progress: Progress | None = None,
    ) -> NumpyEngine:
        """Load a Transformers-format folder; weights in any float format are computed in float32.

        Args:
            n_ctx: a context shorter than the model's own.
            threads: BLAS threads of a forward; "auto" finds them, or does as the environment says.
            progress: called with "load", layers read, layers in all and "".

        Raises:
            ModelLoadError: files are missing, broken or do not belong together.
            Unsupported: the architecture, or a dtype other than "auto" and "float32".
            ConfigError: n_ctx or threads is out of range.
        """
        if dtype not in ("auto", "float32"):
            raise Unsupported(
                f'the NumPy engine computes in float32, not {dtype}; leave dtype="auto", '
                'or use engine="torch"'
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
        model = self._open_model()
        if not rows:
            return HostOutput(np.empty((0, self.info.n_vocab), np.float32), [])
        with self._threads.limited(sum(row.n_tokens for row in rows)):
            return self._run(model, rows)

    def _run(self, model: Model, rows: Sequence[Row]) -> HostOutput:
        plan = self._plan
        if plan is None or not plan.serves(rows):
            self._plan = None
            plan = Plan(rows, self._config, self.fragments)
        ids = plan.begin(rows)
        _check_ids(ids, self.info.n_vocab)
        hidden = model.hidden(ids, plan)
        logits = model.logits(hidden[plan.wanted])
        scores = [
            [self._score(model, hidden[plan.first(index) :], span) for span in row.scores]
            for index, row in enumerate(rows)
        ]
        plan.commit()
        self._plan = plan
        return HostOutput(logits, scores)

    def hidden_states(self, rows: Sequence[Row]) -> list[Floats]:
        """Run rows and return their final hidden states, after the last norm."""
        model = self._open_model()
        self._plan = None
        with self._threads.limited(sum(row.n_tokens for row in rows)):
            plan = Plan(rows, self._config, self.fragments)
            ids = plan.begin(rows)
            _check_ids(ids, self.info.n_vocab)
            states = model.normed(model.hidden(ids, plan))
            plan.commit()
        starts = [plan.first(index) for index in range(len(rows))]
        return [states[at : at + row.n_tokens] for at, row in zip(starts, rows, strict=True)]

    def close(self) -> None:
        """Drop weights and KV; idempotent."""
        self._model = self._plan = None
        self.fragments = NumpyFragments(self._config)

    def _open_model(self) -> Model:
        if self._model is None:
            raise ForwardError("the engine is closed; load the model again")
        return self._model

    def _score(self, model: Model, hidden: Floats, span: ScoreSpan) -> Score:
        """Score one span chunk by chunk, so that no [T, V] is made."""
        targets = np.array(span.targets, np.int64)
        _check_ids(targets, self.info.n_vocab)
        parts = []
        for lo in range(0, max(len(targets), 1), _SCORE_ROWS):
            chunk = targets[lo : lo + _SCORE_ROWS]
            first = span.start + lo
            logits = model.logits(hidden[first : first + len(chunk)])
            parts.append(metrics.score(logits, chunk, span.top))
        return parts[0] if len(parts) == 1 else _concatenated(parts)


def _check_ids(ids: NDArray[np.int64], n_vocab: int) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_vocab:
        wrong = ids[(ids < 0) | (ids >= n_vocab)][0]
        raise ForwardError(
            f"token id {wrong} is outside the model's vocabulary of {n_vocab}; "
            f"ids are 0 to {n_vocab - 1}"
        )


def _concatenated(parts: Sequence[Score]) -> Score:
    return Score(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        entropies=np.concatenate([part.entropies for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
