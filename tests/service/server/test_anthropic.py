"""Anthropic's `/v1/messages`: events, blocks, errors and parameters of the protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import weft
from chatty import chatty
from serving import KEY, serving
from weft.service.server import ServerConfig
from weft.service.server.anthropic.protocol import MessageError, MessageReply

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

Json = dict[str, Any]
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SUM: list[Json] = [{"role": "user", "content": weft.samples.sum}]
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
ANSWER = "37 + 58 = 95.\nThe answer is 95."
ADD: Json = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def chats() -> Iterator[Served]:
    """A server whose chat template reads tools and enable_thinking."""
    with serving(ServerConfig(port=0, models=(str(chatty()),), engine="numpy")) as served:
        yield served


def post(served: Served, path: str = MESSAGES, **body: Any) -> Json:
    defaults = {} if path == COUNT else {"max_tokens": 24, "temperature": 0}
    answer = served.client.post(path, json={"messages": SUM, **defaults, **body})
    assert answer.status_code == 200, answer.text
    reply: Json = answer.json()
    return reply


def stream(served: Served, **body: Any) -> list[Json]:
    """Return the events; each is named by its type."""
    body = {"messages": SUM, "max_tokens": 24, "temperature": 0, "stream": True, **body}
    answer = served.client.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    sent = []
    for piece in answer.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        sent.append(event)
    return sent


def gathered(events: list[Json]) -> Json:
    """Return the message that events make, after the protocol's rules."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message = events[0]["message"]
    is_open = False
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "json": ""})
            is_open = True
        elif kind == "content_block_delta":
            assert is_open
            block, delta = message["content"][event["index"]], event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "")
            if field:
                block[field] += delta[field]
            elif delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
        elif kind == "content_block_stop":
            is_open = False
            block = message["content"][event["index"]]
            if arguments := block.pop("json"):
                block["input"] = json.loads(arguments)
        elif kind == "message_delta":
            message = {**message, **event["delta"], "usage": event["usage"]}
    assert not is_open
    return {**message, "id": ""}


def test_message_has_text_and_usage(served: Served) -> None:
    message = post(served)
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    MessageReply.model_validate(message)
    usage = post(served)["usage"]
    n_prompt = post(served, COUNT)["input_tokens"]
    # The second call finds the KV of the first one's prompt.
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert usage["cache_read_input_tokens"] > 0
    assert usage["cache_creation_input_tokens"] == 0


def test_stream_makes_same_message(served: Served) -> None:
    message = post(served)
    events = stream(served)
    assert events[1] == {"type": "ping"}
    streamed = gathered(events)
    assert streamed == {**message, "id": "", "usage": streamed["usage"]}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["never", "9"]}, "stop_sequence", "9"),
        ({"max_tokens": 32_000}, "end_turn", None),
    ],
)
def test_message_has_its_stop_reason(
    served: Served, is_streamed: bool, body: Json, reason: str, sequence: str | None
) -> None:
    message = gathered(stream(served, **body)) if is_streamed else post(served, **body)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    if sequence:
        assert sequence not in message["content"][0]["text"]


def test_full_context_ends_message(served: Served) -> None:
    n_ctx = served.service.models.lm().n_ctx
    many = [{"role": "user", "content": "a " * (n_ctx - 40)}]
    left = n_ctx - post(served, COUNT, messages=many)["input_tokens"]
    message = post(
        served,
        messages=many,
        max_tokens=n_ctx,
        temperature=None,
        output_config={"format": {"type": "json_schema", "schema": {"const": "b" * 400}}},
    )
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == left


def test_stop_adds_to_stop_sequences(served: Served) -> None:
    for fields in (
        {"stop": "5"},
        {"stop_sequences": ["zebra"], "stop": ["5"]},
        {"stop_sequences": ["5"], "stop": "zebra"},
    ):
        message = post(served, **fields)
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "5")


def test_strict_decides_about_a_schema_that_cannot_be_compiled(chats: Served) -> None:
    schema = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^(?!x)"}}}
    mail = {"name": "mail", "input_schema": schema}
    fields: Json = {"tool_choice": {"type": "any"}, "max_tokens": 4}
    for strict in (None, False):
        assert post(chats, tools=[ADD, {**mail, "strict": strict}], **fields)
    body = {"messages": SUM, "tools": [ADD, {**mail, "strict": True}], **fields}
    error = chats.client.post(MESSAGES, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_json_schema")
    assert "mail" in error["message"]


def test_system_as_blocks_is_system_as_text(served: Served) -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    as_text = post(served, COUNT, system="Be brief.")
    assert post(served, COUNT, system=blocks) == as_text
    assert as_text != post(served, COUNT)


def test_last_assistant_message_continues(served: Served) -> None:
    begun = ANSWER[:5]
    message = post(served, messages=[*SUM, {"role": "assistant", "content": begun}])
    assert begun + message["content"][0]["text"] == ANSWER


def test_consecutive_turns_of_one_role_are_joined(served: Served) -> None:
    apart = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    joined = [{"role": "user", "content": "One.\nTwo."}]
    assert post(served, COUNT, messages=apart) == post(served, COUNT, messages=joined)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_required_tool_is_used(chats: Served, is_streamed: bool) -> None:
    body: Json = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 60}
    message = gathered(stream(chats, **body)) if is_streamed else post(chats, **body)
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "add")
    assert 0 <= block["input"]["a"] <= 99
    assert message["stop_reason"] == "tool_use"


def test_one_call_without_parallel_tool_use(chats: Served) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = post(chats, tools=[ADD], tool_choice=choice, max_tokens=200)
    assert [block["type"] for block in message["content"]] == ["tool_use"]


def test_tool_results_reach_the_prompt(chats: Served) -> None:
    def prompt(**result: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "toolu_1", **result}
        thought = {"type": "thinking", "thinking": "I add.", "signature": "x"}
        call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 5}}
        turns = [
            *SUM,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "So"}, call]},
            {"role": "user", "content": [block, {"type": "text", "text": "Go on."}]},
        ]
        message = post(chats, messages=turns, tools=[ADD], loom={"save": True}, max_tokens=1)
        loom = chats.client.get(f"/api/v1/looms/{message['loom']['loom']}/nodes/0/path").json()
        return str(loom["text"])

    text = prompt(content="95")
    assert "<think>\nI add.\n</think>" in text
    assert '<tool_call>\n{"name": "add"' in text
    assert "<|tool|>95" in text
    assert "<|user|>Go on." in text
    assert "Error: no" in prompt(content=[{"type": "text", "text": "no"}], is_error=True)


def test_thinking_is_a_block(chats: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = post(chats, thinking=thinking, max_tokens=8)
    assert message["content"][0]["type"] == "thinking"
    events = stream(chats, thinking=thinking, max_tokens=8)
    assert gathered(events)["content"] == message["content"]
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[-1] == "signature_delta"
    off = post(chats, thinking={"type": "disabled"}, max_tokens=8)
    assert off["content"][0]["type"] == "text"


def test_answer_fits_output_format(served: Served) -> None:
    message = post(
        served,
        max_tokens=60,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"},
    )
    assert set(json.loads(message["content"][0]["text"])) == {"a"}


NEUTRAL: list[Json] = [
    {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"metadata": {"user_id": "u"}, "service_tier": "auto", "inference_geo": "eu"},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive"}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"context_management": {"edits": []}, "mcp_servers": [], "container": None},
    {"stop_sequences": [], "tools": [], "system": "", "speed": "standard"},
    {"output_config": {"effort": "high"}, "tool_choice": {"type": "auto"}},
    {"top_k": 5, "top_p": 0.9, "temperature": 1.0, "seed": 3, "min_p": 0.1},
]


@pytest.mark.parametrize("body", NEUTRAL)
def test_neutral_values_are_accepted(served: Served, body: Json) -> None:
    assert post(served, **body)["content"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
CALL = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
REJECTED: list[tuple[Json, str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**ADD, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config.format",
    ),
    ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management.edits.0.type"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"speed": "fast"}, "speed"),
    ({"thread": {"type": "create"}}, "thread"),
]


@pytest.mark.parametrize(("body", "param"), REJECTED)
def test_unsupported_field_is_rejected_by_name(served: Served, body: Json, param: str) -> None:
    answer = served.client.post(MESSAGES, json={"messages": SUM, "max_tokens": 4, **body})
    assert answer.status_code == 400
    reply = answer.json()
    assert reply["type"] == "error"
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["param"] == param
    assert reply["request_id"] == answer.headers["request-id"]
    MessageError.model_validate(reply)


def test_errors_have_types_of_the_protocol(served: Served) -> None:
    def error(headers: dict[str, str] | None = None, **body: Any) -> Json:
        body = {"messages": SUM, "max_tokens": 4, **body}
        body_error: Json = served.client.post(MESSAGES, json=body, headers=headers).json()["error"]
        return body_error

    assert error(model="other")["type"] == "not_found_error"
    version = error({"anthropic-version": "2020-01-01"})
    assert (version["type"], version["param"]) == ("invalid_request_error", "anthropic-version")
    long = error(messages=[{"role": "user", "content": "a " * 5000}])
    assert long["message"].startswith("prompt is too long: ")
    assert (long["param"], "hint" in long) == ("messages", False)


def test_error_in_stream_is_an_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engines.numpy import NumpyEngine

    def fails(self: Any, rows: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(NumpyEngine, "forward", fails)
    event = stream(served, messages=[{"role": "user", "content": "Not yet computed"}])[-1]
    assert event["type"] == "error"
    assert event["error"]["type"] == "api_error"


def test_key_is_taken_from_x_api_key() -> None:
    with serving(ServerConfig(port=0, api_key=KEY)) as served:
        del served.client.headers["Authorization"]

        def status(**headers: str) -> tuple[int, Any]:
            body = {"messages": SUM, "max_tokens": 1}
            answer = served.client.post(MESSAGES, json=body, headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("type")

        assert status() == (401, "authentication_error")
        assert status(**{"x-api-key": "wrong"}) == (401, "authentication_error")
        assert status(**{"x-api-key": KEY}) == (200, None)


def test_disconnected_client_cancels_its_run(served: Served) -> None:
    body = {"messages": SUM, "max_tokens": 1000, "stream": True, "temperature": 5}
    with served.client.stream("POST", MESSAGES, json=body) as answer:
        next(answer.iter_lines())
    while served.service.n_works:
        pass


def test_models_have_names_and_times(served: Served) -> None:
    page = served.client.get("/v1/models").json()
    (model,) = page["data"]
    assert (model["type"], model["display_name"]) == ("model", "tiny")
    assert model["created_at"].endswith("Z")
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
