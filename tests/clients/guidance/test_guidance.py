"""The models of guidance for vLLM's and SGLang's servers at Weft's server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from guidance import assistant, gen, select, user
from guidance import json as json_of
from guidance.models.experimental import SglangModel, VLLMModel

SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}


@pytest.fixture(params=[VLLMModel, SglangModel])
def answer(request: pytest.FixtureRequest, server: Any) -> Callable[[Any], Any]:
    """Let the assistant answer by a grammar; return the model with its captures."""

    def run(grammar: Any) -> Any:
        model = request.param(server.model, base_url=server.v1, api_key="none", echo=False)
        with user():
            model += "Name one animal."
        with assistant():
            model += grammar
        return model

    return run


@pytest.mark.client("guidance", "regex")
def test_gen_with_a_regex_is_bounded(answer: Callable[[Any], Any]) -> None:
    assert re.fullmatch("[0-9]{3}", answer(gen("code", regex="[0-9]{3}"))["code"])


@pytest.mark.client("guidance", "grammar")
def test_select_takes_one_of_the_options(answer: Callable[[Any], Any]) -> None:
    assert answer(select(["owl", "fox"], name="animal"))["animal"] in ("owl", "fox")


@pytest.mark.client("guidance", "grammar")
def test_sequence_has_all_captures(answer: Callable[[Any], Any]) -> None:
    model = answer("code " + gen("code", regex="[0-9]{2}") + ", " + select(["a", "b"], name="kind"))
    assert re.fullmatch("[0-9]{2}", model["code"])
    assert model["kind"] in ("a", "b")


@pytest.mark.client("guidance", "structured output")
def test_json_fits_the_schema(answer: Callable[[Any], Any]) -> None:
    assert json.loads(answer(json_of("animal", schema=dict(SCHEMA)))["animal"])["legs"] in (2, 4)


@pytest.mark.client("guidance", "chat")
def test_gen_with_max_tokens_is_free_text(answer: Callable[[Any], Any]) -> None:
    assert answer(gen("text", max_tokens=5))["text"]
