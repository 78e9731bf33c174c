"""An assistant's turn as it comes: what it thinks, what it says, what it wants called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...._core.tokens.chat import ToolCall
    from ....lm.chat import ChatPrompt
    from .logprobs import ScoredToken
    from .runs import ChoiceRun


class ChatDelta(NamedTuple):
    """A turn, or what is new in one."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class TurnStep(NamedTuple):
    """New tokens of a turn and the text they deliver; one token where logprobs are wanted.

    is_content: False for tokens of reasoning, of calls and of the marks around them.
    """

    said: ChatDelta
    tokens: Sequence[int]
    figures: Sequence[ScoredToken] = ()
    is_content: bool = False


class _Waiting(NamedTuple):
    """A token that is not delivered yet, and its share of the choice's text."""

    text: str
    token: int
    figures: ScoredToken


class ChatTurn:
    """One choice of a chat, taken apart. Calls are looked for only where tools were offered."""

    def __init__(
        self, prompt: ChatPrompt, reply: ChoiceRun, *, reads_calls: bool, has_format: bool = False
    ) -> None:
        """has_format: a turn without calls fits a constraint, and may look like calls."""
        self._prompt = prompt
        self._reply = reply
        self._reads_calls = reads_calls
        self._has_format = has_format
        self._told = ChatDelta("", "", ())
        self._is_plain = False  # nothing but content comes from here on
        self._waiting: list[_Waiting] = []

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

    def all(self) -> ChatDelta:
        """Return what has been said so far."""
        return self._parsed(self._reply.certain, is_partial=not self._reply.is_over)

    def _parsed(self, length: int, *, is_partial: bool) -> ChatDelta:
        text = self._reply.text[:length]
        reads_calls = self._reads_calls and (not self._has_format or self._begins_calls(text))
        made = self._prompt.parse(text, is_partial=is_partial, reads_calls=reads_calls)
        if self._has_format and not {call.name for call in made.tool_calls} <= self._names:
            made = self._prompt.parse(text, is_partial=is_partial, reads_calls=False)
        return ChatDelta(made.content, made.reasoning, made.tool_calls)

    def _begins_calls(self, text: str) -> bool:
        calls = self._prompt.form.calls
        marker = calls.marker if calls is not None else ""
        return text.startswith(marker) or marker.startswith(text)

    @cached_property
    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self._prompt.tools}

    def new(self) -> ChatDelta:
        """Return what is new since the last call."""
        return self._advance(self._reply.certain, is_partial=not self._reply.is_over)

    def _advance(self, length: int, *, is_partial: bool) -> ChatDelta:
        """Return what the choice's text delivers up to `length` that was not delivered before."""
        reply = self._reply
        start, reply.told = reply.told, length
        if self._is_plain:
            return ChatDelta(reply.text[start:length], "", ())
        told, now = self._told, self._parsed(length, is_partial=is_partial)
        if not now.content.startswith(told.content):
            # A mark turned out to be text, or text a mark: what was told stays told.
            now = now._replace(content=told.content)
        self._told = now
        # Without tools and reasoning the text is the content: it is not read again.
        is_text = now.content == reply.text[:length]
        self._is_plain = is_text and bool(now.content.strip()) and not self._reads_calls
        return ChatDelta(
            now.content[len(told.content) :],
            now.reasoning[len(told.reasoning) :],
            now.calls[len(told.calls) :],
        )

    def steps(
        self, first: int, tokens: Sequence[int], figures: Sequence[ScoredToken]
    ) -> Iterator[TurnStep]:
        """Yield what new tokens deliver: token by token if they have figures, else all at once.

        A token whose text may still become a mark waits for a later call.

        Args:
            first: index of the first token in the choice.
            figures: one per token; empty if logprobs are not wanted.
        """
        if not figures and not self._waiting:
            yield TurnStep(self.new(), tokens)
            return
        reply = self._reply
        texts = reply.token_texts(first, len(tokens))
        for number, each in enumerate(zip(texts, tokens, figures, strict=True), start=first):
            self._waiting.append(_Waiting(*each))
            if number + 1 < len(reply.tokens) or not reply.is_over:
                length = min(reply.ends[number], len(reply.text))
                yield from self._released(self._advance(length, is_partial=True))
        if reply.is_over:
            yield from self._released(self.new(), is_end=True)

    def _released(self, said: ChatDelta, *, is_end: bool = False) -> Iterator[TurnStep]:
        """Yield the tokens whose text is now known to be content, reasoning or neither."""
        texts = [each.text for each in self._waiting]
        shares = _shares(texts, said.content or said.reasoning)
        if said.content and said.reasoning and shares:
            shares = [*[None] * (len(shares) - 1), said.content]
        n = len(shares)
        if not (is_end or said.calls):
            n = max((i + 1 for i, share in enumerate(shares) if share is not None), default=0)
        released, self._waiting = self._waiting[:n], self._waiting[n:]
        for i, (each, share) in enumerate(zip(released, shares[:n], strict=True)):
            is_content = bool(said.content) and share is not None
            content, reasoning = (share or "", "") if said.content else ("", share or "")
            part = ChatDelta(content, reasoning, ())
            if i == n - 1:
                part = part._replace(calls=said.calls)
                if said.content:
                    part = part._replace(reasoning=said.reasoning)
            yield TurnStep(part, [each.token], [each.figures], is_content)
        if said and not released:
            yield TurnStep(said, [])


def _shares(texts: Sequence[str], said: str) -> list[str | None]:
    """Return the part of `said` that each text has; None for a text outside of it.

    The last text has all of it where `said` is not a part of the joined texts.
    """
    if not said or not texts:
        return [None] * len(texts)
    joined = "".join(texts)
    start = 0 if joined.startswith(said) else joined.rfind(said)
    if start < 0:
        return [*[None] * (len(texts) - 1), said]
    shares: list[str | None] = []
    end, at = start + len(said), 0
    for text in texts:
        begin, at = at, at + len(text)
        is_part = begin < end and (at > start or begin >= start)
        shares.append(said[max(begin - start, 0) : max(at - start, 0)] if is_part else None)
    return shares
