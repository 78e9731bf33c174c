"""The `weft` command, with one module for each verb. `main` is its entry point."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command with the process's arguments and exit with its code."""
    fill_closed_streams()
    try:
        # Inside the `try`: Ctrl-C can arrive during these imports.
        from .._core.system_resources import wait_variables
        from ..viz.terminal import TerminalWriter, escape_unencodable

        os.environ.update(wait_variables())  # before any library with OpenMP is imported

        escape_unencodable(sys.stdout, sys.stderr)
        # A shell that asks for completions sets a variable and gives no arguments.
        if len(sys.argv) < 2 and "_WEFT_COMPLETE" not in os.environ:
            from .start_screen import show

            show(TerminalWriter.for_stream(sys.stdout))
            sys.stdout.flush()
            return
        from .app import app

        app(prog_name="weft")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # Errors of models and looms were handled: stdout is closed, or its disk is full.
        from .._core.error_mapping import FAILURE
        from .failures import forget_stdout, wants_json, write

        forget_stdout()
        if not isinstance(error, BrokenPipeError):
            place = f": {error.filename}" if error.filename is not None else ""
            message, as_json = f"{error.strerror or error}{place}", wants_json(sys.argv[1:])
            write(type(error).__name__, message, "", FAILURE, as_json)
        sys.exit(FAILURE)


def fill_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller has closed.

    Otherwise the next opened file gets the descriptor of stdout, and output is written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
