"""Laws of questions: next tokens and scores."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import weft
from weft import Loom
from weft.errors import ConfigError


def test_next_is_a_distribution_in_order(lm: weft.LM, loom: Loom) -> None:
    full = loom.next(top=10_000)
    assert len(full) == lm.info.n_vocab
    assert math.fsum(entry.p for entry in full) == pytest.approx(1, abs=1e-5)
    assert [entry.rank for entry in full] == list(range(len(full)))
    assert all(a.logprob >= b.logprob for a, b in zip(full, full[1:], strict=False))
    assert loom.next(3) == full[:3]
    assert full[0].text == lm.token_to_text(full[0].id)
    assert full[0].bytes == full[0].text.encode()
    assert loom.next(1)[0].id == loom.grow(max_tokens=1, temperature=0)[0].tokens[0]


def test_next_fits_on_a_screen(loom: Loom) -> None:
    shown = repr(loom.next(500))
    assert shown.count("\n") <= 24
    assert "480 more" in shown
    assert "<table" in loom.next(3)._repr_html_()


def test_p_of_sums_equal_texts(loom: Loom) -> None:
    result = loom.next(5)
    assert result.p_of(result[0].text) >= result[0].p
    assert result.p_of("no such text") == 0.0


def test_measure_of_list_equals_single_measures_in_fewer_steps(lm: weft.LM) -> None:
    texts = [f"{a} + {b} = {a + b}" for a in range(5) for b in range(5)]
    with Loom(lm, weft.samples.game24) as loom:
        before = lm.stats().steps
        singles = [loom.measure(text) for text in texts]
        middle = lm.stats().steps
        scores = loom.measure(texts)
        assert lm.stats().steps - middle < (middle - before) / 5
    assert [score.tokens for score in scores] == [single.tokens for single in singles]
    for score, single in zip(scores, singles, strict=True):
        assert score.logprobs == pytest.approx(single.logprobs, abs=1e-4)
        assert score.logprob == score.total == pytest.approx(math.fsum(score.logprobs))


def test_awaited_measure_of_tuple_equals_measure_of_list(loom: Loom) -> None:
    (single,) = loom.measure(["4 + 9"])
    (awaited,) = asyncio.run(loom.ameasure(("4 + 9",)))
    assert awaited.tokens == single.tokens == loom.measure("4 + 9").tokens
    for empty in ("", [""], ["4", ""], [[]], ["4", []]):
        with pytest.raises(ConfigError, match="nothing to measure"):
            loom.measure(empty)


def test_measure_of_lists_of_token_ids_is_a_batch(loom: Loom) -> None:
    scores = loom.measure([[5, 6], [7]])
    assert [score.tokens for score in scores] == [(5, 6), (7,)]
    assert [score.logprobs for score in scores] == [
        pytest.approx(loom.measure(ids).logprobs, abs=1e-4) for ids in ([5, 6], [7])
    ]
    for mixed in ([" a", [7]], [[7], " a"]):
        assert (7,) in [score.tokens for score in loom.measure(mixed)]
    awaited = asyncio.run(loom.ameasure([[5, 6], [7]]))
    assert [score.tokens for score in awaited] == [(5, 6), (7,)]


def test_measure_of_empty_list_returns_empty(loom: Loom) -> None:
    assert loom.measure([]) == []
    assert asyncio.run(loom.ameasure([])) == []


@pytest.mark.parametrize("bad", [[[1], 2], [b"a"], [[1], {"a": 1}], [[[1]]]])
def test_measure_of_batch_with_no_text_in_it_is_rejected(loom: Loom, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"allowed is a text, or a list of|integers"):
        loom.measure(bad)


def test_logprob_of_node_is_sum_of_its_sampled_tokens(loom: Loom) -> None:
    (child,) = loom.grow(max_tokens=4, seed=1)
    assert child.logprob == pytest.approx(sum(child.logprobs))
    assert child.logprob == pytest.approx(loom.measure(child.tokens).logprob, abs=1e-3)
    assert loom.add("text").logprob == -math.inf


def test_measure_equals_the_chain_of_next_distributions(lm: weft.LM, loom: Loom) -> None:
    score = loom.measure("4 + 9 = 13")
    naive, node = [], loom
    for token in score.tokens:
        naive.append(next(e.logprob for e in node.next(10_000) if e.id == token))
        node = node.add([token])
    assert list(score.logprobs) == pytest.approx(naive, abs=1e-4)
    assert score.total == pytest.approx(sum(naive), abs=1e-3)
    assert score.mean == pytest.approx(sum(naive) / len(naive), abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-score.mean))
    assert "".join(score.texts) == "4 + 9 = 13"
    assert "perplexity" in repr(score)
    assert "\n" not in repr(score)
    assert len(str(score).splitlines()) == 1 + len(score.tokens)


def test_asking_adds_no_node(loom: Loom) -> None:
    loom.next()
    loom.measure("x")
    assert loom.children == []


@pytest.mark.parametrize("top", [0, -1, True, 1.5])
def test_top_is_a_count(loom: Loom, top: int) -> None:
    with pytest.raises(ConfigError, match="top"):
        loom.next(top=top)


def test_measure_of_empty_text_raises(loom: Loom) -> None:
    for nothing in ("", [""]):
        with pytest.raises(ConfigError, match="no tokens"):
            loom.measure(nothing)
