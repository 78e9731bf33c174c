"""Terminals: which loom was drawn last in each, so that a command need not be told."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Response

from ...api.terminals import LastLoom, SetLastLoom
from ..dependencies import ERRORS
from ..serializers import model_response
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["terminals"], responses=ERRORS)
Mark = Annotated[str, Path(min_length=1, max_length=64, description="A terminal's own mark.")]


@router.get("/terminals/{mark}", response_model=LastLoom)
async def read_drawn(mark: Mark, service: ServiceDep) -> Response:
    """Say which loom was drawn last in a terminal."""
    return model_response(await asyncio.to_thread(_drawn, service, mark))


@router.put("/terminals/{mark}", response_model=LastLoom)
async def note_drawn(mark: Mark, asked: SetLastLoom, service: ServiceDep) -> Response:
    """Remember that a loom was drawn in a terminal."""
    row = await service.looms.row(asked.loom)
    await asyncio.to_thread(service.looms.library.note, mark, row.id, asked.node)
    return model_response(await asyncio.to_thread(_drawn, service, mark))


def _drawn(service: Service, mark: str) -> LastLoom:
    library = service.looms.library
    own, other = library.last(mark), library.anybodys()
    return LastLoom(
        loom=None if own is None else own.loom,
        node=0 if own is None else own.number,
        anybodys=None if other is None else other.loom,
    )
