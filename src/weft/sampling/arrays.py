"""`SamplingArrays`: the parameters of B rows, as what a draw reads on a host or a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .params import PARAMETERS, SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Parameters are Python floats, logits are float32: these bounds change no draw.
_TINY, _HUGE = 1e-30, 1e30


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
    early: Doubles
    late: Doubles
    filters: Mapping[str, NDArray[Any]]
    repetition: Floats
    presence: Floats
    frequency: Floats
    bias_rows: Ids
    bias_ids: Ids
    bias: Floats
    asked: Mapping[str, Flags] = field(init=False)
    filtered: Flags = field(init=False)
    plain: Flags = field(init=False)
    mass_first: Flags = field(init=False)

    def __post_init__(self) -> None:
        rows_of = {name: values != _OFF[name] for name, values in self.filters.items()}
        asked = {name: rows for name, rows in rows_of.items() if rows.any()}
        any_before = mass_first = np.zeros(len(self.greedy), dtype=bool)
        for name, rows in asked.items():
            if name == "top_p":
                mass_first = rows & ~any_before
            any_before = any_before | rows
        derived = {
            "asked": asked,
            "filtered": any_before & ~self.greedy,
            "plain": ~(any_before | self.greedy),
            "mass_first": mass_first,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingArrays:
        """Put the parameters of B rows into arrays."""
        greedy = np.array([p.temperature == 0 for p in params], dtype=bool)
        first = np.array([p.temperature_first for p in params], dtype=bool)
        warmth = np.where(greedy, 1.0, _within([p.temperature for p in params], _TINY))
        biases = [(row, *pair) for row, p in enumerate(params) for pair in p.logit_bias]
        rows, ids, values = zip(*biases, strict=True) if biases else ((), (), ())
        return cls(
            greedy=greedy,
            early=np.where(first, warmth, 1.0),
            late=np.where(first, 1.0, warmth),
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

    def take(self, rows: Ids) -> SamplingArrays:
        """Return the entries of some rows, numbered anew."""
        number = np.full(len(self.greedy), -1)
        number[rows] = np.arange(len(rows))
        kept = number[self.bias_rows] >= 0
        a_row = {name: getattr(self, name)[rows] for name in _OF_A_ROW}
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


_OF_A_ROW = ("greedy", "early", "late", "repetition", "presence", "frequency")
# At its default a filter drops nothing.
_NEUTRAL = SamplingParams()
_OFF = {name: getattr(_NEUTRAL, name) for name, of in PARAMETERS.items() if of.is_filter}
