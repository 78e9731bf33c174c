"""One engine for the tests of the reasoning face, and a fresh LM and loom for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft
from shallow import shallow
from weft import Loom


@pytest.fixture(scope="session")
def shared() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.fixture
def lm(shared: weft.LM) -> Iterator[weft.LM]:
    """An LM of the test's own: one that steps where it is called, unless the test awaits it.

    Of one that has a thread, a reader who comes late hears of many steps at once.
    """
    lm = weft.LM(shared.engine, shared.text)
    yield lm
    lm.driver.close()


@pytest.fixture(scope="session")
def fluent() -> Iterator[weft.LM]:
    """The full model, for tests about its texts."""
    with weft.load("tiny") as lm:
        yield lm


@pytest.fixture
def loom(lm: weft.LM) -> Iterator[Loom]:
    with Loom(lm, weft.samples.game24) as loom:
        yield loom
