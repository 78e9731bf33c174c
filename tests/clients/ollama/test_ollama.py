"""The ollama package at Weft's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ollama import AsyncClient, Client, ResponseError
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Name one animal."}]
FEW = {"temperature": 0, "num_predict": 8}


class Animal(BaseModel):
    legs: int


@pytest.fixture(scope="module")
def client(server: Any) -> Client:
    return Client(server.url)


@pytest.mark.client("ollama", "chat")
def test_chat_returns_text_and_counts(client: Client, server: Any) -> None:
    reply = client.chat(server.model, messages=ASK, options=FEW)
    assert reply.message.content
    assert 1 <= reply.eval_count <= 8
    assert reply.total_duration >= reply.eval_duration > 0


@pytest.mark.client("ollama", "streaming")
def test_stream_joins_to_the_text_of_one_reply(client: Client, server: Any) -> None:
    full_text = client.chat(server.model, messages=ASK, options=FEW).message.content
    parts = client.chat(server.model, messages=ASK, options=FEW, stream=True)
    assert "".join(part.message.content for part in parts) == full_text

    async def stream() -> str:
        replies = await AsyncClient(server.url).chat(
            server.model, messages=ASK, options=FEW, stream=True
        )
        return "".join([part.message.content async for part in replies])

    assert asyncio.run(stream()) == full_text


@pytest.mark.client("ollama", "completions")
def test_generate_continues_a_raw_prompt(client: Client, server: Any) -> None:
    reply = client.generate(server.model, "Once upon a", raw=True, options=FEW, keep_alive="5m")
    assert reply.response
    parts = client.generate(server.model, "Once upon a", raw=True, options=FEW, stream=True)
    assert "".join(part.response for part in parts) == reply.response


@pytest.mark.client("ollama", "structured output")
def test_format_is_a_schema(client: Client, server: Any) -> None:
    options = {"temperature": 0, "num_predict": 60}
    form = Animal.model_json_schema()
    reply = client.chat(server.model, messages=ASK, format=form, options=options)
    Animal.model_validate_json(reply.message.content)


@pytest.mark.client("ollama", "tools")
def test_chat_with_tools_answers(client: Client, server: Any) -> None:
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return "Sunny"

    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "Sunny"},
    ]
    reply = client.chat(server.model, messages=turns, tools=[weather], options=FEW)
    assert reply.message.role == "assistant"


@pytest.mark.client("ollama", "models")
def test_models_are_listed_and_described(client: Client, server: Any) -> None:
    assert [model.model for model in client.list().models] == [server.model]
    assert client.ps().models[0].name == server.model
    assert "completion" in client.show(server.model).capabilities


@pytest.mark.client("ollama", "errors")
def test_absent_model_is_an_error_in_streams_too(client: Client) -> None:
    for is_streamed in (False, True):
        with pytest.raises(ResponseError, match="absent") as error:
            list(client.chat("absent", messages=ASK, stream=is_streamed))
        assert error.value.status_code == 404


def test_code_of_the_page_prints_the_answer(
    run_page: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("ollama.md")
    assert "95" in capsys.readouterr().out
