"""Memory layout of linear weights: by column, packed for oneDNN, or merged with siblings."""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import ConfigError
from .check import quantised
from .fused.decoder import is_known, is_plain_weight
from .fused.merged_linear import SIBLINGS
from .paged.capture import capturing
from .weights.experts import pack_experts
from .weights.layer_trace import called_layers, shared_input_groups
from .weights.memory import MappedFiles, release_heap
from .weights.packed import TOLERANCE, PackedLinear, can_pack, pack_layer, time_padding
from .weights.unpacked import is_unpacked
from .weights.upcast import is_upcast

_log = logging.getLogger("weft.engines.torch")

# A float32 model whose largest layer has fewer numbers also keeps its weights by column, for fewer
# than FEW rows: a call of oneDNN costs more than such a product.
MIN_NUMBERS = 1 << 19
FEW = 16
_ALIGN_BYTES = 16  # of GPU reads
_TIMED_NUMBERS = 1 << 25  # larger layers are not timed: a product would take too long


def optimize_layout(model: PreTrainedModel, packed_weights: bool | None) -> None:
    """Change the memory layout of a model's linear weights, to speed up products of few rows.

    Only for a model that the engine loaded itself.
    packed_weights: see `TorchEngine.load`. Raises: ConfigError if it is True and has no effect.
    """
    if packed_weights:
        pack_or_raise(model, keep=False)
    elif model.device.type == "cuda":
        merge_sibling_weights(model)
    elif packed_weights is False:
        store_by_column(model)
    elif _has_small_layers(model):
        store_by_column(model)
        pack(model, keep=True, few=FEW)
    elif not pack(model, keep=False):
        store_by_column(model)
    release_heap()


def upcast_on_use(model: PreTrainedModel) -> None:
    """Upcast the weights of a shared model while they are used, if this CPU has no 16-bit products.

    The weights stay in place, and are in memory once.
    """
    if is_upcast(model.dtype):
        pack(model, keep=True, twice=False)


def _has_small_layers(model: PreTrainedModel) -> bool:
    """Return True for a float32 model with layers too small to gain from another layout."""
    if model.dtype != torch.float32:
        return False
    output = model.get_output_embeddings()
    layers: list[Any] = [each for each in model.modules() if type(each) in (nn.Linear, Conv1D)]
    numbers = [layer.weight.numel() for layer in layers if layer is not output]
    return max(numbers, default=0) < MIN_NUMBERS


def pack_or_raise(model: PreTrainedModel, *, keep: bool) -> None:
    """Pack as `pack` does. Raises: ConfigError if nothing can be packed."""
    if not pack(model, keep=keep):
        raise ConfigError(
            f"packed_weights has no effect on {type(model).__name__} in {model.dtype} on"
            f" {model.device}; packed are linear layers of Transformers' own models on CPUs that"
            " oneDNN knows, in float32, bfloat16 or float16; leave it out"
        )


@torch.inference_mode(False)
def pack(model: PreTrainedModel, *, keep: bool, few: int = 0, twice: bool = True) -> bool:
    """Pack the weights of linear layers and experts for oneDNN, if only their modules read them.

    Args:
        keep: keep the original weights, too. Without it, only an output layer that is also the
            embedding keeps them, and weights that are used unpacked.
        few: see `PackedLinear`. Experts are then not packed, because each has few rows.
        twice: False skips weights that would be in memory twice.

    Returns:
        True if any weights are packed.
    """
    n_experts, n_bytes = (0, 0) if few else pack_experts(model, keep=keep, twice=twice)
    places = _linear_layers(model)
    if not twice:
        places = [place for place in places if not _is_copied(getattr(*place), keep)]
    if not _can_pack([getattr(*place) for place in places]):
        places = []
        if not n_experts:
            return False
    looked_up = model.get_input_embeddings().weight
    copied = {place for place in places if _is_copied(getattr(*place), keep)}
    replaced = {id(getattr(*place).weight) for place in copied} - {id(looked_up)}
    files = MappedFiles()
    if not keep and (replaced or n_bytes):
        _copy_out_of_files(model, replaced, files)
    n_twice = n_bytes if keep else 0
    by_shape: dict[tuple[int, int], PackedLinear] = {}
    for place in places:  # free each weight once its copy exists
        layer = getattr(*place)
        stays = keep or place not in copied or layer.weight is looked_up
        n_twice += layer.weight.nbytes if stays and place in copied else 0
        packed = pack_layer(layer, keep=stays, few=few)
        setattr(*place, packed)
        if not stays:
            files.release(layer.weight)
        by_shape.setdefault((packed.out_features, packed.in_features), packed)
    if by_shape and not few:
        smallest = min(map(math.prod, by_shape))
        limit = max(_TIMED_NUMBERS, smallest)
        time_padding([each for shape, each in by_shape.items() if math.prod(shape) <= limit])
    if n_twice:
        _log.info(
            "%d MB of the weights of %s are in memory twice, unpacked and packed for oneDNN;"
            " packed_weights=False stores them once, and is slower",
            n_twice >> 20,
            type(model).__name__,
        )
    return True


def _is_copied(layer: nn.Module, keep: bool) -> bool:
    """Return True if packing copies a layer's weight. keep: keep the original weights, too.

    Unpacked weights are used in place, except GPT-2's transposed ones if they need not stay.
    """
    weight: Any = layer.weight
    return not is_unpacked(weight.dtype) or (type(layer) is Conv1D and not keep)


def _linear_layers(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return the linear layers that may be packed, as (parent module, attribute name).

    A layer with two parents is left out: packing would separate them.
    """
    places = [
        (parent, name)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D)
    ]
    if is_known(model):
        return places
    if not type(model).__module__.startswith("transformers.models.") or quantised(model):
        return []
    counts = Counter(id(getattr(*place)) for place in places)
    bare = {
        id(layer): layer
        for layer in (getattr(*place) for place in places)
        if counts[id(layer)] == 1 and _is_bare(layer)
    }
    called = called_layers(model, list(bare.values())) if bare else set()
    return [place for place in places if id(getattr(*place)) in called]


def _is_bare(layer: nn.Module) -> bool:
    """Return True if a layer has only plain parameters, no hooks, and no replaced `forward`."""
    parameters = [each for each in layer._parameters.values() if each is not None]
    return (
        all(is_plain_weight(each, (*TOLERANCE,)) for each in parameters)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in layer.__dict__
    )


def _can_pack(layers: Sequence[nn.Module]) -> bool:
    """Return True if packed products are correct here for every weight shape of the layers."""
    weights = [layer.weight.t() if type(layer) is Conv1D else layer.weight for layer in layers]
    shapes = {(weight.shape, weight.dtype): weight for weight in weights}
    return bool(shapes) and all(map(can_pack, shapes.values()))


@torch.inference_mode(False)
def store_by_column(model: PreTrainedModel) -> None:
    """Store float32 weights on a CPU column by column if that is faster. Values and shapes stay.

    A step of few rows is bound by reading weights, and a product with a transposed weight reads
    them slowly: 1.5 times as long for one row, equal from 16 rows on. Layers with one input share
    one piece of memory. Weights that are also embeddings stay by row. All other tensors are copied
    as they are.
    """
    moved: set[int] = set()
    is_fused = is_known(model)
    modules = list(model.modules())
    visited = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    for module in modules:
        children = dict(module.named_children())
        siblings = [[children.get(name) for name in names] for names in SIBLINGS]
        for layers in [*siblings, *([child] for child in children.values())]:
            weights = [layer.weight for layer in layers if type(layer) is nn.Linear]
            if len(weights) == len(layers) and not any(id(weight) in visited for weight in weights):
                visited.update(map(id, weights))
                if _join_columns(weights):
                    moved.update(map(id, weights))
                    moved.update(map(id, _make_biases_adjacent(layers) if is_fused else ()))
    if moved:
        _copy_out_of_files(model, moved, MappedFiles())
        model.save_pretrained = UnmergedSave(model)


@torch.inference_mode(False)
def merge_sibling_weights(model: PreTrainedModel) -> None:
    """Store the weights of layers with one input in one piece of memory, and their biases in
    another.

    They are one product then. Values, shapes and strides stay.
    """
    together = _siblings_by_name(model) if is_known(model) else _siblings_by_input(model)
    for layers in together:
        _make_adjacent([layer.weight for layer in layers])
        _make_biases_adjacent(layers)
    if together:
        model.save_pretrained = UnmergedSave(model)
        if model.device.type == "cuda":  # free the memory of the separate weights for KV
            with capturing:
                torch.cuda.empty_cache()


def _siblings_by_name(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """Return groups of layers that share an input (Q, K, V; gate, up), by their names.

    For models that the fused decoder runs; the members are in the order that it expects.
    """
    groups: list[list[nn.Linear]] = []
    for module in model.modules():
        children: dict[str, Any] = dict(module.named_children())
        for names in SIBLINGS:
            layers = [children.get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                groups.append(layers)
    return groups


def _siblings_by_input(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """Return groups of layers that share an input, for models that the fused decoder does not run.

    They are identified by a traced forward. The weights of a group have one dtype.

    Small layers are left out if their outputs would not start at 16 bytes.
    """
    if not type(model).__module__.startswith("transformers.models.") or quantised(model):
        return []
    uses = Counter(id(w) for module in model.modules() for w in module._parameters.values())
    layers = [
        each for each in model.modules() if type(each) is nn.Linear and _can_be_moved(each, uses)
    ]
    groups: list[list[nn.Linear]] = []
    for alike in shared_input_groups(model, layers) if layers else ():
        by_kind: dict[Any, list[nn.Linear]] = defaultdict(list)
        for layer in alike:
            weight = layer.weight
            if len(weight) * weight.element_size() % _ALIGN_BYTES == 0:
                by_kind[weight.dtype, weight.device, layer.bias is None].append(layer)
        groups += [kind for kind in by_kind.values() if len(kind) > 1]
    return groups


def _can_be_moved(layer: nn.Linear, uses: Counter[int]) -> bool:
    """Return True if a layer is an unshared, contiguous weight and bias, without hooks."""
    weights = [each for each in layer._parameters.values() if each is not None]
    return (
        all(type(w) is nn.Parameter and w.is_contiguous() and uses[id(w)] == 1 for w in weights)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in layer.__dict__
    )


def _make_biases_adjacent(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Make the biases of layers adjacent in memory, and return them.

    If a layer has none, nothing changes and the list is empty.
    """
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if len(biases) < len(layers):
        return []
    _make_adjacent(biases)
    return biases


def _make_adjacent(tensors: Sequence[Tensor]) -> None:
    """Make tensors adjacent parts of one piece of memory."""
    merged = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, merged.split([len(t) for t in tensors]), strict=True):
        tensor.data = part


def _copy_out_of_files(model: PreTrainedModel, copied: set[int], files: MappedFiles) -> None:
    """Copy the tensors that are still in mapped files, because one keeps all its pages in memory.

    copied: ids of tensors that were copied before.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in copied:
            mapped = tensor.data
            tensor.data = mapped.clone()
            files.release(mapped)


class UnmergedSave:
    """`save_pretrained` of a model with column-major or merged weights, which Transformers cannot
    save.

    It passes copies, so the weights are in memory twice while it saves.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __call__(self, save_directory: str | Path, *args: Any, **options: Any) -> Any:
        """Save as `PreTrainedModel.save_pretrained` does."""
        model = self._model()
        assert model is not None
        if not args and "state_dict" not in options:
            options["state_dict"] = {n: _copied_by_row(w) for n, w in model.state_dict().items()}
        return type(model).save_pretrained(model, save_directory, *args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnmergedSave, (self._model(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnmergedSave:
        return UnmergedSave(memo.get(id(self._model()), self._model()))


def _copied_by_row(weight: Tensor) -> Tensor:
    """Return the weight, stored by row, in memory that it shares with no other weight."""
    if weight.untyped_storage().nbytes() == weight.nbytes:
        return weight.contiguous()
    return weight.clone(memory_format=torch.contiguous_format)


def _join_columns(weights: Sequence[Tensor]) -> bool:
    """Make weights [out, in] of one input adjacent parts of one column-major piece.

    False if they stay as they are.
    """
    if not all(map(is_plain_weight, weights)) or len({weight.shape[1] for weight in weights}) > 1:
        return False
    merged = torch.cat([weight.data.t() for weight in weights], 1).t()
    for weight, part in zip(weights, merged.split([len(w) for w in weights]), strict=True):
        weight.data = part
    return True
