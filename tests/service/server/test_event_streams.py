"""Event streams: common ticks, coalesced writes, pings, and cleanup after disconnects."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from serving import Served, model_paused
from weft.service.server import open_loom as live_module
from weft.service.server import ticker
from weft.service.server.coalesce import Coalescer
from weft.service.server.events import EventLog, EventStream
from weft.service.server.openai.runs import ChoiceRun
from weft.service.server.ticker import TICK_S, Ticker
from weft.service.store.stored_loom import StoredLoom

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def no_end(server: Served) -> dict[str, float]:
    return {str(token): -1e6 for token in server.service.models.lm().text.stop_ids}


def run(work: Callable[[], Coroutine[Any, Any, Any]], loop: LoopFactory | None = None) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work())


class Leaping(selectors.DefaultSelector):
    """Passes over the time that a loop would wait, by which alone its clock goes on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select()
        self.now += max(timeout, 0.0)
        return super().select(0)


def timeless() -> asyncio.AbstractEventLoop:
    """Make a loop whose clock does not depend on how busy the machine is."""
    selector = Leaping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


# One beat ---------------------------------------------------------------------------------------


def test_tick_wakes_all_waiters_at_once() -> None:
    async def work() -> None:
        loop, wait = asyncio.get_running_loop(), Ticker()
        never: asyncio.Future[None] = loop.create_future()
        came: list[tuple[int, float]] = []

        async def one() -> None:
            for turn in range(3):
                await wait.wait(never)
                came.append((turn, loop.time()))

        began = loop.time()
        await asyncio.gather(*(one() for _ in range(20)))
        assert [turn for turn, _ in came] == [0] * 20 + [1] * 20 + [2] * 20
        assert all(at - began >= 0.99 * (turn + 1) * TICK_S for turn, at in came)

    run(work, timeless)


def test_waiter_waits_half_a_tick_or_longer() -> None:
    async def work() -> None:
        loop, wait = asyncio.get_running_loop(), Ticker()
        never: asyncio.Future[None] = loop.create_future()
        first = asyncio.ensure_future(wait.wait(never))
        await asyncio.sleep(0.8 * TICK_S)
        began = loop.time()
        await wait.wait(never)
        assert first.done()
        assert loop.time() - began >= TICK_S / 2

    run(work, timeless)


def test_finished_stream_does_not_wait_for_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticker, "TICK_S", 20.0)

    async def work() -> None:
        loop, wait = asyncio.get_running_loop(), Ticker()
        over: asyncio.Future[None] = loop.create_future()
        waiting = [asyncio.ensure_future(wait.wait(over)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the others are not cancelled
        loop.call_later(0.05, over.set_result, None)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in results] == [asyncio.CancelledError, type(None), type(None)]
        await wait.wait(over)

    run(work, timeless)


def test_expensive_ticks_are_less_frequent_and_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = 0.0
    monkeypatch.setattr(ticker.time, "thread_time", lambda: used_s)

    async def work() -> None:
        nonlocal used_s
        loop, wait = asyncio.get_running_loop(), Ticker()
        never: asyncio.Future[None] = loop.create_future()
        for _ in range(8):
            await wait.wait(never)
            used_s += 0.02
        assert 2 * TICK_S < wait.tick_s < 0.26
        used_s += 0.2  # other work, between two calls
        for _ in range(8):
            await wait.wait(never)
        assert wait.tick_s == TICK_S

    run(work, timeless)


# One write for many -----------------------------------------------------------------------------


def test_coalescer_runs_waiting_items_in_one_batch() -> None:
    async def work() -> None:
        done: list[list[int]] = []

        async def write(items: list[int]) -> None:
            done.append(items)
            await asyncio.sleep(0.01)
            if 7 in items:
                raise ValueError("seven")

        joint = Coalescer(asyncio.Lock(), write)
        results = await asyncio.gather(*map(joint.do, range(10)), return_exceptions=True)
        assert done == [[0, *range(1, 10)]] or done == [[0], list(range(1, 10))]
        assert [isinstance(each, ValueError) for each in results[1:]] == [True] * 9
        await joint.do(11)
        assert done[-1] == [11]

    run(work)


def test_cancelled_caller_does_not_cancel_the_batch() -> None:
    """Cancel the caller that runs the batch and a caller that waits for it."""

    async def work() -> None:
        done: list[list[int]] = []

        async def write(items: list[int]) -> None:
            done.append(items)
            await asyncio.sleep(0.05)

        lock = asyncio.Lock()
        joint = Coalescer(lock, write)
        async with lock:
            tasks = [asyncio.ensure_future(joint.do(at)) for at in range(4)]
            await asyncio.sleep(0)
            tasks[2].cancel()
            await asyncio.sleep(0)
        while not done:
            await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in results] == [
            True, False, True, False,
        ]  # fmt: skip
        assert done == [[0, 1, 3], [1, 3]]
        assert not lock.locked()

    run(work)


def test_calls_that_end_together_share_writes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, writes = 24, {"append": 0, "commit": 0}
    monkeypatch.setattr(live_module, "_FLUSH_S", 60.0)

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(StoredLoom, name)

        def call(*args: Any, **given: Any) -> Any:
            writes[name] += 1
            return real(*args, **given)

        return call

    for name in writes:
        monkeypatch.setattr(StoredLoom, name, counted(name))
    loom = served.client.post("/api/v1/looms", json={"prompt": "Once upon a time"}).json()["id"]
    path = f"/api/v1/looms/{loom}/nodes/0/generate"
    body = {"max_tokens": 24, "logit_bias": no_end(served)}

    async def all_of_them() -> list[Any]:
        import httpx2 as httpx

        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            each = (client.post(path, json={**body, "wait": True}) for _ in range(n))
            with model_paused(monkeypatch):  # until all are there
                calls = asyncio.gather(*each)
                while served.service.n_works < n:
                    await asyncio.sleep(0.01)
            return [answer.json() for answer in await calls]

    replies = asyncio.run(all_of_them())
    assert {answer["status"] for answer in replies} == {"ok"}
    numbers = sorted(answer["branches"][0]["node"] for answer in replies)
    assert numbers == list(range(1, n + 1))
    rows = served.client.get(f"/api/v1/looms/{loom}/nodes", params={"limit": 100}).json()["data"]
    assert sum(row["n_tokens"] == 24 for row in rows) == n
    # Separate writes would be three per call.
    assert writes["append"] + writes["commit"] < 1.5 * n


# Readers ----------------------------------------------------------------------------------------


def test_disconnected_readers_leave_nothing_in_a_log() -> None:
    async def work() -> None:
        log = EventLog(dict)
        log.put("a", {})

        async def read() -> list[bytes]:
            return [piece async for piece in log.frames()]

        tasks = [asyncio.ensure_future(read()) for _ in range(5)]
        await asyncio.sleep(0.01)
        for task in tasks[:4]:
            task.cancel()
        await asyncio.sleep(0.01)
        assert log.n_readers == 1
        assert len(log._waiting) == 1
        log.put("b", {"x": "é\ud800"})
        log.end()
        pieces = await tasks[4]
        assert b"".join(pieces).count(b"data: ") == 2
        assert (log.n_readers, log._waiting) == (0, {})

    run(work)


def test_only_idle_streams_are_pinged() -> None:
    async def work() -> None:
        sent: list[bytes] = []

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(40):  # together longer than a ping is put off
                await asyncio.sleep(0.02)
                yield b"piece"
            await asyncio.sleep(1.0)
            yield b"last"

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.sleep(60)

        before = len(asyncio.all_tasks())
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await EventStream(pieces(), ping_s=0.3)(scope, receive, send)
        ping = b": ping\n\n"
        assert sent[1:] == [*[b"piece"] * 40, *[ping] * 3, b"last", b""]
        assert len(asyncio.all_tasks()) == before

    run(work, timeless)


# At /v1 -----------------------------------------------------------------------------------------


def test_covered_tokens_equal_those_counted_one_by_one() -> None:
    def naive(reply: ChoiceRun, length: int) -> int:
        if reply.is_cut and length >= len(reply.text):
            return sum(1 for begin in [0, *reply.ends[:-1]] if begin < length)
        if reply.is_over and length >= len(reply.text):
            return len(reply.tokens)
        pairs = zip([0, *reply.ends[:-1]], reply.ends, strict=False)
        return sum(1 for begin, end in pairs if begin < length and end <= length)

    reply = ChoiceRun.__new__(ChoiceRun)
    for ends in ([], [0], [3], [0, 0, 2, 2, 2, 5], [1, 2, 3, 3]):
        for is_over in (False, True):
            for is_cut in (False, True):
                for cut in range(3):
                    reply.ends, reply.is_over, reply.is_cut = ends, is_over, is_cut
                    reply.tokens = list(ends)
                    reply.text = "x" * max((ends[-1] if ends else 0) - cut, 0)
                    for length in range(7):
                        assert reply.n_covered(length) == naive(reply, length)


def test_stream_has_each_token_once_in_20_events_a_second_or_fewer(served: Served) -> None:
    loom = served.client.post("/api/v1/looms", json={"prompt": "Once upon a time"}).json()["id"]
    body = {"stream": True, "max_tokens": 120, "logit_bias": no_end(served)}
    began, n_events, n_tokens = time.monotonic(), 0, 0
    with served.client.stream(
        "POST", f"/api/v1/looms/{loom}/nodes/0/generate", json=body
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and '"t":' in line:
                n_events += 1
                n_tokens += len([t for t in json.loads(line[6:])["t"] if t[1] is not None])
    assert n_tokens == 120
    assert n_events <= 2 + (time.monotonic() - began) / TICK_S


# Slow readers -----------------------------------------------------------------------------------


def test_log_stays_within_its_limits() -> None:
    log = EventLog(dict, max_events=1024, max_bytes=1 << 20)
    for _ in range(100):
        log.put("change", {"added": [{"text": "x" * 100_000}]})
    assert 5 < len(log._kept) <= 11
    log.put("change", {"added": [{"text": "x" * 3_000_000}]})
    assert len(log._kept) == 1  # its readers still receive it
    for at in range(2000):
        log.put("tok", {"t": [[0, at, "x", -0.5, 0.5]] * 16})
    assert sum(16 * 200 for _ in log._kept) < 1.2 * (1 << 20)


def test_slow_reader_gets_a_snapshot() -> None:
    async def work() -> None:
        log = EventLog(lambda: {"state": log.last}, max_events=4096, max_bytes=8 << 20)
        for at in range(4000):
            log.put("change", {"at": at, "text": "x" * 900})
        pieces = log.frames(0)
        piece = await anext(pieces)
        assert len(piece) < 400_000
        n_changes = piece.count(b"event: change")
        for at in range(4096):
            log.put("change", {"at": at})
        assert (await anext(pieces)).startswith(b"id: 8096\nevent: snapshot\n")
        log.put("change", {"at": "last"})
        assert await anext(pieces) == b'id: 8097\nevent: change\ndata: {"at":"last"}\n\n'
        assert 100 < n_changes < 500
        await pieces.aclose()
        assert log.n_readers == 0

    run(work)


def test_reader_that_stops_reading_does_not_block_other_readers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it reads on, it gets a snapshot and the changes after it."""
    loom = served.client.post("/api/v1/looms", json={"prompt": "Once upon a time"}).json()["id"]
    live = served.service.looms.get_open(loom)
    assert live is not None
    monkeypatch.setattr(live.feed, "_max_events", 40)  # of 2,048: so many events take minutes
    path = f"/api/v1/looms/{loom}/events?tokens=true"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = served.url.removeprefix("http://").partition(":")
        slow.connect((host, int(port)))
        slow.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        body = {"n": 16, "max_tokens": 256, "logit_bias": no_end(served), "stream": True}
        n_tokens, sizes = 0, []
        for _ in range(2):
            grow = f"/api/v1/looms/{loom}/nodes/0/generate"
            with served.client.stream("POST", grow, json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and '"t":' in line:
                        n_tokens += sum(t[1] is not None for t in json.loads(line[6:])["t"])
                        sizes.append(live.feed._n_bytes)
        assert n_tokens == 2 * 16 * 256  # the other reader has received all of them
        assert max(sizes) <= 1 << 20
        assert live.feed.n_readers == 1
        slow.settimeout(60)
        received = b""
        while b"event: change" not in received.rpartition(b"event: snapshot")[2]:
            received += slow.recv(1 << 16)
            if received.endswith(b"\n") and live.feed.n_readers and b"event: snapshot" in received:
                served.client.patch(f"/api/v1/looms/{loom}/nodes/0", json={"score": len(received)})
        assert received.count(b"event: snapshot") >= 1
    while live.feed.n_readers:
        served.client.patch(f"/api/v1/looms/{loom}/nodes/0", json={"score": time.monotonic()})
        time.sleep(0.05)
