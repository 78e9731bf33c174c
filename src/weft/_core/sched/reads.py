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
from .rows import LentRow, RowStore
from .step import Part, as_forward_error

if TYPE_CHECKING:
    from .desk import Desk
    from .jobs import Job


class Need:
    """Logits or scores at token indices [first, last) of a path; index i gives token i + 1.

    top: None for one logits row, else how many likeliest ids a score lists. `parts` collects the
    answers: a LentRow, or Scores.
    """

    __slots__ = ("claim", "first", "last", "parts", "todo", "top")

    def __init__(self, claim: Claim, first: int, last: int, top: int | None) -> None:
        self.claim = claim
        self.first = first
        self.last = last
        self.top = top
        self.todo: list[tuple[int, int]] = [(first, last)]
        self.parts: list[tuple[int, Any]] = []

    def take(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take what lies in [first, last) out of the open ranges."""
        if self.top is None:  # one row, mostly
            taken = self.todo if first <= self.first < last else []
            if taken:
                self.todo = []
            return taken
        taken, left = [], []
        for a, b in self.todo:
            low, high = max(a, first), min(b, last)
            if low >= high:
                left.append((a, b))
                continue
            taken.append((low, high))
            left += [(x, y) for x, y in ((a, low), (high, b)) if x < y]
        self.todo = left
        return taken

    @property
    def complete(self) -> bool:
        """All answers are there."""
        if self.top is None:
            return bool(self.parts)
        return sum([len(part.logprobs) for _, part in self.parts]) == self.last - self.first

    def answers(self) -> list[Any]:
        """Return the answers in order."""
        return [part for _, part in sorted(self.parts, key=itemgetter(0))]


class Claim:
    """A path that a job needs pinned: `tokens` after `place`.

    exact: the path's end must be a node's, as a tail starts there and as paths that must fit
    together are counted. wants_kv: the claim is complete only when the path is resident. number:
    the job's own.
    cursor, pin: its end in the tree, while its job is admitted. outstanding: parts, packed or on
    their way, that work for it.
    """

    __slots__ = (
        "cursor",
        "exact",
        "job",
        "needs",
        "number",
        "outstanding",
        "pin",
        "place",
        "seen",
        "tokens",
        "wants_kv",
    )

    def __init__(
        self, job: Job, place: Place, tokens: Sequence[int] = (), *, exact: bool = True
    ) -> None:
        self.job = job
        self.place = place
        self.tokens = tokens
        self.exact = exact
        self.wants_kv = True
        self.number = 0
        self.needs: list[Need] = []
        self.cursor: Cursor | None = None
        self.pin: Cursor | None = None
        self.outstanding = 0
        self.seen = False

    @property
    def depth(self) -> int:
        """Tokens of the path."""
        return self.place.depth + len(self.tokens)

    def enter(self, tree: TokenTree) -> tuple[int, int]:
        """Put the path into the tree and pin it; return slots found, and slots to compute.

        Slots on the host are found: they are copied, not computed.
        """
        room = tree.room
        promised = room.promised
        place = self.place  # at the root it needs no hold, and may be everybody's
        end = tree.place(place) if place.depth else tree.root(place.namespace)
        if self.tokens:
            end = tree.extend(end, self.tokens)
        if self.exact or not end.node.resident:
            end = tree.cut(end)
        self.cursor = self.pin = tree.pin(end)
        missing = room.promised - promised
        if missing and tree.host.slots:
            missing -= sum(len(node.tokens) for node in tree.up(self.pin) if node.host is not None)
        return end.depth - missing, missing

    def leave(self, tree: TokenTree) -> None:
        """Let the path go."""
        if self.pin is not None:
            tree.unpin(self.pin)
        self.pin = self.cursor = None

    def path(self) -> Cursor:
        """Return the end of its path as the tree has it now; for claims of admitted jobs."""
        assert self.cursor is not None
        self.cursor = cursor = resolve(self.cursor)
        return cursor

    def open_needs(self) -> list[Need]:
        """Return the needs that no step has taken on yet."""
        return [need for need in self.needs if need.todo]


class PathPart(Part):
    """A row that is no line's: absent tokens to compute, or known tokens to read again.

    Covers the path's token indices [start, start + len(tokens)). owner: who fails with it. pin: the
    cursor at its end. fragment: where the slots go; None for a read. leaf: the node whose fragment
    that is already, and which takes the tokens in. takes: (need, first, last) answered by it.
    logits_at: row-local indices whose logits somebody takes, once its rows are made. claims: those
    that look again when it has landed. nodes: what it computes.
    """

    hangs = True

    def __init__(
        self,
        owner: Job,
        start: int,
        tokens: Sequence[int],
        path: tuple[Span, ...],
        pin: Cursor,
        fragment: Fragment | None,
        leaf: Node | None = None,
    ) -> None:
        super().__init__(pin.node.namespace)
        self.owner = owner
        self.start = start
        self.tokens = tokens
        self.path = path
        self.pin = pin
        self.fragment = fragment
        self.leaf = leaf
        self.from_depth = start if leaf is None else leaf.start
        self.takes: list[tuple[Need, int, int]] = []
        self.scored: list[tuple[Need, int, ScoreSpan]] = []
        self.logits_at: tuple[int, ...] = ()
        self.claims: dict[Claim, None] = {}
        self.nodes: list[Node] = []

    @property
    def end(self) -> int:
        """Token index after the last one."""
        return self.start + len(self.tokens)

    def add(self, claim: Claim) -> None:
        """Let a claim look again when this has landed."""
        if claim not in self.claims:
            self.claims[claim] = None
            claim.outstanding += 1

    def rows(self) -> list[Row]:
        takes, start = self.takes, self.start
        at: tuple[int, ...] = ()
        if len(takes) == 1:  # mostly
            if takes[0][0].top is None:
                at = (takes[0][1] - start,)
        else:
            wanted = {first - start for need, first, _ in takes if need.top is None}
            at = tuple(sorted(wanted))
        self.logits_at = at
        spans = tuple([span for _, _, span in self.scored]) if self.scored else ()
        row = Row(self.path, self.tokens, self.start, self.fragment, at, spans, self.namespace)
        return [row]

    def n_logits(self) -> int:
        return len(self.logits_at)

    def jobs(self) -> Iterable[Job]:
        return dict.fromkeys([self.owner, *(claim.job for claim in self.claims)])

    def n_kept(self) -> int:
        return len(self.logits_at)

    def deliver(self, desk: Desk) -> None:
        error: Exception | None = None
        try:
            if desk.reader.attach(self):
                desk.to_join.append(desk.tree.held(self.pin))
        except Exception as raised:
            error = raised
        if self.logits_at:
            self._give_logits(desk)
        for number, (need, first, _) in enumerate(self.scored):
            desk.guard(need.claim.job, self._give_score, need, first, number)
        desk.reader.close(self, desk)
        if error is not None:
            desk.fail(self.owner, as_forward_error(error))

    def _give_logits(self, desk: Desk) -> None:
        """Keep the rows on the tree, and give them to who asked."""
        assert self.kept_in is not None
        lent: dict[int, LentRow] = {}
        number = self.first_kept
        for offset, row in zip(self.logits_at, self.kept, strict=True):
            at = self.start + offset
            place = self.pin if at + 1 == self.pin.depth else Cursor(self.pin.node, at + 1)
            desk.rows.put(place, row)
            lent[at] = LentRow(row, RetainedRow(self.kept_in, number))
            number += 1
        for need, first, _ in self.takes:
            if need.top is None:
                need.parts.append((first, lent[first]))

    def _give_score(self, need: Need, first: int, number: int) -> None:
        assert self.output is not None
        need.parts.append((first, self.output.scores()[self.first_row][number]))

    def discard(self, desk: Desk) -> None:
        desk.reader.undo(self)
        for need, first, last in self.takes:
            need.todo.append((first, last))
        desk.reader.close(self, desk)


class Reader:
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
        self, tree: TokenTree, rows: RowStore, *, n_to_run: Callable[..., int] | None = None
    ) -> None:
        """n_to_run: what a whole path counts in a step, by `Engine.n_tokens_to_run`; None: one."""
        self.tree = tree
        self.rows = rows
        self._n_to_run = n_to_run
        self.open: dict[PathPart, None] = {}  # packed, and neither delivered nor discarded yet
        self.n_computed = 0
        self.n_reread = 0
        self._writers: dict[Node, PathPart] = {}  # absent nodes that a part computes
        self._growers: dict[Node, PathPart] = {}  # leaves whose fragments a part writes
        self._reads: dict[tuple[Cursor, int], PathPart] = {}  # of the step that is packed now

    # Packing ----------------------------------------------------------------------------------

    def pack(self, claims: Iterable[tuple[Claim, int]], budget: int, desk: Desk) -> list[PathPart]:
        """Return a step's parts for claims, in this order, at most `budget` tokens of them.

        claims: each with how many tokens it may have. Splits nodes into chunks. A claim that a part
        works for waits no longer: the part tells it. Those whose whole path a part brings join it
        beyond the budget, too: they cost nothing.
        """
        self._reads = {}
        before = len(self.open)
        for claim, most in claims:
            if budget <= 0 and not self._is_brought(claim):
                continue
            most = max(min(budget, most), 0)
            try:  # as `Desk.guard` has it: many come by here each step
                if not claim.job.done:
                    budget -= self._pack(claim, most)
            except Exception as error:
                desk.fault(claim.job, error)
            if claim.outstanding:
                desk.waiting.pop(claim, None)
            else:
                desk.look_at(claim)  # others have computed what it wants
        self._reads = {}
        return list(self.open)[before:]

    def _is_brought(self, claim: Claim) -> bool:
        """Whether the step that is packed now computes the end of a claim's path."""
        return self.tree.fragments is not None and self._fresh(claim.path().node) is not None

    def n_open(self, claim: Claim) -> int:
        """Return how many tokens, about, a claim has still to be run. Cost: O(nodes absent)."""
        if self.tree.fragments is None:
            return claim.depth
        n = absent = 0
        for need in claim.needs:
            if need.todo and need.last - need.first >= n:
                n = need.last - need.first + 1
        assert claim.cursor is not None
        node = node_at(*claim.cursor)
        while node.fragment is None and node.parent is not None:
            absent += len(node.tokens)
            node = node.parent
        return max(n, absent)

    def take_counts(self) -> tuple[int, int]:
        """Return how many tokens were packed to compute, and to read again, since last asked."""
        counts = self.n_computed, self.n_reread
        self.n_computed = self.n_reread = 0
        return counts

    def is_complete(self, claim: Claim) -> bool:
        """Whether a claim has all it wants; answers what it can from the row store."""
        if claim.needs:
            self._serve_stored(claim)
        if claim.outstanding:
            return False
        for need in claim.needs:
            if not need.complete:
                return False
        if not claim.wants_kv or self.tree.fragments is None:
            return True
        assert claim.cursor is not None
        node = node_at(*claim.cursor)
        if node.fragment is None and node.parent is not None:
            return False
        return not self.follows_grower(claim, node)

    def is_written(self, cursor: Cursor) -> bool:
        """Whether a part on its way writes the fragment at a place."""
        return resolve(cursor).node in self._growers

    def follows_grower(self, claim: Claim, node: Node) -> bool:
        """Whether a launched part writes a node's fragment, so that nothing new may hang on it.

        The claim looks again when that has landed.
        """
        part = self._growers.get(node)
        if part is None:
            return False
        part.add(claim)
        return True

    def _serve_stored(self, claim: Claim) -> None:
        """Answer needs of one logits row that the store still has."""
        assert claim.cursor is not None
        for need in claim.needs:
            if need.todo and need.top is None:
                cursor = claim.cursor
                if need.last != cursor.depth:
                    cursor = Cursor(cursor.node, need.last)
                row = self.rows.at(cursor)
                lent = None if row is None else self.rows.lend(row)
                if lent is not None:
                    need.take(need.first, need.last)
                    need.parts.append((need.first, lent))

    def _pack(self, claim: Claim, budget: int) -> int:
        """Pack for one claim; return the tokens it costs."""
        self._serve_stored(claim)
        if self.tree.fragments is None:
            return self._whole(claim)
        absent = self._absent(claim)
        known = absent[0].start if absent else claim.path().depth
        cost = self._read(claim, known, budget)
        if absent:
            cost += self._fill(claim, absent, budget - cost)
            part = self._writers.get(absent[0])
            if part is not None:
                part.add(claim)
        return cost

    def _absent(self, claim: Claim) -> list[Node]:
        """Return the absent nodes of a path, topmost first; brings offloaded ones back."""
        while True:
            absent, node = list[Node](), claim.path().node
            while node.fragment is None and node.parent is not None:
                absent.append(node)
                node = node.parent
            if not absent or absent[-1].host is None or absent[-1].launched:
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

    def _fill(self, claim: Claim, absent: list[Node], budget: int) -> int:
        """Let a part compute absent nodes, as far as they go on where it ends."""
        first = absent[0]
        part, above = self._writers.get(first), first.parent
        if part is None and above is not None and self.follows_grower(claim, above):
            return 0
        if part is not None and part.launched:
            part = None
        cost, end = 0, first.start
        for node in absent:
            if part is not None and self._writers.get(node) is part:
                end = node.end
                continue
            if node.launched or node.host is not None or cost >= budget:
                break
            if part is not None and part.end != node.start:
                break  # the part went another way
            if len(node.tokens) > budget - cost:
                node = self.tree.split(node, node.start + budget - cost)
            part = self._new_fill(claim, node) if part is None else self._longer(part, node)
            cost += len(node.tokens)
            end = part.end
        if part is not None:
            self._take(claim, part, end)
        return cost

    def _fresh(self, node: Node) -> PathPart | None:
        """Return the part of the step that is packed now which computes a node."""
        part = self._writers.get(node)
        return part if part is not None and not part.launched else None

    def _new_fill(self, claim: Claim, node: Node) -> PathPart:
        assert self.tree.fragments is not None and node.parent is not None
        leaf = self.tree.may_grow(node)
        if leaf is not None:
            assert leaf.parent is not None
            path = self.tree.path(Cursor(leaf.parent, leaf.start))
            fragment = leaf.fragment
        else:
            path = self.tree.path(Cursor(node.parent, node.parent.end))
            fragment = self.tree.fragments.new(node.parent.fragment)
        pin = self.tree.pin(Cursor(node, node.end))
        part = PathPart(claim.job, node.start, node.tokens, path, pin, fragment, leaf)
        self.open[part] = None
        if leaf is not None:
            leaf.launched = True
            self._growers[leaf] = part
        self._writes(part, node)
        return part

    def _longer(self, part: PathPart, node: Node) -> PathPart:
        """Let a part go on through the next node."""
        pin = self.tree.pin(Cursor(node, node.end))
        self.tree.unpin(part.pin)
        part.pin, part.tokens = pin, [*part.tokens, *node.tokens]
        self._writes(part, node)
        return part

    def _writes(self, part: PathPart, node: Node) -> None:
        node.launched = True
        self.n_computed += len(node.tokens)
        self._writers[node] = part
        part.nodes.append(node)

    def _read(self, claim: Claim, known: int, budget: int) -> int:
        """Read again, in parts of at most the budget, what is resident but was never asked for."""
        assert claim.cursor is not None
        cost = 0
        for need in claim.needs:
            if not need.todo or need.first >= known:
                continue
            for first, last in [(a, min(b, known)) for a, b in need.todo if a < known]:
                last = min(last, first + max(budget - cost, 0))
                if first >= last:
                    continue
                cursor = resolve(Cursor(claim.cursor.node, last))
                part = self._reads.get((cursor, first))
                if part is None:
                    part = self._reads[cursor, first] = self._new_read(claim, cursor, first)
                    cost += last - first
                self._take_need(claim, need, part, part.end)
        return cost

    def _new_read(self, claim: Claim, cursor: Cursor, first: int) -> PathPart:
        above = resolve(Cursor(cursor.node, first))
        tokens = self.tree.ids(cursor, first)
        self.n_reread += len(tokens)
        path = self.tree.path(above)
        part = PathPart(claim.job, first, tokens, path, self.tree.pin(cursor), None)
        self.open[part] = None
        return part

    def _whole(self, claim: Claim) -> int:
        """Hidden engines: one row of the whole path up to the last open need; return its cost."""
        assert claim.cursor is not None
        needs = claim.open_needs()
        if not needs:
            return 0
        last = max(b for need in needs for _, b in need.todo)
        cursor = resolve(Cursor(claim.cursor.node, last))
        part = self._reads.get((cursor, 0))
        cost = 0
        if part is None:
            tokens = self.tree.ids(cursor)
            part = PathPart(claim.job, 0, tokens, (), self.tree.pin(cursor), None)
            self.open[part] = None
            self._reads[cursor, 0] = part
            cost, n_run = 1, last  # what it costs is the engine's affair, unless it says so
            if self._n_to_run is not None:
                first = min(a for need in needs for a, _ in need.todo)
                cost = n_run = self._n_to_run(tokens, first, cursor.node.namespace)
            self.n_computed += n_run
        self._take(claim, part, part.end)
        return cost

    def _take(self, claim: Claim, part: PathPart, end: int) -> None:
        """Let a part answer what it covers of a claim's needs; to `end` their paths are one."""
        part.add(claim)
        for need in claim.needs:
            if need.todo:
                self._take_need(claim, need, part, end)

    def _take_need(self, claim: Claim, need: Need, part: PathPart, end: int) -> None:
        assert claim.cursor is not None
        part.add(claim)
        for first, last in need.take(part.start, end):
            part.takes.append((need, first, last))
            if need.top is not None:
                after = resolve(Cursor(claim.cursor.node, last + 1))
                targets = tuple(self.tree.ids(after, first + 1))
                part.scored.append((need, first, ScoreSpan(first - part.start, targets, need.top)))

    # What came of it --------------------------------------------------------------------------

    def attach(self, part: PathPart) -> bool:
        """Give a landed part's slots to the nodes that have its tokens now.

        Returns whether nodes have fragments of their own now, which may be joined.
        """
        self._landed(part)
        fragment, part.fragment = part.fragment, None  # it is used up, also where this fails
        if fragment is None:
            return False
        assert self.tree.fragments is not None
        if part.leaf is not None:
            self.tree.grew(part.leaf, part.pin)
            return False
        try:
            self.tree.fragments.settle(fragment)
        except BaseException:
            self.tree.free(fragment)
            raise
        self.tree.fill(part.pin, part.start, fragment)
        return True

    def undo(self, part: PathPart) -> None:
        """Forget the slots of a part whose step failed, or was never launched."""
        self._landed(part)
        fragment, part.fragment = part.fragment, None
        if part.leaf is not None and part.leaf.fragment is not None:
            self.tree.trim(part.leaf.fragment, len(part.leaf.tokens))
        elif fragment is not None:
            self.tree.free(fragment)

    def close(self, part: PathPart, desk: Desk) -> None:
        """A part is through: its claims look again."""
        del self.open[part]
        for claim in part.claims:
            claim.outstanding -= 1
            desk.look_at(claim)
        self.tree.unpin(part.pin)

    def _landed(self, part: PathPart) -> None:
        for node in part.nodes:
            self._writers.pop(node, None)
        if part.leaf is not None:
            self._growers.pop(part.leaf, None)
        if part.fragment is not None:
            below = node_at(*part.pin)
            while below.parent is not None and below.end > part.from_depth:
                below.launched = False
                below = below.parent
