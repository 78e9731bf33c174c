"""-v and WEFT_LOG: what the library logs, on stderr."""

from __future__ import annotations

import logging
import os
import sys

from ..errors import ConfigError
from ..viz.escape import visible

LEVELS = ("debug", "info", "warning", "error")


class ToStderr(logging.Handler):
    """Writes to what is stderr at that moment: a live display puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            name = record.name.removeprefix("weft.")
            message = visible(record.getMessage(), keep="\n")
            sys.stderr.write(f"{record.levelname.lower()}: {name}: {message}\n")
        except OSError:
            pass


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
    # Where warnings are enough, the level stays what the program around us says.
    logger.setLevel(chosen.upper() if chosen in ("debug", "info") else logging.NOTSET)
