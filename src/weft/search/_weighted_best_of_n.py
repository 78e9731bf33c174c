"""Weighted best of n: a vote of full answers, each with its score as weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ..lm.lm import LM
from ._best_of_n import Answers, full_answer_settings, with_extract
from .answers import Extract, reason_for_sums
from .core import (
    Prompt,
    SearchOptions,
    SearchResult,
    Steps,
    awaitable,
    blocking,
    check_branches,
)
from .driver import Search
from .judge import Judge


@blocking
def weighted_best_of_n(
    lm: LM | None,
    prompt: Prompt,
    *,
    n: int = 16,
    extract: Extract | None = None,
    checked: bool = True,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Grow `n` full answers in one batch; return the answer with the largest sum of scores.

    Use it instead of `best_of_n` if a value rates answers: equal answers count together, and
    doubtful ones count less. The value is usually a reward model, `value=RewardModel.load(folder)`.
    Scores must not be negative.

    Args:
        lm, prompt: as for `tot`.
        n, extract, checked: as for `best_of_n`.
        options: SearchOptions; answers have `max_tokens` 256 and `temperature` 0.8 unless given.
            Without `value` and `score` a branch's score is its likelihood, the geometric mean of
            its tokens' probabilities.

    Returns: a SearchResult. `votes` has one `Vote` per answer, in order of the sums. `best` is the
    branch with the best score among those of the first vote.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = full_answer_settings(weighted_best_of_n, options, temperature=0.8)
    count = check_branches("n", n)
    if extract is not None:
        settings = with_extract(settings, extract)
    search = Search(lm, prompt, settings, "weighted_best_of_n", n=n, checked=checked)
    algorithm = Answers(count, settings.read_answer, is_checked=checked, is_weighted=True)
    judge = Judge(search, as_share=True, asks=False)
    result = yield from search.run(algorithm, judge, algorithm.writer(search))
    result = replace(result, votes=tuple(algorithm.votes(search)))
    texts = algorithm.nodes(search) or [result.best]
    return replace(result, reason=reason_for_sums(search, result, texts))


aweighted_best_of_n = awaitable(weighted_best_of_n)
