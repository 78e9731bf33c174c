"""Concurrent commands lose nothing; each terminal has its own last loom."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError

import weft as package
from cli.conftest import ENDLESS, loom_of, names, stored_loom
from durable import wait_durable
from weft import Loom, samples
from weft.cli import local_backend
from weft.cli import terminal as terminal_module
from weft.cli.terminal import terminal
from weft.errors import ConfigError, ForwardError, StoreError
from weft.search.strategies import STRATEGIES
from weft.service.store import Library, StoredLoom, database

SHORT = ("--max-tokens", "4", "--seed", "1")
HOT = ("--temperature", "100", "--seed", "6")
NAME = "tell-story-about-fox"
OTHER = "what-37-58"
pytestmark = pytest.mark.programs
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only")


@pytest.fixture
def grown(weft, home: Path, shelves) -> None:
    """A loom with three short branches of a story."""
    shelves(home, "three shorter", lambda: weft("run", samples.story, "-n", "3", *SHORT))


@pytest.fixture
def in_terminal_named(weft, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`in_terminal_named("A", "read")`: run a command in that terminal."""

    def run(mark: str, *arguments: str) -> Any:
        monkeypatch.setattr(local_backend, "terminal", lambda: mark)
        return weft(*arguments)

    return run


def output_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# One loom, many commands


@posix
@pytest.mark.parametrize(
    ("n_at_once", "n_rounds"),
    [
        (3, 1),
        (8, 1),
        pytest.param(8, 8, marks=pytest.mark.slow),
    ],
)
def test_concurrent_grows_save_all_branches(
    weft, grown, started, n_at_once: int, n_rounds: int
) -> None:
    reported: dict[int, str] = {}
    for _ in range(n_rounds):
        few = ("-n", "2", "--max-tokens", "2", "--json")
        running = [started("grow", str(1 + i % 3), *few) for i in range(n_at_once)]
        for process in running:
            output, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
            for branch in json.loads(output)["branches"]:
                assert branch["node"] not in reported
                reported[branch["node"]] = branch["id"]
    assert names() == [NAME]
    assert [len(each.children) for each in loom_of(NAME).children] == [
        2 * n_rounds * len(range(i, n_at_once, 3)) for i in range(3)
    ]
    drawn = {each["node"]: each["id"] for each in output_of(weft("tree", "--json"))["nodes"]}
    assert sorted(drawn) == list(range(4 + 2 * n_at_once * n_rounds))
    assert reported.items() <= drawn.items()


@posix
def test_concurrent_runs_get_different_names(weft, started) -> None:
    running = [started("run", samples.sum, "-n", "1", "--max-tokens", "2") for _ in range(4)]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    assert sorted(names()) == [OTHER, *(f"{OTHER}.{n}" for n in (2, 3, 4))]


@posix
@pytest.mark.parametrize(
    "n_times",
    [
        1,
        3,
        pytest.param(50, marks=pytest.mark.slow),
    ],
)
def test_killed_command_keeps_tokens_older_than_a_second(weft, grown, started, n_times) -> None:
    for round_ in range(n_times):
        n_before = loom_of(NAME).count_children()
        process = started("grow", "0", "--tree", "-n", "4", *ENDLESS)
        assert process.stdout.read(4).startswith(b"[")
        wait_durable(NAME, 4)
        time.sleep((round_ % 5) / 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        loom = loom_of(NAME)
        new = [node for node in loom.children if node.finish_reason == "interrupted"]
        assert loom.count_children() == n_before + 4
        assert len(new) == 4 * (round_ + 1)
        assert all(node.tokens and len(node.tokens) == len(node.logprobs) for node in new[-4:])
    assert weft("grow", str(stored_loom(NAME).number(new[-1])), "-n", "1", *SHORT).exit_code == 0


@posix
def test_killed_run_leaves_its_loom(weft, started) -> None:
    process = started("run", samples.story, "--tree", "-n", "3", *ENDLESS)
    assert process.stdout.read(4) == b"[1] "
    wait_durable(NAME, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reasons = [node.finish_reason for node in loom_of(NAME).children]
    assert reasons == ["interrupted"] * 3
    assert "interrupted" in weft("tree", NAME).stdout


@posix
def test_killed_search_keeps_tokens_older_than_a_second(weft, started) -> None:
    """Also during its first round; undo removes all its nodes."""
    process = started("solve", samples.sum, "--strategy", "best-of-n", "-n", "64", *HOT)
    stop_where(process, OTHER, lambda rows: sum(row.n_tokens > 0 for row in rows) >= 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    loom = loom_of(OTHER)
    assert [node.finish_reason for node in loom.children].count("interrupted") > 0
    assert len(loom.children) >= 60
    assert all(node.tokens and len(node.tokens) == len(node.logprobs) for node in loom.children)
    assert weft("undo", "--loom", OTHER).exit_code == 0
    assert numbers(weft) == [0]


@posix
def test_undo_of_killed_search_removes_all_its_nodes(weft, started) -> None:
    process = started("solve", samples.story, "--strategy", "smc", "-n", "64", *HOT)
    stop_where(process, NAME, is_in_a_later_round)
    process.send_signal(signal.SIGKILL)
    process.wait()
    grown = numbers(weft)[1:]
    assert len(grown) > 64
    assert output_of(weft("undo", "--json"))["removed"] == grown
    assert numbers(weft) == [0]


def is_in_a_later_round(rows: list[Any]) -> bool:
    """Return True if some nodes are finished and others in progress have tokens."""
    return any(not row.is_growing for row in rows) and any(
        row.is_growing and row.n_tokens for row in rows
    )


def stop_where(process: Any, name: str, is_there: Callable[[list[Any]], bool]) -> None:
    """Stop a process once the loom's nodes satisfy a condition, checked between short runs."""
    with closing(Library()) as library:
        while True:
            process.send_signal(signal.SIGSTOP)
            rows = []
            with suppress(ConfigError):  # it is not there yet
                rows = list(library.open(name).nodes(after=0, limit=1000))
            if is_there(rows):
                return
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
            assert process.poll() is None


@pytest.mark.fluent
def test_failed_search_saves_its_partial_tree(weft, monkeypatch) -> None:
    room = ("--kv-budget", "100KB")
    failed = weft("solve", samples.sum, "--strategy", "best-of-n", "-n", "64", *room)
    assert failed.exit_code == 4, failed.output
    assert names() == []
    levels = []

    def fails(level: object) -> None:
        levels.append(level)
        if len(levels) == 2:
            raise ForwardError("the model is gone")

    module = importlib.import_module("weft.cli.solve")
    monkeypatch.setattr(module, "run_with_display", lambda out, loom, work: work(fails))
    failed = weft("solve", samples.game24, "-b", "2", "-n", "2", "--seed", "1")
    assert failed.exit_code == 1, failed.output
    assert "the partial tree is saved as use-4-9-10-13" in failed.stderr
    loom = loom_of("use-4-9-10-13")
    assert "interrupted" not in [node.finish_reason for node in loom.walk()]
    grown = numbers(weft)[1:]
    assert output_of(weft("undo", "--json"))["removed"] == grown


def test_solve_returns_the_same_as_the_library(weft) -> None:
    """The command saves while growing; the result is the same."""
    few = {"budget_tokens": 300, "seed": 3}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in few.items()]
    for strategy in STRATEGIES.values():
        output = output_of(
            weft("solve", samples.game24, "--strategy", strategy.name, *options, "--json")
        )
        with package.load("tiny") as lm:
            result = strategy.run(lm, samples.game24, **few)
            assert output["cost"]["tokens"] == result.cost.tokens, strategy.name
            assert output["path"][-1]["text"] == result.best.text, strategy.name
            # The order of siblings differs.
            kept = sorted(node.tokens for node in loom_of(output["loom"]).walk())
            assert kept == sorted(node.tokens for node in result.loom.walk()), strategy.name


def test_command_waits_for_a_locked_database(
    weft, grown, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite rejects the command's first eight writes, because another writer has the lock."""
    begin, rejected = database._begin_transaction, []
    path = home / "weft.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:

        def begin_while_locked(connection: Connection) -> None:
            if len(rejected) == 8 or not connection.get_execution_options().get("weft_writes"):
                begin(connection)
                return
            other.execute("BEGIN IMMEDIATE")
            connection.exec_driver_sql("PRAGMA busy_timeout = 0")  # else SQLite itself waits
            try:
                begin(connection)
            except OperationalError as error:
                rejected.append(str(error.orig))
                raise
            finally:
                connection.exec_driver_sql("PRAGMA busy_timeout = 5000")
                other.execute("COMMIT")

        monkeypatch.setattr(database, "_begin_transaction", begin_while_locked)
        assert weft("grow", "1", "-n", "1", "--max-tokens", "2").exit_code == 0
    assert rejected == 8 * ["database is locked"]
    assert loom_of(NAME).count_children() == 5


def test_nodes_grown_below_a_removed_node_stay(weft, grown, started) -> None:
    process = started("grow", "1", "--tree", "-n", "1", *ENDLESS)
    assert process.stdout.read(4).startswith(b"[")
    assert weft("rm", "1").exit_code == 0
    process.send_signal(signal.SIGINT)
    process.communicate()
    loom = loom_of(NAME)
    assert [len(node.children) for node in loom.children] == [1, 0, 0]


# Undo and redo


def numbers(weft) -> list[int]:
    return sorted(each["node"] for each in output_of(weft("tree", "--json"))["nodes"])


def test_undo_and_redo_report_each_operation(weft, grown) -> None:
    weft("grow", "1", "-n", "2", *SHORT)
    weft("rm", "2", "4")
    assert numbers(weft) == [0, 1, 3, 5]
    result = weft("undo")
    assert result.stdout.startswith(f"undid remove in {NAME}: 2 nodes back (2, 4)\n")
    assert "├── 2  " in result.stdout
    assert "next: weft redo" in result.stderr
    result = output_of(weft("undo", "--json"))
    assert (result["kind"], result["removed"]) == ("grow", [4, 5])
    assert numbers(weft) == [0, 1, 2, 3]
    assert weft("redo").stdout.startswith(f"did again grow in {NAME}: 2 nodes back (4-5)\n")
    assert output_of(weft("redo", "--json"))["removed"] == [2, 4]
    nothing = weft("redo")
    assert nothing.exit_code == 1
    assert "there is nothing to redo" in nothing.stderr
    weft("undo")
    weft("grow", "3", "-n", "1", *SHORT)
    assert weft("redo").exit_code == 1  # something else was done since
    assert numbers(weft) == [0, 1, 2, 3, 4, 5, 6]


def test_search_is_undone_and_redone_as_one(weft, tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    command = ("solve", samples.game24, "-b", "1", "-n", "2", "--seed", "1", "--resume", str(file))
    solution = output_of(weft(*command, "--json"))
    grown = list(range(1, solution["nodes"]))
    result = output_of(weft("undo", "--json"))
    assert (result["kind"], result["loom"], result["removed"]) == ("run", solution["loom"], grown)
    assert numbers(weft) == [0]
    nothing = weft("undo")
    assert nothing.exit_code == 1
    assert "there is nothing to undo" in nothing.stderr
    assert output_of(weft("redo", "--json"))["added"] == grown
    second = output_of(weft(*command, "--json"))  # from its file: a loom that was read
    assert second["loom"] != solution["loom"]
    assert output_of(weft("undo", "--json"))["removed"] == list(range(1, second["nodes"]))


@pytest.mark.fluent
def test_interrupted_search_is_saved_and_undone(weft, tmp_path: Path, monkeypatch) -> None:
    module = importlib.import_module("weft.cli.solve")

    def interrupted(level: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_with_display", lambda out, loom, work: work(interrupted))
    options = ("-b", "2", "-n", "3", "--seed", "1")
    for name, is_there in (("use-4-9-10-13", False), ("use-4-9-10-13.2", True)):
        assert (tmp_path / "search.json").exists() is is_there
        file = ("--resume", str(tmp_path / "search.json"))
        search = weft("solve", samples.game24, *options, *file, "--json")
        assert search.exit_code == 130, search.output
        error = json.loads(search.stderr)["error"]
        assert (error["type"], error["exit_code"]) == ("Cancelled", 130)
        assert f"saved as {name}" in error["message"]
        result = output_of(weft("undo", "--json"))
        assert (result["kind"], result["loom"]) == ("run", name)
        assert numbers(weft) == [0]


def test_unsavable_search_leaves_no_empty_loom(weft, monkeypatch) -> None:
    """A failing database is retried only at the end, not in every round."""
    commit, tried = StoredLoom.commit, []

    def failing(kept: StoredLoom, kind: str, **options: object) -> object:
        if kind == "run":
            tried.append(kind)
            raise StoreError("the disk is full")
        return commit(kept, kind, **options)

    monkeypatch.setattr(StoredLoom, "commit", failing)
    result = weft("solve", samples.game24, "-b", "2", "-n", "2")
    assert result.exit_code == 0
    assert "not saved yet; saving is retried at the end: the disk is full" in result.stderr
    assert "not saved: the disk is full" in result.stderr
    assert names() == []
    assert len(tried) == 2


def test_undo_of_the_current_node_selects_its_ancestor(weft, grown) -> None:
    weft("grow", "1", "-n", "1", *SHORT)
    weft("read", "4")
    output_of(weft("undo", "--json"))
    assert output_of(weft("tree", "--json"))["at"] == 1
    assert weft("undo").exit_code == 0
    assert weft("undo").exit_code == 1  # a loom's beginning is not undone
    assert weft("undo", "--loom", "nosuch").exit_code == 2


def test_rm_undo_restores_only_the_last_removal(weft, grown) -> None:
    weft("rm", "1")
    weft("grow", "2", "-n", "1", *SHORT)
    weft("rm", "3")
    weft("grow", "2", "-n", "1", *SHORT)
    for there in ([0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
        assert output_of(weft("rm", "--undo", "--json"))["restored"] == [NAME]
        assert numbers(weft) == there
    weft("run", samples.sum, "-n", "1")
    weft("rm", NAME)
    assert output_of(weft("rm", "--undo", "--json"))["restored"] == [NAME]
    weft("rm", "1", "--loom", NAME)
    weft("tree", OTHER)
    assert weft("rm", "--undo").exit_code == 1
    assert weft("rm", "--undo", "--loom", NAME).exit_code == 0
    assert numbers(weft) == [0, 1]


# Terminals


def test_each_terminal_has_its_own_last_loom(in_terminal_named, grown) -> None:
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "2", *SHORT)
    weft("B", "run", samples.sum, "-n", "1")
    assert output_of(weft("A", "grow", "1", "-n", "1", "--json", *SHORT))["loom"] == f"{NAME}.2"
    assert output_of(weft("B", "read", "1", "--json"))["loom"] == OTHER
    assert output_of(weft("A", "read", "--json"))["loom"] == f"{NAME}.2"
    lines = weft("B", "ls").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == [OTHER]
    assert output_of(weft("A", "ls", "--json"))["last"] == f"{NAME}.2"
    # Where the reader stands is a terminal's own, numbers are the loom's.
    weft("A", "read", "1", "--loom", OTHER)
    weft("B", "read", "0")
    assert output_of(weft("A", "tree", "--json"))["at"] == 1
    assert output_of(weft("B", "tree", "--json"))["at"] == 0


def test_imported_loom_becomes_the_current_loom(in_terminal_named, grown, tmp_path: Path) -> None:
    weft, file = in_terminal_named, tmp_path / "chat.json"
    assert weft("A", "tree", NAME).exit_code == 0
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    result = weft("A", "import", str(file), "--name", "chat", "-m", "tiny")
    assert result.stderr == "tokens of the model tiny\nnext: weft tree\n      weft grow 0\n"
    assert output_of(weft("A", "grow", "0", "-n", "1", *SHORT, "--json"))["loom"] == "chat"


def test_new_terminal_takes_the_last_loom_with_a_note(
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
        assert f"taking {NAME}, last used elsewhere; --loom selects another" in result.stderr
        if verb[0] != "export":
            assert "elsewhere" not in weft(with_own, "read", "1").stderr
    # What goes for good is never guessed.
    result = weft("C", "rm", "1")
    assert result.exit_code == 2
    assert f"--loom {NAME}" in result.stderr
    assert weft("C", "rm", "1", "--loom", NAME).exit_code == 0


def test_undo_and_redo_in_a_new_terminal_need_a_name(in_terminal_named) -> None:
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "1", *SHORT)
    for verb in ("undo", "redo"):
        refused = weft("B", verb)
        assert refused.exit_code == 2
        assert "no loom was used in this terminal" in refused.stderr
        assert f"weft {verb} --loom {NAME}" in refused.stderr
    assert len(output_of(weft("A", "tree", "--json"))["nodes"]) == 2
    assert weft("B", "undo", "--loom", NAME).exit_code == 0
    weft("C", "tree")
    assert weft("C", "redo").exit_code == 0
    assert len(output_of(weft("C", "tree", "--json"))["nodes"]) == 2


@pytest.mark.parametrize("suffix", ["txt", "md"])
def test_export_in_a_new_terminal_writes_the_tree(
    in_terminal_named, tmp_path: Path, suffix: str
) -> None:
    weft, file = in_terminal_named, tmp_path / f"story.{suffix}"
    weft("A", "run", samples.story, "-n", "2", *SHORT)
    text = output_of(weft("A", "read", "2", "--json"))["text"].split()[-1]
    assert weft("B", "export", str(file)).stdout == f"wrote {file}: the full tree, 2 nodes\n"
    assert text in file.read_text("utf-8")
    explicit = weft("B", "export", str(file), "--node", "0", "--force")
    assert explicit.stdout == f"wrote {file}: the path to node 0\n"


def test_terminal_with_removed_loom_takes_another(in_terminal_named) -> None:
    weft = in_terminal_named
    weft("A", "run", samples.story, "-n", "1", *SHORT)
    weft("B", "run", samples.sum, "-n", "1")
    weft("A", "rm", OTHER)
    assert f"taking {NAME}" in weft("B", "read").stderr
    weft("A", "rm", NAME)
    assert "there is no loom yet" in weft("B", "read").stderr
    assert weft("B", "ls").exit_code == 0


def test_unknown_terminal_takes_the_last_loom_with_a_note(in_terminal_named) -> None:
    weft = in_terminal_named
    weft("", "run", samples.story, "-n", "1", *SHORT)
    result = weft("", "grow", "1", "-n", "1", *SHORT)
    assert result.exit_code == 0
    assert f"taking {NAME}" in result.stderr


def test_every_verb_takes_a_loom_by_name(weft, grown, tmp_path: Path) -> None:
    weft("run", samples.greeting, "-n", "1", "--seed", "1")
    for verb in (("read", "1"), ("next", "1"), ("grow", "1", "-n", "1", *SHORT), ("tree",)):
        weft("tree", samples_name())
        assert output_of(weft(*verb, "--loom", NAME, "--json"))["loom"] == NAME
    weft("tree", samples_name())
    out = tmp_path / "x.json"
    assert output_of(weft("export", str(out), "--loom", NAME, "--json"))["loom"] == NAME
    assert Loom.open(out).user_prompt == samples.story
    page = tmp_path / "x.html"
    assert output_of(weft("export", str(page), "--loom", NAME, "--json"))["loom"] == NAME
    growth = output_of(weft("run", "-c", "--loom", NAME, "-n", "1", "--json", *SHORT))
    assert growth["loom"] == NAME
    weft("tree", samples_name())
    chat = weft("chat", "--loom", NAME, "--json", "--max-tokens", "4", stdin="And then?\n")
    assert output_of(chat)["loom"] == NAME
    assert weft("rm", "2", "--loom", samples_name()).exit_code != 0
    assert weft("rm", "2", "--loom", NAME).exit_code == 0


def samples_name() -> str:
    return next(name for name in names() if name != NAME)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "x", "--loom", NAME), "without -c a new loom is created"),
        (("tree", NAME, "--loom", "other"), "two looms are given"),
        (("rm", NAME, "--loom", NAME), "no node is given"),
        (("read", "--loom", "tel-story-about-fox"), f"near it: {NAME}"),
    ],
)
def test_loom_option_without_use_is_an_error(weft, grown, arguments, message: str) -> None:
    result = weft(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_completion_of_nodes_uses_the_named_loom(weft, grown) -> None:
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


def test_file_that_is_no_loom_is_not_imported(weft, tmp_path: Path) -> None:
    file = tmp_path / "mine.loom.json"
    file.write_text("{}")
    result = weft("tree", str(file))
    assert result.exit_code == 1
    assert f"{file}: this is no saved loom" in result.stderr
    assert names() == []


MARK = "from weft.cli.terminal import terminal; print(terminal())"


@posix
def test_processes_of_a_session_have_one_terminal_id(command_environment) -> None:
    """Subshells, pipelines and scripts share a session; another login has its own."""

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
def test_session_outside_the_container_uses_the_entry_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session leader is not visible in the container: its id is 0."""
    # number: (parent, session, when it began); 7 entered the container, 3 began its own session.
    processes = {
        1: (0, 1, 5),
        7: (0, 0, 50),
        8: (7, 0, 60),
        9: (8, 0, 70),
        3: (1, 3, 6),
        4: (3, 0, 7),
    }
    rest = " ".join("0" * 15)

    def read(file: Path) -> str:
        number = int(file.parts[2]) if file.parts[2].isdecimal() else None
        if number not in processes:
            return ""
        parent, session, began = processes[number]
        return f"{number} (a ) b) S {parent} 0 {session} {rest} {began} 0"

    def mark(process: int) -> str:
        monkeypatch.setattr(os, "getpid", lambda: process)
        return terminal()

    monkeypatch.setattr(os, "getsid", lambda pid: 0)
    monkeypatch.setattr(terminal_module, "_read", read)
    before = mark(7)
    assert mark(9) == mark(8) == before != ""
    assert mark(4) not in {before, ""}
    processes[7] = (0, 0, 51)  # the number was reused
    assert mark(9) == mark(7) not in {before, ""}
    monkeypatch.setattr(terminal_module, "_read", lambda file: "")  # a system without /proc
    assert mark(9) == ""


@posix
def test_container_with_host_proc_has_its_own_terminal_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 2 of the container is 70 on the host, in session 60; the host's 2 is another one."""
    rest = " ".join("0" * 15)
    processes = {"2": (0, 2, 25), "60": (1, 60, 600), "70": (60, 60, 700)}

    def read(file: Path) -> str:
        number = "70" if file.parts[2] == "self" else file.parts[2]
        if number not in processes:
            return ""
        parent, session, began = processes[number]
        return f"{number} (a) S {parent} 0 {session} {rest} {began} 0"

    monkeypatch.setattr(os, "getpid", lambda: 2)
    monkeypatch.setattr(terminal_module, "_read", read)
    monkeypatch.setattr(os, "getsid", lambda pid: 0)
    inside = terminal()
    monkeypatch.setattr(os, "getsid", lambda pid: 60)
    monkeypatch.setattr(os, "getpid", lambda: 70)
    assert inside == terminal() != ""


@posix
def test_without_proc_the_tab_id_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getsid", lambda pid: 7)
    monkeypatch.setattr(terminal_module, "_read", lambda file: "")
    monkeypatch.setenv("TERM_SESSION_ID", "one")
    one = terminal()
    monkeypatch.setenv("TERM_SESSION_ID", "two")
    assert terminal() != one
