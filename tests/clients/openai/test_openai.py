"""The openai package at Weft's server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
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


@pytest.mark.client("openai", "responses with memory")
def test_responses_branch_from_a_stored_response(client: OpenAI, server: Any) -> None:
    body: dict[str, Any] = {"model": server.model, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(input="My name is Ada.", **body)
    questions = ("Who are you?", "Who am I?")
    branches = [
        client.responses.create(input=text, previous_response_id=first.id, **body)
        for text in questions
    ]
    for text, branch in zip(questions, branches, strict=True):
        assert branch.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        items = list(client.responses.input_items.list(branch.id, order="asc", limit=1))
        texts = [item.content[0].text for item in items]
        assert texts == ["My name is Ada.", first.output_text, text]
        assert client.responses.retrieve(branch.id).output_text == branch.output_text
    client.responses.delete(branches[0].id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(branches[0].id)


@pytest.mark.client("openai", "streaming with logprobs")
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_stream_chunk_has_the_text_of_its_one_token(client: OpenAI, server: Any, api: str) -> None:
    n_tokens = 0
    if api == "completions":
        for chunk in client.completions.create(
            model=server.model, prompt="Once upon a", max_tokens=8, logprobs=2, stream=True,
            stop=["@@"], temperature=0,
        ):  # fmt: skip
            (choice,) = chunk.choices
            tokens = choice.logprobs.tokens if choice.logprobs else [""]
            n_tokens += choice.logprobs is not None
            assert tokens == [choice.text]
    else:
        for chunk in client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=8, logprobs=True, stream=True,
            temperature=0,
        ):  # fmt: skip
            (choice,) = chunk.choices
            entries = choice.logprobs.content if choice.logprobs else []
            n_tokens += len(entries)
            assert [entry.token for entry in entries] in ([], [choice.delta.content])
    assert n_tokens > 1


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
