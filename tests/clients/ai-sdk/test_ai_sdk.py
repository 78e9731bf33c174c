"""The Vercel AI SDK at Weft's server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def run(server: Any, api: str, mode: str) -> None:
    """Run the agent; check that it returns an object of the schema, or calls until the end."""
    command = ["node", FOLDER / "agent.mjs", server.v1, server.model, api, mode]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if result["output"] is None:
        assert all(call["toolName"] == "weather" for call in result["calls"])
        assert len(result["calls"]) >= 3
    else:
        assert isinstance(result["output"]["clear"], bool)


@pytest.mark.parametrize("mode", ["generate", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.client("@ai-sdk/openai", "tools with structured output")
def test_openai_provider_with_a_tool_returns_an_object_of_the_schema(
    server: Any, api: str, mode: str
) -> None:
    run(server, api, mode)


@pytest.mark.parametrize("mode", ["generate", "stream"])
@pytest.mark.client("@ai-sdk/openai-compatible", "tools with structured output")
def test_compatible_provider_with_a_tool_returns_an_object_of_the_schema(
    server: Any, mode: str
) -> None:
    run(server, "compatible", mode)
