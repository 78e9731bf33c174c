"""GGUF files of Transformers models, with the gguf package's own names of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

from small_gguf import finish, tokenizer
from weft.engines.gguf import read_gguf

_ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


def write_model(model: Any, path: Path, like: Path, kind: str) -> Path:
    """Write a model of Transformers in float32; Gemma's norms are stored with 1 added.

    like: a GGUF file whose tokenizer is taken. kind: llama.cpp's name, such as "gemma3".
    """
    config, arch = model.config, _ARCHITECTURES[kind]
    writer = GGUFWriter(path, kind)
    add_shape(writer, config, kind)
    tokenizer(writer, like)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1.0
        if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(values.astype(np.float32)))
    if kind == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        for length in ("long", "short"):
            factors = np.float32(config.rope_parameters[f"{length}_factor"])
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    finish(writer)
    return path


def add_shape(writer: GGUFWriter, config: Any, kind: str) -> None:
    """Write the numbers of a model."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    if kind == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if kind in ("starcoder2", "stablelm"):
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        return
    if kind == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        return
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rewritten(path: Path, like: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a float32 GGUF file with other values. change: edits the values in place."""
    header = read_gguf(like)
    values = dict(header.values)
    change(values)
    writer = GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in header.tensors.items():
        count = tensor.n_bytes // 4
        array = np.fromfile(tensor.file, np.float32, count, offset=tensor.begin)
        writer.add_tensor(name, array.reshape(tuple(reversed(tensor.shape))))
    finish(writer)
    return path
