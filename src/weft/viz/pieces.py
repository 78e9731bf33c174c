"""A node's text in pieces, one a token, each with what is known of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..checks import whole_number
from ..loom import Loom
from ..results import TokenProb
from ..sched.work import Extend, Scores
from .tints import p_of

if TYPE_CHECKING:
    from ..engines.base import Score
    from ..lm import LM
    from ..loom import Heddle

# Nodes that one submission asks about: their answers are held at one time.
_ASKED_AT_ONCE = 64


class Seen(NamedTuple):
    """What the model says of a token in its place: its rank from 0, and the likeliest ones."""

    rank: int
    top: tuple[TokenProb, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and its figures; more than one token where they share a character.

    logprob: of all its tokens. entropy: the largest. None: not sampled, so not known.
    is_mean: the piece is a whole node whose tokens cannot be told apart; figures are means.
    """

    text: str
    token_ids: tuple[int, ...]
    logprob: float | None = None
    entropy: float | None = None
    seen: Seen | None = None
    is_mean: bool = False

    @property
    def p(self) -> float | None:
        """exp(logprob)."""
        return None if self.logprob is None else p_of(self.logprob)


def pieces(node: Heddle, seen: Sequence[Seen] = ()) -> list[Piece]:
    """Return the pieces of what the node shows; their texts, joined, are that text."""
    shown = node.text if isinstance(node, Loom) else node.display_text()
    if node.lm is None or shown != node.text:
        return [_whole(node, shown)] if shown else []
    made = list(_decoded(node, node.lm, seen))
    # A subclass may show anything; tokens are shown apart only where they are what is shown.
    return made if "".join(piece.text for piece in made) == shown else [_whole(node, shown)]


def _decoded(node: Heddle, lm: LM, seen: Sequence[Seen]) -> Iterator[Piece]:
    stream = lm.text.stream(first=node.parent is None)
    tokens, begun = node.tokens, 0
    for at, token in enumerate(tokens):
        text = stream.push(token)
        if at == len(tokens) - 1:
            text += stream.flush()
        if text:
            yield _piece(node, text, tokens, begun, at + 1, seen)
            begun = at + 1


def _piece(
    node: Heddle, text: str, tokens: list[int], first: int, last: int, seen: Sequence[Seen]
) -> Piece:
    logprobs, entropies = node.logprobs[first:last], node.entropies[first:last]
    return Piece(
        text,
        tuple(tokens[first:last]),
        math.fsum(logprobs) if logprobs else None,
        max(entropies) if entropies else None,
        seen[first] if seen else None,
    )


def _whole(node: Heddle, shown: str) -> Piece:
    if not node.logprobs:
        return Piece(shown, tuple(node.tokens))
    entropies = node.entropies
    entropy = math.fsum(entropies) / len(entropies) if entropies else None
    return Piece(shown, tuple(node.tokens), node.mean_logprob, entropy, is_mean=True)


def look(nodes: Sequence[Heddle], top: int) -> dict[str, list[Seen]]:
    """Ask the model for the `top` likeliest tokens at each sampled token, by node id.

    Adds nothing to the tree. Raises ConfigError where the loom has no model.
    Cost: one forward over each node's tokens.
    """
    whole_number("top", top, 0)
    sampled = [node for node in nodes if node.logprobs and node.parent is not None]
    if not top or not sampled:
        return {}
    lm = sampled[0]._home.live_lm()
    top = min(top, lm.info.n_vocab)
    found: dict[str, list[Seen]] = {}
    for first in range(0, len(sampled), _ASKED_AT_ONCE):
        asked = sampled[first : first + _ASKED_AT_ONCE]
        tickets = lm.submit([_item(node, top) for node in asked])
        lm.drive(tickets)
        for node, ticket in zip(asked, tickets, strict=True):
            found[node.id] = list(_seen(lm, ticket.result()[0]))
    return found


def _item(node: Heddle, top: int) -> Extend:
    assert node.parent is not None
    place, tokens = node.parent._where(), node.tokens
    return Extend(place, tokens, (Scores(place.depth, place.depth + len(tokens), top),))


def _seen(lm: LM, score: Score) -> Iterator[Seen]:
    rows = zip(
        score.ranks.tolist(), score.top_ids.tolist(), score.top_logprobs.tolist(), strict=True
    )
    for rank, ids, logprobs in rows:
        listed = enumerate(zip(ids, logprobs, strict=True))
        yield Seen(rank, tuple(_token_prob(lm, token, lp, at) for at, (token, lp) in listed))


def _token_prob(lm: LM, token: int, logprob: float, rank: int) -> TokenProb:
    text = lm.text
    return TokenProb(
        token, text.token_text(token), text.token_bytes(token), logprob, math.exp(logprob), rank
    )
