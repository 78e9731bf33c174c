"""An assistant's turn as it comes: what it thinks, what it says, what it wants called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...chat import ChatPrompt
    from ...tokens.chat import ToolCall
    from .runs import ChoiceRun


class Delivered(NamedTuple):
    """A turn, or what is new in one."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ChatTurn:
    """One choice of a chat, taken apart. Calls are looked for only where tools were offered."""

    def __init__(self, prompt: ChatPrompt, reply: ChoiceRun, *, reads_calls: bool) -> None:
        self._prompt = prompt
        self._reply = reply
        self._reads_calls = reads_calls
        self._told = Delivered("", "", ())
        self._is_plain = False  # nothing but content comes from here on

    @property
    def reply(self) -> ChoiceRun:
        """The choice."""
        return self._reply

    @property
    def n_calls(self) -> int:
        """How many calls `new` has told of."""
        return len(self._told.calls)

    def finish_reason(self, n_calls: int) -> str | None:
        """Return why a turn with so many calls ended; "length" for one that was cut."""
        reason = self._reply.finish_reason
        return "tool_calls" if n_calls and reason == "stop" else reason

    def all(self) -> Delivered:
        """Return what has been said so far."""
        reply = self._reply
        text, is_partial = reply.text[: reply.certain], not reply.is_over
        made = self._prompt.parse(text, is_partial=is_partial, reads_calls=self._reads_calls)
        return Delivered(made.content, made.reasoning, made.tool_calls)

    def new(self) -> Delivered:
        """Return what is new since the last call."""
        if self._is_plain:
            return Delivered(self._reply.piece(), "", ())
        told, now = self._told, self.all()
        if not now.content.startswith(told.content):
            # A mark turned out to be text, or text a mark: what was told stays told.
            now = now._replace(content=told.content)
        self._told = now
        self._reply.told = self._reply.certain
        # Without tools and reasoning the text is the content: it is not read again.
        is_text = now.content == self._reply.text[: self._reply.certain]
        self._is_plain = is_text and bool(now.content.strip()) and not self._reads_calls
        return Delivered(
            now.content[len(told.content) :],
            now.reasoning[len(told.reasoning) :],
            now.calls[len(told.calls) :],
        )
