"""The torch sampler beside the NumPy reference: same tokens, same figures, no waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drawing import (
    allowing,
    assert_draws_agree,
    everything,
    note_draws,
    random_logits,
    random_sampler,
    texts_of_many_rules,
)
from weft._core.sampling import rng as reference
from weft._core.sampling.params import PARAMETERS, SamplingParams
from weft._core.sampling.sampler import BROKEN, NOTHING, Chain, DrawBatch, Sampler
from weft.errors import ConfigError

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from families import N_VOCAB, build  # noqa: E402
from weft.engines.base import HostLogits, RetainedRow, Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.sampling import filters, noise  # noqa: E402
from weft.engines.torch.sampling.drawer import TorchSampler, draw  # noqa: E402
from weft.engines.torch.sampling.sampling_tensors import KNOWN_FILTERS, SamplingTensors  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
U64 = 2**64


@pytest.mark.parametrize(
    ("n_vocab", "rounds", "n"), [(150, 40, 24), (700, 20, 24), (4500, 8, 12), (9000, 4, 8)]
)
def test_draws_equal_the_reference(n_vocab: int, rounds: int, n: int) -> None:
    """Any parameters, mixed in one batch; ties within rounding are proved, and rare."""
    n_ties = 0
    for seed in range(rounds):
        random = np.random.default_rng((n_vocab, seed))
        samplers = [random_sampler(random, n_vocab) for _ in range(n)]
        logits = random_logits(random, n, n_vocab)
        logits[0] = [np.nan, -np.inf, logits[0, 0]][seed % 3]
        rows = random.permutation(n) if seed % 2 else np.arange(n)
        positions = random.integers(U64 // 2, size=n, dtype=np.uint64)
        batch = DrawBatch(rows, Chain(samplers), positions, kept=seed % 3 == 0)
        theirs = batch.on_host(logits)
        mine = TorchSampler(CPU).draw(torch.from_numpy(logits), batch).result()
        n_ties += assert_draws_agree(samplers, logits, rows, positions, mine, theirs)
    assert n_ties <= rounds * n / 50


def test_the_generators_are_the_references_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    edges = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, U64 - 1], dtype=np.uint64)
    drawn = random.integers(U64, size=(2, 500), dtype=np.uint64, endpoint=False)
    key = np.concatenate((np.repeat(edges, 8), drawn[0]))
    counter = np.concatenate((np.tile(edges, 8), drawn[1]))

    def there(values: np.ndarray) -> Any:
        return torch.from_numpy(values.view(np.int64))

    words = noise.philox(there(key), there(counter)).numpy()
    assert np.array_equal(words.T, reference.philox(key, counter).astype(np.int64))
    keys = noise.keys_of(there(key), there(counter)).numpy().view(np.uint64)
    assert np.array_equal(keys, reference.keys_of(key, counter))
    mixed = noise.splitmix(there(key), there(counter)).numpy().view(np.uint64)
    assert np.array_equal(mixed, reference.splitmix(key, counter))


def test_noise_is_the_references() -> None:
    """Whose a group's noise is to the bit; how much, to what two libraries' logarithms differ."""
    random = np.random.default_rng(1)
    keys = random.integers(U64, size=4, dtype=np.uint64, endpoint=False)
    want = reference.group_noise(keys, 300)
    got = noise.group_noise(torch.from_numpy(keys.view(np.int64)), 300)
    assert np.array_equal(got.member.numpy(), want.member)
    assert np.allclose(got.largest.numpy(), want.largest, rtol=1e-14)
    ids = random.integers(4 * 4096, size=(4, 700))
    lanes = np.repeat(np.arange(4), 700)
    heard = reference.token_noise(want, lanes, ids.ravel()).reshape(ids.shape)
    assert np.allclose(got.of(torch.from_numpy(ids)).numpy(), heard, rtol=1e-13)


def test_the_torch_sampler_knows_no_filter_that_there_is_not() -> None:
    assert {name for name, of in PARAMETERS.items() if of.is_filter} >= KNOWN_FILTERS


def test_a_filter_that_it_does_not_know_is_left_to_the_host() -> None:
    class Strange(Chain):
        @property
        def asked_filters(self) -> frozenset[str]:
            return frozenset(("top_k", "tail_free"))

    at = np.zeros(1, dtype=np.uint64)
    sampler = Sampler(SamplingParams(top_k=3), 1)
    assert not TorchSampler(CPU).can(DrawBatch(np.zeros(1, np.int64), Chain([sampler]), at))
    drawer = TorchSampler(torch.device("cuda"))
    assert drawer.can(DrawBatch(np.zeros(1, np.int64), Chain([sampler]), at))
    assert not drawer.can(DrawBatch(np.zeros(1, np.int64), Strange([sampler]), at))


EXACT = [
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 1, "temperature": 1e-300},
    {"top_p": 1e-12},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("options", EXACT)
def test_of_equals_the_lowest_id_is_kept(options: dict[str, Any]) -> None:
    logits = torch.zeros((1, 9000))
    logits[0, [4000, 4097, 8999]] = 5.0
    seen = set()
    for seed in range(20):
        batch = DrawBatch(
            np.zeros(1, np.int64),
            Chain([Sampler(SamplingParams(**options), seed)]),
            np.zeros(1, np.uint64),
        )
        seen.add(int(TorchSampler(CPU).draw(logits, batch).ids[0]))
    # min-p keeps all that is as likely, and the noise says which.
    assert seen == ({4000, 4097, 8999} if "min_p" in options else {4000})


def test_an_edge_among_equals_keeps_as_many_as_the_reference() -> None:
    """A row of few values: the edges of top-k and top-p lie in the middle of equals."""
    logits = np.repeat(np.array([[2.0, 1.0, 0.0]], dtype=np.float32), 1000, axis=1)
    logits = np.random.default_rng(0).permuted(logits, axis=1)
    for options in ({"top_k": 500}, {"top_k": 1700}, {"top_p": 0.3}, {"top_p": 0.77}):
        chain = Chain([Sampler(SamplingParams(**options), seed) for seed in range(300)])
        batch = DrawBatch(np.zeros(300, np.int64), chain, np.arange(300, dtype=np.uint64))
        got = TorchSampler(CPU).draw(torch.from_numpy(logits), batch).result()
        assert np.array_equal(got.ids, batch.on_host(logits).ids), options


def test_the_edge_of_top_p_is_where_the_sorted_row_reaches_it() -> None:
    """Against a sort in float64, on rows of many kinds; each mark of 40 rows."""
    random = np.random.default_rng(3)
    logits = random_logits(random, 40, 5000)
    share = random.choice([1e-6, 0.05, 0.5, 0.9, 0.999], 40)
    early = random.choice([0.5, 1.0, 3.0], 40)
    top = logits.max(axis=1)
    given = (torch.from_numpy(each) for each in (logits, top, early, share))
    marked = filters.nucleus(*given).numpy()
    for row in range(40):
        weights = np.exp((logits[row].astype(np.float64) - top[row]) / early[row])
        order = np.lexsort((np.arange(5000), -logits[row]))
        before = np.concatenate(([0], np.cumsum(weights[order])[:-1]))
        n = marked[row].sum()
        assert marked[row][order][:n].all(), "likelier tokens first, equals by id"
        assert before[n - 1] < share[row] * weights.sum() * (1 + 1e-5)
        assert n == 5000 or before[n] >= share[row] * weights.sum() * (1 - 1e-5)


def test_the_least_that_min_p_keeps_is_exact() -> None:
    random = np.random.default_rng(4)
    top = (random.standard_normal(3000) * 10).astype(np.float32)
    early = random.choice([0.3, 1.0, 2.0], 3000)
    min_p = random.choice([0.01, 0.2, 0.5, 1.0, 1e-9], 3000)
    found = filters.floors(*(torch.from_numpy(each) for each in (top, early, min_p))).numpy()
    for value, kept in ((found, True), (np.nextafter(found, np.float32(-np.inf)), False)):
        assert (((value.astype(np.float64) - top) / early >= np.log(min_p)) == kept).all()


def test_nothing_left_and_no_numbers_are_marked() -> None:
    logits = np.random.default_rng(5).standard_normal((8, 70)).astype(np.float32)
    logits[1], logits[2, 3], logits[3, 5], logits[6] = -np.inf, np.inf, np.nan, np.nan
    params = SamplingParams(temperature=0.7)
    samplers = [Sampler(params, i) for i in range(8)]
    samplers[4] = Sampler(params, 4, allowing([], 70))
    samplers[5] = Sampler(SamplingParams(logit_bias=dict.fromkeys(range(70), -np.inf)), 5)
    rows, at = np.arange(8), np.full(8, 9, dtype=np.uint64)
    batch = DrawBatch(rows, Chain(samplers), at)
    want = batch.on_host(logits)
    got = TorchSampler(CPU).draw(torch.from_numpy(logits), batch).result()
    assert want.ids[1:7].tolist() == [BROKEN] * 3 + [NOTHING] * 2 + [BROKEN]
    assert_draws_agree(samplers, logits, rows, at, got, want)
    assert np.array_equal(got.ids, want.ids)


def test_a_kept_chain_draws_as_its_reference_step_after_step() -> None:
    """Counts, masks and positions are written over; so are rows in another order."""
    random = np.random.default_rng(6)
    samplers = [random_sampler(random, 300) for _ in range(12)]
    chain, drawer = Chain(samplers), TorchSampler(CPU)
    position = 3
    for step in range(30):
        logits = random_logits(random, 14, 300)
        rows = random.permutation(14)[:12] if step % 5 == 0 else np.arange(12) + step % 3
        position += 1 if step % 7 else 5
        positions = np.full(12, position, dtype=np.uint64)
        batch = DrawBatch(rows, chain, positions)
        want = batch.on_host(logits)
        got = drawer.draw(torch.from_numpy(logits), batch).result()
        assert_draws_agree(samplers, logits, rows, positions, got, want)
        for sampler, token in zip(samplers, want.ids.tolist(), strict=True):
            sampler.count([max(token, 0)])


def test_rows_in_several_blocks_draw_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    samplers = [random_sampler(random, 500) for _ in range(11)]
    logits = torch.from_numpy(random_logits(random, 11, 500))
    batch = DrawBatch(random.permutation(11), Chain(samplers), np.arange(11, dtype=np.uint64))
    whole = TorchSampler(CPU).draw(logits, batch)
    monkeypatch.setattr("weft.engines.torch.sampling.drawer._BLOCK", 500 * 4)
    parts = TorchSampler(CPU).draw(logits, batch)
    assert torch.equal(whole.ids, parts.ids)
    assert np.array_equal(whole.result().logprobs, parts.result().logprobs)


def test_logits_of_the_engines_dtype_draw_as_their_float32() -> None:
    logits = torch.randn((6, 4200), generator=torch.Generator().manual_seed(0)).bfloat16()
    chain = Chain([Sampler(SamplingParams(top_p=0.9), i) for i in range(6)])
    batch = DrawBatch(np.arange(6), chain, np.zeros(6, dtype=np.uint64))
    got = TorchSampler(CPU).draw(logits, batch).result()
    assert np.array_equal(got.ids, batch.on_host(logits.float().numpy()).ids)


def test_ids_outside_the_vocabulary_are_errors() -> None:
    logits, at = torch.zeros((1, 6)), np.zeros(1, dtype=np.uint64)
    biased = Chain([Sampler(SamplingParams(logit_bias={6: 1.0}), 1)])
    with pytest.raises(ConfigError, match="token id 6 in logit_bias"):
        TorchSampler(CPU).draw(logits, DrawBatch(np.zeros(1, np.int64), biased, at))
    seen = Sampler(SamplingParams(presence_penalty=1.0), 1)
    seen.prime([9])
    with pytest.raises(ConfigError, match="token id 9"):
        TorchSampler(CPU).draw(logits, DrawBatch(np.zeros(1, np.int64), Chain([seen]), at))


def test_an_empty_chain_draws_nothing() -> None:
    batch = DrawBatch(np.zeros(0, np.int64), Chain([]), np.zeros(0, np.uint64))
    assert len(TorchSampler(CPU).draw(torch.zeros((1, 5)), batch).result().ids) == 0


# Operations of ATen whose shape or whose answer on the host depends on values.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "item",
    "unique",
    "masked_select",
    "is_nonzero",
    "equal",
)


class Watching(TorchDispatchMode):
    """Notes the operations that are run, and refuses those that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, name
        if name in ("index", "index_put", "index_put_"):
            given = [each for each in args[1] if each is not None]
            assert all(each.dtype != torch.bool for each in given), "a mask as an index"
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.ran.append(name)
        return out


@pytest.mark.parametrize("kept", [False, True])
def test_a_draw_asks_the_device_nothing(kept: bool) -> None:
    """On the meta device there are no values: whoever needs one fails. And launches are counted."""
    n_vocab = 9000
    samplers = everything(n_vocab)
    n = len(samplers)
    meta = torch.device("meta")
    seats = SamplingTensors.of(samplers, n_vocab, CPU)
    seats.place(np.zeros(n, dtype=np.uint64))
    seats.make_keys()
    seats.count(samplers)
    seats.allow(np.zeros((n, -(-n_vocab // 32)), dtype=np.int32))
    moved = on(seats, meta)
    with Watching() as watching, torch.inference_mode():
        ids, figures = draw(torch.empty((n, n_vocab), device=meta), moved, kept=kept)
    assert ids.shape == (n,)
    assert figures.shape == (3 if kept else 2, n)
    assert ids.dtype == torch.int64
    assert len(watching.ran) < 600  # all the ways at once
    seats = SamplingTensors.of([Sampler(SamplingParams(temperature=0.8), 1)] * 32, n_vocab, CPU)
    seats.place(np.zeros(32, dtype=np.uint64))
    seats.make_keys()
    plain = on(seats, meta)
    with Watching() as watching, torch.inference_mode():
        draw(torch.empty((32, n_vocab), device=meta), plain)
    assert len(watching.ran) < 250


def on(value: Any, device: Any) -> Any:
    """Seats with all their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: on(each, device) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(on(each, device) for each in value)
    names = getattr(value, "__dataclass_fields__", None)
    return (
        value if names is None else type(value)(**{n: on(getattr(value, n), device) for n in names})
    )


def test_a_steady_step_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []
    whole = torch.tensor

    def staged(values: Any, *args: Any, **options: Any) -> Any:
        moved.append(np.shape(values))
        return whole(values, *args, **options)

    chain = Chain([Sampler(SamplingParams(top_p=0.9), i) for i in range(4)])
    drawer, logits = TorchSampler(CPU), torch.randn((4, 100))
    monkeypatch.setattr(torch, "tensor", staged)
    for position in range(70):
        batch = DrawBatch(np.arange(4), chain, np.full(4, position, dtype=np.uint64))
        got = drawer.draw(logits, batch).result().ids
        assert np.array_equal(got, batch.on_host(logits.numpy()).ids)
        if position in (0, 64):  # keys are made so many steps ahead
            assert moved, "the first step must bring the parameters"
            moved.clear()
        assert not moved


def test_seats_go_with_their_chain() -> None:
    import gc
    import weakref

    chain = Chain([Sampler(SamplingParams(), 1)])
    drawer = TorchSampler(CPU)
    batch = DrawBatch(np.zeros(1, np.int64), chain, np.zeros(1, np.uint64))
    drawer.draw(torch.zeros((1, 10)), batch)
    gone = weakref.ref(chain)
    del chain, batch
    gc.collect()
    assert gone() is None


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> list[DrawBatch]:
    """Let the CPU draw as a device does; what it drew."""
    return note_draws(monkeypatch)


def test_an_engine_draws_from_steps_and_kept_rows_as_the_reference(
    on_the_device: list[DrawBatch],
) -> None:
    engine = TorchEngine.adopt(build("llama"))
    output = engine.forward([Row((), [5, 9, 40, 7], 0, None, (0, 1, 2, 3))])
    logits = np.stack([output.logits(i) for i in range(4)])
    random = np.random.default_rng(8)
    samplers = [random_sampler(random, N_VOCAB) for _ in range(6)]
    rows, at = np.array([0, 0, 1, 2, 3, 1]), np.arange(6, dtype=np.uint64)
    batch = DrawBatch(rows, Chain(samplers), at)
    want = batch.on_host(logits)
    assert_draws_agree(samplers, logits, rows, at, output.draw(batch).result(), want)
    kept = [RetainedRow(output.retain([0, 2]), 0), RetainedRow(output.retain([1]), 0)]
    kept += [RetainedRow(HostLogits([logits[2]]), 0), RetainedRow(output.retain([2, 3]), 1)]
    again = engine.draw(kept, batch).result()
    assert np.array_equal(again.ids, want.ids)
    assert len(on_the_device) == 2


def test_texts_of_a_device_that_draws_are_those_of_the_host(
    on_the_device: list[DrawBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = texts_of_many_rules()
    assert len(on_the_device) > 20
    monkeypatch.setattr("weft.engines.torch.sampling.drawer.DEVICES", frozenset())
    assert texts_of_many_rules() == there
