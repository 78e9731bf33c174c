"""How the page looks where sizes, media and amounts are not the usual ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, Gate, assert_accessible, expect, watched
from tests.page.hands import Fingers
from written_looms import file_of, node_record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.page


def colour(of: Locator, name: str, pseudo: str = "") -> list[int]:
    """A colour as it is painted: red, green, blue."""
    value = of.evaluate(
        "(it, [name, pseudo]) => getComputedStyle(it, pseudo || null).getPropertyValue(name)",
        [name, pseudo],
    )
    return [int(each) for each in value.partition("(")[2].rstrip(")").split(",")[:3]]


def box(of: Locator) -> dict[str, float]:
    """Return position and size of an element on the screen."""
    bounds = of.bounding_box()
    assert bounds
    return {
        "x": bounds["x"],
        "y": bounds["y"],
        "width": bounds["width"],
        "height": bounds["height"],
    }


def contrast(one: list[int], other: list[int]) -> float:
    def light(colour: list[int]) -> float:
        parts = [each / 255 for each in colour]
        linear = [
            each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def large(desk: Desk, parents: list[int | None]) -> None:
    """Bring a loom of such a shape: node i below parents[i]."""
    nodes = [node_record(at, parent, text=f"node {at} ") for at, parent in enumerate(parents)]
    (desk.loom,) = desk.ask("POST", "/import", content=json.dumps(file_of(nodes)).encode())["looms"]


@pytest.fixture
def story(desk: Desk) -> Desk:
    """A desk at a node in the middle of a story."""
    first, _ = desk.open_loom(n=2, max_tokens=16)
    desk.grow(first, n=2)
    desk.visit(first)
    return desk


# Room


@pytest.mark.parametrize("width", [800, 1024])
def test_text_is_340_pixels_wide_or_wider_next_to_the_map(
    story: Desk, page: Page, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 768})
    story.press("v")
    page.locator(".map-canvas").wait_for()
    boxes = {side: box(page.locator(f".pane.{side}")) for side in ("left", "middle", "right")}
    assert boxes["middle"]["width"] >= 340
    assert boxes["left"]["width"] >= 200
    assert boxes["right"]["x"] + boxes["right"]["width"] <= width
    line = page.get_by_role("separator", name="Width of the tree")
    line.focus()
    line.press("ArrowLeft")
    after = box(page.locator(".pane.left"))
    # The key starts from the displayed width, not from the saved width.
    assert boxes["left"]["width"] - 24 < after["width"] <= boxes["left"]["width"]


@pytest.mark.parametrize("look", [{"device_scale_factor": 2}])
@pytest.mark.parametrize(("width", "height"), [(720, 450), (320, 568)], ids=["200 %", "320 px"])
def test_all_controls_are_within_a_small_screen(
    story: Desk, page: Page, width: int, height: int
) -> None:
    page.set_viewport_size({"width": width, "height": height})
    beyond = """(width) => [...document.querySelectorAll('button, input, select, textarea, a, h1')]
      .filter((each) => each.checkVisibility() && !each.closest('.visually-hidden, .tree-rows'))
      .filter((each) => each.getBoundingClientRect().right > width + 0.5)
      .map((each) => each.outerHTML.slice(0, 90))"""
    for pane in ("Tree", "Inspector", "Text"):
        page.get_by_role("tab", name=pane, exact=True).click()
        assert page.evaluate(beyond, width) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_2000_children_are_shown_60_at_a_time(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=6)
    large(desk, [None, *[0] * 2000])
    desk.visit()
    rows = page.locator(".reading .children [data-child]")
    expect(rows).to_have_count(60)
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    page.get_by_role("button", name="Show more (2,000 in all)").click()
    expect(rows).to_have_count(120)


LONG = "antidisestablishmentarianism" * 7


@pytest.mark.parametrize("width", [1440, 390])
def test_long_names_and_labels_stay_within_their_columns(
    desk: Desk, page: Page, width: int
) -> None:
    (node,) = desk.open_loom(f"{LONG} is the prompt.", n=1)
    desk.ask("PATCH", desk.of(f"/nodes/{node}"), json={"bookmark": LONG})
    desk.ask("PATCH", desk.of(), json={"name": f"{LONG}{width}"})
    page.set_viewport_size({"width": width, "height": 844})
    model = page.get_by_role("button", name="Models: tiny")
    expect(model).to_have_text("tiny")
    assert model.locator(".cut").evaluate("(it) => it.scrollWidth <= it.clientWidth")
    pane = page.locator(".reading")
    assert pane.evaluate("(it) => it.scrollWidth <= it.clientWidth")
    column = box(page.locator(".child-in"))
    label = box(page.locator(".child .label"))
    assert label["x"] + label["width"] < column["x"] + column["width"]
    desk.press("Shift+B")
    if width < 800:
        page.get_by_role("tab", name="Tree", exact=True).click()
    panel = box(page.get_by_role("region", name="Bookmarks"))
    assert panel["x"] + panel["width"] <= width


def test_selected_command_is_highlighted_and_visible(desk: Desk, page: Page) -> None:
    desk.open_loom()
    page.keyboard.press("Control+k")
    options = page.get_by_role("dialog").get_by_role("option")
    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    grounds = [
        options.nth(i).evaluate("(it) => getComputedStyle(it).backgroundColor") for i in (0, 1)
    ]
    assert grounds[0] != grounds[1]
    field = box(page.get_by_role("combobox", name="Type a command"))
    first = box(options.first)
    assert first["y"] >= field["y"] + field["height"] + 4
    for _ in range(60):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_role("combobox", name="Type a command")).to_be_in_viewport()
    page.keyboard.type("previous bookmark")
    expect(options).to_have_count(1)
    assert box(page.get_by_role("combobox", name="Type a command")) == field  # it stays where it is


def test_map_of_a_hoisted_subtree_is_visible(desk: Desk, page: Page) -> None:
    desk.watch.allow("Multiple readback operations")  # the test's own
    large(desk, [None, *[(at - 1) // 3 for at in range(1, 3000)]])
    desk.remembers("treeView", "map")
    desk.visit(37)
    desk.painted()
    desk.press("z")
    desk.painted()
    dark = """() => {
      const canvas = document.querySelector('.map-canvas')
      const { width, height } = canvas
      const { data } = canvas.getContext('2d').getImageData(0, 0, width, height)
      let dark = 0
      for (let i = 0; i < data.length; i += 4) dark += data[i] < 120
      return dark
    }"""
    desk.until(lambda: page.evaluate(dark) > 200, "it is visible")


def test_fitted_map_stays_fitted_after_resizing(story: Desk, page: Page) -> None:
    story.press("v")
    small = page.locator(".map-small")
    story.painted()
    expect(small).to_be_hidden()  # as there is nothing beyond the edges
    page.set_viewport_size({"width": 900, "height": 500})
    story.painted()
    expect(small).to_be_hidden()
    page.get_by_role("button", name="Zoom in").click(click_count=4)
    expect(small).to_be_visible()
    page.set_viewport_size({"width": 1024, "height": 500})
    story.painted()
    expect(small).to_be_visible()  # a zoomed map is not fitted


def test_line_end_has_a_card(desk: Desk, page: Page) -> None:
    desk.make(template=False, prompt="A list:")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": "\n\n one"})
    desk.visit(1)
    desk.press(".")
    card = page.get_by_role("region", name="Token", exact=True)
    expect(card).to_be_visible()
    expect(card).to_contain_text("⏎")


def test_blank_text_and_unread_nodes_are_marked(desk: Desk, page: Page, gate: Gate) -> None:
    desk.make(template=False, prompt="A list:")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": "\n\n"})
    desk.visit()
    expect(page.locator("[data-child='1'] .child-text")).to_have_text("⏎⏎")
    gate.hold(3)
    (grown,) = desk.grow(n=1, wait=False, **desk.endless())
    desk.until(lambda: desk.lanes == [grown], "it grows")
    expect(desk.row(grown).locator(".row-knot.unread")).to_have_count(1)
    gate.open()
    desk.press("Escape", "Escape")
    desk.wait_grown()


def test_lanes_of_removed_nodes_disappear(desk: Desk, page: Page) -> None:
    desk.sets(n=3, max_tokens=8)
    desk.open_loom()
    desk.press("g")
    desk.until(lambda: len(desk.lanes) == 3, "three lanes")
    desk.wait_grown()
    desk.row(desk.lanes[0]).locator(".row-words").hover()
    page.locator("[data-do=remove]").click()
    desk.until(lambda: len(desk.lanes) == 2, "two are left")
    desk.press("x")
    desk.until(lambda: not desk.lanes, "none is left")
    expect(page.locator(".reading [data-child]")).to_have_count(0)
    desk.press("u")
    desk.until(lambda: page.locator(".reading [data-child]").count() == 2, "they are back")


def test_toast_covers_no_hint_and_the_footer_is_not_cut(desk: Desk, page: Page, gate: Gate) -> None:
    desk.sets(n=4, max_tokens=200)
    desk.open_loom()
    gate.hold(6)
    desk.press("g")
    desk.until(lambda: len(desk.lanes) == 4, "four lanes")
    desk.press("Shift+C")  # a note: there is nothing to cut
    note = page.locator(".toast").last
    note.wait_for()
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 844})
        at = box(note)
        hint = box(page.get_by_role("complementary", name="Hint"))
        assert at["y"] + at["height"] <= hint["y"]
        foot = page.get_by_role("contentinfo")
        assert foot.evaluate("(it) => it.scrollWidth <= it.clientWidth")
    gate.open()
    desk.press("Escape", "Escape")
    desk.wait_grown()


# Media


@pytest.mark.parametrize("look", [{"forced_colors": "active", "color_scheme": "dark"}])
def test_forced_colours_mark_thread_current_row_and_tab(story: Desk, page: Page) -> None:
    story.press("r")  # a prompt has a main button
    accent = colour(page.locator(".button.main").first, "background-color")
    canvas = colour(page.locator("body"), "background-color")
    assert contrast(accent, canvas) > 2
    assert colour(story.text, "background-color", "::before") == accent  # the thread
    assert colour(page.locator(".guides .thread"), "stroke") == accent
    assert colour(page.locator(".row-knot.here"), "background-color", "::before") == accent
    assert colour(page.get_by_role("tab", selected=True).first, "border-bottom-color") == accent
    assert contrast(colour(story.text, "color"), canvas) > 7
    # A placeholder does not look like a value.
    field = page.get_by_placeholder("random")
    assert colour(field, "color", "::placeholder") != colour(field, "color")
    story.press("v")
    assert page.locator(".map-canvas").evaluate(
        "(it) => it.getContext('2d').getImageData(1, 1, 1, 1).data.slice(0, 3).join()"
    ) == ",".join(map(str, canvas))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_preference_for_more_contrast_gives_a_ratio_above_7(
    browser: Browser, served: Any, scheme: Any
) -> None:
    with watched(browser, served.url, contrast="more", color_scheme=scheme) as (page, watch):
        desk = Desk(served, page, watch)
        first, _ = desk.open_loom(n=2)
        desk.visit(first)
        ground = colour(page.locator("body"), "background-color")
        assert contrast(colour(page.locator(".caption").first, "color"), ground) > 7
        assert (
            contrast(colour(page.locator(".button:not(.plain)").last, "border-top-color"), ground)
            > 3
        )
        assert_accessible(page)


@pytest.mark.parametrize("look", [{"color_scheme": "dark"}])
def test_print_has_only_the_text_and_dark_on_light(story: Desk, page: Page) -> None:
    story.press("p")
    page.emulate_media(media="print")
    assert contrast(colour(story.text, "color"), [255, 255, 255]) > 7
    for gone in (".bar", ".pane.left", ".pane.right", ".status", ".action-bar"):
        expect(page.locator(gone).first).to_be_hidden()
    expect(story.text).to_be_visible()
    # Text that is longer than a screen continues on further pages.
    assert page.locator(".reading").evaluate("(it) => getComputedStyle(it).overflowY") == "visible"
    assert page.evaluate(
        "document.body.scrollHeight >= document.querySelector('.sheet').scrollHeight"
    )


# Fingers


@pytest.mark.parametrize("look", [{"has_touch": True}])
def test_touch_drags_zooms_and_opens_the_menu_of_the_map(story: Desk, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("tab", name="Tree", exact=True).click()
    page.get_by_role("tab", name="Map").click()
    canvas = page.locator(".map-canvas")
    at = box(canvas)
    story.painted()
    x, y = at["x"] + at["width"] / 2, at["y"] + at["height"] / 2
    fingers = Fingers(page)

    def shown() -> bytes:
        story.painted()
        return canvas.screenshot()

    before = shown()
    fingers.send("touchStart", (x, y))
    for step in range(1, 9):
        fingers.send("touchMove", (x - 6 * step, y + 4 * step))
    fingers.send("touchEnd")
    story.until(lambda: shown() != before, "it was dragged")
    dragged = shown()
    fingers.send("touchStart", (x - 20, y), (x + 20, y))
    for step in range(1, 9):
        fingers.send("touchMove", (x - 20 - 6 * step, y), (x + 20 + 6 * step, y))
    fingers.send("touchEnd")
    story.until(lambda: shown() != dragged, "it is larger")
    assert page.evaluate("visualViewport.scale") == 1  # the page itself is not
    larger = shown()
    page.get_by_role("button", name="Zoom to fit all").tap()
    story.until(lambda: shown() != larger, "all is visible")
    story.painted()
    here = story.current
    fingers.send("touchStart", word(page))
    page.get_by_role("menu", name="Node").wait_for()
    fingers.send("touchEnd")
    page.wait_for_timeout(100)
    expect(page.get_by_role("menu", name="Node")).to_be_visible()
    assert story.current == here
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Outline").click()
    row = box(story.row(2))
    fingers.send("touchStart", (row["x"] + 120, row["y"] + 14))
    page.get_by_role("menu", name="Node").wait_for()
    fingers.send("touchEnd")
    page.wait_for_timeout(100)
    assert story.current == here


def word(page: Page) -> tuple[float, float]:
    """Return a point of the leftmost word on the map: a dark pixel."""
    point = page.evaluate(
        """() => {
      const canvas = document.querySelector('.map-canvas')
      const { width, height } = canvas
      const { left, top } = canvas.getBoundingClientRect()
      const { data } = canvas.getContext('2d').getImageData(0, 0, width, height)
      for (let x = 4; x < width; x++)
        for (let y = 4; y < height - 60; y++)
          if (data[4 * (y * width + x)] < 90) return [left + x / devicePixelRatio + 4, top + y / devicePixelRatio]
      return null
    }"""  # noqa: E501
    )
    assert point
    return (point[0], point[1])
