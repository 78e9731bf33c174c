"""Swagger UI for the OpenAPI schema, served from this machine."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html

router = APIRouter(prefix="/docs", include_in_schema=False)
# NOTE: only the package's files are used; its own routes read them for every request.
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


@router.get("")
async def read_docs() -> Response:
    """Return the page; FastAPI's default page loads its script from a CDN."""
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Weft",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon-32x32.png",
    )


def _add_file_route(name: str, kind: str) -> None:
    """Add a route for a file of Swagger UI. kind: its media type."""

    async def read_file() -> Response:
        return Response(
            _read_file(name), media_type=kind, headers={"Cache-Control": "max-age=3600"}
        )

    router.add_api_route(f"/{name}", read_file, methods=["GET"])


@cache
def _read_file(name: str) -> bytes:
    """Return the content of a file of Swagger UI."""
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()


for _name, _kind in _FILES.items():
    _add_file_route(_name, _kind)
