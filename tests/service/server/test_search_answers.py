"""Searches over HTTP: how answers are read, judged and checked, and the reason of the choice."""

from __future__ import annotations

from typing import Any

import pytest

from serving import Served

BODY = {"strategy": "best-of-n", "n": 3, "max_tokens": 8, "seed": 1, "wait": True}


def search(served: Served, **options: Any) -> Any:
    created = served.client.post("/api/v1/looms", json={"prompt": "Count: 1, 2", "template": False})
    path = f"/api/v1/looms/{created.json()['id']}"
    return served.client.post(f"{path}/runs", json={**BODY, **options}), path


def test_result_has_groups_with_nodes_the_measure_and_a_reason(served: Served) -> None:
    answer, path = search(served, answer=r"[a-z]|\d")
    result = answer.json()["result"]
    assert result["measure"] == "share of votes"
    assert "of 3 texts" in result["reason"]
    assert sum(group["count"] for group in result["answers"]) == 3
    assert result["best"] in result["answers"][0]["nodes"]
    nodes = served.client.get(f"{path}/nodes").json()["data"]
    assert {node for group in result["answers"] for node in group["nodes"]} <= {
        node["node"] for node in nodes
    }


def test_second_search_at_a_prompt_counts_only_its_own_branches(served: Served) -> None:
    _, path = search(served, max_tokens=2)
    body = {**BODY, "n": 2, "max_tokens": 2, "seed": 2}
    second = served.client.post(f"{path}/runs", json=body).json()
    branches = {branch["node"] for branch in second["branches"]}
    counted = [node for group in second["result"]["answers"] for node in group["nodes"]]
    assert len(counted) == 2
    assert set(counted) == branches


def test_judge_and_check_of_a_request_are_used(served: Served) -> None:
    answer, _ = search(served, judge="Is {text} right?", check=".*", answer=r"(?s).+")
    result = answer.json()["result"]
    assert (result["measure"], result["solved"]) == ("judge", True)
    assert "passes the check" in result["reason"]
    assert all(0 <= group["score"] <= 1 for group in result["answers"])


@pytest.mark.parametrize(
    "wrong", [{"answer": "("}, {"check": "["}, {"judge": "Right?"}, {"answer": "x" * 1001}]
)
def test_wrong_answer_options_are_rejected(served: Served, wrong: dict[str, str]) -> None:
    answer, _ = search(served, **wrong)
    assert answer.status_code in (400, 422)
    assert next(iter(wrong)) in answer.text
