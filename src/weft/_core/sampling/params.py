"""`SamplingParams`, and the table that describes each parameter.

The command builds its flags from this table, so the module imports nothing slow: no NumPy, no
constraints.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from inspect import Parameter as Keyword
from inspect import iscoroutinefunction, signature
from numbers import Real
from typing import Any, ParamSpec, TypedDict, TypeVar, cast

from ...errors import ConfigError
from ..validation import (
    check_bool,
    check_int,
    check_number,
    find_lone_surrogate,
    lone_surrogate_message,
)

P = ParamSpec("P")
T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])
_log = logging.getLogger(__name__)

# 1: inverse transform sampling in id order; 2: Gumbel-max. A seed gives other tokens under another
# rule, so saved parameters record their rule.
DRAW_RULE = 2

# Children of one node per call. A typo in `n` must not fill the memory with Python objects.
MAX_N = 65_536

# llama.cpp's defaults: chat answers of models whose files name no sampling. Unfiltered draws at
# temperature 1 make a small chat model answer 15 of 72 questions right, these 35.
CHAT_SAMPLING: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}

# llama.cpp's default: line ends and the characters around speech and emphasis.
DRY_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line option of a parameter. A list is an option that can be repeated."""

    type: Any
    names: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table of parameters: all facts about one except its type and default."""

    check: Callable[[str, Any], Any]  # takes name and value, returns the value to store
    aliases: tuple[str, ...] = ()  # names in other libraries
    near_aliases: Mapping[str, str] = field(default_factory=dict)  # similar names → the difference
    from_model: bool = False  # generation_config.json may set it, with do_sample
    for_greedy: bool = False  # generation_config.json may set it, also without do_sample
    is_filter: bool = False  # drops tokens unless it has its default; see `filters.CUTS`
    flag: Flag | None = None  # of the command; None if no verb has it, or verbs define it


class BranchOptions(TypedDict, total=False):
    """The keywords of SamplingParams without `n`, for calls that take `n` separately."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int | None
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int | None
    dry_sequence_breakers: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    seed: int | None
    constraint: Any
    temperature_first: bool


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SamplingParams:
    """Sampling parameters, validated at creation. Equal values are equal and hashable.

    n: continuations of a node, at most 65,536.

    max_tokens: maximum new tokens of each.

    temperature: 0 is greedy.

    top_p, top_k (0: off), min_p, typical_p: filters, off by default.

    top_n_sigma: a filter that keeps tokens whose logit is at most this many standard deviations of
    all logits below the largest. 0: off.

    xtc_probability, xtc_threshold: exclude top choices. With this probability, a draw drops all
    tokens of at least the threshold's probability except the least likely of them. 0: off.

    repetition_penalty: on prompt and generated tokens. presence_penalty and frequency_penalty are
    on generated ones only. Generated tokens are those of this call; the nodes above are its prompt.
    The penalties of a Branch count all tokens that it accepted, and none that it prefilled.

    penalty_last_n: the penalties look back this many tokens; None for all.

    dry_multiplier, dry_base, dry_allowed_length: DRY, a penalty on repeated sequences of prompt and
    generated tokens. 0: off. If a token would continue a repetition of n ≥ dry_allowed_length
    tokens, its logit loses dry_multiplier × dry_base ** (n − dry_allowed_length).

    dry_penalty_last_n: DRY looks back this many tokens; None for all.

    dry_sequence_breakers: texts that repetitions do not extend across; stored as a tuple.

    logit_bias: added to raw logits, by token id. -inf forbids a token, inf allows no other. Stored
    as sorted pairs.

    stop: strings that end a continuation; stored as a tuple.

    seed: repeats a call; None uses a new one. Concurrent calls may change a text in bfloat16, on
    MLX and on llama.cpp, where row counts change rounding (docs/models.md).

    constraint: what the text may be; see `weft.constraints`. Stored as a `Constraint`.

    temperature_first: apply the temperature before the filters instead of after them.

    unset: names of parameters that requests to a remote server omit, so that the server's
    configuration decides. Their values here are neutral. Stored in the order of `SERVER_SAMPLING`.

    draw_rule: how a seed becomes tokens; not an argument. `DRAW_RULE`, or that of the version that
    saved the value.
    """

    n: int  # continuations of a node
    max_tokens: int  # maximum new tokens of each
    temperature: float  # 0 is greedy
    top_p: float  # 1: off
    top_k: int  # 0: off
    min_p: float  # 0: off
    typical_p: float  # 1: off
    top_n_sigma: float  # 0: off
    xtc_probability: float  # 0: off
    xtc_threshold: float  # only with xtc_probability
    repetition_penalty: float  # 1: off
    presence_penalty: float  # 0: off
    frequency_penalty: float  # 0: off
    penalty_last_n: int | None  # window of the penalties; None: all tokens
    dry_multiplier: float  # 0: off
    dry_base: float  # growth of the penalty per repeated token
    dry_allowed_length: int  # repetitions of fewer tokens are free
    dry_penalty_last_n: int | None  # window of DRY; None: all tokens
    dry_sequence_breakers: tuple[str, ...]  # texts that end a repetition
    logit_bias: tuple[tuple[int, float], ...]  # sorted pairs of token id and value
    stop: tuple[str, ...]  # strings that end a continuation
    seed: int | None  # None: a new one per call
    constraint: Any  # a `Constraint` or None
    temperature_first: bool  # temperature before the filters
    unset: tuple[str, ...]  # names that requests to a server omit
    draw_rule: int = field(init=False)  # how a seed becomes tokens

    # Written out, so that argument types may be wider than field types (a dict, one string).
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
        top_n_sigma: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_last_n: int | None = None,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int | None = None,
        dry_sequence_breakers: str | Sequence[str] | None = DRY_BREAKERS,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        constraint: Any = None,
        temperature_first: bool = False,
        unset: Collection[str] = (),
    ) -> None:
        values = {name: value for name, value in locals().items() if name in PARAMETERS}
        for name, value in values.items():
            object.__setattr__(self, name, PARAMETERS[name].check(name, value))
        names = [name for name in SERVER_SAMPLING if name in unset and is_neutral(self, name)]
        object.__setattr__(self, "unset", tuple(names))
        object.__setattr__(self, "draw_rule", DRAW_RULE)

    @classmethod
    def resolve(
        cls, values: Mapping[str, Any], defaults: SamplingParams | None = None
    ) -> SamplingParams:
        """Return parameters with the given values, and the defaults for all others.

        Args:
            values: keywords of SamplingParams.
            defaults: None means neutral parameters: temperature 1, no filters.

        Raises: ConfigError for an unknown keyword; it names the right one.
        """
        for name in values:
            if name not in NAMES:
                raise unknown_option_error(name)
        if defaults is None:
            return cls(**values)
        unset = [name for name in defaults.unset if name not in values]
        return cls(**{**defaults.keywords(), **values}, unset=unset)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a model's generation_config.json.

        Without `do_sample`, only repetition_penalty is read. The file's greedy decoding is not
        adopted: the temperature stays 1. An invalid value keeps its default. Unsupported rules are
        ignored. Both are logged as warnings.
        """
        accepted, samples = cls(), bool(config.get("do_sample"))
        unsupported = _unsupported_rules(config, samples=samples)
        if unsupported:
            _log.warning(
                "generation_config.json asks for %s, which Weft does not follow: tokens are drawn"
                " without",
                ", ".join(unsupported),
            )
        for name, parameter in PARAMETERS.items():
            is_used = parameter.from_model and (samples or parameter.for_greedy)
            if not is_used or config.get(name) is None:
                continue
            try:
                accepted = cls.resolve({name: config[name]}, accepted)
            except ConfigError as error:
                _log.warning("generation_config.json: %s; the default is used", error)
        return accepted

    def keywords(self) -> dict[str, Any]:
        """Return the parameters as keywords for the constructor, except the field `unset`."""
        return {name: getattr(self, name) for name in NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON data; infinite biases become "inf" and "-inf"."""
        data = self.keywords()
        data["draw_rule"] = self.draw_rule
        if self.unset:
            data["unset"] = list(self.unset)
        data["stop"] = list(self.stop)
        data["dry_sequence_breakers"] = list(self.dry_sequence_breakers)
        if self.constraint is not None:
            data["constraint"] = self.constraint.to_dict()
        data["logit_bias"] = {
            str(token_id): value if math.isfinite(value) else str(value)
            for token_id, value in self.logit_bias
        }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters that `to_dict` wrote; missing names have their defaults."""
        biases = data.get("logit_bias") or {}
        try:
            parsed = {int(token_id): float(value) for token_id, value in biases.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"logit_bias is {biases!r}; allowed is a mapping from token id to number"
            ) from error
        from ...constraints import from_dict

        data_of_constraint = data.get("constraint")
        constraint = (
            from_dict(data_of_constraint)
            if isinstance(data_of_constraint, Mapping)
            else data_of_constraint
        )
        rule = data.get("draw_rule", 1)  # old files have no rule
        unset = data.get("unset") or ()
        values = {name: value for name, value in data.items() if name not in ("draw_rule", "unset")}
        params = cls.resolve({**values, "logit_bias": parsed, "constraint": constraint})
        params = replace(params, unset=unset)
        object.__setattr__(params, "draw_rule", check_int("draw_rule", rule, 1))
        return params

    def summary(self) -> str:
        """Return a readable summary: "temperature 0.8, top-k 40", or "greedy".

        It lists filters and penalties with other than neutral values. If a server chooses
        parameters, it has "the server's sampling" for them.
        """
        if self.temperature == 0:
            return "greedy"
        names = [name for name in _SUMMARY if not is_neutral(self, name)]
        if "temperature" not in self.unset:
            names = ["temperature", *names]
        parts = [f"{name.replace('_', '-')} {getattr(self, name):g}" for name in names]
        return ", ".join([*parts, *(["the server's sampling"] if self.unset else [])])

    def __repr__(self) -> str:
        names = [name for name in NAMES if not is_neutral(self, name)]
        names += ["unset"] if self.unset else []
        changed = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"SamplingParams({', '.join(changed)})"


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The default sampling parameters of one model.

    raw: for raw prompts: those of the model's files, else temperature 1 without filters.

    chat: for chat answers: those of the model's files, else `CHAT_SAMPLING`.
    """

    raw: SamplingParams
    chat: SamplingParams

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> ModelDefaults:
        """Return the defaults of a model with this generation_config.json.

        With `do_sample: true` the file's parameters also apply to chat, instead of `CHAT_SAMPLING`.

        config: the content of the file; {} if the model has none.
        """
        raw = SamplingParams.from_generation_config(config)
        chat = raw if config.get("do_sample") else SamplingParams.resolve(CHAT_SAMPLING, raw)
        return cls(raw, chat)

    @classmethod
    def from_sampling(cls, own: SamplingParams | ModelDefaults | None) -> ModelDefaults:
        """Return the defaults of a model.

        own: parameters from the model's files, for raw prompts and chat. None: there are none.
        """
        if own is None:
            return cls.from_generation_config({})
        return own if isinstance(own, ModelDefaults) else cls(own, own)


def unknown_option_error(
    name: str,
    accepted: Collection[str] | None = None,
    call: str = "",
    aliases: Mapping[str, str] | None = None,
) -> ConfigError:
    """Return the error for an unknown keyword; it names the right one.

    Args:
        name: the unknown keyword.
        accepted: the keywords of the call. None means the sampling parameters, `NAMES`.
        call: the name of the called function, for the message. "" means a sampling option.
        aliases: names in other libraries → names here.
    """
    others = aliases or {}
    what = f"option {name!r} of {call}" if call else f"sampling option {name!r}"
    allowed = NAMES if accepted is None else accepted
    own_name = others.get(name) or _describe_own_name(name, allowed)
    if name in _UNSUPPORTED:
        hint = _UNSUPPORTED[name]
        message = f"{name}? There is no option here; {hint}"
    elif own_name:
        hint = f"Here it is {own_name}"
        message = f"{name}? {hint}"
    else:
        close = difflib.get_close_matches(name, [*allowed, *others], n=1)
        meant = f"Did you mean {others.get(close[0], close[0])}?" if close else ""
        listed = f"Allowed are: {', '.join(allowed)}"
        hint = meant or listed
        message = " ".join(filter(None, (f"unknown {what}.", meant, listed)))
    return ConfigError(message, hint=hint)


def rejects_unknown_options(
    name: str, aliases: Mapping[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions that raises `unknown_option_error` for unknown keywords.

    Args:
        name: the name of the function, for the message.
        aliases: names in other libraries → names here.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        keywords = signature(call).parameters.values()
        accepted = [
            keyword.name for keyword in keywords if keyword.kind is not Keyword.POSITIONAL_ONLY
        ]
        accepted = [keyword for keyword in accepted if keyword != "self"]

        @wraps(call)
        def checked(*args: P.args, **options: P.kwargs) -> T:
            for values in options:
                if values not in accepted:
                    raise unknown_option_error(values, accepted, name, aliases)
            return call(*args, **options)

        return checked

    return decorate


def accepts_params_first(call: Call) -> Call:
    """Let `call(params, n=2)` mean `call(params=params, n=2)`; the signature does not change.

    The params stand in the place of the parameter `n` of `call`. Without `n=2`, `call` gets them as
    `n`, and must accept them there.
    """
    position = list(signature(call).parameters).index("n")

    def rearrange(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        is_clash = "n" in options and "params" not in options and len(args) == position + 1
        if is_clash and isinstance(args[position], SamplingParams):
            options["params"] = args[position]
            return args[:position]
        return args

    @wraps(call)
    def plain(*args: Any, **options: Any) -> Any:
        return call(*rearrange(args, options), **options)

    @wraps(call)
    async def coroutine(*args: Any, **options: Any) -> Any:
        return await call(*rearrange(args, options), **options)

    return cast("Call", coroutine if iscoroutinefunction(call) else plain)


def _describe_own_name(name: str, allowed: Collection[str]) -> str | None:
    """Return Weft's name for another library's name, for a message; None if `allowed` has none.

    If Weft's parameter is not quite the same, the result is "name (difference)".
    """
    for own, parameter in PARAMETERS.items():
        if own not in allowed:
            continue
        if name in parameter.aliases:
            return own
        if name in parameter.near_aliases:
            return f"{own} ({parameter.near_aliases[name]})"
    return None


def _unsupported_rules(config: Mapping[str, Any], *, samples: bool) -> list[str]:
    """Return the rules of a generation_config.json that would change results and that Weft lacks.

    samples: `do_sample` of the file. Without it, Transformers uses no filters, so their rules are
    left out.
    """
    rules = {**_RULES, **(_FILTERS if samples else {})}
    values = ((name, config.get(name), neutral) for name, neutral in rules.items())
    return [name for name, value, neutral in values if value not in (None, neutral, [], {}, ())]


def is_neutral(params: SamplingParams, name: str) -> bool:
    """Return True if a parameter has its default value; that of a filter or penalty is "off"."""
    return bool(getattr(params, name) == getattr(_NEUTRAL, name))


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _constraint(_: str, value: object) -> Any:
    from ...constraints import as_constraint

    return as_constraint(value)


def _biases(
    name: str, values: Mapping[int, float] | Iterable[tuple[int, float]] | None
) -> tuple[tuple[int, float], ...]:
    """Validate logit biases; return them as pairs, sorted by token id. name: for the message."""
    try:
        pairs = dict(values or ())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is {values!r}; allowed is a mapping from token id to number"
        ) from error
    return tuple(sorted(_bias(token_id, value) for token_id, value in pairs.items()))


def _bias(token_id: object, value: object) -> tuple[int, float]:
    token = check_int("a token id in logit_bias", token_id, 0)
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(float(value)):
        raise ConfigError(
            f"logit_bias of token {token} is {value!r}; allowed is any number, "
            "-inf to forbid the token, inf to leave nothing else"
        )
    return token, float(value)


def _texts(name: str, values: str | Sequence[str] | None) -> tuple[str, ...]:
    if values is None:
        return ()
    try:
        stops = (values,) if isinstance(values, str) else tuple(values)
    except TypeError as error:
        raise ConfigError(f"{name} is {values!r}; allowed is a string or strings") from error
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(
                f"{name} has {stop!r}; allowed are non-empty strings. None is an empty list"
            )
        if (at := find_lone_surrogate(stop)) is not None:
            raise ConfigError(lone_surrogate_message(name, stop, at))
    return tuple(dict.fromkeys(stops))


# `weft solve` has only this flag.
TEMPERATURE = Flag(float, ("--temperature", "--temp"), "0 is greedy.")
# One row per parameter. Filters run in the order of their rows. Only top_n_sigma is before top-k,
# which ranks no more than k tokens: its cutoff is computed before any are ranked.
PARAMETERS: Mapping[str, Parameter] = {
    "n": Parameter(
        partial(check_int, low=1, high=MAX_N),
        aliases=("best_of", "num_return_sequences", "num_samples"),
        near_aliases={"num_beams": "plain branches"},
    ),
    "max_tokens": Parameter(
        partial(check_int, low=1),
        aliases=("max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"),
        near_aliases={"max_length": "it counts new tokens only"},
    ),
    "temperature": Parameter(
        partial(check_number, low=0.0),
        aliases=("temp",),
        near_aliases={"do_sample": "0 is greedy"},
        from_model=True,
        flag=TEMPERATURE,
    ),
    "top_n_sigma": Parameter(
        partial(check_number, low=0.0),
        aliases=("nsigma", "top_nsigma"),
        is_filter=True,
        flag=Flag(
            float,
            ("--top-n-sigma", "--top-nsigma"),
            "Keep tokens within this many standard deviations below the largest logit; 0: all.",
        ),
    ),
    "top_k": Parameter(
        partial(check_int, low=0, high=2**31 - 1),
        aliases=("topk",),
        from_model=True,
        is_filter=True,
        flag=Flag(int, ("--top-k",), "Keep the k likeliest; 0: all."),
    ),
    "typical_p": Parameter(
        partial(check_number, low=0.0, high=1.0, open_low=True),
        aliases=("typical",),
        from_model=True,
        is_filter=True,
    ),
    "top_p": Parameter(
        partial(check_number, low=0.0, high=1.0, open_low=True),
        aliases=("topp",),
        from_model=True,
        is_filter=True,
        flag=Flag(float, ("--top-p",), "Keep the likeliest tokens up to this probability."),
    ),
    "min_p": Parameter(
        partial(check_number, low=0.0, high=1.0),
        from_model=True,
        is_filter=True,
        flag=Flag(float, ("--min-p",), "Drop tokens below this share of the best probability."),
    ),
    "xtc_probability": Parameter(
        partial(check_number, low=0.0, high=1.0),
        is_filter=True,
        flag=Flag(
            float,
            ("--xtc-probability",),
            "With this probability, drop the top choices of a draw; 0: never.",
        ),
    ),
    "xtc_threshold": Parameter(
        partial(check_number, low=0.0, high=1.0),
        flag=Flag(float, ("--xtc-threshold",), "Tokens at least this likely are top choices."),
    ),
    "repetition_penalty": Parameter(
        partial(check_number, low=0.0, open_low=True),
        aliases=("repeat_penalty",),
        from_model=True,
        for_greedy=True,
    ),
    "presence_penalty": Parameter(check_number),
    "frequency_penalty": Parameter(check_number),
    "penalty_last_n": Parameter(_or_none(partial(check_int, low=1)), aliases=("repeat_last_n",)),
    "dry_multiplier": Parameter(
        partial(check_number, low=0.0),
        flag=Flag(
            float, ("--dry-multiplier",), "Penalty on continuing a repeated sequence; 0: none."
        ),
    ),
    "dry_base": Parameter(
        partial(check_number, low=1.0),
        flag=Flag(float, ("--dry-base",), "Growth of that penalty per repeated token."),
    ),
    "dry_allowed_length": Parameter(
        partial(check_int, low=1),
        flag=Flag(int, ("--dry-allowed-length",), "Shorter repetitions are free."),
    ),
    "dry_penalty_last_n": Parameter(
        _or_none(partial(check_int, low=1)),
        aliases=("dry_range",),
        flag=Flag(int, ("--dry-penalty-last-n",), "Number of tokens that DRY looks back."),
    ),
    "dry_sequence_breakers": Parameter(
        _texts,
        flag=Flag(
            list[str],
            ("--dry-sequence-breakers", "--dry-sequence-breaker"),
            r"Text that ends a repetition; can be repeated. \n is a newline.",
        ),
    ),
    "logit_bias": Parameter(_biases),
    "stop": Parameter(_texts, aliases=("stop_sequences", "stop_strings")),
    "seed": Parameter(
        _or_none(partial(check_int, low=0, high=2**64 - 1)), aliases=("random_seed",)
    ),
    "constraint": Parameter(_or_none(_constraint), aliases=("grammar", "response_format")),
    "temperature_first": Parameter(check_bool),
}
_MIROSTAT = (
    "a draw depends on stream, position and logits only, and mirostat's also on the surprisal of"
    " all earlier draws. top_n_sigma and min_p also adapt to the distribution"
)
# Parameters of other libraries that Weft does not have.
_UNSUPPORTED = {
    "length_penalty": "rank finished branches by their mean log-probability",
    "logprobs": "log-probabilities are always recorded",
    "include_stop_str_in_output": "a stop string stays in the text, and stop_string names it",
    **{
        name: f"give constraint=weft.constraints.TokenLimits({keyword}=…)"
        for name, keyword in {
            "min_tokens": "min_tokens",
            "min_new_tokens": "min_tokens",
            "bad_words": "bad_words",
            "bad_words_ids": "bad_words",
            "allowed_token_ids": "allowed",
            "stop_token_ids": "stop_ids",
        }.items()
    },
    **dict.fromkeys(("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta"), _MIROSTAT),
}
# Rules of generation_config.json that Weft does not support, with their neutral values.
_RULES: Mapping[str, Any] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "stop_strings": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "penalty_alpha": 0,
    "dola_layers": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
}
_FILTERS: Mapping[str, Any] = {"epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
# In the order of the keywords.
NAMES = tuple(field.name for field in fields(SamplingParams) if field.name in PARAMETERS)
# Parameters that a summary lists after the temperature.
_SUMMARY = (
    *(name for name, parameter in PARAMETERS.items() if parameter.is_filter),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
)
# Parameters that a request omits unless the call gives them, so that the server's config decides.
SERVER_SAMPLING = ("temperature", *_SUMMARY, "penalty_last_n")
_NEUTRAL = SamplingParams()
