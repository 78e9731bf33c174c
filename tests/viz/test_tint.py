"""Ramps of tints: which step a figure is, and how a terminal shows it."""

from __future__ import annotations

import io
from bisect import bisect

import pytest
from rich.console import Console

from weft.viz.out import Out
from weft.viz.terminal import legend
from weft.viz.tint import ENTROPY, PROBABILITY, TERMINAL_ENTROPY, TERMINAL_PROBABILITY

RAMPS = (PROBABILITY, ENTROPY, TERMINAL_PROBABILITY, TERMINAL_ENTROPY)


@pytest.mark.parametrize("ramp", RAMPS)
def test_a_step_is_how_many_bounds_a_figure_is_beyond(ramp) -> None:
    for value in (0.0, 0.009, 0.01, 0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.9, 0.95, 1.0, 2.5, 4.0, 9.0):
        beyond = (
            sum(value < bound for bound in ramp.bounds)
            if ramp.falls
            else bisect(sorted(ramp.bounds), value)
        )
        assert ramp.level(value) == beyond
    assert ramp.level(float("nan")) == len(ramp.bounds) == len(ramp.labels) - 1


def test_a_terminal_leaves_what_is_expected_plain_and_writes_figures_beyond_the_limit() -> None:
    assert TERMINAL_PROBABILITY.style(0.9) == TERMINAL_ENTROPY.style(0.1) == ""
    assert TERMINAL_PROBABILITY.style(0.89) == "black on color(230)"
    assert TERMINAL_PROBABILITY.style(0.001) == "black on color(203)"
    assert TERMINAL_ENTROPY.style(0.2) == "black on color(195)"
    assert TERMINAL_ENTROPY.style(4.0) == "black on color(69)"
    assert (TERMINAL_PROBABILITY.figure(0.5), TERMINAL_PROBABILITY.figure(0.49)) == ("", "{0.49}")
    assert (TERMINAL_ENTROPY.figure(0.99), TERMINAL_ENTROPY.figure(1.0)) == ("", "{1.0}")


def test_a_legend_tells_colours_where_there_are_some_and_braces_elsewhere() -> None:
    colours = Console(file=io.StringIO(), force_terminal=True, color_system="256")
    shown = [
        legend(Out(colours, True, is_ascii), TERMINAL_PROBABILITY).plain for is_ascii in (0, 1)
    ]
    assert shown[0] == "p   ≥ 0.9   < 0.9   < 0.6   < 0.3   < 0.1   < 0.01  "
    assert shown[1] == shown[0].replace("≥", ">=")
    plain = Out.of(io.StringIO())
    assert legend(plain, TERMINAL_PROBABILITY).plain == "in braces: p below 0.5"
    assert legend(plain, TERMINAL_ENTROPY).plain == "in braces: entropy from 1.0 nats"
