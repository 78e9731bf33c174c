"""Routes of KV memory: its size and savings, by model, loom and node."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from ....errors import Conflict, Unsupported
from ....lm.lm import LM
from ....loom import Heddle
from ....loom.heddle import next_item
from ....loom.node import is_below, preorder
from ...api.models import KvList, KvObject, LoomKv, PinnedNode
from ...api.nodes import ForgetKv, KvRequest, NodeObject
from ..dependencies import CHECKS, ERRORS, LoomName, NodeName
from ..errors import RequestError
from ..open_loom import OpenLoom
from ..serializers import json_response, kv_sizes, kv_state, model_response, serialize_node
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["memory"], responses=ERRORS, dependencies=CHECKS)


@router.get("/kv", response_model=KvList)
async def read_kv(
    service: ServiceDep,
    looms: Annotated[bool, Query(description="Include the open looms.")] = False,
) -> Response:
    """Return the size of the models' KV, and the savings from sharing it."""
    loaded = [(model.name, model.lm) for model in service.models if model.lm is not None]
    data = [await asyncio.to_thread(kv_of, name, lm) for name, lm in loaded if not lm.closed]
    reply = KvList(data=data)
    if looms:
        reply.looms = []
        for live in service.looms.open_looms():
            async with live.lock:
                if service.looms.get_open(live.stored.id) is not live:  # closed in the meantime
                    continue
                reply.looms.append(await live.call(partial(loom_kv, service, live)))
    return model_response(reply)


def kv_of(name: str, lm: LM) -> KvObject:
    """Return the KV statistics of a model, with its name.

    `saved_s` estimates the time saved by sharing KV, from the average speed of its steps.
    """
    stats = lm.stats()
    ran = stats.prefilled + stats.decoded + stats.recomputed
    saved = stats.reused * stats.seconds / ran if ran and stats.seconds else None
    fields = {key: value for key, value in asdict(stats).items() if key in KvObject.model_fields}
    return KvObject(model=name, tokens_per_s=stats.tokens_per_s, saved_s=saved, **fields)


@router.get("/looms/{loom}/kv", response_model=LoomKv)
async def read_loom_kv(loom: LoomName, service: ServiceDep) -> Response:
    """Return how many of a loom's nodes have their KV in memory."""
    async with service.looms.open_locked(loom) as live:
        return model_response(await live.call(partial(loom_kv, service, live)), rev=live.stored.rev)


def loom_kv(service: Service, live: OpenLoom) -> LoomKv:
    """Return the number of nodes whose KV is in memory, and its size.

    The caller holds the loom's lock. Cost: O(nodes).
    """
    lm = None if live.lm is None or live.lm.closed else live.lm
    result = LoomKv(
        loom=live.stored.id,
        name=live.stored.name,
        title=live.stored.title,
        model=None if lm is None else service.models.name_of(lm),
        rev=live.stored.rev,
        hot=0,
        cold=0,
        hot_tokens=0,
        tokens=0,
        bytes=0,
    )
    slot = 0 if lm is None else lm.info.kv_bytes_per_token
    for node in preorder(live.stored.loom):
        sizes, n = kv_sizes(node), len(node.tokens)
        result.tokens += n
        is_hot = sizes is not None and kv_state(sizes, node.place.depth) == "hot"
        result.hot += is_hot
        result.cold += not is_hot
        if sizes is not None:
            # The node's own tokens are the last of its path, so they come after the tokens above.
            above = node.place.depth - n
            result.hot_tokens += max(sizes.device - above, 0)
            result.offloaded_tokens += min(max(sum(sizes) - above, 0), n, sizes.host)
        if lm is not None and node.id in live.pins:
            depth = node.place.depth
            result.pinned.append(
                PinnedNode(node=live.number(node), tokens=depth, bytes=depth * slot)
            )
    result.bytes = result.hot_tokens * slot
    return result


@router.post("/looms/{loom}/kv", response_model=LoomKv)
async def forget_kv(loom: LoomName, body: ForgetKv, service: ServiceDep) -> Response:
    """Evict the KV of a loom except for one path, pinned nodes and growing ones; tokens stay."""

    def forget(lm: LM) -> LoomKv:
        kept = set() if body.keep is None else {step.id for step in live.node(body.keep).path}
        for task in live.growing:
            kept |= {step.id for node in task.nodes for step in node.path}
        for node in reversed(list(preorder(live.stored.loom))):  # leaves first
            if node.id not in kept:
                lm.kv.trim(node, 0 if node.parent is None else node.parent.place.depth)
        return loom_kv(service, live)

    async with service.looms.open_locked(loom, grows=True) as live:
        assert live.lm is not None
        if live.lm.info.kv == "hidden":
            raise Unsupported(f"the {live.lm.info.name} engine does not expose its KV")
        with service.work("kv", service.models.name_of(live.lm)) as lm:
            result = await live.call(partial(forget, lm))
        return model_response(result, rev=live.stored.rev)


@router.post("/looms/{loom}/nodes/{node}/kv", response_model=NodeObject)
async def handle_kv(
    loom: LoomName, node: NodeName, body: KvRequest, service: ServiceDep
) -> Response:
    """Compute, pin, offload or evict the KV of a node: of its path, or of its own tokens."""
    async with service.looms.open_locked(loom, grows=True) as live:
        assert live.lm is not None
        tree_node = live.node(node)
        live.check_not_growing(tree_node)
        if live.lm.info.kv == "hidden":
            raise Unsupported(f"the {live.lm.info.name} engine does not expose its KV")
        with service.work("kv", service.models.name_of(live.lm)) as lm:
            if body.op == "warm":
                item = next_item(tree_node, 1)
                async with live.released_lock():
                    await lm.adrive(tickets := await lm.asubmit([item]))
                tickets[0].result()  # raises the error if it failed
            elif body.op == "pin":
                await _pin(live, lm, tree_node)
            elif body.op == "unpin":
                await live.call(lambda: live.pins.drop(tree_node.id))
            else:
                _check_not_pinned(live, tree_node)
                start = 0 if tree_node.parent is None else tree_node.parent.place.depth
                kv = lm.kv
                if body.op == "offload":
                    await live.call(lambda: kv.offload(tree_node, start=start))
                else:
                    await live.call(lambda: kv.trim(tree_node, start))
        data = await live.call(lambda: serialize_node(live, tree_node, fields=("kv",)))
        return json_response(data, rev=live.stored.rev)


async def _pin(live: OpenLoom, lm: LM, node: Heddle) -> None:
    """Pin a node. The loom's lock is released while the KV of its path is computed.

    Raises: KVFull; Conflict if the node was removed meanwhile.
    """
    if node.id in live.pins:
        return
    async with live.released_lock():
        pin = await lm.kv.apin(node)

    def add_pin() -> None:
        live.pins.take(node, pin)
        live.pins.follow(live.stored)

    await live.call(add_pin)
    if node.id not in live.pins:
        raise Conflict(
            "the node was removed while its KV was computed",
            rev=live.stored.rev,
            code="node_removed",
        )


def _check_not_pinned(live: OpenLoom, node: Heddle) -> None:
    """Raise RequestError if the node or a descendant is pinned."""
    for pinned in map(live.stored.node, live.pins):
        if is_below(pinned, node):
            number, target = live.number(pinned), live.number(node)
            reason = (
                "is pinned"
                if number == target
                else f"is on the way to node {number}, which is pinned"
            )
            raise RequestError(409, "kv_pinned", f"node {target} {reason}", hint="unpin it first")
