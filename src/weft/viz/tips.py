"""What is said of one token: where the pointer is, and in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..results import TokenProb
from .escape import visible
from .tints import percent

if TYPE_CHECKING:
    from .pieces import Piece

_BAR = 12
_WIDEST = 24


def quoted(text: str) -> str:
    """Return a token's text so that spaces and line ends are seen."""
    shown = visible(text)
    return f"“{shown if len(shown) <= _WIDEST else shown[: _WIDEST - 1] + '…'}”"


def figures(piece: Piece) -> list[str]:
    """Return p, logprob and entropy; empty for what is not known."""
    return [
        "" if piece.p is None else percent(piece.p),
        "" if piece.logprob is None else _signed(piece.logprob),
        "" if piece.entropy is None else f"{piece.entropy:.2f}",
    ]


def _signed(value: float) -> str:
    return f"{value:z.3f}".replace("-", "−")


def alternative(each: TokenProb) -> str:
    """Return a likely token and its probability."""
    return f"{quoted(each.text)} {percent(each.p)}"


def tip(piece: Piece) -> str:
    """Return the lines for one token."""
    p, logprob, entropy = figures(piece)
    if piece.is_mean:
        return f"the whole node, {len(piece.token_ids)} tokens\nmean logprob {logprob}"
    lines = [f"{quoted(piece.text)}  p {p}", f"logprob {logprob}"]
    if entropy:
        lines[-1] += f" · entropy {entropy}"
    if len(piece.token_ids) > 1:
        lines.append(f"{len(piece.token_ids)} tokens, one character")
    if piece.seen is not None:
        lines[-1] += f" · rank {piece.seen.rank + 1}"
        lines += ["", *(_bar(each, piece) for each in piece.seen.top)]
    return "\n".join(lines)


def _bar(each: TokenProb, piece: Piece) -> str:
    bar = "█" * round(each.p * _BAR) or "▏"
    mark = "  ◂ chosen" if each.id == piece.token_ids[0] else ""
    return f"{bar:<{_BAR}} {percent(each.p):>8}  {quoted(each.text)}{mark}"
