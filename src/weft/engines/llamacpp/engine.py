"""LlamaCppEngine: a GGUF file, its KV in the sequences of one context."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
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
from . import settings as made
from .alone import limit_batches
from .context import EXTRA_LEASES, Context, Floats
from .kv import SequenceFragments, kv_dtype
from .leases import Leases
from .library import Handle, chosen_devices, devices, new_context
from .settings import FLOATS, N_BATCH, REPRODUCIBLE_BATCH, ContextSettings, Progress
from .step import Batches, Owner, StepAnswers, ViewOutput
from .taken import check_taken
from .vocabulary import read_tokenizer

_log = logging.getLogger("weft.engines.llamacpp")
_N_SEQUENCES = 256  # the library's own limit
_MANY_ROWS = 16  # of one step
_IDLE_SLOTS = 256  # on a CPU each used cell costs a row up to 1 µs; a copy to the host costs 100 µs
_SPARE = 8  # leases for rows that write nothing, and for KV on its way out and in
_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


class LlamaCppEngine(Engine):
    """One GGUF model. Rows run in one or several batches of llama.cpp; draws are made here."""

    def __init__(self, header: GGUF, model: Handle, settings: ContextSettings) -> None:
        """Take over a loaded model. Raises: ModelLoadError, Unsupported; then it is still open."""
        self._header = header
        self._model: Handle | None = model
        self._settings = settings
        self._may_advise = True
        pointer = model.pointer
        self._n_vocab = int(C.llama_vocab_n_tokens(C.llama_model_get_vocab(pointer)))
        window = int(C.llama_model_n_swa(pointer))
        width = 2 if window else 1
        most = min(_N_SEQUENCES, int(C.llama_max_parallel_sequences())) // width
        most -= EXTRA_LEASES if settings.reproducible else 0
        min_batch = made.min_batch(header) if settings.reproducible else 1
        max_leases = min(most, settings.n_paths + _SPARE)

        def new_handle(n_cells: int, n_sequences: int) -> Handle:
            if not settings.gpus:
                made.check_memory(header, (settings.type_k, settings.type_v), n_cells)
            return new_context(model, **settings.context_values(n_cells, n_sequences))

        self._context = context = Context(
            new_handle,
            n_cells=settings.first_slots + N_BATCH,  # rows that write nothing need cells, too
            max_cells=settings.n_slots + N_BATCH,
            n_leases=min(max_leases, settings.first_leases + _SPARE),
            max_leases=max_leases,
            n_vocab=self._n_vocab,
            n_embd=int(C.llama_model_n_embd_out(pointer)),
            n_batch=REPRODUCIBLE_BATCH + 1 - min_batch if settings.reproducible else N_BATCH,
            width=width,
            in_order=settings.reproducible,
            min_batch=min_batch,
            max_threads=settings.n_threads if settings.may_use_fewer else 0,
            has_tiles=not settings.gpus and settings.flash is not False,
        )
        self.fragments: SequenceFragments = SequenceFragments(
            context,
            Leases(context),
            n_kv_heads=max(1, int(C.llama_model_n_head_kv(pointer))),
            window=window,
            dtype=kv_dtype(settings.type_k, settings.type_v),
        )
        try:
            self._try()
            if settings.reproducible:
                limit_batches(self._context, self.fragments.leases, self._n_vocab)
            self.info = self._describe(max_leases - _SPARE)
        except BaseException:
            context.close()
            raise

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
        """Load a GGUF file; of a split model, the first one.

        Args:
            device: "auto" (GPUs that the library has a back end for), "cpu", "gpu", or a back
                end's name, "cuda", "cuda:1", "metal", "vulkan".
            dtype: of the KV: "auto" (float16), "float16", "bfloat16", or "float32", which also
                turns flash attention off; weights stay as the file has them.
            n_ctx: a context shorter than the model's own.
            kv_bytes: size of the KV, allocated at load. None: up to 32,768 tokens, 4 GiB at most;
                on a CPU it starts with twice the context, 8,192 tokens at most, and grows.
            n_seq_max: branches that are resident at once; None for as many as llama.cpp has room
                for. Fewer make a step 0.1 ms shorter.
            n_gpu_layers: layers on the GPU; None for all.
            main_gpu, tensor_split: as llama.cpp has them, for several GPUs.
            n_threads: of a model call; None for the cores that may be used, fewer while others use
                them.
            type_k, type_v: of keys and values, instead of `dtype`: "f32", "f16", "bf16", "q8_0", …
            flash_attention: None lets llama.cpp choose, which mostly turns it on; the library's own
                default is off, and rounds differently.
            reproducible: a row's numbers do not depend on other rows of the batch, so that a seed
                repeats a text while other calls run. Batches have at most 63 tokens, weights are
                not repacked, the thread count is fixed. The load compares bits, and chooses
                smaller batches if they differ.
            load_mode: "auto", "none", "mmap", "mlock", "mmap+mlock" or "dio".
            repack: change the layout of weights for the CPU; False if that crashes (AMX and q8_0).
                None: True, unless `reproducible`.
            check_tensors: look at all weights while loading.
            progress: called with "load", bytes read, bytes in all and "".

        Raises:
            ModelLoadError: the file is missing, broken, or llama.cpp cannot load it.
            Unsupported: the model is not a text model, or its KV cannot be cut; or `reproducible`
                is True and rows depend on other rows on this machine.
            ConfigError: an option is out of range, or there is no such device.
        """
        header = read_gguf(Path(file))
        length = made.context_length(header, n_ctx)
        check_choice("reproducible", reproducible, (True, False))
        of_keys, of_values, flash = made.kv_types(
            dtype, type_k, type_v, flash_attention, reproducible=reproducible
        )
        gpus = tuple(chosen_devices(device)) if n_gpu_layers != 0 else ()
        most_threads = usable_cores() if n_threads is None else check_int("n_threads", n_threads, 1)
        n_paths = _N_SEQUENCES if n_seq_max is None else check_int("n_seq_max", n_seq_max, 1)
        model = made.load_weights(
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
            made.refuse(header, model)
            check_taken(header, model.report)
            left = tuple(chosen_devices(device)) if gpus else ()  # free once the weights are there
            slots = made.slots_of(header, kv_bytes, length, (of_keys, of_values), left)
            settings = ContextSettings(
                n_ctx=length,
                n_slots=slots.most,
                first_slots=slots.first,
                n_paths=n_paths,
                type_k=of_keys,
                type_v=of_values,
                flash=flash,
                n_threads=most_threads,
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
        """Return the devices that the installed llama.cpp runs on, GPUs first."""
        return ", ".join(f"{each.name} ({each.description})" for each in devices())

    def tokenizer(self) -> Tokenizer:
        """Return the file's own tokenizer, as llama.cpp reads it. Raises: ModelLoadError."""
        if self._header.values.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            raise ModelLoadError(f"{self._header.file} has no tokenizer; pass tokenizer=")
        return read_tokenizer(self._header)

    def sampling_defaults(self) -> SamplingParams | None:
        """Return how the file says that its model is sampled; None where it does not."""
        return sampling_of(self._header)

    def forward(self, rows: Sequence[Row]) -> ViewOutput:
        """Run all rows; see `Engine.forward`. Raises: ForwardError, KVFull, Unsupported."""
        batches = self._begin(rows)
        if len(rows) >= _MANY_ROWS and self._may_advise:
            self._advise()
        answers = StepAnswers(rows, self._n_vocab)
        if rows:
            batches.run(answers.wanted(), answers.take, most=answers.most)
        output = answers.output()
        self._context.lend_to(output)
        return output

    def _advise(self) -> None:
        """Log once that the torch engine needs less CPU time for many branches of this file."""
        self._may_advise = False
        is_quantised = any(kind not in FLOATS for kind in self.info.extra["weight_types"])
        if is_quantised and not self._settings.gpus and find_spec("torch") is not None:
            _log.warning(
                "%s runs many branches of quantised weights on a CPU. With 32 branches"
                ' engine="torch", dtype="bfloat16" takes about a third of the CPU time'
                " per token, and more memory (docs/llamacpp.md)",
                self.info.model,
            )

    def hidden_states(self, rows: Sequence[Row]) -> list[Floats]:
        """Run rows and return their final hidden states, after the last norm."""
        if any(name.startswith(("dense_", "cls.")) for name in self._header.tensors):
            raise Unsupported(
                f"{self.info.model} ends in layers of its own after pooling, which Weft does not"
                " run (embed)"
            )
        batches = self._begin(rows)
        found = [np.empty((row.n_tokens, self.info.n_embd), np.float32) for row in rows]

        def take(owners: Sequence[Owner], states: Floats) -> None:
            for (number, at), state in zip(owners, states, strict=True):
                found[number][at] = state

        batches.run([range(row.n_tokens) for row in rows], take, hidden=True)
        return found

    def close(self) -> None:
        """Free the KV and the model; idempotent."""
        self._context.detach_reader()
        self._context.close()
        model, self._model = self._model, None
        if model is not None:
            model.close()
        self.fragments.slots = 0

    def _begin(self, rows: Sequence[Row]) -> Batches:
        """Check rows before the library sees them: it aborts, or is silently wrong, over some."""
        if self._model is None:
            raise ForwardError("the engine is closed; load the model again")
        check_rows(rows)
        for row in rows:
            self._check(row)
        self._context.detach_reader()
        return Batches(rows, self._context, self.fragments)

    def _check(self, row: Row) -> None:
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

    def _try(self) -> None:
        """Run one token, so that a model that does not run is refused, and see how KV is kept."""
        lease = self.fragments.leases.take()
        logits = self._context.run([0], [0], [lease], np.ones(1, bool))
        if not np.isfinite(logits).any():
            raise ModelLoadError(f"{self._header.file} computes no numbers; its weights are broken")
        self.fragments.learn(lease)
        self.fragments.leases.give_back(lease)

    def _describe(self, max_paths: int) -> EngineInfo:
        header, settings, fragments = self._header, self._settings, self.fragments
        assert self._model is not None
        layers = fragments.layers
        slot_bytes = fragments.slot_bytes or made.slot_bytes(
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
            kv_slots=max(settings.n_slots, self._context.n_cells - N_BATCH),
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
