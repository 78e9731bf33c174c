"""Random work on one loom in several processes: they converge, and no generated node is lost."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

import weft
from weft.errors import Conflict, StoreError, TreeError
from weft.loom import Heddle, Loom
from weft.service.store.library import Library
from weft.service.store.snapshot import rank_siblings
from weft.service.store.stored_loom import StoredLoom
from weft.service.store.tables import looms, nodes

MessageShape = list[tuple[str, str | None, str, float | None, dict[str, object]]]


def shape(loom: Loom) -> MessageShape:
    return [
        (
            node.id,
            None if node.parent is None else node.parent.id,
            node.text,
            node.score,
            dict(node.meta),
        )
        for node in loom.walk()
    ]


def edit(kept: StoredLoom, rng: random.Random, grown: set[str], *, marks: bool = True) -> None:
    """Change the tree with a random method."""
    nodes = list(kept.loom.walk())
    node = rng.choice(nodes)
    what = rng.random()
    if what < 0.45:
        for _ in range(rng.randint(1, 3)):
            grown.add(node.add(f"n{rng.randrange(10**6)} ").id)
    elif what < 0.6:
        node.score = rng.random()
    elif what < 0.7:
        node.meta[rng.choice("ab")] = rng.randrange(9)
    elif what < 0.8 and node.parent is not None:
        try:
            rng.choice(nodes).add_child(node)
        except TreeError:
            return  # below itself
    elif what < 0.9 and node.parent is not None:
        node.remove()
    elif what < 0.95:
        node.to_leaf()
    elif marks:
        with suppress(Conflict):  # another process has removed it
            kept.bookmark(node, rng.choice(["x", None]))


def work(library: Library, seed: int, turns: int) -> None:
    rng = random.Random(seed)
    first = library.create(Loom(None, "root"))
    holders = [first, *(library.open(first.name) for _ in range(2))]
    grown: set[str] = set()
    for _ in range(turns):
        kept = rng.choice(holders)
        for _ in range(rng.randint(0, 3)):
            edit(kept, rng, grown)
        before = {node.id for node in kept.loom.walk()}
        what = rng.random()
        if what < 0.6:
            new = before - kept.numbers().keys()
            kept.commit("work")
            assert new <= {node.id for node in kept.loom.walk()}  # what was grown is there
            agree(library, kept)
        elif what < 0.8:
            kept.sync()
        else:
            try:
                kept.undo() if what < 0.92 else kept.redo()
                agree(library, kept)
            except StoreError:
                continue  # nothing left
    for kept in holders:
        kept.commit("last")
    for kept in holders:
        kept.sync()
        agree(library, kept)
    assert len({str(shape(kept.loom)) for kept in holders}) == 1
    numbers = [dict(kept.numbers()) for kept in holders]
    for one in numbers:
        assert len(set(one.values())) == len(one)  # a number is one node's
        for other in numbers:
            assert all(one[each] == other[each] for each in one.keys() & other.keys())
    back_and_forth(library, holders[0])


def agree(library: Library, kept: StoredLoom) -> None:
    """Assert that the tree in memory equals the rows."""
    reopened = library.open(kept.name)
    assert shape(reopened.loom) == shape(kept.loom)
    assert library.row(kept.name).n_nodes == kept.loom.count_children()


def back_and_forth(library: Library, kept: StoredLoom) -> None:
    """Undo all operations one by one, then redo them."""
    states = [shape(kept.loom)]
    while True:
        try:
            kept.undo()
        except StoreError:
            break
        states.append(shape(kept.loom))
    agree(library, kept)
    assert [node.text for node in kept.loom.walk()] == ["root"]
    for want in states[-2::-1]:
        kept.redo()
        assert shape(kept.loom) == want


def test_random_work_of_three_processes_converges(library: Library) -> None:
    work(library, 0, 25)


@pytest.mark.slow
def test_long_random_work_of_three_processes_converges(library: Library) -> None:
    for seed in range(100, 112):
        work(library, seed, 60)


def test_rank_siblings_is_ascending_and_keeps_places() -> None:
    rng = random.Random(1)
    for _ in range(500):
        old = [None if rng.random() < 0.4 else float(rng.randrange(20)) for _ in range(8)]
        kept = [each for each in old if each is not None]
        ranks = rank_siblings(old)
        assert all(a < b for a, b in zip(ranks, ranks[1:], strict=False))
        if kept == sorted(set(kept)):
            assert all(was is None or was == now for was, now in zip(old, ranks, strict=True))
    assert rank_siblings([]) == []
    assert rank_siblings([None, None]) == [0.0, 1.0]
    assert rank_siblings([1.0, None, 1.0 + 2**-52]) == [0.0, 1.0, 2.0]  # no room between them


def test_node_copied_from_another_loom_gets_a_new_id(library: Library) -> None:
    kept = library.create(Loom(None, "root"))
    child = kept.loom.add("a")
    kept.commit("add")
    twin: Heddle = kept.loom.add("b")
    twin.id = child.id
    kept.commit("add")
    assert twin.id != child.id
    agree(library, kept)


def check_rows(library: Library, kept: StoredLoom) -> None:
    """Assert that the rows form one tree: one root, no missing parents, no cycles."""
    query = sa.select(nodes).join(looms, looms.c.key == nodes.c.loom)
    query = query.where(looms.c.id == kept.id, ~nodes.c.removed)
    rows = library.database.read(lambda connection: connection.execute(query).all())
    parents = {row.number: row.parent for row in rows}
    assert [number for number, parent in parents.items() if parent is None] == [0]
    for number in parents:
        at, steps = number, 0
        while (above := parents[at]) is not None:
            at, steps = above, steps + 1
            assert steps <= len(parents), f"node {number} stands below itself"
    agree(library, kept)


def test_restore_keeps_later_changes(tmp_path: Path) -> None:
    with Library(f"sqlite:///{tmp_path}/weft.db") as library:
        kept = library.create(Loom(None, "root"))
        a, b, c = (kept.loom.add(text) for text in "abc")
        kept.commit("add")
        c.remove()
        b.add_child(a)  # in one commit with the removal
        kept.commit("remove")
        kept.loom.add_child(a)
        a.add_child(b)
        kept.commit("move")
        library.restore_last(kept.name, only_nodes=True)
        kept.sync()
        check_rows(library, kept)
        assert [node.text for node in kept.loom.walk()] == ["root", "a", "b", "c"]
        with pytest.raises(StoreError, match="no node of .* is removed"):
            library.restore_last(kept.name, only_nodes=True)
        assert kept.undo().removed == [c.id]  # to bring back is an operation like any other
        kept.undo()
        assert a.parent is b
        check_rows(library, kept)


def law(library: Library, seed: int, turns: int) -> None:
    rng = random.Random(seed)
    kept = library.create(Loom(None, "root"))
    other = library.open(kept.name)
    for _ in range(turns):
        holder = rng.choice([kept, other])
        for _ in range(rng.randint(1, 3)):
            edit(holder, rng, set())
        holder.commit("work")
        what = rng.random()
        if what < 0.4:
            for _ in range(rng.randint(1, 2)):
                before = {node.id for node in holder.loom.walk()}
                try:
                    library.restore_last(kept.name, only_nodes=True)
                except StoreError:
                    break
                holder.sync()
                assert before < {node.id for node in holder.loom.walk()}
                check_rows(library, holder)
        elif what < 0.7:
            for step in rng.choices([holder.undo, holder.redo], k=rng.randint(1, 3)):
                try:
                    step()
                except StoreError:
                    continue
                check_rows(library, holder)
    kept.sync()
    check_rows(library, kept)


def test_bookmark_of_removed_node_raises_conflict(tmp_path: Path) -> None:
    with Library(f"sqlite:///{tmp_path}/weft.db") as library:
        kept = library.create(Loom(None, "root"))
        node = kept.loom.add("a")
        kept.commit("add")
        other = library.open(kept.name)
        other.loom.children[0].remove()
        other.commit("remove")
        with pytest.raises(Conflict, match="node 1 has been removed"):
            kept.bookmark(node, "x")
        assert kept.bookmarks() == {}
        agree(library, kept)


def test_rows_form_a_tree_after_random_restores(tmp_path: Path) -> None:
    with Library(f"sqlite:///{tmp_path}/weft.db") as library:
        law(library, 0, 25)


@pytest.mark.slow
def test_rows_form_a_tree_after_many_random_restores(tmp_path: Path) -> None:
    with Library(f"sqlite:///{tmp_path}/weft.db") as library:
        for seed in range(10, 30):
            law(library, seed, 80)


def test_revert_after_random_changes_restores_the_tree(tmp_path: Path) -> None:
    rng = random.Random(5)
    with weft.load("tiny") as lm, Library(f"sqlite:///{tmp_path}/weft.db") as library:
        kept = library.create(Loom(lm, "root"))
        for _ in range(40):
            for _ in range(4):
                put_wrong(kept, rng)
            kept.commit("work")
            before = shape(kept.loom)
            for _ in range(rng.randint(1, 6)):
                put_wrong(kept, rng)
            kept.revert()
            assert shape(kept.loom) == before
            assert not kept.commit("nothing")
        agree(library, kept)


def put_wrong(kept: StoredLoom, rng: random.Random) -> None:
    """Change a tree with a model at random, including texts."""
    node = rng.choice(list(kept.loom.walk()))
    what = rng.random()
    if what < 0.1 and node.parent is not None:
        node.text = f"other {rng.randrange(99)}"
    elif what < 0.2 and len(node.tokens) > 1:
        node.split(1)
    else:
        edit(kept, rng, set(), marks=False)
