"""Tree of thoughts on the embedded model: small searches, every law of the tree."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import weft
from cases import one_in
from searches import FEW
from weft import Heddle, Loom, samples
from weft.errors import ConfigError
from weft.search import Game24, Level, SearchResult, tot
from weft.search.score import verdicts

# Two held-out puzzles; the first is of the easy half, the second of the hard one.
EASY, HARD = Game24((4, 9, 10, 13)), Game24((6, 9, 12, 12))


def small(lm: weft.LM, prompt: object = EASY.prompt, **options: object) -> SearchResult:
    return tot(lm, prompt, **{"seed": 1, "breadth": 3, **FEW, **options})  # type: ignore[arg-type]


@dataclass
class Run:
    """One run of a search, for tests that only read it."""

    result: SearchResult
    levels: list[Level]
    steps: list[int]  # per level
    decoded: int


def run_once(lm: weft.LM, call: Callable[..., SearchResult]) -> Run:
    levels: list[Level] = []
    ends: list[int] = []

    def note(level: Level) -> None:
        levels.append(level)
        ends.append(lm.stats().steps)

    lm.clear_cache()
    before = lm.stats()
    result = call(lm, EASY.prompt, seed=1, progress=note)
    steps = [end - start for start, end in zip([before.steps, *ends], ends, strict=False)]
    return Run(result, levels, steps, lm.stats().decoded - before.decoded)


@pytest.fixture(scope="module")
def plain(lm: weft.LM) -> Run:
    """`small`, as it is."""
    return run_once(lm, small)


@pytest.fixture(scope="module")
def default_run(lm: weft.LM) -> Run:
    """`tot` without numbers."""
    return run_once(lm, tot)


def texts(loom: Heddle) -> list[str]:
    return [node.text for node in loom.walk()]


@pytest.mark.parametrize("puzzle", [EASY, pytest.param(HARD, marks=pytest.mark.programs)])
def test_puzzle_is_solved_within_the_target(lm: weft.LM, default_run: Run, puzzle: Game24) -> None:
    result = default_run.result if puzzle is EASY else tot(lm, puzzle.prompt, seed=1)
    assert result.solved
    assert puzzle.is_solved(result.text)
    assert result.cost.tokens < 5000
    assert result.best.get_prefix_text(1).strip() == result.text
    assert result.best.path[0] is result.loom


def test_every_candidate_stays_in_the_tree_with_its_score(plain: Run) -> None:
    levels, result = plain.levels, plain.result
    assert [level.depth for level in levels] == [1, 2, 3]
    in_tree = set(result.loom.walk())
    for level in levels:
        assert in_tree.issuperset(level.candidates)
        assert set(level.kept) <= set(level.candidates)
        assert len(level.kept) <= 3
        assert all(node.score is not None for node in level.candidates)
        scores = [node.score for node in level.kept]
        assert scores == sorted(scores, reverse=True)
    n_candidates = sum(len(level.candidates) for level in levels)
    assert n_candidates == result.cost.candidates == result.cost.valued


def test_equal_lines_below_a_node_are_one_candidate(plain: Run) -> None:
    for node in plain.result.loom.walk():
        if node.children and not any(child.terminal for child in node.children):
            counts = Counter(child.text.strip() for child in node.children)
            assert max(counts.values()) == 1


def test_state_reached_twice_is_expanded_once(default_run: Run) -> None:
    for level in default_run.levels[:-1]:
        states = [EASY.state(tuple(n.crown().strip().split("\n"))) for n in level.kept]
        assert len(set(states)) == len(states)


@pytest.mark.programs
def test_same_seed_same_tree_and_another_seed_another(lm: weft.LM, plain: Run) -> None:
    lm.clear_cache()
    assert texts(small(lm).loom) == texts(plain.result.loom)
    assert texts(small(lm, seed=2).loom) != texts(plain.result.loom)


def test_frontier_grows_in_one_batch(plain: Run) -> None:
    """A level takes as many steps as its longest line, and the verdicts, whatever its width."""
    for level, steps in zip(plain.levels, plain.steps, strict=True):
        tokens = max(len(node.tokens) for node in level.candidates)
        # Besides the lines: the prompts and the questions, each a few nodes deep by their common
        # beginnings. Node by node it would be three times the line.
        assert steps <= tokens + 12


def test_tokens_are_counted_as_the_model_counts_them(plain: Run) -> None:
    assert plain.result.cost.tokens == plain.decoded


@pytest.mark.parametrize("budget", one_in(3, [1, 50, 300]))
def test_token_budget_is_never_exceeded(lm: weft.LM, budget: int) -> None:
    before = lm.stats().decoded
    result = small(lm, budget_tokens=budget)
    assert result.cost.tokens == lm.stats().decoded - before <= budget
    assert result.cost.stopped == "tokens"


@pytest.mark.programs
def test_small_kv_budget_changes_nothing(lm: weft.LM, plain: Run) -> None:
    """Parking, eviction and recompute in the middle of a search."""
    with weft.load("tiny", kv_budget=120 * lm.info.kv_bytes_per_token) as tight:
        result = texts(small(tight).loom)
        assert tight.stats().parked
        assert tight.stats().evicted
    assert result == texts(plain.result.loom)


def test_token_budget_that_suffices_changes_nothing(lm: weft.LM, plain: Run) -> None:
    assert texts(small(lm, budget_tokens=100_000).loom) == texts(plain.result.loom)


def test_small_token_budget_still_ends_in_an_answer(lm: weft.LM) -> None:
    result = small(lm, budget_tokens=400)
    assert "Answer:" in result.text


def test_budget_of_seconds_ends_the_search(lm: weft.LM, default_run: Run) -> None:
    result = tot(lm, EASY.prompt, seed=1, budget_s=0.05)
    assert result.cost.stopped == "seconds"
    assert result.cost.tokens < default_run.result.cost.tokens
    assert lm.stats().pinned_tokens >= 0


def test_sufficient_seconds_change_only_the_order_of_children(lm: weft.LM, plain: Run) -> None:
    """Timed growth attaches a child when it ends."""
    timed = small(lm, budget_s=1e6)
    assert timed.text == plain.result.text
    assert sorted(texts(timed.loom)) == sorted(texts(plain.result.loom))


def test_callable_value_ranks_candidates(lm: weft.LM) -> None:
    requests: list[int] = []

    def longest_first(nodes: list[Heddle]) -> list[float]:
        requests.append(len(nodes))
        return [float(len(node.text)) for node in nodes]

    levels: list[Level] = []
    small(lm, value=longest_first, progress=levels.append, depth=2, answer_tokens=0)
    assert requests == [len(level.candidates) for level in levels]
    best = max(len(node.text) for node in levels[0].candidates)
    assert len(levels[0].kept[0].text) == best


def test_callable_proposals_are_the_children(lm: weft.LM) -> None:
    lines = ["13 - 9 = 4 (left: 4 4 10)\n", "4 + 9 = 13 (left: 10 13 13)\n"]
    result = small(lm, propose=lambda nodes: [lines] * len(nodes), depth=1)
    assert [child.text for child in result.loom.children] == lines
    assert result.loom.children[0].score > 0.9  # type: ignore[operator]
    assert result.loom.children[1].score < 0.1  # type: ignore[operator]
    assert result.best.path[1] is result.loom.children[0]


def test_part_of_a_line_is_no_candidate(lm: weft.LM) -> None:
    loom = Loom(lm, EASY.prompt)
    line = "13 - 9 = 4 (left: 4 4 10)"
    cut = loom.add(line)
    cut.finish_reason = "interrupted"
    result = small(lm, loom, propose=lambda nodes: [[line, line]] * len(nodes), depth=1)
    assert cut.score is None
    assert [child.text for child in loom.children] == [line, line]
    assert result.best.path[1] is loom.children[1]


@pytest.mark.parametrize("propose", ["continue", "suggest"])
def test_one_kind_of_proposals_alone(lm: weft.LM, propose: str) -> None:
    result = small(lm, propose=propose, depth=1)
    # Where no line had hope, the start itself is completed: that child has no score.
    lines = [child for child in result.loom.children if child.score is not None]
    sampled = [bool(child.logprobs) for child in lines]
    assert all(sampled) if propose == "continue" else not any(sampled)


def test_search_below_a_node_stays_below_it(lm: weft.LM) -> None:
    loom = Loom(lm, EASY.prompt)
    step = loom.add("13 - 9 = 4 (left: 4 4 10)\n")
    result = small(lm, step)
    assert result.loom is loom
    assert loom.children == [step]
    assert result.text.startswith("13 - 9 = 4")
    assert result.solved


def test_other_prompts_are_searched_by_likelihood(lm: weft.LM) -> None:
    result = small(lm, samples.large_problem, n_continue=2, n_suggest=None, max_tokens=60)
    assert result.solved is None
    assert result.best.terminal
    assert "answer is" in result.text
    ended = [node for node in result.loom.walk() if node.terminal]
    assert result.best.score == max(node.score for node in ended)  # type: ignore[type-var]


def test_verdict_is_the_softmax_of_the_two_words(lm: weft.LM) -> None:
    words = ("sure", "impossible")
    result = verdicts(lm, [samples.verdict, "Can 10 13 13 make 24?"], words)
    for question, value in zip(
        [samples.verdict, "Can 10 13 13 make 24?"], result.values, strict=True
    ):
        with Loom(lm, question) as loom:
            first = {word: loom.measure(lm.text.continuation(word)[:1]).total for word in words}
        naive = 1 / (1 + 2.718281828459045 ** (first["impossible"] - first["sure"]))
        assert value == pytest.approx(naive, abs=1e-6)


def test_verdicts_with_a_common_start_are_compared_after_it(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="begins with the other"):
        verdicts(lm, [samples.verdict], ("sure", "sure"))
    values = verdicts(lm, [samples.verdict], ("sure", "so")).values
    assert 0 <= values[0] <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"breadth": 0}, "breadth is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"n_continue": -1}, "n_continue is -1"),
        ({"n_continue": ()}, "n_continue is empty"),
        ({"n_continue": 0, "n_suggest": 0}, "nothing to propose"),
        ({"propose": "guess"}, "'both', 'continue', 'suggest'"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"answer_tokens": -1}, "answer_tokens is -1"),
        ({"budget_tokens": 0}, "budget_tokens is 0"),
        ({"budget_s": 0}, "budget_s is 0"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"value": lambda nodes: [1.0]}, "one finite number per node"),
        ({"value": lambda nodes: [float("nan")] * len(nodes)}, "one finite number per node"),
        ({"value": lambda nodes: None}, "value returned None"),
        ({"value": lambda nodes: ["high"] * len(nodes)}, "one finite number per node"),
        ({"value": lambda nodes: [0.5] * 999}, r"^.{,130}one finite number per node, or -inf$"),
        ({"propose": lambda nodes: []}, "a list of texts for each node"),
        ({"propose": lambda nodes: None}, "a list of texts for each node"),
    ],
)
def test_invalid_options_raise_and_are_named(
    lm: weft.LM, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small(lm, **options)


def test_suggesting_needs_a_task(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="needs a task"):
        small(lm, samples.story, propose="suggest")


@pytest.mark.programs
@pytest.mark.skipif(os.name != "posix", reason="needs a signal to the own process")
def test_interrupt_leaves_a_tree_that_can_be_searched_once_more(lm: weft.LM) -> None:
    loom = Loom(lm, EASY.prompt)
    levels: list[Level] = []
    pressed: list[threading.Thread] = []

    def press(level: Level) -> None:
        levels.append(level)
        # One at a time: a second could come when the first has ended the search.
        if not any(each.is_alive() for each in pressed):
            pressed.append(threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)))
            pressed[-1].start()

    with pytest.raises(KeyboardInterrupt):
        tot(lm, loom, seed=1, n_suggest=40, progress=press)
    assert levels
    for node in loom.walk():
        assert all(child.parent is node for child in node.children)
        assert node.next(top=1)[0].p > 0
    assert all(node.score is not None for level in levels for node in level.candidates)
    assert small(lm, loom).solved
