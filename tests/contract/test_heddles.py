"""Law 9, on every engine and fake: a heddle predicts what one plain forward predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weft
from contract.conftest import Make, Oracle
from contract.helpers import ask, assert_close, within
from weft import Heddle, Loom, samples
from weft._core.sched.work import Logits

pytestmark = pytest.mark.torch


def prompt(lm: weft.LM, tmp: Path) -> Heddle:
    return Loom(lm, samples.game24)


def raw_prompt(lm: weft.LM, tmp: Path) -> Heddle:
    return Loom(lm, "Once upon a time", template=False)


def text_child(lm: weft.LM, tmp: Path) -> Heddle:
    return Loom(lm, samples.game24).add("4 + 9 = 13").add(" (left")


def generated(lm: weft.LM, tmp: Path) -> Heddle:
    return Loom(lm, samples.game24).grow(3, max_tokens=9, seed=1)[1]


def generated_on_generated(lm: weft.LM, tmp: Path) -> Heddle:
    return generated(lm, tmp).grow(2, max_tokens=5, seed=1)[0].add(" so").grow(max_tokens=3)[0]


def stopped(lm: weft.LM, tmp: Path) -> Heddle:
    return Loom(lm, samples.game24).grow(max_tokens=40, stop="\n", seed=1)[0]


def ended(lm: weft.LM, tmp: Path) -> Heddle:
    likelier = dict.fromkeys(lm.text.stop_ids, 4.0)
    for seed in range(1, 30):  # most models end soon
        node = Loom(lm, samples.verdict).grow(max_tokens=40, seed=seed, logit_bias=likelier)[0]
        if node.terminal and len(node.tokens) > 1:
            break
    assert node.terminal
    assert len(node.tokens) > 1
    return node.add("\nWait.")


def streamed(lm: weft.LM, tmp: Path) -> Heddle:
    loom = Loom(lm, samples.game24)
    list(loom.stream(3, max_tokens=7, seed=1))
    return loom.children[2]


def abandoned(lm: weft.LM, tmp: Path) -> Heddle:
    loom = Loom(lm, samples.game24)
    for count, _ in enumerate(loom.stream(2, max_tokens=30, seed=1)):
        if count > 10:
            break
    return loom.children[0]


def in_a_batch(lm: weft.LM, tmp: Path) -> Heddle:
    loom = Loom(lm, samples.game24)
    nodes = [loom.add("4"), loom.add("10 + 13 = "), loom]
    return loom.grow(2, at=nodes, max_tokens=5, seed=1)[3]


def by_leaves(lm: weft.LM, tmp: Path) -> Heddle:
    loom = Loom(lm, samples.game24)
    loom.ramify(["4 + ", "9 + "])
    loom.apply_at_leaves(lambda leaf: leaf.ramify(n=2, max_tokens=5, seed=1))
    return loom.leaves[-1]


def clipped(lm: weft.LM, tmp: Path) -> Heddle:
    return generated(lm, tmp).clip(4)


def clipped_to_nothing(lm: weft.LM, tmp: Path) -> Heddle:
    return generated(lm, tmp).clip(0).grow(max_tokens=3, seed=1)[0]


def trimmed_text(lm: weft.LM, tmp: Path) -> Heddle:
    return text_child(lm, tmp).trim(1)


def split_upper(lm: weft.LM, tmp: Path) -> Heddle:
    node = generated(lm, tmp)
    node.split(3)
    return node


def split_lower(lm: weft.LM, tmp: Path) -> Heddle:
    return generated(lm, tmp).split(3)


def moved(lm: weft.LM, tmp: Path) -> Heddle:
    loom = Loom(lm, samples.game24)
    node, other = loom.grow(2, max_tokens=5, seed=1)
    below = node.add(" so").grow(max_tokens=2, seed=1)[0]
    other.add_child(node)
    return below


def detached(lm: weft.LM, tmp: Path) -> Heddle:
    return generated(lm, tmp).remove()


def retold(lm: weft.LM, tmp: Path) -> Heddle:
    node = generated(lm, tmp)
    below = node.add(" so")
    node.text = "10 + 13"
    return below


def reloaded(lm: weft.LM, tmp: Path) -> Heddle:
    node = generated_on_generated(lm, tmp)
    node.path[0].save(tmp / "x.loom.json")  # type: ignore[attr-defined]
    return Loom.open(tmp / "x.loom.json", lm).find(node.id)


def after_losing_all_kv(lm: weft.LM, tmp: Path) -> Heddle:
    node = generated_on_generated(lm, tmp)
    lm.clear_cache()
    return node


def imported(lm: weft.LM, tmp: Path) -> Heddle:
    node = generated(lm, tmp)
    arrays = {name: array.copy() for name, array in lm.kv.export(node.place).items()}
    lm.clear_cache()
    fresh = Loom(lm, node.get_prefix_tokens())
    fresh._place = lm.kv.insert(fresh.tokens, arrays)
    return fresh


HEDDLES = [
    prompt,
    raw_prompt,
    text_child,
    generated,
    generated_on_generated,
    stopped,
    ended,
    streamed,
    abandoned,
    in_a_batch,
    by_leaves,
    clipped,
    clipped_to_nothing,
    trimmed_text,
    split_upper,
    split_lower,
    moved,
    detached,
    retold,
    reloaded,
    after_losing_all_kv,
    imported,
]


@pytest.mark.parametrize("heddle", HEDDLES, ids=lambda heddle: heddle.__name__)
def test_9_next_token_logits_equal_a_plain_forward(
    kind: str,
    make: Make,
    oracle: Oracle,
    tmp_path: Path,
    heddle: Callable[[weft.LM, Path], Heddle],
) -> None:
    lm = make(kind)
    if lm.info.kv == "hidden" and heddle is imported:
        pytest.skip("a hidden engine keeps its KV to itself")
    node = heddle(lm, tmp_path)
    place = node.place
    result = ask(lm, place, Logits(place.depth))[0]
    assert_close(result, oracle(node.get_prefix_tokens())[-1])


def test_recorded_logprobs_and_entropies_equal_a_plain_forward(
    kind: str, make: Make, oracle: Oracle
) -> None:
    lm = make(kind)
    node = Loom(lm, samples.game24).grow(2, max_tokens=6, temperature=0.5, top_k=5, seed=1)[1]
    before = node.parent.get_prefix_tokens()
    for index, token in enumerate(node.tokens):
        logits = oracle(before + node.tokens[:index])[-1].astype(np.float64)
        logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert node.logprobs[index] == pytest.approx(logp[token], abs=within())
        assert node.entropies[index] == pytest.approx(
            -(np.exp(logp) * logp).sum(), abs=within(1e-3)
        )
