"""What claims need and how steps give it: absent tokens computed, known ones read again.

A claim is a path that a job wants pinned, with what it wants to know of it. Each step packs parts
for claims, oldest first, within a budget of tokens.
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
    """Logits or scores at token indices [first, last) of a path; index i gives token i + 1.

    top: None for one logits row, else how many likeliest ids a score lists. `parts` collects the
    answers: a LentRow, or Scores.
    """

    __slots__ = ("claim", "first", "last", "remaining", "results", "top")

    def __init__(self, claim: PathClaim, first: int, last: int, top: int | None) -> None:
        self.claim = claim
        self.first = first
        self.last = last
        self.top = top
        self.remaining: list[tuple[int, int]] = [(first, last)]
        self.results: list[tuple[int, Any]] = []

    def pop_range(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take what lies in [first, last) out of the open ranges."""
        if self.top is None:  # one row, mostly
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
        """All answers are there."""
        if self.top is None:
            return bool(self.results)
        return sum([len(part.logprobs) for _, part in self.results]) == self.last - self.first

    def answers(self) -> list[Any]:
        """Return the answers in order."""
        return [part for _, part in sorted(self.results, key=itemgetter(0))]


class PathClaim:
    """A path that a job needs pinned: `tokens` after `place`.

    exact: the path's end must be a node's, as a tail starts there and as paths that must fit
    together are counted. wants_kv: the claim is complete only when the path is resident. number:
    the job's own.
    cursor, pin: its end in the tree, while its job is admitted. outstanding: parts, packed or on
    their way, that work for it.
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
        """Tokens of the path."""
        return self.place.depth + len(self.tokens)

    def pin_path(self, tree: TokenTree) -> tuple[int, int]:
        """Put the path into the tree and pin it; return slots found, and slots to compute.

        Slots on the host are found: they are copied, not computed.
        """
        budget = tree.budget
        promised = budget.promised
        place = self.place  # at the root it needs no hold, and may be everybody's
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
        """Let the path go."""
        if self.pin is not None:
            tree.unpin(self.pin)
        self.pin = self.cursor = None

    def path(self) -> Cursor:
        """Return the end of its path as the tree has it now; for claims of admitted jobs."""
        assert self.cursor is not None
        self.cursor = cursor = resolve(self.cursor)
        return cursor

    def open_requests(self) -> list[LogitsRequest]:
        """Return the needs that no step has taken on yet."""
        return [request for request in self.requests if request.remaining]


class PrefillChunk(BatchPart):
    """A row that is no line's: absent tokens to compute, or known tokens to read again.

    Covers the path's token indices [start, start + len(tokens)). owner: who fails with it. pin: the
    cursor at its end. fragment: where the slots go; None for a read. leaf: the node whose fragment
    that is already, and which takes the tokens in. takes: (need, first, last) answered by it.
    logits_at: row-local indices whose logits somebody takes, once its rows are made. claims: those
    that look again when it has landed. nodes: what it computes.
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
        self.job = job
        self.start = start
        self.tokens = tokens
        self.path = path
        self.pin = pin
        self.fragment = fragment
        self.leaf = leaf
        self.from_depth = start if leaf is None else leaf.start
        self.answers_for: list[tuple[LogitsRequest, int, int]] = []
        self.score_spans: list[tuple[LogitsRequest, int, ScoreSpan]] = []
        self.logits_at: tuple[int, ...] = ()
        self.claims: dict[PathClaim, None] = {}
        self.nodes: list[Node] = []

    @property
    def end(self) -> int:
        """Token index after the last one."""
        return self.start + len(self.tokens)

    def add_waiter(self, claim: PathClaim) -> None:
        """Let a claim look again when this has landed."""
        if claim not in self.claims:
            self.claims[claim] = None
            claim.outstanding += 1

    def rows(self) -> list[Row]:
        answers_for, start = self.answers_for, self.start
        at: tuple[int, ...] = ()
        if len(answers_for) == 1:  # mostly
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
            self._hand_out_logits(queues)
        for number, (request, first, _) in enumerate(self.score_spans):
            queues.guard(request.claim.job, self._hand_out_score, request, first, number)
        queues.prefill.finish(self, queues)
        if error is not None:
            queues.fail(self.job, as_forward_error(error))

    def _hand_out_logits(self, queues: JobQueues) -> None:
        """Keep the rows on the tree, and give them to who asked."""
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

    def _hand_out_score(self, request: LogitsRequest, first: int, number: int) -> None:
        assert self.output is not None
        request.results.append((first, self.output.scores()[self.first_row][number]))

    def discard(self, queues: JobQueues) -> None:
        queues.prefill.revert(self)
        for request, first, last in self.answers_for:
            request.remaining.append((first, last))
        queues.prefill.finish(self, queues)


class PrefillPlanner:
    """Packs parts for claims, and gives claims what their parts brought.

    Per claim: the absent end of its path is one part, chunked to the budget. Where paths part below
    an absent node, the oldest goes on in that part and the others follow it, to be packed when it
    has landed, so rows of a step never depend on each other. Needs inside the resident part are
    answered from the row store or by running those tokens again without writing KV.

        root ──── resident ────┬──── absent ────┬──── absent ──── cursor
        reads:  └─ open needs ─┘└─────── this step, one part ────────┘
                                                └── another's: a later step
    """

    def __init__(
        self,
        tree: TokenTree,
        logits_cache: LogitsCache,
        *,
        n_to_run: Callable[..., int] | None = None,
    ) -> None:
        """n_to_run: what a whole path counts in a step, by `Engine.n_tokens_to_run`; None: one."""
        self.tree = tree
        self.logits_cache = logits_cache
        self._n_to_run = n_to_run
        self.active: dict[
            PrefillChunk, None
        ] = {}  # packed, and neither delivered nor discarded yet
        self.n_computed = 0
        self.n_reread = 0
        self._writers: dict[Node, PrefillChunk] = {}  # absent nodes that a part computes
        self._leaf_writers: dict[Node, PrefillChunk] = {}  # leaves whose fragments a part writes
        self._rereads: dict[tuple[Cursor, int], PrefillChunk] = {}  # of the step that is packed now

    # Packing ----------------------------------------------------------------------------------

    def plan(
        self, claims: Iterable[tuple[PathClaim, int]], budget: int, queues: JobQueues
    ) -> list[PrefillChunk]:
        """Return a step's parts for claims, in this order, at most `budget` tokens of them.

        claims: each with how many tokens it may have. Splits nodes into chunks. A claim that a part
        works for waits no longer: the part tells it. Those whose whole path a part brings join it
        beyond the budget, too: they cost nothing.
        """
        self._rereads = {}
        before = len(self.active)
        for claim, limit in claims:
            if budget <= 0 and not self._is_planned(claim):
                continue
            limit = max(min(budget, limit), 0)
            try:  # as `JobQueues.guard` has it: many come by here each step
                if not claim.job.done:
                    budget -= self._pack(claim, limit)
            except Exception as error:
                queues.handle_error(claim.job, error)
            if claim.outstanding:
                queues.unscheduled.pop(claim, None)
            else:
                queues.recheck(claim)  # others have computed what it wants
        self._rereads = {}
        return list(self.active)[before:]

    def _is_planned(self, claim: PathClaim) -> bool:
        """Whether the step that is packed now computes the end of a claim's path."""
        return (
            self.tree.fragments is not None and self._current_chunk(claim.path().node) is not None
        )

    def n_remaining(self, claim: PathClaim) -> int:
        """Return how many tokens, about, a claim has still to be run. Cost: O(nodes absent)."""
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
        """Return how many tokens were packed to compute, and to read again, since last asked."""
        counts = self.n_computed, self.n_reread
        self.n_computed = self.n_reread = 0
        return counts

    def is_complete(self, claim: PathClaim) -> bool:
        """Whether a claim has all it wants; answers what it can from the row store."""
        if claim.requests:
            self._use_cached_logits(claim)
        if claim.outstanding:
            return False
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
        """Whether a part on its way writes the fragment at a place."""
        return resolve(cursor).node in self._leaf_writers

    def waits_for_writer(self, claim: PathClaim, node: Node) -> bool:
        """Whether a launched part writes a node's fragment, so that nothing new may hang on it.

        The claim looks again when that has landed.
        """
        part = self._leaf_writers.get(node)
        if part is None:
            return False
        part.add_waiter(claim)
        return True

    def _use_cached_logits(self, claim: PathClaim) -> None:
        """Answer needs of one logits row that the store still has."""
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

    def _pack(self, claim: PathClaim, budget: int) -> int:
        """Pack for one claim; return the tokens it costs."""
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
        """Return the absent nodes of a path, topmost first; brings offloaded ones back."""
        while True:
            absent, node = list[Node](), claim.path().node
            while node.fragment is None and node.parent is not None:
                absent.append(node)
                node = node.parent
            if not absent or absent[-1].host is None or absent[-1].in_flight:
                return absent[::-1]
            self._load_host(absent[-1])

    def _load_host(self, node: Node) -> None:
        """Bring an offloaded node back; where there is no memory it is computed again, by steps
        that can do with less.
        """
        try:
            self.tree.load_host(node)
        except Exception as error:
            if not (isinstance(error, KVFull) or is_out_of_memory(error)):
                raise
            self.tree.host.free(node)

    def _plan_absent(self, claim: PathClaim, absent: list[Node], budget: int) -> int:
        """Let a part compute absent nodes, as far as they go on where it ends."""
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
                break  # the part went another way
            if len(node.tokens) > budget - cost:
                node = self.tree.split(node, node.start + budget - cost)
            part = self._new_chunk(claim, node) if part is None else self._extend_chunk(part, node)
            cost += len(node.tokens)
            end = part.end
        if part is not None:
            self._assign(claim, part, end)
        return cost

    def _current_chunk(self, node: Node) -> PrefillChunk | None:
        """Return the part of the step that is packed now which computes a node."""
        part = self._writers.get(node)
        return part if part is not None and not part.launched else None

    def _new_chunk(self, claim: PathClaim, node: Node) -> PrefillChunk:
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
        """Let a part go on through the next node."""
        pin = self.tree.pin(Cursor(node, node.end))
        self.tree.unpin(part.pin)
        part.pin, part.tokens = pin, [*part.tokens, *node.tokens]
        self._mark_writing(part, node)
        return part

    def _mark_writing(self, part: PrefillChunk, node: Node) -> None:
        node.in_flight = True
        self.n_computed += len(node.tokens)
        self._writers[node] = part
        part.nodes.append(node)

    def _plan_reread(self, claim: PathClaim, known: int, budget: int) -> int:
        """Read again, in parts of at most the budget, what is resident but was never asked for."""
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
        above = resolve(Cursor(cursor.node, first))
        tokens = self.tree.ids(cursor, first)
        self.n_reread += len(tokens)
        path = self.tree.path(above)
        part = PrefillChunk(claim.job, first, tokens, path, self.tree.pin(cursor), None)
        self.active[part] = None
        return part

    def _plan_full_path(self, claim: PathClaim) -> int:
        """Hidden engines: one row of the whole path up to the last open need; return its cost."""
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
            cost, n_run = 1, last  # what it costs is the engine's affair, unless it says so
            if self._n_to_run is not None:
                first = min(a for request in requests for a, _ in request.remaining)
                cost = n_run = self._n_to_run(tokens, first, cursor.node.namespace)
            self.n_computed += n_run
        self._assign(claim, part, part.end)
        return cost

    def _assign(self, claim: PathClaim, part: PrefillChunk, end: int) -> None:
        """Let a part answer what it covers of a claim's needs; to `end` their paths are one."""
        part.add_waiter(claim)
        for request in claim.requests:
            if request.remaining:
                self._assign_request(claim, request, part, end)

    def _assign_request(
        self, claim: PathClaim, request: LogitsRequest, part: PrefillChunk, end: int
    ) -> None:
        assert claim.cursor is not None
        part.add_waiter(claim)
        for first, last in request.pop_range(part.start, end):
            part.answers_for.append((request, first, last))
            if request.top is not None:
                after = resolve(Cursor(claim.cursor.node, last + 1))
                targets = tuple(self.tree.ids(after, first + 1))
                part.score_spans.append(
                    (request, first, ScoreSpan(first - part.start, targets, request.top))
                )

    # What came of it --------------------------------------------------------------------------

    def attach(self, part: PrefillChunk) -> bool:
        """Give a landed part's slots to the nodes that have its tokens now.

        Returns whether nodes have fragments of their own now, which may be joined.
        """
        self._clear_marks(part)
        fragment, part.fragment = part.fragment, None  # it is used up, also where this fails
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
        """Forget the slots of a part whose step failed, or was never launched."""
        self._clear_marks(part)
        fragment, part.fragment = part.fragment, None
        if part.leaf is not None and part.leaf.fragment is not None:
            self.tree.trim(part.leaf.fragment, len(part.leaf.tokens))
        elif fragment is not None:
            self.tree.free(fragment)

    def finish(self, part: PrefillChunk, queues: JobQueues) -> None:
        """A part is through: its claims look again."""
        del self.active[part]
        for claim in part.claims:
            claim.outstanding -= 1
            queues.recheck(claim)
        self.tree.unpin(part.pin)

    def _clear_marks(self, part: PrefillChunk) -> None:
        for node in part.nodes:
            self._writers.pop(node, None)
        if part.leaf is not None:
            self._leaf_writers.pop(part.leaf, None)
        if part.fragment is not None:
            below = node_at(*part.pin)
            while below.parent is not None and below.end > part.from_depth:
                below.in_flight = False
                below = below.parent
