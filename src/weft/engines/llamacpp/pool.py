"""A pool of llama.cpp contexts of one model, so that different prompts do not share a cache.

On a CPU, attention of a token checks the mask of every used cell of its cache, also the cells of
other branches. Different prompts are therefore cheaper in caches of their own, if each of them
still has enough branches to fill a batch. A fragment is in the context of its parent::

    shard 0   prompt ──┬── a ── c        a fork copies no cells
                       └── b
    shard 1   prompt ───── d
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...errors import KVFull, ModelLoadError
from .context import Context, Detachable
from .leases import Leases, PathFragment

MAX_SHARDS = 8
CELL_BLOCK = 256  # llama.cpp rounds the number of cells up to a multiple
MIN_LEASES = 8  # of each shard, before another one is created: fewer rows read all weights
_MIN_SLOTS = 1024  # likewise; the masks of fewer cells cost little
_MIN_FORK_SLOTS = 256  # of other paths, before a path that forks moves to another shard
_NEW_CELLS = 1536  # of each shard after the first


class Shard(Leases):
    """The leases of one context, and the number of slots of all fragments in it."""

    def __init__(self, context: Context) -> None:
        """Create an empty shard."""
        super().__init__(context)
        self.context = context
        self.slots = 0

    @property
    def is_crowded(self) -> bool:
        """True if the next prompt is cheaper in another shard."""
        return self.n_leased >= MIN_LEASES and self.slots >= _MIN_SLOTS


class Need(NamedTuple):
    """Cells that a shard needs for a step.

    required: without them the step fails.

    preferred: it gets them if there are enough.
    """

    required: int
    preferred: int


class ContextPool:
    """Up to `MAX_SHARDS` contexts, which have at most `max_cells` cells together.

    Attributes:
        shards: all shards, at least one.
        max_cells: maximum of `n_cells`, a multiple of `CELL_BLOCK`.
    """

    def __init__(
        self, first: Context, max_cells: int, new_context: Callable[[int], Context] | None = None
    ) -> None:
        """Start with one context.

        Args:
            first: the first context.
            max_cells: maximum number of cells of all contexts.
            new_context: creates a further context with a number of cells; None if there must be
                only one.
        """
        self.shards = [Shard(first)]
        self.max_cells = _rounded(max_cells)
        self._new_context = new_context

    @property
    def n_cells(self) -> int:
        """Number of cells of all contexts."""
        return sum([shard.context.n_cells for shard in self.shards])

    @property
    def slots(self) -> int:
        """Number of slots of all fragments; 0 after `close`."""
        return sum([shard.slots for shard in self.shards if not shard.context.closed])

    @property
    def may_spread(self) -> bool:
        """True if paths can be in different shards."""
        return self._new_context is not None or len(self.shards) > 1

    def choose(self) -> Shard:
        """Return the shard for a path that continues no fragment; may create it.

        Crowded shards are avoided. If all are crowded and no other can be created, the shard with
        the fewest slots is returned.
        """
        for shard in self.shards:
            if not shard.is_crowded:
                return shard
        return self._try_new_shard() or min(self.shards, key=lambda shard: shard.slots)

    def choose_for_fork(self, shard: Shard, n_others: int) -> Shard:
        """Return the shard for a path of `shard` from which many rows start; may create it.

        n_others: slots of other paths in `shard`.
        """
        if n_others < _MIN_FORK_SLOTS:
            return shard
        best = min(self.shards, key=lambda each: each.slots)
        if best.slots:
            best = self._try_new_shard() or best
        return best if best.slots + _MIN_FORK_SLOTS <= n_others else shard

    def _try_new_shard(self) -> Shard | None:
        """Create a shard; return None at `MAX_SHARDS`, or if cells or memory are short."""
        if self._new_context is None or len(self.shards) >= MAX_SHARDS:
            return None
        if self.n_cells + _rounded(_NEW_CELLS) > self.max_cells:
            return None
        try:
            context = self._new_context(_NEW_CELLS)
        except ModelLoadError:
            return None
        context.reuse_from(self.shards[0].context)
        self.shards.append(Shard(context))
        return self.shards[-1]

    def reserve(self, needs: Mapping[Shard, Need]) -> None:
        """Give shards the cells that they need, within `max_cells`.

        A shard that grows at least doubles if `max_cells` allows it. If cells or memory are short,
        shards that have no leases and are not in `needs` are closed, and others shrink. A shard
        that shrinks for another gives half of its spare cells, or more if that is required.

        Raises:
            KVFull: the cells do not suffice, or there is not enough memory. No fragment changes.
        """
        if all([need.preferred <= shard.context.n_cells for shard, need in needs.items()]):
            return
        required = {
            shard: _rounded(max(shard.slots, needs[shard].required if shard in needs else 0))
            for shard in self.shards
            if shard in needs or shard.n_leased
        }
        total = sum(required.values())
        if total > self.max_cells:
            raise KVFull(
                f"the KV needs {total} cells; there are at most {self.max_cells}",
                needed=total - self.max_cells,
                capacity=self.max_cells,
            )
        try:
            self._resize(self._sizes(required, needs))
        except KVFull:
            # There is less memory than configured: keep only what is required.
            self._resize({shard: max(n, CELL_BLOCK) for shard, n in required.items()})

    def _resize(self, sizes: Mapping[Shard, int]) -> None:
        """Close shards that are not in `sizes`, shrink others, then let the rest grow.

        Raises: KVFull if there is not enough memory.
        """
        for shard in [shard for shard in reversed(self.shards) if shard not in sizes]:
            self._close_shard(shard)
        for shard in sorted(sizes, key=lambda shard: sizes[shard] - shard.context.n_cells):
            shard.context.resize(sizes[shard])

    def _sizes(
        self, required: Mapping[Shard, int], needs: Mapping[Shard, Need]
    ) -> dict[Shard, int]:
        """Return the number of cells that each shard gets; shards to close are left out.

        Shards that grow share the free cells equally.

        required: minimum cells of each shard that has leases or is in `needs`; others may close.
        """
        sizes = {shard: max(shard.context.n_cells, required.get(shard, 0)) for shard in self.shards}
        excess = sum(sizes.values()) - self.max_cells
        for shard in self.shards:
            if excess > 0 and shard not in required:
                excess -= sizes.pop(shard)
        for shard in sorted(sizes, key=lambda s: required.get(s, 0) - sizes[s]):
            if excess > 0:
                spare = sizes[shard] - required.get(shard, 0)
                # More than the excess, so that the next steps need no resize, which copies KV.
                cut = min(spare, max(excess, spare // 2 // CELL_BLOCK * CELL_BLOCK))
                sizes[shard] -= cut
                excess -= cut
        wanted = {
            shard: _rounded(max(need.preferred, 2 * shard.context.n_cells)) - sizes[shard]
            for shard, need in needs.items()
            if need.preferred > shard.context.n_cells
        }
        for i, shard in enumerate(sorted(wanted, key=wanted.__getitem__)):
            share = -excess // (len(wanted) - i) // CELL_BLOCK * CELL_BLOCK
            more = min(wanted[shard], share)
            sizes[shard] += more
            excess += more
        return sizes

    def _close_shard(self, shard: Shard) -> None:
        """Close a shard without leases. The result of the last step may be in its memory."""
        shard.context.detach_reader()
        shard.context.close()
        self.shards.remove(shard)

    def lend_to(self, reader: Detachable) -> None:
        """Register the result of the last step; see `Context.lend_to`."""
        for shard in self.shards:
            shard.context.lend_to(reader)

    def detach_reader(self) -> None:
        """Detach the result of the last step; see `Context.detach_reader`."""
        for shard in self.shards:
            shard.context.detach_reader()

    def close(self) -> None:
        """Free all contexts; idempotent."""
        self.detach_reader()
        self._new_context = None
        for shard in self.shards:
            shard.context.close()


def shard_of(fragment: PathFragment) -> Shard:
    """Return the shard of a fragment with slots."""
    shard = fragment.own.leases
    assert isinstance(shard, Shard)
    return shard


def _rounded(n_cells: int) -> int:
    """Return the number of cells that llama.cpp allocates for `n_cells`."""
    return -(-n_cells // CELL_BLOCK) * CELL_BLOCK
