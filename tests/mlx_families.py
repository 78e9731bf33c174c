"""Tiny random models of many of mlx-lm's architectures, built in-process from their configs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

N_VOCAB = 120
WINDOW = 6

_COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# name: (model_type, what differs from the common config, how the engine attends)
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "tree"),
    "llama_windows": ("llama", {"sliding_window": WINDOW, "layer_types": _MIXED}, "tree"),
    "qwen3": ("qwen3", {}, "tree"),
    "qwen3_moe": ("qwen3_moe", _EXPERTS, "tree"),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 8},
        "paths",
    ),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
        "tree",
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_ctx": 256},
             "tree"),
    "gpt_bigcode": (
        "gpt_bigcode",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 64},
        "paths",
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 10000}, "tree"),
    "gpt_oss": (
        "gpt_oss",
        {**_EXPERTS, "sliding_window": WINDOW, "layer_types": _MIXED},
        "tree",
    ),
    "phi3": ("phi3", {}, "tree"),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}, "tree"),
    "cohere": ("cohere", {"logit_scale": 0.25}, "tree"),
    "ministral3": (
        "ministral3",
        {
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
        "tree",
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
        },
        "tree",
    ),
}  # fmt: skip

FAMILIES: list[str] = list(CONFIGS)

# A family without KV of single tokens.
CONFIGS["mamba"] = (
    "mamba",
    {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
    "whole",
)


def build(
    name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, n_vocab: int = N_VOCAB
) -> nn.Module:
    """A random model of the family `name` with weights large enough for attention to matter."""
    kind, changes, _ = CONFIGS[name]
    library = importlib.import_module(f"mlx_lm.models.{kind}")
    values = {**_COMMON, **changes, "model_type": kind, "vocab_size": n_vocab}
    args = library.ModelArgs.from_dict(values)
    model: nn.Module = library.Model(args)
    key, weights = mx.random.key(seed), []
    for path, parameter in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        noise = mx.random.normal(parameter.shape, key=own) * scale
        weights.append((path, (noise if parameter.ndim > 1 else parameter + noise).astype(dtype)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def plain_logits(model: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The oracle: float32 [T, V] of one plain forward by the model's own library."""
    logits = model(mx.array([list(token_ids)]), cache=make_prompt_cache(model))
    return np.array(logits[0].astype(mx.float32))
