"""Serialize the KV of paths, and move paths between the contexts of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ...errors import KVFull
from .leases import PathFragment
from .pool import MIN_LEASES, ContextPool, Need, Shard, shard_of
from .state import Bytes


def take_state(fragment: PathFragment, start: int, end: int) -> Bytes:
    """Serialize the KV at positions start … end - 1 of a fragment's path. Raises: KVFull."""
    shard = shard_of(fragment)
    lease = shard.take()
    try:
        shard.context.copy(fragment.lease, lease, start, end)
        return shard.context.take_state(lease)
    finally:
        shard.give_back(lease)


def put_state(fragment: PathFragment, state: Bytes, start: int, end: int) -> None:
    """Load KV at positions start … end - 1 into the lease of a fragment. Raises: KVFull."""
    shard = shard_of(fragment)
    lease = shard.take()
    try:
        if not shard.context.put_state(lease, state):
            raise KVFull("llama.cpp has no room", needed=end - start, capacity=0)
        shard.context.copy(lease, fragment.lease, start, end)
    finally:
        shard.give_back(lease)


def move(
    pool: ContextPool, fragment: PathFragment, parent: PathFragment | None, target: Shard
) -> None:
    """Move a fragment, and all below it, to another context. Cost: their KV is copied twice.

    A pool has several contexts only if the model has no sliding window. So a state contains all
    cells of a fragment.

    Args:
        pool: of both contexts.
        fragment: has slots. If `parent` is None, it is a root.
        parent: its next parent, a fragment of `target` that ends where `fragment` starts or later.
        target: the context.

    Raises:
        KVFull: the target has too few cells or leases. No fragment has moved then.
    """
    source = shard_of(fragment)
    pieces = _subtree(fragment)
    n = sum([piece.length for piece in pieces])
    pool.reserve({target: Need(target.slots + n, target.slots + n)})
    twins: dict[PathFragment, PathFragment] = {}
    try:
        for piece in pieces:
            above = parent if piece is fragment else twins[_parent(piece)]
            is_side_branch = piece is not fragment and piece in _parent(piece).side_branches
            twins[piece] = twin = PathFragment(above)
            target.insert(twin, above, piece.start, growing=is_side_branch)
            if piece.length:
                put_state(twin, take_state(piece, piece.start, piece.end), piece.start, piece.end)
            twin.length = piece.length
    except BaseException:
        for twin in reversed(twins.values()):
            target.drop(twin)
        raise
    for piece in reversed(pieces):
        source.drop(piece)
    for piece, twin in twins.items():
        target.replace(twin, piece)
    source.slots -= n
    target.slots += n


def spread_forks(pool: ContextPool, n_rows: Mapping[PathFragment, int]) -> None:
    """Move paths from which many rows start to contexts with fewer slots of other paths.

    A path moves only if it has no branches yet, at least `MIN_LEASES` rows start from it, and as
    many leases stay behind. It also stays if cells or leases are short: that costs time only.

    Args:
        pool: of the paths.
        n_rows: for each fragment at which rows without slots start in this step, their number.
    """
    forks = {above: n for above, n in n_rows.items() if n >= MIN_LEASES}
    n_leases = {shard: shard.n_leased for shard in pool.shards}  # once all rows have started
    for above, n in forks.items():
        n_leases[shard_of(above)] += n - 1
    for above, n in forks.items():
        source = shard_of(above)
        root = _unbranched_root(above) if n_leases[source] >= n + MIN_LEASES else None
        if root is None:
            continue
        target = pool.choose_for_fork(source, source.slots - above.end)
        if target is not source:
            with suppress(KVFull):
                move(pool, root, None, target)
                n_leases[source] -= n


def _unbranched_root(leaf: PathFragment) -> PathFragment | None:
    """Return the first fragment of a leaf's path; None if other paths share part of it.

    Also None if a fragment of the path is loose, or `leaf` has children.

    Cost: one step per fragment of the path.
    """
    root, below = leaf, None
    while not root.is_loose and not root.side_branches and root.children.keys() <= {below}:
        if root.parent is None:
            return root
        root, below = root.parent, root
    return None


def _subtree(fragment: PathFragment) -> list[PathFragment]:
    """Return a fragment and all fragments below it, each after its parent."""
    fragments, waiting = [], [fragment]
    while waiting:
        fragments.append(waiting.pop())
        waiting.extend([*fragments[-1].children, *fragments[-1].side_branches])
    return fragments


def _parent(fragment: PathFragment) -> PathFragment:
    """Return the parent of a fragment below others."""
    assert fragment.parent is not None
    return fragment.parent
