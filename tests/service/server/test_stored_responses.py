"""Stored responses: nodes of a loom, forks from any id, and their state after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from serving import serving
from weft import samples
from weft.service.server import ServerConfig

openai = pytest.importorskip("openai", reason="openai is not installed")

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.responses import Response

    from serving import Served

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api_client:
        yield api_client


def ask(client: OpenAI, text: Any = samples.sum, **options: Any) -> Response:
    response: Response = client.responses.create(
        **{"model": "tiny", "input": text, "max_output_tokens": 6, "temperature": 0, **options}
    )
    return response


def nodes(served: Served, loom: str) -> dict[int, dict[str, Any]]:
    rows = served.client.get(f"/api/v1/looms/{loom}/nodes", params={"limit": 1000}).json()["data"]
    return {each["node"]: each for each in rows}


def place(response_id: str) -> tuple[str, int]:
    """Return the loom and the number of a response's node."""
    return response_id[5:21], int(response_id[21:], 16)


def test_stored_response_is_returned_as_it_was(client: OpenAI) -> None:
    response = ask(client, metadata={"a": "b"}, instructions="Be short.")
    assert response.model_extra["store"] is True
    stored = client.responses.retrieve(response.id)
    assert stored.to_dict() == response.to_dict()


def test_streamed_response_is_stored_with_its_logprobs(client: OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input=samples.sum, extra_body={"regex": "[a-f]{6}"},
        include=["message.output_text.logprobs"],
    ) as stream:  # fmt: skip
        response = stream.get_final_response()
    stored = client.responses.retrieve(response.id, include=["message.output_text.logprobs"])
    (part,) = stored.output[0].content
    assert part.text == response.output_text
    assert part.logprobs == response.output[0].content[0].logprobs
    assert part.logprobs


def test_responses_from_one_id_are_forks_that_reuse_its_prefix(
    client: OpenAI, served: Served
) -> None:
    first = ask(client, samples.greeting)
    forks = [
        ask(client, text, previous_response_id=first.id)
        for text in ("Why?", "Who are you?", "Why?")
    ]
    last = ask(client, "And then?", previous_response_id=forks[1].id)
    loom, number = place(first.id)
    assert {place(fork.id)[0] for fork in (*forks, last)} == {loom}
    there = nodes(served, loom)
    questions = [there[place(fork.id)[1]]["parent"] for fork in forks]
    assert [there[fork]["parent"] for fork in questions] == [number] * 3
    assert questions[0] == questions[2] != questions[1]
    assert there[there[place(last.id)[1]]["parent"]]["parent"] == place(forks[1].id)[1]
    assert [fork.previous_response_id for fork in forks] == [first.id] * 3
    # KV of the first response is reused, except for its last token.
    n_known = first.usage.total_tokens - 1
    for fork in forks[:2]:
        assert fork.usage.input_tokens_details.cached_tokens >= n_known
    assert forks[2].output_text == forks[0].output_text


def test_continued_response_equals_that_of_all_items(client: OpenAI) -> None:
    first = ask(client)
    second = ask(client, "Why?", previous_response_id=first.id)
    items = [
        {"role": "user", "content": samples.sum},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "Why?"},
    ]
    for store in (True, False):
        response = ask(client, items, store=store)
        assert response.output_text == second.output_text
        assert response.usage.input_tokens == second.usage.input_tokens


def test_unstored_response_continues_a_stored_one_and_gives_404(
    client: OpenAI, served: Served
) -> None:
    first = ask(client)
    before = served.client.get("/api/v1/looms").json()
    second = ask(client, "Why?", previous_response_id=first.id, store=False)
    assert second.output_text == ask(client, "Why?", previous_response_id=first.id).output_text
    assert second.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    ask(client, "Hello", store=False)
    assert len(served.client.get("/api/v1/looms").json()["data"]) == len(before["data"])


def test_input_items_of_the_chain_are_paged(client: OpenAI) -> None:
    first = ask(client)
    second = ask(client, [{"role": "user", "content": "Why?"}], previous_response_id=first.id)
    third = ask(client, "So?", previous_response_id=second.id)
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert [each.role for each in items] == ["user", "assistant", "user", "assistant", "user"]
    texts = [each.content[0].text for each in items]
    assert texts == [samples.sum, first.output_text, "Why?", second.output_text, "So?"]
    assert [items[1].id, items[3].id] == [first.output[0].id, second.output[0].id]
    assert len({each.id for each in items}) == 5
    page = client.responses.input_items.list(third.id, limit=2)
    assert [each.id for each in page.data] == [items[4].id, items[3].id]
    assert (page.has_more, page.first_id, page.last_id) == (True, items[4].id, items[3].id)
    assert list(client.responses.input_items.list(third.id, limit=1)) == items[::-1]


def test_other_instructions_start_another_loom_with_the_same_items(client: OpenAI) -> None:
    first = ask(client, instructions="Be short.")
    second = ask(client, "Why?", previous_response_id=first.id, instructions="Be long.")
    third = ask(client, "So?", previous_response_id=second.id, instructions="Be long.")
    assert place(first.id)[0] != place(second.id)[0] == place(third.id)[0]
    client.responses.delete(first.id)
    items = client.responses.input_items.list(third.id, order="asc")
    assert [each.content[0].text for each in items] == [
        samples.sum, first.output_text, "Why?", second.output_text, "So?"
    ]  # fmt: skip


def test_deleted_response_gives_404(client: OpenAI, served: Served) -> None:
    first = ask(client)
    second = ask(client, "Why?", previous_response_id=first.id)
    loom, number = place(first.id)
    answer = served.client.delete(f"{RESPONSES}/{first.id}")
    assert answer.json() == {"id": first.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(first.id)
        assert caught.value.body["code"] == "response_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, "So?", previous_response_id=first.id)
    assert bad.value.code == "previous_response_not_found"
    # The node of the deleted response stays, because the second response continues it.
    assert ask(client, "So?", previous_response_id=second.id).output_text
    third = ask(client, "And?", previous_response_id=second.id)
    n_before = len(nodes(served, loom))
    client.responses.delete(third.id)
    assert len(nodes(served, loom)) == n_before - 2  # its question, too


def test_deleting_the_last_response_removes_its_loom(client: OpenAI, served: Served) -> None:
    response = ask(client)
    client.responses.delete(response.id)
    assert served.client.get(f"/api/v1/looms/{place(response.id)[0]}").status_code == 404
    assert served.client.post("/api/v1/looms/restore").status_code == 200
    assert client.responses.retrieve(response.id).output_text == response.output_text


@pytest.mark.parametrize(
    "given", ["resp_1", "resp_" + "0" * 24, "x/../y", "msg_" + "0" * 32, "resp_" + "f" * 24]
)
def test_unknown_id_is_404(served: Served, given: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = served.client.request(method, f"{RESPONSES}/{given}{path}")
        assert answer.status_code == 404
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    body = {"input": "Hi", "previous_response_id": given}
    answer = served.client.post(RESPONSES, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"stream": "true"}, "stream"),
        ("", {"starting_after": "3"}, "starting_after"),
        ("", {"include[]": "file_search_call.results"}, "include"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "msg_1"}, "after"),
        ("/input_items", {"before": "msg_1"}, "before"),
    ],
)
def test_unsupported_query_is_rejected_by_name(
    client: OpenAI, served: Served, path: str, query: dict[str, str], param: str
) -> None:
    answer = served.client.get(f"{RESPONSES}/{ask(client).id}{path}", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_item_reference_gives_the_same_answer_as_the_item(client: OpenAI) -> None:
    first, why = ask(client), {"role": "user", "content": "Why?"}
    explicit = ask(client, [*(item.to_dict() for item in first.output), why])
    named = ask(client, [{"type": "item_reference", "id": first.output[0].id}, why])
    assert named.output_text == explicit.output_text
    with pytest.raises(openai.BadRequestError, match="no stored item"):
        ask(client, [{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 7, "temperature": 1.3, "top_k": 50, "min_p": 0.01},
        {"seed": 7, "temperature": 1.0, "repetition_penalty": 1.4, "penalty_last_n": 20},
        {"seed": 7, "temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": ["e"], "logit_bias": {"5": -100}, "ignore_eos": True},
    ],
)
def test_sampling_fields_give_the_text_of_a_chat(served: Served, options: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": samples.sum}], "max_tokens": 20, **options}
    (choice,) = served.client.post("/v1/chat/completions", json=chat).json()["choices"]
    body = {"input": samples.sum, "max_output_tokens": 20, **options}
    response = served.client.post(RESPONSES, json=body).json()
    assert response["output"][0]["content"][0]["text"] == choice["message"]["content"]
    is_cut = choice["finish_reason"] == "length"
    assert response["status"] == ("incomplete" if is_cut else "completed")


def test_abandoned_stream_is_cancelled(client: OpenAI, served: Served) -> None:
    with client.responses.create(
        model="tiny", input=samples.story, stream=True, extra_body={"regex": "(a|b){1500}"}
    ) as stream:
        events = iter(stream)
        created = next(events).response
        next(event for event in events if event.type == "response.output_text.delta")
        assert client.responses.retrieve(created.id).status == "in_progress"
    while served.service.n_works or served.service.n_tasks:
        pass
    assert client.responses.retrieve(created.id).status == "cancelled"


def test_responses_are_there_after_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(port=0, models=("tiny",), db=f"sqlite:///{tmp_path / 'looms.db'}")
    ids = []
    for _ in range(2):
        with (
            serving(config) as served,
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
        ):
            previous = ids[-1] if ids else None
            if previous is not None:
                assert client.responses.retrieve(previous).output_text
            ids.append(ask(client, "Why?", previous_response_id=previous).id)
    assert place(ids[0])[0] == place(ids[1])[0]
