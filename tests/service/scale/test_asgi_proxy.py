"""Forwarded requests: messages, errors and disconnects of the app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from weft.service.scale import asgi_proxy
from weft.service.scale.asgi_proxy import answer, plain
from weft.service.server.asgi import read_body

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


def test_app_messages_are_forwarded_in_batches() -> None:
    came = asyncio.Event()

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await came.wait()
        await send({"type": "http.response.body", "body": b"!", "more_body": False})

    async def run() -> list[list[Any]]:
        pieces = []
        async for piece in answer(echo, SCOPE, b"hi"):
            pieces.append(piece)
            came.set()
        return pieces

    first, second = asyncio.run(run())
    assert [message.get("body") for message in first] == [None, b"hi"]
    assert [message.get("body") for message in second] == [b"!"]


def test_app_error_is_raised_after_its_messages() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("gone")

    async def run() -> list[Any]:
        answered = answer(broken, SCOPE, b"")
        got = await anext(answered)
        with pytest.raises(OSError, match="gone"):
            await anext(answered)
        return got

    assert [message["status"] for message in asyncio.run(run())] == [200]


def test_app_is_notified_of_a_disconnected_client() -> None:
    messages: list[str] = []

    async def patient(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        messages.append((await receive())["type"])

    asyncio.run(first_piece_only(patient))
    assert messages == ["http.disconnect"]


def test_app_that_ignores_the_disconnect_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_proxy, "GONE_S", 0.05)
    ended: list[bool] = []

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.run(first_piece_only(deaf))
    assert ended == [True]


async def first_piece_only(app: Callable[..., Awaitable[None]]) -> None:
    answered = answer(app, SCOPE, b"")
    await anext(answered)
    await answered.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_incomplete_body_is_none() -> None:
    parts = iter(
        [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(parts)

    assert asyncio.run(read_body(receive)) is None


def test_forwarded_scope_has_no_server_objects() -> None:
    sent = plain({**SCOPE, "app": object(), "state": {}, "extensions": {}})
    assert sent == SCOPE
