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
class ColorScale:
    """Six steps from "as expected" (no tint) to "surprising" (the strongest).

    key: "p" or "h", what is measured; the letter of its classes in page.css. name, title: what it
    is called, short and longer. bounds: where a step ends. labels: a step's figures. rgb: the hue
    of translucent steps, on light and on dark. colours: of a terminal's 256, of the steps after the
    first; black on them is readable. Where there are none, figures with `digits` are written in
    braces beside tokens beyond `limit`; in_braces says so.
    """

    key: str
    name: str
    title: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...]
    rgb: tuple[int, int, int]
    colours: tuple[int, ...]
    limit: float
    digits: int
    in_braces: str

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

    def inline(self, value: float) -> str:
        """Return the style of a step where there is no style sheet; empty for none."""
        alpha = _ALPHA[self.level(value)]
        r, g, b = self.rgb
        return f"background-color:rgba({r},{g},{b},{alpha})" if alpha else ""

    @property
    def styles(self) -> tuple[str, ...]:
        """The steps' styles on a terminal; empty where nothing stands out."""
        return ("", *(f"black on color({colour})" for colour in self.colours))

    def figure(self, value: float) -> str:
        """Return the figure in braces; empty where nothing stands out."""
        stands_out = value < self.limit if self.falls else value >= self.limit
        return f"{{{value:.{self.digits}f}}}" if stands_out else ""


_ALPHA = (0, 0.13, 0.25, 0.38, 0.52, 0.66)

PROBABILITY = ColorScale(
    key="p",
    name="p",
    title="probability of the token",
    bounds=(0.9, 0.7, 0.4, 0.2, 0.05),
    labels=("90–100 %", "70–90 %", "40–70 %", "20–40 %", "5–20 %", "below 5 %"),
    rgb=(222, 112, 28),
    colours=(230, 223, 216, 209, 203),
    limit=0.5,
    digits=2,
    in_braces="p below 0.5",
)
ENTROPY = ColorScale(
    key="h",
    name="entropy",
    title="entropy before the token",
    bounds=(0.1, 0.5, 1.0, 2.0, 3.0),
    labels=("below 0.1", "0.1–0.5", "0.5–1", "1–2", "2–3", "3 nats or more"),
    rgb=(52, 120, 220),
    colours=(195, 153, 117, 75, 69),
    limit=1.0,
    digits=1,
    in_braces="entropy from 1.0 nats",
)
