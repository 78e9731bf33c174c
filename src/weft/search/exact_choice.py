"""Exact samples under a `Choice` constraint, for `smc`: score every text, then draw among them.

`smc` uses it instead of drawing token by token, if the constraint allows a few texts only. Drawn
token by token, a likely text with an unlikely first token would need very many particles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._core.sampling.params import SamplingParams
from ..constraints import Choice, as_constraint
from ..loom import Heddle
from ..loom.heddle import measure_item
from ..loom.node import add_tokens
from ._smc import log_mean_exp, resample
from .core import Read, Steps
from .driver import Search, WorkItem
from .propose import Source

MAX_TEXTS = 512  # choices of more texts are sampled token by token


class ExactChoice:
    """Draws texts of a `Choice` in proportion to their exact probabilities.

    `exact_choice` creates it. Its `draw_below` is the `draw_exactly` of a `Proposer`, which then
    uses it instead of its sources, and adds the nodes to the search.

    params: sampling parameters to store in the new nodes.
    token_ids: the token ids of each text, in sorted order of the texts.
    """

    def __init__(
        self, search: Search, params: SamplingParams, token_ids: Sequence[list[int]]
    ) -> None:
        self.search = search
        self.params = params
        self.token_ids = token_ids

    def draw_below(self, items: Sequence[WorkItem]) -> Steps[list[Heddle]]:
        """Score all texts of the `Choice` after a node, then draw `n` of them; a text can repeat.

        Drawing is systematic resampling (`resample`).

        items: one item, with the node and `n`.

        Returns one new, ended node per draw. Its `meta["legal_logmass"]` is the log, in nats, of
        the summed probability of all texts: the evidence of the constraint.

        Cost: one batch with all texts, counted as prompt tokens.
        """
        search, (item,) = self.search, items
        assert search.lm is not None
        requests = [measure_item(item.node, ids) for ids in self.token_ids]
        scores = yield Read(search.lm, requests)
        search.meter.prompt_tokens += sum(map(len, self.token_ids))
        logprobs = [math.fsum(score.logprobs.tolist()) for score in scores]
        evidence = log_mean_exp(logprobs) + math.log(len(logprobs))
        nodes = []
        for number in resample(logprobs, search.rng("choice"), item.n):
            node = add_tokens(item.node, self.token_ids[number])
            node.logprobs = scores[number].logprobs.tolist()
            node.params, node.terminal, node.finish_reason = self.params, True, "stop"
            node.meta["legal_logmass"] = evidence
            nodes.append(node)
        search.meter.candidates += len(nodes)
        return nodes


def exact_choice(search: Search, sources: Sequence[Source]) -> ExactChoice | None:
    """Return an `ExactChoice` if a search can draw its texts exactly; else None.

    The constraint must be a `Choice` of at most `MAX_TEXTS` texts. The only source must be the
    model itself, and no sampling parameter may change its distribution. No text may be a prefix of
    another, contain a stop string or exceed `max_tokens`: it might not end where it is complete.

    sources: the sources of the search's proposer.
    """
    lm, sampling = search.lm, search.settings.sampling
    constraint = sampling.get("constraint")
    constraint = None if constraint is None else as_constraint(constraint)
    is_own = len(sources) == 1 and sources[0].lm is lm and sources[0].call is None
    if lm is None or not is_own or not lm.info.capabilities.steps:
        return None
    if not isinstance(constraint, Choice) or len(constraint.texts) > MAX_TEXTS:
        return None
    params = SamplingParams.resolve({"stop": "\n", **sampling}, SamplingParams())
    neutral = SamplingParams(max_tokens=params.max_tokens, stop=params.stop, constraint=constraint)
    texts = sorted(set(constraint.texts))
    is_prefix = any(after.startswith(text) for text, after in zip(texts, texts[1:], strict=False))
    is_cut = any(stop in text for stop in params.stop for text in texts)
    has_started = search.start.params is not None and search.start.params.constraint == constraint
    if params != neutral or is_prefix or is_cut or has_started or search.meter.budget.kv_bytes:
        return None
    token_ids = [lm.constraints.ids_of(text.encode()) for text in texts]
    fits = all(max(ids) < lm.info.n_vocab and len(ids) <= params.max_tokens for ids in token_ids)
    return ExactChoice(search, params, token_ids) if fits else None
