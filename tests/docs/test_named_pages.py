"""Pages and headings that messages of the code name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(
    {
        match
        for path in (ROOT / "src").rglob("*.py")
        for match in re.findall(
            r"\bdocs/([\w-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        )
    }
)


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs write them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_messages_name_the_page_for_troubleshooting() -> None:
    assert ("troubleshooting.md", "out-of-memory") in NAMED


@pytest.mark.parametrize(("name", "anchor"), NAMED)
def test_page_that_a_message_names_has_the_heading(name: str, anchor: str) -> None:
    page = ROOT / "docs" / name
    assert page.is_file()
    assert not anchor or anchor in slugs(page)
