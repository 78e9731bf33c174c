"""Files of other programs are imported in the page, with their roles and alternatives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import foreign_looms
from browsing import Desk, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.page


class File(NamedTuple):
    """A file to import, and the report that the page shows for it."""

    name: str
    content: Any
    format: str
    n_nodes: int
    is_chat: bool = False


def lines(rows: list[Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


FILES = (
    File("fox.jsonl", lines(foreign_looms.SILLYTAVERN), "SillyTavern chats", 4, is_chat=True),
    File("chat-export.json", foreign_looms.OPEN_WEBUI, "Open WebUI exports", 4, is_chat=True),
    File("conversations.json", [foreign_looms.CONVERSATION], "ChatGPT exports", 4, is_chat=True),
    File(
        "history.json",
        foreign_looms.TEXTGEN,
        "Text-generation-webui histories",
        4,
        is_chat=True,
    ),
    File("session.json", foreign_looms.MIKUPAD, "Mikupad sessions", 4),
    File("note.json", foreign_looms.LOOMSIDIAN_NOTE, "Loomsidian notes and exports", 4),
    File("The fox.txt", "Once upon a time", "Plain text and Markdown", 1),
    File("Notes.md", "# Fox\n\n[draft] Once upon a time", "Plain text and Markdown", 1),
    File("export.json", foreign_looms.BASEMODE, "Basemode-loom exports", 4),
)


def choose(page: Page, name: str, content: str | bytes) -> Locator:
    """Choose a file in the import dialog, and return the dialog."""
    page.goto("/")
    page.get_by_role("button", name="Import").click()
    data = content.encode() if isinstance(content, str) else content
    page.locator("input[type=file]").set_input_files(
        {"name": name, "mimeType": "application/octet-stream", "buffer": data}
    )
    return page.get_by_role("dialog", name="Import")


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_file_of_another_program_becomes_a_loom(file: File, desk: Desk, page: Page) -> None:
    content = file.content if isinstance(file.content, str) else json.dumps(file.content)
    dialog = choose(page, file.name, content)
    nodes = f"{file.n_nodes} node{'' if file.n_nodes == 1 else 's'} in 1 loom"
    expect(dialog).to_contain_text(f"{file.format}: {nodes}")
    dialog.get_by_role("link").click()
    assert desk.open_named()["chat_template_used"] is file.is_chat
    desk.wait_known()
    assert len(desk.nodes()) == file.n_nodes


def test_swipes_of_a_sillytavern_chat_are_alternative_answers(desk: Desk, page: Page) -> None:
    choose(page, "fox.jsonl", lines(foreign_looms.SILLYTAVERN)).get_by_role("link").click()
    desk.open_named()
    nodes = desk.nodes()
    assert [nodes[child]["text"].strip() for child in nodes[0]["children"]] == ["upon", "more"]


def test_imported_chat_opens_at_its_newest_message_on_the_chosen_swipe(
    desk: Desk, page: Page
) -> None:
    rows = [row.copy() for row in foreign_looms.SILLYTAVERN]
    del rows[1]  # it begins with a greeting
    rows[1] |= {"mes": " more", "swipe_id": 1}
    dialog = choose(page, "fox.jsonl", lines(rows))
    link = dialog.get_by_role("link")
    expect(link).to_have_text("Fox")
    address = link.get_attribute("href")
    page.keyboard.press("Escape")
    # Other looms of this server may have the same title.
    page.get_by_role("list", name="Looms").locator(f"a[href='{address}']").click()
    desk.open_named()
    nodes = desk.nodes()
    (newest,) = (each for each in nodes.values() if each["said"] == " a time")
    desk.until(lambda: desk.current == newest["node"], "the newest message")
    desk.press("ArrowLeft", "ArrowLeft", "ArrowRight")
    assert nodes[desk.current]["text"].strip() == "more"


def test_history_that_begins_with_a_greeting_is_named_by_its_first_message(
    desk: Desk, page: Page
) -> None:
    history = {"internal": [["<|BEGIN-VISIBLE-CHAT|>", "Hello!"], ["Who are you?", "A fox."]]}
    dialog = choose(page, "history.json", json.dumps(history))
    expect(dialog.get_by_role("link")).to_have_text("Who are you?")


def test_author_note_and_memory_of_mikupad_are_in_the_loom(desk: Desk, page: Page) -> None:
    choose(page, "session.json", json.dumps(foreign_looms.MIKUPAD)).get_by_role("link").click()
    desk.open_named()
    expect(page.locator("[data-author-note]")).to_contain_text("[Write short.]")
    assert desk.nodes()[0]["text"].endswith("A")


def test_import_of_a_file_that_is_not_text_shows_an_error_without_an_offer(
    desk: Desk, page: Page
) -> None:
    desk.watch.allow("status of 4")
    dialog = choose(page, "story.docx", b"PK\x03\x04\x14\x00\x06\x00\xff\xfe")
    expect(dialog.locator(".error")).to_contain_text("It is not a text file.")
    expect(dialog.get_by_role("button", name="Import as plain text")).to_have_count(0)


def test_margin_names_the_authors_of_imported_answers(desk: Desk, page: Page) -> None:
    for name, content, author in (
        ("fox.jsonl", lines(foreign_looms.SILLYTAVERN), "Fox"),
        ("conversations.json", json.dumps([foreign_looms.CONVERSATION]), "Assistant"),
    ):
        choose(page, name, content).get_by_role("link").click()
        desk.open_named()
        desk.wait_known()
        (answer, *_) = (
            each for each in desk.nodes().values() if each["parent"] == 0 and not each["said"]
        )
        desk.visit(answer["node"])
        expect(page.locator(".margin .who")).to_have_text(["You", author])


def test_chatgpt_export_keeps_its_roles_and_is_continued_as_a_chat(desk: Desk, page: Page) -> None:
    dialog = choose(page, "conversations.json", json.dumps([foreign_looms.CONVERSATION]))
    dialog.get_by_role("link").click()
    desk.open_named()
    (question,) = (each for each in desk.nodes().values() if "a time" in each["text"])
    assert question["said"].strip() == "a time"
    desk.visit(question["node"])
    page.get_by_role("button", name="Answer", exact=True).click()
    desk.until(lambda: len(desk.nodes()) == 5, "an answer")
    desk.wait_known()
    page.get_by_role("button", name="Reply").click()
    page.keyboard.type("And then?")
    page.keyboard.press("Enter")
    desk.until(lambda: len(desk.nodes()) == 7, "a message and an answer")


def test_looms_of_text_files_have_the_names_of_the_files(desk: Desk, page: Page) -> None:
    for text in ('{"who": "knows"}', "Another text"):
        dialog = choose(page, "An owl: 1.txt", text)
        expect(dialog.get_by_role("link", name="An owl: 1", exact=True)).to_be_visible()


def test_unknown_file_names_supported_programs_and_is_imported_as_text_on_request(
    desk: Desk, page: Page
) -> None:
    desk.watch.allow("status of 4")
    dialog = choose(page, "no.json", '{"who": "knows"}')
    expect(dialog.locator(".error")).to_contain_text("Unknown file format. Supported: ")
    expect(dialog.locator(".error")).to_contain_text("SillyTavern chats")
    expect(dialog).not_to_contain_text('format "text"')
    dialog.get_by_role("button", name="Import as plain text").click()
    expect(dialog).to_contain_text("1 node in 1 loom")
    expect(dialog.locator(".error")).to_have_count(0)
    dialog.get_by_role("link").click()
    desk.open_named()
    assert desk.nodes()[0]["text"].endswith('{"who": "knows"}')
