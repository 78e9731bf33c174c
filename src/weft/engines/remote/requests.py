"""`RemoteRuns`: generation requests over HTTP, with retries and resumed streams."""

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
from .token_matching import Logprobs, TokenMatcher
from .transport import ConnectionLost, Transport, TransportError, final_error

_log = logging.getLogger("weft.engines")
_GOLDEN = 0x9E3779B97F4A7C15  # changes the seed of a request for the rest of a text


@dataclass(eq=False, slots=True)
class RequestChoice:
    """One sibling of a running request.

    Attributes:
        number: index of the sibling.
        stream: random stream of its seed.
        tokens: tokens received so far.
        replayed: tokens that the current request will return again.
        is_finished: its last event was reported.
        request: the current request.
    """

    number: int
    stream: int
    tokens: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    is_finished: bool = False
    request: StreamingRequest | None = None


class RemoteRun:
    """A running `GenerationRequest`. Only the transport's thread uses it.

    The caller that started it keeps the only strong reference. When that is released, its requests
    are cancelled.
    """

    def __init__(
        self, run: GenerationRequest, on_event: EventCallback, builder: RequestBuilder
    ) -> None:
        self.run = run
        self.builder = builder
        # The server's logprobs are those of the raw distribution.
        self.shows_logprobs = builder.shows_logprobs(run.params)
        self.choices = [RequestChoice(number, stream) for number, stream in enumerate(run.streams)]
        self._on_event = on_event

    def report(self, choice: RequestChoice, event: GenerationEvent) -> None:
        """Report an event, unless the sibling has finished."""
        if choice.is_finished:
            return
        choice.tokens += event.tokens
        choice.is_finished = event.is_last
        self._on_event(event)

    def cancel(self, number: int) -> None:
        """End sibling `number`. A request is cancelled when its last sibling has ended."""
        choice = self.choices[number]
        self.report(choice, GenerationEvent(number, end="cancelled"))
        if choice.request is not None:
            choice.request.stop_if_idle()


class RemoteRuns(EngineGenerator):
    """Generation loop of the server.

    Args:
        transport: connection to the server.
        builder: builder of the requests.
        matcher: conversion of responses to tokens.
        max_in_flight: maximum number of siblings at once.
        together: siblings share a request.
    """

    def __init__(
        self,
        transport: Transport,
        builder: RequestBuilder,
        matcher: TokenMatcher,
        *,
        max_in_flight: int,
        together: bool,
    ) -> None:
        self.transport = transport
        self.builder = builder
        self.matcher = matcher
        self.max_in_flight = max_in_flight
        self.together = together

    def unsupported_params(self, params: SamplingParams) -> str | None:
        """Return the reason why the server cannot honour a parameter exactly; None if it can."""
        return self.builder.unsupported_params(params)

    def start(self, request: GenerationRequest, on_event: EventCallback) -> RemoteRun:
        """Start the requests of all siblings; return the run, for `cancel`."""
        builder = self.builder.for_path(request.tokens)
        builder.prompt(request.tokens)  # raises if the prompt is not supported
        remote_run = RemoteRun(request, on_event, builder)
        # If the server removes stop strings, the host ends each sibling at its own time.
        is_stopped_here = request.params.stop and not self.builder.dialect.keep_stop
        together = self.together and builder.capabilities.n and not is_stopped_here
        groups = [remote_run.choices] if together else [[choice] for choice in remote_run.choices]
        ref = weakref.ref(remote_run)
        requests = [StreamingRequest(self, ref, group, builder) for group in groups]
        self.transport.call(lambda: _start_all(requests))
        return remote_run

    def cancel(self, handle: RemoteRun, sibling: int) -> None:
        """Request the end of one sibling. Its last event is still reported."""
        if not self.transport.is_closed:
            self.transport.call(lambda: handle.cancel(sibling))


class MissingTextError(Exception):
    """A token has no text, and its text will not follow; see `Dialect.drops_split_chars`."""


class StreamingRequest:
    """Consecutive requests until some siblings of a run have finished.

    A broken stream is requested again from its last token, one request per sibling. Reported tokens
    are kept, and no token is reported twice.
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
        self._wants_logprobs = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that sends the requests. Call it on the transport's thread.

        Does nothing if the run has been released.
        """
        remote_run = self.remote_run()
        if remote_run is None:
            return
        for choice in self.choices:
            choice.request = self
        loop = asyncio.get_running_loop()
        self._task = task = loop.create_task(self._run())
        weakref.finalize(remote_run, _cancel_soon, loop, task).atexit = False

    def stop_if_idle(self) -> None:
        """Cancel the request if all its siblings have finished."""
        if self._task is not None and all(choice.is_finished for choice in self.choices):
            self._task.cancel()

    def _unfinished(self) -> list[RequestChoice]:
        """Return the siblings that have not ended."""
        return [choice for choice in self.choices if not choice.is_finished]

    async def _run(self) -> None:
        """Send requests until all siblings have ended; the body of the task."""
        transport = self.runs.transport
        try:
            while choices := self._unfinished():
                if self._is_full(choices):
                    continue
                n_before = sum(len(choice.tokens) for choice in choices)
                try:
                    await self._stream(choices)
                    if not self._unfinished():
                        return
                    raise ConnectionLost("its answer ended before the text did")
                except MissingTextError:
                    self._wants_logprobs = False
                except (TransportError, ProtocolError) as fault:
                    if sum(len(choice.tokens) for choice in choices) > n_before:
                        self.tries = 0
                    elif isinstance(fault, ConnectionLost) and not self.tries:
                        fault = await self._find_error(choices) or fault
                    if not await self._may_retry(fault):
                        return
                    if len(choices) > 1 and any(choice.tokens for choice in self.choices):
                        self._split()
                        return
        except asyncio.CancelledError:
            if transport.is_closed:
                self._fail(ForwardError("the engine was closed"))
            raise
        except WeftError as error:
            self._fail(error)
        except Exception as error:  # a bug: fail the run, so that its caller does not wait forever
            _log.exception("a request to %s failed", transport.address.base)
            self._fail(error)

    def _is_full(self, choices: list[RequestChoice]) -> bool:
        """End siblings that have max_tokens tokens. Return True if there were any."""
        remote_run = self.remote_run()
        full = []
        if remote_run is not None:
            full = [each for each in choices if len(each.tokens) >= remote_run.run.max_tokens]
            for choice in full:
                remote_run.report(choice, GenerationEvent(choice.number, end="length"))
        return bool(full)

    def _split(self) -> None:
        """Continue each sibling with a request of its own."""
        for choice in self._unfinished():
            request = StreamingRequest(self.runs, self.remote_run, [choice], self.builder)
            request.tries = self.tries
            request.start()

    async def _may_retry(self, fault: TransportError | ProtocolError) -> bool:
        """Wait before the next try and return True; or fail all unfinished siblings."""
        if not self._unfinished():
            return False
        transport, tries = self.runs.transport, self.tries
        is_transient = fault.is_transient
        started = [choice for choice in self._unfinished() if choice.tokens]
        why = f"{transport.address.base}: {fault}"
        if started and not self.builder.may_continue():
            n = len(started[0].tokens)
            self._fail(
                ForwardError(f"{why}; a chat server cannot continue after {n} tokens of text")
            )
            return False
        if not is_transient or tries >= transport.retry_policy.retries:
            often = f" ({tries + 1} tries)" if tries else ""
            hint = "generated tokens are kept; start the server again and continue"
            base = transport.address.base
            self._fail(final_error(base, fault, often, hint if is_transient else ""))
            return False
        retry_after_s = fault.retry_after_s if isinstance(fault, TransportError) else None
        pause_s = transport.retry_policy.pause_s(tries, retry_after_s)
        _log.info("%s; trying again in %.1f s", why, pause_s)
        self.tries += 1
        await asyncio.sleep(pause_s)
        return True

    def _fail(self, error: Exception) -> None:
        """End all unfinished siblings with an error."""
        remote_run = self.remote_run()
        if remote_run is not None:
            for choice in self._unfinished():
                remote_run.report(choice, GenerationEvent(choice.number, error=error))

    # One request

    async def _stream(self, choices: list[RequestChoice]) -> None:
        """Send one request and report its events.

        Raises:
            TransportError, ProtocolError: the request failed.
        """
        body = self._body(choices)
        messages = self.runs.transport.messages(self.builder.path, body)
        try:
            async for some in messages:
                remote_run = self.remote_run()
                if remote_run is None:
                    return
                for message in some:
                    for delta in read_deltas(message):
                        if not 0 <= delta.index < len(choices):
                            raise ProtocolError(
                                f"a response has choice {delta.index} of {len(choices)}"
                            )
                        self._process_delta(remote_run, choices[delta.index], delta)
                # The rest of the stream is read, so that the connection can be reused.
                del remote_run
        finally:
            await messages.aclose()

    async def _find_error(self, choices: list[RequestChoice]) -> TransportError | None:
        """Return the server's permanent error for this request; None if a retry may succeed.

        Requests one token without streaming, because some servers hide errors in a started stream.
        """
        body = {**self._body(choices[:1]), "stream": False, "max_tokens": 1}
        for _ in range(2):  # the server may be closing the connection that the stream broke on
            try:
                await self.runs.transport.post(self.builder.path, body)
            except ConnectionLost:
                continue
            except (TransportError, ProtocolError) as fault:
                return (
                    fault if isinstance(fault, TransportError) and not fault.is_transient else None
                )
            break
        return None

    def _body(self, choices: list[RequestChoice]) -> dict[str, Any]:
        """Return the request that continues these siblings, from their last tokens if it can."""
        remote_run = self.remote_run()
        assert remote_run is not None  # its end cancels this
        run, prior = remote_run.run, choices[0].tokens
        for choice in choices:
            choice.replayed = []
        if self.builder.must_replay(run.params):
            for choice in choices:
                choice.replayed = list(choice.tokens)
            prior = []
        streams = [choice.stream ^ (len(prior) * _GOLDEN) for choice in choices]
        left = run.max_tokens - len(prior)
        tokens = [*run.tokens, *prior]
        return self.builder.body(run, tokens, streams, left, with_logprobs=self._wants_logprobs)

    def _process_delta(
        self, remote_run: RemoteRun, choice: RequestChoice, delta: ChoiceDelta
    ) -> None:
        """Convert new content of one sibling to tokens, and report them."""
        if self._wants_logprobs and self.builder.dialect.drops_split_chars:
            if delta.finish is None and delta.names == [b""]:
                raise MissingTextError
        tokens, logprobs = self.runs.matcher.tokens(delta)
        if not remote_run.shows_logprobs:
            logprobs = None
        if choice.replayed:
            tokens, logprobs = _skip_replayed(choice, tokens, logprobs)
        event = GenerationEvent(choice.number, tokens, logprobs)
        if delta.finish is not None:
            event = self._last_event(remote_run.run, choice, delta, tokens, logprobs)
        if event.tokens or event.is_last:
            remote_run.report(choice, event)

    def _last_event(
        self,
        run: GenerationRequest,
        choice: RequestChoice,
        delta: ChoiceDelta,
        tokens: list[int],
        logprobs: Logprobs,
    ) -> GenerationEvent:
        """Return the last event of a sibling, without its end token."""
        ended_by = delta.ended_by if delta.ended_by in run.stop_ids else None
        if tokens and tokens[-1] in run.stop_ids:
            ended_by = tokens[-1]
            tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[:-1]
        event = GenerationEvent(choice.number, tokens, logprobs, ended_by=ended_by)
        if delta.finish in ("stop", "eos", "end_turn"):
            if ended_by is None and not delta.is_stopped:
                event = replace(event, ended_by=self._end_id(run))
            return replace(event, end="stop")
        if delta.finish == "length":
            n_all = len(choice.tokens) + len(tokens)
            is_short = self.builder.capabilities.gives_ids and n_all < run.max_tokens
            end: NativeEnd = "context" if is_short else "length"
            return replace(event, end=end)
        why = f"{self.runs.transport.address.base} ended a text by {delta.finish!r}"
        return replace(event, error=ForwardError(why))

    def _end_id(self, run: GenerationRequest) -> int | None:
        """Return the end token of an end that the response does not name."""
        usual = self.runs.matcher.text.eos_token_id
        return usual if usual in run.stop_ids else min(run.stop_ids, default=None)


def _skip_replayed(
    choice: RequestChoice, tokens: list[int], logprobs: Logprobs
) -> tuple[list[int], Logprobs]:
    """Drop the tokens that a resumed stream repeats; return the new ones.

    Raises:
        ForwardError: the repeated tokens differ from those received before.
    """
    n = min(len(choice.replayed), len(tokens))
    if tokens[:n] != choice.replayed[:n]:
        raise ForwardError(
            "the stream broke, and the server generated another text when it was requested again;"
            " with a constraint or a penalty, a text cannot be continued from the middle"
        )
    del choice.replayed[:n]
    return tokens[n:], None if logprobs is None else logprobs[n:]


def _start_all(requests: Sequence[StreamingRequest]) -> None:
    """Start several requests."""
    for request in requests:
        request.start()


def _cancel_soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Cancel a request whose run was released; may be called from any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
