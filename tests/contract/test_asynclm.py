"""AsyncLM on every engine and fake: rows agree with one plain forward pass, callers share steps."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from contract.helpers import PROMPT, STORY, TOLERANCE, drawn_by_weft, prompt_ids
from fakes import BrokenEngine
from weft import AsyncLM, Branch, Loom
from weft._core.tokens.codec import Token
from weft.asynclm import AbstractAsyncLM
from weft.asynclm.asynclm import ExactRows, PrefixGroups, create_sampler, top_of_row
from weft.errors import BatchAbandoned, ConfigError, ContextOverflow, ForwardError


def log_softmax(rows):
    wide = rows.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def same(row, expected) -> None:
    np.testing.assert_allclose(np.asarray(row), expected, atol=TOLERANCE["float32"])


def counted(make, kind="numpy", **options):
    return make(kind, wrap=lambda engine: BrokenEngine(engine, set()), **options)


def test_all_prefixes_of_a_path_are_answered_in_one_step(make, kind, oracle) -> None:
    lm = counted(make, kind)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    expected = log_softmax(oracle(ids))
    rows = asyncio.run(model.batch_next_token_logprobs([ids[: n + 1] for n in range(len(ids))]))
    same(rows, expected)
    assert rows.dtype == np.float32 or str(rows.dtype) == "torch.float32"
    np.testing.assert_allclose(np.exp(np.asarray(rows)).sum(1), 1, atol=1e-5)
    if lm.info.kv != "hidden":
        assert len(lm.engine.calls) == 1
    calls = len(lm.engine.calls)
    same(model.next_token_logprobs_sync(ids), expected[-1])
    same(asyncio.run(model.next_token_logprobs(tuple(ids))), expected[-1])
    assert len(lm.engine.calls) == calls  # known rows are read, not run
    same(asyncio.run(model.next_token_logprobs_uncached(ids)), expected[-1])


def test_leaf_grows_while_another_path_reads_a_part_of_it(make, kind, oracle) -> None:
    """A step writes to a node that another of its rows stands in the middle of."""
    lm = make(kind)
    model, ids = AsyncLM(lm), [token % 100 + 20 for token in range(7, 147)]
    trunk, leaf, other = ids[:80], ids[80:110], [*ids[120:140], 9, 8, 7, 6, 5]
    sibling = [[*trunk, 15, *leaf[1:9]], [*other[:20], 15, 16]]

    async def steps() -> list[tuple[list[int], object]]:
        known = [[*trunk, *leaf], other, *sibling]
        await asyncio.gather(*map(model.next_token_logprobs, known))
        grown, result = known[:2], []
        for step in range(4):
            grown = [[*grown[0], 17 + step], [*grown[1], 40 + step]]
            paths = [*grown, [*trunk, *leaf[: 12 + step]]]
            rows = await asyncio.gather(*map(model.next_token_logprobs, paths))
            result += zip(paths, rows, strict=True)
        return result

    for path, row in asyncio.run(steps()):
        same(row, log_softmax(oracle(path))[-1])


def test_gather_is_one_step_and_equal_contexts_run_once(make, kind, oracle) -> None:
    lm = counted(make, kind)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    model.cache_kv(ids)

    async def main():
        contexts = [[*ids, 20 + i % 5] for i in range(40)]
        return contexts, await asyncio.gather(*map(model.next_token_logprobs, contexts))

    calls = len(lm.engine.calls)
    contexts, rows = asyncio.run(main())
    assert len(lm.engine.calls) == calls + 1
    if lm.info.kv != "hidden":
        assert sum(row.n_tokens for row in lm.engine.calls[-1]) == 5
    for context, row in list(zip(contexts, rows, strict=True))[:5]:
        same(row, log_softmax(oracle(context))[-1])


def test_equal_suffixes_under_different_prefixes_never_mix(make, kind, oracle) -> None:
    lm = make(kind)
    model = AsyncLM(lm)
    one, two = prompt_ids(lm), prompt_ids(lm, STORY)
    model.cache_kv(one)
    model.cache_kv(two)
    rows = asyncio.run(model.batch_next_token_logprobs([[*one, 7], [*two, 7]]))
    same(rows[0], log_softmax(oracle([*one, 7]))[-1])
    same(rows[1], log_softmax(oracle([*two, 7]))[-1])
    # Extending a stored context leaves it as it was, sync and async.
    for _ in range(2):
        same(model.next_token_logprobs_sync([*one, 7, 8]), log_softmax(oracle([*one, 7, 8]))[-1])
        same(model.next_token_logprobs_sync(one), log_softmax(oracle(one))[-1])


def test_returned_row_is_the_callers_own_copy(make) -> None:
    model = AsyncLM(make("numpy"))
    ids = prompt_ids(model.lm)
    row = model.next_token_logprobs_sync(ids)
    kept = row.copy()
    row[:] = 5
    np.testing.assert_array_equal(model.next_token_logprobs_sync(ids), kept)


def test_invalid_context_raises_in_its_own_call_only(make) -> None:
    lm = make("numpy")
    model, ids = AsyncLM(lm), prompt_ids(lm)

    async def main():
        contexts = [ids, [], [*ids, lm.info.n_vocab], [*ids, 5]]
        calls = map(model.next_token_logprobs, contexts)
        return await asyncio.gather(*calls, return_exceptions=True)

    good, empty, outside, also = asyncio.run(main())
    assert good.shape == also.shape == (lm.info.n_vocab,)
    assert isinstance(empty, ValueError)
    assert isinstance(outside, ValueError)
    for call in (model.next_token_logprobs_sync, model.cache_kv):
        with pytest.raises(ValueError, match="empty"):
            call([])
    for wrong in ([1.5], "abc", None):
        with pytest.raises(ValueError, match="integers"):
            model.next_token_logprobs_sync(wrong)
    with pytest.raises(ValueError, match="unknown LoRA adapter: 'law'"):
        model.next_token_logprobs_sync(ids, lora_name="law")
    with pytest.raises(ConfigError, match="AsyncLM is of an LM"):
        AsyncLM("tiny")


def test_failed_step_raises_in_its_calls_and_the_next_call_works(make, kind) -> None:
    lm = counted(make, kind)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    model.cache_kv(ids)
    lm.engine.fail_on.add(len(lm.engine.calls))

    async def main():
        calls = [model.next_token_logprobs([*ids, 20 + i]) for i in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(each, ForwardError) for each in asyncio.run(main()))
    assert not any(isinstance(each, Exception) for each in asyncio.run(main()))


@pytest.mark.parametrize("when", ["at once", "in a step"])
def test_cancelling_half_of_2_000_waiting_calls_changes_no_other(make, oracle, when: str) -> None:
    lm = make("numpy", n_batch=64)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    model.cache_kv(ids)
    before = lm.stats().pinned_tokens
    rng = random.Random(1)
    contexts = [[*ids, rng.randrange(lm.info.n_vocab)] for _ in range(2000)]
    gone = set(rng.sample(range(2000), 1000))

    async def main():
        tasks = [asyncio.ensure_future(model.next_token_logprobs(each)) for each in contexts]
        order = sorted(gone)
        rng.shuffle(order)
        for at, number in enumerate(order):
            if when == "in a step" and at % 100 == 0:
                await asyncio.sleep(0.002)
            tasks[number].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    rows = asyncio.run(main())
    for number, row in enumerate(rows):
        if number not in gone:
            assert isinstance(row, np.ndarray)
    for number in sorted(set(range(2000)) - gone)[:20]:
        same(rows[number], log_softmax(oracle(contexts[number]))[-1])
    asyncio.run(model.next_token_logprobs(ids))
    assert lm.stats().pinned_tokens == before


def test_reset_raises_batch_abandoned_in_waiting_calls(make) -> None:
    lm = make("numpy", n_batch=4)
    model, ids = AsyncLM(lm), [7 + i % 50 for i in range(400)]

    async def main():
        task = asyncio.ensure_future(model.next_token_logprobs(ids))
        while not model._pending:
            await asyncio.sleep(0)
        model.reset_async_queries()
        return await asyncio.gather(task, return_exceptions=True)

    (text,) = asyncio.run(main())
    assert isinstance(text, BatchAbandoned)
    assert isinstance(text, RuntimeError)
    assert asyncio.run(model.next_token_logprobs(ids)).shape == (lm.info.n_vocab,)


def test_answered_call_leaves_no_state(make, kind) -> None:
    """Neither a query to reset nor a hold on the tree, while its path's KV is kept."""
    lm = make(kind)
    model, ids = AsyncLM(lm), prompt_ids(lm)

    async def main():
        rows = await asyncio.gather(*(model.next_token_logprobs([*ids, k]) for k in (5, 6, 7)))
        task = asyncio.ensure_future(model.next_token_logprobs([*ids, 8]))
        await asyncio.sleep(0)
        task.cancel()
        return rows, await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    model.next_token_logprobs_sync([*ids, 9])
    model.batch_next_token_logprobs_sync([ids, [*ids, 5]])
    assert not model._pending
    assert lm.stats().pinned_tokens == 0
    assert not any(node.holds for node in lm.tree.nodes())
    assert lm.tree.root().node.holds == 0


def test_long_context_is_validated_like_a_short_one(make) -> None:
    lm = make("numpy")
    model, n_vocab = AsyncLM(lm), lm.info.n_vocab
    for n in (3, 300):
        ids = [5 + i % 50 for i in range(n)]
        for wrong in (-1, n_vocab, 1 << 70):
            with pytest.raises(ConfigError, match=f"token id {wrong} is outside the vocabulary"):
                model.next_token_logprobs_sync([*ids, wrong, 5])
        with pytest.raises(ConfigError, match="integers"):
            model.next_token_logprobs_sync([*ids, 1.0])
    with pytest.raises(ContextOverflow, match=f"the context is {lm.n_ctx}"):
        model.next_token_logprobs_sync([5] * (lm.n_ctx + 1))


def test_extended_contexts_prefill_one_token_and_reuse_the_rest(make, kind, oracle) -> None:
    """Each asks for the context before and a token: that token is computed, the others reused."""
    lm = make(kind)
    if lm.info.kv == "hidden":
        pytest.skip("what a hidden engine has is its own affair")
    model, ids = AsyncLM(lm), prompt_ids(lm)
    paths = [[*ids, 5 + k] for k in range(6)]

    async def step(n: int):
        rows = await asyncio.gather(*map(model.next_token_logprobs, paths))
        for path in paths:
            path.append((len(path) * 7 + path[-1]) % 50 + 5)
        return rows

    asyncio.run(step(0))
    before = lm.stats()
    for n in range(1, 4):
        rows = asyncio.run(step(n))
    after = lm.stats()
    same(rows[2], log_softmax(oracle(paths[2][:-1]))[-1])
    n_tokens = sum(len(path) - 1 - n for path in paths for n in range(3))
    assert after.prefilled - before.prefilled == 3 * len(paths)
    assert after.reused - before.reused == n_tokens - 3 * len(paths)
    assert after.recomputed == before.recomputed
    lm.tree.check()


def test_several_loops_and_threads_call_one_model(make, oracle) -> None:
    lm = make("numpy")
    model, ids = AsyncLM(lm), prompt_ids(lm)
    result: dict[int, object] = {}

    def ask(number: int) -> None:
        result[number] = asyncio.run(model.next_token_logprobs([*ids, 20 + number % 3]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result) == list(range(6))
    for number, row in result.items():
        same(row, log_softmax(oracle([*ids, 20 + number % 3]))[-1])

    async def inside():
        return model.next_token_logprobs_sync(ids)  # blocks the loop, and works

    same(asyncio.run(inside()), log_softmax(oracle(ids))[-1])


def test_event_loop_is_free_while_a_long_prompt_runs(make) -> None:
    """The step ends when the loop, which goes round meanwhile, lets it."""
    lm = counted(make)
    model, forward = AsyncLM(lm), lm.engine.forward
    inside, proceed = threading.Event(), threading.Event()

    def blocked(rows):
        inside.set()
        assert proceed.wait(), "the loop is not free"
        return forward(rows)

    lm.engine.forward = blocked

    async def main() -> None:
        task = asyncio.ensure_future(model.next_token_logprobs([7 + i % 90 for i in range(512)]))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not task.done()
        proceed.set()
        await task

    asyncio.run(main())


def test_logits_rows_stay_within_their_budget_and_cost_one_token_to_restore(make, oracle) -> None:
    lm = counted(make)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    lm.scheduler.logits_cache.budget_bytes = 8 * 4 * lm.info.n_vocab
    contexts = [[*ids, number] for number in range(300)]
    asyncio.run(model.batch_next_token_logprobs(contexts))
    assert lm.scheduler.logits_cache.used_bytes <= lm.scheduler.logits_cache.budget_bytes
    prefilled, calls = lm.stats().prefilled, len(lm.engine.calls)
    row = model.next_token_logprobs_sync(contexts[0])
    same(row, log_softmax(oracle(contexts[0]))[-1])
    assert lm.stats().prefilled == prefilled
    assert sum(each.n_tokens for call in lm.engine.calls[calls:] for each in call) == 1


def test_strict_rows_are_bitwise_those_of_a_plain_forward(make) -> None:
    lm = make("numpy")
    model, ids = AsyncLM(lm, strict=True), prompt_ids(lm)
    for n in (3, len(ids), 5):
        plain = asyncio.run(model.next_token_logprobs_uncached(ids[:n]))
        for _ in range(2):
            np.testing.assert_array_equal(model.next_token_logprobs_sync(ids[:n]), plain)
            row = asyncio.run(model.next_token_logprobs(ids[:n]))
            np.testing.assert_array_equal(row, plain)
            row[:] = 0


def test_strict_batches_are_the_plain_rows(make) -> None:
    lm = make("numpy")
    model = AsyncLM(lm, strict=True, strict_bytes=2 * 4 * lm.info.n_vocab)
    contexts = [[5 + n] for n in range(4)]
    plain = [asyncio.run(model.next_token_logprobs_uncached(each)) for each in contexts]
    rows = asyncio.run(model.batch_next_token_logprobs(contexts * 2))
    np.testing.assert_array_equal(rows, plain * 2)
    np.testing.assert_array_equal(model.batch_next_token_logprobs_sync(contexts), plain)
    np.testing.assert_array_equal(model.prefix_logprobs_sync(contexts[1]), plain[1:2])
    assert model.batch_next_token_logprobs_sync([]).shape == (0, lm.info.n_vocab)


def test_strict_rows_in_six_threads_are_copies_with_a_cache_for_two(make, monkeypatch) -> None:
    lm = make("numpy")
    exact = ExactRows(lm, 2 * 4 * lm.info.n_vocab)
    places = [lm.place([5 + n]) for n in range(4)]
    monkeypatch.setattr(exact, "compute", lambda place: np.array(place.ids(), np.float32))
    wrong: list[object] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(5_000):
                number = rng.randrange(4)
                (row,) = exact.rows([places[number]])
                assert row[0] == 5 + number
                row[0] = 0  # the caller's own
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_equal_strict_contexts_run_once(make) -> None:
    lm = counted(make)
    model, ids = AsyncLM(lm, strict=True), prompt_ids(lm)

    async def main():
        return await asyncio.gather(*[model.next_token_logprobs(ids) for _ in range(9)])

    assert len(asyncio.run(main())) == 9
    model.batch_next_token_logprobs_sync([ids] * 5)
    assert len(lm.engine.calls) == 1


def test_plain_rows_do_not_use_the_loops_default_executor(make) -> None:
    lm = make("numpy")
    model, strict, ids = AsyncLM(lm), AsyncLM(lm, strict=True), prompt_ids(lm)

    class Refusing(ThreadPoolExecutor):
        def submit(self, *_, **__):
            raise AssertionError("the program's own threads are not ours to fill")

    async def main():
        asyncio.get_running_loop().set_default_executor(Refusing())
        calls = [model.next_token_logprobs_uncached([*ids, n]) for n in range(40)]
        calls += [strict.next_token_logprobs([*ids, n]) for n in range(40)]
        return await asyncio.gather(*calls)

    rows = asyncio.run(main())
    np.testing.assert_array_equal(rows[:40], rows[40:])


def test_batch_answers_are_in_the_order_of_the_contexts(make, oracle) -> None:
    lm = make("numpy")
    model, rng = AsyncLM(lm), random.Random(4)
    words = [[7, 8, 9, 10], [7, 8, 11], [12], [12, 7]]
    for _ in range(6):
        chosen = [rng.choice(words) for _ in range(9)]
        contexts = [word[: rng.randrange(1, len(word) + 1)] for word in chosen]
        expected = [log_softmax(oracle(each))[-1] for each in contexts]
        same(model.batch_next_token_logprobs_sync(contexts), expected)
        lm.clear_cache()
        same(asyncio.run(model.batch_next_token_logprobs(contexts)), expected)
    paths = PrefixGroups([[1, 2], [3], [1], [1, 2], [1, 2, 4], [3]])
    assert list(paths) == [([1, 2, 4], [1, 2, 3]), ([3], [1])]
    assert paths.restore_order(["abc", "x"]) == ["b", "x", "a", "b", "c", "x"]


def test_all_prefixes_of_a_context_are_one_call(make, kind, oracle) -> None:
    lm = counted(make, kind)
    model, ids = AsyncLM(lm, batch_size=1), prompt_ids(lm)
    expected = log_softmax(oracle(ids))
    same(asyncio.run(model.prefix_logprobs(ids)), expected)
    if lm.info.kv != "hidden":
        assert len(lm.engine.calls) == 1
    same(model.prefix_logprobs_sync(ids), expected)
    with pytest.raises(ConfigError, match="empty"):
        model.prefix_logprobs_sync([])
    same(AbstractAsyncLM.prefix_logprobs_sync(model, ids), expected)


@pytest.mark.parametrize("parts", [1, 100])
def test_top_rows_are_the_first_of_sorted_rows(make, monkeypatch, parts: int) -> None:
    lm = make("numpy")
    monkeypatch.setattr("weft.asynclm.asynclm.TOP_BYTES", parts * 4 * lm.info.n_vocab)
    model, ids = AsyncLM(lm), prompt_ids(lm)
    contexts = [[*ids, 20], ids, [*ids, 21]]
    rows = model.batch_next_token_logprobs_sync(contexts)
    order = np.argsort(-rows, axis=1, kind="stable")
    for k in (1, 7, lm.info.n_vocab):
        for top in (
            model.batch_top_logprobs_sync(contexts, k),
            asyncio.run(model.batch_top_logprobs(contexts, k)),
            asyncio.run(AbstractAsyncLM.batch_top_logprobs(model, contexts, k)),
            AbstractAsyncLM.batch_top_logprobs_sync(model, contexts, k),
        ):
            np.testing.assert_array_equal(top.ids, order[:, :k])
            np.testing.assert_array_equal(
                top.logprobs, np.take_along_axis(rows, order[:, :k], axis=1)
            )
    assert model.batch_top_logprobs_sync([], 3).ids.shape == (0, 3)
    for wrong in (0, None, 1.5, lm.info.n_vocab + 1):
        with pytest.raises(ConfigError, match="^k is"):
            model.batch_top_logprobs_sync(contexts, wrong)
    ties = top_of_row(np.array([1, 3, 3, 0, 3], np.float32), 2)
    assert ties.ids.tolist() == [1, 2]


def test_invalid_context_raises_and_is_named(make) -> None:
    model = AsyncLM(make("numpy"))
    for wrong in (None, {5, 6}, frozenset([5]), b"ab", {5: 6}, "ab", 5, [None], np.array([1.5])):
        with pytest.raises(ConfigError, match="^token_ids is .*integers"):
            model.next_token_logprobs_sync(wrong)
        with pytest.raises(ConfigError, match="^token_ids is .*integers"):
            model.batch_next_token_logprobs_sync([[5], wrong])
        with pytest.raises(ConfigError, match="^prompt_token_ids is .*integers"):
            asyncio.run(model.sample(wrong, 3, []))
    for wrong in (None, 1.5, -1, "3", True):
        with pytest.raises(ConfigError, match="^max_tokens is .*integer"):
            asyncio.run(model.sample([5], wrong, []))
    for wrong in (None, 2, b"ab", {3: 4}, [None]):
        with pytest.raises(ConfigError, match="^eos_token_ids is .*integers"):
            asyncio.run(model.sample([5], 3, wrong))
        with pytest.raises(ConfigError, match="^eos_token_ids is .*integers"):
            asyncio.run(model.batch_sample([[5]], 3, wrong))
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match="batch_size"):
            AsyncLM(model.lm, batch_size=wrong)


@pytest.mark.torch
def test_ids_may_be_arrays_and_tensors_and_end_tokens_a_set(make) -> None:
    import torch

    lm = make("numpy")
    model, ids = AsyncLM(lm), prompt_ids(lm)
    row = model.next_token_logprobs_sync(ids)
    for given in (np.array(ids), torch.tensor(ids), tuple(ids)):
        np.testing.assert_array_equal(model.next_token_logprobs_sync(given), row)
    free = asyncio.run(model.sample(ids, 10, [], temperature=0))
    wanted = free[: free.index(free[4])]
    for ends in (torch.tensor([free[4]]), np.array([free[4]]), {free[4]}, (free[4],)):
        assert asyncio.run(model.sample(ids, 10, ends, temperature=0)) == wanted


def test_sample_at_the_end_of_the_context_keeps_what_was_drawn(make, kind, caplog) -> None:
    lm = make(kind, n_ctx=16)
    model, ids = AsyncLM(lm), prompt_ids(lm)[:10]
    six = asyncio.run(model.sample(ids, 6, [], seed=1))
    assert len(six) == 6
    assert not caplog.records
    assert asyncio.run(model.sample(ids, 7, [], seed=1)) == six
    assert "context of 16 tokens was full after 6 of 7" in caplog.text
    short, long = asyncio.run(model.batch_sample([ids[:3], ids], 9, [], seed=1))
    assert (len(short), len(long)) == (9, 6)
    with pytest.raises(ContextOverflow):
        asyncio.run(model.sample([*ids, *ids], 1, []))
    first = asyncio.run(model.sample(ids, 1, [], seed=1))
    assert asyncio.run(model.sample(ids, 99, first, seed=1)) == []  # it ended before


def test_batch_size_may_be_changed(make) -> None:
    lm = counted(make)
    model, ids = AsyncLM(lm, batch_size=4), prompt_ids(lm)
    model.cache_kv(ids)

    async def main():
        await model.batch_next_token_logprobs([[*ids, n] for n in range(9)])
        model.batch_size = 2
        calls = len(lm.engine.calls)
        await model.batch_next_token_logprobs([[*ids, 20 + n] for n in range(9)])
        return max(map(len, lm.engine.calls[calls:]))

    assert asyncio.run(main()) == 2


@pytest.mark.torch
def test_program_over_genlms_packages_gets_their_tensors_and_tokens(make, monkeypatch) -> None:
    import torch

    class Theirs(Token):
        """Their class is another one, of the same form."""

    model = AsyncLM(make("numpy"))
    ids = prompt_ids(model.lm)
    assert isinstance(model.next_token_logprobs_sync(ids), np.ndarray)
    assert type(model.byte_vocab[9]) is Token
    module = types.ModuleType("genlm.backend.tokenization")
    module.Token = Theirs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert type(model.byte_vocab[9]) is Theirs
    assert model.byte_vocab is model.byte_vocab
    assert isinstance(model.next_token_logprobs_sync(ids), torch.Tensor)
    assert isinstance(model.batch_top_logprobs_sync([ids], 3).ids, torch.Tensor)
    alone = AsyncLM(model.lm, as_torch=False)
    assert isinstance(alone.next_token_logprobs_sync(ids), np.ndarray)


def test_samples_equal_those_of_loom_and_branch(make, kind) -> None:
    lm = drawn_by_weft(make(kind))
    model, loom = AsyncLM(lm), Loom(lm, PROMPT)
    ends = lm.text.stop_ids
    (node,) = loom.grow(n=1, seed=3, max_tokens=12, temperature=1.0, show=False)
    assert asyncio.run(model.sample(loom.tokens, 12, ends, seed=3)) == node.tokens
    by_hand = AbstractAsyncLM._samples(
        model, [loom.tokens], 12, ends, [create_sampler(1.0, 3, 0)], None
    )
    assert asyncio.run(by_hand) == [node.tokens]
    branch = Branch.create(lm, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    branch.prefill(loom.tokens)
    assert [piece.token for piece, _ in zip(branch, range(12), strict=False)] == node.tokens


def test_batch_samples_differ_end_at_eos_and_repeat_with_a_seed(make) -> None:
    lm = make("numpy")
    model, ids = AsyncLM(lm), prompt_ids(lm, STORY)

    async def ask(**options):
        return await model.batch_sample([ids] * 4, 10, [], seed=5, **options)

    samples = asyncio.run(ask())
    assert all(len(sample) == 10 for sample in samples)
    assert len({tuple(sample) for sample in samples}) > 1
    assert asyncio.run(ask()) == samples
    greedy = asyncio.run(ask(temperature=0))
    assert len({tuple(sample) for sample in greedy}) == 1
    assert asyncio.run(model.sample(ids, 0, [])) == []
    ended = asyncio.run(model.sample(ids, 10, [greedy[0][3]], temperature=0))
    assert ended == greedy[0][: greedy[0].index(greedy[0][3])]


def test_cache_kv_and_clear_cache_change_the_cached_tokens(make) -> None:
    lm = make("numpy")
    model, ids = AsyncLM(lm), prompt_ids(lm)
    assert model.walk_cache(ids)[1:] == (0, None, 0)
    model.cache_kv(ids)
    node, n_matched, past, base = model.walk_cache([*ids, 9])
    assert (n_matched, base, node.has_kv, node.logits) == (len(ids), len(ids), True, None)
    assert past is not None
    assert past.n_tokens == len(ids)
    model.next_token_logprobs_sync(ids)
    prefilled = lm.stats().prefilled
    model.cache_kv(ids)
    assert lm.stats().prefilled == prefilled
    model.clear_kv_cache()
    assert lm.stats().kv_tokens == 0
    node, n_matched, past, base = model.walk_cache(ids)
    assert node.logits is not None
    assert (n_matched, past, base) == (len(ids), None, 0)
    with pytest.raises(AttributeError):
        node.n_tokens = 3
    model.clear_cache()
    assert model.walk_cache(ids)[0].logits is None


SPOILT = 77  # the last token of a context whose row is no distribution


def spoilt(lm, at, value) -> None:
    """Let the model give `value` at some entries of the row after SPOILT."""
    forward = lm.engine.forward

    def spoiling(rows):
        output, index = forward(rows), 0
        used = output._logits if lm.info.name == "numpy" else output._device_logits.numpy()
        for row in rows:
            for place in row.logits_at:
                if row.tokens[place] == SPOILT:
                    used[index, at] = value
                index += 1
        return output

    lm.engine.forward = spoiling


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("at", "value"), [(5, np.nan), (5, np.inf), (slice(None), -np.inf), (slice(None), np.nan)]
)
def test_row_with_nan_or_inf_raises_in_its_own_calls_only(
    make, kind, strict, at, value, recwarn
) -> None:
    """By every form of the call, new or cached; other calls of its step get their rows."""
    lm = counted(make, kind)
    spoilt(lm, at, value)
    model, fine, broken = AsyncLM(lm, strict=strict), [3, 4, 5], [3, 4, SPOILT]

    async def both() -> list[object]:
        requests = [model.next_token_logprobs(ids) for ids in (fine, broken, [*fine, 9], broken)]
        return await asyncio.gather(*requests, return_exceptions=True)

    for _ in range(2):
        first, failed, other, second = asyncio.run(both())
        assert type(failed) is type(second) is ForwardError
        assert "NaN or +inf" in str(failed)
        assert np.isfinite(np.asarray(first)).all()
        assert np.isfinite(np.asarray(other)).all()
    for call in (model.next_token_logprobs_sync, model.prefix_logprobs_sync):
        with pytest.raises(ForwardError, match="NaN or"):
            call(broken)
    with pytest.raises(ForwardError, match="NaN or"):
        model.batch_top_logprobs_sync([fine, broken], 3)
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_tokens_that_the_model_bans_have_no_probability(make, kind) -> None:
    lm = counted(make, kind)
    spoilt(lm, slice(0, 9), -np.inf)
    row = np.asarray(AsyncLM(lm).next_token_logprobs_sync([3, SPOILT]))
    assert np.isneginf(row[:9]).all()
    np.testing.assert_allclose(np.exp(row).sum(), 1, atol=1e-5)


def test_batch_size_caps_the_contexts_of_a_step(make) -> None:
    lm = counted(make)
    model, ids = AsyncLM(lm, batch_size=4), prompt_ids(lm)
    model.cache_kv(ids)
    calls = len(lm.engine.calls)
    contexts = [[*ids, number] for number in range(12)]
    rows = asyncio.run(model.batch_next_token_logprobs(contexts))
    assert rows.shape == (12, lm.info.n_vocab)
    assert max(map(len, lm.engine.calls[calls:])) <= 4
    np.testing.assert_array_equal(model.batch_next_token_logprobs_sync(contexts), rows)
    assert model.batch_next_token_logprobs_sync([]).shape == (0, lm.info.n_vocab)
    assert asyncio.run(model.batch_next_token_logprobs([])).shape == (0, lm.info.n_vocab)


@pytest.mark.torch
def test_torch_engine_returns_tensors(make) -> None:
    import torch

    lm = make("torch")
    ids = prompt_ids(lm)
    row = AsyncLM(lm, on_device=True).next_token_logprobs_sync(ids)
    assert isinstance(row, torch.Tensor)
    assert (row.dtype, row.device.type) == (torch.float32, "cpu")
    assert isinstance(AsyncLM(lm, as_torch=False).next_token_logprobs_sync(ids), np.ndarray)
    assert asyncio.run(AsyncLM(lm).batch_next_token_logprobs([ids, ids])).shape[0] == 2


class Two(AbstractAsyncLM):
    """A program's own model: the two methods alone."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        return self.next_token_logprobs_sync(token_ids)

    def next_token_logprobs_sync(self, token_ids, lora_name=None):
        row = np.full(2048, -9.0, dtype=np.float32)
        row[(token_ids[-1] + 1) % 2048] = 0
        return row


class Known(AbstractAsyncLM):
    """The same by genlm-backend's own signatures, over a context of eight tokens."""

    async def next_token_logprobs(self, token_ids):
        return self.next_token_logprobs_sync(token_ids)

    def next_token_logprobs_sync(self, token_ids):
        if len(token_ids) > 8:
            raise ContextOverflow("too long", n_tokens=len(token_ids), n_ctx=8)
        return Two.next_token_logprobs_sync(self, token_ids)


class Half(AbstractAsyncLM):
    """A model that lacks them."""


def test_subclass_without_lora_name_has_all_methods(text) -> None:
    model = Known(text)
    assert asyncio.run(model.batch_next_token_logprobs([[1], [2]])).shape == (2, 2048)
    assert model.batch_next_token_logprobs_sync([[1], [2]]).shape == (2, 2048)
    assert asyncio.run(model.prefix_logprobs([1, 2, 3])).shape == (3, 2048)
    assert asyncio.run(model.batch_top_logprobs([[1], [2]], 1)).ids.tolist() == [[2], [3]]
    assert asyncio.run(model.sample([5], 3, [], temperature=0)) == [6, 7, 8]
    both = asyncio.run(model.batch_sample([[5], [5] * 6], 4, [], temperature=0))
    assert both == [[6, 7, 8, 9], [6, 7, 8]]  # the second is at the end of the context
    with pytest.raises(ContextOverflow):
        asyncio.run(model.sample([5] * 9, 4, []))
    with pytest.raises(TypeError, match="lora_name"):
        asyncio.run(model.sample([5], 3, [], lora_name="law"))


def test_subclass_with_two_methods_has_all_methods(text) -> None:
    model = Two(text)
    assert asyncio.run(model.batch_next_token_logprobs([[1], [2]])).shape == (2, 2048)
    assert model.batch_next_token_logprobs_sync([[1], [2]]).shape == (2, 2048)
    assert asyncio.run(model.sample([5], 3, [], temperature=0)) == [6, 7, 8]
    assert asyncio.run(model.sample([5], 9, [8], temperature=0)) == [6, 7]
    assert len(model.byte_vocab) == len(model.str_vocab) == text.n_vocab
    assert model.byte_vocab[200].token_id == 200
    assert model.byte_vocab[200].byte_string == text.vocab_bytes[200]
    with pytest.raises(NotImplementedError):
        model.add_new_lora("x", "y")
    with pytest.raises(TypeError, match="abstract method.*next_token_logprobs"):
        Half(text)
    with pytest.raises(RuntimeError, match="lora_name="):
        model.set_lora("x", "y")
