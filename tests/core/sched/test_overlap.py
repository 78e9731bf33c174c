"""Steps that are launched before the one before has landed: who rides them, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fakes import LateFake, LateOutput, Wrapped
from rig import (
    MakeRig,
    MemoryEngine,
    Parity,
    assert_result,
    constrained,
    logits_after,
    mixed,
    run,
)
from weft._core.kv.tree import GROWING_STEPS
from weft._core.sampling.sampler import DrawBatch
from weft._core.sched.work import Commit, Extend, FinishReason, Logits, RunResult, RunState
from weft.constraints.grammar import Masks
from weft.engines.base import Engine, Output, Row
from weft.errors import DeadEnd


class Noting(Wrapped):
    """Appends to `log` at each forward and each draw."""

    def __init__(self, inner: Engine, log: list[str]) -> None:
        super().__init__(inner)
        self.log = log

    def forward(self, rows: Sequence[Row]) -> Output:
        self.log.append("forward")
        output = self.inner.forward(rows)
        real = output.draw

        class LoggingOutput(type(output)):  # type: ignore[misc]
            def draw(self, batch: DrawBatch) -> Any:
                log.append("draw")
                return real(batch)

        log = self.log
        output.__class__ = LoggingOutput
        return output


def test_all_rows_of_a_mixed_batch_run_in_each_step(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    items = mixed(rig)
    rig.drive(*items)
    sizes = [len(rows) for rows in engine.calls[1:]]  # the first reads the prompt
    assert sizes == [8] * 19
    assert engine.n_overlapped >= 18


@pytest.mark.parametrize("forces", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("n_tokens", [4, 9, 20])
def test_mixed_batch_gives_the_same_results_with_and_without_overlap(
    make: MakeRig, forces: int, n_tokens: int
) -> None:
    texts: list[list[RunResult]] = []
    for engine in (LateFake(MemoryEngine()), MemoryEngine()):
        rig = make(engine)
        items = mixed(rig, n_tokens, forces)
        texts.append(rig.drive(*items))
        for item, result in zip(items[:6], texts[-1][:6], strict=True):
            assert_result(rig, item, result)
    for one, two in zip(*texts, strict=True):
        assert (one.tokens, one.finish_reason) == (two.tokens, two.finish_reason)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-6)


def test_long_forced_texts_run_in_one_row_with_overlap_too(make: MakeRig) -> None:
    """Of every 8 tokens 6 are forced, 5 of which run behind the first one."""
    inner = MemoryEngine()
    rig = make(LateFake(inner))
    (result,) = rig.drive(constrained(rig.place([1]), 0, Parity(6), max_tokens=40))
    assert [t for i, t in enumerate(result.tokens) if i % 8 < 6] == [0, 1, 2, 3, 4, 5] * 5
    sizes = inner.sizes[1:]
    assert max(sizes) == 6
    assert sum(sizes) < 44  # the last token is not run, and no row was run for nothing
    assert len(sizes) < 22


@pytest.mark.parametrize("late", [False, True])
def test_masks_are_started_before_or_during_the_forward(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The mask runs during the forward: with overlap, the forward still runs at the draw."""
    log: list[str] = []
    start = Masks.start

    def noting(self: Masks, *given: Any) -> None:
        log.append("start")
        start(self, *given)

    monkeypatch.setattr(Masks, "start", noting)
    rig = make(Noting(LateFake(MemoryEngine()) if late else MemoryEngine(), log))
    rig.drive(constrained(rig.place([1]), 0, Parity(), max_tokens=6))
    turn = ["forward", "start", "draw"] if late else ["start", "forward", "draw"]
    assert log == ["start", "forward", "draw", *turn * 5]  # the first draw is the prefill's own


def test_run_that_has_ended_does_not_draw_another_token(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is in flight when its last token lands; the draw of that step is for the others."""

    def sink(state: RunState) -> FinishReason | None:
        return "stop" if len(state.tokens) == 4 else None

    drawn: list[int] = []
    draw = LateOutput.draw

    def counting(self: LateOutput, batch: DrawBatch) -> Any:
        drawn.append(len(batch.rows))
        return draw(self, batch)

    monkeypatch.setattr(LateOutput, "draw", counting)
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    place = rig.place([1, 2])
    items = [run(place, 0, max_tokens=9, sink=sink), run(place, 1, max_tokens=9)]
    one, two = rig.drive(*items)
    assert len(one.tokens) == 4
    assert_result(rig, items[1], two)
    rows = [len(rows) for rows in engine.calls[1:]]
    assert rows == [2, 2, 2, 2, 1, 1, 1, 1]
    assert drawn[-8:] == [2, 2, 2, 1, 1, 1, 1, 1]


def test_dead_end_under_overlap_fails_its_run_alone(make: MakeRig) -> None:
    rig = make(LateFake(MemoryEngine()))
    place = rig.place([1, 2])
    dead = constrained(place, 0, Parity(end=4), max_tokens=9)
    other = run(place, 1, max_tokens=9)
    first, second = rig.drive_quietly(dead, other)
    assert isinstance(first.error, DeadEnd)
    assert_result(rig, other, second.result())


def test_bias_forbids_no_forced_token_with_overlap_too(make: MakeRig) -> None:
    texts = []
    for engine in (LateFake(MemoryEngine()), MemoryEngine()):
        rig = make(engine)
        bias = {1: float("-inf"), 9: 3.0}
        item = constrained(rig.place([1]), 0, Parity(2), max_tokens=20, logit_bias=bias)
        texts.append(rig.drive(item)[0].tokens)
    assert texts[0] == texts[1]
    assert texts[0][9] == 1


@pytest.mark.parametrize("late", [False, True])
def test_nodes_committed_during_a_live_run_are_joined(make: MakeRig, late: bool) -> None:
    """200 nodes of a token each become a few, though a step is in flight all the time."""
    engine = LateFake(MemoryEngine()) if late else MemoryEngine()
    rig = make(engine, n_ctx=2000, n_batch=64)
    live = run(rig.place([1, 2, 3]), max_tokens=1500)
    (ticket,) = rig.submit(live)
    rig.step(3)
    n_before, ids = rig.tree.n_nodes, [5, 6, 7]
    place = rig.place(ids)
    for number in range(200):
        sequence = rig.scheduler.sequences.create(rig, place)
        ids.append(number % 16)
        (done,) = rig.driver.submit([Commit([sequence], [ids[-1]], [None])])
        while not done.done:
            rig.step()
        place = rig.scheduler.sequences.release(sequence)
    rig.step()
    assert not ticket.done
    assert rig.tree.n_nodes - n_before < 12
    assert rig.scheduler.queues.to_join == []
    rig.tree.check()
    assert np.array_equal(rig.ask(ids, Logits(100))[0], logits_after(ids[:100]))
    ticket.cancel()
    rig.driver.drive([ticket])


def test_chain_read_by_a_live_run_is_joined_after_the_run(make: MakeRig) -> None:
    """It hangs at its end, so every step in flight reads the chain."""
    rig = make(LateFake(MemoryEngine()), n_ctx=200)
    place, ids = rig.place([1]), [1]
    rig.drive(Extend(place))
    for token in range(2, 14):
        # A second branch everywhere, so that nothing grows in place.
        rig.drive(Extend(rig.place([15], after=place)), Extend(rig.place([token], after=place)))
        place = rig.place([token], after=place)
        ids.append(token)
    (ticket,) = rig.submit(run(place, max_tokens=40))
    rig.step(4)
    n_nodes = rig.tree.n_nodes
    rig.tree.clear()  # the other branches go, the chain stays
    rig.scheduler.queues.to_join.append(rig.tree.hold(rig.tree.match(ids[:-1])))
    rig.step(3)
    assert rig.tree.n_nodes == n_nodes - 12
    assert len(rig.scheduler.queues.to_join) == 1
    rig.driver.drive([ticket])
    assert rig.tree.n_nodes < 5
    rig.tree.check()


def test_leaf_returns_its_spare_slots_during_a_live_run(make: MakeRig) -> None:
    rig = make(LateFake(MemoryEngine()), n_ctx=200)
    (ticket,) = rig.submit(run(rig.place([1, 2]), max_tokens=100))
    rig.step(3)
    place = rig.place([5])
    for token in range(6, 10):
        (done,) = rig.submit(Extend(place))
        while not done.done:
            rig.step()
        place = rig.place([token], after=place)
    assert rig.tree.growing
    rig.step(2 * GROWING_STEPS)
    assert not ticket.done
    assert not rig.tree.growing
    ticket.cancel()
    rig.driver.drive([ticket])


@pytest.mark.parametrize("n", [2, 4, 8])
def test_run_waits_for_the_writer_of_the_place_where_it_starts(make: MakeRig, n: int) -> None:
    """It is live, and older ones leave it no row; what grows where it begins comes between."""
    rig = make(LateFake(MemoryEngine()), n_batch=2)
    paths = [[1, 2, 3], [8, 8, 8]]
    rig.drive(*(Extend(rig.place(ids)) for ids in paths))
    items = [run(rig.place(ids), i, max_tokens=n) for i, ids in enumerate(paths)]
    tickets = rig.submit(*items, Extend(rig.place([8, 8, 8]), tuple([6] * 12), (Logits(15),)))
    rig.driver.drive(tickets)
    for item, ticket in zip(items, tickets[:2], strict=True):
        assert_result(rig, item, ticket.result())
    want = logits_after([8, 8, 8, *[6] * 12])
    assert tickets[2].result()[0].tolist() == want.tolist()
