"""The torch engine: decoder-only Transformers models, their own code, one packed forward a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..._core.validation import check_choice
from ...errors import ConfigError, EngineError, ForwardError, Unsupported, WeftError
from ..base import EngineInfo, FutureTokens, Row, Score, Span, check_rows
from ..capabilities import OWN
from .attention_hook import (
    NAME,
    PROBE,
    attach_context,
    attention_implementation,
    number_layers,
    probing,
)
from .base import TransformersEngine
from .batch_invariance import check_batch_invariance, make_batch_invariant
from .check import PlainOutputs, check_tree
from .compatibility import (
    PrefixCachingUnsupported,
    check_loaded_model,
    check_model,
    check_probe,
    prefix_caching_obstacle,
)
from .execution import autocast_disabled, on_engine_stream
from .fused.decoder import FusedDecoder
from .fused.modules import fuse_modules
from .gguf_loader import load_gguf
from .input_tensors import CachedTensor, InputIds
from .kv_backend import AttentionStep, KVBackend
from .layout import Layout
from .model import (
    Head,
    cache_name,
    config_of,
    disable_padding_check,
    fingerprint_of,
    load_model,
    resolve_device,
)
from .model_copy import copy_sharing_weights
from .module_hooks import HookWatcher
from .output import TorchOutput
from .padded.canonical import CanonicalBackend
from .paged.capture import capturing
from .recompute.engine import RecomputeEngine
from .select_backend import (
    BackendFactory,
    KVChoice,
    check_graphs,
    check_kernels,
    check_reproducible,
    has_kernels,
    kv_backends,
    prefers_kernels,
    step_graphs,
    with_smaller_tiles,
)
from .threads import one_thread_if_busy
from .weight_layout import optimize_layout, pack_or_raise, upcast_on_use
from .weights.experts import PackedExperts
from .weights.packed import PackedLinear

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..hub import Progress
    from .paged.cuda_graph import CudaGraphRunner

_log = logging.getLogger("weft.engines.torch")

Answer = TypeVar("Answer")

_PACKED_WEIGHTS = (None, True, False)
_STEP_TOKENS = 2048  # their logits are the most memory that a step takes


class TorchEngine(TransformersEngine):
    """A decoder-only Transformers model on one device, its KV in fragments.

    `load` and `adopt` give a `RecomputeEngine` for a model whose KV cannot be held so.
    """

    fragments: KVBackend
    _graphs: CudaGraphRunner | None = None
    _now: Head | FusedDecoder  # what the forward under way runs

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        n_ctx: int | None,
        fingerprint: str,
        kv: KVChoice = "auto",
        graphs: bool | None = None,
        reproducible: bool = False,
    ) -> None:
        """Take over `model`, which nobody else uses any more; see `load` and `adopt`.

        Raises: PrefixCachingUnsupported if its attention does not use the attention interface; the
        model is then unchanged.
        """
        # Whoever asks for padded rows asks for no kernels.
        super().__init__(model, n_ctx=n_ctx, kernels=False if kv == "padded" else None)
        self._call = attach_context(model)
        disable_padding_check(model)
        own = attention_implementation(model)
        self._reproducible = reproducible
        if reproducible:
            self._threads.keep_all()
            make_batch_invariant(model)
        try:
            self._start(fingerprint, kv, graphs)
        except PrefixCachingUnsupported:
            model.set_attn_implementation(own)
            raise
        if reproducible:
            check_batch_invariance(self)
        self.fragments.release_unused()  # what the check took; what libraries keep of it stays
        if (free := self._free_bytes()) is not None:
            self._extra["free_bytes"] = free
        elif self._device.type == "cpu":
            self._extra["max_threads"] = torch.get_num_threads()
        self.info = replace(self.info, context_length=self._context_length)
        self._note_name()

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Reject models that Transformers does not know; see `Engine.check_supported`."""
        config_of(folder, trust_remote_code=False)

    @classmethod
    @one_thread_if_busy()
    @autocast_disabled()
    @torch.inference_mode(False)  # weights made in it could not be laid otherwise, or trained
    def load(
        cls,
        source: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantization_config: Any = None,
        state_bytes: int | None = None,
        kv: KVChoice = "auto",
        graphs: bool | None = None,
        packed_weights: bool | None = None,
        reproducible: bool = False,
        progress: Progress | None = None,
    ) -> TorchEngine | RecomputeEngine:
        """Load a Transformers-format folder, or a GGUF file, whose weights are dequantised.

        Args:
            dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own (of a GGUF
                file float32).
            n_ctx: longest path; None for all the model knows. Rotary frequencies that depend on
                the length are chosen for it, once.
            quantization_config: one of Transformers' (TorchAoConfig, BitsAndBytesConfig, …): the
                weights are quantised as they are read. A folder that is quantised needs none.
            state_bytes: see `RecomputeEngine`; for models of that kind alone.
            kv: "paged", a pool of slots and tree attention in Triton; "padded", rectangles and
                PyTorch's own operations; tokens are then sampled on the host; "auto": on CUDA
                "paged" if the model passes its check there, and "padded" elsewhere.
            graphs: play a step of paged KV from a CUDA graph, once some have been alike. None:
                where there is CUDA. True runs the same without one on a CPU, for tests.
            packed_weights: hold the linear weights as oneDNN reads them, which makes products on a
                CPU 1.1 to 2.5 times as fast; 16-bit ones of which it has no products are widened
                to float32 as they are met, block by block, 2.5 to 7 times as fast from 8 rows on.
                None: where it is faster. False: as they lie in the file, or by column.
            reproducible: a row's bits do not depend on other rows, so that a seed repeats a text
                while other calls run. Products have 16 rows each, and a step copies the KV of
                each path (kv="padded"). The load compares bits and refuses a model if they differ.

        Raises:
            ModelLoadError: files are missing or broken.
            Unsupported: this engine cannot run the model, or `reproducible` is True and rows depend
                on each other; the message gives the reason.
        """
        check_reproducible(reproducible, kv)
        place = resolve_device(device)
        kv_backends(kv, place)  # refuses before the weights are read
        check_graphs(graphs, kv)
        check_choice("packed_weights", packed_weights, _PACKED_WEIGHTS)
        if Path(source).suffix.lower() == ".gguf":
            if quantization_config is not None:
                raise ConfigError(
                    "quantization_config has no effect on a GGUF file, whose weights are"
                    " dequantised; leave it out"
                )
            found = load_gguf(Path(source), place, dtype)
            optimize_layout(found.model, packed_weights)
            engine = open_model(
                found.model,
                n_ctx=n_ctx,
                fingerprint=found.fingerprint,
                state_bytes=state_bytes,
                kv=kv,
                graphs=graphs,
                reproducible=reproducible,
            )
            engine.brought, engine.sampling = found.tokenizer, found.sampling
            return engine
        model, fingerprint = load_model(
            Path(source),
            place,
            dtype,
            trust_remote_code=trust_remote_code,
            quantization_config=quantization_config,
            packed_weights=packed_weights,
            progress=progress,
        )
        return open_model(
            model,
            n_ctx=n_ctx,
            fingerprint=fingerprint,
            state_bytes=state_bytes,
            kv=kv,
            graphs=graphs,
            reproducible=reproducible,
        )

    @classmethod
    @one_thread_if_busy()
    @autocast_disabled()
    def adopt(
        cls,
        model: Any,
        *,
        n_ctx: int | None = None,
        state_bytes: int | None = None,
        kv: KVChoice = "auto",
        graphs: bool | None = None,
        packed_weights: bool | None = None,
    ) -> TorchEngine | RecomputeEngine:
        """Run an already loaded Transformers model where it is; the object itself stays untouched.

        Args:
            packed_weights: hold the linear weights a second time as oneDNN reads them, which makes
                products on a CPU up to 2.5 times as fast; what is written into the model's counts.
                None: only what is widened as it is met, see `load`, which is held once.

        Raises:
            ConfigError: it is no Transformers model.
            Unsupported: see `load`.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"the model is of type {type(model).__name__}, not a Transformers model; hand over"
                " a PreTrainedModel (what is in a compiled model is its _orig_mod, in DataParallel"
                " its module, of a PEFT model merge_and_unload())"
            )
        kv_backends(kv, model.device)
        check_graphs(graphs, kv)
        check_choice("packed_weights", packed_weights, _PACKED_WEIGHTS)
        check_model(model)
        check_loaded_model(model)
        copied = copy_sharing_weights(model)
        if packed_weights:
            pack_or_raise(copied, keep=True)
        elif packed_weights is None and copied.device.type == "cpu":
            upcast_on_use(copied)
        name = fingerprint_of(model)
        engine = open_model(
            copied, n_ctx=n_ctx, fingerprint=name, state_bytes=state_bytes, kv=kv, graphs=graphs
        )
        engine.watch(model)
        return engine

    # The protocol

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run all rows as one packed sequence; see Engine.forward."""

        def answers(step: AttentionStep, hidden: Tensor) -> TorchOutput:
            def scores(row: Row, start: int) -> list[Score]:
                return self._score_row(row, hidden[start : start + row.n_tokens], self._now.logits)

            scored = [
                scores(row, start) if row.scores else []
                for row, start in zip(rows, step.starts, strict=True)
            ]
            return TorchOutput(self._logits(step, rows, hidden), scored, self._sampler)

        return self._run(rows, answers)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the base model's last hidden states; see Engine.hidden_states."""

        def states(step: AttentionStep, hidden: Tensor) -> list[NDArray[np.float32]]:
            found = hidden.float().cpu().numpy()
            return [found[at : at + r.n_tokens] for at, r in zip(step.starts, rows, strict=True)]

        return self._run(rows, states)

    def clear_caches(self) -> None:
        """Pack anew what an owner may have written to, and give back what is kept for later."""
        self.refresh_weights()
        if self._graphs is not None:
            self._graphs.clear()
        self.fragments.release_unused()

    def refresh_weights(self) -> None:
        """Pack weights anew. Captured steps read weights where they lie, and stay with the pool:
        between the steps of an optimizer both would be made again and again. Whoever wrote them may
        have done so on a stream of another thread's, so what comes next waits for the device.
        """
        self._distrust_version()
        if self._device.type == "cuda":
            with capturing:
                torch.cuda.synchronize(self._device)
        for module in self.model.modules():
            if isinstance(module, PackedLinear | PackedExperts):
                module.repack_on_use()

    def stats(self) -> dict[str, object]:
        """Return how steps were run so far, captured or not; empty where none is captured."""
        return {} if self._graphs is None else self._graphs.stats()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fragments.clear()
            self._graphs = None
            self._release()
            del self._head, self._fused, self._now, self._keepers, self._hooks

    def prefix_cache(self, spans: Sequence[Span]) -> DynamicCache:
        """Copy a path's KV into a cache object that the Transformers model itself accepts.

        Args:
            spans: the path from the root, as in `Row.path`.

        Raises:
            Unsupported: the model's cache is no keys and values, such as the latents of DeepSeek.
        """
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad(), on_engine_stream(self._device):
            self._check_cache_format()
            pairs = [self.fragments.views(s.fragment, s.length) for s in spans if s.length]
            for layer, (module, _) in enumerate(self._keepers):
                if pairs:
                    keys = torch.cat([keys[layer] for keys, _ in pairs], 2)
                    values = torch.cat([values[layer] for _, values in pairs], 2)
                    cache.update(keys, values, getattr(module, "layer_idx", layer))
        if self._device.type == "cuda":  # who reads it on another stream may let it go meanwhile
            reader = torch.cuda.current_stream(self._device)
            for kept in cache.layers:
                for tensor in (kept.keys, kept.values):
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(reader)
        return cache

    def _check_cache_format(self) -> None:
        """Hold what the model keeps of one token against the KV that its attention meets."""
        own = DynamicCache(config=self.model.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        try:
            given: dict[str, Any] = {cache_name(self.model): own, "use_cache": True}
            self.model(input_ids=ids, **given)
        except Exception as error:
            raise Unsupported(
                f"{type(self.model).__name__} takes no cache of keys and values ({error}), so none"
                " can be made of a path's KV; take lm.kv"
            ) from error
        for layer, (module, shape) in enumerate(self._keepers):
            kept: Any = own.layers[getattr(module, "layer_idx", layer)]
            if (*kept.keys.shape[1::2], kept.values.shape[3]) != shape[:3]:
                raise Unsupported(
                    f"the cache of {type(self.model).__name__} holds no keys and values as its"
                    " attention meets them, so none can be made of a path's KV; take lm.kv"
                )

    # Loading

    @torch.inference_mode()
    def _start(self, fingerprint: str, kv: KVChoice, graphs: bool | None) -> None:
        """Learn the KV layout from a plain forward, then hold a small tree against the model."""
        model, context_length = self.model, self._max_positions
        makers = [CanonicalBackend] if self._reproducible else kv_backends(kv, self._device)
        with self._threads.limited(1, "plain"):
            own = PlainOutputs.of(
                model, context_length, has_kernels=has_kernels(makers, self._device)
            )
        try:
            model.set_attn_implementation(PROBE)
            self._head = self._now = Head(model)
            with probing(self._call) as probe:
                positions = torch.arange(8, device=self._device)[None]
                hidden = self._head.hidden(own.paths[:1, :8].to(self._device), positions)
                logits = self._head.logits(hidden)
            model.set_attn_implementation(NAME)
        except EngineError:
            raise
        except Exception as error:
            raise PrefixCachingUnsupported(
                f"it fails with an attention that is not its own ({type(error).__name__}: {error})"
            ) from error
        check_probe(model, probe, context_length)
        number_layers(probe)
        self._keepers = probe.kv_layers
        layout = Layout.of(probe.shapes, self._device)
        self.info = EngineInfo(
            name="torch",
            model=Path(model.config.name_or_path).name or model.config.model_type,
            n_layers=layout.n_layers,
            n_vocab=logits.shape[-1],
            context_length=context_length,
            kv_bytes_per_token=layout.slot_bytes,
            dtype=layout.dtype,
            fingerprint=fingerprint,
            device=str(self._device),
            async_scheduling=self._device.type == "cuda",
            max_num_batched_tokens=_STEP_TOKENS if self._device.type == "cuda" else None,
            logits_on_device=self._device.type == "cuda",
            n_embd=hidden.shape[-1],
            capabilities=OWN["torch"],
            extra=self._extra,
        )
        self._ids = InputIds(self._device)
        self._wanted = CachedTensor(self._device)
        self._hooks = HookWatcher(model)
        self._check_draws(logits.dtype)
        fused = None
        if not self._reproducible:  # it multiplies all rows at once
            fused = FusedDecoder.of(model, probe.specs, self._call)
        if fused is None and prefers_kernels(makers):
            fuse_modules(model, self._call, hidden.dtype)
        *preferred, last = makers
        for make in preferred:
            try:
                self._use_backend(make, layout, graphs, fused, own)
            except (ConfigError, PrefixCachingUnsupported) as error:
                check_kernels(self._device, str(error))
                failed = str(error)
            else:
                return
        self._use_backend(last, layout, graphs, fused, own)
        if preferred:
            _log.warning("KV of %s lies in padded rows: %s", type(model).__name__, failed)

    def _use_backend(
        self,
        make: BackendFactory,
        layout: Layout,
        graphs: bool | None,
        fused: FusedDecoder | None,
        own: PlainOutputs,
    ) -> None:
        """Create the KV backend and check the model with it.

        Raises: PrefixCachingUnsupported, ConfigError.
        """
        memory = make(layout)
        while True:
            try:
                return self._check_backend(memory, graphs, fused, own)
            except PrefixCachingUnsupported as error:
                smaller = with_smaller_tiles(memory, error)
                if smaller is None:
                    raise
            memory = smaller

    def _check_backend(
        self, memory: KVBackend, graphs: bool | None, fused: FusedDecoder | None, own: PlainOutputs
    ) -> None:
        self.fragments = memory
        self._graphs = step_graphs(graphs, memory, self._call, self._device, self._guard.addresses)
        self._fused = fused
        try:
            check_tree(self, own)
        except PrefixCachingUnsupported:
            if fused is None:
                raise
            self._fused = None  # its own code does something else by now
            if self._graphs is not None:
                self._graphs.clear()
            check_tree(self, own)
        if self._graphs is not None:
            self._graphs.reset()

    # One forward

    def _run(
        self, rows: Sequence[Row], answer: Callable[[AttentionStep, Tensor], Answer]
    ) -> Answer:
        """Run rows and keep their KV; `answer` makes of the step and the hidden states [T, E] what
        is asked. No fragment has grown where something fails.
        """
        self._check_model()
        check_rows(rows)
        tokens = self._ids.checked(rows, self.info)
        # A row without KV, before or after, is to be the same to the last bit each time.
        is_plain = len(rows) == 1 and rows[0].kv_out is None and not rows[0].prefix
        is_limited = self._threads.can_limit and not is_plain
        n_tokens = sum([row.n_tokens for row in rows]) if is_limited else 0

        try:
            with self._threads.limited(n_tokens), on_engine_stream(self._device):
                step = self.fragments.start_step(rows)
                answers = answer(step, self._hidden(step, rows, tokens))
                step.commit()
            return answers
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error

    def _hidden(
        self,
        step: AttentionStep,
        rows: Sequence[Row],
        tokens: Sequence[Sequence[int] | FutureTokens],
    ) -> Tensor:
        adapter = rows[0].adapter if rows else None
        self._lora.use(adapter)  # it is added by hooks on modules
        is_bare = adapter is None and not self._hooks.has_active(self._lora.n_hooks)
        fused = self._fused if is_bare else None
        self._now = self._head if fused is None else fused
        ids = self._ids.packed(tokens, step.order)[None]
        if self._graphs is not None and is_bare:
            return self._graphs.hidden(self._now, ids, step)
        self._call.step = step
        try:
            return self._now.hidden(ids, step.positions[None])
        finally:
            self._call.step = None

    def _logits(self, step: AttentionStep, rows: Sequence[Row], hidden: Tensor) -> Tensor:
        at = [step.starts[i] + local for i, row in enumerate(rows) for local in row.logits_at]
        if not at:
            return torch.empty(0, self.info.n_vocab, device=self._device)
        if at != list(range(len(hidden))):
            hidden = hidden[self._wanted.of(at)]
        return self._now.logits(hidden)


def open_model(
    model: PreTrainedModel,
    *,
    n_ctx: int | None,
    fingerprint: str,
    state_bytes: int | None,
    kv: KVChoice,
    graphs: bool | None = None,
    reproducible: bool = False,
) -> TorchEngine | RecomputeEngine:
    """Return the engine of a model that nobody else uses any more: with fragments if it can be."""
    check_model(model)
    why = prefix_caching_obstacle(model.config)
    if not why:
        try:
            engine = TorchEngine(
                model,
                n_ctx=n_ctx,
                fingerprint=fingerprint,
                kv=kv,
                graphs=graphs,
                reproducible=reproducible,
            )
        except PrefixCachingUnsupported as error:
            why = error.why
        else:
            if state_bytes is not None:
                raise ConfigError(
                    f"state_bytes has no effect on {type(model).__name__}, whose KV is held by"
                    " tokens; leave it out, and give kv_budget"
                )
            return engine
    if reproducible:
        raise Unsupported(
            f"reproducible=True does not hold for {type(model).__name__}, whose KV is not held by"
            f" tokens: {why}; leave it out"
        )
    if kv != "auto":
        raise ConfigError(
            f"kv has no effect on {type(model).__name__}, whose KV is not held by tokens: {why};"
            " leave it out"
        )
    return RecomputeEngine(
        model, why, n_ctx=n_ctx, fingerprint=fingerprint, state_bytes=state_bytes
    )
