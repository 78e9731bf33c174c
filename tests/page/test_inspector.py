"""The inspector: how branches grow, what comes next, where a node comes from, what a loom is."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


def tab(page: Page, name: str) -> Locator:
    """Show a tab of the inspector."""
    page.get_by_role("tablist", name="Inspector").get_by_role("tab", name=name).click()
    page.evaluate("document.activeElement.blur()")
    return page.locator("#inspector-panel")


def button(page: Page, name: str) -> Locator:
    """A button of the inspector."""
    return page.locator("#inspector-panel").get_by_role("button", name=name)


def params(desk: Desk, node: int) -> dict[str, Any]:
    reply = desk.ask("GET", desk.of(f"/nodes/{node}"), params={"fields": "params"})
    values: dict[str, Any] = reply["params"]
    return values


def fact(page: Page, name: str) -> Locator:
    """Return the element with the value of a named fact."""
    return page.locator(".fact", has=page.locator("dt", has_text=name)).locator("dd").first


def test_arrow_keys_select_tabs(desk: Desk, page: Page) -> None:
    desk.open_loom()
    tabs = page.get_by_role("tablist", name="Inspector")
    tabs.get_by_role("tab", name="Generate").focus()
    for name in ("Tokens", "Node", "Loom", "Generate"):
        page.keyboard.press("ArrowRight")
        expect(tabs.get_by_role("tab", name=name)).to_be_focused()
        expect(tabs.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("End")
    expect(tabs.get_by_role("tab", name="Loom")).to_be_focused()


def test_branches_grow_with_the_settings_of_the_panel(desk: Desk, page: Page) -> None:
    desk.open_loom()
    tab(page, "Generate")
    page.get_by_role("button", name="Sentence").click()
    for label, value in (
        ("Branches", "2"),
        ("Temperature", "1,2"),
        ("Top-p", "0.9"),
        ("Top-k", "40"),
        ("Min-p", "0.02"),
        ("Repetition penalty", "1.1"),
        ("Seed", "7"),
    ):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Stop at").fill("\\n\\n")
    page.keyboard.press("Enter")
    button(page, "Grow 2 branches").click()
    desk.until(lambda: len(desk.nodes()) == 3, "two nodes")
    desk.wait_grown()
    for node in (1, 2):
        values = params(desk, node)
        assert values["stop"] == ["\n\n"]
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        assert [values[name] for name in names] == [24, 1.2, 0.9, 40, 0.02, 1.1]
        assert values["seed"] == 7
    # A changed setting is marked, and a click on the mark resets it.
    page.get_by_role("button", name="Temperature: reset to 1").click()
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("1")


def test_constraint_allows_only_its_choices(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    tab(page, "Generate")
    page.get_by_label("Output format").select_option(label="Choices")
    page.get_by_label("Choices").fill("yes\nno")
    button(page, "Grow 4 branches").click()
    desk.until(lambda: len(desk.nodes()) == 5, "four nodes")
    desk.wait_grown()
    assert {each["text"] for number, each in desk.nodes().items() if number} <= {"yes", "no"}
    page.get_by_label("Output format").select_option(label="JSON schema")
    page.get_by_label("JSON schema").fill("{")
    expect(page.locator("#inspector-panel")).to_contain_text("Invalid JSON")
    expect(button(page, "Grow 4 branches")).to_be_disabled()


def test_folded_samplers_and_token_biases_are_sent(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    panel = tab(page, "Generate")
    expect(page.get_by_label("Typical-p")).to_be_hidden()
    panel.get_by_text("More samplers").click()
    for label, value in (
        ("Typical-p", "0.9"),
        ("Presence penalty", "0.5"),
        ("Frequency penalty", "-0,25"),
        ("Penalty window", "64"),
        ("Top-nσ", "1.5"),
        ("XTC probability", "0.5"),
        ("DRY multiplier", "0.8"),
        ("DRY window", "100"),
        ("Min tokens", "3"),
    ):
        page.get_by_label(label).fill(value)
    for token, value in ((" the", "-2.5"), ("#9", "ban")):
        page.get_by_label("Token biases").first.fill(token)
        page.get_by_label("Bias of the token").fill(value)
        page.keyboard.press("Enter")
        expect(page.get_by_label("Bias of the token")).to_have_value("")
    expect(panel.get_by_text("More samplers")).to_contain_text("11 set")
    assert_accessible(page)
    button(page, "Grow 4 branches").click()
    desk.until(lambda: len(desk.nodes()) == 5, "four nodes")
    desk.wait_grown()
    values = params(desk, 1)
    names = ("typical_p", "presence_penalty", "frequency_penalty", "penalty_last_n")
    assert [values[name] for name in names] == [0.9, 0.5, -0.25, 64]
    names = ("top_n_sigma", "xtc_probability", "dry_multiplier", "dry_penalty_last_n")
    assert [values[name] for name in names] == [1.5, 0.5, 0.8, 100]
    assert values["constraint"]["token_limits"]["min_tokens"] == 3
    (the,) = desk.ask("POST", "/tokenize", json={"text": " the", "add_bos": False})["token_ids"]
    assert values["logit_bias"] == {str(the): -2.5, "9": "-inf"}
    page.get_by_label("Token biases").first.fill("several words")
    page.get_by_label("Bias of the token").fill("1")
    page.keyboard.press("Enter")
    expect(panel).to_contain_text("tokens; enter one")
    page.get_by_role("button", name="Penalty window: reset to all").click()
    expect(page.get_by_label("Penalty window")).to_have_value("")
    page.reload()
    expect(page.get_by_label("Presence penalty", exact=True)).to_have_value("0.5")


def test_grammar_allows_only_its_texts(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    tab(page, "Generate")
    page.get_by_label("Output format").select_option(label="Grammar (GBNF)")
    page.get_by_label("Grammar (GBNF)").fill('root ::= "left" | "right"')
    button(page, "Grow 4 branches").click()
    desk.until(lambda: len(desk.nodes()) == 5, "four nodes")
    desk.wait_grown()
    assert {each["text"] for number, each in desk.nodes().items() if number} <= {"left", "right"}
    tab(page, "Node")
    page.get_by_role("treeitem").nth(1).click()
    expect(fact(page, "Output format")).to_have_text("gbnf")


def test_invalid_setting_is_reported_at_its_field(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    tab(page, "Generate")
    field = page.get_by_label("Branches", exact=True)
    field.fill("500")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#wrong-n")).to_have_text("It must be 1 to 128.")
    expect(button(page, "Grow 4 branches")).to_be_disabled()
    page.evaluate("document.activeElement.blur()")
    desk.press("g")
    expect(page.locator(".toasts")).to_contain_text("Branches: It must be 1 to 128.")
    field.fill("3")
    expect(button(page, "Grow 3 branches")).to_be_enabled()
    assert len(desk.nodes()) == 1


def test_setting_rejected_by_the_server_is_reported_at_its_field(desk: Desk, page: Page) -> None:
    desk.watch.allow("400|422")
    desk.open_loom(template=False)
    tab(page, "Generate")
    page.get_by_label("Output format").select_option(label="Regular expression")
    page.get_by_label("Regular expression").fill("(")
    button(page, "Grow 4 branches").click()
    expect(page.locator(".setting-error")).to_contain_text("regex parse error")
    expect(button(page, "Grow 4 branches")).to_be_disabled()
    page.get_by_label("Output format").select_option(label="Any text")
    expect(button(page, "Grow 4 branches")).to_be_enabled()


def test_settings_apply_to_a_call_a_loom_or_all_looms(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    tab(page, "Generate")
    panel, tokens = page.locator("#inspector-panel"), page.get_by_label("Max tokens")
    tokens.fill("9")
    panel.get_by_role("radio", name="Next time").click()
    tokens.fill("5")
    button(page, "Grow 4 branches").click()
    desk.until(lambda: len(desk.nodes()) == 5, "four nodes")
    desk.wait_grown()
    assert params(desk, 1)["max_tokens"] == 5
    expect(tokens).to_have_value("9")
    panel.get_by_role("radio", name="Default").click()
    expect(tokens).to_have_value("48")
    expect(panel).to_contain_text("This loom has its own settings")
    tokens.fill("33")
    desk.make("Another one.", template=False)
    desk.visit()
    expect(page.get_by_label("Max tokens")).to_have_value("33")


def test_presets_are_saved_renamed_and_selected_by_key(desk: Desk, page: Page) -> None:
    desk.open_loom()
    tab(page, "Generate")
    presets = page.get_by_role("group", name="Presets")
    desk.press("Alt+1")
    expect(presets.get_by_role("button", name="Neutral")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("1")
    page.get_by_label("Temperature", exact=True).fill("1.5")
    page.get_by_label("Branches", exact=True).fill("7")
    page.get_by_role("button", name="Save these settings").click()
    page.get_by_label("Name of the preset").fill("Hot")
    page.keyboard.press("Enter")
    desk.press("Alt+3")
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("1.3")
    desk.press("Alt+4")
    expect(page.get_by_label("Branches", exact=True)).to_have_value("7")
    page.get_by_role("button", name="Rename Hot").click()
    page.get_by_label("Name of the preset").fill("Seven")
    page.keyboard.press("Enter")
    page.reload()
    page.get_by_role("button", name="Remove Seven").click()
    expect(presets.get_by_role("button", name="Seven")).to_have_count(0)
    page.locator(".toasts").get_by_role("button", name="Undo").click()
    expect(presets.get_by_role("button", name="Seven")).to_have_count(1)


# One token at a time


def test_digit_adds_the_token_of_its_row(desk: Desk, page: Page) -> None:
    desk.open_loom("Use 4 9 10 13 to make 24.")
    desk.press("t")
    rows = page.locator("tr[data-token-id]")
    expect(rows).to_have_count(20)
    likeliest = desk.ask("POST", desk.of("/nodes/0/next"), json={"top": 20})["next"]
    assert [int(each.get_attribute("data-token-id") or 0) for each in rows.all()] == [
        each["id"] for each in likeliest
    ]
    before = desk.ask("GET", "/kv")["data"][0]
    desk.press("2")
    desk.until(lambda: len(desk.nodes()) == 2, "a child")
    child = desk.nodes()[1]
    taken = desk.ask("GET", desk.of("/nodes/1"), params={"fields": "tokens"})["token_ids"]
    assert taken == [likeliest[1]["id"]]
    assert child["parent"] == 0
    expect(page.locator(".next-after")).to_contain_text(f"24.{child['text']}")
    expect(page.locator("tr[data-token-id] kbd").first).to_have_text("1")
    page.wait_for_timeout(300)
    after = desk.ask("GET", "/kv")["data"][0]
    assert after["prefilled"] - before["prefilled"] <= 2  # the token itself, not what leads to it
    desk.press("t")  # and back to where one was
    expect(page.get_by_role("tab", name="Generate")).to_have_attribute("aria-selected", "true")


def test_token_search_lists_and_adds_an_unlikely_token(desk: Desk, page: Page) -> None:
    desk.open_loom("Use 4 9 10 13 to make 24.")
    tab(page, "Generate")
    page.get_by_label("Top-k", exact=True).fill("3")
    page.get_by_label("Temperature", exact=True).fill("0.8")
    panel = tab(page, "Tokens")
    expect(panel).to_contain_text("“sampled” is the probability after temperature 0.8, top-k 3")
    expect(page.locator("tr.is-out")).to_have_count(17)
    page.get_by_placeholder("Find a token").fill("owl")
    row = page.locator("tr[data-token-id]").first
    expect(row).to_contain_text("rank")
    token = int(row.get_attribute("data-token-id") or 0)
    candidates = desk.ask("POST", desk.of("/nodes/0/next"), json={"candidates": [token]})[
        "candidates"
    ]
    assert candidates[0]["rank"] > 20
    page.keyboard.press("Enter")
    desk.until(lambda: len(desk.nodes()) == 2, "it was taken")
    taken = desk.ask("GET", desk.of("/nodes/1"), params={"fields": "tokens"})["token_ids"]
    assert taken == [token]


def test_look_ahead_shows_the_continuation_of_a_candidate(desk: Desk, page: Page) -> None:
    desk.open_loom("Use 4 9 10 13 to make 24.")
    tab(page, "Tokens")
    page.get_by_label("Look 8 tokens ahead").check()
    first = page.locator("tr[data-token-id]").first
    expect(first.locator(".chance-ahead")).to_be_visible()
    token = int(first.get_attribute("data-token-id") or 0)
    reply = desk.ask("POST", desk.of("/nodes/0/next"), json={"candidates": [token], "ahead": 8})
    words = " ".join(reply["candidates"][0]["ahead"].split())
    expect(first.locator(".chance-ahead")).to_contain_text(words)
    assert len(desk.nodes()) == 1


def test_token_table_is_of_the_current_node_after_fast_moves(desk: Desk, page: Page) -> None:
    """Responses for earlier nodes may arrive late."""
    desk.open_loom(n=6, max_tokens=8)
    tab(page, "Tokens")
    desk.press("ArrowRight", *["ArrowDown"] * 5)
    expect(page.locator("tr[data-token-id] kbd").first).to_be_visible()
    page.wait_for_timeout(400)
    likeliest = desk.ask("POST", desk.of("/nodes/6/next"), json={"top": 20})["next"]
    rows = page.locator("tr[data-token-id]")
    expect(rows.first).to_have_attribute("data-token-id", str(likeliest[0]["id"]))


def test_token_table_has_percentages_and_separate_columns(desk: Desk, page: Page) -> None:
    desk.sets(temperature=0.8, top_k=5)
    desk.open_loom()
    table = tab(page, "Tokens").locator(".chances")
    expect(table.locator("tbody tr")).to_have_count(20)
    cells = table.locator("tbody td:nth-child(n + 3)").all_inner_texts()
    assert len(cells) == 60
    assert all(re.fullmatch(r"<\u202f0\.1\u202f%|[\d.]+\u202f%", each) for each in cells), cells
    gaps = table.locator("thead").evaluate(
        """(each) => {
          const boxes = [...each.querySelectorAll('th')].slice(2).map((th) => {
            const range = document.createRange()
            range.selectNodeContents(th)
            return range.getBoundingClientRect()
          })
          return boxes.slice(1).map((box, i) => box.left - boxes[i].right)
        }"""
    )
    assert min(gaps) > 6


# A node


def test_node_panel_shows_counts_and_sampling(desk: Desk, page: Page) -> None:
    desk.open_loom(n=2, max_tokens=6, temperature=0.7, seed=5)
    desk.press("ArrowRight", "ArrowDown")
    tab(page, "Node")
    node = desk.nodes()[2]
    expect(fact(page, "Tokens").first).to_have_text("6")
    expect(fact(page, "Characters")).to_have_text(str(len(node["text"])))
    mean = math.exp(node["mean_logprob"])
    assert mean > 0.1
    percent = f"{100 * mean:.0f}\u202f%"
    expect(fact(page, "Avg. probability")).to_have_text(percent)
    expect(desk.row(2)).to_have_accessible_name(re.compile(rf"probability {100 * mean:.0f}\s%"))
    expect(desk.row(2).get_by_title(f"avg. probability {percent} (geometric mean)")).to_have_count(
        1
    )
    expect(fact(page, "State")).to_have_text("stopped at limit")
    expect(fact(page, "Temperature")).to_have_text("0.7")
    expect(fact(page, "Seed")).to_have_text("5")
    expect(fact(page, "Branch")).to_have_text("2")
    expect(fact(page, "Origin")).to_have_text("grown by a program")
    expect(fact(page, "Turn")).to_have_text("assistant")


@pytest.mark.parametrize("late", [(), ("news",)])
def test_regenerated_node_has_the_same_tokens(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3, max_tokens=20, temperature=1.2, seed=11)
    desk.press("ArrowRight", "ArrowDown", "ArrowDown")
    tab(page, "Node")
    page.get_by_role("button", name="Regenerate exactly").click()
    expect(page.locator(".toasts")).to_contain_text("Regenerated the same 20 tokens.")
    nodes = desk.nodes()
    assert nodes[4]["text"] == nodes[3]["text"]
    # The hint to a new node comes with the news; the note stays where it is.
    page.get_by_role("button", name="Remove the copy").click(delay=600)
    desk.until(lambda: len(desk.nodes()) == 4, "the copy is gone")


def test_copied_curl_and_python_create_a_node_with_the_same_text(desk: Desk, page: Page) -> None:
    desk.open_loom(n=2, max_tokens=10, seed=3, stop=["don't stop"])
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "text": 'It\'s "here":\n$HOME `x`'})
    texts = {number: each["text"] for number, each in desk.nodes().items()}
    tab(page, "Node")
    for node in (1, 2, 3):
        desk.press("ArrowRight" if node == 1 else "ArrowDown")
        expect(desk.page.locator("[role=treeitem][aria-current=true]")).to_have_attribute(
            "data-node", str(node)
        )
        for what, program in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
            page.get_by_role("button", name=f"Copy as {what}").click()
            page.evaluate("document.activeElement.blur()")
            text = page.evaluate("window.copied")
            before = set(desk.nodes())
            source = os.pathsep.join(sys.path)
            done = subprocess.run(
                [*program, text], capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "PYTHONPATH": source},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            (new,) = set(desk.nodes()) - before
            assert desk.nodes()[new]["text"] == texts[node]


def test_label_and_note_of_a_node_are_saved(desk: Desk, page: Page) -> None:
    desk.open_loom(n=2)
    desk.press("ArrowRight", "b")
    tab(page, "Node")
    page.get_by_label("Label of the bookmark").fill("the best")
    page.keyboard.press("Enter")
    page.get_by_label("Note", exact=True).fill("Look at this.")
    page.keyboard.press("Control+Enter")
    query = {"fields": "meta"}
    desk.until(
        lambda: (
            desk.ask("GET", desk.of("/nodes/1"), params=query)["meta"].get("note")
            == "Look at this."
        ),
        "the note",
    )
    assert desk.nodes()[1]["bookmark"] == "the best"
    page.reload()
    expect(page.get_by_label("Note", exact=True)).to_have_value("Look at this.")


def test_kv_of_a_node_is_forgotten_and_warmed(desk: Desk, page: Page) -> None:
    desk.open_loom("Only this test asks so.", n=1)
    desk.press("ArrowRight")
    tab(page, "Node")
    page.get_by_role("button", name="Free memory").click()
    expect(fact(page, "KV cache")).to_contain_text("partly")
    page.get_by_role("button", name="Preload").click()
    expect(fact(page, "KV cache")).to_have_text("cached")
    expect(page.get_by_role("button", name="Preload")).to_be_disabled()


def places(panel: Locator) -> dict[str, float]:
    """Return the distance in pixels of each enabled control from the top of the screen."""
    tops: dict[str, float] = panel.evaluate(
        """(panel) => Object.fromEntries([...panel.querySelectorAll('button, input, textarea')]
          .filter((each) => !each.disabled)
          .map((each) => [each.ariaLabel || each.textContent, each.getBoundingClientRect().top]))"""
    )
    return tops


@pytest.mark.parametrize("late", [("answers",)])
@pytest.mark.parametrize(
    ("name", "label", "button"), [("Node", "Origin", "Move"), ("Loom", "In KV cache", "Export")]
)
def test_controls_keep_their_position_when_late_facts_arrive(
    desk: Desk, page: Page, name: str, label: str, button: str
) -> None:
    desk.open_loom(n=3, top_p=0.9, temperature=0.7)
    desk.press("ArrowRight", "ArrowDown")
    panel = tab(page, name)
    expect(fact(page, label)).to_have_text("…")
    before = places(panel)
    assert button in before
    expect(fact(page, label)).not_to_have_text("…")
    after = places(panel)
    assert {each: after[each] for each in before} == before


def test_node_panel_moves_copies_and_removes_all_but_the_path(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3)
    desk.press("ArrowRight", "ArrowDown")
    tab(page, "Node")
    page.get_by_role("button", name="Move", exact=True).click()
    desk.press("ArrowUp")
    page.get_by_role("button", name="Move below this node").click()
    desk.until(lambda: desk.nodes()[2]["parent"] == 1, "it moved")
    desk.until(lambda: desk.current == 2, "one stands at it again")
    page.get_by_role("button", name="Copy to a new loom").click()
    page.get_by_label("Name of the new loom").fill("elsewhere")
    page.keyboard.press("Enter")
    expect(page.locator(".toasts")).to_contain_text("to elsewhere")
    assert desk.ask("GET", "/looms/elsewhere")["n_nodes"] == 1
    page.get_by_role("button", name="Keep only this path").click()
    desk.until(lambda: set(desk.nodes()) == {0, 1, 2}, "the rest is gone")


# A loom


def test_loom_panel_shows_counts_and_reverts_operations(desk: Desk, page: Page) -> None:
    desk.open_loom(n=3, max_tokens=5)
    panel = tab(page, "Loom")
    expect(fact(page, "Nodes")).to_have_text("4")
    model = page.locator("dt", has_text="Model").first
    expect(model).to_have_attribute("title", "The model of its tokens.")
    expect(fact(page, "Leaves")).to_have_text("3")
    n_tokens = sum(each["n_tokens"] for each in desk.nodes().values())
    expect(fact(page, "Tokens")).to_have_text(str(n_tokens))
    desk.ask("POST", desk.of("/nodes"), json={"text": "one"})
    desk.ask("POST", desk.of("/nodes"), json={"text": "two"})
    rows = panel.get_by_role("list").get_by_role("listitem")
    expect(rows).to_have_count(4)
    rows.nth(2).get_by_role("button").click()  # as it was when branches had grown
    desk.until(lambda: len(desk.nodes()) == 4, "two operations are undone")
    expect(panel.locator(".history .is-undone")).to_have_count(2)
    rows.nth(0).get_by_role("button").click()
    desk.until(lambda: len(desk.nodes()) == 6, "both are done again")
    page.get_by_label("Notes on the loom").fill("Mine.")
    page.keyboard.press("Tab")
    current = lambda: desk.ask("GET", desk.of())  # noqa: E731
    desk.until(lambda: current()["meta"].get("note") == "Mine.", "the note")
    page.get_by_label("Name", exact=True).fill("Another name!")
    page.keyboard.press("Enter")
    desk.until(lambda: current()["title"] == "Another name!", "the title")


@pytest.mark.parametrize("name", ["Generate", "Tokens", "Node", "Loom"])
@pytest.mark.parametrize("look", [{"color_scheme": "light"}, {"color_scheme": "dark"}])
def test_every_tab_is_accessible(desk: Desk, page: Page, name: str) -> None:
    desk.open_loom(n=2)
    desk.press("ArrowRight")
    tab(page, name)
    page.wait_for_timeout(500)
    assert_accessible(page)
