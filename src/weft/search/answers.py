"""Answers of a search: how they are read, judged, checked and grouped, and why one was chosen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .core import text_of
from .score import Scorer, judge, path_logprob

if TYPE_CHECKING:
    from ..loom import Heddle
    from .core import SearchResult
    from .driver import Search
    from .judge import Judge

Extract = Callable[[str], Hashable | None]
_ANSWER_LINE = re.compile(r"(?:answer is|Answer:)[^\n]*", re.IGNORECASE)
_AROUND = " \t.,;:!?*\"'`()[]"
_SHORT = 60  # characters of a last line that is voted on
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FIELD = re.compile(r"\{(prompt|text|answer)\}")
VOTES, LOGPROB = "share of votes", "mean log-probability"
_SCORES = {"judge": "score by the judge", "value": "value", "score": "score"}


def answer_number(text: str) -> str | None:
    """Return the last number after the last "answer is" or "Answer:" as plain digits, or None.

    "The answer is $1,216." → "1216"; "Answer: 4 * 6 = 24" → "24".
    """
    lines = _ANSWER_LINE.findall(text)
    return last_number(lines[-1]) if lines else None


def answer_text(text: str) -> str | None:
    """Extract the answer from a text, so that answers can be compared; the default of `best_of_n`.

    That is `answer_number`, else the last line if it is short, else None. The line is lowercased,
    without spaces and punctuation around it: "Paris." → "paris".
    """
    number = answer_number(text)
    if number is not None:
        return number
    last = last_line(text)
    return last.casefold() if last is not None and len(last) <= _SHORT else None


def written_answer(read: Extract, text: str) -> Hashable | None:
    """Return the answer in a text for display, in the case that `answer_text` drops.

    Any other `read` returns what is shown.
    """
    answer = read(text)
    if read is not answer_text or answer is None:
        return answer
    return answer_number(text) or last_line(text)


def last_number(text: str) -> str | None:
    """Return the last number of a text as plain digits, or None: "about 1,216 km" → "1216"."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def last_line(text: str) -> str | None:
    """Return the last line without spaces and punctuation around it; None if nothing is left."""
    return text.strip().rpartition("\n")[2].strip(_AROUND) or None


# Named ways to read the answer in a text; other values of `answer` are regular expressions.
READERS: dict[str, Extract] = {
    "auto": answer_text,
    "last_number": last_number,
    "last_line": last_line,
}


def answer_reader(answer: str) -> Extract:
    """Return the function that reads the answer in a text.

    answer: a name of `READERS`, or a regular expression. Its last match is the answer: the first
        group that took part, or the full match without groups.

    Raises: ConfigError for an invalid expression.
    """
    if answer in READERS:
        return READERS[answer]
    pattern = _compile_regex("answer", answer, f"{', '.join(READERS)}, or a regular expression")

    def read(text: str) -> str | None:
        matches = list(pattern.finditer(text))
        if not matches:
            return None
        groups = [group for group in matches[-1].groups() if group is not None]
        return str(groups[0] if groups else matches[-1][0]).strip()

    return read


def answer_verifier(check: str, read: Extract) -> Callable[[str], bool]:
    """Return a verifier: True if the answer in a text matches an expression fully.

    Args:
        check: a regular expression, such as "42" or "Paris|paris".
        read: reads the answer in a text.

    Raises: ConfigError for an invalid expression.
    """
    pattern = _compile_regex("check", check, "a regular expression for the answer")
    return lambda text: (answer := read(text)) is not None and bool(pattern.fullmatch(str(answer)))


def check_judge(template: object) -> None:
    """Raise ConfigError if a judge's question does not contain the answer that it is about."""
    if not isinstance(template, str) or not ("{text}" in template or "{answer}" in template):
        raise ConfigError(
            f"judge is {template!r:.80}; it must be a question with {{text}} or {{answer}}, the"
            " place of the answer that the model judges"
        )


def answer_judge(template: str, prompt: str, read: Extract) -> Scorer:
    """Return a scoring function: the model's probability of "yes" to a question about an answer.

    Args:
        template: the question. `{text}` stands for the text of an answer, `{answer}` for the answer
            in it, and `{prompt}` for the search's prompt.
        prompt: the search's prompt.
        read: reads the answer in a text.
    """

    def question(text: str) -> str:
        values = {"prompt": prompt, "text": text, "answer": str(read(text) or "")}
        return _FIELD.sub(lambda match: values[match[1]], template)

    return judge(question)


def _compile_regex(name: str, expression: object, allowed: str) -> re.Pattern[str]:
    """Compile the regular expression that the caller gave as `name`.

    Raises: ConfigError that says what is `allowed`, if it cannot be compiled.
    """
    if not isinstance(expression, str) or not expression:
        raise ConfigError(f"{name} is {expression!r:.80}; allowed is {allowed}")
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{name} is {expression!r:.80}; allowed is {allowed}: {error}") from None


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """Equal answers of a search, in `SearchResult.answers`.

    Attributes:
        answer: the answer; None for texts in which no answer could be read.
        nodes: the nodes where these texts end.
        share: their share of all answers, 0 to 1.
        score: the highest score of a node, by the search's measure; None without scores.
        mean_logprob: the highest mean log-probability of a text; None if unknown.
        solved: True if the check accepts one of them; None without a check.
    """

    answer: Hashable | None
    nodes: tuple[Heddle, ...]
    share: float
    score: float | None
    mean_logprob: float | None
    solved: bool | None

    @property
    def count(self) -> int:
        """The number of texts with this answer."""
        return len(self.nodes)


def explained(search: Search, judge: Judge, result: SearchResult) -> SearchResult:
    """Return a result with its answer, all answers in groups, the measure, and the reason."""
    best, answer = result.best, None
    if best is not search.start:
        is_given = search.settings.answer is not None
        answer = search.settings.read_answer(result.text) if is_given else _final_line(result.text)
    finished = _finished(search, best)
    measure = _measure(search, judge)
    return replace(
        result,
        answer=answer,
        answers=_groups(search, finished, best),
        measure=measure,
        reason=reason_for_rank(search, best, finished, measure),
    )


def _finished(search: Search, best: Heddle) -> list[Heddle]:
    """Return the nodes whose texts are answers: finished or checked paths, else all paths."""
    nodes = [node for node in search.nodes() if node is not search.start]
    leaves = [node for node in nodes if search.is_end(node) or not search.children(node)]
    finished = [node for node in leaves if search.is_end(node) or "solved" in node.meta] or leaves
    is_missing = best is not search.start and best not in finished
    return [*finished, best] if is_missing else finished


def _final_line(text: str) -> str | None:
    return text.strip().rpartition("\n")[2] or None


def _groups(search: Search, nodes: Sequence[Heddle], best: Heddle) -> tuple[AnswerGroup, ...]:
    """Group nodes with equal answers: the chosen answer first, then the largest groups."""
    by_answer: dict[Hashable | None, list[Heddle]] = {}
    for node in nodes:
        by_answer.setdefault(search.settings.read_answer(text_of(node)), []).append(node)
    groups = [_group(search, each, len(nodes)) for each in by_answer.values()]
    order = sorted(groups, key=lambda g: (best not in g.nodes, g.answer is None, -g.count))
    return tuple(order)


def _group(search: Search, nodes: Sequence[Heddle], total: int) -> AnswerGroup:
    scores = [node.score for node in nodes if node.score is not None]
    solved = any(map(search.is_solved, nodes)) if search.checks else None
    logprob = max(path_logprob(node.path[1:]) for node in nodes)
    return AnswerGroup(
        written_answer(search.settings.read_answer, text_of(nodes[0])),
        tuple(nodes),
        len(nodes) / total,
        max(scores, default=None),
        logprob if math.isfinite(logprob) else None,
        solved,
    )


def _measure(search: Search, judge: Judge) -> str:
    """Return the name of the measure by which a search ranks its candidates."""
    if search.value is not None:
        return search.value.name
    if judge.task is not None:
        return "model's verdict on each step"
    if search.lm is None and search.checks:
        return "check"
    return "mean token probability" if judge.as_share else LOGPROB


def reason_for_rank(search: Search, best: Heddle, nodes: Sequence[Heddle], measure: str) -> str:
    """Return why a search chose `best`, as the end of a sentence.

    Args:
        nodes: all answers that compete.
        measure: the name of the search's measure.
    """
    if best is search.start:
        return "there is no answer yet"
    if search.checks and search.is_solved(best):
        passing = [node for node in nodes if search.is_solved(node)]
        if len(passing) == 1:
            return "it is the only answer that passes the check"
        rank = _rank(best, passing, measure)
        return f"it passes the check, as {len(passing)} answers do, and {rank}"
    prefix = "no answer passes the check, and " if search.checks else ""
    if len(nodes) == 1:
        return f"{prefix}it is the only answer"
    return prefix + _rank(best, nodes, measure)


def _rank(best: Heddle, nodes: Sequence[Heddle], measure: str) -> str:
    """Return the rank of `best` among the answers, or the score of the line that it continues."""
    measure = _SCORES.get(measure, measure)
    scores = [node.score for node in nodes if node.score is not None]
    if best.score is not None and len(scores) > 1 and best.score >= max(scores):
        cut = " (this text is cut at its length)" if best.finish_reason == "length" else ""
        return f"its {measure}, {best.score:.2f}, is the highest of {len(scores)}{cut}"
    scored = next((node for node in reversed(best.path) if node.score is not None), None)
    if scored is None:
        return "the search ranks its path first"
    return f"the search ranks its path first, with a {measure} of {scored.score:.2f}"


def reason_for_votes(search: Search, result: SearchResult, nodes: Sequence[Heddle]) -> str:
    """Return why a majority vote chose the best text, as the end of a sentence.

    nodes: the last node of each text.
    """
    if len(nodes) == 1:
        return result.reason
    own = next((vote for vote in result.votes if result.best in vote.nodes), None)
    if own is None:
        return _reason_without_votes(search, result.best, nodes, LOGPROB)
    have = "has" if own.count == 1 else "have"
    reason = f"{own.count} of {len(nodes)} texts {have} the answer {own.answer!s:.60}"
    if any(vote.count == own.count for vote in result.votes if vote is not own):
        reason += f", no other answer has more, and it has the highest {LOGPROB}"
    return f"it passes the check, and {reason}" if search.is_solved(result.best) else reason


def reason_for_sums(search: Search, result: SearchResult, nodes: Sequence[Heddle]) -> str:
    """Return why a vote weighted by scores chose the best text, as the end of a sentence.

    nodes: the last node of each text.
    """
    if len(nodes) == 1:
        return result.reason
    own = next((vote for vote in result.votes if result.best in vote.nodes), None)
    if own is None:
        measure = _SCORES.get(result.measure, result.measure)
        return _reason_without_votes(search, result.best, nodes, measure)
    total = math.fsum(node.score or 0.0 for node in own.nodes)
    reason = (
        f"the answer {own.answer!s:.60} of {own.count} of {len(nodes)} texts has the highest sum of"
        f" scores, {total:.2f}"
    )
    return f"it passes the check, and {reason}" if search.is_solved(result.best) else reason


def _reason_without_votes(
    search: Search, best: Heddle, nodes: Sequence[Heddle], measure: str
) -> str:
    """Return the reason of a vote in which no text has an answer that counts."""
    if search.checks and not search.is_solved(best):
        why, rivals = "no answer passes the check", [*nodes]
    else:
        why = "no answer can be read in the texts"
        rivals = [node for node in nodes if search.is_solved(node)] if search.checks else [*nodes]
    complete = [node for node in rivals if is_complete(node)]
    if not complete or len(complete) == len(nodes):
        return f"{why}, and this text has the highest {measure} of {len(rivals)}"
    return f"{why}, and this text has the highest {measure} of the {len(complete)} complete ones"


def is_complete(node: Heddle) -> bool:
    """Return True if an answer ended by itself, not by `max_tokens`."""
    return node.finish_reason in (None, "stop")
