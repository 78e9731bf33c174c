"""`Idempotency-Key`: a repeated request runs once, even if its client disconnects."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from copy import deepcopy
from typing import Any

import httpx2 as httpx
import pytest

from serving import KEY, Served, serving
from weft import AsyncClient, Client
from weft.service.server import ServerConfig, create_app
from weft.service.server.idempotency import ANSWER_BYTES, MAX_RESPONSES, IdempotencyStore

Json = dict[str, Any]

pytestmark = pytest.mark.programs


def post(served: Served, key: str | None, path: str = "/looms", **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return served.client.post(f"/api/v1{path}", json=body, headers=headers)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def n_looms(served: Served) -> int:
    return len(served.client.get("/api/v1/looms", params={"limit": 200}).json()["data"])


def test_repeated_request_gets_the_first_response(served: Served) -> None:
    first = post(served, "a1", prompt="Once")
    before = n_looms(served)
    repeat = post(served, "a1", prompt="Once")
    assert (first.status_code, repeat.status_code) == (201, 201)
    assert repeat.json() == first.json()
    assert repeat.headers["etag"] == first.headers["etag"]
    assert repeat.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert repeat.headers["x-request-id"] != first.headers["x-request-id"]
    assert n_looms(served) == before
    assert post(served, "a2", prompt="Once").json()["id"] != first.json()["id"]
    assert post(served, None, prompt="Once").json()["id"] != first.json()["id"]


@pytest.mark.parametrize("other", ["body", "path", "query"])
def test_key_of_another_request_is_rejected(served: Served, other: str) -> None:
    key = f"b-{other}"
    assert post(served, key, prompt="Once").status_code == 201
    answer = post(
        served,
        key,
        {"path": "/tokenize", "query": "/looms?x=1"}.get(other, "/looms"),
        **({"prompt": "Twice"} if other == "body" else {"prompt": "Once"}),
    )
    assert code(answer) == (422, "idempotency_key_reused")
    assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_repeat_of_a_running_request_is_rejected(served: Served) -> None:
    loom = post(served, None, prompt="Once upon a time").json()["id"]
    path, answers = f"/looms/{loom}/nodes/0/generate", []
    ends = served.service.models.lm().text.stop_ids
    body = {"max_tokens": 1500, "wait": True, "logit_bias": {str(each): -1e6 for each in ends}}
    thread = threading.Thread(target=lambda: answers.append(post(served, "c1", path, **body)))
    thread.start()
    while not served.service.n_works:
        time.sleep(0.01)
    second = post(served, "c1", path, **body)
    thread.join()
    assert code(second) == (409, "idempotency_in_progress")
    assert second.headers["retry-after"] == "1"
    third = post(served, "c1", path, **body)
    assert third.json() == answers[0].json()
    assert len(served.client.get(f"/api/v1/looms/{loom}/nodes").json()["data"]) == 2


def test_failed_request_frees_its_key(served: Served) -> None:
    assert code(post(served, "d1", promt="Once")) == (400, "unsupported_parameter")
    assert post(served, "d1", prompt="Once").status_code == 201
    assert code(post(served, "d2", "/looms/none/undo")) == (404, "loom_not_found")
    assert code(post(served, "d2", "/looms/none/undo")) == (404, "loom_not_found")


def test_request_of_a_disconnected_client_completes_for_its_retry(served: Served) -> None:
    loom = post(served, None, prompt="Once upon a time").json()["id"]
    path = f"/looms/{loom}/nodes/0/generate"
    body = b'{"max_tokens": 40, "wait": true, "seed": 3}'
    address = served.url.removeprefix("http://")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(
            f"POST /api/v1{path} HTTP/1.1\r\nHost: {address}\r\nIdempotency-Key: e1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        time.sleep(0.05)
    headers = {"Idempotency-Key": "e1", "Content-Type": "application/json"}
    while True:
        answer = served.client.post(f"/api/v1{path}", content=body, headers=headers)
        if answer.status_code != 409:
            break
        time.sleep(0.05)
    assert answer.json()["status"] == "ok"
    assert len(served.client.get(f"/api/v1/looms/{loom}/nodes").json()["data"]) == 2


def test_key_on_an_unsupported_request_is_rejected_by_name(served: Served) -> None:
    loom = post(served, None, prompt="Once").json()["id"]
    path = f"/looms/{loom}/nodes/0/generate"
    refused = (400, "idempotency_unsupported")
    assert code(post(served, "f1", path, stream=True)) == refused
    headers = {"Idempotency-Key": "f2", "Accept": "text/event-stream"}
    assert code(served.client.post(f"/api/v1{path}", json={}, headers=headers)) == refused
    assert code(served.client.post("/looms/import", headers={"Idempotency-Key": "f3"})) == refused
    for wrong in ("", "x" * 256):
        headers = {"Idempotency-Key": wrong}
        answer = served.client.post("/api/v1/looms", json={"prompt": "Hi"}, headers=headers)
        assert code(answer) == (400, "invalid_parameter"), wrong
    several = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    assert code(served.client.post("/api/v1/looms", json={}, headers=several))[0] == 400
    assert served.client.get("/api/v1/looms", headers={"Idempotency-Key": "x" * 999}).is_success


def test_schema_documents_routes_with_keys() -> None:
    app = create_app()
    schema = deepcopy(app.openapi())
    assert app.openapi() == schema
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            names = [each["name"] for each in operation.get("parameters", ())]
            is_taken = path.startswith(("/api/v1/", "/v1/")) and method not in ("get", "head")
            assert names.count("Idempotency-Key") == is_taken, (method, path)


def test_repeated_openai_completion_gets_the_first_response(served: Served) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
    replies = [
        served.client.post("/v1/completions", json=body, headers={"Idempotency-Key": "g1"})
        for _ in range(2)
    ]
    assert replies[0].json() == replies[1].json()


def test_keys_of_different_callers_are_distinct() -> None:
    config = ServerConfig(port=0, api_key=KEY)
    with serving(config) as served:
        first = post(served, "a", prompt="Once")
        other = served.client.post(
            "/api/v1/looms",
            json={"prompt": "Once"},
            headers={"Idempotency-Key": "a", "Authorization": f"bearer {KEY}"},
        )
        assert other.json()["id"] != first.json()["id"]
        wrong = {"Idempotency-Key": "a", "Authorization": "Bearer of-nothing-at-all"}
        answer = served.client.post("/api/v1/looms", json={"prompt": "Once"}, headers=wrong)
        assert answer.status_code == 401


def test_stored_responses_are_bounded_in_number_size_and_time() -> None:
    now = [1000.0]
    answers = IdempotencyStore(lambda: now[0])

    def do(i: int, n_bytes: int = 10) -> None:
        first, is_new = answers.begin(b"%d" % i, b"")
        assert is_new
        start = {"type": "http.response.start", "status": 200}
        answers.end(b"%d" % i, first, [start, {"type": "x", "body": b" " * n_bytes}])

    running, _ = answers.begin(b"runs", b"")
    for i in range(MAX_RESPONSES + 50):
        do(i)
    assert len(answers) == MAX_RESPONSES
    assert answers.begin(b"%d" % (MAX_RESPONSES + 49), b"")[1] is False
    do(0)  # it was forgotten
    for i in range(10_000, 10_040):
        do(i, ANSWER_BYTES)
    assert len(answers) <= 17
    do(20_000, ANSWER_BYTES + 1)
    with pytest.raises(Exception, match="too large to be stored"):
        answers.begin(b"20000", b"")
    now[0] += 3601
    do(20_000)
    assert len(answers) == 2
    with pytest.raises(Exception, match="still running"):
        answers.begin(b"runs", b"")
    answers.drop(b"runs", running)
    assert len(answers) == 1


class Breaking(threading.Thread):
    """A way to a server that loses its first answer, after the server has given it."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        host, _, port = url.removeprefix("http://").partition(":")
        self.there = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.n_came = 0

    def run(self) -> None:
        for number in range(2):
            line, _ = self.listener.accept()
            self.n_came += 1
            line.settimeout(60)
            with line, socket.create_connection(self.there, timeout=None) as there:
                there.sendall(read_message(line))
                answer = read_message(there)
                if number:
                    line.sendall(answer)
        self.listener.close()


def read_message(line: socket.socket) -> bytes:
    """Read a request or a response that has a Content-Length header."""
    data = b""
    while True:
        data += line.recv(65536)
        head, separator, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if separator and length is not None and len(body) >= int(length[1]):
            return data


@pytest.mark.parametrize("is_async", [False, True])
def test_client_retries_a_broken_post_that_runs_once(served: Served, is_async: bool) -> None:
    way, before = Breaking(served.url), n_looms(served)
    way.start()

    async def make() -> str:
        async with AsyncClient(way.url) as client:
            client.connection.is_verified = True  # else the check loses its response
            return (await client.create_loom("Once")).id

    if is_async:
        loom = asyncio.run(make())
    else:
        with Client(way.url) as client:
            client.connection.is_verified = True
            loom = client.create_loom("Once").id
    way.join()
    assert way.n_came == 2
    assert n_looms(served) == before + 1
    assert served.client.get(f"/api/v1/looms/{loom}").is_success
