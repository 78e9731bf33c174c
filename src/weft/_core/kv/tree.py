"""The token tree: a radix tree over token ids whose nodes own KV fragments.

Equal prefixes are one path. KV can be evicted at any time; it is recomputed from the tokens. A node
is resident (KV on the device), offloaded (on the host) or absent. The ancestors of a resident node
are resident.

    root ── "You are a helpful…" ──┬── "13 - 9 = 4"  ── "10 - 4 = 6"
                                   └── "4 + 9 = 13"

Only the scheduler calls methods that change it, under its lock and never during a forward: splits
and joins move fragments. Nothing here touches arrays, and nothing recurses: a chain of 100,000
nodes works.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile

from ...engines.base import Fragment, Fragments, Span
from .budget import EvictionQueue, HostTier, SlotBudget
from .check import check_tree
from .joining import JOIN_LENGTH, join_chain
from .pins import PinHold, Pins
from .place import (
    Cursor,
    Holds,
    Node,
    Place,
    Tail,
    climb,
    follow,
    node_at,
    path_ids,
    resolve,
    resolve_joined,
)


def grow_leaf(node: Node, ids: list[int]) -> Node:
    """Add the new tokens `ids` at the end of `node`; return the node that has them.

    An absent leaf that nothing uses gets the tokens itself. Otherwise they become a new child.
    """
    if not (node.resident or node.children or node.pins or node.in_flight or node.host is not None):
        node.tokens = node.tokens + ids
        return node
    child = node.children[ids[0]] = Node(ids, node.end, node, node.namespace)
    return child


def move_logits_rows(source: Node, target: Node, last: int) -> None:
    """Move cached logits rows at depths up to `last` from node `source` to node `target`."""
    if not source.logits_rows:
        return
    for depth in [d for d in source.logits_rows if d <= last]:
        row = source.logits_rows.pop(depth)
        row.node = target
        if target.logits_rows is None:
            target.logits_rows = {}
        target.logits_rows[depth] = row


def is_evictable(node: Node) -> bool:
    """Return True if a node's KV can be evicted.

    It must be resident and have no pins, no resident or pinned children, and no tails.
    """
    return node.fragment is not None and not node.pins and not node.n_live


def is_forgettable(node: Node) -> bool:
    """Return True if the tree may delete this node, because nothing needs its tokens."""
    return not (
        node.fragment is not None
        or node.host is not None
        or node.children
        or node.holds
        or node.pins
        or node.n_live
        or node.in_flight
        or node.logits_rows
    )


_log = logging.getLogger(__name__)
GROWING_STEPS = 4  # a leaf that has not grown for this many steps releases its spare slots


class TokenTree:
    """The radix tree over token ids; the module's docstring explains it.

    epoch: increases when fragments are split or joined. Tuples that `path` returned before are
    invalid then.
    """

    def __init__(
        self,
        fragments: Fragments | None,
        *,
        capacity: int | None = None,
        max_paths: int | None = None,
        host_capacity: int = 0,
        host_uses_free_slots: bool = False,
    ) -> None:
        """Create an empty tree.

        Args:
            fragments: the engine's KV fragments; None if the engine hides its KV.
            capacity: slots on the device. None means no limit.
            host_capacity: slots on the host; 0 keeps no copies there.
            max_paths: maximum leaves. None means no limit.
            host_uses_free_slots: the host may also hold KV in as many slots as the device has free.
        """
        self.fragments = fragments
        growth = fragments.growth if fragments is not None else 1
        self.budget = SlotBudget(capacity, max_paths, growth)
        self.host = HostTier(host_capacity, self.budget if host_uses_free_slots else None)
        self.holds = Holds()
        self.pins = Pins()
        self.queue = EvictionQueue()
        # Leaves with spare slots, and the step of their last growth; oldest first.
        self.growing: OrderedDict[Node, int] = OrderedDict()
        self.n_steps = 0
        self.unfreed: list[Fragment] = []  # the engine failed to free them: retried later
        self.untrimmed: dict[Fragment, int] = {}  # the engine failed to trim them: retried later
        self.epoch = 0
        self.clock = 0
        self.n_nodes = 0
        self.n_evicted = 0
        self.tails: set[Tail] = set()
        self.roots: dict[str | None, Node] = {}
        # Called with the position after new tokens and their number; None without a listener.
        self.on_insert: Callable[[Cursor, int], None] | None = None
        self._spans: dict[Cursor, tuple[Span, ...]] = {}

    def root(self, namespace: str | None = None) -> Cursor:
        """Return the position before all tokens of a namespace; create its root if necessary.

        namespace: the name of a LoRA adapter; None for the model itself. Each has a tree of its
        own.
        """
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node([], 0, None, namespace)
        return Cursor(node, 0)

    def match(self, ids: Sequence[int], namespace: str | None = None) -> Cursor:
        """Return the position after the longest prefix of `ids` in the tree. Changes nothing.

        Cost: O(len(ids)).
        """
        return follow(self.root(namespace), ids)

    def find(self, place: Place) -> Cursor:
        """Return the position after the longest prefix of a place's tokens that the tree has.

        Changes nothing. Cost: O(1) for a place in the tree, otherwise O(tokens not in the tree).
        """
        if (cursor := place.cursor) is not None:
            return cursor
        pending = place.pending()
        before = pending[0].after
        cursor = self.root(place.namespace) if before is None else before.cursor
        assert cursor is not None
        for item in pending:
            cursor = follow(cursor, item.own_ids)
            if cursor.depth < item.depth:
                break
        return cursor

    def extend(self, cursor: Cursor, ids: Sequence[int]) -> Cursor:
        """Insert `ids` after `cursor`; return the position after them.

        Tokens that the tree does not have yet become absent. May split a node. The result stays
        valid while it is pinned or a place refers to it.
        """
        ids = ids if isinstance(ids, list) else list(ids)
        known = follow(cursor, ids)
        node, depth = known
        n_known, n = depth - cursor.depth, len(ids)
        if n_known == n:
            return known
        if depth < node.end:
            node = self.split(node, depth)
        leaf = grow_leaf(node, ids[n_known:])
        if leaf is not node:
            self.n_nodes += 1
        end = Cursor(leaf, depth - n_known + n)
        if self.on_insert is not None:
            self.on_insert(end, n - n_known)
        return end

    def place(self, place: Place) -> Cursor:
        """Insert a place and the pending places before it into the tree; return its cursor.

        A place that is in the tree already is not changed.
        """
        cursor = place.cursor
        if cursor is not None:
            return cursor
        for item in place.pending():
            before = item.after.cursor if item.after is not None else self.root(item.namespace)
            assert before is not None
            cursor = self.extend(before, item.own_ids)
            item.bind(cursor)
        assert cursor is not None
        return cursor

    def hold(self, cursor: Cursor) -> Place:
        """Return a new place at a position; it keeps the tokens before it known."""
        return Place.from_cursor(self.holds, resolve(cursor))

    def cut(self, cursor: Cursor) -> Cursor:
        """Split the node around a position, so that it is the end of a node; return the position.

        Changes nothing if the position is the end of a node already.
        """
        node, depth = cursor = resolve(cursor)
        return Cursor(self.split(node, depth), depth) if depth < node.end else cursor

    def drain_released(self) -> None:
        """Release holds and pins whose owners were garbage-collected; forget unneeded tokens.

        Also retries frees and trims at which the engine failed.
        """
        if self.unfreed or self.untrimmed:
            self._retry()
        if self.pins.released:
            self._drain_pins()
        if self.holds.released:
            self._drain_holds()

    def _drain_holds(self) -> None:
        """Release holds whose places were garbage-collected."""
        for node in self.holds.drain():
            node.holds -= 1
            if not node.holds:
                self._offer(node)
                self.forget(node)

    def path(self, cursor: Cursor) -> tuple[Span, ...]:
        """Return the fragments of a resident path from the root to `cursor`, with used lengths.

        The tuple is valid while the path is pinned and `epoch` does not change. Equal positions
        give the same tuple object, so that engines can group rows by identity.
        """
        cursor = resolve(cursor)
        spans = self._spans.get(cursor)
        if spans is None:
            depth, parts = cursor.depth, []
            for node in self.up(cursor):
                assert node.fragment is not None
                parts.append(Span(node.fragment, depth - node.start))
                depth = node.start
            spans = self._spans[cursor] = tuple(reversed(parts))
        return spans

    def ids(self, cursor: Cursor, first: int = 0) -> list[int]:
        """Return the path's tokens from depth `first` on. Cost: O(nodes + tokens returned)."""
        return path_ids(cursor, first)

    def up(self, cursor: Cursor) -> Iterator[Node]:
        """Yield the nodes from a cursor up to the root, without the root."""
        return climb(cursor)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before children, without roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def pin(self, cursor: Cursor) -> Cursor:
        """Pin a path: its KV is not evicted, and slots for its absent nodes are promised.

        Nothing is evicted now, so the budget may be exceeded (see `make_room`). Cost: O(nodes not
        pinned yet).

        Returns: the resolved cursor, which `unpin` needs.
        """
        cursor = resolve(cursor)
        node = cursor.node
        while node.parent is not None and self.budget.pin(node):
            node = node.parent
        return cursor

    def unpin(self, cursor: Cursor) -> None:
        """Remove one pin of a path, and mark its nodes as recently used.

        Nodes without further pins can be evicted; their tokens are forgotten if nothing needs them.

        cursor: returned by `pin`.
        """
        self.clock += 1
        node = resolve_joined(cursor.node)
        while node.parent is not None:
            node.last_used = self.clock
            if not self.budget.unpin(node):
                return
            above = node.parent
            self._offer(node)
            self.forget(node)
            node = above

    def pin_for(self, place: Place, owner: object) -> PinHold | None:
        """Pin the path to a place until `unpin_for`, or until `owner` is garbage-collected.

        Slots of absent tokens are promised, which may evict other KV. Call it only between steps.

        Returns: the pin, for `unpin_for`. None if there are too few slots; nothing is pinned then.
        """
        self.drain_released()
        cursor, budget = self.cut(self.place(place)), self.budget
        self.pin(cursor)
        reserve = budget.growth if self.tails else 0  # running sequences need their next slots
        is_short = budget.capacity is not None and budget.unevictable + reserve > budget.capacity
        if is_short or not self.make_room():
            self.unpin(cursor)
            return None
        cursor.node.user_pins += 1
        return self.pins.add(owner, Place.from_cursor(self.holds, cursor))

    def unpin_for(self, hold: PinHold) -> None:
        """Remove a pin that `pin_for` returned; does nothing if it was removed before."""
        if self.pins.drop(hold):
            self._unpin_end(hold)

    def unpin_all(self) -> None:
        """Remove all pins by users, when the LM closes."""
        for hold in self.pins:
            self.unpin_for(hold)

    def n_user_pinned(self) -> int:
        """Return how many slots pins by users occupy or promise. Cost: O(nodes of the paths)."""
        nodes = {node for hold in self.pins for node in self.up(hold.cursor)}
        return sum(len(node.tokens) for node in nodes)

    def _drain_pins(self) -> None:
        for hold in self.pins.drain():
            self._unpin_end(hold)

    def _unpin_end(self, hold: PinHold) -> None:
        cursor = hold.cursor
        cursor.node.user_pins -= 1
        self.unpin(cursor)

    def make_room(self) -> bool:
        """Evict or offload leaves until the budget is not exceeded.

        Returns True if the budget is not exceeded now, False if nothing more can be evicted.
        """
        if self.budget.is_exceeded:
            self.finalize_leaves()
        while self.budget.is_exceeded:
            victim = self.queue.pop(is_evictable)
            if victim is None:
                self._retry()
                return not self.budget.is_exceeded
            self.drop(victim, offload=True)
            self.n_evicted += len(victim.tokens)
        return True

    def drop(self, node: Node, *, offload: bool = False) -> None:
        """Free the device's KV of an evictable node (see `is_evictable`).

        The node is also deleted if nothing needs its tokens.

        offload: copy the KV to the host first, if it fits there.
        """
        above = node.parent
        assert self.fragments is not None and node.fragment is not None and is_evictable(node)
        assert above is not None
        if offload:
            for evicted in self.host.offload(node, self.fragments):
                self.forget(evicted)
        self._stop_growing(node)
        fragment, node.fragment = node.fragment, None
        self.free(fragment)
        self.budget.detach(node)
        self._spans.clear()
        self.forget(node)
        self._offer(above)

    def clear(self, *, rows: bool = True, namespace: str | None = None) -> None:
        """Drop all KV that no running work has pinned, on the device and on the host.

        KV that only users have pinned is dropped too.

        Args:
            rows: drop cached logits as well.
            namespace: drop only this namespace, and remove its pins by users. None drops all
                namespaces; pins by users remain, so that their slots are promised.
        """
        user_pins = [hold for hold in self.pins if namespace in (None, hold.place.namespace)]
        for hold in user_pins:
            self._unpin_end(hold)
        nodes = [n for n in self.nodes() if namespace in (None, n.namespace)]
        for node in reversed(nodes):
            if rows:
                node.logits_rows = None
            self.host.free(node)
            if is_evictable(node):
                self.drop(node)
            self.forget(node)
        self.queue.rebuild([n for n in self.nodes() if is_evictable(n)])
        for hold in user_pins:
            if namespace is None:
                self.pin(self.cut(hold.cursor)).node.user_pins += 1
            else:
                self.pins.drop(hold)

    def fill(self, end: Cursor, start: int, fragment: Fragment) -> None:
        """Divide `fragment` among the nodes of a path from depth `start` to `end`.

        The path above `start` must be resident. If a node has become resident meanwhile, its slots
        in `fragment` are duplicates and are freed. The caller must not use `fragment` afterwards,
        even if an error is raised.

            start                                     end.depth
            ├── fragment ─────────────────────────────┤
            ├── node (resident) ──┼── node (absent) ──┤   duplicate head freed, the rest attached
        """
        assert self.fragments is not None
        end = resolve(end)
        if not end.node.resident:
            end = self.cut(end)
        chain = list(takewhile(lambda node: node.end > start, self.up(end)))
        unattached = [fragment]  # freed if the engine fails here
        try:
            for left, part in zip(range(len(chain) - 1, -1, -1), reversed(chain), strict=True):
                length = min(part.end, end.depth) - max(part.start, start)
                if left:
                    unattached.append(self.fragments.split(fragment, length))
                if part.fragment is None:
                    self._attach(part, unattached[-1])
                    unattached.pop()
                else:
                    self.free(unattached.pop())
        except BaseException:
            for piece in unattached:
                self.free(piece)
            raise

    def growable_leaf(self, node: Node) -> Node | None:
        """Return the parent of `node` if its fragment may grow by the slots of `node`.

        None if the parent is not resident, has other children, tails or a user's pin, or if a
        launched step writes it. `node` is absent.
        """
        above = node.parent
        if above is None or above.fragment is None or above.in_flight or above.user_pins:
            return None
        alone = len(above.children) == 1 and above.n_live == (1 if node.counted else 0)
        return above if alone and above.fragment.length == len(above.tokens) else None

    def absorb_chunk(self, leaf: Node, end: Cursor) -> None:
        """Merge the absent nodes from `leaf` down to `end` into `leaf`.

        Call it after a step has appended the slots of these nodes to the fragment of `leaf`.

        - If another chunk has computed a node, the slots from that node on are duplicates. They are
          freed, and merging ends.
        - If the parent of a node has other children or a user's pin, the node stays separate. The
          fragment is split there, and merging goes on below the node.

        leaf ── child ── … ── end       leaf.fragment  ├── leaf ──┼── child ──┼── … ──┤
        """
        assert self.fragments is not None and leaf.fragment is not None
        last = node_at(*end)
        assert last.fragment is not None or end.depth == last.end  # no join while it is in flight
        chain, below = list[Node](), last
        while below is not leaf and below.parent is not None:
            chain.append(below)
            below = below.parent
        for node in reversed(chain):
            above = node.parent
            assert above is not None and above.fragment is not None
            if node.fragment is not None:  # another chunk computed it: these are duplicates
                self.trim(above.fragment, len(above.tokens))
                return
            if len(above.children) == 1 and not above.user_pins:
                self._absorb(above, node)
            else:
                self._divide(above, node)
        if last.joined is not None:
            last = resolve_joined(last)
        self.growing[last] = self.n_steps
        self.growing.move_to_end(last)
        self.budget.growing = len(self.growing)

    def _divide(self, above: Node, node: Node) -> None:
        """Split the fragment of `above`: slots beyond the tokens of `above` go to its child `node`.

        This is needed if `above` has other children or a user's pin. Then `node` must not be
        merged into it.
        """
        assert self.fragments is not None and above.fragment is not None
        try:
            upper = self.fragments.split(above.fragment, len(above.tokens))
        except BaseException:
            self.trim(above.fragment, len(above.tokens))
            raise
        lower, above.fragment = above.fragment, upper
        self._stop_growing(above)
        self.epoch += 1
        self._spans.clear()
        try:
            self._attach(node, lower)
        except BaseException:
            self.free(lower)
            raise

    def _absorb(self, leaf: Node, node: Node) -> None:
        """Merge the absent only child `node` into `leaf`, whose fragment has the child's slots."""
        self.budget.absorb(leaf, node)
        if node.logits_rows:
            move_logits_rows(node, leaf, node.end)
        leaf.tokens.extend(node.tokens)
        leaf.holds += node.holds
        leaf.user_pins += node.user_pins
        leaf.children = node.children
        for child in leaf.children.values():
            child.parent = leaf
        leaf.last_used = self.clock
        node.joined, node.parent, node.children = leaf, None, {}
        self.n_nodes -= 1

    def finalize_leaves(self) -> None:
        """Release the spare slots of growing leaves."""
        while self.growing:
            self._finalize(next(iter(self.growing)))

    def finalize_idle_leaves(self, busy: Callable[[], Collection[Fragment]] = tuple) -> None:
        """Count a step; release spare slots of leaves that did not grow for `GROWING_STEPS` steps.

        busy: returns the fragments that a launched step may read or write; these are skipped.
        """
        self.n_steps += 1
        used: Collection[Fragment] | None = None
        while self.growing:
            leaf, step = next(iter(self.growing.items()))
            if step > self.n_steps - GROWING_STEPS:
                return
            used = busy() if used is None else used
            if leaf.in_flight or leaf.fragment in used:
                self.growing[leaf] = self.n_steps
                self.growing.move_to_end(leaf)
            else:
                self._finalize(leaf)

    def _finalize(self, node: Node) -> None:
        """Let the engine release the spare slots of a growing leaf."""
        self._stop_growing(node)
        assert self.fragments is not None and node.fragment is not None and not node.in_flight
        try:
            self.fragments.settle(node.fragment)
        except Exception as error:  # its spare slots stay in use until it is split or freed
            _log.warning("the engine could not settle a fragment: %r", error)

    def _stop_growing(self, node: Node) -> None:
        self.growing.pop(node, None)
        self.budget.growing = len(self.growing)

    def free(self, fragment: Fragment) -> None:
        """Free a fragment; never raises. If the engine fails, a later step tries again."""
        assert self.fragments is not None
        self.untrimmed.pop(fragment, None)
        try:
            self.fragments.free(fragment)
        except Exception as error:
            _log.warning("the engine could not free a fragment; trying again later: %r", error)
            self.unfreed.append(fragment)
            self.budget.lost += fragment.length

    def trim(self, fragment: Fragment, length: int) -> None:
        """Drop a fragment's slots from `length` on; never raises.

        If the engine fails, the fragment keeps its length and a later step tries again. So callers
        that continue with the fragment must check its length.
        """
        assert self.fragments is not None
        if fragment.length == length:
            return
        try:
            self.fragments.trim(fragment, length)
        except Exception as error:
            _log.warning("the engine could not trim a fragment; trying again later: %r", error)
            self.untrimmed[fragment] = length

    def _retry(self) -> None:
        """Retry frees and trims that failed."""
        unfreed, self.unfreed = self.unfreed, []
        for fragment in unfreed:
            self.budget.lost -= fragment.length
            self.free(fragment)
        for fragment, length in list(self.untrimmed.items()):
            del self.untrimmed[fragment]
            self.trim(fragment, length)

    def load_host(self, node: Node) -> None:
        """Copy the KV of an offloaded node back to the device, and free its host copy.

        The node must be pinned and its parent resident. Raises the engine's error.
        """
        assert self.fragments is not None and node.host is not None and node.parent is not None
        fragment = self.fragments.load(node.host, node.parent.fragment)
        try:
            self._attach(node, fragment)
        except BaseException:
            self.free(fragment)
            raise

    def split(self, node: Node, depth: int) -> Node:
        """Split a node before `depth`; return the new upper node, the parent of `node`.

        `node` becomes the lower half. Pins and cursors stay valid.
        """
        cut = depth - node.start
        above = node.parent
        assert 0 < cut < len(node.tokens) and above is not None
        upper = Node(node.tokens[:cut], node.start, above, node.namespace)
        upper.last_used = node.last_used
        upper.in_flight = node.in_flight and node.fragment is None  # a leaf grows in its lower half
        upper.pins = 1 if node.pins else 0
        upper.n_live = 1 if node.counted else 0
        if node.fragment is not None:
            assert self.fragments is not None
            upper.fragment = self.fragments.split(node.fragment, cut)
            self.epoch += 1
            self._spans.clear()
        if node.host is not None:
            self.host.split(upper, node, cut)
        move_logits_rows(node, upper, depth)
        above.children[upper.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[cut:], depth, upper
        upper.children[node.tokens[0]] = node
        self.n_nodes += 1
        return upper

    def join(self, cursor: Cursor, minimum: int = JOIN_LENGTH) -> int:
        """Join the chain of one-child nodes that ends at the cursor's node; the lowest remains.

        Do not call it while a launched step may read their fragments. If the engine fails, the
        other nodes of the chain stay separate.

        minimum: chains of fewer nodes are not joined.

        Returns: how many nodes were merged into the lowest one.
        """
        chain = join_chain(resolve(cursor).node)
        if len(chain) < minimum:
            return 0
        lower, joined = chain[0], [chain[0]]
        try:
            for upper in chain[1:]:
                self._merge(upper, lower)
                joined.append(upper)
        except Exception as error:  # the remaining nodes stay separate
            _log.warning("the engine could not join fragments: %r", error)
        if len(joined) == 1:
            return 0
        lower.tokens = [token for node in reversed(joined) for token in node.tokens]
        lower.start = joined[-1].start
        self.epoch += 1
        self._spans.clear()
        self.n_nodes -= len(joined) - 1
        return len(joined) - 1

    def new_tail(self, cursor: Cursor) -> Tail:
        """Return a new tail: a private fragment that one sequence appends to after `cursor`.

        The cursor must be the end of a node (see `cut`) that is resident and pinned.
        """
        cursor = resolve(cursor)
        assert self.fragments is not None and cursor.depth == cursor.node.end
        assert not cursor.node.in_flight, "a step in flight writes where a tail begins"
        tail = Tail(cursor, self.fragments.new(cursor.node.fragment))
        self.budget.add_tail(cursor.node)
        self.tails.add(tail)
        return tail

    def end_tail(self, tail: Tail, tokens: Sequence[int]) -> Cursor:
        """Move the KV of a tail into the tree; return the position after its tokens.

        If the tree has KV of some of these tokens already, the tail's duplicate is freed. The tail
        must not be used afterwards, even if an error is raised.

        tokens: the tokens of the tail's slots, one per slot.
        """
        assert self.fragments is not None and len(tokens) == tail.fragment.length
        cursor = self._close_tail(tail)
        if not tokens:
            self.free(tail.fragment)
            return cursor
        try:
            end = self.extend(cursor, tokens)
            self.fragments.settle(tail.fragment)
        except BaseException:
            self.free(tail.fragment)
            raise
        self.fill(end, cursor.depth, tail.fragment)
        return resolve(end)

    def drop_tail(self, tail: Tail) -> None:
        """Drop a tail and its slots."""
        self._close_tail(tail)
        self.free(tail.fragment)

    def check(self) -> None:
        """Check all invariants; an AssertionError names the broken one. Cost: O(tree)."""
        check_tree(self)

    def _attach(self, node: Node, fragment: Fragment) -> None:
        """Give a node its fragment, update the budget, and free the node's host copy."""
        assert self.fragments is not None and node.parent is not None
        self.fragments.attach(fragment, node.parent.fragment)
        self.host.free(node)
        node.fragment = fragment
        node.last_used = self.clock
        self.budget.attach(node)
        self._offer(node)

    def _close_tail(self, tail: Tail) -> Cursor:
        """Remove a tail and its reserved slots from all counts; return the cursor it followed."""
        cursor = resolve(tail.cursor)
        self.budget.remove_tail(cursor.node)
        self.budget.set_reserved(tail, 0)
        self.tails.discard(tail)
        return cursor

    def _offer(self, node: Node) -> None:
        if is_evictable(node):
            self.queue.offer(node)
            if len(self.queue) > 4 * self.n_nodes + 64:
                self.queue.rebuild([n for n in self.nodes() if is_evictable(n)])

    def forget(self, node: Node) -> None:
        """Delete a node if nothing needs its tokens (see `is_forgettable`), then its ancestors."""
        while (above := node.parent) is not None and is_forgettable(node):
            if above.children.get(node.tokens[0]) is not node:
                return
            del above.children[node.tokens[0]]
            self.n_nodes -= 1
            node.logits_rows = None
            node = above

    def _merge(self, upper: Node, lower: Node) -> None:
        """Merge the parent `upper` into its only child `lower`, and link `upper.joined` to it.

        The caller updates the tokens of `lower`.
        """
        above = upper.parent
        assert above is not None
        if upper.fragment is not None and lower.fragment is not None and self.fragments is not None:
            self.fragments.join(upper.fragment, lower.fragment)
        self._stop_growing(upper)
        lower.pins += upper.pins - (1 if lower.pins else 0)
        lower.holds += upper.holds
        lower.parent = above
        above.children[upper.tokens[0]] = lower
        move_logits_rows(upper, lower, upper.end)
        upper.joined, upper.fragment, upper.parent = lower, None, None
        upper.children = {}
