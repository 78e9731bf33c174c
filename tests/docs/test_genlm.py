"""Names on the page for genlm-backend's users, and in its reference, exist; its program runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest

import forks
import weft
from weft.compat import genlm
from weft.compat.genlm.models import GenlmModel
from weft.engines.hub import resolve

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "genlm.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "api" / "genlm.md").read_text(encoding="utf-8")
HAS_GENLM = find_spec("genlm") is not None and find_spec("genlm.control") is not None


def names(page: str, section: str) -> Iterator[tuple[str, bool]]:
    """Yield the names in the first column of a section's table, and True if Weft has them.

    Calls are without arguments, and dotted names without the class.
    """
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|(.*)\|$", text, re.MULTILINE)
    for cell, differences in rows:
        cell = re.sub(r":\s+`\([^|]*", "", cell)  # the values that a call returns
        for name in re.findall(r"`(?:\w*\.)?(\w+)(?:\([^`]*\))?`", cell):
            yield name, not re.search(r"^[^.]*\bnot available\b", differences)


@pytest.fixture(scope="module")
def model() -> Iterator[GenlmModel]:
    with weft.load("tiny", n_ctx=64) as lm:
        yield GenlmModel(lm, batch_size=None, timeout=0)


def homes(model: GenlmModel) -> list[object]:
    """Return the module, its classes, and objects of them."""
    tokens = [genlm.Token(0, b"a"), genlm.Token(1, b"b")]
    classes = [getattr(genlm, name) for name in genlm.__all__ if name[0].isupper()]
    return [genlm, model, *classes, genlm.TokenCharacterTrie(tokens), tokens[0], genlm.TokenTrie()]


@pytest.mark.parametrize(
    ("page", "section"),
    [(PAGE, "Loading"), (PAGE, "AsyncLM"), (REFERENCE, "Names of caches and tries")],
    ids=["loading", "asynclm", "caches-and-tries"],
)
def test_names_in_a_table_exist_unless_it_calls_them_not_available(
    model: GenlmModel, page: str, section: str
) -> None:
    listed = dict(names(page, section)) | {"None": False}
    assert len(listed) > 6
    places = homes(model)
    available = {name for name in listed if any(hasattr(place, name) for place in places)}
    assert available == {name for name, is_offered in listed.items() if is_offered}


def test_every_exported_name_is_on_a_page() -> None:
    missing = {name for name in genlm.__all__ if not re.search(rf"\b{name}\b", PAGE + REFERENCE)}
    assert missing == set()


@pytest.mark.parametrize(
    ("call", "page"),
    [
        ("load_model_by_name", PAGE),
        ("OutputCache", REFERENCE),
        ("decode_vocab", REFERENCE),
        ("TokenCharacterTrie", REFERENCE),
        ("ParallelTokenCharacterTrie", REFERENCE),
        ("AsyncTokenCharacterTrie", REFERENCE),
    ],
)
def test_call_takes_the_parameters_in_the_order_of_the_page(call: str, page: str) -> None:
    shown = re.search(rf"`{call}\(([^)`]*)\)", page)
    assert shown is not None
    parameters = [part.partition("=")[0].strip() for part in shown[1].split(",")]
    assert list(signature(getattr(genlm, call)).parameters)[: len(parameters)] == parameters


@pytest.mark.programs
@pytest.mark.skipif(not HAS_GENLM, reason="genlm-control is not installed")
def test_program_with_genlm_control_runs(tmp_path: Path) -> None:
    block = re.search(r"^```text\n(import weft\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    shutil.copytree(resolve("tiny"), tmp_path / "folder")
    done = forks.run(block[1] + "assert len(llm.vocab) > 2_000\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
