"""Routes that grow nodes and search below them, as jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from ....errors import NotFound
from ...api.jobs import JobList, JobReply, StartRun
from ...api.nodes import GrowFields, GrowNode, GrowNodes, NodeObject
from ..dependencies import CHECKS, ERRORS, Actor, LoomName, NodeName
from ..events import EventStream, run_until_disconnect
from ..jobs import ServerJob
from ..serializers import model_response, serialize_nodes
from ..service import Service, ServiceDep
from ..start_jobs import Pick, start_growth, start_run

router = APIRouter(
    prefix="/api/v1/looms/{loom}", tags=["growing"], responses=ERRORS, dependencies=CHECKS
)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": JobReply,
        "description": "With `wait`: the ended job. With `stream`: its events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
Accept = Annotated[
    str | None,
    Header(description="text/event-stream has the same effect as `stream`.", max_length=500),
]


@router.post("/nodes/{node}/generate", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def grow_node(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    body: GrowNode | None = None,
    accept: Accept = None,
) -> Response:
    """Grow branches of a node. Returns the started job; `wait` and `stream` return the outcome."""
    body = body or GrowNode()
    return await _grow(service, request, loom, body, actor, accept, lambda live: [live.node(node)])


@router.post("/generate", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def grow_nodes(
    loom: LoomName,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    body: GrowNodes | None = None,
    accept: Accept = None,
) -> Response:
    """Grow branches of several nodes in one batch; by default of all leaves."""
    body = body or GrowNodes()

    def pick(live: Any) -> list[Any]:
        if body.nodes is None:
            leaves = live.stored.loom.leaves
            return [leaf for leaf in leaves if body.force or not leaf.terminal]
        return [live.node(name) for name in body.nodes]

    return await _grow(service, request, loom, body, actor, accept, pick)


async def _grow(
    service: Service,
    request: Request,
    loom: str,
    body: GrowFields,
    actor: str,
    accept: str | None,
    pick: Pick,
) -> Response:
    """Start a growth of the nodes that `pick` returns, and return the response."""
    job, skipped = await start_growth(service, loom, body, pick, actor)
    return await _job_response(service, request, job, body, accept, skipped)


@router.post("/runs", status_code=202, response_model=JobReply, responses=_ANSWERS)
async def start_search(
    loom: LoomName,
    body: StartRun,
    service: ServiceDep,
    request: Request,
    actor: Actor,
    accept: Accept = None,
) -> Response:
    """Search for an answer below a node. Its events include a `score` event per round."""
    job = await start_run(service, loom, body, actor)
    return await _job_response(service, request, job, body, accept, [])


@router.get("/runs", response_model=JobList)
async def list_runs(
    loom: LoomName,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of searches.")] = 20,
) -> Response:
    """List a loom's running and recent searches with their rounds, newest first."""
    row = await service.looms.row(loom)
    runs = [job for job in service.jobs if job.kind == "run" and job.loom == row.id]
    return model_response(JobList(data=[job.to_object(full=True) for job in runs[::-1][:limit]]))


async def _job_response(
    service: Service,
    request: Request,
    job: ServerJob,
    body: GrowFields | StartRun,
    accept: str | None,
    skipped: list[int],
) -> Response:
    """Return the response for a started job.

    It is the job, or with `wait` the ended job, or with `stream` the job's event stream.
    accept: the request's Accept header. skipped: numbers of nodes that are not grown.
    """
    if body.stream or (not body.wait and (accept or "").startswith("text/event-stream")):
        cancels = body.on_disconnect == "cancel"
        on_end = job.cancel if cancels else None
        return EventStream(job.events.frames(), on_end=on_end)
    if body.wait:
        try:
            await run_until_disconnect(request, job.wait())
        finally:
            if body.on_disconnect == "cancel":
                job.cancel()
    if body.wait and job.error is not None:
        raise job.error
    result = job.to_object()
    reply = JobReply(
        job=job.id,
        status=job.status,
        loom=job.loom,
        seed=job.seed,
        branches=result.branches,
        skipped=skipped,
        usage=result.usage,
        result=result.result,
        error=result.error,
    )
    rev = None
    if body.wait and job.loom is not None and job.status == "ok":
        async with service.looms.open_locked(job.loom) as live:
            rev = live.stored.rev
            nodes = []
            for branch in result.branches:
                try:
                    nodes.append(live.node(branch.id))
                except NotFound:  # it has no tokens, or was removed at once
                    continue
            node_data = serialize_nodes(live, nodes, fields=("tokens",))
            reply.nodes = [NodeObject.model_validate(data) for data in node_data]
    return model_response(reply, rev=rev, status=200 if body.wait else 202)
