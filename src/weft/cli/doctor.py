"""`weft doctor`: what is here, what works, what to install for what."""

from __future__ import annotations

import os
import platform
import sys
import time

import typer

from .. import __version__
from ..errors import WeftError
from . import screen
from .failures import UNAVAILABLE, guarded
from .model import TINY, load_model
from .out import Out

_PLANNED = "mlx, llama.cpp, vLLM and remote servers: planned, not in this version"


@guarded
def doctor() -> None:
    """Show versions, engines, memory and models, and try the embedded model."""
    out = Out.of(sys.stdout)
    _system(out)
    _engines(out)
    works = _embedded(out)
    _on_disk(out)
    if not works:
        raise typer.Exit(UNAVAILABLE)


def _system(out: Out) -> None:
    row(out, "weft", f"{__version__} · Python {platform.python_version()} · {platform.platform()}")
    total, available = memory()
    parts = [f"{os.cpu_count()} cores"]
    if total:
        parts.append(f"{as_gb(total)} of memory")
    if available:
        parts.append(f"{as_gb(available)} available")
    row(out, "machine", " · ".join(parts))
    colour = "colour" if out.console.color_system and not out.console.no_color else "no colour"
    shape = "ASCII trees" if out.is_ascii else "line-drawing trees"
    row(out, "output", f"{out.console.encoding} · {shape} · {colour}")


def _engines(out: Out) -> None:
    numpy, torch, transformers = map(screen.installed, ("numpy", "torch", "transformers"))
    row(out, "engines", ("✓ ", "green"), f"numpy {numpy}: the embedded model, Llama-family folders")
    if screen.has_torch():
        found = f"torch {torch}, transformers {transformers}: most models of the Hub"
        row(out, "", ("✓ ", "green"), found)
    else:
        row(out, "", ("- ", "yellow"), "no torch with transformers: most models of the Hub need it")
        row(out, "", '  pip install "weft[torch]"; in the repository: pip install ".[torch]"')
    row(out, "", ("- " + _PLANNED, "dim"))


def _embedded(out: Out) -> bool:
    """Load the embedded model and run it for one token."""
    try:
        began = time.perf_counter()
        with load_model(TINY) as lm:
            loaded = time.perf_counter()
            token = _one_token(lm)
            ran = time.perf_counter()
    except (WeftError, OSError) as error:
        row(out, "model", ("x ", "red"), f"tiny does not work: {error}")
        row(out, "", "  install weft again; its embedded model is part of the package")
        return False
    load_s, run_ms = loaded - began, 1000 * (ran - loaded)
    row(
        out,
        "model",
        ("✓ ", "green"),
        f"tiny loads in {load_s:.2f} s, prompt and 1 token ({token!r}) in {run_ms:.0f} ms",
    )
    return True


def _one_token(lm: object) -> str:
    from .. import samples
    from ..lm import LM
    from ..loom import Loom

    assert isinstance(lm, LM)
    return Loom(lm, samples.greeting).grow(max_tokens=1, temperature=0.0)[0].text


def _on_disk(out: Out) -> None:
    from huggingface_hub import constants

    names = screen.cached_models()
    where = constants.HF_HUB_CACHE
    row(out, "cache", f"{where}: {len(names)} models" if names else f"{where}: no models yet")
    for name in names:
        row(out, "", f"  weft run -m {name} …")
    row(out, "get one", "hf download ORG/NAME --local-dir ./folder, then weft run -m ./folder …")


def row(out: Out, title: str, *parts: str | tuple[str, str]) -> None:
    """Write one row of the report."""
    out.line((f"{title:<9}", "bold"), *parts)


def as_gb(n_bytes: int) -> str:
    """Return a size in GB, as sold."""
    return f"{n_bytes / 1e9:.1f} GB"


def memory() -> tuple[int, int]:
    """Return the bytes of memory in all and available; 0 where the system does not tell."""
    if sys.platform == "win32":
        return _windows_memory(), 0
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0, 0
    try:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # macOS does not tell
        return total, 0


def _windows_memory() -> int:
    import ctypes

    if sys.platform != "win32":
        return 0
    kilobytes = ctypes.c_ulonglong(0)
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
    return kilobytes.value * 1024
