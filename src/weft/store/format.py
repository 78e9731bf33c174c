"""The `.loom.json` format, version 1: plain records and their checks, no loom.

One JSON object. `nodes` is flat, parents before children, each with its parent's index, so that
depth costs neither writer nor reader anything. Tokens are the truth; text is there for readers
without a model. Numbers that JSON has no word for are the strings "inf", "-inf" and "nan".

    format "weft.loom" · version · created · model {name, fingerprint, n_vocab}
    prompt {user_prompt, chat_template_used}
    nodes [{id, parent, text, tokens, logprobs, entropies, params, lineage, finish_reason,
            stop_string, terminal, score, meta}]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast, get_args

from ..errors import FormatError
from ..sched.work import FinishReason

FORMAT = "weft.loom"
VERSION = 1

_REASONS = frozenset(get_args(FinishReason))
_NODE_FIELDS = {
    "id": str,
    "text": str,
    "tokens": list,
    "logprobs": list,
    "entropies": list,
    "lineage": list,
    "terminal": bool,
    "meta": dict,
}


class ModelMark(NamedTuple):
    """Which model a loom's tokens belong to."""

    name: str
    fingerprint: str
    n_vocab: int


# Of a loom of texts, which no model wrote: its nodes have no tokens.
NO_MODEL = ModelMark("no model", "", 1)


class Record(NamedTuple):
    """One node of a file, checked. `parent` is the index of its parent; -1 for the root."""

    id: str
    parent: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    params: dict[str, Any] | None
    lineage: list[int]
    finish_reason: FinishReason | None
    stop_string: str | None
    terminal: bool
    score: float | None
    meta: dict[str, Any]


def to_json_number(value: float) -> float | str:
    """Return the number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def number(value: object, where: str) -> float:
    """Return what `to_json_number` wrote."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"{where} is {value!r}; a number belongs there")
    return float(value)


def whole(value: object, where: str, low: int, high: int) -> int:
    """Return a whole number from `low` to below `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise FormatError(
            f"{where} is {value!r}; a whole number from {low} to {high - 1} belongs there"
        )
    return value


def field(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return a field that must be there and of this kind."""
    if name not in record:
        raise FormatError(f"{where} has no {name!r}; the file is broken")
    value = record[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{name!r} of {where} is {value!r:.60}; a {kind.__name__} belongs there")
    return value


def read_header(data: object) -> ModelMark:
    """Check that this is a loom that this version reads; return whose tokens it holds."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f'this is no saved loom: "format" is not "{FORMAT}"')
    version = field(data, "version", int, "the file")
    if version > VERSION:
        raise FormatError(
            f"the file has format version {version}; this Weft reads up to {VERSION}. Update Weft",
            hint="Update Weft.",
        )
    if version < 1:
        raise FormatError(f"the file has format version {version}; the first one is 1")
    model = field(data, "model", dict, "the file")
    return ModelMark(
        field(model, "name", str, "model"),
        field(model, "fingerprint", str, "model"),
        whole(model.get("n_vocab"), "n_vocab of model", 1, 2**31),
    )


def read_records(data: dict[str, Any], n_vocab: int) -> list[Record]:
    """Return the nodes, checked: parents first, tokens in the vocabulary, ids unique."""
    nodes = field(data, "nodes", list, "the file")
    if not nodes:
        raise FormatError("the file has no nodes; a loom has at least its root")
    records = [_record(node, index, n_vocab) for index, node in enumerate(nodes)]
    if len({record.id for record in records}) < len(records):
        raise FormatError("two nodes have the same id; the file is broken")
    return records


def _record(node: object, index: int, n_vocab: int) -> Record:
    where = f"node {index}"
    if not isinstance(node, dict):
        raise FormatError(f"{where} is {node!r:.60}; an object belongs there")
    found = {name: field(node, name, kind, where) for name, kind in _NODE_FIELDS.items()}
    tokens = [whole(token, f"a token of {where}", 0, n_vocab) for token in found["tokens"]]
    figures = {
        name: [number(value, f"{name} of {where}") for value in found[name]]
        for name in ("logprobs", "entropies")
    }
    if any(len(values) not in (0, len(tokens)) for values in figures.values()):
        raise FormatError(f"{where} has {len(tokens)} tokens and another count of figures for them")
    score = node.get("score")
    return Record(
        id=found["id"],
        parent=_parent(node, index),
        text=found["text"],
        tokens=tokens,
        logprobs=figures["logprobs"],
        entropies=figures["entropies"],
        params=_optional(node, "params", dict, where),
        lineage=[whole(part, f"lineage of {where}", 0, 2**63) for part in found["lineage"]],
        finish_reason=_reason(node, where),
        stop_string=_optional(node, "stop_string", str, where),
        terminal=found["terminal"],
        score=None if score is None else number(score, f"score of {where}"),
        meta=found["meta"],
    )


def _parent(node: dict[str, Any], index: int) -> int:
    if index == 0:
        if node.get("parent") is not None:
            raise FormatError("node 0 is the root; its parent must be null")
        return -1
    return whole(node.get("parent"), f"parent of node {index}", 0, index)


def _optional(node: dict[str, Any], name: str, kind: type, where: str) -> Any:
    return None if node.get(name) is None else field(node, name, kind, where)


def _reason(node: dict[str, Any], where: str) -> FinishReason | None:
    reason = _optional(node, "finish_reason", str, where)
    if reason is not None and reason not in _REASONS:
        raise FormatError(f"finish_reason of {where} is {reason!r}; allowed: {sorted(_REASONS)}")
    return cast("FinishReason | None", reason)
