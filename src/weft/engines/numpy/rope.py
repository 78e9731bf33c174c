"""Rotary position embedding as a table of unit complex numbers.

A head of D values is read as D/2 complex numbers; turning it to position p multiplies number i by
exp(1j * p * frequency[i]). Weights are loaded with the two values of a pair side by side
(`pair_up`), so that the multiplication needs no shuffling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError, Unsupported
from ...files import shown
from .config import ELSEWHERE


class Rope:
    """Turns for positions 0, 1, …; the table grows to the longest position asked for."""

    def __init__(self, parameters: Mapping[str, Any], head_dim: int) -> None:
        self._frequencies = frequencies(parameters, head_dim)
        self._table = np.empty((0, head_dim // 2), np.complex64)

    def turns(self, positions: NDArray[np.int64]) -> NDArray[np.complex64]:
        """Return complex64 [N, D/2] for int64 [N] positions."""
        longest = int(positions.max())
        if longest >= len(self._table):
            self._grow(max(256, 2 * longest))
        return self._table[positions]

    def _grow(self, length: int) -> None:
        # NOTE: angles are rounded to float32 on purpose: that is what the models were trained with.
        steps = np.arange(length, dtype=np.float32)
        angles = (steps[:, None] * self._frequencies).astype(np.float64)
        self._table = np.exp(1j * angles).astype(np.complex64)


def frequencies(parameters: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return the angle per position of each pair: float32 [D/2].

    Raises:
        Unsupported: the rope type is not one of default, linear and llama3.
        ModelLoadError: one of its parameters is missing.
    """
    kind = parameters["rope_type"]
    scale = _SCALINGS.get(kind) if isinstance(kind, str) else None
    if scale is None:
        raise Unsupported(
            f"the NumPy engine has no rope type {shown(kind)}; "
            f"it serves {', '.join(_SCALINGS)}; {ELSEWHERE}",
            hint=ELSEWHERE,
        )
    # NOTE: rounded where the models' own code rounds: a last bit is felt at position 1000.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = float(parameters["rope_theta"]) ** exponents.astype(np.float64)
    plain = np.float32(1) / powers.astype(np.float32)
    try:
        return scale(plain, parameters)
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope type {kind!r} needs {error.args[0]!r}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"config.json: the numbers of rope type {kind!r}: {error}") from error


def pair_up(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder the first axis, heads of D rows, from (x0…, y0…) to (x0, y0, x1, y1, …); a copy."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def interleave(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorder the last axis, [..., D], from (x0…, y0…) to (x0, y0, x1, y1, …); a copy."""
    halves = keys.reshape(*keys.shape[:-1], 2, keys.shape[-1] // 2)
    return halves.swapaxes(-1, -2).reshape(keys.shape)


def halve(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undo `interleave`: the order of the model's own files; a copy."""
    pairs = keys.reshape(*keys.shape[:-1], keys.shape[-1] // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(keys.shape)


def _default(plain: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    return plain


def _linear(plain: NDArray[np.float32], given: Mapping[str, Any]) -> NDArray[np.float32]:
    return plain / float(given["factor"])


def _llama3(plain: NDArray[np.float32], given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Slow pairs are divided by `factor`, fast ones kept, those between blended."""
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, low_freq_factor {low}")
    turns = float(given["original_max_position_embeddings"]) * plain / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * plain / float(given["factor"]) + keep * plain


_Scaling = Callable[[NDArray[np.float32], Mapping[str, Any]], NDArray[np.float32]]
_SCALINGS: dict[str, _Scaling] = {"default": _default, "linear": _linear, "llama3": _llama3}
