"""Clients that stop in the middle of a request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, model_paused, serving
from weft.service.server import timeouts

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + b'Content-Length: 90\r\n\r\n{"prompt": "On',
    "a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    """A server that waits a tenth of a second for a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "REQUEST_S", 0.1)
        with serving() as server:
            yield server


def until_closed(served: Served, *sent: bytes) -> list[bytes]:
    """Send on one connection; return the answer to each, the last one up to the end."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    answers = []
    with socket.create_connection((host, int(port))) as connection:
        for data in sent:
            connection.sendall(data)
            answers.append(connection.recv(1 << 16))
    return answers


@pytest.mark.parametrize("half", HALVES)
def test_incomplete_request_is_closed(impatient: Served, half: str) -> None:
    assert until_closed(impatient, HALVES[half]) == [b""]


def test_incomplete_second_request_is_closed(impatient: Served) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    first, rest = until_closed(impatient, request, HALVES["half a head"])
    assert first.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1" not in rest


def test_response_may_take_longer_than_the_request_timeout(
    impatient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []

    def ask() -> None:
        answers.append(impatient.client.post("/v1/completions", json={"max_tokens": 2}))

    asking = threading.Thread(target=ask)
    with model_paused(monkeypatch):
        asking.start()
        while not impatient.service.n_works:
            time.sleep(0.01)
        until_closed(impatient, HALVES["half a head"])  # takes as long as the limit
        assert not answers
    asking.join()
    assert answers[0].status_code == 200
