"""The page by keyboard alone, on screens of all sizes, and with and without motion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page
LOOKS: dict[str, dict[str, Any]] = {
    "1920 px, dark": {"viewport": {"width": 1920, "height": 1080}, "color_scheme": "dark"},
    "200 %": {"viewport": {"width": 720, "height": 450}, "device_scale_factor": 2},
    "390 px": {"viewport": {"width": 390, "height": 844}},
    "motion": {"reduced_motion": "no-preference"},
}
# Records the durations in ms of all animations and transitions that start.
RECORD_MOTION = """(() => {
  window.motionMs = []
  const animate = Element.prototype.animate
  Element.prototype.animate = function (frames, options) {
    window.motionMs.push(options.duration)
    return animate.call(this, frames, options)
  }
  const record = ({ target }) => {
    for (const each of target.getAnimations())
      window.motionMs.push(each.effect.getComputedTiming().duration)
  }
  addEventListener('animationstart', record, true)
  addEventListener('transitionrun', record, true)
})()"""
IS_STILL = """() => document.getAnimations().every(
  (each) => each.playState !== 'running' || each.effect.getTiming().iterations === Infinity)"""


def tab_to(page: Page, control: Locator) -> None:
    """Press Tab until a control has the focus."""
    for _ in range(60):
        if control.evaluate("each => each === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"Tab does not reach {control}")


def check(page: Page) -> None:
    if page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches"):
        assert_accessible(page)  # colours of an element that fades in have no fixed contrast
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def current(desk: Desk) -> int:
    """Return the last node of the shown text: a narrow screen hides the tree."""
    return int(desk.text.locator("[data-node]").last.get_attribute("data-node") or -1)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_story_is_written_and_edited_by_keyboard_alone(desk: Desk, page: Page) -> None:
    desk.sets(n=3, max_tokens=8, temperature=1.0, seed=3)
    page.goto("/")
    expect(page.locator(".prompt-form button[type=submit]")).to_be_enabled()
    tab_to(page, page.locator(".prompt-form input[value=chat]"))
    desk.press("ArrowRight")
    expect(page.locator(".prompt-form input[value=raw]")).to_be_checked()
    tab_to(page, page.locator(".prompt-form textarea").first)
    desk.press("Control+a")
    page.keyboard.type("The keeper of the light")
    check(page)
    desk.press("Control+Enter")
    desk.open_named()
    desk.until(lambda: len(desk.nodes()) == 4, "three branches")
    desk.wait_known()
    check(page)

    desk.press("2", ".")
    page.locator("[data-card]").wait_for()
    check(page)
    desk.press("Escape", "e")
    expect(page.locator(".editor textarea")).to_be_focused()
    desk.press("Control+a")
    page.keyboard.type(" was old.")
    check(page)
    desk.press("Control+s")
    desk.until(lambda: desk.nodes().get(4, {}).get("text") == " was old.", "a sibling")
    desk.until(lambda: current(desk) == 4, "it is selected")
    desk.press("Enter")
    page.keyboard.type(" He slept.")
    desk.press("Control+Enter")
    desk.until(lambda: desk.nodes().get(5, {}).get("text") == " He slept.", "a child")

    desk.until(lambda: current(desk) == 5, "it is selected")
    desk.press("ArrowLeft")
    desk.until(lambda: current(desk) == 4, "its parent")
    desk.press("Delete")
    desk.until(lambda: set(desk.nodes()) == {0, 1, 2, 3}, "both are removed")
    desk.press("u")
    desk.until(lambda: set(desk.nodes()) == {0, 1, 2, 3, 4, 5}, "both are back")
    desk.wait_known()

    desk.press("r", "=")
    expect(page.locator(".compared > li")).to_have_count(4)
    check(page)
    desk.press("4")
    desk.until(lambda: current(desk) == 4, "the fourth branch")
    desk.press("/")
    page.keyboard.type("slept")
    desk.press("Enter")
    desk.until(lambda: current(desk) == 5, "the hit")
    for key, title in (("Control+s", "Export"), ("o", "Looms"), ("?", "Keyboard shortcuts")):
        desk.press(key)
        dialog = page.get_by_role("dialog", name=title, exact=True)
        expect(dialog).to_be_visible()
        check(page)
        desk.press("Escape")
        expect(dialog).to_have_count(0)


@pytest.mark.parametrize("look", [{"reduced_motion": each} for each in ("no-preference", "reduce")])
def test_motion_explains_changes_unless_it_is_reduced(
    desk: Desk, page: Page, look: dict[str, object]
) -> None:
    page.add_init_script(RECORD_MOTION)
    desk.open_loom("Once upon a time", template=False, n=2, max_tokens=8, seed=3)
    desk.visit(1)
    expect(desk.part(1)).to_be_visible()
    removed = 1

    def fork() -> None:
        desk.press(".", ".")
        page.locator("[data-card] .alternatives button").first.wait_for()
        desk.press("ArrowDown", "Alt+Enter")
        desk.until(lambda: len(desk.nodes()) == 4, "a fork")

    def remove() -> None:
        desk.row(removed).click()
        desk.until(lambda: desk.current == removed, "the node")
        desk.press("Delete")
        desk.until(lambda: removed not in desk.nodes(), "it is removed")
        page.get_by_role("button", name="Undo").first.wait_for()

    def open_dialog() -> None:
        desk.press("?")
        page.get_by_role("dialog").wait_for()

    for change in (fork, remove, open_dialog):
        page.evaluate("window.motionMs.length = 0")
        change()
        if look["reduced_motion"] == "no-preference":
            desk.until(
                lambda: max(page.evaluate("window.motionMs"), default=0) > 0,
                f"{change.__name__} moves",
            )
        desk.until(lambda: page.evaluate(IS_STILL), "the motion has ended")
        expect(page.locator(".reading-motion")).to_have_count(0)
        if look["reduced_motion"] == "reduce":
            assert max(page.evaluate("window.motionMs"), default=0) == 0, change.__name__
        assert_accessible(page)
