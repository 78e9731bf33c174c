"""The backend that uses a server: its looms, its models, and its KV cache."""

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
    Cancelled,
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
    from ..constraints import Constraint
    from ..lm.results import Delta, Distribution
    from ..lm.stats import Stats
    from ..loom import Heddle, Loom
    from ..loom.author_note import AuthorNote
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
    """Looms and models of a server.

    Args:
        client: the client of this server. `close` closes its connections.
        local: a local backend for the same looms. It is used for models that the server has not
            loaded. None for a server that the user named with WEFT_HOST.
    """

    def __init__(self, client: Client, local: Backend | None = None) -> None:
        self.client = client
        self.local = local

    def close(self) -> None:
        """Close the connections to the server, and the local backend."""
        self.client.close()
        if self.local is not None:
            self.local.close()

    @property
    def home(self) -> Backend:
        """The local backend for the same looms, if there is one; else this backend."""
        return self if self.local is None else self.local

    def where(self) -> str:
        """Return the server's URL."""
        return self.client.connection.base

    def summaries(self, limit: int | None = None) -> list[LoomSummary]:
        """Return summaries of the saved looms, the one changed last first.

        limit: maximum number of looms; None means all.
        """
        summaries: list[LoomSummary] = []
        after = None
        while True:
            left = _PAGE if limit is None else min(_PAGE, limit - len(summaries))
            page = self.client.looms(limit=left, after=after)
            summaries += map(_summary, page.data)
            after = page.next
            if after is None or len(summaries) == limit:
                return summaries

    def summary(self, name: str) -> LoomSummary:
        """Return the summary of one loom. Raises: ConfigError if there is none."""
        try:
            return _summary(self.client.loom(name))
        except NotFound as error:
            if error.what != "loom":
                raise
            raise ConfigError(str(error), hint=error.hint) from error

    def last_loom(self) -> str | None:
        """Return the name of the loom last used in this terminal; None if there is none."""
        terminal_id = terminal()
        return self.client.drawn_last(terminal_id).loom if terminal_id else None

    def try_last_loom_anywhere(self) -> str | None:
        """Return the loom last used in any terminal, else the loom changed last.

        Returns None if there is no loom.
        """
        return self.client.drawn_last(terminal() or "-").anybodys

    def open(self, name: str) -> ServerLoomSession:
        """Open a loom without a model: it can be read and edited, but not grown."""
        return self._session(name, None)

    def _session(self, name: str, model_handle: ServerModel | None) -> ServerLoomSession:
        """Open a loom.

        The session's current node is the node last shown in this terminal, if it is in this loom,
        else the root.

        Args:
            name: the loom.
            model_handle: the model that grows the loom. None opens it without a model.
        """
        session = ServerLoomSession(self, self.client.loom(name), model_handle)
        terminal_id = terminal()
        if terminal_id:
            state = self.client.drawn_last(terminal_id)
            if state.loom == session.name:
                session.at = session.by_number.get(state.node, session.loom)
        return session

    @contextmanager
    def open_with_model(
        self, name: str, model: str | None, engine: str, kv_budget: str
    ) -> Iterator[LoomSession]:
        """Open a loom together with a model that can grow it.

        The model is the server's if the server has loaded it. Otherwise the local backend opens
        the loom with it. Without a local backend, the server loads it now.

        Args:
            name: the loom.
            model: the model to use; None means the model that grew the loom.
            engine: name of the engine; "auto" accepts every engine.
            kv_budget: memory for KV, such as "4GiB"; "auto" leaves it to the engine.
        """
        summary = self.summary(name)
        check_has_tokens(summary)
        loaded = self._model(model or summary.model, engine, kv_budget)
        if loaded is None and self.local is not None:
            with self.local.open_with_model(name, model, engine, kv_budget) as session:
                yield session
            return
        if loaded is None:
            loaded = self._load(model or summary.model, engine, kv_budget)
        yield self._session(name, ServerModel(self, loaded))

    @contextmanager
    def model(self, model: str | None, engine: str, kv_budget: str) -> Iterator[ModelHandle]:
        """Provide a model for new looms.

        The model is the server's if the server has loaded it. Otherwise the local backend loads
        it. Without a local backend, the server loads it now.

        Args:
            model: the model; None means the server's default model, else TINY.
            engine: name of the engine; "auto" accepts every engine.
            kv_budget: memory for KV, such as "4GiB"; "auto" leaves it to the engine.
        """
        loaded = self._model(model, engine, kv_budget)
        if loaded is None and self.local is not None:
            with self.local.model(model, engine, kv_budget) as model_handle:
                yield model_handle
            return
        if loaded is None:
            loaded = self._load(model or TINY, engine, kv_budget)
        yield ServerModel(self, loaded)

    def _model(self, source: str | None, engine: str, kv_budget: str) -> ModelObject | None:
        """Return the requested model if the server has loaded it with these options, else None.

        source: the model; None means the server's default model.
        Raises: ConfigError if there is no local backend and the server has loaded the model with
        another engine, or if `kv_budget` is not "auto".
        """
        for model in self.client.models().data:
            matches = model.is_default if source is None else _has_source(model, source)
            if matches and model.state == "ready":
                if engine in ("auto", model.engine) and kv_budget == "auto":
                    return model
                if self.local is None:
                    raise ConfigError(
                        f"the server runs {model.id} with its own engine and KV budget; "
                        "leave out --engine and --kv-budget",
                        hint="weft serve accepts both",
                    )
        return None

    def _load(self, source: str, engine: str, kv_budget: str) -> ModelObject:
        """Load a model on the server, wait until it is loaded, and return its description.

        Args:
            source: the model as -m takes it.
            engine: name of the engine; "auto" leaves the choice to the server.
            kv_budget: memory for KV, such as "4GiB"; "auto" leaves it to the server.

        Raises: ModelLoadError if the server cannot load it.
        """
        options = {} if engine == "auto" else {"engine": engine}
        if kv_budget != "auto":
            options["kv_budget"] = kv_budget
        job = self.client.load_model(source, **options)
        result = self.client.wait(job.job)
        if result.model is None:
            raise ModelLoadError(f"{self.where()} has not loaded {source}")
        return self.client.model(result.model)

    def import_file(
        self, file: Path, *, format: str, name: str | None, model: str | None, engine: str
    ) -> ImportResult:
        """Import the looms of a file; see `Backend.import_file`."""
        from ..service.interchange.writing_programs import is_text_name

        if model is not None:
            loaded = self._model(model, engine, "auto")
            if loaded is None and self.local is not None:
                return self.local.import_file(
                    file, format=format, name=name, model=model, engine=engine
                )
            model = (loaded or self._load(model, engine, "auto")).id
        if format == "auto" and is_text_name(file.name):
            format = "text"
        try:
            report = self.client.import_looms(read(file), format=format, model=model, name=name)
        except FormatError as error:
            raise FormatError(f"{file}: {error}", hint=error.hint) from error
        names = [loom.name for loom in report.looms]
        return ImportResult(names, report.recognised_as, report.nodes, report.dropped)

    def page(self) -> str | None:
        """Return the URL of the server's web page; "" if the server has no page."""
        try:
            self.client.call(ApiCall("GET", "/", bool, is_json=False))
        except NotFound:
            return ""
        return f"{self.where()}/"

    def find(self, words: str, loom: str | None, limit: int) -> list[Hit]:
        """Return nodes that contain these words, the best match first.

        loom: search only this loom; None searches all.
        """
        from ..service.store import Hit

        hits = self.client.find(words, loom=loom, limit=limit).data
        return [Hit(hit.name, hit.loom, hit.node, "", hit.text, hit.spans, 0.0) for hit in hits]

    def remove(self, names: Sequence[str]) -> None:
        """Remove looms. `restore` brings them back."""
        for name in names:
            self.client.remove_loom(name)

    def restore(self, loom: str | None) -> list[tuple[str, str]]:
        """Restore what was removed last; see `Backend.restore`."""
        if loom is not None:
            restored = self.client.restore_looms(
                nodes_of=self.find_or_import(loom), only_nodes=True
            )
        else:
            restored = self.client.restore_looms(nodes_of=self.last_loom())
        return list(zip(restored.names, (loom.name for loom in restored.data), strict=True))


class ServerModel:
    """A model of a server, as a `ModelHandle`.

    Its statistics count only the tokens and seconds of this command.
    """

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
        """Return statistics: tokens of this command, and KV of the model for all clients.

        Fields that a server does not report are 0.
        """
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
        """Add a finished job to the statistics.

        Args:
            usage: tokens of the job; None if the server did not report them.
            seconds: duration of the job, measured by this client.
        """
        self.seconds += seconds
        if usage is None:
            return
        has_cached = usage.cached_tokens is not None and self.usage.cached_tokens is not None
        previous = self.usage.cached_tokens if self.usage.prompt_tokens else 0
        self.usage = TokenUsage(
            prompt_tokens=self.usage.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens + usage.completion_tokens,
            cached_tokens=(previous or 0) + (usage.cached_tokens or 0)
            if has_cached or not self.usage.prompt_tokens and usage.cached_tokens is not None
            else None,
        )

    def is_stop_token(self, token_id: int) -> bool:
        """Return True for every token: the client does not know the server's stop tokens."""
        return True

    def template_hint(self, otherwise: str) -> str:
        """Return `otherwise`: a server's model has no further hint."""
        return otherwise

    def create_loom(
        self, text: str, *, chat: bool | None, system: str | None, special: bool, keep: bool = True
    ) -> ServerLoomSession:
        """Create the loom of a prompt on the server; see `ModelHandle.create_loom`.

        The server saves every loom. With `keep=False` the caller deletes it with `discard`.
        """
        if chat or (chat is None and self.has_template):
            check_not_special(special)
        fields: dict[str, Any] = {"model": self.id, "system": system}
        if chat and text:
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields |= {"prompt": text, "template": chat is None, "special": special or None}
        loom = self.backend.client.create_loom(**fields)
        return ServerLoomSession(self.backend, loom, self, is_persistent=keep)

    def search(
        self,
        session: LoomSession,
        strategy: Strategy,
        options: dict[str, Any],
        progress: Callable[[Level], object],
    ) -> SearchResult:
        """Search on the server; see `ModelHandle.search`. `progress` is not called."""
        assert isinstance(session, ServerLoomSession)
        return session.search(strategy, options)


class ServerLoomSession(LoomSession):
    """A copy of a server's loom. Changes are sent to the server, then the copy is updated.

    Args:
        backend: the server.
        loom: the server's description of the loom, without its nodes.
        model_handle: the model that grows the loom. None opens it without a model.
        is_persistent: False for a loom that the command deletes at its end.
    """

    def __init__(
        self,
        backend: ServerBackend,
        loom: LoomObject,
        model_handle: ServerModel | None,
        *,
        is_persistent: bool = True,
    ) -> None:
        self.backend = backend
        self.client = backend.client
        self.id = loom.id
        self.is_persistent = is_persistent
        self._model = str((loom.meta or {}).get("model") or loom.model)
        self.by_number: dict[int, Heddle] = {}
        self._numbers: dict[str, int] = {}
        super().__init__(self._read(loom), loom.name if is_persistent else "", model_handle)
        self._model_handle = model_handle

    @property
    def model(self) -> str:
        """The model that grows the loom, as -m takes it."""
        return self._model

    # Reading

    def _read(self, data: LoomObject) -> Loom:
        """Read all nodes of the server's loom, and return the copy."""
        from ..loom import Loom
        from ..loom.loom import Prompt
        from ..loom.node import new_child
        from ..service.store.file import ModelIdentity, bare_loom

        identity = ModelIdentity(data.model, "", 0)
        prompt = Prompt([], data.prompt, bool(data.chat_template_used))
        loom = bare_loom(identity, prompt, data.created, None, None, Loom, ChatNode)
        for record in self._nodes():
            if record.parent is None:
                self._fill(loom, record)
                continue
            parent = self.by_number[record.parent]
            node = new_child(parent)
            self._fill(node, record)
            parent.children.append(node)
        return loom

    def _nodes(self, **which: Any) -> Iterator[NodeObject]:
        """Yield nodes of the server's loom, page by page. which: arguments of `Client.nodes`."""
        after = None
        while True:
            page = self.client.nodes(self.id, fields=_ALL_FIELDS, limit=_PAGE, after=after, **which)
            yield from page.data
            if (after := page.next) is None:
                return

    def _fill(self, node: Heddle, data: NodeObject) -> None:
        """Set a node's values from the server's."""
        from .._core.sampling.params import SamplingParams
        from ..loom.node import set_text, set_tokens

        set_tokens(node, data.token_ids or [])
        set_text(node, data.text)
        node.id = data.id
        node.logprobs = [parse_number(value, "a logprob") for value in data.logprobs or ()]
        node.entropies = [parse_number(value, "an entropy") for value in data.entropies or ()]
        legal = data.legal_logmass or ()
        node.legal_logmass = [parse_number(value, "a legal_logmass") for value in legal]
        node.params = None if data.params is None else SamplingParams.from_dict(data.params)
        node.finish_reason = data.finish_reason  # type: ignore[assignment]
        node.stop_string, node.terminal = data.stop_string, data.ended
        node.score = None if data.score is None else parse_number(data.score, "a score")
        node.meta = dict(data.meta or {})
        self.by_number[data.node] = node
        self._numbers[data.id] = data.node

    def _reload(self) -> None:
        """Read the loom from the server, and replace the copy.

        If the current node was removed, its nearest remaining ancestor becomes the current node.
        """
        path = [self._numbers[node.id] for node in self.at.path]
        self.by_number = {}
        self.loom = self._read(self.client.loom(self.id))
        self.at = next(self.by_number[each] for each in reversed(path) if each in self.by_number)

    def numbers(self) -> Mapping[str, int]:
        """Return node numbers by node id, also of removed nodes."""
        return self._numbers

    def _number(self, node: Heddle) -> int:
        """Return a node's number on the server."""
        return self._numbers[node.id]

    # Growing

    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Start a job on the server that generates n branches; see `LoomSession.grow`."""
        options = _fields(sampling)
        assert self._model_handle is not None
        job = self.client.begin(
            self.id, self._number(node), n=n, force=force, model=self._model_handle.id, **options
        )
        branches: list[Heddle] = []
        length = sum(len(each.tokens) for each in node.path)
        return GenerationStream(
            job.branches[0].node,
            self._follow(node, job, branches),
            lambda: branches,
            lambda: f"reading {counted(length, 'token')} …",
        )

    def _follow(
        self, parent: Heddle, job: JobReply, branches: list[Heddle]
    ) -> Generator[Delta, None, None]:
        """Yield a job's deltas, and add the finished branches to the copy and to `branches`."""
        from ..lm.results import Delta
        from ..loom.node import new_child
        from ..service.client.growth import GrowthReader

        start = time.monotonic()
        reader = GrowthReader(job)
        nodes = {branch.branch: new_child(parent) for branch in job.branches}
        is_complete = False
        try:
            for name, data in self.client.events(job.job):
                for event in reader.take(name, data):
                    yield Delta(
                        event.branch,
                        nodes[event.branch],
                        event.token_ids,
                        event.text,
                        event.logprobs,
                        event.finish_reason,  # type: ignore[arg-type]
                    )
        except (GeneratorExit, KeyboardInterrupt):
            self.client.cancel(job.job)
            for name, data in self.client.events(job.job):
                reader.take(name, data)
            raise
        else:
            is_complete = True
        finally:
            self._read_branches(parent, job, branches, ignores_errors=not is_complete)
            assert self._model_handle is not None
            self._model_handle.count(reader.usage, time.monotonic() - start)

    def _read_branches(
        self, parent: Heddle, job: JobReply, branches: list[Heddle], *, ignores_errors: bool
    ) -> None:
        """Read a job's finished branches from the server, and add them to the copy.

        Args:
            parent: the node at which the branches grew.
            job: the job that generated them.
            branches: the list to which the new nodes are appended.
            ignores_errors: return without branches if the server cannot be read. Used while
                another error is being raised.
        """
        from ..loom.node import new_child

        branch_of = {branch.node: branch.branch for branch in job.branches}
        try:
            records = list(self._nodes(under=self._number(parent), depth=1))
        except WeftError:
            if not ignores_errors:
                raise
            return
        for record in records:
            if record.node in branch_of and record.node not in self.by_number:
                node = new_child(parent)
                self._fill(node, record)
                node.lineage = (branch_of[record.node],)
                parent.children.append(node)
                branches.append(node)

    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add a text of the user below a node; see `LoomSession.add_user_text`.

        The server saves it at once.
        """
        if not text:
            raise ConfigError("the text is empty")
        is_turn = self.loom.chat_template_used if chat is None else chat
        if is_turn:
            check_not_special(special)
            if not self.model_handle.has_template:
                raise ConfigError(
                    "this model has no chat template: it continues text and does not answer",
                    hint=self.model_handle.template_hint("--raw adds the text as it is"),
                )
        fields = {"message": text} if is_turn else {"text": text, "special": special or None}
        change = self.client.add(self.id, self._number(node), **fields)
        return self._add(node, change.added[0].node)

    def _add(self, parent: Heddle, number: int) -> Heddle:
        """Read one node from the server and add it to the copy."""
        from ..loom.node import new_child

        node = new_child(parent)
        self._fill(node, self.client.node(self.id, number, fields=_ALL_FIELDS))
        parent.children.append(node)
        return node

    def set_note(self, note: AuthorNote | None) -> None:
        """Set the author's note of the loom; None removes the note."""
        self.loom.note = note
        self.client.edit_loom(self.id, meta=self.loom.meta)

    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the `top` likeliest next tokens at a node."""
        from ..lm.results import Distribution, TokenProb

        candidates = self.client.next_tokens(self.id, self._number(node), top=top).next
        return Distribution(
            TokenProb(
                each.id,
                each.text,
                bytes(each.bytes),
                parse_number(each.logprob, "a logprob"),
                each.p,
                each.rank,
            )
            for each in candidates
        )

    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each token of a node; see `LoomSession.pieces`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = self.client.tokens(self.id, self._number(node)).data
        last = len(tokens) - 1
        return [decoder.decode(bytes(token.bytes), i == last) for i, token in enumerate(tokens)]

    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Export a part of the loom on the server, and write it to a file.

        See `LoomSession.export`. Raises: Unsupported for `kv` and for options other than `tint`.
        """
        options = {name: value for name, value in options.items() if value}
        if kv or not options.keys() <= {"tint"}:
            raise Unsupported(
                "--kv, --top and --by cannot be used with a server; unset WEFT_HOST for them"
            )
        number = self._number(node)
        data = self.client.export(self.id, format, scope=scope, node=number, **options)
        write(path, data)

    def search(self, strategy: Strategy, options: dict[str, Any]) -> SearchResult:
        """Search from the prompt of this new loom; if the search cannot start, the loom is deleted.

        options: the strategy's options that were given, by their Python names.
        """
        from ..search import AnswerGroup, SearchResult
        from ..search.core import Cost, Vote

        assert self._model_handle is not None
        start = time.monotonic()
        try:
            job = self.client.begin_search(self.id, strategy=strategy.name, **options)
        except WeftError:
            self.discard()
            raise
        try:
            finished = self.client.wait(job.job)
        except KeyboardInterrupt:
            self.client.cancel(job.job)
            self._reload()
            raise
        self._model_handle.count(finished.usage, time.monotonic() - start)
        self._reload()
        result = finished.result
        if result is None:
            raise Cancelled("the search was cancelled before it had a result")
        best = self.by_number.get(result["best"], self.loom)
        votes = tuple(
            Vote(vote["answer"], (best,) * vote["count"], 0.0) for vote in result["votes"]
        )
        groups = []
        for record in result["answers"]:
            nodes = tuple(self.by_number.get(number, self.loom) for number in record["nodes"])
            score = None if record["score"] is None else parse_number(record["score"], "a score")
            values = (record["share"], score, record["mean_logprob"], record["solved"])
            groups.append(AnswerGroup(record["answer"], nodes, *values))
        return SearchResult(
            best,
            result["text"],
            self.loom,
            Cost(**result["cost"]),
            result["solved"],
            votes,
            answer=result["answer"] or None,
            answers=tuple(groups),
            measure=result["measure"],
            reason=result["reason"],
        )

    # Saving: the server saves the loom

    def save(self) -> None:
        """Store the current node of this terminal. The server has saved all other changes."""
        self.remember()

    def discard(self) -> None:
        """Delete the loom from the server, without a way to restore it; ignore errors."""
        with suppress(WeftError):
            self.client.remove_loom(self.id, purge=True)
        self.name = ""

    def remember(self) -> None:
        """Store this loom and its current node as the last ones of this terminal."""
        if self.name and (terminal_id := terminal()):
            self.client.note_drawn(terminal_id, self.id, self._number(self.at))

    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Remove nodes, with all nodes below them. `undo` brings them back."""
        first, *rest = map(self._number, nodes)
        self.client.remove(self.id, first, also=rest)
        for node in nodes:
            node.remove()

    def undo(self) -> UndoResult:
        """Undo the last operation that is not undone yet."""
        return self._undo_or_redo("done", self.client.undo)

    def redo(self) -> UndoResult:
        """Redo the operation that was undone last."""
        return self._undo_or_redo("undone", self.client.redo)

    def _undo_or_redo(self, state: str, operation: Callable[[str], Any]) -> UndoResult:
        """Run an undo or redo on the server, read the loom again, and return what changed.

        Args:
            state: "done" for an undo, "undone" for a redo. The newest done or the oldest undone
                operation of the server's history names the kind of the result.
            operation: the client's method.
        """
        operations = [each for each in self.client.history(self.id).data if each.state == state]
        logged = operations[0 if state == "done" else -1] if operations else None
        try:
            change = operation(self.id)
        except WeftError as error:
            raise StoreError(str(error), hint=error.hint) from error
        self._reload()
        return UndoResult(
            change.kind if logged is None else logged.kind,
            [self.by_number[node.node] for node in change.added],
            [self.by_number[node.node] for node in change.changed],
            change.removed,
        )


def _summary(loom: LoomObject) -> LoomSummary:
    """Convert the server's description of a loom to a LoomSummary."""
    changed = datetime.fromisoformat(loom.changed).timestamp() if loom.changed else 0.0
    return LoomSummary(
        loom.id,
        loom.name,
        loom.model,
        loom.engine,
        loom.prompt,
        loom.created,
        changed,
        loom.n_nodes,
        loom.rev,
        title=loom.title,
    )


def _has_source(model: ModelObject, source: str) -> bool:
    """Return True if `source` names this model by id, source or folder."""
    if source in (model.id, model.source):
        return True
    folder = Path(source)
    return folder.is_dir() and str(folder.resolve()) == model.source


def _fields(sampling: dict[str, Any]) -> dict[str, Any]:
    """Convert sampling parameters to the fields of a request.

    Parameters that are None, or that the API does not have, are left out.
    """
    fields = {name: value for name, value in sampling.items() if value is not None}
    constraint = fields.pop("constraint", None)
    limits = {} if constraint is None else _constraint_fields(constraint)
    fields |= limits
    if "stop" in fields and not isinstance(fields["stop"], str):
        fields["stop"] = list(fields["stop"])
    if not fields.get("stop", True):
        del fields["stop"]
    if bias := fields.pop("logit_bias", None):
        fields["logit_bias"] = {str(token): value for token, value in dict(bias).items()}
    names = {*SamplingFields.model_fields, *limits}
    return {name: value for name, value in fields.items() if name in names}


def _constraint_fields(constraint: Constraint) -> dict[str, Any]:
    """Convert a constraint of the command line to the fields of a request."""
    from ..constraints import TokenLimits

    fields: dict[str, Any] = {}
    inner: Constraint | None = constraint
    if isinstance(constraint, TokenLimits):
        limits = {
            "min_tokens": constraint.min_tokens,
            "bad_words": list(constraint.bad_words),
            "allowed_token_ids": sorted(constraint.allowed or ()),
            "stop_token_ids": sorted(constraint.stop_ids),
        }
        fields = {name: value for name, value in limits.items() if value}
        inner = constraint.inner
    if inner is not None:
        fields |= inner.to_dict()
    if "choice" in fields:
        fields["choices"] = fields.pop("choice")
    return fields
