"""Several models in one search, and text that the searching model has to read."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import weft
from llama_reference import write_folder
from searches import DEEP, by_default, call, small
from weft import Loom, samples, search
from weft.errors import ConfigError
from weft.search import STRATEGIES, score
from weft.search.core import Steps
from weft.search.judge import Judge


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[weft.LM]:
    """A model with a tokenizer of its own, a token a byte, and random weights."""
    folder = tmp_path_factory.mktemp("other")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    new = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    new.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    new.decoder = decoders.ByteLevel()
    write_folder(folder, {"vocab_size": len(alphabet), "max_position_embeddings": 2048})
    new.save(str(folder / "tokenizer.json"))
    with weft.load(folder, engine="numpy") as lm:
        yield lm


# What a strategy needs for each of two models to write.
MORE: dict[str, dict[str, Any]] = {"adaptive": {"rounds": 3, "batch": 4}}


@pytest.mark.parametrize(
    "name",
    by_default(name for name, row in STRATEGIES.items() if "propose" not in row.unused()),
)
def test_each_node_records_the_model_that_wrote_it(name: str, lm: weft.LM, other: weft.LM) -> None:
    result = small(
        name,
        lm,
        samples.sum,
        propose={"trained": lm, "random": other},
        max_tokens=6,
        stop=None,
        **({"depth": 2} if name in DEEP else {"n": 5}),
        **MORE.get(name, {}),
    )
    wrote: dict[str, list[weft.Heddle]] = {"trained": [], "random": []}
    for node in result.loom.get_all_children():
        wrote[node.meta["by"]].append(node)
    assert all(node.logprobs or not node.tokens for node in wrote["trained"])
    assert not any(node.logprobs for node in wrote["random"])
    assert wrote["trained"]
    assert wrote["random"]
    assert all(node.score is not None for nodes in wrote.values() for node in nodes)
    if name not in DEEP:
        assert Counter({by: len(nodes) for by, nodes in wrote.items()}) == {
            "trained": 3,
            "random": 2,
        }


def test_another_model_continues_the_full_path_with_its_own_tokens(
    lm: weft.LM, other: weft.LM
) -> None:
    """Its greedy line is what it writes after prompt and path as one text of its own."""
    loom = Loom(lm, samples.sum)
    node = loom.add("37 + 58 is")
    result = search.tot(
        lm,
        node,
        propose={"random": other},
        n_continue=1,
        depth=1,
        temperature=0.0,
        max_tokens=5,
        stop=None,
        complete=False,
    )
    with Loom(other, samples.sum) as twin:
        (line,) = twin.add("37 + 58 is").grow(temperature=0.0, max_tokens=5)
    assert result.best.text == line.text
    assert result.best.meta["by"] == "random"


def test_search_with_its_own_model_as_proposer_equals_the_plain_search(lm: weft.LM) -> None:
    """The same model under a name: the tree is the one of the search without names."""
    options: dict[str, Any] = {"seed": 1, "breadth": 2, "n_continue": 2, "n_suggest": 2, "depth": 2}
    named = search.tot(lm, samples.game24, propose={"tiny": lm}, **options)
    plain = search.tot(lm, samples.game24, **options)
    assert [node.text for node in named.loom.walk()] == [node.text for node in plain.loom.walk()]


def test_awaited_search_of_several_models_equals_the_plain_one(lm: weft.LM, other: weft.LM) -> None:
    options: dict[str, Any] = {
        "propose": {"trained": lm, "random": other},
        "n": 4,
        "max_tokens": 6,
        "seed": 1,
    }
    plain = search.best_of_n(lm, samples.sum, **options)
    awaited = asyncio.run(search.abest_of_n(lm, samples.sum, **options))
    assert [n.text for n in plain.loom.children] == [n.text for n in awaited.loom.children]


def test_adaptive_search_prefers_the_model_that_writes_better(lm: weft.LM, other: weft.LM) -> None:
    """Digits are what the trained model writes; the other gets nothing right."""
    result = search.adaptive(
        lm,
        samples.sum,
        propose={"trained": lm, "random": other},
        value=lambda node: 0.9 if node.meta.get("by") == "trained" else 0.02,
        rounds=12,
        batch=4,
        widen=1,
        depth=1,
        temperature=3.0,
        max_tokens=3,
        stop=None,
        answer_tokens=0,
        seed=1,
    )
    wrote = Counter(node.meta["by"] for node in result.loom.children)
    assert wrote["trained"] > 2 * wrote["random"]


def test_token_ids_as_prompt_for_two_models_raise(lm: weft.LM, other: weft.LM) -> None:
    with pytest.raises(ConfigError, match="as a text or as chat messages"):
        search.best_of_n(lm, Loom(lm, samples.sum).tokens, n=2, propose={"a": lm, "b": other})


# Text that was added is read by the model


def naive(lm: weft.LM, prompt: str, texts: list[str]) -> float:
    """The mean logprob of all tokens of a path, each text measured after what stands before it."""
    with Loom(lm, prompt) as loom:
        node: weft.Heddle = loom
        logprobs: list[float] = []
        for text in texts:
            logprobs += node.measure(text).logprobs
            node = node.add(text)
    return sum(logprobs) / len(logprobs)


@pytest.mark.parametrize("name", by_default(DEEP))
def test_text_of_a_proposer_is_scored_by_the_model(
    name: str, lm: weft.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In logprobs, as a share where the strategy's judge says so, or as a judge of its own says."""
    judges: list[Judge] = []

    def scored(judge: Judge, nodes: list[weft.Heddle]) -> Steps[None]:
        judges.append(judge)
        return score_nodes(judge, nodes)

    score_nodes = Judge.score
    monkeypatch.setattr(Judge, "score", scored)
    lines = ["37 + 58 = 95.\n", "37 + 58 = 96.\n", "owl\n"]
    result = call(name)(
        lm,
        samples.sum,
        propose=lambda nodes: [lines] * len(nodes),
        depth=1,
        complete=False,
        **STRATEGIES[name].fixed,
    )
    assert judges
    if "_scores" in vars(type(judges[0])):
        return
    for node in result.loom.children:
        expected = naive(lm, samples.sum, [node.text])
        if judges[0].as_share:
            expected = math.exp(expected)
        assert node.score == pytest.approx(expected, abs=1e-5)
    assert result.best.text == lines[0]


def test_sampled_and_added_text_of_one_path_count_alike(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)
    (grown,) = loom.grow(max_tokens=4, temperature=0.0)
    end = grown.add(" and").grow(max_tokens=3, temperature=0.0)[0]
    (result,) = score.mean_logprob([end])
    assert result == pytest.approx(
        naive(lm, samples.sum, [node.text for node in end.path[1:]]), abs=1e-5
    )
    assert not end.path[2].logprobs


def test_scored_text_is_not_scored_twice(lm: weft.LM) -> None:
    loom = Loom(lm, samples.sum)
    node = loom.add("37 + 58 = 95.")
    first = score.mean_logprob([node])
    before = lm.stats().steps
    assert score.mean_logprob([node]) == first
    assert lm.stats().steps == before


def test_best_of_n_prefers_the_likelier_of_texts_that_were_proposed(lm: weft.LM) -> None:
    texts = [f"37 + 58 = {n}.\nThe answer is {n}." for n in (94, 95, 96)]
    result = search.best_of_n(lm, samples.sum, n=3, propose=lambda nodes: [texts])
    assert result.text == texts[1]
    assert all(math.isfinite(vote.mean_logprob) for vote in result.votes)


@pytest.mark.parametrize("options", [{"complete": False}, {"answer_tokens": 0}])
def test_finished_answer_gets_no_added_words(options: dict[str, Any], lm: weft.LM) -> None:
    before = lm.stats().decoded
    for name in DEEP:
        result = call(name)(
            lm,
            samples.sum,
            propose=lambda nodes: [["The answer is 95."]] * len(nodes),
            verifier=lambda text: text.endswith("95."),
            depth=1,
            **STRATEGIES[name].fixed,
            **options,
        )
        assert (result.text, result.solved) == ("The answer is 95.", True)
    assert lm.stats().decoded == before
