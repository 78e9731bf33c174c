"""Routes of nodes: pages, trees, paths, tokens, and model queries about them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from ....loom import Heddle
from ....loom.sibling_order import SiblingKey, sort_siblings
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
from ...interchange import messages_of
from ..dependencies import CHECKS, ERRORS, LoomName, NodeName
from ..errors import RequestError
from ..limits import check_limit
from ..open_loom import OpenLoom
from ..queries import measure_text, predict_next, read_node_tokens
from ..serializers import json_response, serialize_node, serialize_nodes, subtree_sizes
from ..service import ServiceDep

router = APIRouter(
    prefix="/api/v1/looms/{loom}", tags=["nodes"], responses=ERRORS, dependencies=CHECKS
)
Under = Annotated[str, Query(max_length=64, description="Number or id of the top node.")]
Depth = Annotated[int | None, Query(ge=0, description="Levels below the top node; null: all.")]
Sort = Annotated[
    SiblingKey | None,
    Query(
        description="Order of siblings: entropy lowest first, the others highest first; null: as"
        " they were added."
    ),
]
Field = Literal["tokens", "meta", "params", "kv"]
NodeFields = Annotated[
    list[Field] | None,
    Query(description=f"Additional fields: {', '.join(FIELDS)}; repeatable."),
]
AllNodeFields = Annotated[
    list[Field | Literal["made"]] | None,
    Query(description=f"Additional fields: {', '.join(FIELDS)}, `made`; repeatable."),
]


def subtree_nodes(
    live: OpenLoom,
    top: Heddle,
    depth: int | None,
    max_nodes: int | None = None,
    *,
    sort: str | None = None,
) -> list[Heddle]:
    """Return a node and its descendants, parents first.

    Args:
        depth: maximum level below `top`; None means all levels.
        max_nodes: maximum number of nodes; None means all.
        sort: the order of siblings, as for `sort_siblings`; None: as in the loom.
    """
    nodes: list[Heddle] = []
    stack = [(top, 0)]
    while stack and (max_nodes is None or len(nodes) < max_nodes):
        node, level = stack.pop()
        nodes.append(node)
        if depth is None or level < depth:
            children = live.children_of(node)
            if sort is not None:
                children = sort_siblings(children, sort)
            stack.extend((child, level + 1) for child in reversed(children))
    return nodes


@router.get("/nodes", response_model=NodePage)
async def list_nodes(
    loom: LoomName,
    service: ServiceDep,
    under: Under = "0",
    depth: Depth = None,
    fields: NodeFields = None,
    since: Annotated[
        int | None,
        Query(ge=0, lt=2**53, description="A revision: only nodes that changed after it."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of nodes.")] = 200,
    after: Annotated[
        str | None, Query(max_length=64, description="`next` of the last page.")
    ] = None,
    nodes: Annotated[
        list[int] | None,
        Query(
            max_length=200, description="Only nodes with these numbers; absent ones are skipped."
        ),
    ] = None,
    sort: Sort = None,
) -> Response:
    """List nodes in the order of the tree, parents first, page by page.

    With `since` the result has only changed nodes, and the numbers of removed ones. If the server
    no longer has that history, `whole` is true and the result has all nodes. Pass the same `since`
    for the next pages; for later changes, pass the `rev` of the first page.
    """
    has_changes_cursor = after is not None and after.endswith(_CHANGES)
    if has_changes_cursor and since is None:
        raise RequestError(
            400, "invalid_parameter", "after is from a page of changes: send the same since, too",
            param="since",
        )  # fmt: skip
    async with service.looms.open_locked(loom) as live:
        wants_changes = since is not None and (after is None or has_changes_cursor)
        changes = live.since(since) if since is not None and wants_changes else None
        if has_changes_cursor and changes is None:
            raise _page_gone_error("the changes since that revision are no longer known")
        page = await live.call(
            lambda: _node_page(
                live, live.node(under), depth, fields or [], changes, limit, after, nodes, sort
            )
        )
        return json_response(page, rev=live.stored.rev)


_CHANGES = "~"  # suffix of `next` on pages of changes


def _page_gone_error(why: str) -> RequestError:
    """Return the error for a page whose position in the tree no longer exists."""
    return RequestError(409, "page_gone", why, hint="start over without after")


def _node_page(
    live: OpenLoom,
    top: Heddle,
    depth: int | None,
    fields: list[Field],
    changes: tuple[set[str], list[int]] | None,
    limit: int,
    after: str | None,
    only_numbers: list[int] | None,
    sort: str | None,
) -> dict[str, Any]:
    """Return the fields of a NodePage.

    Args:
        live: the loom, whose lock the caller holds.
        top: top of the listed subtree.
        depth: maximum level below `top`; None: all.
        fields: optional fields of the nodes.
        changes: result of `OpenLoom.since`; None lists all nodes.
        limit: maximum number of nodes.
        after: `next` of the last page; None for the first page.
        only_numbers: only nodes with these numbers; None: all.
        sort: the order of siblings; None: as in the loom.
    """
    is_first = changes is None and after is None and only_numbers is None
    nodes = subtree_nodes(live, top, depth, limit + 1 if is_first else None, sort=sort)
    if after is not None:
        name = after.removesuffix(_CHANGES)
        matches = (name in (str(live.number(node)), node.id) for node in nodes)
        at = next((i for i, is_match in enumerate(matches) if is_match), None)
        if at is None:
            raise _page_gone_error("the last node of the previous page no longer exists")
        nodes = nodes[at + 1 :]
    removed: list[int] = []
    if changes is not None:
        changed, removed_since = changes
        removed = removed_since if after is None else []
        growing = {node.id for task in live.growing for node in task.nodes}
        nodes = [node for node in nodes if node.id in changed or node.id in growing]
    if only_numbers is not None:
        numbers = set(only_numbers)
        nodes = [node for node in nodes if live.number(node) in numbers]
    data = serialize_nodes(live, nodes[:limit], sizes=subtree_sizes(live), fields=fields)
    is_more = len(nodes) > limit
    suffix = "" if changes is None else _CHANGES
    return {
        "rev": live.stored.rev,
        "data": data,
        "removed": removed,
        "whole": changes is None,
        "next": f"{live.number(nodes[limit - 1])}{suffix}" if is_more else None,
    }


@router.get("/tree", response_model=LoomTree)
async def read_tree(
    loom: LoomName,
    service: ServiceDep,
    under: Under = "0",
    depth: Depth = None,
    fields: NodeFields = None,
    sort: Sort = None,
) -> Response:
    """Return the tree as nested objects; for trees of at most 2,000 nodes."""
    async with service.looms.open_locked(loom) as live:
        tree = await live.call(
            lambda: _nested_nodes(live, live.node(under), depth, fields or [], sort)
        )
        data = {"loom": live.stored.id, "rev": live.stored.rev, "tree": tree}
        return json_response(data, rev=live.stored.rev)


_MAX_NESTED, _MAX_LEVELS = 2000, 400


def _nested_nodes(
    live: OpenLoom, top: Heddle, depth: int | None, fields: list[Field], sort: str | None
) -> dict[str, Any]:
    """Return a node and its descendants as nested fields of TreeNode, without recursion."""
    nodes = subtree_nodes(live, top, depth, sort=sort)
    if len(nodes) > _MAX_NESTED:
        raise RequestError(
            400, "tree_too_large", f"{len(nodes)} nodes are too many for a nested tree",
            hint="read /nodes page by page, or reduce depth", param="depth",
        )  # fmt: skip
    by_id = {
        node.id: {**data, "nodes": []}
        for node, data in zip(
            nodes,
            serialize_nodes(live, nodes, sizes=subtree_sizes(live), fields=fields),
            strict=True,
        )
    }
    levels = {top.id: 0}
    for node in nodes[1:]:
        assert node.parent is not None
        levels[node.id] = levels[node.parent.id] + 1
        if levels[node.id] > _MAX_LEVELS:
            raise RequestError(
                400, "tree_too_deep", f"a nested tree has at most {_MAX_LEVELS} levels",
                hint="read /nodes page by page, or reduce depth", param="depth",
            )  # fmt: skip
        by_id[node.parent.id]["nodes"].append(by_id[node.id])
    return by_id[top.id]


@router.get("/nodes/{node}", response_model=NodeObject)
async def read_node(
    loom: LoomName, node: NodeName, service: ServiceDep, fields: AllNodeFields = None
) -> Response:
    """Return a node. A growing node has the tokens generated so far."""
    async with service.looms.open_locked(loom) as live:
        tree_node = live.node(node)
        data = await live.call(lambda: serialize_node(live, tree_node, fields=fields or []))
        return json_response(data, rev=live.stored.rev)


@router.get("/nodes/{node}/path", response_model=PathReply)
async def read_path(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    as_: Annotated[
        Literal["text", "tokens", "messages", "nodes"],
        Query(alias="as", description="The format of the path."),
    ] = "text",
    below_root: Annotated[bool, Query(description="Leave out the prompt.")] = False,
) -> Response:
    """Return the path to a node, the root first."""
    async with service.looms.open_locked(loom) as live:
        tree_node = live.node(node)
        return json_response(
            await live.call(lambda: _path_fields(live, tree_node, as_, below_root))
        )


def _path_fields(live: OpenLoom, node: Heddle, format: str, below_root: bool) -> dict[str, Any]:
    """Return the path to a node in a format: "text", "tokens", "messages" or "nodes"."""
    path, first = node.path, int(below_root)
    data: dict[str, Any] = {
        "node": live.number(node),
        "path": [live.number(step) for step in path],
        "n_tokens": sum(len(step.tokens) for step in path[first:]),
    }
    if format == "text":
        data["text"] = node.get_prefix_text(first)
    elif format == "tokens":
        data["token_ids"] = node.get_prefix_tokens(first)
    elif format == "nodes":
        data["nodes"] = serialize_nodes(live, path[first:])
    else:
        data["messages"] = messages_of(path)
    return data


@router.get("/nodes/{node}/tokens", response_model=TokenList)
async def read_tokens(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    top: Annotated[
        int, Query(ge=0, description="Alternatives per token; above 0 the model runs.")
    ] = 0,
    first: Annotated[int, Query(ge=0, description="Index of the first token.")] = 0,
    last: Annotated[
        int | None, Query(ge=0, description="Index after the last token; null: to the end.")
    ] = None,
    sampled: Annotated[
        bool, Query(description="With top: add probabilities under the node's sampling parameters.")
    ] = False,
) -> Response:
    """Return a node's tokens with the recorded statistics; with `top`, as computed by the model.

    The first token of a prompt has no logprob.
    """
    check_limit("top", top, service.config.limits.top)
    async with service.looms.open_locked(loom, grows=top > 0) as live:
        tree_node = live.node(node)
        return json_response(
            await read_node_tokens(service, live, tree_node, top, (first, last), sampled=sampled)
        )


@router.post("/nodes/{node}/next", response_model=NextReply)
async def read_next(
    loom: LoomName, node: NodeName, service: ServiceDep, body: NextTokens | None = None
) -> Response:
    """Return the likeliest next tokens and any requested candidates; nothing is sampled."""
    body = body or NextTokens()
    check_limit("top", body.top, service.config.limits.top)
    check_limit("candidates", len(body.candidates), service.config.limits.texts)
    async with service.looms.open_locked(loom, grows=True) as live:
        return json_response(await predict_next(service, live, live.node(node), body))


@router.post("/nodes/{node}/score", response_model=MeasureReply)
async def measure(
    loom: LoomName, node: NodeName, service: ServiceDep, body: MeasureText | None = None
) -> Response:
    """Score a text after a node, or the node's own text; nothing is added."""
    async with service.looms.open_locked(loom, grows=True) as live:
        return json_response(
            await measure_text(service, live, live.node(node), body or MeasureText())
        )
