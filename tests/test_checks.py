"""Whole numbers that callers give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft.checks import whole_number
from weft.errors import ConfigError
from weft.search.core import Budget


@pytest.mark.parametrize("given", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_whole_numbers_come_back_as_ints(given: Any) -> None:
    number = whole_number("n", given, 1, 3)
    assert type(number) is int
    assert number == 2


@pytest.mark.parametrize(
    "given", [True, np.True_, 2.0, "2", None, [2], 0, 4, pytest.param(-(10**5000), id="huge")]
)
def test_others_are_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^n is .*; allowed is a whole number from 1 to 3$"):
        whole_number("n", given, 1, 3)


def test_what_is_kept_of_a_small_number_counts_as_far_as_others() -> None:
    small = np.uint8(200)
    budget = Budget(tokens=small, kv_bytes=small)
    assert (type(budget.tokens), type(budget.kv_bytes)) == (int, int)
    with weft.load("tiny", n_ctx=small) as lm:
        assert type(lm.n_ctx) is type(lm.info.n_positions) is int
        node = weft.Loom(lm, "Once upon a time").grow(n=1, max_tokens=6, seed=1)[0]
        before = node.tokens
        assert node.trim(np.uint8(2)).tokens == before[:-2]
