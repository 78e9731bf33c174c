"""The Typer application with all verbs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..viz.terminal import TerminalWriter, write_object
from . import failures, options, start_screen
from .chat import chat
from .demo import demo
from .doctor import doctor, models
from .export import export
from .find import find
from .import_ import import_
from .looms import ls, rm
from .page import open_
from .run import grow, run
from .serve import serve
from .solve import solve
from .start_screen import show
from .undo import redo, undo
from .views import next_, read, tree


class Verbs(TyperGroup):
    """A Typer group that reports wrong options like other errors, as JSON with --json."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line and exit; usage errors are printed, as JSON with --json."""
        is_standalone = options.pop("standalone_mode", True)
        options["standalone_mode"] = False
        if not is_standalone:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
        except failures.UsageError as error:
            arguments = args[0] if args else options.get("args")
            code = failures.print_usage_error(
                error, sys.argv[1:] if arguments is None else arguments
            )
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; remove Pydantic's prefix from messages about wrong values."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=Verbs,
    help="Grow, read and search trees of continuations of language models.",
    no_args_is_help=False,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS = (
    *(demo, run, grow, tree, read, next_, chat, solve, ls, find, rm, undo, redo),
    *(export, import_, open_, models, doctor),
)
for verb in VERBS:
    app.command(verb.__name__.rstrip("_"))(verb)
# Unknown options are passed to the engine.
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve
)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    as_json: options.Json = False,
) -> None:
    """Grow, read and search trees of continuations of language models."""
    if version:
        print(f"weft {__version__}")
    elif context.invoked_subcommand is None:
        if as_json:
            write_object(
                {
                    "weft": __version__,
                    "engines": start_screen.engines(),
                    "models": start_screen.models(),
                }
            )
        else:
            show(TerminalWriter.for_stream(sys.stdout))
    elif as_json:
        raise typer.BadParameter(
            f"give --json after the verb: weft {context.invoked_subcommand} --json"
        )
