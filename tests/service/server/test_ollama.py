"""Ollama's API: lines of JSON, options, what is rejected by name, and hints at other addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import weft
from chatty import chatty
from serving import serving
from weft.service.server import ServerConfig

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

Json = dict[str, Any]
CHAT, GENERATE = "/api/chat", "/api/generate"
SUM: list[Json] = [{"role": "user", "content": weft.samples.sum}]
ANSWER = "37 + 58 = 95.\nThe answer is 95."
GREEDY: Json = {"temperature": 0, "num_predict": 24}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
ADD: Json = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def chats() -> Iterator[Served]:
    """A server whose chat template reads tools and enable_thinking."""
    with serving(ServerConfig(port=0, models=(str(chatty()),), engine="numpy")) as served:
        yield served


def post(served: Served, path: str, **body: Any) -> Json:
    fields = {"messages": SUM} if path == CHAT else {"prompt": weft.samples.sum}
    body = {"model": None, "stream": False, "options": GREEDY, **fields, **body}
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    reply: Json = answer.json()
    return reply


def lines(served: Served, path: str, **body: Any) -> list[Json]:
    fields = {"messages": SUM} if path == CHAT else {"prompt": weft.samples.sum}
    answer = served.client.post(path, json={"options": GREEDY, **fields, **body})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chat_has_counts_and_nanoseconds(served: Served) -> None:
    reply = post(served, CHAT, model="tiny:latest")
    assert reply["message"] == {"role": "assistant", "content": ANSWER}
    assert (reply["model"], reply["done"], reply["done_reason"]) == ("tiny:latest", True, "stop")
    assert reply["created_at"].endswith("Z")
    assert reply["prompt_eval_count"] > 1
    assert reply["eval_count"] > 1
    parts = reply["prompt_eval_duration"] + reply["eval_duration"]
    assert parts == reply["total_duration"] > 1000


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_streamed_lines_make_same_text(served: Served, path: str) -> None:
    chunks = lines(served, path)
    texts = [each["message"]["content"] if path == CHAT else each["response"] for each in chunks]
    assert "".join(texts) == ANSWER
    assert [each["done"] for each in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["eval_count"] == post(served, path)["eval_count"]


def test_body_of_curl_without_a_content_type_is_json(served: Served) -> None:
    body = json.dumps({"model": "tiny", "messages": SUM, "stream": False, "options": GREEDY})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = served.client.post(CHAT, content=body, headers=form)
    assert answer.json()["message"]["content"] == ANSWER


def test_raw_prompt_is_a_completion(served: Served) -> None:
    reply = post(served, GENERATE, prompt=weft.samples.opening, raw=True)
    body = {"prompt": weft.samples.opening, "max_tokens": 24, "temperature": 0}
    plain = served.client.post("/v1/completions", json=body).json()
    assert reply["response"] == plain["choices"][0]["text"]
    assert reply["done_reason"] == "length"


def test_system_of_generate_is_a_message(served: Served) -> None:
    reply = post(served, GENERATE, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *SUM]
    assert reply["prompt_eval_count"] == post(served, CHAT, messages=messages)["prompt_eval_count"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_answer_has_the_format(served: Served, path: str) -> None:
    options = {"temperature": 0, "num_predict": 200}
    for form in (SCHEMA, "json"):
        reply = post(served, path, format=form, options=options)
        text = reply["message"]["content"] if path == CHAT else reply["response"]
        assert isinstance(json.loads(text), dict)


def test_options_are_honoured(served: Served) -> None:
    def text(**options: Any) -> str:
        content: str = post(served, CHAT, options={**GREEDY, **options})["message"]["content"]
        return content

    assert text(num_predict=3) == ANSWER[: len(text(num_predict=3))] != ANSWER
    assert text(stop=["9"]) == ANSWER[: ANSWER.index("9")]
    drawn = text(temperature=50, seed=1)
    assert text(temperature=50, seed=1) == drawn != text(temperature=50, seed=2)
    assert text(temperature=50, top_k=1) == ANSWER
    assert text(repeat_penalty=5.0, repeat_last_n=0) == ANSWER != text(repeat_penalty=5.0)
    neutral = {"mirostat": 0, "tfs_z": 1, "num_ctx": 512, "num_thread": 2, "use_mmap": True}
    assert text(**neutral) == ANSWER


def test_tools_are_called(chats: Served) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 5}}}
    turns = [
        *SUM,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "95", "tool_name": "add"},
    ]
    reply = post(chats, CHAT, messages=turns, tools=[ADD])
    assert reply["prompt_eval_count"] > post(chats, CHAT, tools=[ADD])["prompt_eval_count"]


def test_thinking_is_a_field_of_its_own(chats: Served) -> None:
    reply = post(chats, CHAT, think=True)
    assert reply["message"]["thinking"]
    assert "thinking" not in post(chats, CHAT, think=False)["message"]


def test_request_without_prompt_checks_the_model(served: Served) -> None:
    assert post(served, CHAT, messages=[])["done_reason"] == "load"
    assert post(served, GENERATE, prompt="", keep_alive="5m")["response"] == ""


REJECTED: list[tuple[str, Json, str]] = [
    (CHAT, {"unheard_of": 1}, "unheard_of"),
    (CHAT, {"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "images"),
    (GENERATE, {"images": ["aGk="]}, "images"),
    (GENERATE, {"suffix": "end"}, "suffix"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"context": [1]}, "context"),
    (GENERATE, {"raw": True, "system": "x"}, "system"),
    (CHAT, {"options": {"mirostat": 2}}, "mirostat"),
    (CHAT, {"options": {"temperature": -1}}, "temperature"),
    (CHAT, {"options": {"num_ctx": 1 << 20}}, "num_ctx"),
    (CHAT, {"think": True}, "enable_thinking"),
    (CHAT, {"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("path", "body", "name"), REJECTED)
def test_unsupported_field_is_rejected_by_name(
    served: Served, path: str, body: Json, name: str
) -> None:
    fields = {"messages": SUM} if path == CHAT else {"prompt": "Hi"}
    answer = served.client.post(path, json={**fields, **body})
    assert answer.status_code == 400
    (error,) = answer.json().values()
    assert name in error


def test_overflow_has_openais_wording(served: Served) -> None:
    long = "a " * 3000
    for path, fields, name in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (GENERATE, {"prompt": long}, "messages"),
        (GENERATE, {"prompt": long, "raw": True}, "prompt"),
    ):
        answer = served.client.post(path, json=fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error.startswith("This model's maximum context length is 2048 tokens. However, you")
        assert error.endswith(f"the prompt is too long. Please reduce the length of the {name}.")


def test_models_are_described(served: Served, chats: Served) -> None:
    assert served.client.get("/api/version").json() == {"version": weft.__version__}
    for path in ("/api/tags", "/api/ps"):
        (model,) = served.client.get(path).json()["models"]
        assert (model["name"], model["model"]) == ("tiny", "tiny")
    shown = served.client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["weft.context_length"] == served.service.models.lm().n_ctx
    shown = chats.client.post("/api/show", json={"model": "chatty"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    answer = served.client.post("/api/show", json={"model": "other"})
    assert answer.status_code == 404
    assert "tiny" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models", "/v1/chat"])
def test_wrong_address_names_the_right_ones(served: Served, path: str) -> None:
    answer = served.client.post(path, json={})
    assert answer.status_code == 404
    assert "below /v1" in answer.json()["error"]["hint"]


def test_ollama_calls_that_are_absent_name_other_apis(served: Served) -> None:
    answer = served.client.post("/api/embed", json={})
    assert answer.status_code == 404
    assert "below /v1" in answer.json()["error"]


def test_health_and_trailing_slash(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/v1/models/").json() == served.client.get("/v1/models").json()
