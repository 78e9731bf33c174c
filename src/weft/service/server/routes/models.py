"""Models: those on the shelf, loading and unloading."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from ...api.jobs import JobReply
from ...api.models import LoadModel, ModelList, ModelObject
from ..dependencies import ERRORS
from ..events import until_gone
from ..jobs import ServerJob
from ..models import ModelRequest, ServedModel
from ..serializers import model_response, to_model_object
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["models"], responses=ERRORS)
ModelName = Annotated[str, Path(max_length=4096, description="A model's id; it may have slashes.")]


@router.get("/models", response_model=ModelList)
async def list_models(service: ServiceDep) -> Response:
    """List the models that are loaded, being loaded, or evicted."""
    shelf = service.models
    return model_response(ModelList(data=[to_model_object(shelf, model) for model in shelf]))


@router.post("/models", status_code=202, response_model=JobReply)
async def load_model(asked: LoadModel, service: ServiceDep, request: Request) -> Response:
    """Begin to load a model; the job's events tell how far it is."""
    service.check_accepting()
    wish = ModelRequest(
        asked.source,
        asked.id,
        asked.engine,
        asked.n_ctx,
        asked.kv_budget,
        asked.offload,
        asked.device,
        asked.dtype,
    )
    model = service.models.register(wish)
    job = service.jobs.add(ServerJob("load", model=model.name))
    job.events.put("job", {"job": job.id, "model": model.name, "branches": []})
    job.start(_load(service, job, model), lambda _: None)
    if asked.wait:
        await until_gone(request, job.wait())
    reply = JobReply(job=job.id, status=job.status, error=job.to_object().error)
    return model_response(reply, status=200 if asked.wait else 202)


async def _load(service: Service, job: ServerJob, model: ServedModel) -> None:
    loop = asyncio.get_running_loop()

    def tell(phase: str, done: int, total: int, note: str) -> None:
        job.progress = {"phase": phase, "done": done, "total": total, "note": note}
        loop.call_soon_threadsafe(job.events.put, "progress", job.progress)

    await service.models.load(model, tell)


@router.get("/models/{model:path}", response_model=ModelObject)
async def read_model(model: ModelName, service: ServiceDep) -> Response:
    """Say what a model is, and how far it is loaded."""
    return model_response(to_model_object(service.models, service.models.get(model)))


@router.delete("/models/{model:path}", response_model=ModelList)
async def unload_model(
    model: ModelName,
    service: ServiceDep,
    force: Annotated[bool, Query(description="Also while jobs use it: they fail.")] = False,
) -> Response:
    """Close a model and forget its KV; looms stay, and grow again when it is loaded."""
    await service.models.unload(model, force=force)
    shelf = service.models
    return model_response(ModelList(data=[to_model_object(shelf, each) for each in shelf]))
