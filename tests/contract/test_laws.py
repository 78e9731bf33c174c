"""Laws 1 to 8 and 11, for every engine and fake: the oracle is one plain forward pass."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from contract.conftest import Make, Oracle
from contract.helpers import (
    STORY,
    TOLERANCE,
    ask,
    assert_close,
    drawn_by_weft,
    logits_at,
    prompt_ids,
    run_all,
    run_item,
    sampler,
    within,
)
from weft._core.sampling.sampler import BatchSampler
from weft._core.sched.work import Extend, Logits, Scores
from weft.errors import ConfigError


@pytest.mark.parametrize("n_batch", [512, 7, 1])
def test_1_full_chunked_and_single_token_prefill_agree(
    kind: str, make: Make, oracle: Oracle, n_batch: int
) -> None:
    lm = make(kind, n_batch=n_batch)
    ids = prompt_ids(lm)
    assert_close(logits_at(lm, ids), oracle(ids)[-1])


def test_1_a_path_grown_token_by_token_agrees(kind: str, make: Make, oracle: Oracle) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)
    want = oracle(ids)
    place = lm.place(ids[:1])
    for depth in range(1, len(ids)):
        assert_close(ask(lm, place, Logits(depth))[0], want[depth - 1])
        place = lm.place([ids[depth]], place)


def test_2_extending_a_child_changes_no_siblings_logits(
    kv_kind: str, make: Make, oracle: Oracle
) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    left, right = [*ids, 20, 21], [*ids, 30]
    before = logits_at(lm, left)
    logits_at(lm, right)
    logits_at(lm, [*right, 31, 32, 33])
    lm.scheduler.logits_cache.clear()
    assert_close(logits_at(lm, left), before)
    assert_close(before, oracle(left)[-1])


def test_3_companions_and_their_order_change_nothing(kind: str, make: Make, oracle: Oracle) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)
    for seed in (1, 2):
        lm.clear_cache()
        paths = [[*ids, 20 + i, *range(40, 40 + 3 * i)] for i in range(5)]
        paths += [ids[:4], prompt_ids(lm, STORY)]
        random.Random(seed).shuffle(paths)
        items = [Extend(lm.place(path), (), (Logits(len(path)),)) for path in paths]
        tickets = lm.submit(items)
        lm.drive(tickets)
        for path, ticket in zip(paths, tickets, strict=True):
            assert_close(ticket.result()[0], oracle(path)[-1])


def test_4_splitting_anywhere_changes_nothing(kv_kind: str, make: Make, oracle: Oracle) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    want = logits_at(lm, ids)
    for cut in range(1, len(ids)):
        branch = [*ids[:cut], 99]
        assert_close(logits_at(lm, branch), oracle(branch)[-1])
        lm.scheduler.logits_cache.clear()
        assert_close(logits_at(lm, ids), want)
        lm.tree.check()
    assert_close(want, oracle(ids)[-1])


def test_5_export_free_load_changes_nothing(kv_kind: str, make: Make, oracle: Oracle) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    logits_at(lm, [*ids[:9], 77])  # the path is two nodes
    place = lm.place(ids)
    arrays = lm.kv.export(place)
    assert arrays["k.0"].shape[1] == len(ids)
    lm.clear_cache()
    assert lm.stats().kv_tokens == 0
    repeated = lm.kv.insert(ids, arrays)
    assert lm.stats().kv_tokens == len(ids)
    extended = [*ids, 50, 51]
    before = lm.stats().prefilled
    matches = ask(lm, repeated, Logits(len(extended)), tokens=[50, 51])[0]
    assert lm.stats().prefilled == before + 2
    assert_close(matches, oracle(extended)[-1])


def test_5_drop_and_recompute_agree(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    before = logits_at(lm, ids)
    lm.clear_cache()
    assert lm.stats().kv_tokens == 0
    assert_close(logits_at(lm, ids), before)


def test_5_offloading_and_bringing_back_changes_nothing(
    kv_kind: str, make: Make, oracle: Oracle
) -> None:
    lm = make(kv_kind, kv_slots=60, offload_slots=200)
    first, second = prompt_ids(lm), prompt_ids(lm, STORY + " And a bear, a long one please.")
    budget = 200 * lm.info.kv_bytes_per_token
    logits_at(lm, [*first, 40])
    filler = [*second, *range(40, 90 - len(second))]
    logits_at(lm, filler)
    assert 0 < lm.stats().offloaded_bytes <= lm.stats().offload_budget_bytes == budget
    before = lm.stats().prefilled
    assert_close(logits_at(lm, [*first, 40, 41]), oracle([*first, 40, 41])[-1])
    assert lm.stats().prefilled - before < len(first)


def test_6_a_clipped_path_equals_a_fresh_prefix(kv_kind: str, make: Make, oracle: Oracle) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)
    place = lm.place(ids)
    ask(lm, place)
    for depth in (len(ids) - 1, 5, 1):
        clipped = place.at(depth)
        assert clipped.ids() == ids[:depth]
        path = [*ids[:depth], 60, 61]
        assert_close(ask(lm, clipped, Logits(depth + 2), tokens=[60, 61])[0], oracle(path)[-1])
        assert_close(ask(lm, clipped, Logits(depth))[0], oracle(ids)[depth - 1])


def test_7_dropped_handles_leave_nothing_pinned_and_clear_cache_frees_all(
    kv_kind: str, make: Make
) -> None:
    lm = make(kv_kind)
    place = lm.place(prompt_ids(lm))
    results = run_all(lm, [run_item(lm, place, 3, i) for i in range(4)])
    assert lm.stats().pinned_tokens == 0
    assert lm.stats().kv_tokens > 0
    del results, place
    gc.collect()
    lm.clear_cache()
    lm.tree.check()
    assert lm.tree.fragments is not None
    assert lm.tree.fragments.usage() == (0, 0)
    assert lm.tree.n_nodes == 0


@pytest.mark.parametrize("n_equal", [1, 3])
def test_8_equal_suffixes_under_different_prefixes_never_mix(
    kind: str, make: Make, oracle: Oracle, n_equal: int
) -> None:
    lm = make(kind)
    suffix = [40, 41, 42][:n_equal]
    one, two = [*prompt_ids(lm), 30, *suffix], [*prompt_ids(lm, STORY), 31, *suffix]
    items = [Extend(lm.place(path), (), (Logits(len(path)),)) for path in (one, two)]
    tickets = lm.submit(items)
    lm.drive(tickets)
    first, second = (ticket.result()[0] for ticket in tickets)
    assert_close(first, oracle(one)[-1])
    assert_close(second, oracle(two)[-1])
    if n_equal == 1:  # a small model may see no further back than two tokens
        assert np.abs(first - second).max() > 0.1


def test_11_an_engines_own_draws_equal_the_numpy_reference(kind: str, make: Make) -> None:
    """The second token of a run is drawn from a step's output, by the engine if it can."""
    lm = drawn_by_weft(make(kind))
    ids = prompt_ids(lm)
    rules = [{"temperature": 0.2 * i, "top_p": 0.9, "top_k": 50} for i in range(8)]
    runs = [
        run_item(lm, lm.place(ids), 5, i, max_tokens=2, stop_ids=frozenset(), **rule)
        for i, rule in enumerate(rules)
    ]
    for i, (rule, result) in enumerate(zip(rules, run_all(lm, runs), strict=True)):
        path = [*ids, result.tokens[0]]
        at = np.array([len(path)], np.uint64)
        logits = logits_at(lm, path)[None]
        want = BatchSampler([sampler(5, i, **rule)]).draw(logits, np.zeros(1, np.int64), at)
        assert result.tokens[1] == want.ids[0]
        np.testing.assert_allclose(result.logprobs[1], want.logprobs[0], atol=within())
        np.testing.assert_allclose(result.entropies[1], want.entropies[0], atol=within())


@pytest.mark.parametrize("n_batch", [512, 5])
def test_scores_equal_the_oracles_log_softmax(
    kind: str, make: Make, oracle: Oracle, n_batch: int
) -> None:
    lm = make(kind, n_batch=n_batch)
    ids = prompt_ids(lm)
    logits = oracle(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for first, last in ((1, len(ids)), (4, 11), (len(ids) - 1, len(ids))):
        score = ask(lm, lm.place(ids), Scores(first, last, 3))[0]
        rows = logprobs[first - 1 : last - 1]
        targets = ids[first:last]
        np.testing.assert_allclose(
            score.logprobs, rows[range(len(targets)), targets], atol=within()
        )
        np.testing.assert_allclose(score.entropies, -(np.exp(rows) * rows).sum(-1), atol=within())
        if within() <= TOLERANCE["float32"]:  # in half precision many are as likely
            np.testing.assert_array_equal(score.top_ids, np.argsort(-rows, kind="stable")[:, :3])


@pytest.mark.parametrize("n_batch", [512, 5])
def test_score_of_a_final_token_equals_the_score_of_the_longer_path(
    kind: str, make: Make, n_batch: int
) -> None:
    lm = make(kind, n_batch=n_batch)
    ids, n = prompt_ids(lm), len(prompt_ids(lm))
    for first in (1, n - 3, n - 1):
        expected = ask(lm, lm.place(ids), Scores(first, n, 2))[0]
        lm.clear_cache()
        score = ask(lm, lm.place(ids[:-1]), Scores(first, n, 2, final=ids[-1]))[0]
        np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=within())
        np.testing.assert_array_equal(score.ranks, expected.ranks)


def test_recorded_logprobs_and_entropies_are_the_raw_ones(
    kind: str, make: Make, oracle: Oracle
) -> None:
    lm = make(kind)
    ids = prompt_ids(lm)
    (result,) = run_all(lm, [run_item(lm, lm.place(ids), 1, temperature=0.5, top_k=3)])
    logits = oracle([*ids, *result.tokens]).astype(np.float64)[len(ids) - 1 : -1]
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        result.logprobs, rows[range(len(result.tokens)), result.tokens], atol=within(2e-4)
    )
    np.testing.assert_allclose(result.entropies, -(np.exp(rows) * rows).sum(-1), atol=within(2e-4))


def test_empty_path_has_no_kv_to_export(make: Make) -> None:
    lm = make("numpy")
    with pytest.raises(ConfigError, match="path is empty"):
        lm.kv.export(lm.place([]))


def test_short_nodes_take_no_more_memory_than_their_tokens(make: Make) -> None:
    """A one-token node kept the room in which a growing branch is written: 32 times its size."""
    lm = make("numpy")
    place = lm.place([40, 41, 42])
    lm.drive(lm.submit([Extend(lm.place([token], place)) for token in range(100)]))
    stats = lm.stats()
    assert stats.kv_tokens == 103
    assert stats.kv_bytes_allocated <= 2 * stats.kv_bytes
