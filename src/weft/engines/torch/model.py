"""Load a Transformers model from a folder, and separate its output head from its base."""

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
from .classifier import is_classifier, score_every_token
from .compatibility import PrefixCachingUnsupported, auto_class_of, check_architecture
from .weight_layout import optimize_layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..hub import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_LIMIT = 1 << 20
# Names of the cache argument: most models; Mamba; all models since Transformers 5.24.
_CACHES = ("past_key_values", "cache_params", "cache")


def resolve_device(device: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:1". Raises: ConfigError if it is
    missing.
    """
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
            f"device is {device!r}, and PyTorch sees no CUDA device; allowed is 'cpu'",
            hint="docs/troubleshooting.md#cuda-install lists the causes",
        )
    return place


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a dtype that models cannot be loaded in."""
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
    """Load a folder's causal LM to `device`; return it and the fingerprint of its weights."""
    check_dtype(dtype)
    config = config_of(folder, trust_remote_code=trust_remote_code)
    stored = checkpoint.open_checkpoint(folder)
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    # Transformers would first create all layers.
    if isinstance(n_layers, int) and n_layers > len(stored.tensors):
        raise ModelLoadError(
            f"{folder / 'config.json'} says {n_layers} layers; the weights are "
            f"{len(stored.tensors)} tensors, less than one a layer"
        )
    if progress is not None:
        progress("load", 0, 1, str(folder))
    given: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    is_quantised = quantization_config is not None or hasattr(config, "quantization_config")
    if is_quantised:  # some quantised models cannot be moved later
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
    """Return a folder's configuration. Reads config.json only.

    Raises: ModelLoadError, Unsupported.
    """
    checkpoint.reject_mlx_quantised(checkpoint.read_config(folder), "torch")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        check_architecture(config)
    except EngineError:
        raise
    except Exception as error:  # wrong values raise errors of many classes there
        raise ModelLoadError(
            f"Transformers does not know the model in {folder}: {error}"
        ) from error
    return config


def context_length_of(model: PreTrainedModel, n_ctx: int | None) -> int:
    """Return the maximum length of a path: `n_ctx` if given, else the model's maximum."""
    text: Any = model.config.get_text_config()
    lengths = [int(getattr(text, name, None) or 0) for name in checkpoint.CONTEXT_NAMES]
    limit = min([next((n for n in lengths if n > 0), _NO_LIMIT), *_position_limits(model)])
    return limit if n_ctx is None else check_int("n_ctx", n_ctx, 1, limit)


def _position_limits(model: PreTrainedModel) -> Iterator[int]:
    """Yield the number of usable positions of each position table with a padding index."""
    for path, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and "position" in path.rpartition(".")[2]
        if is_table and module.padding_idx is not None:
            yield module.num_embeddings - module.padding_idx - 1


def fingerprint_of(model: PreTrainedModel) -> str:
    """Return the name of a model's weights; it equals its folder's if the dtype does."""
    return checkpoint.fingerprint(model.config.to_dict(), _sampled_tensors(model))


def _sampled_tensors(
    model: PreTrainedModel,
) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    """Yield name, shape and sampled float32 values of every tensor, for the fingerprint."""
    for name, tensor in _checkpoint_tensors(model).items():
        yield name, tuple(tensor.shape), _sampled_values(tensor)


def _checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors, or parts of them, by their names in files.

    Loading renames some tensors and merges experts. Tied tensors appear once.
    """
    tensors = dict(_unique_tensors(model))
    try:
        saved: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    except Exception as error:  # quantised weights, or code from the model's folder
        _log.debug("fingerprint of %s uses its weights as loaded: %r", type(model).__name__, error)
        return tensors
    return saved


def _unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by name; tied tensors once."""
    yielded: set[tuple[int, tuple[int, ...]]] = set()
    for name, value in model.state_dict().items():
        parts = value if isinstance(value, tuple) else (value,)  # packed: weight and bias
        tensors = [part for part in parts if isinstance(part, Tensor)]
        for number, tensor in enumerate(tensors):
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key not in yielded:
                if key[0]:  # wrapper tensors have the address 0
                    yielded.add(key)
                yield (f"{name}.{number}" if number else name), tensor


def _sampled_values(tensor: Tensor) -> NDArray[np.float32]:
    """Return the float32 values of a tensor at `sample_positions`."""
    if tensor.is_quantized or hasattr(type(tensor), "__tensor_flatten__"):
        tensor = tensor.dequantize()
    positions = torch.from_numpy(checkpoint.sample_positions(tensor.numel())).to(tensor.device)
    sample: NDArray[np.float32] = tensor.detach().reshape(-1)[positions].float().cpu().numpy()
    return sample


def _from_pretrained(
    folder: Path, config: PretrainedConfig, dtype: str, **given: Any
) -> PreTrainedModel:
    """Call Transformers' `from_pretrained`; convert its errors to those of Weft."""
    try:
        with quiet_transformers():
            kind = auto_class_of(config) or AutoModelForCausalLM  # loads code from the folder
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
    if is_classifier(config):
        model = score_every_token(model)
    if model.dtype not in DTYPES.values():
        raise ConfigError(
            f"the checkpoint's dtype {model.dtype} is not one of {', '.join(DTYPES)}; give dtype="
        )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide Transformers' progress bars and all messages below errors inside the block."""
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
    """Return the name of the cache argument of a model, or of its base; "" if it has none."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in taken), "")


def disable_padding_check(model: PreTrainedModel) -> None:
    """Stop Transformers from searching ids for padding, which would wait for the device."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _no_warning


def _no_warning(*args: Any, **kwargs: Any) -> None:
    """Replaces Transformers' padding check: Weft pads no ids."""


class Head(nn.Module):
    """A causal LM that runs its base model and its output head separately.

    The head includes final scaling and soft-caps. It is a shallow copy of the model, in which a
    module that returns given hidden states replaces the base model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        prefix = model.base_model_prefix
        if model.base_model is model or prefix not in model._modules:
            raise PrefixCachingUnsupported("its base model is not separate from its head")
        self.base = model.base_model
        self._fixed = _FixedHidden(self.base)
        self._shell = copy.copy(model)
        self._shell.__dict__["_modules"] = {**model._modules, prefix: self._fixed}

    def hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the base model over packed tokens, both [1, T]; return hidden states [T, E]."""
        return self.run(token_ids, position_ids=positions, use_cache=False)[0][0]

    def run(self, token_ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """Run the base model over token ids [B, T]; return states [B, T, E] and its output object.

        given: further arguments of the base model, such as `position_ids`.
        """
        output = self.base(input_ids=token_ids, return_dict=True, **given)
        self._fixed.kind = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden, output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of hidden states [n, E], by the model's own code."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        self._fixed.hidden = hidden[None]
        try:
            logits: Tensor = self._shell(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            self._fixed.hidden = None
        return logits


class IdentityHead:
    """Replaces `Head` for a model that cannot be separated: its states are its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = model

    def run(self, token_ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """Run the model over token ids [B, T]; return logits [B, T, V] and its output object.

        given: further arguments of the model.
        """
        output = self.base(input_ids=token_ids, return_dict=True, **given)
        return output.logits, output

    def logits(self, states: Tensor) -> Tensor:
        """Return the states unchanged: they are logits."""
        return states


class _FixedHidden(nn.Module):
    """Replaces the base model, and returns given hidden states.

    It also replaces parts of the base model that models call directly: OPT calls its decoder.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kind: type[Any] | None = None
        self.__dict__["_base"] = base  # not a submodule

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_base"], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given hidden states in the form that the base model returns."""
        assert self.kind is not None
        return self.kind(last_hidden_state=self.hidden)


def freeze_rope(model: PreTrainedModel, n_ctx: int) -> str:
    """Fix rotary frequencies that depend on the longest sequence, for `n_ctx` tokens.

    Such modules use the largest position of a forward, so a longer sequence would change other
    rows. Returns a description, or "" if no module does that.
    """
    description = ""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                description = _freeze_rope_of(module, kind, layer_type, n_ctx) or description
            if description:
                module.rope_type = {name: _frozen_rope_type(kind) for name, kind in kinds.items()}
        elif isinstance(kinds, str):
            description = _freeze_rope_of(module, kinds, None, n_ctx) or description
            module.rope_type = _frozen_rope_type(kinds)
    return description


def _frozen_rope_type(kind: str) -> str:
    """Return a rope type that Transformers' dynamic update ignores."""
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def _freeze_rope_of(module: nn.Module, kind: str, layer_type: str | None, n_ctx: int) -> str:
    """Fix the frequencies of one rotary module for `n_ctx` tokens; return a description, or ""."""
    if _frozen_rope_type(kind) == kind:
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
