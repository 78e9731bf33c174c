"""Draws compared with the NumPy reference: samplers and rows of every kind, and tolerances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import weft
from core.sampling import naive
from shallow import shallow
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import BatchSampler, DrawBatch, DrawResult, Sampler
from weft.constraints.base import Matcher, n_words
from weft.constraints.grammar import Regex
from weft.constraints.kinds import AllowMatcher

U64 = 2**64
# Parameters as far from what they are as rounding may put an edge.
NUDGE = 1e-5


def allowing(ids: list[int], n_vocab: int) -> Matcher:
    """A constraint that allows some tokens, whatever came before."""
    bits = np.zeros(n_words(n_vocab) * 32, dtype=np.uint8)
    bits[ids] = 1
    return AllowMatcher(frozenset(ids), np.packbits(bits, bitorder="little").view(np.int32))


def random_params(random: np.random.Generator, n_vocab: int) -> SamplingParams:
    """Any combination: each parameter is left alone as often as not."""

    def maybe(options: list[Any], neutral: Any) -> Any:
        return options[random.integers(len(options))] if random.random() < 0.5 else neutral

    biased = random.choice(n_vocab, 5, replace=False).tolist()
    values = [3.0, -2.0, -math.inf, math.inf, 0.5]
    return SamplingParams(
        temperature=maybe([0, 0.3, 0.8, 1.7, 1e-300], 1.0),
        top_k=maybe([1, 2, 7, 40, 100, n_vocab, 10 * n_vocab], 0),
        top_p=maybe([1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-12], 1.0),
        min_p=maybe([1e-9, 0.01, 0.2, 1.0], 0.0),
        typical_p=maybe([0.1, 0.5, 0.95], 1.0),
        repetition_penalty=maybe([0.7, 1.3], 1.0),
        presence_penalty=maybe([-0.5, 1.0], 0.0),
        frequency_penalty=maybe([-0.3, 0.8], 0.0),
        penalty_last_n=maybe([3, 50], None),
        logit_bias=maybe([dict(zip(biased[:n], values, strict=False)) for n in (1, 3, 5)], None),
        temperature_first=bool(random.integers(2)),
    )


def random_logits(random: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    """Peaked, flat, rounded so that many are equal, and with holes."""
    logits = random.standard_normal((n, n_vocab)) * random.choice([0.1, 1, 3, 8], (n, 1))
    rounded = random.random((n, 1)) < 0.5
    logits = np.where(rounded, np.round(logits * 4) / 4, logits).astype(np.float32)
    holes = random.random((n, 1)) < 0.2
    return np.where(holes & (random.random((n, n_vocab)) < 0.3), -np.inf, logits).astype(np.float32)


def random_sampler(random: np.random.Generator, n_vocab: int) -> Sampler:
    matcher = None
    if random.random() < 0.25:
        matcher = allowing(random.choice(n_vocab, n_vocab // 3, replace=False).tolist(), n_vocab)
    stream = int(random.integers(U64, dtype=np.uint64))
    sampler = Sampler(random_params(random, n_vocab), stream, matcher)
    sampler.add_prompt(random.integers(n_vocab, size=random.integers(20)).tolist())
    sampler.add_generated(random.integers(n_vocab, size=random.integers(20)).tolist())
    return sampler


def nudged(sampler: Sampler) -> list[Sampler]:
    """The sampler with its filters' edges a rounding away, each way, alone and together."""
    p = sampler.params
    moved: dict[str, list[float]] = {
        name: [value for value in (was * (1 - NUDGE), was * (1 + NUDGE), was) if value <= 1]
        for name in ("top_p", "typical_p", "min_p")
        if (was := getattr(p, name)) not in (0.0, 1.0) or (name == "min_p" and was == 1.0)
    }
    variants = [p]
    for name, values in moved.items():
        variants = [
            replace_params(variant, name, value) for variant in variants for value in values
        ]
    out = []
    for variant in variants:
        twin = sampler.clone()
        twin.params = variant
        out.append(twin)
    return out


def replace_params(params: SamplingParams, name: str, value: float) -> SamplingParams:
    return SamplingParams.resolve({name: value}, params)


def scores_of(sampler: Sampler, logits: np.ndarray, position: int, ids: list[int]) -> list[float]:
    """Heights with noise, in float64: by the naive twin, for tokens that no filter dropped."""
    p = sampler.params
    x = logits.astype(np.float64).copy()
    for token, value in p.logit_bias:
        x[token] += min(value, 1e30)
    history = sampler.history
    if history is not None:
        for token, count in zip(history.ids.tolist(), history.counts.tolist(), strict=True):
            x[token] *= 1 / p.repetition_penalty if x[token] > 0 else p.repetition_penalty
            x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    heat = min(max(p.temperature, 1e-30), 1e30)
    heard = naive.noise(sampler.stream, position, ids)
    return [x[token] / heat + noise for token, noise in zip(ids, heard, strict=True)]


def is_near_tie(
    sampler: Sampler,
    logits: np.ndarray,
    position: int,
    mine: int,
    theirs: int,
    level: float = 1e-9,
) -> bool:
    """Prove that two draws differ by rounding alone.

    Either both tokens' scores are level, or the reference gives mine with an edge moved by NUDGE.
    """
    if sampler.params.temperature:
        a, b = scores_of(sampler, logits, position, [mine, theirs])
        if abs(a - b) < level * max(1, abs(a)):
            return True
    at = np.array([position], dtype=np.uint64)
    row = np.zeros(1, dtype=np.int64)
    return any(
        BatchSampler([each]).draw(logits[None], row, at).ids[0] == mine for each in nudged(sampler)
    )


def assert_draws_agree(
    samplers: list[Sampler],
    logits: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    mine: DrawResult,
    theirs: DrawResult,
    level: float = 1e-9,
) -> int:
    """Return how many near-ties there were. level: how near scores are that count as one."""
    n_ties = 0
    for lane, sampler in enumerate(samplers):
        if mine.ids[lane] != theirs.ids[lane]:
            n_ties += 1
            row, position = logits[rows[lane]], int(positions[lane])
            chosen = int(mine.ids[lane]), int(theirs.ids[lane])
            assert is_near_tie(sampler, row, position, *chosen, level), (
                lane,
                chosen,
                sampler.params,
            )
    same = (mine.ids == theirs.ids) & (theirs.ids >= 0)
    for name in ("logprobs", "entropies"):
        got, want = getattr(mine, name), getattr(theirs, name)
        assert got.dtype == np.float32
        assert np.allclose(got[same], want[same], rtol=1e-5, atol=1e-5), name
    assert (mine.legal_logmass is None) == (theirs.legal_logmass is None)
    if mine.legal_logmass is not None and theirs.legal_logmass is not None:
        got, want = mine.legal_logmass[same], theirs.legal_logmass[same]
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
    if theirs.kept is not None:
        assert mine.kept is not None
        assert np.allclose(mine.kept[same], theirs.kept[same], rtol=1e-4, atol=1e-4)
    return n_ties


def note_draws(monkeypatch: pytest.MonkeyPatch) -> list[DrawBatch]:
    """Let any device draw as a card does, unchecked, and note what is drawn."""
    from weft.engines.torch.sampling.sampler import TorchSampler

    drawn: list[DrawBatch] = []
    original = TorchSampler.draw

    def noted(self: TorchSampler, logits: Any, batch: DrawBatch) -> Any:
        drawn.append(batch)
        return original(self, logits, batch)

    monkeypatch.setattr("weft.engines.torch.sampling.sampler.is_for_triton", lambda _: True)
    monkeypatch.setattr("weft.engines.torch.base.sampling_difference", lambda *_: "")
    monkeypatch.setattr(TorchSampler, "draw", noted)
    return drawn


def texts_of_many_rules() -> list[str]:
    """Return texts of concurrent runs with many filters, penalties and a constraint."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.8, "n": 3},
        {"temperature": 0},
        {"top_p": 0.9, "repetition_penalty": 1.3, "n": 2},
        {"top_k": 20, "constraint": Regex("[a-z ]{4,12}")},
    ]
    with weft.load(str(shallow()), engine="torch") as lm, weft.Loom(lm, "The old") as loom:
        grown = [loom.grow(max_tokens=8, seed=3, **each) for each in options]
        return [node.text for nodes in grown for node in nodes]
