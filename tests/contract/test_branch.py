"""Branches on every engine and fake: what they decode agrees with one plain forward pass."""

from __future__ import annotations

import asyncio
import gc
import math
import random

import numpy as np
import pytest

from contract.helpers import PROMPT, TOLERANCE, drawn_by_weft, prompt_ids
from fakes import BrokenEngine
from weft import Branch, BranchStore, Loom
from weft._core.sampling.params import ModelDefaults
from weft.constraints import Regex
from weft.errors import (
    ConfigError,
    ContextOverflow,
    DeadEnd,
    ForwardError,
    HasChildren,
    KVFull,
    StaleHandle,
)

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def root(lm, text: str = PROMPT, **options) -> Branch:
    branch = Branch.create(lm, **{**NEUTRAL, "seed": 1, **options})
    branch.prefill(prompt_ids(lm, text))
    return branch


def same(logits, expected) -> None:
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE["float32"])


def test_lockstep_branches_agree_with_the_oracle_and_share_each_forward(make, kind, oracle) -> None:
    lm = make(kind, wrap=lambda engine: BrokenEngine(engine, set()))
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(4)]
    for _ in range(6):
        pieces = store.produce(branches)
        calls = len(lm.engine.calls)
        store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        assert len(lm.engine.calls) == calls + 1
    for branch in branches:
        same(branch.logits, oracle(branch.tokens)[-1])
    assert len({branch.text for branch in branches}) > 1
    best = min(branches, key=lambda branch: branch.perplexity)
    store.retain_only(best)
    assert [branch.disposed for branch in branches] == [branch is not best for branch in branches]
    assert parent.disposed
    best.commit(best.produce().token)
    same(best.logits, oracle(best.tokens)[-1])


def test_prefill_of_any_mix_takes_one_forward_per_batch(make, kind, oracle) -> None:
    lm = make(kind, n_batch=32, wrap=lambda engine: BrokenEngine(engine, set()))
    store = BranchStore(lm)
    ids = [7 + i % 90 for i in range(60)]
    branches = [Branch.create(lm, seed=i) for i in range(4)]
    mix = [[100 + i, *ids[: (20, 20, 20, 33)[i]]] for i in range(4)]
    store.prefill(list(zip(branches, mix, strict=True)))
    if lm.info.kv != "hidden":
        assert len(lm.engine.calls) == math.ceil(sum(map(len, mix)) / 32)
    for branch in branches:
        same(branch.logits, oracle(branch.tokens)[-1])


def test_fork_and_rewind_with_existing_kv_run_no_forward(make, kv_kind, oracle) -> None:
    lm = make(kv_kind)
    branch = root(lm)
    start = branch.position
    for _ in range(6):
        branch.commit(branch.produce().token)
    path, middle = branch.tokens, start + 3
    fork = branch.fork(at=middle)
    branch.rewind(3)
    before = lm.stats()
    assert fork.tokens == branch.tokens == path[:middle]
    assert fork.fork_head == middle
    same(fork.logits, oracle(path[:middle])[-1])
    same(branch.logits, oracle(path[:middle])[-1])
    assert lm.stats().prefilled == before.prefilled
    assert branch.metrics.n_accepted == 3
    # The same stream at the same place draws the same tokens again.
    for token in path[middle:]:
        assert branch.produce().token == token
        branch.commit(token)


@pytest.mark.parametrize("n_before", [0, 1])
def test_failed_commit_changes_nothing_and_can_be_repeated(make, kind, n_before) -> None:
    lm = make(kind, wrap=lambda engine: BrokenEngine(engine, set()))
    store, parent = BranchStore(lm), root(lm, repetition_penalty=1.3)
    branches = [parent.fork() for _ in range(3)]
    for _ in range(n_before):
        pieces = store.produce(branches)
        store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
    pieces = store.produce(branches)
    before = [(b.tokens, b.metrics.perplexity, b.sampling_perplexity, b.text) for b in branches]
    lm.engine.fail_on.add(len(lm.engine.calls))
    pairs = [(b, p.token) for b, p in zip(branches, pieces, strict=True)]
    with pytest.raises(ForwardError, match="forward"):
        store.commit(pairs)
    after = [(b.tokens, b.metrics.perplexity, b.sampling_perplexity, b.text) for b in branches]
    assert after == before
    assert store.produce(branches) == pieces
    store.commit(pairs)
    assert [b.tokens[-1] for b in branches] == [p.token for p in pieces]
    for branch in branches:  # each token was counted once, however often it was tried
        counted = branch.sampler.history
        assert int(counted.counts.sum()) == n_before + 1
        assert branch.metrics.n_accepted == n_before + 1


def test_failed_commit_does_not_advance_the_grammar(make, kind) -> None:
    lm = make(kind, wrap=lambda engine: BrokenEngine(engine, set()))
    branch = root(lm, constraint=Regex("ab"))
    a, b = (lm.tokenize(char, add_bos=False)[0] for char in "ab")
    lm.engine.fail_on.add(len(lm.engine.calls))
    with pytest.raises(ForwardError):
        branch.commit(a)
    assert branch.is_legal(a)
    branch.commit(a)
    assert branch.is_legal(b)
    assert not branch.is_legal(a)


def test_parameters_set_during_a_commit_apply_to_the_next_draw(make) -> None:
    lm = make("numpy")

    async def main(change) -> int:
        branch = root(lm, temperature=1.0)
        token = branch.produce().token
        task = asyncio.ensure_future(branch.acommit(token))
        await asyncio.sleep(0)
        change(branch)
        await task
        return (await branch.aproduce()).token

    usual = asyncio.run(main(lambda branch: None))
    assert asyncio.run(main(lambda branch: branch.steer({usual: -math.inf}))) != usual
    greedy = asyncio.run(main(lambda branch: branch.set_sampler_params(temperature=0.0)))
    biased = asyncio.run(main(lambda branch: branch.set_logit_bias({42: 1e4})))
    other = root(lm, temperature=1.0)
    other.commit(other.produce().token)
    assert greedy == int(other.logits.argmax())
    assert biased == 42


def test_bias_that_forbids_all_tokens_raises_at_the_draw_and_not_at_commit(make) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=1.0)
    branch.set_logit_bias(dict.fromkeys(range(lm.info.n_vocab), -math.inf))
    branch.commit(9)
    with pytest.raises(DeadEnd):
        branch.produce()


def test_kv_full_in_the_middle_of_a_commit_changes_nothing(make, kv_kind) -> None:
    lm = make(kv_kind, kv_slots=64 + 40, n_seq_max=None)
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(lm.info.max_paths or 64)]
    failed = False
    for _ in range(40):
        pieces = store.produce(branches)
        before = [(b.tokens, b.perplexity) for b in branches]
        try:
            store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        except KVFull:
            failed = True
            assert [(b.tokens, b.perplexity) for b in branches] == before
            assert store.produce(branches) == pieces
            break
    assert failed
    # One alone still fits, whatever the others keep.
    position = branches[0].position
    branches[0].commit(pieces[0].token)
    assert branches[0].position == position + 1


def test_invalid_commit_raises_before_anything_runs(make) -> None:
    lm = make("numpy")
    store, branch = BranchStore(lm), root(lm)
    other, child = branch.fork(), branch.fork()
    child.prune()
    tokens = branch.tokens
    for pairs, error in (
        ([(branch, 5), (branch, 6)], ConfigError),
        ([(branch, 5), (child, 6)], StaleHandle),
        ([(branch, 5), (other, lm.info.n_vocab)], ConfigError),
        ([(branch, 5), (other, -1)], ConfigError),
        ([(branch, 5), (other, 1.5)], ConfigError),
    ):
        with pytest.raises(error):
            store.commit(pairs)
        assert branch.tokens == other.tokens == tokens
    with pytest.raises(ConfigError, match="another LM"):
        BranchStore(_Foreign(lm)).commit([(branch, 5)])
    with pytest.raises(ConfigError, match="pairs of a branch"):
        store.commit([branch])
    store.commit([])
    store.prefill([])
    branch.prefill([])
    assert branch.tokens == tokens


class _Foreign:
    """An LM's outside, for a store of another LM."""

    def __init__(self, lm) -> None:
        self.scheduler, self.face_state = lm.scheduler, {}


def test_use_of_an_ended_branch_names_the_call_that_ended_it(make) -> None:
    lm = make("numpy")
    parent = root(lm)
    child = parent.fork()
    grandchild = child.fork()
    with pytest.raises(HasChildren, match=repr(child)):
        parent.prune()
    child.prune_subtree()
    assert child.disposed
    assert grandchild.disposed
    for use in (grandchild.produce, grandchild.fork, lambda: grandchild.tokens, child.save):
        with pytest.raises(StaleHandle, match=f"prune_subtree of <Branch {child.number}"):
            use()
    assert parent.is_leaf
    parent.prune()
    parent.prune()
    with pytest.raises(StaleHandle, match="prune"):
        parent.commit(5)


def test_accept_then_commit_counts_a_token_once(make) -> None:
    lm = make("numpy")
    one, two = root(lm), root(lm)
    token = one.produce().token
    assert two.produce().token == token
    one.commit(token)
    two.accept(token)
    with pytest.raises(ConfigError, match="has accepted"):
        two.commit(token + 1)
    with pytest.raises(ConfigError, match="accepted"):
        two.fork()
    two.commit(token)
    assert one.metrics == two.metrics
    assert one.metrics.n_accepted == 1
    two.accept(9)
    two.prefill([9])  # decoded elsewhere, run here
    assert two.metrics.n_accepted == 2
    assert two.tokens[-1] == 9


def test_token_without_room_in_the_context_is_not_accepted(make) -> None:
    """It could never be run, and a branch with accepted tokens neither forks nor rewinds."""
    lm = make("numpy", n_ctx=8)
    branch = Branch.create(lm, **{**NEUTRAL, "seed": 1, "frequency_penalty": 0.5})
    branch.prefill([40, 41, 42, 43, 44, 45, 46])
    branch.accept(50)
    before, drawn = branch.save(), branch.produce()
    with pytest.raises(ContextOverflow, match="the path has 9 tokens") as caught:
        branch.accept(51)
    assert (caught.value.n_tokens, caught.value.n_ctx) == (9, 8)
    assert (branch.save(), branch.produce()) == (before, drawn)
    branch.commit(50)
    with pytest.raises(ContextOverflow):
        branch.accept(51)
    branch.rewind(1)
    assert branch.fork().tokens == [40, 41, 42, 43, 44, 45, 46]


def test_saved_branch_whose_accepted_tokens_have_no_room_is_not_loaded(make) -> None:
    branch = Branch.create(make("numpy", n_ctx=8), seed=1)
    branch.prefill([40, 41, 42, 43, 44, 45, 46])
    branch.accept(50)
    with pytest.raises(ContextOverflow, match="the path has 8 tokens"):
        Branch.load(make("numpy", n_ctx=7), branch.save())


def test_after_accept_the_logits_are_those_before_it_and_the_grammar_is_after_it(make) -> None:
    lm = make("numpy")
    branch = root(lm, grammar=Regex("[ab]c+"))
    before, position = branch.logits.tolist(), branch.position
    token = branch.produce().token
    branch.accept(token)
    assert (branch.position, branch.logits.tolist()) == (position, before)
    drawn = branch.produce().token
    assert drawn == int(np.where(branch.legal(), before, -np.inf).argmax()) != token
    branch.commit(token)
    assert branch.position == position + 1
    assert branch.logits.tolist() != before


def test_perplexity_and_entropy_are_those_of_the_raw_distribution(make, oracle) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=0.7, top_k=5)
    start = branch.position
    assert branch.perplexity == branch.sampling_perplexity == math.inf
    for _ in range(5):
        branch.commit(branch.produce().token)
    rows = oracle(branch.tokens).astype(np.float64)
    logp = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
    logp -= rows.max(1, keepdims=True)
    ids = branch.tokens
    expected = math.exp(-np.mean([logp[i - 1, ids[i]] for i in range(start, len(ids))]))
    assert branch.perplexity == pytest.approx(expected, rel=1e-3)
    left = []
    for i in range(start, len(ids)):
        best = np.sort(logp[i - 1])[-5:] / 0.7
        left.append(logp[i - 1, ids[i]] / 0.7 - np.log(np.exp(best).sum()))
    assert branch.sampling_perplexity == pytest.approx(math.exp(-np.mean(left)), rel=1e-3)
    nats = branch.model_entropy()
    assert nats == pytest.approx(-(np.exp(logp[-1]) * logp[-1]).sum(), rel=1e-3)
    assert branch.model_entropy("bits") == pytest.approx(nats / math.log(2))
    assert branch.model_surprisal(7, "bits") == pytest.approx(-logp[-1, 7] / math.log(2), rel=1e-3)
    with pytest.raises(ValueError, match="bits"):
        branch.model_entropy("10")
    # A token that was not drawn here counts for the model and not for the filters.
    n = branch.last.n_kept
    branch.commit(int(np.argsort(-logp[-1])[3]))
    assert (branch.last.n_raw, branch.last.n_kept) == (6, n)


def test_steering_bans_replaces_and_is_not_forked(make) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=0.0)
    first = branch.produce().token
    branch.steer({first: -math.inf})
    second = branch.produce().token
    assert second != first
    assert branch.fork().produce().token == first
    branch.steer([(second, -math.inf)])
    assert branch.produce().token == first
    branch.steer({42: 100})
    assert branch.produce().token == 42
    branch.clear_steer()
    assert branch.produce().token == first
    branch.set_logit_bias({first: -math.inf})
    assert branch.produce().token == branch.fork().produce().token == second
    branch.clear_logit_bias()
    assert branch.produce().token == first
    branch.steer({43: math.inf})  # leaves nothing else
    assert branch.produce().token == 43
    branch.clear_steer()
    branch.set_logit_bias({43: math.inf, 44: -math.inf})
    assert branch.fork().produce().token == 43
    branch.steer({43: -math.inf})  # a ban is stronger
    assert branch.produce().token == first
    for wrong in ({1: math.nan}, {"a": 1}, {5: "x"}, 5, {10**6: 1.0}):
        for call in (branch.steer, branch.set_logit_bias):
            with pytest.raises(ConfigError, match="allowed"):
                call(wrong)


def test_logits_are_copies_can_be_set_and_merged(make) -> None:
    lm = make("numpy")
    branch = root(lm)
    copy = branch.logits
    copy[:] = 0
    assert branch.logits.any()
    wanted = np.zeros(lm.info.n_vocab, np.float32)
    wanted[11] = 99
    child = branch.fork()
    branch.set_logits(wanted)
    np.testing.assert_array_equal(branch.logits, wanted)
    assert child.logits[11] != 99
    with pytest.raises(ConfigError, match="shape"):
        branch.set_logits(wanted[:-1])
    for wrong in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"NaN or \+inf"):
            branch.set_logits(np.where(wanted == 99, wrong, wanted))
    for other in ("x", {"a": 1}, [[1.0], [1.0, 2.0]], None, object()):
        with pytest.raises(ConfigError, match="logits"):
            branch.set_logits(other)
    for alpha in ("x", math.nan, True):
        with pytest.raises(ConfigError, match="alpha is"):
            BranchStore(lm).merge_logits(branch, [child], alpha)
    np.testing.assert_array_equal(branch.logits, wanted)
    one, two = branch.fork(), child.fork()
    expected = one.logits - 0.5 * (one.logits + two.logits)
    main, store = branch.fork(), BranchStore(lm)
    store.merge_logits(main, [one, two], -0.5)
    np.testing.assert_allclose(main.logits, expected, atol=1e-5)
    np.testing.assert_array_equal(one.logits, wanted)
    store.merge_logits(main, [], 3.0)
    np.testing.assert_allclose(main.logits, expected, atol=1e-5)


@pytest.mark.parametrize("are_kept", [True, False])
@pytest.mark.parametrize("way", ["set", "merged"])
def test_scores_are_the_models_when_logits_are_set_or_merged(make, kind, way, are_kept) -> None:
    lm = make(kind)
    store, bent = BranchStore(lm), root(lm)
    plain = bent.fork()
    for step in range(3):
        if way == "set":
            bent.set_logits(np.where(np.arange(lm.info.n_vocab) == 40 + step, 9.0, 0.0))
        else:
            store.merge_logits(bent, [plain], -2.0)
        if not are_kept:
            lm.scheduler.logits_cache.clear()
        drawn = store.produce([bent])[0] if step else bent.produce()
        plain.steer({drawn.token: math.inf})
        assert drawn.logprob == pytest.approx(plain.produce().logprob, abs=1e-4)
        assert bent.model_entropy() == pytest.approx(plain.model_entropy(), abs=1e-4)
        for token in (5, drawn.token):
            surprisal = plain.model_surprisal(token)
            assert bent.model_surprisal(token) == pytest.approx(surprisal, abs=1e-4)
        fork = bent.fork()
        np.testing.assert_array_equal(fork.logits, bent.logits)
        assert fork.model_surprisal(5) == bent.model_surprisal(5)
        token = drawn.token if step < 2 else 7  # a token that was not drawn
        store.commit([(bent, token), (plain, token)])
        assert bent.perplexity == pytest.approx(plain.perplexity, rel=1e-3)
        same(bent.logits, plain.logits)


def test_logits_set_where_the_model_has_none_count_for_no_score(make) -> None:
    branch = Branch.create(make("numpy"), **NEUTRAL)
    branch.set_logits(np.zeros(branch.lm.info.n_vocab))
    piece = branch.produce()
    assert asyncio.run(branch.aproduce()) == piece
    assert piece.logprob == pytest.approx(-math.log(branch.lm.info.n_vocab), abs=1e-4)
    with pytest.raises(ConfigError, match="no logits yet"):
        branch.model_entropy()
    branch.accept(piece.token)
    branch.commit(piece.token)
    assert branch.perplexity == math.inf
    assert branch.sampling_perplexity == pytest.approx(branch.lm.info.n_vocab, rel=1e-3)
    late = branch.fork(clone_logits=False)
    late.set_logits(np.zeros(late.lm.info.n_vocab))
    late.commit(late.produce().token)
    assert late.perplexity == math.inf
    assert late.logits.any()


def test_other_parameters_keep_the_stream_and_the_counts(make) -> None:
    lm = make("numpy")
    plain, changed = root(lm, temperature=0.9), root(lm, temperature=0.9)
    for _ in range(4):
        changed.set_sampler_params(temperature=1.7, top_p=0.9)
        changed.set_sampler_params(temperature=0.9, top_p=1.0)
        token = plain.produce().token
        assert changed.produce().token == token
        plain.commit(token)
        changed.commit(token)
    changed.set_sampler_params(temperature=0.0, frequency_penalty=2.0)
    assert sorted(changed.sampler.history.ids) == sorted(set(changed.tokens[-4:]))
    for name in ("n", "max_tokens", "stop", "seed", "constraint"):
        with pytest.raises(ConfigError, match=name):
            changed.set_sampler_params(**{name: 1})


def test_forks_draw_from_their_own_streams_without_a_seed(make) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=1.5)
    texts = set()
    for _ in range(6):
        fork = branch.fork()
        for _ in range(4):
            fork.commit(fork.produce().token)
        texts.add(fork.text)
    assert len(texts) > 2
    twins = [branch.fork(seed=5), branch.fork(seed=5)]
    assert twins[0].produce() == twins[1].produce()
    second = root(lm, temperature=1.5)
    first = root(lm, temperature=1.5)
    assert second.fork().produce() == first.fork().produce()


def test_iteration_equals_the_manual_loop_and_may_be_resumed_after_a_break(make) -> None:
    lm = make("numpy")
    branch, manual = root(lm), root(lm)
    start = branch.position
    pieces = []
    for piece in branch:
        pieces.append(piece)
        if len(pieces) == 5:
            break
    for piece in pieces:
        assert manual.produce() == piece
        manual.commit(piece.token)
    assert branch.position == start + 5
    assert "".join(map(str, pieces)) == branch.text
    rest = list(branch)
    assert branch.produce().is_stop
    assert not rest or not rest[-1].is_stop


def test_same_seed_gives_the_same_text_by_loom_and_branch(make, kind) -> None:
    lm = drawn_by_weft(make(kind))
    loom = Loom(lm, PROMPT)
    (node,) = loom.grow(n=1, seed=3, max_tokens=12, show=False, temperature=1.0)
    branch = Branch.create(lm, seed=3, **NEUTRAL)
    branch.prefill(loom.tokens)
    assert "".join(piece.text for piece, _ in zip(branch, range(12), strict=False)) == node.text


def test_awaited_calls_share_steps_queue_on_one_branch_and_never_block(make) -> None:
    lm = make("numpy", wrap=lambda engine: BrokenEngine(engine, set()))
    parent = root(lm)
    alone = [parent.fork(seed=i) for i in range(4)]
    together = [parent.fork(seed=i) for i in range(4)]

    async def decode(branch: Branch) -> None:
        for _ in range(3):
            await branch.acommit((await branch.aproduce()).token)

    async def main() -> int:
        calls = len(lm.engine.calls)
        await asyncio.gather(*map(decode, together))
        new = len(lm.engine.calls) - calls
        queued = parent.fork()
        await asyncio.gather(queued.aprefill([5, 6]), queued.aprefill([7]), queued.acommit(8))
        assert sorted(queued.tokens[-4:]) == [5, 6, 7, 8]
        pieces = [piece async for piece, _ in _first(queued, 3)]
        assert len(pieces) <= 3
        return new

    assert asyncio.run(main()) == 3
    for branch in alone:
        for _ in range(3):
            branch.commit(branch.produce().token)
    assert [branch.tokens for branch in together] == [branch.tokens for branch in alone]


async def _first(branch: Branch, n: int):
    new = 0
    async for piece in branch:
        new += 1
        yield piece, new
        if new == n:
            return


def test_more_branches_than_fit_live_asleep_and_wake(make, kv_kind, oracle) -> None:
    lm = make(kv_kind, kv_slots=100)
    parent = root(lm)
    branches = [parent.fork() for _ in range(12)]
    for number, branch in enumerate(branches):
        for step in range(12):
            branch.commit(20 + 12 * number + step)
    asleep = [branch for branch in branches if not branch.is_active]
    assert asleep
    pressure = BranchStore(lm).pressure()
    assert pressure.n_branches == 13
    assert pressure.n_active < 13
    branch = asleep[0]
    same(branch.logits, oracle(branch.tokens)[-1])
    branch.commit(7)
    assert branch.is_active
    same(branch.logits, oracle(branch.tokens)[-1])


@pytest.mark.parametrize("look", ["ids", "branch", "nothing"])
def test_reported_kv_is_that_of_commits_and_forks(make, kv_kind, look) -> None:
    lm = make(kv_kind)
    store, branch = BranchStore(lm), root(lm)
    start = branch.position

    def sizes_of(one: Branch) -> set[int]:
        """Return the reported KV sizes, read twice: reading changes nothing."""
        if look == "ids":
            sizes = [lm.kv.size(one.tokens) for _ in range(2)]
        else:
            sizes = [lm.kv.size(one) for _ in range(2)] if look == "branch" else []
        return {one.metrics.kv_tokens, *sizes} if one.is_active else set()

    for token in (20, 21, 22):
        branch.commit(token)
        assert sizes_of(branch) == {branch.position}
    fork, earlier = branch.fork(), branch.fork(at=start + 2)
    before = lm.stats()
    assert sizes_of(branch) == sizes_of(fork) == {start + 3}
    assert sizes_of(earlier) == {start + 2}
    assert lm.kv.size([*earlier.tokens, 9, 9]) == start + 2
    fork.commit(23)
    assert sizes_of(fork) == {start + 4}
    assert sizes_of(branch) == {start + 3}
    pressure = store.pressure()
    assert pressure.n_active == pressure.n_branches == 3
    branch.commit(24)
    branch.rewind(2)
    assert sizes_of(branch) == {start + 2}
    after = lm.stats()
    assert (after.prefilled, after.recomputed) == (before.prefilled, before.recomputed)
    lm.tree.check()


def test_kv_that_commits_have_computed_is_trimmed_by_hand(make, kv_kind) -> None:
    lm = make(kv_kind)
    branch = root(lm)
    for token in (20, 21, 22):
        branch.commit(token)
    lm.kv.trim(branch, branch.position - 2)
    assert lm.kv.size(branch) == branch.metrics.kv_tokens == branch.position - 2
    assert not branch.is_active


def test_empty_branch_and_one_without_addressable_kv_are_not_active(make) -> None:
    branch = root(make("hidden"))
    branch.commit(20)
    assert (branch.is_active, branch.metrics.kv_tokens) == (False, 0)
    assert not Branch.create(make("numpy")).is_active


def test_available_is_n_seq_max_minus_live_branches(make) -> None:
    lm = make("sequence", n_seq_max=8)
    store, parent = BranchStore(lm), root(lm)
    assert store.available == 7
    branches = [parent.fork() for _ in range(4)]
    assert store.available == 3
    store.commit([(branch, 20 + i) for i, branch in enumerate(branches)])
    lm.clear_cache()  # no KV is resident: the branches still count
    assert store.available == 3
    branches[0].prune_subtree()
    assert store.available == 4
    more = [parent.fork() for _ in range(9)]
    assert store.available == 0
    del more
    store.retain_only(branches[1])
    assert store.available == 7


def test_loop_that_forks_while_available_ends(make) -> None:
    lm = make("sequence", n_seq_max=8)
    store, parent = BranchStore(lm), root(lm)
    while store.available:
        parent.fork()
    assert len(parent.children) == 7
    parent.children[0].commit(20)  # used, and not referenced
    gc.collect()
    assert (len(parent.children), store.available) == (6, 1)


def test_available_without_n_seq_max_counts_down_from_65_536(make) -> None:
    for kind in ("numpy", "hidden"):
        lm = make(kind)
        branch = root(lm)
        assert BranchStore(lm).available == 65_535
        branch.prune()
        assert BranchStore(lm).available == 65_536


def test_rewind_draws_the_same_tokens_and_with_a_seed_others(make) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=2.0)

    def draw(n: int = 6) -> list[int]:
        drawn = []
        for _ in range(n):
            drawn.append(branch.produce().token)
            branch.commit(drawn[-1])
        return drawn

    first = draw()
    branch.rewind(6)
    assert draw() == first
    branch.rewind(6, seed=7)
    other = draw()
    assert other != first
    branch.rewind(6)
    assert draw() == other
    branch.rewind(0, seed=1)
    assert branch.seed == 1
    with pytest.raises(ConfigError, match="seed is -1"):
        branch.rewind(2, seed=-1)
    assert branch.tokens[-6:] == other


@pytest.mark.programs
def test_65_536_branches_live_at_no_cost_of_kv(make) -> None:
    lm = make("numpy")
    parent = root(lm)
    used = lm.stats().kv_tokens
    branches = [parent.fork() for _ in range(65_536)]
    assert lm.stats().kv_tokens == used
    branches[-1].commit(9)
    assert branches[-1].tokens[-1] == 9
    assert branches[0].position == parent.position
    with pytest.raises(HasChildren):
        parent.prune()


def test_dropped_branches_leave_nothing_pinned(make) -> None:
    lm = make("numpy")
    parent = root(lm)
    child = parent.fork()
    child.commit(5)
    del parent, child
    gc.collect()
    assert lm.stats().pinned_tokens == 0
    lm.clear_cache()
    assert lm.stats().kv_tokens == 0


def test_one_clear_cache_forgets_the_tokens_of_ended_branches(make) -> None:
    lm = make("numpy")
    parent = root(lm)
    branches = [parent.fork() for _ in range(2)]
    for token in (5, 6):
        BranchStore(lm).commit([(branch, token + i) for i, branch in enumerate(branches)])
    del parent, branches
    gc.collect()
    lm.clear_cache()
    assert lm.tree.n_nodes == 0


def test_loaded_branch_continues_as_the_saved_one(make, tmp_path) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=1.3, repetition_penalty=1.2, seed=4).fork()
    for _ in range(5):
        branch.commit(branch.produce().token)
    branch.save(tmp_path / "branch.json")
    second = Branch.load(lm, tmp_path / "branch.json")
    assert (second.tokens, second.text) == (branch.tokens, branch.text)
    assert second.perplexity == pytest.approx(branch.perplexity)
    for _ in range(3):
        assert second.produce().token == branch.produce().token
        token = branch.produce().token
        second.commit(token)
        branch.commit(token)


def test_characters_of_several_tokens_are_returned_complete(make) -> None:
    lm = make("numpy")
    branch = root(lm)
    ids = lm.tokenize("é漢🦊", add_bos=False)
    pieces = []
    for token in ids:
        branch.steer({token: 1e4})
        piece = branch.produce()
        assert piece.token == token
        pieces.append(piece.text)
        branch.commit(token)
    assert "".join(pieces) == "é漢🦊"
    assert len(ids) > 3
    assert "" in pieces


def test_batch_size_changes_no_token(make, oracle) -> None:
    texts = []
    for n_batch in (3, 7, 512):
        lm = make("numpy", n_batch=n_batch)
        branch = root(lm, temperature=0.0)
        for _ in range(12):
            branch.commit(branch.produce().token)
        texts.append(branch.tokens)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][-1] == int(oracle(texts[0][:-1])[-1].argmax())


def test_create_with_meaningless_parameters_raises(make) -> None:
    lm = make("numpy")
    with pytest.raises(ValueError, match="position is 5"):
        Branch.create(lm, 5)
    for name in ("n", "max_tokens", "stop"):
        with pytest.raises(ConfigError, match=f"{name} has no meaning"):
            Branch.create(lm, **{name: 1})
    with pytest.raises(ConfigError, match="Here it is top_k"):
        Branch.create(lm, topk=1)
    branch = Branch.create(lm)
    with pytest.raises(ConfigError, match="no logits yet"):
        branch.produce()
    with pytest.raises(ConfigError, match="no logits yet"):
        root(lm).fork(clone_logits=False).produce()
    with pytest.raises(ConfigError, match="n is"):
        branch.rewind(1)


@pytest.mark.parametrize("n", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_random_sequences_of_calls_agree_with_a_naive_twin(make, oracle, n) -> None:
    """The twin: a list of tokens a branch. One LM with little room for all; 10 calls a sequence."""
    lm = make("numpy", kv_slots=120)
    for seed in range(n):
        twin = random_calls(lm, random.Random(seed), seed)
        branch, tokens = random.Random(seed).choice(list(twin.items()))
        same(branch.logits, oracle(tokens)[-1])
        for owner in twin:
            owner.end("the test")


def random_calls(lm, rng: random.Random, seed: int) -> dict[Branch, list[int]]:
    store = BranchStore(lm)
    first = root(lm, seed=seed)
    twin: dict[Branch, list[int]] = {first: first.tokens}
    for _ in range(10):
        branch = rng.choice(list(twin))
        call = rng.choice(
            ["fork", "fork", "fork_at", "commit", "commit", "rewind", "prune", "only"]
        )
        if call == "fork" and len(twin) < 8:
            twin[branch.fork()] = list(twin[branch])
        elif call == "fork_at" and len(twin) < 8:
            at = rng.randrange(1, len(twin[branch]) + 1)
            twin[branch.fork(at=at)] = twin[branch][:at]
        elif call == "commit":
            some = rng.sample(list(twin), rng.randint(1, min(3, len(twin))))
            pairs = [(each, rng.randrange(5, 300)) for each in some]
            store.commit(pairs)
            for item, token in pairs:
                twin[item].append(token)
        elif call == "rewind" and len(twin[branch]) > 5:
            n = rng.randint(1, 4)
            branch.rewind(n)
            del twin[branch][-n:]
        elif call == "prune" and branch.is_leaf and len(twin) > 1:
            branch.prune()
            del twin[branch]
        elif call == "only" and rng.random() < 0.3:
            store.retain_only(branch)
            twin = {branch: twin[branch]}
        assert {b: b.tokens for b in twin} == twin
    return twin


@pytest.mark.parametrize("run", ["together", "in two prefills", "two commits", "commit, prefill"])
def test_tokens_accepted_ahead_are_each_scored_by_the_row_before_them(make, kind, run) -> None:
    """However they are run afterwards, the scores are those of plain commits."""
    lm = make(kind)
    plain, ahead = root(lm), root(lm)
    tokens = [70, 81, 92]
    for token in tokens:
        plain.commit(token)
        ahead.accept(token)
    assert ahead.metrics.n_accepted == 3
    if run == "together":
        ahead.prefill([*tokens, 7])
        plain.prefill([7])
    elif run == "in two prefills":
        ahead.prefill(tokens[:1])
        ahead.prefill(tokens[1:])
    elif run == "two commits":
        ahead.commit(tokens[0])
        lm.clear_cache()
        ahead.commit(tokens[1])
        ahead.commit(tokens[2])
    else:
        ahead.commit(tokens[0])
        ahead.prefill(tokens[1:])
    assert ahead.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
    assert ahead.metrics.n_accepted == plain.metrics.n_accepted == 3
    assert ahead.tokens == plain.tokens
    same(ahead.logits, plain.logits)


def test_tokens_accepted_before_any_row_have_no_score_for_the_first(make) -> None:
    lm = make("numpy")
    ahead, plain = Branch.create(lm, seed=1), Branch.create(lm, seed=1)
    for token in (40, 50):
        ahead.accept(token)
    ahead.prefill([40, 50])
    plain.commit(40)
    plain.commit(50)
    assert ahead.perplexity == pytest.approx(plain.perplexity, rel=1e-4)


def test_dead_end_names_its_branches_and_the_others_have_drawn(make) -> None:
    lm = make("numpy")
    store, parent = BranchStore(lm), root(lm)
    branches = [parent.fork() for _ in range(4)]
    ban = dict.fromkeys(range(lm.info.n_vocab), -math.inf)
    for dead in branches[1::2]:
        dead.steer(ban)
    with pytest.raises(DeadEnd, match=f"{branches[1]!r}, {branches[3]!r}") as caught:
        store.produce(branches)
    error = caught.value
    assert error.branches == (branches[1], branches[3])
    assert error.branch is branches[1]
    assert list(error.token_ids) == branches[1].tokens
    assert len(store.produce([branches[0], branches[2]])) == 2
    with pytest.raises(DeadEnd) as caught:
        Loom(lm, PROMPT).grow(n=1, max_tokens=3, logit_bias=ban)
    assert caught.value.branch is None
    assert list(caught.value.token_ids) == Loom(lm, PROMPT).tokens


def test_parameters_may_be_a_mapping(make) -> None:
    lm = make("numpy", defaults=ModelDefaults.from_generation_config({}))
    message = {"temperature": 0.3, "seed": 5}
    one = Branch.create(lm, 0, message)
    two = Branch.create(lm, 0, **message)
    assert one.params == two.params
    assert one.params.top_k == 40  # other defaults stay
    assert Branch.create(lm, 0, message, temperature=0.5).params.temperature == 0.5
    one.set_sampler_params({"top_k": 3})
    assert (one.params.top_k, one.params.temperature) == (3, 0.3)
    for wrong in ({"topK": 3}, {"n": 2}, "x", {"logit_bias": {10**6: 1}}):
        with pytest.raises(ConfigError):
            Branch.create(lm, 0, wrong)
    with pytest.raises(ConfigError, match="set_grammar"):
        one.set_sampler_params({"constraint": {"type": "null"}})


@pytest.mark.parametrize("last_n", [1, 3, None])
def test_penalty_last_n_limits_penalties_in_forks_rewinds_and_files(make, last_n) -> None:
    """After forks, rewinds, changed settings and a file, as after plain commits."""
    lm = make("numpy")
    options = {"presence_penalty": 50.0, "temperature": 0.0, "penalty_last_n": last_n}
    branch = root(lm, **options)
    tokens = [60, 61, 62, 63]
    for token in tokens:
        branch.commit(token)
    rows = branch.logits.copy()
    rows[tokens[-last_n:] if last_n else tokens] -= 50.0
    wanted = int(rows.argmax())
    back = branch.fork()
    back.commit(77)
    back.rewind(1)
    fresh = root(lm)
    for token in tokens:
        fresh.commit(token)
    fresh.set_sampler_params(**options)
    loaded = Branch.load(lm, branch.save())
    at = back.fork(at=back.position)
    back.commit(5)
    middle = back.fork(at=back.position - 1)
    for same_state in (branch, branch.fork(), fresh, loaded, at, middle):
        assert same_state.produce().token == wanted


def test_saved_branch_keeps_its_steering(make, tmp_path) -> None:
    lm = make("numpy")
    branch = root(lm, temperature=0.0)
    first = branch.produce().token
    branch.steer({first: -math.inf, 42: 100.0})
    branch.save(tmp_path / "branch.json")
    second = Branch.load(lm, tmp_path / "branch.json")
    assert second.produce().token == branch.produce().token == 42
    second.clear_steer()
    assert second.produce().token == first
    older = {
        key: value for key, value in branch.save().items() if key not in ("steering", "adapter")
    }
    assert Branch.load(lm, older).produce().token == first


def test_children_are_the_live_forks_in_order(make) -> None:
    lm = make("numpy")
    parent = root(lm)
    forks = [parent.fork() for _ in range(6)]
    assert parent.children == forks
    forks[1].prune()
    forks[3].commit(5)
    del forks[3]
    gc.collect()
    assert parent.children == [forks[0], *forks[2:]]
    BranchStore(lm).retain_only(forks[0])
    assert forks[0].parent is None


def test_loop_of_commits_leaves_all_logits_on_the_device(make) -> None:
    """Tokens are drawn on the device; a row is copied once, at its first read."""
    lm = make("late")
    store, root = BranchStore(lm), Branch.create(lm, seed=1)
    root.prefill(lm.text.encode("Once upon a time"))
    assert lm.engine.n_fetched == 0
    branches = [root.fork() for _ in range(4)]
    store.commit([(branch, branch.produce().token) for branch in branches])
    n_fetched = lm.engine.n_fetched
    assert n_fetched == 1  # the four first draws read one row
    for _ in range(10):
        store.commit([(branch, branch.produce().token) for branch in branches])
    assert lm.engine.n_fetched == n_fetched
    for _ in range(2):
        _ = branches[2].logits
    assert lm.engine.n_fetched == n_fetched + 1
