"""Particles: the evidence against exact enumeration, resampling, and what bad potentials do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

import weft
from cases import one_in
from weft import Heddle, Loom, samples, search
from weft.constraints import Allow, Choice, Regex
from weft.errors import ConfigError
from weft.search._smc import effective_size, log_mean_exp, resample

# Two tokens a path, two choices each: four paths, which can be listed.
TWO = {"max_tokens": 1, "stop": None, "depth": 2, "top_k": 2, "temperature": 1.0}


def potentials(nodes: list[Heddle]) -> list[float]:
    """Prefer some tokens: a number that depends on the full path."""
    return [sum(0.9 * (t % 3) for n in node.path[1:] for t in n.tokens) for node in nodes]


def exact(lm: weft.LM) -> tuple[float, dict[tuple[int, ...], float]]:
    """Return the mean of exp(potential) under the model cut to its top 2, and the posterior."""
    mass: dict[tuple[int, ...], float] = {}
    loom = Loom(lm, samples.opening, template=False)
    first = loom.next(top=2)
    for one in first:
        below = loom.add([one.id])
        second = below.next(top=2)
        for two in second:
            p = one.p / sum(c.p for c in first) * two.p / sum(c.p for c in second)
            leaf = below.add([two.id])
            mass[(one.id, two.id)] = p * math.exp(potentials([leaf])[0])
    total = sum(mass.values())
    return total, {path: each / total for path, each in mass.items()}


@pytest.mark.parametrize("ess", one_in(3, [0.5, 0.0, 1.0]))
def test_evidence_equals_exact_enumeration(lm: weft.LM, ess: float) -> None:
    """1,000 particles: the standard error is about 2 %; off by 8 % once in 10,000 runs or less."""
    expected, _ = exact(lm)
    loom = Loom(lm, samples.opening, template=False)
    result = search.smc(lm, loom, n=1000, ess=ess, potential=potentials, seed=5, **TWO)
    assert result.log_evidence == pytest.approx(math.log(expected), abs=0.08)


def test_resampled_particles_follow_the_posterior(lm: weft.LM, tmp_path: Path) -> None:
    """1,000 particles: each share within 0.08, five standard deviations."""
    _, posterior = exact(lm)
    loom, file = Loom(lm, samples.opening, template=False), tmp_path / "search.weft"
    search.smc(lm, loom, n=1000, ess=1.0, potential=potentials, seed=5, resume=file, **TWO)
    saved = Loom.open(file, lm)
    particles = saved.meta["search"]["state"]["at"]["2"]["particles"]
    assert {weight for _, weight in particles} == {0.0}
    paths = Counter(tuple(saved.find(each).get_prefix_tokens(1)) for each, _ in particles)
    assert set(paths) <= set(posterior)
    for path, share in posterior.items():
        assert paths[path] / 1000 == pytest.approx(share, abs=0.08)


def test_evidence_of_no_potential_is_one(lm: weft.LM) -> None:
    assert search.smc(lm, samples.sum, n=4, max_tokens=4, depth=2, seed=1).log_evidence == 0.0


def test_impossible_paths_are_not_continued(lm: weft.LM) -> None:
    def only_first(nodes: list[Heddle]) -> list[float]:
        lowest = min(node.path[1].tokens[0] for node in nodes)
        return [0.0 if n.path[1].tokens[0] == lowest else -math.inf for n in nodes]

    loom = Loom(lm, samples.opening, template=False)
    result = search.smc(lm, loom, n=40, ess=0.0, potential=only_first, seed=5, **TWO)
    assert len(loom.children) == 40
    lowest = min(node.tokens[0] for node in loom.children)
    continued = [node for node in loom.children if node.children]
    assert continued == [node for node in loom.children if node.tokens[0] == lowest]
    assert result.log_evidence == pytest.approx(math.log(len(continued) / 40))


def test_evidence_without_possible_paths_is_zero(lm: weft.LM) -> None:
    none = search.smc(
        lm, samples.sum, n=4, seed=1, max_tokens=4, potential=lambda nodes: [-math.inf] * len(nodes)
    )
    assert none.log_evidence == -math.inf
    assert none.text


@pytest.mark.parametrize("given", [math.inf, math.nan])
def test_potential_is_finite_or_the_log_of_0(given: float, lm: weft.LM) -> None:
    text = f"potential returned {given} for one node; .* one finite number per node, or -inf$"
    with pytest.raises(ConfigError, match=text):
        search.smc(lm, samples.sum, n=2, seed=1, max_tokens=4, potential=lambda node: given)


def test_systematic_resampling_gives_each_its_share_within_one() -> None:
    rng = Random(1)
    for _ in range(50):
        weights = [rng.random() ** 3 for _ in range(20)]
        counts = Counter(resample([math.log(weight) for weight in weights], rng))
        for index, weight in enumerate(weights):
            assert abs(counts[index] - 20 * weight / sum(weights)) < 1
        assert counts.total() == 20


def test_weights_far_below_zero_do_not_underflow() -> None:
    assert effective_size([-5000.0, -5000.0]) == pytest.approx(2)
    assert effective_size([0.0, -math.inf]) == pytest.approx(1)
    assert log_mean_exp([-5000.0, -5000.0]) == pytest.approx(-5000)
    assert log_mean_exp([-math.inf]) == -math.inf


def test_hopeless_particle_of_a_task_has_a_tiny_weight() -> None:
    lm = weft.load("tiny")
    result = search.smc(lm, samples.game24, n=16, seed=2, ess=0.0, depth=2, temperature=2.0)
    scores = [node.score for node in result.loom.walk() if node.score is not None]
    assert min(scores) == pytest.approx(math.log(1e-6))
    assert max(scores) > math.log(0.5)


# Constraints


@pytest.mark.programs
def test_constraint_weighs_particles_by_the_mass_that_it_leaves(lm: weft.LM) -> None:
    """Two texts of log p -46.65 and -1.79, each drawn about as often as the other."""
    result = search.smc(
        lm,
        "Tell me a story about a fox.",
        n=40,
        depth=1,
        seed=1,
        constraint=Regex("Once zqx|Near the"),
        potential=lambda nodes: [0.0] * len(nodes),
    )
    assert Counter(node.text for node in result.loom.children)["Once zqx"] > 10
    for node in result.loom.children:
        logq = math.fsum(node.logprobs) - math.fsum(node.legal_logmass)
        assert logq == pytest.approx(math.log(0.5), abs=0.1)  # the first token alone is free
    assert {each.text for each in result.particles if each.weight > 1e-12} == {"Near the"}
    assert math.fsum(each.weight for each in result.particles) == pytest.approx(1)
    assert result.text == "Near the"
    assert result.log_evidence == pytest.approx(-1.79, abs=0.35)  # two standard errors
    many = search.smc(
        lm,
        "Tell me a story about a fox.",
        n=1000,
        depth=1,
        seed=1,
        constraint=Regex("Once zqx|Near the"),
    )
    assert many.log_evidence == pytest.approx(-1.79, abs=0.15)


def test_particle_at_a_dead_end_of_its_constraint_has_weight_zero(lm: weft.LM) -> None:
    """A ban leaves "Once q" without a way to write its last character."""
    banned = {t: -math.inf for t in range(lm.info.n_vocab) if "q" in lm.token_to_text(t)}
    result = search.smc(
        lm,
        "Tell me a story about a fox.",
        n=200,
        depth=1,
        seed=1,
        constraint=Regex("Once q|Near the"),
        logit_bias=banned,
        ess=0.0,
        answer_tokens=0,
    )
    assert {each.text for each in result.particles if each.weight > 0} == {"Near the"}
    assert any(not each.text for each in result.particles)
    assert result.log_evidence == pytest.approx(-1.79, abs=0.3)


def paths_of_two(lm: weft.LM, loom: Loom, allowed: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Return p(path) * exp(potential) of all paths of two allowed tokens, by raw probabilities."""
    result: dict[tuple[int, ...], float] = {}
    for path in product(allowed, repeat=2):
        logp = math.fsum(loom.measure(list(path)).logprobs)
        result[path] = math.exp(logp + sum(0.9 * (each % 3) for each in path))
    return result


@pytest.mark.parametrize("ess", one_in(2, [1.0, 0.0]))
def test_constrained_particles_follow_the_enumerated_posterior(lm: weft.LM, ess: float) -> None:
    """Chi-square over 10 seeds of 500 particles, resampled after each token or never.

    80 degrees of freedom; the statistic of a right sampler reaches 160 once in 3 million runs. The
    locally normalised draws alone lie far above it. Each resampling adds to the variance of the
    weights before it, so that 500 particles count as 500 / 3.
    """
    loom = Loom(lm, samples.opening, template=False)
    allowed = [lm.tokenize(text, add_bos=False)[-1] for text in ("the she", ",", "the he")]
    mass = paths_of_two(lm, loom, allowed)
    evidence = math.fsum(mass.values())
    total, unweighted, estimates = 0.0, 0.0, list[float]()
    for seed in range(10):
        own = Loom(lm, samples.opening, template=False)
        result = search.smc(
            lm,
            own,
            n=500,
            ess=ess,
            potential=potentials,
            seed=seed,
            max_tokens=1,
            stop=None,
            depth=2,
            constraint=Allow(allowed),
            logit_bias=dict.fromkeys(lm.text.stop_ids, -math.inf),
            answer_tokens=0,
        )
        assert result.log_evidence is not None
        estimates.append(math.exp(result.log_evidence))
        squares = math.fsum(each.weight**2 for each in result.particles)
        n_effective = 500 / 3 if ess else 1 / squares
        shares, draws = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for particle in result.particles:
            path = tuple(particle.node.get_prefix_tokens(1))
            shares[path] += particle.weight
            draws[path] += 1 / 500
        for path, weight in mass.items():
            expected = weight / evidence
            total += n_effective * (shares[path] - expected) ** 2 / expected
            unweighted += n_effective * (draws[path] - expected) ** 2 / expected
    assert total < 160
    assert ess or unweighted > 1000
    assert math.fsum(estimates) / 10 == pytest.approx(evidence, rel=0.1)


def test_choice_is_drawn_by_its_exact_probabilities(lm: weft.LM) -> None:
    """The twin: each text measured by itself."""
    loom = Loom(lm, "Tell me a story about a fox.")
    texts = ["Once upon", "Near the", "Lena", "A fox", "zqx"]
    logprobs = {text: math.fsum(loom.measure(text).logprobs) for text in texts}
    evidence = math.log(math.fsum(map(math.exp, logprobs.values())))
    result = search.smc(lm, loom, n=64, seed=3, constraint=Choice(texts))
    assert result.log_evidence == pytest.approx(evidence, abs=1e-4)
    draws = Counter(node.text for node in loom.children)
    for text in texts:
        assert abs(draws[text] - 64 * math.exp(logprobs[text] - evidence)) < 1
    assert result.text == max(texts, key=lambda text: logprobs[text])
    assert len(result.particles) == 64
    node = result.best
    assert (node.terminal, node.finish_reason, node.parsed) == (True, "stop", node.text)
    assert node.logprobs == pytest.approx(list(loom.measure(node.text).logprobs), abs=1e-4)


def test_exact_draws_of_a_choice_take_a_potential_and_their_file(
    lm: weft.LM, tmp_path: Path
) -> None:
    """Two texts of log p -46.65 and -1.79."""
    prompt, texts = "Tell me a story about a fox.", ["Once zqx", "Near the"]
    options = {"n": 40, "depth": 1, "seed": 1, "constraint": Choice(texts)}
    result = search.smc(lm, prompt, resume=tmp_path / "a.loom.json", **options)
    assert {each.text for each in result.particles} == {"Near the"}
    assert result.log_evidence == pytest.approx(-1.79, abs=0.01)
    second = search.smc(lm, prompt, resume=tmp_path / "a.loom.json", **options)
    assert second.log_evidence == result.log_evidence
    halved = search.smc(lm, prompt, potential=lambda node: math.log(0.5), **options)
    assert halved.log_evidence == pytest.approx(-1.79 + math.log(0.5), abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": Choice(["Once", "Once upon"])},
        {"constraint": Choice(["Once", "Near"]), "temperature": 0.5},
        {"constraint": Choice(["Once", "Near"]), "top_k": 5},
        {"constraint": Choice(["Once upon a time", "Near"]), "max_tokens": 1},
        {"constraint": Choice(["Once\nupon", "Near"])},
    ],
)
def test_choice_that_is_not_drawn_exactly_is_drawn_by_token(
    lm: weft.LM, options: dict[str, Any]
) -> None:
    result = search.smc(lm, "Tell me a story about a fox.", n=4, depth=1, seed=1, **options)
    assert all(node.legal_logmass for node in result.loom.children)
    assert not any("legal_logmass" in node.meta for node in result.loom.children)
