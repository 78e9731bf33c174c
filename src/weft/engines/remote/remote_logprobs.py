"""`RemoteLogprobs`: rows of tokens that the host chose, scored by echo, or given whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core.sampling.metrics import score_span
from ...errors import ForwardError
from ..base import FutureTokens, HostOutput, Row, Score
from .request_builder import RequestBuilder
from .responses import ProtocolError, read_deltas
from .transport import Transport, TransportError, give_up_error

_TOKEN = "token_id:"  # what a server's names are that are ids


class RemoteLogprobs:
    """Asks for single steps, a request a place, at most `most` at once.

    n_vocab: ids of a whole row.
    """

    def __init__(
        self, transport: Transport, builder: RequestBuilder, *, n_vocab: int, most: int
    ) -> None:
        self._transport = transport
        self._builder = builder
        self._n_vocab = n_vocab
        self._most = most

    async def scored(self, rows: Sequence[Row]) -> HostOutput:
        """Score given tokens by echo; entropies and ranks are not known. Raises: ForwardError."""
        room = asyncio.Semaphore(self._most)
        scores = await asyncio.gather(*(self._echoed(row, room) for row in rows))
        return HostOutput(np.zeros((0, 0), dtype=np.float32), list(scores))

    async def _echoed(self, row: Row, room: asyncio.Semaphore) -> list[Score]:
        # A span's last target stands behind the row: each path is asked for whole, and once.
        paths = [(*_ids(row)[: span.start + 1], *span.targets) for span in row.scores]
        found: dict[tuple[int, ...], list[float | None]] = {}
        for path in dict.fromkeys(paths):
            async with room:
                (told,) = read_deltas(await self._asked(self._builder.scored(path)))
            found[path] = told.logprobs or []
            if not len(path) <= len(found[path]) <= len(path) + 1:
                raise ForwardError(
                    f"{self._transport.address.base} scored {len(found[path])} tokens of a path of"
                    f" {len(path)}"
                )
        return [
            _score(found[path], span.start + 1, len(span.targets))
            for path, span in zip(paths, row.scores, strict=True)
        ]

    async def whole(self, rows: Sequence[Row]) -> HostOutput:
        """Return whole rows of logits, and scores made of them. Raises: ForwardError.

        Cost: a request and n_vocab numbers of JSON for each place that is asked for.
        """
        room = asyncio.Semaphore(self._most)
        wanted = dict.fromkeys(path for row in rows for path in _places(row))

        async def one(path: tuple[int, ...]) -> NDArray[np.float32]:
            async with room:
                return await self.row(path)

        each = await asyncio.gather(*map(one, wanted))
        found = dict(zip(wanted, each, strict=True))
        logits = [found[_ids(row)[: at + 1]] for row in rows for at in row.logits_at]
        scores = [[self._of_rows(row, span, found) for span in row.scores] for row in rows]
        stacked = np.stack(logits) if logits else np.zeros((0, self._n_vocab), dtype=np.float32)
        return HostOutput(stacked, scores)

    def _of_rows(self, row: Row, span: Any, found: dict[tuple[int, ...], Any]) -> Score:
        ids = _ids(row)

        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            return np.stack([found[ids[: at + 1]] for at in range(first, last)])

        return score_span(span, self._n_vocab, logits_of)

    async def row(self, path: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of all tokens after a path: float32 [V]."""
        found = await self.likeliest(path)
        if len(found) != self._n_vocab or max(found) >= self._n_vocab:
            raise ForwardError(
                f"{self._transport.address.base} gave {len(found)} of {self._n_vocab} logprobs"
                " of a row"
            )
        logits = np.empty(self._n_vocab, dtype=np.float32)
        logits[list(found)] = list(found.values())
        return logits

    async def likeliest(self, path: Sequence[int]) -> dict[int, float]:
        """Return the logprobs that the server gives of the token after a path, by id."""
        data = await self._asked(self._builder.row(path))
        try:
            (choice,) = data["choices"]
            top = choice["logprobs"]["top_logprobs"][-1]
            return {int(name.removeprefix(_TOKEN)): float(each) for name, each in top.items()}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ForwardError(
                f"{self._transport.address.base} gave no row of logprobs: {error!r:.100}"
            ) from None

    async def _asked(self, body: dict[str, Any]) -> Any:
        """Ask until there is an answer. Raises: ForwardError."""
        transport = self._transport
        for tries in range(transport.retry_policy.retries + 1):
            try:
                data = await transport.post(self._builder.path, body)
                list(read_deltas(data))
                return data
            except (TransportError, ProtocolError) as fault:
                if not fault.may_pass or tries == transport.retry_policy.retries:
                    raise give_up_error(transport.address.base, fault) from None
                asked_s = fault.asked_s if isinstance(fault, TransportError) else None
                await asyncio.sleep(transport.retry_policy.pause_s(tries, asked_s))
        raise AssertionError("unreachable")


def _ids(row: Row) -> tuple[int, ...]:
    assert not isinstance(row.tokens, FutureTokens)  # of engines that overlap
    return tuple(row.tokens)


def _places(row: Row) -> list[tuple[int, ...]]:
    """Return the paths whose next token a row asks about."""
    at = list(row.logits_at)
    for span in row.scores:
        at += range(span.start, span.start + len(span.targets))
    ids = _ids(row)
    return [ids[: each + 1] for each in at]


def _score(logprobs: Sequence[float | None], first: int, n: int) -> Score:
    wanted = [each for each in logprobs[first : first + n] if each is not None]
    if len(wanted) != n:
        raise ForwardError("the server left out some of the logprobs that it was asked for")
    return Score(
        logprobs=np.array(wanted, dtype=np.float32),
        entropies=None,
        ranks=None,
        top_ids=np.empty((n, 0), dtype=np.int64),
        top_logprobs=np.empty((n, 0), dtype=np.float32),
    )
