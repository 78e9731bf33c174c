"""Leases of looms, for servers that share a database. Only the owner of a lease grows a loom.

The database's clock decides, so clocks of hosts may differ. Another server can acquire an expired
lease; the previous owner's next write then fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import ConfigError, LeaseLost, QueueFull
from .database import Database
from .tables import leases


class LoomLease(NamedTuple):
    """The right of one process ("owner") to grow a loom, until it expires."""

    loom: str  # id
    owner: str
    term: int  # rises with each new owner
    left_s: float  # remaining time; negative if expired


class LoomLeases:
    """The leases of all looms in a database. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, loom: str, owner: str, ttl_s: float) -> LoomLease | None:
        """Acquire or renew a lease; return None while another owner has it.

        Args:
            loom: id of the loom.
            owner: id of the process that acquires it.
            ttl_s: seconds until it expires.

        Raises: ConfigError for an invalid `ttl_s`.
        """
        _check_lease_arguments(loom, owner, ttl_s)

        def work(connection: Connection) -> LoomLease | None:
            now = self._database.now
            lease = self._lock_row(connection, loom)
            if lease is None:
                values = {"loom": loom, "owner": owner, "term": 1, "expires": now + ttl_s}
                first = self._database.insert(leases).values(**values).on_conflict_do_nothing()
                if connection.execute(first.returning(leases.c.loom)).first() is None:
                    return None  # another process has acquired it meanwhile
            elif lease.left_s > 0 and lease.owner != owner:
                return None
            else:
                term = lease.term if lease.owner == owner and lease.left_s > 0 else lease.term + 1
                connection.execute(
                    sa.update(leases)
                    .where(leases.c.loom == loom)
                    .values(owner=owner, term=term, expires=now + ttl_s)
                )
            return self._lock_row(connection, loom)

        return self._database.write(work)

    def renew(self, loom: str, owner: str, ttl_s: float) -> LoomLease | None:
        """Renew a lease for `ttl_s` seconds; return None if it has expired or has another owner."""
        _check_lease_arguments(loom, owner, ttl_s)

        def work(connection: Connection) -> LoomLease | None:
            now = self._database.now
            mine = (leases.c.loom == loom, leases.c.owner == owner, leases.c.expires > now)
            done = connection.execute(sa.update(leases).where(*mine).values(expires=now + ttl_s))
            return self._lock_row(connection, loom) if done.rowcount else None

        return self._database.write(work)

    def release(self, loom: str, owner: str) -> bool:
        """Release a lease; return True if the owner had it. The term is kept."""

        def work(connection: Connection) -> bool:
            mine = (leases.c.loom == loom, leases.c.owner == owner, leases.c.expires > 0)
            return bool(
                connection.execute(sa.update(leases).where(*mine).values(expires=0.0)).rowcount
            )

        return self._database.write(work)

    def holder(self, loom: str) -> LoomLease | None:
        """Return the lease of a loom that has not expired; None if there is none. loom: its id."""
        lease = self._database.read(lambda connection: self._lease(connection, loom))
        return lease if lease is not None and lease.left_s > 0 else None

    def owned_by(self, owner: str) -> list[LoomLease]:
        """Return the leases of an owner that have not expired."""
        left = (leases.c.expires - self._database.now).label("left_s")
        query = sa.select(leases.c.loom, leases.c.owner, leases.c.term, left).where(
            leases.c.owner == owner, leases.c.expires > self._database.now
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [LoomLease(*row) for row in rows]

    def _lock_row(self, connection: Connection, loom: str) -> LoomLease | None:
        """Lock the lease's row and return the lease; None if there is none."""
        return self._lease(connection, loom, locks=True)

    def _lease(self, connection: Connection, loom: str, *, locks: bool = False) -> LoomLease | None:
        """Return the unexpired lease of a loom; None if there is none. locks: lock its row."""
        left = (leases.c.expires - self._database.now).label("left_s")
        query = sa.select(leases.c.loom, leases.c.owner, leases.c.term, left)
        query = query.where(leases.c.loom == loom)
        row = connection.execute(query.with_for_update() if locks else query).first()
        return None if row is None else LoomLease(*row)


class LeaseHolder:
    """One loom's lease, acquired and renewed in the transactions that write its nodes.

    A server whose lease was taken over therefore cannot write: its term is outdated. Lock the
    loom's row before each call.
    """

    def __init__(self, database: Database, loom: str, ttl_s: float) -> None:
        _check_lease_arguments(loom, "?", ttl_s)
        self._database = database
        self._loom = loom
        self._ttl_s = ttl_s
        self._owner = ""
        self._term = 0

    def acquire(self, connection: Connection, owner: str, is_gone: Callable[[str], bool]) -> str:
        """Acquire the lease for this process.

        Args:
            owner: id of this process.
            is_gone: called with the id of another owner; returns True if its process has exited, so
                that its lease need not expire first.

        Returns: the id of the previous owner, whose nodes in progress must be interrupted; "" if it
            had released the lease, or if there was none.
        Raises: QueueFull while another owner has the lease.
        """
        row = connection.execute(
            sa.select(leases, (leases.c.expires - self._database.now).label("left_s"))
            .where(leases.c.loom == self._loom)
            .with_for_update()
        ).first()
        former = "" if row is None or row.owner == owner or row.expires == 0 else row.owner
        if row is not None and former and row.left_s > 0 and not is_gone(former):
            raise QueueFull(
                "the loom is being grown by another server",
                retry_after_s=min(row.left_s, 1.0),
                hint="try again when that has finished",
            )
        self._owner, self._term = owner, 1 if row is None else row.term + 1
        values = {"owner": owner, "term": self._term, "expires": self._database.now + self._ttl_s}
        statement = self._database.insert(leases).values(loom=self._loom, **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=[leases.c.loom], set_=values)
        )
        return former

    def renew(self, connection: Connection, *, is_finished: bool) -> None:
        """Renew the lease, or release it.

        is_finished: release it, because no nodes of the loom are being generated any more.
        Raises: LeaseLost if another owner has acquired it.
        """
        expires = sa.literal(0.0) if is_finished else self._database.now + self._ttl_s
        mine = (
            (leases.c.loom, self._loom),
            (leases.c.owner, self._owner),
            (leases.c.term, self._term),
        )
        done = connection.execute(
            sa.update(leases)
            .where(*(column == value for column, value in mine))
            .values(expires=expires)
        )
        if not done.rowcount:
            raise LeaseLost(
                "the lease has expired, and another server has taken over the loom",
                hint="try again; the nodes so far are saved as interrupted",
            )


def _check_lease_arguments(loom: str, owner: str, ttl_s: float) -> None:
    """Raise ConfigError for empty ids and an invalid duration."""
    if not loom or not owner:
        raise ConfigError(f"a lease needs a loom and an owner, not {loom!r} and {owner!r}")
    if not 0 < ttl_s < 1e9:
        raise ConfigError(f"ttl_s is {ttl_s!r}; allowed is a number of seconds above 0")
