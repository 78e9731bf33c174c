"""Generating calls on several leaves, collected to run as one batch."""

from __future__ import annotations

from collections import Counter, UserList
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._core.sampling.params import SamplingParams
from .grow import Growth
from .node import lm_of, set_deferral, set_pending_growth
from .pending_branch import PendingBranch

if TYPE_CHECKING:
    from .heddle import Heddle


class DeferredGrowth:
    """Collects the generating calls that `apply_at_leaves` makes, to run them as one batch.

    The calls run when a caller first reads the children of one of their nodes, at the latest after
    the last leaf. A leaf gets the same children as if it were grown alone. Leaves with equal paths
    and seed get different children, because their branches are numbered consecutively.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Heddle, SamplingParams, int, LazyChildren]] = []
        self._numbers: Counter[tuple[tuple[int, ...], int | None]] = Counter()

    def defer(self, node: Heddle, params: SamplingParams) -> LazyChildren:
        """Add a generating call on a node; return a list that will contain its children."""
        children = LazyChildren(self)
        self._calls.append((node, params, self.number(node, params), children))
        set_pending_growth(node, self)
        return children

    def number(self, node: Heddle, params: SamplingParams) -> int:
        """Return the number of the first branch for a new call on a node.

        Calls on equal paths with the same seed get consecutive numbers, so their branches differ.
        """
        key = (tuple(node.get_prefix_tokens()), params.seed)
        first = self._numbers[key]
        self._numbers[key] += params.n
        return first

    def flush(self) -> None:
        """Run all deferred calls in one batch. On an error, none of them attaches children."""
        calls, self._calls = self._calls, []
        for node, _, _, children in calls:
            set_pending_growth(node, None)
            children.deferred = None
        if not calls:
            return
        growth = Growth(lm_of(calls[0][0]))
        planned: list[list[PendingBranch]] = [
            growth.add(node, params, first=first) for node, params, first, _ in calls
        ]
        growth.run()
        for (*_, children), branches in zip(calls, planned, strict=True):
            children.nodes = [pending.child for pending in branches if pending.attached]


class LazyChildren(UserList["Heddle"]):
    """A list of children that are generated when the list is first read."""

    def __init__(self, deferred: DeferredGrowth) -> None:
        self.deferred: DeferredGrowth | None = deferred
        self.nodes: list[Heddle] = []

    @property
    def data(self) -> list[Heddle]:  # type: ignore[override]
        """The children; runs all deferred calls if they have not run."""
        if self.deferred is not None:
            self.deferred.flush()
        return self.nodes


def call_on_leaves(nodes: list[Heddle], func: Callable[[Heddle], Any]) -> list[Any]:
    """Call `func` on each node; return the results.

    If `func` generates children of its node, these calls run as one batch for all nodes.
    """
    deferred = DeferredGrowth()
    results = []
    try:
        for node in nodes:
            set_deferral(node, deferred)
            try:
                results.append(func(node))
            finally:
                set_deferral(node, None)
    except Exception:
        # Run the calls that succeeded before the one that raised.
        deferred.flush()
        raise
    deferred.flush()
    return [result.nodes if isinstance(result, LazyChildren) else result for result in results]
