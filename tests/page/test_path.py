"""The text of the path: read, tinted, pointed at, forked, edited, cut; and its lanes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page

_BOXES = """(texts) => texts.map((each) => {
  const range = document.createRange()
  range.selectNodeContents(each)
  return [...range.getClientRects()].map((b) => [b.top, b.right].map(Math.round)).at(-1)
})"""


def text_of_part(desk: Desk, node: int) -> str:
    """The text of a node's part of the path, as it is in the document."""
    return desk.part(node).evaluate("(each) => each.textContent")


def tokens(desk: Desk, node: int, **query: object) -> list[dict]:
    return desk.ask("GET", desk.of(f"/nodes/{node}/tokens"), params=query)["data"]


def card(desk: Desk) -> Locator:
    return desk.page.get_by_role("region", name="Token", exact=True)


def cursor(desk: Desk) -> Locator:
    return desk.text.locator("[data-cursor]")


def point_at(desk: Desk, node: int, word: str) -> tuple[float, float]:
    """Return the middle of a word on the screen."""
    box = desk.part(node).evaluate(
        """(each, word) => {
          const walker = document.createTreeWalker(each, NodeFilter.SHOW_TEXT)
          for (let text = walker.nextNode(); text; text = walker.nextNode()) {
            const at = text.data.indexOf(word)
            if (at < 0) continue
            const range = document.createRange()
            range.setStart(text, at)
            range.setEnd(text, at + word.length)
            const box = range.getBoundingClientRect()
            return [box.left + box.width / 2, box.top + box.height / 2]
          }
        }""",
        word,
    )
    return box[0], box[1]


# Reading


def test_path_omits_the_template_until_special_tokens_are_shown(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    (below,) = desk.grow(first, n=1)
    desk.page.goto(f"{desk.page.url.partition('#')[0]}#{desk.loom['name']}/{below}")
    expect(desk.part(below)).to_be_visible()
    nodes = desk.nodes()
    assert text_of_part(desk, 0) == "Tell me a story about a fox."
    assert [text_of_part(desk, each) for each in (first, below)] == [
        nodes[first]["text"], nodes[below]["text"],
    ]  # fmt: skip
    page.get_by_role("button", name="Show special tokens").click()
    expect(desk.part(0)).to_contain_text("<|user|>Tell me")
    page.reload()
    expect(desk.part(0)).to_contain_text("<|user|>Tell me")  # it is remembered


def test_sibling_switch_shows_the_next_sibling(desk: Desk, page: Page) -> None:
    first, second, _ = desk.open_loom(n=3)
    desk.press("ArrowRight")
    switch = page.get_by_role("group", name="Branch 1 of 3")
    switch.get_by_role("button", name="Next sibling").click()
    desk.until(lambda: desk.current == second, "the next one")
    expect(desk.part(second)).to_be_visible()
    expect(desk.part(first)).to_have_count(0)
    page.get_by_role("group", name="Branch 2 of 3").wait_for()
    desk.press("1")  # no child: nothing happens
    assert desk.current == second


def test_digit_or_click_selects_a_child(desk: Desk, page: Page) -> None:
    grown = desk.open_loom(n=3)
    rows = page.locator(".reading [data-child]")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("12 tokens")
    desk.press("2")
    desk.until(lambda: desk.current == grown[1], "the second child")
    desk.press("ArrowLeft")
    rows.nth(2).click()
    desk.until(lambda: desk.current == grown[2], "the third")


def test_equal_children_are_one_row(desk: Desk, page: Page) -> None:
    desk.open_loom(n=4, temperature=0, max_tokens=6)
    expect(page.locator(".reading [data-child]")).to_have_count(1)
    page.locator(".reading").get_by_role("button", name="×4").click()
    expect(page.locator(".reading [data-child]")).to_have_count(4)


def test_click_sets_the_cursor_and_double_click_selects_the_node(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1, max_tokens=20)
    (below,) = desk.grow(first, n=1)
    desk.visit(below)
    fifth = tokens(desk, first)[4]
    page.mouse.click(*point_at(desk, first, fifth["text"].strip()))
    expect(cursor(desk)).to_have_text(fifth["text"], use_inner_text=False)
    assert desk.current == below
    page.mouse.dblclick(*point_at(desk, first, fifth["text"].strip()))
    desk.until(lambda: desk.current == first, "a double click goes there")
    page.keyboard.down("Shift")
    page.mouse.click(*point_at(desk, 0, "fox"))
    page.keyboard.up("Shift")
    desk.until(lambda: desk.current == 0, "a click with Shift does, too")


def test_period_and_comma_move_the_token_cursor(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press(".")
    expect(cursor(desk)).to_have_attribute("data-token", "0")
    desk.press(".", ".")
    expect(cursor(desk)).to_have_attribute("data-token", "2")
    for _ in range(3):
        desk.press(",")
    # Before the first token stands the prompt, whose template is passed over.
    expect(cursor(desk)).to_have_text(".")
    assert cursor(desk).evaluate("(each) => each.closest('[data-node]').dataset.node") == "0"
    desk.press("Escape")
    expect(card(desk)).to_have_count(0)


def test_copied_path_is_plain_text(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    (below,) = desk.grow(first, n=1)
    desk.visit(below)
    expect(desk.part(below)).to_be_visible()
    copied = desk.text.evaluate(
        """(each) => {
          getSelection().selectAllChildren(each)
          const clipboardData = new DataTransfer()
          each.dispatchEvent(new ClipboardEvent('copy', { clipboardData, bubbles: true }))
          return clipboardData.getData('text/plain')
        }"""
    )
    nodes = desk.nodes()
    answer = nodes[first]["text"] + nodes[below]["text"]
    assert copied == f"Tell me a story about a fox.\n\n{answer}"


def test_long_text_in_segments_has_the_layout_of_one_text(desk: Desk, page: Page) -> None:
    """Segments change the position of no word."""
    desk.make(template=False, prompt="Once")
    at = 0
    words = " upon a time the old fox went down to the river and saw a boat, and it was big."
    for _ in range(14):
        text = words * 5
        at = desk.ask("POST", desk.of("/nodes"), json={"parent": at, "text": text})["added"][0][
            "node"
        ]
    desk.visit(at)
    expect(desk.part(at)).to_be_visible()
    assert desk.text.locator(".segment").count() > 1
    parts = "Array.from(document.querySelectorAll('.path [data-node]'))"
    desk.painted()
    before = page.evaluate(f"({_BOXES})({parts})")
    page.evaluate(
        """() => {
          const sheet = new CSSStyleSheet()
          sheet.replaceSync('.path .segment { display: inline !important }')
          document.adoptedStyleSheets = [sheet]
        }"""
    )
    assert page.evaluate(f"({_BOXES})({parts})") == before


@pytest.mark.parametrize("look", [{"viewport": {"width": 390, "height": 844}}])
def test_any_text_fits_the_width_of_a_phone(desk: Desk, page: Page) -> None:
    desk.make(template=False, prompt="A word of many characters:")
    texts = [" " + "antidisestablishmentarianism" * 15, " <script>document.title = 'x'</script>"]
    texts += [" שועל קטן", " 山の上に古い寺があった。" * 8, " \U0001f98a\U0001f469‍\U0001f467"]
    for text in texts:
        desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": text})
    desk.loom = desk.ask("GET", desk.of())
    page.goto(f"{desk.served.url}/#{desk.loom['name']}/1")
    pane = page.locator(".reading")
    for node, text in enumerate(texts, start=1):
        page.evaluate(f"location.hash = '#{desk.loom['name']}/{node}'")
        expect(desk.part(node)).to_have_text(text, use_inner_text=False)
        assert pane.evaluate("(each) => each.scrollWidth <= each.clientWidth")
        right = desk.part(node).evaluate("(each) => each.getBoundingClientRect().right")
        assert right <= 390
    assert page.title() != "x"


# Heat


def test_heat_does_not_move_the_text(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1, max_tokens=60)
    desk.visit(first)
    words = "[document.querySelector('.path [data-node=\"1\"]')]"
    desk.painted()
    last = page.evaluate(f"({_BOXES})({words})")
    height = desk.text.evaluate("(each) => each.getBoundingClientRect().height")
    for mode in ("probability", "entropy", "rank"):
        desk.press("p")
        desk.part(first).locator("[data-token]").first.wait_for()
        page.get_by_role("button", name=f"Coloured by {mode}").wait_for()
        desk.painted()
        assert page.evaluate(f"({_BOXES})({words})") == last
        assert desk.text.evaluate("(each) => each.getBoundingClientRect().height") == height
    desk.press("p")
    expect(desk.text.locator("[data-token]")).to_have_count(0)


def test_heat_level_of_a_token_is_that_of_its_probability(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1, max_tokens=40, temperature=1.5)
    desk.visit(first)
    desk.press("p")
    desk.part(first).locator("[data-token]").first.wait_for()
    for token in tokens(desk, first):
        p = 2.718281828 ** token["logprob"]
        level = sum(p < bound for bound in (0.6, 0.35, 0.15, 0.05, 0.01))
        part = desk.part(first).locator(f"[data-token='{token['index']}']")
        assert part.get_attribute("data-heat") == (str(level) if level else None)


def test_written_text_has_no_heat_until_scored(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": " An unlikely zebra"})
    desk.visit(1)
    expect(desk.part(1)).to_be_visible()
    desk.press("p")
    page.wait_for_timeout(300)
    expect(desk.text.locator("[data-heat]")).to_have_count(0)
    page.get_by_role("button", name="Score", exact=True).click()
    desk.part(1).locator("[data-heat]").first.wait_for()
    expect(page.get_by_role("button", name="Score", exact=True)).to_have_count(0)


def test_edit_of_a_node_reloads_the_heat_below_it(desk: Desk, page: Page) -> None:
    desk.make(prompt="The keeper", template=False)
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": " was old"})
    desk.ask("POST", desk.of("/nodes"), json={"parent": 1, "text": " and tall"})
    desk.visit(2)
    expect(desk.part(2)).to_be_visible()
    desk.press("p")
    page.get_by_role("button", name="Score", exact=True).click()
    pieces = desk.part(1).locator("[data-token]")
    desk.part(2).locator("[data-heat]").first.wait_for()
    path = "/nodes/2/tokens"
    n_requests = sum(path in each for each in desk.watch.requested)
    desk.ask("PATCH", desk.of("/nodes/1"), json={"text": " ran off", "in_place": True})
    desk.until(lambda: "".join(pieces.all_inner_texts()) == " ran off", "its own tokens are others")
    desk.until(
        lambda: sum(path in each for each in desk.watch.requested) > n_requests, "below it, too"
    )


# The card


def test_token_card_shows_id_entropy_and_alternatives(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1, temperature=0.5, top_k=3)
    desk.visit(first)
    desk.press(".", ".", ".")
    token = tokens(desk, first, top=8, sampled=True)[2]
    expect(card(desk)).to_contain_text(f"{token['id']}")
    expect(card(desk)).to_contain_text(f"{token['entropy']:.2f} nats")
    expect(card(desk).get_by_role("listitem")).to_have_count(9)
    expect(card(desk)).to_contain_text("rest")


def test_token_card_opens_near_a_resting_pointer(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    token = tokens(desk, first)[3]
    page.evaluate(
        """() => {
          let moved = 0
          addEventListener('pointermove', () => { moved = performance.now() }, true)
          new MutationObserver(() => {
            if (document.querySelector('[data-card]')) window.rested ??= performance.now() - moved
          }).observe(document.body, { childList: true, subtree: true })
        }"""
    )
    page.mouse.move(*point_at(desk, first, token["text"].strip()))
    expect(card(desk)).to_have_attribute("data-card", "3")
    assert page.evaluate("rested") > 250  # by the page's own clock: not at once
    desk.painted()
    box = card(desk).bounding_box()
    assert box is not None
    x, y = point_at(desk, first, token["text"].strip())
    assert not (
        box["x"] <= x <= box["x"] + box["width"] and box["y"] <= y <= box["y"] + box["height"]
    )
    page.keyboard.press("Escape")
    expect(card(desk)).to_have_count(0)


def test_token_card_stays_on_the_screen(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1, max_tokens=40)
    desk.visit(first)
    page.set_viewport_size({"width": 390, "height": 600})
    for _ in range(12):
        desk.press(",")
        card(desk).locator(".alternatives button").first.wait_for()
        desk.painted()
        box = card(desk).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["y"] + box["height"] <= 600


def test_click_on_an_alternative_forks_and_grows(desk: Desk, page: Page) -> None:
    desk.sets(n=3, max_tokens=8)
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press(".", ".", ".")
    card(desk).locator(".alternatives button").first.wait_for()
    before = tokens(desk, first)
    other = card(desk).locator(".alternatives button:enabled").first
    other.click()
    desk.until(lambda: len(desk.nodes()) == 4, "a fork and what grows from it")
    desk.wait_grown()
    fork = desk.nodes()[first + 1]
    assert fork["parent"] == 0
    ids = [each["id"] for each in tokens(desk, fork["node"])]
    assert ids[:2] == [each["id"] for each in before[:2]]
    assert len(ids) == 3
    assert ids[2] != before[2]["id"]
    assert desk.nodes()[fork["children"][0]]["n_tokens"] == 8
    desk.until(lambda: desk.current == fork["node"], "one stands at the fork")


def test_alt_click_forks_without_growth_and_enter_with_growth(desk: Desk, page: Page) -> None:
    desk.sets(n=1, max_tokens=4)
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press(".", ".")
    card(desk).locator(".alternatives button").first.wait_for()
    card(desk).locator(".alternatives button:enabled").nth(1).click(modifiers=["Alt"])
    desk.until(lambda: len(desk.nodes()) == 3, "the fork")
    page.wait_for_timeout(200)
    assert len(desk.nodes()) == 3
    desk.press(",")
    card(desk).locator(".alternatives button").first.wait_for()
    desk.press("ArrowDown", "Enter")
    desk.until(lambda: len(desk.nodes()) == 5, "another fork, and what grows from it")


# Writing


@pytest.mark.parametrize("sizes", [True, False])
def test_text_area_is_as_high_as_its_text(desk: Desk, page: Page, sizes: bool) -> None:
    """A browser without `field-sizing` does not fit a text area to its text."""
    if not sizes:
        page.add_init_script(
            """const supports = CSS.supports.bind(CSS)
            CSS.supports = (...all) => all[0] !== 'field-sizing' && supports(...all)"""
        )
    desk.open_loom(template=False)
    desk.press("Enter")
    area = page.get_by_role("textbox", name="Continuation")
    if not sizes:
        area.evaluate("(each) => { each.style.fieldSizing = 'fixed' }")
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        area.fill("\n".join(["a line of a few words"] * 9))
        desk.painted()
        high, content, line = area.evaluate(
            "(each) => [each.clientHeight, each.scrollHeight,"
            " parseFloat(getComputedStyle(each).lineHeight)]"
        )
        assert content == high >= 9 * line


@pytest.mark.parametrize("late", [(), ("news",)])
def test_edit_in_place_shows_the_tokens_to_recompute(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.grow(first, n=2, max_tokens=10)
    desk.visit(first)
    desk.press("e")
    expect(page.locator(".editor")).to_contain_text("20 tokens below are recomputed")
    area = page.get_by_role("textbox", name="Text of the node")
    area.fill("Other words")
    page.keyboard.press("Control+Shift+S")
    desk.until(lambda: desk.nodes()[first]["text"] == "Other words", "it is changed")
    expect(desk.part(first)).to_have_text("Other words")
    assert len(desk.nodes()) == 4


def test_shift_e_edits_in_place(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    expect(desk.part(first)).to_be_visible()
    desk.press("Shift+E")
    page.get_by_role("textbox", name="Text of the node").fill("Here")
    page.keyboard.press("Control+s")
    desk.until(lambda: desk.nodes()[first]["text"] == "Here", "it is changed")
    assert len(desk.nodes()) == 2


@pytest.mark.parametrize("look", [{"has_touch": True}])
def test_tap_opens_and_closes_the_token_card(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    token = tokens(desk, first)[3]
    page.touchscreen.tap(*point_at(desk, first, token["text"].strip()))
    expect(card(desk)).to_have_attribute("data-card", "3")
    page.touchscreen.tap(*point_at(desk, 0, "Tell"))
    expect(card(desk)).to_have_attribute("data-card", "2")
    page.touchscreen.tap(700, 700)
    expect(card(desk)).to_have_count(0)


def test_chat_prompt_is_edited_without_its_template(desk: Desk, page: Page) -> None:
    desk.open_loom()
    desk.press("e")
    area = page.get_by_role("textbox", name="The prompt")
    assert area.input_value() == "Tell me a story about a fox."
    area.fill("Tell me a story about an owl.")
    page.keyboard.press("Control+s")
    desk.until(lambda: "about an owl." in desk.nodes()[0]["text"], "the prompt")
    assert desk.nodes()[0]["text"].startswith("<|bos|><|user|>Tell")
    expect(desk.part(0)).to_have_text("Tell me a story about an owl.")


def test_unfinished_edit_survives_reload_and_escape(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press("e", "Escape")
    expect(page.get_by_text("Draft of an edit")).to_have_count(0)  # nothing was changed
    desk.press("e")
    page.get_by_role("textbox", name="Text of the node").fill("Half an edit")
    page.reload()
    area = page.get_by_role("textbox", name="Text of the node")
    expect(area).to_have_value("Half an edit")
    area.press("Escape")
    expect(area).to_have_count(0)
    page.get_by_text(re.compile("Draft of an edit, 12 ")).wait_for()
    page.get_by_role("button", name="Continue editing").click()
    expect(area).to_have_value("Half an edit")
    page.get_by_role("button", name="Discard").click()
    desk.press("e")
    expect(area).to_have_value(desk.nodes()[first]["text"])


@pytest.mark.parametrize("late", [(), ("news",)])
def test_edit_of_a_node_changed_elsewhere_is_a_conflict(desk: Desk, page: Page) -> None:
    desk.watch.allow("409")
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press("e")
    area = page.get_by_role("textbox", name="Text of the node")
    area.fill("Mine")
    theirs = {"text": "Theirs", "in_place": True}
    desk.ask("PATCH", desk.of(f"/nodes/{first}"), json=theirs)
    page.keyboard.press("Control+Shift+S")
    expect(page.get_by_role("alert")).to_contain_text("changed meanwhile")
    expect(area).to_have_value("Mine")
    assert desk.nodes()[first]["text"] == "Theirs"
    page.get_by_text("Current text", exact=True).click()
    expect(page.locator(".editor").get_by_text("Theirs", exact=True)).to_be_visible()
    area.press("Control+Shift+S")  # having read that
    desk.until(lambda: desk.nodes()[first]["text"] == "Mine", "it is saved over theirs")


def test_written_child_is_a_message_in_a_chat_and_text_elsewhere(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.visit(first)
    desk.press("Enter")
    area = page.get_by_role("textbox", name="Your next message")
    area.fill("And then?")
    area.press("Control+Shift+Enter")
    desk.until(lambda: len(desk.nodes()) == 3, "the message")
    assert desk.nodes()[2]["said"] == "And then?"
    expect(desk.part(2)).to_have_text("And then?")
    desk.open_loom("Once upon a time", template=False)
    expect(desk.part(0)).to_have_text("Once upon a time")
    desk.press("Enter")
    page.get_by_role("textbox", name="Continuation").fill(" there was")
    page.keyboard.press("Control+Enter")
    desk.until(lambda: len(desk.nodes()) == 2, "the child")
    assert desk.nodes()[1]["text"] == " there was"


def test_space_at_the_end_of_a_raw_prompt_is_reported(desk: Desk, page: Page) -> None:
    desk.open_loom("Once upon a ", template=False)
    page.get_by_text("The prompt ends with a space").wait_for()


# Shape


def test_node_is_split_merged_and_cut_at_the_cursor(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.grow(first, n=2, max_tokens=4)
    desk.visit(first)
    text = desk.nodes()[first]["text"]
    desk.press(".", ".", ".", "Escape", "s")
    desk.until(lambda: desk.nodes()[first]["n_tokens"] == 3, "it is split")
    (lower,) = desk.nodes()[first]["children"]
    assert desk.nodes()[lower]["n_tokens"] == 9
    assert len(desk.nodes()[lower]["children"]) == 2
    expect(desk.part(first)).to_have_text(desk.nodes()[first]["text"])
    assert desk.current == first
    desk.press("ArrowRight", "m")
    desk.until(lambda: desk.nodes()[first]["text"] == text, "they are one again")
    desk.until(lambda: desk.current == first, "one stands at it")
    desk.press(".", ".", "Shift+C")
    desk.until(lambda: desk.nodes()[first]["n_tokens"] == 2, "it is cut, its rest a child")
    page.get_by_role("button", name=re.compile("^Undo U")).click()
    desk.until(lambda: desk.nodes()[first]["text"] == text, "and back")


def test_cut_and_drop_removes_the_rest_and_undo_restores_it(desk: Desk, page: Page) -> None:
    (first,) = desk.open_loom(n=1)
    desk.grow(first, n=2, max_tokens=4)
    desk.visit(first)
    desk.press(".", ".")
    card(desk).get_by_role("button", name="Cut off and discard what follows").click()
    desk.until(lambda: len(desk.nodes()) == 2, "what was below is gone")
    assert desk.nodes()[first]["n_tokens"] == 2
    desk.press("u")
    desk.until(lambda: len(desk.nodes()) == 4, "and back")


# Lanes


def test_selected_lane_shows_its_growing_text(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom()
    gate.hold(12)
    first, _ = desk.grow(n=2, wait=False, max_tokens=60, logit_bias=desk.endless()["logit_bias"])
    desk.until(lambda: desk.lane(first).inner_text().strip() != "", "text")
    desk.press("1")
    desk.until(lambda: desk.current == first, "one stands in it")
    desk.until(lambda: len(text_of_part(desk, first)) > 0, "its text is there")
    grown = text_of_part(desk, first)
    gate.hold(20)
    desk.until(lambda: len(text_of_part(desk, first)) > len(grown), "and grows")
    assert text_of_part(desk, first).startswith(grown)
    gate.open()
    desk.wait_grown()
    desk.until(lambda: text_of_part(desk, first) == desk.nodes()[first]["text"], "to its end")


def test_growth_scrolls_only_a_reader_at_the_end(desk: Desk, page: Page, gate: Gate) -> None:
    page.set_viewport_size({"width": 800, "height": 360})
    desk.open_loom()
    gate.hold(120)
    (first,) = desk.grow(n=1, wait=False, max_tokens=400, logit_bias=desk.endless()["logit_bias"])
    desk.until(lambda: desk.lanes == [first], "a lane")
    desk.press("1")
    expect(desk.part(first)).to_be_visible()
    desk.until(lambda: len(text_of_part(desk, first)) > 300, "some text")
    pane = page.locator(".reading")
    pane.evaluate("(each) => { each.scrollTop = 40 }")
    shown = len(text_of_part(desk, first))
    gate.hold(60)
    desk.until(lambda: len(text_of_part(desk, first)) > shown + 100, "it grows on")
    desk.painted()
    assert pane.evaluate("(each) => each.scrollTop") == 40
    gate.wait_stopped()
    desk.until(
        lambda: text_of_part(desk, first) == desk.nodes()[first]["text"], "all that is there"
    )
    pane.evaluate("(each) => { each.scrollTop = each.scrollHeight }")
    desk.painted()
    gate.hold(120)
    before = len(text_of_part(desk, first))
    desk.until(lambda: len(text_of_part(desk, first)) > before + 300, "more text")
    left = "(each) => each.scrollHeight - each.scrollTop - each.clientHeight"
    desk.until(lambda: pane.evaluate(left) < 60, "one is taken along")
    gate.open()
    desk.press("Escape")
    desk.wait_grown()


def test_stop_all_is_reported(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom()
    gate.hold(12)
    grown = desk.grow(n=3, wait=False, **desk.endless())
    desk.until(lambda: desk.lanes == grown, "three lanes")
    page.get_by_role("button", name="Stop all").first.click()
    gate.open()
    desk.wait_grown()
    page.get_by_text("All stopped. Their text is saved.").wait_for()
    expect(desk.lane(grown[0])).to_contain_text("stopped")


def test_failed_branch_shows_its_error_and_is_retried(desk: Desk, page: Page, gate: Gate) -> None:
    desk.watch.allow("")
    desk.sets(max_tokens=6)
    desk.open_loom()
    gate.hold(6)
    (first,) = desk.grow(n=1, wait=False, **desk.endless())
    desk.until(lambda: desk.lanes == [first], "a lane")
    gate.fail("the device was lost")
    lane = desk.lane(first)
    expect(lane).to_contain_text("the device was lost")
    gate.open()
    lane.get_by_role("button", name="Retry").click()
    expect(lane).to_have_count(0)
    desk.until(lambda: desk.current == 2, "another one is gone to")
    desk.wait_grown()


def test_branch_without_text_shows_that_it_ended_at_once(desk: Desk, page: Page) -> None:
    ends = desk.served.service.models.lm().text.stop_ids
    desk.open_loom()
    desk.grow(n=2, wait=False, logit_bias={str(each): 100 for each in ends})
    expect(page.locator(".reading").get_by_text("(ended immediately)")).to_have_count(2)


def test_reading_is_accessible(desk: Desk, page: Page) -> None:
    (first, _) = desk.open_loom(n=2, max_tokens=30)
    desk.grow(first, n=2)
    desk.visit(first)
    desk.press("p", ".")
    desk.part(first).locator("[data-token]").first.wait_for()
    page.wait_for_timeout(200)
    assert_accessible(page)
    desk.press("Escape", "e")
    assert_accessible(page)
    page.keyboard.press("Escape")
    desk.press("Enter")
    assert_accessible(page)
