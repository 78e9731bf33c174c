"""A server for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import warm

if TYPE_CHECKING:
    from serving import Served


@pytest.fixture(scope="module", autouse=True)
def few_layers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two of the model's eight layers run, but where a file is about what it says (`fluent`)."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("fluent") is None:
            patch.setenv(warm.LAYERS, "2")
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with the embedded model, on this machine only."""
    from serving import serving

    with serving() as server:
        yield server
