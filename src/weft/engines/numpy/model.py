"""A Llama-family model: its weights in memory, and the forward over the tokens of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError
from ..checkpoint import Checkpoint
from ..hub import Progress
from .config import LlamaConfig, frequencies, interleave_heads
from .step import StepPlan


class Model:
    """The weights of a Llama-family model and its forward. Keys and values are in the
    `StepPlan`.
    """

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim)

    def hidden(self, ids: NDArray[np.int64], plan: StepPlan) -> Floats:
        """Run all layers on packed token ids, and store their KV through `plan`.

        Args:
            ids: int64 [N].
            plan: `StepPlan` of the same tokens.

        Returns:
            Output of the last layer, before the final norm: float32 [N, E].
        """
        eps = self._config.norm_eps
        x = take_rows(self._weights.embed, ids)
        rotations = self._rope.rotations(plan.positions)
        # NOTE: exp(-gate) may overflow to inf, which is correct: the gate is then 0.
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._weights.layers):
                y = rms_norm(x, layer.attention_norm, eps)
                x += layer.out(self._attention(y, index, layer, rotations, plan))
                x += _mlp(rms_norm(x, layer.mlp_norm, eps), layer)
        return x

    def logits(self, hidden: Floats) -> Floats:
        """Apply the final norm and the LM head: float32 [n, V].

        hidden: rows of the result of `hidden`, [n, E].
        """
        return matmul(self.final_norm(hidden), self._weights.head)

    def final_norm(self, hidden: Floats) -> Floats:
        """Return rows of `hidden` after the final norm; a new array."""
        return rms_norm(hidden, self._weights.norm, self._config.norm_eps)

    def _attention(
        self, y: Floats, index: int, layer: Layer, rotations: NDArray[np.complex64], plan: StepPlan
    ) -> Floats:
        """Return the attention output of layer `index` before its output projection: float32 [N, H
        * D].

        Args:
            y: float32 [N, E], the layer's normalised input.
            index: number of the layer.
            layer: its weights.
            rotations: complex64 [N, D/2], of `Rope`.
            plan: stores the new keys and values, and computes attention over all stored ones.
        """
        c = self._config
        n, h, k, d = len(y), c.n_heads, c.n_kv_heads, c.head_dim
        qkv = layer.qkv(y)
        qk = qkv[:, : (h + k) * d].reshape(n, h + k, d)
        if layer.qk_norm is not None:
            qk[...] = rms_norm(qk, layer.qk_norm, c.norm_eps)
        pairs = qk.view(np.complex64)
        pairs *= rotations[:, None]
        plan.write(index, qkv[:, h * d :].reshape(n, 2, k, d))
        queries = np.ascontiguousarray(qk[:, :h].reshape(n, k, h // k, d).swapaxes(0, 1))
        out = np.empty_like(queries)
        plan.attend(index, queries, out)
        return out.swapaxes(0, 1).reshape(n, h * d)


class Rope:
    """Rotary position embedding (RoPE): a cached table of rotations per position, extended on
    demand.
    """

    def __init__(self, parameters: Mapping[str, Any], head_dim: int) -> None:
        self._frequencies = frequencies(parameters, head_dim)
        self._table = np.empty((0, head_dim // 2), np.complex64)

    def rotations(self, positions: NDArray[np.int64]) -> NDArray[np.complex64]:
        """Return complex factors [N, D/2] for int64 [N] positions.

        Queries and keys, viewed as complex64 pairs, are multiplied by them.
        """
        longest = int(positions.max())
        if longest >= len(self._table):
            self._grow(max(256, 2 * longest))
        return self._table[positions]

    def _grow(self, length: int) -> None:
        """Compute the table for positions 0 … length - 1."""
        # NOTE: angles are rounded to float32 on purpose, as in training.
        steps = np.arange(length, dtype=np.float32)
        angles = (steps[:, None] * self._frequencies).astype(np.float64)
        self._table = np.exp(1j * angles).astype(np.complex64)


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
    """Return the MLP's output, float32 [N, E]: down(silu(gate) * up), with silu(g) = g / (1 +
    exp(-g)).

    y: float32 [N, E].
    """
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
Matrix = NDArray[np.float32] | NDArray[np.uint16]  # uint16: the bits of bfloat16

_BLOCK = 1 << 20  # values to convert from or to bfloat16 at a time


def to_bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, to nearest and ties to even. Return the bits as uint16."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    packed = np.empty(bits.size, np.uint16)
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        odd = (block >> np.uint32(16)) & np.uint32(1)
        packed[start : start + _BLOCK] = (block + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    return packed.reshape(values.shape)


def from_bfloat16_bits(bits: NDArray[np.uint16]) -> Floats:
    """Convert bfloat16 values, given as uint16 bits, to float32."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def take_rows(matrix: Matrix, ids: NDArray[np.int64]) -> Floats:
    """Return the rows `ids` of a float32 or bfloat16 matrix as a new float32 array."""
    rows = matrix[ids]
    return from_bfloat16_bits(rows) if rows.dtype == np.uint16 else rows  # type: ignore[arg-type,return-value]


def matmul(x: Floats, matrix: Matrix) -> Floats:
    """Return x @ matrix in float32. A bfloat16 matrix [in, out] is converted block by block."""
    if matrix.dtype == np.float32:
        y: Floats = x @ matrix
        return y
    n_in, n_out = matrix.shape
    y = np.empty((len(x), n_out), np.float32)
    step = max(1, _BLOCK // n_in)
    for start in range(0, n_out, step):
        block = matrix[:, start : start + step]
        # NOTE: a transposed view is read through its base, so that memory access is sequential.
        is_transposed = block.flags.f_contiguous
        wide = from_bfloat16_bits(block.T).T if is_transposed else from_bfloat16_bits(block)  # type: ignore[arg-type]
        np.matmul(x, wide, out=y[:, start : start + step])
    return y


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: y = x @ weight + bias, with weight [in, out] in float32 or bfloat16."""

    weight: Matrix
    bias: Floats | None = None

    def __call__(self, x: Floats) -> Floats:
        y = matmul(x, self.weight)
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer: attention norm and projections, MLP norm and projections."""

    # RMS norm before attention: float32 [E].
    attention_norm: Floats
    # H query, K key and K value heads, in this order. Query and key dimensions are interleaved for
    # `Rope`. Queries are scaled by D ** -0.5, unless `qk_norm` contains the scale.
    qkv: Linear
    # Norm per head, float32 [H + K, D]; None if the model has none.
    qk_norm: Floats | None
    # Output projection of attention.
    out: Linear
    # RMS norm before the MLP: float32 [E].
    mlp_norm: Floats
    # Gate and up projections, concatenated.
    gate_up: Linear
    # Down projection of the MLP.
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model.

    Args:
        embed: [V, E].
        layers: decoder layers.
        norm: float32 [E], weight of the final norm.
        head: [E, V]; a view of `embed` if the embeddings are tied.
    """

    embed: Matrix
    layers: tuple[Layer, ...]
    norm: Floats
    head: Matrix


def read_weights(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    *,
    is_packed: bool = False,
    progress: Progress | None = None,
) -> Weights:
    """Read all tensors of a checkpoint.

    Args:
        checkpoint: tensors to read.
        config: shape of the model.
        is_packed: keep matrices in bfloat16.
        progress: callback per layer.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or has another shape than config.json
            requires.
    """
    _check_tensor_names(checkpoint, config)
    layers = []
    for index in range(config.n_layers):
        layers.append(_LayerReader(checkpoint, config, index, is_packed=is_packed).layer())
        if progress is not None:
            progress("load", index + 1, config.n_layers, "")
    table = (config.n_vocab, config.n_hidden)
    embed = _to_matrix(checkpoint.read("model.embed_tokens.weight", table), is_packed=is_packed)
    head = embed
    if not config.tied:
        head = _to_matrix(checkpoint.read("lm_head.weight", table), is_packed=is_packed)
    norm = checkpoint.read("model.norm.weight", (config.n_hidden,))
    return Weights(embed, tuple(layers), norm, head.T)


def _to_matrix(matrix: Floats, *, is_packed: bool) -> Matrix:
    """Return the matrix, rounded to bfloat16 if `is_packed`."""
    return to_bfloat16_bits(matrix) if is_packed else matrix


class _LayerReader:
    """Reads the tensors of decoder layer `index` from a checkpoint and checks their shapes."""

    def __init__(
        self, checkpoint: Checkpoint, config: LlamaConfig, index: int, *, is_packed: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._is_packed = is_packed
        self._prefix = f"model.layers.{index}."

    def layer(self) -> Layer:
        """Read and return the weights of the layer, with projections of one input merged."""
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
        """Return one linear layer that computes several projections of the same input.

        Args:
            block: module of the projections: "self_attn" or "mlp".
            outs: output size of each projection, by name.
            n_in: size of the input.
            scale_queries: multiply the query projection by the scale of the attention scores.
        """
        weights = [
            self._projection(f"{block}.{name}.weight", scale_queries, n_out, n_in)
            for name, n_out in outs.items()
        ]
        joined = np.ascontiguousarray(np.concatenate(weights).T)
        weight = _to_matrix(joined, is_packed=self._is_packed)
        if not self._has_bias(block, outs):
            return Linear(weight)
        biases = [
            self._projection(f"{block}.{name}.bias", scale_queries, n_out)
            for name, n_out in outs.items()
        ]
        return Linear(weight, np.concatenate(biases))

    def _projection(self, name: str, scale_queries: bool, *shape: int) -> Floats:
        """Read the weight or bias `name` of a projection.

        Heads of queries and keys are interleaved for `Rope`. `scale_queries`: see `_linear`.
        """
        tensor = self._read(name, *shape)
        if "q_proj" in name or "k_proj" in name:
            tensor = interleave_heads(tensor, self._config.head_dim)
        if scale_queries and "q_proj" in name:
            tensor *= np.float32(self._config.head_dim**-0.5)
        return tensor

    def _has_bias(self, block: str, outs: dict[str, int]) -> bool:
        """Return True if config.json gives these projections biases, or the checkpoint has them."""
        config = self._config
        is_declared = config.attention_bias if block == "self_attn" else config.mlp_bias
        names = (f"{self._prefix}{block}.{name}.bias" for name in outs)
        return is_declared or any(name in self._checkpoint for name in names)

    def _qk_norm(self) -> Floats | None:
        """Return the norm weights of all query and key heads; None if the layer has none."""
        if f"{self._prefix}self_attn.q_norm.weight" not in self._checkpoint:
            return None
        config = self._config
        query = interleave_heads(
            self._read("self_attn.q_norm.weight", config.head_dim), config.head_dim
        )
        key = interleave_heads(
            self._read("self_attn.k_norm.weight", config.head_dim), config.head_dim
        )
        query *= np.float32(config.head_dim**-0.5)
        return np.stack([query] * config.n_heads + [key] * config.n_kv_heads)

    def _read(self, name: str, *shape: int) -> Floats:
        """Read the layer's tensor `name` as float32. Raise ModelLoadError if its shape is not
        `shape`.
        """
        return self._checkpoint.read(self._prefix + name, shape)


_LAYER_TENSORS = frozenset(
    [f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")]
    + [f"mlp.{name}_proj.{part}" for name in ("gate", "up", "down") for part in ("weight", "bias")]
    + ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    + ["input_layernorm.weight", "post_attention_layernorm.weight"]
)
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_MODEL_TENSORS = frozenset(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])


def _check_tensor_names(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Raise ModelLoadError if the checkpoint has tensors that this engine would ignore."""
    unknown = sorted(name for name in checkpoint.tensors if not _is_expected(name, config.n_layers))
    if unknown:
        raise ModelLoadError(
            f"{checkpoint.folder} has {len(unknown)} tensors that a {config.model_type} model of "
            f"{config.n_layers} layers does not use, for example {unknown[0]!r}; "
            "config.json and weights do not belong together"
        )


def _is_expected(name: str, n_layers: int) -> bool:
    """Return True if a Llama-family model of `n_layers` layers has a tensor of this name."""
    layer = _OF_LAYER.fullmatch(name)
    if layer is not None and int(layer[1]) < n_layers and layer[2] in _LAYER_TENSORS:
        return True
    return name in _MODEL_TENSORS or name.endswith("rotary_emb.inv_freq")
