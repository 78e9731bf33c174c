"""Recipes have at most 20 lines; programs of recipes, guides and API print what pages show."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from real_models import SMOLLM2_FOLDER, SMOLLM2_GGUF, real_model
from tools import outputs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "cookbook"
RECIPES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
GUIDES = [
    *(ROOT / f"docs/tutorials/{name}.md" for name in ("probabilistic-program", "real-model")),
    ROOT / "docs" / "asynclm.md",
]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
each_recipe = pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> outputs.Place:
    paths = [ROOT / "src", ROOT / "plugins" / "lm-eval-weft"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return outputs.Place(ROOT, outputs.scratch(tmp_path), Path(sys.executable).parent)


@each_recipe
def test_program_of_a_recipe_has_20_lines_or_fewer_and_an_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    programs = PROGRAM.findall(text)
    assert programs
    for program in programs:
        assert len([line for line in program.splitlines() if line.strip()]) <= 20
        assert re.match(r"```\n+```text\n.+\n", text.split(program, 1)[1])


def test_list_of_recipes_names_each_once() -> None:
    named = re.findall(r"\]\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == [page.name for page in RECIPES]


@pytest.mark.programs
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or os.name == "nt", reason="texts of x86-64 POSIX"
)
@pytest.mark.parametrize("page", [*RECIPES, *GUIDES, *API], ids=lambda page: page.stem)
def test_program_of_a_page_prints_the_output_below_it(page: Path, place: outputs.Place) -> None:
    results = outputs.outputs(page.read_text("utf-8"), place)
    if not results:
        pytest.skip(f"{page.stem} needs a package that is not installed")
    for result in results:
        shown, now = map(outputs.without_times, (result.shown, result.now))
        assert shown == now, f"run `python -m tools.outputs {page.relative_to(ROOT)}`"


@pytest.mark.models
@pytest.mark.programs
@each_recipe
def test_program_of_a_recipe_runs_with_a_real_model(page: Path, place: outputs.Place) -> None:
    model = real_model(SMOLLM2_FOLDER if page.stem == "lora" else SMOLLM2_GGUF)
    text = page.read_text("utf-8")
    for tiny, real in (
        ('load("tiny"', f'load("{model}"'),
        ('resolve("tiny")', f'"{model}"'),
        ('model="tiny"', f'model="{model.name}"'),  # the name of the model on a server
        ("#tiny", f"#{model.name}"),
        ("model=tiny,", f"model={model},"),
    ):
        text = text.replace(tiny, real)
    results = outputs.outputs(text, place._replace(model=str(model)))
    if not results:
        pytest.skip(f"{page.stem} needs a package that is not installed")
    assert all(result.now.strip() for result in results)
