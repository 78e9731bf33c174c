"""What vLLM's processes find around them: their log's level, and no program to run again."""

from __future__ import annotations

import logging
import os
import sys
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
def no_main(options: Iterable[object]) -> Iterator[None]:
    """Let processes that are started in this block not import the caller's program again.

    A program without `if __name__ == "__main__":` would load the model again in each of them.
    options: what they are given; where something of it is of the program, it is imported all the
    same.
    """
    main = sys.modules.get("__main__")
    if main is None or any(getattr(each, "__module__", "") == "__main__" for each in options):
        yield
        return
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
