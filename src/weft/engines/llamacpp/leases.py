"""Assign llama.cpp sequences to the fragments of a tree.

llama.cpp stores with each cell of its cache the sequences that can attend to it. A token that
runs in a sequence attends to the cells of that sequence. Each leaf of the tree leases a sequence,
which contains the cells of the path from the root to the leaf::

    prompt ──┬── a ── c      lease 0: prompt a c        a fork copies no cells
             └── b           lease 1: prompt b

A fragment with children has no lease of its own: it uses the lease of one child. A `Strand` is a
chain of fragments with one lease: a leaf and all ancestors that use its lease. Strands are merged
as in union-find, so that no operation walks up a path.
"""

from __future__ import annotations

from typing import Protocol

from ...errors import KVFull
from ..base import Fragment

END = -1  # to the end of a sequence


class Cells(Protocol):
    """The sequences of a cache. Ranges are the positions start … end - 1; end may be END."""

    n_leases: int
    max_leases: int

    def reserve(self, n_leases: int) -> None:
        """Grow to at least `n_leases` leases, or to the maximum if lower."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of lease `source` in a range of positions to lease `target`."""

    def remove(self, lease: int, start: int, end: int) -> None:
        """Remove the cells in a range from a lease. Cells in no lease are free."""


class Strand:
    """A chain of fragments, each the parent of the next, that use one lease; ends in a leaf.

    leases: the object that assigned the lease.
    """

    __slots__ = ("_into", "lease", "leases")

    def __init__(self, lease: int, leases: Leases) -> None:
        self.lease = lease
        self.leases = leases
        self._into: Strand | None = None

    def find(self) -> Strand:
        """Return the strand into which this one was merged, else itself. Cost: O(1), amortised."""
        last = self
        while last._into is not None:
            last = last._into
        while self._into is not None:
            self._into, self = last, self._into
        return last

    def join(self, other: Strand) -> None:
        """Merge this strand into `other`, whose lease then covers its fragments."""
        self._into = other


class PathFragment(Fragment):
    """A fragment at the positions start … start + length - 1 of its path.

    parent: the fragment before it; None at the root. start: position of its first slot. strand:
    None while it has no slots; see `own`. children: fragments with slots that start at its end.
    side_branches: fragments with slots that start before its end, because it grew after they
    branched off. A split or trim at their start makes them children. is_loose: its ancestors' slots
    were dropped; `attach` must give it a new parent.
    """

    __slots__ = ("side_branches", "children", "is_loose", "parent", "start", "strand")

    def __init__(self, parent: PathFragment | None) -> None:
        super().__init__(0)
        self.parent = parent
        self.start = 0 if parent is None else parent.end
        self.strand: Strand | None = None
        self.children: dict[PathFragment, None] = {}
        self.side_branches: dict[PathFragment, None] = {}
        self.is_loose = False

    @property
    def end(self) -> int:
        """The position after its last slot."""
        return self.start + self.length

    @property
    def own(self) -> Strand:
        """Its strand, after merges. Only for fragments with slots."""
        assert self.strand is not None
        return self.strand.find()

    @property
    def lease(self) -> int:
        """A lease with the cells of the path to its end. Only for fragments with slots."""
        return self.own.lease


class Leases:
    """Assigns sequences to fragments. A method that raises has changed no fragment."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._n_known = cells.n_leases
        self._free = list(range(cells.n_leases - 1, -1, -1))

    @property
    def n_leases(self) -> int:
        """Maximum number of llama.cpp sequences, growth included."""
        return self._cells.max_leases

    @property
    def n_free(self) -> int:
        """Number of sequences that can still be leased, growth included."""
        return len(self._free) + self._cells.max_leases - self._n_known

    @property
    def n_leased(self) -> int:
        """Number of sequences that are leased."""
        return self._n_known - len(self._free)

    def reserve(self, n: int) -> None:
        """Grow until `n` sequences are free, or to the maximum.

        Raises: KVFull if there is not enough memory.
        """
        if len(self._free) < n and self._n_known < self._cells.max_leases:
            self._cells.reserve(self._n_known - len(self._free) + n)
            self._free[:0] = range(self._cells.n_leases - 1, self._n_known - 1, -1)
            self._n_known = self._cells.n_leases

    def take(self) -> int:
        """Lease an empty sequence and return its number. Raises: KVFull if all are leased."""
        self.reserve(1)
        if not self._free:
            raise KVFull(
                f"all {self.n_leases} sequences of llama.cpp are leased",
                needed=1,
                capacity=self.n_leases,
            )
        return self._free.pop()

    def give_back(self, lease: int) -> None:
        """End a lease: remove all cells from its sequence, which is free then."""
        self._cells.remove(lease, 0, END)
        self._free.append(lease)

    def borrow(self, below: PathFragment | None, end: int) -> int:
        """Lease a sequence temporarily, with the cells of a path before position `end`; return its
        number.

        The caller ends the lease with `give_back`.

        Args:
            below: the last fragment of the path; None for an empty path.
            end: positions from here on are not added.

        Raises:
            KVFull: all sequences are leased.
        """
        lease = self.take()
        if below is not None and end:
            self._cells.copy(below.lease, lease, 0, end)
        return lease

    def insert(
        self, fragment: PathFragment, parent: PathFragment | None, start: int, *, growing: bool
    ) -> None:
        """Insert a fragment without slots into the tree, with a lease for the path before `start`.

        It uses the lease of its parent if the parent is a leaf that ends at `start` and does not
        grow. Otherwise it gets a lease of its own.

        Args:
            parent: the last fragment of the path; None at the root.
            start: position of its first slot.
            growing: the parent is also written to in this step, so the fragment joins its
                `side_branches`.

        Raises:
            KVFull: all sequences are leased.
        """
        at_end = parent is not None and parent.end == start and not growing
        if parent is not None and at_end and not parent.children:
            fragment.strand = parent.own
        else:
            fragment.strand = Strand(self.borrow(parent, start), self)
        fragment.parent, fragment.start, fragment.is_loose = parent, start, False
        if parent is not None:
            (parent.children if at_end else parent.side_branches)[fragment] = None

    def make_leaf(self, fragment: PathFragment) -> None:
        """Prepare a fragment with children to grow: they become side branches.

        The fragment keeps its lease; the child that used it gets a lease of its own. Raises: KVFull
        if all sequences are leased.
        """
        if not fragment.children:
            return
        strand = fragment.own
        heir = next(each for each in fragment.children if each.own is strand)
        lease = self.take()
        self._cells.copy(strand.lease, lease, 0, END)
        self._cells.remove(strand.lease, fragment.end, END)
        _move(heir, strand, Strand(lease, self))
        fragment.side_branches |= fragment.children
        fragment.children = {}

    def trim_leaf(self, fragment: PathFragment, length: int) -> None:
        """Trim a leaf to `length` slots.

        Without slots and side branches it leaves the tree, and its lease is given back or goes to
        its parent. Raises: ValueError if the fragment has children.
        """
        if fragment.strand is None:
            return
        if fragment.children:
            raise ValueError("cannot trim a fragment that others continue")
        if length == 0 and not fragment.side_branches:
            self.drop(fragment)
            return
        if length < fragment.length:
            self._cells.remove(fragment.lease, fragment.start + length, END)
        fragment.length = length
        self._adopt_side_branches(fragment)

    def _adopt_side_branches(self, leaf: PathFragment) -> None:
        """After a trim: make side branches that start at the new end of `leaf` its children.

        The lease of `leaf` is given back then, because the first child's lease covers it.
        """
        adopted = [each for each in leaf.side_branches if each.start == leaf.end]
        for child in adopted:
            del leaf.side_branches[child]
            leaf.children[child] = None
        if adopted:
            strand = leaf.own
            lease = strand.lease
            strand.join(adopted[0].own)
            self.give_back(lease)

    def drop(self, fragment: PathFragment) -> None:
        """Remove a fragment and its slots from the tree.

        Its children and side branches become loose (`is_loose`) until `attach`. The lease of a leaf
        is given back. If its parent becomes a leaf, the parent keeps the lease instead.
        """
        if fragment.strand is None:
            return
        above, below = fragment.parent, [*fragment.children, *fragment.side_branches]
        for child in below:
            for lease in _leases_covering(child):
                self._cells.remove(lease, fragment.start, child.start)
        is_side_branch = above is not None and fragment in above.side_branches
        if above is not None:
            above.children.pop(fragment, None)
            above.side_branches.pop(fragment, None)
        if not fragment.children:
            self._release_leaf(fragment, above)
        for child in below:
            child.parent, child.is_loose = above, True
            if above is not None:
                (above.side_branches if is_side_branch else above.children)[child] = None
        fragment.strand, fragment.children, fragment.side_branches = None, {}, {}

    def _release_leaf(self, leaf: PathFragment, above: PathFragment | None) -> None:
        """Give back the lease of a leaf that is removed from the tree.

        The parent `above` keeps the lease instead if it uses it and has no other lease below.
        """
        strand = leaf.own
        lease = strand.lease
        if above is not None and above.strand is not None and above.own is strand:
            heir = next(iter([*above.children, *leaf.side_branches]), None)
            if heir is None:
                self._cells.remove(lease, leaf.start, END)
                return
            strand.join(heir.own)
        self.give_back(lease)

    def split(self, fragment: PathFragment, at: int) -> PathFragment:
        """Split a fragment before its slot `at`. The cache does not change.

        Returns:
            A new fragment with the first `at` slots; `fragment` keeps the rest and is its child.
        """
        upper = PathFragment(fragment.parent)
        upper.start, upper.length, upper.is_loose = fragment.start, at, fragment.is_loose
        upper.strand = fragment.strand
        _replace(fragment, upper)
        fragment.start += at
        fragment.length -= at
        fragment.parent, fragment.is_loose = upper, False
        upper.children[fragment] = None
        for branch in [each for each in fragment.side_branches if each.start <= fragment.start]:
            del fragment.side_branches[branch]
            branch.parent = upper
            (upper.children if branch.start == fragment.start else upper.side_branches)[branch] = (
                None
            )
        return upper

    def join(self, upper: PathFragment, lower: PathFragment) -> None:
        """Merge `upper` into its child `lower`, and empty `upper`. The cache does not change."""
        _replace(upper, lower)
        lower.start, lower.parent, lower.is_loose = upper.start, upper.parent, upper.is_loose
        lower.length += upper.length
        lower.side_branches |= upper.side_branches
        for branch in upper.side_branches:
            branch.parent = lower
        upper.length, upper.strand, upper.parent = 0, None, None
        upper.children, upper.side_branches = {}, {}

    def replace(self, twin: PathFragment, fragment: PathFragment) -> None:
        """Put `fragment`, which was dropped from its own tree, in the place of its copy `twin`."""
        _replace(twin, fragment)
        fragment.parent, fragment.start, fragment.is_loose = twin.parent, twin.start, False
        fragment.strand, fragment.children = twin.strand, twin.children
        fragment.side_branches = twin.side_branches
        for child in (*fragment.children, *fragment.side_branches):
            child.parent = fragment

    def attach(self, fragment: PathFragment, parent: PathFragment | None) -> None:
        """Move a fragment, with all fragments below it, to another parent.

        Their leases lose the cells before the fragment and get those of the path to `parent`.
        parent: None: no cells before the fragment.
        """
        if fragment.strand is None:
            fragment.parent = parent
            return
        if fragment.parent is parent and not fragment.is_loose:
            return
        self._take_out(fragment)
        for lease in _leases_covering(fragment):
            self._cells.remove(lease, 0, fragment.start)
            if parent is not None:
                self._cells.copy(parent.lease, lease, 0, fragment.start)
        fragment.parent, fragment.is_loose = parent, False
        if parent is None:
            return
        if parent.end != fragment.start:
            parent.side_branches[fragment] = None
            return
        if not parent.children:  # the parent was a leaf: it uses the lease of its first child
            strand = parent.own
            lease = strand.lease
            strand.join(fragment.own)
            self.give_back(lease)
        parent.children[fragment] = None

    def _take_out(self, fragment: PathFragment) -> None:
        """Remove a fragment, with its lease, from its parent.

        If the parent used that lease, it gets the lease of another child, else a new one.
        """
        above, strand = fragment.parent, fragment.own
        if above is None:
            return
        if above.strand is not None and above.own is strand and fragment in above.children:
            heir = next((each for each in above.children if each is not fragment), None)
            kept = Strand(self.borrow(above, above.end), self) if heir is None else heir.own
            _move(fragment, strand, Strand(strand.lease, self))
            strand.join(kept)
        above.children.pop(fragment, None)
        above.side_branches.pop(fragment, None)


def _leases_covering(fragment: PathFragment) -> list[int]:
    """Return the leases that contain a fragment: those of all leaves at or below it."""
    leases, waiting = [], [fragment]
    while waiting:
        one = waiting.pop()
        if not one.children:
            leases.append(one.lease)
        waiting.extend(one.children)
        waiting.extend(one.side_branches)
    return leases


def _move(fragment: PathFragment, strand: Strand, to: Strand) -> None:
    """Move `fragment`, and the descendants that continue `strand`, to the strand `to`."""
    below: PathFragment | None = fragment
    while below is not None:
        following = (each for each in below.children if each.own is strand)
        below.strand, below = to, next(following, None)


def _replace(fragment: PathFragment, by: PathFragment) -> None:
    """Replace `fragment` by `by` among the children or side_branches of its parent."""
    above = fragment.parent
    if above is None or fragment.strand is None:
        return
    for some in (above.children, above.side_branches):
        if fragment in some:
            del some[fragment]
            some[by] = None
