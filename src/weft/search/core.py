"""Shared parts of all searches: options, budget, calls of the model, and the result.

A search is written once, as a generator that yields model calls (`Work`) and receives their
results. `blocking` turns it into a blocking function, `awaitable` into an async one. Both do the
same in the same order.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Hashable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from .._core.sampling.params import MAX_N, BranchOptions, SamplingParams, unknown_option_error
from .._core.sampling.rng import fresh_seed
from .._core.sched.work import Extend
from .._core.validation import check_int, check_number, check_unary
from ..constraints.lines import EachLine
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle, Loom
from ..loom.node import lm_of
from .task import Game24, Lines, Task

if TYPE_CHECKING:
    from .answers import AnswerGroup

P = ParamSpec("P")
R = TypeVar("R")
Limit = Literal["tokens", "seconds", "kv", "constraint"]
_SCREEN = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens, time and candidates that a search has used.

    Attributes:
        tokens: generated tokens, including end tokens and all proposals.
        seconds: wall-clock time.
        candidates: proposed lines and answers.
        valued: candidates that got a score.
        prompt_tokens: tokens of value questions and of measured lines: read, but not generated.
        stopped: the budget that ended the search early, or "constraint" if `constraint` allowed no
            further text.
    """

    tokens: int
    seconds: float
    candidates: int = 0
    valued: int = 0
    prompt_tokens: int = 0
    stopped: Limit | None = None

    def __str__(self) -> str:
        parts = [f"{self.tokens:,} token{'s' * (self.tokens != 1)}", f"{self.seconds:.2f} s"]
        if self.candidates:
            parts.append(f"{self.candidates:,} candidate{'s' * (self.candidates != 1)}")
        if self.stopped == "constraint":
            parts.append("stopped: the constraint allows no further line (see line_constraint)")
        elif self.stopped is not None:
            parts.append(f"stopped by the budget of {self.stopped}")
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class Level:
    """Progress of a search: the argument of the `progress` callback, once per round.

    Attributes:
        depth: number of the round, from 1.
        candidates: its new candidates.
        kept: the candidates that it kept, best first.
        cost: the cost so far.
    """

    depth: int
    candidates: tuple[Heddle, ...]
    kept: tuple[Heddle, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Vote:
    """An answer in `SearchResult.votes`, with the branches that gave it.

    `mean_logprob` is that of the likeliest of these branches.
    """

    answer: Hashable
    nodes: tuple[Heddle, ...]
    mean_logprob: float

    @property
    def count(self) -> int:
        """The number of branches with this answer."""
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"Vote({self.answer!r}: {self.count}, mean_logprob {self.mean_logprob:z.3f})"


@dataclass(frozen=True, slots=True)
class Particle:
    """One weighted text in `SearchResult.particles` of `smc`.

    Attributes:
        node: the node where the text ends.
        weight: its share of all weights, 0 to 1.
    """

    node: Heddle
    weight: float

    @property
    def text(self) -> str:
        """The text after the prompt."""
        return text_of(self.node)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: the best node, its text, the full tree, and the cost.

    Attributes:
        best: the node where the best path ends.
        text: its text after the prompt.
        loom: the root of the tree, with every candidate.
        cost: what the search has used.
        solved: the verdict of the verifier or the task on `best`; None without a checker. False
            means that no candidate passed.
        votes: of best-of-n, most votes first.
        particles: of smc, heaviest first. The weights sum to 1; all are 0 if every particle
            violates a condition.
        log_evidence: of smc, in nats: the log of the estimated mean of exp(potential) under the
            model, times the probability that a `constraint` holds.
        states: the state of each node, if the search went over states of the caller's.
        answer: the answer in `text`, read as the option `answer` says; without it, the last line.
        answers: all answers, equal ones in one `AnswerGroup`: that of `best` first, then by size.
        measure: name of the measure that ranked the candidates, such as "share of votes".
        reason: why `best` was chosen, as the end of a sentence that starts with "chosen because".
    """

    best: Heddle
    text: str
    loom: Loom
    cost: Cost
    solved: bool | None = None
    votes: tuple[Vote, ...] = ()
    particles: tuple[Particle, ...] = ()
    log_evidence: float | None = None
    states: Mapping[Heddle, Any] = field(default_factory=dict)
    answer: Hashable | None = None
    answers: tuple[AnswerGroup, ...] = ()
    measure: str = ""
    reason: str = ""

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            from .other_libraries import attribute_for

            equivalent = attribute_for(name)
            hint = f"; it is result.{equivalent}" if equivalent else ""
            raise AttributeError(f"a SearchResult has no attribute {name!r}{hint}", name=name)

    def posterior(self, key: Callable[[str], Hashable] | None = None) -> dict[Hashable, float]:
        """Return the share of the particles' weight per text after the prompt, largest first.

        Texts without weight are left out.

        key: text → what to count instead, such as the answer in it. None counts texts.

        Raises: ConfigError if the search has no particles.
        """
        if not self.particles:
            raise ConfigError("only smc has particles and a posterior; best_of_n has votes")
        shares: dict[Hashable, float] = {}
        for particle in filter(lambda each: each.weight > 0, self.particles):
            value = particle.text if key is None else key(particle.text)
            shares[value] = shares.get(value, 0.0) + particle.weight
        return dict(sorted(shares.items(), key=lambda share: -share[1]))

    @property
    def state(self) -> Any:
        """The state of the best node; None if the search went over lines."""
        return self.states.get(self.best)

    def __repr__(self) -> str:
        verdict = {None: "", True: "solved · ", False: "not solved · "}[self.solved]
        votes = [f"  {vote.count:>4}  {vote.answer!r}" for vote in self.votes[:_SCREEN]]
        if len(self.votes) > _SCREEN:
            votes.append(f"  … {len(self.votes) - _SCREEN} more")
        reason = [f"chosen because {self.reason}"] if self.reason else []
        return "\n".join([self.text, f"({verdict}{self.cost})", *reason, *votes])

    def _repr_html_(self) -> str:
        from ..viz.notebook import search_card

        return search_card(self)


# A text, chat messages, token ids, or a node to search below; without a model the first state.
Prompt = str | Sequence[dict[str, Any]] | Sequence[int] | Heddle | Any
Progress = Callable[[Level], object]
# Nodes → scores; or another argument that `Callback` passes; plain or async.
Value = Callable[[Any], Any]
Kind = Literal["both", "continue", "suggest"]
Propose = Kind | LM | Callable[[Any], Any] | Mapping[str, Kind | LM | Callable[[Any], Any]]
_COUNTS = ("tokens", "candidates", "valued", "prompt_tokens", "draws")


class SearchOptions(BranchOptions, total=False):
    """Options of every search; the other keywords are SamplingParams.

    Functions may be plain or async. The name of the first parameter selects the argument. `node`,
    `text` (the text after the prompt) and `state` are passed one at a time. `nodes`, `texts` and
    `states` are passed as lists, once per round, and the function returns a list.

    Attributes:
        propose: the source of candidates: "continue", "suggest", "both", or another LM. With
            "continue" the model continues the answer line by line; with "suggest" it answers the
            task's prompt for a step. A function maps nodes to lists of texts, or a state to (text,
            state) pairs. A dict of these has names; `meta["by"]` of a node is the name.
        value: nodes → finite scores, higher is better. None: the model's verdict if the task words
            a question, else the mean logprob of the path; `mcts` and `adaptive`: its exp.
        verifier: text → True if it is a correct answer. None: the task's check. If nothing passes,
            `solved` is False.
        answer: how to read the answer in a text: "auto" (the default), "last_number", "last_line",
            or a regular expression. The answer is the last match, or its group.
        judge: a question to the model; the score of a candidate is the probability of "yes". It
            replaces `value`. `{text}`, `{answer}` and `{prompt}` stand for the candidate's text,
            the answer in it, and the prompt.
        check: a regular expression that a correct answer matches fully, instead of `verifier`.
        state: the first of the states that `propose` goes over. None: the prompt.
        score: states → scores; the form of `value` for states.
        complete: let the model continue the best path to its end. None: if the search goes over
            lines.
        answer_tokens: maximum tokens of a completion, 256 unless given; 0 completes nothing.
        line_constraint: the constraint of each line, without its line end. `constraint` applies to
            the full text after the prompt. Best of n and greedy accept only `constraint`.
        task: words the questions and checks the answer. None: recognize a Game of 24 prompt.
        budget_tokens, budget_s, budget_kv_bytes: limits of tokens, seconds, and KV of the full
            tree. `cost.stopped` names the one that ended the search.
        seed: equal seeds give equal trees, unless `budget_s` cuts them. Concurrent calls may change
            them in bfloat16, on MLX and on llama.cpp (docs/models.md).
        progress: called after each round with a `Level`.
        resume: a file to which the search is saved after each round. If the file exists, the search
            continues from it, with the same result as without the interruption.
    """

    propose: Propose | None
    value: Value | None
    verifier: Callable[[Any], Any] | None
    answer: str | None
    judge: str | None
    check: str | None
    state: Any
    score: Callable[[Any], Any] | None
    complete: bool | None
    answer_tokens: int
    line_constraint: Any
    task: Task | None
    budget_tokens: int | None
    budget_s: float | None
    budget_kv_bytes: int | None
    progress: Progress | None
    resume: str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated `SearchOptions`, as the searches use them.

    Fields without a comment are the options of the same names.
    """

    task: Task | None
    propose: Any
    value: Any
    verifier: Any
    state: Any  # the first state, or None
    score: Any
    complete: bool | None
    answer: str | None
    judge: str | None
    read_answer: Callable[[str], Hashable | None]  # reads the answer in a text
    answer_tokens: int  # maximum tokens of a completion
    budget: Budget
    seed: int | None
    progress: Progress | None
    resume: str | None  # path of the search's file
    sampling: dict[str, Any]  # sampling parameters of all rows, without the seed
    chosen: tuple[str, ...]  # names of the sampling parameters that the caller set

    @classmethod
    def read(
        cls,
        call: Callable[..., Any],
        options: Mapping[str, Any],
        without: Collection[str] = (),
        **defaults: Any,
    ) -> Settings:
        """Validate the caller's keywords of a search and split off the sampling parameters.

        Args:
            call: the search, for suggestions on mistyped keywords.
            options: the caller's keywords: SearchOptions and sampling parameters.
            without: options that this search does not accept.
            defaults: the search's own defaults of sampling parameters.

        Raises: ConfigError.
        """
        _check_option_names(call, options, without)
        rest = {**defaults, **options}
        budget = Budget(*(rest.pop(f"budget_{what}", None) for what in ("tokens", "s", "kv_bytes")))
        own = {name: rest.pop(name, None) for name in _OWN}
        own |= _read_answer_options(own, rest.pop("check", None))
        seed, path = rest.pop("seed", None), rest.pop("resume", None)
        answer_tokens = check_int("answer_tokens", rest.pop("answer_tokens", 256), 0)
        rest["max_tokens"] = check_int("max_tokens", rest["max_tokens"], 1)
        if (of_line := rest.pop("line_constraint", None)) is not None:
            rest["constraint"] = _constrain_each_line(of_line, rest)
        SamplingParams.resolve(rest, SamplingParams())
        if own["task"] is not None and not isinstance(own["task"], Task):
            raise ConfigError(
                f"task is {own['task']!r:.80}; allowed is an object of a class that derives from "
                "weft.search.Task"
            )
        if own["value"] is not None and own["score"] is not None:
            raise ConfigError("value and score both score candidates; leave out one")
        if own["complete"] not in (None, True, False):
            raise ConfigError(f"complete is {own['complete']!r}; allowed are True, False and None")
        if own["progress"] is not None and not callable(own["progress"]):
            raise ConfigError(
                f"progress is {own['progress']!r:.80}; allowed is a function that takes a Level"
            )
        if own["progress"] is not None:
            check_unary("progress", own["progress"], "a Level")
        if not isinstance(path, str | os.PathLike | None):
            raise ConfigError(f"resume is {path!r:.80}; allowed is the path of a file")
        return cls(
            answer_tokens=answer_tokens,
            budget=budget,
            seed=seed,
            resume=None if path is None else os.fspath(path),
            sampling=rest,
            chosen=tuple(name for name in rest if name in options),
            **own,
        )


def _read_answer_options(own: Mapping[str, Any], check: str | None) -> dict[str, Any]:
    """Return the settings that `answer`, `judge` and `check` stand for.

    Raises: ConfigError for two options of one meaning, or an invalid expression.
    """
    from .answers import answer_reader, answer_verifier, check_judge

    for name, value, others in (
        ("judge", own["judge"], ("value", "score")),
        ("check", check, ("verifier",)),
    ):
        for other in others:
            if value is not None and own[other] is not None:
                raise ConfigError(f"{name} and {other} have the same purpose; leave out one")
    read = answer_reader("auto" if own["answer"] is None else own["answer"])
    if own["judge"] is not None:
        check_judge(own["judge"])
    verifier = own["verifier"] if check is None else answer_verifier(check, read)
    return {"read_answer": read, "verifier": verifier}


def _constrain_each_line(constraint: Any, sampling: Mapping[str, Any]) -> EachLine:
    """Turn `line_constraint` into a constraint of the full text: one that holds for each line.

    sampling: the other parameters; `stop` in it has the line ends.

    Raises: ConfigError if there is a `constraint` too, or lines have no stop string.
    """
    if sampling.get("constraint") is not None:
        raise ConfigError(
            "constraint is of the full text and line_constraint of each line; leave out one"
        )
    ends = sampling.get("stop", "\n")
    if not ends:
        raise ConfigError(
            f"line_constraint needs lines that end at a stop string, but stop is {ends!r}; leave "
            "stop out, or give constraint= for the full text"
        )
    return EachLine(constraint, ends)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits after which a search stops; None means no limit.

    tokens: generated tokens.
    seconds: wall-clock time.
    kv_bytes: bytes of KV cache for the full tree.
    """

    tokens: int | None = None
    seconds: float | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        tokens, seconds = self.tokens, self.seconds
        if tokens is not None:
            object.__setattr__(self, "tokens", check_int("budget_tokens", tokens, 1))
        if self.kv_bytes is not None:
            n_bytes = check_int("budget_kv_bytes", self.kv_bytes, 1)
            object.__setattr__(self, "kv_bytes", n_bytes)
        if seconds is not None:
            limit = check_number("budget_s", seconds, low=0, open_low=True)
            object.__setattr__(self, "seconds", limit)


class Meter:
    """Measures the cost of a search and enforces its budget.

    `stopped` is the limit that was reached, or None.
    """

    def __init__(
        self, budget: Budget, seed: int | None, tree_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """Start measuring.

        Args:
            budget: the limits.
            seed: the seed of the search; None draws one.
            tree_bytes: returns the size of the tree's KV in bytes. `slot_bytes` is the size of one
                token's KV; set it afterwards.
        """
        self.budget = budget
        self.seed = fresh_seed() if seed is None else check_int("seed", seed, 0)
        self.tree_bytes = tree_bytes
        self.slot_bytes = 1
        self.tokens = 0
        self.candidates = 0
        self.valued = 0
        self.prompt_tokens = 0
        self.stopped: Limit | None = None
        self.draws = 0
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return the counts as JSON data, to save with a search that will be resumed."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"seed": self.seed, "seconds": self.seconds, **counts}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the counts that `state` returned."""
        self.seed = state["seed"]
        self._start = time.perf_counter() - state["seconds"]
        for name in _COUNTS:
            setattr(self, name, state[name])

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the search started."""
        return time.perf_counter() - self._start

    def cost(self) -> Cost:
        """Return the cost so far."""
        return Cost(
            tokens=self.tokens,
            seconds=self.seconds,
            candidates=self.candidates,
            valued=self.valued,
            prompt_tokens=self.prompt_tokens,
            stopped=self.stopped,
        )

    def out_of_time(self) -> bool:
        """Return True if the time budget is used up; then also set `stopped` to "time"."""
        if self.budget.seconds is not None and self.seconds >= self.budget.seconds:
            self.stopped = "seconds"
        return self.stopped == "seconds"

    def tokens_left(self) -> float:
        """Return the number of tokens that the token budget still allows; inf without a limit."""
        return math.inf if self.budget.tokens is None else self.budget.tokens - self.tokens

    def kv_tokens_left(self) -> float:
        """Return the number of tokens that the KV budget still allows; inf without a limit."""
        if self.budget.kv_bytes is None:
            return math.inf
        return max(self.budget.kv_bytes - self.tree_bytes(), 0) // self.slot_bytes

    def max_row_tokens(self) -> float:
        """Return the number of tokens that all budgets allow one more row; inf without a limit.

        If that is 0, set `stopped` to the limit that is reached.
        """
        limit = min(self.tokens_left(), self.kv_tokens_left())
        if limit < 1:
            self.stopped = "tokens" if self.tokens_left() < 1 else "kv"
        return limit

    def fits(self, n_tokens: int) -> bool:
        """Return True if the KV budget allows `n_tokens` more; else set `stopped` to "kv"."""
        if self.kv_tokens_left() >= n_tokens:
            return True
        self.stopped = "kv"
        return False

    def max_rows(self, n: int, max_tokens: int, reserve: int = 0) -> int:
        """Return how many of `n` rows may start within the budget.

        If that is 0, set `stopped` to the limit that is reached.

        Args:
            n: wanted rows.
            max_tokens: maximum tokens of a row; each is counted with this length.
            reserve: tokens of the budget to keep for later.
        """
        paid, tree_bytes = max(self.tokens_left() - reserve, 0), self.kv_tokens_left()
        if min(paid, tree_bytes) < max_tokens:
            self.stopped = "tokens" if paid < max_tokens else "kv"
        return int(min(n * max_tokens, paid, tree_bytes)) // max_tokens

    def grow(
        self, at: Sequence[Heddle], *, max_tokens: int, reserve: int = 0, **sampling: Any
    ) -> Steps[list[Heddle]]:
        """Generate one continuation of each listed node within the budget; return the new nodes.

        A row starts only if the remaining budget covers its full length. Tokens that shorter rows
        leave unused go to the next rows. There are fewer new nodes than rows if the budget is too
        small.

        Args:
            at: nodes; a node that is listed repeatedly gets as many continuations.
            max_tokens: maximum tokens of each continuation.
            reserve: tokens of the budget to keep for later.
            sampling: further sampling parameters.
        """
        nodes: list[Heddle] = []
        waiting = list(at)
        is_over = None if self.budget.seconds is None else self.out_of_time
        while waiting and not self.out_of_time():
            n_rows = self.max_rows(len(waiting), max_tokens, reserve)
            if not n_rows:
                break
            rows, waiting = waiting[:n_rows], waiting[n_rows:]
            seed = self.next_seed()
            options = {"max_tokens": max_tokens, "seed": seed, **sampling}
            new = yield Grow(rows, options, is_over)
            # An end token was generated too, though it is in no node.
            self.tokens += sum(len(node.tokens) + node.terminal for node in new)
            nodes += new
        return nodes

    def next_seed(self) -> int:
        """Return the seed of the next draws; the search's seed determines all of them."""
        self.draws += 1
        return Random(f"{self.seed}/{self.draws}").getrandbits(63)


# Options without a check or a default.
_OWN = (
    "task", "propose", "value", "verifier", "answer", "judge", "state", "score", "complete",
    "progress",
)  # fmt: skip


def _check_option_names(
    call: Callable[..., Any], options: Mapping[str, Any], without: Collection[str]
) -> None:
    """Raise ConfigError for a keyword that the search does not accept, with a suggestion.

    without: options that this search does not accept.
    """
    if "n" in options:
        raise ConfigError(f"n has no meaning for {call.__name__}; leave it out")
    keywords = signature(call).parameters.values()
    own = [each.name for each in keywords if each.kind is Parameter.KEYWORD_ONLY]
    allowed = [name for name in (*own, *SearchOptions.__annotations__) if name not in without]
    for name in options:
        if name not in allowed and name not in without:
            from .other_libraries import options_for

            raise unknown_option_error(name, allowed, call.__name__, options_for(allowed))


def resolve_start(lm: LM | None, prompt: Prompt) -> tuple[Heddle, Loom]:
    """Return the node to search below and the root of its tree.

    A prompt that is a node is used itself; any other prompt gets a new loom.
    """
    if isinstance(prompt, LM):
        raise ConfigError("the prompt is a model; the model comes first: tot(lm, prompt)")
    if lm is not None and not isinstance(lm, LM):
        given = os.fspath(lm) if isinstance(lm, str | os.PathLike) else None
        way = f'weft.load("{given}")' if given else "weft.load(…)"
        raise ConfigError(f"lm is {lm!r:.80}; allowed is a loaded model: give {way}")
    if isinstance(prompt, Heddle):
        start = prompt
    elif lm is None:
        start = Loom(None, prompt if isinstance(prompt, str) else repr(prompt))
    else:
        start = Loom(lm, prompt)
    root = start.path[0]
    if not isinstance(root, Loom):
        raise ConfigError("the node to search below is in no loom; give one that is")
    if root.lm is not lm:
        raise ConfigError("the loom to search in belongs to another model; give lm=loom.lm")
    return start, root


def read_task(loom: Loom) -> Task | None:
    """Return the task that a loom's prompt states (a Game of 24), or None."""
    return Game24.read(loom.user_prompt)


def text_of(node: Heddle) -> str:
    """Return the text after the prompt, down to the node."""
    return node.get_prefix_text(1).strip()


def lines_of(node: Heddle) -> Lines:
    """Return the lines after the prompt, down to the node, without their line ends."""
    text = text_of(node)
    return tuple(text.split("\n")) if text else ()


def check_branches(name: str, value: int, *, low: int = 1) -> int:
    """Validate `value`, a number of branches per node, and return it.

    Args:
        name: the option's name, for the message.
        low: the smallest allowed number.

    Raises: ConfigError if it is not an integer in the allowed range.
    """
    return check_int(name, value, low, MAX_N)


@dataclass(frozen=True, slots=True)
class Grow:
    """A model call that generates one continuation of each node in `rows`, as one batch.

    options: sampling parameters.
    is_over: called after each step; True ends all rows early. None: rows end by themselves.
    """

    rows: Sequence[Heddle]
    options: dict[str, Any]
    is_over: Callable[[], bool] | None

    def params(self, lm: LM) -> SamplingParams:
        """Return the sampling parameters of all rows; missing ones come from `lm.defaults`."""
        return SamplingParams.resolve(self.options, lm.defaults)

    def _params(self) -> SamplingParams:
        """Return the sampling parameters, for the model of the first row."""
        return self.params(lm_of(self.rows[0]))

    def run(self, loop: BackgroundLoop) -> list[Heddle]:
        """Generate, and return the new children, in row order."""
        if self.is_over is None:
            return self.rows[0].grow(self._params(), at=self.rows, show=False)
        children: dict[int, Heddle] = {}
        with closing(self.rows[0].stream(self._params(), at=self.rows)) as deltas:
            for delta in deltas:
                children[delta.branch] = delta.node
                if self.is_over():
                    break
        return [node for _, node in sorted(children.items())]

    async def arun(self) -> list[Heddle]:
        """Like `run`, for async searches."""
        if self.is_over is None:
            return await self.rows[0].agrow(self._params(), at=self.rows)
        children: dict[int, Heddle] = {}
        async with aclosing(self.rows[0].astream(self._params(), at=self.rows)) as deltas:
            async for delta in deltas:
                children[delta.branch] = delta.node
                if self.is_over():
                    break
        return [node for _, node in sorted(children.items())]


@dataclass(frozen=True, slots=True)
class Read:
    """A model call that reads logits or scores of given tokens, as one batch; generates nothing."""

    lm: LM
    items: Sequence[Extend]

    def run(self, loop: BackgroundLoop) -> list[Any]:
        """Return the first result of each item."""
        tickets = self.lm.submit(self.items)
        self.lm.drive(tickets)
        return [ticket.result()[0] for ticket in tickets]

    async def arun(self) -> list[Any]:
        """Like `run`, for async searches."""
        tickets = await self.lm.asubmit(self.items)
        await self.lm.adrive(tickets)
        return [ticket.result()[0] for ticket in tickets]


@dataclass(frozen=True, slots=True)
class Gather:
    """Work without the model: awaits results of the caller's async functions concurrently."""

    items: Sequence[Awaitable[Any]]

    def run(self, loop: BackgroundLoop) -> list[Any]:
        """Return the results, in order. If one fails, cancel the others and raise its error."""
        return loop.wait(self.arun())

    async def arun(self) -> list[Any]:
        """Like `run`, for async searches."""
        tasks = [asyncio.ensure_future(item) for item in self.items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


Work = Grow | Read | Gather
Steps = Generator[Work, Any, R]


class BackgroundLoop:
    """An event loop in its own thread, in which a blocking search awaits async functions.

    The thread starts at the first await. All rounds of a search use the same loop, so that an async
    client opened in one round works in the next. A thread is needed because the caller may be
    inside a running loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the loop and return its result; an interrupt cancels the coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(
                target=self._loop.run_forever, name="weft-search-loop", daemon=True
            )
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks, wait until they have ended, and stop the thread, if it was started."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_pending(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_pending() -> None:
    """Cancel all other tasks of the running loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def run(steps: Steps[R], do: Callable[[Work, BackgroundLoop], Any] | None = None) -> R:
    """Run a search (a generator of model calls) to its end, blocking, and return its result.

    do: called with each piece of work and the event loop, instead of the work's own `run`. None
        calls `run`.
    """
    with closing(steps), closing(BackgroundLoop()) as loop:
        answer: Any = None
        while True:
            try:
                work = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = work.run(loop) if do is None else do(work, loop)


async def arun(steps: Steps[R]) -> R:
    """Run a search (a generator of model calls) to its end in the running event loop."""
    with closing(steps):
        answer: Any = None
        while True:
            try:
                work = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = await work.arun()


def blocking(search: Callable[P, Steps[R]]) -> Callable[P, R]:
    """Decorator: turn a generator function of model calls into a blocking function.

    The function also works inside a running event loop. It returns what the generator returns.
    """

    @wraps(search)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(search(*args, **kwargs))

    call.__signature__ = _public_signature(search)  # type: ignore[attr-defined]
    return call


def awaitable(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the async twin of a `blocking` function; it never blocks the event loop."""
    search: Callable[P, Steps[R]] = call.__wrapped__  # type: ignore[attr-defined]

    async def acall(*args: P.args, **kwargs: P.kwargs) -> R:
        return await arun(search(*args, **kwargs))

    name = f"a{search.__name__}"
    acall.__name__ = acall.__qualname__ = name
    acall.__module__ = search.__module__
    acall.__doc__ = f"The async form of `{search.__name__}`, for a running event loop.\n\n"
    acall.__doc__ += "    Cancelling the task leaves the tree consistent."
    acall.__wrapped__ = search  # type: ignore[attr-defined]
    acall.__signature__ = _public_signature(search)  # type: ignore[attr-defined]
    return acall


def _public_signature(search: Callable[..., Any]) -> Signature:
    """Return the signature for `help()`: the return type is the result, not the generator."""
    shown = signature(search)
    result = str(shown.return_annotation).removeprefix("Steps[").removesuffix("]")
    return shown.replace(return_annotation=result)
