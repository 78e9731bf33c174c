"""Nodes of the token tree, cursors between two tokens, and the places that callers hold."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...engines.base import Fragment


class Node:
    """A run of consecutive tokens of one path.

    It is resident (has a fragment), offloaded (has a host copy only) or absent (has neither).
    """

    __slots__ = (
        "children",
        "fragment",
        "holds",
        "host",
        "in_flight",
        "joined",
        "last_used",
        "logits_rows",
        "n_live",
        "namespace",
        "parent",
        "pins",
        "queued_key",
        "start",
        "tokens",
        "user_pins",
    )

    def __init__(
        self, tokens: list[int], start: int, parent: Node | None, namespace: str | None
    ) -> None:
        self.tokens = tokens  # its own ids; empty only in a root
        self.start = start  # depth of the first one
        self.parent = parent
        self.namespace = namespace  # the LoRA adapter; None for the model itself
        self.children: dict[int, Node] = {}  # by first token
        self.fragment: Fragment | None = None  # KV on the device
        self.host: dict[str, Any] | None = None  # KV on the host
        self.pins = 0  # own pins + pinned children; above 0, KV is in use or promised
        self.holds = 0  # places on this node; above 0, its tokens stay known
        self.user_pins = 0  # pins by users whose paths end here; above 0, it is not extended
        self.n_live = 0  # children that are resident or pinned, and tails that start here
        self.last_used = 0  # clock of the last use
        self.queued_key: tuple[bool, int, int] | None = None  # its key in the eviction queue
        self.logits_rows: dict[int, Any] | None = None  # cached logits by depth
        self.joined: Node | None = None  # the node that it was merged into
        self.in_flight = False  # a launched step writes it

    @property
    def end(self) -> int:
        """Depth after the last token."""
        return self.start + len(self.tokens)

    @property
    def resident(self) -> bool:
        """True if the KV of all its tokens is on the device; a root has no tokens."""
        return self.fragment is not None or self.parent is None

    @property
    def counted(self) -> bool:
        """True if it is resident or pinned: `SlotBudget.paths` counts such nodes. Never a root."""
        return self.parent is not None and (self.fragment is not None or self.pins > 0)

    def __repr__(self) -> str:
        state = "device" if self.resident else "host" if self.host is not None else "absent"
        return f"<Node {self.start}..{self.end} {state} pins={self.pins} holds={self.holds}>"


MAX_BACKLOG = 1024  # released holds that may wait for the next step before `drain_backlog` acts


class Cursor(NamedTuple):
    """The position after the first `depth` tokens of the path through `node`.

    Call `resolve` before use. After a split, the position may be in an ancestor of `node`. After a
    join, it is in the node that `node` was merged into.
    """

    node: Node
    depth: int


def resolve(cursor: Cursor) -> Cursor:
    """Return the same position with the node that has its last token now.

    That is the node with start < depth <= end, or a root for depth 0. The tree does not change,
    except that links of joined nodes become shorter. Cost: O(nodes between), usually none.
    """
    node, depth = cursor
    if node.joined is None and (depth > node.start or node.parent is None):
        return cursor  # the usual case
    return Cursor(node_at(node, depth), depth)


def node_at(node: Node, depth: int) -> Node:
    """Return the node of `resolve(Cursor(node, depth))`."""
    if node.joined is not None:
        node = resolve_joined(node)
    while depth <= node.start and node.parent is not None:
        node = node.parent
    return node


def resolve_joined(node: Node) -> Node:
    """Return the node that `node` was merged into, over any number of joins.

    Shortens the `joined` links on the way. Returns `node` itself if it was not joined.
    """
    while (after := node.joined) is not None:
        if after.joined is not None:
            node.joined = after.joined
        node = after
    return node


def climb(cursor: Cursor) -> Iterator[Node]:
    """Yield the nodes from a cursor up to the root, without the root."""
    node = resolve(cursor).node
    while node.parent is not None:
        yield node
        node = node.parent


def path_ids(cursor: Cursor, first: int = 0) -> list[int]:
    """Return the path's tokens from depth `first` on. Cost: O(nodes + tokens returned)."""
    cursor = resolve(cursor)
    depth, parts = cursor.depth, []
    for node in climb(cursor):
        if depth <= first:
            break
        parts.append(node.tokens[max(first - node.start, 0) : depth - node.start])
        depth = node.start
    return [token for part in reversed(parts) for token in part]


def common_prefix(known: list[int], ids: list[int], offset: int) -> int:
    """Return how many of `known` equal `ids` from `offset` on; compares slices in C."""
    limit = min(len(known), len(ids) - offset)
    # Compare full lists without copying them: prompts are long and are matched in every call.
    some = known if limit == len(known) else known[:limit]
    if some == (ids if limit == len(ids) else ids[offset : offset + limit]):
        return limit
    low, high = 0, limit  # known[:low] is equal, known[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if known[low:middle] == ids[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low


def follow(cursor: Cursor, ids: Sequence[int]) -> Cursor:
    """Return the position after the longest prefix of `ids` that the tree has below a cursor.

    The result is the resolved cursor itself if the tree has none of them. Changes nothing. Cost:
    O(len(ids)).
    """
    ids = ids if isinstance(ids, list) else list(ids)
    node, depth = cursor = resolve(cursor)
    done, n = 0, len(ids)
    while done < n:
        tokens, at = node.tokens, depth - node.start
        if at == len(tokens):
            child = node.children.get(ids[done])
            if child is None:
                break
            node, tokens = child, child.tokens
        else:
            tokens = tokens[at:]
        same = common_prefix(tokens, ids, done)
        done, depth = done + same, depth + same
        if same < len(tokens):
            break
    return Cursor(node, depth) if done else cursor


class Hold(weakref.ref["Place"]):
    """One place's hold on a node; its weakref callback queues the release."""

    __slots__ = ("node",)
    node: Node


class Holds:
    """State shared by all places of a tree: the lock, their holds, and released holds.

    A hold keeps the tokens of a node known. When its place is garbage-collected, a weakref callback
    queues it in `released`. The callback has no Python code, so neither another thread nor Ctrl-C
    can interrupt it. The next step drains `released`. If no step runs and many holds wait, copying
    a place calls `on_backlog`.

    on_backlog: drains released holds; set by the driver. None until then.
    """

    __slots__ = ("_release", "alive", "lock", "on_backlog", "released")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # By id: two holds of one place are equal to each other, being weak references.
        self.alive: dict[int, Hold] = {}
        self.released: deque[weakref.ref[Place]] = deque()
        self._release = self.released.append
        self.on_backlog: Callable[[], None] | None = None

    def add(self, place: Place, node: Node) -> Hold:
        """Hold a node until `place` is garbage-collected. The caller must hold the lock."""
        hold = Hold(place, self._release)
        hold.node = node
        node.holds += 1
        self.alive[id(hold)] = hold
        return hold

    def drain_backlog(self) -> None:
        """Call `on_backlog` if more than `MAX_BACKLOG` released holds wait.

        The caller must not hold the lock. Cost: usually O(1).
        """
        if len(self.released) > MAX_BACKLOG and self.on_backlog is not None:
            self.on_backlog()

    def drain(self) -> Iterator[Node]:
        """Remove the released holds, and yield the node of each; a node may be yielded repeatedly.

        The caller must hold the lock, and lower `Node.holds`.
        """
        while self.released:
            hold = self.alive.pop(id(self.released.popleft()))
            yield resolve_joined(hold.node)


class Place:
    """A position in the token tree; the tokens before it stay known while the place exists.

    It keeps tokens, not KV: missing KV is computed on use. A place that no step has used is pending
    (not in the tree): it stores `own_ids` and the place before them. Cheap to create, copy and
    drop.
    """

    __slots__ = ("__weakref__", "_after", "_hold", "_ids", "depth", "holds", "namespace")

    def __init__(
        self,
        holds: Holds,
        namespace: str | None,
        after: Place | None = None,
        ids: Sequence[int] = (),
    ) -> None:
        self.holds = holds
        self._after = after
        self._ids = ids
        self._hold: Hold | None = None
        self.namespace = namespace
        self.depth: int = (after.depth if after is not None else 0) + len(ids)

    @classmethod
    def from_cursor(cls, holds: Holds, cursor: Cursor) -> Place:
        """Return a place at a resolved cursor; it is in the tree. Cost: O(1)."""
        place = cls(holds, cursor.node.namespace)
        place.bind(cursor)
        return place

    def bind(self, cursor: Cursor) -> None:
        """Set the position of a pending place to a resolved cursor. Called once, by the tree."""
        with self.holds.lock:
            assert self._hold is None, "a place in the tree does not move"
            self._hold = self.holds.add(self, cursor.node)
            self._after, self._ids, self.depth = None, (), cursor.depth

    @property
    def cursor(self) -> Cursor | None:
        """Its resolved position in the tree; None while pending. Use it only under the lock."""
        return None if self._hold is None else resolve(Cursor(self._hold.node, self.depth))

    def pending(self) -> list[Place]:
        """Return the places to insert into the tree, in order: pending ones before it, then itself.

        [] if this place is in the tree.
        """
        out: list[Place] = []
        place: Place | None = self
        while place is not None and place._hold is None:
            out.append(place)
            place = place._after
        return out[::-1]

    @property
    def after(self) -> Place | None:
        """The place before `own_ids`. None for the root, or if this place is in the tree."""
        return self._after

    @property
    def own_ids(self) -> Sequence[int]:
        """The ids after `after`; empty once the place is in the tree."""
        return self._ids

    def ids(self) -> list[int]:
        """Return all token ids from the root to here, a new list. Cost: O(depth)."""
        parts: list[Sequence[int]] = []
        with self.holds.lock:
            place: Place | None = self
            while place is not None and place._hold is None:
                parts.append(place._ids)
                place = place._after
            if place is not None and place._hold is not None:
                parts.append(path_ids(Cursor(place._hold.node, place.depth)))
        return [token for part in reversed(parts) for token in part]

    def at(self, depth: int) -> Place:
        """Return the place after the path's first `depth` tokens. Cost: O(nodes between)."""
        if not 0 <= depth <= self.depth:
            raise ValueError(f"depth {depth} is not on this path of {self.depth} tokens")
        self.holds.drain_backlog()
        with self.holds.lock:
            place: Place = self
            while place._hold is None:
                before = place._after.depth if place._after is not None else 0
                if depth > before or place._after is None:
                    return Place(
                        self.holds, self.namespace, place._after, place._ids[: depth - before]
                    )
                place = place._after
            return Place.from_cursor(self.holds, resolve(Cursor(place._hold.node, depth)))

    def fork(self) -> Place:
        """Return another place at the same position. Cost: O(1)."""
        self.holds.drain_backlog()
        with self.holds.lock:
            if self._hold is None:
                return Place(self.holds, self.namespace, self._after, self._ids)
            return Place.from_cursor(self.holds, resolve(Cursor(self._hold.node, self.depth)))


class Tail:
    """A private fragment that one sequence writes after `cursor`; prefix matching ignores it.

    reserved: slots that the budget counts for it; it may write so many in total.
    """

    __slots__ = ("cursor", "fragment", "reserved")

    def __init__(self, cursor: Cursor, fragment: Fragment) -> None:
        self.cursor = cursor
        self.fragment = fragment
        self.reserved = 0
