"""Faults of databases: many processes, kills, locks, full disks, stopped servers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import forks
import library_programs as programs
from postgres import Cluster
from weft.errors import ConfigError, StoreError
from weft.loom import Heddle, Loom
from weft.service.store import database
from weft.service.store.database import HEAD, Database
from weft.service.store.library import Library
from weft.service.store.stored_loom import StoredLoom
from weft.service.store.tables import metadata
from written_looms import open_written

POSIX = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


def start(code: str, *arguments: str, **more: Any) -> Any:
    more.setdefault("stderr", subprocess.PIPE)
    return forks.start(code, *arguments, stdout=subprocess.PIPE, **more)


def lines_of(process: Any) -> list[list[str]]:
    with process.stdout, process.stderr:
        out, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return [line.split() for line in out.decode().splitlines()]


def fresh(library: Library) -> StoredLoom:
    return library.create(Loom(None, "Once upon a time"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weft.db"


# Many at once


@pytest.mark.programs
def test_eight_processes_growing_one_loom_lose_no_nodes(library: Library, url: str) -> None:
    kept = fresh(library)
    running = [start(programs.GROW, url, kept.name, str(me), "5") for me in range(8)]
    raised = [line for process in running for line in lines_of(process)]
    assert len(raised) == 40
    kept.sync()
    there = {node.id: kept.number(node) for node in kept.loom.walk()}
    assert sorted(there.values()) == list(range(41))
    assert {node_id: int(number) for number, node_id in raised}.items() <= there.items()
    assert library.row(kept.name).n_nodes == 41
    assert sum(each.n_added for each in kept.history()) == 41
    for _ in range(40):
        kept.undo()
    assert kept.loom.children == []


@pytest.mark.programs
def test_new_database_opened_by_many_processes_at_once(url: str) -> None:
    running = [start(programs.CREATE, url) for _ in range(6)]
    names = [line[0] for process in running for line in lines_of(process)]
    assert len(set(names)) == 6
    with Library(url) as library:
        assert {row.name for row in library.looms()} == set(names)


@pytest.mark.programs
@POSIX
def test_forked_process_gets_its_own_connections(library: Library, url: str) -> None:
    kept = fresh(library)
    lines_of(start(programs.FORK, url, kept.name))
    kept.sync()
    assert sorted(node.text for node in kept.loom.children) == ["before", "child", "parent"]


# Kills


def killed(url: str, name: str, rng: random.Random) -> dict[str, tuple[int, str]]:
    """Kill a process that streams into a loom; return the nodes that it had reported as saved."""
    process = start(programs.STREAM, url, name, stderr=None)
    raised: dict[str, tuple[int, str]] = {}
    for _ in range(rng.randint(1, 12)):
        node_id, n_tokens, state = process.stdout.readline().decode().split()
        raised[node_id] = int(n_tokens), state
    time.sleep(rng.uniform(0.0, 0.02))
    process.kill()
    rest = process.stdout.read().decode().split("\n")[:-1]
    process.stdout.close()
    for node_id, n_tokens, state in (line.split() for line in rest):
        raised[node_id] = int(n_tokens), state
    assert process.wait() == -signal.SIGKILL
    return raised


def check(node: Heddle, n_tokens: int, state: str) -> None:
    assert len(node.tokens) >= n_tokens
    assert node.tokens == list(range(len(node.tokens)))
    assert node.logprobs == [-0.5 * each for each in range(len(node.tokens))]
    assert node.entropies == [0.25] * len(node.tokens)
    # What was committed, and killed before it could say so, has ended too.
    assert node.finish_reason in ({"length"} if state == "length" else {"interrupted", "length"})


def kill_often(library: Library, url: str, tmp_path: Path, n_kills: int) -> None:
    rng = random.Random(n_kills)
    kept = library.create(open_written(tmp_path / "x.json", [None]))
    raised: dict[str, tuple[int, str]] = {}
    for _ in range(n_kills):
        raised |= killed(url, kept.name, rng)
        kept = library.open(kept.name)
        there = {node.id: node for node in kept.loom.children}
        for node_id, (n_tokens, state) in raised.items():
            check(there[node_id], n_tokens, state)
        assert len(there) - len(raised) <= n_kills  # up to one unreported node per kill
        numbers = [kept.number(node) for node in there.values()]
        assert len(set(numbers)) == len(there)
    if library.database.is_sqlite:
        with sqlite3.connect(str(library.database.url.database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()


@pytest.mark.programs
@POSIX
def test_saved_tokens_survive_kills(library: Library, url: str, tmp_path: Path) -> None:
    kill_often(library, url, tmp_path, 4)


@POSIX
@pytest.mark.slow
def test_saved_tokens_survive_fifty_kills(library: Library, url: str, tmp_path: Path) -> None:
    kill_often(library, url, tmp_path, 50)


@pytest.mark.programs
@POSIX
def test_node_is_in_progress_while_its_process_runs(
    library: Library, url: str, tmp_path: Path
) -> None:
    kept = library.create(open_written(tmp_path / "x.json", [None]))
    process = start(programs.HOLD, url, kept.name, stdin=subprocess.PIPE, stderr=None)
    for _ in range(4):
        assert process.stdout.readline()
    reopened = library.open(kept.name)
    assert reopened.loom.children == []
    (row,) = reopened.nodes(after=0)
    assert (row.is_growing, row.n_tokens, row.finish_reason) == (True, 12, None)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    # Lists count the node before and after its process exits.
    assert [each.n_nodes for each in library.looms()] == [2]
    assert [each.finish_reason for each in reopened.sync().added] == ["interrupted"]
    assert [each.n_nodes for each in library.looms()] == [2]
    assert [each.kind for each in reopened.history()] == ["interrupted", "create"]
    assert not reopened.nodes(after=0)[0].is_growing
    reopened.undo()
    assert reopened.loom.children == []


# Databases that are busy, away, full, read-only, replaced


def test_locked_database_is_retried_then_raises(file: Path) -> None:
    library = Library(f"sqlite:///{file}")
    kept = fresh(library)
    kept.loom.add("a")
    library.database.patience_s = 0.3
    library.close()  # connections with that patience
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another process"):
        kept.commit("add")
    assert [row.n_nodes for row in library.looms()] == [1]  # readers do not wait
    other.rollback()
    assert len(kept.commit("add").added) == 1
    other.close()
    library.close()


def test_deleted_database_raises_until_restored(file: Path) -> None:
    library = Library(f"sqlite:///{file}")
    kept = fresh(library)
    kept.loom.add("a")
    library.close()
    away = file.with_name("away.db")
    file.rename(away)
    for _ in range(2):
        with pytest.raises(StoreError, match="gone"):
            kept.commit("add")
        with pytest.raises(StoreError, match="gone"):
            library.looms()
        assert not file.exists()
    away.rename(file)
    assert len(kept.commit("add").added) == 1
    library.close()


def test_older_copy_of_database_gets_nodes_from_memory(file: Path) -> None:
    library = Library(f"sqlite:///{file}")
    kept = fresh(library)
    kept.loom.add("a").add("b")
    kept.commit("add")
    library.close()
    copy = file.with_name("copy.db")
    shutil.copy(file, copy)
    kept.loom.add("c").add("d")
    kept.commit("add")
    kept.commit("nothing")
    library.close()
    copy.replace(file)
    kept.loom.add("e")
    assert [node.text for node in kept.commit("add").added] == ["c", "d", "e"]
    reopened = library.open(kept.name)
    assert [node.text for node in reopened.loom.walk()] == [node.text for node in kept.loom.walk()]
    numbers = [kept.number(node) for node in kept.loom.walk()]
    assert numbers == [reopened.number(node) for node in reopened.loom.walk()] == list(range(6))
    library.close()


def test_replaced_database_raises_for_missing_loom(file: Path) -> None:
    library = Library(f"sqlite:///{file}")
    kept = fresh(library)
    library.close()
    other = file.with_name("other.db")
    with Library(f"sqlite:///{other}") as new:
        fresh(new)
    other.replace(file)
    kept.loom.add("a")
    with pytest.raises(StoreError, match="not in the database any more"):
        kept.commit("add")
    assert [node.text for node in library.create(kept.loom).loom.children] == ["a"]
    library.close()


@pytest.mark.programs
@POSIX
def test_full_disk_raises_and_loses_nothing(file: Path) -> None:
    url = f"sqlite:///{file}"
    with Library(url) as library:
        name = fresh(library).name
        (hint,), (added,) = (
            [" ".join(line)] for line in lines_of(start(programs.FULL, url, name, str(file)))
        )
        assert "free space" in hint
        assert added == "2"
        assert len(library.open(name).loom.children) == 2


@pytest.mark.programs
@POSIX
def test_read_only_database_raises(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="weft-"))  # pytest's own are closed to others
    try:
        raised = lines_of(start(programs.READ_ONLY, f"sqlite:///{folder}/weft.db", str(folder)))
        assert "cannot be used" in " ".join(raised[0])
        assert "WEFT_HOME" in " ".join(raised[0])
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("content", [b"not a database" * 1000, b""])
def test_file_that_is_no_database_raises(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    if content:
        with pytest.raises(StoreError, match="not a database"):
            Library(f"sqlite:///{file}")
        assert file.read_bytes() == content
    else:  # an empty file is a new database
        Library(f"sqlite:///{file}").close()


@pytest.mark.programs
def test_folder_without_shared_memory_works_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As on a network folder: this way of SQLite's to lock files has no WAL.
    url = f"sqlite:///file:{tmp_path}/weft.db?vfs=unix-dotfile&uri=true"
    with Library(url) as library:
        kept = fresh(library)
        kept.loom.add("a")
        kept.commit("add")
        running = [start(programs.GROW, url, kept.name, str(me), "3") for me in range(3)]
        assert sum(len(lines_of(process)) for process in running) == 9
        kept.sync()
        assert kept.loom.count_children() == 11
    assert "no shared memory" in caplog.text


@pytest.mark.programs
def test_stopped_postgresql_is_retried(postgres: Cluster) -> None:
    with Library(postgres.url("stops")) as library:
        kept = fresh(library)
        kept.loom.add("a")
        library.database.patience_s = 0.3
        postgres.stop("immediate")
        try:
            with pytest.raises(StoreError, match="cannot be used") as raised:
                kept.commit("add")
            assert "PostgreSQL runs" in raised.value.hint
            library.database.patience_s = 60.0
            starts = threading.Timer(0.5, postgres.start)
            starts.start()
            assert len(kept.commit("add").added) == 1  # it waited
            starts.join()
        except BaseException:
            postgres.start()
            raise
        kept.loom.add("b")
        assert len(kept.commit("add").added) == 1
        assert [node.text for node in library.open(kept.name).loom.children] == ["a", "b"]


# Tables


def test_database_of_newer_weft_raises(url: str) -> None:
    with Library(url) as library:
        fresh(library)
        library.database.write(
            lambda connection: connection.exec_driver_sql(
                "UPDATE weft_version SET version_num = '999'"
            )
        )
    with pytest.raises(StoreError, match="newer Weft") as raised:
        Library(url)
    assert "update Weft" in raised.value.hint


def test_tables_of_new_database_match_definitions(library: Library) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    OWN = ("nodes_fts", "'vector'")

    def differences(connection: sa.Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"version_table": "weft_version"})
        changes = compare_metadata(context, metadata)
        # Each database has its own SQL for the full-text tables.
        return [each for each in changes if not any(own in str(each) for own in OWN)]

    assert library.database.read(differences) == []
    version = library.database.read(
        lambda connection: connection.exec_driver_sql("SELECT * FROM weft_version").scalar()
    )
    assert version == HEAD


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("weft.db", "no database URL"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("mysql://x/y", "cannot be saved in mysql"),
        ("", "no database URL"),
    ],
)
def test_invalid_database_url_raises(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Database(url)


def test_error_messages_contain_no_password() -> None:
    pytest.importorskip("psycopg", reason="the extra postgresql is not installed")
    with pytest.raises(StoreError) as raised:
        Database("postgresql://me:secret@127.0.0.1:1/x", patience_s=0.0)
    assert "secret" not in f"{raised.value} {raised.value.hint}"
    assert "PostgreSQL runs" in raised.value.hint


def test_postgresql_without_driver_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install .*\[postgresql\]"):
        Database("postgresql://me@127.0.0.1:1/x", patience_s=0.0)


def test_head_is_the_last_migration() -> None:
    """A database of an earlier version is upgraded only if its version differs from HEAD."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(database._MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD
