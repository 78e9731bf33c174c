"""A part of a loom as CSV: a row per node, or a row per token."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

from ...errors import ConfigError
from ...loom import Heddle
from ...viz.tokens import probability, rank_tokens
from .preference_pairs import Label, bookmark_of
from .selection import Selection

NODE_COLUMNS = (
    "node", "id", "parent", "height", "text", "n_tokens", "logprob", "mean_logprob", "mean_p",
    "mean_entropy", "finish_reason", "stop_string", "ended", "score", "bookmark", "seed", "branch",
)  # fmt: skip
TOKEN_COLUMNS = (
    "node", "id", "index", "position", "token_id", "token", "logprob", "p", "entropy", "rank",
)  # fmt: skip
_BATCH = 256  # nodes whose ranks are in memory at one time


def node_rows(part: Selection, *, bookmark: Label = bookmark_of) -> Iterator[str]:
    """Yield CSV lines: a header, then a row per node. Unknown values are empty.

    bookmark: returns a node's bookmark, or None.
    """
    return _csv(NODE_COLUMNS, _node_rows(part, bookmark))


def _node_rows(part: Selection, bookmark: Label) -> Iterator[list[Any]]:
    heights: dict[str, int] = {}
    shown = {node.id for node in _nodes(part)}
    for node in part.loom.walk():
        heights[node.id] = 0 if node.parent is None else heights[node.parent.id] + 1
        if node.id in shown:
            yield _node_row(part, node, heights[node.id], bookmark)


def _nodes(part: Selection) -> Iterator[Heddle]:
    """Yield the nodes of the path or of the subtree; for a tree, all nodes."""
    return part.top.walk()


def _node_row(part: Selection, node: Heddle, height: int, bookmark: Label) -> list[Any]:
    logprobs, entropies = node.logprobs, node.entropies
    return [
        part.numbers.get(node.id),
        node.id,
        None if node.parent is None else part.numbers.get(node.parent.id),
        height,
        node.text,
        len(node.tokens) or None,
        math.fsum(logprobs) if logprobs else None,
        node.mean_logprob if logprobs else None,
        node.mean_p if logprobs else None,
        math.fsum(entropies) / len(entropies) if entropies else None,
        node.finish_reason,
        node.stop_string,
        int(node.terminal),
        node.score,
        bookmark(node),
        None if node.params is None else node.params.seed,
        node.lineage[0] + 1 if node.lineage else None,
    ]


def token_rows(part: Selection, *, ranks: bool = False) -> Iterator[str]:
    """Yield CSV lines: a header, then a row per token.

    The column "position" is the token's index on its path, from the prompt's first token.

    ranks: also write the rank of each sampled token (0: the likeliest). The model computes it by
    one forward over each node's tokens.

    Raises: ConfigError for `ranks` without a model, and for a loom of texts.
    """
    if not any(node.tokens for node in _nodes(part)):
        raise ConfigError("this loom has texts without tokens; csv writes a row per node")
    return _csv(TOKEN_COLUMNS, _token_rows(part, ranks))


def _token_rows(part: Selection, ranks: bool) -> Iterator[list[Any]]:
    starts: dict[str, int] = {}
    waiting: list[Heddle] = []
    for node in part.loom.walk():
        above = node.parent
        starts[node.id] = 0 if above is None else starts[above.id] + len(above.tokens)
    for node in _nodes(part):
        waiting.append(node)
        if len(waiting) == _BATCH:
            yield from _rows_of(part, waiting, starts, ranks)
            waiting = []
    yield from _rows_of(part, waiting, starts, ranks)


def _rows_of(
    part: Selection, nodes: list[Heddle], starts: dict[str, int], ranks: bool
) -> Iterator[list[Any]]:
    by_node = rank_tokens(nodes, 1) if ranks else {}
    text = None if part.loom.lm is None else part.loom.lm.text
    for node in nodes:
        logprobs, entropies, ranked = node.logprobs, node.entropies, by_node.get(node.id)
        for index, token in enumerate(node.tokens):
            logprob = logprobs[index] if logprobs else None
            yield [
                part.numbers.get(node.id),
                node.id,
                index,
                starts[node.id] + index,
                token,
                None if text is None else text.token_text(token),
                logprob,
                None if logprob is None else probability(logprob),
                entropies[index] if entropies else None,
                None if ranked is None else ranked[index].rank,
            ]


def _csv(head: Iterable[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(row)
    yield buffer.getvalue()
