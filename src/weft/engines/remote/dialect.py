"""What kinds of servers honour beyond OpenAI's protocol, and how that is said to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat"]
Order = Literal["first", "last", "either"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server. What it is silent about is not asked for, and refused by name.

    owners: what `owned_by` says in its list of models. neutral: fields sent with every request, or
    the server's own defaults would draw. params: our parameters that it honours exactly, and its
    names for them. order: where its temperature stands, before the filters or after them.
    samplers: our filters in the words of a server that lets the request order them.
    ask_ids: the field that asks for token ids. stop_ids: the one that names end tokens.
    keep_stop: fields that leave a stop string in the text. seeded: equal seeds give equal texts.
    constraints: the form in which it takes them. may_continue: its chat goes on from the middle of
    an answer. top: how many likeliest tokens are asked for so that it tells logprobs at all.
    row: fields that ask for the logprobs of all tokens, named by their ids. most: requests it works
    on at once, if it breaks others off. drops_letters: with logprobs, those that are several tokens
    are missing from its streams. chat_only: its completions do not continue raw text.
    """

    name: str
    owners: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    order: Order = "first"
    samplers: tuple[str, ...] = ()
    ask_ids: str = ""
    stop_ids: str = ""
    keep_stop: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = False
    constraints: Literal["", "structured_outputs", "gbnf"] = ""
    may_continue: bool = False
    top: int = 1
    row: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None
    drops_letters: bool = False
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
    # NOTE: what is not said comes from the model's generation_config.json over there.
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
# Its presence and frequency penalties count the prompt, ours do not.
LLAMA_SERVER = Dialect(
    "llama-server",
    owners=("llamacpp",),
    neutral={
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_last_n": -1,
    },
    params={
        "top_k": "top_k",
        "typical_p": "typical_p",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repeat_penalty",
        "penalty_last_n": "repeat_last_n",
        "logit_bias": "logit_bias",
    },
    order="either",
    samplers=("top_k", "typ_p", "top_p", "min_p"),
    seeded=True,
    constraints="gbnf",
)  # fmt: skip
# Its penalties look back 64 tokens, whatever is asked for; a request breaks off the one before.
LLAMA_CPP_PYTHON = Dialect(
    "llama-cpp-python",
    owners=("me",),
    neutral={"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0},
    params={"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "logit_bias": "logit_bias"},
    order="last",
    seeded=True,
    constraints="gbnf",
    most=1,
    drops_letters=True,
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
DIALECTS = {
    each.name: each for each in (PLAIN, VLLM, SGLANG, LLAMA_SERVER, LLAMA_CPP_PYTHON, OLLAMA)
}


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of the server that calls itself so in its list of models."""
    return next((each for each in DIALECTS.values() if owner in each.owners), PLAIN)


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What one server does, found out at load or told by whoever knows.

    api: the protocol it speaks. takes_ids: prompts may be token ids. gives_ids: it names the ids
    of what it generates. n: it honours several choices of one prompt. logprobs: it tells those of
    what it draws. raw: they are of raw logits at every temperature. echo: it scores a given prompt.
    chat: what it does by the other protocol, by which messages go; None: it has none, or what grows
    is the model's tokens, which a chat protocol has no words for.
    """

    api: Api = "completions"
    takes_ids: bool = False
    gives_ids: bool = False
    n: bool = False
    logprobs: bool = False
    raw: bool = False
    echo: bool = False
    chat: ServerCapabilities | None = None
