"""What is refused by name: a field of a request, its value, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...errors import ConfigError, ConstraintError, GrammarError
from ..errors import Refused

Value = TypeVar("Value")


def invalid(
    param: str, message: str, *, code: str = "invalid_parameter", hint: str = ""
) -> Refused:
    """Return the refusal of a field's value."""
    return Refused(400, code, message, param=param, hint=hint)


def unsupported(param: str, why: str, hint: str = "") -> Refused:
    """Return the refusal of a field that would change the answer and is not honoured here."""
    return invalid(param, f"{param}: {why}", code="unsupported_parameter", hint=hint)


def named(
    param: str, make: Callable[[], Value], grammar_code: str = "invalid_json_schema"
) -> Value:
    """Call what checks one field's value; its complaint then names the field.

    grammar_code: the error code of a GrammarError.
    """
    try:
        return make()
    except (ConfigError, ConstraintError) as error:
        code = grammar_code if isinstance(error, GrammarError) else "invalid_parameter"
        raise invalid(param, str(error), code=code, hint=error.hint) from error


# Samplers of other servers that are not here. Clients send all they have, most of them switched
# off: a value that changes nothing is taken, and any other is refused. A set lists what is taken.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_keep": (0, 1),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "nsigma": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "rep_pen_slope": (0, 1),
    "skew": (0,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
# These shape one of the samplers above; while that one is off they say nothing, whatever they are.
_SHAPES_OF: Mapping[str, str] = {
    "dry_allowed_length": "dry_multiplier",
    "dry_base": "dry_multiplier",
    "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "dynatemp_exponent": "dynatemp_range",
    "dynatemp_high": "dynamic_temperature",
    "dynatemp_low": "dynamic_temperature",
    "mirostat_eta": "mirostat_mode",
    "mirostat_tau": "mirostat_mode",
    "smoothing_curve": "smoothing_factor",
    "xtc_threshold": "xtc_probability",
}
# Other servers' names of fields that are here. Clients send both, to be understood by all.
_ALSO: Mapping[str, str] = {
    "add_bos_token": "add_special_tokens",
    "ban_eos_token": "ignore_eos",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "rep_pen": "repetition_penalty",
    "rep_pen_range": "penalty_last_n",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "repetition_penalty",
    "repetition_penalty_range": "penalty_last_n",
    "sampler_seed": "seed",
    "stop_sequence": "stop",
    "stopping_strings": "stop",
    "typical": "typical_p",
}
# What is about the server's work and not about the text.
_NO_EFFECT = frozenset(
    {"api_type", "cache_prompt", "id_slot", "legacy_api", "slot_id", "speculative_ngram"}
)


def without_switched_off(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without what says nothing: null, and others' samplers that are off.

    Fields by other names get those here. Raises: Refused for a sampler that is on, and for two
    names of one field that differ.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _NO_EFFECT or name in _SHAPES_OF or _is_empty(name, value):
            continue
        right = _ALSO.get(name, name)
        if right != name and body.get(right, value) != value:
            raise invalid(name, f"{name} and {right} are one thing here, and they differ")
        if name not in _OFF:
            kept[right] = value
        elif not any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF[name]
        ):
            allowed = " or ".join(map(repr, _OFF[name]))
            raise unsupported(
                name, f"is {value!r:.40}; this sampler is not here, leave it out or at {allowed}"
            )
    return kept


def _is_empty(name: str, value: Any) -> bool:
    """Whether it is one of the lists of bans that clients send empty."""
    return name in ("banned_tokens", "banned_strings", "custom_token_bans") and not value
