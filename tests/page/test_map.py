"""The map in the page: where it looks, what a click does, how fast it is drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect
from tests.page.hands import Fingers
from written_looms import file_of, node_record

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


def canvas(page: Page) -> Locator:
    return page.get_by_role("img", name="Map of")


def knot(page: Page) -> tuple[float, float] | None:
    """Return the position of the current node's knot on the map; None if it is not visible."""
    point = page.evaluate(
        """() => {
      const canvas = document.querySelector('.map-canvas')
      const probe = document.createElement('i')
      probe.style.color = 'var(--accent)'
      document.body.append(probe)
      const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number)
      probe.remove()
      const { width, height } = canvas
      const { data } = canvas.getContext('2d').getImageData(0, 0, width, height)
      const is = (x, y) => wanted.every((each, i) => Math.abs(data[4 * (y * width + x) + i] - each) < 8)
      for (let x = 4; x < width - 4; x++)
        for (let y = 4; y < height - 4; y++)
          if ([-3, 0, 3].every((d) => is(x + d, y) && is(x, y + d))) return [x / devicePixelRatio, y / devicePixelRatio]
      return null
    }"""  # noqa: E501
    )
    return None if point is None else (point[0], point[1])


def settled(desk: Desk) -> tuple[float, float]:
    """Return the position of the current node's knot once it does not move."""
    points: list[tuple[float, float] | None] = [None]

    def is_still() -> bool:
        desk.painted()
        points.append(knot(desk.page))
        is_moving = canvas(desk.page).evaluate("(it) => '__transition' in it")  # d3's
        return not is_moving and points[-1] is not None and points[-1] == points[-2]

    desk.until(is_still, "the knot is visible and does not move")
    assert points[-1]
    return points[-1]


@pytest.fixture
def mapped(desk: Desk) -> Desk:
    desk.remembers("treeView", "map")
    desk.watch.allow("Multiple readback operations")  # the test's own
    desk.open_loom(n=3)
    desk.wait_known()
    settled(desk)
    return desk


def test_click_selects_a_node_and_hover_shows_its_text(mapped: Desk, page: Page) -> None:
    mapped.press("1")
    mapped.until(lambda: mapped.current == 1, "the first child")
    first = settled(mapped)
    mapped.press("ArrowDown")
    second = settled(mapped)
    assert second[1] > first[1]
    canvas(page).hover(position={"x": first[0] + 4, "y": first[1]})
    expect(page.get_by_role("tooltip")).to_contain_text(mapped.nodes()[1]["text"][:20])
    canvas(page).click(position={"x": first[0] + 4, "y": first[1]})
    mapped.until(lambda: mapped.current == 1, "a click goes there")
    canvas(page).click(position={"x": second[0] + 4, "y": second[1]}, button="right")
    page.get_by_role("menuitem", name="Bookmark").click()
    mapped.until(lambda: mapped.nodes()[2]["bookmark"] is not None, "the menu is of what is there")


def test_map_zooms_pans_and_fits(mapped: Desk, page: Page) -> None:
    mapped.press("1")
    start = settled(mapped)
    box = canvas(page).bounding_box()
    assert box
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 230, box["y"] + 260, steps=4)
    page.mouse.up()
    dragged = settled(mapped)
    assert dragged == pytest.approx((start[0] + 30, start[1] + 60), abs=3)
    assert mapped.current == 1  # a drag is no click
    page.mouse.move(box["x"] + dragged[0], box["y"] + dragged[1])
    page.evaluate("addEventListener('wheel', () => { window.turned = true }, { once: true })")
    page.mouse.wheel(0, -200)
    mapped.until(lambda: page.evaluate("window.turned"), "the wheel has turned")
    assert settled(mapped) == pytest.approx(dragged, abs=4)  # around the pointer
    mapped.press("0")
    middle = settled(mapped)
    assert abs(middle[1] - box["height"] / 2) < 4
    mapped.press("9")
    assert settled(mapped) == pytest.approx(start, abs=3)
    canvas(page).focus()
    mapped.press("Shift+ArrowDown", "+", "-", "-")
    assert settled(mapped) != pytest.approx(start, abs=3)


def test_double_click_on_a_node_zooms_in_around_it(mapped: Desk, page: Page) -> None:
    mapped.press("1")
    start = settled(mapped)
    canvas(page).dblclick(position={"x": start[0] + 4, "y": start[1]})
    assert settled(mapped) == pytest.approx(start, abs=6)
    mapped.press("ArrowDown")
    assert settled(mapped)[1] - start[1] == pytest.approx(2 * 28, abs=3)


def test_map_that_is_dragged_far_returns_after_one_screen(mapped: Desk, page: Page) -> None:
    box = canvas(page).bounding_box()
    assert box
    left, top, bottom = box["x"] + 4, box["y"] + 4, box["y"] + box["height"] - 4
    for _ in range(4):
        page.mouse.move(left, top)
        page.mouse.down()
        page.mouse.move(left, bottom, steps=4)
        page.mouse.up()
    mapped.until(lambda: knot(page) is None, "the tree is below the map")
    page.mouse.move(left, bottom)
    page.mouse.down()
    page.mouse.move(left, top, steps=4)
    page.mouse.up()
    settled(mapped)


@pytest.mark.parametrize("look", [{"has_touch": True, "reduced_motion": "reduce"}])
@pytest.mark.parametrize("way", ["wheel", "pinch"])
def test_zooming_into_a_tall_map_keeps_the_column_below_the_pointer(
    desk: Desk, page: Page, way: str
) -> None:
    """The tree is symmetric, so that node 26 is exactly in the vertical middle."""
    desk.watch.allow("Multiple readback operations")  # the test's own
    nodes = [
        node_record(at, None if at == 0 else (at - 1) // 3, text=f"node {at} ")
        for at in range((3**8 - 1) // 2)
    ]
    (desk.loom,) = desk.ask("POST", "/import", content=json.dumps(file_of(nodes)).encode())["looms"]
    desk.remembers("treeView", "map")
    (middle,) = (number for number, node in desk.nodes().items() if node["text"] == "node 26 ")
    desk.visit(middle)
    expect(page.get_by_role("img", name="Map of 3,280 nodes")).to_be_visible()
    desk.press("9")
    start = settled(desk)
    box = canvas(page).bounding_box()
    assert box
    x, y = box["x"] + start[0], box["y"] + box["height"] / 2
    if way == "wheel":
        page.mouse.move(x, y)
        for _ in range(23):
            page.mouse.wheel(0, -100)
    else:
        fingers = Fingers(page)
        for _ in range(2):
            fingers.send("touchStart", (x, y - 10), (x, y + 10))
            for distance in range(10, 101, 2):
                fingers.send("touchMove", (x, y - distance), (x, y + distance))
            fingers.send("touchEnd")
    desk.until(lambda: page.locator(".map-small").is_visible(), "a part of the map is visible")
    desk.until(lambda: settled(desk) != start, "it is zoomed")
    assert settled(desk)[0] == pytest.approx(start[0], abs=16)


def test_map_has_an_accessible_tree(mapped: Desk, page: Page) -> None:
    expect(mapped.tree.get_by_role("treeitem")).to_have_count(4)
    for tint in ("score", "age", "probability"):
        page.get_by_label("Colour of the map").select_option(tint)
    assert_accessible(page)
    mapped.press("v")
    expect(canvas(page)).to_have_count(0)
    expect(page.get_by_role("tab", name="Outline")).to_have_attribute("aria-selected", "true")


def test_map_of_10000_nodes_is_painted_once_a_frame_and_only_where_visible(
    desk: Desk, page: Page
) -> None:
    nodes = [
        node_record(at, None if at == 0 else (at - 1) // 3, text=f"node {at} of many ")
        for at in range(10_000)
    ]
    (desk.loom,) = desk.ask("POST", "/import", content=json.dumps(file_of(nodes)).encode())["looms"]
    desk.remembers("treeView", "map")
    desk.visit()
    expect(page.get_by_role("img", name="Map of 10,000 nodes")).to_be_visible()
    for key, limit in (("9", 5_000), ("0", 100)):  # all of it, and around one node
        desk.press(key)
        desk.painted()
        calls = page.evaluate(
            """async () => {
      const canvas = document.querySelector('.map-canvas')
      const { left, top } = canvas.getBoundingClientRect()
      const pen = CanvasRenderingContext2D.prototype
      const own = Object.getOwnPropertyDescriptors(pen)
      const calls = {}
      for (const [name, { value }] of Object.entries(own)) {
        if (typeof value !== 'function') continue
        pen[name] = function (...given) {
          if (this.canvas === canvas) calls[name] = (calls[name] ?? 0) + 1
          return value.apply(this, given)
        }
      }
      for (let i = 0; i < 30; i++) {
        canvas.dispatchEvent(new WheelEvent('wheel', { deltaY: i % 2 ? 60 : -60,
          clientX: left + 200, clientY: top + 300, bubbles: true, cancelable: true }))
      }
      await new Promise(requestAnimationFrame)
      await new Promise(requestAnimationFrame)
      Object.defineProperties(pen, own)
      return calls
    }"""
        )
        assert calls["setTransform"] == 1  # thirty turns of the wheel, one painting
        assert 0 < calls["fillRect"] < limit  # overlapping bars are merged
        assert sum(calls.values()) < limit + 100
