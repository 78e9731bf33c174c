"""Laws of streams, sync and async."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

import weft
from weft import Heddle, Loom, samples
from weft._core.sampling.params import SamplingParams
from weft.engines.base import Output, Row
from weft.loom import grow


def collect(loom: Loom, **options: object) -> tuple[dict[int, list[int]], dict[int, str]]:
    tokens: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    for delta in loom.stream(**options):
        tokens.setdefault(delta.branch, []).extend(delta.token_ids)
        text[delta.branch] = text.get(delta.branch, "") + delta.text
        assert len(delta.logprobs) == len(delta.token_ids)
    return tokens, text


def test_streamed_children_have_exactly_the_tokens_that_were_streamed(loom: Loom) -> None:
    """B3."""
    tokens, text = collect(loom, n=3, max_tokens=20, stop="\n", seed=4)
    for index, child in enumerate(sorted(loom.children, key=lambda c: c.lineage)):
        assert child.tokens == tokens[index]
        assert child.text == text[index]
        assert len(child.logprobs) == len(child.entropies) == len(child.tokens)


def test_stream_creates_the_children_that_grow_creates(loom: Loom) -> None:
    grown = loom.grow(3, max_tokens=15, stop="\n", seed=4)
    new = sorted(
        list(_follow(loom, n=3, max_tokens=15, stop="\n", seed=4)), key=lambda c: c.lineage
    )
    for one, two in zip(grown, new, strict=True):
        assert (one.tokens, one.finish_reason, one.stop_string) == (
            two.tokens,
            two.finish_reason,
            two.stop_string,
        )
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def _follow(loom: Loom, **options: object) -> list[Heddle]:
    return [delta.node for delta in loom.stream(**options) if delta.finish_reason]


def test_child_is_attached_when_its_branch_ends_and_not_before(loom: Loom) -> None:
    for delta in loom.stream(2, max_tokens=5, seed=1):
        attached = any(child is delta.node for child in loom.children)
        assert attached == (delta.finish_reason is not None)
        assert delta.node.parent is loom
    assert len(loom.children) == 2


def test_nothing_runs_before_the_first_delta(lm: weft.LM, loom: Loom) -> None:
    steps = lm.scheduler.counters.steps
    stream = loom.stream(2, max_tokens=5, seed=1)
    assert lm.scheduler.counters.steps == steps
    stream.close()
    assert loom.children == []


@pytest.mark.parametrize("n_deltas", [1, 2, 3, 7])
def test_abandoned_stream_keeps_what_it_delivered(loom: Loom, n_deltas: int) -> None:
    full = loom.grow(2, max_tokens=20, seed=6)
    streamed: dict[int, list[int]] = {}
    for count, delta in enumerate(loom.stream(2, max_tokens=20, seed=6), start=1):
        streamed.setdefault(delta.branch, []).extend(delta.token_ids)
        if count == n_deltas:
            break
    kept = loom.children[2:]
    assert {child.lineage[0]: child.tokens for child in kept} == streamed
    for child in kept:
        assert child.finish_reason == "cancelled"
        assert not child.terminal
        assert child.tokens == full[child.lineage[0]].tokens[: len(child.tokens)]
        rest = child.grow(max_tokens=20, seed=1)[0]
        assert rest.parent is child
    assert loom.next(3)


def test_stream_over_many_nodes_numbers_branches_over_the_call(loom: Loom) -> None:
    one, two = loom.add("4"), loom.add("9")
    parents = {d.branch: d.node.parent for d in loom.stream(2, at=[one, two], max_tokens=3, seed=1)}
    assert parents == {0: one, 1: one, 2: two, 3: two}


def test_parent_may_change_while_its_children_stream(loom: Loom) -> None:
    node = loom.add("4 + 9 = 13")
    stream = node.stream(max_tokens=6, seed=1)
    next(stream)
    node.clip(2)
    list(stream)
    (child,) = node.children
    assert child.get_prefix_tokens() == loom.tokens + node.tokens + child.tokens
    twin = Loom(loom.lm, child.get_prefix_tokens())
    assert [e.id for e in child.next(5)] == [e.id for e in twin.next(5)]


def test_text_of_a_split_character_is_returned_complete(lm: weft.LM) -> None:
    ids = lm.text.continuation("é漢🦊")
    with Loom(lm, samples.story) as loom:
        node = loom
        for token in ids:
            node = node.add([token])
        assert node.crown() == "é漢🦊"
        assert loom.get_prefix_text(5) == ""


# Asynchronous forms


def test_async_methods_return_what_sync_methods_return(loom: Loom) -> None:
    async def ask() -> tuple[list[Heddle], list[Heddle], object, object]:
        grown = await loom.agrow(2, max_tokens=8, seed=3)
        streamed = [d.node async for d in loom.astream(2, max_tokens=8, seed=3) if d.finish_reason]
        return grown, streamed, await loom.anext(3), await loom.ameasure("4 + 9")

    want = [child.tokens for child in loom.grow(2, max_tokens=8, seed=3)]
    grown, streamed, result, score = asyncio.run(ask())
    assert [child.tokens for child in grown] == want
    assert sorted(child.tokens for child in streamed) == sorted(want)
    assert result == loom.next(3)
    assert score == loom.measure("4 + 9")


def test_gathered_calls_share_steps(lm: weft.LM, loom: Loom) -> None:
    async def ask() -> None:
        await asyncio.gather(*(loom.agrow(max_tokens=10, seed=i) for i in range(6)))

    steps = lm.scheduler.counters.steps
    asyncio.run(ask())
    assert lm.scheduler.counters.steps - steps <= 20


def test_sync_calls_work_inside_a_running_loop(loom: Loom) -> None:
    async def notebook() -> int:
        new = loom.grow(2, max_tokens=4, seed=1)
        list(loom.stream(max_tokens=3, seed=1))
        return len(new[0].next(3))

    assert asyncio.run(notebook()) == 3


def test_cancelled_agrow_keeps_partial_branches(
    loom: Loom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in which it is cancelled ends afterwards."""
    assert loom.lm is not None
    lm, forward, proceed = loom.lm, loom.lm.engine.forward, threading.Event()
    before = lm.scheduler.counters.decoded

    def blocked(rows: Sequence[Row]) -> Output:
        assert lm.scheduler.counters.decoded < before + 10 or proceed.wait()
        return forward(rows)

    monkeypatch.setattr(lm.engine, "forward", blocked)

    async def ask() -> None:
        task = asyncio.create_task(loom.agrow(2, max_tokens=500, seed=1, logit_bias={5: -1e9}))
        while lm.scheduler.counters.decoded < before + 10:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.sleep(0)
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert [child.finish_reason for child in loom.children] == ["cancelled"] * 2
    assert all(0 < len(child.tokens) < 500 for child in loom.children)


def test_abandoned_astream_keeps_what_it_delivered(loom: Loom) -> None:
    streamed: dict[int, list[int]] = {}

    async def ask() -> None:
        stream = loom.astream(2, max_tokens=200, seed=1, logit_bias={5: -1e9})
        async for delta in stream:
            streamed.setdefault(delta.branch, []).extend(delta.token_ids)
            if sum(map(len, streamed.values())) > 6:
                break
        await stream.aclose()

    asyncio.run(ask())
    assert {child.lineage[0]: child.tokens for child in loom.children} == streamed
    assert {child.finish_reason for child in loom.children} == {"cancelled"}


# The known stream


def test_known_items_are_as_documented(loom: Loom) -> None:
    items = list(
        loom.ramify(stream=True, n=3, temp=0.7, max_tokens=10, stop_strings=["\n"], seed=2)
    )
    *updates, final = items
    assert {item["type"] for item in updates} == {"update"}
    for item in updates:
        assert set(item) == {"type", "tokens", "decoded_texts", "ended", "deltas"}
        assert [len(item[key]) for key in ("tokens", "decoded_texts", "ended")] == [3, 3, 3]
        for ids, text in zip(item["tokens"], item["decoded_texts"], strict=True):
            assert loom.lm.text.decode(ids) == text
    assert final["type"] == "final"
    assert set(final) == {
        "type",
        "tokens",
        "decoded_texts",
        "generated_lengths",
        "total_prompt_len",
        "ended",
        "prompt_cache",
        "children",
        "deltas",
    }
    assert final["children"] == sorted(loom.children, key=lambda c: c.lineage)
    assert [child.tokens for child in final["children"]] == final["tokens"]
    assert final["generated_lengths"] == [len(child.tokens) for child in final["children"]]
    assert final["total_prompt_len"] == len(loom.tokens)
    assert final["ended"] == [child.terminal for child in final["children"]]
    assert all(type(item) is dict for item in items)
    for item in updates:
        assert json.loads(json.dumps(item)) == item
    # A server sends the number of children, or their ids.
    assert json.loads(json.dumps({**final, "children": 3})) == {**final, "children": 3}


def test_deltas_of_known_items_are_dicts(loom: Loom) -> None:
    *updates, _ = loom.ramify(stream=True, n=2, max_tokens=6, seed=2)
    for branch, child in enumerate(loom.children):
        mine = [d for item in updates for d in item["deltas"] if d["branch"] == branch]
        assert [token for d in mine for token in d["token_ids"]] == child.tokens
        assert "".join(d["text"] for d in mine) == child.text
        assert [p for d in mine for p in d["logprobs"]] == child.logprobs
        assert {d["node_id"] for d in mine} == {child.id}
        assert [d["finish_reason"] for d in mine][-1] == child.finish_reason


def test_item_read_late_shows_its_own_moment(loom: Loom) -> None:
    items = list(loom.ramify(stream=True, n=2, max_tokens=6, seed=2))
    lengths = [sum(map(len, item["tokens"])) for item in items]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    deltas = [d for item in items for d in item["deltas"]]
    assert sum(len(d["token_ids"]) for d in deltas) == lengths[-1]


def test_known_stream_returns_its_children_and_honours_terminal(
    fluent: weft.LM, loom: Loom
) -> None:
    """B12."""

    def returned(node: Heddle) -> list[Heddle]:
        new = yield from node.make_child_stream(n=2, max_tokens=3, seed=1)
        out.append(new)

    out: list[list[Heddle]] = []
    list(returned(loom))
    assert out == [loom.children]
    ended = Loom(fluent, samples.verdict).grow(max_tokens=10, seed=3)[0]
    items = list(ended.make_child_stream(n=2))
    assert [item["type"] for item in items] == ["final"]
    assert items[0]["children"] == []
    assert ended.children == []


def test_abandoned_known_stream_keeps_what_it_delivered(loom: Loom) -> None:
    for item in loom.ramify(stream=True, n=2, max_tokens=30, seed=1):
        last = item
        if sum(map(len, item["tokens"])) >= 6:
            break
    assert [child.tokens for child in loom.children] == [ids for ids in last["tokens"] if ids]
    assert {child.finish_reason for child in loom.children} == {"cancelled"}


def test_streamed_children_are_in_branch_order_when_they_end_in_another(lm: weft.LM) -> None:
    with Loom(lm, samples.story) as loom:
        first = loom.add("Once")
        deltas = loom.stream(6, max_tokens=150, seed=1)
        ended = [delta.branch for delta in deltas if delta.finish_reason is not None]
        assert ended != sorted(ended)
        assert loom.children[0] is first
        assert [child.lineage for child in loom.children[1:]] == [(i,) for i in range(6)]


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ({"stop": "e", "max_tokens": 200}, ("stop", "e")),
        ({"max_tokens": 3}, ("length", None)),
    ],
)
def test_stream_left_after_the_last_token_has_the_finish_reason_of_the_run(
    loom: Loom, options: dict[str, Any], ended: tuple[str, str | None]
) -> None:
    """The last token and the end of its run are two events: the second may not have been read."""
    params = SamplingParams(n=1, seed=4, **options)
    (full,) = loom.grow(1, seed=4, **options)
    growth = grow.plan([loom], params, force=False, streamed=True)
    with closing(growth.updates()) as steps:
        for step in steps:
            for pending, events in step:
                grow.delta(pending, [event for event in events if event.token is not None])
            if len(growth.branches[0].child.tokens) == len(full.tokens):
                break
    (node,) = growth.children
    assert node.tokens == full.tokens
    assert (node.finish_reason, node.stop_string) == ended
    assert (full.finish_reason, full.stop_string) == ended
