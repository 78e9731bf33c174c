"""LlamaCppEngine: runs a GGUF file; its KV is in the sequences of llama.cpp contexts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as C

from ..._core.sampling.params import SamplingParams
from ..._core.system_resources import usable_cores
from ..._core.tokens.tokenizer import Tokenizer
from ..._core.validation import check_choice, check_int
from ...errors import ForwardError, ModelLoadError, Unsupported
from ..base import Engine, EngineInfo, FutureTokens, Pooling, Row, check_rows
from ..capabilities import OWN
from ..gguf import GGUF, read_gguf
from ..gguf.sampling import sampling_of
from . import settings as load_options
from .batch_invariance import limit_batches
from .context import EXTRA_LEASES, CellCount, Context, Floats
from .hyperparameters import check_hyperparameters
from .kv import SequenceFragments, kv_dtype
from .library import Handle, chosen_devices, devices, new_context
from .pool import CELL_BLOCK, MAX_SHARDS, ContextPool, Shard
from .settings import FLOATS, N_BATCH, REPRODUCIBLE_BATCH, ContextSettings, Progress
from .step import Batches, Owner, StepResults, ViewOutput
from .vocabulary import read_tokenizer

_log = logging.getLogger("weft.engines.llamacpp")
_N_SEQUENCES = 256  # llama.cpp's limit per context
_MANY_ROWS = 16  # in a step; from there on, `_suggest_torch` may recommend the torch engine
_IDLE_SLOTS = 256  # on a CPU each used cell costs a row up to 1 µs; a copy to the host costs 100 µs
_SHARD_UBATCH = 128  # of contexts after the first: their compute buffers take a quarter
_SPARE = 8  # leases for rows without a `kv_out`, and for export and load
_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


class LlamaCppEngine(Engine):
    """Engine for one GGUF model. llama.cpp computes logits in batches; Weft samples from them."""

    def __init__(self, header: GGUF, model: Handle, settings: ContextSettings) -> None:
        """Create the context for a loaded model and run a test token.

        Args:
            header: of the GGUF file.
            model: the loaded model. The engine owns it: `LlamaCppEngine.close` frees it.
            settings: of the context.

        Raises:
            ModelLoadError: the context cannot be created, or the model computes no numbers.
            Unsupported: `settings.reproducible`, and rows depend on other rows here.
            After an error the caller must still close `model`.
        """
        self._header = header
        self._model: Handle | None = model
        self._settings = settings
        self._may_suggest_torch = True
        pointer = model.pointer
        self._n_vocab = int(C.llama_vocab_n_tokens(C.llama_model_get_vocab(pointer)))
        window = int(C.llama_model_n_swa(pointer))
        self._pool = pool = self._new_pool(model, window)
        self.fragments: SequenceFragments = SequenceFragments(
            pool,
            n_kv_heads=max(1, int(C.llama_model_n_head_kv(pointer))),
            window=window,
            dtype=kv_dtype(settings.type_k, settings.type_v),
        )
        try:
            (shard,) = pool.shards
            with shard.context.one_thread():
                self._probe(shard)
            if settings.reproducible:
                limit_batches(shard.context, shard, self._n_vocab)
            self.info = self._describe(shard.n_leases - _SPARE)
        except BaseException:
            pool.close()
            raise

    def _new_pool(self, model: Handle, window: int) -> ContextPool:
        """Create the first context, and the pool that may create others.

        window: length of the model's sliding window; 0 for none. Raises: ModelLoadError.
        """
        header, settings = self._header, self._settings
        width = 2 if window else 1
        max_sequences = min(_N_SEQUENCES, int(C.llama_max_parallel_sequences())) // width
        max_sequences -= EXTRA_LEASES if settings.reproducible else 0
        min_batch = load_options.min_batch(header) if settings.reproducible else 1
        max_leases = min(max_sequences, settings.n_paths + _SPARE)
        cell_count, n_vocab = CellCount(), self._n_vocab

        def create(n_cells: int, n_ubatch: int) -> Context:
            def new_handle(n_cells: int, n_sequences: int) -> Handle:
                if not settings.gpus:
                    load_options.check_memory(header, (settings.type_k, settings.type_v), n_cells)
                return new_context(model, **settings.context_values(n_cells, n_sequences, n_ubatch))

            return Context(
                new_handle,
                n_cells=n_cells,
                cell_count=cell_count,
                n_leases=min(max_leases, settings.first_leases + _SPARE),
                max_leases=max_leases,
                n_vocab=n_vocab,
                n_embd=int(C.llama_model_n_embd_out(model.pointer)),
                n_batch=REPRODUCIBLE_BATCH + 1 - min_batch if settings.reproducible else N_BATCH,
                width=width,
                in_order=settings.reproducible,
                min_batch=min_batch,
                max_threads=settings.n_threads if settings.may_use_fewer else 0,
                has_tiles=not settings.gpus and settings.flash is not False,
            )

        # Rows without a `kv_out` also need cells.
        first, max_cells = settings.first_slots + N_BATCH, settings.n_slots + N_BATCH
        if not settings.can_grow or settings.reproducible or window:
            return ContextPool(create(first, N_BATCH), max_cells)
        max_cells += (MAX_SHARDS - 1) * CELL_BLOCK  # each shard is rounded up
        new_shard = partial(create, n_ubatch=_SHARD_UBATCH)
        return ContextPool(create(first, N_BATCH), max_cells, new_shard)

    @classmethod
    def load(
        cls,
        file: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        kv_bytes: int | None = None,
        n_seq_max: int | None = None,
        n_gpu_layers: int | None = None,
        main_gpu: int | None = None,
        tensor_split: Sequence[float] | None = None,
        n_threads: int | None = None,
        type_k: str | None = None,
        type_v: str | None = None,
        flash_attention: bool | None = None,
        reproducible: bool = False,
        load_mode: str = "auto",
        repack: bool | None = None,
        check_tensors: bool = False,
        progress: Progress | None = None,
    ) -> LlamaCppEngine:
        """Load a GGUF file and return its engine.

        Args:
            file: a .gguf file. If the model is split over several files: the first.
            device: "auto", "cpu", "gpu", or the name of a back end: "cuda", "cuda:1", "metal",
                "vulkan". "auto" uses all GPUs that the installed llama.cpp supports, else the CPU.
            dtype: of the KV: "auto" (float16), "float16", "bfloat16" or "float32". "float32" also
                turns flash attention off. Weights keep the types of the file.
            n_ctx: maximum path length in tokens; None for the model's context length, which is
                also the maximum.
            kv_bytes: bytes of KV, allocated at load. None: room for up to 32,768 tokens, at most
                4 GiB. On a CPU, the KV then starts with twice the context, at most 8,192 tokens,
                and grows.
            n_seq_max: maximum number of resident branches; None for llama.cpp's maximum. A low
                number makes a step up to 0.15 ms shorter.
            n_gpu_layers: number of layers on the GPU; None for all, 0 for the CPU.
            main_gpu: index of the GPU for llama.cpp's `main_gpu`; None for its default.
            tensor_split: share of the model for each GPU; None for llama.cpp's default.
            n_threads: threads of a model call. None: all usable cores; on a CPU without
                `reproducible`, fewer while other processes use the cores.
            type_k: type of keys, instead of `dtype`: "f32", "f16", "bf16", "q8_0", …
            type_v: type of values, likewise.
            flash_attention: None lets llama.cpp choose, which usually turns it on. True and False
                round differently.
            reproducible: make a row's logits independent of other rows in the batch, so that a
                seed repeats a text while other calls run. Batches have at most 63 tokens, weights
                are not repacked, and the thread count is fixed. The load compares bits, and
                chooses smaller batches if they differ.
            load_mode: "auto", "none", "mmap", "mlock", "mmap+mlock" or "dio".
            repack: change the layout of weights for the CPU; False if that crashes (AMX and q8_0).
                None: True, unless `reproducible`.
            check_tensors: let llama.cpp check the values of all weights while loading.
            progress: called with "load", the bytes read, the total bytes, and "".

        Raises:
            ModelLoadError: the file is missing, broken, or llama.cpp cannot load it.
            Unsupported: the model is not a text model, or its KV cannot be cut at a token. Or
                `reproducible` is True and rows depend on other rows on this machine.
            ConfigError: an option is out of range, or there is no such device.
        """
        header = read_gguf(Path(file))
        length = load_options.context_length(header, n_ctx)
        check_choice("reproducible", reproducible, (True, False))
        of_keys, of_values, flash = load_options.kv_types(
            dtype, type_k, type_v, flash_attention, reproducible=reproducible
        )
        gpus = tuple(chosen_devices(device)) if n_gpu_layers != 0 else ()
        max_threads = usable_cores() if n_threads is None else check_int("n_threads", n_threads, 1)
        n_paths = _N_SEQUENCES if n_seq_max is None else check_int("n_seq_max", n_seq_max, 1)
        model = load_options.load_weights(
            header,
            gpus,
            n_gpu_layers=n_gpu_layers,
            main_gpu=main_gpu,
            tensor_split=tensor_split,
            load_mode=load_mode,
            repack=not reproducible if repack is None else repack,
            check_tensors=check_tensors,
            progress=progress,
        )
        try:
            load_options.check_decoder_only(header, model)
            check_hyperparameters(header, model.report)
            left = tuple(chosen_devices(device)) if gpus else ()  # free memory after the load
            slots = load_options.slot_counts(header, kv_bytes, length, (of_keys, of_values), left)
            settings = ContextSettings(
                n_ctx=length,
                n_slots=slots.maximum,
                first_slots=slots.first,
                n_paths=n_paths,
                type_k=of_keys,
                type_v=of_values,
                flash=flash,
                n_threads=max_threads,
                may_use_fewer=n_threads is None and not gpus and not reproducible,
                reproducible=reproducible,
                gpus=left,
            )
            return cls(header, model, settings)
        except BaseException:
            model.close()
            raise

    @classmethod
    def backends(cls) -> str:
        """Return names and descriptions of the devices that llama.cpp can use, GPUs first."""
        return ", ".join(f"{each.name} ({each.description})" for each in devices())

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the GGUF file, run by llama.cpp.

        Raises:
            ModelLoadError: the file has no tokenizer, or llama.cpp cannot load it.
        """
        if self._header.values.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            raise ModelLoadError(f"{self._header.file} has no tokenizer; pass tokenizer=")
        return read_tokenizer(self._header)

    def sampling_defaults(self) -> SamplingParams | None:
        """Return the sampling parameters that the file recommends; None if it has none."""
        return sampling_of(self._header)

    def forward(self, rows: Sequence[Row]) -> ViewOutput:
        """Run all rows; see `Engine.forward`.

        The logits of the result may be views of llama.cpp's memory until the next call.

        Raises:
            ForwardError: a row is invalid, llama.cpp fails, or the engine is closed.
            KVFull: the cache has no room for the rows.
            Unsupported: a row has a LoRA adapter.
        """
        batches = self._prepare(rows)
        if len(rows) >= _MANY_ROWS and self._may_suggest_torch:
            self._suggest_torch()
        results = StepResults(rows, self._n_vocab)
        if rows:
            batches.run(results.wanted(), results.add_batch, max_outputs=results.max_outputs)
        output = results.output()
        self._pool.lend_to(output)
        return output

    def _suggest_torch(self) -> None:
        """Log a warning, once, that the torch engine decodes many branches of this file faster.

        Called at the first step with many rows. Nothing is logged for float weights, on a GPU, or
        without torch.
        """
        self._may_suggest_torch = False
        is_quantised = any(kind not in FLOATS for kind in self.info.extra["weight_types"])
        if is_quantised and not self._settings.gpus and find_spec("torch") is not None:
            _log.warning(
                "%s runs many branches of quantised weights on a CPU. With 32 branches"
                ' engine="torch", dtype="float32" takes a third to a half of the CPU time'
                " per token, and more memory (docs/llamacpp.md)",
                self.info.model,
            )

    def hidden_states(self, rows: Sequence[Row]) -> list[Floats]:
        """Run rows and return the final hidden states, after the last norm, of all their tokens.

        Returns:
            One array per row: float32 [tokens of the row, n_embd].

        Raises:
            Unsupported: the model has layers after pooling, or a row has a LoRA adapter.
            ForwardError: a row is invalid, llama.cpp fails, or the engine is closed.
            KVFull: the cache has no room for the rows.
        """
        if any(name.startswith(("dense_", "cls.")) for name in self._header.tensors):
            raise Unsupported(
                f"{self.info.model} ends in layers of its own after pooling, which Weft does not"
                " run (embed)"
            )
        batches = self._prepare(rows)
        states_of_rows = [np.empty((row.n_tokens, self.info.n_embd), np.float32) for row in rows]

        def store(owners: Sequence[Owner], states: Floats) -> None:
            for (number, at), state in zip(owners, states, strict=True):
                states_of_rows[number][at] = state

        batches.run([range(row.n_tokens) for row in rows], store, hidden=True)
        return states_of_rows

    def close(self) -> None:
        """Free the KV and the model; idempotent."""
        self._pool.close()
        model, self._model = self._model, None
        if model is not None:
            model.close()

    def _prepare(self, rows: Sequence[Row]) -> Batches:
        """Check rows, detach the last result, and return the batches that run the rows.

        llama.cpp itself would abort the process, or compute nonsense, for some invalid rows.
        Raises: ForwardError, Unsupported.
        """
        if self._model is None:
            raise ForwardError("the engine is closed; load the model again")
        check_rows(rows)
        for row in rows:
            self._check(row)
        self._pool.detach_reader()
        return Batches(rows, self._pool)

    def _check(self, row: Row) -> None:
        """Raise ForwardError or Unsupported if llama.cpp cannot run the row."""
        if row.adapter is not None:
            raise Unsupported("the llamacpp engine runs no LoRA adapters")
        ids = row.tokens
        if isinstance(ids, FutureTokens):
            raise ForwardError("the llamacpp engine takes no late tokens")
        if min(ids) < 0 or max(ids) >= self._n_vocab:
            raise ForwardError(
                f"a token id is outside the model's vocabulary of {self._n_vocab};"
                f" ids are 0 to {self._n_vocab - 1}"
            )
        if row.position + len(ids) > self.info.context_length:
            raise ForwardError(
                f"a row ends at position {row.position + len(ids)}; the model has"
                f" {self.info.context_length}"
            )

    def _probe(self, shard: Shard) -> None:
        """Run one token to reject broken models, and read the layout of the KV from its state.

        Raises: ModelLoadError if no logit is finite.
        """
        lease = shard.take()
        logits = shard.context.run([0], [0], [lease], np.ones(1, bool))
        if not np.isfinite(logits).any():
            raise ModelLoadError(
                f"{self._header.file} computes no numbers; its weights are broken",
                hint="download the file again (docs/troubleshooting.md#nonsense-output)",
            )
        self.fragments.detect_layout(shard.context.take_state(lease))
        shard.give_back(lease)

    def _describe(self, max_paths: int) -> EngineInfo:
        """Return `info`. max_paths: maximum number of resident paths."""
        header, settings, fragments = self._header, self._settings, self.fragments
        assert self._model is not None
        layers = fragments.layers
        slot_bytes = fragments.slot_bytes or load_options.slot_bytes(
            header, settings.type_k, settings.type_v
        )
        can_export = bool(layers)
        kinds = sorted({tensor.type for tensor in header.tensors.values()})
        return EngineInfo(
            name="llamacpp",
            model=header.file.name,
            n_layers=len(layers) or int(C.llama_model_n_layer(self._model.pointer)),
            n_vocab=self._n_vocab,
            context_length=settings.n_ctx,
            kv_bytes_per_token=slot_bytes,
            dtype=kv_dtype(settings.type_k, settings.type_v),
            fingerprint=header.fingerprint(),
            device=settings.gpus[0].name.lower() if settings.gpus else "cpu",
            kv="sequence",
            max_paths=max_paths,
            kv_slots=max(settings.n_slots, self._pool.n_cells - N_BATCH),
            idle_slots=_IDLE_SLOTS if can_export and not settings.gpus else None,
            n_embd=int(C.llama_model_n_embd_out(self._model.pointer)),
            pooling=_POOLING.get(header.of_model("pooling_type", 0)),
            capabilities=replace(OWN["llamacpp"], offload=can_export, save_kv=can_export),
            extra={
                "kv_types": [settings.type_k, settings.type_v],
                "weight_types": kinds,
                "max_threads": settings.n_threads,
            },
        )
