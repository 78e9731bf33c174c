"""Draw lines below nodes that already have lines, without generating a known line a second time.

The model measures the probabilities of known lines once. A draw follows the tokens of known lines
by these probabilities. If it leaves them, the model generates the rest of the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .._core.sampling.params import SamplingParams
from .._core.sampling.sampler import probabilities
from .._core.sched.work import Extend, Logits
from ..lm.lm import LM
from ..loom import Heddle
from ..loom.heddle import measure_item
from ..loom.node import add_tokens
from .core import Read, Steps
from .driver import Search
from .propose import is_incomplete


@dataclass(slots=True, eq=False)
class Prefix:
    """A prefix of known lines: a node of their trie.

    logprob: log-probability of its last token after the tokens before, in nats.
    children: token id → the prefix with this token appended. A full line has none.
    """

    logprob: float = 0.0
    children: dict[int, Prefix] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add a line below this prefix, with the log-probability of each token."""
        prefix = self
        for token, logprob in zip(tokens, logprobs, strict=True):
            prefix = prefix.children.setdefault(token, Prefix(logprob))


@dataclass(slots=True, eq=False)
class Line:
    """A line while it is drawn.

    node: the node below which the line is drawn.
    prefix: the longest prefix that the line shares with known lines, after `follow`. If it is a
        full line, the drawn line is known. Otherwise the next token is not in `prefix.children`.
    tokens, logprobs: the tokens so far, an end token included, and their log-probabilities.
    start: the child of `node` that has the tokens; None while there is none.
    """

    node: Heddle
    prefix: Prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start: Heddle | None = None

    def follow(self, rng: Random) -> None:
        """Draw tokens as long as they continue a known line."""
        while self.prefix.children:
            u = rng.random()
            for token, child in self.prefix.children.items():
                u -= math.exp(child.logprob)
                if u < 0:
                    self.add(token, child.logprob)
                    self.prefix = child
                    break
            else:
                return

    def add(self, token: int, logprob: float) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def attach(self, lm: LM, params: SamplingParams) -> Heddle | None:
        """Add the tokens, if there are any, to the tree as `start`.

        Returns the node to continue: `start`, or `node` without tokens. None if the line has ended.
        """
        if not self.tokens:
            return self.node
        has_ended = self.tokens[-1] in lm.text.stop_ids
        node = self.start = add_tokens(self.node, self.tokens[: -1 if has_ended else None])
        node.params, node.logprobs = params, self.logprobs[: len(node.tokens)]
        node.terminal = has_ended
        node.stop_string = next((stop for stop in params.stop if stop in node.text), None)
        if has_ended or node.stop_string is not None:
            node.finish_reason = "stop"
        elif len(self.tokens) >= params.max_tokens:
            node.finish_reason = "length"
        elif node.place.depth >= lm.n_ctx:
            node.finish_reason = "context"
        return node if node.finish_reason is None else None

    def finish(self, max_tokens: int) -> None:
        """Join `start` with what was generated below it, cut at `max_tokens`.

        Removes `start` if nothing was generated. A line that ended in `attach` does not change.
        """
        node = self.start
        if node is None or node.finish_reason is not None:
            return
        if not node.children:
            node.remove()
            self.start = None
            return
        node.merge()
        if len(node.tokens) > max_tokens:
            node.clip(max_tokens)
            node.finish_reason = "length"


class KnownLines:
    """Grows lines in the model's distribution. Lines that a node already has cost no tokens.

    That needs next-token distributions, temperature 1, and neither filters nor a constraint. Under
    other conditions every line is generated.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self._tries: dict[Hashable, Prefix] = {}
        self._measured: set[tuple[Hashable, str]] = set()

    def grow(
        self,
        lm: LM,
        rows: Sequence[Heddle],
        contexts: Mapping[int, tuple[Hashable, Heddle]],
        grow: Callable[..., Steps[list[Heddle]]],
        rng: Random,
        *,
        reserve: int,
        **sampling: Any,
    ) -> Steps[list[Heddle]]:
        """Draw one line below each listed node; return the lines as children, in any order.

        There may be fewer lines than nodes, because of the budget.

        Args:
            lm: the model of the nodes.
            rows: the nodes; a node that is listed repeatedly gets as many lines.
            contexts: Python id of a node in `rows` → a key, and the node that has the known lines
                as children. Equal contexts have equal keys.
            grow: generates lines: `Meter.grow`, or a function like it.
            rng: draws between known lines and others.
            reserve: tokens of the budget to keep for later.
            sampling: sampling parameters of the lines.
        """
        meter, params = self.search.meter, SamplingParams.resolve(sampling, lm.defaults)
        neutral = SamplingParams(max_tokens=params.max_tokens, stop=params.stop)
        if lm.info.capabilities.steps and params == neutral:
            yield from self._measure(lm, rows, contexts, params)
        lines = [Line(row, self._tries.get(contexts[id(row)][0], Prefix())) for row in rows]
        if not any(line.prefix.children for line in lines):
            return (yield from grow(rows, reserve=reserve, **sampling))
        lines = lines[: meter.max_rows(len(rows), params.max_tokens, reserve)]
        yield from self._draw(lm, lines, params, rng)
        starts = [start for line in lines if (start := line.attach(lm, params)) is not None]
        n_drawn = sum(len(line.tokens) for line in lines if line.prefix.children)
        try:
            tails = yield from grow(starts, reserve=reserve + n_drawn, **sampling)
        finally:
            for line in lines:
                line.finish(params.max_tokens)
        begun = {line.start: line for line in lines if line.start is not None}
        meter.tokens += sum(len(line.tokens) for line in begun.values() if line.prefix.children)
        return [*begun, *(tail for tail in tails if tail.parent is not None)]

    def _measure(
        self,
        lm: LM,
        rows: Sequence[Heddle],
        contexts: Mapping[int, tuple[Hashable, Heddle]],
        params: SamplingParams,
    ) -> Steps[None]:
        """Measure the known lines that are not in the tries of these rows yet, in one batch.

        Arguments as for `grow`.
        """
        tries, items = list[Prefix](), list[Extend]()
        for row in {id(row): row for row in rows}.values():
            key, owner = contexts[id(row)]
            trie = self._tries.setdefault(key, Prefix())
            room = min(params.max_tokens, lm.n_ctx - row.place.depth)
            for child in owner.children:
                if (key, child.id) in self._measured:
                    continue
                self._measured.add((key, child.id))
                for tokens in _token_sequences(lm, child, params):
                    if len(tokens) <= room:
                        tries.append(trie)
                        items.append(measure_item(row, tokens))
        if not items:
            return
        scores = yield Read(lm, items)
        for trie, item, score in zip(tries, items, scores, strict=True):
            trie.add(item.tokens, score.logprobs.tolist())
        self.search.meter.prompt_tokens += sum(len(item.tokens) for item in items)

    def _draw(
        self, lm: LM, lines: Sequence[Line], params: SamplingParams, rng: Random
    ) -> Steps[None]:
        """Draw the tokens that each line shares with known lines.

        A line that is not known also gets its next token, drawn among the tokens that do not
        continue a known line.
        """
        for line in lines:
            line.follow(rng)
        new = [line for line in lines if line.prefix.children]
        if not new:
            return
        places = [lm.place(line.tokens, after=line.node.place) for line in new]
        rows = yield Read(lm, [Extend(place, (), (Logits(place.depth),)) for place in places])
        for line, logits in zip(new, rows, strict=True):
            probs = probabilities(logits, params)
            others = probs.copy()
            others[list(line.prefix.children)] = 0.0
            sums = others.cumsum()
            token = int(sums.searchsorted(rng.random() * sums[-1], side="right"))
            line.add(token, math.log(probs[token]))


def _token_sequences(lm: LM, child: Heddle, params: SamplingParams) -> list[list[int]]:
    """Return the token sequences with which the model can write the first line of a child.

    They end with an end token, with a stop string, or at `max_tokens`. [] for an incomplete child.
    """
    if is_incomplete(child):
        return []
    text, encode = child.text, lm.text.continuation
    ends = [at + len(stop) for stop in params.stop if (at := text.find(stop)) >= 0]
    line = text[: min(ends)] if ends else text
    sequences = [[*encode(line.rstrip()), end] for end in sorted(lm.text.stop_ids)]
    if ends:
        sequences.append(encode(line))
    elif child.finish_reason == "length" and child.lm is lm:
        sequences.append(child.tokens)
    return sequences
