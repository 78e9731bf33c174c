"""Looms that leave for other programs' formats, and come in from them."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from ....errors import ConfigError, ModelMismatch
from ....lm.lm import LM
from ...api.looms import Imported
from ...interchange import EXPORTERS, ImportLimits, export, read
from ...interchange.importers import ImportReport
from ..dependencies import ERRORS, LoomName
from ..serializers import model_response, to_loom_entry
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["interchange"], responses=ERRORS)
_MODELS = "Of what comes as texts; null: the default one."
_ANY_BODY = {
    "requestBody": {
        "description": "The file as it is.",
        "required": True,
        "content": {"application/json": {"schema": {}}, "application/octet-stream": {"schema": {}}},
    }
}


@router.get("/looms/{loom}/export", response_class=Response)
async def export_loom(
    loom: LoomName,
    service: ServiceDep,
    format: Annotated[
        str, Query(max_length=40, description=f"One of {', '.join(EXPORTERS)}.")
    ] = "json",
    scope: Annotated[
        Literal["path", "subtree", "tree"] | None,
        Query(description="How much of it; null: as the format mostly wants."),
    ] = None,
    node: Annotated[str, Query(max_length=64, description="Where a path or subtree ends.")] = "0",
    limit: Annotated[int | None, Query(ge=1, description="Nodes of a picture at most.")] = None,
    tint: Annotated[str | None, Query(max_length=20, description="Of html.")] = None,
) -> StreamingResponse:
    """Return a loom, or a part of it, as a file of another program."""
    options: dict[str, Any] = {"limit": limit, "tint": tint}
    options = {name: value for name, value in options.items() if value is not None}
    async with service.looms.open_locked(loom) as live:
        top, numbers = live.node(node), live.kept.numbers()
        live.check_not_growing(top)
        if format in EXPORTERS and "bookmark" in EXPORTERS[format].options:
            marks = live.kept.bookmarks()
            options["bookmark"] = lambda each: marks.get(numbers.get(each.id, -1))
        if format == "markdown":
            options["name"] = live.kept.name
        # What is written is copied before this returns: the loom may grow on meanwhile.
        pieces = await live.call(
            lambda: export(top, format, scope=scope, numbers=numbers, **options)
        )
        name = re.sub(r"[^\w.-]", "-", live.kept.name, flags=re.ASCII)
    kind = EXPORTERS[format]
    # A file, never a page of this origin: what is in it was written by whoever.
    headers = {"Content-Disposition": f'attachment; filename="{name}{suffix_of(format)}"'}
    return StreamingResponse(
        (piece.encode("utf-8", "replace") for piece in pieces),
        media_type=f"{kind.media_type}; charset=utf-8",
        headers=headers,
    )


def suffix_of(format: str) -> str:
    """Return how a file of this format is called at its end."""
    return ".loom.json" if format == "json" else EXPORTERS[format].suffix


@router.post("/import", status_code=201, response_model=Imported, openapi_extra=_ANY_BODY)
async def import_looms(
    request: Request,
    service: ServiceDep,
    format: Annotated[
        str, Query(max_length=40, description="auto, or a name of GET /server's formats.")
    ] = "auto",
    model: Annotated[str | None, Query(max_length=4096, description=_MODELS)] = None,
    name: Annotated[
        str | None, Query(max_length=200, description="Of a loom that comes alone.")
    ] = None,
    force: Annotated[
        bool, Query(description="Take token ids of another model of the same vocabulary.")
    ] = False,
) -> Response:
    """Take in a file of Weft's or of another program; says what it was and what was left out."""
    data = await request.body()
    found = await service.models.available(model)
    limits = ImportLimits(n_bytes=service.config.limits.import_bytes)
    with found.in_use() as lm:
        report, used = await asyncio.to_thread(
            _read, data, lm, format=format, limits=limits, force=force
        )
        if name is not None and len(report.looms) > 1:
            raise ConfigError(f"name is for one loom; this file has {len(report.looms)}")
        library = service.looms.library
        rows = []
        for planted in report.looms:
            if used is not None:
                planted.loom.meta["model"] = found.source
            kept = await asyncio.to_thread(library.create, planted.loom, name=name)
            service.looms.put(kept, used)
            rows.append(await service.looms.row(kept.id))
    told = Imported(
        looms=[to_loom_entry(row, None) for row in rows],
        recognised_as=report.recognised_as,
        nodes=report.n_nodes,
        dropped=list(report.dropped),
    )
    return model_response(told, status=201)


def _read(
    data: bytes, lm: LM, *, format: str, limits: ImportLimits, force: bool
) -> tuple[ImportReport, LM | None]:
    """Read a file; what another model has written is taken as it is, to be read."""
    try:
        return read(data, lm, format=format, limits=limits, force=force), lm
    except ModelMismatch as error:
        report = read(data, None, format=format, limits=limits)
        note = f"grown it can be by its own model only: {error}"
        return report._replace(dropped=(*report.dropped, note)), None
