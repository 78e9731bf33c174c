"""Tiny random models of many architectures, built in-process from their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

N_VOCAB = 120
WINDOW = 6
SHORT_CONTEXT = 64  # up to here "phi3_longrope" uses its short factors

_COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "original_max_position_embeddings": SHORT_CONTEXT,
    "factor": 256 / SHORT_CONTEXT,
}

# name: (model_type, what differs from the common config)
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", _GEMMA | {"sliding_window_pattern": 2}),
    "phi3": ("phi3", {}),
    "phi3_longrope": (
        "phi3",
        {"original_max_position_embeddings": SHORT_CONTEXT, "rope_parameters": _LONGROPE},
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

FAMILIES: list[str] = list(_CONFIGS)

# The context to load a family with, where its own plain forward depends on how long it is.
N_CTX: dict[str, int] = {"phi3_longrope": SHORT_CONTEXT}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of the family `name` with weights large enough for attention to matter."""
    kind, changes = _CONFIGS[name]
    # GPT-2 calls its sizes otherwise and would take the common ones as aliases.
    common = {"vocab_size": N_VOCAB} if kind == "gpt2" else _COMMON
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[kind](**(common | changes | ends))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():  # some parameters keep what the model's own code drew
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.to(dtype)


def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The oracle: float32 [T, V] of one plain forward by the model's own library."""
    with torch.no_grad():
        ids = torch.tensor([list(token_ids)], device=model.device)
        return model(input_ids=ids, use_cache=False).logits[0].float().cpu()
