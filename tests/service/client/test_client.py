"""The clients have a method for every route, and raise the library's errors."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

import weft
from serving import Served, serving
from weft import errors
from weft._core.error_mapping import ERROR_MAPPINGS
from weft.service.api.jobs import BranchObject, JobReply
from weft.service.client import AsyncClient, Client, call, calls, connection
from weft.service.client.call import (
    ApiCall,
    EventStreamCursor,
    error_from_object,
    error_from_response,
)
from weft.service.client.growth import GrowthReader

FEW: dict[str, Any] = {"max_tokens": 6, "seed": 1}
with weft.load("tiny") as _lm:
    NO_END = {str(token): -1e6 for token in _lm.text.stop_ids}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as api_client:
        yield api_client


def described() -> dict[str, Any]:
    """All functions that describe a request, by name."""
    return {
        name: each
        for name, each in vars(calls).items()
        if inspect.isfunction(each)
        and not name.startswith("_")
        and str(inspect.signature(each).return_annotation).startswith("ApiCall[")
    }


# What each is called with, where its parameters do not say so by their names.
WITH = {
    "load_model": ("tiny",),
    "create_loom": ("x",),
    "detokenize": ([1],),
    "apply_template": ([{"role": "user", "content": "x"}],),
    "edit_loom": ("l",),
    "export": ("l",),
    "import_looms": (b"{}",),
    "handle_kv": ("l", 1, "warm"),
    "fork": ("l", 1, 1),
    "move": ("l", 1, 0),
    "note_drawn": ("t", "l"),
}
OPTIONS = {
    "add": {"text": "x"},
    "split": {"at_token": 1},
    "clip": {"keep": 1},
}


def call_with_options(name: str) -> ApiCall[Any]:
    """Return a call of the client method `name` with all its optional parameters."""
    build = described()[name]
    needed = [
        each
        for each in inspect.signature(build).parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    given = WITH.get(name) or tuple(1 if each.name == "node" else "x" for each in needed)
    api_call: ApiCall[Any] = build(*given, **OPTIONS.get(name, {}))
    return api_call


@pytest.fixture(scope="module")
def schema(served: Served) -> dict[str, Any]:
    openapi: dict[str, Any] = served.client.get("/openapi.json").json()
    return openapi


def route_of(schema: dict[str, Any], api_call: ApiCall[Any]) -> tuple[str, dict[str, Any]]:
    """The route that a request goes to: of several, the one with fewer parameters."""
    matches = []
    for path, methods in schema["paths"].items():
        pattern = re.sub(r"\{[^}]*\}", "[^/]+", path)
        if re.fullmatch(pattern, api_call.path) and api_call.method.lower() in methods:
            matches.append((path.count("{"), path, methods[api_call.method.lower()]))
    assert matches, (api_call.method, api_call.path)
    return min(matches, key=lambda each: each[0])[1:]


@pytest.mark.parametrize("name", described())
def test_every_client_call_matches_a_route(schema: dict[str, Any], name: str) -> None:
    api_call = call_with_options(name)
    _, route = route_of(schema, api_call)
    build = described()[name]
    queries = {each["name"] for each in route.get("parameters", []) if each["in"] == "query"}
    assert set(api_call.params) <= queries
    answer = re.fullmatch(r"ApiCall\[(?:\w+\.)?(\w+)\]", inspect.signature(build).return_annotation)
    assert answer is not None
    success = [route["responses"][code] for code in route["responses"] if code.startswith("2")]
    shapes = str(success)
    assert answer[1] == "bytes" or f"schemas/{answer[1]}'" in shapes


def test_every_native_route_has_a_client_method(schema: dict[str, Any]) -> None:
    called = {
        (each.method, route_of(schema, each)[0]) for each in map(call_with_options, described())
    }
    called.add(("GET", "/api/v1/jobs/{job}/events"))
    routes = {
        (method.upper(), path)
        for path, methods in schema["paths"].items()
        for method in methods
        if path.startswith("/api/v1/")
    }
    # The Python clients have no method to copy nodes or to follow the page's change feed.
    exempt = {("POST", "/api/v1/looms/{loom}/nodes/{node}/copy")}
    exempt.add(("GET", "/api/v1/looms/{loom}/events"))
    assert routes - called <= exempt


def test_both_clients_have_the_same_methods() -> None:
    for name in described():
        assert getattr(Client, name).__wrapped__ is getattr(AsyncClient, name).__wrapped__
        assert getattr(Client, name).__doc__
    public = [{each for each in vars(kind) if not each.startswith("_")} for kind in KINDS]
    assert public[0] == public[1]


KINDS = (Client, AsyncClient)


def test_client_creates_grows_reads_and_undoes_a_loom(client: Client) -> None:
    loom = client.create_loom("Tell me a story about a fox.", name="a walk").name
    texts = {0: "", 1: ""}
    ends = {}
    for delta in client.grow(loom, n=2, **FEW):
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.entropies)
        texts[delta.branch] += delta.text
        if delta.finish_reason is not None:
            ends[delta.branch] = delta.finish_reason
    assert ends == {0: "length", 1: "length"}
    nodes = client.nodes(loom, fields=["tokens"]).data
    assert [node.text for node in nodes[1:]] == [texts[0], texts[1]]
    with weft.load("tiny") as lm:
        here = weft.Loom(lm, "Tell me a story about a fox.").grow(2, **FEW)
    assert [node.token_ids for node in nodes[1:]] == [node.tokens for node in here]
    assert client.next_tokens(loom, 1, top=2).next[0].rank == 0
    assert client.find("fox", loom=loom).data
    child = client.add(loom, 1, text=" And").added[0].node
    assert client.path(loom, child).text.endswith(" And")
    assert client.undo(loom).removed == [child]
    assert client.redo(loom).added[0].node == child
    job = client.wait(client.begin_search(loom, strategy="best-of-n", n=2, **FEW).job)
    assert job.status == "ok"
    file = client.export(loom)
    assert client.import_looms(file, name="again").nodes == client.loom(loom).n_nodes
    client.remove_loom(loom)
    assert [each.name for each in client.restore_looms().data] == [loom]


def test_numpy_numbers_are_sent_as_json_numbers(client: Client) -> None:
    loom = client.create_loom("Once").id
    given = {"n": np.int64(2), "top_p": np.float32(0.5), "seed": np.uint64(3), "stop": ("x", "y")}
    bias = {5: np.float32(-1), 7: 2}
    deltas = list(client.grow(loom, max_tokens=np.int32(4), logit_bias=bias, **given))
    texts = ["".join(each.text for each in deltas if each.branch == i) for i in (0, 1)]
    with weft.load("tiny") as lm:
        plain = {"n": 2, "top_p": 0.5, "seed": 3, "stop": ["x", "y"]}
        here = weft.Loom(lm, "Once").grow(max_tokens=4, logit_bias={5: -1.0, 7: 2.0}, **plain)
    assert texts == [node.text for node in here]
    for wrong in (True, "2", np.float64(2.5), np.bool_(1)):
        with pytest.raises(errors.ConfigError, match="n"):
            client.begin(loom, n=wrong)


def test_infinite_logit_bias_works_as_in_process(client: Client) -> None:
    loom = client.create_loom("Once").id
    with weft.load("tiny") as lm:
        here = weft.Loom(lm, "Once")
        (plain,) = here.grow(max_tokens=1, temperature=0)
        ban = {plain.tokens[0]: float("-inf"), 7: np.float32(2)}
        (other,) = here.grow(max_tokens=1, temperature=0, logit_bias=ban)
    for bias, tokens in ((ban, other.tokens), ({9: float("inf")}, [9])):
        job = client.begin(loom, max_tokens=1, temperature=0, logit_bias=bias, wait=True)
        node = client.node(loom, job.nodes[0].node, fields=["params", "tokens"])
        assert list(node.token_ids or ()) == list(tokens) != list(plain.tokens)
        # The stored bias can be sent back unchanged.
        repeat = client.begin(loom, max_tokens=1, logit_bias=node.params["logit_bias"], wait=True)
        assert repeat.nodes
    with pytest.raises(errors.ConfigError, match='logit_bias.5: .*"inf" or "-inf"'):
        client.begin(loom, logit_bias={5: "Infinity"})
    with pytest.raises(errors.ConfigError, match="nan"):
        client.begin(loom, logit_bias={5: float("nan")})


def test_async_client_grows_cancels_and_raises_for_missing_nodes(served: Served) -> None:
    async def walk() -> list[str | None]:
        async with AsyncClient(served.url) as client:
            loom = (await client.create_loom("Once upon a time", template=False)).id
            deltas = [delta async for delta in client.grow(loom, n=2, **FEW)]
            assert (await client.loom(loom)).n_nodes == 3
            async with aclosing(client.grow(loom, n=1, max_tokens=1500, logit_bias=NO_END)) as more:
                async for _ in more:
                    break
            job = (await client.jobs()).data[0]
            ended = await client.wait(job.id)
            assert ended.status == "cancelled"
            with pytest.raises(errors.NotFound):
                await client.node(loom, 99)
            return [delta.finish_reason for delta in deltas]

    assert asyncio.run(walk()).count("length") == 2


def test_leaving_a_growth_early_keeps_generated_tokens(client: Client) -> None:
    loom = client.create_loom("Once upon a time", template=False).id
    with closing(client.grow(loom, n=2, max_tokens=1500, logit_bias=NO_END)) as deltas:
        next(deltas)
    job = client.jobs().data[0]
    assert client.wait(job.id).status == "cancelled"
    nodes = client.nodes(loom).data
    assert [each.finish_reason for each in nodes[1:]] == ["cancelled"] * 2


def test_broken_stream_is_resumed(served: Served) -> None:
    """A proxy closes every connection after some bytes."""
    with door(served.url, n_bytes=3000) as url, Client(url) as client:
        loom = client.create_loom("Tell me a story about a fox.").id
        texts = ["", ""]
        for delta in client.grow(loom, n=2, max_tokens=120, seed=3, temperature=1.5):
            texts[delta.branch] += delta.text
    with Client(served.url) as client:
        assert [node.text for node in client.nodes(loom).data[1:]] == texts


def test_job_lost_in_a_restart_names_the_nodes_with_its_text(served: Served) -> None:
    async def deltas(job: JobReply) -> None:
        async with AsyncClient(served.url) as client:
            async for _ in client.deltas(job):
                pass

    with Client(served.url) as client:
        loom = client.create_loom("Once", template=False).id
        job = client.begin(loom, n=2, **FEW)
        client.wait(job.job)
        client.forget_job(job.job)  # as a new process has forgotten it
        message = rf"may have been restarted.* is in loom '{loom}', nodes 1, 2; .*interrupted"
        for follow in (lambda: list(client.deltas(job)), lambda: asyncio.run(deltas(job))):
            with pytest.raises(errors.NotFound, match=message) as caught:
                follow()
            assert caught.value.what == "job"
        with pytest.raises(errors.NotFound, match="server has been restarted"):
            client.wait(job.job)


class door:
    """A proxy that closes each connection after some bytes of the response.

    The limit grows with each connection, because one event may be long on a busy machine.
    """

    def __init__(self, url: str, n_bytes: int) -> None:
        self.port = int(url.rpartition(":")[2])
        self.n_bytes = n_bytes
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.threads = [threading.Thread(target=self._serve)]

    def __enter__(self) -> str:
        self.threads[0].start()
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            try:
                asker, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._pass, args=(asker,)))
            self.threads[-1].start()

    def _pass(self, asker: socket.socket) -> None:
        with asker, socket.create_connection(("127.0.0.1", self.port)) as server:
            asker.settimeout(0.02)
            server.settimeout(0.02)
            left, self.n_bytes = self.n_bytes, self.n_bytes + 1000
            while left > 0:
                for source, target in ((asker, server), (server, asker)):
                    try:
                        data = source.recv(512)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    if not data:
                        return
                    try:
                        target.sendall(data)
                    except OSError:
                        return
                    left -= len(data) if target is asker else 0


def test_snapshot_after_missed_events_has_the_rest_of_each_text() -> None:
    branches = [BranchObject(branch=0, node=1, id="a", parent=0)]
    reader = GrowthReader(JobReply(job="j", status="running", branches=branches))
    first = reader.take("tok", {"t": [[0, 5, "One ", -0.5, 0.1]]})
    assert (first[0].text, first[0].token_ids, first[0].node) == ("One ", (5,), 1)
    branch_end = {"branch": 0, "node": 1, "id": "a", "finish_reason": "length"}
    rest = reader.take(
        "snapshot", {"texts": [{**branch_end, "text": "One two"}], "branches": [branch_end]}
    )
    assert [(each.text, each.finish_reason) for each in rest] == [("two", None), ("", "length")]
    assert reader.take("branch", {"branch": 0, "finish_reason": "length"}) == []


# Errors


@pytest.mark.parametrize("kind", [each for each in ERROR_MAPPINGS if each is not MemoryError])
def test_server_error_is_raised_as_the_library_error(kind: Any) -> None:
    outcome = ERROR_MAPPINGS[kind]
    body = {"message": "so", "type": outcome.kind, "code": outcome.code, "hint": "do"}
    error = error_from_object(body, outcome.status)
    assert ERROR_MAPPINGS[type(error)].code == outcome.code
    assert (str(error), error.hint) == ("so", "do")


def test_error_details_are_restored(client: Client) -> None:
    loom = client.create_loom("Once", template=False).id
    with pytest.raises(errors.NotFound) as missing:
        client.loom("no such")
    assert (missing.value.what, missing.value.hint) == ("loom", "weft ls lists them all")
    with pytest.raises(errors.ContextOverflow) as long:
        client.create_loom("word " * 3000)
    assert long.value.n_ctx == 2048
    rev = client.loom(loom).rev
    child = client.add(loom, 0, text=" a").added[0].node
    client.edit(loom, child, text=" b", in_place=True)
    with pytest.raises(errors.Conflict) as old:
        client.edit(loom, child, rev=rev, text=" c", in_place=True)
    assert old.value.rev is not None
    for wrong in (
        {"temperatur": 1},
        {"temperature": -1},
        {"regex": "a", "lark": "b"},
        {"stream": True},
    ):
        with pytest.raises(errors.ConfigError, match="allowed|greater|exclude|follow"):
            client.begin(loom, 0, **wrong)
    for name in ("", ".", ".."):
        with pytest.raises(errors.ConfigError):
            client.loom(name)
    assert isinstance(error_from_response(502, b"<html>", {}, "http://x"), errors.Unreachable)
    busy = error_from_object({"message": "x", "code": "queue_full"}, 429, {"retry-after": "7"})
    assert isinstance(busy, errors.QueueFull)
    assert busy.retry_after_s == 7


def test_any_loom_name_reaches_its_loom(client: Client) -> None:
    for name in ("ünïcode ✓", "a?b#c%20d", "dots..and.more"):
        client.create_loom("Once", template=False, name=name)
        assert client.loom(name).name == name


def test_missing_server_fails_at_once_and_stream_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(nowhere) as client, pytest.raises(errors.Unreachable, match="127"):
            client.looms()
    following = EventStreamCursor("/x", "http://x")
    pauses = [following.pause_s(OSError("gone")) for _ in range(call._TRIES)]
    assert sum(pauses) < 30
    with pytest.raises(errors.Unreachable, match="no longer responds"):
        following.pause_s(OSError("gone"))
    with pytest.raises(errors.ConfigError):
        Client("ftp://x")


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Send `reply` to every request; if it is empty, accept connections and stay silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError), ExitStack() as lines:
                while True:
                    line = lines.enter_context(listener.accept()[0])
                    if reply:
                        line.recv(65536)
                        head = b"HTTP/1.1 " + reply.partition(b" ")[0] + b" So\r\nConnection: close"
                        body = reply.partition(b" ")[2]
                        line.sendall(
                            b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
                        )

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def first_errors(url: str) -> dict[str, BaseException]:
    """Return the error of the first request of a client, by method."""

    async def awaited(name: str, *args: Any) -> Any:
        async with AsyncClient(url) as client:
            result = getattr(client, name)(*args)
            return [each async for each in result] if name == "events" else await result

    raised: dict[str, BaseException] = {}
    for name, *args in (("looms",), ("begin", "l"), ("server",), ("events", "j")):
        with Client(url) as client, pytest.raises(errors.WeftError) as error:
            list(getattr(client, name)(*args))
        raised[name] = error.value
        with pytest.raises(errors.WeftError) as error:
            asyncio.run(awaited(name, *args))
        raised[f"a{name}"] = error.value
    return raised


def test_silent_server_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of first request uses the short timeout."""
    assert connection._AT_ONCE.read == 10
    monkeypatch.setattr(connection, "_AT_ONCE", httpx.Timeout(0.2))
    with answering(b"") as url:
        for name, error in first_errors(url).items():
            assert isinstance(error, errors.Unreachable), (name, error)
            assert "no response from" in str(error)
            assert "WEFT_HOST" in error.hint


def test_server_is_verified_once_with_a_short_timeout(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.url) as client:
        requests: list[tuple[str, float]] = []

        def note(request: httpx.Request) -> None:
            requests.append((request.url.path, request.extensions["timeout"]["read"]))

        client._http.event_hooks["request"].append(note)
        client.server()
        client.looms()
        client.models()
    assert requests == [(call.SERVER_PATH, 10), ("/api/v1/looms", 600), ("/api/v1/models", 600)]
    with Client(served.url) as client:
        del requests[:]
        client._http.event_hooks["request"].append(note)
        client.looms()
        client.looms()
    assert [path for path, _ in requests] == [call.SERVER_PATH, "/api/v1/looms", "/api/v1/looms"]


@pytest.mark.parametrize(
    "reply",
    [
        b"404 <html>",
        b'404 {"error": {"message": "File Not Found", "code": 404, "type": "not_found_error"}}',
        b"200 <html>",
        b"200 ",
        b'200 {"object": "list", "data": []}',
        b"301 ",
        b'400 {"error": {}}',
        b'405 {"error": {"message": ""}}',
        b"401 who are you?",
        b"500 oh",
    ],
)
def test_other_program_at_the_address_is_reported(reply: bytes) -> None:
    with answering(reply) as url:
        for name, error in first_errors(url).items():
            assert isinstance(error, errors.Unreachable), (name, error)
            assert "is not a Weft server" in str(error)
            assert "WEFT_HOST" in error.hint


def test_the_top_level_names_load_nothing_until_they_are_used() -> None:
    code = (
        "import sys, weft; assert 'httpx2' not in sys.modules; weft.Client; weft.AsyncClient; "
        "print('httpx2' in sys.modules, 'torch' in sys.modules, 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def test_the_code_of_the_page_runs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "python-client.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setenv("WEFT_HOST", served.url)
    exec(compile(code, str(page), "exec"), {})
