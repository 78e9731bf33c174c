"""Constraints on `/v1`, in the fields of vLLM, llama-server, SGLang and OpenAI."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from serving import Served

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS = (COMPLETIONS, CHATS, RESPONSES)
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Code:", "max_tokens": 40, "temperature": 1, "seed": 1},
    CHATS: {
        "messages": [{"role": "user", "content": "Code?"}],
        "max_tokens": 40,
        "temperature": 1,
        "seed": 1,
    },
    RESPONSES: {"input": "Code?", "max_output_tokens": 40, "temperature": 1},
}
OWL = {
    "type": "object",
    "properties": {"owl": {"enum": [1, 2]}},
    "required": ["owl"],
    "additionalProperties": False,
}
GBNF = "root ::= digit digit digit\ndigit ::= [0-9]"
LARK = "%llguidance {}\nstart: DIGIT DIGIT DIGIT\nDIGIT: /[0-9]/"
DIGITS, IS_OWL = "[0-9]{3}", r'\{\s*"owl": ?[12]\s*\}'


def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    answer = served.client.post(path, json={**BODIES[path], **body})
    return answer.status_code, answer.json()


def text(path: str, answer: Any) -> str:
    if path == RESPONSES:
        written: str = answer["output"][0]["content"][0]["text"]
    elif path == CHATS:
        written = answer["choices"][0]["message"]["content"]
    else:
        written = answer["choices"][0]["text"]
    return written


def error(served: Served, path: str, **body: Any) -> dict[str, Any]:
    status, answer = post(served, path, **body)
    assert status == 400, answer
    details: dict[str, Any] = answer["error"]
    return details


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("structured_outputs", {"json": OWL}, IS_OWL),
        ("structured_outputs", {"json": json.dumps(OWL), "whitespace_pattern": None}, IS_OWL),
        ("structured_outputs", {"json": OWL, "disable_any_whitespace": True}, r'\{"owl": [12]\}'),
        ("structured_outputs", {"regex": DIGITS}, DIGITS),
        ("structured_outputs", {"choice": ["owl", "fox"], "json_object": False}, "owl|fox"),
        ("structured_outputs", {"grammar": GBNF}, DIGITS),
        ("structured_outputs", {"grammar": LARK}, DIGITS),
        ("guided_json", OWL, IS_OWL),
        ("guided_json", json.dumps(OWL), IS_OWL),
        ("guided_regex", DIGITS, DIGITS),
        ("guided_choice", ["owl", "fox"], "owl|fox"),
        ("guided_grammar", GBNF, DIGITS),
        ("grammar", GBNF, DIGITS),
        ("grammar", '?start: ("4"|"5")~3', "[45]{3}"),
        ("grammar_string", GBNF, DIGITS),
        ("json_schema", OWL, IS_OWL),
        ("json_schema", json.dumps(OWL), IS_OWL),
        ("regex", DIGITS, DIGITS),
        ("ebnf", GBNF, DIGITS),
        ("response_format", {"type": "json_object", "schema": OWL}, IS_OWL),
        ("response_format", {"type": "json_schema", "schema": OWL}, IS_OWL),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": OWL}}, IS_OWL),
    ],
)  # fmt: skip
def test_constraint_field_bounds_the_text_of_a_completion(
    served: Served, field: str, value: Any, pattern: str
) -> None:
    status, answer = post(served, COMPLETIONS, **{field: value})
    assert status == 200, answer
    assert re.fullmatch(pattern, text(COMPLETIONS, answer)), answer


def test_equal_constraints_in_fields_of_two_servers_are_one(served: Served) -> None:
    body = {"guided_grammar": GBNF, "structured_outputs": {"grammar": GBNF}}
    status, answer = post(served, COMPLETIONS, **body)
    assert status == 200, answer
    assert re.fullmatch(DIGITS, text(COMPLETIONS, answer))


GREETING = "hello there world"
GREETING_FIELDS: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": [GREETING]}},
    {"guided_regex": GREETING},
    {"grammar": f'root ::= "{GREETING}"'},
    {"response_format": {"type": "json_schema", "schema": {"const": GREETING}}},
]


def usual_tokens(served: Served) -> set[int]:
    """Return the longer tokens of the greeting; other tokens can spell it."""
    tokenizer = served.service.models.lm().text
    tokens = {*tokenizer.continuation(GREETING), *tokenizer.continuation(f'"{GREETING}"')}
    return {token for token in tokens if len(tokenizer.vocab_bytes[token]) > 1}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("body", GREETING_FIELDS, ids=lambda body: next(iter(body)))
def test_forced_text_has_no_token_that_logit_bias_bans(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    banned = usual_tokens(served)
    for bias in ({}, {str(token): -100 for token in banned}):
        status, answer = post(served, path, **body, logit_bias=bias, return_token_ids=True)
        assert status == 200, answer
        assert text(path, answer).strip('"') == GREETING
        assert banned.isdisjoint(answer["choices"][0]["token_ids"]) == bool(bias)


def test_forced_text_of_a_response_has_more_tokens_where_logit_bias_bans_long_ones(
    served: Served,
) -> None:
    """Responses do not report token ids."""
    n_tokens = []
    for bias in ({}, {str(token): -100 for token in usual_tokens(served)}):
        status, answer = post(served, RESPONSES, **GREETING_FIELDS[0], logit_bias=bias)
        assert status == 200, answer
        assert text(RESPONSES, answer) == GREETING
        n_tokens.append(answer["usage"]["output_tokens"])
    assert n_tokens[1] > n_tokens[0]


@pytest.mark.parametrize("path", PATHS)
def test_forced_text_without_a_spelling_is_rejected(served: Served, path: str) -> None:
    vocabulary = served.service.models.lm().text.vocab_bytes
    bans = {str(token): -100 for token, spelled in enumerate(vocabulary) if b"w" in spelled}
    status, answer = post(served, path, **GREETING_FIELDS[0], logit_bias=bans)
    assert (status, answer["error"]["code"]) == (422, "no_legal_token"), answer


TAG = {"structures": [{"begin": "e<", "schema": {"const": 5}, "end": ">"}], "triggers": ["e"]}


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
        {"structural_tag": TAG},
        {"response_format": {"type": "structural_tag", **TAG}},
    ],
)
def test_structural_tag_bounds_the_text_after_each_trigger(
    served: Served, body: dict[str, Any]
) -> None:
    status, answer = post(served, COMPLETIONS, **body, n=8)
    assert status == 200, answer
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch("([^e]|e<5>)*(e|e<|e<5)?", text) for text in texts), texts
    assert any("e<5>" in text for text in texts), texts


def test_classes_of_a_regex_are_ascii(served: Served) -> None:
    status, answer = post(served, COMPLETIONS, regex=r"\d{4}[\s]\w\\d", n=4)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert re.fullmatch(r"\d{4}\s\w\\d", choice["text"], re.ASCII), choice


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("structured_outputs", {"regex": DIGITS}, DIGITS),
        ("guided_json", OWL, IS_OWL),
        ("grammar", GBNF, DIGITS),
        ("ebnf", GBNF, DIGITS),
        ("response_format", {"type": "json_object", "schema": OWL}, IS_OWL),
    ],
)
def test_constraint_field_bounds_the_text_of_a_turn(
    served: Served, path: str, field: str, value: Any, pattern: str
) -> None:
    status, answer = post(served, path, **{field: value})
    assert status == 200, answer
    assert re.fullmatch(pattern, text(path, answer)), answer


@pytest.mark.parametrize("path", PATHS)
def test_json_object_of_structured_outputs_opens_an_object(served: Served, path: str) -> None:
    status, answer = post(served, path, structured_outputs={"json_object": True})
    assert status == 200, answer
    assert text(path, answer).startswith("{")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        {"grammar": "", "grammar_string": "", "regex": "", "ebnf": "", "json_schema": ""},
        {"guided_json": None, "guided_regex": "", "guided_choice": [], "guided_grammar": ""},
        {"structured_outputs": {}, "response_format": {"type": "text"}},
        {"guided_decoding_backend": "guidance", "guided_whitespace_pattern": None},
    ],
)
def test_neutral_constraint_fields_leave_the_text_free(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    assert post(served, path, **body)[0] == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"grammar": GBNF, "regex": DIGITS}, ("grammar", "regex")),
        ({"guided_regex": DIGITS, "guided_choice": ["a"]}, ("guided_regex", "guided_choice")),
        (
            {"structured_outputs": {"regex": DIGITS, "json_object": True}},
            ("structured_outputs.regex", "structured_outputs.json_object"),
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json": OWL}},
            ("response_format", "structured_outputs.json"),
        ),
    ],
)
def test_two_constraints_are_rejected_naming_both(
    served: Served, path: str, body: dict[str, Any], names: tuple[str, str]
) -> None:
    rejection = error(served, path, **body)
    assert all(name in rejection["message"] for name in names), rejection
    assert rejection["param"] in names


def test_text_format_and_another_constraint_are_rejected_naming_both(served: Served) -> None:
    form = {"format": {"type": "json_object"}}
    rejection = error(served, RESPONSES, text=form, regex=DIGITS)
    assert "text.format" in rejection["message"]
    assert "regex" in rejection["message"]
    other = {"type": "json_object", "schema": OWL}
    rejection = error(served, RESPONSES, text=form, response_format=other)
    assert "text.format and response_format" in rejection["message"]


def test_text_format_of_an_object_takes_a_schema(served: Served) -> None:
    form = {"type": "json_object", "schema": OWL}
    status, answer = post(served, RESPONSES, text={"format": form})
    assert status == 200, answer
    assert re.fullmatch(IS_OWL, text(RESPONSES, answer))
    rejection = error(served, RESPONSES, text={"format": {"type": "text", "schema": OWL}})
    assert rejection["param"] == "text.format.schema"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"grammar": "hello"}, "grammar", "invalid_grammar"),
        ({"ebnf": "root ::= missing"}, "ebnf", "invalid_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "invalid_grammar"),
        ({"regex": "[0-9"}, "regex", "invalid_grammar"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "invalid_grammar"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_parameter"),
        ({"guided_json": "{"}, "guided_json", "invalid_json_schema"),
        ({"json_schema": {"type": "x"}}, "json_schema", "invalid_json_schema"),
        (
            {"structured_outputs": {"json": {"type": "x"}}},
            "structured_outputs.json",
            "invalid_json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "x"}}},
            "response_format",
            "invalid_json_schema",
        ),
        (
            {"response_format": {"type": "text", "schema": OWL}},
            "response_format.schema",
            "unsupported_parameter",
        ),
        (
            {"guided_whitespace_pattern": " *"},
            "guided_whitespace_pattern",
            "unsupported_parameter",
        ),
        (
            {"structured_outputs": {"json": OWL, "whitespace_pattern": " *"}},
            "structured_outputs.whitespace_pattern",
            "unsupported_parameter",
        ),
        ({"structural_tag": "{"}, "structural_tag", "invalid_grammar"),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
            "structured_outputs.structural_tag",
            "invalid_grammar",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "triggers": ["{"]}},
            "response_format",
            "invalid_parameter",
        ),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unsupported_parameter"),
    ],
)
def test_bad_constraint_is_rejected_naming_the_parameter(
    served: Served, body: dict[str, Any], param: str, code: str
) -> None:
    for path in PATHS:
        rejection = error(served, path, **body)
        assert (rejection["param"], rejection["code"]) == (param, code), rejection


def streams(served: Served, path: str, **body: Any) -> dict[int, dict[str, Any]]:
    """Return the choices of a stream: text, logprob tokens, finish reason."""
    choices: dict[int, dict[str, Any]] = {}
    written = served.client.post(path, json={**BODIES[path], **body, "stream": True}).text
    for line in written.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        entry = choices.setdefault(choice["index"], {"text": "", "tokens": [], "reason": None})
        entry["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        logprobs = choice["logprobs"] or {}
        entry["tokens"] += logprobs.get("tokens", [])
        entry["tokens"] += [each["token"] for each in logprobs.get("content", [])]
        entry["reason"] = choice["finish_reason"]
    return choices


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_streams_of_four_choices_fit_with_logprobs_of_their_tokens(
    served: Served, path: str
) -> None:
    logprobs = 1 if path == COMPLETIONS else True
    choices = streams(served, path, regex="[0-9]{9}", n=4, logprobs=logprobs)
    assert len(choices) == 4
    for choice in choices.values():
        assert re.fullmatch("[0-9]{9}", choice["text"])
        assert "".join(choice["tokens"]) == choice["text"]
        assert choice["reason"] == "stop"
    assert len({choice["text"] for choice in choices.values()}) > 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_stop_string_ends_a_constrained_stream_without_it(served: Served, path: str) -> None:
    choices = streams(served, path, grammar='root ::= "one two " [0-9]+', n=4, stop=["two"])
    assert {(c["text"], c["reason"]) for c in choices.values()} == {("one ", "stop")}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_max_tokens_cuts_a_constrained_stream_to_a_beginning(served: Served, path: str) -> None:
    choices = streams(served, path, regex="[0-9]{60}", n=4, max_tokens=5)
    for choice in choices.values():
        assert choice["reason"] == "length"
        assert re.fullmatch("[0-9]{1,59}", choice["text"])


def test_constraint_holds_for_every_prompt_and_is_kept_with_the_loom(served: Served) -> None:
    status, answer = post(
        served, COMPLETIONS, prompt=["A:", "B:"], n=2, guided_choice=["owl", "fox"]
    )
    assert status == 200, answer
    assert {each["text"] for each in answer["choices"]} <= {"owl", "fox"}
    status, answer = post(
        served, COMPLETIONS, guided_regex="[0-9]{20}", max_tokens=2, loom={"save": True}
    )
    assert status == 200, answer
    kept = answer["loom"]
    begun = answer["choices"][0]["text"]
    status, more = post(
        served,
        COMPLETIONS,
        prompt=None,
        guided_regex="[0-9]{20}",
        loom={"loom": kept["name"], "parent": str(kept["nodes"][0])},
    )
    assert status == 200, more
    assert re.fullmatch("[0-9]{20}", begun + more["choices"][0]["text"])


def test_constraint_with_tools_bounds_the_text_of_a_turn_without_calls(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    status, answer = post(served, CHATS, tools=tools, regex=DIGITS, max_tokens=80)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    if calls := message.get("tool_calls"):
        assert calls[0]["function"] == {"name": "f", "arguments": "{}"}
    else:
        assert re.fullmatch(DIGITS, message["content"])
