"""One embedded model for the tests of searches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm
