"""The tokens of a node as pieces of text, with their statistics, and their HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .._core.sched.work import Extend, Scores
from .._core.validation import check_int
from ..lm.results import TokenProb
from ..loom import Loom
from ..loom.node import lm_of
from .color_scale import ENTROPY, PROBABILITY
from .outline import NOTHING, counted, facts
from .terminal import as_html, escape_controls

if TYPE_CHECKING:
    from ..engines.base import Score
    from ..lm.lm import LM
    from ..loom import Heddle


def percent(p: float) -> str:
    """Return a probability as a percentage, with enough digits that it is not shown as 0."""
    if not math.isfinite(p):
        return "?"
    if p == 0 or p >= 0.001:
        return f"{p:.1%}".replace("%", " %")
    return f"{p:.3%}".replace("%", " %") if p >= 0.00001 else "<0.001 %"


def probability(logprob: float) -> float:
    """Return exp(logprob); 0 for NaN."""
    return math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else 0.0


# Nodes per submission; their results are in memory at the same time.
_BATCH = 64


class TokenRank(NamedTuple):
    """The rank of a token in the model's distribution, and the likeliest tokens there.

    rank: 0 for the likeliest token.
    top: the likeliest tokens at this position.
    """

    rank: int
    top: tuple[TokenProb, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The smallest displayable part of a node's text, with its statistics.

    It is one token, or several tokens that share a character.

    text: the text.
    token_ids: the tokens.
    logprob: the sum over the tokens; None if they were not sampled.
    entropy: the maximum over the tokens, in nats; None if unknown.
    ranks: rank and alternatives of the token; None if they were not computed.
    is_mean: the piece is a full node whose tokens cannot be separated; statistics are means.
    """

    text: str
    token_ids: tuple[int, ...]
    logprob: float | None = None
    entropy: float | None = None
    ranks: TokenRank | None = None
    is_mean: bool = False

    @property
    def p(self) -> float | None:
        """Probability, exp(logprob); None if unknown."""
        return None if self.logprob is None else probability(self.logprob)


def pieces(node: Heddle, ranks: Sequence[TokenRank] = ()) -> list[Piece]:
    """Split a node's text into pieces for display. Their joined texts equal the node's text.

    ranks: the rank of each token, as `rank_tokens` returns them; empty if they were not computed.
    """
    shown = node.text if isinstance(node, Loom) else node.display_text()
    if node.lm is None or shown != node.text:
        return [_single_piece(node, shown)] if shown else []
    parts = list(_decode_pieces(node, node.lm, ranks))
    # A subclass may display another text; tokens are separated only if they form that text.
    is_shown = "".join(piece.text for piece in parts) == shown
    return parts if is_shown else [_single_piece(node, shown)]


def _decode_pieces(node: Heddle, lm: LM, ranks: Sequence[TokenRank]) -> Iterator[Piece]:
    """Decode a node's tokens one by one; yield a piece whenever characters are complete."""
    stream = lm.text.stream(first=node.parent is None)
    tokens, first = node.tokens, 0
    for at, token in enumerate(tokens):
        text = stream.push(token)
        if at == len(tokens) - 1:
            text += stream.flush()
        if text:
            yield _piece(node, text, tokens, first, at + 1, ranks)
            first = at + 1


def _piece(
    node: Heddle, text: str, tokens: list[int], first: int, last: int, ranks: Sequence[TokenRank]
) -> Piece:
    """Return the piece of the tokens from `first` to before `last`, with their statistics."""
    logprobs, entropies = node.logprobs[first:last], node.entropies[first:last]
    return Piece(
        text,
        tuple(tokens[first:last]),
        math.fsum(logprobs) if logprobs else None,
        max(entropies) if entropies else None,
        ranks[first] if ranks else None,
    )


def _single_piece(node: Heddle, shown: str) -> Piece:
    """Return one piece for the full node, with mean statistics, if tokens cannot be separated."""
    if not node.logprobs:
        return Piece(shown, tuple(node.tokens))
    entropies = node.entropies
    entropy = math.fsum(entropies) / len(entropies) if entropies else None
    return Piece(shown, tuple(node.tokens), node.mean_logprob, entropy, is_mean=True)


def rank_tokens(nodes: Sequence[Heddle], top: int) -> dict[str, list[TokenRank]]:
    """Compute the rank and the `top` likeliest alternatives of each sampled token.

    Returns: node id → one TokenRank per token. The tree is not changed.

    Raises: ConfigError if the loom has no model.

    Cost: one forward over each node's tokens.
    """
    top = check_int("top", top, 0)
    sampled = [node for node in nodes if node.logprobs and node.parent is not None]
    if not top or not sampled:
        return {}
    lm = lm_of(sampled[0])
    top = min(top, lm.info.n_vocab)
    ranks: dict[str, list[TokenRank]] = {}
    for first in range(0, len(sampled), _BATCH):
        batch = sampled[first : first + _BATCH]
        tickets = lm.submit([_score_request(node, top) for node in batch])
        lm.drive(tickets)
        for node, ticket in zip(batch, tickets, strict=True):
            ranks[node.id] = list(_token_ranks(lm, ticket.result()[0]))
    return ranks


def _score_request(node: Heddle, top: int) -> Extend:
    """Return the scheduler's work item that scores a node's tokens with `top` alternatives."""
    assert node.parent is not None
    place, tokens = node.parent.place, node.tokens
    return Extend(place, tokens, (Scores(place.depth, place.depth + len(tokens), top),))


def _token_ranks(lm: LM, score: Score) -> Iterator[TokenRank]:
    """Yield the rank and the alternatives of each scored token."""
    assert score.ranks is not None  # requested with the likeliest tokens
    rows = zip(
        score.ranks.tolist(), score.top_ids.tolist(), score.top_logprobs.tolist(), strict=True
    )
    for rank, ids, logprobs in rows:
        listed = enumerate(zip(ids, logprobs, strict=True))
        yield TokenRank(rank, tuple(_token_prob(lm, token, lp, at) for at, (token, lp) in listed))


def _token_prob(lm: LM, token: int, logprob: float, rank: int) -> TokenProb:
    """Return a token id with its text, bytes and probability."""
    text = lm.text
    return TokenProb(
        token, text.token_text(token), text.token_bytes(token), logprob, math.exp(logprob), rank
    )


_BAR = 12
_WIDEST = 24


def quoted(text: str) -> str:
    """Return a token's text in quotes, with spaces and line ends visible."""
    shown = escape_controls(text)
    return f"“{shown if len(shown) <= _WIDEST else shown[: _WIDEST - 1] + '…'}”"


def token_stats(piece: Piece) -> list[str]:
    """Return [p, logprob, entropy] of a piece as texts; "" for an unknown value."""
    return [
        "" if piece.p is None else percent(piece.p),
        "" if piece.logprob is None else _format_signed(piece.logprob),
        "" if piece.entropy is None else f"{piece.entropy:.2f}",
    ]


def _format_signed(value: float) -> str:
    """Return a number with three decimals and a typographic minus sign."""
    return f"{value:z.3f}".replace("-", "−")


def alternative(each: TokenProb) -> str:
    """Return an alternative token and its probability as text, such as '"the" 12%'."""
    return f"{quoted(each.text)} {percent(each.p)}"


def tooltip(piece: Piece) -> str:
    """Return the tooltip of a piece as text: its statistics and alternatives."""
    p, logprob, entropy = token_stats(piece)
    if piece.is_mean:
        return f"the full node, {len(piece.token_ids)} tokens\nmean logprob {logprob}"
    lines = [f"{quoted(piece.text)}  p {p}", f"logprob {logprob}"]
    if entropy:
        lines[-1] += f" · entropy {entropy}"
    if len(piece.token_ids) > 1:
        lines.append(f"{len(piece.token_ids)} tokens, one character")
    if piece.ranks is not None:
        lines[-1] += f" · rank {piece.ranks.rank + 1}"
        lines += ["", *(_bar_line(each, piece) for each in piece.ranks.top)]
    return "\n".join(lines)


def _bar_line(each: TokenProb, piece: Piece) -> str:
    """Return a line of a tooltip: an alternative's bar, probability and text.

    piece: the sampled token; it gets a mark.
    """
    bar = "█" * round(each.p * _BAR) or "▏"
    mark = "  ◂ chosen" if each.id == piece.token_ids[0] else ""
    return f"{bar:<{_BAR}} {percent(each.p):>8}  {quoted(each.text)}{mark}"


Label = Callable[["Heddle"], str]

# Alternatives below this probability appear in the tooltip only.
_LISTED = 0.001
# Tokens with this rounded probability are left out of the table.
_CERTAIN = percent(1.0)


@dataclass(frozen=True, slots=True)
class NodeDetails:
    """Options of `node_html`, and the data that it shows.

    numbers: node id → number.
    node: returns the label of a node; None: its text with colored tokens.
    ranks: node id → rank and alternatives of each token.
    marked: ids of the nodes on the highlighted path.
    is_terse: no tables, and tooltips for colored tokens only.
    """

    numbers: Mapping[str, int]
    node: Label | None = None
    ranks: Mapping[str, Sequence[TokenRank]] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()
    is_terse: bool = False


def node_html(node: Heddle, details: NodeDetails) -> str:
    """Return one node of an HTML page: its number with a link, then its label or colored tokens."""
    on = " on" if node.id in details.marked else ""
    number = details.numbers.get(node.id)
    mark = "" if number is None else f'<span class="no" id="{number}">{number}</span>'
    inside = "".join(
        _text_html(node, details) if details.node is None else _label_html(details.node(node))
    )
    return f'<div class="node{on}" id="n-{as_html(node.id)}">{mark}{inside}</div>\n'


def _label_html(text: str) -> Iterator[str]:
    """Yield the HTML of a node that has a label instead of its tokens."""
    yield f'<div class="text" dir="auto">{as_html(text)}</div>'


def _text_html(node: Heddle, details: NodeDetails) -> Iterator[str]:
    """Yield the HTML of a node's colored tokens, statistics, and table of uncertain tokens."""
    parts = pieces(node, details.ranks.get(node.id, ()))
    text = "".join(_token_html(piece, is_terse=details.is_terse) for piece in parts)
    yield f'<div class="text" dir="auto">{text or _NOTHING}</div>'
    statistics = as_html(" · ".join(facts(node)))
    rows = [] if details.is_terse else [piece for piece in parts if _is_uncertain(piece)]
    if not rows:
        yield f'<p class="soft">{statistics}</p>'
        return
    yield f'<details class="statistics"><summary>{statistics}</summary>'
    yield '<div class="scroll" tabindex="0">'
    yield _table_html(rows)
    certain = sum(piece.logprob is not None for piece in parts) - len(rows)
    if certain:
        yield f'<p class="soft">{counted(certain, "more token")} of {_CERTAIN}</p>'
    yield "</div></details>"


_NOTHING = f'<span class="nothing">{NOTHING}</span>'


def _is_uncertain(piece: Piece) -> bool:
    """Return True for a sampled token that was not almost certain; tables list only these."""
    return piece.p is not None and not piece.is_mean and percent(piece.p) != _CERTAIN


def _token_html(piece: Piece, *, is_terse: bool) -> str:
    """Return the HTML of a piece: colored, with a tooltip.

    is_terse: without a tooltip if the piece has no color.
    """
    text = as_html(piece.text)
    if piece.logprob is None:
        return text
    step = PROBABILITY.level(piece.p or 0.0)
    levels, surprise = f"p{step}", step
    if piece.entropy is not None:
        step = ENTROPY.level(piece.entropy)
        levels, surprise = f"{levels} h{step}", surprise + step
    if is_terse and not surprise:
        return text
    line_end = " nl" if piece.text.startswith("\n") else ""
    tip = as_html(tooltip(piece)).replace("\n", "&#10;")
    return f'<span class="t {levels}{line_end}" data-tip="{tip}">{text}</span>'


def _table_html(rows: Sequence[Piece]) -> str:
    """Return the HTML table of tokens with their probability, logprob, entropy and rank."""
    has_ranks = any(piece.ranks is not None for piece in rows)
    heads = ["token", "p", "logprob", "entropy", *(["rank"] if has_ranks else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    wide = '<th scope="col" class="wide">likeliest</th>' if has_ranks else ""
    body = "".join(f"<tr>{_row_html(piece, has_ranks)}</tr>" for piece in rows)
    return f"<table><thead><tr>{head}{wide}</tr></thead><tbody>{body}</tbody></table>"


def _row_html(piece: Piece, has_ranks: bool) -> str:
    """Return the cells of a token's table row."""
    cells = [quoted(piece.text), *token_stats(piece)]
    wide = ""
    if has_ranks:
        ranks = piece.ranks
        cells.append("" if ranks is None else str(ranks.rank + 1))
        likely = [] if ranks is None else [e for e in ranks.top if e.p >= _LISTED]
        likely_html = " ".join(f"<span>{as_html(alternative(each))}</span>" for each in likely)
        wide = f'<td class="wide">{likely_html}</td>'
    return "".join(f"<td>{as_html(cell)}</td>" for cell in cells) + wide
