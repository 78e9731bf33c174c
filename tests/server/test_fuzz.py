"""Whatever fits the schema, and what nearly does: the server never fails inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis", reason="the extra dev is not installed")

from serving import Served, serving  # noqa: E402
from weft.server import ServerConfig  # noqa: E402
from weft.server.config import ServerLimits  # noqa: E402

PHASES = (Phase.explicit, Phase.generate)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Served]:
    limits = ServerLimits(n=3, branches=6, tokens=6, jobs=64, body_bytes=200_000)
    with serving(ServerConfig(port=0, limits=limits)) as server:
        yield server


def fuzz(server: Served, n: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    loom = server.client.post("/api/v1/looms", json={"prompt": "Once"}).json()["id"]
    failed: list[str] = []
    for result in schema.include(path_regex="^/(api|healthz|readyz|metrics)").get_all_operations():
        operation = result.ok()

        @seed(1)
        @settings(
            max_examples=n, phases=PHASES, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(), there=st.booleans())
        def ask(case: schemathesis.Case, there: bool) -> None:
            if there:  # half of the questions are about something that is there
                for name, value in (("loom", loom), ("node", "0")):
                    if name in (case.path_parameters or {}):
                        case.path_parameters[name] = value
            if case.path.endswith("/events"):
                return  # the stream of a loom has no end
            answer = case.call(timeout=30)
            if answer.status_code >= 500 and answer.status_code not in (501, 503):
                failed.append(f"{answer.status_code} {case.as_curl_command()} {answer.text[:300]}")
            elif answer.status_code >= 400 and "/api/v1" in case.path:
                assert set(answer.json()) == {"error"}

        ask()
    assert not failed, "\n".join(failed[:5])


@pytest.mark.programs
def test_nothing_that_is_asked_makes_the_server_fail(fuzzed: Served) -> None:
    fuzz(fuzzed, 2)


@pytest.mark.slow
def test_nothing_that_is_asked_often_makes_the_server_fail(fuzzed: Served) -> None:
    fuzz(fuzzed, 150)
