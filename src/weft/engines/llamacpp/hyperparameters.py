"""Compare hyperparameters in a GGUF header with the values that llama.cpp uses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import Unsupported
from ..gguf import GGUF

_log = logging.getLogger("weft.engines.llamacpp")


class _Compared(NamedTuple):
    """A hyperparameter to compare between a GGUF header and llama.cpp's log.

    key: in the GGUF header. name: in llama.cpp's log. tolerance: allowed relative difference,
    because llama.cpp prints rounded values.
    """

    key: str
    name: str
    tolerance: float = 0.0


_COMPARED = (
    _Compared("attention.head_count", "n_head"),
    _Compared("attention.head_count_kv", "n_head_kv"),
    _Compared("attention.layer_norm_rms_epsilon", "f_norm_rms_eps", 0.06),  # two digits
    _Compared("attention.layer_norm_epsilon", "f_norm_eps", 0.06),
    _Compared("rope.dimension_count", "n_rot"),
    _Compared("rope.freq_base", "freq_base_train", 1e-4),
    _Compared("expert_used_count", "n_expert_used"),
)


def check_hyperparameters(header: GGUF, report: Mapping[str, str]) -> None:
    """Check that llama.cpp uses the hyperparameters in a file's header.

    Args:
        report: `Handle.report` of the model: printed values by llama.cpp's names. Names that are
            absent are not compared.

    Raises:
        Unsupported: a value differs, so every output would be wrong. A different sliding window
            only logs a warning.
    """
    wrong = []
    for key, name, tolerance in _COMPARED:
        value, taken = header.of_model(key), _number(report.get(name))
        if isinstance(value, int | float) and taken is not None:
            if not math.isclose(value, taken, rel_tol=tolerance):
                wrong.append(f"{key} = {value} (llama.cpp has {taken})")
    if wrong:
        raise Unsupported(
            f"llama.cpp does not take {', '.join(wrong)} from {header.file}, so its answers would"
            " be wrong; update llama-cpp-python, or use another engine"
        )
    window, taken = header.of_model("attention.sliding_window"), _number(report.get("n_swa"))
    if window and taken is not None and taken != window:
        _log.warning(
            "llama.cpp takes a sliding window of %d for the %s of %s", taken, window, header.file
        )


def _number(text: str | None) -> float | None:
    """Parse a printed number; None for None, lists and words."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
