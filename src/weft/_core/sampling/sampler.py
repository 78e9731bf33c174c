"""Samplers of runs, and `BatchSampler`, which draws for many of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...constraints.base import Matcher
from ...constraints.grammar import Masks
from ...errors import ConfigError
from . import filters
from .dry import NO_BREAKERS, DryHistory, SequenceBreakers
from .history import History
from .metrics import (
    GROUP_SIZE,
    BufferPool,
    Moments,
    group_of,
    group_peaks,
    members,
    moments,
    n_groups,
)
from .params import PARAMETERS, SamplingParams
from .rng import GumbelDraw, StreamNoise, argmax_all, argmax_filtered, xtc_numbers

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Doubles = NDArray[np.float64]

NOTHING = -1  # drawn if constraint and bias allow no token
BROKEN = -2  # drawn if the logits have NaN or +inf, or are all -inf
# Maximum logits per block, so that temporary arrays stay small.
_BLOCK_LOGITS = 1 << 22
# Maximum logits per reduction, so that they stay in the CPU cache.
_CACHE_LOGITS = 1 << 17
# Gathering one logit costs this many times as much as reading it in a pass over the row.
_SCATTER_COST = 256
# Parameters are clipped to these bounds, which no draw depends on: logits are float32.
_TINY, _HUGE = 1e-30, 1e30
_ROW_FIELDS = (
    *("greedy", "temperature_before", "temperature_after", "xtc_threshold"),
    *("repetition", "presence", "frequency"),
)
# At its default a filter drops nothing.
_NEUTRAL = SamplingParams()
_OFF = {name: getattr(_NEUTRAL, name) for name, of in PARAMETERS.items() if of.is_filter}


class DrawnToken(NamedTuple):
    """One drawn token and its statistics; see `DrawResult`.

    A statistic is None if the engine does not report it.
    """

    token: int
    logprob: float | None
    entropy: float | None
    legal_logmass: float | None = None
    kept: float | None = None


_create_drawn = partial(tuple.__new__, DrawnToken)  # three times as fast as DrawnToken(…)


@dataclass(slots=True)
class DrawResult:
    """Drawn tokens, one per sampler, in the samplers' order.

    ids: int64 [B].
    logprobs, entropies: float32 [B], in nats, of the raw logits over the full vocabulary.

    kept: float32 [B], log-probability among the tokens that the filters keep. None if not
    requested, or not reported.

    legal_logmass: float32 [B], in nats: log of the raw probability of all tokens that constraint
    and bans allow. About 0 for a sampler without a constraint; None if no sampler has one.
    """

    ids: Ids
    logprobs: Floats
    entropies: Floats
    kept: Floats | None = None
    legal_logmass: Floats | None = None

    def drawn(self) -> list[DrawnToken]:
        """Return one DrawnToken per sampler."""
        legal, kept = self.legal_logmass, self.kept
        values = zip(
            self.ids.tolist(),
            self.logprobs.tolist(),
            self.entropies.tolist(),
            repeat(None) if legal is None else legal.tolist(),
            repeat(None) if kept is None else kept.tolist(),
            strict=False,
        )
        return list(map(_create_drawn, values))


@dataclass(slots=True)
class DrawBatch:
    """Sampling work for one step: member i of `sampler` draws from logits row rows[i].

    rows: int64 [B].
    positions: uint64 [B], absolute positions of the drawn tokens.
    kept: compute `DrawResult.kept`.
    """

    rows: Ids
    sampler: BatchSampler
    positions: NDArray[np.uint64]
    kept: bool = False

    def on_host(
        self, logits: Floats | Sequence[Floats], reductions: Reductions | None = None
    ) -> DrawResult:
        """Draw with the NumPy reference sampler, from float32 [R, V] or R rows of it.

        reductions: the engine's own; None uses NumPy's.
        """
        raw = logits if isinstance(logits, np.ndarray) else np.stack(logits)
        return self.sampler.draw(
            raw, self.rows, self.positions, kept=self.kept, reductions=reductions
        )


_NO_TOKENS: frozenset[int] = frozenset()  # shared by all samplers


def _banned(biases: Iterable[tuple[int, float]]) -> frozenset[int]:
    return frozenset(token for token, bias in biases if bias == -math.inf)


def _biased(biases: Iterable[tuple[int, float]]) -> frozenset[int]:
    """Return the tokens with a bias that is neither 0 nor -inf."""
    return frozenset(token for token, bias in biases if bias not in (0, -math.inf))


class Sampler:
    """State of one run's sampling: parameters, random stream, penalty counts and constraint
    matcher.

    needs_host: the next draw depends on earlier tokens (penalties, DRY, constraint), which the host
    must know.

    matcher: the constraint's state, owned by this sampler; None without a constraint.

    resumed: the matcher has accepted tokens of an earlier run.

    banned: token ids with a bias of -inf. biased: those with another bias.

    reports_kept: the tokens of its run are reported with `DrawResult.kept`.
    """

    __slots__ = (
        "_dry",
        "_history",
        "banned",
        "biased",
        "greedy",
        "matcher",
        "needs_host",
        "params",
        "reports_kept",
        "resumed",
        "stream",
    )

    def __init__(
        self,
        params: SamplingParams,
        stream: int,
        matcher: Matcher | None = None,
        breakers: SequenceBreakers = NO_BREAKERS,
    ) -> None:
        """breakers: the tokens of `params.dry_sequence_breakers`; used with DRY only."""
        self.params = params
        self.stream = stream
        self.matcher = matcher
        self.greedy = params.temperature == 0
        self.banned = _banned(params.logit_bias) if params.logit_bias else _NO_TOKENS
        self.biased = _biased(params.logit_bias) if params.logit_bias else _NO_TOKENS
        self.resumed = self.reports_kept = False
        penalised = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self._history = History(params.penalty_last_n) if penalised else None
        self._dry = DryHistory(params, breakers) if params.dry_multiplier else None
        self.needs_host = self.counts_tokens or matcher is not None

    @property
    def history(self) -> History | None:
        """The tokens that the penalties of counts look at; None without such a penalty."""
        return self._history

    @property
    def dry(self) -> DryHistory | None:
        """The tokens in which DRY looks for repetitions; None without DRY."""
        return self._dry

    @property
    def counts_tokens(self) -> bool:
        """True with penalties or DRY: earlier tokens change the logits."""
        return self._history is not None or self._dry is not None

    def forced(self) -> list[int]:
        """Return the next tokens that the constraint forces and no bias affects."""
        return [] if self.matcher is None else self.matcher.forced(self.banned, self.biased)

    def add_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Add the prompt's tokens to the histories of repetition_penalty and DRY.

        The other penalties do not count them.
        """
        if self._history is not None:
            self._history.add_prompt(prompt_ids)
        if self._dry is not None:
            self._dry.add(prompt_ids)

    def accept(self, token: int) -> None:
        """Count one generated token, and advance the constraint by it.

        Raises: ConstraintError if the constraint forbids it; nothing is counted then.
        """
        if self.matcher is not None:
            self.matcher.accept(token)
        self.add_generated((token,))

    def add_generated(self, tokens: Sequence[int]) -> None:
        """Count generated tokens for the penalties and DRY only."""
        if self._history is not None:
            for token in tokens:
                self._history.add_generated(token)
        if self._dry is not None:
            self._dry.add(tokens)

    def with_biases(self, biases: Mapping[int, float]) -> Sampler:
        """Return a sampler for one draw with additional biases; -inf bans a token.

        It shares history and matcher with this one.
        """
        both = dict(self.params.logit_bias)
        for token, bias in biases.items():
            before = both.get(token, 0.0)
            both[token] = -math.inf if -math.inf in (before, bias) else before + bias
        twin = Sampler(
            replace(self.params, logit_bias=tuple(both.items())), self.stream, self.matcher
        )
        twin._history, twin._dry = self._history, self._dry
        return twin

    def clone(self) -> Sampler:
        """Return a sampler with the same stream and copies of history and matcher."""
        matcher = None if self.matcher is None else self.matcher.clone()
        twin = Sampler(self.params, self.stream, matcher)
        twin._history = None if self._history is None else self._history.copy()
        twin._dry = None if self._dry is None else self._dry.copy()
        return twin


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Parameters of B rows as arrays [B], created once for rows that draw together."""

    greedy: Flags  # temperature is 0
    temperature_before: Doubles  # divides logits before the filters; 1 if not requested
    temperature_after: Doubles  # divides logits after the filters; 1 if not requested
    filters: Mapping[str, NDArray[Any]]  # the values of each filter, by parameter name
    xtc_threshold: Doubles  # the probability of a top choice
    repetition: Floats  # repetition_penalty
    presence: Floats  # presence_penalty
    frequency: Floats  # frequency_penalty
    bias_rows: Ids  # the row of each bias
    bias_ids: Ids  # the token id of each bias
    bias: Floats  # the value of each bias
    active: Mapping[str, Flags] = field(init=False)  # filters in order, and the rows that use them
    filtered: Flags = field(init=False)  # not greedy, with a filter
    unfiltered: Flags = field(init=False)  # not greedy, without a filter
    top_p_first: Flags = field(init=False)  # top-p is the first filter of the row
    all_unfiltered: bool = field(init=False)  # all rows are unfiltered

    def __post_init__(self) -> None:
        rows_of = {name: values != _OFF[name] for name, values in self.filters.items()}
        active = {name: rows for name, rows in rows_of.items() if rows.any()}
        any_before = top_p_first = np.zeros(len(self.greedy), dtype=bool)
        for name, rows in active.items():
            if name == "top_p":
                top_p_first = rows & ~any_before
            any_before = any_before | rows
        derived = {
            "active": active,
            "filtered": any_before & ~self.greedy,
            "unfiltered": ~(any_before | self.greedy),
            "top_p_first": top_p_first,
            "all_unfiltered": not active and not self.greedy.any(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> SamplingArrays:
        """Return the arrays of B parameter objects."""
        greedy = np.array([p.temperature == 0 for p in params], dtype=bool)
        first = np.array([p.temperature_first for p in params], dtype=bool)
        temperature = np.where(greedy, 1.0, _clip([p.temperature for p in params], _TINY))
        biases = [(row, *pair) for row, p in enumerate(params) for pair in p.logit_bias]
        rows, ids, values = zip(*biases, strict=True) if biases else ((), (), ())
        return cls(
            greedy=greedy,
            temperature_before=np.where(first, temperature, 1.0),
            temperature_after=np.where(first, 1.0, temperature),
            filters={
                name: np.array([getattr(p, name) for p in params], dtype=type(off))
                for name, off in _OFF.items()
            },
            xtc_threshold=np.array([p.xtc_threshold for p in params], dtype=np.float64),
            repetition=_clip([p.repetition_penalty for p in params], _TINY).astype(np.float32),
            presence=_clip([p.presence_penalty for p in params], -_HUGE).astype(np.float32),
            frequency=_clip([p.frequency_penalty for p in params], -_HUGE).astype(np.float32),
            bias_rows=np.array(rows, dtype=np.int64),
            bias_ids=np.array(ids, dtype=np.int64),
            bias=np.where(np.isneginf(values), -np.inf, _clip(values, -_HUGE)).astype(np.float32),
        )

    def with_xtc_drawn(self, numbers: Doubles) -> SamplingArrays:
        """Return the arrays with XTC on in the rows that use it in this draw, and off in others.

        numbers: float64 [B], uniform random numbers.
        """
        is_used = numbers < self.filters["xtc_probability"]
        return replace(self, filters={**self.filters, "xtc_probability": is_used.astype(float)})

    def select(self, rows: Ids) -> SamplingArrays:
        """Return the entries of some rows, renumbered from 0."""
        number = np.full(len(self.greedy), -1)
        number[rows] = np.arange(len(rows))
        kept = number[self.bias_rows] >= 0
        a_row = {name: getattr(self, name)[rows] for name in _ROW_FIELDS}
        return SamplingArrays(
            **a_row,
            filters={name: values[rows] for name, values in self.filters.items()},
            bias_rows=number[self.bias_rows[kept]],
            bias_ids=self.bias_ids[kept],
            bias=self.bias[kept],
        )


def _clip(values: Sequence[float], low: float) -> Doubles:
    """Clip values to `low` and to the largest float32.

    A finite value must not become inf or 0 in float32: inf - inf and 0 / 0 are NaN.
    """
    return np.clip(np.array(values, dtype=np.float64), low, _HUGE)


class Reductions:
    """Reductions over full rows of logits; the rest of a draw looks at few tokens.

    NumPy computes them. An engine whose library is faster on the host provides a subclass.

    Logits are float32 [B, V] and are not modified. A row gives the same bits in any batch. One
    thread at a time.
    """

    def __init__(self) -> None:
        self._buffers = BufferPool()

    def group_peaks(self, logits: Floats) -> Floats:
        """Return the largest value of each group, NaN if the group has one: float32 [B, groups].

        A group is a column of a 64 x 64 square of ids, not a run of ids; see `metrics`.
        """
        return group_peaks(logits)

    def moments(self, logits: Floats, peak: Floats) -> Moments:
        """Return `metrics.moments` of the rows.

        peak: float32 [B], the largest logit of each row, finite.

        Raises: ForwardError if a row has NaN or +inf.
        """
        step = max(1, _CACHE_LOGITS // logits.shape[1])
        if len(logits) <= step:
            return moments(logits, self._buffers, peak)
        starts = range(0, len(logits), step)
        parts = [moments(logits[i : i + step], self._buffers, peak[i : i + step]) for i in starts]
        return Moments(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def mass(self, logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
        """Return `filters.mass` of the rows: float64 [B].

        largest: float32 [B], the largest logit of each row.
        """
        step = max(1, _CACHE_LOGITS // logits.shape[1])
        if len(logits) <= step:
            return filters.mass(logits, largest, temperature)
        parts = [slice(at, at + step) for at in range(0, len(logits), step)]
        return np.concatenate(
            [filters.mass(logits[part], largest[part], temperature[part]) for part in parts]
        )


class BatchSampler:
    """Draws for B samplers at once. Create it once, and keep it while the same samplers step
    together.

    A sampler's draw does not depend on the others or their order. One thread uses it.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = tuple(samplers)
        self._noise = StreamNoise([sampler.stream for sampler in samplers])
        self._reductions = Reductions()
        self._rows = np.arange(len(samplers))
        self._arrays = SamplingArrays.from_params([sampler.params for sampler in samplers])
        self._greedy = bool(self._arrays.greedy.all())
        self._stateful = any(sampler.needs_host for sampler in samplers)
        self._matchers = [sampler.matcher for sampler in samplers]
        constrained = any(matcher is not None for matcher in self._matchers)
        self._masks = (
            Masks([each.banned for each in samplers], [each.biased for each in samplers])
            if constrained
            else None
        )
        # XTC draws one random number per sampler, so samplers with it do not share filtered rows.
        is_shared = not self._stateful and "xtc_probability" not in self._arrays.active
        self._share_params = is_shared and _share_params(samplers)
        self.reports_kept = any(sampler.reports_kept for sampler in samplers)

    def prepare(self, n_vocab: int) -> None:
        """Start computing the masks of the next draw in the background."""
        if self._masks is not None:
            self._masks.start(self._matchers, n_vocab)

    @property
    def active_filters(self) -> frozenset[str]:
        """The parameter names of filters that any sampler uses, and of DRY.

        An engine that does not implement one of them must leave the draw to this class.
        """
        has_dry = any(sampler.dry is not None for sampler in self.samplers)
        return frozenset(self._arrays.active) | ({"dry_multiplier"} if has_dry else set())

    def allowed(self, n_vocab: int) -> NDArray[np.int32] | None:
        """Return the mask of allowed tokens, for a draw on a device; None without constraints.

        One bit per token, lowest first: int32 [B, words], valid until the next `prepare`. Waits for
        the work that `prepare` has started.
        """
        return None if self._masks is None else self._masks.finish(self._matchers, n_vocab)

    def draw(
        self,
        logits: Floats,
        rows: Ids,
        positions: NDArray[np.uint64],
        *,
        kept: bool = False,
        reductions: Reductions | None = None,
    ) -> DrawResult:
        """Draw one token per sampler.

        An id is NOTHING if no token is allowed, and BROKEN if the logits are not finite.

        Args:
            logits: float32 [R, V], raw; not modified.
            rows: int64 [B], the logits row of each sampler.
            positions: uint64 [B], the positions of the drawn tokens in their paths.
            kept: compute `DrawResult.kept`, which may cost an exp per logit.
            reductions: see `DrawBatch.on_host`.
        """
        out = _new_result(len(self.samplers), kept, constrained=self._masks is not None)
        if not self.samplers:
            return out
        used, index = self._distinct_rows(rows)
        if self._masks is not None:
            self._masks.finish(self._matchers, logits.shape[1])
        noise = self._noise.at(positions, n_groups(logits.shape[1]))
        step = max(1, _BLOCK_LOGITS // logits.shape[1])
        used_passes = self._reductions if reductions is None else reductions
        for first in range(0, len(used), step):
            block = used[first : first + step]
            samplers = self._rows[first : first + step]
            at = samplers - first
            if len(used) < len(rows):
                samplers = np.flatnonzero((index >= first) & (index < first + step))
                at = index[samplers] - first
            draw = GumbelDraw(at, samplers, noise)
            self._draw_block(_rows_of(logits, block), draw, out, used_passes)
        return out

    def _distinct_rows(self, rows: Ids) -> tuple[Ids, Ids]:
        """Return the distinct logits rows, and the index of each sampler's row among them.

        Only if all samplers have equal parameters. Otherwise each sampler has a row of its own,
        because the rows are edited and filtered in different ways.

        rows: int64 [B], the logits row of each sampler.
        """
        if self._share_params and len(rows) > 1 and (rows[1:] == rows[:-1]).any():
            return np.unique(rows, return_inverse=True)
        return rows, self._rows

    def _draw_block(
        self, raw: Floats, draw: GumbelDraw, out: DrawResult, reductions: Reductions
    ) -> None:
        """Draw for the samplers whose rows are in one block of logits, and write into `out`.

        raw: float32 [R, V].
        """
        samplers, at = draw.samplers, draw.at
        peaks = self._peaks(raw, reductions)
        peak = peaks.max(axis=1)
        broken = np.flatnonzero(~np.isfinite(peak))
        if broken.size:
            raw = raw.copy()
            raw[broken] = peak[broken] = peaks[broken] = 0
        stats = reductions.moments(raw, peak)
        if len(samplers) > len(raw):
            arrays = SamplingArrays.from_params([self.samplers[0].params] * len(raw))
        else:
            arrays = (
                self._arrays if len(samplers) == len(self._rows) else self._arrays.select(samplers)
            )
        if "xtc_probability" in arrays.active:
            arrays = arrays.with_xtc_drawn(xtc_numbers(draw.groups.keys[samplers]))
        logits, dead = _Logits(raw, peaks, stats, reductions), self._rows[:0]
        check_ids(arrays.bias_ids, raw.shape[1], "logit_bias")
        legal = raw
        if self._masks is not None:
            assert out.legal_logmass is not None
            legal = self._masks.apply(raw, samplers)
            banned = np.isneginf(arrays.bias)
            legal[arrays.bias_rows[banned], arrays.bias_ids[banned]] = -np.inf
            out.legal_logmass[samplers] = _logmass(legal, stats, reductions)
        edited = self._edited(legal, arrays, samplers)
        if edited is not raw:
            peaks = self._edited_peaks(edited, peaks, arrays, reductions)
            dead = np.flatnonzero(peaks.max(axis=1) == -np.inf)
            if dead.size:
                edited[dead], peaks[dead] = raw[dead], logits.peaks[dead]
            logits = _Logits(edited, peaks, None, reductions)
        ids = _sample(logits, arrays, draw, out.kept)
        out.ids[samplers] = ids
        out.logprobs[samplers] = raw[at, ids] - stats.peak[at] - stats.log_total[at]
        out.entropies[samplers] = stats.entropies[at]
        for rows, why in ((dead, NOTHING), (broken, BROKEN)):
            if rows.size:
                out.ids[samplers[np.isin(at, rows)]] = why

    def _peaks(self, logits: Floats, reductions: Reductions) -> Floats:
        """Return `group_peaks`; if all samplers are greedy, each row's largest logit: [R, 1]."""
        return logits.max(axis=1, keepdims=True) if self._greedy else reductions.group_peaks(logits)

    def _edited_peaks(
        self, edited: Floats, peaks: Floats, arrays: SamplingArrays, reductions: Reductions
    ) -> Floats:
        """Return the peaks of edited logits.

        If the only edits are a few biases, only the groups of their tokens are recomputed.

        peaks: the peaks of the raw logits.
        """
        n_vocab = edited.shape[1]
        is_all = self._masks is not None or self._stateful or self._greedy
        if is_all or len(arrays.bias) * GROUP_SIZE * _SCATTER_COST > edited.size:
            return self._peaks(edited, reductions)
        rows, ids, groups = arrays.bias_rows, arrays.bias_ids, group_of(arrays.bias_ids)
        group_ids = members(groups, n_vocab)
        group_ids = np.where(group_ids < n_vocab, group_ids, ids[:, None])
        peaks = peaks.copy()
        peaks[rows, groups] = edited[rows[:, None], group_ids].max(axis=1)
        return peaks

    def _edited(self, logits: Floats, arrays: SamplingArrays, samplers: Ids) -> Floats:
        """Return the logits after bias, penalties and DRY; `logits` itself if there are none.

        Args:
            logits: float32 [R, V]; not modified.
            arrays: the parameters of these rows.
            samplers: int64 [R], the index of the sampler of each row.
        """
        edited = logits
        if len(arrays.bias):
            edited = filters.bias(edited, arrays.bias_rows, arrays.bias_ids, arrays.bias)
        if self._stateful:
            edited = self._penalised(edited, arrays, samplers)
            edited = self._without_repetitions(edited, samplers)
        return edited

    def _without_repetitions(self, logits: Floats, samplers: Ids) -> Floats:
        """Return the logits after DRY; `logits` itself if no sampler uses it."""
        histories = [self.samplers[i].dry for i in samplers.tolist()]
        penalised = [
            (row, *dry.penalties()) for row, dry in enumerate(histories) if dry is not None
        ]
        if not any(len(ids) for _, ids, _ in penalised):
            return logits
        rows = np.repeat([row for row, _, _ in penalised], [len(ids) for _, ids, _ in penalised])
        ids = np.concatenate([ids for _, ids, _ in penalised])
        check_ids(ids, logits.shape[1], "DRY")
        penalties = np.concatenate([values for _, _, values in penalised]).astype(np.float32)
        return filters.bias(logits, rows, ids, -penalties)

    def _penalised(self, logits: Floats, arrays: SamplingArrays, samplers: Ids) -> Floats:
        histories = [(row, self.samplers[i].history) for row, i in enumerate(samplers.tolist())]
        counted = [(row, history) for row, history in histories if history is not None]
        if not counted:
            return logits
        rows = np.repeat([row for row, _ in counted], [len(history) for _, history in counted])
        ids = np.concatenate([history.ids for _, history in counted])
        counts = np.concatenate([history.counts for _, history in counted])
        check_ids(ids, logits.shape[1], "penalties")
        values = (arrays.repetition, arrays.presence, arrays.frequency)
        return filters.penalties(logits, rows, ids, counts, *values)


def probabilities(logits: Floats, params: SamplingParams) -> Doubles:
    """Return the probability of each token after temperature and filters: float64 [V].

    Penalties, DRY and constraints, which depend on a history, are ignored. With XTC it is the mean
    over the draws with and without XTC.

    logits: float32 [V], raw; not modified.
    """
    if 0 < (share := params.xtc_probability) < 1:
        without, always = (replace(params, xtc_probability=p) for p in (0.0, 1.0))
        return (1 - share) * probabilities(logits, without) + share * probabilities(logits, always)
    raw, arrays = logits[None], SamplingArrays.from_params([params])
    if len(arrays.bias):
        raw = filters.bias(raw, arrays.bias_rows, arrays.bias_ids, arrays.bias)
    chances = np.zeros(raw.shape[1])
    if arrays.greedy[0]:
        chances[raw[0].argmax()] = 1
    elif arrays.unfiltered[0]:
        wide = raw[0].astype(np.float64)
        heights = (wide - wide.max()) / (arrays.temperature_before[0] * arrays.temperature_after[0])
        chances[:] = np.exp(heights) / np.exp(heights).sum()
    else:
        totals = filters.mass(raw, raw.max(axis=1), arrays.temperature_before)
        for part in filters.filter_logits(raw, group_peaks(raw), arrays, np.array([0]), totals):
            np.maximum.at(chances, part.ids[0], np.exp(part.heights[0] - part.log_total[0]))
    return chances


class _Logits(NamedTuple):
    """Rows of logits to draw from, and statistics of them that are computed already.

    values: float32 [R, V], after bias, penalties and constraints.

    peaks: `metrics.group_peaks` of `values`.

    stats: the moments of `values`. None if the logits were edited, which makes the moments invalid.

    reductions: computes further statistics.
    """

    values: Floats
    peaks: Floats
    stats: Moments | None
    reductions: Reductions

    def mass(self, temperature: Doubles, wanted: Flags) -> Doubles:
        """Return `filters.mass` of some rows: float64 [R]; entries of other rows are undefined.

        Args:
            temperature: float64 [R].
            wanted: bool [R], True for rows that are needed.
        """
        if not wanted.any():
            return np.ones(len(self.values))
        if self.stats is None:
            return self.reductions.mass(self.values, self.peaks.max(axis=1), temperature)
        total = self.stats.total.astype(np.float64)
        if (warm := np.flatnonzero(wanted & (temperature != 1))).size:
            rows = self.values if len(warm) == len(self.values) else self.values[warm]
            total[warm] = self.reductions.mass(rows, self.stats.peak[warm], temperature[warm])
        return total


def _sample(logits: _Logits, arrays: SamplingArrays, draw: GumbelDraw, kept: Floats | None) -> Ids:
    """Return the drawn ids, one per sampler of `draw`: int64 [n].

    kept: float32, by sampler number; if given, it receives the log-probability of each drawn token
    among the tokens that the filters keep. Entries of greedy samplers may stay unwritten.
    """
    if "xtc_probability" in arrays.active:
        logits, arrays = _without_top_choices(logits, arrays)
    filtered, unfiltered = arrays.filtered, arrays.unfiltered
    values, peaks = logits.values, logits.peaks
    if arrays.all_unfiltered and kept is None:
        return argmax_all(values, peaks, arrays.temperature_after * arrays.temperature_before, draw)
    ids: Ids = values.argmax(axis=1)[draw.at] if arrays.greedy.any() else draw.at.copy()
    if arrays.greedy.all():
        return ids
    if filtered.any():
        total = logits.mass(arrays.temperature_before, arrays.top_p_first)
        rows = np.flatnonzero(filtered)
        for part in filters.filter_or_cutoff(values, peaks, arrays, rows, total):
            which, mine = draw.on_rows(part.rows, len(values))
            if isinstance(part, filters.Cutoff):
                ids[which] = _sample_within_cutoff(logits, arrays, part, draw.select(which), kept)
                continue
            won = argmax_filtered(part, mine)
            ids[which] = part.ids[mine.at, won]
            if kept is not None:
                kept[mine.samplers] = part.heights[mine.at, won] - part.log_total[mine.at]
    if unfiltered.any():
        which = np.flatnonzero(unfiltered[draw.at])
        mine = draw.select(which)
        temperature = arrays.temperature_after * arrays.temperature_before
        won = ids[which] = argmax_all(values, peaks, temperature, mine)
        if kept is not None:
            total, top = logits.mass(temperature, unfiltered), peaks.max(axis=1)
            height = (values[mine.at, won].astype(np.float64) - top[mine.at]) / temperature[mine.at]
            kept[mine.samplers] = height - np.log(total[mine.at])
    return ids


def _without_top_choices(logits: _Logits, arrays: SamplingArrays) -> tuple[_Logits, SamplingArrays]:
    """Apply XTC to the rows that have no other filter, so that none of their tokens are ranked.

    Returns: the logits with -inf for the tokens that XTC drops, and the arrays with XTC off there.
    """
    alone = arrays.active["xtc_probability"] & ~arrays.greedy
    for name in arrays.active.keys() - {"xtc_probability"}:
        alone = alone & ~arrays.active[name]
    if not alone.any():
        return logits, arrays
    values, peaks = logits.values.copy(), logits.peaks.copy()
    temperature = arrays.temperature_before
    wanted = arrays.xtc_threshold * logits.mass(temperature, alone)
    for row in np.flatnonzero(alone).tolist():
        dropped = filters.top_choices(values[row], peaks[row].max(), temperature[row], wanted[row])[
            :-1
        ]
        values[row, dropped] = -np.inf
        peaks[row] = group_peaks(values[row : row + 1])[0]
    used = np.where(alone, 0.0, arrays.filters["xtc_probability"])
    arrays = replace(arrays, filters={**arrays.filters, "xtc_probability": used})
    return _Logits(values, peaks, None, logits.reductions), arrays


def _sample_within_cutoff(
    logits: _Logits,
    arrays: SamplingArrays,
    cutoff: filters.Cutoff,
    draw: GumbelDraw,
    kept: Floats | None,
) -> Ids:
    """Return the ids drawn among the tokens that a cutoff keeps: int64 [n].

    kept: float32, by sampler number; if given, it receives the log-probability of each drawn token
    among the tokens that the filters keep. Entries of greedy samplers may stay unwritten.
    """
    every = np.arange(len(logits.values))
    min_logit = np.full(len(every), -np.inf, dtype=np.float32)
    max_id = np.zeros(len(every), dtype=np.int64)
    min_logit[cutoff.rows], max_id[cutoff.rows] = cutoff.min_logit, cutoff.max_id
    temperature = arrays.temperature_after * arrays.temperature_before
    full = filters.Cutoff(every, min_logit, max_id)
    ids = argmax_all(logits.values, logits.peaks, temperature, draw, cutoff=full)
    if kept is not None:
        tops, totals = logits.peaks.max(axis=1).astype(np.float64), np.ones(len(every))
        for row in cutoff.rows.tolist():
            values = logits.values[row]
            inside = values > min_logit[row]
            inside[: max_id[row] + 1] |= values[: max_id[row] + 1] == min_logit[row]
            heights = (values[inside].astype(np.float64) - tops[row]) / temperature[row]
            totals[row] = np.exp(heights).sum()
        at = draw.at
        height = (logits.values[at, ids].astype(np.float64) - tops[at]) / temperature[at]
        kept[draw.samplers] = height - np.log(totals[at])
    return ids


def _new_result(n: int, kept: bool, *, constrained: bool) -> DrawResult:
    floats = np.zeros((4, n), dtype=np.float32)
    return DrawResult(
        np.zeros(n, dtype=np.int64),
        floats[0],
        floats[1],
        floats[2] if kept else None,
        floats[3] if constrained else None,
    )


def _logmass(legal: Floats, stats: Moments, reductions: Reductions) -> Floats:
    """Return the log of the legal tokens' share of each raw row's probability: float32 [R].

    legal: float32 [R, V], -inf for illegal tokens.

    stats: the moments of the raw rows.
    """
    peak = legal.max(axis=1)
    finite = np.where(np.isneginf(peak), np.float32(0), peak)
    with np.errstate(divide="ignore"):  # log 0 if no token is legal
        log_total = np.log(reductions.mass(legal, finite, np.ones(len(legal))))
    share = log_total + (finite - stats.peak) - stats.log_total
    logmass: Floats = np.minimum(share, 0).astype(np.float32)
    return logmass


def _rows_of(logits: Floats, rows: Ids) -> Floats:
    """Return the logits of some rows: a view if the rows are adjacent, else a copy."""
    if (rows[1:] - rows[:-1] == 1).all():
        return logits[int(rows[0]) : int(rows[-1]) + 1]
    return logits[rows]


def _share_params(samplers: Sequence[Sampler]) -> bool:
    """Return True if all samplers have equal parameters. A different seed counts as unequal, which
    only costs time.
    """
    first = samplers[0].params if samplers else None
    return all(sampler.params is first or sampler.params == first for sampler in samplers)


def check_ids(ids: Ids, n_vocab: int, where: str) -> None:
    if ids.size and ids.max() >= n_vocab:
        raise ConfigError(
            f"token id {ids.max()} in {where} is outside the vocabulary; "
            f"allowed are 0 to {n_vocab - 1}"
        )


def draw_batch(sampler: BatchSampler, first_row: int, positions: Sequence[int]) -> DrawBatch:
    """Return the work in which member i of `sampler` draws from logits row first_row + i.

    positions: the position of each drawn token in its path.
    """
    n = len(positions)
    rows = np.arange(first_row, first_row + n, dtype=np.int64)
    at = np.array(positions, dtype=np.uint64)
    return DrawBatch(rows, sampler, at, kept=sampler.reports_kept)


def draw_at(
    sampler: BatchSampler, rows: Sequence[int], positions: Sequence[int], *, kept: bool = True
) -> DrawBatch:
    """Return the work in which member i of `sampler` draws from logits row rows[i].

    Args:
        positions: the position of each drawn token in its path.
        kept: compute `DrawResult.kept`.
    """
    at = np.array(positions, dtype=np.uint64)
    return DrawBatch(np.array(rows, dtype=np.int64), sampler, at, kept=kept)


def draw_rows(
    logits: Sequence[NDArray[np.float32]],
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    *,
    kept: bool = False,
) -> DrawResult:
    """Draw one token per sampler, sampler i from logits[i]; equal row objects are processed
    once.
    """
    numbers: dict[int, int] = {}
    rows = np.array([numbers.setdefault(id(row), len(numbers)) for row in logits], dtype=np.int64)
    distinct = {id(row): row for row in logits}
    stacked = np.stack([distinct[key] for key in numbers])
    return BatchSampler(samplers).draw(
        stacked, rows, np.array(positions, dtype=np.uint64), kept=kept
    )
