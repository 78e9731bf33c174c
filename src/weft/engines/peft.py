"""The configuration of LoRA adapters in PEFT's format, for all engines that run them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core.atomic_files import PARSE_ERRORS, read_json, repr_short
from ..errors import ModelLoadError, Unsupported

# Settings of training, and those that this module applies. Any other setting that is on would
# change what the adapter computes.
_KNOWN = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode"
    " r lora_alpha lora_dropout bias use_rslora rank_pattern alpha_pattern fan_in_fan_out"
    " target_modules exclude_modules layers_to_transform layers_pattern init_lora_weights"
    " loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core"
    " qalora_group_size".split()
)
# Initializations that leave the model's own weights unchanged; the others subtract from them.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json.

    Raises:
        ModelLoadError: the file is missing or broken.
        Unsupported: the adapter has a feature that Weft does not run.
    """
    file = folder / "adapter_config.json"
    config = read_json(file, ModelLoadError, "not readable JSON", nan=True)
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} is a JSON {type(config).__name__}; it must be an object")
    if config.get("peft_type") != "LORA":
        raise Unsupported(
            f"adapters of type {config.get('peft_type')} are not supported; allowed is LORA"
        )
    for name, value in config.items():
        if value and name not in _KNOWN:
            raise Unsupported(f"the adapter in {folder} has {name}; only plain LoRA is supported")
    init = config.get("init_lora_weights")
    if not isinstance(init, str | bool | None) or init not in _PLAIN_INITS:
        raise Unsupported(
            f"the adapter in {folder} has init_lora_weights={repr_short(init)}, so it needs a"
            " changed base model; save it from PEFT with path_initial_model_for_weight_conversion"
        )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise Unsupported(f"the adapter in {folder} has biases; only bias='none' is supported")
    return config


def scale_of(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return the factor of a layer's low-rank output.

    Args:
        config: of `read_config`.
        path: path of the layer's module, which patterns of the config may match.
        rank: rank of the layer's matrices.
    """
    alpha = config.get("lora_alpha", rank)
    try:
        for pattern, own in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                alpha = own
                break
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (re.error, *PARSE_ERRORS) as error:
        raise ModelLoadError(f"adapter_config.json: the scale of {path}: {error}") from error
