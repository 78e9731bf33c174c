"""The search driver: it runs the work that an algorithm selects, in batches."""

from __future__ import annotations

import ast
import json
import os
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .._core import atomic_files
from ..errors import ConfigError, FormatError, TreeError, Unsupported
from ..lm.lm import LM
from ..loom import Heddle, Loom
from .answers import answer_judge, explained
from .callbacks import Callback
from .constrained_texts import ConstrainedTexts
from .core import (
    Level,
    Meter,
    Prompt,
    SearchResult,
    Settings,
    Steps,
    lines_of,
    read_task,
    resolve_start,
    text_of,
)
from .task import Lines, overrides

if TYPE_CHECKING:
    from .judge import Judge
    from .propose import Proposer

KEY = "search"
# Value of `meta["answer"]`: a full answer by greedy decoding.
LIKELIEST = "likeliest"
# Value of `meta["closed"]`: the constraint forbids all proposals below the node.
FORBIDDEN = "constraint"
# Keys of a node's meta that belong to one search.
_OWN_NOTES = ("answer", "closed", "drawn", "opened", "solved")
# Keys of a node's meta that a search continues from.
_NOTES = ("answer", "by", "closed", "drawn", "measured", "opened", "solved", "state")
_AVERAGED = ("mcts", "adaptive")  # searches that average values
_PLAIN = (int, float, str, list, tuple)  # types with the same repr in every process


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A request of an algorithm to generate below one node.

    kind: "lines" for next steps, "answers" for full answers.
    n: number of lines or answers. None means the proposer's number of lines for the node's level,
        or one answer.
    temperature: of answers; 0 gives the likeliest one, None the temperature of the search.
    by: name of one of several proposers; None means all of them.
    """

    node: Heddle
    kind: Literal["lines", "answers"] = "lines"
    n: int | None = None
    temperature: float | None = None
    by: str | None = None


class Algorithm(Protocol):
    """A search strategy: decides which nodes to expand and which to keep.

    An algorithm object has only its parameters. All other information is in the search's tree and
    `state`, so that a saved search can continue.
    """

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's requests to generate; [] ends the search. Change nothing."""
        ...

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Select from a round's new, scored nodes; return the kept ones, best first.

        Store what later rounds need in `search.state`. Repeated calls, and calls with another order
        of `candidates`, have the same result.
        """
        ...

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the nodes whose paths are the best answers, best first, after the last round.

        The model then continues unfinished paths to their end, if `search.completes`.
        """
        ...


class Search:
    """A running search: its tree, options, budget and round.

    Algorithm, judge and proposer share it. `state` is the algorithm's JSON data; it is saved with
    the tree. The tree is consistent between calls of the loom.

    value: the caller's `value` or `score`; None without one.
    verifier: the caller's verifier, or the task's check; None without one.
    checks: True if there is a verifier.
    uses_states: True if nodes have states of the caller's instead of lines of text.
    completes: True if the model continues the best path to its end.
    """

    def __init__(
        self, lm: LM | None, prompt: Prompt, settings: Settings, name: str, **numbers: object
    ) -> None:
        """Create a search, or restore it from the file that `resume` names.

        Args:
            lm: the model; None if functions of the caller's do everything.
            prompt: the prompt, or a node to search below.
            settings: the validated options.
            name: the name of the search.
            numbers: the arguments that define the search. A resumed file must have equal ones.
        """
        self.lm = lm
        self.settings = settings
        self.round = 0
        self.done = False
        self.state: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        fresh, loom = resolve_start(lm, prompt)
        path = settings.resume
        saved = Loom.open(path, lm) if path is not None and os.path.exists(path) else None
        if path is not None:
            atomic_files.check_writable(path)
        self.prompt = prompt
        constraint = settings.sampling.get("constraint")
        self.constrained_texts = (
            ConstrainedTexts(lm, constraint)
            if lm is not None and lm.info.n_vocab and constraint is not None
            else None
        )
        self.start, self.loom = (fresh, loom) if saved is None else (saved, saved)
        self._node_ids = {self.start.id}  # see `nodes`
        self.task = settings.task or read_task(self.loom)
        self._name = name
        self._read_functions()
        sampling = {k: v for k, v in settings.sampling.items() if isinstance(v, _PLAIN)}
        shown = {**numbers, "sampling": sorted(sampling.items())}
        self._shape = {"name": name, **{key: repr(value) for key, value in shown.items()}}
        self.meter = Meter(settings.budget, settings.seed, self._tree_bytes)
        self.meter.slot_bytes = 1 if lm is None else lm.info.kv_bytes_per_token
        if saved is not None:
            self._restore(saved, loom)
        if self.uses_states:
            self._set_first_state()

    def _read_functions(self) -> None:
        """Wrap the caller's functions, set the public attributes, and reject option conflicts."""
        given = self.settings
        states = given.state is not None or given.score is not None or self.lm is None
        named = given.propose if isinstance(given.propose, Mapping) else {"": given.propose}
        self.proposers: dict[str, Any] = {
            by: Callback("propose", each, "state" if states else "nodes")
            if callable(each) and not isinstance(each, LM)
            else each
            for by, each in named.items()
        }
        functions = [each for each in self.proposers.values() if isinstance(each, Callback)]
        self.uses_states = any(each.takes_states for each in functions)
        if self.uses_states and not all(
            isinstance(each, Callback) and each.takes_states for each in self.proposers.values()
        ):
            raise ConfigError("if one proposer takes states, all have to: propose(state)")
        self.value: Callback | None = None
        self.verifier: Callback | None = None
        if given.value is not None:
            may = self._name not in _AVERAGED
            self.value = Callback("value", given.value, "nodes", allows_minus_inf=may)
        elif given.score is not None:
            may = self._name not in _AVERAGED
            self.value = Callback("score", given.score, "states", allows_minus_inf=may)
        elif given.judge is not None:
            self._set_judge(given.judge)
        if given.verifier is not None:
            self.verifier = Callback("verifier", given.verifier, "text")
        elif self.task is not None and overrides(self.task, "is_solved"):
            self.verifier = Callback("verifier", self.task.is_solved, "text")
        self.checks = self.verifier is not None
        if not self.uses_states and (given.state is not None or self._needs_states()):
            raise ConfigError(
                "state= and score= need a propose= that goes over states: "
                "propose(state) -> [(text, state), …]; or a task with a state() of its own"
            )
        completes = self.lm is not None and given.answer_tokens > 0
        self.completes = (
            completes
            and given.complete is not False
            and not (self.uses_states and given.complete is None)
        )
        if given.complete and not completes:
            why = "there is no model" if self.lm is None else "answer_tokens is 0"
            raise ConfigError(f"complete=True, but {why}; leave complete out")

    def _set_judge(self, template: str) -> None:
        if self.lm is None or not self.lm.info.capabilities.steps:
            raise Unsupported(
                "judge= reads the model's next-token distribution, which this engine does not give:"
                " leave it out, or give value="
            )
        scorer = answer_judge(template, self.loom.user_prompt, self.settings.read_answer)
        self.value = Callback("judge", scorer, "nodes")

    def _needs_states(self) -> bool:
        """Return True if a function takes states that neither `propose` nor a task provides."""
        needed = any(each is not None and each.takes_states for each in (self.value, self.verifier))
        return needed and not overrides(self.task, "state")

    def run(
        self,
        algorithm: Algorithm,
        judge: Judge,
        proposer: Proposer,
        tries: int = 1,
        *,
        depth: int = 1,
    ) -> Steps[SearchResult]:
        """Run rounds until there is no work, the budget is used up, or the answer is known.

        tries: maximum number of best paths to complete, until the checker accepts one.
        depth: maximum number of lines of a path.
        """
        judge.check_engine()
        if not self.round:
            _drop_notes(self.start)
            if self.uses_states:  # the first state may be an answer
                yield from judge.verify([self.start])
        while not self.done:
            items = list(algorithm.next_work(self))
            if not items or self.meter.out_of_time():
                break
            n_closed = proposer.n_closed
            candidates = yield from self._run_round(items, judge, proposer)
            if not candidates and proposer.n_closed == n_closed:
                break
            kept = tuple(algorithm.record(self, candidates))
            self.round += 1
            self.save()
            if self.settings.progress is not None:
                level = Level(self.round, tuple(candidates), kept, self.meter.cost())
                self.settings.progress(level)
            if self.meter.stopped is not None:
                break
        paths = list(algorithm.best(self))[:tries]
        result = yield from self._answer(paths, judge, proposer)
        is_path = result.best in paths  # no path that the model completed
        if result.cost.stopped is None and (
            self._is_exhausted(depth) or (is_path and self._is_cut_short(result.best, depth))
        ):
            return replace(result, cost=replace(result.cost, stopped="constraint"))
        return result

    def _is_exhausted(self, depth: int) -> bool:
        """Return True if the constraint left nothing to generate before the maximum depth.

        depth: maximum number of lines of a path.
        """
        texts = self.constrained_texts
        if texts is None:
            return False
        nodes = self.nodes()
        leaves = [n for n in nodes if n.score is not None and not self.children(n)] or [self.start]
        first = self.level(self.start)
        closed = {
            node.id
            for node in nodes
            if node.meta.get("closed") == FORBIDDEN and self.level(node) - first < depth
        }
        # The model may have completed a path after which the constraint forbade all proposals.
        open_leaves = (node for node in leaves if not self.is_end(node))
        if any(node.parent is None or node.parent.id not in closed for node in open_leaves):
            return False
        early = (node for node in leaves if self.level(node) - first < depth)
        return bool(closed) or any(map(texts.must_end, early))

    def _is_cut_short(self, best: Heddle, depth: int) -> bool:
        """Return True if the constraint ended the best path before the maximum depth.

        False if another path reached that depth, or if the best path is solved or has an answer.

        depth: maximum number of lines of a path.
        """
        texts = self.constrained_texts
        if texts is None or self.is_solved(best) or best.meta.get("answer"):
            return False
        # An end token after a line end is a node without a line.
        lines = [node for node in self.nodes() if node.text or node is self.start]
        n_lines = max(map(self.level, lines)) - self.level(self.start)
        return n_lines < depth and texts.must_end(best)

    def rng(self, what: str = "round") -> Random:
        """Return a random number generator for this round, seeded by the search's seed.

        what: distinguishes several generators of a round.
        """
        return Random(f"{self.meter.seed}/{what} {self.round}")

    def in_order(self, nodes: Sequence[Heddle]) -> list[Heddle]:
        """Return the nodes in depth-first order of the tree, without duplicates."""
        wanted = {node.id for node in nodes}
        return [node for node in self.start.walk() if node.id in wanted]

    def nodes_by_id(self, ids: Sequence[str]) -> list[Heddle]:
        """Return the nodes with these ids. Raises: TreeError if the caller has removed one."""
        by_id = {node.id: node for node in self.start.walk()}
        if not all(each in by_id for each in ids):
            raise TreeError(
                "a node of the search was removed while it ran",
                hint="search below a node that still exists",
            )
        return [by_id[each] for each in ids]

    # Its nodes

    def nodes(self) -> list[Heddle]:
        """Return the start and the nodes that this search proposed or generated, depth first.

        A node of an earlier search counts once this search proposes the same line. Other nodes
        below the start do not count.
        """
        return [node for node in self.start.walk() if node.id in self._node_ids]

    def children(self, node: Heddle) -> list[Heddle]:
        """Return the children that this search proposed or generated."""
        return [child for child in node.children if child.id in self._node_ids]

    def add(self, nodes: Iterable[Heddle]) -> None:
        """Add nodes that the search has just created."""
        self._node_ids.update(node.id for node in nodes)

    def adopt(self, node: Heddle) -> None:
        """Add a node that may be older than the search; drop the notes of an earlier search."""
        if node.id not in self._node_ids:
            self._node_ids.add(node.id)
            _drop_notes(node)

    # The meaning of a node

    def lines_of(self, node: Heddle) -> Lines:
        """Return the lines of text from the prompt down to the node, without line ends."""
        return lines_of(node)

    def level(self, node: Heddle) -> int:
        """Return the number of steps (lines or states) from the root down to the node."""
        by_lines = self.task is not None and not self.uses_states
        return len(lines_of(node)) if by_lines else len(node.path) - 1

    def set_state(self, node: Heddle, state: Any) -> None:
        """Set the caller's state of a node, unless the node already has one."""
        if node.id in self.states:
            return
        self.states[node.id] = state
        if self.settings.resume is not None:
            node.meta["state"] = _state_literal(state)

    def state_of(self, node: Heddle) -> Any:
        """Return the caller's state of a node, or the task's state of its lines.

        None if there is no task, or the last line is invalid.
        """
        if self.uses_states:
            # Text that the model wrote below a state has that state.
            return next(self.states[n.id] for n in reversed(node.path) if n.id in self.states)
        return None if self.task is None else self.task.state(lines_of(node))

    def merge_key(self, node: Heddle) -> Hashable | None:
        """Return a key that is equal for nodes with one state; the search follows only one of them.

        Full answers, and nodes without a task or states, have a key of their own each.
        None if the node's state is unknown or invalid; the search does not follow such a node.
        """
        if self.uses_states:
            known = node.id in self.states
            # In a tuple, because None is a valid state.
            return _hashable_state((self.states[node.id],), node) if known else None
        # Full answers differ even if their paths lead to one state.
        if self.task is None or node.terminal:
            return node.id
        lines = lines_of(node)
        state = self.task.state(lines)
        is_full = self.task.steps is not None and len(lines) >= self.task.steps
        return node.id if state is not None and is_full else state

    def is_rejected(self, node: Heddle) -> bool:
        """Return True if the task's `state` rejects the node's last line.

        False for the start, for full answers, and for searches with states of the caller's.
        """
        if self.task is None or self.uses_states or node is self.start:
            return False
        if node.terminal or node.meta.get("answer") or self.is_solved(node):
            return False
        return self.task.state(lines_of(node)) is None

    def is_complete(self, node: Heddle) -> bool:
        """Return True if the node's text is a full answer, to be verified by the checker."""
        if self.uses_states and not self.completes:
            return node.id in self.states
        return node.terminal or not self.completes

    def is_solved(self, node: Heddle) -> bool:
        """Return True if the checker has accepted the node."""
        return self.checks and node.meta.get("solved") is True

    def is_end(self, node: Heddle) -> bool:
        """Return True if nothing can be generated below the node."""
        closed = bool(node.meta.get("closed")) and not any(
            child.score is not None for child in self.children(node)
        )
        return node.terminal or closed or self.is_solved(node)

    # Its file

    def save(self) -> None:
        """Write the search to its `resume` file, atomically; do nothing without one."""
        if self.settings.resume is None:
            return
        kept = {
            "shape": self._shape,
            "start": self.start.id,
            "others": [n.id for n in self.start.walk() if n.id not in self._node_ids],
            "round": self.round,
            "state": self.state,
            "meter": self.meter.state(),
            "done": self.done,
        }
        self.loom.meta[KEY] = {**kept, "crc32": checksum(self.loom, kept)}
        self.loom.save(self.settings.resume)

    def _restore(self, saved: Loom, requested: Loom) -> None:
        """Continue from a saved search, after checking that it has the same prompt and options.

        requested: a new loom of the caller's prompt, to compare with.
        """
        path, seed = self.settings.resume, self.settings.seed
        record = saved.meta.get(KEY)
        if not isinstance(record, dict):
            raise FormatError(f"{path} holds a loom but no search; give resume another file")
        kept = {name: value for name, value in record.items() if name != "crc32"}
        if record.get("crc32") != checksum(saved, kept):
            raise FormatError(f"{path}: its search is broken, or was changed; start another")
        if saved.tokens != requested.tokens or saved.user_prompt != requested.user_prompt:
            raise ConfigError(
                f"{path} holds another search, of {saved.user_prompt!r:.80}. Give the same prompt, "
                "or another file"
            )
        if record["shape"] != self._shape:
            differences = _describe_differences(record["shape"], self._shape)
            raise ConfigError(
                f"{path} holds another search: {differences}. Give the same strategy and "
                "numbers, or another file"
            )
        if seed is not None and seed != record["meter"]["seed"]:
            raise ConfigError(
                f"seed is {seed}, but {path} has seed {record['meter']['seed']}; leave it out"
            )
        self.start = saved.find(record["start"])
        self._node_ids = {node.id for node in self.start.walk()} - set(record["others"])
        self.round, self.state, self.done = record["round"], record["state"], record["done"]
        self.meter.restore(record["meter"])
        if self.uses_states:
            for node in self.start.walk():
                if "state" in node.meta:
                    self.states[node.id] = _state_from_literal(node.meta["state"], str(path))

    def _set_first_state(self) -> None:
        """Set the start node's state from `state=`; reject another one than in a saved search."""
        first = self.prompt if self.settings.state is None else self.settings.state
        if isinstance(first, Heddle):
            raise ConfigError("below a node the search needs its state: give state=")
        self.set_state(self.start, first)
        if not _is_same_state(self.states[self.start.id], first):
            raise ConfigError(
                f"{self.settings.resume} holds another search: it began with the state "
                f"{self.states[self.start.id]!r:.80}. Give the same, or another file"
            )

    def _tree_bytes(self) -> int:
        """Return the size of the KV of all nodes, in bytes."""
        return sum(len(node.tokens) for node in self.loom.walk()) * self.meter.slot_bytes

    # Its rounds

    def _run_round(
        self, items: Sequence[WorkItem], judge: Judge, proposer: Proposer
    ) -> Steps[list[Heddle]]:
        """Generate what `items` request; return the new nodes, scored."""
        lines = [item for item in items if item.kind == "lines"]
        candidates = (yield from proposer.propose_below(lines)) if lines else []
        ends: dict[float | None, list[Heddle]] = {}
        for item in items:
            if item.kind == "answers":
                ends.setdefault(item.temperature, []).extend([item.node] * (item.n or 1))
        for temperature, rows in ends.items():
            nodes = yield from proposer.generate_answers(rows, temperature)
            for node in nodes:
                node.meta["answer"] = LIKELIEST if temperature == 0.0 else "drawn"
            candidates += nodes
        yield from judge.score(candidates)
        return candidates

    def _answer(self, paths: list[Heddle], judge: Judge, proposer: Proposer) -> Steps[SearchResult]:
        """Complete and verify the best path; return the result of the search.

        While a checker rejects the completed path, the next one of `paths` follows.

        paths: the best paths, best first.
        """
        best: Heddle | None = None
        if self.done:
            (best,) = self.nodes_by_id([self.state["best"]])
        elif not self.completes:
            best = paths[0] if paths else self.start
        else:
            best = yield from self._complete(paths or [self.start], judge, proposer)
        if "solved" not in best.meta and best is not self.start:
            yield from judge.verify([best], cut=True)
        if self.meter.stopped is None:
            self.done, self.state["best"] = True, best.id
            self.save()
        solved = self.is_solved(best) if self.checks else None
        nodes = self.start.walk() if self.uses_states else ()
        states = {node: self.states[node.id] for node in nodes if node.id in self.states}
        result = SearchResult(
            best, text_of(best), self.loom, self.meter.cost(), solved, states=states
        )
        return explained(self, judge, result)

    def _complete(self, paths: list[Heddle], judge: Judge, proposer: Proposer) -> Steps[Heddle]:
        """Let the model complete the paths in order, until the checker accepts one; return its end.

        Without an accepted one, return the end of the first path.
        """
        best: Heddle | None = None
        for path in paths:
            end = path if path.terminal else (yield from proposer.complete(path))
            if end is None:
                break
            if end is not path:
                yield from judge.verify([end])
            best = best or end
            if not self.checks or self.is_solved(end):
                return end
        return best or paths[0]


def _drop_notes(node: Heddle) -> None:
    """Remove what an earlier search noted in a node's meta."""
    for key in _OWN_NOTES:
        node.meta.pop(key, None)


def _hashable_state(state: tuple[Any], node: Heddle) -> Hashable:
    """Return the state if it is hashable, else the node's id."""
    try:
        hash(state)
    except TypeError:
        return node.id
    return state


def _describe_differences(saved: Mapping[str, str], requested: Mapping[str, str]) -> str:
    """Return text for an error message: the saved values of all options that differ."""
    names = [name for name in requested if saved.get(name) != requested[name]]
    if "name" in names:
        return f"the strategy was {saved.get('name')}"
    return ", ".join(f"{name} was {saved.get(name)}" for name in names)


def _is_same_state(one: Any, other: Any) -> bool:
    """Return True if two states are the same object or have the same `repr`."""
    return one is other or repr(one) == repr(other)


def _state_literal(state: Any) -> str:
    """Return the state as a Python literal, to save it.

    Raises: ConfigError if the literal cannot be read back.
    """
    written = repr(state)
    try:
        if ast.literal_eval(written) == state:
            return written
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    raise ConfigError(
        f"resume= cannot keep the state {written:.80}: allowed are numbers, texts, bytes, True, "
        "False, None, and tuples, lists, dicts and sets of them"
    )


def _state_from_literal(written: object, path: str) -> Any:
    """Return the state of a Python literal in the file at `path`. Raises: FormatError."""
    try:
        return ast.literal_eval(written)  # type: ignore[arg-type]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise FormatError(f"{path} has a state that cannot be read: {written!r:.80}") from error


def checksum(loom: Loom, kept: object) -> int:
    """Return a CRC-32 of a search's saved state `kept` and of its tree, to detect later edits.

    Cost: O(tree).
    """
    tree = [
        (node.id, node.tokens, node.logprobs, node.score, node.terminal, node.finish_reason)
        + (node.text if not node.tokens else None, *map(node.meta.get, _NOTES))
        for node in loom.walk()
    ]
    return zlib.crc32(json.dumps([kept, tree]).encode())
