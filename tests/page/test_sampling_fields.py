"""Every sampling field of the panel: its value is sent with growth, and a reload keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

pytestmark = pytest.mark.page
NUMBERS: dict[str, tuple[str, float]] = {
    "Branches": ("n", 2),
    "Max tokens": ("max_tokens", 7),
    "Temperature": ("temperature", 1.2),
    "Top-p": ("top_p", 0.9),
    "Top-k": ("top_k", 40),
    "Min-p": ("min_p", 0.02),
    "Repetition penalty": ("repetition_penalty", 1.1),
    "Min tokens": ("min_tokens", 3),
    "Typical-p": ("typical_p", 0.8),
    "Presence penalty": ("presence_penalty", 0.5),
    "Frequency penalty": ("frequency_penalty", -0.25),
    "Penalty window": ("penalty_last_n", 64),
    "Top-nσ": ("top_n_sigma", 1.5),
    "XTC probability": ("xtc_probability", 0.5),
    "XTC threshold": ("xtc_threshold", 0.2),
    "DRY multiplier": ("dry_multiplier", 0.8),
    "DRY base": ("dry_base", 1.5),
    "DRY allowed length": ("dry_allowed_length", 3),
    "DRY window": ("dry_penalty_last_n", 100),
    "Seed": ("seed", 11),
}


def grow_request(page: Page) -> dict[str, Any]:
    """Grow by the panel's button; return the body of the request."""

    def is_growth(request: Request) -> bool:
        return request.method == "POST" and request.url.endswith("/generate")

    with page.expect_request(is_growth) as caught:
        page.locator("#inspector-panel").get_by_role("button", name="Grow 2 branches").click()
    body: dict[str, Any] = caught.value.post_data_json
    return body


def test_every_sampling_field_is_sent_and_outlives_a_reload(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    panel = page.locator("#inspector-panel")
    panel.get_by_text("More samplers").click()
    for label, (_, value) in NUMBERS.items():
        panel.get_by_label(label, exact=True).fill(str(value))
    panel.get_by_label("Temperature first", exact=True).check()
    for label, text in (("Stop at", "\\n\\n"), ("DRY breakers", "\\t")):
        panel.get_by_label(label, exact=True).fill(text)
        page.keyboard.press("Enter")
    panel.get_by_role("button", name="DRY breakers: remove *").click()
    panel.get_by_label("Token biases").first.fill("#9")
    panel.get_by_label("Bias of the token").fill("ban")
    page.keyboard.press("Enter")
    expect(panel.get_by_label("Bias of the token")).to_have_value("")
    expected = {
        **{name: value for name, value in NUMBERS.values()},
        "temperature_first": True,
        "dry_sequence_breakers": ["\n", ":", '"', "\t"],
        "stop": ["\n\n"],
        "logit_bias": {"9": "-inf"},
    }
    assert grow_request(page) == expected
    desk.wait_grown()
    page.reload()
    for label, (_, value) in NUMBERS.items():
        expect(panel.get_by_label(label, exact=True)).to_have_value(str(value))
    expect(panel.get_by_label("Temperature first", exact=True)).to_be_checked()
    assert grow_request(page) == expected
    desk.wait_grown()
    node = desk.ask("GET", desk.of("/nodes/1"), params={"fields": "params"})
    assert node["params"]["temperature_first"] is True
    assert node["params"]["dry_sequence_breakers"] == ["\n", ":", '"', "\t"]


def test_bad_words_are_banned_and_outlive_a_reload(desk: Desk, page: Page) -> None:
    desk.open_loom("Once upon a time", template=False)
    panel = page.locator("#inspector-panel")
    panel.get_by_text("More samplers").click()
    for label, value in (("Branches", "2"), ("Max tokens", "12"), ("Seed", "11")):
        panel.get_by_label(label, exact=True).fill(value)
    assert "bad_words" not in grow_request(page)
    desk.until(lambda: len(desk.nodes()) == 3, "two nodes")
    desk.wait_grown()
    texts = [each["text"] for number, each in desk.nodes().items() if number]
    word = max(" ".join(texts).split(), key=len)
    panel.get_by_label("Bad words", exact=True).fill(word)
    page.keyboard.press("Enter")
    expect(panel.get_by_text("More samplers")).to_contain_text("1 set")
    assert grow_request(page)["bad_words"] == [word]
    desk.until(lambda: len(desk.nodes()) == 5, "two more nodes")
    desk.wait_grown()
    nodes = desk.nodes()
    assert word in nodes[1]["text"] + nodes[2]["text"]
    assert word not in nodes[3]["text"] + nodes[4]["text"]
    desk.reload()
    expect(panel.get_by_role("list", name="Bad words").locator("code")).to_have_text([word])
    expect(desk.tree.locator("[aria-current=true]")).to_be_visible()
    desk.visit(3)
    expect(desk.row(3)).to_have_attribute("aria-current", "true")
    page.get_by_role("tab", name="Node").click()
    fact = panel.locator(".fact", has=page.locator("dt", has_text="Bad words"))
    expect(fact.locator("dd")).to_have_text(f'"{word}"')
    page.get_by_role("button", name="Regenerate exactly").click()
    expect(page.locator(".toasts")).to_contain_text("Regenerated the same")
    node = desk.ask("GET", desk.of("/nodes/5"), params={"fields": "params"})
    assert node["params"]["constraint"]["token_limits"]["bad_words"] == [word]


def test_token_ids_are_checked_and_sent(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    panel = page.locator("#inspector-panel")
    panel.get_by_text("More samplers").click()
    panel.get_by_label("Branches", exact=True).fill("2")
    stop = panel.get_by_label("Stop token ids", exact=True)
    for wrong in ("-1", "owl", "2048"):
        stop.fill(wrong)
        page.keyboard.press("Enter")
        expect(panel.locator("#wrong-stop_token_ids")).to_have_text(
            "Enter whole numbers, 0 to 2047."
        )
        expect(panel.get_by_role("button", name="Grow 2 branches")).to_be_disabled()
    stop.fill("5")
    page.keyboard.press("Enter")
    expect(stop).to_have_attribute("aria-invalid", "false")
    panel.get_by_label("Allowed token ids", exact=True).fill("300, 301 5")
    page.keyboard.press("Enter")
    panel.get_by_role("button", name="Allowed token ids: remove 301").click()
    request = grow_request(page)
    assert request["stop_token_ids"] == [5]
    assert request["allowed_token_ids"] == [300, 5]
    desk.until(lambda: len(desk.nodes()) == 3, "two nodes")
    desk.wait_grown()
    node = desk.ask("GET", desk.of("/nodes/1"), params={"fields": "tokens"})
    assert set(node["token_ids"]) <= {300}


def test_reset_mark_restores_the_default_breakers_and_order(desk: Desk, page: Page) -> None:
    desk.open_loom(template=False)
    panel = page.locator("#inspector-panel")
    panel.get_by_text("More samplers").click()
    panel.get_by_label("Temperature first", exact=True).check()
    panel.get_by_role("button", name="DRY breakers: remove :").click()
    expect(panel.get_by_text("More samplers")).to_contain_text("2 set")
    panel.get_by_role("button", name="Temperature first: reset to off").click()
    panel.get_by_role("button", name="DRY breakers: reset to").click()
    expect(panel.get_by_label("Temperature first", exact=True)).not_to_be_checked()
    expect(panel.get_by_role("list", name="DRY breakers").locator("code")).to_have_text(
        ["\\n", ":", '"', "*"]
    )
    expect(panel.get_by_text("More samplers")).to_have_text("More samplers")
