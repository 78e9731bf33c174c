"""Model families of GGUF files: Transformers' config.json, tensor names and layouts for each.

llama.cpp's converter renames tensors and stores some in another layout. The tables here undo that,
so that an engine reads the same names and layouts as from a Transformers-format folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._core.atomic_files import repr_short
from ...errors import ModelLoadError, Unsupported
from .header import GGUF

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_GEMMA2 = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# The tensor with the factors of rotary frequencies; it becomes part of the configuration.
_ROPE_FACTORS, _LONG, _SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

_LOCAL_THETA = 10000.0  # of Gemma 3's sliding windows
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@dataclass(frozen=True, slots=True)
class Family:
    """How the files of one GGUF architecture map to a Transformers model.

    Attributes:
        model_type: Transformers' name of the configuration.
        architecture: Transformers' name of the model class.
        layer: GGUF tensor of a layer → module of a Transformers layer.
        is_permuted: rows of Q and K are stored in pairs (x0, y0, x1, y1, …), not halves.
        norm_offset: subtracted from the weights of norms.
        config: values of config.json that all files of the family share.
    """

    model_type: str
    architecture: str
    layer: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", _LLAMA, is_permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**_LLAMA, **_QK_NORM}),
    "phi3": Family("phi3", "Phi3ForCausalLM", _PHI3),
    "gemma": Family("gemma", "GemmaForCausalLM", _LLAMA, norm_offset=1.0),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _GEMMA2, norm_offset=1.0, config=_GEMMA2_CAPS),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", {**_GEMMA2, **_QK_NORM}, norm_offset=1.0),
}
_OF_NUMPY = ("llama", "qwen2", "qwen3")
_PACKAGES = ("torch", "transformers")
# Further architectures whose GGUF files Transformers itself reads.
READ_BY_TRANSFORMERS = frozenset(
    "bloom deci falcon gemma4 gpt-oss gpt2 lfm2 mamba minimax-m2 mistral nemotron qwen2moe"
    " qwen35 qwen35moe qwen3moe stablelm starcoder2".split()
)


def family_of(header: GGUF) -> Family | None:
    """Return the family of a file; None for unknown families, and for mixtures of experts."""
    if header.of_model("expert_count", 0):
        return None
    return FAMILIES.get(header.architecture)


def check_numpy(header: GGUF) -> None:
    """Raise Unsupported for a file whose architecture the NumPy engine does not run."""
    if header.architecture not in _OF_NUMPY or family_of(header) is None:
        kind = " with experts" if header.of_model("expert_count", 0) else ""
        raise Unsupported(
            f"{header.file.name} is a {header.architecture} model{kind}; the numpy engine runs GGUF"
            f" files of {', '.join(_OF_NUMPY)}; use another engine: torch or llamacpp"
        )


def runs_on_torch(header: GGUF) -> bool:
    """Return True if the torch engine reads files of the architecture."""
    return family_of(header) is not None or header.architecture in READ_BY_TRANSFORMERS


def packages_for_torch(header: GGUF) -> tuple[str, ...]:
    """Return the packages that the torch engine needs for a file, by their import names."""
    return _PACKAGES if family_of(header) is not None else (*_PACKAGES, "accelerate")


def transformers_config(header: GGUF) -> dict[str, Any]:
    """Return the content of the same model's config.json. The file's family must be known.

    Raises:
        ModelLoadError: a number is missing.
        Unsupported: no configuration of Transformers describes the rotary embedding.
    """
    family = FAMILIES[header.architecture]
    n_embd, n_heads = (
        _required(header, "embedding_length"),
        _required(header, "attention.head_count"),
    )
    head_dim = header.of_model("attention.key_length")
    if head_dim is None:
        head_dim = header.of_model("rope.dimension_count", n_embd // n_heads)
    values = header.values
    config = {
        **family.config,
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": header.tensors["token_embd.weight"].shape[1],
        "hidden_size": n_embd,
        "intermediate_size": _required(header, "feed_forward_length"),
        "num_hidden_layers": _required(header, "block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": header.of_model("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _required(header, "context_length"),
        "rms_norm_eps": _required(header, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope_parameters(header, head_dim),
    }
    if family.model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if family.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if family.model_type == "phi3":
        config["sliding_window"] = header.of_model("attention.sliding_window")
        config["original_max_position_embeddings"] = _original_context(header)
        del config["head_dim"]
    if family.model_type in ("gemma2", "gemma3_text"):
        config |= _gemma(header, config)
    return config


# Transformers' names for the epsilon of a model's normalisations.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def complete_config(config: Any, header: GGUF) -> None:
    """Set numbers of the file that Transformers' GGUF reader leaves at their defaults.

    Args:
        config: Transformers' configuration of the file, changed in place.
        header: the file's header.

    Raises:
        Unsupported: no configuration of Transformers describes the rotary embedding.
    """
    of_rms = header.of_model("attention.layer_norm_rms_epsilon")
    epsilon = header.of_model("attention.layer_norm_epsilon", of_rms)
    for name in _EPSILONS:
        if epsilon is not None and hasattr(config, name):
            setattr(config, name, epsilon)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "default":  # one set, not yet scaled
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        config.rope_parameters = rope | _rope_parameters(header, head_dim)
    window = header.of_model("attention.sliding_window")
    if window is not None and hasattr(config, "sliding_window"):
        config.sliding_window = window
    experts = header.of_model("expert_used_count")
    if experts is not None and hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = experts


def tensor_names(header: GGUF) -> dict[str, str]:
    """Return Transformers' name of each tensor → the file's name. The file's family must be known.

    Raises:
        Unsupported: the family's table does not have a tensor of the file.
    """
    layer = FAMILIES[header.architecture].layer
    names = {}
    for name in header.tensors:
        if name in (_ROPE_FACTORS, _LONG, _SHORT):
            continue
        block, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        module, _, part = rest.rpartition(".")
        if name in _MODEL_TENSORS:
            names[_MODEL_TENSORS[name]] = name
        elif block == "blk" and number.isdecimal() and module in layer:
            names[f"model.layers.{number}.{layer[module]}.{part}"] = name
        else:
            raise Unsupported(
                f"{header.file.name} has the tensor {name!r}, which no other {header.architecture}"
                " model has"
            )
    return names


def _required(header: GGUF, key: str) -> Any:
    """Return a number of the model. Raise ModelLoadError if the header lacks it."""
    value = header.of_model(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(
            f"{header.file}: {header.architecture}.{key} is {repr_short(value)};"
            " it must be a number"
        )
    return value


def _gemma(header: GGUF, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Gemma 2's and 3's entries of config.json: attention scale, windows, rotary
    embeddings.
    """
    n_layers = config["num_hidden_layers"]
    largest = 46 if header.architecture == "gemma2" else 62  # layers of the 27B models
    scale = config["head_dim"]
    if n_layers == largest:
        scale = config["hidden_size"] // config["num_attention_heads"]
    values: dict[str, Any] = {
        "query_pre_attn_scalar": scale,
        "sliding_window": header.of_model("attention.sliding_window", 4096),
    }
    if header.architecture == "gemma3":
        local = {
            "rope_type": "default",
            "rope_theta": header.of_model("rope.freq_base_swa", _LOCAL_THETA),
        }
        values["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local,
        }
    for name, key in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if (cap := header.of_model(key)) is not None:
            values[f"{name}_logit_softcapping"] = cap
    return values


def _rope_parameters(header: GGUF, head_dim: int) -> dict[str, Any]:
    """Return the rotary embedding's parameters as in config.json.

    Raises:
        Unsupported: no rope type of Transformers has this scaling.
    """
    theta = header.of_model("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    n_rotary = header.of_model("rope.dimension_count", head_dim)
    if n_rotary != head_dim:
        rope["partial_rotary_factor"] = n_rotary / head_dim
    kind = header.of_model("rope.scaling.type", "none")
    factor = header.of_model("rope.scaling.factor", header.of_model("rope.scale_linear"))
    original = header.of_model("rope.scaling.original_context_length")
    if _ROPE_FACTORS in header.tensors:
        return rope | _llama3_scaling(header, theta, head_dim)
    if _LONG in header.tensors and _SHORT in header.tensors:
        return rope | {
            "rope_type": "longrope",
            "long_factor": _read_factors(header, _LONG, n_rotary // 2),
            "short_factor": _read_factors(header, _SHORT, n_rotary // 2),
            "original_max_position_embeddings": _original_context(header),
        }
    if kind in ("none", "linear"):
        return (
            rope if not factor or factor == 1 else rope | {"rope_type": "linear", "factor": factor}
        )
    if kind == "yarn" and factor and original:
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise Unsupported(
        f"{header.file.name} scales its rotary embedding by {kind!r}; allowed are none, linear,"
        " yarn and the factors of Llama 3"
    )


def _llama3_scaling(header: GGUF, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling from which the file's factors were computed.

    The file has only the factors. All models of the family have the blending range 1 to 4, and an
    original context that is a power of two.
    """
    factors = np.array(_read_factors(header, _ROPE_FACTORS, head_dim // 2))
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factor = float(factors.max())
    for power in range(4, 24):
        rotations = 2**power * plain / (2 * np.pi)
        keep = np.clip((rotations - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / ((1 - keep) / factor + keep), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2**power,
            }
    raise Unsupported(
        f"{header.file.name} scales its rotary frequencies by factors that are not Llama 3's"
        f" ({float(factors.min()):g} to {factor:g})"
    )


def _read_factors(header: GGUF, name: str, count: int) -> list[float]:
    """Read the tensor of frequency factors `name`, which must have `count` float32 values."""
    tensor = header.tensors[name]
    if tensor.type != "f32" or tensor.shape != (count,):
        raise ModelLoadError(
            f"{header.file}: {name} is {tensor.type} {list(tensor.shape)}; it must be f32 [{count}]"
        )
    factors: list[float] = np.fromfile(tensor.file, "<f4", count, offset=tensor.begin).tolist()
    return factors


def _original_context(header: GGUF) -> int:
    """Return the context length before the scaling."""
    original: int = header.of_model(
        "rope.scaling.original_context_length", header.of_model("context_length")
    )
    return original
