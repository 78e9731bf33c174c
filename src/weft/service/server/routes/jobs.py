"""Routes of jobs: list, follow, cancel and remove."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ...api.jobs import CancelJob, JobList, JobObject
from ..dependencies import CHECKS, ERRORS, EVENTS, JobName, LastEvent
from ..events import EventStream
from ..serializers import model_response
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["jobs"], responses=ERRORS, dependencies=CHECKS)


@router.get("/jobs", response_model=JobList)
async def list_jobs(service: ServiceDep) -> Response:
    """List running jobs and the last ended ones, newest first."""
    return model_response(JobList(data=[job.to_object() for job in service.jobs][::-1]))


@router.get("/jobs/{job}", response_model=JobObject)
async def read_job(job: JobName, service: ServiceDep) -> Response:
    """Return a job with its progress."""
    return model_response(service.jobs.get(job).to_object(full=True))


@router.delete("/jobs/{job}", response_model=JobList)
async def forget_job(job: JobName, service: ServiceDep) -> Response:
    """Remove an ended job from the list; its nodes stay."""
    service.jobs.forget(job)
    return await list_jobs(service)


@router.post("/jobs/{job}/cancel", response_model=JobObject)
async def cancel_job(job: JobName, service: ServiceDep, body: CancelJob | None = None) -> Response:
    """End a job, or some of its branches, at the next step; generated tokens are kept."""
    target = service.jobs.get(job)
    target.cancel(None if body is None else body.branches)
    return model_response(target.to_object())


@router.get("/jobs/{job}/events", response_class=Response, responses=EVENTS)
async def read_events(job: JobName, service: ServiceDep, after: LastEvent) -> EventStream:
    """Stream a job's events, from the first one or after the last event received."""
    events = service.jobs.get(job).events
    return EventStream(events.frames(after or 0))
