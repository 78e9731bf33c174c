"""Requests made up from the OpenAPI schema: whatever is asked, the server answers and goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from shallow import shallow

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402

if TYPE_CHECKING:
    from serving import Served

PATHS = ("completions", "chat/completions", "responses", "embeddings")
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server that lets nobody ask for much."""
    from serving import serving
    from weft.server import ServerConfig
    from weft.server.config import ServerLimits

    limits = ServerLimits(n=4, branches=8, tokens=8)
    with serving(
        ServerConfig(port=0, models=(str(shallow()),), engine="numpy", limits=limits)
    ) as served:
        yield served


@pytest.fixture(scope="module")
def schema(small: Served) -> Any:
    return schemathesis.openapi.from_dict(small.client.get("/openapi.json").json())


def fuzz(small: Served, schema: Any, path: str, mode: GenerationMode, n: int) -> None:
    operation = schema[f"/v1/{path}"]["POST"]
    seen = set()

    @seed(1)
    @settings(max_examples=n, deadline=None, database=None, suppress_health_check=QUIET)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # or nearly all would be 404
        answer = case.call(base_url=small.url)
        seen.add(answer.status_code)
        assert answer.status_code < 500, (answer.status_code, case.body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    ask()
    assert small.client.get("/healthz").status_code == 200
    while small.service.n_works:
        time.sleep(0.01)  # a job is over a moment after its answer
    assert small.service.n_works == 0
    assert seen


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.programs
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_no_request_is_more_than_the_server_can_take(
    small: Served, schema: Any, path: str, mode: GenerationMode
) -> None:
    fuzz(small, schema, path, mode, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_nor_one_of_very_many(small: Served, schema: Any, path: str, mode: GenerationMode) -> None:
    fuzz(small, schema, path, mode, 300)
