"""What a verb asks for: looms by their names, and models that grow them.

They are here, in this process (`here`), or at a server (`there`); verbs do not know where.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from .. import samples
from ..errors import ConfigError, NotFound, StoreError
from ..viz.terminal import TerminalWriter
from .kept import Kept

if TYPE_CHECKING:
    from ..lm.stats import Stats
    from ..search import Level, SearchResult
    from ..search.strategies import Strategy
    from ..service.api.runtime_file import RunningServer
    from ..service.store import Hit, LoomRow


class Brought(NamedTuple):
    """What came of a file. is_text: texts without tokens. dropped: what was left out, in words."""

    names: list[str]
    recognised_as: str
    n_nodes: int
    dropped: list[str]
    is_text: bool = False


class Grower(Protocol):
    """A model that grows looms.

    source: as -m names it. engine: the name of the one that runs it. has_next: whether it tells
    what may come next. continues: whether what it has grown can be grown on.
    resumes: whether a search goes on from a file.
    """

    source: str
    engine: str
    has_template: bool
    has_next: bool
    continues: bool
    resumes: bool

    def stats(self) -> Stats:
        """Return what it has computed and saved for this command."""
        ...

    def is_stop_token(self, token_id: int) -> bool:
        """Whether this token ends a text."""
        ...

    def template_hint(self, otherwise: str) -> str:
        """Return what to do without a chat template."""
        ...

    def begin(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> Kept:
        """Return the loom of a prompt. chat: True insists on the chat template, None takes one."""
        ...

    def search(
        self,
        kept: Kept,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search in a loom that is just begun; the result is of another where a file goes on."""
        ...


class LoomDesk(ABC):
    """Where the looms are."""

    @abstractmethod
    def where(self) -> str:
        """Return where they are kept, in words."""

    @abstractmethod
    def rows(self, limit: int | None = None) -> Sequence[LoomRow]:
        """Return what is kept, the one changed last first."""

    @abstractmethod
    def row(self, name: str) -> LoomRow:
        """Return what a list says of one loom. Raises: ConfigError for none such."""

    @abstractmethod
    def own(self) -> str | None:
        """Return the loom drawn last in this terminal; None if there is none (any more)."""

    @abstractmethod
    def try_anybodys(self) -> str | None:
        """Return the loom drawn last in any terminal, else the one changed last."""

    @abstractmethod
    def open(self, name: str) -> Kept:
        """Open a loom to read it."""

    @abstractmethod
    def growing(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[Kept]:
        """Open a loom with the model that it was made with, or the one that is given."""

    @abstractmethod
    def model(
        self, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[Grower]:
        """Make a model ready for new looms; None: the one that there is."""

    @abstractmethod
    def bring(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> Brought:
        """Keep the looms of a file. model: make its texts tokens of this one."""

    def page(self) -> str | None:
        """Return the address of the page; None where no server runs, "" where it has none."""
        return None

    @abstractmethod
    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return the nodes that have these words."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Take looms away."""

    @abstractmethod
    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Bring back what was removed last: looms, or nodes of the loom drawn last here.

        Returns the names that they had and have. loom: nodes of this one.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def home(self) -> LoomDesk:
        """The same looms in this process, where they can be had there; else this."""
        return self

    # What is the same everywhere

    def known(self, name: str) -> str:
        """Return the name of a loom that is here. Of a file a copy is kept first, and told."""
        try:
            return self.row(name).name
        except (ConfigError, NotFound):
            file = Path(name)
            if not _is_file(file):
                raise
        (kept, *_) = self.bring(file, format="weft", name=None, model=None, engine="auto").names
        note = f"kept a copy of {file} as {kept}; --loom {kept} goes on with that"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
        return kept

    def anybodys(self) -> str:
        """As `try_anybodys`. Raises: StoreError for none."""
        last = self.try_anybodys()
        if last is None:
            raise StoreError(
                "there is no loom yet", hint=f'weft run "{samples.story}" -n 4 makes one'
            )
        return last

    def chosen(self, name: str | None) -> str:
        """Return the loom that a verb is about: the one named, else the one drawn last here.

        A terminal in which none was drawn gets the one drawn last in another, and is told so.
        """
        if name is not None:
            return self.known(name)
        if (own := self.own()) is not None:
            return own
        last = self.anybodys()
        note = f"this terminal has no loom of its own: taking {last}, drawn last elsewhere"
        TerminalWriter.for_stream(sys.stderr).line((f"{note}; --loom takes another", "dim"))
        return last

    def chosen_to_change(self, name: str | None, command: str) -> str:
        """Return the loom that a command changes: the one named, else the one drawn last here.

        Raises: ConfigError if this terminal has drawn none; the loom of another terminal is not
        changed unless it is named.
        """
        if name is not None or self.own() is not None:
            return self.chosen(name)
        last = self.anybodys()
        raise ConfigError(
            "no loom was drawn in this terminal, so it is not clear which one is meant",
            hint=f"weft {command} --loom {last}, or weft tree {last} first",
        )


def desk() -> LoomDesk:
    """Return where this command's looms are.

    At the server that WEFT_HOST names; else at one of this user that answers where servers do, with
    the same looms; else here.
    """
    from .here import DeskHere

    if os.environ.get("WEFT_HOST") or os.environ.get("WEFT_PORT"):
        return _there()
    from ..service.api.address import address
    from ..service.api.runtime_file import find_server

    server = find_server(address().port)
    return DeskHere() if server is None else _there(server, DeskHere())


def _there(server: RunningServer | None = None, here: LoomDesk | None = None) -> LoomDesk:
    from ..service.client import Client
    from .there import DeskThere

    # WEFT_API_KEY is sent only to a server that the user named.
    client = Client() if server is None else Client(server.url, server.token)
    client.connection.is_verified = server is not None  # `find_server` has checked that it is Weft
    return DeskThere(client, here)


@contextmanager
def opened(name: str | None = None) -> Iterator[Kept]:
    """Open a loom to read it: the one with this name, or the one drawn last."""
    with desk() as at:
        yield at.open(at.chosen(name))


@contextmanager
def with_grower(
    model: str | None, engine: str, kv_budget: str, *, resumes: bool = False
) -> Iterator[Grower]:
    """Make a model ready for new looms; None: the one that there is.

    resumes: a search is to go on from a file, which no server does that was not asked for by name.
    """
    with desk() as at:
        with (at.home if resumes else at).model(model, engine, kv_budget) as grower:
            yield grower


@contextmanager
def with_model(name: str | None, model: str | None, engine: str, kv_budget: str) -> Iterator[Kept]:
    """Open a loom, as `opened`, with the model that it was made with, or the one that is given."""
    with desk() as at, at.growing(at.chosen(name), model, engine, kv_budget) as kept:
        yield kept


def refuse_texts(row: LoomRow) -> None:
    """Raise ConfigError for a loom of texts that are no tokens of any model."""
    from ..service.store.file import NO_MODEL

    if row.model == NO_MODEL.name:
        raise ConfigError(
            f"the loom {row.name} is of texts without tokens: it can be read, and not grown",
            hint="weft import FILE -m MODEL takes the file in again, as tokens of a model",
        )


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
