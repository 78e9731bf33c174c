"""Heartbeats of processes that generate nodes. Nodes of a dead process become "interrupted".

A process on this machine is identified by its id and start time, since ids are reused. A process
on another machine counts as dead when it has sent no heartbeat for a minute. If it is alive after
all, its next write overwrites the interrupted nodes.
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
_STALE_S = 86_400.0  # age at which rows of idle processes are deleted
_START_TIME = 19  # index of the start time in /proc/PID/stat, counted after the process name
_log = logging.getLogger(__name__)


class ProcessHeartbeat:
    """Registers this process in the database, and sends heartbeats from a thread."""

    def __init__(self, database: Database, *, lease_s: float | None = None) -> None:
        """Register nothing yet. lease_s: duration of loom leases; None means without leases."""
        self.lease_s = lease_s
        self._database = database
        self._lock = threading.Lock()
        self._pid = 0
        self._id = ""
        self._stop_event: threading.Event | None = None  # stops the heartbeat thread
        self._has_acts = False

    @property
    def id(self) -> str:
        """The random id of this process; a forked process has another."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._id = os.getpid(), secrets.token_hex(8)
                self._stop_event = None
            return self._id

    def register(self, connection: Connection) -> str:
        """Register this process in the database, or renew its heartbeat.

        Returns its id, which rows of nodes in progress contain.
        """
        process_id = self.id
        renewal = (
            sa.update(writers).where(writers.c.id == process_id).values(beat=self._database.now)
        )
        if connection.execute(renewal).rowcount == 0:
            first = self._database.insert(writers).values(
                id=process_id,
                host=_machine_id(),
                pid=os.getpid(),
                began=_process_start(os.getpid()),
                beat=self._database.now,
            )
            connection.execute(first.on_conflict_do_nothing())  # another thread may be registering
            self._delete_stale(connection)
        with self._lock:
            if self._stop_event is None:
                self._stop_event = threading.Event()
                arguments = (weakref.ref(self), process_id, self._stop_event)
                threading.Thread(target=_send_heartbeats, args=arguments, daemon=True).start()
        return process_id

    def new_act(self, connection: Connection) -> str:
        """Return a new name for a group of commits. It contains the id of this process."""
        self._has_acts = True
        return f"{self.register(connection)}-{secrets.token_hex(4)}"

    def _delete_stale(self, connection: Connection) -> None:
        """Delete the old rows of processes that have no nodes in progress."""
        old = writers.c.beat < self._database.now - _STALE_S
        connection.execute(sa.delete(writers).where(old, ~_has_nodes()))

    def send_heartbeat(self) -> None:
        """Write the current time to this process' row, as a sign that it is alive."""
        process_id = self._id
        self._database.write(
            lambda connection: connection.execute(
                sa.update(writers).where(writers.c.id == process_id).values(beat=self._database.now)
            )
        )

    def close(self) -> None:
        """Stop the thread, and end the groups of commits that this process has named."""
        with self._lock:
            if self._stop_event is not None:
                self._stop_event.set()
                self._stop_event = None
        if self._has_acts and self._pid == os.getpid():
            self._has_acts = False
            with suppress(StoreError):  # otherwise they end when this process exits
                self._database.write(self._unregister)

    def _unregister(self, connection: Connection) -> None:
        """Delete the process's row, unless it has nodes in progress."""
        connection.execute(sa.delete(writers).where(writers.c.id == self._id, ~_has_nodes()))


def _has_nodes() -> sa.ColumnElement[bool]:
    """Return an SQL condition that is true for a process with nodes in progress."""
    return sa.exists().where(nodes.c.writer == writers.c.id)


def process_of(act: str) -> str:
    """Return the id of the process that named a group of commits (`new_act`)."""
    return act.partition("-")[0]


def find_dead(connection: Connection, process_ids: Collection[str], database: Database) -> set[str]:
    """Return the subset of these process ids whose processes have exited or send no heartbeats."""
    dead = set(process_ids)
    rows = connection.execute(
        sa.select(writers, (database.now - writers.c.beat).label("age")).where(
            writers.c.id.in_(process_ids)
        )
    )
    for row in rows:
        is_local = row.host == _machine_id() and row.began != ""
        if is_local:
            is_alive = _process_start(row.pid) == row.began
        else:
            is_alive = row.age < HEARTBEAT_TIMEOUT_S
        if is_alive:
            dead.discard(row.id)
    return dead


def _send_heartbeats(
    reference: weakref.ref[ProcessHeartbeat], process_id: str, closed: threading.Event
) -> None:
    """Send heartbeats until `closed` is set or the object was collected; body of the thread."""
    while not closed.wait(HEARTBEAT_INTERVAL_S):
        heartbeat = reference()
        if heartbeat is None or heartbeat.id != process_id:
            return
        try:
            heartbeat.send_heartbeat()
        except StoreError as error:
            _log.warning("%s", error)
        del heartbeat


@cache
def _machine_id() -> str:
    """Return an id of this boot and container, within which process ids are unique."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _process_start(pid: int) -> str:
    """Return the start time of a process; "" if it has exited, or on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[:1] in (["Z"], ["X"]) else fields[_START_TIME]
