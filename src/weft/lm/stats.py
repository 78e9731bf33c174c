"""Statistics of an LM: tokens run and reused, KV in memory, time per phase."""

from __future__ import annotations

from dataclasses import dataclass

from .._core.kv.place import Node
from .._core.kv.tree import TokenTree
from .._core.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """Statistics of one LM since it was loaded, from `LM.stats()`; `str` gives a summary line."""

    prefilled: int  # prompt tokens that ran
    reused: int  # path tokens whose KV was resident when work started
    decoded: int  # tokens drawn
    recomputed: int  # tokens run again, because their KV or logits were evicted
    steps: int
    kv_tokens: int  # tokens with resident KV
    kv_bytes: int  # size of that KV
    kv_bytes_unshared: int  # its size if every branch had a cache of its own
    kv_bytes_allocated: int  # memory that the engine has reserved for KV
    kv_budget_bytes: int | None  # None: no limit
    offloaded_bytes: int  # KV on the host
    offload_budget_bytes: int
    row_bytes: int  # cached logits rows
    row_budget_bytes: int
    pinned_tokens: int  # tokens whose KV cannot be evicted now
    evicted: int  # evictions of tree nodes
    parked: int  # preemptions of running work
    plan_s: float  # wall-clock seconds of scheduling
    forward_s: float  # wall-clock seconds of forwards
    deliver_s: float  # wall-clock seconds of processing outputs
    drafted: int = 0  # draft tokens that steps verified (`LM.draft`)
    draft_accepted: int = 0  # draft tokens that were drawn
    prefix_caching: bool = True  # False: the engine runs full paths each time
    knows_prefill: bool = True  # False: the engine does not report prefill; its counts are 0
    knows_kv: bool = True  # False: the engine does not report KV; its sizes are 0

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent in steps."""
        return self.plan_s + self.forward_s + self.deliver_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second spent in steps, prefill included; 0 without tokens."""
        return self.decoded / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        resident, unshared = map(format_bytes, (self.kv_bytes, self.kv_bytes_unshared))
        parts = [f"decoded {self.decoded:,}"]
        if self.knows_prefill:
            parts = [f"prefilled {self.prefilled:,}", f"reused {self.reused:,}", *parts]
        if not self.prefix_caching:
            parts.append(f"run again {self.recomputed:,} (prefix caching disabled)")
        elif self.knows_kv:
            parts.append(f"KV {resident} ({unshared} unshared)")
        if self.drafted:
            parts.append(f"drafts {self.draft_accepted:,} of {self.drafted:,}")
        if self.decoded:
            parts.append(f"{self.tokens_per_s:,.0f} tok/s")
        return " · ".join(parts)

    def __repr__(self) -> str:
        return f"Stats({self})"

    def _repr_html_(self) -> str:
        from ..viz.notebook import stats_card

        return stats_card(self)


def format_bytes(n_bytes: int) -> str:
    """Return a size with a decimal unit: "1.5 MB"."""
    size, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def gather_stats(scheduler: Scheduler) -> Stats:
    """Collect the statistics of a scheduler and its token tree. Cost: O(nodes of the tree)."""
    tree, counters, rows = scheduler.tree, scheduler.counters, scheduler.logits_cache
    with scheduler.lock:
        tree.drain_released()
        per_token = scheduler.engine.info.kv_bytes_per_token
        n_resident = tree.budget.resident + sum(tail.fragment.length for tail in tree.tails)
        capacity = tree.budget.capacity
        usage = tree.fragments.usage() if tree.fragments is not None else None
        return Stats(
            prefilled=counters.prefilled,
            reused=counters.reused,
            decoded=counters.decoded,
            recomputed=counters.recomputed,
            steps=counters.steps,
            kv_tokens=n_resident,
            kv_bytes=n_resident * per_token,
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
            drafted=counters.drafted,
            draft_accepted=counters.draft_accepted,
            plan_s=counters.plan_s,
            forward_s=counters.forward_s,
            deliver_s=counters.deliver_s,
            prefix_caching=not scheduler.engine.info.no_prefix_cache,
            knows_prefill=scheduler.engine.info.capabilities.steps,
            knows_kv=tree.fragments is not None,
        )


def unshared_tokens(tree: TokenTree) -> int:
    """Return how many tokens would have KV if every branch had its own copy of its path.

    `TokenTree` shares the KV of common prefixes, so the real number is smaller. A leaf with KV
    counts once for each branch that ends there, or on tokens below it without KV.
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
