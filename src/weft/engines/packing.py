"""How the rows of one step are packed, for engines whose tails lie in banks.

Rows are packed in lanes, each in depth-first order, so that the queries below a node are a slice:

    ├── bank lane: rows of one token, tails in one bank ──┤├── chunk lane: rows of n tokens ──┤ …
         a node's queries     ├────────┤

A plan holds views and slices only; positions and lengths of a step are read when it runs. One that
has bank lanes only fits the next step too, if that has the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from .base import Row, Span
from .padded_pool import B, F, PaddedPool, TailBuffer, own, width_for
from .shared_prefixes import QuerySpan


class DecodeGroup(NamedTuple, Generic[F, B]):
    """Rows of one token each, packed at start..stop in the order of the bank's, from `first` on."""

    bank: B
    first: int
    tails: list[F]
    start: int
    stop: int


class PrefillGroup(NamedTuple):
    """Rows of `sizes` tokens, packed one after the other at start..stop."""

    sizes: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class Packing(Generic[F, B]):
    """How one set of rows is packed.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    """

    rows: list[tuple[tuple[Span, ...], F | None]]
    order: list[int]
    starts: list[int]
    banks: list[DecodeGroup[F, B]] = field(default_factory=list)
    chunks: list[PrefillGroup] = field(default_factory=list)

    @property
    def n_banked(self) -> int:
        """Packed tokens of the bank lanes, which come first."""
        return self.banks[-1].stop if self.banks else 0

    def fits(self, rows: Sequence[Row], *, crowd: bool) -> bool:
        """Would planning these rows give this plan again?"""
        if self.chunks or len(rows) != len(self.rows):
            return False
        for row, (path, dest) in zip(rows, self.rows, strict=True):
            if row.prefix is not path or row.kv_out is not dest or row.n_tokens != 1:
                return False
        for lane in self.banks:
            longest = max([tail.length for tail in lane.tails]) + 1
            if longest > lane.bank.room or width_for(longest, crowd=crowd) != lane.bank.width:
                return False
        return True

    def reaches(self, rows: Sequence[Row], kind: type[F], n_packed: int) -> list[QuerySpan[F]]:
        """Find the slice of queries below each span, of the rows within the first `n_packed`.

        A row whose tail is in no bank sees it as one span more.
        """
        found: list[QuerySpan[F]] = []
        latest: dict[tuple[int, int], int] = {}
        growing = {id(dest) for _, dest in self.rows}
        for i in self.order:
            start, stop, first = self.starts[i], self.starts[i] + rows[i].n_tokens, 0
            if stop > n_packed:
                break
            for fragment, length in seen(rows[i], is_banked=start < self.n_banked):
                if not length:
                    continue
                key = (id(fragment), length)
                at = latest.get(key)
                if at is not None and found[at].stop == start:
                    found[at] = found[at]._replace(stop=stop)
                else:
                    latest[key] = len(found)
                    kv, grows = own(fragment, kind), id(fragment) in growing
                    found.append(QuerySpan(kv, length, first, start, stop, grows))
                first += length
        return found


def seen(row: Row, *, is_banked: bool) -> list[Span]:
    """Return the spans that a row's tokens see; a tail in a bank is met there."""
    tail = row.kv_out
    if tail is None or is_banked:
        return list(row.prefix)
    return [*row.prefix, Span(tail, tail.length)]


def depth_first(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Return a sort key a row: rows below the same spans come out together."""
    numbers: dict[tuple[int, int], int] = {}
    keys: dict[int, tuple[int, ...]] = {}
    for row in rows:
        if id(row.prefix) not in keys:
            keys[id(row.prefix)] = tuple(
                numbers.setdefault((id(span.fragment), span.length), len(numbers))
                for span in row.prefix
            )
    return [keys[id(row.prefix)] for row in rows]


def lanes_of(
    rows: Sequence[Row],
    dests: Sequence[F | None],
    memory: PaddedPool[F, Any],
    *,
    long_row: int | None = None,
) -> dict[tuple[str, int], list[int]]:
    """Return row numbers by lane, those of a lane depth first.

    A lane is ("bank", width class of the tail), ("chunk", tokens up to a power of two) or, of rows
    of `long_row` tokens or more, ("long", 0).
    """
    pairs = list(zip(rows, dests, strict=True))
    single = [dest for row, dest in pairs if row.n_tokens == 1 and dest is not None]
    n_long = sum(not memory.is_banked(dest, 0) for dest in single)
    crowd = memory.is_large_batch(sum(not isinstance(dest.home, TailBuffer) for dest in single))
    lanes: dict[tuple[str, int], list[int]] = {}
    for i, (row, dest) in enumerate(pairs):
        n = row.n_tokens
        if long_row is not None and n >= long_row:
            kind = ("long", 0)
        elif n == 1 and dest is not None and memory.is_banked(dest, n_long):
            kind = ("bank", width_for(dest.length + 1, crowd=crowd))
        else:
            kind = ("chunk", 1 << (n - 1).bit_length())
        lanes.setdefault(kind, []).append(i)
    ranks = depth_first(rows)
    return {kind: sorted(lanes[kind], key=ranks.__getitem__) for kind in sorted(lanes)}
