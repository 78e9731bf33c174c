"""The arguments of vLLM's engine: what Weft sets itself, and what it says of wrong ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from ...errors import ConfigError, ModelLoadError, Unsupported
from ..checkpoint import read_config
from .shared_logits import KEY, SharedLogitsBuffer

TAP = "weft.engines.vllm.logits_capture:LogitsCapture"
_CPU_KV_BYTES = 4 << 30
_CPU_BLOCK = 32  # slots that are found again together; vLLM's own 128 suits long texts alone
# What Weft itself decides, and how it is said instead.
_OURS = {
    "model": "the folder or name comes first: weft.load(…)",
    "tokenizer": "weft.load(…, tokenizer=…)",
    "skip_tokenizer_init": "Weft has a tokenizer of its own",
    "logprobs_mode": "Weft reads raw log-probabilities",
    "enable_prompt_embeds": "Weft gives token ids",
}


def engine_args(
    folder: Path,
    given: Mapping[str, Any],
    *,
    device: str,
    dtype: str,
    n_ctx: int | None,
    trust_remote_code: bool,
    board: SharedLogitsBuffer | None,
) -> AsyncEngineArgs:
    """Return what vLLM is started with: what was given, and Weft's choices for the rest.

    Raises: ConfigError for an argument that vLLM does not have, or that Weft decides.
    """
    check_names(given)
    check_device(device)
    args: dict[str, Any] = {
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "max_logprobs": -1,
        "structured_outputs_config": {"backend": "guidance"},
    }
    if current_platform.is_cpu():
        kv_bytes = min(_CPU_KV_BYTES, current_platform.get_device_total_memory() // 8)
        args |= {"enforce_eager": True, "block_size": _CPU_BLOCK}
        args["kv_cache_memory_bytes"] = kv_bytes
    args |= given
    if board is not None:
        args["logits_processors"] = [*(given.get("logits_processors") or ()), TAP]
        args["additional_config"] = {**(given.get("additional_config") or {}), KEY: board.told()}
    if n_ctx is not None:
        if "max_model_len" in given:
            raise ConfigError("n_ctx and engine_options max_model_len are two limits; give one")
        longest = read_config(folder).get("max_position_embeddings")
        # A request needs a place for the token that vLLM draws after the path.
        args["max_model_len"] = n_ctx + 1 if not longest or n_ctx < longest else n_ctx
    made: AsyncEngineArgs = AsyncEngineArgs(
        model=str(folder),
        dtype=resolved_dtype(folder, dtype),
        trust_remote_code=trust_remote_code,
        **args,
    )
    return made


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, and those that are Weft's."""
    known = [each.name for each in fields(AsyncEngineArgs)]
    for name in given:
        if name in _OURS:
            raise ConfigError(f"engine_options has {name}, which Weft sets: {_OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            meant = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(
                f"the vllm engine has no option {name!r}{meant}. It has Weft's own, sessions and"
                " rows, and all of vLLM's AsyncEngineArgs"
            )


def check_device(device: str) -> None:
    """Refuse a device that this build of vLLM does not run on."""
    here = current_platform.device_type
    if device not in ("auto", here):
        raise ConfigError(
            f"device is {device!r}, but the vLLM that is installed runs on {here!r}; leave it"
            ' "auto", and choose among several devices by CUDA_VISIBLE_DEVICES and the like'
        )


def resolved_dtype(folder: Path, dtype: str) -> str:
    """Return the dtype to compute in: "auto" is the checkpoint's own, as for all engines."""
    if dtype != "auto":
        return dtype
    config = read_config(folder)
    own = config.get("dtype") or config.get("torch_dtype")
    return "float32" if own == "float32" else "auto"  # vLLM would halve it


def as_load_error(error: Exception, folder: object) -> ModelLoadError | ConfigError | Unsupported:
    """Return in a few words why vLLM did not start."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = _said(lines) or type(error).__name__
    if (
        "not supported" in said
        or "not implemented" in said
        or isinstance(error, NotImplementedError)
    ):
        return Unsupported(f"vLLM cannot run {folder} so: {said}")
    if type(error).__name__ == "ValidationError" or isinstance(error, TypeError):
        return ConfigError(f"vLLM refuses its arguments: {said}")
    return ModelLoadError(
        f"vLLM could not be started for {folder}: {said}",
        hint="vLLM's log says more; VLLM_LOGGING_LEVEL=INFO shows all of it",
    )


def _said(lines: list[str]) -> str:
    """Return the line of a long message that says what was wrong."""
    for line in lines:
        if line.startswith("Value error, "):
            return line.removeprefix("Value error, ").partition(" [type=")[0]
    return " ".join(lines[:3])[:500]
