"""The outline in the page: rows, selections, menus, bookmarks, and the filters of the search."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


def written(desk: Desk, *added: tuple[int, list[str]], prompt: str = "The keeper") -> None:
    """Make a loom of texts below nodes, and open it."""
    desk.make(template=False, prompt=prompt)
    for parent, texts in added:
        desk.ask("POST", desk.of("/nodes"), json={"parent": parent, "texts": texts})
    desk.visit()


@pytest.fixture
def bush(desk: Desk) -> Desk:
    """0 with 1 2 3; 1 with 4 5; 4 with 6 7."""
    written(desk, (0, [" was old", " was young", " slept"]), (1, [" and tall", " and poor"]),
            (4, [", they sing", ", I heard"]))  # fmt: skip
    return desk


def chosen(desk: Desk) -> set[int]:
    rows = desk.tree.locator("[aria-selected=true]")
    return {int(each) for each in rows.evaluate_all("all => all.map((e) => e.dataset.node)")}


def item(page: Page, name: str) -> Locator:
    return page.get_by_role("menu").get_by_role("menuitem", name=name)


def test_row_of_the_prompt_omits_the_chat_template(desk: Desk) -> None:
    desk.open_loom("Tell me a story about a fox.")
    expect(desk.row(0)).to_have_text("Tell me a story about a fox.")


def test_nodes_without_siblings_share_a_row(desk: Desk) -> None:
    written(desk, (0, [" a", " b"]), (1, [" c"]), (3, [" d"]), (4, [" e", " f"]))
    rows = desk.tree.get_by_role("treeitem")
    expect(rows).to_have_count(5)  # 0, 1-3-4, 5, 6, 2
    desk.row(1).click()
    desk.press("ArrowRight")
    desk.until(lambda: desk.current == 3, "within the row")
    expect(rows).to_have_count(5)
    expect(desk.row(3)).to_contain_text("c")
    expect(desk.row(3)).to_have_attribute("aria-level", "2")
    desk.row(3).get_by_role("button", name="Node 3 of 3").click()
    desk.until(lambda: desk.current == 4, "by its dot")
    desk.press("-")
    expect(desk.row(5)).to_have_count(0)


def test_equal_siblings_are_one_row_until_unfolded(desk: Desk, page: Page) -> None:
    written(desk, (0, [" yes", " no", " yes", " yes"]))
    expect(desk.row(1)).to_contain_text("×3")
    expect(desk.row(3)).to_have_count(0)
    desk.row(1).click()
    desk.press("ArrowDown", "ArrowDown")
    desk.until(lambda: desk.current == 3, "all of them can be gone to")
    desk.row(3).get_by_role("button", name="×3").click()
    expect(desk.row(4)).to_be_visible()
    desk.row(4).click(button="right")
    item(page, "Show equal siblings as one row").click()
    expect(desk.row(4)).to_have_count(0)


def test_any_text_stays_on_its_row(desk: Desk) -> None:
    texts = [
        "w" * 400,
        "  \n ",
        "كان يا ما كان",
        "狐狸很聪明",
        "🦊 👩‍👩‍👧‍👦",
        "<script>document.title='!'</script>",
        "\u202etricky",
    ]
    written(desk, (0, texts))
    expect(desk.row(2)).to_contain_text("··⏎·")
    expect(desk.row(6)).to_contain_text("<script>document.title='!'</script>")
    assert desk.page.title() != "!"
    rows = desk.tree.get_by_role("treeitem").evaluate_all(
        "all => all.map((e) => [e.offsetHeight, e.scrollWidth - e.clientWidth])"
    )
    assert {tuple(each) for each in rows} == {(28, 0)}
    box = desk.tree.bounding_box()
    words = desk.row(3).locator("[dir=auto]").bounding_box()
    assert box
    assert words
    assert words["x"] - box["x"] < 60  # it begins where others do


def test_node_without_text_shows_that_it_ended_at_once(desk: Desk) -> None:
    desk.make(template=False, prompt="The end")
    end = next(iter(desk.served.service.models.lm().text.stop_ids))
    (node,) = desk.grow(n=1, logit_bias={str(end): 1e6})
    desk.visit()
    expect(desk.row(node)).to_contain_text("(ended immediately)")


def test_rows_are_selected_and_grown_together(bush: Desk, page: Page) -> None:
    bush.sets(n=2)
    bush.row(2).click(modifiers=["Control"])
    bush.row(6).click(modifiers=["Control"])
    assert chosen(bush) == {2, 6}
    bar = page.get_by_role("region", name="Selected nodes")
    expect(bar).to_contain_text("2 nodes selected")
    bush.row(6).click(modifiers=["Control"])
    bush.row(5).click(modifiers=["Shift"])
    assert chosen(bush) == {6, 7, 5}
    bush.press("Escape")
    expect(bar).to_have_count(0)
    bush.press("A")
    assert chosen(bush) == {2, 3, 5, 6, 7}
    expect(bar).to_contain_text("5 × 4 = 20 branches, at most 960 tokens")
    bush.press("Escape", "r", "a")
    expect(bar).to_contain_text("1 × 4 = 4 branches")
    assert_accessible(page)
    bar.get_by_role("button", name="Grow 4 each").click()
    bush.until(lambda: len(bush.nodes()) == 12, "four more")
    expect(bar).to_have_count(0)
    bush.wait_grown()


def test_selected_nodes_are_removed_and_restored_together(bush: Desk, page: Page) -> None:
    for node in (1, 4, 2):  # 4 goes with 1
        bush.row(node).click(modifiers=["Control"])
    bush.press("Delete")
    bush.until(lambda: set(bush.nodes()) == {0, 3}, "they went")
    expect(page.get_by_text("Removed 6 nodes")).to_be_visible()
    bush.press("u")
    bush.until(lambda: set(bush.nodes()) == set(range(8)), "all is back")


def test_selection_over_the_servers_limit_is_reported_before_growing(
    desk: Desk, page: Page
) -> None:
    written(desk, *[(0, [f" n{i} {k}" for k in range(200)]) for i in range(3)])
    desk.press("A")
    bar = page.get_by_role("region", name="Selected nodes")
    expect(bar).to_contain_text("600 × 1 = 600 branches")
    expect(bar).to_contain_text("The server’s limit is 1,024 branches at once.")
    expect(bar.get_by_role("button", name="Grow 1 each")).to_be_enabled()


def test_buttons_and_menu_of_a_row_change_its_node(bush: Desk, page: Page) -> None:
    bush.row(2).hover()
    bush.row(2).get_by_role("button", name="Bookmark").click()
    bush.until(lambda: bush.nodes()[2]["bookmark"] is not None, "a bookmark")
    bush.row(2).get_by_role("button", name="Remove").click()
    expect(bush.row(2)).to_have_count(0)
    bush.row(1).click()
    bush.press("Shift+F10")
    expect(item(page, "Grow 4 branches")).to_be_focused()
    assert_accessible(page)
    bush.press("End")
    expect(item(page, "Keep only this path")).to_be_focused()
    bush.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(bush.tree).to_be_focused()
    bush.row(4).click(button="right")
    item(page, "Show only this subtree").click()
    expect(bush.row(4)).to_have_attribute("aria-level", "1")
    crumbs = page.get_by_role("navigation", name="Subtree shown")
    crumbs.get_by_role("button", name="The keeper").click()
    expect(bush.row(2)).to_have_count(0)
    expect(bush.row(3)).to_be_visible()
    expect(crumbs).to_have_count(0)


def test_node_is_moved_by_keys_and_by_dragging(bush: Desk, page: Page) -> None:
    bush.row(4).click()
    bush.press("y")
    expect(page.get_by_role("region", name="Move a node")).to_be_visible()
    bush.row(6).click()
    expect(page.get_by_text("A node cannot be moved below itself.")).to_be_visible()
    bush.press("ArrowLeft", "ArrowLeft", "3", "Enter")
    bush.until(lambda: bush.nodes()[4]["parent"] == 3, "by keys alone")
    expect(bush.row(4)).to_have_attribute("aria-level", "2")  # it shares its parent's row
    bush.press("u")
    bush.until(lambda: bush.nodes()[4]["parent"] == 1, "and back")
    bush.row(5).drag_to(bush.row(2))
    bush.until(lambda: bush.nodes()[5]["parent"] == 2, "by the mouse")


def test_label_of_a_bookmark_is_saved_and_shown(bush: Desk, page: Page) -> None:
    bush.row(2).click()
    bush.press("b", "B")
    marks = page.get_by_role("region", name="Bookmarks")
    marks.get_by_role("listitem").hover()
    marks.get_by_role("button", name="Edit the label").click()
    page.keyboard.type("the young one")
    bush.press("Enter")
    expect(marks).to_contain_text("the young one")
    bush.until(lambda: bush.nodes()[2]["bookmark"] == "the young one", "on the server")
    expect(bush.tree).to_be_focused()
    bush.press("r")
    assert_accessible(page)
    marks.get_by_role("button", name="the young one").click()
    bush.until(lambda: bush.current == 2, "it leads there")
    marks.get_by_role("button", name="Remove the bookmark").click()
    expect(marks).to_contain_text("None yet.")


def test_search_filters_narrow_the_list_of_hits(bush: Desk, page: Page) -> None:
    bush.row(7).click()
    bush.press("b", "/")
    page.keyboard.type("I|o")
    expect(page.get_by_text("No results").first).to_be_visible()
    page.get_by_role("button", name="Regular expression").click()
    status = page.locator("#search-status")
    expect(status).to_have_text("5 nodes")
    page.get_by_role("button", name=re.compile("^Match case")).click()
    expect(status).to_have_text("4 nodes")
    page.get_by_role("button", name="Bookmarked").click()
    expect(status).to_have_text("1 node")
    page.get_by_role("button", name="Results as a list").click()
    hits = page.get_by_role("list", name="Results")
    expect(hits.get_by_role("listitem")).to_have_count(1)
    expect(hits.locator("mark").first).to_have_text("I")
    assert_accessible(page)
    page.get_by_role("searchbox").fill("(")
    expect(status).to_have_text("This regular expression is not complete.")
    bush.press("Escape", "n")
    expect(page.get_by_role("searchbox")).to_have_count(0)


def test_search_filters_by_author_and_average_probability(desk: Desk, page: Page) -> None:
    desk.open_loom(n=4, max_tokens=12)
    desk.ask("POST", desk.of("/nodes"), json={"text": " by hand"})
    means = [
        math.exp(node["mean_logprob"])
        for node in desk.nodes().values()
        if node["mean_logprob"] is not None
    ]
    bound = round(100 * sum(means) / len(means))
    desk.press("/")
    status = page.locator("#search-status")
    page.get_by_role("button", name="Generated", exact=True).click()
    expect(status).to_have_text("4 nodes")
    page.get_by_label("Average probability from, in per cent").fill(str(bound))
    n = sum(100 * mean >= bound for mean in means)
    assert 0 < n < 4
    expect(status).to_have_text("1 node" if n == 1 else f"{n} nodes")
    page.get_by_label("Average probability from, in per cent").fill("")
    page.get_by_role("button", name="Written", exact=True).click()
    expect(status).to_have_text("1 node")


def test_slow_pattern_keeps_its_first_hits_and_a_responsive_page(bush: Desk, page: Page) -> None:
    """The search of the next pattern starts at once."""
    for text in (" aaa", " " + "a" * 60 + "!", " bbb"):
        bush.ask("POST", bush.of("/nodes"), json={"parent": 7, "text": text})
    expect(bush.row(10)).to_be_visible()
    bush.press("/")
    field = page.get_by_role("searchbox", name="Search")
    status = page.locator("#search-status")
    page.get_by_role("button", name="Regular expression").click()
    page.evaluate(
        """() => {
          window.statuses = new Set()
          const add = () => statuses.add(document.querySelector('#search-status')?.textContent)
          new MutationObserver(add)
            .observe(document.body, { subtree: true, childList: true, characterData: true })
          window.longest = 0
          let last = performance.now()
          setInterval(() => {
            longest = Math.max(longest, performance.now() - last)
            last = performance.now()
          }, 10)
        }"""
    )
    field.fill("(a+)+$")
    page.get_by_role("tab", name="Node", exact=True).click()
    page.get_by_role("heading", name="The prompt").wait_for()  # while it is looked for
    words = "The regular expression takes too long; these are the first results."
    expect(status).to_have_text(words)
    assert "Searching" in page.evaluate("[...statuses]")  # for less than a second
    expect(bush.row(8)).to_be_visible()
    expect(bush.row(9)).to_have_count(0)
    # The pattern alone takes far longer; the limit allows for a busy machine.
    assert page.evaluate("longest") < 5000
    field.fill("(a+)+!")
    field.press("Enter")  # selects the hit as soon as it arrives
    bush.until(lambda: bush.current == 9, "the only hit")
    expect(status).to_have_text("1 node")
    field.fill("(a+)+$")
    bush.press("Escape")
    expect(field).to_have_count(0)
    expect(bush.row(10)).to_be_visible()


def test_search_of_all_looms_opens_the_hit(desk: Desk, page: Page) -> None:
    written(desk, (0, [" 🦊 of zebrafinches"]), prompt="One")
    first = desk.loom["name"]
    written(desk, (0, [" other"]), prompt="Two")
    expect(desk.row(1)).to_contain_text("other")
    desk.press("/")
    page.get_by_role("radio", name="All looms").check()
    page.get_by_role("searchbox").fill("zebrafinches")
    hit = page.get_by_role("list", name="Results").get_by_role("link")
    expect(hit).to_contain_text("One")
    expect(hit.locator("mark")).to_have_text("zebrafinches")
    hit.click()
    desk.until(lambda: f"#{first}" in page.url, "it leads there")
    desk.until(lambda: desk.current == 1, "to the node")


def test_rows_added_elsewhere_do_not_move_visible_rows(desk: Desk, page: Page) -> None:
    desk.make(template=False, prompt="Many")
    texts = [f" row {i}" for i in range(120)]
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "texts": texts})
    desk.visit(90)
    before = desk.row(90).bounding_box()
    desk.ask("POST", desk.of("/nodes"), json={"parent": 3, "texts": [" a", " b", " c"]})
    expect(desk.tree.locator(".tree-all")).to_have_css("height", f"{124 * 28}px")
    page.wait_for_timeout(300)
    assert desk.row(90).bounding_box() == before
    desk.press("ArrowDown")
    after = desk.row(91).bounding_box()
    assert before
    assert after
    assert after["y"] - before["y"] == 28  # in sight already: nothing scrolls


def test_growth_repaints_only_the_rows_that_grow(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3)
    page.evaluate(
        """() => {
      window.painted = new Set()
      new MutationObserver((all) => {
        for (const each of all) {
          const row = (each.target.nodeType === 1 ? each.target : each.target.parentElement)?.closest('[role=treeitem]')
          if (row) window.painted.add(Number(row.dataset.node))
        }
      }).observe(document.querySelector('[role=tree]'), { subtree: true, characterData: true })
    }"""  # noqa: E501
    )
    (node,) = desk.grow(0, n=1, max_tokens=24)
    expect(desk.row(node)).to_be_visible()
    page.wait_for_timeout(200)
    assert set(page.evaluate("[...window.painted]")) <= {0, node}


def test_rows_show_the_kv_state_of_their_path(desk: Desk, page: Page) -> None:
    urls: list[str] = []
    page.on("request", lambda each: urls.append(each.url) if "fields=kv" in each.url else None)
    first, second = desk.open_loom(n=2, max_tokens=12)

    def dot(node: int) -> Locator:
        return desk.row(node).locator("[data-kv]")

    def look_at_the_gauge() -> None:
        # A page sends this request only after it has painted.
        with page.expect_response(lambda each: each.url.endswith("/api/v1/kv")):
            page.get_by_role("contentinfo").get_by_role("button", name="Memory").click()
        desk.press("Escape")

    words = desk.row(first).locator("[dir=auto]").bounding_box()
    expect(dot(first)).to_have_attribute("data-kv", "hot")
    edge = page.locator(".pane.left .resizer").bounding_box()
    at = dot(first).bounding_box()
    assert at is not None
    assert edge is not None
    assert at["x"] + at["width"] <= edge["x"]  # the ring is not cut
    expect(desk.row(first)).to_have_attribute("aria-description", "KV cached")
    assert desk.row(first).locator("[dir=auto]").bounding_box() == words
    assert_accessible(page)
    reply = desk.ask("POST", desk.of(f"/nodes/{second}/kv"), json={"op": "evict"})
    assert reply["kv"]["state"] == "partly"  # the prompt is there
    desk.ask("POST", desk.of(f"/nodes/{first}/kv"), json={"op": "pin"})
    look_at_the_gauge()
    expect(dot(second)).to_have_attribute("title", "KV partly cached")
    expect(desk.row(second)).not_to_have_attribute("aria-description", "KV cached")
    expect(desk.row(first)).to_have_attribute("aria-description", "KV cached, pinned")
    desk.ask("POST", desk.of(f"/nodes/{first}/kv"), json={"op": "unpin"})
    lm = desk.served.service.models.lm()
    desk.until(lambda: lm.tree.budget.unevictable == 0, "it is not pinned")
    lm.clear_cache()
    look_at_the_gauge()
    for node in (0, first, second):
        expect(dot(node)).to_have_attribute("data-kv", "cold")
    page.wait_for_timeout(1500)
    # One or two requests for all rows per change; a slow page receives six changes one by one.
    assert 3 <= len(urls) <= 12, urls
    assert all(f"nodes={node}" in urls[-1] for node in (0, first, second))
