"""Backends of the command: where looms are stored, and which models grow them.

`local_backend` uses the database and loads models in this process. `server_backend` uses a server.
Verbs work with either.
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
    """The looms that were imported from a file."""

    names: list[str]  # names of the new looms
    recognised_as: str  # name of the file's format
    n_nodes: int  # nodes of all new looms, including their roots
    dropped: list[str]  # descriptions of data of the file that Weft cannot represent


class ModelHandle(Protocol):
    """A loaded model that grows looms, in this process or on a server."""

    source: str  # the model as -m takes it
    engine: str  # name of the engine that runs the model
    has_template: bool  # has a chat template
    has_next: bool  # can return probabilities of next tokens
    continues: bool  # can continue branches that it has generated
    resumes: bool  # can resume a search from a file

    def stats(self) -> Stats:
        """Return statistics of this command: tokens computed and reused, KV, time."""
        ...

    def is_stop_token(self, token_id: int) -> bool:
        """Return True if this token ends a text."""
        ...

    def template_hint(self, otherwise: str) -> str:
        """Return the hint of an error about a missing chat template.

        otherwise: the usual hint. A model of a remote server adds how it may get a template.
        """
        ...

    def create_loom(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> LoomSession:
        """Create the loom of a prompt.

        Args:
            text: the prompt, or the user's message if a chat template is applied.
            chat: True applies the chat template and raises ConfigError if the model has none.
                None applies it if there is one. False adds the text as it is.
            system: the system message; None for none.
            special: parse special tokens in a plain text.
            keep: save the loom. False is for looms that exist only during the command.
        """
        ...

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search from the prompt of a new loom.

        Args:
            session: the new loom, as `create_loom` returned it.
            strategy: the search strategy.
            options: the strategy's options that were given, by their Python names.
            progress: called after each level of the search, to display it.

        Returns:
            The result. Its loom is not the session's if the search was resumed from a file.
        """
        ...


class Backend(ABC):
    """A store of looms, with models that can grow them."""

    @abstractmethod
    def where(self) -> str:
        """Return the database file or URL of the looms, for display."""

    @abstractmethod
    def summaries(self, limit: int | None = None) -> Sequence[LoomSummary]:
        """Return summaries of the saved looms, the one changed last first.

        limit: maximum number of looms; None means all.
        """

    @abstractmethod
    def summary(self, name: str) -> LoomSummary:
        """Return the summary of one loom. Raises: ConfigError if there is none."""

    @abstractmethod
    def last_loom(self) -> str | None:
        """Return the name of the loom last used in this terminal; None if there is none."""

    @abstractmethod
    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom last used in any terminal, else the loom changed last.

        Returns None if there is no loom.
        """

    @abstractmethod
    def open(self, name: str) -> LoomSession:
        """Open a loom without a model: it can be read and edited, but not grown."""

    @abstractmethod
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[LoomSession]:
        """Open a loom together with a model that can grow it.

        Args:
            name: the loom.
            model: the model to use; None means the model that grew the loom.
            engine: name of the engine; "auto" lets the backend choose.
            kv_budget: memory for KV, such as "4GiB"; "auto" leaves it to the engine.
        """

    @abstractmethod
    def model(
        self, model: str | None, engine: str, kv_budget: str
    ) -> AbstractContextManager[ModelHandle]:
        """Provide a model for new looms. The arguments are those of `open_with_model`.

        model: None means the backend's default model.
        """

    @abstractmethod
    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
        """Import the looms of a file.

        Args:
            file: the file to read.
            format: name of the file's format; "auto" detects it.
            name: name of the new loom, or the title from which several looms get their names.
                None takes each loom's own title.
            model: tokenize the texts for this model, so that it can grow them. None takes a
                server's default model; without a server, texts are stored without tokens.
            engine: the engine that loads the model; "auto" lets the backend choose.
        """

    def page(self) -> str | None:
        """Return the URL of the web page; None without a server, "" if the server has no page."""
        return None

    @abstractmethod
    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return nodes that contain these words, the best match first.

        Args:
            words: the full-text query.
            loom: search only this loom; None searches all.
            limit: maximum number of nodes.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove looms. `restore` brings them back."""

    @abstractmethod
    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Restore the last removal: looms, or nodes of the loom last used in this terminal.

        loom: restore the nodes last removed from this loom instead. None means the last removal.
        Returns (previous name, current name) of each loom that was restored or got nodes back. A
        name changes if another loom has taken it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the database or the connections. Further calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def home(self) -> Backend:
        """A local backend for the same looms, if there is one; else this backend."""
        return self

    # Common to all backends

    def find_or_import(self, name: str) -> str:
        """Return the name of a saved loom.

        name: a loom, or a .loom.json file. A file is imported first, with a note on stderr.
        Raises: ConfigError or NotFound if there is neither.
        """
        try:
            return self.summary(name).name
        except (ConfigError, NotFound):
            file = Path(name)
            if not _is_file(file):
                raise
        (imported, *_) = self.import_file(
            file, format="weft", name=None, model=None, engine="auto"
        ).names
        note = f"imported {file} as {imported}; use --loom {imported} from now on"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
        return imported

    def last_loom_anywhere(self) -> str:
        """Like `try_last_loom_anywhere`. Raises: StoreError if there is no loom."""
        last = self.try_last_loom_anywhere()
        if last is None:
            raise StoreError(
                "there is no loom yet", hint=f'weft run "{samples.story}" -n 4 creates one'
            )
        return last

    def resolve_name(self, name: str | None) -> str:
        """Return the loom that a verb reads.

        name: the loom that --loom names, or a file to import. None means the loom last used in
        this terminal. If none was used here, the loom last used in any terminal is returned, with
        a note on stderr.
        """
        if name is not None:
            return self.find_or_import(name)
        if (own := self.last_loom()) is not None:
            return own
        last = self.last_loom_anywhere()
        note = f"no loom was used in this terminal; taking {last}, last used elsewhere"
        TerminalWriter.for_stream(sys.stderr).line((f"{note}; --loom selects another", "dim"))
        return last

    def resolve_name_to_change(self, name: str | None, command: str) -> str:
        """Return the loom that a command changes.

        Args:
            name: the loom that --loom names. None means the loom last used in this terminal.
            command: the verb, for the hint.

        Raises: ConfigError if `name` is None and no loom was used in this terminal.
        """
        if name is not None or self.last_loom() is not None:
            return self.resolve_name(name)
        last = self.last_loom_anywhere()
        raise ConfigError(
            "no loom was used in this terminal, so it is unclear which one to change",
            hint=f"weft {command} --loom {last}, or weft tree {last} first",
        )


def select_backend() -> Backend:
    """Return the backend for this command.

    It is the server that WEFT_HOST or WEFT_PORT names. Without these variables it is a running
    server of this user with the same looms, else the local backend.
    """
    from .local_backend import LocalBackend

    if os.environ.get("WEFT_HOST") or os.environ.get("WEFT_PORT"):
        return _server_backend()
    from ..service.api.address import address
    from ..service.api.runtime_file import find_server

    server = find_server(address().port)
    return LocalBackend() if server is None else _server_backend(server, LocalBackend())


def _server_backend(server: RunningServer | None = None, here: Backend | None = None) -> Backend:
    """Return the backend of a server. server: None takes the address from WEFT_HOST and WEFT_PORT.

    here: local backend for the same looms, or None.
    """
    from ..service.client import Client
    from .server_backend import ServerBackend

    # WEFT_API_KEY is sent only to a server that the user named.
    client = Client() if server is None else Client(server.url, server.token)
    client.connection.is_verified = server is not None  # `find_server` has checked that it is Weft
    return ServerBackend(client, here)


@contextmanager
def open_session(name: str | None = None) -> Iterator[LoomSession]:
    """Select the backend and open a loom without a model.

    name: the loom; None means the loom last used in this terminal.
    """
    with select_backend() as backend:
        yield backend.open(backend.resolve_name(name))


@contextmanager
def load_for_new_loom(
    model: str | None, engine: str, kv_budget: str, *, resumes: bool = False
) -> Iterator[ModelHandle]:
    """Select the backend and provide a model for new looms; see `Backend.model`.

    resumes: True if a search resumes from a file. Then the local backend is used, if there is one.
    """
    with select_backend() as backend:
        with (backend.home if resumes else backend).model(model, engine, kv_budget) as model_handle:
            yield model_handle


@contextmanager
def open_with_model(
    name: str | None, model: str | None, engine: str, kv_budget: str
) -> Iterator[LoomSession]:
    """Select the backend and open a loom with a model; see `Backend.open_with_model`.

    name: the loom; None means the loom last used in this terminal.
    """
    with (
        select_backend() as backend,
        backend.open_with_model(backend.resolve_name(name), model, engine, kv_budget) as session,
    ):
        yield session


def has_tokens(row: LoomSummary) -> bool:
    """Return True if a loom has tokens; False if it has only texts, which no model can grow."""
    from ..service.store.file import NO_MODEL

    return row.model != NO_MODEL.name


def check_has_tokens(row: LoomSummary) -> None:
    """Raise ConfigError for a loom whose texts have no tokens."""
    if not has_tokens(row):
        raise ConfigError(
            f"the loom {row.name} has texts without tokens: it can be read, but not grown",
            hint="weft import FILE -m MODEL imports the file again, with tokens",
        )


def _is_file(file: Path) -> bool:
    """Return True if a file exists and can be examined."""
    try:
        return file.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False
