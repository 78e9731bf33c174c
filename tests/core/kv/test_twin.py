"""The token tree against a naive twin: a dict of token tuples, no nodes, no KV."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import first_of
from core.kv.listkv import ListFragments
from weft._core.kv.pins import PinHold
from weft._core.kv.place import Cursor, Place, Tail, resolve
from weft._core.kv.tree import TokenTree

CAPACITY, MAX_PATHS, MAX_PLACES = 60, 6, 16


class Owner:
    """The owner of pins by hand."""


class Twin:
    """Random tree operations on a real tree and on plain token tuples, side by side."""

    def __init__(self, seed: int, capacity: int | None, max_paths: int | None, host: int) -> None:
        self.random = random.Random(seed)
        self.kv = ListFragments()
        self.kv.growth = random.Random(seed).choice([1, 4])
        self.tree = TokenTree(self.kv, capacity=capacity, max_paths=max_paths, host_capacity=host)
        self.known: dict[Place, tuple[int, ...]] = {}
        self.pins: list[tuple[Cursor, tuple[int, ...]]] = []
        self.tails: list[tuple[Tail, Cursor, tuple[int, ...], list[int]]] = []
        self.by_hand: list[tuple[Owner, PinHold, tuple[int, ...]]] = []
        self.computed: set[int] = set()  # ids of the holds whose KV was all there

    def tokens(self) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randrange(1, 5))]

    def some_place(self) -> Place | None:
        return self.random.choice(list(self.known)) if self.known else None

    # Operations -------------------------------------------------------------------------------

    def op_extend(self) -> None:
        base, ids = self.some_place(), self.tokens()
        if len(self.known) >= MAX_PLACES or (base is not None and base.depth > CAPACITY):
            return
        place = Place(self.tree.holds, None, base, ids)
        if self.random.random() < 0.7:
            self.tree.place(place)
        self.known[place] = (self.known[base] if base is not None else ()) + tuple(ids)

    def op_fork_or_clip(self) -> None:
        place = self.some_place()
        if place is None or len(self.known) >= MAX_PLACES:
            return
        ids = self.known[place]
        depth = self.random.randrange(len(ids) + 1)
        copy = place.fork() if self.random.random() < 0.3 else place.at(depth)
        self.known[copy] = ids[: copy.depth]

    def op_drop_place(self) -> None:
        place = self.some_place()
        if place is not None and len(self.known) > 6:
            del self.known[place]
        self.tree.drain_released()

    def op_compute(self) -> None:
        """Pin a path as a job would, and compute what is absent, or give up for want of room."""
        place = self.some_place()
        if place is None or not self.known[place] or len(self.pins) > 3:
            return
        tree, ids = self.tree, self.known[place]
        cursor = tree.pin(tree.cut(tree.place(place)))
        if not tree.make_room():
            tree.unpin(cursor)
            return
        for node in reversed(list(tree.up(cursor))):
            if node.host is not None:
                tree.load_host(node)
            elif not node.resident:
                fragment = self.kv.new(node.parent.fragment if node.parent else None)
                self.kv.write(fragment, node.tokens, node.start)
                tree.fill(Cursor(node, node.end), node.start, fragment)
        self.pins.append((cursor, ids))

    def op_unpin(self) -> None:
        if self.pins:
            cursor, _ = self.pins.pop(self.random.randrange(len(self.pins)))
            if all(tail[1] is not cursor for tail in self.tails):
                self.tree.unpin(cursor)
            else:
                self.pins.append((cursor, _))

    def op_pin_by_hand(self) -> None:
        place = self.some_place()
        if place is not None and self.known[place] and len(self.by_hand) < 3:
            owner = Owner()
            hold = self.tree.pin_for(place, owner)
            if hold is not None:
                self.by_hand.append((owner, hold, self.known[place]))

    def op_unpin_by_hand(self) -> None:
        if self.by_hand:
            owner, hold, _ = self.by_hand.pop(self.random.randrange(len(self.by_hand)))
            self.computed.discard(id(hold))
            if self.random.random() < 0.5:
                self.tree.unpin_for(hold)
                self.tree.unpin_for(hold)  # and again
            del owner

    def op_tail(self) -> None:
        if not self.pins or len(self.tails) > 2:
            return
        cursor, ids = self.random.choice(self.pins)
        if not all(node.resident for node in self.tree.up(cursor)):
            return
        at = self.tree.cut(cursor)
        if self.tree.budget.max_paths is not None and self.tree.budget.paths >= MAX_PATHS:
            return
        self.tails.append((self.tree.new_tail(at), cursor, ids, []))

    def op_grow_tail(self) -> None:
        if not self.tails:
            return
        tail, _, ids, own = self.random.choice(self.tails)
        self.tree.budget.reserve(tail, len(own) + 1)
        if self.tree.make_room():
            token = self.random.randrange(3)
            self.kv.write(tail.fragment, [token], len(ids) + len(own))
            own.append(token)
        else:
            self.tree.budget.shrink_reservation(tail, len(own))

    def op_end_tail(self) -> None:
        if not self.tails:
            return
        tail, _, ids, own = self.tails.pop(self.random.randrange(len(self.tails)))
        if self.random.random() < 0.2:
            self.tree.drop_tail(tail)
            return
        end = self.tree.end_tail(tail, own)
        if len(self.known) < MAX_PLACES:
            self.known[self.tree.hold(end)] = ids + tuple(own)
        self.tree.join(end, minimum=self.random.choice([2, 8]))

    def op_join(self) -> None:
        place = self.some_place()
        if place is not None:
            self.tree.join(self.tree.place(place), minimum=2)

    def op_clear(self) -> None:
        if self.random.random() < 0.05:
            self.tree.clear()
            self.computed.clear()

    OPS = (
        op_extend, op_extend, op_fork_or_clip, op_drop_place, op_drop_place, op_compute, op_compute,
        op_unpin, op_tail, op_grow_tail, op_grow_tail, op_grow_tail, op_end_tail, op_join, op_clear,
        op_pin_by_hand, op_unpin_by_hand,
    )  # fmt: skip

    def run(self, n_ops: int, check_every: int) -> None:
        for i in range(n_ops):
            self.random.choice(self.OPS)(self)
            if i % check_every == 0:
                self.check()
        self.check()

    # Comparing --------------------------------------------------------------------------------

    def check(self) -> None:
        self.tree.drain_released()
        self.tree.check()
        for place, ids in self.known.items():
            assert tuple(place.ids()) == ids
            assert place.depth == len(ids)
        for ids in self.known.values():
            match = self.tree.match(list(ids))
            assert tuple(self.tree.ids(match)) == ids[: match.depth]
        for cursor, ids in self.pins:
            if all(node.resident for node in self.tree.up(cursor)):
                self.check_slots(resolve(Cursor(cursor.node, len(ids))), ids)
        for _, hold, ids in self.by_hand:
            assert tuple(self.tree.ids(hold.cursor)) == ids
            assert hold.cursor.depth == hold.cursor.node.end, "only the requested tokens are pinned"
            if all(node.resident for node in self.tree.up(hold.cursor)):
                self.computed.add(id(hold))
                self.check_slots(hold.cursor, ids)
            assert id(hold) not in self.computed or hold.cursor.node.resident
        for tail, cursor, ids, own in self.tails:
            expected = [(token, len(ids) + i) for i, token in enumerate(own)]
            assert tail.fragment.slots == expected
            self.check_slots(resolve(Cursor(cursor.node, len(ids))), ids)
        if self.tree.budget.capacity is not None:
            assert self.tree.budget.used <= self.tree.budget.capacity

    def check_slots(self, cursor: Cursor, ids: tuple[int, ...]) -> None:
        slots = [s for span in self.tree.path(cursor) for s in span.fragment.slots[: span.length]]
        assert slots == [(token, i) for i, token in enumerate(ids)]

    def close(self) -> None:
        for tail, _, _, _ in self.tails:
            self.tree.drop_tail(tail)
        for cursor, _ in self.pins:
            self.tree.unpin(cursor)
        self.known.clear()
        self.tails, self.pins, self.by_hand = [], [], []
        self.tree.drain_released()
        self.tree.clear()
        self.tree.check()
        assert self.kv.usage().slots == 0
        assert self.tree.n_nodes == 0


@pytest.mark.parametrize("n", first_of([8_000, 25_000]))
@pytest.mark.parametrize(
    ("capacity", "max_paths", "host"),
    [(None, None, 0), (CAPACITY, None, 0), (CAPACITY, None, 40), (CAPACITY, MAX_PATHS, 0)],
)
def test_random_operations_agree_with_the_reference(
    capacity: int | None, max_paths: int | None, host: int, n: int
) -> None:
    twin = Twin(7, capacity, max_paths, host)
    twin.run(n, check_every=25)
    twin.close()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([None, 12, CAPACITY]))
def test_short_random_sequences_agree_with_the_reference_after_every_operation(
    seed: int, capacity: int | None
) -> None:
    twin = Twin(seed, capacity, None, 8)
    twin.run(60, check_every=1)
    twin.close()
