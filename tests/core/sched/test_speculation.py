"""Draft tokens: the same tokens as without, no slots left, and drafts only where they pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fakes import BrokenEngine, LateFake, SequenceFake
from rig import (
    N_VOCAB,
    FreeSteps,
    MakeRig,
    MemoryEngine,
    Parity,
    Rig,
    Untrimmable,
    assert_result,
    constrained,
    mixed,
    run,
    sampler,
    text_after,
    verify_always,
)
from weft._core.sampling.sampler import Sampler
from weft._core.sched.batch import VerifyPart
from weft._core.sched.ngrams import (
    CONTEXT,
    LONG,
    MAX_TOKENS,
    SHORT,
    Acceptance,
    NGramIndex,
    RunLookup,
)
from weft._core.sched.speculation import MAX_TOKENS as MAX_STEP
from weft._core.sched.speculation import MIN_GAIN, Draft, StepCosts, advanced_samplers, forced_in
from weft._core.sched.work import FinishReason, RunResult, RunState
from weft.engines.base import Engine
from weft.errors import ConstraintError, ForwardError

ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": MemoryEngine,
    "sequence": lambda: SequenceFake(MemoryEngine(), 8),
    "late": lambda: LateFake(MemoryEngine()),
}


def with_drafts(rig: Rig) -> Rig:
    verify_always(rig.scheduler)
    return rig


@pytest.mark.parametrize("engine", ENGINES)
def test_repeated_run_verifies_drafts_and_gives_the_rules_tokens(
    make: MakeRig, engine: str
) -> None:
    rig = with_drafts(make(ENGINES[engine]()))
    item = run(rig.place([1, 2, 3, 4, 5]), max_tokens=30)
    rig.drive(item)
    steps = rig.scheduler.counters.steps
    repeated = run(rig.place([1, 2, 3, 4, 5]), max_tokens=30)
    (result,) = rig.drive(repeated)
    assert_result(rig, repeated, result)
    counters = rig.scheduler.counters
    assert counters.draft_accepted > 15
    assert counters.steps - steps < 20


@pytest.mark.parametrize("forces", [0, 1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_mixed_batch_gives_the_same_results_with_and_without_drafts(
    make: MakeRig, engine: str, forces: int
) -> None:
    """Plain, penalised and constrained runs, whose first tokens are in the tree as drafts."""
    texts: list[list[RunResult]] = []
    for drafts in (False, True):
        rig = make(ENGINES[engine]())
        if drafts:
            with_drafts(rig)
        rig.drive(*mixed(rig, 12, forces))
        texts.append(rig.drive(*mixed(rig, 20, forces)))
        assert bool(rig.scheduler.counters.draft_accepted) == drafts
    for one, two in zip(*texts, strict=True):
        assert (one.tokens, one.finish_reason) == (two.tokens, two.finish_reason)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-6)
        np.testing.assert_allclose(one.entropies, two.entropies, atol=1e-6)
        np.testing.assert_allclose(one.legal_logmass, two.legal_logmass, atol=1e-6)


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_runs_with_drafts_give_the_rules_tokens_and_leave_no_slots(
    engine: str, capacity: int | None, seed: int
) -> None:
    rig = with_drafts(Rig(ENGINES[engine](), capacity=capacity, n_ctx=30, n_batch=8))
    choose = random.Random(seed)
    for _ in range(6):
        items = []
        for _ in range(choose.randrange(1, 4)):
            ids = [choose.randrange(3) for _ in range(choose.randrange(1, 8))]
            stops = frozenset(choose.sample(range(N_VOCAB), choose.randrange(3)))
            options: dict[str, Any] = choose.choice(
                [
                    {"temperature": 0},
                    {"temperature": 0.2},
                    {"temperature": 0.1, "presence_penalty": 0.3, "repetition_penalty": 1.1},
                    {"temperature": 0.3, "top_p": 0.5},
                ]
            )
            options["max_tokens"] = choose.randrange(1, 16)
            items.append(run(rig.place(ids), choose.randrange(2), stop_ids=stops, **options))
        for item, result in zip(items, rig.drive(*items), strict=True):
            assert_result(rig, item, result)
        if rig.scheduler.in_flight is None:
            rig.tree.check()
    assert rig.scheduler.counters.drafted
    rig.finish()


def test_sink_that_ends_a_run_inside_a_draft_keeps_no_later_token(make: MakeRig) -> None:
    rig = with_drafts(make())

    def sink(state: RunState) -> FinishReason | None:
        return "stop" if len(state.tokens) == 9 else None

    place = rig.place([1, 2, 3])
    rig.drive(run(place, max_tokens=20))
    (result,) = rig.drive(run(place, max_tokens=20, sink=sink))
    assert result.tokens == text_after([1, 2, 3], run(place, max_tokens=20), rig.n_ctx)[0][:9]
    assert result.finish_reason == "stop"
    assert result.end.depth == 12
    rig.tree.check()


def test_end_token_after_accepted_drafts_ends_the_run(make: MakeRig) -> None:
    rig = with_drafts(make())
    place = rig.place([1, 2, 3])
    tokens, _ = text_after([1, 2, 3], run(place, max_tokens=20), rig.n_ctx)
    stop = next(t for n, t in enumerate(tokens) if n > 9 and t not in tokens[:n])
    rig.drive(run(place, max_tokens=20))
    item = run(place, max_tokens=20, stop_ids=frozenset({stop}))
    (result,) = rig.drive(item)
    assert (result.finish_reason, result.ended_by) == ("stop", stop)
    assert_result(rig, item, result)
    assert rig.scheduler.counters.draft_accepted


def test_draft_of_another_constraint_is_cut_where_its_own_forbids_it(make: MakeRig) -> None:
    rig = with_drafts(make())
    place = rig.place([1, 2, 3])
    rig.drive(run(place, max_tokens=20, temperature=0))
    item = constrained(place, 0, Parity(), max_tokens=20, temperature=0)
    (result,) = rig.drive(item)
    assert [token % 2 for token in result.tokens] == [n % 2 for n in range(20)]


def test_engine_that_cannot_trim_rejected_drafts_gives_the_same_tokens() -> None:
    rig = with_drafts(Rig(Untrimmable()))
    for index in range(3):
        item = run(rig.place([1, 2, 3]), index, max_tokens=20, temperature=0.4)
        (result,) = rig.drive(item)
        assert_result(rig, item, result)
    counters = rig.scheduler.counters
    assert counters.drafted > counters.draft_accepted
    assert counters.preempted


def test_failed_verify_step_fails_its_run_and_leaves_no_slots(make: MakeRig) -> None:
    engine = BrokenEngine(MemoryEngine(), set())
    rig = with_drafts(make(engine))
    place = rig.place([1, 2, 3])
    rig.drive(run(place, max_tokens=20))
    (ticket,) = rig.submit(run(place, max_tokens=20))
    while not rig.scheduler.counters.draft_accepted:
        rig.step()
    engine.fail_on = {len(engine.calls)}
    rig.driver.drive([ticket])
    assert isinstance(ticket.error, ForwardError)
    rig.tree.check()
    item = run(place, max_tokens=20)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)


def test_run_cancelled_while_its_drafts_are_in_flight_ends_before_them(make: MakeRig) -> None:
    rig = with_drafts(make(LateFake(MemoryEngine())))
    item = run(rig.place([1, 2, 3]), max_tokens=30)
    (complete,) = rig.drive(item)
    (ticket,) = rig.submit(run(rig.place([1, 2, 3]), max_tokens=30))
    while not (step := rig.scheduler.in_flight) or not any(
        isinstance(part, VerifyPart) for part in step.parts
    ):
        rig.step()
    (job,) = rig.scheduler.queues.running
    n_known = job.n_drawn
    ticket.cancel("interrupted")
    rig.driver.drive([ticket])
    result = ticket.result()
    assert (result.tokens, result.finish_reason) == (complete.tokens[:n_known], "interrupted")
    assert rig.scheduler.in_flight is None
    rig.tree.check()


class Limited(Parity):
    """Even and odd tokens in turn. It must end after `last` tokens, and fails after `broken`."""

    def __init__(self, *, last: int = 99, broken: int = 99, n_accepted: int = 0) -> None:
        super().__init__(n_accepted=n_accepted)
        self.last = last
        self.broken = broken

    def accept(self, token: int) -> None:
        if self.n_accepted == self.broken:
            raise ConstraintError("the constraint is broken")
        super().accept(token)

    @property
    def must_end(self) -> bool:  # type: ignore[override]
        return self.n_accepted >= self.last

    def clone(self) -> Limited:
        return Limited(last=self.last, broken=self.broken, n_accepted=self.n_accepted)


def test_constraint_that_fails_for_a_verified_token_fails_no_other_run(make: MakeRig) -> None:
    rig = with_drafts(make())
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    rig.drive(constrained(rig.place([1, 2, 3]), 0, Parity(), **options))
    n_drafted = rig.scheduler.counters.drafted
    broken = constrained(rig.place([1, 2, 3]), 0, Limited(broken=12), **options)
    sound = constrained(rig.place([1, 2, 3]), 0, Parity(), **options)
    failed, finished = rig.drive_quietly(broken, sound)
    with pytest.raises(ConstraintError, match="is broken"):
        failed.result()
    assert len(finished.result().tokens) == 20
    assert rig.scheduler.counters.drafted > n_drafted


# Which drafts, and when -----------------------------------------------------------------------


def lookup_after(ids: Sequence[int], index: NGramIndex | None = None) -> RunLookup:
    lookup = RunLookup(index or NGramIndex(), [], Acceptance())
    for token in ids:
        lookup.push(token)
    return lookup


def test_draft_continues_the_longest_earlier_match() -> None:
    index = NGramIndex()
    index.add_path([1, 2, 3, 4, 5, 6, 7, 8], 0)
    index.add_path([4, 5, 9, 9, 9], 0)
    assert lookup_after([1, 2, 3, 4, 5], index).draft(3) == [6, 7, 8]
    assert lookup_after([0, 4, 5], index).draft(3) == [9, 9, 9]
    assert lookup_after([3, 1], index).draft(3) == []


def test_draft_of_periodic_text_repeats_beyond_its_end() -> None:
    assert lookup_after([1, 2, 3, 1, 2]).draft(7) == [3, 1, 2, 3, 1, 2, 3]
    assert lookup_after([7, 7, 7]).draft(4) == [7, 7, 7, 7]


def test_index_forgets_the_oldest_tokens() -> None:
    index = NGramIndex()
    index.add_path([1, 2, 3], 0)
    for start in range(10, 3 * MAX_TOKENS, 100):
        index.add_path(list(range(start, start + 100)), 0)
    assert index.find([1, 2]) is None
    assert len(index._recent) + len(index._older) <= 2 * MAX_TOKENS


def test_acceptance_of_a_run_starts_at_that_of_the_lm() -> None:
    of_lm = Acceptance()
    for _ in range(50):
        of_lm.count(SHORT, True)
    of_run = Acceptance(of_lm)
    assert of_run.rate(SHORT) > 0.8
    for _ in range(50):
        of_run.count(SHORT, False)
    assert of_run.rate(SHORT) < 0.1
    assert Acceptance().rate(CONTEXT) > Acceptance().rate(LONG) > Acceptance().rate(SHORT)


def test_forced_token_does_not_count_as_accepted() -> None:
    acceptance = Acceptance()
    lookup = RunLookup(NGramIndex(), [1, 2, 3, 1, 2], acceptance)
    before = acceptance.rate(SHORT)
    for token in (3, 1, 2, 3, 1, 2):
        lookup.push(token, is_forced=True)
    assert lookup.draft(2) == [3, 1]
    assert acceptance.rate(SHORT) == before
    assert lookup.chances([True, True]) == [1.0, 1.0]


def test_match_of_forced_tokens_predicts_no_more_than_a_short_one() -> None:
    index = NGramIndex()
    index.add_path([1, 2, 3, 4, 5, 6, 7, 8], 0)
    drawn, forced = (RunLookup(index, [], Acceptance()) for _ in range(2))
    for token in (1, 2, 3, 4, 5, 6):
        drawn.push(token)
        forced.push(token, is_forced=token > 1)
    assert drawn.draft(2) == forced.draft(2) == [7, 8]
    assert drawn.chances([False])[0] == 0.5
    assert forced.chances([False]) == [Acceptance().rate(SHORT)]


@pytest.mark.parametrize(
    ("draft", "forced"),
    [
        ([5, 0, 1, 2, 3], [False, True, True, True, False, False]),
        ([5, 0, 1], [False, True, True, True]),
        ([5, 0, 4, 2], [False, True, True]),
        ([4, 0], [False]),
    ],
)
def test_tokens_of_a_draft_are_forced_where_the_constraint_allows_one(
    draft: list[int], forced: list[bool]
) -> None:
    """Of every 8 tokens the first 3 are forced. 7 tokens are known, so the draft starts before."""
    own = Sampler(sampler().params, sampler().stream, Parity(forces=3, n_accepted=7))
    assert forced_in(own, draft) == forced


@pytest.mark.parametrize(
    ("matcher", "draft", "tokens"),
    [
        (None, [2, 4, 5], [2, 4, 5]),
        (None, [2, 7, 4], [2]),  # 7 ends the text
        (Limited(), [2, 3, 4], [2, 3, 4]),
        (Limited(), [2, 4, 5], [2]),  # an odd token is due
        (Limited(last=2), [2, 3, 4], [2]),
        (Limited(broken=1), [2, 3, 4], [2]),
    ],
)
def test_draft_is_cut_before_a_token_that_ends_the_text_or_may_not_follow(
    matcher: Parity | None, draft: list[int], tokens: list[int]
) -> None:
    own = Sampler(sampler().params, sampler().stream, matcher)
    cut, samplers = advanced_samplers(own, draft, frozenset({7}))
    assert cut == tokens
    assert len(samplers) == len(tokens) + 1
    if matcher is not None:
        assert [one.matcher.n_accepted for one in samplers] == [*range(len(tokens) + 1)]


@pytest.mark.parametrize("matcher", [Limited(last=2), Limited(broken=1)])
def test_no_token_is_forced_after_the_end_or_failure_of_a_constraint(matcher: Parity) -> None:
    own = Sampler(sampler().params, sampler().stream, matcher)
    assert forced_in(own, [2, 3, 4, 5]) == [False, False]


class ConstrainedRun:
    """A run whose next token is drawn, followed by forced tokens 0, 1 and 2."""

    can_verify = True

    def __init__(self) -> None:
        self.sequence = object()
        self.sampler = Sampler(sampler().params, sampler().stream, Parity(3, n_accepted=7))
        self.drafts = lookup_after([5, 0, 1, 2, 3, 5, 0, 1, 2, 3])
        self.forced: list[int] = []

    def room(self, n_ctx: int) -> int:
        return n_ctx


@pytest.mark.parametrize(("budget", "n"), [(3, 0), (4, 4), (5, 5)])
def test_draft_includes_all_forced_tokens_after_a_drawn_one_or_none(
    make: MakeRig, budget: int, n: int
) -> None:
    rig = with_drafts(make())
    assert rig.scheduler.queues.speculation is not None
    one: Any = ConstrainedRun()
    plan = rig.scheduler.queues.speculation.plan([one], budget, 99)
    tokens, forced = [5, 0, 1, 2, 3], [False, True, True, True, False]
    assert plan == ({one.sequence: Draft(tokens[:n], forced[:n])} if n else {})


def test_step_larger_than_any_with_drafts_is_not_recorded() -> None:
    costs = StepCosts()
    costs.measure(MAX_STEP, 1.0)
    costs.measure(MAX_STEP + 1, 9.0)
    assert costs.is_known(MAX_STEP)
    assert not costs.is_known(MAX_STEP + 1)


def test_overlapped_run_does_not_wait_for_drafts_before_costs_are_known(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    rig.scheduler.speculate(lookup=True)
    item = run(rig.place([1, 2, 3, 1, 2, 3]), max_tokens=8)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    assert engine.n_overlapped


def test_overlapped_run_waits_for_drafts_of_which_only_several_pay(make: MakeRig) -> None:
    class Doubled(FreeSteps):
        def estimate(self, n_tokens: int) -> float:
            return 1.0 if n_tokens == 1 else 2.0

    rig = with_drafts(make(LateFake(MemoryEngine())))
    assert rig.scheduler.queues.speculation is not None
    rig.scheduler.queues.speculation.costs = Doubled()
    for _ in range(2):
        item = run(rig.place([1, 2, 3]), max_tokens=30)
        assert_result(rig, item, rig.drive(item)[0])
    assert rig.scheduler.counters.drafted


def test_costs_between_measured_sizes_are_interpolated() -> None:
    costs = StepCosts()
    costs.measure(1, 1.0)
    costs.measure(5, 1.4)
    assert costs.estimate(3) == pytest.approx(1.2, rel=0.01)
    assert costs.estimate(9) > costs.estimate(5)
    assert costs.is_known(5)
    assert not costs.is_known(3)


def test_slow_measurement_counts_less_than_a_fast_one() -> None:
    costs = StepCosts()
    for seconds in (1.0, 9.0, 1.0, 9.0):
        costs.measure(1, seconds)
    assert costs.estimate(1) < 1.2


@pytest.mark.parametrize(("slope", "pays"), [(0.01, True), (1.0, False)])
def test_drafts_are_verified_only_while_steps_of_more_tokens_are_cheap(
    make: MakeRig, slope: float, pays: bool
) -> None:
    class Linear(FreeSteps):
        def estimate(self, n_tokens: int) -> float:
            return 1 + slope * (n_tokens - 1)

    rig = with_drafts(make())
    assert rig.scheduler.queues.speculation is not None
    rig.scheduler.queues.speculation.costs = Linear()
    for _ in range(3):
        rig.drive(run(rig.place([1, 2, 3]), max_tokens=30))
    assert bool(rig.scheduler.counters.drafted) == pays


def test_rejected_drafts_end_by_themselves(make: MakeRig) -> None:
    """Text at random: two tokens recur, what follows them does not."""

    class Linear(FreeSteps):
        def estimate(self, n_tokens: int) -> float:
            return 1 + 0.1 * (n_tokens - 1)

    rig = with_drafts(make(n_ctx=500))
    assert rig.scheduler.queues.speculation is not None
    rig.scheduler.queues.speculation.costs = Linear()
    rig.scheduler.queues.speculation.min_gain = MIN_GAIN
    rig.drive(run(rig.place([1, 2, 3]), max_tokens=400, temperature=3))
    assert rig.scheduler.counters.drafted < 40
