"""GET /v1/models: what is loaded here."""

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
    """A model that requests may name, as OpenAI's and Anthropic's clients read it."""

    id: str = Field(description="What a request's `model` is.")
    type: str = "model"
    display_name: str
    created_at: datetime
    object: str = "model"
    created: int = Field(description="When it was put on the shelf, in seconds of Unix time.")
    owned_by: str = "weft"
    max_model_len: int | None = Field(None, description="Tokens that prompt and answer may have.")


class ListedModels(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[ListedModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


@router.head("/models", include_in_schema=False)
@router.get("/models")
@router.get("/models/", include_in_schema=False)
async def models(service: ServiceDep) -> ListedModels:
    """List the models that are loaded or evicted; the first one answers requests without a name."""
    ready = [model for model in service.models if model.state in ("ready", "evicted")]
    ready.sort(key=lambda model: model.name != service.models.default)
    data = [_object(model) for model in ready]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return ListedModels(data=data, first_id=first, last_id=last)


@router.head("/models/{model:path}", include_in_schema=False)
@router.get("/models/{model:path}")
async def one_model(model: str, service: ServiceDep) -> ListedModel:
    """Return one of them."""
    return _object(service.models.get(model))


def _object(model: ServedModel) -> ListedModel:
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
