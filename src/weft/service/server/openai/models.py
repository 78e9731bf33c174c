"""GET /v1/models: the loaded models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ....engines.base import UNKNOWN_CONTEXT_LENGTH
from ..dependencies import ERRORS
from ..models import ServedModel
from ..service import ServiceDep

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)


class ListedModel(BaseModel):
    """A model that requests may name, with the fields of OpenAI's and Anthropic's APIs."""

    id: str = Field(description="The value for a request's `model`.")
    type: str = "model"
    display_name: str
    created_at: datetime
    object: str = "model"
    created: int = Field(description="Unix time in seconds when it was registered.")
    owned_by: str = "weft"
    max_model_len: int | None = Field(None, description="Maximum of tokens in prompt and answer.")


class ListedModels(BaseModel):
    """The loaded models."""

    object: str = "list"
    data: list[ListedModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


@router.head("/models", include_in_schema=False)
@router.get("/models")
@router.get("/models/", include_in_schema=False)
async def models(service: ServiceDep) -> ListedModels:
    """List the loaded and evicted models; the first answers requests without a model."""
    ready = [model for model in service.models if model.state in ("ready", "evicted")]
    ready.sort(key=lambda model: model.name != service.models.default)
    data = [_listed_model(model) for model in ready]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return ListedModels(data=data, first_id=first, last_id=last)


@router.head("/models/{model:path}", include_in_schema=False)
@router.get("/models/{model:path}")
async def one_model(model: str, service: ServiceDep) -> ListedModel:
    """Return a model."""
    return _listed_model(service.models.get(model))


def _listed_model(model: ServedModel) -> ListedModel:
    """Return a model as an entry of the list."""
    length: Any = (
        None if model.lm is None or model.lm.n_ctx == UNKNOWN_CONTEXT_LENGTH else model.lm.n_ctx
    )
    return ListedModel(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(int(model.created), UTC),
        created=int(model.created),
        max_model_len=length,
    )
