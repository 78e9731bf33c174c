"""The models of outlines for vLLM, SGLang and OpenAI at Weft's server."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import outlines
import pytest
from openai import AsyncOpenAI, OpenAI
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel

ASK = "Name one animal."
EBNF = 'root ::= "a" digit digit\ndigit ::= [0-9]'
LARK = 'start: "a" DIGIT DIGIT\nDIGIT: /[0-9]/'
BOTH = pytest.mark.parametrize("create", [outlines.from_vllm, outlines.from_sglang])
ALL = pytest.mark.parametrize(
    "create", [outlines.from_vllm, outlines.from_sglang, outlines.from_openai]
)
# outlines warns that SGLang's servers take EBNF, whatever the grammar is.
pytestmark = pytest.mark.filterwarnings("ignore:SGLang grammar-based")


class Animal(BaseModel):
    name: Literal["owl", "fox"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none") as client:
        yield client


@pytest.mark.client("outlines", "regex")
@BOTH
def test_regex_int_and_literal_bound_the_text(
    client: OpenAI, server: Any, create: Callable[..., Any]
) -> None:
    model = create(client, server.model)
    assert re.fullmatch("[0-9]{3}", model(ASK, Regex(r"\d{3}"), max_tokens=8))
    assert isinstance(int(model(ASK, int, max_tokens=8)), int)
    assert model(ASK, Literal["owl", "fox"], max_tokens=8) in ("owl", "fox")


@pytest.mark.client("outlines", "regex")
@BOTH
def test_dates_have_ascii_digits(client: OpenAI, server: Any, create: Callable[..., Any]) -> None:
    model = create(client, server.model)
    for text in model(ASK, datetime.date, max_tokens=16, n=4, temperature=2):
        assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text)


@pytest.mark.client("outlines", "grammar")
@BOTH
@pytest.mark.parametrize("grammar", [EBNF, LARK])
def test_grammar_bounds_the_text(
    client: OpenAI, server: Any, create: Callable[..., Any], grammar: str
) -> None:
    text = create(client, server.model)(ASK, CFG(grammar), max_tokens=8)
    assert re.fullmatch("a[0-9][0-9]", text)


@pytest.mark.client("outlines", "structured output")
@ALL
def test_class_and_schema_bound_the_text(
    client: OpenAI, server: Any, create: Callable[..., Any]
) -> None:
    model = create(client, server.model)
    for text in model(ASK, Animal, max_tokens=100, n=2):
        assert isinstance(Animal.model_validate_json(text), Animal)
    schema = JsonSchema('{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    assert json.loads(model(ASK, schema, max_tokens=60)) == {"a": 1}


@pytest.mark.client("outlines", "streaming")
@ALL
def test_stream_joins_to_an_instance(
    client: OpenAI, server: Any, create: Callable[..., Any]
) -> None:
    text = "".join(create(client, server.model).stream(ASK, Animal, max_tokens=100))
    assert isinstance(Animal.model_validate_json(text), Animal)


@pytest.mark.client("outlines", "chat")
@ALL
def test_without_a_type_the_text_is_free(
    client: OpenAI, server: Any, create: Callable[..., Any]
) -> None:
    assert create(client, server.model)(ASK, max_tokens=8)


@pytest.mark.client("outlines", "regex")
@BOTH
def test_concurrent_calls_are_all_bounded(server: Any, create: Callable[..., Any]) -> None:
    async def texts() -> list[str]:
        async with AsyncOpenAI(base_url=server.v1, api_key="none") as client:
            model = create(client, server.model)
            kinds = [Regex(f"[a-z]{{{n}}}") for n in range(1, 7)]
            return await asyncio.gather(*[model(ASK, kind, max_tokens=16) for kind in kinds])

    assert [len(text) for text in asyncio.run(texts())] == [1, 2, 3, 4, 5, 6]
