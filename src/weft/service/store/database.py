"""A database that looms are kept in: SQLite in one file, or PostgreSQL by its URL.

Short transactions and nothing else: `read` and `write` run a function in one, again where the
database was busy or away for a moment, and say plainly what stands in the way. A function that is
run again finds what it had written, if that had been kept after all, so it must look first.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ...errors import ConfigError, StoreError, StoreUnavailable

HEAD = "4"  # revision of the newest file in migrations/versions
_VERSION_TABLE = "weft_version"
_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY = 0x77656674  # "weft": whose turn it is to make the tables, in PostgreSQL
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_RETRY_STATES = ("40001", "40P01", "55P03")  # of PostgreSQL: undone for another's sake
_CONNECTION_STATES = (
    "08",
    "57P",
)  # its classes for a connection that is gone, a server that stops or starts
_POSTGRESQL = 'PostgreSQL needs its driver: pip install "weft-lm[postgresql]"'
_WRITABLE_HINT = "set WEFT_HOME to a folder that you can write, or WEFT_DB to another database"
_HINTS = {
    sqlite3.SQLITE_READONLY: _WRITABLE_HINT,
    sqlite3.SQLITE_CANTOPEN: _WRITABLE_HINT,
    sqlite3.SQLITE_PERM: _WRITABLE_HINT,
    sqlite3.SQLITE_FULL: "make room on that disk and try again; nothing of it was kept",
    sqlite3.SQLITE_IOERR: "make room on that disk, or look after it; nothing of it was kept",
    sqlite3.SQLITE_CORRUPT: "move the file away, or bring back a copy of it",
    sqlite3.SQLITE_NOTADB: "WEFT_DB names another database",
}
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Database:
    """One database, open. Thread-safe; a forked process gets connections of its own."""

    def __init__(self, url: str, *, patience_s: float = 20.0) -> None:
        """Open it; tables are made, or brought up to date.

        Args:
            url: "sqlite:///FILE" (also "sqlite:///file:FILE?vfs=…&uri=true") or "postgresql://…".
            patience_s: how long to wait for others who write, or for a server that is away.

        Raises: ConfigError for another URL; StoreError where it cannot be opened, and for a
        database that a newer Weft has changed.
        """
        self.url = _read_url(url)
        self.patience_s = patience_s
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.name = self.url.render_as_string(hide_password=True)
        # A "file:" URI names a way to open it as well; SQLite alone can read that.
        is_path = self.is_sqlite and not str(self.url.database).startswith("file:")
        self._file = Path(str(self.url.database)) if is_path else None
        self._inode: tuple[int, int] | None = None
        self._has_warned = False  # that it lies where there is no WAL
        self._engine = self._create_engine()
        self._bind_to_process()
        try:
            self._migrate()
        except BaseException:
            self._engine.dispose()
            raise

    def _bind_to_process(self) -> None:
        self._pid = os.getpid()
        # Threads of one process queue here; processes, at the file.
        self._write_lock = threading.Lock() if self.is_sqlite else nullcontext()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that sees one state and writes nothing."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction; when this returns, it outlives a crash of the machine.

        Raises: StoreError, and nothing is changed.
        """
        return self._run(work, writes=True)

    @property
    def now(self) -> sa.ColumnElement[float]:
        """The database's clock, in seconds since 1970: one clock for all hosts."""
        if self.is_sqlite:
            return sa.literal_column("((julianday('now') - 2440587.5) * 86400.0)", sa.Float())
        return sa.literal_column(
            "cast(extract(epoch from clock_timestamp()) as double precision)", sa.Float()
        )

    def insert(self, table: sa.Table) -> Any:
        """Return an INSERT that knows ON CONFLICT, which both databases write alike."""
        return (sqlite.insert if self.is_sqlite else postgresql.insert)(table)

    def close(self) -> None:
        """Let go of all connections; idempotent. What comes later opens new ones."""
        self._engine.dispose(close=self._pid == os.getpid())

    # Transactions

    def _run(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        until, wait = time.monotonic() + self.patience_s, 0.01
        while True:
            try:
                with self._transaction(writes=writes) as connection:
                    return work(connection)
            except (DBAPIError, PoolTimeout) as error:
                if not _is_transient(error) or time.monotonic() > until:
                    raise self._as_store_error(error) from error
            except (
                SQLAlchemyError,
                UnicodeDecodeError,
            ) as error:  # SQLite says broken names as they are
                raise self._as_store_error(error) from error
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, 0.25)

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        if self._pid != os.getpid():  # forked: the connections are our parent's
            self._engine.dispose(close=False)
            self._bind_to_process()
        self._check_file()
        with self._write_lock if writes else nullcontext():
            with self._engine.connect() as connection:
                options = {"weft_writes": True} if writes else {}
                with connection.execution_options(**options).begin():
                    yield connection

    def _check_file(self) -> None:
        """See that the file is still the one that was opened: SQLite would write to nowhere."""
        if self._file is None or self._inode is None:
            return
        found = _inode(self._file)
        if found == self._inode:
            return
        self._engine.dispose()
        if found is None:
            raise StoreUnavailable(
                f"the database {self._file} is gone: it was moved or deleted while in use",
                hint="bring it back; loom.save(path) keeps what is in memory",
            )
        _log.warning("%s was replaced by another file while in use", self._file)
        self._inode = None
        self._migrate()

    # Opening

    def _create_engine(self) -> Engine:
        try:
            if self.is_sqlite:
                if self._file is not None:
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                engine = sa.create_engine(self.url, pool_timeout=self.patience_s, max_overflow=64)
                sa.event.listen(engine, "connect", self._configure)
                sa.event.listen(engine, "begin", _begin_transaction)
            else:
                engine = sa.create_engine(
                    self.url,
                    pool_pre_ping=True,
                    pool_timeout=self.patience_s,
                    max_overflow=16,
                    connect_args={"connect_timeout": 10},
                )
            return engine
        except ImportError as error:
            raise StoreError(f"{_POSTGRESQL} ({error})", hint=_POSTGRESQL) from error
        except OSError as error:
            raise StoreError(
                f"cannot keep looms in {self._file}: {error}", hint=_WRITABLE_HINT
            ) from error

    def _configure(self, connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # transactions begin where we say so
        # SQLite's own knows no letters but those of ASCII.
        connection.create_function("lower", 1, _lower, deterministic=True)
        run = connection.execute
        run(f"PRAGMA busy_timeout = {int(1000 * min(5.0, self.patience_s))}")
        run("PRAGMA foreign_keys = ON")
        # Each commit is on the disk when it returns, as far as the disk tells the truth.
        run("PRAGMA synchronous = FULL")
        try:
            mode = run("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in _BUSY:
                raise
            mode = str(error)
        if mode != "wal":
            run("PRAGMA journal_mode = DELETE")
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s lies where SQLite has no shared memory (%s): readers and writers wait for "
                    "each other. A local disk or PostgreSQL spares that",
                    self.name,
                    mode,
                )

    def _migrate(self) -> None:
        if self.read(_version) != HEAD:
            self.write(self._upgrade)
        if self._file is not None:
            self._inode = _inode(self._file)

    def _upgrade(self, connection: Connection) -> None:
        lock(connection, is_sqlite=self.is_sqlite)
        found = _version(connection)
        if found == HEAD:  # another process was here before
            return
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes.update(connection=connection, version_table=_VERSION_TABLE)
        saved = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
        if found is not None and found not in saved:
            raise StoreError(
                f"the database {self.name} was changed by a newer Weft (its tables are version "
                f"{found}, this Weft knows {HEAD})",
                hint="pip install -U weft-lm, or set WEFT_DB to another database",
            )
        command.upgrade(config, "head")

    # Errors

    def _as_store_error(self, error: Exception) -> StoreUnavailable:
        """Return what an error of the database says, in words that help."""
        cause = getattr(error, "orig", None) or error
        said = " ".join(str(cause).split()) or type(cause).__name__
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY:
            return StoreUnavailable(
                f"the database {self.name} has been locked by another process for "
                f"{self.patience_s:g} s; nothing was kept",
                hint="end what holds it, and try again",
            )
        if isinstance(cause, ImportError):
            return StoreUnavailable(f"{_POSTGRESQL} ({said})", hint=_POSTGRESQL)
        hint = _HINTS.get(code, "") if self.is_sqlite else ""
        if not self.is_sqlite and _is_transient(error):
            hint = "see that PostgreSQL runs and can be reached, and try again"
        return StoreUnavailable(f"the database {self.name} cannot be used: {said}", hint=hint)


def _read_url(given: str) -> URL:
    allowed = "sqlite:///FILE and postgresql://USER@HOST/NAME"
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ConfigError(f"{given!r} is no database URL; allowed are {allowed}") from error
    if url.drivername == "postgres":
        url = url.set(drivername="postgresql")
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ConfigError(f"looms are not kept in {backend}; allowed are {allowed}")
    if backend == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ConfigError("a database in memory keeps nothing; give a file: sqlite:///FILE")
        if str(url.database).startswith("file:"):
            return url
        return url.set(database=os.path.abspath(os.path.expanduser(str(url.database))))
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _begin_transaction(connection: Connection) -> None:
    # A transaction that reads first and then writes could not begin to write: others have.
    writes = connection.get_execution_options().get("weft_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def lock(connection: Connection, *, is_sqlite: bool) -> None:
    """Let nobody else make tables or take looms over until the transaction ends."""
    if not is_sqlite:  # where a transaction that writes is alone anyway
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY)))


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def _version(connection: Connection) -> str | None:
    """Return the version of the tables; None where there are none."""
    if not sa.inspect(connection).has_table(_VERSION_TABLE):
        return None
    found: str | None = connection.exec_driver_sql(
        f"SELECT version_num FROM {_VERSION_TABLE}"
    ).scalar()
    return found


def _inode(file: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_transient(error: Exception) -> bool:
    """Whether it may go well when tried again."""
    cause: Any = getattr(error, "orig", None)
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY
    if getattr(error, "connection_invalidated", False):
        return True
    state = getattr(cause, "sqlstate", None)
    if state is None:
        # No word from the server at all: it is away, or stopped in the middle.
        psycopg: Any = import_module("psycopg") if cause is not None else None
        return psycopg is not None and isinstance(cause, psycopg.OperationalError)
    return state in _RETRY_STATES or state.startswith(_CONNECTION_STATES)
