"""Experts of a mixture with weights packed for oneDNN, or used in place."""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .packed import TOLERANCE, can_pack, packed, product, version_of
from .unpacked import is_unpacked

# Attributes that Transformers gives modules for other implementations of a mixture.
_ATTRIBUTES = ("config", "has_gate", "has_bias", "is_transposed")
_UP = ("gate_up_proj", "up_proj")
_N_ROWS = 5
_PACKED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class PackedExperts(nn.Module):
    """Mixin for a module of experts whose weights are packed.

    A step reads the weights of each expert that one of its rows selected. The stacks [experts, out,
    in] stay next to the packed ones, or not. Then a state dict creates them, and loaded weights are
    packed.
    """

    num_experts: int
    _packed: dict[str, list[Tensor]]
    _versions: dict[str, tuple[int, int]]

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return the weighted sum of the selected experts' outputs.

        hidden: [T, E]; chosen: expert ids [T, k]; shares: their weights [T, k].
        """
        me: Any = self
        if self._versions and torch.is_grad_enabled():  # packed products have no gradient
            own: Any = super().forward
            result: Tensor = own(hidden, chosen, shares)
            return result
        self._repack_changed()
        up_name = first_stack_name(self)
        ids, order = chosen.reshape(-1).sort(stable=True)
        rows = hidden[order // chosen.shape[1]]
        outputs = torch.zeros_like(rows)  # also for experts of other devices
        start = 0
        for expert, members in groupby(ids.tolist()):
            stop = start + sum(1 for _ in members)
            if expert < self.num_experts:
                up = self._product(rows[start:stop], up_name, expert)
                between = me._apply_gate(up) if me.has_gate else me.act_fn(up)
                outputs[start:stop] = self._product(between, "down_proj", expert)
            start = stop
        if self.__dict__.get("has_post_expert_norm"):
            outputs = me.post_expert_norm(outputs)
        outputs = outputs * shares.reshape(-1)[order, None]
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return by_token.view(*chosen.shape, outputs.shape[1]).sum(1).to(hidden.dtype)

    def repack_on_use(self) -> None:
        """Repack the kept weights at the next product: PyTorch may not have counted a write to
        them.
        """
        self._versions = dict.fromkeys(self._versions, (0, -1))

    def _product(self, x: Tensor, name: str, expert: int) -> Tensor:
        """Return rows x times one expert's packed weight. name: of the stack of weights."""
        biases: Any = self._parameters.get(f"{name}_bias")
        return product(x, self._packed[name][expert], None if biases is None else biases[expert])

    def _repack_changed(self) -> None:
        """Pack the stacks that were written to since they were packed."""
        for name, version in self._versions.items():
            kept: Any = self._parameters[name]
            if version_of(kept) != version:
                self._pack(name, kept.detach())
                self._versions[name] = version_of(kept)

    def _pack(self, name: str, stack: Tensor) -> None:
        """Pack each expert's weight of a stack."""
        weights = swap_layout(self, stack)
        is_in_place = is_unpacked(stack.dtype)
        self._packed[name] = [each if is_in_place else packed(each) for each in weights]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the stacks in their original layout to a state dict."""
        for name, weights in self._packed.items():
            if name not in self._versions:
                with torch.inference_mode():
                    dense = torch.stack([weight.to_dense() for weight in weights])
                    destination[prefix + name] = swap_layout(self, dense)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Pack the stacks in a state dict."""
        state_dict = dict(state_dict)
        for name, weights in self._packed.items():
            if name not in self._versions and prefix + name in state_dict:
                stack = state_dict.pop(prefix + name).detach()
                self._pack(name, stack.to(weights[0].dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for weights in self._packed.values():
            memo.update((id(weight), weight) for weight in weights)  # read-only
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def pack_experts(model: nn.Module, *, keep: bool, twice: bool = True) -> tuple[int, int]:
    """Pack the experts of every mixture that supports other implementations, if results are
    correct.

    Args:
        keep: keep the stacks, too, as those that stay unpacked.
        twice: False skips weights that would be in memory twice.

    Returns:
        The number of packed mixtures, and the bytes of stacks that have a packed copy.
    """
    modules = [module for module in model.modules() if _can_be_packed(module)]
    if not twice:
        modules = [module for module in modules if not _bytes_copied(module)]
    if not modules or not all(_is_correct(module) for module in _one_of_each(modules)):
        return 0, 0
    n_bytes = sum(map(_bytes_copied, modules))
    for module in modules:
        _mix_in(module, keep=keep)
    return len(modules), n_bytes


def _bytes_copied(module: nn.Module) -> int:
    """Return the bytes of a mixture's stacks that packing copies."""
    stacks: list[Any] = [
        module._parameters[name] for name in (first_stack_name(module), "down_proj")
    ]
    return sum(stack.nbytes for stack in stacks if not is_unpacked(stack.dtype))


def _mix_in(module: Any, *, keep: bool) -> None:
    """Replace a module's class by one with `PackedExperts`, and pack its weights."""
    module.__dict__.update(_packed={}, _versions={})
    module.__class__ = _packed_class(type(module))
    for name in (first_stack_name(module), "down_proj"):
        stack = module._parameters[name]
        module._pack(name, stack.detach())
        if keep or is_unpacked(stack.dtype):
            module._versions[name] = version_of(stack)
        else:
            del module._parameters[name]


def _packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of packed modules of a kind; one for all of them."""
    if kind not in _PACKED_CLASSES:
        packed_class = type(
            f"Packed{kind.__name__}", (PackedExperts, kind), {"__module__": __name__}
        )
        _PACKED_CLASSES[kind] = packed_class
    return _PACKED_CLASSES[kind]


def is_replaceable(module: Any) -> bool:
    """Return True for a module of experts that supports other implementations and does nothing
    else.
    """
    if isinstance(module, PackedExperts) or not all(
        name in module.__dict__ for name in _ATTRIBUTES
    ):
        return False
    if _implementation_of(module) not in ("grouped_mm", "eager"):
        return False  # the user selected an implementation
    stacks = [module._parameters.get(name) for name in (first_stack_name(module), "down_proj")]
    return not module.__dict__.get("_is_expert_parallel") and all(map(is_stack, stacks))


def is_grouped(module: Any) -> bool:
    """Return True if the module itself uses a library's grouped matrix product."""
    return _implementation_of(module) == "grouped_mm"


def _implementation_of(module: Any) -> str | None:
    """Return the name of the experts implementation that the module's config selects, or None."""
    name: str | None = getattr(module.config, "_experts_implementation", None)
    return name


def is_stack(weight: Any) -> bool:
    """Return True for weights of experts, [experts, out, in] or transposed."""
    return type(weight) is nn.Parameter and weight.ndim == 3


def _can_be_packed(module: Any) -> bool:
    """Return True for a module of experts without hooks that supports other implementations."""
    return is_replaceable(module) and not (module._forward_hooks or module._forward_pre_hooks)


def _one_of_each(modules: list[nn.Module]) -> list[nn.Module]:
    """Return one module for each class."""
    return list({type(module): module for module in reversed(modules)}.values())


@torch.inference_mode()
def _is_correct(module: Any) -> bool:
    """Return True if packed experts agree with the module, for some rows and experts."""
    up, down = (module._parameters[name] for name in (first_stack_name(module), "down_proj"))
    if not all(can_pack(swap_layout(module, stack)[0]) for stack in (up, down)):
        return False
    n_used, width = min(len(down), 2 * _N_ROWS), swap_layout(module, down).shape[1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_N_ROWS, width, generator=generator).to(down.dtype)
    chosen = torch.arange(2 * _N_ROWS).view(-1, 2) % n_used
    shares = torch.rand(_N_ROWS, 2, generator=generator).to(down.dtype)
    few = copy.copy(module)
    used = {first_stack_name(module): up[:n_used], "down_proj": down[:n_used]}
    few.__dict__.update(_parameters=module._parameters | used)
    try:
        want = module(rows, chosen, shares).float()
        _mix_in(few, keep=False)
        got = few(rows, chosen, shares).float()
    except Exception:
        return False
    error = (got - want).square().mean().sqrt()
    return bool(error <= TOLERANCE[down.dtype] * want.square().mean().sqrt().clamp_min(1e-30))


def first_stack_name(module: nn.Module) -> str:
    """Return the name of a mixture's first stack of weights, such as "gate_up_proj"."""
    return _UP[0] if module.__dict__["has_gate"] else _UP[1]


def swap_layout(module: nn.Module, stack: Tensor) -> Tensor:
    """Convert a stack to [experts, out, in], or back: transposed stacks are transposed."""
    return stack.transpose(1, 2) if module.__dict__["is_transposed"] else stack
