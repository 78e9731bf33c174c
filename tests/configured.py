"""Random models whose config.json differs from every library's defaults, saved by Transformers.

A model with default values cannot show that an engine reads its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from weft.engines.base import Engine, Row, Span

N_VOCAB = 120
WINDOW = 6
THETA = 777.0
IDS = [5, 9, 40, 7, 33, 2, 61, 18, 12, 50, 3, 44] * 3  # three times the window and more

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SAME_HEAD = {"head_dim": 8}
_MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR = {"rope_type": "linear", "factor": 4}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = _ROUTED | {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_GEMMA = {"query_pre_attn_scalar": 13}
_GRANITE = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}

# name: (model_type, what differs from the common config)
CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}),
    "llama_linear": ("llama", {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", _SAME_HEAD | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_bias": False}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": _YARN}),
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", _GEMMA | _MIXED),
    "phi3": ("phi3", _SAME_HEAD | {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    "phi3_longrope": (
        "phi3",
        _SAME_HEAD | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi": ("phi", _SAME_HEAD | {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", _SAME_HEAD | {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", _SAME_HEAD | {"sliding_window": WINDOW, "use_bias": True}),
    "olmo2": ("olmo2", _SAME_HEAD | {"rope_parameters": _LINEAR}),
    "olmo3": ("olmo3", _SAME_HEAD | _MIXED),
    "smollm3": ("smollm3", _SAME_HEAD | {"no_rope_layer_interval": 2}),
    "cohere": ("cohere", _SAME_HEAD | {"logit_scale": 0.25}),
    "cohere2": ("cohere2", _SAME_HEAD | _MIXED | {"logit_scale": 0.25}),
    "exaone4": ("exaone4", _MIXED | {"sliding_window_pattern": 2}),
    "granite": ("granite", _SAME_HEAD | _GRANITE),
    "glm4": ("glm4", _SAME_HEAD | {"partial_rotary_factor": 0.25}),
    "nemotron": ("nemotron", _SAME_HEAD | {"partial_rotary_factor": 0.5}),
    "mixtral": ("mixtral", _SAME_HEAD | _EXPERTS | {"sliding_window": WINDOW}),
    "qwen2_moe": ("qwen2_moe", _SAME_HEAD | _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "olmoe": ("olmoe", _SAME_HEAD | _EXPERTS),
    "llama_yarn_untruncated": (
        "llama",
        {
            "rope_parameters": _YARN
            | {"truncate": False, "attention_factor": 1.2, "beta_fast": 9.0, "factor": 2.0}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {"intermediate_size": 128, "head_dim": None, "num_key_value_heads": None}
        | {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "glm4_moe": ("glm4_moe", _ROUTED | {"partial_rotary_factor": 0.5}),
    "dots1": ("dots1", _SAME_HEAD | _ROUTED),
    "seed_oss": ("seed_oss", {}),
    "helium": ("helium", _SAME_HEAD),
    "apertus": ("apertus", _SAME_HEAD),
    "hunyuan": ("hunyuan_v1_dense", _SAME_HEAD),
    "granite_hybrid": (
        "granitemoehybrid",
        _SAME_HEAD
        | _GRANITE
        | {"layer_types": ["mamba", "full_attention"] * 2, "position_embedding_type": "rope"}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
        | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    "qwen3_next": (
        "qwen3_next",
        _EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"] * 2}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
    ),
    "lfm2": ("lfm2", _SAME_HEAD | {"layer_types": ["conv", "full_attention"] * 2}),
}


def save(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random model of the family `name`; return it, as Transformers loads the folder.

    changes: entries of its config in addition to those of `CONFIGURED`.
    """
    kind, own = CONFIGURED[name]
    return save_as(kind, folder, **(own | changes))


def save_as(kind: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random model of Transformers' `model_type` and return it as loaded."""
    given = {key: value for key, value in (_COMMON | changes).items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**given)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 2 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
                noise = torch.randn(parameter.shape) * scale
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(_unusual(json.loads(file.read_text()))))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def stepped(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    """Return logits [T, V] of a prefill of four tokens and single tokens, or of complete paths."""
    if engine.fragments is None:
        output = engine.forward([Row((), ids, 0, None, tuple(range(len(ids))))])
        return np.stack([np.asarray(output.logits(i)) for i in range(len(ids))])
    trunk, tail = engine.fragments.new(None), engine.fragments.new(None)
    first = engine.forward([Row((), ids[:4], 0, trunk, tuple(range(4)))])
    rows = [first.logits(i) for i in range(4)]
    for at in range(4, len(ids)):
        row = Row((Span(trunk, 4),), [ids[at]], at, tail, (0,))
        rows.append(engine.forward([row]).logits(0))
    return np.stack(rows)


def _unusual(config: Any) -> Any:
    """Return a config with another rotary base and another epsilon, at every level."""
    if not isinstance(config, dict):
        return config
    own = {key: THETA for key in config if key == "rope_theta"}
    own |= {key: 0.3 for key in config if key in _EPSILONS}
    return {key: own.get(key, _unusual(value)) for key, value in config.items()}
