"""Lines and commits: what they run is the path's own, whatever else runs, fails or is short."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fakes import Boom, BrokenEngine, HiddenFake, LateFake, SequenceFake
from rig import (
    N_VOCAB,
    FreeSteps,
    MakeRig,
    MemoryEngine,
    Parity,
    Rig,
    Untrimmable,
    assert_result,
    draw_after,
    logits_after,
    run,
    sampler,
    verify_always,
)
from weft._core.kv.place import Place
from weft._core.sched.commits import CommitJob
from weft._core.sched.draft_model import DraftModel
from weft._core.sched.sequences import TokenSequence
from weft._core.sched.speculation import MIN_GAIN
from weft._core.sched.work import Commit, Extend, Logits, Ticket
from weft.engines.base import Engine
from weft.errors import Cancelled, ForwardError, KVFull

ENGINES: dict[str, Callable[[set[int]], Engine]] = {
    "plain": lambda fail_on: BrokenEngine(MemoryEngine(), fail_on),
    "sequence": lambda _: SequenceFake(MemoryEngine(), 6),
    "hidden": lambda _: HiddenFake(MemoryEngine()),
    "late": lambda fail_on: LateFake(MemoryEngine(), fail_on),
}
DRAFTING = ("plain", "sequence", "late")  # engines that show their KV


class Owner:
    """Owner of a sequence. `ids`: its expected path."""

    def __init__(self, rig: Rig, place: Place, ids: Sequence[int], number: int) -> None:
        self.rig = rig
        self.ids = list(ids)
        self.number = number
        self.sequence = rig.scheduler.sequences.create(self, place)

    @property
    def sampler(self):
        return sampler(self.number)


def commit(owners: Sequence[Owner], tokens: Sequence[int], rig: Rig) -> Ticket:
    sequences = [owner.sequence for owner in owners]
    (ticket,) = rig.submit(Commit(sequences, tokens, [owner.sampler for owner in owners]))
    return ticket


def assert_committed(owners: Sequence[Owner], tokens: Sequence[int], ticket: Ticket) -> None:
    """A commit gave what the rule says; the owners' paths go on."""
    for owner, token, result in zip(owners, tokens, ticket.result(), strict=True):
        owner.ids.append(token)
        logits = owner.rig.scheduler.logits_cache.read(result.row)
        assert logits is not None
        np.testing.assert_array_equal(logits, logits_after(owner.ids))
        drawn = draw_after(owner.ids, owner.sampler)
        assert drawn.kept is not None
        if result.drawn is None:  # the token was run as a draft of an earlier commit
            assert owner.rig.scheduler.counters.draft_accepted
            continue
        assert result.drawn[0] == int(drawn.ids[0])
        np.testing.assert_allclose(result.drawn[1:], [drawn.logprobs[0], drawn.kept[0]], atol=1e-6)


def assert_path(rig: Rig, sequence: TokenSequence, ids: Sequence[int]) -> None:
    with rig.scheduler.lock:
        assert sequence.end().ids() == list(ids)
        if sequence.tail is not None:
            n_run = len(sequence.tokens) + len(sequence.kept)
            assert sequence.tail.fragment.length == n_run


@pytest.mark.parametrize(
    ("kind", "drafts"), [*((kind, False) for kind in ENGINES), *((kind, True) for kind in DRAFTING)]
)
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
)
def test_random_commits_give_the_results_of_the_rule(
    make: MakeRig, kind: str, seed: int, drafts: bool
) -> None:
    """With runs, extends, little room, failures, forks and dropped owners.

    Of drafts, about three in four tokens are right.
    """
    rng = random.Random(seed)
    fail_on = set(rng.sample(range(8, 200), 8)) if seed % 2 else set()
    engine = ENGINES[kind](fail_on)
    rig = make(
        engine, capacity=rng.choice([None, 60, 90]), n_ctx=40, n_batch=rng.choice([3, 5, 16])
    )
    if drafts:
        verify_always(rig.scheduler)
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], n) for n in range(4)]
    number, n_done = 4, 0
    for _ in range(60):
        call = rng.choice(["commit"] * (12 if drafts else 6) + ["fork", "drop", "others", "rewind"])
        if call == "commit":
            rng.shuffle(owners)
            cut = rng.randrange(1, len(owners) + 1)
            parts = [part for part in (owners[:cut], owners[cut:][: rng.randrange(3)]) if part]
            tokens = [
                [
                    len(owner.ids) % 3 if drafts and rng.random() < 0.8 else rng.randrange(4)
                    for owner in part
                ]
                for part in parts
            ]
            tickets = [commit(p, t, rig) for p, t in zip(parts, tokens, strict=True)]
            if rng.random() < 0.1:
                tickets[0].cancel()
            rig.driver.drive(tickets)
            for part, given, ticket in zip(parts, tokens, tickets, strict=True):
                if ticket.error is None:
                    assert_committed(part, given, ticket)
                    n_done += 1
                else:
                    assert isinstance(ticket.error, KVFull | ForwardError | Cancelled)
        elif call == "fork" and len(owners) < 7:
            parent = rng.choice(owners)
            place = rig.scheduler.sequences.release(parent.sequence)
            parent.sequence = rig.scheduler.sequences.create(parent, place)
            owners.append(Owner(rig, place.fork(), parent.ids, number))
            number += 1
        elif call == "rewind":
            owner = rng.choice(owners)
            place = rig.scheduler.sequences.release(owner.sequence)
            depth = rng.randrange(1, place.depth + 1)
            owner.sequence, owner.ids = (
                rig.scheduler.sequences.create(owner, place.at(depth)),
                owner.ids[:depth],
            )
        elif call == "drop" and len(owners) > 2:
            owners.pop(rng.randrange(len(owners)))
        elif call == "others":
            place = rig.place(rng.choice(owners).ids)
            item = run(place, 3, max_tokens=2) if rng.random() < 0.5 else Extend(place, [0, 1])
            rig.drive_quietly(item)
        for owner in owners:
            assert_path(rig, owner.sequence, owner.ids)
            if len(owner.ids) > 34:
                owner.sequence = rig.scheduler.sequences.create(owner, rig.place([1, 2, 3]))
                owner.ids = [1, 2, 3]
        if rig.scheduler.in_flight is None:
            rig.tree.check()
    assert n_done > 10
    assert drafts or not rig.scheduler.counters.drafted


@pytest.mark.parametrize("n_batch", [3, 8, 64])
def test_commit_takes_one_forward_per_batch(make: MakeRig, n_batch: int) -> None:
    rig = make(n_batch=n_batch)
    rig.drive(Extend(rig.place([1, 2, 3])))
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], n) for n in range(8)]
    for _ in range(3):
        before = len(rig.engine.sizes)
        tokens = [owner.number for owner in owners]
        ticket = commit(owners, tokens, rig)
        rig.driver.drive([ticket])
        assert_committed(owners, tokens, ticket)
        assert len(rig.engine.sizes) - before == -(-8 // n_batch)


def test_failing_pass_undoes_the_passes_before_it(make: MakeRig) -> None:
    engine = BrokenEngine(MemoryEngine(), set())
    rig = make(engine, n_batch=4)
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], n) for n in range(8)]
    tokens = list(range(8))
    rig.driver.drive([first := commit(owners, tokens, rig)])
    assert_committed(owners, tokens, first)
    engine.fail_on.add(len(engine.calls) + 1)  # the second of two passes
    rig.driver.drive([failed := commit(owners, tokens, rig)])
    with pytest.raises(ForwardError):
        failed.result()
    for owner in owners:
        assert owner.sequence.tail is not None
        assert owner.sequence.tail.fragment.length == len(owner.sequence.tokens) == 1
    rig.driver.drive([repeated := commit(owners, tokens, rig)])
    assert_committed(owners, tokens, repeated)


def test_idle_sequences_make_room_for_others_and_resume(make: MakeRig) -> None:
    rig = make(capacity=24)
    owners = [Owner(rig, rig.place([n]), [n], n) for n in range(4)]
    for _ in range(3):
        for owner in owners:
            rig.driver.drive([ticket := commit([owner], [5], rig)])
            assert_committed([owner], [5], ticket)
    assert len(rig.ask([9] * 20, Logits(20))[0]) == 16
    assert not rig.scheduler.sequences.opened
    for owner in owners:
        rig.driver.drive([ticket := commit([owner], [6], rig)])
        assert_committed([owner], [6], ticket)


def test_kv_computed_by_a_sequence_is_reused_by_others(make: MakeRig) -> None:
    rig = make()
    owner = Owner(rig, rig.place([1, 2]), [1, 2], 0)
    for token in (3, 4, 5):
        rig.driver.drive([ticket := commit([owner], [token], rig)])
        assert_committed([owner], [token], ticket)
    before = rig.scheduler.counters.prefilled
    rig.drive(Extend(rig.place([1, 2, 3, 4, 5])))
    assert rig.scheduler.counters.prefilled == before
    child = Owner(rig, rig.scheduler.sequences.release(owner.sequence), owner.ids, 1)
    rig.driver.drive([ticket := commit([child], [7], rig)])
    assert_committed([child], [7], ticket)
    assert rig.scheduler.counters.prefilled == before


def test_n_cached_counts_kv_of_open_sequences_and_closes_none(make: MakeRig) -> None:
    rig = make(MemoryEngine())
    sequences, prompt = rig.scheduler.sequences, [1, 2, 3, 4, 5]
    rig.drive(Extend(rig.place(prompt)))
    near, far = Owner(rig, rig.place(prompt), prompt, 0), Owner(rig, rig.place([9]), [9], 1)
    for tokens in ([6, 8], [7, 8]):
        ticket = commit([near, far], tokens, rig)
        rig.driver.drive([ticket])

    def cached(*ids: int) -> int:
        with rig.scheduler.lock:
            return sequences.n_cached(rig.place(ids))

    opened = list(sequences.opened)
    assert cached(*prompt, 6, 7) == cached(*prompt, 6, 7, 2) == 7
    assert cached(*prompt, 6, 2) == 6
    assert cached(*prompt, 2) == cached(*prompt) == 5
    assert (cached(1, 2, 9, 9), cached(9, 8, 8, 1), cached(9), cached(2), cached()) == (
        2,
        3,
        1,
        0,
        0,
    )
    assert list(sequences.opened) == opened
    sequences.release(near.sequence)  # forked, say
    assert cached(*prompt, 6, 7) == 7
    with rig.scheduler.lock:
        far.sequence.drop(rig.tree)  # the engine could not keep it
    assert cached(9, 8, 8) == 1
    rig.finish()


def test_sequences_without_owners_use_no_slots(make: MakeRig) -> None:
    rig = make()
    owner = Owner(rig, rig.place([1, 2]), [1, 2], 0)
    rig.driver.drive([commit([owner], [3], rig)])
    assert rig.tree.budget.unevictable > 0
    number = id(owner.sequence)
    gc.collect()
    gc.disable()  # as loops do that train: nothing here is a cycle
    try:
        del owner
        rig.driver.try_drain()
        assert number not in [
            id(each) for each in gc.get_objects() if isinstance(each, TokenSequence)
        ]
    finally:
        gc.enable()
    assert rig.tree.budget.unevictable == 0
    assert not rig.scheduler.sequences.opened


def test_commit_cancelled_in_flight_ends_when_its_step_has_finished(make: MakeRig) -> None:
    rig = make(LateFake(MemoryEngine()))
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    rig.drive(Extend(rig.place([1, 2, 3]), (), (Logits(3),)))
    ticket = commit([owner], [4], rig)
    other = run(rig.place([1, 2, 3]), max_tokens=12)
    (generated,) = rig.submit(other)
    while rig.scheduler.in_flight is None or not any(
        isinstance(job, CommitJob) and job.outstanding for job in rig.scheduler.queues.commits
    ):
        rig.step()
    ticket.cancel()
    rig.driver.drive([ticket, generated])
    with pytest.raises(Cancelled):
        ticket.result()
    assert_result(rig, other, generated.result())


def test_sequence_released_in_flight_is_closed_when_its_step_has_finished(
    make: MakeRig,
) -> None:
    rig = make(LateFake(MemoryEngine()))
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    rig.drive(Extend(rig.place([1, 2, 3])))
    ticket = commit([owner], [4], rig)
    rig.step()
    with rig.scheduler.lock:
        rig.scheduler.sequences.release(owner.sequence)
        rig.scheduler.sequences.close_released()
        assert owner.sequence in rig.scheduler.sequences.opened
    assert not ticket.done
    rig.driver.drive([ticket])
    assert_committed([owner], [4], ticket)
    rig.driver.try_drain()
    assert owner.sequence not in rig.scheduler.sequences.opened


def test_sequence_released_before_its_commit_starts_is_closed_by_the_commit(make: MakeRig) -> None:
    rig = make()
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    ticket = commit([owner], [4], rig)
    rig.scheduler.sequences.release(owner.sequence)
    rig.driver.drive([ticket])
    assert_committed([owner], [4], ticket)
    assert owner.sequence not in rig.scheduler.sequences.opened
    assert rig.scheduler.sequences.n_cached(owner.sequence.end()) == 4


def test_commit_waits_for_the_writer_of_the_place_where_it_starts(make: MakeRig) -> None:
    """It is done in two steps, and what grows where the last of its lines begins comes between."""
    rig = make(LateFake(MemoryEngine()), n_batch=2)
    paths = [[1, 2, 3], [1, 2, 4], [8, 8, 8]]
    rig.drive(*(Extend(rig.place(ids)) for ids in paths))
    owners = [Owner(rig, rig.place(ids), ids, number) for number, ids in enumerate(paths)]
    tickets = [commit(owners, [5, 6, 7], rig)]
    grown = Extend(rig.place([8, 8, 8]), tuple([6] * 6), (Logits(9),))
    tickets += rig.submit(grown)
    rig.driver.drive(tickets)
    assert_committed(owners, [5, 6, 7], tickets[0])
    want = logits_after([8, 8, 8, *[6] * 6])
    assert tickets[1].result()[0].tolist() == want.tolist()


# Drafts ---------------------------------------------------------------------------------------


def commit_all(owner: Owner, tokens: Sequence[int]) -> None:
    for token in tokens:
        owner.rig.driver.drive([ticket := commit([owner], [token], owner.rig)])
        assert_committed([owner], [token], ticket)


@pytest.mark.parametrize("kind", DRAFTING)
def test_commits_of_tokens_that_ran_as_drafts_take_no_forward(make: MakeRig, kind: str) -> None:
    rig = make(ENGINES[kind](set()))
    verify_always(rig.scheduler)
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 2)
    steps, decoded = rig.scheduler.counters.steps, rig.scheduler.counters.decoded
    commit_all(owner, [4, 5, 6, 7] * 8)
    assert rig.scheduler.counters.steps - steps <= 3
    assert rig.scheduler.counters.decoded - decoded == 32
    assert_path(rig, owner.sequence, [1, 2, 3, *[4, 5, 6, 7] * 10])


@pytest.mark.parametrize("has_model", [False, True])
def test_commits_use_the_drafts_that_ran_before_drafts_were_replaced(
    make: MakeRig, has_model: bool
) -> None:
    rig, small = make(), make()
    verify_always(rig.scheduler)
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 3)
    n_kept, n_steps = len(owner.sequence.kept), rig.scheduler.counters.steps
    assert n_kept > 1
    rig.scheduler.speculate(model=DraftModel(small.driver) if has_model else None)
    commit_all(owner, ([4, 5, 6, 7] * 4)[:n_kept])
    assert rig.scheduler.counters.steps == n_steps
    commit_all(owner, [8, 9])
    assert rig.scheduler.counters.steps == n_steps + 2
    assert_path(rig, owner.sequence, owner.ids)


@pytest.mark.parametrize("engine", [MemoryEngine, Untrimmable])
def test_commit_of_another_token_than_the_draft_frees_its_kv(
    make: MakeRig, engine: Callable[[], Engine]
) -> None:
    rig = make(engine())
    verify_always(rig.scheduler)
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 3)
    assert owner.sequence.kept
    commit_all(owner, [9])
    assert not owner.sequence.kept
    assert_path(rig, owner.sequence, owner.ids)
    commit_all(owner, [4, 5, 6, 7])


def test_failed_commit_with_one_of_a_draft_changes_neither(make: MakeRig) -> None:
    engine = BrokenEngine(MemoryEngine(), set())
    rig = make(engine)
    verify_always(rig.scheduler)
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], n) for n in range(2)]
    commit_all(owners[0], [4, 5, 6, 7] * 3)
    commit_all(owners[1], [8])
    assert owners[0].sequence.kept
    engine.fail_on = {len(engine.calls)}
    rig.driver.drive([failed := commit(owners, [4, 9], rig)])
    assert isinstance(failed.error, ForwardError)
    for owner in owners:
        assert_path(rig, owner.sequence, owner.ids)
    rig.driver.drive([repeated := commit(owners, [4, 9], rig)])
    assert_committed(owners, [4, 9], repeated)


def test_idle_sequence_frees_its_drafts_for_other_work(make: MakeRig) -> None:
    rig = make(capacity=40)
    verify_always(rig.scheduler)
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 3)
    assert owner.sequence.kept
    assert len(rig.ask([9] * 36, Logits(36))[0]) == 16
    assert not owner.sequence.kept
    commit_all(owner, [4, 5])


def test_commit_short_of_slots_frees_its_own_drafts(make: MakeRig) -> None:
    """The first commit of both runs its second sequence only, next to the drafts of the first."""
    rig = make(capacity=26)
    verify_always(rig.scheduler)
    owners = [Owner(rig, rig.place(ids), ids, n) for n, ids in enumerate([[1, 2, 3], [9, 8, 7]])]
    commit_all(owners[0], [4, 5, 6, 7] * 3)
    assert owners[0].sequence.kept
    commit_all(owners[1], [10, 11, 12])
    assert rig.tree.budget.used == 26
    rig.driver.drive([ticket := commit(owners, [4, 6], rig)])
    assert_committed(owners, [4, 6], ticket)
    assert not owners[0].sequence.kept


def test_drafts_leave_slots_for_tokens_of_a_commits_later_steps(make: MakeRig) -> None:
    """A commit of two adapters takes two steps; drafts of the first may take 3 of the 8 slots."""
    rig = make()
    verify_always(rig.scheduler)
    speculation = rig.scheduler.queues.speculation
    assert speculation is not None
    speculation.min_gain = 1e9
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)]
    for n in range(3):
        owners.append(Owner(rig, rig.place([9, 8, n], namespace="x"), [9, 8, n], n))
    for last, token in enumerate([4, 5, 6, 7] * 3):
        if last == 11:
            speculation.min_gain = 1.0
            rig.tree.budget.capacity = rig.tree.budget.used + 8
        tokens = [token, 4, 5, last]
        rig.driver.drive([ticket := commit(owners, tokens, rig)])
        assert_committed(owners, tokens, ticket)
    assert len(owners[0].sequence.kept) == 3
    assert not rig.scheduler.counters.preempted


def test_drafts_without_free_slots_are_not_run(make: MakeRig) -> None:
    """The engine fails to free 8 slots, which the number of draft tokens does not consider."""
    engine = MemoryEngine()
    rig = make(engine)
    verify_always(rig.scheduler)
    speculation = rig.scheduler.queues.speculation
    assert speculation is not None
    speculation.min_gain = 1e9
    rig.drive(Extend(rig.place([9] * 8)))
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 3)

    def fail(_: object) -> None:
        raise Boom("free")

    engine.kv.free = fail  # type: ignore[assignment]
    rig.driver.exclusive(lambda: rig.tree.clear(rows=False))
    assert rig.tree.budget.lost == 8
    rig.tree.budget.capacity = rig.tree.budget.used + 1
    speculation.min_gain = 1.0
    commit_all(owner, [4])
    assert not rig.scheduler.counters.drafted
    del engine.kv.free
    rig.tree.budget.capacity = None
    commit_all(owner, [5])
    assert rig.scheduler.counters.drafted


def test_commit_whose_constraint_allows_no_token_draws_none(make: MakeRig) -> None:
    rig = make()
    owners = [Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], n) for n in range(2)]
    ended = sampler()
    ended.matcher = Parity(end=0)
    items = Commit([owner.sequence for owner in owners], [4, 5], [ended, owners[1].sampler])
    ((first, second),) = rig.drive(items)
    assert first.drawn is None
    assert (
        rig.scheduler.logits_cache.read(first.row).tolist() == logits_after([1, 2, 3, 4]).tolist()
    )
    assert second.drawn[0] == int(draw_after([1, 2, 3, 5], owners[1].sampler).ids[0])


class LinearSteps(FreeSteps):
    def estimate(self, n_tokens: int) -> float:
        return 1 + 0.1 * (n_tokens - 1)


def rig_with_costly_drafts(make: MakeRig) -> Rig:
    """Return a rig in which each draft token costs a tenth of a step."""
    rig = make(n_ctx=400)
    verify_always(rig.scheduler)
    speculation = rig.scheduler.queues.speculation
    assert speculation is not None
    speculation.costs, speculation.min_gain = LinearSteps(), MIN_GAIN
    return rig


def test_forced_drafts_end_by_themselves_if_commits_run_other_tokens(make: MakeRig) -> None:
    """As if the branch had accepted tokens ahead of its commits."""
    rig = rig_with_costly_drafts(make)
    owner, n_drafted = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0), [0]
    forcing = sampler()
    forcing.matcher = Parity(forces=6)
    for _ in range(2):
        for _ in range(60):
            rig.drive(Commit([owner.sequence], [9], [forcing]))
        n_drafted.append(rig.scheduler.counters.drafted)
    assert n_drafted[1]
    assert n_drafted[2] - n_drafted[1] < 30  # of 360


def test_drafts_evict_no_logits_of_their_commit(make: MakeRig) -> None:
    rig = make(row_cache_bytes=8 * 4 * N_VOCAB)
    verify_always(rig.scheduler)
    owner = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0)
    commit_all(owner, [4, 5, 6, 7] * 3)  # reads the logits after each commit
    assert rig.scheduler.counters.draft_accepted
    assert len(owner.sequence.kept) < 4


def test_drafts_end_by_themselves_if_branches_fork_before_they_use_them(make: MakeRig) -> None:
    rig = rig_with_costly_drafts(make)
    owner, n_drafted = Owner(rig, rig.place([1, 2, 3]), [1, 2, 3], 0), [0]
    for _ in range(2):
        for _ in range(50):
            commit_all(owner, [4, 5])
            place = rig.scheduler.sequences.release(owner.sequence)
            owner.sequence = rig.scheduler.sequences.create(owner, place)
        n_drafted.append(rig.scheduler.counters.drafted)
    assert n_drafted[1]
    assert n_drafted[2] - n_drafted[1] < 12
