"""Writing a loom, atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from .. import files
from ..errors import ConfigError
from ..loom import Heddle, Loom
from .format import FORMAT, VERSION, ModelMark, to_json_number


def save(loom: Loom, path: str | os.PathLike[str]) -> None:
    """Write `loom` to `path`: afterwards the file is the old one or the new one, whole."""
    files.write(path, _chunks(loom))


def _chunks(loom: Loom) -> Iterator[str]:
    """Yield the file: one line a node, keys always in the same order."""
    mark = _mark(loom)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "created": loom.created,
        "model": mark._asdict(),
        "prompt": {
            "user_prompt": loom.user_prompt,
            "chat_template_used": loom.chat_template_used,
        },
        **({} if loom.adapter is None else {"adapter": loom.adapter}),
    }
    yield json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "nodes": [\n'
    stack: list[tuple[Heddle, int | None]] = [(loom, None)]
    index = 0
    while stack:
        node, parent = stack.pop()
        yield (",\n  " if index else "  ") + _dump(_record(node, parent), node)
        stack.extend((child, index) for child in reversed(node.children))
        index += 1
    yield "\n ]\n}\n"


def _mark(loom: Loom) -> ModelMark:
    if loom.lm is None:
        return loom.saved_by
    info = loom.lm.info
    return ModelMark(info.model, info.fingerprint, info.n_vocab)


def _record(node: Heddle, parent: int | None) -> dict[str, Any]:
    return {
        "id": node.id,
        "parent": parent,
        "text": node.text,
        "tokens": node.tokens,
        "logprobs": [to_json_number(value) for value in node.logprobs],
        "entropies": [to_json_number(value) for value in node.entropies],
        "params": None if node.params is None else node.params.to_dict(),
        "lineage": list(node.lineage),
        "finish_reason": node.finish_reason,
        "stop_string": node.stop_string,
        "terminal": node.terminal,
        "score": None if node.score is None else to_json_number(float(node.score)),
        "meta": node.meta,
    }


def _dump(record: dict[str, Any], node: Heddle) -> str:
    try:
        if json.loads(json.dumps(node.meta)) != node.meta:
            raise TypeError("a tuple or a key that is no text would come back as something else")
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the meta of node {node.id} cannot be saved as JSON: {error}. Allowed are dicts with "
            "text keys, lists, texts, finite numbers, True, False and None"
        ) from error
