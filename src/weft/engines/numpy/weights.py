"""A model's weights in memory: float32, laid out for row-major products, projections fused."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError
from ..checkpoint import Checkpoint
from ..source import Progress
from .config import LlamaConfig
from .rope import pair_up

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
