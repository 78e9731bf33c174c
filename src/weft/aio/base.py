"""`AsyncLM`: what a language model is to a probabilistic program."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..sampling.chain import Chain, Sampler
from ..sampling.params import SamplingParams
from ..sampling.rng import fresh_seed, stream_of
from ..tokens.token import Token, tokens_of
from ..tokens.tokenizer import Tokenizer


class AsyncLM:
    """Log-probabilities of the next token, for any context, awaited.

    `AsyncLM(lm)` gives the one over an `LM` (see `TreeLM`). A subclass defines the two
    `next_token_logprobs` methods; the rest follows from them.

    tokenizer: what was handed in.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AsyncLM:
        if cls is AsyncLM:
            from .tree import TreeLM

            return object.__new__(TreeLM)
        return object.__new__(cls)

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """tokenizer: Weft's own, a Transformers tokenizer, or one of the tokenizers library.

        Of `AsyncLM` itself: an LM, with the options of `TreeLM`.
        """
        if options:
            raise TypeError(f"{type(self).__name__} takes no {', '.join(options)}")
        self.tokenizer = tokenizer

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after `token_ids`: float32 [V], nats."""
        raise NotImplementedError(f"{type(self).__name__} must define next_token_logprobs")

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """The same, blocking."""
        raise NotImplementedError(f"{type(self).__name__} must define next_token_logprobs_sync")

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each context: float32 [N, V]."""
        calls = (self.next_token_logprobs(ids, lora_name) for ids in token_ids_list)
        return stacked(await asyncio.gather(*calls))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """The same, blocking."""
        return stacked([self.next_token_logprobs_sync(ids, lora_name) for ids in token_ids_list])

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Return tokens drawn after a prompt, up to an end token, which is not among them.

        temperature: 0 takes the likeliest. seed: the same seed gives the same tokens, those that
        `Loom.grow(n=1, seed=seed)` gives; None takes a fresh one.
        """
        return await self._sample(
            prompt_token_ids, max_tokens, eos_token_ids, temperature, seed, lora_name, 0
        )

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Return samples after each prompt; equal prompts get different ones under one seed."""
        ends = frozenset(eos_token_ids)
        seed = fresh_seed() if seed is None else seed
        calls = (
            self._sample(prompt, max_tokens, ends, temperature, seed, lora_name, number)
            for number, prompt in enumerate(prompt_token_ids_list)
        )
        return list(await asyncio.gather(*calls))

    async def _sample(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        ends: Iterable[int],
        temperature: float,
        seed: int | None,
        lora_name: str | None,
        number: int,
    ) -> list[int]:
        ends, made = frozenset(ends), list[int]()
        chain = Chain([sampler_of(temperature, seed, number)])
        path = [int(token) for token in prompt]
        while len(made) < max_tokens:
            row = np.asarray(await self.next_token_logprobs(path, lora_name), dtype=np.float32)
            at = np.array([len(path)], dtype=np.uint64)
            token = int(chain.draw(row[None], np.zeros(1, dtype=np.int64), at).ids[0])
            if token in ends:
                break
            made.append(token)
            path.append(token)
        return made

    def clear_cache(self) -> None:
        """Forget what is cached; nothing here."""
        return None

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter under a name. Raises: NotImplementedError where there are none."""
        raise NotImplementedError(f"{type(self).__name__} takes no LoRA adapters")

    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter. Raises: NotImplementedError where there are none."""
        raise NotImplementedError(f"{type(self).__name__} takes no LoRA adapters")

    def set_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Not here: name the adapter in each call."""
        raise RuntimeError("there is no active adapter; give lora_name= to each call")

    def clear_lora(self) -> None:
        """Not here: name the adapter in each call."""
        raise RuntimeError("there is no active adapter; leave lora_name out of the call")

    @cached_property
    def byte_vocab(self) -> list[Token]:
        """The bytes of every token, by id; tokens of equal bytes stay apart."""
        return tokens_of(Tokenizer.wrap(self.tokenizer).vocab_bytes)

    @cached_property
    def str_vocab(self) -> list[str]:
        """The text of every token, by id; U+FFFD where one is part of a character."""
        return [bytes(token).decode("utf-8", "replace") for token in self.byte_vocab]


def sampler_of(temperature: float, seed: int | None, number: int) -> Sampler:
    """Return how sample `number` of a call draws."""
    params = SamplingParams(temperature=temperature, seed=fresh_seed() if seed is None else seed)
    assert params.seed is not None
    return Sampler(params, stream_of(params.seed, (number,)))


def checked_ids(token_ids: Sequence[int]) -> list[int]:
    """Return a context as a list. Raises: ConfigError for an empty one, or what are no ids."""
    try:
        ids = [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise ConfigError(f"token_ids is {token_ids!r}; allowed are ids: whole numbers") from error
    if not ids:
        raise ConfigError("token_ids is empty; give at least one token, such as the begin token")
    return ids


def stacked(rows: Sequence[Any]) -> Any:
    """Return rows as one array or tensor, [N, V]."""
    if rows and type(rows[0]).__module__.startswith("torch"):
        import torch

        return torch.stack(list(rows))
    return np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32)
