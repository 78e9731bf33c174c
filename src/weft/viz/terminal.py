"""Trees, texts and distributions on a terminal: what the command shows of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from .out import Out, Part
from .outline import NOTHING, by_number, facts, headline
from .text import ASCII, MIN_LABEL, UNICODE, colour_of, folded, railed
from .tint import Ramp

if TYPE_CHECKING:
    from ..loom import Heddle
    from ..results import Distribution
    from ..tokens.tokenizer import Tokenizer

# Scores from here on are drawn as good, and below as bad.
_GOOD, _BAD = 0.5, 0.05


class PictureLine(NamedTuple):
    """One line below a node: equal siblings stand for each other; no node: siblings left out."""

    nodes: tuple[Heddle, ...]
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """What of a tree is drawn on a terminal, and how.

    numbers: written before a node. path: nodes drawn bold, and always drawn. top: children of a
    node that are drawn at most, best scores first; 0: all of them, in their order. focus: beside
    its path only what is below it is drawn.
    """

    out: Out
    numbers: Mapping[str, int] = field(default_factory=dict)
    path: frozenset[str] = frozenset()
    top: int = 0
    focus: frozenset[str] = frozenset()

    def lines(self, root: Heddle) -> Iterator[Text]:
        """Yield the drawing, from `root` down. Cost: O(nodes), however deep."""
        style = ASCII if self.out.is_ascii else UNICODE
        top = PictureLine((root,))
        for shown, rails in railed(top, self._below, self.out.width, style):
            yield self._line(shown, rails)

    def _below(self, shown: PictureLine) -> list[PictureLine]:
        if not shown.nodes:
            return []
        children = by_number(shown.nodes[0], self.numbers)
        below = [PictureLine(tuple(equal)) for equal in folded(children, None, None)]
        chosen = [each for each in below if any(n.id in self.focus for n in each.nodes)]
        if not chosen and self.top:
            below.sort(key=lambda each: _rank(each.nodes[0].score))
            chosen = [each for at, each in enumerate(below) if at < self.top or self._on_path(each)]
        if not chosen:
            return below
        left_out = len(children) - sum(len(each.nodes) for each in chosen)
        return [*chosen, PictureLine((), left_out)] if left_out else chosen

    def _on_path(self, shown: PictureLine) -> bool:
        return any(node.id in self.path for node in shown.nodes)

    def _line(self, shown: PictureLine, rails: str) -> Text:
        if not shown.nodes:
            return self.out.text((rails, "dim"), (f"… {shown.n_left_out} more", "dim"))
        node = shown.nodes[0]
        number = " ".join(str(self.numbers[n.id]) for n in shown.nodes if n.id in self.numbers)
        told = "" if node.parent is None else " · ".join(_facts(shown.nodes))
        number, told = number and f"{number}  ", told and f"  {told}"
        room = self.out.width - cell_len(rails) - len(number) - cell_len(told)
        label = self.out.fit(called(node).strip(), max(room, MIN_LABEL))
        style = "bold" if node.parent is None or self._on_path(shown) else _style(node)
        return self.out.text((rails, "dim"), (number, "cyan"), (label, style), (told, "dim"))


def _rank(score: float | None) -> float:
    """The best scores first, then what has none."""
    return math.inf if score is None else -score


def called(node: Heddle) -> str:
    """Return what a node is called in a picture."""
    return headline(node) or NOTHING


def _facts(nodes: Sequence[Heddle]) -> list[str]:
    node = nodes[0]
    equal = [f"×{len(nodes)}"] if len(nodes) > 1 else []
    # Where there are scores, they are what is looked for.
    return [*equal, *(facts(node) if node.score is None else [f"{node.score:z.2f}"])]


def _style(node: Heddle) -> str:
    if node.score is not None:
        # Below 0 it is a mean logprob.
        good = node.score if node.score >= 0 else math.exp(node.score)
        return "green" if good >= _GOOD else "dim" if good < _BAD else "yellow"
    return colour_of(node.mean_p) if node.logprobs else ""


def tinted(out: Out, text: Tokenizer, node: Heddle, ramp: Ramp) -> Text:
    """Return a node's text with its tokens coloured; without colours, figures in braces."""
    made = Text()
    stream = text.stream()
    colours = out.has_colours
    tokens, logprobs, entropies = node.tokens, node.logprobs, node.entropies
    for at, token in enumerate(tokens):
        piece = stream.push(token) + (stream.flush() if at == len(tokens) - 1 else "")
        if not (logprobs if ramp.key == "p" else entropies):
            made.append(out.shown(piece))
            continue
        value = math.exp(logprobs[at]) if ramp.key == "p" else entropies[at]
        made.append(out.shown(piece), ramp.styles[ramp.level(value)] if colours else "")
        if not colours and piece:
            made.append(ramp.figure(value))
    return made


def legend(out: Out, ramp: Ramp) -> Text:
    """Return what the colours mean."""
    if not out.has_colours:
        return out.text((f"in braces: {ramp.in_braces}", "dim"))
    parts: list[Part] = [(f"{ramp.name}  ", "dim")]
    for label, style in zip(ramp.labels, ramp.styles, strict=True):
        parts += [(f" {label} ", style), " "]
    return out.text(*parts)


_BAR, _VOTES_BAR = 30, 24


def show_distribution(out: Out, found: Distribution) -> None:
    """Write the likeliest tokens with bars, and what all others have."""
    texts = [shown_token(out, each.text) for each in found]
    width = min(max((cell_len(text) for text in texts), default=0), out.width - _BAR - 14)
    for entry, text in zip(found, texts, strict=True):
        text = text if cell_len(text) <= width else out.fit(text, width)
        style = "green" if entry.p >= 0.5 else "yellow" if entry.p >= 0.1 else "dim"
        out.line(
            (f"{entry.rank + 1:>3}  ", "dim"),
            text + " " * (width - cell_len(text)),
            f"  {_percent(entry.p):>7}  ",
            ("█" * round(_BAR * entry.p), style),
        )
    out.line()
    rest = max(1.0 - sum(entry.p for entry in found), 0.0)
    out.line((f"raw probabilities, before any filter; all others together {rest:.2%}", "dim"))


def shown_token(out: Out, text: str) -> str:
    """Return a token's text in quotes, so that its spaces can be seen."""
    return out.shown(repr(text) if text.isprintable() or "\ufffd" not in text else ascii(text))


def _percent(p: float) -> str:
    return f"{p:.2%}" if p >= 0.00005 else f"{p:.0e}"


def show_votes(
    out: Out, votes: Sequence[tuple[object, int]], total: int, *, width: int = 0, of: str = ""
) -> None:
    """Write answers with bars for how many gave them, of `total`; `of` is written behind."""
    width = max([width, *(len(str(answer)) for answer, _ in votes)])
    for place, (answer, count) in enumerate(votes):
        bar = "█" * max(1, round(_VOTES_BAR * count / total))
        style = "green" if place == 0 else "dim"
        out.line(f"  {answer!s:>{width}}  ", (bar, style), f" {count}{of}")
