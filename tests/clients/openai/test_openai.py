"""The openai package at Weft's server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Name one animal."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Animal(BaseModel):
    legs: int


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none") as client:
        yield client


@pytest.mark.client("openai", "chat")
def test_chat_returns_text_and_usage(client: OpenAI, server: Any) -> None:
    reply = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=8)
    assert reply.choices[0].message.content
    assert 1 <= reply.usage.completion_tokens <= 8


@pytest.mark.client("openai", "streaming")
def test_stream_joins_to_the_text_of_one_reply(client: OpenAI, server: Any) -> None:
    body = {"model": server.model, "messages": ASK, "max_tokens": 8, "temperature": 0}
    with client.chat.completions.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == client.chat.completions.create(**body).choices[0].message.content


@pytest.mark.client("openai", "tools")
def test_required_tool_is_called_with_valid_arguments(client: OpenAI, server: Any) -> None:
    reply = client.chat.completions.create(
        model=server.model,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


@pytest.mark.client("openai", "structured output")
def test_parse_returns_an_instance_of_the_class(client: OpenAI, server: Any) -> None:
    reply = client.chat.completions.parse(
        model=server.model, messages=ASK, response_format=Animal, max_tokens=60, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Animal)


@pytest.mark.client("openai", "responses")
def test_response_has_output_text(client: OpenAI, server: Any) -> None:
    reply = client.responses.create(model=server.model, input="Hello", max_output_tokens=16)
    assert reply.output_text


@pytest.mark.client("openai", "completions with logprobs")
def test_completion_has_logprobs_of_each_token(client: OpenAI, server: Any) -> None:
    reply = client.completions.create(
        model=server.model, prompt="Once upon a", max_tokens=4, logprobs=2
    )
    (choice,) = reply.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    assert [len(top) >= 2 for top in choice.logprobs.top_logprobs] == [True] * 4


@pytest.mark.client("openai", "embeddings")
def test_embeddings_are_unit_vectors(client: OpenAI, server: Any) -> None:
    reply = client.embeddings.create(model=server.model, input=["a fox", "a river"])
    assert len(reply.data) == 2
    assert math.isclose(math.hypot(*reply.data[0].embedding), 1, abs_tol=1e-3)


@pytest.mark.client("openai", "constraints")
@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": ["owl", "fox"]}},
        {"guided_regex": "owl|fox"},
        {"grammar": 'root ::= "owl" | "fox"'},
        {"ebnf": 'root ::= "owl" | "fox"'},
    ],
)
def test_extra_body_bounds_completions_chats_and_responses(
    client: OpenAI, server: Any, body: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"model": server.model, "extra_body": body}
    completion = client.completions.create(prompt="One", n=4, max_tokens=8, **options)
    chat = client.chat.completions.create(messages=ASK, n=4, max_tokens=8, **options)
    response = client.responses.create(input="Hello", max_output_tokens=16, **options)
    texts = [choice.text for choice in completion.choices]
    texts += [choice.message.content for choice in chat.choices]
    assert {*texts, response.output_text} <= {"owl", "fox"}
