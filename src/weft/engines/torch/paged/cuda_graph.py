"""CUDA graphs of steps: a captured step is replayed with one launch.

A graph reads tensors that never move, its buffers; the inputs of a step are copied there. Buffers
have room for more than the captured step, so one graph serves several plans:

    tokens   ├── of the step ──┤── padding: token 0, at position 0, into the dummy slot ──┤

    items    ├── of the plan ──┤── padding: no rows, so nothing is read or written ──┤

All but the capture (`capture`) is the same on every device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from ..attention_hook import ForwardContext
from ..kv_backend import AttentionStep
from .capture import CapturedStep, Recorder
from .graph_inputs import copy_inputs
from .kernel import ITEM_FIELDS, Work
from .step import PagedBackend, PagedStep

_log = logging.getLogger("weft.engines.torch")

MAX_TOKENS = 1024  # larger steps are bound by products, which hide the launches
# From so many tokens on, padding costs time in products: graphs have multiples of 64 tokens.
_MANY_TOKENS, _FINE = 128, 64
_OFTEN = 2  # similar steps that run eagerly before one is captured
_MAX_GRAPHS = 32
_TRIES = 3  # failed captures in a row, which may be temporary, before the runner gives up


class Body(Protocol):
    """The part of a model before its head: a fused decoder, or Transformers' own modules."""

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run packed tokens, both [1, T]; return hidden states [T, E]."""
        ...


class BufferSizes(NamedTuple):
    """Numbers of work items and partial results that a CUDA graph's buffers can hold.

    Each group size (query heads per KV head) has buffers of its own.
    """

    narrow: int  # items of narrow tiles
    wide: int  # items of wide tiles
    broad: int  # items of broad tiles
    parts: int  # partial results of all tokens
    is_single: bool  # every token has one part, which needs no merge

    @classmethod
    def from_work(cls, work: Work) -> BufferSizes:
        """Return the sizes that a step's work items need."""
        n_each = len(work.narrow), len(work.wide), len(work.broad)
        return cls(*n_each, work.n_parts, work.is_single)

    def enlarged(self) -> BufferSizes:
        """Return the sizes of buffers for a graph: rounded up, so that other steps fit too."""
        narrow, wide, broad, parts = (_round_up_to_bucket(n, 16) if n else 0 for n in self[:4])
        return BufferSizes(narrow, wide, broad, parts, self.is_single)

    def holds(self, other: BufferSizes) -> bool:
        """Return True if buffers of this size can hold a step that needs `other`."""
        is_alike = self.is_single == other.is_single
        return is_alike and all(mine >= needed for mine, needed in zip(self, other, strict=True))

    def is_near(self, other: BufferSizes) -> bool:
        """Return True if buffers of this size waste few programs on a step that needs `other`."""
        return all(mine <= 2 * needed + 64 for mine, needed in zip(self, other, strict=True))


class GraphKey(NamedTuple):
    """Key of a captured CUDA graph: steps with equal keys can be replayed by the same graph.

    body: `id` of the model part that ran. n_tokens: number of tokens, padding included. sizes:
    (query heads per KV head, buffer sizes) for each such group size.
    """

    body: int
    n_tokens: int
    sizes: tuple[tuple[int, BufferSizes], ...]


class GraphBuffers(PagedStep):
    """The tensors that a graph reads, and a step over them that is captured.

    Args:
        key: sizes of the tensors.
        memory: backend with the pool that the graph reads and writes.
    """

    def __init__(self, key: GraphKey, memory: PagedBackend) -> None:
        n, device = key.n_tokens, memory.layout.device
        self._memory = memory
        self.key = key
        self.ids = torch.zeros(1, n, dtype=torch.long, device=device)
        self.positions = torch.zeros(n, dtype=torch.long, device=device)
        self._slots = torch.zeros(n, dtype=torch.long, device=device)
        self._positions32 = torch.zeros(n, dtype=torch.int32, device=device)
        self._works = {group: self._empty(size) for group, size in key.sizes}
        self._filled: dict[int, Work] = {}
        self._n_tokens = n + 1  # of the last step

    def _empty(self, size: BufferSizes) -> Work:
        """Allocate work items of this size, all zeros: no rows."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.ids.device)

        return Work(
            table=self._memory.table.on_device(),
            narrow=ints(size.narrow, ITEM_FIELDS),
            wide=ints(size.wide, ITEM_FIELDS),
            broad=ints(size.broad, ITEM_FIELDS),
            first_part=ints(self.key.n_tokens + 1),
            positions=self._positions32,
            n_parts=size.parts,
            is_single=size.is_single,
            outputs={},  # shared by all layers: each output is read before the next is written
        )

    @property
    def slots(self) -> Tensor:
        """Slot of each packed token: int64 [T]."""
        return self._slots

    def work(self, group: int) -> Work:
        """Return the work items for `group` query heads per KV head."""
        return self._works[group]

    def fill(self, ids: Tensor, step: PagedStep) -> None:
        """Copy a step's inputs; ids: int64 [1, T]. No host-to-device copy."""
        n = ids.shape[1]
        if n < self._n_tokens:
            self.ids[:, n:] = 0
            self.positions[n:] = self._positions32[n:] = 0
            self._slots[n:] = self._memory.dummy_slot
        self._n_tokens = n
        for group, mine in self._works.items():
            work = step.work(group)
            if self._filled.get(group) is not work:
                self._filled[group] = work
                for into, items in zip(mine.by_tile, work.by_tile, strict=True):
                    into[: len(items)].copy_(items)
                    into[len(items) :] = 0
                mine.first_part[: n + 1].copy_(work.first_part)
                mine.first_part[n + 1 :] = work.n_parts
        buffers = self.ids[0], self._slots, self._positions32, self.positions
        copy_inputs(ids[0], step.short_slots, step.short_positions, buffers)


class CudaGraphRunner:
    """Runs an engine's steps, by replaying a captured CUDA graph where one fits, else eagerly."""

    def __init__(
        self,
        call: ForwardContext,
        memory: PagedBackend,
        record: Recorder,
        weight_addresses: Callable[[], int],
    ) -> None:
        """Args:
        call: the model's `ForwardContext`.
        record: captures a call.
        weight_addresses: returns a number that changes when weights move, as graphs read them
            in place.
        """
        self._call, self._memory, self._record = call, memory, record
        self._weight_addresses = weight_addresses
        # Least recently replayed first.
        self._graphs: dict[GraphKey, tuple[GraphBuffers, CapturedStep]] = {}
        self._counts: dict[GraphKey, int] = {}
        self._places: tuple[int, ...] | None = None
        self._n_failed = 0
        self.not_captured_because = ""
        self._reset_counts()
        # Graphs are invalid once the pool moves; release their memory before allocating more.
        memory.before_moving = WeakMethod(self.clear)

    def hidden(self, body: Body, ids: Tensor, step: AttentionStep) -> Tensor:
        """Return hidden states [T, E] of packed tokens; ids: [1, T].

        step: of this object's backend.
        """
        assert isinstance(step, PagedStep)
        graph = None if self.not_captured_because else self._find_or_capture(body, ids, step)
        if graph is None:
            self.n_eager += 1
            return self._run(body, ids, step)
        buffers, captured = graph
        try:
            captured.replay()
        except RuntimeError as error:
            self._handle_failure(
                f"a captured step of {buffers.key.n_tokens} tokens", "replayed", error
            )
            self.n_eager += 1
            return self._run(body, ids, step)
        self.n_replayed += 1
        self._n_failed = 0
        return captured.hidden[: ids.shape[1]]

    def clear(self) -> None:
        """Drop all graphs: tensors that they read have moved, or may have."""
        self._drop(*self._graphs)
        self._counts.clear()
        self._places = None

    def _drop(self, *keys: GraphKey) -> None:
        """Remove graphs and release their memory."""
        for key in keys:
            _, captured = self._graphs.pop(key)
            captured.release()

    def reset(self) -> None:
        """Start over after the load check; but remember if steps cannot be captured."""
        self.clear()
        self._n_failed = 0
        self._reset_counts()

    def _reset_counts(self) -> None:
        """Set the counters of `stats` to zero."""
        self.n_replayed = self.n_eager = self.n_captured = 0
        self.capture_s = 0.0

    def stats(self) -> dict[str, object]:
        """Return how many steps were captured, replayed and run eagerly."""
        return {
            "captured": self.n_captured,
            "capture_s": round(self.capture_s, 3),
            "replayed": self.n_replayed,
            "eager": self.n_eager,
            "not_captured_because": self.not_captured_because,
        }

    def _run(self, body: Body, ids: Tensor, step: PagedStep) -> Tensor:
        """Run a step's operations; return hidden states [T, E]. A capture records this call."""
        self._call.step = step
        try:
            return body.hidden(ids, step.positions[None])
        finally:
            self._call.step = None

    def _find_or_capture(
        self, body: Body, ids: Tensor, step: PagedStep
    ) -> tuple[GraphBuffers, CapturedStep] | None:
        """Return a graph whose buffers contain this step; None if the step must run eagerly.

        A graph is captured only after `_OFTEN` similar steps have run eagerly. All graphs are
        dropped first if memory or weights have moved.
        """
        n = ids.shape[1]
        groups = self._memory.groups
        if n > MAX_TOKENS or not groups:
            return None
        works = [(group, step.work(group)) for group in sorted(groups)]
        table = works[0][1].table.data_ptr()
        places = (self._memory.n_moves, table, self._weight_addresses())
        if places != self._places:
            self.clear()
            self._places = places
        sizes = tuple((group, BufferSizes.from_work(work)) for group, work in works)
        match = self._fitting(GraphKey(id(body), n, sizes))
        if match is not None:
            match[0].fill(ids, step)
            return match
        key = GraphKey(id(body), bucket_of(n), tuple((g, size.enlarged()) for g, size in sizes))
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] <= _OFTEN:
            return None
        return self._captured(key, body, ids, step)

    def _fitting(self, needed: GraphKey) -> tuple[GraphBuffers, CapturedStep] | None:
        """Return the smallest graph that can run a step without too much padding; None if none can.

        needed: properties of the step.
        """
        best: GraphKey | None = None
        for key in self._graphs:
            if key.body != needed.body or not needed.n_tokens <= key.n_tokens:
                continue
            if key.n_tokens > _max_tokens_for(needed.n_tokens):
                continue
            pairs = list(zip(key.sizes, needed.sizes, strict=False))
            fits = [g == h and has.holds(want) for (g, has), (h, want) in pairs]
            is_near = all(has.is_near(want) for (_, has), (_, want) in pairs)
            if len(key.sizes) == len(needed.sizes) and all(fits) and is_near:
                best = key if best is None or key.n_tokens < best.n_tokens else best
        if best is None:
            return None
        match = self._graphs[best] = self._graphs.pop(best)
        return match

    def _captured(
        self, key: GraphKey, body: Body, ids: Tensor, step: PagedStep
    ) -> tuple[GraphBuffers, CapturedStep] | None:
        """Capture a step with buffers that contain it; None if that fails."""
        while len(self._graphs) >= _MAX_GRAPHS:
            self._drop(next(iter(self._graphs)))
        buffers = GraphBuffers(key, self._memory)
        buffers.fill(ids, step)
        start = time.perf_counter()
        try:
            captured = self._record(lambda: self._run(body, buffers.ids, buffers))
        except Exception as error:
            self._handle_failure(f"a step of {key.n_tokens} tokens", "captured", error)
            return None
        self.n_captured += 1
        self.capture_s += time.perf_counter() - start
        self._graphs[key] = buffers, captured
        return buffers, captured

    def _handle_failure(self, what: str, done: str, error: Exception) -> None:
        """Handle a failed capture or replay: drop all graphs.

        After a few failures in a row, steps are not captured any more.

        what, done: subject and verb of the log message, such as "a step" and "captured".

        A failure may be temporary: memory was short, or another thread waited for the device, which
        ends a capture.
        """
        self.clear()
        self._n_failed += 1
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if self._n_failed < _TRIES:
            _log.info("%s is not %s now: %s", what, done, reason)
            return
        self.not_captured_because = reason
        _log.warning(
            "steps of this model cannot be %s as CUDA graphs, and are launched operation by"
            " operation, which is slower: %s",
            done,
            reason,
        )


def bucket_of(n: int) -> int:
    """Return the padded number of tokens of the CUDA graph that runs a step of n tokens.

    These are 1, 2, 4, 8, then powers of two and the values halfway between, and multiples of 64
    from 128 on.
    """
    if n > _MANY_TOKENS:
        return -(-n // _FINE) * _FINE
    return n if n <= 2 else (4 if n <= 4 else _round_up_to_bucket(n, 8))


def _max_tokens_for(n: int) -> int:
    """Return the largest graph, in tokens, that may run a step of n tokens."""
    return bucket_of(n) if n > _MANY_TOKENS // 2 else max(2 * n, 16)


def _round_up_to_bucket(n: int, minimum: int) -> int:
    """Round up to `minimum` times 1, 1.5, 2, 3, 4, 6 …"""
    size = minimum
    while size < n:
        if 3 * size // 2 >= n:
            return 3 * size // 2
        size *= 2
    return size
