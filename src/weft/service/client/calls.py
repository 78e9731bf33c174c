"""The requests of the native API, one function per route; both clients have them as methods.

A loom is named by its name or id, a node by its number or id. Other options are fields of the named
request, validated before sending.
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
    """Return the server's version, models, limits and formats."""
    return _get("/server", _models.ServerObject)


def models() -> ApiCall[_models.ModelList]:
    """Return the models that the server has registered."""
    return _get("/models", _models.ModelList)


def model(id: str) -> ApiCall[_models.ModelObject]:
    """Return one model."""
    return _get(f"/models/{quote(id)}", _models.ModelObject)


def load_model(source: str, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Start to load a model, as a job; wait=True returns at its end. options: of `LoadModel`."""
    return _post(
        "/models", _build_request(_models.LoadModel, source=source, **options), _jobs.JobReply
    )


def unload_model(id: str, *, force: bool = False) -> ApiCall[_models.ModelList]:
    """Unload a model. force: even if jobs use it; they fail."""
    return _delete(f"/models/{quote(id)}", _models.ModelList, force=force or None)


def tokenize(text: str, **options: Any) -> ApiCall[_models.TokenizeReply]:
    """Return the tokens of a text. options: of `TokenizeText`."""
    return _post(
        "/tokenize",
        _build_request(_models.TokenizeText, text=text, **options),
        _models.TokenizeReply,
    )


def detokenize(token_ids: Sequence[int], **options: Any) -> ApiCall[_models.DetokenizeReply]:
    """Return the text of tokens. options: of `DetokenizeIds`."""
    request = _build_request(_models.DetokenizeIds, token_ids=list(token_ids), **options)
    return _post("/detokenize", request, _models.DetokenizeReply)


def apply_template(
    messages: Sequence[dict[str, Any]], **options: Any
) -> ApiCall[_models.ApplyTemplateReply]:
    """Return the prompt of a chat. options: of `ApplyTemplate`."""
    request = _build_request(_models.ApplyTemplate, messages=list(messages), **options)
    return _post("/apply_template", request, _models.ApplyTemplateReply)


def kv(*, looms: bool = False) -> ApiCall[_models.KvList]:
    """Return the size of each model's KV and the savings from sharing it.

    looms: include the open looms.
    """
    return _get("/kv", _models.KvList, looms=looms or None)


def strategies() -> ApiCall[_jobs.StrategyList]:
    """Return the search strategies."""
    return _get("/strategies", _jobs.StrategyList)


# Looms


def looms(
    *, search: str | None = None, limit: int = 50, after: str | None = None
) -> ApiCall[_looms.LoomPage]:
    """Return a page of looms, last changed first. after: `next` of the last page."""
    return _get("/looms", _looms.LoomPage, search=search, limit=limit, after=after)


def create_loom(prompt: str | None = None, **options: Any) -> ApiCall[_looms.LoomObject]:
    """Create a loom. options: of `CreateLoom`: model, messages, token_ids, system, name, …"""
    return _post(
        "/looms", _build_request(_looms.CreateLoom, prompt=prompt, **options), _looms.LoomObject
    )


def loom(loom: str) -> ApiCall[_looms.LoomObject]:
    """Return one loom."""
    return _get(_loom_path(loom), _looms.LoomObject)


def edit_loom(loom: str, **changes: Any) -> ApiCall[_looms.LoomObject]:
    """Rename a loom, or change its notes. changes: of `EditLoom`."""
    return _patch(_loom_path(loom), _build_request(_looms.EditLoom, **changes), _looms.LoomObject)


def remove_loom(loom: str, *, purge: bool = False) -> ApiCall[_looms.LoomObject]:
    """Remove a loom. `restore_looms` restores it, unless it is purged."""
    return _delete(_loom_path(loom), _looms.LoomObject, purge=purge or None)


def restore_looms(
    *, nodes_of: str | None = None, only_nodes: bool = False
) -> ApiCall[_looms.RestoredLooms]:
    """Restore what was removed last: looms, or nodes of the given loom."""
    params = {"nodes_of": nodes_of, "only_nodes": only_nodes or None}
    return _post("/looms/restore", None, _looms.RestoredLooms, **params)


def undo(loom: str) -> ApiCall[_nodes.Changed]:
    """Undo a loom's last operation."""
    return _post(f"{_loom_path(loom)}/undo", None, _nodes.Changed)


def redo(loom: str) -> ApiCall[_nodes.Changed]:
    """Redo the operation that was undone last."""
    return _post(f"{_loom_path(loom)}/redo", None, _nodes.Changed)


def history(loom: str, *, limit: int = 50) -> ApiCall[_looms.OperationList]:
    """Return a loom's operations, latest first."""
    return _get(f"{_loom_path(loom)}/history", _looms.OperationList, limit=limit)


def search_loom(
    loom: str,
    text: str = "",
    *,
    regex: bool = False,
    case: bool = False,
    filter: Iterable[str] = (),
    limit: int = 200,
) -> ApiCall[_looms.HitList]:
    """Return the nodes of a loom whose text matches. filter: "bookmarked", "model", "leaf", …"""
    params = {"regex": regex or None, "case": case or None, "filter": list(filter) or None}
    return _get(f"{_loom_path(loom)}/search", _looms.HitList, q=text, limit=limit, **params)


def find(words: str, *, loom: str | None = None, limit: int = 50) -> ApiCall[_looms.HitList]:
    """Return nodes with these words. loom: search only this one."""
    return _get("/search", _looms.HitList, q=words, loom=loom, limit=limit)


def export(
    loom: str, format: str = "json", *, scope: str | None = None, node: Node = 0, **options: Any
) -> ApiCall[bytes]:
    """Return a loom, or a part of it, as a file. scope: "path", "subtree", "tree".

    options: options of the format.
    """
    params = {"format": format, "scope": scope, "node": node, **options}
    return ApiCall("GET", f"{_ROOT}{_loom_path(loom)}/export", bytes, params, is_json=False)


def import_looms(
    data: bytes, *, format: str = "auto", model: str | None = None, name: str | None = None
) -> ApiCall[_looms.Imported]:
    """Import a file of Weft or another program. model: for looms that are imported from texts."""
    params = {"format": format, "model": model, "name": name}
    read = _looms.Imported.model_validate
    return ApiCall("POST", f"{_ROOT}/import", read, params, body=data)


# Terminals


def drawn_last(mark: str) -> ApiCall[_terminals.LastLoom]:
    """Return the loom shown last in a terminal."""
    return _get(f"/terminals/{_path_part(mark)}", _terminals.LastLoom)


def note_drawn(mark: str, loom: str, node: int = 0) -> ApiCall[_terminals.LastLoom]:
    """Record that a loom was shown in a terminal."""
    request = _build_request(_terminals.SetLastLoom, loom=loom, node=node)
    body, read = _body(request), _terminals.LastLoom.model_validate
    return ApiCall("PUT", f"{_ROOT}/terminals/{_path_part(mark)}", read, body=body)


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

    nodes: at most 200 numbers; absent nodes are skipped.
    """
    params = {"depth": depth, "fields": list(fields) or None, "since": since, "after": after}
    only = None if nodes is None else list(nodes)
    path = f"{_loom_path(loom)}/nodes"
    return _get(path, _nodes.NodePage, under=under, limit=limit, nodes=only, **params)


def tree(
    loom: str, *, under: Node = 0, depth: int | None = None, fields: Iterable[str] = ()
) -> ApiCall[_looms.LoomTree]:
    """Return a small tree, nested."""
    params = {"depth": depth, "fields": list(fields) or None}
    return _get(f"{_loom_path(loom)}/tree", _looms.LoomTree, under=under, **params)


def node(loom: str, node: Node, *, fields: Iterable[str] = ()) -> ApiCall[_nodes.NodeObject]:
    """Return one node."""
    return _get(_node_path(loom, node), _nodes.NodeObject, fields=list(fields) or None)


def path(
    loom: str, node: Node, how: str = "text", *, below_root: bool = False
) -> ApiCall[_nodes.PathReply]:
    """Return the path to a node. how: "text", "tokens", "messages" or "nodes"."""
    params = {"as": how, "below_root": below_root or None}
    return _get(f"{_node_path(loom, node)}/path", _nodes.PathReply, **params)


def tokens(loom: str, node: Node, *, top: int | None = None) -> ApiCall[_nodes.TokenList]:
    """Return a node's tokens with their statistics. top: alternatives per token; runs the model."""
    return _get(f"{_node_path(loom, node)}/tokens", _nodes.TokenList, top=top)


def add(loom: str, parent: Node = 0, **options: Any) -> ApiCall[_nodes.Changed]:
    """Add a child with a given text. options: of `AddNode`: text, texts, token_ids, message, …"""
    request = _build_request(_nodes.AddNode, parent=parent, **options)
    return _post(f"{_loom_path(loom)}/nodes", request, _nodes.Changed)


def edit(
    loom: str, node: Node, *, rev: int | None = None, **changes: Any
) -> ApiCall[_nodes.Changed]:
    """Change a node. changes: of `EditNode`. rev: the last one you have read; Conflict if newer."""
    return _patch(
        _node_path(loom, node), _build_request(_nodes.EditNode, **changes), _nodes.Changed, rev=rev
    )


def remove(
    loom: str,
    node: Node,
    *,
    what: str | None = None,
    also: Iterable[Node] = (),
    rev: int | None = None,
) -> ApiCall[_nodes.Changed]:
    """Remove a node and its descendants. what: "children", "siblings" or "others" instead.

    also: more nodes, in the same operation.
    """
    return _delete(
        _node_path(loom, node), _nodes.Changed, rev=rev, what=what, also=list(also) or None
    )


def fork(loom: str, node: Node, at_token: int, **options: Any) -> ApiCall[_nodes.Changed]:
    """Add a sibling that shares a node's first tokens. options: of `ForkNode`."""
    request = _build_request(_nodes.ForkNode, at_token=at_token, **options)
    return _post(f"{_node_path(loom, node)}/fork", request, _nodes.Changed)


def split(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Split a node in two. options: of `SplitNode`."""
    request = _build_request(_nodes.SplitNode, **options)
    return _post(f"{_node_path(loom, node)}/split", request, _nodes.Changed)


def merge(loom: str, node: Node) -> ApiCall[_nodes.Changed]:
    """Merge a node with its parent, whose only child it is."""
    return _post(f"{_node_path(loom, node)}/merge", None, _nodes.Changed)


def clip(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Keep a node's first tokens. options: of `ClipNode`."""
    return _post(
        f"{_node_path(loom, node)}/clip", _build_request(_nodes.ClipNode, **options), _nodes.Changed
    )


def move(loom: str, node: Node, parent: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Move a node below another one. options: of `MoveNode`."""
    request = _build_request(_nodes.MoveNode, parent=parent, **options)
    return _post(f"{_node_path(loom, node)}/move", request, _nodes.Changed)


def loom_kv(loom: str) -> ApiCall[_models.LoomKv]:
    """Return how many nodes of a loom have KV, and its size."""
    return _get(f"{_loom_path(loom)}/kv", _models.LoomKv)


def forget_kv(loom: str, *, keep: Node | None = None) -> ApiCall[_models.LoomKv]:
    """Evict the KV of a loom, except for the path to `keep`, pinned nodes and growing ones."""
    return _post(
        f"{_loom_path(loom)}/kv", _build_request(_nodes.ForgetKv, keep=keep), _models.LoomKv
    )


def handle_kv(loom: str, node: Node, op: str) -> ApiCall[_nodes.NodeObject]:
    """Run an operation on a node's KV.

    "warm" computes the KV of the path; "pin" also protects it until "unpin". "offload" moves the KV
    of the node's own tokens to the host; "evict" frees it.
    """
    return _post(
        f"{_node_path(loom, node)}/kv", _build_request(_nodes.KvRequest, op=op), _nodes.NodeObject
    )


# Model queries and growth


def next_tokens(loom: str, node: Node = 0, **options: Any) -> ApiCall[_nodes.NextReply]:
    """Return the likeliest next tokens at a node. options: of `NextTokens`: top, candidates, …"""
    return _post(
        f"{_node_path(loom, node)}/next",
        _build_request(_nodes.NextTokens, **options),
        _nodes.NextReply,
    )


def measure(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.MeasureReply]:
    """Return the log-probabilities of a text at a node. options: of `MeasureText`."""
    request = _build_request(_nodes.MeasureText, **options)
    return _post(f"{_node_path(loom, node)}/score", request, _nodes.MeasureReply)


def begin(loom: str, node: Node = 0, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Start to grow a node, as a job. options: of `GrowNode`: n, max_tokens, temperature, seed, …

    `deltas` follows the job; wait=True returns when all branches have ended.
    """
    request = _build_request(_nodes.GrowNode, **options)
    return _post(f"{_node_path(loom, node)}/generate", request, _jobs.JobReply)


def begin_many(
    loom: str, nodes: Sequence[Node] | None = None, **options: Any
) -> ApiCall[_jobs.JobReply]:
    """Like `begin`, for several nodes in one batch; None: all leaves that have not ended."""
    request = _build_request(
        _nodes.GrowNodes, nodes=None if nodes is None else list(nodes), **options
    )
    return _post(f"{_loom_path(loom)}/generate", request, _jobs.JobReply)


def begin_search(loom: str, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Start a search for an answer, as a job. options: of `StartRun`: strategy, node, n, …"""
    return _post(
        f"{_loom_path(loom)}/runs", _build_request(_jobs.StartRun, **options), _jobs.JobReply
    )


def runs(loom: str, *, limit: int = 20) -> ApiCall[_jobs.JobList]:
    """Return a loom's searches with their rounds, newest first."""
    return _get(f"{_loom_path(loom)}/runs", _jobs.JobList, limit=limit)


# Jobs


def jobs() -> ApiCall[_jobs.JobList]:
    """Return the running jobs and the last ended ones."""
    return _get("/jobs", _jobs.JobList)


def job(id: str) -> ApiCall[_jobs.JobObject]:
    """Return one job."""
    return _get(_job_path(id), _jobs.JobObject)


def cancel(id: str, branches: Iterable[int] | None = None) -> ApiCall[_jobs.JobObject]:
    """End a job, or some of its branches; generated tokens are kept."""
    indices = None if branches is None else list(branches)
    return _post(
        f"{_job_path(id)}/cancel",
        _build_request(_jobs.CancelJob, branches=indices),
        _jobs.JobObject,
    )


def forget_job(id: str) -> ApiCall[_jobs.JobList]:
    """Remove an ended job from the list; its nodes stay."""
    return _delete(_job_path(id), _jobs.JobList)


def events_of(id: str) -> str:
    """Return the path of a job's events."""
    return f"{_ROOT}{_job_path(id)}/events"


# Helpers --------------------------------------------------------------------------------------


def _build_request(kind: type[Request], **fields: Any) -> Request:
    if fields.get("stream"):
        raise ConfigError("leave stream out: `deltas` and `events` follow a job")
    if "logit_bias" in fields:
        fields["logit_bias"] = _json_biases(fields["logit_bias"])
    try:
        return kind(**given(**fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(kind.model_fields)
            raise ConfigError(f"there is no option {name!r}; allowed are {allowed}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {message}" if name else message) from None


def _json_biases(biases: Any) -> Any:
    """Return biases in JSON types: infinities become strings."""
    if not isinstance(biases, Mapping):
        return biases
    return {
        token: str(float(value)) if isinstance(value, Real) and math.isinf(value) else value
        for token, value in biases.items()
    }


def _loom_path(name: str) -> str:
    return f"/looms/{_path_part(name)}"


def _node_path(loom: str, node: Node) -> str:
    return f"{_loom_path(loom)}/nodes/{_path_part(str(node))}"


def _job_path(id: str) -> str:
    return f"/jobs/{_path_part(id)}"


def _path_part(name: str) -> str:
    if not name or name in (".", ".."):
        raise ConfigError(f"{name!r} is not a valid name")
    return quote(name, safe="")


def _get(path: str, answer: type[Answer], **params: Any) -> ApiCall[Answer]:
    return ApiCall("GET", _ROOT + path, answer.model_validate, params)


def _delete(
    path: str, answer: type[Answer], *, rev: int | None = None, **params: Any
) -> ApiCall[Answer]:
    return ApiCall("DELETE", _ROOT + path, answer.model_validate, params, rev=rev)


def _post(
    path: str, request: RequestModel | None, answer: type[Answer], **params: Any
) -> ApiCall[Answer]:
    return ApiCall("POST", _ROOT + path, answer.model_validate, params, _body(request))


def _patch(
    path: str, request: RequestModel, answer: type[Answer], *, rev: int | None = None
) -> ApiCall[Answer]:
    return ApiCall("PATCH", _ROOT + path, answer.model_validate, body=_body(request), rev=rev)


def _body(request: RequestModel | None) -> dict[str, Any] | None:
    return None if request is None else request.model_dump(exclude_unset=True)
