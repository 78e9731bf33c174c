"""The native API, as a client uses it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import weft
from serving import Event, Served, events, serving
from weft.service.server import ServerConfig

Json = dict[str, Any]


class Desk:
    """A loom on a server, and requests about it."""

    def __init__(self, served: Served, prompt: str = "Once upon a time", **more: Any) -> None:
        self.client = served.client
        answer = self.client.post("/api/v1/looms", json={"prompt": prompt, **more})
        assert answer.status_code == 201, answer.text
        self.loom: Json = answer.json()
        self.base = f"/api/v1/looms/{self.loom['id']}"

    def endless(self, served: Served) -> Json:
        """Sampling that no end token ends."""
        ends = served.service.models.lm().text.stop_ids
        return {"max_tokens": 1500, "logit_bias": {str(token): -1e6 for token in ends}}

    def post(self, path: str, status: int = 200, headers: Json | None = None, **body: Any) -> Json:
        answer = self.client.post(f"{self.base}{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str = "", status: int = 200, **query: Any) -> Json:
        answer = self.client.get(f"{self.base}{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def grow(self, node: int | str = 0, **body: Any) -> list[Json]:
        """Grow branches of six tokens; with this seed no branch ends earlier."""
        few = {"max_tokens": 6, "seed": 1, **body}
        reply = self.post(f"/nodes/{node}/generate", wait=True, **few)
        assert reply["status"] == "ok"
        return reply["nodes"]

    def nodes(self, **query: Any) -> list[Json]:
        return self.get("/nodes", **query)["data"]

    def until(self, is_so: Callable[[], Any]) -> None:
        while not is_so():
            time.sleep(0.02)

    def until_ended(self, job: str) -> Json:
        """Wait for the end of a job and return the job."""
        self.until(lambda: self.job(job)["status"] != "running")
        return self.job(job)

    def job(self, job: str) -> Json:
        return self.client.get(f"/api/v1/jobs/{job}").json()

    def until_all_grow(self, job: Json) -> None:
        """Wait until each branch of a job has tokens."""
        numbers = [branch["node"] for branch in job["branches"]]
        self.until(lambda: all(self.get(f"/nodes/{each}")["n_tokens"] for each in numbers))


@pytest.fixture
def desk(served: Served) -> Desk:
    return Desk(served)


def test_grown_nodes_are_listed_and_reproducible_by_seed(desk: Desk) -> None:
    reply = desk.post("/nodes/0/generate", n=3, max_tokens=8, wait=True, seed=1)
    assert reply["status"] == "ok"
    assert reply["usage"] == {"prompt_tokens": 8, "completion_tokens": 24, "cached_tokens": 0}
    page = desk.nodes()
    assert [node["node"] for node in page] == [0, 1, 2, 3]
    assert page[0]["children"] == [1, 2, 3]
    assert page[0]["n_below"] == 3
    repeat = desk.post("/nodes/0/generate", n=3, max_tokens=8, wait=True, seed=reply["seed"])
    assert [node["text"] for node in repeat["nodes"]] == [node["text"] for node in reply["nodes"]]


def test_dry_xtc_and_top_n_sigma_draw_as_in_the_library(served: Served) -> None:
    options: dict[str, Any] = {
        "dry_multiplier": 3.0,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": ["."],
        "top_n_sigma": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
    }
    desk = Desk(served, "Once upon a time")
    created = desk.grow(n=2, max_tokens=9, seed=3, **options)
    with weft.Loom(served.service.models.lm(), "Once upon a time") as loom:
        nodes = loom.grow(n=2, max_tokens=9, seed=3, **options)
    assert [node["text"] for node in created] == [node.text for node in nodes]
    params = desk.get(f"/nodes/{created[0]['node']}", fields="params")["params"]
    assert {name: params[name] for name in options} == options


def test_growing_an_ended_node_hints_at_force(served: Served) -> None:
    desk = Desk(served, "What is 37 + 58?")
    with weft.load("tiny") as lm:
        at_once = {str(token): 100 for token in lm.text.stop_ids}
    (node,) = desk.post("/generate", logit_bias=at_once, wait=True)["nodes"]
    assert node["finish_reason"] == "stop"
    path = f"/nodes/{node['node']}/generate"
    error = desk.post(path, 409)["error"]
    assert (error["code"], error["hint"]) == ("node_ended", '"force": true')
    for body in ({}, {"nodes": [node["node"]] * 2}):  # all leaves, and nodes by name
        error = desk.post("/generate", 409, **body)["error"]
        assert (error["code"], error["hint"]) == ("node_ended", '"force": true')
    assert desk.post(path, wait=True, max_tokens=2, **json.loads(f"{{{error['hint']}}}"))["nodes"]


def test_min_tokens_continues_an_ended_node(served: Served) -> None:
    ends = {str(token): 100 for token in served.service.models.lm().text.stop_ids}
    desk = Desk(served)
    (node,) = desk.grow(choices=[" yes"])
    past = {"force": True, "logit_bias": ends}
    (empty,) = desk.grow(node["node"], **past)
    assert (node["ended"], empty["n_tokens"]) == (True, 0)
    (more,) = desk.grow(node["node"], **past, min_tokens=2)
    assert (more["n_tokens"], more["ended"]) == (2, True)
    for body in ({"min_tokens": 9, "max_tokens": 8}, {"min_tokens": 1, "regex": "a+"}):
        error = desk.post("/nodes/0/generate", 400, **body)["error"]
        assert "min_tokens" in error["message"]


def test_limits_on_tokens_apply_with_and_without_a_constraint(served: Served) -> None:
    desk = Desk(served, "Once upon a time")

    def grow(**body: Any) -> Json:
        (node,) = desk.grow(temperature=0, **body)
        return {**node, **desk.get(f"/nodes/{node['node']}", fields="tokens")}

    plain = grow()
    first, second = plain["token_ids"][:2]
    stopped = grow(stop_token_ids=[second])
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([first], "stop")
    assert grow(allowed_token_ids=[first])["token_ids"] == [first] * 6
    word = plain["text"].split()[0]
    assert word not in grow(bad_words=[word])["text"]
    assert grow(choices=[" owl", " fox"], bad_words=["owl"])["text"] == " fox"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stop_token_ids": [10**6]}, "1000000"),
        ({"allowed_token_ids": [10**6]}, "1000000"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
    ],
)
def test_wrong_limits_on_tokens_are_rejected(
    served: Served, body: dict[str, Any], name: str
) -> None:
    error = Desk(served).post("/nodes/0/generate", 400, wait=True, **body)["error"]
    assert name in error["message"]


def test_failed_branch_is_kept_with_its_tokens_and_its_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.engines.numpy import NumpyEngine

    forward, calls = NumpyEngine.forward, []

    def fails(self: Any, rows: Any) -> Any:
        calls.append(rows)
        if len(calls) > 4:
            raise RuntimeError("out of order")
        return forward(self, rows)

    desk = Desk(served)
    monkeypatch.setattr(NumpyEngine, "forward", fails)
    desk.post("/nodes/0/generate", 500, n=2, wait=True, **desk.endless(served))
    monkeypatch.undo()
    nodes = desk.nodes()[1:]
    assert len(nodes) == 2
    for node in nodes:
        assert node["n_tokens"] >= 3
        assert node["finish_reason"] == "error"
        assert "out of order" in node["error"]
    assert desk.grow(nodes[0]["node"])


def test_second_level_reuses_the_prefix(served: Served) -> None:
    """Growing 4 x 4 x 4 reads the prompt once."""
    desk = Desk(served, "Use 4 9 10 13 to make 24. " * 8)
    before = served.client.get("/api/v1/kv").json()["data"][0]["prefilled"]
    prompt = desk.nodes()[0]["n_tokens"]
    for _ in range(3):
        desk.post("/generate", n=4, max_tokens=4, wait=True, force=True)
    after = served.client.get("/api/v1/kv").json()["data"][0]["prefilled"]
    # Of a leaf the last token, which was drawn, was not run yet.
    assert prompt - 1 <= after - before <= prompt + 4 + 16
    assert len(desk.nodes(limit=1000)) == 1 + 4 + 16 + 64


def test_stream_has_every_token_once(desk: Desk) -> None:
    body = {"n": 3, "max_tokens": 30, "stream": True, "temperature": 1.5, "seed": 1}
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Json] = {}
    with desk.client.stream("POST", f"{desk.base}/nodes/0/generate", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        came = list(events(answer.iter_lines()))
    assert [number for number, _, _ in came] == list(range(1, len(came) + 1))
    assert (came[0][1], came[-1][1]) == ("job", "done")
    for _, name, data in came:
        if name == "tok":
            for branch, token, text, logprob, entropy in data["t"]:
                texts[branch] = texts.get(branch, "") + text
                if token is not None:
                    tokens.setdefault(branch, []).append(token)
                    assert logprob <= 0
                    assert entropy >= 0
        elif name == "branch":
            ends[data["branch"]] = data
    for branch in came[0][2]["branches"]:
        node = desk.get(f"/nodes/{branch['node']}", fields="tokens")
        assert node["id"] == branch["id"]
        assert texts[branch["branch"]] == node["text"]
        assert tokens[branch["branch"]] == node["token_ids"]
        assert ends[branch["branch"]]["finish_reason"] == node["finish_reason"]


def test_stream_resumes_after_the_last_event(desk: Desk) -> None:
    job = desk.post("/nodes/0/generate", 202, n=2, max_tokens=200)["job"]
    received: list[Event] = []
    path = f"/api/v1/jobs/{job}/events"
    while not received or received[-1][1] != "done":
        headers = {"Last-Event-ID": str(received[-1][0])} if received else {}
        with desk.client.stream("GET", path, headers=headers) as answer:
            for index, event in enumerate(events(answer.iter_lines())):
                received.append(event)
                if index == 1:
                    break
    assert [number for number, _, _ in received] == list(range(1, len(received) + 1))
    n_tokens = sum(len(data["t"]) for _, name, data in received if name == "tok")
    assert n_tokens >= sum(len(node["text"] and "x") for node in desk.nodes()[1:])
    assert sum(data["n_tokens"] for _, name, data in received if name == "branch") == sum(
        1
        for _, name, data in received
        if name == "tok"
        for entry in data["t"]
        if entry[1] is not None
    )


def test_late_reader_gets_a_snapshot(desk: Desk) -> None:
    job = desk.post("/nodes/0/generate", 202, n=2, max_tokens=5, wait=False)["job"]
    path = f"/api/v1/jobs/{job}/events"
    with desk.client.stream("GET", path, params={"after": 10**9}) as answer:
        first = next(events(answer.iter_lines()))
    assert first[1] == "snapshot"
    assert len(first[2]["branches"]) == 2


def test_branches_are_cancelled_one_by_one(served: Served, desk: Desk) -> None:
    reply = desk.post("/nodes/0/generate", 202, n=3, **desk.endless(served))
    client = desk.client
    path = f"/api/v1/jobs/{reply['job']}"
    desk.until_all_grow(reply)
    assert client.post(f"{path}/cancel", json={"branches": [1]}).status_code == 200
    desk.until(lambda: desk.job(reply["job"])["branches"][1]["finish_reason"])
    assert desk.job(reply["job"])["branches"][1]["finish_reason"] == "cancelled"
    client.post(f"{path}/cancel")
    job = desk.until_ended(reply["job"])
    assert job["status"] == "cancelled"
    assert all(branch["finish_reason"] for branch in job["branches"])
    assert all(node["n_tokens"] for node in desk.nodes()[1:])


def test_growing_nodes_are_read_while_they_grow(served: Served, desk: Desk) -> None:
    reply = desk.post("/nodes/0/generate", 202, n=2, **desk.endless(served))
    number = reply["branches"][0]["node"]
    desk.until_all_grow(reply)
    node = desk.get(f"/nodes/{number}")
    assert node["growing"]
    assert desk.nodes()[0]["children"] == [branch["node"] for branch in reply["branches"]]
    assert desk.post(f"/nodes/{number}/generate", 409)["error"]["code"] == "revision_mismatch"
    assert desk.post(f"/nodes/{number}/next", 409)["error"]
    # Reading, and writing elsewhere, is free.
    desk.post("/nodes", 201, parent=0, text=" there was")
    desk.client.post(f"/api/v1/jobs/{reply['job']}/cancel")


def test_removing_a_growing_node_discards_its_tokens(served: Served, desk: Desk) -> None:
    (top,) = desk.grow(n=1)
    path = f"/nodes/{top['node']}/generate"
    reply = desk.post(path, 202, n=2, force=True, **desk.endless(served))
    desk.until_all_grow(reply)
    answer = desk.client.delete(f"{desk.base}/nodes/{top['node']}")
    assert answer.status_code == 200
    desk.until_ended(reply["job"])
    assert [node["node"] for node in desk.nodes()] == [0]
    desk.post("/undo")
    assert [node["node"] for node in desk.nodes()] == [0, top["node"]]


def test_a_job_outlives_its_client(desk: Desk) -> None:
    body = {"n": 1, "max_tokens": 60, "stream": True, "temperature": 2.0}
    with desk.client.stream("POST", f"{desk.base}/nodes/0/generate", json=body) as answer:
        _, _, job = next(events(answer.iter_lines()))
    desk.until_ended(job["job"])
    (node,) = desk.nodes()[1:]
    assert node["finish_reason"] in ("length", "stop")


def test_on_disconnect_cancel_ends_the_job(served: Served, desk: Desk) -> None:
    body = {"stream": True, "on_disconnect": "cancel", **desk.endless(served)}
    with desk.client.stream("POST", f"{desk.base}/nodes/0/generate", json=body) as answer:
        _, _, job = next(events(answer.iter_lines()))
    assert desk.until_ended(job["job"])["status"] == "cancelled"


def test_undo_reverts_each_edit(desk: Desk) -> None:
    (node,) = desk.grow(n=1, max_tokens=12, seed=3)
    number, text = node["node"], node["text"]
    split = desk.post(f"/nodes/{number}/split", at_token=5)
    lower = split["added"][0]["node"]
    assert "".join(each["text"] for each in desk.nodes()[1:]) == text
    merged = desk.post(f"/nodes/{lower}/merge")
    assert merged["removed"] == [lower]
    assert desk.get(f"/nodes/{number}", fields="tokens")["token_ids"] == node["token_ids"]
    assert len(desk.get(f"/nodes/{number}", fields="tokens")["logprobs"]) == 12
    forked = desk.post(f"/nodes/{number}/fork", 201, at_token=4, text=" cat")["added"][0]
    assert forked["parent"] == 0
    moved = desk.post(f"/nodes/{forked['node']}/move", parent=number)
    assert moved["changed"][0]["parent"] == number
    clipped = desk.post(f"/nodes/{number}/clip", keep=3)
    assert clipped["added"][0]["children"] == [forked["node"]]
    copied = desk.post(f"/nodes/{number}/copy", 201, parent=0)
    assert len(copied["added"]) == 3
    kinds = [each["kind"] for each in desk.get("/history")["data"]]
    assert kinds == ["copy", "clip", "move", "fork", "merge", "split", "grow", "create"]
    for _ in range(6):
        desk.post("/undo")
    assert [each["text"] for each in desk.nodes()[1:]] == [text]
    desk.post("/redo")
    assert len(desk.nodes()) == 3


def test_edit_adds_a_sibling_unless_in_place(desk: Desk) -> None:
    (node,) = desk.grow(n=1)
    path = f"{desk.base}/nodes/{node['node']}"
    reply = desk.client.patch(path, json={"text": " there was a fox"}).json()
    assert reply["added"][0]["parent"] == 0
    changed = desk.client.patch(path, json={"text": " no fox", "in_place": True}).json()
    assert changed["changed"][0]["text"] == " no fox"
    marked = desk.client.patch(path, json={"bookmark": "good"}).json()
    assert marked["changed"][0]["bookmark"] == "good"
    assert desk.get()["bookmarks"] == {str(node["node"]): "good"}
    hits = desk.get("/search", q="FOX", filter="bookmarked")["data"]
    assert [(hit["node"], hit["spans"]) for hit in hits] == [(node["node"], [[4, 7]])]


def test_second_edit_of_a_node_with_an_old_rev_conflicts(desk: Desk) -> None:
    one, other = desk.grow(n=2)
    etag = desk.client.get(f"{desk.base}/nodes/{one['node']}").headers["etag"]
    path = f"{desk.base}/nodes/{one['node']}"
    headers = {"If-Match": etag}
    assert desk.client.patch(path, json={"score": 1}, headers=headers).status_code == 200
    late = desk.client.patch(path, json={"score": 2}, headers=headers)
    assert late.status_code == 409
    assert late.json()["error"]["code"] == "revision_mismatch"
    assert late.json()["error"]["details"]["rev"] > int(etag.strip('"'))
    # Another node was not changed meanwhile.
    path = f"{desk.base}/nodes/{other['node']}"
    assert desk.client.patch(path, json={"score": 3}, headers=headers).status_code == 200


def test_since_returns_only_changed_nodes(desk: Desk) -> None:
    one, other = desk.grow(n=2)
    rev = desk.get("/nodes")["rev"]
    desk.client.patch(f"{desk.base}/nodes/{one['node']}", json={"score": 1})
    desk.client.delete(f"{desk.base}/nodes/{other['node']}")
    page = desk.get("/nodes", since=rev)
    assert [node["node"] for node in page["data"]] == [one["node"]]
    assert (page["removed"], page["whole"]) == ([other["node"]], False)
    assert desk.get("/nodes", since=0)["whole"]


def test_pages_are_the_tree_in_order(desk: Desk) -> None:
    desk.grow(n=3)
    desk.post("/generate", n=2, max_tokens=3, wait=True, force=True)
    numbers = [node["node"] for node in desk.nodes()]
    paged: list[int] = []
    after = None
    while True:
        page = desk.get("/nodes", limit=2, **({"after": after} if after else {}))
        paged += [node["node"] for node in page["data"]]
        if (after := page["next"]) is None:
            break
    assert paged == numbers
    tree = desk.get("/tree")["tree"]
    assert [node["node"] for node in tree["nodes"]] == tree["children"]


def test_next_returns_candidates_and_the_rest(desk: Desk) -> None:
    reply = desk.post("/nodes/0/next", top=5, candidates=[0], temperature=0.5, top_k=2)
    assert [each["rank"] for each in reply["next"]] == [0, 1, 2, 3, 4]
    assert sum(each["p"] for each in reply["next"]) + reply["rest"] == pytest.approx(1)
    assert sum(each["p_sampled"] for each in reply["next"]) == pytest.approx(1)
    assert reply["candidates"][0]["id"] == 0
    assert reply["entropy"] > 0


def test_next_with_temperature_first_filters_the_flatter_distribution(desk: Desk) -> None:
    options = {"top": 50, "temperature": 5.0, "min_p": 0.3}
    kept = [
        sum(
            each["p_sampled"] > 0 for each in desk.post("/nodes/0/next", **options, **order)["next"]
        )
        for order in ({}, {"temperature_first": True})
    ]
    assert kept[0] < kept[1]


def test_score_of_a_nodes_own_text_equals_its_logprobs(desk: Desk) -> None:
    (node,) = desk.grow(n=1, seed=5)
    own = desk.get(f"/nodes/{node['node']}", fields="tokens")
    reply = desk.post(f"/nodes/{node['node']}/score")
    assert reply["logprobs"] == pytest.approx(own["logprobs"], abs=1e-3)
    rows = desk.get(f"/nodes/{node['node']}/tokens", top=3)
    assert [row["logprob"] for row in rows["data"]] == pytest.approx(own["logprobs"], abs=1e-3)
    assert [row["entropy"] for row in rows["data"]] == pytest.approx(own["entropies"], abs=1e-3)
    assert all(len(row["top"]) == 3 for row in rows["data"])


def test_tokens_of_a_constrained_node_have_their_legal_logmass(desk: Desk) -> None:
    (node,) = desk.grow(n=1, seed=5, max_tokens=6, regex="[a-z ]{30}")
    own = desk.get(f"/nodes/{node['node']}", fields="tokens")
    assert len(own["legal_logmass"]) == len(own["token_ids"])
    pairs = zip(own["logprobs"], own["legal_logmass"], strict=True)
    assert all(logprob <= legal + 1e-4 <= 1e-3 for logprob, legal in pairs)
    (free,) = desk.grow(n=1, seed=5)
    assert desk.get(f"/nodes/{free['node']}", fields="tokens")["legal_logmass"] == []


def test_slow_pattern_is_rejected(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.service.server.routes.looms._PATTERN_S", 0.02)
    desk.post("/nodes", status=201, text="a" * 60 + "!")
    reply = desk.get("/search", status=400, q="(a|aa)+$", regex=True)
    assert reply["error"]["code"] == "pattern_too_slow"
    assert [hit["spans"] for hit in desk.get("/search", q="A{3}!", regex=True)["data"]] == [
        [[57, 61]]
    ]
    assert desk.get("/search", q="(a+)+$")["data"] == []  # as words


def test_a_path_is_read_as_text_tokens_and_messages(desk: Desk) -> None:
    (node,) = desk.grow(n=1)
    below = desk.get(f"/nodes/{node['node']}/path", below_root=True)
    assert below["text"] == node["text"]
    ids = desk.get(f"/nodes/{node['node']}/path", **{"as": "tokens"})["token_ids"]
    assert len(ids) == 8 + 6
    messages = desk.get(f"/nodes/{node['node']}/path", **{"as": "messages"})["messages"]
    assert messages[0] == {"role": "user", "content": "Once upon a time"}


def test_kv_is_warmed_and_evicted_by_request(served: Served) -> None:
    desk = Desk(served, "What only this test asks")
    (node,) = desk.grow(n=1)
    path = f"/nodes/{node['node']}/kv"
    assert desk.post(path, op="warm")["kv"]["state"] == "hot"
    assert desk.post(path, op="evict")["kv"]["state"] == "partly"
    assert desk.get("/kv")["hot"] == 1


def test_event_id_of_another_log_gets_a_snapshot(served: Served) -> None:
    """A page that was suspended during a restart of the server has ids of the old log."""
    desk = Desk(served, "A loom without readers")
    desk.post("/nodes", 201, text=" a", parent=0)
    url = f"{desk.base}/events"
    with served.client.stream("GET", url, params={"tokens": True, "after": 1}) as feed:
        assert "event: snapshot" in [next(lines := feed.iter_lines()), next(lines)]


def test_forget_kv_keeps_the_given_path(served: Served) -> None:
    desk = Desk(served, "What another test asks alone")
    first, second = desk.grow(n=2)
    before = served.client.get("/api/v1/kv", params={"looms": True}).json()
    (mine,) = (each for each in before["looms"] if each["name"] == desk.get("")["name"])
    assert (mine["hot"], mine["model"]) == (3, "tiny")
    assert mine["bytes"] > 0
    reply = desk.post("/kv", keep=first["node"])
    assert (reply["hot"], reply["cold"]) == (2, 1)
    assert 0 < reply["bytes"] < mine["bytes"]
    assert desk.get(f"/nodes/{second['node']}")["text"] == second["text"]
    assert desk.post("/kv")["hot"] == 0  # others may share the first tokens


def test_body_without_json_content_type_is_reported(served: Served) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = served.client.post("/api/v1/looms", content=b'{"prompt": "Hi"}', headers=form)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_search_is_a_job_with_rounds(served: Served) -> None:
    desk = Desk(served, "Use 1 2 3 4 to make 24.")
    reply = desk.post("/runs", strategy="tot", breadth=2, n=4, wait=True, seed=1)
    assert reply["status"] == "ok"
    assert reply["result"]["strategy"] == "tot"
    assert reply["result"]["answer"]
    assert reply["usage"]["completion_tokens"] == reply["result"]["cost"]["tokens"] > 100
    with desk.client.stream("GET", f"/api/v1/jobs/{reply['job']}/events") as answer:
        names = [name for _, name, _ in events(answer.iter_lines())]
    assert "score" in names
    assert len(desk.nodes(limit=1000)) > 3
    kinds = {each["kind"] for each in desk.get("/history")["data"]}
    assert kinds == {"create", "run"}
    desk.post("/undo")  # one for all of its rounds
    assert len(desk.nodes(limit=1000)) == 1
    desk.post("/redo")
    assert len(desk.nodes(limit=1000)) > 3
    # Tokens that the search generated outside its branches are counted, too.
    assert reply["usage"]["completion_tokens"] == reply["result"]["cost"]["tokens"]


def test_looms_are_listed_renamed_removed_and_restored(served: Served) -> None:
    desk = Desk(served, name="a b c")
    listed = served.client.get("/api/v1/looms", params={"search": "A B"}).json()["data"]
    assert [loom["name"] for loom in listed] == ["a b c"]
    renamed = served.client.patch(desk.base, json={"name": "other", "meta": {"x": 1}}).json()
    assert (renamed["name"], renamed["meta"]["x"]) == ("other", 1)
    assert served.client.get("/api/v1/looms/other").status_code == 200
    assert served.client.delete("/api/v1/looms/other").status_code == 200
    assert served.client.get(desk.base).json()["error"]["code"] == "loom_not_found"
    back = served.client.post("/api/v1/looms/restore").json()["data"]
    assert [loom["id"] for loom in back] == [desk.loom["id"]]
    taken = served.client.post("/api/v1/looms", json={"prompt": "x", "name": "other"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")


def test_loom_metadata_includes_own_writes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata from the database is cached for longer than a short growth takes."""
    monkeypatch.setattr("weft.service.server.loom_manager.FRESH_S", 600.0)
    assert desk.get()["n_nodes"] == 1
    began = desk.loom["changed"]
    desk.grow(n=2)
    reply = desk.get()
    assert (reply["n_nodes"], reply["changed"] > began) == (3, True)
    desk.post("/nodes/1/fork", 201, text=" cat", at_token=2)
    edited = desk.client.patch(desk.base, json={"meta": {"x": 1}}).json()
    assert (edited["n_nodes"], edited["changed"] > reply["changed"]) == (4, True)
    desk.post("/undo")
    desk.post("/undo")
    assert desk.client.delete(desk.base).json()["n_nodes"] == 3


def test_changes_are_sent_to_readers(served: Served, desk: Desk) -> None:
    came: list[Event] = []
    begun = threading.Event()

    def listen() -> None:
        with desk.client.stream("GET", f"{desk.base}/events") as answer:
            begun.set()
            for event in events(answer.iter_lines()):
                came.append(event)
                if len(came) == 2:
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    assert begun.wait()
    (node,) = desk.grow(n=1)
    desk.client.delete(f"{desk.base}/nodes/{node['node']}")
    thread.join()
    assert [name for _, name, _ in came] == ["change", "change"]
    assert [each["node"] for each in came[0][2]["added"]] == [node["node"]]
    assert came[1][2]["removed"] == [node["node"]]


def read_feed(
    desk: Desk, until: str, begun: threading.Event | None = None, **query: Any
) -> list[Event]:
    """The events of everything in the loom, to the first of a name. begun: set with the first."""
    came = []
    query = {"tokens": True, **query}
    with desk.client.stream("GET", f"{desk.base}/events", params=query) as answer:
        for event in events(answer.iter_lines()):
            came.append(event)
            if begun is not None:
                begun.set()
            if event[1] == until:
                break
    return came


def test_feed_has_changes_and_job_events(desk: Desk) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_feed, desk, "change", begun)
        assert begun.wait()
        first = desk.post("/nodes/0/generate", status=202, n=2, max_tokens=8, seed=1)
        came = reading.result()
    numbers = [number for number, _, _ in came]
    assert numbers == list(range(numbers[0] or 0, (numbers[0] or 0) + len(came)))
    names = [name for _, name, _ in came]
    assert names[:2] == ["snapshot", "job"]
    assert came[0][2]["jobs"] == []
    jobs = {data["job"] for _, name, data in came if name in ("job", "tok", "branch")}
    assert jobs == {first["job"]}
    texts: dict[int, str] = {}
    for _, name, data in came:
        for branch, _, text, *_ in data["t"] if name == "tok" else ():
            texts[branch] = texts.get(branch, "") + text
    change = came[-1][2]
    nodes = change["added"]
    assert [texts[at] for at in range(2)] == [node["text"] for node in nodes]
    assert change["children"] == {"0": [node["node"] for node in nodes]}


def test_new_feed_reader_gets_a_snapshot_of_the_growth(served: Served, desk: Desk) -> None:
    job = desk.post("/nodes/0/generate", status=202, n=1, **desk.endless(served))["job"]
    (first,) = read_feed(desk, "snapshot")
    (growing,) = first[2]["jobs"]
    assert (growing["id"], growing["texts"][0]["node"]) == (job, 1)
    came = read_feed(desk, "tok", after=first[0])
    assert "snapshot" not in [name for _, name, _ in came] or came[0][2]["jobs"]
    desk.client.post(f"/api/v1/jobs/{job}/cancel")


def test_resuming_feed_reader_gets_a_snapshot(desk: Desk) -> None:
    (first,) = read_feed(desk, "snapshot")
    desk.grow(n=1)  # while there is no reader
    second = read_feed(desk, "snapshot", after=first[0])
    assert second[0][2]["rev"] > first[2]["rev"]


def test_rename_is_published(desk: Desk) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(read_feed, desk, "renamed", begun)
        assert begun.wait()
        desk.client.patch(desk.base, json={"name": f"new-{desk.loom['id']}"})
        assert came.result()[-1][2]["name"] == f"new-{desk.loom['id']}"


def test_since_includes_reordered_parents(desk: Desk) -> None:
    first, second = desk.grow(n=2)
    rev = desk.client.get(f"{desk.base}/nodes").json()["rev"]
    desk.client.delete(f"{desk.base}/nodes/{first['node']}")
    desk.post("/undo")
    reply = desk.client.get(f"{desk.base}/nodes", params={"since": rev}).json()["data"]
    parents = {node["node"]: node["children"] for node in reply}
    assert parents[0] == [first["node"], second["node"]]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/v1/looms/nowhere", "loom_not_found"),
        ("/api/v1/looms/nowhere/nodes/0", "loom_not_found"),
        ("/api/v1/looms/..%2f..%2fetc", "no_such_route"),
        ("/api/v1/jobs/jb_0", "job_not_found"),
        ("/api/v1/models/no/such/model", "model_not_found"),
        ("/api/v1/nowhere", "no_such_route"),
    ],
)
def test_missing_object_has_the_code_of_its_kind(served: Served, path: str, code: str) -> None:
    answer = served.client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)


@pytest.mark.parametrize("node", ["99", "abc", "-1", "0x", "1" * 60, "%00", "..%2f0"])
def test_unknown_node_is_reported_as_missing(desk: Desk, node: str) -> None:
    answer = desk.client.get(f"{desk.base}/nodes/{node}")
    assert answer.json()["error"]["code"] in ("node_not_found", "no_such_route")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": "many"}, "n"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"regex": "a", "lark": "b"}, None),
        ({"stream": True, "wait": True}, None),
    ],
)
def test_wrong_parameter_is_rejected_by_name(desk: Desk, body: Json, param: str | None) -> None:
    answer = desk.client.post(f"{desk.base}/nodes/0/generate", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param is not None:
        assert error["param"].startswith(param)
        assert param in error["message"]


@pytest.mark.parametrize("value", [True, "2", 2.5, None])
def test_non_numbers_are_rejected_as_numbers(desk: Desk, value: object) -> None:
    wrong: list[Json] = [{"n": value}] if value is None else [{"n": value}, {"max_tokens": value}]
    if isinstance(value, bool | str):
        wrong += [{"temperature": value}, {"logit_bias": {"5": value}}]
    for body in wrong:
        error = desk.post("/nodes/0/generate", status=400, **body)["error"]
        assert error["param"].startswith(next(iter(body)))
    error = desk.post("/nodes", status=400, token_ids=[value])["error"]
    assert error["param"].startswith("token_ids")


def test_integer_is_a_float_but_not_a_boolean(desk: Desk) -> None:
    desk.grow(n=1, temperature=1, top_p=1, logit_bias={"5": 1})
    desk.grow(n=1.0, max_tokens=2.0)  # what JSON's schema calls an integer
    desk.grow(n=1, logit_bias={"5": "-inf", "6": "inf"})  # as nodes list them
    for value in ("true", 1):
        assert desk.post("/nodes/0/generate", status=400, wait=value)["error"]["param"] == "wait"


def test_constraint_is_spelled_without_tokens_that_logit_bias_bans(
    desk: Desk, served: Served
) -> None:
    spelled = served.service.models.lm().text.vocab_bytes

    def tokens(**more: Any) -> list[int]:
        (node,) = desk.grow(regex=" hello there world", max_tokens=40, **more)
        token_ids: list[int] = desk.get(f"/nodes/{node['node']}", fields="tokens")["token_ids"]
        assert b"".join(spelled[token] for token in token_ids) == b" hello there world"
        return token_ids

    banned = {token for token in tokens() if len(spelled[token]) > 1}
    assert banned
    assert banned.isdisjoint(tokens(logit_bias={str(token): "-inf" for token in banned}))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/nodes/{node}/fork", {"at_token": 50}, "at_token"),
        ("/nodes/{node}/fork", {"at_token": 0}, "at_token"),
        ("/nodes/{node}/split", {"at_token": 50}, "at_token"),
        ("/nodes/{node}/split", {"at_token": 0}, "at_token"),
        ("/nodes/{node}/clip", {"keep": 50}, "keep"),
        ("/nodes/{node}/clip", {"drop": 50}, "drop"),
        ("/runs", {"strategy": "guess"}, "strategy"),
    ],
)
def test_library_error_names_its_parameter(desk: Desk, path: str, body: Json, param: str) -> None:
    (node,) = desk.grow(n=1)
    error = desk.post(path.format(node=node["node"]), status=400, **body)["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", param)
    assert "None" not in error["message"]
    assert desk.get("/export", status=400, format="x")["error"]["param"] == "format"


def test_http_hints_name_http_requests(desk: Desk) -> None:
    hint = desk.get("/nodes/99", status=404)["error"]["hint"]
    assert hint == f"GET {desk.base}/nodes lists them"
    hint = desk.client.get("/api/v1/looms/no-such").json()["error"]["hint"]
    assert hint == "GET /api/v1/looms lists them all"
    hint = desk.get("/export", status=400, format="pairs")["error"]["hint"]
    assert "=" not in hint
    assert "score, bookmark" in hint


def test_fork_at_the_end_of_a_node_without_text_is_rejected(desk: Desk) -> None:
    (node,) = desk.grow(n=1)
    path, n = f"/nodes/{node['node']}/fork", node["n_tokens"]
    error = desk.post(path, status=400, at_token=n)["error"]
    assert (error["param"], f"1 to {n - 1}" in error["message"]) == ("at_token", True)
    desk.post(path, status=400, at_token=n + 1, text=" cat")
    assert desk.post(path, 201, at_token=n - 1)["added"][0]["n_tokens"] == n - 1
    longer = desk.post(path, 201, at_token=n, text=" cat")["added"][0]
    assert longer["text"].startswith(node["text"])


def test_every_native_route_rejects_unknown_query_parameters(served: Served) -> None:
    routes = [
        (
            method,
            path,
            {each["name"] for each in route.get("parameters", ()) if each["in"] == "query"},
        )
        for path, methods in served.client.get("/openapi.json").json()["paths"].items()
        for method, route in methods.items()
        if path.startswith("/api/v1/")
    ]
    assert len(routes) > 40
    for method, path, queries in routes:
        url = re.sub(r"\{[^}]*\}", "0", path)
        answer = served.client.request(method, url, params={"bogus": "1"}, json={})
        assert answer.status_code == 400, (method, path, answer.text)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "bogus")
        assert set(re.findall(r"[\w]+", error["message"].partition("re: ")[2])) == queries


def test_unknown_query_parameter_suggests_a_similar_one(
    desk: Desk,
) -> None:
    error = desk.get("/nodes", status=400, dept=0)["error"]
    assert "Did you mean depth?" in error["message"]
    assert desk.get("/search", status=400, pattern="zzz")["error"]["param"] == "pattern"
    assert desk.get("/events", status=400, tokens=True, aftr=1)["error"]["param"] == "aftr"
    # OpenAI's clients append parameters of their own.
    assert desk.client.get("/v1/models", params={"api-version": "1"}).status_code == 200


def test_range_of_tokens_has_sampled_probabilities(desk: Desk) -> None:
    (node,) = desk.grow(n=1, seed=5, temperature=0.5, top_k=2)
    path = f"/nodes/{node['node']}/tokens"
    rows = desk.get(path, top=2, sampled=True)["data"]
    some = desk.get(path, top=2, sampled=True, first=2, last=4)["data"]
    assert [row["index"] for row in some] == [2, 3]
    assert [row["id"] for row in some] == [row["id"] for row in rows[2:4]]
    for row in rows:
        assert sum(one["p_sampled"] for one in row["top"]) == pytest.approx(1)
        assert row["p_sampled"] > 0
    assert desk.get(path, first=3)["data"][0]["index"] == 3
    assert "p_sampled" not in desk.get(path)["data"][0]


def test_prompt_tokens_after_the_first_have_logprobs(desk: Desk) -> None:
    first, *rest = desk.get("/nodes/0/tokens", top=1)["data"]
    assert first["logprob"] is None
    assert all(each["logprob"] <= 0 and each["rank"] >= 0 for each in rest)
    assert desk.get("/nodes/0/tokens", top=1, first=2, last=3)["data"] == rest[1:2]


def test_message_is_edited_as_sibling_and_in_place(desk: Desk) -> None:
    (answer,) = desk.grow(n=1)
    added = desk.post("/nodes", 201, parent=answer["node"], message="Why?")["added"][0]
    patch = f"{desk.base}/nodes/{added['node']}"
    sibling = desk.client.patch(patch, json={"message": "How?"}).json()["added"][0]
    assert (sibling["parent"], sibling["said"]) == (answer["node"], "How?")
    assert sibling["text"] == added["text"].replace("Why?", "How?")
    reply = desk.client.patch(patch, json={"message": "When?", "in_place": True}).json()
    assert [each["said"] for each in reply["changed"]] == ["When?"]
    assert desk.client.patch(patch, json={"message": "a", "text": "b"}).status_code == 400
    wrong = desk.client.patch(f"{desk.base}/nodes/{answer['node']}", json={"message": "So?"})
    assert wrong.status_code == 400
    assert "not a chat message" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("template", [True, False])
def test_edited_prompt_is_templated_like_a_new_prompt(served: Served, template: bool) -> None:
    desk = Desk(served, "One thing", template=template)
    other = Desk(served, "Another thing", template=template)
    edit = {"message": "Another thing", "in_place": True}
    assert desk.client.patch(f"{desk.base}/nodes/0", json=edit).status_code == 200
    assert desk.get("/nodes/0")["text"] == other.get("/nodes/0")["text"]
    assert desk.get()["prompt"] == "Another thing"
    chat = Desk(served, None, messages=[{"role": "system", "content": "Be brief."},
                                        {"role": "user", "content": "Hi"}])  # fmt: skip
    refused = chat.client.patch(f"{chat.base}/nodes/0", json=edit)
    assert refused.status_code == 400
    assert "more than one message" in refused.json()["error"]["message"]


def test_restored_nodes_are_not_in_removed(desk: Desk) -> None:
    one, other = desk.grow(n=2)
    rev = desk.get("/nodes")["rev"]
    desk.client.delete(f"{desk.base}/nodes/{one['node']}")
    desk.client.delete(f"{desk.base}/nodes/{other['node']}")
    desk.post("/undo")
    page = desk.get("/nodes", since=rev)
    assert page["removed"] == [one["node"]]
    assert other["node"] in [node["node"] for node in page["data"]]
    assert desk.get("/nodes", since=page["rev"] + 1000)["whole"]  # of another past


def test_changed_nodes_are_paged(served: Served, desk: Desk) -> None:
    grown = desk.grow(n=5)
    rev = desk.get("/nodes")["rev"]
    desk.client.delete(f"{desk.base}/nodes/{grown[0]['node']}")
    for node in grown[1:4]:
        desk.client.patch(f"{desk.base}/nodes/{node['node']}", json={"score": 1})
    growing = desk.post("/nodes/0/generate", 202, n=1, **desk.endless(served))
    number = growing["branches"][0]["node"]
    first = page = desk.get("/nodes", since=rev, limit=2)
    changed = page["data"]
    assert (len(changed), page["removed"], page["whole"]) == (2, [grown[0]["node"]], False)
    while page["next"] is not None:
        page = desk.get("/nodes", since=rev, limit=2, after=page["next"])
        assert (len(page["data"]) <= 2, page["removed"], page["whole"]) == (True, [], False)
        changed += page["data"]
    assert [node["node"] for node in changed] == [*(node["node"] for node in grown[1:4]), number]
    wrong = desk.get("/nodes", 400, after=first["next"])
    assert wrong["error"]["param"] == "since"
    gone = desk.get("/nodes", 409, since=0, after=first["next"])
    assert gone["error"]["code"] == "page_gone"
    full = desk.get("/nodes", since=0, limit=2)
    rest = desk.get("/nodes", since=0, limit=1000, after=full["next"])
    assert full["whole"]
    assert rest["whole"]
    assert len(full["data"]) + len(rest["data"]) == len(desk.nodes(limit=1000))
    desk.client.post(f"/api/v1/jobs/{growing['job']}/cancel")


def test_undo_restores_the_prompt(desk: Desk) -> None:
    before = desk.get("/nodes/0")["text"]
    for edit in ({"message": "Another thing"}, {"text": "Quite another"}):
        answer = desk.client.patch(f"{desk.base}/nodes/0", json={**edit, "in_place": True})
        assert answer.status_code == 200, answer.text
        desk.post("/undo")
        assert desk.get("/nodes/0")["text"] == before
        assert desk.get()["prompt"] == "Once upon a time"
        messages = desk.get("/nodes/0/path", **{"as": "messages"})["messages"]
        assert messages == [{"role": "user", "content": "Once upon a time"}]
        hits = desk.client.get("/api/v1/search", params={"q": "assistant", "loom": desk.base[14:]})
        assert hits.json()["data"] == []
    desk.client.patch(f"{desk.base}/nodes/0", json={"message": "Another thing", "in_place": True})
    desk.post("/undo")
    desk.post("/redo")
    assert desk.get()["prompt"] == "Another thing"


HALF = "a\\ud800b"


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/api/v1/looms", '{"prompt": "HALF"}', "prompt"),
        ("POST", "/api/v1/looms", '{"prompt": "x", "name": "HALF"}', "name"),
        ("POST", "/api/v1/looms", '{"messages": [{"role": "user", "content": "HALF"}]}',
         "messages"),
        ("PATCH", "LOOM", '{"name": "HALF"}', "name"),
        ("POST", "LOOM/nodes", '{"text": "HALF"}', "text"),
        ("POST", "LOOM/nodes", '{"texts": ["x", "HALF"]}', "texts"),
        ("POST", "LOOM/nodes", '{"message": "HALF"}', "message"),
        ("PATCH", "LOOM/nodes/0", '{"text": "HALF", "in_place": true}', "text"),
        ("PATCH", "LOOM/nodes/0", '{"bookmark": "HALF"}', "bookmark"),
        ("POST", "LOOM/nodes/0/generate", '{"stop": "HALF"}', "stop"),
        ("POST", "LOOM/nodes/0/generate", '{"stop": ["HALF"], "wait": true}', "stop"),
        ("POST", "LOOM/nodes/0/generate", '{"choices": ["HALF"]}', "choices"),
        ("POST", "LOOM/nodes/0/generate", '{"regex": "HALF"}', "regex"),
        ("POST", "LOOM/nodes/0/score", '{"text": "HALF"}', "text"),
        ("POST", "LOOM/nodes/0/next", '{"candidates": ["HALF"]}', "candidates"),
        ("POST", "LOOM/runs", '{"strategy": "tot", "stop": "HALF"}', "stop"),
        ("POST", "/api/v1/tokenize", '{"text": "HALF"}', "text"),
        ("POST", "/v1/completions", '{"model": "tiny", "prompt": "HALF"}', "prompt"),
        ("POST", "/v1/chat/completions",
         '{"model": "tiny", "messages": [{"role": "user", "content": "HALF"}]}', "messages"),
        ("PATCH", "LOOM/nodes/0", '{"meta": {"x": NaN}}', "meta"),
        ("PATCH", "LOOM/nodes/0", '{"meta": {"x": [1e999]}}', "meta"),
        ("PATCH", "LOOM", '{"meta": {"x": NaN}}', "meta"),
        ("POST", "/api/v1/looms", '{"prompt": "x", "meta": {"x": Infinity}}', "meta"),
    ],
)  # fmt: skip
def test_lone_surrogates_and_nan_are_rejected_by_field(
    desk: Desk, method: str, path: str, body: str, param: str
) -> None:
    """And leaves nothing behind that a later change would stumble over."""
    answer = desk.client.request(
        method,
        path.replace("LOOM", desk.base),
        content=body.replace("HALF", HALF),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").split(".")[0] == param
    assert "half a character" in error["message"] or "not a JSON number" in error["message"]
    assert desk.client.patch(f"{desk.base}/nodes/0", json={"score": 1}).status_code == 200


def test_notes_may_have_lone_surrogates(desk: Desk) -> None:
    answer = desk.client.patch(
        f"{desk.base}/nodes/0",
        content='{"meta": {"x": "\\ud800"}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200
    assert desk.get("/nodes/0", fields="meta")["meta"] == {"x": "\ud800"}


def test_failed_edit_changes_nothing(desk: Desk) -> None:
    (node,) = desk.grow(n=1)
    before = desk.nodes(fields="tokens")
    too_long = {"at_token": 2, "text": "word " * 6000}
    refused = desk.client.post(f"{desk.base}/nodes/{node['node']}/fork", json=too_long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400, "context_length_exceeded",
    )  # fmt: skip
    desk.client.patch(f"{desk.base}/nodes/0", json={"score": 1})
    assert desk.nodes(fields="tokens") == [{**before[0], "score": 1.0}, *before[1:]]


def test_growth_at_a_full_context_is_rejected() -> None:
    """Else each requested branch would become a node without tokens."""
    with serving(ServerConfig(port=0, n_ctx=12)) as served:
        desk = Desk(served, "a b c d e f", template=False)
        body = {**desk.endless(served), "n": 2, "max_tokens": 40, "wait": True}
        grown = desk.post("/nodes/0/generate", **body)["branches"]
        assert {each["finish_reason"] for each in grown} == {"context"}
        error = desk.post(f"/nodes/{grown[0]['node']}/generate", 400, **body)["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == "the path has 12 tokens; the model's context is 12"
        assert (error["details"]["n_prompt_tokens"], error["details"]["n_ctx"]) == (12, 12)
        assert len(desk.get("/nodes")["data"]) == 3


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/v1/looms", "GET, POST"),
        ("/api/v1/looms/x/nodes/1", "GET, PATCH, DELETE"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/completions", "POST"),
    ],
)
def test_wrong_method_lists_allowed_methods(served: Served, path: str, allowed: str) -> None:
    answer = served.client.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_siblings_are_sorted_by_a_parameter(served: Served) -> None:
    created = served.client.post("/api/v1/looms", json={"prompt": "Once", "template": False})
    path = f"/api/v1/looms/{created.json()['id']}"
    ratings = {1: 2, 2: 5, 3: None}
    for rating in ratings.values():
        (added,) = served.client.post(f"{path}/nodes", json={"parent": 0, "text": " a"}).json()[
            "added"
        ]
        meta = {} if rating is None else {"rating": rating}
        served.client.patch(f"{path}/nodes/{added['node']}", json={"meta": meta}).raise_for_status()
    rated = {"sort": "rating"}
    listed = served.client.get(f"{path}/nodes", params=rated).json()["data"]
    assert [node["node"] for node in listed] == [0, 2, 1, 3]
    page = served.client.get(f"{path}/nodes", params={**rated, "limit": 2}).json()
    rest = served.client.get(f"{path}/nodes", params={**rated, "after": page["next"]}).json()
    assert [node["node"] for node in page["data"] + rest["data"]] == [0, 2, 1, 3]
    tree = served.client.get(f"{path}/tree", params=rated).json()["tree"]
    assert [node["node"] for node in tree["nodes"]] == [2, 1, 3]
    assert served.client.get(f"{path}/nodes", params={"sort": "age"}).status_code == 400


def test_rating_keeps_other_notes_and_ranks_exported_pairs(served: Served) -> None:
    created = served.client.post("/api/v1/looms", json={"prompt": "Once", "template": False})
    path = f"/api/v1/looms/{created.json()['id']}"
    for text in (" a", " b"):
        served.client.post(f"{path}/nodes", json={"parent": 0, "text": text})
    node = f"{path}/nodes/2"
    served.client.patch(node, json={"meta": {"note": "mine"}, "rating": 4}).raise_for_status()
    read = served.client.get(node, params={"fields": ["meta"]}).json()
    assert (read["rating"], read["meta"]) == (4, {"note": "mine", "rating": 4})
    pairs = {"format": "pairs", "by": "rating"}
    assert served.client.get(f"{path}/export", params=pairs).status_code == 400  # one has none
    served.client.patch(f"{path}/nodes/1", json={"rating": 1}).raise_for_status()
    (pair,) = served.client.get(f"{path}/export", params=pairs).text.splitlines()
    assert (json.loads(pair)["chosen"], json.loads(pair)["rejected"]) == (" b", " a")
    served.client.patch(node, json={"rating": None}).raise_for_status()
    assert served.client.get(node, params={"fields": ["meta"]}).json()["meta"] == {"note": "mine"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"score": 0.5}, "score"),
        ({"rating": 4}, "rating"),
        ({"meta": {"note": "mine"}, "in_place": True}, "note"),
        ({"score": 0.5, "rating": 4}, "edit"),
        ({"text": " b", "in_place": True}, "edit"),
    ],
)
def test_history_names_the_field_if_an_edit_changes_only_an_annotation(
    served: Served, body: dict[str, Any], kind: str
) -> None:
    created = served.client.post("/api/v1/looms", json={"prompt": "Once", "template": False})
    path = f"/api/v1/looms/{created.json()['id']}"
    served.client.post(f"{path}/nodes", json={"parent": 0, "text": " a"}).raise_for_status()
    change = served.client.patch(f"{path}/nodes/1", json=body).raise_for_status().json()
    history = served.client.get(f"{path}/history").json()["data"]
    assert (change["kind"], history[0]["kind"]) == (kind, kind)


def test_mean_entropy_of_a_node_is_the_mean_of_its_entropies(served: Served) -> None:
    created = served.client.post("/api/v1/looms", json={"prompt": "Once", "template": False})
    path = f"/api/v1/looms/{created.json()['id']}"
    served.client.post(
        f"{path}/nodes/0/generate", json={"max_tokens": 4, "seed": 1, "wait": True}
    ).raise_for_status()
    node = served.client.get(f"{path}/nodes/1", params={"fields": ["tokens"]}).json()
    assert node["mean_entropy"] == pytest.approx(sum(node["entropies"]) / len(node["entropies"]))
    assert served.client.get(f"{path}/nodes/0").json()["mean_entropy"] is None


def test_author_note_of_a_loom_is_used_and_checked(served: Served) -> None:
    prompt = {"prompt": "One.\nTwo", "template": False}
    created = served.client.post("/api/v1/looms", json=prompt)
    path = f"/api/v1/looms/{created.json()['id']}"
    meta = {"author_note": {"text": "[N]", "depth": 1}}
    served.client.patch(path, json={"meta": meta}).raise_for_status()
    assert served.client.get(path).json()["meta"]["author_note"] == meta["author_note"]
    body = {"max_tokens": 4, "seed": 1, "wait": True}
    noted = served.client.post(f"{path}/nodes/0/generate", json=body).json()
    prompt["prompt"] = "One.\n[N]\nTwo"
    other = served.client.post("/api/v1/looms", json=prompt).json()["id"]
    twin = served.client.post(f"/api/v1/looms/{other}/nodes/0/generate", json=body).json()
    assert [node["text"] for node in noted["nodes"]] == [node["text"] for node in twin["nodes"]]
    assert noted["usage"]["prompt_tokens"] == twin["usage"]["prompt_tokens"]
    wrong = served.client.patch(path, json={"meta": {"author_note": "[N]"}})
    assert (wrong.status_code, "author_note" in wrong.text) == (400, True)
