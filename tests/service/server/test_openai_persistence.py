"""With `loom` in a request, the answers are nodes of a saved loom, for every API."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

import weft

if TYPE_CHECKING:
    from serving import Served
    from weft._core.tokens.tokenizer import Tokenizer

PROMPT = "Once upon a time"
COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def nodes(served: Served, loom: str) -> dict[int, dict[str, Any]]:
    """Return all nodes of a loom from the native API, by number."""
    rows = served.client.get(f"/api/v1/looms/{loom}/nodes", params={"limit": 1000}).json()["data"]
    return {each["node"]: each for each in rows}


def test_choices_are_nodes_of_a_new_loom(served: Served) -> None:
    plain = post(served, COMPLETION, prompt=PROMPT, n=3, seed=3, max_tokens=6)
    saved = post(served, COMPLETION, prompt=PROMPT, n=3, seed=3, max_tokens=6, loom={"save": True})
    texts = [choice["text"] for choice in saved["choices"]]
    assert texts == [choice["text"] for choice in plain["choices"]]
    there = nodes(served, saved["loom"]["loom"])
    assert there[0]["text"].endswith(PROMPT)
    loom = served.client.get(f"/api/v1/looms/{saved['loom']['loom']}").json()
    assert (loom["prompt"], loom["name"]) == (PROMPT, saved["loom"]["name"])
    assert loom["name"].startswith("once-upon-time")
    assert [there[number]["text"] for number in saved["loom"]["nodes"]] == texts
    assert {there[number]["parent"] for number in saved["loom"]["nodes"]} == {0}
    assert saved["loom"]["sampling"]["seed"] == 3


def test_turns_sent_with_their_loom_grow_one_tree(served: Served) -> None:
    """The next turn also continues a node that has ended, as one of these answers has."""
    chat = [{"role": "user", "content": weft.samples.sum}]
    sampling = {"n": 2, "temperature": 0.9, "max_tokens": 40, "seed": 12}
    first = post(served, CHATS, messages=chat, **sampling, loom={"save": True})
    assert "stop" in [choice["finish_reason"] for choice in first["choices"]]
    loom = first["loom"]["loom"]
    for choice in first["choices"]:
        turn = [*chat, choice["message"], {"role": "user", "content": "Hello, who are you?"}]
        reply = post(served, CHATS, messages=turn, max_tokens=8, loom={"loom": loom})
        there = nodes(served, loom)
        question = there[reply["loom"]["parent"]]
        assert question["said"] == "Hello, who are you?"
        if choice["finish_reason"] == "stop":
            assert question["parent"] in first["loom"]["nodes"]
            assert there[question["parent"]]["text"] == choice["message"]["content"]
    before = len(nodes(served, loom))
    post(served, CHATS, messages=turn, n=2, max_tokens=8, loom={"loom": loom})
    assert len(nodes(served, loom)) == before + 2  # the prompt was there


def by_characters(text: Tokenizer) -> dict[str, int]:
    """Return a bias that bans the pairs in "the", so that each of its characters is a token."""
    banned = {str(token): -100 for pair in ("he", "th") for token in text.continuation(pair)}
    assert len(banned) == 2
    return banned


def spelled(served: Served, **loom: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer whose text has other tokens, and the messages of the next turn."""
    text = weft.load("tiny").text
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["the"]}}}
    chat = [{"role": "user", "content": weft.samples.sum}]
    body = {"logit_bias": by_characters(text), "response_format": schema, "max_tokens": 20}
    reply = post(served, CHATS, messages=chat, return_token_ids=True, **body, loom=loom)
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"the"', "stop")
    assert choice["token_ids"][:-1] != text.continuation('"the"')
    return reply, [*chat, choice["message"], {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("is_named", [False, True], ids=["found", "named"])
def test_answer_sent_back_as_text_matches_generated_tokens(served: Served, is_named: bool) -> None:
    first, turns = spelled(served, save=True)
    (node,) = first["loom"]["nodes"]
    place = {"loom": first["loom"]["loom"]}
    if is_named:
        place["parent"] = str(node)
    before = len(nodes(served, place["loom"]))
    extras = {"prompt_logprobs": 0, "return_token_ids": True}
    reply = post(served, CHATS, messages=turns, max_tokens=4, loom=place, **extras)
    there = nodes(served, place["loom"])
    assert len(there) == before + 2  # the question, the answer
    assert there[reply["loom"]["parent"]]["parent"] == node
    # The prompt's fields are those of the tokens that the answer continues.
    url = f"/api/v1/looms/{place['loom']}/nodes/{reply['loom']['parent']}/path"
    path = served.client.get(url, params={"as": "tokens"}).json()["token_ids"]
    n_drawn = len(first["choices"][0]["token_ids"])
    n_prompt = first["usage"]["prompt_tokens"]
    assert path[n_prompt:][:n_drawn] == first["choices"][0]["token_ids"]
    assert reply["prompt_token_ids"] == path
    assert len(reply["prompt_logprobs"]) == len(path) == reply["usage"]["prompt_tokens"]


def test_text_matches_across_node_boundaries(served: Served) -> None:
    """An answer ends within a word, and the next prompt has the complete word."""
    begun = "Once upon a time ("
    text = weft.load("tiny").text
    banned = by_characters(text)
    force = {"logit_bias": banned | {str(text.continuation("t")[0]): 100}, "temperature": 0}
    first = post(served, COMPLETION, prompt=begun, max_tokens=1, loom={"save": True}, **force)
    (cut,) = first["loom"]["nodes"]
    place = {"loom": first["loom"]["loom"]}
    force["logit_bias"] = banned | {str(text.continuation("h")[0]): 100}
    named = {**place, "parent": str(cut)}
    second = post(served, COMPLETION, max_tokens=1, loom=named, **force)
    (node,) = second["loom"]["nodes"]
    word = first["choices"][0]["text"] + second["choices"][0]["text"]
    assert (word, len(text.continuation(word))) == ("th", 1)
    reply = post(served, COMPLETION, prompt=begun + word, max_tokens=2, loom=place)
    assert reply["loom"]["parent"] == node
    # Token ids match only equal tokens.
    ids = text.encode(begun + word)
    reply = post(served, COMPLETION, prompt=ids, max_tokens=2, loom=place)
    assert nodes(served, place["loom"])[reply["loom"]["parent"]]["parent"] == 0


@pytest.mark.parametrize("form", ["number", "number as a string", "id"])
def test_prompt_continues_a_given_node(served: Served, form: str) -> None:
    saved = post(served, COMPLETION, prompt=PROMPT, max_tokens=4, loom={"save": True})["loom"]
    (parent,) = saved["nodes"]
    given: int | str = parent
    if form != "number":
        given = str(parent) if form != "id" else nodes(served, saved["loom"])[parent]["id"]
    place = {"loom": saved["name"], "parent": given}
    more = post(served, COMPLETION, max_tokens=4, n=2, loom=place, echo=True)
    there = nodes(served, saved["loom"])
    assert more["loom"]["parent"] == parent
    for choice, number in zip(more["choices"], more["loom"]["nodes"], strict=True):
        assert there[number]["parent"] == parent
        assert choice["text"].endswith(there[number]["text"])
        assert PROMPT + there[parent]["text"] in choice["text"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "Something else", "loom": {"loom": "KEPT"}}, 400, "loom.loom"),
        ({"prompt": PROMPT, "loom": {"loom": "KEPT", "parent": "99"}}, 404, "loom.parent"),
        ({"prompt": PROMPT, "loom": {"loom": "no such loom"}}, 404, None),
        ({"prompt": PROMPT, "loom": {"loom": "KEPT", "parent": 99}}, 404, "loom.parent"),
        ({"prompt": PROMPT, "loom": {"loom": "KEPT", "parent": ""}}, 404, "loom.parent"),
        ({"prompt": PROMPT, "loom": {"loom": "KEPT", "parent": [1]}}, 400, "loom.parent"),
        ({"prompt": PROMPT, "loom": {"parent": 1}}, 400, "loom.parent"),
        ({"prompt": PROMPT, "loom": {"save": False, "loom": "KEPT"}}, 400, "loom.save"),
        ({"prompt": [PROMPT, PROMPT], "loom": {"save": True}}, 400, "loom"),
        ({"prompt": PROMPT, "loom": {"unknown": 1}}, 400, "loom.unknown"),
    ],
)
def test_unsupported_loom_options_are_rejected(
    served: Served, body: dict[str, Any], status: int, param: str | None
) -> None:
    kept = post(served, COMPLETION, prompt=PROMPT, max_tokens=1, loom={"save": True})["loom"]
    if body["loom"].get("loom") == "KEPT":
        body = {**body, "loom": {**body["loom"], "loom": kept["loom"]}}
    before = nodes(served, kept["loom"])
    answer = served.client.post(COMPLETION, json={**body, "max_tokens": 2})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert nodes(served, kept["loom"]) == before


def test_tokens_of_an_abandoned_stream_are_saved(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": weft.samples.story}],
        "ignore_eos": True,
        "max_tokens": 1500,
        "stream": True,
        "loom": {"save": True},
    }

    async def vanish() -> dict[str, Any]:
        loom: dict[str, Any] = {}
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=None) as client,
            client.stream("POST", CHATS, json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    loom = chunk.get("loom") or loom
                    if chunk["choices"][0]["delta"].get("content"):
                        return loom
        raise AssertionError("nothing came")

    loom = asyncio.run(vanish())
    (number,) = loom["nodes"]
    while (node := nodes(served, loom["loom"])[number])["finish_reason"] is None:
        time.sleep(0.05)
    assert node["finish_reason"] == "cancelled"
    assert 0 < node["n_tokens"] < 1500
    assert served.service.n_works == 0


def test_saved_logprobs_equal_those_of_the_call(served: Served) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "seed": 8, "logprobs": 2}
    plain = post(served, COMPLETION, **body)["choices"][0]["logprobs"]
    kept = post(served, COMPLETION, **body, loom={"save": True})["choices"][0]["logprobs"]
    assert kept["tokens"] == plain["tokens"]
    assert kept["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-5)


def test_stream_ends_if_its_parent_is_removed(served: Served) -> None:
    saved = post(served, COMPLETION, prompt=PROMPT, max_tokens=4, loom={"save": True})["loom"]
    place = {"loom": saved["loom"], "parent": str(saved["nodes"][0])}
    body = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "loom": place, "n": 2}
    path = f"/api/v1/looms/{saved['loom']}/nodes/{saved['nodes'][0]}"
    reasons, is_removed = [], False
    with served.client.stream("POST", COMPLETION, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk
                reasons.append(chunk["choices"][0]["finish_reason"])
                if not is_removed:
                    with httpx.Client(base_url=served.url, timeout=None) as other:
                        assert other.delete(path).status_code == 200
                    is_removed = True
    assert line == "" or line == "data: [DONE]"
    assert len([reason for reason in reasons if reason]) == 2
    assert set(nodes(served, saved["loom"])) == {0}
    assert served.service.n_works == 0
