"""Several models on one page: what the first page proposes, growing with others, copies."""

from __future__ import annotations

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
