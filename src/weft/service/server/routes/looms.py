"""Looms: lists, making, renaming, removing, the log, and search."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import regex
from fastapi import APIRouter, Query, Response

from ....errors import ConfigError, StoreError, StoreUnavailable
from ....loom import Heddle, Loom
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
from ...store.find import Hit
from ..dependencies import ERRORS, EVENTS, Actor, LastEvent, LoomName
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

router = APIRouter(prefix="/api/v1", tags=["looms"], responses=ERRORS)
_PATTERN_S = 2.0  # that a search by pattern may take
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]


@router.get("/looms", response_model=LoomPage)
async def list_looms(
    service: ServiceDep,
    search: Annotated[
        str | None, Query(max_length=500, description="Only those whose name or prompt has it.")
    ] = None,
    limit: Limit = 50,
    after: Annotated[str | None, Query(max_length=300, description="`next` of a page.")] = None,
) -> Response:
    """List the looms, the one changed last first."""
    looms = service.looms
    rows = await asyncio.to_thread(
        lambda: looms.library.looms(search=search, limit=limit + 1, after=after)
    )
    data = [to_loom_entry(row, looms.open_one(row.id)) for row in rows[:limit]]
    return model_response(
        LoomPage(data=data, next=rows[limit - 1].name if len(rows) > limit else None)
    )


@router.post("/looms", status_code=201, response_model=LoomObject)
async def create_loom(asked: CreateLoom, service: ServiceDep) -> Response:
    """Make a loom of a prompt. Nothing is computed yet."""
    model = await service.models.available(asked.model)
    with model.in_use() as lm:
        given: Any = asked.prompt if asked.prompt is not None else asked.messages
        given = asked.token_ids if given is None else given
        special = asked.special or None

        def make() -> Loom:
            loom = Loom(lm, given, template=asked.template, special=special, system=asked.system)
            loom.meta.update(asked.meta)
            loom.meta["model"] = model.source
            return loom

        loom = await asyncio.to_thread(make)
        library = service.looms.library
        try:
            kept = await asyncio.to_thread(library.create, loom, name=asked.name)
        except ConfigError as error:
            if asked.name is not None and "already" in str(error):
                raise RequestError(409, "name_taken", str(error), param="name") from error
            raise
        live = service.looms.put(kept, lm)
    row = await service.looms.row(live.kept.id)
    return model_response(to_loom_object(row, live), rev=live.kept.rev, status=201)


@router.post("/looms/restore", response_model=RestoredLooms)
async def restore_looms(
    service: ServiceDep,
    nodes_of: Annotated[
        str | None,
        Query(max_length=300, description="Also nodes of this loom, if they were removed last."),
    ] = None,
    only_nodes: Annotated[bool, Query(description="Of that loom only.")] = False,
) -> Response:
    """Bring back what was removed last: the same looms, under their own names, or nodes."""
    library = service.looms.library
    if nodes_of is not None:
        nodes_of = (await service.looms.row(nodes_of)).id
    elif only_nodes:
        message = "only_nodes needs nodes_of: it says of which loom"
        raise RequestError(400, "invalid_parameter", message, param="only_nodes")
    try:
        names = await asyncio.to_thread(lambda: library.bring_back(nodes_of, only_nodes=only_nodes))
        service.looms.forget_rows()
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise RequestError(409, "nothing_to_restore", str(error)) from error
    rows = [await service.looms.row(name) for _, name in names]
    data = [to_loom_entry(row, service.looms.open_one(row.id)) for row in rows]
    return model_response(RestoredLooms(data=data, names=[before for before, _ in names]))


@router.get("/looms/{loom}", response_model=LoomObject)
async def read_loom(loom: LoomName, service: ServiceDep) -> Response:
    """Say what a loom is."""
    async with service.looms.open_locked(loom) as live:
        row = await service.looms.row_now(live.kept.id)
        return model_response(to_loom_object(row, live), rev=live.kept.rev)


@router.patch("/looms/{loom}", response_model=LoomObject)
async def edit_loom(loom: LoomName, asked: EditLoom, service: ServiceDep, actor: Actor) -> Response:
    """Rename a loom, or change its notes."""
    async with service.looms.open_locked(loom) as live:
        if "meta" in asked.model_fields_set:
            meta = asked.meta or {}
            own = {name: value for name, value in live.kept.loom.meta.items() if name in _OURS}

            def edit() -> None:
                live.kept.loom.meta = {**meta, **own}

            await live.change("edit", edit, actor)
        if asked.name is not None and asked.name != live.kept.name:
            try:
                await asyncio.to_thread(service.looms.library.rename, live.kept.name, asked.name)
            except ConfigError as error:
                status = 409 if "already" in str(error) else 400
                code = "name_taken" if status == 409 else "invalid_parameter"
                raise RequestError(status, code, str(error), param="name") from error
            service.looms.forget_rows()
            await live.sync(now=True)
        row = await service.looms.row_now(live.kept.id)
        return model_response(to_loom_object(row, live), rev=live.kept.rev)


_OURS = ("model", "engine")


@router.delete("/looms/{loom}", response_model=LoomObject)
async def remove_loom(
    loom: LoomName,
    service: ServiceDep,
    purge: Annotated[bool, Query(description="For good: it cannot be brought back.")] = False,
) -> Response:
    """Remove a loom. What grows in it is cancelled. POST /looms/restore brings it back."""
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
    """Take back the loom's last operation, whoever did it."""
    return await _turn(service, loom, "undo")


@router.post("/looms/{loom}/redo", response_model=Changed)
async def redo(loom: LoomName, service: ServiceDep) -> Response:
    """Do again what was undone last."""
    return await _turn(service, loom, "redo")


async def _turn(service: Service, loom: str, kind: Literal["undo", "redo"]) -> Response:
    async with service.looms.open_locked(loom) as live:
        leave, running = live.ended(), {job.id for job in live.jobs}
        try:
            if kind == "undo":
                change = await live.run_and_publish(
                    lambda: live.kept.undo(leave=leave, running=running)
                )
            else:
                change = await live.run_and_publish(lambda: live.kept.redo(leave=leave))
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise RequestError(409, f"cannot_{kind}", str(error), hint=error.hint) from error
        return model_response(changed_reply(live, change), rev=live.kept.rev)


def changed_reply(live: OpenLoom, change: Change) -> Changed:
    """Return what a change did."""
    numbers = live.kept.numbers()
    return Changed.model_validate(
        {
            "rev": change.rev,
            "kind": change.kind,
            "added": serialize_nodes(live, change.added),
            "changed": serialize_nodes(live, change.changed),
            "removed": [numbers.get(each, -1) for each in change.removed],
        }
    )


@router.get("/looms/{loom}/history", response_model=OperationList)
async def read_history(loom: LoomName, service: ServiceDep, limit: Limit = 50) -> Response:
    """List the loom's operations, the last one first."""
    async with service.looms.open_locked(loom) as live:
        operations = await live.call(lambda: live.kept.history(limit))
    rows = [
        OperationObject(
            kind=each.kind,
            actor=each.actor,
            at=iso_timestamp(each.at),
            rev=each.rev,
            state=each.state,
            n_added=each.n_added,
            n_removed=each.n_removed,
            n_changed=each.n_changed,
            model=each.model,
        )
        for each in operations
    ]
    return model_response(OperationList(data=rows))


@router.get("/looms/{loom}/events", response_class=Response, responses=EVENTS)
async def read_loom_events(
    loom: LoomName,
    service: ServiceDep,
    after: LastEvent,
    tokens: Annotated[
        bool, Query(description="What its jobs tell, too, after a snapshot of all that grows.")
    ] = False,
) -> EventStream:
    """Follow a loom: every change of it, from now on, or after the last event that came."""
    async with service.looms.open_locked(loom) as live:
        if tokens:
            return EventStream(live.feed.frames(after))
        at = live.events.last if after is None else after
        return EventStream(live.events.frames(at))


# Search ---------------------------------------------------------------------------------------


@router.get("/search", response_model=HitList)
async def search_all(
    service: ServiceDep,
    q: Annotated[str, Query(min_length=1, max_length=500, description="Words.")],
    loom: Annotated[
        str | None, Query(max_length=300, description="A loom's name or id: in this one only.")
    ] = None,
    limit: Limit = 50,
) -> Response:
    """Search for words in the texts of all looms."""
    library = service.looms.library
    own = None if loom is None else (await service.looms.row(loom)).id
    most = min(limit + 1, 1000)
    hits = await asyncio.to_thread(lambda: library.find(q, loom=own, limit=most))
    return model_response(
        HitList(data=[serialize_hit(hit) for hit in hits[:limit]], more=len(hits) > limit)
    )


def serialize_hit(hit: Hit) -> HitObject:
    """Return what is told of a hit of the library."""
    return HitObject(
        loom=hit.loom_id, name=hit.loom, node=hit.number, text=hit.snippet, spans=hit.marks
    )


@router.get("/looms/{loom}/search", response_model=HitList)
async def search_loom(
    loom: LoomName,
    service: ServiceDep,
    q: Annotated[str, Query(max_length=500, description="A text, or with regex a pattern.")] = "",
    is_pattern: Annotated[
        bool, Query(alias="regex", description="q is a regular expression.")
    ] = False,
    case: Annotated[bool, Query(description="Large and small letters differ.")] = False,
    filter: Annotated[
        list[Literal["bookmarked", "human", "model", "ended", "leaf"]] | None,
        Query(description="Only such nodes; may be given again."),
    ] = None,
    limit: Limit = 200,
) -> Response:
    """Search in the texts of one loom's nodes, each by itself; also by pattern and by kind."""
    pattern = pattern_of(q, is_pattern=is_pattern, case=case)
    async with service.looms.open_locked(loom) as live:
        hits = await live.call(lambda: found_in(live, pattern, filter or [], limit + 1))
    return model_response(HitList(data=hits[:limit], more=len(hits) > limit))


def pattern_of(text: str, *, is_pattern: bool, case: bool) -> regex.Pattern[str]:
    """Return what a search looks for. Raises: Refused for a pattern that is none."""
    try:
        return regex.compile(text if is_pattern else regex.escape(text), 0 if case else regex.I)
    except (regex.error, RecursionError, OverflowError) as error:
        raise RequestError(
            400, "invalid_parameter", f"q is no regular expression: {error}", param="q"
        ) from error


def found_in(
    live: OpenLoom, pattern: regex.Pattern[str], kinds: Sequence[str], most: int
) -> list[HitObject]:
    """Return the nodes whose text matches, in the order of the tree. Cost: O(text).

    Raises: Refused for a pattern that takes for ever: some go back and forth without end.
    """
    marks = live.kept.bookmarks()
    hits: list[HitObject] = []
    until = time.monotonic() + _PATTERN_S
    for node in preorder(live.kept.loom):
        if not all(_is(live, node, kind, marks) for kind in kinds):
            continue
        try:
            left = max(until - time.monotonic(), 0.001)
            # NOTE: concurrent: others' tokens come on meanwhile.
            found = pattern.finditer(node.text, timeout=left, concurrent=True)
            spans = [match.span() for match in found]
        except TimeoutError as error:
            raise RequestError(
                400, "pattern_too_slow", f"this pattern takes longer than {_PATTERN_S:.0f} s",
                hint="repetitions within repetitions, as (a+)+, take for ever; write it simpler",
                param="q",
            ) from error  # fmt: skip
        if spans or not pattern.pattern:
            kept = live.kept
            hits.append(
                HitObject(
                    loom=kept.id,
                    name=kept.name,
                    node=live.number(node),
                    text=node.text,
                    spans=spans[:100] if pattern.pattern else [],
                )
            )
            if len(hits) >= most:
                break
    return hits


def _is(live: OpenLoom, node: Heddle, kind: str, marks: dict[int, str]) -> bool:
    if kind == "bookmarked":
        return live.number(node) in marks
    if kind == "ended":
        return node.terminal
    if kind == "leaf":
        return not node.children
    return (node.params is not None) == (kind == "model")
