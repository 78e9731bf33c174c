"""Whole paths in few model calls, for engines that keep no KV of single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class WholePath(NamedTuple):
    """Token ids that run, and the numbers of the rows that they answer."""

    ids: tuple[int, ...]
    rows: list[int]


def calls(tokens: Sequence[tuple[int, ...]], most: int) -> Iterator[list[WholePath]]:
    """Yield which paths each model call runs: rows that begin a longer one are answered by that.

    most: tokens of a call, padding included; a longer path is alone. Shorter paths come first.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, ids in enumerate(tokens):
        rows.setdefault(ids, []).append(number)
    paths: list[WholePath] = []
    for ids in sorted(rows, reverse=True):  # what begins a path follows it, or others it begins
        if paths and paths[-1].ids[: len(ids)] == ids:
            paths[-1].rows.extend(rows[ids])
        else:
            paths.append(WholePath(ids, rows[ids]))
    paths.sort(key=lambda path: len(path.ids))
    call: list[WholePath] = []
    for path in paths:
        if call and (len(call) + 1) * len(path.ids) > most:
            yield call
            call = []
        call.append(path)
    if call:
        yield call
