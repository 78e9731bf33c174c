"""Ctrl-C, pressed at a given bytecode."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import weft

PACKAGE = Path(weft.__path__[0])
Where = tuple[str, int]  # function and line


@contextmanager
def interrupted(files: Sequence[str], at: int = -1) -> Iterator[list[Where]]:
    """Press Ctrl-C before the nth bytecode of some files of the package.

    The list says where the bytecodes are.
    """
    places = tuple(str(PACKAGE / file) for file in files)
    seen: list[Where] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in places:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.append((frame.f_code.co_name, frame.f_lineno))
            if len(seen) == at + 1:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    # Streams of earlier trials end now: what a collected one is told is told to nobody.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)
        gc.enable()
        signal.signal(signal.SIGINT, handler)


def between_lines(seen: list[Where], functions: tuple[str, ...]) -> list[int]:
    """Return the first bytecode of each line of some functions, at its last turn."""
    new = [i for i, where in enumerate(seen) if i == 0 or seen[i - 1] != where]
    return sorted({seen[i]: i for i in new if seen[i][0] in functions}.values())


def quick_collections() -> None:
    """Let `interrupted` collect only what comes from here on.

    Nothing is thawed afterwards: the next test would have to look at all of it again.
    """
    gc.collect()
    gc.freeze()
