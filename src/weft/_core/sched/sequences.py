"""A line: a path that goes on token by token in a private tail. Runs and commits have one each."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from ...engines.base import FutureTokens, Row, ScoreSpan
from ..kv.place import Cursor, Node, Place, Tail, common_prefix, resolve
from ..kv.tree import TokenTree

if TYPE_CHECKING:
    from .jobs import Job

_log = logging.getLogger(__name__)
LAST_LOGITS = (0,)  # the logits of a row of one token


class TokenSequence:
    """Known tokens after a place: `base`, then `tokens`.

    While it is open the path is pinned, and the slots of its tokens, as far as they were run, are
    in a tail of its own that content matching does not see. Closed, they are in the tree, and
    `base` is the place after them. What the engine cannot keep is computed again when the line goes
    on.

        root ── base ──┤├── tokens that were run (tail) ──┤├── tokens to run ──┤

    job: what runs it now. lease: who goes on with it, where that is no job. seen: a job has had its
    path before.
    """

    __slots__ = (
        "_epoch",
        "_ids",
        "_pin",
        "_row",
        "base",
        "job",
        "lease",
        "tail",
        "tokens",
        "was_admitted",
    )

    def __init__(self, base: Place) -> None:
        self.base = base
        self.tokens: list[int] = []
        self.tail: Tail | None = None
        self.job: Job | None = None
        self.lease: Lease | None = None
        self.was_admitted = False
        self._pin: Cursor | None = None
        self._row: Row | None = None
        self._epoch = -1
        self._ids: list[int] = []  # of the path to `base`; hidden engines only

    @property
    def depth(self) -> int:
        """Tokens of the path, those to run included."""
        return self.base.depth + len(self.tokens)

    @property
    def is_open(self) -> bool:
        """It has its path pinned."""
        return self._pin is not None

    def end(self) -> Place:
        """Return the place after its tokens, whatever of it is in the tree."""
        if not self.tokens:
            return self.base
        return Place(self.base.holds, self.base.namespace, self.base, tuple(self.tokens))

    def n_in_tail(self) -> int:
        """Return how many of its own tokens its tail has the KV of."""
        return 0 if self.tail is None else min(self.tail.fragment.length, len(self.tokens))

    def cached_depth(self, path: Container[Node], ids: list[int]) -> int:
        """Return the depth down to which its tail has the KV of a path, 0 for none of it.

        path: the nodes of what the tree knows of the path, its root too. ids: all of its tokens.
        """
        if self.tail is None:
            return 0
        node, depth = resolve(self.tail.cursor)
        if node not in path or depth > len(ids):
            return 0
        same = common_prefix(self.tokens[: self.n_in_tail()], ids, depth)
        return depth + same if same else 0

    def open(self, tree: TokenTree) -> None:
        """Pin the path, which is resident, and start a tail; an open line stays as it is."""
        if self._pin is not None:
            return
        cursor = tree.cut(tree.place(self.base))
        pin = tree.pin(cursor)
        try:
            if tree.fragments is not None:
                self.tail = tree.new_tail(cursor)
            else:
                self._ids = tree.ids(cursor)
        except BaseException:
            tree.unpin(pin)
            raise
        self._pin = pin

    def reserve(self, tree: TokenTree, n: int) -> None:
        """Ask the room for n more slots; it may be over then."""
        tail = self.tail
        if tail is not None and tail.fragment.length + n > tail.reserved:
            tree.budget.reserve(tail, tail.fragment.length + n)

    def row(
        self,
        tree: TokenTree,
        tokens: Sequence[int] | FutureTokens,
        n_before: int,
        scored: tuple[ScoreSpan, ...] = (),
    ) -> Row:
        """Return the engine's row that runs `tokens` after the line's first `n_before` own ones.

        One token, unless some of them are scored (counted from the row's first one). The same
        object every step, while it can be.
        """
        tail = self.tail
        if tail is None:
            return self._full_row(tokens, n_before, scored)
        row = self._row
        if row is None or self._epoch != tree.epoch:
            path = tree.path(tail.cursor)
            row = self._row = Row(path, (), 0, tail.fragment, adapter=self.base.namespace)
            self._epoch = tree.epoch
        row.tokens = tokens
        row.position = tail.cursor.depth + tail.fragment.length
        row.logits_at = LAST_LOGITS if not scored else (row.n_tokens - 1,)
        row.scores = scored
        return row

    def _full_row(
        self, tokens: Sequence[int] | FutureTokens, n_before: int, scored: tuple[ScoreSpan, ...]
    ) -> Row:
        """Hidden engines: the whole path every step."""
        assert not isinstance(tokens, FutureTokens)
        ids = [*self._ids, *self.tokens[:n_before], *tokens]
        first = len(ids) - len(tokens)
        scored = tuple(span._replace(start=span.start + first) for span in scored)
        return Row((), ids, 0, None, (len(ids) - 1,), scored, self.base.namespace)

    def trim(self, tree: TokenTree, n: int) -> None:
        """Forget the tail's slots from n on.

        Where the engine cannot, the tail is given up: the tokens before stay known.
        """
        tail = self.tail
        if tail is None or tail.fragment.length <= n:
            return
        tree.trim(tail.fragment, n)
        if tail.fragment.length != n:
            self._advance_base(tree, n)
            self.drop(tree)

    def close(self, tree: TokenTree) -> None:
        """Move the tail into the tree and let the path go; a closed line stays as it is.

        Tokens whose slots the engine does not take over are known all the same.
        """
        self.trim(tree, len(self.tokens))
        pin, tail = self._pin, self.tail
        if pin is None:
            return
        self._pin = self.tail = self._row = None
        if tail is not None:
            run = self._advance_base(tree, tail.fragment.length)
            try:
                end = tree.end_tail(tail, run)
                if run:
                    self.base.bind(end)
            except Exception as error:
                _log.warning("the engine could not keep the KV of a path: %r", error)
        tree.unpin(pin)

    def _advance_base(self, tree: TokenTree, n: int) -> list[int]:
        """Let the place be the one after the first n own tokens; return these."""
        run, self.tokens = self.tokens[:n], self.tokens[n:]
        if run:
            self.base = Place(tree.holds, self.base.namespace, self.base, run)
        return run

    def drop(self, tree: TokenTree) -> None:
        """Forget the tail and let the path go; the tokens stay."""
        tail, pin = self.tail, self._pin
        self.tail = self._pin = self._row = None
        if tail is not None:
            tree.drop_tail(tail)
        if pin is not None:
            tree.unpin(pin)


class Lease(weakref.ref[Any]):
    """Who goes on with a line; its callback tells when nobody does, and is no Python code."""

    __slots__ = ("sequence",)
    sequence: TokenSequence


class SequenceRegistry:
    """The lines that go on a token a call: a branch has one while it is committed to.

    An idle one may be closed at any time. opened: those that are. gone: leases of lines that were
    released, or whose owners are gone. All but `begin` and `release` is called under the
    scheduler's lock.
    """

    def __init__(self, tree: TokenTree, join: Callable[[Place], None]) -> None:
        """join: told of places whose chains may be joined."""
        self.tree = tree
        self.opened: dict[TokenSequence, None] = {}
        self._join = join
        self._leases: dict[int, Lease] = {}
        self.released: deque[Any] = deque()

    def create(self, owner: Any, place: Place) -> TokenSequence:
        """Return a line at a place, for as long as `owner` lives."""
        sequence = TokenSequence(place)
        lease = sequence.lease = Lease(owner, self.released.append)
        lease.sequence = sequence
        self._leases[id(lease)] = lease
        return sequence

    def release(self, sequence: TokenSequence) -> Place:
        """Go on with a line no longer; return the place at its end. Its KV is there at once."""
        with self.tree.holds.lock:
            self.released.append(sequence.lease)
            return sequence.end()

    def is_leased(self, sequence: TokenSequence) -> bool:
        """Whether somebody goes on with it."""
        return id(sequence.lease) in self._leases

    def open(self, sequence: TokenSequence) -> None:
        """Open a line, and know it as open."""
        sequence.open(self.tree)
        self.opened[sequence] = None

    def close(self, sequence: TokenSequence) -> None:
        """Close a line; its KV can be found, read and evicted by others."""
        self.opened.pop(sequence, None)
        if sequence.is_open:
            sequence.close(self.tree)
            self._join(sequence.base)

    def close_released(self) -> None:
        """Close the lines that were released, or whose owners are gone."""
        busy = []
        while self.released:
            lease = self.released.popleft()
            if lease.sequence.job is not None:
                busy.append(lease)
            elif self._leases.pop(id(lease), None) is not None:
                lease.sequence.lease = None  # else Python's collector of cycles would have to come
                self.close(lease.sequence)
        self.released.extend(busy)

    def n_cached(self, place: Place) -> int:
        """Return how many tokens of a path have KV, in the tree or in lines; changes nothing.

        What a step in flight computes is not there yet. Cost: O(nodes + tokens not in the tree);
        where some have no KV there, O(depth + open lines).
        """
        tree = self.tree
        if tree.fragments is None:
            return 0
        cursor = tree.find(place)
        nodes = list(tree.up(cursor))
        n = sum(min(node.end, cursor.depth) - node.start for node in nodes if node.resident)
        if n == place.depth or not self.opened:
            return n
        path, ids = {*nodes, tree.root(place.namespace).node}, place.ids()
        return max(n, *(sequence.cached_depth(path, ids) for sequence in self.opened))

    def close_idle(self) -> bool:
        """Close all idle lines; return whether there were any."""
        n_open = len(self.opened)
        self.close_released()
        for sequence in [sequence for sequence in self.opened if sequence.job is None]:
            self.close(sequence)
        return len(self.opened) < n_open
