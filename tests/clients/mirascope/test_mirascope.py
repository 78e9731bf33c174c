"""Mirascope at Weft's server."""

from __future__ import annotations

from typing import Any

import pytest
from mirascope import llm
from pydantic import BaseModel


class Animal(BaseModel):
    is_wild: bool


@llm.tool
def describe(is_wild: bool) -> str:
    """Describe an animal."""
    return str(is_wild)


@pytest.fixture(scope="module")
def model(server: Any) -> llm.Model:
    llm.register_provider("openai:completions", scope="weft/", base_url=server.v1, api_key="none")
    return llm.Model(f"weft/{server.model}", max_tokens=40)


@pytest.mark.client("mirascope", "chat")
def test_call_returns_text(model: llm.Model) -> None:
    assert model.call("Name one animal.").text()


@pytest.mark.client("mirascope", "streaming")
def test_stream_has_text(model: llm.Model) -> None:
    assert "".join(model.stream("Name one animal.").text_stream())


@pytest.mark.client("mirascope", "structured output")
def test_format_returns_an_instance_of_the_class(model: llm.Model) -> None:
    assert isinstance(model.call("A wolf.", format=Animal).parse(), Animal)
