"""genlm-backend's class for MLX, with its query type and cache tuples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core.sched.logits_cache import LogitsRow
from ...asynclm.asynclm import int_list
from ...engines.hub import resolve
from ...errors import ConfigError
from ...lm.lm import LM
from ...loom import kv_fragments
from .cache import CachedContext
from .models import GenlmModel, load_on_engine

if TYPE_CHECKING:
    from ..._core.kv.place import Place

__all__ = ["AsyncMlxLM", "Query"]


@dataclass(slots=True)
class MlxQuery:
    """A queued request for next-token log-probabilities, and the future that receives them.

    past, node, next_token_index: accepted, because genlm-backend's callers pass results of
        `walk_cache`; without effect.
    """

    prompt: Sequence[int]
    future: asyncio.Future[Any] | None
    past: Any = None
    node: Any = None
    next_token_index: int | None = None
    lora_name: str | None = None


Query = MlxQuery


class AsyncMlxLM(GenlmModel):
    """genlm-backend's class for MLX models: next-token log-probabilities for asyncio.

    Attributes:
        mlx_lm_model: the model of mlx-lm.
        prefill_step_size: has no effect.
        kv_cachable: False if the model's state is not KV of single tokens.
    """

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
        """Wrap a loaded model.

        Args:
            mlx_lm_model: the model of mlx-lm, or an LM.
            tokenizer: its tokenizer; None for an LM.
            batch_size: maximum number of contexts in flight.
            timeout, prefill_step_size, cache_opts: have no effect.
            cache_size: maximum number of cached rows; 0: the LM's own byte budget.
        """
        lm, rows = LM.from_model(mlx_lm_model, tokenizer), cache_size or None
        super().__init__(lm, tokenizer, batch_size=batch_size, timeout=timeout, cache_size=rows)
        self.mlx_lm_model = self.model
        self.prefill_step_size = prefill_step_size
        self.cache_size = cache_size
        self.kv_cachable = lm.info.kv == "addressable"

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> AsyncMlxLM:
        """Load a model with MLX; `tokenizer` is mlx-lm's own.

        kwargs: keywords of the constructor.

        Raises: EngineUnavailable where mlx-lm is not installed.
        """
        lm = load_on_engine("mlx", model_name, None)
        from ...engines.mlx.library import load_tokenizer

        return cls(lm, load_tokenizer(resolve(model_name)), **kwargs)

    @cached_property
    def generation_stream(self) -> Any:
        """An MLX stream, for programs that read this attribute. Weft does not compute on it."""
        import mlx.core as mx

        return mx.new_stream(mx.default_device())

    def add_query(
        self,
        query: Any,
        future: asyncio.Future[Any] | None = None,
        past: Any = None,
        lora_name: str | None = None,
    ) -> None:
        """Queue a request for the log-probabilities after a context, to run in the next batch.

        Args:
            query: an `MlxQuery`, or token ids.
            future: for token ids, the future that receives their log-probabilities [V].
            past: has no effect.
            lora_name: the LoRA adapter; None: the base model.

        Raises: ConfigError for token ids without a future.
        """
        if hasattr(query, "prompt"):
            future = query.future if future is None else future
            lora_name = lora_name or getattr(query, "lora_name", None)
            query = query.prompt
        if future is None:
            raise ConfigError("future is None; a query needs the future that its answer goes to")
        super().add_query(query, future, past, lora_name)

    def walk_cache(  # type: ignore[override]  # five values, as genlm-backend has them for MLX
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[CachedContext, int, Any, CachedContext, int]:
        """Return how much of a context is cached, with its KV.

        Args:
            token_ids: the context.
            lora_name: the LoRA adapter; None: the base model.

        Returns: (node, next_token_index, past_kvs, kv_node, kv_next_token_index).
            node: the longest prefix in the token tree; next_token_index is its number of tokens.
            past_kvs: MLX array [2, n_layers, n_kv_heads, kv_next_token_index, head_dim], keys
                first. None if no prefix has KV, and for a model without addressable KV.
            kv_node: the longest proper prefix with KV; kv_next_token_index is its number of tokens.

        Cost: a copy of the KV that it returns.
        """
        ids = int_list("token_ids", token_ids)
        node, n_matched, before, base = super().walk_cache(ids, lora_name)
        if before is None or not self.kv_cachable:
            return node, n_matched, None, self._caches[lora_name], 0
        place = self.lm.place(ids[:base], namespace=lora_name)
        return node, n_matched, self._kv_array(place), before, base

    def _kv_array(self, place: Place) -> Any:
        """Return a path's KV as one MLX array [2, n_layers, n_kv_heads, T, head_dim]."""
        layers = kv_fragments.export(self.lm, place).layers
        keys, values = (np.stack([layer[kind] for layer in layers]) for kind in (0, 1))
        return self.lm.engine.library_array(np.stack([keys, values]))

    def add_to_cache(
        self,
        queries: Sequence[Any],
        prompt_cache: Sequence[Any] | None = None,
        logprobs: Any = None,
    ) -> None:
        """Store log-probabilities and KV of contexts in the LM's token tree.

        Args:
            queries: N objects with a context's token ids as `prompt`, and optionally the name of
                its LoRA adapter as `lora_name`, such as `MlxQuery`.
            prompt_cache: mlx-lm's cache objects, one per layer. Row i has the KV of query i, padded
                on the left. None: store no KV.
            logprobs: log-probabilities after each query, [N, V]. None: store none.
        """
        for index, query in enumerate(queries):
            ids = int_list("prompt", query.prompt)
            name = getattr(query, "lora_name", None)
            place = self.lm.place(ids, namespace=name)
            if prompt_cache is not None and self.kv_cachable:
                marks = {"dtype": np.array(self.lm.info.dtype)}
                marks |= {} if name is None else {kv_fragments.ADAPTER: name}
                layers = [_unpadded_row(cache, index, len(ids)) for cache in prompt_cache]
                place = kv_fragments.load(self.lm, ids, layers, marks)
            if logprobs is not None:
                self._cache_logprobs(place, np.asarray(logprobs[index], dtype=np.float32))

    def _cache_logprobs(self, place: Place, logprobs: np.ndarray) -> None:
        """Store log-probabilities [V] as the cached row of a place in the token tree."""
        tree, rows = self.lm.tree, self.lm.scheduler.logits_cache

        def keep() -> None:
            row = LogitsRow()
            rows.set(row, logprobs)
            rows.attach(tree.place(place), row)

        self.lm.driver.exclusive(keep)

    def clear_cache(self) -> None:
        """Evict all cached rows and KV that no request uses, and free MLX's device cache."""
        super().clear_cache()
        import mlx.core as mx

        mx.clear_cache()


def _unpadded_row(cache: Any, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and values of one row of a batch, [n_kv_heads, length, head_dim] each.

    Args:
        cache: mlx-lm's cache object of one layer, padded on the left.
        index: index of the row.
        length: number of its tokens.
    """
    import mlx.core as mx

    padding = getattr(cache, "left_padding", None)
    start = 0 if padding is None else int(padding[index])
    used = (each[index, :, start : start + length] for each in (cache.keys, cache.values))
    keys, values = (np.array(each.astype(mx.float32)) for each in used)
    return keys, values
