"""Routes that edit a tree: add, change, remove, cut and move nodes; each is one operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from ....errors import ConfigError, TreeError
from ....loom import Heddle, Loom
from ....loom.node import is_below
from ....loom.sibling_order import RATING
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
from ...store.file import identity_of
from ...store.library import NameTaken
from ..dependencies import CHECKS, ERRORS, Actor, IfMatch, LoomName, NodeName
from ..edits import add_message, copy_below, edit_message, fork, loom_below, move, token_before_char
from ..errors import RequestError
from ..limits import check_limit
from ..models import ServedModel
from ..open_loom import ANNOTATION_KINDS, ExpectedRevision, OpenLoom
from ..other_model import loom_for
from ..serializers import model_response, to_loom_object
from ..service import Service, ServiceDep
from .looms import changed_reply

router = APIRouter(
    prefix="/api/v1/looms/{loom}", tags=["edits"], responses=ERRORS, dependencies=CHECKS
)


async def edit_and_respond(
    live: OpenLoom,
    kind: str,
    edit: Callable[[], Any],
    actor: str,
    *,
    expected: ExpectedRevision | None = None,
    status: int = 200,
) -> Response:
    """Edit a tree as one operation, and return the response that describes the change.

    Arguments as for `OpenLoom.change`. status: HTTP status of the response.
    """
    change = await live.change(kind, edit, actor, expected)
    return model_response(changed_reply(live, change), rev=live.stored.rev, status=status)


@router.post("/nodes", status_code=201, response_model=Changed)
async def add_node(loom: LoomName, body: AddNode, service: ServiceDep, actor: Actor) -> Response:
    """Add one child or several below a node."""
    if body.texts is not None:
        check_limit("texts", len(body.texts), service.config.limits.texts)
    async with service.looms.open_locked(loom, grows=True) as live:
        parent = live.node(body.parent)
        live.check_not_growing(parent)
        return await edit_and_respond(
            live, "add", lambda: _add_children(live, parent, body), actor, status=201
        )


def _add_children(live: OpenLoom, parent: Heddle, body: AddNode) -> None:
    """Add the children of an AddNode request: texts, tokens or messages."""
    special = body.special or None
    if body.message is not None:
        add_message(parent, body.message)
    elif body.token_ids is not None:
        parent.add(body.token_ids)
    else:
        children: list[Heddle] = []
        try:
            for text in [body.text] if body.texts is None else body.texts:
                children.append(parent.add(text or "", special=special))
        except Exception:
            for child in children:
                child.remove()
            raise


@router.patch("/nodes/{node}", response_model=Changed)
async def edit_node(
    loom: LoomName,
    node: NodeName,
    body: EditNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Change a node. A new text creates a sibling; with `in_place` it replaces the text."""
    needs_model = body.text is not None or body.message is not None
    async with service.looms.open_locked(loom, grows=needs_model) as live:
        tree_node, _ = expected = await _expected(live, node, if_match)
        live.check_not_growing(tree_node)
        if needs_model and body.in_place:
            live.check_nothing_grows(tree_node)
            _check_nothing_grows_below(live, tree_node)
        if "bookmark" in body.model_fields_set:
            await live.commit_finished()
            label = body.bookmark
            same = live.unchanged(expected)
            change = await live.run_and_publish(
                lambda: live.stored.bookmark(tree_node, label, actor=actor, unchanged=same)
            )
            if body.model_fields_set <= {"bookmark", "in_place"}:
                return model_response(changed_reply(live, change), rev=live.stored.rev)
            if if_match is not None:
                expected = ExpectedRevision(tree_node, live.stored.rev)  # this call has changed it
        return await edit_and_respond(
            live, _edit_kind(body), lambda: _apply_edit(tree_node, body), actor, expected=expected
        )


def _edit_kind(body: EditNode) -> str:
    """Return the operation's kind for the log: "edit" unless only one annotation changes."""
    fields = body.model_fields_set - {"in_place"}
    return ANNOTATION_KINDS.get(fields.pop(), "edit") if len(fields) == 1 else "edit"


def _apply_edit(node: Heddle, body: EditNode) -> None:
    """Apply the fields of an EditNode request to a node."""
    if body.text is not None:
        if body.in_place:
            node.text = body.text
            if isinstance(node, Loom) and not node.chat_template_used:
                node.user_prompt = body.text
        elif node.parent is None:
            raise ConfigError("the root has no siblings; give in_place to change the prompt")
        else:
            node = node.parent.add(body.text)
    elif body.message is not None:
        node = edit_message(node, body.message, in_place=body.in_place)
    if "score" in body.model_fields_set:
        node.score = body.score
    if "meta" in body.model_fields_set:
        node.meta = dict(body.meta or {})
    if "rating" in body.model_fields_set:
        others = {name: value for name, value in node.meta.items() if name != RATING}
        node.meta = others if body.rating is None else {**others, RATING: body.rating}


def _check_nothing_grows_below(live: OpenLoom, top: Heddle) -> None:
    """Raise Conflict if the node or a descendant is being generated."""
    for task in live.growing:
        for parent in task.parents:
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
            description="node: it and its descendants; children: its descendants; siblings:"
            " its siblings; others: all but the path to it and its descendants."
        ),
    ] = "node",
    also: Annotated[
        list[Annotated[str, Query(max_length=64)]] | None,
        Query(max_length=1000, description="More nodes to remove in the same operation."),
    ] = None,
) -> Response:
    """Remove nodes. Growth below them is cancelled and discarded."""
    async with service.looms.open_locked(loom) as live:
        tree_node, _ = expected = await _expected(live, node, if_match)
        await live.commit_finished()
        if live.is_growing(tree_node):
            live.cancel_node(tree_node)
            return await edit_and_respond(live, "remove", lambda: None, actor, expected=expected)
        tops = _nodes_to_remove(tree_node, what)
        for other in map(live.node, also or ()):
            tops += [top for top in _nodes_to_remove(other, what) if top not in tops]
        # Descendants of other removed nodes are removed with them.
        tops = [top for top in tops if not any(up in tops for up in top.path[:-1])]
        for top in tops:
            live.drop_growing(top)
        if what == "children":
            live.drop_growing(tree_node)

        def edit() -> None:
            for top in tops:
                top.remove()

        return await edit_and_respond(live, "remove", edit, actor, expected=expected)


def _nodes_to_remove(node: Heddle, what: What) -> list[Heddle]:
    """Return the nodes whose subtrees are to be removed; none of them is below another."""
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
    loom: LoomName, node: NodeName, body: ForkNode, service: ServiceDep, actor: Actor
) -> Response:
    """Add a sibling that shares a node's first tokens, and so their KV."""
    async with service.looms.open_locked(loom, grows=True) as live:
        tree_node = live.node(node)
        live.check_not_growing(tree_node)
        instead = body.token_id if body.text is None else body.text
        return await edit_and_respond(
            live, "fork", lambda: fork(tree_node, body.at_token, instead), actor, status=201
        )


@router.post("/nodes/{node}/split", response_model=Changed)
async def split_node(
    loom: LoomName,
    node: NodeName,
    body: SplitNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Split a node in two; the lower one gets the children."""
    async with service.looms.open_locked(loom, grows=True) as live:
        tree_node, _ = expected = await _expected_idle(live, node, if_match)

        def edit() -> None:
            at, name = body.at_token, "at_char" if body.at_token is None else "at_token"
            try:
                tree_node.split(
                    token_before_char(tree_node, body.at_char or 0) if at is None else at
                )
            except ConfigError as error:
                raise RequestError(400, "invalid_parameter", str(error), param=name) from error

        return await edit_and_respond(live, "split", edit, actor, expected=expected)


@router.post("/nodes/{node}/merge", response_model=Changed)
async def merge_node(
    loom: LoomName, node: NodeName, service: ServiceDep, actor: Actor, if_match: IfMatch
) -> Response:
    """Merge a node with its parent, whose only child it is: the inverse of a split."""
    async with service.looms.open_locked(loom) as live:
        tree_node, _ = expected = await _expected_idle(live, node, if_match)
        parent = tree_node.parent
        if parent is None:
            raise TreeError("the root has no parent to be joined with")
        live.check_nothing_grows(parent)
        return await edit_and_respond(live, "merge", parent.merge, actor, expected=expected)


@router.post("/nodes/{node}/clip", response_model=Changed)
async def clip_node(
    loom: LoomName,
    node: NodeName,
    body: ClipNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Shorten a node. The cut tokens become a child unless they are dropped."""
    async with service.looms.open_locked(loom) as live:
        tree_node = live.node(node)
        # The text of a part of the tokens needs the tokenizer.
        needs_tokenizer = tree_node.lm is None and 0 < _n_kept(tree_node, body) < len(
            tree_node.tokens
        )
    async with service.looms.open_locked(loom, grows=needs_tokenizer) as live:
        tree_node, _ = expected = await _expected_idle(live, node, if_match)
        n_tokens, keep = len(tree_node.tokens), _n_kept(tree_node, body)
        if body.children == "drop":
            live.drop_growing(tree_node)

        def edit() -> None:
            if body.children == "drop":
                tree_node.clip(keep)
            elif 0 < keep < n_tokens:
                tree_node.split(keep)
            elif keep == 0:
                raise ConfigError(
                    "keep is 0, so no token would be left; drop the children, or remove the node"
                )

        return await edit_and_respond(live, "clip", edit, actor, expected=expected)


def _n_kept(node: Heddle, body: ClipNode) -> int:
    """Return the number of tokens that a clip keeps. Raises: ConfigError if the node has fewer."""
    n_tokens = len(node.tokens)
    keep = body.keep if body.keep is not None else n_tokens - (body.drop or 0)
    if not 0 <= keep <= n_tokens:
        name = "drop" if body.keep is None else "keep"
        raise ConfigError(f"{name} is {getattr(body, name)}; the node has {n_tokens} tokens")
    return keep


async def _expected(live: OpenLoom, given: str, if_match: int | None) -> ExpectedRevision:
    """Return a node with the revision that its editor has read.

    given: number or id of the node. if_match: that revision; None means no check.
    Raises: NotFound; Conflict if the node was changed after that revision.
    """
    tree_node = live.node(given)
    if if_match is not None:
        await live.sync(now=True)
        live.check_rev(tree_node, if_match)
    return ExpectedRevision(tree_node, if_match)


async def _expected_idle(live: OpenLoom, given: str, if_match: int | None) -> ExpectedRevision:
    """Like `_expected`; also raises Conflict if the node is being generated."""
    expected = await _expected(live, given, if_match)
    live.check_nothing_grows(expected.node)
    return expected


@router.post("/nodes/{node}/move", response_model=Changed)
async def move_node(
    loom: LoomName,
    node: NodeName,
    body: MoveNode,
    service: ServiceDep,
    actor: Actor,
    if_match: IfMatch,
) -> Response:
    """Move a node and its descendants below another node."""
    async with service.looms.open_locked(loom) as live:
        tree_node, _ = expected = await _expected_idle(live, node, if_match)
        _check_nothing_grows_below(live, tree_node)
        parent = live.node(body.parent)
        live.check_not_growing(parent)
        return await edit_and_respond(
            live, "move", lambda: move(tree_node, parent, body.index), actor, expected=expected
        )


@router.post("/nodes/{node}/copy", status_code=201, response_model=Changed | LoomObject)
async def copy_node(
    loom: LoomName, node: NodeName, body: CopyNode, service: ServiceDep, actor: Actor
) -> Response:
    """Copy a node and its descendants within the loom, into another loom, or as a new loom.

    Only a copy into a loom of another model needs that model. `model` gives a new loom another
    model; the loom's own need not be loaded.
    """
    async with service.looms.open_locked(loom) as live:
        tree_node = live.node(node)
        live.check_not_growing(tree_node)
        if body.new_loom is not None or body.title is not None:
            try:
                return await _copy_to_new_loom(service, live, tree_node, body)
            except NameTaken as error:
                raise RequestError(
                    409, "name_taken", str(error), param="new_loom", hint=error.hint
                ) from error
        row = None if body.to_loom is None else await service.looms.row(body.to_loom)
        if row is None or row.id == live.stored.id:
            target = live.node(body.parent)
            live.check_not_growing(target)
            return await edit_and_respond(
                live, "copy", lambda: copy_below(target, tree_node), actor, status=201
            )
        # NOTE: open the source separately, so that no call waits for a lock while holding another.
        source = await live.call(lambda: service.looms.library.open(live.stored.id))
        number = live.number(tree_node)
    with source.loom:
        async with service.looms.open_locked(row.id) as other:
            exact = identity_of(source.loom) == identity_of(other.stored.loom)
        async with service.looms.open_locked(row.id, grows=not exact) as other:
            target, top = other.node(body.parent), source.node(number)
            other.check_not_growing(target)
            return await edit_and_respond(
                other, "copy", lambda: copy_below(target, top, exact=exact), actor, status=201
            )


async def _copy_to_new_loom(
    service: Service, live: OpenLoom, node: Heddle, body: CopyNode
) -> Response:
    """Store a copy of a node and its descendants as a new loom; return the response."""
    own = str(live.stored.loom.meta.get("model", ""))
    create = partial(service.looms.library.create, name=body.new_loom, title=body.title)

    def build() -> Any:
        loom = loom_below(node)
        loom.meta["model"] = own
        return create(loom)

    def build_for(other: ServedModel) -> Any:
        marks = live.stored.bookmarks().items()
        labels = {live.stored.node(number).id: label for number, label in marks}
        loom = loom_for(node, other.ready(), name=other.name, own_name=own, bookmarks=labels)
        loom.meta["model"] = other.source
        return create(loom)

    if body.model is None:
        copy = service.looms.put(await live.call(build), live.lm)
    else:
        other = await service.models.available(body.model)
        with other.in_use() as lm:
            copy = service.looms.put(await live.call(partial(build_for, other)), lm)
    row = await service.looms.row(copy.stored.id)
    return model_response(to_loom_object(row, copy), rev=copy.stored.rev, status=201)
