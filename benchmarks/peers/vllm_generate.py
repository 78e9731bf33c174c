"""vLLM's own loop, without Weft: `LLM.generate` with n continuations of one prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

# As weft.load(…, engine="vllm") starts it on a CPU.
ON_CPU: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 2 << 30,
}
TEMPERATURE = 0.8
_engines: dict[str, Any] = {}


def engine_of(folder: str) -> Any:
    """Return an LLM of a folder in float32, started once."""
    if folder not in _engines:
        from vllm import LLM
        from vllm.platforms import current_platform

        options = ON_CPU if current_platform.is_cpu() else {}
        _engines[folder] = LLM(
            folder, dtype="float32", enable_prefix_caching=True, disable_log_stats=True, **options
        )
    return _engines[folder]


def peer(folder: str, prompt_ids: Sequence[int], n: int, max_tokens: int) -> float:
    """Return the seconds of one job: prefill and n x max_tokens tokens, seeded, nothing recorded."""
    from vllm import SamplingParams

    llm = engine_of(folder)
    params = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=TEMPERATURE, seed=1, ignore_eos=True
    )
    llm.reset_prefix_cache()
    began = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": list(prompt_ids)}, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert [len(each.token_ids) for each in output.outputs] == [max_tokens] * n
    return seconds
