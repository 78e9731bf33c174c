"""The mlx engine: decoder-only models of mlx-lm, run by mlx-lm's own code, one batch per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx import nn

from ..._core.sampling import metrics
from ...errors import (
    ConfigError,
    EngineError,
    ForwardError,
    ModelLoadError,
    StaleHandle,
    Unsupported,
    WeftError,
)
from ..base import Engine, EngineInfo, HostOutput, Row, Score, Span, check_rows, row_tokens
from ..capabilities import OWN
from ..checkpoint import read_config
from ..config_check import OTHER_ENGINE
from .check import check_paths, check_tree
from .hook import ForwardContext, LatentKeys, RecordingCache, patch_attention, slot_shape_of
from .kv import MlxFragments, MlxMemory, SlotShape, dtype_name
from .lora import with_adapter
from .model import (
    LoadedModel,
    ModelHead,
    Windows,
    arrays_in,
    caches_without_token_kv,
    check_loaded_config,
    check_model_type,
    config_of,
    context_of,
    fingerprint_of,
    load_model,
    make_cache,
    resolve_device,
)
from .step import FullSequenceStep, PackedStep, PathStep, TreeStep
from .worker import worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..hub import Progress

_log = logging.getLogger("weft.engines.mlx")

Result = TypeVar("Result")


class MlxEngine(Engine):
    """A model of mlx-lm on one device.

    An adopted model stays unchanged, and the caller can still use it.
    """

    info: EngineInfo
    fragments: MlxFragments | None
    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        n_ctx: int | None,
        fingerprint: str,
        device: mx.Device,
        windows: Windows | None = None,
    ) -> None:
        """See `load` and `adopt`. All arrays of the model must be evaluated."""
        self.model = model
        self._windows = windows or Windows()
        self._device = device
        self._closed = False
        self._adapted: dict[str, ModelHead] = {}
        self._worker = worker()
        self._on_worker(lambda: self._select_attention(n_ctx, fingerprint))

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Check that mlx-lm has a model of this type; see `Engine.check_supported`."""
        check_model_type(read_config(folder))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> MlxEngine:
        """Load a folder in Transformers' or mlx-lm's format, quantised or not.

        Args:
            folder: the model folder.
            device: "cpu", "gpu" or "metal" (the same), or "auto" for MLX's default.
            dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. For
                quantised weights it is the type of their scales.
            n_ctx: context length; None for the model's own.
            trust_remote_code: run the repository's code.
            progress: callback before and after the load.

        Raises:
            ModelLoadError: files are missing or broken.
            Unsupported: the engine cannot run this kind of model; the message states why.
        """
        place = resolve_device(device)

        def load() -> LoadedModel:
            with mx.stream(place):
                return load_model(
                    Path(folder),
                    dtype,
                    place,
                    n_ctx=n_ctx,
                    trust_remote_code=trust_remote_code,
                    progress=progress,
                )

        model, fingerprint, windows = worker().call(load)
        return cls(model, n_ctx=n_ctx, fingerprint=fingerprint, device=place, windows=windows)

    @classmethod
    def adopt(cls, model: Any, *, n_ctx: int | None = None) -> MlxEngine:
        """Run a model that is already loaded, without changing the object.

        Call it in the thread that loaded the model, because pending arrays are evaluated here.

        Raises:
            ConfigError: the object is not an MLX model.
            Unsupported: see `load`.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"a {type(model).__name__} is not a model of MLX; pass a model from mlx_lm.load"
            )
        mx.eval(arrays_in(model))
        fingerprint = fingerprint_of(model)
        return cls(model, n_ctx=n_ctx, fingerprint=fingerprint, device=mx.default_device())

    def check_folder(self, folder: Path) -> None:
        """Check that `mlx_lm.load` used the values of config.json.

        Returns without a check if the shape of the model differs: then the folder only has the
        tokenizer. Differences that matter less are logged as a warning.

        Raises:
            Unsupported: a value differs that makes results wrong.
        """
        stored, own = read_config(folder), config_of(self.model)
        if any(stored.get(key) != own.get(key) for key in _SHAPE):
            return  # the tokenizer belongs to another model
        try:
            check_loaded_config(self.model, stored)
        except Unsupported as error:
            call = f'weft.load({str(folder)!r}, engine="mlx")'
            reason = str(error).removesuffix(OTHER_ENGINE)
            raise Unsupported(f"{reason}; load the folder with {call}", hint=call) from error

    # The protocol

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Run all rows as one batch of tokens; see `Engine.forward`."""

        def answers(step: PackedStep, hidden: mx.array) -> HostOutput:
            at = [step.starts[i] + local for i, row in enumerate(rows) for local in row.logits_at]
            is_scored = any(row.scores for row in rows)
            logits = self._logits(rows, hidden, at)
            mx.eval(logits, step.state(), [hidden] if is_scored else [])
            scores = [self._scores(row, step.starts[i], hidden) for i, row in enumerate(rows)]
            return HostOutput(np.array(logits, order="C"), scores)

        return self._run(rows, answers)

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the last hidden states; see `Engine.hidden_states`."""
        if not self.info.n_embd:
            return super().hidden_states(rows)

        def states(step: PackedStep, hidden: mx.array) -> list[NDArray[np.float32]]:
            mx.eval(hidden, step.state())
            array = np.array(hidden[:, 0].astype(mx.float32), order="C")
            return [array[at : at + r.n_tokens] for at, r in zip(step.starts, rows, strict=True)]

        return self._run(rows, states)

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter in mlx-lm's or PEFT's format for rows that name it."""

        def add() -> str:
            model, fingerprint = with_adapter(self.model, Path(folder))
            self._adapted[name] = ModelHead(model, self._make_cache)
            return fingerprint

        if self._closed:
            raise ForwardError("the engine is closed; load the model again")
        return self._on_worker(add)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Rows that still name it raise StaleHandle."""
        self._adapted.pop(name, None)

    def close(self) -> None:
        """Release the model and the KV. Idempotent."""
        if not self._closed:
            self._closed = True
            self._memory.clear()
            del self._head, self._adapted, self._context, self.model

    def prefix_cache(self, spans: Sequence[Span]) -> list[Any]:
        """Copy a path's KV into the caches that the model itself accepts, one per layer.

        Args:
            spans: the path from the root, as in `Row.prefix`.
        """

        def copy() -> list[Any]:
            caches = self._memory.cache(spans, self._make_cache)
            mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
            return caches

        return self._on_worker(copy)

    # Loading

    def library_array(self, array: NDArray[Any]) -> mx.array:
        """Return a host array of KV as an MLX array in the dtype of the keys."""

        def convert() -> mx.array:
            converted = mx.array(array).astype(self._memory.slot[0].dtype)
            mx.eval(converted)
            return converted

        return self._on_worker(convert)

    def _on_worker(self, work: Callable[[], Result]) -> Result:
        """Call `work` on the thread that runs MLX, with the engine's device as default."""

        def on_device() -> Result:
            with mx.stream(self._device):
                return work()

        return self._worker.call(on_device)

    def _make_cache(self) -> list[Any]:
        """Return empty caches, one per layer: of the model's own types, or rotating caches.

        Rotating caches are used if all layers have a sliding window that mlx-lm does not apply.
        """
        return make_cache(self.model, self._windows.slots)

    def _select_attention(self, n_ctx: int | None, fingerprint: str) -> None:
        """Choose the first kind of attention (tree, paths, full paths) that passes the load-time
        check.

        The check compares the logits of a small tree with the model's own forward.
        """
        model, config = self.model, config_of(self.model)
        name = str(config.get("model_type") or type(model).__name__)
        context_length = context_of(config, n_ctx, self._windows.limit)
        paths = check_paths(config.get("vocab_size") or 64)
        try:
            mx.eval(arrays_in(model))
            logits = model(mx.array(paths), cache=self._make_cache())
            expected = np.array(logits.astype(mx.float32))
            self._head = ModelHead(model, self._make_cache)
        except EngineError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{name} failed on a first forward: {type(error).__name__}: {error}"
            ) from error
        patch_attention(model)
        self._context: ForwardContext | None = None
        unsupported = caches_without_token_kv(self._make_cache())
        why = f"it has a {unsupported[0]}, which is not KV of single tokens" if unsupported else ""
        probes: list[tuple[str, Callable[[], SlotShape | None]]] = [("whole", lambda: None)]
        if not unsupported:
            probes = [("tree", self._probe_tree), ("paths", self._probe_path), *probes]
        for attention, probe in probes:
            try:
                self._create_memory(probe(), name, fingerprint, attention)
                check_tree(self, paths, expected)
                break
            except Exception as error:
                if attention == "whole" or isinstance(error, ModelLoadError):
                    raise
                why = str(error)
                _log.info("%s does not run with attention %r: %s", name, attention, error)
        self.info = replace(self.info, context_length=context_length)
        if attention == "whole":
            self.info.extra["no_prefix_caching"] = why
            _log.warning(
                "prefix caching disabled for %s: %s; every step runs full paths", name, why
            )

    def _probe_tree(self) -> SlotShape:
        """Return the shape of a slot, from a run of a few tokens through tree caches.

        Raises:
            Unsupported: the model does not use the caches in all layers.
        """
        self._context = context = ForwardContext(self._make_cache())
        for _ in range(len(context.caches) + 1):
            step = TreeStep([Row((), _PROBE_TOKENS, 0)], MlxMemory(SlotShape()), context)
            try:
                mx.eval(step.run(self._head, [_PROBE_TOKENS]))
                break
            except LatentKeys:  # the cache of that layer is marked now
                continue
        shapes = [cache.shapes for cache in context.caches if cache.shapes and cache.n_calls]
        n_used, n_layers = len(shapes), len(context.caches)
        if n_used < n_layers:
            raise Unsupported(f"only {n_used} of {n_layers} layers use mlx-lm's attention function")
        return slot_shape_of(shapes)

    def _probe_path(self) -> SlotShape:
        """Return the shape of a slot, from a run of a few tokens through the model's own caches."""
        caches = [RecordingCache(cache) for cache in self._make_cache()]
        mx.eval(self._head.hidden(mx.array([_PROBE_TOKENS]), caches))
        return slot_shape_of([cache.shapes() for cache in caches])

    def _create_memory(
        self, slot: SlotShape | None, name: str, fingerprint: str, attention: str
    ) -> None:
        """Create an empty KV memory and `info`.

        Args:
            slot: shape of a slot; None for a model that runs full paths.
            name: of the model, for messages.
            fingerprint: of the weights.
            attention: kind of attention, for `info.extra`.
        """
        self._memory = MlxMemory(slot or SlotShape())
        self.fragments = None if slot is None else MlxFragments(self._memory, self._on_worker)
        if attention != "tree":
            self._context = None
        logits = self._head.logits(self._head.hidden(mx.array([_PROBE_TOKENS]), self._make_cache()))
        extra: dict[str, Any] = {"attention": attention}
        free = free_bytes(self._device)
        if free is not None:
            extra["free_bytes"] = free
        self.info = EngineInfo(
            name="mlx",
            model=name,
            n_layers=len(self._make_cache()) if slot is None else slot.n_layers,
            n_vocab=int(logits.shape[-1]),
            context_length=_CHECKED,
            kv_bytes_per_token=0 if slot is None else slot.n_bytes,
            kv="hidden" if slot is None else "addressable",
            no_prefix_cache=slot is None,
            dtype=dtype_name(logits.dtype if slot is None else slot[0].dtype),
            fingerprint=fingerprint,
            device=str(self._device.type).rpartition(".")[2],
            n_embd=self._head.n_embd,
            capabilities=replace(
                OWN["mlx"],
                embed=bool(self._head.n_embd),
                shared_attention=attention == "tree",
                offload=slot is not None,
                save_kv=slot is not None,
            ),
            extra=extra,
        )

    # One forward

    def _run(self, rows: Sequence[Row], finish: Callable[[PackedStep, mx.array], Result]) -> Result:
        """Run rows and commit their KV; no fragment changes if anything raises.

        `finish` gets the step and the hidden states [T, 1, E]. It returns the result and evaluates
        the step's arrays.
        """
        if self._closed:
            raise ForwardError("the engine is closed; load the model again")
        check_rows(rows)
        tokens = [row_tokens(row, self.info) for row in rows]

        def work() -> Result:
            head = self._head_for_adapter(rows)
            step = self._create_step(rows)
            result = finish(step, step.run(head, tokens))
            step.commit()
            return result

        try:
            return self._on_worker(work)
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error

    def _head_for_adapter(self, rows: Sequence[Row]) -> ModelHead:
        """Return the model with the adapter of the rows. Raise StaleHandle if it was removed."""
        adapter = rows[0].adapter if rows else None
        if adapter is None:
            return self._head
        if adapter not in self._adapted:
            raise StaleHandle(
                f"the LoRA adapter {adapter.rpartition('#')[0]!r} was removed; add it again"
            )
        return self._adapted[adapter]

    def _create_step(self, rows: Sequence[Row]) -> PackedStep:
        """Return a step of the class that suits the model's attention."""
        if self.fragments is None:
            return FullSequenceStep(rows, self._memory, self._make_cache)
        if self._context is None:
            return PathStep(rows, self._memory, self._make_cache)
        return TreeStep(rows, self._memory, self._context)

    def _logits(self, rows: Sequence[Row], hidden: mx.array, at: list[int]) -> mx.array:
        """Return the logits at packed positions, float32 [N, V], without evaluating them."""
        if not at:
            return mx.zeros((0, self.info.n_vocab))
        if at != list(range(len(hidden))):
            hidden = hidden[mx.array(at)]
        return self._head_for_adapter(rows).logits(hidden)[:, 0].astype(mx.float32)

    def _scores(self, row: Row, start: int, hidden: mx.array) -> list[Score]:
        """Score the target tokens of a row.

        Args:
            row: has the `ScoreSpan`s.
            start: packed index of its first token.
            hidden: hidden states of the step, [T, 1, E].
        """

        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            head = self._head_for_adapter([row])
            logits = head.logits(hidden[start + first : start + last])
            return np.array(logits[:, 0].astype(mx.float32), order="C")

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]


_PROBE_TOKENS = [1, 2, 3, 1, 2]
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_CHECKED = 64  # context length during the check; its paths are shorter


def free_bytes(device: mx.Device) -> int | None:
    """Return the free memory of a GPU that MLX may use; None on a CPU."""
    if device.type != mx.gpu:
        return None
    limit = mx.device_info().get("max_recommended_working_set_size")
    return None if limit is None else max(0, int(limit) - mx.get_active_memory())
