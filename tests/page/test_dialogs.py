"""Keys of the page do nothing behind an open dialog, and a dialog keeps the focus."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page
UI = Path(__file__).parents[2] / "page" / "src" / "ui"
# Each of these changes the loom, the current node or the page while the tree has the focus.
KEYS = ("Delete", "Backspace", "g", "x", "m", "e", "ArrowLeft", "v")
BLUR = "document.activeElement.blur()"
REMOVE_FOCUSED = """() => {
  const button = document.createElement('button')
  document.querySelector('dialog[open] .body').append(button)
  button.focus()
  button.remove()
}"""


def command(desk: Desk, name: str) -> None:
    desk.press("Control+k")
    desk.page.get_by_role("combobox", name="Type a command").fill(name)
    desk.press("Enter")


def remove_many(desk: Desk) -> None:
    """Remove a node with so many below it that the page asks first."""
    texts = [f" and {number}" for number in range(25)]
    desk.ask("POST", desk.of("/nodes"), json={"parent": 4, "texts": texts})
    desk.wait_known()
    desk.press("Delete")


def grow_with(desk: Desk) -> None:
    desk.add_model("org/Second-Instruct")
    desk.reload()
    desk.until(lambda: desk.current == 4, "the page is loaded")
    desk.press("w")


# By the source file of each dialog: how to open it.
DIALOGS: dict[str, Callable[[Desk], object]] = {
    "Compare": lambda desk: desk.press("="),
    "Confirm": remove_many,
    "Export": lambda desk: desk.press("Control+s"),
    "MemoryDialog": lambda desk: command(desk, "Memory:"),
    "GrowWith": grow_with,
    "Help": lambda desk: desk.press("?"),
    "Import": lambda desk: desk.press("i"),
    "Appearance": lambda desk: desk.press("T"),
    "Looms": lambda desk: desk.press("o"),
    "Models": lambda desk: desk.press("M"),
    "Palette": lambda desk: desk.press("Control+k"),
    "StartRun": lambda desk: desk.press("R"),
}


def test_every_dialog_of_the_page_is_tested() -> None:
    sources = {path.stem for path in UI.rglob("*.tsx") if re.search(r"<Dialog\b", path.read_text())}
    assert set(DIALOGS) == sources


def tree(desk: Desk) -> dict[int, Any]:
    kept = ("parent", "children", "text")
    return {number: {key: node[key] for key in kept} for number, node in desk.nodes().items()}


def check_keys_do_nothing(desk: Desk, keys: tuple[str, ...] = KEYS) -> None:
    """Press keys, close the dialog, and check that only the next key has an effect."""
    dialog = desk.page.get_by_role("dialog")
    before, n_requests = tree(desk), len(desk.watch.requested)
    desk.press(*keys)
    expect(dialog).to_have_count(1)
    assert desk.page.evaluate("document.activeElement.closest('dialog') !== null")
    desk.press("Escape")
    expect(dialog).to_have_count(0)
    desk.press("b")
    desk.until(lambda: desk.nodes()[4].get("bookmark") is not None, "node 4 has a bookmark")
    assert tree(desk) == before
    assert desk.current == 4
    expect(desk.page.locator(".editor, .map-canvas")).to_have_count(0)
    assert not [each for each in desk.watch.requested[n_requests:] if each.endswith("/generate")]


@pytest.mark.parametrize("name", DIALOGS)
def test_keys_do_nothing_behind_a_dialog_without_focus(bush: Desk, page: Page, name: str) -> None:
    bush.row(4).click()
    DIALOGS[name](bush)
    expect(page.get_by_role("dialog")).to_have_count(1)
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.evaluate(BLUR)
    bush.press(*KEYS)
    page.evaluate(REMOVE_FOCUSED)
    check_keys_do_nothing(bush)


# Buttons that are removed or disabled by their own click


def remove_loom(desk: Desk) -> Locator:
    other = desk.ask("POST", "/looms", json={"prompt": "A third loom."})
    desk.press("o")
    return desk.page.get_by_role("button", name=f"Remove {other['title']}", exact=True)


def free_memory(desk: Desk) -> Locator:
    """Free the KV cache of another loom."""
    mine = desk.loom
    desk.make("Another story about an owl.")
    desk.grow(n=1, max_tokens=2)
    title = desk.loom["title"]
    desk.loom = mine
    command(desk, "Memory:")
    row = desk.page.locator("dialog dt", has_text=title)
    return row.locator("xpath=following-sibling::dd[3]").get_by_role("button")


def unpin(desk: Desk) -> Locator:
    desk.ask("POST", desk.of("/nodes/1/kv"), json={"op": "pin"})
    command(desk, "Memory:")
    return desk.page.get_by_role("button", name="Unpin")


def unload_model(desk: Desk) -> Locator:
    desk.add_model("org/Third")
    desk.reload()
    desk.until(lambda: desk.current == 4, "the page is loaded")
    desk.press("M")
    return desk.page.locator("dialog .models li", has_text="Third").get_by_role("button")


def load_model(desk: Desk) -> Locator:
    desk.watch.allow("status of 4")
    desk.press("M")
    desk.page.locator("#model-source").fill("absent/model")
    return desk.page.locator(".model-load button[type=submit]")


def import_text(desk: Desk) -> Locator:
    desk.press("i")
    form = desk.page.locator(".import-form")
    form.locator("textarea").fill("Once upon a time")
    return form.get_by_role("button", name="Import", exact=True)


@pytest.mark.parametrize(
    "show", [remove_loom, free_memory, unpin, unload_model, load_model, import_text]
)
def test_keys_do_nothing_after_a_click_that_removes_or_disables_its_button(
    bush: Desk, page: Page, show: Callable[[Desk], Locator]
) -> None:
    bush.row(4).click()
    button = show(bush)
    button.click()
    expect(page.locator("dialog .body")).to_be_focused()
    check_keys_do_nothing(bush)
