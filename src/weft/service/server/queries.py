"""Read-only questions to a model about a node: next tokens, and scores of given tokens.

The caller holds the loom's lock. The lock is released while the model works, so results describe
the node as it was before.
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
from ...lm.scoring import text_score
from ...loom import Heddle
from ...loom.heddle import at_end, measure_item, next_item
from ..api.nodes import MeasureText, NextTokens
from .errors import RequestError
from .open_loom import OpenLoom
from .service import Service

if TYPE_CHECKING:
    from ..._core.kv.place import Place

Json = dict[str, Any]
_ROWS = 256  # logits rows per request: each takes 4 bytes per token of the vocabulary
_FILTERS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "temperature_first"),
)


def token_candidate(lm: LM, token: int, logprobs: Any, rank: int, sampled: Any = None) -> Json:
    """Return the fields of a TokenCandidate for one token.

    Args:
        token: its id.
        logprobs: the model's log-probabilities of all tokens, [V].
        rank: the token's rank by probability.
        sampled: probabilities after temperature and filters, [V]; None if not requested.
    """
    logprob = float(logprobs[token])
    candidate: Json = {
        "id": token,
        "text": lm.text.token_text(token),
        "bytes": list(lm.text.token_bytes(token)),
        "logprob": json_number(logprob),
        "p": float(np.exp(logprob)),
        "rank": rank,
    }
    if sampled is not None:
        candidate["p_sampled"] = float(sampled[token])
    return candidate


async def predict_next(service: Service, live: OpenLoom, node: Heddle, request: NextTokens) -> Json:
    """Return the likeliest next tokens and the requested candidates, as fields of a NextReply.

    live: the loom, whose lock the caller holds.
    """
    assert live.lm is not None
    live.check_not_growing(node)
    with service.work("next", service.models.name_of(live.lm)) as lm:
        ids = [candidate_token_id(lm, value) for value in request.candidates]
        item = next_item(node, request.top)
        async with live.released_lock():
            tickets = await lm.asubmit([item])
            await lm.adrive(tickets)
            logits = tickets[0].result()[0]
            continuations = (
                await greedy_continuations(lm, item.place, ids, request.ahead)
                if request.ahead
                else []
            )
    logprobs = log_softmax(logits)
    top_ids = largest(logprobs[None], request.top)[0].tolist()
    filters = {
        name: getattr(request, name) for name in _FILTERS if getattr(request, name) is not None
    }
    sampled = sampling_probabilities(lm, logits, filters) if filters else None
    rest_p = max(0.0, 1.0 - float(np.exp(logprobs[top_ids].astype(np.float64)).sum()))
    candidates = [
        token_candidate(lm, token, logprobs, int((logprobs > logprobs[token]).sum()), sampled)
        for token in ids
    ]
    for candidate, text in zip(candidates, continuations, strict=False):
        candidate["ahead"] = text
    return {
        "node": live.number(node),
        "next": [
            token_candidate(lm, token, logprobs, at, sampled) for at, token in enumerate(top_ids)
        ],
        "candidates": candidates,
        "rest": rest_p,
        "entropy": json_number(entropy_of(logprobs)),
    }


async def greedy_continuations(lm: LM, place: Place, ids: list[int], n: int) -> list[str]:
    """Return, for each token of `ids`, the text that greedy decoding adds after it.

    place: the path before the tokens. n: maximum number of tokens in each text.
    """
    paths = [[token] for token in ids]
    unfinished = [path for path in paths if path[0] not in lm.text.stop_ids]
    while unfinished and len(unfinished[0]) <= n:
        items = [Extend(place, path, (Logits(place.depth + len(path)),)) for path in unfinished]
        tickets = await lm.asubmit(items)
        await lm.adrive(tickets)
        next_ids = [int(ticket.result()[0].argmax()) for ticket in tickets]
        pairs = list(zip(unfinished, next_ids, strict=True))
        unfinished = [path for path, token in pairs if token not in lm.text.stop_ids]
        for path, token in pairs:
            path.append(token)
    stop_ids = lm.text.stop_ids
    return [
        lm.text.decode([token for token in path[1:] if token not in stop_ids]) for path in paths
    ]


def candidate_token_id(lm: LM, given: int | str) -> int:
    """Return the token id that a request means by a candidate for the next token.

    given: a token id, or a text that the tokenizer encodes as exactly one token. Raises:
    RequestError for any other text, and for an id outside the vocabulary.
    """
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
            f"{given!r:.60} is {len(ids)} tokens; a candidate must be one token",
            param="candidates",
        )
    return ids[0]


def sampling_probabilities(lm: LM, logits: Any, given: Json) -> Any:
    """Return each token's probability after temperature and filters: float64 [V].

    logits: [V]. given: sampling parameters of the request, by name.
    """
    params = SamplingParams.resolve({**given}, SamplingParams())
    return probabilities(logits, params)


async def measure_text(
    service: Service, live: OpenLoom, node: Heddle, request: MeasureText
) -> Json:
    """Return the log-probability of a text, as fields of a MeasureReply.

    The text of the request is scored as a continuation of `node`. If the request has none, the
    node's own text is scored. live: the loom, whose lock the caller holds.
    """
    assert live.lm is not None
    live.check_not_growing(node)
    start, text = node, request.token_ids if request.text is None else request.text
    if text is None:
        if node.parent is None:
            raise ConfigError(
                "the root is the prompt, so nothing precedes it; give text or token_ids"
            )
        start, text = node.parent, node.tokens
    special = request.special if isinstance(text, str) and request.special else None
    with service.work("measure", service.models.name_of(live.lm)) as lm:
        item = measure_item(start, text, special)
        async with live.released_lock():
            tickets = await lm.asubmit([item])
            await lm.adrive(tickets)
        score = text_score(lm, item.tokens, tickets[0].result()[0])
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
    """Return tokens of a node, as the fields of a TokenList.

    Args:
        top: number of alternatives for each token; above 0 the model runs.
        span: index of the first token, and the index after the last one (None: to the end).
        sampled: add the probabilities under the node's own sampling parameters.
    """
    ids = node.tokens
    indices = range(len(ids))[span[0] : span[1]]
    scores: dict[int, Json]
    if top and indices:
        scores = await _score_tokens(service, live, node, top, indices, sampled)
    else:
        has_scores = len(node.logprobs) == len(ids), len(node.entropies) == len(ids)
        scores = {
            at: {
                "logprob": json_number(node.logprobs[at]) if has_scores[0] else None,
                "entropy": json_number(node.entropies[at]) if has_scores[1] else None,
            }
            for at in indices
        }
    lm = live.lm
    rows = [
        {
            "index": at,
            "id": ids[at],
            "text": lm.text.token_text(ids[at]) if lm is not None else "",
            "bytes": list(lm.text.token_bytes(ids[at])) if lm is not None else [],
            **scores.get(at, {"logprob": None, "entropy": None}),
        }
        for at in indices
    ]
    return {"node": live.number(node), "measured": bool(top and indices), "data": rows}


async def _score_tokens(
    service: Service, live: OpenLoom, node: Heddle, top: int, indices: range, sampled: bool
) -> dict[int, Json]:
    """Run the model; return its scores for tokens of a node, by index of the token.

    The first token of a path has no score. indices: of the tokens to score.
    """
    assert live.lm is not None
    live.check_not_growing(node)
    ids, params = node.tokens, node.params if sampled else None
    if node.parent is None:
        place, n_before = live.lm.place(ids[:1]), 0
        rest, first = ids[1:], 1
    else:
        place = at_end(node.parent)
        rest, first, n_before = ids, 0, place.depth
    scores: dict[int, Json] = {}
    scored_indices = indices[1:] if indices.start < first else indices
    with service.work("tokens", service.models.name_of(live.lm)) as lm:
        async with live.released_lock():
            for low in range(scored_indices.start, scored_indices.stop, _ROWS):
                chunk = range(low, min(low + _ROWS, scored_indices.stop))
                wants = tuple(Logits(n_before + at) for at in chunk)
                tickets = await lm.asubmit([Extend(place, rest[: chunk.stop - 1 - first], wants)])
                await lm.adrive(tickets)
                for at, logits in zip(chunk, tickets[0].result(), strict=True):
                    scores[at] = _token_scores(lm, logits, ids[at], top, params)
    return scores


def _token_scores(lm: LM, logits: Any, token: int, top: int, params: SamplingParams | None) -> Json:
    """Return the model's scores for one recorded token, as fields of a TokenList entry.

    Args:
        logits: of the token's position, [V].
        token: the recorded token id.
        top: number of alternatives.
        params: adds probabilities under these sampling parameters; None adds none.
    """
    logprobs = log_softmax(logits)
    top_ids = largest(logprobs[None], top)[0].tolist()
    sampled = None if params is None else probabilities(logits, params)
    scores: Json = {
        "logprob": json_number(float(logprobs[token])),
        "entropy": json_number(entropy_of(logprobs)),
        "rank": int((logprobs > logprobs[token]).sum()),
        "top": [
            token_candidate(lm, other, logprobs, i, sampled) for i, other in enumerate(top_ids)
        ],
    }
    if sampled is not None:
        scores["p_sampled"] = float(sampled[token])
    return scores
