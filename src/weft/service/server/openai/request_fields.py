"""Request fields that completions and chat completions share, and their SamplingParams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ...._core.sampling.params import PARAMETERS, SamplingParams
from ....constraints.token_limits import TokenLimits
from ...api.base import validate_json
from .field_errors import check_field, invalid, unsupported
from .known_fields import apply_rule

if TYPE_CHECKING:
    from ....constraints.base import Constraint
    from ....lm.lm import LM

_BIAS = 100.0
_SEEDS = 1 << 64
# Fields with the names of SamplingParams; `sampling` maps the others.
_SAME = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "xtc_probability", "xtc_threshold"),
)

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def check_one_kind(value: object) -> object:
    """Validate that a list has only texts, only token ids, or only lists. Raises: ValueError."""
    if not isinstance(value, list):
        return value
    kinds = sorted({_kind_name(item) for item in value})
    if len(kinds) > 1:
        raise ValueError(
            f"it mixes {' and '.join(kinds)}; allowed are a text, texts, token ids, or lists of"
            " token ids, one kind in a request"
        )
    return value


def _kind_name(value: object) -> str:
    """Return the name of a value's JSON type, for messages."""
    kinds = {str: "texts", int: "token ids", list: "lists"}
    return kinds.get(type(value), f"{json.dumps(value, default=str):.20}")


class OpenAIModel(BaseModel):
    """Base of this API's requests: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _validate_json(cls, value: object) -> object:
        """Reject values that JSON should not have, such as lone surrogates."""
        return validate_json(value)


class ProtocolRequest(OpenAIModel):
    """Base of requests that follow the rule for fields of other servers; see `apply_rule`."""

    @model_validator(mode="before")
    @classmethod
    def _apply_rule(cls, body: Any) -> Any:
        """Translate fields of other servers, drop neutral ones and reject the others."""
        return apply_rule(body, cls.model_fields) if isinstance(body, Mapping) else body


class StreamOptions(OpenAIModel):
    """Options of a streamed answer; they do not change the text."""

    include_usage: bool | None = Field(
        None, description="Add a last chunk with the usage and no choices."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")
    continuous_usage_stats: Literal[False] | None = None


class LoomOptions(OpenAIModel):
    """Weft's own options of an OpenAI request: where to save the choices, and extra logprobs."""

    save: bool | None = Field(
        None, description="Save the prompt and the answers as nodes of a loom."
    )
    loom: str | None = Field(
        None,
        min_length=1,
        description="The loom to add to, by id or name; the prompt must begin with its root.",
    )
    parent: int | str | None = Field(
        None,
        description="The number or id of the node to continue; the prompt must begin with its"
        " path.",
    )
    logprob_tokens: list[TokenId] | None = Field(
        None,
        max_length=64,
        description="Token ids whose logprobs are returned at every position.",
    )
    logprobs_mode: str | None = Field(
        None, description='"raw": of the model\'s logits at temperature 1, before any filter.'
    )


class RequestFields(ProtocolRequest):
    """Fields of completions and chat completions that responses have in another form."""

    model: str | None = Field(
        None, description="A loaded model's id; default: the first loaded one."
    )
    n: int | None = Field(
        None, ge=1, description="Number of choices per prompt; they share one prefill."
    )
    max_tokens: int | None = Field(
        None, ge=-1, description="Maximum of new tokens; -1: until the text or the context ends."
    )
    temperature: Finite | None = Field(None, ge=0, description="0 is greedy.")
    top_p: Finite | None = Field(
        None, description="Sample from the likeliest tokens with this total probability."
    )


class OpenAISampling(ProtocolRequest):
    """Fields of sampling and length that all requests for an answer have."""

    top_k: int | None = Field(
        None, ge=-1, description="Sample from the k likeliest tokens; 0 or -1: all."
    )
    min_p: Finite | None = None
    typical_p: Finite | None = None
    top_n_sigma: Finite | None = Field(
        None,
        description="Keep logits within this many standard deviations below the largest; 0 or less:"
        " all.",
    )
    xtc_probability: Finite | None = Field(
        None, description="Share of draws that exclude the top choices; 0: none."
    )
    xtc_threshold: Finite | None = Field(
        None, description="Tokens at least this likely are top choices."
    )
    dry_multiplier: Finite | None = Field(
        None, description="Penalty on continuing a repeated sequence; 0: none."
    )
    dry_base: Finite | None = Field(None, description="Growth of that penalty per repeated token.")
    dry_allowed_length: int | None = Field(None, description="Shorter repetitions are free.")
    dry_penalty_last_n: int | None = Field(
        None, ge=-1, description="Number of last tokens that DRY considers; 0: no DRY; -1: all."
    )
    dry_sequence_breakers: str | list[str] | None = Field(
        None, description="Texts that end a repetition; a text is read as a JSON list."
    )
    repetition_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    logit_bias: dict[str, Finite] | None = Field(
        None, description="Bias by token id, -100 to 100; -100 bans the token."
    )
    stop: str | list[str] | None = Field(None, description="Strings that end a choice.")
    stop_token_ids: list[TokenId] | None = Field(
        None, description="Tokens that end a choice and are not part of it."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="true: include the stop string or stop token in the text."
    )
    min_tokens: int | None = Field(
        None, ge=0, description="Ignore end tokens and stops before this many new tokens."
    )
    bad_words: list[str] | None = Field(
        None, description="Texts whose token sequences are never generated."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, description="Generate only these tokens; include end tokens."
    )
    seed: int | None = Field(
        None, description="Choice i is sampled with seed + i; negative: random."
    )
    ignore_eos: bool | None = Field(
        None, description="Ban end tokens, so that choices reach max_tokens."
    )
    penalty_last_n: int | None = Field(
        None, ge=-1, description="Number of last tokens that penalties consider; 0 or -1: all."
    )
    skip_special_tokens: bool | None = Field(
        None, description="true: leave generated special tokens out of the text."
    )
    temperature_last: bool | None = Field(
        None, description="false: apply temperature before the filters instead of after them."
    )
    truncation_length: int | None = Field(
        None,
        ge=0,
        description="Maximum of prompt tokens; longer prompts are rejected, not cut. 0: no limit.",
    )

    def check_prompt_length(self, n_prompt: int) -> None:
        """Raise RequestError if a prompt has more tokens than `truncation_length`."""
        if self.truncation_length and n_prompt > self.truncation_length:
            raise invalid(
                "truncation_length",
                f"the prompt has {n_prompt} tokens, more than truncation_length, which is"
                f" {self.truncation_length}; shorten the prompt, as nothing is cut off",
            )


class GeneratingRequest(RequestFields, OpenAISampling):
    """Fields that completions and chat completions share. null is the same as left out."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, description="Return the prompt's logprobs, with this number of alternatives."
    )
    return_token_ids: bool | None = Field(
        None, description="Return the token ids of prompt and answer."
    )
    loom: LoomOptions | None = None
    user: Any = Field(None, description="Accepted; changes nothing.")
    store: Any = Field(None, description="Accepted; changes nothing. To save, see `loom`.")
    metadata: Any = Field(None, description="Accepted; changes nothing.")
    service_tier: Any = Field(None, description="Accepted; changes nothing.")
    safety_identifier: Any = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: Any = Field(None, description="Accepted; prefixes are cached without a key.")
    prompt_cache_retention: Any = Field(None, description="Accepted; changes nothing.")

    @property
    def n_choices(self) -> int:
        """Number of choices per prompt."""
        return 1 if self.n is None else self.n

    def sampling(
        self,
        lm: LM,
        defaults: SamplingParams,
        *,
        max_tokens: int,
        constraint: Constraint | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters of one choice.

        Args:
            defaults: values of fields that the request leaves out.
            max_tokens: maximum number of new tokens.
            constraint: the compiled constraint of the text; None without one.

        Raises: RequestError, which names the invalid field.
        """
        self._check_min_tokens(max_tokens, constraint)
        given: dict[str, Any] = {
            "max_tokens": max(max_tokens, 1),
            "constraint": self._limited(lm, constraint),
        }
        for name in _SAME:
            value = getattr(self, name)
            if value is not None:
                given[name] = _check_parameter(name, value)
        if self.top_k is not None:
            given["top_k"] = _check_parameter("top_k", max(self.top_k, 0))
        if self.stop is not None:
            stop = [text for text in _as_list(self.stop) if text]  # clients send empty ones
            given["stop"] = stop
        if self.seed is not None and self.seed >= 0:
            given["seed"] = self.seed % _SEEDS
        if self.penalty_last_n is not None and self.penalty_last_n > 0:
            given["penalty_last_n"] = self.penalty_last_n
        if self.top_n_sigma is not None:
            given["top_n_sigma"] = max(self.top_n_sigma, 0.0)
        given |= self._dry_parameters(defaults)
        if self.temperature_last is not None:
            given["temperature_first"] = not self.temperature_last
        biases = self._biases(lm)
        if biases:
            given["logit_bias"] = biases
        return SamplingParams.resolve({**given, "n": 1}, defaults)

    def _dry_parameters(self, defaults: SamplingParams) -> dict[str, Any]:
        """Return the parameters of DRY; those of a request without DRY are not checked."""
        given = defaults.dry_multiplier if self.dry_multiplier is None else self.dry_multiplier
        if not given or self.dry_penalty_last_n == 0:
            return {"dry_multiplier": 0.0}
        values: dict[str, Any] = {"dry_multiplier": given}
        if (self.dry_penalty_last_n or 0) > 0:
            values["dry_penalty_last_n"] = self.dry_penalty_last_n
        if self.dry_base is not None:
            values["dry_base"] = self.dry_base
        if self.dry_allowed_length is not None:
            values["dry_allowed_length"] = self.dry_allowed_length
        if self.dry_sequence_breakers not in (None, ""):
            values["dry_sequence_breakers"] = _breakers(self.dry_sequence_breakers)
        return {name: _check_parameter(name, value) for name, value in values.items()}

    def _biases(self, lm: LM) -> dict[int, float]:
        """Return the logit biases by token id, those of banned tokens and words included."""
        biases: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            param = f"logit_bias[{key!r:.20}]"
            if not (key.isascii() and key.isdigit()) or len(key) > 10:
                raise invalid("logit_bias", f"{param}: a key must be a token id")
            if not -_BIAS <= value <= _BIAS:
                raise invalid("logit_bias", f"{param} is {value}; allowed is -100 to 100")
            biases[int(key)] = -math.inf if value == -_BIAS else value
        check_token_ids(lm, "logit_bias", biases)
        if self.ignore_eos:
            biases.update(dict.fromkeys(lm.text.stop_ids, -math.inf))
        return biases

    def _check_min_tokens(self, max_tokens: int, constraint: Constraint | None) -> None:
        """Raise RequestError if `min_tokens` exceeds `max_tokens` or contradicts the constraint."""
        if not self.min_tokens:
            return
        if self.min_tokens > max_tokens:
            raise invalid(
                "min_tokens", f"min_tokens is {self.min_tokens}; max_tokens allows {max_tokens}"
            )
        if constraint is not None:
            raise unsupported(
                "min_tokens",
                "not with a constraint or tools, which decide where the answer ends; leave it out",
            )

    def _limited(self, lm: LM, constraint: Constraint | None) -> Constraint | None:
        """Return a constraint combined with the request's limits on tokens."""
        allowed, stop_ids = self.allowed_token_ids, self.stop_token_ids or ()
        if not (allowed or stop_ids or self.min_tokens or self.bad_words):
            return constraint
        check_token_ids(lm, "stop_token_ids", stop_ids)
        check_token_ids(lm, "allowed_token_ids", allowed or ())
        return TokenLimits(
            allowed or None,
            [word for word in self.bad_words or () if word.strip()],
            self.min_tokens or 0,
            frozenset(stop_ids) - lm.text.stop_ids,
            constraint,
        )

    def check_options(self) -> None:
        """Raise RequestError for options that contradict each other or are not supported."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options: only with stream: true")
        if self.loom is not None and self.loom.logprobs_mode not in (None, "raw"):
            raise unsupported(
                "loom.logprobs_mode",
                f"is {self.loom.logprobs_mode!r:.40}; allowed is 'raw': logprobs are of the model's"
                " own logits, before temperature and filters",
            )

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a chunk of usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)


def check_token_ids(lm: LM, name: str, ids: Iterable[int]) -> None:
    """Raise RequestError for ids beyond the vocabulary; none is negative. name: of the field."""
    n_vocab = lm.info.n_vocab or lm.text.n_vocab
    wrong = next((token for token in ids if token >= n_vocab), None)
    if wrong is not None:
        raise invalid(
            name,
            f"{name} has token {wrong}; allowed are 0 to {n_vocab - 1}",
            code="tokens_out_of_vocabulary",
        )


def _check_parameter(name: str, value: Any) -> Any:
    """Validate one sampling parameter. Raises: RequestError that names the field."""
    return check_field(name, lambda: PARAMETERS[name].check(name, value))


def _breakers(value: str | list[str]) -> list[str]:
    """Return DRY's sequence breakers: a list, or a text such as '"\\n", ":"', with [] or without.

    Raises: RequestError for another text.
    """
    if isinstance(value, list):
        return value
    try:
        texts = json.loads(value if value.lstrip().startswith("[") else f"[{value}]")
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(
            "dry_sequence_breakers",
            f"dry_sequence_breakers is {value!r:.60}; allowed is a list of texts",
        )
    return texts


def _as_list(value: str | list[str]) -> list[str]:
    """Return a text as a list of one text."""
    return [value] if isinstance(value, str) else value
