"""`weft models`: the models that are here, and how to get one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len

from .. import samples
from ..errors import EngineError, ModelLoadError
from . import advice, objects, options, screen
from .failures import guarded
from .model import TINY
from .out import Out


class Found(NamedTuple):
    """A model on disk. kind: its architecture; lacks: why it cannot be loaded as it is."""

    name: str
    n_bytes: int
    kind: str
    lacks: str = ""


@guarded
def models(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """List the embedded model and those in the Hub's cache."""
    found = [embedded(), *map(cached, screen.cached_models())]
    if as_json:
        rows = [as_object(each) for each in found]
        objects.write({"cache": cache_folder(), "models": rows})
        return
    from ..stats import format_bytes

    out = Out.of(sys.stdout)
    width = max(cell_len(each.name) for each in found)
    for each in found:
        name = each.name + " " * (width - cell_len(each.name))
        size = format_bytes(each.n_bytes)
        lacks = (f"  {each.lacks}", "yellow") if each.lacks else ""
        out.line((name, "cyan"), f"  {size:>8}  {each.kind}", lacks)
    out.line()
    out.line(("cache    ", "bold"), cache_folder())
    out.line(("get one  ", "bold"), "hf download ORG/NAME --local-dir ./folder")
    out.line(("use it   ", "bold"), "weft run -m ./folder …, or WEFT_MODEL=./folder for all")
    ready = next((each.name for each in found[1:] if not each.lacks), TINY)
    advice.suggest(["weft", "run", "-m", ready, samples.story, "-n", "4"])


def embedded() -> Found:
    """Return the embedded model."""
    import importlib.resources

    folder = Path(str(importlib.resources.files("weft") / "data" / TINY))
    return _described(TINY, folder)._replace(kind="embedded; a small demo model")


def cached(name: str) -> Found:
    """Return a model of the Hub's cache: the snapshot that was changed last."""
    snapshots = Path(cache_folder()) / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        newest = max(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime, default=None)
    except OSError:
        newest = None
    return Found(name, 0, "", "nothing downloaded") if newest is None else _described(name, newest)


def cache_folder() -> str:
    """Return the Hub's cache."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def as_object(found: Found) -> dict[str, Any]:
    """Return one model for --json."""
    return {
        "name": found.name,
        "bytes": found.n_bytes,
        "architecture": found.kind,
        "ready": not found.lacks,
        "lacks": found.lacks or None,
    }


def _described(name: str, folder: Path) -> Found:
    from ..engines.checkpoint import architectures, read_config

    try:
        files = [file for file in folder.iterdir() if file.is_file()]
        n_bytes = sum(file.stat().st_size for file in files)
        config = read_config(folder)
        kind = (architectures(config) or [str(config.get("model_type", ""))])[0]
    except (OSError, ModelLoadError):
        return Found(name, 0, "", "no config.json that can be read")
    if not any(file.suffix == ".safetensors" for file in files):
        return Found(name, n_bytes, kind, "no safetensors weights")
    return Found(name, n_bytes, kind, "" if _can_run(folder) else "needs torch; see weft doctor")


def _can_run(folder: Path) -> bool:
    from ..loading import choose_engine

    try:
        return bool(choose_engine(folder, folder))
    except EngineError:
        return False
