"""All accesses to vLLM's objects beyond its documented interface.

tests/engines/test_vllm_contract.py checks these, and Weft's assumptions about open requests and
logits processors, against the installed vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from ...errors import ModelLoadError, Unsupported
from ..checkpoint import open_checkpoint


def loop_of(engine: Any) -> asyncio.AbstractEventLoop | None:
    """Return the event loop that an AsyncLLM runs on; None if it has none yet."""
    handler = engine.output_handler
    return None if handler is None else handler.get_loop()


def cancel_output_handler(engine: Any) -> None:
    """Cancel the AsyncLLM's task that receives outputs and watches the engine's processes.

    Otherwise it would report the exit of the processes, when they are stopped, as an error.
    """
    if engine.output_handler is not None:
        engine.output_handler.cancel()


def kv_tokens(config: Any) -> int:
    """Return the capacity of KV in tokens."""
    cache = config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)


def idle_tokens(config: Any) -> int:
    """Return the maximum of KV tokens of idle requests; two paths of any length still fit."""
    capacity = kv_tokens(config)
    return max(0, min(capacity // 2, capacity - 2 * int(config.model_config.max_model_len)))


def max_num_seqs(config: Any) -> int:
    """Return the maximum number of concurrent requests."""
    return int(config.scheduler_config.max_num_seqs)


def is_speculative(config: Any) -> bool:
    """Return True for speculative decoding, in which vLLM does not support logits processors."""
    return config.speculative_config is not None


def has_all_logprobs(engine: Any) -> bool:
    """Return True if requests may ask for the log-probabilities of all tokens."""
    model = engine.vllm_config.model_config
    return bool(model.max_logprobs == -1 or model.max_logprobs >= model.get_vocab_size())


def end_ids_of(engine: Any) -> list[int]:
    """Return the end tokens in the model's generation config."""
    ids = engine.model_config.try_get_generation_config().get("eos_token_id")
    return [ids] if isinstance(ids, int) else list(ids or ())


def has_one_end(engine: Any) -> bool:
    """Return True if the tokenizer's end token is the only one, as vLLM's grammars assume."""
    own = engine.get_tokenizer().eos_token_id
    return own is not None and set(end_ids_of(engine)) <= {own}


def fingerprint_suffix(engine: Any) -> str:
    """Return a suffix for the fingerprint: the quantisation of the weights."""
    quantised = engine.model_config.quantization
    return f"+{quantised}" if quantised else ""


def adopted_fingerprint(engine: Any) -> str:
    """Return the fingerprint of an engine that the caller started."""
    config = engine.model_config
    try:
        return open_checkpoint(Path(config.model)).fingerprint() + fingerprint_suffix(engine)
    except (ModelLoadError, Unsupported):
        text = f"vllm {config.model} {config.revision} {config.dtype} {config.quantization}"
        return hashlib.sha256(text.encode()).hexdigest()
