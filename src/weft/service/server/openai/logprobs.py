"""Raw log-probabilities of tokens, in one batch per call, and the two formats of them.

A generated token has its logprob from its run. Alternatives, and tokens of prompts, take one extra
forward pass, whose prefix KV is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._core.sampling.metrics import log_softmax
from ...._core.sched.work import Extend, Logits, Scores
from ....errors import Unsupported

if TYPE_CHECKING:
    from ...._core.kv.place import Place
    from ....engines.base import Score
    from ....lm.lm import LM
    from .runs import ChoiceRun


class ScoredToken(NamedTuple):
    """A token with its logprob and the likeliest tokens at its position.

    Args:
        token: its id.
        logprob: None for the first token of a text.
        rank: 1 for the likeliest token; None if unknown.
        top: (token id, logprob) of the likeliest tokens, likeliest first.
        requested: (token id, logprob) of the tokens in `LogprobsRequest.tokens`.
    """

    token: int
    logprob: float | None
    rank: int | None = None
    top: Sequence[tuple[int, float]] = ()
    requested: Sequence[tuple[int, float]] = ()


# (place, tokens after it, depth of the first target, targets): the tokens to score on a path.
ScoreRequest = tuple["Place", Sequence[int], int, Sequence[int]]


class LogprobsRequest(NamedTuple):
    """The logprobs that a request needs in addition to those of the generated tokens.

    top: number of the likeliest tokens at each position. tokens: ids to score at each position.
    """

    top: int
    tokens: tuple[int, ...] = ()


async def of_prompts(
    lm: LM, places: Sequence[Place], request: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Run the model and return the scores of all tokens of each prompt.

    The first token has no logprob.

    Args:
        lm: the model.
        places: the ends of the prompts.
        request: alternatives to return.
    """
    paths = [place.ids() for place in places]
    requests: list[ScoreRequest] = [
        (place, [], 1, ids[1:]) for place, ids in zip(places, paths, strict=True)
    ]
    scores = await _score(lm, requests, request)
    return [[ScoredToken(ids[0], None), *rest] for ids, rest in zip(paths, scores, strict=True)]


async def of_replies(
    lm: LM, parts: Sequence[tuple[ChoiceRun, int, Sequence[int]]], request: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Return the scores of tokens of several choices, a list for each part.

    The model runs, in one batch, only if alternatives or the logprobs of tokens are missing.

    Args:
        parts: (choice, index of the first token in the choice, tokens to score). The tokens may
            include the end token, which the choice itself does not have.
    """
    if not request.top and not request.tokens and all(_has_logprobs(*part) for part in parts):
        return [
            [ScoredToken(token, reply.logprobs[first + i]) for i, token in enumerate(tokens)]
            for reply, first, tokens in parts
        ]
    requests: list[ScoreRequest] = []
    for reply, first, tokens in parts:
        parent = reply.node.parent
        assert parent is not None
        place = parent.place
        path = [*reply.tokens[:first], *tokens]
        requests.append((place, path, place.depth + first, list(tokens)))
    return await _score(lm, requests, request)


def _has_logprobs(reply: ChoiceRun, first: int, tokens: Sequence[int]) -> bool:
    """Return True if the choice has a recorded logprob for each of these tokens."""
    return first + len(tokens) <= len(reply.logprobs)


async def _score(
    lm: LM, requests: Sequence[ScoreRequest], request: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Run the model once for all requests; return the scores of their tokens, a list for each.

    requests: (place, tokens after it, depth of the first token to score, tokens to score).
    """
    items = []
    all_targets = []
    for place, path, first, targets in requests:
        if not targets:
            continue
        last = first + len(targets)
        lm.place(path, after=place)  # raises if the path is longer than the context
        wants: list[Any] = [Scores(first, last, request.top)]
        if request.tokens:
            wants += [Logits(depth) for depth in range(first, last)]
        items.append(Extend(place, path, tuple(wants)))
        all_targets.append(targets)
    tickets = await lm.asubmit(items) if items else []
    if tickets:
        await lm.adrive(tickets)
    scores = (
        _to_scored_tokens(ticket.result(), targets, request)
        for ticket, targets in zip(tickets, all_targets, strict=True)
    )
    return [next(scores) if targets else [] for *_, targets in requests]


def _to_scored_tokens(
    answers: Sequence[Any], targets: Sequence[int], request: LogprobsRequest
) -> list[ScoredToken]:
    """Convert the model's scores of target tokens to `ScoredToken`s."""
    score: Score = answers[0]
    logprobs = score.logprobs.tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in targets]
    if request.top:
        ids, values = score.top_ids.tolist(), score.top_logprobs.tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    ranks = [None] * len(targets) if score.ranks is None else (score.ranks + 1).tolist()
    row_logprobs = [log_softmax(row) for row in answers[1:]]
    scored = []
    for i, (token, logprob, top) in enumerate(zip(targets, logprobs, tops, strict=True)):
        # The same value as in `top`: harnesses compare the two to detect greedy tokens.
        consistent = dict(top).get(token, logprob)
        requested = [(other, float(row_logprobs[i][other])) for other in request.tokens]
        scored.append(ScoredToken(token, consistent, ranks[i], top, requested))
    return scored


def token_name(lm: LM, token: int) -> str:
    """Return a token's text. For incomplete characters it is the bytes, as OpenAI writes them."""
    spelled = lm.text.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    """Return a logprob as JSON can represent it: -inf becomes -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def chat_logprobs(lm: LM, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Convert scores to the `logprobs.content` of a chat.

    `top_logprobs` always contains the chosen token, if alternatives were requested.
    """
    return [
        {
            **_logprob_entry(lm, each.token, each.logprob or 0.0),
            "top_logprobs": [_logprob_entry(lm, *one) for one in _with_chosen(each)],
            **(
                {"asked": [_logprob_entry(lm, *one) for one in each.requested]}
                if each.requested
                else {}
            ),
        }
        for each in scored
    ]


def _logprob_entry(lm: LM, token: int, logprob: float) -> dict[str, Any]:
    """Return a token's text, logprob and bytes, as chat completions have them."""
    spelled = list(lm.text.token_bytes(token))
    return {"token": token_name(lm, token), "logprob": finite(logprob), "bytes": spelled}


def _with_chosen(scored: ScoredToken) -> list[tuple[int, float]]:
    """Return the likeliest tokens, and the chosen one if it is not among them."""
    top = list(scored.top)
    if top and scored.logprob is not None and scored.token not in dict(top):
        top.append((scored.token, scored.logprob))
    return top


def completion_logprobs(
    lm: LM, scored: Sequence[ScoredToken], offsets: Sequence[int]
) -> dict[str, Any]:
    """Convert scores to the `logprobs` of a completion: lists with an entry per token.

    offsets: index of the character at which each token's text begins.
    """
    lists: dict[str, Any] = {
        "tokens": [token_name(lm, each.token) for each in scored],
        "token_logprobs": [_or_none(each.logprob) for each in scored],
        "top_logprobs": [_by_name(lm, each) for each in scored],
        "text_offset": list(offsets),
    }
    if any(each.requested for each in scored):
        requested = [{token_name(lm, t): finite(p) for t, p in each.requested} for each in scored]
        lists["asked"] = requested
    return lists


def prompt_logprobs_entries(lm: LM, scored: Sequence[ScoredToken]) -> list[dict[str, Any] | None]:
    """Convert scores to `prompt_logprobs`: for each token a dict by token id, with ranks.

    The entry of a prompt's first token is None.
    """
    return [None if each.logprob is None else _by_id(lm, each) for each in scored]


def _by_id(lm: LM, scored: ScoredToken) -> dict[str, Any]:
    """Return the scores of one position by token id, as `prompt_logprobs` has them."""
    ranks = {token: number for number, (token, _) in enumerate(scored.top, start=1)}
    listed = _with_chosen(scored) or [(scored.token, scored.logprob or 0.0)]
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": ranks.get(token, scored.rank),
            "decoded_token": token_name(lm, token),
        }
        for token, logprob in listed
    }


def _or_none(logprob: float | None) -> float | None:
    """Return a logprob as JSON can represent it; None stays None."""
    return None if logprob is None else finite(logprob)


def _by_name(lm: LM, scored: ScoredToken) -> dict[str, float] | None:
    """Return the likeliest tokens of one position by text; None without any."""
    if scored.logprob is None:
        return None
    by_name: dict[str, float] = {}
    for token, logprob in _with_chosen(scored) or [(scored.token, scored.logprob)]:
        by_name.setdefault(token_name(lm, token), finite(logprob))
    return by_name


def check_logprobs_supported(lm: LM, top: int, *, needs_prompt: bool) -> None:
    """Raise Unsupported if the engine cannot compute the requested logprobs.

    top: requested number of alternatives. needs_prompt: logprobs of the prompt are requested.
    """
    capabilities = lm.info.capabilities
    if (top or needs_prompt) and not (
        capabilities.steps or (capabilities.scoring is True and not top)
    ):
        raise Unsupported(
            f"the {lm.info.name} engine of {lm.info.model} has no logprobs of "
            + ("alternative tokens" if top else "prompts")
        )
