"""Siblings are sorted and rated, and one key continues a branch to its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


def listed(page: Page) -> list[int]:
    rows = page.get_by_role("list", name="Children").locator("[data-child]")
    return [int(each.get_attribute("data-child") or 0) for each in rows.all()]


def expected(desk: Desk, name: str, *, reverse: bool = True) -> list[int]:
    nodes = [node for node in desk.nodes().values() if node["parent"] == 0]
    ranked = sorted(nodes, key=lambda node: node[name], reverse=reverse)
    return [node["node"] for node in ranked]


def test_siblings_are_sorted_in_list_outline_and_keys(desk: Desk, page: Page) -> None:
    desk.sets(temperature=1.5)
    desk.open_loom("The fox", template=False, n=4, max_tokens=9, temperature=4.0)
    assert listed(page) == [1, 2, 3, 4]
    order = page.get_by_label("Sort siblings by")
    order.select_option("Probability")
    assert listed(page) == expected(desk, "mean_logprob")
    order.select_option("Entropy")
    lowest_first = expected(desk, "mean_entropy", reverse=False)
    assert listed(page) == lowest_first
    rows = desk.tree.locator("[role=treeitem]").evaluate_all(
        "all => all.map((each) => Number(each.dataset.node))"
    )
    assert [row for row in rows if row] == lowest_first
    assert_accessible(page)
    page.evaluate("document.activeElement.blur()")
    desk.press("1", "ArrowDown")
    assert desk.current == lowest_first[1]
    desk.reload()
    desk.row(lowest_first[0]).wait_for()
    desk.press("r")
    page.get_by_role("list", name="Children").wait_for()
    assert listed(page) == lowest_first


def test_ratings_sort_siblings_and_rank_exported_pairs(
    desk: Desk, page: Page, tmp_path: Path
) -> None:
    desk.open_loom("The fox", template=False, n=3, max_tokens=9, temperature=4.0)
    desk.press("ArrowRight", "}", "}", "}")
    expect(page.get_by_text("Rated 3 of 5.")).to_have_count(1)
    expect(page.locator(".toasts")).not_to_contain_text("Rated 2")
    expect(desk.row(1)).to_have_accessible_name(re.compile(", rated 3"))
    expect(desk.row(1).get_by_title("Rated 3 of 5")).to_have_text("3")
    desk.press("{", "{")
    expect(page.get_by_text("Rated 1 of 5.")).to_have_count(1)
    desk.press("ArrowDown")
    page.get_by_role("tab", name="Node").click()
    page.get_by_role("radiogroup", name="Rating").get_by_label("4").click()
    desk.until(lambda: desk.nodes()[2]["rating"] == 4, "a rating of 4")
    desk.until(lambda: desk.nodes()[1]["rating"] == 1, "a rating of 1")
    page.evaluate("document.activeElement.blur()")
    desk.press("{")
    desk.until(lambda: desk.nodes()[2]["rating"] == 3, "a rating of 3")
    assert_accessible(page)
    desk.press("r")
    page.get_by_label("Sort siblings by").select_option("Rating")
    expect(page.locator("[data-child]").first).to_contain_text("rated 3")
    assert listed(page) == [2, 1, 3]
    page.evaluate("document.activeElement.blur()")
    desk.press("Control+s")
    dialog = page.get_by_role("dialog", name="Export")
    dialog.get_by_label("Format").select_option("pairs")
    ranked = dialog.get_by_role("radiogroup", name="Rank siblings by")
    expect(ranked.get_by_label("Rating")).to_be_checked()
    expect(dialog.get_by_role("region", name="Preview")).to_contain_text("chosen")
    with page.expect_download() as coming:
        dialog.get_by_role("button", name="Save").click()
    coming.value.save_as(tmp_path / "pairs.jsonl")
    (pair,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines())
    nodes = desk.nodes()
    assert nodes[2]["text"] in json.dumps(pair["chosen"], ensure_ascii=False)
    assert nodes[1]["text"] in json.dumps(pair["rejected"], ensure_ascii=False)


def test_key_grows_one_branch_until_it_ends(desk: Desk, page: Page) -> None:
    desk.sets(n=3, max_tokens=4)
    desk.open_loom("Tell me a story about a fox.", template=False)
    desk.press("W")
    desk.until(lambda: desk.current == 1, "the branch is shown")
    desk.wait_known()
    (branch,) = (node for node in desk.nodes().values() if node["parent"] == 0)
    assert branch["finish_reason"] != "length"
    node = desk.ask("GET", desk.of(f"/nodes/{branch['node']}"), params={"fields": "params"})
    assert node["params"]["max_tokens"] == 4096
