"""Replicas behind Ray Serve: one dies while clients grow looms, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ports
from postgres import Unavailable, programs

ROOT = Path(__file__).resolve().parents[3]
needs_ray = pytest.mark.skipif(
    not (find_spec("ray") and find_spec("psycopg")), reason="weft-lm[ray] is not installed"
)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("proxy", [[], ["--haproxy"]], ids=["ray's proxy", "haproxy"])
def test_killed_replica_loses_nothing(proxy: list[str]) -> None:
    try:
        programs()
    except Unavailable as error:
        pytest.skip(f"no PostgreSQL: {error}")
    with ports.reserved() as port:  # Ray's proxies need a free port, so it is released here
        command = [sys.executable, "benchmarks/scale.py", *proxy, "--port", str(port)]
    command += ["--looms", "24", "--clients", "6", "--calls", "12"]
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"benchmark"')]
    assert lines, process.stderr[-3000:]
    result = json.loads(lines[0])
    values = {row["what"]: row["figure"] for row in result["rows"]}
    assert values["calls"] == values["nodes reported"] == 24 * 12
    assert result["lost"] == result["wrong"] == []
    assert result["again"], "the kill hit no call: it was too late"
    assert values["the same, a loom's first left out"] > 0.75  # half of them move, of few
