"""Functions of the caller's own: what they are handed, in every search, plain and async."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import weft
from searches import DEFAULT, SMALL, by_default, call, given, tree
from weft import Heddle, Loom, samples, search
from weft.errors import ConfigError
from weft.search import SearchResult, score
from weft.search.core import Steps
from weft.search.score import Scorer

# A sum is answered in two lines: small enough for every search, many times over.
EVERY: dict[str, dict[str, Any]] = {
    **{name: {"max_tokens": 12, "answer_tokens": 16} for name in SMALL},
    "mcts": {"max_tokens": 12, "answer_tokens": 16, "rounds": 2, "n_continue": 2},
    "adaptive": {"max_tokens": 12, "answer_tokens": 16, "rounds": 2},
    "best-of-n": {"max_tokens": 24, "n": 3},
    "weighted-best-of-n": {"max_tokens": 24, "n": 3},
    "greedy": {"max_tokens": 24},
}


def searched(name: str, lm: weft.LM, **options: Any) -> search.SearchResult:
    keywords = {"seed": 1, **given(name), **EVERY[name], **options}
    keywords.pop("n_suggest", None)
    result: search.SearchResult = call(name)(lm, samples.sum, **keywords)
    return result


@pytest.mark.parametrize("name", by_default(EVERY))
def test_verifier_that_passes_nothing_solves_nothing(name: str, lm: weft.LM) -> None:
    result = searched(name, lm, verifier=lambda text: False)
    assert result.solved is False
    assert result.votes == ()
    assert not any(node.meta.get("solved") for node in result.loom.walk())


@pytest.mark.parametrize("name", by_default(EVERY))
def test_verifier_decides_in_every_search(name: str, lm: weft.LM) -> None:
    result = searched(name, lm, verifier=lambda text: "95" in text and text.endswith("."))
    assert result.solved is True
    assert result.best.meta["solved"] is True
    assert "95" in result.text


@pytest.mark.parametrize("name", by_default(EVERY))
def test_value_scores_a_round_in_one_call_in_every_search(name: str, lm: weft.LM) -> None:
    batches: list[list[str]] = []

    def value(texts: list[str]) -> list[float]:
        batches.append(texts)
        return [1 / (1 + len(text)) for text in texts]

    levels: list[search.Level] = []
    result = searched(name, lm, value=value, progress=levels.append)
    assert [len(batch) for batch in batches] == [len(level.candidates) for level in levels]
    for level in levels:
        for node in level.candidates:
            expected = 1 / (1 + len(score.text_of(node)))
            log = math.log(expected) if name == "smc" else expected
            assert node.score == pytest.approx(log)
    assert result.best in set(result.loom.walk())


@pytest.mark.parametrize("name", by_default(EVERY))
def test_async_functions_are_awaited_at_once_and_give_the_same(name: str, lm: weft.LM) -> None:
    at_once: list[int] = []
    running = 0

    async def value(node: Heddle) -> float:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0)
        running -= 1
        return 1 / (1 + len(node.text))

    async def verifier(texts: list[str]) -> list[bool]:
        await asyncio.sleep(0)
        return ["95" in text for text in texts]

    late = searched(name, lm, value=value, verifier=verifier)
    now = searched(
        name,
        lm,
        value=lambda nodes: [1 / (1 + len(node.text)) for node in nodes],
        verifier=lambda text: "95" in text,
    )
    assert tree(late.loom) == tree(now.loom)
    assert (late.text, late.solved) == (now.text, now.solved)
    assert max(at_once) > 1 or name not in ("best-of-n", "smc")


def test_parameter_name_of_a_function_selects_its_argument(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)
    observed: dict[str, Any] = {}

    def named_function(name: str, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def function(thing: Any) -> Any:
            observed[name] = thing
            return answer(thing)

        scope: dict[str, Any] = {"function": function}
        exec(f"def named({name}): return function({name})", scope)
        return scope["named"]  # type: ignore[no-any-return]

    for name in ("node", "text"):
        search.best_of_n(lm, loom, n=1, max_tokens=8, value=named_function(name, lambda thing: 1.0))
    for name in ("nodes", "texts"):
        search.best_of_n(
            lm,
            loom,
            n=1,
            max_tokens=8,
            value=named_function(name, lambda things: [1.0] * len(things)),
        )
    assert isinstance(observed["node"], Heddle)
    assert isinstance(observed["text"], str)
    assert [type(each) for each in observed["nodes"]] == [Heddle]
    assert [type(each) for each in observed["texts"]] == [str]


class Length:
    """A value that is an object, as reward models are."""

    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.array([1 / (1 + len(text)) for text in texts], dtype=np.float32)


@pytest.mark.parametrize(
    "value",
    [
        Length(),
        Length().__call__,
        functools.partial(lambda scale, texts: [scale / (1 + len(t)) for t in texts], 1.0),
        lambda candidates: [1 / (1 + len(node.text)) for node in candidates],
        score.likelihood,
        score.majority(search.answer_number),
        score.verifier(len),
    ],
)
def test_any_callable_is_a_value(value: Any, lm: weft.LM) -> None:
    result = search.best_of_n(lm, samples.sum, n=2, max_tokens=24, seed=1, value=value)
    assert all(node.score is not None for node in result.loom.children)


@pytest.mark.parametrize("name", ["value", "verifier", "propose", "potential", "progress"])
def test_function_without_a_single_argument_raises_before_anything_runs(
    name: str, lm: weft.LM
) -> None:
    before = lm.stats().steps
    text = rf"^{name} takes \(node, extra\); it has to take one argument, "
    with pytest.raises(ConfigError, match=text):
        search.smc(lm, samples.sum, n=2, max_tokens=4, **{name: lambda node, extra: 1.0})
    assert lm.stats().steps == before


def test_extract_without_a_single_argument_raises(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="extract takes no argument; .* one argument, a text"):
        search.best_of_n(lm, samples.sum, extract=lambda: None)  # type: ignore[misc, arg-type]


def dropping(function: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that shows what it wraps, which takes less."""

    @functools.wraps(function)
    def called(node: Heddle) -> Any:
        return function()

    return called


@pytest.mark.parametrize(
    "value",
    [
        lambda node, extra=2: 1.0,
        lambda *several: [1.0] * len(several[0]),
        functools.partial(lambda node, extra: 1.0, extra=1),
        dropping(lambda: [1.0]),
    ],
)
def test_function_that_can_take_one_argument_is_called(value: Any, lm: weft.LM) -> None:
    result = search.best_of_n(lm, samples.sum, n=1, max_tokens=8, value=value)
    assert result.loom.children[0].score == 1.0


def test_best_of_n_by_value_is_the_highest(lm: weft.LM) -> None:
    result = search.best_of_n(
        lm, samples.story, n=4, seed=1, max_tokens=20, value=lambda text: -text.count("e")
    )
    assert result.best.score == max(node.score or 0 for node in result.loom.children)
    assert len(set(node.score for node in result.loom.children)) > 1


def test_plain_searches_await_inside_a_running_loop_and_outside(lm: weft.LM) -> None:
    threads = set[str]()

    async def verifier(text: str) -> bool:
        threads.add(threading.current_thread().name)
        await asyncio.sleep(0)
        return "95" in text

    async def inside() -> bool | None:
        return search.best_of_n(lm, samples.sum, n=2, seed=1, verifier=verifier).solved

    assert asyncio.run(inside())
    assert search.best_of_n(lm, samples.sum, n=2, seed=1, verifier=verifier).solved
    assert not any(each.name == "weft-search-loop" for each in threading.enumerate())
    assert threads == {"weft-search-loop"}


def test_one_loop_serves_all_rounds_of_a_plain_search(lm: weft.LM) -> None:
    loops = set[int]()

    async def value(texts: list[str]) -> list[float]:
        loops.add(id(asyncio.get_running_loop()))
        return [0.5] * len(texts)

    result = search.tot(lm, samples.large_problem, value=value, depth=3, breadth=1, seed=1)
    assert len(result.best.path) > 3
    assert len(loops) == 1


@pytest.mark.parametrize("is_awaited", [False, True])
def test_error_of_a_function_is_raised_and_the_others_are_cancelled(
    is_awaited: bool, lm: weft.LM
) -> None:
    ended: list[str] = []

    async def verifier(text: str) -> bool:
        if text == "b":
            raise KeyError("b")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(text)
            raise
        return True

    options: dict[str, Any] = {
        "propose": lambda nodes: [["a", "b", "c"]],
        "n": 3,
        "verifier": verifier,
    }
    loom = Loom(lm, samples.sum)

    def call() -> None:
        if is_awaited:
            asyncio.run(search.abest_of_n(lm, loom, **options))
        else:
            search.best_of_n(lm, loom, **options)

    with pytest.raises(KeyError, match="b"):
        call()
    assert sorted(ended) == ["a", "c"]
    assert [node.text for node in loom.children] == ["a", "b", "c"]


def test_started_calls_are_closed_when_a_later_call_fails_at_once(lm: weft.LM) -> None:
    """Otherwise Python warns of coroutines that were never awaited; warnings are errors here."""

    async def late(text: str) -> bool:
        return True

    def verifier(text: str) -> Any:
        if text == "c":
            raise KeyError("c")
        return late(text)

    with pytest.raises(KeyError):
        search.best_of_n(
            lm, samples.sum, n=3, propose=lambda nodes: [["a", "b", "c"]], verifier=verifier
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verifier": lambda text: None}, "verifier returned None for one text; .*True or False"),
        ({"verifier": lambda text: 0.7}, "returned 0.7 for one text"),
        ({"verifier": lambda text: "yes"}, "returned 'yes'"),
        ({"verifier": lambda things: [True] * 2}, "name its parameter `texts`"),
        ({"verifier": lambda texts: True}, "returned True for 2 texts.*name its parameter `text`"),
        ({"verifier": lambda texts: [True]}, r"returned \[True\] for 2 texts"),
        ({"verifier": lambda: True}, "takes no argument"),
        ({"verifier": "95"}, "verifier is '95'; allowed is a function"),
        (
            {"value": lambda text: "high"},
            "value returned 'high' for one text; .*finite number per text",
        ),
        ({"value": lambda nodes: 1.0}, "value returned 1.0 for 2 nodes"),
        ({"value": len, "score": len}, "leave out one"),
        ({"score": lambda states: [1.0] * len(states)}, r"propose\(state\)"),
        ({"state": 1}, r"propose\(state\)"),
        ({"value": lambda states: [1.0] * len(states)}, r"propose\(state\)"),
        ({"task": "24"}, "derives from weft.search.Task"),
        ({"answer_tokens": 5}, "answer_tokens has no meaning"),
        ({"complete": True}, "complete has no meaning"),
        ({"verifer": len}, "Did you mean verifier"),
        ({"propose": {}}, "propose is empty"),
        ({"propose": {"a": "guess"}}, "'both', 'continue', 'suggest'"),
    ],
)
def test_invalid_functions_raise_and_are_named(
    options: dict[str, Any], message: str, lm: weft.LM
) -> None:
    with pytest.raises(ConfigError, match=message):
        search.best_of_n(lm, samples.sum, **{"n": 2, "max_tokens": 8, "seed": 1, **options})


@pytest.mark.parametrize(
    ("name", "given"),
    [*((name, math.nan) for name in DEFAULT), ("beam", math.inf), ("beam", 10**400)],
    ids=lambda value: "huge" if value == 10**400 else str(value),
)
def test_value_must_be_a_finite_number_in_every_search(
    name: str, given: float, lm: weft.LM
) -> None:
    text = (
        f"value returned {given!r:.9}.* for one node; it has to return one finite number per node"
    )
    with pytest.raises(ConfigError, match=text):
        searched(name, lm, value=lambda node: given)


@pytest.mark.parametrize("name", ["mcts", "adaptive"])
def test_infinite_value_raises_in_searches_that_average(name: str, lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="value returned -inf .* one finite number per node$"):
        searched(name, lm, value=lambda node: -math.inf)


@pytest.mark.parametrize(
    "name", by_default(n for n in EVERY if n not in ("mcts", "adaptive", "smc"))
)
def test_search_that_ranks_accepts_minus_infinity(name: str, lm: weft.LM) -> None:
    result = searched(name, lm, value=lambda node: -math.inf)
    assert all(node.score in (None, -math.inf) for node in result.loom.walk())


def test_mean_logprob_of_a_path_without_tokens_is_a_value(lm: weft.LM) -> None:
    ends = dict.fromkeys(lm.text.stop_ids, math.inf)
    result = search.best_of_n(lm, samples.sum, n=2, value=score.mean_logprob, logit_bias=ends)
    assert [node.score for node in result.loom.children] == [-math.inf] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"propose": lambda nodes: [[1, 2]]}, "a list of texts for each node"),
        ({"propose": lambda nodes: ["abc"]}, "a list of texts for each node"),
        ({"propose": lambda state: ["abc"]}, "pairs for each state"),
        ({"propose": lambda state: [("a", 1), ("b",)]}, "pairs for each state"),
        (
            {"propose": {"a": lambda state: [("a", 1)], "b": "continue"}},
            "all have to",
        ),
        ({"propose": lambda nodes: [["a"]], "max_tokens": 8}, "max_tokens has no meaning without"),
    ],
)
def test_invalid_proposers_raise_and_are_named(
    options: dict[str, Any], message: str, lm: weft.LM
) -> None:
    with pytest.raises(ConfigError, match=message):
        search.best_of_n(lm, samples.sum, n=2, **options)


def test_greedy_with_options_of_other_searches_raises(lm: weft.LM) -> None:
    for name, value in [("temperature", 1.0), ("propose", "continue"), ("state", 1)]:
        with pytest.raises(ConfigError, match=f"{name} has no meaning for greedy"):
            search.greedy(lm, samples.sum, **{name: value})  # type: ignore[arg-type]
    plain, zero = search.greedy(lm, samples.sum), search.greedy(lm, samples.sum, temperature=0)
    assert zero.text == plain.text


def test_answer_that_an_earlier_verifier_accepted_is_no_answer_of_this_search(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)
    first = search.best_of_n(lm, loom, n=2, seed=1, verifier=lambda text: True)
    assert first.best.meta["solved"] is True
    second = search.best_of_n(lm, loom, n=2, seed=1, verifier=lambda text: False)
    assert second.solved is False
    assert not any(node.meta["solved"] for node in loom.children[2:])


def test_line_that_is_proposed_once_more_is_verified_once_more(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)

    def run(verdict: bool) -> SearchResult:
        def propose(nodes: list[Heddle]) -> list[list[str]]:
            return [["It is 7.\n"] for _ in nodes]

        options = {"propose": propose, "verifier": lambda text: verdict, "complete": False}
        return search.tot(lm, loom, depth=1, seed=1, **options)

    first, second = run(True), run(False)
    assert (first.best, first.solved, second.solved) == (second.best, True, False)
    assert [child.text for child in loom.children] == ["It is 7.\n"]


class Doubtful(Scorer):
    """Scores lines that begin with "B" at 0.0005, others at 0.9."""

    def __init__(self, *, is_verdict: bool) -> None:
        super().__init__(self._steps)
        self.is_verdict = is_verdict

    def _steps(self, nodes: Sequence[Heddle]) -> Steps[list[float]]:
        yield from ()
        return [0.0005 if node.text.strip().startswith("B") else 0.9 for node in nodes]


@pytest.mark.parametrize("name", ["tot", "adaptive"])
@pytest.mark.parametrize("is_verdict", [True, False])
def test_line_is_excluded_by_a_verdict_and_not_by_another_low_value(
    lm: weft.LM, name: str, is_verdict: bool
) -> None:
    options: dict[str, Any] = {"tot": {"breadth": 2}, "adaptive": {"budget_tokens": 400}}[name]
    result = getattr(search, name)(
        lm,
        "Write two lines.",
        propose=lambda node: ["A line\n", "B line\n"],
        depth=2,
        value=Doubtful(is_verdict=is_verdict),
        answer_tokens=0,
        seed=1,
        **options,
    )
    low = [node for node in result.loom.children if node.text.startswith("B")]
    assert low
    assert any(node.children for node in low) == (not is_verdict)
