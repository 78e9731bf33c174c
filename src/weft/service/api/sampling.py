"""How tokens are drawn, as a request says it; the words of `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from .base import RequestModel

TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


def _of_bias(value: object) -> object:
    """Refuse what is no number by one message, not by one for each type."""
    if isinstance(value, bool | str) and value not in ("inf", "-inf"):
        raise ValueError(f'it is {value!r:.40}; allowed is a number, "inf" or "-inf"')
    return value


# JSON has no infinities: they are written as `SamplingParams.to_dict` does.
Bias = Annotated[float | Literal["inf", "-inf"], BeforeValidator(_of_bias)]
_CONSTRAINTS = ("json_schema", "regex", "choices", "gbnf", "lark")


class SamplingFields(RequestModel):
    """Sampling parameters; what is not given is as the model says, else neutral."""

    max_tokens: int | None = Field(
        default=None, ge=1, description="New tokens of a branch at most; 256."
    )
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Keep this much probability.")
    top_k: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Keep the k likeliest; 0: all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop what is this much less likely than the best."
    )
    typical_p: float | None = Field(default=None, gt=0, le=1, description="Keep what is typical.")
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        description="On tokens that were there, the prompt's among them; 1: none.",
    )
    presence_penalty: float | None = Field(
        default=None, description="Off tokens that were generated."
    )
    frequency_penalty: float | None = Field(
        default=None, description="As presence_penalty, as often as they were generated."
    )
    penalty_last_n: int | None = Field(
        default=None, ge=1, description="Penalties look back so many tokens; null: at all."
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        default=None,
        description='Added to the logits of token ids; "-inf" forbids one, "inf" leaves nothing'
        " else.",
    )
    stop: str | list[str] | None = Field(default=None, description="Texts that end a branch.")
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**64 - 1,
        description="The same gives the same branches; null: a new one.",
    )
    temperature_first: bool | None = Field(
        default=None, description="Temperature before the filters, not after them."
    )
    json_schema: dict[str, Any] | bool | None = Field(
        default=None, description="Only JSON that fits this schema."
    )
    regex: str | None = Field(default=None, description="Only texts that match, as a whole.")
    choices: list[str] | None = Field(default=None, description="Only one of these texts.")
    gbnf: str | None = Field(
        default=None, description="Only texts of this grammar, as llama.cpp's."
    )
    lark: str | None = Field(default=None, description="Only texts of this grammar, as Lark's.")

    @model_validator(mode="after")
    def _one_constraint(self) -> SamplingFields:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other; give one constraint")
        return self

    def sampling(self) -> dict[str, Any]:
        """Return what was given as keywords of SamplingParams, but `n`; without the constraint."""
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
        """Return the constraint as `constraints.from_dict` takes it; None for none."""
        for name in _CONSTRAINTS:
            if (value := getattr(self, name)) is not None:
                return {"choice" if name == "choices" else name: value}
        return None
