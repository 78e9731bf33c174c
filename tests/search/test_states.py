"""Searches over states of the caller's own, with a model and without one."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import forks
import weft
from searches import DEEP, by_default, call, tree
from weft import Loom, samples, search
from weft.errors import ConfigError, FormatError
from weft.search import STRATEGIES

CODE = "4321"
# Options that a strategy needs, besides its defaults, to find the code.
MORE: dict[str, dict[str, Any]] = {"smc": {"n": 400, "ess": 1.0}}


def propose(state: str) -> list[tuple[str, str]]:
    return [(digit, state + digit) for digit in "012345"]


def score(states: list[str]) -> list[float]:
    return [sum(map(str.__eq__, state, CODE)) / 4 for state in states]


def crack(name: str, lm: weft.LM | None = None, prompt: Any = "", **options: Any) -> Any:
    given = {
        "propose": propose,
        "score": score,
        "verifier": lambda state: state == CODE,
        "seed": 1,
        "depth": 4,
        **STRATEGIES[name].fixed,
        **MORE.get(name, {}),
        **options,
    }
    return call(name)(lm, prompt, **given)


@pytest.mark.parametrize("name", by_default(DEEP))
def test_search_over_states_needs_no_model(name: str) -> None:
    result = crack(name)
    assert result.solved
    assert result.state == result.text == CODE
    assert result.cost.tokens == 0
    assert result.cost.candidates > 4
    assert result.loom.lm is None
    for node, state in result.states.items():
        assert node.get_prefix_text(1) == state


@pytest.mark.parametrize("name", by_default(DEEP))
def test_model_of_a_search_over_states_is_not_called(name: str, lm: weft.LM) -> None:
    before = lm.stats()
    result = crack(name, lm, samples.sum, state="")
    assert result.state == result.text == CODE
    assert result.cost.tokens == 0
    assert (lm.stats().decoded, lm.stats().steps) == (before.decoded, before.steps)


def test_all_searches_with_and_without_a_model_grow_one_tree(lm: weft.LM) -> None:
    for name in DEEP:
        assert [each[:2] for each in tree(crack(name).loom)[1:]] == [
            each[:2] for each in tree(crack(name, lm, samples.sum, state="").loom)[1:]
        ]


def test_propose_and_score_may_be_async() -> None:
    async def proposed(state: str) -> list[tuple[str, str]]:
        await asyncio.sleep(0)
        return propose(state)

    async def scored(states: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return score(states)

    plain = crack("adaptive")
    for result in (
        crack("adaptive", propose=proposed, score=scored),
        asyncio.run(
            search.aadaptive(
                None,
                "",
                propose=proposed,
                score=scored,
                verifier=lambda state: state == CODE,
                depth=4,
                seed=1,
            )
        ),
    ):
        assert tree(result.loom) == tree(plain.loom)


def test_states_of_a_round_can_be_proposed_for_in_one_call() -> None:
    calls: list[int] = []

    def proposed(states: list[str]) -> list[list[tuple[str, str]]]:
        calls.append(len(states))
        return [propose(state) for state in states]

    result = crack("tot", propose=proposed, verifier=None, breadth=3)
    assert calls == [1, 3, 3, 3]
    assert tree(result.loom) == tree(crack("tot", verifier=None, breadth=3).loom)


def test_own_score_without_a_checker_prefers_the_best_ended_path() -> None:
    """The states "spoilt" and "worse" propose nothing; "fine" has a better score than both."""
    steps = {"": ["rough"], "rough": ["fine", "worse"], "fine": ["spoilt"], "worse": []}
    worth = {"rough": 0.4, "fine": 0.9, "worse": 0.1, "spoilt": 0.3}
    for name in ("tot", "mcts", "adaptive"):
        result = crack(
            name,
            propose=lambda state: [(text, text) for text in steps.get(state, [])],
            score=lambda states: [worth[state] for state in states],
            verifier=None,
        )
        assert (result.state, result.best.score, result.solved) == ("spoilt", 0.3, None)


def test_own_score_without_ended_paths_prefers_the_best_score_at_any_depth() -> None:
    worth = (0.4, 0.9, 0.3)
    for name in ("tot", "mcts", "adaptive"):
        result = crack(
            name,
            propose=lambda state: [("x", state + "x")],
            score=lambda states: [worth[len(state) - 1] for state in states],
            verifier=None,
            depth=3,
        )
        assert (result.state, result.best.score) == ("xx", 0.9)


@pytest.mark.parametrize("name", ["tot", "tot-dfs", "mcts", "adaptive"])
def test_own_score_that_favours_short_states_answers_with_a_complete_path(
    name: str, lm: weft.LM
) -> None:
    words = ("alpha", "beta", "gamma")

    def add_word(state: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        return [(f" {word}", (*state, word)) for word in words] if len(state) < 4 else []

    result = call(name)(
        lm,
        "Words:",
        state=(),
        propose=add_word,
        score=lambda states: [1 / (1 + len(state)) for state in states],
        depth=6,
        seed=1,
        **STRATEGIES[name].fixed,
        **({"rounds": 60} if name in ("mcts", "adaptive") else {}),
    )
    assert len(result.state) == 4


@pytest.mark.parametrize("name", ["tot", "tot-dfs", "mcts", "adaptive"])
def test_states_that_the_model_scores_answer_with_a_complete_path(name: str, lm: weft.LM) -> None:
    """The likelihood of a first word is higher than that of any full sentence."""
    words = ("a", "duck", "named", "Vera")

    def take(state: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        return [(f" {word}", tuple(w for w in state if w != word)) for word in state]

    start = Loom(lm, "Once upon a time", template=False)
    fixed = STRATEGIES[name].fixed
    result = call(name)(lm, start, state=words, propose=take, seed=1, **fixed)
    assert result.state == ()
    ends = [node for node, state in result.states.items() if state == ()]
    assert result.best.score == max(node.score for node in ends if node.score is not None)
    first = max(node.score for node in result.loom.children if node.score is not None)
    assert result.best.score < first


@pytest.mark.parametrize("name", ["mcts", "adaptive"])
def test_search_without_a_complete_path_answers_with_the_deepest(name: str, lm: weft.LM) -> None:
    words = " ".join("abcdefghijklmn").split()
    result = call(name)(
        lm,
        Loom(lm, "Once upon a time", template=False),
        state=(),
        propose=lambda state: [(f" {word}", (*state, word)) for word in words],
        rounds=3,
        seed=1,
    )
    assert len(result.state) == max(map(len, result.states.values())) > 1


def test_equal_states_are_expanded_once_and_unhashable_ones_always() -> None:
    """Two orders of the same steps end in one state; lists have no hash to compare."""
    opened = Counter[str]()

    def sums(state: Any) -> list[tuple[str, Any]]:
        opened[str(state)] += 1
        as_list = isinstance(state, list)
        total = state[0] if as_list else state
        return [(f"+{n} ", [total + n] if as_list else total + n) for n in (1, 2)]

    options: dict[str, Any] = {"propose": sums, "score": lambda states: [0.5] * len(states)}
    search.tot(None, 0, depth=3, breadth=9, **options)
    assert max(opened.values()) == 1
    opened.clear()
    search.tot(None, [0], depth=3, breadth=9, **options)
    assert opened["[3]"] == 2


def test_solved_start_is_the_answer() -> None:
    result = crack("tot", prompt=CODE)
    assert (result.solved, result.state, result.cost.candidates) == (True, CODE, 0)


@pytest.mark.parametrize("name", by_default(DEEP))
def test_search_without_proposals_ends(name: str) -> None:
    result = crack(name, propose=lambda state: propose(state)[:2] if len(state) < 2 else [])
    assert result.solved is False
    assert len(result.text) <= 2
    assert all(len(state) <= 2 for state in result.states.values())


def test_adaptive_uses_remaining_proposals_before_it_calls_the_function() -> None:
    """A finite list of proposals is handed out piece by piece, and a node without any is closed."""
    requests = Counter[str]()

    def few(state: str) -> list[tuple[str, str]]:
        requests[state] += 1
        return propose(state) if len(state) < 2 else []

    result = crack("adaptive", propose=few, rounds=60, batch=2, widen=1, verifier=None, depth=None)
    assert len(result.states) == 1 + 6 + 36
    # The function is called once more when all are used, in case there are new ones.
    assert max(requests.values()) <= 2


def test_nodes_of_two_proposers_record_their_proposer() -> None:
    result = crack(
        "adaptive",
        propose={
            "good": lambda state: [(CODE[len(state)], state + CODE[len(state)])],
            "bad": lambda state: [("0", state + "0"), ("5", state + "5")],
        },
    )
    assert result.solved
    for node in result.states:
        if node.parent is not None:
            assert node.meta["by"] == ("bad" if node.text in "05" else "good")


def test_particles_draw_each_proposal_alike_and_estimate_the_evidence() -> None:
    """4,000 particles draw one of three digits: each share within 0.05, six standard deviations."""
    result = search.smc(
        None,
        "",
        propose=lambda state: [(digit, state + digit) for digit in "012"],
        potential=lambda states: [0.0 if "0" in state else -math.inf for state in states],
        n=4000,
        depth=1,
        ess=0.0,
        seed=3,
    )
    assert result.log_evidence == pytest.approx(math.log(1 / 3), abs=0.15)
    counts = Counter(node.text for node in result.loom.children)
    assert counts.total() == 4000
    for digit in "012":
        assert counts[digit] / 4000 == pytest.approx(1 / 3, abs=0.05)


def test_best_of_n_calls_a_function_until_there_are_n() -> None:
    calls: list[int] = []

    async def answer(states: list[str]) -> list[list[tuple[str, str]]]:
        calls.append(len(states))
        return [[("The answer is 4.", "4")] for _ in states]

    result = search.best_of_n(None, "What is 2 + 2?", n=5, propose=answer)
    assert calls == [1, 4]
    assert len(result.loom.children) == result.votes[0].count == 5
    assert (result.votes[0].answer, result.state) == ("4", "4")


def test_lines_of_a_task_have_its_states(lm: weft.LM) -> None:
    """score= takes what the task says of lines that the model wrote."""
    observed: list[Any] = []

    def worth(states: list[Any]) -> list[float]:
        observed.extend(states)
        return [0.0 if state is None else 0.5 for state in states]

    search.tot(lm, samples.game24, depth=1, n_continue=2, n_suggest=2, score=worth, seed=1)
    assert all(state is None or len(state) == 3 for state in observed)
    assert any(state is not None for state in observed)


def test_model_may_complete_a_path_of_states(lm: weft.LM) -> None:
    result = search.tot(
        lm,
        samples.game24,
        state=0,
        propose=lambda state: [("13 - 9 = 4 (left: 4 4 10)\n", 1)] if not state else [],
        score=lambda states: [1.0] * len(states),
        complete=True,
        depth=1,
        seed=1,
    )
    assert result.solved
    assert "Answer:" in result.text


def test_options_that_need_a_model_raise_without_one() -> None:
    for options, message in [
        ({}, "propose has to be a function"),
        ({"propose": "continue"}, "propose has to be a function"),
        ({"propose": propose}, "give value= or score="),
        ({"propose": propose, "score": score, "complete": True}, "there is no model"),
        ({"propose": propose, "score": score, "temperature": 0.5}, "temperature has no meaning"),
        ({"propose": propose, "score": score, "resume": os.devnull + "x/y"}, "cannot write"),
    ]:
        with pytest.raises((ConfigError, weft.errors.StoreError), match=message):
            search.tot(None, "", **options)  # type: ignore[arg-type]
    neutral = {"temperature": 1, "top_p": 1, "repetition_penalty": 1.0}
    search.tot(None, "", propose=propose, score=score, depth=1, **neutral)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rollouts"):
        search.mcts(None, "", propose=propose, score=score, rollouts=2)


def test_seconds_end_a_search_of_functions() -> None:
    result = crack("adaptive", verifier=None, rounds=10_000_000, depth=None, budget_s=0.05)
    assert result.cost.stopped == "seconds"


def test_kv_budget_bounds_what_functions_write(lm: weft.LM) -> None:
    slot = lm.info.kv_bytes_per_token
    result = search.tot(
        lm,
        samples.sum,
        state="",
        propose=propose,
        score=score,
        depth=4,
        budget_kv_bytes=40 * slot,
    )
    assert result.cost.stopped == "kv"
    assert sum(len(node.tokens) for node in result.loom.walk()) <= 40


# Going on from a file


@pytest.mark.parametrize("name", by_default(DEEP))
def test_interrupted_and_resumed_search_equals_an_uninterrupted_one(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "search.json"

    class Stop(Exception):
        pass

    def stop(level: search.Level) -> None:
        if level.depth == 2:
            raise Stop

    with pytest.raises(Stop):
        crack(name, resume=file, progress=stop)
    result = crack(name, resume=file)
    assert tree(result.loom) == tree(crack(name).loom)
    assert result.state == CODE
    assert crack(name, resume=file).cost.candidates == result.cost.candidates


def test_tuples_and_sets_survive_a_save_and_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    first = (("fox", 1), frozenset[int]())
    options: dict[str, Any] = {
        "propose": lambda state: [("a ", (*state, {1, 2}, b"x", None, 1.5))],
        "score": lambda states: [0.5] * len(states),
        "depth": 2,
    }
    with pytest.raises(ConfigError, match="cannot keep the state"):
        search.tot(None, first, resume=file, **options)
    search.tot(None, ("fox",), resume=file, **options)
    second = search.tot(None, ("fox",), resume=file, **options)
    assert second.state == ("fox", *({1, 2}, b"x", None, 1.5) * 2)
    with pytest.raises(ConfigError, match="another search"):
        search.tot(None, ("owl",), resume=file, **options)


def test_state_that_cannot_be_read_raises_broken_file(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    crack("tot", resume=file)
    file.write_text(file.read_text().replace("'4'", "__import__('os').abort()"))
    with pytest.raises(FormatError, match="is broken"):
        crack("tot", resume=file)


@pytest.mark.programs
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_search_killed_in_a_round_resumes_to_the_same_answer(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    program = f"""
import os, signal
from weft import search
calls = []
def propose(state):
    return [(digit, state + digit) for digit in "012345"]
def score(states):
    calls.append(states)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(str.__eq__, state, {CODE!r})) / 4 for state in states]
search.tot(None, "", propose=propose, score=score, depth=4, seed=1, resume={str(file)!r})
"""
    ended = forks.run(program)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = search.tot(None, "", propose=propose, score=score, depth=4, seed=1, resume=file)
    assert resumed.state == CODE


def test_search_below_a_node_without_state_raises(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)
    with pytest.raises(ConfigError, match="needs its state: give state="):
        crack("tot", lm, loom.add("4"))
    assert crack("tot", lm, loom.add("4"), state="4", depth=3).text == CODE


def test_loom_of_texts_can_be_searched(tmp_path: Path) -> None:
    first = crack("tot", verifier=None, depth=2)
    second = crack("tot", prompt=first.best, state=first.state, depth=2)
    assert second.loom is first.loom
    assert second.text == CODE
