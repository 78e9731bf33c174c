"""The corpus as one long row of token ids, encoded by several processes, and batches of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from .corpus import render, sample

CHUNK = 1000
SHARDS_PER_PROCESS = 4
FIRST_SEED = 1000


class Shard(NamedTuple):
    """One process's share: `n_texts` texts drawn from `seed`."""

    seed: int
    n_texts: int
    tokenizer_file: Path


def build(tokenizer_file: Path, n_texts: int, n_processes: int) -> NDArray[np.uint16]:
    """Return the token ids of at least `n_texts` texts, one after the other: uint16 [T]."""
    n_shards = n_processes * SHARDS_PER_PROCESS
    per_shard = max(1, -(-n_texts // n_shards))
    shards = [Shard(FIRST_SEED + i, per_shard, tokenizer_file) for i in range(n_shards)]
    if n_processes == 1:
        return np.concatenate([encode(shard) for shard in shards])
    with multiprocessing.Pool(n_processes) as pool:
        return np.concatenate(pool.map(encode, shards))


def encode(shard: Shard) -> NDArray[np.uint16]:
    """Return the token ids of one shard."""
    tokenizer = Tokenizer.from_file(str(shard.tokenizer_file))
    # The texts carry their own <|bos|>; the file's processor would add a second one.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    rng = Random(shard.seed)
    ids: list[int] = []
    for start in range(0, shard.n_texts, CHUNK):
        n = min(CHUNK, shard.n_texts - start)
        texts = [render(sample(rng)) for _ in range(n)]
        for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
            ids.extend(encoded.ids)
    return np.array(ids, dtype=np.uint16)


def batches(ids: Any, *, n_rows: int, length: int, seed: int) -> Iterator[Any]:
    """Yield int tensors [n_rows, length] for ever: all rows once in a new order, then again."""
    rng = np.random.default_rng(seed)
    rows = ids[: len(ids) // length * length].view(-1, length)
    n_rows = min(n_rows, len(rows))
    while True:
        order = rng.permutation(len(rows))
        for start in range(0, len(rows) - n_rows + 1, n_rows):
            yield rows[order[start : start + n_rows]]
