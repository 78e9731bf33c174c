"""Growing calls that wait for each other, so that calls on many leaves are one batch."""

from __future__ import annotations

from collections import Counter, UserList
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..sampling.params import SamplingParams
from .grow import Growth, Shoot

if TYPE_CHECKING:
    from .heddle import Heddle


class Batch:
    """Growing calls that `apply_at_leaves` puts off.

    All of them run when children of any are looked at, at the latest after the last leaf's turn.
    A leaf gets the children that it would get alone; equal ones get different ones from one seed,
    as their branches are numbered through.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Heddle, SamplingParams, int, Promised]] = []
        self._numbers: Counter[tuple[tuple[int, ...], int | None]] = Counter()

    def put_off(self, node: Heddle, params: SamplingParams) -> Promised:
        """Take a growing call over; return the list that its children will be in."""
        promised = Promised(self)
        self._calls.append((node, params, self.number(node, params), promised))
        node._deferred = self
        return promised

    def number(self, node: Heddle, params: SamplingParams) -> int:
        """Return the number of a call's first branch, among those of equal leaves and one seed."""
        key = (tuple(node.get_prefix_tokens()), params.seed)
        first = self._numbers[key]
        self._numbers[key] += params.n
        return first

    def flush(self) -> None:
        """Grow everything put off so far, in one batch. On an error nothing of it is there."""
        calls, self._calls = self._calls, []
        for node, _, _, promised in calls:
            node._deferred, promised.batch = None, None
        if not calls:
            return
        growth = Growth(calls[0][0]._home.live_lm())
        planned: list[list[Shoot]] = [
            growth.add(node, params, first=first) for node, params, first, _ in calls
        ]
        growth.run()
        for (*_, promised), shoots in zip(calls, planned, strict=True):
            promised.made = [shoot.child for shoot in shoots if shoot.attached]


class Promised(UserList["Heddle"]):
    """A list of children that are made when it is first looked at."""

    def __init__(self, batch: Batch) -> None:
        self.batch: Batch | None = batch
        self.made: list[Heddle] = []

    @property
    def data(self) -> list[Heddle]:  # type: ignore[override]
        """The children."""
        if self.batch is not None:
            self.batch.flush()
        return self.made


def at_each(nodes: list[Heddle], func: Callable[[Heddle], Any]) -> list[Any]:
    """Call `func` on each node; growing calls that it makes on that node run as one batch."""
    batch = Batch()
    results = []
    try:
        for node in nodes:
            node._batch = batch
            try:
                results.append(func(node))
            finally:
                node._batch = None
    except Exception:
        # The calls before the one that failed were made: their children are there.
        batch.flush()
        raise
    batch.flush()
    return [result.made if isinstance(result, Promised) else result for result in results]
