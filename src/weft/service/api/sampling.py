"""Sampling parameters of a request, named as in `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from .base import RequestModel

TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


def _check_bias(value: object) -> object:
    """Check one bias value: a number, "inf" or "-inf".

    For other values this gives one error message; pydantic would give one for each union member.
    """
    if isinstance(value, bool | str) and value not in ("inf", "-inf"):
        raise ValueError(f'it is {value!r:.40}; allowed is a number, "inf" or "-inf"')
    return value


# JSON has no infinities: they are strings, as in `SamplingParams.to_dict`.
Bias = Annotated[float | Literal["inf", "-inf"], BeforeValidator(_check_bias)]
_CONSTRAINTS = ("json_schema", "regex", "choices", "gbnf", "lark")


class SamplingFields(RequestModel):
    """Sampling parameters; the default is the model's, else neutral."""

    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum of new tokens per branch; default 256."
    )
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Sample from the k likeliest; 0: all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Minimum probability relative to the likeliest."
    )
    typical_p: float | None = Field(default=None, gt=0, le=1, description="Typical sampling.")
    top_n_sigma: float | None = Field(
        default=None,
        ge=0,
        description="Keep logits within this many standard deviations below the largest; 0: all.",
    )
    xtc_probability: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of draws that drop all top choices but the least likely; 0: none.",
    )
    xtc_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Tokens at least this likely are top choices; default 0.1.",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        description="Penalty on all earlier tokens, including the prompt; 1: none.",
    )
    presence_penalty: float | None = Field(
        default=None, description="Subtracted from logits of generated tokens."
    )
    frequency_penalty: float | None = Field(
        default=None, description="Subtracted once per occurrence among generated tokens."
    )
    penalty_last_n: int | None = Field(
        default=None, ge=1, description="Number of tokens that penalties consider; null: all."
    )
    dry_multiplier: float | None = Field(
        default=None,
        ge=0,
        description="DRY: penalty on tokens that continue a repeated sequence; 0: none.",
    )
    dry_base: float | None = Field(
        default=None, ge=1, description="Growth of DRY's penalty per repeated token; default 1.75."
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=1, description="DRY ignores shorter repetitions; default 2."
    )
    dry_penalty_last_n: int | None = Field(
        default=None, ge=1, description="Number of tokens that DRY considers; null: all."
    )
    dry_sequence_breakers: str | list[str] | None = Field(
        default=None,
        description='Texts that end a repetition; default the newline, ":", \'"\' and "*".',
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        default=None,
        description='Added to the logits of token ids; "-inf" bans a token, "inf" bans all others.',
    )
    stop: str | list[str] | None = Field(default=None, description="Strings that end a branch.")
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**64 - 1,
        description="The same seed repeats the branches (exceptions: docs/models.md);"
        " null: random.",
    )
    temperature_first: bool | None = Field(
        default=None, description="Apply temperature before the filters, not after them."
    )
    json_schema: dict[str, Any] | bool | None = Field(
        default=None, description="Generate JSON that matches this schema."
    )
    regex: str | None = Field(default=None, description="Generate text that matches fully.")
    choices: list[str] | None = Field(default=None, description="Generate one of these texts.")
    gbnf: str | None = Field(
        default=None, description="Generate text of this grammar, in llama.cpp's format."
    )
    lark: str | None = Field(default=None, description="Generate text of this Lark grammar.")

    @model_validator(mode="after")
    def _check_single_constraint(self) -> SamplingFields:
        """Reject requests with several constraints."""
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other; give one constraint")
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the given parameters as keywords of SamplingParams, without the constraint."""
        given = {
            name: getattr(self, name)
            for name in SamplingFields.model_fields
            if name not in _CONSTRAINTS and getattr(self, name) is not None
        }
        if "logit_bias" in given:
            biases = given["logit_bias"].items()
            given["logit_bias"] = {int(key): float(value) for key, value in biases}
        return given

    def constraint(self) -> dict[str, Any] | None:
        """Return the constraint as `constraints.from_dict` takes it; None without one."""
        for name in _CONSTRAINTS:
            if (value := getattr(self, name)) is not None:
                return {"choice" if name == "choices" else name: value}
        return None
