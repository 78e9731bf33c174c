"""The command's verbs, put together."""

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
    """The verbs; tells of a wrong option as of any other mistake, in words of its own."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line; a mistake in it is told, as JSON where that was asked for."""
        stands_alone = options.pop("standalone_mode", True)
        options["standalone_mode"] = False
        if not stands_alone:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
        except failures.UsageMistake as error:
            given = args[0] if args else options.get("args")
            as_json = failures.asked_for_json(sys.argv[1:] if given is None else given)
            code = failures.tell_usage(error, as_json=as_json)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; what is wrong with a value is told without the parser's own prefix."""
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
# What it does not know is the engine's.
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
            f"give it after the verb: weft {context.invoked_subcommand} --json"
        )
