"""Text coloured by how likely its tokens were, or by how open the choice was."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.text import Text

from .out import Out

if TYPE_CHECKING:
    from ..loom import Heddle
    from ..tokens.tokenizer import Tokenizer


class Tint(StrEnum):
    """What the colour of a token says."""

    PROB = "prob"
    ENTROPY = "entropy"


# From plain to strong, with the figure from which (entropy) or below which (p) each one begins.
# One hue growing darker each, told apart without colour vision; black on it is readable.
_PROB = ((0.9, 230), (0.6, 223), (0.3, 216), (0.1, 209), (0.01, 203))
_ENTROPY = ((0.2, 195), (0.7, 153), (1.5, 117), (2.5, 75), (4.0, 69))
# Where there are no colours, the figure is written beside tokens that stand out this much.
_TOLD_P, _TOLD_ENTROPY = 0.5, 1.0


def tinted(out: Out, text: Tokenizer, node: Heddle, tint: Tint) -> Text:
    """Return a node's text with its tokens coloured; without colours, figures in braces."""
    made = Text()
    stream = text.stream()
    colours = has_colours(out)
    tokens = node.tokens
    for at, token in enumerate(tokens):
        piece = stream.push(token) + (stream.flush() if at == len(tokens) - 1 else "")
        if not node.logprobs:
            made.append(out.shown(piece))
            continue
        p, entropy = math.exp(node.logprobs[at]), node.entropies[at]
        style = style_of(p, entropy, tint) if colours else ""
        made.append(out.shown(piece), style)
        if not colours and piece:
            made.append(_figure(p, entropy, tint))
    return made


def has_colours(out: Out) -> bool:
    """Whether colours can be seen there."""
    return out.console.color_system is not None and not out.console.no_color


def style_of(p: float, entropy: float, tint: Tint) -> str:
    """Return the style of a token; "" where nothing stands out."""
    if tint is Tint.PROB:
        number = next((number for below, number in _PROB[::-1] if p < below), None)
    else:
        number = next((number for start, number in _ENTROPY[::-1] if entropy >= start), None)
    return "" if number is None else f"black on color({number})"


def legend(out: Out, tint: Tint) -> Text:
    """Return what the colours mean."""
    if not has_colours(out):
        what = f"p below {_TOLD_P}" if tint is Tint.PROB else f"entropy from {_TOLD_ENTROPY} nats"
        return out.text((f"in braces: {what}", "dim"))
    if tint is Tint.PROB:
        steps = [("≥ 0.9" if not out.is_ascii else ">= 0.9", "")]
        steps += [(f"< {below}", f"black on color({n})") for below, n in _PROB]
        return out.text(("p  ", "dim"), *_spaced(steps))
    steps = [("< 0.2", "")]
    steps += [(f"{start} +", f"black on color({number})") for start, number in _ENTROPY]
    return out.text(("entropy in nats  ", "dim"), *_spaced(steps))


def _figure(p: float, entropy: float, tint: Tint) -> str:
    if tint is Tint.PROB:
        return f"{{{p:.2f}}}" if p < _TOLD_P else ""
    return f"{{{entropy:.1f}}}" if entropy >= _TOLD_ENTROPY else ""


def _spaced(steps: list[tuple[str, str]]) -> list[str | tuple[str, str]]:
    parts: list[str | tuple[str, str]] = []
    for label, style in steps:
        parts += [(f" {label} ", style), " "]
    return parts
