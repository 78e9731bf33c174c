"""How tokens are tinted: from "as expected" to "surprising", in pages and on terminals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError

Tint = Literal["probability", "entropy", "none"]


def check(tint: str) -> Tint:
    """Return the tint's name, or refuse it."""
    for name in get_args(Tint):
        if tint == name:
            return name  # type: ignore[no-any-return]
    raise ConfigError(f"tint is {tint!r}; allowed: {', '.join(get_args(Tint))}")


@dataclass(frozen=True, slots=True)
class Ramp:
    """Six steps from "as expected" (no tint) to "surprising" (the strongest).

    key: "p" or "h", what is measured; the letter of its classes in page.css. bounds: where a step
    ends. labels: a step's figures.
    """

    key: str
    title: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def falls(self) -> bool:
        """Whether small values are the surprising ones."""
        return self.bounds[0] > self.bounds[-1]

    def level(self, value: float) -> int:
        """Return the step of a value; one that is no number is the strongest."""
        for step, bound in enumerate(self.bounds):
            if value >= bound if self.falls else value < bound:
                return step
        return len(self.bounds)


@dataclass(frozen=True, slots=True)
class PageRamp(Ramp):
    """A ramp of pages. rgb: the hue where a translucent colour must do, on light and on dark."""

    rgb: tuple[int, int, int]

    def inline(self, value: float) -> str:
        """Return the style of a step where there is no style sheet; empty for none."""
        alpha = _ALPHA[self.level(value)]
        r, g, b = self.rgb
        return f"background-color:rgba({r},{g},{b},{alpha})" if alpha else ""


_ALPHA = (0, 0.13, 0.25, 0.38, 0.52, 0.66)

PROBABILITY = PageRamp(
    "p",
    "probability of the token",
    (0.9, 0.7, 0.4, 0.2, 0.05),
    ("90–100 %", "70–90 %", "40–70 %", "20–40 %", "5–20 %", "below 5 %"),
    (222, 112, 28),
)
ENTROPY = PageRamp(
    "h",
    "entropy before the token",
    (0.1, 0.5, 1.0, 2.0, 3.0),
    ("below 0.1", "0.1–0.5", "0.5–1", "1–2", "2–3", "3 nats or more"),
    (52, 120, 220),
)


@dataclass(frozen=True, slots=True)
class TerminalRamp(Ramp):
    """A ramp of a terminal's 256 colours: one hue growing darker, black on it is readable.

    colours: of the steps after the first. Where there are none, figures with `digits` are written
    in braces beside tokens beyond `limit`; in_braces says so.
    """

    colours: tuple[int, ...]
    limit: float
    digits: int
    in_braces: str

    @property
    def styles(self) -> tuple[str, ...]:
        """The styles of the steps; empty where nothing stands out."""
        return ("", *(f"black on color({colour})" for colour in self.colours))

    def style(self, value: float) -> str:
        """Return the style of a token."""
        return self.styles[self.level(value)]

    def figure(self, value: float) -> str:
        """Return the figure in braces; empty where nothing stands out."""
        stands_out = value < self.limit if self.falls else value >= self.limit
        return f"{{{value:.{self.digits}f}}}" if stands_out else ""


TERMINAL_PROBABILITY = TerminalRamp(
    "p",
    "p",
    (0.9, 0.6, 0.3, 0.1, 0.01),
    ("≥ 0.9", "< 0.9", "< 0.6", "< 0.3", "< 0.1", "< 0.01"),
    (230, 223, 216, 209, 203),
    limit=0.5,
    digits=2,
    in_braces="p below 0.5",
)
TERMINAL_ENTROPY = TerminalRamp(
    "h",
    "entropy in nats",
    (0.2, 0.7, 1.5, 2.5, 4.0),
    ("< 0.2", "0.2 +", "0.7 +", "1.5 +", "2.5 +", "4.0 +"),
    (195, 153, 117, 75, 69),
    limit=1.0,
    digits=1,
    in_braces="entropy from 1.0 nats",
)
