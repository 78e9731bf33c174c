"""A Transformers model: how it is loaded from a folder, and its head parted from its base."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ..._core.validation import check_choice, check_int
from ...errors import ConfigError, EngineError, ModelLoadError, Unsupported
from .. import checkpoint
from ..config_check import check_config
from .compatibility import PrefixCachingUnsupported, auto_class_of, check_architecture
from .weight_layout import optimize_layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..hub import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_LIMIT = 1 << 20
# What models call the cache that they take and give; Mamba's kinds; all since Transformers 5.24.
_CACHES = ("past_key_values", "cache_params", "cache")


def resolve_device(device: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:1" into a device that is there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0] if isinstance(device, str) else device
    check_choice("device", kind if kind == "cuda" else device, ("auto", "cpu", "cuda", "cuda:N"))
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; allowed are GPUs by number, 'cuda:0'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {device!r}, and PyTorch sees no CUDA device; allowed is 'cpu'"
        )
    return place


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a dtype that no model is loaded in."""
    check_choice("dtype", dtype, ("auto", *DTYPES))


def load_model(
    folder: Path,
    device: torch.device,
    dtype: str,
    *,
    trust_remote_code: bool,
    quantization_config: Any,
    packed_weights: bool | None,
    progress: Progress | None,
) -> tuple[PreTrainedModel, str]:
    """Load the folder's causal LM to `device`; return it and the fingerprint of its weights."""
    check_dtype(dtype)
    config = config_of(folder, trust_remote_code=trust_remote_code)
    stored = checkpoint.open_checkpoint(folder)
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(n_layers, int) and n_layers > len(stored.tensors):  # it would make them all first
        raise ModelLoadError(
            f"{folder / 'config.json'} says {n_layers} layers; the weights are "
            f"{len(stored.tensors)} tensors, less than one a layer"
        )
    if progress is not None:
        progress("load", 0, 1, str(folder))
    given: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    is_quantised = quantization_config is not None or hasattr(config, "quantization_config")
    if is_quantised:  # some kinds are made where they stay, and moved by nobody
        given["device_map"] = {"": device}
        if quantization_config is not None:
            given["quantization_config"] = quantization_config
    model = _from_pretrained(folder, config, dtype, **given)
    check_config(stored.config, model.config.to_dict(), library="Transformers")
    if not is_quantised:
        model = model.to(device)
    optimize_layout(model, packed_weights)
    if progress is not None:
        progress("load", 1, 1, str(folder))
    try:
        if quantization_config is None:
            return model, stored.fingerprint()
    except Unsupported:  # tensors in a quantised format
        pass
    return model, fingerprint_of(model)


def config_of(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return a folder's configuration, if this engine can run such a model; reads config.json."""
    checkpoint.reject_mlx_quantised(checkpoint.read_config(folder), "torch")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        check_architecture(config)
    except EngineError:
        raise
    except Exception as error:  # values of a wrong kind raise all kinds of errors there
        raise ModelLoadError(
            f"Transformers does not know the model in {folder}: {error}"
        ) from error
    return config


def context_length_of(model: PreTrainedModel, n_ctx: int | None) -> int:
    """The longest path: `n_ctx` if given, else what the model was made for."""
    text: Any = model.config.get_text_config()
    given = [int(getattr(text, name, None) or 0) for name in checkpoint.CONTEXT_NAMES]
    known = min([next((n for n in given if n > 0), _NO_LIMIT), *_position_limits(model)])
    return known if n_ctx is None else check_int("n_ctx", n_ctx, 1, known)


def _position_limits(model: PreTrainedModel) -> Iterator[int]:
    """How many positions a table has for tokens, where places of padding come before those."""
    for path, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and "position" in path.rpartition(".")[2]
        if is_table and module.padding_idx is not None:
            yield module.num_embeddings - module.padding_idx - 1


def fingerprint_of(model: PreTrainedModel) -> str:
    """Name the weights of a loaded model; equal to its folder's fingerprint if the dtype is."""
    return checkpoint.fingerprint(model.config.to_dict(), _samples(model))


def _samples(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    for name, tensor in _as_saved(model).items():
        yield name, tuple(tensor.shape), _sample(tensor)


def _as_saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return weights by their names in files: some are renamed, and experts joined, as they load.

    The tensors are those of the model, or parts of them; tied ones are there once.
    """
    held = dict(_unique_tensors(model))
    try:
        saved: dict[str, Tensor] = revert_weight_conversion(model, held)
    except Exception as error:  # weights in a quantised format, or code of a folder's own
        _log.debug("%s is named by its weights as they are: %r", type(model).__name__, error)
        return held
    return saved


def _unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, held in model.state_dict().items():
        parts = held if isinstance(held, tuple) else (held,)  # packed: weight and bias
        tensors = [part for part in parts if isinstance(part, Tensor)]  # beside a dtype, say
        for number, tensor in enumerate(tensors):
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key not in seen:
                if key[0]:  # what stands for numbers that are elsewhere has no place
                    seen.add(key)
                yield (f"{name}.{number}" if number else name), tensor


def _sample(tensor: Tensor) -> NDArray[np.float32]:
    if tensor.is_quantized or hasattr(type(tensor), "__tensor_flatten__"):
        tensor = tensor.dequantize()
    positions = torch.from_numpy(checkpoint.sample_positions(tensor.numel())).to(tensor.device)
    sample: NDArray[np.float32] = tensor.detach().reshape(-1)[positions].float().cpu().numpy()
    return sample


def _from_pretrained(
    folder: Path, config: PretrainedConfig, dtype: str, **given: Any
) -> PreTrainedModel:
    try:
        with quiet_transformers():
            kind = auto_class_of(config) or AutoModelForCausalLM  # it loads code of a folder's own
            model, report = kind.from_pretrained(
                folder,
                config=config,
                dtype=DTYPES.get(dtype, "auto"),
                local_files_only=True,
                output_loading_info=True,
                **given,
            )
    except EngineError:
        raise
    except Exception as error:
        raise ModelLoadError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} tensors of a {type(model).__name__}, "
            f"{missing[0]!r} among them; download the folder again"
        )
    if model.dtype not in DTYPES.values():
        raise ConfigError(
            f"the checkpoint's dtype {model.dtype} is not one of {', '.join(DTYPES)}; give dtype="
        )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers' progress bars and loading report off the terminal."""
    bars, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


_log = logging.getLogger("weft.engines.torch")


def cache_name(module: nn.Module) -> str:
    """Return what a model, or its base, calls its cache; "" where it takes none."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in taken), "")


def disable_padding_check(model: PreTrainedModel) -> None:
    """Let our copy run without looking at its ids for a warning: a device is waited for then."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _say_nothing


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing of ours is padded."""


class Head(nn.Module):
    """The part of a causal LM after its base model: final scaling, soft-caps and all.

    A second shell of the model whose base model only hands back the hidden states it is given.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        prefix = model.base_model_prefix
        if model.base_model is model or prefix not in model._modules:
            raise PrefixCachingUnsupported("its base model does not stand apart from its head")
        self.base = model.base_model
        self._replay = _FixedHidden(self.base)
        self._shell = copy.copy(model)
        self._shell.__dict__["_modules"] = {**model._modules, prefix: self._replay}

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the base model over packed tokens, both [1, T]; return hidden states [T, E]."""
        return self.run(token_ids, position_ids=positions, use_cache=False)[0][0]

    def run(self, token_ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """Run the base model over token ids [B, T]; return states [B, T, E], and all it gave."""
        output = self.base(input_ids=token_ids, return_dict=True, **given)
        self._replay.kind = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden, output

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, E], by the model's own code."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        self._replay.hidden = hidden[None]
        try:
            logits: Tensor = self._shell(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            self._replay.hidden = None
        return logits


class IdentityHead:
    """Stands in for `Head` where a model cannot be parted so: its logits are its states."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = model

    def run(self, token_ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """Run the model over token ids [B, T]; return logits [B, T, V], and all it gave."""
        output = self.base(input_ids=token_ids, return_dict=True, **given)
        return output.logits, output

    def logits(self, states: Tensor) -> Tensor:
        """Return what is logits already."""
        return states


class _FixedHidden(nn.Module):
    """Stands where the base model was and answers with given hidden states.

    So it does where a part of the base model is called in its place: OPT calls its decoder.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kind: type[Any] | None = None
        self.__dict__["_base"] = base  # it is no part of this one

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_base"], name)
        return self if isinstance(value, nn.Module) else value

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
