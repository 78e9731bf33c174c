"""What is checked of a model: whether this engine can run it, and whether it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from ...errors import ModelLoadError, Unsupported
from ..base import Row, Span
from .hook import Probe

if TYPE_CHECKING:
    from .engine import TorchEngine

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


# Root-mean-square error of a position, relative to the spread of the logits.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.08, torch.bfloat16: 0.15}

_TRUNK, _CHUNKS, _PATHS = 8, (7, 6), 3  # 8 + 7 + 6 + 3 single tokens = 24


def check_paths(n_vocab: int) -> Tensor:
    """Token ids of the three paths of the check tree, [3, 16]; the shorter ones are filled up."""
    ids = torch.tensor([(i * i * 7 + 13 * i + 5) % n_vocab for i in range(_PATHS * 16)])
    paths = ids.reshape(_PATHS, 16)
    paths[:, :_TRUNK] = paths[0, :_TRUNK]
    return paths


def check_tree(engine: TorchEngine, own: Tensor) -> None:
    """Run the check tree and compare with `own`, the model's plain logits: float32 [3, 16, V].

    Raises:
        Unsupported: the logits differ, so the model does something the engine does not know.
        ModelLoadError: the model's own logits are not finite.
    """
    if not bool(torch.isfinite(own).all()):
        raise ModelLoadError(
            f"{engine.info.model} gives logits that are not finite in {engine.info.dtype}; "
            "load it with another dtype (bfloat16 or float32)"
        )
    got, want = _run_tree(engine, check_paths(engine.info.n_vocab).tolist(), own)
    spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
    errors = (got - want).square().mean(-1).sqrt() / spread.clamp_min(1e-6)
    # In half precision a router may send a token to another expert for a last bit: a lone position
    # may then differ. What the engine does not know of a model is wrong at most positions.
    error = errors.max() if engine.model.dtype == torch.float32 else errors.median()
    tolerance = _TOLERANCE.get(engine.model.dtype, 0.15)
    if not float(error) <= tolerance:
        raise Unsupported(
            f"the torch engine cannot run {engine.info.model}: its logits in a tree differ from "
            f"its own plain forward by {float(error):.2g} of their spread (allowed: {tolerance}); "
            "its attention does something that Transformers' attention interface does not carry"
        )


def _run_tree(engine: TorchEngine, paths: list[list[int]], own: Tensor) -> tuple[Tensor, Tensor]:
    """Trunk, two chunks below it, then one token after each of the three tips."""
    store = engine.fragments
    trunk, *chunks = (store.new(None) for _ in range(1 + len(_CHUNKS)))
    tips = [store.new(None) for _ in range(_PATHS)]
    try:
        engine.forward([Row((), paths[0][:_TRUNK], 0, trunk)])
        above = (Span(trunk, _TRUNK),)
        ends = [_TRUNK + n for n in _CHUNKS] + [_TRUNK]
        first = engine.forward(
            [
                Row(above, paths[i][_TRUNK : ends[i]], _TRUNK, chunks[i], (n - 1,))
                for i, n in enumerate(_CHUNKS)
            ]
        )
        routes = [(*above, Span(chunk, chunk.length)) for chunk in chunks] + [above]
        second = engine.forward(
            [
                Row(routes[i], paths[i][end : end + 1], end, tips[i], (0,))
                for i, end in enumerate(ends)
            ]
        )
        got = [first.logits(i) for i in range(len(_CHUNKS))] + [
            second.logits(i) for i in range(_PATHS)
        ]
        where = [(i, ends[i] - 1) for i in range(len(_CHUNKS))] + list(enumerate(ends))
        return torch.stack([torch.from_numpy(g) for g in got]), torch.stack(
            [own[i, at] for i, at in where]
        )
    finally:
        for fragment in (trunk, *chunks, *tips):
            store.free(fragment)
