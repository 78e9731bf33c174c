"""Lines that a task's `state` rejects: no search continues them or prefers one as its answer."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from searches import DEEP, by_default, call
from weft import Heddle
from weft.search import STRATEGIES, SearchResult
from weft.search.task import Lines

PROMPT = "Name a colour."


class NoErrors(weft.search.Task):
    """A task that rejects lines with the word "wrong"."""

    def state(self, lines: Lines) -> Lines | None:
        return None if lines and "wrong" in lines[-1] else lines


def value(text: str) -> float:
    """Score a path by the number of its wrong lines, so that a rejected line has the best score."""
    return text.count("wrong") / 8 + 0.1


def propose(node: Heddle) -> list[str]:
    return ["wrong\n", "right\n"]


def run(name: str, lm: weft.LM, **options: Any) -> SearchResult:
    given: dict[str, Any] = {
        "task": NoErrors(),
        "value": value,
        "propose": propose,
        "answer_tokens": 0,
        "depth": 3,
        "seed": 1,
    }
    if name in ("mcts", "adaptive"):
        given["rounds"] = 8
    result: SearchResult = call(name)(lm, PROMPT, **{**STRATEGIES[name].fixed, **given, **options})
    return result


def is_wrong(node: Heddle) -> bool:
    return "wrong" in node.text


NAMES = [name for name in DEEP if name != "smc"]  # its potential rules lines out


@pytest.mark.parametrize("name", [*by_default(NAMES)])
def test_rejected_line_is_not_continued_and_not_the_answer(name: str, lm: weft.LM) -> None:
    result = run(name, lm)
    rejected = [node for node in result.loom.walk() if is_wrong(node)]
    assert rejected
    assert not any(node.children for node in rejected)
    assert not is_wrong(result.best)
    assert result.best.text == "right\n"


def test_tot_dfs_continues_after_a_rejected_full_path(lm: weft.LM) -> None:
    def wrong_last(node: Heddle) -> list[str]:
        return ["wrong\n"] if "first" in node.text else ["first\n", "second\n"]

    def prefers_first(text: str) -> float:
        return float(text.startswith("first"))

    options: dict[str, Any] = {"propose": wrong_last, "value": prefers_first, "depth": 2}
    result = run("tot-dfs", lm, **options)
    (second,) = (node for node in result.loom.children if node.text == "second\n")
    assert [node.text for node in second.children] == ["first\n", "second\n"]


def test_beam_answers_with_the_last_allowed_level_if_all_further_lines_are_rejected(
    lm: weft.LM,
) -> None:
    def right_first(node: Heddle) -> list[str]:
        return ["wrong\n"] if "right" in node.text else ["right\n", "wrong\n"]

    assert run("beam", lm, propose=right_first).text == "right"


def test_only_rejected_lines_leave_the_best_of_them_or_the_prompt(lm: weft.LM) -> None:
    for name in NAMES:
        result = run(name, lm, propose=lambda node: ["wrong\n"])
        assert result.text in ("wrong", "")
