"""Request fields of other servers: the values that change nothing, and Weft's names for them.

A known field at a neutral value is accepted by every route, also by routes that do not implement
it. A field that the route implements, or a field with another name for it, is honoured. Every other
field or value is rejected by its name. `FIELDS` is the table; docs/openai-fields.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .field_errors import invalid, unsupported


@dataclass(frozen=True, slots=True)
class KnownField:
    """How routes treat a request field that they do not implement.

    owner: the server whose documentation defines the field.
    neutral: values that change nothing; null, "", [] and {} are neutral as well.
    aliases: other names of the field; the first one that the route implements is used. Without
        `neutral`, the neutral values are those of the first alias.
    switch: a field that turns this one on. Every value of this one is accepted, because the route
        rejects the switch.
    is_operational: True if the field cannot change the answer, so that every value is accepted.
    """

    owner: str
    neutral: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    switch: str | None = None
    is_operational: bool = False


_OPENAI, _VLLM, _SGLANG = "OpenAI", "vLLM", "SGLang"
_LLAMA, _LMSTUDIO, _WEBUI = "llama-server", "LM Studio", "text-generation-webui"
_KOBOLD, _OLLAMA, _ANTHROPIC = "KoboldCpp", "Ollama", "Anthropic"

_NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    _OPENAI: {
        "audio": (),
        "background": (False,),
        "best_of": (1,),
        "context_management": (),
        "conversation": (),
        "dimensions": (),
        "echo": (False,),
        "encoding_format": ("float",),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": (),
        "include": (["reasoning.encrypted_content"],),
        "instructions": (),
        "logit_bias": (),
        "logprobs": (False,),
        "max_tool_calls": (),
        "modalities": (["text"],),
        "moderation": (),
        "n": (1,),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "presence_penalty": (0,),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (
            {"effort": "none"},
            {"effort": "minimal"},
            {"enabled": False},
            {"summary": "auto"},
        ),
        "reasoning_effort": ("none", "minimal"),
        "response_format": ({"type": "text"},),
        "seed": (-1,),
        "stop": (),
        "stream": (False,),
        "suffix": (),
        "temperature": (1,),
        "text": ({"verbosity": "medium"}, {"format": {"type": "text"}}),
        "tool_choice": ("none", "auto"),
        "tools": (),
        "top_logprobs": (0,),
        "top_p": (1,),
        "truncation": ("disabled",),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    _VLLM: {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "allowed_token_ids": (),
        "bad_words": (),
        "cache_salt": (),
        "chat_template": (),
        "chat_template_kwargs": (),
        "continue_final_message": (False,),
        "documents": (),
        "ec_transfer_params": (),
        "embed_dtype": ("float32",),
        "enable_response_messages": (False,),
        "enable_thinking": (False,),
        "endianness": ("native", "little"),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "ignore_eos": (False,),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logprob_token_ids": (),
        "media_io_kwargs": (),
        "min_p": (0,),
        "min_tokens": (0,),
        "mm_processor_kwargs": (),
        "normalize": (True,),
        "previous_input_messages": (),
        "priority": (0,),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "repetition_detection": (),
        "repetition_penalty": (1,),
        "return_assistant_tokens_mask": (False,),
        "return_mm_kwargs": (True,),
        "return_prompt_text": (False,),
        "return_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "routed_experts_prompt_start": (0,),
        "spaces_between_special_tokens": (True,),
        "stop_token_ids": (),
        "structural_tag": (),
        "structured_outputs": (),
        "thinking_token_budget": (-1,),
        "top_k": (0, -1),
        "truncate_prompt_tokens": (-1,),
        "use_activation": (True,),
        "use_beam_search": (False,),
        "vllm_xargs": (),
        "watermarking": (False,),
    },
    _SGLANG: {
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "custom_params": (),
        "ebnf": (),
        "extra_body": (),
        "extra_json": (),
        "extra_key": (),
        "images_config": (),
        "input_ids": (),
        "lora_path": (),
        "regex": (),
        "return_cached_tokens_details": (False,),
        "return_hidden_states": (False,),
        "return_meta_info": (False,),
        "return_prompt_token_ids": (False,),
        "return_routed_experts": (False,),
        "routed_experts_start_len": (0,),
        "separate_reasoning": (True,),
        "session_params": (),
        "stop_regex": (),
        "stream_reasoning": (True,),
        "task": (),
        "use_audio_in_video": (False,),
    },
    _LLAMA: {
        "chat_format": ("Content-only",),
        "dry_multiplier": (0,),
        "dynatemp_range": (0,),
        "embd_normalize": (2,),
        "generation_prompt": (),
        "grammar": (),
        "grammar_lazy": (False,),
        "grammar_triggers": (),
        "image_data": (),
        "json_schema": (),
        "lora": (),
        "min_keep": (0, 1),
        "mirostat": (0,),
        "multimodal_data": (),
        "n_indent": (0,),
        "n_probs": (0,),
        "parse_tool_calls": (True,),
        "penalize_nl": (False,),
        "penalty_prompt": (),
        "post_sampling_probs": (False,),
        "preserved_tokens": (),
        "reasoning_budget": (-1,),
        "reasoning_budget_tokens": (-1,),
        "reasoning_format": ("auto", "deepseek"),
        "reasoning_in_content": (False,),
        "response_fields": (),
        "return_progress": (False,),
        "return_tokens": (False,),
        "samplers": (),
        "t_max_predict_ms": (0, -1),
        "t_max_prompt_ms": (0, -1),
        "tfs_z": (1,),
        "thinking_budget_tokens": (-1,),
        "thinking_forced_open": (False,),
        "timings_per_token": (False,),
        "top_n_sigma": (0, -1),
        "typical_p": (1,),
        "use_penalty_prompt_tokens": (False,),
        "verbose": (False,),
        "xtc_probability": (0,),
    },
    _LMSTUDIO: {"integrations": (), "context_overflow_policy": ("stopAtLimit",)},
    _WEBUI: {
        "adaptive_target": (-1, -0.01, 0),
        "auto_max_new_tokens": (False,),
        "bot_name": (),
        "character": (),
        "chat_instruct_command": (),
        "chat_template_str": (),
        "context": (),
        "custom_token_bans": (),
        "do_sample": (True,),
        "dynamic_temperature": (False,),
        "early_stopping": (False,),
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "grammar_string": (),
        "greeting": (),
        "guidance_scale": (1,),
        "instruction_template": (),
        "instruction_template_str": (),
        "max_tokens_second": (0,),
        "min_length": (0,),
        "mirostat_mode": (0,),
        "mode": ("instruct",),
        "name1": (),
        "name2": (),
        "no_repeat_ngram_size": (0,),
        "num_beams": (1,),
        "penalty_alpha": (0,),
        "preset": ("None",),
        "sampler_priority": (),
        "smoothing_factor": (0,),
        "tfs": (1,),
        "top_a": (0,),
        "truncation_length": (0,),
        "user_bio": (),
        "user_name": (),
    },
    _KOBOLD: {
        "banned_strings": (),
        "banned_tokens": (),
        "rep_pen_slope": (0, 1),
        "skew": (0,),
    },
    _OLLAMA: {
        "images": (),
        "penalize_newline": (True,),
        "shift": (True,),
        "template": (),
        "truncate": (True,),
    },
    _ANTHROPIC: {
        "container": (),
        "mcp_servers": (),
        "output_config": ({"effort": "high"},),
        "output_format": (),
        "speed": ("standard",),
        "system": (),
        "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
        "thread": (),
    },
}
_SHAPES: Mapping[str, tuple[str, str]] = {  # name: owner, switch
    "adaptive_decay": (_WEBUI, "adaptive_target"),
    "dry_allowed_length": (_LLAMA, "dry_multiplier"),
    "dry_base": (_LLAMA, "dry_multiplier"),
    "dry_penalty_last_n": (_LLAMA, "dry_multiplier"),
    "dry_sequence_breakers": (_LLAMA, "dry_multiplier"),
    "dynatemp_exponent": (_LLAMA, "dynatemp_range"),
    "dynatemp_high": (_WEBUI, "dynamic_temperature"),
    "dynatemp_low": (_WEBUI, "dynamic_temperature"),
    "mirostat_eta": (_LLAMA, "mirostat"),
    "mirostat_tau": (_LLAMA, "mirostat"),
    "negative_prompt": (_WEBUI, "guidance_scale"),
    "penalty_last_n": (_LLAMA, "repetition_penalty"),
    "smoothing_curve": (_WEBUI, "smoothing_factor"),
    "stream_options": (_OPENAI, "stream"),
    "truncation_side": (_VLLM, "truncate_prompt_tokens"),
    "xtc_threshold": (_LLAMA, "xtc_probability"),
}
_MAX_NEW = ("max_tokens", "max_output_tokens")
_ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    _OPENAI: {
        "max_completion_tokens": _MAX_NEW,
        "max_output_tokens": ("max_tokens",),
        "max_tokens": ("max_output_tokens",),
    },
    _SGLANG: {"no_stop_trim": ("include_stop_str_in_output",)},
    _LLAMA: {
        "n_cmpl": ("n",),
        "n_predict": _MAX_NEW,
        "repeat_last_n": ("penalty_last_n",),
        "repeat_penalty": ("repetition_penalty",),
    },
    _WEBUI: {
        "add_bos_token": ("add_special_tokens",),
        "ban_eos_token": ("ignore_eos",),
        "continue_": ("continue_final_message",),
        "max_new_tokens": _MAX_NEW,
        "repetition_penalty_range": ("penalty_last_n",),
        "stopping_strings": ("stop",),
        "typical": ("typical_p",),
    },
    _KOBOLD: {
        "nsigma": ("top_n_sigma",),
        "rep_pen": ("repetition_penalty",),
        "rep_pen_range": ("penalty_last_n",),
        "sampler_seed": ("seed",),
        "stop_sequence": ("stop",),
    },
    _OLLAMA: {"num_ctx": ("truncation_length",), "num_predict": _MAX_NEW},
    _ANTHROPIC: {"stop_sequences": ("stop",)},
}
# Neutral values of aliases that are not those of the field they stand for.
_NEUTRAL_OF_ALIASES: Mapping[str, tuple[Any, ...]] = {
    "add_bos_token": (True,),
    "max_output_tokens": (-1,),
    "max_tokens": (-1,),
}
# Scheduling, caching and labels: these fields cannot change the answer.
_OPERATIONAL: Mapping[str, tuple[str, ...]] = {
    _OPENAI: (
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    ),
    _VLLM: ("request_id", "session_id", "skip_special_tokens", "stream_interval"),
    _SGLANG: ("custom_labels", "ngram_corpus_id", "rid"),
    _LLAMA: (
        *("backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_keep"),
        *("slot_id", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        *("speculative.type", "speculative.types", "sse_ping_interval"),
    ),
    _LMSTUDIO: ("draft_model", "ttl"),
    _WEBUI: ("prompt_lookup_num_tokens", "speculative_ngram", "static_cache", "temperature_last"),
    _OLLAMA: (
        *("f16_kv", "keep_alive", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_keep"),
        *("num_thread", "numa", "use_mlock", "use_mmap"),
    ),
    _ANTHROPIC: (
        *("cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"),
    ),
    "SillyTavern": ("api_server", "api_type", "legacy_api"),
}

FIELDS: Mapping[str, KnownField] = {
    **{
        name: KnownField(owner, neutral)
        for owner, rows in _NEUTRAL.items()
        for name, neutral in rows.items()
    },
    **{name: KnownField(owner, switch=switch) for name, (owner, switch) in _SHAPES.items()},
    **{
        name: KnownField(owner, _NEUTRAL_OF_ALIASES.get(name, ()), aliases)
        for owner, rows in _ALIASES.items()
        for name, aliases in rows.items()
    },
    **{
        name: KnownField(owner, is_operational=True)
        for owner, names in _OPERATIONAL.items()
        for name in names
    },
}
# Why Weft does not implement a field, and what to do instead.
_REASONS: Mapping[str, str] = {
    "background": "background responses are not supported; wait or stream",
    "context_management": "the input is never edited",
    "conversation": "conversations are not supported; use previous_response_id, or send all items",
    "max_tool_calls": "only clients call tools, so they can count the calls",
    "prompt": "stored prompts are not supported; send instructions and input",
}
# Fields whose empty value is a request of its own, where a route has them.
_MEANINGFUL_EMPTY = frozenset({"dry_sequence_breakers", "input", "loom", "messages", "prompt"})
_SCHEMAS = frozenset({"guided_json", "json_schema"})  # {} is any JSON


# The order of llama-server's `samplers` that Weft implements, and its abbreviations.
_ORDER = ("dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
# Samplers that a list may leave out if the request does not use them, by the field that does.
_OPTIONAL = {"dry": "dry_multiplier", "top_n_sigma": "top_n_sigma", "xtc": "xtc_probability"}
# The parameters behind text-generation-webui's `sampler_priority`, in Weft's order, and their
# values without effect.
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (0, -1),
    "top_k": (0, -1),
    "typical_p": (1,),
    "top_p": (1,),
    "min_p": (0,),
    "xtc_probability": (0,),
    "temperature": (1,),
}
_PRIORITY_NAMES = {"dry_multiplier": "dry", "xtc_probability": "xtc"}
_SAMPLER_ABBREVIATIONS = {
    "d": "dry",
    "s": "top_n_sigma",
    "x": "xtc",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
}


def apply_rule(body: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return a request in Weft's own fields, without nulls and known fields at neutral values.

    own: names of the fields that the route implements. Unknown names stay; the route's model
        rejects them.

    Raises: RequestError for a known field with a value that is not neutral, and if two names of
    one parameter have different values.
    """
    kept: dict[str, Any] = {}
    names: dict[str, str] = {}  # as the request spells them
    fields = _translated(body, own)
    for name, value in fields.items():
        field = None if name in own else FIELDS.get(name)
        is_known = name in own or field is not None
        if value is None or (is_known and _is_empty(name, value, is_own=field is None)):
            continue
        own_name = name if field is None else next((n for n in field.aliases if n in own), None)
        if own_name is not None:
            if field is not None and fields.get(own_name) is not None and _is_neutral(value, field):
                continue
            if kept.setdefault(own_name, value) != value:
                raise _conflict_error({name, names[own_name]} - {own_name}, own_name)
            names[own_name] = name
        elif field is not None and not _is_neutral(value, field):
            raise _unsupported_error(name, value, field)
    return kept


def _translated(body: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Replace fields of other servers by the fields with which Weft implements them.

    own: names of the fields that the route implements.
    """
    fields = dict(body)
    if "logit_bias" not in own:
        return fields
    if isinstance(fields.get("logit_bias"), list):
        fields["logit_bias"] = _bias_of_pairs(fields["logit_bias"])
    if bans := fields.pop("custom_token_bans", None):
        fields["logit_bias"] = {**(fields.get("logit_bias") or {}), **_bias_of_bans(bans)}
    if fields.get("do_sample") is False:
        fields.update(do_sample=None, temperature=0)
    if fields.get("auto_max_new_tokens") is True and "stop_sequences" not in own:
        fields.pop("max_new_tokens", None)
        fields.update(auto_max_new_tokens=None, max_tokens=-1)
    if fields.get("logprobs") is False and "top_logprobs" not in own:
        fields["logprobs"] = None  # the number of a completion
    _translate_reasoning(fields, own)
    n_probs = fields.get("n_probs")
    if type(n_probs) is int and n_probs > 0:
        _translate_n_probs(fields, own, n_probs)
    if _is_own_order(fields.get("samplers"), fields):
        fields["samplers"] = None
    if _is_own_priority(fields.get("sampler_priority"), fields):
        fields["sampler_priority"] = None
    return fields


def _translate_n_probs(fields: dict[str, Any], own: Collection[str], n_probs: int) -> None:
    """Replace llama-server's `n_probs` by the route's fields for logprobs, if it has them."""
    if "include" in own:
        included = [*(fields.get("include") or []), "message.output_text.logprobs"]
        fields.update(include=included, top_logprobs=n_probs, n_probs=None)
    elif "top_logprobs" in own:
        fields.update(logprobs=True, top_logprobs=n_probs, n_probs=None)
    elif "logprobs" in own:
        fields.update(logprobs=n_probs, n_probs=None)


# Fields of chats, and the parts of the field `reasoning` that are the same.
_REASONING = {"reasoning_effort": "effort", "enable_thinking": "enabled"}


def _translate_reasoning(fields: dict[str, Any], own: Collection[str]) -> None:
    """Replace `reasoning` by the fields of chats, or these by `reasoning`, as the route has them.

    Raises: RequestError if both are given and differ.
    """
    given = fields.get("reasoning")
    parts = dict(given) if isinstance(given, Mapping) else {}
    if "reasoning" in own:
        for name, part in _REASONING.items():
            value = fields.pop(name, None)
            if value not in (None, "", [], {}) and parts.setdefault(part, value) != value:
                raise _conflict_error({name}, f"reasoning.{part}")
        fields["reasoning"] = parts or given
    elif "reasoning_effort" in own and isinstance(given, Mapping):
        for name, part in _REASONING.items():
            value = parts.pop(part, None)
            if value is not None and fields.get(name) in (None, ""):
                fields[name] = value
            elif value is not None and fields[name] != value:
                raise _conflict_error({name}, f"reasoning.{part}")
        if parts.get("summary") == "auto":
            del parts["summary"]
        fields["reasoning"] = {name: value for name, value in parts.items() if value is not None}


def _bias_of_pairs(pairs: list[Any]) -> dict[str, Any]:
    """Return the `logit_bias` {id: bias} for llama-server's list of [token id, bias].

    The bias false bans the token.
    """
    try:
        biases = {str(token): -100 if bias is False else bias for token, bias in pairs}
    except (TypeError, ValueError):
        raise invalid(
            "logit_bias", "logit_bias: allowed is {token id: bias}, or a list of [token id, bias]"
        ) from None
    return biases


def _bias_of_bans(bans: Any) -> dict[str, Any]:
    """Return the `logit_bias` {id: -100} for text-generation-webui's `custom_token_bans`.

    bans: a text like "5,27", or a list of ids.
    """
    names = bans.split(",") if isinstance(bans, str) else bans
    if not isinstance(names, list):
        raise invalid("custom_token_bans", "custom_token_bans: allowed is a text like '5,27'")
    return {str(name).strip(): -100 for name in names}


def _is_own_order(samplers: Any, fields: Mapping[str, Any]) -> bool:
    """Return True if a list of samplers has all that the request uses, in Weft's order."""
    if isinstance(samplers, str):
        samplers = [_SAMPLER_ABBREVIATIONS.get(char) for char in samplers]
    if not isinstance(samplers, list):
        return False
    listed = [name for name in samplers if name in _ORDER]
    unused = {name for name, field in _OPTIONAL.items() if fields.get(field) in (None, 0, -1)}
    return listed == [name for name in _ORDER if name in listed or name not in unused]


def _is_own_priority(priority: Any, fields: Mapping[str, Any]) -> bool:
    """Return True if the samplers that the request uses are in Weft's order.

    priority: text-generation-webui's list. It applies samplers outside the list after the others.
    """
    if isinstance(priority, str):
        priority = priority.split()
    if not isinstance(priority, list):
        return False
    used = [
        _PRIORITY_NAMES.get(field, field)
        for field, unused in _UNUSED.items()
        if fields.get(field) not in (None, *unused)
    ]
    if fields.get("temperature_last") is True:
        priority = [name for name in priority if name != "temperature"]
    places = [priority.index(name) if name in priority else len(priority) for name in used]
    return places == sorted(places)


def _is_empty(name: str, value: Any, *, is_own: bool) -> bool:
    """Return True for "", [] and {}, except where they have a meaning of their own.

    is_own: the route has the field.
    """
    if (is_own and name in _MEANINGFUL_EMPTY) or (value == {} and name in _SCHEMAS):
        return False
    return isinstance(value, str | list | dict) and not value


def _is_neutral(value: Any, field: KnownField) -> bool:
    """Return True for a value that changes nothing."""
    if field.is_operational or field.switch is not None:
        return True
    if field.aliases and not field.neutral:
        return _is_neutral(value, FIELDS[field.aliases[0]])
    kind = isinstance(value, bool)
    return any(value == other and kind is isinstance(other, bool) for other in field.neutral)


def _conflict_error(foreign: set[str], own_name: str) -> RequestError:
    """Return the error for names of one parameter with different values."""
    name = min(foreign)
    return invalid(name, f"{name} and {own_name} are the same parameter, but their values differ")


def _unsupported_error(name: str, value: Any, field: KnownField) -> RequestError:
    """Return the error for a field at a value that would change the answer."""
    if (reason := _REASONS.get(name)) is not None:
        return unsupported(name, reason)
    neutral = " or ".join(json.dumps(other, ensure_ascii=False) for other in field.neutral)
    given = json.dumps(value, ensure_ascii=False)
    return unsupported(
        name,
        f"is {given:.40}; Weft does not implement this parameter here. Leave it out"
        + (f", or send {neutral}" if neutral else ""),
    )
