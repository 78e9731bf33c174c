"""The page: files of the package, built from `page/`."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response

from ..errors import RequestError

router = APIRouter(include_in_schema=False)
BUILT = Path(__file__).parents[1] / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
# The page never renders texts as markup; if it ever did, this policy blocks scripts in them.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "worker-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)


@router.get("/", name="page")
async def read_page(
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """Return the page; the URL fragment selects the loom."""
    return _file_response("index.html", if_none_match, accept_encoding)


@router.get("/assets/{name}")
async def read_asset(
    name: str,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """Return a script, a style sheet, a font or a licence."""
    return _file_response(f"assets/{name}", if_none_match, accept_encoding)


def _file_response(name: str, if_none_match: str | None, encodings: str) -> Response:
    """Return a file of the page, gzipped if possible; 304 if the client has it."""
    entry = _read_files().get(name)
    if entry is None:
        raise RequestError(404, "no_such_route", "the page has no such file")
    content, gzipped, tag, kind = entry
    headers = {
        "ETag": tag,
        "Vary": "Accept-Encoding",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        # Names of assets contain a digest; the page itself is always revalidated.
        "Cache-Control": "no-cache"
        if name == "index.html"
        else "private, max-age=31536000, immutable",
    }
    if if_none_match is not None and tag in if_none_match:
        return Response(status_code=304, headers=headers)
    if gzipped is not None and "gzip" in encodings:
        headers["Content-Encoding"] = "gzip"
        content = gzipped
    return Response(content, media_type=kind, headers=headers)


@cache
def _read_files() -> dict[str, tuple[bytes, bytes | None, str, str]]:
    """Return the files by name: content, gzipped content, ETag and media type."""
    files = {}
    for path in sorted(BUILT.rglob("*")):
        if path.suffix in _TYPES:
            data = path.read_bytes()
            gzipped = None if path.suffix == ".woff2" else gzip.compress(data, mtime=0)
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            name = path.relative_to(BUILT).as_posix()
            files[name] = data, gzipped, tag, _TYPES[path.suffix]
    return files
