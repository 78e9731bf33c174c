"""Agents of openai-agents at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CALLS: list[str] = []


class Sky(BaseModel):
    clear: bool


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    CALLS.append(city)
    return f"The sky of {city} is clear."


@pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.client("openai-agents", "tools with structured output")
def test_agent_with_a_tool_returns_an_instance_of_the_class(
    server: Any, api: Any, choice: str
) -> None:
    CALLS.clear()
    model = api(model=server.model, openai_client=AsyncOpenAI(base_url=server.v1, api_key="none"))
    settings = ModelSettings(temperature=0, max_tokens=80, tool_choice=choice)
    agent = Agent(
        name="sky", model=model, tools=[weather], output_type=Sky, model_settings=settings
    )
    try:
        result = Runner.run_sync(agent, "Is it sunny in Rome?", max_turns=3)
    except MaxTurnsExceeded:  # a small model may call until the end
        assert CALLS
    else:
        assert isinstance(result.final_output, Sky)
        assert CALLS or choice == "auto"
