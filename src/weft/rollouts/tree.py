"""`Tree`: the rollouts of one prompt; `Segment`: the tokens between two branch points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from ..lm.lm import LM


class Segment:
    """Tokens between two branch points of a tree; a leaf is the end of one rollout.

    Attributes:
        parent: the segment before it; None for the root, which has no tokens.
        children: the segments after it.
        start: number of completion tokens before it.
        tokens: token ids; the last one of a leaf may be an end token.
        logprobs: raw log-probabilities of the tokens, over the full vocabulary, in nats.
        policy_logprobs: log-probabilities of the tokens under the distribution that they were drawn
            from: after temperature, filters and biases.
        entropies: raw entropies before each token, in nats; empty if the engine reports none.
        finish_reason: "stop" after an end token, "length" at a limit; None for inner segments.
    """

    __slots__ = (
        "children",
        "entropies",
        "finish_reason",
        "logprobs",
        "parent",
        "place",
        "policy_logprobs",
        "start",
        "tokens",
    )

    def __init__(self, parent: Segment | None, place: Place) -> None:
        """place: the position in the token tree after the segment."""
        self.parent = parent
        self.place = place
        self.children: list[Segment] = []
        self.start: int = 0 if parent is None else parent.end
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.policy_logprobs: list[float] = []
        self.entropies: list[float] = []
        self.finish_reason: Literal["stop", "length"] | None = None

    @property
    def end(self) -> int:
        """The number of completion tokens up to its end."""
        return self.start + len(self.tokens)

    @property
    def path(self) -> list[Segment]:
        """The segments from the first one after the root to this one."""
        path, segment = [], self
        while segment.parent is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]

    def __repr__(self) -> str:
        n = len(self.children)
        state = self.finish_reason or f"{n} {'child' if n == 1 else 'children'}"
        return f"<Segment of {len(self.tokens)} tokens at {self.start}, {state}>"


class Tree:
    """The rollouts of one prompt.

    Attributes:
        prompt_ids: token ids of the prompt.
        root: the segment without tokens, whose children follow the prompt.
    """

    def __init__(self, lm: LM, prompt_ids: list[int]) -> None:
        """Create a tree without rollouts."""
        self.prompt_ids = prompt_ids
        self.root = Segment(None, lm.place(prompt_ids))
        self._lm = lm

    def segments(self) -> Iterator[Segment]:
        """Yield all segments but the root, depth first: parents before children."""
        waiting = self.root.children[::-1]
        while waiting:
            yield (segment := waiting.pop())
            waiting.extend(reversed(segment.children))

    @property
    def leaves(self) -> list[Segment]:
        """The last segment of each rollout; rewards are in this order."""
        return [segment for segment in self.segments() if not segment.children]

    @property
    def completions(self) -> list[list[int]]:
        """The token ids of each rollout, in the order of the leaves."""
        return [[token for part in leaf.path for token in part.tokens] for leaf in self.leaves]

    @property
    def texts(self) -> list[str]:
        """The text of each rollout without its end token, in the order of the leaves."""
        stops = self._lm.text.stop_ids
        return [
            self._lm.text.decode(ids[:-1] if ids[-1] in stops else ids) for ids in self.completions
        ]

    @property
    def n_generated(self) -> int:
        """The number of tokens that were generated: shared ones count once."""
        return sum(len(segment.tokens) for segment in self.segments())

    def split(self, segment: Segment, depth: int) -> Segment:
        """Split a segment after `depth` completion tokens, and return its new upper part.

        `segment` becomes the lower part, so that leaves stay the same objects.

        depth: counts from the end of the prompt, as `start` does.
        """
        assert segment.parent is not None
        upper, at = Segment(segment.parent, segment.place), depth - segment.start
        for name in ("tokens", "logprobs", "policy_logprobs", "entropies"):
            values = getattr(segment, name)
            setattr(upper, name, values[:at])
            setattr(segment, name, values[at:])
        upper.place = self._lm.place(upper.tokens, after=segment.parent.place)
        siblings = segment.parent.children
        siblings[siblings.index(segment)] = upper
        upper.children, segment.parent, segment.start = [segment], upper, depth
        return upper

    def __repr__(self) -> str:
        n_delivered = sum(leaf.end for leaf in self.leaves)
        return (
            f"<Tree of {len(self.leaves)} rollouts, {n_delivered} tokens,"
            f" {self.n_generated} generated>"
        )
