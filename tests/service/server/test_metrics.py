"""Prometheus metrics of jobs, streams and first tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from weft.engines.numpy import NumpyEngine

if TYPE_CHECKING:
    from serving import Served

PROMPT = "Once upon a time"


def figure(served: Served, name: str) -> float:
    """Return a figure of the page; 0 where it is not there yet."""
    lines = served.client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def until(served: Served, name: str, value: float) -> None:
    """Wait for a figure: a call is counted when it has ended, which is after its answer."""
    while figure(served, name) != value:
        time.sleep(0.02)


def bans(served: Served) -> dict[str, int]:
    return {str(token): -100 for token in range(served.service.models.lm().info.n_vocab)}


def test_growth_is_counted_by_the_status_of_its_job(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    loom = served.client.post("/api/v1/looms", json={"prompt": PROMPT}).json()["id"]
    path = f"/api/v1/looms/{loom}/nodes/0/generate"

    def grow(**body: Any) -> dict[str, Any]:
        reply: dict[str, Any] = served.client.post(path, json={"wait": True, **body}).json()
        return reply

    assert grow(max_tokens=2)["status"] == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "forward", broken)
        assert grow(max_tokens=2)["error"]["code"] == "engine_error"
    no_end = {str(token): -100 for token in served.service.models.lm().text.stop_ids}
    job = grow(max_tokens=1900, logit_bias=no_end, wait=False)["job"]
    served.client.post(f"/api/v1/jobs/{job}/cancel")
    for status in ("ok", "failed", "cancelled"):
        until(served, f'weft_jobs_total{{kind="grow",status="{status}"}}', 1)


def test_stream_is_counted_by_its_status(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    served.client.post("/v1/completions", json=body)
    failed = {**body, "logit_bias": bans(served)}
    assert '"error"' in served.client.post("/v1/completions", json=failed).text
    with served.client.stream(
        "POST", "/v1/completions", json={**body, "max_tokens": 1900, "ignore_eos": True}
    ) as answer:
        next(answer.iter_lines())
    for status in ("ok", "failed", "cancelled"):
        until(served, f'weft_jobs_total{{kind="completion",status="{status}"}}', 1)


def test_first_token_of_a_stream_is_timed(served: Served) -> None:
    name = "weft_time_to_first_token_seconds_count"
    before = figure(served, name)
    chat = [{"role": "user", "content": "Hi"}]
    for path, body in {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": chat, "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    }.items():
        served.client.post(path, json={**body, "stream": True})
    until(served, name, before + 3)
