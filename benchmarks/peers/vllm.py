"""vLLM's own way to continue one prompt n times: `LLM.generate` with n, seeded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

TEMPERATURE = 0.8
# As weft.load(…, engine="vllm") starts it on a CPU.
ON_CPU: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 2 << 30,
}


def loops(folder: str) -> list[Callable[[list[int], int, int], int]]:
    """Return loop(prompt_ids, n, n_new) -> generated tokens, over an engine started once."""
    llm = started(folder)

    def generate(prompt_ids: list[int], n: int, n_new: int) -> int:
        return _generate(llm, prompt_ids, n, n_new)

    return [generate]


def peer(folder: str, prompt_ids: Sequence[int], n: int, max_tokens: int) -> float:
    """Return the seconds of one job, of a second call: prefill as far as it is not cached yet."""
    llm = started(folder)
    _generate(llm, prompt_ids, n, 4)
    began = time.perf_counter()
    assert _generate(llm, prompt_ids, n, max_tokens) == n * max_tokens
    return time.perf_counter() - began


def started(folder: str) -> Any:
    """Start vLLM with a folder, in float32."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM
    from vllm.platforms import current_platform

    options = ON_CPU if current_platform.is_cpu() else {}
    return LLM(
        folder, dtype="float32", enable_prefix_caching=True, disable_log_stats=True, **options
    )


def _generate(llm: Any, prompt_ids: Sequence[int], n: int, n_new: int) -> int:
    from vllm import SamplingParams

    params = SamplingParams(n=n, max_tokens=n_new, temperature=TEMPERATURE, seed=1, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": list(prompt_ids)}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return sum(len(each.token_ids) for each in output.outputs)
