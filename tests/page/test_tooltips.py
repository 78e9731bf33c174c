"""Tooltips: the page shows the `title` of an element on keyboard focus, a tap and a long touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect
from tests.page.hands import Fingers

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page
on_touch_screen = pytest.mark.parametrize("look", [{"has_touch": True}])


def narrow(page: Page, tab: str) -> None:
    """Give the page the width of a phone, and show one of its tabs."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("tab", name=tab, exact=True).first.tap()


def tip_of(page: Page) -> Locator:
    return page.locator(".tooltip")


def expect_title(page: Page, element: Locator) -> None:
    """Expect the tooltip to show the title of an element, inside the screen."""
    tip = tip_of(page)
    expect(tip).to_be_visible()
    expect(tip).to_have_attribute("data-text", element.get_attribute("title") or "no title")
    box, screen = tip.bounding_box(), page.viewport_size
    assert box is not None
    assert screen is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= screen["width"]
    assert box["y"] + box["height"] <= screen["height"]


def middle(element: Locator) -> tuple[float, float]:
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def label_of(page: Page, text: str) -> Locator:
    return page.locator("label.grow", has_text=text).first


@on_touch_screen
def test_tap_on_a_label_shows_its_title_and_a_tap_elsewhere_hides_it(
    desk: Desk, page: Page
) -> None:
    desk.open_loom(n=1)
    narrow(page, "Inspector")
    page.get_by_role("tab", name="Generate").tap()
    label = label_of(page, "Temperature")
    label.tap()
    expect_title(page, label)
    assert_accessible(page)
    page.get_by_role("heading").first.tap()
    expect(tip_of(page)).to_be_hidden()


@on_touch_screen
def test_tap_on_a_disabled_button_shows_why_it_is_disabled(desk: Desk, page: Page) -> None:
    desk.make(template=False, prompt="The keeper")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "texts": [" was old"]})
    desk.visit(1)
    narrow(page, "Inspector")
    page.get_by_role("tab", name="Node", exact=True).tap()
    button = page.get_by_role("button", name="Regenerate exactly")
    expect(button).to_be_disabled()
    expect(button).to_have_attribute("title", "This text was written, not generated.")
    page.touchscreen.tap(*middle(button))
    expect_title(page, button)


@on_touch_screen
def test_tap_on_a_button_acts_without_a_tooltip_and_a_long_touch_shows_its_title(
    desk: Desk, page: Page
) -> None:
    desk.open_loom(n=1)
    narrow(page, "Text")
    page.get_by_role("button", name="Colour by probability").tap()
    expect(page.get_by_role("group", name="Colours by probability")).to_be_visible()
    expect(tip_of(page)).to_be_hidden()
    button = page.locator(".action-bar button[title^='Edit']")
    Fingers(page).send("touchStart", middle(button))
    expect_title(page, button)


def test_title_of_a_button_is_shown_on_keyboard_focus_and_hidden_by_a_key(
    desk: Desk, page: Page
) -> None:
    desk.open_loom(n=1)
    button = page.get_by_role("button", name="Colour by probability")
    page.keyboard.press("Shift")  # the last input is the keyboard's
    button.focus()
    expect_title(page, button)
    page.keyboard.press("Shift")
    expect(tip_of(page)).to_be_hidden()


def test_title_is_hidden_when_the_keyboard_focus_leaves(desk: Desk, page: Page) -> None:
    desk.open_loom(n=1)
    button = page.get_by_role("button", name="Colour by probability")
    page.keyboard.press("Shift")
    button.focus()
    expect_title(page, button)
    button.blur()
    expect(tip_of(page)).to_be_hidden()
