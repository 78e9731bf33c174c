"""Errors name the wrong field, and conflicts their reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

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
            "messages.0.content is 5: Input should be a valid string, or Input should be a valid"
            " list",
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
            "prompt.1 is -5: Input should be greater than or equal to 0",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "stop": [5]},
            "stop.0",
            "stop.0 is 5: Input should be a valid string",
        ),
        (
            ResponseRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "x": 1}]}]},
            "input.0.content.0.x",
            "input.0.content.0.x is not a parameter of this call",
        ),
    ],
)
def test_an_error_inside_a_union_names_the_field_that_is_wrong(
    model: type[BaseModel], body: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(model, body)
    assert (error["param"], error["message"]) == (param, message)


def test_conflicts_name_their_reason(served: Served) -> None:
    answer = served.client.post("/api/v1/models", json={"source": "tiny"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
    loom = served.client.post("/api/v1/looms", json={"prompt": "a"}).json()["id"]
    answer = served.client.post(f"/api/v1/looms/{loom}/generate", json={"stop": [""]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
