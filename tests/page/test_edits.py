"""Two tabs show the server's tree after every structural edit, its undo and its redo."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.page
Children = dict[int, list[int]]


class Tabs(NamedTuple):
    desk: Desk
    pages: tuple[Page, Page]

    def edit(self, path: str, method: str = "POST", **body: Any) -> bool:
        """Edit over the API, as another program does. Return False if the server rejects it."""
        path = f"/api/v1{self.desk.of(path)}"
        answer = self.desk.served.client.request(method, path, json=body)
        assert answer.status_code < 500, answer.text
        return answer.status_code < 300

    def check(self, what: str) -> dict[int, Any]:
        """Wait until both tabs show all nodes of the server, in its order. Returns the nodes."""
        nodes = self.desk.nodes()
        expected = tree_of(nodes)
        for page in self.pages:
            try:
                self.desk.until(lambda page=page: shown_tree(page) == expected, what)
            except AssertionError:
                raise AssertionError(f"{what}: {expected}, not {shown_tree(page)}") from None
        return nodes


def tree_of(nodes: dict[int, Any]) -> Children:
    """Return the children of each node, in the order of rows."""
    return {
        number: grouped([nodes[each] for each in node["children"]])
        for number, node in nodes.items()
        if node["children"]
    }


def grouped(children: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of children in the order of rows, where equal leaves share one row."""
    groups: dict[object, list[int]] = {}
    for node in children:
        key = (node["node"],) if node["children"] else node["text"]
        groups.setdefault(key, []).append(node["node"])
    return [number for group in groups.values() for number in group]


def shown_tree(page: Page) -> Children:
    """Read the tree from the rows of the outline."""
    rows = page.get_by_role("tree", name="Tree", exact=True).locator("[role=treeitem]")
    read = rows.evaluate_all(
        "all => all.map((e) => [+e.ariaLevel, e.dataset.nodes, e.dataset.same === 'true'])"
    )
    tree: Children = {}
    ends: list[int] = []  # the last node of the row at each level
    for level, text, is_same in read:
        nodes = [int(each) for each in text.split()]
        del ends[level - 1 :]
        if ends:
            tree.setdefault(ends[-1], []).extend(nodes if is_same else nodes[:1])
        if not is_same:
            for parent, child in zip(nodes, nodes[1:], strict=False):
                tree[parent] = [child]
        ends.append(nodes[-1])
    return tree


@pytest.fixture
def tabs(bush: Desk) -> Tabs:
    """Two tabs with the tree of `bush`, and below it: 6 with 8; 8 with 9 10; 9 with 11."""
    desk = bush
    for parent, texts in (
        (6, [" that it was late"]),
        (8, [" and cold", " and dark"]),
        (9, [" and wet"]),
    ):
        desk.ask("POST", desk.of("/nodes"), json={"parent": parent, "texts": texts})
    other = desk.page.context.new_page()
    other.goto(desk.page.url)
    tabs = Tabs(desk, (desk.page, other))
    tabs.check("at the start")
    return tabs


EDITS: dict[str, Callable[[Tabs], object]] = {
    "split": lambda tabs: tabs.edit("/nodes/4/split", at_token=1),
    "merge": lambda tabs: tabs.edit("/nodes/8/merge"),
    "clip": lambda tabs: tabs.edit("/nodes/4/clip", keep=1, children="keep"),
    "clip and drop": lambda tabs: tabs.edit("/nodes/4/clip", keep=1, children="drop"),
    "move": lambda tabs: tabs.edit("/nodes/6/move", parent=2),
    "move to the front": lambda tabs: tabs.edit("/nodes/3/move", parent=0, index=0),
    "remove": lambda tabs: tabs.edit("/nodes/4", "DELETE"),
    "edit": lambda tabs: tabs.edit("/nodes/4", "PATCH", text=" and lean", in_place=True),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("late", [(), ("news",)], ids=["", "late"])
def test_an_edit_its_undo_and_its_redo_keep_all_nodes_in_two_tabs(tabs: Tabs, name: str) -> None:
    assert EDITS[name](tabs)
    tabs.check(name)
    for turn in ("undo", "redo", "undo"):
        assert tabs.edit(f"/{turn}")
        tabs.check(f"{turn} of {name}")


@pytest.mark.parametrize(
    ("key", "node"), [("m", 8), ("Delete", 4), ("x", 4), ("X", 4)], ids=lambda each: str(each)
)
def test_an_edit_by_key_its_undo_and_its_redo_keep_all_nodes(
    tabs: Tabs, key: str, node: int
) -> None:
    desk, page = tabs.desk, tabs.pages[0]
    page.bring_to_front()
    page.evaluate("(to) => { location.hash = location.hash.split('/')[0] + '/' + to }", node)
    desk.until(lambda: desk.current == node, "there")
    for pressed in (key, "u", "Control+Shift+z", "u"):
        rev = desk.ask("GET", desk.of())["rev"]
        desk.press(pressed)
        desk.until(lambda rev=rev: desk.ask("GET", desk.of())["rev"] > rev, f"{pressed} is done")
        tabs.check(pressed)


@pytest.mark.parametrize(("current", "expected"), [(6, 4), (8, 8), (11, 11)])
def test_merge_in_another_tab_keeps_the_current_node_or_selects_its_parent(
    tabs: Tabs, current: int, expected: int
) -> None:
    desk = tabs.desk
    assert tabs.edit("/nodes/7", "DELETE")
    tabs.check("removal of the sibling")
    desk.page.evaluate(
        "(to) => { location.hash = location.hash.split('/')[0] + '/' + to }", current
    )
    desk.until(lambda: desk.current == current, "there")
    assert tabs.edit("/nodes/6/merge")
    tabs.check("merge")
    desk.until(lambda: desk.current == expected, f"at {expected}, not {desk.current}")


def random_edit(tabs: Tabs, nodes: dict[int, Any], choose: random.Random) -> str:
    """Do one edit of a kind and at a node that `choose` draws; the server may reject it."""
    node, other = choose.choice(list(nodes)), choose.choice(list(nodes))
    # The tree neither dies out nor outgrows the outline.
    if len(nodes) > 24:
        kind = choose.choice(("remove", "merge", "undo"))
    elif len(nodes) < 8:
        kind = "add"
    else:
        kind = choose.choice(
            ("add", "split", "merge", "clip", "move", "remove", "edit", "fork", "undo", "redo")
        )
    at, word = f"/nodes/{node}", choose.choice((" red", " and very green", " blue or grey"))
    cut = choose.randint(1, 3)
    if kind == "add":
        tabs.edit("/nodes", parent=node, texts=[word, f"{word} sky"])
    elif kind in ("split", "fork"):
        tabs.edit(f"{at}/{kind}", at_token=cut, **({"text": word} if kind == "fork" else {}))
    elif kind == "merge":
        tabs.edit(f"{at}/merge")
    elif kind == "clip":
        tabs.edit(f"{at}/clip", keep=cut, children=choose.choice(("keep", "drop")))
    elif kind == "move":
        tabs.edit(f"{at}/move", parent=other, index=choose.choice((None, 0)))
    elif kind == "remove":
        tabs.edit(f"{at}?what={choose.choice(('node', 'children'))}", "DELETE")
    elif kind == "edit":
        tabs.edit(at, "PATCH", text=word, in_place=choose.random() < 0.5)
    else:
        for _ in range(choose.randint(1, 4)):
            tabs.edit(f"/{kind}")
    return f"{kind} at {node}"


@pytest.mark.parametrize(
    "n_steps", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(0)])]
)
def test_random_edits_show_the_server_tree_in_two_tabs(tabs: Tabs, n_steps: int) -> None:
    choose = random.Random(7)
    nodes = tabs.check("at the start")
    for step in range(n_steps):
        what = random_edit(tabs, nodes, choose)
        nodes = tabs.check(f"step {step}, {what}")
    expect(tabs.pages[1].get_by_role("contentinfo").locator(".n-nodes")).to_contain_text(
        f"{len(nodes)} node"
    )


def test_edit_while_the_model_loads_is_kept_and_explained(desk: Desk, page: Page) -> None:
    """A stand-in for a model that loads slowly."""
    desk.watch.allow("503")
    desk.open_loom(template=False, n=1)
    message = "model 'tiny' is being loaded: load 0 %"
    error = {"code": "model_loading", "type": "unavailable", "message": message}

    def is_loading(route: Route) -> None:
        route.fulfill(status=503, json={"error": error})

    page.route("**/nodes/1", is_loading)
    desk.press("ArrowRight", "e")
    page.keyboard.type("More. ")
    page.keyboard.press("Control+Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The model is still loading. Try again when it is ready.")
    expect(alert).not_to_contain_text("%")
    page.unroute("**/nodes/1")
    page.keyboard.press("Control+Enter")
    desk.until(lambda: len(desk.nodes()) == 3, "the edit is saved")
