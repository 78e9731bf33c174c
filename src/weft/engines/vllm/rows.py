"""Full logits after paths: open requests that continue with the next token, and single requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from ...errors import ForwardError
from .shared_logits import KEY, SharedLogitsBuffer

Floats = NDArray[np.float32]
Path = tuple[str | None, tuple[int, ...]]  # adapter, token ids

_log = logging.getLogger("weft.engines")


class OpenRequest:
    """A request that stays open: it answers a path, and then paths that continue it.

    vLLM samples a token at the end of each input, and drops it when the next input arrives.
    """

    def __init__(self, engine: Any, request_id: str, lora: Any) -> None:
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        first = row_params(None)
        self._outputs = engine.generate(self._feed(), first, request_id, lora_request=lora)

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        """Yield inputs to vLLM as `run` provides them."""
        while (tokens := await self._inputs.get()) is not None:
            yield tokens

    async def run(self, tokens: Sequence[int], params: SamplingParams) -> Any:
        """Continue by tokens; return vLLM's output after them."""
        self._inputs.put_nowait(
            StreamingInput(prompt=tokens_input(list(tokens)), sampling_params=params)
        )
        return await anext(self._outputs)

    async def close(self) -> None:
        """End the request. Its KV stays in vLLM's prefix cache while there is room."""
        await self._outputs.aclose()


class LogitsReader:
    """Reads the logits of all tokens after given paths from vLLM. Its methods run on the engine's
    loop.

    Args:
        engine: the AsyncLLM.
        n_vocab: number of logits.
        buffer: memory that workers write logits to; None: they arrive as log-probabilities of all
            tokens in Python objects, which is slow.
        max_idle: maximum number of idle open requests, which occupy places in the batch.
        max_idle_tokens: maximum number of tokens of their paths, which occupy KV.
    """

    def __init__(
        self,
        engine: Any,
        n_vocab: int,
        *,
        buffer: SharedLogitsBuffer | None,
        max_idle: int,
        max_idle_tokens: int,
    ) -> None:
        self.engine = engine
        self.n_vocab = n_vocab
        self.buffer = buffer
        self.max_idle = max_idle
        self.max_idle_tokens = max_idle_tokens
        self.n_opened = self.n_extended = 0
        self._idle: OrderedDict[Path, OpenRequest] = OrderedDict()
        self._idle_tokens = 0
        self._numbers = itertools.count()
        self._room: asyncio.Semaphore | None = None

    async def rows(self, paths: Sequence[Path], loras: dict[str | None, Any]) -> list[Floats]:
        """Return the logits after each path. Raises the first error, if any."""
        if self._room is None:
            n_slots = self.max_idle if self.buffer is None else self.buffer.n_slots
            self._room = asyncio.Semaphore(max(n_slots, 1))
        work = [self._read_row(path, loras[path[0]]) for path in paths]
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    async def close(self) -> None:
        """End all idle open requests. Call it when no call of `rows` is running."""
        while self._idle:
            await self._pop_oldest().close()

    async def _read_row(self, path: Path, lora: Any) -> Floats:
        """Wait for a free slot of the buffer and return the logits after one path: float32 [V]."""
        assert self._room is not None
        async with self._room:
            slot = -1 if self.buffer is None else self.buffer.free.popleft()
            try:
                return await self._request_row(path, lora, slot)
            finally:
                if self.buffer is not None:
                    self.buffer.free.append(slot)

    async def _request_row(self, path: Path, lora: Any, slot: int) -> Floats:
        """Request one path's logits and return them. slot: slot of the buffer; -1 without one."""
        target = None if self.buffer is None else (slot, self.buffer.ticket())
        params = row_params(target)
        if self.max_idle:
            output = await self._run_in_open_request(path, lora, params)
        else:
            request = self._request_id()
            self.n_opened += 1
            given = tokens_input(list(path[1]))
            outputs = self.engine.generate(given, params, request, lora_request=lora)
            async for latest in outputs:
                output = latest
        if target is None:
            return self._from_logprobs(output)
        assert self.buffer is not None
        row = self.buffer.read(*target)
        if row is None:
            raise ForwardError(
                "vLLM answered, but no worker wrote the logits: this version calls logits"
                ' processors differently; use engine_options={"rows": "logprobs"}'
            )
        return row

    async def _run_in_open_request(self, path: Path, lora: Any, params: SamplingParams) -> Any:
        """Continue the open request of the path without its last token, or open a new one.

        Returns vLLM's output. The request then becomes idle.
        """
        adapter, ids = path
        parent = (adapter, ids[:-1])
        session = self._idle.pop(parent, None)
        if session is None:
            self.n_opened += 1
            session, new = OpenRequest(self.engine, self._request_id(), lora), ids
        else:
            self.n_extended += 1
            self._idle_tokens -= len(parent[1])
            new = ids[-1:]
        try:
            output = await session.run(new, params)
        except BaseException:
            await session.close()
            raise
        await self._make_idle(path, session)
        return output

    async def _make_idle(self, path: Path, session: OpenRequest) -> None:
        """Make a request idle, to be continued by a path that extends `path` by one token.

        An idle request of the same path is ended. So are the least recently used ones if `max_idle`
        or `max_idle_tokens` is exceeded.
        """
        before = self._idle.pop(path, None)
        self._idle[path] = session
        self._idle_tokens += 0 if before is not None else len(path[1])
        if before is not None:
            await before.close()
        while self._idle and (
            len(self._idle) > self.max_idle or self._idle_tokens > self.max_idle_tokens
        ):
            await self._pop_oldest().close()

    def _pop_oldest(self) -> OpenRequest:
        """Remove and return the least recently used idle request."""
        (_, ids), session = self._idle.popitem(last=False)
        self._idle_tokens -= len(ids)
        return session

    def _from_logprobs(self, output: Any) -> Floats:
        """Return the log-probabilities of all tokens in vLLM's output: float32 [V]."""
        given = output.outputs[0].logprobs
        row = np.full(self.n_vocab, -np.inf, dtype=np.float32)
        row[np.array(given.token_ids)] = given.logprobs
        return row

    def _request_id(self) -> str:
        """Return a new request id."""
        return f"weft-row-{next(self._numbers)}"


def row_params(target: tuple[int, int] | None) -> SamplingParams:
    """Return the parameters of a request for one row of logits.

    Args:
        target: slot and ticket in the shared buffer; None for log-probabilities.
    """
    by_logprobs = {"logprobs": -1, "flat_logprobs": True}
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **(by_logprobs if target is None else {"extra_args": {KEY: list(target)}}),
    )
