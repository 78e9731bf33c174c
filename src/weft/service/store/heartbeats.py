"""Who grows nodes just now, and whether he still lives: else what he grew was interrupted.

On one machine a process is known by its number and when it began, since numbers come again. Of
other machines only the database tells: who has not been seen for a minute is taken for dead. Were
he not, his next write makes his nodes what they are.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import StoreError
from .database import Database
from .tables import nodes, writers

HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S = 10.0, 60.0
_FORGOTTEN_S = 86_400.0
_BEGAN = 19  # where /proc/PID/stat says when a process began, counted from behind its name
_log = logging.getLogger(__name__)


class ProcessHeartbeat:
    """This process, as one that grows nodes; a thread of it says that it lives."""

    def __init__(self, database: Database, *, lease_s: float | None = None) -> None:
        """lease_s: how long a loom stays this process's, where it grows none without a lease."""
        self.lease_s = lease_s
        self._database = database
        self._lock = threading.Lock()
        self._pid = 0
        self._id = ""
        self._stop_event: threading.Event | None = None  # ends the thread that says that we live
        self._has_acts = False

    @property
    def id(self) -> str:
        """The mark of this process; a forked one has another."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._id = os.getpid(), secrets.token_hex(8)
                self._stop_event = None
            return self._id

    def register(self, connection: Connection) -> str:
        """Return the mark for rows that this process grows: it is seen alive at this moment."""
        process_id = self.id
        seen = sa.update(writers).where(writers.c.id == process_id).values(beat=self._database.now)
        if connection.execute(seen).rowcount == 0:
            first = self._database.insert(writers).values(
                id=process_id,
                host=_machine_id(),
                pid=os.getpid(),
                began=_process_start(os.getpid()),
                beat=self._database.now,
            )
            connection.execute(first.on_conflict_do_nothing())  # another thread may be signing
            self._delete_stale(connection)
        with self._lock:
            if self._stop_event is None:
                self._stop_event = threading.Event()
                beats = (weakref.ref(self), process_id, self._stop_event)
                threading.Thread(target=_send_heartbeats, args=beats, daemon=True).start()
        return process_id

    def new_act(self, connection: Connection) -> str:
        """Return a name for what this process does in several commits: it tells whose act it is."""
        self._has_acts = True
        return f"{self.register(connection)}-{secrets.token_hex(4)}"

    def _delete_stale(self, connection: Connection) -> None:
        """Forget processes of former days that have left nothing behind."""
        old = writers.c.beat < self._database.now - _FORGOTTEN_S
        connection.execute(sa.delete(writers).where(old, ~_has_left()))

    def send_heartbeat(self) -> None:
        """Say that this process lives."""
        process_id = self._id
        self._database.write(
            lambda connection: connection.execute(
                sa.update(writers).where(writers.c.id == process_id).values(beat=self._database.now)
            )
        )

    def close(self) -> None:
        """End the thread; the acts that were named are over."""
        with self._lock:
            if self._stop_event is not None:
                self._stop_event.set()
                self._stop_event = None
        if self._has_acts and self._pid == os.getpid():
            self._has_acts = False
            with suppress(StoreError):  # then they are over with this process
                self._database.write(self._unregister)

    def _unregister(self, connection: Connection) -> None:
        connection.execute(sa.delete(writers).where(writers.c.id == self._id, ~_has_left()))


def _has_left() -> sa.ColumnElement[bool]:
    """Whether a process grows nodes, or has left some."""
    return sa.exists().where(nodes.c.writer == writers.c.id)


def process_of(act: str) -> str:
    """Return the mark of the process that gave an act its name; of other names it is nobody's."""
    return act.partition("-")[0]


def find_dead(connection: Connection, marks: Collection[str], database: Database) -> set[str]:
    """Return which of these processes are gone."""
    found = set(marks)
    rows = connection.execute(
        sa.select(writers, (database.now - writers.c.beat).label("age")).where(
            writers.c.id.in_(marks)
        )
    )
    for row in rows:
        here = row.host == _machine_id() and row.began != ""
        lives = _process_start(row.pid) == row.began if here else row.age < HEARTBEAT_TIMEOUT_S
        if lives:
            found.discard(row.id)
    return found


def _send_heartbeats(
    of: weakref.ref[ProcessHeartbeat], process_id: str, closed: threading.Event
) -> None:
    while not closed.wait(HEARTBEAT_INTERVAL_S):
        writer = of()
        if writer is None or writer.id != process_id:
            return
        try:
            writer.send_heartbeat()
        except StoreError as error:
            _log.warning("%s", error)
        del writer


@cache
def _machine_id() -> str:
    """Return a mark of where process numbers mean the same: one boot, one container."""
    parts = [socket.gethostname()]
    for told in ("/proc/sys/kernel/random/boot_id",):
        try:
            parts.append(Path(told).read_text().strip())
        except OSError:
            pass
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return " ".join(parts)


def _process_start(pid: int) -> str:
    """Return when a process began, as its system tells it; "" for none, or where none tells."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = told.rpartition(")")[2].split()
    return "" if fields[:1] in (["Z"], ["X"]) else fields[_BEGAN]
