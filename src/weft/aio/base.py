"""`AbstractAsyncLM`: what a language model is to a probabilistic program."""

from __future__ import annotations

import asyncio
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import whole_number
from ..errors import ConfigError, ForwardError
from ..sampling.params import SamplingParams
from ..sampling.rng import fresh_seed, stream_of
from ..sampling.sampler import Chain, Sampler
from ..tokens.tokenizer import Tokenizer
from ..tokens.vocab import Token, tokens_of

Contexts = Sequence[Sequence[int]]


class TopRows(NamedTuple):
    """The k likeliest tokens after each of N contexts, likeliest first, ties by lower id.

    ids: int64 [N, k]. logprobs: float32 [N, k], of the full vocabulary, nats.
    """

    ids: Any
    logprobs: Any


class AbstractAsyncLM(ABC):
    """Log-probabilities of the next token, for any context, awaited.

    `AsyncLM` is the one over an `LM`. A subclass defines the two `next_token_logprobs` methods; the
    rest follows from them.

    tokenizer: what was handed in.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: Weft's own, a Transformers tokenizer, or one of the tokenizers library."""
        self.tokenizer = tokenizer
        self._tokens: list[Any] = []

    @abstractmethod
    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after `token_ids`: float32 [V], nats."""

    @abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return what `next_token_logprobs` does; blocks until it is there."""

    async def batch_next_token_logprobs(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each context: float32 [N, V]."""
        calls = (self.next_token_logprobs(ids, lora_name) for ids in token_ids_list)
        return stacked(await asyncio.gather(*calls))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return what `batch_next_token_logprobs` does; blocks until it is there."""
        return stacked([self.next_token_logprobs_sync(ids, lora_name) for ids in token_ids_list])

    async def prefix_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return the log-probabilities after every prefix of one context: float32 [T, V].

        Row i is that after the first i + 1 tokens.
        """
        return await self.batch_next_token_logprobs(prefixes_of(token_ids), lora_name)

    def prefix_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return what `prefix_logprobs` does; blocks until it is there."""
        return self.batch_next_token_logprobs_sync(prefixes_of(token_ids), lora_name)

    async def batch_top_logprobs(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return the `k` likeliest tokens after each context, instead of whole rows."""
        k = whole_number("k", k, 1)

        async def one(ids: Sequence[int]) -> TopRows:
            return top_of(await self.next_token_logprobs(ids, lora_name), k)

        return joined(await asyncio.gather(*map(one, token_ids_list)), k)

    def batch_top_logprobs_sync(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return what `batch_top_logprobs` does; blocks until it is there."""
        k = whole_number("k", k, 1)
        rows = (self.next_token_logprobs_sync(ids, lora_name) for ids in token_ids_list)
        return joined([top_of(row, k) for row in rows], k)

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
        Raises: ContextOverflow when the context is full before there are max_tokens.
        """
        prompts = [whole_numbers("prompt_token_ids", prompt_token_ids)]
        n, ends = whole_number("max_tokens", max_tokens, 0), checked_ends(eos_token_ids)
        samplers = [sampler_of(temperature, seed, 0)]
        return (await self._samples(prompts, n, ends, samplers, lora_name))[0]

    async def batch_sample(
        self,
        prompt_token_ids_list: Contexts,
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Return samples after each prompt; equal prompts get different ones under one seed."""
        prompts = [whole_numbers("a prompt", prompt) for prompt in prompt_token_ids_list]
        n, ends = whole_number("max_tokens", max_tokens, 0), checked_ends(eos_token_ids)
        seed = fresh_seed() if seed is None else seed
        samplers = [sampler_of(temperature, seed, number) for number in range(len(prompts))]
        return await self._samples(prompts, n, ends, samplers, lora_name)

    async def _samples(
        self,
        prompts: Contexts,
        max_tokens: int,
        ends: frozenset[int],
        samplers: Sequence[Sampler],
        lora_name: str | None,
    ) -> list[list[int]]:
        async def one(prompt: Sequence[int], sampler: Sampler) -> list[int]:
            made, path, chain = list[int](), list(prompt), Chain([sampler])
            while len(made) < max_tokens:
                row = on_host(await self.next_token_logprobs(path, lora_name))
                at = np.array([len(path)], dtype=np.uint64)
                token = int(chain.draw(row[None], np.zeros(1, dtype=np.int64), at).ids[0])
                if token < 0:
                    raise ForwardError(f"the row after {len(path)} tokens leaves none to draw")
                if token in ends:
                    break
                made.append(token)
                path.append(token)
            return made

        return list(await asyncio.gather(*map(one, prompts, samplers)))

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

    @property
    def byte_vocab(self) -> list[Token]:
        """The bytes of every token, by id; tokens of equal bytes stay apart. Made once.

        In a program that has loaded genlm's packages they are of the class those know.
        """
        kind = known_token_class() or Token
        if not self._tokens or type(self._tokens[0]) is not kind:
            self._tokens = tokens_of(self._vocab_bytes(), kind)
        return self._tokens

    @cached_property
    def str_vocab(self) -> list[str]:
        """The text of every token, by id; U+FFFD where one is part of a character."""
        return [spelled.decode("utf-8", "replace") for spelled in self._vocab_bytes()]

    def _vocab_bytes(self) -> list[bytes]:
        return Tokenizer.wrap(self.tokenizer).vocab_bytes


def known_token_class() -> Any:
    """Return the token class of genlm's packages if this program has loaded them, else None.

    Their code asks whether a token is of that very class, and computes with torch tensors.
    """
    module = sys.modules.get("genlm.backend.tokenization")
    return None if module is None else module.Token


def sampler_of(temperature: float, seed: int | None, number: int) -> Sampler:
    """Return how sample `number` of a call draws."""
    params = SamplingParams(temperature=temperature, seed=fresh_seed() if seed is None else seed)
    assert params.seed is not None
    return Sampler(params, stream_of(params.seed, (number,)))


def checked_ids(token_ids: Any) -> list[int]:
    """Return a context as a list. Raises: ConfigError for an empty one, or what are no ids."""
    ids = whole_numbers("token_ids", token_ids)
    if not ids:
        raise ConfigError("token_ids is empty; give at least one token, such as the begin token")
    return ids


def checked_ends(eos_token_ids: Any) -> frozenset[int]:
    """Return end tokens; none is `[]`. Raises: ConfigError."""
    if isinstance(eos_token_ids, set | frozenset):
        eos_token_ids = list(eos_token_ids)
    return frozenset(whole_numbers("eos_token_ids", eos_token_ids))


def whole_numbers(name: str, given: Any) -> list[int]:
    """Return a list, tuple, array or tensor of ids as ints; refuse what has no order, or no ids."""
    values = given.tolist() if hasattr(given, "tolist") else given
    try:
        if isinstance(values, str | bytes | bytearray | set | frozenset | dict):
            raise TypeError
        return list(map(operator.index, values))
    except TypeError as error:
        raise ConfigError(
            f"{name} is {given!r:.80}; allowed is a list of ids: whole numbers"
        ) from error


def prefixes_of(token_ids: Sequence[int]) -> list[list[int]]:
    """Return every prefix of a context, from its first token to all of it."""
    ids = checked_ids(token_ids)
    return [ids[:n] for n in range(1, len(ids) + 1)]


def stacked(rows: Sequence[Any]) -> Any:
    """Return rows as one array or tensor, [N, V]."""
    if rows and type(rows[0]).__module__.startswith("torch"):
        import torch

        return torch.stack(list(rows))
    return np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32)


def on_host(row: Any) -> NDArray[np.float32]:
    """Return a row as an array, wherever the tensor is."""
    if type(row).__module__.startswith("torch"):
        row = row.detach().cpu().numpy()
    return np.asarray(row, dtype=np.float32)


def top_of(row: Any, k: int) -> TopRows:
    """Return the `k` likeliest of one row (all, if it has fewer), as arrays: [k], [k]."""
    values = on_host(row)
    some = np.flatnonzero(values >= np.partition(values, -k)[-k]) if k < len(values) else None
    ids = np.arange(len(values)) if some is None else some
    order = np.argsort(-values[ids], kind="stable")[:k]
    return TopRows(ids[order].astype(np.int64), values[ids[order]])


def joined(rows: Sequence[TopRows], k: int) -> TopRows:
    """Return single rows as one: [N, k], [N, k]."""
    if not rows:
        return TopRows(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
    return TopRows(np.stack([row.ids for row in rows]), np.stack([row.logprobs for row in rows]))
