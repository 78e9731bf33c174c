"""Whole paths in few model calls, for engines that keep no KV of single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

Ids = tuple[int, ...]
Rows = dict[Ids, list[int]]  # paths, each with the numbers of those who ask for it


class FullSequence(NamedTuple):
    """Token ids that run, and the numbers of the rows that they answer."""

    ids: Ids
    rows: list[int]


def rows_of(paths: Iterable[Ids]) -> Rows:
    """Return equal paths as one, with the numbers of their rows."""
    rows: Rows = {}
    for number, ids in enumerate(paths):
        rows.setdefault(ids, []).append(number)
    return rows


def calls(
    rows: Mapping[Ids, list[int]], most: int, least: int | None = None
) -> Iterator[list[FullSequence]]:
    """Yield which whole paths each model call runs; what begins a longer one is answered by that.

    most: tokens of a call, padding included; a longer path is alone. least: paths of one length
    are apart from others where they have so many tokens together; None: never. Shorter ones first.
    """
    paths: list[FullSequence] = []
    for ids in sorted(rows, reverse=True):  # what begins a path follows it, or others it begins
        if paths and paths[-1].ids[: len(ids)] == ids:
            paths[-1].rows.extend(rows[ids])
        else:
            paths.append(FullSequence(ids, list(rows[ids])))
    paths.sort(key=lambda path: len(path.ids))
    n_of = Counter(len(path.ids) for path in paths)
    apart = {n for n, count in n_of.items() if least is not None and n * count >= least}
    rest = [path for path in paths if len(path.ids) not in apart]
    for group in [*([p for p in paths if len(p.ids) == n] for n in sorted(apart)), rest]:
        call: list[FullSequence] = []
        for path in group:
            if call and (len(call) + 1) * len(path.ids) > most:
                yield call
                call = []
            call.append(path)
        if call:
            yield call
