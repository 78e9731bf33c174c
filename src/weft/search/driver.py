"""The ask/tell core: asks an algorithm for work, has it done in batches, tells it what came."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol

from ..errors import ConfigError, FormatError
from ..lm import LM
from ..loom import Heddle, Loom
from .core import Meter, Prompt, begin, lines_of, read_task
from .judge import Judge
from .options import Settings
from .propose import Proposer
from .result import Level, SearchResult
from .score import text_of
from .steps import Steps

KEY = "search"
# What has the same repr in every process.
_PLAIN = (int, float, str, list, tuple)


@dataclass(frozen=True, slots=True)
class Want:
    """Work on a node: new next steps, or `n` whole answers drawn from here.

    n: of lines, None takes as many as the proposer's numbers for the node's level say.
    """

    node: Heddle
    kind: Literal["lines", "answers"] = "lines"
    n: int | None = None
    temperature: float | None = None


class Algorithm(Protocol):
    """What a search does next. It holds numbers only: all it learns is in the search's tree."""

    def ask(self, search: Search) -> Sequence[Want]:
        """Return the work of this round; none ends the search. Changes nothing."""
        ...

    def tell(self, search: Search, told: Sequence[Heddle]) -> Sequence[Heddle]:
        """Take in a round's scored nodes and return those kept, best first.

        In any order and as often as you like: the outcome is the same.
        """
        ...

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the paths to answer with, best first; those without an end are completed."""
        ...


class Search:
    """One search on its way: its tree, its round, and what an algorithm notes in `state`.

    Between calls of the loom the tree is whole. state: JSON; saved with the tree.
    """

    def __init__(
        self, lm: LM, prompt: Prompt, settings: Settings, name: str, **numbers: object
    ) -> None:
        """numbers: what defines the search; a file to go on from must have been made with them."""
        self.lm = lm
        self.settings = settings
        self.round = 0
        self.done = False
        self.state: dict[str, Any] = {}
        path = settings.resume
        saved = Loom.open(path, lm) if path is not None and os.path.exists(path) else None
        fresh, loom = begin(lm, prompt)
        self.start, self.loom = (fresh, loom) if saved is None else (saved, saved)
        sampling = {k: v for k, v in settings.sampling.items() if isinstance(v, _PLAIN)}
        shown = {**numbers, "sampling": sorted(sampling.items())}
        self._shape = {"name": name, **{key: repr(value) for key, value in shown.items()}}
        self.meter = Meter(settings.budget, settings.seed, self._held)
        self.meter.slot_bytes = lm.info.kv_bytes_per_token
        if saved is not None:
            self._restore(saved, loom)
        self.task = settings.task or read_task(self.loom)

    def run(
        self, algorithm: Algorithm, judge: Judge, proposer: Proposer, tries: int = 1
    ) -> Steps[SearchResult]:
        """Ask and tell until there is nothing to ask, a budget is spent, or the answer is known.

        tries: how many of the best paths are completed at most, until a checker says yes.
        """
        while not self.done:
            wants = list(algorithm.ask(self))
            told = (yield from self._work(wants, judge, proposer)) if wants else []
            if not told:
                break
            kept = tuple(algorithm.tell(self, told))
            self.round += 1
            self.save()
            if self.settings.progress is not None:
                self.settings.progress(Level(self.round, tuple(told), kept, self.meter.cost()))
            if self.meter.stopped is not None:
                break
        return (yield from self._answer(list(algorithm.best(self))[:tries], proposer))

    def rng(self) -> Random:
        """Return the round's own random stream."""
        return Random(f"{self.meter.seed}/round {self.round}")

    def in_order(self, nodes: Sequence[Heddle]) -> list[Heddle]:
        """Return the nodes, each once, in the order of the tree."""
        wanted = {node.id for node in nodes}
        return [node for node in self.start.walk() if node.id in wanted]

    def found(self, ids: Sequence[str]) -> list[Heddle]:
        """Return the nodes with these ids."""
        by_id = {node.id: node for node in self.start.walk()}
        return [by_id[each] for each in ids]

    def level(self, node: Heddle) -> int:
        """Return how many steps stand before the node's next one."""
        return len(lines_of(node)) if self.task is not None else len(node.path) - 1

    def place_of(self, node: Heddle) -> Hashable | None:
        """Return what counts of a node's path: nodes of one state need not both be followed."""
        if self.task is None:
            return node.id
        lines = lines_of(node)
        state = self.task.state(lines)
        # Whole paths differ in their answers even where they end alike.
        return node.id if state is not None and len(lines) >= self.task.steps else state

    def is_solved(self, node: Heddle) -> bool:
        """Say whether the task's checker takes the node's text for a right answer."""
        return self.task is not None and node.terminal and self.task.is_solved(text_of(node))

    def save(self) -> None:
        """Write the search to its file, if it has one; the file is the old one or the new one."""
        if self.settings.resume is None:
            return
        kept = {
            "shape": self._shape,
            "start": self.start.id,
            "round": self.round,
            "state": self.state,
            "meter": self.meter.state(),
            "done": self.done,
        }
        self.loom.meta[KEY] = {**kept, "crc32": checksum(self.loom, kept)}
        self.loom.save(self.settings.resume)

    def _restore(self, saved: Loom, asked: Loom) -> None:
        path, seed = self.settings.resume, self.settings.seed
        found = saved.meta.get(KEY)
        if not isinstance(found, dict):
            raise FormatError(f"{path} holds a loom but no search; give resume another file")
        kept = {name: value for name, value in found.items() if name != "crc32"}
        if found.get("crc32") != checksum(saved, kept):
            raise FormatError(f"{path}: the search in it is broken, or was changed; begin another")
        if found["shape"] != self._shape or saved.tokens != asked.tokens:
            raise ConfigError(
                f"{path} holds another search: {found['shape']} of {saved.user_prompt!r}. Give the "
                "same strategy, prompt and numbers, or another file"
            )
        if seed is not None and seed != found["meter"]["seed"]:
            raise ConfigError(
                f"seed is {seed}, but {path} was begun with {found['meter']['seed']}; leave it out"
            )
        self.start = saved.find(found["start"])
        self.round, self.state, self.done = found["round"], found["state"], found["done"]
        self.meter.restore(found["meter"])

    def _held(self) -> int:
        return sum(len(node.tokens) for node in self.loom.walk()) * self.meter.slot_bytes

    def _work(self, wants: Sequence[Want], judge: Judge, proposer: Proposer) -> Steps[list[Heddle]]:
        """Do all of a round's work; return the new nodes, scored."""
        lines = [(w.node, self.level(w.node), w.n) for w in wants if w.kind == "lines"]
        told = (yield from proposer.below(lines)) if lines else []
        ends: dict[float | None, list[Heddle]] = {}
        for want in wants:
            if want.kind == "answers":
                ends.setdefault(want.temperature, []).extend([want.node] * (want.n or 1))
        for temperature, rows in ends.items():
            made = yield from proposer.answers(rows, temperature)
            for node in made:
                node.meta["answer"] = True
            told += made
        yield from judge.score(told)
        return told

    def _answer(self, paths: list[Heddle], proposer: Proposer) -> Steps[SearchResult]:
        """Complete the best path, and the next ones as long as a checker says no."""
        best: Heddle | None = None
        if self.done:
            (best,) = self.found([self.state["best"]])
            paths = []
        for path in paths or ([] if best else [self.start]):
            end = path if path.terminal else (yield from proposer.completed(path))
            best = best or end
            if end is None or self.task is None or self.task.is_solved(text_of(end)):
                best = end or best
                break
        if best is None:
            best = paths[0] if paths else self.start
        if self.meter.stopped is None:
            self.done, self.state["best"] = True, best.id
            self.save()
        text = text_of(best)
        solved = None if self.task is None else self.task.is_solved(text)
        return SearchResult(best, text, self.loom, self.meter.cost(), solved)


def checksum(loom: Loom, kept: object) -> int:
    """Return a checksum of all that a search goes on from: its own notes, and the tree they are of.

    Cost: O(tree).
    """
    tree = [
        (node.id, node.tokens, node.logprobs, node.score, node.terminal, node.finish_reason)
        + (node.meta.get("answer"),)
        for node in loom.walk()
    ]
    return zlib.crc32(json.dumps([kept, tree]).encode())
