"""A Transformers model that an engine holds: what both kinds of torch engine do with it alike."""

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
from .copied import lasting_buffers, shares_weights
from .cuda import free_bytes
from .execution import on_engine_stream
from .lora import LoraAdapters
from .model import context_of, fingerprint_of, freeze_rope
from .output import DeviceLogits
from .owned import Owned
from .sampling.check import difference_of_draws
from .sampling.drawer import TorchSampler
from .select_backend import check_kernels
from .stepped import OptimizerSteps
from .threads import CpuThreads
from .upload import upload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..._core.sampling.params import SamplingParams
    from ..._core.sampling.sampler import DrawBatch
    from ..._core.tokens.tokenizer import Tokenizer


class TransformersEngine(Engine):
    """An engine over a Transformers model, its tensors perhaps an owner's.

    `model` is the engine's own copy of the modules; the owner keeps using the original.
    brought: the tokenizer in the model's own file; None: the tokenizer has files of its own.
    sampling: the sampling parameters that the model's own file names; None if it names none.
    """

    info: EngineInfo
    model: PreTrainedModel
    brought: Tokenizer | None = None
    sampling: SamplingParams | None = None

    def __init__(
        self, model: PreTrainedModel, *, n_ctx: int | None, kernels: bool | None = None
    ) -> None:
        """kernels: whether tokens are drawn by those of Triton; None: where there are some."""
        check_model(model)
        self.model = model.eval()
        model.config.output_router_logits = False
        self._n_asked = context_of(model, n_ctx)
        # The load check's paths come first, however short those are that are asked for.
        self._n_positions = max(self._n_asked, min(LONGEST, context_of(model, None)))
        rope = freeze_rope(model, self._n_positions)
        self._lora = LoraAdapters(model)
        self._device = model.device
        self._threads = CpuThreads(self._device)
        self._drawer = TorchSampler(self._device, kernels=kernels, threads=self._threads)
        self._closed = False
        self._parameters = list(model.parameters())
        self._counted: list[Tensor] = [p for p in self._parameters if not p.is_inference()]
        lasting = list(lasting_buffers(model))
        self._read_where_they_lie = [*self._parameters, *lasting]
        self._lasting = [(each, each._version) for each in lasting if not each.is_inference()]
        self._steps = OptimizerSteps(self._parameters)
        self._owned: Owned | None = None
        # Of the weights: a mark, what they were named then, and what is called `info.fingerprint`.
        self._named: tuple[object, str] = None, ""
        self._name_at_first = ""
        self._replaced = ""
        # Whoever converts or moves the model it handed over changes these very objects.
        self._watched = next((p for p in model.parameters() if p.is_floating_point()), None)
        self._as_was = None if self._watched is None else self._watched.detach()  # keeps its place
        self._known_as = self._kind()
        named = {"rope": rope, "quantised": quantised(model)}
        self._extra: dict[str, Any] = {name: value for name, value in named.items() if value}

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        """Draw from kept rows where steps draw, too; see Engine.draw."""
        if not self._drawer.can(batch):
            return self._drawer.on_host(np.stack([row.logits() for row in rows]), batch)
        with on_engine_stream(self._device):
            logits = torch.stack([self._here(row) for row in rows])
        return self._drawer.draw(logits, batch)

    def _here(self, row: RetainedRow) -> Tensor:
        """Return a kept row on the device: float32 [V]."""
        if isinstance(row.rows, DeviceLogits):
            return row.rows.tensor[row.rows.place(row.number)].float()
        return upload(row.logits(), self._device)

    def _check_draws(self, dtype: torch.dtype) -> None:
        """Have draws made by what draws as the reference does here. dtype: of the logits.

        Raises: ModelLoadError where there is no memory for it, or it broke the device.
        """
        drawer = self._drawer
        while drawer.is_asked:
            try:
                why = difference_of_draws(drawer, self.info.n_vocab, dtype)
            except Exception as error:
                if is_out_of_memory(error):
                    raise ModelLoadError(
                        f"there is no memory left to draw with: {error}"
                    ) from error
                why = f"{type(error).__name__}: {error}"
                check_kernels(self._device, why)
            if not why:
                return
            drawer.step_down(why)

    def _free_bytes(self) -> int | None:
        """Return what a card has left now; None on a host."""
        return free_bytes(self._device) if self._device.type == "cuda" else None

    def tokenizer(self) -> Tokenizer | None:
        return self.brought

    def sampling_defaults(self) -> SamplingParams | None:
        return self.sampling

    def watch(self, owned: PreTrainedModel) -> None:
        """Refuse to run while something in the owner's model is another than it is in this one."""
        self._owned = Owned(owned, shares_weights=shares_weights(owned))
        # A buffer that the model writes to as it runs, as the load check ran it, says nothing.
        self._counted += [each for each, version in self._lasting if each._version == version]
        self._name_at_first = self._own_name()
        self._note_name()

    def weights_version(self) -> tuple[int, int, str]:
        """Count the changes that PyTorch has seen of the parameters, and of buffers that an owner
        saves with them, 0.05 µs each, and the steps of their optimizers. With it, where the first
        one lies: a model that was converted and turned back has lost digits; and what the owner has
        replaced, see `watch`.

        What is written through `.data`, or was made in inference mode, it does not count.
        """
        place = 0 if self._watched is None else self._watched.data_ptr()
        n_written = sum([parameter._version for parameter in self._counted])
        if self._owned is not None:
            self._replaced = self._owned.replaced()
        return n_written + self._steps.n, place, self._replaced

    def fingerprint(self) -> str:
        """Name the weights as they are now; see Engine.fingerprint. Cost where they have changed:
        some 5 ms, once a change.
        """
        before, name = self._named
        if self._closed or (now := self.weights_version()) == before:
            return name
        name = self._own_name()
        if name == self._name_at_first:
            name = self.info.fingerprint
        self._named = now, name
        return name

    def _note_name(self) -> None:
        self._named = self.weights_version(), self.info.fingerprint

    def _own_name(self) -> str:
        with on_engine_stream(self._device):
            return fingerprint_of(self.model)

    def _may_be_others(self) -> None:
        """Look at an owner's weights again: PyTorch does not count all that is written to them."""
        if self._owned is not None:
            self._named = None, self._named[1]

    def _weights_lie(self) -> int:
        """Return another number once parameters, or the buffers that are saved with them, lie
        elsewhere: 0.1 µs each.
        """
        return sum([each.data_ptr() for each in self._read_where_they_lie])

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter in PEFT's format, for rows that name it. See `lora.Adapters.add`."""
        return self._lora.add(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; rows that still name it are refused."""
        self._lora.remove(name)

    def _let_go(self) -> None:
        """Give the model's memory back."""
        self._parameters, self._counted, self._lasting = [], [], []
        self._read_where_they_lie = []
        self._steps.stop()
        self._watched = self._as_was = self._owned = None
        del self.model, self._lora

    # What every forward checks

    def _kind(self) -> tuple[torch.dtype, torch.device] | None:
        watched = self._watched
        return None if watched is None else (watched.dtype, watched.device)

    def _refuse_changed(self) -> None:
        """Refuse to run a closed model, or one that its owner has converted, moved or changed."""
        if self._closed:
            raise ForwardError("the engine is closed; load the model again")
        known, now = self._known_as, self._kind()
        if now != known and now is not None and known is not None:
            # What is converted back has lost digits, what is moved back has not.
            ways = "close this LM and load the model again"
            ways += ", or move the model back" if now[0] == known[0] else ""
            raise ForwardError(
                f"the model was {known[0]} on {known[1]} when it was handed over and is {now[0]} on"
                f" {now[1]} now; {ways}",
                hint=ways,
            )
        if self._replaced and self._owned is not None:  # it may be as it was by now
            self._replaced = self._owned.replaced()
        if self._replaced:
            raise ForwardError(
                f"{self._replaced} after the model was handed over, and the engine runs it as it"
                " was then; close this LM and load the model again, or put back what was there",
                hint="close this LM and load the model again, or put back what was there",
            )

    def _scores_of(
        self, row: Row, hidden: Tensor, head: Callable[[Tensor], Tensor], start: int = 0
    ) -> list[Score]:
        """Score a row's spans; hidden: [T, E] of its tokens from `start` on, of which `head` makes
        logits.
        """

        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            logits = head(hidden[first - start : last - start]).float().cpu()
            found: NDArray[np.float32] = logits.numpy()
            return found

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]
