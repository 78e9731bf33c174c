"""Lines, what is known of a list that packed queries meet; and the items that they are cut into.

A line is nearly an item: a line of many slots is cut into chunks, one of many query
rows into tiles, and every chunk meets every tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .kernel import BROAD, NARROW, TILES, WIDE

# A line: N entries of the table from AT on, the first of position FIRST, met by the packed query
# tokens START … START + SIZE, in so many CHUNKS, after BEFORE others on the path. A row's own list
# is good for tokens up to position LIMIT, and may have what lies above it met with it: the N_ABOVE
# entries from AT_ABOVE on, right before its own first position.
AT, N, FIRST, START, SIZE, CHUNKS, BEFORE, LIMIT, AT_ABOVE, N_ABOVE = range(10)
# An item is the line of its chunk, with query rows for tokens, and here the first of its tile.
N_ROWS, M0 = SIZE, CHUNKS
BROAD_FROM = 256  # query rows from which a line is met by tiles of 128

Ints = NDArray[np.signedinteger]


def chunks_of(n: Ints, chunk: int) -> Ints:
    """Return how many chunks lines of n slots have. A rest of a quarter goes with the last one."""
    return np.maximum(1, -(-(n - chunk // 4) // chunk))


def tiles_of(n_rows: Ints, largest: int) -> Ints:
    """Return how many tiles of each class lines have, one after the other: [len(TILES), n].

    largest: rows of the largest class that there is, one of TILES.
    """
    none = 0 * n_rows
    if largest == NARROW:
        return np.array([none, none, -(-n_rows // NARROW)])
    n_broad = np.where(n_rows >= BROAD_FROM, n_rows // BROAD, 0) if largest == BROAD else none
    n_wide, rest = np.divmod(n_rows - n_broad * BROAD, WIDE)
    is_narrow = (rest > 0) & (rest <= NARROW)
    return np.array([n_broad, n_wide + ((rest > 0) & ~is_narrow), is_narrow])


class TiledWork(NamedTuple):
    """Items of lines, class by class: all but their query tokens holds while `n_tiles` does.

    of: whose line each is. n_each: how many items each of TILES has.
    """

    n_tiles: Ints
    items: Ints
    of: Ints
    n_each: list[int]


def tile_work(lines: Ints, n_tiles: Ints, chunk: int) -> TiledWork:
    """Cut lines: every chunk of a line with every tile of it."""
    rows = np.array(TILES)[:, None]
    m0 = ((n_tiles * rows).cumsum(0) - n_tiles * rows).ravel()  # where a class begins
    size, whose = rows.repeat(n_tiles.shape[1], 1).ravel(), np.indices(n_tiles.shape)[1].ravel()
    tile_config = np.arange(len(m0)).repeat(n_tiles.ravel())
    m0 = m0[tile_config] + size[tile_config] * _numbers_within(n_tiles.ravel())
    whose = whose[tile_config]
    chunks = lines[whose, CHUNKS]
    of, number = whose.repeat(chunks), _numbers_within(chunks)
    items, skipped = lines.take(of, 0), number * chunk
    is_last = number == items[:, CHUNKS] - 1
    items[:, AT] += skipped
    items[:, N] = np.where(is_last, items[:, N] - skipped, chunk)
    items[:, FIRST] += skipped
    items[:, BEFORE] += number
    items[:, M0] = m0.repeat(chunks)
    ends = np.concatenate([[0], chunks.cumsum()])[n_tiles.sum(1).cumsum()]
    return TiledWork(n_tiles, items, of, np.diff(ends, prepend=0).tolist())


def _numbers_within(counts: Ints) -> Ints:
    """Return 0 … count - 1 for each count, one after the other."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1])) - (ends - counts).repeat(counts)
