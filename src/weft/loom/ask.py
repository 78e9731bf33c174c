"""Questions to the model at a node, which add nothing to the tree: next tokens and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..checks import whole_number
from ..errors import ConfigError
from ..results import Distribution, TextScore, TokenProb
from ..sampling.metrics import log_softmax
from ..sampling.order import largest
from ..sched.work import Extend, Logits, Scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..engines.base import Score
    from ..kv.cursor import Place
    from ..lm import LM
    from .node import Node


def at_end(node: Node) -> Place:
    """Return the node's place; ConfigError when nothing stands before it."""
    place = node._where()
    if not place.depth:
        raise ConfigError("there is nothing to ask after: the node's whole path is empty. Add text")
    return place


def next_item(node: Node, top: int) -> Extend:
    """Return the work item of `next`."""
    whole_number("top", top, 1)
    place = at_end(node)
    return Extend(place, (), (Logits(place.depth),))


def distribution(lm: LM, logits: NDArray[np.float32], top: int) -> Distribution:
    """Return the `top` likeliest ids, ties by lower id."""
    logprobs = log_softmax(logits)
    order = largest(logprobs[None], top)[0].tolist()
    values = logprobs[order].astype(np.float64)
    text = lm.text
    return Distribution(
        TokenProb(token, text.token_text(token), text.token_bytes(token), logprob, p, rank)
        for rank, (token, logprob, p) in enumerate(
            zip(order, values.tolist(), np.exp(values).tolist(), strict=True)
        )
    )


def ids_of(node: Node, text: str | Sequence[int], special: bool | None) -> Sequence[int]:
    """Return a text's token ids as what goes on after the node; token ids as they are."""
    if isinstance(text, str):
        return node._encode(text, special)
    if special is not None:
        raise ConfigError("special is about how a text is read; token ids are what they are")
    return text


def measure_item(node: Node, text: str | Sequence[int], special: bool | None = None) -> Extend:
    """Return the work item of `measure`."""
    ids = list(ids_of(node, text, special))
    if not ids:
        raise ConfigError("there is nothing to measure: the text has no tokens")
    place = at_end(node)
    node._home.live_lm().place(ids, after=place)
    return Extend(place, ids, (Scores(place.depth, place.depth + len(ids)),))


def text_score(lm: LM, item: Extend, score: Score) -> TextScore:
    """Return the answer to `measure_item`."""
    texts = tuple(lm.text.token_text(token) for token in item.tokens)
    return TextScore(tuple(item.tokens), texts, tuple(score.logprobs.tolist()))
