"""Routes of looms: list, create, rename, remove, undo and search."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import regex
from fastapi import APIRouter, Query, Response

from ....errors import StoreError, StoreUnavailable
from ....loom import Heddle, Loom
from ....loom.author_note import AUTHOR_NOTE, note_of
from ....loom.node import preorder
from ...api.looms import (
    CreateLoom,
    EditLoom,
    HitList,
    HitObject,
    LoomObject,
    LoomPage,
    OperationList,
    OperationObject,
    RestoredLooms,
)
from ...api.nodes import Changed
from ...store.change import Change
from ...store.search import Hit
from ..dependencies import CHECKS, ERRORS, EVENTS, Actor, LastEvent, LoomName
from ..errors import RequestError
from ..events import EventStream
from ..open_loom import OpenLoom
from ..serializers import (
    iso_timestamp,
    model_response,
    serialize_nodes,
    to_loom_entry,
    to_loom_object,
)
from ..service import Service, ServiceDep

router = APIRouter(prefix="/api/v1", tags=["looms"], responses=ERRORS, dependencies=CHECKS)
_PATTERN_S = 2.0  # seconds that a search by pattern may take
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of items.")]


@router.get("/looms", response_model=LoomPage)
async def list_looms(
    service: ServiceDep,
    search: Annotated[
        str | None,
        Query(max_length=500, description="Only looms whose name, title or prompt contains it."),
    ] = None,
    limit: Limit = 50,
    after: Annotated[
        str | None, Query(max_length=300, description="`next` of the last page.")
    ] = None,
) -> Response:
    """List the looms, last changed first."""
    looms = service.looms
    rows = await asyncio.to_thread(
        lambda: looms.library.looms(search=search, limit=limit + 1, after=after)
    )
    data = [to_loom_entry(row, looms.get_open(row.id)) for row in rows[:limit]]
    return model_response(
        LoomPage(data=data, next=rows[limit - 1].name if len(rows) > limit else None)
    )


@router.post("/looms", status_code=201, response_model=LoomObject)
async def create_loom(body: CreateLoom, service: ServiceDep) -> Response:
    """Create a loom from a prompt. Nothing is computed yet."""
    model = await service.models.available(body.model)
    with model.in_use() as lm:
        prompt: Any = body.prompt if body.prompt is not None else body.messages
        prompt = body.token_ids if prompt is None else prompt
        special = body.special or None

        def build() -> Loom:
            loom = Loom(lm, prompt, template=body.template, special=special, system=body.system)
            note_of(body.meta)  # raises for a wrong note
            loom.meta.update(body.meta)
            loom.meta["model"] = model.source
            return loom

        loom = await asyncio.to_thread(build)
        library = service.looms.library
        stored = await asyncio.to_thread(library.create, loom, name=body.name, title=body.title)
        live = service.looms.put(stored, lm)
    row = await service.looms.row(live.stored.id)
    return model_response(to_loom_object(row, live), rev=live.stored.rev, status=201)


@router.post("/looms/restore", response_model=RestoredLooms)
async def restore_looms(
    service: ServiceDep,
    nodes_of: Annotated[
        str | None,
        Query(max_length=300, description="Also restore nodes of this loom, if removed last."),
    ] = None,
    only_nodes: Annotated[
        bool, Query(description="Restore only nodes of that loom, no looms.")
    ] = False,
) -> Response:
    """Restore what was removed last: looms under their own names, or nodes."""
    library = service.looms.library
    if nodes_of is not None:
        nodes_of = (await service.looms.row(nodes_of)).id
    elif only_nodes:
        message = "only_nodes needs nodes_of, the loom whose nodes to restore"
        raise RequestError(400, "invalid_parameter", message, param="only_nodes")
    try:
        names = await asyncio.to_thread(
            lambda: library.restore_last(nodes_of, only_nodes=only_nodes)
        )
        service.looms.forget_rows()
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise RequestError(409, "nothing_to_restore", str(error)) from error
    rows = [await service.looms.row(name) for _, name in names]
    data = [to_loom_entry(row, service.looms.get_open(row.id)) for row in rows]
    return model_response(RestoredLooms(data=data, names=[old_name for old_name, _ in names]))


@router.get("/looms/{loom}", response_model=LoomObject)
async def read_loom(loom: LoomName, service: ServiceDep) -> Response:
    """Return a loom's metadata."""
    async with service.looms.open_locked(loom) as live:
        row = await service.looms.row_now(live.stored.id)
        return model_response(to_loom_object(row, live), rev=live.stored.rev)


@router.patch("/looms/{loom}", response_model=LoomObject)
async def edit_loom(loom: LoomName, body: EditLoom, service: ServiceDep, actor: Actor) -> Response:
    """Change a loom's name, title or notes."""
    async with service.looms.open_locked(loom) as live:
        if "meta" in body.model_fields_set:
            meta = body.meta or {}
            is_author_note = note_of(meta) != live.stored.loom.note  # raises for a wrong note
            reserved = {
                name: value
                for name, value in live.stored.loom.meta.items()
                if name in _RESERVED_META
            }

            def edit() -> None:
                live.stored.loom.meta = {**meta, **reserved}

            await live.change(AUTHOR_NOTE if is_author_note else "note", edit, actor)
        is_same_name = body.name in (None, live.stored.name)
        if not (is_same_name and body.title in (None, live.stored.title)):
            rename = service.looms.library.rename
            await asyncio.to_thread(rename, live.stored.id, body.name, title=body.title)
            service.looms.forget_rows()
            await live.sync(now=True)
        row = await service.looms.row_now(live.stored.id)
        return model_response(to_loom_object(row, live), rev=live.stored.rev)


_RESERVED_META = ("model", "engine")


@router.delete("/looms/{loom}", response_model=LoomObject)
async def remove_loom(
    loom: LoomName,
    service: ServiceDep,
    purge: Annotated[bool, Query(description="Delete permanently: it cannot be restored.")] = False,
) -> Response:
    """Remove a loom and cancel its growth. POST /looms/restore restores it."""
    looms = service.looms
    row = await looms.row_now(loom)
    await asyncio.to_thread(looms.library.remove, [row.id])
    looms.removed(row.id)
    if purge:
        await asyncio.to_thread(looms.library.purge, [row.id])
    return model_response(to_loom_entry(row, None))


# The log --------------------------------------------------------------------------------------


@router.post("/looms/{loom}/undo", response_model=Changed)
async def undo(loom: LoomName, service: ServiceDep) -> Response:
    """Undo the loom's last operation, by any author."""
    return await _undo_or_redo(service, loom, "undo")


@router.post("/looms/{loom}/redo", response_model=Changed)
async def redo(loom: LoomName, service: ServiceDep) -> Response:
    """Redo the operation that was undone last."""
    return await _undo_or_redo(service, loom, "redo")


async def _undo_or_redo(service: Service, loom: str, kind: Literal["undo", "redo"]) -> Response:
    """Undo or redo the last operation, and return the response about the change."""
    async with service.looms.open_locked(loom) as live:
        leave, running = live.ended(), {job.id for job in live.jobs}
        try:
            if kind == "undo":
                change = await live.run_and_publish(
                    lambda: live.stored.undo(leave=leave, running=running)
                )
            else:
                change = await live.run_and_publish(lambda: live.stored.redo(leave=leave))
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise RequestError(409, f"cannot_{kind}", str(error), hint=error.hint) from error
        return model_response(changed_reply(live, change), rev=live.stored.rev)


def changed_reply(live: OpenLoom, change: Change) -> Changed:
    """Convert a change of the tree to a Changed object."""
    numbers = live.stored.numbers()
    return Changed.model_validate(
        {
            "rev": change.rev,
            "kind": change.kind,
            "added": serialize_nodes(live, change.added),
            "changed": serialize_nodes(live, change.changed),
            "removed": [numbers.get(node_id, -1) for node_id in change.removed],
        }
    )


@router.get("/looms/{loom}/history", response_model=OperationList)
async def read_history(loom: LoomName, service: ServiceDep, limit: Limit = 50) -> Response:
    """List the loom's operations, latest first."""
    async with service.looms.open_locked(loom) as live:
        operations = await live.call(lambda: live.stored.history(limit))
    rows = [
        OperationObject(
            kind=operation.kind,
            actor=operation.actor,
            at=iso_timestamp(operation.at),
            rev=operation.rev,
            state=operation.state,
            n_added=operation.n_added,
            n_removed=operation.n_removed,
            n_changed=operation.n_changed,
            model=operation.model,
        )
        for operation in operations
    ]
    return model_response(OperationList(data=rows))


@router.get("/looms/{loom}/events", response_class=Response, responses=EVENTS)
async def read_loom_events(
    loom: LoomName,
    service: ServiceDep,
    after: LastEvent,
    tokens: Annotated[
        bool, Query(description="Include the events of its jobs, after a snapshot of all growth.")
    ] = False,
) -> EventStream:
    """Stream the changes of a loom, from now on or after the last event received."""
    async with service.looms.open_locked(loom) as live:
        if tokens:
            return EventStream(live.feed.frames(after))
        at = live.events.last if after is None else after
        return EventStream(live.events.frames(at))


# Search ---------------------------------------------------------------------------------------


@router.get("/search", response_model=HitList)
async def search_all(
    service: ServiceDep,
    q: Annotated[str, Query(min_length=1, max_length=500, description="Words to find.")],
    loom: Annotated[
        str | None, Query(max_length=300, description="Name or id of a loom: search only this one.")
    ] = None,
    limit: Limit = 50,
) -> Response:
    """Search for words in the texts of all looms."""
    library = service.looms.library
    loom_id = None if loom is None else (await service.looms.row(loom)).id
    max_hits = min(limit + 1, 1000)
    hits = await asyncio.to_thread(lambda: library.find(q, loom=loom_id, limit=max_hits))
    return model_response(
        HitList(data=[serialize_hit(hit) for hit in hits[:limit]], more=len(hits) > limit)
    )


def serialize_hit(hit: Hit) -> HitObject:
    """Convert a search result of the database to a HitObject."""
    return HitObject(
        loom=hit.loom_id,
        name=hit.loom,
        title=hit.title,
        node=hit.number,
        text=hit.snippet,
        spans=hit.marks,
    )


@router.get("/looms/{loom}/search", response_model=HitList)
async def search_loom(
    loom: LoomName,
    service: ServiceDep,
    q: Annotated[str, Query(max_length=500, description="A text, or a pattern with `regex`.")] = "",
    is_pattern: Annotated[
        bool, Query(alias="regex", description="q is a regular expression.")
    ] = False,
    case: Annotated[bool, Query(description="Match upper and lower case exactly.")] = False,
    filter: Annotated[
        list[Literal["bookmarked", "human", "model", "ended", "leaf"]] | None,
        Query(description="Only nodes of these kinds; repeatable."),
    ] = None,
    limit: Limit = 200,
) -> Response:
    """Search the texts of one loom's nodes, optionally by pattern and kind."""
    pattern = pattern_of(q, is_pattern=is_pattern, case=case)
    async with service.looms.open_locked(loom) as live:
        hits = await live.call(lambda: find_in_loom(live, pattern, filter or [], limit + 1))
    return model_response(HitList(data=hits[:limit], more=len(hits) > limit))


def pattern_of(text: str, *, is_pattern: bool, case: bool) -> regex.Pattern[str]:
    """Compile the pattern of a search. Raises: RequestError for an invalid regular expression.

    is_pattern: `text` is a regular expression. case: match upper and lower case exactly.
    """
    try:
        return regex.compile(text if is_pattern else regex.escape(text), 0 if case else regex.I)
    except (regex.error, RecursionError, OverflowError) as error:
        raise RequestError(
            400, "invalid_parameter", f"q is not a valid regular expression: {error}", param="q"
        ) from error


def find_in_loom(
    live: OpenLoom, pattern: regex.Pattern[str], kinds: Sequence[str], max_hits: int
) -> list[HitObject]:
    """Return the nodes whose text contains a match of the pattern, in the order of the tree.

    An empty pattern matches every node. Cost: O(text).

    Args:
        kinds: only nodes that are of all these kinds, such as "leaf".
        max_hits: maximum number of nodes.

    Raises: RequestError for a pattern with catastrophic backtracking.
    """
    bookmarks = live.stored.bookmarks()
    hits: list[HitObject] = []
    deadline = time.monotonic() + _PATTERN_S
    for node in preorder(live.stored.loom):
        if not all(_is_kind(live, node, kind, bookmarks) for kind in kinds):
            continue
        try:
            remaining_s = max(deadline - time.monotonic(), 0.001)
            # NOTE: concurrent releases the GIL, so that the event loop continues.
            matches = pattern.finditer(node.text, timeout=remaining_s, concurrent=True)
            spans = [match.span() for match in matches]
        except TimeoutError as error:
            raise RequestError(
                400, "pattern_too_slow", f"this pattern takes longer than {_PATTERN_S:.0f} s",
                hint="nested repetitions such as (a+)+ are exponential; simplify them",
                param="q",
            ) from error  # fmt: skip
        if spans or not pattern.pattern:
            stored = live.stored
            hits.append(
                HitObject(
                    loom=stored.id,
                    name=stored.name,
                    title=stored.title,
                    node=live.number(node),
                    text=node.text,
                    spans=spans[:100] if pattern.pattern else [],
                )
            )
            if len(hits) >= max_hits:
                break
    return hits


def _is_kind(live: OpenLoom, node: Heddle, kind: str, marks: dict[int, str]) -> bool:
    """Return True if a node is of a kind, such as "leaf". marks: bookmarks by number."""
    if kind == "bookmarked":
        return live.number(node) in marks
    if kind == "ended":
        return node.terminal
    if kind == "leaf":
        return not node.children
    return (node.params is not None) == (kind == "model")
