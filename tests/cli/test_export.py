"""`weft export`: texts, pages, graphs and .loom.json files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.conftest import loom_of
from weft import Loom, samples

SHORT = ("--max-tokens", "8", "--seed", "1")


@pytest.fixture(autouse=True)
def grown(weft, home: Path, shelves) -> None:
    """prompt → 1 2; 1 → 3 4, which are equal; 3 is the current node."""

    def make() -> None:
        weft("run", samples.story, "-n", "2", *SHORT)
        weft("grow", "1", "-n", "2", "--temperature", "0", *SHORT)  # two that are equal
        weft("read", "3")

    shelves(home, "equal", make)


def text_of(weft, node: int) -> str:
    return str(json.loads(weft("read", str(node), "--json").stdout)["text"])


def test_text_export_is_the_path_to_the_current_node(weft, tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    result = weft("export", str(file))
    assert result.stdout == f"wrote {file}: the path to node 3\n"
    assert file.read_text("utf-8") == f"> {samples.story}\n\n{text_of(weft, 3)}\n"


def test_export_of_a_raw_loom_is_one_text_of_prompt_and_continuation(weft, tmp_path: Path) -> None:
    weft("run", "Once upon", "--raw", "-n", "1", *SHORT)
    weft("export", str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text("utf-8") == f"Once upon{text_of(weft, 1)}\n"
    weft("export", str(tmp_path / "a.md"))
    body = (tmp_path / "a.md").read_text("utf-8").split("---\n\n", 1)[1]
    assert body.rstrip() == f"Once upon{text_of(weft, 1)}".rstrip()


def test_markdown_has_front_matter_and_one_path_or_the_tree(weft, tmp_path: Path) -> None:
    file = tmp_path / "story.md"
    weft("export", str(file), "--node", "2")
    lines = file.read_text("utf-8").splitlines()
    assert lines[:3] == ["---", f"loom: {samples.story}", "model: tiny"]
    assert f"> {samples.story}" in lines
    assert text_of(weft, 2).strip() in lines
    weft("export", str(file), "--scope", "tree", "--force")
    items = [line for line in file.read_text("utf-8").splitlines() if line.lstrip()[:2] == "- "]
    assert [len(line) - len(line.lstrip()) for line in items] == [0, 2, 4, 2]  # two are equal


def test_markdown_escapes_its_control_characters() -> None:
    from weft.service.interchange.text_export import escape_markdown

    assert escape_markdown("- *a* <b>\n# c") == "\\- \\*a\\* \\<b\\>\n\\# c"


@pytest.mark.parametrize(
    ("scope", "node", "n_nodes"), [("tree", None, 5), ("subtree", "1", 4), ("path", "3", 3)]
)
def test_json_export_opens_as_a_loom(
    weft, tmp_path: Path, scope: str, node: str | None, n_nodes
) -> None:
    file = tmp_path / "a.json"
    at = () if node is None else ("--node", node)
    assert weft("export", str(file), "--scope", scope, *at).exit_code == 0
    loom = Loom.open(file)
    assert loom.count_children() == n_nodes
    assert loom.user_prompt == samples.story


def test_text_export_of_a_tree_draws_equal_branches_once(weft, tmp_path: Path) -> None:
    weft("export", str(tmp_path / "a.txt"), "--scope", "tree")
    drawn = (tmp_path / "a.txt").read_text("utf-8")
    assert drawn.count("── ") == 3
    assert drawn.count("×2") == 1  # two that are equal
    weft("export", str(tmp_path / "a.md"), "--scope", "tree")
    listed = (tmp_path / "a.md").read_text("utf-8")
    assert listed.count("\n  - ") + listed.count("\n    - ") == 3
    assert listed.count("×2") == 1


@pytest.mark.fluent
def test_exported_children_are_in_drawing_order(weft, tmp_path: Path) -> None:
    weft("run", samples.story, "-n", "4", "--seed", "1", "--max-tokens", "16")
    starts = [text_of(weft, node).split()[0] for node in (1, 2, 3, 4)]
    assert [child.text.split()[0] for child in loom_of("tell-story-about-fox.2").children] == starts
    for suffix in ("txt", "md", "dot", "mmd", "html"):
        weft("export", str(tmp_path / f"a.{suffix}"), "--scope", "tree")
        written = (tmp_path / f"a.{suffix}").read_text("utf-8")
        places = [written.index(start) for start in starts]
        assert places == sorted(places), suffix


@pytest.mark.parametrize("scope", ["tree", "subtree"])
def test_html_export_has_the_numbers_of_the_tree(weft, tmp_path: Path, scope: str) -> None:
    weft("grow", "0", "-n", "2", *SHORT)  # 5 6, after what stands below 1 had its numbers
    at = ("--node", "1") if scope == "subtree" else ()
    weft("export", str(tmp_path / "a.html"), "--scope", scope, *at)
    page = (tmp_path / "a.html").read_text("utf-8")
    shown = re.findall(r'id="n-(\w+)"><span class="no" id="(\d+)">', page)
    drawn = json.loads(weft("tree", "--json").stdout)["nodes"]
    known = {node["id"]: node["node"] for node in drawn}
    assert [int(number) for _, number in shown] == [known[id] for id, _ in shown]
    assert [int(number) for _, number in shown] == ([1, 3, 4, 2, 5, 6] if not at else [1, 3, 4])


def test_export_leaves_the_loom_unchanged(weft, tmp_path: Path) -> None:
    before = weft("tree", "--json").stdout
    for suffix in ("txt", "md", "json"):
        weft("export", str(tmp_path / f"a.{suffix}"), "--scope", "path", "--node", "2")
    assert weft("tree", "--json").stdout == before


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("dot", "digraph"), ("mmd", "flowchart"), ("html", "<!doctype html>")],
)
def test_graph_exports_start_with_their_header(
    weft, tmp_path: Path, suffix: str, start: str
) -> None:
    result = weft("export", str(tmp_path / f"a.{suffix}"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"a.{suffix}").read_text("utf-8").startswith(start)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a.pdf"], 2, "ends in none of"),
        (["nosuch/a.md"], 2, "there is no folder nosuch"),
        (["folder.md"], 2, "is a folder"),
        (["there.md"], 1, "exists already"),
        (["a.json", "--node", "1"], 2, "cannot be used with --scope tree"),
        (["a.md", "--node", "9"], 2, "there is no node 9"),
        (["a.md", "--top", "2"], 2, "are for .html"),
        (["a.md", "--scope", "all"], 2, "'path', 'subtree', 'tree'"),
    ],
)
def test_export_mistake_has_message_and_exit_code(
    weft, tmp_path, monkeypatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "there.md").write_text("mine")
    result = weft("export", *arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert (tmp_path / "there.md").read_text() == "mine"
