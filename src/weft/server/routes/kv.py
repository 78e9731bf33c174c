"""Memory: what KV takes and saves, of models, looms and nodes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from fastapi import APIRouter, Response

from ...api.models import KvList, KvObject, LoomKv
from ...api.nodes import KvRequest, NodeObject
from ...errors import Unsupported
from ...lm import LM
from ...loom.node import preorder
from ..asked import ERRORS, LoomName, NodeName
from ..objects import answer, kv_state, node_told, sent
from ..service import Here

router = APIRouter(prefix="/api/v1", tags=["memory"], responses=ERRORS)


@router.get("/kv", response_model=KvList)
async def read_kv(service: Here) -> Response:
    """Say what the models' KV takes, and what sharing it has saved."""
    loaded = [(model.name, model.lm) for model in service.models if model.lm is not None]
    data = [await asyncio.to_thread(kv_of, name, lm) for name, lm in loaded if not lm.closed]
    return answer(KvList(data=data))


def kv_of(name: str, lm: LM) -> KvObject:
    """Return the figures of one model. saved_s is at the rate that its steps have had."""
    stats = lm.stats()
    ran = stats.prefilled + stats.decoded + stats.recomputed
    saved = stats.reused * stats.seconds / ran if ran and stats.seconds else None
    given = {key: value for key, value in asdict(stats).items() if key in KvObject.model_fields}
    return KvObject(model=name, tokens_per_s=stats.tokens_per_s, saved_s=saved, **given)


@router.get("/looms/{loom}/kv", response_model=LoomKv)
async def read_loom_kv(loom: LoomName, service: Here) -> Response:
    """Say how many of a loom's nodes have their KV."""

    def count() -> LoomKv:
        told = LoomKv(loom=live.kept.id, rev=live.kept.rev, hot=0, cold=0, hot_tokens=0, tokens=0)
        for node in preorder(live.kept.loom):
            is_hot, n = kv_state(node) == "hot", len(node.tokens)
            told.hot += is_hot
            told.cold += not is_hot
            told.hot_tokens += n * is_hot
            told.tokens += n
        return told

    async with service.looms.held(loom) as live:
        return answer(await live.call(count), rev=live.kept.rev)


@router.post("/looms/{loom}/nodes/{node}/kv", response_model=NodeObject)
async def handle_kv(loom: LoomName, node: NodeName, asked: KvRequest, service: Here) -> Response:
    """Compute the KV of a node's path now, or forget that of its own tokens."""
    async with service.looms.held(loom, grows=True) as live:
        assert live.lm is not None
        found = live.node(node)
        live.refuse_growing_end(found)
        if live.lm.info.kv == "hidden":
            raise Unsupported(f"the {live.lm.info.name} engine keeps its KV to itself")
        with service.work("kv", service.models.name_of(live.lm)) as lm:
            if asked.op == "warm":
                await found.anext(1)
            else:
                before = 0 if found.parent is None else found.parent.place.depth
                await live.call(lambda: lm.kv.trim(found, before))
        told = await live.call(lambda: node_told(live, found, fields=("kv",)))
        return sent(told, rev=live.kept.rev)
