"""Prefill planning: chunks of rows that compute absent tokens or re-read known ones.

A claim is a path that a job wants pinned, with the logits and scores that it requests. Each step
plans chunks for claims, oldest first, within a token budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...engines.base import Fragment, RetainedRow, Row, ScoreSpan, Span
from ...errors import KVFull, is_out_of_memory
from ..kv.place import Cursor, Node, Place, node_at, resolve
from ..kv.tree import TokenTree
from .batch import BatchPart, as_forward_error
from .logits_cache import LogitsCache, PinnedLogits

if TYPE_CHECKING:
    from .jobs import Job
    from .queues import JobQueues


class LogitsRequest:
    """Request for logits or scores at token indices [first, last) of a path.

    Index i predicts token i + 1.

    top: None requests one row of logits. A number requests scores that list as many likeliest ids.

    final: the token to score at the path's end; None if the path has all tokens to score.

    remaining: ranges (first, last) of indices that no chunk computes yet.

    results: pairs (first index, PinnedLogits or Score), in the order of computation.
    """

    __slots__ = ("claim", "final", "first", "last", "remaining", "results", "top")

    def __init__(
        self,
        claim: PathClaim,
        first: int,
        last: int,
        top: int | None,
        final: int | None = None,
    ) -> None:
        self.claim = claim
        self.first = first
        self.last = last
        self.top = top
        self.final = final
        self.remaining: list[tuple[int, int]] = [(first, last)]
        self.results: list[tuple[int, Any]] = []

    def pop_range(self, first: int, last: int) -> list[tuple[int, int]]:
        """Remove the indices in [first, last) from `remaining`; return the removed ranges."""
        if self.top is None:  # one row, the usual case
            taken = self.remaining if first <= self.first < last else []
            if taken:
                self.remaining = []
            return taken
        taken, left = [], []
        for a, b in self.remaining:
            low, high = max(a, first), min(b, last)
            if low >= high:
                left.append((a, b))
                continue
            taken.append((low, high))
            left += [(x, y) for x, y in ((a, low), (high, b)) if x < y]
        self.remaining = left
        return taken

    @property
    def complete(self) -> bool:
        """True if `results` covers all indices."""
        if self.top is None:
            return bool(self.results)
        return sum([len(part.logprobs) for _, part in self.results]) == self.last - self.first

    def answers(self) -> list[Any]:
        """Return the results (PinnedLogits or Score) in order of their indices."""
        return [part for _, part in sorted(self.results, key=itemgetter(0))]


class PathClaim:
    """A path that a job needs pinned: `tokens` after `place`.

    at_node_end: split the node around the path's end, as tails and exact slot counts need it.

    needs_kv: the claim is complete only when the path is resident.

    index: index of the claim's item in its job.

    requests: requests for logits and scores of the path.

    cursor: the path's end in the tree; None while its job is not admitted.

    pin: the cursor to unpin; None while the job is not admitted.

    outstanding: how many chunks, planned or in flight, compute something for it.

    was_admitted: True if the path was admitted before, so it is not counted as reused once more.
    """

    __slots__ = (
        "at_node_end",
        "cursor",
        "index",
        "job",
        "needs_kv",
        "outstanding",
        "pin",
        "place",
        "requests",
        "tokens",
        "was_admitted",
    )

    def __init__(
        self, job: Job, place: Place, tokens: Sequence[int] = (), *, at_node_end: bool = True
    ) -> None:
        self.job = job
        self.place = place
        self.tokens = tokens
        self.at_node_end = at_node_end
        self.needs_kv = True
        self.index = 0
        self.requests: list[LogitsRequest] = []
        self.cursor: Cursor | None = None
        self.pin: Cursor | None = None
        self.outstanding = 0
        self.was_admitted = False

    @property
    def depth(self) -> int:
        """Number of tokens of the path."""
        return self.place.depth + len(self.tokens)

    def pin_path(self, tree: TokenTree) -> tuple[int, int]:
        """Insert the path into the tree and pin it.

        Returns: how many of its slots are cached, and how many must be computed. Slots on the host
            count as cached: they are copied, not computed.
        """
        budget = tree.budget
        promised = budget.promised
        place = self.place  # a place at the root is not inserted: it may be shared
        end = tree.place(place) if place.depth else tree.root(place.namespace)
        if self.tokens:
            end = tree.extend(end, self.tokens)
        if self.at_node_end or not end.node.resident:
            end = tree.cut(end)
        self.cursor = self.pin = tree.pin(end)
        missing = budget.promised - promised
        if missing and tree.host.slots:
            missing -= sum(len(node.tokens) for node in tree.up(self.pin) if node.host is not None)
        return end.depth - missing, missing

    def unpin_path(self, tree: TokenTree) -> None:
        """Unpin the path, if it is pinned."""
        if self.pin is not None:
            tree.unpin(self.pin)
        self.pin = self.cursor = None

    def path(self) -> Cursor:
        """Return the resolved end of the path in the tree. The claim's job must be admitted."""
        assert self.cursor is not None
        self.cursor = cursor = resolve(self.cursor)
        return cursor

    def open_requests(self) -> list[LogitsRequest]:
        """Return the requests with indices that no chunk covers."""
        return [request for request in self.requests if request.remaining]


class PrefillChunk(BatchPart):
    """A row that computes absent tokens of a path, or re-runs known ones for their logits.

    It covers the path's token indices [start, start + len(tokens)).
    """

    in_tree = True

    def __init__(
        self,
        job: Job,
        start: int,
        tokens: Sequence[int],
        path: tuple[Span, ...],
        pin: Cursor,
        fragment: Fragment | None,
        leaf: Node | None = None,
    ) -> None:
        super().__init__(pin.node.namespace)
        self.job = job  # fails with the chunk
        self.start = start  # index of its first token in the path
        self.tokens = tokens
        self.path = path  # KV before it
        self.pin = pin  # the cursor at its end, pinned
        self.fragment = fragment  # receives its KV; None for a read
        self.leaf = leaf  # the node that owns `fragment` already and absorbs the tokens
        self.from_depth = start if leaf is None else leaf.start  # first depth that it marks
        self.answers_for: list[tuple[LogitsRequest, int, int]] = []  # request, first, last
        self.score_spans: list[tuple[LogitsRequest, int, ScoreSpan]] = []
        self.logits_at: tuple[int, ...] = ()  # row-local indices of requested logits
        self.claims: dict[PathClaim, None] = {}  # claims to check after it has finished
        self.nodes: list[Node] = []  # the absent nodes that it computes

    @property
    def end(self) -> int:
        """Index in the path after the chunk's last token."""
        return self.start + len(self.tokens)

    def add_waiter(self, claim: PathClaim) -> None:
        """Let a claim wait for this chunk: it is checked again after the chunk has finished."""
        if claim not in self.claims:
            self.claims[claim] = None
            claim.outstanding += 1

    def rows(self) -> list[Row]:
        answers_for, start = self.answers_for, self.start
        at: tuple[int, ...] = ()
        if len(answers_for) == 1:  # the usual case
            if answers_for[0][0].top is None:
                at = (answers_for[0][1] - start,)
        else:
            wanted = {first - start for request, first, _ in answers_for if request.top is None}
            at = tuple(sorted(wanted))
        self.logits_at = at
        spans = tuple([span for _, _, span in self.score_spans]) if self.score_spans else ()
        row = Row(self.path, self.tokens, self.start, self.fragment, at, spans, self.namespace)
        return [row]

    def n_logits(self) -> int:
        return len(self.logits_at)

    def jobs(self) -> Iterable[Job]:
        return dict.fromkeys([self.job, *(claim.job for claim in self.claims)])

    def n_stored(self) -> int:
        return len(self.logits_at)

    def process_outputs(self, queues: JobQueues) -> None:
        error: Exception | None = None
        try:
            if queues.prefill.attach(self):
                queues.to_join.append(queues.tree.hold(self.pin))
        except Exception as raised:
            error = raised
        if self.logits_at:
            self._deliver_logits(queues)
        for number, (request, first, _) in enumerate(self.score_spans):
            queues.guard(request.claim.job, self._deliver_score, request, first, number)
        queues.prefill.finish(self, queues)
        if error is not None:
            queues.fail(self.job, as_forward_error(error))

    def _deliver_logits(self, queues: JobQueues) -> None:
        """Attach the logits rows to the tree, and give them to the requests."""
        assert self.stored_in is not None
        pinned: dict[int, PinnedLogits] = {}
        number = self.first_stored
        for offset, row in zip(self.logits_at, self.stored, strict=True):
            at = self.start + offset
            place = self.pin if at + 1 == self.pin.depth else Cursor(self.pin.node, at + 1)
            queues.logits_cache.attach(place, row)
            pinned[at] = PinnedLogits(row, RetainedRow(self.stored_in, number))
            number += 1
        for request, first, _ in self.answers_for:
            if request.top is None:
                request.results.append((first, pinned[first]))

    def _deliver_score(self, request: LogitsRequest, first: int, number: int) -> None:
        """Give a request its part of the row's score."""
        assert self.output is not None
        request.results.append((first, self.output.scores()[self.first_row][number]))

    def discard(self, queues: JobQueues) -> None:
        queues.prefill.revert(self)
        for request, first, last in self.answers_for:
            request.remaining.append((first, last))
        queues.prefill.finish(self, queues)


class PrefillPlanner:
    """Plans chunks for claims, and gives claims the results of their chunks.

    The absent end of a claim's path is one chunk, cut to the budget. If several paths diverge below
    an absent node, the oldest claim's chunk computes it. The others are planned after that chunk
    has finished, so rows of a step never depend on each other. Requests in the resident part are
    answered from the logits cache, or by running those tokens again without writing KV.

        root ──── resident ────┬──── absent ────┬──── absent ──── cursor
        reads:  └─ requests ───┘└─────── this step, one chunk ────────┘ └── another claim's: a later
            step
    """

    def __init__(
        self,
        tree: TokenTree,
        logits_cache: LogitsCache,
        *,
        n_to_run: Callable[..., int] | None = None,
    ) -> None:
        """Create a planner.

        Args:
            tree: the token tree.
            logits_cache: answers requests whose logits are cached.
            n_to_run: `Engine.n_tokens_to_run`: returns the cost of a full path in a step, for
                engines that hide their KV. None means that each path costs one token.
        """
        self.tree = tree
        self.logits_cache = logits_cache
        self._n_to_run = n_to_run
        self.active: dict[PrefillChunk, None] = {}  # planned, neither finished nor discarded
        self.n_computed = 0
        self.n_reread = 0
        self._writers: dict[Node, PrefillChunk] = {}  # absent nodes that a chunk computes
        self._leaf_writers: dict[Node, PrefillChunk] = {}  # leaves whose fragments a chunk writes
        self._rereads: dict[tuple[Cursor, int], PrefillChunk] = {}  # reads of the planned step

    # Planning ---------------------------------------------------------------------------------

    def plan(
        self, claims: Iterable[tuple[PathClaim, int]], budget: int, queues: JobQueues
    ) -> list[PrefillChunk]:
        """Return the chunks that the next step runs for claims.

        May split nodes. A claim joins a planned chunk that computes the end of its path even if the
        budget is used up, because that costs nothing.

        Args:
            claims: pairs of a claim and the maximum tokens for it; earlier claims go first.
            budget: maximum tokens of all chunks.
            queues: the scheduler's jobs.
        """
        self._rereads = {}
        before = len(self.active)
        for claim, limit in claims:
            if budget <= 0 and not self._is_planned(claim):
                continue
            limit = max(min(budget, limit), 0)
            try:  # inlined `JobQueues.guard`: this runs for many claims in each step
                if not claim.job.done:
                    budget -= self._plan_claim(claim, limit)
            except Exception as error:
                queues.handle_error(claim.job, error)
            if claim.outstanding:
                queues.unscheduled.pop(claim, None)
            else:
                queues.recheck(claim)  # other chunks have computed its path
        self._rereads = {}
        return list(self.active)[before:]

    def _is_planned(self, claim: PathClaim) -> bool:
        """Return True if a chunk planned in this step, not yet launched, computes the path's end.

        The claim can join such a chunk at no cost.
        """
        return (
            self.tree.fragments is not None and self._current_chunk(claim.path().node) is not None
        )

    def n_remaining(self, claim: PathClaim) -> int:
        """Return approximately how many tokens must still run to complete a claim.

        Cost: O(absent nodes).
        """
        if self.tree.fragments is None:
            return claim.depth
        n = absent = 0
        for request in claim.requests:
            if request.remaining and request.last - request.first >= n:
                n = request.last - request.first + 1
        assert claim.cursor is not None
        node = node_at(*claim.cursor)
        while node.fragment is None and node.parent is not None:
            absent += len(node.tokens)
            node = node.parent
        return max(n, absent)

    def pop_counts(self) -> tuple[int, int]:
        """Return how many tokens were planned to compute, and to re-read, since the last call."""
        counts = self.n_computed, self.n_reread
        self.n_computed = self.n_reread = 0
        return counts

    def is_complete(self, claim: PathClaim) -> bool:
        """Return True if a claim has its KV, logits and scores.

        Answers its requests from the logits cache first. No chunk of the claim may be in flight.
        """
        if claim.requests:
            self._use_cached_logits(claim)
        for request in claim.requests:
            if not request.complete:
                return False
        if not claim.needs_kv or self.tree.fragments is None:
            return True
        assert claim.cursor is not None
        node = node_at(*claim.cursor)
        if node.fragment is None and node.parent is not None:
            return False
        return not self.waits_for_writer(claim, node)

    def is_being_written(self, cursor: Cursor) -> bool:
        """Return True if a planned or launched chunk appends to the fragment at a position."""
        return resolve(cursor).node in self._leaf_writers

    def waits_for_writer(self, claim: PathClaim, node: Node) -> bool:
        """Return True if a chunk appends to a node's fragment, so nothing may be attached below.

        The claim then waits for that chunk, and is checked again after it has finished.
        """
        part = self._leaf_writers.get(node)
        if part is None:
            return False
        part.add_waiter(claim)
        return True

    def _use_cached_logits(self, claim: PathClaim) -> None:
        """Answer requests for one logits row from the cache."""
        assert claim.cursor is not None
        for request in claim.requests:
            if request.remaining and request.top is None:
                cursor = claim.cursor
                if request.last != cursor.depth:
                    cursor = Cursor(cursor.node, request.last)
                row = self.logits_cache.find(cursor)
                pinned = None if row is None else self.logits_cache.pin(row)
                if pinned is not None:
                    request.pop_range(request.first, request.last)
                    request.results.append((request.first, pinned))

    def _plan_claim(self, claim: PathClaim, budget: int) -> int:
        """Plan chunks for one claim; return their cost in tokens.

        budget: maximum cost.
        """
        self._use_cached_logits(claim)
        if self.tree.fragments is None:
            return self._plan_full_path(claim)
        absent = self._absent_nodes(claim)
        known = absent[0].start if absent else claim.path().depth
        cost = self._plan_reread(claim, known, budget)
        if absent:
            cost += self._plan_absent(claim, absent, budget - cost)
            part = self._writers.get(absent[0])
            if part is not None:
                part.add_waiter(claim)
        return cost

    def _absent_nodes(self, claim: PathClaim) -> list[Node]:
        """Load offloaded nodes of a path, as far as possible; return its absent nodes from the top.

        A node in the list can be offloaded, if a node above it is absent.
        """
        while True:
            absent, node = list[Node](), claim.path().node
            while node.fragment is None and node.parent is not None:
                absent.append(node)
                node = node.parent
            if not absent or absent[-1].host is None or absent[-1].in_flight:
                return absent[::-1]
            self._load_host(absent[-1])

    def _load_host(self, node: Node) -> None:
        """Load an offloaded node to the device.

        If memory is short, free its host copy: chunks in smaller steps can recompute the node.
        """
        try:
            self.tree.load_host(node)
        except Exception as error:
            if not (isinstance(error, KVFull) or is_out_of_memory(error)):
                raise
            self.tree.host.free(node)

    def _plan_absent(self, claim: PathClaim, absent: list[Node], budget: int) -> int:
        """Let one chunk compute absent nodes of a claim's path; return the added cost in tokens.

        If a chunk of the planned step computes the first of these nodes already, it is extended.
        The last node is split if it exceeds the budget.

        Args:
            claim: the claim.
            absent: its absent nodes, topmost first.
            budget: maximum cost.
        """
        first = absent[0]
        part, above = self._writers.get(first), first.parent
        if part is None and above is not None and self.waits_for_writer(claim, above):
            return 0
        if part is not None and part.launched:
            part = None
        cost, end = 0, first.start
        for node in absent:
            if part is not None and self._writers.get(node) is part:
                end = node.end
                continue
            if node.in_flight or node.host is not None or cost >= budget:
                break
            if part is not None and part.end != node.start:
                break  # the chunk continues into another child
            if len(node.tokens) > budget - cost:
                node = self.tree.split(node, node.start + budget - cost)
            part = self._new_chunk(claim, node) if part is None else self._extend_chunk(part, node)
            cost += len(node.tokens)
            end = part.end
        if part is not None:
            self._assign(claim, part, end)
        return cost

    def _current_chunk(self, node: Node) -> PrefillChunk | None:
        """Return the planned chunk, not yet launched, that computes a node; None without one."""
        part = self._writers.get(node)
        return part if part is not None and not part.launched else None

    def _new_chunk(self, claim: PathClaim, node: Node) -> PrefillChunk:
        """Create a chunk that computes a node of the claim's path."""
        assert self.tree.fragments is not None and node.parent is not None
        leaf = self.tree.growable_leaf(node)
        if leaf is not None:
            assert leaf.parent is not None
            path = self.tree.path(Cursor(leaf.parent, leaf.start))
            fragment = leaf.fragment
        else:
            path = self.tree.path(Cursor(node.parent, node.parent.end))
            fragment = self.tree.fragments.new(node.parent.fragment)
        pin = self.tree.pin(Cursor(node, node.end))
        part = PrefillChunk(claim.job, node.start, node.tokens, path, pin, fragment, leaf)
        self.active[part] = None
        if leaf is not None:
            leaf.in_flight = True
            self._leaf_writers[leaf] = part
        self._mark_writing(part, node)
        return part

    def _extend_chunk(self, part: PrefillChunk, node: Node) -> PrefillChunk:
        """Extend a chunk by `node`, which continues its path; return the chunk."""
        pin = self.tree.pin(Cursor(node, node.end))
        self.tree.unpin(part.pin)
        part.pin, part.tokens = pin, [*part.tokens, *node.tokens]
        self._mark_writing(part, node)
        return part

    def _mark_writing(self, part: PrefillChunk, node: Node) -> None:
        """Record that a chunk computes a node."""
        node.in_flight = True
        self.n_computed += len(node.tokens)
        self._writers[node] = part
        part.nodes.append(node)

    def _plan_reread(self, claim: PathClaim, known: int, budget: int) -> int:
        """Plan chunks that run resident tokens again, because their logits or scores are requested.

        Args:
            claim: the claim.
            known: depth down to which the path is resident.
            budget: maximum cost.

        Returns: the cost in tokens.
        """
        assert claim.cursor is not None
        cost = 0
        for request in claim.requests:
            if not request.remaining or request.first >= known:
                continue
            for first, last in [(a, min(b, known)) for a, b in request.remaining if a < known]:
                last = min(last, first + max(budget - cost, 0))
                if first >= last:
                    continue
                cursor = resolve(Cursor(claim.cursor.node, last))
                part = self._rereads.get((cursor, first))
                if part is None:
                    part = self._rereads[cursor, first] = self._new_reread(claim, cursor, first)
                    cost += last - first
                self._assign_request(claim, request, part, part.end)
        return cost

    def _new_reread(self, claim: PathClaim, cursor: Cursor, first: int) -> PrefillChunk:
        """Create a chunk that re-runs known tokens from index `first` on."""
        above = resolve(Cursor(cursor.node, first))
        tokens = self.tree.ids(cursor, first)
        self.n_reread += len(tokens)
        path = self.tree.path(above)
        part = PrefillChunk(claim.job, first, tokens, path, self.tree.pin(cursor), None)
        self.active[part] = None
        return part

    def _plan_full_path(self, claim: PathClaim) -> int:
        """Plan one row of the full path, for engines that hide their KV.

        Returns: its cost in tokens; 0 if another claim's row is used, or nothing is requested.
        """
        assert claim.cursor is not None
        requests = claim.open_requests()
        if not requests:
            return 0
        last = max(b for request in requests for _, b in request.remaining)
        cursor = resolve(Cursor(claim.cursor.node, last))
        part = self._rereads.get((cursor, 0))
        cost = 0
        if part is None:
            tokens = self.tree.ids(cursor)
            part = PrefillChunk(claim.job, 0, tokens, (), self.tree.pin(cursor), None)
            self.active[part] = None
            self._rereads[cursor, 0] = part
            cost, n_run = 1, last  # a path counts as one token, unless the engine knows better
            if self._n_to_run is not None:
                first = min(a for request in requests for a, _ in request.remaining)
                cost = n_run = self._n_to_run(tokens, first, cursor.node.namespace)
            self.n_computed += n_run
        self._assign(claim, part, part.end)
        return cost

    def _assign(self, claim: PathClaim, part: PrefillChunk, end: int) -> None:
        """Let a chunk answer a claim's requests.

        end: the index in the path before which the chunk and the claim have the same tokens.
        """
        part.add_waiter(claim)
        for request in claim.requests:
            if request.remaining:
                self._assign_request(claim, request, part, end)

    def _assign_request(
        self, claim: PathClaim, request: LogitsRequest, part: PrefillChunk, end: int
    ) -> None:
        """Let a chunk answer one request of a claim, as far as it covers the request's indices."""
        assert claim.cursor is not None
        part.add_waiter(claim)
        for first, last in request.pop_range(part.start, end):
            part.answers_for.append((request, first, last))
            if request.top is not None:
                targets = self._targets(request, claim.cursor.node, first, last)
                part.score_spans.append(
                    (request, first, ScoreSpan(first - part.start, targets, request.top))
                )

    def _targets(
        self, request: LogitsRequest, node: Node, first: int, last: int
    ) -> tuple[int, ...]:
        """Return the tokens that the path's indices [first, last) predict."""
        if request.final is None or last < request.last:
            return tuple(self.tree.ids(resolve(Cursor(node, last + 1)), first + 1))
        known = self.tree.ids(resolve(Cursor(node, last)), first + 1) if first + 1 < last else []
        return (*known, request.final)

    # Results ----------------------------------------------------------------------------------

    def attach(self, part: PrefillChunk) -> bool:
        """Give the KV of a finished chunk to the nodes that have its tokens now.

        Returns: True if nodes got fragments of their own, so that node chains may be joined.
        """
        self._clear_marks(part)
        fragment, part.fragment = part.fragment, None  # consumed, even if this fails
        if fragment is None:
            return False
        assert self.tree.fragments is not None
        if part.leaf is not None:
            self.tree.absorb_chunk(part.leaf, part.pin)
            return False
        try:
            self.tree.fragments.settle(fragment)
        except BaseException:
            self.tree.free(fragment)
            raise
        self.tree.fill(part.pin, part.start, fragment)
        return True

    def revert(self, part: PrefillChunk) -> None:
        """Drop the KV of a chunk whose step failed or was never launched."""
        self._clear_marks(part)
        fragment, part.fragment = part.fragment, None
        if part.leaf is not None and part.leaf.fragment is not None:
            self.tree.trim(part.leaf.fragment, len(part.leaf.tokens))
        elif fragment is not None:
            self.tree.free(fragment)

    def finish(self, part: PrefillChunk, queues: JobQueues) -> None:
        """Remove a chunk, unpin its path, and check the claims that wait for it again."""
        del self.active[part]
        for claim in part.claims:
            claim.outstanding -= 1
            queues.recheck(claim)
        self.tree.unpin(part.pin)

    def _clear_marks(self, part: PrefillChunk) -> None:
        """Remove the records that a chunk computes its nodes."""
        for node in part.nodes:
            self._writers.pop(node, None)
        if part.leaf is not None:
            self._leaf_writers.pop(part.leaf, None)
        if part.fragment is not None:
            below = node_at(*part.pin)
            while below.parent is not None and below.end > part.from_depth:
                below.in_flight = False
                below = below.parent
