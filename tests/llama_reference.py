"""Random Llama checkpoints written by hand, and a plain forward over them: a naive twin.

Nothing here is shared with the engine: no cache, no tree, no fusing; float64, one path at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}

Tensors = dict[str, NDArray[Any]]


class PlainLlama:
    """Full attention over one path, token by token as the textbook has it."""

    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        self.config = config
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.logits = lru_cache(maxsize=4096)(self._logits)

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Logits after every token: [T, V]."""
        return self.logits(tuple(ids))

    def _logits(self, ids: tuple[int, ...]) -> NDArray[np.float64]:
        w, config = self.tensors, self.config
        x = w["model.embed_tokens.weight"][list(ids)]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, w[at + "input_layernorm.weight"]), at)
            y = self._norm(x, w[at + "post_attention_layernorm.weight"])
            gate = y @ w[at + "mlp.gate_proj.weight"].T
            up = y @ w[at + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self._norm(x, w["model.norm.weight"]) @ head.T

    def _attention(self, y: NDArray[np.float64], at: str) -> NDArray[np.float64]:
        config, w, n = self.config, self.tensors, len(y)
        d = config["head_dim"]
        q, k, v = (
            (y @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(n, -1, d) for name in "qkv"
        )
        q, k = self._turn(q), self._turn(k)
        heads = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, shared].T / np.sqrt(d)
            scores[np.triu_indices(n, k=1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, shared])
        return np.concatenate(heads, axis=1) @ w[f"{at}self_attn.o_proj.weight"].T

    def _turn(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        n, _, d = x.shape
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(n)[:, None, None] * theta ** (-np.arange(0, d, 2) / d)
        one, two = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def _norm(self, x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * weight


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Weights large enough for attention to matter."""
    rng = np.random.default_rng(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n_q, n_kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (n_q, hidden),
            at + "self_attn.k_proj.weight": (n_kv, hidden),
            at + "self_attn.v_proj.weight": (n_kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, n_q),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    tensors = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.3 * tensors[name]
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def write_safetensors(file: Path, tensors: Tensors, dtype: str = "F32") -> None:
    """The format by hand, bfloat16 (rounded down) among its dtypes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = encode(value, dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def encode(value: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return value.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]).tobytes()


def write_folder(
    folder: Path, config: dict[str, Any] | None = None, *, tensors: Tensors | None = None
) -> PlainLlama:
    """Write a checkpoint; return its plain twin."""
    config = CONFIG | (config or {})
    tensors = random_tensors(config) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return PlainLlama(config, tensors)
