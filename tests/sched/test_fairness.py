"""Nobody waits for all of what somebody else has brought."""

from __future__ import annotations

from rig import MakeRig, MemoryEngine, assert_result, run
from weft.sched.work import Extend, Logits

LONG = [at % 16 for at in range(400)]


def test_a_short_path_does_not_wait_for_all_of_a_long_one(make: MakeRig) -> None:
    rig = make(n_batch=16, n_ctx=512)
    (long,) = rig.submit(Extend(rig.place(LONG), (), (Logits(400),)))
    rig.step()
    (short,) = rig.submit(Extend(rig.place([3] * 20), (), (Logits(20),)))
    assert rig.scheduler.n_queued == 1
    rig.step(4)
    assert short.done
    assert not long.done
    rig.driver.drive([long])


def test_a_long_path_is_read_however_many_short_ones_come(make: MakeRig) -> None:
    rig = make(n_batch=16, n_ctx=512)
    (long,) = rig.submit(Extend(rig.place(LONG), (), (Logits(400),)))
    for step in range(60):
        for at in range(4):
            rig.submit(Extend(rig.place([at, step % 16, step // 16] * 4), (), (Logits(12),)))
        rig.step()
    assert long.done


def test_while_runs_are_live_a_step_reads_a_quarter_of_a_batch(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=16, n_ctx=512)
    live = run(rig.place([1, 2, 3]), max_tokens=200)
    (ticket,) = rig.submit(live)
    rig.step(3)
    before = len(engine.sizes)
    (long,) = rig.submit(Extend(rig.place(LONG), (), (Logits(400),)))
    rig.driver.drive([ticket, long])
    assert max(engine.sizes[before : before + 90]) <= 1 + 16 // 4
    assert_result(rig, live, ticket.result())


def test_a_step_that_does_for_all_takes_the_oldest_first(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=16)
    tickets = rig.submit(*(Extend(rig.place([at] * 4), (), (Logits(4),)) for at in range(4)))
    rig.step()
    assert engine.sizes == [16]
    assert all(ticket.done for ticket in tickets)
