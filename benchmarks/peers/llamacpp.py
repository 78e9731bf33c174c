"""A loop by hand over llama-cpp-python's C calls: n branches of one prompt.

The prompt is prefilled once, each branch is a copy of its sequence in a unified cache, and every
step is one batch, filled through NumPy's views; tokens are drawn from a view of all logits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_BATCH = 512


def peer(
    model_path: str | Path,
    prompt_ids: Sequence[int],
    n: int,
    max_tokens: int,
    *,
    n_threads: int = 1,
    temperature: float = 0.8,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the new tokens a second of the complete job, prefill included."""
    loop = HandLoop(model_path, n, len(prompt_ids) + n * max_tokens + 64, n_threads)
    loop.run(prompt_ids, 4, temperature)
    began = clock()
    n_tokens = loop.run(prompt_ids, max_tokens, temperature)
    rate = n_tokens / (clock() - began)
    loop.close()
    return rate


def loops(model_path: str) -> list[Callable[[list[int], int, int], int]]:
    """Return loop(prompt_ids, n, n_new) -> generated tokens, over one context for each n."""
    open_loops: dict[int, HandLoop] = {}

    def loop(prompt_ids: list[int], n: int, n_new: int) -> int:
        if n not in open_loops:
            open_loops[n] = HandLoop(model_path, n, len(prompt_ids) + n * 128 + 64, 1)
        return open_loops[n].run(prompt_ids, n_new, 0.8)

    return [loop]


class HandLoop:
    """A model, a context and the arrays of its batch."""

    def __init__(self, model_path: str | Path, n: int, n_cells: int, n_threads: int) -> None:
        from llama_cpp import llama_cpp as C

        self.C, self.n = C, n
        C.llama_backend_init()
        given = C.llama_model_default_params()
        self.model = C.llama_model_load_from_file(str(model_path).encode(), given)
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_cells, N_BATCH, N_BATCH
        params.n_seq_max, params.kv_unified, params.no_perf = n + 1, True, True
        params.n_threads = params.n_threads_batch = n_threads
        self.ctx = C.llama_init_from_model(self.model, params)
        self.memory = C.llama_get_memory(self.ctx)
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))
        self.end = C.llama_vocab_eos(C.llama_model_get_vocab(self.model))
        self.batch = C.llama_batch_init(N_BATCH, 0, 1)
        self.tokens = self._view(self.batch.token)
        self.positions = self._view(self.batch.pos)
        self.wanted = self._view(self.batch.logits)
        self._view(self.batch.n_seq_id)[:] = 1
        self.sequences = np.zeros(N_BATCH, np.int32)
        for i in range(N_BATCH):
            place = ctypes.cast(self.sequences.ctypes.data + 4 * i, ctypes.POINTER(ctypes.c_int32))
            self.batch.seq_id[i] = place

    def _view(self, pointer: Any) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape=(N_BATCH,))

    def decode(self, n: int, n_logits: int) -> np.ndarray:
        self.batch.n_tokens = n
        if self.C.llama_decode(self.ctx, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(self.C.llama_get_logits(self.ctx), (n_logits, self.n_vocab))

    def run(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> int:
        """Run the job; return the new tokens."""
        rng, n = np.random.default_rng(1), self.n
        self.C.llama_memory_clear(self.memory, False)
        for at in range(0, len(prompt_ids), N_BATCH):
            part = prompt_ids[at : at + N_BATCH]
            self.tokens[: len(part)] = part
            self.positions[: len(part)] = np.arange(at, at + len(part))
            self.sequences[: len(part)] = 0
            self.wanted[: len(part)] = 0
            self.wanted[len(part) - 1] = 1
            logits = self.decode(len(part), 1)
        for branch in range(1, n):
            self.C.llama_memory_seq_cp(self.memory, 0, branch, 0, -1)
        logits = np.repeat(logits, n, axis=0)
        self.sequences[:n] = np.arange(n)
        self.wanted[:n] = 1
        for step in range(max_tokens):
            logits[:, self.end] = -np.inf
            # Gumbel's trick: the largest is a draw from the softmax.
            noise = -np.log(-np.log(rng.random(logits.shape, np.float32) + 1e-20))
            drawn = np.argmax(logits / temperature + noise, axis=1)
            if step == max_tokens - 1:
                break
            self.tokens[:n] = drawn
            self.positions[:n] = len(prompt_ids) + step
            logits = self.decode(n, n)
        return n * max_tokens

    def close(self) -> None:
        """Free it all but the batch, whose pointers to sequences are ours now."""
        self.C.llama_free(self.ctx)
        self.C.llama_model_free(self.model)
