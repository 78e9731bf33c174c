"""Samplers of runs, and the chain that draws for many of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..constraints.base import Matcher
from ..constraints.masks import Masks
from .history import History
from .metrics import Moments, moments, shifted
from .params import SamplingParams
from .rng import Uniforms
from .scratch import Scratch
from .settings import Settings

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

NOTHING = -1  # instead of a token, where a constraint leaves none
_BLOCK = 64


@dataclass(slots=True)
class DrawResult:
    """Tokens drawn, one a sampler, in their order.

    ids: int64 [B]. logprobs, entropies: float32 [B], nats; from raw logits over the full
    vocabulary, whatever the temperature, the filters and the penalties were.
    kept: float32 [B] log-probabilities of what was drawn among what was left to draw from; None
    where whoever drew does not tell.
    """

    ids: Ids
    logprobs: Floats
    entropies: Floats
    kept: Floats | None = None


@dataclass(slots=True)
class DrawBatch:
    """What to draw from one step's logits: sampler i of `chain` from row rows[i].

    rows: int64 [B]. positions: uint64 [B], the absolute position that the drawn token will have.
    """

    rows: Ids
    chain: Chain
    positions: NDArray[np.uint64]


class Sampler:
    """How one run draws: its parameters, its random stream, the tokens its penalties count, and
    where it stands in its constraint.

    needs_host: the next draw depends on tokens that must have reached the host.
    matcher: of the constraint, this sampler's own; None without one.
    """

    __slots__ = ("_history", "greedy", "matcher", "needs_host", "params", "stream")

    def __init__(self, params: SamplingParams, stream: int, matcher: Matcher | None = None) -> None:
        self.params = params
        self.stream = stream
        self.matcher = matcher
        self.greedy = params.temperature == 0
        penalised = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.needs_host = penalised or matcher is not None
        self._history = History() if penalised else None

    @property
    def history(self) -> History | None:
        """The tokens counted so far; None without penalties."""
        return self._history

    def prime(self, prompt_ids: Iterable[int]) -> None:
        """Note the prompt's tokens: repetition_penalty counts them, the other two do not."""
        if self._history is not None:
            self._history.see(prompt_ids)

    def accept(self, token: int) -> None:
        """Count one generated token, and go on by it in the constraint.

        Raises: ConstraintError if the constraint forbids it; nothing is counted then.
        """
        if self.matcher is not None:
            self.matcher.accept(token)
        if self._history is not None:
            self._history.generate(token)

    def count(self, tokens: Iterable[int]) -> None:
        """Count generated tokens for the penalties alone."""
        if self._history is not None:
            for token in tokens:
                self._history.generate(token)

    def clone(self) -> Sampler:
        """Return a sampler with the same stream and its own copy of counts and matcher."""
        matcher = None if self.matcher is None else self.matcher.clone()
        twin = Sampler(self.params, self.stream, matcher)
        twin._history = None if self._history is None else self._history.copy()
        return twin


class Chain:
    """Draws for B samplers at once; make it once and keep it while the same samplers step together.

    What a sampler draws from given logits does not depend on its companions or their order.
    A chain belongs to one thread.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = tuple(samplers)
        self._uniforms = Uniforms([sampler.stream for sampler in samplers])
        self._scratch = Scratch()
        self._rows = np.arange(len(samplers))
        self._settings = Settings([sampler.params for sampler in samplers])
        self._stateful = any(sampler.needs_host for sampler in samplers)
        self._matchers = [sampler.matcher for sampler in samplers]
        constrained = any(matcher is not None for matcher in self._matchers)
        self._masks = Masks(len(samplers)) if constrained else None
        self._alike = not self._stateful and _alike(samplers)

    def prepare(self, n_vocab: int) -> None:
        """Start on the masks of the next draw, beside whatever comes before it."""
        if self._masks is not None:
            self._masks.begin(self._matchers, n_vocab)

    def draw(self, logits: Floats, rows: Ids, positions: NDArray[np.uint64]) -> DrawResult:
        """Draw one token a sampler.

        logits: float32 [R, V], raw; not modified. rows: int64 [B], the logits row of
        each sampler.
        positions: uint64 [B]. A constrained sampler that no token is left to gets NOTHING.
        Raises: ForwardError if a row has NaN or +inf, or is all -inf; DeadEnd if logit_bias alone
        leaves no token.
        """
        if not self.samplers:
            return DrawResult(self._rows, *np.zeros((3, 0), dtype=np.float32))
        raw, lane = self._distinct(logits, rows)
        found = moments(raw, self._scratch)
        if lane is None:
            ids, kept = self._choose(self._settings, raw, found, None, positions)
            return DrawResult(ids, _logprobs(raw, self._rows, ids, found), found.entropies, kept)
        if self._alike:
            settings = Settings([self.samplers[0].params] * len(raw))
            ids, kept = self._choose(settings, raw, found, lane, positions)
        else:
            wide = Moments(*(part[lane] for part in found))
            ids, kept = self._choose(self._settings, raw[lane], wide, None, positions)
        return DrawResult(ids, _logprobs(raw, lane, ids, found), found.entropies[lane], kept)

    def _distinct(self, logits: Floats, rows: Ids) -> tuple[Floats, Ids | None]:
        """Return the logits rows in use, and which of them each sampler draws from (None: own)."""
        n = len(self._rows)
        start = int(rows[0])
        if np.array_equal(rows, self._rows + start):
            return logits[start : start + n], None
        used, lane = np.unique(rows, return_inverse=True)
        if len(used) == n:
            return logits[rows], None
        return logits[used], lane

    def _choose(
        self,
        settings: Settings,
        logits: Floats,
        found: Moments,
        lane: Ids | None,
        positions: NDArray[np.uint64],
    ) -> tuple[Ids, Floats]:
        histories = [sampler.history for sampler in self.samplers] if self._stateful else []
        if self._masks is None:
            edited, dead = settings.edit(logits, histories), self._rows[:0]
        else:
            masked = self._masks.over(logits, self._matchers)
            edited = settings.edit(masked, histories, may_be_dead=True)
            dead = np.flatnonzero(np.isneginf(edited.max(axis=1)))
            if dead.size:
                edited = edited.copy()
                edited[dead] = logits[dead]
        ids, kept = self._choose_from(settings, edited, logits, found, lane, positions)
        ids[dead] = NOTHING
        return ids, kept

    def _choose_from(
        self,
        settings: Settings,
        edited: Floats,
        logits: Floats,
        found: Moments,
        lane: Ids | None,
        positions: NDArray[np.uint64],
    ) -> tuple[Ids, Floats]:
        if settings.all_greedy:
            largest: Ids = edited.argmax(axis=1)
            ids = largest if lane is None else largest[lane]
            return ids, np.zeros(len(ids), dtype=np.float32)
        left = settings.temper(settings.filter(edited))
        weights = found.weights if left is logits else _weights(left)
        ids, chances = self._pick(weights, self._uniforms.at(positions), lane)
        greedy = settings.greedy_rows
        if greedy.size:
            ids[greedy], chances[greedy] = edited[greedy].argmax(axis=1), 1
        return ids, np.log(chances, dtype=np.float32)

    def _pick(
        self, weights: Floats, u: NDArray[np.float64], lane: Ids | None
    ) -> tuple[Ids, Floats]:
        """Return for each u the first id whose cumulative weight exceeds u * total, and its share.

        Sums blocks first, then looks inside one block a row: five times as fast as summing every
        prefix.
        """
        n_rows, n_vocab = weights.shape
        n_blocks = -(-n_vocab // _BLOCK)
        padded = self._scratch.take("padded", (n_rows, n_blocks * _BLOCK), np.float64)
        padded[:, :n_vocab] = weights
        padded[:, n_vocab:] = 0
        blocks = padded.reshape(n_rows, n_blocks, _BLOCK)
        edges = np.cumsum(blocks.sum(axis=2), axis=1)
        rows = np.arange(n_rows) if lane is None else lane
        goal = (u * edges[rows, -1])[:, None]
        block = (edges[rows] > goal).argmax(axis=1)
        before = np.where(block > 0, edges[rows, block - 1], 0.0)
        inside = blocks[rows, block]
        passed = np.cumsum(inside, axis=1) + before[:, None] > goal
        offset = passed.argmax(axis=1)
        short = np.flatnonzero(~passed[:, -1])
        if short.size:
            # Rounding left the block's own sums a hair short of its edge: its last weighty id.
            offset[short] = _BLOCK - 1 - (inside[short, ::-1] > 0).argmax(axis=1)
        ids: Ids = block * _BLOCK + offset
        chances: Floats = (weights[rows, ids] / edges[rows, -1]).astype(np.float32)
        return ids, chances


def _alike(samplers: Sequence[Sampler]) -> bool:
    """Whether all draw by the same rules; a different seed or stop makes it False, at no harm."""
    first = samplers[0].params if samplers else None
    return all(sampler.params is first or sampler.params == first for sampler in samplers)


def _weights(logits: Floats) -> Floats:
    weights = shifted(logits)
    np.exp(weights, out=weights)
    return weights


def _logprobs(raw: Floats, lane: Ids, ids: Ids, found: Moments) -> Floats:
    logprobs: Floats = raw[lane, ids] - found.peak[lane] - found.log_total[lane]
    return logprobs
