"""The LangChain.js at Weft's server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("langchain.mjs")


def run(feature: str, server: Any) -> Any:
    command = ["node", SCRIPT, feature, server.v1, server.model]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.client("@langchain/openai", "chat")
def test_chat_returns_text(server: Any) -> None:
    assert run("chat", server)


@pytest.mark.client("@langchain/openai", "streaming")
def test_stream_joins_to_the_text_of_one_reply(server: Any) -> None:
    assert run("streaming", server) == run("chat", server)


@pytest.mark.client("@langchain/openai", "tools")
def test_required_tool_is_called(server: Any) -> None:
    call = run("tools", server)
    assert call["name"] == "describe"
    assert isinstance(call["args"]["is_wild"], bool)


@pytest.mark.client("@langchain/openai", "structured output")
def test_parse_returns_an_object_of_the_schema(server: Any) -> None:
    assert isinstance(run("structured", server)["is_wild"], bool)


@pytest.mark.client("langchain (npm)", "agents")
def test_agent_answers(server: Any) -> None:
    assert run("agents", server) >= 2


@pytest.mark.client("@langchain/openai", "embeddings")
def test_each_text_gets_a_vector(server: Any) -> None:
    assert run("embeddings", server) == 2
