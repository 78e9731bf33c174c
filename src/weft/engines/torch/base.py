"""Code shared by both torch engines: sampling, weight changes, adapters and scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._core.sampling import metrics
from ...errors import ForwardError, ModelLoadError, is_out_of_memory
from ..base import Draws, Engine, EngineInfo, RetainedRow, Row, Score
from .check import LONGEST, quantised
from .compatibility import check_model
from .cuda import free_bytes, to_device
from .execution import on_engine_stream
from .lora import LoraAdapters
from .model import context_length_of, fingerprint_of, freeze_rope
from .model_guard import ModelGuard
from .output import DeviceLogits
from .sampling.check import sampling_difference
from .sampling.sampler import TorchSampler
from .select_backend import check_kernels
from .threads import CpuThreads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..._core.sampling.params import SamplingParams
    from ..._core.sampling.sampler import DrawBatch
    from ..._core.tokens.tokenizer import Tokenizer


class TransformersEngine(Engine):
    """An engine over a Transformers model, whose weights may be shared with the user's model
    object.

    Attributes:
        model: the engine's own copy of the modules.
        file_tokenizer: tokenizer from the model's own file; None if it has files of its own.
        sampling: sampling parameters from the model's own file; None if it has none.
    """

    info: EngineInfo
    model: PreTrainedModel
    file_tokenizer: Tokenizer | None = None
    sampling: SamplingParams | None = None

    def __init__(
        self, model: PreTrainedModel, *, n_ctx: int | None, kernels: bool | None = None
    ) -> None:
        """kernels: sample with Triton kernels; None: if the device supports them."""
        check_model(model)
        self.model = model.eval()
        model.config.output_router_logits = False
        self._context_length = context_length_of(model, n_ctx)
        # The load check needs paths of `LONGEST` tokens, even if n_ctx is smaller.
        self._max_positions = max(
            self._context_length, min(LONGEST, context_length_of(model, None))
        )
        rope = freeze_rope(model, self._max_positions)
        self._lora = LoraAdapters(model)
        self._device = model.device
        self._threads = CpuThreads(self._device)
        self._sampler = TorchSampler(self._device, kernels=kernels, threads=self._threads)
        self._closed = False
        self._guard = ModelGuard(model)
        self._is_shared = False  # the user has the weights, too, and may change them
        self._stored_fingerprint: tuple[object, str] = (
            None,
            "",
        )  # a version of the weights and their name
        self._initial_fingerprint = ""  # the name for which `info.fingerprint` stands
        extra = {"rope": rope, "quantised": quantised(model)}
        self._extra: dict[str, Any] = {name: value for name, value in extra.items() if value}

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        """Sample from retained logits on the device that samples for steps; see Engine.draw."""
        if not self._sampler.supports(batch):
            return self._sampler.on_host(np.stack([row.logits() for row in rows]), batch)
        with on_engine_stream(self._device):
            logits = torch.stack([self._to_device(row) for row in rows])
        return self._sampler.draw(logits, batch)

    def _to_device(self, row: RetainedRow) -> Tensor:
        """Return retained logits on the device: float32 [V]."""
        if isinstance(row.rows, DeviceLogits):
            return row.rows.tensor[row.rows.place(row.number)].float()
        return to_device(row.logits(), self._device)

    def _check_draws(self, dtype: torch.dtype) -> None:
        """Sample on the host if the kernels differ from the reference. dtype: of the logits.

        Raises: ModelLoadError if memory is exhausted or a kernel broke the device.
        """
        sampler = self._sampler
        if not sampler.on_device:
            return
        try:
            why = sampling_difference(sampler, self.info.n_vocab, dtype)
        except Exception as error:
            if is_out_of_memory(error):
                raise ModelLoadError(f"there is no memory left to draw with: {error}") from error
            why = f"{type(error).__name__}: {error}"
            check_kernels(self._device, why)
        if why:
            sampler.fall_back(why)

    def _free_bytes(self) -> int | None:
        """Return the free memory of a GPU in bytes; None on a CPU."""
        return free_bytes(self._device) if self._device.type == "cuda" else None

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model's own file (GGUF); None if it has files of its own."""
        return self.file_tokenizer

    def sampling_defaults(self) -> SamplingParams | None:
        """Return the sampling parameters of the model's own file; None if it has none."""
        return self.sampling

    def watch(self, model: PreTrainedModel) -> None:
        """Also check the model object that its user keeps; see `ModelGuard`."""
        self._guard.watch(model)
        self._is_shared = True
        self._initial_fingerprint = self._compute_fingerprint()
        self._store_fingerprint()

    def weights_version(self) -> tuple[int, int, str]:
        """Return a value that differs after a change of the weights; see `ModelGuard.version`."""
        return self._guard.version()

    def fingerprint(self) -> str:
        """Return the name of the current weights; see Engine.fingerprint.

        Cost: some 5 ms after a change of the weights.
        """
        previous, name = self._stored_fingerprint
        if self._closed or (version := self.weights_version()) == previous:
            return name
        name = self._compute_fingerprint()
        if name == self._initial_fingerprint:
            name = self.info.fingerprint
        self._stored_fingerprint = version, name
        return name

    def _store_fingerprint(self) -> None:
        """Remember `info.fingerprint` as that of the current version of the weights."""
        self._stored_fingerprint = self.weights_version(), self.info.fingerprint

    def _compute_fingerprint(self) -> str:
        """Return the fingerprint of the current weights."""
        with on_engine_stream(self._device):
            return fingerprint_of(self.model)

    def _distrust_version(self) -> None:
        """Compute the fingerprint again at the next call: PyTorch does not count every write."""
        if self._is_shared:
            self._stored_fingerprint = None, self._stored_fingerprint[1]

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter in PEFT's format for rows that name it; see `LoraAdapters.add`."""
        return self._lora.add(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; rows that still name it fail."""
        self._lora.remove(name)

    def _release(self) -> None:
        """Release the model, so that its memory can be freed."""
        self._guard.close()
        del self.model, self._lora

    def _check_model(self) -> None:
        """Raise ForwardError if the engine is closed, or the user has changed the model."""
        if self._closed:
            raise ForwardError("the engine is closed; load the model again")
        self._guard.check()

    def _score_row(
        self, row: Row, hidden: Tensor, head: Callable[[Tensor], Tensor], start: int = 0
    ) -> list[Score]:
        """Score a row's spans.

        Args:
            hidden: [T, E] of the row's tokens from index `start` on.
            head: maps hidden states to logits.
        """

        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = (
                head(hidden[first - start : last - start]).float().cpu().numpy()
            )
            return logits

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]
