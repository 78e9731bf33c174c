"""GET /v1/models: what is loaded here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ...engines.base import UNTOLD
from ..asked import ERRORS
from ..models import ServedModel
from ..service import Here

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)


class ListedModel(BaseModel):
    """A model that requests may name."""

    id: str = Field(description="What a request's `model` is.")
    object: str = "model"
    created: int = Field(description="When it was put on the shelf, in seconds of Unix time.")
    owned_by: str = "weft"
    max_model_len: int | None = Field(None, description="Tokens that prompt and answer may have.")


class ListedModels(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[ListedModel]


@router.head("/models", include_in_schema=False)
@router.get("/models")
async def models(service: Here) -> ListedModels:
    """List the models that are loaded or evicted; the first one answers requests without a name."""
    ready = [model for model in service.models if model.state in ("ready", "evicted")]
    ready.sort(key=lambda model: model.name != service.models.default)
    return ListedModels(data=[_object(model) for model in ready])


@router.head("/models/{model:path}", include_in_schema=False)
@router.get("/models/{model:path}")
async def one_model(model: str, service: Here) -> ListedModel:
    """Return one of them."""
    return _object(service.models.get(model))


def _object(model: ServedModel) -> ListedModel:
    length: Any = None if model.lm is None or model.lm.n_ctx == UNTOLD else model.lm.n_ctx
    return ListedModel(id=model.name, created=int(model.created), max_model_len=length)
