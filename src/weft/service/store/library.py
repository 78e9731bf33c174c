"""Looms by name, in one database: made, opened, listed, renamed, removed and brought back."""

from __future__ import annotations

import difflib
import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.data_dir import data_dir
from ...errors import ConfigError, StoreError
from ...loom import Heddle, Loom
from .commit import PendingCommit, touch
from .database import Database, lock
from .heartbeats import ProcessHeartbeat
from .in_progress import count_in_progress
from .metadata import LoomMetadata
from .records import NodeRecord, PageOptions, page
from .rows import db_text, is_db_text
from .search import Hit, search_nodes
from .stored_loom import StoredLoom, accept_commit, insert_nodes
from .summary import LoomSummary
from .tables import looms, nodes, sampling, terminals

if TYPE_CHECKING:
    from ...lm.lm import LM

_WORDS, _LENGTH = 5, 40  # of a name
_MAX_NAME_LENGTH = 200
_STOP_WORDS = frozenset("a an the me my of to in and on for with is are it this that".split())
# What Windows keeps for its devices.
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
_MAX_TERMINALS = 256  # terminals


class TerminalState(NamedTuple):
    """What was drawn last in a terminal: a loom's name, and the number of the node read last."""

    loom: str
    number: int


class Library:
    """The looms of one database. Thread-safe; any number of processes may have it open."""

    def __init__(self, url: str | None = None, *, lease_s: float | None = None) -> None:
        """Open the database.

        Args:
            url: "sqlite:///FILE" or "postgresql://USER@HOST/NAME"; None: WEFT_DB, else weft.db in
                WEFT_HOME.
            lease_s: for servers that share a database: a loom is grown by one of them at a time,
                and is another's when that one has not been heard of for so many seconds. None:
                whoever wants grows it at any time.

        Raises: ConfigError for another URL, StoreError where it cannot be opened.
        """
        self.database = Database(url or os.environ.get("WEFT_DB") or default_url())
        self._writer = ProcessHeartbeat(self.database, lease_s=lease_s)

    # Looms

    def create(
        self, loom: Loom, *, name: str | None = None, title: str | None = None
    ) -> StoredLoom:
        """Keep a loom: durable when this returns. The tree goes on as the kept loom's.

        name: None makes one from the title or else the prompt, which nobody has yet.
        Raises: ConfigError for a name that is taken, or that is none.
        """
        if name is not None:
            check_name(name)
        loom_id = new_loom_id()
        kept, pending = self.database.write(
            lambda connection: self._create(connection, loom, name, title, loom_id)
        )
        if pending is None:  # it was kept before, though the answer was lost
            kept.sync()
        else:
            accept_commit(kept, pending)
        return kept

    def _create(
        self,
        connection: Connection,
        loom: Loom,
        name: str | None,
        title: str | None,
        loom_id: str,
    ) -> tuple[StoredLoom, PendingCommit | None]:
        row = connection.execute(sa.select(looms).where(looms.c.id == loom_id)).first()
        if row is not None:
            return StoredLoom(self.database, self._writer, row, loom), None
        lock(connection, is_sqlite=self.database.is_sqlite)  # names are given one by one
        if name is not None and _find_by_name(connection, name) is not None:
            raise ConfigError(f"there is a loom {name!r} already", hint="weft ls lists them all")
        name = name or _unused_name(connection, name_from_prompt(title or loom.user_prompt))
        values = {"turn": 0, "changed": 0.0, "rev": 0, "n_nodes": 0, "next_number": 0}
        row = connection.execute(
            sa.insert(looms)
            .values(id=loom_id, name=name, **values, **LoomMetadata.of(loom).columns())
            .returning(looms)
        ).one()
        kept = StoredLoom(self.database, self._writer, row, loom)
        return kept, insert_nodes(kept, connection)

    def open(
        self,
        name: str,
        lm: LM | None = None,
        *,
        force: bool = False,
        heddle_class: type[Heddle] = Heddle,
    ) -> StoredLoom:
        """Open a loom by its name or id. Without an LM it can be read, not grown.

        force: take the tokens as they are, even if another model with the same vocabulary size
        made them.
        Raises: ConfigError for a name that no loom has; ModelMismatch.
        """
        row = self.database.read(lambda connection: self._row(connection, name))
        head = LoomMetadata.loaded(row.head)
        kept = StoredLoom(
            self.database, self._writer, row, head.loom(lm, heddle_class, force=force)
        )
        kept.sync()
        return kept

    def looms(
        self, *, search: str | None = None, limit: int | None = None, after: str | None = None
    ) -> list[LoomSummary]:
        """Return the looms, the one changed last first.

        search: only those with this in their name or prompt, whatever its case. after: those that
        follow this one in the list (a name or id): the next page.
        """
        return self.database.read(lambda connection: _list(connection, search, limit, after))

    def row(self, name: str) -> LoomSummary:
        """Return what a list says of one loom, by its name or id. Raises: as `open`."""
        (found,) = self.database.read(
            lambda connection: _summaries(connection, [self._row(connection, name)])
        )
        return found

    def rename(self, name: str, new: str) -> LoomSummary:
        """Give a loom another name. Raises: ConfigError where it is taken, or is none."""
        check_name(new)

        def work(connection: Connection) -> LoomSummary:
            lock(connection, is_sqlite=self.database.is_sqlite)
            row, other = self._row(connection, name), _find_by_name(connection, new)
            if other is not None and other.key != row.key:
                raise ConfigError(f"there is a loom {new!r} already", hint="choose another name")
            touch(connection, row.key, name=new)
            return _summaries(connection, [self._row(connection, row.id)])[0]

        return self.database.write(work)

    def remove(self, names: str | Iterable[str]) -> list[LoomSummary]:
        """Take looms out of the list, all or none; `restore` brings back those of the last call."""
        wanted = [names] if isinstance(names, str) else list(names)

        def work(connection: Connection) -> list[LoomSummary]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            rows = {row.key: row for row in (self._row(connection, each) for each in wanted)}
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar() or 0
            for key in rows:
                touch(connection, key, removed=last + 1)
            return _summaries(connection, rows.values())

        return self.database.write(work)

    def restore(self) -> list[LoomSummary]:
        """Bring back what was removed last: the same looms, under their own names.

        Where a name was given away meanwhile, the loom gets a new one.
        Raises: StoreError where nothing is removed.
        """

        def work(connection: Connection) -> list[LoomSummary]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar()
            if last is None:
                raise StoreError("no loom is removed: there is nothing to bring back")
            query = sa.select(looms).where(looms.c.removed == last).order_by(looms.c.turn)
            found = []
            for row in connection.execute(query).all():
                taken = _find_by_name(connection, row.name) is not None
                name = _unused_name(connection, row.name) if taken else row.name
                touch(connection, row.key, removed=None, name=name)
                found.append(self._row(connection, row.id))
            return _summaries(connection, found)

        return self.database.write(work)

    def restore_last(
        self, nodes_of: str | None = None, *, only_nodes: bool = False
    ) -> list[tuple[str, str]]:
        """Bring back what was removed last: looms, or nodes of the loom that is named.

        only_nodes: of that loom only, whatever else was removed since. Returns the names that the
        looms had and have: another where theirs was given away meanwhile. What was done since
        stays. Raises: StoreError where nothing is removed.
        """
        removed = [] if only_nodes else self.removed()
        if nodes_of is not None:
            kept = self.open(nodes_of)
            last = kept.last_removal()
            if last is not None and (not removed or last.at > removed[0].changed):
                kept.restore_nodes()
                return [(kept.name, kept.name)]
            if only_nodes:
                raise StoreError(f"no node of {nodes_of} is removed: nothing is to be brought back")
        names = {row.id: row.name for row in removed}
        return [(names[row.id], row.name) for row in self.restore()]

    def removed(self) -> list[LoomSummary]:
        """Return the looms that are removed and not purged, the last ones first."""
        query = sa.select(looms).where(looms.c.removed.is_not(None))
        query = query.order_by(looms.c.removed.desc(), looms.c.turn.desc())
        return self.database.read(
            lambda connection: _summaries(connection, connection.execute(query).all())
        )

    def purge(self, names: Iterable[str] | None = None) -> int:
        """Delete removed looms for good; return how many.

        names: ids or names of removed ones; None: all that are removed.
        """
        wanted = None if names is None else set(names)

        def work(connection: Connection) -> int:
            query = sa.select(looms).where(looms.c.removed.is_not(None))
            rows = [
                row
                for row in connection.execute(query)
                if wanted is None or row.id in wanted or row.name in wanted
            ]
            for row in rows:
                connection.execute(sa.delete(looms).where(looms.c.key == row.key))
            if rows:  # parameters that no node names any more
                named = sa.select(nodes.c.params).where(nodes.c.params == sampling.c.key)
                connection.execute(sa.delete(sampling).where(~sa.exists(named)))
            return len(rows)

        return self.database.write(work)

    # Reading without opening

    def nodes(self, name: str, **which: Unpack[PageOptions]) -> list[NodeRecord]:
        """Return nodes of a loom as plain records, a page of them; see `StoredLoom.nodes`."""
        return self.database.read(
            lambda connection: page(connection, self._row(connection, name).key, **which)
        )

    def find(self, words: str, *, loom: str | None = None, limit: int = 20) -> list[Hit]:
        """Return the nodes in which all these words stand, the best first, over all looms.

        words: also "phrases" in quotes, and beginnings of words with a star. Case and accents make
        no difference; whatever is no letter or digit is passed over, so nothing is a fault of
        grammar. Of a node, the first 100,000 characters are searched.
        loom: in this one only.
        Raises: ConfigError where there is no word in it.
        """

        def work(connection: Connection) -> list[Hit]:
            key = None if loom is None else self._row(connection, loom).key
            is_sqlite = self.database.is_sqlite
            return search_nodes(connection, words, is_sqlite=is_sqlite, loom=key, limit=limit)

        return self.database.read(work)

    def unknown_name_error(self, name: str) -> ConfigError:
        """Return the error for a name that no loom has, with the nearest that there are."""
        return self.database.read(lambda connection: _unknown_name_error(connection, name))

    def _row(self, connection: Connection, name: str) -> Any:
        if not is_db_text(name):  # no loom can have it
            raise _unknown_name_error(connection, name)
        found = _find_by_name(connection, name)
        if found is None:
            found = connection.execute(sa.select(looms).where(looms.c.id == name)).first()
        if found is None:
            gone = sa.select(looms.c.key).where(looms.c.name == name)
            if connection.execute(gone).first() is None:
                raise _unknown_name_error(connection, name)
        if found is None or found.removed is not None:
            raise StoreError(f"the loom {name} is removed", hint="weft rm --undo brings it back")
        return found

    # Terminals

    def last_loom(self, terminal: str) -> TerminalState | None:
        """Return what was drawn last in a terminal; None where that is nothing, or is gone."""
        return self._terminal_state(terminals.c.mark == terminal) if terminal else None

    def last_loom_anywhere(self) -> TerminalState | None:
        """Return what was drawn last in any terminal, else the loom changed last; None for none."""
        found = self._terminal_state()
        if found is None:
            rows = self.looms(limit=1)
            found = TerminalState(rows[0].name, 0) if rows else None
        return found

    def set_last_loom(self, terminal: str, loom: str, number: int = 0) -> None:
        """Remember that a loom was drawn in a terminal, and the number of the node read there."""
        if not terminal:
            return
        self.database.write(
            lambda connection: self._set_last_loom(connection, terminal, loom, number)
        )

    def _set_last_loom(self, connection: Connection, terminal: str, loom: str, number: int) -> None:
        row = self._row(connection, loom)
        turn = sa.select(sa.func.coalesce(sa.func.max(terminals.c.turn), 0) + 1).scalar_subquery()
        values = {"loom": row.key, "number": number, "turn": turn}
        statement = self.database.insert(terminals).values(mark=terminal, **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=[terminals.c.mark], set_=values)
        )
        last = sa.select(sa.func.max(terminals.c.turn)).scalar_subquery()
        old = sa.delete(terminals).where(terminals.c.turn <= last - _MAX_TERMINALS)
        connection.execute(old)

    def _terminal_state(self, *where: Any) -> TerminalState | None:
        query = (
            sa.select(looms.c.name, terminals.c.number)
            .join(looms, looms.c.key == terminals.c.loom)
            .where(looms.c.removed.is_(None), *where)
            .order_by(terminals.c.turn.desc())
            .limit(1)
        )
        row = self.database.read(lambda connection: connection.execute(query).first())
        return None if row is None else TerminalState(row.name, row.number)

    def close(self) -> None:
        """Let go of the database; idempotent."""
        self._writer.close()
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def default_url() -> str:
    """Return where looms are kept unless somebody says otherwise: weft.db in WEFT_HOME."""
    return sa.URL.create("sqlite", database=str(data_dir() / "weft.db")).render_as_string()


def name_from_prompt(prompt: str) -> str:
    """Return a loom's name from its prompt: a few words that any file system takes."""
    text = unicodedata.normalize("NFKC", prompt).lower()[:500]
    words = [word for word in _words(text) if word not in _STOP_WORDS]
    name = "-".join(words[:_WORDS])
    while len(name) > _LENGTH and "-" in name:
        name = name.rpartition("-")[0]
    name = name[:_LENGTH]
    # Digits alone are a node's number.
    return (
        f"loom-{name}".rstrip("-")
        if name.isdigit() or _RESERVED.fullmatch(name)
        else name or "loom"
    )


def _words(text: str) -> list[str]:
    """Return runs of letters and digits, with the marks on them: vowels in many scripts."""
    kept = " "
    for each in text:
        is_mark = unicodedata.category(each).startswith("M") and not kept.endswith(" ")
        kept += each if each.isalnum() or is_mark else " "
    return kept.split()


def new_loom_id() -> str:
    """Return an id for a new loom."""
    return secrets.token_hex(8)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that no loom can have."""
    why = ""
    if not isinstance(name, str) or not name.strip():
        why = "a name has letters"
    elif len(name) > _MAX_NAME_LENGTH:
        why = f"a name has {_MAX_NAME_LENGTH} characters at most"
    elif not name.isprintable() or not is_db_text(name) or "/" in name or "\\" in name:
        why = "a name has no slashes, and nothing that cannot be shown"
    elif name != name.strip() or name.startswith(("-", ".")):
        why = "a name begins with no dash or dot, and has no spaces around it"
    elif name.isdecimal():
        why = "digits alone are a node's number"
    if why:
        raise ConfigError(f"{name!r:.80} is no name for a loom: {why}")


def _find_by_name(connection: Connection, name: str) -> Any:
    query = sa.select(looms).where(looms.c.name == name, looms.c.removed.is_(None))
    return connection.execute(query).first() if is_db_text(name) else None


def _unused_name(connection: Connection, stem: str) -> str:
    """Return a name that is not taken: the stem, else with .2, .3 …"""
    return next(name for name in _numbered(stem) if _find_by_name(connection, name) is None)


def _numbered(stem: str) -> Iterator[str]:
    """Yield a name, then the name with .2, .3, …: a dot, since names end in numbers themselves."""
    yield stem
    match = re.fullmatch(r"(.+)\.(\d{1,6})", stem)
    base, n = (match[1], int(match[2])) if match else (stem, 1)
    while True:
        n += 1
        yield f"{base}.{n}"


def _unknown_name_error(connection: Connection, name: str) -> ConfigError:
    query = sa.select(looms.c.name).where(looms.c.removed.is_(None))
    names = list(connection.execute(query.order_by(looms.c.turn.desc())).scalars())
    near = difflib.get_close_matches(name, names, 3, 0.4)
    here = f"near it: {', '.join(near)}" if near else f"there are {', '.join(names[:3])}"
    if not names:
        here = "there is none yet"
    return ConfigError(f"there is no loom {name!r}; {here}", hint="weft ls lists them all")


def _list(
    connection: Connection, search: str | None, limit: int | None, after: str | None
) -> list[LoomSummary]:
    query = sa.select(looms).where(looms.c.removed.is_(None))
    if search:
        wanted = f"%{db_text(search).lower().translate(_LIKE)}%"
        names = sa.func.lower(looms.c.name), sa.func.lower(looms.c.prompt)
        query = query.where(sa.or_(*(each.like(wanted, escape="\\") for each in names)))
    if after is not None:
        last = _find_by_name(connection, after)
        if last is None and is_db_text(after):
            last = connection.execute(sa.select(looms).where(looms.c.id == after)).first()
        if last is None:
            raise _unknown_name_error(connection, after)
        place = sa.tuple_(looms.c.turn, looms.c.key)
        query = query.where(place < sa.tuple_(last.turn, last.key))
    query = query.order_by(looms.c.turn.desc(), looms.c.key.desc()).limit(limit)
    return _summaries(connection, connection.execute(query).all())


_LIKE = str.maketrans({each: f"\\{each}" for each in "\\%_"})


def _summaries(connection: Connection, rows: Iterable[Any]) -> list[LoomSummary]:
    """Return looms as lists show them: what grows, or grew when its process died, is counted."""
    growing = count_in_progress(connection)
    return [
        LoomSummary(
            row.id,
            row.name,
            row.model,
            row.engine,
            row.prompt,
            LoomMetadata.loaded(row.head).created,
            row.changed,
            row.n_nodes + growing[row.key],
            row.rev,
            row.removed is not None,
        )
        for row in rows
    ]
