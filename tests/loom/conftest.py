"""One LM for the tests of the reasoning face, and a fresh loom for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft
from shallow import shallow
from weft import Loom


@pytest.fixture(scope="session")
def lm() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.fixture(scope="session")
def fluent() -> Iterator[weft.LM]:
    """The whole model, where a test is about what it says."""
    with weft.load("tiny") as lm:
        yield lm


@pytest.fixture
def loom(lm: weft.LM) -> Iterator[Loom]:
    with Loom(lm, weft.samples.game24) as loom:
        yield loom
