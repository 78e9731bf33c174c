"""Looms grown under a lease: by one server at a time, never by a previous owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

import weft
from weft.errors import LeaseLost, QueueFull
from weft.loom import Heddle
from weft.service.store.leases import LoomLeases
from weft.service.store.library import Library
from weft.service.store.stored_loom import StoredLoom
from weft.service.store.tables import leases

LEASE_S = 60.0


@pytest.fixture
def one(url: str) -> Iterator[Library]:
    with Library(url, lease_s=LEASE_S) as opened:
        yield opened


@pytest.fixture
def other(url: str) -> Iterator[Library]:
    with Library(url, lease_s=LEASE_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as loaded:
        yield loaded


class Growth:
    """A node that grows in a stored loom, token by token."""

    def __init__(self, kept: StoredLoom) -> None:
        self.kept = kept
        self.deltas = kept.loom.stream(n=1, max_tokens=40, seed=1)
        self.node: Heddle = next(self.deltas).node

    def on(self, n: int = 3) -> None:
        """Grow some tokens, and keep them."""
        for _ in range(n):
            next(self.deltas)
        self.kept.append([self.node])

    def to_end(self) -> None:
        for _ in self.deltas:
            pass
        self.kept.commit("grow")


def left_s(library: Library, kept: StoredLoom) -> float:
    lease = LoomLeases(library.database).holder(kept.id)
    return 0.0 if lease is None else lease.left_s


def let_pass(library: Library, seconds: float) -> None:
    """Let this time pass for all leases."""
    aged = sa.update(leases).values(expires=leases.c.expires - seconds)
    library.database.write(lambda connection: connection.execute(aged))


def texts(library: Library, name: str) -> list[tuple[str, str | None]]:
    kept = library.open(name)
    return [(node.text, node.finish_reason) for node in kept.loom.walk()][1:]


def test_second_server_growing_a_loom_raises_queue_full(
    one: Library, other: Library, lm: weft.LM
) -> None:
    first = one.create(weft.Loom(lm, "Once"), name="a")
    second = other.open("a", lm)
    growing = Growth(first)
    growing.on()
    rival = Growth(second)
    with pytest.raises(QueueFull, match="another server") as refused:
        rival.on()
    assert 0 < refused.value.retry_after_s <= LEASE_S
    growing.to_end()  # which gives it back
    rival.on()
    rival.to_end()
    assert len(texts(one, "a")) == 2
    assert left_s(one, first) == 0


def test_reading_and_editing_without_lease(one: Library, other: Library, lm: weft.LM) -> None:
    first = one.create(weft.Loom(lm, "Once"), name="a")
    second = other.open("a", lm)
    Growth(first).on()
    second.loom.add("written")
    second.commit("write")
    assert [text for text, _ in texts(other, "a")] == ["written"]


def test_lease_is_renewed_while_tokens_arrive(one: Library, lm: weft.LM) -> None:
    kept = one.create(weft.Loom(lm, "Once"), name="a")
    growing = Growth(kept)
    growing.on()
    let_pass(one, LEASE_S / 2)
    assert 0 < left_s(one, kept) <= LEASE_S / 2
    growing.on(1)
    assert LEASE_S / 2 < left_s(one, kept) <= LEASE_S
    growing.to_end()


def test_owner_of_lost_lease_cannot_write(one: Library, other: Library, lm: weft.LM) -> None:
    slow = one.create(weft.Loom(lm, "Once"), name="a")
    growing = Growth(slow)
    growing.on()
    text = growing.node.text
    let_pass(one, LEASE_S)
    taken = other.open("a", lm)
    heir = Growth(taken)
    heir.on()
    taken.sync()
    (interrupted,) = taken.loom.children
    assert interrupted.finish_reason == "interrupted"
    assert interrupted.text == text
    growing.deltas.close()  # more tokens have come, and an end
    with pytest.raises(LeaseLost, match="taken over"):
        slow.append([growing.node])
    with pytest.raises(LeaseLost, match="taken over"):
        slow.commit("grow")
    slow.close()
    heir.to_end()
    assert (text, "interrupted") in texts(other, "a")
    assert len(texts(other, "a")) == 2


def test_new_lease_does_not_revive_lost_nodes(one: Library, other: Library, lm: weft.LM) -> None:
    slow = one.create(weft.Loom(lm, "Once"), name="a")
    growing = Growth(slow)
    growing.on()
    let_pass(one, LEASE_S)
    heir = Growth(other.open("a", lm))
    heir.on()
    heir.to_end()
    renewed = Growth(one.open("a", lm))  # the same server as the slow one, a new term
    renewed.on()
    growing.deltas.close()
    with pytest.raises(LeaseLost, match="taken over"):
        slow.append([growing.node])
    renewed.to_end()
    assert [reason for _, reason in texts(other, "a")].count("interrupted") == 1


def test_expired_lease_is_renewed_if_not_taken(one: Library, other: Library, lm: weft.LM) -> None:
    growing = Growth(one.create(weft.Loom(lm, "Once"), name="a"))
    growing.on()
    let_pass(one, LEASE_S)
    growing.on()
    with pytest.raises(QueueFull):
        Growth(other.open("a", lm)).on()
    growing.to_end()


def test_close_releases_the_lease(one: Library, other: Library, lm: weft.LM) -> None:
    first = one.create(weft.Loom(lm, "Once"), name="a")
    growing = Growth(first)
    growing.on()
    growing.deltas.close()
    first.close()
    heir = Growth(other.open("a", lm))
    heir.on()
    heir.to_end()
    assert len(texts(one, "a")) == 2


DIES = """
import sys, weft
from weft.service.store.library import Library
with weft.load("tiny") as lm, Library(sys.argv[1], lease_s=60) as library:
    kept = library.open("a", lm)
    for delta in kept.loom.stream(n=1, max_tokens=40, seed=1):
        kept.append([delta.node])
        if len(delta.node.tokens) == 5:
            print("five", flush=True)
            sys.stdin.read()
"""


@pytest.mark.programs
def test_lease_of_dead_server_is_acquired_at_once(url: str, one: Library, lm: weft.LM) -> None:
    kept = one.create(weft.Loom(lm, "Once"), name="a")
    command = [sys.executable, "-c", DIES, url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "five\n"
        with pytest.raises(QueueFull):
            Growth(kept).on()
        os.kill(process.pid, signal.SIGKILL)
    heir = Growth(kept)
    heir.on()
    kept.sync()
    ended = [(len(node.tokens), node.finish_reason) for node in kept.loom.children]
    assert (5, "interrupted") in ended
    heir.to_end()
