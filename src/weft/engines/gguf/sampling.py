"""Sampling parameters stored in GGUF files."""

from __future__ import annotations

from ..._core.sampling.params import SamplingParams
from .header import GGUF

# The file's name after "general.sampling." → the name in generation_config.json.
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def sampling_of(header: GGUF) -> SamplingParams | None:
    """Return the sampling parameters of a file; None if it has none."""
    values = {
        ours: header.values[f"general.sampling.{theirs}"]
        for theirs, ours in _NAMES.items()
        if f"general.sampling.{theirs}" in header.values
    }
    config = {"do_sample": True, **values}
    return SamplingParams.from_generation_config(config) if values else None
