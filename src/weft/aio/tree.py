"""`TreeLM`: log-probabilities out of an LM's token tree."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Row
from ..errors import BatchAbandoned, Cancelled, ConfigError
from ..kv.cursor import Place
from ..lm import LM
from ..sched.work import Extend, Logits, Run, Ticket
from .base import AsyncLM, checked_ids, sampler_of, stacked

if TYPE_CHECKING:
    from .view import CacheNode

Floats = NDArray[np.float32]


class TreeLM(AsyncLM):
    """Log-probabilities over an `LM`. `AsyncLM(lm)` makes one; it holds nothing but its options.

    All callers that wait in one pass of an event loop share a step, without timers; equal contexts
    are run once; the KV of every context is kept and shared with looms and branches of the LM.
    Rows are float32, normalised, the caller's own. Cancelling a caller harms no other. Use it from
    successive event loops and from any thread; the model never runs on the loop's thread.

    Rows are cached with the LM's budget in bytes, least recently used out first; one that is gone
    is read again for the cost of one token.
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

        batch_size: contexts in flight at most; None: as many as come. strict: cached rows are
        bitwise those of `next_token_logprobs_uncached`, at its cost for every new context; at most
        strict_bytes of them are kept. as_torch: rows are torch tensors; None: if the engine is
        torch. on_device: such tensors are put on the model's device.
        """
        if not isinstance(lm, LM):
            raise ConfigError(f"AsyncLM is of an LM, not {type(lm).__name__}; see weft.load")
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise ConfigError(f"batch_size is {batch_size!r}; allowed is a whole number from 1 on")
        super().__init__(lm.tokenizer)
        self.lm = lm
        self.batch_size = batch_size
        self.strict = strict
        self._as_torch = lm.info.name == "torch" if as_torch is None else as_torch
        self._device = lm.info.device if on_device else None
        self._exact: OrderedDict[tuple[Any, ...], Floats] = OrderedDict()
        self._exact_rows = max(1, strict_bytes // (4 * lm.info.n_vocab))
        self._waiting: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._gates: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    # Asking -----------------------------------------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after a context: float32 [V], nats.

        Raises: ConfigError (a ValueError) for an empty context, ids outside the vocabulary or an
        unknown adapter; ContextOverflow, KVFull, ForwardError.
        """
        place = self._place(token_ids, lora_name)
        if self.strict:
            return self._given(await asyncio.to_thread(self._exactly, place))
        gate = self._gate()
        if gate is None:
            return self._given(await self._read(place))
        async with gate:
            return self._given(await self._read(place))

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """The same, blocking; works inside a running loop too, which it blocks."""
        place = self._place(token_ids, lora_name)
        return self._given(self._exactly(place) if self.strict else self._read_all([place])[0])

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each context, in as few steps as they take."""
        places = [self._place(ids, lora_name) for ids in token_ids_list]
        if self.strict:
            return self._stacked([self._exactly(place) for place in places])
        size = self.batch_size or max(1, len(places))
        chunks = (places[at : at + size] for at in range(0, len(places), size))
        return self._stacked([row for chunk in chunks for row in self._read_all(chunk)])

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each context: float32 [N, V]."""
        calls = [self.next_token_logprobs(ids, lora_name) for ids in token_ids_list]
        return stacked(await asyncio.gather(*calls)) if calls else self._stacked([])

    async def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return them from one plain forward of the whole context: no KV or row is used or kept."""
        place = self._place(token_ids, lora_name)
        return self._given(await asyncio.to_thread(self._plain, place))

    async def _read(self, place: Place) -> Floats:
        tickets = await self.lm.asubmit([read_of(place)])
        self._waiting.update(tickets)
        await self.lm.adrive(tickets)
        return self._row(tickets[0])

    def _read_all(self, places: Sequence[Place]) -> list[Floats]:
        tickets = self.lm.submit([read_of(place) for place in places])
        self._waiting.update(tickets)
        self.lm.drive(tickets)
        return [self._row(ticket) for ticket in tickets]

    def _row(self, ticket: Ticket) -> Floats:
        try:
            return log_softmax(ticket.result()[0])
        except Cancelled as error:
            raise BatchAbandoned("the query was reset before it was answered") from error

    def _plain(self, place: Place) -> Floats:
        ids = place.ids()

        def forward() -> Floats:
            row = Row((), ids, 0, None, (len(ids) - 1,), (), place.namespace)
            return self.lm.engine.forward([row]).logits(0)

        return log_softmax(self.lm.driver.exclusive(forward))

    def _exactly(self, place: Place) -> Floats:
        key = (place.namespace, *place.ids())
        row = self._exact.get(key)
        if row is None:
            row = self._exact[key] = self._plain(place)
            while len(self._exact) > self._exact_rows:
                self._exact.popitem(last=False)
        else:
            self._exact.move_to_end(key)
        return row.copy()

    # Sampling ---------------------------------------------------------------------------------

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
        place = self._place(prompt, lora_name)
        stops = frozenset(ends)
        if max_tokens < 1:
            return []
        run = Run(place, sampler_of(temperature, seed, number), stops, max_tokens)
        tickets = await self.lm.asubmit([run])
        await self.lm.adrive(tickets)
        made: list[int] = tickets[0].result().tokens
        return made

    # The cache --------------------------------------------------------------------------------

    def cache_kv(self, prompt_tokens: Sequence[int], lora_name: str | None = None) -> None:
        """Compute a context's KV now. Nobody needs to: that of every context asked is kept."""
        tickets = self.lm.submit([Extend(self._place(prompt_tokens, lora_name))])
        self.lm.drive(tickets)
        tickets[0].result()

    def clear_cache(self) -> None:
        """Forget all rows and all KV of the LM that nobody uses now."""
        self._exact.clear()
        self.lm.clear_cache()

    def clear_kv_cache(self) -> None:
        """Forget the LM's KV; rows stay."""
        self.lm.driver.exclusive(lambda: self.lm.tree.clear(rows=False))

    def walk_cache(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[CacheNode, int, CacheNode | None, int]:
        """Return how much of a context is cached: (node, n_matched, past, base).

        node: a view of the deepest known place on the path, n_matched tokens down. past: a view of
        the deepest place before its end with KV, base tokens down; None at the root. Views are
        read-only and say how things were.
        """
        from .view import walk

        return walk(self.lm, self._place(token_ids, lora_name))

    def reset_async_queries(self) -> None:
        """End all queries that wait now: their callers get BatchAbandoned."""
        for ticket in list(self._waiting):
            ticket.cancel()

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter under a name, for `lora_name=`. Raises: Unsupported."""
        self.lm.add_adapter(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter and all that was cached of it."""
        self.lm.remove_adapter(lora_name)

    # Parts ------------------------------------------------------------------------------------

    def _place(self, token_ids: Sequence[int], lora_name: str | None) -> Place:
        return self.lm.place(checked_ids(token_ids), namespace=lora_name)

    def _gate(self) -> asyncio.Semaphore | None:
        if self.batch_size is None:
            return None
        loop = asyncio.get_running_loop()
        gate = self._gates.get(loop)
        if gate is None:
            gate = self._gates[loop] = asyncio.Semaphore(self.batch_size)
        return gate

    def _given(self, row: Floats) -> Any:
        if not self._as_torch:
            return row
        import torch

        tensor = torch.from_numpy(row)
        return tensor if self._device is None else tensor.to(self._device)

    def _stacked(self, rows: Sequence[Floats]) -> Any:
        if not rows:
            return self._given(np.zeros((0, self.lm.info.n_vocab), dtype=np.float32))
        return self._given(np.stack(rows))


def read_of(place: Place) -> Extend:
    """Ask for the logits at a place, computing what is missing before it."""
    return Extend(place, (), (Logits(place.depth),))


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities of raw logits: float32 [V], a new array."""
    shifted = logits - logits.max()
    total = np.log(np.exp(shifted).sum(dtype=np.float64))
    row: Floats = shifted - np.float32(total)
    return row
