"""Speculative decoding: draft tokens that a step verifies together with the last token of a run.

A draw is a function of random stream, position and logits. So a run draws the same tokens with and
without drafts: a draft is accepted if the token drawn at its position is that token.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConstraintError
from ..kv.place import Cursor, path_ids
from ..kv.tree import TokenTree
from .draft_model import DraftModel, ModelDrafts
from .ngrams import CONTEXT, Acceptance, NGramIndex, RunLookup

if TYPE_CHECKING:
    from ..sampling.sampler import Sampler
    from .jobs import RunJob
    from .sequences import TokenSequence

_log = logging.getLogger(__name__)
MAX_DRAFT = 15  # draft tokens of a run in a step
MAX_TOKENS = 64  # tokens of a step with drafts
MAX_RUNS = 16  # more runs use the device well without drafts
MIN_GAIN = 1.05  # tokens per second with drafts by tokens per second without
_KEPT = 0.99  # of the counts of used drafts after each step, so that drafts are tried later


class Draft(NamedTuple):
    """Draft tokens of a run or of a commit's sequence.

    forced: for each token, True if the constraint allows only that token after the one before it.
    """

    tokens: Sequence[int]
    forced: Sequence[bool]


class StepCosts:
    """Seconds of a decoding step by its number of tokens, as measured.

    Each number has the lower envelope of its measurements, because other programs only slow a step
    down. An old measurement counts less and less, so that it is repeated. On a CPU the seconds are
    CPU time of the process, which other programs do not change.
    """

    SLOPE = 0.05  # assumed cost of one more token, by the cost of the smallest step
    _RISE = 0.1  # share of a slower measurement
    _AGING = 0.003  # of an old measurement, by the steps since
    _MIN_SHARE = 0.5

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._sizes: list[int] = []
        self._n_steps = 0

    def measure(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a step of `n_tokens`."""
        self._n_steps += 1
        if n_tokens > MAX_TOKENS:
            return
        known = self._seconds.get(n_tokens)
        if known is None:
            if self._sizes:  # the first step of a size often compiles or repacks something
                seconds = min(seconds, 2 * self.estimate(n_tokens))
            insort(self._sizes, n_tokens)
            known = seconds
        self._measured_at[n_tokens] = self._n_steps
        rise = self._RISE * (min(seconds, 2 * known) - known)
        self._seconds[n_tokens] = seconds if seconds < known else known + rise

    def is_known(self, n_tokens: int) -> bool:
        """Return True if a step of `n_tokens` was measured."""
        return n_tokens in self._seconds

    def estimate(self, n_tokens: int) -> float:
        """Return the seconds of a step of `n_tokens`. At least one size must be known."""
        sizes = self._sizes
        at = bisect_left(sizes, n_tokens)
        if at == len(sizes):
            below = sizes[-1]
            slope = self.SLOPE * self._seconds[sizes[0]]
            return self._aged(below) + slope * (n_tokens - below)
        above = sizes[at]
        if above == n_tokens or not at:
            return self._aged(above)
        below = sizes[at - 1]
        low, high = self._aged(below), self._aged(above)
        return low + max(high - low, 0.0) * (n_tokens - below) / (above - below)

    def _aged(self, size: int) -> float:
        """Return the measured seconds of a size, lower the older the measurement is."""
        age = self._n_steps - self._measured_at[size]
        return self._seconds[size] * max(1 - self._AGING * age, self._MIN_SHARE)


class BranchDrafts:
    """Drafts of a sequence that commits extend: forced tokens, else by prompt lookup.

    A commit runs draft tokens after its token. A draft pays only if the next commits extend the
    same sequence, so `use` counts that for all branches of the LM.

    owner: the `Speculation` that created these drafts; another one does not use them.

    depth: number of tokens of the path.

    n_pushed: tokens of commits so far.

    forced: for each of the next tokens, as far as known, True if the constraint forces it.
    """

    __slots__ = ("_lookup", "_use", "depth", "forced", "n_pushed", "owner")
    _LENGTH = 6  # `Acceptance` counts by length of match; `use` has a single one

    def __init__(self, owner: Speculation, lookup: RunLookup, use: Acceptance, depth: int) -> None:
        self.owner = owner
        self.depth = depth
        self.n_pushed = 0
        self.forced: list[bool] = []
        self._lookup = lookup
        self._use = use

    @property
    def is_next_forced(self) -> bool:
        """True if the constraint is known to force the next token."""
        return bool(self.forced) and self.forced[0]

    def push(self, token: int) -> None:
        """Append the token of a commit."""
        self._lookup.push(token, is_forced=bool(self.forced) and self.forced.pop(0))
        self.depth += 1
        self.n_pushed += 1

    def count_kept(self, n: int, *, is_used: bool) -> None:
        """Count draft tokens that were run: a commit has used them, or their KV was freed."""
        for _ in range(n):
            self._use.count(self._LENGTH, is_used)

    def draft(self, n: int) -> list[int]:
        """Return at most `n` draft tokens."""
        return self._lookup.draft(n)

    def chances(self, forced: Sequence[bool]) -> list[float]:
        """Return, for each draft token, the probability that a commit uses it."""
        use = self._use.rate(self._LENGTH)
        self._use.decay(_KEPT)
        return [use * chance for chance in self._lookup.chances(forced)]


class CommitRow(NamedTuple):
    """A sequence of a commit in a step, as `Speculation.plan` reads it.

    sampler: draws the token after the committed one.

    forced: empty, because branches commit forced tokens one by one.
    """

    sequence: TokenSequence
    sampler: Sampler
    forced: Sequence[int] = ()

    @property
    def drafts(self) -> BranchDrafts | None:
        """The source of draft tokens after the committed one."""
        return self.sequence.drafts

    @property
    def can_verify(self) -> bool:
        """True if draft tokens may follow the committed token."""
        return self.drafts is not None and self.drafts.n_pushed > 1  # many fork after one token

    def room(self, n_ctx: int) -> int:
        """Return how many more tokens the sequence can get."""
        return n_ctx - self.sequence.depth


class Speculation:
    """Proposes draft tokens for the runs and commits of an LM, and decides how many a step runs.

    The choice maximizes the expected tokens per second, from the acceptance of each row's drafts
    and the measured time of steps. Rows without any gain step as usual.
    """

    def __init__(self, tree: TokenTree, costs: StepCosts, model: DraftModel | None = None) -> None:
        """Index the tokens of a tree and all that are inserted later, or use a draft model.

        Args:
            tree: the token tree.
            costs: those of the engine's steps.
            model: the draft model; None: the n-grams of the tree.
        """
        self.model = model
        self.costs = costs
        self.min_gain = MIN_GAIN
        self._index = NGramIndex()
        self._acceptance = Acceptance()
        self._use = Acceptance()  # of the drafts of branches, see `BranchDrafts`
        if model is not None:
            return
        for node in tree.nodes():
            self._add(Cursor(node, node.end), len(node.tokens))
        tree.on_insert = self._add

    def _add(self, cursor: Cursor, n: int) -> None:
        """Index the last `n` tokens before a position of the tree."""
        first = max(cursor.depth - n - CONTEXT, 0)
        self._index.add_path(path_ids(cursor, first), cursor.depth - n - first)

    def new_drafts(self, cursor: Cursor) -> RunLookup | ModelDrafts:
        """Return the source of drafts of a run after the prompt at a cursor."""
        if self.model is not None:
            return ModelDrafts(Acceptance(self._acceptance, limit=24.0))
        context = path_ids(cursor, max(cursor.depth - CONTEXT, 0))
        return RunLookup(self._index, context, Acceptance(self._acceptance, limit=24.0))

    def push(self, sequence: TokenSequence, token: int) -> None:
        """Append the token of a commit to the drafts of its sequence, which must be open."""
        if self.model is not None:  # draws for runs only
            sequence.drafts = None
            return
        drafts = sequence.drafts
        if drafts is None or drafts.owner is not self or drafts.depth != sequence.depth:
            assert sequence.tail is not None
            cursor = sequence.tail.cursor
            context = path_ids(cursor, max(cursor.depth - CONTEXT, 0)) + sequence.tokens
            acceptance = Acceptance(self._acceptance, limit=24.0)
            lookup = RunLookup(self._index, context[-CONTEXT:], acceptance)
            drafts = sequence.drafts = BranchDrafts(self, lookup, self._use, sequence.depth)
        drafts.push(token)

    def is_worth_waiting(self, run: RunJob) -> bool:
        """Return True if the run should know the token that is being drawn before its next step.

        Only for engines that overlap steps: drafts can only follow a known token. The estimate
        ignores other runs.
        """
        source = run.drafts
        if source is None or not self.costs.is_known(1):
            return False
        chances = source.chances([False] * len(source.draft(MAX_DRAFT)))
        n_expected, plain_rate = 1.0, self.min_gain / self.costs.estimate(1)
        for n, chance in enumerate(chances[1:], 1):
            n_expected += chance
            if n_expected / self.costs.estimate(1 + n) > plain_rate:
                return True
        return False

    def plan(
        self, rows: Sequence[RunJob | CommitRow], budget: int, n_ctx: int
    ) -> dict[TokenSequence, Draft]:
        """Return the draft tokens to verify in the next step, for the rows that gain from them.

        A run executes forced tokens at once even without a draft. So drafts gain nothing by them.

        Args:
            rows: all runs and sequences of commits in the step, at most `MAX_RUNS`.
            budget: maximum number of draft tokens of the step.
            n_ctx: maximum tokens of a path.
        """
        n_plain = sum([1 + len(row.forced) for row in rows])
        budget = min(budget, MAX_TOKENS - n_plain)
        drafts: list[tuple[TokenSequence, list[int], list[bool]]] = []
        # Of each draft: (probability, length), where the next token is not forced.
        lengths: list[list[tuple[float, int]]] = []
        queue: list[tuple[float, int, int]] = []  # (-probability, number of draft, index of length)
        for row in rows:
            source = row.drafts
            if source is None or not row.can_verify:
                continue
            room = min(MAX_DRAFT, budget, row.room(n_ctx) - 1)
            draft, forced = _try_proposal(row, room) if room > 0 else ([], [])
            if not draft:
                continue
            chances = enumerate(source.chances(forced[:-1]), 1)
            is_commit = isinstance(row, CommitRow)
            useful = [(chance, n) for n, chance in chances if is_commit or not forced[n]]
            if useful:
                heapq.heappush(queue, (-useful[0][0], len(drafts), 0))
                drafts.append((row.sequence, draft, forced))
                lengths.append(useful)
        # Steps with forced tokens are not measured.
        if not queue or not self.costs.is_known(len(rows)):
            return {}
        taken, best = [0] * len(drafts), [0] * len(drafts)
        n_expected, n_step = float(len(rows)), n_plain
        best_rate = self.min_gain * n_expected / self.costs.estimate(n_plain)
        while queue:
            _, number, at = heapq.heappop(queue)
            chance, n = lengths[number][at]
            n_step += n - taken[number]
            if n_step > n_plain + budget:
                break
            taken[number] = n
            n_expected += chance
            rate = n_expected / self.costs.estimate(n_step)
            if rate > best_rate:
                best_rate, best = rate, taken.copy()
            if at + 1 < len(lengths[number]):
                heapq.heappush(queue, (-lengths[number][at + 1][0], number, at + 1))
        pairs = zip(drafts, best, strict=True)
        return {path: Draft(draft[:n], forced[:n]) for (path, draft, forced), n in pairs if n}


def _try_proposal(row: RunJob | CommitRow, n: int) -> tuple[list[int], list[bool]]:
    """Return the result of `_proposal`, without tokens if the constraint raises.

    A draw that needs the constraint then reports its error, for its own job only.
    """
    try:
        return _proposal(row, n)
    except Exception as error:
        _log.warning("a constraint failed for draft tokens: %r", error)
        return [], []


def _proposal(row: RunJob | CommitRow, n: int) -> tuple[list[int], list[bool]]:
    """Return at most `n` draft tokens, and the result of `forced_in` for them.

    Those of commits are the tokens that the constraint forces, if there are any.
    """
    source = row.drafts
    assert source is not None
    if not isinstance(source, BranchDrafts):
        draft = source.draft(n)
        return draft, forced_in(row.sampler, draft) if draft else []
    draft = row.sampler.forced()[:n]
    forced = [True] * (len(draft) + 1)
    if not draft:
        draft = source.draft(n)
        forced = forced_in(row.sampler, draft) if draft else []
    source.forced = forced[:-1]
    return draft, forced


def forced_in(sampler: Sampler, draft: Sequence[int]) -> list[bool]:
    """Return, for each draft token and the token after them, True if the constraint forces it.

    The result ends with the first token that the constraint forbids, or after which the text must
    end.
    """
    if sampler.matcher is None:
        return [False] * (len(draft) + 1)
    matcher, flags, known = sampler.matcher.clone(), list[bool](), list[int]()
    for token in draft:
        flags.append(bool(known))
        if not (token == known.pop(0) if known else matcher.is_allowed(token)):
            return flags
        try:
            matcher.accept(token)
        except ConstraintError:
            return flags
        if matcher.must_end:
            return flags
        known = known or list(matcher.forced(sampler.banned, sampler.biased))
    return [*flags, bool(known)]


def advanced_samplers(
    sampler: Sampler, draft: Sequence[int], stops: frozenset[int]
) -> tuple[list[int], list[Sampler]]:
    """Return the draft tokens that may follow each other, and the sampler of each position.

    The draft is cut before an end token, before a token that the constraint forbids, and before one
    after which the text must end. The samplers draw after the last token of the run and after each
    draft token.
    """
    tokens, samplers = list[int](), [sampler]
    for token in draft:
        if token in stops:
            break
        if sampler.needs_host:
            sampler = sampler.clone()
            if sampler.matcher is not None and not sampler.matcher.is_allowed(token):
                break
            try:
                sampler.accept(token)
            except ConstraintError:  # the draw of this token fails with the reason
                break
            if sampler.matcher is not None and sampler.matcher.must_end:
                break
        tokens.append(token)
        samplers.append(sampler)
    return tokens, samplers
