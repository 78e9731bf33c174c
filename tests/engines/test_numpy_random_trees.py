"""Random operations on fragments against a naive twin: a list of token lists, no KV at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llama_reference import PlainLlama, write_folder
from weft.engines.base import Fragment, Row, Span
from weft.engines.numpy import NumpyEngine, kv, step


class Node:
    """The twin of a fragment: its tokens, and which node it hangs on."""

    def __init__(self, parent: Node | None, fragment: Fragment, ids: list[int]) -> None:
        self.parent = parent
        self.fragment = fragment
        self.ids = ids

    def path(self) -> list[Node]:
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> list[int]:
        return [token for node in self.path() for token in node.ids]

    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(node.fragment, len(node.ids)) for node in self.path())


class RandomTree:
    """Does one random thing at a time to engine and twin alike."""

    def __init__(self, engine: NumpyEngine, plain: PlainLlama, seed: int) -> None:
        self.engine, self.plain = engine, plain
        self.store = engine.fragments
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Node] = []
        self.plant()

    def plant(self) -> None:
        """A new root; grown at once, so that no node is empty."""
        self._run([(None, self._ids(4))])

    def extend(self) -> None:
        """Several new children, of several sizes, in one forward."""
        if sum(len(node.ids) for node in self.nodes) > 150:
            return self.prune()
        n = int(self.rng.integers(1, 5))
        self._run(
            [(self._any(), self._ids(int(self.rng.choice([1, 1, 1, 3, 9])))) for _ in range(n)]
        )

    def grow(self) -> None:
        """Leaves grow together for a few steps; some by several tokens."""
        leaves = [node for node in self.nodes if self._is_leaf(node)]
        count = min(len(leaves), int(self.rng.integers(1, 6)))
        chosen = [leaves[i] for i in self.rng.permutation(len(leaves))[:count]]
        rows = [Row(node.spans()[:-1], [0], 0, node.fragment, (0,)) for node in chosen]
        for _ in range(int(self.rng.integers(1, 7))):
            for row, node in zip(rows, chosen, strict=True):
                row.tokens = self._ids(1 if self.rng.random() < 0.9 else 4)
                row.position = len(node.tokens())
                row.logits_at = (len(row.tokens) - 1,)
                node.ids.extend(row.tokens)
            self._compare(rows, chosen)

    def split(self) -> None:
        node = self._any()
        if len(node.ids) < 2:
            return
        at = int(self.rng.integers(1, len(node.ids)))
        upper = Node(node.parent, self.store.split(node.fragment, at), node.ids[:at])
        node.parent, node.ids = upper, node.ids[at:]
        self.nodes.append(upper)

    def join(self) -> None:
        for node in self.nodes:
            children = [child for child in self.nodes if child.parent is node]
            if len(children) == 1:
                child = children[0]
                self.store.join(node.fragment, child.fragment)
                child.parent, child.ids = node.parent, node.ids + child.ids
                self.nodes.remove(node)
                return

    def trim(self) -> None:
        leaves = [node for node in self.nodes if self._is_leaf(node) and len(node.ids) > 1]
        if leaves:
            node = leaves[int(self.rng.integers(len(leaves)))]
            length = int(self.rng.integers(1, len(node.ids)))
            self.store.trim(node.fragment, length)
            node.ids = node.ids[:length]

    def settle(self) -> None:
        self.store.settle(self._any().fragment)

    def move(self) -> None:
        """Export, free, load."""
        node = self._any()
        data = self.store.export(node.fragment)
        self.store.free(node.fragment)
        node.fragment = self.store.load(data, None)

    def prune(self) -> None:
        leaves = [node for node in self.nodes if self._is_leaf(node)]
        node = leaves[int(self.rng.integers(len(leaves)))]
        self.store.free(node.fragment)
        self.nodes.remove(node)
        if not self.nodes:
            self.plant()

    def check(self) -> None:
        n_slots = sum(len(node.ids) for node in self.nodes)
        assert self.store.usage().slots == n_slots
        assert all(node.fragment.length == len(node.ids) for node in self.nodes)

    def settle_all(self) -> None:
        for node in self.nodes:
            self.store.settle(node.fragment)
        usage = self.store.usage()
        assert usage.bytes <= 1.10 * usage.slots * self.engine.info.kv_bytes_per_token

    def free_all(self) -> None:
        for node in self.nodes:
            self.store.free(node.fragment)
        assert self.store.usage() == (0, 0)

    def _run(self, wanted: list[tuple[Node | None, list[int]]]) -> None:
        new = [Node(parent, self.store.new(None), ids) for parent, ids in wanted]
        rows = []
        for node in new:
            spans = node.spans()[:-1]
            position = sum(span.length for span in spans)
            rows.append(Row(spans, node.ids, position, node.fragment, (len(node.ids) - 1,)))
        self._compare(rows, new)
        self.nodes.extend(new)

    def _compare(self, rows: list[Row], nodes: list[Node]) -> None:
        output = self.engine.forward(rows)
        for index, node in enumerate(nodes):
            expected = self.plain(node.tokens())[-1]
            np.testing.assert_allclose(output.logits(index), expected, atol=1e-4, rtol=0)

    def _ids(self, n: int) -> list[int]:
        return self.rng.integers(0, 61, n).tolist()

    def _any(self) -> Node:
        return self.nodes[int(self.rng.integers(len(self.nodes)))]

    def _is_leaf(self, node: Node) -> bool:
        return all(other.parent is not node for other in self.nodes)


OPERATIONS = [
    "extend",
    "extend",
    "grow",
    "grow",
    "split",
    "join",
    "trim",
    "settle",
    "move",
    "prune",
]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
@pytest.mark.parametrize("growth", [2, 32])
def test_random_operations_agree_with_the_twin(
    seed: int, growth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "GROWTH", growth)
    if growth == 2:
        monkeypatch.setattr(kv, "_WIDE", 4)
        monkeypatch.setattr(kv, "_SMALL", 3)
        monkeypatch.setattr(step, "_MIN_BLOCK", 2)
        monkeypatch.setattr(step, "_MAX_SCORES", 1)
    plain = write_folder(tmp_path)
    tree = RandomTree(NumpyEngine.load(tmp_path), plain, seed)
    for _ in range(150):
        getattr(tree, str(tree.rng.choice(OPERATIONS)))()
        tree.check()
    tree.settle_all()
    tree.check()
    tree.free_all()
