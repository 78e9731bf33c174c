"""Heartbeats: local processes by id and start time, remote ones by their last heartbeat."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from weft.service.store.heartbeats import HEARTBEAT_TIMEOUT_S, ProcessHeartbeat, find_dead
from weft.service.store.library import Library
from weft.service.store.tables import writers


def register(library: Library, writer: ProcessHeartbeat) -> str:
    return library.database.write(writer.register)


def change(library: Library, mark: str, **values: Any) -> None:
    statement = sa.update(writers).where(writers.c.id == mark).values(**values)
    library.database.write(lambda connection: connection.execute(statement))


def is_dead(library: Library, mark: str) -> bool:
    return mark in library.database.read(
        lambda connection: find_dead(connection, {mark}, library.database)
    )


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_local_process_is_alive_without_heartbeats(library: Library) -> None:
    writer = ProcessHeartbeat(library.database)
    mark = register(library, writer)
    change(library, mark, beat=0.0)
    assert not is_dead(library, mark)
    change(library, mark, began="1")  # another process has the same pid
    assert is_dead(library, mark)
    writer.close()
    writer.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_zombie_process_is_dead(library: Library) -> None:
    writer = ProcessHeartbeat(library.database)
    mark = register(library, writer)
    child = os.fork()
    if not child:
        signal.pause()
    change(library, mark, pid=child, began=began(child))
    assert not is_dead(library, mark)
    os.kill(child, signal.SIGKILL)
    while not is_dead(library, mark):
        time.sleep(0.02)
    os.waitpid(child, 0)
    writer.close()


def began(pid: int) -> str:
    """Return the start time of a process as `ProcessHeartbeat` stores it."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[19]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_process_has_another_id(library: Library) -> None:
    writer = ProcessHeartbeat(library.database)
    mark = writer.id
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, writer.id.encode())
        os._exit(0)
    os.waitpid(child, 0)
    child_id = os.read(reads, 100).decode()
    os.close(reads)
    os.close(writes)
    assert len(child_id) == len(mark)
    assert child_id != mark
    assert writer.id == mark


def test_remote_process_is_dead_after_heartbeat_timeout(library: Library) -> None:
    writer = ProcessHeartbeat(library.database)
    mark = register(library, writer)
    now = library.database.now
    change(library, mark, host="elsewhere", beat=now - HEARTBEAT_TIMEOUT_S + 20)
    assert not is_dead(library, mark)
    change(library, mark, beat=now - HEARTBEAT_TIMEOUT_S - 1)
    assert is_dead(library, mark)
    writer.send_heartbeat()
    assert not is_dead(library, mark)
    writer.close()


def test_stale_processes_are_deleted(library: Library) -> None:
    old, new = ProcessHeartbeat(library.database), ProcessHeartbeat(library.database)
    mark = register(library, old)
    change(library, mark, beat=0.0)
    assert register(library, new) == register(library, new)
    assert is_dead(library, mark)
    query = sa.select(writers.c.id)
    rows = library.database.read(lambda connection: connection.execute(query).scalars().all())
    assert rows == [new.id]
    old.close()
    new.close()
