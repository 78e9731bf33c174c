"""No request waits for all the work of another caller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes import LateFake, SequenceFake
from rig import MakeRig, MemoryEngine, assert_result, run
from weft._core.sched.work import Extend, Logits
from weft.engines.base import Engine
from weft.errors import ConfigError

LONG = [at % 16 for at in range(400)]


def test_short_path_does_not_wait_for_all_of_a_long_one(make: MakeRig) -> None:
    rig = make(n_batch=16, n_ctx=512)
    (long,) = rig.submit(Extend(rig.place(LONG), (), (Logits(400),)))
    rig.step()
    (short,) = rig.submit(Extend(rig.place([3] * 20), (), (Logits(20),)))
    assert rig.scheduler.n_queued == 1
    rig.step(4)
    assert short.done
    assert not long.done
    rig.driver.drive([long])


def test_long_path_is_computed_while_short_ones_keep_arriving(make: MakeRig) -> None:
    rig = make(n_batch=16, n_ctx=512)
    (long,) = rig.submit(Extend(rig.place(LONG), (), (Logits(400),)))
    for step in range(60):
        for at in range(4):
            rig.submit(Extend(rig.place([at, step % 16, step // 16] * 4), (), (Logits(12),)))
        rig.step()
    assert long.done


def test_step_with_live_runs_prefills_a_quarter_of_a_batch(make: MakeRig) -> None:
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


@pytest.mark.parametrize(("n_waiting", "n_prefill"), [(1, 4), (2, 8), (3, 12), (8, 15)])
def test_step_with_more_waiting_than_live_runs_prefills_a_quarter_for_each(
    make: MakeRig, n_waiting: int, n_prefill: int
) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=16, n_ctx=512)
    rig.submit(run(rig.place([1, 2, 3]), max_tokens=200))
    rig.step(3)
    before = len(engine.sizes)
    rig.submit(*(Extend(rig.place([at] * 16), (), (Logits(16),)) for at in range(n_waiting)))
    rig.step()
    assert engine.sizes[before:] == [1 + n_prefill]


@pytest.mark.parametrize("n_tokens", [15, 16, 17, 32, 50])
def test_runs_of_one_prompt_start_together_at_any_prompt_length(
    make: MakeRig, n_tokens: int
) -> None:
    """A prompt that fills a step counts once: no run starts a step after the others."""
    engine = MemoryEngine()
    rig = make(engine, n_batch=16)
    place = rig.place(LONG[:n_tokens])
    items = [run(place, stream, max_tokens=4) for stream in range(6)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    n_steps, rest = divmod(n_tokens, 16)
    assert engine.sizes == [16] * n_steps + [rest] * bool(rest) + [6] * 3


def test_step_with_room_for_four_prompts_answers_all_four(make: MakeRig) -> None:
    engine = MemoryEngine()
    rig = make(engine, n_batch=16)
    tickets = rig.submit(*(Extend(rig.place([at] * 4), (), (Logits(4),)) for at in range(4)))
    rig.step()
    assert engine.sizes == [16]
    assert all(ticket.done for ticket in tickets)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [2048, 700, None])
def test_512_runs_share_each_step_of_an_engine_that_takes_so_many(
    make: MakeRig, late: bool, max_num_batched_tokens: int | None
) -> None:
    """While a book is read. Without `max_num_batched_tokens` 384 run at a time."""
    inner = MemoryEngine()
    engine: Engine = LateFake(inner) if late else inner
    engine.info = replace(engine.info, max_num_batched_tokens=max_num_batched_tokens, device="cuda")
    rig = make(engine, n_batch=512, n_ctx=8192)
    items = [run(rig.place([1, 2, 3]), i, max_tokens=7) for i in range(512)]
    tickets = rig.submit(*items)
    rig.step(2 if late else 1)  # the prompt
    assert inner.sizes == [3]
    (book,) = rig.submit(Extend(rig.place([at % 16 for at in range(6000)]), (), (Logits(6000),)))
    rig.driver.drive(tickets)
    if max_num_batched_tokens is None:
        assert set(inner.sizes[1:7]) <= {384, 512}
        assert len(inner.sizes) > 8
    else:
        n_prefill = min(512, max_num_batched_tokens - 512)
        # A chunk of the book goes on where the one before has landed: late, each second step.
        assert inner.sizes[1:7:2] == [512 + n_prefill] * 3
        assert inner.sizes[2:7:2] == [512 + (0 if late else n_prefill)] * 3
    for item, ticket in list(zip(items, tickets, strict=True))[::50]:
        assert_result(rig, item, ticket.result())
    rig.driver.drive([book])


def test_step_with_room_for_fewer_runs_takes_the_oldest(make: MakeRig) -> None:
    engine = MemoryEngine()
    engine.info = replace(engine.info, max_num_batched_tokens=12)
    rig = make(engine, n_batch=4)
    items = [run(rig.place([1, 2, 3]), i, max_tokens=5) for i in range(20)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert engine.sizes[1:] == [12] * 4 + [8] * 4


def test_max_num_batched_tokens_of_zero_raises() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens is 0; allowed are None and 1 or more"
    ):
        replace(SequenceFake(MemoryEngine()).info, max_num_batched_tokens=0)
