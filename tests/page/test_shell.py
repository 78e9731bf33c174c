"""Parts around the panes: dialogs, the gauge, states that prevent growth, tabs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, assert_accessible, expect, watched
from serving import KEY, serving
from weft.service.server import ServerConfig
from weft.service.server.config import ServerLimits

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.page
DIALOGS = {
    "Looms": "Looms",
    "Models": "Models",
    "Memory": "Memory",
    "Export": "Export",
    "Import": "Import",
    "Theme": "Appearance",
    "Keyboard shortcuts": "Keyboard shortcuts",
}


@contextmanager
def at(browser: Browser, look: dict[str, Any] | None = None, **config: Any) -> Iterator[Desk]:
    """A desk of a server of its own, with such settings."""
    with serving(ServerConfig(port=0, **config)) as served:
        with watched(browser, served.url, **(look or {})) as (page, watch):
            yield Desk(served, page, watch)


def command(page: Page, words: str) -> None:
    """Do something by its name."""
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Type a command").fill(words)
    page.keyboard.press("Enter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_every_dialog_opens_by_name_and_is_accessible(
    browser: Browser, served: Any, scheme: Any, width: int
) -> None:
    size = {"width": width, "height": 800}
    with watched(browser, served.url, color_scheme=scheme, viewport=size) as (page, watch):
        desk = Desk(served, page, watch)
        desk.make()
        desk.grow(n=2)
        page.goto(f"/#{desk.loom['name']}")
        page.get_by_role("contentinfo").wait_for()
        for words, title in DIALOGS.items():
            command(page, words)
            dialog = page.get_by_role("dialog", name=title, exact=True)
            dialog.wait_for()
            assert_accessible(page)
            box = dialog.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert page.evaluate("document.activeElement.closest('[role=dialog]') !== null")
            page.keyboard.press("Escape")
            expect(dialog).to_have_count(0)


def test_narrow_screen_has_export_in_its_menu(browser: Browser, served: Any) -> None:
    with watched(browser, served.url, viewport={"width": 390, "height": 800}) as (page, watch):
        desk = Desk(served, page, watch)
        desk.make()
        page.goto(f"/#{desk.loom['name']}")
        page.get_by_role("button", name="More").click()
        page.get_by_role("menuitem", name="Export").click()
        page.get_by_role("dialog", name="Export").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_prompt_is_selected_and_a_sample_replaces_it(desk: Desk, page: Page) -> None:
    page.goto("/")
    field = page.get_by_role("textbox", name="Start with a prompt")
    expect(field).to_be_focused()
    field.evaluate(
        "(it) => it.dataset.selected = it.value.slice(it.selectionStart, it.selectionEnd)"
    )
    expect(field).to_have_attribute("data-selected", "Tell me a story about a fox.")
    page.get_by_role("button", name="Use 4 9 10 13 to make 24.").click()
    expect(field).to_have_value("Use 4 9 10 13 to make 24.")
    page.get_by_role("radio", name="Raw text").check(force=True)
    field.press("Control+Enter")
    desk.open_named()
    assert desk.ask("GET", desk.of())["chat_template_used"] is False


@pytest.mark.parametrize("look", [{"viewport": {"width": 390, "height": 844}}])
def test_hint_on_a_phone_names_no_keys(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=6)
    page.goto(f"/#{desk.make()['name']}")
    page.get_by_role("button", name="Grow 2 branches").first.click()
    note = page.get_by_role("complementary", name="Hint")
    expect(note).to_contain_text("Tap a branch to enter it")
    expect(note).not_to_contain_text("→")


def test_hints_appear_once(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=6)
    desk.open_loom(n=1, max_tokens=4)
    desk.press("g")
    note = page.get_by_role("complementary", name="Hint")
    expect(note).to_contain_text("→ to enter a branch, g to grow, p for probabilities, ? for keys")
    desk.wait_grown()
    desk.press("ArrowRight", "g")
    expect(note).to_contain_text("“Reused” counts tokens that were in the cache")
    note.get_by_role("button").click()
    expect(note).to_have_count(0)
    desk.reload()
    desk.press("g")
    desk.wait_grown()
    expect(note).to_have_count(0)


def test_gauge_shows_reused_tokens_and_forgets_cold_branches(desk: Desk, page: Page) -> None:
    first, second = desk.open_loom("A gauge of its own.", n=2, max_tokens=12)
    page.goto(f"/#{desk.loom['name']}/{first}")
    gauge = page.get_by_role("contentinfo").get_by_role("button", name="Memory")
    expect(gauge).to_contain_text("KV ")
    expect(gauge).to_contain_text("reused ")
    gauge.click()
    dialog = page.get_by_role("dialog", name="Memory")
    expect(dialog).to_contain_text(desk.loom["title"])
    saved = dialog.locator("dt", has_text="Memory without sharing").locator("+ dd")
    expect(saved).to_have_text(re.compile(r"^[\d.]+ [kM]B, [\d.]+ times as much$"))
    before = desk.ask("GET", desk.of("/kv"))
    dialog.get_by_role("button", name="Free unused").click()
    desk.until(lambda: desk.ask("GET", desk.of("/kv"))["bytes"] < before["bytes"], "it is less")
    assert desk.ask("GET", desk.of("/kv"))["hot"] == 2  # the prompt, and the branch one stands in
    assert desk.nodes()[second]["text"]


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_node_is_pinned_and_unpinned_by_command_panel_gauge_and_menu(
    browser: Browser, width: int, scheme: Any
) -> None:
    look = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with at(browser, look, offload="64MiB") as desk:
        page = desk.page
        desk.make("What is to stay here.")
        (first,) = desk.grow(n=1, max_tokens=12)
        page.goto(f"{desk.served.url}/#{desk.loom['name']}/{first}")
        expect(page.get_by_role("article", name="Text of the path")).to_contain_text("to stay")
        toasts = page.locator(".toasts")
        command(page, "pin or unpin")
        expect(toasts).to_contain_text(f"Node {first} is pinned: its path stays in memory.")
        assert [each["node"] for each in desk.ask("GET", desk.of("/kv"))["pinned"]] == [first]
        command(page, "origin of this node")
        panel = page.get_by_role("region", name="KV cache")
        expect(panel).to_contain_text("yes")
        for name in ("Free memory", "Move to host memory"):
            expect(panel.get_by_role("button", name=name)).to_be_disabled()
        assert_accessible(page)
        command(page, "memory: size")
        dialog = page.get_by_role("dialog", name="Memory")
        rows = dialog.get_by_role("region", name="Pinned")
        expect(rows).to_contain_text(f"Node {first}: ")
        assert_accessible(page)
        rows.get_by_role("button", name="Unpin").click()
        expect(rows).to_have_count(0)
        page.keyboard.press("Escape")
        assert desk.ask("GET", desk.of("/kv"))["pinned"] == []
        expect(panel).not_to_contain_text("stays until")
        panel.get_by_role("button", name="Move to host memory").click()
        expect(panel).to_contain_text("in host memory, copied back when needed")
        panel.get_by_role("button", name="Pin", exact=True).click()
        expect(panel).to_contain_text("cached")
        panel.get_by_role("button", name="Unpin").click()
        expect(panel.get_by_role("button", name="Free memory")).to_be_enabled()
        if width > 800:
            desk.row(first).click(button="right")
            page.get_by_role("menuitem", name="Pin or unpin the KV cache of its path").click()
            desk.until(lambda: desk.ask("GET", desk.of("/kv"))["pinned"], "it is pinned")
            toasts.get_by_role("button", name="Undo").last.click()
            desk.until(lambda: not desk.ask("GET", desk.of("/kv"))["pinned"], "it is unpinned")


def test_loom_without_its_model_is_read_only_until_loaded(browser: Browser) -> None:
    with at(browser) as desk:
        desk.make()
        desk.grow(n=2)
        desk.ask("DELETE", "/models/tiny")
        page = desk.visit()
        notice = page.get_by_text("Read-only: load tiny to grow", exact=True)
        expect(notice).to_be_visible()
        assert_accessible(page)
        desk.press("g")
        expect(page.get_by_role("status").filter(has_text="tiny to grow.")).to_be_visible()
        assert len(desk.nodes()) == 3
        page.get_by_role("button", name="Load tiny").click()
        expect(page.get_by_role("button", name="Models: tiny", exact=True)).to_be_visible()
        expect(notice).to_have_count(0)
        desk.press("g")
        desk.until(lambda: len(desk.nodes()) > 3, "it grows")


def test_failed_model_load_shows_its_reason_and_another_model_loads(browser: Browser) -> None:
    with serving(ServerConfig(port=0, models=("/nowhere/at/all.gguf",)), wait=False) as served:
        with watched(browser, served.url) as (page, _):
            page.goto("/")
            alert = page.get_by_role("alert")
            expect(alert).to_contain_text("could not be loaded")
            expect(alert).to_contain_text("There is no file")
            expect(page.get_by_role("button", name="Grow 4 branches")).to_be_disabled()
            assert_accessible(page)
            page.get_by_role("button", name="Models", exact=True).click()
            dialog = page.get_by_role("dialog", name="Models")
            dialog.get_by_role("button", name="Remove").click()
            dialog.get_by_label("Load another model").fill("tiny")
            dialog.get_by_role("button", name="Load", exact=True).click()
            expect(dialog.get_by_text("branches at any token")).to_be_visible(timeout=30_000)
            page.keyboard.press("Escape")
            expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()


def test_forbidden_model_shows_error_code_and_request_id(desk: Desk, page: Page) -> None:
    page.goto("/")
    page.get_by_role("button", name="Models: tiny").click()
    page.get_by_label("Load another model").fill("/etc")
    desk.watch.allow("403")
    page.get_by_role("button", name="Load", exact=True).click()
    note = page.get_by_role("status").filter(has_text="may not be loaded here")
    note.get_by_text("Details").click()
    expect(note).to_contain_text("403 model_not_allowed")
    expect(note).to_contain_text("request rq_")


def test_full_context_shows_both_lengths_and_solutions(browser: Browser) -> None:
    with at(browser, n_ctx=48) as desk:
        desk.sets(n=1, max_tokens=100)
        page = desk.page
        desk.open_loom()
        desk.press("g")
        note = page.get_by_role("status").filter(has_text="The context is full.")
        expect(note).to_contain_text("The path has 48 tokens; the model’s context has 48.")
        note.get_by_role("button", name="Cut off after the cursor").wait_for()
        desk.press("ArrowRight")
        name = desk.loom["name"]
        note.get_by_role("button", name="Continue in a new loom").click()
        desk.until(lambda: name not in page.url, "another loom is open")


def test_full_memory_offers_three_solutions(browser: Browser) -> None:
    with at(browser, kv_budget="300KB") as desk:
        desk.sets(n=4, max_tokens=40)
        page = desk.page
        desk.open_loom()
        desk.press("g")
        note = page.get_by_role("status").filter(has_text="Memory is full.")
        offers = note.locator(".offers").get_by_role("button")
        expect(offers).to_have_count(3)
        # One path alone is too long, so fewer branches are not the first offer.
        expect(offers).to_have_text(["20 tokens", "2 branches", "Free unused memory"])
        assert_accessible(page)
        desk.wait_grown()
        before = len(desk.nodes())
        note.get_by_role("button", name="20 tokens").click()
        desk.until(lambda: len(desk.nodes()) >= before + 4, "it has grown with less")


def test_growth_waits_for_a_full_queue(browser: Browser) -> None:
    with at(browser, limits=ServerLimits(jobs=1)) as desk:
        desk.sets(n=1, max_tokens=4)
        desk.make("Of another client.")
        body = {"n": 1, **desk.endless()}
        job = desk.ask("POST", desk.of("/nodes/0/generate"), json=body)
        page = desk.page
        desk.open_loom("What comes second.")
        desk.watch.allow("429")
        desk.press("g")
        expect(page.get_by_text("The server is busy.")).to_be_visible()
        desk.ask("POST", f"/jobs/{job['job']}/cancel", json={})
        desk.until(lambda: len(desk.nodes()) == 2, "it was tried again")
        expect(page.get_by_text("The server is busy.")).to_have_count(0)


def test_loom_removed_elsewhere_is_restored(desk: Desk, page: Page) -> None:
    desk.open_loom("Removed elsewhere.", n=1)
    desk.ask("DELETE", desk.of())
    expect(page.get_by_text("This loom was removed.")).to_be_visible()
    desk.watch.allow("404")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("was removed")
    page.get_by_role("button", name="Restore").click()
    expect(desk.tree.get_by_role("treeitem")).to_have_count(2)


def test_broken_page_reports_that_nothing_is_lost(desk: Desk, page: Page) -> None:
    """A stand-in for a bug: the page receives nodes without texts."""
    desk.open_loom(n=1)
    desk.watch.allow(".")

    def without_texts(route: Any) -> None:
        reply = route.fetch().json()
        for node in reply["data"]:
            node["text"] = None
        route.fulfill(json=reply)

    page.route("**/nodes?*", without_texts)
    page.reload()
    expect(
        page.get_by_text("Something went wrong on this page; your work is saved.")
    ).to_be_visible()
    assert_accessible(page)
    page.unroute("**/nodes?*")
    page.get_by_role("button", name="Reload").click()
    expect(desk.tree.get_by_role("treeitem")).to_have_count(2)


def test_undo_button_names_the_last_operation(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3)
    undo = page.get_by_role("button", name="Undo")
    undo.hover()
    expect(page.get_by_role("button", name="Undo growth of 3 nodes")).to_be_visible()
    desk.press("u")
    desk.until(lambda: len(desk.nodes()) == 1, "it is undone")


def test_theme_and_size_survive_a_reload(desk: Desk, page: Page) -> None:
    desk.open_loom(n=1)
    desk.press("Shift+T")
    page.get_by_role("radio", name="Dark").check(force=True)
    page.get_by_role("radio", name="Larger").check(force=True)
    page.reload()
    expect(page.locator("html[data-theme=dark][data-size=larger]")).to_have_count(1)


def test_server_with_a_key_accepts_it_as_a_password(browser: Browser) -> None:
    """Browsers request the password by themselves, and event streams use it, too."""
    with serving(ServerConfig(port=0, api_key=KEY)) as served:
        who = {"username": "anybody", "password": KEY}
        with watched(browser, served.url, http_credentials=who) as (page, watch):
            desk = Desk(served, page, watch)
            watch.allow("401")
            desk.sets(n=2, max_tokens=6)
            page.goto("/")
            page.get_by_role("button", name="Grow 2 branches").click()
            desk.open_named()
            expect(desk.tree.get_by_role("treeitem")).to_have_count(3)


def test_seven_tabs_of_one_loom_all_work(desk: Desk, page: Page) -> None:
    """A browser has six connections to a server: a hidden tab must not keep its own."""
    hide = """Object.defineProperty(document, 'hidden', { value: true, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'))"""
    show = """Object.defineProperty(document, 'hidden', { value: false, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'))"""
    desk.open_loom(n=1)
    tabs = [page]
    for _ in range(6):
        tabs[-1].evaluate(hide)  # what a browser does to the tab that is left
        tabs.append(page.context.new_page())
        tabs[-1].goto(page.url)
    last = tabs[-1].get_by_role("tree", name="Tree", exact=True).get_by_role("treeitem")
    expect(last).to_have_count(2)
    tabs[-1].wait_for_timeout(6000)
    desk.grow(n=2, seed=7)
    expect(last).to_have_count(4)
    tabs[0].evaluate(show)
    expect(desk.tree.get_by_role("treeitem")).to_have_count(4)


@pytest.mark.parametrize("late", [(), ("answers",)])
def test_too_large_file_is_rejected_before_upload(desk: Desk, page: Page, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    page.goto("/")
    command(page, "Import")
    page.locator("input[type=file]").set_input_files(large)
    report = page.get_by_role("dialog", name="Import")
    expect(report).to_contain_text("The file has 1.1 GB; the server takes at most 268 MB.")
    assert not any("/import" in url for url in desk.watch.requested)
