"""Who may grow a loom, where several servers share one database: a row, for a while, renewed.

The time is the database's, so hosts whose clocks differ agree. A lease that ran out is anybody's:
its owner has died, or has been away for too long and must not write as if nothing were.
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
    """A loom's owner. term: rises with each new owner; left_s: how long it is still his."""

    loom: str
    owner: str
    term: int
    left_s: float


class LoomLeases:
    """The leases of a database. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, loom: str, owner: str, ttl_s: float) -> LoomLease | None:
        """Take a loom that is nobody's, or was somebody's who is gone; None: it is another's.

        loom: its id. The owner's own lease is renewed. Raises: ConfigError for a time that is none.
        """
        _check(loom, owner, ttl_s)

        def work(connection: Connection) -> LoomLease | None:
            now = self._database.now
            found = self._lock_row(connection, loom)
            if found is None:
                values = {"loom": loom, "owner": owner, "term": 1, "expires": now + ttl_s}
                first = self._database.insert(leases).values(**values).on_conflict_do_nothing()
                if connection.execute(first.returning(leases.c.loom)).first() is None:
                    return None  # another one was quicker
            elif found.left_s > 0 and found.owner != owner:
                return None
            else:
                term = found.term if found.owner == owner and found.left_s > 0 else found.term + 1
                connection.execute(
                    sa.update(leases)
                    .where(leases.c.loom == loom)
                    .values(owner=owner, term=term, expires=now + ttl_s)
                )
            return self._lock_row(connection, loom)

        return self._database.write(work)

    def renew(self, loom: str, owner: str, ttl_s: float) -> LoomLease | None:
        """Keep a lease that is still the owner's; None: it ran out, and is lost."""
        _check(loom, owner, ttl_s)

        def work(connection: Connection) -> LoomLease | None:
            now = self._database.now
            mine = (leases.c.loom == loom, leases.c.owner == owner, leases.c.expires > now)
            done = connection.execute(sa.update(leases).where(*mine).values(expires=now + ttl_s))
            return self._lock_row(connection, loom) if done.rowcount else None

        return self._database.write(work)

    def release(self, loom: str, owner: str) -> bool:
        """Give a lease back; whether it was the owner's. Its term stays known."""

        def work(connection: Connection) -> bool:
            mine = (leases.c.loom == loom, leases.c.owner == owner, leases.c.expires > 0)
            return bool(
                connection.execute(sa.update(leases).where(*mine).values(expires=0.0)).rowcount
            )

        return self._database.write(work)

    def holder(self, loom: str) -> LoomLease | None:
        """Return the lease of a loom; None where it is nobody's."""
        found = self._database.read(lambda connection: self._lease(connection, loom))
        return found if found is not None and found.left_s > 0 else None

    def owned_by(self, owner: str) -> list[LoomLease]:
        """Return the leases that are an owner's now."""
        left = (leases.c.expires - self._database.now).label("left_s")
        query = sa.select(leases.c.loom, leases.c.owner, leases.c.term, left).where(
            leases.c.owner == owner, leases.c.expires > self._database.now
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [LoomLease(*row) for row in rows]

    def _lock_row(self, connection: Connection, loom: str) -> LoomLease | None:
        return self._lease(connection, loom, locks=True)

    def _lease(self, connection: Connection, loom: str, *, locks: bool = False) -> LoomLease | None:
        left = (leases.c.expires - self._database.now).label("left_s")
        query = sa.select(leases.c.loom, leases.c.owner, leases.c.term, left)
        query = query.where(leases.c.loom == loom)
        row = connection.execute(query.with_for_update() if locks else query).first()
        return None if row is None else LoomLease(*row)


class LeaseHolder:
    """One loom's lease, taken and kept in the very transactions that grow it.

    So whoever was away for so long that another has taken the loom cannot write what he had grown:
    his term is over. All calls are made with the loom's row locked.
    """

    def __init__(self, database: Database, loom: str, ttl_s: float) -> None:
        _check(loom, "?", ttl_s)
        self._database = database
        self._loom = loom
        self._ttl_s = ttl_s
        self._owner = ""
        self._term = 0

    def acquire(self, connection: Connection, owner: str, is_gone: Callable[[str], bool]) -> str:
        """Take the loom, and return whose it was before; "" where that is known to have ended.

        is_gone: whether an owner, by his mark, has died: his lease is not waited for.
        Raises: QueueFull while it is another's.
        """
        row = connection.execute(
            sa.select(leases, (leases.c.expires - self._database.now).label("left_s"))
            .where(leases.c.loom == self._loom)
            .with_for_update()
        ).first()
        former = "" if row is None or row.owner == owner or row.expires == 0 else row.owner
        if row is not None and former and row.left_s > 0 and not is_gone(former):
            raise QueueFull(
                "the loom is being grown by another server just now",
                retry_after_s=min(row.left_s, 1.0),
                hint="try again when that has ended",
            )
        self._owner, self._term = owner, 1 if row is None else row.term + 1
        values = {"owner": owner, "term": self._term, "expires": self._database.now + self._ttl_s}
        statement = self._database.insert(leases).values(loom=self._loom, **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=[leases.c.loom], set_=values)
        )
        return former

    def renew(self, connection: Connection, *, is_finished: bool) -> None:
        """Keep the loom for as long again, or give it back. Raises: LeaseLost."""
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
                "this server was away for too long: another one has taken over the loom",
                hint="try again; what was grown so far is there, as interrupted",
            )


def _check(loom: str, owner: str, ttl_s: float) -> None:
    if not loom or not owner:
        raise ConfigError(f"a lease has a loom and an owner, not {loom!r} and {owner!r}")
    if not 0 < ttl_s < 1e9:
        raise ConfigError(f"ttl_s is {ttl_s!r}; allowed is a number of seconds above 0")
