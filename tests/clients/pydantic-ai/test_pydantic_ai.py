"""Agents of pydantic-ai at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sky(BaseModel):
    clear: bool


def agent_of(server: Any, model: Any, output_type: Any, calls: list[str]) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    agent = Agent(
        model(server.model, provider=provider),
        output_type=output_type,
        model_settings={"temperature": 0, "max_tokens": 80},
    )

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather of a city."""
        calls.append(city)
        return f"The sky of {city} is clear."

    return agent


@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
@pytest.mark.parametrize("output", [NativeOutput, ToolOutput])
@pytest.mark.client("pydantic-ai-slim", "tools with structured output")
def test_agent_with_a_tool_returns_an_instance_of_the_class(
    server: Any, model: Any, output: Any
) -> None:
    calls: list[str] = []
    agent = agent_of(server, model, output(Sky), calls)
    try:
        result = agent.run_sync("Is it sunny in Rome?", usage_limits=UsageLimits(request_limit=3))
    except UsageLimitExceeded:  # a small model may call until the end
        assert calls
    else:
        assert isinstance(result.output, Sky)


@pytest.mark.client("pydantic-ai-slim", "streaming")
def test_streamed_output_fits_the_class(server: Any) -> None:
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    agent = Agent(
        OpenAIChatModel(server.model, provider=provider),
        output_type=NativeOutput(Sky),
        model_settings={"temperature": 0, "max_tokens": 80},
    )
    result = agent.run_stream_sync("Is it sunny in Rome?")
    assert isinstance(result.get_output(), Sky)
