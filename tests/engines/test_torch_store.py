"""The KV memory of the torch engine: whatever is done to fragments, paths give the same logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import build, plain_logits  # noqa: E402
from weft.engines import padded_pool  # noqa: E402
from weft.engines import shared_prefixes as prefixes  # noqa: E402
from weft.engines.base import Fragment, Row, Span  # noqa: E402
from weft.engines.padded_pool import SharedBlock, TailBuffer  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.padded import shared_prefixes  # noqa: E402
from weft.engines.torch.padded.kv import PaddedKVFragment  # noqa: E402
from weft.engines.torch.padded.step import PaddedStep, plan_step  # noqa: E402
from weft.errors import ConfigError, ContextOverflow, ForwardError, ModelMismatch  # noqa: E402

pytestmark = pytest.mark.torch
IDS = [(i * i * 5 + 11 * i + 3) % 117 + 3 for i in range(220)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("mistral")


@pytest.fixture
def engine(model: Any) -> TorchEngine:
    return TorchEngine.adopt(model)


def _grow(engine: TorchEngine, ids: list[int], chunk: int = 1000) -> Fragment:
    fragment = engine.fragments.new(None)
    for at in range(0, len(ids), chunk):
        engine.forward([Row((), ids[at : at + chunk], at, fragment)])
    return fragment


def _error(output: Any, index: int, model: Any, ids: list[int]) -> float:
    want = plain_logits(model, ids)[-1]
    return float((torch.from_numpy(output.logits(index)) - want).abs().max())


def _allocated(engine: TorchEngine) -> int:
    """Bytes of the distinct buffers behind all tensors of the store, without its counters."""
    memory = engine.fragments
    slots = [b.slots for b in memory._buffers.values()]
    slots += {id(f.home): f.home.slots for f in _ALL if isinstance(f.home, SharedBlock)}.values()
    own = [t.untyped_storage() for s in slots for t in (*s.keys, *s.values)]
    if memory.single_sequence is not None:
        own += [
            t.untyped_storage()
            for t in (*memory.single_sequence._keys, *memory.single_sequence._values)
        ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())


_ALL: list[Any] = []


class Twin:
    """The naive twin: token lists. A node is (fragment, its tokens, its parent's number)."""

    def __init__(self, engine: TorchEngine, model: Any, seed: int) -> None:
        self.engine, self.model, self.random = engine, model, random.Random(seed)
        self.nodes: dict[int, tuple[Fragment, list[int], int | None]] = {}
        self.n_added = 0

    def above(self, number: int | None) -> list[int]:
        chain = []
        while number is not None:
            chain.append(number)
            number = self.nodes[number][2]
        return chain[::-1]

    def path(self, number: int | None) -> tuple[Span, ...]:
        fragments = [self.nodes[i][0] for i in self.above(number)]
        return tuple(Span(f, f.length) for f in fragments)

    def tokens(self, number: int | None) -> list[int]:
        return [t for i in self.above(number) for t in self.nodes[i][1]]

    def leaves(self) -> list[int]:
        parents = {parent for _, _, parent in self.nodes.values()}
        return [i for i in self.nodes if i not in parents]

    def make(self, fragment: Fragment, tokens: list[int], parent: int | None) -> int:
        self.n_added += 1
        self.nodes[self.n_added] = (fragment, tokens, parent)
        _ALL.append(fragment)
        return self.n_added

    def extend(self) -> None:
        """Grow some leaves and hang new ones below any nodes, in one step; check all logits."""
        rows, paths, grown = [], [], []
        chosen = self.random.sample(self.leaves(), min(3, len(self.leaves())))
        still = [None, *(i for i in self.nodes if i not in chosen)]
        for number in chosen:
            fragment, tokens, parent = self.nodes[number]
            rows.append(self._row(self.path(parent), len(self.tokens(number)), fragment))
            grown.append((tokens, rows[-1]))
            paths.append([*self.tokens(number), *rows[-1].tokens])
        for _ in range(self.random.randrange(3)):
            above = self.random.choice(still)
            fragment = self.engine.fragments.new(None)
            rows.append(self._row(self.path(above), len(self.tokens(above)), fragment))
            paths.append([*self.tokens(above), *rows[-1].tokens])
            self.make(fragment, list(rows[-1].tokens), above)
        if not rows:
            return
        output = self.engine.forward(rows)
        for tokens, row in grown:
            tokens += row.tokens
        for index, ids in enumerate(paths):
            assert _error(output, index, self.model, ids) < 1e-4

    def _row(self, path: tuple[Span, ...], position: int, fragment: Fragment) -> Row:
        n = self.random.choice([1, 1, 1, 2, 5])
        tokens = [self.random.randrange(3, 120) for _ in range(n)]
        return Row(path, tokens, position, fragment, (n - 1,))

    def split(self) -> None:
        long = [i for i, (f, _, _) in self.nodes.items() if f.length > 1]
        if not long:
            return
        number = self.random.choice(long)
        fragment, tokens, parent = self.nodes[number]
        at = self.random.randrange(1, len(tokens))
        upper = self.make(self.engine.fragments.split(fragment, at), tokens[:at], parent)
        self.nodes[number] = (fragment, tokens[at:], upper)

    def join(self) -> None:
        parents = [parent for _, _, parent in self.nodes.values()]
        single = [
            i for i, (_, _, p) in self.nodes.items() if p is not None and parents.count(p) == 1
        ]
        if not single:
            return
        number = self.random.choice(single)
        fragment, tokens, parent = self.nodes[number]
        upper, upper_tokens, top = self.nodes.pop(parent)
        self.engine.fragments.join(upper, fragment)
        self.nodes[number] = (fragment, upper_tokens + tokens, top)

    def trim(self) -> None:
        if self.leaves():
            number = self.random.choice(self.leaves())
            fragment, tokens, parent = self.nodes[number]
            length = self.random.randrange(len(tokens) + 1)
            self.engine.fragments.trim(fragment, length)
            self.nodes[number] = (fragment, tokens[:length], parent)

    def settle(self) -> None:
        if self.nodes:
            self.engine.fragments.settle(self.nodes[self.random.choice(list(self.nodes))][0])

    def free(self) -> None:
        if self.leaves():
            fragment, _, _ = self.nodes.pop(self.random.choice(self.leaves()))
            self.engine.fragments.free(fragment)

    def move(self) -> None:
        if self.nodes:
            number = self.random.choice(list(self.nodes))
            fragment, tokens, parent = self.nodes[number]
            data = self.engine.fragments.export(fragment)
            self.engine.fragments.free(fragment)
            self.nodes[number] = (self.engine.fragments.load(data, None), tokens, parent)
            _ALL.append(self.nodes[number][0])

    def check(self) -> None:
        usage = self.engine.fragments.usage()
        assert usage.slots == sum(len(tokens) for _, tokens, _ in self.nodes.values())
        assert usage.bytes == _allocated(self.engine)
        assert all(f.length == len(tokens) for f, tokens, _ in self.nodes.values())


@pytest.mark.engines
@pytest.mark.parametrize(
    ("seed", "name"), list(enumerate(["mistral", "llama", "gemma2", "gpt_oss"]))
)
def test_random_operations_agree_with_token_lists(
    monkeypatch: pytest.MonkeyPatch, seed: int, name: str
) -> None:
    """Small widths, so that tails change banks, rows and homes all the time."""
    monkeypatch.setattr(padded_pool, "SMALLEST", 4)
    monkeypatch.setattr(padded_pool, "GROW_BY", 2)
    monkeypatch.setattr(padded_pool, "LONG", 7)
    _ALL.clear()
    model = build(name)
    engine = TorchEngine.adopt(model)
    twin = Twin(engine, model, seed)
    acts = [twin.split, twin.join, twin.trim, twin.settle, twin.free, twin.move]
    for _ in range(40):
        for _ in range(twin.random.randrange(1, 4)):
            twin.extend()
            twin.check()
        twin.random.choice(acts)()
        twin.check()
        if len(twin.nodes) > 12 or max((len(twin.tokens(i)) for i in twin.nodes), default=0) > 90:
            while twin.nodes:
                twin.free()
            assert engine.fragments.usage() == (0, 0)


def test_settled_fragments_hold_their_own_bytes_only(engine: TorchEngine) -> None:
    memory = engine.fragments
    base = _grow(engine, IDS[:100], chunk=30)
    path = (Span(base, 100),)
    tails = [memory.new(base) for _ in range(6)]
    for position in range(100, 140):
        rows = [Row(path, [position % 100 + 3], position, t) for t in tails]
        engine.forward(rows)
    for fragment in (base, *tails):
        memory.settle(fragment)
    live = sum(f.length for f in (base, *tails)) * engine.info.kv_bytes_per_token
    assert live <= memory.usage().bytes <= 1.10 * live
    upper = memory.split(base, 40)
    memory.free(base)
    live = (40 + sum(t.length for t in tails)) * engine.info.kv_bytes_per_token
    assert memory.usage().bytes <= 1.10 * live
    for fragment in (upper, *tails):
        memory.free(fragment)
    assert memory.usage() == (0, 0)


def test_slots_of_one_head_stay_contiguous(engine: TorchEngine) -> None:
    memory = engine.fragments

    def assert_in_pieces(fragment: Fragment, n: int) -> None:
        for kind in memory.views(fragment, n):
            for head in (head for layer in kind for head in layer[0]):
                assert head.shape[0] == n
                assert head.is_contiguous()

    read = _grow(engine, IDS[:100], chunk=30)
    grown = _grow(engine, IDS[:20], chunk=1)
    assert isinstance(grown.home, TailBuffer)
    assert_in_pieces(read, 100)
    assert_in_pieces(grown, 20)
    data = memory.export(read)
    assert all(array.flags.c_contiguous for name, array in data.items() if name != "dtype")
    assert_in_pieces(memory.load(data, None), 100)
    memory.settle(grown)
    assert_in_pieces(grown, 20)
    upper = memory.split(read, 40)
    assert_in_pieces(upper, 40)
    assert_in_pieces(read, 60)
    memory.join(upper, grown)
    assert_in_pieces(grown, 60)
    memory.trim(read, 5)
    memory.settle(read)
    assert_in_pieces(read, 5)


def test_split_and_join_copy_nothing(engine: TorchEngine) -> None:
    fragment = _grow(engine, IDS[:64])
    before = engine.fragments.usage()
    upper = engine.fragments.split(fragment, 20)
    assert engine.fragments.usage() == before
    engine.fragments.join(upper, fragment)
    assert engine.fragments.usage() == before
    assert (upper.length, fragment.length) == (0, 64)


def test_step_with_the_same_rows_reuses_its_plan(engine: TorchEngine, model: Any) -> None:
    base = _grow(engine, IDS[:10])
    path = (Span(base, 10),)
    rows = [Row(path, [20 + i], 10, engine.fragments.new(base), (0,)) for i in range(4)]
    plans: dict[int, Any] = {}
    for step in range(70):
        for i, row in enumerate(rows):
            row.tokens, row.position = [20 + i + step], 10 + step
        output = engine.forward(rows)
        plans[id(engine.fragments.plan)] = engine.fragments.plan  # kept: ids are not used again
    assert len(plans) == 3  # one a buffer: 32, 64 and 96 slots
    for i in range(4):
        assert _error(output, i, model, [*IDS[:10], *range(20 + i, 90 + i)]) < 1e-4


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "phi3"])
def test_batched_short_prefixes_equal_single_ones(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = TorchEngine.adopt(build(name))
    memory = engine.fragments

    def node(path: tuple[Span, ...], n: int) -> tuple[Span, ...]:
        fragment, start = memory.new(None), sum(s.length for s in path)
        engine.forward([Row(path, IDS[start + n : start + 2 * n], start, fragment)])
        return (*path, Span(fragment, n))

    root = node((), 70)
    children = [node(root, 3 + i) for i in range(4)]
    grandchildren = [node(path, 2 + i % 2) for i, path in enumerate([*children, children[0]])]
    paths = [*grandchildren, *grandchildren[:2], root, children[3]]
    rows = [
        Row(path, IDS[i : i + 1 + i % 3], sum(s.length for s in path), None, (0, i % 3))
        for i, path in enumerate(paths)
    ]
    logits = []
    for short in (0, prefixes.MAX_SHORT):
        monkeypatch.setattr(prefixes, "MAX_SHORT", short)
        monkeypatch.setattr(prefixes, "MAX_MERGED", short)
        kinds = {type(s) for s in plan_step(rows, memory).spans}
        assert kinds == (
            {shared_prefixes.PrefixGroup}
            if short == 0
            else {shared_prefixes.PrefixGroup, shared_prefixes.PrefixBatch}
        )
        output = engine.forward(rows)
        logits.append([torch.from_numpy(output.logits(i)) for i in range(2 * len(rows))])
    for alone, bundled in zip(*logits, strict=True):
        torch.testing.assert_close(bundled, alone, atol=1e-5, rtol=0)


def _chain(engine: TorchEngine, n: int, size: int = 4) -> tuple[Span, ...]:
    path: tuple[Span, ...] = ()
    for at in range(0, n * size, size):
        fragment = engine.fragments.new(None)
        engine.forward([Row(path, IDS[at : at + size], at, fragment)])
        engine.fragments.settle(fragment)
        path = (*path, Span(fragment, size))
    return path


def test_short_spans_one_below_the_other_are_one_part(engine: TorchEngine) -> None:
    """They are moved, not copied; and not again."""
    memory, path = engine.fragments, _chain(engine, 5)
    rows = [Row(path, [5], 20, memory.new(None), (0,)) for _ in range(3)]
    plan, before = plan_step(rows, memory), memory.usage()
    (part,) = plan.spans
    assert isinstance(part, shared_prefixes.PrefixGroup)
    assert (part.first, part.length) == (0, 20)
    assert memory.usage() == before
    (home,) = {id(span.fragment.home): span.fragment.home for span in path}.values()
    assert (
        part.keys[0].untyped_storage().data_ptr() == home.slots.keys[0].untyped_storage().data_ptr()
    )
    assert plan_step(rows, memory) is plan
    others = plan_step([Row(path, [5, 6], 20, None, (0,))], memory)
    assert len(others.spans) == 1
    assert path[0].fragment.home is home


def test_paths_that_are_read_in_turn_move_what_they_share_a_few_times_only(
    engine: TorchEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, n_moved, put = engine.fragments, 0, padded_pool.PaddedPool._move_to_new_block

    def counted(self: Any, fragments: Any) -> None:
        nonlocal n_moved
        n_moved += 1
        put(self, fragments)

    monkeypatch.setattr(padded_pool.PaddedPool, "_move_to_new_block", counted)
    monkeypatch.setattr(prefixes, "MAX_MOVES", 4)
    trunk = _chain(engine, 2, size=40)
    ends = []
    for at in (80, 120):
        fragment = memory.new(None)
        engine.forward([Row(trunk, IDS[at : at + 30], 80, fragment)])
        memory.settle(fragment)
        ends.append(((*trunk, Span(fragment, 30)), [*IDS[:80], *IDS[at : at + 30]]))
    for turn in range(12):
        for path, ids in ends:
            rows = [Row(path, [5 + turn + i], 110, None, (0,)) for i in range(2)]
            output = engine.forward(rows)
            for i in range(2):
                assert _error(output, i, model, [*ids, 5 + turn + i]) < 1e-4
        if turn == 8:
            before = n_moved
    assert 0 < n_moved <= 4 * prefixes.MAX_MOVES
    assert n_moved == before


def test_fragments_moved_together_can_be_cut_and_freed(engine: TorchEngine, model: Any) -> None:
    memory, path = engine.fragments, _chain(engine, 6)
    other = _grow(engine, IDS[24:29])
    slot = memory.layout.slot_bytes

    def read(path: tuple[Span, ...], ids: list[int]) -> float:
        return _error(engine.forward([Row(path, [5], len(ids), None, (0,))]), 0, model, [*ids, 5])

    assert read(path, IDS[:24]) < 1e-4
    upper = memory.split(path[2].fragment, 1)
    halves = (*path[:2], Span(upper, 1), Span(path[2].fragment, 3), *path[3:])
    assert read(halves, IDS[:24]) < 1e-4
    memory.join(path[3].fragment, path[4].fragment)
    joined = (*halves[:4], Span(path[4].fragment, 8), path[5])
    assert read(joined, IDS[:24]) < 1e-4
    memory.trim(path[5].fragment, 2)
    assert read((*joined[:5], Span(path[5].fragment, 2)), IDS[:22]) < 1e-4
    for end, n in ((5, 20), (4, 12), (3, 9)):  # from the lowest on
        memory.free(joined[end].fragment)
        assert memory.is_contiguous([span.fragment for span in joined[:end]])
        assert read(joined[:end], IDS[:n]) < 1e-4
        n_spare = (n + 5) // padded_pool.SPARE
        assert (n + 5) * slot <= memory.usage().bytes <= (n + 5 + n_spare) * slot
    for span in joined[:3]:
        memory.free(span.fragment)
    memory.free(other)
    assert memory.usage() == (0, 0)


def test_prefixes_that_share_spans_differently_agree(
    engine: TorchEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one token leave the path after its first node, rows of several after the second."""
    monkeypatch.setattr(prefixes, "MAX_SHORT", 0)  # no bundles
    monkeypatch.setattr(prefixes, "MAX_COPIED", 0)
    memory, path = engine.fragments, _chain(engine, 3)
    other = _grow(engine, IDS[20:30])
    rows = [
        Row(path[:1], [5], 4, memory.new(None), (0,)),
        Row(path, [5], 12, memory.new(None), (0,)),
        Row((Span(other, 10),), [5], 10, memory.new(None), (0,)),
        Row(path[:2], IDS[8:11], 8, None, (2,)),
    ]
    stretches = prefixes.find_shared_prefixes(
        plan_step(rows, memory).query_spans(rows, PaddedKVFragment, 6), memory
    )
    assert [len(stretch.spans) for stretch in stretches] == [1, 2, 1, 2]
    output = engine.forward(rows)
    for number, ids in enumerate(([*IDS[:4], 5], [*IDS[:12], 5], [*IDS[20:30], 5], IDS[:11])):
        assert _error(output, number, model, ids) < 1e-4


def test_contiguous_fragments_are_adjacent_and_ordered(engine: TorchEngine) -> None:
    memory = engine.fragments
    one, two, three, four = (_grow(engine, IDS[at : at + 4]) for at in range(0, 16, 4))
    assert not memory.is_contiguous([one, two])
    memory.make_contiguous([one, two, three])
    assert memory.is_contiguous([one, two, three])
    assert not memory.is_contiguous([one, three])
    assert not memory.is_contiguous([two, one])
    assert not memory.is_contiguous([three, four])
    before = memory.usage()
    memory.make_contiguous([four, two])  # the rest of the old block has no hole next to it
    assert memory.usage() == before
    assert memory.is_contiguous([one, three])


def test_long_tail_is_not_moved_to_its_path(
    engine: TorchEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows in its block, and next to its path there would be no room."""
    monkeypatch.setattr(padded_pool, "LONG", 16)
    memory, path = engine.fragments, _chain(engine, 2, 2)
    tail = memory.new(None)
    engine.forward([Row(path, IDS[4:44], 4, tail)])
    homes = set()
    for at in range(44, 50):
        rows = [Row(path, [IDS[at]], at, tail, (0,)), Row((), [5], 0, None, (0,))]
        output = engine.forward(rows)
        homes.add(id(tail.home))
        assert isinstance(tail.home, SharedBlock)
    assert len(homes) == 1
    assert _error(output, 0, model, IDS[:50]) < 1e-4


def test_tail_stays_in_its_buffer_during_steps_with_prefill_rows(
    engine: TorchEngine, model: Any
) -> None:
    """Its KV was written on the way; written once more it would be moved out."""
    trunk, tail = _grow(engine, IDS[:10]), engine.fragments.new(None)
    path = (Span(trunk, 10),)
    for at in range(10, 16):
        rows = [Row(path, IDS[at : at + 1], at, tail, (0,)), Row((), IDS[:7], 0)]
        output = engine.forward(rows)
        assert isinstance(tail.home, TailBuffer)
    assert _error(output, 0, model, IDS[:16]) < 1e-4


def test_long_fragment_grows_in_its_block(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr(padded_pool, "LONG", 20)
    fragment = _grow(engine, IDS[:30])
    for at in range(30, 50):
        output = engine.forward([Row((), IDS[at : at + 1], at, fragment, (0,))])
        assert isinstance(fragment.home, SharedBlock)
    assert _error(output, 0, model, IDS[:50]) < 1e-4


def test_failing_forward_leaves_every_length(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _grow(engine, IDS[:10])
    tails = [engine.fragments.new(base) for _ in range(2)]
    path = (Span(base, 10),)
    rows = [Row(path, [5], 10, tails[0], (0,)), Row(path, [5, 6], 10, tails[1], (1,))]
    calls = []

    run = PaddedStep.attend

    def fail(self: PaddedStep, layer: int, *rest: Any) -> Any:
        if layer < 2:
            return run(self, layer, *rest)
        calls.append(layer)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(PaddedStep, "attend", fail)
        with pytest.raises(ForwardError, match="out of luck"):
            engine.forward(rows)
    assert calls
    assert [f.length for f in (base, *tails)] == [10, 0, 0]
    assert engine.fragments.usage().slots == 10
    engine.forward(rows)
    assert [f.length for f in tails] == [1, 2]


def test_invalid_rows_raise_before_anything_changes(engine: TorchEngine) -> None:
    fragment = engine.fragments.new(None)
    with pytest.raises(ConfigError, match="0 to 119"):
        engine.forward([Row((), [3, 120], 0, fragment)])
    with pytest.raises(ContextOverflow, match="256") as error:
        engine.forward([Row((), [3] * 300, 0, fragment)])
    assert (error.value.n_tokens, error.value.n_ctx) == (300, 256)
    with pytest.raises(ConfigError, match="not a fragment"):
        engine.forward([Row((), [3], 0, Fragment())])
    with pytest.raises(ConfigError, match="before slot 9"):
        engine.fragments.split(_grow(engine, IDS[:5]), 9)
    with pytest.raises(ConfigError, match="to 6"):
        engine.fragments.trim(_grow(engine, IDS[:5]), 6)
    assert fragment.length == 0


def test_exported_kv_of_another_model_raises(engine: TorchEngine) -> None:
    data = engine.fragments.export(_grow(engine, IDS[:5]))
    other = TorchEngine.adopt(build("gpt2"))
    with pytest.raises(ModelMismatch):
        other.fragments.load(data, None)
    with pytest.raises(ModelMismatch):
        engine.fragments.load({}, None)
    half = TorchEngine.adopt(build("mistral", torch.bfloat16))
    with pytest.raises(ModelMismatch, match="bfloat16"):
        half.fragments.load(data, None)


def test_empty_fragment_survives_export(engine: TorchEngine) -> None:
    data = engine.fragments.export(engine.fragments.new(None))
    assert engine.fragments.load(data, None).length == 0


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture
def plain(llama: Any) -> TorchEngine:
    """An engine all of whose layers see every key."""
    return TorchEngine.adopt(llama)


@pytest.mark.engines
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_row_that_steps_alone_is_independent_of_other_steps(name: str, seed: int) -> None:
    """Its path is copied into one piece, which must follow trims, other steps and settling."""
    model = build(name)
    engine, rng = TorchEngine.adopt(model), random.Random(seed)
    store = engine.fragments
    base = _grow(engine, IDS[:10])
    path, ids = (Span(base, 10),), list(IDS[:10])
    tail, other = store.new(base), store.new(base)
    used = 0
    for _ in range(100):
        row = Row(path, [rng.randrange(40)], len(ids), tail, (0,))
        ids.append(row.tokens[0])
        rows = [row]
        if rng.random() < 0.1:
            rows.append(Row(path, [7], 10 + other.length, other))
        output = engine.forward(rows)
        used += store.single_sequence is not None
        assert _error(output, 0, model, ids) < 1e-4
        if rng.random() < 0.1:
            n = rng.randrange(tail.length + 1)
            store.trim(tail, n)
            del ids[10 + n :]
        if rng.random() < 0.05:
            store.settle(tail)
            assert store.single_sequence is None
        if rng.random() < 0.05:  # several tokens at once
            more = [rng.randrange(40) for _ in range(3)]
            engine.forward([Row(path, more, len(ids), tail)])
            ids += more
    assert used > 50
    assert store.usage().bytes >= engine.info.kv_bytes_per_token * store.usage().slots


def test_long_tail_that_steps_alone_is_contiguous(
    plain: TorchEngine, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_pool, "LONG", 100)
    engine, model = plain, llama
    ids = [i % 40 for i in range(180)]
    tail = _grow(engine, ids)
    pieces = set()
    for step in range(70):  # beyond the room of the first piece
        row = Row((), [step % 40], len(ids), tail, (0,))
        ids.append(step % 40)
        output = engine.forward([row])
        assert (engine.fragments.single_sequence is not None) == (step > 0)
        pieces.add(engine.fragments.single_sequence)
        assert _error(output, 0, model, ids) < 1e-4
    assert len(pieces) == 3  # none, and two


def test_forward_that_fails_leaves_the_one_piece_as_it_was(
    plain: TorchEngine, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = plain, llama
    ids = list(IDS[:10])
    tail = _grow(engine, ids)

    def step(token: int) -> Any:
        return engine.forward([Row((), [token], len(ids), tail, (0,))])

    for token in (5, 6, 7):
        step(token)
        ids.append(token)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_logits", lambda *given: 1 / 0)
        with pytest.raises(ForwardError):
            step(9)
    output = step(8)
    assert _error(output, 0, model, [*ids, 8]) < 1e-4


def test_joined_halves_are_freed_together() -> None:
    engine = TorchEngine.adopt(build("llama"))
    store = engine.fragments
    full = store.new(None)
    engine.forward([Row((), IDS[:9], 0, full)])
    store.settle(full)
    upper = store.split(full, 4)
    store.join(upper, full)
    assert full.length == 9
    store.free(upper)
    store.free(full)
    assert store.usage() == (0, 0)
