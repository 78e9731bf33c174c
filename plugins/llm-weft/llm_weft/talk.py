"""Conversations as paths of one token tree: earlier messages are not recomputed."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llm
from llm.parts import TextPart

from .choices import Choice

if TYPE_CHECKING:
    from weft import LM, Heddle

Message = dict[str, str]
_TALKS = 16  # conversations whose place in the tree is remembered
_KEPT = 8  # conversations whose KV is kept in files
_MESSAGES_KEY = "llm_said"  # in a node's meta: the messages up to its end


@dataclass(slots=True)
class Tip:
    """The end of a conversation. messages: all of its messages up to there."""

    messages: list[Message]
    node: Heddle


@dataclass(slots=True)
class Turn:
    """A place to answer at. n_cached: tokens of its path that had their KV; None where unknown."""

    messages: list[Message]
    node: Heddle
    key: str | None
    n_prompt: int
    n_cached: int | None


class Speaker:
    """A model that is loaded at its first use, and the ends of its conversations."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._lm: LM | None = None
        self._lock = threading.Lock()
        self._tips: OrderedDict[str, Tip] = OrderedDict()

    @property
    def lm(self) -> LM:
        """The model."""
        with self._lock:
            if self._lm is None:
                import weft

                choice = self._choice
                self._lm = weft.load(choice.model, engine=choice.engine, kv_budget=choice.kv_budget)
            return self._lm

    def turn(self, prompt: llm.Prompt, conversation: Any, *, raw: bool) -> Turn:
        """Return where to answer. A conversation goes on where it ended, if that is known here.

        raw: texts as they are; without it, the model's chat template, if it has one.
        """
        messages, key = _messages(prompt), None if conversation is None else str(conversation.id)
        is_chat = not raw and self.lm.text.chat_template is not None
        tip = None if key is None else self._tips.get(key) or self._kept(key)
        node = self._after(tip, messages, is_chat=is_chat)
        return Turn(messages, node, key, node.place.depth, self._n_cached(node))

    def _n_cached(self, node: Heddle) -> int | None:
        try:
            return self.lm.kv.size(node)
        except NotImplementedError:  # an engine that keeps its KV to itself
            return None

    def _after(self, tip: Tip | None, messages: list[Message], *, is_chat: bool) -> Heddle:
        from weft import Loom

        known = [] if tip is None else tip.messages
        new = messages[len(known) :]
        continues = tip is not None and messages[: len(known)] == known and bool(new)
        if not is_chat:
            if any(message["role"] == "system" for message in messages):
                raise llm.ModelError(
                    "a system prompt needs a chat template: this model has none, or raw is on"
                )
            if continues and tip is not None:
                return tip.node.add("".join(message["content"] for message in new))
            text = "".join(message["content"] for message in messages)
            return Loom(self.lm, text, template=False)
        if continues and tip is not None:
            return tip.node.add(self.lm.turn_delta(new, history=known))
        return Loom(self.lm, messages)

    def answered(self, turn: Turn, answer: Heddle, *, keep_kv: bool) -> None:
        """Remember where a conversation stands now; keep_kv: for other processes, too."""
        if turn.key is None:
            return
        history = [*turn.messages, {"role": "assistant", "content": answer.text}]
        self._tips[turn.key] = Tip(history, answer)
        self._tips.move_to_end(turn.key)
        while len(self._tips) > _TALKS:
            self._tips.popitem(last=False)
        if keep_kv:
            from weft.service import interchange

            answer.meta[_MESSAGES_KEY] = history
            file = self._file(turn.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            interchange.write(answer, file, scope="path", kv=True)
            _forget_oldest(file.parent)

    def _kept(self, key: str) -> Tip | None:
        """Return where an earlier process left a conversation, if it was kept."""
        from weft import Loom, WeftError

        file = self._file(key)
        if not file.exists():
            return None
        try:
            node = Loom.open(file, self.lm).leaves[0]
        except WeftError:  # of another model, or broken: it is computed again
            return None
        history = node.meta.get(_MESSAGES_KEY)
        return Tip(history, node) if isinstance(history, list) else None

    def _file(self, key: str) -> Path:
        name = re.sub(r"[^\w-]", "_", f"{self._choice.name}-{key}")
        return Path(llm.user_dir()) / "weft-kv" / f"{name}.loom.json"


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.loom.json"), key=lambda file: -file.stat().st_mtime)
    for file in files[_KEPT:]:
        file.unlink(missing_ok=True)
        file.with_name(file.name.replace(".loom.json", ".kv.safetensors")).unlink(missing_ok=True)


def _messages(prompt: llm.Prompt) -> list[Message]:
    """Return all texts as chat messages. Raises: ModelError for a part that is no text."""
    chat: list[Message] = []
    for message in prompt.messages:
        parts: Sequence[Any] = message.parts
        for part in parts:
            if not isinstance(part, TextPart):
                kind = type(part).__name__.removesuffix("Part").lower()
                raise llm.ModelError(f"the model reads text only, and a message holds a {kind}")
        text = "".join(part.text for part in parts)
        if text or message.role != "system":
            chat.append({"role": message.role, "content": text})
    if not any(message["content"] for message in chat):
        raise llm.ModelError("the prompt is empty; give it some text")
    return chat
