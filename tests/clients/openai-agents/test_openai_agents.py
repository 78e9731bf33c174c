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


@pytest.mark.client("openai-agents", "responses with memory")
def test_runs_continue_a_stored_response(server: Any) -> None:
    client = AsyncOpenAI(base_url=server.v1, api_key="none")
    model = OpenAIResponsesModel(model=server.model, openai_client=client)
    form = {"regex": "[A-Z][a-z ]{5,20}[.]"}  # a run fails if max_tokens cuts its answer
    settings = ModelSettings(temperature=0, extra_body=form)
    agent = Agent(name="ada", instructions="Be short.", model=model, model_settings=settings)
    first = Runner.run_sync(agent, "My name is Ada.")
    for _ in range(2):
        run = Runner.run_sync(
            agent, "What is my name?", previous_response_id=first.last_response_id
        )
        usage = run.raw_responses[-1].usage
        earlier = first.raw_responses[-1].usage
        assert usage.input_tokens > earlier.total_tokens
        assert usage.input_tokens_details.cached_tokens >= earlier.input_tokens


@pytest.mark.client("openai-agents", "responses with memory")
def test_result_of_a_tool_continues_the_response_that_called_it(server: Any) -> None:
    CALLS.clear()
    client = AsyncOpenAI(base_url=server.v1, api_key="none")
    model = OpenAIResponsesModel(model=server.model, openai_client=client)
    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="sky", model=model, tools=[weather], model_settings=settings)
    try:
        Runner.run_sync(agent, "Rome?", max_turns=2, auto_previous_response_id=True)
    except MaxTurnsExceeded:  # a small model may call until the end
        pass
    assert CALLS
