"""The author's note of a loom is edited in the page and changes what the model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_long_author_note_is_cut_at_its_end_only(desk: Desk, page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    desk.make("Tell me a story.", template=True)
    note = {"text": "Always mention the weather and the sea, however short it is.", "depth": 4}
    desk.ask("PATCH", desk.of(), json={"meta": {"author_note": note}})
    page.goto(f"{desk.served.url}/#{desk.loom['name']}")
    line = page.locator("[data-author-note]")
    expect(line).to_contain_text("Author’s note, read before the last 4")
    starts = """(each) => {
      const range = document.createRange()
      range.selectNodeContents(each)
      return range.getBoundingClientRect().left - each.getBoundingClientRect().left
    }"""
    assert line.evaluate(starts) >= 0
    style = line.evaluate("(each) => [getComputedStyle(each).display, each.scrollWidth]")
    assert style[0] == "block"  # text-overflow has no effect on a flex box


def test_author_note_is_saved_shown_and_read_by_the_model(desk: Desk, page: Page) -> None:
    desk.sets(seed=1, n=1, max_tokens=8)
    desk.make("One\nTwo\nThree", template=False)
    desk.ask("PATCH", desk.of(), json={"meta": {"note": "mine"}})
    desk.visit()
    desk.press("g")
    desk.until(lambda: len(desk.nodes()) == 2, "a branch without the note")
    page.get_by_role("tab", name="Loom").click()
    note = page.get_by_role("region", name="Author’s note")
    note.get_by_role("textbox", name="Author’s note").fill("It rains.")
    note.get_by_role("textbox", name="Author’s note").blur()
    expect(page.locator("[data-author-note]")).to_have_text(
        "Author’s note, read before the last 4 lines: It rains."
    )
    note.get_by_label("Lines after it").fill("0")
    note.get_by_label("Lines after it").press("Enter")
    expect(page.locator("[data-author-note]")).to_contain_text("read at the end")
    meta = desk.ask("GET", desk.of())["meta"]
    assert meta["author_note"] == {"text": "It rains.", "depth": 0}
    assert meta["note"] == "mine"
    assert_accessible(page)
    page.evaluate("document.activeElement.blur()")
    desk.press("g")
    desk.until(lambda: len(desk.nodes()) == 3, "a branch with the note")
    desk.wait_grown()
    first, second = desk.nodes()[1]["text"], desk.nodes()[2]["text"]
    assert first != second
    assert "It rains." not in second
    note.get_by_role("textbox", name="Author’s note").fill("")
    note.get_by_role("textbox", name="Author’s note").blur()
    expect(page.locator("[data-author-note]")).to_have_count(0)
    assert "author_note" not in desk.ask("GET", desk.of())["meta"]


def test_undo_and_redo_of_an_author_note_change_what_the_page_shows(desk: Desk, page: Page) -> None:
    desk.make("One\nTwo\nThree", template=False)
    desk.visit()
    page.get_by_role("tab", name="Loom").click()
    field = page.get_by_role("region", name="Author’s note").get_by_role(
        "textbox", name="Author’s note"
    )
    shown = page.locator("[data-author-note]")
    field.fill("It rains.")
    field.blur()
    expect(shown).to_contain_text("It rains.")
    desk.press("u")
    expect(page.get_by_text("Undid: author’s note.")).to_be_visible()
    expect(shown).to_have_count(0)
    expect(field).to_have_value("")
    history = page.get_by_role("region", name="History")
    expect(history).to_contain_text("author’s note changed on the page")
    desk.press("Control+Shift+z")
    expect(page.get_by_text("Redid: author’s note.")).to_be_visible()
    expect(shown).to_contain_text("It rains.")
    expect(field).to_have_value("It rains.")


def test_author_note_that_a_program_sets_is_shown(desk: Desk, page: Page) -> None:
    desk.make("One\nTwo\nThree", template=False)
    desk.visit()
    page.get_by_role("tab", name="Loom").click()
    desk.ask("PATCH", desk.of(), json={"meta": {"author_note": {"text": "It snows."}}})
    expect(page.locator("[data-author-note]")).to_contain_text("It snows.")
