"""Compare a live tree with its rows, and merge rows that other processes have written.

A `Snapshot` stores for each node the values that were last read or written.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ...errors import ConfigError, StoreError
from ...loom import Heddle, Loom
from ...loom.node import (
    adopt_node,
    child_list,
    clear_places,
    detach_node,
    is_below,
    new_child,
    preorder_by_call,
)
from .rows import (
    Content,
    Params,
    content_of_row,
    meta_json,
    meta_of,
    score_of,
    score_value,
    set_content,
    text_of,
)


@dataclass(slots=True)
class SavedNode:
    """A node of the live tree, with the values of its row when it was last read or written."""

    node: Heddle
    number: int
    parent: int | None  # number of the parent
    place: float  # orders siblings
    content: Content
    score: str | None  # as in the column
    meta: str  # JSON, as in the column
    bookmark: str | None


class TreePosition(NamedTuple):
    """The position of a node in the live tree. Siblings are ordered by `place`."""

    parent: Heddle | None
    place: float


@dataclass(slots=True)
class Difference:
    """The uncommitted changes of the live tree, compared with the saved rows of its nodes.

    Args:
        added: nodes without a row, parents first.
        changed: for ids of nodes that differ from their rows, the groups of columns that differ:
            "content", "score", "meta", "place", "bookmark".
        removed: ids of nodes that have a row, but are not in the tree.
        positions: the tree positions of new and moved nodes, by id.
    """

    added: list[Heddle] = field(default_factory=list)
    changed: dict[str, set[str]] = field(default_factory=dict)  # names of column groups by node id
    removed: list[str] = field(default_factory=list)
    positions: dict[str, TreePosition] = field(default_factory=dict)  # of new and moved nodes

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def exclude(self, ids: Collection[str]) -> None:
        """Remove nodes from `added`, so that this commit does not write them.

        An ancestor of another added or changed node stays, because that node's row needs it.
        ids: ids of the nodes to remove.
        """
        excluded = set(ids)
        others = [node.id for node in self.added if node.id not in excluded]
        for node_id in (*others, *self.changed):
            position = self.positions.get(node_id)
            at = None if position is None else position.parent
            while at is not None and at.id in excluded:
                excluded.discard(at.id)
                at = at.parent
        self.added = [node for node in self.added if node.id not in excluded]


class Snapshot:
    """The last read or written rows of a loom, by node id.

    Numbers are stored for removed nodes, too. `removed` has the rows of nodes that were removed
    while other nodes were being generated.
    """

    def __init__(self, loom: Loom) -> None:
        self.loom = loom
        self.params = Params()
        self.saved: dict[str, SavedNode] = {}
        self.removed: dict[
            str, SavedNode
        ] = {}  # nodes removed while other nodes are being generated
        self.numbers: dict[str, int] = {}
        self.ids: dict[int, str] = {}

    def reset(self) -> None:
        """Forget all rows, because an older copy of the database has replaced it."""
        for table in (self.saved, self.removed, self.numbers, self.ids):
            table.clear()

    def set_number(self, node_id: str, number: int) -> None:
        """Record the number of a node."""
        self.numbers[node_id] = number
        self.ids[number] = node_id

    # Differences

    def difference(self) -> Difference:
        """Return the changes of the live tree since its rows were read or written last.

        A node with the id of another node gets a new id. Cost: O(nodes), without reading a row.
        """
        difference = Difference()
        visited: set[str] = set()
        self._assign_unique_id(self.loom, visited)
        stack: list[Heddle] = [self.loom]
        difference.positions[self.loom.id] = TreePosition(None, 0.0)
        while stack:
            node = stack.pop()
            saved = self.saved.get(node.id)
            if saved is None:
                difference.added.append(node)
            elif groups := self._changes(node, saved, difference.positions.get(node.id)):
                difference.changed[node.id] = groups
            children = node.children
            if children:
                for child in children:
                    self._assign_unique_id(child, visited)
                self._find_positions(node, children, difference.positions)
                stack.extend(reversed(children))
        if len(visited) - len(difference.added) < len(self.saved):
            difference.removed = [each for each in self.saved if each not in visited]
        if len(difference.added) > 1:
            new = {node.id for node in difference.added}
            difference.added = [node for node in preorder_by_call(self.loom) if node.id in new]
        return difference

    def _assign_unique_id(self, node: Heddle, visited: set[str]) -> None:
        """Give a node a new random id if an earlier node of the tree has the same one.

        That happens if both were loaded from one file. visited: ids of earlier nodes; the node's id
        is added.
        """
        saved = self.saved.get(node.id)
        if saved is not None and saved.node is not node:
            if is_below(saved.node, self.loom):
                node.id = secrets.token_hex(6)
            else:
                saved.node = node
        elif node.id in visited:
            node.id = secrets.token_hex(6)
        visited.add(node.id)

    def _changes(self, node: Heddle, saved: SavedNode, position: TreePosition | None) -> set[str]:
        """Return the groups of columns in which a node differs from its row."""
        groups: set[str] = set()
        if saved.content.differs(node):
            groups.add("content")
        if saved.score != score_value(node.score):
            groups.add("score")
        if saved.meta != (meta_json(node) if node.meta else "{}"):
            groups.add("meta")
        if position is not None and position.parent is not None:
            parent = self.numbers.get(position.parent.id)
            if parent != saved.parent or position.place != saved.place:
                groups.add("place")
        return groups

    def _find_positions(
        self, parent: Heddle, children: list[Heddle], positions: dict[str, TreePosition]
    ) -> None:
        """Add the positions of new and moved children of `parent` to `positions`."""
        number, last = self.numbers.get(parent.id), (-math.inf, 0)
        for child in children:
            saved = self.saved.get(child.id)
            if saved is None or saved.parent != number or (saved.place, saved.number) <= last:
                break
            last = saved.place, saved.number
        else:
            return
        old: list[float | None] = []
        for child in children:
            saved = self.saved.get(child.id)
            old.append(saved.place if saved is not None and saved.parent == number else None)
        for child, place, old_place in zip(children, rank_siblings(old), old, strict=True):
            if old_place != place:
                positions[child.id] = TreePosition(parent, place)

    def remove(self, node_id: str, *, growing: bool) -> None:
        """Delete the stored row of a removed node.

        growing: nodes are being generated, maybe below this one: keep the row in `removed`.
        """
        saved = self.saved.pop(node_id, None)
        if saved is not None and growing:
            self.removed[node_id] = saved

    def revert(self, growing: Container[str]) -> None:
        """Reset the live tree to the rows. Generated nodes stay in it.

        growing: ids of generated nodes. The loom needs a tokenizer: texts are not stored here.
        Cost: O(nodes).
        """
        loom = self.loom
        for node in list(loom.walk()):
            is_new = node.id not in self.saved and node.id not in growing
            if is_new and node is not loom:
                detach_node(node)
        children_of: dict[int | None, list[SavedNode]] = {}
        for saved in sorted(self.saved.values(), key=lambda each: (each.place, each.number)):
            children_of.setdefault(saved.parent, []).append(saved)
        stack = [self.saved[loom.id]]
        while stack:
            saved = stack.pop()
            node, children = saved.node, children_of.get(saved.number, [])
            for child in children:
                if child.node.parent is not node or child.node not in child_list(node):
                    adopt_node(node, child.node)
            grown = [each for each in child_list(node) if each.id in growing]
            child_list(node)[:] = [child.node for child in children] + grown
            self._revert(saved)
            stack.extend(children)
        clear_places(loom)

    def _revert(self, saved: SavedNode) -> None:
        """Reset one node to its row."""
        node = saved.node
        if saved.content.differs(node):
            set_content(node, saved.content, node.text)
        if saved.score != score_value(node.score):
            node.score = score_of(saved.score)
        if not _has_meta(node, saved.meta):
            node.meta = meta_of(saved.meta)

    def adopt(self, grown: Iterable[Heddle]) -> None:
        """Put removed ancestors of generated nodes back into the tree.

        grown: finished nodes. One that is not in its parent's list of children is ignored.
        """
        for node in grown:
            parent = node.parent
            if parent is not None and any(each is node for each in child_list(parent)):
                self._reattach(parent)

    def _reattach(self, node: Heddle) -> None:
        """Put a removed node and its removed ancestors back into the live tree.

        Their descendants without a row stay attached; other descendants stay removed.
        Cost: O(depth).
        """
        path = [node]
        while path[-1] is not self.loom:
            at = path[-1]
            path.append(
                self._by_number(self._last_saved(at).parent) if at.parent is None else at.parent
            )
        path.reverse()
        is_out = False
        for place, (parent, child) in enumerate(pairwise(path)):
            if child.parent is not parent:
                is_out = True
                adopt_node(parent, child)
                child_list(parent).pop()
                self._insert(parent, child, self._last_saved(child))
            if is_out:
                next_node = path[place + 2] if place + 2 < len(path) else None
                for sibling in list(child_list(child)):
                    is_old = sibling.id in self.saved or sibling.id in self.removed
                    if sibling is not next_node and is_old:
                        detach_node(sibling)

    def _last_saved(self, node: Heddle) -> SavedNode:
        """Return the last saved values of a node, also of a removed one."""
        saved = self.saved.get(node.id) or self.removed.get(node.id)
        if saved is None:
            raise StoreError(f"the node {node.id} does not belong to the loom")
        return saved

    def _by_number(self, number: int | None) -> Heddle:
        """Return the node with this number, also a removed one; None means the root."""
        node_id = self.ids.get(-1 if number is None else number, "")
        saved = self.saved.get(node_id) or self.removed.get(node_id)
        if saved is None:
            raise StoreError(f"the parent of a node, node {number}, is not in the loom")
        return saved.node

    # Merging changes of other processes

    def merge(self, rows: Iterable[Any], growing: Collection[Heddle] = ()) -> MergedChanges:
        """Merge rows of other processes into the live tree. Uncommitted local changes win.

        Args:
            rows: rows that were written after the snapshot's rows, in any order. The parent of a
                new node is among them, or in the snapshot.
            growing: nodes of this process that are not in their parent's list of children yet.

        Returns: the nodes of the tree that this has added, changed and removed.
        """
        merged = MergedChanges([], [], [])
        own = {node.id for node in growing}
        new: dict[int | None, list[Any]] = {}
        old: list[Any] = []
        removed_rows: list[Any] = []
        for row in rows:
            self.set_number(row.id, row.number)
            if row.removed:
                removed_rows.append(row)
            elif row.id in self.saved:
                old.append(row)
            elif row.id not in own:  # else another process has interrupted it; our commit wins
                new.setdefault(row.parent, []).append(row)
        if new:
            self._attach(new, merged.added)
        moved = self._move_all(
            row
            for row in old
            if (saved := self.saved[row.id])
            and (row.parent, row.place) != (saved.parent, saved.place)
        )
        for row in old:
            if self._update(row) or row.id in moved:
                merged.changed.append(self.saved[row.id].node)
        if removed_rows:
            self._drop(removed_rows, growing, merged.removed)
        return merged

    def _attach(self, new: dict[int | None, list[Any]], added: list[Heddle]) -> None:
        """Create the nodes of new rows in the tree, and append them to `added`.

        new: rows by the number of their parent; None for the root's.
        """
        numbers = {row.number for rows in new.values() for row in rows}
        stack = [parent for parent in new if parent not in numbers]
        strays = {node.id: node for node in self.loom.walk() if node.id not in self.saved}
        while stack:
            number = stack.pop()
            parent = None if number is None else self._node_in_tree(number, numbers)
            for row in sorted(new[number], key=lambda row: (row.place, row.number)):
                saved = self.saved[row.id] = self._read(row)
                stray = strays.get(row.id)
                if stray is not None:  # our own write, whose acknowledgement was lost
                    saved.node = stray
                elif parent is None:
                    saved.node = self.loom
                    self._fill(self.loom, saved, row)
                else:
                    saved.node = new_child(parent)
                    self._fill(saved.node, saved, row)
                    self._insert(parent, saved.node, saved)
                    added.append(saved.node)
                if row.number in new:
                    stack.append(row.number)

    def _read(self, row: Any) -> SavedNode:
        """Convert a row to a `SavedNode`."""
        return SavedNode(
            self.loom,
            row.number,
            row.parent,
            row.place,
            content_of_row(row, self.params),
            row.score,
            row.meta,
            row.bookmark,
        )

    def _fill(self, node: Heddle, saved: SavedNode, row: Any) -> None:
        """Set a new node's values from its row."""
        node.id = row.id
        set_content(node, saved.content, text_of(row))
        node.score, node.meta = score_of(row.score), meta_of(row.meta)

    def _update(self, row: Any) -> bool:
        """Update a node from its row, except values changed here; return True if it changed."""
        saved = self.saved[row.id]
        node, theirs, changed = saved.node, content_of_row(row, self.params), False
        if theirs != saved.content:
            if not saved.content.differs(node):
                set_content(node, theirs, text_of(row))
                clear_places(node)
                changed = True
            saved.content = theirs
        if row.score != saved.score:
            if saved.score == score_value(node.score):
                node.score = score_of(row.score)
                changed = True
            saved.score = row.score
        if row.meta != saved.meta:
            if saved.meta == meta_json(node):
                node.meta = meta_of(row.meta)
                changed = True
            saved.meta = row.meta
        changed = changed or row.bookmark != saved.bookmark
        saved.bookmark = row.bookmark
        return changed

    def _move_all(self, rows: Iterable[Any]) -> set[str]:
        """Move nodes to the parents in their rows; return the ids of moved nodes."""
        moved: set[str] = set()
        waiting = list(rows)
        while waiting:
            # Some nodes can be moved only after others.
            remaining = [row for row in waiting if not self._move(self.saved[row.id], row, moved)]
            if len(remaining) == len(waiting):
                break
            waiting = remaining
        for row in waiting:  # two processes moved nodes below each other: the later commit wins
            saved = self.saved[row.id]
            saved.parent, saved.place = row.parent, row.place
        return moved

    def _move(self, saved: SavedNode, row: Any, moved: set[str]) -> bool:
        """Move a node to the parent and place in its row, unless this process has moved it.

        Returns False if that would create a cycle. The id of a moved node is added to `moved`.
        """
        node = saved.node
        here = None if node.parent is None else self.numbers.get(node.parent.id)
        if here == saved.parent and row.parent is not None:
            parent = self._node_in_tree(row.parent)
            if is_below(parent, node):
                return False
            if node.parent is not parent:
                adopt_node(parent, node)
            siblings = child_list(parent)
            del siblings[next(i for i, each in enumerate(siblings) if each is node)]
            saved.parent, saved.place = row.parent, row.place
            self._insert(parent, node, saved)
            moved.add(row.id)
        saved.parent, saved.place = row.parent, row.place
        return True

    def _insert(self, parent: Heddle, node: Heddle, saved: SavedNode) -> None:
        """Insert a node into its parent's list of children by its place.

        It comes before siblings that have no row yet.
        """
        siblings = child_list(parent)
        at = len(siblings)
        while at:
            other = self.saved.get(siblings[at - 1].id)
            if other is not None and (other.place, other.number) <= (saved.place, saved.number):
                break
            at -= 1
        siblings.insert(at, node)

    def _node_in_tree(self, number: int, new: Container[int] = ()) -> Heddle:
        """Return the node with this number. A node that was removed from this tree is put back.

        new: numbers of nodes that are being created, and so need not be in the tree yet.
        """
        node = self._by_number(number)
        if number not in new and not is_below(node, self.loom):
            self._reattach(node)
        return node

    def _drop(self, rows: list[Any], growing: Iterable[Heddle], removed: list[str]) -> None:
        """Remove the nodes of removed rows from the tree, and append their ids to `removed`.

        An ancestor of a node that was added, changed or is growing here stays in the tree.
        growing: as for `merge`.
        """
        mine = [node for node in self.loom.walk() if node.id not in self.saved]
        above = [node.parent for node in growing if node.parent is not None]
        is_growing = bool(above)
        mine += above
        ids = {row.id for row in rows}
        mine += [
            saved.node
            for saved in (self.saved[each] for each in ids if each in self.saved)
            if self._changes(saved.node, saved, None)
        ]
        stays: set[Heddle] = set()
        for node in mine:
            at: Heddle | None = node
            while at is not None and at not in stays:
                stays.add(at)
                at = at.parent
        dropped = [self.saved[each].node for each in ids if each in self.saved]
        for node_id in ids:
            self.remove(node_id, growing=is_growing)
        leaving = {node for node in dropped if node not in stays}
        for node in leaving:
            if node.parent is not None and node.parent not in leaving:
                detach_node(node)
        removed.extend(node.id for node in leaving)


def _has_meta(node: Heddle, column: str) -> bool:
    """Return True if the node's meta equals that of the column."""
    try:
        return column == (meta_json(node) if node.meta else "{}")
    except ConfigError:  # a meta that cannot be saved differs from the saved one
        return False


class MergedChanges(NamedTuple):
    """Changes of other processes that were merged into the live tree. `removed` has node ids."""

    added: list[Heddle]
    changed: list[Heddle]
    removed: list[str]


def rank_siblings(old: list[float | None]) -> list[float]:
    """Return a number ("place") for each sibling, in ascending order.

    old: the present place of each sibling; None for a new one. Present places are kept if they
        ascend and floats exist between them; otherwise all siblings get 0, 1, 2, …
    """
    existing = [place for place in old if place is not None]
    if any(a >= b for a, b in pairwise(existing)):
        return [float(at) for at in range(len(old))]
    ranks: list[float] = []
    while (at := len(ranks)) < len(old):
        place = old[at]
        if place is not None:
            ranks.append(place)
            continue
        end = next((i for i in range(at, len(old)) if old[i] is not None), len(old))
        n, high = end - at, old[end] if end < len(old) else None
        low = ranks[-1] if ranks else (-1.0 if high is None else high - n - 1)
        step = 1.0 if high is None else (high - low) / (n + 1)
        ranks.extend(low + step * (i + 1) for i in range(n))
    if any(a >= b for a, b in pairwise(ranks)):  # no float lies between two places
        return [float(at) for at in range(len(old))]
    return ranks
