"""Looms of a server, grown by its models: KV is there from one command to the next."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._core.atomic_files import parse_number, read, write
from ..errors import (
    ConfigError,
    FormatError,
    ModelLoadError,
    NotFound,
    StoreError,
    Unsupported,
    WeftError,
)
from ..service.api.jobs import JobReply, TokenUsage
from ..service.api.nodes import NodeObject
from ..service.api.sampling import SamplingFields
from ..service.client.call import ApiCall
from ..service.store.summary import LoomSummary
from ..viz.outline import counted
from .backend import Backend, ImportResult, check_has_tokens
from .chat_node import ChatNode
from .model import TINY
from .session import GenerationStream, LoomSession, UndoResult, check_not_special
from .terminal import terminal

if TYPE_CHECKING:
    from ..lm.results import Delta, Distribution
    from ..lm.stats import Stats
    from ..loom import Heddle, Loom
    from ..search import Level, SearchResult
    from ..search.strategies import Strategy
    from ..service.api.looms import LoomObject
    from ..service.api.models import ModelObject
    from ..service.client import Client
    from ..service.store import Hit
    from .backend import ModelHandle

_PAGE = 1000
_ALL_FIELDS = ("tokens", "meta", "params")


class ServerBackend(Backend):
    """The looms of a server.

    here: the same looms in this process, for what the server has no model for; None where the
    server is elsewhere, or was asked for by name.
    """

    def __init__(self, client: Client, here: Backend | None = None) -> None:
        self.client = client
        self.here = here

    def close(self) -> None:
        """Let go of the connections."""
        self.client.close()
        if self.here is not None:
            self.here.close()

    @property
    def home(self) -> Backend:
        """The same looms in this process, where the server was not asked for by name."""
        return self if self.here is None else self.here

    def where(self) -> str:
        """Return where they are kept, in words."""
        return self.client.connection.base

    def rows(self, limit: int | None = None) -> list[LoomSummary]:
        """Return what is kept, the one changed last first."""
        found: list[LoomSummary] = []
        after = None
        while True:
            left = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = self.client.looms(limit=left, after=after)
            found += map(_row, page.data)
            after = page.next
            if after is None or len(found) == limit:
                return found

    def row(self, name: str) -> LoomSummary:
        """Return what a list says of one loom."""
        try:
            return _row(self.client.loom(name))
        except NotFound as error:
            if error.what != "loom":
                raise
            raise ConfigError(str(error), hint=error.hint) from error

    def last_loom(self) -> str | None:
        """Return the loom drawn last in this terminal."""
        mark = terminal()
        return self.client.drawn_last(mark).loom if mark else None

    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom drawn last in any terminal, else the one changed last."""
        return self.client.drawn_last(terminal() or "-").anybodys

    def open(self, name: str) -> ServerLoomSession:
        """Open a loom to read it."""
        return self._session(name, None)

    def _session(self, name: str, model_handle: ServerModel | None) -> ServerLoomSession:
        """Return a loom, where its reader stands."""
        session = ServerLoomSession(self, self.client.loom(name), model_handle)
        mark = terminal()
        if mark:
            drawn = self.client.drawn_last(mark)
            if drawn.loom == session.name:
                session.at = session.by_number.get(drawn.node, session.loom)
        return session

    @contextmanager
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> Iterator[LoomSession]:
        """Open a loom with its model."""
        row = self.row(name)
        check_has_tokens(row)
        found = self._model(model or row.model, engine, kv_budget)
        if found is None and self.here is not None:
            with self.here.open_with_model(name, model, engine, kv_budget) as session:
                yield session
            return
        if found is None:
            found = self._loaded(model or row.model, engine, kv_budget)
        yield self._session(name, ServerModel(self, found))

    @contextmanager
    def model(self, model: str | None, engine: str, kv_budget: str) -> Iterator[ModelHandle]:
        """Take a model of the server's for new looms; None: its default one."""
        found = self._model(model, engine, kv_budget)
        if found is None and self.here is not None:
            with self.here.model(model, engine, kv_budget) as model_handle:
                yield model_handle
            return
        if found is None:
            found = self._loaded(model or TINY, engine, kv_budget)
        yield ServerModel(self, found)

    def _model(self, source: str | None, engine: str, kv_budget: str) -> ModelObject | None:
        """Return the model that is wished for, if it is loaded there."""
        for each in self.client.models().data:
            is_it = each.is_default if source is None else _is_same(each, source)
            if is_it and each.state == "ready":
                if engine in ("auto", each.engine) and kv_budget == "auto":
                    return each
                if self.here is None:
                    raise ConfigError(
                        f"the server runs {each.id} with an engine and a KV budget of its own; "
                        "leave out --engine and --kv-budget",
                        hint="weft serve takes both",
                    )
        return None

    def _loaded(self, source: str, engine: str, kv_budget: str) -> ModelObject:
        """Let the server load a model."""
        options = {} if engine == "auto" else {"engine": engine}
        if kv_budget != "auto":
            options["kv_budget"] = kv_budget
        job = self.client.load_model(source, **options)
        told = self.client.wait(job.job)
        if told.model is None:
            raise ModelLoadError(f"{self.where()} has not loaded {source}")
        return self.client.model(told.model)

    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
        """Keep the looms of a file. model: make its texts tokens of this one."""
        if model is not None:
            found = self._model(model, engine, "auto")
            if found is None and self.here is not None:
                return self.here.import_file(
                    file, format=format, name=name, model=model, engine=engine
                )
            model = (found or self._loaded(model, engine, "auto")).id
        try:
            told = self.client.import_looms(read(file), format=format, model=model, name=name)
        except FormatError as error:
            raise FormatError(f"{file}: {error}", hint=error.hint) from error
        names = [each.name for each in told.looms]
        return ImportResult(names, told.recognised_as, told.nodes, told.dropped)

    def page(self) -> str | None:
        """Return the address of the page; "" where the server has none."""
        try:
            self.client.call(ApiCall("GET", "/", bool, is_json=False))
        except NotFound:
            return ""
        return f"{self.where()}/"

    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return the nodes that have these words."""
        from ..service.store import Hit

        found = self.client.find(words, loom=loom, limit=limit).data
        return [
            Hit(each.name, each.loom, each.node, "", each.text, each.spans, 0.0) for each in found
        ]

    def remove(self, names: Sequence[str]) -> None:
        """Take looms away."""
        for name in names:
            self.client.remove_loom(name)

    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Bring back what was removed last: looms, or nodes of the loom drawn last here."""
        if loom is not None:
            told = self.client.restore_looms(nodes_of=self.find_or_import(loom), only_nodes=True)
        else:
            told = self.client.restore_looms(nodes_of=self.last_loom())
        return list(zip(told.names, (row.name for row in told.data), strict=True))


class ServerModel:
    """A model of a server. What it counts is of this command."""

    def __init__(self, backend: ServerBackend, model: ModelObject) -> None:
        self.backend = backend
        self.id = model.id
        self.source = model.source
        self.engine = model.engine or ""
        self.has_template = bool(model.has_chat_template)
        self.has_next = bool(model.abilities.get("steps", True))
        self.continues = bool(model.abilities.get("continues", True))
        self.resumes = False
        self.usage = TokenUsage()
        self.seconds = 0.0

    def stats(self) -> Stats:
        """Return what this command's work has read and written there; KV is the model's."""
        from ..lm.stats import Stats

        kv = next((each for each in self.backend.client.kv().data if each.model == self.id), None)
        cached = self.usage.cached_tokens
        return Stats(
            prefilled=self.usage.prompt_tokens - (cached or 0),
            reused=cached or 0,
            decoded=self.usage.completion_tokens,
            recomputed=0,
            steps=int(self.seconds > 0),
            kv_tokens=0 if kv is None else kv.kv_tokens,
            kv_bytes=0 if kv is None else kv.kv_bytes,
            kv_bytes_unshared=0 if kv is None else kv.kv_bytes_unshared,
            kv_bytes_allocated=0,
            kv_budget_bytes=None if kv is None else kv.kv_budget_bytes,
            offloaded_bytes=0 if kv is None else kv.offloaded_bytes,
            offload_budget_bytes=0,
            row_bytes=0,
            row_budget_bytes=0,
            pinned_tokens=0 if kv is None else kv.pinned_tokens,
            evicted=0 if kv is None else kv.evicted,
            parked=0,
            plan_s=0.0,
            forward_s=self.seconds,
            deliver_s=0.0,
            knows_prefill=cached is not None or not self.seconds,
            knows_kv=kv is not None,
        )

    def count(self, usage: TokenUsage | None, seconds: float) -> None:
        """Count a job that has ended."""
        self.seconds += seconds
        if usage is None:
            return
        known = usage.cached_tokens is not None and self.usage.cached_tokens is not None
        before = self.usage.cached_tokens if self.usage.prompt_tokens else 0
        self.usage = TokenUsage(
            prompt_tokens=self.usage.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens + usage.completion_tokens,
            cached_tokens=(before or 0) + (usage.cached_tokens or 0)
            if known or not self.usage.prompt_tokens and usage.cached_tokens is not None
            else None,
        )

    def is_stop_token(self, token_id: int) -> bool:
        """Whether this token ends a text; it is not known here, so it is taken to."""
        return True

    def template_hint(self, otherwise: str) -> str:
        """Return what to do without a chat template."""
        return otherwise

    def create_loom(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> ServerLoomSession:
        """Make the loom of a prompt; one that is not to be kept goes at the end."""
        if chat or (chat is None and self.has_template):
            check_not_special(special)
        given: dict[str, Any] = {"model": self.id, "system": system}
        if chat and text:
            given["messages"] = [{"role": "user", "content": text}]
        else:
            given |= {"prompt": text, "template": chat is None, "special": special or None}
        told = self.backend.client.create_loom(**given)
        return ServerLoomSession(self.backend, told, self, is_persistent=keep)

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search in a loom that is just begun."""
        assert isinstance(session, ServerLoomSession)
        return session.search(strategy, options)


class ServerLoomSession(LoomSession):
    """A loom of a server, read into this process; what changes is changed there, then read."""

    def __init__(
        self,
        backend: ServerBackend,
        told: LoomObject,
        model_handle: ServerModel | None,
        *,
        is_persistent: bool = True,
    ) -> None:
        self.backend = backend
        self.client = backend.client
        self.id = told.id
        self.is_persistent = is_persistent
        self._model = str((told.meta or {}).get("model") or told.model)
        self.by_number: dict[int, Heddle] = {}
        self._numbers: dict[str, int] = {}
        super().__init__(self._read(told), told.name if is_persistent else "", model_handle)
        self._model_handle = model_handle

    @property
    def model(self) -> str:
        """What to load to grow it."""
        return self._model

    # Reading

    def _read(self, told: LoomObject) -> Loom:
        from ..loom import Loom
        from ..loom.loom import Prompt
        from ..loom.node import new_child
        from ..service.store.file import ModelIdentity, bare_loom

        mark = ModelIdentity(told.model, "", 0)
        made = Prompt([], told.prompt, bool(told.chat_template_used))
        loom = bare_loom(mark, made, told.created, None, None, Loom, ChatNode)
        for each in self._nodes():
            if each.parent is None:
                self._fill(loom, each)
                continue
            parent = self.by_number[each.parent]
            node = new_child(parent)
            self._fill(node, each)
            parent.children.append(node)
        return loom

    def _nodes(self, **which: Any) -> Iterator[NodeObject]:
        after = None
        while True:
            page = self.client.nodes(self.id, fields=_ALL_FIELDS, limit=_PAGE, after=after, **which)
            yield from page.data
            if (after := page.next) is None:
                return

    def _fill(self, node: Heddle, told: NodeObject) -> None:
        from .._core.sampling.params import SamplingParams
        from ..loom.node import set_text, set_tokens

        set_tokens(node, told.token_ids or [])
        set_text(node, told.text)
        node.id = told.id
        node.logprobs = [parse_number(value, "a logprob") for value in told.logprobs or ()]
        node.entropies = [parse_number(value, "an entropy") for value in told.entropies or ()]
        legal = told.legal_logmass or ()
        node.legal_logmass = [parse_number(value, "a legal_logmass") for value in legal]
        node.params = None if told.params is None else SamplingParams.from_dict(told.params)
        node.finish_reason = told.finish_reason  # type: ignore[assignment]
        node.stop_string, node.terminal = told.stop_string, told.ended
        node.score = None if told.score is None else parse_number(told.score, "a score")
        node.meta = dict(told.meta or {})
        self.by_number[told.node] = node
        self._numbers[told.id] = told.node

    def _again(self) -> None:
        """Read the loom anew; one stands where one stood, or at the nearest that is there."""
        path = [self._numbers[node.id] for node in self.at.path]
        self.by_number = {}
        self.loom = self._read(self.client.loom(self.id))
        self.at = next(self.by_number[each] for each in reversed(path) if each in self.by_number)

    def numbers(self) -> Mapping[str, int]:
        """Return number by id, of all nodes that were here."""
        return self._numbers

    def _number(self, node: Heddle) -> int:
        return self._numbers[node.id]

    # Growing

    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Begin to grow n branches at a node."""
        options = _fields(sampling)
        assert self._model_handle is not None
        job = self.client.begin(
            self.id, self._number(node), n=n, force=force, model=self._model_handle.id, **options
        )
        made: list[Heddle] = []
        length = sum(len(each.tokens) for each in node.path)
        return GenerationStream(
            job.branches[0].node,
            self._follow(node, job, made),
            lambda: made,
            lambda: f"reading {counted(length, 'token')} …",
        )

    def _follow(
        self, parent: Heddle, job: JobReply, made: list[Heddle]
    ) -> Generator[Delta, None, None]:
        from ..lm.results import Delta
        from ..loom.node import new_child
        from ..service.client.growth import GrowthReader

        began = time.monotonic()
        reader = GrowthReader(job)
        sprouts = {each.branch: new_child(parent) for each in job.branches}
        is_whole = False
        try:
            for name, told in self.client.events(job.job):
                for each in reader.take(name, told):
                    yield Delta(
                        each.branch,
                        sprouts[each.branch],
                        each.token_ids,
                        each.text,
                        each.logprobs,
                        each.finish_reason,  # type: ignore[arg-type]
                    )
        except (GeneratorExit, KeyboardInterrupt):
            self.client.cancel(job.job)
            for name, told in self.client.events(job.job):
                reader.take(name, told)
            raise
        else:
            is_whole = True
        finally:
            self._take_in(parent, job, made, is_told=not is_whole)
            assert self._model_handle is not None
            self._model_handle.count(reader.usage, time.monotonic() - began)

    def _take_in(self, parent: Heddle, job: JobReply, made: list[Heddle], *, is_told: bool) -> None:
        """Read what has become of the branches. is_told: an error is, and no other one matters."""
        from ..loom.node import new_child

        branches = {each.node: each.branch for each in job.branches}
        try:
            found = [each for each in self._nodes(under=self._number(parent), depth=1)]
        except WeftError:
            if not is_told:
                raise
            return
        for told in found:
            if told.node in branches and told.node not in self.by_number:
                node = new_child(parent)
                self._fill(node, told)
                node.lineage = (branches[told.node],)
                parent.children.append(node)
                made.append(node)

    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add what the user says at a node, and return it."""
        if not text:
            raise ConfigError("there is nothing to say: the text is empty")
        is_turn = self.loom.chat_template_used if chat is None else chat
        if is_turn:
            check_not_special(special)
            if not self.model_handle.has_template:
                raise ConfigError(
                    "this model has no chat template: it continues text and does not answer",
                    hint=self.model_handle.template_hint("--raw adds the text as it is"),
                )
        what = {"message": text} if is_turn else {"text": text, "special": special or None}
        changed = self.client.add(self.id, self._number(node), **what)
        return self._added(node, changed.added[0].node)

    def _added(self, parent: Heddle, number: int) -> Heddle:
        from ..loom.node import new_child

        node = new_child(parent)
        self._fill(node, self.client.node(self.id, number, fields=_ALL_FIELDS))
        parent.children.append(node)
        return node

    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the likeliest next tokens at a node."""
        from ..lm.results import Distribution, TokenProb

        found = self.client.next_tokens(self.id, self._number(node), top=top).next
        return Distribution(
            TokenProb(
                each.id,
                each.text,
                bytes(each.bytes),
                parse_number(each.logprob, "a logprob"),
                each.p,
                each.rank,
            )
            for each in found
        )

    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each of a node's tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = self.client.tokens(self.id, self._number(node)).data
        last = len(tokens) - 1
        return [decoder.decode(bytes(each.bytes), at == last) for at, each in enumerate(tokens)]

    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Write a part of the loom to a file."""
        options = {name: value for name, value in options.items() if value}
        if kv or not options.keys() <= {"tint"}:
            raise Unsupported(
                "a server exports without --kv, --top and --by; without WEFT_HOST it is done here"
            )
        number = self._number(node)
        data = self.client.export(self.id, format, scope=scope, node=number, **options)
        write(path, data)

    def search(self, strategy: Strategy, options: dict[str, Any]) -> SearchResult:
        """Search from the prompt on; where that is refused, the loom goes."""
        from ..search import SearchResult
        from ..search.core import Cost, Vote

        assert self._model_handle is not None
        began = time.monotonic()
        try:
            job = self.client.begin_search(self.id, strategy=strategy.name, **options)
        except WeftError:
            self.discard()
            raise
        try:
            ended = self.client.wait(job.job)
        except KeyboardInterrupt:
            self.client.cancel(job.job)
            self._again()
            raise
        self._model_handle.count(ended.usage, time.monotonic() - began)
        self._again()
        told = ended.result or {}
        best = self.by_number.get(told.get("best", 0), self.loom)
        votes = tuple(Vote(each["answer"], (best,) * each["count"], 0.0) for each in told["votes"])
        return SearchResult(
            best, told["text"], self.loom, Cost(**told["cost"]), told["solved"], votes
        )

    # Keeping: the server does

    def save(self) -> None:
        """Nothing is left to be kept but where one stands."""
        self.note()

    def discard(self) -> None:
        """Forget a loom of which nothing came, or that was not to be kept."""
        with suppress(WeftError):
            self.client.remove_loom(self.id, purge=True)
        self.name = ""

    def note(self) -> None:
        """Remember that this is the loom drawn last in this terminal, and where one stands."""
        if self.name and (mark := terminal()):
            self.client.note_drawn(mark, self.id, self._number(self.at))

    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Take nodes away, with all below them."""
        first, *rest = map(self._number, nodes)
        self.client.remove(self.id, first, also=rest)
        for node in nodes:
            node.remove()

    def undo(self) -> UndoResult:
        """Undo the last change of this loom that is not undone."""
        return self._turned("done", self.client.undo)

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        return self._turned("undone", self.client.redo)

    def _turned(self, state: str, turn: Callable[[str], Any]) -> UndoResult:
        operations = [each for each in self.client.history(self.id).data if each.state == state]
        which = operations[0 if state == "done" else -1] if operations else None
        try:
            changed = turn(self.id)
        except WeftError as error:
            raise StoreError(str(error), hint=error.hint) from error
        self._again()
        return UndoResult(
            changed.kind if which is None else which.kind,
            [self.by_number[each.node] for each in changed.added],
            [self.by_number[each.node] for each in changed.changed],
            changed.removed,
        )


def _row(told: LoomObject) -> LoomSummary:
    changed = datetime.fromisoformat(told.changed).timestamp() if told.changed else 0.0
    return LoomSummary(
        told.id,
        told.name,
        told.model,
        told.engine,
        told.prompt,
        told.created,
        changed,
        told.n_nodes,
        told.rev,
    )


def _is_same(model: ModelObject, source: str) -> bool:
    """Whether a model is the one that a command means."""
    if source in (model.id, model.source):
        return True
    folder = Path(source)
    return folder.is_dir() and str(folder.resolve()) == model.source


def _fields(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as a request has them."""
    fields = {name: value for name, value in sampling.items() if value is not None}
    constraint = fields.pop("constraint", None)
    if constraint is not None:
        told = dict(constraint.to_dict())
        if "choice" in told:
            told["choices"] = told.pop("choice")
        fields |= told
    if "stop" in fields and not isinstance(fields["stop"], str):
        fields["stop"] = list(fields["stop"])
    if not fields.get("stop", True):
        del fields["stop"]
    if bias := fields.pop("logit_bias", None):
        fields["logit_bias"] = {str(token): value for token, value in dict(bias).items()}
    return {name: value for name, value in fields.items() if name in SamplingFields.model_fields}
