"""Environment of vLLM's processes: log level, warnings, and the main module."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType


def set_environment_defaults() -> None:
    """Set defaults of vLLM's environment variables before it is imported.

    Its log level follows Weft's: errors only, everything from -v on. Usage reports are off.
    """
    level = logging.getLogger("weft").getEffectiveLevel()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if level <= logging.INFO else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def starting(options: Iterable[object]) -> Iterator[None]:
    """Start worker processes inside this block, without importing the caller's program in them.

    A program without `if __name__ == "__main__":` would load the model again in each process.
    Warnings to vLLM's developers and those of Python's resource tracker are not shown.

    Args:
        options: arguments of the processes. If one is defined in the program, it is imported
            anyway.
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
