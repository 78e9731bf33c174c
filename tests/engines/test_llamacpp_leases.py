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

    def reserve(self, n_leases: int) -> None:
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
        positions = [at for at, _, tags in self.cells if lease in tags]
        assert sorted(positions) == list(range(position)), "the library would reject this"
        self.cells.append((position, name, {lease}))

    def names_of(self, lease: int) -> list[str]:
        return [name for _, name, tags in sorted(self.cells, key=lambda c: c[0]) if lease in tags]


class World:
    """Fragments with names for their slots, which the leases must always show."""

    def __init__(self, seed: int, n_leases: int = 64) -> None:
        self.rng = random.Random(seed)
        self.cells = TaggedCells(n_leases)
        self.leases = Leases(self.cells)
        self.names: dict[PathFragment, list[str]] = {}
        self.above: dict[PathFragment, PathFragment | None] = {}
        self.n_names = 0

    def path(self, fragment: PathFragment | None) -> list[str]:
        names: list[str] = []
        while fragment is not None:
            names = self.names[fragment] + names
            fragment = self.above[fragment]
        return names

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
            self.names[fragment].append(name)
            fragment.length += 1

    def new(self, parent: PathFragment | None, n: int) -> PathFragment:
        fragment = PathFragment(parent)
        self.names[fragment], self.above[fragment] = [], parent
        self.write(fragment, n)
        return fragment

    def forget(self, fragment: PathFragment) -> None:
        self.leases.drop(fragment)
        fragment.length = 0
        del self.names[fragment], self.above[fragment]

    def check(self) -> None:
        leaves = [f for f in self.names if not self.below(f)]
        assert self.leases.n_free == self.leases.n_leases - len(leaves)
        for fragment in self.names:
            shown = self.cells.names_of(fragment.lease)
            assert shown[: fragment.end] == self.path(fragment)
            if fragment in leaves:
                assert len(shown) == fragment.end
        known = {name for names in self.names.values() for name in names}
        assert {name for _, name, _ in self.cells.cells} == known

    def step(self) -> None:
        rng, some = self.rng, list(self.names)
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
            del self.names[leaf][length:]
        else:
            self.double(rng.choice(leaves))

    def split(self, fragment: PathFragment) -> PathFragment | None:
        if fragment.length < 2:
            return None
        at = self.rng.randint(1, fragment.length - 1)
        upper = self.leases.split(fragment, at)
        self.above[upper], self.above[fragment] = self.above[fragment], upper
        self.names[upper], self.names[fragment] = (
            self.names[fragment][:at],
            self.names[fragment][at:],
        )
        return upper

    def join(self, lower: PathFragment) -> None:
        upper = self.above[lower]
        if upper is None or len(self.below(upper)) != 1:
            return
        self.leases.join(upper, lower)
        self.names[lower] = self.names[upper] + self.names[lower]
        self.above[lower] = self.above.pop(upper)
        del self.names[upper]

    def double(self, leaf: PathFragment) -> None:
        """Do what the tree does if a tail repeats a node: its head is dropped."""
        parent = self.above[leaf]
        twin = self.new(parent, leaf.length + self.rng.randint(1, 3))
        head = self.leases.split(twin, leaf.length)
        names = self.names[twin][leaf.length :]
        self.leases.drop(head)
        head.length = 0
        self.names[twin], self.above[twin] = names, leaf
        self.leases.attach(twin, leaf)


@pytest.mark.parametrize("seed", range(30))
def test_every_lease_has_the_names_of_its_path_after_random_operations(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        if world.leases.n_free < 2:
            for leaf in [f for f in world.names if not world.below(f)][:20]:
                world.forget(leaf)
        world.step()
        world.check()
    while world.names:
        world.forget(next(f for f in world.names if not world.below(f)))
    assert world.leases.n_free == world.leases.n_leases
    assert world.cells.cells == []


def test_growing_fragment_keeps_children_at_its_old_end() -> None:
    world = World(0)
    leaf = world.new(None, 3)
    child = world.new(leaf, 2)
    world.leases.make_leaf(leaf)
    for _ in range(2):  # as a leaf that takes in more, before others are cut off it
        world.n_names += 1
        world.cells.write(leaf.lease, leaf.end, f"t{world.n_names}")
        world.names[leaf].append(f"t{world.n_names}")
        leaf.length += 1
    assert world.cells.names_of(child.lease) == world.names[leaf][:3] + world.names[child]
    upper = world.leases.split(leaf, 3)
    world.above |= {upper: None, leaf: upper, child: upper}
    world.names[upper], world.names[leaf] = world.names[leaf][:3], world.names[leaf][3:]
    world.check()


def test_trimmed_fragment_gets_the_children_at_its_new_end() -> None:
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


def test_lack_of_leases_raises_and_changes_nothing() -> None:
    world = World(0, n_leases=2)
    root = world.new(None, 2)
    world.new(root, 1)
    world.new(root, 1)
    third = PathFragment(root)
    with pytest.raises(KVFull, match="2 sequences"):
        world.leases.insert(third, root, 2, growing=False)
    world.check()


def test_path_of_100_000_fragments_takes_one_lease() -> None:
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


def test_child_at_the_end_of_a_growing_fragment_has_its_own_lease() -> None:
    world = World(0)
    leaf = world.new(None, 3)
    other = PathFragment(leaf)
    world.leases.insert(other, leaf, 3, growing=True)
    for fragment in (leaf, other):
        world.cells.write(fragment.lease, 3, f"of {fragment is leaf}")
        fragment.length += 1
    assert world.cells.names_of(leaf.lease) == [*world.names[leaf], "of True"]
    assert world.cells.names_of(other.lease) == [*world.names[leaf], "of False"]
    assert other in leaf.side_branches


def test_failed_growth_keeps_siblings() -> None:
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
    assert world.cells.names_of(other.lease) == [*world.names[root], "other"]
    assert leaf.lease == other.lease == root.lease


def grown(world: World, n: int, n_more: int) -> tuple[PathFragment, PathFragment]:
    """Return a fragment of `n` slots that has grown by `n_more`, and its earlier child."""
    leaf = world.new(None, n)
    side = world.new(leaf, 2)
    world.write(leaf, n_more)
    return leaf, side


def test_side_child_stays_with_the_joined_fragment() -> None:
    world = World(0)
    upper, side = grown(world, 3, 2)
    names = world.names[upper][:3] + world.names[side]
    lower = world.new(upper, 2)
    world.leases.join(upper, lower)
    assert side.parent is lower
    assert world.cells.names_of(side.lease) == names
    world.leases.drop(side)
    assert not lower.side_branches
    assert world.cells.names_of(lower.lease) == world.names[upper] + world.names[lower]


def test_fragment_moved_below_another_path_has_its_names() -> None:
    world = World(0)
    old, new = world.new(None, 3), world.new(None, 3)
    fragment = world.new(old, 2)
    world.leases.attach(fragment, new)
    world.above[fragment] = new
    world.check()
    world.write(old, 1)
    world.check()


def test_fragment_that_starts_inside_a_path_is_a_side_child() -> None:
    world = World(0)
    old, new = world.new(None, 3), world.new(None, 5)
    fragment = world.new(old, 2)
    world.leases.attach(fragment, new)
    assert list(new.side_branches) == [fragment]
    assert world.cells.names_of(fragment.lease) == world.names[new][:3] + world.names[fragment]
    assert world.cells.names_of(new.lease) == world.names[new]
    assert world.cells.names_of(old.lease) == world.names[old]


def test_dropped_slots_are_removed_from_children_and_side_children() -> None:
    world = World(0)
    root = world.new(None, 2)
    leaf = world.new(root, 3)
    side = world.new(leaf, 1)
    world.write(leaf, 2)
    world.leases.drop(root)
    assert not set(world.names[root]) & {name for _, name, _ in world.cells.cells}
    assert world.cells.names_of(side.lease) == world.names[leaf][:3] + world.names[side]
