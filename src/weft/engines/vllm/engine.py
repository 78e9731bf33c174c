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
from .native import VllmRuns, as_failure
from .options import as_load_error, check_names, engine_args
from .rows import Path as RowPath
from .rows import RowReader
from .running import Running
from .shared_logits import try_board
from .vllm_internals import adopted_mark, ends_of, has_all_logprobs, has_one_end, loop_of, mark_of


class VllmEngine(Engine):
    """A model that vLLM runs, with KV of its own; made by `load` or `adopt`."""

    fragments = None

    def __init__(self, running: Running, *, fingerprint: str, reader: RowReader | None) -> None:
        """reader: None where the engine was started so that full logits cannot be had."""
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
            # One place of vLLM's context is for the token that it draws after a path.
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
                raw_logits=reader is not None and reader.board is not None,
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
            device: "auto", or what this build of vLLM runs on.
            n_ctx: longest path; None for all the model knows, less one.
            kv_bytes, n_seq_max: refused; vLLM's own are kv_cache_memory_bytes and max_num_seqs.
            sessions: requests that stay open for their next token; 0: every row is a request of
                its own. "auto" is a quarter of max_num_seqs.
            rows: "board", logits come through memory that the workers share with this process;
                "logprobs", through vLLM's own answers, which is slow; "auto" takes what works.
            engine_options: any of vLLM's AsyncEngineArgs: tensor_parallel_size,
                gpu_memory_utilization, quantization, …

        Raises:
            ModelLoadError: files are missing or broken, or vLLM did not start.
            Unsupported: vLLM cannot run this model so.
            ConfigError: an option is unknown or out of range.
        """
        if n_seq_max is not None:
            raise Unsupported(
                "the vllm engine keeps its KV to itself, so n_seq_max has no effect; vLLM's own"
                ' option is engine_options={"max_num_seqs": …}'
            )
        if kv_bytes is not None:
            raise Unsupported(
                "the vllm engine keeps its KV to itself, so kv_budget has no effect; vLLM's own"
                ' option is engine_options={"kv_cache_memory_bytes": …}'
            )
        check_rows_option(rows)
        check_names(engine_options)
        checkpoint = open_checkpoint(Path(folder))
        reject_mlx_quantised(checkpoint.config, "vllm")
        no_tap = rows == "logprobs" or bool(engine_options.get("speculative_config"))
        board = None if no_tap else try_board(vocab_of(checkpoint.config))
        try:
            args = engine_args(
                Path(folder),
                engine_options,
                device=device,
                dtype=dtype,
                n_ctx=n_ctx,
                trust_remote_code=trust_remote_code,
                board=board,
            )
            if progress is not None:
                progress("load", 0, 1, "starting vLLM")
            running = Running.start(args, board, engine_options)
        except EngineError:
            raise
        except ConfigError:
            raise
        except Exception as error:
            raise as_load_error(error, folder) from error
        finally:
            if board is not None:
                board.unlink()
        with running.closing_on_error():
            if not engine_options.get("hf_overrides"):
                taken = running.engine.vllm_config.model_config.hf_config.to_dict()
                check_config(checkpoint.config, taken, library="vLLM")
            if progress is not None:
                progress("load", 1, 1, "")
            mark = checkpoint.fingerprint() + mark_of(running.engine)
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
        """Use an AsyncLLM that runs already; it stays its owner's, who shuts it down.

        Full logits rows need `max_logprobs=-1` among its arguments; without it, it generates runs,
        and everything else is refused.

        Raises: ConfigError for an object that is no AsyncLLM, or one that is dead.
        """
        if not isinstance(engine, AsyncLLM):
            raise ConfigError(
                f"a {type(engine).__name__} cannot be used from several threads; hand over an"
                " AsyncLLM (AsyncLLM.from_engine_args(AsyncEngineArgs(…))), or give the model's"
                ' name: weft.load(name, engine="vllm")'
            )
        if engine.errored:
            raise ConfigError("this AsyncLLM is dead or shut down; make another one")
        running = Running(engine, EngineLoop(loop_of(engine)), None)
        has_all = has_all_logprobs(engine)
        reader = running.reader(sessions, "logprobs") if has_all else None
        return cls(running, fingerprint=adopted_mark(engine), reader=reader)

    @property
    def model(self) -> Any:
        """The AsyncLLM that runs the model."""
        return self._running.engine

    def tokenizer(self) -> Any:
        """Return the tokenizer that vLLM has, with the ends of its generation config."""
        given = self._running.engine.get_tokenizer()
        return Tokenizer.wrap(given, stop_ids=ends_of(self._running.engine))

    def sampling_defaults(self) -> ModelDefaults:
        """Return what the model's generation config asks for."""
        config = self._running.engine.model_config.try_get_generation_config()
        return ModelDefaults.from_generation_config(config)

    # The protocol

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Ask for the logits after every wanted place; see Engine.forward.

        Cost: a request, or a token of one that is open, for each wanted place.
        """
        self._check_open()
        reader = self._reader
        if reader is None:
            raise Unsupported(NO_ROWS)
        for row in rows:
            self._check_row(row)
        wanted = [(row.adapter, _ids(row)[: at + 1]) for row in rows for at in row.logits_at]
        logits = self._rows(reader, wanted)
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
        mark = adapter_mark(Path(folder))
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
        """Forget an adapter; rows that still name it are refused."""
        lora = self._loras.pop(name, None)
        if lora is not None and not self._running.closed:
            self._running.loop.call(self._running.engine.remove_lora(lora.lora_int_id))

    def close(self) -> None:
        """End vLLM's processes, where Weft started them; idempotent."""
        self._finish()

    # One forward

    def _rows(self, reader: RowReader, paths: list[RowPath]) -> np.ndarray:
        if not paths:
            return np.empty((0, self.info.n_vocab), np.float32)
        distinct = list(dict.fromkeys(paths))
        try:
            found = self._running.loop.call(reader.rows(distinct, self._loras))
        except WeftError:
            raise
        except Exception as error:
            raise as_failure(error) from error
        by_path = dict(zip(distinct, found, strict=True))
        return np.stack([by_path[path] for path in paths])

    def _scores(self, reader: RowReader, row: Row) -> list[Score]:
        ids = _ids(row)

        def logits_of(first: int, last: int) -> np.ndarray:
            places = range(first, last)
            return self._rows(reader, [(row.adapter, ids[: at + 1]) for at in places])

        return [metrics.score_span(span, self.info.n_vocab, logits_of) for span in row.scores]

    def _check_open(self) -> None:
        if self._running.closed:
            raise ForwardError("the engine is closed; load the model again")

    def _check_row(self, row: Row) -> None:
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
            raise ForwardError(f"logits_at {row.logits_at} lies outside a row of {n} tokens")
        if row.adapter not in self._loras:
            name = str(row.adapter).rpartition("#")[0]
            raise StaleHandle(f"the LoRA adapter {name!r} was removed; add it again")


def _ids(row: Row) -> tuple[int, ...]:
    assert not isinstance(row.tokens, FutureTokens)  # only for engines that overlap
    return tuple(row.tokens)


def vocab_of(config: Mapping[str, Any]) -> int:
    """Return how many logits a row has, by config.json; of models that see, by their text's."""
    of_text = config.get("text_config") or {}
    return int(config.get("vocab_size") or of_text.get("vocab_size") or 0)


def adapter_mark(folder: Path) -> str:
    """Return a fingerprint of an adapter's files. Raises: ModelLoadError."""
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
    """Refuse what is no way for rows to come."""
    if rows not in ("auto", "board", "logprobs"):
        raise ConfigError(f'rows is {rows!r}; allowed are "auto", "board" and "logprobs"')


NO_ROWS = (
    "this AsyncLLM was started without full logits: no next-token distributions, no measuring, no"
    ' branches; give it max_logprobs=-1, or let Weft start it: weft.load(name, engine="vllm")'
)
