"""The anthropic package, and agents over it, at Weft's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError, beta_tool
from langchain_anthropic import ChatAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

ASK: list[Any] = [{"role": "user", "content": "Name one animal."}]
GREEDY = {"temperature": 0}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
ONE_CALL = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


class Animal(BaseModel):
    legs: int


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none") as client:
        yield client


@pytest.mark.client("anthropic", "chat")
def test_message_has_text_and_usage(client: Anthropic, server: Any) -> None:
    message = client.messages.create(model=server.model, messages=ASK, max_tokens=8)
    assert message.content[0].text
    assert 1 <= message.usage.output_tokens <= 8
    count = client.messages.count_tokens(model=server.model, messages=ASK)
    cached = message.usage.cache_read_input_tokens
    assert message.usage.input_tokens + cached == count.input_tokens


@pytest.mark.client("anthropic", "streaming")
def test_stream_joins_to_the_text_of_one_message(client: Anthropic, server: Any) -> None:
    body = {"model": server.model, "messages": ASK, "max_tokens": 8, "extra_body": GREEDY}
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == client.messages.create(**body).content[0].text
    assert final.stop_reason in ("max_tokens", "end_turn")


@pytest.mark.client("anthropic", "streaming")
def test_async_clients_stream_together(server: Any) -> None:
    async def stream(client: AsyncAnthropic) -> str:
        body = {"model": server.model, "messages": ASK, "max_tokens": 8, "extra_body": GREEDY}
        async with client.messages.stream(**body) as events:
            return "".join([text async for text in events.text_stream])

    async def run() -> list[str]:
        async with AsyncAnthropic(base_url=server.url, api_key="none") as client:
            return await asyncio.gather(*(stream(client) for _ in range(4)))

    texts = asyncio.run(run())
    assert texts[0]
    assert texts == texts[:1] * 4


@pytest.mark.client("anthropic", "tools")
def test_tool_is_used_and_its_result_is_read(client: Anthropic, server: Any) -> None:
    body = {"model": server.model, "tools": [WEATHER], "max_tokens": 60, "extra_body": GREEDY}
    message = client.messages.create(messages=ASK, tool_choice=ONE_CALL, **body)
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert set(block.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny"}
    turns = [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    reply = client.messages.create(messages=[*ASK, *turns], tool_choice={"type": "none"}, **body)
    assert reply.stop_reason in ("max_tokens", "end_turn")


@pytest.mark.client("anthropic", "tools")
def test_streamed_tool_use_has_its_input(client: Anthropic, server: Any) -> None:
    body = {"model": server.model, "messages": ASK, "max_tokens": 60, "extra_body": GREEDY}
    with client.messages.stream(tools=[WEATHER], tool_choice=ONE_CALL, **body) as stream:
        kinds = [event.type for event in stream]
        (block,) = stream.get_final_message().content
    assert "input_json" in kinds
    assert set(block.input) == {"city"}


@pytest.mark.client("anthropic", "tool runner")
def test_tool_runner_calls_the_function(client: Anthropic, server: Any) -> None:
    cities = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        cities.append(city)
        return "Sunny"

    runner = client.beta.messages.tool_runner(
        model=server.model,
        messages=ASK,
        tools=[weather],
        tool_choice=ONE_CALL,
        max_tokens=120,
        max_iterations=2,
        extra_body=GREEDY,
    )
    assert [message.stop_reason for message in runner][0] == "tool_use"
    assert cities


@pytest.mark.client("anthropic", "structured output")
def test_parse_returns_an_instance_of_the_class(client: Anthropic, server: Any) -> None:
    message = client.messages.parse(
        model=server.model, messages=ASK, output_format=Animal, max_tokens=60, extra_body=GREEDY
    )
    assert isinstance(message.parsed_output, Animal)


@pytest.mark.client("anthropic", "models")
def test_models_are_listed(client: Anthropic, server: Any) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).display_name == server.model


@pytest.mark.client("anthropic", "errors")
def test_errors_have_the_classes_of_the_package(client: Anthropic, server: Any) -> None:
    with pytest.raises(NotFoundError) as absent:
        client.messages.create(model="absent", messages=ASK, max_tokens=8)
    assert absent.value.type == "not_found_error"
    assert absent.value.request_id
    long = [{"role": "user", "content": "a " * 50_000}]
    with pytest.raises(BadRequestError, match="prompt is too long"):
        client.messages.create(model=server.model, messages=long, max_tokens=8)


@pytest.mark.client("langchain-anthropic", "chat")
@pytest.mark.client("langchain-anthropic", "streaming")
def test_langchain_streams_a_chat(server: Any) -> None:
    model = ChatAnthropic(model=server.model, base_url=server.url, api_key="none", max_tokens=8)
    reply = model.invoke("Name one animal.")
    assert reply.text
    assert reply.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.text for chunk in model.stream("Name one animal."))


@pytest.mark.client("langchain-anthropic", "structured output")
def test_langchain_returns_an_instance_of_the_class(server: Any) -> None:
    model = ChatAnthropic(model=server.model, base_url=server.url, api_key="none", max_tokens=120)
    structured = model.with_structured_output(Animal, method="json_schema")
    assert isinstance(structured.invoke("Describe a fox."), Animal)


def agent(server: Any, **options: Any) -> Agent[None, Any]:
    provider = AnthropicProvider(base_url=server.url, api_key="none")
    return Agent(AnthropicModel(server.model, provider=provider), **options)


def test_pydantic_ai_agent_answers(server: Any) -> None:
    reply = agent(server, model_settings={"max_tokens": 8}).run_sync("Name one animal.")
    assert reply.output


def test_pydantic_ai_agent_returns_an_instance_of_the_class(server: Any) -> None:
    animals = agent(server, output_type=Animal, model_settings={"max_tokens": 60}, retries=3)
    assert isinstance(animals.run_sync("Describe a fox.").output, Animal)


def test_code_of_the_page_prints_the_answer(
    run_page: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("anthropic.md")
    assert "95" in capsys.readouterr().out
