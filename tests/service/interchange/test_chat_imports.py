"""Chats of other programs: they keep their roles, and a model with a chat template answers them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import weft
from foreign_looms import CHATS, FILES, MIKUPAD, OPEN_WEBUI, SILLYTAVERN, TEXTGEN
from shallow import shallow
from weft import LM, Heddle, Loom
from weft.loom.author_note import AuthorNote
from weft.service.interchange import messages_of, read
from weft.service.interchange.chat_turns import START

HEADER = SILLYTAVERN[0]


@cache
def model() -> LM:
    return weft.load(shallow(), engine="numpy")


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"name": "Fox", "is_user": False, "is_system": False, "mes": text, **fields}


def question(text: str) -> dict[str, Any]:
    return {"name": "You", "is_user": True, "is_system": False, "mes": text}


def texts_of(nodes: list[Heddle]) -> list[str]:
    return [node.text for node in nodes]


def pairs_of(node: Heddle) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages_of(node.path)]


@pytest.mark.parametrize("name", CHATS)
def test_imported_chat_has_the_tokens_of_the_chat_template(name: str) -> None:
    lm = model()
    (only,) = read(FILES[name], lm).looms
    last = only.loom.children[0].children[0]
    assert pairs_of(last) == [("user", "Once"), ("assistant", " upon"), ("user", " a time")]
    own = Loom(lm, "Once")
    own_answer = own.add(" upon")
    own_question = own_answer.add(lm.turn_delta([{"role": "user", "content": " a time"}]))
    assert last.get_prefix_tokens() == own_question.get_prefix_tokens()
    assert (
        last.grow(max_tokens=4, seed=1)[0].tokens
        == own_question.grow(max_tokens=4, seed=1)[0].tokens
    )


def test_without_chat_template_texts_stay_texts_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = weft.load(shallow(), engine="numpy")
    monkeypatch.setattr(lm.text, "chat_template", None)
    report = read(SILLYTAVERN, lm)
    loom = report.looms[0].loom
    assert not loom.chat_template_used
    assert texts_of([loom.children[0], loom.children[0].children[0]]) == [" upon", " a time"]
    assert "this model has no chat template" in " ".join(report.dropped)


def test_chat_that_the_template_rejects_is_imported_as_text_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = weft.load(shallow(), engine="numpy")
    monkeypatch.setattr(
        lm.text, "chat_template", "{{ raise_exception('no system messages here') }}"
    )
    report = read(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], lm
    )
    assert not report.looms[0].loom.chat_template_used
    assert "no system messages here" in " ".join(report.dropped)


def test_system_message_and_first_question_are_the_prompt() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    lm = model()
    (only,) = read(chat, lm).looms
    assert only.loom.tokens == list(lm.format_chat(chat[:2]).ids)
    assert (only.loom.user_prompt, texts_of(only.loom.children)) == ("Hi", ["Hello"])
    assert messages_of(only.at.path) == chat
    assert only.at.terminal


def test_alternative_first_questions_are_below_the_tokens_that_they_share() -> None:
    """An edited first message of ChatGPT."""
    lm = model()

    def mapped(parent: str | None, role: str, text: str) -> dict[str, Any]:
        message = {"author": {"role": role}, "content": {"parts": [text]}}
        return {"parent": parent, "message": message}

    chat = {
        "mapping": {
            "top": {"parent": None, "message": None},
            "a": mapped("top", "user", "Tell me a story"),
            "b": mapped("top", "user", "Tell me a joke"),
            "c": mapped("a", "assistant", "Once"),
            "d": mapped("b", "assistant", "Knock"),
        },
        "current_node": "d",
    }
    (only,) = read(chat, lm).looms
    story, joke = only.loom.children
    for node, text in ((story, "Tell me a story"), (joke, "Tell me a joke")):
        assert node.get_prefix_tokens() == Loom(lm, text).tokens
        assert pairs_of(node) == [("user", text)]
    assert only.at.text == "Knock"
    assert pairs_of(only.at) == [("user", "Tell me a joke"), ("assistant", "Knock")]


def test_current_node_without_text_selects_its_nearest_message() -> None:
    message = {"author": {"role": "user"}, "content": {"parts": ["Hi"]}}
    empty = {"author": {"role": "tool"}, "content": {"content_type": "thoughts"}}
    chat = {
        "mapping": {
            "a": {"parent": None, "message": message},
            "b": {"parent": "a", "message": {**message, "author": {"role": "assistant"}}},
            "c": {"parent": "b", "message": empty},
            "d": {"parent": "c", "message": empty},
        },
        "current_node": "d",
    }
    (only,) = read(chat).looms
    assert only.at is only.loom.children[0]


def test_swipes_of_a_greeting_are_siblings_below_a_start_message() -> None:
    greetings = ["Hello!", "Who is there?"]
    lines = [HEADER, answer("Hello!", swipes=greetings, swipe_id=0), question("It is me.")]
    report = read(lines, model())
    loom = report.looms[0].loom
    assert (loom.user_prompt, texts_of(loom.children)) == (START, greetings)
    assert pairs_of(report.looms[0].at) == [
        ("user", START),
        ("assistant", "Hello!"),
        ("user", "It is me."),
    ]
    assert report.looms[0].title == "Fox"
    assert report.dropped == ()  # all messages are in the loom
    one = read([HEADER, answer("Hello!"), question("It is me.")], model()).looms[0]
    assert (one.loom.user_prompt, texts_of(one.loom.children)) == (START, ["Hello!"])
    assert pairs_of(one.at)[-1] == ("user", "It is me.")


def test_selected_swipe_has_the_edited_text_and_what_follows() -> None:
    lines = [HEADER, question("Hi"), answer("edited", swipes=["a", "b"], swipe_id=1), question("?")]
    (only,) = read(lines).looms
    first, second = only.loom.children
    assert (first.text, first.children) == ("a", [])
    assert (second.text, texts_of(second.children)) == ("edited", ["?"])
    assert only.at.text == "?"


def test_hidden_messages_are_left_out_and_narration_is_a_system_message() -> None:
    hidden = {**answer("(out of character)"), "is_system": True}
    narration = {**answer("Night falls."), "extra": {"type": "narrator"}}
    report = read([HEADER, question("Hi"), hidden, answer("Hello"), narration], model())
    assert pairs_of(report.looms[0].at) == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("system", "Night falls."),
    ]
    assert "1 message that SillyTavern hides from the model was left out" in report.dropped


def test_answers_of_two_characters_are_one_turn() -> None:
    report = read([HEADER, question("Hi"), answer("Hello."), answer("Good day.")], model())
    (first,) = report.looms[0].loom.children
    assert texts_of(first.children) == ["\n\nGood day."]
    assert report.dropped == ("1 answer after an answer continues it, after an empty line",)


def test_system_prompt_of_open_webui_precedes_the_first_question() -> None:
    chat = {**OPEN_WEBUI[0]["chat"], "params": {"system": "Be brief."}}  # type: ignore[dict-item]
    (only,) = read({"chat": chat}, model()).looms
    assert pairs_of(only.loom) == [("system", "Be brief."), ("user", "Once")]
    assert only.title == "Fox"
    assert len(read(OPEN_WEBUI * 2).looms) == 2


def test_greeting_of_textgen_is_an_answer() -> None:
    data = {"internal": [["<|BEGIN-VISIBLE-CHAT|>", "Hello!"], ["Hi", "Yes?"]], "visible": []}
    (only,) = read(data).looms
    assert pairs_of(only.at) == [("assistant", "Hello!"), ("user", "Hi"), ("assistant", "Yes?")]
    assert texts_of(read(TEXTGEN).looms[0].loom.children) == [" upon", " more"]


def test_session_of_mikupad_is_a_path_of_typed_and_generated_texts() -> None:
    report = read(MIKUPAD, model())
    (only,) = report.looms
    texts = [only.loom.user_prompt, *texts_of(list(only.at.path[1:]))]
    assert texts == ["A", "Once", " upon a time", " there"]
    assert not only.loom.chat_template_used
    assert only.loom.note == AuthorNote("[Write short.]", 3)
    assert "sk-not-to-be-kept" not in str([node.meta for node in only.loom.walk()])
    assert report.dropped == ("2 settings of the session were left out",)


def test_older_session_of_mikupad_has_its_values_as_json_in_texts() -> None:
    import json

    older = {name: json.dumps(value) for name, value in MIKUPAD.items()}
    assert read(older).recognised_as == "mikupad"
    assert texts_of(list(read(older).looms[0].at.path)) == ["A", "Once", " upon a time", " there"]


def test_memory_of_mikupad_follows_its_context_order() -> None:
    parts = {"prefix": "[", "text": "A fox.", "suffix": "]\\n"}
    for order, beginning in (
        ("", "[A fox.]\n"),
        ("{wiText}\nFacts: {memText}\n{prompt}", "Facts: A fox.\n"),
        ("{prompt}{memText}", None),
    ):
        session = {**MIKUPAD, "memoryTokens": {**parts, "contextOrder": order}}
        loom = read(session).looms[0].loom
        assert loom.user_prompt == ("Once" if beginning is None else beginning)
    note = {**MIKUPAD, "authorNoteTokens": {"prefix": "\\n[", "text": "Short.", "suffix": "]"}}
    assert read(note).looms[0].loom.note == AuthorNote("\n[Short.]", 3)


def test_world_info_of_mikupad_is_reported() -> None:
    world_info = {"entries": [{"keys": ["fox"], "text": "Red."}], "prefix": "", "suffix": ""}
    report = read({**MIKUPAD, "worldInfo": world_info})
    assert "1 entry of world info is not read by the model" in report.dropped


def test_untitled_chat_that_begins_with_an_answer_has_the_first_message_as_title() -> None:
    history = {"internal": [["<|BEGIN-VISIBLE-CHAT|>", "Hello!"], ["Who are you?", "A fox."]]}
    (only,) = read(history, model()).looms
    assert (only.loom.user_prompt, only.title) == (START, "Who are you?")
    (only,) = read({"internal": history["internal"][:1]}, model()).looms
    assert only.title == ""
