"""Searches: begun, watched, stepped through, and still there after a reload."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, Gate, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page
GAME = "Use 4 9 10 13 to make 24."
OVER_MS = 200_000  # for a search to end, on a slow and busy machine


def begin(desk: Desk, page: Page, strategy: str, **fields: str) -> None:
    """Start a search from where one stands."""
    desk.press("R")
    dialog = page.get_by_role("dialog", name="Solve: search for an answer")
    dialog.get_by_role("radio", name=strategy, exact=False).first.check()
    # Without a time limit: on a slow machine a minute may be too short.
    for name, value in {"budget_s": "", **fields}.items():
        dialog.locator(f"#run-{name}").fill(value)
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_have_count(0)


def rows(page: Page) -> Locator:
    return page.locator("[data-candidate]")


def first_round(desk: Desk, gate: Gate) -> None:
    """Let a search that was begun at a closed gate come to its first round, and hold it there."""

    def is_there() -> bool:
        gate.hold(4)
        gate.wait_stopped()
        return bool(run_of(desk)["rounds"])

    desk.until(is_there, "a round", OVER_MS / 1000)


def run_of(desk: Desk) -> dict[str, Any]:
    run: dict[str, Any] = desk.ask("GET", desk.of("/runs"))["data"][0]
    return run


def test_running_search_shows_its_rounds_and_is_stopped(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom(GAME)
    gate.hold(0)
    begin(desk, page, "Tree of thoughts", seed="1")
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel).to_contain_text("searching")
    first_round(desk, gate)
    rows(page).first.wait_for()
    (first,) = run_of(desk)["rounds"]
    expect(rows(page)).to_have_count(len(first["candidates"]))
    listed = [int(each.get_attribute("data-candidate") or 0) for each in rows(page).all()]
    assert listed[: len(first["kept"])] == first["kept"]
    pruned = page.locator(".candidate.is-pruned")
    expect(pruned).to_have_count(len(first["candidates"]) - len(first["kept"]))
    expect(panel).to_contain_text(f"{len(first['kept'])} of {len(first['candidates'])} kept")
    panel.get_by_role("button", name="Stop").click()
    gate.open()
    expect(panel).to_contain_text("stopped")
    desk.wait_grown()
    assert run_of(desk)["status"] == "cancelled"


def test_rounds_of_an_ended_search_are_stepped_through(desk: Desk, page: Page) -> None:
    desk.open_loom(GAME)
    begin(desk, page, "Tree of thoughts", seed="1", budget_tokens="4000")
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    run = run_of(desk)
    expect(panel).to_contain_text(run["result"]["answer"])
    expect(panel).to_contain_text("Checked: correct.")
    last = len(run["rounds"])
    assert last > 1
    expect(panel).to_contain_text(f"Round {last} of {last}")
    # The outline shows the scores, and dims what no round has kept.
    left, kept = (
        {each["node"] for one in run["rounds"] for each in one["candidates"]},
        {each for one in run["rounds"] for each in one["kept"]},
    )
    for node in (min(left - kept), min(kept)):
        row = page.locator(f"[role=treeitem][data-node='{node}']")
        expect(row).to_contain_text(f"{desk.nodes()[node]['score']:.2f}")
        assert ("dim" in str(row.get_attribute("class"))) is (node not in kept)
    page.get_by_label("Previous round").click()
    expect(panel).to_contain_text(f"Round {last - 1} of {last}")
    shown = run["rounds"][last - 2]
    expect(rows(page)).to_have_count(len(shown["candidates"]))
    rows(page).nth(1).get_by_role("button").click()
    assert desk.current == int(rows(page).nth(1).get_attribute("data-candidate") or 0)
    panel.get_by_role("button", name="Go to the answer").click()
    assert desk.current == run["result"]["best"]
    # The server remembers it, so does the page.
    desk.reload()
    expect(panel).to_contain_text(f"Round {last} of {last}")
    expect(panel).to_contain_text(run["result"]["answer"])


def test_search_continues_through_a_reload(desk: Desk, page: Page, gate: Gate) -> None:
    desk.open_loom(GAME)
    gate.hold(0)
    begin(desk, page, "Beam", seed="2")
    first_round(desk, gate)
    rows(page).first.wait_for()
    page.reload()
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel).to_contain_text("searching")
    before = len(run_of(desk)["rounds"])
    assert before
    expect(panel).to_contain_text(f"of {before}")
    gate.open()
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    after = len(run_of(desk)["rounds"])
    assert after >= before
    expect(panel).to_contain_text(f"Round {after} of {after}")


def test_best_of_n_groups_equal_answers(desk: Desk, page: Page) -> None:
    desk.open_loom("What is 37 + 58?")
    begin(desk, page, "Best of n", n="5", seed="4")
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    answers = run_of(desk)["result"]["answers"]
    listed = page.get_by_role("list", name="Answers").get_by_role("listitem")
    expect(listed).to_have_count(len(answers))
    for at, group in enumerate(answers):
        expect(listed.nth(at)).to_contain_text(str(group["answer"] or "no answer could be read"))
        expect(listed.nth(at)).to_contain_text(f"{group['count']} text")
    # A second search: both can be looked at.
    desk.press("Escape")
    page.evaluate("document.activeElement.blur()")
    begin(desk, page, "Greedy", seed="1")
    expect(panel).to_contain_text("Greedy")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    page.get_by_label("Runs").select_option(index=0)
    expect(listed).to_have_count(len(answers))


@pytest.mark.parametrize("strategy", ["Adaptive branching", "Monte Carlo", "Sequential"])
def test_each_strategy_lists_the_candidates_of_its_last_round(
    desk: Desk, page: Page, strategy: str
) -> None:
    desk.open_loom(GAME)
    begin(desk, page, strategy, seed="1", budget_tokens="700")
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    expect(panel).to_contain_text("of 700")
    last = run_of(desk)["rounds"][-1]
    expect(rows(page)).to_have_count(
        len({each["node"] for each in last["candidates"]} | set(last["kept"]))
    )


def test_search_reports_why_its_answer_was_chosen(desk: Desk, page: Page) -> None:
    desk.open_loom("Who wrote it?")
    begin(desk, page, "Best of n", n="4", seed="4", max_tokens="12")
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    result = run_of(desk)["result"]
    expect(panel).to_contain_text(f"Chosen because {result['reason']}.")
    expect(panel).to_contain_text(f"Ranked by the {result['measure']}.")
    group = result["answers"][-1]
    page.get_by_role("list", name="Answers").get_by_role("button").last.click()
    assert desk.current == group["nodes"][0]
    assert_accessible(page)


def test_reason_has_the_minus_sign_of_other_scores(desk: Desk, page: Page) -> None:
    desk.open_loom("Say hi.")
    body = {"strategy": "beam", "breadth": 4, "seed": 1, "wait": True}
    desk.ask("POST", desk.of("/runs"), json=body)
    page.get_by_role("tab", name="Solve").click()
    panel = page.get_by_role("tabpanel", name="Solve")
    reason = run_of(desk)["result"]["reason"]
    assert re.search(r"-\d\.\d\d", reason)
    shown = re.sub(r"-(?=\d\.\d\d)", "\N{MINUS SIGN}", reason)
    expect(panel.locator(".run-reason")).to_have_text(f"Chosen because {shown}.")


def test_search_reads_checks_and_judges_answers_by_its_fields(desk: Desk, page: Page) -> None:
    desk.watch.allow("400")
    desk.open_loom("What is 37 + 58?")
    desk.press("R")
    dialog = page.get_by_role("dialog", name="Solve: search for an answer")
    dialog.get_by_role("radio", name="Best of n").first.check()
    dialog.get_by_text("Read, check and judge answers").click()
    dialog.get_by_label("Read the answer").select_option("Regular expression")
    dialog.get_by_label("Answer expression").fill("([0-9")
    dialog.get_by_label("Question to the model").fill("Is it right?")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.locator("#run-answer-wrong")).to_contain_text("regular expression")
    dialog.get_by_label("Answer expression").fill("([0-9]+)")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.locator("#run-judge-says")).to_contain_text("{answer}")
    dialog.get_by_label("Question to the model").fill("{prompt} Is it {answer}?")
    dialog.get_by_label("Correct answer").fill("9[0-9]")
    assert_accessible(page)
    dialog.locator("#run-max_tokens").fill("16")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_have_count(0)
    panel = page.get_by_role("tabpanel", name="Solve")
    expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    run = run_of(desk)
    assert run["asked"]["answer"] == "([0-9]+)"
    assert run["asked"]["check"] == "9[0-9]"
    assert run["asked"]["judge"] == "{prompt} Is it {answer}?"
    expect(panel).to_contain_text("Checked: ")
    expect(panel).to_contain_text(run["result"]["reason"])


def test_search_dialog_names_what_max_tokens_limits(desk: Desk, page: Page) -> None:
    desk.open_loom(GAME)
    desk.press("R")
    dialog = page.get_by_role("dialog", name="Solve: search for an answer")
    for strategy, unit in (("Best of n", "answer"), ("Greedy", "answer"), ("Beam", "step")):
        dialog.get_by_role("radio", name=strategy).first.check()
        expect(dialog.locator("label[for=run-max_tokens]")).to_have_text(f"Max tokens per {unit}")


@pytest.mark.parametrize("width", [390, 1440])
def test_focus_ring_of_a_strategy_leaves_its_label_free(desk: Desk, page: Page, width: int) -> None:
    desk.open_loom(GAME)
    desk.press("R")
    page.locator(".strategy").first.wait_for()
    page.set_viewport_size({"width": width, "height": 844})
    space = page.locator(".strategy").first.evaluate(
        """(each) => each.querySelector('span').getBoundingClientRect().left
          - each.querySelector('input').getBoundingClientRect().right"""
    )
    assert space >= 4  # the ring is 2 px wide, and 1 px from the button


def test_invalid_search_option_is_reported_at_its_field(desk: Desk, page: Page) -> None:
    desk.watch.allow("400|422")
    desk.open_loom(GAME)
    desk.press("R")
    dialog = page.get_by_role("dialog", name="Solve: search for an answer")
    dialog.locator("#run-budget_tokens").fill("lots")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_contain_text("Enter a number, or leave it empty.")
    dialog.locator("#run-budget_tokens").fill("0")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.locator("#run-budget_tokens-wrong")).to_contain_text("budget_tokens")
    dialog.locator("#run-budget_tokens").fill("100")
    dialog.locator("#run-breadth").fill("999")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.locator("#run-breadth-wrong")).to_contain_text("at most 128")
    # Options that a strategy does not use are neither shown nor sent.
    dialog.locator("#run-breadth").fill("3")
    dialog.locator("#run-temperature").fill("0.5")
    dialog.get_by_role("radio", name="Greedy one answer").check()
    expect(dialog.locator("#run-temperature")).to_have_count(0)
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_have_count(0)
    assert run_of(desk)["asked"] == {"strategy": "greedy", "node": 0, "budget_tokens": 100,
                                     "budget_s": 60.0}  # fmt: skip
    desk.wait_grown()


@pytest.mark.parametrize("look", [{"color_scheme": "light"}, {"color_scheme": "dark"}])
def test_a_search_is_accessible(desk: Desk, page: Page) -> None:
    desk.open_loom(GAME)
    desk.press("R")
    page.locator(".strategy").first.wait_for()
    assert_accessible(page)
    page.locator("#run-budget_s").fill("")
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    rows(page).first.wait_for()
    expect(page.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
    assert_accessible(page)


def test_stopped_search_keeps_its_nodes(desk: Desk, page: Page, gate: Gate) -> None:
    desk.make("Use 4 9 10 13 to make 24.")
    desk.visit()
    gate.hold(60)
    desk.ask("POST", desk.of("/runs"), json={"strategy": "tot", "seed": 1})
    desk.until(lambda: len(desk.nodes()) > 2, "nodes of the search")
    page.get_by_role("tab", name="Solve").wait_for()  # the page has heard of it
    desk.press("Escape", "Escape")
    gate.open()
    desk.until(lambda: run_of(desk)["status"] != "running", "it is over")
    assert run_of(desk)["status"] == "cancelled"
    assert len(desk.nodes()) > 2


def test_solve_proposes_the_strategy_that_suits_the_prompt(desk: Desk, page: Page) -> None:
    for prompt, strategy in ((GAME, "Tree of thoughts"), ("Which planet is large?", "Best of n")):
        desk.open_loom(prompt)
        desk.press("R")
        dialog = page.get_by_role("dialog", name="Solve: search for an answer")
        expect(dialog.get_by_role("radio", name=strategy).first).to_be_checked()
        page.keyboard.press("Escape")
    desk.press("R")
    expect(dialog.get_by_label("Max tokens per answer")).to_be_visible()
    dialog.get_by_role("radio", name="Beam").first.check()
    expect(dialog.get_by_label("Max tokens per step")).to_be_visible()
    page.keyboard.press("Escape")
    page.reload()
    desk.row(0).wait_for()
    desk.press("R")
    expect(dialog.get_by_role("radio", name="Beam").first).to_be_checked()


def test_second_search_shows_only_its_own_answers_and_a_full_sentence(
    desk: Desk, page: Page
) -> None:
    desk.open_loom("Count: 1, 2", template=False)
    panel = page.get_by_role("tabpanel", name="Solve")
    for n, seed in ((3, "1"), (2, "2")):
        begin(desk, page, "Best of n", n=str(n), seed=seed, max_tokens="2")
        expect(panel.get_by_role("button", name="Go to the answer")).to_be_visible(timeout=OVER_MS)
        expect(panel.get_by_label("Answer", exact=True)).to_contain_text("Ranked by the ")
        groups = run_of(desk)["result"]["answers"]
        assert sum(group["count"] for group in groups) == n
