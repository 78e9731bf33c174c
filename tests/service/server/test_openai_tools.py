"""Tools of /v1/chat/completions and /v1/responses: with a schema of the text, and without one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chatty import chatty
from serving import serving
from shallow import TINY
from weft.service.server import ServerConfig

openai = pytest.importorskip("openai", reason="openai is not installed")

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from openai import OpenAI

    from serving import Served

CHAT: list[Any] = [{"role": "user", "content": "What is 12 + 34?"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
    },
}
TOOLS: Any = [{"type": "function", "function": ADD}]
# An answer that is read as a call where nothing says that it is none.
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["owl", "<tool_call>"]},
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
    "required": ["name", "parameters"],
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
BARE = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": 
{{- c.function.arguments | tojson }}}{% endfor %}<|end|>{% endfor %}<|assistant|>"""


@pytest.fixture(scope="module", params=["tags", "bare"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server of the embedded model, whose template writes calls between tags or as bare JSON."""
    folder: Path = chatty()
    if request.param == "bare":
        folder = tmp_path_factory.mktemp("bare") / "chatty"
        shutil.copytree(TINY, folder)
        (folder / "chat_template.jinja").write_text(BARE)
    with serving(ServerConfig(port=0, models=(str(folder),), engine="numpy")) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api_client:
        yield api_client


def check(content: str | None, calls: Any, finish_reason: str | None) -> str:
    """Check that a turn is calls or text of the schema; return which."""
    if calls:
        assert not content
        assert finish_reason == "tool_calls"
        for call in calls:
            assert call.function.name == "add"
            assert 0 <= json.loads(call.function.arguments)["a"] <= 99
        return "calls"
    answer = json.loads(content or "")
    assert answer["name"] in ("owl", "<tool_call>")
    assert answer["parameters"]["n"] in (1, 2)
    assert finish_reason == "stop"
    return "text"


def test_a_turn_with_tools_and_a_schema_is_calls_or_text_of_the_schema(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "chatty", "messages": CHAT, "tools": TOOLS, "response_format": FORMAT,
        "parallel_tool_calls": False, "temperature": 3.0, "top_p": 1.0, "n": 6, "seed": 1,
    }  # fmt: skip
    expected = client.chat.completions.create(**body).choices
    kinds = [check(c.message.content, c.message.tool_calls, c.finish_reason) for c in expected]
    assert set(kinds) == {"calls", "text"}
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices
    assert [c.message.content or None for c in final] == [c.message.content for c in expected]
    for one, other in zip(final, expected, strict=True):
        assert [each.function.arguments for each in one.message.tool_calls or ()] == [
            each.function.arguments for each in other.message.tool_calls or ()
        ]
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("none", "text"),
        ("required", "calls"),
        ({"type": "function", "function": {"name": "add"}}, "calls"),
    ],
)
def test_tool_choice_decides_between_calls_and_text(client: OpenAI, choice: Any, kind: str) -> None:
    for seed in range(2):
        (answer,) = client.chat.completions.create(
            model="chatty", messages=CHAT, tools=TOOLS, response_format=FORMAT, temperature=2.0,
            tool_choice=choice, parallel_tool_calls=False, seed=seed,
        ).choices  # fmt: skip
        assert (
            check(answer.message.content, answer.message.tool_calls, answer.finish_reason) == kind
        )


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_response_with_tools_and_a_schema_has_calls_or_text(client: OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {
        "model": "chatty", "input": "What is 12 + 34?", "tools": [{"type": "function", **ADD}],
        "parallel_tool_calls": False, "tool_choice": choice, "temperature": 0,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
    }  # fmt: skip
    expected = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        streamed = stream.get_final_response()
    for response in (expected, streamed):
        (item,) = response.output
        if item.type == "function_call":
            assert 0 <= json.loads(item.arguments)["a"] <= 99
        else:
            assert choice == "auto"
            assert json.loads(response.output_text)["parameters"]["n"] in (1, 2)
    assert streamed.output[0].type == expected.output[0].type


def test_the_last_turn_after_a_tools_answer_fits_the_schema(served: Served, client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "chatty", "tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": False,
        "temperature": 0,
    }  # fmt: skip
    first = client.chat.completions.create(messages=CHAT, tool_choice="required", **body)
    (call,) = first.choices[0].message.tool_calls or ()
    answer = {"role": "tool", "tool_call_id": call.id, "content": "46"}
    (last,) = client.chat.completions.create(
        messages=[*CHAT, first.choices[0].message.model_dump(), answer],
        **{**body, "tool_choice": "none"},
    ).choices
    assert check(last.message.content, last.message.tool_calls, last.finish_reason) == "text"


MAIL: dict[str, Any] = {
    "name": "send_mail",
    "parameters": {
        "type": "object",
        "properties": {"to": {"type": "string", "pattern": "^(?!x).*$"}},
        "required": ["to"],
    },
}


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_schema_that_cannot_be_compiled_names_its_tool_and_spares_the_others(
    request: pytest.FixtureRequest,
    client: OpenAI,
    strict: bool | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"mail-{request.node.callspec.id}"  # the server logs a warning once a name
    mail = {**MAIL, "name": name, "strict": strict}
    chat: dict[str, Any] = {
        "model": "chatty", "messages": CHAT, "temperature": 0, "tool_choice": "required",
        "tools": [*TOOLS, {"type": "function", "function": mail}], "max_tokens": 100,
        "parallel_tool_calls": False,
    }  # fmt: skip
    response: dict[str, Any] = {
        "model": "chatty", "input": "What is 12 + 34?", "tool_choice": "required",
        "tools": [{"type": "function", **ADD}, {"type": "function", **mail}],
        "max_output_tokens": 100, "temperature": 0, "parallel_tool_calls": False,
    }  # fmt: skip
    if strict:
        for create, body in (
            (client.chat.completions.create, chat),
            (client.responses.create, response),
        ):
            with pytest.raises(openai.BadRequestError, match=f"{name}.*/to.*look-around"):
                create(**body)
        return
    (choice,) = client.chat.completions.create(**chat).choices
    assert choice.message.tool_calls
    assert client.responses.create(**response).output[0].type == "function_call"
    if strict is None:
        assert f"the tool {name!r} is not enforced" in caplog.text


def test_a_server_takes_a_chat_template_for_its_first_model(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(BARE)
    config = ServerConfig(
        port=0, models=("tiny", str(chatty())), engine="numpy", chat_template=file
    )
    with serving(config) as served:
        assert served.service.models.lm("tiny").text.chat_template == BARE
        while served.service.models.get("chatty").state != "ready":
            time.sleep(0.05)
        assert served.service.models.lm("chatty").text.chat_template not in (None, BARE)
        models = served.client.get("/api/v1/models").json()["data"]
        assert {model["tool_form"] for model in models} == {"template"}
