"""Commands at the same time: nothing is lost, and each terminal has a loom of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
import weft as package
from weft import Loom, samples
from weft.cli import kept as kept_module
from weft.cli import shelf as shelf_module
from weft.cli import shelf as terminal_module
from weft.cli.kept import Kept
from weft.cli.shelf import Shelf, terminal

SHORT = ("--max-tokens", "4", "--seed", "1")
NAME = "tell-story-about-fox"
OTHER = "what-37-58"
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only")


@pytest.fixture
def grown(weft) -> None:
    """A loom of three short branches of a story."""
    assert weft("run", samples.story, "-n", "3", *SHORT).exit_code == 0


@pytest.fixture(scope="module")
def lm() -> Iterator[package.LM]:
    with package.load("tiny") as lm:
        yield lm


@pytest.fixture
def in_terminal_named(weft, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`in_terminal_named("A", "read")`: the command, typed in that terminal."""

    def run(mark: str, *arguments: str) -> Any:
        monkeypatch.setattr(shelf_module, "terminal", lambda: mark)
        return weft(*arguments)

    return run


def told(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shape(name: str = NAME) -> list[tuple[int | None, list[int]]]:
    loom = Loom.open(Shelf().path(name))
    index = {node.id: at for at, node in enumerate(loom.walk())}
    return [(index[n.parent.id] if n.parent else None, n.tokens) for n in loom.walk()]


# One loom, many commands


def test_what_two_commands_add_is_both_there(weft, grown, lm: package.LM) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    added = mine.loom.children[1].add([5, 6])
    theirs = told(weft("grow", "1", "-n", "2", "--json", *SHORT))
    mine.save()
    assert mine.name == NAME
    nodes = {node.id for node in Loom.open(Shelf().path(NAME)).walk()}
    assert len(nodes) == 4 + 2 + 1
    assert {added.id, *(each["id"] for each in theirs["branches"])} <= nodes
    # And here it goes on with both.
    assert {node.id for node in mine.loom.walk()} == nodes
    more = mine.loom.children[0].children[0].add([7])
    mine.save()
    assert mine.name == NAME
    assert Loom.open(Shelf().path(NAME)).find(more.id).tokens == [7]


def test_numbers_that_one_command_told_are_not_given_again_by_another(
    weft, grown, lm: package.LM
) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    added = mine.loom.children[1].add([5, 6])
    assert mine.number(added) == 4
    theirs = told(weft("grow", "1", "-n", "2", "--json", *SHORT))
    assert [each["node"] for each in theirs["branches"]] == [4, 5]
    mine.save()
    assert mine.number(added) == 6
    drawn = {each["id"]: each["node"] for each in told(weft("tree", "--json"))["nodes"]}
    assert {each["id"]: each["node"] for each in theirs["branches"]}.items() <= drawn.items()
    assert drawn[added.id] == 6


def test_what_was_removed_on_one_side_is_gone_and_what_was_added_on_the_other_is_there(
    weft, grown, lm: package.LM
) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    mine.at = mine.loom.children[2]
    mine.loom.children[0].add([5, 6])
    assert weft("rm", "3").exit_code == 0
    mine.save()
    assert mine.name == NAME
    assert mine.at is mine.loom
    assert len(shape()) == 4
    mine.loom.children[1].remove()
    told(weft("grow", "1", "-n", "1", "--json", *SHORT))
    mine.save()
    assert mine.name == NAME
    assert len(shape()) == 4


@pytest.mark.parametrize("removes", ["they", "we"])
def test_what_grew_below_a_node_that_was_removed_is_kept_apart(
    weft, grown, lm: package.LM, removes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    if removes == "they":
        mine.loom.children[0].add([5, 6])
        assert weft("rm", "1").exit_code == 0
    else:
        mine.loom.children[0].remove()
        told(weft("grow", "1", "-n", "1", "--json", *SHORT))
    theirs = shape()
    mine.save()
    assert mine.name == f"{NAME}.2"
    assert shape() == theirs
    assert len(shape(f"{NAME}.2")) == (5 if removes == "they" else 3)
    assert "kept apart" in capsys.readouterr().err


def test_another_loom_under_the_same_name_is_left_alone(weft, grown, lm: package.LM) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    weft("run", samples.sum, "-n", "1")
    Shelf().path(OTHER).replace(Shelf().path(NAME))
    mine.save()
    assert mine.name == f"{NAME}.2"
    assert len(shape()) == 2


def test_a_loom_that_was_removed_meanwhile_is_kept_again(weft, grown, lm: package.LM) -> None:
    mine = Kept.open(Shelf(), NAME, lm)
    weft("rm", NAME)
    mine.save()
    assert mine.name == NAME
    assert len(shape()) == 4


MANY = """
import os, sys
import weft
from weft.cli.kept import Kept
from weft.cli.shelf import Shelf

n_processes, n_each = int(sys.argv[1]), int(sys.argv[2])
lm = weft.load("tiny")
Kept.new(weft.Loom(lm, [1, 2, 3]), "tiny", "auto").save()
(name,) = Shelf().names()
pids = []
for process in range(n_processes):
    if not (pid := os.fork()):
        try:
            for n in range(n_each):
                kept = Kept.open(Shelf(), name, lm)
                kept.loom.add([process, n]).add([9])
                kept.save()
                assert kept.name == name
                # A loom of its own, too, of a name that all want.
                Kept.new(weft.Loom(lm, [4]), "tiny", "auto").save()
            os._exit(0)
        finally:
            os._exit(1)
    pids.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
"""


@posix
@pytest.mark.parametrize(
    ("n_processes", "n_each"), [(4, 4), pytest.param(16, 40, marks=pytest.mark.slow)]
)
def test_many_processes_that_read_change_and_write_lose_nothing(
    command_environment, n_processes: int, n_each: int
) -> None:
    many = (str(n_processes), str(n_each))
    done = forks.run(MANY, *many, env=command_environment(), timeout=280)
    assert done.returncode == 0, done.stderr
    names = Shelf().names()
    assert len(names) == 1 + n_processes * n_each
    all_tokens = [
        sorted(child.tokens for child in Loom.open(Shelf().path(name)).children) for name in names
    ]
    made = sorted([process, n] for process in range(n_processes) for n in range(n_each))
    assert [each for each in all_tokens if each] == [made]
    numbers = Shelf().seen(max(names, key=lambda name: Shelf().summary(name).n_nodes)).numbers
    assert len(set(numbers)) == len(numbers) == 1 + 2 * len(made)


@posix
@pytest.mark.parametrize(
    ("n_at_once", "n_rounds"),
    [
        (3, 1),
        pytest.param(3, 8, marks=pytest.mark.slow),
        pytest.param(8, 4, marks=pytest.mark.slow),
    ],
)
def test_grows_at_the_same_time_lose_nothing(
    weft, grown, started, n_at_once: int, n_rounds: int
) -> None:
    for _ in range(n_rounds):
        running = [
            started("grow", str(1 + i % 3), "-n", "1", "--max-tokens", "2")
            for i in range(n_at_once)
        ]
        for process in running:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors.decode()
    assert Shelf().names() == [NAME]
    loom = Loom.open(Shelf().path(NAME))
    assert [len(each.children) for each in loom.children] == [
        n_rounds * len(range(i, n_at_once, 3)) for i in range(3)
    ]
    drawn = [each["node"] for each in told(weft("tree", "--json"))["nodes"]]
    assert sorted(drawn) == list(range(4 + n_at_once * n_rounds))


HOLD = """
import sys
from weft.cli.shelf import Shelf
with Shelf().locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(command_environment) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends, or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=command_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_that_is_killed_while_it_holds_the_lock_stops_nobody(
    weft, grown, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    holder.wait()
    assert weft("grow", "1", "-n", "1", *SHORT).exit_code == 0
    assert len(shape()) == 5


def test_who_waits_for_the_lock_is_told_and_then_goes_on(
    grown, started, holder: subprocess.Popen[str]
) -> None:
    waiting = started("read", "1")
    assert b"waiting for another weft command" in iter_until(waiting.stderr, b"waiting")
    assert waiting.poll() is None
    holder.communicate("")
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0


def iter_until(pipe: Any, word: bytes) -> bytes:
    for line in pipe:
        if word in line:
            return bytes(line)
    return b""


def test_where_files_cannot_be_locked_one_is_warned_and_goes_on(
    weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLock:
        def acquire(self, *_: object, **__: object) -> None:
            raise OSError(37, "No locks available")

    monkeypatch.setattr(shelf_module, "_lock", lambda folder: NoLock())
    monkeypatch.setattr(shelf_module, "_NO_LOCKS", (37,))
    result = weft("run", samples.sum, "-n", "1")
    assert result.exit_code == 0
    assert "undo each other's work: [Errno 37] No locks" in result.stderr
    assert Shelf().names() == [OTHER]


def test_an_interrupted_save_lets_go_of_the_lock(grown, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    mine = Kept.open(Shelf(), NAME)
    with monkeypatch.context() as patched:
        patched.setattr(kept_module.Kept, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            mine.save()
    with Shelf().locked():
        pass


def test_links_to_nothing_folders_and_pipes_are_no_looms(weft, grown, tmp_path: Path) -> None:
    looms = Shelf().looms
    (looms / "a.loom.json").mkdir()
    if os.name != "nt":
        (looms / "b.loom.json").symlink_to("nothing")
        os.mkfifo(looms / "c.loom.json")
    assert Shelf().names() == [NAME]
    assert weft("ls").exit_code == 0


# Terminals


def test_each_terminal_has_the_loom_drawn_last_in_it(in_terminal_named, grown) -> None:
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "2", *SHORT)
    weft("B", "run", samples.sum, "-n", "1")
    assert told(weft("A", "grow", "1", "-n", "1", "--json", *SHORT))["loom"] == f"{NAME}.2"
    assert told(weft("B", "read", "1", "--json"))["loom"] == OTHER
    assert told(weft("A", "read", "--json"))["loom"] == f"{NAME}.2"
    lines = weft("B", "ls").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == [OTHER]
    assert told(weft("A", "ls", "--json"))["last"] == f"{NAME}.2"
    # Where the reader stands is a terminal's own, numbers are the loom's.
    weft("A", "read", "1", "--loom", OTHER)
    weft("B", "read", "0")
    assert told(weft("A", "tree", "--json"))["at"] == 1
    assert told(weft("B", "tree", "--json"))["at"] == 0


def test_a_new_terminal_takes_the_loom_drawn_last_and_says_so(
    in_terminal_named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "2", *SHORT)
    weft("A", "grow", "1", "-n", "1", *SHORT)
    weft("B", "run", samples.sum, "-n", "1")
    weft("A", "read", "2")
    for verb in (
        ("read", "3"),
        ("next", "3"),
        ("grow", "3", *SHORT),
        ("tree",),
        ("export", "x.md"),
    ):
        with_own = f"new{verb[0]}"
        result = weft(with_own, *verb)
        assert result.exit_code == 0, result.output
        assert f"taking {NAME}, drawn last elsewhere; --loom takes another" in result.stderr
        if verb[0] != "export":
            assert "elsewhere" not in weft(with_own, "read", "1").stderr
    # What goes for good is never guessed.
    result = weft("C", "rm", "1")
    assert result.exit_code == 2
    assert f"--loom {NAME}" in result.stderr
    assert weft("C", "rm", "1", "--loom", NAME).exit_code == 0


def test_a_terminal_whose_loom_is_gone_gets_the_last_one_that_is_there(in_terminal_named) -> None:
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "1", *SHORT)
    weft("B", "run", samples.sum, "-n", "1")
    weft("A", "rm", OTHER)
    assert f"taking {NAME}" in weft("B", "read").stderr
    weft("A", "rm", NAME)
    assert "there is no loom yet" in weft("B", "read").stderr
    assert weft("B", "ls").exit_code == 0


def test_where_no_terminal_can_be_told_the_last_loom_is_taken_and_said(in_terminal_named) -> None:
    weft = in_terminal_named
    weft("", "run", samples.story, "-n", "1", *SHORT)
    result = weft("", "grow", "1", "-n", "1", *SHORT)
    assert result.exit_code == 0
    assert f"taking {NAME}" in result.stderr


def test_every_verb_takes_a_loom_by_name(weft, grown, tmp_path: Path) -> None:
    weft("run", samples.greeting, "-n", "1", "--seed", "1")
    for verb in (("read", "1"), ("next", "1"), ("grow", "1", "-n", "1", *SHORT), ("tree",)):
        weft("tree", samples_name())
        assert told(weft(*verb, "--loom", NAME, "--json"))["loom"] == NAME
    weft("tree", samples_name())
    out = tmp_path / "x.json"
    assert told(weft("export", str(out), "--loom", NAME, "--json"))["loom"] == NAME
    assert Loom.open(out).user_prompt == samples.story
    page = tmp_path / "x.html"
    assert told(weft("export", str(page), "--loom", NAME, "--json"))["loom"] == NAME
    made = told(weft("run", "-c", "--loom", NAME, "-n", "1", "--json", *SHORT))
    assert made["loom"] == NAME
    weft("tree", samples_name())
    said = weft("chat", "--loom", NAME, "--json", "--max-tokens", "4", stdin="And then?\n")
    assert told(said)["loom"] == NAME
    assert weft("rm", "2", "--loom", samples_name()).exit_code != 0
    assert weft("rm", "2", "--loom", NAME).exit_code == 0


def samples_name() -> str:
    return next(name for name in Shelf().names() if name != NAME)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "x", "--loom", NAME), "without -c a new one is made"),
        (("tree", NAME, "--loom", "other"), "two looms are named"),
        (("rm", NAME, "--loom", NAME), "no node is given"),
        (("read", "--loom", "tel-story-about-fox"), f"near it: {NAME}"),
    ],
)
def test_a_loom_that_has_no_meaning_is_refused(weft, grown, arguments, says: str) -> None:
    result = weft(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_nodes_of_the_loom_that_is_named_are_offered_on_tab(weft, grown) -> None:
    from typer import Context
    from typer.main import get_command

    from weft.cli import options
    from weft.cli.app import app

    weft("run", samples.sum, "-n", "1")
    context = Context(get_command(app))
    context.params = {"loom": NAME}
    assert [number for number, _ in options.complete_nodes(context, "")] == ["0", "1", "2", "3"]
    context.params = {}
    assert [number for number, _ in options.complete_nodes(context, "")] == ["0", "1"]


def test_a_file_that_is_no_loom_is_not_kept(weft, tmp_path: Path) -> None:
    file = tmp_path / "mine.loom.json"
    file.write_text("{}")
    result = weft("tree", str(file))
    assert result.exit_code == 1
    assert f"{file}: this is no saved loom" in result.stderr
    assert Shelf().names() == []


MARK = "from weft.cli.shelf import terminal; print(terminal())"


@posix
def test_a_session_is_a_terminal(command_environment) -> None:
    """Subshells, pipelines and scripts are in it; another login is another one."""

    def mark(*before: str, new: bool = False) -> str:
        done = subprocess.run(
            [*before, sys.executable, "-c", MARK],
            env=command_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            start_new_session=new,
        )
        return done.stdout.strip()

    here = terminal()
    assert len(here) == 16
    assert mark() == mark("/bin/sh", "-c", '"$0" "$@"') == here
    others = {mark(new=True), mark(new=True)}
    assert here not in others
    assert len(others) == 2


@posix
def test_a_session_outside_of_the_container_is_what_it_was_entered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader cannot be seen there: its number is 0, for all that it started."""
    # number: (parent, session, when it began); 7 entered the container, 3 began its own session.
    seen = {1: (0, 1, 5), 7: (0, 0, 50), 8: (7, 0, 60), 9: (8, 0, 70), 3: (1, 3, 6), 4: (3, 0, 7)}
    rest = " ".join("0" * 15)

    def read(file: Path) -> str:
        number = int(file.parts[2]) if file.parts[2].isdecimal() else None
        if number not in seen:
            return ""
        parent, session, began = seen[number]
        return f"{number} (a ) b) S {parent} 0 {session} {rest} {began} 0"

    def mark(process: int) -> str:
        monkeypatch.setattr(os, "getpid", lambda: process)
        return terminal()

    monkeypatch.setattr(os, "getsid", lambda pid: 0)
    monkeypatch.setattr(terminal_module, "_read", read)
    before = mark(7)
    assert mark(9) == mark(8) == before != ""
    assert mark(4) not in {before, ""}
    seen[7] = (0, 0, 51)  # the number was given again
    assert mark(9) == mark(7) not in {before, ""}
    monkeypatch.setattr(terminal_module, "_read", lambda file: "")  # a system that tells nothing
    assert mark(9) == ""


@posix
def test_a_container_that_sees_the_processes_around_it_has_no_mark_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process 2 is 70 outside, in the session of 60; outside's own 2 is none of it."""
    rest = " ".join("0" * 15)
    seen = {"2": (0, 2, 25), "60": (1, 60, 600), "70": (60, 60, 700)}

    def read(file: Path) -> str:
        number = "70" if file.parts[2] == "self" else file.parts[2]
        if number not in seen:
            return ""
        parent, session, began = seen[number]
        return f"{number} (a) S {parent} 0 {session} {rest} {began} 0"

    monkeypatch.setattr(os, "getpid", lambda: 2)
    monkeypatch.setattr(terminal_module, "_read", read)
    monkeypatch.setattr(os, "getsid", lambda pid: 0)
    inside = terminal()
    monkeypatch.setattr(os, "getsid", lambda pid: 60)
    monkeypatch.setattr(os, "getpid", lambda: 70)
    assert inside == terminal() != ""


@posix
def test_where_the_system_says_nothing_of_sessions_tabs_have_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getsid", lambda pid: 7)
    monkeypatch.setattr(terminal_module, "_read", lambda file: "")
    monkeypatch.setenv("TERM_SESSION_ID", "one")
    one = terminal()
    monkeypatch.setenv("TERM_SESSION_ID", "two")
    assert terminal() != one
