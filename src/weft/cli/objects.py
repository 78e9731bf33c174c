"""What --json writes: one object, the same names everywhere."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ..viz.escape import shows

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle, Loom


def write(value: dict[str, Any], file: TextIO | None = None) -> None:
    """Write one object on one line, to standard output if nothing else is said.

    On a terminal, what it would obey is written as JSON's own escapes: the object is the same.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    out = sys.stdout if file is None else file
    if out.isatty() and not text.isprintable():
        text = "".join(c if shows(c) else json.dumps(c)[1:-1] for c in text)
    # A lone surrogate is written as JSON's own escape.
    out.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    out.flush()


def branch_object(node: Heddle, numbers: dict[str, int] | None = None) -> dict[str, Any]:
    """Return one branch with its tokens; a branch without tokens has no mean."""
    told = {} if numbers is None else {"node": numbers[node.id], "id": node.id}
    return {
        "branch": node.lineage[0] + 1,
        **told,
        "text": node.text,
        "token_ids": node.tokens,
        "logprobs": [finite(value) for value in node.logprobs],
        "entropies": [finite(value) for value in node.entropies],
        "mean_logprob": finite(node.mean_logprob) if node.logprobs else None,
        "finish_reason": node.finish_reason,
        "stop_string": node.stop_string,
    }


def node_object(node: Heddle, numbers: dict[str, int]) -> dict[str, Any]:
    """Return one node without its tokens' figures."""
    return {
        "node": numbers[node.id],
        "id": node.id,
        "parent": None if node.parent is None else numbers[node.parent.id],
        "text": node.text,
        "n_tokens": len(node.tokens),
        "mean_p": node.mean_p if node.logprobs else None,
        "mean_logprob": finite(node.mean_logprob) if node.logprobs else None,
        "finish_reason": node.finish_reason,
        "ended": node.terminal,
        "score": None if node.score is None else finite(node.score),
        "said": node.meta.get("said"),
    }


def grown_object(
    lm: LM, loom: Loom, nodes: list[Heddle], numbers: dict[str, int] | None
) -> dict[str, Any]:
    """Return what a call grew: the loom, the settings, the branches, the LM's figures."""
    params = nodes[0].params if nodes else None
    return {
        "model": loom.meta.get("model", lm.info.model),
        "engine": lm.info.name,
        "prompt": loom.user_prompt,
        "chat_template_used": loom.chat_template_used,
        "prompt_tokens": len(loom.tokens),
        "params": params.to_dict() if params is not None else None,
        "branches": [branch_object(node, numbers) for node in nodes],
        "stats": stats_object(lm),
    }


def stats_object(lm: LM) -> dict[str, Any]:
    """Return the LM's figures."""
    from dataclasses import asdict

    return asdict(lm.stats())


def finite(value: float) -> float | str:
    """Return a number as JSON can hold it; the others by name, as in a saved loom."""
    return value if math.isfinite(value) else str(value)
