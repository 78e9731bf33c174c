"""Nodes: pages, trees, paths, tokens, and what is asked after them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from ....loom import Heddle
from ...api.looms import LoomTree
from ...api.nodes import (
    FIELDS,
    MeasureReply,
    MeasureText,
    NextReply,
    NextTokens,
    NodeObject,
    NodePage,
    PathReply,
    TokenList,
)
from ..dependencies import ERRORS, LoomName, NodeName
from ..errors import RequestError
from ..limits import check_limit
from ..open_loom import OpenLoom
from ..queries import measure_text, predict_next, read_node_tokens
from ..serializers import json_response, serialize_node, serialize_nodes, subtree_sizes
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1/looms/{loom}", tags=["nodes"], responses=ERRORS)
Under = Annotated[str, Query(max_length=64, description="A node's number or id: from there down.")]
Depth = Annotated[int | None, Query(ge=0, description="So many levels below it; null: all.")]
Field = Literal["tokens", "meta", "params", "kv"]
LogprobsRequest = Annotated[
    list[Field] | None,
    Query(description=f"What to tell besides: {', '.join(FIELDS)}; may be given again."),
]
WantedOfOne = Annotated[
    list[Field | Literal["made"]] | None,
    Query(description=f"What to tell besides: {', '.join(FIELDS)}, made; may be given again."),
]


def within(live: OpenLoom, top: Heddle, depth: int | None, most: int | None = None) -> list[Heddle]:
    """Return a node and those below it, parents first, so many levels down, so many at most."""
    found: list[Heddle] = []
    stack = [(top, 0)]
    while stack and (most is None or len(found) < most):
        node, level = stack.pop()
        found.append(node)
        if depth is None or level < depth:
            stack.extend((child, level + 1) for child in reversed(live.children_of(node)))
    return found


@router.get("/nodes", response_model=NodePage)
async def list_nodes(
    loom: LoomName,
    service: ServiceDep,
    under: Under = "0",
    depth: Depth = None,
    fields: LogprobsRequest = None,
    since: Annotated[
        int | None,
        Query(ge=0, lt=2**53, description="A revision: only what was changed after it."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many.")] = 200,
    after: Annotated[str | None, Query(max_length=64, description="`next` of a page.")] = None,
    nodes: Annotated[
        list[int] | None,
        Query(max_length=200, description="Numbers: only those of them that are there."),
    ] = None,
) -> Response:
    """List nodes in the order of the tree, parents first, a page at a time.

    With `since` only those are told that have changed, and which are gone; where the server does
    not know that any more `whole` is true and all are told. The next pages take the same `since`;
    what changes between two of them is changed since the `rev` of the first one.
    """
    is_of_changes = after is not None and after.endswith(_CHANGES)
    if is_of_changes and since is None:
        raise RequestError(
            400, "invalid_parameter", "after is of a page of what has changed: give its since, too",
            param="since",
        )  # fmt: skip
    async with service.looms.open_locked(loom) as live:
        is_asked = since is not None and (after is None or is_of_changes)
        found = live.since(since) if since is not None and is_asked else None
        if is_of_changes and found is None:
            raise _page_gone("nobody knows any more what has changed since")
        page = await live.call(
            lambda: _page(live, live.node(under), depth, fields or [], found, limit, after, nodes)
        )
        return json_response(page, rev=live.kept.rev)


_CHANGES = "~"  # ends the `next` of a page of what has changed


def _page_gone(why: str) -> RequestError:
    return RequestError(409, "page_gone", why, hint="begin anew, without after")


def _page(
    live: OpenLoom,
    top: Heddle,
    depth: int | None,
    fields: list[Field],
    found: tuple[set[str], list[int]] | None,
    limit: int,
    after: str | None,
    only: list[int] | None,
) -> dict[str, Any]:
    is_first = found is None and after is None and only is None
    nodes = within(live, top, depth, limit + 1 if is_first else None)
    if after is not None:
        name = after.removesuffix(_CHANGES)
        is_it = (name in (str(live.number(node)), node.id) for node in nodes)
        at = next((i for i, here in enumerate(is_it) if here), None)
        if at is None:
            raise _page_gone("the page before ended at a node that is not there any more")
        nodes = nodes[at + 1 :]
    removed: list[int] = []
    if found is not None:
        changed, gone = found
        removed = gone if after is None else []
        growing = {node.id for branches in live.growing for node in branches.nodes}
        nodes = [node for node in nodes if node.id in changed or node.id in growing]
    if only is not None:
        asked = set(only)
        nodes = [node for node in nodes if live.number(node) in asked]
    told = serialize_nodes(live, nodes[:limit], sizes=subtree_sizes(live), fields=fields)
    is_more = len(nodes) > limit
    mark = "" if found is None else _CHANGES
    return {
        "rev": live.kept.rev,
        "data": told,
        "removed": removed,
        "whole": found is None,
        "next": f"{live.number(nodes[limit - 1])}{mark}" if is_more else None,
    }


@router.get("/tree", response_model=LoomTree)
async def read_tree(
    loom: LoomName,
    service: ServiceDep,
    under: Under = "0",
    depth: Depth = None,
    fields: LogprobsRequest = None,
) -> Response:
    """Return the tree as nested objects, for small ones: 2,000 nodes at most."""
    async with service.looms.open_locked(loom) as live:
        tree = await live.call(lambda: _nested(live, live.node(under), depth, fields or []))
        told = {"loom": live.kept.id, "rev": live.kept.rev, "tree": tree}
        return json_response(told, rev=live.kept.rev)


_NESTED, _DEEP = 2000, 400


def _nested(live: OpenLoom, top: Heddle, depth: int | None, fields: list[Field]) -> dict[str, Any]:
    nodes = within(live, top, depth)
    if len(nodes) > _NESTED:
        raise RequestError(
            400, "tree_too_large", f"{len(nodes)} nodes are too many for a nested tree",
            hint="ask for /nodes, page by page, or for less depth", param="depth",
        )  # fmt: skip
    told = {
        node.id: {**each, "nodes": []}
        for node, each in zip(
            nodes,
            serialize_nodes(live, nodes, sizes=subtree_sizes(live), fields=fields),
            strict=True,
        )
    }
    levels = {top.id: 0}
    for node in nodes[1:]:
        assert node.parent is not None
        levels[node.id] = levels[node.parent.id] + 1
        if levels[node.id] > _DEEP:
            raise RequestError(
                400, "tree_too_deep", f"more than {_DEEP} levels are too many for a nested tree",
                hint="ask for /nodes, page by page, or for less depth", param="depth",
            )  # fmt: skip
        told[node.parent.id]["nodes"].append(told[node.id])
    return told[top.id]


@router.get("/nodes/{node}", response_model=NodeObject)
async def read_node(
    loom: LoomName, node: NodeName, service: ServiceDep, fields: WantedOfOne = None
) -> Response:
    """Say what a node is. A node that grows is told as far as it is."""
    async with service.looms.open_locked(loom) as live:
        found = live.node(node)
        told = await live.call(lambda: serialize_node(live, found, fields=fields or []))
        return json_response(told, rev=live.kept.rev)


@router.get("/nodes/{node}/path", response_model=PathReply)
async def read_path(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    as_: Annotated[
        Literal["text", "tokens", "messages", "nodes"],
        Query(alias="as", description="How it is told."),
    ] = "text",
    below_root: Annotated[bool, Query(description="Without the prompt.")] = False,
) -> Response:
    """Return what leads to a node, the root first."""
    async with service.looms.open_locked(loom) as live:
        found = live.node(node)
        return json_response(await live.call(lambda: _path(live, found, as_, below_root)))


def _path(live: OpenLoom, node: Heddle, how: str, below_root: bool) -> dict[str, Any]:
    path, first = node.path, int(below_root)
    told: dict[str, Any] = {
        "node": live.number(node),
        "path": [live.number(each) for each in path],
        "n_tokens": sum(len(each.tokens) for each in path[first:]),
    }
    if how == "text":
        told["text"] = node.get_prefix_text(first)
    elif how == "tokens":
        told["token_ids"] = node.get_prefix_tokens(first)
    elif how == "nodes":
        told["nodes"] = serialize_nodes(live, path[first:])
    else:
        told["messages"] = messages_of(path)
    return told


def messages_of(path: list[Heddle]) -> list[dict[str, str]]:
    """Return the chat that a path is, as far as its nodes say whose turn they are."""
    root = path[0]
    prompt = getattr(root, "user_prompt", "") or root.text
    messages = [{"role": "user", "content": prompt}]
    for node in path[1:]:
        said = node.meta.get("said")
        role, text = ("user", str(said)) if said is not None else ("assistant", node.text)
        if messages[-1]["role"] == role == "assistant":
            messages[-1]["content"] += text
        elif text:
            messages.append({"role": role, "content": text})
    return messages


@router.get("/nodes/{node}/tokens", response_model=TokenList)
async def read_tokens(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    top: Annotated[
        int, Query(ge=0, description="Alternatives of each token; from 1 on the model is asked.")
    ] = 0,
    first: Annotated[int, Query(ge=0, description="From this one on.")] = 0,
    last: Annotated[
        int | None, Query(ge=0, description="Up to this one, which is not told; null: to the end.")
    ] = None,
    sampled: Annotated[
        bool, Query(description="With top: the probabilities that the node was drawn with, too.")
    ] = False,
) -> Response:
    """Return a node's tokens with what was recorded of them; with `top` as the model sees them.

    Before the first token of a prompt stands nothing: the model says nothing of it.
    """
    check_limit("top", top, service.config.limits.top)
    async with service.looms.open_locked(loom, grows=top > 0) as live:
        found = live.node(node)
        return json_response(
            await read_node_tokens(service, live, found, top, (first, last), sampled=sampled)
        )


@router.post("/nodes/{node}/next", response_model=NextReply)
async def read_next(
    loom: LoomName, node: NodeName, service: ServiceDep, asked: NextTokens | None = None
) -> Response:
    """Return the likeliest next tokens, and any candidates; nothing is sampled."""
    asked = asked or NextTokens()
    check_limit("top", asked.top, service.config.limits.top)
    check_limit("candidates", len(asked.candidates), service.config.limits.texts)
    async with service.looms.open_locked(loom, grows=True) as live:
        return json_response(await predict_next(service, live, live.node(node), asked))


@router.post("/nodes/{node}/score", response_model=MeasureReply)
async def measure(
    loom: LoomName, node: NodeName, service: ServiceDep, asked: MeasureText | None = None
) -> Response:
    """Measure a text after a node, or without one the node's own; nothing is added."""
    async with service.looms.open_locked(loom, grows=True) as live:
        return json_response(
            await measure_text(service, live, live.node(node), asked or MeasureText())
        )
