"""The state of one branch: position, sampler and accepted tokens; the registry of live branches."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from .._core.kv.place import Place
from .._core.sampling.metrics import surprisal
from .._core.sampling.params import SamplingParams
from .._core.sampling.rng import stream_of
from .._core.sampling.sampler import BROKEN, Sampler, draw_rows
from .._core.sched.driver import deferred_interrupt
from .._core.sched.logits_cache import LogitsRow
from .._core.validation import as_index
from ..errors import ConfigError, ConstraintError, DeadEnd, ForwardError, StaleHandle, WeftError
from ..lm.lm import LM, Adapters

if TYPE_CHECKING:
    from .._core.sched.sequences import TokenSequence
    from .branch import Branch

Floats = NDArray[np.float32]


class State:
    """The internal state of a `Branch`, its subclass; commits and draws change it."""

    def __init__(self, lm: LM, place: Place, params: SamplingParams, sampler: Sampler) -> None:
        self.lm = lm
        self.registry = BranchRegistry.for_lm(lm)
        self.number = next(self.registry.numbers)
        self.sequence: TokenSequence | None = None
        self._place = place
        self.depth = place.depth  # `position`, without the check that the branch is open
        self.params = params
        self.sampler = sampler  # with its random stream, counted tokens and matcher
        self.row: LogitsRow | None = None  # the model's logits at the tip; None before any token
        self.custom_logits: Floats | None = None  # set by the caller; draws use them
        self.last: Accepted | None = None  # the last accepted token
        self._rows = lm.scheduler.logits_cache
        self._drawn: Produced | None = None
        self._drawn_when = 0
        self.steering: dict[int, float] = {}
        self.grammar_from = 0  # tokens accepted before the grammar was set
        self.stream = lm.text.stream()
        self.claimed_by: Future[Any] | None = None
        self.ended_by: str | None = None
        self.ahead: list[int] = []  # accepted, and not yet committed or prefilled
        self.seed = params.seed if params.seed is not None else 0
        self.lineage: tuple[int, ...] = (0,)
        self.unused_in: Forks | None = None  # the parent's forks, until the first token is run

    @property
    def position(self) -> int:
        """The number of tokens of the path: the position of the next token."""
        self.check_open()
        return self.depth

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter that the branch runs with; None: the base model."""
        return Adapters.name_of(self._place.namespace)

    @property
    def drawn(self) -> Produced | None:
        """The next token, already drawn from the current logits; `produce` returns it again.

        None if it was not drawn yet, or if the cached logits were cleared since.
        """
        return self._drawn if self._drawn_when == self._rows.n_clears else None

    @drawn.setter
    def drawn(self, drawn: Produced | None) -> None:
        self._drawn, self._drawn_when = drawn, self._rows.n_clears

    @property
    def place(self) -> Place:
        """The tip's place in the token tree, for other calls of the LM.

        Reading it ends the open sequence: the scheduler moves committed tokens into the tree at the
        next step, and the next commit is slower. `base`, `ids` and `position` avoid that.
        """
        sequence, self.sequence = self.sequence, None
        if sequence is not None:
            place = self.lm.scheduler.sequences.release(sequence)
            # An interrupted commit may have run its token nevertheless.
            self._place = place if place.depth == self.depth else place.at(self.depth)
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        sequence, self.sequence = self.sequence, None
        if sequence is not None:
            self.lm.scheduler.sequences.release(sequence)
        self._place, self.depth = place, place.depth

    @property
    def base(self) -> Place:
        """The place where the branch's open sequence begins; the tip without one."""
        return self._place if self.sequence is None else self.sequence.base

    def tip(self) -> Place:
        """Return the tip as a read-only place. It keeps the open sequence, unlike `place`."""
        sequence = self.sequence
        if sequence is None:
            return self._place
        with self.lm.scheduler.lock:
            return sequence.end().at(self.depth)

    def ids(self) -> list[int]:
        """Return all token ids of the path, a new list."""
        sequence = self.sequence
        if sequence is None:
            return self._place.ids()
        with self.lm.scheduler.lock:
            return sequence.end().ids()[: self.depth]

    def open_sequence(self) -> TokenSequence:
        """Return the scheduler's sequence that commits extend; open one if there is none."""
        if self.sequence is None:
            self.sequence = self.lm.scheduler.sequences.create(self, self._place)
        return self.sequence

    def advance(self, sequence: TokenSequence, token: int) -> None:
        """Move the tip forward by one token that a commit has run on a sequence of this branch."""
        if self.unused_in is not None:
            self.unused_in.set_used(self)
        if self.sequence is sequence:
            self.depth += 1
        else:  # forked while the commit ran
            self.place = self.lm.place((token,), after=self._place)

    def check_open(self) -> None:
        """Raise StaleHandle if the branch has ended."""
        if self.ended_by is not None:
            raise StaleHandle(f"{self!r} was ended by {self.ended_by}; fork or create another")

    def validate_token(self, token: int) -> int:
        """Return a token id as int. Raises: ConfigError for an id outside the vocabulary."""
        n_vocab = self.lm.info.n_vocab or self.lm.text.n_vocab
        if type(token) is int and 0 <= token < n_vocab:
            return token
        index = as_index(token)
        if index is None:
            raise ConfigError(f"a token is {token!r}; allowed are ids from 0 to {n_vocab - 1}")
        if not 0 <= index < n_vocab:
            raise ConfigError(f"token id {index}; allowed are 0 to {n_vocab - 1}")
        return index

    # Accepting --------------------------------------------------------------------------------

    def produced(self, token: int, logprob: float, kept: float) -> Produced:
        """Return a drawn token as a `Produced`, with its text.

        logprob: by the model. kept: logprob among the tokens that the filters kept.
        """
        constraint = self.params.constraint
        is_stop = token in self.lm.text.stop_ids or (
            constraint is not None and token in constraint.stop_ids
        )
        return Produced(token, self.stream.peek(token), is_stop, logprob, kept)

    def accept_without_run(self, token: int) -> None:
        """Update sampler, grammar and metrics for a token without running the model on it."""
        at = self.position + len(self.ahead)
        if at >= self.lm.n_ctx:
            self.lm.check_path((token,), at)  # raises ContextOverflow
        surprisals = None if self.ahead else self.surprisals(token)
        if surprisals is None and self.position and not self.ahead:
            surprisals = (surprisal(self.model_logits(), token), None)
        sampler = self.sampler.clone() if self.sampler.needs_host else self.sampler
        sampler.accept(token)
        last = Accepted(self.last, at, token, *(surprisals or (None, None)))
        with deferred_interrupt():
            self.sampler, self.drawn, self.last = sampler, None, last
            self.ahead.append(token)

    def is_accepted_ahead(self, token: int) -> bool:
        """Return True if `accept` has already counted this token, so that a commit must not.

        Raises: ConfigError if it has counted another token.
        """
        if not self.ahead:
            return False
        self.check_ahead([token])
        return True

    def check_ahead(self, ids: Sequence[int]) -> int:
        """Return how many of these tokens `accept` has already counted.

        Raises: ConfigError if they differ from the counted ones.
        """
        n = min(len(ids), len(self.ahead))
        if list(ids[:n]) != self.ahead[:n]:
            raise ConfigError(
                f"{self!r} has accepted {self.ahead[:n]}; what is run next must be that,"
                f" not {list(ids[:n])}"
            )
        return n

    def is_surprisal_unknown(self, number: int = 0) -> bool:
        """Return True if a token that `accept` counted has no surprisal yet.

        number: its index among the tokens accepted ahead. Its logits exist after the tokens before
            it ran.
        """
        behind = len(self.ahead) - number - 1
        record = next(islice(accepted_chain(self.last), behind, None))
        return record.own()[0] is None

    def mark_accepted_run(self, surprisals: Sequence[float | None]) -> None:
        """Remove the first tokens of `ahead`, which have run, and fill in their surprisals.

        `accept_without_run` has added the tokens to the chain of accepted tokens.

        surprisals: one per token that has run, in nats; None where it is known already.
        """
        n, values = len(self.ahead), list(surprisals)
        if any(value is not None for value in values):
            records = list(islice(accepted_chain(self.last), n))[::-1]
            last = records[0].previous
            for record, value in zip_longest(records, values):
                raw, kept = record.own()
                own = (value if raw is None else raw, kept)
                last = Accepted(last, record.position, record.token, *own)
            self.last = last
        del self.ahead[: len(values)]

    def surprisals(self, token: int) -> tuple[float | None, float | None] | None:
        """Return a token's raw and filtered surprisal in nats, from the current logits.

        The raw one is None if only logits set by the caller are known. The filtered one is None
        unless the token was drawn. The result is None if logits must be computed first.
        """
        drawn = self.drawn
        if drawn is not None and drawn.token == token:
            return None if self.row is None else -drawn.logprob, -drawn.kept_logprob
        if self.row is None:
            return None if self.custom_logits is None else (None, None)
        logits = self._rows.read(self.row)
        return None if logits is None else (surprisal(logits, token), None)

    # Logits -----------------------------------------------------------------------------------

    def set_tip(self, place: Place, row: LogitsRow | None) -> None:
        """Move the branch to another place.

        row: the logits there; None to compute them when needed.
        """
        if self.unused_in is not None:
            self.unused_in.set_used(self)
        self.place = place
        self.drawn = self.custom_logits = None
        self.row = (row or LogitsRow()) if place.depth else None

    def effective_logits(self) -> Floats:
        """Return the logits that draws use, [V], read-only: custom ones, else the model's."""
        self.check_open()
        return self.model_logits() if self.custom_logits is None else self.custom_logits

    def model_logits(self) -> Floats:
        """Return the model's logits after the last token, [V]; read-only.

        Runs the model if they were evicted.
        """
        from .calls import ReadCall, run

        row = self.require_row()
        logits: Floats | None = self._rows.read(row)
        while logits is None:
            run(ReadCall(self.lm, [self]))  # type: ignore[list-item]
            logits = self._rows.read(row)
        return logits

    def require_row(self) -> LogitsRow:
        """Return the reference to the cached logits. Raises: ConfigError before any token ran."""
        self.check_open()
        if self.row is None:
            raise ConfigError(f"{self!r} has no logits yet; prefill or commit a token first")
        return self.row

    def row_for_draw(self) -> LogitsRow | None:
        """Return the reference to the cached logits that a draw reads.

        None if the branch has custom logits only.
        """
        self.check_open()
        return None if self.row is None and self.custom_logits is not None else self.require_row()

    def model_logprob(self, token: int, logprob: float) -> float:
        """Return a drawn token's logprob by the model.

        logprob: by the logits it was drawn from, which may be custom.
        """
        if self.custom_logits is None or self.row is None:
            return logprob
        return -surprisal(self.model_logits(), token)

    def steered_sampler(self) -> Sampler:
        """Return the sampler with the biases of `steer` added."""
        return self.sampler.with_biases(self.steering) if self.steering else self.sampler

    def validate_biases(
        self, given: Mapping[int, float] | Iterable[tuple[int, float]]
    ) -> dict[int, float]:
        """Return token biases as a dict; raise ConfigError for an invalid token or value."""
        biases = SamplingParams(logit_bias=given).logit_bias
        return {self.validate_token(token): bias for token, bias in biases}

    # Sampler ----------------------------------------------------------------------------------

    def set_params(self, params: SamplingParams, *, new_grammar: bool = False) -> None:
        """Change the sampling parameters; keep the random stream, counted tokens and grammar."""
        fresh = self.lm.sampler(params, self.sampler.stream, in_steps=True)
        fresh.add_generated(accepted_tokens(self.last) if fresh.counts_tokens else ())
        if new_grammar:
            self.grammar_from = 0 if self.last is None else self.last.n
        else:
            fresh.matcher = self.sampler.matcher
        self.params, self.sampler, self.drawn = params, fresh, None

    def sampler_at(self, last: Accepted | None, stream: int) -> Sampler:
        """Return a sampler in its state after the accepted token `last`. Cost: O(accepted tokens).

        stream: the random stream.
        """
        sampler = self.lm.sampler(self.params, stream)
        if sampler.needs_host:
            tokens = accepted_tokens(last)
            sampler.add_generated(tokens)
            if sampler.matcher is not None:
                for token in tokens[self.grammar_from :]:
                    sampler.matcher.accept(token)
        return sampler

    def accepted_by(self, position: int) -> Accepted | None:
        """Return the last accepted token before a position. Cost: O(tokens after it)."""
        return next((each for each in accepted_chain(self.last) if each.position < position), None)

    def reseed(self, seed: int, lineage: tuple[int, ...]) -> None:
        """Replace the random stream.

        lineage: numbers of the forks from the root to this branch, which select the stream.
        """
        self.seed, self.lineage = seed, lineage
        self.sampler = self.sampler.clone()
        self.sampler.stream = stream_of(seed, lineage)
        self.drawn = None


Base = Literal["nats", "bits"]
LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Produced:
    """A token that `produce` drew and that is not committed yet.

    Attributes:
        token: its id.
        text: what committing it adds; "" while a character is incomplete.
        is_stop: True for an end token; do not commit it.
        logprob: by the model, raw, over the full vocabulary, in nats; by custom logits if the
            branch has no other.
        kept_logprob: among the tokens that the filters kept, in nats.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    kept_logprob: float

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Metrics:
    """Statistics of a branch.

    Attributes:
        position: number of tokens of the path.
        n_accepted: accepted tokens of the path.
        perplexity: over accepted tokens, by the model; inf without any.
        sampling_perplexity: over drawn tokens, by the filtered distributions; inf without any.
        kv_tokens: tokens of the path whose KV is resident.
        kv_bytes: the size of that KV.
    """

    position: int
    n_accepted: int
    perplexity: float
    sampling_perplexity: float
    kv_tokens: int
    kv_bytes: int


class Accepted:
    """An accepted token, linked to the one before it, with running sums of surprisals.

    Forks share the chain.

    position: index of the token in the path.
    token: its id.
    n: number of accepted tokens up to here.
    raw, n_raw: sum of the known raw surprisals up to here, in nats, and their number.
    kept, n_kept: the same for surprisals under the filtered distributions.
    """

    __slots__ = ("kept", "n", "n_kept", "n_raw", "position", "previous", "raw", "token")

    def __init__(
        self,
        previous: Accepted | None,
        position: int,
        token: int,
        surprisal: float | None,
        kept_surprisal: float | None,
    ) -> None:
        self.previous = previous
        self.position = position
        self.token = token
        if previous is None:
            self.n, self.n_raw, self.n_kept = 1, 0, 0
            self.raw, self.kept = 0.0, 0.0
        else:
            self.n, self.n_raw, self.n_kept = previous.n + 1, previous.n_raw, previous.n_kept
            self.raw, self.kept = previous.raw, previous.kept
        if surprisal is not None and isfinite(surprisal):
            self.n_raw += 1
            if surprisal > 0:
                self.raw += surprisal
        if kept_surprisal is not None and isfinite(kept_surprisal):
            self.n_kept += 1
            if kept_surprisal > 0:
                self.kept += kept_surprisal

    def own(self) -> tuple[float | None, float | None]:
        """Return this token's own raw and filtered surprisal, in nats; None where unknown."""
        previous = self.previous
        raw, n_raw = (previous.raw, previous.n_raw) if previous is not None else (0.0, 0)
        kept, n_kept = (previous.kept, previous.n_kept) if previous is not None else (0.0, 0)
        return (
            self.raw - raw if self.n_raw > n_raw else None,
            self.kept - kept if self.n_kept > n_kept else None,
        )


def accepted_chain(last: Accepted | None) -> Iterator[Accepted]:
    """Yield the accepted tokens from `last` back to the first."""
    while last is not None:
        yield last
        last = last.previous


def accepted_tokens(last: Accepted | None) -> list[int]:
    """Return the ids of the accepted tokens, first to last. Cost: O(tokens)."""
    return [each.token for each in accepted_chain(last)][::-1]


def perplexity(total: float, n: int) -> float:
    """Return exp(total / n): `total` is a sum of `n` surprisals in nats. inf if n is 0."""
    return math.exp(total / n) if n else math.inf


def convert_nats(nats: float, base: str) -> float:
    """Convert nats to `base`, "nats" or "bits". Raises: ValueError for another base."""
    if base not in ("nats", "bits"):
        raise ValueError(f'base is {base!r}; allowed are "nats" and "bits"')
    return nats / LN2 if base == "bits" else nats


def draw(branches: Sequence[State]) -> list[Produced]:
    """Draw the next token of each branch, in one batch, and store it as `drawn`.

    Branches with a stored token return it. Raises: DeadEnd if some branches have no allowed token;
    the other branches have drawn then.
    """
    # Read once: another thread may clear the cached tokens at any time.
    cached = [branch.drawn for branch in branches]
    missing = [branch for branch, drawn in zip(branches, cached, strict=True) if drawn is None]
    fresh = iter(_draw_uncached(missing) if missing else ())
    return [next(fresh) if drawn is None else drawn for drawn in cached]


def _draw_uncached(branches: Sequence[State]) -> list[Produced]:
    """Draw a token for each branch, ignoring stored ones."""
    rows = [branch.effective_logits() for branch in branches]
    samplers = [branch.steered_sampler() for branch in branches]
    positions = [branch.position for branch in branches]
    result = draw_rows(rows, samplers, positions, kept=True)
    assert result.kept is not None
    columns = (result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist())
    dead: list[tuple[State, int]] = []
    produced_tokens: list[Produced] = []
    for branch, token, logprob, kept in zip(branches, *columns, strict=True):
        if token < 0:
            dead.append((branch, token))
        else:
            branch.drawn = branch.produced(token, branch.model_logprob(token, logprob), kept)
            produced_tokens.append(branch.drawn)
    if dead:  # the other branches have cached their token
        raise _draw_error(*dead[0], [branch for branch, _ in dead])
    return produced_tokens


def _draw_error(branch: State, token: int, dead: Sequence[State]) -> WeftError:
    """Return the error for branches without an allowed token, or with invalid logits.

    token: the error code that the draw returned for `branch`.
    """
    if token == BROKEN:
        return ForwardError(f"the model gave logits with NaN or +inf for {branch!r}")
    matcher = branch.sampler.matcher
    if matcher is not None and matcher.failure is not None:
        return ConstraintError(f"{branch!r}: {matcher.failure}")
    named = ", ".join(map(repr, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
    return DeadEnd(
        f"grammar, bias and steering leave {named} no token",
        token_ids=branch.ids(),
        branches=dead,
    )


@dataclass(frozen=True, slots=True)
class Pressure:
    """Use of an LM's KV memory, as `BranchStore.pressure()` measured it.

    Sizes are in slots. One slot stores the KV of one token.

    Attributes:
        capacity: slots of the KV budget; None if the LM has no budget.
        resident: slots that have KV, and slots that running branches reserve for their next tokens.
        pinned: slots that eviction cannot free now, because running work or a pin needs them.
        n_branches: number of branches of the LM that are not disposed.
        n_active: number of those branches whose last token has KV on the device.
    """

    capacity: int | None
    resident: int
    pinned: int
    n_branches: int
    n_active: int

    @property
    def remaining(self) -> int | None:
        """Slots for new tokens, including those that eviction can free; None without a budget."""
        return None if self.capacity is None else self.capacity - self.pinned


class Forks:
    """The live forks of one branch, by number.

    It keeps a strong reference to forks that have not run a token, as lloyal.node does, so that a
    loop over `store.available` ends. Afterwards a fork lives as long as the caller references it.
    """

    __slots__ = ("_unused", "_used")

    def __init__(self) -> None:
        self._unused: dict[int, State] = {}
        self._used: WeakValueDictionary[int, State] | None = None

    def add(self, fork: State) -> None:
        """Add a new fork, with a strong reference."""
        self._unused[fork.number] = fork
        fork.unused_in = self

    def set_used(self, fork: State) -> None:
        """Make the reference to a fork weak, after it has run a token."""
        fork.unused_in = None
        if self._unused.pop(fork.number, None) is not None:
            if self._used is None:
                self._used = WeakValueDictionary()
            self._used[fork.number] = fork

    def discard(self, fork: State) -> None:
        """Remove a fork that has ended."""
        fork.unused_in = None
        self._unused.pop(fork.number, None)
        if self._used is not None:
            self._used.pop(fork.number, None)

    def live(self) -> list[State]:
        """Return the live forks, oldest first."""
        used = () if self._used is None else self._used.values()
        return sorted([*self._unused.values(), *used], key=lambda fork: fork.number)


class BranchRegistry:
    """The live branches of one LM."""

    def __init__(self, lm: LM) -> None:
        self._lm = weakref.ref(lm)
        self.branches: weakref.WeakSet[Branch] = weakref.WeakSet()
        self.numbers = itertools.count(1)
        self.claim_lock = threading.Lock()

    @classmethod
    def for_lm(cls, lm: LM) -> BranchRegistry:
        """Return the registry of an LM; create it at the first call."""
        registry: BranchRegistry | None = lm.face_state.get(cls)
        return lm.face_state.setdefault(cls, cls(lm)) if registry is None else registry

    def active(self, branch: State) -> bool:
        """Return True if the KV of the branch's last token is resident."""
        return 0 < branch.position == self.kv_tokens(branch)

    def kv_tokens(self, branch: State) -> int:
        """Return how many tokens of a branch's path have resident KV."""
        lm = self.lm()
        with lm.scheduler.lock:
            sequence = branch.sequence
            if sequence is not None and sequence.tail is not None:  # which has its path pinned
                return min(sequence.base.depth + sequence.n_in_tail(), branch.position)
            return lm.scheduler.sequences.n_cached(branch.tip())

    def available(self) -> int:
        """Return how many more live branches `n_seq_max` allows; 0 if none."""
        return max(0, self.lm().n_seq_max - len(self.branches))

    def pressure(self) -> Pressure:
        """Return how full the LM is. Cost: O(live branches)."""
        lm = self.lm()
        lm.driver.exclusive(lm.scheduler.close_idle_sequences)
        budget = lm.tree.budget
        branches = list(self.branches)
        return Pressure(
            capacity=budget.capacity,
            resident=budget.resident + budget.tails,
            pinned=budget.unevictable,
            n_branches=len(branches),
            n_active=sum(self.active(branch) for branch in branches),
        )

    def lm(self) -> LM:
        """Return the LM; it exists as long as one of its branches."""
        lm = self._lm()
        assert lm is not None
        return lm
