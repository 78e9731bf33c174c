"""The state of one branch: where it is, how it draws, and what it has accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..adapters import name_of
from ..errors import ConfigError, StaleHandle
from ..kv.cursor import Place
from ..sampling.chain import Sampler
from ..sampling.metrics import surprisal
from ..sampling.params import SamplingParams
from ..sampling.rng import stream_of
from ..sched.driver import deferred_interrupt
from ..sched.rows import LogitsRow
from .metrics import Accepted, Produced, chain, tokens_of
from .tenancy import Tenancy

if TYPE_CHECKING:
    from ..lm import LM
    from ..sched.lines import Line

Floats = NDArray[np.float32]


class State:
    """What commits and draws work on. Users hold a `Branch`, which is one.

    place: the tip. sampler: with its random stream, counted tokens and matcher. row: raw logits at
    the tip, None before any. last: the last accepted token. drawn: of `produce`, at this tip.
    """

    def __init__(self, lm: LM, place: Place, params: SamplingParams, sampler: Sampler) -> None:
        self.lm = lm
        self.tenancy = Tenancy.of(lm)
        self.number = next(self.tenancy.numbers)
        self.line: Line | None = None
        self._place = place
        self._depth = place.depth
        self.params = params
        self.sampler = sampler
        self.row: LogitsRow | None = None
        self.last: Accepted | None = None
        self._rows = lm.scheduler.rows
        self._drawn: Produced | None = None
        self._drawn_when = 0
        self.steering: dict[int, float] = {}
        self.grammar_from = 0  # tokens accepted before the grammar began
        self.stream = lm.text.stream()
        self.busy: Future[Any] | None = None
        self.ended_by: str | None = None
        self._ahead: list[int] = []  # accepted, and not yet committed or prefilled
        self._seed = params.seed if params.seed is not None else 0
        self._lineage: tuple[int, ...] = (0,)

    @property
    def position(self) -> int:
        """Tokens of the path: the position that the next token will have."""
        self.alive()
        return self._depth

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter that it runs with; None: the model alone."""
        return name_of(self._place.namespace)

    @property
    def drawn(self) -> Produced | None:
        """What was drawn at this tip; None once the rows were cleared that it came from."""
        return self._drawn if self._drawn_when == self._rows.n_clears else None

    @drawn.setter
    def drawn(self, drawn: Produced | None) -> None:
        self._drawn, self._drawn_when = drawn, self._rows.n_clears

    @property
    def place(self) -> Place:
        """The tip in the tree; what was committed since the last time goes there at the next step.

        That costs a commit its speed: `base`, `ids` and `position` do without.
        """
        line, self.line = self.line, None
        if line is not None:
            place = self.lm.scheduler.lines.release(line)
            # A commit that was interrupted may have run its token all the same.
            self._place = place if place.depth == self._depth else place.at(self._depth)
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        line, self.line = self.line, None
        if line is not None:
            self.lm.scheduler.lines.release(line)
        self._place, self._depth = place, place.depth

    @property
    def base(self) -> Place:
        """The tip, or the place after which its line has the rest."""
        return self._place if self.line is None else self.line.base

    def ids(self) -> list[int]:
        """Return all token ids of the path, a new list."""
        line = self.line
        if line is None:
            return self._place.ids()
        with self.lm.scheduler.lock:
            return line.end().ids()[: self._depth]

    def going_on(self) -> Line:
        """Return the line that commits go on with."""
        if self.line is None:
            self.line = self.lm.scheduler.lines.begin(self, self._place)
        return self.line

    def advanced(self, line: Line, token: int) -> None:
        """A commit has run a token after the tip, on a line of this branch."""
        if self.line is line:
            self._depth += 1
        else:  # forked while the commit was on its way
            self.place = self.lm.place((token,), after=self._place)

    def alive(self) -> None:
        """Raise StaleHandle if the branch has ended."""
        if self.ended_by is not None:
            raise StaleHandle(f"{self!r} was ended by {self.ended_by}; fork or create another")

    def checked_token(self, token: int) -> int:
        """Return a token id of the vocabulary, or refuse it."""
        n_vocab = self.lm.info.n_vocab
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ConfigError(f"a token is {token!r}; allowed are ids from 0 to {n_vocab - 1}")
        index = int(token)
        if not 0 <= index < n_vocab:
            raise ConfigError(f"token id {index}; allowed are 0 to {n_vocab - 1}")
        return index

    # Accepting --------------------------------------------------------------------------------

    def produced(self, token: int, logprob: float, kept: float) -> Produced:
        """Return what was drawn, as users see it."""
        is_stop = token in self.lm.text.stop_ids
        return Produced(token, self.stream.peek(token), is_stop, logprob, kept)

    def accept_now(self, token: int) -> None:
        """Go on by a token without running it."""
        known = None if self._ahead else self.surprisals(token)
        if known is None and self.position and not self._ahead:
            known = (surprisal(self.raw(), token), None)
        sampler = self.sampler.clone() if self.sampler.needs_host else self.sampler
        sampler.accept(token)
        at = self.position + len(self._ahead)
        last = Accepted(self.last, at, token, *(known or (None, None)))
        with deferred_interrupt():
            self.sampler, self.drawn, self.last = sampler, None, last
            self._ahead.append(token)

    def accepted_ahead(self, token: int) -> bool:
        """Whether `accept` was called for this token already. Raises: ConfigError for another."""
        if not self._ahead:
            return False
        self.check_ahead([token])
        return True

    def check_ahead(self, ids: Sequence[int]) -> int:
        """Return how many of these were accepted ahead; refuse what contradicts that."""
        n = min(len(ids), len(self._ahead))
        if list(ids[:n]) != self._ahead[:n]:
            raise ConfigError(
                f"{self!r} has accepted {self._ahead[:n]}; what is run next must be that,"
                f" not {list(ids[:n])}"
            )
        return n

    def is_unscored(self, number: int = 0) -> bool:
        """Whether a token accepted ahead, the first or a later one, still has no surprisal.

        The row that it is scored by comes with the tokens before it.
        """
        behind = len(self._ahead) - number - 1
        record = next(islice(chain(self.last), behind, None))
        return record.own()[0] is None

    def take_accepted(self, found: Sequence[float | None]) -> None:
        """As many tokens were run: they are no longer ahead. found: surprisals, where missing."""
        n, found = len(self._ahead), list(found)
        if any(value is not None for value in found):
            records = list(islice(chain(self.last), n))[::-1]
            last = records[0].before
            for record, value in zip_longest(records, found):
                raw, kept = record.own()
                own = (value if raw is None else raw, kept)
                last = Accepted(last, record.position, record.token, *own)
            self.last = last
        del self._ahead[: len(found)]

    def surprisals(self, token: int) -> tuple[float | None, float | None] | None:
        """Return the token's raw and kept surprisal in nats, as far as known; None: not at all."""
        drawn = self.drawn
        if drawn is not None and drawn.token == token:
            return -drawn.logprob, -drawn.kept_logprob
        if self.row is None:
            return None
        logits = self._rows.read(self.row)
        return None if logits is None else (surprisal(logits, token), None)

    # Logits -----------------------------------------------------------------------------------

    def moved(self, place: Place, logits: Floats | None) -> None:
        """The tip is another now; logits: its row, None if it is to be read when wanted."""
        self.place = place
        self.drawn = None
        self.row = LogitsRow() if place.depth else None
        if logits is not None and self.row is not None:
            self._rows.fill(self.row, logits)

    def raw(self) -> Floats:
        """Return the raw logits at the tip, shared: read only. Runs the model if they are gone."""
        from .calls import Read, run

        row = self.needed_row()
        logits: Floats | None = self._rows.read(row)
        while logits is None:
            run(self.lm, [self], Read, [self])  # type: ignore[list-item]
            logits = self._rows.read(row)
        return logits

    def needed_row(self) -> LogitsRow:
        """Return the row at the tip, or say that there is none."""
        self.alive()
        if self.row is None:
            raise ConfigError(f"{self!r} has no logits yet; prefill or commit a token first")
        return self.row

    def drawing(self) -> Sampler:
        """Return what draws the next token: the sampler, with the steering."""
        return self.sampler.steered(self.steering) if self.steering else self.sampler

    def biases(self, given: Mapping[int, float] | Iterable[tuple[int, float]]) -> dict[int, float]:
        """Return token biases, checked as `logit_bias` is."""
        biases = SamplingParams(logit_bias=given).logit_bias
        return {self.checked_token(token): bias for token, bias in biases}

    # Sampler ----------------------------------------------------------------------------------

    def redraw(self, params: SamplingParams, *, new_grammar: bool = False) -> None:
        """Draw by other parameters from now on; stream, counted tokens and grammar stay."""
        fresh = self.lm.sampler(params, self.sampler.stream)
        fresh.count(tokens_of(self.last) if fresh.history is not None else ())
        if new_grammar:
            self.grammar_from = 0 if self.last is None else self.last.n
        else:
            fresh.matcher = self.sampler.matcher
        self.params, self.sampler, self.drawn = params, fresh, None

    def sampler_at(self, last: Accepted | None, stream: int) -> Sampler:
        """Return a sampler as it was after `last`. Cost: O(accepted tokens)."""
        sampler = self.lm.sampler(self.params, stream)
        if sampler.needs_host:
            tokens = tokens_of(last)
            sampler.count(tokens)
            if sampler.matcher is not None:
                for token in tokens[self.grammar_from :]:
                    sampler.matcher.accept(token)
        return sampler

    def accepted_by(self, position: int) -> Accepted | None:
        """Return the last accepted token before a position. Cost: O(tokens after it)."""
        return next((each for each in chain(self.last) if each.position < position), None)

    def reseed(self, seed: int, lineage: tuple[int, ...]) -> None:
        """Draw from another random stream."""
        self._seed, self._lineage = seed, lineage
        self.sampler = self.sampler.clone()
        self.sampler.stream = stream_of(seed, lineage)
        self.drawn = None
