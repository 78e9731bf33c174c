"""How a branch draws, and what it tells: the settings and figures of a `Branch`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..constraints.base import n_words
from ..errors import ConfigError
from ..sampling.metrics import entropy, surprisal
from ..sampling.params import SamplingParams
from .metrics import Base, Metrics, in_base, perplexity
from .state import Floats, State

# What the known system draws by when nothing is said.
DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
NOT_HERE = {
    "n": "fork() makes another branch",
    "max_tokens": "stop committing when there are enough",
    "stop": "look at the text after each commit",
}


class Tunable(State):
    """A state whose drawing can be changed as it goes."""

    # Settings ----------------------------------------------------------------------------------

    @property
    def logits(self) -> Floats:
        """Raw logits at the tip: float32 [V], the caller's own. Runs the model if they are gone."""
        self.lm.see_weights()
        return self.raw().copy()

    def set_logits(self, logits: Any) -> None:
        """Draw from these instead, until the next commit or prefill. float32 [V], copied."""
        self.alive()
        array = np.array(logits, dtype=np.float32)
        if array.shape != (self.lm.info.n_vocab,):
            raise ConfigError(
                f"logits of shape {array.shape}; allowed is ({self.lm.info.n_vocab},)"
            )
        if np.isnan(array).any() or np.isposinf(array).any() or np.isneginf(array).all():
            raise ConfigError(
                "logits have NaN or +inf, or nothing but -inf; allowed are numbers, -inf"
            )
        self.row, self.drawn = self.lm.scheduler.rows.own(array), None

    def steer(self, biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        """Add to the logits of these tokens: -inf bans, inf leaves nothing else.

        Replaces earlier steering. Forks do not have it.
        """
        self.alive()
        self.steering, self.drawn = self.biases(biases), None

    def clear_steer(self) -> None:
        """Steer no longer."""
        self.steer({})

    def set_logit_bias(self, biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        """As `steer`, but forks have it too. Replaces the earlier ones."""
        self.alive()
        self.redraw(replace_params(self.params, logit_bias=self.biases(biases)))

    def clear_logit_bias(self) -> None:
        """Have no logit bias."""
        self.set_logit_bias({})

    def set_sampler_params(
        self, params: SamplingParams | Mapping[str, Any] | None = None, **sampling: Any
    ) -> None:
        """Draw by other parameters from now on; random stream and penalty counts go on.

        Raises: ConfigError.
        """
        self.alive()
        defaults, sampling = with_params(params, sampling, self.params)
        for name in set(sampling) & {*NOT_HERE, "constraint", "seed"}:
            use = {"constraint": "set_grammar", "seed": "reseed_sampler"}.get(name, "nothing")
            raise ConfigError(f"{name} is not set here; use {NOT_HERE.get(name, use)}")
        resolved = SamplingParams.resolve(sampling, defaults)
        own = {"constraint": self.params.constraint, "seed": self.params.seed}
        resolved = replace_params(resolved, **own)
        if resolved != self.params:
            self.redraw(resolved)

    def set_grammar(self, grammar: Any = None) -> None:
        """Allow only what a grammar allows, from its beginning; None or "": anything.

        Raises: GrammarError, ConfigError.
        """
        self.alive()
        constraint = None if grammar in (None, "") else constraint_of(grammar)
        self.redraw(replace_params(self.params, constraint=constraint), new_grammar=True)

    def set_grammar_lazy(self, grammar: Any, triggers: Sequence[Any]) -> None:
        """Allow anything until one of `triggers` comes, then what the grammar allows.

        triggers: a str is a word; see `weft.constraints.Lazy` for patterns and tokens.
        """
        from ..constraints import Lazy

        self.set_grammar(Lazy(constraint_of(grammar), tuple(triggers)))

    def reseed_sampler(self, seed: int) -> None:
        """Draw from the random stream of this seed."""
        self.alive()
        checked = SamplingParams(seed=seed).seed
        assert checked is not None
        self.reseed(checked, (0,))

    def is_legal(self, token: int) -> bool:
        """Whether the grammar allows a token next; True without one."""
        self.alive()
        matcher = self.sampler.matcher
        return matcher is None or matcher.is_allowed(self.checked_token(token))

    def legal(self) -> NDArray[np.bool_]:
        """Return which tokens the grammar allows next: bool [V]; all True without one."""
        self.alive()
        matcher = self.sampler.matcher
        bits = np.full(n_words(self.lm.info.n_vocab), -1, dtype=np.int32)
        if matcher is not None:
            matcher.fill(bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        return allowed[: self.lm.info.n_vocab].astype(bool)

    # Figures ----------------------------------------------------------------------------------

    def model_entropy(self, base: Base = "nats") -> float:
        """Return the entropy of the raw distribution at the tip."""
        self.lm.see_weights()
        return in_base(entropy(self.raw()), base)

    def model_surprisal(self, token: int, base: Base = "nats") -> float:
        """Return -log p of a token at the tip, by the raw distribution."""
        self.lm.see_weights()
        return in_base(surprisal(self.raw(), self.checked_token(token)), base)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprisal of accepted tokens, by the model; inf without any."""
        self.alive()
        return perplexity(self.last.raw, self.last.n_raw) if self.last else math.inf

    @property
    def sampling_perplexity(self) -> float:
        """The same by what the filters left; tokens that `produce` did not draw are not counted."""
        self.alive()
        return perplexity(self.last.kept, self.last.n_kept) if self.last else math.inf

    @property
    def metrics(self) -> Metrics:
        """Figures of this branch. Cost: O(nodes of the path)."""
        self.alive()
        kv_tokens = self.tenancy.kv_tokens(self)
        return Metrics(
            position=self.position,
            n_accepted=self.last.n if self.last else 0,
            perplexity=self.perplexity,
            sampling_perplexity=self.sampling_perplexity,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self.lm.info.kv_bytes_per_token,
        )


def with_params(
    params: SamplingParams | Mapping[str, Any] | None, sampling: dict[str, Any], own: SamplingParams
) -> tuple[SamplingParams, dict[str, Any]]:
    """Return what holds where nothing is said, and what is said: `params` may be either."""
    if params is None or isinstance(params, SamplingParams):
        return params or own, sampling
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"params is {params!r}; allowed are SamplingParams, or a mapping of their keywords"
        )
    return own, {**params, **sampling}


def replace_params(params: SamplingParams, **changed: Any) -> SamplingParams:
    """Return parameters with some changed; checked."""
    return SamplingParams.resolve(changed, params)


def constraint_of(grammar: Any) -> Any:
    """Return the constraint of a grammar: text is GBNF."""
    if not isinstance(grammar, str):
        return grammar
    from ..constraints import GBNF

    return GBNF(grammar)
