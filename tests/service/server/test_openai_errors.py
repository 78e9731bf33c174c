"""Errors name the wrong field, and conflicts their reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from weft.service.server.anthropic.messages import MessagesRequest
from weft.service.server.errors import serialize_error
from weft.service.server.openai.chat import ChatRequest
from weft.service.server.openai.completions import CompletionRequest
from weft.service.server.openai.responses import ResponseRequest

if TYPE_CHECKING:
    from serving import Served


def error_of(model: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    error: dict[str, Any] = serialize_error(RequestValidationError(caught.value.errors()))[1]
    return error


def chat_of(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def message_of(content: Any) -> dict[str, Any]:
    return {**chat_of(content), "max_tokens": 4}


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (
            ChatRequest,
            chat_of([{"type": "text", "text": "a", "foo": 1}]),
            "messages.0.content.0.foo",
            "messages.0.content.0.foo is not a parameter of this call",
        ),
        (
            ChatRequest,
            chat_of([{"text": "a"}]),
            "messages.0.content.0.type",
            "messages.0.content.0.type is missing",
        ),
        (
            ChatRequest,
            chat_of(5),
            "messages.0.content",
            "messages.0.content is 5; it must be a string or a list",
        ),
        (
            ChatRequest,
            {**chat_of("a"), "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "tool_choice.function is missing",
        ),
        (
            CompletionRequest,
            {"prompt": [1, -5]},
            "prompt.1",
            "prompt.1 is -5; it must be 0 or more",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "stop": [5]},
            "stop.0",
            "stop.0 is 5; it must be a string",
        ),
        (
            ResponseRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "x": 1}]}]},
            "input.0.content.0.x",
            "input.0.content.0.x is not a parameter of this call",
        ),
        (CompletionRequest, {"prompt": []}, "prompt", "prompt must not be empty"),
        (
            CompletionRequest,
            {"prompt": [["a"]]},
            "prompt.0.0",
            'prompt.0.0 is "a"; it must be an integer',
        ),
        (
            CompletionRequest,
            {"prompt": "a", "echo": 1},
            "echo",
            "echo is 1; it must be true or false",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "n": 0},
            "n",
            "n is 0; it must be 1 or more",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "temperature": -1},
            "temperature",
            "temperature is -1; it must be 0 or more",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "response_format": "json"},
            "response_format",
            'response_format is "json"; it must be an object',
        ),
        (
            ChatRequest,
            {**chat_of("a"), "tool_choice": "any"},
            "tool_choice",
            'tool_choice is "any"; it must be "auto", "none" or "required"',
        ),
        (
            ChatRequest,
            {**chat_of("a"), "loom": {"logprob_tokens": [1] * 65}},
            "loom.logprob_tokens",
            "loom.logprob_tokens must have 64 entries or less",
        ),
        (
            MessagesRequest,
            {**message_of([{"type": "text", "text": "a", "foo": 1}])},
            "messages.0.content.0.foo",
            "messages.0.content.0.foo is not a parameter of this call",
        ),
        (
            MessagesRequest,
            {**message_of([{"type": "text"}])},
            "messages.0.content.0.text",
            "messages.0.content.0.text is missing",
        ),
        (
            MessagesRequest,
            {**message_of("a"), "mcp_servers": [{}]},
            "mcp_servers",
            "mcp_servers must be empty",
        ),
    ],
)
def test_an_error_inside_a_union_names_the_field_that_is_wrong(
    model: type[BaseModel], body: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(model, body)
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        (
            chat_of([{"type": "text"}]),
            "invalid_parameter",
            "messages.0.content.0.text",
            "messages.0.content.0.text is missing",
        ),
        (
            chat_of([{"type": "video_url", "video_url": {"url": "http://127.0.0.1/a"}}]),
            "unsupported_parameter",
            "messages.0.content.0",
            "messages.0.content.0: is 'video_url'; only text is supported",
        ),
        (
            {**chat_of("a"), "response_format": {"type": "json_schema"}},
            "invalid_parameter",
            "response_format.json_schema",
            "response_format.json_schema is missing",
        ),
        (
            {
                **chat_of("a"),
                "response_format": {"type": "json_schema", "json_schema": {}, "schema": {}},
            },
            "invalid_parameter",
            "response_format.schema",
            "response_format.schema: not together with response_format.json_schema",
        ),
        (
            {**chat_of("a"), "mirostat": {"a": True}},
            "unsupported_parameter",
            "mirostat",
            'mirostat: is {"a": true}; Weft does not implement this parameter here. Leave it out,'
            " or send 0",
        ),
    ],
)
def test_errors_of_chats_state_the_real_cause(
    served: Served, body: dict[str, Any], code: str, param: str, message: str
) -> None:
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["message"]) == (code, param, message)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/v1/looms?limit=x", 'limit is "x"; it must be an integer'),
        ("/api/v1/looms?limit=0", 'limit is "0"; it must be 1 or more'),
    ],
)
def test_errors_of_a_query_have_no_words_of_the_library(
    served: Served, path: str, message: str
) -> None:
    error = served.client.get(path).json()["error"]
    assert (error["param"], error["message"]) == ("limit", message)


def test_conflicts_name_their_reason(served: Served) -> None:
    answer = served.client.post("/api/v1/models", json={"source": "tiny"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
    assert answer.json()["error"]["param"] == "id"
    named = {"prompt": "a", "name": "taken"}
    loom = served.client.post("/api/v1/looms", json=named).json()["id"]
    copy = {"new_loom": "taken"}
    answer = served.client.post(f"/api/v1/looms/{loom}/nodes/0/copy", json=copy)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "name_taken", "new_loom")
    answer = served.client.post(f"/api/v1/looms/{loom}/generate", json={"stop": [""]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [99_999_999]}),
        ("/v1/completions", {"prompt": [[1], [99_999_999]]}),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [99_999_999]}),
        ("/v1/embeddings", {"input": [99_999_999]}),
    ],
)
def test_tokens_outside_the_vocabulary_have_one_code(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("tokens_out_of_vocabulary", list(body)[-1])
