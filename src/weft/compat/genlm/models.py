"""genlm-backend's model classes over an LM, its explicit queries, and a mock model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..._core.installation import install_hint
from ..._core.sampling.metrics import log_softmax
from ..._core.tokens.tokenizer import Tokenizer
from ..._core.validation import check_int
from ...asynclm import AbstractAsyncLM, AsyncLM
from ...asynclm.asynclm import int_list, lora_kwargs
from ...engines.hub import EMBEDDED, resolve
from ...errors import ConfigError, EngineUnavailable, ModelLoadError
from ...lm.lm import LM
from ...loading import display_name, load
from .cache import CachedContext

HAS_TORCH = find_spec("torch") is not None


class MockAsyncLM(AbstractAsyncLM):
    """A model for tests: random log-probabilities that depend only on the context; no weights.

    The random seed is the sum of (i + 1) * token over the context, modulo 2**32.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._rng = np.random.RandomState()  # for genlm's subclasses; this class does not use it

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> MockAsyncLM:
        """Create a mock with the tokenizer of a model: "tiny", a folder, or a Hub id.

        The tokenizer is the one of Transformers if that package is installed.

        kwargs: not supported; any keyword raises ConfigError.
        """
        if kwargs:
            raise ConfigError(f"MockAsyncLM takes no {', '.join(kwargs)}")
        name = str(resolve(EMBEDDED)) if model_name == EMBEDDED else model_name
        if find_spec("transformers") is None:
            return cls(Tokenizer.from_folder(resolve(name)))
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(name))

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the random log-probabilities after a context: float32 [V].

        Raises: ConfigError with a `lora_name`; the mock has no LoRA adapters.
        """
        return self.next_token_logprobs_sync(token_ids, lora_name)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the random log-probabilities after a context: float32 [V].

        Like `next_token_logprobs` without `await`. The context may be empty.

        Raises: ConfigError with a `lora_name`; the mock has no LoRA adapters.
        """
        if lora_name is not None:
            raise ConfigError(f"the mock has no LoRA adapters; lora_name is {lora_name!r}")
        return self._get_logprobs(token_ids)

    def _get_logprobs(self, token_ids: Sequence[int]) -> Any:
        """Return the random log-probabilities of a context: float32 [V].

        Subclasses may override this.
        """
        seed = sum((at + 1) * int(token) for at, token in enumerate(token_ids)) % 2**32
        logits = np.random.RandomState(seed).rand(len(self.byte_vocab)).astype(np.float32)
        if HAS_TORCH:
            import torch

            return torch.from_numpy(logits).log_softmax(-1)
        return log_softmax(logits)


# Further names of torch's dtypes.
_DTYPES = {"float": "float32", "half": "float16"}


@dataclass(slots=True)
class Query:
    """A queued request for next-token log-probabilities, and the future that receives them.

    prompt: token ids of the context.
    past: accepted, because genlm-backend's callers pass it; without effect.
    lora_name: the LoRA adapter; None: the base model.
    """

    prompt: Sequence[int]
    future: asyncio.Future[Any]
    past: Any = None
    lora_name: str | None = None


class GenlmModel(AsyncLM):
    """Base class of genlm-backend's model classes: an `AsyncLM` with genlm's query methods.

    Attributes:
        queries: queries that wait for the next batch.
        timeout: without effect; a batch starts when no more callers arrive.
        timer: always None.
    """

    def __init__(
        self,
        lm: LM,
        tokenizer: Any = None,
        *,
        batch_size: int | None,
        timeout: float,
        cache_size: int | None = None,
    ) -> None:
        """Wrap an LM.

        Args:
            lm: the LM.
            tokenizer: the object for the attribute `tokenizer`; None: the LM's.
            batch_size: maximum number of contexts in flight; None: no limit.
            timeout: value of the attribute; without effect.
            cache_size: maximum number of cached rows; None: the LM's own byte budget.
        """
        if not isinstance(timeout, int | float) or timeout < 0:
            raise ConfigError(f"timeout is {timeout!r}; allowed are seconds from 0 on")
        super().__init__(lm, batch_size=batch_size, as_torch=HAS_TORCH)
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self.timeout = timeout
        self.timer: Any = None
        self.queries: list[Query] = []
        self._tasks: set[asyncio.Task[None]] = set()
        if cache_size is not None:
            cap_rows(lm, cache_size)

    @property
    def model(self) -> Any:
        """The model object of the engine's library, such as a Transformers model."""
        lm = self.lm
        return getattr(lm.engine, "model", lm.model) if lm.model is lm.engine else lm.model

    @property
    def device(self) -> Any:
        """The model's device: a torch.device if torch is installed, else a str."""
        if not HAS_TORCH:
            return self.lm.info.device
        import torch

        return torch.device(self.lm.info.device)

    def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Compute the log-probabilities after a context without any cache: float32 [V].

        It runs one forward of the full context and blocks. Use it to check cached results.
        """
        return self._to_output(self._exact.compute(self._place(token_ids, lora_name)))

    # Explicit queries -------------------------------------------------------------------------

    def add_query(
        self,
        query: Sequence[int],
        future: asyncio.Future[Any],
        past: Any = None,
        lora_name: str | None = None,
    ) -> None:
        """Queue a request for the log-probabilities after a context.

        All queued requests run in one batch: when `batch_size` of them wait, else in the next
        iteration of the event loop.

        Args:
            query: token ids of the context.
            future: receives the log-probabilities [V], or the error.
            past: has no effect.
            lora_name: the LoRA adapter; None: the base model.
        """
        self.queries.append(Query(query, future, past, lora_name))
        if self.batch_size is not None and len(self.queries) >= self.batch_size:
            self.batch_evaluate_queries()
        else:
            future.get_loop().call_soon(self._start_queries)

    def batch_evaluate_queries(self) -> None:
        """Run all queued requests now, as one batch, and block until their futures are set."""
        queries, self.queries = self.queries, []
        for name in dict.fromkeys(query.lora_name for query in queries):
            self._evaluate_batch([query for query in queries if query.lora_name == name], name)

    def reset_async_queries(self) -> None:
        """Cancel the requests that are queued by `add_query` or submitted to the scheduler.

        Futures of queued requests are cancelled. Callers of submitted requests get BatchAbandoned.
        Requests that wait because `batch_size` others run are not cancelled.
        """
        super().reset_async_queries()
        queries, self.queries = self.queries, []
        for query in queries:
            query.future.cancel()

    def _evaluate_batch(self, queries: list[Query], name: str | None) -> None:
        """Run queries of one adapter as one batch; if it fails, run them one by one.

        name: the adapter; None: the base model.
        """
        pending = [query for query in queries if not query.future.done()]
        try:
            prompts = [list(query.prompt) for query in pending]
            rows = self.batch_next_token_logprobs_sync(prompts, **lora_kwargs(name))
        except Exception as error:
            if len(pending) == 1:
                pending[0].future.set_exception(error)
                return
            for query in pending:  # the error is one query's own
                self._evaluate_batch([query], name)
            return
        for query, row in zip(pending, rows, strict=True):
            query.future.set_result(row)

    def _start_queries(self) -> None:
        """Start a task for each queued request."""
        queries, self.queries = self.queries, []
        for query in queries:
            task = asyncio.ensure_future(self._run_query(query))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_query(self, query: Query) -> None:
        """Await one request's log-probabilities and set its future's result or error."""
        try:
            row = await self.next_token_logprobs(query.prompt, **lora_kwargs(query.lora_name))
        except Exception as error:
            if not query.future.done():
                query.future.set_exception(error)
        else:
            if not query.future.done():
                query.future.set_result(row)

    # The cache --------------------------------------------------------------------------------

    @property
    def cache(self) -> CachedContext:
        """The LM's cached contexts with genlm's trie interface: the root of the base model."""
        return CachedContext(self.lm, ())

    @property
    def _caches(self) -> dict[str | None, CachedContext]:
        """The roots of the cached contexts: adapter name → root; None → the base model."""
        names = (None, *self.lm.adapters)
        return {name: CachedContext(self.lm, (), name) for name in names}

    def walk_cache(  # type: ignore[override]  # nodes that can be walked on from
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[CachedContext, int, CachedContext | None, int]:
        """Look up how much of a context is cached; return (node, n_matched, past, base).

        node: the longest prefix of the context that is in the token tree; `n_matched` is its
            number of tokens.
        past: the longest proper prefix of the context that has KV; `base` is its number of tokens.
            None if no prefix has KV.
        """
        ids = int_list("token_ids", token_ids)
        _, n_matched, past, base = super().walk_cache(ids, lora_name)
        node = CachedContext(self.lm, ids[:n_matched], lora_name)
        before = None if past is None else CachedContext(self.lm, ids[:base], lora_name)
        return node, n_matched, before, base


class AsyncTransformer(GenlmModel):
    """genlm-backend's class for Transformers models: next-token log-probabilities for asyncio."""

    def __init__(
        self, hf_model: Any, hf_tokenizer: Any, batch_size: int = 20, timeout: float = 0.02
    ) -> None:
        """Wrap a loaded model.

        Args:
            hf_model: the Transformers model, or an LM.
            hf_tokenizer: its tokenizer.
            batch_size: maximum number of contexts in flight.
            timeout: has no effect.
        """
        lm = LM.from_model(hf_model, hf_tokenizer)
        super().__init__(lm, hf_tokenizer, batch_size=batch_size, timeout=timeout)

    @classmethod
    def from_name(
        cls,
        model_id: str,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncTransformer:
        """Load a model by its Hub id or folder, and wrap it.

        `model` is the Transformers model and `tokenizer` the Transformers tokenizer.

        Args:
            bitsandbytes_opts: keywords of Transformers' `BitsAndBytesConfig`, for quantized
                weights.
            hf_opts: keywords of `from_pretrained`. Defaults: {"device_map": "auto", "torch_dtype":
                "auto"}; "auto" works without accelerate.
            kwargs: keywords of the constructor.

        Raises: ModelLoadError for options that the loader rejects; EngineUnavailable without
        bitsandbytes.
        """
        options = dict(hf_opts or {})
        if bitsandbytes_opts:
            options["quantization_config"] = _bitsandbytes(bitsandbytes_opts)
        if options.keys() <= _LOADED_BY_WEFT:
            return cls(*load_with_tokenizer(model_id, load_options(options)), **kwargs)
        return cls(*_from_pretrained(model_id, options), **kwargs)


class AsyncVirtualLM(GenlmModel):
    """genlm-backend's class for vLLM engines: next-token log-probabilities for asyncio."""

    def __init__(
        self,
        async_llm_engine: Any = None,
        *positional: Any,
        llm_engine: Any = None,
        logprobs_capture: Any = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
    ) -> None:
        """Wrap a vLLM engine. All three signatures of genlm-backend's versions work.

        Args:
            async_llm_engine, llm_engine: the engine, by the older or the newer name.
            positional: by position (cache_size, cache_opts), or (logprobs_capture, cache_size,
                cache_opts, batch_size, timeout).
            logprobs_capture: accepted, not used.
            cache_size: maximum number of cached rows; 0: the LM's own byte budget.
            cache_opts: accepted, not used; rows are stored on the host.
            batch_size: maximum number of contexts in flight.
            timeout: has no effect.
        """
        options = {
            "cache_size": cache_size,
            "batch_size": batch_size,
            "timeout": timeout,
        } | _by_position(positional)
        lm = LM.from_model(llm_engine if async_llm_engine is None else async_llm_engine)
        own = lm.engine.tokenizer()
        super().__init__(
            lm,
            None if own is None else Tokenizer.wrap(own).object,
            batch_size=options["batch_size"],
            timeout=options["timeout"],
            cache_size=options["cache_size"] or None,
        )
        self.async_llm_engine = self.llm_engine = self.model

    @classmethod
    def from_name(
        cls, model_name: str, engine_opts: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AsyncVirtualLM:
        """Load a model with vLLM. The attribute `tokenizer` is vLLM's own.

        Args:
            model_name: a Hub id or folder.
            engine_opts: options of vLLM's engine.
            kwargs: keywords of the constructor.

        Raises: EngineUnavailable if vLLM is not installed.
        """
        return cls(load_on_engine("vllm", model_name, engine_opts), **kwargs)

    @property
    def underlying_model(self) -> Any:
        """The PyTorch model object inside vLLM's engine."""
        return self.lm.model

    async def release_all(self) -> None:
        """Do the same as `reset_async_queries`."""
        self.reset_async_queries()

    def cleanup(self) -> None:
        """Close the engine and free its memory."""
        self.lm.close()

    def __enter__(self) -> AsyncVirtualLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    async def __aenter__(self) -> AsyncVirtualLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.cleanup)


def _by_position(positional: tuple[Any, ...]) -> dict[str, Any]:
    """Name the positional arguments of `AsyncVirtualLM` after the engine: argument name → value."""
    names = ["cache_size", "cache_opts"]
    if positional and not isinstance(positional[0], int):
        names = ["logprobs_capture", *names, "batch_size", "timeout"]
    if len(positional) > len(names):
        raise ConfigError(
            f"{len(positional) + 1} arguments by position; allowed are the engine and "
            f"{', '.join(names)}"
        )
    return dict(zip(names, positional, strict=False))


# Option of `from_pretrained` → the equivalent option of `weft.load`.
_RENAMED = {"torch_dtype": "dtype", "dtype": "dtype", "device_map": "device"}
_HUB = {"revision", "token", "local_files_only"}
_LOADED_BY_WEFT = {*_RENAMED, *_HUB, "trust_remote_code", "quantization_config"}


def load_with_tokenizer(model_id: str, options: Mapping[str, Any]) -> tuple[LM, Any]:
    """Load a model; return its LM and its Transformers tokenizer, from the same files.

    Args:
        model_id: "tiny", a folder, or a Hub id.
        options: keywords of `weft.load`, and which revision or cache of the Hub to use.
    """
    folder = _resolve_folder(model_id, options)
    given = {name: value for name, value in options.items() if name not in _HUB}
    lm = load(EMBEDDED if model_id == EMBEDDED else folder, **{"engine": "torch", **given})
    lm.engine.info = replace(lm.engine.info, model=display_name(model_id))
    return lm, _load_tokenizer(model_id, folder, options)


def _from_pretrained(model_id: str, hf_opts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Load a Transformers model; return it and its Transformers tokenizer.

    Used for options that `weft.load` does not have.

    hf_opts: keywords of Transformers' `from_pretrained`.
    Raises: ModelLoadError if Transformers rejects them; EngineUnavailable without Transformers.
    """
    if find_spec("transformers") is None:
        hint = install_hint("torch")
        raise EngineUnavailable(f"AsyncTransformer needs Transformers: {hint}", hint=hint)
    from transformers import AutoModelForCausalLM

    folder = _resolve_folder(model_id, hf_opts)
    options = {name: value for name, value in hf_opts.items() if name not in _HUB}
    options.setdefault("dtype", options.pop("torch_dtype", "auto"))
    if find_spec("accelerate") is not None:
        options.setdefault("device_map", "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # arbitrary options can raise any exception
        raise ModelLoadError(
            f"Transformers cannot load {model_id} with {', '.join(options)}: {error}"
        ) from error
    return model, _load_tokenizer(model_id, folder, hf_opts)


def _resolve_folder(model_id: str, options: Mapping[str, Any]) -> Any:
    """Return the local folder of a model, downloaded from the Hub if necessary."""
    return resolve(
        model_id,
        remote_code=options.get("trust_remote_code", False),
        bare_ids=True,
        **{name: options[name] for name in _HUB & options.keys()},
    )


def _load_tokenizer(model_id: str, folder: Any, options: Mapping[str, Any]) -> Any:
    """Load a model's Transformers tokenizer from its folder."""
    from transformers import AutoTokenizer  # a dependency of the torch engine

    remote_code = options.get("trust_remote_code", False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote_code)
    tokenizer.name_or_path = model_id
    return tokenizer


def load_options(hf_opts: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keywords of Transformers' `from_pretrained` to keywords of `weft.load`.

    hf_opts: keywords in `_LOADED_BY_WEFT`. Those that select files on the Hub stay unchanged.
    """
    options: dict[str, Any] = {}
    for name, value in hf_opts.items():
        if name in _RENAMED:
            text = "auto" if value is None else str(value).removeprefix("torch.")
            options[_RENAMED[name]] = _DTYPES.get(text, text)
        elif name == "quantization_config":
            options["engine_options"] = {name: value}
        else:
            options[name] = value
    return options


def _bitsandbytes(options: Mapping[str, Any]) -> Any:
    """Create a Transformers `BitsAndBytesConfig` for quantized weights.

    Raises: EngineUnavailable without bitsandbytes.
    """
    if find_spec("bitsandbytes") is None:
        raise EngineUnavailable(
            "bitsandbytes_opts needs the package bitsandbytes, which is not installed; run:"
            " pip install bitsandbytes",
            hint="pip install bitsandbytes",
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def cap_rows(lm: LM, n_rows: int) -> None:
    """Limit the LM's cache of logits rows to the bytes of `n_rows` rows, if that is less."""
    n_bytes = check_int("cache_size", n_rows, 0) * 4 * lm.info.n_vocab
    rows = lm.scheduler.logits_cache
    rows.budget_bytes = min(rows.budget_bytes, n_bytes)


def load_on_engine(engine: str, name: str, options: Mapping[str, Any] | None) -> LM:
    """Load a model on an engine, and return its LM.

    Args:
        engine: name of the engine, such as "vllm".
        name: a Hub id or folder.
        options: options of the engine; None: none.

    Raises: EngineUnavailable if this version of Weft lacks the engine.
    """
    from ...engines import engine_names

    if engine not in engine_names():
        raise EngineUnavailable(
            f"this version of Weft has no {engine} engine; there are {', '.join(engine_names())}",
            hint='backend="hf" (AsyncTransformer) runs it with torch',
        )
    return load(name, engine=engine, engine_options=options)
