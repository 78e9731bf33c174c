"""Several models on one page: what the first page proposes, growing with others, copies."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, assert_accessible, expect
from renumbered import renumbered
from serving import Served, serving
from weft.service.server import ServerConfig

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the embedded model, one of other token ids, and a base model."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(renumbered(layers=8), root / "Other-Instruct")
    shutil.copytree(renumbered(layers=8), root / "Small-Base")
    (root / "Small-Base" / "chat_template.jinja").unlink()
    config = ServerConfig(port=0, model_roots=(root,), max_models=4)
    with serving(config) as served:
        for name in ("Other-Instruct", "Small-Base"):
            body = {"source": str(root / name), "wait": True}
            assert served.client.post("/api/v1/models", json=body).json()["status"] == "ok"
        yield served


def test_first_page_explains_itself_and_proposes_raw_text_without_a_template(
    desk: Desk, page: Page
) -> None:
    page.goto("/")
    expect(page.get_by_text("compare several continuations")).to_be_visible()
    expect(page.get_by_text("the model answers your message")).to_be_visible()
    page.get_by_role("radio", name="Raw text").check(force=True)
    expect(page.get_by_text("the model continues your text")).to_be_visible()
    page.get_by_role("radio", name="Chat").check(force=True)
    page.get_by_role("combobox", name="Model").select_option("Small-Base")
    expect(page.get_by_role("radio", name="Raw text")).to_be_checked()
    expect(page.get_by_role("radio", name="Chat")).to_be_disabled()
    expect(page.get_by_text("Small-Base has no chat template")).to_be_visible()
    assert_accessible(page)
    page.get_by_role("button", name="Grow 4 branches").click()
    desk.open_named()
    assert desk.loom["chat_template_used"] is False
    assert desk.loom["model"].endswith("Small-Base")


def test_several_models_grow_side_by_side_and_their_branches_name_them(
    desk: Desk, page: Page
) -> None:
    desk.sets(n=2, max_tokens=8)
    desk.open_loom()
    desk.press("w")
    dialog = page.get_by_role("dialog", name="Grow with")
    models = dialog.get_by_role("list", name="Models that grow")
    expect(models.get_by_role("checkbox", name="tiny")).to_be_checked()
    expect(models.get_by_role("checkbox", name="Small-Base")).to_be_disabled()  # a chat
    models.get_by_role("checkbox", name="Other-Instruct").check()
    expect(dialog).to_contain_text("2 branches with each model, side by side")
    assert_accessible(page)
    page.keyboard.press("Enter")
    desk.until(lambda: len(desk.nodes()) == 5, "four branches")
    desk.wait_known()
    nodes = desk.nodes()
    models_of = [nodes[each]["model"] for each in (1, 2, 3, 4)]
    assert [each and each.rsplit("/", 1)[-1] for each in models_of] == [
        None, None, "Other-Instruct", "Other-Instruct",
    ]  # fmt: skip
    expect(desk.lane(3)).to_contain_text("Other-Instruct · ")
    expect(desk.lane(1)).not_to_contain_text("Other-Instruct")
    expect(desk.row(4)).to_contain_text("Other-Instruct")
    expect(page.get_by_role("button", name="Grow 2 branches").first).to_be_visible()
    desk.visit(4)
    page.get_by_role("tab", name="Node").click()
    branch = page.locator(".fact", has=page.locator("dt", has_text="Branch"))
    expect(branch.locator("dd")).to_have_text(re.compile(r"^\d+$"))
    desk.visit(0)
    page.reload()
    expect(page.get_by_role("list", name="Children")).to_contain_text("Other-Instruct · ")
    assert_accessible(page)
    desk.press("u")
    desk.until(lambda: len(desk.nodes()) == 1, "all branches are undone")


def test_a_model_is_chosen_for_a_loom(desk: Desk, page: Page) -> None:
    desk.sets(n=1, max_tokens=8)
    desk.open_loom(template=False)
    page.get_by_role("tablist", name="Inspector").get_by_role("tab", name="Generate").click()
    models = page.get_by_role("list", name="Models that grow")
    models.get_by_role("checkbox", name="Small-Base").check()
    models.get_by_role("checkbox", name="tiny").uncheck()
    page.reload()
    expect(models.get_by_role("checkbox", name="tiny")).not_to_be_checked()
    page.get_by_role("article", name="Text of the path").click()
    page.get_by_role("button", name="Grow 1 branch with Small-Base").first.click()
    desk.until(lambda: len(desk.nodes()) == 2, "a branch")
    desk.wait_known()
    assert str(desk.nodes()[1]["model"]).endswith("Small-Base")
    desk.visit(1)
    page.get_by_role("tab", name="Node").click()
    fact = page.locator(".fact", has=page.locator("dt", has_text="Model"))
    expect(fact.locator("dd").first).to_have_text("Small-Base")
    page.get_by_role("button", name="Regenerate exactly").click()
    expect(page.locator(".toasts")).to_contain_text("Regenerated the same")


def test_page_follows_models_that_another_client_unloads_and_loads(desk: Desk, page: Page) -> None:
    desk.make(template=False, model="Small-Base")
    desk.visit()
    desk.press("Shift+M")
    rows = page.get_by_role("list", name="Models", exact=True).get_by_role("listitem")
    small = rows.filter(has_text="Small-Base")
    expect(small.get_by_role("button", name="Unload")).to_be_visible()
    source = unload(desk, "Small-Base")
    expect(small).to_have_count(0)
    load(desk, source)
    expect(small.get_by_role("button", name="Unload")).to_be_visible()
    expect(rows).to_have_count(3)
    desk.press("Escape")
    unload(desk, "Small-Base")
    notice = page.get_by_role("status").filter(has_text="Read-only: load Small-Base")
    expect(notice).to_be_visible()
    load(desk, source)
    expect(notice).to_have_count(0)


def test_choice_of_growing_models_drops_a_model_that_another_client_unloads(
    desk: Desk, page: Page
) -> None:
    desk.sets(n=1, max_tokens=8)
    desk.open_loom(template=False)
    desk.press("w")
    dialog = page.get_by_role("dialog", name="Grow with")
    small = dialog.get_by_role("checkbox", name="Small-Base")
    small.check()
    expect(dialog).to_contain_text("1 branch with each model")
    source = unload(desk, "Small-Base")
    expect(small).to_have_count(0)
    expect(dialog).not_to_contain_text("with each model")
    dialog.get_by_role("button", name="Grow").click()
    desk.until(lambda: len(desk.nodes()) == 2, "a branch of the loom's model")
    load(desk, source)


def unload(desk: Desk, name: str) -> str:
    """Unload a model as another client does, and return its source."""
    (source,) = (
        each["source"] for each in desk.ask("GET", "/models")["data"] if each["id"] == name
    )
    desk.ask("DELETE", f"/models/{name}")
    return str(source)


def load(desk: Desk, source: str) -> None:
    desk.ask("POST", "/models", json={"source": source, "wait": True})


def test_all_branches_are_copied_for_another_model(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3)
    old, texts = desk.loom, [each["text"] for each in desk.nodes().values()]
    page.get_by_role("tab", name="Loom").click()
    page.get_by_role("combobox", name="Another model").select_option("Other-Instruct")
    page.get_by_role("button", name="Copy all branches").click()
    desk.until(lambda: desk.open_named()["id"] != old["id"], "the copy is open")
    assert [each["text"] for each in desk.nodes().values()] == texts
    assert desk.loom["model"].endswith("Other-Instruct")
    assert desk.loom["title"] == f"{old['title']} (Other-Instruct)"
    expect(desk.tree.get_by_role("treeitem")).to_have_count(4)
    assert desk.ask("GET", f"/looms/{old['id']}")["n_nodes"] == 4


def test_margin_names_the_model_that_wrote_each_answer(desk: Desk, page: Page) -> None:
    loom = desk.make()
    (own,) = desk.grow(n=1, max_tokens=4)
    other = next(each["id"] for each in desk.ask("GET", "/models")["data"] if "Other" in each["id"])
    (added,) = desk.grow(own, n=1, max_tokens=4, model=other, force=True)
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": "By hand"})
    margin = page.locator(".margin")
    desk.visit(added)
    assert margin.locator(".who").all_inner_texts() == ["You", loom["model"], "Other-Instruct"]
    desk.visit(3)
    expect(margin.locator(".who")).to_have_text(["You", "Written"])
