"""Commits: the job that runs one token after each of several sequences, and its part of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple

from ...engines.base import Row
from ..sampling.sampler import BatchSampler, draw_at
from .batch import SequencePart
from .jobs import Job
from .logits_cache import LogitsRow
from .prefill import PathClaim
from .sequences import KeptDraft, TokenSequence
from .speculation import CommitRow, Draft
from .work import Commit, Ticket

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..kv.tree import TokenTree
    from ..sampling.sampler import DrawBatch, DrawResult
    from .queues import JobQueues


class Committed(NamedTuple):
    """A commit's result for one sequence: the logits after its token, and the next token drawn.

    drawn: token, raw log-probability, and log-probability among the tokens that the filters keep.
        None if no draw was requested, or no token could be drawn.
    """

    row: LogitsRow
    drawn: tuple[int, float, float] | None


class CommitJob(Job):
    """The job of a `Commit`: runs one token after each of several sequences, in one or more steps.

    A token that already ran as a kept draft is not run twice.

    to_run: indices of the sequences whose tokens have not run.

    n_waiting: number of closed sequences whose path is not computed yet.

    may_draft: False once the commit was preempted, so that its drafts do not preempt it twice.
    """

    needs_closed_tails = False

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        (self.ticket,) = tickets
        self.item: Commit = self.ticket.item
        self._is_mixed = len(self.namespaces()) > 1
        self.committed: dict[int, Committed] = {}  # by index of the sequence
        self.kept: dict[int, list[KeptDraft]] = {}  # draft tokens that were run after its token
        self._claim_of: dict[TokenSequence, PathClaim] = {}  # of sequences that were closed
        self.n_waiting = 0
        self.to_run: list[int] = []
        self.may_draft = True

    def tickets(self) -> list[Ticket]:
        return [self.ticket]

    def namespaces(self) -> set[str | None]:
        return {sequence.base.namespace for sequence in self.item.sequences}

    def longest_path(self) -> int:
        return max((sequence.depth + 1 for sequence in self.item.sequences), default=0)

    def n_paths(self) -> int:
        return len(self.item.sequences)

    def sequences(self) -> Sequence[TokenSequence]:
        return self.item.sequences

    def prepare(self, tree: TokenTree) -> None:
        """Create one claim per closed sequence; the paths of open ones are pinned already.

        Frees kept drafts of other tokens first. A sequence whose engine cannot do that is closed.
        """
        for sequence, token in zip(self.item.sequences, self.item.tokens, strict=True):
            if sequence.kept and sequence.kept[0].token != token:
                if not (sequence.drafts is not None and sequence.drafts.is_next_forced):
                    sequence.kept = []  # `RunLookup.push` counts these, so `trim` must not
                sequence.trim(tree, len(sequence.tokens))
        closed = [sequence for sequence in self.item.sequences if not sequence.is_open]
        self.claims = [PathClaim(self, sequence.base) for sequence in closed]
        for claim, sequence in zip(self.claims, closed, strict=True):
            claim.was_admitted = sequence.was_admitted
        self._claim_of = dict(zip(closed, self.claims, strict=True))
        self.n_waiting = len(self.claims)

    def start(self, queues: JobQueues) -> None:
        queues.commits[self] = None
        for number, sequence in enumerate(self.item.sequences):
            sequence.job, sequence.was_admitted = self, True
            if sequence.kept:  # the first one is the token, see `prepare`
                self.committed[number] = Committed(sequence.kept[0].row, None)
            else:
                self.to_run.append(number)
        if self.to_run:
            super().start(queues)
        else:
            self.finish(queues)

    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        self.n_waiting -= 1

    def open_sequence(self, sequence: TokenSequence, queues: JobQueues) -> None:
        """Open one of the sequences; its path is then pinned by it instead of by a claim."""
        queues.sequences.open(sequence)
        self._claim_of.pop(sequence).unpin_path(queues.tree)

    def share(self, budget: int, queues: JobQueues) -> list[int]:
        """Return the indices of the sequences that the next step runs, the first of `to_run`.

        All of them have one LoRA adapter.

        budget: maximum tokens of the step for this commit.
        """
        sequences = self.item.sequences
        if queues.runs_full_paths:
            costs = accumulate(sequences[number].depth + 1 for number in self.to_run)
            budget = max(sum(1 for _ in takewhile(lambda cost: cost <= budget, costs)), 1)
        numbers = self.to_run[:budget]
        if self._is_mixed:
            name = sequences[numbers[0]].base.namespace
            same = takewhile(lambda number: sequences[number].base.namespace == name, numbers)
            numbers = list(same)
        return numbers

    def draft_rows(self, numbers: Sequence[int], queues: JobQueues) -> list[CommitRow]:
        """Return rows to plan draft tokens for, of sequences whose tokens the next step runs.

        numbers: the indices of the sequences, which are open.
        """
        rows, item = [], self.item
        assert queues.speculation is not None
        for number in numbers:
            sequence, sampler = item.sequences[number], item.samplers[number]
            queues.speculation.push(sequence, item.tokens[number])
            if sampler is not None and self.may_draft:
                rows.append(CommitRow(sequence, sampler))
        return rows

    def finish(self, queues: JobQueues) -> None:
        """Append the tokens to the sequences, resolve the ticket and end the job.

        Called after all tokens have run.
        """
        for number, sequence in enumerate(self.item.sequences):
            token, sequence.job = self.item.tokens[number], None
            if sequence.kept:
                self._count_used_draft(sequence, token, queues)
            elif number in self.kept:
                sequence.kept = self.kept[number]
            sequence.tokens.append(token)
            if not queues.sequences.is_leased(sequence):  # released during the commit
                queues.sequences.close(sequence)
        queues.commits.pop(self, None)
        self.ticket.resolve([self.committed[number] for number in range(self.n_paths())])
        queues.end(self)

    def _count_used_draft(self, sequence: TokenSequence, token: int, queues: JobQueues) -> None:
        """Remove the first kept draft token and count it as accepted: it is `token`, which has run.

        `start` has taken its logits row already. The token is added to the draft lookup.
        """
        sequence.kept = sequence.kept[1:]
        queues.counters.decoded += 1
        queues.counters.draft_accepted += 1
        if sequence.drafts is not None:
            sequence.drafts.count_kept(1, is_used=True)
        if queues.speculation is not None:
            queues.speculation.push(sequence, token)

    def has_drafts(self) -> bool:
        return bool(self.kept) or any(sequence.kept for sequence in self.item.sequences)

    def preempt(self, queues: JobQueues) -> None:
        """Drop the KV of the committed tokens; the commit starts over after its next admission."""
        self.may_draft = False
        self.stop(queues)
        for sequence in self.item.sequences:
            queues.sequences.close(sequence)

    def stop(self, queues: JobQueues) -> None:
        queues.commits.pop(self, None)
        self.to_run, self.committed, self.kept, self._claim_of = [], {}, {}, {}
        for sequence in self.item.sequences:
            sequence.trim(queues.tree, len(sequence.tokens))
            sequence.job = None


class CommitPart(SequencePart):
    """The rows of a commit in one step, which may have draft tokens after the committed ones."""

    def __init__(
        self,
        job: CommitJob,
        numbers: Sequence[int],
        drafts: Mapping[TokenSequence, Draft],
        queues: JobQueues,
    ) -> None:
        """Create rows for the tokens and for drafts that fit the reserved slots.

        Args:
            job: the commit.
            numbers: the indices of its sequences that the step runs.
            drafts: draft tokens of some of them.
            queues: the scheduler's jobs.
        """
        item = job.item
        super().__init__(item.sequences[numbers[0]].base.namespace)
        self.job = job
        self._numbers = numbers
        self._drafts: dict[int, Sequence[int]] = {}  # by index of the sequence
        self._rows = [self._row(number, drafts, queues.tree) for number in numbers]
        self._n_tokens = self._n_logits = len(self._rows)
        if queues.runs_full_paths or self._drafts:
            self._n_tokens = sum([row.n_tokens for row in self._rows])
        self._logits_at: Sequence[int] = range(self._n_logits)  # after the committed tokens
        if self._drafts:
            ends = list(accumulate([len(row.logits_at) for row in self._rows], initial=0))
            self._logits_at, self._n_logits = ends[:-1], ends[-1]
        samplers = [item.samplers[number] for number in numbers]
        drawing = [sampler for sampler in samplers if sampler is not None]
        self._drawing: Sequence[int] = range(len(numbers))  # indices of the rows that draw
        if len(drawing) < len(numbers):
            self._drawing = [i for i, sampler in enumerate(samplers) if sampler is not None]
        self._sampler: BatchSampler | None = None
        if drawing:
            self._sampler = queues.commit_samplers.get(drawing)
            self._sampler.prepare(queues.info.n_vocab)
        self._draws: Draws | None = None
        self._result: DrawResult | None = None
        job.outstanding += 1

    def _row(self, number: int, drafts: Mapping[TokenSequence, Draft], tree: TokenTree) -> Row:
        """Return the row of one sequence; store its draft tokens in `_drafts`."""
        item = self.job.item
        sequence, token = item.sequences[number], item.tokens[number]
        n_before = len(sequence.tokens)
        if drafts and sequence in drafts and sequence.tail is not None:
            n = sequence.tail.reserved - sequence.tail.fragment.length - 1  # memory may be short
            if tokens := drafts[sequence].tokens[: max(n, 0)]:
                self._drafts[number] = tokens
                return sequence.row(tree, (token, *tokens), n_before, all_logits=True)
        return sequence.row(tree, (token,), n_before)

    def rows(self) -> list[Row]:
        return self._rows

    def n_tokens(self) -> int:
        return self._n_tokens

    def n_logits(self) -> int:
        return self._n_logits

    def jobs(self) -> Iterable[Job]:
        return [self.job]

    def n_stored(self) -> int:
        return self._n_logits

    def draw(self) -> None:
        if self._sampler is not None:
            assert self.output is not None
            self._draws = self.output.draw(self._batch(self._sampler))

    def _batch(self, sampler: BatchSampler) -> DrawBatch:
        """Return the draw of the next tokens of these sequences."""
        rows = [self._rows[i] for i in self._drawing]
        positions = [row.position + row.logits_at[0] + 1 for row in rows]
        first = self.first_logit
        return draw_at(sampler, [first + self._logits_at[i] for i in self._drawing], positions)

    def wait(self) -> None:
        if self._draws is not None:
            self._result = self._draws.result()

    def process_outputs(self, queues: JobQueues) -> None:
        job = self.job
        job.outstanding -= 1
        queues.counters.decoded += len(self._rows)
        for number, at, drawn in zip(self._numbers, self._logits_at, self._drawn(), strict=True):
            job.committed[number] = Committed(self.stored[at], drawn)
            if number in self._drafts:
                tokens = self._drafts[number]
                pairs = zip(tokens, self.stored[at + 1 : at + 1 + len(tokens)], strict=True)
                job.kept[number] = [KeptDraft(token, row) for token, row in pairs]
                queues.counters.drafted += len(tokens)
        del job.to_run[: len(self._numbers)]
        if job.error is not None:
            queues.fail(job, job.error)
        elif not job.to_run:
            job.finish(queues)

    def _drawn(self) -> list[tuple[int, float, float] | None]:
        """Return (token, logprob, kept logprob) per row; None for rows that drew no token."""
        drawn: list[tuple[int, float, float] | None] = [None] * len(self._rows)
        result = self._result
        if result is not None and result.kept is not None:
            columns = (result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist())
            for number, one in zip(self._drawing, zip(*columns, strict=True), strict=True):
                if one[0] >= 0:
                    drawn[number] = one
        return drawn

    def discard(self, queues: JobQueues) -> None:
        self.job.outstanding -= 1
