"""What vLLM's processes find around them: their log's level, and no program to run again."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType


def settle_environment() -> None:
    """Set vLLM's variables that nobody has set, before it is imported.

    Its log follows Weft's: errors alone, all from -v on. Nothing is reported to anybody.
    """
    level = logging.getLogger("weft").getEffectiveLevel()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if level <= logging.INFO else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def starting(options: Iterable[object]) -> Iterator[None]:
    """Start processes in this block that do not import the caller's program again.

    A program without `if __name__ == "__main__":` would load the model again in each of them.
    options: what they are given; where something of it is of the program, it is imported all the
    same. Warnings to vLLM's developers are not shown, nor what Python's tracker sweeps up behind
    workers that were ended.
    """
    main, before = sys.modules.get("__main__"), os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},ignore" if before else "ignore"
    is_theirs = any(getattr(each, "__module__", "") == "__main__" for each in options)
    if main is not None and not is_theirs:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if main is not None:
            sys.modules["__main__"] = main
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
