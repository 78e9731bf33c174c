"""Full answers: the likeliest one, or many in one batch and a majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from .._core.validation import check_unary
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle
from .answers import (
    LOGPROB,
    VOTES,
    Extract,
    is_complete,
    reason_for_rank,
    reason_for_votes,
    written_answer,
)
from .core import (
    Prompt,
    SearchOptions,
    SearchResult,
    Settings,
    Steps,
    Vote,
    awaitable,
    blocking,
    check_branches,
    text_of,
)
from .driver import Search, WorkItem
from .judge import Judge, ranked
from .propose import Proposer, is_incomplete
from .score import mean_logprob_of_node


@blocking
def best_of_n(
    lm: LM | None,
    prompt: Prompt,
    *,
    n: int = 16,
    extract: Extract | None = None,
    checked: bool = True,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Grow `n` answers in one batch; return the likeliest branch of the most frequent answer.

    All branches stay in the tree. `votes` has the count of each answer, and `score` of a branch is
    its answer's share of the votes. Ties go to the answer with the likeliest branch. With `value`
    or `score`, the branch with the best value is the answer instead.

    Args:
        lm, prompt: as for `tot`.
        n: number of answers, 1 or more.
        extract: returns the answer in a text, or None; such a branch has no vote. None: as the
            option `answer`.
        checked: if there is a checker, only answers that it accepts compete; without any, nothing
            wins. False lets all compete, and checks the winner only.
        options: SearchOptions; answers have `max_tokens` 256 and `temperature` 0.8 unless given.
            Several proposers share the `n`; a function is called until its share is complete.

    Returns: a SearchResult with `votes`.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = full_answer_settings(best_of_n, options, temperature=0.8)
    count = check_branches("n", n)
    if extract is not None:
        settings = with_extract(settings, extract)
    search = Search(lm, prompt, settings, "best_of_n", n=n, checked=checked)
    algorithm = Answers(count, settings.read_answer, is_checked=checked)
    result = yield from search.run(
        algorithm, AnswerJudge(search, asks=False), algorithm.writer(search)
    )
    result = replace(result, votes=tuple(algorithm.votes(search)))
    texts = algorithm.nodes(search) or [result.best]
    if search.value is not None:  # texts that max_tokens has cut compete as well
        reason = reason_for_rank(search, result.best, texts, result.measure)
        return replace(result, reason=reason)
    answers = result.answers
    if not result.votes:
        answers = tuple(replace(group, score=group.mean_logprob) for group in answers)
    return replace(
        result,
        answers=answers,
        measure=VOTES if result.votes else LOGPROB,
        reason=reason_for_votes(search, result, texts),
    )


def with_extract(settings: Settings, extract: Any) -> Settings:
    """Return settings whose answers `extract` reads. Raises: ConfigError if it is no function."""
    if settings.answer is not None:
        raise ConfigError("extract and answer both read answers; leave out one")
    if not callable(extract):
        raise ConfigError(
            f"extract is {extract!r:.80}; allowed is a function from a text to its answer, or None"
        )
    check_unary("extract", extract, "a text")
    return replace(settings, read_answer=extract)


abest_of_n = awaitable(best_of_n)


@blocking
def greedy(lm: LM, prompt: Prompt, **options: Unpack[SearchOptions]) -> Steps[SearchResult]:
    """Generate one answer by greedy decoding, as a baseline for other searches.

    Args:
        lm, prompt: as for `tot`.
        options: SearchOptions except `temperature` and `propose`; the answer has `max_tokens` 256
            unless given. `seed` has no effect.

    Returns: a SearchResult.

    Raises:
        ConfigError: an argument is outside what is allowed, or has no meaning for greedy.
    """
    without = ("temperature", "propose", "state", "score")
    for name in without:
        # Temperature 0 is greedy decoding.
        if options.get(name) is not None and (name, options.get(name)) != ("temperature", 0):
            raise ConfigError(f"{name} has no meaning for greedy: it takes the likeliest tokens")
    settings = full_answer_settings(greedy, options, without, temperature=0.0)
    search = Search(lm, prompt, settings, "greedy")
    answer = Answers(1, None)
    return (yield from search.run(answer, AnswerJudge(search, asks=False), answer.writer(search)))


agreedy = awaitable(greedy)


def full_answer_settings(
    call: Callable[..., SearchResult],
    options: SearchOptions,
    without: Sequence[str] = (),
    *,
    temperature: float,
) -> Settings:
    """Validate the options of a search that generates full answers (best-of-n, greedy).

    Args:
        call: the search function, for error messages.
        options: the caller's options.
        without: options to reject, besides those that all such searches reject.
        temperature: the default temperature.
    """
    if options.get("line_constraint") is not None:
        raise ConfigError(
            f"line_constraint has no meaning for {call.__name__}, which writes full answers: give "
            "constraint="
        )
    unused = ("answer_tokens", "complete")
    for name in unused:
        if options.get(name):
            raise ConfigError(
                f"{name} has no meaning for {call.__name__}: max_tokens bounds an answer. "
                "Leave it out"
            )
    sampling = {"temperature": temperature, "max_tokens": 256, "stop": None}
    without = (*without, *unused, "line_constraint")
    settings = Settings.read(call, options, without, **sampling)
    return replace(settings, complete=False)


class AnswerJudge(Judge):
    """Scores full answers by the caller's `value`, else by their likelihood.

    If the engine cannot compute likelihoods, all scores are 0, and the number of votes decides.
    """

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        search = self.search
        if search.value is None and (search.lm is None or not _can_score(search.lm, nodes)):
            return [0.0] * len(nodes)
        return (yield from super()._scores(nodes))

    def check_engine(self) -> None:
        """Do nothing: unlike other judges, this one accepts an engine without logprobs."""


def _can_score(lm: LM, nodes: Sequence[Heddle]) -> bool:
    """Return True if the logprobs of all paths are recorded, or the model can compute them."""
    capabilities = lm.info.capabilities
    known = (bool(each.logprobs) for node in nodes for each in node.path[1:])
    return capabilities.steps or bool(capabilities.scoring) or all(known)


class Answers:
    """The algorithm behind `best_of_n` and `greedy`: generate `n` full answers and rank them.

    `search.state["answers"]` has the node ids of each round's answers.

    extract: returns the answer in a text, for votes. None counts no votes.
    is_checked: if there is a checker, only answers that it accepts get votes.
    is_weighted: the answer with the largest sum of scores is first, not the most frequent one.
    """

    def __init__(
        self,
        n: int,
        extract: Extract | None,
        *,
        is_checked: bool = True,
        is_weighted: bool = False,
    ) -> None:
        self.n = n
        self.extract = extract
        self.is_checked = is_checked
        self.is_weighted = is_weighted
        self._writers: list[str] = []

    def writer(self, search: Search) -> Proposer:
        """Return the proposer of full answers, with `max_tokens` limited by the token budget."""
        proposer = Proposer(
            search,
            n_continue=1,
            n_suggest=0,
            merges=False,
            full_answers=True,
            default="continue",
        )
        if (room := search.meter.max_row_tokens()) < proposer.sampling["max_tokens"]:
            proposer.sampling["max_tokens"] = max(int(room), 1)
        self._writers = [source.by for source in proposer.sources]
        return proposer

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: generate the missing answers, shared among the proposers."""
        missing = self.n - len(self.nodes(search))
        if missing <= 0 or search.start.meta.get("closed"):
            return []
        if len(self._writers) == 1:
            return [WorkItem(search.start, n=missing)]
        shares = Counter(self._writers[at % len(self._writers)] for at in range(missing))
        return [WorkItem(search.start, n=share, by=by) for by, share in shares.items()]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Record the ids of the answers; return all answers, best first.

        Without a value of the caller's, the score of an answer is its share of the votes.
        """
        if any(node.finish_reason == "length" for node in candidates):
            search.meter.max_row_tokens()  # records the budget if that cut an answer
        ids = [node.id for node in search.in_order(candidates)]
        search.state.setdefault("answers", {})[str(search.round + 1)] = ids
        answers = search.in_order([*self.nodes(search), *candidates])
        if self.extract is not None and search.value is None and not self.is_weighted:
            votes = self._votes_of(search, answers)
            for node in answers:
                share = next((vote.count for vote in votes if node in vote.nodes), 0)
                node.score = share / len(answers)
        return self._ranked(search, answers)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the answers, best first; the partial ones if the budget cut off all."""
        answers = self.nodes(search)
        partial = filter(is_incomplete, search.children(search.start))
        return self._ranked(search, answers or list(partial))

    def votes(self, search: Search) -> list[Vote]:
        """Return one `Vote` per distinct answer, most votes first."""
        return self._votes_of(search, self.nodes(search))

    def _votes_of(self, search: Search, answers: Sequence[Heddle]) -> list[Vote]:
        """Return the votes of `answers`; only those that the checker accepts, if there is one."""
        if self.extract is None:
            return []
        if search.checks and self.is_checked:
            # Without accepted answers there are no votes: the most frequent would look a winner.
            answers = [node for node in answers if search.is_solved(node)]
        votes = count_votes(answers, self.extract)
        if self.is_weighted:
            votes.sort(key=lambda vote: -math.fsum(node.score or 0.0 for node in vote.nodes))
        return votes

    def _ranked(self, search: Search, answers: Sequence[Heddle]) -> list[Heddle]:
        """Return `answers`, best first.

        If the caller has given a value and votes are not weighted, it decides. With a checker,
        wrong answers come last.

        Otherwise nodes with the winning answer come first. Among equals, correct answers precede
        wrong ones, then complete ones precede incomplete ones. The last key is the score if votes
        are weighted, else the mean logprob.
        """
        if search.value is not None and not self.is_weighted:
            return sorted(
                ranked(answers), key=lambda node: self.is_checked and not search.is_solved(node)
            )
        votes = self._votes_of(search, answers)
        first = votes[0].nodes if votes else ()

        def rank(node: Heddle) -> tuple[bool, bool, bool, float]:
            is_wrong = self.is_checked and not search.is_solved(node)
            worth = (node.score or 0.0) if self.is_weighted else mean_logprob_of_node(node)
            return (node not in first, is_wrong, not is_complete(node), -worth)

        return sorted(answers, key=rank)

    def nodes(self, search: Search) -> list[Heddle]:
        """Return the answers of all finished rounds, as nodes."""
        answers = search.state.get("answers", {})
        rounds = [str(number) for number in range(1, search.round + 1)]
        return search.nodes_by_id([each for number in rounds for each in answers.get(number, ())])


def count_votes(nodes: Sequence[Heddle], extract: Extract) -> list[Vote]:
    """Group branches by the answer that `extract` returns; return the groups, most votes first.

    Of groups of equal size, the one with the likeliest branch is first. Incomplete branches vote
    only if no branch is complete.
    """
    by_answer: dict[Hashable, list[Heddle]] = {}
    for node in list(filter(is_complete, nodes)) or nodes:
        answer = extract(text_of(node))
        if answer is not None:
            by_answer.setdefault(answer, []).append(node)
    votes = [
        Vote(
            written_answer(extract, text_of(voters[0])),
            tuple(voters),
            max(map(mean_logprob_of_node, voters)),
        )
        for voters in by_answer.values()
    ]
    return sorted(votes, key=lambda vote: (-vote.count, -vote.mean_logprob))
