"""The sampling parameters of B rows as arrays: what a draw reads, on a host or a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams

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
    1 where that is not asked for. top_k: 0 is off; top_p, typical_p: 1 is off; min_p: 0 is off.
    bias_rows, bias_ids, bias: added to the logits of a row's token, an entry each.
    filtered: the row drops tokens before it draws; plain: it draws from all of them. mass_first:
    top-p cuts first, so it is a share of the whole row. uses: names of the filters of any row.
    """

    greedy: Flags
    early: Doubles
    late: Doubles
    top_k: Ids
    typical_p: Doubles
    top_p: Doubles
    min_p: Doubles
    repetition: Floats
    presence: Floats
    frequency: Floats
    bias_rows: Ids
    bias_ids: Ids
    bias: Floats
    filtered: Flags = field(init=False)
    plain: Flags = field(init=False)
    mass_first: Flags = field(init=False)
    log_min_p: Doubles = field(init=False)
    uses: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        asked = {
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
        }
        off = ~(asked["top_k"] | asked["typical_p"] | asked["top_p"] | asked["min_p"])
        with np.errstate(divide="ignore"):
            derived = {
                "filtered": ~(self.greedy | off),
                "plain": off & ~self.greedy,
                "mass_first": asked["top_p"] & ~asked["top_k"] & ~asked["typical_p"],
                "log_min_p": np.log(self.min_p),
                "uses": frozenset(name for name, rows in asked.items() if rows.any()),
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
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            typical_p=np.array([p.typical_p for p in params]),
            top_p=np.array([p.top_p for p in params]),
            min_p=np.array([p.min_p for p in params]),
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
        a_row = {name: getattr(self, name)[rows] for name in _A_ROW}
        return SamplingArrays(
            **a_row,
            bias_rows=number[self.bias_rows[kept]],
            bias_ids=self.bias_ids[kept],
            bias=self.bias[kept],
        )


def _within(values: Sequence[float], low: float) -> Doubles:
    # What is finite must not become inf or 0 in float32, or inf - inf and 0 / 0 would follow.
    return np.clip(np.array(values, dtype=np.float64), low, _HUGE)


_A_ROW = [f.name for f in fields(SamplingArrays) if f.init and not f.name.startswith("bias")]
