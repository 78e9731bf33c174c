"""Write a Llama-family folder as one GGUF file, tokenizer and chat template included.

python -m recipe.export_gguf src/weft/data/tiny tiny.gguf                 float32
python -m recipe.export_gguf ./folder model.gguf --type q8_0              or f16; pip install gguf
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.checkpoint import Checkpoint, open_checkpoint
from weft.engines.numpy.config import LlamaConfig, frequencies, interleave_heads, parse_config
from weft.errors import Unsupported, WeftError

TYPES = ("f32", "f16", "q8_0")
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Two orders of a head's numbers: here llama.cpp turns pairs side by side, elsewhere halves.
_PAIRED = "llama"
_BLOCK = 32
# How text is cut before pairs are merged: tokenizer.json's parts, without what does not matter.
_BYTES = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: dict[str, list[Any]] = {
    "gpt-2": [_BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def export_gguf(folder: Path, out: Path, kind: str = "f32") -> None:
    """Write the model in a Transformers folder as a GGUF file; matrices in `kind`, of TYPES.

    Raises: Unsupported for another family, rotary embedding, or tokenizer; ModelLoadError.
    """
    import gguf

    if kind not in TYPES:
        raise Unsupported(f"type {kind!r}; allowed are {', '.join(TYPES)}")
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    name = _ARCHITECTURES.get(config.model_type)
    if name is None:
        raise Unsupported(
            f"model type {config.model_type!r}; this exporter writes {', '.join(_ARCHITECTURES)};"
            " llama.cpp's convert_hf_to_gguf.py knows more"
        )
    tokenizer = _read_tokenizer(folder, config.n_vocab)  # before a byte is written
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, name)
    try:
        _add_shape(writer, config)
        for key, value in tokenizer.items():
            _add(writer, f"tokenizer.{key}", value)
        for key, value in _read_sampling(folder).items():
            _add(writer, f"general.sampling.{key}", value)
        writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])
        _add_tensors(writer, checkpoint, config, kind, paired=name == _PAIRED)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
    writer.close()
    part.replace(out)


def _add(writer: Any, key: str, value: Any) -> None:
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


def _add_shape(writer: Any, config: LlamaConfig) -> None:
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.n_hidden)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.n_intermediate)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _add_tensors(
    writer: Any, checkpoint: Checkpoint, config: LlamaConfig, kind: str, *, paired: bool
) -> None:
    plain = frequencies({**config.rope, "rope_type": "default"}, config.head_dim)
    scaled = frequencies(config.rope, config.head_dim)
    if not np.array_equal(plain, scaled):
        if not paired:
            raise Unsupported("a scaled rotary embedding outside the Llama architecture")
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    for name in sorted(checkpoint.tensors):
        target = _target(name)
        if target is None or (target == "output.weight" and config.tied):
            continue
        array = checkpoint.read(name)
        if paired and target.split(".")[-2] in ("attn_q", "attn_k"):
            array = interleave_heads(array, config.head_dim)
        _add_tensor(writer, target, np.ascontiguousarray(array), kind)


def _target(name: str) -> str | None:
    """Return llama.cpp's name of a weight; None for what is no weight."""
    if name in _OTHERS:
        return _OTHERS[name]
    parts = name.split(".")
    if name.endswith("rotary_emb.inv_freq"):
        return None
    if parts[:2] == ["model", "layers"]:
        inner = ".".join(parts[3:-1])
        if inner in _LAYER:
            return f"blk.{parts[2]}.{_LAYER[inner]}.{parts[-1]}"
    raise Unsupported(f"the weight {name!r}, which no Llama has")


def _add_tensor(writer: Any, name: str, array: NDArray[np.float32], kind: str) -> None:
    import gguf

    if array.ndim < 2 or kind == "f32":
        writer.add_tensor(name, array)
    elif kind == "f16" or array.shape[-1] % _BLOCK:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, q8_0), raw_dtype=q8_0)


# The tokenizer --------------------------------------------------------------------------------


def _read_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling that generation_config.json names, by the names of GGUF files."""
    file = folder / "generation_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    if not config.get("do_sample"):
        return {}
    named = {theirs: config.get(ours) for ours, theirs in _SAMPLING.items()}
    return {"temp": 1.0, **{name: value for name, value in named.items() if value is not None}}


def _read_tokenizer(folder: Path, n_vocab: int) -> dict[str, Any]:
    """Return the values of a GGUF file that say a byte-level BPE tokenizer, without "tokenizer."

    Raises: Unsupported for another one.
    """
    text = Tokenizer.from_folder(folder)
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = raw["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or raw.get("normalizer"):
        raise Unsupported("a tokenizer that is no byte-level BPE without a normalizer")
    tokens = [f"[UNUSED{number}]" for number in range(n_vocab)]
    kinds = [5] * n_vocab  # of tokens that are not used
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, 1
    for added in raw["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = 3 if added["special"] else 4
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    values = {
        "ggml.model": "gpt2",
        "ggml.pre": _cut_of(raw["pre_tokenizer"]),
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": merges,
        "ggml.add_bos_token": text.bos_token_id in text.encode("")[:1],
    }
    for name in ("bos", "eos", "pad"):
        number = getattr(text, f"{name}_token_id")
        if number is not None:
            key = "padding" if name == "pad" else name
            values[f"ggml.{key}_token_id"] = number
    if text.chat_template is not None:
        values["chat_template"] = text.chat_template
    return values


def _cut_of(given: Mapping[str, Any] | None) -> str:
    """Return llama.cpp's name of the way that a tokenizer cuts text."""
    parts = [] if given is None else given.get("pretokenizers", [given])
    for name, wanted in _CUTS.items():
        if isinstance(wanted[0], str):
            split, *rest = parts or [{}]
            pattern = split.get("pattern", {}).get("Regex")
            if pattern == wanted[0] and [each.get("type") for each in rest] == ["ByteLevel"]:
                return name
        elif len(parts) == len(wanted) and all(
            all(part.get(key) == value for key, value in each.items())
            for part, each in zip(parts, wanted, strict=True)
            if isinstance(each, dict)
        ):
            return name
    raise Unsupported("a tokenizer that cuts text in a way llama.cpp has no name for, here")


def main() -> int:
    """Export as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="recipe.export_gguf", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="f32", dest="kind")
    given = parser.parse_args()
    try:
        export_gguf(given.folder, given.out, given.kind)
    except WeftError as error:
        print(f"{given.folder} cannot be exported: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
