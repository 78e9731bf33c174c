"""What a failure looks like: one table from error to exit code and hint, and no traceback.

0 ok · 1 failure · 2 usage · 3 model or engine unavailable · 4 out of memory · 130 interrupted
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import typer

from .. import errors
from . import objects
from .logs import configure
from .out import Out

Args = ParamSpec("Args")


class Outcome(NamedTuple):
    """How the command ends: its exit code, and what to do where the error does not say.

    speaks_first: our hint instead of the error's own, which names the library's arguments.
    """

    code: int
    hint: str = ""
    speaks_first: bool = False


FAILURE, USAGE, UNAVAILABLE, MEMORY, INTERRUPTED = 1, 2, 3, 4, 130
_DOCTOR = "weft doctor shows what is installed, and what to install for what"
_SMALLER = "use fewer branches, a shorter prompt, or a larger --kv-budget"

# The most special class of an error that is here decides.
OUTCOMES: dict[type[BaseException], Outcome] = {
    errors.WeftError: Outcome(FAILURE),
    errors.ConfigError: Outcome(USAGE, "weft {verb} --help lists the options"),
    errors.EngineError: Outcome(UNAVAILABLE, _DOCTOR),
    errors.EngineUnavailable: Outcome(UNAVAILABLE, _DOCTOR),
    errors.ModelLoadError: Outcome(UNAVAILABLE, "the model that is always there is -m tiny"),
    errors.Unsupported: Outcome(UNAVAILABLE, _DOCTOR),
    errors.ForwardError: Outcome(FAILURE, "weft doctor runs the embedded model as a check"),
    errors.CapacityError: Outcome(MEMORY, _SMALLER, True),
    errors.KVFull: Outcome(MEMORY, _SMALLER, True),
    errors.ContextOverflow: Outcome(
        USAGE, "shorten the prompt, or take a model that holds more", True
    ),
    errors.TreeError: Outcome(FAILURE),
    errors.StaleHandle: Outcome(FAILURE),
    errors.HasChildren: Outcome(FAILURE),
    errors.Terminal: Outcome(FAILURE),
    errors.ConstraintError: Outcome(FAILURE),
    errors.GrammarError: Outcome(USAGE),
    errors.DeadEnd: Outcome(FAILURE),
    errors.StoreError: Outcome(FAILURE),
    errors.FormatError: Outcome(FAILURE),
    errors.ModelMismatch: Outcome(FAILURE, "take the model that the loom was made with"),
    errors.Conflict: Outcome(FAILURE, "try again"),
    errors.QueueFull: Outcome(FAILURE, "try again later"),
    errors.Cancelled: Outcome(INTERRUPTED),
    errors.BatchAbandoned: Outcome(FAILURE, "try again"),
    MemoryError: Outcome(MEMORY, _SMALLER),
}


def outcome_of(error: BaseException) -> Outcome:
    """Return how the command ends on this error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return OUTCOMES[MemoryError]
        cause = cause.__cause__
    return next(OUTCOMES[kind] for kind in type(error).__mro__ if kind in OUTCOMES)


def guarded(verb: Callable[Args, None]) -> Callable[Args, None]:
    """Wrap a verb: mistakes and failures become a message and an exit code."""

    @functools.wraps(verb)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            configure(verbose if isinstance(verbose := kwargs.get("verbose"), int) else 0)
            verb(*args, **kwargs)
            sys.stdout.flush()
        except (errors.WeftError, MemoryError) as error:
            as_json = kwargs.get("as_json") is True
            raise typer.Exit(tell(error, verb.__name__.rstrip("_"), as_json=as_json)) from None
        except KeyboardInterrupt:
            Out.of(sys.stderr).line("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            forget_stdout()
            raise typer.Exit(FAILURE) from None

    return run


def tell(error: BaseException, verb: str, *, as_json: bool = False) -> int:
    """Write an error of a verb and its hint to stderr, or one JSON object; return the exit code."""
    out, outcome = Out.of(sys.stderr), outcome_of(error)
    message = str(error) or type(error).__name__
    if outcome.code == MEMORY and isinstance(error, MemoryError):
        message = "out of memory"
    hints = [getattr(error, "hint", ""), outcome.hint.format(verb=verb)]
    hint = next(filter(None, reversed(hints) if outcome.speaks_first else hints), "")
    if as_json:
        told = {"type": type(error).__name__, "message": message, "hint": hint}
        objects.write({"error": {**told, "exit_code": outcome.code}}, sys.stderr)
        return outcome.code
    out.line(("weft: ", "bold red"), message)
    if hint and hint not in message:
        out.line(("hint: ", "bold"), hint)
    return outcome.code


def forget_stdout() -> None:
    """Keep Python's own last flush from complaining: nobody reads stdout, or its disk is full."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass
