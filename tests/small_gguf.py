"""Small GGUF models with random weights, of families that the exporter does not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from weft.engines.gguf import read_gguf

N_VOCAB, N_EMBD, N_HEADS, N_KV_HEADS, HEAD_DIM, N_INNER = 2048, 64, 4, 2, 16, 96


def windowed(path: Path, like: Path, *, window: int = 16, n_layers: int = 4) -> Path:
    """Write a Gemma 2: every second layer sees a sliding window only. It pools by the last token.

    like: a GGUF file whose tokenizer is taken.
    """
    from gguf import GGUFWriter, PoolingType

    writer, rng = GGUFWriter(path, "gemma2"), np.random.default_rng(0)
    shape(writer, n_layers)
    writer.add_sliding_window(window)
    writer.add_pooling_type(PoolingType.LAST)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 7)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    tokenizer(writer, like)

    def add(name: str, *size: int) -> None:
        array = rng.normal(0, size[-1] ** -0.5, size) if len(size) > 1 else np.ones(size)
        writer.add_tensor(name, array.astype(np.float32))

    add("token_embd.weight", N_VOCAB, N_EMBD)
    add("output_norm.weight", N_EMBD)
    for layer in range(n_layers):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"blk.{layer}.{norm}.weight", N_EMBD)
        add(f"blk.{layer}.attn_q.weight", N_HEADS * HEAD_DIM, N_EMBD)
        add(f"blk.{layer}.attn_k.weight", N_KV_HEADS * HEAD_DIM, N_EMBD)
        add(f"blk.{layer}.attn_v.weight", N_KV_HEADS * HEAD_DIM, N_EMBD)
        add(f"blk.{layer}.attn_output.weight", N_EMBD, N_HEADS * HEAD_DIM)
        add(f"blk.{layer}.ffn_gate.weight", N_INNER, N_EMBD)
        add(f"blk.{layer}.ffn_up.weight", N_INNER, N_EMBD)
        add(f"blk.{layer}.ffn_down.weight", N_EMBD, N_INNER)
    finish(writer)
    return path


def shape(writer: Any, n_layers: int) -> None:
    """Write the numbers that all families have."""
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(N_INNER)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)


def tokenizer(writer: Any, like: Path) -> None:
    """Copy a file's tokenizer."""
    for key, value in read_gguf(like).values.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
