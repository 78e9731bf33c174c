"""The requests of the native API, one function per route.

A function builds an `ApiCall` and sends nothing. `Client` and `AsyncClient` have a method of the
same name, which sends the call and returns the parsed response.

A loom is named by its name or id, a node by its number or id. `**options` are further fields of
the named request model; they are validated before sending.
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
    """Request the server's version, models, limits and formats."""
    return _get("/server", _models.ServerObject)


def models() -> ApiCall[_models.ModelList]:
    """Request the list of models that the server has registered, loaded or not."""
    return _get("/models", _models.ModelList)


def model(id: str) -> ApiCall[_models.ModelObject]:
    """Request the state of one model. id: its name in the list of `models`."""
    return _get(f"/models/{quote(id)}", _models.ModelObject)


def load_model(source: str, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Start to load a model, as a job.

    source: path, Hub id or URL. options: fields of `LoadModel`; with wait=True the response arrives
    when the model has been loaded.
    """
    return _post(
        "/models", _build_request(_models.LoadModel, source=source, **options), _jobs.JobReply
    )


def unload_model(id: str, *, force: bool = False) -> ApiCall[_models.ModelList]:
    """Unload a model. force: unload it even while jobs use it; these jobs fail."""
    return _delete(f"/models/{quote(id)}", _models.ModelList, force=force or None)


def tokenize(text: str, **options: Any) -> ApiCall[_models.TokenizeReply]:
    """Request the tokens of a text. options: fields of `TokenizeText`."""
    return _post(
        "/tokenize",
        _build_request(_models.TokenizeText, text=text, **options),
        _models.TokenizeReply,
    )


def detokenize(token_ids: Sequence[int], **options: Any) -> ApiCall[_models.DetokenizeReply]:
    """Request the text of token ids. options: fields of `DetokenizeIds`."""
    request = _build_request(_models.DetokenizeIds, token_ids=list(token_ids), **options)
    return _post("/detokenize", request, _models.DetokenizeReply)


def apply_template(
    messages: Sequence[dict[str, Any]], **options: Any
) -> ApiCall[_models.ApplyTemplateReply]:
    """Request the prompt that the chat template makes of messages. options: of `ApplyTemplate`."""
    request = _build_request(_models.ApplyTemplate, messages=list(messages), **options)
    return _post("/apply_template", request, _models.ApplyTemplateReply)


def kv(*, looms: bool = False) -> ApiCall[_models.KvList]:
    """Request the size of each model's KV and the savings from sharing it.

    looms: also list the KV of the looms that the server has open.
    """
    return _get("/kv", _models.KvList, looms=looms or None)


def strategies() -> ApiCall[_jobs.StrategyList]:
    """Request the list of search strategies, for `begin_search`."""
    return _get("/strategies", _jobs.StrategyList)


# Looms


def looms(
    *, search: str | None = None, limit: int = 50, after: str | None = None
) -> ApiCall[_looms.LoomPage]:
    """Request a page of looms, the last changed first.

    Args:
        search: only looms whose name or prompt contains this text.
        limit: maximum number of looms.
        after: `next` of the previous page; None means the first page.
    """
    return _get("/looms", _looms.LoomPage, search=search, limit=limit, after=after)


def create_loom(prompt: str | None = None, **options: Any) -> ApiCall[_looms.LoomObject]:
    """Create a loom.

    options: fields of `CreateLoom`: model, messages, token_ids, system, name, …
    """
    return _post(
        "/looms", _build_request(_looms.CreateLoom, prompt=prompt, **options), _looms.LoomObject
    )


def loom(loom: str) -> ApiCall[_looms.LoomObject]:
    """Request the metadata of one loom."""
    return _get(_loom_path(loom), _looms.LoomObject)


def edit_loom(loom: str, **changes: Any) -> ApiCall[_looms.LoomObject]:
    """Change a loom's name, title or notes. changes: fields of `EditLoom`."""
    return _patch(_loom_path(loom), _build_request(_looms.EditLoom, **changes), _looms.LoomObject)


def remove_loom(loom: str, *, purge: bool = False) -> ApiCall[_looms.LoomObject]:
    """Remove a loom. `restore_looms` restores it, unless it is purged.

    purge: delete it permanently.
    """
    return _delete(_loom_path(loom), _looms.LoomObject, purge=purge or None)


def restore_looms(
    *, nodes_of: str | None = None, only_nodes: bool = False
) -> ApiCall[_looms.RestoredLooms]:
    """Restore what was removed last.

    Args:
        nodes_of: a loom whose nodes may be restored, too. None restores only looms.
        only_nodes: restore nodes of that loom, even if looms were removed later.
    """
    params = {"nodes_of": nodes_of, "only_nodes": only_nodes or None}
    return _post("/looms/restore", None, _looms.RestoredLooms, **params)


def undo(loom: str) -> ApiCall[_nodes.Changed]:
    """Undo a loom's last operation.

    The response lists the nodes that this adds, changes and removes.
    """
    return _post(f"{_loom_path(loom)}/undo", None, _nodes.Changed)


def redo(loom: str) -> ApiCall[_nodes.Changed]:
    """Redo the operation that was undone last; the response is like that of `undo`."""
    return _post(f"{_loom_path(loom)}/redo", None, _nodes.Changed)


def history(loom: str, *, limit: int = 50) -> ApiCall[_looms.OperationList]:
    """Request a loom's operations, the latest first. limit: maximum number of operations."""
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
    """Search the texts of one loom's nodes.

    Args:
        text: the text to find. An empty text matches every node.
        regex: `text` is a regular expression.
        case: match upper and lower case exactly.
        filter: only nodes of all these kinds: "bookmarked", "human", "model", "ended", "leaf".
        limit: maximum number of results.
    """
    params = {"regex": regex or None, "case": case or None, "filter": list(filter) or None}
    return _get(f"{_loom_path(loom)}/search", _looms.HitList, q=text, limit=limit, **params)


def find(words: str, *, loom: str | None = None, limit: int = 50) -> ApiCall[_looms.HitList]:
    """Search for nodes that contain all these words, in all looms.

    words: also "phrases" in quotes and prefixes with a star. loom: search only this loom.
    """
    return _get("/search", _looms.HitList, q=words, loom=loom, limit=limit)


def export(
    loom: str, format: str = "json", *, scope: str | None = None, node: Node = 0, **options: Any
) -> ApiCall[bytes]:
    """Request a loom, or a part of it, as the bytes of a file.

    Args:
        format: name of an export format; `server` lists them.
        scope: "path", "subtree" or "tree". None means the usual scope of the format.
        node: the end of the path, or the top of the subtree.
        options: options of the format.
    """
    params = {"format": format, "scope": scope, "node": node, **options}
    return ApiCall("GET", f"{_ROOT}{_loom_path(loom)}/export", bytes, params, is_json=False)


def import_looms(
    data: bytes,
    *,
    format: str = "auto",
    model: str | None = None,
    name: str | None = None,
    title: str | None = None,
) -> ApiCall[_looms.Imported]:
    """Import a file of Weft or of another program.

    Args:
        data: the contents of the file.
        format: name of an import format, or "auto".
        model: the model that tokenizes the texts of files without tokens.
        name: name of the new loom, for files with one loom.
        title: title of the new loom, for files with one loom; None means the file's.
    """
    params = {"format": format, "model": model, "name": name, "title": title}
    read = _looms.Imported.model_validate
    return ApiCall("POST", f"{_ROOT}/import", read, params, body=data)


# Terminals


def drawn_last(mark: str) -> ApiCall[_terminals.LastLoom]:
    """Request the loom and node last shown in this terminal, and the loom last shown in any.

    mark: a string that identifies the terminal.
    """
    return _get(f"/terminals/{_path_part(mark)}", _terminals.LastLoom)


def note_drawn(mark: str, loom: str, node: int = 0) -> ApiCall[_terminals.LastLoom]:
    """Record that a loom was shown in a terminal.

    mark: a string that identifies the terminal. node: number of the node that was read.
    """
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
    """Request a page of a loom's nodes, parents first.

    Args:
        under: only this node and its descendants.
        depth: maximum level below `under`; None means all levels.
        fields: optional fields to include: "tokens", "meta", "params", "kv".
        since: only nodes that changed after this revision, and the numbers of removed nodes.
        limit: maximum number of nodes.
        after: `next` of the previous page; None means the first page.
        nodes: at most 200 numbers: only these nodes. Absent nodes are skipped.
    """
    params = {"depth": depth, "fields": list(fields) or None, "since": since, "after": after}
    only = None if nodes is None else list(nodes)
    path = f"{_loom_path(loom)}/nodes"
    return _get(path, _nodes.NodePage, under=under, limit=limit, nodes=only, **params)


def tree(
    loom: str, *, under: Node = 0, depth: int | None = None, fields: Iterable[str] = ()
) -> ApiCall[_looms.LoomTree]:
    """Request a tree of at most 2,000 nodes as nested objects.

    under: the top node. depth, fields: as for `nodes`.
    """
    params = {"depth": depth, "fields": list(fields) or None}
    return _get(f"{_loom_path(loom)}/tree", _looms.LoomTree, under=under, **params)


def node(loom: str, node: Node, *, fields: Iterable[str] = ()) -> ApiCall[_nodes.NodeObject]:
    """Request one node. fields: optional fields to include."""
    return _get(_node_path(loom, node), _nodes.NodeObject, fields=list(fields) or None)


def path(
    loom: str, node: Node, how: str = "text", *, below_root: bool = False
) -> ApiCall[_nodes.PathReply]:
    """Request the path from the root to a node.

    how: the format: "text", "tokens", "messages" or "nodes". below_root: leave out the prompt.
    """
    params = {"as": how, "below_root": below_root or None}
    return _get(f"{_node_path(loom, node)}/path", _nodes.PathReply, **params)


def tokens(loom: str, node: Node, *, top: int | None = None) -> ApiCall[_nodes.TokenList]:
    """Request a node's tokens with their statistics.

    top: number of alternatives for each token. A value above 0 runs the model; None means 0.
    """
    return _get(f"{_node_path(loom, node)}/tokens", _nodes.TokenList, top=top)


def add(loom: str, parent: Node = 0, **options: Any) -> ApiCall[_nodes.Changed]:
    """Add a child with a given text.

    options: fields of `AddNode`: text, texts, token_ids, message, …
    """
    request = _build_request(_nodes.AddNode, parent=parent, **options)
    return _post(f"{_loom_path(loom)}/nodes", request, _nodes.Changed)


def edit(
    loom: str, node: Node, *, rev: int | None = None, **changes: Any
) -> ApiCall[_nodes.Changed]:
    """Change a node.

    Args:
        rev: the loom's revision that you have read. The server responds with Conflict if the node
            was changed after it. None means no check.
        changes: fields of `EditNode`. A new text creates a sibling, unless `in_place` is true.
    """
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
    """Remove nodes and their descendants as one operation. `undo` restores them.

    Args:
        node: the node to which `what` refers.
        what: None or "node": the node and its descendants; "children": its descendants;
            "siblings": its siblings; "others": all but its path and its descendants.
        also: more nodes, to which `what` applies in the same way.
        rev: the loom's revision that you have read. The server responds with Conflict if `node` was
            changed after it. None means no check.
    """
    return _delete(
        _node_path(loom, node), _nodes.Changed, rev=rev, what=what, also=list(also) or None
    )


def fork(loom: str, node: Node, at_token: int, **options: Any) -> ApiCall[_nodes.Changed]:
    """Add a sibling that shares a node's first tokens.

    at_token: number of shared tokens.
    options: fields of `ForkNode`: the token or the text that follows them. Without these, nothing
        follows.
    """
    request = _build_request(_nodes.ForkNode, at_token=at_token, **options)
    return _post(f"{_node_path(loom, node)}/fork", request, _nodes.Changed)


def split(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Split a node in two; the lower one gets the children.

    options: fields of `SplitNode`: the position at which to split.
    """
    request = _build_request(_nodes.SplitNode, **options)
    return _post(f"{_node_path(loom, node)}/split", request, _nodes.Changed)


def merge(loom: str, node: Node) -> ApiCall[_nodes.Changed]:
    """Merge a node with its parent. The node must be the parent's only child."""
    return _post(f"{_node_path(loom, node)}/merge", None, _nodes.Changed)


def clip(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Shorten a node to its first tokens. options: fields of `ClipNode`: how many to keep."""
    return _post(
        f"{_node_path(loom, node)}/clip", _build_request(_nodes.ClipNode, **options), _nodes.Changed
    )


def move(loom: str, node: Node, parent: Node, **options: Any) -> ApiCall[_nodes.Changed]:
    """Move a node and its descendants below another node.

    options: fields of `MoveNode`, such as the index among the new siblings.
    """
    request = _build_request(_nodes.MoveNode, parent=parent, **options)
    return _post(f"{_node_path(loom, node)}/move", request, _nodes.Changed)


def loom_kv(loom: str) -> ApiCall[_models.LoomKv]:
    """Request how many nodes of a loom have KV, and the size of this KV."""
    return _get(f"{_loom_path(loom)}/kv", _models.LoomKv)


def forget_kv(loom: str, *, keep: Node | None = None) -> ApiCall[_models.LoomKv]:
    """Evict the KV of a loom, except that of pinned and of growing nodes.

    keep: a node whose path also keeps its KV.
    """
    return _post(
        f"{_loom_path(loom)}/kv", _build_request(_nodes.ForgetKv, keep=keep), _models.LoomKv
    )


def handle_kv(loom: str, node: Node, op: str) -> ApiCall[_nodes.NodeObject]:
    """Run an operation on a node's KV.

    op: "warm" computes the KV of the path. "pin" also protects it from eviction until "unpin".
        "offload" moves the KV of the node's own tokens to host memory; "evict" frees this KV.
    """
    return _post(
        f"{_node_path(loom, node)}/kv", _build_request(_nodes.KvRequest, op=op), _nodes.NodeObject
    )


# Model queries and growth


def next_tokens(loom: str, node: Node = 0, **options: Any) -> ApiCall[_nodes.NextReply]:
    """Request the likeliest next tokens at a node. options: of `NextTokens`: top, candidates, …"""
    return _post(
        f"{_node_path(loom, node)}/next",
        _build_request(_nodes.NextTokens, **options),
        _nodes.NextReply,
    )


def measure(loom: str, node: Node, **options: Any) -> ApiCall[_nodes.MeasureReply]:
    """Request the log-probabilities of a text after a node. options: fields of `MeasureText`."""
    request = _build_request(_nodes.MeasureText, **options)
    return _post(f"{_node_path(loom, node)}/score", request, _nodes.MeasureReply)


def begin(loom: str, node: Node = 0, **options: Any) -> ApiCall[_jobs.JobReply]:
    """Start to generate branches of a node, as a job.

    options: fields of `GrowNode`: n, max_tokens, temperature, seed, … With wait=True the response
    arrives when all branches have ended; else `Client.deltas` follows the job.
    """
    request = _build_request(_nodes.GrowNode, **options)
    return _post(f"{_node_path(loom, node)}/generate", request, _jobs.JobReply)


def begin_many(
    loom: str, nodes: Sequence[Node] | None = None, **options: Any
) -> ApiCall[_jobs.JobReply]:
    """Start to generate branches of several nodes in one batch, as a job.

    nodes: None means all leaves that have not ended. options: fields of `GrowNodes`; see `begin`.
    """
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
    """Request a loom's searches with their rounds, the newest first. limit: maximum number."""
    return _get(f"{_loom_path(loom)}/runs", _jobs.JobList, limit=limit)


# Jobs


def jobs() -> ApiCall[_jobs.JobList]:
    """Request the list of running jobs and of those that have ended last."""
    return _get("/jobs", _jobs.JobList)


def job(id: str) -> ApiCall[_jobs.JobObject]:
    """Request the state of one job."""
    return _get(_job_path(id), _jobs.JobObject)


def cancel(id: str, branches: Iterable[int] | None = None) -> ApiCall[_jobs.JobObject]:
    """End a job, or some of its branches. Tokens generated so far stay in the loom.

    branches: indices of the branches to end; None means the entire job.
    """
    indices = None if branches is None else list(branches)
    return _post(
        f"{_job_path(id)}/cancel",
        _build_request(_jobs.CancelJob, branches=indices),
        _jobs.JobObject,
    )


def forget_job(id: str) -> ApiCall[_jobs.JobList]:
    """Remove an ended job from the server's list of jobs. Its nodes stay in the loom."""
    return _delete(_job_path(id), _jobs.JobList)


def events_of(id: str) -> str:
    """Return the URL path of a job's event stream."""
    return f"{_ROOT}{_job_path(id)}/events"


# Helpers --------------------------------------------------------------------------------------


def _build_request(kind: type[Request], **fields: Any) -> Request:
    """Return a validated request model. Raises: ConfigError that names the invalid field."""
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
    """Return the URL path of a loom."""
    return f"/looms/{_path_part(name)}"


def _node_path(loom: str, node: Node) -> str:
    """Return the URL path of a node."""
    return f"{_loom_path(loom)}/nodes/{_path_part(str(node))}"


def _job_path(id: str) -> str:
    """Return the URL path of a job."""
    return f"/jobs/{_path_part(id)}"


def _path_part(name: str) -> str:
    """Quote a name for use as one segment of a URL path."""
    if not name or name in (".", ".."):
        raise ConfigError(f"{name!r} is not a valid name")
    return quote(name, safe="")


def _get(path: str, answer: type[Answer], **params: Any) -> ApiCall[Answer]:
    """Return a GET whose JSON response is parsed as the model `answer`."""
    return ApiCall("GET", _ROOT + path, answer.model_validate, params)


def _delete(
    path: str, answer: type[Answer], *, rev: int | None = None, **params: Any
) -> ApiCall[Answer]:
    """Return a DELETE whose JSON response is parsed as the model `answer`."""
    return ApiCall("DELETE", _ROOT + path, answer.model_validate, params, rev=rev)


def _post(
    path: str, request: RequestModel | None, answer: type[Answer], **params: Any
) -> ApiCall[Answer]:
    """Return a POST of a request model whose JSON response is parsed as the model `answer`."""
    return ApiCall("POST", _ROOT + path, answer.model_validate, params, _body(request))


def _patch(
    path: str, request: RequestModel, answer: type[Answer], *, rev: int | None = None
) -> ApiCall[Answer]:
    """Return a PATCH of a request model whose JSON response is parsed as the model `answer`."""
    return ApiCall("PATCH", _ROOT + path, answer.model_validate, body=_body(request), rev=rev)


def _body(request: RequestModel | None) -> dict[str, Any] | None:
    """Return a request model as JSON types, without fields that were not set; None for None."""
    return None if request is None else request.model_dump(exclude_unset=True)
