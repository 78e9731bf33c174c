"""`constraint` of the full text and `line_constraint` of each line, in searches over lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import weft
from searches import by_default
from weft import Loom, samples, search
from weft.constraints import Choice, EachLine, Regex, from_dict
from weft.errors import ConfigError

PROMPT = "Tell me a story about a fox."
LINE = Regex("[A-Za-z ]{4,12}[.]")
SMALL: dict[str, dict[str, Any]] = {
    "tot": {"breadth": 2, "n_continue": 2},
    "smc": {"n": 3},
    "beam": {"width": 2, "n": 2},
    "mcts": {"rounds": 6, "batch": 1, "n_continue": 2},
    "adaptive": {"rounds": 8, "batch": 1},
}


@pytest.mark.parametrize("name", by_default(SMALL))
def test_line_constraint_holds_for_each_line_of_several(lm: weft.LM, name: str) -> None:
    step = Regex(r"[0-9]+ [-+*/] [0-9]+ = [0-9]+ \(left: [0-9]+( [0-9]+)*\)|Answer: [^\n]+")
    result = getattr(search, name)(
        lm, samples.game24, seed=1, propose="continue", line_constraint=step, **SMALL[name]
    )
    assert result.text.count("\n") > 1
    assert result.cost.stopped is None
    for node in result.loom.leaves:
        if node.finish_reason == "stop":
            lines = node.get_prefix_text(1).removesuffix("\n").split("\n")
            assert all(re.fullmatch(step.pattern, line) for line in lines)


@pytest.mark.parametrize("name", by_default(SMALL))
def test_constraint_of_one_line_ends_a_search_and_the_cost_gives_the_reason(
    lm: weft.LM, name: str
) -> None:
    result = getattr(search, name)(
        lm, PROMPT, depth=4, seed=1, max_tokens=30, constraint=LINE, **SMALL[name]
    )
    assert re.fullmatch(LINE.pattern, result.text)
    assert result.cost.stopped == "constraint"
    assert "line_constraint" in str(result.cost)


@pytest.mark.parametrize("order", ["bfs", "dfs"])
@pytest.mark.parametrize("pattern", ["[a-z]{3}\n", "[a-z]{3}\n[a-z]{3}"])
def test_constraint_with_fewer_lines_than_depth_ends_tot(
    lm: weft.LM, order: Any, pattern: str
) -> None:
    options = {"order": order, "depth": 4, "max_tokens": 8, "seed": 1, "answer_tokens": 0}
    result = search.tot(lm, PROMPT, breadth=2, constraint=Regex(pattern), **options)
    assert result.cost.stopped == "constraint"


@pytest.mark.parametrize("pattern", ["[a-z]{3}\n", "[a-z]{3}\n[a-z]{3}"])
@pytest.mark.parametrize("name", by_default(SMALL))
def test_constraint_with_line_end_and_fewer_lines_than_depth_ends_a_search(
    lm: weft.LM, name: str, pattern: str
) -> None:
    result = getattr(search, name)(
        lm,
        PROMPT,
        depth=4,
        seed=1,
        max_tokens=8,
        answer_tokens=0,
        constraint=Regex(pattern),
        **SMALL[name],
    )
    assert re.fullmatch(pattern, result.text) or re.fullmatch(pattern, f"{result.text}\n")
    assert result.cost.stopped == "constraint"


@pytest.mark.parametrize("name", by_default(SMALL))
def test_constraint_with_as_many_lines_as_depth_is_no_reason(lm: weft.LM, name: str) -> None:
    two = Regex("[a-z]{3}\n[a-z]{3}\n")
    result = getattr(search, name)(
        lm, PROMPT, depth=2, seed=1, max_tokens=8, answer_tokens=0, constraint=two, **SMALL[name]
    )
    assert result.cost.stopped is None


def test_paths_that_end_by_choice_under_a_constraint_have_no_reason(lm: weft.LM) -> None:
    lines = Regex("([a-z]{3}\n?)+")
    result = search.beam(lm, PROMPT, depth=4, seed=1, width=2, n=2, max_tokens=8, constraint=lines)
    assert result.cost.stopped is None


@pytest.mark.parametrize("name", by_default(SMALL))
def test_constraint_that_depth_bounds_as_well_is_no_reason(lm: weft.LM, name: str) -> None:
    result = getattr(search, name)(
        lm, PROMPT, depth=1, seed=1, max_tokens=30, constraint=LINE, **SMALL[name]
    )
    assert result.cost.stopped is None


def test_search_of_constrained_lines_resumes_from_its_file(lm: weft.LM, tmp_path: Path) -> None:
    options = {"n": 3, "depth": 2, "seed": 1, "max_tokens": 30, "line_constraint": LINE}
    result = search.smc(lm, PROMPT, resume=tmp_path / "a.loom.json", **options)
    second = search.smc(lm, PROMPT, resume=tmp_path / "a.loom.json", **options)
    assert second.text == result.text
    assert second.log_evidence == result.log_evidence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"line_constraint": LINE, "constraint": LINE}, "leave out one"),
        ({"line_constraint": LINE, "stop": None}, "needs lines that end at a stop string"),
        ({"line_constraint": "[a-z]"}, "allowed is"),
    ],
)
def test_line_constraint_that_cannot_hold_is_an_error(
    lm: weft.LM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        search.tot(lm, PROMPT, **options)


@pytest.mark.parametrize("name", ["best_of_n", "greedy"])
def test_line_constraint_of_full_answers_is_an_error(lm: weft.LM, name: str) -> None:
    with pytest.raises(ConfigError, match=r"line_constraint has no meaning .* give constraint="):
        getattr(search, name)(lm, PROMPT, line_constraint=LINE)


def test_constraint_of_the_full_text_applies_when_another_model_proposes(lm: weft.LM) -> None:
    two = Regex("[a-z]{3,5}\n[0-9]{2}")
    with weft.load("tiny") as other:
        options = {"propose": other, "constraint": two, "n": 1, "depth": 2, "seed": 1}
        result = search.smc(lm, PROMPT, answer_tokens=0, **options)
        assert re.fullmatch(two.pattern, result.text)
        weighed = search.smc(
            lm,
            PROMPT,
            n=40,
            depth=1,
            seed=1,
            propose=other,
            constraint=Choice(["Once zqx", "Near the"]),
        )
    assert weighed.particles[0].text == "Near the"
    assert weighed.log_evidence == pytest.approx(-1.79, abs=0.4)


# Texts that no mask has filtered


@pytest.mark.parametrize("kind", ["constraint", "line_constraint"])
@pytest.mark.parametrize("name", by_default(SMALL))
def test_proposals_of_a_function_that_the_constraint_forbids_are_dropped(
    lm: weft.LM, name: str, kind: str
) -> None:
    options: dict[str, Any] = {kind: Regex("[0-9]+"), "answer_tokens": 6, **SMALL[name]}
    options.pop("n_continue", None)
    result = getattr(search, name)(
        lm,
        "Say:",
        seed=1,
        depth=2,
        propose=lambda nodes: [["zzz\n", "qqq\n"] for _ in nodes],
        value=lambda nodes: [0.9 if "zzz" in node.text else 0.1 for node in nodes],
        **options,
    )
    assert re.fullmatch("[0-9\n]+", result.text)
    assert not any("zzz" in node.text or "qqq" in node.text for node in result.loom.walk())
    assert result.cost.stopped == "constraint"


def test_proposals_of_a_function_that_the_constraint_allows_are_kept(lm: weft.LM) -> None:
    result = search.tot(
        lm,
        "Say:",
        depth=3,
        seed=1,
        constraint=Regex("[a-z]{3}\n[a-z]{3}\n[0-9]{2}"),
        propose=lambda nodes: [["fox\n", "42\n", "42"] for _ in nodes],
        value=lambda nodes: [0.5] * len(nodes),
    )
    assert result.text == "fox\nfox\n42"
    assert [len(node.children) for node in result.best.path[1:]] == [1, 1, 0]
    assert result.cost.stopped is None


def test_line_constraint_keeps_all_lines_of_a_function_that_fit(lm: weft.LM) -> None:
    result = search.mcts(
        lm,
        "Say:",
        depth=2,
        rounds=4,
        seed=1,
        answer_tokens=0,
        line_constraint=Regex("z+"),
        propose=lambda nodes: [["zzz\n", "qqq\n"] for _ in nodes],
        value=lambda nodes: [0.5] * len(nodes),
    )
    assert result.text == "zzz\nzzz"
    assert {node.text for node in result.loom.walk()} - {result.loom.text} == {"zzz\n"}
    assert result.cost.stopped is None


def test_line_end_whose_usual_tokens_contain_text_is_split_from_the_text(lm: weft.LM) -> None:
    """The tokenizer writes " owl" as one token, across the end of the line end."""
    result = search.tot(
        lm,
        "Say:",
        depth=1,
        seed=1,
        stop="; and ",
        line_constraint=Choice(["fox", "owl"]),
        propose=lambda nodes: [["fox; and owl; and ", "fox; and cow; and "] for _ in nodes],
        value=lambda nodes: [0.5] * len(nodes),
    )
    assert [node.text for node in result.loom.children] == ["fox; and owl; and "]
    assert re.fullmatch("(fox|owl)(; and (fox|owl))*(; and ?)?", result.text)


def test_model_continues_the_constraint_after_a_text_of_a_function(lm: weft.LM) -> None:
    two = Regex("[a-z]{3}\n[0-9]{2}")
    result = search.tot(
        lm,
        "Say:",
        depth=1,
        seed=1,
        constraint=two,
        propose=lambda nodes: [["fox\n"] for _ in nodes],
        value=lambda nodes: [0.5] * len(nodes),
    )
    assert re.fullmatch(two.pattern, result.text)
    assert result.text.startswith("fox\n")


@pytest.mark.parametrize("propose", ["both", "suggest"])
@pytest.mark.parametrize("name", ["tot", "mcts", "adaptive"])
def test_steps_of_a_task_fit_the_constraint_and_end_the_search(
    lm: weft.LM, name: str, propose: Any
) -> None:
    step = Regex("[0-9]{1,2} [-+*/] [0-9]{1,2} = [0-9]{1,2}")
    options = {k: v for k, v in SMALL[name].items() if k != "n_continue"}
    result = getattr(search, name)(
        lm,
        samples.game24,
        depth=4,
        seed=1,
        constraint=step,
        propose=propose,
        value=lambda nodes: [0.5] * len(nodes),
        **options,
    )
    texts = [node.get_prefix_text(1) for node in result.loom.leaves]
    assert all(re.fullmatch(step.pattern, text) for text in texts)
    assert result.cost.stopped == "constraint"


def test_search_whose_proposals_were_dropped_has_the_same_cost_from_its_file(
    lm: weft.LM, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "constraint": Regex("[0-9]+"),
        "propose": lambda nodes: [["zzz\n"] for _ in nodes],
        "depth": 2,
        "seed": 1,
        "resume": tmp_path / "a.loom.json",
    }
    result = search.tot(lm, "Say:", **options)
    second = search.tot(lm, "Say:", **options)
    assert second.text == result.text
    assert second.cost.stopped == result.cost.stopped == "constraint"


def test_best_of_n_drops_answers_of_a_function_that_are_incomplete(lm: weft.LM) -> None:
    result = search.best_of_n(
        lm,
        "Say:",
        n=2,
        seed=1,
        constraint=Regex("[0-9]{4}"),
        propose={"own": lambda nodes: [["12", "1234"] for _ in nodes], "model": "continue"},
    )
    texts = {node.text for node in result.loom.children}
    assert "1234" in texts
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts)


# The constraint itself


def test_each_line_is_read_back_as_it_was_written() -> None:
    one = EachLine(Choice(["yes", "no"]), ["\n", ";"])
    assert from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize("ends", [("\n",), ("; and ",), ("\n", "; and ")])
def test_each_line_allows_the_texts_that_its_expression_matches(
    lm: weft.LM, ends: tuple[str, ...]
) -> None:
    """The twin: the same language as one regular expression, and its text cut at random."""
    choice = "(fox|owl|owls)"
    end = "|".join(map(re.escape, ends))
    full = re.compile(f"{choice}(({end}){choice})*({end})?")
    loom = Loom(lm, PROMPT)
    constraint = EachLine(Choice(["fox", "owl", "owls"]), ends)
    new = loom.grow(n=24, max_tokens=40, constraint=constraint, temperature=3.0, seed=2)
    texts = {node.text for node in new if node.terminal}
    assert all(map(full.fullmatch, texts))
    assert any(text.count("o") > 1 for text in texts)
    for node in new:
        matcher = lm.constraints.matcher(constraint)
        for token in node.tokens:
            assert matcher.is_allowed(token)
            matcher.clone().accept(token)
            matcher.accept(token)
        if node.terminal:
            assert matcher.may_end
