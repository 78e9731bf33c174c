"""The runs of a call: all choices of all prompts in one batch, and their texts so far."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ...._core.sampling.params import SamplingParams
from ...._core.sampling.rng import fresh_seed
from ....loom.grow import Growth, delta
from ....loom.stop_strings import StopStrings

if TYPE_CHECKING:
    from ....lm.lm import LM
    from ....loom import Heddle
    from ....loom.pending_branch import PendingBranch
    from ....loom.stop_strings import Event
    from ..ticker import Ticker
    from .persistence import SavedCompletion

_SEEDS = 1 << 64

Json = dict[str, Any]
EndReason = Literal["stop", "length"]


class ChoiceRun:
    """One choice of a call: its generated tokens, and the text that is already final.

    Incomplete characters, and text that may become a stop string, are withheld from the text. The
    stop string and the text after it are not part of it. `tokens` has all generated tokens.

    Args:
    prompt: index of the choice's prompt in the call.
    index: index of the choice in the call.
    mute: ids of tokens that are left out of the text.
    keeps_stop: the text includes the stop string or stop token that ended it.
    """

    def __init__(
        self,
        lm: LM,
        pending: PendingBranch,
        *,
        prompt: int,
        index: int,
        mute: frozenset[int],
        keeps_stop: bool = False,
    ) -> None:
        self.prompt = prompt
        self.index = index
        self.node: Heddle = pending.child
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.ends: list[int] = []  # where each token's text ends, in characters
        self.is_over = False
        self.is_cut = False  # at a stop string: final before the run's end event
        self.n_sent_chars = 0  # returned by `piece`
        self.n_sent = 0  # tokens returned by `new_tokens`
        self._branch = pending
        self._stream = lm.text.stream()
        self._mute = mute
        assert self.node.params is not None
        self._stops = self.node.params.stop
        self._keeps_stop = keeps_stop
        constraint = self.node.params.constraint
        self._stop_ids = frozenset[int]() if constraint is None else constraint.stop_ids
        self._min_tokens = 0 if constraint is None else constraint.min_tokens
        self._first_stop = 0  # start of the text in which stop strings count
        # The same logic as the run's own.
        self._watch = StopStrings(self._stops, constraint)
        self._token_bytes = lm.text.token_bytes

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the path before the choice."""
        return self._branch.origin.depth

    @property
    def reused(self) -> int:
        """Number of prompt tokens whose KV was cached; 0 if the engine does not report it."""
        ticket = self._branch.ticket
        return (ticket.reused or 0) if ticket is not None else 0

    @property
    def ended_by(self) -> int | None:
        """The end token that ended the choice, which is not one of `tokens`; None without one."""
        ticket = self._branch.ticket
        if ticket is None or ticket.value is None:
            return None
        ended_by: int | None = ticket.value.ended_by
        return ended_by

    @property
    def finish_reason(self) -> EndReason | None:
        """OpenAI's finish reason; None while the choice is running."""
        if not self.is_over:
            return None
        return "stop" if self.is_cut or self.node.finish_reason == "stop" else "length"

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append new tokens, and their text. The text is cut at a stop string."""
        for token in tokens:
            token_bytes = self._token_bytes(token)
            if token not in self._mute:
                piece, own = self._stream.push(token), token_bytes.decode(errors="replace")
                if self.ends and piece[:1] == "\ufffd" and piece.endswith(own):
                    # This token does not complete the character that an earlier one began.
                    self.ends[-1] += len(piece) - len(own)
                self.text += piece
            self.ends.append(len(self.text))
            if len(self.ends) == self._min_tokens:
                self._first_stop = len(self.text)
            stop = self._watch.push(token_bytes)
            if stop is not None:
                self._cut_at(stop)
        self.tokens += tokens
        self.logprobs += logprobs

    def _cut_at(self, stop: str) -> None:
        """Cut the text at a stop string."""
        at = self.text.find(stop, max(0, self._first_stop - len(stop) + 1))
        if at >= 0:  # else the stop is in muted tokens
            end = at + len(stop) if self._keeps_stop else at
            self.text, self.is_cut = self.text[:end], True

    def end(self) -> None:
        """Mark the choice as ended, and add the text that was withheld."""
        self.is_over = True
        if self.is_cut:
            return
        self.text += self._stream.flush()
        if self.ends:
            self.ends[-1] = len(self.text)
        ended_by = self.ended_by
        if self._keeps_stop and ended_by is not None and ended_by in self._stop_ids - self._mute:
            self.text += self._token_bytes(ended_by).decode(errors="replace")

    @property
    def certain(self) -> int:
        """Number of characters of the text that are final. They end where a token's text ends."""
        if self.is_over or self.is_cut:
            return len(self.text)
        stops = () if self._keeps_stop else self._stops
        n_withheld = max((_partial_stop_length(self.text, stop) for stop in stops), default=0)
        n = bisect_right(self.ends, len(self.text) - n_withheld)
        return self.ends[n - 1] if n else 0

    def piece(self) -> str:
        """Return the text that has become final since the last call, and mark it as sent."""
        certain = self.certain
        text, self.n_sent_chars = self.text[self.n_sent_chars : certain], certain
        return text

    def token_texts(self, first: int, n: int) -> list[str]:
        """Return the text that each of `n` tokens adds, starting with the token at index `first`.

        It is "" for a token that does not complete a character.
        """
        bounds = [0, *self.ends]
        return [self.text[bounds[i] : bounds[i + 1]] for i in range(first, first + n)]

    def new_tokens(self) -> tuple[int, list[int]]:
        """Return the tokens whose text has become final since the last call, and mark them as sent.

        Returns: (number of tokens sent before, new tokens).
        """
        first, self.n_sent = self.n_sent, self.n_covered(self.certain)
        return first, self.tokens[first : self.n_sent]

    def n_covered(self, length: int) -> int:
        """Return the number of tokens whose text is within the first `length` characters.

        Tokens that do not complete a character belong to the text that follows.
        """
        if self.is_cut and length >= len(self.text):
            return bisect_left([0, *self.ends[:-1]], length)
        if self.is_over and length >= len(self.text):
            return len(self.tokens)
        if not length:
            return 0
        return min(bisect_left(self.ends, length) + 1, bisect_right(self.ends, length))


def _partial_stop_length(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`.

    0 without one. The complete stop string does not count.
    """
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


class Runs:
    """`n` choices after each of several nodes, run in one batch.

    Choice i of a prompt is sampled with the seed `seed + i`, like `node.grow(seed=seed + i)`, up to
    rounding (docs/models.md).

    Args:
    nodes: the ends of the prompts.
    n: number of choices for each prompt; with 0 nothing is generated.
    ticker: decides when `updates` yields.
    is_streamed: tokens are read while the choices run.
    skips_special: leave special tokens out of the texts.
    keeps_stop: texts include the stop string or stop token that ended them.
    saved: where the choices are saved; None does not save them.
    """

    def __init__(
        self,
        lm: LM,
        nodes: Sequence[Heddle],
        params: SamplingParams,
        n: int,
        *,
        ticker: Ticker,
        is_streamed: bool = False,
        skips_special: bool = False,
        keeps_stop: bool = False,
        saved: SavedCompletion | None = None,
    ) -> None:
        mute = lm.text.special_ids if skips_special else frozenset()
        self.lm = lm
        self.saved = saved
        self._pulse = ticker
        self._began = time.perf_counter()
        self.first_token_s: float | None = None  # seconds to the first token
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.params = replace(params, n=n, seed=self.seed) if n else params
        self._growth = Growth(lm, streamed=is_streamed or saved is not None)
        self.replies: list[ChoiceRun] = []
        for prompt, node in enumerate(nodes):
            for i in range(n):
                own = replace(params, n=1, seed=(self.seed + i) % _SEEDS)
                (pending,) = self._growth.add(node, own)
                index = len(self.replies)
                reply = ChoiceRun(
                    lm, pending, prompt=prompt, index=index, mute=mute, keeps_stop=keeps_stop
                )
                self.replies.append(reply)

    async def finish(self) -> None:
        """Generate all choices to their end. Cancelling the caller cancels them.

        Raises: the first error of a choice.
        """
        if self.saved is not None:
            async with aclosing(self.updates()) as updates:
                async for _ in updates:
                    pass
            return
        result = await self._growth.arun()
        if result.failed:
            raise result.failed[0]
        for reply in self.replies:
            reply.grow(reply.node.tokens, reply.node.logprobs)
            reply.end()

    async def updates(self) -> AsyncGenerator[list[ChoiceRun], None]:
        """Yield the choices that have new tokens or have ended, at most 20 times per second.

        Closing the generator cancels the choices.
        Raises: the first error of any choice, after the others have ended.
        """
        lock = nullcontext() if self.saved is None else self.saved.live.lock
        try:
            async with aclosing(self._growth.aupdates()) as steps:
                async for step in steps:
                    if step and self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - self._began
                    async with lock:
                        changed = [self._apply(pending, events) for pending, events in step]
                    if changed:
                        yield changed
                    # Events that arrive meanwhile are queued and read together.
                    await self._pulse.wait(self._growth.when_done())
        finally:
            if self.saved is not None:
                await self.saved.end()
        failed = self._growth.children.failed
        if failed:
            raise failed[0]
        rest = [reply for reply in self.replies if not reply.is_over]
        for reply in rest:  # their parents were removed
            reply.end()
        if rest:
            yield rest

    def _apply(self, pending: PendingBranch, events: list[Event]) -> ChoiceRun:
        """Add new tokens of a branch to its choice; return the choice."""
        reply, new = self.replies[pending.index], delta(pending, events)
        reply.grow(new.token_ids, new.logprobs)
        if new.finish_reason is not None and new.finish_reason != "error":
            reply.end()
        return reply

    def to_dict(self) -> Json:
        """Return the answer's `loom` field: the sampling parameters, and the nodes if saved."""
        data: Json = {"sampling": self.params.to_dict()}
        if self.saved is not None:
            data.update(self.saved.to_dict([reply.node for reply in self.replies]))
        return data

    def release(self) -> None:
        """If the choices are saved in a loom, cancel those that still run and start their commit.

        Closing `updates` cancels choices that are not saved, so nothing is done for them here.
        """
        if self.saved is not None:
            self.saved.release()

    async def begin_saving(self) -> None:
        """Store an empty node per choice before it runs, if the choices are saved in a loom.

        The caller holds the loom's lock.
        """
        if self.saved is not None:
            await self.saved.begin(self._growth)
