"""Compare the numbers of a config.json with the values that a library took from it.

A library that does not know a key, or reads it under another name, computes with its own default.
Loading the weights detects wrong shapes; nothing else detects a wrong scalar.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import Unsupported
from .checkpoint import CONTEXT_NAMES

_log = logging.getLogger("weft.engines")

# Scalars that change every logit: key → the value that changes nothing, so it may be ignored.
_DECISIVE: dict[str, float | bool | None] = {
    "rope.rope_theta": None,
    "rope.factor": 1.0,
    "rope.partial_rotary_factor": 1.0,
    "rope.low_freq_factor": None,
    "rope.high_freq_factor": None,
    "rope.sliding.rope_theta": None,
    "rope_interleave": True,
    "decoder_sparse_step": 1,
    "num_experts_per_tok": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "clip_qkv": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "logits_soft_cap": None,
    "use_qk_norm": False,
}
# Scalars of training, of generation, and of how a library runs a model.
_HARMLESS = re.compile(
    r"\w*(token_ids?|token_index|dropout|pdrop|loss_coef|z_loss|jitter_noise|init\w*"
    r"|variance_scale|_kernels)|pretraining_tp|use_\w*(cache|mamba\w*|scan)|is_\w+|add_cross\w+"
    r"|output_\w+|return_\w+|summary_\w+|num_labels|time_step_\w+|rescale_\w+|residual_in_fp32"
    r"|num_logits_to_keep|moe_norm_min|global_attn_every_n_layers|num_nextn_predict_layers|torchscript|(temperature|top_[kp]|max_length)"
)
# Older or alternative names of the same value.
_SAME = {
    "rope_theta": "rope.rope_theta",
    "rotary_emb_base": "rope.rope_theta",
    "partial_rotary_factor": "rope.partial_rotary_factor",
    "rotary_pct": "rope.partial_rotary_factor",
    "rope_local_base_freq": "rope.sliding.rope_theta",
    "num_local_experts": "num_experts",
}
# Shapes, which loading the weights checks, and windows, which engines compare by layer.
_SHAPES = re.compile(
    r"(n|num)_\w*(layers?|heads?|head|groups|experts|embd|inner)|\w*(_size|_dim|_rank)"
    r"|vocab_size|\w*bias|tie_\w+|expand|\w*_expand|max_window_layers"
    r"|\w*sliding_window(_pattern)?|num_experts"
)

Number = int | float
# The end of error messages about models that a library reads incorrectly.
OTHER_ENGINE = "; use another engine"


def check_config(
    stored: Mapping[str, Any],
    taken: Mapping[str, Any],
    *,
    library: str,
    epsilons: Iterable[float] = (),
) -> None:
    """Check that a library computes with the numbers of a model's config.json.

    Logs a warning for numbers that the library ignores and that matter less.

    Args:
        stored: content of config.json.
        taken: the library's own configuration, in keys of Transformers or older ones.
        library: its name, for messages.
        epsilons: the epsilons of the loaded model's normalisations.

    Raises:
        Unsupported: a number differs, or the library ignores one that every answer depends on.
    """
    numbers, known = canonical_numbers(stored), canonical_numbers(taken)
    wrong, ignored = [], []
    for key, value in numbers.items():
        if key in CONTEXT_NAMES or key == "n_ctx" or _HARMLESS.fullmatch(key):
            continue
        if key in known:
            if not _equal(value, known[key]):
                wrong.append(f"{key} = {value} ({library} has {known[key]})")
        elif _is_epsilon(key):
            if not any(_equal(value, each) for each in epsilons):
                wrong.append(f"{key} = {value}")
        elif key in _DECISIVE:
            if _DECISIVE[key] != value:
                wrong.append(f"{key} = {value}")
        elif value is not False and not _SHAPES.fullmatch(key):
            ignored.append(f"{key} = {value}")
    if wrong:
        raise Unsupported(
            f"{library} does not take {', '.join(wrong)} from this model's config.json, so its"
            f" answers would be wrong{OTHER_ENGINE}",
            hint='try engine="torch"',
        )
    if ignored:
        _log.warning("%s ignores of config.json: %s", library, ", ".join(ignored))


def canonical_numbers(config: Mapping[str, Any]) -> dict[str, Number]:
    """Return the numbers and booleans in a config.json under one name each, to compare two configs.

    Older names are translated ("rotary_emb_base" → "rope.rope_theta"). Values in `text_config` take
    precedence over the top level.
    """
    level = dict(config)
    for part in ("text_config", "attn_config", "ffn_config"):
        if isinstance(inner := config.get(part), Mapping):
            level |= inner
    rope = level.get("rope_parameters") or level.get("rope_scaling")
    numbers = {_SAME.get(key, key): value for key, value in _numbers_in(level).items()}
    return numbers | (_canonical_rope_numbers(rope) if isinstance(rope, Mapping) else {})


def _canonical_rope_numbers(rope: Mapping[str, Any]) -> dict[str, Number]:
    """Return the rotary parameters (those of full attention, of two sets) under "rope.…" keys."""
    sets = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    full = sets.get("full_attention") or next(iter(sets.values()), rope)
    numbers = {f"rope.{key}": value for key, value in _numbers_in(full).items()}
    theta = (sets.get("sliding_attention") or {}).get("rope_theta")
    if theta is not None and theta != full.get("rope_theta"):
        numbers["rope.sliding.rope_theta"] = theta
    return numbers


def _numbers_in(level: Mapping[str, Any]) -> dict[str, Number]:
    """Return the entries whose values are numbers or booleans."""
    return {key: value for key, value in level.items() if isinstance(value, int | float)}


def _is_epsilon(key: str) -> bool:
    """Return True if the key names the epsilon of a normalisation."""
    return "eps" in key.split("_") or "epsilon" in key.split("_")


def _equal(one: Number, other: Number) -> bool:
    """Return True if two numbers are equal up to a relative error of 1e-6."""
    return math.isclose(one, other, rel_tol=1e-6)
