"""`AsyncLM`: log-probabilities out of an LM's token tree; views of what is cached; by name."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .. import doors
from ..checks import whole_number
from ..engines.base import Row
from ..errors import BatchAbandoned, Cancelled, ConfigError, ContextOverflow
from ..kv.place import Cursor, Place, climb, resolve
from ..lm import LM
from ..sampling.metrics import log_softmax
from ..sampling.sampler import Sampler
from ..sched.work import Extend, Logits, Run, RunResult, Ticket
from .base import AbstractAsyncLM, Contexts, TopRows, checked_ids, joined, known_token_class, top_of

if TYPE_CHECKING:
    from ..compat.genlm.models import MockAsyncLM

Floats = NDArray[np.float32]
# Whole rows that are on the host at once while only their top is wanted.
TOP_BYTES = 64 << 20


class AsyncLM(AbstractAsyncLM):
    """Log-probabilities over an `LM`; holds nothing but its options.

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
        torch, or the program has loaded genlm's packages. on_device: tensors are put on the model's
        device.
        """
        if not isinstance(lm, LM):
            raise ConfigError(f"AsyncLM is of an LM, not {type(lm).__name__}; see weft.load")
        super().__init__(lm.tokenizer)
        self.lm = lm
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        self.strict = strict
        self._as_torch = True if as_torch is None and lm.info.name == "torch" else as_torch
        self._device = lm.info.device if on_device else None
        self._exact = ExactRows(lm, whole_number("strict_bytes", strict_bytes, 0))
        self._waiting: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._gates: weakref.WeakKeyDictionary[Any, tuple[int, asyncio.Semaphore]]
        self._gates = weakref.WeakKeyDictionary()

    # Asking -----------------------------------------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of every token after a context: float32 [V], nats.

        Raises: ConfigError (a ValueError) for an empty context, ids outside the vocabulary or an
        unknown adapter; ContextOverflow, KVFull, ForwardError.
        """
        if (turn := self.lm.turn_of_loop()) is not None:
            await turn
        place = self._place(token_ids, lora_name)
        if self.strict:
            return self._given((await self._exact.arows([place]))[0])
        ((row,),) = await self._aread([read_of(place)])
        return self._given(row)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """The same, blocking; works inside a running loop too, which it blocks."""
        place = self._place(token_ids, lora_name)
        if self.strict:
            return self._given(self._exact.rows([place])[0])
        ((row,),) = self._read([read_of(place)])
        return self._given(row)

    async def batch_next_token_logprobs(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities after each context: float32 [N, V].

        Contexts that are beginnings of others are answered with them: all prefixes of one context
        are one row of a forward.
        """
        if self.strict:
            places = [self._place(ids, lora_name) for ids in token_ids_list]
            return self._stacked(await self._exact.arows(places))
        paths = Paths([checked_ids(ids) for ids in token_ids_list])
        answers = await self._aread(self._reads(paths, lora_name))
        return self._stacked(paths.in_order(answers))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Contexts, lora_name: str | None = None
    ) -> Any:
        """Return what `batch_next_token_logprobs` does; blocks until it is there."""
        if self.strict:
            places = [self._place(ids, lora_name) for ids in token_ids_list]
            return self._stacked(self._exact.rows(places))
        paths = Paths([checked_ids(ids) for ids in token_ids_list])
        return self._stacked(paths.in_order(self._read(self._reads(paths, lora_name))))

    async def prefix_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return the log-probabilities after every prefix of one context: float32 [T, V].

        Row i is that after the first i + 1 tokens; all are one row of a forward.
        """
        if self.strict:
            return await super().prefix_logprobs(token_ids, lora_name)
        reads = self._reads([every_depth(token_ids)], lora_name)
        return self._stacked((await self._aread(reads))[0])

    def prefix_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return what `prefix_logprobs` does; blocks until it is there."""
        if self.strict:
            return super().prefix_logprobs_sync(token_ids, lora_name)
        reads = self._reads([every_depth(token_ids)], lora_name)
        return self._stacked(self._read(reads)[0])

    async def batch_top_logprobs(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return the `k` likeliest tokens after each context, instead of whole rows.

        For large vocabularies: 64 MiB of whole rows are on the host at once, however many contexts.
        """
        k, rows = self._checked_top(k), list[TopRows]()
        for some in self._in_parts(token_ids_list):
            rows += [top_of(r, k) for r in await self.batch_next_token_logprobs(some, lora_name)]
        return TopRows(*map(self._given, joined(rows, k)))

    def batch_top_logprobs_sync(
        self, token_ids_list: Contexts, k: int, lora_name: str | None = None
    ) -> TopRows:
        """Return what `batch_top_logprobs` does; blocks until it is there."""
        k, rows = self._checked_top(k), list[TopRows]()
        for some in self._in_parts(token_ids_list):
            rows += [top_of(row, k) for row in self.batch_next_token_logprobs_sync(some, lora_name)]
        return TopRows(*map(self._given, joined(rows, k)))

    async def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> Any:
        """Return them from one plain forward of the whole context: no KV or row is used or kept.

        Awaited here; a plain call on the classes of `weft.compat.genlm`, as it is known there.
        """
        return self._given(await self._exact.aplain(self._place(token_ids, lora_name)))

    def _reads(
        self, paths: Iterable[tuple[list[int], Sequence[int]]], lora_name: str | None
    ) -> list[Extend]:
        return [
            Extend(self.lm.place(ids, namespace=lora_name), (), tuple(map(Logits, depths)))
            for ids, depths in paths
        ]

    async def _aread(self, reads: list[Extend]) -> list[list[Floats]]:
        """Return the rows of each read. With a batch_size, that many are in flight at most."""
        gate = self._gate()
        if gate is not None:
            return await self._agated(gate, reads)
        tickets = await self.lm.asubmit(reads)
        self._waiting.update(tickets)
        await self.lm.adrive(tickets)
        return [rows_of(ticket) for ticket in tickets]

    async def _agated(self, gate: asyncio.Semaphore, reads: list[Extend]) -> list[list[Floats]]:
        async def one(read: Extend) -> list[Floats]:
            async with gate:
                (ticket,) = await self.lm.asubmit([read])
                self._waiting.add(ticket)
                await self.lm.adrive([ticket])
                return rows_of(ticket)

        return list(await asyncio.gather(*map(one, reads)))

    def _read(self, reads: list[Extend]) -> list[list[Floats]]:
        size = self.batch_size or max(1, len(reads))
        answers: list[list[Floats]] = []
        for at in range(0, len(reads), size):
            tickets = self.lm.submit(reads[at : at + size])
            self._waiting.update(tickets)
            self.lm.drive(tickets)
            answers += map(rows_of, tickets)
        return answers

    # Sampling ---------------------------------------------------------------------------------

    async def _samples(
        self,
        prompts: Contexts,
        max_tokens: int,
        ends: frozenset[int],
        samplers: Sequence[Sampler],
        lora_name: str | None,
    ) -> list[list[int]]:
        places = [self._place(prompt, lora_name) for prompt in prompts]
        if max_tokens < 1:
            return [[] for _ in places]
        runs = [
            Run(place, sampler, ends, max_tokens)
            for place, sampler in zip(places, samplers, strict=True)
        ]
        tickets = await self.lm.asubmit(runs)
        await self.lm.adrive(tickets)
        return [self._sampled(ticket.result(), max_tokens) for ticket in tickets]

    def _sampled(self, result: RunResult, max_tokens: int) -> list[int]:
        if result.finish_reason == "context":
            n_made = len(result.tokens)
            raise ContextOverflow(
                f"the context of {self.lm.n_ctx} tokens was full after {n_made} of {max_tokens}"
                " sampled tokens",
                n_tokens=result.end.depth - n_made + max_tokens,
                n_ctx=self.lm.n_ctx,
                hint="ask for fewer, shorten the prompt, or load the model with a larger n_ctx",
            )
        return result.tokens

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

        return walk(self.lm, self._place(token_ids, lora_name))

    def reset_async_queries(self) -> None:
        """End all queries that wait now: their callers get BatchAbandoned."""
        for ticket in list(self._waiting):
            ticket.cancel()

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter under a name, for `lora_name=`: a folder or a Hub id, in PEFT's
        format. Raises: Unsupported, ModelLoadError, ConfigError.
        """
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
        size, gate = self._gates.get(loop, (0, None))
        if gate is None or size != self.batch_size:
            gate = asyncio.Semaphore(self.batch_size)
            self._gates[loop] = self.batch_size, gate
        return gate

    def _vocab_bytes(self) -> list[bytes]:
        return self.lm.text.vocab_bytes

    def _in_parts(self, token_ids_list: Contexts) -> Iterator[Contexts]:
        size = max(1, TOP_BYTES // (4 * self.lm.info.n_vocab))
        return (token_ids_list[at : at + size] for at in range(0, len(token_ids_list), size))

    def _checked_top(self, k: int) -> int:
        number = whole_number("k", k, 1)
        if number > self.lm.info.n_vocab:
            raise ConfigError(f"k is {k}; allowed is 1 to {self.lm.info.n_vocab}, the vocabulary")
        return number

    def _given(self, values: NDArray[Any]) -> Any:
        as_torch = self._as_torch
        if as_torch is None:
            as_torch = known_token_class() is not None
        if not as_torch:
            return values
        import torch

        tensor = torch.from_numpy(values)
        return tensor if self._device is None else tensor.to(self._device)

    def _stacked(self, rows: Sequence[Floats]) -> Any:
        if not rows:
            return self._given(np.zeros((0, self.lm.info.n_vocab), dtype=np.float32))
        return self._given(np.stack(rows))


class Paths:
    """Contexts, and the longest ones among them that the others are beginnings of."""

    def __init__(self, contexts: Sequence[list[int]]) -> None:
        longest: list[list[int]] = []  # the numbers of contexts on one path, the longest first
        # In this order a context stands right before one that goes on from it.
        for number in reversed(sorted(range(len(contexts)), key=contexts.__getitem__)):
            ids = contexts[number]
            if longest and contexts[longest[-1][0]][: len(ids)] == ids:
                longest[-1].append(number)
            else:
                longest.append([number])
        self._paths: list[tuple[list[int], list[int]]] = []
        self._answers: list[tuple[int, int]] = [(0, 0)] * len(contexts)
        for numbers in sorted(longest, key=min):  # in the order they were asked
            depths = sorted({len(contexts[number]) for number in numbers})
            at = {depth: index for index, depth in enumerate(depths)}
            for number in numbers:
                self._answers[number] = len(self._paths), at[len(contexts[number])]
            self._paths.append((contexts[numbers[0]], depths))

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (context, depths asked): each path once."""
        return iter(self._paths)

    def in_order(self, answers: Sequence[Sequence[Floats]]) -> list[Floats]:
        """Return the row of each context from those of the paths."""
        return [answers[path][depth] for path, depth in self._answers]


def every_depth(token_ids: Sequence[int]) -> tuple[list[int], Sequence[int]]:
    """Return a context, and the depths of all its prefixes."""
    ids = checked_ids(token_ids)
    return ids, range(1, len(ids) + 1)


def read_of(place: Place) -> Extend:
    """Ask for the logits at a place, computing what is missing before it."""
    return Extend(place, (), (Logits(place.depth),))


def rows_of(ticket: Ticket) -> list[Floats]:
    """Return the log-probabilities of a read's answers."""
    try:
        return [log_softmax(logits) for logits in ticket.result()]
    except Cancelled as error:
        raise BatchAbandoned("the query was reset before it was answered") from error


Value = TypeVar("Value")


class ExactRows:
    """Plain rows, kept apart from the LM's: at most `n_bytes` of them, any thread may ask.

    Each forward stands alone between two steps of the LM, as a batch would change last bits. From
    event loops one thread of this object's own waits for them, whoever and how many ask.
    """

    def __init__(self, lm: LM, n_bytes: int) -> None:
        self._lm = lm
        self._n_rows = max(1, n_bytes // (4 * lm.info.n_vocab))
        self._rows: OrderedDict[tuple[Any, ...], Floats] = OrderedDict()
        self._lock = threading.Lock()  # of the rows and of the thread's beginning
        self._thread: ThreadPoolExecutor | None = None

    def plain(self, place: Place) -> Floats:
        """Return a row from a forward of its own."""
        ids = place.ids()

        def forward() -> Floats:
            row = Row((), ids, 0, None, (len(ids) - 1,), (), place.namespace)
            return self._lm.engine.forward([row]).logits(0)

        return log_softmax(self._lm.driver.exclusive(forward))

    def rows(self, places: Sequence[Place]) -> list[Floats]:
        """Return the rows of places, the caller's own; each new one costs a forward."""
        return [self._row(place).copy() for place in places]

    async def aplain(self, place: Place) -> Floats:
        """The same as `plain`, awaited."""
        return await self._on_thread(lambda: self.plain(place))

    async def arows(self, places: Sequence[Place]) -> list[Floats]:
        """The same as `rows`, awaited."""
        return await self._on_thread(lambda: self.rows(places))

    def clear(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows.clear()

    def _row(self, place: Place) -> Floats:
        self._lm.see_weights()
        key = (self._lm.scheduler.rows.n_clears, place.namespace, *place.ids())
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                return row
        row = self.plain(place)
        with self._lock:
            self._rows[key] = row
            while len(self._rows) > self._n_rows:
                self._rows.popitem(last=False)
        return row

    async def _on_thread(self, work: Callable[[], Value]) -> Value:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "weft-exact")
            thread = self._thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)


@dataclass(frozen=True, slots=True)
class CacheNode:
    """A place in the tree as it was: tokens of its path, whether it has KV, its cached logits.

    logits: float32 [V], raw, a copy; None if no row is cached there.
    """

    n_tokens: int
    has_kv: bool
    logits: NDArray[np.float32] | None


def walk(lm: LM, place: Place) -> tuple[CacheNode, int, CacheNode | None, int]:
    """Return what `AsyncLM.walk_cache` does, for a place; looked at under the lock."""
    ids = place.ids()

    def look() -> tuple[CacheNode, int, CacheNode | None, int]:
        cursor = lm.tree.match(ids, place.namespace)
        matched = resolve(cursor).depth
        base = resident_depth(cursor, len(ids) - 1)
        past = view(lm, Cursor(cursor.node, base)) if base else None
        return view(lm, cursor), matched, past, base

    return lm.driver.exclusive(look)


def view(lm: LM, cursor: Cursor) -> CacheNode:
    """Return what is known of a place now: its depth, whether it has KV, a copy of its row."""
    at = resolve(cursor)
    row = lm.scheduler.rows.get(at)
    return CacheNode(at.depth, at.node.fragment is not None, None if row is None else row.copy())


def resident_depth(cursor: Cursor, below: int) -> int:
    """Return how many tokens of the path, `below` at most, have KV without a gap."""
    depth = min(resolve(cursor).depth, below)
    for node in climb(cursor):
        if node.fragment is None:
            depth = min(depth, node.start)
    return depth


KNOWN = ("hf", "vllm", "mlx", "mock")
OWN = ("batch_size", "strict", "strict_bytes", "as_torch", "on_device")
_log = logging.getLogger(__name__)


@overload
def load_model_by_name(  # type: ignore[overload-overlap]  # "mock" is a str, too
    name: str, backend: Literal["mock"], llm_opts: Mapping[str, Any] | None = None
) -> MockAsyncLM: ...


@overload
def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM: ...


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM | MockAsyncLM:
    """Load a model and return its AsyncLM.

    backend: "hf", "vllm", "mlx" or "mock", with that class's options (`weft.compat.genlm`); or an
    engine of Weft's, with the options of `AsyncLM` and of `weft.load`. None: hf, or vllm where CUDA
    and vLLM are and Weft has that engine; for the embedded "tiny" the numpy engine. Rows are
    tensors where torch is installed. Raises: ValueError for another backend.
    """
    from ..engines import engine_names

    if not isinstance(name, str | os.PathLike):
        raise ConfigError(
            f"name is of type {type(name).__name__}; allowed are a name and a folder. For a loaded"
            " model: AsyncLM(weft.load(model, tokenizer))"
        )
    options, engines = dict(llm_opts or {}), engine_names()
    chosen = backend if backend is not None else _best(name, engines, options)
    if chosen in KNOWN:
        made: AsyncLM | MockAsyncLM = doors.BACKENDS[chosen].from_name(name, **options)
        return made
    if chosen not in ("auto", *engines):
        allowed = ", ".join((*KNOWN, "auto", *engines))
        raise ConfigError(f"Invalid backend: {chosen!r}; allowed are {allowed}")
    from ..loading import load

    own = {"as_torch": find_spec("torch") is not None}
    own |= {option: options.pop(option) for option in OWN if option in options}
    return AsyncLM(load(name, engine=chosen, **options), **own)


def _best(name: str, engines: tuple[str, ...], options: dict[str, Any]) -> str:
    """Choose a backend; what programs give for vLLM on CUDA is left out where torch is taken."""
    if name == "tiny":
        return "numpy"
    if not _has_cuda():
        return "hf"
    if "vllm" in engines and find_spec("vllm") is not None:
        return "vllm"
    if options.pop("engine_opts", None):
        _log.warning("engine_opts are for vLLM, which is not installed; torch is used without")
    return "hf"


def _has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
