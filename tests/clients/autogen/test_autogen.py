"""autogen's model client and agent at Weft's server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.models import ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Sky(BaseModel):
    clear: bool


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"The sky of {city} is clear."


WEATHER = FunctionTool(weather, description="Return the weather of a city.", strict=True)


def client_of(server: Any) -> OpenAIChatCompletionClient:
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family="unknown",
        structured_output=True,
    )
    return OpenAIChatCompletionClient(
        model=server.model,
        base_url=server.v1,
        api_key="none",
        model_info=info,
        temperature=0,
        max_tokens=80,
    )


@pytest.mark.client("autogen-ext", "tools with structured output")
def test_answer_with_tools_and_a_schema_is_a_call_or_fits(server: Any) -> None:
    async def ask(choice: Any) -> Any:
        client = client_of(server)
        question = [UserMessage(content="Is it sunny in Rome?", source="user")]
        result = await client.create(question, tools=[WEATHER], tool_choice=choice, json_output=Sky)
        await client.close()
        return result.content

    for choice in ("auto", "required", "none"):
        content = asyncio.run(ask(choice))
        if isinstance(content, str):
            assert choice != "required"
            assert isinstance(Sky.model_validate_json(content), Sky)
        else:
            assert choice != "none"
            assert all(isinstance(call, FunctionCall) for call in content)


@pytest.mark.client("autogen-agentchat", "tools with structured output")
def test_agent_with_a_tool_returns_an_instance_of_the_class(server: Any) -> None:
    async def run() -> Any:
        client = client_of(server)
        agent = AssistantAgent(
            "sky", client, tools=[WEATHER], output_content_type=Sky, reflect_on_tool_use=True
        )
        result = await agent.run(task="Is it sunny in Rome?")
        await client.close()
        return result.messages[-1]

    assert isinstance(asyncio.run(run()).content, Sky)
