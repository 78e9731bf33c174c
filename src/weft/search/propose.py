"""Where the next lines come from: continuing the answer, asking for a step, or the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle, Loom
from .core import Meter, branches, lines_of, whole
from .steps import Steps
from .task import Task

Propose = Literal["both", "continue", "suggest"] | Callable[[list[Heddle]], Sequence[Sequence[str]]]
# One number for all levels, or one a level, the last for all further ones.
Counts = int | Sequence[int] | None
N_PROPOSALS = 8


class Proposer:
    """Adds candidates below nodes; equal lines below one node are one child."""

    def __init__(
        self,
        lm: LM,
        task: Task | None,
        meter: Meter,
        *,
        propose: Propose,
        n_continue: Counts,
        n_suggest: Counts,
        sampling: dict[str, Any],
        reserve: int,
        merges: bool = True,
    ) -> None:
        """Check what is to be proposed.

        sampling: of every line, which ends at "\\n" unless it says otherwise. reserve: tokens of
        an answer at most, left over where there is a budget. merges: equal lines below one node
        are one child.
        """
        self.lm = lm
        self.task = task
        self.meter = meter
        whole("max_tokens", sampling["max_tokens"])
        self.sampling = {"stop": "\n", **sampling}
        self.reserve = reserve
        self.merges = merges
        self._call = propose if callable(propose) else None
        check_kind(propose, task)
        advised = (task.n_continue, task.n_suggest) if task is not None else (N_PROPOSALS, 0)
        self._n_continue = _counts("n_continue", n_continue, advised[0])
        self._n_suggest = _counts("n_suggest", n_suggest, advised[1])
        if propose == "suggest":
            self._n_continue = [0]
        if propose == "continue" or task is None:
            self._n_suggest = [0]
        if not any(self._n_continue + self._n_suggest):
            raise ConfigError("there is nothing to propose: n_continue and n_suggest are 0")

    def below(self, wanted: Sequence[tuple[Heddle, int, int | None]]) -> Steps[list[Heddle]]:
        """Return the candidates below nodes, each once, all grown in one batch.

        wanted: a node, its level, and how many of each kind; None takes the level's numbers.
        """
        nodes = [node for node, _, _ in wanted]
        if self._call is not None:
            found = self._called(nodes, self._call)
        else:
            found = yield from self._generated(nodes, *self._numbers(wanted))
        self.meter.candidates += len(found)
        return found

    def answers(self, nodes: Sequence[Heddle], temperature: float | None) -> Steps[list[Heddle]]:
        """Return whole answers, one below each node listed; a cut one is left out."""
        made = yield from self._whole(nodes, self.reserve, temperature)
        self.meter.candidates += len(made)
        return [node for node in made if not is_cut(node)]

    def completed(self, path: Heddle) -> Steps[Heddle | None]:
        """Return the end of a path by its likeliest tokens, as long as the budget lets it be."""
        room = int(min(self.reserve, self.meter.longest()))
        made = (yield from self._whole([path], room, 0.0)) if room >= 1 else []
        for end in made:
            end.score = path.score
        return made[0] if made else None

    def _whole(
        self, nodes: Sequence[Heddle], max_tokens: int, temperature: float | None
    ) -> Steps[list[Heddle]]:
        """Grow to the end; what bounds a line's tokens bounds an answer's, but not its length."""
        sampling = {k: v for k, v in self.sampling.items() if k not in ("stop", "max_tokens")}
        if temperature is not None:
            sampling["temperature"] = temperature
        return (yield from self.meter.grow(nodes, max_tokens=max_tokens, **sampling))

    def _numbers(
        self, wanted: Sequence[tuple[Heddle, int, int | None]]
    ) -> tuple[list[int], list[int]]:
        return tuple(
            [_at(counts, level) if n is None else n * any(counts) for _, level, n in wanted]
            for counts in (self._n_continue, self._n_suggest)
        )  # type: ignore[return-value]

    def _called(
        self, nodes: list[Heddle], call: Callable[[list[Heddle]], Sequence[Sequence[str]]]
    ) -> list[Heddle]:
        texts = list(call(nodes) or ())
        if len(texts) != len(nodes) or any(isinstance(each, str) for each in texts):
            raise ConfigError(
                f"propose returned {len(texts)} items for {len(nodes)} nodes; it has to return a "
                "list of texts for each node"
            )
        pairs = zip(nodes, texts, strict=True)
        return _distinct(child_of(node, text) for node, lines in pairs for text in lines)

    def _generated(
        self, nodes: list[Heddle], n_continue: list[int], n_suggest: list[int]
    ) -> Steps[list[Heddle]]:
        with ExitStack() as stack:
            asking = [node for node, n in zip(nodes, n_suggest, strict=True) if n]
            asked = self._asked(asking)
            for loom in asked.values():
                stack.enter_context(loom)
            most: dict[str, int] = {}
            for node, n in zip(nodes, n_suggest, strict=True):
                if (prompt := self._prompt(node)) in asked:
                    most[prompt] = max(most.get(prompt, 0), n)
            # Proposal by proposal, not node by node: where a budget cuts, it cuts all nodes alike.
            rows = [*_in_turn(nodes, n_continue), *_in_turn(asked.values(), most.values())]
            made = (yield from self._lines(rows)) if rows else []
            lines = [child for child in made if not is_cut(child)]
            suggested = {id(loom) for loom in asked.values()}
            own = [line for line in lines if id(line.parent) not in suggested]
            continued = [merged(line) for line in own] if self.merges else own
            added = [child for node in asking for child in self._added(node, asked)]
        return _distinct([*continued, *added])

    def _lines(self, rows: list[Heddle]) -> Steps[list[Heddle]]:
        return (yield from self.meter.grow(rows, reserve=self._reserve(), **self.sampling))

    def _asked(self, nodes: list[Heddle]) -> dict[str, Loom]:
        """A loom for each propose prompt; nodes with the same prompt share one."""
        prompts = filter(None, map(self._prompt, nodes))
        return {prompt: Loom(self.lm, prompt) for prompt in dict.fromkeys(prompts)}

    def _prompt(self, node: Heddle) -> str | None:
        return self.task.suggestion(lines_of(node)) if self.task is not None else None

    def _added(self, node: Heddle, asked: dict[str, Loom]) -> list[Heddle]:
        """Put the lines suggested for a node below it."""
        loom = asked.get(self._prompt(node) or "")
        lines = loom.children if loom is not None else []
        return [child_of(node, line.text.strip() + "\n") for line in lines if not is_cut(line)]

    def _reserve(self) -> int:
        room = self.meter.room()
        return 0 if room == math.inf else int(min(self.reserve, room // 4))


def check_kind(propose: object, task: Task | None) -> None:
    """Refuse a kind of proposal that is unknown or not possible."""
    if not callable(propose) and propose not in ("both", "continue", "suggest"):
        raise ConfigError(
            f"propose is {propose!r}; allowed are 'both', 'continue', 'suggest' or a callable"
        )
    if propose == "suggest" and task is None:
        raise ConfigError(
            "propose='suggest' needs a task that words the prompt; give task=, or 'continue'"
        )


def is_cut(node: Heddle) -> bool:
    """Say whether the node is part of a line only: no candidate."""
    return node.finish_reason in ("cancelled", "interrupted")


def child_of(node: Heddle, text: str) -> Heddle:
    """Return the child with this line; a text child is added if there is none."""
    for child in node.children:
        if child.text.strip() == text.strip() and not is_cut(child):
            return child
    return node.add(text)


def merged(child: Heddle) -> Heddle:
    """Return the first sibling with the child's line; the child, if that is another, goes."""
    assert child.parent is not None
    for sibling in child.parent.children:
        if sibling is child:
            break
        if sibling.text.strip() == child.text.strip() and not is_cut(sibling):
            child.remove()
            return sibling
    return child


def _distinct(nodes: Iterable[Heddle]) -> list[Heddle]:
    return list({node.id: node for node in nodes}.values())


def _in_turn(nodes: Iterable[Heddle], counts: Iterable[int]) -> list[Heddle]:
    """Return each node as often as its count says, one of each in turn."""
    pairs = list(zip(nodes, counts, strict=True))
    most = max((count for _, count in pairs), default=0)
    return [node for turn in range(most) for node, count in pairs if turn < count]


def _counts(name: str, given: Counts, advised: int | Sequence[int]) -> list[int]:
    chosen = advised if given is None else given
    counts = [chosen] if isinstance(chosen, int) else list(chosen)
    if not counts:
        raise ConfigError(f"{name} is empty; allowed is a whole number, or one a level")
    return [branches(name, count, low=0) for count in counts]


def _at(counts: Sequence[int], level: int) -> int:
    return counts[min(level, len(counts) - 1)]
