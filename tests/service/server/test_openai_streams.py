"""Streams with logprobs: each chunk has one token and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import weft
from chatty import chatty
from serving import serving
from shallow import shallow
from weft.lm.chat import ChatPrompt
from weft.service.server import ServerConfig
from weft.service.server.openai.logprobs import ScoredToken
from weft.service.server.openai.turns import ChatTurn

if TYPE_CHECKING:
    from serving import Served

PROMPT = "Once upon a time there was a"
MESSAGES = [{"role": "user", "content": weft.samples.sum}]
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def with_tools() -> Iterator[Served]:
    """A server whose chat template reads tools and writes reasoning."""
    with serving(ServerConfig(port=0, models=(str(chatty()),), engine="numpy")) as server:
        yield server


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    text = served.client.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def choices(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    return [choice for each in events(served, path, **body) for choice in each["choices"]]


@pytest.mark.parametrize("echo", [False, True])
def test_completion_chunk_has_one_token_and_its_text(served: Served, echo: bool) -> None:
    body: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 40, "n": 4, "seed": 1, "temperature": 1.2,
        "logprobs": 1, "echo": echo, "return_token_ids": True,
        "stop": ["e@", "d@@", "n@", "r@", "a@", "t@", "s@", " @"],
    }  # fmt: skip
    expected = served.client.post("/v1/completions", json=body).json()["choices"]
    joined: list[dict[str, Any]] = [{"text": "", "tokens": [], "text_offset": []} for _ in expected]
    pending = [b""] * len(expected)
    for choice in choices(served, "/v1/completions", **body):
        index, lists = choice["index"], choice["logprobs"]
        if lists is None:  # the end of the choice alone
            assert choice["text"] == ""
            assert choice["finish_reason"] in ("stop", "length")
            continue
        joined[index]["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            joined[index][name] += lists[name]
        (token,) = lists["tokens"]
        if token.startswith("bytes:"):
            pending[index] += eval(f"b'{token[6:]}'")
        elif token[:2] != "<|":
            assert choice["text"] == token
            continue
        assert choice["text"] in ("", pending[index].decode(errors="replace"))
        pending[index] = b"" if choice["text"] else pending[index]
    for got, wanted in zip(joined, expected, strict=True):
        assert got["text"] == wanted["text"]
        assert got["tokens"] == wanted["logprobs"]["tokens"]
        assert got["text_offset"] == wanted["logprobs"]["text_offset"]


def test_completion_chunks_of_characters_of_several_tokens_have_one_token(served: Served) -> None:
    ids = served.service.models.lm().text.continuation("\U0001f98a")
    body: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 30, "logprobs": 1, "return_token_ids": True,
        "logit_bias": {str(token): 100 for token in ids}, "seed": 5, "ignore_eos": True,
    }  # fmt: skip
    (expected,) = served.client.post("/v1/completions", json=body).json()["choices"]
    received = choices(served, "/v1/completions", **body)
    if not received[-1]["token_ids"]:  # the end of a choice may be a chunk of its own
        assert received.pop()["finish_reason"] == "length"
    assert [each["token_ids"] for each in received] == [[token] for token in expected["token_ids"]]
    assert "".join(each["text"] for each in received) == expected["text"]


@pytest.mark.parametrize(
    ("prompt", "length"), [(PROMPT, len(PROMPT)), ("naïve 🦊 wept", 12), ([5, 6, 7], None)]
)
def test_text_offset_without_echo_begins_at_length_of_prompt(
    served: Served, prompt: Any, length: int | None
) -> None:
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 0, "ignore_eos": True, "seed": 1}
    (choice,) = served.client.post("/v1/completions", json=body).json()["choices"]
    (echoed,) = served.client.post("/v1/completions", json={**body, "echo": True}).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == echoed["logprobs"]["text_offset"][-3:]
    assert length is None or offsets[0] == length


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("offers_tools", [False, True])
def test_chat_chunk_has_one_token_and_its_text(
    with_tools: Served, thinks: bool, offers_tools: bool
) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES, "max_tokens": 30, "seed": 3, "temperature": 1.5, "logprobs": True,
        "n": 3, "chat_template_kwargs": {"enable_thinking": thinks},
        **({"tools": [TOOL]} if offers_tools else {}),
    }  # fmt: skip
    expected = with_tools.client.post("/v1/chat/completions", json=body).json()["choices"]
    tokens: list[list[Any]] = [[] for _ in expected]
    contents = [""] * len(expected)
    for choice in choices(with_tools, "/v1/chat/completions", **body):
        text = choice["delta"].get("content", "") + choice["delta"].get("reasoning_content", "")
        contents[choice["index"]] += choice["delta"].get("content") or ""
        if choice["logprobs"] is None:
            assert not text
            continue
        (entry,) = choice["logprobs"]["content"]
        tokens[choice["index"]].append(entry)
        assert entry["token"].endswith(text) or entry["token"].startswith(("bytes:", text))
    assert contents == [each["message"]["content"] or "" for each in expected]
    assert tokens == [each["logprobs"]["content"] for each in expected]


def test_streamed_call_has_all_tokens_and_is_in_the_last_chunk(with_tools: Served) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60,
        "parallel_tool_calls": False, "logprobs": True, "temperature": 0,
    }  # fmt: skip
    (expected,) = with_tools.client.post("/v1/chat/completions", json=body).json()["choices"]
    received = choices(with_tools, "/v1/chat/completions", **body)
    entries = [each["logprobs"]["content"] for each in received if each["logprobs"]]
    assert entries == [[entry] for entry in expected["logprobs"]["content"]]
    calls = [each for each in received if each["delta"].get("tool_calls")]
    assert [each["logprobs"]["content"][0] for each in calls] == [entries[-1][0]]


def test_response_delta_has_one_token_and_its_text(with_tools: Served) -> None:
    body: dict[str, Any] = {
        "input": weft.samples.sum, "max_output_tokens": 40, "temperature": 1.5,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    received = events(with_tools, "/v1/responses", **body)
    deltas = [each for each in received if each["type"] == "response.output_text.delta"]
    assert all(len(each["logprobs"]) == 1 for each in deltas)
    text = b"".join(bytes(each["logprobs"][0]["bytes"]) for each in deltas)
    final = received[-1]["response"]["output"][0]["content"][0]
    assert text.decode(errors="replace") == final["text"]
    assert final["logprobs"] == [each["logprobs"][0] for each in deltas]


class Turn:
    """A chat turn of a reply whose tokens are given as texts."""

    def __init__(self, texts: list[str]) -> None:
        ends = [len("".join(texts[: i + 1])) for i in range(len(texts))]
        self.texts = texts
        self.reply: Any = SimpleNamespace(
            text="", n_sent_chars=0, tokens=[], ends=ends, is_over=False, certain=0,
            token_texts=lambda first, n: texts[first : first + n],
        )  # fmt: skip
        prompt = ChatPrompt.from_pieces(
            weft.load(shallow()).text, [], user_prompt="", template=None, tools=(), tool_choice=None
        )
        self.turn = ChatTurn(prompt, self.reply, reads_calls=True)

    def steps(self, sizes: list[int]) -> list[tuple[str, str, str, bool]]:
        """Return (token, content, reasoning, is_content) of tokens that come in groups."""
        rows, first = [], 0
        for number, size in enumerate(sizes):
            reply, ids = self.reply, list(range(first, first + size))
            reply.tokens += ids
            reply.text = "".join(self.texts[: first + size])
            reply.certain, reply.is_over = len(reply.text), number == len(sizes) - 1
            for step in self.turn.steps(first, ids, [ScoredToken(i, 0.0) for i in ids]):
                (token,) = step.tokens
                delta = step.delta
                rows.append((self.texts[token], delta.content, delta.reasoning, step.is_content))
            first += size
        return rows


@pytest.mark.parametrize("sizes", [[1] * 7, [7], [3, 4], [2, 2, 2, 1]])
def test_text_that_looked_like_a_marker_keeps_its_tokens(sizes: list[int]) -> None:
    texts = ["a ", "<", "tool", "", "s>", " b", "<tool"]
    assert Turn(texts).steps(sizes) == [(text, text, "", True) for text in texts]


@pytest.mark.parametrize("sizes", [[1] * 7, [7], [3, 4]])
def test_tokens_of_markers_add_no_text(sizes: list[int]) -> None:
    texts = ["<think>\n", "so", "\n</", "think>\n", "\n", "", "yes"]
    assert Turn(texts).steps(sizes) == [
        ("<think>\n", "", "", False),
        ("so", "", "so", False),
        ("\n</", "", "", False),
        ("think>\n", "", "", False),
        ("\n", "", "", False),
        ("", "", "", True),
        ("yes", "yes", "", True),
    ]
