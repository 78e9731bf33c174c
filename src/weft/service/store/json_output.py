"""JSON output of nodes and results, for the command's --json and the server.

Saved files have another format (`file.py`), which is versioned and can be read again.
`numbers` maps node ids to node numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..._core.atomic_files import json_number

if TYPE_CHECKING:
    from ...lm.results import Distribution
    from ...lm.stats import Stats
    from ...loom import Heddle, Loom
    from ...search import AnswerGroup, SearchResult

Numbers = Mapping[str, int]
Json = dict[str, Any]


def stats_object(stats: Stats) -> Json:
    """Serialize statistics."""
    return asdict(stats)


def node_object(node: Heddle, numbers: Numbers) -> Json:
    """Serialize a node without its tokens and logprobs."""
    return {
        "node": numbers[node.id],
        "id": node.id,
        "parent": None if node.parent is None else numbers[node.parent.id],
        "text": node.text,
        "n_tokens": len(node.tokens),
        "mean_p": node.mean_p if node.logprobs else None,
        "mean_logprob": _mean_logprob(node),
        "finish_reason": node.finish_reason,
        "ended": node.terminal,
        "score": _score(node),
        "said": node.meta.get("said"),
    }


def branch_object(node: Heddle, numbers: Numbers | None = None) -> Json:
    """Serialize a generated branch with its tokens. numbers: None if the loom is not saved."""
    return {
        "branch": node.lineage[0] + 1,
        **({} if numbers is None else {"node": numbers[node.id], "id": node.id}),
        "text": node.text,
        "token_ids": node.tokens,
        "logprobs": [json_number(value) for value in node.logprobs],
        "entropies": [json_number(value) for value in node.entropies],
        "mean_logprob": _mean_logprob(node),
        "finish_reason": node.finish_reason,
        "stop_string": node.stop_string,
    }


def _mean_logprob(node: Heddle) -> float | str | None:
    """Return the mean logprob; None for a node without sampled tokens."""
    return json_number(node.mean_logprob) if node.logprobs else None


def growth_object(
    loom: Loom,
    branches: list[Heddle],
    name: str | None,
    numbers: Numbers | None,
    *,
    model: str,
    engine: str,
    stats: Stats,
) -> Json:
    """Serialize the branches that one call has generated.

    name, numbers: the loom's name and its node numbers; None if the loom is not saved.
    """
    params = branches[0].params if branches else None
    return {
        "loom": name,
        "model": model,
        "engine": engine,
        "prompt": loom.user_prompt,
        "chat_template_used": loom.chat_template_used,
        "prompt_tokens": len(loom.tokens),
        "params": params.to_dict() if params is not None else None,
        "branches": [branch_object(node, numbers) for node in branches],
        "stats": stats_object(stats),
    }


def tree_object(
    loom: Loom,
    name: str,
    model: str,
    at: Heddle,
    numbers: Numbers,
    *,
    sort: str | None = None,
) -> Json:
    """Serialize a loom with its nodes, parents first.

    at: the current node. sort: the order of siblings, as for `sort_siblings`; None: as in the loom.
    """
    return {
        "loom": name,
        "model": model,
        "prompt": loom.user_prompt,
        "chat_template_used": loom.chat_template_used,
        "at": numbers[at.id],
        "nodes": [node_object(node, numbers) for node in _walk(loom, sort)],
    }


def _walk(loom: Loom, sort: str | None) -> Iterator[Heddle]:
    if sort is None:
        yield from loom.walk()
        return
    from ...loom.sibling_order import sort_siblings

    stack: list[Heddle] = [loom]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(sort_siblings(node.children, sort)))


def path_object(node: Heddle, name: str, text: str, numbers: Numbers) -> Json:
    """Serialize the path from the root to a node.

    name: of the loom. text: the text of the path without the prompt.
    """
    return {
        "loom": name,
        "node": numbers[node.id],
        "id": node.id,
        "prompt": getattr(node.path[0], "user_prompt", ""),
        "text": text,
        "ended": node.terminal,
        "path": [node_object(each, numbers) for each in node.path],
    }


def next_object(
    node: Heddle, name: str, distribution: Distribution, numbers: Numbers, stats: Stats
) -> Json:
    """Serialize the likeliest next tokens at a node. distribution: the model's, for this node."""
    return {
        "loom": name,
        "node": numbers[node.id],
        "id": node.id,
        "next": [
            {
                "rank": each.rank,
                "id": each.id,
                "text": each.text,
                "bytes": list(each.bytes),
                "p": each.p,
                "logprob": json_number(each.logprob),
            }
            for each in distribution
        ],
        "stats": stats_object(stats),
    }


def search_object(
    strategy: str,
    result: SearchResult,
    answer: str,
    name: str | None,
    *,
    model: str,
    engine: str,
    stats: Stats,
) -> Json:
    """Serialize the result of a search.

    strategy: its name. answer: the best answer.
    name: of the loom; None if it is not saved.
    """
    return {
        "loom": name,
        "strategy": strategy,
        "model": model,
        "engine": engine,
        "prompt": result.loom.user_prompt,
        "solved": result.solved,
        "answer": answer,
        "text": result.text,
        "path": scored_path(result.best),
        "votes": vote_objects((vote.answer, vote.count) for vote in result.votes),
        "measure": result.measure,
        "reason": result.reason,
        "answers": [_answer_object(group) for group in result.answers],
        "nodes": result.loom.count_children(),
        "cost": asdict(result.cost),
        "stats": stats_object(stats),
    }


def _answer_object(group: AnswerGroup) -> Json:
    """Serialize equal answers; an answer without a JSON form becomes its text."""
    answer = group.answer
    return {
        "answer": answer if isinstance(answer, str | int | float | None) else str(answer),
        "count": group.count,
        "share": group.share,
        "score": None if group.score is None else json_number(group.score),
        "mean_logprob": group.mean_logprob,
        "solved": group.solved,
    }


def scored_path(node: Heddle) -> list[Json]:
    """Serialize the nodes of a path below the root, with their scores."""
    return [{"text": each.text, "score": _score(each)} for each in node.path[1:]]


def _score(node: Heddle) -> float | str | None:
    """Return the node's score as JSON can represent it."""
    return None if node.score is None else json_number(node.score)


def vote_objects(votes: Iterable[tuple[object, int]]) -> list[Json]:
    """Serialize the answers of a search with the number of votes for each."""
    return [{"answer": answer, "count": count} for answer, count in votes]
