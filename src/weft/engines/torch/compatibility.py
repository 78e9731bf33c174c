"""Checks for models that the engine cannot run, by their config, object or first forward."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as _OF_IMAGES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ...errors import Unsupported
from .attention_hook import Probe
from .classifier import classifier_class, is_classifier, n_labels_of
from .model_guard import layer_to_unmerge

_ATTENDING = {
    "full_attention",
    "sliding_attention",
    "attention",
    "global_attention",
    "local_attention",
}
_CHOOSING = ("sparse", "indexed", "compressed")
_HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")
_ALTERNATIVE = "use another model, or another engine (llamacpp, vllm)"


class PrefixCachingUnsupported(Unsupported):
    """The model runs, but its KV cannot be cached by tokens; `why` is a clause after "it"."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the torch engine cannot cache this model's KV: {why}")
        self.why = why


def check_architecture(config: PretrainedConfig) -> None:
    """Check that a config describes a decoder-only language model, before weights are read.

    Raises: Unsupported.
    """
    name = config.model_type
    _check_is_decoder(config, name)
    if is_classifier(config):
        return
    architectures = config.architectures or []
    known = {name for _, names in _auto_classes_of(config) for name in names}
    if architectures and not any(
        a in known or any(head in a for head in _HEADS) for a in architectures
    ):
        raise _unsupported(
            name,
            f"{architectures[0]} has no causal language-model head, it cannot continue text",
        )
    if not (auto_class_of(config) or getattr(config, "auto_map", None) or architectures):
        raise _unsupported(name, "Transformers has no causal language-model class for it")


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the Transformers class that loads such a model; None if there is none.

    Many decoders exist only as the text part of an image model. Some exist in both forms; then the
    class that the files name decides.
    """
    if is_classifier(config):
        return classifier_class(config)
    kinds = _auto_classes_of(config)
    for auto, names in kinds:
        if names & set(config.architectures or ()):
            return auto
    return kinds[0][0] if kinds else None


def _auto_classes_of(config: PretrainedConfig) -> list[tuple[Any, set[str]]]:
    """Return the auto classes that load such a model, and the names of its model classes.

    Names, because importing a class takes a while.
    """
    ways = (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, _OF_IMAGES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )
    kinds = []
    for auto, known, names in ways:
        if type(config) in known:
            classes = names.get(config.model_type, ())
            kinds.append((auto, {classes} if isinstance(classes, str) else set(classes)))
    return kinds


def _as_tuple(classes: Any) -> tuple[type[Any], ...]:
    """Return classes as a tuple; Transformers' tables have one class, or several."""
    return classes if isinstance(classes, tuple) else (classes,)


def _check_is_decoder(config: PretrainedConfig, name: str) -> None:
    """Raise Unsupported if the config is of an encoder, or of an encoder-decoder model."""
    if config.is_encoder_decoder:
        raise _unsupported(
            name, "it is an encoder-decoder model; only decoder-only models have one path"
        )


def prefix_caching_obstacle(config: PretrainedConfig) -> str:
    """Return the reason in a config why the model's KV cannot be cached by tokens.

    Returns "" if the config shows none; the load check may still find one.
    """
    text = config.get_text_config()
    if _uses_alibi(config) or _uses_alibi(text):
        return "it biases attention by ALiBi, which the attention hook does not receive"
    kinds = getattr(text, "layer_types", None) or []
    for kind in kinds:
        if kind == "chunked_attention":
            return "it attends in fixed chunks (layer type chunked_attention)"
        if kind not in _ATTENDING and any(word in kind for word in _CHOOSING):
            return (
                "it has layers that select or compress keys, which the attention hook does not"
                f" receive (layer type {kind})"
            )
        if kind not in _ATTENDING:
            return f"{_RECURRENT} (layer type {kind})"
    if kinds:  # the load check finds the rest
        return ""
    models = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(part), None) for part in (config, text)]
    for classes in (*models, _OF_IMAGES.get(type(config), None)):
        if any(getattr(model, "_is_stateful", False) for model in _as_tuple(classes)):
            return _RECURRENT
    return ""


def check_model(model: PreTrainedModel) -> None:
    """Check that a loaded model is a decoder-only language model with a head.

    Raises: Unsupported.
    """
    name = type(model).__name__
    _check_is_decoder(model.config, name)
    if n_labels_of(model):
        return
    if model.get_output_embeddings() is None or not model.can_generate():
        raise _unsupported(
            name, "it has no causal language-model head; pass the …ForCausalLM class"
        )


def check_loaded_model(model: PreTrainedModel) -> None:
    """Check that an engine can share a model object with the user who loaded it.

    Raises: Unsupported if its parts are on several devices or not in memory, or if a copy would
    compute something else.
    """
    if getattr(model, "is_loaded_in_4bit", False) and model.device.type == "cpu":
        raise _unsupported(
            type(model).__name__,
            "bitsandbytes repacks 4-bit weights at their first forward on a CPU, and a copy of the"
            " model would compute something else",
            "load its folder instead, with quantization_config in engine_options",
        )
    if layer := layer_to_unmerge(model):
        raise _unsupported(
            type(model).__name__,
            f"the PEFT adapters of {layer} are merged and disabled, and such a layer unmerges them"
            " when it runs, which the engine's copy would do a second time",
            "call unmerge_adapter() first",
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


def check_probe(model: PreTrainedModel, probe: Probe, n_ctx: int) -> None:
    """Check from a recorded forward that the attention hook receives all that attention depends on.

    n_ctx: context length. Raises: PrefixCachingUnsupported.
    """
    text = model.config.get_text_config()
    n_layers = int(getattr(text, "num_hidden_layers", 0))
    n_layers -= len(getattr(text, "cross_attention_layers", None) or ())  # skipped without images
    if len(probe.modules) < n_layers:
        raise PrefixCachingUnsupported(
            f"{len(probe.modules)} of its {n_layers} layers attend through Transformers' "
            "AttentionInterface, and all must"
        )
    if len({id(m) for m in probe.modules}) < len(probe.modules):
        raise PrefixCachingUnsupported("an attention layer runs more than once a forward")
    if not probe.is_causal:
        raise PrefixCachingUnsupported("an attention layer says that it is not causal (is_causal)")
    kinds = list(getattr(text, "layer_types", None) or [])
    if len(kinds) == len(probe.specs) and getattr(text, "sliding_window", None):
        for layer, (kind, spec) in enumerate(zip(kinds, probe.specs, strict=True)):
            if kind == "sliding_attention" and spec.window is None:
                raise PrefixCachingUnsupported(
                    f"layer {layer} does not pass its sliding window to the hook"
                )
    has_window = any(s.window is not None and s.window < n_ctx for s in probe.specs)
    is_local = not kinds or any("full" not in kind for kind in kinds)
    if not has_window and probe.hides(n_ctx - 1, with_local=is_local):
        raise PrefixCachingUnsupported(
            "its mask hides earlier tokens in a way the hook does not receive (chunks, or a window)"
        )


def _uses_alibi(config: Any) -> bool:
    """Return True if the config describes ALiBi position biases."""
    inner = getattr(config, "attn_config", None)
    is_inner = inner.get("alibi") if isinstance(inner, dict) else getattr(inner, "alibi", False)
    position = getattr(config, "position_embedding_type", None)
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or is_inner
        or position == "alibi"
    )


_RECURRENT = "it has recurrent layers, whose state is not KV of single tokens and cannot be split"


def _unsupported(name: str, why: str, alternative: str = _ALTERNATIVE) -> Unsupported:
    """Return the error for a model that the engine cannot run. why: a clause after "it"."""
    return Unsupported(
        f"the torch engine cannot run {name}: {why}; {alternative}", hint=alternative
    )
