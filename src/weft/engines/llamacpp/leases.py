"""Which sequence covers which fragment. Pure bookkeeping over two calls of llama.cpp.

llama.cpp tags each cell of its cache with the sequences that see it; a token run in a sequence
sees that sequence's cells. A sequence is leased to each leaf and covers the whole path to it::

    prompt ──┬── a ── c      lease 0: prompt a c        a fork copies tags, never cells
             └── b           lease 1: prompt b

A fragment with others below it has no lease of its own: one of theirs covers it. The fragments
that a lease came along without a fork are its `Strand`: of those below a fragment, exactly one is
of its strand. Strands that become one are linked, as in union-find, so that no operation walks up
a path.
"""

from __future__ import annotations

from typing import Protocol

from ...errors import KVFull
from ..base import Fragment

END = -1  # to the end of a sequence


class Cells(Protocol):
    """The cells of the cache, by sequence; positions start … end - 1."""

    n_leases: int
    max_leases: int

    def reserve(self, n_cells: int, n_leases: int) -> None:
        """Grow to at least this many cells and leases, up to the maximum."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` see what `source` sees there."""

    def remove(self, lease: int, start: int, end: int) -> None:
        """Let a sequence see nothing there; cells that nothing sees are free."""


class Strand:
    """Fragments one below the other that one lease covers; the lowest is a leaf."""

    __slots__ = ("_into", "lease")

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self._into: Strand | None = None

    def find(self) -> Strand:
        """Return the strand that this one has become a part of. Cost: O(1), amortised."""
        last = self
        while last._into is not None:
            last = last._into
        while self._into is not None:
            self._into, self = last, self._into
        return last

    def join(self, other: Strand) -> None:
        """Become a part of another strand."""
        self._into = other


class PathFragment(Fragment):
    """Slots at positions start … start + length - 1. strand: None while it holds none.

    children: those that hold slots and begin at its end. asides: those that begin before its end,
    since it has grown beyond; a split or a trim there makes children of them.
    is_loose: the slots before its own are gone; `attach` gives it others.
    """

    __slots__ = ("asides", "children", "is_loose", "parent", "start", "strand")

    def __init__(self, parent: PathFragment | None) -> None:
        super().__init__(0)
        self.parent = parent
        self.start = 0 if parent is None else parent.end
        self.strand: Strand | None = None
        self.children: dict[PathFragment, None] = {}
        self.asides: dict[PathFragment, None] = {}
        self.is_loose = False

    @property
    def end(self) -> int:
        """The position after its last slot."""
        return self.start + self.length

    @property
    def own(self) -> Strand:
        """Its strand; it holds slots."""
        assert self.strand is not None
        return self.strand.find()

    @property
    def lease(self) -> int:
        """A sequence that covers the path to its end."""
        return self.own.lease


class Leases:
    """Gives sequences to fragments. What raises has changed nothing."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._n_known = cells.n_leases
        self._free = list(range(cells.n_leases - 1, -1, -1))

    @property
    def n_leases(self) -> int:
        """Maximum number of sequences."""
        return self._cells.max_leases

    @property
    def n_free(self) -> int:
        """Number of sequences without a lease, including those that growth would add."""
        return len(self._free) + self._cells.max_leases - self._n_known

    def reserve(self, n: int) -> None:
        """Grow to `n` free sequences, or to the maximum. Raises: KVFull if memory is short."""
        if len(self._free) < n and self._n_known < self._cells.max_leases:
            self._cells.reserve(0, self._n_known - len(self._free) + n)
            self._free[:0] = range(self._cells.n_leases - 1, self._n_known - 1, -1)
            self._n_known = self._cells.n_leases

    def take(self) -> int:
        """Return a sequence that sees nothing. Raises: KVFull when all are leased."""
        self.reserve(1)
        if not self._free:
            raise KVFull(
                f"all {self.n_leases} sequences of llama.cpp are leased",
                needed=1,
                capacity=self.n_leases,
            )
        return self._free.pop()

    def give_back(self, lease: int) -> None:
        """Let a sequence see nothing, and lease it out again."""
        self._cells.remove(lease, 0, END)
        self._free.append(lease)

    def borrow(self, below: PathFragment | None, end: int) -> int:
        """Return a sequence of its own that sees a path up to position `end`."""
        lease = self.take()
        if below is not None and end:
            self._cells.copy(below.lease, lease, 0, end)
        return lease

    def hang(
        self, fragment: PathFragment, parent: PathFragment | None, start: int, *, growing: bool
    ) -> None:
        """Give a fragment without slots a lease that sees the path up to `start`.

        That is the lease of its parent, where this is a leaf that does not grow, else another one.
        """
        at_end = parent is not None and parent.end == start and not growing
        if parent is not None and at_end and not parent.children:
            fragment.strand = parent.own
        else:
            fragment.strand = Strand(self.borrow(parent, start))
        fragment.parent, fragment.start, fragment.is_loose = parent, start, False
        if parent is not None:
            (parent.children if at_end else parent.asides)[fragment] = None

    def make_leaf(self, fragment: PathFragment) -> None:
        """Let a fragment grow: what continues it gets a lease of its own, and is aside."""
        if not fragment.children:
            return
        strand = fragment.own
        heir = next(each for each in fragment.children if each.own is strand)
        lease = self.take()
        self._cells.copy(strand.lease, lease, 0, END)
        self._cells.remove(strand.lease, fragment.end, END)
        _move(heir, strand, Strand(lease))
        fragment.asides |= fragment.children
        fragment.children = {}

    def cut(self, fragment: PathFragment, length: int) -> None:
        """Let nothing see a leaf's slots from `length` on; none left: it has no lease, either."""
        if fragment.strand is None:
            return
        if fragment.children:
            raise ValueError("cannot trim a fragment that others continue")
        if length == 0 and not fragment.asides:
            self.drop(fragment)
            return
        if length < fragment.length:
            self._cells.remove(fragment.lease, fragment.start + length, END)
        fragment.length = length
        self._adopt_asides(fragment)

    def _adopt_asides(self, leaf: PathFragment) -> None:
        """Make children of what begins where a leaf ends now; one of them has its lease then."""
        found = [each for each in leaf.asides if each.start == leaf.end]
        for each in found:
            del leaf.asides[each]
            leaf.children[each] = None
        if found:
            strand = leaf.own
            lease = strand.lease
            strand.join(found[0].own)
            self.give_back(lease)

    def drop(self, fragment: PathFragment) -> None:
        """Forget a fragment's slots. Those below it are loose: they wait for others in its place.

        The lease of a leaf goes back, or to its parent where that is a leaf then.
        """
        if fragment.strand is None:
            return
        above, below = fragment.parent, [*fragment.children, *fragment.asides]
        for each in below:
            for lease in _covering(each):
                self._cells.remove(lease, fragment.start, each.start)
        is_aside = above is not None and fragment in above.asides
        if above is not None:
            above.children.pop(fragment, None)
            above.asides.pop(fragment, None)
        if not fragment.children:
            self._retire(fragment, above)
        for each in below:
            each.parent, each.is_loose = above, True
            if above is not None:
                (above.asides if is_aside else above.children)[each] = None
        fragment.strand, fragment.children, fragment.asides = None, {}, {}

    def _retire(self, leaf: PathFragment, above: PathFragment | None) -> None:
        """Give a leaf's lease back, or let its parent have it where that is a leaf then."""
        strand = leaf.own
        lease = strand.lease
        if above is not None and above.strand is not None and above.own is strand:
            heir = next(iter([*above.children, *leaf.asides]), None)
            if heir is None:
                self._cells.remove(lease, leaf.start, END)
                return
            strand.join(heir.own)
        self.give_back(lease)

    def split(self, fragment: PathFragment, at: int) -> PathFragment:
        """Cut before slot `at`; return the upper part. Nothing in the cache changes."""
        upper = PathFragment(fragment.parent)
        upper.start, upper.length, upper.is_loose = fragment.start, at, fragment.is_loose
        upper.strand = fragment.strand
        _replace(fragment, upper)
        fragment.start += at
        fragment.length -= at
        fragment.parent, fragment.is_loose = upper, False
        upper.children[fragment] = None
        for aside in [each for each in fragment.asides if each.start <= fragment.start]:
            del fragment.asides[aside]
            aside.parent = upper
            (upper.children if aside.start == fragment.start else upper.asides)[aside] = None
        return upper

    def join(self, upper: PathFragment, lower: PathFragment) -> None:
        """Make one fragment of two: `lower`. Nothing in the cache changes."""
        _replace(upper, lower)
        lower.start, lower.parent, lower.is_loose = upper.start, upper.parent, upper.is_loose
        lower.length += upper.length
        lower.asides |= upper.asides
        for aside in upper.asides:
            aside.parent = lower
        upper.length, upper.strand, upper.parent = 0, None, None
        upper.children, upper.asides = {}, {}

    def attach(self, fragment: PathFragment, parent: PathFragment | None) -> None:
        """Let a fragment, and what is below it, see another path above it than until now."""
        if fragment.strand is None:
            fragment.parent = parent
            return
        if fragment.parent is parent and not fragment.is_loose:
            return
        self._take_out(fragment)
        for lease in _covering(fragment):
            self._cells.remove(lease, 0, fragment.start)
            if parent is not None:
                self._cells.copy(parent.lease, lease, 0, fragment.start)
        fragment.parent, fragment.is_loose = parent, False
        if parent is None:
            return
        if parent.end != fragment.start:
            parent.asides[fragment] = None
            return
        if not parent.children:  # a leaf until now
            strand = parent.own
            lease = strand.lease
            strand.join(fragment.own)
            self.give_back(lease)
        parent.children[fragment] = None

    def _take_out(self, fragment: PathFragment) -> None:
        """Take a fragment, with its lease, from its parent, which keeps another one."""
        above, strand = fragment.parent, fragment.own
        if above is None:
            return
        if above.strand is not None and above.own is strand and fragment in above.children:
            heir = next((each for each in above.children if each is not fragment), None)
            kept = Strand(self.borrow(above, above.end)) if heir is None else heir.own
            _move(fragment, strand, Strand(strand.lease))
            strand.join(kept)
        above.children.pop(fragment, None)
        above.asides.pop(fragment, None)


def _covering(fragment: PathFragment) -> list[int]:
    """Return the leases of all leaves at or below a fragment."""
    found, waiting = [], [fragment]
    while waiting:
        one = waiting.pop()
        if not one.children:
            found.append(one.lease)
        waiting.extend(one.children)
        waiting.extend(one.asides)
    return found


def _move(fragment: PathFragment, strand: Strand, to: Strand) -> None:
    """Move a fragment, and those below it that are of a strand, to another strand."""
    below: PathFragment | None = fragment
    while below is not None:
        following = (each for each in below.children if each.own is strand)
        below.strand, below = to, next(following, None)


def _replace(fragment: PathFragment, by: PathFragment) -> None:
    """Let `by` stand where a fragment stands below its parent."""
    above = fragment.parent
    if above is None or fragment.strand is None:
        return
    for some in (above.children, above.asides):
        if fragment in some:
            del some[fragment]
            some[by] = None
