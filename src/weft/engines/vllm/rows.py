"""Logits rows of whole paths: requests that stay open for their next token, and single ones."""

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
    """A request that stays open: it answers a path, and then any path one or more tokens longer.

    vLLM samples a token at the end of each input and drops it when the next one comes.
    """

    def __init__(self, engine: Any, request_id: str, lora: Any) -> None:
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        first = row_params(None)
        self._outputs = engine.generate(self._feed(), first, request_id, lora_request=lora)

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        while (given := await self._inputs.get()) is not None:
            yield given

    async def run(self, tokens: Sequence[int], params: SamplingParams) -> Any:
        """Go on by tokens; return what vLLM gives out after them."""
        self._inputs.put_nowait(
            StreamingInput(prompt=tokens_input(list(tokens)), sampling_params=params)
        )
        return await anext(self._outputs)

    async def close(self) -> None:
        """End the request; its KV stays in vLLM's prefix cache as long as there is room."""
        await self._outputs.aclose()


class RowReader:
    """Gives logits rows after paths. All of it runs on the engine's loop.

    board: where workers write them; None: they come as log-probabilities of all tokens, in Python
    objects, which is slow. most, most_tokens: requests that stay open while nobody asks, and the
    tokens of their paths: they hold places in the batch and KV.
    """

    def __init__(
        self,
        engine: Any,
        n_vocab: int,
        *,
        board: SharedLogitsBuffer | None,
        most: int,
        most_tokens: int,
    ) -> None:
        self.engine = engine
        self.n_vocab = n_vocab
        self.board = board
        self.most = most
        self.most_tokens = most_tokens
        self.n_opened = self.n_extended = 0
        self._idle: OrderedDict[Path, OpenRequest] = OrderedDict()
        self._idle_tokens = 0
        self._numbers = itertools.count()
        self._room: asyncio.Semaphore | None = None

    async def rows(self, paths: Sequence[Path], loras: dict[str | None, Any]) -> list[Floats]:
        """Return the row after each path. Raises the first thing that went wrong, if any did."""
        if self._room is None:
            n_slots = self.most if self.board is None else self.board.n_slots
            self._room = asyncio.Semaphore(max(n_slots, 1))
        work = [self._row(path, loras[path[0]]) for path in paths]
        found = await asyncio.gather(*work, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found  # type: ignore[return-value]

    async def close(self) -> None:
        """End all requests that are open."""
        while self._idle:
            await self._pop().close()

    async def _row(self, path: Path, lora: Any) -> Floats:
        assert self._room is not None
        async with self._room:
            slot = -1 if self.board is None else self.board.free.popleft()
            try:
                return await self._ask(path, lora, slot)
            finally:
                if self.board is not None:
                    self.board.free.append(slot)

    async def _ask(self, path: Path, lora: Any, slot: int) -> Floats:
        wish = None if self.board is None else (slot, self.board.ticket())
        params = row_params(wish)
        if self.most:
            output = await self._by_session(path, lora, params)
        else:
            request = self._request_id()
            self.n_opened += 1
            given = tokens_input(list(path[1]))
            outputs = self.engine.generate(given, params, request, lora_request=lora)
            async for each in outputs:
                output = each
        if wish is None:
            return self._from_logprobs(output)
        assert self.board is not None
        row = self.board.read(*wish)
        if row is None:
            raise ForwardError(
                "vLLM answered, but no worker wrote the logits: this version does not call logits"
                ' processors as Weft knows it; engine_options={"rows": "logprobs"} does without'
            )
        return row

    async def _by_session(self, path: Path, lora: Any, params: SamplingParams) -> Any:
        adapter, ids = path
        above = (adapter, ids[:-1])
        session = self._idle.pop(above, None)
        if session is None:
            self.n_opened += 1
            session, new = OpenRequest(self.engine, self._request_id(), lora), ids
        else:
            self.n_extended += 1
            self._idle_tokens -= len(above[1])
            new = ids[-1:]
        try:
            output = await session.run(new, params)
        except BaseException:
            await session.close()
            raise
        await self._keep(path, session)
        return output

    async def _keep(self, path: Path, session: OpenRequest) -> None:
        """Let a request stay open; the one that was used longest ago goes where there are many."""
        before = self._idle.pop(path, None)
        self._idle[path] = session
        self._idle_tokens += 0 if before is not None else len(path[1])
        if before is not None:
            await before.close()
        while self._idle and (len(self._idle) > self.most or self._idle_tokens > self.most_tokens):
            await self._pop().close()

    def _pop(self) -> OpenRequest:
        (_, ids), session = self._idle.popitem(last=False)
        self._idle_tokens -= len(ids)
        return session

    def _from_logprobs(self, output: Any) -> Floats:
        given = output.outputs[0].logprobs
        row = np.full(self.n_vocab, -np.inf, dtype=np.float32)
        row[np.array(given.token_ids)] = given.logprobs
        return row

    def _request_id(self) -> str:
        return f"weft-row-{next(self._numbers)}"


def row_params(wish: tuple[int, int] | None) -> SamplingParams:
    """Return what asks for one row. wish: slot and ticket; None: by log-probabilities."""
    by_logprobs = {"logprobs": -1, "flat_logprobs": True}
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **(by_logprobs if wish is None else {"extra_args": {KEY: list(wish)}}),
    )
