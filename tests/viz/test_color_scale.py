"""Ramps of tints: which step a figure is, and how a terminal shows it."""

from __future__ import annotations

import io
from bisect import bisect

import pytest
from rich.console import Console

from weft.viz.color_scale import ENTROPY, PROBABILITY, ColorScale
from weft.viz.terminal import TerminalWriter
from weft.viz.text import legend

RAMPS = (PROBABILITY, ENTROPY)


@pytest.mark.parametrize("scale", RAMPS)
def test_step_is_the_number_of_bounds_that_a_value_exceeds(scale) -> None:
    for value in (0.0, 0.009, 0.01, 0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.9, 0.95, 1.0, 2.5, 4.0, 9.0):
        beyond = (
            sum(value < bound for bound in scale.bounds)
            if scale.is_low_surprising
            else bisect(sorted(scale.bounds), value)
        )
        assert scale.level(value) == beyond
    assert scale.level(float("nan")) == len(scale.bounds) == len(scale.labels) - 1


def style(scale: ColorScale, value: float) -> str:
    return scale.styles[scale.level(value)]


def test_terminal_colours_unlikely_values_and_writes_them_beyond_the_limit() -> None:
    assert style(PROBABILITY, 0.9) == style(ENTROPY, 0.09) == ""
    assert style(PROBABILITY, 0.89) == "black on color(230)"
    assert style(PROBABILITY, 0.001) == "black on color(203)"
    assert style(ENTROPY, 0.1) == "black on color(195)"
    assert style(ENTROPY, 3.0) == "black on color(69)"
    assert (PROBABILITY.braced(0.5), PROBABILITY.braced(0.49)) == ("", "{0.49}")
    assert (ENTROPY.braced(0.99), ENTROPY.braced(1.0)) == ("", "{1.0}")


@pytest.mark.parametrize("scale", RAMPS)
def test_terminal_has_a_colour_for_each_tint_of_the_page(scale: ColorScale) -> None:
    for value in (0.0, 0.04, 0.05, 0.1, 0.3, 0.69, 0.7, 0.9, 1.0, 2.5, 3.0, 9.0):
        assert bool(style(scale, value)) == bool(scale.inline_css(value))
    assert len(scale.styles) == len(scale.labels)


def test_legend_names_colours_or_braces_without_them() -> None:
    colours = Console(file=io.StringIO(), force_terminal=True, color_system="256")
    shown = [
        legend(TerminalWriter(colours, True, is_ascii), PROBABILITY).plain for is_ascii in (0, 1)
    ]
    assert shown[0] == "p   90–100 %   70–90 %   40–70 %   20–40 %   5–20 %   below 5 %  "
    assert shown[1] == shown[0].replace("–", "-")
    plain = TerminalWriter.for_stream(io.StringIO())
    assert legend(plain, PROBABILITY).plain == "in braces: p below 0.5"
    assert legend(plain, ENTROPY).plain == "in braces: entropy from 1.0 nats"
