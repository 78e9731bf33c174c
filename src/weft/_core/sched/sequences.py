"""Token sequences that runs and branches extend token by token, each in a private tail."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engines.base import FutureTokens, Row, ScoreSpan
from ..kv.place import Cursor, Node, Place, Tail, common_prefix, resolve
from ..kv.tree import TokenTree

if TYPE_CHECKING:
    from .jobs import Job
    from .logits_cache import LogitsRow
    from .speculation import BranchDrafts

_log = logging.getLogger(__name__)
LAST_LOGITS = (0,)  # `Row.logits_at` of a row with one token


class KeptDraft(NamedTuple):
    """A draft token that a step has run after a sequence's own tokens.

    row: the logits after it.
    """

    token: int
    row: LogitsRow


class TokenSequence:
    """A path that grows token by token: the place `base`, then `tokens`.

    An open sequence has the path to `base` pinned. The KV of its tokens is in a private tail, as
    far as they were run; prefix matching does not see tails. A closed sequence has its KV in the
    tree, where other work can use it, and `base` is the place after it. KV that the engine cannot
    keep is recomputed when the sequence continues.

        root ── base ──┤├── tokens that were run (tail) ──┤├── tokens to run ──┤

    kept: draft tokens that were run after `tokens`. Their KV is at the end of the tail; whatever
        trims or closes the sequence frees it.

    drafts: the source of draft tokens for commits; None if no commit has looked for any.

    job: the job that runs it now; None if it is idle.

    lease: the lease of the branch that owns it; None without an owner.

    pin: the pinned position of `base`; None if the sequence is closed.

    was_admitted: True if a job with this sequence was admitted before.
    """

    __slots__ = (
        "_epoch",
        "_ids",
        "_row",
        "base",
        "drafts",
        "job",
        "kept",
        "lease",
        "pin",
        "tail",
        "tokens",
        "was_admitted",
    )

    def __init__(self, base: Place) -> None:
        self.base = base
        self.tokens: list[int] = []
        self.kept: list[KeptDraft] = []
        self.drafts: BranchDrafts | None = None
        self.tail: Tail | None = None
        self.job: Job | None = None
        self.lease: Lease | None = None
        self.was_admitted = False
        self.pin: Cursor | None = None
        self._row: Row | None = None
        self._epoch = -1
        self._ids: list[int] = []  # of the path to `base`; only for engines that hide their KV

    @property
    def depth(self) -> int:
        """Number of tokens of the path, including those to run."""
        return self.base.depth + len(self.tokens)

    @property
    def is_open(self) -> bool:
        """True if its path is pinned."""
        return self.pin is not None

    def end(self) -> Place:
        """Return the place after its last token, which need not be in the tree."""
        if not self.tokens:
            return self.base
        return Place(self.base.holds, self.base.namespace, self.base, tuple(self.tokens))

    def n_in_tail(self) -> int:
        """Return how many of its own tokens have KV in the tail."""
        return 0 if self.tail is None else min(self.tail.fragment.length, len(self.tokens))

    def cached_depth(self, path: Container[Node], ids: list[int]) -> int:
        """Return the depth of another path down to which this tail has its KV; 0 if none.

        Args:
            path: the nodes of the other path that are in the tree, its root included.
            ids: all token ids of that path.
        """
        if self.tail is None:
            return 0
        node, depth = resolve(self.tail.cursor)
        if node not in path or depth > len(ids):
            return 0
        same = common_prefix(self.tokens[: self.n_in_tail()], ids, depth)
        return depth + same if same else 0

    def open(self, tree: TokenTree) -> None:
        """Pin the path to `base`, which must be resident, and create a tail.

        The sequence must be closed. An engine that hides its KV gets no tail.
        """
        assert self.pin is None
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
        self.pin = pin

    def reserve(self, tree: TokenTree, n: int) -> None:
        """Reserve slots for the next `n` tokens; the budget may be exceeded afterwards.

        The sequence must have a tail.
        """
        tail = self.tail
        assert tail is not None
        length = tail.fragment.length + n
        if length > tail.reserved:
            tree.budget.reserve(tail, length)

    def row(
        self,
        tree: TokenTree,
        tokens: Sequence[int] | FutureTokens,
        n_before: int,
        scored: tuple[ScoreSpan, ...] = (),
        *,
        all_logits: bool = False,
    ) -> Row:
        """Return the engine's row that runs `tokens` after the first `n_before` own tokens.

        The same Row object is updated and returned in every step while the path does not change.

        Args:
            tree: the token tree.
            tokens: tokens to run; a draw in flight stands for one token that is not known yet.
            n_before: how many tokens of the sequence were run before.
            scored: spans to score, counted from the row's first token. Required for a row of more
                than one token, unless `all_logits` is True.
            all_logits: request the logits after each token instead of the last. Only for engines
                with fragments.
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
        row.scores = scored
        if all_logits:
            row.logits_at = tuple(range(row.n_tokens))
        else:
            row.logits_at = (row.n_tokens - 1,) if scored else LAST_LOGITS
        return row

    def _full_row(
        self, tokens: Sequence[int] | FutureTokens, n_before: int, scored: tuple[ScoreSpan, ...]
    ) -> Row:
        """Return a row of the full path, for engines that hide their KV. Arguments as for `row`."""
        assert not isinstance(tokens, FutureTokens)
        ids = [*self._ids, *self.tokens[:n_before], *tokens]
        first = len(ids) - len(tokens)
        scored = tuple(span._replace(start=span.start + first) for span in scored)
        return Row((), ids, 0, None, (len(ids) - 1,), scored, self.base.namespace)

    def trim(self, tree: TokenTree, n: int) -> None:
        """Drop the tail's slots from index `n` on; `tokens` does not change.

        If the engine cannot, drop the complete tail: the first `n` tokens move into `base`, without
        KV.
        """
        tail = self.tail
        if tail is None or tail.fragment.length <= n:
            return
        if self.kept and self.drafts is not None:
            self.drafts.count_kept(len(self.kept), is_used=False)
        self.kept = []
        tree.trim(tail.fragment, n)
        if tail.fragment.length != n:
            self.advance_base(tree, n)
            self.drop(tree)

    def close(self, tree: TokenTree) -> None:
        """Move the tail into the tree and unpin the path; does nothing if the sequence is closed.

        Tokens stay known even if the engine cannot keep their KV.
        """
        self.trim(tree, len(self.tokens))
        pin, tail = self.pin, self.tail
        if pin is None:
            return
        self.pin = self.tail = self._row = None
        if tail is not None:
            run = self.advance_base(tree, tail.fragment.length)
            try:
                end = tree.end_tail(tail, run)
                if run:
                    self.base.bind(end)
            except Exception as error:
                _log.warning("the engine could not keep the KV of a path: %r", error)
        tree.unpin(pin)

    def advance_base(self, tree: TokenTree, n: int) -> list[int]:
        """Move the first `n` own tokens from `tokens` into `base`; return them."""
        run, self.tokens = self.tokens[:n], self.tokens[n:]
        if run:
            self.base = Place(tree.holds, self.base.namespace, self.base, run)
        return run

    def drop(self, tree: TokenTree) -> None:
        """Free the tail with its KV, and unpin the path; `tokens` does not change."""
        tail, pin = self.tail, self.pin
        self.tail = self.pin = self._row = None
        self.kept = []
        if tail is not None:
            tree.drop_tail(tail)
        if pin is not None:
            tree.unpin(pin)


class Lease(weakref.ref[Any]):
    """A weak reference to the owner of a sequence, such as a branch.

    When the owner is garbage-collected, a callback queues the sequence for closing.
    """

    __slots__ = ("sequence",)
    sequence: TokenSequence


class SequenceRegistry:
    """The sequences of branches, which exist longer than one job.

    A sequence without a job is idle; the scheduler may close it at any time. Call all methods but
    `create` and `release` under the scheduler's lock.

    opened: the open sequences.

    released: leases that were released or whose owners were garbage-collected.
    """

    def __init__(self, tree: TokenTree, join: Callable[[Place], None]) -> None:
        """join: called with places whose node chains may be joined."""
        self.tree = tree
        self.opened: dict[TokenSequence, None] = {}
        self._join = join
        self._leases: dict[int, Lease] = {}
        self.released: deque[Any] = deque()

    def create(self, owner: Any, place: Place) -> TokenSequence:
        """Return a new, closed sequence at a place; it is closed for good once `owner` is freed."""
        sequence = TokenSequence(place)
        lease = sequence.lease = Lease(owner, self.released.append)
        lease.sequence = sequence
        self._leases[id(lease)] = lease
        return sequence

    def release(self, sequence: TokenSequence) -> Place:
        """End the owner's lease; return the place at the sequence's end.

        The next step closes the sequence, which makes its KV available at that place.
        """
        with self.tree.holds.lock:
            self.released.append(sequence.lease)
            return sequence.end()

    def is_leased(self, sequence: TokenSequence) -> bool:
        """Return True if the sequence has an owner whose lease has not ended."""
        return id(sequence.lease) in self._leases

    def open(self, sequence: TokenSequence) -> None:
        """Open a sequence (see `TokenSequence.open`) and register it as open."""
        sequence.open(self.tree)
        self.opened[sequence] = None

    def close(self, sequence: TokenSequence) -> None:
        """Close a sequence, so that its KV is in the tree, where others can use it or evict it."""
        self.opened.pop(sequence, None)
        if sequence.is_open:
            sequence.close(self.tree)
            self._join(sequence.base)

    def close_released(self) -> None:
        """Close sequences whose leases have ended; those in a job are closed later."""
        busy = []
        while self.released:
            lease = self.released.popleft()
            if lease.sequence.job is not None:
                busy.append(lease)
            elif self._leases.pop(id(lease), None) is not None:
                lease.sequence.lease = None  # breaks a reference cycle
                self.close(lease.sequence)
        self.released.extend(busy)

    def n_cached(self, place: Place) -> int:
        """Return how many tokens of a path have KV, in the tree or in tails; changes nothing.

        KV that a step in flight computes does not count. Cost: O(nodes + tokens not in the tree),
        plus O(depth + open sequences) if KV is missing in the tree.
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
        """Close all idle sequences; return True if there were any."""
        n_open = len(self.opened)
        self.close_released()
        for sequence in [sequence for sequence in self.opened if sequence.job is None]:
            self.close(sequence)
        return len(self.opened) < n_open
