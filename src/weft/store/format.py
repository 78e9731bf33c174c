"""The `.loom.json` format, version 1: plain records and their checks, no loom.

One JSON object. `nodes` is flat, parents before children, each with its parent's index, so that
depth costs neither writer nor reader anything. Tokens are the truth; text is there for readers
without a model. Numbers that JSON has no word for are the strings "inf", "-inf" and "nan".

    format "weft.loom" · version · created · model {name, fingerprint, n_vocab}
    prompt {user_prompt, chat_template_used} · adapter, where a loom has one
    nodes [{id, parent, text, tokens, logprobs, entropies, params, lineage, finish_reason,
            stop_string, terminal, score, meta}]
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, cast, get_args

from ..errors import FormatError
from ..files import field, number, shown, whole
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


def read_records(data: dict[str, Any], n_vocab: int) -> tuple[list[Record], list[str]]:
    """Return the nodes, checked: parents first, tokens in the vocabulary, ids unique.

    Also what had to be left out, in words: figures that are not one for each token. The tokens are
    the truth and stay.
    """
    nodes = field(data, "nodes", list, "the file")
    if not nodes:
        raise FormatError("the file has no nodes; a loom has at least its root")
    dropped: list[str] = []
    records = [_record(node, index, n_vocab, dropped) for index, node in enumerate(nodes)]
    if len({record.id for record in records}) < len(records):
        raise FormatError("two nodes have the same id; the file is broken")
    return records, dropped


def _record(node: object, index: int, n_vocab: int, dropped: list[str]) -> Record:
    where = f"node {index}"
    if not isinstance(node, dict):
        raise FormatError(f"{where} is {shown(node)}; an object belongs there")
    found = {name: field(node, name, kind, where) for name, kind in _NODE_FIELDS.items()}
    tokens = [whole(token, f"a token of {where}", 0, n_vocab) for token in found["tokens"]]
    figures = {}
    for name in ("logprobs", "entropies"):
        figures[name] = [number(value, f"{name} of {where}") for value in found[name]]
        if len(figures[name]) not in (0, len(tokens)):
            dropped.append(
                f"{where} has {len(tokens)} tokens and {len(figures[name])} {name}: these are"
                " left out"
            )
            figures[name] = []
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
        meta=_savable(found["meta"], where),
    )


def _savable(meta: dict[str, Any], where: str) -> dict[str, Any]:
    """Refuse what could be read, but not written again: numbers beyond floats, too deep a nest."""
    if meta:
        try:
            json.dumps(meta, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"meta of {where} cannot be kept: {error}") from error
    return meta


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
        raise FormatError(
            f"finish_reason of {where} is {shown(reason)}; allowed: {sorted(_REASONS)}"
        )
    return cast("FinishReason | None", reason)
