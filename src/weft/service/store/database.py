"""The database of looms: SQLite in a file, or PostgreSQL.

`read` and `write` run a function in a short transaction. They retry it while the database is busy
or unreachable. A commit may have succeeded although its answer was lost, so a function that writes
must check whether an earlier attempt has written already.
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

from ..._core.installation import install_hint
from ...errors import ConfigError, StoreError, StoreUnavailable

HEAD = "4"  # revision of the newest file in migrations/versions
_VERSION_TABLE = "weft_version"
_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY = (
    0x77656674  # "weft": the advisory lock in PostgreSQL for creating tables and naming looms
)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_RETRY_STATES = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout
_CONNECTION_STATES = (
    "08",
    "57P",
)  # classes: connection lost, server stopping or starting
_WRITABLE_HINT = "set WEFT_HOME to a folder that you can write, or WEFT_DB to another database"
_HINTS = {
    sqlite3.SQLITE_READONLY: _WRITABLE_HINT,
    sqlite3.SQLITE_CANTOPEN: _WRITABLE_HINT,
    sqlite3.SQLITE_PERM: _WRITABLE_HINT,
    sqlite3.SQLITE_FULL: "free space on the disk and try again; nothing was saved",
    sqlite3.SQLITE_IOERR: "free space on the disk, or check it; nothing was saved",
    sqlite3.SQLITE_CORRUPT: "move the file away, or restore a copy of it",
    sqlite3.SQLITE_NOTADB: "set WEFT_DB to another database",
}
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Database:
    """An open database of looms: SQLite or PostgreSQL. Thread-safe.

    `read` and `write` run a function in a transaction. A forked process gets its own connections.
    """

    def __init__(self, url: str, *, patience_s: float = 20.0) -> None:
        """Open the database; create or migrate its tables.

        Args:
            url: "sqlite:///FILE" (also "sqlite:///file:FILE?vfs=…&uri=true") or "postgresql://…".
            patience_s: maximum time to wait for other writers, or for an unreachable server.

        Raises: ConfigError for an invalid URL. StoreError if the database cannot be opened, or if
            a newer version of Weft has changed its tables.
        """
        self.url = _read_url(url)
        self.patience_s = patience_s
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.name = self.url.render_as_string(hide_password=True)
        # Only SQLite can parse a "file:" URI, which may contain options.
        is_path = self.is_sqlite and not str(self.url.database).startswith("file:")
        self._file = Path(str(self.url.database)) if is_path else None
        self._inode: tuple[int, int] | None = None
        self._has_warned = False  # about a file system without WAL
        self._engine = self._create_engine()
        self._bind_to_process()
        try:
            self._migrate()
        except BaseException:
            self._engine.dispose()
            raise

    def _bind_to_process(self) -> None:
        """Drop connections that were inherited from a parent process."""
        self._pid = os.getpid()
        # Serializes the writers of this process; SQLite's file lock serializes processes.
        self._write_lock = threading.Lock() if self.is_sqlite else nullcontext()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a read-only transaction and return its result.

        `work` may be called several times.
        """
        return self._run(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction, which is durable when this returns; return its result.

        `work` may be called several times, and must detect if an earlier attempt has succeeded.

        Raises: StoreError; then nothing has changed.
        """
        return self._run(work, writes=True)

    @property
    def now(self) -> sa.ColumnElement[float]:
        """The database's clock in seconds since 1970, the same for all hosts."""
        if self.is_sqlite:
            return sa.literal_column("((julianday('now') - 2440587.5) * 86400.0)", sa.Float())
        return sa.literal_column(
            "cast(extract(epoch from clock_timestamp()) as double precision)", sa.Float()
        )

    def insert(self, table: sa.Table) -> Any:
        """Return an INSERT that supports ON CONFLICT."""
        return (sqlite.insert if self.is_sqlite else postgresql.insert)(table)

    def close(self) -> None:
        """Close all connections; idempotent. Later calls open new ones."""
        self._engine.dispose(close=self._pid == os.getpid())

    # Transactions

    def _run(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        """Run a function in a transaction; retry while the database is busy or unreachable."""
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
            ) as error:  # SQLite's messages can contain invalid UTF-8
                raise self._as_store_error(error) from error
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, 0.25)

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        """Yield a connection inside a transaction, which the block's end commits."""
        if self._pid != os.getpid():  # forked: the connections belong to the parent
            self._engine.dispose(close=False)
            self._bind_to_process()
        self._check_file()
        with self._write_lock if writes else nullcontext():
            with self._engine.connect() as connection:
                options = {"weft_writes": True} if writes else {}
                with connection.execution_options(**options).begin():
                    yield connection

    def _check_file(self) -> None:
        """Check that the file was not replaced; SQLite would write to the deleted file."""
        if self._file is None or self._inode is None:
            return
        inode = _inode(self._file)
        if inode == self._inode:
            return
        self._engine.dispose()
        if inode is None:
            raise StoreUnavailable(
                f"the database {self._file} is gone: it was moved or deleted while in use",
                hint="restore it; loom.save(path) saves what is in memory",
            )
        _log.warning("%s was replaced by another file while in use", self._file)
        self._inode = None
        self._migrate()

    # Opening

    def _create_engine(self) -> Engine:
        """Create SQLAlchemy's engine, with the settings for this kind of database."""
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
            hint = _driver_hint()
            raise StoreError(f"{hint} ({error})", hint=hint) from error
        except OSError as error:
            raise StoreError(
                f"cannot save looms in {self._file}: {error}", hint=_WRITABLE_HINT
            ) from error

    def _configure(self, connection: sqlite3.Connection, _: object) -> None:
        """Set the pragmas of a new SQLite connection."""
        connection.isolation_level = None  # transactions are started explicitly
        # SQLite's own lower() handles only ASCII.
        connection.create_function("lower", 1, _lower, deterministic=True)
        run = connection.execute
        run(f"PRAGMA busy_timeout = {int(1000 * min(5.0, self.patience_s))}")
        run("PRAGMA foreign_keys = ON")
        # Each commit is on the disk when it returns.
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
                    "SQLite has no shared memory on the file system of %s (%s): readers and "
                    "writers wait for each other. A local disk or PostgreSQL avoids that",
                    self.name,
                    mode,
                )

    def _migrate(self) -> None:
        """Create or upgrade the tables, under a lock."""
        if self.read(_version) != HEAD:
            self.write(self._upgrade)
        if self._file is not None:
            self._inode = _inode(self._file)

    def _upgrade(self, connection: Connection) -> None:
        """Run Alembic's migrations. Raises: StoreError for tables of a newer version of Weft."""
        lock(connection, is_sqlite=self.is_sqlite)
        version = _version(connection)
        if version == HEAD:  # another process has migrated it
            return
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes.update(connection=connection, version_table=_VERSION_TABLE)
        scripts = ScriptDirectory.from_config(config)
        revisions = {script.revision for script in scripts.walk_revisions()}
        if version is not None and version not in revisions:
            raise StoreError(
                f"the database {self.name} was changed by a newer Weft (its tables are version "
                f"{version}, this Weft knows {HEAD})",
                hint="update Weft, or set WEFT_DB to another database",
            )
        command.upgrade(config, "head")

    # Errors

    def _as_store_error(self, error: Exception) -> StoreUnavailable:
        """Convert a database error to a StoreUnavailable with a helpful message and hint."""
        cause = getattr(error, "orig", None) or error
        message = " ".join(str(cause).split()) or type(cause).__name__
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY:
            return StoreUnavailable(
                f"the database {self.name} has been locked by another process for "
                f"{self.patience_s:g} s; nothing was saved",
                hint="stop the other process, and try again",
            )
        if isinstance(cause, ImportError):
            hint = _driver_hint()
            return StoreUnavailable(f"{hint} ({message})", hint=hint)
        hint = _HINTS.get(code, "") if self.is_sqlite else ""
        if not self.is_sqlite and _is_transient(error):
            hint = "check that PostgreSQL runs and can be reached, and try again"
        return StoreUnavailable(f"the database {self.name} cannot be used: {message}", hint=hint)


def _driver_hint() -> str:
    return f"PostgreSQL needs its driver: {install_hint('postgresql')}"


def _read_url(text: str) -> URL:
    """Parse a database URL. Raises: ConfigError."""
    allowed = "sqlite:///FILE and postgresql://USER@HOST/NAME"
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError(f"{text!r} is no database URL; allowed are {allowed}") from error
    if url.drivername == "postgres":
        url = url.set(drivername="postgresql")
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ConfigError(f"looms cannot be saved in {backend}; allowed are {allowed}")
    if backend == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ConfigError("a database in memory is not saved; give a file: sqlite:///FILE")
        if str(url.database).startswith("file:"):
            return url
        return url.set(database=os.path.abspath(os.path.expanduser(str(url.database))))
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _begin_transaction(connection: Connection) -> None:
    """Start a write transaction on SQLite, which takes its lock at once."""
    # IMMEDIATE: a transaction that starts as a reader cannot become a writer if others wrote.
    writes = connection.get_execution_options().get("weft_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def lock(connection: Connection, *, is_sqlite: bool) -> None:
    """Acquire the lock for creating tables and naming looms, until the transaction ends."""
    if not is_sqlite:  # SQLite has only one writer at a time
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY)))


def _lower(text: str | None) -> str | None:
    """SQL function: lowercase for all of Unicode, unlike SQLite's own."""
    return None if text is None else text.lower()


def _version(connection: Connection) -> str | None:
    """Return the version of the tables; None if there are no tables."""
    if not sa.inspect(connection).has_table(_VERSION_TABLE):
        return None
    version: str | None = connection.exec_driver_sql(
        f"SELECT version_num FROM {_VERSION_TABLE}"
    ).scalar()
    return version


def _inode(file: Path) -> tuple[int, int] | None:
    """Return the identity of a file; None if it does not exist."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_transient(error: Exception) -> bool:
    """Return True if a retry may succeed."""
    cause: Any = getattr(error, "orig", None)
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY
    if getattr(error, "connection_invalidated", False):
        return True
    state = getattr(cause, "sqlstate", None)
    if state is None:
        # Without a state the server did not answer: it is unreachable, or was stopped.
        psycopg: Any = import_module("psycopg") if cause is not None else None
        return psycopg is not None and isinstance(cause, psycopg.OperationalError)
    return state in _RETRY_STATES or state.startswith(_CONNECTION_STATES)
