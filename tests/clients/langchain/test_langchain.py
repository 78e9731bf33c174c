"""langchain's chat model and agent at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel


class Sky(BaseModel):
    clear: bool


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"The sky of {city} is clear."


def model_of(server: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.v1, api_key="none", model=server.model, temperature=0, **options
    )


@pytest.mark.client("langchain-openai", "tools")
def test_required_tool_is_called(server: Any) -> None:
    model = model_of(server, max_tokens=80).bind_tools([weather], tool_choice="required")
    message = model.invoke("What is the weather in Rome?")
    assert {call["name"] for call in message.tool_calls} == {"weather"}
    assert "city" in message.tool_calls[0]["args"]


@pytest.mark.parametrize("uses_responses", [False, True])
@pytest.mark.client("langchain-openai", "tools with structured output")
def test_answer_with_tools_and_a_schema_is_a_call_or_fits(
    server: Any, uses_responses: bool
) -> None:
    model = model_of(server, max_tokens=80, use_responses_api=uses_responses)
    bound = model.bind_tools([weather], response_format=Sky, strict=True)
    for message in (bound.invoke("Is it sunny in Rome?"), _joined(bound.stream("Is it sunny?"))):
        if message.tool_calls:
            assert message.tool_calls[0]["name"] == "weather"
        else:
            assert isinstance(message.additional_kwargs["parsed"], Sky)


@pytest.mark.client("langchain", "tools with structured output")
def test_agent_with_tools_returns_an_instance_of_the_class(server: Any) -> None:
    agent = create_agent(
        model_of(server, max_tokens=60), [weather], response_format=ProviderStrategy(Sky)
    )
    ask = {"messages": [{"role": "user", "content": "Is it sunny in Rome?"}]}
    steps: list[Any] = []
    try:
        for step in agent.stream(ask, {"recursion_limit": 5}, stream_mode="values"):
            steps.append(step)
    except GraphRecursionError:  # a small model may call until the end
        assert any(message.type == "tool" for message in steps[-1]["messages"])
    else:
        assert isinstance(steps[-1]["structured_response"], Sky)


def _joined(chunks: Any) -> Any:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


@pytest.mark.client("langchain-openai", "errors")
@pytest.mark.parametrize("use_responses_api", [False, True])
def test_long_prompt_falls_back(server: Any, use_responses_api: bool) -> None:
    model = model_of(server, use_responses_api=use_responses_api)
    other = RunnableLambda(lambda _: "another model")
    chain = model.with_fallbacks([other], exceptions_to_handle=(ContextOverflowError,))
    assert chain.invoke("a " * 40_000) == "another model"
