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
from .session import LoomSession

if TYPE_CHECKING:
    from ..lm.stats import Stats
    from ..search import Level, SearchResult
    from ..search.strategies import Strategy
    from ..service.api.runtime_file import RunningServer
    from ..service.store import Hit, LoomSummary


class ImportResult(NamedTuple):
    """What came of a file. is_text: texts without tokens. dropped: what was left out, in words."""

    names: list[str]
    recognised_as: str
    n_nodes: int
    dropped: list[str]
    is_text: bool = False


class ModelHandle(Protocol):
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

    def create_loom(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> LoomSession:
        """Return the loom of a prompt. chat: True insists on the chat template, None takes one."""
        ...

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search in a loom that is just begun; the result is of another where a file goes on."""
        ...


class Backend(ABC):
    """Where the looms are."""

    @abstractmethod
    def where(self) -> str:
        """Return where they are kept, in words."""

    @abstractmethod
    def rows(self, limit: int | None = None) -> Sequence[LoomSummary]:
        """Return what is kept, the one changed last first."""

    @abstractmethod
    def row(self, name: str) -> LoomSummary:
        """Return what a list says of one loom. Raises: ConfigError for none such."""

    @abstractmethod
    def last_loom(self) -> str | None:
        """Return the loom drawn last in this terminal; None if there is none (any more)."""

    @abstractmethod
    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom drawn last in any terminal, else the one changed last."""

    @abstractmethod
    def open(self, name: str) -> LoomSession:
        """Open a loom to read it."""

    @abstractmethod
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[LoomSession]:
        """Open a loom with the model that it was made with, or the one that is given."""

    @abstractmethod
    def model(
        self, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[ModelHandle]:
        """Make a model ready for new looms; None: the one that there is."""

    @abstractmethod
    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
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
    def home(self) -> Backend:
        """The same looms in this process, where they can be had there; else this."""
        return self

    # What is the same everywhere

    def find_or_import(self, name: str) -> str:
        """Return the name of a loom that is here. Of a file a copy is kept first, and told."""
        try:
            return self.row(name).name
        except (ConfigError, NotFound):
            file = Path(name)
            if not _is_file(file):
                raise
        (kept, *_) = self.import_file(
            file, format="weft", name=None, model=None, engine="auto"
        ).names
        note = f"kept a copy of {file} as {kept}; --loom {kept} goes on with that"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
        return kept

    def last_loom_anywhere(self) -> str:
        """As `try_last_loom_anywhere`. Raises: StoreError for none."""
        last = self.try_last_loom_anywhere()
        if last is None:
            raise StoreError(
                "there is no loom yet", hint=f'weft run "{samples.story}" -n 4 makes one'
            )
        return last

    def resolve_name(self, name: str | None) -> str:
        """Return the loom that a verb is about: the one named, else the one drawn last here.

        A terminal in which none was drawn gets the one drawn last in another, and is told so.
        """
        if name is not None:
            return self.find_or_import(name)
        if (own := self.last_loom()) is not None:
            return own
        last = self.last_loom_anywhere()
        note = f"this terminal has no loom of its own: taking {last}, drawn last elsewhere"
        TerminalWriter.for_stream(sys.stderr).line((f"{note}; --loom takes another", "dim"))
        return last

    def resolve_name_to_change(self, name: str | None, command: str) -> str:
        """Return the loom that a command changes: the one named, else the one drawn last here.

        Raises: ConfigError if this terminal has drawn none; the loom of another terminal is not
        changed unless it is named.
        """
        if name is not None or self.last_loom() is not None:
            return self.resolve_name(name)
        last = self.last_loom_anywhere()
        raise ConfigError(
            "no loom was drawn in this terminal, so it is not clear which one is meant",
            hint=f"weft {command} --loom {last}, or weft tree {last} first",
        )


def select_backend() -> Backend:
    """Return where this command's looms are.

    At the server that WEFT_HOST names; else at one of this user that answers where servers do, with
    the same looms; else here.
    """
    from .local_backend import LocalBackend

    if os.environ.get("WEFT_HOST") or os.environ.get("WEFT_PORT"):
        return _there()
    from ..service.api.address import address
    from ..service.api.runtime_file import find_server

    server = find_server(address().port)
    return LocalBackend() if server is None else _there(server, LocalBackend())


def _there(server: RunningServer | None = None, here: Backend | None = None) -> Backend:
    from ..service.client import Client
    from .server_backend import ServerBackend

    # WEFT_API_KEY is sent only to a server that the user named.
    client = Client() if server is None else Client(server.url, server.token)
    client.connection.is_verified = server is not None  # `find_server` has checked that it is Weft
    return ServerBackend(client, here)


@contextmanager
def open_session(name: str | None = None) -> Iterator[LoomSession]:
    """Open a loom to read it: the one with this name, or the one drawn last."""
    with select_backend() as backend:
        yield backend.open(backend.resolve_name(name))


@contextmanager
def load_for_new_loom(
    model: str | None, engine: str, kv_budget: str, *, resumes: bool = False
) -> Iterator[ModelHandle]:
    """Make a model ready for new looms; None: the one that there is.

    resumes: a search is to go on from a file, which no server does that was not asked for by name.
    """
    with select_backend() as backend:
        with (backend.home if resumes else backend).model(model, engine, kv_budget) as model_handle:
            yield model_handle


@contextmanager
def open_with_model(
    name: str | None, model: str | None, engine: str, kv_budget: str
) -> Iterator[LoomSession]:
    """Open a loom with its own model, or with the one given; otherwise like `open_session`."""
    with (
        select_backend() as backend,
        backend.open_with_model(backend.resolve_name(name), model, engine, kv_budget) as session,
    ):
        yield session


def check_has_tokens(row: LoomSummary) -> None:
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
