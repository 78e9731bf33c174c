"""Lines that a node already has: draws of them cost no tokens and keep the model's distribution."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest

import weft
from cases import one_in
from weft import Heddle, Loom, samples, search
from weft.search.core import Grow, Settings, run
from weft.search.driver import Search, WorkItem
from weft.search.known_lines import KnownLines, Line, Prefix
from weft.search.propose import Proposer

PROMPT = "Use 1 3 5 8 to make 44."


class First(Random):
    """Random numbers that select the first known token each time."""

    def random(self) -> float:
        return 0.0


def proposer_of(lm: weft.LM, prompt: Any, kind: Any = "continue", **options: Any) -> Proposer:
    """Return a proposer of single lines, for the first round of a search."""
    given = {"seed": 1, "propose": kind, **options}
    settings = Settings.read(search.adaptive, given, temperature=1.0, max_tokens=40)
    proposer = Proposer(Search(lm, prompt, settings, "adaptive"), n_continue=1, n_suggest=1)
    proposer.known_lines = KnownLines(proposer.search)
    return proposer


def propose(proposer: Proposer, n: int) -> list[Heddle]:
    """Propose `n` lines below the start, in a round of their own."""
    nodes = run(proposer.propose_below([WorkItem(proposer.search.start, n=n)]))
    proposer.search.round += 1
    return nodes


def test_line_follows_known_lines_by_their_probabilities(lm: weft.LM) -> None:
    """20,000 draws: 0.015 is more than four standard errors."""
    start = Loom(lm, PROMPT)
    prefix, rng, counts = Prefix(), Random(3), Counter[tuple[int, ...]]()
    prefix.add([1, 2], [math.log(0.5), math.log(0.4)])
    prefix.add([1, 3], [math.log(0.5), math.log(0.2)])
    prefix.add([4], [math.log(0.25)])
    for _ in range(20_000):
        line = Line(start, prefix)
        line.follow(rng)
        counts[tuple(line.tokens)] += 1
    expected = {(1, 2): 0.2, (1, 3): 0.1, (1,): 0.2, (4,): 0.25, (): 0.25}
    shares = {tokens: n / 20_000 for tokens, n in counts.items()}
    assert shares == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("kind", ["continue", "suggest"])
def test_known_line_costs_no_tokens(
    kind: str, lm: weft.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = proposer_of(lm, PROMPT, kind)
    start, meter = proposer.search.start, proposer.meter
    (known,) = propose(proposer, 1)
    tokens, decoded = meter.tokens, lm.stats().decoded
    monkeypatch.setattr(proposer.search, "rng", lambda what: First())
    assert propose(proposer, 3) == [known]
    assert (meter.tokens, lm.stats().decoded) == (tokens, decoded)
    assert start.children == [known]
    assert start.meta["drawn"] == 4


def test_draws_are_known_as_often_as_the_model_writes_known_lines(lm: weft.LM) -> None:
    """200 draws: the odds of a share more than 4.5 standard errors off are below 1 in 100,000."""
    proposer = proposer_of(lm, PROMPT)
    start, n = proposer.search.start, 200
    known = propose(proposer, 12)
    texts = {node.text for node in known}
    mass = math.fsum(math.exp(start.measure(node.text).total) for node in known)
    assert 0.1 < mass < 0.95
    drawn, tokens = start.meta["drawn"], proposer.meter.tokens
    propose(proposer, n)
    new = [node for node in start.children if node.text not in texts]
    assert start.meta["drawn"] - drawn == n
    n_new = (proposer.meter.tokens - tokens) / (sum(len(node.tokens) for node in new) / len(new))
    assert n_new / n == pytest.approx(1 - mass, abs=4.5 * math.sqrt(mass * (1 - mass) / n) + 0.05)


def test_generated_lines_are_none_of_the_known_ones(lm: weft.LM) -> None:
    proposer = proposer_of(lm, PROMPT)
    start, meter = proposer.search.start, proposer.meter
    known = {node.text.strip() for node in propose(proposer, 6)}
    tokens = meter.tokens
    assert proposer.known_lines is not None
    steps = proposer.known_lines.grow(
        lm,
        [start] * 40,
        {id(start): ((), start)},
        proposer.grow,
        Random(1),
        reserve=0,
        **proposer.sampling,
    )
    lines = run(steps)
    new = [line for line in lines if line.text.strip() not in known]
    assert 0 < len(new) < len(lines) == 40
    assert meter.tokens - tokens == sum(len(line.tokens) + line.terminal for line in new)
    assert all(line.text.endswith("\n") or line.finish_reason for line in lines)
    for line in new:
        assert len(line.logprobs) == len(line.tokens)
        measured = start.measure(line.tokens).logprobs
        assert line.logprobs == pytest.approx([float(each) for each in measured], abs=1e-3)


def test_first_line_of_an_answer_is_known(lm: weft.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    loom = Loom(lm, samples.game24)
    (answer,) = loom.grow(temperature=0.0, max_tokens=200)
    answer.meta["answer"] = "likeliest"
    proposer = proposer_of(lm, loom)
    monkeypatch.setattr(proposer.search, "rng", lambda what: First())
    (line,) = propose(proposer, 1)
    assert line.text.strip() == answer.text.split("\n")[0]
    assert proposer.meter.tokens == 0


def test_lines_under_filters_are_all_generated(lm: weft.LM) -> None:
    proposer = proposer_of(lm, PROMPT, top_k=1)
    (line,) = propose(proposer, 2)
    assert propose(proposer, 3) == [line]
    assert proposer.meter.tokens == 5 * len(line.tokens)


def test_search_stopped_while_lines_grow_leaves_no_parts_of_lines(lm: weft.LM) -> None:
    proposer = proposer_of(lm, PROMPT)
    start = proposer.search.start
    before = list(propose(proposer, 4))
    steps = proposer.propose_below([WorkItem(start, n=30)])
    work: Any = next(steps)
    while not isinstance(work, Grow):
        work = steps.send(work.run(None))
    assert len(start.children) > len(before)
    steps.close()
    assert all(node.finish_reason == "stop" for node in start.children)


@pytest.mark.parametrize("budget", one_in(3, [200, 120, 333]))
def test_token_budget_leaves_no_parts_of_lines(budget: int, lm: weft.LM) -> None:
    result = search.adaptive(
        lm, PROMPT, seed=3, rounds=25, budget_tokens=budget, verifier=lambda text: False
    )
    assert result.cost.tokens <= budget
    assert all(
        node.finish_reason or node.score is not None for node in result.loom.get_all_children()
    )


def test_long_line_is_cut_at_max_tokens(lm: weft.LM) -> None:
    proposer = proposer_of(lm, "Once upon a time", max_tokens=5)
    propose(proposer, 20)
    nodes = propose(proposer, 20)
    assert max(len(node.tokens) for node in proposer.search.start.children) == 5
    assert nodes
