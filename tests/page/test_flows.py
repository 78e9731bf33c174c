"""What people come to in the middle of their work: another tab, a lost node, a wrong key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def at(desk: Desk, node: int) -> None:
    desk.until(lambda: desk.current == node, f"node {node} is the current one")


def told(desk: Desk, text: str) -> None:
    expect(desk.page.locator(".toasts")).to_contain_text(text)


# What is written


def test_what_is_written_at_a_node_that_goes_stays_in_ones_hands(bush: Desk, page: Page) -> None:
    bush.press("1", "e")
    area = page.get_by_role("textbox", name="Text of the node")
    area.press_sequentially(", mine")
    bush.ask("DELETE", bush.of("/nodes/1"))
    area = page.get_by_role("textbox", name="What comes next")
    expect(area).to_have_value(" was old, mine")
    expect(area).to_be_focused()  # what is typed now is no command
    page.keyboard.type(" xX")
    expect(page.get_by_text("was removed meanwhile")).to_be_visible()
    assert_accessible(page)
    assert set(bush.nodes()) == {0, 2, 3}
    bush.ask("POST", bush.of("/undo"))
    expect(bush.row(1)).to_be_visible()
    expect(area).to_be_focused()  # nor when it comes back
    page.keyboard.press("Shift+Enter")
    bush.until(lambda: len(bush.nodes()) == 9, "it is a child of what is there")
    made = max(bush.nodes())
    assert bush.nodes()[made]["text"] == " was old, mine xX"
    assert bush.nodes()[made]["parent"] == 0
    at(bush, made)


def test_who_goes_elsewhere_finds_the_text_where_it_was_left(bush: Desk, page: Page) -> None:
    bush.press("1", "Enter")
    page.get_by_role("textbox", name="What comes next").fill(" half")
    bush.row(4).click()
    at(bush, 4)
    expect(page.get_by_role("button", name="Grow 4 branches").first).to_be_visible()
    bush.press("ArrowLeft")
    at(bush, 1)
    page.get_by_text("A text of 5 letters waits here").wait_for()
    bush.press("ArrowDown")  # nothing catches the keys on the way
    at(bush, 2)
    bush.press("ArrowUp", "Enter")
    expect(page.get_by_role("textbox", name="What comes next")).to_have_value(" half")


def test_each_tab_keeps_what_is_written_in_it(bush: Desk, page: Page) -> None:
    bush.press("1", "e")
    page.get_by_role("textbox", name="Text of the node").fill("of the first tab")
    other = page.context.new_page()
    other.goto(page.url.partition("#")[0] + f"#{bush.loom['name']}/2")
    expect(other.get_by_role("treeitem").first).to_be_visible()
    other.keyboard.press("e")
    other.get_by_role("textbox", name="Text of the node").fill("of the other")
    for tab, text in ((page, "of the first tab"), (other, "of the other")):
        tab.reload()
        expect(tab.get_by_role("textbox", name="Text of the node")).to_have_value(text)


def test_a_note_is_not_taken_from_who_writes_it(bush: Desk, page: Page) -> None:
    page.get_by_role("tab", name="Node").click()
    bush.press("1")
    note = page.get_by_label("Note", exact=True)
    expect(note).to_be_enabled()
    note.press_sequentially("half a no")
    bush.ask("POST", bush.of("/nodes"), json={"parent": 3, "text": " elsewhere"})
    expect(page.get_by_role("contentinfo")).to_contain_text("9 nodes")
    expect(note).to_have_value("half a no")
    note.press_sequentially("te")
    bush.row(2).click()  # leaving it saves it, wherever one goes

    def kept() -> bool:
        return bush.ask("GET", bush.of("/nodes/1"), params={"fields": "meta"})["meta"].get(
            "note"
        ) == ("half a note")

    bush.until(kept, "the note")
    expect(note).to_have_value("")
    page.get_by_role("tab", name="Loom", exact=True).click()
    page.get_by_label("Notes on the loom").press_sequentially("of all")
    bush.ask("POST", bush.of("/nodes"), json={"parent": 3, "text": " more"})
    expect(page.get_by_role("contentinfo")).to_contain_text("10 nodes")
    expect(page.get_by_label("Notes on the loom")).to_have_value("of all")


# Undo


def test_undo_leads_back_to_where_one_stood_and_says_what_it_did(bush: Desk) -> None:
    bush.row(4).click()
    bush.press("Delete")
    at(bush, 5)
    bush.press("u")
    at(bush, 4)
    told(bush, "Undone: 3 nodes are back.")
    bush.press("Control+Shift+z")
    at(bush, 5)
    told(bush, "Done again: 3 nodes are gone.")
    bush.press("ArrowRight", "ArrowLeft", "ArrowDown", "r", "u")  # somebody has moved: who stays
    told(bush, "Undone: 3 nodes are back.")
    assert bush.current == 0


def test_an_undo_is_offered_for_the_last_change_only(bush: Desk, page: Page) -> None:
    offered = page.locator(".toasts").get_by_role("button", name="Undo")
    bush.row(2).click()
    bush.press("Delete")
    expect(offered).to_be_visible()
    bush.press("b")
    expect(offered).to_have_count(0)
    bush.press("Delete")
    expect(offered).to_be_visible()
    bush.ask("POST", bush.of("/nodes"), json={"parent": 0, "text": " of somebody else"})
    expect(offered).to_have_count(0)


def test_when_nothing_is_left_to_undo_that_is_said(desk: Desk) -> None:
    desk.watch.allow("409")
    desk.open_loom(template=False)
    desk.press("u")
    told(desk, "There is nothing to undo")


def test_what_grows_is_removed_with_what_it_has_and_brought_back(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.open_loom()
    gate.hold(20)
    first, second = desk.grow(n=2, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lane(first).inner_text()) > 60, "text")
    desk.press("1", "Delete")

    def is_told() -> bool:
        gate.hold(1)  # a branch ends with a step that comes after the wish to end it
        return "Removed" in page.locator(".toasts").inner_text()

    desk.until(is_told, "it is removed")
    told(desk, "Removed 1 node")
    at(desk, second)
    assert desk.nodes()[second]["growing"]
    desk.press("u")
    at(desk, first)
    assert desk.nodes()[first]["text"].strip()
    desk.press("ArrowLeft", "x")
    gate.open()
    told(desk, "Removed 2 nodes")
    desk.press("u")
    desk.until(lambda: set(desk.nodes()) == {0, first, second}, "both are back")


# Branches that fail


@pytest.mark.parametrize("late", [(), ("answers",)])
def test_what_failed_is_read_kept_and_grown_again_by_keys(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.watch.allow("")
    desk.sets(n=3, max_tokens=8)
    desk.open_loom()
    gate.hold(40)
    grown = desk.grow(n=3, wait=False, **desk.endless())
    desk.until(lambda: all(len(desk.lane(each).inner_text()) > 60 for each in grown), "text")
    gate.fail("the device was lost")
    first, second, third = map(desk.lane, grown)
    expect(first).to_contain_text("the device was lost")
    text = second.locator(".lane-text p").inner_text()
    first.get_by_role("button", name="Dismiss").click()
    expect(first).to_have_count(0)
    second.get_by_role("button", name="Keep").focus()
    gate.open()
    desk.press("Enter")
    desk.until(lambda: len(desk.nodes()) == 2, "what it had is a node")
    assert desk.nodes()[max(desk.nodes())]["text"].strip() == text.strip()
    expect(third).to_contain_text("the device was lost")  # the others stay
    desk.press("f")
    expect(third).to_have_count(0)
    desk.until(lambda: len(desk.nodes()) == 3, "one more grows in its place")
    desk.wait_grown()


# Keys


def test_keys_of_a_control_stay_its_own(desk: Desk, page: Page) -> None:
    page.goto("/")
    chat = page.get_by_role("radio", name="Chat")
    chat.focus()
    desk.press("ArrowRight")
    expect(page.get_by_role("radio", name="Raw text")).to_be_checked()
    desk.press("ArrowLeft")
    expect(chat).to_be_checked()
    (first,) = desk.open_loom(n=1)
    page.get_by_role("tab", name="Tokens").click()
    ahead = page.get_by_role("checkbox")
    ahead.focus()
    desk.press("Space")
    expect(ahead).to_be_checked()
    assert set(desk.nodes()) == {0, first}  # a blank grows nothing here


def test_a_key_that_is_held_steps_and_does_nothing_else_twice(bush: Desk, page: Page) -> None:
    keyboard = page.keyboard
    bush.row(5).click()
    for _ in range(4):  # as it is without going up in between
        keyboard.down("Delete")
    keyboard.up("Delete")
    at(bush, 4)
    page.wait_for_timeout(200)
    assert set(bush.nodes()) == {0, 1, 2, 3, 4, 6, 7}
    bush.press("r", "1")
    for _ in range(3):
        keyboard.down("j")
    keyboard.up("j")
    at(bush, 3)


def test_what_cannot_be_seen_takes_no_digits(desk: Desk, page: Page) -> None:
    first, second = desk.open_loom(n=2)
    desk.press("t")
    expect(page.locator(".chances kbd").first).to_be_visible()
    desk.press("Control+]", "2")
    at(desk, second)
    assert set(desk.nodes()) == {0, first, second}


def test_escape_asks_again_before_it_stops_what_grows_elsewhere(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.open_loom()
    gate.hold(10)
    desk.grow(n=2, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lanes) == 2, "two lanes")
    desk.press("Escape")
    told(desk, "again stops all")
    assert desk.ask("GET", desk.of())["growing"] == 2
    desk.press("Escape", "Escape")  # twice, should too long have passed since the first one
    expect(page.locator(".toasts")).not_to_contain_text("again")
    gate.open()
    desk.wait_grown()
    assert {node["finish_reason"] for node in list(desk.nodes().values())[1:]} == {"cancelled"}


def test_what_must_wait_for_a_branch_says_so(desk: Desk, page: Page, gate: Gate) -> None:
    desk.watch.allow("409")
    desk.open_loom()
    gate.hold(10)
    desk.grow(n=1, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lanes) == 1, "a lane")
    for key in ("g", "m", "e"):
        desk.press("1", key)
        told(desk, "It grows still")
        page.locator(".toasts").get_by_role("button", name="Dismiss").first.click()
    gate.open()
    desk.press("Escape", "Escape")
    desk.wait_grown()


def test_a_hoisted_subtree_is_left_by_its_key_only(bush: Desk) -> None:
    bush.row(1).click()
    bush.press("z", "ArrowRight", "z")
    at(bush, 4)
    bush.press("ArrowLeft", "ArrowDown", "[")
    assert bush.current == 4
    bush.page.evaluate("location.hash = location.hash.split('/')[0] + '/5'")
    at(bush, 5)
    expect(bush.row(1)).to_have_attribute("aria-level", "1")  # one step up: that holds it


def test_bookmarks_are_a_list_for_keys(bush: Desk, page: Page) -> None:
    bush.press(";")
    told(bush, "No bookmarks yet.")
    for node in (2, 5):
        bush.row(node).click()
        bush.press("b")
        expect(bush.row(node)).to_have_attribute("aria-label", re.compile("bookmarked"))
    bush.press("Control+[", "B")
    marks = page.get_by_role("region", name="Bookmarks")
    expect(marks.get_by_role("listitem").nth(1).get_by_role("button").first).to_be_visible()
    expect(marks.locator(":focus")).to_have_count(1)
    bush.press("ArrowUp", "ArrowUp", "Enter")
    at(bush, 5)  # the first in the order of the tree
    expect(bush.tree).to_be_focused()
    bush.press("B", "B", "Delete")
    expect(marks.get_by_role("listitem")).to_have_count(1)
    bush.press("Escape")
    expect(marks).to_have_count(0)
    assert len(bush.nodes()) == 8


def test_a_node_is_moved_wherever_the_focus_is(bush: Desk, page: Page) -> None:
    bush.press("Control+[")
    bush.row(5).wait_for(state="hidden")
    bush.press("1", "2", "y")
    expect(page.get_by_role("region", name="Move a node")).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    bush.press("ArrowLeft", "ArrowDown", "Enter")
    bush.until(lambda: bush.nodes()[5]["parent"] == 2, "it stands there")


def test_a_nodes_menu_needs_no_tree(bush: Desk, page: Page) -> None:
    bush.press("1", "Control+[", "Shift+F10")
    expect(page.get_by_role("menu", name="Node")).to_be_visible()
    page.get_by_role("menuitem", name="Merge with the parent").wait_for()


def test_what_was_pasted_stays_until_it_is_a_loom(desk: Desk, page: Page) -> None:
    desk.watch.allow("400")
    page.goto("/")
    page.get_by_role("button", name="Import").click()
    field = page.get_by_label("Or paste it here")
    field.fill('{"hello": 1}')
    page.get_by_role("button", name="Import", exact=True).last.click()
    expect(page.get_by_role("dialog")).to_contain_text("No format that is known")
    expect(field).to_have_value('{"hello": 1}')


def test_commands_are_found_by_the_words_of_other_programs(bush: Desk, page: Page) -> None:
    for word, command in (("delete", "Remove"), ("redo", "Do again"), ("dark", "Theme")):
        bush.press("Control+k")
        page.keyboard.type(word)
        expect(page.get_by_role("listbox").get_by_role("option").first).to_contain_text(command)
        bush.press("Escape")


# The browser's own ways


def test_back_and_forward_go_from_loom_to_loom(bush: Desk, page: Page) -> None:
    first = bush.loom["name"]
    bush.make(template=False, prompt="Another")
    bush.visit()
    second = bush.loom["name"]
    expect(page.get_by_role("heading", name=second)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name=first)).to_be_visible()
    bush.press("Control+s")
    expect(page.get_by_role("dialog")).to_be_visible()
    name = f"renamed {bush.loom['id']}"
    bush.ask("PATCH", bush.of(), json={"name": name})
    page.go_forward()
    expect(page.get_by_role("heading", name=name)).to_be_visible()  # it is still that loom
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.go_back()
    expect(page.get_by_role("heading", name=first)).to_be_visible()


def test_what_is_shown_alone_is_what_is_exported(bush: Desk, page: Page) -> None:
    bush.row(1).click()
    bush.press("z", "Control+s")
    page.get_by_label("Format").select_option("markdown")
    page.locator("label:has(input[value=tree])").click()
    preview = page.get_by_role("region", name="Preview")
    expect(preview).to_contain_text("and tall")
    expect(preview).not_to_contain_text("slept")


# Chat


def test_a_message_is_copied_as_a_program_that_says_it(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    made = desk.ask("POST", desk.of("/nodes"), json={"parent": first, "message": "And then?"})
    desk.visit(made["added"][0]["node"])
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.get_by_role("tab", name="Node").click()
    page.get_by_role("heading", name="Node 2").wait_for()
    page.get_by_role("button", name="Copy as Python").click()
    desk.until(lambda: page.evaluate("window.copied"), "it is copied")
    assert 'message="And then?"' in page.evaluate("window.copied")


def test_what_stands_beside_the_text_is_reached_by_name(bush: Desk, page: Page) -> None:
    inside = "document.querySelector('#inspector-panel').contains(document.activeElement)"
    for word, tab in (("temperature", "Generate"), ("curl", "Node"), ("rename", "Loom")):
        bush.press("Control+k")
        page.keyboard.type(word)
        bush.press("Enter")
        expect(page.get_by_role("tab", name=tab, exact=True)).to_have_attribute(
            "aria-selected", "true"
        )
        bush.until(lambda: page.evaluate(inside), f"the focus is in {tab}")
        page.evaluate("document.activeElement.blur()")
