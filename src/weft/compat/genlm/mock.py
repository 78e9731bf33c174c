"""`MockAsyncLM`: numbers without a model, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...aio import AsyncLM
from ...errors import ConfigError
from ...tokens.tokenizer import Tokenizer
from .wrappers import HAS_TORCH


class MockAsyncLM(AsyncLM):
    """Log-softmaxed random numbers; the seed is the sum of (i + 1) * token, modulo 2**32."""

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> MockAsyncLM:
        """Return one over the tokenizer of a model: "tiny", a folder, or a Hub id."""
        if kwargs:
            raise ConfigError(f"MockAsyncLM takes no {', '.join(kwargs)}")
        from pathlib import Path

        if model_name == "tiny":
            from importlib.resources import files

            return cls(Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny"))))
        if Path(model_name).is_dir():
            return cls(Tokenizer.from_folder(Path(model_name)))
        from tokenizers import Tokenizer as Backend

        return cls(Backend.from_pretrained(model_name))

    @cached_property
    def _n_vocab(self) -> int:
        return len(self.byte_vocab)

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return made-up log-probabilities: float32 [V]."""
        return self.next_token_logprobs_sync(token_ids, lora_name)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """The same. An empty context is one, too."""
        if lora_name is not None:
            raise ConfigError(f"the mock has no LoRA adapters; lora_name is {lora_name!r}")
        seed = sum((at + 1) * int(token) for at, token in enumerate(token_ids)) % 2**32
        logits = np.random.RandomState(seed).rand(self._n_vocab).astype(np.float32)
        if HAS_TORCH:
            import torch

            return torch.from_numpy(logits).log_softmax(-1)
        from ...aio.tree import log_softmax

        return log_softmax(logits)
