"""PyTorch's passes over rows of logits compared with NumPy's, and full draws by either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BROKEN, BatchSampler, DrawBatch, Reductions, Sampler

torch = pytest.importorskip("torch")

from weft.engines.torch.sampling.cpu_reductions import TorchReductions  # noqa: E402
from weft.engines.torch.sampling.sampler import TorchSampler  # noqa: E402

pytestmark = pytest.mark.torch
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 30, "temperature": 0.8},
    {"min_p": 0.2},
    {"logit_bias": {3: 2.0}, "top_p": 0.5},
    {"typical_p": 0.8},
    {"top_n_sigma": 1.5},
    {"xtc_probability": 0.7, "min_p": 0.01},
    {"xtc_probability": 0.7, "xtc_threshold": 0.01},
]


def logits_of(n: int, n_vocab: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((n, n_vocab)) * random.choice([0.1, 2, 6], (n, 1))
    logits[0, ::3] = -np.inf
    return logits.astype(np.float32)


@pytest.fixture(params=[1, 2, 3])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("n_threads")
@pytest.mark.parametrize("n_vocab", [70, 4096, 4097, 9000, 70_000])
def test_passes_equal_numpys(n_vocab: int) -> None:
    logits = logits_of(9, n_vocab)
    mine, theirs = TorchReductions(), Reductions()
    peaks = mine.group_peaks(logits)
    assert np.array_equal(peaks, theirs.group_peaks(logits))
    top = peaks.max(axis=1)
    for got, want in zip(mine.moments(logits, top), theirs.moments(logits, top), strict=True):
        assert got.dtype == np.float32
        assert np.allclose(got, want, rtol=2e-6, atol=2e-6)
    heat = np.linspace(0.2, 3, 9)
    got, want = mine.mass(logits, top, heat), theirs.mass(logits, top, heat)
    assert got.dtype == np.float64
    assert np.allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize("reductions", [TorchReductions(), Reductions()], ids=["torch", "numpy"])
@pytest.mark.parametrize("n_vocab", [2048, 70_000])
def test_row_gives_the_same_bits_in_any_company(
    reductions: Reductions, n_vocab: int, n_threads: int
) -> None:
    """Alone, too, but where threads would share the row: it is NumPy's then."""
    logits = logits_of(20, n_vocab)
    top, heat = logits.max(axis=1), np.linspace(0.5, 2, 20)

    def values(rows: slice) -> tuple[np.ndarray, ...]:
        actual = reductions.moments(logits[rows], top[rows])
        return (*actual, reductions.mass(logits[rows], top[rows], heat[rows]))

    together = values(slice(None))
    n_alone = 2 if isinstance(reductions, TorchReductions) and n_threads > 1 else 1
    for row in range(21 - n_alone):
        for complete, single in zip(together, values(slice(row, row + n_alone)), strict=True):
            assert complete[row] == single[0]
    for complete, half in zip(together, values(slice(3, 12)), strict=True):
        assert np.array_equal(complete[3:12], half)


def test_read_only_logits_are_reduced() -> None:
    logits = logits_of(3, 5000)
    logits.flags.writeable = False
    mine, theirs = TorchReductions(), Reductions()
    peaks = mine.group_peaks(logits)
    assert np.array_equal(peaks, theirs.group_peaks(logits))
    top, heat = peaks.max(axis=1), np.ones(3)
    assert np.array_equal(mine.moments(logits, top).total, theirs.moments(logits, top).total)
    assert np.array_equal(mine.mass(logits, top, heat), theirs.mass(logits, top, heat))


@pytest.mark.parametrize("kept", [False, True])
def test_draws_by_either_are_the_same(kept: bool) -> None:
    n = 3 * len(OPTIONS)
    samplers = [
        Sampler(SamplingParams(**OPTIONS[i % len(OPTIONS)]), stream_of(1, (i,))) for i in range(n)
    ]
    for seed in range(5):
        logits = logits_of(n, 9000, seed)
        logits[4, 77] = np.nan
        at = np.full(n, seed, dtype=np.uint64)
        batch = DrawBatch(np.arange(n), BatchSampler(samplers), at, kept=kept)
        mine, theirs = batch.on_host(logits, TorchReductions()), batch.on_host(logits)
        assert np.array_equal(mine.ids, theirs.ids)
        assert mine.ids[4] == BROKEN
        for name in ("logprobs", "entropies", "kept")[: 3 if kept else 2]:
            assert np.allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "on_device"),
    [
        ({"top_k": 3, "typical_p": 0.9, "presence_penalty": 1.0}, True),
        ({"top_n_sigma": 1.0}, False),
        ({"xtc_probability": 0.1}, False),
        ({"dry_multiplier": 0.8}, False),
    ],
    ids=str,
)
def test_a_row_with_a_rule_that_kernels_lack_is_drawn_on_the_host(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any], on_device: bool
) -> None:
    monkeypatch.setattr(TorchSampler, "on_device", True)
    samplers = [Sampler(SamplingParams(**options), 1) for options in ({}, rule)]
    batch = DrawBatch(np.arange(2), BatchSampler(samplers), np.zeros(2, np.uint64))
    assert TorchSampler(torch.device("cpu"), kernels=False).supports(batch) == on_device
