"""The library: create, open, list, rename, remove and restore looms in one database."""

from __future__ import annotations

import difflib
import itertools
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
from .rows import db_text, escape_like, is_db_text
from .search import Hit, search_nodes
from .stored_loom import StoredLoom, accept_commit, insert_nodes
from .summary import LoomSummary
from .tables import looms, nodes, sampling, terminals

if TYPE_CHECKING:
    from ...lm.lm import LM

_WORDS, _LENGTH = 5, 40  # of a name
_MAX_NAME_LENGTH = 200
MAX_TITLE_LENGTH = 200  # characters
_MAX_DERIVED_TITLE = 60  # characters
_STOP_WORDS = frozenset("a an the me my of to in and on for with is are it this that".split())
# Reserved file names on Windows.
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
_MAX_TERMINALS = 256  # terminals


class NameTaken(ConfigError):
    """Another loom has this name."""


class TerminalState(NamedTuple):
    """The name of the loom last used in a terminal, and the number of its current node."""

    loom: str  # name
    number: int  # of the node


class Library:
    """The looms of one database. Thread-safe; any number of processes may have it open."""

    def __init__(self, url: str | None = None, *, lease_s: float | None = None) -> None:
        """Open the database.

        Args:
            url: "sqlite:///FILE" or "postgresql://USER@HOST/NAME". None means WEFT_DB, else weft.db
                in WEFT_HOME.
            lease_s: duration of loom leases in seconds, for servers that share a database. Only one
                server at a time grows a loom; another takes over when the lease has expired. None
                means no leases.

        Raises: ConfigError for an invalid URL, StoreError if the database cannot be opened.
        """
        self.database = Database(url or os.environ.get("WEFT_DB") or default_url())
        self._writer = ProcessHeartbeat(self.database, lease_s=lease_s)

    # Looms

    def create(
        self, loom: Loom, *, name: str | None = None, title: str | None = None
    ) -> StoredLoom:
        """Save a new loom, durable when this returns. The stored loom uses the same tree.

        Args:
            loom: the tree.
            name: None derives an unused name from `title`, or from the prompt without a title.
            title: any text on one line. None: no title if there is a name, else the first words of
                the prompt.

        Raises: ConfigError for an invalid name or title; NameTaken.
        """
        if name is not None:
            check_name(name)
        if title is not None:
            check_title(title)
        loom_id = new_loom_id()
        stored, pending = self.database.write(
            lambda connection: self._create(connection, loom, name, title, loom_id)
        )
        if pending is None:  # an earlier attempt has saved it, but its answer was lost
            stored.sync()
        else:
            accept_commit(stored, pending)
        return stored

    def _create(
        self,
        connection: Connection,
        loom: Loom,
        name: str | None,
        title: str | None,
        loom_id: str,
    ) -> tuple[StoredLoom, PendingCommit | None]:
        """Insert the rows of a new loom. Returns None as the commit if they exist already."""
        row = connection.execute(sa.select(looms).where(looms.c.id == loom_id)).first()
        if row is not None:
            return StoredLoom(self.database, self._writer, row, loom), None
        lock(connection, is_sqlite=self.database.is_sqlite)  # names are assigned one at a time
        if name is not None and _find_by_name(connection, name) is not None:
            raise NameTaken(f"there is a loom {name!r} already", hint="weft ls lists the looms")
        stem = name_from_prompt(title or loom.user_prompt)
        title = title or (title_from_text(loom.user_prompt) if name is None else "")
        head = LoomMetadata.from_loom(loom, title=title)
        name = name or _unused_name(connection, stem)
        values = {"turn": 0, "changed": 0.0, "rev": 0, "n_nodes": 0, "next_number": 0}
        row = connection.execute(
            sa.insert(looms)
            .values(id=loom_id, name=name, **values, **head.columns())
            .returning(looms)
        ).one()
        stored = StoredLoom(self.database, self._writer, row, loom)
        return stored, insert_nodes(stored, connection)

    def open(
        self,
        name: str,
        lm: LM | None = None,
        *,
        force: bool = False,
        heddle_class: type[Heddle] = Heddle,
    ) -> StoredLoom:
        """Open a loom by its name or id.

        Args:
            lm: the model that grows it. None: the loom cannot be grown.
            force: accept tokens of another model with the same vocabulary size.
            heddle_class: class of the nodes.

        Raises: ConfigError for an unknown name; ModelMismatch.
        """
        row = self.database.read(lambda connection: self._row(connection, name))
        head = LoomMetadata.from_json(row.head)
        stored = StoredLoom(
            self.database, self._writer, row, head.loom(lm, heddle_class, force=force)
        )
        stored.sync()
        return stored

    def looms(
        self, *, search: str | None = None, limit: int | None = None, after: str | None = None
    ) -> list[LoomSummary]:
        """Return the looms, the one changed last first.

        Args:
            search: only looms with this text in their name, title or prompt, ignoring case.
            limit: maximum number of looms; None means all.
            after: name or id of a loom; only looms after it in the list. For the next page.
        """
        return self.database.read(lambda connection: _list(connection, search, limit, after))

    def row(self, name: str) -> LoomSummary:
        """Return the summary of a loom, by its name or id. Raises: ConfigError if there is none."""
        (summary,) = self.database.read(
            lambda connection: _summaries(connection, [self._row(connection, name)])
        )
        return summary

    def rename(self, name: str, new: str | None = None, *, title: str | None = None) -> LoomSummary:
        """Give a loom another name, another title, or both.

        Args:
            name: its name or id.
            new: the new name. None derives an unused one from a new title.
            title: the new title; "" removes it. None: a title that was derived from the prompt is
                removed, any other stays.

        Raises: ConfigError for an invalid name or title; NameTaken.
        """
        if new is not None:
            check_name(new)
        if title is not None:
            check_title(title)
        return self.database.write(lambda connection: self._rename(connection, name, new, title))

    def _rename(
        self, connection: Connection, name: str, new: str | None, title: str | None
    ) -> LoomSummary:
        """Change the name and the title, in a transaction; arguments as for `rename`."""
        lock(connection, is_sqlite=self.database.is_sqlite)
        key = self._row(connection, name).key
        # NOTE: commits of other processes change the metadata, too.
        row = connection.execute(sa.select(looms).where(looms.c.key == key).with_for_update()).one()
        other = None if new is None else _find_by_name(connection, new)
        if other is not None and other.key != key:
            raise NameTaken(f"there is a loom {new!r} already", hint="choose another name")
        head = LoomMetadata.from_json(row.head)
        if new is None and title and title != head.title:
            new = _unused_name(connection, name_from_prompt(title), own=row.name)
        if title is None:
            is_derived = head.title == title_from_text(head.user_prompt)
            title = "" if new is not None and is_derived else head.title
        head = head._replace(title=title)
        touch(connection, key, name=new or row.name, head=head.to_json())
        return _summaries(connection, [self._row(connection, row.id)])[0]

    def remove(self, names: str | Iterable[str]) -> list[LoomSummary]:
        """Remove all of these looms, or none if one name is unknown; return them.

        names: one name or id, or several. `restore` restores these looms.
        """
        targets = [names] if isinstance(names, str) else list(names)

        def work(connection: Connection) -> list[LoomSummary]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            rows = {row.key: row for row in (self._row(connection, each) for each in targets)}
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar() or 0
            for key in rows:
                touch(connection, key, removed=last + 1)
            return _summaries(connection, rows.values())

        return self.database.write(work)

    def restore(self) -> list[LoomSummary]:
        """Restore the looms that the last call of `remove` removed, and return them.

        A loom whose name was taken meanwhile gets a new one.
        Raises: StoreError if no loom is removed.
        """

        def work(connection: Connection) -> list[LoomSummary]:
            lock(connection, is_sqlite=self.database.is_sqlite)
            last = connection.execute(sa.select(sa.func.max(looms.c.removed))).scalar()
            if last is None:
                raise StoreError("no loom is removed: there is nothing to restore")
            query = sa.select(looms).where(looms.c.removed == last).order_by(looms.c.turn)
            restored = []
            for row in connection.execute(query).all():
                is_taken = _find_by_name(connection, row.name) is not None
                name = _unused_name(connection, row.name) if is_taken else row.name
                touch(connection, row.key, removed=None, name=name)
                restored.append(self._row(connection, row.id))
            return _summaries(connection, restored)

        return self.database.write(work)

    def restore_last(
        self, nodes_of: str | None = None, *, only_nodes: bool = False
    ) -> list[tuple[str, str]]:
        """Restore the looms that were removed last, or the nodes of one loom if removed later.

        Args:
            nodes_of: name of the loom whose removed nodes are considered; None means only looms.
            only_nodes: restore nodes of that loom, even if looms were removed later.

        Returns: (previous name, current name) of each loom that was restored or whose nodes were.
            Operations after the removal are not undone.
        Raises: StoreError if nothing is removed.
        """
        removed = [] if only_nodes else self.removed()
        if nodes_of is not None:
            stored = self.open(nodes_of)
            last = stored.last_removal()
            if last is not None and (not removed or last.at > removed[0].changed):
                stored.restore_nodes()
                return [(stored.name, stored.name)]
            if only_nodes:
                raise StoreError(f"no node of {nodes_of} is removed: there is nothing to restore")
        names = {row.id: row.name for row in removed}
        return [(names[row.id], row.name) for row in self.restore()]

    def removed(self) -> list[LoomSummary]:
        """Return the removed looms that are not purged, the last removed first."""
        query = sa.select(looms).where(looms.c.removed.is_not(None))
        query = query.order_by(looms.c.removed.desc(), looms.c.turn.desc())
        return self.database.read(
            lambda connection: _summaries(connection, connection.execute(query).all())
        )

    def purge(self, names: Iterable[str] | None = None) -> int:
        """Delete removed looms permanently; return their number.

        names: ids or names of removed looms; None means all.
        """
        targets = None if names is None else set(names)

        def work(connection: Connection) -> int:
            query = sa.select(looms).where(looms.c.removed.is_not(None))
            rows = [
                row
                for row in connection.execute(query)
                if targets is None or row.id in targets or row.name in targets
            ]
            for row in rows:
                connection.execute(sa.delete(looms).where(looms.c.key == row.key))
            if rows:  # delete sampling parameters that no node uses
                used = sa.select(nodes.c.params).where(nodes.c.params == sampling.c.key)
                connection.execute(sa.delete(sampling).where(~sa.exists(used)))
            return len(rows)

        return self.database.write(work)

    # Reading without opening

    def nodes(self, name: str, **which: Unpack[PageOptions]) -> list[NodeRecord]:
        """Return nodes of a loom as plain records, a page of them; see `StoredLoom.nodes`."""
        return self.database.read(
            lambda connection: page(connection, self._row(connection, name).key, **which)
        )

    def find(self, words: str, *, loom: str | None = None, limit: int = 20) -> list[Hit]:
        """Return the nodes that contain all these words, the best matches first.

        Args:
            words: words, "phrases" in quotes, and prefixes with a star. Case, accents and
                punctuation are ignored, so there are no syntax errors.
            loom: search only this loom; None means all looms.
            limit: maximum number of nodes.

        Only the first 100,000 characters of a node are searched.
        Raises: ConfigError if `words` contains no word.
        """

        def work(connection: Connection) -> list[Hit]:
            key = None if loom is None else self._row(connection, loom).key
            is_sqlite = self.database.is_sqlite
            return search_nodes(connection, words, is_sqlite=is_sqlite, loom=key, limit=limit)

        return self.database.read(work)

    def unknown_name_error(self, name: str) -> ConfigError:
        """Return the error for an unknown loom name, with similar names."""
        return self.database.read(lambda connection: _unknown_name_error(connection, name))

    def _row(self, connection: Connection, name: str) -> Any:
        """Return the row of a loom by its name or id. Raises: ConfigError."""
        if not is_db_text(name):  # no loom can have this name
            raise _unknown_name_error(connection, name)
        row = _find_by_name(connection, name)
        if row is None:
            row = connection.execute(sa.select(looms).where(looms.c.id == name)).first()
        if row is None:
            removed = sa.select(looms.c.key).where(looms.c.name == name)
            if connection.execute(removed).first() is None:
                raise _unknown_name_error(connection, name)
        if row is None or row.removed is not None:
            raise StoreError(f"the loom {name} is removed", hint="weft rm --undo restores it")
        return row

    # Terminals

    def last_loom(self, terminal: str) -> TerminalState | None:
        """Return the loom last used in a terminal; None if there is none or it was removed."""
        return self._terminal_state(terminals.c.mark == terminal) if terminal else None

    def last_loom_anywhere(self) -> TerminalState | None:
        """Return the loom last used in any terminal; if there is none, the loom changed last.

        None if the library has no looms.
        """
        state = self._terminal_state()
        if state is None:
            rows = self.looms(limit=1)
            state = TerminalState(rows[0].name, 0) if rows else None
        return state

    def set_last_loom(self, terminal: str, loom: str, number: int = 0) -> None:
        """Store the loom last used in a terminal.

        terminal: a string that identifies it; "" stores nothing. number: the current node's number.
        """
        if not terminal:
            return
        self.database.write(
            lambda connection: self._set_last_loom(connection, terminal, loom, number)
        )

    def _set_last_loom(self, connection: Connection, terminal: str, loom: str, number: int) -> None:
        """Store the loom last used in a terminal, in a transaction."""
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
        """Return the latest entry that these conditions select; None if there is none."""
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
        """Close the database; idempotent."""
        self._writer.close()
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def default_url() -> str:
    """Return the URL of the default database, weft.db in WEFT_HOME."""
    return sa.URL.create("sqlite", database=str(data_dir() / "weft.db")).render_as_string()


def name_from_prompt(prompt: str) -> str:
    """Derive a loom's name from its prompt: a few words that are valid as a file name."""
    text = unicodedata.normalize("NFKC", prompt).lower()[:500]
    words = [word for word in _words(text) if word not in _STOP_WORDS]
    name = "-".join(words[:_WORDS])
    while len(name) > _LENGTH and "-" in name:
        name = name.rpartition("-")[0]
    name = name[:_LENGTH]
    # A name of digits would be read as a node's number.
    return (
        f"loom-{name}".rstrip("-")
        if name.isdigit() or _RESERVED.fullmatch(name)
        else name or "loom"
    )


def title_from_text(text: str) -> str:
    """Derive a title from a prompt, or from a title of another program: its first words."""
    line = " ".join("".join(c if _is_on_a_line(c) else " " for c in text[:1000]).split())
    if len(line) <= _MAX_DERIVED_TITLE:
        return line
    beginning = line[:_MAX_DERIVED_TITLE]
    return f"{beginning.rpartition(' ')[0] or beginning[:-1]}…"


def _is_on_a_line(character: str) -> bool:
    """Return False for control characters, line breaks and lone surrogates."""
    return unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")


def _words(text: str) -> list[str]:
    """Return the words of a text. Combining marks (vowels in many scripts) belong to words."""
    words = " "
    for character in text:
        is_mark = unicodedata.category(character).startswith("M") and not words.endswith(" ")
        words += character if character.isalnum() or is_mark else " "
    return words.split()


def new_loom_id() -> str:
    """Return a random id for a new loom."""
    return secrets.token_hex(8)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is not valid for a loom."""
    why = ""
    if not isinstance(name, str) or not name.strip():
        why = "a name cannot be empty"
    elif len(name) > _MAX_NAME_LENGTH:
        why = f"a name has at most {_MAX_NAME_LENGTH} characters"
    elif not name.isprintable() or not is_db_text(name) or "/" in name or "\\" in name:
        why = "a name has no slashes and no unprintable characters"
    elif name != name.strip() or name.startswith(("-", ".")):
        why = "a name does not start with a dash or dot, and has no spaces around it"
    elif name.isdecimal():
        why = "a name of digits would be a node's number"
    if why:
        raise ConfigError(f"name is {name!r:.80}, which is no name for a loom: {why}")


def check_title(title: str) -> None:
    """Raise ConfigError for a title that is not valid. "" is: it means none."""
    why = ""
    if title and not title.strip():
        why = "has a character that is not a space"
    elif len(title) > MAX_TITLE_LENGTH:
        why = f"has at most {MAX_TITLE_LENGTH} characters"
    elif not all(map(_is_on_a_line, title)):
        why = "is one line without control characters"
    if why:
        raise ConfigError(f"title is {title!r:.80}; a title {why}")


def _find_by_name(connection: Connection, name: str) -> Any:
    """Return the row of a loom that is not removed, by name; None if there is none."""
    query = sa.select(looms).where(looms.c.name == name, looms.c.removed.is_(None))
    return connection.execute(query).first() if is_db_text(name) else None


def _unused_name(connection: Connection, stem: str, *, own: str | None = None) -> str:
    """Return a loom name that is not used yet: `stem`, or `stem` with .2, .3, …

    own: the present name of the loom, which it may keep.

    Cost: a query for the first name, then one for 8, 64, and each 512 further names.
    """
    names, n = _numbered(stem), 1
    while True:
        block = list(itertools.islice(names, n))
        query = sa.select(looms.c.name).where(
            looms.c.name.in_([name for name in block if is_db_text(name)]),
            looms.c.removed.is_(None),
        )
        taken = set(connection.scalars(query)) - {own}
        for name in block:
            if name not in taken:
                return name
        n = min(8 * n, 512)


def _numbered(stem: str) -> Iterator[str]:
    """Yield a name, then the same name with .2, .3, … appended. After "a.4" follows "a.5".

    The dot separates the counter, because names can end in digits.
    """
    yield stem
    match = re.fullmatch(r"(.+)\.(\d{1,6})", stem)
    base, n = (match[1], int(match[2])) if match else (stem, 1)
    while True:
        n += 1
        yield f"{base}.{n}"


def _unknown_name_error(connection: Connection, name: str) -> ConfigError:
    """Return the error for an unknown loom name, with similar names."""
    query = sa.select(looms.c.name).where(looms.c.removed.is_(None))
    names = list(connection.execute(query.order_by(looms.c.turn.desc())).scalars())
    similar = difflib.get_close_matches(name, names, 3, 0.4)
    others = f"near it: {', '.join(similar)}" if similar else f"there are {', '.join(names[:3])}"
    if not names:
        others = "there is none yet"
    return ConfigError(f"there is no loom {name!r}; {others}", hint="weft ls lists the looms")


def _list(
    connection: Connection, search: str | None, limit: int | None, after: str | None
) -> list[LoomSummary]:
    """Return a page of summaries; arguments as for `Library.looms`."""
    query = sa.select(looms).where(looms.c.removed.is_(None))
    if search:
        text = search.lower()
        pattern = f"%{escape_like(db_text(text))}%"
        patterns = {
            looms.c.name: pattern,
            looms.c.prompt: pattern,
            looms.c.head: LoomMetadata.title_pattern(text),
        }
        matches = (
            sa.func.lower(column).like(each, escape="\\") for column, each in patterns.items()
        )
        query = query.where(sa.or_(*matches))
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


def _summaries(connection: Connection, rows: Iterable[Any]) -> list[LoomSummary]:
    """Return summaries of looms. Nodes in progress are counted, too."""
    growing = count_in_progress(connection)
    heads = [(row, LoomMetadata.from_json(row.head)) for row in rows]
    return [
        LoomSummary(
            row.id,
            row.name,
            row.model,
            row.engine,
            row.prompt,
            head.created,
            row.changed,
            row.n_nodes + growing[row.key],
            row.rev,
            row.removed is not None,
            head.title,
        )
        for row, head in heads
    ]
