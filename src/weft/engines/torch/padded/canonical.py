"""Padded KV whose attention is independent of other rows: one product over each token's full path.

The usual step computes attention over a path in chunks, and pads rows to the longest: chunks and
widths depend on other rows. Here every product has one token's query heads and one path's keys,
padded to full vectors. So its sums do not depend on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base import Row
from ..kv_backend import AttentionSpec
from .attention import Mask, apply_sinks, attend
from .kv import SingleSequenceCache
from .step import PaddedBackend, PaddedStep

_KEYS = 16  # keys are padded to a multiple: the CPU's product sums vectors of this length


class CanonicalBackend(PaddedBackend):
    """The padded backend, with steps whose bits do not depend on other rows."""

    def start_step(self, rows: Sequence[Row]) -> CanonicalStep:
        """Return a step whose bits do not depend on other rows."""
        return CanonicalStep(rows, self)

    def single_sequence_for(self, rows: Sequence[Row]) -> SingleSequenceCache | None:
        """Return None: a step never uses the shortcut for one row, whose sums would differ."""
        return None


class CanonicalStep(PaddedStep):
    """A step with the same bits for any other rows: it attends to a copy of each row's path.

    Cost: copies the KV of each row's path, in each layer.
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Attend row by row over a copy of each row's path; see `AttentionStep.attend`."""
        q, k, v = query[0], key[0], value[0]
        if self.plan.prefill_groups:
            self.keys[layer], self.values[layer] = k, v
        for number, decode in enumerate(self.plan.decode_groups):
            self._write(
                decode.buffer.keys[layer], self._writes[number], k[:, decode.start : decode.stop]
            )
            self._write(
                decode.buffer.values[layer], self._writes[number], v[:, decode.start : decode.stop]
            )
        out = v.new_empty(q.shape[1], q.shape[0], v.shape[-1])
        for row, start in zip(self.rows, self.starts, strict=True):
            here = slice(start, start + row.n_tokens)
            out[here] = self._row(row, layer, q[:, here], k[:, here], v[:, here], spec)
        return out[None]

    def _row(
        self, row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Return the attention of one row's tokens to the row's full path: [n, H, Dv]."""
        n, n_kv = row.n_tokens, k.shape[0]
        length = row.position + n
        padding = -length % _KEYS
        spans = [(span.fragment, span.length) for span in row.prefix if span.length]
        if row.kv_out is not None and row.kv_out.length:
            spans.append((row.kv_out, row.kv_out.length))
        views = [self.store.views(*span) for span in spans]
        more_k, more_v = (t.new_zeros(n_kv, padding, t.shape[-1]) for t in (k, v))
        keys = torch.cat([*(view[0][layer][0] for view in views), k, more_k], 1)
        values = torch.cat([*(view[1][layer][0] for view in views), v, more_v], 1)
        places = torch.arange(length + padding, device=q.device)[None]
        own = torch.arange(row.position, length, device=q.device)[:, None]
        hidden = places > own
        if spec.window is not None:
            hidden |= places <= own - spec.window
        bias = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, -math.inf)
        queries = q.unflatten(0, (n_kv, -1)).permute(2, 0, 1, 3)  # [n, K, g, D]
        out, lse = attend(
            queries,
            keys.expand(n, -1, -1, -1),
            values.expand(n, -1, -1, -1),
            spec,
            Mask(bias.to(q.dtype)[:, None, None]),
        )
        if spec.sinks is not None:
            apply_sinks(out, lse, spec.sinks.view(1, n_kv, -1).float())
        return out.flatten(1, 2).to(v.dtype)
