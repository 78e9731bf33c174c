"""Several llama.cpp contexts for different prompts: memory, errors, and logits of random trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from shallow import shallow_gguf
from weft.engines.base import Fragment, Row, ScoreSpan, Span
from weft.engines.llamacpp import LlamaCppEngine
from weft.engines.llamacpp import pool as pool_module
from weft.engines.llamacpp import settings as settings_module
from weft.engines.llamacpp import transfer as transfer_module
from weft.engines.llamacpp.context import CellCount, Context
from weft.engines.llamacpp.pool import ContextPool, Need, Shard, shard_of
from weft.errors import ForwardError, KVFull, ModelLoadError

pytestmark = pytest.mark.llamacpp

N_SLOTS = 2048  # of the engine
ATOL = 2e-4


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_FIRST_SLOTS", 256)
    monkeypatch.setattr(settings_module, "_FIRST_LEASES", 2)
    monkeypatch.setattr(settings_module, "_MAX_SLOTS", N_SLOTS)
    monkeypatch.setattr(pool_module, "MIN_LEASES", 2)
    monkeypatch.setattr(transfer_module, "MIN_LEASES", 2)
    monkeypatch.setattr(pool_module, "_MIN_SLOTS", 40)
    monkeypatch.setattr(pool_module, "_MIN_FORK_SLOTS", 20)
    monkeypatch.setattr(pool_module, "_NEW_CELLS", 256)


def load(**options: Any) -> LlamaCppEngine:
    return LlamaCppEngine.load(shallow_gguf(), **{"dtype": "float32", "n_threads": 1, **options})


@pytest.fixture
def engine() -> Iterator[LlamaCppEngine]:
    engine = load()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[LlamaCppEngine]:
    """Load an engine that computes each path alone, in one context."""
    engine = load(kv_bytes=1 << 24)
    yield engine
    engine.close()


def ids_of(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 10_000 + i).randrange(6, 2000) for i in range(n)]


def prompts(engine: LlamaCppEngine, *lengths: int) -> list[Fragment]:
    """Compute prompts of these lengths, one a step; return their fragments."""
    fragments = [engine.fragments.new(None) for _ in lengths]
    for seed, (fragment, n) in enumerate(zip(fragments, lengths, strict=True)):
        engine.forward([Row((), ids_of(n, seed), 0, fragment)])
    return fragments


def shards_of(fragments: list[Fragment]) -> list[Any]:
    return [shard_of(fragment) for fragment in fragments]  # type: ignore[arg-type]


# Random trees ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """Tokens of a path, and the fragment with their KV."""

    ids: list[int]
    fragment: Fragment
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def chain(self) -> list[Node]:
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.insert(0, node)
            node = node.parent
        return nodes

    def path(self) -> list[int]:
        return [token for node in self.chain() for token in node.ids]

    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(node.fragment, len(node.ids)) for node in self.chain())


class World:
    """Random operations on an engine with several contexts; each compares with plain forwards."""

    def __init__(self, engine: LlamaCppEngine, plain: LlamaCppEngine, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine, self.plain, self.store = engine, plain, engine.fragments
        self.nodes: list[Node] = []
        self.max_shards = 0
        self.n_full = self.n_moved = self.n_spread = 0

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(6, 2000) for _ in range(self.rng.randint(low, high))]

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes if not node.children]

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)

    def remove(self, node: Node) -> None:
        self.store.free(node.fragment)
        self.nodes.remove(node)
        if node.parent is not None:
            node.parent.children.remove(node)

    def check_logits(self, path: list[int], logits: np.ndarray) -> None:
        last = self.plain.forward([Row((), path, 0, None, (len(path) - 1,))]).logits(0)
        np.testing.assert_allclose(logits, last, atol=ATOL)

    def step(self) -> None:
        """Run one forward of new roots, forks, grown leaves and rows without KV."""
        rng = self.rng
        rows: list[Row] = []
        paths: list[list[int]] = []
        new: list[Node] = []
        grown: list[tuple[Node, list[int]]] = []
        busy: set[Node] = set()
        for _ in range(rng.randint(1, 9)):
            kind = rng.choice(["root", "child", "grow", "grow", "grow", "read"])
            above = rng.choice([*self.nodes, None]) if kind in ("child", "read") else None
            if above in busy:
                continue
            path = [] if above is None else above.path()
            spans = () if above is None else above.spans()
            leaves = [leaf for leaf in self.leaves() if leaf not in busy]
            if kind == "grow" and leaves:
                leaf = rng.choice(leaves)
                if any(node.parent is leaf for node in new):
                    continue
                busy.add(leaf)
                more = self.tokens(1, 6)
                grown.append((leaf, more))
                paths.append(leaf.path() + more)
                position = len(paths[-1]) - len(more)
                spans, fragment = leaf.spans()[:-1], leaf.fragment
                tokens = more
            else:
                tokens = self.tokens(1, 160 if kind == "root" else 8)
                paths.append(path + tokens)
                position, fragment = len(path), None
                if kind != "read":
                    fragment = self.store.new(None if above is None else above.fragment)
                    new.append(Node(tokens, fragment, above))
            rows.append(Row(spans, tokens, position, fragment, (len(tokens) - 1,)))
        before = self.state()
        try:
            output = self.engine.forward(rows)
        except KVFull:
            self.n_full += 1
            assert self.state() == before
            self.evict()
            return
        for node in new:
            self.add(node)
        for node, more in grown:
            node.ids += more
        for index in range(len(rows)):
            self.check_logits(paths[index], output.logits(index))

    def fork(self) -> None:
        """Start three children of a leaf in one step."""
        leaf = self.rng.choice(self.leaves())
        nodes = [Node(self.tokens(1, 8), self.store.new(leaf.fragment), leaf) for _ in range(3)]
        path, spans, shard = leaf.path(), leaf.spans(), shard_of(leaf.fragment)  # type: ignore[arg-type]
        rows = [Row(spans, n.ids, len(path), n.fragment, (len(n.ids) - 1,)) for n in nodes]
        try:
            output = self.engine.forward(rows)
        except KVFull:
            self.n_full += 1
            self.evict()
            return
        self.n_spread += shard_of(leaf.fragment) is not shard  # type: ignore[arg-type]
        for index, node in enumerate(nodes):
            self.add(node)
            self.check_logits(node.path(), output.logits(index))

    def state(self) -> tuple[int, int]:
        shards = self.engine._pool.shards
        return self.store.usage().slots, sum(shard.n_leased for shard in shards)

    def evict(self) -> None:
        for leaf in self.rng.sample(self.leaves(), len(self.leaves()) // 2):
            self.remove(leaf)

    def prune(self) -> None:
        self.remove(self.rng.choice(self.leaves()))

    def split(self) -> None:
        node = self.rng.choice(self.nodes)
        if len(node.ids) < 2:
            return
        at = self.rng.randrange(1, len(node.ids))
        upper = Node(node.ids[:at], self.store.split(node.fragment, at), node.parent, [node])
        if node.parent is not None:
            node.parent.children[node.parent.children.index(node)] = upper
        self.nodes.append(upper)
        node.ids, node.parent = node.ids[at:], upper

    def reload(self) -> None:
        """Export a leaf, free it, and load it, as offloading does."""
        leaf = self.rng.choice(self.leaves())
        data = self.store.export(leaf.fragment)
        self.store.free(leaf.fragment)
        above = None if leaf.parent is None else leaf.parent.fragment
        leaf.fragment = self.store.load(data, above)

    def double(self) -> None:
        """Compute a root's tokens a second time, and attach what follows them to the root."""
        root = self.rng.choice([node for node in self.nodes if node.parent is None])
        tails = [self.tokens(2, 6), self.tokens(1, 6), self.tokens(1, 6)]
        n = len(root.ids)
        lowest = self.store.new(None)
        try:
            self.engine.forward([Row((), root.ids + tails[0], 0, lowest)])
        except KVFull:
            self.evict()
            return
        middle = self.store.split(lowest, n + 1)
        nodes = [Node(tails[0][:1], middle, root), Node(tails[0][1:], lowest, None)]
        nodes[1].parent = nodes[0]
        spans = (Span(middle, n + 1), Span(lowest, len(tails[0]) - 1))
        for above, spans_above, tail in (
            (nodes[1], spans, tails[1]),
            (nodes[0], spans[:1], tails[2]),
        ):
            child = self.store.new(above.fragment)
            position = sum(span.length for span in spans_above)
            self.engine.forward([Row(spans_above, tail, position, child)])
            nodes.append(Node(tail, child, above))
        head = self.store.split(middle, n)
        self.store.free(head)
        self.n_moved += shard_of(middle) is not shard_of(root.fragment)  # type: ignore[arg-type]
        self.store.attach(middle, root.fragment)
        self.store.attach(lowest, middle)
        for node in nodes:
            self.add(node)

    def check(self) -> None:
        pool = self.engine._pool
        self.max_shards = max(self.max_shards, len(pool.shards))
        assert self.store.usage().slots == sum(len(node.ids) for node in self.nodes)
        for shard in pool.shards:
            own = [n for n in self.nodes if shard_of(n.fragment) is shard]  # type: ignore[arg-type]
            assert shard.slots == sum(len(node.ids) for node in own) <= shard.context.n_cells
            assert shard.n_leased == sum(not node.children for node in own)


def record_cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that the number of cells of all contexts is added to when it changes."""
    counts: list[int] = []
    use = Context._use

    def recorded(self: Context, handle: Any, n_leases: int) -> None:
        use(self, handle, n_leases)
        counts.append(self._cell_count.n)

    monkeypatch.setattr(Context, "_use", recorded)
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_in_several_contexts_have_the_logits_of_plain_forwards(
    plain: LlamaCppEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = record_cells(monkeypatch)
    engine = load()
    world = World(engine, plain, seed)
    operations: list[Callable[[], None]] = [
        *[world.step] * 8, *[world.split] * 2, world.prune, world.reload, world.double, world.fork,
    ]  # fmt: skip
    for _ in range(200):
        operation = world.rng.choice(operations) if world.nodes else world.step
        operation()
        world.check()
    assert max(counts) <= engine._pool.max_cells
    assert world.max_shards > 3
    assert world.n_full
    assert world.n_moved
    assert world.n_spread
    while world.nodes:
        world.prune()
    world.check()
    engine.close()


# Steps and memory -----------------------------------------------------------------------------


def test_nothing_grows_or_closes_after_the_first_batch_of_a_step(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth frees logits of the same step, which its result may still view."""
    fragments = prompts(engine, 50, 50, 50, 50)
    first, _, second, _ = shards_of(fragments)
    assert first is not second
    events = list[str]()
    for name in ("run", "resize", "close"):
        original = getattr(Context, name)

        def recorded(
            self: Context, *args: Any, name: str = name, original: Any = original, **options: Any
        ) -> Any:
            before = self.n_cells, self.n_leases
            result = original(self, *args, **options)
            if name != "resize" or before != (self.n_cells, self.n_leases):
                events.append(name)
            return result

        monkeypatch.setattr(Context, name, recorded)
    rows = [Row((), ids_of(700, i), 50, fragments[i], (699,)) for i in (0, 2)]
    rows += [Row((Span(fragments[2], 50),), [7], 50, None, (0,)) for _ in range(20)]
    output = engine.forward(rows)
    assert events.count("resize") >= 3  # cells of both, leases of one
    assert "resize" not in events[events.index("run") :]
    assert "close" not in events
    monkeypatch.undo()
    assert np.isfinite(output.logits(0)).all()


def test_result_survives_the_closing_of_its_context(engine: LlamaCppEngine) -> None:
    fragments = prompts(engine, 50, 50)
    last = engine.fragments.new(None)
    output = engine.forward([Row((), ids_of(50, 5), 0, last, (49,))])
    (shard,) = shards_of([last])
    assert shard is not shards_of(fragments)[0]
    assert not output._copied
    logits = output._logits.copy()
    data = engine.fragments.export(fragments[0])
    for fragment in (*fragments, last):
        engine.fragments.free(fragment)
    for name in data:
        if name != "dtype":
            data[name] = np.tile(data[name], (1, 84, 1))
    engine.fragments.load(data, None)  # 4,200 slots
    assert shard.context.closed
    assert output._copied
    np.testing.assert_array_equal(output.logits(0), logits[0])


def test_one_path_may_use_all_slots_after_the_others_are_freed(
    engine: LlamaCppEngine, plain: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = record_cells(monkeypatch)
    store, pool = engine.fragments, engine._pool
    fragments = prompts(engine, *[50] * 12)
    assert len(set(shards_of(fragments))) == 6
    kept = fragments[6]
    (shard,) = shards_of([kept])
    for fragment in fragments:
        if fragment is not kept:
            store.free(fragment)
    ids, n_slots = ids_of(50, 6), engine.info.kv_slots
    assert n_slots == N_SLOTS
    while len(ids) < n_slots:
        more = [random.Random(len(ids)).randrange(6, 2000)] * min(500, n_slots - len(ids))
        output = engine.forward([Row((), more, len(ids), kept, (len(more) - 1,))])
        ids += more
    last = plain.forward([Row((), ids, 0, None, (n_slots - 1,))]).logits(0)
    np.testing.assert_allclose(output.logits(0), last, atol=ATOL)
    assert shards_of([kept]) == [shard]
    assert max(counts) <= pool.max_cells


def test_path_gets_the_memory_of_empty_shards_if_memory_is_short(
    engine: LlamaCppEngine, plain: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new context needs memory while the old one exists; empty shards must not keep it."""
    fragments = prompts(engine, *[50] * 12)
    pool = engine._pool
    assert len(pool.shards) == 6
    limit = pool.n_cells

    def check(header: object, types: object, n_cells: int) -> None:
        if pool.n_cells + n_cells > limit:
            raise ModelLoadError(f"no memory for {n_cells} cells")

    monkeypatch.setattr(settings_module, "check_memory", check)
    for fragment in fragments[1:]:
        engine.fragments.free(fragment)
    output = engine.forward([Row((), ids_of(900, 99), 50, fragments[0], (899,))])
    path = [*ids_of(50, 0), *ids_of(900, 99)]
    monkeypatch.undo()
    alone = plain.forward([Row((), path, 0, None, (949,))]).logits(0)
    np.testing.assert_allclose(output.logits(0), alone, atol=ATOL)
    assert len(pool.shards) == 1


def test_shards_with_kv_shrink_if_another_needs_their_cells(
    engine: LlamaCppEngine, plain: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pool = engine.fragments, engine._pool
    counts = record_cells(monkeypatch)
    long, short = prompts(engine, 1900, 5)
    store.trim(long, 60)
    others = [store.new(None) for _ in range(4)]
    for seed, fragment in enumerate(others, 2):
        engine.forward([Row((), ids_of(900, seed), 0, fragment)])
    home, second, _, third, _ = shards_of([long, *others])
    assert len({home, second, third}) == 3
    assert home is shards_of([short])[0]
    assert home.context.n_cells == 256
    lengths = {0: 60, 2: 900, 5: 900}
    ends = [
        Row((), [9], n, f, (0,))
        for f, n in zip([long, *others[::3]], lengths.values(), strict=True)
    ]
    output = engine.forward(ends)
    for index, (seed, n) in enumerate(lengths.items()):
        path = [*ids_of(n, seed), 9]
        alone = plain.forward([Row((), path, 0, None, (n,))]).logits(0)
        np.testing.assert_allclose(output.logits(index), alone, atol=ATOL)
    assert max(counts) <= pool.max_cells


def test_kv_full_has_the_capacity_of_all_contexts(engine: LlamaCppEngine) -> None:
    fragments = prompts(engine, 50, 50, 50, 50)
    pool, before = engine._pool, engine.fragments.usage().slots
    assert [shard.slots for shard in pool.shards] == [100, 100]
    with pytest.raises(KVFull) as raised:
        engine.forward([Row((), [5] * 1000, 50, fragment) for fragment in fragments])
    assert raised.value.capacity == pool.max_cells
    assert raised.value.needed == 2 * 2304 - pool.max_cells  # 2,100 slots, rounded up
    assert engine.fragments.usage().slots == before
    assert [shard.slots for shard in pool.shards] == [100, 100]


def test_error_in_one_context_undoes_the_rows_of_all(
    engine: LlamaCppEngine, plain: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = prompts(engine, 50, 50, 50)
    first, _, second = shards_of(fragments)
    assert first is not second
    run = second.context.run

    def fail(*args: Any, **options: Any) -> None:
        run(*args, **options)
        raise ForwardError("broken")

    monkeypatch.setattr(second.context, "run", fail)
    new = [engine.fragments.new(fragment) for fragment in fragments]
    rows = [
        Row((Span(f, 50),), [7, 8], 50, each, (1,)) for f, each in zip(fragments, new, strict=True)
    ]
    with pytest.raises(ForwardError, match="broken"):
        engine.forward(rows)
    assert [(s.slots, s.n_leased) for s in engine._pool.shards] == [(100, 2), (50, 1)]
    monkeypatch.undo()
    output = engine.forward(rows)
    for seed in range(3):
        path = [*ids_of(50, seed), 7, 8]
        alone = plain.forward([Row((), path, 0, None, (51,))]).logits(0)
        np.testing.assert_allclose(output.logits(seed), alone, atol=ATOL)


# Copies and leases ----------------------------------------------------------------------------


def leased(engine: LlamaCppEngine) -> list[int]:
    return [shard.n_leased for shard in engine._pool.shards]


@pytest.mark.parametrize("kind", ["rejected", "error"])
def test_failed_load_gives_its_leases_back(
    engine: LlamaCppEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = prompts(engine, 50, 50, 50)
    data, before = engine.fragments.export(fragments[0]), leased(engine)

    def put_state(self: Context, lease: int, state: Any) -> bool:
        if kind == "error":
            raise ForwardError("broken")
        return False

    monkeypatch.setattr(Context, "put_state", put_state)
    with pytest.raises(KVFull if kind == "rejected" else ForwardError):
        engine.fragments.load(data, None)
    assert leased(engine) == before
    assert engine.fragments.usage().slots == 150


def test_failed_export_gives_its_lease_back(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = prompts(engine, 50, 50, 50)
    before = leased(engine)

    def take_state(self: Context, lease: int) -> None:
        raise ForwardError("broken")

    monkeypatch.setattr(Context, "take_state", take_state)
    with pytest.raises(ForwardError, match="broken"):
        engine.fragments.export(fragments[2])
    assert leased(engine) == before


def test_fragment_that_cannot_be_copied_to_its_parent_stays(
    engine: LlamaCppEngine, plain: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree attaches the rest of a second computation of the same prompt to the first one."""
    store = engine.fragments
    prompt, _, double = prompts(engine, 50, 50, 50)
    store.free(double)
    double = store.new(None)
    path = [*ids_of(50, 0), 7, 8, 9]
    engine.forward([Row((), path, 0, double)])
    home, other = shards_of([prompt, double])
    assert home is not other
    store.free(store.split(double, 50))
    calls = iter([False, True])
    put_state = Context.put_state
    monkeypatch.setattr(
        Context, "put_state", lambda self, *args: next(calls) and put_state(self, *args)
    )
    before = leased(engine)
    with pytest.raises(KVFull):
        store.attach(double, prompt)
    assert leased(engine) == before
    assert shards_of([double]) == [other]
    store.attach(double, prompt)
    assert shards_of([double]) == [home]
    assert [shard.slots for shard in (home, other)] == [103, 0]
    output = engine.forward([Row((Span(prompt, 50),), [10], 53, double, (0,))])
    alone = plain.forward([Row((), [*path, 10], 0, None, (53,))]).logits(0)
    np.testing.assert_allclose(output.logits(0), alone, atol=ATOL)


# Engines with one context and with several --------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"reproducible": True, "dtype": "auto"}, {"kv_bytes": 1 << 24}]
)
def test_reproducible_engine_and_fixed_budget_have_one_context(options: dict[str, Any]) -> None:
    engine = load(**options)
    prompts(engine, *[50] * 6)
    assert len(engine._pool.shards) == 1
    engine.close()


def test_prompts_fill_a_context_before_another_is_created(engine: LlamaCppEngine) -> None:
    fragments = prompts(engine, *[20] * 40)
    assert len(engine._pool.shards) == pool_module.MAX_SHARDS
    assert shards_of(fragments)[:4] == [engine._pool.shards[0]] * 2 + [engine._pool.shards[1]] * 2
    n_slots = [shard.slots for shard in engine._pool.shards]
    assert max(n_slots) - min(n_slots) <= 20
    child = engine.fragments.new(fragments[0])
    engine.forward([Row((Span(fragments[0], 20),), [5], 20, child)])
    assert shards_of([child]) == [engine._pool.shards[0]]


def fork(
    engine: LlamaCppEngine, fragments: list[Fragment], n_tokens: int, *, first: int = 0
) -> list[Fragment]:
    """Start two children of each prompt in one step; return them. first: seed of prompt 0."""
    children = [engine.fragments.new(above) for above in fragments for _ in range(2)]
    rows = [
        Row((Span(fragments[i // 2], n_tokens),), [5 + i % 2], n_tokens, child, (0,))
        for i, child in enumerate(children)
    ]
    output = engine.forward(rows)
    for i in range(len(children)):
        path = [*ids_of(n_tokens, first + i // 2), 5 + i % 2]
        alone = engine.forward([Row((), path, 0, None, (n_tokens,))]).logits(0)
        np.testing.assert_allclose(output.logits(i), alone, atol=ATOL)
    return children


def one_context_of(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch, n: int, n_tokens: int
) -> list[Fragment]:
    """Compute prompts that all enter the first context."""
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "_MIN_SLOTS", n * n_tokens)
        return prompts(engine, *[n_tokens] * n)


def test_prompts_that_fork_move_to_contexts_of_their_own(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = one_context_of(engine, monkeypatch, 3, 30)
    (first,) = set(shards_of(fragments))
    children = fork(engine, fragments, 30)
    shards = shards_of(fragments)
    assert len(set(shards)) == 3
    assert shards[-1] is first
    assert shards_of(children) == [shard for shard in shards for _ in range(2)]
    assert [shard.slots for shard in shards] == [32] * 3
    assert [shard.n_leased for shard in shards] == [2] * 3


def test_prompts_with_branches_or_with_few_others_stay(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = one_context_of(engine, monkeypatch, 3, 30)
    home = shard_of(fragments[0])  # type: ignore[arg-type]
    early = engine.fragments.new(fragments[0])
    engine.forward([Row((Span(fragments[0], 10),), [5], 10, early)])
    fork(engine, fragments[:1], 30)
    assert shards_of(fragments) == [home] * 3, "the prompt has a branch already"
    for fragment in [early, *fragments[2:]]:
        engine.fragments.free(fragment)
    monkeypatch.setattr(transfer_module, "MIN_LEASES", 3)
    fork(engine, fragments[1:2], 30, first=1)
    assert shards_of(fragments[1:2]) == [home], "two rows are too few"


def test_prompt_that_cannot_be_copied_forks_where_it_is(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = one_context_of(engine, monkeypatch, 2, 30)
    monkeypatch.setattr(Context, "put_state", lambda *_: False)
    children = fork(engine, fragments, 30)
    assert len(set(shards_of(fragments + children))) == 1
    assert [shard.slots for shard in engine._pool.shards] == [64, 0]
    assert [shard.n_leased for shard in engine._pool.shards] == [4, 0]


def test_scores_and_hidden_states_over_several_contexts_equal_those_of_one(
    engine: LlamaCppEngine, plain: LlamaCppEngine
) -> None:
    fragments = prompts(engine, 50, 50, 50, 50, 50)
    assert len(set(shards_of(fragments))) == 3
    ids = [5, 6, 7, 8]
    spans = (ScoreSpan(0, (6, 7, 8), 2),)
    rows = [Row((Span(fragment, 50),), ids, 50, None, (3,), spans) for fragment in fragments]
    output = engine.forward(rows)
    states = engine.hidden_states(rows)
    for seed in range(5):
        path, span = [*ids_of(50, seed), *ids], (ScoreSpan(50, (6, 7, 8), 2),)
        row = Row((), path, 0, None, (53,), span)
        alone = plain.forward([row])
        np.testing.assert_allclose(output.logits(seed), alone.logits(0), atol=ATOL)
        ((score,), (want,)) = output.scores()[seed], alone.scores()[0]
        np.testing.assert_allclose(score.logprobs, want.logprobs, atol=ATOL)
        np.testing.assert_allclose(states[seed], plain.hidden_states([row])[0][50:], atol=ATOL)


# The sizes alone ------------------------------------------------------------------------------


class BareContext:
    """Cells without KV."""

    def __init__(self, n_cells: int, cell_count: CellCount, max_cells: int) -> None:
        self.n_cells, self.n_leases, self.max_leases = n_cells, 4, 256
        self.closed = False
        self.n_resizes = 0
        self._count, self._max = cell_count, max_cells
        self._add(n_cells)

    def _add(self, n: int) -> None:
        self._count.n += n
        assert self._count.n <= self._max

    def resize(self, n_cells: int) -> None:
        assert not self.closed
        self.n_resizes += n_cells != self.n_cells
        self._add(n_cells - self.n_cells)
        self.n_cells = n_cells

    def reserve(self, n_leases: int) -> None:
        self.n_leases = max(self.n_leases, n_leases)

    def remove(self, lease: int, start: int, end: int) -> None:
        pass

    def reuse_from(self, other: BareContext) -> None:
        pass

    def detach_reader(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._add(-self.n_cells)


@pytest.mark.parametrize("seed", range(20))
def test_any_kv_that_fits_gets_its_cells(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive law: reserving fails if and only if the rounded needs exceed the maximum."""
    rng, count, max_cells = random.Random(seed), CellCount(), 4352
    monkeypatch.setattr(pool_module, "MIN_LEASES", 1)
    monkeypatch.setattr(pool_module, "_MIN_SLOTS", 1)

    def create(n_cells: int) -> Any:
        return BareContext(n_cells, count, max_cells)

    pool = ContextPool(create(768), max_cells, create)
    outcomes = set()
    for _ in range(300):
        shard = pool.choose() if rng.random() < 0.3 else rng.choice(pool.shards)
        if shard.slots and rng.random() < 0.4:
            shard.slots = 0
            for lease in range(shard.n_leased):
                shard.give_back(lease)
            continue
        if not shard.n_leased:
            shard.take()
        n, spare = rng.choice([rng.randrange(1, 600), rng.randrange(1, 3000)]), rng.randrange(600)
        shard.slots += n
        others = [other.slots for other in pool.shards if other.n_leased and other is not shard]
        total = sum([-(-n // 256) * 256 for n in (shard.slots + spare // 2, *others)])
        need = Need(shard.slots + spare // 2, shard.slots + spare)
        if total > max_cells:
            with pytest.raises(KVFull) as raised:
                pool.reserve({shard: need})
            assert raised.value.needed == total - max_cells
            shard.slots -= n
            outcomes.add("full")
            continue
        pool.reserve({shard: need})
        outcomes.add("fits")
        assert shard.context.n_cells >= shard.slots + spare // 2
        assert all(each.slots <= each.context.n_cells for each in pool.shards)
        assert sum(each.context.n_cells for each in pool.shards) == count.n
    assert outcomes == {"full", "fits"}


def grow_until_full(pool: ContextPool, shards: list[Any], n: int) -> int:
    """Add `n` slots a step to each of these shards until KVFull; return the number of resizes."""
    before = sum(shard.context.n_resizes for shard in pool.shards)
    with suppress(KVFull):
        while True:
            for shard in shards:
                shard.slots += n
            pool.reserve({shard: Need(shard.slots, shard.slots) for shard in shards})
    return sum(shard.context.n_resizes for shard in pool.shards) - before


def test_shard_that_grows_by_the_spare_cells_of_others_is_resized_rarely() -> None:
    """Each resize copies the KV of a context."""
    count, max_cells = CellCount(), 1 << 15

    def context() -> Any:
        return BareContext(1024, count, max_cells)

    pool = ContextPool(context(), max_cells)
    pool.shards += [Shard(context()) for _ in range(3)]
    for shard in pool.shards:
        shard.take()
    assert grow_until_full(pool, pool.shards, 16) <= 4 * 3  # each doubles up to three times
    for shard in pool.shards:
        shard.slots = 1024
    first, *others = pool.shards
    n_halvings = 6  # of 7,168 spare cells, until none is left
    assert grow_until_full(pool, [first], 64) <= 2 * n_halvings * len(others)
    assert first.context.n_cells == max_cells - 1024 * len(others)
