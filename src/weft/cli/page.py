"""`weft open`: open a loom in the browser, on a running server."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import quote

import typer

from ..errors import Unreachable, Unsupported
from ..viz.terminal import TerminalWriter, write_object
from . import options
from .browser import has_screen, show
from .failures import handle_errors

_LAUNCH_S = 5.0


@handle_errors
def open_(
    loom: options.OptionalLoom = None,
    browser: Annotated[
        bool | None,
        typer.Option(
            "--browser/--no-browser",
            help="Open the page, or only print its address.",
            show_default="open it on a local desktop; not over SSH, not in CI",
        ),
    ] = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Open a loom in the browser, on the running server."""
    from .backend import select_backend

    with select_backend() as backend:
        base = backend.page()
        if base is None:
            raise Unreachable(
                "no server of yours runs at the usual port, and the page needs a server",
                hint="weft serve starts one; WEFT_HOST selects another",
            )
        if not base:
            raise Unsupported(
                f"the server at {backend.where()} has no page",
                hint="weft tree, or weft export page.html",
            )
        name = backend.resolve_name(loom)
    url = f"{base}#{quote(name)}"
    if as_json:
        write_object({"url": url, "loom": name})
        return
    TerminalWriter.for_stream(sys.stdout).line(url)
    if has_screen() if browser is None else browser:
        show(url, wait_s=_LAUNCH_S)
