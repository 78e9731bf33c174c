"""The sampling parameters of B rows as arrays, and the edits they make to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DeadEnd
from . import filters
from .history import History
from .metrics import shifted
from .params import SamplingParams

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Filter = Callable[[Floats], Floats]

# Parameters are Python floats, logits are float32: these bounds change no draw.
_TINY, _HUGE = 1e-30, 1e30


class Settings:
    """Parameters of B rows, compiled once.

    The methods return their argument itself where nothing is to do.
    all_greedy, greedy_rows: whether every row, and which rows, take the largest logit.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        greedy = np.array([p.temperature == 0 for p in params], dtype=bool)
        first = np.array([p.temperature_first for p in params], dtype=bool) & ~greedy
        one = np.float32(1)
        warmth = np.where(greedy, one, _floats([p.temperature for p in params], low=_TINY))
        self.greedy_rows: Rows = np.flatnonzero(greedy)
        self.all_greedy = len(self.greedy_rows) == len(params)
        self._early = _scale(np.where(first, warmth, one))
        self._late = _scale(np.where(first, one, warmth))
        self._filters = _compiled_filters(params, ~greedy)
        self._bias = _compiled_bias(params)
        self._penalties = (
            _floats([p.repetition_penalty for p in params], low=_TINY),
            _floats([p.presence_penalty for p in params]),
            _floats([p.frequency_penalty for p in params]),
        )

    def edit(
        self, logits: Floats, histories: Sequence[History | None], *, may_be_dead: bool = False
    ) -> Floats:
        """Apply logit bias and penalties; what temperature 0 takes its largest from.

        may_be_dead: whoever calls looks for rows that have no token left.
        """
        edited = logits
        if self._bias is not None:
            edited = self._biased(edited, may_be_dead)
        rows = [row for row, history in enumerate(histories) if history is not None]
        if rows:
            seen = [histories[row] or History() for row in rows]
            at = np.repeat(np.array(rows, dtype=np.int64), [len(history) for history in seen])
            ids = np.concatenate([history.ids for history in seen])
            counts = np.concatenate([history.counts for history in seen])
            _check_ids(ids, logits.shape[1], "penalties")
            edited = filters.penalties(edited, at, ids, counts, *self._penalties)
        return edited

    def filter(self, logits: Floats) -> Floats:
        """Drop tokens: top-k, typical, top-p, min-p, each on the rows that ask for it."""
        kept = _scaled(logits, self._early)
        for active, apply in self._filters:
            if active is None:
                kept = apply(kept)
            else:
                kept = kept.copy() if kept is logits else kept
                kept[active] = apply(kept[active])
        return kept

    def temper(self, logits: Floats) -> Floats:
        """Divide by the temperature, where that comes last."""
        return _scaled(logits, self._late)

    def _biased(self, logits: Floats, may_be_dead: bool) -> Floats:
        assert self._bias is not None
        rows, ids, values = self._bias
        _check_ids(ids, logits.shape[1], "logit_bias")
        edited = filters.bias(logits, rows, ids, values)
        if not may_be_dead and np.isneginf(edited.max(axis=1)).any():
            raise DeadEnd("logit_bias forbids every token; leave at least one without -inf")
        return edited


def _floats(values: Sequence[float], *, low: float = -_HUGE) -> Floats:
    # What is finite must not become inf or 0 in float32, or inf - inf and 0 / 0 would follow.
    with np.errstate(over="ignore"):
        return np.clip(np.array(values, dtype=np.float64), low, _HUGE).astype(np.float32)


def _scale(temperature: Floats) -> Floats | None:
    return None if (temperature == 1).all() else temperature[:, None]


def _scaled(logits: Floats, scale: Floats | None) -> Floats:
    # Shifted first, so that a tiny temperature cannot make inf - inf.
    if scale is None:
        return logits
    with np.errstate(over="ignore"):
        return np.divide(shifted(logits), scale)


def _compiled_bias(params: Sequence[SamplingParams]) -> tuple[Rows, Rows, Floats] | None:
    entries = [(row, *pair) for row, p in enumerate(params) for pair in p.logit_bias]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return np.array(rows), np.array(ids), _floats(values, low=-np.inf)


def _compiled_filters(
    params: Sequence[SamplingParams], drawn: NDArray[np.bool_]
) -> list[tuple[Rows | None, Filter]]:
    """Return the filters in their order, each with the rows it is active on (None: all)."""
    k = np.array([p.top_k for p in params], dtype=np.int64)
    typical = np.array([p.typical_p for p in params])
    top = np.array([p.top_p for p in params])
    least = np.array([p.min_p for p in params])
    compiled = [
        _on_active(filters.top_k, k, drawn & (k > 0)),
        _on_active(filters.typical, typical, drawn & (typical < 1)),
        _on_active(filters.top_p, top, drawn & (top < 1)),
        _on_active(filters.min_p, least, drawn & (least > 0)),
    ]
    return [entry for entry in compiled if entry is not None]


def _on_active(
    function: Callable[..., Floats], values: NDArray[np.generic], active: NDArray[np.bool_]
) -> tuple[Rows | None, Filter] | None:
    if not active.any():
        return None
    rows = None if active.all() else np.flatnonzero(active)
    chosen = values if rows is None else values[rows]
    return rows, lambda logits: function(logits, chosen)


def _check_ids(ids: Rows, n_vocab: int, where: str) -> None:
    if ids.size and ids.max() >= n_vocab:
        raise ConfigError(
            f"token id {ids.max()} in {where} is outside the vocabulary; "
            f"allowed are 0 to {n_vocab - 1}"
        )
