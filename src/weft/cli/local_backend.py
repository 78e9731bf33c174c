"""Looms of this machine's library, grown by a model in this process."""

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
from ..service.interchange.said import SAID
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
    from ..search import Level, SearchResult
    from ..search.core import BackgroundLoop, Grow, Work
    from ..search.strategies import Strategy
    from ..service.store import Change, Hit, Library, LoomSummary, StoredLoom

_log = logging.getLogger(__name__)
_SHOWN = 300  # characters of a prompt's beginning, and of its end, that -v shows


class LocalBackend(Backend):
    """The looms of the library."""

    @cached_property
    def library(self) -> Library:
        """The library, opened when it is first needed."""
        from ..service.store import Library

        return Library()

    def close(self) -> None:
        """Let go of the library, if it was opened."""
        if (library := self.__dict__.pop("library", None)) is not None:
            library.close()

    def where(self) -> str:
        """Return where they are kept, in words."""
        return self.library.database.name.removeprefix("sqlite:///")

    def rows(self, limit: int | None = None) -> list[LoomSummary]:
        """Return what is kept, the one changed last first."""
        return self.library.looms(limit=limit)

    def row(self, name: str) -> LoomSummary:
        """Return what a list says of one loom."""
        return self.library.row(name)

    def last_loom(self) -> str | None:
        """Return the loom drawn last in this terminal."""
        stand = self.library.last_loom(terminal())
        return None if stand is None else stand.loom

    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom drawn last in any terminal, else the one changed last."""
        stand = self.library.last_loom_anywhere()
        return None if stand is None else stand.loom

    def open(self, name: str) -> LocalLoomSession:
        """Open a loom to read it."""
        return self._session(self.library.open(name, heddle_class=ChatNode))

    def _session(
        self, stored: StoredLoom, model_handle: LocalModel | None = None
    ) -> LocalLoomSession:
        """Return a kept loom, where its reader stands."""
        found = LocalLoomSession(self, stored.loom, stored, model_handle)
        stand = self.library.last_loom(terminal())
        if stand is not None and stand.loom == stored.name:
            try:
                found.at = stored.node(stand.number)
            except ConfigError:
                _log.info("the node that was read last is not in %s any more", stored.name)
        return found

    @contextmanager
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> Iterator[LocalLoomSession]:
        """Open a loom with its model. The engine is the one that it remembers, if that fits."""
        from ..loading import fits

        row = self.row(name)
        check_has_tokens(row)
        if engine == "auto" and row.engine and fits(row.engine, model or row.model):
            engine = row.engine
        try:
            lm = load_model(model or row.model, engine, kv_budget)
        except ModelLoadError as error:
            if model is not None:
                raise
            raise ModelLoadError(
                f"the loom {name} was made with {row.model}: {error}",
                hint="-m says where that model is now",
            ) from error
        with lm:
            try:
                stored = self.library.open(name, lm, heddle_class=ChatNode)
            except ModelMismatch as error:
                raise ModelMismatch(
                    f"the loom {name} was made with another model than {model or row.model}: "
                    "its tokens would mean something else",
                    hint=f"-m {row.model}" if model else "fetch that version of the model again",
                ) from error
            if model is not None:
                save_model_choice(stored.loom, model, engine)
            yield self._session(stored, LocalModel(self, lm, model or row.model, engine))

    @contextmanager
    def model(self, model: str | None, engine: str, kv_budget: str) -> Iterator[LocalModel]:
        """Load a model for new looms; None: the embedded one."""
        model = model or TINY
        with load_model(model, engine, kv_budget) as lm:
            yield LocalModel(self, lm, model, engine)

    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
        """Keep the looms of a file. model: make its texts tokens of this one."""
        from ..service.interchange import read

        with ExitStack() as stack:
            lm = None
            if model is not None:
                lm = stack.enter_context(load_model(model, engine))
            report = read(file, lm, format=format, heddle_class=ChatNode)
            stem = file.name.removesuffix(".json").removesuffix(".loom")
            names = []
            for each in report.looms:
                if model is not None:
                    save_model_choice(each.loom, model, engine)
                own = each.title or (stem if len(report.looms) == 1 else None)
                given = {"name": name} if len(report.looms) == 1 else {}
                stored = self.library.create(each.loom, title=name or own, **given)
                names.append(stored.name)
                if each.at is not each.loom:
                    self.library.set_last_loom(terminal(), stored.id, stored.number(each.at))
        is_text = lm is None and not report.looms[0].loom.tokens
        return ImportResult(
            names, report.recognised_as, report.n_nodes, list(report.dropped), is_text
        )

    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return the nodes that have these words."""
        return self.library.find(words, loom=loom, limit=limit)

    def remove(self, names: Sequence[str]) -> None:
        """Take looms away."""
        self.library.remove(names)

    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Bring back what was removed last: looms, or nodes of the loom drawn last here.

        Returns the names that they had and have. loom: nodes of this one.
        """
        if loom is not None:
            return self.library.restore_last(self.find_or_import(loom), only_nodes=True)
        return self.library.restore_last(self.last_loom())


class LocalModel:
    """A model that is loaded in this process."""

    def __init__(self, backend: LocalBackend, lm: LM, source: str, asked: str) -> None:
        """asked: the engine that was asked for."""
        self.backend = backend
        self.lm = lm
        self.source = source
        self.asked = asked
        self.engine = lm.info.name
        self.has_template = lm.text.chat_template is not None
        self.has_next = lm.info.capabilities.steps
        self.continues = bool(lm.info.capabilities.continues)
        self.resumes = True

    def stats(self) -> Stats:
        """Return what it has computed and saved."""
        return self.lm.stats()

    def is_stop_token(self, token_id: int) -> bool:
        """Whether this token ends a text."""
        return self.lm.is_stop_token(token_id)

    def template_hint(self, otherwise: str) -> str:
        """Return what to do without a chat template; a server's model may have one over there."""
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
        """Return the loom of a prompt; it is kept from its first tokens on."""
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
        save_model_choice(loom, self.source, self.asked)
        how = "through the chat template" if loom.chat_template_used else "as raw text"
        shown = _shortened(self.lm.text.decode(loom.tokens))
        _log.info("prompt of %s, %s: %r", counted(len(loom.tokens), "token"), how, shown)
        return LocalLoomSession(self.backend, loom, None, self, is_persistent=keep)

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search in a loom that is just begun; it is kept while it grows."""
        from ..search.core import run

        assert isinstance(session, LocalLoomSession)
        file = options.get("resume")
        session.begin_search(goes_on=file is not None and Path(file).exists())

        def seen(level: Level) -> None:
            progress(level)
            session.keep_round()

        try:
            options = strategy.options(**options)
            steps = strategy.steps(self.lm, session.loom, progress=seen, **options)
            return run(steps, session.work)
        except Exception:
            session.end_failed()
            raise


class LocalLoomSession(LoomSession):
    """A loom in memory, and its rows. held: None until it is kept."""

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
        self._prompt_meta: dict[str, Any] | None = None  # the prompt's meta before it was searched
        self._act: str | None = None  # the search that its operations are parts of
        self._is_deferred = False  # a search waits once for a database that fails, not every round
        self._temporary_numbers: dict[str, int] = {}  # numbers of a loom that is not kept

    @property
    def model(self) -> str:
        """What to load to grow it."""
        return str(self.loom.meta.get("model") or self.loom.saved_by.name)

    # Numbers

    def numbers(self) -> Mapping[str, int]:
        """Return number by id."""
        if self.stored is not None:
            return self.stored.numbers()
        from ..loom.node import preorder_by_call

        for node in preorder_by_call(self.loom):
            self._temporary_numbers.setdefault(node.id, len(self._temporary_numbers))
        return self._temporary_numbers

    def node(self, given: str | None) -> Heddle:
        """Return the node with this number or id."""
        if given is None or self.stored is None:
            return super().node(given)
        return self.stored.node(given)

    # Growing

    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Begin to grow n branches at a node; what has come is kept while more comes."""
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
        before, length = counters.prefilled, sum(len(each.tokens) for each in node.path)

        def waiting() -> str:
            done = min(counters.prefilled - before, length)
            of = f", {100 * done // length} %" if done and length else ""
            return f"reading {counted(length, 'token')}{of} …"

        first = self._first_of(branches)
        news = self._persist_stream(deltas(growth))
        return GenerationStream(first, news, lambda: list(growth.children), waiting)

    def _first_of(self, branches: list[Heddle]) -> int:
        numbers = self.numbers()
        if self.stored is None:
            for branch in branches:
                self._temporary_numbers.setdefault(branch.id, len(self._temporary_numbers))
        return numbers.get(branches[0].id, len(numbers))

    def _persist_stream(
        self, news: Generator[Delta, None, object], begun: Iterable[Heddle] = ()
    ) -> Generator[Delta, None, None]:
        """begun: branches that have their numbers already, if they are kept at all."""
        from ..service.store.stream_writer import StreamWriter

        if self.stored is None or self._is_deferred:
            yield from news
            return
        writer = StreamWriter(self.stored, begun)
        try:
            with closing(news):
                for delta in news:
                    if delta.token_ids:
                        writer.add(delta.node)
                    yield delta
        finally:
            writer.close()

    # Searching

    def begin_search(self, *, goes_on: bool) -> None:
        """What comes now is made by one search; its prompt is kept before its clock runs.

        goes_on: in the loom of a file, which is known from its first round on.
        """
        self._prompt_meta = deepcopy(self.loom.meta)
        if not goes_on:
            self._try_store(())

    def work(self, work: Work, loop: BackgroundLoop) -> Any:
        """Do a piece of the search's work; what grows here is kept while it grows."""
        from ..search.core import Grow

        # Questions grow in looms of their own; the loom of a file is known from its first round on.
        if not isinstance(work, Grow) or any(row.path[0] is not self.loom for row in work.rows):
            return work.run(loop)
        return self._grown(work)

    def _grown(self, work: Grow) -> list[Heddle]:
        """Return what `Grow.run` would."""
        from ..loom.grow import deltas, plan

        growth = plan(list(work.rows), work.params(self._lm), force=False, streamed=True)
        branches = [pending.child for pending in growth.branches]
        self._try_store(branches)
        made: dict[int, Heddle] = {}
        with closing(self._persist_stream(deltas(growth), branches)) as news:
            for delta in news:
                made[delta.branch] = delta.node
                if work.is_over is not None and work.is_over():
                    break
        return [node for _, node in sorted(made.items())]

    def keep_round(self) -> None:
        """Keep what a round of the search has made."""
        self._try_store(())

    def end_failed(self) -> None:
        """The search has failed: keep what it has made, or nothing if that is nothing."""
        if not self.loom.children:
            self.discard()
        elif self.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                (f"what had grown is kept: {self.name}", "dim")
            )

    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add what the user says at a node, and return it."""
        if not text:
            raise ConfigError("there is nothing to say: the text is empty")
        if not (self.loom.chat_template_used if chat is None else chat):
            return node.add(text, special=special)
        check_not_special(special)
        if not self.model_handle.has_template:
            raise ConfigError(
                "this model has no chat template: it continues text and does not answer",
                hint=self.model_handle.template_hint("--raw adds the text as it is"),
            )
        said = node.add(self._lm.turn_delta([{"role": "user", "content": text}]))
        said.meta[SAID] = text
        return said

    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the likeliest next tokens at a node."""
        return node.next(top=top)

    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each of a node's tokens."""
        stream = self._text.stream()
        pieces = [stream.push(token) for token in node.tokens]
        if pieces:
            pieces[-1] += stream.flush()
        return pieces

    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Write a part of the loom to a file."""
        from ..service.interchange import EXPORTERS, write

        if format == "markdown":
            options["name"] = self.name
        if self.stored is not None and "bookmark" in EXPORTERS[format].options:
            marks, known = self.stored.bookmarks(), self.stored.numbers()
            options["bookmark"] = lambda each: marks.get(known.get(each.id, -1))
        if format == "html":
            options["mark"] = self.at
        numbers = self.numbers()
        write(node, path, format=format, scope=scope, numbers=numbers, kv=kv, **options)

    @cached_property
    def _text(self) -> Tokenizer:
        if self.optional_handle is not None:
            return self._lm.text
        from ..engines.hub import tokenizer_of

        return tokenizer_of(self.model)

    @property
    def _lm(self) -> LM:
        assert isinstance(self.optional_handle, LocalModel)
        return self.optional_handle.lm

    # Keeping

    def save(self) -> None:
        """Keep what has changed; a loom that is not kept yet gets its name."""
        if self.stored is None:
            self._store_grown()
        else:
            self.stored.commit(self._kind, act=self._act)
            self.name = self.stored.name
        self.note()

    def note(self) -> None:
        """Remember that this is the loom drawn last in this terminal, and where one stands."""
        if self.stored is not None:
            self.backend.library.set_last_loom(
                terminal(), self.stored.id, self.stored.number(self.at)
            )

    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Take nodes away, with all below them."""
        assert self.stored is not None
        for node in nodes:
            node.remove()
        self.stored.commit("remove")

    def undo(self) -> UndoResult:
        """Undo the last change of this loom that is not undone."""
        assert self.stored is not None
        return self._turned(self.stored.undo)

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        assert self.stored is not None
        return self._turned(self.stored.redo)

    def _turned(self, turn: Callable[[], Change]) -> UndoResult:
        assert self.stored is not None
        before, path = {each.key: each for each in self.stored.history()}, self.at.path
        change = turn()
        kind = next(
            (each.kind for each in self.stored.history() if before[each.key].state != each.state),
            change.kind,
        )
        # Where one stood may be gone: then one stands at the nearest that is there.
        self.at = next(node for node in reversed(path) if node.path[0] is self.loom)
        numbers = self.stored.numbers()
        removed = [numbers[node_id] for node_id in change.removed]
        return UndoResult(kind, change.added, change.changed, removed)

    def discard(self) -> None:
        """Forget a loom of which nothing came, or that was not to be kept."""
        if self.stored is not None:
            with suppress(StoreError):
                self.backend.library.remove(self.stored.id)
                self.backend.library.purge([self.stored.id])
            self.stored, self.name = None, ""

    @property
    def _kind(self) -> str:
        return "grow" if self._prompt_meta is None else "run"

    def _store(self) -> None:
        self.stored = self.backend.library.create(self.loom)
        self.name = self.stored.name

    def _store_grown(self) -> None:
        """Keep the prompt, and what has grown as an operation of its own: undo takes it back."""
        from .._core.sched.driver import deferred_interrupt

        loom = self.loom
        grown, meta = list(loom.children), loom.meta
        with deferred_interrupt():
            loom.children.clear()
            loom.meta = meta if self._prompt_meta is None else self._prompt_meta
            try:
                self._store()
            finally:
                loom.children.extend(grown)
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
        """Let branches have rows, and so numbers, before they have tokens."""
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
            _log.info("not kept yet: %s", error)  # told at the end, if it lasts
            if self._prompt_meta is not None:
                self._is_deferred = True
                note = f"not kept yet, and tried again at the end: {error}"
                TerminalWriter.for_stream(sys.stderr).line((note, "dim"))


def save_model_choice(loom: Loom, model: str, engine: str) -> None:
    """Note in a loom what to load to grow it again: a folder by its whole path."""
    from ..loading import is_url

    is_folder = model != TINY and Path(model).is_dir()
    loom.meta["model"] = str(Path(model).resolve()) if is_folder else model
    if loom.lm is not None and is_url(model):
        loom.meta["model"] = loom.lm.info.extra["address"]
    if engine != "auto":
        loom.meta["engine"] = engine
    else:
        loom.meta.pop("engine", None)  # of a model that was elsewhere, and in another form


def _shortened(text: str) -> str:
    """Return a text's beginning and end."""
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}"
