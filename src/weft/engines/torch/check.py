"""What is checked of a model: whether this engine can run it, and whether it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as _OF_IMAGES

from ...errors import ForwardError, ModelLoadError, Unsupported
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


class NoTree(Unsupported):
    """A model runs, but its KV cannot be held by tokens; `why` goes on after "it"."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the torch engine cannot hold this model's KV: {why}")
        self.why = why


def refuse_config(config: PretrainedConfig) -> None:
    """Raise Unsupported for what the config alone shows, before any weight is read."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise _unsupported(
            name, "it is an encoder-decoder model; only decoder-only models have one path"
        )
    architectures = config.architectures or []
    if architectures and not any(head in a for a in architectures for head in _HEADS):
        raise _unsupported(
            name,
            f"{architectures[0]} has no causal language-model head, it cannot continue text",
        )
    if not (auto_class_of(config) or getattr(config, "auto_map", None) or architectures):
        raise _unsupported(name, "Transformers has no causal language-model class for it")


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the class of Transformers that loads such a model; None where it knows none.

    Many decoders come only as the text part of one that reads images, too.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in _OF_IMAGES else None


def why_no_tree(config: PretrainedConfig) -> str:
    """Return why no KV of single tokens can be had, as far as the config shows; "" if it may."""
    text = config.get_text_config()
    if _uses_alibi(config) or _uses_alibi(text):
        return "it biases attention by ALiBi, which the attention hook is not told"
    known = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(each), None) for each in (config, text)]
    for classes in (*known, _OF_IMAGES.get(type(config), None)):
        for one in classes if isinstance(classes, tuple | list) else [classes]:
            if getattr(one, "_is_stateful", False):
                return _RECURRENT
    for kind in getattr(text, "layer_types", None) or []:
        if kind == "chunked_attention":
            return "it attends in fixed chunks (layer type chunked_attention)"
        if kind not in _ATTENDING:
            return f"{_RECURRENT} (layer type {kind})"
    return ""


def refuse_model(model: PreTrainedModel) -> None:
    """Raise Unsupported for what the loaded object shows."""
    refuse_config(model.config)
    name = type(model).__name__
    if model.get_output_embeddings() is None or not model.can_generate():
        raise _unsupported(
            name, "it has no causal language-model head; hand over the …ForCausalLM class"
        )


def refuse_handed_over(model: PreTrainedModel) -> None:
    """Raise Unsupported for a model that an engine cannot run beside its owner.

    Its parts lie on several devices, or not in memory; or it cannot be copied.
    """
    if getattr(model, "is_loaded_in_4bit", False) and model.device.type == "cpu":
        raise _unsupported(
            type(model).__name__,
            "bitsandbytes packs 4-bit weights anew at their first forward on a CPU, and no copy of"
            " them says what they said",
            "load its folder instead, with quantization_config in engine_options",
        )
    places: dict[str, list[str]] = {}
    for part, place in (getattr(model, "hf_device_map", None) or {}).items():
        places.setdefault(str(place), []).append(part or "all of it")
    if not places:
        for part, tensor in model.named_parameters():
            places.setdefault(str(tensor.device), []).append(part)
    gone = [place for place in places if place in ("meta", "disk")]
    if len(places) > 1 or gone:
        shown = "; ".join(
            f"{place}: {parts[0]}" + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
            for place, parts in places.items()
        )
        raise _unsupported(
            type(model).__name__,
            f"its device_map spreads it ({shown}), and a path's KV lies on one device; load it"
            ' without device_map, or with device_map={"": one device}',
            "the vllm engine runs one model on several GPUs",
        )


def refuse_probe(model: PreTrainedModel, probe: Probe, n_ctx: int) -> None:
    """Raise NoTree for what one forward through the hook showed."""
    text = model.config.get_text_config()
    n_layers = int(text.num_hidden_layers)
    if len(probe.modules) < n_layers:
        raise NoTree(
            f"{len(probe.modules)} of its {n_layers} layers attend through Transformers' "
            "AttentionInterface, and all must"
        )
    if len({id(m) for m in probe.modules}) < len(probe.modules):
        raise NoTree("an attention layer runs more than once a forward")
    if not probe.is_causal:
        raise NoTree("its attention looks at later tokens")
    kinds = list(getattr(text, "layer_types", None) or [])
    if len(kinds) == len(probe.specs) and getattr(text, "sliding_window", None):
        for layer, (kind, spec) in enumerate(zip(kinds, probe.specs, strict=True)):
            if kind == "sliding_attention" and spec.window is None:
                raise NoTree(f"layer {layer} does not tell the hook its sliding window")
    told = any(s.window is not None and s.window < n_ctx for s in probe.specs)
    is_local = not kinds or any("full" not in kind for kind in kinds)
    if not told and probe.hides(n_ctx - 1, with_local=is_local):
        raise NoTree(
            "its mask hides earlier tokens in a way the hook is not told (chunked attention)"
        )


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


_RECURRENT = "it has recurrent layers, whose state is not KV of single tokens and cannot be split"


def _unsupported(name: str, why: str, alternative: str = _ALTERNATIVE) -> Unsupported:
    return Unsupported(
        f"the torch engine cannot run {name}: {why}; {alternative}", hint=alternative
    )


# Root-mean-square error of a position, relative to the spread of the logits.
# Where activations are quantised, a last bit of one may become a whole step of its grid.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.08, torch.bfloat16: 0.15}
_QUANTISED_TOLERANCE = 0.15

_TRUNK, _CHUNKS, _PATHS = 8, (7, 6), 3  # 8 + 7 + 6 + 3 single tokens = 24


def quantised(model: PreTrainedModel) -> str:
    """Return what stands for the numbers of a model's weights; "" where they are numbers."""
    for parameter in model.parameters():
        kind = type(parameter)
        is_number = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if hasattr(kind, "__tensor_flatten__") or not is_number:
            return kind.__name__ if kind is not nn.Parameter else str(parameter.dtype)
    return type(model.hf_quantizer).__name__ if getattr(model, "hf_quantizer", None) else ""


def check_paths(n_vocab: int) -> Tensor:
    """Token ids of the three paths of the check tree, [3, 16]; the shorter ones are filled up."""
    ids = torch.tensor([(i * i * 7 + 13 * i + 5) % n_vocab for i in range(_PATHS * 16)])
    paths = ids.reshape(_PATHS, 16)
    paths[:, :_TRUNK] = paths[0, :_TRUNK]
    return paths


def plain_logits(model: PreTrainedModel, paths: Tensor) -> Tensor:
    """Return the model's own logits of the check paths, float32 [3, 16, V] on the host.

    Raises: ModelLoadError where it fails, or they are not finite.
    """
    try:
        own = model(input_ids=paths.to(model.device), use_cache=False).logits.float().cpu()
    except Exception as error:
        raise ModelLoadError(
            f"{type(model).__name__} failed on a first forward: {type(error).__name__}: {error}"
        ) from error
    if not bool(torch.isfinite(own).all()):
        dtype = str(model.dtype).removeprefix("torch.")
        is_widest = model.dtype in (torch.float32, torch.float64)
        todo = "check its files" if is_widest else "load it with another dtype (bfloat16, float32)"
        raise ModelLoadError(
            f"{type(model).__name__} gives logits that are not finite in {dtype}; {todo}"
        )
    return own


def check_tree(engine: TorchEngine, own: Tensor) -> None:
    """Run the check tree and compare with `own`, the model's plain logits: float32 [3, 16, V].

    Raises: NoTree where they differ, so the model does something the hook does not know.
    """
    try:
        got, want = _run_tree(engine, check_paths(engine.info.n_vocab).tolist(), own)
    except ForwardError as error:
        raise NoTree(f"it fails in a tree: {error}") from error
    off, tolerance = difference(got, want, engine.model)
    if not off <= tolerance:
        raise NoTree(
            f"its logits in a tree differ from its own plain forward by {off:.2g} of their spread"
            f" (allowed: {tolerance}): its attention does something that Transformers' attention"
            " interface does not carry"
        )


def difference(got: Tensor, want: Tensor, model: PreTrainedModel) -> tuple[float, float]:
    """Return how far logits [n, V] are from those wanted, relative to their spread, and how far
    they may be.
    """
    spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
    errors = (got - want).square().mean(-1).sqrt() / spread.clamp_min(1e-6)
    # In half precision a router may send a token to another expert for a last bit: a lone position
    # may then differ. What the engine does not know of a model is wrong at most positions.
    if quantised(model):
        return float(errors.median()), _QUANTISED_TOLERANCE
    error = errors.max() if model.dtype == torch.float32 else errors.median()
    return float(error), _TOLERANCE.get(model.dtype, 0.15)


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
