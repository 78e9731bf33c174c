"""Other scripts: right-to-left text, grapheme clusters, input methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page

ARABIC = "كان هناك ثعلب صغير يعيش في الوادي (قرب النهر). قال: «أين أنا؟» وكان عمره 12 سنة."

# Distances of the first and the last two characters of a text from its element's left edge.
_ENDS = """(element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT)
  const texts = []
  for (let text = walker.nextNode(); text; text = walker.nextNode())
    if (text.data.trim()) texts.push(text)
  const place = (text, at) => {
    const range = document.createRange()
    range.setStart(text, at)
    range.setEnd(text, at + 1)
    return range.getBoundingClientRect().left - element.getBoundingClientRect().left
  }
  const last = texts.at(-1)
  const first = texts[0].data.search(/\\S/)
  const end = last.data.trimEnd().length
  return [place(texts[0], first), place(last, end - 2), place(last, end - 1)]
}"""


def test_lane_of_arabic_text_runs_from_right_to_left(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom(template=False)
    gate.hold(400)
    (node,) = desk.grow(n=1, wait=False, max_tokens=200, choices=[ARABIC])
    lane = desk.lane(node).locator(".lane-text p")
    expect(lane).to_contain_text("12 سنة.")
    first, character, stop = lane.evaluate(_ENDS)
    width = lane.evaluate("(each) => each.clientWidth")
    assert first > width - 20  # at the right edge
    assert stop < character  # and the full stop to the left of what it ends
    gate.open()


def test_long_line_is_cut_at_its_end_in_its_own_direction(desk: Desk, page: Page) -> None:
    """The end of a right-to-left line is at the left."""
    desk.make(ARABIC * 3, template=False)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/")

    def starts_in_sight(row: Locator) -> bool:
        first, *_ = row.evaluate(_ENDS)
        return 0 <= first <= row.evaluate("(each) => each.clientWidth")

    row = page.get_by_role("listitem").filter(has_text="ثعلب").first.locator(".prompt")
    expect(row).to_be_visible()
    assert starts_in_sight(row)
    page.set_viewport_size({"width": 1440, "height": 900})
    desk.visit()
    assert starts_in_sight(desk.row(0).locator("[dir=auto]"))


def test_map_writes_each_text_in_its_direction_and_cuts_no_grapheme(desk: Desk, page: Page) -> None:
    page.add_init_script(
        """window.written = new Map()
        const write = CanvasRenderingContext2D.prototype.fillText
        CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
          written.set(text, this.direction)
          return write.call(this, text, ...where)
        }"""
    )
    desk.make("In English first", template=False)
    flags = "\U0001f1eb\U0001f1f7" * 40  # forty flags, four units each
    for text in (" " + ARABIC, " " + flags):
        desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": text})
    desk.visit()
    desk.press("v")
    of_flags = "[...written.keys()].some((each) => each.startsWith('\U0001f1eb'))"
    desk.until(lambda: page.evaluate(of_flags), "the flags are written")
    written: dict[str, str] = page.evaluate("Object.fromEntries(written)")
    (arabic,) = {way for text, way in written.items() if "كان" in text}
    (english,) = {way for text, way in written.items() if text.startswith("In")}
    assert (arabic, english) == ("rtl", "ltr")
    for row in (text for text in written if "\U0001f1eb" in text):
        assert row.rstrip("…").count("\U0001f1eb") == row.count("\U0001f1f7"), row
        assert row.endswith("…")


def test_line_end_mark_follows_the_direction_of_its_line(desk: Desk, page: Page) -> None:
    desk.make("Begin.", template=False)
    body = {"parent": 0, "text": " One line\nسطر جديد\nend"}
    (node,) = desk.ask("POST", desk.of("/nodes"), json=body)["added"]
    desk.visit(node["node"])
    desk.press("p")
    page.get_by_role("button", name="Score").first.click()
    ends = desk.text.locator("[data-space='⏎']")
    expect(ends).to_have_count(2)
    sides = ends.evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each, '::before'))"
        ".map(({ left, right }) => left === '0px' ? 'after' : right === '0px' ? 'before' : '')"
    )
    assert sides == ["after", "before"]


@pytest.mark.parametrize("last", ["isComposing: true", "keyCode: 229"])
def test_keys_of_an_input_method_start_no_command(bush: Desk, page: Page, last: str) -> None:
    """Safari reports the last key of a composition only by its code."""

    def composes(field: Locator, key: str) -> None:
        field.evaluate(
            f"(each, key) => each.dispatchEvent(new KeyboardEvent('keydown', "
            f"{{ key, {last}, bubbles: true, cancelable: true }}))",
            key,
        )

    bush.press("/")
    field = page.get_by_role("searchbox", name="Search")
    field.fill("o")
    for key in ("Enter", "ArrowDown", "Escape"):
        composes(field, key)
        expect(field).to_be_focused()
        assert bush.current == 0
    bush.press("Escape", "Control+k")
    field = page.get_by_role("combobox", name="Type a command")
    field.fill("Map")
    composes(field, "Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
