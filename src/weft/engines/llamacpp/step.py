"""One forward: split its rows into llama.cpp batches and collect logits and scores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..._core.sampling.metrics import join_scores, score
from ...errors import ForwardError, KVFull
from ..base import FutureTokens, HostOutput, Row, Score, ScoreSpan
from .context import Floats
from .leases import END, PathFragment
from .pool import ContextPool, Need, Shard, shard_of
from .transfer import spread_forks

Owner = tuple[int, int]  # (number of a row, index of a token in that row)
Collect = Callable[[Sequence[Owner], Floats], None]  # tokens and their output rows [len(tokens), …]
_AT_ONCE = 1 << 24  # maximum number of logits (float32) that are scored together
_TILE_ROWS = 64  # tokens of a batch from which llama.cpp's CPU attention computes tiles
_TILE_GAIN = 4  # time for a visible cell outside a tile / time for a cell in a tile


class ViewOutput(HostOutput):
    """Logits that may be a view of llama.cpp's memory; `detach` copies them before the next run.

    Thread-safe: one thread may read logits while another detaches them.
    """

    __slots__ = ("_copied", "_lock")

    def __init__(self, logits: Floats, scores: list[list[Score]], *, is_view: bool) -> None:
        """Create a result. is_view: `logits` is llama.cpp's memory, not a copy."""
        super().__init__(logits, scores)
        self._copied = not is_view
        self._lock = threading.Lock()

    def detach(self) -> None:
        """Copy the logits if they are still a view of llama.cpp's memory."""
        with self._lock:
            if not self._copied:
                self._logits = self._logits.copy()
                self._copied = True

    def logits(self, index: int) -> Floats:
        """Return a copy of logits row `index`: float32 [V]."""
        with self._lock:
            return self._logits[index].copy()


class Batches:
    """The rows of one forward, run in llama.cpp batches. Use an object once.

    A row with a `kv_out` runs in the lease of that fragment. Any other row gets a lease for the
    call. If leases or cells do not suffice for all of them, they run in several waves.
    """

    def __init__(self, rows: Sequence[Row], pool: ContextPool) -> None:
        self._rows = rows
        self._pool = pool
        self._fresh: list[PathFragment] = []
        self._n_new: dict[Shard, int] = {}  # new slots, already counted in `Shard.slots`

    def run(
        self,
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        *,
        max_outputs: int = 1 << 30,
        hidden: bool = False,
    ) -> None:
        """Run all rows and extend their fragments (`kv_out`).

        Args:
            wanted: for each row, the ascending indices of the tokens whose output is needed.
            collect: called after each batch with the wanted tokens and their output rows. The rows
                are llama.cpp's memory, valid until the next batch.
            max_outputs: maximum number of wanted tokens in one batch.
            hidden: outputs are hidden states instead of logits.

        Raises:
            KVFull: cells or leases do not suffice.
            ForwardError: two rows write to one fragment, or llama.cpp fails.
            After an error, the fragments are as before.
        """
        try:
            parts = self._place()
            self._reserve(parts)
            waves = [
                (shard, wave)
                for shard, numbers in parts.items()
                for wave in self._waves(shard, numbers)
            ]
            for shard, wave in waves:
                self._run_wave(shard, wave, wanted, collect, max_outputs, hidden)
        except BaseException:
            self._undo()
            raise
        for row in self._rows:
            if row.kv_out is not None:
                row.kv_out.length += row.n_tokens

    def _place(self) -> dict[Shard, list[int]]:
        """Assign each row to a shard, and give each `kv_out` a lease that no child uses.

        Returns: the row numbers in each shard.
        """
        growing = {id(row.kv_out) for row in self._rows if row.kv_out is not None}
        if len(growing) != sum([row.kv_out is not None for row in self._rows]):
            raise ForwardError("two rows write into one fragment")
        for row in self._rows:
            if isinstance(row.kv_out, PathFragment) and row.kv_out.strand is not None:
                shard_of(row.kv_out).make_leaf(row.kv_out)
        self._spread_forks(growing)
        parts: dict[Shard, list[int]] = {}
        for number, row in enumerate(self._rows):
            shard = self._place_row(row, growing)
            parts.setdefault(shard, []).append(number)
            if row.kv_out is not None:
                self._n_new[shard] = self._n_new.get(shard, 0) + row.n_tokens
                shard.slots += row.n_tokens
        return parts

    def _spread_forks(self, growing: Set[int]) -> None:
        """Move paths from which many rows start to emptier contexts; see `spread_forks`.

        growing: identities of the fragments that grow in this step.
        """
        if not self._pool.may_spread:
            return
        n_rows: dict[PathFragment, int] = {}
        for row in self._rows:
            if isinstance(row.kv_out, PathFragment) and row.kv_out.strand is None:
                above = _last_fragment(row)
                if above is not None and id(above) not in growing:
                    n_rows[above] = n_rows.get(above, 0) + 1
        spread_forks(self._pool, n_rows)

    def _place_row(self, row: Row, growing: Set[int]) -> Shard:
        """Return the shard of a row; insert its `kv_out` there if that has no slots.

        growing: identities of the fragments that grow in this step. A child of such a fragment
            becomes a side branch with a lease of its own.
        """
        fragment = row.kv_out
        if isinstance(fragment, PathFragment) and fragment.strand is not None:
            return shard_of(fragment)
        above = _last_fragment(row)
        shard = self._pool.choose() if above is None else shard_of(above)
        if isinstance(fragment, PathFragment):
            is_growing = above is not None and id(above) in growing
            shard.insert(fragment, above, row.position, growing=is_growing)
            self._fresh.append(fragment)
        return shard

    def _reserve(self, parts: Mapping[Shard, Sequence[int]]) -> None:
        """Reserve the cells and leases of all rows. Nothing grows after the first batch.

        parts: the row numbers in each shard. Raises: KVFull.
        """
        needs = {}
        for shard, numbers in parts.items():
            rows = [self._rows[number] for number in numbers]
            spare = [row.n_tokens for row in rows if row.kv_out is None]
            needs[shard] = Need(shard.slots + max(spare, default=0), shard.slots + sum(spare))
            if spare:
                shard.reserve(len(spare))
        self._pool.reserve(needs)

    def _undo(self) -> None:
        """After an error: remove new fragments from the tree, and new slots from old ones."""
        for shard, n in self._n_new.items():
            shard.slots -= n
        for fragment in self._fresh:
            if fragment.strand is not None:
                shard_of(fragment).drop(fragment)
        for row in self._rows:
            kv_out = row.kv_out
            if (
                isinstance(kv_out, PathFragment)
                and kv_out.strand is not None
                and not kv_out.children
            ):
                shard = shard_of(kv_out)
                shard.context.remove(kv_out.lease, row.position, END)
                shard.trim_leaf(kv_out, kv_out.length)

    def _waves(self, shard: Shard, numbers: Sequence[int]) -> list[list[int]]:
        """Split rows into waves that fit the free leases and cells; return their row numbers.

        Rows with a `kv_out` are all in the first wave.

        numbers: of all rows in the shard. Raises: KVFull if a row needs a lease and none is free.
        """
        waves: list[list[int]] = [[]]
        room = shard.context.n_cells - shard.slots  # for rows without a `kv_out`
        leases, cells = shard.n_free, room
        for number in numbers:
            row = self._rows[number]
            if row.kv_out is not None:
                waves[0].append(number)
                continue
            if not shard.n_free:
                raise KVFull(
                    f"all {shard.n_leases} sequences of llama.cpp are leased",
                    needed=1,
                    capacity=shard.n_leases,
                )
            if leases == 0 or row.n_tokens > cells:
                waves.append([])
                leases, cells = shard.n_free, room
            waves[-1].append(number)
            leases, cells = leases - 1, cells - row.n_tokens
        return waves

    def _run_wave(
        self,
        shard: Shard,
        wave: list[int],
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        max_outputs: int,
        hidden: bool,
    ) -> None:
        """Run rows that all have leases at the same time; rows without a `kv_out` borrow one.

        Args:
            shard: of all rows.
            wave: row numbers.
            wanted: see `run`; likewise the other arguments.
        """
        borrowed: list[int] = []
        try:
            leases = []
            for number in wave:
                row = self._rows[number]
                if isinstance(row.kv_out, PathFragment):
                    leases.append(row.kv_out.lease)
                else:
                    borrowed.append(shard.borrow(_last_fragment(row), row.position))
                    leases.append(borrowed[-1])
            groups = [list(range(len(wave)))]
            if shard.context.has_tiles:
                rows = [self._rows[number] for number in wave]
                groups = groups_of(rows, shard.slots - self._n_new.get(shard, 0))
            for group in groups:
                numbers, own = [wave[i] for i in group], [leases[i] for i in group]
                self._run_rows(shard, numbers, own, wanted, collect, max_outputs, hidden)
        finally:
            for lease in borrowed:
                shard.give_back(lease)

    def _run_rows(
        self,
        shard: Shard,
        wave: list[int],
        leases: list[int],
        wanted: Sequence[Sequence[int]],
        collect: Collect,
        max_outputs: int,
        hidden: bool,
    ) -> None:
        """Run rows of a wave in batches of at most `n_batch` tokens; arguments as in `run`."""
        rows = [self._rows[number] for number in wave]
        tokens = list(chain.from_iterable([_token_ids(row) for row in rows]))
        if len(tokens) == len(rows):  # one token each: the usual decoding step
            positions, token_leases = [row.position for row in rows], leases
        else:
            positions = [p for r in rows for p in range(r.position, r.position + r.n_tokens)]
            token_leases = [
                lease for row, lease in zip(rows, leases, strict=True) for _ in _token_ids(row)
            ]
        flags = np.zeros(len(tokens), bool)
        owners: list[Owner] = []
        first = 0
        for number, row in zip(wave, rows, strict=True):
            for at in wanted[number]:
                flags[first + at] = True
                owners.append((number, at))
            first += row.n_tokens
        n_collected = 0
        for start, end in _batch_ranges(flags, shard.context.n_batch, max_outputs):
            outputs = shard.context.run(
                tokens[start:end], positions[start:end], token_leases[start:end], flags[start:end],
                hidden=hidden,
            )  # fmt: skip
            collect(owners[n_collected : n_collected + len(outputs)], outputs)
            n_collected += len(outputs)


def groups_of(rows: Sequence[Row], n_slots: int) -> list[list[int]]:
    """Group rows into batches for attention on a CPU; return the row indices of each group.

    In batches of 64 tokens or more, llama.cpp computes attention in tiles: all rows with every
    cell that any of them attends to. In smaller batches it skips cells that a row does not attend
    to. Rows of one token therefore run in small batches, unless they share most cells.

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


def _batch_ranges(
    flags: NDArray[np.bool_], n_batch: int, max_outputs: int
) -> Iterator[tuple[int, int]]:
    """Yield batches of tokens as ranges (start, end).

    Args:
        flags: True for tokens whose output is wanted.
        n_batch: maximum number of tokens in a batch.
        max_outputs: maximum number of wanted tokens in a batch.
    """
    if len(flags) <= min(n_batch, max_outputs):
        yield 0, len(flags)
        return
    wanted = np.cumsum(flags)
    start = before = 0
    while start < len(flags):
        end = min(start + n_batch, len(flags))
        if wanted[end - 1] - before > max_outputs:
            end = int(np.searchsorted(wanted, before + max_outputs, "right"))
        yield start, end
        start, before = end, int(wanted[end - 1])


def _token_ids(row: Row) -> Sequence[int]:
    """Return the row's ids, which are known: this engine has no future tokens."""
    assert not isinstance(row.tokens, FutureTokens)
    return row.tokens


def _last_fragment(row: Row) -> PathFragment | None:
    """Return the last fragment of a row's prefix that has slots; None for an empty prefix."""
    for span in reversed(row.prefix):
        if span.length:
            assert isinstance(span.fragment, PathFragment)
            return span.fragment
    return None


class StepResults:
    """Collects the logits and scores of one forward, batch by batch.

    Pass `wanted`, `add_batch` and `max_outputs` to `Batches.run`, then call `output`.
    """

    def __init__(self, rows: Sequence[Row], n_vocab: int) -> None:
        """Prepare for the rows of a forward. Raises: ForwardError for an invalid score target."""
        self._rows = rows
        self._n_vocab = n_vocab
        self._n_rows = sum([len(row.logits_at) for row in rows])
        self._logits: Floats | None = None
        self._numbers: dict[Owner, int] = {}  # the logits row of each token
        self._parts: dict[tuple[int, int], list[Score]] = {}  # by row and span number
        self._has_scores = any([row.scores for row in rows])
        self._is_view = False
        for row in rows:
            for span in row.scores:
                self._check(span)

    @property
    def max_outputs(self) -> int:
        """Maximum number of wanted tokens in one batch.

        It bounds the logits that are scored together. Practically unlimited without scores.
        """
        return max(64, _AT_ONCE // self._n_vocab) if self._has_scores else 1 << 30

    def wanted(self) -> list[Sequence[int]]:
        """Return, for each row, the ascending indices of tokens that need logits or scores."""
        if not self._has_scores:
            return [row.logits_at for row in self._rows]
        wanted: list[Sequence[int]] = []
        for row in self._rows:
            scored = [range(s.start, s.start + len(s.targets)) for s in row.scores]
            wanted.append(sorted({*row.logits_at, *chain.from_iterable(scored)}))
        return wanted

    def add_batch(self, owners: Sequence[Owner], logits: Floats) -> None:
        """Store or score the logits of a batch.

        Without scores, logits that cover all rows are kept as a view of llama.cpp's memory.

        Args:
            owners: the token of each logits row.
            logits: their logits [len(owners), V] in llama.cpp's memory, valid until the next batch.
        """
        if not self._has_scores and len(owners) == self._n_rows:
            self._logits, self._is_view = logits, True
            return
        if self._logits is None:
            self._logits = np.empty((self._n_rows, self._n_vocab), np.float32)
            each = [(i, at) for i, row in enumerate(self._rows) for at in row.logits_at]
            self._numbers = {owner: number for number, owner in enumerate(each)}
        for index, owner in enumerate(owners):
            number = self._numbers.get(owner)
            if number is not None:
                self._logits[number] = logits[index]
        if self._has_scores:
            self._score(owners, logits)

    def _score(self, owners: Sequence[Owner], logits: Floats) -> None:
        """Compute the scores whose logits are in this batch, and keep them until `output`."""
        places: dict[int, dict[int, int]] = {}  # by row number and token index: row of `logits`
        for index, (number, at) in enumerate(owners):
            places.setdefault(number, {})[at] = index
        for number, indices in places.items():
            for which, span in enumerate(self._rows[number].scores):
                inside = range(span.start, span.start + len(span.targets))
                here = [at for at in inside if at in indices]  # consecutive
                if here:
                    first, low = indices[here[0]], here[0] - span.start
                    targets = np.array(span.targets[low : low + len(here)], np.int64)
                    part = score(logits[first : first + len(here)], targets, span.top)
                    self._parts.setdefault((number, which), []).append(part)

    def output(self) -> ViewOutput:
        """Return the logits and scores of the forward, after all batches."""
        logits = self._logits
        if logits is None:
            logits = np.empty((0, self._n_vocab), np.float32)
        scores = [
            [self._merged_score(number, which, span) for which, span in enumerate(row.scores)]
            for number, row in enumerate(self._rows)
        ]
        return ViewOutput(logits, scores, is_view=self._is_view)

    def _merged_score(self, number: int, which: int, span: ScoreSpan) -> Score:
        """Join the scores of one span from several batches.

        Args:
            number: row number.
            which: index of the span in the row.
            span: the span.
        """
        parts = self._parts.get((number, which))
        if parts is None:  # the span has no targets
            nothing = np.empty((0, self._n_vocab), np.float32)
            return score(nothing, np.empty(0, np.int64), span.top)
        return join_scores(parts)

    def _check(self, span: ScoreSpan) -> None:
        """Raise ForwardError if a target is outside the vocabulary."""
        wrong = [token for token in span.targets if not 0 <= token < self._n_vocab]
        if wrong:
            raise ForwardError(
                f"a token to score, {wrong[0]}, is outside the model's vocabulary of"
                f" {self._n_vocab}; ids are 0 to {self._n_vocab - 1}"
            )
