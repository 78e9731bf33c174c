"""Numbers and functions that callers give."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import weft
from weft._core.validation import check_choice, check_int, check_number, check_unary
from weft.errors import ConfigError
from weft.search.core import Budget


@pytest.mark.parametrize("given", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_integers_of_numpy_become_ints(given: Any) -> None:
    number = check_int("n", given, 1, 3)
    assert type(number) is int
    assert number == 2


@pytest.mark.parametrize(
    "given", [True, np.True_, 2.0, "2", None, [2], 0, 4, pytest.param(-(10**5000), id="huge")]
)
def test_values_that_are_no_allowed_integer_raise_with_their_name(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^n is .*; allowed is an integer from 1 to 3$"):
        check_int("n", given, 1, 3)


@pytest.mark.parametrize("given", [1, 0.25, np.float32(0.5), np.int64(1)])
def test_numbers_of_numpy_become_floats(given: Any) -> None:
    number = check_number("x", given, low=0, high=1, open_low=True)
    assert type(number) is float
    assert number == given


@pytest.mark.parametrize(
    "given",
    [True, "1", None, [1], 1j, math.nan, math.inf, 0, -1, 2, pytest.param(10**5000, id="huge")],
)
def test_value_that_is_no_number_within_bounds_raises_with_its_name(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*; allowed is a finite number > 0 and <= 1$"):
        check_number("x", given, low=0, high=1, open_low=True)


@pytest.mark.torch
def test_tensor_of_a_bool_is_not_an_integer() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"n is tensor\(True\)"):
        check_int("n", torch.tensor(True))
    assert check_int("n", torch.tensor(3)) == 3


def test_uint8_arguments_become_plain_integers() -> None:
    small = np.uint8(200)
    budget = Budget(tokens=small, kv_bytes=small)
    assert (type(budget.tokens), type(budget.kv_bytes)) == (int, int)
    with weft.load("tiny", n_ctx=small) as lm:
        assert type(lm.n_ctx) is type(lm.info.context_length) is int
        node = weft.Loom(lm, "Once upon a time").grow(n=1, max_tokens=6, seed=1)[0]
        before = node.tokens
        assert node.trim(np.uint8(2)).tokens == before[:-2]


def test_one_of_names_the_allowed_values_and_takes_no_number_for_a_bool() -> None:
    check_choice("flag", None, (None, True, False))
    for wrong in (1, 0, "no", "True"):
        with pytest.raises(ConfigError, match=f"flag is {wrong!r}; allowed are True and False"):
            check_choice("flag", wrong, (True, False))
    with pytest.raises(ConfigError, match="dtype is 'x'; allowed are 'a', 'b' and 'c', or so"):
        check_choice("dtype", "x", ("a", "b", "c"), ", or so")


class Caller:
    """Takes nothing when called, and too much in its method."""

    def __call__(self) -> None: ...

    def method(self, node: int, *, extra: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (lambda: None, "no argument"),
        (lambda node, extra: None, "(node, extra)"),
        (lambda *, node: None, "(*, node)"),
        (Caller(), "no argument"),
        (Caller().method, "(node, *, extra)"),
        (partial(Caller().method, 1), "(*, extra)"),
        (dict.get, "(self, key, default=None, /)"),
    ],
)
def test_function_that_takes_no_single_argument_raises(function: Any, parameters: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_unary("value", function, "a text")
    assert str(caught.value) == f"value takes {parameters}; it has to take one argument, a text"


@pytest.mark.parametrize(
    "function",
    [
        len,
        max,  # has no signature
        str.upper,
        Caller.__call__,
        partial(Caller().method, extra=1),
        lambda node, extra=2: None,
        lambda *nodes, **options: None,
    ],
)
def test_function_with_one_argument_or_without_signature_passes(function: Any) -> None:
    check_unary("value", function, "a text")
