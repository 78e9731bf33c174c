"""The Python of every page runs, block after block, as a reader would run it."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import forks
import warm
from weft.engines.hub import resolve

ROOT = Path(__file__).parents[2]
TORCH, MLX = "# needs torch", "# needs mlx"
TORCHAO = "# needs torchao"
SERVER = "# needs a server"  # tests/engines/test_remote.py runs these
HAS_TORCHAO = all(map(find_spec, ("torchao", "accelerate")))
STRICT = """
import warnings
warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
"""


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    listings = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for block in listings if HAS_TORCHAO or not block.startswith(TORCHAO)]


# test_recipes.py runs the recipes, the API pages and three guides, and compares their outputs.
RUN_ELSEWHERE = ("probabilistic-program", "real-model", "asynclm")
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if blocks(page)
    and page.parent.name not in ("cookbook", "api")
    and page.stem not in RUN_ELSEWHERE
]
WITH_TORCH = [page for page in PAGES if any(b.startswith(TORCH) for b in blocks(page))]
WITH_MLX = [page for page in PAGES if any(b.startswith(MLX) for b in blocks(page))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to work in, with a model in ./folder, as pages have it."""
    shutil.copytree(resolve("tiny"), tmp_path / "folder")
    return tmp_path


def test_guides_have_code() -> None:
    assert {"concepts", "first-tree", "loom", "models", "n8loom", "search"} <= {
        page.stem for page in PAGES
    }


@pytest.mark.programs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_runs(page: Path, place: Path) -> None:
    apart = (TORCH, MLX, SERVER)
    # Two layers never solve the task of a search, and never draw the end token of a branch.
    layers = {} if page.stem in ("search", "first-tree", "branch") else {warm.LAYERS: "2"}
    code = [block for block in blocks(page) if not block.startswith(apart)]
    run(code, place, {**forks.base(), **layers})


@pytest.mark.torch
@pytest.mark.engines
@pytest.mark.parametrize("page", WITH_TORCH, ids=lambda page: page.stem)
def test_code_of_a_page_runs_with_torch(page: Path, place: Path) -> None:
    run([block for block in blocks(page) if not block.startswith(MLX)], place)


@pytest.mark.mlx
@pytest.mark.parametrize("page", WITH_MLX, ids=lambda page: page.stem)
def test_code_of_a_page_runs_with_mlx(page: Path, place: Path) -> None:
    run([block for block in blocks(page) if not block.startswith(TORCH)], place)


def run(parts: list[str], place: Path, env: dict[str, str] | None = None) -> None:
    done = forks.run(STRICT + "\n".join(parts), cwd=place, env=env)
    assert done.returncode == 0, done.stderr
