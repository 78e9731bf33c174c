"""Routes of terminals: the loom shown last in each, so that commands can default to it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Response

from ...api.terminals import LastLoom, SetLastLoom
from ..dependencies import CHECKS, ERRORS
from ..serializers import model_response
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["terminals"], responses=ERRORS, dependencies=CHECKS)
Mark = Annotated[str, Path(min_length=1, max_length=64, description="The terminal's id.")]


@router.get("/terminals/{mark}", response_model=LastLoom)
async def read_drawn(mark: Mark, service: ServiceDep) -> Response:
    """Return the loom shown last in a terminal."""
    return model_response(await asyncio.to_thread(_last_loom, service, mark))


@router.put("/terminals/{mark}", response_model=LastLoom)
async def note_drawn(mark: Mark, body: SetLastLoom, service: ServiceDep) -> Response:
    """Record that a loom was shown in a terminal."""
    row = await service.looms.row(body.loom)
    await asyncio.to_thread(service.looms.library.set_last_loom, mark, row.id, body.node)
    return model_response(await asyncio.to_thread(_last_loom, service, mark))


def _last_loom(service: Service, mark: str) -> LastLoom:
    """Return the loom shown last in a terminal. mark: the terminal's id."""
    library = service.looms.library
    own, other = library.last_loom(mark), library.last_loom_anywhere()
    return LastLoom(
        loom=None if own is None else own.loom,
        node=0 if own is None else own.number,
        anybodys=None if other is None else other.loom,
    )
