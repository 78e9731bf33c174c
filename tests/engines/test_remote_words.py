"""Addresses, keys, dialects and messages: requests and responses without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shallow import TINY
from weft._core.sampling.params import SamplingParams
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import GBNF, Choice, JsonSchema, Regex
from weft.engines.generation import GenerationRequest
from weft.engines.remote.address import Address
from weft.engines.remote.dialect import DIALECTS, ServerCapabilities, dialect_of
from weft.engines.remote.request_builder import RequestBuilder
from weft.engines.remote.responses import EventStreamParser, ProtocolError, read_deltas
from weft.engines.remote.token_matching import TokenMatcher
from weft.errors import ConfigError, ForwardError
from weft.lm.lm import LM

ALL = ServerCapabilities(takes_ids=True, gives_ids=True, n=True, logprobs=True, raw=True, echo=True)


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


# Addresses -------------------------------------------------------------------------------------


def test_address_is_read_and_written() -> None:
    result = Address.parse("HTTP://Host:8000/v1/#org/name:tag?tokenizer=./a b&most=3")
    assert result.base == "http://host:8000/v1"
    assert result.model == "org/name:tag"
    assert result.options == {"tokenizer": "./a b", "most": "3"}
    assert Address.parse(result.with_model(result.model)) == result
    odd = Address("http://host/v1", "m", {"tokenizer": "./100% a&b=c+d#e?", "most": "3"})
    assert Address.parse(odd.with_model("m")) == odd
    assert Address.parse("http://[::1]:80/v1").base == "http://[::1]:80/v1"
    assert Address.parse("https://host/v1", "m").with_model("m") == "https://host/v1#m"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://", "no host"),
        ("http://user:hunter2@host/v1", "user, a password"),
        ("http://host/v1?api_key=hunter2", "a password or a"),
        ("http://host:port/v1", "cannot be read"),
        ("http://[::1/v1", "cannot be read"),
    ],
)
def test_invalid_address_raises_without_its_secrets(url: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        Address.parse(url)
    assert "hunter2" not in str(caught.value)


def test_two_models_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="two models: 'a' in the address and model='b'"):
        Address.parse("http://host/v1#a", "b")


@pytest.mark.parametrize(
    ("url", "may_have_openais"),
    [
        ("https://api.host/v1", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://10.0.0.3:8000/v1", False),
        ("http://host.internal/v1", False),
        ("http://127.0.0.1.evil.com/v1", False),
    ],
)
def test_openai_key_is_sent_to_https_and_loopback_only(
    monkeypatch: pytest.MonkeyPatch, url: str, may_have_openais: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    address = Address.parse(url)
    assert address.key(None) == ("sk-openai" if may_have_openais else None)
    monkeypatch.setenv("WEFT_API_KEY", "sk-weft")
    assert address.key(None) == "sk-weft"
    assert address.key("sk-given") == "sk-given"


def test_invalid_key_raises_without_showing_it() -> None:
    for key in ("two words", "sk-ä", "sk\nx: y"):
        with pytest.raises(ConfigError) as caught:
            Address.parse("http://host/v1").key(key)
        assert key not in str(caught.value)


# -- requests --------------------------------------------------------------------------------------


def body(
    dialect: str, text: Tokenizer, capabilities: ServerCapabilities = ALL, **params: Any
) -> dict[str, Any]:
    """Return the request body of a run of three tokens after three, in a dialect."""
    requested = SamplingParams(**params)
    wording = RequestBuilder("m", DIALECTS[dialect], capabilities, text)
    assert wording.unsupported_params(requested) is None
    run = GenerationRequest((1, 300, 301), requested, (5, 6), 3, frozenset({5}))
    return wording.body(run, run.tokens, [5 << 40 | 7], 3)


def test_neutral_values_are_always_sent(text: Tokenizer) -> None:
    request = body("vllm", text)
    assert (request["top_k"], request["top_p"], request["min_p"]) == (-1, 1.0, 0.0)
    assert request["repetition_penalty"] == 1.0
    request = body("llama-server", text)
    assert (request["top_k"], request["top_p"], request["min_p"], request["typical_p"]) == (
        0,
        1.0,
        0.0,
        1.0,
    )
    assert "top_k" not in body("openai", text)


def test_every_supported_parameter_is_sent(text: Tokenizer) -> None:
    """Each alone, in every dialect: rejected with its name, or in the request."""
    values = {
        "top_k": 7, "typical_p": 0.7, "top_p": 0.7, "min_p": 0.07, "repetition_penalty": 1.7,
        "presence_penalty": 0.7, "frequency_penalty": 0.7, "logit_bias": {7: 7.0},
        "top_n_sigma": 1.5, "xtc_probability": 0.5, "dry_multiplier": 0.8,
    }  # fmt: skip
    for dialect in DIALECTS.values():
        wording = RequestBuilder("m", dialect, ALL, text)
        for name, value in values.items():
            first = dialect.order != "last"
            requested = SamplingParams(temperature_first=first, **{name: value})  # type: ignore[arg-type]
            refused = wording.unsupported_params(requested)
            if name in dialect.params:
                request = body(dialect.name, text, temperature_first=first, **{name: value})
                assert refused is None
                want = {"7": 7.0} if name == "logit_bias" else value
                assert request[dialect.params[name]] == want
            else:
                assert refused is not None
                assert refused.startswith(name)


def test_server_with_filter_order_receives_the_order(text: Tokenizer) -> None:
    warm = {"temperature": 0.7, "min_p": 0.1}
    first = body("llama-server", text, temperature_first=True, **warm)["samplers"]
    last = body("llama-server", text, temperature_first=False, **warm)["samplers"]
    assert first[:3] == ["penalties", "dry", "temperature"]
    assert last[-1] == "temperature"
    assert sorted(first) == sorted(last)


def test_greedy_runs_send_no_seed_and_no_filters(text: Tokenizer) -> None:
    request = body("vllm", text, temperature=0, top_k=7, min_p=0.5)
    assert "seed" not in request
    assert (request["temperature"], request["top_k"], request["min_p"]) == (0, -1, 0.0)


def test_seeds_fit_into_what_servers_take(text: Tokenizer) -> None:
    assert 0 <= body("vllm", text)["seed"] < 2**31


def test_text_prompt_leaves_the_begin_token_to_the_server(text: Tokenizer) -> None:
    assert text.bos_token_id is not None
    wording = RequestBuilder("m", DIALECTS["openai"], ServerCapabilities(), text)
    ids = [text.bos_token_id, *text.continuation("Tell me")]
    assert wording.prompt(ids) == {"prompt": "Tell me"}


def test_constraints_are_sent_in_each_servers_format(text: Tokenizer) -> None:
    choice = Choice(["yes", 'no "no"'])
    grammar = 'root ::= "yes" | "no \\"no\\""'
    assert body("vllm", text, constraint=choice)["structured_outputs"] == {"grammar": grammar}
    assert body("llama-server", text, constraint=choice)["grammar"] == grammar
    assert body("vllm", text, constraint=Regex("a+"))["structured_outputs"] == {"regex": "a+"}
    assert body("llama-cpp-python", text, constraint=GBNF('root ::= "a"'))["grammar"]
    for dialect in ("openai", "sglang"):
        refused = RequestBuilder("m", DIALECTS[dialect], ALL, text).unsupported_params(
            SamplingParams(constraint=choice)
        )
        assert refused is not None
        assert refused.startswith("the constraint Choice")


@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_gbnf_of_a_json_schema_takes_the_same_texts(text: Tokenizer, whitespace: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}},
        "required": ["a", "b"],
    }
    from weft.engines.stub import StubEngine

    lm = LM(StubEngine(n_vocab=text.n_vocab), text)
    constraint = JsonSchema(schema, whitespace=whitespace)
    ours = lm.constraints.matcher(constraint)
    theirs = lm.constraints.matcher(GBNF(constraint.gbnf()))
    for written in (
        '{"a": 1, "b": [null, null]}', '{"a": 1, "b": []}', '{"a":1,"b":[]}', '{ "a": 1, "b": []}',
        '{"a": 1,"b": []}', '{"a": 1, "b": [ null]}', '{"a": 1, "b": [null,null]}',
        '{"a": 1, "c": 2}', '{\n  "a": 1,\n  "b": []\n}', '{\n\n\n\n"a": 1, "b": []}',
    ):  # fmt: skip
        ids = text.continuation(written)
        assert ours.takes(ids) == theirs.takes(ids), written
    lm.close()


@pytest.mark.parametrize("escape", ["n", "u000a", "u001f", "u007f", "u0041", "/", "u00e9", '"'])
def test_gbnf_of_a_json_schema_takes_the_same_escapes(text: Tokenizer, escape: str) -> None:
    from weft.engines.stub import StubEngine

    lm = LM(StubEngine(n_vocab=text.n_vocab), text)
    constraint = JsonSchema({"type": "array", "items": {"type": "string", "maxLength": 2}})
    ours = lm.constraints.matcher(constraint)
    theirs = lm.constraints.matcher(GBNF(constraint.gbnf()))
    ids = text.continuation(f'["\\{escape}"]')
    assert ours.takes(ids) == theirs.takes(ids)
    lm.close()


def test_servers_are_known_by_what_they_call_themselves() -> None:
    assert dialect_of("vllm").name == "vllm"
    assert dialect_of("me").name == "llama-cpp-python"
    assert dialect_of("weft").name == "weft"
    assert dialect_of("somebody").name == "openai"


# What is read ----------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=5), st.integers(1, 7))
def test_messages_are_parsed_from_chunks_of_any_size(messages: list[Any], size: int) -> None:
    raw = b": ping\n\n" + b"".join(
        b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\r\n\r\n" for each in messages
    )
    raw += b"data: [DONE]\n\ndata: {}\n\n"
    events, result = EventStreamParser(), []
    for at in range(0, len(raw), size):
        result += events.feed(raw[at : at + size])
    assert result == messages
    assert events.is_done


JUNK = [
    "[]", "3", '"x"', "null", "{}", '{"choices": 3}', '{"choices": [3]}', '{"choices": [null]}',
    '{"choices": [{"index": "x"}]}', '{"error": {"message": "no"}}', '{"error": "no"}',
    '{"choices": [{"text": "a", "token_ids": ["b"]}]}',
    '{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["b"]}}]}',
    '{"choices": [{"text": "a", "logprobs": {"content": [{"bytes": [999]}]}}]}',
    '{"choices": [{"text": "a", "logprobs": 3}]}',
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK)
def test_invalid_responses_raise_protocol_error(junk: str) -> None:
    with pytest.raises(ProtocolError):
        list(read_deltas(json.loads(junk)))


def test_logprobs_that_are_no_numbers_are_absent(text: Tokenizer) -> None:
    message = '{"choices": [{"text": "a", "token_ids": [30], "logprobs": {"tokens": ["a"], %s}}]}'
    (reported,) = read_deltas(json.loads(message % '"token_logprobs": [NaN]'))
    assert TokenMatcher(text, text.n_vocab).tokens(reported) == ([30], None)
    (reported,) = read_deltas(json.loads(message % '"token_logprobs": []'))
    assert TokenMatcher(text, text.n_vocab).tokens(reported) == ([30], None)


def test_id_beyond_the_vocabulary_is_another_model_s(text: Tokenizer) -> None:
    (reported,) = read_deltas({"choices": [{"text": "a", "token_ids": [text.n_vocab]}]})
    with pytest.raises(ForwardError, match="the tokenizer of this model"):
        TokenMatcher(text, text.n_vocab).tokens(reported)


@given(sample=st.text(alphabet=st.characters(codec="utf-8")))
def test_text_without_ids_has_the_same_text_in_tokens(text: Tokenizer, sample: str) -> None:
    (reported,) = read_deltas({"choices": [{"text": sample}]})
    ids, logprobs = TokenMatcher(text, text.n_vocab).tokens(reported)
    assert text.decode(ids) == sample
    assert logprobs is None or not ids
