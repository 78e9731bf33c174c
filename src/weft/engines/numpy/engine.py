"""The NumPy engine: a complete, readable implementation of the engine protocol."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..._core.sampling import metrics
from ..._core.sampling.params import SamplingParams
from ..._core.system_resources import bytes_left
from ..._core.tokens.tokenizer import Tokenizer
from ..._core.validation import check_choice
from ...errors import ForwardError, Unsupported
from ..base import Engine, EngineInfo, HostOutput, Row, Score, ScoreSpan
from ..capabilities import OWN
from ..checkpoint import Checkpoint, open_checkpoint, read_config
from ..gguf import read_gguf
from ..gguf.checkpoint import GGUFCheckpoint
from ..gguf.families import check_numpy
from ..gguf.sampling import sampling_of
from ..gguf.tokenizer import read_tokenizer
from ..hub import Progress
from ..threads import BlasThreads
from .config import LlamaConfig, frequencies, parse_config
from .kv import NumpyFragments
from .model import Floats, Model, read_weights
from .step import StepPlan

_log = logging.getLogger("weft.engines")

Result = TypeVar("Result")

_DTYPES = ("auto", "float32", "bfloat16")
_MEMORY_SHARE = 0.8  # of the free memory, for weights in float32


class NumpyEngine(Engine):
    """A Llama-family model, computed in float32; usually created by `load`."""

    fragments: NumpyFragments

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LlamaConfig,
        *,
        dtype: str = "float32",
        threads: int | str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """Read the weights.

        Args:
            checkpoint: tensors to read.
            config: shape of the model.
            dtype: of the weights in memory, "float32" or "bfloat16".
            threads: BLAS threads of a forward; see `load`.
            progress: callback per layer.
        """
        self._config = config
        self._threads = BlasThreads(threads)
        self._checkpoint = checkpoint
        weights = read_weights(checkpoint, config, is_packed=dtype == "bfloat16", progress=progress)
        self._model: Model | None = Model(config, weights)
        self._plan: StepPlan | None = None
        self.fragments = NumpyFragments(config)
        self.info = EngineInfo(
            name="numpy",
            model=str(checkpoint.folder),
            n_layers=config.n_layers,
            n_vocab=config.n_vocab,
            context_length=config.context_length,
            kv_bytes_per_token=config.kv_bytes_per_token,
            dtype="float32",
            fingerprint=checkpoint.fingerprint() + ("" if dtype == "float32" else f"-{dtype}"),
            n_embd=config.n_hidden,
            capabilities=OWN["numpy"],
            extra={"max_threads": self._threads.max_threads, "weights": dtype},
        )

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Check that a folder or GGUF file is of the Llama family; see `Engine.check_supported`."""
        is_gguf = folder.suffix.lower() == ".gguf"
        config = parse_config(_open_checkpoint(folder).config if is_gguf else read_config(folder))
        frequencies(config.rope, config.head_dim)

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
        """Load a Transformers-format folder or a GGUF file of the Llama family.

        Args:
            folder: the folder, or the GGUF file, whose weights are dequantised.
            device: "auto" or "cpu", which are the same.
            dtype: of the weights in memory; computation is in float32. "bfloat16" halves the
                memory. A step takes 1.7 times as long with one row, 1.1 times with eight. "auto":
                float32 if it takes at most 80 % of the free memory, else bfloat16.
            n_ctx: a context shorter than the model's own.
            threads: BLAS threads of a forward; "auto" uses the environment variables, else
                measurements.
            progress: called with "load", layers read, total layers and "".

        Raises:
            ModelLoadError: files are missing, broken or do not belong together.
            Unsupported: the architecture, or another dtype.
            ConfigError: n_ctx or threads is out of range, or the device is another one.
        """
        check_choice(
            "device", device, ("auto", "cpu"), ': the numpy engine runs on the CPU; try "torch"'
        )
        if dtype not in _DTYPES:
            raise Unsupported(
                f"dtype is {dtype!r}; allowed are {', '.join(map(repr, _DTYPES))} on the numpy"
                ' engine; try engine="torch"'
            )
        checkpoint = _open_checkpoint(Path(folder))
        config = parse_config(checkpoint.config, n_ctx=n_ctx)
        if dtype == "auto":
            dtype = _auto_dtype(checkpoint)
        return cls(checkpoint, config, dtype=dtype, threads=threads, progress=progress)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of a GGUF file; None for a folder, which has it as files."""
        checkpoint = self._checkpoint
        return read_tokenizer(checkpoint.header) if isinstance(checkpoint, GGUFCheckpoint) else None

    def sampling_defaults(self) -> SamplingParams | None:
        """Return the sampling parameters of a GGUF file; None for a folder."""
        checkpoint = self._checkpoint
        return sampling_of(checkpoint.header) if isinstance(checkpoint, GGUFCheckpoint) else None

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Run all rows in one pass over the layers.

        Raises:
            ForwardError: a token id, a position or a logits index is out of range, or prefixes and
                positions disagree. No fragment's length has changed then.
        """
        if not rows:
            self._open_model()
            return HostOutput(np.empty((0, self.info.n_vocab), np.float32), [])

        def answers(model: Model, plan: StepPlan, hidden: Floats) -> HostOutput:
            scores = [
                [self._score(model, hidden, plan.first(index), span) for span in row.scores]
                for index, row in enumerate(rows)
            ]
            return HostOutput(model.logits(hidden[plan.logits_indices]), scores)

        return self._run(rows, answers)

    def hidden_states(self, rows: Sequence[Row]) -> list[Floats]:
        """Run rows, as `forward` does, and return their hidden states after the last norm.

        Returns: float32 [T, E] for each row. Rows with a `kv_out` store their KV.
        """

        def states(model: Model, plan: StepPlan, hidden: Floats) -> list[Floats]:
            final, starts = model.final_norm(hidden), [plan.first(i) for i in range(len(rows))]
            return [final[at : at + row.n_tokens] for at, row in zip(starts, rows, strict=True)]

        return self._run(rows, states)

    def _run(
        self, rows: Sequence[Row], finish: Callable[[Model, StepPlan, Floats], Result]
    ) -> Result:
        """Run rows and commit their KV; `finish` gets the hidden states [T, E]."""
        model = self._open_model()
        with self._threads.limited(sum([row.n_tokens for row in rows])):
            plan, self._plan = self._plan, None
            if plan is None or not plan.fits(rows):
                plan = StepPlan(rows, self._config, self.fragments)
            ids = plan.start(rows)
            _check_ids(ids, self.info.n_vocab)
            result = finish(model, plan, model.hidden(ids, plan))
            plan.commit()
            self._plan = plan
        return result

    def close(self) -> None:
        """Release weights and KV. Idempotent."""
        self._model = self._plan = None
        self.fragments = NumpyFragments(self._config)

    def _open_model(self) -> Model:
        """Return the model. Raise ForwardError if the engine is closed."""
        if self._model is None:
            raise ForwardError("the engine is closed; load the model again")
        return self._model

    def _score(self, model: Model, hidden: Floats, start: int, span: ScoreSpan) -> Score:
        """Score the target tokens of one `ScoreSpan`.

        Args:
            model: the model, for its LM head.
            hidden: float32 [N, E], output of the last layer for all packed tokens.
            start: packed index of the row's first token.
            span: targets to score.
        """
        return metrics.score_span(
            span,
            self.info.n_vocab,
            lambda first, last: model.logits(hidden[start + first : start + last]),
        )


def _open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder in Transformers' format, or a GGUF file, as a `Checkpoint`. Reads no
    weights.
    """
    if path.suffix.lower() != ".gguf":
        return open_checkpoint(path)
    header = read_gguf(path)
    check_numpy(header)
    return GGUFCheckpoint(header)


def _auto_dtype(checkpoint: Checkpoint) -> str:
    """Return "float32", or "bfloat16" (and log a warning) if float32 weights need too much
    memory.
    """
    left = bytes_left()
    n_values = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if left is None or 4 * n_values <= _MEMORY_SHARE * left:
        return "float32"
    _log.warning(
        "%s needs %d MiB in float32, and %d MiB of memory are free: its weights are stored in"
        ' bfloat16, which needs half and is slower; dtype="float32" forces float32',
        checkpoint.folder,
        4 * n_values >> 20,
        left >> 20,
    )
    return "bfloat16"


def _check_ids(ids: NDArray[np.int64], n_vocab: int) -> None:
    """Raise ForwardError if a token id is outside the vocabulary."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_vocab:
        wrong = ids[(ids < 0) | (ids >= n_vocab)][0]
        raise ForwardError(
            f"token id {wrong} is outside the model's vocabulary of {n_vocab}; "
            f"ids are 0 to {n_vocab - 1}"
        )
