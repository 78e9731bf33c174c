"""Changing a tree: adding, editing, removing, cutting and moving nodes; each is one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from ....errors import ConfigError, TreeError
from ....loom import Heddle, Loom
from ....loom.node import is_below
from ...api.looms import LoomObject
from ...api.nodes import (
    AddNode,
    Changed,
    ClipNode,
    CopyNode,
    EditNode,
    ForkNode,
    MoveNode,
    SplitNode,
)
from ...store.file import mark_of
from ..dependencies import ERRORS, Actor, IfMatch, LoomName, NodeName
from ..edits import add_message, copy_below, edit_message, fork, loom_below, move, token_before_char
from ..errors import RequestError
from ..limits import check_limit
from ..open_loom import ExpectedRevision, OpenLoom
from ..serializers import model_response, to_loom_object
from ..service import Service, ServiceDep
from .looms import changed_reply

router = APIRouter(prefix="/api/v1/looms/{loom}", tags=["edits"], responses=ERRORS)


async def changed(
    live: OpenLoom,
    kind: str,
    edit: Callable[[], Any],
    actor: str,
    *,
    seen: ExpectedRevision | None = None,
    status: int = 200,
) -> Response:
    """Edit a tree as one operation, and answer with what it did."""
    change = await live.change(kind, edit, actor, seen)
    return model_response(changed_reply(live, change), rev=live.kept.rev, status=status)


@router.post("/nodes", status_code=201, response_model=Changed)
async def add_node(loom: LoomName, asked: AddNode, service: ServiceDep, actor: Actor) -> Response:
    """Add what somebody wrote below a node: one child, or several."""
    if asked.texts is not None:
        check_limit("texts", len(asked.texts), service.config.limits.texts)
    async with service.looms.open_locked(loom, grows=True) as live:
        parent = live.node(asked.parent)
        live.check_not_growing(parent)
        return await changed(live, "add", lambda: _add(live, parent, asked), actor, status=201)


def _add(live: OpenLoom, parent: Heddle, asked: AddNode) -> None:
    special = asked.special or None
    if asked.message is not None:
        add_message(parent, asked.message)
    elif asked.token_ids is not None:
        parent.add(asked.token_ids)
    else:
        made: list[Heddle] = []
        try:
            for text in [asked.text] if asked.texts is None else asked.texts:
                made.append(parent.add(text or "", special=special))
        except Exception:
            for child in made:
                child.remove()
            raise


@router.patch("/nodes/{node}", response_model=Changed)
async def edit_node(
    loom: LoomName,
    node: NodeName,
    asked: EditNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Change a node. A new text makes a sibling of it; with `in_place` it stands in its place."""
    needs_model = asked.text is not None or asked.message is not None
    async with service.looms.open_locked(loom, grows=needs_model) as live:
        found, _ = seen = await _seen(live, node, if_match)
        live.check_not_growing(found)
        if needs_model and asked.in_place:
            live.check_nothing_grows(found)
            _check_nothing_grows_below(live, found)
        if "bookmark" in asked.model_fields_set:
            await live.commit_finished()
            label = asked.bookmark
            same = live.unchanged(seen)
            change = await live.run_and_publish(
                lambda: live.kept.bookmark(found, label, actor=actor, unchanged=same)
            )
            if asked.model_fields_set <= {"bookmark", "in_place"}:
                return model_response(changed_reply(live, change), rev=live.kept.rev)
            if if_match is not None:
                seen = ExpectedRevision(found, live.kept.rev)  # it was changed by this very call
        return await changed(live, "edit", lambda: _edit(found, asked), actor, seen=seen)


def _edit(node: Heddle, asked: EditNode) -> None:
    if asked.text is not None:
        if asked.in_place:
            node.text = asked.text
            if isinstance(node, Loom) and not node.chat_template_used:
                node.user_prompt = asked.text
        elif node.parent is None:
            raise ConfigError("the root has no siblings; give in_place to change the prompt")
        else:
            node = node.parent.add(asked.text)
    elif asked.message is not None:
        node = edit_message(node, asked.message, in_place=asked.in_place)
    if "score" in asked.model_fields_set:
        node.score = asked.score
    if "meta" in asked.model_fields_set:
        node.meta = dict(asked.meta or {})


def _check_nothing_grows_below(live: OpenLoom, top: Heddle) -> None:
    for branches in live.growing:
        for parent in branches.parents:
            if is_below(parent, top):
                live.check_nothing_grows(parent)


What = Literal["node", "children", "siblings", "others"]


@router.delete("/nodes/{node}", response_model=Changed)
async def remove_node(
    loom: LoomName,
    node: NodeName,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
    what: Annotated[
        What,
        Query(
            description="node: it and all below; children: all below it; siblings: those beside it;"
            " others: all but the path to it and what stands below."
        ),
    ] = "node",
    also: Annotated[
        list[Annotated[str, Query(max_length=64)]] | None,
        Query(max_length=1000, description="More nodes that go with it, in one operation."),
    ] = None,
) -> Response:
    """Remove nodes. What grows below them is cancelled, and nothing of it is kept."""
    async with service.looms.open_locked(loom) as live:
        found, _ = seen = await _seen(live, node, if_match)
        await live.commit_finished()
        if live.is_growing(found):
            live.cancel_node(found)
            return await changed(live, "remove", lambda: None, actor, seen=seen)
        going = _going(found, what)
        for other in map(live.node, also or ()):
            going += [each for each in _going(other, what) if each not in going]
        # What stands below another of them goes with it.
        going = [each for each in going if not any(up in going for up in each.path[:-1])]
        for each in going:
            live.drop_growing(each)
        if what == "children":
            live.drop_growing(found)

        def edit() -> None:
            for each in going:
                each.remove()

        return await changed(live, "remove", edit, actor, seen=seen)


def _going(node: Heddle, what: What) -> list[Heddle]:
    """Return the tops of what is to go."""
    if what == "children":
        return list(node.children)
    if node.parent is None:
        if what == "node":
            raise RequestError(
                409, "root_not_deletable", "the root cannot be removed; delete the loom instead"
            )
        return []
    if what == "node":
        return [node]
    if what == "siblings":
        return [each for each in node.parent.children if each is not node]
    path = node.path
    return [
        each
        for parent, kept in zip(path, path[1:], strict=False)
        for each in parent.children
        if each is not kept
    ]


@router.post("/nodes/{node}/fork", status_code=201, response_model=Changed)
async def fork_node(
    loom: LoomName, node: NodeName, asked: ForkNode, service: ServiceDep, actor: Actor
) -> Response:
    """Add a sibling that shares a node's first tokens; nothing of these is computed again."""
    async with service.looms.open_locked(loom, grows=True) as live:
        found = live.node(node)
        live.check_not_growing(found)
        instead = asked.token_id if asked.text is None else asked.text
        return await changed(
            live, "fork", lambda: fork(found, asked.at_token, instead), actor, status=201
        )


@router.post("/nodes/{node}/split", response_model=Changed)
async def split_node(
    loom: LoomName,
    node: NodeName,
    asked: SplitNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Cut a node in two; the lower one takes the children."""
    async with service.looms.open_locked(loom, grows=True) as live:
        found, _ = seen = await _free(live, node, if_match)

        def edit() -> None:
            at, name = asked.at_token, "at_char" if asked.at_token is None else "at_token"
            try:
                found.split(token_before_char(found, asked.at_char or 0) if at is None else at)
            except ConfigError as error:
                raise RequestError(400, "invalid_parameter", str(error), param=name) from error

        return await changed(live, "split", edit, actor, seen=seen)


@router.post("/nodes/{node}/merge", response_model=Changed)
async def merge_node(
    loom: LoomName, node: NodeName, service: ServiceDep, actor: Actor, if_match: IfMatch
) -> Response:
    """Join a node with its parent, whose only child it is: what a split did, taken back."""
    async with service.looms.open_locked(loom) as live:
        found, _ = seen = await _free(live, node, if_match)
        parent = found.parent
        if parent is None:
            raise TreeError("the root has no parent to be joined with")
        live.check_nothing_grows(parent)
        return await changed(live, "merge", parent.merge, actor, seen=seen)


@router.post("/nodes/{node}/clip", response_model=Changed)
async def clip_node(
    loom: LoomName,
    node: NodeName,
    asked: ClipNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Cut a node short. What is cut off becomes a child, unless it is to be dropped."""
    async with service.looms.open_locked(loom) as live:
        found = live.node(node)
        # The text of some of its tokens; that of none or all of them is known.
        needs_tokenizer = found.lm is None and 0 < _kept(found, asked) < len(found.tokens)
    async with service.looms.open_locked(loom, grows=needs_tokenizer) as live:
        found, _ = seen = await _free(live, node, if_match)
        n, keep = len(found.tokens), _kept(found, asked)
        if asked.children == "drop":
            live.drop_growing(found)

        def edit() -> None:
            if asked.children == "drop":
                found.clip(keep)
            elif 0 < keep < n:
                found.split(keep)
            elif keep == 0:
                raise ConfigError("nothing would be left above; drop the children, or remove it")

        return await changed(live, "clip", edit, actor, seen=seen)


def _kept(node: Heddle, asked: ClipNode) -> int:
    """Return how many tokens a clip keeps. Raises: ConfigError for more than there are."""
    n = len(node.tokens)
    keep = asked.keep if asked.keep is not None else n - (asked.drop or 0)
    if not 0 <= keep <= n:
        name = "drop" if asked.keep is None else "keep"
        raise ConfigError(f"{name} is {getattr(asked, name)}; the node has {n} tokens")
    return keep


async def _seen(live: OpenLoom, given: str, if_match: int | None) -> ExpectedRevision:
    """Return a node that is as its author saw it, as far as any server knows.

    Raises: NotFound; Conflict.
    """
    found = live.node(given)
    if if_match is not None:
        await live.sync(now=True)
        live.check_rev(found, if_match)
    return ExpectedRevision(found, if_match)


async def _free(live: OpenLoom, given: str, if_match: int | None) -> ExpectedRevision:
    """Return a node that may be cut. Raises: NotFound; Conflict."""
    seen = await _seen(live, given, if_match)
    live.check_nothing_grows(seen.node)
    return seen


@router.post("/nodes/{node}/move", response_model=Changed)
async def move_node(
    loom: LoomName,
    node: NodeName,
    asked: MoveNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Put a node and all below it elsewhere; it continues its new parent from now on."""
    async with service.looms.open_locked(loom) as live:
        found, _ = seen = await _free(live, node, if_match)
        _check_nothing_grows_below(live, found)
        parent = live.node(asked.parent)
        live.check_not_growing(parent)
        return await changed(
            live, "move", lambda: move(found, parent, asked.index), actor, seen=seen
        )


@router.post("/nodes/{node}/copy", status_code=201, response_model=Changed | LoomObject)
async def copy_node(
    loom: LoomName, node: NodeName, asked: CopyNode, service: ServiceDep, actor: Actor
) -> Response:
    """Copy a node and all below it: to elsewhere here, into another loom, or as a new loom.

    Only a copy into a loom of another model needs that model.
    """
    async with service.looms.open_locked(loom) as live:
        found = live.node(node)
        live.check_not_growing(found)
        if asked.new_loom is not None:
            return await _copy_to_new_loom(service, live, found, asked.new_loom)
        row = None if asked.to_loom is None else await service.looms.row(asked.to_loom)
        if row is None or row.id == live.kept.id:
            target = live.node(asked.parent)
            live.check_not_growing(target)
            return await changed(live, "copy", lambda: copy_below(target, found), actor, status=201)
        # NOTE: a loom of its own, so that nobody holds one lock and waits for another.
        source = await live.call(lambda: service.looms.library.open(live.kept.id))
        number = live.number(found)
    with source.loom:
        async with service.looms.open_locked(row.id) as other:
            exact = mark_of(source.loom) == mark_of(other.kept.loom)
        async with service.looms.open_locked(row.id, grows=not exact) as other:
            target, top = other.node(asked.parent), source.node(number)
            other.check_not_growing(target)
            return await changed(
                other, "copy", lambda: copy_below(target, top, exact=exact), actor, status=201
            )


async def _copy_to_new_loom(service: Service, live: OpenLoom, node: Heddle, name: str) -> Response:
    def make() -> Any:
        loom = loom_below(node)
        loom.meta["model"] = live.kept.loom.meta.get("model", "")
        return service.looms.library.create(loom, name=name)

    made = service.looms.put(await live.call(make), live.lm)
    row = await service.looms.row(made.kept.id)
    return model_response(to_loom_object(row, made), rev=made.kept.rev, status=201)
