"""Names that the page for lloyal.node's users offers exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import weft
from weft import errors
from weft.branch import Rerank, Session

PAGE = (Path(__file__).parents[2] / "docs" / "lloyal.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny", n_ctx=64) as lm:
        yield lm


def offered(section: str) -> set[str]:
    """Return the code spans in the second column of a section's table."""
    cells = re.findall(r"^\| [^|]*\|([^|]*)\|", SECTIONS[section], re.MULTILINE)
    return {span for cell in cells[1:] for span in re.findall(r"`([^`]+)`", cell)}


def test_names_for_the_context_exist(lm: weft.LM) -> None:
    branch = weft.Branch.create(lm)
    branch.prefill(lm.tokenize("Once"))
    homes = (lm, branch, lm.kv, lm.info, weft.BranchStore, weft.AsyncLM, weft)
    options = set(signature(weft.load).parameters)
    spans = offered("The context") - {"prompt.parse(text)", "with weft.load(…) as lm"}
    names = {re.sub(r"[(=\[].*", "", span).rpartition(".")[2] for span in spans}
    assert len(names) > 25
    assert {name for name in names if not any(hasattr(home, name) for home in homes)} <= options
    branch.prune()


@pytest.mark.parametrize("section", ["Branch", "BranchStore"])
def test_names_for_branches_exist(lm: weft.LM, section: str) -> None:
    store = weft.BranchStore(lm)
    branch = weft.Branch.create(lm)
    branch.prefill(lm.tokenize("Once"))
    homes = (branch, store, branch.produce(), weft)
    spans = {span for span in offered(section) if "for piece" not in span and span != "async for"}
    names = {re.sub(r"\(.*", "", span.replace("()", "")).split(".")[-1] for span in spans}
    assert names
    assert {name for name in names if not any(hasattr(home, name) for home in homes)} == set()
    branch.prune()


def test_names_of_sampling_parameters_exist() -> None:
    known = {field.name for field in fields(weft.SamplingParams)}
    assert offered("Sampling parameters") <= known


def test_names_of_session_and_errors_exist() -> None:
    text = SECTIONS["Session, Rerank, errors"]
    named = set(re.findall(r"`([A-Z]\w+)`", text)) - {"TypedErrors", "Error", "Session", "Loom"}
    assert all(hasattr(errors, name) for name in named - {"Rerank"})
    for name in ("promote", "swap", "prefill_user", "commit_turn", "prefill_tool_result"):
        assert hasattr(Session, name)
    assert {"query", "documents", "top"} <= set(signature(Rerank.rank).parameters)
