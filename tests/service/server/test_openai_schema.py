"""The replies and events of `/v1` have exactly the fields that the OpenAPI schema describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from chatty import chatty
from serving import serving
from weft.service.server import ServerConfig

if TYPE_CHECKING:
    from serving import Served

HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "add", "parameters": PARAMETERS}
CHAT_TOOLS = {
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "required",
    "max_tokens": 60,
}
PROMPTS = {"prompt": "Once", "max_tokens": 3}
CHAT = {"messages": HELLO, "max_tokens": 3}
RESPONSE = {"input": "Hello", "max_output_tokens": 3}
EXTRAS = {"return_token_ids": True, "prompt_logprobs": 1, "loom": {"logprob_tokens": [5]}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CASES = [
    ("completions", PROMPTS),
    ("completions", {**PROMPTS, "prompt": ["Once", "A fox"], "n": 2, "logprobs": 2}),
    ("completions", {**PROMPTS, "echo": True, "logprobs": 0}),
    ("completions", {**PROMPTS, **EXTRAS, "logprobs": 1, "stream_options": None}),
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**CHAT, **EXTRAS, "logprobs": True}),
    ("chat/completions", {**CHAT, **CHAT_TOOLS}),
    ("messages", CHAT),
    ("messages", {**CHAT, "loom": {"logprob_tokens": []}}),
    ("responses", RESPONSE),
    ("responses", {**RESPONSE, **LOGPROBS}),
    (
        "responses",
        {
            **RESPONSE,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
            "max_output_tokens": 60,
        },
    ),
]


@pytest.fixture(scope="module")
def chats() -> Iterator[Served]:
    """A server of a model whose chat template has tools."""
    with serving(ServerConfig(port=0, models=(str(chatty()),), engine="numpy")) as server:
        yield server


@pytest.fixture(scope="module")
def schema(chats: Served) -> dict[str, Any]:
    return _closed(chats.client.get("/openapi.json").json())


def _closed(schema: Any) -> Any:
    """Return a schema in which no object takes fields that it does not describe."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _described(schema: dict[str, Any], path: str, kind: str) -> Draft202012Validator:
    content = schema["paths"][f"/v1/{path}"]["post"]["responses"]["200"]["content"][kind]
    form = content.get("schema") or content["itemSchema"]["properties"]["data"]["contentSchema"]
    return Draft202012Validator({**form, "components": schema["components"]})


@pytest.mark.parametrize(("path", "body"), CASES)
def test_reply_has_the_described_fields(
    chats: Served, schema: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    reply = chats.client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    _described(schema, path, "application/json").validate(reply.json())


@pytest.mark.parametrize(("path", "body"), CASES)
def test_events_have_the_described_fields(
    chats: Served, schema: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    is_named = path in ("responses", "messages")
    if not is_named:
        body = {**body, "stream_options": {"include_usage": True}}
    reply = chats.client.post(f"/v1/{path}", json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    validator = _described(schema, path, "text/event-stream")
    if not is_named:
        assert events.pop() == "[DONE]"
    assert events
    for event in events:
        assert "error" not in json.loads(event)
        validator.validate(json.loads(event))


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_have_the_described_fields(
    chats: Served, schema: dict[str, Any], form: str
) -> None:
    reply = chats.client.post("/v1/embeddings", json={"input": ["a", "b"], "encoding_format": form})
    _described(schema, "embeddings", "application/json").validate(reply.json())


def test_errors_have_the_described_fields(chats: Served, schema: dict[str, Any]) -> None:
    reply = chats.client.post("/v1/completions", json={"prompt": "Once", "temperature": -1})
    errors = schema["paths"]["/v1/completions"]["post"]["responses"][str(reply.status_code)]
    form = errors["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**form, "components": schema["components"]})
    validator.validate(reply.json())
