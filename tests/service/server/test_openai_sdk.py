"""The real openai SDK, with only its base URL set, against a real server."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import weft
from chatty import chatty
from weft import samples

openai = pytest.importorskip("openai", reason="openai is not installed")
from pydantic import BaseModel  # noqa: E402

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from openai import OpenAI

    from serving import Served

PROMPT = "Once upon a time"
SUM = [{"role": "user", "content": samples.sum}]
OWL = [{"role": "user", "content": samples.record}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


class Owl(BaseModel):
    name: str
    animal: str
    age: int


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api_client:
        yield api_client


@pytest.fixture(scope="module")
def lm(served: Served) -> weft.LM:
    """The LM behind the server: oracles ask it directly."""
    return served.service.models.lm()


@pytest.fixture(scope="module")
def tools_client() -> Iterator[OpenAI]:
    from serving import serving
    from weft.service.server import ServerConfig

    with (
        serving(ServerConfig(port=0, models=(str(chatty()),), engine="numpy")) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api_client,
    ):
        yield api_client


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'big'"):
        client.models.retrieve("big")


def test_greedy_completion_equals_grow(client: OpenAI, lm: weft.LM) -> None:
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    grown = weft.Loom(lm, PROMPT, template=False).grow(max_tokens=12, temperature=0)[0]
    assert reply.choices[0].text == grown.text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(lm.tokenize(PROMPT))
    assert reply.usage.completion_tokens == 12


def test_choice_i_equals_grow_with_seed_plus_i(client: OpenAI, lm: weft.LM) -> None:
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, n=3, seed=40)
    loom = weft.Loom(lm, PROMPT, template=False)
    texts = [loom.grow(max_tokens=8, seed=40 + i)[0].text for i in range(3)]
    assert [choice.text for choice in reply.choices] == texts
    repeat = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, n=3, seed=40)
    assert [choice.text for choice in repeat.choices] == texts


def test_chat_equals_grow(client: OpenAI, lm: weft.LM) -> None:
    reply = client.chat.completions.create(model="tiny", messages=SUM, seed=7)
    grown = weft.Loom(lm, samples.sum).grow(seed=7)[0]
    assert reply.choices[0].message.content == grown.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"


def test_second_call_reuses_the_prompts_kv(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is 12 + 34, and what is 56 + 12?"}]
    usages = []
    for _ in range(2):
        usage = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, n=2
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        usages.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
    (n, first), (_, second) = usages
    assert first < n
    assert second == n


def test_choices_of_several_prompts_are_ordered(client: OpenAI, lm: weft.LM) -> None:
    prompts = [PROMPT, samples.opening + " a fox"]
    reply = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=4, seed=1)
    texts = [
        weft.Loom(lm, prompt, template=False).grow(max_tokens=4, seed=1 + i)[0].text
        for prompt in prompts
        for i in range(2)
    ]
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    ids = [lm.tokenize(prompt) for prompt in prompts]
    repeat = client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=4, seed=1)
    assert [choice.text for choice in repeat.choices] == texts
    one = client.completions.create(model="tiny", prompt=ids[0], max_tokens=4, seed=1)
    assert one.choices[0].text == texts[0]


def test_completion_stream_equals_the_answer(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 3, "seed": 5, "max_tokens": 24}
    expected = client.completions.create(**body)
    texts, reasons, usages = ["", "", ""], dict[int, str](), []
    for chunk in client.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in expected.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in expected.choices}
    assert usages[-1] is not None
    assert expected.usage is not None
    assert usages[-1].completion_tokens == expected.usage.completion_tokens
    assert usages[:-1] == [None] * (len(usages) - 1)


def test_chat_stream_equals_the_answer(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": SUM, "n": 2, "seed": 5}
    expected = client.chat.completions.create(**body)
    texts, reasons = ["", ""], ["", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in expected.choices]
    assert reasons == ["stop", "stop"]


def test_the_async_client_streams_many_calls_at_once(served: Served) -> None:
    async def one(client: Any, seed: int) -> str:
        text = ""
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, seed=seed, max_tokens=8, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(6)))

    texts = asyncio.run(all_of_them())
    loom = weft.Loom(served.service.models.lm(), PROMPT, template=False)
    assert texts == [loom.grow(max_tokens=8, seed=seed)[0].text for seed in range(6)]


def test_echoed_logprobs_equal_measure(client: OpenAI, lm: weft.LM) -> None:
    reply = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    ids = lm.tokenize(PROMPT)
    score = weft.Loom(lm, ids[:1]).measure(ids[1:])
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text == PROMPT
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert np.allclose(logprobs.token_logprobs[1:], score.logprobs, atol=1e-6)
    assert logprobs.tokens == ["<|bos|>", "Once", " upon", " a", " time"]
    assert logprobs.text_offset == [0, 0, 4, 9, 11]


def test_choice_logprobs_equal_one_forward_pass(client: OpenAI, lm: weft.LM) -> None:
    reply = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, seed=2, max_tokens=6, logprobs=3, echo=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    ids = lm.tokenize(PROMPT)
    for choice in reply.choices:
        tokens = choice.model_extra["token_ids"]
        score = weft.Loom(lm, ids).measure(tokens)
        assert choice.model_extra["prompt_token_ids"] == ids
        assert choice.logprobs.token_logprobs[5:] == pytest.approx(score.logprobs, abs=1e-5)
        for name, chosen, top in zip(
            choice.logprobs.tokens[1:],
            choice.logprobs.token_logprobs[1:],
            choice.logprobs.top_logprobs[1:],
            strict=True,
        ):
            assert top[name] == chosen
            assert 3 <= len(top) <= 4
            assert sum(map(math.exp, top.values())) <= 1 + 1e-5
        # The offset of each token's text, in characters.
        starts = choice.logprobs.text_offset
        pairs = zip(choice.logprobs.tokens[1:], starts[1:], strict=True)
        assert all(choice.text[at:].startswith(name) for name, at in pairs)


def test_stream_logprobs_equal_the_answers(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "tiny", "messages": SUM, "seed": 3, "max_tokens": 12,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    expected = client.chat.completions.create(**body).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(**body, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [each.token for each in streamed] == [each.token for each in expected]
    for one, other in zip(streamed, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.token in {each.token for each in one.top_logprobs}
        assert bytes(one.bytes).decode() == one.token


def test_stop_string_is_removed_at_any_token_boundary(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": SUM, "temperature": 0}
    text = client.chat.completions.create(**body).choices[0].message.content
    stop = text[6:11]
    reply = client.chat.completions.create(**body, stop=[stop, "never"], logprobs=True)
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    named = b"".join(bytes(each.bytes) for each in reply.choices[0].logprobs.content)
    assert named.decode().startswith(reply.choices[0].message.content)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**body, stop=stop, stream=True)
    )
    assert streamed == reply.choices[0].message.content


def test_sdk_parse_returns_the_object_of_a_schema(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="tiny", messages=OWL, response_format=Owl, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Owl)


def test_json_object_format_returns_an_object(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=OWL, response_format={"type": "json_object"}, temperature=0
    )
    assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)


def test_a_required_tool_is_called_validly(tools_client: OpenAI) -> None:
    reply = tools_client.chat.completions.create(
        model="chatty", messages=SUM, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, max_tokens=100, temperature=0,
    )  # fmt: skip
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "add"
    assert 0 <= json.loads(call.function.arguments)["a"] <= 99
    assert call.id
    history = [
        *SUM,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "95"},
    ]
    after = tools_client.chat.completions.create(
        model="chatty", messages=history, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.tool_calls is None


def test_streamed_tool_call_equals_the_answer(tools_client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "chatty", "messages": SUM, "tools": TOOLS, "temperature": 0, "max_tokens": 100,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
    }  # fmt: skip
    expected = tools_client.chat.completions.create(**body).choices[0]
    with tools_client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in final.message.tool_calls or ()] == [
        call.function.arguments for call in expected.message.tool_calls or ()
    ]
    assert final.finish_reason == expected.finish_reason == "tool_calls"


@pytest.mark.parametrize("max_tokens", [42, 55, 70])
def test_truncated_later_call_is_omitted_with_finish_length(
    tools_client: OpenAI, max_tokens: int
) -> None:
    """The text ends within the second call, so the answer has only the first call."""
    now: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body: dict[str, Any] = {
        "model": "chatty", "messages": SUM, "tools": [now], "tool_choice": "required", "seed": 0,
    }  # fmt: skip
    expected = tools_client.chat.completions.create(**body, max_tokens=max_tokens).choices[0]
    assert (expected.finish_reason, expected.message.content) == ("length", None)
    assert [call.function.name for call in expected.message.tool_calls or ()] == ["now"]
    content, reason, calls = "", None, []
    for chunk in tools_client.chat.completions.create(**body, max_tokens=max_tokens, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or ()
        reason = choice.finish_reason or reason
    assert (content, reason) == ("", "length")
    assert [call.function.arguments for call in calls] == ["{}"]


def test_incomplete_response_has_only_complete_calls(tools_client: OpenAI) -> None:
    now: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    reply = tools_client.responses.create(
        model="chatty", input=samples.sum, tools=[now], tool_choice="required", temperature=0,
        max_output_tokens=60,
    )  # fmt: skip
    assert (reply.status, [item.type for item in reply.output]) == ("incomplete", ["function_call"])


def test_reasoning_is_a_field_of_its_own(tools_client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "chatty", "messages": SUM, "max_tokens": 12, "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    message = tools_client.chat.completions.create(**body).choices[0].message
    assert message.model_extra["reasoning_content"]
    thought = content = ""
    for chunk in tools_client.chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        thought += (delta.model_extra or {}).get("reasoning_content", "")
        content += delta.content or ""
    assert (thought, content) == (message.model_extra["reasoning_content"], message.content)


def test_embeddings_equal_the_models(client: OpenAI, lm: weft.LM) -> None:
    texts = ["a fox", "an owl"]
    wanted = lm.embed(texts)
    packed = client.embeddings.create(model="tiny", input=texts)  # the SDK asks for base64
    plain = client.embeddings.create(
        model="tiny", input=[lm.tokenize(text) for text in texts], encoding_format="float"
    )
    for reply in (packed, plain):
        assert np.allclose([each.embedding for each in reply.data], wanted, atol=1e-6)
        assert [each.index for each in reply.data] == [0, 1]
    assert packed.usage.prompt_tokens == sum(len(lm.tokenize(text)) for text in texts)


def test_response_equals_the_chats_answer(client: OpenAI) -> None:
    chat = (
        client.chat.completions.create(model="tiny", messages=SUM, temperature=0, max_tokens=40)
        .choices[0]
        .message.content
    )
    reply = client.responses.create(
        model="tiny", input=samples.sum, temperature=0, max_output_tokens=40
    )
    assert reply.output_text == chat
    assert reply.status == "completed"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": samples.greeting}]},
        {"type": "message", "role": "assistant", "content": "I am Weft."},
        {"role": "user", "content": samples.sum},
    ]
    short = client.responses.create(model="tiny", input=items, max_output_tokens=2)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_responses_stream_ends_in_the_response(client: OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input=samples.sum, temperature=0, top_logprobs=1,
        include=["message.output_text.logprobs"],
    ) as stream:  # fmt: skip
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    logprobs = final.output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs) == final.output_text


def test_a_response_parses_and_calls(client: OpenAI, tools_client: OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny", input=samples.record, text_format=Owl, temperature=0
    )
    assert isinstance(parsed.output_parsed, Owl)
    tool: Any = {"type": "function", **TOOLS[0]["function"]}
    reply = tools_client.responses.create(
        model="chatty", input=samples.sum, tools=[tool], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=100, temperature=0,
    )  # fmt: skip
    (call,) = reply.output
    assert call.type == "function_call"
    assert 0 <= json.loads(call.arguments)["a"] <= 99
    after = tools_client.responses.create(
        model="chatty",
        input=[
            {"role": "user", "content": samples.sum},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "95"},
        ],
        max_output_tokens=4,
    )
    assert after.output[0].type == "message"


def test_response_options_that_are_not_supported_are_rejected_by_name(client: OpenAI) -> None:
    for name, value in {"conversation": "conv_1", "background": True}.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="Hi", **{name: value})
        assert caught.value.param == name


@pytest.mark.programs
def test_the_code_of_the_page_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "openai.md"
    text = page.read_text(encoding="utf-8").replace("http://127.0.0.1:8000", served.url)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(block, names)
    names["client"].close()
    assert names["more"].model_extra["loom"]["parent"] == 2
    assert "95" in capsys.readouterr().out
