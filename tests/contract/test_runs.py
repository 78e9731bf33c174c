"""Runs on every engine and fake: the same texts alone, together, streamed, parked and resumed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from contract.conftest import Make
from contract.helpers import (
    STORY,
    TOLERANCE,
    ask,
    drawn_by_weft,
    logits_at,
    prompt_ids,
    run_all,
    run_item,
)
from effort import lines_run
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import draw_rows, probabilities
from weft._core.sched.driver import Channel
from weft._core.sched.work import Extend, Logits, RunResult
from weft.errors import ContextOverflow, KVFull
from weft.lm.lm import LM


def tokens_of(results: list[RunResult]) -> list[list[int]]:
    return [result.tokens for result in results]


def batch(lm: LM, n: int = 6, **options: object) -> list[RunResult]:
    """n runs from the puzzle and n from the story, in one batch."""
    first, second = lm.place(prompt_ids(lm)), lm.place(prompt_ids(lm, STORY))
    items = [run_item(lm, first, 1, i, **options) for i in range(n)]
    items += [run_item(lm, second, 2, i, **options) for i in range(n)]
    return run_all(lm, items)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[int]]]:
    """The texts that the first kind gave; every other must give the same."""
    return {}


def test_10_text_is_the_same_alone_and_in_a_batch_on_every_engine(
    kind: str, make: Make, expected: dict[int, list[list[int]]]
) -> None:
    lm = make(kind)
    together = tokens_of(batch(lm, 3))
    if not lm.info.own_random:
        assert expected.setdefault(16, together) == together
    lm.clear_cache()
    place = lm.place(prompt_ids(lm))
    alone = [run_all(lm, [run_item(lm, place, 1, i)])[0].tokens for i in range(3)]
    assert alone == together[:3]
    assert len({tuple(tokens) for tokens in together}) > 1


def test_10_async_gives_the_same_as_sync(kind: str, make: Make) -> None:
    lm = make(kind)
    want = tokens_of(batch(lm, 2))

    async def one(index: int) -> list[int]:
        place = lm.place(prompt_ids(lm))
        tickets = await lm.asubmit([run_item(lm, place, 1, index)])
        await lm.adrive(tickets)
        tokens: list[int] = tickets[0].result().tokens
        return tokens

    async def both() -> list[list[int]]:
        return await asyncio.gather(one(0), one(1))

    assert asyncio.run(both()) == want[:2]
    assert asyncio.run(both()) == want[:2]


def test_gather_of_n_callers_is_one_step(kind: str, make: Make) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)

    async def one(token: int) -> None:
        path = [*ids, token]
        tickets = await lm.asubmit([Extend(lm.place(path), (), (Logits(len(path)),))])
        await lm.adrive(tickets)
        tickets[0].result()

    async def all_of(tokens: range) -> None:
        await asyncio.gather(*(one(token) for token in tokens))

    logits_at(lm, ids)
    before = lm.stats().steps
    asyncio.run(all_of(range(40, 47)))  # within the tags of a sequence engine
    assert lm.stats().steps == before + 1


def test_10_streamed_tokens_are_the_runs_tokens(kind: str, make: Make) -> None:
    lm = make(kind)
    channel = Channel()
    place = lm.place(prompt_ids(lm))
    items = []
    for index in range(3):

        def sink(state: object, index: int = index) -> None:
            channel.put((index, state.tokens[-1]))  # type: ignore[attr-defined]

        items.append(run_item(lm, place, 1, index, sink=sink))
    tickets = lm.submit(items)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for events in lm.pump(channel, tickets):
        for index, token in events:
            streamed[index].append(token)
    assert list(streamed.values()) == [ticket.result().tokens for ticket in tickets]


def test_eight_threads_get_the_same_texts_as_alone(kind: str, make: Make) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)
    places = [lm.place([*ids, 20 + i]) for i in range(8)]
    want = [run_all(lm, [run_item(lm, place, 1)])[0].tokens for place in places]
    lm.clear_cache()
    got: dict[int, list[int]] = {}

    def work(index: int) -> None:
        got[index] = run_all(lm, [run_item(lm, places[index], 1)])[0].tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(8)] == want


def test_equal_prefixes_are_computed_once(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    paths = [ids, ids, [*ids, 40], [*ids, 40, 41], [*ids[:5], 50]]
    tickets = lm.submit([Extend(lm.place(p), (), (Logits(len(p)),)) for p in paths])
    lm.drive(tickets)
    assert lm.stats().prefilled == len(ids) + 2 + 1


def test_equal_greedy_runs_are_one_run(kind: str, make: Make) -> None:
    lm = make(kind)
    place = lm.place(prompt_ids(lm))
    items = [run_item(lm, place, 1, i, temperature=0, max_tokens=4 + i) for i in range(4)]
    results = run_all(lm, items)
    assert lm.stats().decoded == 7
    assert [len(result.tokens) for result in results] == [4, 5, 6, 7]
    for result in results:
        assert results[-1].tokens[: len(result.tokens)] == result.tokens
        assert result.end.ids() == place.ids() + result.tokens


def test_logits_cache_answers_without_a_step(kind: str, make: Make) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)
    first = logits_at(lm, ids)
    steps = lm.stats().steps
    second = logits_at(lm, ids)
    assert lm.stats().steps == steps
    assert (second == first).all()
    with pytest.raises(ValueError, match="read-only"):  # others get it too
        second[:] = 0


@pytest.mark.parametrize("slots", [120, 70])
def test_small_budget_preempts_and_recomputes_but_gives_the_same_texts(
    kv_kind: str, make: Make, slots: int
) -> None:
    want = tokens_of(batch(make(kv_kind), 3, max_tokens=24))
    lm = make(kv_kind, kv_slots=slots)
    got = batch(lm, 3, max_tokens=24)
    assert tokens_of(got) == want
    stats = lm.stats()
    assert stats.parked > 0
    assert stats.kv_tokens <= slots


def test_path_that_cannot_fit_alone_raises_and_does_not_change_the_tree(
    kv_kind: str, make: Make
) -> None:
    lm = make(kv_kind, kv_slots=30)
    ids = prompt_ids(lm)
    logits_at(lm, ids[:10])
    before = lm.stats().kv_tokens, lm.tree.n_nodes
    tickets = lm.submit([Extend(lm.place([*ids, *range(40, 60)]), (), ())])
    lm.drive(tickets)
    with pytest.raises(KVFull, match="30 slots") as caught:
        tickets[0].result()
    assert (caught.value.needed, caught.value.capacity) == (len(ids) + 20, 30)
    del tickets, caught  # the item holds its place, and so its tokens
    gc.collect()  # a raised error and its frame are a cycle
    lm.tree.drain_released()
    assert (lm.stats().kv_tokens, lm.tree.n_nodes) == before
    lm.tree.check()
    (ticket,) = lm.submit([run_item(lm, lm.place(ids), 1, max_tokens=60, stop_ids=frozenset())])
    lm.drive([ticket])
    with pytest.raises(KVFull):
        ticket.result()
    assert len(run_all(lm, [run_item(lm, lm.place(ids), 1, max_tokens=5)])[0].tokens) == 5


def test_atomic_call_that_cannot_fit_together_runs_nothing(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind, kv_slots=40)
    ids = prompt_ids(lm)
    logits_at(lm, ids)
    steps = lm.stats().steps
    paths = [[*ids, 40 + i, *range(50, 58)] for i in range(4)]
    tickets = lm.submit([Extend(lm.place(path)) for path in paths], atomic=True)
    lm.drive(tickets)
    for ticket in tickets:
        with pytest.raises(KVFull, match="4 paths together"):
            ticket.result()
    assert lm.stats().steps == steps
    tickets = lm.submit([Extend(lm.place(path)) for path in paths])
    lm.drive(tickets)
    assert [ticket.result() for ticket in tickets] == [[]] * 4


def test_run_that_reaches_the_context_limit_ends_there(kind: str, make: Make) -> None:
    lm = make(kind, n_ctx=30)
    ids = prompt_ids(lm)
    options = {"max_tokens": 50, "stop_ids": frozenset(), "temperature": 0}
    (result,) = run_all(lm, [run_item(lm, lm.place(ids), 1, **options)])
    assert (result.finish_reason, len(result.tokens)) == ("context", 30 - len(ids))
    (more,) = run_all(lm, [run_item(lm, result.end, 1)])
    assert (more.finish_reason, more.tokens) == ("context", [])
    with pytest.raises(ContextOverflow, match="31 tokens.*context is 30") as caught:
        lm.place([7], result.end)
    assert (caught.value.n_tokens, caught.value.n_ctx) == (31, 30)


def test_cancelled_run_keeps_its_tokens(kind: str, make: Make) -> None:
    lm = make(kind)
    place = lm.place(prompt_ids(lm))
    heard: list[int] = []
    sink = lambda state: heard.append(len(state.tokens))  # noqa: E731
    long = {"max_tokens": 400, "stop_ids": frozenset()}  # an engine's own loop may be far ahead
    items = [run_item(lm, place, 1, 0, max_tokens=20), run_item(lm, place, 1, 1, sink=sink, **long)]
    keep, drop = lm.submit(items)
    while len(heard) < 4:
        lm.scheduler.step()
    drop.cancel()
    lm.drive([keep, drop])
    partial = drop.result()
    assert partial.finish_reason == "cancelled"
    n_tokens = len(partial.tokens)
    assert 0 < n_tokens < 400
    full = run_all(lm, [run_item(lm, place, 1, 1, **{**long, "max_tokens": n_tokens + 1})])[0]
    assert full.tokens[:n_tokens] == partial.tokens
    assert partial.end.ids() == place.ids() + partial.tokens


def test_penalties_see_the_prompt_and_the_generated_tokens(kind: str, make: Make) -> None:
    lm = make(kind)
    options = {"temperature": 0, "max_tokens": 12, "stop_ids": frozenset()}

    def greedy(path: list[int], **more: float) -> list[int]:
        place = lm.place(path)
        one, two = run_all(lm, [run_item(lm, place, 1, i, **options, **more) for i in range(2)])
        assert one.tokens == two.tokens
        return one.tokens

    ids = prompt_ids(lm)
    path = [*ids, *greedy(ids), *ids]  # the likely answer has been given once
    got, want = greedy(path, repetition_penalty=5.0), list[int]()
    for _ in got:
        logits = logits_at(lm, [*path, *want]).copy()
        observed = sorted({*path, *want})
        logits[observed] = np.where(
            logits[observed] > 0, logits[observed] / 5, logits[observed] * 5
        )
        want.append(int(logits.argmax()))
    assert got == want != greedy(path)


def test_dry_xtc_and_top_n_sigma_draw_as_the_reference(kind: str, make: Make) -> None:
    lm = make(kind)
    options = {
        "dry_multiplier": 2.0,
        "dry_allowed_length": 1,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
        "top_n_sigma": 2.0,
    }
    path = 2 * prompt_ids(lm)
    item = run_item(lm, lm.place(path), 1, max_tokens=10, stop_ids=frozenset(), **options)
    reference = item.sampler.clone()
    reference.add_prompt(path)
    (result,) = run_all(lm, [item])
    for token in result.tokens:
        assert draw_rows([logits_at(lm, path)], [reference], [len(path)]).ids[0] == token
        reference.accept(token)
        path.append(token)


def test_more_runs_than_a_step_has_tokens_all_end(kind: str, make: Make) -> None:
    lm = make(kind, n_batch=4)
    place = lm.place(prompt_ids(lm))
    want = [run_all(lm, [run_item(lm, place, 1, i, max_tokens=6)])[0].tokens for i in range(10)]
    got = run_all(lm, [run_item(lm, place, 1, i, max_tokens=6) for i in range(10)])
    assert tokens_of(got) == want


def test_next_run_reuses_the_tail_of_a_finished_run(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind)
    place = lm.place(prompt_ids(lm))
    (result,) = run_all(lm, [run_item(lm, place, 1, max_tokens=10, stop_ids=frozenset())])
    before = lm.stats().prefilled
    ask(lm, result.end)
    assert lm.stats().prefilled == before + 1  # only the last token, drawn and not run yet


def test_start_of_many_greedy_runs_costs_linear_time_or_less(make: Make) -> None:
    """2,000 of them took 40 s when each was compared with all the others."""

    def cost(n: int) -> int:
        lm = make("hidden")
        place = lm.place(prompt_ids(lm))
        lm.submit([run_item(lm, lm.place([i], place), 1, temperature=0) for i in range(n)])

        def start() -> None:
            lm.scheduler.drain_inbox()
            lm.scheduler.admission.admit(may_evict=True)

        with lm.scheduler.lock:
            n_lines = lines_run(start)
        assert len(lm.scheduler.queues.to_check) == n
        return n_lines

    assert cost(400) < 2.5 * cost(200)


def test_atomic_call_that_just_fits_runs(kv_kind: str, make: Make) -> None:
    """One of its paths ends inside a node whose rest may go."""
    lm = make(kv_kind, kv_slots=16)
    ask(lm, lm.place(list(range(40, 52))))
    paths = [list(range(40, 48)), [*range(40, 44), *range(60, 68)]]
    tickets = lm.submit([Extend(lm.place(path)) for path in paths], atomic=True)
    lm.drive(tickets)
    assert [ticket.result() for ticket in tickets] == [[], []]


def test_preempted_run_continues_with_kv_loaded_from_the_host(make: Make) -> None:
    want = tokens_of(batch(make("sequence"), 3, max_tokens=12))
    lm = make("sequence", n_seq_max=1, offload_slots=1000)
    assert tokens_of(batch(lm, 3, max_tokens=12)) == want


def test_gather_of_hundreds_of_callers_is_one_step(make: Make) -> None:
    lm = make("numpy")
    place = lm.place([40, 41])
    ask(lm, place)

    async def one(token: int) -> None:
        tickets = await lm.asubmit([Extend(lm.place([token], place))])
        await lm.adrive(tickets)

    async def all_of(n: int) -> None:
        await asyncio.gather(*(one(token) for token in range(n)))

    before = lm.stats().steps
    asyncio.run(all_of(400))
    assert lm.stats().steps == before + 1


def test_task_cancelled_at_submission_leaves_no_work(make: Make) -> None:
    lm = make("numpy")
    place, proceed = lm.place(prompt_ids(lm)), threading.Event()

    def sink(state: object) -> None:
        proceed.wait()  # nothing goes on before all are cancelled

    async def work() -> None:
        item = run_item(lm, place, 1, max_tokens=500, stop_ids=frozenset(), sink=sink)
        await lm.adrive(await lm.asubmit([item]))

    async def cancel_after(n_passes: int) -> None:
        task = asyncio.create_task(work())
        for _ in range(n_passes):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for n_passes in (1, 2, 3):  # before it was handed over, and after
        asyncio.run(cancel_after(n_passes))
    proceed.set()
    while not lm.scheduler.is_idle:
        time.sleep(0.001)
    assert lm.stats().decoded <= 4  # of two runs that had begun


def test_kept_logprobs_of_runs_are_those_of_the_filtered_distribution(
    kind: str, make: Make
) -> None:
    lm = drawn_by_weft(make(kind))
    ids, params = prompt_ids(lm, STORY), {"temperature": 1.5, "top_k": 9, "top_p": 0.9}
    items = [run_item(lm, lm.place(ids), 1, i, max_tokens=4, **params) for i in range(3)]
    for item in items:
        item.sampler.reports_kept = True
    for result in run_all(lm, [*items, run_item(lm, lm.place(ids), 1, 3, max_tokens=4)])[:3]:
        has_own_loop = lm.engine.native is not None
        assert len(result.kept) == (0 if has_own_loop else len(result.tokens))
        for at, kept in enumerate(result.kept):
            token = result.tokens[at]
            row = logits_at(lm, [*ids, *result.tokens[:at]])
            expected = np.log(probabilities(row, SamplingParams(**params))[token])
            assert kept == pytest.approx(expected, abs=TOLERANCE[lm.info.dtype] * 3)
