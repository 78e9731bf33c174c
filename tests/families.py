"""Tiny random models of many architectures, built in-process from their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.gptj import modeling_gptj

from weft.engines.base import Engine, Row, Span

N_VOCAB = 120
WINDOW = 6
FUSED = ("llama", "mistral", "qwen2", "qwen3")  # those that run without their modules
IDS = [5, 9, 40, 7, 33, 2, 61, 18, 12, 50, 3, 44]  # a path
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
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "original_max_position_embeddings": SHORT_CONTEXT,
    "factor": 256 / SHORT_CONTEXT,
}

_DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}

# name: (model_type, what differs from the common config; None: it has no such entry)
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
    "glm": ("glm", {"partial_rotary_factor": 0.5}),  # neighbours turn, in a part of a head
    "ernie4_5": ("ernie4_5", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
    "gemma3n": (
        "gemma3n_text",
        {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": N_VOCAB}
        | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 5, "altup_num_inputs": 2},
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": N_VOCAB},
    ),
    "afmoe": (
        "afmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"sliding_window": WINDOW, "global_attn_every_n_layers": 2},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK | {"first_k_dense_replace": 1}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": _ROPE,
        },
    ),
    "minimax": (  # without linear layers; its cache is of its own kind all the same
        "minimax",
        {"num_local_experts": 2, "layer_types": ["full_attention"] * 3},
    ),
    "granite4": (  # of a hybrid family, and no layer of it is recurrent
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "shared_intermediate_size": 48, "attention_multiplier": 0.3}
        | {"mamba_n_heads": 8, "mamba_d_head": 8},
    ),
}

_OLD = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 256}
# Their attention goes through the library's interface since Transformers 5.24.
_LATE = {name: (name, _OLD | {"rotary_dim": 4}) for name in ("gptj", "codegen")}
_IS_LATE_THERE = hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS")
if _IS_LATE_THERE:
    _CONFIGS |= _LATE

FAMILIES: list[str] = list(_CONFIGS)

_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_BLT = _COMMON | {"num_key_value_heads": 4, "num_hidden_layers": 2}

# Models without KV of single tokens: ALiBi, attention or positions of their own, recurrent, hybrid.
_RECOMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}),
    "falcon": ("falcon", {"alibi": False, "head_dim": None}),
    "falcon_alibi": ("falcon", {"alibi": True, "head_dim": None}),
    "llama4_chunked": (
        "llama4_text",
        {"num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48},
    ),
    "llama4_whole": (  # its base model stands under another name than it says
        "llama4_text",
        {"num_local_experts": 2, "layer_types": ["full_attention"] * 3}
        | {"intermediate_size_mlp": 48},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _DEEPSEEK
        | {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 16}
        | {"mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "blt": (  # layers of several kinds, and no number of them in all
        "blt",
        {"num_hidden_layers": None, "encoder_hash_byte_group_size": [2, 3], "cross_attn_k": 1}
        | {"encoder_hash_byte_group_vocab": 64, "patcher_config": _BLT, "global_config": _BLT}
        | {"encoder_config": _BLT | {"hidden_size_global": 32, "cross_attn_k": 1}}
        | {"decoder_config": _BLT | {"hidden_size_global": 32, "cross_attn_k": 1}},
    ),
    "roberta": ("roberta", {"is_decoder": True}),  # positions are counted without padding
    "mamba": ("mamba", {"state_size": 4}),
    "mamba2": ("mamba2", {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 16}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32, "context_length": 256, "rescale_every": 2}),
    "xlstm": (
        "xlstm",
        {"num_heads": 4, "num_blocks": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0}
        | {"chunk_size": 16, "mode": "inference"},
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": WINDOW}
        | {"block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "jamba": (
        "jamba",
        {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "bamba": ("bamba", _MAMBA2 | {"attn_layer_indices": [1]}),
    "zamba2": (
        "zamba2",
        {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8}
        | {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 16}
        | {"attention_head_dim": 16, "attention_hidden_size": 64, "num_mem_blocks": 1}
        | {"use_mamba_kernels": False},
    ),
    "falcon_h1": ("falcon_h1", _MAMBA2 | {"mamba_d_ssm": 64}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": (
        "qwen3_next",
        _LINEAR
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
}

if not _IS_LATE_THERE:
    _RECOMPUTED |= _LATE

RECOMPUTED_FAMILIES: list[str] = list(_RECOMPUTED)

# One of each kind of attention and of state; `make test-engines` shows the laws on the others.
_DEFAULT = ("llama", "gemma2", "gpt_oss", "bloom", "mamba", "jamba")


def cases(names: list[str]) -> list[Any]:
    """Return the families as parameters of a test."""
    apart = pytest.mark.engines
    return [pytest.param(name, marks=() if name in _DEFAULT else apart) for name in names]


# Of sizes that quantising libraries take: they group 64 weights.
_WIDE = {"llama_wide": ("llama", {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})}

_READER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
# Decoders that come as the text part of a model that reads images, too: (type, text, the rest).
_OF_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {
            "vision_config": _READER
            | {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 8}
            | {"image_size": 28, "patch_size": 14}
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            }
        },
        {
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
            | {"depth": 1, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
        },
    ),
    "mllama": (  # one layer attends images, and is left out of a text
        "mllama",
        {"cross_attention_layers": [1], "rope_parameters": _ROPE},
        {
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            | {"attention_heads": 2, "image_size": 28, "patch_size": 14, "num_global_layers": 1}
            | {"intermediate_layers_indices": [0], "vision_output_dim": 32},
            "image_token_index": 119,
        },
    ),
    "emu3": (
        "emu3",
        {},
        {
            "vq_config": {"base_channels": 32, "hidden_size": 16, "channel_multiplier": [1, 1]}
            | {"num_res_blocks": 1, "attn_resolutions": [], "codebook_size": 8},
            "vocabulary_map": {"<image>": 119},
        },
    ),
}

IMAGE_FAMILIES: list[str] = list(_OF_IMAGES)

# The shapes that a card runs the laws on, over any vocabulary: one of each way to attend, and those
# whose modules have another norm, other pairs of numbers that turn, and other gates.
OF_LAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", _GEMMA | {"sliding_window_pattern": 2}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "glm": ("glm", {"partial_rotary_factor": 0.5}),
    # A token goes through all of them: which it goes through would be decided by its last bits.
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
}

# The context to load a family with, where its own plain forward depends on how long it is.
N_CTX: dict[str, int] = {"phi3_longrope": SHORT_CONTEXT}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of the family `name` with weights large enough for attention to matter."""
    kind, changes = (_CONFIGS | _RECOMPUTED | _WIDE)[name]
    return _random(kind, changes, seed).to(dtype)


def build_reader(name: str) -> PreTrainedModel:
    """A random model of `IMAGE_FAMILIES`: a decoder, and what reads images for it."""
    kind, text, rest = _OF_IMAGES[name]
    config = CONFIG_MAPPING[kind](text_config=_COMMON | _ENDS | text, **rest)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


def build_for_laws(name: str, dtype: torch.dtype, n_vocab: int, n_ctx: int) -> PreTrainedModel:
    """A random model of a family of `OF_LAWS`, over so many tokens and with such a context."""
    kind, changes = OF_LAWS[name]
    longest = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    return _random(kind, changes | {"vocab_size": n_vocab, longest: n_ctx}, 0).to(dtype)


def _random(kind: str, changes: dict[str, Any], seed: int) -> PreTrainedModel:
    # GPT-2 calls its sizes otherwise and would take the common ones as aliases.
    common = {"vocab_size": N_VOCAB} if kind == "gpt2" else _COMMON
    given = {key: value for key, value in (common | changes | _ENDS).items() if value is not None}
    config = CONFIG_MAPPING[kind](**given)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():  # some parameters keep what the model's own code drew
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The oracle: float32 [T, V] of one plain forward by the model's own library."""
    with torch.no_grad():
        ids = torch.tensor([list(token_ids)], device=model.device)
        return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


def stepped(engine: Engine) -> np.ndarray:
    """Return logits of all of IDS: a prefill, then token by token in a tail of its own."""
    assert engine.fragments is not None
    trunk, tail = engine.fragments.new(None), engine.fragments.new(None)
    first = engine.forward([Row((), IDS[:6], 0, trunk, tuple(range(6)))])
    rows = [first.logits(i) for i in range(6)]
    for n in range(6, len(IDS)):
        row = Row((Span(trunk, 6),), IDS[n : n + 1], n, tail, (0,))
        rows.append(engine.forward([row]).logits(0))
    return np.stack(rows)
