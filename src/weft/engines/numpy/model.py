"""A Llama-family model: its weights in memory, and the forward over the tokens of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError
from ..checkpoint import Checkpoint
from ..source import Progress
from .config import LlamaConfig, Rope, pair_up
from .step import Plan


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


Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight + bias, with weight [in, out]."""

    weight: Floats
    bias: Floats | None = None

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.weight
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    qkv gives H query, K key and K value heads in that order; query and key heads are paired up for
    `Rope`, queries already scaled by D ** -0.5. qk_norm: float32 [H + K, D], for models that
    normalise heads; the query scale is in it then.
    """

    attention_norm: Floats
    qkv: Linear
    qk_norm: Floats | None
    out: Linear
    mlp_norm: Floats
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """embed: float32 [V, E]; head: float32 [E, V], a view of embed where they are tied."""

    embed: Floats
    layers: tuple[Layer, ...]
    norm: Floats
    head: Floats


def read_weights(
    checkpoint: Checkpoint, config: LlamaConfig, *, progress: Progress | None = None
) -> Weights:
    """Read all tensors of a checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, has another shape than config.json says, or is unknown.
    """
    _refuse_unknown(checkpoint, config)
    layers = []
    for index in range(config.n_layers):
        layers.append(_LayerReader(checkpoint, config, index).layer())
        if progress is not None:
            progress("load", index + 1, config.n_layers, "")
    table = (config.n_vocab, config.n_hidden)
    embed = checkpoint.read("model.embed_tokens.weight", table)
    head = embed if config.tied else checkpoint.read("lm_head.weight", table)
    norm = checkpoint.read("model.norm.weight", (config.n_hidden,))
    return Weights(embed, tuple(layers), norm, head.T)


class _LayerReader:
    """Reads the tensors of one layer by their short names."""

    def __init__(self, checkpoint: Checkpoint, config: LlamaConfig, index: int) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._prefix = f"model.layers.{index}."

    def layer(self) -> Layer:
        config = self._config
        n_queries, n_keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        hidden, inner = config.n_hidden, config.n_intermediate
        heads = {"q_proj": n_queries, "k_proj": n_keys, "v_proj": n_keys}
        qk_norm = self._qk_norm()
        return Layer(
            attention_norm=self._read("input_layernorm.weight", hidden),
            qkv=self._linear("self_attn", heads, hidden, scale_queries=qk_norm is None),
            qk_norm=qk_norm,
            out=self._linear("self_attn", {"o_proj": hidden}, n_queries),
            mlp_norm=self._read("post_attention_layernorm.weight", hidden),
            gate_up=self._linear("mlp", {"gate_proj": inner, "up_proj": inner}, hidden),
            down=self._linear("mlp", {"down_proj": hidden}, inner),
        )

    def _linear(
        self, block: str, outs: dict[str, int], n_in: int, *, scale_queries: bool = False
    ) -> Linear:
        """One product out of several projections of the same input."""
        weights = [
            self._projection(f"{block}.{name}.weight", scale_queries, n_out, n_in)
            for name, n_out in outs.items()
        ]
        weight = np.ascontiguousarray(np.concatenate(weights).T)
        if not self._has_bias(block, outs):
            return Linear(weight)
        biases = [
            self._projection(f"{block}.{name}.bias", scale_queries, n_out)
            for name, n_out in outs.items()
        ]
        return Linear(weight, np.concatenate(biases))

    def _projection(self, name: str, scale_queries: bool, *shape: int) -> Floats:
        tensor = self._read(name, *shape)
        if "q_proj" in name or "k_proj" in name:
            tensor = pair_up(tensor, self._config.head_dim)
        if scale_queries and "q_proj" in name:
            tensor *= np.float32(self._config.head_dim**-0.5)
        return tensor

    def _has_bias(self, block: str, outs: dict[str, int]) -> bool:
        config = self._config
        asked = config.attention_bias if block == "self_attn" else config.mlp_bias
        names = (f"{self._prefix}{block}.{name}.bias" for name in outs)
        return asked or any(name in self._checkpoint for name in names)

    def _qk_norm(self) -> Floats | None:
        if f"{self._prefix}self_attn.q_norm.weight" not in self._checkpoint:
            return None
        config = self._config
        query = pair_up(self._read("self_attn.q_norm.weight", config.head_dim), config.head_dim)
        key = pair_up(self._read("self_attn.k_norm.weight", config.head_dim), config.head_dim)
        query *= np.float32(config.head_dim**-0.5)
        return np.stack([query] * config.n_heads + [key] * config.n_kv_heads)

    def _read(self, name: str, *shape: int) -> Floats:
        return self._checkpoint.read(self._prefix + name, shape)


_LAYER_TENSORS = frozenset(
    [f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")]
    + [f"mlp.{name}_proj.{part}" for name in ("gate", "up", "down") for part in ("weight", "bias")]
    + ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    + ["input_layernorm.weight", "post_attention_layernorm.weight"]
)
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_MODEL_TENSORS = frozenset(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])


def _refuse_unknown(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """A tensor left over means that the model computes something this engine does not."""
    unknown = sorted(name for name in checkpoint.tensors if not _is_known(name, config.n_layers))
    if unknown:
        raise ModelLoadError(
            f"{checkpoint.folder} holds {len(unknown)} tensors that a {config.model_type} model of "
            f"{config.n_layers} layers has no use for, {unknown[0]!r} among them; "
            "config.json and weights do not belong together"
        )


def _is_known(name: str, n_layers: int) -> bool:
    layer = _OF_LAYER.fullmatch(name)
    if layer is not None and int(layer[1]) < n_layers and layer[2] in _LAYER_TENSORS:
        return True
    return name in _MODEL_TENSORS or name.endswith("rotary_emb.inv_freq")
