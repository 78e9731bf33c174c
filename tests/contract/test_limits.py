"""n_ctx, n_batch and n_seq_max are honoured by every engine, or rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from contract.conftest import Make
from fakes import Wrapped
from weft._core.sched.work import Extend, Logits
from weft.engines.base import Engine, Output, Row
from weft.errors import ConfigError, ContextOverflow, Unsupported
from weft.lm.lm import LM


class Counting(Wrapped):
    """Notes each forward's rows, by their numbers of tokens."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.forwards: list[list[int]] = []

    def forward(self, rows: Sequence[Row]) -> Output:
        self.forwards.append([row.n_tokens for row in rows])
        return self.inner.forward(rows)


def run(lm: LM, n_paths: int, length: int) -> list[list[int]]:
    """Run paths that share nothing, in one go; return the forwards it took."""
    assert isinstance(lm.engine, Counting)
    paths = [[300 + i, *range(400, 399 + length)] for i in range(n_paths)]
    items = [Extend(lm.place(ids), wants=(Logits(length),)) for ids in paths]
    lm.drive(tickets := lm.submit(items))
    assert all(len(ticket.result()) == 1 for ticket in tickets)
    return lm.engine.forwards


def test_n_ctx_is_the_longest_path(kind: str, make: Make) -> None:
    lm = make(kind, n_ctx=20)
    assert lm.n_ctx == 20
    lm.drive(tickets := lm.submit([Extend(lm.place(list(range(300, 320))))]))
    tickets[0].result()
    with pytest.raises(ContextOverflow, match="the context is 20"):
        lm.place(list(range(300, 321)))
    context_length = lm.info.context_length
    with pytest.raises(ConfigError, match=f"has {context_length} positions"):
        make(kind, n_ctx=context_length + 1)


def test_n_batch_limits_the_tokens_of_a_forward(kv_kind: str, make: Make) -> None:
    forwards = run(make(kv_kind, Counting, n_batch=8), 5, 10)
    assert max(map(sum, forwards)) <= 8
    assert sum(map(sum, forwards)) >= 50


def test_n_batch_limits_the_rows_of_a_hidden_engine(make: Make) -> None:
    forwards = run(make("hidden", Counting, n_batch=2), 5, 10)
    assert max(map(len, forwards)) <= 2
    assert sum(map(len, forwards)) == 5


def test_n_seq_max_limits_resident_paths(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind, Counting, n_seq_max=2)
    run(lm, 6, 10)
    assert lm.tree.budget.paths <= 2


def test_hidden_engine_rejects_a_budget(make: Make) -> None:
    """Its KV is its own: the budget was taken and never looked at."""
    with pytest.raises(Unsupported, match="kv_budget has no effect"):
        make("hidden", kv_bytes=1 << 20)


def test_hidden_engine_rejects_n_seq_max(make: Make) -> None:
    with pytest.raises(Unsupported, match="n_seq_max has no effect"):
        make("hidden", n_seq_max=4)
    with pytest.raises(ConfigError, match="n_seq_max is 0"):
        make("hidden", n_seq_max=0)
