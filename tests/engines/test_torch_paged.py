"""Tree attention over a pool of slots: against one plain softmax a token, over its whole path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

import numpy as np  # noqa: E402

from weft.engines.base import Fragment, Row, Span  # noqa: E402
from weft.engines.torch.layout import LayerShape, Layout  # noqa: E402
from weft.engines.torch.memory import Spec  # noqa: E402
from weft.engines.torch.paged import kernel, plan  # noqa: E402
from weft.engines.torch.paged.step import PagedMemory  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Twin:
    """A tree whose KV is also kept as plain tensors, a node each; attention of one layer.

    A node is (fragment, keys [n, K, D], values [n, K, Dv], its parent's number).
    """

    def __init__(self, heads: int, kv: int, dims: tuple[int, int], dtype: Any, seed: int) -> None:
        shape = LayerShape(kv, *dims, dtype, dtype)
        self.memory = PagedMemory(Layout.of([shape], CPU))
        self.heads, self.kv, self.dims, self.dtype = heads, kv, dims, dtype
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.nodes: list[list[Any]] = []

    def normal(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def above(self, number: int | None) -> list[int]:
        chain: list[int] = []
        while number is not None:
            chain.append(number)
            number = self.nodes[number][3]
        return chain[::-1]

    def path(self, number: int | None) -> tuple[Span, ...]:
        return tuple(Span(f, f.length) for f in (self.nodes[i][0] for i in self.above(number)))

    def held(self, number: int | None) -> tuple[Any, Any]:
        chain = [self.nodes[i] for i in self.above(number)]
        empty = [torch.empty(0, self.kv, d, dtype=self.dtype) for d in self.dims]
        return tuple(torch.cat([empty[k], *(node[1 + k] for node in chain)]) for k in (0, 1))

    def node(self, parent: int | None, n: int) -> int:
        """Hang a node of n tokens below another."""
        fragment = self.memory.new(None)
        self.nodes.append([fragment, *self.held(None), parent])
        number = len(self.nodes) - 1
        if n:
            self.step([(parent, number, n)], Spec(0.3))
        return number

    def step(self, parts: list[tuple[int | None, int | None, int]], spec: Spec) -> float:
        """Run rows (parent, own node or None, tokens); return the worst error against a softmax."""
        paths: dict[int | None, tuple[Span, ...]] = {}
        rows = []
        for parent, number, n in parts:
            path = paths.setdefault(parent, self.path(parent))
            dest: Fragment | None = None if number is None else self.nodes[number][0]
            position = sum(s.length for s in path) + (dest.length if dest is not None else 0)
            rows.append(Row(path, [0] * n, position, dest))
        return self.run(rows, parts, spec)

    def run(self, rows: list[Row], parts: Any, spec: Spec) -> float:
        step = self.memory.begin(rows)
        total = len(step.positions)
        q = self.normal(1, self.heads, total, self.dims[0])
        k, v = (self.normal(1, self.kv, total, d) for d in self.dims)
        out = step.attend(0, q, k, v, spec)[0]
        step.commit()
        worst = 0.0
        for (parent, number, n), start in zip(parts, step.starts, strict=True):
            fresh = [t[0, :, start : start + n].transpose(0, 1) for t in (k, v)]
            before = self.held(parent if number is None else number)
            keys, values = (torch.cat([b, f]) for b, f in zip(before, fresh, strict=True))
            for at in range(n):
                end = len(before[0]) + at + 1
                want = softmax(q[0, :, start + at], keys[:end], values[:end], spec)
                worst = max(worst, float((out[start + at].float() - want).abs().max()))
            if number is not None:
                for kind in (0, 1):
                    held = self.nodes[number]
                    held[1 + kind] = torch.cat([held[1 + kind], fresh[kind]])
        return worst


def softmax(q: Any, keys: Any, values: Any, spec: Spec) -> Any:
    """One token's heads [H, D] over keys [n, K, D] and values [n, K, Dv]: float32 [H, Dv]."""
    if spec.window is not None:
        keys, values = keys[-spec.window :], values[-spec.window :]
    group = len(q) // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("hd,nhd->hn", q.float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[:, None].float()], 1)
    weights = scores.softmax(1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, values)


def ragged(twin: Twin) -> list[tuple[int | None, int | None, int]]:
    """A trunk, nodes of uneven length, leaves that grow beside rows that keep nothing."""
    trunk = twin.node(None, 40)
    child = twin.node(trunk, 7)
    leaf, other, empty = twin.node(child, 3), twin.node(trunk, 1), twin.node(child, 0)
    return [(child, leaf, 1), (trunk, other, 2), (trunk, None, 3), (child, empty, 1), (None, None, 2)]


SPECS = {
    "plain": Spec(0.3),
    "window": Spec(0.3, window=9),
    "cap": Spec(0.3, softcap=2.0),
    "all": Spec(0.3, softcap=3.0, window=5),
}


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3)])
def test_every_head_size_agrees_with_a_softmax(
    dims: tuple[int, int], dtype: str, tolerance: float
) -> None:
    twin = Twin(4, 2, dims, getattr(torch, dtype), 1)
    assert twin.step(ragged(twin), Spec(dims[0] ** -0.5)) < tolerance


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (6, 2), (7, 1)])
def test_windows_caps_sinks_and_groups_agree_with_a_softmax(name: str, heads: int, kv: int) -> None:
    twin = Twin(heads, kv, (8, 8), torch.float32, 2)
    spec = SPECS[name]
    parts = ragged(twin)
    assert twin.step(parts, spec) < 1e-5
    sinks = torch.linspace(-1, 2, heads)
    assert twin.step(parts, spec._replace(sinks=sinks)) < 1e-5
