"""Growing nodes and searching below them, as jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from ....errors import NotFound
from ...api.jobs import JobList, JobReply, StartRun
from ...api.nodes import GrowFields, GrowNode, GrowNodes, NodeObject
from ..dependencies import ERRORS, Actor, LoomName, NodeName
from ..events import EventStream, until_gone
from ..jobs import ServerJob
from ..serializers import model_response, serialize_nodes
from ..service import Service, ServiceDep
from ..start_jobs import Pick, start_growth, start_run

router = APIRouter(prefix="/api/v1/looms/{loom}", tags=["growing"], responses=ERRORS)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": JobReply,
        "description": "With wait: the job when it has ended. With stream: its events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
Accept = Annotated[
    str | None,
    Header(description="text/event-stream is the same as `stream`.", max_length=500),
]


@router.post("/nodes/{node}/generate", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def grow_node(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    asked: GrowNode | None = None,
    accept: Accept = None,
) -> Response:
    """Grow branches of a node. Answers at once with the job; with `wait` or `stream` as it goes."""
    asked = asked or GrowNode()
    return await _grow(service, request, loom, asked, actor, accept, lambda live: [live.node(node)])


@router.post("/generate", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def grow_nodes(
    loom: LoomName,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    asked: GrowNodes | None = None,
    accept: Accept = None,
) -> Response:
    """Grow branches of many nodes in one batch; without `nodes` of all leaves."""
    asked = asked or GrowNodes()

    def pick(live: Any) -> list[Any]:
        if asked.nodes is None:
            leaves = live.kept.loom.leaves
            return [leaf for leaf in leaves if asked.force or not leaf.terminal]
        return [live.node(each) for each in asked.nodes]

    return await _grow(service, request, loom, asked, actor, accept, pick)


async def _grow(
    service: Service,
    request: Request,
    loom: str,
    asked: GrowFields,
    actor: str,
    accept: str | None,
    pick: Pick,
) -> Response:
    job, skipped = await start_growth(service, loom, asked, pick, actor)
    return await _answered(service, request, job, asked, accept, skipped)


@router.post("/runs", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def start_search(
    loom: LoomName,
    asked: StartRun,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    accept: Accept = None,
) -> Response:
    """Search for an answer below a node. Rounds are told as `score`, branches as of any growth."""
    job = await start_run(service, loom, asked, actor)
    return await _answered(service, request, job, asked, accept, [])


@router.get("/runs", response_model=JobList)
async def list_runs(
    loom: LoomName,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many.")] = 20,
) -> Response:
    """List a loom's searches with their rounds, those that run and the last ended; newest first."""
    row = await service.looms.row(loom)
    found = [job for job in service.jobs if job.kind == "run" and job.loom == row.id]
    return model_response(JobList(data=[job.to_object(full=True) for job in found[::-1][:limit]]))


async def _answered(
    service: Service,
    request: Request,
    job: ServerJob,
    asked: GrowFields | StartRun,
    accept: str | None,
    skipped: list[int],
) -> Response:
    """Answer with a job: at once, when it has ended, or with its events."""
    if asked.stream or (not asked.wait and (accept or "").startswith("text/event-stream")):
        is_bound = asked.on_disconnect == "cancel"
        on_end = job.cancel if is_bound else None
        return EventStream(job.events.frames(), on_end=on_end)
    if asked.wait:
        try:
            await until_gone(request, job.wait())
        finally:
            if asked.on_disconnect == "cancel":
                job.cancel()
    if asked.wait and job.error is not None:
        raise job.error
    told = job.to_object()
    reply = JobReply(
        job=job.id,
        status=job.status,
        loom=job.loom,
        seed=job.seed,
        branches=told.branches,
        skipped=skipped,
        usage=told.usage,
        result=told.result,
        error=told.error,
    )
    rev = None
    if asked.wait and job.loom is not None and job.status == "ok":
        async with service.looms.open_locked(job.loom) as live:
            rev = live.kept.rev
            nodes = []
            for branch in told.branches:
                try:
                    nodes.append(live.node(branch.id))
                except NotFound:  # it came to nothing, or was removed at once
                    continue
            told_nodes = serialize_nodes(live, nodes, fields=("tokens",))
            reply.nodes = [NodeObject.model_validate(each) for each in told_nodes]
    return model_response(reply, rev=rev, status=200 if asked.wait else 202)
