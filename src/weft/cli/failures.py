"""Report errors of the command: a message, a hint and an exit code instead of a traceback."""

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
# The base class of parsing errors: click.UsageError, which some Typer versions vendor.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def handle_errors(verb: Callable[Args, None]) -> Callable[Args, None]:
    """Decorate a verb: turn its errors into a message on stderr and an exit code.

    The verb's parameters `verbose` (log level) and `as_json` (errors as JSON) are respected.
    """

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
    """Write an error and its hint to stderr, and return the exit code for it.

    Args:
        error: the error.
        verb: the verb that failed, such as "run"; some hints name it.
        as_json: write one JSON object.
    """
    outcome = map_error(error)
    message = str(error) or type(error).__name__
    if outcome.exit_code == MEMORY and isinstance(error, MemoryError):
        message = "out of memory"
    hints = [getattr(error, "hint", ""), outcome.hint.format(verb=verb)]
    hint = next(filter(None, reversed(hints) if outcome.overrides_hint else hints), "")
    write(type(error).__name__, message, hint, outcome.exit_code, as_json)
    return outcome.exit_code


def print_usage_error(error: Any, arguments: Sequence[str]) -> int:
    """Write an error in the command line to stderr, and return the exit code for it.

    Args:
        error: a `UsageError` of Typer.
        arguments: the command line, without the program's name. With --json, the error is JSON.
    """
    if getattr(error, "ctx", None) is not None:
        _, _, verb = error.ctx.command_path.partition(" ")  # without the program's name
    else:  # an option without its value
        verb = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    hint = f"weft {verb} --help lists the options" if verb else "weft --help lists the verbs"
    code = int(getattr(error, "exit_code", USAGE))
    message = " ".join(str(error.format_message()).split("\n"))
    write("UsageError", message, hint, code, wants_json(arguments))
    return code


def write(kind: str, message: str, hint: str, code: int, as_json: bool) -> None:
    """Write a failure to stderr: message and hint, or one JSON object. The process continues.

    Args:
        kind: name of the error's class, for JSON.
        message: the error message.
        hint: what the user can do; "" for none.
        code: the exit code that the caller will use.
        as_json: write one JSON object.
    """
    if as_json:
        error = {"type": kind, "message": message, "hint": hint, "exit_code": code}
        write_object({"error": error}, sys.stderr)
        return
    out = TerminalWriter.for_stream(sys.stderr)
    if code == INTERRUPTED:
        out.line(message)
        return
    out.line(("weft: ", "bold red"), message)
    if hint and hint not in message:
        out.line(("hint: ", "bold"), hint)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True if the arguments contain --json. For a command line that cannot be parsed."""
    return "--json" in itertools.takewhile(lambda argument: argument != "--", arguments)


def forget_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python's final flush does not fail again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass


LEVELS = ("debug", "info", "warning", "error")


class StderrHandler(logging.Handler):
    """Write log records to the current `sys.stderr`, which a live display replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
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
    """Log a PromptWarning without its file and line; show other warnings as usual.

    The signature is that of `warnings.showwarning`, which this function replaces.
    """
    if issubclass(category, PromptWarning):
        _log.warning("%s", message)
    else:
        _show_warning(message, category, filename, lineno, file, line)


def configure(verbose: int) -> None:
    """Configure log output on stderr.

    verbose: how often -v was given: 1 logs infos, 2 logs everything. 0 takes the level in
    WEFT_LOG, which is "warning" by default.
    Raises: ConfigError for a wrong WEFT_LOG.
    """
    chosen = os.environ.get("WEFT_LOG", "").strip().lower() or "warning"
    if verbose:
        chosen = "info" if verbose == 1 else "debug"
    if chosen not in LEVELS:
        raise ConfigError(f"WEFT_LOG is {chosen!r}; allowed are {', '.join(LEVELS)}")
    logger = logging.getLogger("weft")
    for handler in [each for each in logger.handlers if isinstance(each, StderrHandler)]:
        logger.removeHandler(handler)
    handler = StderrHandler()
    handler.setLevel(chosen.upper())
    logger.addHandler(handler)
    warnings.showwarning = _log_warning
    # Without -v the level stays as the calling program has set it.
    logger.setLevel(chosen.upper() if chosen in ("debug", "info") else logging.NOTSET)
