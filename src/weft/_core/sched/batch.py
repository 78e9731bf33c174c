"""A scheduled step: the rows of each model call, and how their outputs are processed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...engines.base import Engine, Output, RetainedLogits, RetainedRow, Row
from ...errors import ForwardError, WeftError, is_out_of_memory
from ..sampling.sampler import BatchSampler, DrawnToken, draw_at, draw_batch
from .logits_cache import LogitsCache, LogitsRow
from .sequences import LAST_LOGITS

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..sampling.sampler import DrawResult, Sampler
    from .jobs import Job, RunJob
    from .prefill import PrefillChunk
    from .queues import JobQueues
    from .speculation import Draft


class BatchPart(ABC):
    """The rows of one kind in a model call (decode, prefill, …), and what happens to their outputs.

    namespace: the LoRA adapter of its rows; None for the model itself.

    in_tree: True if the logits rows that it stores are attached to the token tree.
    """

    in_tree = False

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.launched = False
        self.error: Exception | None = None  # an error of this part alone
        self.output: Output | None = None  # set by the launch, with the two offsets into it
        self.first_row = 0
        self.first_logit = 0
        self.stored: list[
            LogitsRow
        ] = []  # its rows in the logits cache, once the step has finished
        self.stored_in: RetainedLogits | None = None
        self.first_stored = 0

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the rows for the engine."""

    @abstractmethod
    def n_logits(self) -> int:
        """Return how many rows of logits its rows request."""

    @abstractmethod
    def jobs(self) -> Iterable[Job]:
        """Return the jobs that fail if the step fails."""

    def n_stored(self) -> int:
        """Return how many of its logits rows to store in the logits cache: the first ones."""
        return 0

    def draw(self) -> None:
        """Start drawing tokens from the output; does not wait for the result.

        Call it after all earlier steps have finished, so that samplers know their tokens.
        """

    def wait(self) -> None:
        """Wait until all draws have finished; raises the error of a draw."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Call `action` unless the part has failed; its exception is stored in `error`, not
        raised.
        """
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    @abstractmethod
    def process_outputs(self, queues: JobQueues) -> None:
        """Give the outputs to the jobs, which may end. Called under the lock, after the step."""

    @abstractmethod
    def discard(self, queues: JobQueues) -> None:
        """Undo the part after its step failed: free its KV and marks. No step may be running."""


class SequencePart(BatchPart):
    """Base class of parts whose rows are the next tokens of sequences."""

    @abstractmethod
    def n_tokens(self) -> int:
        """Return how many tokens of the step's budget its rows use: one per computed token."""


class DecodePart(SequencePart):
    """The next row of each decoding run, and the draw of its next token."""

    def __init__(self, runs: Sequence[RunJob], rows: list[Row], queues: JobQueues) -> None:
        super().__init__(rows[0].adapter)
        self.runs = runs
        self._rows = rows
        self._n_tokens = len(rows)
        self._positions = [row.position + 1 for row in rows]  # the position of each drawn token
        self._forced: dict[int, list[int]] = {}  # index of a run → forced tokens in its row
        self._known_next: set[int] = set()  # indices of runs whose next token is forced: no draw
        self._queues = queues
        self._overlap = queues.info.async_scheduling
        self._sampler: BatchSampler | None = None
        if not self._overlap:
            self._sampler = queues.run_samplers.get([run.sampler for run in runs])
            self._sampler.prepare(queues.info.n_vocab)
        self._drawing: list[int] | None = None  # indices of the runs that draw; None: all
        self._draws: Draws | None = None
        self._result: DrawResult | None = None
        for run in runs:
            run.outstanding += 1
        for number, row in enumerate(rows):
            if row.logits_at is not LAST_LOGITS:  # unusual: more than one token
                self._add_long_row(number, queues)

    def _add_long_row(self, number: int, queues: JobQueues) -> None:
        """Count a row of more than one token, and take the run's forced tokens for it.

        Such a row has forced tokens, or the full path if the engine has no prefix caching.

        number: the index of the row.
        """
        run, row = self.runs[number], self._rows[number]
        self._n_tokens += row.n_tokens - 1 if queues.counts_full_rows else len(run.forced)
        if run.forced or run.deferred:
            if run.deferred:
                self._known_next.add(number)
            forced = [*run.forced, *run.deferred[:1]]
            self._forced[number] = forced
            run.forced, run.deferred, run.n_forced = [], run.deferred[1:], len(forced)
        self._positions[number] = row.position + row.n_tokens

    def rows(self) -> list[Row]:
        return self._rows

    def n_tokens(self) -> int:
        return self._n_tokens

    def n_logits(self) -> int:
        return len(self._rows)  # one per row

    def jobs(self) -> Iterable[Job]:
        return self.runs

    def draw(self) -> None:
        assert self.output is not None
        if self._overlap:
            self._draw_overlapped(self.output)
        else:
            assert self._sampler is not None
            self._draws = self.output.draw(
                draw_batch(self._sampler, self.first_logit, self._positions)
            )

    def _draw_overlapped(self, output: Output) -> None:
        """Start draws for the runs that still need one.

        The previous step has finished since the launch, so some of the runs may have ended.
        """
        runs = enumerate(self.runs)
        drawing = [
            number for number, run in runs if run.is_wanted and number not in self._known_next
        ]
        self._drawing = drawing if len(drawing) < len(self.runs) else None
        if not drawing:
            return
        queues = self._queues
        sampler = queues.run_samplers.get([self.runs[number].sampler for number in drawing])
        sampler.prepare(queues.info.n_vocab)
        if self._drawing is None:
            batch = draw_batch(sampler, self.first_logit, self._positions)
        else:
            rows = [self.first_logit + number for number in drawing]
            positions = [self._positions[number] for number in drawing]
            batch = draw_at(sampler, rows, positions, kept=sampler.reports_kept)
        self._draws = output.draw(batch)
        for entry, number in enumerate(drawing):
            self.runs[number].look_ahead(self._draws, entry, queues)

    def wait(self) -> None:
        if self._draws is not None:
            self._result = self._draws.result()

    def process_outputs(self, queues: JobQueues) -> None:
        result = self._result
        if result is None or self._drawing is not None:
            drawn = self._expand_drawn()
        else:
            drawn = result.drawn()
        forced, known_next = self._forced, self._known_next
        for number, (run, one) in enumerate(zip(self.runs, drawn, strict=True)):
            run.outstanding -= 1
            if run.future is not None:
                self._clear_future(run)
            try:
                if run.error is not None:
                    queues.fail(run, run.error)
                    continue
                if number in forced:
                    run.n_forced = 0
                    run.accept_forced(self, number, forced[number], queues)
                if run.is_ending:
                    run.resolve_finished(queues)
                elif not run.done and number not in known_next:
                    run.accept(one, queues)
            except Exception as error:
                queues.handle_error(run, error)

    def _expand_drawn(self) -> list[DrawnToken]:
        """Return one token per run, in order; a placeholder if the run did not draw."""
        assert self._drawing is not None
        drawn = [DrawnToken(0, 0.0, 0.0)] * len(self.runs)
        if self._result is not None:
            for number, one in zip(self._drawing, self._result.drawn(), strict=True):
                drawn[number] = one
        return drawn

    def _clear_future(self, run: RunJob) -> None:
        """Undo `look_ahead` of a run, because its token was not drawn."""
        if run.future is not None and run.future.draws is self._draws:
            run.future = None

    def discard(self, queues: JobQueues) -> None:
        for number, run in enumerate(self.runs):
            run.outstanding -= 1
            self._clear_future(run)
            if number in self._forced:  # the sampler has accepted them already: run them again
                run.deferred, run.n_forced = [*self._forced[number], *run.deferred], 0


class VerifyRow(NamedTuple):
    """A row of a run's last token and of draft tokens, which are not empty.

    samplers: draw after each token of the row; each has accepted the tokens before.
    """

    run: RunJob
    draft: Draft
    samplers: Sequence[Sampler]
    row: Row


class VerifyPart(SequencePart):
    """The next rows of runs with draft tokens, and a draw after each token of these rows."""

    def __init__(self, entries: Sequence[VerifyRow], queues: JobQueues) -> None:
        super().__init__(entries[0].row.adapter)
        self._entries = entries
        self._positions: list[int] = []  # the position of each drawn token
        for run, _, samplers, row in entries:
            run.outstanding += 1
            self._positions += range(row.position + 1, row.position + 1 + len(samplers))
        self._sampler = BatchSampler([one for entry in entries for one in entry.samplers])
        self._sampler.prepare(queues.info.n_vocab)
        self._draws: Draws | None = None
        self._result: DrawResult | None = None

    def rows(self) -> list[Row]:
        return [entry.row for entry in self._entries]

    def n_tokens(self) -> int:
        return len(self._positions)

    def n_logits(self) -> int:
        return len(self._positions)

    def jobs(self) -> Iterable[Job]:
        return [entry.run for entry in self._entries]

    def draw(self) -> None:
        assert self.output is not None
        self._draws = self.output.draw(draw_batch(self._sampler, self.first_logit, self._positions))

    def wait(self) -> None:
        assert self._draws is not None
        self._result = self._draws.result()

    def process_outputs(self, queues: JobQueues) -> None:
        assert self._result is not None
        drawn = self._result.drawn()
        for run, draft, _, _ in self._entries:
            n = len(draft.tokens)
            own, drawn = drawn[: n + 1], drawn[n + 1 :]
            queues.counters.drafted += n
            run.outstanding -= 1
            assert not run.done and run.error is None  # it has no other row in flight
            try:
                if run.is_ending:
                    run.resolve_finished(queues)
                else:
                    run.accept_verified(draft, own, queues)
            except Exception as error:
                queues.handle_error(run, error)

    def discard(self, queues: JobQueues) -> None:
        for entry in self._entries:
            entry.run.outstanding -= 1


class FirstTokenPart(BatchPart):
    """The draws of the first tokens of runs, after their prompts have been computed.

    It adds no rows to the step. The logits come from rows of this step or from the cache. An error
    fails no run: runs without a token draw again later.
    """

    def __init__(
        self,
        namespace: str | None,
        runs: Sequence[RunJob],
        queues: JobQueues,
        places: Sequence[tuple[PrefillChunk, int]] = (),
    ) -> None:
        """Start preparing the draws.

        Args:
            namespace: the LoRA adapter of the rows; None for the model, or for cached rows.
            runs: the runs that draw their first token.
            queues: the scheduler's jobs.
            places: for each run, the chunk that computes its logits row, and the index of the
                row's token in the chunk. Empty if all runs draw from cached rows.
        """
        super().__init__(namespace)
        self._runs = runs
        self._places = places
        self._queues = queues
        self._sampler = BatchSampler([run.sampler for run in runs])
        self._sampler.prepare(queues.info.n_vocab)
        self._draws: Draws | None = None
        self._result: DrawResult | None = None

    def rows(self) -> list[Row]:
        return []

    def n_logits(self) -> int:
        return 0

    def jobs(self) -> Iterable[Job]:
        return ()

    def draw(self) -> None:
        ends = [run.sequence.depth for run in self._runs]
        if self._places:
            assert self.output is not None
            at = [part.first_logit + part.logits_at.index(token) for part, token in self._places]
            batch = draw_at(self._sampler, at, ends, kept=self._sampler.reports_kept)
            self._draws = self.output.draw(batch)
        else:
            numbers: dict[RetainedRow, int] = {}
            at = [numbers.setdefault(run.first_row(), len(numbers)) for run in self._runs]
            batch = draw_at(self._sampler, at, ends, kept=self._sampler.reports_kept)
            self._draws = self._queues.engine.draw(list(numbers), batch)

    def wait(self) -> None:
        assert self._draws is not None
        self._result = self._draws.result()

    def process_outputs(self, queues: JobQueues) -> None:
        assert self._result is not None
        for run, first in zip(self._runs, self._result.drawn(), strict=True):
            run.first_drawn = first
        self.discard(queues)

    def discard(self, queues: JobQueues) -> None:
        if not self._places:  # runs with a place are checked when their rows arrive
            queues.first_draws += self._runs


class ForwardBatch:
    """One model call: all parts of a step that use the same LoRA adapter."""

    def __init__(self, parts: Sequence[BatchPart]) -> None:
        self.parts = parts
        self.output: Output | None = None
        self.n_logits = 0

    def launch(self, engine: Engine, *, draws: bool) -> None:
        """Call the model with the rows of all parts.

        draws: start the draws too. If False, call `draw` once all earlier steps have finished.
        """
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
        """Start the draws of all parts from the model's output; does not wait for the results.

        Call it after `launch` with `draws=False`, once all earlier steps have finished.
        """
        for part in self.parts:
            part.attempt(part.draw)

    def wait(self) -> None:
        """Wait for the model and the draws.

        Raises the model's error. An error of a draw is stored in its part.
        """
        if self.output is not None:
            self.output.synchronize()
        for part in self.parts:
            part.attempt(part.wait)

    def store_logits(self, cache: LogitsCache) -> None:
        """Add the logits rows that the parts keep to the cache; set `stored` of the parts.

        May evict older rows.
        """
        n_stored = sum([part.n_stored() for part in self.parts])
        if not n_stored:
            return
        assert self.output is not None
        indices: Sequence[int] = range(n_stored)
        if n_stored < self.n_logits:
            indices = [part.first_logit + i for part in self.parts for i in range(part.n_stored())]
        kept, first = self.output.retain(indices), 0
        in_tree: list[tuple[BatchPart, int]] = []
        numbers: list[int] = []  # rows for the tree; one call adds them, as parts may be many
        for part in self.parts:
            n = part.n_stored()
            if n:
                part.stored_in, part.first_stored = kept, first
                if part.in_tree:
                    in_tree.append((part, len(numbers)))
                    numbers += range(first, first + n)
                else:
                    part.stored = cache.add(kept, range(first, first + n), n_stored, in_tree=False)
                first += n
        rows = cache.add(kept, numbers, n_stored, in_tree=True) if in_tree else []
        for part, at in in_tree:
            part.stored = rows[at : at + part.n_stored()]
        cache.evict_excess()


class ScheduledStep:
    """One step as the scheduler planned it: its parts, in one `ForwardBatch` per LoRA adapter.

    error: the exception that failed the step; None if there is none.
    """

    def __init__(self, parts: Sequence[BatchPart]) -> None:
        by_name: dict[str | None, list[BatchPart]] = {}
        for part in parts:
            by_name.setdefault(part.namespace, []).append(part)
        self.batches = [ForwardBatch(members) for members in by_name.values()]
        self.parts = parts
        self.error: BaseException | None = None

    def size(self) -> tuple[int, int]:
        """Return (number of rows, number of tokens)."""
        rows = [row for part in self.parts for row in part.rows()]
        return len(rows), sum([row.n_tokens for row in rows])

    def has_scores(self) -> bool:
        """Return True if the step computes scores of given tokens, such as forced ones."""
        return any([row.scores for part in self.parts for row in part.rows()])

    def memory_error(self) -> Exception | None:
        """Return the out-of-memory error of any part, or None if memory sufficed.

        If one part ran out of memory, the scheduler ignores all outputs and retries the full step.
        """
        for part in self.parts:
            error = part.error
            if error is not None and is_out_of_memory(error) and part.jobs():
                return error
        return None

    def synchronize(self) -> None:
        """Block until the device has finished the step's model calls; ignore their errors."""
        for batch in self.batches:
            if batch.output is not None:
                with suppress(Exception):
                    batch.output.synchronize()


def as_forward_error(error: BaseException) -> WeftError:
    """Wrap an exception in a ForwardError, unless it is a WeftError already."""
    if isinstance(error, WeftError):
        return error
    wrapped = ForwardError(f"the model call failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
