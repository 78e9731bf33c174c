"""Tree attention over a pool of slots equals a plain softmax per token over its full path."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

import weft  # noqa: E402
from compiled import compiled  # noqa: E402
from families import FAMILIES, build  # noqa: E402
from shallow import shallow  # noqa: E402
from weft.engines.base import Fragment, Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine, kv_offload, select_backend  # noqa: E402
from weft.engines.torch.kv_backend import AttentionSpec, RotaryArgs  # noqa: E402
from weft.engines.torch.layout import LayerShape, Layout  # noqa: E402
from weft.engines.torch.paged import (  # noqa: E402
    attention_metadata,
    elementwise,
    graph_inputs,
    kernel,
    pool,
    tiling,
)
from weft.engines.torch.paged import step as paged_step  # noqa: E402
from weft.engines.torch.paged.step import PagedBackend  # noqa: E402
from weft.errors import ConfigError, EngineUnavailable, KVFull, ModelMismatch  # noqa: E402

# The interpreter, or a card where there is one and TRITON_INTERPRET is not set.
if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
CPU = torch.device("cpu")
DEVICE = CPU if kernel.is_interpreted() else torch.device("cuda")
NEAR = 1e-5 if kernel.is_interpreted() else 1e-4  # three TF32 products are nearly float32

# Ids, slots, and positions twice.
_OF_A_FRAME = torch.int64, torch.int64, torch.int32, torch.int64

# A row of a step: the node above it, the node that takes its slots (None: none does), its tokens.
Part = tuple[int | None, int | None, int]


@pytest.fixture(autouse=True)
def _as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Node:
    """A fragment, and its KV as plain tensors: [n, K, D] and [n, K, Dv]."""

    def __init__(self, fragment: Fragment, stored: Sequence[Any], parent: int | None) -> None:
        self.fragment, self.tensors, self.parent = fragment, list(stored), parent


class Twin:
    """A tree in a pool of one layer, and the same tree as lists of tensors."""

    def __init__(
        self, heads: int = 2, kv: int = 1, dims: tuple[int, int] = (8, 8), dtype: str = "float32"
    ) -> None:
        self.dtype = getattr(torch, dtype)
        self.memory = PagedBackend(
            Layout.from_shapes([LayerShape(kv, *dims, self.dtype, self.dtype)], DEVICE)
        )
        self.heads, self.kv, self.dims = heads, kv, dims
        self.random = random.Random(1)
        self.generator = torch.Generator().manual_seed(1)
        self.nodes: dict[int, Node] = {}
        self.n_added = 0

    def normal(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.generator).to(DEVICE, self.dtype)

    def node(self, parent: int | None, n: int) -> int:
        """Hang a node of n tokens below another, without a step."""
        stored = [self.normal(n, self.kv, d) for d in self.dims]
        data: dict[str, Any] = {"dtype": np.array(str(self.dtype).removeprefix("torch."))}
        for name, tensor in zip("kv", stored, strict=True):
            bits = tensor.view(torch.uint16) if self.dtype == torch.bfloat16 else tensor
            data[f"{name}.0"] = bits.transpose(0, 1).contiguous().cpu().numpy()
        return self.add(self.memory.load(data, None), stored, parent)

    def add(self, fragment: Fragment, stored: Sequence[Any], parent: int | None) -> int:
        self.n_added += 1
        self.nodes[self.n_added] = Node(fragment, stored, parent)
        return self.n_added

    def above(self, number: int | None) -> list[Node]:
        chain: list[Node] = []
        while number is not None:
            chain.append(self.nodes[number])
            number = self.nodes[number].parent
        return chain[::-1]

    def stored(self, number: int | None) -> list[Any]:
        empty = [self.normal(0, self.kv, d) for d in self.dims]
        chain = self.above(number)
        return [torch.cat([empty[k], *(node.tensors[k] for node in chain)]) for k in (0, 1)]

    def rows(self, parts: Sequence[Part]) -> list[Row]:
        """Rows below one node share the tuple of its path, as the scheduler's do."""
        paths: dict[int | None, tuple[Span, ...]] = {}
        rows = []
        for parent, number, n in parts:
            if parent not in paths:
                fragments = [node.fragment for node in self.above(parent)]
                paths[parent] = tuple(Span(f, f.length) for f in fragments)
            dest = None if number is None else self.nodes[number].fragment
            position = sum(span.length for span in paths[parent])
            position += 0 if dest is None else dest.length
            rows.append(Row(paths[parent], [0] * n, position, dest))
        return rows

    def step(
        self, parts: Sequence[Part], spec: AttentionSpec, rows: list[Row] | None = None
    ) -> float:
        """Run one layer of a step; return the worst error against a softmax."""
        self.last = step = self.memory.start_step(self.rows(parts) if rows is None else rows)
        total = len(step.positions)
        q = self.normal(1, self.heads, total, self.dims[0])
        k, v = (self.normal(1, self.kv, total, d) for d in self.dims)
        out = step.attend(0, q, k, v, spec)[0]
        step.commit()
        worst = 0.0
        for (parent, number, n), start in zip(parts, step.starts, strict=True):
            fresh = [t[0, :, start : start + n].transpose(0, 1) for t in (k, v)]
            before = self.stored(parent if number is None else number)
            keys, values = (torch.cat(pair) for pair in zip(before, fresh, strict=True))
            for at in range(n):
                end = len(before[0]) + at + 1
                want = softmax(q[0, :, start + at], keys[:end], values[:end], spec)
                worst = max(worst, float((out[start + at].float() - want).abs().max()))
            if number is not None:
                node = self.nodes[number]
                node.tensors = [torch.cat(pair) for pair in zip(node.tensors, fresh, strict=True)]
        return worst

    def leaves(self) -> list[int]:
        parents = {node.parent for node in self.nodes.values()}
        return [number for number in self.nodes if number not in parents]

    # What may happen to fragments

    def extend(self) -> None:
        """Grow leaves, hang new ones below any node, and ask below any without keeping."""
        grown = self.random.sample(self.leaves(), min(2, len(self.leaves())))
        others = [None, *(number for number in self.nodes if number not in grown)]
        parts: list[Part] = []
        for number in grown:
            parts.append((self.nodes[number].parent, number, self.random.choice([1, 1, 3])))
        above = self.random.choice(others)
        parts.append((above, self.node(above, 0), self.random.choice([1, 5])))
        parts.append((self.random.choice(others), None, 2))
        self.random.shuffle(parts)
        assert self.step(parts, AttentionSpec(0.3, window=self.random.choice([None, 7]))) < NEAR

    def split(self) -> None:
        long = [number for number, node in self.nodes.items() if node.fragment.length > 1]
        if long:
            number = self.random.choice(long)
            lower = self.nodes[number]
            at = self.random.randrange(1, lower.fragment.length)
            fragment = self.memory.split(lower.fragment, at)
            upper = self.add(fragment, [t[:at] for t in lower.tensors], lower.parent)
            lower.tensors, lower.parent = [t[at:] for t in lower.tensors], upper

    def join(self) -> None:
        parents = [node.parent for node in self.nodes.values()]
        nodes = [node for node in self.nodes.values() if node.parent is not None]
        single = [node for node in nodes if parents.count(node.parent) == 1]
        if single:
            lower = self.random.choice(single)
            assert lower.parent is not None
            upper = self.nodes.pop(lower.parent)
            self.memory.join(upper.fragment, lower.fragment)
            lower.tensors = [
                torch.cat(pair) for pair in zip(upper.tensors, lower.tensors, strict=True)
            ]
            lower.parent = upper.parent

    def trim(self) -> None:
        node = self.nodes[self.random.choice(self.leaves())]
        length = self.random.randrange(node.fragment.length + 1)
        self.memory.trim(node.fragment, length)
        node.tensors = [tensor[:length] for tensor in node.tensors]

    def settle(self) -> None:
        self.memory.settle(self.nodes[self.random.choice(list(self.nodes))].fragment)

    def free(self) -> None:
        self.memory.free(self.nodes.pop(self.random.choice(self.leaves())).fragment)

    def move(self) -> None:
        node = self.nodes[self.random.choice(list(self.nodes))]
        data = self.memory.export(node.fragment)
        self.memory.free(node.fragment)
        node.fragment = self.memory.load(data, None)

    def check(self) -> None:
        """Every slot is in one list or free, and the counts are those of the lists."""
        memory = self.memory
        lists = [node.fragment.slots for node in self.nodes.values()]
        taken = np.concatenate([*lists, memory._free[: memory._n_free]])
        assert sorted(taken.tolist()) == list(range(memory._capacity))
        n = sum(len(node.tensors[0]) for node in self.nodes.values())
        assert memory.usage() == (n, sum(map(len, lists)) * memory.layout.slot_bytes)
        for node in self.nodes.values():
            assert node.fragment.length == len(node.tensors[0])
            assert len(node.fragment.slots) < node.fragment.length + pool.GROW_BY


def softmax(q: Any, keys: Any, values: Any, spec: AttentionSpec) -> Any:
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


def ragged(twin: Twin) -> list[Part]:
    """A trunk, nodes of uneven length, leaves that grow next to rows that keep nothing."""
    trunk = twin.node(None, 40)
    child = twin.node(trunk, 7)
    leaf, other, empty = twin.node(child, 3), twin.node(trunk, 1), twin.node(child, 0)
    rows: list[Part] = [(child, leaf, 1), (trunk, other, 2), (trunk, None, 3), (child, empty, 1)]
    return [*rows, (None, None, 2)]


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_every_head_size_agrees_with_a_softmax(size: int) -> None:
    twin = Twin(4, 2, (size, size))
    assert twin.step(ragged(twin), AttentionSpec(size**-0.5)) < NEAR


@pytest.mark.parametrize("dims", [(128, 128), (24, 16)])
@pytest.mark.parametrize(("dtype", "near"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_precision_is_summed_in_float32(
    dims: tuple[int, int], dtype: str, near: float
) -> None:
    if dtype == "bfloat16" and kernel.is_interpreted():
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    twin = Twin(2, 1, dims, dtype)
    assert twin.step(ragged(twin), AttentionSpec(dims[0] ** -0.5)) < near


SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=9),
    "cap": AttentionSpec(0.3, softcap=2.0),
    "all": AttentionSpec(0.3, softcap=3.0, window=5, sinks=torch.linspace(-1, 2, 6, device=DEVICE)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kv", [1, 3])
def test_windows_caps_sinks_and_groups_agree_with_a_softmax(name: str, kv: int) -> None:
    twin = Twin(6, kv)
    assert twin.step(ragged(twin), SPECS[name]) < NEAR


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("n_heads", "n_kv"), [(6, 3), (32, 1)])
def test_nodes_merged_into_a_row_agree_with_a_softmax(
    name: str, n_heads: int, n_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed with the row's own list, in tiles of any size; some rows' parts are merged."""
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    spec = SPECS[name]
    if spec.sinks is not None:
        spec = spec._replace(sinks=torch.linspace(-1, 2, n_heads, device=DEVICE))
    twin = Twin(n_heads, n_kv)
    alone: list[Part] = []
    for n_above, n_own in ((40, 0), (3, 7), (70, 30), (0, 5)):
        above = twin.node(None, n_above) if n_above else None
        alone.append((above, twin.node(above, n_own), 1))
    work = twin.memory.start_step(twin.rows(alone)).work(n_heads // n_kv)
    assert work.is_single
    assert twin.step(alone, spec) < NEAR
    trunk = twin.node(None, 20)
    sibling: list[Part] = [(trunk, twin.node(trunk, n), 1) for n in (2, 0)]
    assert twin.step([*alone, *sibling], spec) < NEAR


@pytest.mark.parametrize("window", [None, 40, 64, 130, 200])
def test_keys_visible_to_a_full_tile_agree_with_a_softmax(window: int | None) -> None:
    """Long nodes, so that full blocks are before, between and behind the masked ones."""
    twin = Twin(4, 2)
    trunk = twin.node(None, 333)
    leaves = [twin.node(trunk, n) for n in (0, 70, 129)]
    rows: list[Part] = [(trunk, leaf, n) for leaf, n in zip(leaves, (1, 21, 1), strict=True)]
    assert twin.step(rows, AttentionSpec(0.3, window=window)) < NEAR
    assert twin.step([(trunk, leaf, 1) for leaf in leaves], AttentionSpec(0.3, 2.0, window)) < NEAR


def test_wide_tiles_and_many_chunks_agree_with_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(4, 1)
    trunk = twin.node(None, 200)
    parts: list[Part] = [(trunk, None, 23), (trunk, twin.node(trunk, 0), 1), (None, None, 70)]
    assert twin.step(parts, AttentionSpec(0.3)) < NEAR
    work = twin.last.work(4)
    assert len(work.wide) > 8
    assert len(work.narrow) > 0


@pytest.mark.parametrize(
    ("dtype", "n_smaller", "attended"),
    [("float16", 0, (2 + 2, True)), ("float32", 0, (0, True))]
    + [("float16", 1, (0, True)), ("float16", 2, (0, False))],
)
def test_segments_of_many_queries_use_broad_tiles(
    dtype: str, n_smaller: int, attended: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lines of two chunks, each a tile of 128 rows and a rest; float32 has none of them, nor
    has a card whose processors have less room, or one with the least, where all tiles are narrow.
    """
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    monkeypatch.setattr(tiling, "BROAD_FROM", 200)
    twin = Twin(4, 2, dtype=dtype)
    for _ in range(n_smaller):
        smaller = twin.memory.with_smaller_tiles()
        assert smaller is not None
        twin.memory = smaller
    trunk = twin.node(None, 100)
    parts: list[Part] = [(trunk, twin.node(trunk, 0), 101), (trunk, twin.node(trunk, 3), 1)]
    assert twin.step(parts, AttentionSpec(0.3, window=90)) < (5e-3 if dtype == "float16" else NEAR)
    work = twin.last.work(2)
    assert (len(work.broad), len(work.wide) > 0, len(work.narrow) > 0) == (*attended, True)
    assert_attended_once(twin, twin.rows([(trunk, None, 130)]), 2)


def test_long_prompt_is_one_part_in_each_of_its_steps() -> None:
    """Tiles enough keep a card busy; a second part of each row would be written and read for it."""
    memory = PagedBackend(
        Layout.from_shapes([LayerShape(8, 2, 2, torch.float16, torch.float16)], DEVICE)
    )
    kv = memory.new(None)
    for position in range(0, 16384, 2048):
        step = memory.start_step([Row((), [0] * 2048, position, kv)])
        assert step.work(4).n_parts == 2048, position
        step.commit()
    leaves = [memory.new(kv) for _ in range(300)]
    path = (Span(kv, 16384),)
    step = memory.start_step([Row(path, [0], 16384, leaf) for leaf in leaves])
    assert len(step.work(4).broad) * 8 > 132  # but few tiles with many keys are cut


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 4, device=DEVICE)])
def test_more_parts_than_are_merged_at_once(
    sinks: Any, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PARTS_AXIS", axis)
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(4, 2)
    trunk, other = twin.node(None, 1100), twin.node(None, 5)
    parts: list[Part] = [(trunk, twin.node(trunk, 0), 1), (other, None, 1), (trunk, None, 2)]
    assert twin.step(parts, AttentionSpec(0.3, sinks=sinks)) < NEAR
    assert twin.last.work(2).n_parts > 3 * 17


def test_parts_are_merged_where_that_takes_many_programs() -> None:
    twin = Twin(16, 4)
    trunk = twin.node(None, 5)
    assert twin.step([(trunk, None, 70), (None, None, 1)], AttentionSpec(0.3)) < NEAR


def test_random_operations_agree_with_lists_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools and regions, so that lists move in the table and pools grow all the time."""
    monkeypatch.setattr(pool, "SMALLEST_POOL", 8)
    monkeypatch.setattr(pool, "GROW_BY", 4)
    monkeypatch.setattr(pool, "_REGION", 4)
    monkeypatch.setattr(pool, "_TABLE", 64)
    twin = Twin()
    acts = [twin.split, twin.join, twin.trim, twin.settle, twin.free, twin.move]
    for _ in range(18):
        twin.extend()
        twin.check()
        for act in twin.random.sample(acts, 3):
            if twin.nodes:
                act()
                twin.check()
    assert twin.memory.table.age > 0
    while twin.nodes:
        twin.free()
    assert twin.memory.usage() == (0, 0)


def test_lists_are_cut_and_joined_without_a_copy_of_kv() -> None:
    twin = Twin()
    memory, number = twin.memory, twin.node(None, 64)
    keys, lower = memory.keys[0], twin.nodes[number].fragment
    slots = lower.slots.tolist()
    memory.start_step([Row((Span(lower, 64),), [0], 64)])
    upper = memory.split(lower, 20)
    assert [*upper.slots, *lower.slots] == slots
    memory.join(upper, lower)
    assert lower.slots.tolist() == slots
    assert (upper.length, lower.length) == (0, 64)
    assert memory.keys[0] is keys
    with pytest.raises(ConfigError, match="before slot 64"):
        memory.split(lower, 64)
    with pytest.raises(ConfigError, match="to 65"):
        memory.trim(lower, 65)
    memory.free(lower)


def test_leaves_reserve_some_slots_and_give_them_back() -> None:
    """Growing ones have fewer than 32 to spare, settled ones none; the pool has a 32nd more."""
    twin = Twin()
    memory, leaves = twin.memory, [twin.memory.new(None) for _ in range(64)]
    for length in (1, 32, 33, 400):
        for leaf in leaves:
            memory.reserve(leaf, length - leaf.length)
            memory.grew(leaf, length - leaf.length)
            assert len(leaf.slots) == -(-length // 32) * 32
    reserved = sum(len(leaf.slots) for leaf in leaves)
    assert memory.usage().bytes == reserved * memory.layout.slot_bytes
    assert memory.keys[0].shape[0] <= 1.035 * reserved
    for leaf in leaves:
        memory.settle(leaf)
    assert sum(len(leaf.slots) for leaf in leaves) == memory.usage().slots == 64 * 400


def assert_attended_once(twin: Twin, rows: list[Row], group: int) -> paged_step.PagedStep:
    """Every slot of every path and list is in one part of each query, in order, and no more is."""
    step = twin.memory.start_step(rows)
    work, table = step.work(group), twin.memory.table.on_device().cpu().numpy()
    positions, first_part = step.positions.tolist(), work.first_part.tolist()
    attended: dict[tuple[int, int], dict[int, list[int]]] = {}  # by token and head: slots by part
    for items, n_rows in zip(work.by_tile, kernel.TILES, strict=True):
        for item in items.tolist():
            at, n, first, start, n_query, m0, ordinal, _, at_above, n_above, *_ = item
            assert m0 < n_query  # no tile without a query
            assert not n_above or n_query == group  # others are read without it
            above = table[at_above : at_above + n_above].tolist()
            for m in range(m0, min(m0 + n_rows, n_query)):
                token = start + m // group
                n_visible = max(0, min(n, positions[token] + 1 - first))
                actual = attended.setdefault((token, m % group), {})
                assert ordinal not in actual
                actual[ordinal] = above + table[at : at + n_visible].tolist()
    n_checked = 0
    assert sorted(step.order) == list(range(len(rows)))
    for row, kv, start in zip(rows, step._plan.lists, step.starts, strict=True):
        path = [slot for span in row.prefix for slot in span.fragment.slots[: span.length]]
        stored = 0 if row.kv_out is None else row.kv_out.length
        for token in range(start, start + row.n_tokens):
            want = [*path, *kv.slots[: stored + token - start + 1]]
            assert positions[token] == row.position + token - start
            assert step.slots[token] == want[-1]
            for head in range(group):
                actual = attended[token, head]
                n_checked += 1
                assert sorted(actual) == list(range(len(actual)))
                assert [slot for part in sorted(actual) for slot in actual[part]] == want
            assert first_part[token + 1] - first_part[token] == len(actual)
    assert n_checked == len(attended)
    assert work.n_parts == first_part[-1]
    return step


def bushy(twin: Twin) -> list[int]:
    """A random tree of 40 nodes; return their numbers."""
    numbers: list[int] = []
    for _ in range(40):
        parent = twin.random.choice([None, *numbers][-12:])
        numbers.append(twin.node(parent, twin.random.choice([0, 1, 9, 150])))
    return numbers


def test_metadata_covers_every_slot_of_every_path_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(3, 1)
    numbers = bushy(twin)
    parts: list[Part] = [
        (twin.nodes[n].parent, n, twin.random.choice([1, 30])) for n in twin.leaves()
    ]
    parts += [(twin.random.choice(numbers[:20]), None, n) for n in (1, 2, 80)]
    assert_attended_once(twin, twin.rows(parts), 3)


def chain(twin: Twin, sizes: Sequence[int], parent: int | None = None) -> list[int]:
    """Nodes one below the other; return their numbers."""
    numbers: list[int] = []
    for size in sizes:
        parent = twin.node(parent, size)
        numbers.append(parent)
    return numbers


def test_short_nodes_one_below_the_other_are_one_part() -> None:
    """For leaves and for prompts, below a long node, too, and where rows leave in between."""
    twin = Twin(2, 1)
    trunk = twin.node(None, 700)
    nodes = chain(twin, [3, 20, 7] * 8, trunk)
    leaves: list[Part] = [(nodes[-1], twin.node(nodes[-1], 2), 1) for _ in range(5)]
    n_trunk = 3  # 256 slots each
    step = assert_attended_once(twin, twin.rows(leaves), 2)
    assert step.work(2).n_parts == 5 * (n_trunk + 1 + 1)
    step = assert_attended_once(twin, twin.rows([*leaves, (nodes[9], None, 40)]), 2)
    assert step.work(2).n_parts == 45 * (n_trunk + 1 + 1)
    assert twin.step([*leaves, (nodes[9], None, 40)], AttentionSpec(0.3, window=100)) < NEAR


def test_short_forking_nodes_are_merged_if_that_saves_parts() -> None:
    """Each of a chain's nodes has a leaf, too: parts as deep as it are dearer than some slots."""
    twin = Twin(2, 1)
    nodes = chain(twin, [4] * 12)
    deep: list[Part] = [(nodes[-1], twin.node(nodes[-1], 0), 1) for _ in range(20)]
    sides: list[Part] = [(node, twin.node(node, 0), 1) for node in nodes[:-1]]
    step = assert_attended_once(twin, twin.rows([*deep, *sides]), 2)
    assert step.work(2).n_parts == 2 * 20 + 11  # nodes above a single side are computed with it
    twin, trunk = Twin(2, 1), 0
    trunk = twin.node(None, 200)
    others = [twin.node(trunk, 3) for _ in range(2)]
    few: list[Part] = [(node, twin.node(node, 0), 1) for node in others]
    assert assert_attended_once(twin, twin.rows(few), 2).work(2).n_parts == 2 * 2
    crowd: list[Part] = [(node, twin.node(node, 0), 1) for node in others for _ in range(30)]
    assert assert_attended_once(twin, twin.rows(crowd), 2).work(2).n_parts == 60 * 2


def test_no_more_than_a_chunk_is_handed_down() -> None:
    """So a row that joins in between reads little twice; short ones count with those above."""
    twin = Twin(2, 1)
    nodes = chain(twin, [100] * 9)
    leaves: list[Part] = [(nodes[-1], twin.node(nodes[-1], 0), 1) for _ in range(4)]

    def n_attended(parts: list[Part]) -> int:
        work = assert_attended_once(twin, twin.rows(parts), 2).work(2)
        fields = tiling.N, tiling.N_ABOVE
        return sum(int(items[:, each].sum()) for items in work.by_tile for each in fields)

    before = n_attended(leaves)
    joined = [*leaves, (nodes[7], twin.node(nodes[7], 0), 1)]
    assert n_attended(joined) <= before + attention_metadata._CHUNK + pool._REGION
    twin = Twin(2, 1)
    low = chain(twin, [30, 30])[-1]
    ends = [twin.node(low, 3) for _ in range(2)]
    crowd: list[Part] = [(ends[i % 2], twin.node(ends[i % 2], 0), 1) for i in range(10)]
    assert assert_attended_once(twin, twin.rows(crowd), 2).work(2).n_parts == 10 * 3


def test_metadata_follows_a_search_from_its_best_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves become nodes that others go on from, now and then from far above: plans are few, and
    leave nothing behind in the table.
    """
    twin = Twin(2, 1)
    trunk = twin.node(None, 30)
    runs, result = Runs(twin, [twin.node(trunk, 0) for _ in range(8)]), Planned(monkeypatch)
    max_n = 0
    for number in range(120):
        max_n = max(max_n, runs.step(2).work(2).n_parts)
        if number % 3 == 0:
            best = runs.live.pop(twin.random.randrange(8))
            twin.memory.settle(twin.nodes[best].fragment)
            runs.end()
            back = twin.random.choice(list(twin.nodes)) if number % 12 == 0 else best
            while back in runs.live:
                back = twin.nodes[back].parent
            runs.live += [twin.node(best, 0), twin.node(back, 0)]
    assert result.n < 10
    assert max_n <= 8 * 7


def test_merged_lists_are_released_with_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that change all the time, and those of single steps, leave the table as it is."""
    monkeypatch.setattr(pool, "_TABLE", 64)
    monkeypatch.setattr(pool, "_REGION", 8)
    twin = Twin(2, 1)
    low = chain(twin, [10] * 12)[-1]
    leaves: list[Part] = [(low, twin.node(low, 0), 1) for _ in range(9)]
    for _ in range(40):
        for some in (leaves[:1], leaves, [(low, None, 3)]):
            step = twin.memory.start_step(twin.rows(some))
            n_each = 1 if step.work(2).is_single else 2  # nodes above one row are computed with it
            assert (step.work(2).n_parts, n_each) == (
                n_each * sum(n for _, _, n in some),
                2 - (some == leaves[:1]),
            )
        assert twin.memory.table._end < 4000
    twin.memory.clear()
    assert len(twin.memory.table.moved) == 0


def test_node_above_one_row_is_merged_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another row lies below it, too; the plan goes along."""
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(2, 1)
    parents = [twin.node(None, n) for n in (40, 70, 200)]  # the last is too long for it
    runs, result = Runs(twin, [twin.node(each, 0) for each in parents]), Planned(monkeypatch)
    assert runs.step(2).work(2).n_parts == 1 + 1 + 4
    runs.join(parents=parents[:1])
    assert runs.step(2).work(2).n_parts == 2 + 2 + 1 + 4
    child = twin.node(parents[1], 3)
    runs.live.append(twin.node(child, 0))
    assert runs.step(2).work(2).n_parts == 2 + 2 + 2 + 3 + 4
    runs.live.remove(next(n for n in runs.live if twin.nodes[n].parent == parents[1]))
    for _ in range(90):  # past a chunk of their own
        runs.step(2)
    assert result.n == 1


def test_released_slots_are_not_attended() -> None:
    """A node that was handed down is cut short and grows again, from other slots."""
    twin = Twin(2, 1)
    top, middle, low = chain(twin, [4, 64, 4])
    leaf = twin.node(low, 0)
    assert_attended_once(twin, twin.rows([(low, leaf, 1)]), 2).commit()
    assert twin.memory.table.moved == set()
    twin.nodes[leaf].tensors = [torch.zeros(1, *h.shape[1:]) for h in twin.nodes[leaf].tensors]
    kv, other = twin.nodes[middle].fragment, twin.memory.new(None)
    twin.memory.trim(kv, 1)
    twin.memory.reserve(other, 32)
    twin.memory.reserve(kv, 63)  # in its own region
    twin.memory.grew(kv, 63)
    assert_attended_once(twin, twin.rows([(low, leaf, 1)]), 2)


class Planned:
    """Counts the created plans, and keeps the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        new = PagedBackend._new_plan

        def counted(*given: Any) -> attention_metadata.TreeAttentionMetadata:
            self.n += 1
            return new(*given)

        monkeypatch.setattr(PagedBackend, "_new_plan", counted)


class Runs:
    """Leaves of a tree that take a token a step; any of them may end, and others join."""

    def __init__(self, twin: Twin, live: list[int] | None = None) -> None:
        """live: those of a random tree, if none are given."""
        self.twin = twin
        if live is None:
            bushy(twin)
        self.live = live or twin.leaves()

    def step(self, group: int, others: Sequence[Part] = ()) -> paged_step.PagedStep:
        """Step once, check all attended slots, and commit."""
        parts: list[Part] = [(self.twin.nodes[n].parent, n, 1) for n in self.live]
        parts += others
        step = assert_attended_once(self.twin, self.twin.rows(parts), group)
        step.commit()
        for _, number, n in parts:
            if number is not None:
                node = self.twin.nodes[number]
                node.tensors = [torch.zeros(len(h) + n, *h.shape[1:]) for h in node.tensors]
        return step

    def end(self, n: int = 1) -> None:
        """Every other leaf that ends is forgotten."""
        for _ in range(min(n, len(self.live) - 1)):
            number = self.live.pop(self.twin.random.randrange(len(self.live)))
            if self.twin.random.random() < 0.5:
                self.twin.memory.free(self.twin.nodes.pop(number).fragment)

    def join(self, n: int = 1, *, parents: Sequence[int | None] = ()) -> None:
        nodes = parents or [node.parent for node in self.twin.nodes.values()]
        for _ in range(n):
            at = self.twin.random.choice([len(self.live), self.twin.random.randrange(9)])
            self.live.insert(at, self.twin.node(self.twin.random.choice(nodes), 0))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_metadata_follows_rows_that_end_and_join(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, several at once, one for another; only so many others ask for a new plan."""
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(4, 1)
    runs, result = Runs(twin), Planned(monkeypatch)
    runs.join(8)
    for _ in range(6):
        for act in (lambda: runs.end(), lambda: runs.join(), lambda: runs.join(3)):
            act()
            runs.step(group)
        runs.end(2)
        runs.join(2)
        runs.step(group)
        runs.step(group)
        runs.end(2)
        runs.step(group)
    assert result.n == 1


def test_metadata_accepts_rows_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(2, 1)
    runs, result = Runs(twin), Planned(monkeypatch)
    for _ in range(6):
        twin.random.shuffle(runs.live)
        runs.end()
        runs.join()
        runs.step(2)
    assert result.n == 1


def test_prompt_steps_keep_the_metadata_of_the_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of several tokens a row has a plan of its own, and the leaves go on with theirs."""
    twin = Twin(2, 1)
    runs, result = Runs(twin), Planned(monkeypatch)
    runs.step(2)
    for _ in range(3):
        fresh = twin.node(None, 0)
        runs.step(2, [(None, fresh, 40), (runs.live[0], None, 3)])
        runs.live.append(fresh)
        runs.step(2)
        runs.step(2)
    assert result.n == 4


def test_leaves_that_outgrow_a_chunk_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of several chunks end as nodes join, so what is cut is as much as before."""
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    twin = Twin(2, 1)
    runs, result = Runs(twin), Planned(monkeypatch)
    runs.live = [n for n in runs.live if len(twin.nodes[n].tensors[0]) < 60]
    trunk = twin.nodes[runs.live[0]].parent
    for _ in range(4):
        long = twin.node(trunk, 150)
        runs.live.append(long)
        runs.step(2)
        runs.live.remove(long)
        runs.live.append(twin.node(twin.node(trunk, 150), 0))
        runs.step(2)
        runs.step(4)
    assert result.n == 1


def test_lists_that_are_lost_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several tokens a row go by no plan, however many there are."""
    monkeypatch.setattr(paged_step, "_MAX_MOVED", 16)
    twin = Twin(2, 1)
    trunk = twin.node(None, 8)
    rows = twin.rows([(trunk, twin.node(trunk, 0), 1)])
    assert_attended_once(twin, rows, 2)
    for _ in range(40):
        twin.memory.start_step(twin.rows([(trunk, None, 2)]))
        assert len(twin.memory.table.moved) <= 17
    assert_attended_once(twin, rows, 2)


def test_metadata_follows_changes_of_its_fragments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fragments are split, joined, trimmed, settled, freed and moved between steps in which leaves
    end and join; regions are small, so that lists move and tables are rebuilt.
    """
    monkeypatch.setattr(attention_metadata, "_CHUNK", 64)
    monkeypatch.setattr(pool, "SMALLEST_POOL", 8)
    monkeypatch.setattr(pool, "GROW_BY", 4)
    monkeypatch.setattr(pool, "_REGION", 64)
    monkeypatch.setattr(pool, "_TABLE", 64)
    twin = Twin(2, 1)
    runs, result = Runs(twin), Planned(monkeypatch)
    acts = [twin.split, twin.join, twin.trim, twin.settle, twin.free, twin.move]
    n_steps = 90
    for number in range(n_steps):
        twin.random.choice([lambda: None, runs.end, runs.join])()
        if number % 3 == 0:
            twin.random.choice(acts)()
        inner = {node.parent for node in twin.nodes.values()}
        runs.live = [n for n in runs.live if n in twin.nodes and n not in inner]
        runs.join(max(0, 6 - len(runs.live)))
        others: list[Part] = [(twin.random.choice(runs.live), None, 3)] if number % 5 == 0 else []
        runs.step(twin.random.choice([1, 2, 4]), others)
    assert twin.memory.table.age > 0
    assert result.n < n_steps


def test_leaves_that_grow_keep_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hundreds of tokens, past their regions; their places are computed on the device."""
    twin = Twin()
    trunk = twin.node(None, 10)
    parts: list[Part] = [(trunk, twin.node(trunk, 30 + 7 * i), 1) for i in range(5)]
    rows, result = twin.rows(parts), Planned(monkeypatch)
    for _ in range(600):
        step = twin.memory.start_step(rows)
        assert step.positions.tolist() == [row.position for row in rows]
        assert step.slots.tolist() == [row.kv_out.slots[row.kv_out.length] for row in rows]
        step.commit()
        for row in rows:
            row.position += 1
    assert result.n == 1


def test_table_stays_small_as_leaves_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither items nor parts nor the table: what has ended leaves nothing behind."""
    monkeypatch.setattr(pool, "_TABLE", 512)
    twin = Twin(2, 1)
    trunk = twin.node(None, 20)
    live = [twin.node(trunk, 0) for _ in range(6)]
    sizes, result = set[tuple[int, ...]](), Planned(monkeypatch)
    for number in range(300):
        gone = live.pop(twin.random.randrange(6))
        twin.memory.free(twin.nodes.pop(gone).fragment)
        # Now and then below what the plan does not know.
        above = twin.node(trunk, 3) if number % 4 == 0 else trunk
        live.append(twin.node(above, 0))
        step = twin.memory.start_step(twin.rows([(twin.nodes[n].parent, n, 1) for n in live]))
        work = step.work(2)
        sizes.add((len(work.narrow), len(work.wide) + len(work.broad), work.n_parts))
        step.commit()
        for n in live:
            twin.nodes[n].tensors = [
                torch.zeros(len(h) + 1, *h.shape[1:]) for h in twin.nodes[n].tensors
            ]
    assert max(narrow for narrow, _, _ in sizes) <= 6 + 1 + 6
    assert max(parts for _, _, parts in sizes) <= 18
    assert twin.memory.table._end < 40 * pool._REGION
    assert result.n < 100


def test_step_that_fails_changes_no_length_and_keeps_no_slots() -> None:
    twin = Twin()
    trunk, leaf = twin.node(None, 10), twin.node(1, 0)
    memory, slot = twin.memory, twin.memory.layout.slot_bytes
    rows = twin.rows([(trunk, leaf, 3), (trunk, None, 50)])
    memory.start_step(rows)
    assert memory.usage() == (10, (10 + pool.GROW_BY) * slot)
    assert twin.nodes[leaf].fragment.length == 0
    memory.settle(twin.nodes[leaf].fragment)
    assert memory.usage() == (10, 10 * slot)
    memory.start_step(rows).commit()  # the next step takes what the failed one had
    twin.nodes[leaf].tensors = twin.stored(None)
    memory.trim(twin.nodes[leaf].fragment, 0)
    twin.check()


def test_kv_of_another_shape_or_memory_raises() -> None:
    twin, other = Twin(), Twin(dims=(16, 16))
    data = twin.memory.export(twin.nodes[twin.node(None, 5)].fragment)
    with pytest.raises(ModelMismatch):
        other.memory.load(data, None)
    with pytest.raises(ModelMismatch):
        other.memory.load({}, None)
    with pytest.raises(ConfigError, match="paged memory"):
        twin.memory.start_step([Row((), [1], 0, Fragment())])
    empty = twin.memory.export(twin.memory.new(None))
    assert twin.memory.load(empty, None).length == 0


def test_pool_that_finds_no_room_to_spare_grows_by_what_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin, max_n = Twin(), 330
    node = twin.node(None, 250)
    make = PagedBackend._empty

    def within(memory: PagedBackend, shape: LayerShape, n: int) -> Any:
        if n > max_n + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(memory, shape, n)

    monkeypatch.setattr(PagedBackend, "_empty", within)
    monkeypatch.setattr(PagedBackend, "_spare", lambda memory, left: 1000)
    leaf = twin.node(node, 0)
    with pytest.raises(KVFull, match="memory for the KV of 256 tokens, and 90 more") as full:
        twin.memory.reserve(twin.nodes[leaf].fragment, 96)
    assert (full.value.capacity, full.value.needed) == (256, 90)
    twin.check()
    assert twin.step([(node, leaf, 40)], AttentionSpec(0.3)) < NEAR
    assert 290 <= twin.memory._capacity <= max_n
    twin.check()


@pytest.mark.parametrize("has_slots", [True, False])
def test_pool_that_cannot_grow_keeps_no_layer_that_is_larger(
    monkeypatch: pytest.MonkeyPatch, has_slots: bool
) -> None:
    shape = LayerShape(1, 8, 8, torch.float32, torch.float32)
    memory, make, n_left = (
        PagedBackend(Layout.from_shapes([shape] * 5, DEVICE)),
        PagedBackend._empty,
        3,
    )
    data = {f"{name}.{layer}": np.full((1, 70, 8), layer) for layer in range(5) for name in "kv"}
    sent: dict[str, Any] = {name: array.astype(np.float32) for name, array in data.items()}
    sent["dtype"] = np.array("float32")
    stored = memory.load(sent, None) if has_slots else memory.new(None)
    n = len(memory.keys[0]) if has_slots else 0

    def within(memory: PagedBackend, shape: LayerShape, n_slots: int) -> Any:
        nonlocal n_left
        n_left -= n_slots != n
        if n_left < 0 and n_slots != n:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(memory, shape, n_slots)

    monkeypatch.setattr(PagedBackend, "_empty", within)
    with pytest.raises(KVFull):
        memory.reserve(stored, 1000)
    assert [len(each) for each in memory.keys + memory.values] == [n] * (10 * has_slots)
    monkeypatch.setattr(PagedBackend, "_empty", make)
    actual = memory.export(stored)
    if has_slots:
        for name, array in sent.items():
            np.testing.assert_array_equal(actual[name], array)
    memory.reserve(stored, 1000)
    assert len(memory.keys) == 5


def test_pool_on_a_card_that_is_full_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move without effect would cost all graphs captured over the pool."""
    twin = Twin()
    leaf = twin.node(twin.node(None, 250), 0)
    before = (twin.memory.n_moves, *map(id, twin.memory.keys))
    monkeypatch.setattr(PagedBackend, "_n_slots_left", lambda memory: 89)
    with pytest.raises(KVFull, match="KV of 345 tokens, and 1 more are wanted") as full:
        twin.memory.reserve(twin.nodes[leaf].fragment, 96)
    assert (full.value.capacity, full.value.needed) == (345, 1)
    assert "docs/troubleshooting.md#out-of-memory" in full.value.hint
    assert (twin.memory.n_moves, *map(id, twin.memory.keys)) == before
    monkeypatch.setattr(PagedBackend, "_n_slots_left", lambda memory: 90)
    twin.memory.reserve(twin.nodes[leaf].fragment, 96)
    assert twin.memory._capacity == 256 + 90


def test_host_memory_is_released_once_the_device_has_read_it() -> None:
    class Event:
        """Stands in for one of a card."""

        is_past = False

        def query(self) -> bool:
            return self.is_past

    twin, event = Twin(), Event()
    read: Any = twin.memory._copies._in_use
    read.append((event, []))
    leaf = twin.node(twin.node(None, 5), 0)
    row = Row((), [1], 0, twin.nodes[leaf].fragment)
    twin.memory.start_step([row])
    assert len(read) == 1
    event.is_past = True
    twin.memory.start_step([row])
    assert not read


def test_kv_leaves_layer_after_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is short when KV is offloaded: copies of all layers would not fit."""
    shape = LayerShape(1, 8, 8, torch.float32, torch.float32)
    memory = PagedBackend(Layout.from_shapes([shape] * 5, DEVICE))
    named = [f"{name}.{layer}" for layer in range(5) for name in "kv"]
    sent: dict[str, Any] = {
        name: np.full((1, 70, 8), i, np.float32) for i, name in enumerate(named)
    }
    fragment = memory.load({**sent, "dtype": np.array("float32")}, None)
    n_copied = Counter[str]()
    n_when_one_left = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            n_copied[func.overloadpacket.__name__] += 1
            return func(*args, **kwargs or {})

    def leaves(tensor: torch.Tensor) -> Any:
        n_when_one_left.append(n_copied["index"])
        return kv_offload.to_host(tensor)

    monkeypatch.setattr(pool, "to_host", leaves)
    with Copies():
        data = memory.export(fragment)
    assert n_when_one_left == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    for name in named:
        np.testing.assert_array_equal(data[name], sent[name])


@pytest.mark.gpu
def test_kv_is_copied_to_pinned_memory_and_back() -> None:
    twin = Twin()
    node = twin.nodes[twin.node(None, 300)]
    data = twin.memory.export(node.fragment)
    assert all(torch.from_numpy(data[f"{name}.0"]).is_pinned() for name in "kv")
    twin.memory.free(node.fragment)
    node.fragment = twin.memory.load(data, None)
    del data  # the device may still read it
    twin.check()


def test_kv_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    makers, card, padded = (
        select_backend.kv_backends,
        torch.device("cuda"),
        select_backend.PaddedBackend,
    )
    for device in (CPU, card):
        assert makers("padded", device) == [padded]
    assert makers("auto", CPU) == [padded]
    with pytest.raises(ConfigError, match="'auto', 'padded' and 'paged'"):
        makers("pages", CPU)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "is_interpreted", lambda: True)
        assert makers("auto", card) == [padded]
        patch.setattr(kernel, "is_interpreted", lambda: False)
        patch.setattr(select_backend, "is_for_triton", lambda device: False)
        assert makers("auto", card) == [padded]
        with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
            makers("paged", card)
        patch.setattr(select_backend, "is_for_triton", lambda device: True)
        assert makers("paged", card) == [PagedBackend]
        assert makers("auto", card) == [PagedBackend, padded]
        assert select_backend.has_kernels(makers("auto", card), card)
        assert not select_backend.has_kernels(makers("padded", card), card)
        assert not select_backend.has_kernels(makers("auto", CPU), CPU)
        with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
            makers("paged", CPU)
    monkeypatch.setitem(sys.modules, "weft.engines.torch.paged.kernel", None)
    assert makers("auto", card) == [padded]
    with pytest.raises(EngineUnavailable, match="triton"):
        makers("paged", CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_over_the_pool(name: str) -> None:
    """A load holds a tree against the model's own plain forward; see `check_tree`.

    The short run loads these families with the tests of fused modules, such as gemma2 in
    `test_torch_rotary.py` and gpt_oss in `test_torch_experts.py`.
    """
    engine = TorchEngine.adopt(build(name).to(DEVICE), kv="paged")
    assert isinstance(engine.fragments, PagedBackend)
    assert engine.fragments.usage() == (0, 0)


def test_kv_option_raises_for_a_model_without_kv_of_tokens() -> None:
    with pytest.raises(ConfigError, match="kv has no effect on BloomForCausalLM"):
        TorchEngine.adopt(build("bloom"), kv="paged")


def test_loom_grows_the_same_over_either_memory() -> None:
    """From one prompt, below a branch that was clipped, and where another was."""
    texts = {}
    for kv in ("padded", "paged"):
        with weft.load(shallow(), dtype="float32", engine_options={"kv": kv}) as lm:
            loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
            first, second, third = loom.grow(n=3, max_tokens=5, seed=4)
            first.clip(3)
            below = first.grow(n=2, max_tokens=3, seed=2)
            texts[kv] = [node.text for node in (first, second, third, *below)]
            assert isinstance(lm.engine.fragments, PagedBackend) == (kv == "paged")
    assert texts["paged"] == texts["padded"]


@pytest.mark.skipif(not kernel.is_interpreted(), reason="a card multiplies it rightly")
def test_bfloat16_raises_in_the_interpreter() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        TorchEngine.adopt(build("llama", torch.bfloat16), kv="paged")


@pytest.mark.parametrize("size", [8, 80, 128])
def test_angles_are_those_of_the_model(size: int) -> None:
    """As far out as float32 counts positions, scaled, and more tokens than a program takes."""
    n_heads, numbers = 4, torch.Generator(DEVICE).manual_seed(1)
    config = LlamaConfig(hidden_size=n_heads * size, num_attention_heads=n_heads)
    rotary = LlamaRotaryEmbedding(config).to(DEVICE)
    rotary.attention_scaling = 1.5
    positions = torch.randint(1 << 20, (150,), device=DEVICE, generator=numbers)
    positions[:2] = torch.tensor([0, (1 << 24) - 1])
    given = rotary.inv_freq, rotary.attention_scaling
    result = elementwise.rotary_angles(positions, *given, torch.float32)
    want = rotary(result, positions[None])
    assert result.shape == (150, size)
    halves = torch.cat([half[0, :, : size // 2] for half in want], 1)
    torch.testing.assert_close(result, halves, rtol=1e-5, atol=1e-6)
    assert torch.equal(elementwise.rotary_angles(positions, *given, torch.float16), result.half())


def test_advance_slots_matches_a_lookup() -> None:
    """As many as one program takes, and one more; what lies behind them stays."""
    for n in (1, 256, 257):
        numbers = torch.Generator(DEVICE).manual_seed(n)
        table = torch.randperm(5000, device=DEVICE, generator=numbers).int()
        bases, positions = torch.randint(2000, (2, n), device=DEVICE, generator=numbers).int()
        before = positions.clone()
        for n_on in (0, 1, 1):
            slots = graph_inputs.advance_slots(positions, n_on, bases, table)
            before += n_on
            assert torch.equal(positions, before)
            assert torch.equal(slots, table[(bases + before).long()])
        ids = torch.randint(1 << 40, (n,), device=DEVICE, generator=numbers)
        into = [torch.full((n + 3,), -7, device=DEVICE, dtype=kind) for kind in _OF_A_FRAME]
        graph_inputs.copy_inputs(ids, slots, positions, (into[0], into[1], into[2], into[3]))
        for stored, given in zip(into, (ids, slots, positions, positions), strict=True):
            assert torch.equal(stored[:n], given.to(stored.dtype))
            assert (stored[n:] == -7).all()


def test_heads_of_many_programs_are_normed_turned_and_stored() -> None:
    """More heads than a program takes, and no multiple of it; slots in any order."""
    n_tokens, n_queries, n_kv, size = 77, 6, 2, 12
    seeded = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=seeded)

    heads, slots = normal(n_tokens, n_queries + 2 * n_kv, size), torch.randperm(90)[:n_tokens]
    keys, values = normal(90, n_kv, size), normal(90, n_kv, size)
    rotary_angles = normal(n_tokens, size)
    cos, sin = (half.repeat(1, 2) for half in rotary_angles.chunk(2, 1))
    turn = RotaryArgs(n_queries, rotary_angles, normal(size), normal(size), eps=1e-6)
    slots, before = slots.to(DEVICE), (keys.clone(), values.clone())
    query = elementwise.rotary_and_store_kv(heads, turn, slots, keys, values)

    def turned(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, (size,), norm, turn.eps)
        pair = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos[:, None] + pair * sin[:, None]

    assert turn.query_norm is not None
    assert turn.key_norm is not None
    requested, key, value = heads.split([n_queries, n_kv, n_kv], 1)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(query, turned(requested, turn.query_norm))
    close(keys[slots], turned(key, turn.key_norm))
    close(values[slots], value)
    others = torch.ones(90, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    for now, was in zip((keys, values), before, strict=True):
        assert torch.equal(now[others], was[others])


@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (16, 40)])
def test_heads_of_many_programs_are_stored(dims: tuple[int, int]) -> None:
    """Keys and values of any sizes, as models hand them over: by head, or token by token."""
    seeded = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=seeded)

    slots = torch.randperm(700, device=DEVICE, generator=seeded)[:300]
    stored = [normal(700, 3, dim) for dim in dims]
    before = [tensor.clone() for tensor in stored]
    by_head, by_token = normal(3, 300, dims[0]), normal(300, 3, dims[1]).transpose(0, 1)
    elementwise.store(by_head, by_token, slots, *stored)
    for now, was, given in zip(stored, before, (by_head, by_token), strict=True):
        assert torch.equal(now, was.index_copy(0, slots, given.transpose(0, 1)))


@pytest.mark.parametrize(
    ("size", "dtype", "is_allowed"),
    [(256, torch.bfloat16, True), (512, torch.bfloat16, False), (64, torch.float32, False)],
)
def test_tiles_of_128_rows_are_for_heads_that_fit_a_processor(
    size: int, dtype: torch.dtype, *, is_allowed: bool
) -> None:
    shapes = [LayerShape(8, 64, 64, torch.bfloat16, torch.bfloat16)]
    shapes.append(LayerShape(2, size, size, dtype, dtype))  # one of few layers is enough
    assert kernel.has_broad(Layout.from_shapes(shapes, torch.device("cpu"))) == is_allowed


@pytest.mark.parametrize(("size", "dtype"), [(256, torch.float32), (512, torch.bfloat16)])
def test_heads_too_large_for_a_tile_of_float32_raise(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_step, "is_interpreted", lambda: False)
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="heads have 512 numbers"):
        PagedBackend(
            Layout.from_shapes([LayerShape(2, 512, 512, torch.float32, torch.float32)], cpu)
        )
    PagedBackend(Layout.from_shapes([LayerShape(2, size, size, dtype, dtype)], cpu))


@pytest.mark.slow
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize(("n_rows", "n_parts"), [(4, 4), (1, 16)])
def test_merge_fills_a_processor(size: int, n_rows: int, n_parts: int) -> None:
    """Without a card: nothing spills, and registers are enough for twenty warps at once."""
    fixed = {"N_HEADS": 32, "VALUE_DIM": size, "VALUE_PAD": size, "BM": n_rows, "BP": n_parts}
    fixed |= {"AXIS": kernel.PARTS_AXIS, "HAS_SINKS": True, "num_warps": 4}
    result = compiled("paged.kernel", "merge_attn_states_kernel", fixed)
    assert (result.stack, result.registers <= 96, result.shared <= 16 * 1024) == (0, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_turn_fills_a_processor(size: int) -> None:
    fixed = {"N_QUERIES": 32, "N_KV": 8, "DIM": size, "PAD": size, "BM": 8, "HAS_NORMS": True}
    result = compiled("paged.elementwise", "rotary_and_store_kv_kernel", {**fixed, "num_warps": 4})
    assert (result.stack, result.registers <= 96, result.shared <= 16 * 1024) == (0, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("are_neighbours", "every"), [(False, 1), (True, 1), (True, 2)])
def test_turning_apart_fills_a_processor(size: int, every: int, *, are_neighbours: bool) -> None:
    """Of models whose own modules run."""
    fixed = {"N_QUERIES": 32, "N_KEYS": 8, "DIM": size, "ROTATED": size, "WIDTH": size}
    fixed |= {"ARE_NEIGHBOURS": are_neighbours, "EVERY": every}
    fixed |= {"PAD": size, "BM": 8, "num_warps": 4}
    result = compiled("paged.elementwise", "rotary_kernel", fixed)
    assert (result.stack, result.registers <= 96, result.narrow) == (0, True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
def test_storing_apart_fills_a_processor(size: int) -> None:
    fixed = {"N_KV": 8, "KEY_DIM": size, "VALUE_DIM": size, "PAD": size, "BM": 8, "num_warps": 4}
    result = compiled("paged.elementwise", "store_kv_kernel", fixed)
    assert (result.stack, result.registers <= 64, result.narrow) == (0, True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("width", [4096, 5120, 16384])
@pytest.mark.parametrize("is_centred", [False, True])
def test_norm_fills_a_processor(width: int, *, is_centred: bool) -> None:
    pad = kernel.block_size_for(width)
    fixed = {"WIDTH": width, "PAD": pad, "BM": 1, "num_warps": min(16, pad // 512)}
    fixed |= {"IS_CENTRED": is_centred, "HAS_WEIGHT": True}
    result = compiled("paged.elementwise", "rms_norm_kernel", fixed)
    assert (result.stack, result.registers <= 128, result.narrow) == (0, True, 0)


@pytest.mark.slow
def test_angles_are_turned_about_exactly() -> None:
    """Without a card: by no approximation of sines, which is wrong far out."""
    fixed = {"HALF": 64, "PAD": 64, "BT": 1, "num_warps": 1}
    result = compiled("paged.elementwise", "rotary_angles_kernel", fixed, position_ptr="i64")
    assert result.approximations == 0


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_fills_a_processor(activation: str) -> None:
    fixed = {"WIDTH": 14336, "BT": 1, "BW": 1024, "ACTIVATION": activation, "num_warps": 4}
    result = compiled("paged.elementwise", "act_and_mul_kernel", fixed)
    assert (result.stack, result.registers <= 32, result.narrow) == (0, True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("n_rows", kernel.TILES)
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "window"])
def test_tiles_compile_for_sm_90(size: int, n_rows: int, is_plain: bool) -> None:
    """Without a card: nothing spills, two programs share a processor, wide ones use warp groups."""
    fixed = kernel.tile_config(32, 8, size, size, n_rows, 2)
    requested = {"HAS_CAP": not is_plain, "HAS_WINDOW": not is_plain, "IS_SINGLE_PART": False}
    result = compiled("paged.kernel", "tree_attention_kernel", {**fixed, **requested})
    n_programs = 1 if n_rows == kernel.BROAD else 2  # of a processor
    assert result.shared <= 227 * 1024 // n_programs
    is_narrow = n_rows == kernel.NARROW
    assert (result.has_wgmma, result.has_mma) == (not is_narrow, is_narrow)
    assert not result.is_serial
    assert result.stack == 0
    assert result.registers <= 255
    if n_rows == kernel.BROAD or (n_rows == kernel.WIDE and size <= 128):
        assert result.ahead > 0  # the next keys are loaded during these products


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [kernel.WIDE, kernel.BROAD])
@pytest.mark.parametrize(("n_heads", "size"), [(48, 128), (71, 64)])
def test_many_heads_a_group_wait_for_no_single_product(
    n_heads: int, size: int, n_rows: int
) -> None:
    """Tiles of 64 and 128 rows also compute nodes above one token, if 16 rows are too few."""
    fixed = kernel.tile_config(n_heads, 1, size, size, n_rows, 2)
    requested = {"HAS_CAP": False, "HAS_WINDOW": False, "IS_SINGLE_PART": False}
    result = compiled("paged.kernel", "tree_attention_kernel", {**fixed, **requested})
    assert result.has_wgmma
    assert not result.is_serial


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "room"), [(80, 163), (89, 99), (120, 99)])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_tiles_fit_other_cards(capability: int, room: int, size: int) -> None:
    """All classes do; of heads of 256 numbers those of 128 rows only where there is more room, and
    a memory has smaller ones there."""
    attended = {}
    for n_rows in kernel.TILES:
        fixed = kernel.tile_config(32, 8, size, size, n_rows, 2)
        requested = {**fixed, "HAS_CAP": False, "HAS_WINDOW": False, "IS_SINGLE_PART": False}
        result = compiled("paged.kernel", "tree_attention_kernel", requested, capability=capability)
        attended[n_rows] = result.shared <= room * 1024
        assert result.has_mma
        assert result.stack <= (256 if n_rows == kernel.BROAD and size == 256 else 8)
    assert attended == {n_rows: (n_rows, size, room) != (128, 256, 99) for n_rows in kernel.TILES}
