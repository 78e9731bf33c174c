"""Graphviz and Mermaid: what they parse, whatever the text says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.loom import Loom
from written_looms import open_written

NASTY = 'a "b" \\n \\ <script>x</script> 1. - # ; end [x] {y} |z| `md` %% --> \x1b\u202e é 漢\n\tq'


@pytest.fixture
def loom(tmp_path: Path) -> Loom:
    loom = open_written(tmp_path / "x.loom.json", [None, 0, 1, 1, 0])
    loom.find("n3")._text = NASTY
    loom.find("n2").logprobs = [-1.0, -3.0]
    return loom


def test_dot_has_a_box_a_node_and_a_line_an_edge(loom: Loom) -> None:
    dot = loom.to_dot()
    assert len(re.findall(r"^  n\d+ \[label", dot, re.MULTILINE)) == 5
    assert re.findall(r"^  (n\d+ -> n\d+)$", dot, re.MULTILINE) == [
        "n0 -> n1",
        "n0 -> n2",
        "n1 -> n3",
        "n1 -> n4",
    ]


def test_dot_labels_end_where_they_end(loom: Loom) -> None:
    for line in loom.to_dot(node=lambda n: n.text).splitlines():
        if line.startswith("  n4"):
            assert re.fullmatch(r'  n4 \[label="(?:[^"\\]|\\.)*"\]', line), line
            assert "\x1b" not in line


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(loom: Loom) -> None:
    for text in (loom.to_dot(), loom.to_dot(node=lambda n: n.text, edge=lambda n: n.text)):
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text, capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('class="node"') == 5
        assert "&lt;script&gt;" in done.stdout


def test_node_and_edge_functions_write_the_labels(loom: Loom) -> None:
    dot = loom.to_dot(node=lambda n: n.id, edge=lambda n: f"to {n.id}")
    assert 'n1 [label="n1"]' in dot
    assert 'n0 -> n1 [label="to n1"]' in dot
    mermaid = loom.to_mermaid(node=lambda n: n.id, edge=lambda n: n.id)
    assert '  n1["n1"]\n  n0 -->|"n1"| n1\n' in mermaid


def test_mermaid_labels_hold_no_character_that_means_something(loom: Loom) -> None:
    for line in loom.to_mermaid(node=lambda n: n.text).splitlines()[1:]:
        label = re.fullmatch(r'  n\d+\["(.*)"\]', line)
        if label:
            assert re.fullmatch(r"(?:[^\W_]| |#\d+;)*", label[1]), label[1]
        else:
            assert re.fullmatch(r"  n\d+ --> n\d+", line)


def test_limit_keeps_the_nearest_nodes_and_counts_the_rest(loom: Loom) -> None:
    assert "n3" not in loom.to_dot(limit=3)
    assert "… 2 more nodes" in loom.to_dot(limit=3)
    mermaid = loom.to_mermaid(limit=3)
    assert mermaid.count("-->") == 2
    assert "2 more nodes" in mermaid
    assert "more nodes" not in loom.to_mermaid()


def test_mermaid_stays_within_what_mermaid_takes(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "wide.loom.json", [None, *[0] * 900])
    for node in loom.walk():
        node._text = "…漢<>" * 40
    for limit in (150, None, 10_000):
        text = loom.to_mermaid(limit=limit)
        assert len(text) < 50_000
        assert text.count("-->") <= 500
        assert "more nodes" in text


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_invalid_limit_raises(loom: Loom, limit: object) -> None:
    with pytest.raises(ConfigError, match="limit"):
        loom.to_dot(limit=limit)


def test_deep_trees_need_no_recursion(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "deep.loom.json", [None, *range(4999)])
    assert loom.to_dot().count("->") == 4999
    assert loom.to_html().count('class="node"') == 4999
