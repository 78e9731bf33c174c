from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.sampling import naive
from drawing import allowing
from weft._core.sampling.metrics import score
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import (
    BROKEN,
    NOTHING,
    BatchSampler,
    DrawBatch,
    DrawResult,
    Sampler,
    probabilities,
)
from weft.errors import ConfigError

RECIPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 1.5},
    {"min_p": 0.1, "temperature": 0.8},
    {"min_p": 0.1, "temperature": 0.8, "temperature_first": True},
    {"typical_p": 0.6},
    {"top_k": 40, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2},
    {"logit_bias": {3: 4.0, 5: -np.inf}},
    {"logit_bias": {3: 4.0}, "temperature": 0},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"frequency_penalty": 0.7, "top_p": 0.95},
    {"repetition_penalty": 1.7, "temperature": 0},
    {"top_n_sigma": 0.8},
    {"top_n_sigma": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    {"top_n_sigma": 2.0, "min_p": 0.1, "temperature_first": True, "temperature": 0.7},
    {"xtc_probability": 0.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.02, "temperature": 0.9},
    {"xtc_probability": 1.0, "top_k": 12, "temperature": 1.4, "temperature_first": True},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "temperature": 0.7},
    {"xtc_probability": 0.8, "xtc_threshold": 0.01, "temperature": 1.4, "temperature_first": True},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_base": 2.0},
    {"dry_multiplier": 9.0, "dry_allowed_length": 1, "temperature": 0},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_penalty_last_n": 3, "top_p": 0.9},
]


def logits_of(n: int, n_vocab: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((n, n_vocab)) * 3).astype(np.float32)
    logits.flags.writeable = False
    return logits


def sampler(index: int = 0, **options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), stream_of(7, (index,)))


def draw(
    samplers: list[Sampler],
    logits: np.ndarray,
    rows: list[int] | None = None,
    positions: list[int] | None = None,
) -> DrawResult:
    at = np.arange(len(samplers)) if rows is None else np.array(rows)
    where = np.arange(len(samplers)) if positions is None else np.array(positions)
    return BatchSampler(samplers).draw(logits, at, where.astype(np.uint64))


def mixed(n: int) -> list[Sampler]:
    samplers = [sampler(i, **RECIPES[i % len(RECIPES)]) for i in range(n)]
    for i, chain in enumerate(samplers):
        chain.add_prompt([i, 2, 2])
        chain.accept(3)
        chain.accept(i + 1)
        chain.accept(3)
    return samplers


@pytest.mark.parametrize(("n_vocab", "rounds"), [(150, 6), (700, 2), (4096, 1), (4160, 1)])
def test_draws_of_mixed_rows_equal_the_naive_twin(n_vocab: int, rounds: int) -> None:
    """Mixed rules in one batch, two rows of each."""
    n = 2 * len(RECIPES)
    for seed in range(rounds):
        samplers = mixed(n)
        logits = logits_of(n, n_vocab, seed)
        positions = np.arange(n) + seed
        got = draw(samplers, logits, positions=positions.tolist())
        for i, chain in enumerate(samplers):
            noise = naive.noise(chain.stream, i + seed, range(n_vocab))
            expected = naive.draw(
                logits[i].tolist(),
                chain.params,
                noise,
                [i, 2, 2],
                [3, i + 1, 3],
                naive.xtc_number(chain.stream, i + seed),
            )
            assert got.ids[i] == expected, (seed, i, chain.params)


@pytest.mark.parametrize("n_vocab", [3, 64, 65, 2048, 5000])
@pytest.mark.parametrize("alike", [True, False])
def test_row_draws_the_same_token_alone_and_in_a_batch(n_vocab: int, alike: bool) -> None:
    n_vocab = max(n_vocab, 3 if alike else 64)
    samplers = [sampler(i) for i in range(33)] if alike else mixed(33)
    logits = logits_of(33, n_vocab).copy()
    logits[4, 1::2] = -np.inf
    together = draw(samplers, logits)
    backwards = draw(samplers[::-1], logits, list(range(33))[::-1], list(range(33))[::-1])
    assert np.array_equal(together.ids, backwards.ids[::-1])
    for i, one in enumerate(samplers):
        alone = draw([one], logits[i : i + 1], positions=[i])
        for name in ("ids", "logprobs", "entropies"):
            assert getattr(alone, name)[0] == getattr(together, name)[i], name


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_samplers_on_one_row_draw_as_on_copies_of_it(recipe: dict[str, Any]) -> None:
    samplers = [sampler(i, **recipe) for i in range(12)]
    logits = logits_of(3, 200)
    rows = [0, 2, 2, 0, 2, 2, 2, 0, 0, 2, 0, 0]
    shared = draw(samplers, logits, rows)
    copied = draw(samplers, logits[rows])
    for name in ("ids", "logprobs", "entropies"):
        assert np.array_equal(getattr(shared, name), getattr(copied, name)), name


def test_rows_in_any_order_draw_the_same_tokens() -> None:
    samplers = mixed(5)
    logits = logits_of(8, 90)
    for rows in ([6, 0, 3, 7, 1], [2, 3, 4, 5, 6], [7, 6, 5, 4, 3]):
        assert np.array_equal(draw(samplers, logits, rows).ids, draw(samplers, logits[rows]).ids)


def test_scores_of_draws_are_raw_under_any_rules() -> None:
    samplers = mixed(28)
    logits = logits_of(28, 300)
    got = draw(samplers, logits)
    expected = score(logits, got.ids)
    assert np.array_equal(got.logprobs, expected.logprobs)
    assert np.array_equal(got.entropies, expected.entropies)
    assert got.ids.dtype == np.int64
    assert got.logprobs.dtype == got.entropies.dtype == np.float32


def test_reused_batch_sampler_draws_like_a_new_one_at_every_step() -> None:
    samplers = mixed(9)
    chain = BatchSampler(samplers)
    for step in range(40):
        logits = logits_of(9, 100, step)
        at = np.arange(9, dtype=np.uint64) + np.uint64(step)
        kept, fresh = (
            chain.draw(logits, np.arange(9), at),
            BatchSampler(samplers).draw(logits, np.arange(9), at),
        )
        assert np.array_equal(kept.ids, fresh.ids)
        for one, token in zip(samplers, kept.ids.tolist(), strict=True):
            one.accept(token)


def test_draws_follow_the_probabilities() -> None:
    """8000 draws over 8 tokens; chi-square over 40 at 7 degrees: odds 1 in 800,000."""
    logits = logits_of(1, 8)
    got = draw([sampler(i) for i in range(8000)], logits, [0] * 8000, [5] * 8000)
    expected = 8000 * np.array(naive.softmax(logits[0].tolist()))
    counts = np.bincount(got.ids, minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 40


FLAT: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.9, "min_p": 0.4},
    {"min_p": 0.2},
    {"min_p": 0.6, "temperature": 1.5, "temperature_first": True},
    {"top_k": 9},
]


def test_flat_rows_draw_as_the_naive_twin_and_report_the_kept_mass() -> None:
    """Wide filters cut by value; `kept` is compared with the ranked tokens."""
    samplers = [sampler(i, **FLAT[i % len(FLAT)]) for i in range(24)]
    for seed in range(2):
        logits = (logits_of(24, 5000, seed) * np.float32(0.1)).round(1)
        at = np.arange(24, dtype=np.uint64) + np.uint64(seed)
        got = BatchSampler(samplers).draw(logits, np.arange(24), at, kept=True)
        assert got.kept is not None
        for i, chain in enumerate(samplers):
            noise = naive.noise(chain.stream, i + seed, range(5000))
            expected = naive.draw(logits[i].tolist(), chain.params, noise)
            assert got.ids[i] == expected, (seed, i, chain.params)
            chance = probabilities(logits[i], chain.params)[expected]
            assert got.kept[i] == pytest.approx(np.log(chance), abs=1e-5)


def test_last_of_equals_within_a_cutoff_can_be_drawn_and_the_next_cannot() -> None:
    """The best of every group, and as many of the equal rest as it takes: all of them come."""
    logits = np.zeros((1, 5000), dtype=np.float32)
    logits[0, :64] = logits[0, 4096:4160] = 1.0
    samplers = [sampler(i, top_p=0.075) for i in range(3000)]
    drawn = set(draw(samplers, logits, [0] * 3000, [2] * 3000).ids.tolist())
    assert drawn == set(np.flatnonzero(probabilities(logits[0], samplers[0].params)).tolist())


def test_many_samplers_draw_within_the_cutoff_of_one_flat_row() -> None:
    logits = logits_of(2, 5000) * np.float32(0.1)
    for recipe in FLAT[:-1]:
        samplers = [sampler(i, **recipe) for i in range(12)]
        rows = [0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0]
        assert np.array_equal(draw(samplers, logits, rows).ids, draw(samplers, logits[rows]).ids), (
            recipe
        )


def test_draw_depends_on_position_and_on_stream() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    by_position = draw([sampler()] * 20, logits, [0] * 20, list(range(20))).ids
    by_stream = draw([sampler(i) for i in range(20)], logits, [0] * 20, [0] * 20).ids
    assert len(set(by_position.tolist())) > 15
    assert len(set(by_stream.tolist())) > 15
    repeated = draw([sampler()] * 20, logits, [0] * 20, [3] * 20).ids
    assert set(repeated.tolist()) == {by_position[3]}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1e-300}, {"top_k": 1}])
def test_greedy_draws_the_lowest_id_of_the_largest_logits(options: dict[str, Any]) -> None:
    logits = np.array([[1.0, 5.0, 5.0, 2.0]], dtype=np.float32)
    ids = draw([sampler(i, **options) for i in range(30)], logits, [0] * 30).ids
    # A tiny temperature still shares between equals.
    assert set(ids.tolist()) == ({1, 2} if options.get("temperature") == 1e-300 else {1})


def test_greedy_is_applied_after_bias_and_penalties() -> None:
    logits = np.array([[1.0, 5.0, 4.0, 2.0]], dtype=np.float32)
    assert draw([sampler(temperature=0, logit_bias={3: 3.5})], logits).ids.tolist() == [3]
    tired = sampler(temperature=0, repetition_penalty=2.0)
    tired.add_prompt([1])
    assert draw([tired], logits).ids.tolist() == [2]


def test_temperature_first_changes_the_input_of_the_filters() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1]], dtype=np.float32))
    options: dict[str, Any] = {"temperature": 3.0, "min_p": 0.3}
    last = draw([sampler(i, **options) for i in range(300)], logits, [0] * 300)
    first = draw(
        [sampler(i, **options, temperature_first=True) for i in range(300)], logits, [0] * 300
    )
    assert set(last.ids.tolist()) == {0}
    assert set(first.ids.tolist()) == {0, 1, 2}


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = logits_of(1, 6)
    banned = {i: -np.inf for i in range(5)}
    ids = draw([sampler(i, logit_bias=banned) for i in range(50)], logits, [0] * 50).ids
    assert set(ids.tolist()) == {5}
    for temperature in (0, 1):
        dead = sampler(1, logit_bias={**banned, 5: -np.inf}, temperature=temperature)
        got = draw([sampler(), dead, sampler(2)], logits, [0] * 3)
        assert got.ids[1] == NOTHING
        assert (got.ids[[0, 2]] == draw([sampler(), sampler(2)], logits, [0, 0], [0, 2]).ids).all()


@pytest.mark.parametrize("n_vocab", [65_536, 70_001, 70_100])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0}])
def test_bias_in_a_large_vocabulary_is_as_if_the_logits_were_so(
    n_vocab: int, options: dict[str, Any]
) -> None:
    """Only the groups of biased tokens are looked at again: tops banned, last ids pushed up."""
    logits = logits_of(8, n_vocab).copy()
    edited = logits.copy()
    samplers = []
    for row in range(8):
        top = int(logits[row].argmax())
        bias = {top: -np.inf, n_vocab - 1 - row: 14.0, (top + 64) % n_vocab: -2.0}
        bias = dict(list(bias.items())[: row % 4])  # so many
        edited[row, list(bias)] += np.array(list(bias.values()), np.float32)
        samplers.append(sampler(row, logit_bias=bias, **options))
    plain = [sampler(row, **options) for row in range(8)]
    for at in range(0, 40, 8):
        positions = list(range(at, at + 8))
        got = draw(samplers, logits, positions=positions)
        assert np.array_equal(got.ids, draw(plain, edited, positions=positions).ids)


def test_steering_is_added_to_the_bias_and_bans_what_either_bans() -> None:
    logits = logits_of(1, 6)
    biased = sampler(logit_bias={1: 3.0, 2: -np.inf, 4: np.inf}, temperature=0)
    steered = biased.with_biases({1: 2.0, 3: 1.5, 2: 9.0, 4: -np.inf})
    params = dict(steered.params.logit_bias)
    assert params == {1: 5.0, 2: -np.inf, 3: 1.5, 4: -np.inf}
    counting = sampler(presence_penalty=2.0)
    counting.accept(3)
    assert counting.with_biases({0: 1.0}).history is counting.history
    assert draw([biased], logits).ids.tolist() == [4]
    assert draw([steered], logits).ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0, 1, 1e-3])
def test_infinite_bias_forces_its_token(temperature: float) -> None:
    forced = sampler(logit_bias={4: np.inf}, temperature=temperature)
    assert draw([forced], logits_of(1, 6)).ids.tolist() == [4]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300},
        {"temperature": 1e300, "temperature_first": True, "top_p": 0.5},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300, "frequency_penalty": 1e300},
        {"frequency_penalty": -1e300},
        {"logit_bias": {1: 1e300, 2: -1e300}},
    ],
)
def test_extreme_parameters_still_draw_a_possible_token(options: dict[str, Any]) -> None:
    extreme = sampler(**options)
    extreme.add_prompt([0, 1])
    extreme.accept(1)
    extreme.accept(2)
    logits = np.array([[2.0, -3.0, 1.0, 0.5, -np.inf]], dtype=np.float32)
    (token,) = draw([extreme], logits).ids.tolist()
    assert token in range(4)
    alone = draw([sampler(**options)], logits).ids.tolist()
    assert alone[0] in range(4)


def test_ids_outside_the_vocabulary_and_broken_logits_raise() -> None:
    with pytest.raises(ConfigError, match="token id 6 in logit_bias"):
        draw([sampler(logit_bias={6: 1.0})], logits_of(1, 6))
    penalized = sampler(presence_penalty=1.0)
    penalized.add_prompt([9])
    with pytest.raises(ConfigError, match="token id 9"):
        draw([penalized], logits_of(1, 6))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_row_of_broken_logits_is_marked_and_the_other_rows_draw(bad: float) -> None:
    samplers, logits = [sampler(i) for i in range(3)], logits_of(3, 90).copy()
    want = draw(samplers, logits)
    logits[1] = bad if np.isneginf(bad) else logits[1]
    logits[1, 7] = bad
    got = draw(samplers, logits)
    assert got.ids[1] == BROKEN
    for name in ("ids", "logprobs", "entropies"):
        assert (getattr(got, name)[[0, 2]] == getattr(want, name)[[0, 2]]).all()


def test_sampler_counts_only_when_it_has_penalties() -> None:
    plain = sampler()
    assert not plain.needs_host
    plain.add_prompt([1])
    plain.accept(2)
    assert plain.history is None
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert sampler(**{name: 0.5}).needs_host
    assert sampler(temperature=0).greedy


def test_clone_counts_on_its_own() -> None:
    first = sampler(frequency_penalty=1.0)
    first.add_prompt(range(100))
    first.accept(5)
    second = first.clone()
    second.accept(5)
    second.accept(200)
    assert first.history is not None
    assert second.history is not None
    assert (len(first.history), len(second.history)) == (100, 101)
    assert first.history.counts[5] == 1
    assert second.history.counts[5] == 2
    assert second.stream == first.stream
    assert sampler().clone().history is None


def test_active_filters_of_a_batch_are_those_of_any_sampler_and_dry() -> None:
    plain = [sampler(temperature=0.7), sampler(repetition_penalty=1.2)]
    filtered = [sampler(top_p=0.9), sampler(top_p=0.8, min_p=0.1)]
    dry = sampler(dry_multiplier=1.0)
    assert BatchSampler(plain).active_filters == set()
    assert BatchSampler([*plain, *filtered]).active_filters == {"top_p", "min_p"}
    assert BatchSampler([*plain, dry]).active_filters == {"dry_multiplier"}


def test_mask_of_allowed_tokens_has_a_row_of_bits_for_each_sampler() -> None:
    params = SamplingParams()
    chains = [Sampler(params, stream_of(7, (0,)), allowing([3, 64], 70)), sampler(1)]
    batch = BatchSampler(chains)
    batch.prepare(70)
    mask = batch.allowed(70)
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :70]
    assert np.flatnonzero(bits[0]).tolist() == [3, 64]
    assert bits[1].all()
    assert BatchSampler([sampler(1)]).allowed(70) is None


def test_empty_batch_draws_nothing() -> None:
    batch = DrawBatch(np.zeros(0, dtype=np.int64), BatchSampler([]), np.zeros(0, dtype=np.uint64))
    got = batch.sampler.draw(logits_of(1, 4), batch.rows, batch.positions)
    assert len(got.ids) == len(got.logprobs) == len(got.entropies) == 0


def test_top_p_of_a_row_too_flat_for_float32_draws_as_without_top_p() -> None:
    random = np.random.default_rng(0)
    logits = (random.standard_normal((1, 9001)) * 1e-41).astype(np.float32)
    heat = {"temperature": 1e30, "temperature_first": True}
    rows, at = np.zeros(40, np.int64), np.zeros(40, np.uint64)
    cut = BatchSampler([Sampler(SamplingParams(top_p=1 - 1e-15, **heat), i) for i in range(40)])
    plain = BatchSampler([Sampler(SamplingParams(**heat), i) for i in range(40)])
    assert np.array_equal(cut.draw(logits, rows, at).ids, plain.draw(logits, rows, at).ids)


def test_top_p_that_equals_cannot_reach_keeps_what_min_p_keeps() -> None:
    """Nothing below the largest may count, so that all there is to look at is level."""
    logits = np.full((1, 4500), -0.1, np.float32)
    logits[0, :4000] = 0
    rows, at = np.zeros(40, np.int64), np.zeros(40, np.uint64)
    both = BatchSampler([Sampler(SamplingParams(top_p=0.999, min_p=1.0), i) for i in range(40)])
    alone = BatchSampler([Sampler(SamplingParams(min_p=1.0), i) for i in range(40)])
    assert np.array_equal(both.draw(logits, rows, at).ids, alone.draw(logits, rows, at).ids)


def test_legal_logmass_is_the_raw_mass_under_mask_and_bans() -> None:
    """Temperature, filters, penalties and finite biases do not change it."""
    logits = logits_of(4, 300)
    legal, banned = [3, 7, 8, 150, 299], 7
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3, "top_k": 2, "logit_bias": {8: 5.0}},
        {"temperature": 0, "presence_penalty": 2.0},
        {"logit_bias": {banned: -np.inf}},
    ]
    samplers = [
        Sampler(SamplingParams(**each), i, allowing(legal, 300)) for i, each in enumerate(rules)
    ]
    drawn = draw(samplers, logits)
    assert drawn.legal_logmass is not None
    for row, (values, rule) in enumerate(zip(logits.tolist(), rules, strict=True)):
        left = [each for each in legal if rule.get("logit_bias", {}).get(each) != -np.inf]
        mass = sum(naive.softmax(values)[each] for each in left)
        assert drawn.legal_logmass[row] == pytest.approx(np.log(mass), abs=1e-5)


def test_legal_logmass_far_below_the_peak_does_not_underflow() -> None:
    logits = np.zeros((1, 200), dtype=np.float32)
    logits[0, 5], logits[0, 9] = 1000.0, -2000.0
    drawn = draw([Sampler(SamplingParams(), 1, allowing([9], 200))], logits)
    assert drawn.legal_logmass is not None
    assert drawn.legal_logmass[0] == pytest.approx(-3000.0)


def test_legal_logmass_without_a_constraint_is_none_or_zero() -> None:
    logits = logits_of(2, 200)
    assert draw([sampler(0), sampler(1)], logits).legal_logmass is None
    both = draw([sampler(0), Sampler(SamplingParams(), 1, allowing([9], 200))], logits)
    assert both.legal_logmass is not None
    assert both.legal_logmass[0] == pytest.approx(0, abs=1e-5)
