"""The log of a loom: what each operation added, removed and changed. Undo needs it."""

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
    """One operation on a loom, as `StoredLoom.history` returns it."""

    key: int
    kind: str  # in one word: "grow", "edit", "remove"
    actor: str  # who did it, for display
    at: float  # seconds since 1970
    rev: int  # the loom's revision after the operation
    # "done", "undone" (can be redone), "dropped" (undone, and no longer redoable), or "first" (the
    # creation of the loom, which cannot be undone).
    state: str
    n_added: int
    n_removed: int
    n_changed: int
    model: str | None  # that generated the added nodes; None for other operations


class Steps(NamedTuple):
    """The nodes that an operation has added, removed and changed, by number."""

    added: list[int]
    removed: list[int]
    changed: dict[int, tuple[Columns, Columns]]  # columns before and after
    prompt: tuple[str, str] | None = None  # the user prompt before and after, if it changed

    def to_json(self) -> str:
        """Serialize the steps for the log."""
        return json.dumps(
            {
                "added": runs(self.added),
                "removed": runs(self.removed),
                "changed": {
                    str(number): [_encode_bytes(columns) for columns in both]
                    for number, both in self.changed.items()
                },
                **({} if self.prompt is None else {"prompt": self.prompt}),
            }
        )

    @classmethod
    def from_json(cls, data: str) -> Steps:
        """Parse steps from the log. Raises: StoreError for invalid data."""
        try:
            steps = json.loads(data)
            changed = {
                int(number): (_decode_bytes(before), _decode_bytes(after))
                for number, (before, after) in steps["changed"].items()
            }
            before_after = steps.get("prompt")
            prompt = None if before_after is None else (before_after[0], before_after[1])
            return cls(_numbers(steps["added"]), _numbers(steps["removed"]), changed, prompt)
        except PARSE_ERRORS as error:
            raise StoreError(f"the log of the loom is broken: {error}") from error


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Compress numbers to runs [first, last]. Nodes removed together often have adjacent ones."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _numbers(ranges: list[list[int]]) -> list[int]:
    """Expand runs [first, last] to numbers; the inverse of `runs`."""
    return [number for first, last in ranges for number in range(first, last + 1)]


def _encode_bytes(columns: Mapping[str, Any]) -> Columns:
    """Convert bytes in columns to text, for JSON."""
    return {
        name: {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in columns.items()
    }


def _decode_bytes(columns: Mapping[str, Any]) -> Columns:
    """Undo `_encode_bytes`."""
    return {
        name: base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for name, value in columns.items()
    }
