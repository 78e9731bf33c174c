"""The shape of a Llama-family model, from config.json, and its rotary embedding.

A head of D values is treated as D/2 complex numbers. The rotation for position p multiplies number
i by exp(1j * p * frequency[i]). Weights are loaded with the two values of a pair adjacent
(`interleave_heads`), so that the multiplication needs no reordering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core.atomic_files import repr_short
from ..._core.validation import check_int
from ...errors import ModelLoadError, Unsupported
from ..checkpoint import architectures, reject_mlx_quantised

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ELSEWHERE = 'try engine="torch"'


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a Llama-family model."""

    # `model_type` of config.json, for messages.
    model_type: str
    # Number of decoder layers.
    n_layers: int
    # Number of query heads.
    n_heads: int
    # Number of key and value heads.
    n_kv_heads: int
    # Size of a head.
    head_dim: int
    # Size of a hidden state.
    n_hidden: int
    # Size of the MLP's inner layer.
    n_intermediate: int
    # Vocabulary size.
    n_vocab: int
    # Maximum number of tokens of a path.
    context_length: int
    # Epsilon of the RMS norms.
    norm_eps: float
    # The LM head is the embedding matrix.
    tied: bool
    # The projections of attention have biases.
    attention_bias: bool
    # The projections of the MLP have biases.
    mlp_bias: bool
    # Parameters of the rotary embedding, including `rope_theta` and `rope_type`.
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in float32, over all layers."""
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * 4


def parse_config(raw: Mapping[str, Any], *, n_ctx: int | None = None) -> LlamaConfig:
    """Convert the content of config.json; `n_ctx` shortens the context.

    Raises:
        Unsupported: the engine does not run the architecture or one of its features.
        ModelLoadError: a value is missing or invalid.
        ConfigError: n_ctx is below 1 or above the model's own.
    """
    architecture = _architecture(raw)
    reject_mlx_quantised(raw, "numpy")
    n_hidden, n_heads = _read_integer(raw, "hidden_size"), _read_integer(raw, "num_attention_heads")
    config = LlamaConfig(
        model_type=str(raw.get("model_type", "llama")),
        n_layers=_read_integer(raw, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=_read_integer(raw, "num_key_value_heads", default=n_heads),
        head_dim=_read_integer(raw, "head_dim", default=n_hidden // n_heads),
        n_hidden=n_hidden,
        n_intermediate=_read_integer(raw, "intermediate_size"),
        n_vocab=_read_integer(raw, "vocab_size"),
        context_length=_context_length(_read_integer(raw, "max_position_embeddings"), n_ctx),
        norm_eps=_read_number(raw, "rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        rope=_rope_parameters(raw),
    )
    _check_features(raw, config, architecture)
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return the first class name in config.json that the engine supports; raise Unsupported if
    none.
    """
    names = architectures(raw) or [f"model_type {raw.get('model_type')}"]
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise Unsupported(
        f"the NumPy engine has no {', '.join(names)}; "
        f"supported are {', '.join(ARCHITECTURES)}; {ELSEWHERE}",
        hint=ELSEWHERE,
    )


def _read_integer(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """Return `raw[key]`, or `default` if it is missing. Raise ModelLoadError unless it is 1 or
    more.
    """
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ModelLoadError(
            f"config.json: {key} is {repr_short(value)}; it must be an integer of 1 or more"
        )
    return value


def _read_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return `raw[key]`, or `default` if it is missing. Raise ModelLoadError unless it is above
    0.
    """
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelLoadError(
            f"config.json: {key} is {repr_short(value)}; it must be a number above 0"
        )
    return float(value)


def _context_length(of_model: int, n_ctx: int | None) -> int:
    """Return the context length in tokens: `n_ctx` if given (validated), else the model's own."""
    return of_model if n_ctx is None else check_int("n_ctx", n_ctx, 1, of_model)


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, or the older `rope_theta` and `rope_scaling` in the same form."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"config.json: rope is {repr_short(given)}; it must be an object")
    rope = dict(given)
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
        if key in rope:
            rope[key] = _read_number(rope, key, 0.0)
    return rope


def _check_features(raw: Mapping[str, Any], config: LlamaConfig, architecture: str) -> None:
    """Raise Unsupported if config.json has a feature that the engine lacks, such as sliding
    windows.
    """
    if config.n_heads % config.n_kv_heads:
        raise ModelLoadError(
            f"config.json: {config.n_heads} heads cannot share {config.n_kv_heads} KV heads evenly"
        )
    feature = None
    if raw.get("hidden_act", "silu") != "silu":
        feature = f"activation {repr_short(raw['hidden_act'])}"
    elif raw.get("quantization_config"):
        feature = "quantized weights"
    elif config.rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        feature = "a partial rotary embedding"
    elif config.head_dim % 2:
        feature = f"an odd head dimension ({config.head_dim})"
    elif (
        window := _sliding_window(raw, architecture)
    ) is not None and window < config.context_length:
        feature = f"sliding-window attention (window {window})"
    if feature:
        raise Unsupported(
            f"this {architecture} has {feature}, which the NumPy engine lacks; {ELSEWHERE}",
            hint=ELSEWHERE,
        )


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    """Return the sliding window in tokens; None for full attention.

    Qwen's configurations contain a window that is not in use.
    """
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window"):
        return None
    return None if raw.get("sliding_window") is None else _read_integer(raw, "sliding_window")


def frequencies(parameters: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return the rotary embedding's angle in radians per position, for each pair: float32 [D/2].

    Args:
        parameters: `rope_type`, `rope_theta` and the type's own, as in config.json.
        head_dim: size D of a head.

    Raises:
        Unsupported: the rope type is not one of default, linear and llama3.
        ModelLoadError: one of its parameters is missing.
    """
    kind = parameters["rope_type"]
    scale = _SCALINGS.get(kind) if isinstance(kind, str) else None
    if scale is None:
        raise Unsupported(
            f"the NumPy engine has no rope type {repr_short(kind)}; "
            f"supported are {', '.join(_SCALINGS)}; {ELSEWHERE}",
            hint=ELSEWHERE,
        )
    # NOTE: rounded where the models' own code rounds: the last bit matters at position 1000.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = float(parameters["rope_theta"]) ** exponents.astype(np.float64)
    unscaled = np.float32(1) / powers.astype(np.float32)
    try:
        return scale(unscaled, parameters)
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope type {kind!r} needs {error.args[0]!r}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"config.json: the numbers of rope type {kind!r}: {error}") from error


def interleave_heads(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder the first axis, heads of D rows, from (x0…, y0…) to (x0, y0, x1, y1, …); a copy."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def interleave(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorder the last axis, [..., D], from (x0…, y0…) to (x0, y0, x1, y1, …); a copy."""
    halves = keys.reshape(*keys.shape[:-1], 2, keys.shape[-1] // 2)
    return halves.swapaxes(-1, -2).reshape(keys.shape)


def deinterleave(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undo `interleave`, to the order of the model's own files; a copy."""
    pairs = keys.reshape(*keys.shape[:-1], keys.shape[-1] // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(keys.shape)


def _unscaled(unscaled: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the frequencies of rope type "default", which has no scaling."""
    return unscaled


def _linear_scaling(unscaled: NDArray[np.float32], given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Divide all frequencies by the rope parameter `factor`."""
    return unscaled / float(given["factor"])


def _llama3_scaling(unscaled: NDArray[np.float32], given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between them.

    unscaled: unscaled frequencies. given: parameters of the rope type.
    """
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, low_freq_factor {low}")
    rotations = float(given["original_max_position_embeddings"]) * unscaled / (2 * np.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * unscaled / float(given["factor"]) + keep * unscaled


_Scaling = Callable[[NDArray[np.float32], Mapping[str, Any]], NDArray[np.float32]]
_SCALINGS: dict[str, _Scaling] = {
    "default": _unscaled,
    "linear": _linear_scaling,
    "llama3": _llama3_scaling,
}
