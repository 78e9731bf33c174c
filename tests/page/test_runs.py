"""A search for an answer, watched while it thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def test_a_search_is_started_and_watched_to_its_answer(desk: Desk, page: Page) -> None:
    desk.make("Use 4 9 10 13 to make 24.")
    desk.visit()
    desk.press("R")
    asked = page.get_by_role("dialog")
    asked.wait_for()
    asked.get_by_role("button", name="Start").or_(
        asked.get_by_role("button", name="Search")
    ).first.click()
    desk.until(lambda: len(desk.nodes()) > 2, "nodes of the search")
    expect(desk.tree.get_by_role("treeitem").nth(1)).to_be_visible()  # while it goes on
    desk.wait_grown()
    desk.until(lambda: any(node["score"] is not None for node in desk.nodes().values()), "scores")
    page.wait_for_timeout(300)
    assert len(desk.nodes()) > 5


def test_a_search_is_stopped_and_keeps_what_it_has(desk: Desk, page: Page, gate) -> None:
    desk.make("Use 4 9 10 13 to make 24.")
    desk.visit()
    gate.hold(60)
    desk.ask("POST", desk.of("/runs"), json={"strategy": "tot", "seed": 1})
    desk.until(lambda: len(desk.nodes()) > 2, "nodes of the search")
    desk.press("Escape", "Escape")
    gate.open()
    desk.wait_grown(20)
    (run,) = [job for job in desk.ask("GET", "/jobs")["data"] if job["kind"] == "run"][:1]
    assert run["status"] == "cancelled"
    assert len(desk.nodes()) > 2
