"""Jobs: what runs, how it goes, and ending it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ...api.jobs import CancelJob, JobList, JobObject
from ..dependencies import ERRORS, EVENTS, JobName, LastEvent
from ..events import EventStream
from ..serializers import model_response
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["jobs"], responses=ERRORS)


@router.get("/jobs", response_model=JobList)
async def list_jobs(service: ServiceDep) -> Response:
    """List the jobs that run, and the last ones that have ended; the newest first."""
    return model_response(JobList(data=[job.to_object() for job in service.jobs][::-1]))


@router.get("/jobs/{job}", response_model=JobObject)
async def read_job(job: JobName, service: ServiceDep) -> Response:
    """Say how far a job is."""
    return model_response(service.jobs.get(job).to_object(full=True))


@router.delete("/jobs/{job}", response_model=JobList)
async def forget_job(job: JobName, service: ServiceDep) -> Response:
    """Forget a job that has ended; what it made stays."""
    service.jobs.forget(job)
    return await list_jobs(service)


@router.post("/jobs/{job}/cancel", response_model=JobObject)
async def cancel_job(job: JobName, service: ServiceDep, asked: CancelJob | None = None) -> Response:
    """End a job, or some of its branches, at the next step; what they have is kept."""
    found = service.jobs.get(job)
    found.cancel(None if asked is None else asked.branches)
    return model_response(found.to_object())


@router.get("/jobs/{job}/events", response_class=Response, responses=EVENTS)
async def read_events(job: JobName, service: ServiceDep, after: LastEvent) -> EventStream:
    """Follow a job: its events from the first one, or after the last that came."""
    events = service.jobs.get(job).events
    return EventStream(events.frames(after or 0))
