"""By what requests find their replica."""

from __future__ import annotations

import json

import pytest

from weft.scale.route import HEAD, routing_key


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/looms/lm_1",
        "/api/v1/looms/lm_1/generate",
        "/api/v1/looms/lm_1/nodes/3/generate",
        "/api/v1/looms/lm_1/events",
        "/api/v1/looms/lm_1/",
        "/looms/lm_1/rename",
        "/loom/lm_1",
        "/loom/lm%5F1/export",
    ],
)
def test_requests_for_one_loom_have_its_key(path: str) -> None:
    assert routing_key(path) == "lm_1"


@pytest.mark.parametrize(
    "path",
    ["/", "/healthz", "/api/v1/looms", "/api/v1/looms/", "/looms", "/api/v1/server", "/v1/models"],
)
def test_requests_for_no_loom_go_anywhere(path: str) -> None:
    assert routing_key(path, b"") == ""


def test_prompts_with_one_head_have_one_key() -> None:
    head = "word " * HEAD
    one = routing_key("/v1/completions", body(model="a", prompt=head + "one"))
    assert one == routing_key("/v1/completions", body(model="a", prompt=head + "two", n=3))
    assert one != routing_key("/v1/completions", body(model="b", prompt=head + "one"))
    assert one != routing_key("/v1/completions", body(model="a", prompt="one" + head))
    assert one


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
    ],
)
def test_any_body_has_a_key(given: bytes) -> None:
    assert isinstance(routing_key("/v1/completions", given), str)
