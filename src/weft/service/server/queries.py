"""Asking a model about a node without growing it: next tokens, figures of given ones.

The caller holds the loom's lock. While the model works others have the tree: what is asked is of
the node as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core.atomic_files import json_number
from ..._core.sampling.metrics import entropy as entropy_of
from ..._core.sampling.metrics import largest, log_softmax
from ..._core.sampling.params import SamplingParams
from ..._core.sampling.sampler import probabilities
from ..._core.sched.work import Extend, Logits
from ...errors import ConfigError
from ...lm.lm import LM
from ...loom import Heddle
from ...loom.heddle import at_end, measure_item, next_item, text_score
from ..api.nodes import MeasureText, NextTokens
from .errors import RequestError
from .open_loom import OpenLoom
from .service import Service

if TYPE_CHECKING:
    from ..._core.kv.place import Place

Json = dict[str, Any]
_ROWS = 256  # logits rows that are asked for at once: each is 4 bytes a token of the vocabulary
_FILTERS = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def token_candidate(lm: LM, token: int, logprobs: Any, rank: int, sampled: Any = None) -> Json:
    """Return what is told of a token that may stand at a place, in TokenCandidate's words."""
    logprob = float(logprobs[token])
    told: Json = {
        "id": token,
        "text": lm.text.token_text(token),
        "bytes": list(lm.text.token_bytes(token)),
        "logprob": json_number(logprob),
        "p": float(np.exp(logprob)),
        "rank": rank,
    }
    if sampled is not None:
        told["p_sampled"] = float(sampled[token])
    return told


async def predict_next(service: Service, live: OpenLoom, node: Heddle, asked: NextTokens) -> Json:
    """Return the likeliest next tokens and the candidates, in NextReply's words."""
    assert live.lm is not None
    live.check_not_growing(node)
    with service.work("next", service.models.name_of(live.lm)) as lm:
        ids = [candidate_token_id(lm, each) for each in asked.candidates]
        item = next_item(node, asked.top)
        async with live.released_lock():
            tickets = await lm.asubmit([item])
            await lm.adrive(tickets)
            logits = tickets[0].result()[0]
            ahead = (
                await greedy_continuations(lm, item.place, ids, asked.ahead) if asked.ahead else []
            )
    logprobs = log_softmax(logits)
    order = largest(logprobs[None], asked.top)[0].tolist()
    given = {name: getattr(asked, name) for name in _FILTERS if getattr(asked, name) is not None}
    sampled = sampling_probabilities(lm, logits, given) if given else None
    rest = max(0.0, 1.0 - float(np.exp(logprobs[order].astype(np.float64)).sum()))
    candidates = [
        token_candidate(lm, token, logprobs, int((logprobs > logprobs[token]).sum()), sampled)
        for token in ids
    ]
    for told, text in zip(candidates, ahead, strict=False):
        told["ahead"] = text
    return {
        "node": live.number(node),
        "next": [
            token_candidate(lm, token, logprobs, at, sampled) for at, token in enumerate(order)
        ],
        "candidates": candidates,
        "rest": rest,
        "entropy": json_number(entropy_of(logprobs)),
    }


async def greedy_continuations(lm: LM, place: Place, ids: list[int], n: int) -> list[str]:
    """Return how greedy decoding goes on after each of these tokens, n tokens at most; in text."""
    paths = [[token] for token in ids]
    open_ones = [path for path in paths if path[0] not in lm.text.stop_ids]
    while open_ones and len(open_ones[0]) <= n:
        items = [Extend(place, path, (Logits(place.depth + len(path)),)) for path in open_ones]
        tickets = await lm.asubmit(items)
        await lm.adrive(tickets)
        drawn = [int(ticket.result()[0].argmax()) for ticket in tickets]
        pairs = list(zip(open_ones, drawn, strict=True))
        open_ones = [path for path, token in pairs if token not in lm.text.stop_ids]
        for path, token in pairs:
            path.append(token)
    ends = lm.text.stop_ids
    return [lm.text.decode([each for each in path[1:] if each not in ends]) for path in paths]


def candidate_token_id(lm: LM, given: int | str) -> int:
    """Return a candidate's token id. Raises: Refused for a text that is not one token."""
    if isinstance(given, int):
        if not 0 <= given < lm.info.n_vocab:
            raise RequestError(
                422,
                "tokens_out_of_vocabulary",
                f"token id {given} is outside the vocabulary of {lm.info.n_vocab}",
                param="candidates",
            )
        return given
    ids = lm.text.continuation(given) if given else []
    if len(ids) != 1:
        raise RequestError(
            400,
            "invalid_parameter",
            f"{given!r:.60} is {len(ids)} tokens; a candidate is one",
            param="candidates",
        )
    return ids[0]


def sampling_probabilities(lm: LM, logits: Any, given: Json) -> Any:
    """Return each token's probability after temperature and filters: float64 [V]."""
    params = SamplingParams.resolve({**given}, SamplingParams())
    return probabilities(logits, params)


async def measure_text(service: Service, live: OpenLoom, node: Heddle, asked: MeasureText) -> Json:
    """Return how likely a text is after a node, in MeasureReply's words."""
    assert live.lm is not None
    live.check_not_growing(node)
    at, text = node, asked.token_ids if asked.text is None else asked.text
    if text is None:
        if node.parent is None:
            raise ConfigError("the root is the prompt: nothing stands before it; give a text")
        at, text = node.parent, node.tokens
    special = asked.special if isinstance(text, str) and asked.special else None
    with service.work("measure", service.models.name_of(live.lm)) as lm:
        item = measure_item(at, text, special)
        async with live.released_lock():
            tickets = await lm.asubmit([item])
            await lm.adrive(tickets)
        score = text_score(lm, item, tickets[0].result()[0])
    return {
        "node": live.number(node),
        "token_ids": list(score.tokens),
        "texts": list(score.texts),
        "logprobs": [json_number(value) for value in score.logprobs],
        "total": json_number(score.total),
        "mean": json_number(score.mean),
        "perplexity": json_number(score.perplexity),
    }


async def read_node_tokens(
    service: Service,
    live: OpenLoom,
    node: Heddle,
    top: int,
    span: tuple[int, int | None] = (0, None),
    *,
    sampled: bool = False,
) -> Json:
    """Return a node's tokens from span[0] up to span[1], in TokenList's words.

    top: asks the model for what it saw there. sampled: and what the node's own sampling made of it.
    """
    ids = node.tokens
    at_all = range(len(ids))[span[0] : span[1]]
    seen: dict[int, Json]
    if top and at_all:
        seen = await _score_tokens(service, live, node, top, at_all, sampled)
    else:
        has = len(node.logprobs) == len(ids), len(node.entropies) == len(ids)
        seen = {
            at: {
                "logprob": json_number(node.logprobs[at]) if has[0] else None,
                "entropy": json_number(node.entropies[at]) if has[1] else None,
            }
            for at in at_all
        }
    lm = live.lm
    rows = [
        {
            "index": at,
            "id": ids[at],
            "text": lm.text.token_text(ids[at]) if lm is not None else "",
            "bytes": list(lm.text.token_bytes(ids[at])) if lm is not None else [],
            **seen.get(at, {"logprob": None, "entropy": None}),
        }
        for at in at_all
    ]
    return {"node": live.number(node), "measured": bool(top and at_all), "data": rows}


async def _score_tokens(
    service: Service, live: OpenLoom, node: Heddle, top: int, at_all: range, sampled: bool
) -> dict[int, Json]:
    """Return what the model sees at some of a node's tokens; of a path's first it sees nothing."""
    assert live.lm is not None
    live.check_not_growing(node)
    ids, params = node.tokens, node.params if sampled else None
    if node.parent is None:
        place, before = live.lm.place(ids[:1]), 0
        rest, first = ids[1:], 1
    else:
        place = at_end(node.parent)
        rest, first, before = ids, 0, place.depth
    seen: dict[int, Json] = {}
    wanted = at_all[1:] if at_all.start < first else at_all
    with service.work("tokens", service.models.name_of(live.lm)) as lm:
        async with live.released_lock():
            for low in range(wanted.start, wanted.stop, _ROWS):
                chunk = range(low, min(low + _ROWS, wanted.stop))
                wants = tuple(Logits(before + at) for at in chunk)
                tickets = await lm.asubmit([Extend(place, rest[: chunk.stop - 1 - first], wants)])
                await lm.adrive(tickets)
                for at, logits in zip(chunk, tickets[0].result(), strict=True):
                    seen[at] = _token_scores(lm, logits, ids[at], top, params)
    return seen


def _token_scores(lm: LM, logits: Any, token: int, top: int, params: SamplingParams | None) -> Json:
    logprobs = log_softmax(logits)
    order = largest(logprobs[None], top)[0].tolist()
    drawn = None if params is None else probabilities(logits, params)
    told: Json = {
        "logprob": json_number(float(logprobs[token])),
        "entropy": json_number(entropy_of(logprobs)),
        "rank": int((logprobs > logprobs[token]).sum()),
        "top": [token_candidate(lm, each, logprobs, i, drawn) for i, each in enumerate(order)],
    }
    if drawn is not None:
        told["p_sampled"] = float(drawn[token])
    return told
