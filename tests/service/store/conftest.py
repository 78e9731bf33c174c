"""Fixtures: each database test runs on SQLite, and on a PostgreSQL that the test run starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from postgres import Cluster, Unavailable, cluster
from weft.service.store.library import Library

_names = (f"weft{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    pytest.importorskip("psycopg", reason="the extra postgresql is not installed")
    try:
        with cluster() as server:
            yield server
    except Unavailable as error:
        pytest.skip(f"no PostgreSQL: {error}")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.programs)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/weft.db"
    server: Cluster = request.getfixturevalue("postgres")
    return server.url(next(_names))


@pytest.fixture
def library(url: str, tmp_path: Path) -> Iterator[Library]:
    if url.startswith("sqlite"):
        warm.new_database(tmp_path / "weft.db")
    with Library(url) as opened:
        yield opened
