"""Decoders of the Llama family in few large operations, without calls of their modules."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from ..attention_hook import ForwardContext
from ..kv_backend import AttentionSpec, AttentionStep, RotaryArgs
from ..weights.packed import PackedLinear
from .merged_linear import SIBLINGS, MergedLinear, apply_linear

# Classes that compute exactly what `FusedDecoder` does.
_MODELS = frozenset(
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
_DTYPES = (torch.float32, torch.bfloat16)
_GPU_DTYPES = (*_DTYPES, torch.float16)


class FusedDecoder:
    """Runs a model of the Llama family with few operations; replaces `Head`.

    A step of few rows is bound by the number of calls on a CPU, and of small kernels on a GPU. This
    class needs a third of the calls and kernels that the model's modules need. It reads the model's
    own weights, so changes of them take effect.
    """

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, specs: Sequence[AttentionSpec], call: ForwardContext
    ) -> FusedDecoder | None:
        """Return the decoder of a model whose classes it knows; None for any other.

        Args:
            specs: parameters of each layer's attention.
            call: the model's `ForwardContext`.
        """
        if not is_known(model):
            return None
        base: Any = model.base_model
        heads = base.layers[0].self_attn.head_dim
        if 2 * base.rotary_emb.inv_freq.numel() != heads or len(specs) != len(base.layers):
            return None
        return cls(model, specs, call)

    def __init__(self, model: Any, specs: Sequence[AttentionSpec], call: ForwardContext) -> None:
        base = model.base_model
        self._embedding = base.embed_tokens
        self._rotary = base.rotary_emb
        self._norm = base.norm
        self._output = model.lm_head
        self._call = call
        self._layers = [
            _Layer(layer, number, spec)
            for number, (layer, spec) in enumerate(zip(base.layers, specs, strict=True))
        ]

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the layers and the final norm over packed tokens; return hidden states [T, E].

        token_ids, positions: [1, T].
        """
        step = self._call.step
        assert step is not None
        x = F.embedding(token_ids[0], self._embedding.weight)
        if step.has_fused_ops:
            rotary = self._rotary
            frequencies, scaling = rotary.inv_freq, rotary.attention_scaling
            rotary_angles = step.rotary_angles(positions[0], frequencies, scaling, x.dtype)
            for layer in self._layers:
                x = layer.run_fused(x, rotary_angles, step)
            return _normed_by(step, x, self._norm)
        cos, sin = self._rotary(x, positions)
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)  # [T, 1, D]: the same for all heads
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer in self._layers:
            x = layer.run(x, cos, sin, step)
        return _normed(x, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of hidden states [n, E], which are those after the final norm.

        Applies `lm_head` only. The known models do not scale or cap logits.
        """
        return apply_linear(hidden, self._output)


class _Layer:
    """One decoder layer of `FusedDecoder`: attention by the running step, then the gated MLP.

    layer: the model's module. number: number of the layer. spec: parameters of its attention.
    """

    def __init__(self, layer: Any, number: int, spec: AttentionSpec) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._number, self._spec = number, spec
        self._before, self._between = layer.input_layernorm, layer.post_attention_layernorm
        self._head_dim = attention.head_dim
        self._n_q = attention.q_proj.out_features // attention.head_dim
        self._n_k = attention.k_proj.out_features // attention.head_dim
        self._q_norm = getattr(attention, "q_norm", None)
        self._k_norm = getattr(attention, "k_norm", None)
        self._qkv = MergedLinear([getattr(attention, name) for name in SIBLINGS[0]])
        self._back = attention.o_proj
        self._gated = MergedLinear([getattr(mlp, name) for name in SIBLINGS[1]])
        self._act, self._down = mlp.act_fn, mlp.down_proj
        self._is_silu = type(mlp.act_fn) in (nn.SiLU, SiLUActivation)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> Tensor:
        """Run the layer on hidden states x [T, E]; return those after it, [T, E].

        cos: [T, 1, D]. sin: [T, 1, D], its first half negated.
        """
        n_tokens, n_q, n_k = len(x), self._n_q, self._n_k
        heads = self._qkv.forward(_normed(x, self._before)).view(n_tokens, -1, self._head_dim)
        rotating = heads[:, : n_q + n_k]
        if self._q_norm is not None:
            normed = _normed(heads[:, :n_q], self._q_norm), _normed(rotating[:, n_q:], self._k_norm)
            rotating = torch.cat(normed, 1)
        # Swap the halves of each head; sin contains the sign of the first.
        rotated = torch.addcmul(rotating * cos, rotating.roll(self._head_dim // 2, -1), sin)
        by_head = rotated.transpose(0, 1)[None]
        values = heads[:, n_q + n_k :].transpose(0, 1)[None]
        attended = step.attend(self._number, by_head[:, :n_q], by_head[:, n_q:], values, self._spec)
        x = _add_linear(x, attended.reshape(n_tokens, -1), self._back)
        gate, up = self._gated.split_outputs(_normed(x, self._between))
        return _add_linear(x, self._act(gate).mul_(up), self._down)

    def run_fused(self, x: Tensor, rotary_angles: Tensor, step: AttentionStep) -> Tensor:
        """Do as `run` with the step's kernels, in place. rotary_angles: see `RotaryArgs`."""
        n_tokens = len(x)
        normed = _normed_by(step, x, self._before)
        heads = self._qkv.forward(normed).view(n_tokens, -1, self._head_dim)
        rotary = RotaryArgs(self._n_q, rotary_angles)
        if self._q_norm is not None:
            q_norm: Any = self._q_norm
            k_norm: Any = self._k_norm
            norms = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
            rotary = RotaryArgs(self._n_q, rotary_angles, *norms)
        attended = step.attend_qkv(self._number, heads, rotary, self._spec)
        x = _add_linear_in_place(x, attended.view(n_tokens, -1), self._back)
        between = _normed_by(step, x, self._between)
        gate, up = self._gated.split_outputs(between)
        if self._is_silu:
            return _add_linear_in_place(x, step.act_and_mul(gate, up, "silu"), self._down)
        return _add_linear_in_place(x, self._act(gate).mul_(up), self._down)


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Return x [..., E] after a Llama RMS norm (`weight * x`), in PyTorch operations."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _normed_by(step: AttentionStep, x: Tensor, norm: Any) -> Tensor:
    """Return x [..., E] after a Llama RMS norm (`weight * x`), by the step's kernel."""
    return step.rms_norm(x, norm.weight, norm.variance_epsilon)


def _add_linear(x: Tensor, more: Tensor, layer: nn.Linear) -> Tensor:
    """Return x + layer(more) as a new tensor."""
    if isinstance(layer, PackedLinear) and not layer.is_few(more):
        return layer.product(more).add_(x)
    x = torch.addmm(x, more, layer.weight.t())
    return x if layer.bias is None else x.add_(layer.bias)


def _add_linear_in_place(x: Tensor, more: Tensor, layer: nn.Linear) -> Tensor:
    """Add layer(more) to x in place, and return x."""
    if isinstance(layer, PackedLinear):
        return x.add_(layer.product(more))
    x.addmm_(more, layer.weight.t())
    return x if layer.bias is None else x.add_(layer.bias)


def is_plain_weight(
    weight: nn.Parameter, dtypes: Container[torch.dtype] = (torch.float32,)
) -> bool:
    """Return True for a parameter of plain numbers with one of these dtypes, on a CPU."""
    is_here = weight.device.type == "cpu" and weight.dtype in dtypes
    return type(weight) is nn.Parameter and is_here


def _is_on_gpu(weight: nn.Parameter) -> bool:
    """Return True for a plain parameter on a GPU, of a dtype that the step's kernels support."""
    is_there = weight.device.type == "cuda" and weight.dtype in _GPU_DTYPES
    return type(weight) is nn.Parameter and is_there


def is_known(model: PreTrainedModel) -> bool:
    """Return True for a model of a class that `FusedDecoder` runs, with unchanged modules."""
    kind = type(model)
    return (
        f"{kind.__module__}.{kind.__qualname__}" in _MODELS
        and len({weight.dtype for weight in model.parameters()}) == 1
        and all(
            is_plain_weight(weight, _DTYPES) or _is_on_gpu(weight) for weight in model.parameters()
        )
        and _is_untouched(model)
    )


def _is_untouched(model: Any) -> bool:
    """Return True if a model consists of its family's modules, without hooks."""
    called = {id(part) for layer in model.base_model.layers for part in layer.mlp.act_fn.modules()}
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or not (_is_family_module(module, model) or id(module) in called)
        for module in model.modules()
    )


def _is_family_module(module: nn.Module, model: nn.Module) -> bool:
    """Return True if the module's class is from the model's own file, or a plain layer."""
    kind = type(module)
    return (
        kind in (nn.Linear, PackedLinear, nn.Embedding, nn.ModuleList)
        or kind.__module__ == model.__module__
    )
