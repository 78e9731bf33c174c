"""Segments of slots with their query tokens, and the items that they are split into.

A segment of many slots is split into chunks, one of many query rows into tiles. Every chunk is
combined with every tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .kernel import BROAD, NARROW, TILES, WIDE

# A segment: N entries of the table from AT on, the first one of position FIRST. Packed query tokens
# START … START + SIZE attend to it, in CHUNKS parts after BEFORE other parts of the path. A row's
# own list is valid for tokens up to position LIMIT. It may include the N_ABOVE entries from
# AT_ABOVE on, which directly precede its first position.
AT, N, FIRST, START, SIZE, CHUNKS, BEFORE, LIMIT, AT_ABOVE, N_ABOVE = range(10)
# An item is the segment of its chunk, with query rows instead of tokens, and its tile's first row.
N_ROWS, M0 = SIZE, CHUNKS
BROAD_FROM = 256  # query rows from which tiles have 128 rows

Ints = NDArray[np.signedinteger]


def chunks_of(n: Ints, chunk: int) -> Ints:
    """Return into how many chunks of `chunk` slots each segment of n slots is split.

    A short rest joins the last chunk.
    """
    return np.maximum(1, -(-(n - chunk // 4) // chunk))


def tiles_of(n_rows: Ints, largest: int) -> Ints:
    """Return how many tiles of each size (TILES) cover the query rows of each segment: [len(TILES),
    n].

    n_rows: query rows of each segment. largest: rows of the largest tiles, one of TILES.
    """
    none = 0 * n_rows
    if largest == NARROW:
        return np.array([none, none, -(-n_rows // NARROW)])
    n_broad = np.where(n_rows >= BROAD_FROM, n_rows // BROAD, 0) if largest == BROAD else none
    n_wide, rest = np.divmod(n_rows - n_broad * BROAD, WIDE)
    is_narrow = (rest > 0) & (rest <= NARROW)
    return np.array([n_broad, n_wide + ((rest > 0) & ~is_narrow), is_narrow])


class TiledWork(NamedTuple):
    """Work items of the attention kernel (a chunk of slots times a tile of query rows), by tile
    class.

    They stay valid while `n_tiles` is the same, except for their query tokens (START, N_ROWS).

    Attributes:
        n_tiles: of `tiles_of`.
        items: [n, ITEM_FIELDS].
        segment_of_item: segment number of each item.
        n_each: number of items of each class of TILES.
    """

    n_tiles: Ints
    items: Ints
    segment_of_item: Ints
    n_each: list[int]


def tile_work(segments: Ints, n_tiles: Ints, chunk: int) -> TiledWork:
    """Return the work items of segments: each chunk of slots combined with each tile of query rows.

    segments: [n, ITEM_FIELDS]. n_tiles: of `tiles_of`. chunk: slots of a chunk.
    """
    rows = np.array(TILES)[:, None]
    # One entry per tile class and segment.
    first_rows = ((n_tiles * rows).cumsum(0) - n_tiles * rows).ravel()
    sizes = rows.repeat(n_tiles.shape[1], 1).ravel()
    segment_numbers = np.indices(n_tiles.shape)[1].ravel()
    # One entry per tile.
    entry = np.arange(len(first_rows)).repeat(n_tiles.ravel())
    m0 = first_rows[entry] + sizes[entry] * _numbers_within(n_tiles.ravel())
    segment_of_tile = segment_numbers[entry]
    chunks = segments[segment_of_tile, CHUNKS]
    segment_of_item, number = segment_of_tile.repeat(chunks), _numbers_within(chunks)
    items, skipped = segments.take(segment_of_item, 0), number * chunk
    is_last = number == items[:, CHUNKS] - 1
    items[:, AT] += skipped
    items[:, N] = np.where(is_last, items[:, N] - skipped, chunk)
    items[:, FIRST] += skipped
    items[:, BEFORE] += number
    items[:, M0] = m0.repeat(chunks)
    ends = np.concatenate([[0], chunks.cumsum()])[n_tiles.sum(1).cumsum()]
    n_each = np.diff(ends, prepend=0).tolist()
    return TiledWork(n_tiles, items, segment_of_item, n_each)


def _numbers_within(counts: Ints) -> Ints:
    """Return 0 … count - 1 for each count, concatenated: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1])) - (ends - counts).repeat(counts)
