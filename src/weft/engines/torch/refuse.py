"""Which models this engine cannot run, and why."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from ...errors import Unsupported
from .hook import Probe

_ATTENDING = {
    "full_attention",
    "sliding_attention",
    "attention",
    "global_attention",
    "local_attention",
}
_HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")
_ALTERNATIVE = "use another model, or another engine (llamacpp, vllm)"


def refuse_config(config: PretrainedConfig) -> None:
    """Raise Unsupported for what the config alone shows, before any weight is read."""
    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder:
        raise _unsupported(
            name, "it is an encoder-decoder model; only decoder-only models have one path"
        )
    if _uses_alibi(config) or _uses_alibi(text):
        raise _unsupported(
            name, "it biases attention by ALiBi, which the attention hook is not told"
        )
    architectures = config.architectures or []
    if architectures and not any(head in a for a in architectures for head in _HEADS):
        raise _unsupported(
            name,
            f"{architectures[0]} has no causal language-model head, it cannot continue text",
        )
    classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if classes is None and not getattr(config, "auto_map", None) and not architectures:
        raise _unsupported(name, "Transformers has no causal language-model class for it")
    for one in classes if isinstance(classes, tuple | list) else [classes]:
        if getattr(one, "_is_stateful", False):
            raise _recurrent(name)
    _refuse_layer_types(name, text)


def refuse_model(model: PreTrainedModel) -> None:
    """Raise Unsupported for what the loaded object shows."""
    refuse_config(model.config)
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise _recurrent(name)
    if model.get_output_embeddings() is None or not model.can_generate():
        raise _unsupported(
            name, "it has no causal language-model head; hand over the …ForCausalLM class"
        )


def refuse_probe(model: PreTrainedModel, probe: Probe, n_ctx: int) -> None:
    """Raise Unsupported for what one forward through the hook showed."""
    name, text = type(model).__name__, model.config.get_text_config()
    n_layers = int(text.num_hidden_layers)
    if len(probe.modules) < n_layers:
        raise _unsupported(
            name,
            f"{len(probe.modules)} of its {n_layers} layers attend through Transformers' "
            "AttentionInterface; all must",
        )
    if len({id(m) for m in probe.modules}) < len(probe.modules):
        raise _unsupported(name, "an attention layer runs more than once a forward")
    if not probe.is_causal:
        raise _unsupported(name, "its attention looks at later tokens (encoder-only model)")
    kinds = list(getattr(text, "layer_types", None) or [])
    if len(kinds) == len(probe.specs) and getattr(text, "sliding_window", None):
        for layer, (kind, spec) in enumerate(zip(kinds, probe.specs, strict=True)):
            if kind == "sliding_attention" and spec.window is None:
                raise _unsupported(name, f"layer {layer} does not tell the hook its sliding window")
    told = any(s.window is not None and s.window < n_ctx for s in probe.specs)
    if not told and probe.narrowest_mask((n_ctx - 1,)) is not None:
        raise _unsupported(
            name, "its mask hides earlier tokens in a way the hook is not told (chunked attention)"
        )


def _refuse_layer_types(name: str, text: PretrainedConfig) -> None:
    for kind in getattr(text, "layer_types", None) or []:
        if kind == "chunked_attention":
            raise _unsupported(name, "it attends in fixed chunks (layer type chunked_attention)")
        if kind not in _ATTENDING:
            raise _recurrent(f"{name} (layer type {kind})")


def _uses_alibi(config: Any) -> bool:
    inner = getattr(config, "attn_config", None)
    inner_says = inner.get("alibi") if isinstance(inner, dict) else getattr(inner, "alibi", False)
    position = getattr(config, "position_embedding_type", None)
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or inner_says
        or position == "alibi"
    )


def _recurrent(name: str) -> Unsupported:
    return _unsupported(
        name,
        "it has recurrent layers, whose state is not KV of single tokens and cannot be split",
    )


def _unsupported(name: str, why: str) -> Unsupported:
    return Unsupported(
        f"the torch engine cannot run {name}: {why}; {_ALTERNATIVE}", hint=_ALTERNATIVE
    )
