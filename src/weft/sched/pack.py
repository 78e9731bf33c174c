"""What the next step computes for tasks that wait: absent tokens first, then reads."""

from __future__ import annotations

from collections.abc import Iterable

from ..engines.base import ScoreSpan
from ..kv.cursor import Cursor, resolve
from ..kv.node import Node
from ..kv.tree import TokenTree
from .rows import RowCache
from .step import Piece
from .task import Need, Task


class Packer:
    """Turns open needs into pieces, within a budget of tokens a step.

    Per task: the topmost absent node of its path (its parent is resident) is one piece, chunked to
    the budget; its children wait for the next step, so rows of a step never depend on each other.
    Needs inside the resident part are answered from the row cache or by running those tokens again
    without writing KV.

        root ──── resident ────┬──── absent ────┬──── absent ──── cursor
        reads:  └─ open needs ─┘└─ this step ──┘└─ a later step ┘
    """

    def __init__(self, tree: TokenTree, cache: RowCache) -> None:
        self.tree = tree
        self.cache = cache
        self.open: dict[Piece, None] = {}  # packed, and neither delivered nor discarded yet
        self.n_computed = 0
        self.n_reread = 0

    def pack(self, tasks: Iterable[Task], budget: int) -> list[Piece]:
        """Return a step's pieces for admitted tasks, oldest first; splits nodes into chunks."""
        fills: dict[Node, Piece] = {}
        reads: dict[tuple[Cursor, int], Piece] = {}
        for task in tasks:
            self.serve_cached(task)
            if self.tree.fragments is None:
                budget -= self._whole(task, reads)
                continue
            top = self._top_absent(task)
            assert task.cursor is not None
            known = task.cursor.depth if top is None else top.start
            budget -= self._reads(task, known, budget, reads)
            if top is not None:
                budget -= self._fill(task, top, budget, fills)
        return [*fills.values(), *reads.values()]

    def take_counts(self) -> tuple[int, int]:
        """Return how many tokens were packed to compute, and to read again, since last asked."""
        counts = self.n_computed, self.n_reread
        self.n_computed = self.n_reread = 0
        return counts

    def serve_cached(self, task: Task) -> None:
        """Answer needs of one logits row that the cache still has."""
        assert task.cursor is not None
        for need in task.needs:
            if need.top is None and need.todo:
                row = self.cache.get(Cursor(task.cursor.node, need.last))
                if row is not None:
                    need.take(need.first, need.last)
                    need.parts.append((need.first, row))

    def _top_absent(self, task: Task) -> Node | None:
        """Return the first absent node of a task's path; brings offloaded ones back on the way."""
        assert task.cursor is not None
        while True:
            top = None
            for node in self.tree.up(task.cursor):
                if node.resident:
                    break
                top = node
            if top is None or top.host is None or top.launched:
                return top
            self.tree.load_host(top)

    def _fill(self, task: Task, top: Node, budget: int, fills: dict[Node, Piece]) -> int:
        piece = fills.get(top)
        cost = 0
        if piece is None:
            if top.launched or budget <= 0:
                return 0
            if len(top.tokens) > budget:
                top = self.tree.split(top, top.start + budget)
            piece = fills[top] = self._new_fill(top)
            cost = len(top.tokens)
        self._take(task, piece)
        return cost

    def _new_fill(self, node: Node) -> Piece:
        assert self.tree.fragments is not None and node.parent is not None
        above = Cursor(node.parent, node.parent.end)
        path = self.tree.path(above)
        fragment = self.tree.fragments.new(node.parent.fragment)
        node.launched = True
        pin = self.tree.pin(Cursor(node, node.end))
        self.n_computed += len(node.tokens)
        return self._opened(Piece(node.start, node.tokens, path, pin, fragment))

    def _opened(self, piece: Piece) -> Piece:
        self.open[piece] = None
        return piece

    def _reads(
        self, task: Task, known: int, budget: int, reads: dict[tuple[Cursor, int], Piece]
    ) -> int:
        """Read again, in pieces of at most the budget, what is resident but was never asked for."""
        assert task.cursor is not None
        cost = 0
        for need in task.open_needs():
            for first, last in [(a, min(b, known)) for a, b in need.todo if a < known]:
                last = min(last, first + max(budget - cost, 0))
                if first >= last:
                    continue
                cursor = resolve(Cursor(task.cursor.node, last))
                piece = reads.get((cursor, first))
                if piece is None:
                    piece = reads[cursor, first] = self._new_read(cursor, first)
                    cost += last - first
                self._take_need(task, need, piece)
        return cost

    def _new_read(self, cursor: Cursor, first: int) -> Piece:
        above = resolve(Cursor(cursor.node, first))
        tokens = self.tree.ids(cursor, first)
        self.n_reread += len(tokens)
        path = self.tree.path(above)
        return self._opened(Piece(first, tokens, path, self.tree.pin(cursor), None))

    def _whole(self, task: Task, reads: dict[tuple[Cursor, int], Piece]) -> int:
        """Hidden engines: one row of the whole path up to the last open need."""
        assert task.cursor is not None
        needs = task.open_needs()
        if not needs:
            return 0
        last = max(b for need in needs for _, b in need.todo)
        cursor = resolve(Cursor(task.cursor.node, last))
        piece = reads.get((cursor, 0))
        cost = 0
        if piece is None:
            tokens = self.tree.ids(cursor)
            piece = self._opened(Piece(0, tokens, (), self.tree.pin(cursor), None))
            reads[cursor, 0] = piece
            self.n_computed += last
            cost = last
        self._take(task, piece)
        return cost

    def _take(self, task: Task, piece: Piece) -> None:
        """Let a piece answer what it covers of a task's needs."""
        for need in task.open_needs():
            self._take_need(task, need, piece)

    def _take_need(self, task: Task, need: Need, piece: Piece) -> None:
        assert task.cursor is not None
        for first, last in need.take(piece.start, piece.end):
            task.outstanding += 1
            piece.takes.append((need, first, last))
            if need.top is not None:
                end = resolve(Cursor(task.cursor.node, last + 1))
                targets = tuple(self.tree.ids(end, first + 1))
                piece.scored.append(
                    (need, first, ScoreSpan(first - piece.start, targets, need.top))
                )
