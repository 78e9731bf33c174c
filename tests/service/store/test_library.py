"""Library: create, list, rename, remove and restore looms; the last loom of each terminal."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from weft.errors import ConfigError, StoreError
from weft.loom import Loom
from weft.service.store.library import Library, NameTaken, name_from_prompt
from weft.service.store.metadata import LoomMetadata
from weft.service.store.tables import looms


def keep(library: Library, prompt: str, name: str | None = None) -> str:
    return library.create(Loom(None, prompt), name=name).name


def names(library: Library, **more: object) -> list[str]:
    return [row.name for row in library.looms(**more)]  # type: ignore[arg-type]


def test_create_derives_unused_name_from_prompt(library: Library) -> None:
    derived = [keep(library, "Tell me a story about a fox.") for _ in range(3)]
    assert derived == ["tell-story-about-fox", "tell-story-about-fox.2", "tell-story-about-fox.3"]
    assert keep(library, "12") == "loom-12"
    assert keep(library, "\0\ud800?") == "loom"
    assert keep(library, "con") == "loom-con"
    assert keep(library, "x", "My own. Name") == "My own. Name"


def test_unused_name_after_20_equal_prompts_needs_few_queries(library: Library) -> None:
    for _ in range(20):
        keep(library, "fox")
    statements: list[str] = []

    def count(conn, cursor, statement, *_) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        assert keep(library, "fox") == "fox.21"
        n_equal = len(statements)
        assert keep(library, "owl") == "owl"
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)
    assert n_equal == len(statements) - n_equal + 2


def test_name_of_a_renamed_loom_is_used_next(library: Library) -> None:
    for _ in range(12):
        keep(library, "fox")
    library.rename("fox.11", "owl")
    assert [keep(library, "fox"), keep(library, "fox")] == ["fox.11", "fox.13"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("नमस्ते दुनिया", "नमस्ते-दुनिया"),
        ("สวัสดีชาวโลก", "สวัสดีชาวโลก"),
        ("a\u0301 cafe\u0301, Straße", "á-café-straße"),
        ("\U0001f98a\ufe0f fox_trot", "fox-trot"),  # a mark without a base character is no word
        ("\u0301\u0301", "loom"),
    ],
)
def test_name_keeps_combining_marks(prompt: str, name: str) -> None:
    assert name_from_prompt(prompt) == name


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "-x", "7", "x\n", "a\\b", "x" * 300, "\0"])
def test_invalid_name_raises(library: Library, name: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        library.create(Loom(None, "x"), name=name)
    kept = keep(library, "x")
    with pytest.raises(ConfigError, match="no name"):
        library.rename(kept, name)


def test_looms_are_sorted_by_change_and_paged(library: Library) -> None:
    for prompt in ("ant", "bee", "cat", "100% dog_"):
        keep(library, prompt)
    assert names(library) == ["100-dog", "cat", "bee", "ant"]
    kept = library.open("ant")
    kept.loom.add("x")
    kept.commit("add")
    assert names(library, limit=2) == ["ant", "100-dog"]
    assert names(library, limit=2, after="100-dog") == ["cat", "bee"]
    assert names(library, search="A") == ["ant", "cat"]
    assert names(library, search="0% dog_") == ["100-dog"]
    keep(library, "ÉTUDE")
    assert names(library, search="étu") == ["étude"]
    assert names(library, search="%") == ["100-dog"]
    row = library.row("ant")
    assert (row.n_nodes, row.rev, row.prompt, row.model) == (2, 2, "ant", "no model")
    with pytest.raises(ConfigError, match="no loom 'none'"):
        library.looms(after="none")


def test_unknown_name_error_names_similar_looms(library: Library) -> None:
    with pytest.raises(ConfigError, match="there is none yet"):
        library.open("fox")
    keep(library, "fox and dog")
    with pytest.raises(ConfigError, match="near it: fox-dog"):
        library.open("fox-dig")
    for odd in ("\0", "\ud800", "x" * 100_000, ""):
        with pytest.raises(ConfigError, match="there is no loom"):
            library.open(odd)


def test_rename_keeps_the_loom_id(library: Library) -> None:
    keep(library, "ant")
    kept = library.open("ant")
    keep(library, "bee")
    assert library.rename("ant", "emmet").id == kept.id
    kept.sync()
    assert kept.name == "emmet"
    assert library.open(kept.id).name == "emmet"
    with pytest.raises(ConfigError, match="already"):
        library.rename("emmet", "bee")
    with pytest.raises(ConfigError, match="already"):
        keep(library, "x", "bee")
    assert library.rename("emmet", "emmet").name == "emmet"


def test_restore_returns_looms_of_last_removal(library: Library) -> None:
    ant, bee, cat = (library.create(Loom(None, each)) for each in ("ant", "bee", "cat"))
    ant.loom.add("leg")
    ant.commit("add")
    library.remove("cat")
    library.remove(["ant", "bee", "ant"])
    assert names(library) == []
    assert [row.name for row in library.removed()] == ["bee", "ant", "cat"]
    for key in ("ant", ant.id):
        with pytest.raises(StoreError, match="removed"):
            library.open(key)
    keep(library, "another ant", "ant")
    back = library.restore()
    assert [(row.name, row.id) for row in back] == [("ant.2", ant.id), ("bee", bee.id)]
    restored = library.open("ant.2")
    assert [restored.number(node) for node in restored.loom.walk()] == [0, 1]
    assert [node.id for node in restored.loom.walk()] == [node.id for node in ant.loom.walk()]
    assert restored.undo().removed == [ant.loom.children[0].id]
    assert [row.id for row in library.restore()] == [cat.id]
    with pytest.raises(StoreError, match="no loom is removed"):
        library.restore()


def titles(library: Library, **more: object) -> list[tuple[str, str]]:
    return [(row.name, row.title) for row in library.looms(**more)]  # type: ignore[arg-type]


def test_title_is_stored_as_typed_and_names_the_loom(library: Library) -> None:
    kept = library.create(Loom(None, "x"), title="My story: part two!")
    assert (kept.name, kept.title) == ("story-part-two", "My story: part two!")
    assert library.create(Loom(None, "x"), title="My story: part two!").name == "story-part-two.2"
    kept.loom.add("leg")
    kept.commit("add")
    kept.undo()
    assert library.open(kept.id).title == library.row(kept.id).title == "My story: part two!"
    library.remove(kept.id)
    assert library.restore()[0].title == "My story: part two!"
    both = library.create(Loom(None, "x"), name="short", title="Élan 👨‍👩‍👧 “100 %”")
    assert titles(library, search="“100 %")[0] == (both.name, "Élan 👨‍👩‍👧 “100 %”")
    assert titles(library, search=": PART")[0][0] == "story-part-two"
    assert titles(library, search="title") == []


def test_title_without_a_choice_is_the_beginning_of_the_prompt(library: Library) -> None:
    assert library.create(Loom(None, "Tell me\n\ta story.")).title == "Tell me a story."
    long = library.create(Loom(None, "one two three " * 50)).title
    assert long == "one two three one two three one two three one two three one…"
    assert library.create(Loom(None, "x" * 100)).title == "x" * 59 + "…"
    assert library.create(Loom(None, "\0\ud800")).title == ""
    assert library.create(Loom(None, "a fox"), name="foxes").title == ""


def test_rename_with_title_derives_the_name(library: Library) -> None:
    kept, other = (library.create(Loom(None, each)) for each in ("ant", "bee"))
    row = library.rename(kept.id, title="A Bee!")
    assert (row.name, row.title) == ("bee.2", "A Bee!")
    assert library.rename(kept.id, title="Bee?").name == "bee.2"
    assert library.rename(kept.id, title="Bee?").name == "bee.2"
    assert library.rename(kept.id, "insect")[1] == "insect"
    kept.sync()
    assert (kept.name, kept.title) == ("insect", "Bee?")
    kept.loom.add("leg")
    library.rename(kept.id, title="Wasp")
    kept.commit("add")  # a commit keeps the title that another process has set
    assert library.row("wasp").title == "Wasp"
    assert library.rename("wasp", title="")[1] == "wasp"
    assert library.row("wasp").title == ""
    assert (other.title, library.rename("bee", "hive").title) == ("bee", "")
    with pytest.raises(NameTaken, match="already"):
        library.rename("hive", "wasp", title="x")


@pytest.mark.parametrize("title", [" ", "a\nb", "x" * 201, "\ud800", "\0"])
def test_invalid_title_raises(library: Library, title: str) -> None:
    with pytest.raises(ConfigError, match="title is"):
        library.create(Loom(None, "x"), title=title)
    kept = keep(library, "x")
    with pytest.raises(ConfigError, match="title is"):
        library.rename(kept, title=title)


def test_loom_of_an_older_version_has_no_title(library: Library) -> None:
    kept = library.create(Loom(None, "ant"))

    def write_old_head(connection: Connection) -> None:
        head = LoomMetadata.from_loom(kept.loom)._replace(title="").to_json()
        assert len(json.loads(head)) == 7
        connection.execute(sa.update(looms).values(head=head))

    library.database.write(write_old_head)
    assert library.row("ant").title == library.open("ant").title == ""
    rev = library.open("ant").commit("edit").rev
    assert rev == kept.rev
    assert library.rename("ant", title="Ant").title == "Ant"


def test_remove_with_unknown_name_removes_nothing(library: Library) -> None:
    keep(library, "ant")
    with pytest.raises(ConfigError, match="no loom 'bee'"):
        library.remove(["ant", "bee"])
    assert names(library) == ["ant"]


def test_purged_loom_raises_on_commit(library: Library) -> None:
    kept = library.create(Loom(None, "ant"))
    keep(library, "bee")
    library.remove(["ant", "bee"])
    kept.loom.add("leg")
    kept.commit("add")  # the loom can still be restored
    assert library.purge(["bee"]) == 1
    assert library.purge() == 1
    assert library.removed() == []
    kept.loom.add("leg")
    with pytest.raises(StoreError, match="not in the database any more"):
        kept.commit("add")
    recreated = library.create(kept.loom)
    assert [node.text for node in library.open(recreated.name).loom.walk()] == ["ant", "leg", "leg"]


def test_last_loom_is_stored_per_terminal(library: Library) -> None:
    keep(library, "ant")
    assert library.last_loom("one") is None
    last = library.last_loom_anywhere()
    assert last is not None
    assert last.loom == "ant"
    library.set_last_loom("one", "ant", 3)
    keep(library, "bee")
    library.set_last_loom("two", "bee")
    assert library.last_loom("one") == ("ant", 3)
    assert library.last_loom("two") == ("bee", 0)
    assert library.last_loom_anywhere() == ("bee", 0)
    library.set_last_loom("one", "ant", 5)
    assert library.last_loom_anywhere() == ("ant", 5)
    library.rename("ant", "emmet")
    assert library.last_loom("one") == ("emmet", 5)
    library.remove("emmet")
    assert library.last_loom("one") is None
    assert library.last_loom("") is None
    library.restore()
    assert library.last_loom("one") == ("emmet", 5)
    for index in range(300):
        library.set_last_loom(f"tab {index}", "bee", index)
    assert library.last_loom("one") is None
    assert library.last_loom("tab 299") == ("bee", 299)


def test_nodes_returns_pages_without_opening(library: Library) -> None:
    loom = Loom(None, "root")
    for name in "abc":
        child = loom.add(name)
        for n in range(3):
            child.add(f"{name}{n}")
    kept = library.create(loom)
    kept.bookmark(loom.children[0], "here")
    everything = library.nodes(kept.name)
    assert [row.text for row in everything] == [node.text for node in loom.walk()]
    assert [row.number for row in everything] == list(range(13))
    assert everything[0]._replace(text="") == everything[0]._replace(text="")
    assert (everything[1].parent, everything[1].n_children, everything[1].bookmark) == (
        0,
        3,
        "here",
    )
    assert [row.number for row in kept.nodes(limit=4, after=2)] == [3, 4, 5, 6]
    assert [row.text for row in kept.nodes(depth=1)] == ["root", "a", "b", "c"]
    assert [row.text for row in kept.nodes(under=5)] == ["b", "b0", "b1", "b2"]
    assert [row.text for row in kept.nodes(under=everything[5].id, depth=0)] == ["b"]
    rev = kept.rev
    loom.children[1].remove()
    loom.add("d")
    kept.commit("edit")
    news = kept.nodes(since=rev)
    assert [(row.text, row.is_removed) for row in news] == [
        ("b", True), ("b0", True), ("b1", True), ("b2", True), ("d", False)
    ]  # fmt: skip
    assert len(kept.nodes()) == 10
    for wrong in ({"under": 5}, {"under": 99}, {"under": "x"}, {"limit": 0}, {"depth": -1}):
        with pytest.raises(ConfigError):
            kept.nodes(**wrong)  # type: ignore[arg-type]


def test_library_closes_twice_and_is_thread_safe(library: Library) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        derived = list(pool.map(lambda n: keep(library, "same prompt"), range(24)))
    assert len(set(derived)) == 24
    library.close()
    library.close()
    assert len(library.looms()) == 24
