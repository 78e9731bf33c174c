"""Looms that earlier versions kept as files are in the database when it is first opened."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.loom import Loom
from weft.service.store.library import Library
from written_looms import file_of, node_record, open_written


@pytest.fixture
def home(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    (folder / "looms").mkdir(parents=True)
    (folder / "removed").mkdir()
    monkeypatch.setenv("WEFT_HOME", str(folder))
    monkeypatch.setenv("WEFT_DB", url)
    return folder


def write(path: Path, parents: list[int | None], when: int) -> Loom:
    loom = open_written(path, parents)
    os.utime(path, (when, when))
    return loom


def test_old_looms_are_taken_over_with_their_numbers_and_terminals(home: Path) -> None:
    write(home / "looms/fox.loom.json", [None, 0, 0, 1], 2_000)
    write(home / "looms/dog.loom.json", [None, 0], 1_000)
    write(home / "removed/cat.loom.json", [None], 1_500)
    index = {
        "looms": {
            "fox": {"at": "n2", "numbers": ["n0", "n2", "gone", "n3", "n1"]},
            "dog": {"at": "", "numbers": ["another", "n1", "n0"]},
        },
        "terminals": {"tab": {"loom": "fox", "at": "n3"}, "old": {"loom": "none", "at": "x"}},
    }
    (home / "index.json").write_text(json.dumps(index))
    before = {path: path.read_bytes() for path in home.rglob("*.json")}
    with Library() as library:
        assert [row.name for row in library.looms()] == ["fox", "dog"]
        assert library.row("fox").changed == 2_000
        fox = library.open("fox")
        assert [fox.node(number).id for number in (0, 1, 3, 4)] == ["n0", "n2", "n3", "n1"]
        with pytest.raises(ConfigError, match="not in the loom"):
            fox.node(2)
        assert library.last("tab") == ("fox", 3)
        assert library.last("old") is None
        dog = library.open("dog")
        assert [dog.number(node) for node in dog.loom.walk()] == [0, 1]
        assert [row.name for row in library.restore()] == ["cat"]
        assert library.left() == []
    assert {path: path.read_bytes() for path in home.rglob("*.json")} == before
    with Library() as library:
        library.remove("dog")
    with Library() as library:  # once, though the file is there
        assert [row.name for row in library.looms()] == ["cat", "fox"]


def test_the_trees_are_equal_node_for_node(home: Path, tmp_path: Path) -> None:
    figures = {"logprobs": [-0.1, "-inf"], "entropies": [0.5, "nan"], "score": "inf"}
    odd = {"text": "a\0b\ud800", "meta": {"x": [1, None, "\ud800"]}, "stop_string": "\0"}
    nodes = [node_record(0, None), node_record(1, 0, **figures), node_record(2, 1, **odd)]
    (home / "looms/x.loom.json").write_text(json.dumps(file_of(nodes)))
    with Library() as library:
        library.open("x").loom.save(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["nodes"] == nodes


def test_a_broken_file_is_named_and_tried_again_when_it_has_changed(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = home / "looms/bad.loom.json"
    bad.write_text("{")
    (home / "looms/note.txt").write_text("x")
    folder, link = home / "looms/folder.loom.json", home / "looms/link.loom.json"
    folder.mkdir()
    link.symlink_to("nowhere")
    (home / "index.json").write_text("[")
    write(home / "looms/good.loom.json", [None, 0], 1_000)
    with caplog.at_level(logging.WARNING, "weft"), Library() as library:
        assert [row.name for row in library.looms()] == ["good"]
        left = library.left()
        assert len(left) == 3
        assert all(str(path) in each for path, each in zip((bad, folder, link), left, strict=True))
    assert str(bad) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "weft"), Library() as library:
        assert library.left()
    assert caplog.text == ""
    write(bad, [None], 5_000)
    folder.rmdir()
    link.unlink()
    with Library() as library:
        assert [row.name for row in library.looms()] == ["bad", "good"]
        assert library.left() == []


def test_an_explicit_database_takes_nothing_over(home: Path, url: str) -> None:
    write(home / "looms/good.loom.json", [None, 0], 1_000)
    with Library(url) as library:
        assert library.looms() == []


def test_a_name_that_is_taken_gets_another(home: Path) -> None:
    with Library() as library:
        library.create(Loom(None, "x"), name="fox")
    write(home / "looms/fox.loom.json", [None, 0], 1_000)
    with Library() as library:
        assert [row.name for row in library.looms()] == ["fox.2", "fox"]
