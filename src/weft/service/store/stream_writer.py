"""Save the tokens of a stream while it runs, within a second."""

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
    """Saves new tokens in a thread, so that generation does not wait for the disk."""

    def __init__(self, stored: StoredLoom, numbered: Iterable[Heddle] = ()) -> None:
        """Configure the writer; the thread starts with the first node.

        numbered: nodes that have their numbers already, so that `add` need not save them at once.
        """
        self._stored = stored
        self._waiting: dict[str, Heddle] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-stream-writer", daemon=True)
        self._numbered = {node.id for node in numbered}

    def add(self, node: Heddle) -> None:
        """Register a node with new tokens, which the thread saves within a second.

        The first tokens of a node are saved before this returns, so that the node has its number.
        """
        if node.id not in self._numbered:
            self._numbered.add(node.id)
            self._save([node])
        if not self._thread.is_alive():
            self._thread.start()
        with self._lock:
            self._waiting[node.id] = node

    def close(self) -> None:
        """Stop the thread. Unsaved tokens are left to the commit."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Save new tokens once a second until `close`; body of the thread."""
        while not self._stopped.wait(FLUSH_INTERVAL_S):
            with self._lock:
                nodes, self._waiting = list(self._waiting.values()), {}
            if nodes:
                self._save(nodes)

    def _save(self, nodes: list[Heddle]) -> None:
        """Save the new tokens of nodes. A failure is logged: the commit writes them."""
        try:
            self._stored.append(nodes)
        except StoreError as error:  # the next call saves them, or the commit
            _log.warning("new tokens are not saved yet: %s", error)


def persist_stream(
    stored: StoredLoom, deltas: Iterable[Delta], kind: str, actor: str
) -> Generator[Delta, None, None]:
    """Yield the deltas of a stream, save their tokens, and commit the nodes at the end.

    kind, actor: of the commit; see `StoredLoom.commit`.
    """
    writer = StreamWriter(stored)
    try:
        if isinstance(deltas, Generator):
            with closing(deltas):
                yield from _register_nodes(writer, deltas)
        else:
            yield from _register_nodes(writer, deltas)
    finally:
        writer.close()
        stored.commit(kind, actor=actor)


def _register_nodes(writer: StreamWriter, deltas: Iterable[Delta]) -> Generator[Delta, None, None]:
    """Yield the deltas, and register their nodes with the writer."""
    for delta in deltas:
        if delta.token_ids:
            writer.add(delta.node)
        yield delta
