"""Looms in the page: brought, taken along, named, removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def test_exported_loom_is_imported_with_equal_texts(desk: Desk, page: Page, tmp_path: Path) -> None:
    desk.open_loom(n=3, max_tokens=10)
    desk.grow(1, n=2, max_tokens=6)
    desk.press("Control+s")
    dialog = page.get_by_role("dialog", name="Export")
    dialog.get_by_label("Format").select_option("json")
    with page.expect_download() as coming:
        dialog.get_by_role("button", name="Save").click()
    file = tmp_path / coming.value.suggested_filename
    coming.value.save_as(file)
    assert json.loads(file.read_text("utf-8"))["format"] == "weft.loom"
    before = {node["id"]: node for node in desk.nodes().values()}
    page.goto("/")
    page.get_by_role("heading", name="Start with a prompt").wait_for()
    page.get_by_role("button", name="Import").click()
    page.locator("input[type=file]").set_input_files(file)
    report = page.get_by_role("dialog", name="Import")
    expect(report).to_contain_text("6 nodes in 1 loom")
    report.get_by_role("link").click()
    desk.open_named()
    expect(desk.tree.get_by_role("treeitem")).to_have_count(6)
    after = list(desk.nodes().values())
    texts = sorted(node["text"] for node in after)
    assert texts == sorted(node["text"] for node in before.values())


def test_path_is_exported_as_plain_text(desk: Desk, page: Page, tmp_path: Path) -> None:
    (node,) = desk.open_loom("Once upon a", template=False, n=1, max_tokens=10)
    desk.press("ArrowRight", "Control+s")
    dialog = page.get_by_role("dialog", name="Export")
    dialog.get_by_label("Format").select_option("text")
    with page.expect_download() as coming:
        dialog.get_by_role("button", name="Save").click()
    coming.value.save_as(tmp_path / "path.txt")
    text = (tmp_path / "path.txt").read_text("utf-8")
    assert text.strip() == ("Once upon a" + desk.nodes()[node]["text"]).strip()


def test_dropped_loomsidian_file_is_imported_and_an_unknown_one_rejected(
    desk: Desk, page: Page
) -> None:
    page.goto("/")
    page.get_by_role("heading", name="Start with a prompt").wait_for()
    nodes = {
        "a": {"text": "The keeper", "parentId": None},
        "b": {"text": " slept", "parentId": "a", "unread": True},
        "c": {"text": " woke", "parentId": "a", "bookmarked": True},
    }
    file = {"state": {"note.md": {"current": "b", "hoisted": [], "nodes": nodes}}, "settings": {}}
    drop(page, "data.json", json.dumps(file))
    report = page.get_by_role("dialog", name="Import")
    expect(report).to_contain_text("Loomsidian notes")
    expect(report).to_contain_text("3 nodes in 1 loom")
    desk.press("Escape")
    expect(report).to_be_hidden()
    desk.watch.allow("status of 4")
    drop(page, "no.json", '{"who": "knows"}')
    expect(report).to_contain_text("no.json")
    expect(report.locator(".error")).to_be_visible()


def drop(page: Page, name: str, text: str) -> None:
    page.evaluate(
        """([name, text]) => {
          const dataTransfer = new DataTransfer()
          dataTransfer.items.add(new File([text], name, { type: "application/json" }))
          const on = document.querySelector("main") ?? document.body
          for (const kind of ["dragenter", "dragover", "drop"])
            on.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }))
        }""",
        [name, text],
    )


def test_loom_is_renamed_listed_removed_and_restored(desk: Desk, page: Page) -> None:
    desk.open_loom(n=1, max_tokens=4)
    page.get_by_role("heading", level=1).get_by_role("button").dblclick()
    field = page.get_by_role("textbox", name="Name of the loom")
    field.fill("foxes & owls 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("foxes & owls 1")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_contain_text("foxes & owls 1")
    desk.press("o")
    looms = page.get_by_role("dialog", name="Looms")
    expect(looms).to_contain_text("foxes & owls 1")
    desk.watch.allow("status of 404 .*/(runs|events)")  # it may still be read when it goes
    looms.get_by_role("button", name="Remove").first.click()
    page.get_by_role("status").get_by_role("button", name="Undo").click()
    desk.until(
        lambda: "foxes & owls 1" in [each["title"] for each in desk.ask("GET", "/looms")["data"]],
        "it is back",
    )


def test_title_of_a_new_loom_is_shown_as_typed_and_not_in_its_address(
    desk: Desk, page: Page
) -> None:
    title = "My story: part two!"
    desk.sets(n=1, max_tokens=4)
    page.goto("/")
    page.locator(".loom-name summary").click()
    page.get_by_role("textbox", name="Name of the loom").fill(title)
    page.get_by_role("textbox", name="Start with a prompt").press("Control+Enter")
    desk.open_named()
    assert (desk.loom["name"], desk.loom["title"]) == ("story-part-two", title)
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text(title)
    expect(page).to_have_title(f"{title} · Weft")
    assert "#story-part-two" in page.url
    desk.press("o")
    looms = page.get_by_role("dialog", name="Looms")
    looms.get_by_role("searchbox").fill("part two!")
    expect(looms.get_by_role("list", name="Looms").get_by_role("listitem")).to_have_count(1)
    expect(looms.get_by_role("link")).to_contain_text(title)
    looms.get_by_role("button", name=f"Rename {title}").click()
    field = looms.get_by_role("textbox", name=f"New name of {title}")
    field.fill("My story: part three?")
    field.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("My story: part three?")
    desk.until(lambda: "#story-part-three" in page.url, "the address has the new name")
    expect(field).to_have_count(0)
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Loom").click()
    address = page.locator(".fact", has=page.locator("dt", has_text="Address"))
    expect(address.locator("dd")).to_have_text("story-part-three")


def test_address_of_a_missing_loom_shows_its_name(desk: Desk, page: Page) -> None:
    desk.watch.allow("status of 404")
    page.goto("/#nobody-wrote-this")
    expect(page.get_by_text("nobody-wrote-this").first).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_page_sends_requests_only_to_its_server(desk: Desk, page: Page) -> None:
    """Names of other hosts do not resolve in this browser, and the page is complete."""
    desk.open_loom(n=2, max_tokens=8)
    for key in ("ArrowRight", "p", "v", "v", "?", "Escape", "Control+k", "Escape", "o", "Escape"):
        desk.press(key)
        page.wait_for_timeout(30)
    assert len(desk.watch.requested) > 10
    assert all(url.startswith(f"{desk.served.url}/") for url in desk.watch.requested)
    fonts = page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].filter((f) => f.status === 'loaded')"
        ".map((f) => f.family.replaceAll('\"', '')))"
    )
    assert {"Inter", "Source Serif 4"} <= set(fonts)
