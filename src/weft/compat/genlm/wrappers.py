"""The known classes: thin constructors over an LM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ...aio.tree import TreeLM
from ...errors import ConfigError, EngineUnavailable, Unsupported
from ...lm import LM
from ...loading import load
from .queries import Queries, Query

HAS_TORCH = find_spec("torch") is not None


class _Known(TreeLM):
    """What the known classes share: queries by hand, and their attributes.

    timeout: taken, and never waited: a batch closes when no more callers come.
    """

    def __init__(
        self, lm: LM, *, batch_size: int | None, timeout: float, cache_size: int | None = None
    ) -> None:
        if not isinstance(timeout, int | float) or timeout < 0:
            raise ConfigError(f"timeout is {timeout!r}; allowed are seconds from 0 on")
        super().__init__(lm, batch_size=batch_size, as_torch=HAS_TORCH)
        self.timeout = timeout
        self.timer: Any = None
        self._queries = Queries()
        if cache_size is not None:
            cap_rows(lm, cache_size)

    @property
    def model(self) -> Any:
        """The model object that was handed in."""
        return self.lm.model

    @property
    def device(self) -> str:
        """Where the model is."""
        return self.lm.info.device

    @property
    def queries(self) -> list[Query]:
        """What waits for `batch_evaluate_queries`."""
        return self._queries.waiting

    def add_query(
        self,
        query: Sequence[int],
        future: asyncio.Future[Any],
        past: Any = None,
        lora_name: str | None = None,
    ) -> None:
        """Put in a query; answered by `batch_evaluate_queries`, or when there are batch_size."""
        self._queries.waiting.append(Query(query, future, past, lora_name))
        if self.batch_size is not None and len(self._queries.waiting) >= self.batch_size:
            self.batch_evaluate_queries()

    def batch_evaluate_queries(self) -> None:
        """Answer all queries that were put in, together."""
        self._queries.evaluate(self)

    def reset_async_queries(self) -> None:
        """End all queries that wait; their callers are told, none is left waiting."""
        super().reset_async_queries()
        waiting, self._queries.waiting = self._queries.waiting, []
        for query in waiting:
            query.future.cancel()


class AsyncTransformer(_Known):
    """A loaded Transformers model, awaited."""

    def __init__(
        self, hf_model: Any, hf_tokenizer: Any, batch_size: int = 20, timeout: float = 0.02
    ) -> None:
        """batch_size: contexts in flight at most. timeout: never waited."""
        super().__init__(LM.of(hf_model, hf_tokenizer), batch_size=batch_size, timeout=timeout)

    @classmethod
    def from_name(
        cls,
        model_id: str,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncTransformer:
        """Load a model by its id or folder. hf_opts: of `from_pretrained`, as far as Weft has them.

        Raises: Unsupported for other options.
        """
        if bitsandbytes_opts:
            raise Unsupported(
                "bitsandbytes_opts: load the model yourself and hand it over:"
                " AsyncTransformer(model, tokenizer)"
            )
        lm = load(model_id, **load_options(hf_opts or {}))
        return cls(lm, None, **kwargs)


class AsyncVirtualLM(_Known):
    """A vLLM engine, awaited."""

    def __init__(
        self,
        llm_engine: Any,
        logprobs_capture: Any = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
    ) -> None:
        """cache_size: rows kept at most; 0: the LM's own budget in bytes."""
        super().__init__(
            LM.of(llm_engine), batch_size=batch_size, timeout=timeout, cache_size=cache_size or None
        )

    @classmethod
    def from_name(
        cls, model_name: str, engine_opts: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AsyncVirtualLM:
        """Load a model with vLLM. Raises: EngineUnavailable where Weft's vLLM engine is not."""
        return cls(_with_engine("vllm", model_name, engine_opts), **kwargs)

    @property
    def underlying_model(self) -> Any:
        """The model that the engine runs."""
        return self.lm.model

    async def release_all(self) -> None:
        """End all queries that wait."""
        self.reset_async_queries()

    def cleanup(self) -> None:
        """Close the engine."""
        self.lm.close()

    def __enter__(self) -> AsyncVirtualLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    async def __aenter__(self) -> AsyncVirtualLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.cleanup)


class AsyncMlxLM(_Known):
    """A loaded MLX model, awaited."""

    def __init__(
        self,
        mlx_lm_model: Any,
        tokenizer: Any = None,
        batch_size: int = 5,
        timeout: float = 0.001,
        prefill_step_size: int = 2048,
        cache_size: int = 400,
        cache_opts: Mapping[str, Any] | None = None,
    ) -> None:
        """prefill_step_size: n_batch of the LM is used. cache_size: rows kept at most."""
        lm = LM.of(mlx_lm_model, tokenizer)
        super().__init__(lm, batch_size=batch_size, timeout=timeout, cache_size=cache_size or None)

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> AsyncMlxLM:
        """Load a model with MLX. Raises: EngineUnavailable where Weft's MLX engine is not."""
        return cls(_with_engine("mlx", model_name, None), **kwargs)


def load_options(hf_opts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `weft.load` for those of `from_pretrained`."""
    names = {"torch_dtype": "dtype", "dtype": "dtype", "device_map": "device"}
    same = ("revision", "token", "trust_remote_code", "local_files_only")
    options: dict[str, Any] = {}
    for name, value in hf_opts.items():
        if name in names:
            text = str(value).removeprefix("torch.")
            options[names[name]] = text
        elif name in same:
            options[name] = value
        else:
            raise Unsupported(
                f"hf_opts has {name}; allowed are {', '.join((*names, *same))}. For others load the"
                " model yourself and hand it over: AsyncTransformer(model, tokenizer)"
            )
    return options


def cap_rows(lm: LM, n_rows: int) -> None:
    """Keep at most so many rows of logits in the LM's cache."""
    if not isinstance(n_rows, int) or n_rows < 0:
        raise ConfigError(f"cache_size is {n_rows!r}; allowed is a whole number from 0 on")
    rows = lm.scheduler.rows
    rows.budget_bytes = min(rows.budget_bytes, n_rows * 4 * lm.info.n_vocab)


def _with_engine(engine: str, name: str, options: Mapping[str, Any] | None) -> LM:
    from ...engines import engine_names

    if engine not in engine_names():
        raise EngineUnavailable(
            f"this version of Weft has no {engine} engine; there are {', '.join(engine_names())}",
            hint=f"AsyncTransformer.from_name({name!r}) runs it with torch",
        )
    return load(name, engine=engine, engine_options=options)
