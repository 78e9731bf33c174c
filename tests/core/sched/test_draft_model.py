"""A draft model draws as many tokens as the acceptance and the costs of steps make worthwhile.

Both engines have the same rule, so that every draft token is accepted.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rig import FreeSteps, MakeRig, Rig, assert_result, run, sampler
from weft._core.sched import draft_model as draft_model_module
from weft._core.sched.draft_model import MAX_DRAFT, DraftModel, ModelDrafts
from weft._core.sched.ngrams import Acceptance
from weft._core.sched.speculation import MAX_RUNS
from weft._core.sched.work import Run


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft model's steps take no time."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(draft_model_module, "time", clock)


class Linear(FreeSteps):
    """Steps that cost more by `slope` for each token after the first."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def estimate(self, n_tokens: int) -> float:
        return 1 + self.slope * (n_tokens - 1)


def with_draft_model(make: MakeRig, *, slope: float = 0.01, **options: int) -> tuple[Rig, Rig]:
    """Return a rig, and the rig of its draft model."""
    large, small = make(**options), make()
    large.scheduler.speculate(model=DraftModel(small.driver))
    speculation = large.scheduler.queues.speculation
    assert speculation is not None
    speculation.costs, speculation.min_gain = Linear(slope), 1.0
    return large, small


def n_drafted_by_step(rig: Rig, item: Run) -> list[int]:
    """Drive a run; return how many draft tokens each step after the prompt's verified.

    The first of them verifies none: it creates the KV that draft tokens are added to.
    """
    (ticket,), n_drafted = rig.submit(item), [0]
    while not ticket.done:
        rig.step()
        n_drafted.append(rig.scheduler.counters.drafted)
    assert_result(rig, item, ticket.result())
    return [n - before for before, n in zip(n_drafted[1:], n_drafted[2:], strict=False)]


def test_accepted_drafts_raise_the_number_of_draft_tokens_to_the_maximum(make: MakeRig) -> None:
    large, small = with_draft_model(make)
    n_drafted = n_drafted_by_step(large, run(large.place([1, 2, 3]), max_tokens=22))
    assert n_drafted == [0, 1, MAX_DRAFT, MAX_DRAFT]
    assert large.scheduler.counters.draft_accepted == sum(n_drafted)
    assert small.scheduler.counters.decoded == sum(n_drafted)


def test_costly_tokens_of_a_step_leave_no_drafts(make: MakeRig) -> None:
    large, small = with_draft_model(make, slope=1)
    assert n_drafted_by_step(large, run(large.place([1, 2, 3]), max_tokens=6)) == [0] * 5
    assert not small.scheduler.counters.steps


def test_last_token_of_a_run_is_not_drafted(make: MakeRig) -> None:
    """Verification draws it after the last draft token."""
    large, small = with_draft_model(make)
    assert n_drafted_by_step(large, run(large.place([1, 2, 3]), max_tokens=3)) == [0, 0]
    assert n_drafted_by_step(large, run(large.place([4, 5, 6]), max_tokens=4)) == [0, 1]
    assert small.scheduler.counters.decoded == 1


def test_drafts_that_a_step_has_no_room_for_are_verified_by_the_next_step(make: MakeRig) -> None:
    large, small = with_draft_model(make, n_batch=4)
    n_drafted = n_drafted_by_step(large, run(large.place([1, 2, 3]), max_tokens=15))
    assert n_drafted == [0, 1, 3, 3, 2]
    assert small.scheduler.counters.decoded == 1 + MAX_DRAFT + 2  # none is drawn twice


def test_more_runs_than_the_maximum_step_without_drafts(make: MakeRig) -> None:
    large, small = with_draft_model(make, n_batch=64)
    items = [run(large.place([1, 2, 3]), index, max_tokens=4) for index in range(MAX_RUNS + 1)]
    for item, result in zip(items, large.drive(*items), strict=True):
        assert_result(large, item, result)
    assert not small.scheduler.counters.steps


def test_nothing_is_drafted_before_a_step_was_measured(make: MakeRig) -> None:
    large, small = with_draft_model(make)
    large.scheduler.speculate(model=DraftModel(small.driver))  # costs of real steps
    item = Run(large.place([1, 2, 3]), sampler(), max_tokens=2)
    assert_result(large, item, large.drive(item)[0])
    assert not small.scheduler.counters.steps


def test_forced_token_does_not_count_as_an_accepted_draft_of_the_model() -> None:
    drafts = ModelDrafts(Acceptance())
    before = drafts.chances([False, False])
    drafts.replace([4, 5])
    drafts.push(4, is_forced=True)
    assert drafts.draft(2) == [5]
    assert drafts.chances([False, False]) == before
    drafts.push(5)
    assert drafts.chances([False, False]) > before
