"""Menus and tabs of the page: keys, clicks, focus, and the edges of the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


@pytest.fixture
def menu(desk: Desk, page: Page) -> Locator:
    """The open menu of the tree's button "Select"."""
    desk.open_loom(n=2)
    page.get_by_role("button", name="Select", exact=True).click()
    return page.get_by_role("menu", name="Select")


def test_keys_of_a_menu_move_between_its_enabled_items(menu: Locator, page: Page) -> None:
    for key, name in (
        ("", "All leaves"),
        ("ArrowDown", "All bookmarks"),
        ("End", "This node"),
        ("ArrowDown", "All leaves"),
        ("ArrowUp", "This node"),
        ("Home", "All leaves"),
        ("t", "This node"),
        ("a", "All leaves"),
        ("a", "All bookmarks"),
    ):
        if key:
            page.keyboard.press(key)
        expect(menu.get_by_role("menuitem", name=name)).to_be_focused()
    expect(menu.get_by_role("menuitem", name="None")).to_be_disabled()
    assert_accessible(page)


@pytest.mark.parametrize("key", ["Escape", "Tab"])
def test_key_closes_a_menu_and_focuses_its_button(menu: Locator, page: Page, key: str) -> None:
    button = page.get_by_role("button", name="Select", exact=True)
    expect(button).to_have_attribute("aria-expanded", "true")
    page.keyboard.press(key)
    expect(menu).to_have_count(0)
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-expanded", "false")


def test_click_on_the_button_or_outside_closes_a_menu(menu: Locator, page: Page) -> None:
    button = page.get_by_role("button", name="Select", exact=True)
    button.click()
    expect(menu).to_have_count(0)
    button.click()
    expect(menu).to_be_visible()
    page.locator(".reading").click()
    expect(menu).to_have_count(0)


def test_item_of_a_menu_selects_all_leaves(desk: Desk, menu: Locator, page: Page) -> None:
    page.keyboard.press("Enter")
    expect(menu).to_have_count(0)
    expect(desk.tree.locator("[aria-selected=true]")).to_have_count(2)


@pytest.mark.parametrize("size", [(390, 844), (390, 320), (1440, 900)])
def test_menu_at_the_corner_of_a_screen_is_not_clipped(
    desk: Desk, page: Page, size: tuple[int, int]
) -> None:
    desk.open_loom(n=2)
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    if width < 800:
        page.get_by_role("tab", name="Tree", exact=True).click()
    row = desk.row(2).bounding_box()
    assert row
    desk.row(2).click(button="right", position={"x": row["width"] - 20, "y": row["height"] / 2})
    menu = page.get_by_role("menu", name="Node")
    at = menu.bounding_box()
    assert at
    assert at["x"] >= 0
    assert at["x"] + at["width"] <= width
    assert at["y"] >= 0
    assert at["y"] + at["height"] <= height
    page.keyboard.press("End")
    last = menu.get_by_role("menuitem").last
    expect(last).to_be_focused()
    expect(last).to_be_in_viewport()
    last.click(trial=True)  # nothing lies above it
    assert_accessible(page)


def test_arrow_keys_choose_tabs_and_name_their_panel(desk: Desk, page: Page) -> None:
    desk.open_loom(n=2)
    tabs = page.get_by_role("tablist", name="The tree as")
    tabs.get_by_role("tab", name="Outline").focus()
    for key, name in (("ArrowRight", "Map"), ("ArrowRight", "Outline"), ("End", "Map")):
        page.keyboard.press(key)
        tab = tabs.get_by_role("tab", name=name)
        expect(tab).to_be_focused()
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        expect(tabs.locator("[tabindex='0']")).to_have_text(name)
    assert_accessible(page)


def test_arrow_keys_after_a_click_on_a_tab_of_the_tree_move_in_the_tree(
    desk: Desk, page: Page
) -> None:
    desk.open_loom(n=2)
    page.get_by_role("tab", name="Map").click()
    desk.press("ArrowRight")
    desk.until(lambda: desk.current == 1, "the first child is current")
    expect(page.get_by_role("tab", name="Map")).to_have_attribute("aria-selected", "true")


def test_title_of_a_label_is_shown_when_a_key_focuses_its_field(desk: Desk, page: Page) -> None:
    desk.open_loom(n=1)
    tip = page.locator(".tooltip")
    page.keyboard.press("Shift")  # the last input is the keyboard's
    page.get_by_role("radio", name="This loom").focus()
    expect(tip).to_have_attribute("data-text", "Changes apply to this loom.")
    expect(tip).to_be_visible()
