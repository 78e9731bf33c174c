"""Places in the token tree: its nodes, cursors between two tokens, and what a face holds."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...engines.base import Fragment


class Node:
    """Consecutive tokens of one path; only the tree writes it, only `kv` and `sched` hold it.

    tokens: this node's own ids, never empty but in a root. start: depth of the first one.
    children: by first token. fragment: KV on the device; host: exported KV; both None: absent.
    pins: own pins + pinned children; while > 0 the KV is in use or promised.
    holds: places on this node; while > 0 the tokens stay known.
    ends: pins by hand whose paths end with it: its end stays one.
    live: children that are resident or pinned, and tails that grow from here.
    used: clock of the last use. offered: its key among those that may be evicted, if it is there.
    rows: cached logits rows by depth.
    joined: the node that this one was merged into. launched: part of a step in flight.
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
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.namespace = namespace
        self.children: dict[int, Node] = {}
        self.fragment: Fragment | None = None
        self.host: dict[str, Any] | None = None
        self.pins = 0
        self.holds = 0
        self.user_pins = 0
        self.n_live = 0
        self.last_used = 0
        self.queued_key: tuple[bool, int, int] | None = None
        self.logits_rows: dict[int, Any] | None = None
        self.joined: Node | None = None
        self.in_flight = False

    @property
    def end(self) -> int:
        """Depth after the last token."""
        return self.start + len(self.tokens)

    @property
    def resident(self) -> bool:
        """KV of every token of this node is on the device; a root has none to miss."""
        return self.fragment is not None or self.parent is None

    @property
    def counted(self) -> bool:
        """Resident or promised: takes part in the count of paths."""
        return self.parent is not None and (self.fragment is not None or self.pins > 0)

    def __repr__(self) -> str:
        state = "device" if self.resident else "host" if self.host is not None else "absent"
        return f"<Node {self.start}..{self.end} {state} pins={self.pins} holds={self.holds}>"


MAX_BACKLOG = 1024  # holds that are gone and wait for a step, before somebody looks


class Cursor(NamedTuple):
    """The place after the first `depth` tokens of the path through `node`.

    Resolved when used: a split may have put the depth into an ancestor, a join into a descendant.
    """

    node: Node
    depth: int


def resolve(cursor: Cursor) -> Cursor:
    """Return the same place on the node that holds it now: start < depth <= end, or a root at 0.

    Changes nothing but the length of forward links. Cost: O(nodes between), usually none.
    """
    node, depth = cursor
    if node.joined is None and (depth > node.start or node.parent is None):
        return cursor  # mostly
    return Cursor(node_at(node, depth), depth)


def node_at(node: Node, depth: int) -> Node:
    """Return the node of `resolve(Cursor(node, depth))`."""
    if node.joined is not None:
        node = resolve_joined(node)
    while depth <= node.start and node.parent is not None:
        node = node.parent
    return node


def resolve_joined(node: Node) -> Node:
    """Return the node that stands for `node` after joins; shortens the forward links it follows."""
    while (after := node.joined) is not None:
        if after.joined is not None:
            node.joined = after.joined
        node = after
    return node


def climb(cursor: Cursor) -> Iterator[Node]:
    """Yield the nodes from a cursor to the root, the root left out."""
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
    # Of whole lists no copies are made: a prompt may be long, and is met in every call.
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
    """Return the place after the longest known prefix of `ids` that follow a cursor.

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
    """One place's hold on a node; its callback tells when the place is gone."""

    __slots__ = ("node",)
    node: Node


class Holds:
    """What places of one tree share: its lock, their holds, and those of places that are gone.

    A hold is released by a weak reference's callback that is no Python code, so neither another
    thread nor Ctrl-C can get between; the next step drains `released`, or whoever copies a place
    when very many are there and no step runs. relieve: what does that; set by the driver.
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
        """See that holds which are gone do not pile up; without the lock. Cost: O(1), mostly."""
        if len(self.released) > MAX_BACKLOG and self.on_backlog is not None:
            self.on_backlog()

    def drain(self) -> Iterator[Node]:
        """Yield the nodes of places that are gone, a node a hold."""
        while self.released:
            hold = self.alive.pop(id(self.released.popleft()))
            yield resolve_joined(hold.node)


class Place:
    """A position in the token tree that a face holds: the tokens before it stay known.

    Known tokens only, no KV: what is missing is computed when used. A place that no step has used
    yet is not in the tree (`_hold` is None): it is `_ids` after another place. Cheap to make, copy
    and drop; dropping the last reference lets go.
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
        """Hold a resolved cursor. Cost: O(1)."""
        place = cls(holds, cursor.node.namespace)
        place.bind(cursor)
        return place

    def bind(self, cursor: Cursor) -> None:
        """Take a resolved cursor as the position, once; the tree's part."""
        with self.holds.lock:
            assert self._hold is None, "a place in the tree does not move"
            self._hold = self.holds.add(self, cursor.node)
            self._after, self._ids, self.depth = None, (), cursor.depth

    @property
    def cursor(self) -> Cursor | None:
        """Where it is in the tree, resolved, or None; valid under the lock."""
        return None if self._hold is None else resolve(Cursor(self._hold.node, self.depth))

    def pending(self) -> list[Place]:
        """Return the places that must enter the tree before and with this one, first one first."""
        out: list[Place] = []
        place: Place | None = self
        while place is not None and place._hold is None:
            out.append(place)
            place = place._after
        return out[::-1]

    @property
    def after(self) -> Place | None:
        """The place that `own_ids` follow, while this one is not in the tree."""
        return self._after

    @property
    def own_ids(self) -> Sequence[int]:
        """The ids after `after`; empty once it is in the tree."""
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
        """Return another hold on the same position. Cost: O(1)."""
        self.holds.drain_backlog()
        with self.holds.lock:
            if self._hold is None:
                return Place(self.holds, self.namespace, self._after, self._ids)
            return Place.from_cursor(self.holds, resolve(Cursor(self._hold.node, self.depth)))


class Tail:
    """Slots that one run writes, after `cursor`. `reserved`: how many it may write so far."""

    __slots__ = ("cursor", "fragment", "reserved")

    def __init__(self, cursor: Cursor, fragment: Fragment) -> None:
        self.cursor = cursor
        self.fragment = fragment
        self.reserved = 0
