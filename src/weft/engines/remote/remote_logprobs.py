"""`RemoteLogprobs`: logprobs of given tokens by echo, and of the full vocabulary."""

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
from .transport import Transport, TransportError, final_error

_TOKEN = "token_id:"  # prefix of names that are ids


class RemoteLogprobs:
    """Requests logprobs from the server, for `Engine.forward`: of given tokens, or of all tokens.

    Args:
        transport: connection to the server.
        builder: builder of the requests.
        n_vocab: number of logprobs of a full vocabulary.
        max_concurrent: maximum number of concurrent requests.
    """

    def __init__(
        self, transport: Transport, builder: RequestBuilder, *, n_vocab: int, max_concurrent: int
    ) -> None:
        self._transport = transport
        self._builder = builder
        self._n_vocab = n_vocab
        self._max_concurrent = max_concurrent

    async def score(self, rows: Sequence[Row]) -> HostOutput:
        """Score given tokens by echo, without entropies and ranks.

        Raises:
            ForwardError: the server failed.
        """
        slots = asyncio.Semaphore(self._max_concurrent)
        scores = await asyncio.gather(*(self._score_row(row, slots) for row in rows))
        return HostOutput(np.zeros((0, 0), dtype=np.float32), list(scores))

    async def _score_row(self, row: Row, slots: asyncio.Semaphore) -> list[Score]:
        """Score a row's spans: the server echoes each path with its logprobs.

        slots: limits the number of concurrent requests.
        """
        # A span's last target follows the row, so each full path is requested once.
        paths = [(*_ids(row)[: span.start + 1], *span.targets) for span in row.scores]
        logprobs: dict[tuple[int, ...], list[float | None]] = {}
        for path in dict.fromkeys(paths):
            async with slots:
                (delta,) = read_deltas(await self._post(self._builder.echo_body(path)))
            logprobs[path] = delta.logprobs or []
            if not len(path) <= len(logprobs[path]) <= len(path) + 1:
                raise ForwardError(
                    f"{self._transport.address.base} scored {len(logprobs[path])} tokens of a path"
                    f" of {len(path)}"
                )
        return [
            _to_score(logprobs[path], span.start + 1, len(span.targets))
            for path, span in zip(paths, row.scores, strict=True)
        ]

    async def full_logits(self, rows: Sequence[Row]) -> HostOutput:
        """Return logits of the full vocabulary, and scores computed from them.

        Cost: a request and n_vocab numbers of JSON per position.

        Raises:
            ForwardError: the server failed.
        """
        slots = asyncio.Semaphore(self._max_concurrent)
        paths = dict.fromkeys(path for row in rows for path in _positions(row))

        async def request(path: tuple[int, ...]) -> NDArray[np.float32]:
            async with slots:
                return await self.all_logprobs(path)

        results = await asyncio.gather(*map(request, paths))
        by_path = dict(zip(paths, results, strict=True))
        logits = [by_path[_ids(row)[: at + 1]] for row in rows for at in row.logits_at]
        scores = [[self._score_span(row, span, by_path) for span in row.scores] for row in rows]
        stacked = np.stack(logits) if logits else np.zeros((0, self._n_vocab), dtype=np.float32)
        return HostOutput(stacked, scores)

    def _score_span(self, row: Row, span: Any, by_path: dict[tuple[int, ...], Any]) -> Score:
        """Score a span from full logits. by_path: logits float32 [V] after each path."""
        ids = _ids(row)

        def logits_of(first: int, last: int) -> NDArray[np.float32]:
            return np.stack([by_path[ids[: at + 1]] for at in range(first, last)])

        return score_span(span, self._n_vocab, logits_of)

    async def all_logprobs(self, path: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of all tokens after a path: float32 [V]."""
        logprobs = await self.top_logprobs(path)
        if len(logprobs) != self._n_vocab or max(logprobs) >= self._n_vocab:
            raise ForwardError(
                f"{self._transport.address.base} returned {len(logprobs)} of {self._n_vocab}"
                " logprobs of a row"
            )
        logits = np.empty(self._n_vocab, dtype=np.float32)
        logits[list(logprobs)] = list(logprobs.values())
        return logits

    async def top_logprobs(self, path: Sequence[int]) -> dict[int, float]:
        """Return the logprobs that the server returns for the token after a path, by id."""
        data = await self._post(self._builder.full_logprobs_body(path))
        try:
            (choice,) = data["choices"]
            top = choice["logprobs"]["top_logprobs"][-1]
            return {int(name.removeprefix(_TOKEN)): float(each) for name, each in top.items()}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ForwardError(
                f"{self._transport.address.base} returned no row of logprobs: {error!r:.100}"
            ) from None

    async def _post(self, body: dict[str, Any]) -> Any:
        """Send a request, with retries.

        Raises:
            ForwardError: all tries failed.
        """
        transport = self._transport
        for tries in range(transport.retry_policy.retries + 1):
            try:
                data = await transport.post(self._builder.path, body)
                list(read_deltas(data))
                return data
            except (TransportError, ProtocolError) as fault:
                if not fault.is_transient or tries == transport.retry_policy.retries:
                    raise final_error(transport.address.base, fault) from None
                retry_after_s = fault.retry_after_s if isinstance(fault, TransportError) else None
                await asyncio.sleep(transport.retry_policy.pause_s(tries, retry_after_s))
        raise AssertionError("unreachable")


def _ids(row: Row) -> tuple[int, ...]:
    """Return the row's token ids, which are always known: servers have no future tokens."""
    assert not isinstance(row.tokens, FutureTokens)  # only with async scheduling
    return tuple(row.tokens)


def _positions(row: Row) -> list[tuple[int, ...]]:
    """Return the paths whose next token a row requests."""
    at = list(row.logits_at)
    for span in row.scores:
        at += range(span.start, span.start + len(span.targets))
    ids = _ids(row)
    return [ids[: each + 1] for each in at]


def _to_score(logprobs: Sequence[float | None], first: int, n: int) -> Score:
    """Return logprobs first … first + n - 1 as a `Score`. Raise ForwardError if one is missing."""
    values = [each for each in logprobs[first : first + n] if each is not None]
    if len(values) != n:
        raise ForwardError("the server's response lacks some of the requested logprobs")
    return Score(
        logprobs=np.array(values, dtype=np.float32),
        entropies=None,
        ranks=None,
        top_ids=np.empty((n, 0), dtype=np.int64),
        top_logprobs=np.empty((n, 0), dtype=np.float32),
    )
