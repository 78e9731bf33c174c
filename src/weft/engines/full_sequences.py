"""Batches of full sequences, for engines that keep no KV of single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

Ids = tuple[int, ...]
Rows = dict[Ids, list[int]]  # row numbers by path


class FullSequence(NamedTuple):
    """One sequence of a batched model call.

    `ids`: token ids to run. `rows`: numbers of the rows whose tokens it computes.
    """

    ids: Ids
    rows: list[int]


def rows_of(paths: Iterable[Ids]) -> Rows:
    """Return the row numbers of each distinct path."""
    rows: Rows = {}
    for number, ids in enumerate(paths):
        rows.setdefault(ids, []).append(number)
    return rows


def calls(
    rows: Mapping[Ids, list[int]], max_tokens: int, min_tokens: int | None = None
) -> Iterator[list[FullSequence]]:
    """Yield the batch of sequences of each model call. A path that starts a longer one runs with
    it.

    Args:
        rows: row numbers by path.
        max_tokens: tokens of a call, padding included. A longer path runs alone.
        min_tokens: paths of one length get calls of their own if they have at least this many
            tokens together; None if they never do. Shorter paths come first.
    """
    paths: list[FullSequence] = []
    for ids in sorted(rows, reverse=True):  # a prefix follows all paths that it starts
        if paths and paths[-1].ids[: len(ids)] == ids:
            paths[-1].rows.extend(rows[ids])
        else:
            paths.append(FullSequence(ids, list(rows[ids])))
    paths.sort(key=lambda path: len(path.ids))
    n_of = Counter(len(path.ids) for path in paths)
    frequent = {n for n, count in n_of.items() if min_tokens and n * count >= min_tokens}
    rest = [path for path in paths if len(path.ids) not in frequent]
    for group in [*([p for p in paths if len(p.ids) == n] for n in sorted(frequent)), rest]:
        call: list[FullSequence] = []
        for path in group:
            if call and (len(call) + 1) * len(path.ids) > max_tokens:
                yield call
                call = []
            call.append(path)
        if call:
            yield call
