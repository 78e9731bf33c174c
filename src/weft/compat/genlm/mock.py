"""`MockAsyncLM`: numbers without a model, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...aio.base import AbstractAsyncLM
from ...engines.source import EMBEDDED, resolve
from ...errors import ConfigError
from ...sampling.metrics import log_softmax
from ...tokens.tokenizer import Tokenizer
from .vocab import decode_vocab

HAS_TORCH = find_spec("torch") is not None


class MockAsyncLM(AbstractAsyncLM):
    """Log-softmaxed random numbers; the seed is the sum of (i + 1) * token, modulo 2**32."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._rng = np.random.RandomState()  # for known subclasses; rows here draw from their own

    @cached_property
    def str_vocab(self) -> list[str]:
        """The text of every token, by id; see `decode_vocab`."""
        return decode_vocab(self.tokenizer)[1]

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> MockAsyncLM:
        """Return one over the tokenizer of a model: "tiny", a folder, or a Hub id.

        It is the Transformers tokenizer where that package is installed.
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
        """Return made-up log-probabilities: float32 [V]."""
        return self.next_token_logprobs_sync(token_ids, lora_name)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """The same. An empty context is one, too."""
        if lora_name is not None:
            raise ConfigError(f"the mock has no LoRA adapters; lora_name is {lora_name!r}")
        return self._get_logprobs(token_ids)

    def _get_logprobs(self, token_ids: Sequence[int]) -> Any:
        """Draw a row; known subclasses draw others."""
        seed = sum((at + 1) * int(token) for at, token in enumerate(token_ids)) % 2**32
        logits = np.random.RandomState(seed).rand(len(self.byte_vocab)).astype(np.float32)
        if HAS_TORCH:
            import torch

            return torch.from_numpy(logits).log_softmax(-1)
        return log_softmax(logits)
