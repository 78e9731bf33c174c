"""Serialize nodes, looms and models for API responses: the fields of `store.wire` and more."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from pydantic import BaseModel

from ..._core.atomic_files import json_number
from ...lm.path_kv import KvSizes
from ...lm.path_kv import Path as KvPath
from ...loom import Heddle
from ...loom.grow import MODEL
from ...loom.node import preorder
from ...loom.sibling_order import rating_of
from ...search.strategies import default_for
from ..api.base import ErrorDetail
from ..api.looms import LoomObject
from ..api.models import ModelObject
from ..api.nodes import NodeObject
from ..interchange.import_tree import IMPORTED
from ..interchange.turns import ROLE
from ..store.json_output import node_object
from .errors import serialize_error

if TYPE_CHECKING:
    from ..store.summary import LoomSummary
    from .models import ModelRegistry, ServedModel
    from .open_loom import OpenLoom

Json = dict[str, Any]


def model_response(reply: BaseModel, *, rev: int | None = None, status: int = 200) -> Response:
    """Return a JSON response from a pydantic model.

    rev: the loom's revision, sent as the ETag; None without one.
    """
    return json_response(reply.model_dump(mode="json"), rev=rev, status=status)


def json_response(content: Json, *, rev: int | None = None, status: int = 200) -> Response:
    """Return a JSON response. Lone surrogates in texts are escaped, which JSON allows.

    rev: the loom's revision, sent as the ETag; None without one.
    """
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    headers = {} if rev is None else {"ETag": f'"{rev}"'}
    return Response(body, status, headers, "application/json")


def iso_timestamp(seconds: float | None) -> str:
    """Return a Unix time as ISO 8601 in UTC; "" for None."""
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
    """Return the fields of a NodeObject.

    Args:
        n_below: number of descendants. None counts them, which costs O(descendants).
        marks: the loom's bookmarks by node number. None reads them.
        fields: names of the optional fields to include.
    """
    if marks is None:
        marks = live.stored.bookmarks()
    numbers = {node.id: live.number(node)}
    if node.parent is not None:
        numbers[node.parent.id] = live.number(node.parent)
    children = live.children_of(node)
    data: Json = {
        **node_object(node, numbers),
        "children": [live.number(child) for child in children],
        "n_below": count_below(live, node) if n_below is None else n_below,
        "mean_entropy": mean_entropy(node),
        "rating": rating_of(node),
        "stop_string": node.stop_string,
        "error": node.meta.get("error") if node.finish_reason == "error" else None,
        "growing": live.is_growing(node),
        "author": author_of(node),
        "model": None if node.parent is None else node.meta.get(MODEL),
        "bookmark": marks.get(numbers[node.id]),
        "params": node.params.to_dict() if "params" in fields and node.params else None,
        "meta": node.meta if "meta" in fields else None,
    }
    if "params" in fields and node.params and node.lineage:
        data["branch"] = node.lineage[0]
    if "tokens" in fields:
        data["token_ids"] = node.tokens
        data["logprobs"] = [json_number(value) for value in node.logprobs]
        data["entropies"] = [json_number(value) for value in node.entropies]
        data["legal_logmass"] = [json_number(value) for value in node.legal_logmass]
    if "kv" in fields:
        data["kv"] = serialize_kv(live, node)
    if "made" in fields and (origin := live.stored.origin(node)) is not None:
        data["made"] = {
            "kind": origin.kind,
            "actor": origin.actor,
            "at": iso_timestamp(origin.at),
            "rev": origin.rev,
            "model": origin.model,
        }
    return data


def author_of(node: Heddle) -> str | None:
    """Return the name of an imported message's author, else the message's role; None without."""
    imported = node.meta.get(IMPORTED)
    name = imported.get("name") if isinstance(imported, dict) else None
    author = name or node.meta.get(ROLE)
    return author if isinstance(author, str) else None


def serialize_nodes(
    live: OpenLoom,
    nodes: Iterable[Heddle],
    *,
    sizes: dict[str, int] | None = None,
    fields: Collection[str] = (),
) -> list[Json]:
    """Return the fields of a NodeObject for each node.

    sizes: numbers of descendants by node id; None counts them. fields: optional fields to include.
    """
    known_sizes, marks = sizes or {}, live.stored.bookmarks()
    return [
        serialize_node(live, node, n_below=known_sizes.get(node.id), marks=marks, fields=fields)
        for node in nodes
    ]


def to_node_object(live: OpenLoom, node: Heddle, **more: Any) -> NodeObject:
    """Return a node as a NodeObject. more: arguments of `serialize_node`."""
    return NodeObject.model_validate(serialize_node(live, node, **more))


def mean_entropy(node: Heddle) -> float | str | None:
    """Return the mean entropy before a node's sampled tokens; None if there are none."""
    if not node.entropies:
        return None
    return json_number(math.fsum(node.entropies) / len(node.entropies))


def count_below(live: OpenLoom, node: Heddle) -> int:
    """Return the number of descendants of a node, including growing ones."""
    count = node.count_children() - 1
    for task in live.growing:
        count += task.count_below(node)
    return count


def subtree_sizes(live: OpenLoom) -> dict[str, int]:
    """Return the number of descendants of each node, by id. Cost: O(nodes)."""
    order = list(preorder(live.stored.loom))
    sizes = dict.fromkeys((node.id for node in order), 0)
    for task in live.growing:
        for child in task.nodes:
            if child.parent is not None and child.parent.id in sizes:
                sizes[child.parent.id] += 1
    for node in reversed(order):
        if node.parent is not None:
            sizes[node.parent.id] += 1 + sizes[node.id]
    return sizes


def serialize_kv(live: OpenLoom, node: Heddle) -> Json | None:
    """Return where the KV of a node's path is, as fields of a NodeKv.

    None if the loom is open without a model or the engine does not report it.
    """
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
    """Return where the KV of a path of `depth` tokens is: "hot", "host", "partly" or "cold".

    The KV of the last sampled token is computed with the token after it. A path is therefore also
    hot without the KV of its last token.
    """
    if not any(sizes):
        return "cold"
    if sizes.device and sizes.device >= depth - 1:
        return "hot"
    return "host" if sum(sizes) >= depth - 1 else "partly"


def kv_sizes(node: Heddle) -> KvSizes | None:
    """Return the number of tokens of a node's path whose KV is on the device and on the host.

    None if it is unknown.
    """
    lm = node.lm
    if lm is None or lm.closed or lm.info.kv == "hidden":
        return None
    place: KvPath = node
    return lm.kv.sizes(place)


def to_loom_entry(row: LoomSummary, live: OpenLoom | None) -> LoomObject:
    """Return a loom's summary for lists. live: the open loom; None if it is not open here."""
    return LoomObject(
        id=row.id,
        name=row.name,
        title=row.title,
        model=row.model,
        engine=row.engine,
        prompt=row.prompt,
        n_nodes=row.n_nodes,
        created=row.created,
        changed=iso_timestamp(row.changed),
        rev=row.rev,
        growing=0 if live is None else sum(len(task.nodes) for task in live.growing),
    )


def to_loom_object(row: LoomSummary, live: OpenLoom) -> LoomObject:
    """Return all fields of an open loom, including those that `to_loom_entry` omits.

    row: the loom's summary.
    """
    loom = to_loom_entry(row, live)
    loom.prompt = live.stored.loom.user_prompt
    loom.chat_template_used = live.stored.loom.chat_template_used
    loom.default_strategy = default_for(live.stored.loom.user_prompt)
    loom.meta = dict(live.stored.loom.meta)
    loom.bookmarks = {str(number): label for number, label in live.stored.bookmarks().items()}
    loom.rev = live.stored.rev
    return loom


def to_model_object(registry: ModelRegistry, model: ServedModel) -> ModelObject:
    """Return a model of the registry as a ModelObject, with its state and its engine's features."""
    result = ModelObject(
        id=model.name,
        source=model.source,
        state=model.state,
        is_default=registry.default == model.name,
        created=iso_timestamp(model.created),
        bytes=model.n_bytes,
        users=model.n_users,
    )
    if model.state == "loading":
        phase, done, total = model.progress
        result.progress = {"phase": phase, "done": done, "total": total}
    if model.error is not None:
        result.error = ErrorDetail.model_validate(serialize_error(model.error)[1])
    if (lm := model.lm) is not None:
        result.engine, result.device, result.dtype = (
            lm.info.name,
            lm.info.device,
            str(lm.info.dtype),
        )
        result.n_ctx, result.n_vocab = lm.n_ctx, lm.info.n_vocab
        result.has_chat_template = lm.text.chat_template is not None
        result.tool_form = lm.text.tool_form
        result.adapters = list(lm.adapters)
        result.abilities = capabilities_of(lm)
        result.defaults, result.chat_defaults = lm.defaults.to_dict(), lm.chat_defaults.to_dict()
    return result


def capabilities_of(lm: Any) -> Json:
    """Return the features of a model's engine, as fields of a ModelObject."""
    from dataclasses import asdict

    capabilities: Json = {"kv": lm.info.kv, "overlap": lm.info.async_scheduling}
    return {**capabilities, **asdict(lm.info.capabilities)}
