"""All that the native API is asked, one function a request: both clients have them as methods.

A loom is named by its name or its id, a node by its number or its id. Options that are not listed
are the fields of the request that is named, checked before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from ...errors import ConfigError
from ..api import jobs as _jobs
from ..api import looms as _looms
from ..api import models as _models
from ..api import nodes as _nodes
from ..api import terminals as _terminals
from ..api.base import RequestModel, ResponseModel
from .call import ApiCall, given

Answer = TypeVar("Answer", bound=ResponseModel)
Request = TypeVar("Request", bound=RequestModel)
Node = int | str
_ROOT = "/api/v1"


# The server and its models


def server() -> ApiCall[_models.ServerObject]:
    """Return what the server is, can do, and takes."""
    return _get("/server", _models.ServerObject)


def models() -> ApiCall[_models.ModelList]:
    """Return the models on the server's shelf."""
    return _get("/models", _models.ModelList)


def model(id: str) -> ApiCall[_models.ModelObject]:
    """Return one model."""
    return _get(f"/models/{quote(id)}", _models.ModelObject)


def load_model(source: str, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Load a model, as a job. options: of `LoadModel`; with wait=True it answers when that ends."""
    return _post("/models", _made(_models.LoadModel, source=source, **options), _jobs.JobReply)


def unload_model(id: str, *, force: bool = False) -> ApiCall[_models.ModelList]:
    """Close a model. force: also while jobs use it; they fail."""
    return _delete(f"/models/{quote(id)}", _models.ModelList, force=force or None)


def tokenize(text: str, **options: Any) -> ApiCall[_models.TokenizeReply]:
    """Return the tokens of a text. options: of `TokenizeText`."""
    return _post(
        "/tokenize", _made(_models.TokenizeText, text=text, **options), _models.TokenizeReply
    )


def detokenize(token_ids: Sequence[int], **options: Any) -> ApiCall[_models.DetokenizeReply]:
    """Return the text of tokens. options: of `DetokenizeIds`."""
    asked = _made(_models.DetokenizeIds, token_ids=list(token_ids), **options)
    return _post("/detokenize", asked, _models.DetokenizeReply)


def apply_template(
    messages: Sequence[dict[str, Any]], **options: Any
) -> ApiCall[_models.ApplyTemplateReply]:
    """Return the prompt of a chat. options: of `ApplyTemplate`."""
    asked = _made(_models.ApplyTemplate, messages=list(messages), **options)
    return _post("/apply_template", asked, _models.ApplyTemplateReply)


def kv(*, looms: bool = False) -> ApiCall[_models.KvList]:
    """Return what the KV of each model takes, and what sharing it has saved. looms: and of each
    loom that is open.
    """
    return _get("/kv", _models.KvList, looms=looms or None)


def strategies() -> ApiCall[_jobs.StrategyList]:
    """Return the ways to search."""
    return _get("/strategies", _jobs.StrategyList)


# Looms


def looms(
    *, search: str | None = None, limit: int = 50, after: str | None = None
) -> ApiCall[_looms.LoomPage]:
    """Return a page of looms, the one changed last first. after: `next` of the page before."""
    return _get("/looms", _looms.LoomPage, search=search, limit=limit, after=after)


def create_loom(prompt: str | None = None, **options: Any) -> ApiCall[_looms.LoomObject]:
    """Make a loom. options: of `CreateLoom`: model, messages, token_ids, system, name, …"""
    return _post("/looms", _made(_looms.CreateLoom, prompt=prompt, **options), _looms.LoomObject)


def loom(loom: str) -> ApiCall[_looms.LoomObject]:
    """Return one loom."""
    return _get(_loom(loom), _looms.LoomObject)


def edit_loom(loom: str, **changes: Any) -> ApiCall[_looms.LoomObject]:
    """Rename a loom, or change its notes. changes: of `EditLoom`."""
    return _patch(_loom(loom), _made(_looms.EditLoom, **changes), _looms.LoomObject)


def remove_loom(loom: str, *, purge: bool = False) -> ApiCall[_looms.LoomObject]:
    """Take a loom away. `restore_looms` brings it back, unless it is purged."""
    return _delete(_loom(loom), _looms.LoomObject, purge=purge or None)


def restore_looms(
    *, nodes_of: str | None = None, only_nodes: bool = False
) -> ApiCall[_looms.RestoredLooms]:
    """Bring back what was removed last: looms, or nodes of the loom that is named."""
    asked = {"nodes_of": nodes_of, "only_nodes": only_nodes or None}
    return _post("/looms/restore", None, _looms.RestoredLooms, **asked)


def undo(loom: str) -> ApiCall[_nodes.Changed]:
    """Take back a loom's last operation."""
    return _post(f"{_loom(loom)}/undo", None, _nodes.Changed)


def redo(loom: str) -> ApiCall[_nodes.Changed]:
    """Do again what was undone last."""
    return _post(f"{_loom(loom)}/redo", None, _nodes.Changed)


def history(loom: str, *, limit: int = 50) -> ApiCall[_looms.OperationList]:
    """Return a loom's operations, the last one first."""
    return _get(f"{_loom(loom)}/history", _looms.OperationList, limit=limit)


def search_loom(
    loom: str,
    text: str = "",
    *,
    regex: bool = False,
    case: bool = False,
    filter: Iterable[str] = (),
    limit: int = 200,
) -> ApiCall[_looms.HitList]:
    """Return the nodes of a loom whose text has this. filter: "bookmarked", "model", "leaf", …"""
    asked = {"regex": regex or None, "case": case or None, "filter": list(filter) or None}
    return _get(f"{_loom(loom)}/search", _looms.HitList, q=text, limit=limit, **asked)


def find(words: str, *, loom: str | None = None, limit: int = 50) -> ApiCall[_looms.HitList]:
    """Return the nodes, of all looms, that have these words. loom: of this one only."""
    return _get("/search", _looms.HitList, q=words, loom=loom, limit=limit)


def export(
    loom: str, format: str = "json", *, scope: str | None = None, node: Node = 0, **options: Any
) -> ApiCall[bytes]:
    """Return a loom, or a part of it, as a file of a format. scope: "path", "subtree", "tree".

    options: those of the format that the route takes.
    """
    asked = {"format": format, "scope": scope, "node": node, **options}
    return ApiCall("GET", f"{_ROOT}{_loom(loom)}/export", bytes, asked, is_json=False)


def import_looms(
    data: bytes, *, format: str = "auto", model: str | None = None, name: str | None = None
) -> ApiCall[_looms.Imported]:
    """Take in what a file of Weft's or of another program holds. model: whose tokens texts get."""
    asked = {"format": format, "model": model, "name": name}
    read = _looms.Imported.model_validate
    return ApiCall("POST", f"{_ROOT}/import", read, asked, body=data)


# Terminals


def drawn_last(mark: str) -> ApiCall[_terminals.LastLoom]:
    """Return which loom was drawn last in a terminal."""
    return _get(f"/terminals/{_part(mark)}", _terminals.LastLoom)


def note_drawn(mark: str, loom: str, node: int = 0) -> ApiCall[_terminals.LastLoom]:
    """Remember that a loom was drawn in a terminal."""
    asked = _made(_terminals.SetLastLoom, loom=loom, node=node)
    body, read = _body(asked), _terminals.LastLoom.model_validate
    return ApiCall("PUT", f"{_ROOT}/terminals/{_part(mark)}", read, body=body)


# Nodes


def nodes(
    loom: str,
    *,
    under: Node = 0,
    depth: int | None = None,
    fields: Iterable[str] = (),
    since: int | None = None,
    limit: int = 200,
    after: str | None = None,
    nodes: Iterable[int] | None = None,
) -> ApiCall[_nodes.NodePage]:
    """Return a page of a loom's nodes, parents first. fields: "tokens", "meta", "params", "kv".

    nodes: numbers, at most 200; only those of them that are there are told.
    """
    asked = {"depth": depth, "fields": list(fields) or None, "since": since, "after": after}
    only = None if nodes is None else list(nodes)
    what = f"{_loom(loom)}/nodes"
    return _get(what, _nodes.NodePage, under=under, limit=limit, nodes=only, **asked)


def tree(
    loom: str, *, under: Node = 0, depth: int | None = None, fields: Iterable[str] = ()
) -> ApiCall[_looms.LoomTree]:
    """Return a small tree, nested."""
    asked = {"depth": depth, "fields": list(fields) or None}
    return _get(f"{_loom(loom)}/tree", _looms.LoomTree, under=under, **asked)


def node(loom: str, node: Node, *, fields: Iterable[str] = ()) -> ApiCall[_nodes.NodeObject]:
    """Return one node."""
    return _get(_node(loom, node), _nodes.NodeObject, fields=list(fields) or None)


def path(
    loom: str, node: Node, how: str = "text", *, below_root: bool = False
) -> ApiCall[_nodes.PathReply]:
    """Return what leads to a node. how: "text", "tokens", "messages" or "nodes"."""
    asked = {"as": how, "below_root": below_root or None}
    return _get(f"{_node(loom, node)}/path", _nodes.PathReply, **asked)


def tokens(loom: str, node: Node, *, top: int | None = None) -> ApiCall[_nodes.TokenList]:
    """Return a node's tokens with their figures. top: alternatives for each; asks the model."""
    return _get(f"{_node(loom, node)}/tokens", _nodes.TokenList, top=top)


def add(loom: str, parent: Node = 0, **options: Any) -> ApiCall[_nodes.Changed]:
    """Add text that somebody wrote. options: of `AddNode`: text, texts, token_ids, message, …"""
    asked = _made(_nodes.AddNode, parent=parent, **options)
    return _post(f"{_loom(loom)}/nodes", asked, _nodes.Changed)


def edit(
    loom: str, node: Node, *, rev: int | None = None, **changes: Any
) -> ApiCall[_nodes.Changed]:
    """Change a node. changes: of `EditNode`. rev: of the loom as you saw it; Conflict if newer."""
    return _patch(_node(loom, node), _made(_nodes.EditNode, **changes), _nodes.Changed, rev=rev)


def remove(
    loom: str,
    node: Node,
    *,
    what: str | None = None,
    also: Iterable[Node] = (),
    rev: int | None = None,
) -> ApiCall[_nodes.Changed]:
    """Remove a node with all below it. what: "children", "siblings" or "others" instead.

    also: more nodes, in the same operation.
    """
    return _delete(_node(loom, node), _nodes.Changed, rev=rev, what=what, also=list(also) or None)


def fork(loom: str, node: Node, at_token: int, **options: Any) -> ApiCall[_nodes.Changed]:
    """Make a sibling that shares a node's first tokens. options: of `ForkNode`."""
    asked = _made(_nodes.ForkNode, at_token=at_token, **options)
    return _post(f"{_node(loom, node)}/fork", asked, _nodes.Changed)


def split(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Cut a node in two. options: of `SplitNode`."""
    asked = _made(_nodes.SplitNode, **options)
    return _post(f"{_node(loom, node)}/split", asked, _nodes.Changed)


def merge(loom: str, node: Node) -> ApiCall[_nodes.Changed]:
    """Join a node with its parent, whose only child it is."""
    return _post(f"{_node(loom, node)}/merge", None, _nodes.Changed)


def clip(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Keep a node's first tokens. options: of `ClipNode`."""
    return _post(f"{_node(loom, node)}/clip", _made(_nodes.ClipNode, **options), _nodes.Changed)


def move(loom: str, node: Node, parent: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Put a node elsewhere. options: of `MoveNode`."""
    asked = _made(_nodes.MoveNode, parent=parent, **options)
    return _post(f"{_node(loom, node)}/move", asked, _nodes.Changed)


def loom_kv(loom: str) -> ApiCall[_models.LoomKv]:
    """Return how much of a loom has its KV, and what that takes."""
    return _get(f"{_loom(loom)}/kv", _models.LoomKv)


def forget_kv(loom: str, *, keep: Node | None = None) -> ApiCall[_models.LoomKv]:
    """Forget the KV of a loom, but for the path to `keep`, what is pinned and what grows."""
    return _post(f"{_loom(loom)}/kv", _made(_nodes.ForgetKv, keep=keep), _models.LoomKv)


def handle_kv(loom: str, node: Node, op: str) -> ApiCall[_nodes.NodeObject]:
    """Compute the KV of a node's path now ("warm"), and keep it ("pin") until "unpin".

    op: or "offload", to the host, or "evict", of the node's own tokens.
    """
    return _post(f"{_node(loom, node)}/kv", _made(_nodes.KvRequest, op=op), _nodes.NodeObject)


# What the model is asked


def next_tokens(loom: str, node: Node = 0, **options: Any) -> ApiCall[_nodes.NextReply]:
    """Return what may come next at a node. options: of `NextTokens`: top, candidates, …"""
    return _post(f"{_node(loom, node)}/next", _made(_nodes.NextTokens, **options), _nodes.NextReply)


def measure(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.MeasureReply]:
    """Return how likely a text is at a node. options: of `MeasureText`."""
    asked = _made(_nodes.MeasureText, **options)
    return _post(f"{_node(loom, node)}/score", asked, _nodes.MeasureReply)


def begin(loom: str, node: Node = 0, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Begin to grow a node, as a job. options: of `GrowNode`: n, max_tokens, temperature, seed, …

    `deltas` follows it; with wait=True this answers when all branches have ended.
    """
    asked = _made(_nodes.GrowNode, **options)
    return _post(f"{_node(loom, node)}/generate", asked, _jobs.JobReply)


def begin_many(
    loom: str, nodes: Sequence[Node] | None = None, **options: Any
) -> ApiCall[_jobs.JobReply]:
    """As `begin`, many nodes in one batch; None: all leaves that have not ended."""
    asked = _made(_nodes.GrowNodes, nodes=None if nodes is None else list(nodes), **options)
    return _post(f"{_loom(loom)}/generate", asked, _jobs.JobReply)


def begin_search(loom: str, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Begin to search for an answer, as a job. options: of `StartRun`: strategy, node, n, …"""
    return _post(f"{_loom(loom)}/runs", _made(_jobs.StartRun, **options), _jobs.JobReply)


def runs(loom: str, *, limit: int = 20) -> ApiCall[_jobs.JobList]:
    """Return a loom's searches with their rounds, the newest first."""
    return _get(f"{_loom(loom)}/runs", _jobs.JobList, limit=limit)


# Jobs


def jobs() -> ApiCall[_jobs.JobList]:
    """Return the jobs that run, and the last ones that have ended."""
    return _get("/jobs", _jobs.JobList)


def job(id: str) -> ApiCall[_jobs.JobObject]:
    """Return one job."""
    return _get(_job(id), _jobs.JobObject)


def cancel(id: str, branches: Iterable[int] | None = None) -> ApiCall[_jobs.JobObject]:
    """End a job, or some of its branches; what they have is kept."""
    wanted = None if branches is None else list(branches)
    return _post(f"{_job(id)}/cancel", _made(_jobs.CancelJob, branches=wanted), _jobs.JobObject)


def forget_job(id: str) -> ApiCall[_jobs.JobList]:
    """Forget a job that has ended; what it made stays."""
    return _delete(_job(id), _jobs.JobList)


def events_of(id: str) -> str:
    """Return the address of a job's events."""
    return f"{_ROOT}{_job(id)}/events"


# Putting together -----------------------------------------------------------------------------


def _made(kind: type[Request], **fields: Any) -> Request:
    if fields.get("stream"):
        raise ConfigError("leave out stream: `deltas` and `events` follow a job")
    if "logit_bias" in fields:
        fields["logit_bias"] = _written(fields["logit_bias"])
    try:
        return kind(**given(**fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(kind.model_fields)
            raise ConfigError(f"there is no {name!r} here; allowed are {allowed}") from None
        what = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {what}" if name else what) from None


def _written(biases: Any) -> Any:
    """Return biases as JSON has them: infinities by their names."""
    if not isinstance(biases, Mapping):
        return biases
    return {
        token: str(float(value)) if isinstance(value, Real) and math.isinf(value) else value
        for token, value in biases.items()
    }


def _loom(name: str) -> str:
    return f"/looms/{_part(name)}"


def _node(loom: str, node: Node) -> str:
    return f"{_loom(loom)}/nodes/{_part(str(node))}"


def _job(id: str) -> str:
    return f"/jobs/{_part(id)}"


def _part(name: str) -> str:
    if not name or name in (".", ".."):
        raise ConfigError(f"{name!r} names nothing")
    return quote(name, safe="")


def _get(path: str, answer: type[Answer], **params: Any) -> ApiCall[Answer]:
    return ApiCall("GET", _ROOT + path, answer.model_validate, params)


def _delete(
    path: str, answer: type[Answer], *, rev: int | None = None, **params: Any
) -> ApiCall[Answer]:
    return ApiCall("DELETE", _ROOT + path, answer.model_validate, params, rev=rev)


def _post(
    path: str, asked: RequestModel | None, answer: type[Answer], **params: Any
) -> ApiCall[Answer]:
    return ApiCall("POST", _ROOT + path, answer.model_validate, params, _body(asked))


def _patch(
    path: str, asked: RequestModel, answer: type[Answer], *, rev: int | None = None
) -> ApiCall[Answer]:
    return ApiCall("PATCH", _ROOT + path, answer.model_validate, body=_body(asked), rev=rev)


def _body(asked: RequestModel | None) -> dict[str, Any] | None:
    return None if asked is None else asked.model_dump(exclude_unset=True)
