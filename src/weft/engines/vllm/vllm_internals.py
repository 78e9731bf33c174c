"""What Weft knows of vLLM's objects beside its documented calls: all of it is here.

tests/engines/test_vllm_contract.py holds it, and what Weft expects of open requests and of the tap,
against the vLLM that is installed.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from ...errors import ModelLoadError, Unsupported
from ..checkpoint import open_checkpoint


def loop_of(engine: Any) -> asyncio.AbstractEventLoop | None:
    """Return the event loop that an AsyncLLM runs on already; None: on none yet."""
    handler = engine.output_handler
    return None if handler is None else handler.get_loop()


def stop_listening(engine: Any) -> None:
    """Cancel the task that hears of the engine's processes, so that their end is no surprise."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()


def kv_tokens(config: Any) -> int:
    """Return how many tokens of KV there is room for."""
    cache = config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)


def idle_tokens(config: Any) -> int:
    """Return how many tokens of KV idle requests may hold: two paths of any length fit beside."""
    capacity = kv_tokens(config)
    return max(0, min(capacity // 2, capacity - 2 * int(config.model_config.max_model_len)))


def n_places(config: Any) -> int:
    """Return how many requests run at once."""
    return int(config.scheduler_config.max_num_seqs)


def has_drafts(config: Any) -> bool:
    """Whether it decodes speculatively: then vLLM takes no logits processors."""
    return config.speculative_config is not None


def has_all_logprobs(engine: Any) -> bool:
    """Whether it may be asked for the log-probabilities of all tokens."""
    model = engine.vllm_config.model_config
    return bool(model.max_logprobs == -1 or model.max_logprobs >= model.get_vocab_size())


def ends_of(engine: Any) -> list[int]:
    """Return the end tokens that the model's generation config names."""
    found = engine.model_config.try_get_generation_config().get("eos_token_id")
    return [found] if isinstance(found, int) else list(found or ())


def has_one_end(engine: Any) -> bool:
    """Whether vLLM's grammars end a text by all the end tokens that there are: the tokenizer's."""
    own = engine.get_tokenizer().eos_token_id
    return own is not None and set(ends_of(engine)) <= {own}


def mark_of(engine: Any) -> str:
    """Return what the numbers depend on besides the files: how the weights are quantised."""
    quantised = engine.model_config.quantization
    return f"+{quantised}" if quantised else ""


def adopted_mark(engine: Any) -> str:
    """Return a fingerprint of an engine that somebody else started."""
    config = engine.model_config
    try:
        return open_checkpoint(Path(config.model)).fingerprint() + mark_of(engine)
    except (ModelLoadError, Unsupported):
        told = f"vllm {config.model} {config.revision} {config.dtype} {config.quantization}"
        return hashlib.sha256(told.encode()).hexdigest()
