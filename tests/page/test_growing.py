"""Branches grow in the page as people watch them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.page


def test_first_run_grows_four_branches(desk: Desk, page: Page) -> None:
    page.goto("/")
    page.get_by_role("heading", name="Start with a prompt").wait_for()
    field = page.get_by_role("textbox").first
    assert field.input_value()
    assert page.evaluate("getSelection().toString() || document.activeElement.value")
    page.get_by_role("button", name="Send, and grow 4 answers").click()
    desk.open_named()
    desk.until(lambda: len(desk.lanes) == 4, "four lanes")
    desk.wait_grown()
    nodes = desk.nodes()
    assert nodes[0]["children"] == [1, 2, 3, 4]
    for node in nodes[0]["children"]:
        expect(desk.row(node)).to_be_visible()


def test_selected_branch_grows_and_its_children_are_selectable(desk: Desk, page: Page) -> None:
    desk.sets(n=3, max_tokens=8)
    desk.open_loom(n=2, max_tokens=8)
    desk.press("ArrowRight")
    desk.until(lambda: desk.current == 1, "the first child is the current one")
    desk.press("g")
    desk.until(lambda: len(desk.nodes()) == 6, "three more nodes")
    desk.wait_known()
    nodes = desk.nodes()
    assert len(nodes[1]["children"]) == 3
    desk.press("ArrowRight", "ArrowDown")
    second = nodes[1]["children"][1]
    desk.until(lambda: desk.current == second, "its second child is the current one")
    expect(desk.text).to_contain_text(nodes[1]["text"].strip()[:40])
    expect(desk.part(second)).to_contain_text(nodes[second]["text"].strip()[:20])


def test_lanes_of_all_branches_appear_before_the_first_step(
    desk: Desk, page: Page, gate: Gate
) -> None:
    """Their height is fixed, and nothing moves while they fill."""
    desk.sets(n=6, max_tokens=60)
    desk.open_loom()
    gate.hold(0)
    desk.press("g")
    # Before the model's first step, that is; how many milliseconds it takes: benchmarks/page.py.
    desk.until(lambda: len(desk.lanes) == 6, "six lanes")
    desk.painted()
    lanes = page.locator("article[data-lane]")
    heights = "all => all.map((each) => each.getBoundingClientRect().height)"
    before = lanes.evaluate_all(heights)
    top = desk.text.evaluate(TOP)
    gate.hold(40)
    desk.until(lambda: len(lanes.nth(5).inner_text()) > 60, "text in the last lane")
    gate.wait_stopped()
    desk.painted()
    assert lanes.evaluate_all(heights) == before
    assert desk.text.evaluate(TOP) == top
    gate.open()
    desk.wait_known()


TOP = "(each) => each.getBoundingClientRect().top"
# The height of a lane's window minus the height of its text.
SPARE = "(each) => each.clientHeight - each.firstElementChild.offsetHeight"


@pytest.mark.parametrize("max_tokens", [6, 220])
def test_finished_lane_is_as_high_as_its_text(desk: Desk, page: Page, max_tokens: int) -> None:
    desk.open_loom(template=False)
    grown = desk.grow(n=3, wait=False, **desk.endless() | {"max_tokens": max_tokens})
    desk.until(lambda: desk.lanes == grown, "three lanes")
    desk.wait_known()
    nodes = desk.nodes()
    for node in grown:
        text = desk.lane(node).locator(".lane-text")
        desk.until(lambda text=text: text.evaluate(SPARE) == 0, "no space and nothing cut off")
        assert text.inner_text().split() == nodes[node]["text"].split()


def test_finished_lane_keeps_its_height_while_another_grows(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.open_loom()
    gate.hold(6)
    first, second = desk.grow(n=2, wait=False, **desk.endless())
    desk.until(
        lambda: all(desk.lane(each).inner_text().strip() for each in (first, second)), "text"
    )
    height = "(each) => each.clientHeight"
    before = desk.lane(first).evaluate(height)
    desk.lane(first).get_by_role("button", name="Stop").click()
    gate.open()
    expect(desk.lane(first)).to_have_attribute("data-state", "done")
    desk.painted()
    assert desk.lane(first).evaluate(height) == before
    desk.lane(second).get_by_role("button", name="Stop").click()
    text = desk.lane(first).locator(".lane-text")
    desk.until(lambda: text.evaluate(SPARE) == 0, "both have the height of their texts")


def test_growth_in_sight_does_not_scroll(desk: Desk, page: Page) -> None:
    desk.sets(n=4, max_tokens=4)
    desk.open_loom()
    desk.press("g")
    desk.wait_known()
    assert page.locator(".reading").evaluate("(each) => each.scrollTop") == 0


def test_text_above_stays_in_place_when_lanes_become_shorter(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.sets(n=4, max_tokens=3)
    page.set_viewport_size({"width": 1440, "height": 600})
    desk.open_loom()
    gate.hold(0)
    desk.press("g")
    desk.until(lambda: len(desk.lanes) == 4, "four lanes")
    page.locator(".reading").evaluate("(each) => { each.scrollTop = 50 }")
    desk.painted()
    top = desk.text.evaluate(TOP)
    gate.open()
    desk.wait_known()
    desk.until(
        lambda: desk.lane(4).locator(".lane-text").evaluate(SPARE) == 0, "the lanes are shorter"
    )
    assert desk.text.evaluate(TOP) == top


def test_page_shows_grown_branches_to_the_last_token(desk: Desk, page: Page) -> None:
    desk.open_loom()
    desk.grow(n=4, max_tokens=60, wait=False)
    desk.until(lambda: len(desk.lanes) == 4, "four lanes")
    desk.wait_grown()
    for node, row in list(desk.nodes().items())[1:]:
        shown_to_the_end(desk, node, row["text"])


def shown_to_the_end(desk: Desk, node: int, text: str) -> None:
    desk.page.evaluate(
        "(node) => { location.hash = location.hash.split('/')[0] + '/' + node }", node
    )
    desk.until(lambda: desk.current == node, f"node {node} is the current one")
    desk.until(
        lambda: " ".join((desk.part(node).text_content() or "").split()) == " ".join(text.split()),
        f"all text of node {node}: {text!r}",
    )


def test_stopped_branch_keeps_its_text_while_the_other_grows(
    desk: Desk, page: Page, gate: Gate
) -> None:
    desk.open_loom()
    gate.hold(12)
    first, second = desk.grow(n=2, wait=False, **desk.endless())
    desk.until(lambda: (desk.lane(first).inner_text()).strip() != "", "text")
    page.wait_for_timeout(200)
    desk.press("ArrowRight")
    desk.until(lambda: desk.current == first, "the first branch is the current one")
    desk.press("Escape")
    gate.open()
    desk.until(lambda: desk.nodes()[first]["finish_reason"] == "cancelled", "it is stopped")
    nodes = desk.nodes()
    assert nodes[first]["text"]
    assert nodes[second]["growing"]
    desk.press("ArrowLeft")  # lanes stand below the node that they grow from
    desk.lane(second).get_by_role("button", name="Stop").click()
    desk.wait_grown()
    assert desk.nodes()[second]["finish_reason"] == "cancelled"
    shown_to_the_end(desk, first, desk.nodes()[first]["text"])


def test_escape_twice_stops_all_branches(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom()
    gate.hold(10)
    grown = desk.grow(n=4, wait=False, **desk.endless())
    # Branches without a token are none, and would be gone.
    desk.until(lambda: all(desk.lane(each).inner_text().strip() for each in grown), "texts")
    desk.press("Escape", "Escape")
    gate.open()
    desk.wait_grown()
    assert {node["finish_reason"] for node in list(desk.nodes().values())[1:]} == {"cancelled"}


def test_reloaded_page_shows_growing_branches(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom()
    gate.hold(20)
    grown = desk.grow(n=3, wait=False, max_tokens=60, logit_bias=desk.endless()["logit_bias"])
    desk.until(lambda: all(desk.lane(each).inner_text().strip() for each in grown), "texts")
    page.reload()
    desk.until(lambda: len(desk.lanes) == 3, "the lanes are there again")
    desk.until(lambda: all(desk.lane(each).inner_text().strip() for each in grown), "their texts")
    gate.open()
    desk.wait_grown()
    for node in grown:
        row = desk.nodes()[node]
        assert row["n_tokens"] == 60
        shown_to_the_end(desk, node, row["text"])


def test_selected_nodes_grow_in_one_call(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=6)
    first, second, third = desk.open_loom(n=3, max_tokens=6)
    desk.row(first).click(modifiers=["Control"])
    desk.row(third).click(modifiers=["Control"])
    page.get_by_role("button", name="Grow 2 each").first.click()
    desk.until(lambda: len(desk.nodes()) == 8, "two more each")
    desk.wait_grown()
    nodes = desk.nodes()
    assert [len(nodes[each]["children"]) for each in (first, second, third)] == [2, 0, 2]


def test_changes_in_one_tab_appear_in_the_other(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=8)
    desk.open_loom(n=2, max_tokens=8)
    other = page.context.new_page()
    other.goto(page.url)
    rows = other.get_by_role("tree", name="Tree").get_by_role("treeitem")
    expect(rows).to_have_count(3)
    desk.press("ArrowRight", "g")
    expect(rows).to_have_count(5)
    desk.wait_grown()
    desk.press("Delete")
    expect(rows).to_have_count(2)
    other.bring_to_front()
    other.keyboard.press("u")
    expect(rows).to_have_count(5)
    expect(desk.tree.get_by_role("treeitem")).to_have_count(5)


def test_response_after_the_end_event_shows_no_growth(desk: Desk, page: Page) -> None:
    """The change feed reports the end of the call before the call's response arrives."""
    desk.sets(n=2, max_tokens=4, seed=1)  # of another, both may say the same, on one row

    def answered_late(route: Route) -> None:
        answer = route.fetch()
        desk.wait_grown()
        for node in (1, 2):
            expect(desk.row(node)).to_be_visible()
        page.wait_for_timeout(300)
        route.fulfill(response=answer)

    # Chromium may let a request pass that an open page sends right after `route`.
    page.route("**/generate", answered_late)
    desk.open_loom()
    with page.expect_response("**/generate"):
        desk.press("g")
    page.wait_for_timeout(200)
    expect(page.get_by_role("contentinfo")).not_to_contain_text("growing")
    desk.press("ArrowRight")
    desk.until(lambda: desk.current == 1, "it goes on")


def test_a_click_on_a_finished_branch_opens_it(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=8)
    desk.open_loom()
    desk.press("g")
    desk.wait_known()
    desk.lane(2).locator(".lane-text").click()
    desk.until(lambda: desk.current == 2, "the branch is the current node")


@pytest.mark.parametrize("look", [{"viewport": {"width": 390, "height": 844}}])
def test_a_finished_branch_shows_all_of_its_text_on_a_phone(desk: Desk, page: Page) -> None:
    desk.sets(n=2, max_tokens=200)
    page.goto(f"/#{desk.make()['name']}")
    page.get_by_role("button", name="Grow 2 branches").first.click()
    desk.wait_known()
    lane = desk.lane(1)
    expect(lane).to_have_attribute("data-state", "done")
    text = lane.locator(".lane-text")
    desk.until(lambda: text.evaluate(SPARE) == 0, "nothing is cut off")
    assert desk.nodes()[1]["text"].strip()[:30] in (text.inner_text())


def test_growing_a_node_that_has_ended_adds_no_empty_branches(desk: Desk, page: Page) -> None:
    """The model always draws the end token where that is allowed."""
    ends = {str(each): 100 for each in desk.served.service.models.lm().text.stop_ids}
    desk.sets(n=3, max_tokens=4)

    def biased(route: Route) -> None:
        route.continue_(post_data={**route.request.post_data_json, "logit_bias": ends})

    page.route("**/generate", biased)
    (node,) = desk.open_loom(n=1, choices=[" yes"])
    assert desk.nodes()[node]["ended"]
    desk.visit(node)
    desk.press("g")
    desk.until(lambda: len(desk.nodes()) == 5, "three branches")
    desk.wait_grown()
    nodes = desk.nodes()
    assert all(nodes[each]["text"] for each in nodes[node]["children"])


def test_branches_of_a_second_call_are_scrolled_into_view(desk: Desk, page: Page) -> None:
    desk.sets(n=6, max_tokens=8)
    desk.open_loom(n=12, max_tokens=40)
    desk.press("g")
    desk.until(lambda: len(desk.lanes) == 6, "six lanes")
    desk.wait_known()
    expect(desk.lane(13)).to_be_in_viewport()


def test_the_outline_of_a_raw_text_shows_no_special_token(desk: Desk, page: Page) -> None:
    """A stand-in for a model whose texts begin with `<bos>`."""

    def with_bos(route: Route) -> None:
        answer = route.fetch()
        page_of_nodes = answer.json()
        page_of_nodes["data"][0]["text"] = "<bos>The fox"
        route.fulfill(response=answer, json=page_of_nodes)

    page.route("**/nodes?*", with_bos)
    desk.open_loom("The fox", template=False)
    expect(desk.row(0)).to_have_text("The fox")
