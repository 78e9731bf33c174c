"""Fields of nodes and searches: the origin of a node, and the rounds of a search."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import Served

Json = dict[str, Any]
GAME = "Use 4 9 10 13 to make 24."


@pytest.fixture
def loom(served: Served) -> str:
    created = served.client.post("/api/v1/looms", json={"prompt": GAME}).json()
    return f"/api/v1/looms/{created['id']}"


def test_seed_and_first_branch_reproduce_a_branch(served: Served, loom: str) -> None:
    client = served.client
    body = {"n": 3, "max_tokens": 12, "temperature": 1.3, "wait": True}
    nodes = client.post(f"{loom}/nodes/0/generate", json=body).json()["nodes"]
    for node in nodes:
        query = {"fields": ["params", "tokens"]}
        row = client.get(f"{loom}/nodes/{node['node']}", params=query).json()
        repeat = {
            "seed": row["params"]["seed"],
            "first_branch": row["branch"],
            "max_tokens": 12,
            "temperature": 1.3,
            "wait": True,
        }
        (twin,) = client.post(f"{loom}/nodes/0/generate", json=repeat).json()["nodes"]
        assert twin["token_ids"] == row["token_ids"]
    assert [client.get(f"{loom}/nodes/{each['node']}", params={"fields": "params"}).json()["branch"]
            for each in nodes] == [0, 1, 2]  # fmt: skip


def test_node_has_the_operation_that_created_it(served: Served, loom: str) -> None:
    client = served.client
    added = client.post(
        f"{loom}/nodes", json={"text": " Well"}, headers={"X-Weft-Actor": "page"}
    ).json()["added"][0]
    client.post(f"{loom}/nodes", json={"text": " Later"})
    node = client.get(f"{loom}/nodes/{added['node']}", params={"fields": "made"}).json()
    operation = node["made"]
    assert (operation["kind"], operation["actor"]) == ("add", "page")
    assert operation["at"].endswith("+00:00")
    root = client.get(f"{loom}/nodes/0", params={"fields": "made"}).json()
    assert root["made"]["at"]
    assert client.get(f"{loom}/nodes/0").json().get("made") is None
    assert client.get(f"{loom}/nodes", params={"fields": "made"}).status_code == 400


@pytest.mark.parametrize("strategy", ["tot", "smc"])
def test_search_rounds_name_nodes_by_number(served: Served, loom: str, strategy: str) -> None:
    """Also nodes that a round adds by itself, before anything below them grows."""
    client = served.client
    body = {"strategy": strategy, "n": 3, "seed": 1, "budget_tokens": 250, "wait": True}
    job = client.post(f"{loom}/runs", json=body).json()["job"]
    (run,) = client.get(f"{loom}/runs").json()["data"]
    assert (run["id"], run["kind"], run["status"]) == (job, "run", "ok")
    assert run["asked"] == {
        "strategy": strategy, "node": 0, "n": 3, "seed": 1, "budget_tokens": 250
    }  # fmt: skip
    assert run["rounds"]
    there = {entry["node"] for entry in client.get(f"{loom}/nodes").json()["data"]}
    for number, entry in enumerate(run["rounds"], 1):
        assert entry["round"] == number
        assert {one["node"] for one in entry["candidates"]} | set(entry["kept"]) <= there
    assert run["rounds"][-1]["cost"]["tokens"] <= run["result"]["cost"]["tokens"]
    assert client.get(f"/api/v1/jobs/{job}").json()["rounds"] == run["rounds"]
    every = client.get("/api/v1/jobs").json()["data"]
    assert next(entry for entry in every if entry["id"] == job)["rounds"] is None


def test_late_reader_of_a_search_gets_its_rounds(served: Served, loom: str) -> None:
    client = served.client
    body = {"strategy": "beam", "seed": 3, "budget_tokens": 20_000, "max_tokens": 40}
    job = client.post(f"{loom}/runs", json=body).json()["job"]
    name = ""
    with client.stream("GET", f"{loom}/events", params={"tokens": True}) as stream:
        for line in stream.iter_lines():
            name = line.removeprefix("event: ") if line.startswith("event:") else name
            if line.startswith("data:") and name == "score":
                break
    with client.stream("GET", f"{loom}/events", params={"tokens": True}) as stream:
        lines = iter(stream.iter_lines())
        data = next(line for line in lines if line.startswith("data:"))
        (search,) = json.loads(data.removeprefix("data:"))["jobs"]
        assert search["id"] == job
        assert search["asked"]["strategy"] == "beam"
        assert search["rounds"][0]["candidates"]
    client.post(f"/api/v1/jobs/{job}/cancel")


def test_strategies_list_their_numbers_and_unsupported_parameters(served: Served) -> None:
    rows = {each["name"]: each for each in served.client.get("/api/v1/strategies").json()["data"]}
    assert rows["tot"]["breadth_default"] == 5
    assert rows["best-of-n"]["breadth"] is None
    assert "temperature" in rows["greedy"]["refused"]


def test_candidates_have_their_greedy_continuations(served: Served, loom: str) -> None:
    client = served.client
    likeliest = client.post(f"{loom}/nodes/0/next", json={"top": 3}).json()["next"]
    ids = [candidate["id"] for candidate in likeliest]
    reply = client.post(f"{loom}/nodes/0/next", json={"candidates": ids, "ahead": 5}).json()
    for token, candidate in zip(ids, reply["candidates"], strict=True):
        added = client.post(f"{loom}/nodes", json={"token_ids": [token]}).json()["added"][0]
        body = {"max_tokens": 5, "temperature": 0, "wait": True}
        path = f"{loom}/nodes/{added['node']}/generate"
        (node,) = client.post(path, json=body).json()["nodes"]
        assert candidate["ahead"] == node["text"]
    assert client.post(f"{loom}/nodes/0/next", json={"ahead": 65}).status_code == 400
    with_none = client.post(f"{loom}/nodes/0/next", json={"candidates": ids}).json()
    assert "ahead" not in with_none["candidates"][0]


def test_node_has_the_model_that_grew_it(served: Served, loom: str) -> None:
    client = served.client
    client.post("/api/v1/models", json={"source": "tiny", "id": "other", "wait": True})
    body = {"n": 1, "max_tokens": 3, "wait": True}
    (own,) = client.post(f"{loom}/nodes/0/generate", json=body).json()["nodes"]
    (others,) = client.post(f"{loom}/nodes/0/generate", json={**body, "model": "other"}).json()[
        "nodes"
    ]
    searched = {"strategy": "best-of-n", "n": 2, "max_tokens": 3, "wait": True, "model": "other"}
    best = client.post(f"{loom}/runs", json=searched).json()["result"]["best"]
    (written,) = client.post(f"{loom}/nodes", json={"text": " then"}).json()["added"]
    models = [
        client.get(f"{loom}/nodes/{node}", params={"fields": "made"}).json()["made"]["model"]
        for node in (own["node"], others["node"], best, written["node"], 0)
    ]
    assert models == ["tiny", "other", "other", None, None]
    log = client.get(f"{loom}/history").json()["data"][::-1]
    models = [each["model"] for each in log if each["n_added"]]  # scores add no nodes
    assert models == [None, "tiny", "other", "other", None]
    assert client.get(loom).json()["model"] == "tiny"
    client.delete("/api/v1/models/other")
