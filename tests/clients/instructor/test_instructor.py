"""instructor at Weft's server."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Is it sunny in Rome?"}]


class Sky(BaseModel):
    """The state of the sky."""

    clear: bool


def ask(server: Any, mode: Mode, **options: Any) -> Any:
    with OpenAI(base_url=server.v1, api_key="none") as client:
        return instructor.from_openai(client, mode=mode).create(
            model=server.model, messages=ASK, response_model=Sky, max_retries=0, **options
        )


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
@pytest.mark.client("instructor", "structured output")
def test_each_mode_returns_an_instance_of_the_class(server: Any, mode: Mode) -> None:
    assert isinstance(ask(server, mode, max_tokens=80), Sky)


@pytest.mark.client("instructor", "responses")
def test_responses_return_an_instance_of_the_class(server: Any) -> None:
    assert isinstance(ask(server, Mode.RESPONSES_TOOLS), Sky)
