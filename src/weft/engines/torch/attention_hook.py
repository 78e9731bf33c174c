"""The attention function through which a Transformers model calls Weft.

It is registered under own names, so other models never call it. The state of a call is attached
to the modules of the engine's copy, not to the process.

The mask function exists only for the probe. If a name has a mask function, Transformers checks in
every forward whether positions belong to several sequences, and waits for the device.
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
    """State that an engine shares with its model's modules during a forward.

    step: the running step, which computes the attention; None outside of a step. probe: records a
    plain forward, if there is no step; None: no probe runs.
    """

    __slots__ = ("probe", "step")

    def __init__(self) -> None:
        self.step: AttentionStep | None = None
        self.probe: Probe | None = None


class ModuleContext:
    """State attached to each module of the engine's copy: the running forward, and the layer
    number.
    """

    __slots__ = ("call", "layer")

    def __init__(self, call: ForwardContext) -> None:
        self.call = call
        self.layer = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleContext:
        return self  # copies of the engine's model share the forward


class Probe:
    """Record of one plain forward: attention modules in call order, their parameters and KV shapes.

    Attributes:
        layers: number of the KV that each module reads. Gemma 3n and 4 have modules that read the
            KV of an earlier one.
        shapes: shape of each KV.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.layers: list[int] = []
        self._kv: list[tuple[Tensor, Tensor]] = []  # kept alive, so that no address is reused
        self.shapes: list[LayerShape] = []
        self.specs: list[AttentionSpec] = []
        self.masks: list[Any] = []
        self.local_masks: list[Any] = []
        self.is_causal = True

    def record(self, module: nn.Module, key: Tensor, value: Tensor, spec: AttentionSpec) -> None:
        """Record one call of an attention module: its KV's shape and its parameters."""
        self.modules.append(module)
        self.specs.append(spec)
        self.is_causal = self.is_causal and getattr(module, "is_causal", True) is not False
        for layer, (earlier_key, earlier_value) in enumerate(self._kv):
            if _is_same(key, earlier_key) and _is_same(value, earlier_value):
                self.layers.append(layer)
                return
        self.layers.append(len(self._kv))
        self._kv.append((key, value))
        self.shapes.append(
            LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype)
        )

    @property
    def kv_layers(self) -> list[tuple[nn.Module, LayerShape]]:
        """The first module that reads each KV, and the KV's shape."""
        firsts = dict(zip(reversed(self.layers), reversed(self.modules), strict=True))
        return [(firsts[layer], shape) for layer, shape in enumerate(self.shapes)]

    def hides(self, distance: int, *, with_local: bool) -> bool:
        """Return True if a mask function hides a token at this distance.

        Models also create the mask of a window that no layer uses, so local masks are optional.
        """
        query, key = torch.tensor(distance), torch.tensor(0)
        masks = self.masks + self.local_masks if with_local else self.masks
        return any(not bool(mask(0, 0, query, key)) for mask in masks)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same view of memory."""
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride(), one.dtype) == (
        other.shape,
        other.stride(),
        other.dtype,
    )


# Set only while a probe runs: a mask function gets the config, not a module.
_probing: ContextVar[Probe | None] = ContextVar("weft_probing", default=None)


@contextmanager
def probing(call: ForwardContext) -> Iterator[Probe]:
    """Make forwards in a block attend without a step, and record them in the yielded `Probe`.

    call: the model's `ForwardContext`.
    """
    probe = call.probe = Probe()
    token = _probing.set(probe)
    try:
        yield probe
    finally:
        _probing.reset(token)
        call.probe = None


def attach_context(model: nn.Module) -> ForwardContext:
    """Attach a `ModuleContext` to every module of the engine's copy."""
    call = ForwardContext()
    for module in model.modules():
        module.__dict__[_SEAT] = ModuleContext(call)
    return call


def current_step(module: nn.Module) -> AttentionStep | None:
    """Return the running step; None outside of one."""
    seat: ModuleContext = module.__dict__[_SEAT]
    return seat.call.step


def attention_implementation(model: PreTrainedModel) -> Any:
    """Return the model's present attention, for `set_attn_implementation` to restore."""
    return getattr(model.config, "_attn_implementation", None)


def number_layers(probe: Probe) -> None:
    """Set `ModuleContext.layer` of each attention module: the number of the KV that it reads."""
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
    """Attend one layer of the running forward; the signature is AttentionInterface's."""
    seat: ModuleContext = module.__dict__[_SEAT]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale, softcap or None, sliding_window or None, s_aux)
    if seat.call.step is not None:
        out = seat.call.step.attend(seat.layer, query, key, value, spec)
        return out.contiguous(), None  # models take views of it
    if seat.call.probe is not None:
        seat.call.probe.record(module, key, value, spec)
    out, lse = attend_causal(
        query, key, value, spec, causal_bands(query.shape[2], spec.window, query)
    )
    if s_aux is not None:
        apply_sinks(out, lse, s_aux.view(-1, 1).float())
    return out.transpose(1, 2).contiguous(), None


def no_mask(
    *args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any
) -> None:
    """Return no mask: visibility follows from the path. A probe records the function."""
    probe = _probing.get()
    if probe is not None and mask_function is not None:
        (probe.masks if local_size is None else probe.local_masks).append(mask_function)


AttentionInterface.register(NAME, attention)
AttentionInterface.register(PROBE, attention)
AttentionMaskInterface.register(PROBE, no_mask)
