"""Our own copy of a loaded model: the tensors are the owner's, all else is ours to change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import Unsupported
from .fused import SIBLINGS

_log = logging.getLogger("weft.engines.torch")

# Buffers up to this size are copied: rotary tables are small, and models rewrite them at run time.
_COPIED_BUFFER_BYTES = 1 << 20


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy modules and config; parameters and large buffers stay shared with the owner."""
    shared: list[Tensor] = list(model.parameters())
    shared += [b for b in model.buffers() if b.numel() * b.element_size() > _COPIED_BUFFER_BYTES]
    memo: dict[int, Any] = {id(t): t for t in shared}
    return copy.deepcopy(model, memo).eval()


@torch.inference_mode(False)
def lay_by_column(model: PreTrainedModel) -> None:
    """Store the weights of linear layers column by column, where that is faster: float32 on CPUs.

    The numbers and shapes stay. A step of few rows is bound by reading them, and the product of a
    row with a transposed weight reads them slowly: 1.5 times at one row, level from 16 on. Layers
    of one input lie side by side, in one piece. A weight that is an embedding too stays, as its
    rows are looked up.
    """
    modules = list(model.modules())
    seen = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    for module in modules:
        children = dict(module.named_children())
        siblings = [[children.get(name) for name in names] for names in SIBLINGS]
        for layers in [*siblings, *([child] for child in children.values())]:
            weights = [layer.weight for layer in layers if type(layer) is nn.Linear]
            if len(weights) == len(layers) and not any(id(weight) in seen for weight in weights):
                seen.update(map(id, weights))
                _lay_together(weights)


def _lay_together(weights: Sequence[Tensor]) -> None:
    """Let weights [out, in] of one `in` be parts of one piece that holds column after column."""
    if any(w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
        return
    if len({weight.shape[1] for weight in weights}) > 1:
        return
    whole = torch.cat([weight.data.t() for weight in weights], 1).t()
    for weight, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
        weight.data = part


class Head(nn.Module):
    """The part of a causal LM after its base model: final scaling, soft-caps and all.

    A second shell of the model whose base model only hands back the hidden states it is given.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        prefix = model.base_model_prefix
        if model.base_model is model or prefix not in model._modules:
            raise Unsupported(
                f"{type(model).__name__} has no base model apart from its head; "
                "load the …ForCausalLM class of the model"
            )
        self.base = model.base_model
        self._replay = _Replay()
        self._shell = copy.copy(model)
        self._shell.__dict__["_modules"] = {**model._modules, prefix: self._replay}

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the base model over packed tokens, both [1, T]; return hidden states [T, E]."""
        output = self.base(
            input_ids=token_ids, position_ids=positions, use_cache=False, return_dict=True
        )
        self._replay.kind = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, E], by the model's own code."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        self._replay.hidden = hidden[None]
        try:
            logits: Tensor = self._shell(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            self._replay.hidden = None
        return logits


class _Replay(nn.Module):
    """Stands where the base model was and answers with given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kind: type[Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.kind is not None
        return self.kind(last_hidden_state=self.hidden)


def freeze_rope(model: PreTrainedModel, n_ctx: int) -> str:
    """Decide rotary frequencies that depend on the longest sequence once, from `n_ctx`.

    Such modules look at the largest position of the forward, so a longer companion changes a row.
    Returns what was decided, or "" when no module does that.
    """
    decided = ""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                decided = _freeze_one(module, kind, layer_type, n_ctx) or decided
            if decided:
                module.rope_type = {name: _frozen(kind) for name, kind in kinds.items()}
        elif isinstance(kinds, str):
            decided = _freeze_one(module, kinds, None, n_ctx) or decided
            module.rope_type = _frozen(kinds)
    return decided


def _frozen(kind: str) -> str:
    """A name that Transformers' update wrapper does not act on."""
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def _freeze_one(module: nn.Module, kind: str, layer_type: str | None, n_ctx: int) -> str:
    if _frozen(kind) == kind:
        return ""
    config: Any = module.config
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if n_ctx <= original:
        frequencies, which = getattr(module, f"{prefix}original_inv_freq"), "short"
    else:
        length = original + 1 if kind == "longrope" else n_ctx
        device = getattr(module, f"{prefix}inv_freq").device
        extra = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _scaling = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length, **extra)
        which = "long"
    current = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", frequencies.to(current.device, current.dtype).clone())
    _log.info("%s rope fixed to its %s frequencies for a context of %d", kind, which, n_ctx)
    return f"{kind}: {which} frequencies, n_ctx {n_ctx}, original context {original}"
