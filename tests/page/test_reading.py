"""The text of the path: heat, the token card, and changes of what is written there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


@pytest.fixture
def story(desk: Desk) -> Desk:
    """A chat with one answer of 24 tokens, which has a child; the answer is current."""
    desk.make()
    (answer,) = desk.grow(n=1, max_tokens=24)
    desk.grow(answer, n=1, max_tokens=8)
    desk.visit(answer)
    desk.until(lambda: desk.current == answer, "the answer is current")
    return desk


def card(page: Page) -> Locator:
    return page.get_by_role("region", name="Token", exact=True)


def tokens(desk: Desk, node: int, **query: int) -> list[dict]:
    return desk.ask("GET", desk.of(f"/nodes/{node}/tokens"), params=query)["data"]


def test_heat_key_cycles_probability_entropy_and_rank(story: Desk, page: Page) -> None:
    page.mouse.move(0, 0)
    tinted = story.part(1).locator("[data-heat]")
    assert tinted.count() == 0
    story.press("p")
    bounds = (0.6, 0.35, 0.15, 0.05, 0.01)
    wanted = {
        at: sum(math.exp(token["logprob"]) < bound for bound in bounds)
        for at, token in enumerate(tokens(story, 1))
    }
    wanted = {at: level for at, level in wanted.items() if level}
    expect(tinted).to_have_count(len(wanted))
    levels = tinted.evaluate_all(
        "all => all.map((e) => [Number(e.dataset.token), Number(e.dataset.heat)])"
    )
    assert dict(map(tuple, levels)) == wanted
    assert story.part(1).text_content() == story.nodes()[1]["text"]  # and its text is unchanged
    first = page.locator("[data-heat]").first
    colours = first.evaluate("(e) => getComputedStyle(e).backgroundColor")
    assert colours not in ("rgba(0, 0, 0, 0)", "transparent")
    legend = page.get_by_role("contentinfo").get_by_role("group", name="Colours by probability")
    expect(legend).to_be_visible()
    for mode in ("entropy", "rank"):
        story.press("p")
        expect(page.get_by_role("group", name=f"Colours by {mode}")).to_be_visible()
    story.press("p")
    expect(tinted).to_have_count(0)


def test_hovered_token_shows_its_card(story: Desk, page: Page) -> None:
    story.press("p")
    page.locator("[data-heat]").first.wait_for()
    spot = story.part(1).locator("[data-token]").nth(3)
    index = int(spot.get_attribute("data-token") or -1)
    spot.hover()
    expect(card(page)).to_be_visible()
    token = tokens(story, 1, top=5)[index]
    expect(card(page)).to_contain_text(str(token["id"]))
    expect(card(page)).to_contain_text("rank")
    likeliest = token["top"][0]["text"].strip()
    expect(card(page).get_by_role("list")).to_contain_text(likeliest or "·")
    story.press("Escape")
    expect(card(page)).to_be_hidden()


def test_chosen_alternative_forks_at_the_cursor_and_grows(story: Desk, page: Page) -> None:
    before = story.nodes()
    story.press(".", ".", ".")
    expect(card(page)).to_be_visible()
    at = int(story.text.locator("[data-cursor]").get_attribute("data-token") or -1)
    row = card(page).get_by_role("list").get_by_role("button").locator(":scope:enabled").first
    row.click()
    story.until(lambda: len(story.nodes()) >= len(before) + 2, "a sibling that goes on")
    story.wait_grown()
    at_fork = story.current
    story.until(lambda: bool(story.nodes()[at_fork]["children"]), "one branch goes on from there")
    story.wait_grown()
    nodes = story.nodes()
    assert nodes[1]["text"] == before[1]["text"]  # the first one stays as it was
    path = page.locator("article[aria-label='Text of the path'] [data-node]")
    shown = [int(each) for each in path.evaluate_all("all => all.map((e) => e.dataset.node)")]
    old = [token["id"] for token in tokens(story, 1)]
    new = [token["id"] for node in shown[1:] for token in tokens(story, node)]
    assert new[:at] == old[:at]
    assert new[at] != old[at]
    (on,) = nodes[shown[-1]]["children"]
    assert nodes[on]["n_tokens"] > 0 or nodes[on]["ended"]


def test_edit_adds_a_sibling_unless_saved_in_place(story: Desk, page: Page) -> None:
    before = story.nodes()
    story.press("e")
    area = page.get_by_role("textbox", name="Text of the node")
    expect(area).to_be_focused()
    expect(area).to_have_value(before[1]["text"])
    area.fill("The fox slept.")
    page.keyboard.press("Control+s")
    story.until(lambda: len(story.nodes()) == len(before) + 1, "a sibling")
    nodes = story.nodes()
    (sibling,) = set(nodes) - set(before)
    assert (nodes[sibling]["text"], nodes[sibling]["parent"]) == ("The fox slept.", 0)
    assert nodes[1]["text"] == before[1]["text"]
    story.until(lambda: story.current == sibling, "one stands at the sibling")
    story.row(1).click()
    story.press("E")
    expect(area).to_be_visible()
    expect(page.get_by_text("8 tokens below are recomputed")).to_be_visible()
    area.fill("The fox ate.")
    page.keyboard.press("Control+Shift+s")
    story.until(lambda: story.nodes()[1]["text"] == "The fox ate.", "changed in its place")
    assert len(story.nodes()) == len(nodes)
    expect(story.part(1)).to_have_text("The fox ate.")


def test_edit_left_by_escape_survives_a_reload(story: Desk, page: Page) -> None:
    story.press("e")
    page.get_by_role("textbox", name="Text of the node").fill("half an idea")
    page.keyboard.press("Escape")
    assert story.nodes()[1]["text"] != "half an idea"
    page.reload()
    page.get_by_role("button", name="Continue editing").click()
    expect(page.get_by_role("textbox", name="Text of the node")).to_have_value("half an idea")


def test_split_gives_two_nodes_with_the_same_text(story: Desk, page: Page) -> None:
    before = story.nodes()
    story.press(".", ".", ".", ".")
    story.text.locator("[data-cursor]").wait_for()
    story.press("s")
    story.until(lambda: len(story.nodes()) == len(before) + 1, "one node more")
    nodes = story.nodes()
    (lower,) = (node for node in nodes[1]["children"])
    assert nodes[1]["text"] + nodes[lower]["text"] == before[1]["text"]
    assert nodes[1]["n_tokens"] + nodes[lower]["n_tokens"] == before[1]["n_tokens"]
    story.press("u")
    story.until(lambda: story.nodes()[1]["text"] == before[1]["text"], "undone")


def test_written_child_is_saved_and_shown(story: Desk, page: Page) -> None:
    before = story.nodes()
    story.press("Enter")
    page.keyboard.type("And what did she find?")
    page.keyboard.press("Control+Shift+Enter")
    story.until(lambda: len(story.nodes()) == len(before) + 1, "a child")
    (child,) = set(story.nodes()) - set(before)
    assert "And what did she find?" in story.nodes()[child]["text"]
    expect(story.text).to_contain_text("And what did she find?")


@pytest.mark.parametrize(
    "text",
    [
        "<script>document.title = 'hacked'</script>",
        "<img src=x onerror=\"document.title='hacked'\">",
        "</span></article><h1>hacked</h1>",
        "&lt;b&gt; &amp; {{x}} ${x}",
        "javascript:alert(1) [a](javascript:alert(1))",
    ],
)
def test_markup_in_a_node_is_text(desk: Desk, page: Page, text: str) -> None:
    desk.make(template=False, prompt=f"Say: {text}")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": text})
    desk.ask("PATCH", desk.of(), json={"name": f"a {text}".replace("/", "")})
    desk.loom = desk.ask("GET", desk.of())
    desk.ask("PATCH", desk.of("/nodes/1"), json={"bookmark": text})
    desk.visit(1)
    expect(desk.part(1)).to_have_text(text)
    desk.press("p")
    page.wait_for_timeout(150)
    assert page.title() != "hacked"
    assert page.locator("h1", has_text="hacked").locator(":scope:not(.loom-title)").count() == 0
    assert page.locator("img").count() == 0
    desk.press("/")
    page.keyboard.type(text[:12])
    page.wait_for_timeout(150)
    assert page.title() != "hacked"


@pytest.mark.parametrize(
    "text",
    [
        "山の上に古い寺があった。",
        "كان هناك ثعلب صغير",
        "\U0001f98a \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
        "e\u0301 \u200b\u2028 tab\tand\nnewline",
        "x" * 400,
    ],
)
def test_any_text_is_shown_unchanged(desk: Desk, page: Page, text: str) -> None:
    desk.make(template=False, prompt="Once")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": text})
    desk.remembers("heat", "probability")
    desk.visit(1)
    assert desk.part(1).text_content() == text
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 1440
    box = desk.part(1).bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 1440 - 260


def test_long_model_name_has_room_in_a_wide_margin(desk: Desk, page: Page) -> None:
    model = "org/SmolLM2-135M-Instruct"
    desk.add_model(model)
    desk.make()
    desk.grow(n=1, max_tokens=6, model=model)
    page.set_viewport_size({"width": 1920, "height": 1080})
    desk.visit(1)
    name = page.locator(".note .who", has_text="SmolLM2-135M-Instruct")
    expect(name).to_be_visible()
    cut = "(each) => each.scrollWidth - each.clientWidth"
    assert name.evaluate(cut) == 0
    left = "(each) => each.getBoundingClientRect().left"
    for width in (1280, 1360, 1440, 1600):  # the panes on both sides leave less room
        page.set_viewport_size({"width": width, "height": 900})
        assert name.evaluate(left) >= page.locator(".reading").evaluate(left)
    page.set_viewport_size({"width": 390, "height": 844})
    assert name.evaluate(cut) > 0
    expect(name).to_have_attribute("title", "SmolLM2-135M-Instruct")
