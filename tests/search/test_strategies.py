"""The table of strategies: what a command needs to know, once."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
from typing import Literal

import pytest

import weft
from searches import by_default
from weft import samples, search
from weft.errors import ConfigError
from weft.search import STRATEGIES, Strategy, strategies
from weft.search.other_libraries import options_for
from weft.search.strategies import (
    DEFAULT,
    FOR_TASKS,
    Count,
    default_for,
    defaults,
    estimate,
    meanings,
)


def test_rows_name_existing_searches() -> None:
    for name, row in STRATEGIES.items():
        assert row.name == name
        assert callable(getattr(search, row.call))
        assert callable(getattr(search, f"a{row.call}"))
    assert {row.call for row in STRATEGIES.values()} == {
        name for name in dir(search) if f"a{name}" in dir(search)
    }


def test_rows_list_the_keywords_and_defaults_of_their_searches() -> None:
    for row in STRATEGIES.values():
        taken = inspect.signature(getattr(search, row.call)).parameters
        for count in (row.breadth, row.n):
            assert count is None or set(count.keywords) <= set(taken)
        if row.breadth is not None:
            assert [taken[name].default for name in row.breadth.keywords] == [row.breadth.default]
        if "n" in taken:
            assert row.n is not None


def test_meanings_of_numbers_are_written_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few, wide = Count("paths", ("few",), 8), Count("paths", ("wide",), 5)
    rows = [
        Strategy("one", "", "", call="one", breadth=few, n=Count("lines", ("n",))),
        Strategy("two", "", "", call="two", breadth=few),
        Strategy("tot", "", "", call="tot", breadth=wide),
        Strategy("three", "", "", call="three", breadth=Count("nodes", ("batch",), 2)),
        Strategy("four", "", "", call="four", breadth=wide),
    ]
    monkeypatch.setattr(strategies, "STRATEGIES", {row.name: row for row in rows})
    assert meanings("breadth") == "Paths (one, two, tot, four); or nodes (three)."
    assert meanings("n") == "Lines (one)."
    assert defaults("breadth") == "5; 8 for one and two, 2 for three"
    assert defaults("n") == ""


def test_meaning_of_each_number_lists_every_strategy_that_takes_it() -> None:
    numbers: tuple[Literal["breadth", "n"], ...] = ("breadth", "n")
    for number in numbers:
        rows = {row.name for row in STRATEGIES.values() if number not in row.unused()}
        listed = re.findall(r"\(([^)]*)\)", meanings(number))
        assert {each for part in listed for each in part.split(", ")} == rows
    usual = STRATEGIES[FOR_TASKS].breadth
    assert usual is not None
    assert defaults("breadth").partition("; ")[0] == str(usual.default)
    for row in STRATEGIES.values():
        if row.breadth is not None and row.breadth.default != usual.default:
            assert re.search(
                rf"\b{row.breadth.default} for [^,]*\b{row.name}\b", defaults("breadth")
            )


def test_row_runs_its_search_with_its_own_names_for_the_numbers(lm: weft.LM) -> None:
    row = STRATEGIES["tot-dfs"]
    assert row.options(breadth=2, n=3, seed=1) == {
        "order": "dfs",
        "breadth": 2,
        "n_continue": 3,
        "n_suggest": 3,
        "seed": 1,
    }
    assert STRATEGIES["beam"].options(breadth=2) == {"width": 2}
    by_row = row.run(lm, samples.game24, breadth=1, n=2, seed=1)
    by_call = search.tot(
        lm, samples.game24, order="dfs", breadth=1, n_continue=2, n_suggest=2, seed=1
    )
    assert by_row.text == by_call.text


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_number_that_a_strategy_does_not_use_raises(row: Strategy, lm: weft.LM) -> None:
    for name in row.unused():
        with pytest.raises(ConfigError, match=f"{name} has no meaning for {row.name}"):
            row.run(lm, samples.sum, **{name: 2})  # type: ignore[arg-type]
    assert row.rejected(row.neutral) == []
    if row.n is not None:
        with pytest.raises(ConfigError, match="n is 0"):
            row.run(lm, samples.sum, n=0)


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_contradicting_options_raise(row: Strategy) -> None:
    for name, value in row.fixed.items():
        assert row.options(**{name: value}) == row.options()
        with pytest.raises(ConfigError, match=f"{name} is {value!r} for {row.name}; leave it out"):
            row.options(**{name: "another"})  # type: ignore[arg-type]
    counts: dict[str, Count | None] = {"breadth": row.breadth, "n": row.n}
    for name, count in counts.items():
        for keyword in () if count is None else count.keywords:
            if keyword != name:
                with pytest.raises(ConfigError, match=f"{name} and {keyword} are one number for"):
                    row.options(**{name: 2, keyword: 3})  # type: ignore[arg-type]


def test_table_is_read_without_loading_models() -> None:
    code = (
        "import sys, weft.search.strategies\n"
        "print(len({'numpy', 'weft.lm.lm', 'weft.loom'} & set(sys.modules)))"
    )
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert proc.stdout.split() == ["0"]


def test_no_submodule_has_the_name_of_a_search() -> None:
    """A submodule with a function's name would hide it, whichever was imported first."""
    code = (
        "import pkgutil, importlib, weft.search as s\n"
        "for file in pkgutil.iter_modules(s.__path__):\n"
        "    importlib.import_module(f'weft.search.{file.name}')\n"
        "print([n for n in s.__all__ if n != 'score' and 'module' in type(getattr(s, n)).__name__])"
    )
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert proc.stdout.strip() == "[]"


def test_unknown_names_raise_attribute_error() -> None:
    shown = "no attribute 'qqq'; it has STRATEGIES, AnswerGroup, Cost,"
    with pytest.raises(AttributeError, match=shown):
        search.qqq  # noqa: B018
    assert not hasattr(search, "__wrapped__")


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("best_of", "best_of_n(lm, prompt, n=16)"),
        ("self_consistency", "best_of_n(lm, prompt, n=16)"),
        ("TreeOfThoughts", "tot(lm, prompt, breadth=5)"),
        ("dfs", 'tot(lm, prompt, order="dfs")'),
        ("MonteCarloTreeSearch", "mcts(lm, prompt)"),
        ("beam_search", "beam(lm, prompt, width=8)"),
        ("ABMCTSA", "adaptive(lm, prompt)"),
        ("particle_filter", "smc(lm, prompt, n=32)"),
    ],
)
def test_names_of_other_libraries_are_answered_with_the_name_here(name: str, here: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(search, name)
    assert str(caught.value).endswith(f"; it is {here}")
    assert hasattr(search, here.partition("(")[0])


def test_options_of_other_libraries_are_answered_with_an_option_that_the_search_takes() -> None:
    for row in STRATEGIES.values():
        function = getattr(search, row.call)
        own = {each for each in inspect.signature(function).parameters} | set(
            search.SearchOptions.__annotations__
        )
        answers = options_for(own)
        assert set(answers.values()) <= own
        assert not set(answers) & own
        assert {"evaluator", "generator", "timeout"} <= set(answers)


def test_attributes_of_other_libraries_results_are_answered(lm: weft.LM) -> None:
    result = search.greedy(lm, samples.sum, max_tokens=2)
    with pytest.raises(AttributeError, match=r"no attribute 'output'; it is result\.text$"):
        result.output  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'qqq'$"):
        result.qqq  # noqa: B018
    assert copy.copy(result).text == result.text
    assert pickle.loads(pickle.dumps(result.cost)) == result.cost


def test_swapped_model_and_prompt_are_an_error_that_gives_the_order(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match=r"the model comes first: tot\(lm, prompt\)"):
        search.tot("What is 37 + 58?", lm)  # type: ignore[arg-type]


def test_default_strategy_is_a_vote_unless_the_prompt_states_a_task() -> None:
    assert default_for(samples.game24) == FOR_TASKS == "tot"
    assert default_for(samples.sum) == default_for("Capital of Italy?") == DEFAULT == "best-of-n"


@pytest.mark.parametrize("name", by_default(STRATEGIES))
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (samples.game24, {"n": 2, "breadth": 2}),
        (samples.sum, {"budget_tokens": 60}),
        (samples.sum, {"n": 2, "breadth": 2, "max_tokens": 3}),
    ],
)
def test_no_search_generates_more_than_its_estimate(
    lm: weft.LM, name: str, prompt: str, options: dict[str, int]
) -> None:
    row = STRATEGIES[name]
    options = {key: value for key, value in options.items() if key not in row.unused()}
    max_value = estimate(row, options, prompt)
    if max_value.tokens is None:
        assert name == "tot-dfs"
        return
    few = {"rounds": 2} if name in ("mcts", "adaptive") else {}
    result = row.run(lm, prompt, seed=1, **options, **few)
    assert result.cost.tokens <= max_value.tokens
    assert max_value.tokens <= options.get("budget_tokens", max_value.tokens)
