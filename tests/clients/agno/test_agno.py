"""Agents of agno at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.tools import tool
from pydantic import BaseModel


class Sky(BaseModel):
    clear: bool


@tool(stop_after_tool_call=True)  # a small model may call again and again
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"The sky of {city} is clear."


@pytest.mark.parametrize(
    ("api", "limit"), [(OpenAIChat, "max_tokens"), (OpenAIResponses, "max_output_tokens")]
)
@pytest.mark.client("agno", "tools with structured output")
def test_agent_with_a_tool_returns_an_instance_of_the_class(
    server: Any, api: Any, limit: str
) -> None:
    model = api(id=server.model, base_url=server.v1, api_key="none", temperature=0, **{limit: 80})
    agent = Agent(model=model, tools=[weather], output_schema=Sky, telemetry=False)
    result = agent.run("Is it sunny in Rome?")
    if result.tools:
        assert result.tools[0].tool_name == "weather"
    else:
        assert isinstance(result.content, Sky)


@pytest.mark.client("agno", "tools")
def test_agent_reports_the_call_of_a_tool(server: Any) -> None:
    model = OpenAIChat(
        id=server.model, base_url=server.v1, api_key="none", temperature=0, max_tokens=120
    )
    agent = Agent(model=model, tools=[weather], tool_choice="required", telemetry=False)
    result = agent.run("Is it sunny in Rome?")
    assert result.tools[0].tool_name == "weather"
