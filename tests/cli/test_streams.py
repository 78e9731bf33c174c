"""Output streams: pipes, encodings, colors, lanes, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from cli.conftest import ENDLESS
from weft import samples
from weft.cli.hints import quoted
from weft.lm.results import Delta
from weft.viz.lanes import Lanes, Printer
from weft.viz.terminal import TerminalWriter

SHORT = ("run", samples.game24, "-n", "3", "--max-tokens", "12", "--seed", "1")
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal and signals")


def terminal(width: int = 60, height: int = 10) -> TerminalWriter:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    return TerminalWriter(console, True, False)


def delta_of(branch: int, text: str, end: str | None = None) -> Delta:
    return Delta(branch, None, (1,), text, (0.0,), end)  # type: ignore[arg-type]


def test_plain_output_has_no_control_characters(command) -> None:
    done = command(*SHORT)
    assert "\x1b" not in done.stdout + done.stderr


def test_results_are_on_stdout_and_advice_on_stderr(command) -> None:
    done = command(*SHORT, "--tree")
    assert "├── 1 " in done.stdout
    assert "prefilled" in done.stdout
    assert "next:" not in done.stdout
    assert done.stderr.startswith("next: weft grow ")


def test_cp1252_output_has_an_ascii_tree(command) -> None:
    done = command(*SHORT, "--tree", PYTHONIOENCODING="cp1252")
    assert done.returncode == 0
    assert "|-- 1 " in done.stdout
    assert "\n`-- " in done.stdout


@pytest.mark.programs
@pytest.mark.fluent
@pytest.mark.parametrize("verb", [(), ("doctor",), ("solve", samples.game24, "-n", "2")])
def test_every_screen_is_written_in_ascii(command, verb: tuple[str, ...]) -> None:
    done = command(*verb, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u" not in done.stdout + done.stderr
    assert "\\x" not in done.stdout + done.stderr


def test_json_is_the_only_output(command) -> None:
    done = command(*SHORT, "--json")
    assert json.loads(done.stdout)["branches"]
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("verb", [("ls",), ("--help",)])
def test_closed_pipe_writes_no_error(started, verb: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the start: a slow reader's pipe would take all of a short output
    process = started(*verb, stdout=writer)
    os.close(writer)
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_closed_pipe_keeps_generated_tokens(started, command) -> None:
    process = started("run", samples.story, "-n", "2", *ENDLESS)
    read = process.stdout.read(200).decode(errors="ignore")
    process.stdout.close()
    message = "saved as tell-story-about-fox, as far as it came"
    assert process.stderr.read().decode().strip() == message
    assert process.wait() == 1
    nodes = json.loads(command("tree", "--json").stdout)["nodes"]
    assert any(node["text"].startswith(read[:100]) for node in nodes)


@posix
@pytest.mark.programs
@pytest.mark.parametrize(("closed", "verb"), [(">&-", "ls"), ("2>&-", "ls --json"), ("<&-", "ls")])
def test_closed_streams_are_tolerated(command, closed: str, verb: str) -> None:
    command(*SHORT)
    shell = f"{sys.executable} -m weft {verb} {closed}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert (b"use-4-9-10-13" in done.stdout) == (closed != ">&-")


@pytest.mark.programs
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("verb", [(), ("--help",), ("run", samples.greeting, "--max-tokens", "2")])
def test_full_disk_error_has_no_traceback(verb: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "weft", *verb],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            check=False,
        )
    assert done.returncode == 1
    *before, error = done.stderr.splitlines()
    assert error == "weft: No space left on device"
    assert before == (["saved as hello-who-you, as far as it came"] if verb[:1] == ("run",) else [])


@posix
def test_ctrl_c_saves_partial_branches_and_exits_with_130(started) -> None:
    story = ("run", samples.story, "--tree")
    process = started(*story, "-n", "32", "--temp", "2", "--max-tokens", "1500")
    assert process.stdout.read(4) == b"[1] "
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert b"prefilled" in output
    assert errors.decode() == "interrupted: the branches are as far as they came\n"


@posix
@pytest.mark.parametrize("no_color", [False, True])
def test_terminal_shows_lanes_then_the_tree_without_clearing(in_terminal, no_color: bool) -> None:
    output = in_terminal(*SHORT, **({"NO_COLOR": "1"} if no_color else {}))
    assert "\x1b[2J" not in output
    assert "\x1b[?1049h" not in output
    assert "reading 21 tokens" in output
    assert " 1" in output
    tree = output[output.rindex("├── ") :]
    assert "prefilled" in tree
    assert ("\x1b[2m" in output) is True
    assert ("\x1b[36m" in output) is not no_color


@pytest.mark.fluent
@pytest.mark.programs
@posix
def test_output_fits_80_columns(in_terminals) -> None:
    """Lines fit, except suggested commands, which stay on one line for copying."""
    verbs = [(), ("demo",), ("solve", samples.game24, "--strategy", "greedy")]
    outputs = in_terminals(verbs)
    shown = {verb: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", outputs[verb]) for verb in verbs}
    for verb, output in shown.items():
        result = output.replace("\r", "\n").partition("next: ")[0]
        assert max(map(cell_len, result.split("\n"))) <= 80, verb
    for part in ("checked: wrong", "checked: right", "prefilled", "unshared", "next: weft"):
        assert part in shown["demo",]


def test_lanes_share_the_height_and_count_the_rest() -> None:
    few, many = Lanes(terminal(height=10), 3), Lanes(terminal(height=10), 20)
    for branch in range(20):
        many.push(delta_of(branch, "line\n" * 9, "stop" if branch > 15 else None))
    for branch in range(3):
        few.push(delta_of(branch, "line\n" * 9))
    assert [len(list(lanes._render_lanes(9))) for lanes in (few, many)] == [9, 9]
    assert "12 more branches, 4 ended" in list(many._render_lanes(9))[-1].plain


def test_lane_shows_the_end_of_its_text() -> None:
    lanes = Lanes(terminal(width=30), 1)
    lanes.push(delta_of(0, "the beginning " + "and on " * 60 + "the end"))
    shown = " ".join(line.plain for line in lanes._render_lanes(4))
    assert shown.split()[-2:] == ["the", "end"]
    assert "beginning" not in shown


def test_plain_output_writes_branches_in_order() -> None:
    file = io.StringIO()
    with Printer(TerminalWriter.for_stream(file), 3) as printer:
        for delta in (
            delta_of(1, "two"),
            delta_of(0, "one"),
            delta_of(2, "three"),
            delta_of(1, "", "stop"),
            delta_of(0, " more", "length"),
            delta_of(2, "", "stop"),
        ):
            printer.push(delta)
    assert file.getvalue() == "[1] one more\n[2] two\n[3] three\n"


def test_control_characters_are_escaped_on_a_terminal() -> None:
    assert terminal().escape("a\x1b[2Jb\n\tc") == "a\\x1b[2Jb\n\\tc"


@pytest.mark.parametrize(
    ("argument", "typed"),
    [("plain", "plain"), ("two words", '"two words"'), ("it's $5", "'it'\"'\"'s $5'"), ("", '""')],
)
def test_suggested_argument_is_quoted(argument: str, typed: str) -> None:
    assert quoted(argument) == typed


@pytest.mark.programs
def test_ctrl_c_during_imports_has_no_traceback() -> None:
    program = """
import sys
import weft.cli
class Interrupted:
    def find_spec(self, name, *_):
        if name == "weft.viz.terminal":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
weft.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@posix
def test_text_output_streams_and_ends_lines_after_ctrl_c(started) -> None:
    process = started("run", samples.story, "-n", "3", *ENDLESS)
    first = process.stdout.read(80)
    assert process.poll() is None  # the text came before its end
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert process.returncode == 130
    assert (first + rest).count(b"\n---\n") == 2
    assert rest.endswith(b"\n")
    assert b"saved as tell-story-about-fox" in errors


@posix
def test_ctrl_c_keeps_the_loom(started, command) -> None:
    process = started("run", samples.story, "--tree", "-n", "4", *ENDLESS)
    # Some steps later every branch has tokens: one that has shown none is not kept.
    assert process.stdout.read(80)[:4] == b"[1] "
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    nodes = json.loads(command("tree", "--json").stdout)["nodes"]
    assert len(nodes) == 5
    # What was cut off can be grown on.
    assert command("grow", "1", "-n", "1", "--max-tokens", "2").returncode == 0


# The verbs on a kept loom.
WALK = [
    (*SHORT, "--color", "prob"),
    ("grow", "1", "-n", "2", "--max-tokens", "12", "--seed", "1"),
    ("tree",),
    ("read", "1", "--color", "entropy"),
    ("next", "1"),
    ("ls",),
    ("models",),
]


def test_every_verb_on_a_loom_is_written_in_ascii(commands) -> None:
    done = commands(WALK, PYTHONIOENCODING="ascii")
    written = done.stdout + done.stderr
    assert "1 loom" in written or "nodes" in written
    assert written.isascii()
    assert "\\u" not in written
    assert "\\x" not in written


@posix
def test_every_verb_on_a_loom_fits_80_columns(in_terminals) -> None:
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(in_terminals(WALK).values()))
    lines = output.replace("\r", "\n").split("\n")
    ours = [line for line in lines if "weft " not in line]
    assert max(map(cell_len, ours)) <= 80


def test_long_prompt_shows_prefill_progress() -> None:
    read = 0
    lanes = Lanes(terminal(), 2, lambda: f"reading 2000 tokens, {read // 20} % …")
    assert "0 %" in str(lanes._render().renderables[0])
    read = 1024
    assert "51 %" in str(lanes._render().renderables[0])
    lanes.push(delta_of(0, "one"))
    lanes.push(delta_of(1, "two", "stop"))
    *_, progress = lanes._render().renderables
    assert "2 tokens" in str(progress)
    assert "1 of 2 ended" in str(progress)
