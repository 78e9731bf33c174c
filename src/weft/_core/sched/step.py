"""One planned step: which rows go into which model call, and what is done with the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...engines.base import Engine, Output, RetainedLogits, RetainedRow, Row
from ...errors import ForwardError, WeftError, is_out_of_memory
from ..sampling.sampler import Chain, DrawnToken, draw_at, draw_batch
from .lines import LAST
from .rows import LogitsRow, RowStore

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..sampling.sampler import DrawResult
    from .desk import Desk
    from .jobs import Job, RunJob
    from .reads import PathPart


class Part(ABC):
    """Some rows of a model call, and what to do with the answer.

    namespace: the adapter that its rows name. output, first_row, first_logit: where its answers
    are, once it is launched. kept: its logits rows that others may ask for, once it has landed;
    kept_in, first_kept: where the engine has them. error: what went wrong with this part alone.
    hangs: the rows kept are hung on the tree.
    """

    hangs = False

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.launched = False
        self.error: Exception | None = None
        self.output: Output | None = None
        self.first_row = 0
        self.first_logit = 0
        self.kept: list[LogitsRow] = []
        self.kept_in: RetainedLogits | None = None
        self.first_kept = 0

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the rows that the engine is to run."""

    @abstractmethod
    def n_logits(self) -> int:
        """Return how many logits rows they ask for."""

    @abstractmethod
    def jobs(self) -> Iterable[Job]:
        """Return the jobs that fail when the step does."""

    def n_kept(self) -> int:
        """Return how many of its logits rows, the first ones, others may ask for."""
        return 0

    def draw(self) -> None:
        """Start drawing from the output, once all steps before have landed; does not wait."""

    def land(self) -> None:
        """Wait for what was drawn. Raises what made it fail."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Do something that may fail for this part alone."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    @abstractmethod
    def deliver(self, desk: Desk) -> None:
        """Give out what the step brought. Under the lock, once the step has landed."""

    @abstractmethod
    def discard(self, desk: Desk) -> None:
        """Undo what the part has written or promised: its step failed, and nothing runs."""


class LinesPart(Part):
    """A part whose rows are the next tokens of lines."""

    @abstractmethod
    def n_tokens(self) -> int:
        """Return how many tokens its rows run."""


class RunsPart(LinesPart):
    """The next row of each of some runs, and a draw from each."""

    def __init__(self, runs: Sequence[RunJob], rows: list[Row], desk: Desk) -> None:
        super().__init__(rows[0].adapter)
        self.runs = runs
        self._rows = rows
        self._n_tokens = 0
        self._ends: list[int] = []  # the positions of what is drawn
        self._forced: dict[int, list[int]] = {}  # by number of the run
        self._told: set[int] = set()  # those whose next token is forced, too: not drawn
        self._desk = desk
        self._overlap = desk.info.async_scheduling
        self._chain: Chain | None = None
        if not self._overlap:
            self._chain = desk.run_chains.of([run.sampler for run in runs])
            self._chain.prepare(desk.info.n_vocab)
        self._drawing: list[int] | None = None  # numbers of the runs that draw; None: all
        self._draws: Draws | None = None
        self._result: DrawResult | None = None
        for run, row in zip(runs, rows, strict=True):
            run.outstanding += 1
            if row.logits_at is LAST:  # one token, mostly
                self._n_tokens += 1
                self._ends.append(row.position + 1)
            else:
                self._add_long(run, row, desk)

    def _add_long(self, run: RunJob, row: Row, desk: Desk) -> None:
        """Count a row of forced tokens, or of a whole path: hidden engines run these."""
        self._n_tokens += row.n_tokens if desk.counts_rows_whole else 1 + len(run.forced)
        if run.forced or run.put_off:
            if run.put_off:
                self._told.add(len(self._ends))
            forced = [*run.forced, *run.put_off[:1]]
            self._forced[len(self._ends)] = forced
            run.forced, run.put_off, run.n_forced = [], run.put_off[1:], len(forced)
        self._ends.append(row.position + row.n_tokens)

    def rows(self) -> list[Row]:
        return self._rows

    def n_tokens(self) -> int:
        return self._n_tokens

    def n_logits(self) -> int:
        return len(self._rows)  # one of each

    def jobs(self) -> Iterable[Job]:
        return self.runs

    def draw(self) -> None:
        assert self.output is not None
        if self._overlap:
            self._draw_late(self.output)
        else:
            assert self._chain is not None
            self._draws = self.output.draw(draw_batch(self._chain, self.first_logit, self._ends))

    def _draw_late(self, output: Output) -> None:
        """Draw for the runs that go on: the step before, which may have ended some, has landed."""
        runs = enumerate(self.runs)
        drawing = [number for number, run in runs if run.is_wanted and number not in self._told]
        self._drawing = drawing if len(drawing) < len(self.runs) else None
        if not drawing:
            return
        desk = self._desk
        chain = desk.run_chains.of([self.runs[number].sampler for number in drawing])
        chain.prepare(desk.info.n_vocab)
        if self._drawing is None:
            batch = draw_batch(chain, self.first_logit, self._ends)
        else:
            rows = [self.first_logit + number for number in drawing]
            batch = draw_at(chain, rows, [self._ends[number] for number in drawing], kept=False)
        self._draws = output.draw(batch)
        for entry, number in enumerate(drawing):
            self.runs[number].look_ahead(self._draws, entry, desk)

    def land(self) -> None:
        if self._draws is not None:
            self._result = self._draws.result()

    def deliver(self, desk: Desk) -> None:
        result = self._result
        if result is None or self._drawing is not None:
            drawn = self._some_drawn()
        else:
            drawn = result.drawn()
        for number, (run, one) in enumerate(zip(self.runs, drawn, strict=True)):
            run.outstanding -= 1
            if run.late is not None:
                self._landed(run)
            try:
                if run.error is not None:
                    desk.fail(run, run.error)
                    continue
                if self._forced and number in self._forced:
                    run.n_forced = 0
                    run.accept_forced(self, number, self._forced[number], desk)
                if run.ending:
                    run.settle(desk)
                elif not run.done and number not in self._told:
                    run.accept(one, desk)
            except Exception as error:
                desk.fault(run, error)

    def _some_drawn(self) -> list[DrawnToken]:
        """Return what was drawn, an entry a run; anything for those that did not draw."""
        assert self._drawing is not None
        drawn = [DrawnToken(0, 0.0, 0.0)] * len(self.runs)
        if self._result is not None:
            for number, one in zip(self._drawing, self._result.drawn(), strict=True):
                drawn[number] = one
        return drawn

    def _landed(self, run: RunJob) -> None:
        if run.late is not None and run.late.draws is self._draws:
            run.late = None

    def discard(self, desk: Desk) -> None:
        for number, run in enumerate(self.runs):
            run.outstanding -= 1
            self._landed(run)
            if number in self._forced:  # its sampler is past them: they are to be run as they are
                run.put_off, run.n_forced = [*self._forced[number], *run.put_off], 0


class FirstsPart(Part):
    """The first draw of each of some runs, from rows that others of the step bring, or kept ones.

    Nothing fails with it: runs that it gives nothing draw by themselves.
    """

    def __init__(
        self,
        namespace: str | None,
        runs: Sequence[RunJob],
        desk: Desk,
        places: Sequence[tuple[PathPart, int]] = (),
    ) -> None:
        """places: for each run the part that brings its row, and which of its tokens' row it is."""
        super().__init__(namespace)
        self._runs = runs
        self._places = places
        self._desk = desk
        self._chain = Chain([run.sampler for run in runs])
        self._chain.prepare(desk.info.n_vocab)
        self._draws: Draws | None = None
        self._result: DrawResult | None = None

    def rows(self) -> list[Row]:
        return []

    def n_logits(self) -> int:
        return 0

    def jobs(self) -> Iterable[Job]:
        return ()

    def draw(self) -> None:
        ends = [run.line.depth for run in self._runs]
        if self._places:
            assert self.output is not None
            at = [part.first_logit + part.logits_at.index(token) for part, token in self._places]
            self._draws = self.output.draw(draw_at(self._chain, at, ends, kept=False))
        else:
            numbers: dict[RetainedRow, int] = {}
            at = [numbers.setdefault(run.first_row(), len(numbers)) for run in self._runs]
            batch = draw_at(self._chain, at, ends, kept=False)
            self._draws = self._desk.engine.draw(list(numbers), batch)

    def land(self) -> None:
        assert self._draws is not None
        self._result = self._draws.result()

    def deliver(self, desk: Desk) -> None:
        assert self._result is not None
        for run, first in zip(self._runs, self._result.drawn(), strict=True):
            run.first_drawn = first
        self.discard(desk)

    def discard(self, desk: Desk) -> None:
        if not self._places:  # the others are looked at when their rows are there
            desk.first += self._runs


class Call:
    """One model call of a step: all parts of one adapter."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.output: Output | None = None
        self.n_logits = 0

    def launch(self, engine: Engine, *, draws: bool) -> None:
        """Call the model, and start what draws from its answer, if that is to be now."""
        rows: list[Row] = []
        for part in self.parts:
            part.first_row, part.first_logit = len(rows), self.n_logits
            own = part.rows()
            rows += own
            self.n_logits += part.n_logits()
        if rows:
            self.output = engine.forward(rows)
        for part in self.parts:
            part.output, part.launched = self.output, True
            if draws:
                part.attempt(part.draw)

    def draw(self) -> None:
        """Start what draws from the model's answer."""
        for part in self.parts:
            part.attempt(part.draw)

    def land(self) -> None:
        """Wait for the model, and for the draws. Raises what made the model fail."""
        if self.output is not None:
            self.output.synchronize()
        for part in self.parts:
            part.attempt(part.land)

    def keep(self, store: RowStore) -> None:
        """Keep the logits rows that somebody may ask for."""
        n_kept = sum([part.n_kept() for part in self.parts])
        if not n_kept:
            return
        assert self.output is not None
        indices: Sequence[int] = range(n_kept)
        if n_kept < self.n_logits:
            indices = [part.first_logit + i for part in self.parts for i in range(part.n_kept())]
        kept, first = self.output.retain(indices), 0
        hung: list[tuple[Part, int]] = []
        numbers: list[int] = []  # of the rows that are hung: there may be very many parts of one
        for part in self.parts:
            n = part.n_kept()
            if n:
                part.kept_in, part.first_kept = kept, first
                if part.hangs:
                    hung.append((part, len(numbers)))
                    numbers += range(first, first + n)
                else:
                    part.kept = store.keep(kept, range(first, first + n), n_kept, hung=False)
                first += n
        rows = store.keep(kept, numbers, n_kept, hung=True) if hung else []
        for part, at in hung:
            part.kept = rows[at : at + part.n_kept()]
        store.shrink()


class Step:
    """A step on its way. `error` is what made it fail."""

    def __init__(self, parts: Sequence[Part]) -> None:
        by_name: dict[str | None, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.namespace, []).append(part)
        self.calls = [Call(some) for some in by_name.values()]
        self.parts = parts
        self.error: BaseException | None = None

    def size(self) -> tuple[int, int]:
        """Return how many rows it has, and how many tokens."""
        rows = [row for part in self.parts for row in part.rows()]
        return len(rows), sum([row.n_tokens for row in rows])

    def wanted_memory(self) -> Exception | None:
        """Return what a part that has landed lacked, if that was memory: then nothing of the step
        is given out, and all of it can be done again.
        """
        for part in self.parts:
            error = part.error
            if error is not None and is_out_of_memory(error) and part.jobs():
                return error
        return None

    def settle(self) -> None:
        """Wait for what a failed step, or one launched from it, has on the device."""
        for call in self.calls:
            if call.output is not None:
                with suppress(Exception):
                    call.output.synchronize()


def as_forward_error(error: BaseException) -> WeftError:
    """Return what the tickets of a failed step get."""
    if isinstance(error, WeftError):
        return error
    wrapped = ForwardError(f"the model call failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
