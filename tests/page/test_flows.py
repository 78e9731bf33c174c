"""Interruptions of work in the page: another tab, a lost node, a wrong key."""

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


def expect_toast(desk: Desk, text: str) -> None:
    expect(desk.page.locator(".toasts")).to_contain_text(text)


# What is written


def test_text_written_at_a_removed_node_stays_and_becomes_a_child(bush: Desk, page: Page) -> None:
    bush.press("1", "e")
    area = page.get_by_role("textbox", name="Text of the node")
    area.press_sequentially(", mine")
    bush.ask("DELETE", bush.of("/nodes/1"))
    area = page.get_by_role("textbox", name="Continuation")
    expect(area).to_have_value(" was old, mine")
    expect(area).to_be_focused()  # what is typed now is no command
    page.keyboard.type(" xX")
    expect(page.get_by_text("was removed")).to_be_visible()
    assert_accessible(page)
    assert set(bush.nodes()) == {0, 2, 3}
    bush.ask("POST", bush.of("/undo"))
    expect(bush.row(1)).to_be_visible()
    expect(area).to_be_focused()  # nor when it comes back
    page.keyboard.press("Shift+Enter")
    bush.until(lambda: len(bush.nodes()) == 9, "it is a child of what is there")
    child = max(bush.nodes())
    assert bush.nodes()[child]["text"] == " was old, mine xX"
    assert bush.nodes()[child]["parent"] == 0
    at(bush, child)


def test_unfinished_text_of_a_node_is_there_on_return(bush: Desk, page: Page) -> None:
    bush.press("1", "Enter")
    page.get_by_role("textbox", name="Continuation").fill(" half")
    bush.row(4).click()
    at(bush, 4)
    expect(page.get_by_role("button", name="Grow 4 branches").first).to_be_visible()
    bush.press("ArrowLeft")
    at(bush, 1)
    page.get_by_text(re.compile("Draft of a text, 5 ")).wait_for()
    bush.press("ArrowDown")  # nothing catches the keys on the way
    at(bush, 2)
    bush.press("ArrowUp", "Enter")
    expect(page.get_by_role("textbox", name="Continuation")).to_have_value(" half")


def test_each_tab_keeps_its_unfinished_text(bush: Desk, page: Page) -> None:
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


def test_note_stays_in_its_field_when_other_nodes_change(bush: Desk, page: Page) -> None:
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


def test_undo_selects_the_earlier_node_and_reports_its_effect(bush: Desk) -> None:
    bush.row(4).click()
    bush.press("Delete")
    at(bush, 5)
    bush.press("u")
    at(bush, 4)
    expect_toast(bush, "Undid: removal of 3 nodes.")
    bush.press("Control+Shift+z")
    at(bush, 5)
    expect_toast(bush, "Redid: removal of 3 nodes.")
    bush.press(
        "ArrowRight", "ArrowLeft", "ArrowDown", "r", "u"
    )  # the current node has changed, so undo does not move it
    expect_toast(bush, "Undid: removal of 3 nodes.")
    assert bush.current == 0


def test_undo_is_offered_for_the_last_change_only(bush: Desk, page: Page) -> None:
    offered = page.locator(".toasts").get_by_role("button", name="Undo")
    bush.row(2).click()
    bush.press("Delete")
    expect(offered).to_be_visible()
    bush.press("b")
    expect(offered).to_have_count(0)
    bush.press("Delete")
    expect(offered).to_be_visible()
    bush.ask("POST", bush.of("/nodes"), json={"parent": 0, "text": " of another client"})
    expect(offered).to_have_count(0)


def test_undo_without_changes_reports_nothing_to_undo(desk: Desk) -> None:
    desk.watch.allow("409")
    desk.open_loom(template=False)
    desk.press("u")
    expect_toast(desk, "There is nothing to undo")


def test_undo_restores_a_removed_growing_node_with_its_text(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.open_loom()
    gate.hold(20)
    first, second = desk.grow(n=2, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lane(first).inner_text()) > 60, "text")
    desk.press("1", "Delete")

    def is_removed() -> bool:
        gate.hold(1)  # a branch ends with a step after the request to end it
        return "Removed" in page.locator(".toasts").inner_text()

    desk.until(is_removed, "it is removed")
    expect_toast(desk, "Removed 1 node")
    at(desk, second)
    assert desk.nodes()[second]["growing"]
    desk.press("u")
    at(desk, first)
    assert desk.nodes()[first]["text"].strip()
    desk.press("ArrowLeft", "x")
    gate.open()
    expect_toast(desk, "Removed 2 nodes")
    desk.press("u")
    desk.until(lambda: set(desk.nodes()) == {0, first, second}, "both are back")


# Branches that fail


@pytest.mark.parametrize("late", [(), ("answers",)])
def test_failed_branches_are_kept_as_nodes_and_retried_by_key(
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
    gate.open()
    desk.wait_known()
    assert desk.nodes()[grown[1]]["text"].strip() == text.strip()
    expect(third).to_contain_text("the device was lost")  # the others stay
    desk.press("f")
    expect(third).to_have_count(0)
    desk.until(lambda: len(desk.nodes()) == 6, "two more grow")
    desk.wait_grown()


def test_a_failed_branch_has_its_text_and_its_reason_after_a_reload(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.watch.allow("")
    desk.open_loom()
    gate.hold(20)
    (node,) = desk.grow(n=1, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lane(node).inner_text()) > 40, "text")
    gate.fail("the device was lost")
    expect(desk.lane(node)).to_contain_text("the device was lost")
    gate.open()
    page.reload()
    child = page.get_by_role("list", name="Children").locator(f"[data-child='{node}']")
    expect(child).to_contain_text("the device was lost")
    text = desk.nodes()[node]["text"]
    assert text
    expect(child).to_contain_text(text.strip()[:20])


# Keys


def test_keys_of_a_focused_control_start_no_command(desk: Desk, page: Page) -> None:
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


def test_repeating_key_moves_each_time_but_removes_once(bush: Desk, page: Page) -> None:
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


def test_digits_select_children_while_the_token_table_is_hidden(desk: Desk, page: Page) -> None:
    first, second = desk.open_loom(n=2)
    desk.press("t")
    expect(page.locator(".chances kbd").first).to_be_visible()
    desk.press("Control+]", "2")
    at(desk, second)
    assert set(desk.nodes()) == {0, first, second}


def test_escape_stops_branches_only_when_pressed_twice(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom()
    gate.hold(10)
    desk.grow(n=2, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lanes) == 2, "two lanes")
    desk.press("Escape")
    expect_toast(desk, "again stops all")
    assert desk.ask("GET", desk.of())["growing"] == 2
    desk.press("Escape", "Escape")  # twice, should too long have passed since the first one
    expect(page.locator(".toasts")).not_to_contain_text("again")
    gate.open()
    desk.wait_grown()
    assert {node["finish_reason"] for node in list(desk.nodes().values())[1:]} == {"cancelled"}


def test_commands_on_a_growing_branch_report_that_it_grows(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.watch.allow("409")
    desk.open_loom()
    gate.hold(10)
    desk.grow(n=1, wait=False, **desk.endless())
    desk.until(lambda: len(desk.lanes) == 1, "a lane")
    for key in ("g", "m", "e"):
        desk.press("1", key)
        expect_toast(desk, "The node is still growing")
        page.locator(".toasts").get_by_role("button", name="Dismiss").first.click()
    gate.open()
    desk.press("Escape", "Escape")
    desk.wait_grown()


def test_arrow_keys_do_not_leave_a_hoisted_subtree(bush: Desk) -> None:
    bush.row(1).click()
    bush.press("z", "ArrowRight", "z")
    at(bush, 4)
    bush.press("ArrowLeft", "ArrowDown", "[")
    assert bush.current == 4
    bush.page.evaluate("location.hash = location.hash.split('/')[0] + '/5'")
    at(bush, 5)
    expect(bush.row(1)).to_have_attribute("aria-level", "1")  # one step up: that holds it


def test_keys_open_follow_and_remove_bookmarks(bush: Desk, page: Page) -> None:
    bush.press(";")
    expect_toast(bush, "No bookmarks yet.")
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


def test_node_is_moved_by_keys_without_focus_in_the_tree(bush: Desk, page: Page) -> None:
    bush.press("Control+[")
    bush.row(5).wait_for(state="hidden")
    bush.press("1", "2", "y")
    expect(page.get_by_role("region", name="Move a node")).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    bush.press("ArrowLeft", "ArrowDown", "Enter")
    bush.until(lambda: bush.nodes()[5]["parent"] == 2, "it stands there")


def test_node_menu_opens_while_the_tree_is_hidden(bush: Desk, page: Page) -> None:
    bush.press("1", "Control+[", "Shift+F10")
    expect(page.get_by_role("menu", name="Node")).to_be_visible()
    page.get_by_role("menuitem", name="Merge with the parent").wait_for()


def test_pasted_text_stays_after_a_failed_import(desk: Desk, page: Page) -> None:
    desk.watch.allow("400")
    page.goto("/")
    page.get_by_role("button", name="Import").click()
    field = page.get_by_label("Or paste text here")
    field.fill('{"hello": 1}')
    page.get_by_role("button", name="Import", exact=True).last.click()
    expect(page.get_by_role("dialog")).to_contain_text("Unknown file format")
    expect(field).to_have_value('{"hello": 1}')


def test_command_search_knows_words_of_other_programs(bush: Desk, page: Page) -> None:
    for word, command in (("delete", "Remove"), ("redo", "Redo"), ("dark", "Theme")):
        bush.press("Control+k")
        page.keyboard.type(word)
        expect(page.get_by_role("listbox").get_by_role("option").first).to_contain_text(command)
        bush.press("Escape")


# The browser's own ways


def test_back_and_forward_open_the_looms_of_the_history(bush: Desk, page: Page) -> None:
    first = bush.loom["title"]
    bush.make(template=False, prompt="Another")
    bush.visit()
    second = bush.loom["title"]
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


def test_export_of_a_hoisted_subtree_has_only_its_nodes(bush: Desk, page: Page) -> None:
    bush.row(1).click()
    bush.press("z", "Control+s")
    page.get_by_label("Format", exact=True).select_option("markdown")
    page.locator("label:has(input[value=tree])").click()
    preview = page.get_by_role("region", name="Preview")
    expect(preview).to_contain_text("and tall")
    expect(preview).not_to_contain_text("slept")


# Chat


def test_copied_python_of_a_message_has_its_text(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    reply = desk.ask("POST", desk.of("/nodes"), json={"parent": first, "message": "And then?"})
    desk.visit(reply["added"][0]["node"])
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.get_by_role("tab", name="Node").click()
    page.get_by_role("heading", name="Node 2").wait_for()
    page.get_by_role("button", name="Copy as Python").click()
    desk.until(lambda: page.evaluate("window.copied"), "it is copied")
    assert 'message="And then?"' in page.evaluate("window.copied")


def test_command_for_a_panel_focuses_that_panel(bush: Desk, page: Page) -> None:
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
