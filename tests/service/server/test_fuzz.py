"""Requests generated from the OpenAPI schema get described replies, and never an unexpected 5xx.

schemathesis.toml says which checks run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from serving import Served, serving
from shallow import shallow
from weft.service.server import ServerConfig
from weft.service.server.config import ServerLimits

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis.core.failures import FailureGroup  # noqa: E402

CONFIG = Path(__file__).parents[3] / "schemathesis.toml"
NUMBERS = count()
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Served]:
    """A server with small limits; afterwards none of its jobs may be left."""
    limits = ServerLimits(n=3, branches=6, tokens=6, jobs=64, body_bytes=200_000)
    config = ServerConfig(port=0, models=(str(shallow()),), engine="numpy", limits=limits)
    with serving(config) as server:
        yield server
        while server.service.n_works:
            time.sleep(0.01)  # a job ends shortly after its reply


def send(server: Served, case: schemathesis.Case, *, exists: bool) -> None:
    """Send a generated request. exists: name a loom and a node that exist, and no model."""
    if exists:
        loom = f"fuzz-{next(NUMBERS)}"
        created = server.client.post("/api/v1/looms", json={"prompt": "Once", "name": loom})
        loom_id = created.raise_for_status().json()["id"]
        node = {"parent": "0", "text": " upon"}
        server.client.post(f"/api/v1/looms/{loom}/nodes", json=node).raise_for_status()
        names = {"loom": loom, "node": "1", "loom_id": loom, "node_id": f"{loom_id}-1"}
        body = case.body if isinstance(case.body, dict) else {}
        for part in (case.path_parameters or {}, body):
            part.update({name: value for name, value in names.items() if name in part})
        body.pop("model", None)
    case.call_and_validate(base_url=server.url, timeout=60)


def fuzz(server: Served, mode: schemathesis.GenerationMode, n: int) -> None:
    """Send n valid or n invalid requests for each operation."""
    config = schemathesis.Config.from_path(CONFIG)
    document = server.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document, config=config)
    failures = [
        failure
        for operation in schema.get_all_operations()
        for failure in failures_of(server, operation.ok(), mode, n)
    ]
    assert not failures, "\n\n".join(failures)


def failures_of(server: Served, operation: Any, mode: Any, n: int) -> list[str]:
    """Return the first failure of an operation, or nothing."""

    @seed(1)
    @settings(max_examples=n, phases=[Phase.generate], **QUIET)
    @given(case=operation.as_strategy(generation_mode=mode), exists=st.booleans())
    def run(case: schemathesis.Case, exists: bool) -> None:
        send(server, case, exists=exists)

    try:
        run()
    except FailureGroup as failure:
        return [f"{operation.label}: {failure.exceptions}"]
    except Unsatisfiable:  # nothing is invalid for this operation
        pass
    return []


MODES = pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=lambda mode: mode.value)


@pytest.mark.programs
@MODES
def test_few_generated_requests(fuzzed: Served, mode: schemathesis.GenerationMode) -> None:
    fuzz(fuzzed, mode, 2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@MODES
def test_many_generated_requests(fuzzed: Served, mode: schemathesis.GenerationMode) -> None:
    fuzz(fuzzed, mode, 150)
