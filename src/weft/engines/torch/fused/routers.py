"""Routers of a mixture as one kernel: the selected experts of each token and their weights."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kv_backend import AttentionStep, ExpertGroups, RouterSpec
from .activations import is_bare
from .patching import patch_forward
from .probing import DTYPES

_SIZES = (0.1, 0.5, 2.0, 6.0)  # standard deviations of logits in the check
_N_EACH = 16  # rows each
_N_IN = 32  # nonzero numbers a row
_BIAS = 0.3  # standard deviation of random biases
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_RATIO = 1e-4
_GIVEN = ""  # the bias is an input of the module


class _RouterOps(NamedTuple):
    """Operations of a router: the layer of logits, the bias, and the rule of selection."""

    router: RouterSpec
    # Name of the layer that computes logits; None: the module itself.
    layer: str | None
    # Logits are float32, whatever the weights' dtype is.
    in_float: bool
    # Name of the bias that is added to scores, or _GIVEN; None: none.
    bias: str | None
    # Input dtype of the check.
    dtype: torch.dtype

    def logits(self, module: Any, x: Tensor) -> Tensor | None:
        """Return the router's logits, [T, X]; None if the module's own code must compute them."""
        source = module if self.layer is None else module._modules[self.layer]
        weight, bias = source._parameters.get("weight"), source._parameters.get("bias")
        if weight is None or (self.layer is not None and not is_bare(source)):
            return None
        if not self.in_float:
            return F.linear(x, weight, bias) if weight.dtype == x.dtype else None
        if x.is_cuda and bias is None and x.dtype == weight.dtype != torch.float32:
            # The same sums, without a float32 copy of the weights.
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def bias_tensor(self, module: Any, given: tuple[Tensor, ...]) -> Tensor | None:
        """Return the bias that is added to scores, [X]; None if there is none.

        given: further inputs of the module; the bias may be the first of them.
        """
        if not self.bias:
            return given[0] if given else None
        buffer = module._buffers.get(self.bias)
        return module._parameters.get(self.bias) if buffer is None else buffer


@torch.inference_mode()
def fuse_routers(model: nn.Module, dtype: torch.dtype) -> int:
    """Patch routers; return their number. dtype: of their inputs."""
    return patch_forward(
        model, lambda module: _recognize(module, dtype), _run_router, n_inputs=(1, 2)
    )


def _run_router(
    module: nn.Module, step: AttentionStep, form: _RouterOps, x: Tensor, *given: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run a router by the step's kernel; None: the module's own code must run.

    Returns:
        Logits [T, X], weights [T, k] and numbers of the selected experts [T, k].
    """
    if x.dtype != form.dtype or len(given) != (form.bias == _GIVEN):
        return None
    bias = form.bias_tensor(module, given)
    logits = form.logits(module, x.reshape(-1, x.shape[-1]))
    is_complete = logits is not None and (bias is None) == (form.bias is None)
    if logits is None or not is_complete or not step.supports_routing(logits, bias, form.router):
        return None
    numbers, shares = step.select_experts(logits, bias, form.router)
    return logits, shares, numbers


def _recognize(module: Any, dtype: torch.dtype) -> _RouterOps | None:
    """Return the operations of a router; None for any other module.

    They are identified by running the module on random weights and rows.
    dtype: of its inputs.
    """
    top_k = getattr(module, "top_k", None)
    if not isinstance(top_k, int) or dtype not in DTYPES or "forward" in module.__dict__:
        return None
    try:
        return _find_ops(module, top_k, dtype)
    except Exception:  # other parts or inputs
        return None


def _find_ops(module: Any, top_k: int, dtype: torch.dtype) -> _RouterOps | None:
    """Return the form of router whose results equal the module's; None if no known form does.

    The module runs with random weights: in float32, where all scores differ, then in its own
    dtypes. top_k: experts per token. dtype: of the model's hidden states.
    """
    layer, bias = _layer_of(module), _bias_of(module)
    like, x = _random_twin(module, torch.float32), _rows_for(module, layer)
    n_experts = len(_weight_of(module, layer))
    given = (_random_weights((n_experts,), x.device),) if bias == _GIVEN else ()
    form = _RouterOps(RouterSpec(top_k, "softmax", False, False), layer, False, bias, torch.float32)
    logits = form.logits(like, x)
    result = _run_forward(like, x, given)
    if logits is None or not _is_near(result[0], logits, torch.float32):
        return None
    bias_value = form.bias_tensor(like, given)
    for router in _routers(module, top_k):
        scale = _scale(router, logits, bias_value, result)
        if scale is not None:
            form = form._replace(router=router._replace(scale=scale))
            return _check_dtypes(module, form._replace(dtype=dtype), x.to(dtype), given)
    return None


def _check_dtypes(
    module: Any, form: _RouterOps, x: Tensor, given: tuple[Tensor, ...]
) -> _RouterOps | None:
    """Return the form with the dtypes of the module's results; None if the results differ.

    x: rows in the module's own dtype. given: further inputs of the module.
    """
    like = _random_twin(module)
    logits, shares, numbers = _run_forward(like, x, given)
    in_float = bool((logits != logits.to(x.dtype)).any())
    form = form._replace(in_float=in_float, router=form.router._replace(dtype=shares.dtype))
    own = form.logits(like, x)
    is_same = own is not None and _is_near(logits, own, x.dtype)
    want = _expert_weights(form.router, logits.float(), numbers)
    return form if is_same and _is_near(shares, want, x.dtype) else None


def _run_forward(module: Any, x: Tensor, given: tuple[Tensor, ...]) -> Any:
    """Run a router's own `forward`, without hooks; return (logits, weights, expert numbers).

    Args:
        x: rows [n, E]. A router that rejects them is run on [1, n, E].
        given: further inputs of the router, such as a selection bias.
    """
    try:
        return type(module).forward(module, x, *given)
    except ValueError:
        return type(module).forward(module, x[None], *given)


def _layer_of(module: Any) -> str | None:
    """Return the name of the layer that computes logits; None: the module itself. Raises:
    ValueError.
    """
    layers = [name for name, each in module._modules.items() if isinstance(each, nn.Linear)]
    if len(module._modules) > 1 or len(layers) != len(module._modules):
        raise ValueError("it has other parts")
    return layers[0] if layers else None


def _weight_of(module: Any, layer: str | None) -> Tensor:
    """Return the weight of the layer that computes logits."""
    source = module if layer is None else module._modules[layer]
    weight: Tensor = source._parameters["weight"]
    return weight


def _bias_of(module: Any) -> str | None:
    """Return the name of the router's only other parameter or buffer; None if it has none.

    The name is `_GIVEN` for a bias that is an argument of the router's forward. Raises: ValueError
    for several.
    """
    tensors = {**module._parameters, **module._buffers}
    own = [n for n, each in tensors.items() if each is not None and n not in ("weight", "bias")]
    own += [_GIVEN] * (len(inspect.signature(type(module).forward).parameters) - 2)
    if len(own) > 1:
        raise ValueError("it has other parts")
    return own[0] if own else None


def _random_twin(module: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a module of the same kind with random weights. dtype: None keeps the dtypes."""
    result = object.__new__(type(module))
    result.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        result.__dict__[kind] = {
            name: None
            if tensors is None
            else _random_weights(tensors.shape, tensors.device).to(dtype or tensors.dtype)
            for name, tensors in module.__dict__[kind].items()
        }
    result.__dict__["_modules"] = {
        n: _random_twin(each, dtype) for n, each in module._modules.items()
    }
    return result


def _random_weights(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return random biases, or weights whose rows end in zeros, to probe a router."""
    seeded = torch.Generator().manual_seed(len(shape))
    if len(shape) == 1:
        return (torch.randn(shape, generator=seeded) * _BIAS).to(device)
    n_in = min(shape[1], _N_IN)
    result = torch.zeros(shape, device=device)
    result[:, :n_in] = (torch.randn(shape[0], n_in, generator=seeded) / n_in**0.5).to(device)
    return result


def _rows_for(module: Any, layer: str | None) -> Tensor:
    """Return random inputs for a router, so that its logits have several magnitudes: [n, E]."""
    weight = _weight_of(module, layer)
    n_in = min(weight.shape[1], _N_IN)
    result = torch.zeros(len(_SIZES), _N_EACH, weight.shape[1], device=weight.device)
    rows = torch.randn(len(_SIZES), _N_EACH, n_in, generator=torch.Generator().manual_seed(0))
    result[..., :n_in] = (rows * torch.tensor(_SIZES)[:, None, None]).to(weight.device)
    return result.flatten(0, 1)


def _routers(module: Any, top_k: int) -> Iterator[RouterSpec]:
    """Yield selection rules that a router may follow, the usual one first."""
    tensors = module.__dict__
    n, n_kept = tensors.get("num_group", tensors.get("n_group")), tensors.get("topk_group")
    groups: list[ExpertGroups | None] = [None]
    if isinstance(n, int) and isinstance(n_kept, int) and 1 <= n_kept <= n:
        groups += [ExpertGroups(n, n_kept, "two"), ExpertGroups(n, n_kept, "one")]
    functions: tuple[Any, ...] = ("softmax", "sigmoid")
    for by_logits, group, function in itertools.product((False, True), groups, functions):
        for is_normed in (True, False):
            yield RouterSpec(top_k, function, is_normed, by_logits, group)


def _scale(router: RouterSpec, logits: Tensor, bias: Tensor | None, result: Any) -> float | None:
    """Return the constant factor between a module's expert weights and those of a specification.

    None if the factor is not constant, or the module selects other experts.

    Args:
        router: the specification.
        logits: the module's logits [n, X].
        bias: bias of the selection; None if there is none.
        result: of `_run_forward`.
    """
    _, shares, numbers = result
    at = numbers.argsort(-1)
    chosen = _select_experts(router, logits, bias).sort(-1).values
    if not torch.equal(numbers.gather(-1, at), chosen):
        return None
    ratio = shares.gather(-1, at).double() / _expert_weights(router, logits, chosen).double()
    scale = float(f"{ratio.median():.6g}")
    return scale if scale > 0 and bool(((ratio / scale - 1).abs() < _RATIO).all()) else None


def _select_experts(router: RouterSpec, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the numbers of the selected experts by plain PyTorch operations: [n, k]."""
    scores = logits if router.by_logits else _scores(router, logits)
    scores = scores if bias is None else scores + bias
    if router.groups is not None:
        by_group = scores.unflatten(-1, (router.groups.n, -1))
        best = by_group.topk(2 if router.groups.by == "two" else 1, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(router.groups.n_kept, -1).indices, 1)
        scores = by_group.masked_fill(kept[..., None] == 0, float("-inf")).flatten(-2)
    return scores.topk(router.top_k, -1).indices


def _expert_weights(router: RouterSpec, logits: Tensor, numbers: Tensor) -> Tensor:
    """Return the weights of selected experts by plain PyTorch operations: [n, k]."""
    shares = _scores(router, logits).gather(-1, numbers)
    if router.is_normed:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares * router.scale


def _scores(router: RouterSpec, logits: Tensor) -> Tensor:
    """Return the softmax or sigmoid of logits."""
    return logits.softmax(-1) if router.function == "softmax" else logits.sigmoid()


def _is_near(result: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a result equals the expected one up to the rounding of `dtype`."""
    if result.shape != want.shape:
        return False
    result, want = result.float(), want.float()
    return torch.allclose(result, want, rtol=_NEAR[dtype], atol=_NEAR[dtype] * float(want.std()))
