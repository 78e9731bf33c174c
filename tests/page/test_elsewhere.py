"""Changes of the open loom by other clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def test_loom_renamed_elsewhere_has_its_new_name_and_address(desk: Desk, page: Page) -> None:
    desk.open_loom(n=1)
    name = f"renamed-{desk.loom['id']}"
    desk.ask("PATCH", desk.of(""), json={"name": name})
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    desk.until(lambda: page.url.partition("#")[2].partition("/")[0] == name, "the new address")
    page.reload()
    expect(page.get_by_role("heading", name=name)).to_be_visible()


def test_loom_restored_elsewhere_is_shown_when_the_page_becomes_visible(
    desk: Desk, page: Page
) -> None:
    desk.open_loom(n=1)
    desk.watch.allow("status of 404")  # it may request the loom before the event of its removal
    desk.ask("DELETE", desk.of(""))
    expect(page.get_by_role("button", name="Restore")).to_be_visible()
    desk.ask("POST", "/looms/restore", json={})
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_role("button", name="Restore")).to_have_count(0)
    expect(desk.tree.get_by_role("treeitem")).to_have_count(2)


def test_address_opens_a_node_whose_event_has_not_arrived(desk: Desk, page: Page) -> None:
    page.route("**/events*", lambda route: None)  # a stand-in for news that are late
    desk.open_loom(template=False)
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": " added elsewhere"})
    desk.visit(1)
    expect(desk.text).to_contain_text("added elsewhere")
    assert desk.current == 1
