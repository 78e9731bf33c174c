"""Twenty tasks of writers and researchers: done as people do them, with their keys and clicks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, Gate, expect
from real_models import SMOLLM2_FOLDER, models_dir
from serving import Served, serving
from tests.page.hands import Hands
from tests.page.program import running
from tests.page.test_imports import FILES
from weft.service.server import ServerConfig
from written_looms import file_of, node_record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]  # loading SmolLM2 takes most of it
SMOLLM2 = models_dir() / SMOLLM2_FOLDER
EMBEDDED = "tiny"
OVER_MS = 200_000  # for a search to end, on a slow and busy machine


@pytest.fixture(
    scope="module",
    params=[
        EMBEDDED,
        pytest.param(
            str(SMOLLM2),
            marks=[
                pytest.mark.models,
                pytest.mark.skipif(not SMOLLM2.exists(), reason="make models fetches SmolLM2"),
            ],
        ),
    ],
    ids=["tiny", "SmolLM2"],
)
def model(request: pytest.FixtureRequest) -> str:
    """The model of all looms of a job: the embedded one or SmolLM2."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Served]:
    """A server whose default model is `model`; the embedded one is a second model."""
    models = tuple(dict.fromkeys((model, EMBEDDED)))
    with serving(ServerConfig(port=0, models=models)) as served:
        yield served


@pytest.fixture
def hands(page: Page, request: pytest.FixtureRequest) -> Hands:
    return Hands(page, writes=request.config.option.write_jobs)


@pytest.fixture
def story(desk: Desk) -> Desk:
    """A story at its prompt, which has four branches."""
    desk.sets(n=4, max_tokens=8, temperature=1.0)
    desk.open_loom("Once upon a time there was a", template=False, n=4, max_tokens=8, **SPREAD)
    return desk


SPREAD = {"temperature": 1.0, "seed": 3}


def facts(desk: Desk) -> dict[int, Any]:
    """The tree, its texts, bookmarks and ratings."""
    kept = ("parent", "children", "text", "bookmark", "rating")
    return {number: {key: node.get(key) for key in kept} for number, node in desk.nodes().items()}


def point_at_word(desk: Desk, node: int) -> tuple[int, tuple[float, float]]:
    """Return the index of a token that begins a word of a node, and its middle on the screen."""
    query = {"top": 1}
    rows = desk.ask("GET", desk.of(f"/nodes/{node}/tokens"), params=query)["data"]
    texts = [each["text"] for each in rows]
    index = next(at for at, text in enumerate(texts) if at > 1 and text.strip().isalpha())
    start = len("".join(texts[:index])) + len(texts[index]) - len(texts[index].lstrip())
    end = start + len(texts[index].strip())
    x, y = desk.part(node).evaluate(
        """(each, [start, end]) => {
          const walker = document.createTreeWalker(each, NodeFilter.SHOW_TEXT)
          let n = 0
          for (let text = walker.nextNode(); text; text = walker.nextNode()) {
            if (start < n + text.data.length) {
              const range = document.createRange()
              range.setStart(text, start - n)
              range.setEnd(text, Math.min(end - n, text.data.length))
              const box = range.getBoundingClientRect()
              return [box.left + box.width / 2, box.top + box.height / 2]
            }
            n += text.data.length
          }
        }""",
        [start, end],
    )
    return index, (x, y)


# Stories


def test_six_level_story_of_four_branches_each(desk: Desk, page: Page, hands: Hands) -> None:
    desk.sets(n=4, max_tokens=6, temperature=1.2)
    page.goto("/")
    expect(page.locator(".prompt-form button[type=submit]")).to_be_enabled()
    hands.click(page.locator(".prompt-form label:has(input[value=raw])"))
    page.locator(".prompt-form textarea").first.focus()
    hands.press("Control+Enter")
    desk.open_named()
    for level in range(1, 7):
        desk.until(lambda level=level: len(desk.nodes()) == 4 * level + 1, f"level {level}")
        desk.wait_known()
        if level < 6:
            hands.press("2", "g")
    depth, node = 0, max(desk.nodes())
    while (node := desk.nodes()[node]["parent"]) is not None:
        depth += 1
    assert depth == 6
    hands.finish("A story of six levels, four branches each", limit=13)


def test_four_branches_are_compared_and_one_is_chosen(
    story: Desk, page: Page, hands: Hands
) -> None:
    hands.press("=")
    columns = page.locator(".compared > li")
    expect(columns).to_have_count(4)
    for column, node in zip(columns.all(), (1, 2, 3, 4), strict=True):
        expect(column).to_contain_text(story.nodes()[node]["text"].strip())
    hands.press("3")
    story.until(lambda: story.current == 3, "the third branch")
    hands.finish("Compare four branches side by side, pick one")


def test_word_is_edited_and_both_texts_are_kept(story: Desk, page: Page, hands: Hands) -> None:
    story.ask("POST", story.of("/nodes"), json={"parent": 0, "text": " wooden boat by the sea."})
    story.visit(5)
    hands.press("e")
    area = page.locator(".editor textarea")
    expect(area).to_be_focused()
    box = area.bounding_box()
    assert box
    hands.click_at(box["x"] + 30, box["y"] + 14, times=2)
    hands.type("copper")
    hands.press("Control+s")
    story.until(lambda: len(story.nodes()) == 7, "a sibling")
    nodes = story.nodes()
    assert nodes[5]["text"] == " wooden boat by the sea."
    assert nodes[6]["text"] == " copper boat by the sea."
    hands.finish("Edit a word, keep both texts", limit=4)


def test_text_is_forked_at_a_token(story: Desk, page: Page, hands: Hands) -> None:
    story.visit(1)
    before = story.ask("GET", story.of("/nodes/1"), params={"fields": "tokens"})["token_ids"]
    expect(story.part(1)).to_be_visible()
    index, point = point_at_word(story, 1)
    hands.click_at(*point)
    card = page.locator(f"[data-card='{index}']")
    card.locator(".alternatives button").first.wait_for()
    hands.click(card.locator(".alternatives button:enabled").first)
    story.until(lambda: len(story.nodes()) == 7, "the fork and its branch")
    after = story.ask("GET", story.of("/nodes/5"), params={"fields": "tokens"})["token_ids"]
    assert after[:index] == before[:index]
    assert after[index] != before[index]
    story.wait_grown()
    hands.finish("Fork at a token and continue", limit=2)


def test_branch_is_retried_with_other_settings(story: Desk, hands: Hands) -> None:
    story.visit(2)
    hands.press("Alt+3", "G")
    story.until(lambda: len(story.nodes()) > 5, "more siblings")
    story.wait_known()
    nodes = story.nodes()
    new = [number for number in nodes if number > 4]
    assert {nodes[each]["parent"] for each in new} == {0}
    shown = story.ask("GET", story.of(f"/nodes/{new[0]}"), params={"fields": "params"})
    assert shown["params"]["temperature"] == 1.3
    hands.finish("Retry with other settings", limit=3)


def test_ten_changes_are_undone(bush: Desk, hands: Hands) -> None:
    before = facts(bush)
    bush.row(4).click()
    for key in ("b", "}", "x", "}", "Delete", "b", "Delete", "}", "Delete", "}"):
        state = facts(bush)
        bush.press(key)
        bush.until(lambda state=state: facts(bush) != state, f"{key} changes the loom")
        bush.page.wait_for_timeout(50)
    for _ in range(10):
        state = facts(bush)
        hands.press("u")
        bush.until(lambda state=state: facts(bush) != state, "a change is undone")
    assert facts(bush) == before
    hands.finish("Undo ten changes", limit=10)


def test_search_selects_its_hit(bush: Desk, hands: Hands) -> None:
    hands.press("/")
    hands.type("I heard")
    expect(bush.row(2)).to_have_count(0)
    hands.press("Enter")
    bush.until(lambda: bush.current == 7, "the hit")
    hands.finish("Find a text and go to it")


def test_bookmark_leads_back_to_its_node(bush: Desk, hands: Hands) -> None:
    bush.row(5).click()
    hands.press("b")
    bush.until(lambda: bush.nodes()[5]["bookmark"] is not None, "a bookmark")
    expect(bush.row(5)).to_have_attribute("aria-label", re.compile("bookmarked"))
    bush.press("r")
    hands.press(";")
    bush.until(lambda: bush.current == 5, "the bookmark")
    hands.finish("Bookmark a node, return to it later")


def test_branch_is_pruned_and_restored(bush: Desk, hands: Hands) -> None:
    before = facts(bush)
    bush.row(4).click()
    hands.press("Delete")
    bush.until(lambda: set(bush.nodes()) == {0, 1, 2, 3, 5}, "three nodes fewer")
    hands.press("u")
    bush.until(lambda: facts(bush) == before, "they are back")
    expect(bush.row(7)).to_be_visible()
    hands.finish("Prune a branch and restore it")


def test_node_is_split_and_merged(story: Desk, hands: Hands) -> None:
    story.visit(1)
    text = story.nodes()[1]["text"]
    expect(story.part(1)).to_be_visible()
    hands.click_at(*point_at_word(story, 1)[1])
    story.text.locator("[data-cursor]").wait_for()
    hands.press("s")
    story.until(lambda: len(story.nodes()) == 6, "two nodes of one")
    (lower,) = story.nodes()[1]["children"]
    assert story.nodes()[1]["text"] + story.nodes()[lower]["text"] == text
    expect(story.part(1)).to_have_text(story.nodes()[1]["text"], use_inner_text=False)
    hands.press("ArrowRight", "m")
    story.until(lambda: len(story.nodes()) == 5, "one node again")
    assert story.nodes()[1]["text"] == text
    hands.finish("Split a node at a word, merge it again")


# Chats


def test_message_is_answered_in_a_chat_with_a_system_prompt(
    desk: Desk, page: Page, hands: Hands, model: str
) -> None:
    if model != EMBEDDED:  # short answers
        desk.sets(n=1, max_tokens=48, temperature=0)
    page.goto("/")
    page.locator(".system-prompt summary").click()
    page.locator(".system-prompt textarea").fill("You answer in one short sentence.")
    page.locator(".prompt-form textarea").first.fill("Who are you?")
    page.locator(".prompt-form textarea").first.press("Enter")
    desk.open_named()
    assert "You answer in one short sentence." in desk.nodes()[0]["text"]
    expect(page.locator(".writer textarea")).to_be_focused()
    desk.wait_known()
    hands.type("What is the capital of France?")
    hands.press("Enter")
    desk.until(lambda: len(desk.nodes()) == 4, "a message and its answer")
    desk.wait_known()
    assert desk.nodes()[3]["finish_reason"] == "stop"
    assert desk.nodes()[3]["text"].strip()
    hands.finish("A chat turn, with a system prompt", limit=2)


def test_switched_model_grows_the_next_branches(desk: Desk, page: Page, hands: Hands) -> None:
    other = "org/Second-Instruct"
    desk.add_model(other)
    try:
        desk.sets(n=1, max_tokens=8)
        desk.open_loom()
        models = page.locator(".model-checks label")
        hands.click(models.filter(has_text="Second-Instruct"))
        hands.click(models.first)  # the loom's own
        desk.press("g")
        desk.until(lambda: len(desk.nodes()) == 2, "a branch")
        desk.wait_grown()
        assert desk.nodes()[1]["model"] == other
        hands.finish("Switch the model", limit=2)
    finally:
        desk.ask("DELETE", "/models/org%2FSecond-Instruct", params={"force": True})


def test_branches_have_the_format_of_a_schema(desk: Desk, page: Page, hands: Hands) -> None:
    desk.sets(n=2, max_tokens=40)
    desk.open_loom("Describe a person as JSON.")
    hands.choose(page.locator("#set-constraint"), "json_schema")
    hands.click(page.locator("#set-constraint").locator("xpath=ancestor::*[2]//textarea"))
    kinds = {"age": {"enum": [20, 30]}, "old": {"type": "boolean"}}
    hands.type(json.dumps({"type": "object", "properties": kinds, "required": ["age", "old"],
                           "additionalProperties": False}))  # fmt: skip
    hands.press("Control+Enter")
    desk.until(lambda: len(desk.nodes()) == 3, "two branches")
    desk.wait_grown()
    for node in (1, 2):
        person = json.loads(desk.nodes()[node]["text"])
        assert person["age"] in (20, 30)
        assert isinstance(person["old"], bool)
    hands.finish("Output by a JSON schema")


# Searches


def test_search_for_24_is_watched_and_solved_by_the_embedded_model(
    desk: Desk, page: Page, gate: Gate, hands: Hands, model: str
) -> None:
    """SmolLM2 was not trained on the game: its search is watched, whatever it finds."""
    is_trained = model == EMBEDDED
    desk.remembers("run", {"strategy": "tot"})
    desk.remembers("run.figures", {"seed": "1", "budget_tokens": "4000" if is_trained else "150"})
    desk.open_loom("Use 4 9 10 13 to make 24.")
    gate.hold(0)
    hands.press("R")
    page.locator(".strategy input:checked").wait_for()
    hands.press("Enter")

    def has_round() -> bool:
        gate.hold(4)
        gate.wait_stopped()
        return bool(desk.ask("GET", desk.of("/runs"))["data"][0]["rounds"])

    desk.until(lambda: bool(desk.ask("GET", desk.of("/runs"))["data"]), "a search")
    desk.until(has_round, "a round", OVER_MS / 1000)
    page.locator("[data-candidate]").first.wait_for()
    assert desk.ask("GET", desk.of("/runs"))["data"][0]["status"] == "running"
    gate.open()
    answer = page.locator(".run-answer")
    expect(answer).to_be_visible(timeout=OVER_MS)
    if is_trained:
        expect(answer).to_contain_text("24")
        expect(page.locator(".run .is-right")).to_be_visible()
    hands.finish("Watch a search solve the Game of 24")


def test_own_question_has_an_answer_and_its_reason(desk: Desk, page: Page, hands: Hands) -> None:
    fields = {"n": "4", "max_tokens": "24", "seed": "4"}
    desk.remembers("run.figures", fields)
    desk.open_loom("How many legs does a dog have? Answer with a number.")
    hands.press("R")
    hands.click(page.locator(".strategy:has(input[value='best-of-n'])"))
    hands.press("Enter")
    expect(page.locator(".run-answer")).to_be_visible(timeout=OVER_MS)
    result = desk.ask("GET", desk.of("/runs"))["data"][0]["result"]
    assert result["reason"]
    expect(page.locator(".run-reason")).to_contain_text(result["reason"])
    expect(page.locator(".run-measure")).to_contain_text(result["measure"])
    assert sum(group["count"] for group in result["answers"]) == 4
    hands.finish("Own question: best of n, and why this answer won")


# Probabilities


def test_tokens_are_coloured_and_the_next_ones_listed(
    story: Desk, page: Page, hands: Hands
) -> None:
    story.visit(1)
    expect(story.part(1)).to_be_visible()
    hands.press("p")
    story.part(1).locator("[data-token]").first.wait_for()
    hands.press("t")
    rows = page.locator("tr[data-token-id]")
    expect(rows).to_have_count(20)
    likeliest = story.ask("POST", story.of("/nodes/1/next"), json={"top": 1})["next"][0]
    expect(rows.first).to_have_attribute("data-token-id", str(likeliest["id"]))
    hands.finish("Colour by probability, list the next tokens")


# Files


def test_loom_is_exported_in_three_formats(
    bush: Desk, page: Page, hands: Hands, tmp_path: Path
) -> None:
    for name in ("json", "markdown", "html"):
        hands.press("Control+s")
        hands.choose(page.locator("#export-format"), name)
        save = page.locator(".export-form .button.main")
        expect(page.locator(".export-form .caption.cut")).to_contain_text(f".{SUFFIX[name]}")
        with page.expect_download() as coming:
            hands.click(save)
        coming.value.save_as(tmp_path / name)
        assert "The keeper" in (tmp_path / name).read_text("utf-8")
    hands.finish("Three exports")


SUFFIX = {"json": "json", "markdown": "md", "html": "html"}


def test_nine_files_of_other_programs_are_imported_at_once(
    desk: Desk, page: Page, hands: Hands, tmp_path: Path
) -> None:
    desk.open_loom()
    paths = []
    for file in FILES:
        content = file.content if isinstance(file.content, str) else json.dumps(file.content)
        (tmp_path / file.name).write_text(content, "utf-8")
        paths.append(tmp_path / file.name)
    assert len(paths) == 9
    before = len(desk.ask("GET", "/looms")["data"])
    hands.press("i")
    hands.choose_files(page.locator(".import-target .button"), paths)
    expect(page.locator(".came a")).to_have_count(9)
    assert len(desk.ask("GET", "/looms")["data"]) == before + 9
    hands.finish("Nine imports of nine programs")


# Crashes and size


def test_two_tabs_survive_a_reload_and_a_killed_server(
    browser: Browser, tmp_path: Path, model: str, request: pytest.FixtureRequest
) -> None:
    with running(browser, tmp_path, model) as (desk, program):
        hands = Hands(desk.page, writes=request.config.option.write_jobs)
        desk.sets(n=2, max_tokens=1500)

        def endless(route: Route) -> None:
            route.continue_(post_data={**route.request.post_data_json, **program.endless()})

        desk.make("Once upon a time", template=False)
        desk.page.route("**/generate", endless)
        page = desk.visit()
        other = page.context.new_page()
        other.goto(page.url)
        hands.press("g")
        for tab in (page, other):
            expect(tab.locator("article[data-lane]")).to_have_count(2)
        page.reload()
        expect(page.locator("article[data-lane]")).to_have_count(2)
        # The outline shows equal siblings as one.
        desk.until(lambda: len(set(program.saved().values())) == 2, "two saved texts")
        assert desk.ask("GET", desk.of())["growing"] == 2
        program.kill()
        program.start()
        desk.until(lambda: desk.nodes()[1]["finish_reason"] == "interrupted", "it is marked")
        nodes = desk.nodes()
        assert set(nodes) == {0, 1, 2}
        hands.press("1")
        desk.until(lambda: desk.part(1).text_content() == nodes[1]["text"], "the saved text")
        expect(other.locator("[role=treeitem]")).to_have_count(3)
        hands.finish("Keep all text through two tabs, a reload and `kill -9` during growth")


def test_search_selects_one_of_2001_nodes(desk: Desk, page: Page, hands: Hands) -> None:
    parents = [None, *((at - 1) // 3 for at in range(1, 2001))]
    nodes = [node_record(at, parent, text=f"node {at} ") for at, parent in enumerate(parents)]
    (desk.loom,) = desk.ask("POST", "/import", content=json.dumps(file_of(nodes)).encode())["looms"]
    desk.visit()
    desk.wait_known()
    (wanted,) = (each["node"] for each in desk.nodes().values() if each["text"] == "node 1777 ")
    hands.press("/")
    hands.type("node 1777")
    expect(desk.row(wanted)).to_be_visible()
    hands.press("Enter")
    desk.until(lambda: desk.current == wanted, "the node")
    expect(desk.row(wanted)).to_be_in_viewport()
    assert page.evaluate("document.querySelectorAll('[role=treeitem]').length") <= 200
    hands.finish("Find one of 2,001 nodes")
