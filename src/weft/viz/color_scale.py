"""Color scales for tokens, from expected (no color) to surprising, for pages and terminals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError

Tint = Literal["probability", "entropy", "none"]


def check_tint(tint: str) -> Tint:
    """Validate the name of a token coloring: "probability", "entropy" or "none"; return it.

    Raises: ConfigError for another name.
    """
    for name in get_args(Tint):
        if tint == name:
            return name  # type: ignore[no-any-return]
    raise ConfigError(f"tint is {tint!r}; allowed: {', '.join(get_args(Tint))}")


@dataclass(frozen=True, slots=True)
class ColorScale:
    """Colors for one statistic of tokens: PROBABILITY or ENTROPY, in six steps.

    Step 0 is for expected tokens and has no color. Step 5 is for the most surprising ones.
    """

    key: str  # "p" or "h": the prefix of its CSS classes in page.css
    name: str
    title: str
    bounds: tuple[float, ...]  # the value where each step ends
    labels: tuple[str, ...]  # the range of each step, as text
    rgb: tuple[int, int, int]  # the hue of the translucent steps in pages
    colours: tuple[int, ...]  # of 256 terminal colors, for steps 1 to 5; black on them is readable
    limit: float  # without colors, values beyond this are written in braces
    digits: int  # decimal places of these values
    in_braces: str  # the legend of these values

    @property
    def is_low_surprising(self) -> bool:
        """True if small values are the surprising ones, as for probabilities."""
        return self.bounds[0] > self.bounds[-1]

    def level(self, value: float) -> int:
        """Return the color step of a value, from 0 (expected) to 5 (surprising). NaN has step 5."""
        for step, bound in enumerate(self.bounds):
            if value >= bound if self.is_low_surprising else value < bound:
                return step
        return len(self.bounds)

    def inline_css(self, value: float) -> str:
        """Return CSS for a `style` attribute: the background color of a value; "" for step 0."""
        alpha = _ALPHA[self.level(value)]
        r, g, b = self.rgb
        return f"background-color:rgba({r},{g},{b},{alpha})" if alpha else ""

    @property
    def styles(self) -> tuple[str, ...]:
        """Rich's style for each of the six steps; "" for step 0."""
        return ("", *(f"black on color({colour})" for colour in self.colours))

    def braced(self, value: float) -> str:
        """Return a surprising value in braces, such as "{0.12}", for output without colors.

        Returns "" for a value that is not beyond `limit`.
        """
        is_surprising = value < self.limit if self.is_low_surprising else value >= self.limit
        return f"{{{value:.{self.digits}f}}}" if is_surprising else ""


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
