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
    bytecodes: list[Where] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in places:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            bytecodes.append((frame.f_code.co_name, frame.f_lineno))
            if len(bytecodes) == at + 1:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    # Streams of earlier trials end now, so that none is collected during the trial.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        yield bytecodes
    finally:
        sys.settrace(before)
        gc.enable()
        signal.signal(signal.SIGINT, handler)


def between_lines(bytecodes: list[Where], functions: tuple[str, ...]) -> list[int]:
    """Return the first bytecode of each line of some functions, at its last turn."""
    new = [i for i, where in enumerate(bytecodes) if i == 0 or bytecodes[i - 1] != where]
    return sorted({bytecodes[i]: i for i in new if bytecodes[i][0] in functions}.values())


def quick_collections() -> None:
    """Let `interrupted` collect only what comes from here on.

    Nothing is thawed afterwards: the next test would have to look at all of it again.
    """
    gc.collect()
    gc.freeze()
