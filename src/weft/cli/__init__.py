"""The `weft` command: one file a verb. `main` is its entry point."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command with the process's arguments and leave with its exit code."""
    fill_closed_streams()
    try:
        # Ctrl-C may come while the modules are read.
        from .._core.system_resources import wait_variables
        from ..viz.terminal import TerminalWriter, escape_unencodable

        os.environ.update(wait_variables())  # before any library with OpenMP is imported

        escape_unencodable(sys.stdout, sys.stderr)
        # A shell that completes says so by a variable and gives no arguments.
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
        # Models and looms have errors of their own: what is left is a full disk below stdout.
        from .._core.error_mapping import FAILURE
        from .failures import asked_for_json, forget_stdout, write

        forget_stdout()
        if not isinstance(error, BrokenPipeError):
            place = f": {error.filename}" if error.filename is not None else ""
            message, as_json = f"{error.strerror or error}{place}", asked_for_json(sys.argv[1:])
            write(type(error).__name__, message, "", FAILURE, as_json)
        sys.exit(FAILURE)


def fill_closed_streams() -> None:
    """Let nothing read from and write to standard streams that the caller has closed.

    Their numbers would be given to the files that are opened next, and texts written into those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
