"""The laws of every search: recorded proposals, budgets, progress, resuming, both calls."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import isclass
from pathlib import Path
from pkgutil import iter_modules
from random import Random
from typing import Any

import pytest

import forks
import weft
from searches import DEEP, FEW, SMALL, alike, by_default, call, given, puzzle, small, tree
from weft import Heddle, Loom, samples, search
from weft.errors import ConfigError, FormatError, StoreError, TreeError
from weft.search import STRATEGIES, Level, SearchOptions, SearchResult, Strategy
from weft.search.driver import Algorithm, Search

NAMES = list(STRATEGIES)
CASES = by_default(NAMES)
# best-of-n and greedy record as weighted-best-of-n does.
RECORDED_ALIKE = ("beam", "best-of-n", "greedy")
CALLS = sorted({row.call for row in STRATEGIES.values()})


class Stop(Exception):
    """Raised from a progress callback."""


@pytest.fixture(scope="module")
def levels_of() -> dict[str, list[Level]]:
    """The progress reports of each search."""
    return {}


@pytest.fixture(scope="module")
def result_of(lm: weft.LM, levels_of: dict[str, list[Level]]) -> Callable[[str], SearchResult]:
    """Each search of the sample puzzle, run once."""
    new: dict[str, SearchResult] = {}

    def get(name: str) -> SearchResult:
        if name not in new:
            levels_of[name] = []
            new[name] = small(name, lm, puzzle(name), progress=levels_of[name].append)
        return new[name]

    return get


def test_every_strategy_of_the_table_is_tested_here() -> None:
    assert set(SMALL) == set(STRATEGIES), "give it small numbers in tests/searches.py"


@pytest.mark.parametrize("name", CASES)
def test_easy_puzzle_is_solved_by_every_search(name: str, result_of: Any) -> None:
    result = result_of(name)
    assert result.solved
    assert result.best in set(result.loom.walk())
    assert result.cost.candidates > 0
    assert result.cost.stopped is None


@pytest.mark.parametrize("name", CASES)
def test_node_removed_during_a_search_is_skipped_or_raises(name: str, lm: weft.LM) -> None:
    """The search continues without the node, or raises."""

    def remove(level: Level) -> None:
        for node in level.kept[:1]:
            if node.parent is not None:
                node.remove()

    result, message = None, ""
    try:
        result = small(name, lm, puzzle(name), progress=remove, budget_tokens=300)
    except TreeError as error:
        message = str(error)
    if result is None:
        assert message == "a node of the search was removed while it ran"
    else:
        assert result.best in set(result.loom.walk())


@pytest.mark.parametrize("name", CASES)
def test_interrupted_and_resumed_search_equals_an_uninterrupted_one(
    name: str, lm: weft.LM, result_of: Any, tmp_path: Path
) -> None:
    """Also: the same seed gives the same tree, with every text and score."""
    file, observed = tmp_path / "search.weft", list[int]()

    def stop(level: Level) -> None:
        observed.append(level.depth)
        if level.depth == 2:
            raise Stop

    if name not in DEEP:  # one round is all there is
        small(name, lm, puzzle(name), resume=file)
    else:
        with pytest.raises(Stop):
            small(name, lm, puzzle(name), resume=file, progress=stop)
    result = small(name, lm, puzzle(name), resume=file, progress=lambda level: None)
    assert alike(result.loom, result_of(name).loom)
    assert result.text == result_of(name).text
    assert result.cost.tokens == result_of(name).cost.tokens
    assert result.log_evidence == pytest.approx(result_of(name).log_evidence)
    # A search that is over is read, not run.
    before = lm.stats().decoded
    second = small(name, lm, puzzle(name), resume=file)
    assert (second.text, second.cost.tokens) == (result.text, result.cost.tokens)
    assert lm.stats().decoded == before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in RECORDED_ALIKE else each
        for name, each in zip(NAMES, CASES, strict=True)
    ],
)
def test_results_recorded_twice_in_any_order_give_the_plain_search(
    name: str, lm: weft.LM, result_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for algorithm in algorithms():
        monkeypatch.setattr(algorithm, "record", _twice_shuffled(algorithm.record))

    async def both() -> SearchResult:
        acall = call(name, "a")
        result: SearchResult = await acall(lm, puzzle(name), seed=1, **given(name))
        return result

    result = asyncio.run(both())
    assert alike(result.loom, result_of(name).loom)
    assert result.text == result_of(name).text


def algorithms() -> list[Any]:
    """Return every class of the searches with a `record` of its own."""
    modules = [import_module(f"weft.search.{each.name}") for each in iter_modules(search.__path__)]
    classes = {each for module in modules for each in vars(module).values() if isclass(each)}
    return [each for each in classes if "record" in vars(each) and each is not Algorithm]


def _twice_shuffled(record: Any) -> Any:
    def record_shuffled(self: Any, search: Search, nodes: Sequence[Heddle]) -> Sequence[Heddle]:
        mixed = list(nodes)
        Random(7).shuffle(mixed)
        first = list(record(self, search, mixed))
        state = copy.deepcopy(search.state)
        assert list(record(self, search, nodes)) == first
        assert search.state == state
        assert json.loads(json.dumps(state)) == state
        return first

    return record_shuffled


@pytest.mark.parametrize("name", CASES)
def test_token_budget_is_never_exceeded(name: str, lm: weft.LM, result_of: Any) -> None:
    budget = min(100, result_of(name).cost.tokens // 2)
    before = lm.stats().decoded
    result = small(name, lm, puzzle(name), budget_tokens=budget)
    assert result.cost.tokens == lm.stats().decoded - before <= budget
    assert result.cost.stopped == "tokens"


@pytest.mark.parametrize("name", CASES)
def test_kv_budget_bounds_the_tree(name: str, lm: weft.LM, result_of: Any) -> None:
    slot, loom = lm.info.kv_bytes_per_token, result_of(name).loom
    n_below = sum(len(node.tokens) for node in loom.get_all_children())
    max_value = min(120, len(loom.tokens) + n_below // 2)
    result = small(name, lm, puzzle(name), budget_kv_bytes=max_value * slot)
    assert result.cost.stopped == "kv"
    assert sum(len(node.tokens) for node in result.loom.walk()) <= max_value


@pytest.mark.parametrize("name", CASES)
def test_seconds_end_a_search(name: str, lm: weft.LM) -> None:
    result = small(name, lm, puzzle(name), budget_s=1e-3)
    assert result.cost.stopped == "seconds"


@pytest.mark.parametrize("name", CASES)
def test_progress_reports_each_round_in_order(
    name: str, result_of: Any, levels_of: dict[str, list[Level]]
) -> None:
    result, levels = result_of(name), levels_of[name]
    assert levels
    assert [level.depth for level in levels] == list(range(1, len(levels) + 1))
    tokens = [level.cost.tokens for level in levels]
    assert tokens == sorted(tokens)
    nodes = set(result.loom.walk())
    assert all(nodes.issuperset(level.candidates) for level in levels)


@pytest.mark.programs
def test_search_killed_in_a_round_resumes_to_the_same_answer(lm: weft.LM, tmp_path: Path) -> None:
    """The process gets SIGKILL while the third round is being valued."""
    if os.name != "posix":
        pytest.skip("needs SIGKILL")
    file = tmp_path / "search.weft"
    program = f"""
import os, signal, weft
calls = []
def value(nodes):
    calls.append(nodes)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(node.text)) for node in nodes]
weft.search.tot(weft.load("tiny"), {samples.game24!r}, seed=1, breadth=2, n_continue=3,
                n_suggest=0, value=value, resume={str(file)!r})
"""
    ended = forks.run(program)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert Loom.open(file, lm).meta["search"]["round"] == 2

    def value(nodes: list[Heddle]) -> list[float]:
        return [float(len(node.text)) for node in nodes]

    options: dict[str, Any] = {"breadth": 2, "n_continue": 3, "n_suggest": 0, "value": value}
    resumed = search.tot(lm, samples.game24, seed=1, resume=file, **options)
    full = search.tot(lm, samples.game24, seed=1, **options)
    assert tree(resumed.loom) == tree(full.loom)
    assert resumed.cost.tokens == full.cost.tokens


@pytest.mark.parametrize("name", ["smc", "beam", "best-of-n"])
def test_constraint_applies_from_the_first_line_to_the_end(name: str, lm: weft.LM) -> None:
    """Lines of 9 tokens and two rounds: the end is always the completion's."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"constraint": schema, "temperature": 1.5, "n": 2}
    if name in DEEP:
        options |= {"depth": 2, "max_tokens": 9, "stop": None, "answer_tokens": 60}
    result = small(name, lm, samples.record, **options)
    assert set(json.loads(result.text)) == {"name", "age"}


def test_file_of_another_search_raises(lm: weft.LM, tmp_path: Path) -> None:
    file, plain = tmp_path / "search.weft", tmp_path / "plain.weft"
    options: dict[str, Any] = {"n": 2, "max_tokens": 4, "resume": file}
    search.best_of_n(lm, samples.sum, seed=1, **options)
    for prompt, other in [
        (samples.story, {}),
        (samples.sum, {"n": 3}),
        (samples.sum, {"checked": False}),
        (samples.sum, {"temperature": 0.1}),
    ]:
        with pytest.raises(ConfigError, match="holds another search"):
            search.best_of_n(lm, prompt, seed=1, **{**options, **other})
    with pytest.raises(ConfigError, match="has seed 1"):
        search.best_of_n(lm, samples.sum, seed=2, **options)
    Loom(lm, samples.sum).save(plain)
    with pytest.raises(FormatError, match="no search"):
        search.best_of_n(lm, samples.sum, resume=plain)


@pytest.mark.parametrize("name", CALLS)
def test_both_calls_have_one_signature(name: str) -> None:
    plain, awaited = getattr(search, name), getattr(search, f"a{name}")
    assert inspect.signature(plain) == inspect.signature(awaited)
    assert inspect.signature(plain).return_annotation == "SearchResult"
    assert inspect.iscoroutinefunction(awaited)
    assert awaited.__name__ == f"a{name}"


def test_plain_calls_work_inside_a_running_loop(lm: weft.LM) -> None:
    async def inside() -> str:
        return search.best_of_n(lm, samples.sum, n=2, max_tokens=8, seed=1).text

    assert (
        asyncio.run(inside()) == search.best_of_n(lm, samples.sum, n=2, max_tokens=8, seed=1).text
    )


def test_awaited_searches_run_concurrently_and_leave_the_loop_free(lm: weft.LM) -> None:
    async def three() -> tuple[list[SearchResult], int]:
        ticks, over = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not over:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        calls = [search.atot(lm, samples.game24, seed=s, breadth=2, **FEW) for s in (1, 1, 2)]
        results = await asyncio.gather(*calls)
        over = True
        await ticker
        return results, ticks

    (first, second, other), ticks = asyncio.run(three())
    assert tree(first.loom) == tree(second.loom) != tree(other.loom)
    assert ticks > 10


def test_cancelled_search_leaves_a_consistent_tree(lm: weft.LM) -> None:
    loom = Loom(lm, samples.game24)

    async def begin_and_cancel() -> None:
        before = lm.stats().steps
        task = asyncio.create_task(search.atot(lm, loom, seed=1, n_suggest=30))
        while lm.stats().steps < before + 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(begin_and_cancel())
    for node in loom.walk():
        assert all(child.parent is node for child in node.children)
    assert search.tot(lm, loom, seed=1, breadth=2, **FEW).loom is loom


@pytest.mark.parametrize("name", by_default(DEEP))
def test_other_prompts_are_searched_without_a_checker(name: str, lm: weft.LM) -> None:
    result = small(name, lm, samples.sum, max_tokens=24, answer_tokens=24, budget_tokens=1500)
    assert result.solved is None
    assert "95" in result.text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mcts", {"rounds": 0}, "rounds is 0"),
        ("mcts", {"batch": 0}, "batch is 0"),
        ("mcts", {"rollouts": -1}, "rollouts is -1"),
        ("mcts", {"exploration": -1.0}, "exploration is -1"),
        ("adaptive", {"widen": 0}, "widen is 0"),
        ("adaptive", {"value": lambda nodes: [2.0] * len(nodes)}, "from 0 to 1"),
        ("beam", {"width": 0}, "width is 0"),
        ("beam", {"n": 0}, "n is 0"),
        ("smc", {"n": 0}, "n is 0"),
        ("smc", {"ess": 2}, "ess is 2"),
        ("smc", {"progress": 2}, "progress is 2"),
        ("smc", {"resume": 2}, "resume is 2"),
        ("best-of-n", {"extract": "x"}, "extract is 'x'"),
        ("smc", {"potential": lambda nodes: [0.0]}, "one finite number per node"),
        ("tot", {"order": "wide"}, "'bfs' and 'dfs'"),
        ("tot", {"budget_kv_bytes": 0}, "budget_kv_bytes is 0"),
        ("tot", {"max_token": 3}, "max_tokens"),
        ("tot", {"n": 3}, "n has no meaning for tot"),
        (
            "beam",
            {"widht": 5},
            "'widht' of beam. Did you mean width\\? Allowed are: width, n,",
        ),
        ("tot", {"bredth": 3}, "unknown option 'bredth' of tot. Did you mean breadth\\?"),
        ("mcts", {"rollout": 5}, "Did you mean rollouts\\?"),
        ("smc", {"potental": None}, "Did you mean potential\\?"),
        ("best-of-n", {"extrakt": None}, "Did you mean extract\\?"),
        ("adaptive", {"budgets_token": 5}, "Did you mean budget_tokens\\?"),
        ("beam", {"top_b": 3}, "Did you mean top_p\\?"),
        ("beam", {"max_new_tokens": 3}, "Here it is max_tokens"),
        ("tot", {"evaluator": len}, "evaluator\\? Here it is value"),
        ("tot", {"max_depth": 3}, "Here it is depth"),
        ("tot", {"beam_width": 3}, "Here it is breadth"),
        ("beam", {"beam_width": 3}, "Here it is width"),
        ("tot", {"n_generate_sample": 3}, "Here it is n_continue"),
        ("mcts", {"c_puct": 3}, "Here it is exploration"),
        ("mcts", {"num_simulations": 3}, "Here it is rounds"),
        ("smc", {"n_particles": 3}, "Here it is n$"),
        ("adaptive", {"generate_fn": len}, "Here it is propose"),
        ("best-of-n", {"best_of": 3}, "Here it is n$"),
        ("best-of-n", {"reward_model": len}, "Here it is value"),
    ],
)
def test_invalid_options_raise_and_are_named(
    name: str, options: dict[str, Any], message: str, lm: weft.LM
) -> None:
    with pytest.raises(ConfigError, match=message):
        small(name, lm, puzzle(name), **options)


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_error_of_a_mistyped_keyword_lists_the_keywords_of_the_search(
    row: Strategy, lm: weft.LM
) -> None:
    """Every listed keyword is accepted, and every keyword of the search is listed."""
    function = call(row.name)
    with pytest.raises(ConfigError) as caught:
        function(lm, samples.sum, qqqq=1)
    listed = str(caught.value).partition("Allowed are: ")[2].split(", ")
    taken = inspect.signature(function).parameters
    own = {each.name for each in taken.values() if each.kind is each.KEYWORD_ONLY}
    assert own <= set(listed)
    assert len(listed) == len(set(listed))
    assert ("n" in listed) == ("n" in taken)
    for name in {"n", *SearchOptions.__annotations__} - set(listed):
        with pytest.raises(ConfigError, match=f"^{name} has no meaning for"):
            function(lm, samples.sum, **{name: 5})


@pytest.mark.parametrize("wrong", ["1", 1j, [None], {}, True, float("nan")])
def test_every_number_of_every_search_is_checked_at_the_call(wrong: Any, lm: weft.LM) -> None:
    """The annotations list the numbers; another strategy's numbers are checked here too."""
    before, requests = lm.stats().decoded, 0
    for name in CALLS:
        function = getattr(search, name)
        annotations = SearchOptions.__annotations__ | {
            each.name: each.annotation for each in inspect.signature(function).parameters.values()
        }
        for keyword, kind in annotations.items():
            annotation = getattr(kind, "__forward_arg__", str(kind))
            if not set(annotation.split(" | ")) <= {"int", "float", "None", "Counts"}:
                continue
            with pytest.raises(ConfigError, match=rf"^{keyword} (is|has) "):
                function(lm, samples.sum, **{keyword: wrong})
            requests += 1
    assert requests > 60
    assert lm.stats().decoded == before


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_value_that_is_no_model_raises_with_how_to_load_one(row: Strategy, tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ("tiny", r"""^lm is 'tiny'; .* give weft\.load\("tiny"\)$"""),
        (tmp_path, r"^lm is .*Path\(.* give weft\.load\("),
        (5, r"^lm is 5; .* give weft\.load\("),
    ]
    for model, message in wrong:
        with pytest.raises(ConfigError, match=message):
            row.run(model, samples.game24)


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_file_that_cannot_be_written_raises_before_a_token_is_generated(
    row: Strategy, lm: weft.LM, tmp_path: Path
) -> None:
    before = lm.stats()
    for path in (tmp_path / "missing" / "x.json", tmp_path):
        with pytest.raises(StoreError, match="^cannot (write|read) "):
            row.run(lm, samples.game24, resume=path)
    assert lm.stats().decoded == before.decoded
    assert lm.stats().steps == before.steps
    assert not list(tmp_path.iterdir())
