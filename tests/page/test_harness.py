"""What watches the page sees what it must."""

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
    ("script", "told"),
    [
        ("console.error('broken')", "broken"),
        ("setTimeout(() => { throw new Error('thrown') })", "thrown"),
        ("fetch('http://127.0.0.2:1/x').catch(() => {})", "Content Security Policy"),
        ("setTimeout(() => { location.href = 'http://127.0.0.2:1/' })", "beyond the server"),
        ("setTimeout(() => { document.body.innerHTML = '<b>x</b>' })", "TrustedHTML"),
    ],
)
def test_faults_of_a_page_are_told(browser: Browser, desk: Desk, script: str, told: str) -> None:
    with watched(browser, desk.served.url) as (page, watch):
        page.goto("/")
        page.evaluate(script)
        until = time.monotonic() + WAIT_S
        while not re.search(told, "\n".join(watch.faults)) and time.monotonic() < until:
            page.wait_for_timeout(20)
        with pytest.raises(AssertionError, match=told):
            watch.check()
        watch.allow("")


def test_no_test_waits_inside_the_page() -> None:
    """`wait_for_function` of an expression is `eval` there: refused from the second look on."""
    waits = ".wait_for_" + "function("
    assert not [
        path.name for path in Path(__file__).parent.glob("*.py") if waits in path.read_text()
    ]


def test_a_held_model_stands_still(desk: Desk, gate: Gate) -> None:
    desk.make()
    gate.hold(5)
    desk.grow(wait=False, n=2, **desk.endless())
    desk.until(lambda: all(node["text"] for node in list(desk.nodes().values())[1:]), "texts")
    gate.wait_held()
    desk.page.wait_for_timeout(300)
    before = [node["text"] for node in desk.nodes().values()]
    desk.page.wait_for_timeout(300)
    assert [node["text"] for node in desk.nodes().values()] == before
    gate.open()
    desk.until(lambda: [node["text"] for node in desk.nodes().values()] != before, "more")
    for job in desk.ask("GET", "/jobs")["data"]:
        desk.ask("POST", f"/jobs/{job['id']}/cancel", json={})
    desk.wait_grown()


def test_axe_tells_what_it_finds(page: Page) -> None:
    page.goto("/")
    page.evaluate("document.body.append(document.createElement('img'))")
    with pytest.raises(AssertionError, match="image-alt"):
        assert_accessible(page)
