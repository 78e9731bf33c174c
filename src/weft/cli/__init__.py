"""The `weft` command: one file a verb. `main` is its entry point."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command with the process's arguments and leave with its exit code."""
    from .out import Out, soften

    soften(sys.stdout, sys.stderr)
    try:
        if len(sys.argv) < 2:
            from .screen import show

            show(Out.of(sys.stdout))
            return
        from .app import app

        app(prog_name="weft")
    except KeyboardInterrupt:
        sys.exit(130)
