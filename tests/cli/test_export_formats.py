"""`weft export`: formats for other programs, and their options."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import weft as library
from weft import samples

SHORT = ("--max-tokens", "6", "--seed", "1")


@pytest.fixture(autouse=True)
def grown(weft, home: Path, shelves) -> None:
    """prompt → 1 2; the likelier one is the current node."""
    shelves(home, "likelier", lambda: weft("run", samples.story, "-n", "2", *SHORT))


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def test_csv_has_a_row_per_node_or_per_token(weft, tmp_path: Path) -> None:
    nodes, tokens = tmp_path / "nodes.csv", tmp_path / "tokens.csv"
    assert weft("export", str(nodes)).exit_code == 0
    assert [row["node"] for row in rows(nodes)] == ["0", "1", "2"]
    done = weft("export", str(tokens), "--format", "tokens", "--scope", "path", "--node", "2")
    assert done.exit_code == 0, done.output
    own = [row for row in rows(tokens) if row["node"] == "2"]
    assert len(own) == 6
    assert "".join(row["token"] for row in own) == rows(nodes)[2]["text"]


def test_jsonl_has_the_messages_of_a_branch_per_line(weft, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert weft("export", str(file)).exit_code == 0
    lines = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    assert [[each["role"] for each in line] for line in lines] == [["user", "assistant"]] * 2
    assert lines[0][0]["content"] == samples.story


def test_loom_exported_with_kv_opens_without_prefill(weft, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert weft("export", str(file), "--kv").exit_code == 0
    assert (tmp_path / "a.kv.safetensors").exists()
    with library.load("tiny") as lm:
        loom = library.Loom.open(file, lm)
        loom.grow(at=loom.leaves, max_tokens=2)
        assert lm.stats().prefilled == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a.jsonl", "--format", "pairs"], 2, "no siblings differ by score"),
        (["a.jsonl", "--format", "pairs", "--scope", "path"], 2, "no siblings to compare"),
        (["a.jsonl", "--format", "pairs", "--by", "love"], 2, "by is 'love'"),
        (["a.jsonl", "--by", "score"], 2, "--by is for --format pairs, not messages"),
        (["a.jsonl", "--format", "pdf"], 2, "allowed are json, text"),
        (["a.md", "--kv"], 2, "--kv is for .json, not markdown"),
    ],
)
def test_unsupported_export_option_leaves_no_file(
    weft, tmp_path: Path, monkeypatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    result = weft("export", *arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert set(tmp_path.iterdir()) == before
