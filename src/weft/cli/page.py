"""`weft open`: a loom in the browser, at a server that runs."""

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
            help="Open it, or write its address only.",
            show_default="open it where somebody sits at this machine",
        ),
    ] = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Open a loom in the browser, at the server that runs."""
    from .backend import select_backend

    with select_backend() as backend:
        base = backend.page()
        if base is None:
            raise Unreachable(
                "no server of yours answers at the usual port, and the page is a server's",
                hint="weft serve starts one; WEFT_HOST says where one is",
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
