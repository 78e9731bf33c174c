"""Samplers of runs, and the chain that draws for many of them, their parameters as arrays."""

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
from .rng import GumbelDraw, StreamNoise, argmax_all, argmax_filtered

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Doubles = NDArray[np.float64]

NOTHING = -1  # instead of a token, where constraint and bias leave none
BROKEN = -2  # instead of a token, where the logits are no numbers: NaN, +inf, or nothing but -inf
# Logits that are drawn from together, so that what is made for them stays small.
_BLOCK_LOGITS = 1 << 22
# Logits that are gone over together: rows of large vocabularies come a few at a time.
_CACHE_LOGITS = 1 << 17
# So many times what it costs in a pass does a number cost that is looked for alone.
_SCATTER_COST = 256
# Parameters are Python floats, logits are float32: these bounds change no draw.
_TINY, _HUGE = 1e-30, 1e30
_ROW_FIELDS = (
    "greedy",
    "temperature_before",
    "temperature_after",
    "repetition",
    "presence",
    "frequency",
)
# At its default a filter drops nothing.
_NEUTRAL = SamplingParams()
_OFF = {name: getattr(_NEUTRAL, name) for name, of in PARAMETERS.items() if of.is_filter}


class DrawnToken(NamedTuple):
    """One drawn token; see `DrawResult`. None: the engine does not report the value."""

    token: int
    logprob: float | None
    entropy: float | None
    legal_logmass: float | None = None


@dataclass(slots=True)
class DrawResult:
    """Tokens drawn, one a sampler, in their order.

    ids: int64 [B]. logprobs, entropies: float32 [B], nats; from raw logits over the full
    vocabulary, whatever the temperature, the filters and the penalties were.
    kept: float32 [B] log-probabilities of what was drawn among what was left to draw from; None
    where nobody asked, or whoever drew does not tell.
    legal_logmass: float32 [B], nats; the log of the raw probability of all tokens that constraint
    and bans allow, about 0 for a sampler without a constraint. None: no sampler has a constraint.
    """

    ids: Ids
    logprobs: Floats
    entropies: Floats
    kept: Floats | None = None
    legal_logmass: Floats | None = None

    def drawn(self) -> list[DrawnToken]:
        """Return the drawn token of each sampler."""
        legal = self.legal_logmass
        values = zip(
            self.ids.tolist(),
            self.logprobs.tolist(),
            self.entropies.tolist(),
            repeat(None) if legal is None else legal.tolist(),
            strict=False,
        )
        make = partial(tuple.__new__, DrawnToken)  # three times as fast as DrawnToken(…)
        return list(map(make, values))


@dataclass(slots=True)
class DrawBatch:
    """Sampling work for one step: member i of `sampler` draws from logits row rows[i].

    rows: int64 [B]. positions: uint64 [B], the absolute position that the drawn token will have.
    kept: whether `DrawResult.kept` is wanted.
    """

    rows: Ids
    sampler: BatchSampler
    positions: NDArray[np.uint64]
    kept: bool = False

    def on_host(
        self, logits: Floats | Sequence[Floats], reductions: Reductions | None = None
    ) -> DrawResult:
        """Draw with the NumPy reference sampler, from float32 [R, V] or R rows of it.

        passes: over the rows, the engine's own; None: NumPy's.
        """
        raw = logits if isinstance(logits, np.ndarray) else np.stack(logits)
        return self.sampler.draw(
            raw, self.rows, self.positions, kept=self.kept, reductions=reductions
        )


_NO_TOKENS: frozenset[int] = frozenset()  # one object for all samplers: forks are many


def _banned(biases: Iterable[tuple[int, float]]) -> frozenset[int]:
    return frozenset(token for token, bias in biases if bias == -math.inf)


class Sampler:
    """How one run draws: its parameters, its random stream, the tokens its penalties count, and
    where it stands in its constraint.

    needs_host: the next draw depends on tokens that must have reached the host.
    matcher: of the constraint, this sampler's own; None without one. resumed: that has accepted
    tokens of an earlier run.
    banned: token ids with a bias of -inf.
    """

    __slots__ = (
        "_history",
        "banned",
        "greedy",
        "matcher",
        "needs_host",
        "params",
        "resumed",
        "stream",
    )

    def __init__(self, params: SamplingParams, stream: int, matcher: Matcher | None = None) -> None:
        self.params = params
        self.stream = stream
        self.matcher = matcher
        self.greedy = params.temperature == 0
        self.banned = _banned(params.logit_bias) if params.logit_bias else _NO_TOKENS
        self.resumed = False
        penalised = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.needs_host = penalised or matcher is not None
        self._history = History(params.penalty_last_n) if penalised else None

    @property
    def history(self) -> History | None:
        """The tokens counted so far; None without penalties."""
        return self._history

    def add_prompt(self, prompt_ids: Iterable[int]) -> None:
        """Note the prompt's tokens: repetition_penalty counts them, the other two do not."""
        if self._history is not None:
            self._history.add_prompt(prompt_ids)

    def accept(self, token: int) -> None:
        """Count one generated token, and go on by it in the constraint.

        Raises: ConstraintError if the constraint forbids it; nothing is counted then.
        """
        if self.matcher is not None:
            self.matcher.accept(token)
        if self._history is not None:
            self._history.add_generated(token)

    def add_generated(self, tokens: Iterable[int]) -> None:
        """Count generated tokens for the penalties alone."""
        if self._history is not None:
            for token in tokens:
                self._history.add_generated(token)

    def with_biases(self, biases: Mapping[int, float]) -> Sampler:
        """Return a sampler for one draw that adds to these tokens' logits, too; -inf bans.

        It shares counts and matcher with this one.
        """
        both = dict(self.params.logit_bias)
        for token, bias in biases.items():
            before = both.get(token, 0.0)
            both[token] = -math.inf if -math.inf in (before, bias) else before + bias
        twin = Sampler(
            replace(self.params, logit_bias=tuple(both.items())), self.stream, self.matcher
        )
        twin._history = self._history
        return twin

    def clone(self) -> Sampler:
        """Return a sampler with the same stream and its own copy of counts and matcher."""
        matcher = None if self.matcher is None else self.matcher.clone()
        twin = Sampler(self.params, self.stream, matcher)
        twin._history = None if self._history is None else self._history.copy()
        return twin


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """One entry a row, [B], made once for rows that draw together.

    greedy: temperature is 0. early, late: what logits are divided by before and after the filters,
    1 where that is not asked for. filters: the values of every filter, by its parameter's name.
    bias_rows, bias_ids, bias: added to the logits of a row's token, an entry each.
    asked: the filters that any row asks for, in the order they cut, and which rows. filtered: the
    row drops tokens before it draws; plain: it draws from all of them. mass_first: top-p cuts
    first, so it is a share of the whole row.
    """

    greedy: Flags
    temperature_before: Doubles
    temperature_after: Doubles
    filters: Mapping[str, NDArray[Any]]
    repetition: Floats
    presence: Floats
    frequency: Floats
    bias_rows: Ids
    bias_ids: Ids
    bias: Floats
    active: Mapping[str, Flags] = field(init=False)
    filtered: Flags = field(init=False)
    unfiltered: Flags = field(init=False)
    top_p_first: Flags = field(init=False)
    all_unfiltered: bool = field(init=False)

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
        """Put the parameters of B rows into arrays."""
        greedy = np.array([p.temperature == 0 for p in params], dtype=bool)
        first = np.array([p.temperature_first for p in params], dtype=bool)
        temperature = np.where(greedy, 1.0, _within([p.temperature for p in params], _TINY))
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
            repetition=_within([p.repetition_penalty for p in params], _TINY).astype(np.float32),
            presence=_within([p.presence_penalty for p in params], -_HUGE).astype(np.float32),
            frequency=_within([p.frequency_penalty for p in params], -_HUGE).astype(np.float32),
            bias_rows=np.array(rows, dtype=np.int64),
            bias_ids=np.array(ids, dtype=np.int64),
            bias=np.where(np.isneginf(values), -np.inf, _within(values, -_HUGE)).astype(np.float32),
        )

    def select(self, rows: Ids) -> SamplingArrays:
        """Return the entries of some rows, numbered anew."""
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


def _within(values: Sequence[float], low: float) -> Doubles:
    # What is finite must not become inf or 0 in float32, or inf - inf and 0 / 0 would follow.
    return np.clip(np.array(values, dtype=np.float64), low, _HUGE)


class Reductions:
    """The passes over whole rows of logits that a draw makes; all else of it looks at few tokens.

    Made by NumPy. An engine whose library has faster ones on the host brings a subclass.

    Logits are float32 [B, V] and are not modified. A row gives the same bits whatever its
    companions. One thread at a time.
    """

    def __init__(self) -> None:
        self._buffers = BufferPool()

    def group_peaks(self, logits: Floats) -> Floats:
        """Return the largest value of every group, NaN where there is one: float32 [B, groups]."""
        return group_peaks(logits)

    def moments(self, logits: Floats, peak: Floats) -> Moments:
        """Return `metrics.moments`. peak: float32 [B], the largest logits, finite."""
        step = max(1, _CACHE_LOGITS // logits.shape[1])
        if len(logits) <= step:
            return moments(logits, self._buffers, peak)
        starts = range(0, len(logits), step)
        parts = [moments(logits[i : i + step], self._buffers, peak[i : i + step]) for i in starts]
        return Moments(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def mass(self, logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
        """Return `filters.mass`: float64 [B]."""
        step = max(1, _CACHE_LOGITS // logits.shape[1])
        if len(logits) <= step:
            return filters.mass(logits, largest, temperature)
        parts = [slice(at, at + step) for at in range(0, len(logits), step)]
        return np.concatenate(
            [filters.mass(logits[part], largest[part], temperature[part]) for part in parts]
        )


class BatchSampler:
    """Draws for B samplers at once; make it once and keep it while the same samplers step together.

    What a sampler draws from given logits does not depend on its companions or their order.
    A chain belongs to one thread.
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
        self._masks = Masks([each.banned for each in samplers]) if constrained else None
        self._share_params = not self._stateful and _share_params(samplers)

    def prepare(self, n_vocab: int) -> None:
        """Start on the masks of the next draw, beside whatever comes before it."""
        if self._masks is not None:
            self._masks.begin(self._matchers, n_vocab)

    @property
    def active_filters(self) -> frozenset[str]:
        """The filters that any sampler asks for, by their parameters' names."""
        return frozenset(self._arrays.active)

    def allowed(self, n_vocab: int) -> NDArray[np.int32] | None:
        """Return what constraints allow now, for a draw elsewhere; None where there are none.

        A bit a token, the lowest first: int32 [B, words], valid until the next `prepare`. Waits for
        what `prepare` has started, which is host work alone.
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
        """Draw one token a sampler.

        logits: float32 [R, V], raw; not modified. rows: int64 [B], the logits row of each sampler.
        positions: uint64 [B]. kept: give `DrawResult.kept`, which may cost an exp a logit. passes:
        see `DrawBatch.on_host`.
        A sampler that no token is left to gets NOTHING, one whose logits are no numbers BROKEN.
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
        """Return the logits rows to look at, and which of them each sampler draws from.

        Rows that many share are looked at once where all samplers follow the same rules.
        """
        if self._share_params and len(rows) > 1 and (rows[1:] == rows[:-1]).any():
            return np.unique(rows, return_inverse=True)
        return rows, self._rows

    def _draw_block(
        self, raw: Floats, draw: GumbelDraw, out: DrawResult, reductions: Reductions
    ) -> None:
        """Draw for those whose rows are in one block of logits: float32 [R, V]."""
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
        logits, dead = _Logits(raw, peaks, stats, reductions), self._rows[:0]
        check_ids(arrays.bias_ids, raw.shape[1], "logit_bias")
        legal = raw
        if self._masks is not None:
            assert out.legal_logmass is not None
            legal = self._masks.over(raw, samplers)
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
        """Return the largest logits of groups; of whole rows where nobody asks for groups."""
        return logits.max(axis=1, keepdims=True) if self._greedy else reductions.group_peaks(logits)

    def _edited_peaks(
        self, edited: Floats, peaks: Floats, arrays: SamplingArrays, reductions: Reductions
    ) -> Floats:
        """Return the peaks of edited logits. `peaks`: of the raw ones.

        Where a few tokens have a bias, and nothing else is edited, their groups alone are new.
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
        """Return the logits after bias and penalties; `logits` itself without any."""
        edited = logits
        if len(arrays.bias):
            edited = filters.bias(edited, arrays.bias_rows, arrays.bias_ids, arrays.bias)
        if self._stateful:
            edited = self._penalised(edited, arrays, samplers)
        return edited

    def _penalised(self, logits: Floats, arrays: SamplingArrays, samplers: Ids) -> Floats:
        seen = [(row, self.samplers[i].history) for row, i in enumerate(samplers.tolist())]
        counted = [(row, history) for row, history in seen if history is not None]
        if not counted:
            return logits
        rows = np.repeat([row for row, _ in counted], [len(history) for _, history in counted])
        ids = np.concatenate([history.ids for _, history in counted])
        counts = np.concatenate([history.counts for _, history in counted])
        check_ids(ids, logits.shape[1], "penalties")
        given = (arrays.repetition, arrays.presence, arrays.frequency)
        return filters.penalties(logits, rows, ids, counts, *given)


def probabilities(logits: Floats, params: SamplingParams) -> Doubles:
    """Return what a draw picks from: each token's probability after temperature and filters.

    logits: float32 [V], raw; not modified. Penalties and constraints, which have a past, do not
    count. Returns float64 [V].
    """
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
    """Rows to draw from, edited: float32 [R, V], and what is known of them.

    peaks: `metrics.group_peaks`. found: their moments, where nothing was edited.
    """

    values: Floats
    peaks: Floats
    stats: Moments | None
    reductions: Reductions

    def mass(self, temperature: Doubles, wanted: Flags) -> Doubles:
        """Return `filters.mass` of the wanted rows, float64 [R]; anything for the others."""
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
    """Return the drawn ids, one for each that draws; write into `kept` where that is given."""
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
            which, mine = draw.over(part.rows, len(values))
            if isinstance(part, filters.Cutoff):
                ids[which] = _sample_within_cutoff(logits, arrays, part, draw.among(which), kept)
                continue
            won = argmax_filtered(part, mine)
            ids[which] = part.ids[mine.at, won]
            if kept is not None:
                kept[mine.samplers] = part.heights[mine.at, won] - part.log_total[mine.at]
    if unfiltered.any():
        which = np.flatnonzero(unfiltered[draw.at])
        mine = draw.among(which)
        temperature = arrays.temperature_after * arrays.temperature_before
        won = ids[which] = argmax_all(values, peaks, temperature, mine)
        if kept is not None:
            total, top = logits.mass(temperature, unfiltered), peaks.max(axis=1)
            height = (values[mine.at, won].astype(np.float64) - top[mine.at]) / temperature[mine.at]
            kept[mine.samplers] = height - np.log(total[mine.at])
    return ids


def _sample_within_cutoff(
    logits: _Logits,
    arrays: SamplingArrays,
    cutoff: filters.Cutoff,
    draw: GumbelDraw,
    kept: Floats | None,
) -> Ids:
    """Return the ids that are drawn within an edge; write into `kept` where that is given."""
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
    """Return the log of the legal tokens' share of the probability of each raw row: float32 [R].

    legal: float32 [R, V], -inf for what is not allowed. found: the moments of the raw rows.
    """
    peak = legal.max(axis=1)
    finite = np.where(np.isneginf(peak), np.float32(0), peak)
    with np.errstate(divide="ignore"):  # nothing is legal: log 0
        log_total = np.log(reductions.mass(legal, finite, np.ones(len(legal))))
    share = log_total + (finite - stats.peak) - stats.log_total
    logmass: Floats = np.minimum(share, 0).astype(np.float32)
    return logmass


def _rows_of(logits: Floats, rows: Ids) -> Floats:
    """Return some rows: a view where they are neighbours."""
    if (rows[1:] - rows[:-1] == 1).all():
        return logits[int(rows[0]) : int(rows[-1]) + 1]
    return logits[rows]


def _share_params(samplers: Sequence[Sampler]) -> bool:
    """Whether all draw by the same rules; a different seed or stop makes it False, at no harm."""
    first = samplers[0].params if samplers else None
    return all(sampler.params is first or sampler.params == first for sampler in samplers)


def check_ids(ids: Ids, n_vocab: int, where: str) -> None:
    if ids.size and ids.max() >= n_vocab:
        raise ConfigError(
            f"token id {ids.max()} in {where} is outside the vocabulary; "
            f"allowed are 0 to {n_vocab - 1}"
        )


def draw_batch(sampler: BatchSampler, first_row: int, positions: Sequence[int]) -> DrawBatch:
    """Let member i of `sampler` draw from logits row first_row + i, for a token at positions[i]."""
    n = len(positions)
    rows = np.arange(first_row, first_row + n, dtype=np.int64)
    return DrawBatch(rows, sampler, np.array(positions, dtype=np.uint64))


def draw_at(
    sampler: BatchSampler, rows: Sequence[int], positions: Sequence[int], *, kept: bool = True
) -> DrawBatch:
    """Let member i of `sampler` draw from logits row rows[i], for positions[i]."""
    at = np.array(positions, dtype=np.uint64)
    return DrawBatch(np.array(rows, dtype=np.int64), sampler, at, kept=kept)


def draw_rows(
    logits: Sequence[NDArray[np.float32]],
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    *,
    kept: bool = False,
) -> DrawResult:
    """Draw once a sampler, sampler i from logits[i]; equal row objects are looked at once."""
    numbers: dict[int, int] = {}
    rows = np.array([numbers.setdefault(id(row), len(numbers)) for row in logits], dtype=np.int64)
    distinct = {id(row): row for row in logits}
    stacked = np.stack([distinct[key] for key in numbers])
    return BatchSampler(samplers).draw(
        stacked, rows, np.array(positions, dtype=np.uint64), kept=kept
    )
