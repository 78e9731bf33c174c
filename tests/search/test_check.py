"""Checks of prefixes: rejection sampling is exact, and particles follow the posterior."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weft
from weft import Loom, samples, search
from weft.constraints import Regex
from weft.errors import ConfigError
from weft.search.rejection import draw_allowed, likeliest_allowed

PROMPT = "Tell me a story about a fox."
TWO_TOKENS = {"depth": 1, "stop": None, "max_tokens": 2, "ess": 0.0, "answer_tokens": 0}


def allows(text: str, ended: bool) -> bool:
    """Allow texts that begin with "N" or "On" and have no "y"; the first draw is often rejected."""
    return not ended and ("On".startswith(text) or text.startswith(("On", "N"))) and "y" not in text


@pytest.mark.parametrize("allowed", [{1, 4}, {4}, {0, 1, 2, 3, 4}])
def test_estimates_of_the_allowed_mass_are_unbiased_for_each_token(allowed: set[int]) -> None:
    """10,000 draws: each mean is within 5 standard errors, wrongly once in 1.7 million."""
    probs, rng = np.array([0.5, 0.2, 0.2, 0.07, 0.03]), np.random.default_rng(1)
    sums, squares, drawn = defaultdict[int, float](float), Counter[int](), Counter[int]()
    for _ in range(10_000):
        token, log_mass = draw_allowed(probs, allowed.__contains__, rng)
        assert token in allowed
        sums[token] += math.exp(log_mass)
        squares[token] += math.exp(2 * log_mass)
        drawn[token] += 1
    for token in allowed:
        mean = sums[token] / 10_000
        error = math.sqrt((squares[token] / 10_000 - mean**2) / 10_000)
        assert abs(mean - probs[token]) < 5 * error + 1e-12
        share = probs[token] / sum(probs[each] for each in allowed)
        assert abs(drawn[token] / 10_000 - share) < 5 * math.sqrt(share / 10_000)


def test_draw_checks_no_token_twice_and_none_without_probability() -> None:
    probs, checked_ids = np.array([0.0, 0.9, 0.1, 0.0]), list[int]()

    def rejects(token: int) -> bool:
        checked_ids.append(token)
        return False

    assert draw_allowed(probs, rejects, np.random.default_rng(1)) == (None, -math.inf)
    assert sorted(checked_ids) == [1, 2]


def test_draw_from_more_tokens_than_the_first_part_finds_the_only_allowed_one() -> None:
    probs = np.full(1000, 1e-3)
    token, log_mass = draw_allowed(probs, lambda token: token == 777, np.random.default_rng(1))
    assert token == 777
    assert log_mass < math.log(0.1)
    assert likeliest_allowed(probs, lambda token: token == 777).token == 777


def paths_of_two(lm: weft.LM, accepts: Callable[[str], bool]) -> dict[tuple[int, ...], float]:
    """Return the probability of each path of two tokens whose prefixes are accepted."""
    rows, prompt, result = weft.AsyncLM(lm), Loom(lm, PROMPT).tokens, dict[tuple[int, ...], float]()
    tokens = [each for each in range(lm.info.n_vocab) if each not in lm.text.stop_ids]
    first = rows.next_token_logprobs_sync(prompt)
    for one in (each for each in tokens if accepts(lm.text.decode([each]))):
        second = rows.next_token_logprobs_sync([*prompt, one])
        for two in (each for each in tokens if accepts(lm.text.decode([one, each]))):
            result[one, two] = math.exp(first[one] + second[two])
    return result


@pytest.mark.parametrize("mask", [None, Regex("(Once|Near|No)[a-z ]*")])
def test_checked_particles_follow_the_enumerated_posterior(lm: weft.LM, mask: Regex | None) -> None:
    """Chi-square over 10 seeds of 200 particles, which count as 1 / the sum of squared weights.

    Paths are grouped by the second token's first character, and rare groups are one: 30 degrees of
    freedom. A right sampler reaches 80 about once in 500,000 runs.
    """
    matches = re.compile(r"(Once|Near|No)[a-z ]*").fullmatch
    prefixes = {word[:n] for word in ("Once", "Near", "No") for n in range(1, len(word) + 1)}
    mass = paths_of_two(
        lm,
        lambda text: (
            allows(text, False) and (mask is None or text in prefixes or matches(text) is not None)
        ),
    )
    evidence, shares = math.fsum(mass.values()), Counter[str]()
    for (one, two), p in mass.items():
        shares[lm.text.decode([one]) + lm.text.decode([two])[:1]] += p / evidence
    total, estimates = 0.0, list[float]()
    for seed in range(10):
        options = TWO_TOKENS if mask is None else {**TWO_TOKENS, "constraint": mask}
        result = search.smc(lm, PROMPT, n=200, seed=seed, prefix_check=allows, **options)
        posterior = Counter[str]()
        for particle in result.particles:
            one, two = particle.node.tokens
            posterior[lm.text.decode([one]) + lm.text.decode([two])[:1]] += particle.weight
        assert set(posterior) <= set(shares)
        n_effective = 1 / math.fsum(each.weight**2 for each in result.particles)
        common = [text for text, share in shares.items() if share > 0.01]
        rare = 1 - math.fsum(shares[text] for text in common)
        pairs = [(posterior[text], shares[text]) for text in common]
        pairs.append((1 - math.fsum(posterior[text] for text in common), rare))
        total += n_effective * math.fsum((got - wanted) ** 2 / wanted for got, wanted in pairs)
        assert result.log_evidence is not None
        estimates.append(math.exp(result.log_evidence))
    assert total < 80
    error = np.std(estimates) / math.sqrt(10)
    assert abs(np.mean(estimates) - evidence) < 5 * error


def test_list_of_checks_draws_as_one_function_that_calls_them_all(lm: weft.LM) -> None:
    def no_e(text: str, ended: bool) -> bool:
        return "e" not in text

    def short_words(text: str, ended: bool) -> bool:
        return all(len(word) <= 5 for word in text.split())

    def both(text: str, ended: bool) -> bool:
        return no_e(text, ended) and short_words(text, ended)

    options = {**TWO_TOKENS, "max_tokens": 8, "n": 4, "seed": 1}
    one, several = (
        search.smc(lm, PROMPT, prefix_check=checks, constraint=Regex("[A-Z][a-z ]*"), **options)
        for checks in (both, [no_e, short_words])
    )
    assert [each.text for each in several.particles] == [each.text for each in one.particles]
    assert several.log_evidence == one.log_evidence
    assert all(both(each.text, False) for each in several.particles if each.weight)


def test_posterior_sums_the_weights_of_equal_keys(lm: weft.LM) -> None:
    result = search.smc(lm, PROMPT, n=20, seed=1, prefix_check=allows, **TWO_TOKENS)
    shares = result.posterior(key=lambda text: text[0])
    assert set(shares) <= {"N", "O"}
    assert math.fsum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert result.posterior()[result.particles[0].text] >= result.particles[0].weight


def test_check_sees_a_small_part_of_the_vocabulary(lm: weft.LM) -> None:
    checked = Counter[str]()

    def vowels(text: str, ended: bool) -> bool:
        checked[text] += 1
        return text.count("e") <= 4

    result = search.smc(lm, PROMPT, n=1, seed=1, prefix_check=vowels, depth=1, max_tokens=12)
    n_tokens = len(result.best.path[1].tokens)
    assert n_tokens <= checked.total() < 8 * n_tokens < lm.info.n_vocab
    assert result.text.count("e") <= 4


def test_check_that_allows_nothing_leaves_particles_without_weight(lm: weft.LM) -> None:
    result = search.smc(
        lm, samples.sum, n=3, seed=1, prefix_check=lambda text, ended: False, max_tokens=4, depth=2
    )
    assert result.log_evidence == -math.inf
    assert [each.weight for each in result.particles] == [0, 0, 0]
    assert {node.meta["closed"] for node in result.loom.children} == {"constraint"}


def test_completion_of_the_best_path_passes_the_check(lm: weft.LM) -> None:
    result = search.smc(
        lm,
        PROMPT,
        n=2,
        seed=1,
        depth=1,
        max_tokens=3,
        answer_tokens=20,
        prefix_check=lambda text, ended: "the" not in text,
    )
    assert "the" not in result.text
    assert len(result.best.get_prefix_tokens(1)) > 6


def test_check_together_with_a_function_that_proposes_raises_config_error(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="leave out propose="):
        search.smc(lm, samples.sum, prefix_check=allows, propose=lambda nodes: [["a"]] * len(nodes))


def test_check_with_neutral_penalties_gives_the_texts_of_no_penalties(lm: weft.LM) -> None:
    options = {"prefix_check": allows, "n": 2, "seed": 1, **TWO_TOKENS}
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "dry_multiplier": 0}
    texts = [
        [each.text for each in search.smc(lm, PROMPT, **options, **more).particles]  # type: ignore[arg-type]
        for more in ({}, neutral, {"presence_penalty": 0.0, "frequency_penalty": 0.0})
    ]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(ConfigError, match=r"repetition_penalty has no meaning with prefix_check="):
        search.smc(lm, PROMPT, prefix_check=allows, repetition_penalty=1.1)


def test_check_of_one_argument_raises_config_error(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match=r"a function of \(text, ended\)"):
        search.smc(lm, samples.sum, prefix_check=lambda text: True)  # type: ignore[misc,arg-type]


@pytest.mark.parametrize("check", [5, []])
def test_check_that_is_no_function_raises_config_error(lm: weft.LM, check: Any) -> None:
    with pytest.raises(ConfigError, match=r"a function of \(text, ended\)"):
        search.smc(lm, samples.sum, prefix_check=check)


def test_posterior_of_a_search_without_particles_raises_config_error(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="only smc has particles"):
        search.greedy(lm, samples.sum, max_tokens=4).posterior()
