"""What is told of nodes, looms and models: the words of `store.wire`, and what a server adds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from pydantic import BaseModel

from ..._core.atomic_files import json_number
from ...lm.path_kv import KvSizes
from ...lm.path_kv import Path as KvPath
from ...loom import Heddle
from ...loom.node import preorder
from ..api.base import ErrorDetail
from ..api.looms import LoomObject
from ..api.models import ModelObject
from ..api.nodes import NodeObject
from ..store.wire import node_object
from .errors import serialize_error

if TYPE_CHECKING:
    from ..store.facts import LoomRow
    from .models import ModelRegistry, ServedModel
    from .open_loom import OpenLoom

Json = dict[str, Any]


def answer(reply: BaseModel, *, rev: int | None = None, status: int = 200) -> Response:
    """Return a reply as it is sent. rev: of the loom that it is of, as its ETag."""
    return sent(reply.model_dump(mode="json"), rev=rev, status=status)


def sent(content: Json, *, rev: int | None = None, status: int = 200) -> Response:
    """Return JSON as it is sent; texts with halves of letters are escaped, which JSON allows."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    headers = {} if rev is None else {"ETag": f'"{rev}"'}
    return Response(body, status, headers, "application/json")


def iso_timestamp(seconds: float | None) -> str:
    """Return a time as ISO 8601, in UTC; empty for none."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def serialize_node(
    live: OpenLoom,
    node: Heddle,
    *,
    n_below: int | None = None,
    marks: Mapping[int, str] | None = None,
    fields: Collection[str] = (),
) -> Json:
    """Return what is told of a node. n_below: where it was counted. Cost: O(nodes below) if not.

    marks: the loom's bookmarks, where they were looked up.
    """
    if marks is None:
        marks = live.kept.bookmarks()
    numbers = {node.id: live.number(node)}
    if node.parent is not None:
        numbers[node.parent.id] = live.number(node.parent)
    children = live.children_of(node)
    told: Json = {
        **node_object(node, numbers),
        "children": [live.number(child) for child in children],
        "n_below": count_below(live, node) if n_below is None else n_below,
        "stop_string": node.stop_string,
        "growing": live.is_growing(node),
        "bookmark": marks.get(numbers[node.id]),
        "params": node.params.to_dict() if "params" in fields and node.params else None,
        "meta": node.meta if "meta" in fields else None,
    }
    if "params" in fields and node.params and node.lineage:
        told["branch"] = node.lineage[0]
    if "tokens" in fields:
        told["token_ids"] = node.tokens
        told["logprobs"] = [json_number(value) for value in node.logprobs]
        told["entropies"] = [json_number(value) for value in node.entropies]
        told["legal_logmass"] = [json_number(value) for value in node.legal_logmass]
    if "kv" in fields:
        told["kv"] = serialize_kv(live, node)
    if "made" in fields and (made := live.kept.origin(node)) is not None:
        told["made"] = {
            "kind": made.kind,
            "actor": made.actor,
            "at": iso_timestamp(made.at),
            "rev": made.rev,
            "model": made.model,
        }
    return told


def serialize_nodes(
    live: OpenLoom,
    nodes: Iterable[Heddle],
    *,
    sizes: dict[str, int] | None = None,
    fields: Collection[str] = (),
) -> list[Json]:
    """Return what is told of nodes, in NodeObject's words. sizes: of what stands below, by id."""
    known, marks = sizes or {}, live.kept.bookmarks()
    return [
        serialize_node(live, node, n_below=known.get(node.id), marks=marks, fields=fields)
        for node in nodes
    ]


def to_node_object(live: OpenLoom, node: Heddle, **more: Any) -> NodeObject:
    """Return what is told of a node."""
    return NodeObject.model_validate(serialize_node(live, node, **more))


def count_below(live: OpenLoom, node: Heddle) -> int:
    """Return how many nodes stand below one, those that grow among them."""
    n = node.count_children() - 1
    for branches in live.growing:
        n += branches.count_below(node)
    return n


def subtree_sizes(live: OpenLoom) -> dict[str, int]:
    """Return how many nodes stand below each node, by id. Cost: O(nodes)."""
    order = list(preorder(live.kept.loom))
    sizes = dict.fromkeys((node.id for node in order), 0)
    for branches in live.growing:
        for child in branches.nodes:
            if child.parent is not None and child.parent.id in sizes:
                sizes[child.parent.id] += 1
    for node in reversed(order):
        if node.parent is not None:
            sizes[node.parent.id] += 1 + sizes[node.id]
    return sizes


def serialize_kv(live: OpenLoom, node: Heddle) -> Json | None:
    """Return what a node's path has of KV, in NodeKv's words; None: nobody knows."""
    sizes = kv_sizes(node)
    if sizes is None or node.lm is None:
        return None
    depth = node.place.depth
    n = max(sizes.device - (depth - len(node.tokens)), 0)
    return {
        "state": kv_state(sizes, depth),
        "bytes": n * node.lm.info.kv_bytes_per_token,
        "pinned": node.id in live.pins,
    }


def kv_state(sizes: KvSizes, depth: int) -> str:
    """Return where the KV of a path is: hot, host, partly, cold.

    The last token of what was drawn is run with what follows: a path without its KV is hot.
    """
    if not any(sizes):
        return "cold"
    if sizes.device and sizes.device >= depth - 1:
        return "hot"
    return "host" if sum(sizes) >= depth - 1 else "partly"


def kv_sizes(node: Heddle) -> KvSizes | None:
    """Return how many tokens of a node's path have their KV, and where; None: nobody knows."""
    lm = node.lm
    if lm is None or lm.closed or lm.info.kv == "hidden":
        return None
    place: KvPath = node
    return lm.kv.sizes(place)


def to_loom_entry(row: LoomRow, live: OpenLoom | None) -> LoomObject:
    """Return what a list says of a loom."""
    return LoomObject(
        id=row.id,
        name=row.name,
        model=row.model,
        engine=row.engine,
        prompt=row.prompt,
        n_nodes=row.n_nodes,
        created=row.created,
        changed=iso_timestamp(row.changed),
        rev=row.rev,
        growing=0 if live is None else sum(len(each.nodes) for each in live.growing),
    )


def to_loom_object(row: LoomRow, live: OpenLoom) -> LoomObject:
    """Return what is told of an open loom."""
    told = to_loom_entry(row, live)
    told.prompt = live.kept.loom.user_prompt
    told.chat_template_used = live.kept.loom.chat_template_used
    told.meta = dict(live.kept.loom.meta)
    told.bookmarks = {str(number): label for number, label in live.kept.bookmarks().items()}
    told.rev = live.kept.rev
    return told


def to_model_object(shelf: ModelRegistry, model: ServedModel) -> ModelObject:
    """Return what is told of a model."""
    told = ModelObject(
        id=model.name,
        source=model.source,
        state=model.state,
        is_default=shelf.default == model.name,
        created=iso_timestamp(model.created),
        bytes=model.n_bytes,
        users=model.n_users,
    )
    if model.state == "loading":
        phase, done, total = model.progress
        told.progress = {"phase": phase, "done": done, "total": total}
    if model.error is not None:
        told.error = ErrorDetail.model_validate(serialize_error(model.error)[1])
    if (lm := model.lm) is not None:
        told.engine, told.device, told.dtype = lm.info.name, lm.info.device, str(lm.info.dtype)
        told.n_ctx, told.n_vocab = lm.n_ctx, lm.info.n_vocab
        told.has_chat_template = lm.text.chat_template is not None
        told.tool_form = lm.text.tool_form
        told.adapters = list(lm.adapters)
        told.abilities = capabilities_of(lm)
        told.defaults, told.chat_defaults = lm.defaults.to_dict(), lm.chat_defaults.to_dict()
    return told


def capabilities_of(lm: Any) -> Json:
    """Return what a model's engine can do."""
    from dataclasses import asdict

    told: Json = {"kv": lm.info.kv, "overlap": lm.info.async_scheduling}
    return {**told, **asdict(lm.info.capabilities)}
