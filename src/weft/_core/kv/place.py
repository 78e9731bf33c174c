"""Nodes of the token tree, cursors between two tokens, and the places that callers hold."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...engines.base import Fragment


class Node:
    """Consecutive tokens of one path. Only the tree writes it; only `kv` and `sched` refer to it.

    It is resident with a fragment, offloaded with a host copy, and absent with neither.
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
        """True if it is resident or promised: it takes part in the count of paths."""
        return self.parent is not None and (self.fragment is not None or self.pins > 0)

    def __repr__(self) -> str:
        state = "device" if self.resident else "host" if self.host is not None else "absent"
        return f"<Node {self.start}..{self.end} {state} pins={self.pins} holds={self.holds}>"


MAX_BACKLOG = 1024  # released holds that may wait for the next step before `drain_backlog` acts


class Cursor(NamedTuple):
    """The position after the first `depth` tokens of the path through `node`.

    It is resolved on use: a split may have moved the depth to an ancestor, a join to a descendant.
    """

    node: Node
    depth: int


def resolve(cursor: Cursor) -> Cursor:
    """Return the same position on its present node: start < depth <= end, or a root at 0.

    Changes nothing but the length of forward links. Cost: O(nodes between), usually none.
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
    """Return the node that `node` was merged into; shortens the forward links on the way."""
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
    """Return the position after the longest known prefix of `ids` below a cursor.

    Changes nothing. Cost: O(len(ids)).
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
        elif at:
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

    A weakref callback without Python code releases a hold, so neither another thread nor Ctrl-C can
    interrupt it. The next step drains `released`. If no step runs and many have piled up, copying a
    place drains them.

    on_backlog: drains released holds; set by the driver.
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
        """Hold a node for a place; the caller has the lock."""
        hold = Hold(place, self._release)
        hold.node = node
        node.holds += 1
        self.alive[id(hold)] = hold
        return hold

    def drain_backlog(self) -> None:
        """Call `on_backlog` if many holds wait for release; without the lock. Cost: usually
        O(1).
        """
        if len(self.released) > MAX_BACKLOG and self.on_backlog is not None:
            self.on_backlog()

    def drain(self) -> Iterator[Node]:
        """Yield the nodes of released holds, one per hold."""
        while self.released:
            hold = self.alive.pop(id(self.released.popleft()))
            yield resolve_joined(hold.node)


class Place:
    """A position in the token tree; the tokens before it stay known while the place exists.

    It keeps tokens, not KV: missing KV is computed on use. A place that no step has used is not in
    the tree: it is `own_ids` after another place. Cheap to create, copy and drop.
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
        """Return a place at a resolved cursor. Cost: O(1)."""
        place = cls(holds, cursor.node.namespace)
        place.bind(cursor)
        return place

    def bind(self, cursor: Cursor) -> None:
        """Set the position to a resolved cursor, once. Called by the tree."""
        with self.holds.lock:
            assert self._hold is None, "a place in the tree does not move"
            self._hold = self.holds.add(self, cursor.node)
            self._after, self._ids, self.depth = None, (), cursor.depth

    @property
    def cursor(self) -> Cursor | None:
        """Its position in the tree, resolved, or None; valid under the lock."""
        return None if self._hold is None else resolve(Cursor(self._hold.node, self.depth))

    def pending(self) -> list[Place]:
        """Return the places that must be inserted before and with this one, in order."""
        out: list[Place] = []
        place: Place | None = self
        while place is not None and place._hold is None:
            out.append(place)
            place = place._after
        return out[::-1]

    @property
    def after(self) -> Place | None:
        """The place before `own_ids`, while this one is not in the tree."""
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
    """Slots that one sequence writes after `cursor`. `reserved`: how many it may write so far."""

    __slots__ = ("cursor", "fragment", "reserved")

    def __init__(self, cursor: Cursor, fragment: Fragment) -> None:
        self.cursor = cursor
        self.fragment = fragment
        self.reserved = 0
