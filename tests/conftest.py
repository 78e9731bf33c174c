"""Skips tests whose marker names a package or device that is not here, and says why."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import re
import signal
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path

# Small products: BLAS threads that wait for each other cost more than they give, above all on a
# machine that is doing something else as well. Read when the libraries are first loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Without a card Triton's kernels run in its interpreter. Read when triton is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Many tests start a new Python process, which needs Weft compiled, as an installed Weft is.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts background jobs with Ctrl-C ignored; the tests of Ctrl-C need it as a user has it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from cases import covering

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the contract is also run where there is only pytest
    settings = None

# By default the collector runs after each 700 new objects, which takes a tenth of the CPU time.
# Tests of freed objects call the collector themselves.
gc.set_threshold(50_000, 20, 20)

# The tests themselves are compiled by the first run only.
sys.dont_write_bytecode = False

# No test is about the time of an example, and each run has the same examples, so that a release
# does not fail by an example that no other run has.
if settings is not None:
    settings.register_profile(
        "weft",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("weft")

PACKAGES = {
    "torch": ("torch", "transformers"),
    "gpu": ("torch", "transformers"),
    "kernels": ("torch", "transformers", "triton"),
    "mlx": ("mlx_lm",),
    "llamacpp": ("llama_cpp",),
    "vllm": ("vllm",),
}


HERE = Path(__file__).parent

# What a test draws without a seed is the same in each run, too: Weft takes its seeds from here.
ENTROPY = random.Random()

# Left to `make test-engines`: a test with one of these markers, or with one as a parameter.
OPTIONAL = ("mlx", "llamacpp", "vllm", "remote")
# Markers of the groups that the default run leaves out.
GROUPS = frozenset({"slow", "engines", "kernels", "programs", "page", "models"})
_PYTESTMARK = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)$", re.MULTILINE)
_MARKER = re.compile(r"pytest\.mark\.(\w+)")
# Folders of which the default run has all cases.
ALL_CASES = (HERE / "core" / "kv", HERE / "core" / "sampling")
# And the laws on torch without KV reuse and on a fake with its own loop, which take twice as long.
ROUNDABOUT = ("whole", "ownloop")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without tests of the group that is run, to import no library for nothing."""
    expression, name = config.option.markexpr, collection_path.name
    if name in ("page", "models") and collection_path.parent == HERE:  # all tests of such a group
        return True if f"not {name}" in expression else None
    if name.startswith("test_") and not GROUPS.isdisjoint(_excluded(collection_path, expression)):
        return True
    if not (expression.startswith("kernels") and name.startswith("test_")):
        return None
    # In tests/contract the word "paged" is a parameter.
    if collection_path.parent == HERE / "contract":
        return None
    text = collection_path.read_text("utf-8")
    return None if "kernels" in text or "paged" in text else True


def _excluded(file: Path, expression: str) -> set[str]:
    """Return the groups to which all tests of a file belong, if `expression` leaves them out."""
    match = _PYTESTMARK.search(file.read_text("utf-8"))
    names = set(_MARKER.findall(match[0])) if match else set()
    groups = names | {"engines" for name in names if name in OPTIONAL}
    if file.name == "test_fuzz.py":  # it imports schemathesis
        groups.add("programs")
    return {group for group in groups if f"not {group}" in expression}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test-engines` and `test-kernels` run, however a test names its engine."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if any(isinstance(each, str) and each == "paged" for each in params):
        item.add_marker("kernels")
    if any(isinstance(each, str) and each in ROUNDABOUT for each in params):
        item.add_marker("engines")
    for name in OPTIONAL:
        if any(isinstance(each, str) and each == name for each in params):
            item.add_marker(name)
        if item.get_closest_marker(name):
            item.add_marker("engines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        default="",
        metavar="NAME",
        help="draw other seeds where a test gives none; the same name draws the same again",
    )
    parser.addoption(
        "--engine",
        metavar="MODULE:CLASS",
        help="show the laws of tests/contract on this engine instead of Weft's own",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--engine"):
        _mark_products(items)
    reasons = {
        marker: _why_not(marker)
        for marker in PACKAGES
        if any(item.get_closest_marker(marker) for item in items)
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _mark_products(items: list[pytest.Item]) -> None:
    """Mark all cases of a product of parameters as `programs`, except a covering selection."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_product = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        is_default = GROUPS.isdisjoint(mark.name for mark in item.iter_markers())
        if is_product and is_default and not any(map(item.path.is_relative_to, ALL_CASES)):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        chosen = covering([_axes(item) for item in cases])
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker("programs")


def _axes(item: pytest.Function) -> dict[str, Hashable]:
    """Return the value of each `parametrize` of a case, a tuple for several parameters."""
    values = dict(item.callspec.params)
    axes: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes[" ".join(names)] = tuple(id(values.pop(name.strip(), None)) for name in names)
    return {**axes, **{name: id(value) for name, value in values.items()}}


def pytest_sessionfinish() -> None:
    if (forks := sys.modules.get("forks")) is not None:
        forks.close()


def pytest_sessionstart() -> None:
    from weft._core.sampling import rng

    rng.urandom = ENTROPY.randbytes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    ENTROPY.seed(item.config.option.seeds + item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Read the embedded model's weights and tokenizer once."""
    if importlib.util.find_spec("threadpoolctl") is not None:  # else there is no NumPy engine
        import warm

        warm.keep_weights()
        warm.keep_tokenizer()


@pytest.fixture(scope="module", autouse=True)
def _young() -> None:
    """Let the collector pass over what is there already: libraries, the tests themselves.

    Many tests ask it whether something is really gone, and it would look at all of that each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def short_load_checks() -> Iterator[None]:
    """Let the torch engine check kernels with fewer tokens in Triton's interpreter."""
    if _why_not("kernels"):
        yield
        return
    from load_checks import shortened

    with shortened():
        yield


@pytest.fixture(scope="module")
def one_load_check() -> Iterator[None]:
    """Let the torch engine check equal models at their first load only."""
    from load_checks import once_for_equal_models

    with once_for_equal_models():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in one line which engines are installed, and why tests of the others were skipped."""
    missing = {marker: _why_not(marker) for marker in PACKAGES}
    states = [f"{marker} {f'skipped: {why}' if why else 'here'}" for marker, why in missing.items()]
    terminalreporter.write_line("engines: numpy here · " + " · ".join(states))


@pytest.fixture(scope="session")
def type_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of mypy's cache, shared by all tests that run mypy."""
    return str(tmp_path_factory.mktemp("mypy"))


def _why_not(marker: str) -> str:
    for package in PACKAGES[marker]:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if marker == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device here"
    return ""
