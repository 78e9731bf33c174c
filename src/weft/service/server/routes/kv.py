"""Memory: what KV takes and saves, of models, looms and nodes."""

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
from ..dependencies import ERRORS, LoomName, NodeName
from ..errors import RequestError
from ..open_loom import OpenLoom
from ..serializers import json_response, kv_sizes, kv_state, model_response, serialize_node
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["memory"], responses=ERRORS)


@router.get("/kv", response_model=KvList)
async def read_kv(
    service: ServiceDep,
    looms: Annotated[bool, Query(description="Tell of the looms that are open, too.")] = False,
) -> Response:
    """Say what the models' KV takes, and what sharing it has saved."""
    loaded = [(model.name, model.lm) for model in service.models if model.lm is not None]
    data = [await asyncio.to_thread(kv_of, name, lm) for name, lm in loaded if not lm.closed]
    told = KvList(data=data)
    if looms:
        told.looms = []
        for live in service.looms.open_ones():
            async with live.lock:
                if service.looms.open_one(live.kept.id) is not live:  # closed, while this waited
                    continue
                told.looms.append(await live.call(partial(loom_kv, service, live)))
    return model_response(told)


def kv_of(name: str, lm: LM) -> KvObject:
    """Return the figures of one model. saved_s is at the rate that its steps have had."""
    stats = lm.stats()
    ran = stats.prefilled + stats.decoded + stats.recomputed
    saved = stats.reused * stats.seconds / ran if ran and stats.seconds else None
    given = {key: value for key, value in asdict(stats).items() if key in KvObject.model_fields}
    return KvObject(model=name, tokens_per_s=stats.tokens_per_s, saved_s=saved, **given)


@router.get("/looms/{loom}/kv", response_model=LoomKv)
async def read_loom_kv(loom: LoomName, service: ServiceDep) -> Response:
    """Say how many of a loom's nodes have their KV."""
    async with service.looms.open_locked(loom) as live:
        return model_response(await live.call(partial(loom_kv, service, live)), rev=live.kept.rev)


def loom_kv(service: Service, live: OpenLoom) -> LoomKv:
    """Count the nodes whose KV is there. The caller holds the lock. Cost: O(nodes)."""
    lm = None if live.lm is None or live.lm.closed else live.lm
    told = LoomKv(
        loom=live.kept.id,
        name=live.kept.name,
        model=None if lm is None else service.models.name_of(lm),
        rev=live.kept.rev,
        hot=0,
        cold=0,
        hot_tokens=0,
        tokens=0,
        bytes=0,
    )
    slot = 0 if lm is None else lm.info.kv_bytes_per_token
    for node in preorder(live.kept.loom):
        sizes, n = kv_sizes(node), len(node.tokens)
        told.tokens += n
        is_hot = sizes is not None and kv_state(sizes, node.place.depth) == "hot"
        told.hot += is_hot
        told.cold += not is_hot
        if sizes is not None:
            # Of the path's tokens, its own are the last: what is there of them is beyond the rest.
            above = node.place.depth - n
            told.hot_tokens += max(sizes.device - above, 0)
            told.offloaded_tokens += min(max(sum(sizes) - above, 0), n, sizes.host)
        if lm is not None and node.id in live.pins:
            depth = node.place.depth
            told.pinned.append(PinnedNode(node=live.number(node), tokens=depth, bytes=depth * slot))
    told.bytes = told.hot_tokens * slot
    return told


@router.post("/looms/{loom}/kv", response_model=LoomKv)
async def forget_kv(loom: LoomName, asked: ForgetKv, service: ServiceDep) -> Response:
    """Forget the KV of a loom, but for one path, what is pinned and what grows; tokens stay."""

    def forget(lm: LM) -> LoomKv:
        kept = set() if asked.keep is None else {each.id for each in live.node(asked.keep).path}
        for branches in live.growing:
            kept |= {each.id for node in branches.nodes for each in node.path}
        for node in reversed(list(preorder(live.kept.loom))):  # leaves first
            if node.id not in kept:
                lm.kv.trim(node, 0 if node.parent is None else node.parent.place.depth)
        return loom_kv(service, live)

    async with service.looms.open_locked(loom, grows=True) as live:
        assert live.lm is not None
        if live.lm.info.kv == "hidden":
            raise Unsupported(f"the {live.lm.info.name} engine keeps its KV to itself")
        with service.work("kv", service.models.name_of(live.lm)) as lm:
            told = await live.call(partial(forget, lm))
        return model_response(told, rev=live.kept.rev)


@router.post("/looms/{loom}/nodes/{node}/kv", response_model=NodeObject)
async def handle_kv(
    loom: LoomName, node: NodeName, asked: KvRequest, service: ServiceDep
) -> Response:
    """Compute, pin, move or forget the KV of a node: of its path, or of its own tokens."""
    async with service.looms.open_locked(loom, grows=True) as live:
        assert live.lm is not None
        found = live.node(node)
        live.check_not_growing(found)
        if live.lm.info.kv == "hidden":
            raise Unsupported(f"the {live.lm.info.name} engine keeps its KV to itself")
        with service.work("kv", service.models.name_of(live.lm)) as lm:
            if asked.op == "warm":
                item = next_item(found, 1)
                async with live.released_lock():
                    await lm.adrive(tickets := await lm.asubmit([item]))
                tickets[0].result()  # it may have failed
            elif asked.op == "pin":
                await _pin(live, lm, found)
            elif asked.op == "unpin":
                await live.call(lambda: live.pins.drop(found.id))
            else:
                _check_not_pinned(live, found)
                before = 0 if found.parent is None else found.parent.place.depth
                kv = lm.kv
                if asked.op == "offload":
                    await live.call(lambda: kv.offload(found, start=before))
                else:
                    await live.call(lambda: kv.trim(found, before))
        told = await live.call(lambda: serialize_node(live, found, fields=("kv",)))
        return json_response(told, rev=live.kept.rev)


async def _pin(live: OpenLoom, lm: LM, node: Heddle) -> None:
    """Pin a node, which others may change while its path is computed. Raises: KVFull; Conflict."""
    if node.id in live.pins:
        return
    async with live.released_lock():
        pin = await lm.kv.apin(node)

    def note() -> None:
        live.pins.take(node, pin)
        live.pins.follow(live.kept)

    await live.call(note)
    if node.id not in live.pins:
        raise Conflict(
            "the node was removed while its path was computed",
            rev=live.kept.rev,
            code="node_removed",
        )


def _check_not_pinned(live: OpenLoom, node: Heddle) -> None:
    """Raise Refused for a node whose KV stays, as it is pinned, or one below it is."""
    for pinned in map(live.kept.node, live.pins):
        if is_below(pinned, node):
            number, of = live.number(pinned), live.number(node)
            which = (
                "is pinned" if number == of else f"is on the way to node {number}, which is pinned"
            )
            raise RequestError(409, "kv_pinned", f"node {of} {which}", hint="unpin it first")
