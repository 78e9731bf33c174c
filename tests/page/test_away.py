"""The server goes and comes back, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ports
from browsing import Desk, Gate, assert_accessible, expect, watched
from serving import Served, serving
from tests.page.program import running
from weft.service.server import ServerConfig

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.page


class Place:
    """A port where a server with one database is started again and again."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.db = f"sqlite:///{folder}/looms.db"
        self._running = ExitStack()

    def start(self) -> Served:
        config = ServerConfig(port=0, db=self.db, grace_s=0.1)
        return self._running.enter_context(serving(config, port=self.port))

    def stop(self) -> None:
        self._running.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ports.reserved() as port:
        place = Place(tmp_path, port)
        yield place
        place.stop()


def test_page_reconnects_to_a_restarted_server(browser: Browser, place: Place) -> None:
    served = place.start()
    with watched(browser, served.url) as (page, watch):
        watch.allow("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY_RESPONSE|net::ERR|status of 5")
        desk = Desk(served, page, watch)
        desk.sets(n=2, max_tokens=12)
        desk.open_loom(n=2, max_tokens=12)
        desk.press("ArrowRight")
        place.stop()
        away = page.get_by_text("Reconnecting. Nothing is lost.")
        expect(away).to_be_visible(timeout=60_000)
        expect(desk.text).to_contain_text("fox")  # what was there can be read
        desk.press("ArrowDown")
        desk.until(lambda: desk.current == 2, "and gone through")
        desk.served = place.start()
        expect(away).to_be_hidden(timeout=60_000)
        desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": " meanwhile"})
        expect(desk.row(3)).to_be_visible()
        grow = page.get_by_role("button", name="Grow 2 branches").first
        expect(grow).to_be_enabled(timeout=60_000)  # its model is loaded again
        desk.press("g")
        desk.until(lambda: len(desk.nodes()) == 6, "it grows again")
        desk.wait_grown()


def test_text_grown_before_a_server_stop_is_saved_and_shown(browser: Browser, place: Place) -> None:
    served = place.start()
    with watched(browser, served.url) as (page, watch):
        watch.allow("net::ERR|status of 5")
        desk = Desk(served, page, watch)
        desk.open_loom()
        gate = Gate(served)
        gate.hold(30)
        (node,) = desk.grow(n=1, wait=False, **desk.endless())
        desk.until(lambda: desk.lane(node).inner_text().strip() != "", "text")
        gate.open()
        place.stop()
        expect(page.get_by_text("Reconnecting. Nothing is lost.")).to_be_visible(timeout=60_000)
        desk.served = place.start()
        expect(page.get_by_text("Reconnecting. Nothing is lost.")).to_be_hidden(timeout=60_000)
        saved = desk.nodes()[node]
        assert saved["finish_reason"] == "interrupted"
        assert saved["text"]
        desk.row(node).click()
        desk.until(
            lambda: desk.part(node).text_content() == saved["text"], "all that the server has"
        )


def test_restarted_server_without_the_loom_is_reported_and_not_polled(
    browser: Browser, place: Place, tmp_path: Path
) -> None:
    served = place.start()
    with watched(browser, served.url) as (page, watch):
        watch.allow("net::ERR|status of 5|404")
        desk = Desk(served, page, watch)
        desk.open_loom(n=2)
        place.stop()
        expect(page.get_by_text("Reconnecting. Nothing is lost.")).to_be_visible(timeout=60_000)
        (tmp_path / "looms.db").rename(tmp_path / "others.db")
        place.start()
        notice = page.get_by_text("This server does not have this loom. You can read it here until")
        expect(notice).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Reconnecting. Nothing is lost.")).to_be_hidden()
        expect(desk.tree.get_by_role("treeitem")).to_have_count(3)
        assert_accessible(page)
        n = len(watch.requested)
        page.wait_for_timeout(2500)
        assert not [each for each in watch.requested[n:] if "/looms/" in each]
        desk.press("g")
        expect(
            page.get_by_role("status").filter(has_text="does not have this loom")
        ).not_to_have_count(0)
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text(desk.loom["name"])


def test_growing_without_a_server_shows_that_it_does_not_answer(
    browser: Browser, place: Place
) -> None:
    served = place.start()
    with watched(browser, served.url) as (page, watch):
        watch.allow("net::ERR|status of 5")
        desk = Desk(served, page, watch)
        desk.open_loom(n=1)
        place.stop()
        desk.press("g")
        expect(page.get_by_text("The server does not answer.")).to_be_visible()


def test_an_edit_begun_before_a_killed_server_is_saved_as_a_sibling(
    browser: Browser, tmp_path: Path
) -> None:
    """The edited node is not the one that grows: `kill -9` interrupts its sibling."""
    with running(browser, tmp_path) as (desk, program):
        page = desk.page
        (first,) = desk.open_loom(n=1)
        desk.visit(first)
        desk.press("e")
        expect(page.get_by_role("textbox", name="Text of the node")).to_be_focused()
        page.keyboard.type(" And more.")
        (growing,) = desk.grow(n=1, wait=False, **program.endless())
        desk.until(lambda: growing in program.saved(), "saved text")
        assert desk.ask("GET", desk.of())["growing"] == 1
        program.kill()
        away = page.get_by_text("Reconnecting. Nothing is lost.")
        expect(away).to_be_visible(timeout=60_000)
        program.start()
        expect(away).to_be_hidden(timeout=60_000)
        assert desk.nodes()[growing]["finish_reason"] == "interrupted"
        before = desk.nodes()
        page.get_by_role("button", name="Save as sibling").click()
        desk.until(lambda: len(desk.nodes()) == len(before) + 1, "the sibling")
        nodes = desk.nodes()
        (sibling,) = set(nodes) - set(before)
        assert nodes[sibling]["parent"] == nodes[first]["parent"]
        assert nodes[sibling]["text"] == f"{nodes[first]['text']} And more."
        assert nodes[first]["text"] == before[first]["text"]
