"""Markdown in chats: code, tables and maths are drawn, and no text becomes markup or a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page
ANSWER = """# Foxes

A *fox* is **quick**; `x < 1 && y` is code, 2 &lt; 3, and $5 and $6 are prices.

1. first
   - [x] done
2. second

| name | legs |
|:-----|-----:|
| fox  | 4    |

```python
print("<b>" + "**")
```

Inline $e^{i\\pi} + 1 = 0$ and a block:

$$\\frac{a}{b} < \\sqrt{2}$$
"""
HOSTILE = """# Attack <img src=x onerror="window.hit=1">

<script>window.hit = 2</script>

<div onclick="window.hit=3">div</div> <svg/onload=window.hit=4>

[one](javascript:window.hit=5) [two](JaVaScRiPt:window.hit=6)
[three](data:text/html,<script>1</script>)

<javascript:window.hit=7> [four][ref] ![pixel](http://outside.example/pixel.png)
![inline](data:image/svg+xml,<svg onload=window.hit=8>)

[ref]: vbscript:window.hit=9

$\\href{javascript:window.hit=10}{x}$ $\\includegraphics{http://outside.example/a.png}$

$x^2$

$$\\class{a}{\\html{<b>b</b>}}$$

```"><script>window.hit=11</script>
code
```

[good](https://outside.example/page) <https://outside.example/auto>
"""


def chat_with(desk: Desk, answer: str, *, template: bool = True) -> Locator:
    """Open a loom whose only child is an answer, and return the text of the path."""
    desk.make("Tell me about foxes.", template=template)
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": answer})
    desk.visit(1)
    return desk.text


def test_answer_of_a_chat_is_shown_as_markdown(desk: Desk, page: Page) -> None:
    text = chat_with(desk, ANSWER)
    expect(text.get_by_role("heading", name="Foxes")).to_be_visible()
    expect(text.locator("em")).to_have_text("fox")
    expect(text.locator("strong")).to_have_text("quick")
    expect(text.locator("p").first).to_contain_text("x < 1 && y is code, 2 < 3, and $5 and $6 are")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.get_by_role("cell", name="4", exact=True)).to_be_visible()
    expect(text.locator("pre")).to_have_text('print("<b>" + "**")')
    expect(text.locator("math")).to_have_count(2)
    expect(text.locator("math mfrac")).to_have_count(1)
    assert_accessible(page)


def test_key_shows_the_exact_text_and_is_remembered(desk: Desk, page: Page) -> None:
    text = chat_with(desk, ANSWER)
    expect(text.locator("table")).to_have_count(1)
    desk.press("d")
    expect(text.locator("table")).to_have_count(0)
    expect(desk.part(1)).to_have_text(ANSWER)
    page.reload()
    expect(desk.part(1)).to_have_text(ANSWER)
    desk.press("d")
    expect(text.locator("table")).to_have_count(1)


def test_token_cursor_and_colours_show_the_exact_text(desk: Desk, page: Page) -> None:
    text = chat_with(desk, ANSWER)
    expect(text.locator("table")).to_have_count(1)
    desk.press("p")
    expect(desk.part(1)).to_have_text(ANSWER)
    page.get_by_role("button", name="Coloured by probability").click()
    page.get_by_role("button", name="Coloured by entropy").click()
    page.get_by_role("button", name="Coloured by rank").click()
    expect(text.locator("table")).to_have_count(1)
    page.evaluate("document.activeElement.blur()")
    desk.press(".")
    expect(desk.part(1)).to_have_text(ANSWER)
    expect(text.locator("[data-cursor]")).to_have_count(1)


def test_stories_and_plain_answers_are_shown_token_by_token(desk: Desk, page: Page) -> None:
    text = chat_with(desk, ANSWER, template=False)
    expect(desk.part(1)).to_have_text(ANSWER)
    desk.press("d")
    expect(text.locator("table")).to_have_count(1)
    plain = "A fox is quick. It costs $5, or 3 * 4."
    text = chat_with(desk, plain)
    expect(desk.part(1)).to_have_text(plain)
    expect(text.locator("[data-markdown]")).to_have_count(0)


def grow_marked(desk: Desk) -> int:
    """Let an answer with Markdown grow, and return its node once it has a lane."""
    start = re.escape(
        "**Foxes** are [quick](https://outside.example).\n\n```python\nfox = 1\n```\n"
    )
    (node,) = desk.grow(n=1, wait=False, regex=f"{start}[a-z ]{{300}}", max_tokens=400)
    desk.until(lambda: desk.lanes == [node], "a lane")
    return node


def test_growing_answer_is_shown_as_markdown(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom("Tell me about foxes.")
    gate.hold(0)
    node = grow_marked(desk)
    desk.press("1")
    desk.until(lambda: desk.current == node, "it is the current node")
    gate.hold(60)
    expect(desk.text.locator("strong")).to_have_text("Foxes")
    expect(desk.text.locator("pre")).to_have_text("fox = 1")
    assert desk.nodes()[node]["growing"]
    gate.open()
    desk.wait_known()
    expect(desk.text.locator("strong")).to_have_text("Foxes")


def test_branches_of_a_chat_are_shown_as_markdown(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom("Tell me about foxes.")
    gate.hold(60)
    node = grow_marked(desk)
    lane = desk.lane(node).locator(".lane-text")
    expect(lane.locator("strong")).to_have_text("Foxes")
    assert desk.nodes()[node]["growing"]
    gate.open()
    desk.wait_known()
    expect(lane.locator("pre")).to_have_text("fox = 1")
    page.reload()
    child = page.locator(f".children [data-child='{node}']")
    expect(child.locator("pre")).to_have_text("fox = 1")
    expect(child.locator("a, button")).to_have_count(0)  # it is a button itself
    assert_accessible(page)
    desk.press("d")
    expect(child).to_contain_text("**Foxes** are [quick]")
    desk.press("d")
    child.locator("pre").click()
    desk.until(lambda: desk.current == node, "a click goes to the branch")


def test_code_blocks_have_the_font_of_tokens(desk: Desk, page: Page) -> None:
    font = (
        chat_with(desk, ANSWER)
        .locator("pre code")
        .evaluate("(each) => getComputedStyle(each).fontFamily")
    )
    assert font.startswith('"JetBrains Mono"')


def test_hostile_markdown_runs_nothing_and_requests_nothing(desk: Desk, page: Page) -> None:
    text = chat_with(desk, HOSTILE)
    expect(text.get_by_role("heading")).to_contain_text('<img src=x onerror="window.hit=1">')
    expect(text).to_contain_text("<script>window.hit = 2</script>")
    expect(text.locator("math").first).to_be_attached()
    for tag in ("img", "script", "svg", "iframe", "object", "[onclick]", "[onload]", "[onerror]"):
        expect(text.locator(tag)).to_have_count(0)
    links = text.locator("a").evaluate_all("all => all.map((each) => each.getAttribute('href'))")
    assert links == [
        "http://outside.example/pixel.png",
        "https://outside.example/page",
        "https://outside.example/auto",
    ]
    rels = text.locator("a").evaluate_all("all => all.map((each) => each.rel)")
    assert all("noreferrer" in rel and "noopener" in rel for rel in rels)
    text.get_by_text("[one](").click()
    assert page.evaluate("window.hit") is None
    assert all(url.startswith(f"{desk.served.url}/") for url in desk.watch.requested)
