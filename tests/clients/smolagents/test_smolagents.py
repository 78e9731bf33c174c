"""smolagents at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents import OpenAIModel, Tool, ToolCallingAgent


class Describe(Tool):
    name = "describe"
    description = "Describe an animal."
    inputs = {"is_wild": {"type": "boolean", "description": "Whether it is wild."}}
    output_type = "string"

    def forward(self, is_wild: bool) -> str:
        return str(is_wild)


@pytest.fixture(scope="module")
def model(server: Any) -> OpenAIModel:
    return OpenAIModel(
        model_id=server.model, api_base=server.v1, api_key="none", max_tokens=40, temperature=0
    )


HELLO = [{"role": "user", "content": [{"type": "text", "text": "Name one animal."}]}]


@pytest.mark.client("smolagents", "chat")
def test_generate_returns_text(model: OpenAIModel) -> None:
    assert model.generate(HELLO).content


@pytest.mark.client("smolagents", "streaming")
def test_stream_joins_to_the_text_of_one_reply(model: OpenAIModel) -> None:
    text = "".join(delta.content or "" for delta in model.generate_stream(HELLO))
    assert text == model.generate(HELLO).content


@pytest.mark.client("smolagents", "tools")
def test_model_calls_a_tool(model: OpenAIModel) -> None:
    message = model.generate(HELLO, tools_to_call_from=[Describe()])
    assert message.tool_calls[0].function.name == "describe"


@pytest.mark.client("smolagents", "agents")
def test_agent_runs_a_step(model: OpenAIModel) -> None:
    agent = ToolCallingAgent(tools=[Describe()], model=model, max_steps=1, verbosity_level=0)
    agent.run("Say whether a wolf is wild.")
    (step,) = [step for step in agent.memory.steps if hasattr(step, "tool_calls")]
    assert step.tool_calls
