"""How the rows of a step are packed, and which queries meet which keys.

Rows are packed in lanes, each in depth-first order, so that the queries below a node are a slice:

    ├── bank lane: rows of one token, tails in one bank ──┤├── chunk lane: rows of n tokens ──┤ …
         a node's queries     ├────────┤

A plan holds views and slices only; positions and lengths of a step are read when it runs. One that
has bank lanes only fits the next step too, if that has the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ConfigError
from ..base import Row, Span
from .bank import Bank, width_for
from .spans import Bundle, Part, Stretch, arrange
from .store import KV, Store


class BankLane(NamedTuple):
    """Rows of one token each, packed at start..stop in the order of the bank's, from `first` on."""

    bank: Bank
    first: int
    tails: list[KV]
    start: int
    stop: int


class ChunkLane(NamedTuple):
    """Rows of `sizes` tokens, packed one after the other at start..stop."""

    sizes: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class Plan:
    """How one set of rows is packed.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    arrange: finds the spans; not asked where a row steps alone.
    """

    rows: list[tuple[tuple[Span, ...], KV | None]]
    order: list[int]
    starts: list[int]
    banks: list[BankLane] = field(default_factory=list)
    chunks: list[ChunkLane] = field(default_factory=list)
    arrange: Callable[[], list[Part | Bundle]] = list
    _spans: list[Part | Bundle] | None = None

    @property
    def spans(self) -> list[Part | Bundle]:
        """The spans above the rows, and the queries below each."""
        if self._spans is None:
            self._spans = self.arrange()
        return self._spans

    def fits(self, rows: Sequence[Row], *, crowd: bool) -> bool:
        """Would planning these rows give this plan again?"""
        if self.chunks or len(rows) != len(self.rows):
            return False
        for row, (path, dest) in zip(rows, self.rows, strict=True):
            if row.path is not path or row.dest is not dest or row.n_tokens != 1:
                return False
        return all(
            width_for(max(t.length for t in lane.tails) + 1, crowd=crowd) == lane.bank.width
            for lane in self.banks
        )


def plan_step(rows: Sequence[Row], store: Store) -> Plan:
    """Return a plan for the rows, the cached one if it fits; tails move to their banks."""
    cached = store.plan
    if cached is not None and cached.fits(rows, crowd=store.is_crowd()):
        longest = [max(t.length for t in lane.tails) for lane in cached.banks]
        if all(n < lane.bank.room for n, lane in zip(longest, cached.banks, strict=True)):
            return cached
    plan = _build(rows, store)
    store.plan = plan if not plan.chunks else None
    return plan


def _build(rows: Sequence[Row], store: Store) -> Plan:
    dests = [_dest_of(row) for row in rows]
    plan = Plan([(r.path, d) for r, d in zip(rows, dests, strict=True)], [], [0] * len(rows))
    ranks = _depth_first(rows)
    for kind, members in sorted(_lanes(rows, dests, store).items()):
        members.sort(key=ranks.__getitem__)
        start = stop = sum(rows[i].n_tokens for i in plan.order)
        for i in members:
            plan.starts[i] = stop
            stop += rows[i].n_tokens
        plan.order += members
        if kind[0] == "bank":
            tails = [d for i in members if (d := dests[i]) is not None]
            plan.banks.append(BankLane(*store.bank_for(tails, kind[1]), tails, start, stop))
        else:
            plan.chunks.append(ChunkLane(tuple(rows[i].n_tokens for i in members), start, stop))
    stretches = _stretches(plan, rows, dests)
    plan.arrange = lambda: arrange(stretches, store)
    return plan


def _dest_of(row: Row) -> KV | None:
    if row.dest is not None and not isinstance(row.dest, KV):
        raise ConfigError(f"a {type(row.dest).__name__} is not a fragment of the torch engine")
    return row.dest


def _depth_first(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """A sort key a row: rows below the same spans come out together."""
    numbers: dict[tuple[int, int], int] = {}
    keys: dict[int, tuple[int, ...]] = {}
    for row in rows:
        if id(row.path) not in keys:
            keys[id(row.path)] = tuple(
                numbers.setdefault((id(span.fragment), span.length), len(numbers))
                for span in row.path
            )
    return [keys[id(row.path)] for row in rows]


def _lanes(
    rows: Sequence[Row], dests: list[KV | None], store: Store
) -> dict[tuple[str, int], list[int]]:
    """Rows by lane: ("bank", width class of the tail) or ("chunk", tokens up to a power of two)."""
    pairs = list(zip(rows, dests, strict=True))
    n_long = sum(r.n_tokens == 1 and d is not None and not store.is_banked(d, 0) for r, d in pairs)
    banked = (d for r, d in pairs if r.n_tokens == 1 and d is not None)
    crowd = store.is_crowd(sum(not isinstance(d.home, Bank) for d in banked))
    lanes: dict[tuple[str, int], list[int]] = {}
    for i, (row, dest) in enumerate(pairs):
        n = row.n_tokens
        if n == 1 and dest is not None and store.is_banked(dest, n_long):
            kind = ("bank", width_for(dest.length + 1, crowd=crowd))
        else:
            kind = ("chunk", 1 << (n - 1).bit_length())
        lanes.setdefault(kind, []).append(i)
    return lanes


def _stretches(plan: Plan, rows: Sequence[Row], dests: list[KV | None]) -> list[Stretch]:
    """Find the slice of queries below each span; a chunk row sees its tail as one span more."""
    found: list[Stretch] = []
    latest: dict[tuple[int, int], int] = {}
    n_banked = plan.banks[-1].stop if plan.banks else 0
    for i in plan.order:
        row, dest = rows[i], dests[i]
        start, stop = plan.starts[i], plan.starts[i] + row.n_tokens
        tail = [Span(dest, dest.length)] if dest is not None and start >= n_banked else []
        first = 0
        for span in (*row.path, *tail):
            if not span.length:
                continue
            key = (id(span.fragment), span.length)
            at = latest.get(key)
            if at is not None and found[at].stop == start:
                found[at] = found[at]._replace(stop=stop)
            else:
                latest[key] = len(found)
                found.append(Stretch(span.fragment, span.length, first, start, stop))
            first += span.length
    return found
