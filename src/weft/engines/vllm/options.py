"""The arguments of vLLM's engine: Weft's defaults, validation, and load errors."""

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

LOGITS_PROCESSOR = "weft.engines.vllm.logits_capture:LogitsCapture"
_CPU_KV_BYTES = 4 << 30
_CPU_BLOCK = 32  # block size of the prefix cache; vLLM's default of 128 only suits long texts
# Arguments that Weft sets, with the alternative.
_OURS = {
    "model": "the folder or name is the first argument: weft.load(…)",
    "tokenizer": "weft.load(…, tokenizer=…)",
    "skip_tokenizer_init": "Weft has a tokenizer of its own",
    "logprobs_mode": "Weft reads raw log-probabilities",
    "enable_prompt_embeds": "Weft passes token ids",
}


def engine_args(
    folder: Path,
    given: Mapping[str, Any],
    *,
    device: str,
    dtype: str,
    n_ctx: int | None,
    trust_remote_code: bool,
    buffer: SharedLogitsBuffer | None,
) -> AsyncEngineArgs:
    """Return vLLM's arguments: the caller's, and Weft's choices for the rest.

    Raises:
        ConfigError: vLLM does not have an argument, or Weft sets it.
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
    if buffer is not None:
        args["logits_processors"] = [*(given.get("logits_processors") or ()), LOGITS_PROCESSOR]
        args["additional_config"] = {
            **(given.get("additional_config") or {}),
            KEY: buffer.connection_info(),
        }
    if n_ctx is not None:
        if "max_model_len" in given:
            raise ConfigError("n_ctx and engine_options max_model_len are two limits; give one")
        longest = read_config(folder).get("max_position_embeddings")
        # A request needs a position for the token that vLLM samples after the path.
        args["max_model_len"] = n_ctx + 1 if not longest or n_ctx < longest else n_ctx
    result: AsyncEngineArgs = AsyncEngineArgs(
        model=str(folder),
        dtype=resolved_dtype(folder, dtype),
        trust_remote_code=trust_remote_code,
        **args,
    )
    return result


def check_names(given: Mapping[str, Any]) -> None:
    """Reject arguments that vLLM does not have, and those that Weft sets."""
    names = [each.name for each in fields(AsyncEngineArgs)]
    for name in given:
        if name in _OURS:
            raise ConfigError(f"engine_options has {name}, which Weft sets: {_OURS[name]}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            suggestion = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(
                f"the vllm engine has no option {name!r}{suggestion}. Allowed are sessions, rows"
                " and all of vLLM's AsyncEngineArgs"
            )


def check_device(device: str) -> None:
    """Reject a device that this build of vLLM does not run on."""
    own = current_platform.device_type
    if device not in ("auto", own):
        raise ConfigError(
            f"device is {device!r}, but the installed vLLM runs on {own!r}; use"
            ' "auto", and select devices by variables such as CUDA_VISIBLE_DEVICES'
        )


def resolved_dtype(folder: Path, dtype: str) -> str:
    """Return the dtype to compute in; "auto" is the checkpoint's own, as in all engines."""
    if dtype != "auto":
        return dtype
    config = read_config(folder)
    own = config.get("dtype") or config.get("torch_dtype")
    return "float32" if own == "float32" else "auto"  # vLLM's default for float32 is float16


def as_load_error(error: Exception, folder: object) -> ModelLoadError | ConfigError | Unsupported:
    """Return a short error for a failed start of vLLM."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = _error_line(lines) or type(error).__name__
    if (
        "not supported" in reason
        or "not implemented" in reason
        or isinstance(error, NotImplementedError)
    ):
        return Unsupported(f"vLLM cannot run {folder} with these options: {reason}")
    if type(error).__name__ == "ValidationError" or isinstance(error, TypeError):
        return ConfigError(f"vLLM rejects its arguments: {reason}")
    return ModelLoadError(
        f"vLLM could not be started for {folder}: {reason}",
        hint="see vLLM's log; VLLM_LOGGING_LEVEL=INFO shows all of it",
    )


def _error_line(lines: list[str]) -> str:
    """Return the line of a multi-line message that describes the error."""
    for line in lines:
        if line.startswith("Value error, "):
            return line.removeprefix("Value error, ").partition(" [type=")[0]
    return " ".join(lines[:3])[:500]
