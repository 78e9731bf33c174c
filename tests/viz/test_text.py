"""Laws of the drawing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from weft.loom import Loom
from weft.viz import draw
from weft.viz.text import ASCII
from written_looms import open_written


@pytest.fixture
def loom(tmp_path: Path) -> Loom:
    return open_written(tmp_path / "x.loom.json", [None, 0, 1, 1, 0, 0, 5])


def test_drawing_of_a_tree_equals_the_expected_lines(loom: Loom) -> None:
    loom.find("n2").logprobs = [0.0, 0.0]
    loom.find("n3").terminal = True
    loom.find("n6").finish_reason = "length"
    loom.find("n6").score = 0.125
    assert str(loom).splitlines() == [
        "t0   2 tok",
        "├── t1   2 tok",
        "│   ├── t2   2 tok · p 1.00",
        "│   └── t3   2 tok · end",
        "├── t4   2 tok",
        "└── t5   2 tok",
        "    └── t6   2 tok · score 0.125 · length",
    ]


def test_node_and_edge_functions_replace_the_text_and_label_the_lines(loom: Loom) -> None:
    out = io.StringIO()
    loom.show(node=lambda n: n.id, edge=lambda n: f"[{len(n.children)}]", file=out)
    assert out.getvalue().splitlines() == [
        "n0",
        "├── [2] n1",
        "│   ├── [0] n2",
        "│   └── [0] n3",
        "├── [0] n4",
        "└── [1] n5",
        "    └── [0] n6",
    ]


def test_equal_leaves_are_one_line_and_inner_nodes_keep_their_own(loom: Loom) -> None:
    for node in ("n2", "n3", "n4", "n5"):
        loom.find(node)._text = "same"
    assert [line.partition("  2 tok")[0].partition("  ×")[0].rstrip() for line in draw(loom)] == [
        "t0",
        "├── t1",
        "│   └── same",
        "├── same",
        "└── same",
        "    └── t6",
    ]
    assert "│   └── same  ×2 · 2 tok" in list(draw(loom))
    assert "|   `-- same  x2 , 2 tok" in list(draw(loom, style=ASCII))
    assert list(draw(loom, limit=3))[-1] == "… 3 more nodes"  # of seven, one line is two
    # Different labels keep them separate.
    assert len(list(draw(loom, node=lambda node: node.id))) == 7


def test_lines_fit_the_width_even_with_wide_characters(loom: Loom) -> None:
    from rich.cells import cell_len

    for text in ("word " * 100, "漢字" * 100):
        loom.find("n3")._text = text
        for width in (60, 80, 133):
            assert all(cell_len(line) <= width for line in draw(loom, width=width))


def test_model_text_cannot_move_the_cursor_or_add_markup(loom: Loom) -> None:
    loom.find("n3")._text = "\x1b[2J<script>\r\nx\u202e[red]"
    shown = str(loom)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\\x1b[2J<script>\\r⏎x\\u202e[red]" in shown
    assert "<script>" not in loom._repr_html_()
    assert "&lt;script&gt;" in loom._repr_html_()


def test_stream_that_cannot_encode_lines_gets_ascii(loom: Loom) -> None:
    raw = io.BytesIO()
    loom.find("n3")._text = "Ω"
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    loom.show(file=out)
    text = raw.getvalue().decode("ascii")
    assert "|-- t1" in text
    assert "`-- \\u03a9" in text


def test_terminal_gets_colours_and_the_same_text(loom: Loom) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    out = Terminal()
    loom.find("n2").logprobs = [0.0, 0.0]
    loom.show(file=out, limit=3)
    assert "n2" not in out.getvalue()
    assert "t2" in out.getvalue()
    assert "4 more nodes" in out.getvalue()


def test_limit_counts_the_rest(loom: Loom) -> None:
    assert list(draw(loom, limit=2, style=ASCII)) == [
        "t0   2 tok",
        "|-- t1   2 tok",
        "... 5 more nodes",
    ]


def test_deep_lines_show_their_depth_instead_of_running_off_the_width(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "deep.loom.json", [None, *range(299)])
    lines = str(loom).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("⋯299 ")
