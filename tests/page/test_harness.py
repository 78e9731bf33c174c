"""The checks of page tests detect faults."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browsing import WAIT_S, Desk, Gate, assert_accessible, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.page


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("console.error('broken')", "broken"),
        ("setTimeout(() => { throw new Error('thrown') })", "thrown"),
        ("fetch('http://127.0.0.2:1/x').catch(() => {})", "Content Security Policy"),
        ("setTimeout(() => { location.href = 'http://127.0.0.2:1/' })", "beyond the server"),
        ("setTimeout(() => { document.body.innerHTML = '<b>x</b>' })", "TrustedHTML"),
    ],
)
def test_fault_of_a_page_fails_its_check(
    browser: Browser, desk: Desk, script: str, message: str
) -> None:
    with watched(browser, desk.served.url) as (page, watch):
        page.goto("/")
        page.evaluate(script)
        until = time.monotonic() + WAIT_S
        while not re.search(message, "\n".join(watch.faults)) and time.monotonic() < until:
            page.wait_for_timeout(20)
        with pytest.raises(AssertionError, match=message):
            watch.check()
        watch.allow("")


def test_no_page_test_uses_wait_for_function() -> None:
    """`wait_for_function` uses `eval` from its second attempt on, and the page forbids `eval`."""
    waits = ".wait_for_" + "function("
    assert not [
        path.name for path in Path(__file__).parent.glob("*.py") if waits in path.read_text()
    ]


def test_closed_gate_stops_the_model(desk: Desk, gate: Gate) -> None:
    desk.make()
    gate.hold(5)
    desk.grow(wait=False, n=2, **desk.endless())
    desk.until(lambda: all(node["text"] for node in list(desk.nodes().values())[1:]), "texts")
    gate.wait_stopped()
    desk.page.wait_for_timeout(300)
    before = [node["text"] for node in desk.nodes().values()]
    desk.page.wait_for_timeout(300)
    assert [node["text"] for node in desk.nodes().values()] == before
    gate.open()
    desk.until(lambda: [node["text"] for node in desk.nodes().values()] != before, "more")
    for job in desk.ask("GET", "/jobs")["data"]:
        desk.ask("POST", f"/jobs/{job['id']}/cancel", json={})
    desk.wait_grown()


def test_image_without_alt_text_is_not_accessible(page: Page) -> None:
    page.goto("/")
    page.evaluate("document.body.append(document.createElement('img'))")
    with pytest.raises(AssertionError, match="image-alt"):
        assert_accessible(page)
