"""Branches that are committed again and again: what is fast is also what is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fakes import BrokenEngine
from shallow import shallow
from weft import LM, Branch, BranchStore, Loom
from weft._core.sched.work import Extend, Logits
from weft._core.tokens.tokenizer import Tokenizer
from weft.branch.state import Produced, State
from weft.engines.numpy import NumpyEngine
from weft.errors import ConfigError, ForwardError

PROMPT = [*range(40, 60)]


@pytest.fixture(scope="module")
def engine() -> Iterator[NumpyEngine]:
    engine = NumpyEngine.load(shallow())
    yield engine
    engine.close()


@pytest.fixture
def lm(engine: NumpyEngine) -> Iterator[LM]:
    lm = LM(engine, Tokenizer.from_folder(shallow()))
    yield lm
    lm.tree.check()
    lm.driver.close()
    assert lm.tree.budget.unevictable == 0


def root(lm: LM, **options) -> Branch:
    branch = Branch.create(lm, **{"seed": 1, **options})
    branch.prefill(PROMPT)
    return branch


def plain(lm: LM, ids: list[int]) -> np.ndarray:
    """The row after some tokens, computed by the scheduler alone."""
    lm.clear_cache()
    (ticket,) = tickets = lm.submit([Extend(lm.place(ids), (), (Logits(len(ids)),))])
    lm.drive(tickets)
    return ticket.result()[0]


def lockstep(store: BranchStore, branches: list[Branch], n: int) -> None:
    for _ in range(n):
        store.commit([(branch, branch.produce().token) for branch in branches])


def test_token_drawn_ahead_by_commit_equals_that_of_produce(lm: LM) -> None:
    ahead = root(lm, temperature=1.2)
    for _ in range(5):
        early = ahead.produce()
        late = ahead.fork(seed=1)
        late.set_logits(ahead.logits)  # forgets what was drawn ahead; the stream is the same
        assert late.produce().token == early.token
        assert late.produce().logprob == pytest.approx(early.logprob, abs=1e-4)
        assert late.produce().kept_logprob == pytest.approx(early.kept_logprob, abs=1e-4)
        ahead.commit(early.token)


def test_settings_changed_after_a_commit_apply_to_the_next_draw(lm: LM) -> None:
    branch = root(lm, temperature=0.0)
    branch.commit(branch.produce().token)
    first = branch.produce().token
    branch.steer({first: -np.inf})
    assert branch.produce().token != first
    branch.clear_steer()
    branch.set_logit_bias({first: -np.inf})
    assert branch.produce().token != first
    branch.clear_logit_bias()
    assert branch.produce().token == first


def test_rows_of_continued_branches_are_those_of_their_paths(lm: LM) -> None:
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(5)]
    lockstep(store, branches, 4)
    fork, back = branches[0].fork(at=len(PROMPT) + 2), branches[1].fork()
    back.rewind(1)
    lockstep(store, [*branches, fork, back], 3)
    for branch in [*branches, fork, back]:
        np.testing.assert_allclose(branch.logits, plain(lm, branch.tokens), atol=1e-4)


def test_evicted_rows_are_recomputed(lm: LM) -> None:
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(3)]
    lockstep(store, branches, 2)
    for branch in branches:
        assert branch.row is not None
        lm.scheduler.logits_cache.evict(branch.row)
    np.testing.assert_allclose(branches[0].logits, plain(lm, branches[0].tokens), atol=1e-4)


def test_scores_of_a_token_that_was_not_drawn_survive_an_evicted_row(lm: LM) -> None:
    kept, dropped = root(lm), root(lm)
    for branch in (kept, dropped):
        branch.commit(77)
    assert dropped.row is not None
    lm.scheduler.logits_cache.evict(dropped.row)
    dropped.drawn = None
    for branch in (kept, dropped):
        branch.commit(78)
    assert dropped.perplexity == pytest.approx(kept.perplexity, rel=1e-4)


def test_loom_reuses_the_kv_of_branches(lm: LM) -> None:
    loom = Loom(lm, "Use 4 9 10 13 to make 24.")
    branch = Branch.create(lm, seed=2)
    branch.prefill(loom.tokens)
    for _ in range(6):
        branch.commit(branch.produce().token)
    before = lm.stats().prefilled
    (ticket,) = tickets = lm.submit([Extend(lm.place(branch.tokens))])
    lm.drive(tickets)
    assert ticket.error is None
    assert lm.stats().prefilled == before
    loom.grow(n=2, max_tokens=2, seed=1, show=False)
    lockstep(BranchStore(lm), [branch], 2)
    np.testing.assert_allclose(branch.logits, plain(lm, branch.tokens), atol=1e-4)


@pytest.mark.parametrize("n_passes", range(5))
def test_cancelled_commit_does_not_change_the_branch(lm: LM, n_passes: int) -> None:
    """However far it came: the loop is given a few passes before the cancel."""
    branches = [root(lm).fork() for _ in range(3)]
    store = BranchStore(lm)
    lockstep(store, branches, 2)
    tokens = [branch.tokens for branch in branches]

    async def main() -> bool:
        call = asyncio.ensure_future(store.acommit([(branch, 9) for branch in branches]))
        for _ in range(n_passes):
            await asyncio.sleep(0.002)
        call.cancel()
        results = await asyncio.gather(call, return_exceptions=True)
        was_cancelled = isinstance(results[0], asyncio.CancelledError)
        await store.acommit([(branch, 11) for branch in branches])
        return was_cancelled

    middle = [] if asyncio.run(main()) else [9]
    for branch, before in zip(branches, tokens, strict=True):
        assert branch.tokens == [*before, *middle, 11]
        assert branch.position == len(branch.tokens)
        np.testing.assert_allclose(branch.logits, plain(lm, branch.tokens), atol=1e-4)


def test_ended_branches_free_their_slots(lm: LM) -> None:
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(4)]
    lockstep(store, branches, 3)
    for branch in branches[:2]:
        branch.prune()
    store.retain_only(branches[2])
    del branches, parent, branch
    assert lm.stats().pinned_tokens == 0
    lm.clear_cache()
    assert lm.stats().kv_tokens == 0


def test_penalty_window_covers_prefill_commits_forks_and_rewinds(lm: LM) -> None:
    options = dict(seed=3, temperature=0.9, presence_penalty=4.0, penalty_last_n=2)
    branch = Branch.create(lm, **options)
    branch.prefill([*range(30, 50)])
    for _ in range(6):
        branch.commit(branch.produce().token)
    fork = branch.fork()
    assert branch.sampler.history is not None
    for one in (branch, fork):
        assert one.sampler.history is not None
        assert set(one.sampler.history.ids.tolist()) == set(one.tokens[-2:])


def test_failing_prefill_of_many_passes_changes_nothing(engine: NumpyEngine) -> None:
    broken = BrokenEngine(engine, {3})
    lm = LM(broken, Tokenizer.from_folder(shallow()), n_batch=16)
    store = BranchStore(lm)
    first, second = Branch.create(lm, seed=1), Branch.create(lm, seed=2)
    pairs = [(first, [*range(30, 60)]), (second, [*range(80, 120)])]
    with pytest.raises(ForwardError):
        store.prefill(pairs)
    assert first.position == second.position == 0
    store.prefill(pairs)
    assert (first.tokens, second.tokens) == (pairs[0][1], pairs[1][1])
    lm.driver.close()


def test_commit_of_more_branches_than_a_batch_is_one_call(engine: NumpyEngine) -> None:
    wrapped = BrokenEngine(engine, set())
    lm = LM(wrapped, Tokenizer.from_folder(shallow()), n_batch=20)
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(50)]
    for _ in range(2):
        pairs = [(branch, branch.produce().token) for branch in branches]
        before = len(wrapped.calls)
        store.commit(pairs)
        assert len(wrapped.calls) - before == 3
    before, tokens = len(wrapped.calls), [branch.tokens for branch in branches]
    wrapped.fail_on.add(before + 2)  # the last of three passes
    pairs = [(branch, branch.produce().token) for branch in branches]
    with pytest.raises(ForwardError):
        store.commit(pairs)
    assert [branch.tokens for branch in branches] == tokens
    assert [(branch, branch.produce().token) for branch in branches] == pairs
    store.commit(pairs)
    assert [branch.tokens[:-1] for branch in branches] == tokens
    branch = branches[-1]
    np.testing.assert_allclose(branch.logits, plain(lm, branch.tokens), atol=1e-4)
    lm.driver.close()


def test_commits_from_two_threads_are_both_correct(lm: LM) -> None:
    parent = root(lm)
    groups = [[parent.fork(seed=10 * g + i) for i in range(3)] for g in range(2)]
    twins = [[parent.fork(seed=10 * g + i) for i in range(3)] for g in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: lockstep(BranchStore(lm), group, 6), groups))
    for group in twins:
        lockstep(BranchStore(lm), group, 6)
    tokens = [[branch.tokens for branch in group] for group in groups]
    assert tokens == [[branch.tokens for branch in group] for group in twins]


@pytest.mark.parametrize("token", [np.array([2]), np.array([[2]]), [2], None, "2", 2.0, True])
def test_invalid_token_id_raises_and_changes_nothing(lm: LM, token: Any) -> None:
    branch, store = Branch.create(lm, seed=1), BranchStore(lm)
    branch.prefill([5, 6])
    for call in (lambda: store.commit([(branch, token)]), lambda: branch.commit(token)):
        with pytest.raises(ConfigError, match=r"a token is .*; allowed are ids from 0"):
            call()
    with pytest.raises(ConfigError, match="allowed"):
        branch.prefill(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pairs of a branch"):
        store.commit(5)  # type: ignore[arg-type]
    assert branch.position == 2
    branch.commit(np.int64(2))
    assert branch.position == 3


@pytest.mark.parametrize("when", range(1, 10))
def test_every_branch_draws_if_the_cache_is_cleared_meanwhile(
    lm: LM, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, at any time: what was drawn before is forgotten with the rows."""
    first = root(lm, seed=3)
    branches, store = [first, first.fork(), first.fork()], BranchStore(lm)
    store.commit([(b, p.token) for b, p in zip(branches, store.produce(branches), strict=True)])
    want = [piece.token for piece in store.produce(branches)]
    n_looks = 0
    drawn = State.drawn

    def look(branch: State) -> Produced | None:
        nonlocal n_looks
        n_looks += 1
        if n_looks == when:
            lm.scheduler.logits_cache.clear()
        return drawn.fget(branch)

    monkeypatch.setattr(State, "drawn", drawn.getter(look))
    assert [piece.token for piece in store.produce(branches)] == want
