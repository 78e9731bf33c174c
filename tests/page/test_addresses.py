"""The page's address: it names the current node, and opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def wait_addressed(desk: Desk, node: int, name: str | None = None) -> None:
    """Wait until the page shows a node of a loom, by default of the desk's, and its address."""
    address = (name or desk.loom["name"], str(node))
    desk.until(lambda: desk.current == node and desk.address == address, f"the node of {address}")


def test_address_names_the_node_that_keys_moved_to(bush: Desk, page: Page) -> None:
    wait_addressed(bush, 0)
    n_entries = page.evaluate("history.length")
    bush.press("1", "1", "1")
    wait_addressed(bush, 6)
    bush.press("ArrowDown")
    wait_addressed(bush, 7)
    assert page.evaluate("history.length") == n_entries
    page.reload()
    wait_addressed(bush, 7)
    expect(bush.text).to_contain_text("I heard")


def test_copied_address_shows_its_node_in_another_tab(bush: Desk, page: Page) -> None:
    bush.press("1", "1")
    wait_addressed(bush, 4)
    other = page.context.new_page()
    other.goto(page.url)
    row = "[role=treeitem][aria-current=true]"
    expect(other.locator(row)).to_have_attribute("data-node", "4")
    other.keyboard.press("ArrowDown")
    expect(other.locator(row)).to_have_attribute("data-node", "5")
    wait_addressed(bush, 4)


@pytest.mark.parametrize(("node", "key"), [(1, "-"), (2, "z")])
def test_node_of_an_address_is_shown_though_the_browser_stores_a_tree_without_it(
    bush: Desk, page: Page, node: int, key: str
) -> None:
    bush.press(str(node), key)
    bush.reload()
    expect(bush.row(node)).to_be_visible()
    expect(bush.row(4)).to_have_count(0)
    page.goto("about:blank")
    bush.visit(6)
    expect(bush.row(6)).to_have_attribute("aria-current", "true")
    wait_addressed(bush, 6)


def test_back_returns_to_the_node_before_a_jump_and_to_the_loom_before(
    bush: Desk, page: Page
) -> None:
    first = bush.loom["name"]
    bush.press("1", "ArrowDown")
    wait_addressed(bush, 2)
    page.evaluate("location.hash = location.hash.split('/')[0] + '/5'")
    wait_addressed(bush, 5)
    bush.press("ArrowUp")
    wait_addressed(bush, 4)
    bush.make(template=False, prompt="Another")
    page.evaluate("(name) => { location.hash = name }", bush.loom["name"])
    wait_addressed(bush, 0)
    page.go_back()
    wait_addressed(bush, 4, first)
    page.go_back()
    wait_addressed(bush, 2, first)
    page.go_forward()
    wait_addressed(bush, 4, first)


def test_jump_in_the_instant_of_a_move_is_followed(bush: Desk, page: Page) -> None:
    bush.press("1", "ArrowDown", "ArrowUp")
    page.evaluate("location.hash = location.hash.split('/')[0] + '/5'")
    wait_addressed(bush, 5)


def test_address_of_a_removed_node_becomes_that_of_the_shown_node(bush: Desk, page: Page) -> None:
    bush.press("1", "1")
    wait_addressed(bush, 4)
    bush.ask("DELETE", bush.of("/nodes/4"))
    wait_addressed(bush, 5)
    page.evaluate("location.hash = location.hash.split('/')[0] + '/4'")
    wait_addressed(bush, 5)
    page.goto("about:blank")
    bush.visit(4)
    bush.until(lambda: bush.address[1] == str(bush.current) != "4", "an existing node")


def test_address_of_a_loom_alone_opens_the_last_node_and_names_it(bush: Desk, page: Page) -> None:
    bush.press("1", "ArrowDown")
    wait_addressed(bush, 2)
    page.goto("about:blank")
    bush.visit()
    wait_addressed(bush, 2)
    page.evaluate("location.hash = location.hash.split('/')[0]")
    wait_addressed(bush, 2)
    page.evaluate("location.hash = location.hash.split('/')[0] + '/0'")
    wait_addressed(bush, 0)
