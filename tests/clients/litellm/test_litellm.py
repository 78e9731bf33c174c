"""litellm at Weft's server, as an OpenAI and as a vLLM server."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import asks the network for prices

import litellm

ASK = [{"role": "user", "content": "Name one animal."}]
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


class Animal(BaseModel):
    legs: int


def complete(server: Any, provider: str, **options: Any) -> Any:
    return litellm.completion(
        f"{provider}/{server.model}",
        ASK,
        api_base=server.v1,
        api_key="none",
        **{"max_tokens": 60, **options},
    )


def text(server: Any, provider: str, **options: Any) -> str:
    written: str = complete(server, provider, **options).choices[0].message.content
    return written


@pytest.mark.client("litellm", "chat")
@PROVIDERS
def test_chat_returns_text_and_usage(server: Any, provider: str) -> None:
    reply = complete(server, provider, max_tokens=8)
    assert reply.choices[0].message.content
    assert 1 <= reply.usage.completion_tokens <= 8


@pytest.mark.client("litellm", "structured output")
@PROVIDERS
def test_guided_json_fits_the_schema(server: Any, provider: str) -> None:
    assert json.loads(text(server, provider, guided_json=SCHEMA))["legs"] in (2, 4)
    body = {"guided_json": SCHEMA}
    assert json.loads(text(server, provider, extra_body=body))["legs"] in (2, 4)


@pytest.mark.client("litellm", "structured output")
@PROVIDERS
def test_response_format_takes_a_class_and_a_schema(server: Any, provider: str) -> None:
    written = text(server, provider, response_format=Animal, temperature=0)
    assert isinstance(Animal.model_validate_json(written), Animal)
    form = {"type": "json_object", "schema": SCHEMA}
    assert json.loads(text(server, provider, response_format=form))["legs"] in (2, 4)


@pytest.mark.client("litellm", "regex")
@PROVIDERS
@pytest.mark.parametrize(
    "body", [{"guided_regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}]
)
def test_regex_bounds_the_text(server: Any, provider: str, body: dict[str, Any]) -> None:
    assert re.fullmatch("[0-9]{3}", text(server, provider, extra_body=body))


@pytest.mark.client("litellm", "grammar")
@PROVIDERS
def test_grammar_bounds_the_text(server: Any, provider: str) -> None:
    body = {"guided_grammar": "root ::= [0-9] [0-9]"}
    assert re.fullmatch("[0-9]{2}", text(server, provider, extra_body=body))


@pytest.mark.client("litellm", "streaming")
@PROVIDERS
def test_stream_is_bounded(server: Any, provider: str) -> None:
    chunks = complete(server, provider, stream=True, extra_body={"guided_regex": "[0-9]{9}"})
    written = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert re.fullmatch("[0-9]{9}", written)


@pytest.mark.client("litellm", "completions")
def test_completion_is_bounded(server: Any) -> None:
    reply = litellm.text_completion(
        "Once upon a",
        f"text-completion-openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        max_tokens=8,
        extra_body={"guided_choice": ["owl", "fox"]},
    )
    assert reply.choices[0].text in ("owl", "fox")


@pytest.mark.client("litellm", "responses")
def test_response_is_bounded(server: Any) -> None:
    reply = litellm.responses(
        "Name one animal.",
        f"openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        max_output_tokens=8,
        extra_body={"guided_choice": ["owl", "fox"]},
    )
    assert reply.output[0].content[0].text in ("owl", "fox")


@pytest.mark.client("litellm", "errors")
def test_wrong_regex_is_a_bad_request(server: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="guided_regex|Regex"):
        complete(server, "openai", extra_body={"guided_regex": "[0-9"})


@pytest.mark.client("litellm", "errors")
@PROVIDERS
@pytest.mark.parametrize("stream", [False, True])
def test_long_prompt_is_a_context_window_error(server: Any, provider: str, stream: bool) -> None:
    ask = [{"role": "user", "content": "a " * 40_000}]
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is"):
        litellm.completion(
            f"{provider}/{server.model}",
            ask,
            api_base=server.v1,
            api_key="none",
            stream=stream,
        )
