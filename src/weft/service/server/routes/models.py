"""Routes of models: list, load and unload."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from ....errors import Conflict
from ...api.jobs import JobReply
from ...api.models import LoadModel, ModelList, ModelObject
from ..dependencies import CHECKS, ERRORS
from ..errors import RequestError
from ..events import run_until_disconnect
from ..jobs import ServerJob
from ..models import ModelRequest, ServedModel
from ..serializers import model_response, to_model_object
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["models"], responses=ERRORS, dependencies=CHECKS)
ModelName = Annotated[
    str, Path(max_length=4096, description="A model's id, which may contain slashes.")
]


@router.get("/models", response_model=ModelList)
async def list_models(service: ServiceDep) -> Response:
    """List the models that are loaded, loading or evicted."""
    registry = service.models
    return model_response(ModelList(data=[to_model_object(registry, model) for model in registry]))


@router.post("/models", status_code=202, response_model=JobReply)
async def load_model(body: LoadModel, service: ServiceDep, request: Request) -> Response:
    """Start to load a model; the job's events report the progress."""
    service.check_accepting()
    model_request = ModelRequest(
        body.source,
        body.id,
        body.engine,
        body.n_ctx,
        body.kv_budget,
        body.offload,
        body.device,
        body.dtype,
    )
    try:
        model = service.models.register(model_request)
    except Conflict as error:
        raise RequestError(409, error.code, str(error), param="id", hint=error.hint) from error
    job = service.jobs.add(ServerJob("load", model=model.name))
    job.events.put("job", {"job": job.id, "model": model.name, "branches": []})
    job.start(_load(service, job, model), lambda _: None)
    if body.wait:
        await run_until_disconnect(request, job.wait())
    reply = JobReply(job=job.id, status=job.status, error=job.to_object().error)
    return model_response(reply, status=200 if body.wait else 202)


async def _load(service: Service, job: ServerJob, model: ServedModel) -> None:
    """Load a model; the work of a job."""
    loop = asyncio.get_running_loop()

    def report(phase: str, done: int, total: int, note: str) -> None:
        job.progress = {"phase": phase, "done": done, "total": total, "note": note}
        loop.call_soon_threadsafe(job.events.put, "progress", job.progress)

    await service.models.load(model, report)


@router.get("/models/{model:path}", response_model=ModelObject)
async def read_model(model: ModelName, service: ServiceDep) -> Response:
    """Return a model, including its load progress."""
    return model_response(to_model_object(service.models, service.models.get(model)))


@router.delete("/models/{model:path}", response_model=ModelList)
async def unload_model(
    model: ModelName,
    service: ServiceDep,
    force: Annotated[bool, Query(description="Unload even if jobs use it; they fail.")] = False,
) -> Response:
    """Unload a model and its KV. Looms stay, and can grow again when the model is loaded."""
    await service.models.unload(model, force=force)
    registry = service.models
    return model_response(ModelList(data=[to_model_object(registry, other) for other in registry]))
