"""Splits an assistant's turn into reasoning, content and tool calls while it is generated."""

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
    """An assistant's turn, or the new part of one: content, reasoning and tool calls."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class TurnStep(NamedTuple):
    """New tokens of a turn, and the text that they add.

    scored: their logprobs, in steps of one token; empty if they are not requested.
    is_content: False for tokens of reasoning, of calls and of the markers around them.
    """

    delta: ChatDelta
    tokens: Sequence[int]
    scored: Sequence[ScoredToken] = ()
    is_content: bool = False


class _Waiting(NamedTuple):
    """A token that is not sent yet, with the text that it adds to the choice."""

    text: str
    token: int
    scored: ScoredToken


class ChatTurn:
    """One choice of a chat, split into reasoning, content and tool calls.

    Args:
    prompt: the chat's prompt, whose template decides the format of calls and reasoning.
    reply: the choice.
    reads_calls: parse tool calls; only if the request has tools.
    has_format: a turn without calls matches a constraint, and its text may look like a call.
    """

    def __init__(
        self, prompt: ChatPrompt, reply: ChoiceRun, *, reads_calls: bool, has_format: bool = False
    ) -> None:
        self._prompt = prompt
        self._reply = reply
        self._reads_calls = reads_calls
        self._has_format = has_format
        self._sent = ChatDelta("", "", ())
        self._is_plain = False  # only content follows
        self._waiting: list[_Waiting] = []

    @property
    def reply(self) -> ChoiceRun:
        """The choice."""
        return self._reply

    @property
    def n_calls(self) -> int:
        """The number of tool calls that `new` and `steps` have returned so far."""
        return len(self._sent.calls)

    def finish_reason(self, n_calls: int) -> str | None:
        """Return OpenAI's finish reason for a turn with `n_calls` tool calls.

        It is "tool_calls" for a turn that ended with calls, and None while the choice is running.
        """
        reason = self._reply.finish_reason
        return "tool_calls" if n_calls and reason == "stop" else reason

    def all(self) -> ChatDelta:
        """Return the entire turn so far."""
        return self._parsed(self._reply.certain, is_partial=not self._reply.is_over)

    def _parsed(self, length: int, *, is_partial: bool) -> ChatDelta:
        """Split the first `length` characters of the text. is_partial: more text may follow."""
        text = self._reply.text[:length]
        reads_calls = self._reads_calls and (not self._has_format or self._may_be_calls(text))
        parsed = self._prompt.parse(text, is_partial=is_partial, reads_calls=reads_calls)
        if self._has_format and not {call.name for call in parsed.tool_calls} <= self._tool_names:
            parsed = self._prompt.parse(text, is_partial=is_partial, reads_calls=False)
        return ChatDelta(parsed.content, parsed.reasoning, parsed.tool_calls)

    def _may_be_calls(self, text: str) -> bool:
        """Return True if the text may contain tool calls."""
        calls = self._prompt.form.calls
        marker = calls.marker if calls is not None else ""
        return text.startswith(marker) or marker.startswith(text)

    @cached_property
    def _tool_names(self) -> set[str]:
        """Names of the offered tools."""
        return {tool["function"]["name"] for tool in self._prompt.tools}

    def new(self) -> ChatDelta:
        """Return the part of the turn that has become final since the last call."""
        return self._advance(self._reply.certain, is_partial=not self._reply.is_over)

    def _advance(self, length: int, *, is_partial: bool) -> ChatDelta:
        """Parse the first `length` characters of the text; return what they add to the turn.

        is_partial: the choice is still running, so that more text may follow.
        """
        reply = self._reply
        start, reply.n_sent_chars = reply.n_sent_chars, length
        if self._is_plain:
            return ChatDelta(reply.text[start:length], "", ())
        sent, parsed = self._sent, self._parsed(length, is_partial=is_partial)
        if not parsed.content.startswith(sent.content):
            # A marker turned out to be text, or vice versa: sent content cannot be revoked.
            parsed = parsed._replace(content=sent.content)
        self._sent = parsed
        # Without tools and reasoning the text is the content and needs no more parsing.
        is_text = parsed.content == reply.text[:length]
        self._is_plain = is_text and bool(parsed.content.strip()) and not self._reads_calls
        return ChatDelta(
            parsed.content[len(sent.content) :],
            parsed.reasoning[len(sent.reasoning) :],
            parsed.calls[len(sent.calls) :],
        )

    def steps(
        self, first: int, tokens: Sequence[int], scored: Sequence[ScoredToken]
    ) -> Iterator[TurnStep]:
        """Yield what new tokens add: token by token if they have logprobs, else all at once.

        A token whose text may still become part of a marker is returned by a later call.

        Args:
            first: index of the first of these tokens in the choice.
            tokens: the new tokens.
            scored: their logprobs; empty if these are not requested.
        """
        if not scored and not self._waiting:
            yield TurnStep(self.new(), tokens)
            return
        reply = self._reply
        texts = reply.token_texts(first, len(tokens))
        for number, fields in enumerate(zip(texts, tokens, scored, strict=True), start=first):
            self._waiting.append(_Waiting(*fields))
            if number + 1 < len(reply.tokens) or not reply.is_over:
                length = min(reply.ends[number], len(reply.text))
                yield from self._released(self._advance(length, is_partial=True))
        if reply.is_over:
            yield from self._released(self.new(), is_end=True)

    def _released(self, delta: ChatDelta, *, is_end: bool = False) -> Iterator[TurnStep]:
        """Yield steps for waiting tokens whose part of the turn is now known.

        delta: the new part of the turn. is_end: the choice has ended, so that no token may wait.
        """
        texts = [waiting.text for waiting in self._waiting]
        shares = _shares(texts, delta.content or delta.reasoning)
        if delta.content and delta.reasoning and shares:
            shares = [*[None] * (len(shares) - 1), delta.content]
        n = len(shares)
        if not (is_end or delta.calls):
            n = max((i + 1 for i, share in enumerate(shares) if share is not None), default=0)
        released, self._waiting = self._waiting[:n], self._waiting[n:]
        for i, (waiting, share) in enumerate(zip(released, shares[:n], strict=True)):
            is_content = bool(delta.content) and share is not None
            content, reasoning = (share or "", "") if delta.content else ("", share or "")
            part = ChatDelta(content, reasoning, ())
            if i == n - 1:
                part = part._replace(calls=delta.calls)
                if delta.content:
                    part = part._replace(reasoning=delta.reasoning)
            yield TurnStep(part, [waiting.token], [waiting.scored], is_content)
        if delta and not released:
            yield TurnStep(delta, [])


def _shares(texts: Sequence[str], delivered: str) -> list[str | None]:
    """Return, for each text, the part of it that is in `delivered`; None if it has none.

    If `delivered` is not within the joined texts, the last text gets all of it.
    """
    if not delivered or not texts:
        return [None] * len(texts)
    joined = "".join(texts)
    start = 0 if joined.startswith(delivered) else joined.rfind(delivered)
    if start < 0:
        return [*[None] * (len(texts) - 1), delivered]
    shares: list[str | None] = []
    end, at = start + len(delivered), 0
    for text in texts:
        begin, at = at, at + len(text)
        is_part = begin < end and (at > start or begin >= start)
        shares.append(delivered[max(begin - start, 0) : max(at - start, 0)] if is_part else None)
    return shares
