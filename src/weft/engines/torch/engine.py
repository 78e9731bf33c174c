"""The torch engine: decoder-only Transformers models, their own code, one packed forward a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    ForwardError,
    ModelLoadError,
    Unsupported,
    WeftError,
)
from ...sampling import metrics
from ..abilities import OWN
from ..base import Engine, EngineInfo, HostDraws, LateTokens, Output, Row, Score, Span, check_rows
from .check import check_paths, check_tree, refuse_model, refuse_probe
from .fused import FusedDecoder
from .hook import NAME, number_layers, probing, seat_modules
from .layout import Layout
from .lora import LoraAdapters
from .memory import KVMemory, KVStep
from .model import (
    Head,
    config_of,
    context_of,
    fingerprint_of,
    freeze_rope,
    load_model,
    resolve_device,
    structural_copy,
)
from .padded.step import PaddedMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...sampling.sampler import DrawBatch
    from ..source import Progress

Answer = TypeVar("Answer")


class TorchEngine(Engine):
    """A decoder-only Transformers model on one device.

    `model` is the engine's own copy; its tensors may be an owner's, who keeps using the original.
    """

    info: EngineInfo
    fragments: KVMemory
    model: PreTrainedModel
    _now: Head | FusedDecoder  # what the forward under way runs

    def __init__(self, model: PreTrainedModel, *, n_ctx: int | None, fingerprint: str) -> None:
        """Take over `model`, which nobody else uses any more; see `load` and `adopt`."""
        refuse_model(model)
        self.model = model.eval()
        model.config.output_router_logits = False
        n_positions = context_of(model.config, n_ctx)
        rope = freeze_rope(model, n_positions)
        self._call = seat_modules(model)
        self._lora = LoraAdapters(model)
        self._device = model.device
        self._closed = False
        self._counted = [each for each in model.parameters() if not each.is_inference()]
        extra: dict[str, Any] = {"rope": rope} if rope else {}
        if self._device.type == "cuda":
            extra["free_bytes"] = torch.cuda.mem_get_info(self._device)[0]
        self._start(n_positions, fingerprint, extra)

    @classmethod
    def refuse(cls, folder: Path) -> None:
        """Refuse what Transformers does not know and what has no KV; see `Engine.refuse`."""
        config_of(folder, trust_remote_code=False)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> TorchEngine:
        """Load a Transformers-format folder.

        Args:
            dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
            n_ctx: longest path; None for all the model knows. Rotary frequencies that depend on
                the length are chosen for it, once.

        Raises:
            ModelLoadError: files are missing or broken.
            Unsupported: the model is of a kind this engine cannot run; the message says why.
        """
        place = resolve_device(device)
        model, fingerprint = load_model(
            Path(source), place, dtype, trust_remote_code=trust_remote_code, progress=progress
        )
        return cls(model, n_ctx=n_ctx, fingerprint=fingerprint)

    @classmethod
    def adopt(cls, model: Any, *, n_ctx: int | None = None) -> TorchEngine:
        """Run an already loaded Transformers model where it is; the object itself stays untouched.

        Raises:
            ConfigError: it is no Transformers model.
            Unsupported: see `load`.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"a {type(model).__name__} is not a Transformers model; hand over a "
                "PreTrainedModel (of a PEFT model: merge_and_unload())"
            )
        refuse_model(model)
        return cls(structural_copy(model), n_ctx=n_ctx, fingerprint=fingerprint_of(model))

    # The protocol

    def weights_mark(self) -> int:
        """Count the changes that PyTorch has seen of the parameters: 0.05 µs each.

        What is written through `.data`, or was made in inference mode, it does not count.
        """
        return sum([parameter._version for parameter in self._counted])

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run all rows as one packed sequence; see Engine.forward."""

        def answers(step: KVStep, hidden: Tensor) -> TorchOutput:
            scores = [self._scores(row, step.starts[i], hidden) for i, row in enumerate(rows)]
            return TorchOutput(self._logits(step, rows, hidden), scores)

        return self._run(rows, answers)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the base model's last hidden states; see Engine.hidden_states."""

        def states(step: KVStep, hidden: Tensor) -> list[NDArray[np.float32]]:
            found = hidden.float().cpu().numpy()
            return [found[at : at + r.n_tokens] for at, r in zip(step.starts, rows, strict=True)]

        return self._run(rows, states)

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter in PEFT's format, for rows that name it. See `lora.Adapters.add`."""
        return self._lora.add(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; rows that still name it are refused."""
        self._lora.remove(name)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fragments.clear()
            del self._head, self._fused, self._now, self.model, self._modules, self._lora

    def prefix_cache(self, spans: Sequence[Span]) -> DynamicCache:
        """Copy a path's KV into a cache object that the Transformers model itself accepts.

        Args:
            spans: the path from the root, as in `Row.path`.
        """
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            pairs = [self.fragments.views(s.fragment, s.length) for s in spans if s.length]
            for layer, module in enumerate(self._modules):
                if pairs:
                    keys = torch.cat([keys[layer] for keys, _ in pairs], 2)
                    values = torch.cat([values[layer] for _, values in pairs], 2)
                    cache.update(keys, values, getattr(module, "layer_idx", layer))
        return cache

    # Loading

    @torch.inference_mode()
    def _start(self, n_positions: int, fingerprint: str, extra: dict[str, Any]) -> None:
        """Learn the KV layout from a plain forward, then hold a small tree against the model."""
        model, paths = self.model, check_paths(self.model.get_input_embeddings().num_embeddings)
        try:
            own = model(input_ids=paths.to(self._device), use_cache=False).logits.float().cpu()
            model.set_attn_implementation(NAME)
            self._head = self._now = Head(model)
            with probing(self._call) as probe:
                positions = torch.arange(8, device=self._device)[None]
                hidden = self._head.hidden(paths[:1, :8].to(self._device), positions)
                n_vocab, n_embd = self._head.logits(hidden).shape[-1], hidden.shape[-1]
        except EngineError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{type(model).__name__} failed on a first forward: {type(error).__name__}: {error}"
            ) from error
        refuse_probe(model, probe, n_positions)
        number_layers(probe)
        self._modules = probe.modules
        layout = Layout.of(probe.shapes, self._device)
        self.fragments = PaddedMemory(layout)
        self.info = EngineInfo(
            name="torch",
            model=Path(model.config.name_or_path).name or model.config.model_type,
            n_layers=layout.n_layers,
            n_vocab=n_vocab,
            n_positions=n_positions,
            kv_bytes_per_token=layout.slot_bytes,
            dtype=str(model.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            device=str(self._device),
            n_embd=n_embd,
            abilities=OWN["torch"],
            extra=extra,
        )
        self._fused = FusedDecoder.of(model, probe.specs, self._call)
        try:
            check_tree(self, own)
        except Unsupported:
            if self._fused is None:
                raise
            self._fused = None  # its own code does something else by now
            check_tree(self, own)

    # One forward

    def _tokens_of(self, row: Row) -> Sequence[int]:
        n, limit = row.position + row.n_tokens, self.info.n_positions
        if n > limit:
            raise ContextOverflow(
                f"a path of {n} tokens is longer than the context of {limit}",
                n_tokens=n,
                n_ctx=limit,
            )
        if isinstance(row.tokens, LateTokens):
            return [int(row.tokens.draws.result().ids[row.tokens.number])]
        n_vocab = self.info.n_vocab
        if min(row.tokens) < 0 or max(row.tokens) >= n_vocab:
            raise ConfigError(
                f"token ids must be 0 to {n_vocab - 1}; got {min(row.tokens)} to {max(row.tokens)}"
            )
        return row.tokens

    def _run(self, rows: Sequence[Row], answer: Callable[[KVStep, Tensor], Answer]) -> Answer:
        """Run rows and keep their KV; `answer` makes of the step and the hidden states [T, E] what
        is asked. No fragment has grown where something fails.
        """
        if self._closed:
            raise ForwardError("the engine is closed; load the model again")
        check_rows(rows)
        tokens = [self._tokens_of(row) for row in rows]
        try:
            step = self.fragments.begin(rows)
            answers = answer(step, self._hidden(step, rows, tokens))
            step.commit()
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error
        return answers

    def _hidden(self, step: KVStep, rows: Sequence[Row], tokens: list[Sequence[int]]) -> Tensor:
        adapter = rows[0].adapter if rows else None
        self._lora.use(adapter)  # it is added by hooks on modules
        fused = self._fused if adapter is None else None
        if fused is not None and fused.is_hooked(self._lora.n_hooks):
            fused = None
        self._now = self._head if fused is None else fused
        ids = [token for i in step.order for token in tokens[i]]
        packed = torch.tensor([ids, step.positions], device=self._device)
        self._call.step = step
        try:
            return self._now.hidden(packed[:1], packed[1:])
        finally:
            self._call.step = None

    def _logits(self, step: KVStep, rows: Sequence[Row], hidden: Tensor) -> Tensor:
        at = [step.starts[i] + local for i, row in enumerate(rows) for local in row.logits_at]
        if not at:
            return torch.empty(0, self.info.n_vocab, device=self._device)
        if at != list(range(len(hidden))):
            hidden = hidden[torch.tensor(at, device=self._device)]
        return self._now.logits(hidden)

    def _scores(self, row: Row, start: int, hidden: Tensor) -> list[Score]:
        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            logits = self._now.logits(hidden[start + first : start + last]).float().cpu()
            found: NDArray[np.float32] = logits.numpy()
            return found

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]


class TorchOutput(Output):
    """Logits [N, V] on the engine's device and in its dtype; scores on the host."""

    __slots__ = ("_device_logits", "_host_logits", "_scores")

    def __init__(self, logits: Tensor, scores: list[list[Score]]) -> None:
        self._device_logits = logits
        self._host_logits: NDArray[np.float32] | None = None
        self._scores = scores

    def wait(self) -> None:
        self._host()

    def logits(self, index: int) -> NDArray[np.float32]:
        return self._host()[index].copy()

    def scores(self) -> list[list[Score]]:
        return self._scores

    def draw(self, batch: DrawBatch) -> HostDraws:
        return HostDraws(
            batch.chain.draw(self._host(), batch.rows, batch.positions, kept=batch.kept)
        )

    def _host(self) -> NDArray[np.float32]:
        if self._host_logits is None:
            self._host_logits = self._device_logits.float().cpu().numpy()
        return self._host_logits
