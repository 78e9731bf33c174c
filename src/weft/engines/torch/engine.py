"""The torch engine: decoder-only Transformers models, one packed forward a step."""

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
from .classifier import head_of, is_classifier_object, n_labels_of, score_every_token
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
_STEP_TOKENS = 2048  # bounds the memory of a step's logits


class TorchEngine(TransformersEngine):
    """A decoder-only Transformers model on one device, with its KV in fragments.

    `load` and `adopt` return a `RecomputeEngine` for a model whose KV cannot be cached by tokens.
    """

    fragments: KVBackend
    _graphs: CudaGraphRunner | None = None
    _current: Head | FusedDecoder  # the code that the running forward uses

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
        """Take over `model`; the caller must not use it any more. See `load` and `adopt`.

        Raises:
            PrefixCachingUnsupported: its attention does not use Transformers' attention interface.
                The model is unchanged then.
        """
        # kv="padded" is the way out if Triton breaks a device, so it runs no kernel at all.
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
        self.fragments.release_unused()  # of the load check
        if (free := self._free_bytes()) is not None:
            self._extra["free_bytes"] = free
        elif self._device.type == "cpu":
            self._extra["max_threads"] = torch.get_num_threads()
        self.info = replace(self.info, context_length=self._context_length)
        self._store_fingerprint()

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Validate that Transformers knows the model and that it has KV; see
        `Engine.check_supported`.
        """
        config_of(folder, trust_remote_code=False)

    @classmethod
    @one_thread_if_busy()
    @autocast_disabled()
    @torch.inference_mode(False)  # inference tensors could not be relaid or trained
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
        """Load a Transformers folder, or a GGUF file, whose weights are dequantised.

        Args:
            dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own (float32 for
                a GGUF file).
            n_ctx: longest path in tokens; None: the model's maximum. Rotary frequencies that depend
                on the length are fixed for it.
            quantization_config: a configuration of Transformers (TorchAoConfig, BitsAndBytesConfig,
                …): weights are quantised while loading. A quantised folder needs none.
            state_bytes: see `RecomputeEngine`; only for models that it runs.
            kv: "paged" is a pool of slots with Triton kernels for tree attention. "padded" uses
                padded buffers and PyTorch operations, and samples on the host. "auto" uses "paged"
                on CUDA if the model passes its check, else "padded".
            graphs: replay steps of paged KV as CUDA graphs, once a step has repeated. None: on
                CUDA. True works on a CPU, too, for tests: it runs the same step again.
            packed_weights: store linear weights as oneDNN reads them, which makes products on a CPU
                1.1 to 2.5 times as fast. 16-bit weights without oneDNN products are upcast to
                float32 block by block, 2.5 to 7 times as fast from 8 rows on. CPUs with AVX2 only
                use float32 weights as they are. None: if it is faster. False: as in the file.
            reproducible: a row's bits do not depend on other rows, so that a seed repeats a text
                while other calls run. Products have 16 rows each, and a step copies the KV of each
                path (kv="padded"). The load compares bits and fails if they differ.

        Raises:
            ModelLoadError: files are missing or broken.
            Unsupported: this engine cannot run the model, or `reproducible` is True and rows depend
                on each other; the message gives the reason.
        """
        check_reproducible(reproducible, kv)
        place = resolve_device(device)
        kv_backends(kv, place)  # raises before the weights are read
        check_graphs(graphs, kv)
        check_choice("packed_weights", packed_weights, _PACKED_WEIGHTS)
        if Path(source).suffix.lower() == ".gguf":
            if quantization_config is not None:
                raise ConfigError(
                    "quantization_config has no effect on a GGUF file, whose weights are"
                    " dequantised; leave it out"
                )
            file = load_gguf(Path(source), place, dtype)
            optimize_layout(file.model, packed_weights)
            engine = open_model(
                file.model,
                n_ctx=n_ctx,
                fingerprint=file.fingerprint,
                state_bytes=state_bytes,
                kv=kv,
                graphs=graphs,
                reproducible=reproducible,
            )
            engine.file_tokenizer, engine.sampling = file.tokenizer, file.sampling
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
        """Run an already loaded Transformers model on its device. The model object is not changed.

        Args:
            packed_weights: store linear weights a second time as oneDNN reads them, which makes
                products on a CPU up to 2.5 times as fast. Writes to the model's own weights still
                count. None: only upcast weights while they are used; see `load`.

        Raises:
            ConfigError: `model` is not a Transformers model.
            Unsupported: see `load`.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"the model is of type {type(model).__name__}, not a Transformers model; pass a"
                " PreTrainedModel (of a compiled model its _orig_mod, of DataParallel its module,"
                " of a PEFT model merge_and_unload())"
            )
        kv_backends(kv, model.device)
        check_graphs(graphs, kv)
        check_choice("packed_weights", packed_weights, _PACKED_WEIGHTS)
        if not is_classifier_object(model):
            check_model(model)
        check_loaded_model(model)
        own = copy_sharing_weights(model)
        if is_classifier_object(model):
            own = score_every_token(own)
        if packed_weights:
            pack_or_raise(own, keep=True)
        elif packed_weights is None and own.device.type == "cpu":
            upcast_on_use(own)
        name = fingerprint_of(model)
        engine = open_model(
            own, n_ctx=n_ctx, fingerprint=name, state_bytes=state_bytes, kv=kv, graphs=graphs
        )
        engine.watch(model)
        return engine

    # The protocol

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run all rows as one packed sequence; see Engine.forward."""

        def answers(step: AttentionStep, hidden: Tensor) -> TorchOutput:
            def scores(row: Row, start: int) -> list[Score]:
                states = hidden[start : start + row.n_tokens]
                return self._score_row(row, states, self._current.logits)

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
            states = hidden.float().cpu().numpy()
            return [states[at : at + r.n_tokens] for at, r in zip(step.starts, rows, strict=True)]

        return self._run(rows, states)

    def clear_caches(self) -> None:
        """Repack weights that the user may have changed, and release memory reserved for later."""
        self.refresh_weights()
        if self._graphs is not None:
            self._graphs.clear()
        self.fragments.release_unused()

    def refresh_weights(self) -> None:
        """Repack weights.

        CUDA graphs read weights in place, so they stay, and so does the pool: optimizer steps would
        otherwise capture them again each time.
        """
        self._distrust_version()
        if self._device.type == "cuda":
            with capturing:  # another thread's stream may have written the weights
                torch.cuda.synchronize(self._device)
        for module in self.model.modules():
            if isinstance(module, PackedLinear | PackedExperts):
                module.repack_on_use()

    def stats(self) -> dict[str, object]:
        """Return how many steps were replayed or run eagerly; empty without CUDA graphs."""
        return {} if self._graphs is None else self._graphs.stats()

    def close(self) -> None:
        """Release the model and all KV. Idempotent."""
        if not self._closed:
            self._closed = True
            self.fragments.clear()
            self._graphs = None
            self._release()
            del self._head, self._fused, self._current, self._kv_layers, self._hooks

    def prefix_cache(self, spans: Sequence[Span]) -> DynamicCache:
        """Copy a path's KV into a cache object that the Transformers model itself accepts.

        Args:
            spans: the path from the root, as in `Row.prefix`.

        Raises:
            Unsupported: the model's cache is not keys and values, such as the latents of DeepSeek.
        """
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad(), on_engine_stream(self._device):
            self._check_cache_format()
            pairs = [self.fragments.views(s.fragment, s.length) for s in spans if s.length]
            for layer, (module, _) in enumerate(self._kv_layers):
                if pairs:
                    keys = torch.cat([keys[layer] for keys, _ in pairs], 2)
                    values = torch.cat([values[layer] for _, values in pairs], 2)
                    cache.update(keys, values, getattr(module, "layer_idx", layer))
        if self._device.type == "cuda":  # the caller's stream may still read it after it is freed
            reader = torch.cuda.current_stream(self._device)
            for kept in cache.layers:
                for tensor in (kept.keys, kept.values):
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(reader)
        return cache

    def _check_cache_format(self) -> None:
        """Raise Unsupported if the model's cache differs from the KV that attention reads."""
        own = DynamicCache(config=self.model.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        try:
            given: dict[str, Any] = {cache_name(self.model): own, "use_cache": True}
            self.model(input_ids=ids, **given)
        except Exception as error:
            raise Unsupported(
                f"{type(self.model).__name__} accepts no cache of keys and values ({error}), so a"
                " path's KV cannot be copied into one; use lm.kv"
            ) from error
        for layer, (module, shape) in enumerate(self._kv_layers):
            kept: Any = own.layers[getattr(module, "layer_idx", layer)]
            if (*kept.keys.shape[1::2], kept.values.shape[3]) != shape[:3]:
                raise Unsupported(
                    f"the cache of {type(self.model).__name__} does not contain the keys and values"
                    " that its attention reads, so a path's KV cannot be copied into one; use lm.kv"
                )

    # Loading

    @torch.inference_mode()
    def _start(self, fingerprint: str, kv: KVChoice, graphs: bool | None) -> None:
        """Probe the KV layout by a plain forward; use the first backend that passes its check."""
        model, context_length = self.model, self._max_positions
        makers = [CanonicalBackend] if self._reproducible else kv_backends(kv, self._device)
        with self._threads.limited(1, "plain"):
            own = PlainOutputs.from_model(
                model, context_length, has_kernels=has_kernels(makers, self._device)
            )
        try:
            model.set_attn_implementation(PROBE)
            self._head = self._current = Head(model)
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
        self._kv_layers = probe.kv_layers
        layout = Layout.from_shapes(probe.shapes, self._device)
        n_ids = model.get_input_embeddings().num_embeddings
        self.info = EngineInfo(
            name="torch",
            model=Path(model.config.name_or_path).name or model.config.model_type,
            n_layers=layout.n_layers,
            n_vocab=n_ids if n_labels_of(model) else logits.shape[-1],
            head=head_of(model),
            n_labels=n_labels_of(model),
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
        if not self.info.n_labels:
            self._check_draws(logits.dtype)
        fused = None
        if not self._reproducible:  # the fused decoder multiplies all rows at once
            fused = FusedDecoder.from_model(model, probe.specs, self._call)
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
            _log.warning("KV of %s is stored in padded rows: %s", type(model).__name__, failed)

    def _use_backend(
        self,
        make: BackendFactory,
        layout: Layout,
        graphs: bool | None,
        fused: FusedDecoder | None,
        own: PlainOutputs,
    ) -> None:
        """Create the KV backend and check the model with it; retry with smaller tiles if needed.

        Args:
            make: creates the backend for a layout.
            layout: shapes of the KV.
            graphs: see `load`.
            fused: fused decoder of the model; None if it has none. Not used if its check fails.
            own: logits of the unchanged model.

        Raises:
            PrefixCachingUnsupported: the check fails.
            ConfigError: the backend does not support the layout.
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
        """Run the load check with a backend; without the fused decoder if the check fails with it.

        Raises:
            PrefixCachingUnsupported: the check fails without it, too.
        """
        self.fragments = memory
        self._graphs = step_graphs(graphs, memory, self._call, self._device, self._guard.addresses)
        self._fused = fused
        try:
            check_tree(self, own)
        except PrefixCachingUnsupported:
            if fused is None:
                raise
            self._fused = None  # this model's code differs from the fused decoder
            if self._graphs is not None:
                self._graphs.clear()
            check_tree(self, own)
        if self._graphs is not None:
            self._graphs.reset()

    # One forward

    def _run(
        self, rows: Sequence[Row], answer: Callable[[AttentionStep, Tensor], Answer]
    ) -> Answer:
        """Run rows and keep their KV. If anything fails, no fragment has grown.

        answer: makes the result from the step and the hidden states [T, E].
        """
        self._check_model()
        check_rows(rows)
        tokens = self._ids.checked(rows, self.info)
        # The bits of a lone row without KV must not depend on the thread count.
        is_lone = len(rows) == 1 and rows[0].kv_out is None and not rows[0].prefix
        is_limited = self._threads.can_limit and not is_lone
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
        """Run the base model on packed tokens; return hidden states [T, E].

        The fused decoder or CUDA graphs are used where hooks and adapters allow it.
        """
        adapter = rows[0].adapter if rows else None
        self._lora.use(adapter)
        # Hooks, those of LoRA included, run only in the model's own code.
        is_bare = adapter is None and not self._hooks.has_active(self._lora.n_hooks)
        fused = self._fused if is_bare else None
        self._current = self._head if fused is None else fused
        ids = self._ids.packed(tokens, step.order)[None]
        if self._graphs is not None and is_bare:
            return self._graphs.hidden(self._current, ids, step)
        self._call.step = step
        try:
            return self._current.hidden(ids, step.positions[None])
        finally:
            self._call.step = None

    def _logits(self, step: AttentionStep, rows: Sequence[Row], hidden: Tensor) -> Tensor:
        """Return the logits [n, V] that the rows request, from hidden states [T, E]."""
        at = [step.starts[i] + local for i, row in enumerate(rows) for local in row.logits_at]
        if not at:
            return torch.empty(0, self.info.n_labels or self.info.n_vocab, device=self._device)
        if at != list(range(len(hidden))):
            hidden = hidden[self._wanted.of(at)]
        return self._current.logits(hidden)


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
    """Create the engine of a model, which the caller must not use afterwards.

    It is a `TorchEngine`, or a `RecomputeEngine` if the KV cannot be cached by tokens. Arguments
    are those of `TorchEngine.load`.

    Raises:
        Unsupported: no engine can run the model, or `reproducible` is True for a `RecomputeEngine`.
        ConfigError: an option has no effect on the engine.
    """
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
                    f"state_bytes has no effect on {type(model).__name__}, whose KV is cached by"
                    " tokens; leave it out, and give kv_budget"
                )
            return engine
    if n_labels_of(model):
        raise PrefixCachingUnsupported(why)
    if reproducible:
        raise Unsupported(
            f"reproducible=True has no effect on {type(model).__name__}, whose KV is not cached by"
            f" tokens: {why}; leave it out"
        )
    if kv != "auto":
        raise ConfigError(
            f"kv has no effect on {type(model).__name__}, whose KV is not cached by tokens: {why};"
            " leave it out"
        )
    return RecomputeEngine(
        model, why, n_ctx=n_ctx, fingerprint=fingerprint, state_bytes=state_bytes
    )
