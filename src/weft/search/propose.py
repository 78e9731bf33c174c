"""Proposers: new candidates from the model, or from a function of the caller's.

The model continues the answer by a line, or answers the task's prompt for one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, get_args

from .._core.sampling.params import SamplingParams, is_neutral
from ..constraints.lines import EachLine
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle, Loom
from .callbacks import Callback
from .core import Kind, Steps, check_branches, lines_of
from .driver import FORBIDDEN, Search, WorkItem

if TYPE_CHECKING:
    from .known_lines import KnownLines

# One number for all levels, or one per level; the last applies to all further levels.
Counts = int | Sequence[int] | None
N_PROPOSALS = 8


@dataclass(frozen=True, slots=True)
class Source:
    """One source of proposed lines: a model, or a function of the caller's.

    by: its name; "" if it is the only source.
    lm: the model; None for a function.
    n_continue: lines per node by continuing the answer; one number per level, the last for all
        further levels.
    n_suggest: the same for lines from the task's `suggestion` prompt.
    call: the caller's function; None for a model.
    """

    by: str
    lm: LM | None = None
    n_continue: Sequence[int] = (0,)
    n_suggest: Sequence[int] = (0,)
    call: Callback | None = None


class Proposer:
    r"""Generates candidates below nodes; equal lines below one node become one child.

    sampling: sampling parameters of every line, which ends at "\\n" by default.
    reserve: tokens of the budget that are kept for an answer; 0 if no path is completed.
    n_closed: number of nodes below which no source can propose more.
    """

    def __init__(
        self,
        search: Search,
        *,
        n_continue: Counts = None,
        n_suggest: Counts = None,
        merges: bool = True,
        draws: bool = False,
        full_answers: bool = False,
        default: Kind = "both",
    ) -> None:
        """Create a proposer of a search.

        Args:
            search: the search.
            n_continue, n_suggest: lines per node, by continuing and from the task's `suggestion`
                prompt. None means as the task advises.
            merges: equal lines below one node become one child.
            draws: draw from a function's proposals, uniformly and with repetition, as many as
                wanted. False uses each proposal once.
            full_answers: texts of functions must be complete under the constraint.
            default: the source, unless the caller gives one.
        """
        self.search = search
        self.lm = search.lm
        self.meter = search.meter
        self.sampling = {"stop": "\n", **search.settings.sampling}
        self.reserve = search.settings.answer_tokens if search.completes else 0
        self.merges = merges
        self.draws = draws
        self.full_answers = full_answers
        self.n_closed = 0
        # Replaces the sources if the distribution of their texts is known exactly.
        self.draw_exactly: Callable[[Sequence[WorkItem]], Steps[list[Heddle]]] | None = None
        # Grows the lines and answers of models: `Meter.grow`, or another function like it.
        self.grow: Callable[..., Steps[list[Heddle]]] = search.meter.grow
        # Draws lines that a node already has without generating them; None generates all lines.
        self.known_lines: KnownLines | None = None
        self.sources = [
            self._create_source(by, default if kind is None else kind, n_continue, n_suggest)
            for by, kind in search.proposers.items()
        ]
        if not self.sources:
            raise ConfigError("propose is empty; allowed is a dict from names to sources")
        # Proposals for later rounds, proposals per call, and sources without new proposals for a
        # node.
        self._unused_proposals: dict[tuple[str, str], list[tuple[str, Any]]] = {}
        self._n_per_call: dict[str, int] = {}
        self._exhausted: set[tuple[str, str]] = set()
        # Ids of nodes below which the constraint forbade a proposal.
        self._forbidden: set[str] = set()
        self._check_sampling_used()

    def open_sources(self, node: Heddle) -> list[str]:
        """Return the names of sources that can still propose lines below a node."""
        return [each.by for each in self.sources if (each.by, node.id) not in self._exhausted]

    def propose_below(self, items: Sequence[WorkItem]) -> Steps[list[Heddle]]:
        """Propose lines below nodes; return the distinct candidates.

        The lines of one model grow in one batch. An existing child is a candidate again if its line
        was proposed once more.

        items: nodes, and how many lines each should get.
        """
        if self.draw_exactly is not None:
            drawn = yield from self.draw_exactly(items)
            self.search.add(drawn)
            return drawn
        candidates: list[Heddle] = []
        for source in self.sources:
            own = [item for item in items if item.by in (None, source.by)]
            if not own:
                continue
            nodes = (
                (yield from self._call_function(source, own))
                if source.call
                else (yield from self._generate(source, own))
            )
            if source.by:
                for node in nodes:
                    node.meta.setdefault("by", source.by)
            candidates += nodes
        candidates = _distinct(candidates)
        self.meter.candidates += len(candidates)
        return candidates

    def generate_answers(
        self, nodes: Sequence[Heddle], temperature: float | None
    ) -> Steps[list[Heddle]]:
        """Generate one full answer below each listed node; return the answers.

        There are fewer answers if the budget is used up.

        temperature: None means that of the search.
        """
        room = int(min(self.reserve, self.meter.max_row_tokens()))
        answers = (yield from self._full_answers(nodes, room, temperature)) if room >= 1 else []
        self.meter.candidates += len(answers)
        return answers

    def complete(self, path: Heddle) -> Steps[Heddle | None]:
        """Continue a path to its end by greedy decoding; return the new node, with its score.

        None if the budget is used up.
        """
        room = int(min(self.reserve, self.meter.max_row_tokens()))
        ends = (yield from self._full_answers([path], room, 0.0)) if room >= 1 else []
        for end in ends:
            end.score = path.score
        return ends[0] if ends else None

    # Sources

    def _create_source(self, by: str, kind: Any, n_continue: Counts, n_suggest: Counts) -> Source:
        """Validate one value of the option `propose` and return it as a `Source`.

        by: its name. kind: "continue", "suggest", "both", a model or a Callback.
        """
        if isinstance(kind, Callback):
            return Source(by, call=kind)
        lm = kind if isinstance(kind, LM) else self.lm
        what = "both" if isinstance(kind, LM) else kind
        task = self.search.task
        if what not in get_args(Kind):
            raise ConfigError(
                f"propose is {kind!r:.80}; allowed are 'both', 'continue', 'suggest', an LM, a "
                "function, or a dict of these by name"
            )
        if lm is None:
            raise ConfigError("without a model propose has to be a function: propose(state)")
        if what == "suggest" and task is None:
            raise ConfigError(
                "propose='suggest' needs a task that words the prompt; give task=, or 'continue'"
            )
        advised = (task.n_continue, task.n_suggest) if task is not None else (N_PROPOSALS, 0)
        continues = (
            _validate_counts("n_continue", n_continue, advised[0]) if what != "suggest" else [0]
        )
        suggests = (
            _validate_counts("n_suggest", n_suggest, advised[1]) if what != "continue" else [0]
        )
        if task is None:
            suggests = [0]
        if not any(continues + suggests):
            raise ConfigError("there is nothing to propose: n_continue and n_suggest are 0")
        return Source(by, lm, continues, suggests)

    def _check_sampling_used(self) -> None:
        """Raise ConfigError if the caller set sampling parameters, but no model generates."""
        if self.search.completes or any(each.lm is not None for each in self.sources):
            return
        given = SamplingParams.resolve(self.search.settings.sampling)
        chosen = [name for name in self.search.settings.chosen if not is_neutral(given, name)]
        if chosen:
            raise ConfigError(
                f"{chosen[0]} has no meaning without a model: propose is a function, and nothing "
                "is completed. Leave it out"
            )

    # Lines of a model

    def _generate(self, source: Source, items: Sequence[WorkItem]) -> Steps[list[Heddle]]:
        """Let a model propose lines for all items in one batch; return the candidates."""
        with ExitStack() as stack:
            context = _PromptContext(self.search, source, stack)
            rows = context.rows([(item, self.search.level(item.node)) for item in items])
            children = (yield from self._grow_lines(rows, context)) if rows else []
            self.search.add(children)
            lines = [child for child in children if not is_incomplete(child)]
            candidates: list[Heddle] = []
            for line in lines:
                if (node := context.originals.get(id(line.parent))) is not None:
                    candidates.append(self._get_or_add_child(node, line.text, line))
                elif id(line.parent) not in context.prompt_loom_ids:
                    candidates.append(merge_into_sibling(line) if self.merges else line)
                    self.search.adopt(candidates[-1])
                else:
                    continue
                _count_drawn(candidates[-1])
            for node, loom in context.prompted:
                suggested = [line for line in loom.children if not is_incomplete(line)]
                texts = self._allowed_suggestions(node, suggested)
                for text in texts:
                    candidates.append(
                        self._get_or_add_child(node, text, is_end=not text.endswith("\n"))
                    )
                    _count_drawn(candidates[-1])
                if suggested and not texts and not any(source.n_continue):
                    self._mark_exhausted(source, node)
        return _distinct(candidates)

    def _grow_lines(self, rows: list[Heddle], context: _PromptContext) -> Steps[list[Heddle]]:
        """Generate one line below each node in `rows`, keeping budget for an answer."""
        room = self.meter.tokens_left()
        reserve = 0 if room == math.inf else int(min(self.reserve, room // 4))
        sampling: dict[str, Any] = {"reserve": reserve, **self.sampling}
        source = context.source
        if self.known_lines is None or source.lm is None:
            return (yield from self.grow(rows, **sampling))
        rng, known = self.search.rng(f"lines of {source.by}"), context.of_row
        return (
            yield from self.known_lines.grow(source.lm, rows, known, self.grow, rng, **sampling)
        )

    def _full_answers(
        self, nodes: Sequence[Heddle], max_tokens: int, temperature: float | None
    ) -> Steps[list[Heddle]]:
        """Generate one full answer below each listed node, as far as the budget allows.

        The sampling parameters are those of lines, except for `stop`, `max_tokens` and, if given,
        `temperature`.
        """
        sampling = {k: v for k, v in self.sampling.items() if k not in ("stop", "max_tokens")}
        if temperature is not None:
            sampling["temperature"] = temperature
        answers = yield from self.grow(nodes, max_tokens=max_tokens, **sampling)
        self.search.add(answers)
        for source in self.sources:
            if source.by and source.lm is not None and source.lm is self.lm:
                for node in answers:
                    node.meta["by"] = source.by
        return answers

    # Lines of the caller's function

    def _call_function(self, source: Source, items: Sequence[WorkItem]) -> Steps[list[Heddle]]:
        """Call the caller's function for nodes and add its proposals as children; return these.

        An item with a number gets as many of the proposals. If the function has no new proposal for
        a node, it is not called for that node again.
        """
        call, by = source.call, source.by
        assert call is not None
        items = [item for item in items if (by, item.node.id) not in self._exhausted]
        prompted = [node for item in items for node in self._nodes_to_call(by, item)]
        answers = yield from call.results(prompted, self.search.state_of)
        for node, answer in zip(prompted, answers, strict=True):
            pairs = self._allowed_pairs(node, _text_state_pairs(call, answer))
            self._n_per_call[by] = max(len(pairs), 1)
            self._unused_proposals.setdefault((by, node.id), []).extend(pairs)
        rng, candidates = self.search.rng("propose"), list[Heddle]()
        for item in items:
            pairs = self._take_wanted(
                item, self._unused_proposals.pop((by, item.node.id), []), by, rng
            )
            if not pairs:
                self._mark_exhausted(source, item.node)
            for text, state in pairs:
                if not self._fits_budget(text):
                    break
                child = self._get_or_add_child(item.node, text)
                if call.takes_states:
                    self.search.set_state(child, state)
                candidates.append(child)
        return _distinct(candidates)

    def _nodes_to_call(self, by: str, item: WorkItem) -> list[Heddle]:
        """Return the item's node, once for each call of the function that is needed now.

        [] while proposals of an earlier call are left. by: the name of the source.
        """
        if self._unused_proposals.get((by, item.node.id)):
            return []
        if item.n is None or self.merges or self.draws:
            return [item.node]
        # Equal answers count separately: make as many calls at once as are needed.
        return [item.node] * -(-item.n // self._n_per_call.get(by, item.n))

    def _take_wanted(
        self, item: WorkItem, pairs: list[tuple[str, Any]], by: str, rng: Random
    ) -> list[tuple[str, Any]]:
        """Return the proposals to add as children; store the other new ones for later rounds.

        Args:
            item: the node, and the number of wanted proposals; None takes all.
            pairs: all proposals for the node, as (text, state).
            by: the name of the source.
            rng: draws proposals, if `draws` is set.
        """
        if item.n is None:
            return pairs
        if self.draws:
            return [rng.choice(pairs) for _ in range(item.n)] if pairs else []
        if self.merges:
            existing = {
                child.text.strip()
                for child in self.search.children(item.node)
                if not is_incomplete(child)
            }
            pairs = list({p[0].strip(): p for p in pairs if p[0].strip() not in existing}.values())
        self._unused_proposals[by, item.node.id] = pairs[item.n :]
        return pairs[: item.n]

    def _fits_budget(self, text: str) -> bool:
        """Return True if the KV budget allows a node with this text."""
        return self.lm is None or self.meter.fits(len(self.lm.text.continuation(text)))

    def _mark_exhausted(self, source: Source, node: Heddle) -> None:
        """Record that a source has no more proposals below a node; close a node without sources."""
        self._exhausted.add((source.by, node.id))
        if not self.open_sources(node):
            is_forbidden = node.id in self._forbidden and not self._proposals(node)
            node.meta["closed"] = FORBIDDEN if is_forbidden else True
            self.n_closed += 1

    def _proposals(self, node: Heddle) -> list[Heddle]:
        """Return the children that are proposed lines, not full answers."""
        return [child for child in self.search.children(node) if not child.meta.get("answer")]

    # The constraint

    def _allowed_pairs(self, node: Heddle, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return the (text, state) pairs whose text the constraint allows below a node."""
        texts = self.search.constrained_texts
        if texts is None:
            return pairs
        allowed = [
            pair
            for pair in pairs
            if texts.tokens_below(node, pair[0], ends=self.full_answers) is not None
        ]
        if len(allowed) < len(pairs):
            self._forbidden.add(node.id)
        return allowed

    def _allowed_suggestions(self, node: Heddle, lines: Sequence[Heddle]) -> list[str]:
        """Return the texts of suggested lines that the constraint allows below a node.

        A line that completes the constrained text has no line end if the constraint forbids one.
        """
        texts, allowed = self.search.constrained_texts, list[str]()
        for line in (line.text.strip() for line in lines):
            if texts is None or texts.tokens_below(node, f"{line}\n") is not None:
                allowed.append(f"{line}\n")
            elif texts.tokens_below(node, line, ends=True) is not None:
                allowed.append(line)
            else:
                self._forbidden.add(node.id)
        return allowed

    def _get_or_add_child(
        self, node: Heddle, text: str, line: Heddle | None = None, *, is_end: bool = False
    ) -> Heddle:
        """Return the child with this text; add it if there is none.

        Args:
            line: the generated node with this text, whose statistics the child gets. None for a
                text of a function.
            is_end: nothing can follow the text under the constraint.
        """
        texts = self.search.constrained_texts
        child = existing_child(node, text) if self.merges else None
        is_new = child is None
        if child is None:
            child = node.add(text) if texts is None else texts.add(node, text)
            self.search.add([child])
        else:
            self.search.adopt(child)
        if line is not None and child.finish_reason is None and not child.logprobs:
            child.terminal, child.finish_reason = line.terminal, line.finish_reason
            if line.legal_logmass:  # of another model's tokens, which the child does not have
                child.meta["legal_logmass"] = math.fsum(line.legal_logmass)
        if is_new and texts is not None and (is_end or texts.must_end(child)):
            child.terminal, child.finish_reason = True, "stop"
        return child


class _PromptContext:
    """The nodes at which one model generates a round's lines, and which tree nodes they belong to.

    Lines that continue a path grow at the tree's node. If the model is not that of the search, they
    grow at a copy of the path. Suggestions grow in looms of their own, one per prompt.

    originals: Python id of a copy → the tree's node.
    prompted: pairs of a tree's node and the loom of its suggestion prompt.
    prompt_loom_ids: Python ids of these looms.
    of_row: Python id of a node to grow at → a key that is equal in each round, and the tree's node.
    """

    def __init__(self, search: Search, source: Source, stack: ExitStack) -> None:
        self.search = search
        self.source = source
        self.stack = stack
        self.originals: dict[int, Heddle] = {}
        self.prompted: list[tuple[Heddle, Loom]] = []
        self.prompt_loom_ids: set[int] = set()
        self.of_row: dict[int, tuple[Hashable, Heddle]] = {}
        self._copied_loom: Loom | None = None

    def rows(self, items: Sequence[tuple[WorkItem, int]]) -> list[Heddle]:
        """Return the nodes to generate one line below, each repeated for the lines it should get.

        Nodes to continue come first, then the looms of suggestion prompts; in each part they take
        turns. Fills the attributes of this object.

        items: pairs of a node's work and the node's level, which selects the number of lines if
        the work has no `n`.
        """
        source, looms, max_suggestions = self.source, dict[str, Loom](), dict[str, int]()
        nodes_to_continue: list[tuple[Heddle, int]] = []
        for item, level in items:
            n_continue, n_suggest = (
                _count_at(counts, level) if item.n is None else item.n * any(counts)
                for counts in (source.n_continue, source.n_suggest)
            )
            if n_continue:
                row = self._node_of_source(item.node)
                nodes_to_continue.append((row, n_continue))
                self.of_row[id(row)] = ((source.by, item.node.id), item.node)
            if n_suggest and (prompt := self._suggestion_prompt(item.node)) is not None:
                # Nodes with the same prompt share one loom.
                if prompt not in looms:
                    assert source.lm is not None
                    own = source.lm is self.search.lm
                    adapter = self.search.loom.adapter if own else None
                    loom = Loom(source.lm, prompt, adapter=adapter)
                    looms[prompt] = self.stack.enter_context(loom)
                    self.prompt_loom_ids.add(id(looms[prompt]))
                    key = (source.by, item.node.id, prompt)
                    self.of_row[id(looms[prompt])] = (key, item.node)
                max_suggestions[prompt] = max(max_suggestions.get(prompt, 0), n_suggest)
                self.prompted.append((item.node, looms[prompt]))
        prompted = [(loom, max_suggestions[prompt]) for prompt, loom in looms.items()]
        return [*_round_robin(nodes_to_continue), *_round_robin(prompted)]

    def _suggestion_prompt(self, node: Heddle) -> str | None:
        """Return the task's prompt for one step after the node; None if there is none."""
        task = self.search.task
        return task.suggestion(lines_of(node)) if task is not None else None

    def _node_of_source(self, node: Heddle) -> Heddle:
        """Return the node that the source's model continues: the tree node, or a copy of it."""
        search, lm = self.search, self.source.lm
        if lm is search.lm:
            return node
        assert lm is not None
        if self._copied_loom is None:
            self._copied_loom = self.stack.enter_context(copy_prompt(lm, search))
        text = node.get_prefix_text(1)
        copy = self._copied_loom.add(text) if text else self._copied_loom
        constraint = search.settings.sampling.get("constraint")
        if text and constraint is not None and not isinstance(constraint, EachLine):
            # The constraint of the line continues after the path's tokens.
            copy.params = SamplingParams.resolve({"constraint": constraint}, SamplingParams())
        self.originals[id(copy)] = node
        return copy


def copy_prompt(lm: LM, search: Search) -> Loom:
    """Return a new loom of another model with the prompt of a search.

    Raises: ConfigError if the prompt is token ids, which belong to one model.
    """
    prompt = search.prompt
    if isinstance(prompt, Heddle):
        if search.loom.chat_template_used and search.loom.user_prompt:
            return Loom(lm, search.loom.user_prompt)
        return Loom(lm, search.loom.text, template=False)
    if not isinstance(prompt, str) and not all(isinstance(each, Mapping) for each in prompt):
        raise ConfigError(
            "token ids belong to one model: for several models give the prompt as a text or as "
            "chat messages"
        )
    return Loom(lm, prompt)


def is_incomplete(node: Heddle) -> bool:
    """Return True if generation of the line was cancelled or interrupted; it is no candidate."""
    return node.finish_reason in ("cancelled", "interrupted")


def existing_child(node: Heddle, text: str) -> Heddle | None:
    """Return the child whose text is this line, ignoring surrounding spaces, or None.

    Children whose generation was cancelled or interrupted do not count.
    """
    for child in node.children:
        if child.text.strip() == text.strip() and not is_incomplete(child):
            return child
    return None


def merge_into_sibling(child: Heddle) -> Heddle:
    """Return the first sibling with the child's line; if that is another node, remove the child."""
    assert child.parent is not None
    for sibling in child.parent.children:
        if sibling is child:
            break
        if sibling.text.strip() == child.text.strip() and not is_incomplete(sibling):
            child.remove()
            return sibling
    return child


def _text_state_pairs(call: Callback, answer: Any) -> list[tuple[str, Any]]:
    """Validate a `propose` function's result for one node; return it as (text, state) pairs.

    The state is None if the function does not take states. Raises: ConfigError.
    """
    try:
        items = None if isinstance(answer, str | bytes | Mapping) else list(answer)
    except TypeError:
        items = None
    if items is None:
        raise call.invalid_result_error(answer)
    if not call.takes_states:
        if not all(isinstance(item, str) for item in items):
            raise call.invalid_result_error(answer)
        return [(text, None) for text in items]
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise call.invalid_result_error(answer)
    return [(text, state) for text, state in items]


def _count_drawn(child: Heddle) -> None:
    """Add 1 to the parent's `meta["drawn"]`: how many lines were drawn below it, with repeats."""
    assert child.parent is not None
    child.parent.meta["drawn"] = child.parent.meta.get("drawn", 0) + 1


def _distinct(nodes: Iterable[Heddle]) -> list[Heddle]:
    """Return the nodes without duplicates, in order of first occurrence."""
    return list({node.id: node for node in nodes}.values())


def _round_robin(counted: Iterable[tuple[Heddle, int]]) -> Iterator[Heddle]:
    """Yield each node as often as its count says, in turns: (a, 2), (b, 1) → a, b, a."""
    pairs = list(counted)
    max_count = max((count for _, count in pairs), default=0)
    return (node for turn in range(max_count) for node, count in pairs if turn < count)


def _validate_counts(name: str, given: Counts, advised: int | Sequence[int]) -> list[int]:
    """Return the lines per level, the caller's or the task's; raise ConfigError if invalid."""
    chosen: Any = advised if given is None else given
    is_one = isinstance(chosen, str) or not isinstance(chosen, Iterable)
    counts = [chosen] if is_one else list(chosen)
    if not counts:
        raise ConfigError(f"{name} is empty; allowed is an integer, or one per level")
    return [check_branches(name, count, low=0) for count in counts]


def _count_at(counts: Sequence[int], level: int) -> int:
    """Return the number of lines at a level; the last count is for all further levels."""
    return counts[min(level, len(counts) - 1)]
