"""Laws of the known names, and the README program of the library they come from."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft import Heddle, Loom, samples
from weft.errors import ConfigError, ContextOverflow, NotAChild, StaleHandle, Unsupported


def test_known_defaults(loom: Loom) -> None:
    new = loom.ramify()
    assert len(new) == 4
    params = new[0].params
    assert (params.temperature, params.max_tokens, params.min_p) == (0.8, 8, 0.05)
    assert params.temperature_first
    assert all(len(child.tokens) <= 8 for child in new)


def test_ramify_adds_texts_and_generates_without_one(loom: Loom) -> None:
    one = loom.ramify("4 + 9")
    assert isinstance(one, Heddle)
    assert one.text == "4 + 9"
    assert [child.text for child in loom.ramify(["a", "b"])] == ["a", "b"]
    assert loom.ramify([]) == []
    assert isinstance(loom.ramify("x", stream=True, n=3), Heddle)
    assert len(loom.ramify(None, n=2, max_tokens=2)) == 2
    for wrong in (5, ("a",), ["a", 1]):
        with pytest.raises(ConfigError, match="ramify takes"):
            loom.ramify(wrong)


class Noting(Heddle):
    """A program's own class, by the known signature of `add_text_child`."""

    def add_text_child(self, text):
        return super().add_text_child(f"[{text}]")


class NotingLoom(Loom, Noting):
    """The root of such nodes."""

    heddle_class = Noting


def test_ramify_of_a_text_calls_an_overridden_add_text_child(lm: weft.LM) -> None:
    root = NotingLoom(lm, samples.game24)
    assert root.ramify("4 + 9").text == "[4 + 9]"
    assert [child.text for child in root.ramify(["a", "b"])] == ["[a]", "[b]"]
    assert root.children[0].ramify("c").text == "[c]"


def test_removing_a_node_that_is_no_child_raises_value_error(loom: Loom) -> None:
    child = loom.add("4 + 9")
    below = child.add(" = ")
    for stranger in (below, loom, child.remove(), None, "4 + 9"):
        with pytest.raises(NotAChild, match="none of its children") as caught:
            loom.remove_child(stranger)
        assert isinstance(caught.value, ValueError)
        assert caught.value.hint == "call node.remove()"
    assert child.children == [below]


def test_known_calls_accept_weft_names_and_reject_unknown_ones(loom: Loom) -> None:
    new = loom.make_children(2, 0.5, 4, 0.1, ["\n"], seed=3, top_k=5)
    assert (new[0].params.seed, new[0].params.top_k, new[0].params.stop) == (3, 5, ("\n",))
    for options in ({"max_new_tokens": 3}, {"tmep": 1.0}):
        for call in (loom.ramify, loom.make_children, loom.make_child_stream):
            with pytest.raises(ConfigError):
                call(**options)
        with pytest.raises(ConfigError):
            loom.ramify("text", **options)
    for options in ({"n": 0}, {"max_tokens": 0}, {"min_p": 2.0}, {"temp": -1.0}):
        with pytest.raises(ConfigError):
            loom.ramify(**options)
    assert loom.ramify(n=1, max_tokens=1)


def test_text_child_is_predicted_from_its_full_path(lm: weft.LM, loom: Loom) -> None:
    """B1, B2 of the notes: nothing is dropped, shifted or fed twice."""
    node = loom.add_text_child("I will").grow(max_tokens=3, seed=1)[0].add_text_child(" so")
    fresh = Loom(lm, node.get_prefix_tokens())
    assert [e.id for e in node.next(8)] == [e.id for e in fresh.next(8)]
    assert node.next(8)[0].logprob == pytest.approx(fresh.next(8)[0].logprob, abs=1e-4)


@pytest.mark.parametrize("limit", [2, -1, 0])
def test_clipped_text_node_equals_a_fresh_prefix(lm: weft.LM, loom: Loom, limit: int) -> None:
    """B5, B6."""
    node = loom.add_text_child("13 - 9 = 4 (left").clip(limit)
    fresh = Loom(lm, node.get_prefix_tokens())
    assert node.next(5) == fresh.next(5)


def test_clipped_ended_node_grows(fluent: weft.LM) -> None:
    """B6."""
    node = Loom(fluent, samples.verdict).grow(max_tokens=10, seed=3)[0]
    assert node.terminal
    node.trim(1)
    assert not node.terminal
    assert node.finish_reason is None
    assert len(node.ramify(n=2, max_tokens=2)) == 2


def test_setting_the_text_changes_the_prediction(lm: weft.LM, loom: Loom) -> None:
    """B7: for the node and for what stands below."""
    node = loom.add("4 + 9")
    below = node.add(" = ")
    before = below.next(3)
    node.text = "10 + 13"
    assert node.tokens == lm.text.continuation("10 + 13")
    assert below.next(3) != before
    assert below.next(3) == Loom(lm, below.get_prefix_tokens()).next(3)
    new = node.grow(max_tokens=3, seed=1)[0]
    new.text = "x"
    assert new.logprobs == []
    assert new.params is None
    loom.text = lm.format_chat([{"role": "user", "content": "What is 1 + 1?"}])
    assert loom.tokens == Loom(lm, "What is 1 + 1?").tokens
    assert below.next(3) == Loom(lm, below.get_prefix_tokens()).next(3)


def test_rejected_text_changes_nothing(lm: weft.LM, loom: Loom) -> None:
    node = loom.add("4 + 9")
    with pytest.raises(ContextOverflow):
        node.text = "word " * 3000
    assert node.text == "4 + 9"
    with pytest.raises(ConfigError):
        node.tokens = [99_999]
    assert node.text == "4 + 9"


def test_moved_subtree_continues_its_new_parent(lm: weft.LM, loom: Loom) -> None:
    """B8."""
    one, two = loom.add("4 + 9"), loom.add("10 + 13")
    child = one.add(" = ")
    below = child.grow(max_tokens=2, seed=1)[0]
    two.add_child(child)
    assert one.children == []
    assert two.children == [child]
    for node in (child, below):
        assert node.get_prefix_tokens()[: len(loom.tokens)] == loom.tokens
        assert node.next(3) == Loom(lm, node.get_prefix_tokens()).next(3)


def test_removed_child_is_its_own_path(lm: weft.LM, loom: Loom) -> None:
    """B8."""
    child = loom.add("4 + 9")
    below = child.add(" = ")
    assert loom.remove_child(child) is child
    assert loom.children == []
    assert below.get_prefix_tokens() == child.tokens + below.tokens
    assert below.next(3) == Loom(lm, below.get_prefix_tokens()).next(3)
    assert child.grow(max_tokens=2, seed=1)
    loom.add_child(child)
    assert below.next(3) == Loom(lm, below.get_prefix_tokens()).next(3)


def test_split_changes_no_prediction(lm: weft.LM, loom: Loom) -> None:
    node = loom.grow(max_tokens=6, seed=1)[0]
    below = node.add(" so")
    before, after = below.next(5), node.next(5)
    lower = node.split(2)
    assert below.next(5) == before
    assert lower.next(5) == after
    assert node.next(5) == Loom(lm, node.get_prefix_tokens()).next(5)


def test_apply_at_leaves_runs_the_calls_of_all_leaves_as_one_batch(lm: weft.LM, loom: Loom) -> None:
    leaves = [loom.add(f"{i} + ") for i in range(6)]
    steps = lm.scheduler.counters.steps
    new = loom.apply_at_leaves(lambda leaf: leaf.ramify(n=2, max_tokens=8, seed=5))
    assert lm.scheduler.counters.steps - steps <= 12
    assert [type(children) for children in new] != [None] * 6
    assert new == [leaf.children for leaf in leaves]
    assert all(len(children) == 2 for children in new)
    for leaf, children in zip(leaves, new, strict=True):
        alone = leaf.ramify(n=2, max_tokens=8, seed=5)
        assert [c.tokens for c in alone] == [c.tokens for c in children]


def test_children_read_inside_the_function_exist(loom: Loom) -> None:
    for i in range(3):
        loom.add(f"{i} + ")

    def use(leaf: Heddle) -> tuple[int, int, Any]:
        new = leaf.ramify(n=2, max_tokens=3, seed=1)
        return len(leaf.children), len([child.text for child in new]), new[0].parent is leaf

    assert loom.apply_at_leaves(use) == [(2, 2, True)] * 3
    new = loom.at_all_leaves(lambda leaf: leaf.ramify(n=1, max_tokens=1)[0])
    assert new == loom.leaves


def test_failing_function_of_apply_at_leaves_keeps_the_calls_before_it(loom: Loom) -> None:
    leaves = [loom.add(f"{i} + ") for i in range(3)]

    def fail_last(leaf: Heddle) -> None:
        if leaf is leaves[2]:
            raise LookupError("mine")
        leaf.ramify(n=2, max_tokens=2)

    with pytest.raises(LookupError, match="mine"):
        loom.apply_at_leaves(fail_last)
    assert [len(leaf.children) for leaf in leaves] == [2, 2, 0]
    assert loom.ramify(n=1, max_tokens=1)


def test_mistakes_inside_apply_at_leaves_raise_at_the_call(loom: Loom) -> None:
    caught = []

    def wrong(leaf: Heddle) -> None:
        with pytest.raises(ConfigError):
            leaf.ramify(n=0)
        caught.append(leaf)

    loom.add("x")
    loom.apply_at_leaves(wrong)
    assert len(caught) == 1
    loom.close()
    with pytest.raises(StaleHandle):
        loom.apply_at_leaves(lambda leaf: leaf.ramify())


def test_frag_is_the_nodes_own_kv_in_the_known_shape(lm: weft.LM, loom: Loom) -> None:
    child = loom.add("4 + 9")
    frags = child.frag
    assert len(frags) == lm.info.n_layers
    for keys, values in frags:
        assert keys.shape == values.shape == (1, 2, len(child.tokens), 64)
    assert frags[0].start == len(loom.tokens)
    assert frags[0].token_ids == tuple(child.tokens)
    assert loom.frag[0].keys.shape[2] == len(loom.tokens)


REFLECTION = "\n...Wait. I need to look at the problem again. I could've"


def reflect(root: Loom) -> list[str]:
    """The README program of the existing library, with small numbers."""
    assistant_start = root.add_text_child("I will solve this problem step by step.")
    assistant_start.ramify(n=4, temp=0.6, max_tokens=12, min_p=0.01)
    return assistant_start.apply_at_leaves(
        lambda x: x.ramify(REFLECTION) if x.terminal else None,
        lambda x: x.ramify(n=2, temp=0.6, max_tokens=12, min_p=0.01),
        lambda x: x.crown(),
    )


def test_reflection_program_runs(lm: weft.LM) -> None:
    for root in (Loom(lm, samples.sum), Loom(lm, lm.tokenizer, samples.sum)):
        answers = reflect(root)
        leaves = root.get_all_leaves()
        assert answers == [leaf.crown() for leaf in leaves]
        assert all(answer.startswith("I will solve") for answer in answers)
        assert root.count_leaves() == len(answers) >= 4
        for leaf in leaves[:2]:
            if not leaf.terminal:
                assert leaf.next(3) == Loom(lm, leaf.get_prefix_tokens()).next(3)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """A Transformers model and tokenizer, as their owner has them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weft.engines.hub import resolve

    folder = resolve("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.torch
def test_reflection_program_runs_on_a_loaded_transformers_model(
    loaded: tuple[Any, Any],
) -> None:
    model, tokenizer = loaded
    root = Loom(model, tokenizer, samples.sum)
    assert root.model is model
    assert root.tokenizer is tokenizer
    answers = reflect(root)
    assert len(answers) == root.count_leaves()
    assert Loom(model, tokenizer, samples.sum).lm is root.lm


@pytest.mark.torch
def test_transformers_model_continues_from_the_prefix_cache(loaded: tuple[Any, Any]) -> None:
    import torch

    from weft.engines.torch.model import cache_name

    model, tokenizer = loaded
    loom = Loom(model, tokenizer, samples.game24)
    node = loom.add("4 + 9").grow(max_tokens=5, seed=1)[0]
    cache = node.get_prefix_cache()
    token = node.next(1)[0].id
    with torch.inference_mode():
        logits = model(torch.tensor([[token]]), **{cache_name(model): cache}).logits[0, -1]
    result = torch.log_softmax(logits.double(), -1)
    for entry in node.add([token]).next(20):
        assert entry.logprob == pytest.approx(float(result[entry.id]), abs=1e-4)


def test_engine_without_a_library_has_no_cache_object(loom: Loom) -> None:
    with pytest.raises(Unsupported, match="numpy"):
        loom.get_prefix_cache()


@pytest.mark.parametrize(
    "grow",
    [
        lambda leaf: leaf.ramify(n=2, max_tokens=12, seed=5, temp=3.0),
        lambda leaf: leaf.grow(n=2, max_tokens=12, seed=5, temperature=3.0, min_p=0.01),
        lambda leaf: list(leaf.ramify(n=2, max_tokens=12, seed=5, temp=3.0, stream=True)) and None,
    ],
)
def test_equal_leaves_get_different_children_from_one_seed_and_the_same_each_time(
    lm: weft.LM, grow
) -> None:
    def grown() -> list[list[int]]:
        loom = Loom(lm, "Use 4 9 10 13 to make 24.")
        leaves = [loom.add("So: ") for _ in range(3)]
        loom.apply_at_leaves(grow)
        return [child.tokens for leaf in leaves for child in leaf.children]

    first = grown()
    assert len({tuple(tokens) for tokens in first}) == 6
    assert grown() == first
