"""The runs of a call: all choices of all prompts in one batch, and what each has said so far."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ...._core.sampling.params import SamplingParams
from ...._core.sampling.rng import fresh_seed
from ....loom.grow import Growth, StopStrings, delta

if TYPE_CHECKING:
    from ....lm.lm import LM
    from ....loom import Heddle
    from ....loom.grow import Event, PendingBranch
    from ..ticker import Ticker
    from .persistence import SavedCompletion

_SEEDS = 1 << 64

Json = dict[str, Any]
EndReason = Literal["stop", "length"]


class ChoiceRun:
    """One choice: its tokens, and its text as far as it is certain.

    A character that is not whole, and what may become a stop string, is held back; the stop string
    and what follows it are never text. Tokens are all that were drawn.

    prompt, index: of which prompt, and its number in the call. told: how much of `text` has been
    said by `piece`. n_told: how many of `tokens` have been given by `new_tokens`.
    is_cut: the text ends at a stop string, so it is final before the run's end event.
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
        """mute: tokens that are no text. keeps_stop: the text includes the stop that ended it."""
        self.prompt = prompt
        self.index = index
        self.node: Heddle = pending.child
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.ends: list[int] = []  # where each token's text ends, in letters
        self.is_over = False
        self.is_cut = False
        self.told = 0
        self.n_told = 0
        self._branch = pending
        self._stream = lm.text.stream()
        self._mute = mute
        assert self.node.params is not None
        self._stops = self.node.params.stop
        self._keeps_stop = keeps_stop
        constraint = self.node.params.constraint
        self._stop_ids = frozenset[int]() if constraint is None else constraint.stop_ids
        self._min_tokens = 0 if constraint is None else constraint.min_tokens
        self._first_stop = 0  # where the text began that stop strings count in
        # Decides as the run's own one does.
        self._watch = StopStrings(self._stops, constraint)
        self._token_bytes = lm.text.token_bytes

    @property
    def n_prompt(self) -> int:
        """Tokens before it."""
        return self._branch.origin.depth

    @property
    def reused(self) -> int:
        """How many of these had their KV when it began, as far as the engine tells."""
        ticket = self._branch.ticket
        return (ticket.reused or 0) if ticket is not None else 0

    @property
    def ended_by(self) -> int | None:
        """The end token that ended it; it is none of `tokens`."""
        ticket = self._branch.ticket
        if ticket is None or ticket.value is None:
            return None
        ended_by: int | None = ticket.value.ended_by
        return ended_by

    @property
    def finish_reason(self) -> EndReason | None:
        """Why it ended, in OpenAI's words; None while it goes on."""
        if not self.is_over:
            return None
        return "stop" if self.is_cut or self.node.finish_reason == "stop" else "length"

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Go on by new tokens."""
        for token in tokens:
            spelled = self._token_bytes(token)
            if token not in self._mute:
                piece, own = self._stream.push(token), spelled.decode(errors="replace")
                if self.ends and piece[:1] == "\ufffd" and piece.endswith(own):
                    # An earlier token began a character that this one does not go on with.
                    self.ends[-1] += len(piece) - len(own)
                self.text += piece
            self.ends.append(len(self.text))
            if len(self.ends) == self._min_tokens:
                self._first_stop = len(self.text)
            stop = self._watch.push(spelled)
            if stop is not None:
                self._cut_at(stop)
        self.tokens += tokens
        self.logprobs += logprobs

    def _cut_at(self, stop: str) -> None:
        at = self.text.find(stop, max(0, self._first_stop - len(stop) + 1))
        if at >= 0:  # else it is in tokens that are no text
            end = at + len(stop) if self._keeps_stop else at
            self.text, self.is_cut = self.text[:end], True

    def end(self) -> None:
        """Nothing more comes."""
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
        """Length of the text that cannot change; it ends where a token's text ends."""
        if self.is_over or self.is_cut:
            return len(self.text)
        stops = () if self._keeps_stop else self._stops
        open_locked = max((_begun(self.text, stop) for stop in stops), default=0)
        n = bisect_right(self.ends, len(self.text) - open_locked)
        return self.ends[n - 1] if n else 0

    def piece(self) -> str:
        """Return the text that has become certain since the last call."""
        certain = self.certain
        text, self.told = self.text[self.told : certain], certain
        return text

    def token_texts(self, first: int, n: int) -> list[str]:
        """Return the text that each of `n` tokens adds; "" while a character is incomplete."""
        begins = [0, *self.ends]
        return [self.text[begins[i] : begins[i + 1]] for i in range(first, first + n)]

    def new_tokens(self) -> tuple[int, list[int]]:
        """Return how many tokens were given before, and those that stand for certain text since."""
        first, self.n_told = self.n_told, self.n_covered(self.certain)
        return first, self.tokens[first : self.n_told]

    def n_covered(self, length: int) -> int:
        """Return how many tokens stand for the first `length` letters.

        Those after them that have added no letter yet stand for what comes, which may be none.
        """
        if self.is_cut and length >= len(self.text):
            return bisect_left([0, *self.ends[:-1]], length)
        if self.is_over and length >= len(self.text):
            return len(self.tokens)
        if not length:
            return 0
        return min(bisect_left(self.ends, length) + 1, bisect_right(self.ends, length))


def _begun(text: str, stop: str) -> int:
    """Return how many letters at the end of a text may be the beginning of a stop string."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


class Runs:
    """`n` choices after each of some nodes, run once, in one batch.

    Choice i of a prompt is drawn with the seed `seed + i`: it is what `node.grow(seed=seed + i)`
    gives, up to rounding (docs/models.md). seed: the one given, else a fresh one.
    first_token_s: seconds from here to the first news of any choice; None where nobody looks for
    news, and before it.
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
        kept: SavedCompletion | None = None,
    ) -> None:
        """skips_special: special tokens are left out of the texts. kept: where the choices go.

        keeps_stop: texts include the stop string or stop token that ended them.
        """
        mute = lm.text.special_ids if skips_special else frozenset()
        self.lm = lm
        self.kept = kept
        self._pulse = ticker
        self._began = time.perf_counter()
        self.first_token_s: float | None = None
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.params = replace(params, n=n, seed=self.seed) if n else params
        self._growth = Growth(lm, streamed=is_streamed or kept is not None)
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
        """Run to the end. A cancelled task ends the runs. Raises: the first error of any choice."""
        if self.kept is not None:
            async with aclosing(self.news()) as news:
                async for _ in news:
                    pass
            return
        made = await self._growth.arun()
        if made.failed:
            raise made.failed[0]
        for reply in self.replies:
            reply.grow(reply.node.tokens, reply.node.logprobs)
            reply.end()

    async def news(self) -> AsyncGenerator[list[ChoiceRun], None]:
        """Yield the choices that went on, at most 20 times a second; leaving early ends the runs.

        Raises: the first error of any choice, when the others have ended.
        """
        lock = nullcontext() if self.kept is None else self.kept.live.lock
        try:
            async with aclosing(self._growth.anews()) as steps:
                async for news in steps:
                    if news and self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - self._began
                    async with lock:
                        moved = [self._moved(pending, events) for pending, events in news]
                    if moved:
                        yield moved
                    # What comes meanwhile waits in the channel, and is taken at once.
                    await self._pulse.wait(self._growth.over())
        finally:
            if self.kept is not None:
                await self.kept.end()
        failed = self._growth.children.failed
        if failed:
            raise failed[0]
        rest = [reply for reply in self.replies if not reply.is_over]
        for reply in rest:  # somebody has removed what they went on from
            reply.end()
        if rest:
            yield rest

    def _moved(self, pending: PendingBranch, events: list[Event]) -> ChoiceRun:
        reply, new = self.replies[pending.index], delta(pending, events)
        reply.grow(new.token_ids, new.logprobs)
        if new.finish_reason is not None and new.finish_reason != "error":
            reply.end()
        return reply

    def told(self) -> Json:
        """Return what is told where a request has `loom`: how it was drawn, and what is kept."""
        made: Json = {"sampling": self.params.to_dict()}
        if self.kept is not None:
            made.update(self.kept.told([reply.node for reply in self.replies]))
        return made

    def release(self) -> None:
        """End what has not ended; what is kept is kept."""
        if self.kept is not None:
            self.kept.release()

    async def keep(self) -> None:
        """Give the choices their nodes, before they run. The loom's lock is held."""
        if self.kept is not None:
            await self.kept.begin(self._growth)
