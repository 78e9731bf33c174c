"""Fields of other servers: neutral values are accepted, others honoured or rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from weft.service.server.anthropic.messages import CountRequest, MessagesRequest
from weft.service.server.errors import RequestError
from weft.service.server.ollama import OllamaChat, OllamaGenerate
from weft.service.server.openai.chat import ChatRequest
from weft.service.server.openai.completions import CompletionRequest
from weft.service.server.openai.embeddings import EmbeddingRequest
from weft.service.server.openai.known_fields import FIELDS, KnownField
from weft.service.server.openai.messages import TemplateFields
from weft.service.server.openai.request_fields import OpenAIModel
from weft.service.server.openai.responses import ResponseRequest

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "Hi"}]
SEEDED = {"options": {"num_predict": 4, "seed": 1}, "stream": False}
BASE: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "Once upon a time", "max_tokens": 4, "seed": 1},
    CHATS: {"messages": HI, "max_tokens": 4, "seed": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4, "seed": 1},
    EMBEDDINGS: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 4, "seed": 1},
    COUNT: {"messages": HI},
    OLLAMA_CHAT: {"messages": HI, **SEEDED},
    OLLAMA_GENERATE: {"prompt": "Hi", **SEEDED},
}


def post(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = served.client.post(path, json={**BASE[path], **fields})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def rejected(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = served.client.post(path, json={**BASE[path], **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


MODELS: dict[str, type[OpenAIModel]] = {
    COMPLETION: CompletionRequest,
    CHATS: ChatRequest,
    RESPONSES: ResponseRequest,
    EMBEDDINGS: EmbeddingRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountRequest,
    OLLAMA_CHAT: OllamaChat,
    OLLAMA_GENERATE: OllamaGenerate,
}
# Fields without a neutral value: the prompt in all its forms, Weft's own, and Ollama's.
CONTENT = {"messages", "input", "prompt", "model"}
OWN = {"loom", "options", "format", "raw", "think"}
# Fields that a route implements under other names, although they have no alias.
TRANSLATED = {RESPONSES: {"reasoning_effort", "enable_thinking"}}


def foreign(path: str) -> dict[str, KnownField]:
    """The known fields that a route implements under no name."""
    own = set(MODELS[path].model_fields)
    return {
        name: field
        for name, field in FIELDS.items()
        if name not in own | TRANSLATED.get(path, set()) and not own.intersection(field.aliases)
    }


def neutral_values(field: KnownField) -> tuple[Any, ...]:
    if field.aliases and not field.neutral:
        return neutral_values(FIELDS[field.aliases[0]])
    return field.neutral


def test_the_table_has_the_fields_of_all_routes() -> None:
    fields = {name for model in MODELS.values() for name in model.model_fields}
    assert fields - CONTENT - OWN <= set(FIELDS)


@pytest.mark.parametrize("path", BASE)
def test_every_route_accepts_known_fields_at_every_neutral_value(path: str) -> None:
    for name, field in FIELDS.items():
        if name in BASE[path] or name in CONTENT & set(MODELS[path].model_fields):
            continue
        for value in (*neutral_values(field), None, ""):
            MODELS[path].model_validate({**BASE[path], name: value})


@pytest.mark.parametrize("path", BASE)
def test_all_known_fields_at_neutral_values_are_accepted(served: Served, path: str) -> None:
    neutral = {name: (*neutral_values(field), "")[0] for name, field in foreign(path).items()}
    own, reply = post(served, path), post(served, path, **neutral)
    keys = {"choices", "data", "content", "input_tokens", "message", "response"} & set(reply)
    for key in keys:
        assert reply[key] == own[key]
    if path == RESPONSES:
        assert reply["output"][0]["content"] == own["output"][0]["content"]
    else:
        assert keys


@pytest.mark.parametrize("path", BASE)
def test_known_fields_at_other_values_are_rejected_by_name(path: str) -> None:
    for name, field in foreign(path).items():
        if field.switch or field.is_operational or name == "custom_token_bans":
            continue
        if field.aliases and FIELDS[field.aliases[0]].switch:
            continue
        with pytest.raises(RequestError) as caught:
            MODELS[path].model_validate({**BASE[path], name: {"unheard": "of"}})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("path", "foreign", "own"),
    [
        (CHATS, {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            CHATS,
            {"reasoning": {"enabled": True, "summary": "auto"}},
            {"enable_thinking": True},
        ),
        (RESPONSES, {"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}),
        (
            RESPONSES,
            {"enable_thinking": True, "reasoning": {"summary": "auto"}},
            {"reasoning": {"enabled": True, "summary": "auto"}},
        ),
        (
            RESPONSES,
            {"n_probs": 2},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        ),
        (COMPLETION, {"logprobs": False}, {}),
        (COMPLETION, {"n_predict": -1}, {}),
        (COMPLETION, {"rep_pen": 1, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (MESSAGES, {"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}),
        (MESSAGES, {"rep_pen": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_fields_of_other_routes_are_translated(
    path: str, foreign: dict[str, Any], own: dict[str, Any]
) -> None:
    model = MODELS[path]
    body = model.model_validate({**BASE[path], **foreign})
    assert body.model_dump() == model.model_validate({**BASE[path], **own}).model_dump()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_response_takes_other_names_of_its_maximum(name: str) -> None:
    body = ResponseRequest.model_validate({"input": "Hi", name: 7})
    assert body.max_output_tokens == 7


def test_two_names_of_one_parameter_with_different_values_are_rejected() -> None:
    for path, fields in (
        (CHATS, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}),
        (RESPONSES, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}),
        (COMPLETION, {"rep_pen": 1.1, "repetition_penalty": 1.2}),
    ):
        with pytest.raises(RequestError, match="the same parameter"):
            MODELS[path].model_validate({**BASE[path], **fields})


def test_truncation_length_limits_the_prompt_of_every_answer(served: Served) -> None:
    for path in (COMPLETION, CHATS, RESPONSES, MESSAGES):
        for length in (0, 2048):
            post(served, path, truncation_length=length)
        assert rejected(served, path, truncation_length=1)["param"] == "truncation_length"


def test_marks_of_other_protocols_on_input_items_and_tools_change_nothing(served: Served) -> None:
    marks = {"cache_control": {"type": "ephemeral"}, "extra_content": {"a": 1}}
    part = {"type": "input_text", "text": "Hi", "id": "part_1", **marks}
    item = {"role": "user", "content": [part], **marks}
    own, reply = post(served, RESPONSES), post(served, RESPONSES, input=[item])
    assert reply["output"][0]["content"] == own["output"][0]["content"]
    tool = {"type": "function", "function": {"name": "add"}}
    chats = [
        post(served, CHATS, tools=[{**tool, **extra}])["choices"]
        for extra in ({}, {"cache_control": {"type": "ephemeral"}})
    ]
    assert chats[0][0]["message"]["content"] == chats[1][0]["message"]["content"]


def stream_of(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BASE[path], **fields, "stream": True}
    lines = served.client.post(path, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def both_ways(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a completion, after a check that its stream has the same."""
    fields = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    choices: list[dict[str, Any]] = post(served, COMPLETION, **fields)["choices"]
    parts = stream_of(served, COMPLETION, **fields)
    for choice in choices:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        ids = [token for part in own for token in part.get("token_ids", ())]
        assert ids == choice["token_ids"][: len(ids)]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    return choices


@pytest.fixture(scope="module")
def greedy(served: Served) -> dict[str, Any]:
    return both_ways(served)[0]


def test_stop_token_ids_end_a_choice_before_the_token(
    served: Served, greedy: dict[str, Any]
) -> None:
    ids = greedy["token_ids"]
    for choice in both_ways(served, stop_token_ids=[ids[3]], n=2):
        assert choice["token_ids"] == ids[:3]
        assert choice["finish_reason"] == "stop"
        assert greedy["text"].startswith(choice["text"])


def test_include_stop_str_in_output_keeps_the_stop_string_or_token(
    served: Served, greedy: dict[str, Any]
) -> None:
    token = greedy["token_ids"][3]
    text = served.service.models.lm().text.decode(greedy["token_ids"][:4])
    included: dict[str, Any] = {"include_stop_str_in_output": True}
    for logprobs in (None, 1):
        fields = {"stop_token_ids": [token], "logprobs": logprobs, **included}
        assert both_ways(served, **fields)[0]["text"] == text
    stop = greedy["text"][5:9]
    for field in ("include_stop_str_in_output", "no_stop_trim"):
        choices = both_ways(served, stop=[stop], n=2, **{field: True})
        assert {choice["text"] for choice in choices} == {greedy["text"][:9]}


def test_min_tokens_delays_end_tokens_and_stops(served: Served, greedy: dict[str, Any]) -> None:
    token = greedy["token_ids"][1]
    (choice,) = both_ways(served, min_tokens=5, stop_token_ids=[token], stop=[" "], max_tokens=9)
    assert len(choice["token_ids"]) >= 5
    assert token not in choice["token_ids"][:5]
    ends = served.service.models.lm().text.stop_ids
    short = {"allowed_token_ids": [min(ends), token], "logit_bias": {str(min(ends)): 100}}
    assert both_ways(served, **short)[0]["token_ids"] == []
    assert both_ways(served, **short, min_tokens=3)[0]["token_ids"] == [token] * 3


def test_bad_words_are_never_generated(served: Served, greedy: dict[str, Any]) -> None:
    words = [greedy["text"].split()[1], " ".join(greedy["text"].split()[2:4])]
    for choice in both_ways(served, bad_words=words, n=2, temperature=1, seed=4):
        assert not any(word in choice["text"] for word in words)


def test_allowed_token_ids_are_the_only_tokens(served: Served, greedy: dict[str, Any]) -> None:
    allowed = greedy["token_ids"][1:3]
    for choice in both_ways(served, allowed_token_ids=allowed, n=3, temperature=1, seed=4):
        assert set(choice["token_ids"]) <= set(allowed)
        assert choice["finish_reason"] == "length"


def test_limits_on_tokens_hold_with_a_schema(served: Served) -> None:
    lm = served.service.models.lm()
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a", "b"]}}}
    reply = post(served, CHATS, response_format=schema, bad_words=["a"], max_tokens=20)
    assert reply["choices"][0]["message"]["content"] == '"b"'
    assert rejected(served, CHATS, response_format=schema, min_tokens=2)["param"] == "min_tokens"
    wrong = {"stop_token_ids": [lm.info.n_vocab], "allowed_token_ids": [lm.info.n_vocab]}
    for name, ids in wrong.items():
        error = rejected(served, COMPLETION, **{name: ids})
        assert (error["param"], error["code"]) == (name, "tokens_out_of_vocabulary")
    assert rejected(served, COMPLETION, min_tokens=9)["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"max_tokens": -1, "stop": "."}),
        (COMPLETION, {"max_tokens": None, "n_predict": -1, "stop": "."}),
        (COMPLETION, {"max_tokens": 5, "auto_max_new_tokens": True, "stop": "."}),
        (CHATS, {"max_tokens": -1}),
        (CHATS, {"max_tokens": None, "max_completion_tokens": -1}),
    ],
)
def test_max_tokens_of_minus_one_fills_the_context(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    (choice,) = post(served, path, temperature=0, **fields)["choices"]
    assert choice["finish_reason"] == "stop"


def test_fields_by_other_names_are_honoured(served: Served) -> None:
    own = both_ways(served, logprobs=2)
    same: list[dict[str, Any]] = [
        {"n_probs": 2},
        {"logprobs": 2, "temperature": None, "do_sample": False},
        {"logprobs": 2, "max_tokens": None, "max_completion_tokens": 8},
        {"logprobs": 2, "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "temperature"]},
        {"logprobs": 2, "samplers": "edskypmxt"},
    ]
    for fields in same:
        assert both_ways(served, **fields) == own
    banned = own[0]["token_ids"][0]
    by_bias = both_ways(served, logit_bias={str(banned): -100})
    assert both_ways(served, custom_token_bans=str(banned)) == by_bias
    assert both_ways(served, logit_bias=[[banned, False]]) == by_bias
    error = rejected(served, COMPLETION, samplers=["temperature", "top_k"])
    assert error["param"] == "samplers"
    chat = post(served, CHATS, n_probs=2)["choices"][0]["logprobs"]["content"]
    assert len(chat[0]["top_logprobs"]) == 2


def test_sampler_priority_is_accepted_if_the_samplers_in_use_have_wefts_order(
    served: Served,
) -> None:
    priority = ["temperature", "top_k", "top_p", "min_p", "xtc", "repetition_penalty"]
    ordered = {"sampler_priority": priority, "top_k": 5, "min_p": 0.1, "temperature": 1}
    assert post(served, COMPLETION, **ordered)["choices"]
    last = {**ordered, "temperature": 0.7, "temperature_last": True}
    assert post(served, COMPLETION, **last)["choices"]
    for other in ({"temperature": 0.7}, {"repetition_penalty": 1.2}):
        error = rejected(served, COMPLETION, **{**ordered, **other})
        assert error["param"] == "sampler_priority"


SAMPLERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_n_sigma": 0.8}, {"top_n_sigma": 0.8}),
    ({"nsigma": 0.8}, {"top_n_sigma": 0.8}),
    ({"top_n_sigma": -1}, {}),
    (
        {"xtc_probability": 0.9, "xtc_threshold": 0.02},
        {"xtc_probability": 0.9, "xtc_threshold": 0.02},
    ),
    (
        {"dry_multiplier": 4, "dry_allowed_length": 1, "dry_base": 2},
        {"dry_multiplier": 4, "dry_allowed_length": 1, "dry_base": 2},
    ),
    (
        {"dry_multiplier": 4, "dry_penalty_last_n": 6, "dry_sequence_breakers": []},
        {"dry_multiplier": 4, "dry_penalty_last_n": 6, "dry_sequence_breakers": ()},
    ),
    (
        {"dry_multiplier": 4, "dry_penalty_last_n": -1, "dry_sequence_breakers": '" a", "\\n"'},
        {"dry_multiplier": 4, "dry_sequence_breakers": (" a", "\n")},
    ),
    ({"dry_multiplier": 4, "dry_penalty_last_n": 0}, {}),
    ({"dry_multiplier": 0, "dry_base": 0, "dry_allowed_length": -1}, {}),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLERS, ids=lambda given: ",".join(given))
def test_dry_xtc_and_top_n_sigma_have_llama_servers_names(
    served: Served, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    """The request's choices are those that `grow` draws with the same parameters and seed."""
    prompt = "a b a b a b"
    with weft.Loom(served.service.models.lm(), prompt, template=False) as loom:
        nodes = [loom.grow(n=1, max_tokens=12, seed=5 + i, **params)[0] for i in range(2)]
    body = {"prompt": prompt, "max_tokens": 12, "seed": 5, "n": 2, "return_token_ids": True}
    choices = post(served, COMPLETION, **body, **fields)["choices"]
    assert [choice["token_ids"][:12] for choice in choices] == [node.tokens for node in nodes]


def test_chat_fields_at_neutral_values_are_accepted_or_rejected_by_name(served: Served) -> None:
    own = post(served, CHATS)["choices"]
    for fields in (
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal", "verbosity": "medium"},
        {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning": {"effort": "none"}, "stop": [], "tools": [], "logit_bias": {}},
    ):
        assert post(served, CHATS, **fields)["choices"] == own
    for name, value in (("verbosity", "low"), ("enable_thinking", True)):
        assert rejected(served, CHATS, **{name: value})["param"] == name
    marked = {
        "role": "user",
        "id": "msg_1",
        "extra_content": {"a": 1},
        "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
    }
    assert post(served, CHATS, messages=[marked])["choices"] == own


def test_template_fields_become_variables_of_templates_that_read_them() -> None:
    thinks = "{{ messages }}{% if enable_thinking %}{% endif %}"
    assert TemplateFields({}, reasoning_effort="none").variables(thinks) == {
        "enable_thinking": False
    }
    assert TemplateFields({}, reasoning_effort="low").variables(thinks) == {"enable_thinking": True}
    assert TemplateFields({}, reasoning_effort="minimal").variables(thinks) == {}
    grades = "{{ messages }}{{ reasoning_effort }}{{ verbosity }}"
    fields = TemplateFields({}, reasoning_effort="low", verbosity="high")
    assert fields.variables(grades) == {"reasoning_effort": "low", "verbosity": "high"}
    given = TemplateFields({"reasoning_effort": "high"}, reasoning_effort="low")
    assert given.variables(grades) == {"reasoning_effort": "high"}


def test_truncation_auto_drops_the_oldest_turns_and_reports_their_number(served: Served) -> None:
    turn = [{"role": "user", "content": "a " * 100}, {"role": "assistant", "content": "b " * 100}]
    given = [{"role": "system", "content": "Be kind."}, *turn * 20, *turn[:1]]
    fields = {
        "input": given, "include": ["reasoning.encrypted_content"], "max_output_tokens": 16,
    }  # fmt: skip
    error = rejected(served, RESPONSES, **fields)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    reply = post(served, RESPONSES, **fields, truncation="auto", reasoning={"summary": "auto"})
    n = reply["dropped_messages"]
    assert (reply["truncation"], n % 2, reply["usage"]["input_tokens"] < 2048) == ("auto", 0, True)
    one_more = [*given[:1], *given[n - 1 :]]
    assert rejected(served, RESPONSES, input=one_more)["code"] == "context_length_exceeded"
    own = post(
        served, RESPONSES, **{**fields, "input": [*given[:1], *given[n + 1 :]]}, temperature=0
    )
    reply = post(served, RESPONSES, **fields, truncation="auto", temperature=0)
    assert reply["output"][0]["content"] == own["output"][0]["content"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"prompt": [5] * 3000}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
        (RESPONSES, {"input": "a " * 3000}, "input"),
        (COMPLETION, {"max_tokens": 2047}, "prompt"),
        (COMPLETION, {"max_tokens": 2047, "loom": {"save": True}}, "prompt"),
        (CHATS, {"max_tokens": 2047}, "messages"),
    ],
)
def test_overflow_has_openais_wording(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    error = rejected(served, path, **fields)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    n_prompt = error["details"]["n_prompt_tokens"]
    n_new = fields.get("max_tokens", 4)
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, you requested"
        f" {n_prompt + n_new} tokens ({n_prompt} in the {param}, {n_new} in the completion)"
    )


def test_overflow_of_an_embedding_names_the_input(served: Served) -> None:
    error = rejected(served, EMBEDDINGS, input=["a", "a " * 3000])
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    n = error["details"]["n_prompt_tokens"]
    assert f"length is 2048 tokens. However, you requested {n} tokens:" in error["message"]
    assert error["message"].endswith("reduce the length of the input.")


def test_maximum_of_new_tokens_may_fill_the_context_exactly(served: Served) -> None:
    for path, key in ((COMPLETION, "prompt"), (CHATS, "messages")):
        n_prompt = post(served, path)["usage"]["prompt_tokens"]
        assert post(served, path, max_tokens=2048 - n_prompt)["choices"]
        error = rejected(served, path, max_tokens=2049 - n_prompt)
        assert (error["param"], error["details"]["n_prompt_tokens"]) == (key, n_prompt)
        assert "reduce max_tokens" in error["hint"]


def test_a_response_ends_when_the_context_is_full(served: Served) -> None:
    """`max_output_tokens` is an upper bound, as in vLLM and at OpenAI."""
    fields = {"input": "a " * 2000, "ignore_eos": True, "max_output_tokens": 4000}
    reply = post(served, RESPONSES, **fields)
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["usage"]["total_tokens"] == 2048


def test_the_page_lists_all_known_fields_in_the_rows_of_their_servers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai-fields.md").read_text(encoding="utf-8")
    table = page.partition("## Fields of other servers")[2]
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if "|" in line}
    for name, field in FIELDS.items():
        assert f"`{name}`" in rows[field.owner], name
