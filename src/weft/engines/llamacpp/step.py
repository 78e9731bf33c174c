"""One forward: rows to batches of llama.cpp, and what comes back to what was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..._core.sampling.metrics import join_scores, score
from ...errors import ForwardError, KVFull
from ..base import FutureTokens, HostOutput, Row, Score, ScoreSpan
from .context import Context, Floats
from .kv import SequenceFragments
from .leases import END, Leases, PathFragment

Owner = tuple[int, int]  # a row's number, and which of its tokens
Collect = Callable[[Sequence[Owner], Floats], None]  # what came of wanted tokens
_AT_ONCE = 1 << 24  # numbers of logits that are scored together
_TILE_ROWS = 64  # tokens of a batch from which llama.cpp's CPU attention computes tiles
_TILE_GAIN = 4  # computing a visible cell outside a tile / computing one in a tile, in time


class ViewOutput(HostOutput):
    """Logits that lie in the library's memory until the next run, which has them copied first."""

    __slots__ = ("_copied", "_lock")

    def __init__(self, logits: Floats, scores: list[list[Score]], *, is_view: bool) -> None:
        super().__init__(logits, scores)
        self._copied = not is_view
        self._lock = threading.Lock()

    def detach(self) -> None:
        """Copy what is still in the library's memory."""
        with self._lock:
            if not self._copied:
                self._logits = self._logits.copy()
                self._copied = True

    def logits(self, index: int) -> Floats:
        """Return a copy of logits row `index`: float32 [V]."""
        with self._lock:
            return self._logits[index].copy()


class Batches:
    """The rows of one forward, placed in sequences; use it once.

    Rows with a `kv_out` run in their fragment's sequence. The others borrow one for the call; where
    there are not enough, or the cache has no room for all, they run some after the others.
    """

    def __init__(self, rows: Sequence[Row], context: Context, fragments: SequenceFragments) -> None:
        self._rows = rows
        self._context = context
        self._fragments = fragments
        self._leases: Leases = fragments.leases
        self._fresh: list[PathFragment] = []

    def run(
        self,
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        *,
        most: int = 1 << 30,
        hidden: bool = False,
    ) -> None:
        """Run all rows and grow their fragments; nothing has changed if it raises.

        wanted: ascending, which tokens of each row `collect` is told of; at most `most` at once.
        hidden: it is told of hidden states, else of logits.
        """
        new = sum([row.n_tokens for row in self._rows if row.kv_out is not None])
        spare = sum([row.n_tokens for row in self._rows if row.kv_out is None])
        self._context.reserve(self._fragments.slots + new + spare, 0)
        self._leases.reserve(len(self._rows))
        room = self._context.n_cells - self._fragments.slots - new
        if room < 0:
            raise KVFull(
                f"a step of {new} slots does not fit", needed=new, capacity=self._context.n_cells
            )
        try:
            self._place()
            for wave in self._waves(room):
                self._run_wave(wave, wanted, collect, most, hidden)
        except BaseException:
            self._undo()
            raise
        for row in self._rows:
            if row.kv_out is not None:
                row.kv_out.length += row.n_tokens
        self._fragments.slots += new

    def _place(self) -> None:
        """Give a lease to every fragment that is written."""
        growing = [(row, row.kv_out) for row in self._rows if isinstance(row.kv_out, PathFragment)]
        busy = {id(fragment) for _, fragment in growing}
        if len(busy) != len(growing):
            raise ForwardError("two rows write into one fragment")
        for _, fragment in growing:
            if fragment.strand is not None:
                self._leases.make_leaf(fragment)
        for row, fragment in growing:
            if fragment.strand is None:
                above = _tip(row)
                grows = above is not None and id(above) in busy
                self._leases.hang(fragment, above, row.position, growing=grows)
                self._fresh.append(fragment)

    def _undo(self) -> None:
        for fragment in self._fresh:
            self._leases.drop(fragment)
        for row in self._rows:
            kv_out = row.kv_out
            if (
                isinstance(kv_out, PathFragment)
                and kv_out.strand is not None
                and not kv_out.children
            ):
                self._context.remove(kv_out.lease, row.position, END)
                self._leases.cut(kv_out, kv_out.length)

    def _waves(self, room: int) -> list[list[int]]:
        """Return which rows run together."""
        waves: list[list[int]] = [[]]
        leases, cells = self._leases.n_free, room
        for number, row in enumerate(self._rows):
            if row.kv_out is not None:
                waves[0].append(number)
                continue
            if row.n_tokens > room or not self._leases.n_free:
                raise KVFull(
                    f"a row of {row.n_tokens} tokens has no room beside what is held",
                    needed=row.n_tokens,
                    capacity=self._context.n_cells,
                )
            if leases == 0 or row.n_tokens > cells:
                waves.append([])
                leases, cells = self._leases.n_free, room
            waves[-1].append(number)
            leases, cells = leases - 1, cells - row.n_tokens
        return waves

    def _run_wave(
        self,
        wave: list[int],
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        most: int,
        hidden: bool,
    ) -> None:
        borrowed: list[int] = []
        try:
            leases = []
            for number in wave:
                row = self._rows[number]
                if isinstance(row.kv_out, PathFragment):
                    leases.append(row.kv_out.lease)
                else:
                    borrowed.append(self._leases.borrow(_tip(row), row.position))
                    leases.append(borrowed[-1])
            groups = [list(range(len(wave)))]
            if self._context.has_tiles:
                rows = [self._rows[number] for number in wave]
                groups = groups_of(rows, self._fragments.slots)
            for group in groups:
                numbers, own = [wave[i] for i in group], [leases[i] for i in group]
                self._run_rows(numbers, own, wanted, collect, most, hidden)
        finally:
            for lease in borrowed:
                self._leases.give_back(lease)

    def _run_rows(
        self,
        wave: list[int],
        leases: list[int],
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        most: int,
        hidden: bool,
    ) -> None:
        rows = [self._rows[number] for number in wave]
        tokens = list(chain.from_iterable([_ids(row) for row in rows]))
        if len(tokens) == len(rows):  # a token each, as of branches that grow
            positions, each = [row.position for row in rows], leases
        else:
            positions = [p for r in rows for p in range(r.position, r.position + r.n_tokens)]
            each = [lease for row, lease in zip(rows, leases, strict=True) for _ in _ids(row)]
        flags = np.zeros(len(tokens), bool)
        owners: list[Owner] = []
        first = 0
        for number, row in zip(wave, rows, strict=True):
            for at in wanted[number]:
                flags[first + at] = True
                owners.append((number, at))
            first += row.n_tokens
        told = 0
        for start, end in _cuts(flags, self._context.n_batch, most):
            found = self._context.run(
                tokens[start:end], positions[start:end], each[start:end], flags[start:end],
                hidden=hidden,
            )  # fmt: skip
            collect(owners[told : told + len(found)], found)
            told += len(found)


def groups_of(rows: Sequence[Row], n_slots: int) -> list[list[int]]:
    """Return which rows to run in one batch on a CPU, as numbers of rows.

    Batches of 64 tokens or more compute attention in tiles: the products of all rows with every
    cell that one of them sees. Smaller batches skip cells that a row does not see. So rows of one
    token run in small batches, unless most cells belong to most of their paths.

    Args:
        n_slots: cells in use.
    """
    numbers = list(range(len(rows)))
    if sum([row.n_tokens for row in rows]) < _TILE_ROWS:
        return [numbers]
    ones = [number for number in numbers if rows[number].n_tokens == 1]
    n_visible = sum([rows[number].position + 1 for number in ones])
    if len(ones) * n_slots <= _TILE_GAIN * n_visible:
        return [numbers]
    n_batches = -(-len(ones) // (_TILE_ROWS - 1))
    size = -(-len(ones) // n_batches)
    groups = [ones[start : start + size] for start in range(0, len(ones), size)]
    longer = [number for number in numbers if rows[number].n_tokens > 1]
    return [*groups, longer] if longer else groups


def _cuts(flags: NDArray[np.bool_], n_batch: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut tokens into batches of at most `n_batch`, of which at most `most` are wanted."""
    if len(flags) <= min(n_batch, most):
        yield 0, len(flags)
        return
    wanted = np.cumsum(flags)
    start = before = 0
    while start < len(flags):
        end = min(start + n_batch, len(flags))
        if wanted[end - 1] - before > most:
            end = int(np.searchsorted(wanted, before + most, "right"))
        yield start, end
        start, before = end, int(wanted[end - 1])


def _ids(row: Row) -> Sequence[int]:
    assert not isinstance(row.tokens, FutureTokens)
    return row.tokens


def _tip(row: Row) -> PathFragment | None:
    """Return the last fragment of a row's path that has slots."""
    for span in reversed(row.prefix):
        if span.length:
            assert isinstance(span.fragment, PathFragment)
            return span.fragment
    return None


class StepAnswers:
    """Logits rows and scores, put together from batches."""

    def __init__(self, rows: Sequence[Row], n_vocab: int) -> None:
        self._rows = rows
        self._n_vocab = n_vocab
        self._n_rows = sum([len(row.logits_at) for row in rows])
        self._logits: Floats | None = None
        self._numbers: dict[Owner, int] = {}  # of logits rows
        self._parts: dict[tuple[int, int], list[Score]] = {}  # of a row and its span
        self._has_scores = any([row.scores for row in rows])
        self._is_view = False
        for row in rows:
            for span in row.scores:
                self._check(span)

    @property
    def most(self) -> int:
        """Numbers of a vocabulary that are looked at together, in rows."""
        return max(64, _AT_ONCE // self._n_vocab) if self._has_scores else 1 << 30

    def wanted(self) -> list[Sequence[int]]:
        """Return which tokens of each row have answers, ascending."""
        if not self._has_scores:
            return [row.logits_at for row in self._rows]
        found: list[Sequence[int]] = []
        for row in self._rows:
            scored = [range(s.start, s.start + len(s.targets)) for s in row.scores]
            found.append(sorted({*row.logits_at, *chain.from_iterable(scored)}))
        return found

    def take(self, owners: Sequence[Owner], found: Floats) -> None:
        """Take what a batch gives; its memory is the library's until the next one."""
        if not self._has_scores and len(owners) == self._n_rows:
            self._logits, self._is_view = found, True
            return
        if self._logits is None:
            self._logits = np.empty((self._n_rows, self._n_vocab), np.float32)
            each = [(i, at) for i, row in enumerate(self._rows) for at in row.logits_at]
            self._numbers = {owner: number for number, owner in enumerate(each)}
        for index, owner in enumerate(owners):
            number = self._numbers.get(owner)
            if number is not None:
                self._logits[number] = found[index]
        if self._has_scores:
            self._score(owners, found)

    def _score(self, owners: Sequence[Owner], found: Floats) -> None:
        places: dict[int, dict[int, int]] = {}  # of a row, where its tokens are in the batch
        for index, (number, at) in enumerate(owners):
            places.setdefault(number, {})[at] = index
        for number, indices in places.items():
            for which, span in enumerate(self._rows[number].scores):
                inside = range(span.start, span.start + len(span.targets))
                here = [at for at in inside if at in indices]  # one after the other
                if here:
                    first, low = indices[here[0]], here[0] - span.start
                    targets = np.array(span.targets[low : low + len(here)], np.int64)
                    part = score(found[first : first + len(here)], targets, span.top)
                    self._parts.setdefault((number, which), []).append(part)

    def output(self) -> ViewOutput:
        """Return what was asked."""
        logits = self._logits
        if logits is None:
            logits = np.empty((0, self._n_vocab), np.float32)
        scores = [
            [self._joined(number, which, span) for which, span in enumerate(row.scores)]
            for number, row in enumerate(self._rows)
        ]
        return ViewOutput(logits, scores, is_view=self._is_view)

    def _joined(self, number: int, which: int, span: ScoreSpan) -> Score:
        parts = self._parts.get((number, which))
        if parts is None:  # of no targets
            nothing = np.empty((0, self._n_vocab), np.float32)
            return score(nothing, np.empty(0, np.int64), span.top)
        return join_scores(parts)

    def _check(self, span: ScoreSpan) -> None:
        wrong = [token for token in span.targets if not 0 <= token < self._n_vocab]
        if wrong:
            raise ForwardError(
                f"a token to score, {wrong[0]}, is outside the model's vocabulary of"
                f" {self._n_vocab}; ids are 0 to {self._n_vocab - 1}"
            )
