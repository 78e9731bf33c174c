"""Reward models: decoders with a classification head, whose outputs replace the logits of tokens.

Transformers returns one score per text for a sequence classifier. Here each model returns its
head's outputs at every token, so that the KV of a text's prefixes can be used again.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import TokenClassifierOutput

from ...errors import Unsupported

# Qwen2.5-Math-PRM: a head of two layers. Its files bring code of their own, which is not needed.
_PROCESS_REWARD = "ForProcessRewardModel"
_KINDS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    _PROCESS_REWARD: AutoModelForTokenClassification,
}


def is_classifier(config: PretrainedConfig) -> bool:
    """Return True if a config describes a decoder with a classification head."""
    names = config.architectures or [""]
    return _ending(names[0]) is not None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def is_classifier_object(model: PreTrainedModel) -> bool:
    """Return True if a loaded model is a decoder with a classification head."""
    return _ending(type(model).__name__) is not None and (
        type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    )


def classifier_class(config: PretrainedConfig) -> Any:
    """Return the class that loads a classifier; its `from_pretrained` returns the model."""
    ending = _ending(config.architectures[0])
    assert ending is not None
    auto = _KINDS[ending]
    return _process_reward_class(auto, config) if ending == _PROCESS_REWARD else auto


def score_every_token(model: PreTrainedModel) -> PreTrainedModel:
    """Make a classifier return its head's outputs at every token, [B, T, labels]; return it.

    Raises: Unsupported if it has no head named `score`, as decoders have.
    """
    if not isinstance(getattr(model, "score", None), nn.Module):
        raise Unsupported(
            f"the torch engine cannot run {type(model).__name__}: it has no `score` head over a"
            " decoder's hidden states",
            hint="take a reward model whose base is a decoder-only model",
        )
    if not isinstance(model, _EveryToken):
        kind = type(model)
        model.__class__ = type(kind.__name__, (_EveryToken, kind), {"__module__": kind.__module__})
    return model


def n_labels_of(model: PreTrainedModel) -> int:
    """Return the number of outputs of a classification head; 0 for a language model."""
    config: Any = model.config
    return int(config.num_labels) if isinstance(model, _EveryToken) else 0


def head_of(model: PreTrainedModel) -> Literal["language", "sequence", "steps"]:
    """Return the kind of a model's head; see `EngineInfo.head`."""
    if not isinstance(model, _EveryToken):
        return "language"
    return "sequence" if _ending(type(model).__name__) == "ForSequenceClassification" else "steps"


class _EveryToken:
    """A mixin whose `forward` applies the head to each hidden state."""

    def forward(self: Any, input_ids: Tensor | None = None, **given: Any) -> TokenClassifierOutput:
        given.pop("return_dict", None)
        output = self.base_model(input_ids=input_ids, **given)
        return TokenClassifierOutput(logits=self.score(output.last_hidden_state))


def _ending(architecture: str) -> str | None:
    return next((ending for ending in _KINDS if architecture.endswith(ending)), None)


def _process_reward_class(auto: Any, config: PretrainedConfig) -> Any:
    base = auto._model_mapping[type(config)]

    def create(self: Any, config: Any) -> None:
        base.__init__(self, config)
        size = config.hidden_size
        self.score = nn.Sequential(
            nn.Linear(size, size), nn.ReLU(), nn.Linear(size, config.num_labels)
        )

    return type(base.__name__, (base,), {"__init__": create, "__module__": base.__module__})
