"""Routes that export looms to formats of other programs, and import them."""

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
from ...store.library import MAX_TITLE_LENGTH, title_from_text
from ..dependencies import CHECKS, ERRORS, LoomName
from ..serializers import model_response, to_loom_entry
from ..service import ServiceDep

router = APIRouter(prefix="/api/v1", tags=["interchange"], responses=ERRORS, dependencies=CHECKS)
_MODELS = "The model for looms imported from texts; null: the default one."
_ANY_BODY = {
    "requestBody": {
        "description": "The file's content.",
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
        Query(description="How much to export; null: the format's usual scope."),
    ] = None,
    node: Annotated[
        str, Query(max_length=64, description="The end of a path, or the top of a subtree.")
    ] = "0",
    limit: Annotated[
        int | None, Query(ge=1, description="Maximum number of nodes in a picture.")
    ] = None,
    by: Annotated[
        Literal["score", "rating", "bookmark"] | None,
        Query(description="How siblings are ranked; pairs only. Null: by score."),
    ] = None,
    tint: Annotated[str | None, Query(max_length=20, description="Coloring; html only.")] = None,
) -> StreamingResponse:
    """Return a loom, or a part of it, in a file format."""
    options: dict[str, Any] = {"limit": limit, "tint": tint, "by": by}
    options = {name: value for name, value in options.items() if value is not None}
    async with service.looms.open_locked(loom) as live:
        top, numbers = live.node(node), live.stored.numbers()
        live.check_not_growing(top)
        if format in EXPORTERS and "bookmark" in EXPORTERS[format].options:
            marks = live.stored.bookmarks()
            options["bookmark"] = lambda exported: marks.get(numbers.get(exported.id, -1))
        if format == "json":
            options["title"] = live.stored.title
        if format == "markdown":
            options["name"] = live.stored.title or live.stored.name
        # `export` copies the nodes before it returns, as the loom may grow meanwhile.
        pieces = await live.call(
            lambda: export(top, format, scope=scope, numbers=numbers, **options)
        )
        name = re.sub(r"[^\w.-]", "-", live.stored.name, flags=re.ASCII)
    kind = EXPORTERS[format]
    # Always a download, never a page of this origin: the content is untrusted.
    headers = {"Content-Disposition": f'attachment; filename="{name}{suffix_of(format)}"'}
    return StreamingResponse(
        (piece.encode("utf-8", "replace") for piece in pieces),
        media_type=f"{kind.media_type}; charset=utf-8",
        headers=headers,
    )


def suffix_of(format: str) -> str:
    """Return the file name suffix of a format."""
    return ".loom.json" if format == "json" else EXPORTERS[format].suffix


@router.post("/import", status_code=201, response_model=Imported, openapi_extra=_ANY_BODY)
async def import_looms(
    request: Request,
    service: ServiceDep,
    format: Annotated[
        str, Query(max_length=40, description="auto, or one of the formats in GET /server.")
    ] = "auto",
    model: Annotated[str | None, Query(max_length=4096, description=_MODELS)] = None,
    name: Annotated[
        str | None, Query(max_length=200, description="Name of the loom, for files with one loom.")
    ] = None,
    title: Annotated[
        str | None,
        Query(
            max_length=MAX_TITLE_LENGTH,
            description="Title of the loom, for files with one loom; null: the file's.",
        ),
    ] = None,
    force: Annotated[
        bool, Query(description="Accept token ids of another model with the same vocabulary.")
    ] = False,
) -> Response:
    """Import a file of Weft or another program; returns the format and what was left out."""
    data = await request.body()
    served = await service.models.available(model)
    limits = ImportLimits(n_bytes=service.config.limits.import_bytes)
    with served.in_use() as lm:
        report, used = await asyncio.to_thread(
            _read, data, lm, format=format, limits=limits, force=force
        )
        if (name is not None or title is not None) and len(report.looms) > 1:
            param = "title" if name is None else "name"
            raise ConfigError(f"{param} is for one loom; this file has {len(report.looms)}")
        library = service.looms.library
        rows, at = [], []
        for imported in report.looms:
            if used is not None:
                imported.loom.meta["model"] = served.source
            own = None if name is not None else title_from_text(imported.title)
            stored = await asyncio.to_thread(
                library.create, imported.loom, name=name, title=title or own
            )
            service.looms.put(stored, used)
            rows.append(await service.looms.row(stored.id))
            at.append(stored.number(imported.at))
    result = Imported(
        at=at,
        looms=[to_loom_entry(row, None) for row in rows],
        recognised_as=report.recognised_as,
        nodes=report.n_nodes,
        dropped=list(report.dropped),
    )
    return model_response(result, status=201)


def _read(
    data: bytes, lm: LM, *, format: str, limits: ImportLimits, force: bool
) -> tuple[ImportReport, LM | None]:
    """Read a file of another program or of Weft.

    Returns: the imported looms, and their model. It is None for looms of another model, which can
    only be read.
    """
    try:
        return read(data, lm, format=format, limits=limits, force=force), lm
    except ModelMismatch as error:
        report = read(data, None, format=format, limits=limits)
        note = f"only its own model can grow it: {error}"
        return report._replace(dropped=(*report.dropped, note)), None
