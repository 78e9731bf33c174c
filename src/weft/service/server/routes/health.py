"""Health checks and Prometheus metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from ..errors import RequestError
from ..service import ServiceDep

router = APIRouter(tags=["health"])  # some load balancers probe with HEAD


class Health(BaseModel):
    """The server is up, or ready."""

    status: str = Field(description='"ok".')


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> Health:
    """Return 200 if the process responds."""
    return Health(status="ok")


@router.head("/readyz", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/readyz")
@router.get("/health", include_in_schema=False)  # llama-server's name
async def readyz(service: ServiceDep) -> Health:
    """Return 200 if looms can grow; 503 without a model or database, or while stopping."""
    service.check_accepting()
    await asyncio.to_thread(service.looms.library.looms, limit=1)
    if not service.models.is_ready:
        for model in service.models:
            if model.at_start:
                model.ready()
        raise RequestError(503, "no_model", "no model is loaded")
    return Health(status="ok")


@router.get("/metrics", response_class=Response)
async def metrics(service: ServiceDep) -> Response:
    """Return Prometheus metrics of requests, jobs and models."""
    page = await asyncio.to_thread(service.metrics.page)
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
