"""An engine that computes nothing, to measure Weft's own overhead and to test queues.

Its logits are always the same. Its fragments count slots and allocate no bytes, although
`kv_bytes_per_token` is 1, so that budgets work. It ignores tokens, positions and adapters, scores
nothing, and still runs when closed. `engines/numpy` is an example of a complete engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core.sampling.sampler import DrawBatch, DrawResult
from ..errors import ModelMismatch
from .base import (
    Draws,
    Engine,
    EngineInfo,
    Fragment,
    Fragments,
    HostDraws,
    Output,
    OutputLogits,
    Row,
    Score,
    Usage,
)

TOKEN = 7  # result of every draw


class StubFragments(Fragments):
    """KV memory that only counts slots."""

    def __init__(self) -> None:
        self._slots = 0

    def new(self, parent: Fragment | None) -> Fragment:
        """Return an empty fragment."""
        return Fragment()

    def write(self, fragment: Fragment, n_slots: int) -> None:
        """Append slots, as a forward does."""
        fragment.length += n_slots
        self._slots += n_slots

    def split(self, fragment: Fragment, at: int) -> Fragment:
        """Cut before slot `at`; return the new upper part."""
        if not 0 < at < fragment.length:
            raise ValueError(f"cannot cut {fragment.length} slots before slot {at}")
        fragment.length -= at
        return Fragment(at)

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Add `upper`'s number of slots to `lower`."""
        lower.length += upper.length

    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on."""
        if not 0 <= length <= fragment.length:
            raise ValueError(f"cannot trim {fragment.length} slots to {length}")
        self._slots -= fragment.length - length
        fragment.length = length

    def settle(self, fragment: Fragment) -> None:
        """Do nothing: fragments take the slots they have and no more."""

    def free(self, fragment: Fragment) -> None:
        """Remove all slots."""
        self.trim(fragment, 0)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Return arrays of zeros that only contain the number of slots."""
        keys = np.zeros((1, fragment.length, 1), np.int8)
        return {"k.0": keys, "v.0": keys[:, :, :0]}

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> Fragment:
        """Create a fragment with the number of slots of exported arrays."""
        keys, values = data.get("k.0"), data.get("v.0")
        if keys is None or values is None or values.shape != keys[..., :0].shape:
            raise ModelMismatch("the KV data lacks keys or values; drop it and recompute")
        if keys.dtype != np.int8 or keys.ndim != 3 or keys.shape[::2] != (1, 1):
            raise ModelMismatch("the KV data is not of the stub engine; drop it and recompute")
        fragment = Fragment()
        self.write(fragment, keys.shape[1])
        return fragment

    def usage(self) -> Usage:
        """Return the counted slots and 0 bytes."""
        return Usage(self._slots, 0)


class StubOutput(Output):
    """Constant logits, and draws that ignore them."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def synchronize(self) -> None:
        """Return at once: there is nothing to compute."""

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return the constant logits: float32 [V]."""
        row = np.zeros(self.n_vocab, np.float32)
        row[TOKEN] = 50.0
        return row

    def retain(self, indices: Sequence[int]) -> OutputLogits:
        """Keep this output, whose logits are constant."""
        return OutputLogits(self, indices, 4 * self.n_vocab * len(indices))

    def scores(self) -> list[list[Score]]:
        """Return no scores."""
        raise NotImplementedError("the stub engine scores nothing")

    def draw(self, batch: DrawBatch) -> Draws:
        """Return fixed tokens, without sampling."""
        n = len(batch.rows)
        zeros = np.zeros(n, np.float32)
        return HostDraws(DrawResult(np.full(n, TOKEN, np.int64), zeros, zeros, zeros))


class StubEngine(Engine):
    """Returns the same logits for every row. `n_rows` counts the rows."""

    def __init__(self, *, n_vocab: int = 64, context_length: int = 1 << 20) -> None:
        self.info = EngineInfo(
            name="stub",
            model="stub",
            n_layers=1,
            n_vocab=n_vocab,
            context_length=context_length,
            kv_bytes_per_token=1,
            dtype="float32",
            fingerprint="stub",
        )
        self.store = StubFragments()
        self.fragments = self.store
        self.n_rows = 0
        self._output = StubOutput(n_vocab)

    def forward(self, rows: Sequence[Row]) -> Output:
        """Count the rows and extend their fragments, without computing."""
        self.n_rows += len(rows)
        for row in rows:
            if row.kv_out is not None:
                self.store.write(row.kv_out, row.n_tokens)
        return self._output

    def close(self) -> None:
        """Do nothing: the engine has no memory to release."""
