"""The server with SmolLM2, called by the openai package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from models.conftest import generate_text
from real_models import SMOLLM2_FOLDER, real_model

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("torch", reason="torch is not installed")

QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Athens", "Rome", "Lisbon"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from serving import serving
    from weft.service.server import ServerConfig

    config = ServerConfig(port=0, models=(str(real_model(SMOLLM2_FOLDER)),))
    with (
        serving(config) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    return str(client.models.list().data[0].id)


def test_greedy_answer_equals_that_of_generate(
    client: Any, model: str, transformers_model: Any, transformers_tokenizer: Any
) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=12
    )
    expected = generate_text(transformers_model, transformers_tokenizer, QUESTION)
    assert answer.choices[0].message.content == expected


def test_streamed_text_equals_the_answer_without_streaming(client: Any, model: str) -> None:
    request = {"model": model, "messages": QUESTION, "temperature": 0.8, "seed": 5}
    full = client.chat.completions.create(**request, max_tokens=24)
    chunks = client.chat.completions.create(**request, max_tokens=24, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == full.choices[0].message.content


def test_response_format_gives_json_of_the_schema(client: Any, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Athens", "Rome", "Lisbon")
