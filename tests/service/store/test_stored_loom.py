"""StoredLoom: commits, merges between processes, undo and redo."""

from __future__ import annotations

import gc
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

import weft
from shallow import shallow
from weft._core.sampling.params import SamplingParams
from weft.constraints import Regex
from weft.errors import ConfigError, Conflict, StoreError, TreeError
from weft.lm.results import Delta
from weft.loom import Heddle, Loom
from weft.loom.grow import plan
from weft.loom.node import set_tokens
from weft.service.store.commit import set_removed, touch
from weft.service.store.library import Library
from weft.service.store.stored_loom import StoredLoom
from weft.service.store.stream_writer import FLUSH_INTERVAL_S
from weft.service.store.tables import looms
from weft.service.store.undo import apply


@pytest.fixture(scope="module")
def lm() -> weft.LM:
    return weft.load(str(shallow()), engine="numpy")


def texts(loom: Loom) -> list[tuple[str, str, str | None]]:
    """Return ids, texts and parents, in order."""
    return [
        (node.id, node.text, None if node.parent is None else node.parent.id)
        for node in loom.walk()
    ]


def filed(loom: Loom, folder: Path) -> list[dict[str, object]]:
    """Return all data of the nodes, as in a file."""
    loom.save(folder / "x.loom.json")
    data: list[dict[str, object]] = json.loads((folder / "x.loom.json").read_text())["nodes"]
    return data


def story(library: Library) -> StoredLoom:
    """Return a stored loom of texts: root, a (with c, d below), b."""
    loom = Loom(None, "Once upon a time")
    first = loom.add("a")
    loom.add("b")
    first.add("c").add("d")
    return library.create(loom)


def node(kept: StoredLoom, text: str) -> Heddle:
    return next(each for each in kept.loom.walk() if each.text == text)


def test_open_returns_exactly_what_was_saved(library: Library, lm: weft.LM, tmp_path: Path) -> None:
    loom = Loom(lm, "Once upon a time")
    nodes = loom.grow(3, max_tokens=5, seed=1, stop="\n")
    nodes[1].grow(2, max_tokens=3, temperature=0.5, seed=2)
    nodes[0].add("\0 und Grüße 東京 🙂")
    nodes[0].score, nodes[1].score, nodes[2].score = 0.1, float("nan"), -1e300
    nodes[2].meta["note"] = {"ä\ud800": [1, 2.5, None, True]}
    loom.meta["model"] = "tiny"
    nodes[2].split(2)
    kept = library.create(loom)
    want = filed(loom, tmp_path)
    assert filed(library.open(kept.name, lm).loom, tmp_path) == want
    alone = library.open(kept.name).loom
    assert filed(alone, tmp_path) == want
    assert alone.user_prompt == "Once upon a time"
    assert library.row(kept.name).model == "tiny"


def test_every_edit_is_committed_and_undone(library: Library, lm: weft.LM, tmp_path: Path) -> None:
    loom = Loom(lm, "Once upon a time")
    first, second, third = loom.grow(3, max_tokens=6, seed=1)
    kept = library.create(loom)
    changes = {
        "grow": lambda: node_at(0).grow(2, max_tokens=3, seed=3),
        "add": lambda: node_at(1).add(" and then"),
        "split": lambda: node_at(0).split(2),
        "clip": lambda: node_at(1).clip(2),
        "trim": lambda: node_at(2).trim(1),
        "tokens": lambda: setattr(node_at(2), "tokens", [5, 6, 7]),
        "text": lambda: setattr(node_at(2), "text", "other"),
        "score": lambda: setattr(node_at(2), "score", 0.25),
        "meta": lambda: node_at(2).meta.update(a=[1]),
        "move": lambda: node_at(0).add_child(node_at(2)),
        "remove": lambda: node_at(1).remove(),
        "prompt": lambda: setattr(kept.loom, "text", "Twice"),
    }

    def node_at(at: int) -> Heddle:
        return kept.loom.children[at]

    states = [filed(kept.loom, tmp_path)]
    for name, change in changes.items():
        change()
        assert kept.commit(name), name
        states.append(filed(kept.loom, tmp_path))
        assert filed(library.open(kept.name, lm).loom, tmp_path) == states[-1], name
    assert [each.kind for each in kept.history()][::-1] == ["create", *changes]
    other = library.open(kept.name, lm)
    for want in states[-2::-1]:
        kept.undo()
        assert filed(kept.loom, tmp_path) == want
        other.sync()
        assert filed(other.loom, tmp_path) == want
    with pytest.raises(StoreError, match="nothing to undo"):
        kept.undo()
    for want in states[1:]:
        other.redo()
        assert filed(other.loom, tmp_path) == want
    kept.sync()
    assert filed(kept.loom, tmp_path) == states[-1]
    with pytest.raises(StoreError, match="nothing to redo"):
        kept.redo()


def test_new_operation_clears_redo(library: Library) -> None:
    kept = story(library)
    node(kept, "b").remove()
    kept.commit("remove")
    kept.undo()
    node(kept, "b").add("e")
    kept.commit("add")
    with pytest.raises(StoreError, match="nothing to redo"):
        kept.redo()
    assert [each.state for each in kept.history()] == ["done", "dropped", "first"]


def test_numbers_follow_drawing_order(library: Library) -> None:
    kept = story(library)
    assert [kept.number(each) for each in kept.loom.walk()] == [0, 1, 2, 3, 4]
    node(kept, "a").remove()
    kept.commit("remove")
    new = kept.loom.add("e")
    with pytest.raises(TreeError, match="not saved yet"):
        kept.number(new)
    kept.commit("add")
    assert kept.number(new) == 5
    assert kept.node("5") is new
    assert kept.node(new.id) is new
    reopened = library.open(kept.id)
    for key, message in (
        ("3", "not in the loom any more"),
        ("6", "0 .the prompt. to 5"),
        ("x", "x"),
    ):
        with pytest.raises(ConfigError, match=message):
            reopened.node(key)
    kept.undo()
    kept.undo()
    assert kept.number(node(kept, "c")) == 2


def test_commit_without_changes_writes_nothing(library: Library) -> None:
    kept = story(library)
    rev = kept.rev
    assert not kept.commit("edit")
    assert kept.rev == rev == library.row(kept.name).rev


def test_two_processes_merge_each_others_changes(library: Library) -> None:
    one = story(library)
    two = library.open(one.name)
    node(one, "b").add("from one")
    node(two, "b").add("from two")
    one.commit("add")
    change = two.commit("add")
    assert change.others is not None
    assert [each.text for each in change.others.added] == ["from one"]
    one.sync()
    assert texts(one.loom) == texts(two.loom)
    assert [each.text for each in node(one, "b").children] == ["from one", "from two"]


@pytest.mark.parametrize("who_first", ["remover", "grower"])
def test_nodes_below_a_concurrent_removal_survive(library: Library, who_first: str) -> None:
    remover = story(library)
    grower = library.open(remover.name)
    node(remover, "a").remove()
    node(grower, "c").add("grown")
    number = grower.number(node(grower, "a"))
    for writer in (remover, grower) if who_first == "remover" else (grower, remover):
        writer.commit("work")
    remover.sync()
    grower.sync()
    # Ancestors of the grown node are back; other removed nodes are not.
    want = ["Once upon a time", "a", "c", "grown", "b"]
    assert [writer.text for writer in remover.loom.walk()] == want
    assert texts(grower.loom) == texts(remover.loom) == texts(library.open(remover.id).loom)
    assert grower.number(node(grower, "a")) == number


def test_concurrent_changes_of_different_columns_merge(library: Library) -> None:
    one = story(library)
    two = library.open(one.name)
    node(one, "b").score = 1.0
    node(two, "b").meta["x"] = 1
    one.loom.children[0].add_child(node(one, "b"))
    one.commit("edit")
    two.commit("edit")
    one.sync()
    for kept in (one, two, library.open(one.name)):
        merged = node(kept, "b")
        assert (merged.score, merged.meta, merged.parent.text) == (1.0, {"x": 1}, "a")


def test_concurrent_moves_into_a_cycle_leave_a_tree(library: Library) -> None:
    one = story(library)
    two = library.open(one.name)
    node(one, "a").add_child(node(one, "b"))
    node(two, "b").add_child(node(two, "a"))
    one.commit("move")
    two.commit("move")
    one.sync()
    assert texts(one.loom) == texts(two.loom) == texts(library.open(one.name).loom)
    assert len(texts(one.loom)) == 5


def test_bookmarks_are_saved_and_undone(library: Library) -> None:
    kept = story(library)
    kept.bookmark(node(kept, "c"), "the best")
    assert library.open(kept.name).bookmarks() == {2: "the best"}
    kept.undo()
    assert kept.bookmarks() == {}
    with pytest.raises(ConfigError, match="bookmark"):
        kept.bookmark(node(kept, "c"), "\0")


def test_operations_of_a_group_are_undone_together(library: Library) -> None:
    kept = library.create(Loom(None, "Once upon a time"))

    def there() -> str:
        return "".join(node.text for node in kept.loom.children)

    for text, act in (("x", None), ("y", "a1"), ("z", "a1"), ("v", "a2"), ("w", "a1")):
        kept.loom.add(text)
        kept.commit("add", act=act)
    for left in ("xyzv", "xyz", "x", ""):
        kept.undo()
        assert there() == left
    for back in ("x", "xyz", "xyzv", "xyzvw"):
        kept.redo()
        assert there() == back


def test_append_saves_tokens_while_a_loom_grows(
    library: Library, lm: weft.LM, tmp_path: Path
) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    reader = library.open(kept.name, lm)
    for delta in kept.loom.stream(3, max_tokens=6, seed=1):
        kept.append([delta.node])
    assert reader.sync().added == []  # growing nodes are in no other process's tree
    assert kept.commit("grow").added == kept.loom.children
    reader.sync()
    assert filed(reader.loom, tmp_path) == filed(kept.loom, tmp_path)
    assert [kept.number(each) for each in kept.loom.children] == [1, 2, 3]
    kept.undo()
    assert kept.loom.children == []


def test_follow_saves_tokens_of_a_stalled_stream(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))

    def stalling() -> Iterator[Delta]:
        for index, delta in enumerate(kept.loom.stream(2, max_tokens=8, seed=1)):
            yield delta
            if index == 5:
                want = {each.id: len(each.tokens) for each in followed.values()}
                while {row.id: row.n_tokens for row in library.nodes(kept.name, after=0)} != want:
                    time.sleep(0.02)
                rows = library.nodes(kept.name, after=0)
                assert all(row.is_growing for row in rows)

    assert FLUSH_INTERVAL_S <= 0.5
    followed: dict[str, Heddle] = {}
    for delta in kept.follow(stalling(), actor="me"):
        followed[delta.node.id] = delta.node
        assert kept.number(delta.node) in (1, 2)  # from its first token
    assert [(each.kind, each.actor) for each in kept.history()][0] == ("grow", "me")
    assert texts(library.open(kept.name, lm).loom) == texts(kept.loom)


def test_closed_follow_commits_partial_nodes(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    for delta in kept.follow(kept.loom.stream(2, max_tokens=200, seed=1)):
        if len(delta.node.tokens) == 3:
            break
    gc.collect()
    children = library.open(kept.name, lm).loom.children
    assert [each.finish_reason for each in children] == ["cancelled"] * len(children)
    assert texts(library.open(kept.name, lm).loom) == texts(kept.loom)
    assert not any(row.is_growing for row in kept.nodes())


def test_looms_count_nodes_in_progress_with_tokens(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    other = library.create(Loom(lm, "Twice"))

    def counted() -> list[int]:
        listed = {each.id: each.n_nodes for each in library.looms()}
        assert listed == {each: library.row(each).n_nodes for each in listed}
        return [listed[kept.id], listed[other.id]]

    params = SamplingParams(n=2, max_tokens=4, seed=1)
    waiting = plan([other.loom], params, force=False, streamed=True)
    other.append([each.child for each in waiting.branches])
    assert counted() == [1, 1]  # nothing has come
    for delta in kept.loom.stream(2, max_tokens=6, seed=1):
        kept.append([delta.node])
        assert counted()[1] == 1
    assert counted() == [3, 1]
    kept.commit("grow")
    assert counted() == [3, 1]
    kept.undo()
    assert counted() == [1, 1]
    kept.redo()
    assert counted() == [3, 1]


def test_legal_logmass_is_saved(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    (child,) = kept.loom.grow(n=1, max_tokens=8, constraint=Regex("[a-z ]{20}"), seed=1)
    kept.commit("grow")
    written = list(child.legal_logmass)
    assert len(written) == len(child.tokens)
    child.clip(3)
    kept.commit("edit")
    assert library.open(kept.name, lm).loom.children[0].legal_logmass == written[:3]
    kept.undo()
    assert library.open(kept.name, lm).loom.children[0].legal_logmass == written


def test_unfinished_nodes_of_closed_loom_are_interrupted(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    received: dict[str, list[int]] = {}
    for delta in kept.loom.stream(2, max_tokens=40, seed=1):
        kept.append([delta.node])
        received[delta.node.id] = delta.node.tokens
        if sum(map(len, received.values())) >= 9:
            break
    kept.close()
    children = library.open(kept.name, lm).loom.children
    assert {each.id: each.tokens for each in children} == received
    assert all(len(each.logprobs) == len(each.tokens) for each in children)
    assert {each.finish_reason for each in children} == {"interrupted"}
    assert [each.text for each in library.open(kept.name).loom.children] == [
        each.text for each in children
    ]


def test_finished_nodes_of_closed_loom_keep_their_reason(library: Library, lm: weft.LM) -> None:
    """One node ends by a stop string, one without a token, one not yet."""
    kept = library.create(Loom(lm, "Once upon a time"))
    params = SamplingParams.resolve({"n": 3, "seed": 1}, lm.defaults)
    growth = plan([kept.loom], params, force=False, streamed=True)
    stopped, empty, growing = growth.branches
    kept.append([each.child for each in growth.branches])
    for pending in (stopped, growing):
        set_tokens(pending.child, lm.text.continuation(" there was"))
    kept.append([stopped.child])
    stopped.stop = "was"
    empty.child.terminal = True
    for pending in (stopped, empty):
        pending.keep("stop")
    assert not kept.is_durable(stopped.child)
    kept.append([each.child for each in growth.branches])
    assert kept.is_durable(stopped.child)
    assert kept.is_durable(empty.child)
    assert not kept.is_durable(growing.child)
    kept.close()
    children = library.open(kept.name, lm).loom.children
    assert [
        (each.text, each.finish_reason, each.stop_string, each.terminal) for each in children
    ] == [
        (" there was", "stop", "was", False),
        ("", "stop", None, True),
        (" there was", "interrupted", None, False),
    ]


def test_many_new_nodes_take_few_statements(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    first = kept.loom.grow(1, max_tokens=1, seed=1)[0]
    n_statements = [0]

    def count(*_: object) -> None:
        n_statements[0] += 1

    def begun(*, n: int) -> list[Heddle]:
        params = SamplingParams.resolve({"n": n, "seed": n}, lm.defaults)
        growth = plan([kept.loom, first], params, force=False, streamed=True)
        return [pending.child for pending in growth.branches]

    few, many = begun(n=1), begun(n=300)
    costs = []
    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        for nodes in (few, many[:7], many):
            before = n_statements[0]
            kept.append(nodes)
            kept.append(nodes)  # they have numbers already
            costs.append(n_statements[0] - before)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)
    # The first append saves the parent and the writer; 600 ids take two statements.
    assert costs[1] + 2 >= costs[2]
    assert [kept.number(each) for each in (first, *few, *many)] == list(range(1, 604))
    rows = library.nodes(kept.name, limit=1000)
    below = [row.number for row in rows if row.parent == 0]
    assert below == [1, 2, *range(4, 304)]
    kept.close()


def test_removal_during_growth_keeps_new_nodes(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    top = kept.loom.grow(1, max_tokens=2, seed=1)[0]
    top.grow(2, max_tokens=2, seed=1)
    kept.commit("grow")
    other = library.open(kept.name, lm)
    for delta in top.stream(1, max_tokens=5, seed=2):
        if not kept.append([delta.node]) and len(delta.node.tokens) == 2:
            other.loom.children[0].remove()
            other.commit("remove")
            kept.sync()
            with pytest.raises(Conflict, match="being grown"):
                kept.undo()
    kept.commit("grow")
    other.sync()
    assert texts(other.loom) == texts(kept.loom)
    assert [each.text for each in kept.loom.walk()][1:] == [top.text, delta.node.text]


def test_leave_excludes_nodes_from_commit(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "Once upon a time"))
    other = library.open(kept.name)
    grown = [delta.node for delta in kept.loom.stream(2, max_tokens=3, seed=1)]
    kept.append(grown)
    one, two = kept.loom.children
    written = kept.loom.add(" written")
    assert kept.commit("add", leave=[one, two]).added == [written]
    assert [kept.has(each) for each in (one, two, written)] == [False, False, True]
    assert kept.undo(leave=[one, two]).removed == [written.id]
    assert kept.redo(leave=[one, two]).added != []
    other.sync()
    assert [each.text for each in other.loom.children] == [" written"]
    assert kept.commit("grow", leave=[two], model="a model").added == [one]
    # The commit includes an excluded node if it has a new child.
    below = two.add(" below")
    assert kept.commit("add", leave=[two]).added == [two, below]
    other.sync()
    assert texts(other.loom) == texts(kept.loom)
    log = kept.history()
    assert [each.kind for each in log] == ["add", "grow", "add", "create"]
    assert [each.model for each in log[1:]] == ["a model", None, None]
    assert log[0].model  # the loom's: something of it was grown


def test_undo_of_running_group_raises_conflict(library: Library) -> None:
    kept = story(library)
    kept.loom.add("x")
    kept.commit("run", act="a1")
    with pytest.raises(Conflict, match="still running"):
        kept.undo(running={"a1", "a2"})
    assert kept.undo(running={"a2"}).removed


def test_undo_of_other_process_group_waits_for_its_close(library: Library) -> None:
    """Only the process that named the group can undo it; the name contains the process id."""
    name = story(library).name
    with Library(library.database.name) as elsewhere:
        theirs = elsewhere.open(name)
        act = theirs.new_act()
        for text in "xy":
            theirs.loom.add(text)
            theirs.commit("run", act=act)
        ours = library.open(name)
        with pytest.raises(Conflict, match="still running"):
            ours.undo()
        assert len(theirs.undo().removed) == 2
        assert len(theirs.redo().added) == 2
    assert len(ours.undo().removed) == 2


def test_undo_reports_changes_merged_first(library: Library) -> None:
    kept, other = (saved := story(library)), library.open(saved.name)
    other.loom.add("theirs")
    other.commit("add")
    kept.loom.add("mine")
    change = kept.undo()
    assert change.others is not None
    assert [each.text for each in change.others.added] == ["theirs", "mine"]
    assert len(change.removed) == 1


def test_changed_prompt_is_merged_and_undone(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "One thing"))
    other = library.open(kept.name, lm)
    kept.loom.tokens, kept.loom.user_prompt = Loom(lm, "Another").tokens, "Another"
    kept.commit("edit")
    other.loom.add(" x")
    other.commit("add")
    assert other.loom.user_prompt == "Another"
    assert library.row(kept.name).prompt == "Another"
    kept.undo()
    kept.undo()
    assert kept.loom.user_prompt == "One thing"
    other.sync()
    assert other.loom.user_prompt == "One thing"
    assert library.row(kept.name).prompt == "One thing"
    kept.redo()
    assert library.open(kept.name).loom.user_prompt == "Another"
    kept.loom.user_prompt = "wrong"
    assert kept.is_changed()
    kept.revert()
    assert not kept.is_changed()
    assert kept.loom.user_prompt == "Another"


def test_revert_restores_unsavable_meta(library: Library, lm: weft.LM) -> None:
    kept = library.create(Loom(lm, "One thing"))
    kept.loom.meta["x"] = float("nan")
    with pytest.raises(ConfigError, match="meta"):
        kept.commit("edit")
    assert kept.is_changed()
    kept.revert()
    assert "x" not in kept.loom.meta
    assert not kept.commit("edit")


def test_redo_restores_ancestors(library: Library) -> None:
    """Another process has removed the parent after the undo."""
    kept = story(library)
    node(kept, "d").add("e")
    kept.commit("add")
    other = library.open(kept.name)
    kept.undo()
    rows = library.nodes(kept.name)
    numbers = {row.text: row.number for row in rows}

    def remove_above(connection: sa.Connection) -> None:
        """Mark nodes as removed as the undo of an older Weft did."""
        set_removed(connection, kept._key, [numbers["c"], numbers["d"]], 50, removed=True)
        touch(connection, kept._key, rev=50)

    library.database.write(remove_above)
    kept.sync()
    assert [loom.text for loom in kept.loom.walk()][1:] == ["a", "b"]
    assert [loom.text for loom in kept.redo().added] == ["c", "d", "e"]
    other.sync()
    for loom in (kept.loom, other.loom, library.open(kept.name).loom):
        assert [one.text for one in loom.walk()][1:] == ["a", "c", "d", "e", "b"]
    assert library.row(kept.name).n_nodes == 6


def test_undo_keeps_nodes_added_concurrently_below(
    library: Library,
) -> None:
    kept = story(library)
    key = operation_of(kept, "x")
    child = node(kept, "x").add("y")
    kept.commit("add")

    def undo(connection: sa.Connection) -> None:
        """As one who had looked what is the last before that."""
        row = connection.execute(sa.select(looms).where(looms.c.id == kept.id)).one()
        apply(connection, row, key, "done")

    library.database.write(undo)
    kept.sync()
    assert child in kept.loom.walk()
    assert [each.text for each in library.open(kept.name).loom.walk()][1:] == [*"acdbxy"]


def operation_of(kept: StoredLoom, text: str) -> int:
    """Add a node; return the key of its operation."""
    kept.loom.add(text)
    kept.commit("add")
    return kept.history(1)[0].key


def test_missing_sampling_parameters_raise(tmp_path: Path, lm: weft.LM) -> None:
    file = tmp_path / "weft.db"
    with Library(f"sqlite:///{file}") as library:
        kept = library.create(Loom(lm, "Once upon a time"))
        kept.loom.grow(1, max_tokens=2, seed=1)
        kept.commit("grow")
        with closing(sqlite3.connect(file)) as broken:  # which minds no foreign keys
            broken.execute("DELETE FROM sampling")
            broken.commit()
    with Library(f"sqlite:///{file}") as library:
        with pytest.raises(StoreError, match="the database is broken"):
            library.open(kept.name)


@pytest.mark.parametrize(
    "change",
    [
        "sampling SET data = replace(data, '{', '[')",
        "sampling SET data = replace(data, 'temperature', 'temperaturf')",
        "nodes SET lineage = '[0,'",
        "nodes SET stop_string = 'no JSON'",
        "nodes SET meta = '{'",
        "nodes SET score = 'x'",
        "nodes SET logprobs = x'00ff'",
        "nodes SET tokens = x'00ff'",
    ],
)
def test_invalid_column_raises_store_error(tmp_path: Path, lm: weft.LM, change: str) -> None:
    file = tmp_path / "weft.db"
    with Library(f"sqlite:///{file}") as library:
        kept = library.create(Loom(lm, "Once upon a time"))
        kept.loom.grow(1, max_tokens=2, seed=1, temperature=0.5)
        kept.commit("grow")
    with closing(sqlite3.connect(file)) as broken:
        broken.execute(f"UPDATE {change}")
        broken.commit()
    with Library(f"sqlite:///{file}") as library:
        with pytest.raises(StoreError, match="the database is broken"):
            library.open(kept.name)
