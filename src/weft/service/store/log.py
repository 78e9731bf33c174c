"""The log of a loom: what each operation added, removed and changed, so that all can be undone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..._core.atomic_files import PARSE_ERRORS
from ...errors import StoreError

DONE, UNDONE, DROPPED, FIRST = "done", "undone", "dropped", "first"
Columns = dict[str, Any]


class Operation(NamedTuple):
    """One change of a loom. state: "done", "undone" (redo does it again), "dropped" (undone, and
    something else was done since), "first" (the loom as it began, which is not undone). model: that
    grew what it added; None where nothing was grown, or nobody knows.
    """

    key: int
    kind: str
    actor: str
    at: float
    rev: int
    state: str
    n_added: int
    n_removed: int
    n_changed: int
    model: str | None


class Steps(NamedTuple):
    """What an operation did, by numbers of nodes. changed: columns before and after, by number.

    prompt: what the user asked first, before and after, where it was asked anew.
    """

    added: list[int]
    removed: list[int]
    changed: dict[int, tuple[Columns, Columns]]
    prompt: tuple[str, str] | None = None

    def dumped(self) -> str:
        """Return it as the log keeps it."""
        return json.dumps(
            {
                "added": runs(self.added),
                "removed": runs(self.removed),
                "changed": {
                    str(number): [_dumped(columns) for columns in both]
                    for number, both in self.changed.items()
                },
                **({} if self.prompt is None else {"prompt": self.prompt}),
            }
        )

    @classmethod
    def loaded(cls, data: str) -> Steps:
        """Read what `dumped` made."""
        try:
            found = json.loads(data)
            changed = {
                int(number): (_loaded(before), _loaded(after))
                for number, (before, after) in found["changed"].items()
            }
            before_after = found.get("prompt")
            prompt = None if before_after is None else (before_after[0], before_after[1])
            return cls(_numbers(found["added"]), _numbers(found["removed"]), changed, prompt)
        except PARSE_ERRORS as error:
            raise StoreError(f"the log of the loom is broken: {error}") from error


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers as runs, first and last of each: what is removed together stands together."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _numbers(given: list[list[int]]) -> list[int]:
    return [number for first, last in given for number in range(first, last + 1)]


def _dumped(columns: Mapping[str, Any]) -> Columns:
    return {
        name: {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in columns.items()
    }


def _loaded(columns: Mapping[str, Any]) -> Columns:
    return {
        name: base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for name, value in columns.items()
    }
