"""`SamplingParams`: how tokens are drawn; one frozen value, and B of them as arrays."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..checks import whole_number
from ..constraints import as_constraint, from_dict
from ..errors import ConfigError

_log = logging.getLogger(__name__)

# 1: the first id, in id order, whose cumulative weight exceeds a uniform number; 2: Gumbel-max. A
# seed gives other tokens under another rule, so what is saved says which it was drawn by.
DRAW_RULE = 2

# Of one node in one call: each branch is Python objects, and a slip of the finger must not fill
# the memory with them before a token is drawn.
MAX_N = 65_536

# Names from other libraries, and what to write here instead.
_FOREIGN = {
    "best_of": "n",
    "do_sample": "temperature (0 is greedy)",
    "grammar": "constraint",
    "length_penalty": "no option here; rank finished branches by their mean log-probability",
    "logprobs": "no option here; log-probabilities are always recorded",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens (it counts new tokens only)",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_beams": "n (plain branches)",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "random_seed": "seed",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "repetition_penalty",
    "response_format": "constraint",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "topk": "top_k",
    "topp": "top_p",
    "typical": "typical_p",
}
# What a model's generation_config.json may set, when its do_sample is true.
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


class BranchOptions(TypedDict, total=False):
    """The keywords of SamplingParams but `n`, for calls that have `n` apart."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    seed: int | None
    constraint: Any
    temperature_first: bool


class SamplingOptions(BranchOptions, total=False):
    """The keywords of SamplingParams, for `**sampling: Unpack[SamplingOptions]`."""

    n: int


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SamplingParams:
    """How tokens are drawn, checked when made; equal values are equal and hashable.

    n: continuations of a node, 65,536 at most. max_tokens: new tokens of each at most.
    temperature: 0 is greedy. top_p, top_k (0: off), min_p, typical_p: filters, off by default.
    repetition_penalty: on prompt and generated tokens; presence_penalty, frequency_penalty: on
    generated ones only; penalty_last_n: looking back that many tokens, None for all.
    logit_bias: added to raw logits, by token id: -inf forbids, inf leaves nothing else; kept as
    sorted pairs.
    stop: strings that end a continuation; kept as a tuple.
    seed: makes a call reproducible; None takes a fresh one.
    constraint: what the text may be; see `weft.constraints`. Kept as a `Constraint`.
    temperature_first: temperature before the filters instead of after them.
    draw_rule: how a seed becomes tokens, not to be chosen: `DRAW_RULE`, or that of the version that
    a saved value was drawn by.
    """

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int | None
    logit_bias: tuple[tuple[int, float], ...]
    stop: tuple[str, ...]
    seed: int | None
    constraint: Any
    temperature_first: bool
    draw_rule: int = field(init=False)

    # Written out, so that arguments may be wider (a dict, one string) than what is kept.
    def __init__(
        self,
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_last_n: int | None = None,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        constraint: Any = None,
        temperature_first: bool = False,
    ) -> None:
        checked = {
            "n": whole_number("n", n, 1, MAX_N),
            "max_tokens": whole_number("max_tokens", max_tokens, 1),
            "temperature": _number("temperature", temperature, low=0.0),
            "top_p": _number("top_p", top_p, low=0.0, high=1.0, open_low=True),
            "top_k": whole_number("top_k", top_k, 0, 2**31 - 1),
            "min_p": _number("min_p", min_p, low=0.0, high=1.0),
            "typical_p": _number("typical_p", typical_p, low=0.0, high=1.0, open_low=True),
            "repetition_penalty": _number(
                "repetition_penalty", repetition_penalty, low=0.0, open_low=True
            ),
            "presence_penalty": _number("presence_penalty", presence_penalty),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty),
            "penalty_last_n": (
                None
                if penalty_last_n is None
                else whole_number("penalty_last_n", penalty_last_n, 1)
            ),
            "logit_bias": _biases(logit_bias),
            "stop": _stops(stop),
            "seed": None if seed is None else whole_number("seed", seed, 0, 2**64 - 1),
            "constraint": None if constraint is None else as_constraint(constraint),
            "temperature_first": _flag("temperature_first", temperature_first),
            "draw_rule": DRAW_RULE,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def resolve(
        cls, given: Mapping[str, Any], defaults: SamplingParams | None = None
    ) -> SamplingParams:
        """Return `defaults` (None: neutral) with what was given.

        Raises: ConfigError for an unknown keyword, naming the right one.
        """
        for name in given:
            if name not in _NAMES:
                raise _unknown(name)
        base = {} if defaults is None else defaults.keywords()
        return cls(**{**base, **given})

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Return what a model's generation_config.json asks for; neutral unless it says do_sample.

        A value outside what is allowed here is left at its default, with a warning in the log.
        """
        taken = cls()
        if not config.get("do_sample"):
            return taken
        for name in _FROM_MODEL:
            if config.get(name) is None:
                continue
            try:
                taken = cls.resolve({name: config[name]}, taken)
            except ConfigError as error:
                _log.warning("generation_config.json: %s; the default is used", error)
        return taken

    def keywords(self) -> dict[str, Any]:
        """Return all values as the keywords that make an equal one."""
        return {name: getattr(self, name) for name in _NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON data; infinite biases become "inf" and "-inf"."""
        data = self.keywords()
        data["draw_rule"] = self.draw_rule
        data["stop"] = list(self.stop)
        if self.constraint is not None:
            data["constraint"] = self.constraint.to_dict()
        data["logit_bias"] = {
            str(token_id): value if math.isfinite(value) else str(value)
            for token_id, value in self.logit_bias
        }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Read what `to_dict` wrote; names that are absent take their default."""
        biases = data.get("logit_bias") or {}
        try:
            parsed = {int(token_id): float(value) for token_id, value in biases.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"logit_bias is {biases!r}; allowed is a mapping from token id to number"
            ) from error
        kept = data.get("constraint")
        constraint = from_dict(kept) if isinstance(kept, Mapping) else kept
        rule = data.get("draw_rule", 1)  # the first did not say so
        given = {name: value for name, value in data.items() if name != "draw_rule"}
        made = cls.resolve({**given, "logit_bias": parsed, "constraint": constraint})
        object.__setattr__(made, "draw_rule", whole_number("draw_rule", rule, 1))
        return made

    def __repr__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name in _NAMES
            if getattr(self, name) != getattr(_NEUTRAL, name)
        ]
        return f"SamplingParams({', '.join(changed)})"


def _unknown(name: str) -> ConfigError:
    right = _FOREIGN.get(name)
    if right is not None and right.startswith("no option"):
        message = f"{name}? There is {right}"
    elif right is not None:
        message = f"{name}? Here it is {right}"
    else:
        close = difflib.get_close_matches(name, _NAMES, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        message = f"unknown sampling option {name!r}. {meant}Allowed are: {', '.join(_NAMES)}"
    return ConfigError(message, hint=message)


def _number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    allowed = "a finite number"
    if low > -math.inf:
        allowed += f" {'>' if open_low else '>='} {low:g}"
    if high < math.inf:
        allowed += f" and <= {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {value!r}; allowed is {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    outside = number < low or number > high or (open_low and number == low)
    if outside or not math.isfinite(number):
        raise ConfigError(f"{name} is {value!r}; allowed is {allowed}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed is True or False")
    return value


def _biases(
    given: Mapping[int, float] | Iterable[tuple[int, float]] | None,
) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(given or ())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"logit_bias is {given!r}; allowed is a mapping from token id to number"
        ) from error
    return tuple(sorted(_bias(token_id, value) for token_id, value in pairs.items()))


def _bias(token_id: object, value: object) -> tuple[int, float]:
    whole = whole_number("a token id in logit_bias", token_id, 0)
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(float(value)):
        raise ConfigError(
            f"logit_bias of token {whole} is {value!r}; allowed is any number, "
            "-inf to forbid the token, inf to leave nothing else"
        )
    return whole, float(value)


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    try:
        stops = (given,) if isinstance(given, str) else tuple(given)
    except TypeError as error:
        raise ConfigError(f"stop is {given!r}; allowed is a string or strings") from error
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(
                f"stop has {stop!r}; allowed are non-empty strings. Leave stop out to have none"
            )
    return tuple(dict.fromkeys(stops))


_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name != "draw_rule")
_NEUTRAL = SamplingParams()


Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Parameters are Python floats, logits are float32: these bounds change no draw.
_TINY, _HUGE = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """One entry a row, [B], made once for rows that draw together.

    greedy: temperature is 0. early, late: what logits are divided by before and after the filters,
    1 where that is not asked for. top_k: 0 is off; top_p, typical_p: 1 is off; min_p: 0 is off.
    bias_rows, bias_ids, bias: added to the logits of a row's token, an entry each.
    filtered: the row drops tokens before it draws; plain: it draws from all of them. mass_first:
    top-p cuts first, so it is a share of the whole row. uses: names of the filters of any row.
    """

    greedy: Flags
    early: Doubles
    late: Doubles
    top_k: Ids
    typical_p: Doubles
    top_p: Doubles
    min_p: Doubles
    repetition: Floats
    presence: Floats
    frequency: Floats
    bias_rows: Ids
    bias_ids: Ids
    bias: Floats
    filtered: Flags = field(init=False)
    plain: Flags = field(init=False)
    mass_first: Flags = field(init=False)
    log_min_p: Doubles = field(init=False)
    uses: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        asked = {
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
        }
        off = ~(asked["top_k"] | asked["typical_p"] | asked["top_p"] | asked["min_p"])
        with np.errstate(divide="ignore"):
            derived = {
                "filtered": ~(self.greedy | off),
                "plain": off & ~self.greedy,
                "mass_first": asked["top_p"] & ~asked["top_k"] & ~asked["typical_p"],
                "log_min_p": np.log(self.min_p),
                "uses": frozenset(name for name, rows in asked.items() if rows.any()),
            }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingArrays:
        """Put the parameters of B rows into arrays."""
        greedy = np.array([p.temperature == 0 for p in params], dtype=bool)
        first = np.array([p.temperature_first for p in params], dtype=bool)
        warmth = np.where(greedy, 1.0, _within([p.temperature for p in params], _TINY))
        biases = [(row, *pair) for row, p in enumerate(params) for pair in p.logit_bias]
        rows, ids, values = zip(*biases, strict=True) if biases else ((), (), ())
        return cls(
            greedy=greedy,
            early=np.where(first, warmth, 1.0),
            late=np.where(first, 1.0, warmth),
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            typical_p=np.array([p.typical_p for p in params]),
            top_p=np.array([p.top_p for p in params]),
            min_p=np.array([p.min_p for p in params]),
            repetition=_within([p.repetition_penalty for p in params], _TINY).astype(np.float32),
            presence=_within([p.presence_penalty for p in params], -_HUGE).astype(np.float32),
            frequency=_within([p.frequency_penalty for p in params], -_HUGE).astype(np.float32),
            bias_rows=np.array(rows, dtype=np.int64),
            bias_ids=np.array(ids, dtype=np.int64),
            bias=np.where(np.isneginf(values), -np.inf, _within(values, -_HUGE)).astype(np.float32),
        )

    def take(self, rows: Ids) -> SamplingArrays:
        """Return the entries of some rows, numbered anew."""
        number = np.full(len(self.greedy), -1)
        number[rows] = np.arange(len(rows))
        kept = number[self.bias_rows] >= 0
        a_row = {name: getattr(self, name)[rows] for name in _A_ROW}
        return SamplingArrays(
            **a_row,
            bias_rows=number[self.bias_rows[kept]],
            bias_ids=self.bias_ids[kept],
            bias=self.bias[kept],
        )


def _within(values: Sequence[float], low: float) -> Doubles:
    # What is finite must not become inf or 0 in float32, or inf - inf and 0 / 0 would follow.
    return np.clip(np.array(values, dtype=np.float64), low, _HUGE)


_A_ROW = [f.name for f in fields(SamplingArrays) if f.init and not f.name.startswith("bias")]
