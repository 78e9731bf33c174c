"""Features of kinds of servers beyond OpenAI's protocol, and their names for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat"]
Order = Literal["first", "last", "either"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Extensions and deviations of one kind of server (vLLM, llama.cpp, Ollama, …) from OpenAI's
    protocol.

    Features not listed here are not requested; options that need them are rejected by name.
    """

    # Name of the dialect.
    name: str
    # Values of `owned_by` in the server's list of models.
    owners: tuple[str, ...] = ()
    # Fields sent with every request, to override the server's own sampling defaults.
    neutral: Mapping[str, Any] = field(default_factory=dict)
    # Weft's parameters that the server honours exactly → its names.
    params: Mapping[str, str] = field(default_factory=dict)
    # Position of the temperature: before the filters or after them.
    order: Order = "first"
    # The filters' names, for a server whose requests can order them.
    samplers: tuple[str, ...] = ()
    # Field that requests token ids; "" if there is none.
    ask_ids: str = ""
    # Field for end tokens; "" if there is none.
    stop_ids: str = ""
    # Fields that keep a stop string in the text.
    keep_stop: Mapping[str, Any] = field(default_factory=dict)
    # Equal seeds give equal texts.
    seeded: bool = False
    # Format of constraints; "" if the server has none.
    constraints: Literal["", "structured_outputs", "gbnf"] = ""
    # Its chat protocol can continue an unfinished answer.
    may_continue: bool = False
    # Number of likeliest tokens to request, so that the server returns logprobs at all.
    top: int = 1
    # Fields that request logprobs of the full vocabulary, by token id.
    row: Mapping[str, Any] = field(default_factory=dict)
    # Maximum number of concurrent requests, if the server cancels others; None: no limit.
    max_concurrent: int | None = None
    # With logprobs, streams omit characters that are several tokens.
    drops_split_chars: bool = False
    # Its completions do not continue raw text.
    chat_only: bool = False


_STANDARD = {
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}

PLAIN = Dialect("openai", params=_STANDARD)
VLLM = Dialect(
    "vllm",
    owners=("vllm",),
    # NOTE: for omitted fields the server uses the model's generation_config.json.
    neutral={"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    params={
        **_STANDARD,
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
    },
    ask_ids="return_token_ids",
    stop_ids="stop_token_ids",
    keep_stop={"include_stop_str_in_output": True},
    seeded=True,
    constraints="structured_outputs",
    may_continue=True,
    top=0,
    row={"logprobs": -1, "return_tokens_as_token_ids": True},
)
SGLANG = Dialect(
    "sglang",
    owners=("sglang",),
    neutral={"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    params={**_STANDARD, "top_k": "top_k", "min_p": "min_p"},
    ask_ids="return_token_ids",
    stop_ids="stop_token_ids",
    keep_stop={"no_stop_trim": True},
    may_continue=True,
)
# Its presence and frequency penalties count the prompt; Weft's do not.
LLAMA_SERVER = Dialect(
    "llama-server",
    owners=("llamacpp",),
    neutral={
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_last_n": -1,
        "top_n_sigma": -1.0, "xtc_probability": 0.0, "dry_multiplier": 0.0,
    },
    params={
        "top_k": "top_k",
        "typical_p": "typical_p",
        "top_p": "top_p",
        "min_p": "min_p",
        "top_n_sigma": "top_n_sigma",
        "xtc_probability": "xtc_probability",
        "repetition_penalty": "repeat_penalty",
        "dry_multiplier": "dry_multiplier",
        "penalty_last_n": "repeat_last_n",
        "logit_bias": "logit_bias",
    },
    order="either",
    samplers=("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    seeded=True,
    constraints="gbnf",
)  # fmt: skip
# Its penalties always cover 64 tokens. A new request cancels the one before.
LLAMA_CPP_PYTHON = Dialect(
    "llama-cpp-python",
    owners=("me",),
    neutral={"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0},
    params={"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "logit_bias": "logit_bias"},
    order="last",
    seeded=True,
    constraints="gbnf",
    max_concurrent=1,
    drops_split_chars=True,
)
# Ollama puts the prompt of a completion into the model's chat template. Requests cannot set top_k:
# Ollama uses 40 unless the Modelfile sets another value. Its penalties count the prompt.
OLLAMA = Dialect(
    "ollama",
    owners=("library",),
    params={"top_p": "top_p"},
    order="last",
    seeded=True,
    chat_only=True,
)
# Weft's own server. Without neutral fields its chats use `lm.chat_defaults`.
WEFT = Dialect(
    "weft",
    owners=("weft",),
    neutral={
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "penalty_last_n": -1,
        "top_n_sigma": -1.0, "xtc_probability": 0.0, "dry_multiplier": 0.0,
    },
    params={
        **_STANDARD,
        "top_k": "top_k",
        "min_p": "min_p",
        "typical_p": "typical_p",
        "top_n_sigma": "top_n_sigma",
        "xtc_probability": "xtc_probability",
        "repetition_penalty": "repetition_penalty",
        "dry_multiplier": "dry_multiplier",
        "penalty_last_n": "penalty_last_n",
    },
    order="last",
    ask_ids="return_token_ids",
    stop_ids="stop_token_ids",
    keep_stop={"include_stop_str_in_output": True},
    seeded=True,
    constraints="structured_outputs",
    may_continue=True,
)  # fmt: skip
DIALECTS = {
    each.name: each for each in (PLAIN, VLLM, SGLANG, LLAMA_SERVER, LLAMA_CPP_PYTHON, OLLAMA, WEFT)
}


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of the server with this `owned_by` in its list of models."""
    return next((each for each in DIALECTS.values() if owner in each.owners), PLAIN)


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """Features of one server, detected at load or passed by the caller."""

    # Protocol of its requests.
    api: Api = "completions"
    # Prompts may be token ids.
    takes_ids: bool = False
    # Responses have the ids of generated tokens.
    gives_ids: bool = False
    # It returns several choices of one prompt.
    n: bool = False
    # It returns logprobs of generated tokens.
    logprobs: bool = False
    # The logprobs are those of raw logits at every temperature.
    raw: bool = False
    # It scores a given prompt.
    echo: bool = False
    # Features of its chat protocol, used for messages; None if it has none, or if a tokenizer is
    # given, because a chat protocol has no prompts of tokens.
    chat: ServerCapabilities | None = None
