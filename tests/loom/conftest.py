"""Looms for the tests of the reasoning face."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft
from weft.loom import Loom

PUZZLE = "Use 4 9 10 13 to make 24."


@pytest.fixture(scope="session")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm


@pytest.fixture
def loom(lm: weft.LM) -> Iterator[Loom]:
    with Loom(lm, PUZZLE) as loom:
        yield loom
