"""Limit the batch size at load so that a row's logits do not depend on other rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ...errors import Unsupported
from .context import Context, Floats
from .leases import Leases

_log = logging.getLogger("weft.engines.llamacpp")

_PROMPT, _STEPS = 24, 2
_SMALLER = (16, 8, 4, 2, 1)  # batch sizes to try, if the context's own fails


def limit_batches(context: Context, leases: Leases, n_vocab: int) -> None:
    """Lower `context.n_batch` until a path's logits do not depend on other rows in the batch.

    Logits are compared bit by bit with those of the path alone, one token a batch.
    Cost: 26 calls of one token, and about six batches for each size that is tried.

    Args:
        leases: the sequences of `context`; two are used and given back.

    Raises:
        Unsupported: the bits differ for every size.
    """
    ids = [(i * i * 7 + 13 * i + 5) % n_vocab for i in range(_PROMPT + _STEPS)]
    wanted = _run(context, leases, ids, 1, 0)
    for size in (context.n_batch, *(n for n in _SMALLER if n < context.n_batch)):
        results = [_run(context, leases, ids, n, size - n) for n in {min(size, _PROMPT), size // 2}]
        if all(np.array_equal(each, wanted) for each in results):
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
    """Run a path and return the logits of the steps after its prompt: float32 [_STEPS, V].

    Args:
        ids: the path's tokens: a prompt of `_PROMPT` tokens, then one token for each step.
        n_prompt: tokens of the prompt in one batch; 0 counts as 1.
        n_others: tokens of a second path in the first batch and in the batch of each step.
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
            others = range(position, position + (n_others if has_others else 0))
            half = len(others) // 2  # number of other tokens placed before the own ones
            position = others.stop
            order = [*others[:half], *mine, *others[half:]]
            owners = [other] * half + [own] * len(mine) + [other] * (len(others) - half)
            flags = np.zeros(len(order), bool)
            flags[half + len(mine) - 1] = True
            logits = context.run([ids[p % len(ids)] for p in order], order, owners, flags)
            if start >= _PROMPT:
                rows.append(logits[0].copy())
    finally:
        leases.give_back(own)
        leases.give_back(other)
    return np.stack(rows)
