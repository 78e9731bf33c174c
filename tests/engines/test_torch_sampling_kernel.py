"""The draw in Triton compared with the NumPy reference: same tokens, same scores, two launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from cases import first_of  # noqa: E402
from compiled import compiled  # noqa: E402
from drawing import (  # noqa: E402
    allowing,
    assert_draws_agree,
    note_draws,
    random_logits,
    random_sampler,
    texts_of_many_rules,
)
from families import N_VOCAB, build  # noqa: E402
from weft._core.sampling.params import PARAMETERS, SamplingParams  # noqa: E402
from weft._core.sampling.sampler import BROKEN, NOTHING, BatchSampler, DrawBatch, Sampler  # noqa: E402
from weft.engines.base import RetainedRow, Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.paged import kernel  # noqa: E402
from weft.engines.torch.sampling import check  # noqa: E402
from weft.engines.torch.sampling import kernel as draw_kernel  # noqa: E402
from weft.engines.torch.sampling import sampler as sampler_module  # noqa: E402
from weft.engines.torch.sampling.check import sampling_difference  # noqa: E402
from weft.engines.torch.sampling.sampler import TorchSampler  # noqa: E402
from weft.engines.torch.sampling.sampling_tensors import KNOWN_FILTERS  # noqa: E402
from weft.errors import ConfigError  # noqa: E402

# The interpreter, or a card where there is one and TRITON_INTERPRET is not set.
if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    # What lies too far below the top for a float32 is at -inf, as it should be.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
# Scores of one tile that are this near may change places: they are computed in float32.
LEVEL = 1e-5


def there(logits: np.ndarray) -> Any:
    return torch.from_numpy(logits).to(DEVICE)


def drawer() -> TorchSampler:
    return TorchSampler(DEVICE, kernels=True)


@pytest.mark.parametrize(
    ("n_vocab", "rounds", "n"),
    first_of([(150, 12, 16), (4500, 4, 12), (700, 6, 16), (9000, 3, 8)], n=2),
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
        positions = random.integers(2**63, size=n, dtype=np.uint64)
        batch = DrawBatch(rows, BatchSampler(samplers), positions, kept=seed % 3 == 0)
        theirs = batch.on_host(logits)
        mine = drawer().draw(there(logits), batch).result()
        n_ties += assert_draws_agree(samplers, logits, rows, positions, mine, theirs, LEVEL)
    assert n_ties <= rounds * n / 50


def test_many_samplers_of_few_rows_draw_as_the_reference() -> None:
    """Plain rules over two rows, 200 draws; none may differ but by a proved tie."""
    random = np.random.default_rng(1)
    logits = random_logits(random, 2, 5000)
    samplers = [Sampler(SamplingParams(temperature=[1.0, 0.3][i % 2]), i) for i in range(200)]
    rows, at = random.integers(2, size=200), np.arange(200, dtype=np.uint64)
    batch = DrawBatch(rows, BatchSampler(samplers), at)
    mine, theirs = drawer().draw(there(logits), batch).result(), batch.on_host(logits)
    assert assert_draws_agree(samplers, logits, rows, at, mine, theirs, LEVEL) == 0


def test_logits_of_the_engines_dtype_draw_as_their_float32() -> None:
    logits = torch.randn((6, 4200), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        stored = logits.to(dtype)
        chain = BatchSampler([Sampler(SamplingParams(temperature=0.8), i) for i in range(6)])
        batch = DrawBatch(np.arange(6), chain, np.zeros(6, dtype=np.uint64), kept=True)
        mine, theirs = (
            drawer().draw(stored.to(DEVICE), batch).result(),
            batch.on_host(stored.float().numpy()),
        )
        assert_draws_agree(
            chain.samplers,
            stored.float().numpy(),
            np.arange(6),
            batch.positions,
            mine,
            theirs,
            LEVEL,
        )


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}]
)
def test_lowest_id_of_equals_is_kept(options: dict[str, Any]) -> None:
    logits = torch.zeros((1, 9000), device=DEVICE)
    logits[0, [4000, 4097, 8999]] = 5.0
    chain = BatchSampler([Sampler(SamplingParams(**options), seed) for seed in range(20)])
    batch = DrawBatch(np.zeros(20, np.int64), chain, np.zeros(20, np.uint64))
    recorded = set(drawer().draw(logits, batch).result().ids.tolist())
    # min-p keeps all that is as likely, and the noise says which.
    assert recorded == ({4000, 4097, 8999} if "min_p" in options else {4000})


def test_rows_without_tokens_or_numbers_are_marked() -> None:
    logits = np.random.default_rng(5).standard_normal((8, 4200)).astype(np.float32)
    logits[1], logits[2, 3], logits[3, 4150], logits[6] = -np.inf, np.inf, np.nan, np.nan
    params = SamplingParams(temperature=0.7)
    samplers = [Sampler(params, i) for i in range(8)]
    samplers[4] = Sampler(params, 4, allowing([], 4200))
    samplers[5] = Sampler(SamplingParams(logit_bias=dict.fromkeys(range(4200), -np.inf)), 5)
    rows, at = np.arange(8), np.full(8, 9, dtype=np.uint64)
    for some in (samplers, [*samplers[:5], Sampler(params, 5), *samplers[6:]]):
        batch = DrawBatch(rows, BatchSampler(some), at, kept=True)
        want, got = batch.on_host(logits), drawer().draw(there(logits), batch).result()
        assert want.ids[1:5].tolist() == [BROKEN] * 3 + [NOTHING]
        assert np.array_equal(got.ids, want.ids)
        assert_draws_agree(some, logits, rows, at, got, want, LEVEL)


def test_rows_in_several_blocks_draw_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    samplers = [random_sampler(random, 500) for _ in range(11)]
    logits = there(random_logits(random, 11, 500))
    batch = DrawBatch(
        random.permutation(11), BatchSampler(samplers), np.arange(11, dtype=np.uint64)
    )
    complete = drawer().draw(logits, batch)
    monkeypatch.setattr(sampler_module, "_BLOCK", 500 * 4)
    monkeypatch.setattr(sampler_module, "_TYPICAL_BLOCK", 500 * 4)
    parts = drawer().draw(logits, batch)
    assert torch.equal(complete.ids, parts.ids)
    assert np.array_equal(complete.result().logprobs, parts.result().logprobs)


def test_rows_with_typical_p_are_sampled_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typical sampling needs a hundred bytes a logit."""
    blocks: list[int] = []
    sample_block = TorchSampler._sample_block

    def noted(self: TorchSampler, logits: Any, tensors: Any, rows: Any, **named: Any) -> Any:
        blocks.append(len(tensors.streams))
        return sample_block(self, logits, tensors, rows, **named)

    monkeypatch.setattr(TorchSampler, "_sample_block", noted)
    monkeypatch.setattr(sampler_module, "_TYPICAL_BLOCK", 500 * 4)
    logits = there(random_logits(np.random.default_rng(7), 8, 500))
    for typical_p, want in ((1.0, [8]), (0.9, [4, 4])):
        blocks.clear()
        chain = BatchSampler([Sampler(SamplingParams(typical_p=typical_p), n) for n in range(8)])
        drawer().draw(logits, DrawBatch(np.arange(8), chain, np.zeros(8, dtype=np.uint64)))
        assert blocks == want


def test_transposed_logits_sample_the_same() -> None:
    logits = there(random_logits(np.random.default_rng(3), 5, 300))
    params = SamplingParams(top_k=20, top_p=0.9)
    batch = DrawBatch(
        np.arange(5), BatchSampler([Sampler(params, n) for n in range(5)]), np.arange(5)
    )
    turned = logits.t().contiguous().t()
    assert torch.equal(drawer().draw(turned, batch).ids, drawer().draw(logits, batch).ids)


def test_draw_without_rows_launches_nothing() -> None:
    batch = DrawBatch(np.zeros(0, np.int64), BatchSampler([]), np.zeros(0, np.uint64), kept=True)
    drawn = drawer().draw(torch.zeros((1, 5), device=DEVICE), batch).result()
    assert len(drawn.ids) == 0
    assert drawn.kept is not None


def test_plain_rules_read_logits_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature, greedy, filters and masks make nothing as large as the logits."""
    recorded: list[draw_kernel.SampleArgs] = []
    complete = draw_kernel.draw_tokens

    def noted(chances: draw_kernel.SampleArgs, **options: Any) -> Any:
        recorded.append(chances)
        return complete(chances, **options)

    monkeypatch.setattr(draw_kernel, "draw_tokens", noted)
    logits = torch.randn((3, 300), device=DEVICE)
    samplers = [
        Sampler(SamplingParams(temperature=0.8, top_p=0.9), 1),
        Sampler(SamplingParams(temperature=0), 2),
        Sampler(SamplingParams(top_k=5, min_p=0.1), 3, allowing([7, 9, 200], 300)),
    ]
    batch = DrawBatch(np.array([2, 0, 0]), BatchSampler(samplers), np.zeros(3, np.uint64))
    drawer().draw(logits, batch)
    (chances,) = recorded
    assert chances.raw is logits
    assert chances.left is None
    assert chances.allowed is not None
    assert chances.edges is not None


def test_kernels_that_cannot_be_compiled_fall_back_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine without a C compiler, which Triton asks for at its first launch."""

    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nSet CC")

    logits = np.random.default_rng(2).standard_normal((3, 200)).astype(np.float32)
    chain = BatchSampler([Sampler(SamplingParams(), i) for i in range(3)])
    batch = DrawBatch(np.arange(3), chain, np.zeros(3, np.uint64))
    want = batch.on_host(logits).ids
    drawer_without = drawer()
    with monkeypatch.context() as patch:
        patch.setattr(draw_kernel, "draw_tokens", fails)
        assert np.array_equal(drawer_without.draw(there(logits), batch).result().ids, want)
    assert not drawer_without.supports(batch)
    assert len(caplog.messages) == 1
    assert "Failed to find C compiler" in caplog.text
    drawer_with = drawer()
    drawer_with.draw(there(logits), batch)
    monkeypatch.setattr(draw_kernel, "draw_tokens", fails)
    with pytest.raises(RuntimeError):  # what has run is no question of the machine
        drawer_with.draw(there(logits), batch)


def test_out_of_memory_in_a_kernel_does_not_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_none(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    logits = np.random.default_rng(2).standard_normal((1, 200)).astype(np.float32)
    batch = DrawBatch(
        np.arange(1), BatchSampler([Sampler(SamplingParams(), 1)]), np.zeros(1, np.uint64)
    )
    kept = drawer()
    with monkeypatch.context() as patch:
        patch.setattr(draw_kernel, "draw_tokens", has_none)
        with pytest.raises(RuntimeError, match="out of memory"):
            kept.draw(there(logits), batch)
    assert kept.on_device


def test_load_check_passes_kernels_that_draw_as_the_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requested = drawer()
    assert sampling_difference(requested, 700, torch.bfloat16) == ""
    assert requested.on_device
    assert not caplog.messages


def _no_edge(logits: Any, rows: Any, *_: Any, **__: Any) -> Any:
    """Cutoffs of kernels that cut nothing."""
    threshold = torch.full(rows.shape, -torch.inf, device=rows.device)
    return draw_kernel.Cutoffs(threshold, torch.full_like(rows, logits.shape[1]))


def test_kernels_with_wrong_cutoffs_fall_back_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler_module, "is_for_triton", lambda _: True)
    monkeypatch.setattr(check, "_agreed", set())
    monkeypatch.setattr(draw_kernel, "find_cutoffs", _no_edge)
    engine = TorchEngine.adopt(build("llama").to(DEVICE))
    assert "tokens are sampled on the host" in caplog.text
    assert "with top_p" in caplog.text
    assert not engine._sampler.on_device


def test_kv_padded_samples_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "is_for_triton", lambda _: True)
    assert TorchEngine.adopt(build("llama").to(DEVICE))._sampler.on_device
    assert not TorchEngine.adopt(build("llama").to(DEVICE), kv="padded")._sampler.on_device


def test_batch_with_an_unknown_filter_is_not_supported() -> None:
    class Strange(BatchSampler):
        @property
        def active_filters(self) -> frozenset[str]:
            return frozenset(("top_k", "tail_free"))

    at, row = np.zeros(1, dtype=np.uint64), np.zeros(1, np.int64)
    sampler = Sampler(SamplingParams(top_k=3), 1)
    assert not TorchSampler(DEVICE, kernels=False).supports(
        DrawBatch(row, BatchSampler([sampler]), at)
    )
    assert drawer().supports(DrawBatch(row, BatchSampler([sampler]), at))
    assert not drawer().supports(DrawBatch(row, Strange([sampler]), at))


def test_known_filters_are_sampling_parameters() -> None:
    assert {name for name, of in PARAMETERS.items() if of.is_filter} >= KNOWN_FILTERS


def test_cutoff_among_equals_keeps_as_many_as_the_reference() -> None:
    """A row of few values: the edges of top-k and top-p lie in the middle of equals."""
    logits = np.repeat(np.array([[2.0, 1.0, 0.0]], dtype=np.float32), 1000, axis=1)
    logits = np.random.default_rng(0).permuted(logits, axis=1)
    for options in ({"top_k": 500}, {"top_k": 1700}, {"top_p": 0.3}, {"top_p": 0.77}):
        chain = BatchSampler([Sampler(SamplingParams(**options), seed) for seed in range(60)])
        batch = DrawBatch(np.zeros(60, np.int64), chain, np.arange(60, dtype=np.uint64))
        got = drawer().draw(there(logits), batch).result()
        assert np.array_equal(got.ids, batch.on_host(logits).ids), options


def test_cached_chain_samples_like_the_reference_over_many_steps() -> None:
    """Counts, masks and positions are written over; so are rows in another order."""
    random = np.random.default_rng(6)
    samplers = [random_sampler(random, 300) for _ in range(12)]
    chain, sampler_ = BatchSampler(samplers), drawer()
    position = 3
    for step in range(12):
        logits = random_logits(random, 14, 300)
        rows = random.permutation(14)[:12] if step % 5 == 0 else np.arange(12) + step % 3
        position += 1 if step % 7 else 5
        positions = np.full(12, position, dtype=np.uint64)
        batch = DrawBatch(rows, chain, positions)
        want = batch.on_host(logits)
        got = sampler_.draw(there(logits), batch).result()
        assert_draws_agree(samplers, logits, rows, positions, got, want, LEVEL)
        for sampler, token in zip(samplers, want.ids.tolist(), strict=True):
            sampler.add_generated([max(token, 0)])


def test_ids_outside_the_vocabulary_are_errors() -> None:
    logits, at = torch.zeros((1, 6), device=DEVICE), np.zeros(1, dtype=np.uint64)
    biased = BatchSampler([Sampler(SamplingParams(logit_bias={6: 1.0}), 1)])
    with pytest.raises(ConfigError, match="token id 6 in logit_bias"):
        drawer().draw(logits, DrawBatch(np.zeros(1, np.int64), biased, at))
    recorded = Sampler(SamplingParams(presence_penalty=1.0), 1)
    recorded.add_prompt([9])
    with pytest.raises(ConfigError, match="token id 9"):
        drawer().draw(logits, DrawBatch(np.zeros(1, np.int64), BatchSampler([recorded]), at))


def test_tensors_of_a_chain_are_freed_with_it() -> None:
    import gc
    import weakref

    chain = BatchSampler([Sampler(SamplingParams(), 1)])
    sampler_ = drawer()
    batch = DrawBatch(np.zeros(1, np.int64), chain, np.zeros(1, np.uint64))
    sampler_.draw(torch.zeros((1, 10), device=DEVICE), batch)
    gone = weakref.ref(chain)
    del chain, batch
    gc.collect()
    assert gone() is None


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> list[DrawBatch]:
    """Let engines sample with kernels; return the batches."""
    return note_draws(monkeypatch)


def test_engine_draws_from_steps_and_kept_rows_as_the_reference(
    on_the_device: list[DrawBatch],
) -> None:
    engine = TorchEngine.adopt(build("llama").to(DEVICE))
    output = engine.forward([Row((), [5, 9, 40, 7], 0, None, (0, 1, 2, 3))])
    logits = np.stack([output.logits(i) for i in range(4)])
    random = np.random.default_rng(8)
    samplers = [random_sampler(random, N_VOCAB) for _ in range(6)]
    rows, at = np.array([0, 0, 1, 2, 3, 1]), np.arange(6, dtype=np.uint64)
    batch = DrawBatch(rows, BatchSampler(samplers), at)
    want = batch.on_host(logits)
    assert_draws_agree(samplers, logits, rows, at, output.draw(batch).result(), want, LEVEL)
    kept = [RetainedRow(output.retain([i]), 0) for i in range(4)]
    assert np.array_equal(engine.draw(kept, batch).result().ids, want.ids)
    assert len(on_the_device) == 2


def test_texts_of_kernels_are_those_of_the_host(
    on_the_device: list[DrawBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = texts_of_many_rules()
    assert len(on_the_device) > 20
    monkeypatch.setattr(sampler_module, "is_for_triton", lambda _: False)
    assert texts_of_many_rules() == actual


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("has_all", [False, True])
def test_tiles_of_logits_compile_for_sm_90(dtype: str, *, has_all: bool) -> None:
    """Without a card: nothing spills, and two programs share a processor."""
    fixed = {"N_VOCAB": 128256, "N_TILES": 32, "num_warps": 8}
    fixed |= dict.fromkeys(("HAS_LEFT", "HAS_MASK", "HAS_EDGE", "HAS_KEPT"), has_all)
    created = compiled("sampling.kernel", "sample_tile_kernel", fixed, raw_ptr=dtype)
    assert created.stack == 0
    assert created.registers <= 128


@pytest.mark.slow
def test_look_at_a_row_compiles_for_sm_90() -> None:
    fixed = {"N_TILES": 38, "PAD": 64, "HAS_LEFT": True, "HAS_KEPT": True, "num_warps": 1}
    assert compiled("sampling.kernel", "reduce_row_kernel", fixed).stack == 0
