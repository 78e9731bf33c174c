"""Laws of growing."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any

import pytest

import weft
from weft import Heddle, Loom, samples
from weft._core.sched.work import Run
from weft.errors import ConfigError, ContextOverflow, ForwardError, KVFull, Terminal


def texts(nodes: list[Heddle]) -> list[str]:
    return [node.text for node in nodes]


def ended(loom: Loom) -> Heddle:
    """A node that ended with an end token."""
    verdict = Loom(loom.lm, samples.verdict).grow(max_tokens=10, seed=3)[0]
    assert verdict.terminal
    return verdict


def test_grown_children_have_all_their_fields(loom: Loom) -> None:
    new = loom.grow(3, max_tokens=6, temperature=0.7, top_k=20, seed=5)
    assert loom.children == new
    for index, child in enumerate(new):
        assert child.parent is loom
        assert len(child.tokens) == len(child.logprobs) == len(child.entropies) == 6
        assert child.finish_reason == "length"
        assert not child.terminal
        assert child.lineage == (index,)
        assert child.params is not None
        assert (child.params.seed, child.params.top_k, child.params.temperature) == (5, 20, 0.7)
        assert child.mean_logprob == pytest.approx(sum(child.logprobs) / 6)
        assert child.mean_p == pytest.approx(sum(math.exp(x) for x in child.logprobs) / 6)


def test_text_node_has_no_scores_and_never_ranks_first(loom: Loom) -> None:
    child = loom.add("4 + 9")
    assert child.logprobs == child.entropies == []
    assert child.params is None
    assert child.mean_logprob == -math.inf
    assert child.mean_p == 0.0


def test_recorded_logprobs_equal_those_of_measure(loom: Loom) -> None:
    child = loom.grow(max_tokens=12, seed=2)[0]
    score = loom.measure(child.tokens)
    assert list(score.logprobs) == pytest.approx(child.logprobs, abs=1e-4)


def test_call_with_a_seed_is_reproducible_with_other_work_running(lm: weft.LM, loom: Loom) -> None:
    alone = texts(loom.grow(4, max_tokens=10, seed=9))
    with Loom(lm, samples.story) as other:
        other.grow(3, max_tokens=20, seed=1)
        assert texts(loom.grow(4, max_tokens=10, seed=9)) == alone
    assert texts(loom.grow(2, max_tokens=10, seed=9)) == alone[:2]
    assert len(set(alone)) > 1


def test_fresh_seed_is_recorded_and_repeats_the_call(loom: Loom) -> None:
    first = loom.grow(2, max_tokens=8)
    assert first[0].params is not None
    second = loom.grow(2, max_tokens=8, seed=first[0].params.seed)
    assert texts(second) == texts(first)
    other = loom.grow(2, max_tokens=8)[0].params
    assert other is not None
    assert other.seed != first[0].params.seed


def test_temperature_0_gives_n_equal_children(loom: Loom) -> None:
    new = loom.grow(3, max_tokens=8, temperature=0)
    assert len(new) == len(set(map(id, new))) == 3
    assert len(set(texts(new))) == 1
    assert new[0].text == loom.grow(max_tokens=8, temperature=0, seed=77)[0].text


def test_many_nodes_grow_in_one_batch_with_their_own_lineage(lm: weft.LM, loom: Loom) -> None:
    one, two = loom.add("4"), loom.add("9")
    steps = lm.scheduler.counters.steps
    new = loom.grow(2, at=[one, two], max_tokens=6, seed=4)
    assert [child.parent for child in new] == [one, one, two, two]
    assert [child.lineage for child in new] == [(0,), (1,), (2,), (3,)]
    assert lm.scheduler.counters.steps - steps <= 9
    assert loom.grow(at=[]) == []
    twin = loom.add("9")
    assert texts(loom.grow(2, at=iter([one, twin]), max_tokens=6, seed=4)[2:]) == texts(new[2:])


def test_terminal_nodes_raise_alone_and_are_skipped_and_reported_in_a_batch(
    fluent: weft.LM, caplog: pytest.LogCaptureFixture
) -> None:
    loom = Loom(fluent, samples.game24)
    node, live = ended(loom), loom.add("4")
    count = node.count_children()
    with pytest.raises(Terminal) as caught:
        node.grow()
    assert caught.value.hint == "force=True"
    with pytest.raises(Terminal):
        node.stream()
    with pytest.raises(Terminal):
        loom.grow(at=node)
    with caplog.at_level(logging.WARNING, "weft"):
        new = loom.grow(2, at=[node, live], max_tokens=3, seed=1)
    assert new.skipped == [node]
    assert [child.lineage for child in new] == [(2,), (3,)]
    assert "1 terminal" in caplog.text
    assert node.ramify(n=2) == node.make_children() == []
    assert node.count_children() == count
    assert len(node.grow(2, force=True, max_tokens=3, seed=1)) == 2


@pytest.mark.parametrize("given", ["yes", 1, None])
@pytest.mark.parametrize("call", ["grow", "agrow", "stream", "astream"])
def test_force_is_true_or_false(loom: Loom, call: str, given: Any) -> None:
    def called() -> None:
        new = getattr(loom, call)(max_tokens=2, force=given)
        if call == "agrow":
            asyncio.run(new)

    with pytest.raises(ConfigError, match=f"^force is {given!r}; allowed is True or False$"):
        called()
    assert loom.children == []


@pytest.mark.parametrize("given", ["x", 1, None])
def test_show_is_true_or_false(loom: Loom, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"^show is {given!r}; allowed is True or False$"):
        loom.grow(max_tokens=2, show=given)
    assert loom.children == []


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_count_tokens_of_earlier_nodes_as_prompt(loom: Loom, name: str) -> None:
    """A Branch has generated all that it committed, and its prompt was prefilled: not counted."""
    token = loom.lm.tokenize("z")[-1]
    options: dict[str, Any] = {"temperature": 0.0, "logit_bias": {token: 100.0}, name: 200.0}
    node = loom.grow(max_tokens=1, **options)[0]
    assert node.tokens == [token]
    later = node.grow(max_tokens=2, **options)[0]
    assert (token in later.tokens[:1]) == (name != "repetition_penalty")
    assert token not in later.tokens[1:]
    branch = weft.Branch.create(loom.lm, **options)
    branch.prefill([*loom.tokens, token])
    assert branch.produce().token == token
    branch.commit(token)
    assert branch.produce().token != token


def test_end_token_makes_a_node_terminal_and_is_not_in_its_tokens(fluent: weft.LM) -> None:
    node = ended(Loom(fluent, samples.game24))
    assert node.finish_reason == "stop"
    assert node.stop_string is None
    assert not set(node.tokens) & fluent.text.stop_ids
    assert node.add("\nWait.").grow(max_tokens=2, seed=1)


def test_stop_string_ends_the_call_and_not_the_branch(fluent: weft.LM) -> None:
    """B13: matched at the token that completes it; its text stays; the node can grow."""
    loom = Loom(fluent, samples.game24)
    full = loom.grow(max_tokens=40, temperature=0)[0].text
    stop = "= "
    at = full.index(stop) + len(stop)
    node = loom.grow(max_tokens=40, temperature=0, stop=[stop, "never"])[0]
    assert (node.finish_reason, node.stop_string, node.terminal) == ("stop", stop, False)
    assert node.text[:at] == full[:at]
    assert stop not in node.text[: -len(node.tokens and node.text[at - 1 :])]
    assert len(node.text) - at < 8
    on = node.grow(max_tokens=40, temperature=0)[0]
    assert full.startswith((node.text + on.text)[: len(full)])


def test_stop_string_split_over_tokens_ends_the_call(loom: Loom) -> None:
    full = loom.grow(max_tokens=20, temperature=0)[0]
    stop = full.text[2:9]
    assert len(loom._binding.text_lm().tokenize(stop)) > 1
    node = loom.grow(max_tokens=20, temperature=0, stop=stop)[0]
    assert node.stop_string == stop
    assert len(node.tokens) < len(full.tokens)
    assert node.tokens == full.tokens[: len(node.tokens)]
    without_last = loom._binding.text_lm().text.decode(node.tokens[:-1])
    assert stop not in without_last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": -1}, "n is -1"),
        ({"n": True}, "n is True"),
        ({"n": 1.5}, "n is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"seed": -1}, "seed"),
        ({"max_new_tokens": 5}, "Here it is max_tokens"),
        ({"temp": 0.5}, "Here it is temperature"),
        ({"stop_strings": ["x"]}, "Here it is stop"),
        ({"heat": 1}, "unknown"),
        ({"at": ["x"]}, "heddles"),
    ],
)
def test_invalid_options_raise_at_the_call_and_change_nothing(
    loom: Loom, options: dict[str, Any], message: str
) -> None:
    """B10, B11: and the next valid call works."""
    calls = [loom.grow, loom.stream, loom.astream, lambda **o: asyncio.run(loom.agrow(**o))]
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call(**options)
    assert loom.children == []
    assert len(loom.grow(max_tokens=1, seed=1)) == 1


def test_growth_to_the_end_of_the_context_ends_with_reason_context(lm: weft.LM) -> None:
    with Loom(lm, [*lm.tokenize(samples.story), *[9] * (lm.n_ctx - 40)]) as loom:
        room = lm.n_ctx - len(loom.tokens)
        node = loom.grow(max_tokens=100, seed=1, logit_bias={5: -math.inf})[0]
        assert node.finish_reason == "context"
        assert abs(len(node.tokens) - room) <= 1
        with pytest.raises(ContextOverflow) as caught:
            node.add("and then a good deal more")
        assert caught.value.n_ctx == lm.n_ctx
        with pytest.raises(ContextOverflow):
            node.measure("and then a good deal more")


def test_empty_node_grows(loom: Loom) -> None:
    """B9: an empty text, a node clipped to nothing."""
    expected = texts(loom.grow(2, max_tokens=4, seed=1))
    assert texts(loom.add("").grow(2, max_tokens=4, seed=1)) == expected
    clipped = loom.add("4 + 9").clip(0)
    assert clipped.tokens == []
    assert texts(clipped.grow(2, max_tokens=4, seed=1)) == expected
    assert loom.add("").next(3) == loom.next(3)


def test_path_without_tokens_cannot_be_grown(lm: weft.LM) -> None:
    with Loom(lm, samples.game24) as loom:
        loom.clip(0)
        calls = (loom.grow, loom.next, loom.stream, lambda: loom.measure("x"))
        for call in calls:
            with pytest.raises(ConfigError, match="path is empty"):
                call()


def test_failed_call_adds_no_nodes(
    lm: weft.LM, loom: Loom, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = lm.engine.forward, []

    def failing(rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 4:
            raise RuntimeError("cosmic ray")
        return forward(rows)

    monkeypatch.setattr(lm.engine, "forward", failing)
    with pytest.raises(ForwardError, match="cosmic ray"):
        loom.grow(3, max_tokens=10, seed=1)
    assert loom.children == []
    calls.clear()
    stream = loom.stream(3, max_tokens=10, seed=1)
    with pytest.raises(ForwardError, match="cosmic ray"):
        list(stream)
    assert loom.children == []
    monkeypatch.undo()
    assert len(loom.grow(3, max_tokens=10, seed=1)) == 3


def test_ctrl_c_keeps_partial_branches_as_interrupted(
    lm: weft.LM, loom: Loom, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    forward, calls = lm.engine.forward, []

    def interrupting(rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return forward(rows)

    monkeypatch.setattr(lm.engine, "forward", interrupting)
    complete = None
    with pytest.raises(KeyboardInterrupt):
        complete = loom.grow(2, max_tokens=30, seed=1)
    assert complete is None
    assert [child.finish_reason for child in loom.children] == ["interrupted"] * 2
    assert all(0 < len(child.tokens) < 30 for child in loom.children)
    calls.clear()
    streamed: dict[int, list[int]] = {0: [], 1: []}

    def follow() -> None:
        for delta in loom.stream(2, max_tokens=30, seed=1):
            streamed[delta.branch].extend(delta.token_ids)

    with pytest.raises(KeyboardInterrupt):
        follow()
    monkeypatch.undo()
    assert [child.tokens for child in loom.children[2:]] == [streamed[0], streamed[1]]
    assert [child.finish_reason for child in loom.children[2:]] == ["interrupted"] * 2
    full = loom.grow(2, max_tokens=30, seed=1)
    for part, child in zip(loom.children, full, strict=False):
        assert child.tokens[: len(part.tokens)] == part.tokens


def test_eight_threads_growing_different_nodes_give_the_texts_of_growing_alone() -> None:
    with weft.load("tiny") as own, Loom(own, samples.game24) as loom:
        nodes = [loom.add(f"{i} + {i + 1} = ") for i in range(8)]
        alone = [texts(node.grow(2, max_tokens=8, seed=i)) for i, node in enumerate(nodes)]
        result: dict[int, list[str]] = {}

        def grow(index: int) -> None:
            result[index] = texts(nodes[index].grow(2, max_tokens=8, seed=index))

        threads = [threading.Thread(target=grow, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result[i] for i in range(8)] == alone
        assert all(len(node.children) == 4 for node in nodes)


def test_budget_that_forces_recompute_changes_no_text() -> None:
    def grown(budget: Any) -> list[str]:
        with weft.load("tiny", kv_budget=budget) as own, Loom(own, samples.game24) as loom:
            first = loom.grow(4, max_tokens=12, seed=1)
            second = loom.grow(2, at=first, max_tokens=12, seed=2)
            return texts(first) + texts(
                second.copy() + loom.grow(2, at=first[:1], max_tokens=6, seed=3)
            )

    with weft.load("tiny") as own:
        slot = own.info.kv_bytes_per_token
    assert grown(slot * 110) == grown("auto")


def test_runs_of_one_call_share_their_prefix(lm: weft.LM) -> None:
    with weft.load("tiny") as own, Loom(own, samples.word_problem) as loom:
        loom.grow(4, max_tokens=2, seed=1)
        assert own.scheduler.counters.prefilled <= len(loom.tokens) + 8


def test_nodes_of_another_model_raise(lm: weft.LM, loom: Loom) -> None:
    with weft.load("tiny") as own, Loom(own, samples.game24) as other:
        with pytest.raises(ConfigError, match="one model"):
            loom.grow(at=[loom, other])
        with pytest.raises(weft.WeftError, match="another model"):
            loom.add_child(other.add("x"))


def test_adding_text_runs_no_model(lm: weft.LM, loom: Loom) -> None:
    steps = lm.scheduler.counters.steps
    node = loom.add("4 + 9").add(" = 13").add([5, 6])
    assert lm.scheduler.counters.steps == steps
    assert node.get_prefix_tokens()[-2:] == [5, 6]
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        loom.add([99_999])
    with pytest.raises(ConfigError, match="integers"):
        loom.add(["x"])  # type: ignore[list-item]
    assert len(loom.children) == 1


def test_special_token_in_user_text_is_plain_text(lm: weft.LM, loom: Loom) -> None:
    child = loom.add("<|end|>")
    assert not set(child.tokens) & lm.text.special_ids
    assert child.text == "<|end|>"


def test_run_items_carry_only_what_they_need(loom: Loom) -> None:
    """Without stop strings and stream there is no sink: the host does nothing per token."""
    from weft._core.sampling.params import SamplingParams
    from weft.loom.grow import plan, with_seed

    growth = plan([loom], with_seed(SamplingParams(n=2)), force=False, streamed=False)
    assert all(isinstance(run, Run) and run.sink is None for run in growth._runs)


def test_budget_too_small_for_one_path_raises_kv_full_and_does_not_change_the_tree() -> None:
    with weft.load("tiny") as own:
        slot = own.info.kv_bytes_per_token
    with weft.load("tiny", kv_budget=slot * 30) as own, Loom(own, samples.game24) as loom:
        with pytest.raises(KVFull) as caught:
            loom.grow(2, max_tokens=60, logit_bias={5: -math.inf}, seed=1)
        assert caught.value.capacity == 30
        assert loom.children == []
        stream = loom.stream(max_tokens=60, logit_bias={5: -math.inf}, seed=1)
        with pytest.raises(KVFull):
            list(stream)
        assert loom.children == []
        assert len(loom.grow(2, max_tokens=3, seed=1)) == 2


def test_failed_branch_of_a_stream_ends_with_error_and_others_continue() -> None:
    with weft.load("tiny") as own:
        slot = own.info.kv_bytes_per_token
    with weft.load("tiny", kv_budget=slot * 60) as own:
        short, long = Loom(own, samples.verdict), Loom(own, [5] * 58)
        last: dict[int, str | None] = {}

        def follow() -> None:
            for delta in short.stream(
                at=[short, long], max_tokens=20, logit_bias={5: -1e9}, seed=1
            ):
                last[delta.branch] = delta.finish_reason

        with pytest.raises(KVFull):
            follow()
        assert last == {0: "length", 1: "error"}
        assert [len(child.tokens) for child in short.children] == [20]
        assert long.children == []
