"""Output to terminals escapes control characters; output to files and pipes is exact."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

import weft as package
from cli.conftest import library
from weft import Loom
from weft.viz.terminal import is_printable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")

# What rich writes: colours, the cursor up, a line cleared, the cursor hidden.
OURS = re.compile(r"\x1b\[(?:\d+(?:;\d+)*)?[mAKG]|\x1b\[2K|\x1b\[\?25[lh]")
# A colour by C1, text that runs backwards, a window's title, a line that breaks elsewhere, a bell.
NASTY = "\x9b31mred\u202edrawkcab\u2066 \x1b]0;title\x07 \u2028\x85\x9d0;other\x9c end"
NAME = "bad-\x9bname\u202e"  # no loom can have it


@pytest.fixture
def shelf(home: Path) -> None:
    """One loom with control characters in its prompt, message, node and name."""
    with package.load("tiny") as lm, Loom(lm, f"Say {NASTY}") as loom:
        loom.meta["model"] = "tiny"
        (grown,) = loom.grow(1, max_tokens=3, seed=1)
        message = grown.add(f"Well {NASTY}")
        message.meta["said"] = f"Well {NASTY}"
        with library() as store:
            kept = store.create(loom, name="nasty")
            message.add(f"No {NASTY}\n{NASTY}")
            kept.commit("add")


def harmful(output: str) -> set[str]:
    """Return control sequences in terminal output that Weft does not write itself."""
    return {c for c in OURS.sub("", output) if not is_printable(c) and c not in "\r\n"}


VERBS = [
    ("tree", "nasty"),
    ("tree", "nasty", "--json"),
    ("tree", "nasty", "--top", "1"),
    ("read", "--loom", "nasty", "--json"),
    ("read", "--loom", "nasty"),
    ("ls",),
    ("ls", "--json"),
    ("next", "--loom", "nasty"),
    ("run", f"Say {NASTY}", "-n", "2", "--max-tokens", "4", "--json"),
    ("run", f"Say {NASTY}", "-n", "2", "--max-tokens", "4", "--color", "prob"),
    ("solve", f"Say {NASTY}", "--strategy", "greedy"),
    ("find", "Well"),
    ("undo", "--loom", "nasty"),
    ("redo", "--loom", "nasty"),
]


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_verbs_escape_control_characters_of_texts(shelf, weft, in_terminals, terminal: str) -> None:
    weft("tree", "nasty")
    at_the_end = [("read", "3"), ("read", "3", "--color", "prob"), ("next", "3"), ("tree",)]
    for verb, output in in_terminals([*at_the_end, *VERBS], TERM=terminal).items():
        assert harmful(output) == set(), verb
        assert "x9b" in output or "u009b" in output, output


def test_continued_chat_escapes_control_characters(shelf, weft, in_terminal) -> None:
    weft("read", "3", "--loom", "nasty")
    weft("tree", "nasty")
    typed = "/tree\nHello\n/fork 2\n\n/undo\n/quit\n"
    output = in_terminal("chat", "-c", "--max-tokens", "4", typed=typed)
    assert harmful(output) == set()
    assert "going on from" in output


MISTAKES = [
    ("tree", NAME + "x"),
    ("rm", NAME),
    ("find", NASTY, "--loom", NAME),
    ("tree", NAME + "x", "--json"),
    ("run", "hi", "-m", f"./{NASTY}"),
    ("run", "hi", "-m", f"./{NASTY}", "--json"),
    ("run", "hi", "--engine", NASTY),
    ("run", "hi", f"--{NASTY}"),
    ("run", "hi", f"--{NASTY}", "--json"),
    ("run", "hi", "--color", NASTY),
    (NASTY,),
    ("grow", NASTY, "--loom", "nasty"),
    ("export", f"{NASTY}.xyz"),
    ("run", "hi", "--json-schema", f"{NASTY}.json"),
]


def test_errors_escape_control_characters_of_arguments(shelf, in_terminals) -> None:
    for verb, output in in_terminals(MISTAKES).items():
        assert harmful(output) == set(), verb
        assert "202e" in output, output


def test_json_on_a_terminal_equals_that_in_a_file(shelf, in_terminals, weft) -> None:
    weft("tree", "nasty")
    verbs = [("read", "3", "--json"), ("tree", "--json")]
    for verb, output in in_terminals(verbs).items():
        there = json.loads(output)
        assert there == json.loads(weft(*verb).stdout)
        assert any(NASTY in each["text"] for each in there.get("nodes", there.get("path")))


def test_piped_texts_are_unchanged(shelf, weft, command) -> None:
    weft_tree = weft("tree", "nasty", "--json").stdout
    for raw in ("\x9b", "\u202e", "\u2028", "\x85"):
        assert raw in weft_tree
    read = command("read", "3", "--loom", "nasty").stdout
    assert f"No {NASTY}\n{NASTY}\n" in read


def test_logs_escape_control_characters(tmp_path: Path, in_terminal) -> None:
    model = tmp_path / "model\x9b\u202e"
    model.symlink_to(Path(package.__file__).parent / "data" / "tiny")
    few = ("-n", "1", "--max-tokens", "1", "--no-keep", "--engine", "numpy")
    output = in_terminal("run", "hi", "-m", str(model), "-v", *few)
    assert "info: cli.model: loaded " in output
    assert harmful(output) == set()


def test_completions_escape_control_characters(shelf, weft, command) -> None:
    weft("tree", "nasty")
    for typed, shell in (("weft tree ", "zsh"), ("weft read ", "fish"), ("weft rm ", "bash")):
        done = command(
            _WEFT_COMPLETE=f"complete_{shell}",
            COMP_WORDS=typed,
            COMP_CWORD="2",
            _TYPER_COMPLETE_ARGS=typed,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        assert harmful(done.stdout.replace("\t", "")) == set(), (typed, shell)


LONG = "An “owl”… " + "wept — ‘no’… × · " * 30
WIDE = [
    ("run", LONG, "-n", "3", "--max-tokens", "40", "--seed", "1"),
    ("tree",),
    ("ls",),
    ("next", "1"),
    ("next", "0"),
    ("tree", "--top", "1"),
]


@pytest.mark.programs
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_no_line_is_wider_than_the_terminal(in_terminals, encoding: str) -> None:
    """Escaped characters count with the width of their escapes."""
    for verb, output in in_terminals(WIDE, PYTHONIOENCODING=encoding).items():
        assert output.isascii() or encoding != "ascii"
        lines = OURS.sub("", output).replace("\r", "\n").partition("next: ")[0].split("\n")
        assert max(map(cell_len, lines)) <= 80, (verb, max(lines, key=cell_len))


def test_deep_tree_fits_the_width(home: Path, in_terminals) -> None:
    with package.load("tiny") as lm, Loom(lm, "Deep") as loom:
        node = loom
        for turn in range(40):
            node = node.add(f" turn {turn} of a talk that goes on … and on")
        with library() as store:
            store.create(loom, name="deep")
    for encoding in ("ascii", "utf-8"):
        (output,) = in_terminals([("tree", "deep")], PYTHONIOENCODING=encoding).values()
        lines = OURS.sub("", output).replace("\r", "").split("\n")
        assert max(map(cell_len, lines)) <= 80
        assert any("turn 39" in line for line in lines)
