"""Sequences leased to fragments, against a naive twin: a set of tagged cells, and no llama.cpp."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from weft.engines.llamacpp.leases import END, Leases, PathFragment
from weft.errors import KVFull

pytestmark = pytest.mark.llamacpp


class TaggedCells:
    """Cells as the library has them: a position, the sequences that see it, and a name."""

    def __init__(self, max_leases: int) -> None:
        self.n_leases, self.max_leases = min(2, max_leases), max_leases
        self.cells: list[tuple[int, str, set[int]]] = []

    def reserve(self, n_cells: int, n_leases: int) -> None:
        self.n_leases = max(self.n_leases, min(n_leases, self.max_leases))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        for position, _, tags in self.cells:
            if source in tags and position >= start and (end == END or position < end):
                tags.add(target)

    def remove(self, lease: int, start: int, end: int) -> None:
        for position, _, tags in self.cells:
            if position >= start and (end == END or position < end):
                tags.discard(lease)
        self.cells = [cell for cell in self.cells if cell[2]]

    def write(self, lease: int, position: int, name: str) -> None:
        seen = [at for at, _, tags in self.cells if lease in tags]
        assert sorted(seen) == list(range(position)), "the library would refuse this"
        self.cells.append((position, name, {lease}))

    def seen(self, lease: int) -> list[str]:
        return [name for _, name, tags in sorted(self.cells, key=lambda c: c[0]) if lease in tags]


class World:
    """Fragments with names for their slots, which the leases must always show."""

    def __init__(self, seed: int, n_leases: int = 64) -> None:
        self.rng = random.Random(seed)
        self.cells = TaggedCells(n_leases)
        self.leases = Leases(self.cells)
        self.held: dict[PathFragment, list[str]] = {}
        self.above: dict[PathFragment, PathFragment | None] = {}
        self.n_names = 0

    def path(self, fragment: PathFragment | None) -> list[str]:
        found: list[str] = []
        while fragment is not None:
            found = self.held[fragment] + found
            fragment = self.above[fragment]
        return found

    def below(self, fragment: PathFragment) -> list[PathFragment]:
        return [each for each, above in self.above.items() if above is fragment]

    def write(self, fragment: PathFragment, n: int) -> None:
        if fragment.strand is None:
            start = len(self.path(self.above[fragment]))
            self.leases.insert(fragment, self.above[fragment], start, growing=False)
        else:
            self.leases.make_leaf(fragment)
        for _ in range(n):
            self.n_names += 1
            name = f"t{self.n_names}"
            self.cells.write(fragment.lease, fragment.end, name)
            self.held[fragment].append(name)
            fragment.length += 1

    def new(self, parent: PathFragment | None, n: int) -> PathFragment:
        fragment = PathFragment(parent)
        self.held[fragment], self.above[fragment] = [], parent
        self.write(fragment, n)
        return fragment

    def forget(self, fragment: PathFragment) -> None:
        self.leases.drop(fragment)
        fragment.length = 0
        del self.held[fragment], self.above[fragment]

    def check(self) -> None:
        leaves = [f for f in self.held if not self.below(f)]
        assert self.leases.n_free == self.leases.n_leases - len(leaves)
        for fragment in self.held:
            shown = self.cells.seen(fragment.lease)
            assert shown[: fragment.end] == self.path(fragment)
            if fragment in leaves:
                assert len(shown) == fragment.end
        known = {name for names in self.held.values() for name in names}
        assert {name for _, name, _ in self.cells.cells} == known

    def step(self) -> None:
        rng, some = self.rng, list(self.held)
        kind = rng.choice(["new", "new", "fork", "grow", "free", "split", "join", "trim", "double"])
        leaves = [f for f in some if not self.below(f)]
        if kind == "new" or not some:
            self.new(rng.choice([None, *some]), rng.randint(1, 4))
        elif kind == "fork":
            self.new(rng.choice(some), 1)
        elif kind == "grow":
            self.write(rng.choice(leaves), rng.randint(1, 3))
        elif kind == "free":
            self.forget(rng.choice(leaves))
        elif kind == "split":
            self.split(rng.choice(some))
        elif kind == "join":
            self.join(rng.choice(some))
        elif kind == "trim":
            leaf = rng.choice(leaves)
            length = rng.randint(1, leaf.length)
            self.leases.trim_leaf(leaf, length)
            leaf.length = length
            del self.held[leaf][length:]
        else:
            self.double(rng.choice(leaves))

    def split(self, fragment: PathFragment) -> PathFragment | None:
        if fragment.length < 2:
            return None
        at = self.rng.randint(1, fragment.length - 1)
        upper = self.leases.split(fragment, at)
        self.above[upper], self.above[fragment] = self.above[fragment], upper
        self.held[upper], self.held[fragment] = self.held[fragment][:at], self.held[fragment][at:]
        return upper

    def join(self, lower: PathFragment) -> None:
        upper = self.above[lower]
        if upper is None or len(self.below(upper)) != 1:
            return
        self.leases.join(upper, lower)
        self.held[lower] = self.held[upper] + self.held[lower]
        self.above[lower] = self.above.pop(upper)
        del self.held[upper]

    def double(self, leaf: PathFragment) -> None:
        """What the tree does where a tail turns out to repeat a node: its head goes."""
        parent = self.above[leaf]
        twin = self.new(parent, leaf.length + self.rng.randint(1, 3))
        head = self.leases.split(twin, leaf.length)
        names = self.held[twin][leaf.length :]
        self.leases.drop(head)
        head.length = 0
        self.held[twin], self.above[twin] = names, leaf
        self.leases.attach(twin, leaf)


@pytest.mark.parametrize("seed", range(30))
def test_every_lease_shows_its_path_whatever_is_done(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        if world.leases.n_free < 2:
            for leaf in [f for f in world.held if not world.below(f)][:20]:
                world.forget(leaf)
        world.step()
        world.check()
    while world.held:
        world.forget(next(f for f in world.held if not world.below(f)))
    assert world.leases.n_free == world.leases.n_leases
    assert world.cells.cells == []


def test_a_fragment_that_grows_lets_what_began_at_its_end_stay_there() -> None:
    world = World(0)
    leaf = world.new(None, 3)
    child = world.new(leaf, 2)
    world.leases.make_leaf(leaf)
    for _ in range(2):  # as a leaf that takes in more, before others are cut off it
        world.n_names += 1
        world.cells.write(leaf.lease, leaf.end, f"t{world.n_names}")
        world.held[leaf].append(f"t{world.n_names}")
        leaf.length += 1
    assert world.cells.seen(child.lease) == world.held[leaf][:3] + world.held[child]
    upper = world.leases.split(leaf, 3)
    world.above |= {upper: None, leaf: upper, child: upper}
    world.held[upper], world.held[leaf] = world.held[leaf][:3], world.held[leaf][3:]
    world.check()


def test_a_fragment_cut_back_gets_what_began_there() -> None:
    world = World(0)
    leaf = world.new(None, 3)
    child = world.new(leaf, 2)
    world.leases.make_leaf(leaf)
    world.cells.write(leaf.lease, 3, "more")
    leaf.length = 4
    world.leases.trim_leaf(leaf, 3)
    leaf.length = 3
    world.check()
    world.forget(child)
    world.check()


def test_leases_run_out_with_an_error_and_nothing_has_changed() -> None:
    world = World(0, n_leases=2)
    root = world.new(None, 2)
    world.new(root, 1)
    world.new(root, 1)
    third = PathFragment(root)
    with pytest.raises(KVFull, match="2 sequences"):
        world.leases.insert(third, root, 2, growing=False)
    world.check()


def test_a_path_of_100_000_fragments_takes_one_lease() -> None:
    leases = Leases(TaggedCells(4))
    tip = None
    for _ in range(100_000):
        fragment = PathFragment(tip)
        leases.insert(fragment, tip, fragment.start, growing=False)
        fragment.length = 1
        tip = fragment
    assert leases.n_free == 3
    while tip is not None:
        above = tip.parent
        leases.drop(tip)
        tip = above
    assert leases.n_free == 4


def test_what_begins_at_the_end_of_a_fragment_that_grows_too_has_a_lease_of_its_own() -> None:
    world = World(0)
    leaf = world.new(None, 3)
    other = PathFragment(leaf)
    world.leases.insert(other, leaf, 3, growing=True)
    for fragment in (leaf, other):
        world.cells.write(fragment.lease, 3, f"of {fragment is leaf}")
        fragment.length += 1
    assert world.cells.seen(leaf.lease) == [*world.held[leaf], "of True"]
    assert world.cells.seen(other.lease) == [*world.held[leaf], "of False"]
    assert other in leaf.side_branches


def test_growth_that_failed_leaves_what_began_beside_it() -> None:
    world = World(0)
    root = world.new(None, 2)
    leaf = PathFragment(root)
    world.leases.insert(leaf, root, 2, growing=False)
    other = PathFragment(leaf)
    world.leases.insert(other, leaf, 2, growing=True)
    world.cells.write(other.lease, 2, "other")
    other.length = 1
    world.leases.trim_leaf(leaf, 0)
    assert other.parent is leaf
    assert not other.is_loose
    assert world.cells.seen(other.lease) == [*world.held[root], "other"]
    assert leaf.lease == other.lease == root.lease


def grown(world: World, n: int, n_more: int) -> tuple[PathFragment, PathFragment]:
    """Return a fragment of `n` slots that has grown by `n_more`, and what began before that."""
    leaf = world.new(None, n)
    aside = world.new(leaf, 2)
    world.write(leaf, n_more)
    return leaf, aside


def test_what_is_aside_stays_with_the_fragment_that_two_become() -> None:
    world = World(0)
    upper, aside = grown(world, 3, 2)
    names = world.held[upper][:3] + world.held[aside]
    lower = world.new(upper, 2)
    world.leases.join(upper, lower)
    assert aside.parent is lower
    assert world.cells.seen(aside.lease) == names
    world.leases.drop(aside)
    assert not lower.side_branches
    assert world.cells.seen(lower.lease) == world.held[upper] + world.held[lower]


def test_what_is_below_another_path_sees_that_one_and_its_old_one_is_a_leaf() -> None:
    world = World(0)
    old, new = world.new(None, 3), world.new(None, 3)
    fragment = world.new(old, 2)
    world.leases.attach(fragment, new)
    world.above[fragment] = new
    world.check()
    world.write(old, 1)
    world.check()


def test_what_begins_within_a_path_is_aside_there() -> None:
    world = World(0)
    old, new = world.new(None, 3), world.new(None, 5)
    fragment = world.new(old, 2)
    world.leases.attach(fragment, new)
    assert list(new.side_branches) == [fragment]
    assert world.cells.seen(fragment.lease) == world.held[new][:3] + world.held[fragment]
    assert world.cells.seen(new.lease) == world.held[new]
    assert world.cells.seen(old.lease) == world.held[old]


def test_slots_that_go_are_seen_by_nothing_below_or_aside() -> None:
    world = World(0)
    root = world.new(None, 2)
    leaf = world.new(root, 3)
    aside = world.new(leaf, 1)
    world.write(leaf, 2)
    world.leases.drop(root)
    assert not set(world.held[root]) & {name for _, name, _ in world.cells.cells}
    assert world.cells.seen(aside.lease) == world.held[leaf][:3] + world.held[aside]
