"""Log-probabilities of given texts after a prompt: `LM.score`, `LM.choose`, `LM.score_many`.

`read_request` tokenizes a prompt with its candidates. `ScoreRequest.items` are its work items for
the scheduler, and `ScoreRequest.results` reads the scores from their tickets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from .._core.sched.work import Extend, Scores
from .._core.validation import check_bool
from ..errors import ConfigError
from .chat import ChatPrompt
from .results import Normalize, Selection, TextScore

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from .._core.sched.work import Ticket
    from ..engines.base import Score
    from .lm import LM

    Text = str | Sequence[int]
    Prompt = str | Sequence[dict[str, Any]] | Sequence[int]
    Value = float | tuple[float, ...]

Method = Literal[
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "likelihood",
]

_STEPS_AHEAD = 4  # `score_many` submits the tokens of so many full steps before it waits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A text to score.

    Attributes:
        ids: its token ids, with the end token if `end` is True.
        n_bytes: UTF-8 length of the text without the end token, for `normalize="bytes"`.
    """

    ids: list[int]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One tokenized prompt with the candidates to score after it; `read_request` creates it."""

    prompt_ids: list[int]
    candidates: list[Candidate]

    def items(self, lm: LM) -> list[Extend]:
        """Return one work item per candidate, to submit together.

        Raises: ContextOverflow if prompt and candidate are longer than the context.
        """
        place = lm.place(self.prompt_ids)
        return [score_item(lm, place, candidate.ids) for candidate in self.candidates]

    def results(self, lm: LM, tickets: Sequence[Ticket], normalize: Normalize) -> list[TextScore]:
        """Return one score per candidate.

        tickets: those of `items`, in its order; all must be done.
        """
        return [
            text_score(lm, one.ids, ticket.result()[0], normalize=normalize, n_bytes=one.n_bytes)
            for one, ticket in zip(self.candidates, tickets, strict=True)
        ]


def score_item(lm: LM, place: Place, ids: Sequence[int]) -> Extend:
    """Return the work item for the log-probabilities of `ids` (at least one) after a place.

    The last token needs no forward pass, so it gets no KV.

    Raises: ContextOverflow if the path is longer than the context.
    """
    *before, final = ids
    lm.check_path(ids[-1:])
    lm.place(before, after=place)  # raises if the path is longer than the context
    first = place.depth
    return Extend(place, before, (Scores(first, first + len(ids), final=final),))


def text_score(
    lm: LM,
    ids: Sequence[int],
    score: Score,
    *,
    normalize: Normalize = "none",
    n_bytes: int | None = None,
) -> TextScore:
    """Convert the engine's result for one text to a `TextScore`.

    Args:
        lm: the LM.
        ids: token ids of the text.
        score: the engine's result, with a log-probability per id.
        normalize: as for `LM.score`.
        n_bytes: UTF-8 length of the text; None: the summed length of its tokens.
    """
    if n_bytes is None:
        n_bytes = sum(len(lm.text.token_bytes(token)) for token in ids)
    return TextScore(
        tokens=tuple(ids),
        texts=tuple(lm.text.token_text(token) for token in ids),
        logprobs=tuple(score.logprobs.tolist()),
        ranks=None if score.ranks is None else tuple(score.ranks.tolist()),
        n_bytes=n_bytes,
        normalize=normalize,
    )


def check_normalize(normalize: str) -> Normalize:
    """Return `normalize` unchanged if it is allowed. Raises: ConfigError otherwise."""
    if normalize not in get_args(Normalize):
        allowed = ", ".join(map(repr, get_args(Normalize)))
        raise ConfigError(f"normalize is {normalize!r:.40}; allowed are {allowed}")
    return cast("Normalize", normalize)


def end_token(lm: LM, *, is_chat: bool) -> int:
    """Return the id of the token that `end=True` appends to a candidate.

    is_chat: the candidate is an assistant's message: the token that ends its turn, if the chat
        template writes one. False: the end-of-generation token.
    """
    closing = lm.turn_separator[:1] if is_chat else []
    return closing[0] if closing and closing[0] in lm.text.stop_ids else lm.eog_token


# Requests -------------------------------------------------------------------------------------


def read_request(
    lm: LM,
    prompt: Prompt,
    candidates: Sequence[Text],
    *,
    end: bool = False,
    system: str | None = None,
    template: bool = False,
) -> ScoreRequest:
    """Tokenize a prompt and its candidates; see `LM.score` for the arguments and errors.

    The boundary is the one of lm-evaluation-harness. Spaces at the end of a raw text
    belong to the candidates. A candidate's tokens are those that it adds to
    the tokens of the prompt, when both are tokenized as one text. After rendered chats and token
    ids, a candidate is tokenized as a continuation.
    """
    from ..loom.loom import read_prompt

    check_bool("end", end)
    _check_candidates(candidates)
    is_raw = isinstance(prompt, str) and not isinstance(prompt, ChatPrompt)
    is_raw = is_raw and (not template or lm.text.chat_template is None)
    template = template or not isinstance(prompt, str)
    before = prompt.rstrip() if is_raw and isinstance(prompt, str) else ""
    read = read_prompt(
        lm.text, before or prompt, template=template, system=system, check=lm.check_length
    )
    ids_of: Callable[[str], list[int]] = lm.text.continuation
    if before:
        ids_of = partial(_ids_after, lm, cast("str", prompt), len(read.ids))
    ending = [end_token(lm, is_chat=read.chat_template_used)] if end else []
    return ScoreRequest(
        read.ids,
        [_candidate(lm, i, one, ids_of, ending) for i, one in enumerate(candidates)],
    )


def _ids_after(lm: LM, prompt: str, n_before: int, candidate: str) -> list[int]:
    """Return the tokens of a candidate: those of prompt + candidate, after the first `n_before`.

    n_before: number of tokens of the prompt without its spaces at the end.
    """
    return lm.text.encode(prompt + candidate)[n_before:]


def _check_candidates(candidates: Sequence[Text]) -> None:
    """Raise ConfigError unless this is a list with at least one text or list of token ids."""
    if isinstance(candidates, str | bytes | Mapping) or not isinstance(candidates, Sequence):
        raise ConfigError(
            f"candidates is a {type(candidates).__name__}; allowed is a list of texts or of lists"
            " of token ids. Put a single text into a list"
        )
    if not candidates:
        raise ConfigError("candidates is empty; give at least one text or list of token ids")


def _candidate(
    lm: LM,
    number: int,
    given: Text,
    ids_of: Callable[[str], list[int]],
    ending: list[int],
) -> Candidate:
    """Validate one candidate and tokenize it.

    Args:
        lm: the LM.
        number: index of the candidate, for error messages.
        given: the caller's text or token ids.
        ids_of: tokenizes a text as a continuation of the prompt.
        ending: token ids to append: the end token, or none.

    Raises: ConfigError for a wrong type, an empty candidate, or a text that adds no token.
    """
    if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(
            f"candidate {number} is {given!r:.60}; allowed is a text or a list of token ids"
        )
    if not given:
        raise ConfigError(f"candidate {number} is empty; leave it out or give it some text")
    if isinstance(given, str):
        ids, n_bytes = ids_of(given), len(given.encode("utf-8", "surrogatepass"))
        if not ids:
            raise ConfigError(
                f"candidate {number}, {given!r:.60}, adds no token to those of the prompt: the"
                " tokenizer merges both. Give token ids, or begin the candidate with a space"
            )
    else:
        from ..loom.node import checked_ids

        ids = checked_ids(given)
        lm.text.check_ids(ids)
        n_bytes = sum(len(lm.text.token_bytes(token)) for token in ids)
    return Candidate([*ids, *ending], n_bytes)


# One prompt -----------------------------------------------------------------------------------


def score(lm: LM, request: ScoreRequest, normalize: str) -> list[TextScore]:
    """Run one request; return a score per candidate. Blocks. See `LM.score`."""
    kind = check_normalize(normalize)
    tickets = lm.submit(request.items(lm))
    lm.drive(tickets)
    return request.results(lm, tickets, kind)


async def ascore(lm: LM, request: ScoreRequest, normalize: str) -> list[TextScore]:
    """The async form of `score`."""
    kind = check_normalize(normalize)
    tickets = await lm.asubmit(request.items(lm))
    await lm.adrive(tickets)
    return request.results(lm, tickets, kind)


# Choices --------------------------------------------------------------------------------------


class Choosing:
    """The work of `LM.choose` for one request: submit `items`, then call `select`."""

    def __init__(
        self, lm: LM, request: ScoreRequest, candidates: Sequence[Text], method: str
    ) -> None:
        """Prepare a choice.

        candidates: the caller's candidates, of which one will be returned.
        method: as for `LM.choose`.

        Raises: ConfigError for an unknown method.
        """
        if method not in get_args(Method):
            allowed = ", ".join(map(repr, get_args(Method)))
            raise ConfigError(f"method is {method!r:.40}; allowed are {allowed}")
        self._lm = lm
        self._request = request
        self._candidates = candidates
        self._method = cast("Method", method)
        # The first token of a candidate has no unconditional probability: nothing precedes it.
        self._unconditional: dict[int, Extend] = {}
        if method == "unconditional_likelihood_normalized":
            self._unconditional = {
                number: score_item(lm, lm.place(one.ids[:1]), one.ids[1:])
                for number, one in enumerate(request.candidates)
                if len(one.ids) > 1
            }

    def items(self) -> list[Extend]:
        """Return the work items: one per candidate after the prompt, then those without a prompt.

        Only `unconditional_likelihood_normalized` has the latter.
        """
        return [*self._request.items(self._lm), *self._unconditional.values()]

    def select(self, tickets: Sequence[Ticket]) -> Selection:
        """Return the chosen candidate with the scores of all.

        tickets: those of `items`, in its order; all must be done.
        """
        n = len(self._request.candidates)
        scores = self._request.results(self._lm, tickets[:n], "none")
        unconditional = [0.0] * n
        for number, ticket in zip(self._unconditional, tickets[n:], strict=True):
            unconditional[number] = fsum(ticket.result()[0].logprobs.tolist())
        values = _values(self._method, scores, unconditional)
        index = max(range(n), key=values.__getitem__)
        chosen = self._candidates[index]
        text = chosen if isinstance(chosen, str) else self._lm.text.decode(chosen)
        return Selection(text, index, self._method, tuple(values), tuple(scores))


def _values(
    method: Method, scores: Sequence[TextScore], unconditional: Sequence[float]
) -> list[Any]:
    """Return the value of each candidate that `method` compares; the largest is chosen.

    Values are numbers, or tuples of token log-probabilities for `greedy_token_selection`.

    unconditional: per candidate, the summed log-probability without the prompt of all its tokens
        but the first.
    """
    if method == "likelihood":
        return [one.total for one in scores]
    if method == "token_length_normalized":
        return [one.mean for one in scores]
    if method == "unconditional_likelihood_normalized":
        pairs = zip(scores, unconditional, strict=True)
        return [(one.total - without) / one.n_tokens for one, without in pairs]
    # Tuples compare token by token. The mean extends shorter candidates to the longest one.
    longest = max(one.n_tokens for one in scores)
    return [(*one.logprobs, *[one.mean] * (longest - one.n_tokens)) for one in scores]


def choose(lm: LM, choosing: Choosing) -> Selection:
    """Run a choice; return the chosen candidate with the scores of all. Blocks."""
    tickets = lm.submit(choosing.items())
    lm.drive(tickets)
    return choosing.select(tickets)


async def achoose(lm: LM, choosing: Choosing) -> Selection:
    """The async form of `choose`."""
    tickets = await lm.asubmit(choosing.items())
    await lm.adrive(tickets)
    return choosing.select(tickets)


# Many prompts ---------------------------------------------------------------------------------


class ManyScores:
    """The work of `LM.score_many`: requests, submitted a few at a time in order of their prefixes.

    Prompts with a common prefix follow each other. The KV of the prefix is therefore in use until
    the last of them is done, and the scheduler can evict all other KV.

    Loop: submit `next_request` and `add` its tickets until it returns None, drive the tickets of
    `oldest`, and yield from `pop_finished`.
    """

    def __init__(self, lm: LM, requests: Sequence[ScoreRequest], normalize: str) -> None:
        self._lm = lm
        self._normalize = check_normalize(normalize)
        self._requests = requests
        order = sorted(range(len(requests)), key=lambda i: requests[i].prompt_ids)
        self._waiting = deque(order)
        self._running: dict[int, Sequence[Ticket]] = {}
        self._n_tokens: dict[int, int] = {}
        self._last: Sequence[int] = ()
        for request in requests:  # wrong ones raise before anything runs
            request.items(lm)

    def next_request(self) -> tuple[int, list[Extend]] | None:
        """Return the index and the work items of the next prompt to submit.

        Returns None if enough tokens are in flight, or no prompt is left.
        """
        limit = _STEPS_AHEAD * self._lm.scheduler.n_batch
        if not self._waiting or (self._running and sum(self._n_tokens.values()) >= limit):
            return None
        index = self._waiting.popleft()
        request = self._requests[index]
        n_shared = _n_common(request.prompt_ids, self._last)
        self._last = request.prompt_ids
        n_candidates = sum(len(one.ids) for one in request.candidates)
        self._n_tokens[index] = len(request.prompt_ids) - n_shared + n_candidates
        return index, request.items(self._lm)

    def add(self, index: int, tickets: Sequence[Ticket]) -> None:
        """Record the tickets of a prompt that was submitted.

        index: index of the prompt. tickets: one per candidate.
        """
        self._running[index] = tickets

    def oldest(self) -> Sequence[Ticket]:
        """Return the tickets of the earliest submitted prompt that is not popped; [] if none."""
        return next(iter(self._running.values()), [])

    def pop_finished(self) -> Iterator[tuple[int, list[TextScore]]]:
        """Yield (index, scores) of each prompt whose tickets are all done, and forget it."""
        for index, tickets in list(self._running.items()):
            if all(ticket.done for ticket in tickets):
                del self._running[index], self._n_tokens[index]
                yield index, self._requests[index].results(self._lm, tickets, self._normalize)

    def cancel(self) -> None:
        """Cancel all submitted prompts; the scheduler's next step frees their resources."""
        for tickets in self._running.values():
            for ticket in tickets:
                ticket.cancel()
        self._running = {}


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists of token ids."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def read_requests(
    lm: LM, prompts: Iterable[tuple[Prompt, Sequence[Text]]], **options: Any
) -> list[ScoreRequest]:
    """Tokenize pairs of a prompt and its candidates; options as for `read_request`."""
    requests = []
    for number, pair in enumerate(prompts):
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(
                f"prompt {number} is {pair!r:.60}; allowed is a pair of a prompt and its candidates"
            )
        requests.append(read_request(lm, pair[0], pair[1], **options))
    return requests


def score_many(lm: LM, many: ManyScores) -> Iterator[tuple[int, list[TextScore]]]:
    """Yield the scores of each prompt as they are ready; see `LM.score_many`."""
    try:
        while True:
            while (following := many.next_request()) is not None:
                index, items = following
                many.add(index, lm.submit(items))
            if not (tickets := many.oldest()):
                return
            lm.drive(tickets)
            yield from many.pop_finished()
    finally:
        many.cancel()


async def ascore_many(lm: LM, many: ManyScores) -> AsyncIterator[tuple[int, list[TextScore]]]:
    """The async form of `score_many`."""
    try:
        while True:
            while (following := many.next_request()) is not None:
                index, items = following
                many.add(index, await lm.asubmit(items))
            if not (tickets := many.oldest()):
                return
            await lm.adrive(tickets)
            for result in many.pop_finished():
                yield result
    finally:
        many.cancel()
