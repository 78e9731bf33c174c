"""`RemoteRuns`: whole runs as requests, their answers told as they come, and what breaks mended."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ForwardError, WeftError
from ...sampling.params import SamplingParams
from ..native import NativeEnd, NativeEvent, NativeRun, NativeRuns, Tell
from .said import Garbled, Said, read_said
from .spelling import Figures, Spelling
from .wire import Break, Fault, Wire, given_up
from .wording import Wording

_log = logging.getLogger("weft.engines")
_GOLDEN = 0x9E3779B97F4A7C15  # another seed for what is asked for again


@dataclass(eq=False, slots=True)
class Voice:
    """One sibling on its way: what was told of it, and the request that brings it now.

    known: what that request will bring once more.
    """

    number: int
    stream: int
    tokens: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    is_over: bool = False
    courier: Courier | None = None


class Journey:
    """One `NativeRun` on its way. Touched by the wire's thread alone.

    Whoever started it holds it: once nobody does, its requests are broken off.
    """

    def __init__(self, run: NativeRun, tell: Tell, wording: Wording) -> None:
        self.run = run
        self.wording = wording
        # What the server tells is what a logprob is here.
        self.shows_logprobs = wording.shows_logprobs(run.params)
        self.voices = [Voice(number, stream) for number, stream in enumerate(run.streams)]
        self._tell = tell

    def tell(self, voice: Voice, event: NativeEvent) -> None:
        """Pass news on, until the last of a sibling."""
        if voice.is_over:
            return
        voice.tokens += event.tokens
        voice.is_over = event.is_last
        self._tell(event)

    def cancel(self, number: int) -> None:
        """End a sibling; the request goes with the last one that it is for."""
        voice = self.voices[number]
        self.tell(voice, NativeEvent(number, end="cancelled"))
        if voice.courier is not None:
            voice.courier.stop_if_idle()


class RemoteRuns(NativeRuns):
    """The generation loop over there. together: siblings share a request."""

    def __init__(
        self, wire: Wire, wording: Wording, spelling: Spelling, *, most: int, together: bool
    ) -> None:
        self.wire = wire
        self.wording = wording
        self.spelling = spelling
        self.most = most
        self.together = together

    def refusal(self, params: SamplingParams) -> str | None:
        return self.wording.refusal(params)

    def start(self, run: NativeRun, tell: Tell) -> Journey:
        wording = self.wording.of(run.tokens)
        wording.prompt(run.tokens)  # or it cannot be asked for at all
        journey = Journey(run, tell, wording)
        # Who stops by a string that the server cuts off is stopped from here, each at its own time.
        is_cut = run.params.stop and not self.wording.dialect.keep_stop
        together = self.together and wording.manners.n and not is_cut
        groups = [journey.voices] if together else [[voice] for voice in journey.voices]
        ref = weakref.ref(journey)
        couriers = [Courier(self, ref, group, wording) for group in groups]
        self.wire.call(lambda: _begin(couriers))
        return journey

    def cancel(self, handle: Journey, sibling: int) -> None:
        if not self.wire.is_closed:
            self.wire.call(lambda: handle.cancel(sibling))


class LettersLost(Exception):
    """A token came without text, and its text will not come; see `Dialect.drops_letters`."""


class Courier:
    """One request after the other, until some siblings of a run are over.

    A stream that breaks is asked for again from where it broke, siblings apart: what was told stays
    told, and no token twice.
    """

    def __init__(
        self,
        runs: RemoteRuns,
        journey: weakref.ref[Journey],
        voices: Sequence[Voice],
        wording: Wording,
    ) -> None:
        self.runs = runs
        self.wording = wording
        self.journey = journey
        self.voices = voices
        self.tries = 0
        self._figures = True  # logprobs are asked for
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Go, on the wire's thread."""
        journey = self.journey()
        if journey is None:
            return
        for voice in self.voices:
            voice.courier = self
        loop = asyncio.get_running_loop()
        self._task = task = loop.create_task(self._run())
        weakref.finalize(journey, _cancel_soon, loop, task).atexit = False

    def stop_if_idle(self) -> None:
        """Break the request off once nobody waits for it."""
        if self._task is not None and all(voice.is_over for voice in self.voices):
            self._task.cancel()

    def _open(self) -> list[Voice]:
        return [voice for voice in self.voices if not voice.is_over]

    async def _run(self) -> None:
        wire = self.runs.wire
        try:
            while voices := self._open():
                if self._is_full(voices):
                    continue
                n_before = sum(len(voice.tokens) for voice in voices)
                try:
                    await self._once(voices)
                    if not self._open():
                        return
                    raise Break("its answer ended before the text did")
                except LettersLost:
                    self._figures = False
                except (Fault, Garbled) as fault:
                    if sum(len(voice.tokens) for voice in voices) > n_before:
                        self.tries = 0
                    elif isinstance(fault, Break) and not self.tries:
                        fault = await self._why(voices) or fault
                    if not await self._may_retry(fault):
                        return
                    if len(voices) > 1 and any(voice.tokens for voice in self.voices):
                        self._part()
                        return
        except asyncio.CancelledError:
            if wire.is_closed:
                self._fail(ForwardError("the engine was closed"))
            raise
        except WeftError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours: nobody must wait for ever
            _log.exception("a request to %s failed", wire.address.base)
            self._fail(error)

    def _is_full(self, voices: list[Voice]) -> bool:
        """End siblings that have all their tokens, in the count of ours; whether there were any."""
        journey = self.journey()
        full = []
        if journey is not None:
            full = [each for each in voices if len(each.tokens) >= journey.run.max_tokens]
            for voice in full:
                journey.tell(voice, NativeEvent(voice.number, end="length"))
        return bool(full)

    def _part(self) -> None:
        """Let each sibling go on by itself, from where it is."""
        for voice in self._open():
            courier = Courier(self.runs, self.journey, [voice], self.wording)
            courier.tries = self.tries
            courier.begin()

    async def _may_retry(self, fault: Fault | Garbled) -> bool:
        """Wait before the next try; or fail what is open, and say so."""
        if not self._open():
            return False
        wire, tries = self.runs.wire, self.tries
        may_pass = fault.may_pass
        told = [voice for voice in self._open() if voice.tokens]
        why = f"{wire.address.base}: {fault}"
        if told and not self.wording.may_continue():
            n = len(told[0].tokens)
            self._fail(ForwardError(f"{why}; a chat server cannot go on after {n} tokens of text"))
            return False
        if not may_pass or tries >= wire.patience.retries:
            often = f" ({tries + 1} tries)" if tries else ""
            hint = "what was grown before is kept; start the server again and go on"
            base = wire.address.base
            self._fail(given_up(base, fault, often, hint if may_pass else ""))
            return False
        asked_s = fault.asked_s if isinstance(fault, Fault) else None
        pause_s = wire.patience.pause_s(tries, asked_s)
        _log.info("%s; trying again in %.1f s", why, pause_s)
        self.tries += 1
        await asyncio.sleep(pause_s)
        return True

    def _fail(self, error: Exception) -> None:
        journey = self.journey()
        if journey is not None:
            for voice in self._open():
                journey.tell(voice, NativeEvent(voice.number, error=error))

    # One request

    async def _once(self, voices: list[Voice]) -> None:
        """Ask, and tell what comes. Raises: Fault, Garbled."""
        body = self._body(voices)
        messages = self.runs.wire.messages(self.wording.path, body)
        try:
            async for some in messages:
                journey = self.journey()
                if journey is None:
                    return
                for message in some:
                    for told in read_said(message):
                        if not 0 <= told.index < len(voices):
                            raise Garbled(f"choice {told.index} of {len(voices)} came")
                        self._hear(journey, voices[told.index], told)
                del journey  # what comes after the last text is read, so that the connection stays
        finally:
            await messages.aclose()

    async def _why(self, voices: list[Voice]) -> Fault | None:
        """Ask for one token, not as a stream: some servers swallow errors where one has begun.

        Returns what the server refuses for good; None: it may go on.
        """
        body = {**self._body(voices[:1]), "stream": False, "max_tokens": 1}
        for _ in range(2):  # the server may be closing the connection that the stream broke on
            try:
                await self.runs.wire.post(self.wording.path, body)
            except Break:
                continue
            except (Fault, Garbled) as fault:
                return fault if isinstance(fault, Fault) and not fault.may_pass else None
            break
        return None

    def _body(self, voices: list[Voice]) -> dict[str, Any]:
        journey = self.journey()
        assert journey is not None  # its end cancels this
        run, told = journey.run, voices[0].tokens
        for voice in voices:
            voice.known = []
        if self.wording.must_replay(run.params):
            for voice in voices:
                voice.known = list(voice.tokens)
            told = []
        streams = [voice.stream ^ (len(told) * _GOLDEN) for voice in voices]
        left = run.max_tokens - len(told)
        tokens = [*run.tokens, *told]
        return self.wording.body(run, tokens, streams, left, figures=self._figures)

    def _hear(self, journey: Journey, voice: Voice, told: Said) -> None:
        if self._figures and self.wording.dialect.drops_letters:
            if told.finish is None and told.names == [b""]:
                raise LettersLost
        tokens, logprobs = self.runs.spelling.tokens(told)
        if not journey.shows_logprobs:
            logprobs = None
        if voice.known:
            tokens, logprobs = _beyond(voice, tokens, logprobs)
        event = NativeEvent(voice.number, tokens, logprobs)
        if told.finish is not None:
            event = self._last(journey.run, voice, told, tokens, logprobs)
        if event.tokens or event.is_last:
            journey.tell(voice, event)

    def _last(
        self, run: NativeRun, voice: Voice, told: Said, tokens: list[int], logprobs: Figures
    ) -> NativeEvent:
        """Return the news that a sibling is over, without its end token."""
        ended_by = told.ended_by if told.ended_by in run.stop_ids else None
        if tokens and tokens[-1] in run.stop_ids:
            ended_by = tokens[-1]
            tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[:-1]
        event = NativeEvent(voice.number, tokens, logprobs, ended_by=ended_by)
        if told.finish in ("stop", "eos", "end_turn"):
            if ended_by is None and not told.is_stopped:
                event = replace(event, ended_by=self._end_id(run))
            return replace(event, end="stop")
        if told.finish == "length":
            n_all = len(voice.tokens) + len(tokens)
            is_short = self.wording.manners.gives_ids and n_all < run.max_tokens
            end: NativeEnd = "context" if is_short else "length"
            return replace(event, end=end)
        why = f"{self.runs.wire.address.base} ended a text by {told.finish!r}"
        return replace(event, error=ForwardError(why))

    def _end_id(self, run: NativeRun) -> int | None:
        """Return the end token of an end that was told without its name."""
        usual = self.runs.spelling.text.eos_token_id
        return usual if usual in run.stop_ids else min(run.stop_ids, default=None)


def _beyond(voice: Voice, tokens: list[int], logprobs: Figures) -> tuple[list[int], Figures]:
    """Return what is new of tokens that begin with known ones. Raises: ForwardError for others."""
    n = min(len(voice.known), len(tokens))
    if tokens[:n] != voice.known[:n]:
        raise ForwardError(
            "the stream broke, and the server wrote another text when it was asked again; what a"
            " constraint or a penalty has counted cannot be gone on from the middle"
        )
    del voice.known[:n]
    return tokens[n:], None if logprobs is None else logprobs[n:]


def _begin(couriers: Sequence[Courier]) -> None:
    for courier in couriers:
        courier.begin()


def _cancel_soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Break a request off that nobody waits for any more; any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
