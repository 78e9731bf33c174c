"""The messages of Undo and Redo name the kind of the change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.page
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "bookmark": ({"bookmark": ""}, "bookmark"),
    "rating": ({"rating": 4}, "rating"),
    "score": ({"score": 0.5}, "score"),
    "note": ({"meta": {"note": "mine"}}, "note"),
    "text": ({"text": " and lean", "in_place": True}, "edit of 1 node"),
    "rating and note": ({"rating": 4, "meta": {"note": "mine"}}, "edit of 1 node"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_undo_and_redo_of_a_change_name_its_kind(bush: Desk, page: Page, name: str) -> None:
    body, expected = CHANGES[name]
    bush.ask("PATCH", bush.of("/nodes/4"), json=body)
    toasts = page.locator(".toasts")
    bush.press("u")
    expect(toasts).to_contain_text(f"Undid: {expected}.")
    bush.press("Control+Shift+z")
    expect(toasts).to_contain_text(f"Redid: {expected}.")


def test_undo_of_a_rating_given_by_key_names_the_rating(bush: Desk, page: Page) -> None:
    bush.row(4).click()
    bush.press("}")
    bush.until(lambda: bush.nodes()[4]["rating"] == 1, "a rating")
    bush.press("u")
    expect(page.locator(".toasts")).to_contain_text("Undid: rating.")
