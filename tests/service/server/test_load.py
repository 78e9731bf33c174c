"""Many clients: limits, and cleanup after disconnects."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Iterator

import pytest

from serving import Served, serving
from weft.service.server import ServerConfig
from weft.service.server.config import ServerLimits


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    limits = ServerLimits(n=2, tokens=2000, jobs=3, body_bytes=2000, import_bytes=5000)
    with serving(ServerConfig(port=0, limits=limits)) as server:
        yield server


def no_end(server: Served) -> dict[str, float]:
    return {str(token): -1e6 for token in server.service.models.lm().text.stop_ids}


def wait_for_rest(server: Served, n_works: int = 0) -> None:
    while server.service.n_works > n_works:
        time.sleep(0.02)
    assert server.service.n_works == n_works


def test_too_many_jobs_get_retry_after(small: Served) -> None:
    loom = small.client.post("/api/v1/looms", json={"prompt": "Once"}).json()["id"]
    path = f"/api/v1/looms/{loom}/nodes/0/generate"
    body = {"max_tokens": 1500, "logit_bias": no_end(small)}
    jobs = [small.client.post(path, json=body).json()["job"] for _ in range(3)]
    answer = small.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    for job in jobs:
        small.client.post(f"/api/v1/jobs/{job}/cancel")
    wait_for_rest(small)
    assert small.client.post(path, json={"max_tokens": 2, "wait": True}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_is_rejected(small: Served, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 3000 + b'"}'
    content = iter([body[:100], body[100:]]) if chunked else body
    headers = {"Content-Type": "application/json"}
    answer = small.client.post("/api/v1/looms", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("chunked", [False, True])
def test_late_rejected_body_is_drained(small: Served, chunked: bool) -> None:
    """Bytes that arrive after a close would make the client lose the response."""
    host, port = small.url.removeprefix("http://").split(":")
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 6000"
    part = b"x" * 3000
    first, rest = part, part
    if chunked:
        first = b"bb8\r\n" + part + b"\r\n"
        rest = first + b"0\r\n\r\n"
    head = f"POST /api/v1/looms HTTP/1.1\r\nHost: {host}\r\n{length}\r\n"
    with socket.create_connection((host, int(port)), timeout=0.3) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + first)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(60)
        client.sendall(rest)
        assert b" 413 " in client.recv(4096)


def test_body_slightly_over_the_limit_is_drained() -> None:
    """Clients that send all of a body before they read would get a connection error."""
    limit = ServerLimits().body_bytes
    with serving(wait=False) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /api/v1/looms HTTP/1.1\r\nHost: {host}\r\nContent-Length: {limit + 9000}\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(head.encode() + b"\r\n" + b"x" * limit)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(60)
            client.sendall(b"x" * 9000)
            assert b" 413 " in client.recv(4096)


def test_gigabyte_body_is_rejected_by_its_length(small: Served) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /api/v1/import HTTP/1.1\r\nHost: {host}\r\nContent-Length: {1 << 30}\r\n\r\n"
        client.sendall(head.encode())
        assert b" 413 " in client.recv(4096)


def test_path_longer_than_the_kv_budget_is_400(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(ServerConfig(port=0, kv_budget="256KiB")) as server:
        lm = server.service.models.lm()
        slots = lm.tree.budget.capacity
        assert slots is not None
        assert slots < lm.n_ctx
        (warning,) = [each.getMessage() for each in caplog.records if "budget" in each.getMessage()]
        assert f"holds {slots} tokens, but the context has {lm.n_ctx}" in warning
        for fields in ({"prompt": [5] * (slots + 2)}, {"prompt": [5], "ignore_eos": True}):
            body = {**fields, "max_tokens": slots + 2}
            answer = server.client.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert "retry-after" not in answer.headers
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("kv_out_of_memory", "invalid_request_error")
            assert error["details"]["needed_tokens"] > error["details"]["capacity_tokens"] == slots


def vanish(server: Served, n: int) -> None:
    """Let clients request a stream and disconnect: some at once, some after the first tokens."""
    loom = server.client.post("/api/v1/looms", json={"prompt": "Once upon"}).json()["id"]
    fields = {"stream": True, "on_disconnect": "cancel", "max_tokens": 400}
    body = json.dumps({**fields, "logit_bias": no_end(server)}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/looms/{loom}/nodes/0/generate HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def connect_and_abort(at: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body[: len(body) // 2] if at % 4 == 0 else head + body)
        await writer.drain()
        if at % 4 >= 2:
            await reader.read(1000)
        if at % 4 == 3:
            await asyncio.sleep(0.05)
        writer.transport.abort()

    async def all_of_them() -> None:
        for first in range(0, n, 50):
            await asyncio.gather(
                *(connect_and_abort(at) for at in range(first, min(first + 50, n)))
            )

    asyncio.run(all_of_them())


def tasks_of(server: Served) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    n: int = server.on_loop(count())
    return n


def leaves_nothing(server: Served, n: int) -> None:
    lm = server.service.models.lm()
    server.client.get("/healthz")
    vanish(server, 20)  # objects that are created once
    wait_for_rest(server)
    before = tasks_of(server)
    vanish(server, n)
    wait_for_rest(server)
    while tasks_of(server) > before:
        time.sleep(0.1)
    gc.collect()
    assert tasks_of(server) <= before
    assert not server.service.jobs.running()
    stats = lm.stats()
    assert stats.pinned_tokens == 0
    lm.tree.check()
    # The remaining KV belongs to nodes of the loom or can be evicted.
    assert lm.scheduler.n_queued == 0
    assert server.client.get("/healthz").status_code == 200


def test_disconnected_clients_leave_nothing_behind(served: Served) -> None:
    leaves_nothing(served, 60)


@pytest.mark.slow
def test_thousand_disconnected_clients_leave_nothing_behind(served: Served) -> None:
    leaves_nothing(served, 1000)
