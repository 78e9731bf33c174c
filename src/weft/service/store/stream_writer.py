"""A stream whose tokens are kept while it runs: durable within a second, though it may stall."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from ...errors import StoreError
from ...lm.results import Delta
from ...loom import Heddle

if TYPE_CHECKING:
    from .stored_loom import StoredLoom

FLUSH_INTERVAL_S = 0.25
_log = logging.getLogger(__name__)


class StreamWriter:
    """Keeps the new tokens of nodes that grow, in a thread: the model does not wait for a disk."""

    def __init__(self, kept: StoredLoom, begun: Iterable[Heddle] = ()) -> None:
        """begun: nodes that have their numbers already."""
        self._kept = kept
        self._waiting: dict[str, Heddle] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-follower", daemon=True)
        self._seen = {node.id for node in begun}

    def add(self, node: Heddle) -> None:
        """A node has new tokens. Its first ones are kept at once: it has its number then."""
        if node.id not in self._seen:
            self._seen.add(node.id)
            self._keep([node])
        if not self._thread.is_alive():
            self._thread.start()
        with self._lock:
            self._waiting[node.id] = node

    def close(self) -> None:
        """End the thread. What was not kept yet is for the commit."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(FLUSH_INTERVAL_S):
            with self._lock:
                nodes, self._waiting = list(self._waiting.values()), {}
            if nodes:
                self._keep(nodes)

    def _keep(self, nodes: list[Heddle]) -> None:
        try:
            self._kept.append(nodes)
        except StoreError as error:  # the next one brings it along, or the commit
            _log.warning("new tokens are not kept yet: %s", error)


def persist_stream(
    kept: StoredLoom, deltas: Iterable[Delta], kind: str, actor: str
) -> Generator[Delta, None, None]:
    """Yield the deltas of a stream; keep what they bring, and commit it, however it ends."""
    writer = StreamWriter(kept)
    try:
        if isinstance(deltas, Generator):
            with closing(deltas):
                yield from _watched(writer, deltas)
        else:
            yield from _watched(writer, deltas)
    finally:
        writer.close()
        kept.commit(kind, actor=actor)


def _watched(writer: StreamWriter, deltas: Iterable[Delta]) -> Generator[Delta, None, None]:
    for delta in deltas:
        if delta.token_ids:
            writer.add(delta.node)
        yield delta
