"""Translation of a config.json of Transformers 5 into the keys that mlx-lm reads.

Transformers 5 stores rotary parameters in `rope_parameters`, one set per model or per layer type,
and the type of each layer in `layer_types`. Most model files of mlx-lm know only the older keys,
and use their defaults if such a key is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Keys of rope_parameters that are keys of their own in older files.
_OWN_KEYS = ("rope_theta", "partial_rotary_factor")
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Other names of the rotary base of sliding layers: Gemma 3, PLaMo 3, MiMo V2.
_SLIDING_THETAS = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")

# Keys by the names that mlx-lm requires: GPT-2, Qwen 3 MoE, LFM 2.
_RENAMED = {
    "n_ctx": "n_positions",
    "num_experts": "num_local_experts",
    "block_dim": "hidden_size",
}
# By family: mlx-lm's names of layer types, and keys without a counterpart in Transformers 5.
_LAYER_TYPES = {
    "granitemoehybrid": {"full_attention": "attention", "linear_attention": "mamba"},
}
_FIXED: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
}
# Families whose layers all use the sliding window if their config has one and no layer_types.
_ALL_SLIDE = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")


def mlx_lm_keys(config: Mapping[str, Any], *, n_ctx: int | None = None) -> dict[str, Any]:
    """Return the entries to add to a config.json, or to replace in it, for mlx-lm.

    Args:
        config: content of config.json.
        n_ctx: the context length in use; None if it is not limited. A longrope model gets its short
            factors if the context is not longer than the one that they were trained for.
    """
    text = config.get("text_config")
    entries = _entries_of_level(config, n_ctx)
    if isinstance(text, Mapping):
        entries["text_config"] = {**text, **_entries_of_level(text, n_ctx)}
    return entries


def _entries_of_level(config: Mapping[str, Any], n_ctx: int | None) -> dict[str, Any]:
    """Return the entries that mlx-lm needs at one level of a config (top level or text_config).

    These are older keys that the level lacks, and replacements; see `_replacement_entries`.
    """
    family = str(config.get("model_type"))
    entries = _rope_entries(config, n_ctx) | _layer_period_entry(config) | _FIXED.get(family, {})
    entries |= {older: config[key] for older, key in _RENAMED.items() if key in config}
    entries = {key: value for key, value in entries.items() if config.get(key) is None}
    return entries | _replacement_entries(config, family, n_ctx)


def _replacement_entries(
    config: Mapping[str, Any], family: str, n_ctx: int | None
) -> dict[str, Any]:
    """Return replacements of the entries whose values mlx-lm does not understand.

    family: the config's model_type. n_ctx: see `_rope_entries`.
    """
    entries: dict[str, Any] = {}
    if config.get("rope_parameters"):
        entries["rope_scaling"] = _rope_entries(config, n_ctx).get("rope_scaling")
    period = _layer_period_entry(config).get("sliding_window_pattern")
    if family == "exaone4" and isinstance(period, int):
        entries["sliding_window_pattern"] = "L" * (period - 1) + "G"
    names = _LAYER_TYPES.get(family)
    kinds = config.get("layer_types")
    if names is not None and isinstance(kinds, Sequence):
        entries["layer_types"] = [names.get(kind, kind) for kind in kinds]
    return entries


def _rope_entries(config: Mapping[str, Any], n_ctx: int | None) -> dict[str, Any]:
    """Return the rotary parameters under older keys, such as `rope_theta` and `rope_scaling`.

    n_ctx: the context length in use, which selects longrope's factors; see `mlx_lm_keys`.
    """
    stored = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(stored, Mapping):
        return {}
    sets = {key: value for key, value in stored.items() if isinstance(value, Mapping)}
    rope = sets.get(_FULL) or next(iter(sets.values()), stored)
    scaling = {key: value for key, value in rope.items() if key not in _OWN_KEYS}
    entries = {key: rope[key] for key in _OWN_KEYS if key in rope}
    if sets and "rope_theta" in (sliding := sets.get(_SLIDING) or {}):
        entries |= dict.fromkeys(_SLIDING_THETAS, sliding["rope_theta"])
    entries |= _neox_rope_names(entries)
    key = "original_max_position_embeddings"
    if key in rope:
        entries[key] = rope[key]
    return entries | {"rope_scaling": _older_rope_scaling(config, scaling, n_ctx)}


def _neox_rope_names(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters under GPT-NeoX's names, `rotary_emb_base` and `rotary_pct`."""
    entries: dict[str, Any] = {}
    if "rope_theta" in rope:
        entries["rotary_emb_base"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        entries["rotary_pct"] = rope["partial_rotary_factor"]
    return entries


def _older_rope_scaling(
    config: Mapping[str, Any], scaling: dict[str, Any], n_ctx: int | None
) -> dict[str, Any] | None:
    """Return `rope_scaling` with its kind also under the older key "type"; None without scaling."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("default", "mrope"):
        return scaling if kind == "mrope" else None
    scaling = {**scaling, "rope_type": kind, "type": kind}
    if isinstance(scaling.get("factor"), int):
        scaling["factor"] = float(scaling["factor"])  # some model files assert a float
    if kind == "longrope":
        scaling = _choose_longrope_factors(config, scaling, n_ctx)
    return scaling


def _choose_longrope_factors(
    config: Mapping[str, Any], scaling: dict[str, Any], n_ctx: int | None
) -> dict[str, Any]:
    """Replace the long factors, which mlx-lm always uses, by the short ones if `n_ctx` is short.

    n_ctx: the context length in use. It is short if it is at most
        `original_max_position_embeddings`.
    """
    key = "original_max_position_embeddings"
    original = scaling.get(key) or config.get(key)
    if original:
        scaling[key] = original
        if n_ctx is not None and n_ctx <= original:
            scaling["long_factor"] = scaling["short_factor"]
    return scaling


def _layer_period_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry with the period of full-attention layers; {} if the layers are irregular.

    Its key is `sliding_window_pattern` if the other layers use a sliding window, and
    `full_attention_interval` if they use linear attention.
    """
    kinds = config.get("layer_types")
    if not isinstance(kinds, Sequence) or _FULL not in kinds:
        return {}
    period = list(kinds).index(_FULL) + 1
    for other, key in ((_SLIDING, "sliding_window_pattern"), (_LINEAR, "full_attention_interval")):
        regular = [other if (i + 1) % period else _FULL for i in range(len(kinds))]
        if other in kinds and regular == list(kinds):
            return {key: period}
    return {}


def windows_of(config: Mapping[str, Any]) -> list[int | None]:
    """Return the sliding window of each layer; None for a layer with full attention.

    The list is empty if the config has no sliding window.
    """
    text = config.get("text_config")
    level = {**config, **(text if isinstance(text, Mapping) else {})}
    window, n_layers = level.get("sliding_window"), level.get("num_hidden_layers")
    if not isinstance(window, int) or not isinstance(n_layers, int) or window <= 0:
        return []
    kinds = level.get("layer_types") or _default_layer_types(level, n_layers)
    return [window if kind == _SLIDING else None for kind in kinds]


def _default_layer_types(level: Mapping[str, Any], n_layers: int) -> list[str]:
    """Return the type of each layer for a family whose config.json does not list them."""
    family = level.get("model_type")
    first = n_layers
    if level.get("use_sliding_window"):
        first = level.get("max_window_layers") or 0
    elif family in _ALL_SLIDE:
        first = 0
    elif family == "gemma2":
        return [_FULL if i % 2 else _SLIDING for i in range(n_layers)]
    return [_SLIDING if i >= first else _FULL for i in range(n_layers)]
