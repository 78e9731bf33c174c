"""The vLLM engine: the engine protocol over vLLM's AsyncLLM."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from ..._core.sampling import metrics
from ..._core.sampling.params import ModelDefaults
from ..._core.tokens.tokenizer import Tokenizer
from ...errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    ForwardError,
    ModelLoadError,
    StaleHandle,
    Unsupported,
    WeftError,
)
from ..base import Engine, EngineInfo, FutureTokens, HostOutput, Row, Score
from ..capabilities import OWN
from ..checkpoint import open_checkpoint, reject_mlx_quantised
from ..config_check import check_config
from .loop import EngineLoop
from .native import VllmRuns, as_forward_error
from .options import as_load_error, check_names, engine_args
from .rows import LogitsReader
from .rows import Path as RowPath
from .running import RunningEngine
from .shared_logits import try_create_buffer
from .vllm_internals import (
    adopted_fingerprint,
    end_ids_of,
    fingerprint_suffix,
    has_all_logprobs,
    has_one_end,
    loop_of,
)


class VllmEngine(Engine):
    """A model that vLLM runs, with its own KV; created by `load` or `adopt`."""

    fragments = None

    def __init__(
        self, running: RunningEngine, *, fingerprint: str, reader: LogitsReader | None
    ) -> None:
        """Connect to a running engine.

        Args:
            running: the AsyncLLM.
            fingerprint: fingerprint of the weights.
            reader: reader of full logits; None if the engine was started without them.
        """
        self._running = running
        self._reader = reader
        self._lora_ids = itertools.count(1)
        self._loras: dict[str | None, Any] = {None: None}
        config = running.engine.vllm_config
        model, parallel = config.model_config, config.parallel_config
        by_guidance = config.structured_outputs_config.backend == "guidance"
        n_gpus = parallel.world_size_across_dp
        exact = by_guidance and has_one_end(running.engine)
        self.native = VllmRuns(running, self._loras, by_guidance=exact)
        self.info = EngineInfo(
            name="vllm",
            model=str(model.model),
            n_layers=model.hf_text_config.num_hidden_layers,
            n_vocab=model.get_vocab_size(),
            # vLLM needs one position of its context for the token that it samples after a path.
            context_length=model.max_model_len - 1,
            kv_bytes_per_token=0,
            dtype=str(model.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            device=config.device_config.device_type,
            kv="hidden",
            capabilities=replace(
                OWN["vllm"],
                steps=reader is not None,
                scoring=reader is not None,
                raw_logits=reader is not None and reader.buffer is not None,
                lora=config.lora_config is not None,
            ),
            temperature_first=True,
            own_random=True,
            extra={"devices": n_gpus},
        )
        self._finish = weakref.finalize(self, running.close)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        n_ctx: int | None = None,
        kv_bytes: int | None = None,
        n_seq_max: int | None = None,
        trust_remote_code: bool = False,
        progress: Any = None,
        sessions: int | str = "auto",
        rows: str = "auto",
        **engine_options: Any,
    ) -> VllmEngine:
        """Start vLLM with a Transformers-format folder.

        Args:
            folder: the model folder.
            device: "auto", or the device of this build of vLLM.
            dtype: "auto" or a name.
            n_ctx: context length; None for the model's own, less one token.
            kv_bytes: rejected; vLLM's own option is kv_cache_memory_bytes.
            n_seq_max: rejected; vLLM's own option is max_num_seqs.
            trust_remote_code: run the repository's code.
            progress: callback before and after the load.
            sessions: maximum number of idle open requests; 0: every row is a request of its own.
                "auto" is a quarter of max_num_seqs.
            rows: "board": logits arrive through memory shared with the workers. "logprobs": through
                vLLM's own outputs, which is slow. "auto" uses what works.
            engine_options: any of vLLM's AsyncEngineArgs: tensor_parallel_size,
                gpu_memory_utilization, quantization, …

        Raises:
            ModelLoadError: files are missing or broken, or vLLM did not start.
            Unsupported: vLLM cannot run this model with these options.
            ConfigError: an option is unknown or out of range.
        """
        if n_seq_max is not None:
            raise Unsupported(
                "vLLM manages its KV itself, so n_seq_max has no effect; vLLM's own"
                ' option is engine_options={"max_num_seqs": …}'
            )
        if kv_bytes is not None:
            raise Unsupported(
                "vLLM manages its KV itself, so kv_budget has no effect; vLLM's own"
                ' option is engine_options={"kv_cache_memory_bytes": …}'
            )
        check_rows_option(rows)
        check_names(engine_options)
        checkpoint = open_checkpoint(Path(folder))
        reject_mlx_quantised(checkpoint.config, "vllm")
        no_tap = rows == "logprobs" or bool(engine_options.get("speculative_config"))
        buffer = None if no_tap else try_create_buffer(vocab_size_of(checkpoint.config))
        try:
            args = engine_args(
                Path(folder),
                engine_options,
                device=device,
                dtype=dtype,
                n_ctx=n_ctx,
                trust_remote_code=trust_remote_code,
                buffer=buffer,
            )
            if progress is not None:
                progress("load", 0, 1, "starting vLLM")
            running = RunningEngine.start(args, buffer, engine_options)
        except EngineError:
            raise
        except ConfigError:
            raise
        except Exception as error:
            raise as_load_error(error, folder) from error
        finally:
            if buffer is not None:
                buffer.unlink()
        with running.closing_on_error():
            if not engine_options.get("hf_overrides"):
                taken = running.engine.vllm_config.model_config.hf_config.to_dict()
                check_config(checkpoint.config, taken, library="vLLM")
            if progress is not None:
                progress("load", 1, 1, "")
            mark = checkpoint.fingerprint() + fingerprint_suffix(running.engine)
            try:
                reader = running.reader(sessions, rows)
            except ForwardError as error:
                raise ModelLoadError(
                    f"vLLM started with {folder}, and failed at its first token: {error}"
                ) from error
            return cls(running, fingerprint=mark, reader=reader)

    @classmethod
    def adopt(
        cls, engine: Any, *, n_ctx: int | None = None, sessions: int | str = "auto"
    ) -> VllmEngine:
        """Use a running AsyncLLM. The caller keeps ownership and shuts it down.

        Full logits need `max_logprobs=-1` in its arguments. Without it, only native runs are
        possible.

        Raises:
            ConfigError: the object is not an AsyncLLM, or it has exited.
        """
        if not isinstance(engine, AsyncLLM):
            raise ConfigError(
                f"a {type(engine).__name__} cannot be used from several threads; pass an"
                " AsyncLLM (AsyncLLM.from_engine_args(AsyncEngineArgs(…))), or the model's"
                ' name: weft.load(name, engine="vllm")'
            )
        if engine.errored:
            raise ConfigError("this AsyncLLM has failed or is shut down; create another one")
        running = RunningEngine(engine, EngineLoop(loop_of(engine)), None)
        has_all = has_all_logprobs(engine)
        reader = running.reader(sessions, "logprobs") if has_all else None
        return cls(running, fingerprint=adopted_fingerprint(engine), reader=reader)

    @property
    def model(self) -> Any:
        """The AsyncLLM that runs the model."""
        return self._running.engine

    def tokenizer(self) -> Any:
        """Return vLLM's tokenizer, with the end tokens of its generation config."""
        tokenizer = self._running.engine.get_tokenizer()
        return Tokenizer.wrap(tokenizer, stop_ids=end_ids_of(self._running.engine))

    def sampling_defaults(self) -> ModelDefaults:
        """Return the sampling defaults of the model's generation config."""
        config = self._running.engine.model_config.try_get_generation_config()
        return ModelDefaults.from_generation_config(config)

    # The protocol

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Return the logits of every requested position; see `Engine.forward`.

        Cost: one request, or one token of an open request, per position.
        """
        self._check_open()
        reader = self._reader
        if reader is None:
            raise Unsupported(NO_ROWS)
        for row in rows:
            self._check_row(row)
        paths = [(row.adapter, _ids(row)[: at + 1]) for row in rows for at in row.logits_at]
        logits = self._rows(reader, paths)
        scores = [self._scores(reader, row) for row in rows]
        return HostOutput(logits, scores)

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter; vLLM must have been started with enable_lora=True."""
        self._check_open()
        if self._running.engine.vllm_config.lora_config is None:
            raise Unsupported(
                "this vLLM engine was started without LoRA",
                hint='weft.load(…, engine="vllm", engine_options={"enable_lora": True})',
            )
        mark = adapter_fingerprint(Path(folder))
        lora = LoRARequest(name, next(self._lora_ids), str(Path(folder).absolute()))
        try:
            self._running.loop.call(self._running.engine.add_lora(lora))
        except WeftError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM does not take the adapter in {folder}: {error}") from error
        self._loras[name] = lora
        return mark

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Rows that still name it raise StaleHandle."""
        lora = self._loras.pop(name, None)
        if lora is not None and not self._running.closed:
            self._running.loop.call(self._running.engine.remove_lora(lora.lora_int_id))

    def close(self) -> None:
        """Stop vLLM's processes if Weft started them. Idempotent."""
        self._finish()

    # One forward

    def _rows(self, reader: LogitsReader, paths: list[RowPath]) -> np.ndarray:
        """Return the logits after each path: float32 [n, V]. Equal paths are requested once."""
        if not paths:
            return np.empty((0, self.info.n_vocab), np.float32)
        distinct = list(dict.fromkeys(paths))
        try:
            logits = self._running.loop.call(reader.rows(distinct, self._loras))
        except WeftError:
            raise
        except Exception as error:
            raise as_forward_error(error) from error
        by_path = dict(zip(distinct, logits, strict=True))
        return np.stack([by_path[path] for path in paths])

    def _scores(self, reader: LogitsReader, row: Row) -> list[Score]:
        """Score the target tokens of a row."""
        ids = _ids(row)

        def logits_of(first: int, last: int) -> np.ndarray:
            positions = range(first, last)
            return self._rows(reader, [(row.adapter, ids[: at + 1]) for at in positions])

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]

    def _check_open(self) -> None:
        """Raise ForwardError if the engine is closed."""
        if self._running.closed:
            raise ForwardError("the engine is closed; load the model again")

    def _check_row(self, row: Row) -> None:
        """Raise an error for a row that is too long, or has invalid ids, indices or adapter."""
        n, limit, n_vocab = row.n_tokens, self.info.context_length, self.info.n_vocab
        if not 0 < n <= limit:
            raise ContextOverflow(
                f"a path of {n} tokens is longer than the context of {limit}",
                n_tokens=n,
                n_ctx=limit,
            )
        low, high = min(_ids(row)), max(_ids(row))
        if low < 0 or high >= n_vocab:
            raise ForwardError(f"token ids must be 0 to {n_vocab - 1}; got {low} to {high}")
        if any(not 0 <= at < n for at in row.logits_at):
            raise ForwardError(f"logits_at {row.logits_at} is outside a row of {n} tokens")
        if row.adapter not in self._loras:
            name = str(row.adapter).rpartition("#")[0]
            raise StaleHandle(f"the LoRA adapter {name!r} was removed; add it again")


def _ids(row: Row) -> tuple[int, ...]:
    """Return the row's token ids, which are always known: vLLM has no future tokens."""
    assert not isinstance(row.tokens, FutureTokens)  # only with async scheduling
    return tuple(row.tokens)


def vocab_size_of(config: Mapping[str, Any]) -> int:
    """Return the vocabulary size in config.json, which is the number of logits; 0 if it has none.

    Multimodal models have it in `text_config`.
    """
    text = config.get("text_config") or {}
    return int(config.get("vocab_size") or text.get("vocab_size") or 0)


def adapter_fingerprint(folder: Path) -> str:
    """Return a fingerprint of an adapter's files.

    Raises:
        ModelLoadError: a file is missing.
    """
    digest = hashlib.sha256()
    try:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            digest.update((folder / name).read_bytes())
    except OSError as error:
        raise ModelLoadError(
            f"{folder} is no LoRA adapter in PEFT's format (adapter_config.json and"
            f" adapter_model.safetensors): {error}"
        ) from error
    return digest.hexdigest()


def check_rows_option(rows: object) -> None:
    """Raise ConfigError unless the option `rows` is "auto", "board" or "logprobs"."""
    if rows not in ("auto", "board", "logprobs"):
        raise ConfigError(f'rows is {rows!r}; allowed are "auto", "board" and "logprobs"')


NO_ROWS = (
    "this AsyncLLM was started without full logits: no next-token distributions, no measuring, no"
    ' branches; start it with max_logprobs=-1, or by weft.load(name, engine="vllm")'
)
