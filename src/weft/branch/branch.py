"""`Branch`: forkable decoding state over the token tree."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from .._core.nopickle import NotPicklable
from .._core.remedies import OF_BRANCH, HidesRemedies, remedied
from .._core.sampling.metrics import entropy, surprisal
from .._core.sampling.params import SamplingParams
from .._core.sampling.rng import fresh_seed, stream_of
from .._core.sched.driver import deferred_interrupt
from .._core.sched.logits_cache import LogitsRow
from .._core.validation import check_int
from ..constraints.base import n_words
from ..errors import ConfigError, GrammarError, HasChildren
from .calls import CommitCall, PrefillCall, ReadCall, arun, run, warn_before_grammar
from .state import (
    Base,
    Floats,
    Forks,
    Metrics,
    Produced,
    State,
    accepted_tokens,
    convert_nats,
    draw,
    perplexity,
)

if TYPE_CHECKING:
    from ..lm.lm import LM

UNSUPPORTED_PARAMS = {
    "n": "fork() makes another branch",
    "max_tokens": "stop committing when there are enough",
    "stop": "look at the text after each commit",
}


class SamplingControls(State):
    """The part of `Branch` that controls how it draws, and inspects its next-token distribution."""

    # Settings ----------------------------------------------------------------------------------

    @property
    def logits(self) -> Floats:
        """A copy of the raw logits after the last token, or of those of `set_logits`: float32 [V].

        Runs the model if the logits were evicted.
        """
        self.lm.see_weights()
        return self.effective_logits().copy()

    def set_logits(self, logits: Any) -> None:
        """Replace the logits that the next token is drawn from, until the next commit or prefill.

        `logprob`, entropy, surprisal and perplexity remain those of the model.

        Args:
            logits: float32 [V], copied; no NaN, no +inf, and at least one value above -inf.

        Raises: ConfigError for another shape or other values.
        """
        self.check_open()
        try:
            array = np.array(logits, dtype=np.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"logits are a {type(logits).__name__} that holds no numbers ({error}); allowed are"
                f" {self.lm.info.n_vocab} numbers, as of a NumPy array"
            ) from error
        if array.shape != (self.lm.info.n_vocab,):
            raise ConfigError(
                f"logits of shape {array.shape}; allowed is ({self.lm.info.n_vocab},)"
            )
        if np.isnan(array).any() or np.isposinf(array).any() or np.isneginf(array).all():
            raise ConfigError(
                "logits have NaN or +inf, or nothing but -inf; allowed are numbers, -inf"
            )
        array.flags.writeable = False
        self.custom_logits, self.drawn = array, None

    def steer(self, biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        """Add biases to the logits of these tokens: -inf bans a token, inf bans all others.

        Replaces earlier steering. Unlike `set_logit_bias`, forks do not inherit it.
        """
        self.check_open()
        self.steering, self.drawn = self.validate_biases(biases), None

    def clear_steer(self) -> None:
        """Remove the biases of `steer`."""
        self.steer({})

    def set_logit_bias(self, biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        """Add biases to the logits of these tokens, replacing earlier ones. Forks inherit them."""
        self.check_open()
        self.set_params(replace_params(self.params, logit_bias=self.validate_biases(biases)))

    def clear_logit_bias(self) -> None:
        """Remove the logit bias."""
        self.set_logit_bias({})

    def set_sampler_params(
        self, params: SamplingParams | Mapping[str, Any] | None = None, **sampling: Any
    ) -> None:
        """Change the sampling parameters of later draws; random stream and penalty counts continue.

        Args:
            params: SamplingParams that replace all, or a mapping of keywords.
            sampling: keywords of SamplingParams that change single values.

        Raises: ConfigError.
        """
        self.check_open()
        defaults, sampling = merge_params(params, sampling, self.params)
        for name in set(sampling) & {*UNSUPPORTED_PARAMS, "constraint", "seed"}:
            use = {"constraint": "set_grammar", "seed": "reseed_sampler"}.get(name, "nothing")
            raise ConfigError(f"{name} is not set here; use {UNSUPPORTED_PARAMS.get(name, use)}")
        resolved = SamplingParams.resolve(sampling, defaults)
        kept = {"constraint": self.params.constraint, "seed": self.params.seed}
        resolved = replace_params(resolved, **kept)
        if resolved != self.params:
            self.set_params(resolved)

    def set_grammar(self, grammar: Any = None) -> None:
        """Constrain later tokens to a grammar, from its start; None or "" removes the grammar.

        Args:
            grammar: GBNF text, or anything that `constraint=` accepts.

        Raises: GrammarError, ConfigError.
        """
        self.check_open()
        constraint = None if grammar in (None, "") else grammar_to_constraint(grammar)
        self.set_params(replace_params(self.params, constraint=constraint), new_grammar=True)
        if self.position and (self.last is None or self.last.position < self.position - 1):
            warn_before_grammar(self, self.ids()[-1:])  # the last token is the caller's

    def set_grammar_lazy(self, grammar: Any, triggers: Sequence[Any]) -> None:
        """Constrain tokens to a grammar only after one of `triggers` occurs in the text.

        Args:
            triggers: words (str), or patterns and tokens as in `weft.constraints.Lazy`.
        """
        from ..constraints import Lazy

        self.set_grammar(Lazy(grammar_to_constraint(grammar), tuple(triggers)))

    def reseed_sampler(self, seed: int) -> None:
        """Restart the branch's random numbers from this seed."""
        self.check_open()
        self.reseed(validate_seed(seed), (0,))

    def is_legal(self, token: int) -> bool:
        """Return True if the grammar allows a token next, or if there is no grammar."""
        self.check_open()
        matcher = self.sampler.matcher
        return matcher is None or matcher.is_allowed(self.validate_token(token))

    def legal(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that the grammar allows next: bool [V]; all True without one.

        If the grammar forces a text, only the next token of one tokenization is allowed, which
        contains no banned token. If a finite bias affects the usual tokenization, all are allowed.
        """
        self.check_open()
        matcher = self.sampler.matcher
        bits = np.full(n_words(self.lm.info.n_vocab), -1, dtype=np.int32)
        if matcher is not None:
            sampler = self.steered_sampler()
            matcher.fill(bits, sampler.banned, sampler.biased)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        return allowed[: self.lm.info.n_vocab].astype(bool)

    # Statistics -------------------------------------------------------------------------------

    def model_entropy(self, base: Base = "nats") -> float:
        """Return the entropy of the model's raw next-token distribution, in `base`."""
        self.lm.see_weights()
        return convert_nats(entropy(self.model_logits()), base)

    def model_surprisal(self, token: int, base: Base = "nats") -> float:
        """Return -log p of a token as the next one, by the model's raw distribution, in `base`."""
        self.lm.see_weights()
        return convert_nats(surprisal(self.model_logits(), self.validate_token(token)), base)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprisal of accepted tokens by the model; inf without any."""
        self.check_open()
        return perplexity(self.last.raw, self.last.n_raw) if self.last else math.inf

    @property
    def sampling_perplexity(self) -> float:
        """exp of the mean surprisal of drawn tokens under the filtered distributions."""
        self.check_open()
        return perplexity(self.last.kept, self.last.n_kept) if self.last else math.inf

    @property
    def metrics(self) -> Metrics:
        """Statistics of this branch. Cost: O(nodes of the path)."""
        self.check_open()
        kv_tokens = self.registry.kv_tokens(self)
        return Metrics(
            position=self.position,
            n_accepted=self.last.n if self.last else 0,
            perplexity=self.perplexity,
            sampling_perplexity=self.sampling_perplexity,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self.lm.info.kv_bytes_per_token,
        )


def merge_params(
    params: SamplingParams | Mapping[str, Any] | None,
    sampling: dict[str, Any],
    defaults: SamplingParams,
) -> tuple[SamplingParams, dict[str, Any]]:
    """Split a call's sampling arguments into (default parameters, explicit keywords).

    Args:
        params: SamplingParams replace the defaults; a mapping adds to the keywords.
        sampling: the keywords.
        defaults: the parameters to use without `params`.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or defaults, sampling
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"params is {params!r}; allowed are SamplingParams, or a mapping of their keywords"
        )
    return defaults, {**params, **sampling}


def replace_params(params: SamplingParams, **changed: Any) -> SamplingParams:
    """Return a validated copy of the parameters with some values changed."""
    return SamplingParams.resolve(changed, params)


def validate_seed(seed: int) -> int:
    """Return the seed. Raises: ConfigError if it is None or not a valid seed."""
    checked = SamplingParams(seed=seed).seed
    if checked is None:
        raise ConfigError("seed is None; allowed is an integer from 0 to 2**64 - 1")
    return checked


def grammar_to_constraint(grammar: Any) -> Any:
    """Parse a str as GBNF into a constraint; return any other value unchanged."""
    if not isinstance(grammar, str):
        return grammar
    from ..constraints import GBNF
    from ..constraints.kinds import hint_for

    if grammar and "::=" not in grammar:
        raise GrammarError(
            f"grammar is {grammar!r:.80}; allowed is GBNF, whose rules are `name ::= …`, or what"
            " constraint= takes",
            hint=hint_for(grammar),
        )
    return GBNF(grammar)


@remedied(OF_BRANCH, camel_case=True)
class Branch(
    NotPicklable,
    SamplingControls,
    HidesRemedies,
    instead="fork() it, or save it and open it elsewhere: branch.save(path), Branch.load(lm, path)",
):
    """A sequence being decoded: tokens, logits after the last one, and a sampler with its state.

    A branch is cheap: its tokens are a place in the LM's tree. Branches with the same prefix share
    its KV. Any number of branches may be live. If the KV budget is full, the KV of idle branches is
    evicted and computed again when they are used.

    What `fork` copies:

    - Tokens, KV and the logits at the tip are shared.
    - Sampling parameters, logit bias and grammar are copied, with the grammar's state.
    - Penalty counts and perplexities are copied and continue.
    - The random stream is its own; `seed=` selects it.
    - Steering is not copied.

    `produce` changes nothing: it is a function of the random stream, the position and the logits,
    so two calls return the same token. Every method that runs the model has an awaitable form with
    an `a` before its name. Concurrent calls on one branch wait for each other.
    """

    def __init__(self, lm: LM, place: Any = None, params: Any = None, sampler: Any = None) -> None:
        """Internal: users call `Branch.create` or `fork`, which validate their arguments."""
        if sampler is None:
            raise ConfigError("make a branch with Branch.create(lm), or with fork()")
        super().__init__(lm, place, params, sampler)
        self._parent: Branch | None = None
        self._forks: Forks | None = None
        self._fork_head = 0
        self._forks_at: dict[int, int] = {}
        self.registry.branches.add(self)

    @classmethod
    def create(
        cls,
        lm: LM,
        position: int = 0,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        grammar: Any = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Branch:
        """Create an empty branch.

        Args:
            position: must be 0.
            params: SamplingParams that replace all defaults, or a mapping of keywords. Parameters
                that are not given come from `lm.chat_defaults`.
            grammar: GBNF text, or anything that `constraint=` accepts.
            adapter: the name of a LoRA adapter, see `LM.add_adapter`; forks inherit it.
            sampling: keywords of SamplingParams.

        Raises:
            ConfigError, GrammarError: an argument is outside what is allowed.
            Unsupported: the engine generates full runs only, such as a remote server.
        """
        if not hasattr(lm, "scheduler"):
            raise ConfigError(f"a branch is of an LM, not {type(lm).__name__}; see weft.load")
        if position != 0:
            raise ConfigError(f"position is {position!r}; allowed is 0: prefill the tokens before")
        defaults, sampling = merge_params(params, sampling, lm.chat_defaults)
        for name in set(sampling) & set(UNSUPPORTED_PARAMS):
            raise ConfigError(f"{name} has no meaning for a branch: {UNSUPPORTED_PARAMS[name]}")
        if grammar is not None:
            sampling["constraint"] = grammar_to_constraint(grammar)
        resolved = SamplingParams.resolve(sampling, defaults)
        if resolved.seed is None:
            resolved = replace_params(resolved, seed=fresh_seed())
        assert resolved.seed is not None
        sampler = lm.sampler(resolved, stream_of(resolved.seed, (0,)), in_steps=True)
        return cls(lm, lm.place((), namespace=adapter), resolved, sampler)

    # Running ----------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append prompt tokens and run them; grammar, penalties and metrics ignore them.

        `grow` also counts the prompt for repetition_penalty and DRY. To count it here, call
        `accept` with each of its tokens first.

        Afterwards the branch has the logits after the last token.

        Args:
            tokens: token ids; none does nothing.

        Raises: ContextOverflow or ConfigError before anything runs; then nothing has changed.
        """
        run(PrefillCall(self.lm, [(self, tokens)]))

    async def aprefill(self, tokens: Sequence[int]) -> None:
        """The async form of `prefill`."""
        await arun(PrefillCall(self.lm, [(self, tokens)]))

    def commit(self, token: int) -> None:
        """Append a generated token, run the model on it, and update grammar, penalties and metrics.

        Atomic: on any failure nothing has changed.

        Raises: ConstraintError if the grammar forbids the token; ContextOverflow; KVFull;
        ForwardError.
        """
        run(CommitCall(self.lm, [(self, token)]))

    async def acommit(self, token: int) -> None:
        """The async form of `commit`."""
        await arun(CommitCall(self.lm, [(self, token)]))

    def produce(self) -> Produced:
        """Draw the next token without appending it. Runs the model only if the logits were evicted.

        Changes nothing. The token is drawn from the logits after the last token that ran. Tokens
        passed to `accept` affect grammar and penalties, but not the logits.

        Raises: DeadEnd if no token is allowed; ConfigError without logits.
        """
        self.check_open()
        self.lm.see_weights()
        drawn = self.drawn
        if drawn is not None:  # the step of the last commit has drawn it
            return drawn
        if self.row_for_draw() is not None:
            self.model_logits()
        return draw([self])[0]

    async def aproduce(self) -> Produced:
        """The async form of `produce`."""
        row, rows = self.row_for_draw(), self.lm.scheduler.logits_cache
        await self.lm.asee_weights()
        while row is not None and self.drawn is None and rows.read(row) is None:
            await arun(ReadCall(self.lm, [self]))
        return draw([self])[0]

    def accept(self, token: int) -> None:
        """Count a token that the caller will run later: update grammar, penalties and metrics only.

        A later commit or prefill of the same token does not count it again. Atomic: on a failure
        nothing has changed.

        Raises: ConstraintError if the grammar forbids the token; ContextOverflow.
        """
        self.check_open()
        self.lm.see_weights()
        self.accept_without_run(self.validate_token(token))

    def __iter__(self) -> Iterator[Produced]:
        """Draw and commit tokens, and yield each, until an end token.

        The end token is neither committed nor yielded.
        """
        while not (piece := self.produce()).is_stop:
            self.commit(piece.token)
            yield piece

    async def __aiter__(self) -> AsyncIterator[Produced]:
        """The awaitable form of iterating: `async for piece in branch`."""
        while not (piece := await self.aproduce()).is_stop:
            await self.acommit(piece.token)
            yield piece

    # Forks ------------------------------------------------------------------------------------

    def fork(
        self, at: int | None = None, *, seed: int | None = None, clone_logits: bool = True
    ) -> Branch:
        """Create a branch that continues from here, or from position `at` of this path.

        Runs nothing.

        Args:
            at: a position from 0 to `position`; None: the tip.
            seed: the seed of its random stream; None: a stream derived from this branch's.
            clone_logits: False leaves it without logits until it prefills or commits.

        Raises:
            ConfigError: the position or seed is invalid, or tokens passed to `accept` have not run.

        Cost: O(1); with `at`, O(accepted tokens).
        """
        self.check_open()
        self._check_nothing_accepted_ahead("fork")
        position = self.position if at is None else self._validate_position("at", at)
        is_tip = position == self.position
        last = self.last if is_tip else self.accepted_by(position)
        sampler = self.sampler.clone() if is_tip else self.sampler_at(last, self.sampler.stream)
        place = self.place.fork() if is_tip else self.place.at(position)
        child = type(self)(self.lm, place, self.params, sampler)
        child.last, child.grammar_from = last, self.grammar_from
        if clone_logits and position:
            child.row = self.row if is_tip else LogitsRow()
            child.custom_logits = self.custom_logits if is_tip else None
        child.stream = self.stream.clone() if is_tip else child.stream
        ordinal = self._forks_at.get(position, 0)
        self._forks_at[position] = ordinal + 1
        if seed is None:
            child.reseed(self.seed, (*self.lineage, position, ordinal))
        else:
            child.reseed(validate_seed(seed), (0,))
        child._parent, child._fork_head = self, position
        if self._forks is None:
            self._forks = Forks()
        self._forks.add(child)
        return child

    def rewind(self, n: int, *, seed: int | None = None) -> None:
        """Remove the last n tokens, with their penalties, grammar state and metrics.

        Runs nothing. The random stream depends on the position, so the branch draws the same tokens
        again, unless `seed` selects another stream.

        Raises: ConfigError for an invalid n or seed, or if tokens passed to `accept` have not run.

        Cost: O(accepted tokens).
        """
        self._check_nothing_accepted_ahead("rewind")
        stream_seed = None if seed is None else validate_seed(seed)
        if check_int("n", n, 0, self.position):
            self._rewind_to(self.position - n)
        if stream_seed is not None:
            self.reseed(stream_seed, (0,))

    def _rewind_to(self, position: int) -> None:
        """Remove the tokens from `position` on, with their penalties, grammar state and metrics."""
        last = self.accepted_by(position)
        sampler = self.sampler_at(last, self.sampler.stream)
        with deferred_interrupt():
            self.last, self.sampler = last, sampler
            self.set_tip(self.place.at(position), None)
            self._fork_head = min(self._fork_head, position)
            self.stream = self.lm.text.stream()

    def prune(self) -> None:
        """End this branch. Its KV can then be evicted. A second call does nothing.

        Raises: HasChildren, with their names.
        """
        if self.disposed:
            return
        children = self.children
        if children:
            raise HasChildren(
                f"{self!r} has children: {', '.join(map(repr, children))};"
                " prune them first, or prune_subtree"
            )
        self.end("prune")

    def prune_subtree(self) -> None:
        """End this branch and all branches forked from it, the most recent forks first."""
        if self.disposed:
            return
        below, stack = [], [self]
        while stack:
            branch = stack.pop()
            below.append(branch)
            stack += branch.children
        for branch in reversed(below):
            branch.end(f"prune_subtree of {self!r}")

    def end(self, call: str) -> None:
        """Release all resources. Later uses of the branch raise an error that names `call`."""
        self.detach()
        self.ended_by = call
        self.row = self.custom_logits = self.last = self.drawn = None
        self.place = self.lm.place(()) if not self.lm.closed else self.place.at(0)
        self.registry.branches.discard(self)

    def detach(self) -> None:
        """Remove the link to the parent, so that ending the parent's subtree keeps this branch."""
        parent = self._parent
        if parent is not None and parent._forks is not None:
            parent._forks.discard(self)
        self._parent, self._fork_head = None, 0

    def become_root(self) -> None:
        """Remove the links to the parent and the children."""
        self.unused_in = None
        self._parent, self._forks, self._fork_head = None, None, 0

    # Topology ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """All token ids of the path, a new list. Cost: O(position)."""
        self.check_open()
        return self.ids()

    @property
    def text(self) -> str:
        """The text of the accepted tokens. Cost: O(accepted tokens)."""
        self.check_open()
        return self.lm.detokenize(accepted_tokens(self.last))

    @property
    def fork_head(self) -> int:
        """The position at which it was forked; 0 for a root."""
        self.check_open()
        return self._fork_head

    @property
    def parent(self) -> Branch | None:
        """The branch it was forked from; None for a root."""
        self.check_open()
        return self._parent

    @property
    def children(self) -> list[Branch]:
        """The live branches forked from this one, oldest first.

        A branch keeps a reference to a fork until the fork has run a token; afterwards only the
        caller does.
        """
        self.check_open()
        return [] if self._forks is None else cast("list[Branch]", self._forks.live())

    @property
    def is_leaf(self) -> bool:
        """True if it has no children."""
        return not self.children

    @property
    def is_active(self) -> bool:
        """True if its KV is resident. Otherwise it is computed again when used."""
        self.check_open()
        return self.registry.active(self)

    @property
    def disposed(self) -> bool:
        """True if the branch has ended."""
        return self.ended_by is not None

    def save(self, path: str | Path | None = None) -> dict[str, Any]:
        """Serialize tokens, sampler state, grammar state and metrics as JSON data.

        Args:
            path: also write the data to this file, atomically.

        Raises: StoreError if the file cannot be written.
        """
        from .saved import save

        self.check_open()
        return save(self, path)

    @classmethod
    def load(cls, lm: LM, source: Mapping[str, Any] | str | Path) -> Branch:
        """Restore a branch from the data or file of `save`. KV and logits are computed when used.

        Raises:
            FormatError: the file is no saved branch, or is broken.
            ModelMismatch: another model or adapter saved it.
            StoreError: the file cannot be read.
            ConfigError: the LM does not have the branch's adapter; add it first.
        """
        from .saved import load

        return load(cls, lm, source)

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        self.prune_subtree()

    def __repr__(self) -> str:
        state = "ended" if self.ended_by is not None else f"at {self.depth} tokens"
        return f"<Branch {self.number} {state}>"

    def _validate_position(self, name: str, position: int) -> int:
        """Return `position`; raise ConfigError unless it is from 0 to the branch's position."""
        return check_int(name, position, 0, self.position)

    def _check_nothing_accepted_ahead(self, call: str) -> None:
        """Raise ConfigError if `accept` counted tokens that have not run yet."""
        self.check_open()
        if self.ahead:
            raise ConfigError(f"{self!r} has accepted tokens to commit; do that before {call}")
