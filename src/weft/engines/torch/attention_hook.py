"""The place where a Transformers model calls Weft: one attention function and one mask function.

Both are registered under names of their own: models that do not ask for them never come here. What
a call belongs to hangs on the modules of our own copy of the model, not on the process.

The mask function is there for the probe alone. Where a name has one, Transformers looks first
whether the positions are those of several sequences, and waits for the device to say so, in every
forward; where it has none, there is no mask, and nothing is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .kv_backend import AttentionSpec, AttentionStep
from .layout import LayerShape
from .padded.attention import apply_sinks, attend_causal, causal_bands

NAME = "weft_tree"
PROBE = "weft_probe"
_SEAT = "weft_seat"


class ForwardContext:
    """The forward that is running: `step` attends; else `probe` watches a plain sequence."""

    __slots__ = ("probe", "step")

    def __init__(self) -> None:
        self.step: AttentionStep | None = None
        self.probe: Probe | None = None


class ModuleContext:
    """What each module of our copy carries: the running call and, once known, its layer."""

    __slots__ = ("call", "layer")

    def __init__(self, call: ForwardContext) -> None:
        self.call = call
        self.layer = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleContext:
        return self  # a copy of our copy is still ours


class Probe:
    """What one plain forward teaches: attention modules in call order, how they attend, shapes.

    layers: which KV each module meets. Most have one of their own; Gemma 3n and 4 have modules that
    meet the KV of an earlier one. shapes: of every KV.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.layers: list[int] = []
        self._met: list[tuple[Tensor, Tensor]] = []  # alive, so that no other lies where one did
        self.shapes: list[LayerShape] = []
        self.specs: list[AttentionSpec] = []
        self.masks: list[Any] = []
        self.local_masks: list[Any] = []
        self.is_causal = True

    def see(self, module: nn.Module, key: Tensor, value: Tensor, spec: AttentionSpec) -> None:
        self.modules.append(module)
        self.specs.append(spec)
        self.is_causal = self.is_causal and getattr(module, "is_causal", True) is not False
        for layer, (earlier_key, earlier_value) in enumerate(self._met):
            if _is_same(key, earlier_key) and _is_same(value, earlier_value):
                self.layers.append(layer)
                return
        self.layers.append(len(self._met))
        self._met.append((key, value))
        self.shapes.append(
            LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype)
        )

    @property
    def kv_layers(self) -> list[tuple[nn.Module, LayerShape]]:
        """The first module that meets each KV, and the KV's shape."""
        firsts = dict(zip(reversed(self.layers), reversed(self.modules), strict=True))
        return [(firsts[layer], shape) for layer, shape in enumerate(self.shapes)]

    def hides(self, distance: int, *, with_local: bool) -> bool:
        """Whether some mask function hides what lies so far back; local ones where they are used.

        Models make the mask of a window, too, that none of their layers has.
        """
        query, key = torch.tensor(distance), torch.tensor(0)
        masks = self.masks + self.local_masks if with_local else self.masks
        return any(not bool(mask(0, 0, query, key)) for mask in masks)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory."""
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride(), one.dtype) == (
        other.shape,
        other.stride(),
        other.dtype,
    )


# Set only while a probe runs: a mask function is told the config, not the module it works for.
_probing: ContextVar[Probe | None] = ContextVar("weft_probing", default=None)


@contextmanager
def probing(call: ForwardContext) -> Iterator[Probe]:
    """Let the forwards inside attend plainly and record what they do."""
    probe = call.probe = Probe()
    token = _probing.set(probe)
    try:
        yield probe
    finally:
        _probing.reset(token)
        call.probe = None


def attach_context(model: nn.Module) -> ForwardContext:
    """Hang a seat on every module of our copy, so that the attention function finds its call."""
    call = ForwardContext()
    for module in model.modules():
        module.__dict__[_SEAT] = ModuleContext(call)
    return call


def current_step(module: nn.Module) -> AttentionStep | None:
    """Return the step that is running, where a module of our copy is called in one."""
    seat: ModuleContext = module.__dict__[_SEAT]
    return seat.call.step


def attention_implementation(model: PreTrainedModel) -> Any:
    """Return the attention that a model has now, for `set_attn_implementation` to put back."""
    return getattr(model.config, "_attn_implementation", None)


def number_layers(probe: Probe) -> None:
    """Tell each attention module which layer's KV it meets."""
    for layer, module in zip(probe.layers, probe.modules, strict=True):
        module.__dict__[_SEAT].layer = layer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend one layer of the running forward; the signature is that of AttentionInterface."""
    seat: ModuleContext = module.__dict__[_SEAT]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale, softcap or None, sliding_window or None, s_aux)
    if seat.call.step is not None:
        met = seat.call.step.attend(seat.layer, query, key, value, spec)
        return met.contiguous(), None  # as the interface's own are: models take views of it
    if seat.call.probe is not None:
        seat.call.probe.see(module, key, value, spec)
    out, lse = attend_causal(
        query, key, value, spec, causal_bands(query.shape[2], spec.window, query)
    )
    if s_aux is not None:
        apply_sinks(out, lse, s_aux.view(-1, 1).float())
    return out.transpose(1, 2).contiguous(), None


def no_mask(
    *args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any
) -> None:
    """Make no mask: what a token sees follows from its path. A probe keeps the function."""
    probe = _probing.get()
    if probe is not None and mask_function is not None:
        (probe.masks if local_size is None else probe.local_masks).append(mask_function)


AttentionInterface.register(NAME, attention)
AttentionInterface.register(PROBE, attention)
AttentionMaskInterface.register(PROBE, no_mask)
