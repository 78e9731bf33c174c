"""The backend that uses the database directly and loads models in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ModelLoadError, ModelMismatch, StoreError
from ..service.interchange.user_text import USER_TEXT_KEY
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter
from .backend import Backend, ImportResult, check_has_tokens
from .chat_node import ChatNode
from .model import TINY, load_model
from .session import GenerationStream, LoomSession, UndoResult, check_not_special
from .terminal import terminal

if TYPE_CHECKING:
    from .._core.tokens.tokenizer import Tokenizer
    from ..lm.lm import LM
    from ..lm.results import Delta, Distribution
    from ..lm.stats import Stats
    from ..loom import Heddle, Loom
    from ..loom.author_note import AuthorNote
    from ..search import Level, SearchResult
    from ..search.core import BackgroundLoop, Grow, Work
    from ..search.strategies import Strategy
    from ..service.store import Change, Hit, Library, LoomSummary, StoredLoom

_log = logging.getLogger(__name__)
_LOGGED_CHARS = 300  # of the start and of the end of a prompt, for -v


class LocalBackend(Backend):
    """Looms in the user's database, and models that this process loads."""

    @cached_property
    def library(self) -> Library:
        """The library of saved looms, opened at the first use."""
        from ..service.store import Library

        return Library()

    def close(self) -> None:
        """Close the library, if it was opened."""
        if (library := self.__dict__.pop("library", None)) is not None:
            library.close()

    def where(self) -> str:
        """Return the database file, or the URL of another database."""
        return self.library.database.name.removeprefix("sqlite:///")

    def summaries(self, limit: int | None = None) -> list[LoomSummary]:
        """Return summaries of the saved looms, the one changed last first.

        limit: maximum number of looms; None means all.
        """
        return self.library.looms(limit=limit)

    def summary(self, name: str) -> LoomSummary:
        """Return the summary of one loom. Raises: ConfigError if there is none."""
        return self.library.row(name)

    def last_loom(self) -> str | None:
        """Return the name of the loom last used in this terminal; None if there is none."""
        state = self.library.last_loom(terminal())
        return None if state is None else state.loom

    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom last used in any terminal, else the loom changed last.

        Returns None if there is no loom.
        """
        state = self.library.last_loom_anywhere()
        return None if state is None else state.loom

    def open(self, name: str) -> LocalLoomSession:
        """Open a loom without a model: it can be read and edited, but not grown."""
        return self._session(self.library.open(name, heddle_class=ChatNode))

    def _session(
        self, stored: StoredLoom, model_handle: LocalModel | None = None
    ) -> LocalLoomSession:
        """Return the session of an opened loom.

        The session's current node is the node last shown in this terminal, if it is in this loom,
        else the root.

        Args:
            stored: the loom and its rows.
            model_handle: the model that grows the loom. None opens it without a model.
        """
        session = LocalLoomSession(self, stored.loom, stored, model_handle)
        state = self.library.last_loom(terminal())
        if state is not None and state.loom == stored.name:
            try:
                session.at = stored.node(state.number)
            except ConfigError:
                _log.info("the current node is not in %s any more", stored.name)
        return session

    @contextmanager
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> Iterator[LocalLoomSession]:
        """Load a model, and open a loom with it; see `Backend.open_with_model`.

        engine: "auto" selects the engine that grew the loom if it can run the model.
        """
        from ..loading import fits

        summary = self.summary(name)
        check_has_tokens(summary)
        if engine == "auto" and summary.engine and fits(summary.engine, model or summary.model):
            engine = summary.engine
        try:
            lm = load_model(model or summary.model, engine, kv_budget)
        except ModelLoadError as error:
            if model is not None:
                raise
            raise ModelLoadError(
                f"the loom {name} belongs to the model {summary.model}: {error}",
                hint="-m PATH gives the model's new place",
            ) from error
        with lm:
            try:
                stored = self.library.open(name, lm, heddle_class=ChatNode)
            except ModelMismatch as error:
                raise ModelMismatch(
                    f"the loom {name} belongs to another model than {model or summary.model}: "
                    "its token ids mean other texts",
                    hint=f"-m {summary.model}"
                    if model
                    else "download that version of the model again",
                ) from error
            if model is not None:
                save_model_choice(stored.loom, model, engine)
            yield self._session(stored, LocalModel(self, lm, model or summary.model, engine))

    @contextmanager
    def model(self, model: str | None, engine: str, kv_budget: str) -> Iterator[LocalModel]:
        """Load a model for new looms; see `Backend.model`. None means the embedded model."""
        model = model or TINY
        with load_model(model, engine, kv_budget) as lm:
            yield LocalModel(self, lm, model, engine)

    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
        """Import the looms of a file; see `Backend.import_file`."""
        from ..service.interchange import read
        from ..service.store.library import title_from_text

        with ExitStack() as stack:
            lm = None
            if model is not None:
                lm = stack.enter_context(load_model(model, engine))
            report = read(file, lm, format=format, heddle_class=ChatNode)
            stem = file.stem.removesuffix(".loom")
            names = []
            for imported in report.looms:
                if model is not None:
                    save_model_choice(imported.loom, model, engine)
                is_only = len(report.looms) == 1
                if is_only and name is not None:
                    stored = self.library.create(imported.loom, name=name)
                else:
                    title = name or imported.title or (stem if is_only else "")
                    stored = self.library.create(imported.loom, title=title_from_text(title))
                names.append(stored.name)
                if imported.at is not imported.loom:
                    number = stored.number(imported.at)
                    self.library.set_last_loom(terminal(), stored.id, number)
        return ImportResult(names, report.recognised_as, report.n_nodes, list(report.dropped))

    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return nodes that contain these words, the best match first.

        loom: search only this loom; None searches all.
        """
        return self.library.find(words, loom=loom, limit=limit)

    def remove(self, names: Sequence[str]) -> None:
        """Remove looms. `restore` brings them back."""
        self.library.remove(names)

    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Restore what was removed last; see `Backend.restore`."""
        if loom is not None:
            return self.library.restore_last(self.find_or_import(loom), only_nodes=True)
        return self.library.restore_last(self.last_loom())


class LocalModel:
    """A model that is loaded in this process, as a `ModelHandle`."""

    def __init__(self, backend: LocalBackend, lm: LM, source: str, requested_engine: str) -> None:
        """Wrap a loaded model.

        Args:
            backend: the backend that saves the model's looms.
            lm: the loaded model.
            source: the model as -m takes it.
            requested_engine: the value of --engine, which can be "auto".
        """
        self.backend = backend
        self.lm = lm
        self.source = source
        self.requested_engine = requested_engine
        self.engine = lm.info.name
        self.has_template = lm.text.chat_template is not None
        self.has_next = lm.info.capabilities.steps
        self.continues = bool(lm.info.capabilities.continues)
        self.resumes = True

    def stats(self) -> Stats:
        """Return statistics of this command: tokens computed and reused, KV, time."""
        return self.lm.stats()

    def is_stop_token(self, token_id: int) -> bool:
        """Return True if this token ends a text."""
        return self.lm.is_stop_token(token_id)

    def template_hint(self, otherwise: str) -> str:
        """Return the hint of an error about a missing chat template.

        For a model of a remote server it says how the model may get a template, then `otherwise`.
        For other models it is `otherwise`.
        """
        if self.lm.info.name != "remote":
            return otherwise
        address = self.lm.info.extra["address"].partition("#")[0]
        return (
            f"-m '{address}?api=chat' or -m '{address}?tokenizer=./folder' may have one; "
            f"{otherwise}"
        )

    def create_loom(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> LocalLoomSession:
        """Create the loom of a prompt; see `ModelHandle.create_loom`.

        With `keep`, the loom is saved when its first branches start.
        """
        from ..loom import Loom

        if chat or (chat is None and self.has_template):
            check_not_special(special)
        if chat and text:
            turns = [{"role": "user", "content": text}]
            loom = Loom(self.lm, turns, system=system, heddle_class=ChatNode)
        else:
            loom = Loom(
                self.lm,
                text,
                template=chat is None,
                special=special,
                system=system,
                heddle_class=ChatNode,
            )
        save_model_choice(loom, self.source, self.requested_engine)
        form = "through the chat template" if loom.chat_template_used else "as raw text"
        text = _shorten(self.lm.text.decode(loom.tokens))
        _log.info("prompt of %s, %s: %r", counted(len(loom.tokens), "token"), form, text)
        return LocalLoomSession(self.backend, loom, None, self, is_persistent=keep)

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search in this process; see `ModelHandle.search`.

        The tree is saved after each level. If the search fails, the partial tree is kept.
        """
        from ..search.core import run

        assert isinstance(session, LocalLoomSession)
        file = options.get("resume")
        session.begin_search(resumes=file is not None and Path(file).exists())

        def on_level(level: Level) -> None:
            progress(level)
            session.save_round()

        try:
            options = strategy.options(**options)
            steps = strategy.steps(self.lm, session.loom, progress=on_level, **options)
            return run(steps, session.run_work)
        except Exception:
            session.end_failed()
            raise


class LocalLoomSession(LoomSession):
    """A loom in memory, and its rows in the database.

    Args:
        backend: the backend with the database.
        loom: the loom.
        stored: the loom's rows; None while the loom is not saved.
        model_handle: the model that grows the loom. None opens it without a model.
        is_persistent: save branches while they grow. False for a loom that is not saved.
    """

    def __init__(
        self,
        backend: LocalBackend,
        loom: Loom,
        stored: StoredLoom | None,
        model_handle: LocalModel | None = None,
        *,
        is_persistent: bool = True,
    ) -> None:
        super().__init__(loom, "" if stored is None else stored.name, model_handle)
        self.backend = backend
        self.stored = stored
        self.is_persistent = is_persistent
        self._prompt_meta: dict[str, Any] | None = None  # the prompt's meta before a search
        self._act: str | None = None  # groups the commits of one search, which are undone together
        self._is_deferred = False  # after a failed write a search saves only at its end
        self._temporary_numbers: dict[str, int] = {}  # node numbers while the loom is not saved

    @property
    def model(self) -> str:
        """The model that grows the loom, as -m takes it."""
        return str(self.loom.meta.get("model") or self.loom.saved_by.name)

    # Numbers

    def numbers(self) -> Mapping[str, int]:
        """Return node numbers by node id; temporary numbers while the loom is not saved."""
        if self.stored is not None:
            return self.stored.numbers()
        from ..loom.node import preorder_by_call

        for node in preorder_by_call(self.loom):
            self._temporary_numbers.setdefault(node.id, len(self._temporary_numbers))
        return self._temporary_numbers

    def node(self, name: str | None) -> Heddle:
        """Return the node with this number or id; None means the current node."""
        if name is None or self.stored is None:
            return super().node(name)
        return self.stored.node(name)

    # Growing

    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Start to generate n branches; see `LoomSession.grow`.

        Tokens are saved to the database while they arrive.
        """
        from .._core.sampling.params import SamplingParams
        from ..loom.grow import check_not_terminal, deltas, plan

        lm = self._lm
        params = SamplingParams.resolve({**sampling, "n": n}, node.default_sampling)
        if not force:
            check_not_terminal(node)
        growth = plan([node], params, force=force, streamed=True)
        branches = [pending.child for pending in growth.branches]
        self._try_store(branches)
        counters = lm.scheduler.counters
        n_before, length = counters.prefilled, sum(len(each.tokens) for each in node.path)

        def status() -> str:
            done = min(counters.prefilled - n_before, length)
            percent = f", {100 * done // length} %" if done and length else ""
            return f"reading {counted(length, 'token')}{percent} …"

        first = self._first_of(branches)
        stream = self._persist_stream(deltas(growth))
        return GenerationStream(first, stream, lambda: list(growth.children), status)

    def _first_of(self, branches: list[Heddle]) -> int:
        """Return the node number of the first branch, or the next free one."""
        numbers = self.numbers()
        if self.stored is None:
            for branch in branches:
                self._temporary_numbers.setdefault(branch.id, len(self._temporary_numbers))
        return numbers.get(branches[0].id, len(numbers))

    def _persist_stream(
        self, stream: Generator[Delta, None, object], numbered: Iterable[Heddle] = ()
    ) -> Generator[Delta, None, None]:
        """Yield the deltas of a stream, and save their tokens to the database meanwhile.

        numbered: branches of the stream that have rows and numbers in the database already.
        """
        from ..service.store.stream_writer import StreamWriter

        if self.stored is None or self._is_deferred:
            yield from stream
            return
        writer = StreamWriter(self.stored, numbered)
        try:
            with closing(stream):
                for delta in stream:
                    if delta.token_ids:
                        writer.add(delta.node)
                    yield delta
        finally:
            writer.close()

    # Searching

    def begin_search(self, *, resumes: bool) -> None:
        """Prepare the session for a search, whose commits are undone together.

        The prompt is saved now, so that the search's time does not include it.

        resumes: True if the search continues a loom from a file. That loom is known only after
        the first round, so nothing is saved before.
        """
        self._prompt_meta = deepcopy(self.loom.meta)
        if not resumes:
            self._try_store(())

    def run_work(self, work: Work, loop: BackgroundLoop) -> Any:
        """Run one work item of the search and return its result.

        Branches of this loom are saved while they grow.

        Args:
            work: the work item, such as a `Grow`.
            loop: runs work items that are coroutines.
        """
        from ..search.core import Grow

        # Questions to the model grow in other looms. So does the first round of a resumed search.
        if not isinstance(work, Grow) or any(row.path[0] is not self.loom for row in work.rows):
            return work.run(loop)
        return self._grow_and_save(work)

    def _grow_and_save(self, work: Grow) -> list[Heddle]:
        """Like `Grow.run`, but save tokens while they arrive. Return the grown branches."""
        from ..loom.grow import deltas, plan

        growth = plan(list(work.rows), work.params(self._lm), force=False, streamed=True)
        branches = [pending.child for pending in growth.branches]
        self._try_store(branches)
        nodes: dict[int, Heddle] = {}
        with closing(self._persist_stream(deltas(growth), branches)) as stream:
            for delta in stream:
                nodes[delta.branch] = delta.node
                if work.is_over is not None and work.is_over():
                    break
        return [node for _, node in sorted(nodes.items())]

    def save_round(self) -> None:
        """Save the nodes that the search has added since the last save."""
        self._try_store(())

    def end_failed(self) -> None:
        """Save the partial tree of a failed search; discard the loom if the tree is empty."""
        if not self.loom.children:
            self.discard()
        elif self.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                (f"the partial tree is saved as {self.name}", "dim")
            )

    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add a text of the user below a node; see `LoomSession.add_user_text`.

        Call `save` to save it.
        """
        if not text:
            raise ConfigError("the text is empty")
        if not (self.loom.chat_template_used if chat is None else chat):
            return node.add(text, special=special)
        check_not_special(special)
        if not self.model_handle.has_template:
            raise ConfigError(
                "this model has no chat template: it continues text and does not answer",
                hint=self.model_handle.template_hint("--raw adds the text as it is"),
            )
        message = node.add(self._lm.turn_delta([{"role": "user", "content": text}]))
        message.meta[USER_TEXT_KEY] = text
        return message

    def set_note(self, note: AuthorNote | None) -> None:
        """Set the author's note of the loom and save it; None removes the note."""
        from ..loom.author_note import AUTHOR_NOTE

        self.loom.note = note
        if self.stored is not None:
            self.stored.commit(AUTHOR_NOTE)

    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the `top` likeliest next tokens at a node."""
        return node.next(top=top)

    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each token of a node; see `LoomSession.pieces`."""
        stream = self._text.stream()
        pieces = [stream.push(token) for token in node.tokens]
        if pieces:
            pieces[-1] += stream.flush()
        return pieces

    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Write a part of the loom to a file; see `LoomSession.export`."""
        from ..service.interchange import EXPORTERS, write

        title = "" if self.stored is None else self.stored.title
        if format == "markdown":
            options["name"] = title or self.name
        if format == "json":
            options["title"] = title
        if self.stored is not None and "bookmark" in EXPORTERS[format].options:
            bookmarks, numbers = self.stored.bookmarks(), self.stored.numbers()
            options["bookmark"] = lambda node: bookmarks.get(numbers.get(node.id, -1))
        if format == "html":
            options["mark"] = self.at
        options["numbers"] = self.numbers()
        write(node, path, format=format, scope=scope, kv=kv, **options)

    @cached_property
    def _text(self) -> Tokenizer:
        """The tokenizer of the loom's model."""
        if self.optional_handle is not None:
            return self._lm.text
        from ..engines.hub import tokenizer_of

        return tokenizer_of(self.model)

    @property
    def _lm(self) -> LM:
        """The loaded model."""
        assert isinstance(self.optional_handle, LocalModel)
        return self.optional_handle.lm

    # Saving

    def save(self) -> None:
        """Save changes to the database. A loom that was not saved before gets its name."""
        if self.stored is None:
            self._store_grown()
        else:
            self.stored.commit(self._kind, act=self._act)
            self.name = self.stored.name
        self.remember()

    def remember(self) -> None:
        """Store this loom and its current node as the last ones of this terminal.

        A loom that is not saved is not stored.
        """
        if self.stored is not None:
            self.backend.library.set_last_loom(
                terminal(), self.stored.id, self.stored.number(self.at)
            )

    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Remove nodes, with all nodes below them. `undo` brings them back."""
        assert self.stored is not None
        for node in nodes:
            node.remove()
        self.stored.commit("remove")

    def undo(self) -> UndoResult:
        """Undo the last operation that is not undone yet."""
        assert self.stored is not None
        return self._apply(self.stored.undo)

    def redo(self) -> UndoResult:
        """Redo the operation that was undone last."""
        assert self.stored is not None
        return self._apply(self.stored.redo)

    def _apply(self, operation: Callable[[], Change]) -> UndoResult:
        """Run an undo or redo, and return what it changed."""
        assert self.stored is not None
        previous, path = {each.key: each for each in self.stored.history()}, self.at.path
        change = operation()
        kind = next(
            (each.kind for each in self.stored.history() if previous[each.key].state != each.state),
            change.kind,
        )
        # If the current node was removed, its nearest ancestor becomes the current node.
        self.at = next(node for node in reversed(path) if node.path[0] is self.loom)
        numbers = self.stored.numbers()
        removed = [numbers[node_id] for node_id in change.removed]
        return UndoResult(kind, change.added, change.changed, removed)

    def discard(self) -> None:
        """Delete the loom from the database, without a way to restore it; ignore errors."""
        if self.stored is not None:
            with suppress(StoreError):
                self.backend.library.remove(self.stored.id)
                self.backend.library.purge([self.stored.id])
            self.stored, self.name = None, ""

    @property
    def _kind(self) -> str:
        """The operation in one word, for the loom's log."""
        return "grow" if self._prompt_meta is None else "run"

    def _store(self) -> None:
        """Create the loom's rows, if it is not saved yet."""
        self.stored = self.backend.library.create(self.loom)
        self.name = self.stored.name

    def _store_grown(self) -> None:
        """Save a new loom: first its prompt, then its branches as a second operation.

        Undo can then remove the branches and keep the prompt.
        """
        from .._core.sched.driver import deferred_interrupt

        loom = self.loom
        branches, meta = list(loom.children), loom.meta
        with deferred_interrupt():
            loom.children.clear()
            loom.meta = meta if self._prompt_meta is None else self._prompt_meta
            try:
                self._store()
            finally:
                loom.children.extend(branches)
                loom.meta = meta
            assert self.stored is not None
            try:
                if self._prompt_meta is not None:
                    self._act = self.stored.new_act()
                self.stored.commit(self._kind, act=self._act)
            except StoreError:
                self.discard()
                raise

    def _try_store(self, branches: Sequence[Heddle]) -> None:
        """Save the loom, and create rows for branches that are about to grow.

        A row gives a branch its number before its first token. A StoreError is not raised: `save`
        tries once more at the end.
        """
        if not self.is_persistent or self._is_deferred:
            return
        try:
            if self.stored is None:
                self._store_grown()
            assert self.stored is not None
            self.stored.commit("say" if self._prompt_meta is None else "run", act=self._act)
            if branches:
                self.stored.append(branches)
        except StoreError as error:
            _log.info("not saved yet: %s", error)  # `save` reports the error if it persists
            if self._prompt_meta is not None:
                self._is_deferred = True
                note = f"not saved yet; saving is retried at the end: {error}"
                TerminalWriter.for_stream(sys.stderr).line((note, "dim"))


def save_model_choice(loom: Loom, model: str, engine: str) -> None:
    """Store in a loom's meta the model and the engine that grow it.

    Args:
        loom: the loom.
        model: the model as -m takes it. A folder is stored as an absolute path.
        engine: the value of --engine; "auto" removes a stored engine.
    """
    from ..loading import is_url

    is_folder = model != TINY and Path(model).is_dir()
    loom.meta["model"] = str(Path(model).resolve()) if is_folder else model
    if loom.lm is not None and is_url(model):
        loom.meta["model"] = loom.lm.info.extra["address"]
    if engine != "auto":
        loom.meta["engine"] = engine
    else:
        loom.meta.pop("engine", None)  # the engine of a previous model may not fit this one


def _shorten(text: str) -> str:
    """Return a text for the log; of a long text only its start and its end."""
    return (
        text
        if len(text) <= 2 * _LOGGED_CHARS
        else f"{text[:_LOGGED_CHARS]} … {text[-_LOGGED_CHARS:]}"
    )
