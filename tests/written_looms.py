"""Saved looms written by hand: trees without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.loom import Heddle, Loom

# A tree as nested lists: [name, child, child, …].
Tree = list[Any]


def node_record(index: int, parent: int | None, **more: Any) -> dict[str, Any]:
    return {
        "id": f"n{index}",
        "parent": parent,
        "text": f"t{index} ",
        "tokens": [index % 50, 7],
        "logprobs": [],
        "entropies": [],
        "params": None,
        "lineage": [],
        "finish_reason": None,
        "stop_string": None,
        "terminal": False,
        "score": None,
        "meta": {},
        **more,
    }


def file_of(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "format": "weft.loom",
        "version": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"name": "written", "fingerprint": "f", "n_vocab": 64},
        "prompt": {"user_prompt": "t0 ", "chat_template_used": False},
        "nodes": nodes,
        **more,
    }


def open_written(path: Path, parents: list[int | None], **more: Any) -> Loom:
    """Return a loom without a model: node i under node parents[i]."""
    nodes = [node_record(index, parent) for index, parent in enumerate(parents)]
    path.write_text(json.dumps(file_of(nodes, **more)), encoding="utf-8")
    return Loom.open(path)


class StubText:
    """Decodes every id to "<id>"."""

    def decode(self, ids: list[int], *, first: bool = False) -> str:
        return "".join(f"<{token}>" for token in ids)


class StubLM:
    """A model for edits of tokens, which need only a decoder."""

    text = StubText()


def with_stub(loom: Loom) -> Loom:
    """Let tokens be edited without a real model."""
    loom._binding.lm = StubLM()
    return loom


def by_id(loom: Loom) -> dict[str, Heddle]:
    return {node.id: node for node in loom.walk()}
