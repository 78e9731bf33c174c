"""One node of the token tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engines.base import Fragment


class Node:
    """Consecutive tokens of one path; only the tree writes it, only `kv` and `sched` hold it.

    tokens: this node's own ids, never empty but in a root. start: depth of the first one.
    children: by first token. fragment: KV on the device; host: exported KV; both None: absent.
    pins: own pins + pinned children; while > 0 the KV is in use or promised.
    holds: places on this node; while > 0 the tokens stay known.
    live: children that are resident or pinned, and tails that grow from here.
    used: clock of the last use. rows: cached logits rows by depth.
    joined: the node that this one was merged into. launched: part of a step in flight.
    """

    __slots__ = (
        "children",
        "fragment",
        "holds",
        "host",
        "joined",
        "launched",
        "live",
        "namespace",
        "parent",
        "pins",
        "rows",
        "start",
        "tokens",
        "used",
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
        self.live = 0
        self.used = 0
        self.rows: dict[int, Any] | None = None
        self.joined: Node | None = None
        self.launched = False

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
