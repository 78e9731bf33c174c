from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from fakes import Boom, LateFake
from rig import MakeRig, MemoryEngine, logits_after
from weft._core.sched.work import Extend, Logits, Ticket
from weft.errors import Cancelled


@pytest.fixture
def ticket(make: MakeRig) -> Ticket:
    return Ticket(Extend(make().place([1])), deque())


def test_result_of_open_work_raises(ticket: Ticket) -> None:
    with pytest.raises(Cancelled, match="not done yet"):
        ticket.result()


def test_second_answer_of_a_ticket_is_ignored(ticket: Ticket) -> None:
    ticket.resolve(7)
    ticket.resolve(error=Boom("late"))
    assert ticket.result() == 7


def test_callback_added_before_or_after_the_answer_runs_once(ticket: Ticket) -> None:
    heard: list[tuple[str, object]] = []
    ticket.on_done(lambda done: heard.append(("before", done.value)))
    assert heard == []
    ticket.resolve(7)
    ticket.on_done(lambda done: heard.append(("after", done.value)))
    assert heard == [("before", 7), ("after", 7)]


def test_second_cancellation_of_a_ticket_is_ignored(ticket: Ticket) -> None:
    ticket.cancel("interrupted")
    ticket.cancel("cancelled")
    assert (ticket.cancel_reason, len(ticket._inbox)) == ("interrupted", 1)
    done = Ticket(ticket.item, deque())
    done.resolve()
    done.cancel()
    assert not done.cancelled
    assert not done._inbox


def test_pinned_logits_stay_on_the_device_until_they_are_read(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    (row,) = rig.ask([1, 2, 3], Logits(3, pinned=True))
    rig.driver.exclusive(rig.scheduler.clear)
    assert engine.n_fetched == 0
    np.testing.assert_array_equal(row.logits(), logits_after([1, 2, 3]))
    assert engine.n_fetched == 1
