"""Looms that earlier versions kept as files: taken into the database once, the files left there.

WEFT_HOME/looms/NAME.loom.json, removed/ beside it, and index.json, which told the numbers of nodes
and what each terminal drew last. A file is taken in the transaction that notes it, so two processes
at once take it once. One that cannot be read is named, and tried again when it has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core import atomic_files
from ...errors import ConfigError, FormatError, StoreError
from ...loom import Loom
from .database import Database
from .tables import taken

SUFFIX = ".loom.json"
_log = logging.getLogger(__name__)


class OldLoom(NamedTuple):
    """A file of an earlier version. ids: by number, as its nodes were drawn."""

    path: Path
    name: str
    is_removed: bool
    stamp: str
    ids: list[str]


class OldStand(NamedTuple):
    """What a terminal drew last, and the id of the node that was read there."""

    mark: str
    loom: str
    at: str


class OldShelf:
    """What earlier versions kept in a folder, and what of it is in the database already."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self._database = database
        self._index: Mapping[str, Any] = {}

    def waiting(self) -> list[OldLoom]:
        """Return the looms that are not in the database yet, the one changed last at the end.

        Cost: a look at the folders; nothing is opened.
        """
        found = [
            (status.st_mtime_ns, path, status)
            for path in [*_listed(self.folder / "removed"), *_listed(self.folder / "looms")]
            if path.name.endswith(SUFFIX) and not path.name.startswith(".")
            if (status := _status(path)) is not None
        ]
        if not found:
            return []
        seen = self._database.read(
            lambda connection: {row.path: row for row in connection.execute(sa.select(taken))}
        )
        waits = []
        for _, path, status in sorted(found, key=lambda each: each[0]):
            stamp = f"{status.st_mtime_ns} {status.st_size}"
            row = seen.get(str(path))
            # One that was taken is done with, whatever an old version does to it now.
            if row is None or (row.fault is not None and row.stamp != stamp):
                waits.append((path, stamp))
        if waits:
            self._index = _read_index(self.folder / "index.json")
        return [self._old(path, stamp) for path, stamp in waits]

    def _old(self, path: Path, stamp: str) -> OldLoom:
        name, is_removed = path.name.removesuffix(SUFFIX), path.parent.name == "removed"
        told = {} if is_removed else self._index.get("looms", {}).get(name, {})
        return OldLoom(
            path, name, is_removed, stamp, [str(each) for each in told.get("numbers", [])]
        )

    def opened(self, old: OldLoom) -> Loom | None:
        """Return the loom of a file; None where it cannot be read, and that is noted."""
        try:
            return Loom.open(old.path)
        except (StoreError, ConfigError) as error:
            fault = str(error)
        except FileNotFoundError:
            if _status(old.path) is None:
                return None
            fault = f"{old.path} is a link to nothing"
        self._database.write(lambda connection: self.note(connection, old, fault))
        _log.warning("a loom of an earlier version is left where it is: %s", fault)
        return None

    def is_noted(self, connection: Connection, old: OldLoom) -> bool:
        """Whether another process has taken it meanwhile."""
        row = connection.execute(sa.select(taken).where(taken.c.path == str(old.path))).first()
        return row is not None and row.fault is None

    def note(self, connection: Connection, old: OldLoom, fault: str | None) -> None:
        """Note that a file is taken, or why it cannot be."""
        values = {"stamp": old.stamp, "fault": None if fault is None else fault[:2000]}
        statement = self._database.insert(taken).values(path=str(old.path), **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=[taken.c.path], set_=values)
        )

    def stands(self) -> list[OldStand]:
        """Return what the terminals drew last, the last one at the end."""
        return [
            OldStand(str(mark), str(stand["loom"]), str(stand["at"]))
            for mark, stand in self._index.get("terminals", {}).items()
        ]

    def faults(self) -> list[str]:
        """Return why files of earlier versions that are there could not be taken."""
        query = sa.select(taken).where(taken.c.fault.is_not(None)).order_by(taken.c.path)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [row.fault for row in rows if os.path.lexists(row.path)]


def numbers_of(loom: Loom, ids: Iterable[str]) -> dict[str, int]:
    """Return the numbers that an index told of a loom's nodes; {} where it was of another loom."""
    told = list(ids)
    if told[:1] != [loom.id]:
        return {}
    return {node_id: number for number, node_id in enumerate(told)}


def _read_index(path: Path) -> Mapping[str, Any]:
    try:
        data = atomic_files.read_json(path, FormatError, "no index") if path.exists() else {}
        looms = {str(name): each for name, each in data.get("looms", {}).items()}
        return {
            "looms": {name: {"numbers": list(each["numbers"])} for name, each in looms.items()},
            "terminals": {
                str(mark): {"loom": str(each["loom"]), "at": str(each["at"])}
                for mark, each in data.get("terminals", {}).items()
            },
        }
    except (StoreError, OSError, *atomic_files.FAULTS) as error:
        _log.warning("the numbers that %s told are lost: %s", path, error)
        return {}


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    """None where there is nothing. A folder, a pipe or a dangling link is there, and is named."""
    try:
        return path.stat()
    except OSError:
        pass
    try:
        return path.lstat()
    except OSError:
        return None
