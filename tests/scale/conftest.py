"""Replicas are those of the server: without its extra there is nothing to test."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("fastapi") and find_spec("uvicorn") else ["test_*.py"]
