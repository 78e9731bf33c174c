"""The native API, as a client uses it."""

from __future__ import annotations

from serving import Served


def make(served: Served, **more) -> dict:
    given = {"prompt": "Once upon a time", **more}
    answer = served.client.post("/api/v1/looms", json=given)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_loom_is_made_grown_and_read(served: Served) -> None:
    loom = make(served)
    base = f"/api/v1/looms/{loom['id']}"
    grown = served.client.post(
        f"{base}/nodes/0/generate", json={"n": 3, "max_tokens": 8, "wait": True, "seed": 1}
    )
    assert grown.status_code == 200, grown.text
    told = grown.json()
    assert told["status"] == "ok"
    assert len(told["nodes"]) == 3
    page = served.client.get(f"{base}/nodes").json()
    assert [node["node"] for node in page["data"]] == [0, 1, 2, 3]
    assert page["data"][0]["children"] == [1, 2, 3]
    print(page["data"][1], told["usage"])
