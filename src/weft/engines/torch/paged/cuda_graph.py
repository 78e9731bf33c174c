"""Steps that were captured once and are played again: one launch for all layers.

A captured step reads tensors that never move, its frame; what a step is about is copied there. A
frame has room for more than the step that made it, so one serves as plans change:

    tokens   ├── of the step ──┤── fill: token 0, at position 0, into nobody's slot ──┤
    items    ├── of the plan ──┤── fill: no rows, so nothing is read or written ──┤

All but the capture itself (`capture.py`) is the same on every device.
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

MAX_TOKENS = 1024  # beyond it a step is bound by its products, and launches hide behind them
# From so many on the products' time goes by tokens, those of the fill too: frames have whole 64s.
_MANY_TOKENS, _FINE = 128, 64
_OFTEN = 2  # steps alike that are run before one is captured
_MOST_FRAMES = 32
_TRIES = 3  # captures in turn that fail, perhaps by what goes on beside them, before that is all


class Body(Protocol):
    """A model up to its hidden states."""

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run packed tokens, both [1, T]; return hidden states [T, E]."""
        ...


class BufferSizes(NamedTuple):
    """What a frame has room for, of heads in groups of one size."""

    narrow: int
    wide: int
    broad: int
    parts: int
    is_single: bool  # what is merged elsewhere is written at once

    @classmethod
    def from_work(cls, work: Work) -> BufferSizes:
        n_each = len(work.narrow), len(work.wide), len(work.broad)
        return cls(*n_each, work.n_parts, work.is_single)

    def roomy(self) -> BufferSizes:
        """Return one with room for more."""
        narrow, wide, broad, parts = (_up(n, 16) if n else 0 for n in self[:4])
        return BufferSizes(narrow, wide, broad, parts, self.is_single)

    def holds(self, other: BufferSizes) -> bool:
        is_alike = self.is_single == other.is_single
        return is_alike and all(mine >= asked for mine, asked in zip(self, other, strict=True))

    def is_near(self, other: BufferSizes) -> bool:
        """Whether programs that do nothing are few enough."""
        return all(mine <= 2 * asked + 64 for mine, asked in zip(self, other, strict=True))


class Key(NamedTuple):
    """What steps that are alike have in common. rooms: by the size of groups."""

    body: int
    n_tokens: int
    rooms: tuple[tuple[int, BufferSizes], ...]


class GraphBuffers(PagedStep):
    """The tensors that a captured step reads, and the step over them."""

    def __init__(self, key: Key, memory: PagedBackend) -> None:
        n, device = key.n_tokens, memory.layout.device
        self._memory = memory
        self.key = key
        self.ids = torch.zeros(1, n, dtype=torch.long, device=device)
        self.positions = torch.zeros(n, dtype=torch.long, device=device)
        self._slots = torch.zeros(n, dtype=torch.long, device=device)
        self._places = torch.zeros(n, dtype=torch.int32, device=device)
        self._works = {group: self._empty(room) for group, room in key.rooms}
        self._filled: dict[int, Work] = {}
        self._n_tokens = n + 1  # of the step it was filled with

    def _empty(self, room: BufferSizes) -> Work:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.ids.device)

        return Work(
            table=self._memory.table.on_device(),
            narrow=ints(room.narrow, ITEM_FIELDS),
            wide=ints(room.wide, ITEM_FIELDS),
            broad=ints(room.broad, ITEM_FIELDS),
            first_part=ints(self.key.n_tokens + 1),
            positions=self._places,
            n_parts=room.parts,
            is_single=room.is_single,
            outputs={},  # one for all layers: each is read before the next is made
        )

    @property
    def slots(self) -> Tensor:
        return self._slots

    def work(self, group: int) -> Work:
        return self._works[group]

    def fill(self, ids: Tensor, step: PagedStep) -> None:
        """Take over what a step is about; ids: int64 [1, T]. Nothing crosses to the device."""
        n = ids.shape[1]
        if n < self._n_tokens:
            self.ids[:, n:] = 0
            self.positions[n:] = self._places[n:] = 0
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
        held = self.ids[0], self._slots, self._places, self.positions
        copy_inputs(ids[0], step.short_slots, step.short_positions, held)


class CudaGraphRunner:
    """The captured steps of one engine. `hidden` runs a step, captured or not."""

    def __init__(
        self,
        call: ForwardContext,
        memory: PagedBackend,
        record: Recorder,
        weight_addresses: Callable[[], int],
    ) -> None:
        """call: the forward that is running. record: makes a replay of what is run once.

        weight_addresses: another number once weights lie elsewhere, as what was captured reads them
        where they were.
        """
        self._call, self._memory, self._record = call, memory, record
        self._weight_addresses = weight_addresses
        self._frames: dict[
            Key, tuple[GraphBuffers, CapturedStep]
        ] = {}  # the one that was played last is last
        self._seen: dict[Key, int] = {}
        self._places: tuple[int, ...] | None = None
        self._n_failed = 0
        self.not_captured_because = ""
        self._reset_counts()
        # What is captured is lost where the pool moves: its memory goes before more is asked for.
        memory.before_moving = WeakMethod(self.clear)

    def hidden(self, body: Body, ids: Tensor, step: AttentionStep) -> Tensor:
        """Return hidden states [T, E] of packed tokens; ids: [1, T].

        step: of this object's memory.
        """
        assert isinstance(step, PagedStep)
        held = None if self.not_captured_because else self._held(body, ids, step)
        if held is None:
            self.n_eager += 1
            return self._run(body, ids, step)
        frame, captured = held
        try:
            captured.replay()
        except RuntimeError as error:
            self._has_failed(f"a captured step of {frame.key.n_tokens} tokens", "played", error)
            self.n_eager += 1
            return self._run(body, ids, step)
        self.n_replayed += 1
        self._n_failed = 0
        return captured.hidden[: ids.shape[1]]

    def clear(self) -> None:
        """Drop what was captured: memory that it reads has moved, or may have."""
        self._drop(*self._frames)
        self._seen.clear()
        self._places = None

    def _drop(self, *keys: Key) -> None:
        for key in keys:
            _, captured = self._frames.pop(key)
            captured.release()

    def reset(self) -> None:
        """Be as new after a trial; but what could not be captured is known."""
        self.clear()
        self._n_failed = 0
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.n_replayed = self.n_eager = self.n_captured = 0
        self.capture_s = 0.0

    def stats(self) -> dict[str, object]:
        """Return how steps were run so far, for whoever measures."""
        return {
            "captured": self.n_captured,
            "capture_s": round(self.capture_s, 3),
            "played": self.n_replayed,
            "eager": self.n_eager,
            "not_captured_because": self.not_captured_because,
        }

    def _run(self, body: Body, ids: Tensor, step: PagedStep) -> Tensor:
        self._call.step = step
        try:
            return body.hidden(ids, step.positions[None])
        finally:
            self._call.step = None

    def _held(
        self, body: Body, ids: Tensor, step: PagedStep
    ) -> tuple[GraphBuffers, CapturedStep] | None:
        """Return a captured step that is filled with this one; None where it is run as it is."""
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
        rooms = tuple((group, BufferSizes.from_work(work)) for group, work in works)
        found = self._fitting(Key(id(body), n, rooms))
        if found is not None:
            found[0].fill(ids, step)
            return found
        key = Key(id(body), bucket_of(n), tuple((g, room.roomy()) for g, room in rooms))
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= _OFTEN:
            return None
        return self._captured(key, body, ids, step)

    def _fitting(self, asked: Key) -> tuple[GraphBuffers, CapturedStep] | None:
        """Return the smallest captured step that this one fits into, and is not lost in."""
        best: Key | None = None
        for key in self._frames:
            if key.body != asked.body or not asked.n_tokens <= key.n_tokens:
                continue
            if key.n_tokens > _most_for(asked.n_tokens):
                continue
            pairs = list(zip(key.rooms, asked.rooms, strict=False))
            fits = [g == h and has.holds(want) for (g, has), (h, want) in pairs]
            is_near = all(has.is_near(want) for (_, has), (_, want) in pairs)
            if len(key.rooms) == len(asked.rooms) and all(fits) and is_near:
                best = key if best is None or key.n_tokens < best.n_tokens else best
        if best is None:
            return None
        found = self._frames[best] = self._frames.pop(best)
        return found

    def _captured(
        self, key: Key, body: Body, ids: Tensor, step: PagedStep
    ) -> tuple[GraphBuffers, CapturedStep] | None:
        """Capture a step over a frame that holds this one; None where that fails."""
        while len(self._frames) >= _MOST_FRAMES:
            self._drop(next(iter(self._frames)))
        frame = GraphBuffers(key, self._memory)
        frame.fill(ids, step)
        began = time.perf_counter()
        try:
            captured = self._record(lambda: self._run(body, frame.ids, frame))
        except Exception as error:
            self._has_failed(f"a step of {key.n_tokens} tokens", "captured", error)
            return None
        self.n_captured += 1
        self.capture_s += time.perf_counter() - began
        self._frames[key] = frame, captured
        return frame, captured

    def _has_failed(self, what: str, done: str, error: Exception) -> None:
        """Forget all, and try again a few times: there may have been no memory, or another thread
        may have waited for the device, which ends a capture.
        """
        self.clear()
        self._n_failed += 1
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        if self._n_failed < _TRIES:
            _log.info("%s is not %s now: %s", what, done, said)
            return
        self.not_captured_because = said
        _log.warning(
            "steps of this model cannot be %s as CUDA graphs, and are launched operation by"
            " operation, which is slower: %s",
            done,
            said,
        )


def bucket_of(n: int) -> int:
    """Return how many tokens the frame of a step of n has: 1, 2, 4, 8, then by powers' halves, and
    from 128 on by 64.
    """
    if n > _MANY_TOKENS:
        return -(-n // _FINE) * _FINE
    return n if n <= 2 else (4 if n <= 4 else _up(n, 8))


def _most_for(n: int) -> int:
    """Return how many tokens a frame may have that a step of n is run in."""
    return bucket_of(n) if n > _MANY_TOKENS // 2 else max(2 * n, 16)


def _up(n: int, least: int) -> int:
    """Round up to least times 1, 1.5, 2, 3, 4, 6 …"""
    size = least
    while size < n:
        if 3 * size // 2 >= n:
            return 3 * size // 2
        size *= 2
    return size
