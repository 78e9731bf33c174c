"""Order of a step's tokens in the model call, for engines with padded KV.

Rows are packed in groups, depth first within a group, so that the queries below a node are a
slice::

    ├── decode group: rows of one token, tails in one buffer ──┤├── prefill group: n tokens each ──┤
         queries of a node     ├────────┤

A packing contains only views and slices. Positions and lengths are read when a step runs. A packing
without prefill groups is reused for the next step with the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from .base import Row, Span
from .padded_pool import B, F, PaddedPool, TailBuffer, own, width_class
from .shared_prefixes import QuerySpan


class DecodeGroup(NamedTuple, Generic[F, B]):
    """Rows of one token each, packed at start … stop - 1.

    Args:
        buffer: tail buffer that holds their tails.
        first: buffer row of the first tail; the others follow.
        tails: fragments that the rows write to.
        start: first packed token.
        stop: one more than the last packed token.
    """

    buffer: B
    first: int
    tails: list[F]
    start: int
    stop: int


class PrefillGroup(NamedTuple):
    """Rows of several tokens, packed one after the other at start … stop - 1.

    Args:
        sizes: tokens of each row.
        start: first packed token.
        stop: one more than the last packed token.
    """

    sizes: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class Packing(Generic[F, B]):
    """Order of the tokens of one set of rows.

    Attributes:
        rows: prefix and KV fragment of each row, to recognize the same rows in the next step.
        order: row numbers in packed order.
        starts: packed index of each row's first token, by row number.
        decode_groups: groups of rows of one token.
        prefill_groups: groups of rows of several tokens.
    """

    rows: list[tuple[tuple[Span, ...], F | None]]
    order: list[int]
    starts: list[int]
    decode_groups: list[DecodeGroup[F, B]] = field(default_factory=list)
    prefill_groups: list[PrefillGroup] = field(default_factory=list)

    @property
    def n_decode_tokens(self) -> int:
        """Number of packed tokens in decode groups, which come first."""
        return self.decode_groups[-1].stop if self.decode_groups else 0

    def fits(self, rows: Sequence[Row], *, large_batch: bool) -> bool:
        """Return True if this packing can be used for the next step with these rows.

        They must have the same prefixes and `kv_out`, one token each, and room in their buffers.
        large_batch: see `width_class`.
        """
        if self.prefill_groups or len(rows) != len(self.rows):
            return False
        for row, (prefix, kv_out) in zip(rows, self.rows, strict=True):
            if row.prefix is not prefix or row.kv_out is not kv_out or row.n_tokens != 1:
                return False
        for group in self.decode_groups:
            longest = max([tail.length for tail in group.tails]) + 1
            if longest > group.buffer.room:
                return False
            if width_class(longest, large_batch=large_batch) != group.buffer.width:
                return False
        return True

    def query_spans(self, rows: Sequence[Row], kind: type[F], n_packed: int) -> list[QuerySpan[F]]:
        """Return each span of KV with the slice of queries that attend to it.

        A tail outside a tail buffer is one more span.

        Args:
            rows: rows of the step.
            kind: the engine's fragment class.
            n_packed: rows beyond this number of packed tokens are left out.
        """
        spans: list[QuerySpan[F]] = []
        latest: dict[tuple[int, int], int] = {}
        growing = {id(kv_out) for _, kv_out in self.rows}
        for i in self.order:
            start, stop, first = self.starts[i], self.starts[i] + rows[i].n_tokens, 0
            if stop > n_packed:
                break
            is_buffered = start < self.n_decode_tokens
            for fragment, length in visible_spans(rows[i], is_buffered=is_buffered):
                if not length:
                    continue
                key = (id(fragment), length)
                at = latest.get(key)
                if at is not None and spans[at].stop == start:
                    spans[at] = spans[at]._replace(stop=stop)
                else:
                    latest[key] = len(spans)
                    kv, grows = own(fragment, kind), id(fragment) in growing
                    spans.append(QuerySpan(kv, length, first, start, stop, grows))
                first += length
        return spans


def visible_spans(row: Row, *, is_buffered: bool) -> list[Span]:
    """Return the spans that a row attends to, except a tail in a tail buffer."""
    tail = row.kv_out
    if tail is None or is_buffered:
        return list(row.prefix)
    return [*row.prefix, Span(tail, tail.length)]


def depth_first(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Return a sort key per row that puts rows below the same spans next to each other."""
    numbers: dict[tuple[int, int], int] = {}
    keys: dict[int, tuple[int, ...]] = {}
    for row in rows:
        if id(row.prefix) not in keys:
            keys[id(row.prefix)] = tuple(
                numbers.setdefault((id(span.fragment), span.length), len(numbers))
                for span in row.prefix
            )
    return [keys[id(row.prefix)] for row in rows]


def group_rows(
    rows: Sequence[Row],
    kv_outs: Sequence[F | None],
    memory: PaddedPool[F, Any],
    *,
    long_row: int | None = None,
) -> dict[tuple[str, int], list[int]]:
    """Return row numbers by group, depth first within a group.

    Args:
        rows: rows of the step.
        kv_outs: fragment that each row writes to, or None.
        memory: pool that holds the fragments.
        long_row: number of tokens from which on a row is packed separately; None for no limit.

    Returns:
        Row numbers by key: ("decode", width class of the tail), ("prefill", number of tokens
            rounded
        up to a power of two) or ("separate", 0).
    """
    pairs = list(zip(rows, kv_outs, strict=True))
    tails = [kv_out for row, kv_out in pairs if row.n_tokens == 1 and kv_out is not None]
    n_long = sum(not memory.is_buffered(tail, 0) for tail in tails)
    n_new = sum(not isinstance(tail.home, TailBuffer) for tail in tails)
    large_batch = memory.is_large_batch(n_new)
    groups: dict[tuple[str, int], list[int]] = {}
    for i, (row, kv_out) in enumerate(pairs):
        n = row.n_tokens
        if long_row is not None and n >= long_row:
            key = ("separate", 0)
        elif n == 1 and kv_out is not None and memory.is_buffered(kv_out, n_long):
            key = ("decode", width_class(kv_out.length + 1, large_batch=large_batch))
        else:
            key = ("prefill", 1 << (n - 1).bit_length())
        groups.setdefault(key, []).append(i)
    ranks = depth_first(rows)
    # Decode groups come first and separate rows last, in alphabetical order.
    return {key: sorted(groups[key], key=ranks.__getitem__) for key in sorted(groups)}
