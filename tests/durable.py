"""Tokens of growing nodes that are in the database."""

from __future__ import annotations

import time

from weft.errors import ConfigError
from weft.service.store.library import Library


def wait_durable(loom: str, n: int, url: str | None = None) -> None:
    """Wait until so many nodes that grow in a loom have tokens in the database."""
    while n_durable(loom, url) < n:
        time.sleep(0.05)


def n_durable(loom: str, url: str | None = None) -> int:
    """Return how many growing nodes of a loom have tokens in the database."""
    with Library(url) as library:
        try:
            rows = library.open(loom).nodes(after=0, limit=1000)
        except ConfigError:  # it is not there yet
            return 0
        return sum(row.is_growing and row.n_tokens > 0 for row in rows)
