"""Fixed row counts for products, and the check at load that rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...errors import Unsupported
from ..base import Fragment, Row, Span

if TYPE_CHECKING:
    from .engine import TorchEngine

_ROWS = 16  # of every product: the order of summation in a library depends on the row count
_PROMPT, _STEPS = 37, 3
_BATCHES = ((37, 0), (1, 0), (8, 3), (37, 6), (5, 20))  # prompt tokens a step, other rows


def make_batch_invariant(model: nn.Module) -> None:
    """Make all linear modules compute products of exactly 16 rows each; zeros pad the last one.

    The order of summation in a library depends on the number of rows.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_in_blocks, module.forward)


def _in_blocks(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a product to blocks of 16 rows, and concatenate the results.

    rows: [..., in]; the last block is padded with zeros.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    n = len(flat)
    filled = nn.functional.pad(flat, (0, 0, 0, -n % _ROWS))
    out = torch.cat([product(block) for block in filled.split(_ROWS)])[:n]
    return out.reshape(*rows.shape[:-1], -1)


def check_batch_invariance(engine: TorchEngine) -> None:
    """Run a path token by token, then in larger chunks with other rows; compare all bits.

    Raises: Unsupported if a logit differs.
    """
    n_vocab = engine.info.n_vocab
    n = min(_PROMPT + _STEPS, engine.info.context_length)
    ids = [(i * i * 7 + 13 * i + 5) % n_vocab for i in range(n)]
    expected = None
    for size, n_others in _BATCHES:
        logits = _run(engine, ids, size, n_others)
        expected = logits if expected is None else expected
        if not np.array_equal(logits, expected):
            raise Unsupported(
                f"reproducible=True does not hold for this model in {engine.info.dtype} here:"
                f" with {n_others} other rows a logit differs by"
                f" {np.abs(logits - expected).max():.2g};"
                " leave it out, or load the model in another dtype (bfloat16, float32)"
            )


def _run(engine: TorchEngine, ids: list[int], size: int, n_others: int) -> NDArray[np.float32]:
    """Run a prompt, then single tokens in a fragment below it; return their logits: [_STEPS, V].

    Args:
        ids: tokens of the prompt, then of the steps.
        size: tokens of the prompt in one step.
        n_others: other rows in each step.
    """
    memory = engine.fragments
    prompt = memory.new(None)
    others = [memory.new(None) for _ in range(n_others)]
    rows, n_prompt = [], len(ids) - _STEPS
    try:
        for start in range(0, n_prompt, size):
            tokens = ids[start : min(n_prompt, start + size)]
            engine.forward([Row((), tokens, start, prompt, ()), *_other_rows(others, ids, 7)])
        tail = memory.new(prompt)
        try:
            for at in range(n_prompt, len(ids)):
                row = Row((Span(prompt, n_prompt),), [ids[at]], at, tail, (0,))
                rows.append(engine.forward([*_other_rows(others, ids, 1), row]).logits(0).copy())
        finally:
            memory.free(tail)
    finally:
        for fragment in (prompt, *others):
            memory.free(fragment)
    return np.stack(rows)


def _other_rows(others: list[Fragment], ids: list[int], n: int) -> list[Row]:
    """Return a row for each of the fragments `others`, with 1 to `n` tokens of `ids`."""
    rows = []
    for number, other in enumerate(others):
        tokens = [ids[(number + i) % len(ids)] for i in range(1 + number % n)]
        if other.length + len(tokens) < len(ids):
            rows.append(Row((), tokens, other.length, other, ()))
    return rows
