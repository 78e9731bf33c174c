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
from .database import Database, lock
from .facts import LoomRow
from .find import Hit, find
from .growing import growing_nodes
from .head import LoomHead
from .kept import KeptLoom, begin, settle
from .records import NodeRow, PageOptions, page
from .rows import is_plain, plain
from .tables import looms, nodes, sampling, terminals
from .writers import Writer
from .writing import Draft, touch

if TYPE_CHECKING:
    from ...lm.lm import LM

_WORDS, _LENGTH = 5, 40  # of a name
_MOST_NAME = 200
_SMALL = frozenset("a an the me my of to in and on for with is are it this that".split())
# What Windows keeps for its devices.
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
_REMEMBERED = 256  # terminals


class Drawn(NamedTuple):
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
        self._writer = Writer(self.database, lease_s=lease_s)

    # Looms

    def create(self, loom: Loom, *, name: str | None = None, title: str | None = None) -> KeptLoom:
        """Keep a loom: durable when this returns. The tree goes on as the kept loom's.

        name: None makes one from the title or else the prompt, which nobody has yet.
        Raises: ConfigError for a name that is taken, or that is none.
        """
        if name is not None:
            check_name(name)
        mark = new_mark()
        kept, draft = self.database.write(
            lambda connection: self._created(connection, loom, name, title, mark)
        )
        if draft is None:  # it was kept before, though the answer was lost
            kept.sync()
        else:
            settle(kept, draft)
        return kept

    def _created(
        self,
        connection: Connection,
        loom: Loom,
        name: str | None,
        title: str | None,
        mark: str,
    ) -> tuple[KeptLoom, Draft | None]:
        row = connection.execute(sa.select(looms).where(looms.c.id == mark)).first()
        if row is not None:
            return KeptLoom(self.database, self._writer, row, loom), None
        lock(connection, is_sqlite=self.database.is_sqlite)  # names are given one by one
        if name is not None and _named(connection, name) is not None:
            raise ConfigError(f"there is a loom {name!r} already", hint="weft ls lists them all")
        name = name or _fresh(connection, name_of(title or loom.user_prompt))
        values = {"turn": 0, "changed": 0.0, "rev": 0, "n_nodes": 0, "next_number": 0}
        row = connection.execute(
            sa.insert(looms)
            .values(id=mark, name=name, **values, **LoomHead.of(loom).columns())
            .returning(looms)
        ).one()
        kept = KeptLoom(self.database, self._writer, row, loom)
        return kept, begin(kept, connection)

    def open(
        self,
        name: str,
        lm: LM | None = None,
        *,
        force: bool = False,
        heddle_class: type[Heddle] = Heddle,
    ) -> KeptLoom:
        """Open a loom by its name or id. Without an LM it can be read, not grown.

        force: take the tokens as they are, even if another model with the same vocabulary size
        made them.
        Raises: ConfigError for a name that no loom has; ModelMismatch.
        """
        row = self.database.read(lambda connection: self._row(connection, name))
        head = LoomHead.loaded(row.head)
        kept = KeptLoom(self.database, self._writer, row, head.loom(lm, heddle_class, force=force))
        kept.sync()
        return kept

    def looms(
        self, *, search: str | None = None, limit: int | None = None, after: str | None = None
    ) -> list[LoomRow]:
        """Return the looms, the one changed last first.

        search: only those with this in their name or prompt, whatever its case. after: those that
        follow this one in the list (a name or id): the next page.
        """
        return self.database.read(lambda connection: _listed(connection, search, limit, after))

    def row(self, name: str) -> LoomRow:
        """Return what a list says of one loom, by its name or id. Raises: as `open`."""
        (found,) = self.database.read(
            lambda connection: _shown(connection, [self._row(connection, name)])
        )
        return found

    def rename(self, name: str, new: str) -> LoomRow:
        """Give a loom another name. Raises: ConfigError where it is taken, or is none."""
        check_name(new)

        def work(connection: Connection) -> LoomRow:
            lock(connection, is_sqlite=self.database.is_sqlite)
            row, other = self._row(connection, name), _named(connection, new)
            if other is not None and other.key != row.key:
                raise ConfigError(f"there is a loom {new!r} already", hint="choose another name")
            touch(connection, row.key, name=new)
            return _shown(connection, [self._row(connection, row.id)])[0]

        return self.database.write(work)

    def remove(self, names: str | Iterable[str]) -> list[LoomRow]:
        """Take looms out of the list, all or none; `restore` brings back those of the last call."""
        wanted = [names] if isinstance(names, str) else list(names)

        def work(connection: Connection) -> list[LoomRow]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            rows = {row.key: row for row in (self._row(connection, each) for each in wanted)}
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar() or 0
            for key in rows:
                touch(connection, key, removed=last + 1)
            return _shown(connection, rows.values())

        return self.database.write(work)

    def restore(self) -> list[LoomRow]:
        """Bring back what was removed last: the same looms, under their own names.

        Where a name was given away meanwhile, the loom gets a new one.
        Raises: StoreError where nothing is removed.
        """

        def work(connection: Connection) -> list[LoomRow]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar()
            if last is None:
                raise StoreError("no loom is removed: there is nothing to bring back")
            query = sa.select(looms).where(looms.c.removed == last).order_by(looms.c.turn)
            found = []
            for row in connection.execute(query).all():
                taken = _named(connection, row.name) is not None
                name = _fresh(connection, row.name) if taken else row.name
                touch(connection, row.key, removed=None, name=name)
                found.append(self._row(connection, row.id))
            return _shown(connection, found)

        return self.database.write(work)

    def bring_back(
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
                kept.bring_back()
                return [(kept.name, kept.name)]
            if only_nodes:
                raise StoreError(f"no node of {nodes_of} is removed: nothing is to be brought back")
        names = {row.id: row.name for row in removed}
        return [(names[row.id], row.name) for row in self.restore()]

    def removed(self) -> list[LoomRow]:
        """Return the looms that are removed and not purged, the last ones first."""
        query = sa.select(looms).where(looms.c.removed.is_not(None))
        query = query.order_by(looms.c.removed.desc(), looms.c.turn.desc())
        return self.database.read(
            lambda connection: _shown(connection, connection.execute(query).all())
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

    def nodes(self, name: str, **which: Unpack[PageOptions]) -> list[NodeRow]:
        """Return nodes of a loom as plain records, a page of them; see `KeptLoom.nodes`."""
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
            return find(connection, words, is_sqlite=is_sqlite, loom=key, limit=limit)

        return self.database.read(work)

    def unknown(self, name: str) -> ConfigError:
        """Return the error for a name that no loom has, with the nearest that there are."""
        return self.database.read(lambda connection: _unknown(connection, name))

    def _row(self, connection: Connection, name: str) -> Any:
        if not is_plain(name):  # no loom can have it
            raise _unknown(connection, name)
        found = _named(connection, name)
        if found is None:
            found = connection.execute(sa.select(looms).where(looms.c.id == name)).first()
        if found is None:
            gone = sa.select(looms.c.key).where(looms.c.name == name)
            if connection.execute(gone).first() is None:
                raise _unknown(connection, name)
        if found is None or found.removed is not None:
            raise StoreError(f"the loom {name} is removed", hint="weft rm --undo brings it back")
        return found

    # Terminals

    def last(self, terminal: str) -> Drawn | None:
        """Return what was drawn last in a terminal; None where that is nothing, or is gone."""
        return self._stand(terminals.c.mark == terminal) if terminal else None

    def anybodys(self) -> Drawn | None:
        """Return what was drawn last in any terminal, else the loom changed last; None for none."""
        found = self._stand()
        if found is None:
            rows = self.looms(limit=1)
            found = Drawn(rows[0].name, 0) if rows else None
        return found

    def note(self, terminal: str, loom: str, number: int = 0) -> None:
        """Remember that a loom was drawn in a terminal, and the number of the node read there."""
        if not terminal:
            return
        self.database.write(lambda connection: self._note(connection, terminal, loom, number))

    def _note(self, connection: Connection, terminal: str, loom: str, number: int) -> None:
        row = self._row(connection, loom)
        turn = sa.select(sa.func.coalesce(sa.func.max(terminals.c.turn), 0) + 1).scalar_subquery()
        values = {"loom": row.key, "number": number, "turn": turn}
        statement = self.database.insert(terminals).values(mark=terminal, **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=[terminals.c.mark], set_=values)
        )
        last = sa.select(sa.func.max(terminals.c.turn)).scalar_subquery()
        old = sa.delete(terminals).where(terminals.c.turn <= last - _REMEMBERED)
        connection.execute(old)

    def _stand(self, *where: Any) -> Drawn | None:
        query = (
            sa.select(looms.c.name, terminals.c.number)
            .join(looms, looms.c.key == terminals.c.loom)
            .where(looms.c.removed.is_(None), *where)
            .order_by(terminals.c.turn.desc())
            .limit(1)
        )
        row = self.database.read(lambda connection: connection.execute(query).first())
        return None if row is None else Drawn(row.name, row.number)

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


def name_of(prompt: str) -> str:
    """Return a loom's name from its prompt: a few words that any file system takes."""
    text = unicodedata.normalize("NFKC", prompt).lower()[:500]
    words = [word for word in _words(text) if word not in _SMALL]
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


def new_mark() -> str:
    """Return an id for a new loom."""
    return secrets.token_hex(8)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that no loom can have."""
    why = ""
    if not isinstance(name, str) or not name.strip():
        why = "a name has letters"
    elif len(name) > _MOST_NAME:
        why = f"a name has {_MOST_NAME} characters at most"
    elif not name.isprintable() or not is_plain(name) or "/" in name or "\\" in name:
        why = "a name has no slashes, and nothing that cannot be shown"
    elif name != name.strip() or name.startswith(("-", ".")):
        why = "a name begins with no dash or dot, and has no spaces around it"
    elif name.isdecimal():
        why = "digits alone are a node's number"
    if why:
        raise ConfigError(f"{name!r:.80} is no name for a loom: {why}")


def _named(connection: Connection, name: str) -> Any:
    query = sa.select(looms).where(looms.c.name == name, looms.c.removed.is_(None))
    return connection.execute(query).first() if is_plain(name) else None


def _fresh(connection: Connection, stem: str) -> str:
    """Return a name that is not taken: the stem, else with .2, .3 …"""
    return next(name for name in _numbered(stem) if _named(connection, name) is None)


def _numbered(stem: str) -> Iterator[str]:
    """Yield a name, then the name with .2, .3, …: a dot, since names end in numbers themselves."""
    yield stem
    match = re.fullmatch(r"(.+)\.(\d{1,6})", stem)
    base, n = (match[1], int(match[2])) if match else (stem, 1)
    while True:
        n += 1
        yield f"{base}.{n}"


def _unknown(connection: Connection, name: str) -> ConfigError:
    query = sa.select(looms.c.name).where(looms.c.removed.is_(None))
    names = list(connection.execute(query.order_by(looms.c.turn.desc())).scalars())
    near = difflib.get_close_matches(name, names, 3, 0.4)
    here = f"near it: {', '.join(near)}" if near else f"there are {', '.join(names[:3])}"
    if not names:
        here = "there is none yet"
    return ConfigError(f"there is no loom {name!r}; {here}", hint="weft ls lists them all")


def _listed(
    connection: Connection, search: str | None, limit: int | None, after: str | None
) -> list[LoomRow]:
    query = sa.select(looms).where(looms.c.removed.is_(None))
    if search:
        wanted = f"%{plain(search).lower().translate(_LIKE)}%"
        names = sa.func.lower(looms.c.name), sa.func.lower(looms.c.prompt)
        query = query.where(sa.or_(*(each.like(wanted, escape="\\") for each in names)))
    if after is not None:
        last = _named(connection, after)
        if last is None and is_plain(after):
            last = connection.execute(sa.select(looms).where(looms.c.id == after)).first()
        if last is None:
            raise _unknown(connection, after)
        place = sa.tuple_(looms.c.turn, looms.c.key)
        query = query.where(place < sa.tuple_(last.turn, last.key))
    query = query.order_by(looms.c.turn.desc(), looms.c.key.desc()).limit(limit)
    return _shown(connection, connection.execute(query).all())


_LIKE = str.maketrans({each: f"\\{each}" for each in "\\%_"})


def _shown(connection: Connection, rows: Iterable[Any]) -> list[LoomRow]:
    """Return looms as lists show them: what grows, or grew when its process died, is counted."""
    growing = growing_nodes(connection)
    return [
        LoomRow(
            row.id,
            row.name,
            row.model,
            row.engine,
            row.prompt,
            LoomHead.loaded(row.head).created,
            row.changed,
            row.n_nodes + growing[row.key],
            row.rev,
            row.removed is not None,
        )
        for row in rows
    ]
