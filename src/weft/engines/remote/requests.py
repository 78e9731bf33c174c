"""`RemoteRuns`: whole runs as requests, their answers told as they come, and what breaks mended."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..._core.sampling.params import SamplingParams
from ...errors import ForwardError, WeftError
from ..generation import (
    EngineGenerator,
    EventCallback,
    GenerationEvent,
    GenerationRequest,
    NativeEnd,
)
from .request_builder import RequestBuilder
from .responses import ChoiceDelta, ProtocolError, read_deltas
from .token_matching import Figures, TokenMatcher
from .transport import ConnectionLost, Transport, TransportError, give_up_error

_log = logging.getLogger("weft.engines")
_GOLDEN = 0x9E3779B97F4A7C15  # another seed for what is asked for again


@dataclass(eq=False, slots=True)
class RequestChoice:
    """One sibling on its way: what was told of it, and the request that brings it now.

    known: what that request will bring once more.
    """

    number: int
    stream: int
    tokens: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    is_over: bool = False
    request: StreamingRequest | None = None


class RemoteRun:
    """One `GenerationRequest` on its way. Touched by the wire's thread alone.

    Whoever started it holds it: once nobody does, its requests are broken off.
    """

    def __init__(
        self, run: GenerationRequest, on_event: EventCallback, builder: RequestBuilder
    ) -> None:
        self.run = run
        self.builder = builder
        # What the server tells is what a logprob is here.
        self.shows_logprobs = builder.shows_logprobs(run.params)
        self.choices = [RequestChoice(number, stream) for number, stream in enumerate(run.streams)]
        self._on_event = on_event

    def report(self, choice: RequestChoice, event: GenerationEvent) -> None:
        """Pass news on, until the last of a sibling."""
        if choice.is_over:
            return
        choice.tokens += event.tokens
        choice.is_over = event.is_last
        self._on_event(event)

    def cancel(self, number: int) -> None:
        """End a sibling; the request goes with the last one that it is for."""
        choice = self.choices[number]
        self.report(choice, GenerationEvent(number, end="cancelled"))
        if choice.request is not None:
            choice.request.stop_if_idle()


class RemoteRuns(EngineGenerator):
    """The generation loop over there. together: siblings share a request."""

    def __init__(
        self,
        transport: Transport,
        builder: RequestBuilder,
        spelling: TokenMatcher,
        *,
        most: int,
        together: bool,
    ) -> None:
        self.transport = transport
        self.builder = builder
        self.spelling = spelling
        self.max_in_flight = most
        self.together = together

    def unsupported_params(self, params: SamplingParams) -> str | None:
        return self.builder.unsupported_params(params)

    def start(self, request: GenerationRequest, on_event: EventCallback) -> RemoteRun:
        builder = self.builder.of(request.tokens)
        builder.prompt(request.tokens)  # or it cannot be asked for at all
        remote_run = RemoteRun(request, on_event, builder)
        # Who stops by a string that the server cuts off is stopped from here, each at its own time.
        is_cut = request.params.stop and not self.builder.dialect.keep_stop
        together = self.together and builder.capabilities.n and not is_cut
        groups = [remote_run.choices] if together else [[choice] for choice in remote_run.choices]
        ref = weakref.ref(remote_run)
        requests = [StreamingRequest(self, ref, group, builder) for group in groups]
        self.transport.call(lambda: _begin(requests))
        return remote_run

    def cancel(self, handle: RemoteRun, sibling: int) -> None:
        if not self.transport.is_closed:
            self.transport.call(lambda: handle.cancel(sibling))


class MissingTextError(Exception):
    """A token came without text, and its text will not come; see `Dialect.drops_letters`."""


class StreamingRequest:
    """One request after the other, until some siblings of a run are over.

    A stream that breaks is asked for again from where it broke, siblings apart: what was told stays
    told, and no token twice.
    """

    def __init__(
        self,
        runs: RemoteRuns,
        remote_run: weakref.ref[RemoteRun],
        choices: Sequence[RequestChoice],
        builder: RequestBuilder,
    ) -> None:
        self.runs = runs
        self.builder = builder
        self.remote_run = remote_run
        self.choices = choices
        self.tries = 0
        self._figures = True  # logprobs are asked for
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Go, on the wire's thread."""
        remote_run = self.remote_run()
        if remote_run is None:
            return
        for choice in self.choices:
            choice.request = self
        loop = asyncio.get_running_loop()
        self._task = task = loop.create_task(self._run())
        weakref.finalize(remote_run, _cancel_soon, loop, task).atexit = False

    def stop_if_idle(self) -> None:
        """Break the request off once nobody waits for it."""
        if self._task is not None and all(choice.is_over for choice in self.choices):
            self._task.cancel()

    def _open(self) -> list[RequestChoice]:
        return [choice for choice in self.choices if not choice.is_over]

    async def _run(self) -> None:
        transport = self.runs.transport
        try:
            while choices := self._open():
                if self._is_full(choices):
                    continue
                n_before = sum(len(choice.tokens) for choice in choices)
                try:
                    await self._once(choices)
                    if not self._open():
                        return
                    raise ConnectionLost("its answer ended before the text did")
                except MissingTextError:
                    self._figures = False
                except (TransportError, ProtocolError) as fault:
                    if sum(len(choice.tokens) for choice in choices) > n_before:
                        self.tries = 0
                    elif isinstance(fault, ConnectionLost) and not self.tries:
                        fault = await self._why(choices) or fault
                    if not await self._may_retry(fault):
                        return
                    if len(choices) > 1 and any(choice.tokens for choice in self.choices):
                        self._part()
                        return
        except asyncio.CancelledError:
            if transport.is_closed:
                self._fail(ForwardError("the engine was closed"))
            raise
        except WeftError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours: nobody must wait for ever
            _log.exception("a request to %s failed", transport.address.base)
            self._fail(error)

    def _is_full(self, choices: list[RequestChoice]) -> bool:
        """End siblings that have all their tokens, in the count of ours; whether there were any."""
        remote_run = self.remote_run()
        full = []
        if remote_run is not None:
            full = [each for each in choices if len(each.tokens) >= remote_run.run.max_tokens]
            for choice in full:
                remote_run.report(choice, GenerationEvent(choice.number, end="length"))
        return bool(full)

    def _part(self) -> None:
        """Let each sibling go on by itself, from where it is."""
        for choice in self._open():
            request = StreamingRequest(self.runs, self.remote_run, [choice], self.builder)
            request.tries = self.tries
            request.begin()

    async def _may_retry(self, fault: TransportError | ProtocolError) -> bool:
        """Wait before the next try; or fail what is open, and say so."""
        if not self._open():
            return False
        transport, tries = self.runs.transport, self.tries
        may_pass = fault.may_pass
        told = [choice for choice in self._open() if choice.tokens]
        why = f"{transport.address.base}: {fault}"
        if told and not self.builder.may_continue():
            n = len(told[0].tokens)
            self._fail(ForwardError(f"{why}; a chat server cannot go on after {n} tokens of text"))
            return False
        if not may_pass or tries >= transport.retry_policy.retries:
            often = f" ({tries + 1} tries)" if tries else ""
            hint = "what was grown before is kept; start the server again and go on"
            base = transport.address.base
            self._fail(give_up_error(base, fault, often, hint if may_pass else ""))
            return False
        asked_s = fault.asked_s if isinstance(fault, TransportError) else None
        pause_s = transport.retry_policy.pause_s(tries, asked_s)
        _log.info("%s; trying again in %.1f s", why, pause_s)
        self.tries += 1
        await asyncio.sleep(pause_s)
        return True

    def _fail(self, error: Exception) -> None:
        remote_run = self.remote_run()
        if remote_run is not None:
            for choice in self._open():
                remote_run.report(choice, GenerationEvent(choice.number, error=error))

    # One request

    async def _once(self, choices: list[RequestChoice]) -> None:
        """Ask, and tell what comes. Raises: Fault, Garbled."""
        body = self._body(choices)
        messages = self.runs.transport.messages(self.builder.path, body)
        try:
            async for some in messages:
                remote_run = self.remote_run()
                if remote_run is None:
                    return
                for message in some:
                    for told in read_deltas(message):
                        if not 0 <= told.index < len(choices):
                            raise ProtocolError(f"choice {told.index} of {len(choices)} came")
                        self._hear(remote_run, choices[told.index], told)
                del (
                    remote_run
                )  # what comes after the last text is read, so that the connection stays
        finally:
            await messages.aclose()

    async def _why(self, choices: list[RequestChoice]) -> TransportError | None:
        """Ask for one token, not as a stream: some servers swallow errors where one has begun.

        Returns what the server refuses for good; None: it may go on.
        """
        body = {**self._body(choices[:1]), "stream": False, "max_tokens": 1}
        for _ in range(2):  # the server may be closing the connection that the stream broke on
            try:
                await self.runs.transport.post(self.builder.path, body)
            except ConnectionLost:
                continue
            except (TransportError, ProtocolError) as fault:
                return fault if isinstance(fault, TransportError) and not fault.may_pass else None
            break
        return None

    def _body(self, choices: list[RequestChoice]) -> dict[str, Any]:
        remote_run = self.remote_run()
        assert remote_run is not None  # its end cancels this
        run, told = remote_run.run, choices[0].tokens
        for choice in choices:
            choice.known = []
        if self.builder.must_replay(run.params):
            for choice in choices:
                choice.known = list(choice.tokens)
            told = []
        streams = [choice.stream ^ (len(told) * _GOLDEN) for choice in choices]
        left = run.max_tokens - len(told)
        tokens = [*run.tokens, *told]
        return self.builder.body(run, tokens, streams, left, figures=self._figures)

    def _hear(self, remote_run: RemoteRun, choice: RequestChoice, told: ChoiceDelta) -> None:
        if self._figures and self.builder.dialect.drops_letters:
            if told.finish is None and told.names == [b""]:
                raise MissingTextError
        tokens, logprobs = self.runs.spelling.tokens(told)
        if not remote_run.shows_logprobs:
            logprobs = None
        if choice.known:
            tokens, logprobs = _beyond(choice, tokens, logprobs)
        event = GenerationEvent(choice.number, tokens, logprobs)
        if told.finish is not None:
            event = self._last(remote_run.run, choice, told, tokens, logprobs)
        if event.tokens or event.is_last:
            remote_run.report(choice, event)

    def _last(
        self,
        run: GenerationRequest,
        choice: RequestChoice,
        told: ChoiceDelta,
        tokens: list[int],
        logprobs: Figures,
    ) -> GenerationEvent:
        """Return the news that a sibling is over, without its end token."""
        ended_by = told.ended_by if told.ended_by in run.stop_ids else None
        if tokens and tokens[-1] in run.stop_ids:
            ended_by = tokens[-1]
            tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[:-1]
        event = GenerationEvent(choice.number, tokens, logprobs, ended_by=ended_by)
        if told.finish in ("stop", "eos", "end_turn"):
            if ended_by is None and not told.is_stopped:
                event = replace(event, ended_by=self._end_id(run))
            return replace(event, end="stop")
        if told.finish == "length":
            n_all = len(choice.tokens) + len(tokens)
            is_short = self.builder.capabilities.gives_ids and n_all < run.max_tokens
            end: NativeEnd = "context" if is_short else "length"
            return replace(event, end=end)
        why = f"{self.runs.transport.address.base} ended a text by {told.finish!r}"
        return replace(event, error=ForwardError(why))

    def _end_id(self, run: GenerationRequest) -> int | None:
        """Return the end token of an end that was told without its name."""
        usual = self.runs.spelling.text.eos_token_id
        return usual if usual in run.stop_ids else min(run.stop_ids, default=None)


def _beyond(
    choice: RequestChoice, tokens: list[int], logprobs: Figures
) -> tuple[list[int], Figures]:
    """Return what is new of tokens that begin with known ones. Raises: ForwardError for others."""
    n = min(len(choice.known), len(tokens))
    if tokens[:n] != choice.known[:n]:
        raise ForwardError(
            "the stream broke, and the server wrote another text when it was asked again; what a"
            " constraint or a penalty has counted cannot be gone on from the middle"
        )
    del choice.known[:n]
    return tokens[n:], None if logprobs is None else logprobs[n:]


def _begin(requests: Sequence[StreamingRequest]) -> None:
    for request in requests:
        request.begin()


def _cancel_soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Break a request off that nobody waits for any more; any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
