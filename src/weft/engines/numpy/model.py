"""The forward computation of a Llama-family model over the packed tokens of a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .config import LlamaConfig
from .plan import Plan
from .rope import Rope
from .weights import Floats, Layer, Weights


class Model:
    """Weights and the arithmetic on them; knows keys and values only through the plan."""

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim)

    def hidden(self, ids: NDArray[np.int64], plan: Plan) -> Floats:
        """Run all layers, storing new slots: return the last one's output, float32 [N, E]."""
        eps = self._config.norm_eps
        x: Floats = self._weights.embed[ids]
        turns = self._rope.turns(plan.positions)
        # NOTE: exp(-gate) may overflow to inf, which is right: the gate is then 0.
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._weights.layers):
                y = rms_norm(x, layer.attention_norm, eps)
                x += layer.out(self._attention(y, index, layer, turns, plan))
                x += _mlp(rms_norm(x, layer.mlp_norm, eps), layer)
        return x

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits of some rows of `hidden`: float32 [n, V]."""
        logits: Floats = self.normed(hidden) @ self._weights.head
        return logits

    def normed(self, hidden: Floats) -> Floats:
        """Return some rows of `hidden` as the head sees them; a new array."""
        return rms_norm(hidden, self._weights.norm, self._config.norm_eps)

    def _attention(
        self, y: Floats, index: int, layer: Layer, turns: NDArray[np.complex64], plan: Plan
    ) -> Floats:
        c = self._config
        n, h, k, d = len(y), c.n_heads, c.n_kv_heads, c.head_dim
        qkv = layer.qkv(y)
        qk = qkv[:, : (h + k) * d].reshape(n, h + k, d)
        if layer.qk_norm is not None:
            qk[...] = rms_norm(qk, layer.qk_norm, c.norm_eps)
        pairs = qk.view(np.complex64)
        pairs *= turns[:, None]
        plan.write(index, qkv[:, h * d :].reshape(n, 2, k, d))
        queries = np.ascontiguousarray(qk[:, :h].reshape(n, k, h // k, d).swapaxes(0, 1))
        out = np.empty_like(queries)
        plan.attend(index, queries, out)
        return out.swapaxes(0, 1).reshape(n, h * d)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Scale the last axis to a root mean square of 1, then by `weight`; a new array."""
    scale = np.vecdot(x, x)
    scale *= 1.0 / x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    y: Floats = x / scale[..., None]
    y *= weight
    return y


def _mlp(y: Floats, layer: Layer) -> Floats:
    """down(silu(gate) * up), with silu(g) = g / (1 + exp(-g))."""
    gate_up = layer.gate_up(y)
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    denominator = np.negative(gate)
    np.exp(denominator, out=denominator)
    denominator += 1
    gate /= denominator
    gate *= up
    return layer.down(gate)
