"""Find at load how large batches may be so that rows do not depend on each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ...errors import Unsupported
from .context import Context, Floats
from .leases import Leases

_log = logging.getLogger("weft.engines.llamacpp")

_PROMPT, _STEPS = 24, 2
_SMALLER = (16, 8, 4, 2, 1)  # tokens a batch, if the first number does not hold


def limit_batches(context: Context, leases: Leases, n_vocab: int) -> None:
    """Lower `context.n_batch` until a path has the same bits alone and beside other rows.

    Cost: 26 calls of one token, and about six batches for each size. Raises: Unsupported if the
    bits differ for every size.
    """
    ids = [(i * i * 7 + 13 * i + 5) % n_vocab for i in range(_PROMPT + _STEPS)]
    wanted = _run(context, leases, ids, 1, 0)
    for size in (context.n_batch, *(n for n in _SMALLER if n < context.n_batch)):
        found = [_run(context, leases, ids, n, size - n) for n in {min(size, _PROMPT), size // 2}]
        if all(np.array_equal(each, wanted) for each in found):
            if size < context.n_batch:
                _log.info("reproducible=True: batches have at most %d tokens here", size)
            context.n_batch = size
            return
    raise Unsupported(
        "reproducible=True does not hold for this model here: logits depend on other rows in"
        ' batches of any size; leave it out, or take engine="torch", dtype="float32"'
    )


def _run(
    context: Context, leases: Leases, ids: Sequence[int], n_prompt: int, n_others: int
) -> Floats:
    """Return the logits of the steps after the prompt, [steps, V].

    The prompt runs in batches of `n_prompt` tokens, at least one. The first batch and the steps
    also have up to `n_others` tokens of another path.
    """
    size = max(1, n_prompt)
    starts = [*range(0, _PROMPT, size), *range(_PROMPT, len(ids))]
    leases.reserve(2)
    own, other = leases.take(), leases.take()
    rows, position = [], 0
    try:
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            mine = range(start, stop)
            has_others = start == 0 or start >= _PROMPT
            beside = range(position, position + (n_others if has_others else 0))
            half = len(beside) // 2  # of them before the path's own tokens
            position = beside.stop
            order = [*beside[:half], *mine, *beside[half:]]
            owners = [other] * half + [own] * len(mine) + [other] * (len(beside) - half)
            flags = np.zeros(len(order), bool)
            flags[half + len(mine) - 1] = True
            logits = context.run([ids[p % len(ids)] for p in order], order, owners, flags)
            if start >= _PROMPT:
                rows.append(logits[0].copy())
    finally:
        leases.give_back(own)
        leases.give_back(other)
    return np.stack(rows)
