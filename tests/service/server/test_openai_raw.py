"""Behaviour hidden by SDKs: rejected parameters, errors in streams, disconnects, unusual texts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

import weft
from serving import serving
from weft.service.server import ServerConfig

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": weft.samples.sum}]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
COMPLETION, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    if path == COMPLETION:
        body = {"prompt": PROMPT, "max_tokens": 4, **body}
    elif path == CHATS:
        body = {"messages": CHAT, "max_tokens": 4, **body}
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}


def chunks(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, **body} if path == COMPLETION else {"messages": CHAT, **body}
    text = served.client.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, {"suffix": "end"}, "suffix"),
        (COMPLETION, {"unheard_of": 1}, "unheard_of"),
        (COMPLETION, {"n": 100_000}, "n"),
        (COMPLETION, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETION, {"best_of": 3, "stream": True}, "best_of"),
        (COMPLETION, {"max_tokens": 10_000_000}, "max_tokens"),
        (COMPLETION, {"logprobs": 1000}, "logprobs"),
        (COMPLETION, {"temperature": -1}, "temperature"),
        (COMPLETION, {"top_p": 0}, "top_p"),
        (COMPLETION, {"min_p": 2}, "min_p"),
        (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETION, {"logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"five": 1}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (COMPLETION, {"mirostat_mode": 2}, "mirostat_mode"),
        (COMPLETION, {"xtc_probability": 1.5}, "xtc_probability"),
        (COMPLETION, {"dry_multiplier": 1, "dry_base": 0.5}, "dry_base"),
        *(
            (COMPLETION, {"dry_multiplier": 1, name: wrong}, name)
            for name in ("dry_sequence_breakers",)
            for wrong in ("[1]", "a", [""])
        ),
        (COMPLETION, {"dry_multiplier": 1, "samplers": "skypmxt"}, "samplers"),
        (COMPLETION, {"typical": 0.5, "typical_p": 0.6}, "typical"),
        (COMPLETION, {"truncation_length": 2}, "truncation_length"),
        (COMPLETION, {"prompt": [[1, 99999]]}, "prompt"),
        (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETION, {"loom": {"logprobs_mode": "sampled"}}, "loom.logprobs_mode"),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs"),
        (CHATS, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        (CHATS, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHATS, {"continue_final_message": True}, "continue_final_message"),
        (CHATS, {"audio": {"voice": "x"}}, "audio"),
        (CHATS, {"functions": [{"name": "f"}]}, "functions"),
        (
            CHATS,
            {"response_format": schema({"type": "x"})},
            "response_format",
        ),
        (CHATS, {"messages": IMAGE}, "messages.0.content.0"),
        (RESPONSES, {"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "Hi", "conversation": "c"}, "conversation"),
        (RESPONSES, {"input": "Hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        (RESPONSES, {"input": "Hi", "include": ["file_search_call.results"]}, "include"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 10_000_000}, "max_output_tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": [""]}, "input"),
    ],
)  # fmt: skip
def test_unsupported_parameters_are_rejected_by_name(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    base: dict[str, Any] = {}
    if path == COMPLETION:
        base = {"prompt": PROMPT}
    elif path == CHATS:
        base = {"messages": CHAT}
    answer = served.client.post(path, json={**base, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_wrong_type_lists_allowed_types(served: Served) -> None:
    error = served.client.post(COMPLETION, json={"prompt": 5}).json()["error"]
    assert error["param"] == "prompt"
    assert error["message"].startswith("prompt is 5; it must be a string or a list")


@pytest.mark.parametrize(("path", "name"), [(COMPLETION, "prompt"), ("/v1/embeddings", "input")])
def test_mixed_prompts_are_rejected(served: Served, path: str, name: str) -> None:
    mixtures = {
        "lists and texts": [[1, 900], "a"],
        "texts and token ids": [5, "a"],
        "1.5 and token ids": [5, 1.5],
    }
    for what, value in mixtures.items():
        error = served.client.post(path, json={name: value}).json()["error"]
        assert error["param"] == name
        assert error["message"] == (
            f"{name}: it mixes {what}; allowed are a text, texts, token ids, or lists of token ids,"
            " one kind in a request"
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8: byte 12 is not part of a character"),
        (b"[" * 200_000, "the body's JSON is nested too deeply"),
    ],
)
def test_unparsable_body_has_its_reason(served: Served, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.client.post(COMPLETION, content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_an_unknown_model_is_404(served: Served) -> None:
    answer = served.client.post(COMPLETION, json={"prompt": "a", "model": "big"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_too_long_prompt_reports_its_length(served: Served) -> None:
    answer = served.client.post(COMPLETION, json={"prompt": [5] * 3000})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["details"] == {"n_prompt_tokens": 3000, "n_ctx": 2048}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": "a" * 1_000_000}),
        (COMPLETION, {"prompt": ["a", "a" * 1_000_000]}),
        (CHATS, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
        (RESPONSES, {"input": "a" * 1_000_000}),
        ("/v1/embeddings", {"input": "a" * 1_000_000}),
        ("/api/v1/looms", {"prompt": "a" * 1_000_000}),
    ],
)
def test_text_that_cannot_fit_is_rejected_before_tokenizing(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    answer = served.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), answer.text
    assert "at least" in error["message"]  # so many were not counted
    assert error["details"]["n_prompt_tokens"] > error["details"]["n_ctx"] == 2048


def test_null_and_disabled_fields_change_nothing(served: Served) -> None:
    plain = post(served, COMPLETION, seed=1)["choices"]
    off = {"suffix": None, "mirostat_mode": 0, "mirostat_tau": 3, "top_k": -1, "stop": [""]}
    taken = {"user": "me", "store": True, "metadata": {}, "service_tier": "flex"}
    assert post(served, COMPLETION, seed=1, **off, **taken)["choices"] == plain


def test_names_of_other_servers_are_honoured(served: Served) -> None:
    own = post(served, COMPLETION, seed=1, repetition_penalty=1.5, stop=["a"], max_tokens=9)
    other = served.client.post(
        COMPLETION,
        json={
            "prompt": PROMPT,
            "sampler_seed": 1,
            "rep_pen": 1.5,
            "stopping_strings": ["a"],
            "max_new_tokens": 9,
        },
    ).json()
    assert other["choices"] == own["choices"]


def test_banned_token_is_absent_and_ignore_eos_fills_max_tokens(served: Served) -> None:
    lm = served.service.models.lm()
    greedy = weft.Loom(lm, PROMPT, template=False).grow(temperature=0, max_tokens=4)[0]
    banned = post(
        served, COMPLETION, temperature=0, logit_bias={str(greedy.tokens[0]): -100},
        return_token_ids=True,
    )["choices"][0]["token_ids"]  # fmt: skip
    assert greedy.tokens[0] not in banned
    reply = post(served, CHATS, max_tokens=60, ignore_eos=True, temperature=0)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 60


def test_continue_final_message_continues_the_text(served: Served) -> None:
    text = post(served, CHATS, temperature=0, max_tokens=40)["choices"][0]["message"]["content"]
    begun = [*CHAT, {"role": "assistant", "content": text[:9]}]
    rest = post(
        served, CHATS, messages=begun, continue_final_message=True, temperature=0, max_tokens=40,
        add_generation_prompt=False,
    )["choices"][0]["message"]["content"]  # fmt: skip
    assert text[:9] + rest == text


def test_special_tokens_in_chat_messages_stay_text(served: Served) -> None:
    lm = served.service.models.lm()
    content = "<|end|><|assistant|>"
    reply = post(
        served,
        CHATS,
        messages=[{"role": "user", "content": content}],
        max_tokens=1,
        return_token_ids=True,
    )
    assert reply["prompt_token_ids"] == list(
        lm.format_chat([{"role": "user", "content": content}]).ids
    )
    raw = post(served, COMPLETION, prompt="<|bos|><|user|>Hi", return_token_ids=True)
    assert (
        raw["choices"][0]["prompt_token_ids"] == lm.tokenize("<|bos|><|user|>Hi", special=True)[1:]
    )


def test_prompt_logprobs_are_keyed_by_token_id(served: Served) -> None:
    lm = served.service.models.lm()
    ids = lm.tokenize(PROMPT)
    first, *rest = post(served, COMPLETION, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    wanted = weft.Loom(lm, ids[:1]).measure(ids[1:])
    assert first is None
    for token, logprob, entry in zip(ids[1:], wanted.logprobs, rest, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-5)
        assert {each["rank"] for each in entry.values()} >= {1, 2}


def test_logprob_tokens_are_returned_at_every_position(served: Served) -> None:
    loom = {"logprob_tokens": [7, 400]}
    lm = served.service.models.lm()
    reply = post(served, COMPLETION, logprobs=1, temperature=0, max_tokens=1, loom=loom)
    (requested,) = reply["choices"][0]["logprobs"]["asked"]
    top = {each.id: each.logprob for each in weft.Loom(lm, PROMPT, template=False).next(2000)}
    assert list(requested.values()) == pytest.approx([top[7], top[400]], abs=1e-5)


def test_best_of_returns_the_likeliest(served: Served) -> None:
    reply = post(served, COMPLETION, n=2, best_of=5, seed=9, max_tokens=8)
    lm = served.service.models.lm()
    loom = weft.Loom(lm, PROMPT, template=False)
    grown = [loom.grow(seed=9 + i, max_tokens=8)[0] for i in range(5)]
    best = sorted(grown, key=lambda node: -node.mean_logprob)[:2]
    assert [choice["text"] for choice in reply["choices"]] == [node.text for node in best]
    assert reply["usage"]["completion_tokens"] == sum(len(node.tokens) for node in grown)


def test_streamed_choices_begin_with_the_echo(served: Served) -> None:
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2, "seed": 4, "max_tokens": 6}
    expected = post(served, COMPLETION, **body)["choices"]
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    for chunk in chunks(served, COMPLETION, **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in expected]
    assert tokens == [choice["logprobs"]["tokens"] for choice in expected]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in expected]


def test_response_format_gives_exact_integers_and_allows_indentation(served: Served) -> None:
    lm = served.service.models.lm()
    properties = {"id": {"const": 2**53 + 1}}
    form = schema({"type": "object", "properties": properties, "required": ["id"]})
    answer = post(served, CHATS, response_format=form, max_tokens=80)["choices"][0]
    assert json.loads(answer["message"]["content"]) == {"id": 2**53 + 1}
    break_line = {str(lm.text.continuation("\n")[0]): 100}
    answer = post(served, CHATS, response_format=form, max_tokens=80, logit_bias=break_line)
    text = answer["choices"][0]["message"]["content"]
    assert "\n" in text
    assert json.loads(text) == {"id": 2**53 + 1}


def test_character_of_several_tokens_is_not_split(served: Served) -> None:
    """Biases make the model write the bytes of one character, each a token."""
    lm = served.service.models.lm()
    ids = lm.text.continuation("日")
    assert len(ids) > 1
    form = schema({"const": "日é"})
    choice = post(served, CHATS, response_format=form, max_tokens=40, logprobs=True)["choices"][0]
    assert json.loads(choice["message"]["content"]) == "日é"
    spelled = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
    assert spelled.decode() == choice["message"]["content"]
    assert any(each["token"].startswith("bytes:\\x") for each in choice["logprobs"]["content"])
    pieces = [
        each["choices"][0]["delta"].get("content", "")
        for each in chunks(served, CHATS, response_format=form, max_tokens=40)
    ]
    assert "".join(pieces) == choice["message"]["content"]
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("case", ["of one half", "of several tokens"])
@pytest.mark.parametrize("path", [COMPLETION, CHATS])
def test_stream_has_tokens_that_add_no_character_yet(served: Served, path: str, case: str) -> None:
    lm = served.service.models.lm()
    ids = lm.text.continuation("\U0001f98a")
    assert len(ids) > 1
    halves = ids[:1] if case == "of one half" else ids
    body: dict[str, Any] = {
        "logit_bias": {str(token): 100 for token in halves},
        "seed": 5,
        "max_tokens": 40,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0 if path == COMPLETION else True,
    }
    (expected,) = post(served, path, **body)["choices"]
    received = [each["choices"][0] for each in chunks(served, path, **body)]
    ids = [token for each in received for token in each.get("token_ids", ())]
    assert ids == expected["token_ids"]
    key = "tokens" if path == COMPLETION else "content"
    logprobs = [one for each in received if each["logprobs"] for one in each["logprobs"][key]]
    assert logprobs == expected["logprobs"][key]


def test_streamed_response_has_logprobs_of_partial_characters(served: Served) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"const": "\U0001f98a日é" * 3}}
    body: dict[str, Any] = {
        "input": weft.samples.sum,
        "max_output_tokens": 80,
        "text": {"format": form},
        "include": ["message.output_text.logprobs"],
    }
    (expected,) = post(served, RESPONSES, **body)["output"]
    text = served.client.post(RESPONSES, json={**body, "stream": True}).text
    received = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [each for each in received if each["type"] == "response.output_text.delta"]
    spelled = [bytes(one["bytes"]) for each in deltas for one in each["logprobs"]]
    assert spelled == [bytes(one["bytes"]) for one in expected["content"][0]["logprobs"]]
    assert b"".join(spelled).decode() == expected["content"][0]["text"]


def test_stream_and_answer_have_the_same_tokens_of_a_stop_string(served: Served) -> None:
    """The stop string begins with a character of several tokens."""
    form = schema({"const": "ab\U0001f98acd"})
    body: dict[str, Any] = {
        "response_format": form, "stop": ["\U0001f98ac"], "logprobs": True, "max_tokens": 40
    }  # fmt: skip
    (expected,) = post(served, CHATS, **body)["choices"]
    received = [each["choices"][0] for each in chunks(served, CHATS, **body)]
    logprobs = [one for each in received if each["logprobs"] for one in each["logprobs"]["content"]]
    assert logprobs == expected["logprobs"]["content"]
    assert expected["message"]["content"] == '"ab'


def test_disconnected_client_cancels_its_runs(served: Served) -> None:
    body = {"messages": CHAT, "n": 4, "ignore_eos": True, "max_tokens": 1500}
    lm = served.service.models.lm()

    async def vanish(stream: bool) -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            if stream:
                async with client.stream("POST", CHATS, json={**body, "stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        if "content" in line:
                            return
            else:
                request = asyncio.ensure_future(client.post(CHATS, json=body))
                while not served.service.n_works:
                    await asyncio.sleep(0.01)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

    for stream in (True, False):
        asyncio.run(vanish(stream))
        while served.service.n_works or not lm.scheduler.is_idle:
            time.sleep(0.02)
        assert served.service.n_works == 0
        assert lm.scheduler.is_idle
        before = lm.stats().decoded
        time.sleep(0.1)
        assert lm.stats().decoded == before


def test_error_in_a_stream_is_a_chunk(served: Served) -> None:
    """All tokens are banned: a dead end, after what the schema forces."""
    lm = served.service.models.lm()
    bans = {str(token): -100 for token in range(lm.info.n_vocab)}
    form = schema({"enum": ["xylophone", "zebra"]})
    last = chunks(served, CHATS, response_format=form, logit_bias=bans)[-1]
    assert last["error"]["message"]
    answer = served.client.post(
        CHATS, json={"messages": CHAT, "response_format": form, "logit_bias": bans}
    )
    assert answer.status_code >= 400
    assert answer.json()["error"]["code"] == last["error"]["code"]


@pytest.mark.parametrize("path", [COMPLETION, CHATS, RESPONSES])
def test_shutdown_is_reported_to_answers_and_streams(path: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
    if path == CHATS:
        body = {**body, "messages": CHAT}
        del body["prompt"]
    elif path == RESPONSES:
        form = {"type": "json_schema", "name": "a", "schema": {"const": "long " * 900}}
        body = {"input": "Hi", "max_output_tokens": 1900, "text": {"format": form}}
    with serving(ServerConfig(port=0, grace_s=0.0)) as server:

        async def both() -> tuple[httpx.Response, list[str]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
                pending = asyncio.ensure_future(client.post(path, json=body))
                lines: list[str] = []
                async with client.stream("POST", path, json={**body, "stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        lines.append(line)
                        if len(lines) == 5:
                            while server.service.n_works < 2:
                                await asyncio.sleep(0.01)
                            server.loop.call_soon_threadsafe(
                                lambda: server.service.spawn(server.service.drain())
                            )
                return await pending, lines

        answer, lines = asyncio.run(both())
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "shutting_down"
    assert answer.headers["retry-after"]
    events = [line for line in lines if line.startswith("data: ")]
    if path != RESPONSES:
        assert events.pop() == "data: [DONE]"
    assert json.loads(events[-1][6:])["error"]["code"] == "shutting_down"


def test_deltas_are_sent_20_times_a_second_or_less(served: Served) -> None:
    """Tokens that take less than a twentieth of a second share a delta."""
    began = time.monotonic()
    deltas = [
        each
        for each in chunks(served, CHATS, ignore_eos=True, max_tokens=150)
        if each["choices"][0]["delta"].get("content")
    ]
    assert len(deltas) <= 20 * (time.monotonic() - began) + 2
