"""What a failure of the command looks like: a message, a hint and an exit code, no traceback."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TextIO

import typer

from .. import errors
from .._core.error_mapping import FAILURE, INTERRUPTED, MEMORY, USAGE, map_error
from ..errors import ConfigError, PromptWarning
from ..viz.terminal import TerminalWriter, escape_controls, write_object

Args = ParamSpec("Args")
# What parsing raises: the library that does it has a module of its own for it in some versions.
UsageMistake: type[Exception] = typer.BadParameter.__mro__[2]


def handle_errors(verb: Callable[Args, None]) -> Callable[Args, None]:
    """Wrap a verb: mistakes and failures become a message and an exit code."""

    @functools.wraps(verb)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            configure(verbose if isinstance(verbose := kwargs.get("verbose"), int) else 0)
            verb(*args, **kwargs)
            sys.stdout.flush()
        except (errors.WeftError, MemoryError) as error:
            as_json = kwargs.get("as_json") is True
            raise typer.Exit(
                print_error(error, verb.__name__.rstrip("_"), as_json=as_json)
            ) from None
        except KeyboardInterrupt:
            write("Cancelled", "interrupted", "", INTERRUPTED, kwargs.get("as_json") is True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            forget_stdout()
            raise typer.Exit(FAILURE) from None

    return run


def print_error(error: BaseException, verb: str, *, as_json: bool = False) -> int:
    """Write an error of a verb and its hint to stderr, or one JSON object; return the exit code."""
    outcome = map_error(error)
    message = str(error) or type(error).__name__
    if outcome.exit_code == MEMORY and isinstance(error, MemoryError):
        message = "out of memory"
    hints = [getattr(error, "hint", ""), outcome.hint.format(verb=verb)]
    hint = next(filter(None, reversed(hints) if outcome.overrides_hint else hints), "")
    write(type(error).__name__, message, hint, outcome.exit_code, as_json)
    return outcome.exit_code


def tell_usage(error: Any, *, as_json: bool = False) -> int:
    """Write what is wrong with a command line; return the exit code."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else ""
    _, _, verb = path.partition(" ")  # the program may be called otherwise
    hint = f"weft {verb} --help lists the options" if verb else "weft --help lists the verbs"
    code = int(getattr(error, "exit_code", USAGE))
    message = " ".join(str(error.format_message()).split("\n"))
    write("UsageError", message, hint, code, as_json)
    return code


def write(kind: str, message: str, hint: str, code: int, as_json: bool) -> None:
    """Write that the command failed to stderr: a message and a hint, or one JSON object."""
    if as_json:
        told = {"type": kind, "message": message, "hint": hint, "exit_code": code}
        write_object({"error": told}, sys.stderr)
        return
    out = TerminalWriter.for_stream(sys.stderr)
    if code == INTERRUPTED:
        out.line(message)
        return
    out.line(("weft: ", "bold red"), message)
    if hint and hint not in message:
        out.line(("hint: ", "bold"), hint)


def asked_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line that could not be read asks for JSON."""
    return "--json" in itertools.takewhile(lambda each: each != "--", arguments)


def forget_stdout() -> None:
    """Keep Python's own last flush from complaining: nobody reads stdout, or its disk is full."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass


LEVELS = ("debug", "info", "warning", "error")


class ToStderr(logging.Handler):
    """Writes to what is stderr at that moment: a live display puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            name = record.name.removeprefix("weft.")
            message = record.getMessage()
            if record.exc_info and record.levelno >= logging.ERROR:
                message += "\n" + logging.Formatter().formatException(record.exc_info)
            message = escape_controls(message, keep="\n")
            sys.stderr.write(f"{record.levelname.lower()}: {name}: {message}\n")
        except OSError:
            pass


_log = logging.getLogger("weft.prompt")
_show_warning = warnings.showwarning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a PromptWarning without its file and line."""
    if issubclass(category, PromptWarning):
        _log.warning("%s", message)
    else:
        _show_warning(message, category, filename, lineno, file, line)


def configure(verbose: int) -> None:
    """Show the library's logs: warnings; from -v infos, from -vv all. The flag beats WEFT_LOG."""
    chosen = os.environ.get("WEFT_LOG", "").strip().lower() or "warning"
    if verbose:
        chosen = "info" if verbose == 1 else "debug"
    if chosen not in LEVELS:
        raise ConfigError(f"WEFT_LOG is {chosen!r}; allowed are {', '.join(LEVELS)}")
    logger = logging.getLogger("weft")
    for handler in [each for each in logger.handlers if isinstance(each, ToStderr)]:
        logger.removeHandler(handler)
    handler = ToStderr()
    handler.setLevel(chosen.upper())
    logger.addHandler(handler)
    warnings.showwarning = _log_warning
    # Where warnings are enough, the level stays what the program around us says.
    logger.setLevel(chosen.upper() if chosen in ("debug", "info") else logging.NOTSET)
