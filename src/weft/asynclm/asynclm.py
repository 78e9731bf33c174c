"""`AsyncLM`: next-token log-probabilities from an LM, and its abstract base class."""

from __future__ import annotations

import asyncio
import logging
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._core.kv.place import Place
from .._core.sampling.metrics import log_softmax
from .._core.sampling.params import SamplingParams
from .._core.sampling.rng import fresh_seed, stream_of
from .._core.sampling.sampler import BatchSampler, Sampler
from .._core.sched.work import Extend, Logits, Run, RunResult, Ticket
from .._core.tokens.codec import Token, tokens_of
from .._core.tokens.text import token_texts
from .._core.tokens.tokenizer import Tokenizer
from .._core.validation import check_int
from ..engines.base import HostLogits, RetainedRow
from ..errors import BatchAbandoned, Cancelled, ConfigError, ContextOverflow, ForwardError
from ..lm.lm import LM
from .row_cache import CacheNode, ExactRows, walk

_log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Contexts = Sequence[Sequence[int]]


class TopRows(NamedTuple):
    """The k likeliest tokens after each of N contexts, likeliest first; see `batch_top_logprobs`.

    Equally likely tokens are in the order of their ids.

    Attributes:
        ids: int64 [N, k].
        logprobs: float32 [N, k], over the full vocabulary, in nats.
    """

    ids: Any
    logprobs: Any


class AbstractAsyncLM(ABC):
    """Base class of models that return next-token log-probabilities for any context.

    `AsyncLM` implements it over an `LM`. A subclass defines `next_token_logprobs` and
    `next_token_logprobs_sync`; the other methods call these two. The two need no parameter
    `lora_name`: it is passed only if a caller names an adapter.

    A context is a sequence of token ids, at least one. [V] is the size of the vocabulary.

    Attributes:
        tokenizer: the object that the caller passed.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Store the tokenizer.

        tokenizer: Weft's own, a Transformers tokenizer, or one of the tokenizers library.
        """
        self.tokenizer = tokenizer
        self._tokens: list[Any] = []

    @abstractmethod
    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after a context: float32 [V], nats.

        Args:
            token_ids: the context.
            lora_name: the name of a LoRA adapter; None: the base model.
        """

    @abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Blocking version of `next_token_logprobs`, with the same arguments and result."""

    async def batch_next_token_logprobs(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each of N contexts: float32 [N, V], nats.

        Args:
            token_ids_list: the contexts.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        calls = (self.next_token_logprobs(ids, **lora_kwargs(lora_name)) for ids in token_ids_list)
        return stack_rows(await asyncio.gather(*calls))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Blocking version of `batch_next_token_logprobs`, with the same arguments and result."""
        options = lora_kwargs(lora_name)
        return stack_rows([self.next_token_logprobs_sync(ids, **options) for ids in token_ids_list])

    async def prefix_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return the log-probabilities after every prefix of a context: float32 [T, V], nats.

        Args:
            token_ids: the context, T tokens. Row i belongs to its first i + 1 tokens.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        options = lora_kwargs(lora_name)
        return await self.batch_next_token_logprobs(prefixes_of(token_ids), **options)

    def prefix_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Blocking version of `prefix_logprobs`, with the same arguments and result."""
        return self.batch_next_token_logprobs_sync(prefixes_of(token_ids), **lora_kwargs(lora_name))

    async def batch_top_logprobs(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return only the `k` likeliest tokens after each context, instead of full rows.

        Args:
            token_ids_list: the contexts.
            k: number of tokens, from 1 to the size of the vocabulary.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        k = check_int("k", k, 1)

        async def one(ids: Sequence[int]) -> TopRows:
            """Return the likeliest tokens after one context."""
            return top_of_row(await self.next_token_logprobs(ids, **lora_kwargs(lora_name)), k)

        return concat_top(await asyncio.gather(*map(one, token_ids_list)), k)

    def batch_top_logprobs_sync(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Blocking version of `batch_top_logprobs`, with the same arguments and result."""
        k = check_int("k", k, 1)
        options = lora_kwargs(lora_name)
        rows = (self.next_token_logprobs_sync(ids, **options) for ids in token_ids_list)
        return concat_top([top_of_row(row, k) for row in rows], k)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw tokens after a prompt until an end token; return them without the end token.

        A sample that fills the context ends there, and the log warns.

        Args:
            prompt_token_ids: token ids of the prompt, at least one.
            max_tokens: maximum number of tokens to draw, 0 or more.
            eos_token_ids: end tokens; may be empty.
            temperature: 0 takes the likeliest token.
            seed: equal seeds give equal tokens, those of `Loom.grow(n=1, seed=seed)`. None: a fresh
                seed. Concurrent calls may change them in bfloat16, on MLX and on llama.cpp
                (docs/models.md).
            lora_name: the name of a LoRA adapter; None: the base model.

        Raises: ContextOverflow for a prompt that is longer than the context; ConfigError for wrong
        arguments.
        """
        prompts = [int_list("prompt_token_ids", prompt_token_ids)]
        n, ends = check_int("max_tokens", max_tokens, 0), validate_end_ids(eos_token_ids)
        samplers = [create_sampler(temperature, seed, 0)]
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
        """Draw tokens after each of several prompts; return one list of token ids per prompt.

        Equal prompts get different samples, also with a seed. The other arguments are those of
        `sample`.
        """
        prompts = [int_list("a prompt", prompt) for prompt in prompt_token_ids_list]
        n, ends = check_int("max_tokens", max_tokens, 0), validate_end_ids(eos_token_ids)
        seed = fresh_seed() if seed is None else seed
        samplers = [create_sampler(temperature, seed, number) for number in range(len(prompts))]
        return await self._samples(prompts, n, ends, samplers, lora_name)

    async def _samples(
        self,
        prompts: Contexts,
        max_tokens: int,
        ends: frozenset[int],
        samplers: Sequence[Sampler],
        lora_name: str | None,
    ) -> list[list[int]]:
        """Draw tokens after each prompt, one sampler per prompt.

        ends: the end tokens.
        """

        async def one(prompt: Sequence[int], sampler: Sampler) -> list[int]:
            """Draw the tokens after one prompt."""
            tokens, path, chain = list[int](), list(prompt), BatchSampler([sampler])
            while len(tokens) < max_tokens:
                try:
                    row = on_host(await self.next_token_logprobs(path, **lora_kwargs(lora_name)))
                except ContextOverflow:
                    if not tokens:
                        raise
                    break
                at = np.array([len(path)], dtype=np.uint64)
                token = int(chain.draw(row[None], np.zeros(1, dtype=np.int64), at).ids[0])
                if token < 0:
                    raise ForwardError(f"the row after {len(path)} tokens leaves none to draw")
                if token in ends:
                    break
                tokens.append(token)
                path.append(token)
            return tokens

        return list(await asyncio.gather(*map(one, prompts, samplers)))

    def clear_cache(self) -> None:
        """Clear cached results. Does nothing here; subclasses with a cache override it."""
        return None

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter under a name.

        Raises: NotImplementedError here; subclasses with adapters override it.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no LoRA adapters")

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter.

        Raises: NotImplementedError here; subclasses with adapters override it.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no LoRA adapters")

    def set_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Raise RuntimeError: Weft has no active adapter. Pass `lora_name` to each call instead."""
        raise RuntimeError("there is no active adapter; give lora_name= to each call")

    def clear_lora(self) -> None:
        """Raise RuntimeError: Weft has no active adapter. Pass `lora_name` to each call instead."""
        raise RuntimeError("there is no active adapter; leave lora_name out of the call")

    @property
    def byte_vocab(self) -> list[Token]:
        """The bytes of every token, by id. Computed once.

        Tokens with equal bytes stay distinct. If the program has loaded genlm's packages, the
        elements are instances of their token class.
        """
        kind = genlm_token_class() or Token
        if not self._tokens or type(self._tokens[0]) is not kind:
            self._tokens = tokens_of(self._vocab_bytes(), kind)
        return self._tokens

    @cached_property
    def str_vocab(self) -> list[str]:
        """The text of every token, by id.

        For a token that is only a part of a character, it is the tokenizer's own spelling.
        """
        return token_texts(self._vocab_bytes(), Tokenizer.wrap(self.tokenizer).spelling)

    def _vocab_bytes(self) -> list[bytes]:
        """Return the bytes of every token, by id."""
        return Tokenizer.wrap(self.tokenizer).vocab_bytes


TOP_BYTES = 64 << 20  # full rows on the host at once while `batch_top_logprobs` reduces them


class AsyncLM(AbstractAsyncLM):
    """Next-token log-probabilities over an `LM`, for asyncio programs that score many contexts.

    All callers in one iteration of an event loop share a step, without timers. Equal contexts run
    once. The KV of every context is cached and shared with looms and branches of the LM. Rows are
    float32, normalized copies. Cancelling one caller does not affect others. An AsyncLM can be used
    from successive event loops and from any thread; the model never runs on the loop's thread.

    Rows are cached in an LRU cache with the LM's byte budget; recomputing an evicted row costs one
    token.
    """

    def __init__(
        self,
        lm: LM,
        *,
        batch_size: int | None = None,
        strict: bool = False,
        strict_bytes: int = 64 << 20,
        as_torch: bool | None = None,
        on_device: bool = False,
    ) -> None:
        """Wrap an LM.

        Args:
            lm: the LM.
            batch_size: maximum number of contexts in flight; None: no limit.
            strict: make cached rows bitwise equal to `next_token_logprobs_uncached`, at its cost
                for every new context.
            strict_bytes: maximum bytes of the cache of these rows.
            as_torch: return torch tensors. None: if the engine is torch, or the program has loaded
                genlm's packages.
            on_device: put tensors on the model's device.

        Raises: ConfigError for wrong arguments.
        """
        if not isinstance(lm, LM):
            raise ConfigError(f"AsyncLM is of an LM, not {type(lm).__name__}; see weft.load")
        super().__init__(lm.tokenizer)
        self.lm = lm
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self.strict = strict
        self._as_torch = True if as_torch is None and lm.info.name == "torch" else as_torch
        self._root = lm.root()
        self._device = lm.info.device if on_device else None
        self._exact = ExactRows(lm, check_int("strict_bytes", strict_bytes, 0))
        self._pending: set[Ticket] = set()
        self._semaphores: weakref.WeakKeyDictionary[Any, tuple[int, asyncio.Semaphore]]
        self._semaphores = weakref.WeakKeyDictionary()

    # Queries ----------------------------------------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after a context: float32 [V], nats.

        Args:
            token_ids: the context, at least one token.
            lora_name: the name of a LoRA adapter; None: the base model.

        Raises:
            ConfigError: a ValueError: the context is empty, an id is outside the vocabulary, or the
                adapter is unknown.
            ContextOverflow, KVFull: the context does not fit.
            ForwardError: the step failed, or the row is no distribution. A row on the device is all
                NaN instead.
        """
        if (turn := self.lm.turn_of_loop()) is not None:
            await turn
        if self.strict:
            place = self._place(token_ids, lora_name)
            return self._to_output((await self._exact.arows([place]))[0])
        ((row,),) = await self._aread([self._create_read(validate_ids(token_ids), lora_name)])
        return self._to_output(row)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Blocking version of `next_token_logprobs`, with the same arguments and result.

        Called in an event loop, it blocks that loop.
        """
        if self.strict:
            return self._to_output(self._exact.rows([self._place(token_ids, lora_name)])[0])
        ((row,),) = self._read([self._create_read(validate_ids(token_ids), lora_name)])
        return self._to_output(row)

    async def batch_next_token_logprobs(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each of N contexts: float32 [N, V], nats.

        A context that is a prefix of another one costs nothing: the forward of the longer context
        returns the rows of its prefixes too.

        Args:
            token_ids_list: the contexts.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        if self.strict:
            places = [self._place(ids, lora_name) for ids in token_ids_list]
            return self._stack_output(await self._exact.arows(places))
        paths = PrefixGroups([validate_ids(ids) for ids in token_ids_list])
        results = await self._aread(self._create_reads(paths, lora_name))
        return self._stack_output(paths.restore_order(results))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Blocking version of `batch_next_token_logprobs`, with the same arguments and result."""
        if self.strict:
            places = [self._place(ids, lora_name) for ids in token_ids_list]
            return self._stack_output(self._exact.rows(places))
        paths = PrefixGroups([validate_ids(ids) for ids in token_ids_list])
        return self._stack_output(
            paths.restore_order(self._read(self._create_reads(paths, lora_name)))
        )

    async def prefix_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return the log-probabilities after every prefix of a context: float32 [T, V], nats.

        One forward computes all rows; with `strict`, one forward per prefix that is not cached.

        Args:
            token_ids: the context, T tokens. Row i belongs to its first i + 1 tokens.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        if self.strict:
            return await super().prefix_logprobs(token_ids, lora_name)
        reads = self._create_reads([all_depths(token_ids)], lora_name)
        return self._stack_output((await self._aread(reads))[0])

    def prefix_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Blocking version of `prefix_logprobs`, with the same arguments and result."""
        if self.strict:
            return super().prefix_logprobs_sync(token_ids, lora_name)
        reads = self._create_reads([all_depths(token_ids)], lora_name)
        return self._stack_output(self._read(reads)[0])

    async def batch_top_logprobs(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return the `k` likeliest tokens after each context, instead of full rows.

        For large vocabularies: at most 64 MiB of full rows are on the host at once.

        Args:
            token_ids_list: the contexts.
            k: number of tokens, from 1 to the size of the vocabulary.
            lora_name: the name of a LoRA adapter; None: the base model.
        """
        k, rows = self._validate_k(k), list[TopRows]()
        for some in self._contexts_per_batch(token_ids_list):
            rows += [
                top_of_row(r, k) for r in await self.batch_next_token_logprobs(some, lora_name)
            ]
        return TopRows(*map(self._to_output, concat_top(rows, k)))

    def batch_top_logprobs_sync(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Blocking version of `batch_top_logprobs`, with the same arguments and result."""
        k, rows = self._validate_k(k), list[TopRows]()
        for some in self._contexts_per_batch(token_ids_list):
            rows += [
                top_of_row(row, k) for row in self.batch_next_token_logprobs_sync(some, lora_name)
            ]
        return TopRows(*map(self._to_output, concat_top(rows, k)))

    async def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Compute the log-probabilities after a context in one forward: float32 [V].

        It uses no cache, so it can check cached results. It is awaitable here; on the classes of
        `weft.compat.genlm` it is a blocking call, as in genlm.
        """
        return self._to_output(await self._exact.acompute(self._place(token_ids, lora_name)))

    def _create_reads(
        self, paths: Iterable[tuple[list[int], Sequence[int]]], lora_name: str | None
    ) -> list[Extend]:
        """Return one work item per (context, numbers of tokens of its prefixes to read)."""
        return [self._create_read(ids, lora_name, depths) for ids, depths in paths]

    def _create_read(
        self, ids: list[int], lora_name: str | None, depths: Sequence[int] = ()
    ) -> Extend:
        """Return a work item that reads the logits after a context or its prefixes.

        The item references only the tree's root, so the path's KV can be evicted before and after
        the scheduler works on it.

        depths: numbers of tokens of the prefixes to read; empty: only the full context.
        """
        lm = self.lm
        lm.check_path(ids)
        root = self._root if lora_name is None else lm.root(lora_name)
        is_far = lm.info.logits_on_device
        wants = [Logits(depth, False, is_far) for depth in depths or (len(ids),)]
        return Extend(root, ids, tuple(wants))

    def _result_rows(self, ticket: Ticket) -> list[Floats]:
        """Return the log-probabilities [V] that a finished work item of `_create_read` has read."""
        try:
            return [self._logprobs(answer) for answer in ticket.result()]
        except Cancelled as error:
            raise BatchAbandoned("the query was reset before it was answered") from error

    def _logprobs(self, answer: Any) -> Any:
        """Normalize a result of a work item to log-probabilities.

        The result stays on the device if `on_device` is set.

        result: raw logits [V], or a reference to logits that the engine has on its device.
        """
        if not isinstance(answer, RetainedRow):
            return log_softmax(answer)
        if isinstance(answer.rows, HostLogits):
            return log_softmax(answer.logits())
        return answer.rows.logprobs(answer.number, on_host=self._device is None)

    async def _aread(self, reads: list[Extend]) -> list[list[Floats]]:
        """Run work items; return the rows of each. At most `batch_size` run at once."""
        semaphore = self._semaphore()
        if semaphore is not None:
            return await self._aread_limited(semaphore, reads)
        tickets = await self.lm.asubmit(reads)
        self._pending.update(tickets)
        try:
            await self.lm.adrive(tickets)
        finally:
            self._pending.difference_update(tickets)
        return [self._result_rows(ticket) for ticket in tickets]

    async def _aread_limited(
        self, semaphore: asyncio.Semaphore, reads: list[Extend]
    ) -> list[list[Floats]]:
        """Run work items, each after it has acquired the semaphore; return the rows of each."""

        async def one(read: Extend) -> list[Floats]:
            """Run one work item and return its rows."""
            async with semaphore:
                (ticket,) = await self.lm.asubmit([read])
                self._pending.add(ticket)
                try:
                    await self.lm.adrive([ticket])
                finally:
                    self._pending.discard(ticket)
                return self._result_rows(ticket)

        return list(await asyncio.gather(*map(one, reads)))

    def _read(self, reads: list[Extend]) -> list[list[Floats]]:
        """Blocking version of `_aread`."""
        size = self.batch_size or max(1, len(reads))
        results: list[list[Floats]] = []
        for at in range(0, len(reads), size):
            tickets = self.lm.submit(reads[at : at + size])
            self._pending.update(tickets)
            try:
                self.lm.drive(tickets)
            finally:
                self._pending.difference_update(tickets)
            results += map(self._result_rows, tickets)
        return results

    # Sampling ---------------------------------------------------------------------------------

    async def _samples(
        self,
        prompts: Contexts,
        max_tokens: int,
        ends: frozenset[int],
        samplers: Sequence[Sampler],
        lora_name: str | None,
    ) -> list[list[int]]:
        """Draw tokens after each prompt as runs of the scheduler, which share its steps."""
        places = [self._place(prompt, lora_name) for prompt in prompts]
        if max_tokens < 1:
            return [[] for _ in places]
        runs = [
            Run(place, sampler, ends, max_tokens)
            for place, sampler in zip(places, samplers, strict=True)
        ]
        tickets = await self.lm.asubmit(runs)
        await self.lm.adrive(tickets)
        return [self._tokens_of_sample(ticket.result(), max_tokens) for ticket in tickets]

    def _tokens_of_sample(self, result: RunResult, max_tokens: int) -> list[int]:
        """Return the tokens of a finished run; warn if the context was full before it ended."""
        if result.finish_reason == "context":
            _log.warning(
                "the context of %d tokens was full after %d of %d sampled tokens; ask for fewer,"
                " shorten the prompt, or load the model with a larger n_ctx",
                self.lm.n_ctx,
                len(result.tokens),
                max_tokens,
            )
        return result.tokens

    # The cache --------------------------------------------------------------------------------

    def cache_kv(self, prompt_tokens: Sequence[int], lora_name: str | None = None) -> None:
        """Compute the KV of a context in advance. Optional: every query caches its KV."""
        tickets = self.lm.submit([Extend(self._place(prompt_tokens, lora_name))])
        self.lm.drive(tickets)
        tickets[0].result()

    def clear_cache(self) -> None:
        """Clear all cached rows, and all KV of the LM that no request uses."""
        self._exact.clear()
        self.lm.clear_cache()

    def clear_kv_cache(self) -> None:
        """Clear the LM's KV that no request uses; cached rows stay."""
        self.lm.driver.exclusive(lambda: self.lm.tree.clear(rows=False))

    def walk_cache(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[CacheNode, int, CacheNode | None, int]:
        """Look up how much of a context is cached; return (node, n_matched, past, base).

        node: a snapshot of the longest prefix that is in the token tree; `n_matched` is its number
            of tokens.
        past: a snapshot of the longest proper prefix that has KV; `base` is its number of tokens.
            None if no prefix has KV.
        """

        return walk(self.lm, self._place(token_ids, lora_name))

    def reset_async_queries(self) -> None:
        """Cancel all submitted queries: their callers get BatchAbandoned.

        Queries that wait because `batch_size` others run are not cancelled.
        """
        for ticket in list(self._pending):
            ticket.cancel()

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter in PEFT's format; calls select it by `lora_name=`.

        Args:
            lora_path: a folder or a Hub id.
            lora_name: the name. An adapter of the same name is removed first.

        Raises: Unsupported, ModelLoadError, ConfigError; see `LM.add_adapter`.
        """
        self.lm.add_adapter(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter and all results that are cached for it.

        Raises: ConfigError for an unknown name.
        """
        self.lm.remove_adapter(lora_name)

    # Parts ------------------------------------------------------------------------------------

    def _place(self, token_ids: Sequence[int], lora_name: str | None) -> Place:
        """Validate a context and return its place in the token tree."""
        return self.lm.place(validate_ids(token_ids), namespace=lora_name)

    def _semaphore(self) -> asyncio.Semaphore | None:
        """Return the running loop's semaphore for `batch_size`; None without a limit."""
        if self.batch_size is None:
            return None
        loop = asyncio.get_running_loop()
        size, semaphore = self._semaphores.get(loop, (0, None))
        if semaphore is None or size != self.batch_size:
            semaphore = asyncio.Semaphore(self.batch_size)
            self._semaphores[loop] = self.batch_size, semaphore
        return semaphore

    def _vocab_bytes(self) -> list[bytes]:
        """Return the bytes of every token, by id."""
        return self.lm.text.vocab_bytes

    def _contexts_per_batch(self, token_ids_list: Contexts) -> Iterator[Contexts]:
        """Yield the contexts in groups whose full rows take at most 64 MiB."""
        size = max(1, TOP_BYTES // (4 * max(self.lm.info.n_vocab, 1)))
        return (token_ids_list[at : at + size] for at in range(0, len(token_ids_list), size))

    def _validate_k(self, k: int) -> int:
        """Return `k`; raise ConfigError unless it is from 1 to the size of the vocabulary."""
        number = check_int("k", k, 1)
        if number > self.lm.info.n_vocab > 0:
            raise ConfigError(f"k is {k}; allowed is 1 to {self.lm.info.n_vocab}, the vocabulary")
        return number

    def _to_output(self, values: Any) -> Any:
        """Convert an array to the type that `as_torch` and `on_device` request.

        A tensor on the device is returned unchanged.
        """
        if not isinstance(values, np.ndarray):
            return values
        as_torch = self._as_torch
        if as_torch is None:
            as_torch = genlm_token_class() is not None
        if not as_torch:
            return values
        import torch

        tensor = torch.from_numpy(values)
        return tensor if self._device is None else tensor.to(self._device)

    def _stack_output(self, rows: Sequence[Floats]) -> Any:
        """Stack rows [V] to one output [N, V], of the type that the caller gets."""
        if not rows:
            return self._to_output(np.zeros((0, self.lm.info.n_vocab), dtype=np.float32))
        if all(isinstance(row, np.ndarray) for row in rows):
            return self._to_output(np.stack(rows))
        import torch

        return torch.stack([torch.as_tensor(row, device=self._device) for row in rows])


class PrefixGroups:
    """Groups contexts so that one forward of the longest one gives the rows of the others.

    The other contexts of a group are its prefixes.
    """

    def __init__(self, contexts: Sequence[list[int]]) -> None:
        longest: list[list[int]] = []  # the numbers of contexts on one path, the longest first
        # In sorted order a prefix directly precedes its extensions.
        for number in reversed(sorted(range(len(contexts)), key=contexts.__getitem__)):
            ids = contexts[number]
            if longest and contexts[longest[-1][0]][: len(ids)] == ids:
                longest[-1].append(number)
            else:
                longest.append([number])
        self._paths: list[tuple[list[int], list[int]]] = []
        self._answers: list[tuple[int, int]] = [(0, 0)] * len(contexts)
        for numbers in sorted(longest, key=min):  # in the order of the contexts
            depths = sorted({len(contexts[number]) for number in numbers})
            at = {depth: index for index, depth in enumerate(depths)}
            for number in numbers:
                self._answers[number] = len(self._paths), at[len(contexts[number])]
            self._paths.append((contexts[numbers[0]], depths))

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (longest context, numbers of tokens of the contexts) for each group."""
        return iter(self._paths)

    def restore_order(self, results: Sequence[Sequence[Floats]]) -> list[Floats]:
        """Return the row of each context, in the order of the contexts.

        results: for each group, in iteration order, the rows after its contexts.
        """
        return [results[path][depth] for path, depth in self._answers]


def all_depths(token_ids: Sequence[int]) -> tuple[list[int], Sequence[int]]:
    """Return a context and the lengths of all its prefixes: 1 to its number of tokens."""
    ids = validate_ids(token_ids)
    return ids, range(1, len(ids) + 1)


def genlm_token_class() -> Any:
    """Return the token class of genlm's packages if the program has imported them, else None.

    Code of these packages accepts only instances of that class, and torch tensors.
    """
    module = sys.modules.get("genlm.backend.tokenization")
    return None if module is None else module.Token


def lora_kwargs(lora_name: str | None) -> dict[str, str]:
    """Return {"lora_name": lora_name}, or {} for None.

    Subclasses may lack this parameter.
    """
    return {} if lora_name is None else {"lora_name": lora_name}


def create_sampler(temperature: float, seed: int | None, number: int) -> Sampler:
    """Return the sampler of one sample, with its own random stream.

    Args:
        temperature: the temperature; 0 takes the likeliest token.
        seed: the seed; None: a fresh one.
        number: index of the sample in its call, which selects the random stream.
    """
    params = SamplingParams(temperature=temperature, seed=fresh_seed() if seed is None else seed)
    assert params.seed is not None
    return Sampler(params, stream_of(params.seed, (number,)))


def validate_ids(token_ids: Any) -> list[int]:
    """Return a context as a list of ints.

    Raises: ConfigError for an empty context, and for anything but token ids.
    """
    ids = int_list("token_ids", token_ids)
    if not ids:
        raise ConfigError("token_ids is empty; give at least one token, such as the begin token")
    return ids


def validate_end_ids(eos_token_ids: Any) -> frozenset[int]:
    """Return end tokens as a set, which may be empty. Raises: ConfigError for other values."""
    if isinstance(eos_token_ids, set | frozenset):
        eos_token_ids = list(eos_token_ids)
    return frozenset(int_list("eos_token_ids", eos_token_ids))


NOT_LISTS = (str, bytes, bytearray, set, frozenset, dict)  # of ids, though they can be iterated


def int_list(name: str, given: Any) -> list[int]:
    """Convert a list, tuple, array or tensor of token ids to a list of ints.

    name: the argument's name, for the message.

    Raises: ConfigError for other values.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    try:
        if type(values) is not list and isinstance(values, NOT_LISTS):
            raise TypeError
        return list(map(operator.index, values))
    except TypeError as error:
        raise ConfigError(f"{name} is {given!r:.80}; allowed is a list of ids: integers") from error


def prefixes_of(token_ids: Sequence[int]) -> list[list[int]]:
    """Return every prefix of a context, shortest first: its first token, …, the full context."""
    ids = validate_ids(token_ids)
    return [ids[:n] for n in range(1, len(ids) + 1)]


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stack N rows, [V] each, to one array or tensor [N, V]."""
    if rows and type(rows[0]).__module__.startswith("torch"):
        import torch

        return torch.stack(list(rows))
    return np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32)


def on_host(row: Any) -> NDArray[np.float32]:
    """Copy a row to the host if it is a tensor on a device; return a NumPy array."""
    if type(row).__module__.startswith("torch"):
        row = row.detach().cpu().numpy()
    return np.asarray(row, dtype=np.float32)


def top_of_row(row: Any, k: int) -> TopRows:
    """Return the `k` likeliest tokens of one row [V], or all tokens if there are fewer.

    Both arrays of the result are [k], without the dimension of contexts.
    """
    values = on_host(row)
    some = np.flatnonzero(values >= np.partition(values, -k)[-k]) if k < len(values) else None
    ids = np.arange(len(values)) if some is None else some
    order = np.argsort(-values[ids], kind="stable")[:k]
    return TopRows(ids[order].astype(np.int64), values[ids[order]])


def concat_top(rows: Sequence[TopRows], k: int) -> TopRows:
    """Stack the likeliest tokens of N contexts, [k] each, to a `TopRows` with arrays [N, k].

    k: the width of the result if there are no rows.
    """
    if not rows:
        return TopRows(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
    return TopRows(np.stack([row.ids for row in rows]), np.stack([row.logprobs for row in rows]))
