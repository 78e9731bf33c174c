"""The tree in the page: moving, removing, hoisting, searching, and looms of thousands of nodes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect
from written_looms import file_of, node_record

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def test_keys_and_clicks_select_nodes(bush: Desk) -> None:
    for key, node in (
        ("ArrowRight", 1),
        ("ArrowDown", 2),
        ("ArrowDown", 3),
        ("ArrowDown", 3),
        ("ArrowUp", 2),
        ("ArrowLeft", 0),
        ("ArrowRight", 2),  # the child visited last
        ("k", 1),
        ("2", 5),
        ("h", 1),
        ("1", 4),
        ("l", 6),
        ("[", 4),
        ("[", 1),
        ("]", 4),
        ("r", 0),
        ("`", 4),
    ):
        bush.press(key)
        bush.until(lambda node=node: bush.current == node, f"{key} goes to {node}")
    bush.row(3).click()
    bush.until(lambda: bush.current == 3, "a click goes there")
    expect(bush.row(1)).to_have_attribute("aria-level", "2")
    expect(bush.row(1)).to_have_attribute("aria-expanded", "true")


def test_undo_button_of_the_toast_restores_removed_nodes(bush: Desk) -> None:
    bush.row(1).click()
    bush.press("Delete")
    expect(bush.row(1)).to_have_count(0)
    expect(bush.row(6)).to_have_count(0)
    assert bush.current == 2  # its next sibling
    assert set(bush.nodes()) == {0, 2, 3}
    bush.page.get_by_role("status").get_by_role("button", name="Undo").click()
    expect(bush.row(6)).to_be_visible()
    assert set(bush.nodes()) == set(range(8))
    bush.press("Control+Shift+z")
    expect(bush.row(6)).to_have_count(0)
    bush.press("u")
    expect(bush.row(6)).to_be_visible()


def test_children_siblings_or_all_but_the_path_are_removed(bush: Desk) -> None:
    bush.row(4).click()
    bush.press("x")
    bush.until(lambda: set(bush.nodes()) == {0, 1, 2, 3, 4, 5}, "its children went")
    bush.press("X")
    bush.until(lambda: set(bush.nodes()) == {0, 1, 2, 3, 4}, "its siblings went")
    bush.press("Control+k")
    bush.page.keyboard.type("only this path")
    bush.press("Enter")
    bush.until(lambda: set(bush.nodes()) == {0, 1, 4}, "all else went")
    for _ in range(3):
        bush.press("u")
    bush.until(lambda: set(bush.nodes()) == set(range(8)), "all is back")


def test_removal_of_30_nodes_needs_confirmation(desk: Desk, page: Page) -> None:
    desk.make(template=False, prompt="Many")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "texts": [f" n{i}" for i in range(30)]})
    desk.visit()
    desk.press("x")
    dialog = page.get_by_role("dialog", name="Remove 30 nodes?")
    dialog.get_by_role("button", name="Cancel").click()
    assert len(desk.nodes()) == 31
    desk.press("x")
    dialog.get_by_role("button", name="Remove", exact=True).click()
    desk.until(lambda: len(desk.nodes()) == 1, "they went")
    desk.press("u")
    desk.until(lambda: len(desk.nodes()) == 31, "they are back")


def test_hoisted_node_is_the_top_until_unhoisted(bush: Desk) -> None:
    bush.row(1).click()
    bush.press("z")
    expect(bush.row(0)).to_have_count(0)
    expect(bush.row(2)).to_have_count(0)
    expect(bush.row(1)).to_have_attribute("aria-level", "1")
    bush.press("ArrowRight", "z")
    expect(bush.row(4)).to_have_attribute("aria-level", "1")
    bush.reload()
    expect(bush.row(4)).to_have_attribute("aria-level", "1")
    bush.press("Z")
    expect(bush.row(1)).to_have_attribute("aria-level", "1")
    bush.press("Z")
    expect(bush.row(0)).to_be_visible()
    expect(bush.row(2)).to_be_visible()


def test_search_shows_and_selects_its_hits(bush: Desk, page: Page) -> None:
    bush.press("/")
    field = page.get_by_role("searchbox", name="Search")
    expect(field).to_be_focused()
    page.keyboard.type("WAS")
    expect(bush.row(3)).to_have_count(0)  # the tree shows the hits and their ancestors
    expect(bush.row(2)).to_be_visible()
    bush.press("Enter")
    bush.until(lambda: bush.current == 1, "the first hit")
    bush.press("n")
    bush.until(lambda: bush.current == 2, "the next one")
    bush.press("N")
    bush.until(lambda: bush.current == 1, "the one before")
    bush.press("/")
    field.fill("zebra")
    expect(page.get_by_text("No results").first).to_be_visible()
    bush.press("Escape")
    expect(bush.row(3)).to_be_visible()


def test_keys_select_the_next_and_the_previous_bookmark(bush: Desk) -> None:
    for node in (2, 6):
        bush.row(node).click()
        bush.press("b")
    bush.until(lambda: len(bush.ask("GET", bush.of())["bookmarks"]) == 2, "two bookmarks")
    for node in (2, 6):  # the page has heard that they are
        expect(bush.row(node)).to_have_attribute("aria-label", re.compile("bookmarked"))
    bush.press("r")
    for key, node in ((";", 6), (";", 2), (";", 6), (":", 2)):
        bush.press(key)
        bush.until(lambda node=node: bush.current == node, f"{key} goes to {node}")


def test_folding_hides_descendants_and_unfolding_shows_them(bush: Desk) -> None:
    bush.row(1).click()
    bush.press("-")
    expect(bush.row(4)).to_have_count(0)
    expect(bush.row(1)).to_have_attribute("aria-expanded", "false")
    bush.press("+")
    expect(bush.row(6)).to_be_visible()


def large(desk: Desk, n_nodes: int) -> None:
    """Import a loom of `n_nodes` nodes with three children each."""
    nodes = [
        node_record(at, None if at == 0 else (at - 1) // 3, text=f"node {at} of many ")
        for at in range(n_nodes)
    ]
    imported = desk.ask("POST", "/import", content=json.dumps(file_of(nodes)).encode())
    (desk.loom,) = imported["looms"]


def test_10000_nodes_take_200_rows_or_fewer(desk: Desk, page: Page) -> None:
    large(desk, 10_000)
    desk.visit()
    desk.wait_known()
    count = "document.querySelectorAll('[role=treeitem]').length"
    assert 10 < page.evaluate(count) <= 200
    desk.press("ArrowRight", "ArrowRight", "ArrowDown")
    row = desk.tree.locator("[aria-current=true]")
    expect(row).to_have_attribute("aria-level", "3")
    expect(row).to_have_attribute("aria-posinset", "2")
    desk.tree.evaluate("(tree) => { tree.scrollTop = tree.scrollHeight / 2 }")
    page.wait_for_timeout(300)
    assert 10 < page.evaluate(count) <= 200
    assert page.evaluate("document.querySelectorAll('*').length") < 5000


@pytest.mark.parametrize("view", ["outline", "map"])
def test_complete_session_needs_no_mouse(desk: Desk, page: Page, view: str) -> None:
    desk.sets(n=2, max_tokens=8, seed=1)
    desk.remembers("treeView", view)
    page.goto("/")
    expect(page.get_by_role("button", name="Grow 2 branches")).to_be_enabled()
    desk.press("Control+Enter")
    desk.open_named()
    desk.until(lambda: len(desk.nodes()) == 3, "two branches")
    desk.wait_known()
    desk.press("ArrowRight", "g")
    desk.until(lambda: len(desk.nodes()) == 5, "two more")
    desk.wait_known()
    desk.press("e")
    expect(page.get_by_role("textbox", name="Text of the node")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("A fox lived here.")
    desk.press("Control+s")
    desk.until(lambda: len(desk.nodes()) == 6, "an edited sibling")
    page.locator(".editor").wait_for(state="detached")
    desk.press("b", "Enter")
    page.locator(".editor textarea").wait_for()
    page.keyboard.type(" It was old.")
    desk.press("Control+Shift+Enter")
    desk.until(lambda: len(desk.nodes()) == 7, "a written child")
    page.locator(".editor").wait_for(state="detached")
    desk.wait_known()
    desk.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    desk.press("Escape")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for(state="hidden")
    desk.press("Backspace")
    desk.until(lambda: len(desk.nodes()) == 6, "removed")
    desk.press("u")
    desk.until(lambda: len(desk.nodes()) == 7, "brought back")
    # Controls without a key of their own are reached with Tab.
    labels = set()
    for _ in range(80):
        desk.press("Tab")
        labels.add(page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
    assert {"Tree", "Looms", "Export"} <= {each.split("  ")[0] for each in labels}
