"""What an LM has done and holds."""

from __future__ import annotations

from dataclasses import dataclass

from .._core.kv.place import Node
from .._core.kv.tree import TokenTree
from .._core.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """Figures of one LM since it was loaded; its str is the savings line.

    prefilled, decoded: tokens run and drawn. reused: path tokens that were there when work began.
    recomputed: tokens run again, because their KV was evicted or their logits were not kept.
    kv_bytes: KV of the tokens held; kv_bytes_unshared: what a cache of its own for every branch
    would take; kv_bytes_allocated: what the engine has reserved for it. offloaded_bytes: KV that
    the host keeps for it, of offload_budget_bytes at most. row_bytes: logits rows that are kept, of
    row_budget_bytes at most. prefix_caching: False where the engine runs whole paths each time.
    knows_prefill: False on an engine without steps, whose own runs do not show what they read;
    knows_kv: False where the engine keeps its KV to itself. Those figures are 0 then, and left out
    of the line.
    Seconds are wall clock.
    """

    prefilled: int
    reused: int
    decoded: int
    recomputed: int
    steps: int
    kv_tokens: int
    kv_bytes: int
    kv_bytes_unshared: int
    kv_bytes_allocated: int
    kv_budget_bytes: int | None
    offloaded_bytes: int
    offload_budget_bytes: int
    row_bytes: int
    row_budget_bytes: int
    pinned_tokens: int
    evicted: int
    parked: int
    plan_s: float
    forward_s: float
    deliver_s: float
    prefix_caching: bool = True
    knows_prefill: bool = True
    knows_kv: bool = True

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent in steps."""
        return self.plan_s + self.forward_s + self.deliver_s

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second of stepping, prefill included; 0 before the first."""
        return self.decoded / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        held, unshared = map(format_bytes, (self.kv_bytes, self.kv_bytes_unshared))
        parts = [f"decoded {self.decoded:,}"]
        if self.knows_prefill:
            parts = [f"prefilled {self.prefilled:,}", f"reused {self.reused:,}", *parts]
        if not self.prefix_caching:
            parts.append(f"run again {self.recomputed:,} (prefix caching disabled)")
        elif self.knows_kv:
            parts.append(f"KV {held} ({unshared} unshared)")
        if self.decoded:
            parts.append(f"{self.tokens_per_s:,.0f} tok/s")
        return " · ".join(parts).replace(",", " ")

    def __repr__(self) -> str:
        return f"Stats({self})"

    def _repr_html_(self) -> str:
        from ..viz.notebook import stats_card

        return stats_card(self)


def format_bytes(n_bytes: int) -> str:
    """Return a size in the unit people read."""
    size, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def gather_stats(scheduler: Scheduler) -> Stats:
    """Read the figures of a scheduler and its tree. Cost: O(nodes of the tree)."""
    tree, counters, rows = scheduler.tree, scheduler.counters, scheduler.logits_cache
    with scheduler.lock:
        tree.drain_released()
        per_token = scheduler.engine.info.kv_bytes_per_token
        held = tree.budget.resident + sum(tail.fragment.length for tail in tree.tails)
        capacity = tree.budget.capacity
        usage = tree.fragments.usage() if tree.fragments is not None else None
        return Stats(
            prefilled=counters.prefilled,
            reused=counters.reused,
            decoded=counters.decoded,
            recomputed=counters.recomputed,
            steps=counters.steps,
            kv_tokens=held,
            kv_bytes=held * per_token,
            kv_bytes_unshared=unshared_tokens(tree) * per_token,
            kv_bytes_allocated=usage.bytes if usage is not None else 0,
            offloaded_bytes=tree.host.slots * per_token,
            offload_budget_bytes=tree.host.capacity * per_token,
            row_bytes=rows.used_bytes,
            row_budget_bytes=rows.budget_bytes,
            kv_budget_bytes=None if capacity is None else capacity * per_token,
            pinned_tokens=tree.budget.pinned + tree.budget.tails,
            evicted=tree.n_evicted,
            parked=counters.preempted,
            plan_s=counters.plan_s,
            forward_s=counters.forward_s,
            deliver_s=counters.deliver_s,
            prefix_caching=not scheduler.engine.info.no_prefix_cache,
            knows_prefill=scheduler.engine.info.capabilities.steps,
            knows_kv=tree.fragments is not None,
        )


def unshared_tokens(tree: TokenTree) -> int:
    """Return how many slots the resident paths would take if every branch had its own copy.

    A resident leaf is as many branches as places are held at its end or on unknown tokens after it.
    """
    branches: dict[Node, int] = {}
    for node in tree.nodes():
        resident = node
        while not resident.resident and resident.parent is not None:
            resident = resident.parent
        if resident.fragment is not None and not resident.n_live:
            branches[resident] = branches.get(resident, 0) + node.holds - node.user_pins
    leaves = sum(node.end * max(n, 1) for node, n in branches.items())
    return leaves + sum(tail.cursor.depth + tail.fragment.length for tail in tree.tails)
