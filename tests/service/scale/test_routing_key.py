"""Routing keys of requests."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack

import pytest

from serving import openapi
from weft.service.scale.routing_key import BUSY, HEADS, PromptRouter, RoutingKey, routing_key

LOOM = "00ff00ff00ff00ff"


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "path",
    [
        f"/api/v1/looms/{LOOM}",
        f"/api/v1/looms/{LOOM}/generate",
        f"/api/v1/looms/{LOOM}/nodes/3/generate",
        f"/api/v1/looms/{LOOM}/events",
        f"/api/v1/looms/{LOOM}/",
        f"/looms/{LOOM}/rename",
        f"/loom/{LOOM}",
        f"/loom/%30{LOOM[1:]}/export",
        f"/api/v1/jobs/jb_{LOOM}_1234/events",
        f"/api/v1/jobs/jb_{LOOM}_1234",
    ],
)
def test_requests_for_one_loom_have_its_key(path: str) -> None:
    assert routing_key(path) == RoutingKey(LOOM)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (f"/node/{LOOM}-3", {}),
        ("/node/ramify", {"node_id": f"{LOOM}-3", "n": 2}),
        ("/v1/completions", {"prompt": "x", "loom": {"loom": LOOM}}),
    ],
)
def test_loom_in_the_body_is_the_key(path: str, fields: dict[str, object]) -> None:
    assert routing_key(path, body(**fields) if fields else b"") == RoutingKey(LOOM)


def test_every_route_of_a_loom_node_or_job_has_its_key() -> None:
    ids = {"loom": LOOM, "loom_id": LOOM, "job": f"jb_{LOOM}_1", "node_id": f"{LOOM}-1"}
    n_checked = 0
    for path in openapi()["paths"]:
        names = re.findall(r"\{(\w+)", path)
        if names and names[0] in ids:
            n_checked += 1
            filled = re.sub(r"\{(\w+)\}", lambda match: ids.get(match[1], "1"), path)
            assert routing_key(filled) == RoutingKey(LOOM), path
        elif not names:
            assert routing_key(path) == RoutingKey(), path
    assert n_checked > 20


@pytest.mark.parametrize("path", ["/api/v1/looms/my%20loom/generate", "/loom/my loom"])
def test_loom_name_is_distinguished_from_its_id(path: str) -> None:
    assert routing_key(path) == RoutingKey("my loom", is_name=True)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/healthz",
        "/api/v1/looms",
        "/api/v1/looms/",
        "/api/v1/looms/restore",
        "/looms",
        "/looms/import",
        "/api/v1/jobs",
        "/api/v1/jobs/jb_1234",
        "/api/v1/server",
        "/v1/models",
    ],
)
def test_requests_without_a_loom_have_no_key(path: str) -> None:
    assert routing_key(path) == RoutingKey()


def test_prompts_with_one_head_have_one_key() -> None:
    head = "word " * HEADS[-1]
    one = routing_key("/v1/completions", body(model="a", prompt=head + "one"))
    assert one == routing_key("/v1/completions", body(model="a", prompt=head + "two", n=3))
    assert one != routing_key("/v1/completions", body(model="b", prompt=head + "one"))
    assert one != routing_key("/v1/completions", body(model="a", prompt="one" + head))
    assert one.key
    assert not one.is_name


def test_few_shot_prompts_share_a_replica_until_it_is_busy() -> None:
    shots = "Translate to French.\nsea otter => loutre de mer\n" * 6
    keys = [
        routing_key("/v1/completions", body(model="a", prompt=f"{shots}{number}" * 20))
        for number in range(BUSY + 1)
    ]
    assert len({key.key for key in keys}) == 1
    router = PromptRouter()
    with ExitStack() as running:
        *first, last = [running.enter_context(router.routed(key.heads)) for key in keys]
        assert set(first) == {keys[0].key}
        assert last == keys[-1].heads[1]
    with router.routed(keys[-1].heads) as replica:  # where its KV is
        assert replica == last


def test_all_turns_of_a_chat_have_one_key() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    later = [*first, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "so?"}]
    other = [first[0], {"role": "user", "content": "what?"}]
    keys = [
        routing_key("/v1/chat/completions", body(model="a", messages=messages))
        for messages in (first, later, other)
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": null}',
        b"[" * 100_000,
        b"\xff",
        b'{"messages": 3}',
        b'{"messages": ["x", null]}',
        b'{"prompt": [1, 2]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "loom": 3}',
        b'{"loom": {"loom": 3}}',
        b'{"node_id": 3}',
    ],
)
def test_any_body_has_a_key(given: bytes) -> None:
    for path in ("/v1/completions", "/node/ramify", "/api/v1/looms"):
        assert isinstance(routing_key(path, given).key, str)
