"""A chat as in other chat programs: a system prompt, a message, an answer to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browsing import Desk, Gate, assert_accessible, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


@pytest.fixture
def chat(desk: Desk, page: Page) -> Desk:
    """A chat whose first answer has come, begun in the page; the next message has the focus."""
    page.goto("/")
    box = page.get_by_role("textbox", name="Start with a prompt")
    box.fill("Who are you?")
    box.press("Enter")
    desk.open_named()
    expect(message(page)).to_be_focused()
    desk.wait_known()
    return desk


def message(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Your next message")


def test_enter_sends_a_message_and_grows_one_complete_answer(chat: Desk, page: Page) -> None:
    page.keyboard.type("And then?")
    page.keyboard.press("Enter")
    chat.until(lambda: len(chat.nodes()) == 4, "a message and an answer")
    chat.wait_known()
    nodes = chat.nodes()
    assert [nodes[each]["said"] for each in (1, 2, 3)] == [None, "And then?", None]
    assert nodes[3]["finish_reason"] == "stop"
    assert chat.current == 3
    expect(message(page)).to_be_focused()
    expect(message(page)).to_have_value("")
    page.keyboard.type("More")
    page.keyboard.press("Enter")
    chat.until(lambda: len(chat.nodes()) == 6, "the third turn")


def test_chat_message_is_sampled_as_the_server_samples_chats(chat: Desk) -> None:
    node = chat.ask("GET", chat.of("/nodes/1"), params={"fields": "params"})
    (model,) = chat.ask("GET", "/models")["data"]
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert {name: node["params"][name] for name in sampling} == {
        name: model["chat_defaults"][name] for name in sampling
    }


def test_shift_enter_begins_a_new_line(chat: Desk, page: Page) -> None:
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(message(page)).to_have_value("one\ntwo")
    assert len(chat.nodes()) == 2


def test_the_next_message_is_written_while_the_answer_grows(
    desk: Desk, page: Page, gate: Gate
) -> None:
    (answer,) = desk.open_loom(n=1)
    desk.visit(answer)
    desk.press("Enter")
    gate.hold(3)
    page.keyboard.type("first")
    page.keyboard.press("Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    expect(message(page)).to_have_value("second")
    expect(page.get_by_text("The answer is still growing")).to_be_visible()
    gate.open()
    desk.wait_grown()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    messages = lambda: [each["said"] for each in desk.nodes().values()]  # noqa: E731
    desk.until(lambda: messages().count("second") == 1, "the second message")
    assert messages().count("first") == 1


def test_times_four_button_grows_four_answers(chat: Desk, page: Page) -> None:
    page.keyboard.type("And then?")
    page.get_by_role("button", name="Send, and grow 4 answers").click()
    chat.until(lambda: len(chat.nodes()) == 7, "a message and four answers")
    assert chat.current == 2
    chat.wait_grown()


def test_a_message_is_added_without_a_reply(chat: Desk, page: Page) -> None:
    page.keyboard.type("And then?")
    page.get_by_role("button", name="Add without reply").click()
    chat.until(lambda: len(chat.nodes()) == 3, "a message")
    page.wait_for_timeout(200)
    assert len(chat.nodes()) == 3
    page.get_by_role("button", name="Answer", exact=True).click()
    chat.until(lambda: chat.current == 3, "its answer is shown")
    chat.wait_grown()


def test_retry_grows_another_answer_and_shows_it(chat: Desk, page: Page) -> None:
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Retry").click()
    chat.until(lambda: chat.current == 2, "the other answer")
    assert chat.nodes()[0]["children"] == [1, 2]
    chat.wait_grown()
    assert_accessible(page)


def test_a_system_prompt_is_given_to_a_new_chat_and_remembered(desk: Desk, page: Page) -> None:
    page.goto("/")
    page.get_by_text("System prompt").click()
    page.get_by_role("textbox", name="System prompt").fill("You are a pirate.")
    assert_accessible(page)
    page.get_by_role("button", name="Send", exact=True).click()
    desk.open_named()
    assert "You are a pirate." in desk.nodes()[0]["text"]
    expect(page.get_by_role("button", name="System prompt: You are a pirate.")).to_be_visible()
    desk.wait_grown()
    page.goto("/")
    expect(page.get_by_role("textbox", name="System prompt")).to_have_value("You are a pirate.")


def test_another_system_prompt_begins_a_new_chat_and_keeps_the_old_one(
    desk: Desk, page: Page
) -> None:
    old = desk.make("Who are you?", system="Be brief.", meta={"system": "Be brief."})
    desk.visit()
    page.get_by_role("button", name="System prompt: Be brief.").click()
    page.get_by_role("textbox", name="System prompt").fill("Be long.")
    page.get_by_role("button", name="New chat with this").click()
    expect(page.get_by_role("button", name="System prompt: Be long.")).to_be_visible()
    assert desk.open_named()["id"] != old["id"]
    assert desk.loom["title"] == f"{old['title'] or old['name']} (2)"
    text = desk.nodes()[0]["text"]
    assert "Be long." in text
    assert "Who are you?" in text
    desk.wait_grown()
    assert desk.ask("GET", f"/looms/{old['id']}")["n_nodes"] == 1


def test_a_new_loom_gets_the_chosen_model(desk: Desk, page: Page) -> None:
    desk.add_model("org/Second-Instruct")
    try:
        page.goto("/")
        choice = page.get_by_role("combobox", name="Model")
        assert choice.locator("option").all_inner_texts() == ["tiny", "Second-Instruct"]
        choice.select_option("Second-Instruct")
        assert_accessible(page)
        with page.expect_request(lambda each: each.method == "POST") as request:
            page.get_by_role("button", name="Send", exact=True).click()
        assert request.value.post_data_json["model"] == "org/Second-Instruct"
        desk.open_named()
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Loom").click()
        with page.expect_request(lambda each: each.url.endswith("/looms")) as request:
            page.get_by_role("button", name="Same prompt only").click()
        body = request.value.post_data_json
        assert (body["model"], body["prompt"]) == ("org/Second-Instruct", desk.loom["prompt"])
        first = desk.loom["id"]
        desk.until(lambda: desk.open_named()["id"] != first, "another loom is open")
        desk.wait_grown()
    finally:
        desk.ask("DELETE", "/models/org%2FSecond-Instruct", params={"force": True})


@pytest.mark.parametrize("look", [{}, {"viewport": {"width": 390, "height": 844}}])
def test_branches_are_compared_side_by_side_and_one_is_picked_by_a_key(
    desk: Desk, page: Page
) -> None:
    desk.make("The keeper", template=False)
    texts = [" was old and tall", " was old and poor", " was old"]
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "texts": texts})
    (grown,) = desk.grow(n=1, temperature=0.5, top_k=7)
    page.goto(f"/#{desk.loom['name']}")
    children = page.get_by_role("list", name="Children").get_by_role("listitem")
    expect(children).to_have_count(4)
    desk.press("=")
    dialog = page.get_by_role("dialog", name="Compare 4 branches")
    columns = dialog.get_by_role("listitem")
    expect(columns).to_have_count(4)
    expect(columns.nth(1)).to_contain_text("was old and poor")
    expect(columns.nth(1)).to_contain_text("written")
    expect(columns.nth(3)).to_contain_text("tiny · Temperature 0.5 · Top-k 7")
    expect(columns.nth(3)).to_contain_text("avg. probability")
    assert_accessible(page)
    desk.press("2")
    expect(dialog).to_have_count(0)
    expect(desk.text).to_contain_text("and poor")
    page.keyboard.press("=")  # of a leaf its siblings are compared
    expect(columns).to_have_count(4)
    assert grown == 4
