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

    Per task: the absent end of its path is one piece, chunked to the budget. Where paths part below
    an absent node, the oldest goes on in that piece and the others wait for the next step, so rows
    of a step never depend on each other. Needs inside the resident part are answered from the row
    cache or by running those tokens again without writing KV.

        root ──── resident ────┬──── absent ────┬──── absent ──── cursor
        reads:  └─ open needs ─┘└─────── this step, one piece ───────┘
                                                └── another's: a later step
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
                # What a whole path costs is the engine's affair: rows are counted.
                if budget > 0:
                    budget -= bool(self._whole(task, reads))
                continue
            absent = self._absent(task)
            assert task.cursor is not None
            known = absent[0].start if absent else task.cursor.depth
            budget -= self._reads(task, known, budget, reads)
            if absent:
                budget -= self._fill(task, absent, budget, fills)
        return [*dict.fromkeys(fills.values()), *reads.values()]

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

    def _absent(self, task: Task) -> list[Node]:
        """Return the absent nodes of a task's path, topmost first; brings offloaded ones back."""
        assert task.cursor is not None
        while True:
            absent: list[Node] = []
            for node in self.tree.up(task.cursor):
                if node.resident:
                    break
                absent.append(node)
            if not absent or absent[-1].host is None or absent[-1].launched:
                return absent[::-1]
            self.tree.load_host(absent[-1])

    def _fill(self, task: Task, absent: list[Node], budget: int, fills: dict[Node, Piece]) -> int:
        """Let a piece compute a task's absent nodes, as far as they go on where it ends."""
        piece, cost, end = fills.get(absent[0]), 0, absent[0].start
        for node in absent:
            if node in fills and fills[node] is piece:
                end = node.end
                continue
            if node.launched or node.host is not None or cost >= budget:
                break
            if piece is not None and piece.end != node.start:
                break  # the piece went another way
            if len(node.tokens) > budget - cost:
                node = self.tree.split(node, node.start + budget - cost)
            piece = self._new_fill(node) if piece is None else self._longer(piece, node)
            fills[node] = piece
            cost += len(node.tokens)
            end = node.end
        if piece is not None:
            self._take(task, piece, end)
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

    def _longer(self, piece: Piece, node: Node) -> Piece:
        """Let a piece go on through the next node."""
        node.launched = True
        pin = self.tree.pin(Cursor(node, node.end))
        self.tree.unpin(piece.pin)
        piece.pin, piece.tokens = pin, [*piece.tokens, *node.tokens]
        self.n_computed += len(node.tokens)
        return piece

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
                self._take_need(task, need, piece, piece.end)
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
        self._take(task, piece, piece.end)
        return cost

    def _take(self, task: Task, piece: Piece, end: int) -> None:
        """Let a piece answer what it covers of a task's needs; to `end` their paths are one."""
        for need in task.open_needs():
            self._take_need(task, need, piece, end)

    def _take_need(self, task: Task, need: Need, piece: Piece, end: int) -> None:
        assert task.cursor is not None
        for first, last in need.take(piece.start, end):
            task.outstanding += 1
            piece.takes.append((need, first, last))
            if need.top is not None:
                after = resolve(Cursor(task.cursor.node, last + 1))
                targets = tuple(self.tree.ids(after, first + 1))
                piece.scored.append(
                    (need, first, ScoreSpan(first - piece.start, targets, need.top))
                )
