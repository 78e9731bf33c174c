"""Stored responses: each is a node of a loom, and its id names that loom and node.

The node's `meta["response"]` is its record:

- `response`: the response object.
- `input`: the items of its request.
- `previous`: the number of the node of the previous response, if that is in the same loom.
- `history`: all items before `input`, if the previous response is not in the same loom.
- `deleted`: true for a deleted response that others go on from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import Conflict, NotFound
from ....loom import Heddle
from ....loom.node import preorder
from .field_errors import invalid
from .items import InputItem, as_items
from .persistence import ACTOR
from .request_fields import LoomOptions

if TYPE_CHECKING:
    from ..open_loom import OpenLoom
    from ..service import Service

Json = dict[str, Any]
_RECORD = "response"
_NEW_LOOM = LoomOptions.model_validate({"save": True})
_ID = re.compile(r"[a-z]+_([0-9a-f]{16})([0-9a-f]{8})[0-9a-f]*")


class ResponseKey(NamedTuple):
    """The loom and node of a stored response; part of its id and of its items' ids."""

    loom: str
    number: int

    @classmethod
    def parse(cls, given: str) -> ResponseKey:
        """Parse the id of a response, or of an item of it. Raises: NotFound for an invalid id."""
        match = _ID.fullmatch(given)
        if match is None:
            raise _missing_error(given)
        return cls(match[1], int(match[2], 16))

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return f"resp_{self.loom}{self.number:08x}"

    def item_id(self, kind: str) -> str:
        """Return a new id for an item of this response. kind: prefix of the id, such as "msg"."""
        return f"{kind}_{self.loom}{self.number:08x}{secrets.token_hex(4)}"


def new_item_id(kind: str) -> str:
    """Return a new id for an item of a response that is not stored. kind: prefix of the id."""
    return f"{kind}_{secrets.token_hex(16)}"


class StoredResponse(NamedTuple):
    """A stored response: its key, loom, node and record. The caller holds the loom's lock."""

    key: ResponseKey
    live: OpenLoom
    node: Heddle
    record: Json

    @property
    def response_object(self) -> Json:
        """The response as the API returns it: `{"id": "resp_…", "output": […], …}`.

        Its status is "cancelled" if it was in progress and its node is no longer growing.
        """
        response: Json = {**self.record["response"], "id": self.key.response_id}
        if response["status"] == "in_progress" and not self.live.is_growing(self.node):
            response["status"] = "cancelled"
        return response

    def items(self) -> list[Json]:
        """Return all input items of the response, including those of earlier ones, oldest first."""
        record = self.record
        items: list[Json] = record["input"]
        while record["previous"] is not None:
            record = self.live.node(record["previous"]).meta[_RECORD]
            items = [*record["input"], *record["response"]["output"], *items]
        return [*record["history"], *items]

    @property
    def is_used(self) -> bool:
        """True if the node has children, or if another response continues this one."""
        nodes = preorder(self.live.stored.loom)
        followed = (node.meta.get(_RECORD, {}).get("previous") for node in nodes)
        return bool(self.live.children_of(self.node)) or self.key.number in followed


@asynccontextmanager
async def open_response(service: Service, given: str) -> AsyncIterator[StoredResponse]:
    """Find a response by its id or the id of one of its items. Raises: NotFound.

    The block runs under the lock of the response's loom.
    """
    key = ResponseKey.parse(given)
    try:
        await service.looms.row(key.loom)
    except NotFound:
        raise _missing_error(given) from None
    async with service.looms.open_locked(key.loom) as live:
        try:
            node = live.node(key.number)
        except NotFound:
            raise _missing_error(given) from None
        record = node.meta.get(_RECORD)
        if record is None or record.get("deleted"):
            raise _missing_error(given)
        yield StoredResponse(key, live, node, record)


def _missing_error(given: str) -> NotFound:
    """Return the error for a response that does not exist."""
    return NotFound(
        f"there is no response {given!r:.80}",
        what="response",
        hint="responses of requests with store: false are not stored, and deleted ones are gone",
    )


async def delete(service: Service, given: str) -> str:
    """Delete a response and return its id.

    Also removes prompt nodes that only this response uses; deletes the loom if nothing is left. If
    other nodes or responses continue it, it is only marked as deleted.

    given: its id.
    Raises: NotFound; Conflict while the response is being generated.
    """
    async with open_response(service, given) as response:
        key, live, node, record = response
        if live.is_growing(node):
            raise Conflict(f"the response {given} is still being generated", rev=live.stored.rev)
        top = node
        while top.parent is not None and _RECORD not in top.parent.meta:
            if len(live.children_of(top.parent)) > 1:
                break
            top = top.parent
        if response.is_used:

            def mark() -> None:
                node.meta = {**node.meta, _RECORD: {**record, "deleted": True}}

            await live.change("edit", mark, ACTOR)
        elif top is live.stored.loom:
            await live.call(lambda: service.looms.library.remove([key.loom]))
            service.looms.removed(key.loom)
        else:
            await live.change("remove", top.remove, ACTOR)
        return key.response_id


class ResponseContext(NamedTuple):
    """The conversation that a new response continues: earlier items, then those of the request.

    Args:
        items: the items of earlier responses, then those of the request.
        n_before: number of items of earlier responses.
        previous: the previous response; None without one.
        locations: looms that can store the response, best first.
    """

    items: list[InputItem]
    n_before: int = 0
    previous: ResponseKey | None = None
    locations: tuple[LoomOptions, ...] = (_NEW_LOOM,)

    @classmethod
    async def load(
        cls, service: Service, previous: str | None, given: str | Sequence[InputItem], model: str
    ) -> ResponseContext:
        """Collect the items of the previous response's conversation and of the request.

        Items of the request that refer to stored ones by id are replaced by these.

        Args:
            service: has the looms.
            previous: id of the previous response (`previous_response_id`); None without one.
            given: the request's input.
            model: name of the model.

        Raises: RequestError for unknown ids.
        """
        items = await _with_references(service, as_items(given))
        if not previous:
            return cls(items)
        try:
            async with open_response(service, previous) as response_node:
                response = response_node.response_object
                before = [*response_node.items(), *response["output"]]
                key = response_node.key
        except NotFound as error:
            raise invalid(
                "previous_response_id",
                f"previous_response_id: {error}",
                code="previous_response_not_found",
                hint=error.hint,
            ) from None
        if response["status"] == "in_progress":
            raise invalid(
                "previous_response_id",
                f"previous_response_id: the response {previous} is still being generated",
            )
        row, served = await service.looms.row(key.loom), service.models.get(model)
        options: list[Json] = []
        if row.model in (served.source, served.name):
            options = [{"loom": key.loom, "parent": key.number}, {"loom": key.loom}]
        locations = (*map(LoomOptions.model_validate, options), _NEW_LOOM)
        earlier = [InputItem.model_validate(item) for item in before]
        return cls([*earlier, *items], len(earlier), key, locations)


async def _with_references(service: Service, items: list[InputItem]) -> list[InputItem]:
    """Replace items that refer to others by the items that they name. Raises: RequestError."""
    resolved = []
    for number, item in enumerate(items):
        if item.type == "item_reference":
            try:
                async with open_response(service, item.id or "") as response:
                    candidates = [*response.items(), *response.response_object["output"]]
                (matching,) = (other for other in candidates if other["id"] == item.id)
            except (NotFound, ValueError):
                message = f"input.{number}: there is no stored item {item.id!r:.80}"
                raise invalid("input", message, hint="send the item itself") from None
            item = InputItem.model_validate(matching)
        resolved.append(item)
    return resolved


def store(key: ResponseKey, node: Heddle, context: ResponseContext, response: Json) -> None:
    """Write a response's record to the meta of its node. The loom's next commit saves it.

    context: the responses and items that it continues. response: the response object.
    """
    earlier, own = context.items[: context.n_before], context.items[context.n_before :]
    is_here = context.previous is not None and context.previous.loom == key.loom
    node.meta = {
        **node.meta,
        _RECORD: {
            "response": response,
            "input": [item.stored(key) for item in own],
            "previous": context.previous.number if is_here and context.previous else None,
            "history": [] if is_here else [item.stored(key) for item in earlier],
        },
    }
