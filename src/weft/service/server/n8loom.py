"""N8Loom's API at the root path, over the same looms.

A loom's id is its name, a node's id is `LOOM-NUMBER` with the stored loom id and number, so it is
stable. Fields beyond N8Loom's have names of their own (`children_ids`, `tokens`). Errors are
`{"detail": …}` as in FastAPI: a list for 422, else a text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from starlette.exceptions import HTTPException

from ...errors import ConfigError, NotFound, WeftError
from ...lm.lm import LM
from ...loom import Heddle, Loom
from ...loom.node import preorder
from ..api.base import validate_json
from ..api.nodes import GrowFields
from ..store.library import NameTaken
from ..store.summary import LoomSummary
from .dependencies import ERRORS
from .errors import RequestError, serialize_error
from .jobs import ServerJob
from .limits import check_limit
from .models import ModelRequest, ServedModel
from .open_loom import OpenLoom
from .service import Service, ServiceDep
from .start_jobs import start_growth
from .ticker import TICK_S

Json = dict[str, Any]
ACTOR = "n8loom"
_NODE = re.compile(r"([0-9a-f]{8,64})-(\d{1,9})")
# Sampling parameters that this API leaves neutral, whatever the model's defaults.
_NEUTRAL: Json = {
    "top_k": 0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature_first": True,
}
_MAX_DEPTH = 10_000  # levels of an imported tree


class DetailRoute(APIRoute):
    """A route that returns errors as `{"detail": …}`, FastAPI's own format."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route."""
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                keys = ("loc", "msg", "type")
                detail = [{key: fault[key] for key in keys} for fault in error.errors()]
                return JSONResponse({"detail": detail}, 422)
            except (WeftError, HTTPException, MemoryError) as error:
                status, body, headers = serialize_error(
                    error, request.scope.get("weft.request_id", "")
                )
                return JSONResponse({"detail": body["message"]}, status, headers)

        return handle_errors


class DetailReply(BaseModel):
    """An error."""

    detail: str


_ERRORS: dict[int | str, Json] = {
    status: {**described, "model": DetailReply}
    for status, described in ERRORS.items()
    if status != 422
}
router = APIRouter(tags=["n8loom"], route_class=DetailRoute, responses=_ERRORS)


class N8Request(BaseModel):
    """Base of this API's requests; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _validate_json(cls, value: object, info: ValidationInfo) -> object:
        """Reject lone surrogates and other values that JSON should not have."""
        return (
            value if info.field_name == "loom_data" else validate_json(value)
        )  # imported texts are kept as they are


class LoadModelRequest(N8Request):
    """The model to load."""

    model_path: str = Field(min_length=1, description="A model source, as for `weft serve`.")


class CreateLoomRequest(N8Request):
    """The prompt of a new loom."""

    model_id: str
    prompt: str = Field(
        description="The prompt; the model's chat template is applied if it has one."
    )


class RenameLoomRequest(N8Request):
    """The loom's new id."""

    new_id: str = Field(min_length=1)


class ImportLoomRequest(N8Request):
    """An exported loom."""

    model_id: str
    loom_data: dict[str, Any]


class RamifyRequest(N8Request):
    """Texts to add as children, or parameters to generate children."""

    node_id: str
    text: str | list[str] | None = None
    n: int | None = Field(4, ge=1)
    temp: float | None = Field(0.8, ge=0)
    max_tokens: int | None = Field(8, ge=1)
    stream: bool | None = False
    min_p: float | None = Field(0.05, ge=0, le=1, description="Weft's extension.")
    top_p: float | None = Field(1.0, gt=0, le=1, description="Weft's extension.")
    stop_strings: list[str] | None = Field(None, description="Weft's extension.")
    seed: int | None = Field(None, ge=0, lt=1 << 64, description="Weft's extension.")

    def grow_fields(self) -> GrowFields:
        """Return the parameters as fields of the native API."""
        return GrowFields(
            n=4 if self.n is None else self.n,
            temperature=0.8 if self.temp is None else self.temp,
            max_tokens=8 if self.max_tokens is None else self.max_tokens,
            min_p=0.05 if self.min_p is None else self.min_p,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=[text for text in self.stop_strings or () if text] or None,
            seed=self.seed,
            **_NEUTRAL,
        )


class ClipRequest(N8Request):
    """The number of tokens to keep."""

    node_id: str
    token_limit: int = Field(description="Number of tokens to keep; negative: to drop.")


class TrimRequest(N8Request):
    """The number of tokens to drop."""

    node_id: str
    token_trim: Annotated[int, Field(ge=0, description="Number of tokens to drop.")]


# Models and looms -----------------------------------------------------------------------------


@router.post("/load_model")
async def load_model(body: LoadModelRequest, service: ServiceDep) -> Json:
    """Load a model if it is not loaded yet; its id is its path."""
    if _find_model(service, body.model_path) is None:
        model = service.models.register(ModelRequest(body.model_path))
        await asyncio.shield(service.spawn(service.models.load(model)))
    await _ready_model(service, body.model_path)
    return {"model_id": body.model_path}


def _find_model(service: Service, given: str) -> ServedModel | None:
    """Return the registered model with this name or source; None if there is none."""
    matches = (each for each in service.models if given in (each.source, each.name))
    return next((each for each in matches if each.state != "failed"), None)


async def _ready_model(service: Service, given: str) -> tuple[ServedModel, LM]:
    """Return a loaded model and its LM. Raises: RequestError while it is loading."""
    model = _find_model(service, given)
    if model is None:
        raise RequestError(400, "model_not_found", f"Model path not found: {given!r:.200}")
    return model, (await service.models.available(model.name)).ready()


@router.post("/create_loom")
async def create_loom(body: CreateLoomRequest, service: ServiceDep) -> Json:
    """Create a loom from a prompt."""
    model, lm = await _ready_model(service, body.model_id)
    return await _store_loom(service, model, lambda: Loom(lm, body.prompt))


async def _store_loom(service: Service, model: ServedModel, make: Callable[[], Loom]) -> Json:
    """Create a loom with `make`, store it, and return its description."""

    def create() -> Any:
        loom = make()
        loom.meta["model"] = model.source
        return service.looms.library.create(loom)

    with model.in_use() as lm:
        live = service.looms.put(await asyncio.to_thread(create), lm)
    return {"loom_id": live.stored.name, "heddle_id": f"{live.stored.id}-0"}


@router.get("/loom/{loom_id}")
async def read_loom(loom_id: str, service: ServiceDep) -> Response:
    """Return a loom as nested nodes."""
    async with _open_loom(service, loom_id) as live:
        return await _nested(live, live.stored.loom)


@router.get("/loom/{loom_id}/export")
async def export_loom(loom_id: str, service: ServiceDep) -> Response:
    """Return a loom as nested nodes, with their tokens: `/looms/import` reads them."""
    async with _open_loom(service, loom_id) as live:
        return await _nested(live, live.stored.loom, with_tokens=True)


@router.get("/looms")
async def list_looms(service: ServiceDep) -> list[Json]:
    """List all looms."""
    rows = await asyncio.to_thread(service.looms.library.looms)
    return [
        {"loom_id": row.name, "root_heddle_id": f"{row.id}-0", "prompt": row.prompt} for row in rows
    ]


@router.post("/looms/import")
async def import_loom(body: ImportLoomRequest, service: ServiceDep) -> Json:
    """Create a loom from an exported one. No chat template is applied."""
    model, lm = await _ready_model(service, body.model_id)
    return await _store_loom(service, model, lambda: _imported(lm, body.loom_data))


@router.post("/looms/{loom_id}/rename")
async def rename_loom(loom_id: str, body: RenameLoomRequest, service: ServiceDep) -> Json:
    """Change a loom's id; its nodes keep theirs."""
    row = await _loom_row(service, loom_id)
    try:
        await asyncio.to_thread(service.looms.library.rename, row.name, body.new_id)
    except NameTaken as error:  # N8Loom reports it as any other wrong id
        raise ConfigError(str(error), hint=error.hint) from error
    service.looms.forget_rows()
    return {"old_loom_id": row.name, "new_loom_id": body.new_id}


@router.delete("/looms/{loom_id}")
async def delete_loom(loom_id: str, service: ServiceDep) -> Json:
    """Delete a loom and its nodes. `weft rm --undo` restores it."""
    row = await _loom_row(service, loom_id)
    await asyncio.to_thread(service.looms.library.remove, [row.id])
    service.looms.removed(row.id)
    return {"deleted_loom_id": row.name, "deleted_root_heddle_id": f"{row.id}-0"}


async def _loom_row(service: Service, loom_id: str) -> LoomSummary:
    """Return the summary of a loom by its N8Loom id, the name. Raises: NotFound."""
    try:
        return await service.looms.row(loom_id)
    except NotFound as error:
        raise NotFound("Loom not found", what="loom") from error


@asynccontextmanager
async def _open_loom(service: Service, loom_id: str) -> AsyncIterator[OpenLoom]:
    """Open a loom by its N8Loom id and hold its lock during the block."""
    row = await _loom_row(service, loom_id)
    async with service.looms.open_locked(row.id) as live:
        yield live


# Nodes ----------------------------------------------------------------------------------------


@asynccontextmanager
async def _open_node(
    service: Service, node_id: str, *, grows: bool = False
) -> AsyncIterator[tuple[OpenLoom, Heddle]]:
    """Open the loom of a node and hold its lock during the block. Raises: NotFound.

    node_id: `LOOM-NUMBER`. grows: nodes will be generated, so the model must be loaded.
    """
    match = _NODE.fullmatch(node_id)
    if match is None:
        raise NotFound("Node not found", what="node")
    try:
        async with service.looms.open_locked(match[1], grows=grows) as live:
            yield live, live.node(match[2])
    except NotFound as error:
        if error.what == "model":
            raise
        raise NotFound("Node not found", what="node") from error


def _node_id(live: OpenLoom, node: Heddle) -> str:
    """Return a node's id, `LOOM-NUMBER`."""
    return f"{live.stored.id}-{live.number(node)}"


def _node_ids(live: OpenLoom, nodes: Sequence[Heddle]) -> list[str]:
    """Return the ids of nodes."""
    return [_node_id(live, node) for node in nodes]


async def _nested(live: OpenLoom, top: Heddle, *, with_tokens: bool = False) -> Response:
    """Return a node and its descendants as a response of nested objects.

    with_tokens: include their token ids. No JSON library is used, as these limit the depth.
    """
    text = await live.call(lambda: "".join(_nested_json(live, top, with_tokens=with_tokens)))
    return Response(text, media_type="application/json")


def _nested_json(live: OpenLoom, top: Heddle, *, with_tokens: bool) -> list[str]:
    """Return the pieces of a subtree's JSON, without recursion."""
    out: list[str] = []
    stack: list[Heddle | str] = [top]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            out.append(node)
            continue
        data: Json = {
            "node_id": _node_id(live, node),
            "text": node.text,
            "display_text": node.display_text(),
            "terminal": node.terminal,
        }
        if with_tokens:
            data["tokens"] = node.tokens
        out.append(json.dumps(data, ensure_ascii=False)[:-1] + ', "children": [')
        stack.append("]}")
        for number, child in enumerate(reversed(node.children)):
            stack += [", ", child] if number else [child]
    return out


@router.get("/node/{node_id}")
async def read_node(node_id: str, service: ServiceDep) -> Json:
    """Return a node."""
    async with _open_node(service, node_id) as (live, node):
        return {
            "node_id": node_id,
            "text": node.text,
            "display_text": node.display_text(),
            "children_ids": _node_ids(live, node.children),
            "terminal": node.terminal,
        }


@router.get("/node/{node_id}/subtree")
async def read_subtree(node_id: str, service: ServiceDep) -> Response:
    """Return a node and its descendants, nested."""
    async with _open_node(service, node_id) as (live, node):
        return await _nested(live, node)


@router.post("/node/ramify", response_model=None)
async def ramify(body: RamifyRequest, service: ServiceDep) -> Response | Json:
    """Add children with given texts, or generate them; streams have one JSON object per line."""
    if body.text is not None:
        return await _add_texts(body, service)
    async with _open_node(service, body.node_id) as (live, node):
        loom, number = live.stored.id, live.number(node)
        n_prompt, is_ended = len(node.get_prefix_tokens()), node.terminal
    job: ServerJob | None = None
    children: list[Heddle] = []
    if not is_ended:  # N8Loom generates nothing below an ended node
        job, _ = await start_growth(
            service, loom, body.grow_fields(), lambda live: [live.node(number)], ACTOR
        )
        children = [pending.child for each in job.growth_tasks for pending in each.growth.branches]
    if body.stream:
        lines = _stream_lines(service, job, loom, children, n_prompt)
        return StreamingResponse(lines, media_type="application/json")
    if job is not None:
        await job.done.wait()
        if job.error is not None:
            raise job.error
    ids = await _existing_ids(service, loom, children)
    return {"node_id": body.node_id, "created_children": ids}


async def _add_texts(body: RamifyRequest, service: Service) -> Json:
    """Add children with given texts; return their ids."""
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    check_limit("text", len(texts), service.config.limits.texts)
    if body.stream:
        raise RequestError(
            400,
            "invalid_parameter",
            "stream applies to generation only; leave it out when adding texts",
        )
    async with _open_node(service, body.node_id, grows=True) as (live, node):
        live.check_not_growing(node)

        def add() -> None:
            children: list[Heddle] = []
            try:
                for text in texts:
                    children.append(node.add(text))
            except Exception:
                for child in children:
                    child.remove()
                raise

        change = await live.change("add", add, ACTOR)
        return {"node_id": body.node_id, "created_children": _node_ids(live, change.added)}


async def _existing_ids(service: Service, loom: str, children: Sequence[Heddle]) -> list[str]:
    """Return the ids (`LOOM-NUMBER`) of those children that are in the tree."""
    async with service.looms.open_locked(loom) as live:
        return _node_ids(
            live, [child for child in children if live.number(child) > 0 and _is_in_tree(child)]
        )


def _is_in_tree(child: Heddle) -> bool:
    """Return True if the node was not removed."""
    return child.parent is not None and any(each is child for each in child.parent.children)


async def _stream_lines(
    service: Service,
    job: ServerJob | None,
    loom: str,
    children: Sequence[Heddle],
    n_prompt: int,
) -> AsyncIterator[bytes]:
    """Yield JSON lines about children that are being generated, at most 20 per second.

    A line is sent when new tokens exist; the last one has the result.

    job: the job that generates; None if the children are given texts. loom: id of the loom.
    n_prompt: number of tokens of the parent's path.
    """
    n_sent = 0
    while job is not None and not job.done.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(job.done.wait(), TICK_S)
        if (n_tokens := sum(len(child.tokens) for child in children)) > n_sent:
            n_sent = n_tokens
            yield _json_line({"type": "update", **_progress(children)})
    final: Json = {"type": "final", **_progress(children)}
    if job is not None and job.error is not None:
        final = {"type": "error", "detail": serialize_error(job.error)[1]["message"]}
    ids = await _existing_ids(service, loom, children)
    yield _json_line(
        {
            **final,
            "generated_lengths": [len(child.tokens) for child in children],
            "total_prompt_len": n_prompt,
            "prompt_cache": None,
            "children": len(ids),
            "children_ids": ids,
        }
    )


def _progress(children: Sequence[Heddle]) -> Json:
    """Return the texts of growing children as N8Loom's progress object."""
    return {
        "tokens": [child.tokens for child in children],
        "decoded_texts": [child.text for child in children],
        "ended": [child.finish_reason == "stop" for child in children],
    }


def _json_line(data: Json) -> bytes:
    """Encode an object as one line of JSON."""
    return (json.dumps(data, ensure_ascii=False) + "\n").encode("utf-8", "replace")


@router.post("/node/clip")
async def clip_node(body: ClipRequest, service: ServiceDep) -> Json:
    """Keep a node's first tokens and remove its children."""
    await _cut(service, body.node_id, "clip", lambda node: node.clip(body.token_limit))
    return {"node_id": body.node_id, "clipped_to": body.token_limit}


@router.post("/node/trim")
async def trim_node(body: TrimRequest, service: ServiceDep) -> Json:
    """Drop a node's last tokens and remove its children."""
    await _cut(service, body.node_id, "clip", lambda node: node.trim(body.token_trim))
    return {"node_id": body.node_id, "trimmed_tokens": body.token_trim}


async def _cut(service: Service, node_id: str, kind: str, cut: Callable[[Heddle], Any]) -> None:
    """Shorten a node by `cut` as one operation. kind: the operation, for the log."""
    async with _open_node(service, node_id, grows=True) as (live, node):
        live.check_nothing_grows(node)
        live.drop_growing(node)
        await live.change(kind, lambda: cut(node), ACTOR)


@router.delete("/node/{node_id}")
async def delete_node(node_id: str, service: ServiceDep) -> Json:
    """Remove a node and its descendants."""
    async with _open_node(service, node_id) as (live, node):
        if node.parent is None:
            raise RequestError(400, "root_not_deletable", "Cannot delete root node")
        if live.is_growing(node):
            live.check_nothing_grows(node)
        descendants = [_node_id(live, other) for other in preorder(node) if other is not node]
        live.drop_growing(node)
        await live.change("remove", node.remove, ACTOR)
        return {"node_id": node_id, "deleted_children": descendants}


@router.get("/static/index.html", include_in_schema=False)
async def read_static() -> Response:
    """Redirect N8Loom's address of its page to the page."""
    return RedirectResponse("/")


# Importing ------------------------------------------------------------------------------------


def _imported(lm: LM, data: Json) -> Loom:
    """Return a loom of nested nodes in N8Loom's format.

    Tokens are used if they are valid for the model; otherwise the texts are tokenized.

    Raises: ConfigError for an invalid tree.
    """
    ids = _imported_token_ids(lm, data, is_root=True)
    loom = Loom(lm, ids)
    loom.terminal = bool(data.get("terminal", False))
    stack: list[tuple[Heddle, Json, int]] = [(loom, data, 0)]
    while stack:
        node, fields, depth = stack.pop()
        children = fields.get("children", [])
        if not isinstance(children, list) or not all(isinstance(each, dict) for each in children):
            raise ConfigError("loom_data: 'children' is a list of nodes")
        if depth > _MAX_DEPTH:
            raise ConfigError(f"loom_data is nested deeper than {_MAX_DEPTH} nodes")
        for child in children:
            added = node.add(_imported_token_ids(lm, child))
            added.terminal = bool(child.get("terminal", False))
            if added.terminal:
                added.finish_reason = "stop"
            stack.append((added, child, depth + 1))
    return loom


def _imported_token_ids(lm: LM, fields: Json, *, is_root: bool = False) -> list[int]:
    """Return the valid token ids of an exported node; else those of its text."""
    text, tokens = fields.get("text", ""), fields.get("tokens")
    if not isinstance(text, str):
        raise ConfigError("loom_data: 'text' of a node is a text")
    if tokens is not None:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ConfigError("loom_data: 'tokens' of a node is a list of token ids")
        in_vocabulary = all(0 <= token < lm.text.n_vocab for token in tokens)
        # Tokens of another model decode to other texts; then the text is used.
        if in_vocabulary and lm.text.decode(tokens, first=is_root) == text:
            return list(tokens)
    if is_root:
        return lm.text.encode(text or "Imported Loom", special=True, add_bos=False)
    return lm.text.continuation(text, special=True) if text else []
