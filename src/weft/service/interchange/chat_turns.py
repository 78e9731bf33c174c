"""Imported chats as turns of the model's chat template, so that the model can answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .import_tree import Knot, Note, Sketch
from .turns import MESSAGE_FIELDS

if TYPE_CHECKING:
    from ...lm.lm import LM

Message = dict[str, Any]

START = "[Start a new chat]"  # the prompt of a chat that begins with an answer
_TYPED = ("user", "system", "developer")  # roles of messages that the model does not write
_JOINED = Note(
    "answer after an answer continues it, after an empty line",
    "answers after an answer continue it, after an empty line",
)


def apply_template(sketch: Sketch, lm: LM) -> None:
    """Give the messages of a chat the tokens of the model's chat template.

    A tree without roles stays as it is. A chat that the template rejects does, too, and a note of
    the sketch gives the reason.
    """
    if not any(knot.role in _TYPED for knot in sketch.knots):
        return
    if lm.text.chat_template is None:
        sketch.notes[_plain_text_note("this model has no chat template")] += 1
        return
    copy = Sketch(sketch.title, [replace(knot) for knot in sketch.knots], sketch.at)
    try:
        _build_prompt(copy, lm)
        for knot in copy.knots[1:]:
            _tokenize_message(copy, knot, lm)
    except ConfigError as error:
        sketch.notes[_plain_text_note(error)] += 1
        return
    sketch.knots, sketch.at, sketch.messages = copy.knots, copy.at, copy.messages
    sketch.title, sketch.user_prompt = copy.title, copy.user_prompt
    sketch.notes += copy.notes


def _plain_text_note(reason: object) -> Note:
    """Return the note that chats were imported as plain text. reason: why, for the message."""
    text = f"plain text, without roles for the model: {reason}"
    return Note(f"chat is {text}", f"chats are {text}")


def _build_prompt(sketch: Sketch, lm: LM) -> None:
    """Give the root the tokens of the chat's prompt: the messages up to the user's first one.

    If the user's first message has alternatives, the root has the tokens that they share.
    """
    root = sketch.knots[0]
    system = [_message(root)] if root.role in _TYPED[1:] else []
    first = [knot for knot in sketch.knots if knot.parent == 0]
    if root.text and not system:
        first = [root]
    by_user = {knot.role == "user" for knot in first}
    if len(by_user) != 1:
        raise ConfigError("it begins with messages of a user and with answers")
    if not by_user.pop():
        _prepend_start(sketch, system, lm)
    elif len(first) == 1:
        _merge_into_root(sketch, first[0])
        _set_prompt(sketch, [*system, _message(first[0])], lm)
    else:
        prompts = [_render([*system, _message(knot)], lm) for knot in first]
        shared = _n_shared(prompts)
        if not shared:
            raise ConfigError("its first messages have no common beginning")
        for knot, ids in zip(first, prompts, strict=True):
            knot.ids, knot.typed = list(ids[shared:]), knot.text
        root.ids, root.role, root.text = list(prompts[0][:shared]), None, ""
        sketch.messages, sketch.user_prompt = system, ""


def _prepend_start(sketch: Sketch, system: list[Message], lm: LM) -> None:
    """Put a user message before a chat that begins with an answer, as templates require it."""
    if sketch.knots[0].text and not system:
        for knot in sketch.knots:
            knot.parent += 1
        sketch.knots.insert(0, Knot(""))
        sketch.at += 1
    if not sketch.title:  # the prompt is no title
        texts = [knot.text for knot in sketch.knots if knot.role == "user" and knot.text]
        sketch.title = next(iter(texts), sketch.knots[1].text)
    _set_prompt(sketch, [*system, {"role": "user", "content": START}], lm)


def _merge_into_root(sketch: Sketch, first: Knot) -> None:
    """Remove the user's first message from below the root, which then contains it."""
    root, index = sketch.knots[0], sketch.knots.index(first)
    if index == 0:
        return
    root.imported = {**root.imported, **first.imported}
    root.bookmark, root.score = first.bookmark or root.bookmark, first.score
    del sketch.knots[index]
    for knot in sketch.knots:
        knot.parent = 0 if knot.parent == index else knot.parent - (knot.parent > index)
    sketch.at = 0 if sketch.at == index else sketch.at - (sketch.at > index)


def _set_prompt(sketch: Sketch, messages: list[Message], lm: LM) -> None:
    """Give the root the tokens of these messages, the last of which is the user's."""
    root = sketch.knots[0]
    root.ids, root.role = _render(messages, lm), None
    sketch.messages, sketch.user_prompt = messages, str(messages[-1]["content"])


def _tokenize_message(sketch: Sketch, knot: Knot, lm: LM) -> None:
    """Give a message below the root its tokens."""
    if knot.ids is not None:  # an alternative of the user's first message
        return
    parent = sketch.knots[knot.parent]
    is_answered = knot.parent != 0 and parent.typed is None
    if knot.role in _TYPED:
        message = {"role": knot.role, "content": knot.text}
        knot.ids, knot.typed = lm.turn_delta([message]), knot.text
        return
    knot.terminal = knot.role == "assistant"
    if is_answered and knot.text:
        knot.text = f"\n\n{knot.text}"
        sketch.notes[_JOINED] += 1


def _message(knot: Knot) -> Message:
    more = {name: knot.imported[name] for name in MESSAGE_FIELDS if name in knot.imported}
    return {"role": knot.role, "content": knot.text, **more}


def _render(messages: list[Message], lm: LM) -> list[int]:
    texts = [{"role": each["role"], "content": each["content"]} for each in messages]
    return list(lm.format_chat(texts).ids)


def _n_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens at the start that all prompts share, but none of them fully."""
    n = 0
    while all(len(ids) > n + 1 for ids in prompts) and len({ids[n] for ids in prompts}) == 1:
        n += 1
    return n
