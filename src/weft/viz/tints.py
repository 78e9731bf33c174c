"""Tints for tokens: six steps of one hue, so that they differ in lightness for every eye."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from ..errors import ConfigError

Tint = Literal["probability", "entropy", "none"]


class Ramp(NamedTuple):
    """Six steps from "as expected" (no tint) to "surprising" (the strongest).

    key: the letter of its classes in page.css. bounds: where a step ends. labels: a step's figures.
    rgb: the hue where a translucent colour must do, on light and on dark.
    """

    key: str
    title: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...]
    rgb: tuple[int, int, int]

    def level(self, value: float) -> int:
        """Return the step of a value; one that is no number is the strongest."""
        falls = self.bounds[0] > self.bounds[-1]
        for step, bound in enumerate(self.bounds):
            if value >= bound if falls else value < bound:
                return step
        return len(self.bounds)

    def inline(self, value: float) -> str:
        """Return the style of a step where there is no style sheet; empty for none."""
        alpha = _ALPHA[self.level(value)]
        r, g, b = self.rgb
        return f"background-color:rgba({r},{g},{b},{alpha})" if alpha else ""


_ALPHA = (0, 0.13, 0.25, 0.38, 0.52, 0.66)

PROBABILITY = Ramp(
    "p",
    "probability of the token",
    (0.9, 0.7, 0.4, 0.2, 0.05),
    ("90–100 %", "70–90 %", "40–70 %", "20–40 %", "5–20 %", "below 5 %"),
    (222, 112, 28),
)
ENTROPY = Ramp(
    "h",
    "entropy before the token",
    (0.1, 0.5, 1.0, 2.0, 3.0),
    ("below 0.1", "0.1–0.5", "0.5–1", "1–2", "2–3", "3 nats or more"),
    (52, 120, 220),
)


def check(tint: str) -> Tint:
    """Return the tint's name, or refuse it."""
    for name in get_args(Tint):
        if tint == name:
            return name  # type: ignore[no-any-return]
    raise ConfigError(f"tint is {tint!r}; allowed: {', '.join(get_args(Tint))}")


def percent(p: float) -> str:
    """Return a probability in as few digits as tell it apart from 0."""
    if not math.isfinite(p):
        return "?"
    if p == 0 or p >= 0.001:
        return f"{p:.1%}".replace("%", " %")
    return f"{p:.3%}".replace("%", " %") if p >= 0.00001 else "<0.001 %"


def p_of(logprob: float) -> float:
    """Return exp(logprob); 0 for what is no number."""
    return math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else 0.0
