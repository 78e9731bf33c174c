"""A browser for all tests of the page, a server for those of one file, and a page for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from browsing import Desk, Gate
    from serving import Served


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--late",
        action="append",
        default=[],
        choices=("news", "answers"),
        help="let the page hear of changes, or have its answers, only 400 ms later",
    )
    parser.addoption(
        "--write-jobs",
        action="store_true",
        help="write the keys and clicks of tests/page/test_jobs.py into docs/page-keys.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.late:
        import browsing

        browsing.always_late.update(config.option.late)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from browsing import browsing, why_no_browser

    if why := why_no_browser():
        pytest.skip(why)
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with the embedded model."""
    from serving import serving

    with serving() as server:
        yield server


@pytest.fixture
def look() -> dict[str, object]:
    """Options of the browser context of a test's page."""
    return {}


@pytest.fixture
def late() -> tuple[str, ...]:
    """Kinds of messages that reach a test's page late; parametrize it where that caused a bug."""
    return ()


@pytest.fixture
def desk(
    browser: Browser, served: Served, look: dict[str, object], late: tuple[str, ...]
) -> Iterator[Desk]:
    """A page that nothing may go wrong in, and its server."""
    from browsing import Desk, watched

    with watched(browser, served.url, late, **look) as (page, watch):
        yield Desk(served, page, watch)


@pytest.fixture
def page(desk: Desk) -> Page:
    return desk.page


@pytest.fixture
def gate(served: Served) -> Iterator[Gate]:
    """Holds the served model still; open at first."""
    from browsing import Gate

    gate = Gate(served)
    yield gate
    gate.close()


@pytest.fixture
def bush(desk: Desk) -> Desk:
    """A loom of written nodes: 0 with 1 2 3; 1 with 4 5; 4 with 6 7."""
    desk.make(template=False, prompt="The keeper")
    for parent, texts in (
        (0, [" was old", " was young", " slept"]),
        (1, [" and tall", " and poor"]),
        (4, [", they sing", ", I heard"]),
    ):
        desk.ask("POST", desk.of("/nodes"), json={"parent": parent, "texts": texts})
    desk.visit()
    return desk
