"""Log-probabilities of tokens, raw: asked of the model once a call, and as the two shapes of them.

What a choice drew has its own logprob from its run. Alternatives, and tokens that were given, are
read in one forward over them, beside all other work: the prompt's KV is there already.
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
    """A token at its place: its logprob (None for a text's first), and the likeliest there.

    top: (token id, logprob), likeliest first. asked: likewise, of tokens that the caller named.
    rank: 1 for the likeliest; None where nobody looked.
    """

    token: int
    logprob: float | None
    rank: int | None = None
    top: Sequence[tuple[int, float]] = ()
    asked: Sequence[tuple[int, float]] = ()


# (place, tokens after it, depth of the first target, targets): the tokens to score on a path.
ScoreRequest = tuple["Place", Sequence[int], int, Sequence[int]]


class LogprobsRequest(NamedTuple):
    """top: how many alternatives. tokens: ids whose logprobs are told at every place."""

    top: int
    tokens: tuple[int, ...] = ()


async def of_prompts(
    lm: LM, places: Sequence[Place], wanted: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Return the figures of the tokens up to each place; a first token has none."""
    paths = [place.ids() for place in places]
    asked: list[ScoreRequest] = [
        (place, [], 1, ids[1:]) for place, ids in zip(places, paths, strict=True)
    ]
    found = await _read(lm, asked, wanted)
    return [[ScoredToken(ids[0], None), *rest] for ids, rest in zip(paths, found, strict=True)]


async def of_replies(
    lm: LM, parts: Sequence[tuple[ChoiceRun, int, Sequence[int]]], wanted: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Return the figures of some tokens of choices: (choice, which is the first, the tokens).

    The tokens may end with the end token. All are read in one batch.
    """
    if not wanted.top and not wanted.tokens and all(_is_told(*part) for part in parts):
        return [
            [ScoredToken(token, reply.logprobs[first + i]) for i, token in enumerate(tokens)]
            for reply, first, tokens in parts
        ]
    asked: list[ScoreRequest] = []
    for reply, first, tokens in parts:
        before = reply.node.parent
        assert before is not None
        place = before.place
        path = [*reply.tokens[:first], *tokens]
        asked.append((place, path, place.depth + first, list(tokens)))
    return await _read(lm, asked, wanted)


def _is_told(reply: ChoiceRun, first: int, tokens: Sequence[int]) -> bool:
    return first + len(tokens) <= len(reply.logprobs)


async def _read(
    lm: LM, asked: Sequence[ScoreRequest], wanted: LogprobsRequest
) -> list[list[ScoredToken]]:
    """Return the figures of what is asked for, in one batch."""
    items = []
    kept = []
    for place, path, first, targets in asked:
        if not targets:
            continue
        last = first + len(targets)
        lm.place(path, after=place)  # refuses what is longer than the context
        wants: list[Any] = [Scores(first, last, wanted.top)]
        if wanted.tokens:
            wants += [Logits(depth) for depth in range(first, last)]
        items.append(Extend(place, path, tuple(wants)))
        kept.append(targets)
    tickets = await lm.asubmit(items) if items else []
    if tickets:
        await lm.adrive(tickets)
    found = (
        _ranked(ticket.result(), targets, wanted)
        for ticket, targets in zip(tickets, kept, strict=True)
    )
    return [next(found) if targets else [] for *_, targets in asked]


def _ranked(
    answers: Sequence[Any], targets: Sequence[int], wanted: LogprobsRequest
) -> list[ScoredToken]:
    score: Score = answers[0]
    logprobs = score.logprobs.tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in targets]
    if wanted.top:
        ids, values = score.top_ids.tolist(), score.top_logprobs.tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    ranks = [None] * len(targets) if score.ranks is None else (score.ranks + 1).tolist()
    rows = [log_softmax(row) for row in answers[1:]]
    made = []
    for i, (token, logprob, top) in enumerate(zip(targets, logprobs, tops, strict=True)):
        # One number for one token: harnesses ask whether the chosen one is the likeliest.
        same = dict(top).get(token, logprob)
        asked = [(each, float(rows[i][each])) for each in wanted.tokens]
        made.append(ScoredToken(token, same, ranks[i], top, asked))
    return made


def token_name(lm: LM, token: int) -> str:
    """Return a token's text; where it is a part of a character its bytes, as OpenAI writes them."""
    spelled = lm.text.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    """Return a logprob as JSON can say it: what is impossible is -9999, as OpenAI has it."""
    return max(logprob, -9999.0)


def chat_logprobs(lm: LM, figures: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Return figures as a chat's `logprobs.content`. The chosen token stands among the top ones."""
    return [
        {
            **_entry(lm, each.token, each.logprob or 0.0),
            "top_logprobs": [_entry(lm, *one) for one in _with_chosen(each)],
            **({"asked": [_entry(lm, *one) for one in each.asked]} if each.asked else {}),
        }
        for each in figures
    ]


def _entry(lm: LM, token: int, logprob: float) -> dict[str, Any]:
    spelled = list(lm.text.token_bytes(token))
    return {"token": token_name(lm, token), "logprob": finite(logprob), "bytes": spelled}


def _with_chosen(figures: ScoredToken) -> list[tuple[int, float]]:
    """Return the likeliest tokens, and the chosen one where it is not among them."""
    top = list(figures.top)
    if top and figures.logprob is not None and figures.token not in dict(top):
        top.append((figures.token, figures.logprob))
    return top


def completion_logprobs(
    lm: LM, figures: Sequence[ScoredToken], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return figures as a completion's `logprobs`: lists, an entry a token.

    offsets: where each token's text begins, in letters.
    """
    made: dict[str, Any] = {
        "tokens": [token_name(lm, each.token) for each in figures],
        "token_logprobs": [_or_none(each.logprob) for each in figures],
        "top_logprobs": [_by_name(lm, each) for each in figures],
        "text_offset": list(offsets),
    }
    if any(each.asked for each in figures):
        asked = [{token_name(lm, t): finite(p) for t, p in each.asked} for each in figures]
        made["asked"] = asked
    return made


def prompt_logprobs_entries(lm: LM, figures: Sequence[ScoredToken]) -> list[dict[str, Any] | None]:
    """Return figures as `prompt_logprobs`: by token id, with ranks; None for the first token."""
    return [None if each.logprob is None else _by_id(lm, each) for each in figures]


def _by_id(lm: LM, figures: ScoredToken) -> dict[str, Any]:
    ranks = {token: number for number, (token, _) in enumerate(figures.top, start=1)}
    listed = _with_chosen(figures) or [(figures.token, figures.logprob or 0.0)]
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": ranks.get(token, figures.rank),
            "decoded_token": token_name(lm, token),
        }
        for token, logprob in listed
    }


def _or_none(logprob: float | None) -> float | None:
    return None if logprob is None else finite(logprob)


def _by_name(lm: LM, figures: ScoredToken) -> dict[str, float] | None:
    if figures.logprob is None:
        return None
    made: dict[str, float] = {}
    for token, logprob in _with_chosen(figures) or [(figures.token, figures.logprob)]:
        made.setdefault(token_name(lm, token), finite(logprob))
    return made


def check_logprobs_supported(lm: LM, top: int, *, given: bool) -> None:
    """Raise Unsupported where the engine does not tell what is asked for."""
    capabilities = lm.info.capabilities
    if (top or given) and not (capabilities.steps or (capabilities.scoring is True and not top)):
        raise Unsupported(
            f"{lm.info.model} on the {lm.info.name} engine tells no logprobs of "
            + ("alternatives" if top else "given text")
        )
