"""The state of a loom's node: tokens, text, statistics, neighbors; its edits and walks.

Ctrl-C during an edit is deferred to its end, so edits are atomic.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Self, cast

from .._core.nopickle import NotPicklable
from .._core.sched.driver import deferred_interrupt
from .._core.validation import check_int
from ..errors import ConfigError, NotAChild, TreeError
from .constrained_text import HEAL, parsed_text
from .model_binding import ModelBinding

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from .._core.sampling.params import SamplingParams
    from .._core.sched.work import FinishReason, RunResult
    from ..lm.lm import LM
    from .deferred_growth import DeferredGrowth
    from .heddle import Heddle


DISPLAY = "display_text"  # key in an imported node's meta: the text to show instead of its own


class HeddleState(
    NotPicklable,
    instead="save the loom and open it elsewhere: loom.save(path), Loom.open(path, lm)",
):
    """Base class of `Heddle` with a node's data, and methods to read and edit it.

    `Heddle` adds the methods that run the model; only `Heddle` is instantiated.

    The tokens define a node. Its text is decoded from them. Its place in the token tree, where its
    KV is, is computed when needed and cleared when anything before the node changes.
    """

    logprobs: list[float]
    entropies: list[float]
    legal_logmass: list[float]
    params: SamplingParams | None
    finish_reason: FinishReason | None
    meta: dict[str, Any]
    # Parse special tokens in text, unless a call says otherwise.
    reads_special = False
    _is_root = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        text: str | Sequence[int] = "",
        frags: object = None,
        children: Sequence[Heddle] | None = None,
        parent: Heddle | None = None,
        trim_toks: int | None = None,
    ) -> None:
        """Create a node that is in no list of children yet; see `add` and `add_child`.

        Args:
            model: an LM, or a loaded model with its `tokenizer`.
            text: a text that continues the parent's, or token ids. Special tokens are parsed if the
                class's `reads_special` is True.
            children: nodes to attach below this one; None: none.
            parent: the node above; None for a root.
            frags, trim_toks: accepted for N8Loom's callers; ignored.
        """
        self._binding = ModelBinding.from_model(model, tokenizer)
        self._tokens = self._encode(text) if isinstance(text, str) else checked_ids(text)
        self._text: str | None = None
        self._place: Place | None = None
        self._defers_to: DeferredGrowth | None = None
        self._pending_growth: DeferredGrowth | None = None
        self._children: list[Heddle] = []
        self.id = secrets.token_hex(6)
        self._parent = parent
        self.logprobs = []
        self.entropies = []
        self.legal_logmass = []
        self.params = None
        self.lineage: tuple[int, ...] = ()
        self.finish_reason = None
        self.stop_string: str | None = None
        self.terminal = False
        self._score: float | None = None
        self.meta = {}
        for child in children or ():
            self.add_child(child)

    # Content

    @property
    def parent(self) -> Heddle | None:
        """The node above; None for a root. `add_child` and `remove` change it."""
        return self._parent

    @property
    def lm(self) -> LM | None:
        """The LM that grows this node; None in a loom opened without a model."""
        return self._binding.lm

    @property
    def model(self) -> Any:
        """The model object that was passed to the loom: an LM, or a loaded model."""
        return self._binding.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer object that was passed to the loom."""
        return self._binding.tokenizer

    @property
    def children(self) -> list[Heddle]:
        """The children, oldest first.

        This is the node's own list, not a copy. Change it through the node's methods only.
        """
        if self._pending_growth is not None:
            self._pending_growth.flush()
        return self._children

    @property
    def tokens(self) -> list[int]:
        """A copy of the node's own token ids.

        Setting them clears the statistics of the old tokens.
        """
        return list(self._tokens)

    @tokens.setter
    def tokens(self, token_ids: Sequence[int]) -> None:
        replace_tokens(self, token_ids)

    @property
    def text(self) -> str:
        """The node's own text. Setting it tokenizes the new text; nodes below keep their tokens.

        In a root, special tokens in the text are parsed; in other nodes only if `reads_special` is
        True.
        """
        if self._text is None:
            lm = self._binding.text_lm()
            self._text = lm.text.decode(self._tokens, first=self._is_root)
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"text is {text!r:.80}; allowed is a text. `tokens` takes token ids")
        self._binding.text_lm().check_length(text)
        replace_tokens(self, self._encode_own(text))

    @property
    def parsed(self) -> Any:
        """The value of the text under the constraint that generated it.

        A JSON schema gives the data, a Pydantic class its object, other constraints the text.

        Raises:
            Unfinished: a ValueError: the JSON is incomplete, such as at `max_tokens`.
            ConfigError: the node was grown without a constraint.
        """
        return parsed_text(self)

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the sampled tokens, in nats; -inf without any."""
        return math.fsum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    @property
    def mean_p(self) -> float:
        """The arithmetic mean of the sampled tokens' probabilities; 0.0 without any."""
        total = math.fsum(math.exp(logprob) for logprob in self.logprobs)
        return total / len(self.logprobs) if self.logprobs else 0.0

    @property
    def score(self) -> float | None:
        """A number that the caller or a search assigns, higher is better; None without one.

        Assign any value that float() accepts.
        """
        return self._score

    @score.setter
    def score(self, score: float | None) -> None:
        self._score = None if score is None else _number("score", score)

    def _child(self, token_ids: Sequence[int]) -> Heddle:
        """Create a child with these tokens; the caller adds it to the list of children."""
        child_class: Any = getattr(self, "heddle_class", type(self))  # set on roots only
        child: Heddle = child_class(self._binding, None, list(token_ids), None, None, self)
        return child

    def _encode(self, text: str, special: bool | None = None) -> list[int]:
        special = self.reads_special if special is None else special
        return self._binding.text_lm().text.continuation(text, special=special) if text else []

    def _encode_own(self, text: str) -> list[int]:
        """Tokenize a new text of this node, as a continuation; the root overrides this."""
        return self._encode(text)

    # Neighbors

    @property
    def path(self) -> list[Heddle]:
        """The nodes from the root to this one, both included. Cost: O(depth)."""
        return path_to(self)

    @property
    def leaves(self) -> list[Heddle]:
        """The leaves from this node down; a childless node is its own leaf. Cost: O(nodes)."""
        return leaves_below(self)

    def walk(self) -> Iterator[Heddle]:
        """Yield this node and all below it, parents first."""
        return preorder(self)

    def find(self, node_id: str) -> Heddle:
        """Return the node with this id, from this node down. Cost: O(nodes). Raises: TreeError."""
        for node in preorder(self):
            if node.id == node_id:
                return node
        raise TreeError(f"no node has the id {node_id!r} from here down")

    def get_all_children(self, depth: int = 0) -> list[Heddle]:
        """Return all nodes below this one, parents first.

        depth: include this node if it is above 0; N8Loom's recursion counter.
        """
        nodes = list(preorder(self))
        return nodes if depth > 0 else nodes[1:]

    def get_all_leaves(self) -> list[Heddle]:
        """Return `leaves`; N8Loom's name for it."""
        return leaves_below(self)

    def count_children(self) -> int:
        """Return the number of nodes from this node down, this node included."""
        return sum(1 for _ in preorder(self))

    def count_leaves(self) -> int:
        """Return the number of leaves from this node down; 1 for a childless node."""
        return len(leaves_below(self))

    def apply_all_children(
        self, func: Callable[[Heddle], Any], apply_self: bool = False, leaves_only: bool = False
    ) -> list[Any]:
        """Call `func` on all nodes below, parents first, and return the results.

        The nodes are those that exist at the call.

        Args:
            apply_self: call it on this node too.
            leaves_only: call it on the leaves instead; a childless node is its own leaf.
        """
        if leaves_only:
            return [func(node) for node in leaves_below(self)]
        return [func(node) for node in self.get_all_children(int(apply_self))]

    @property
    def place(self) -> Place:
        """The place in the LM's token tree after the node's last token.

        Pass it to the methods of `lm.kv`.
        """
        # Computed from the nearest ancestor that has one.
        lm = self._binding.live_lm()
        if self._place is None:
            parts: list[list[int]] = []
            at: Heddle | None = cast("Heddle", self)
            while at is not None and at._place is None:
                parts.append(at._tokens)
                at = at.parent
            ids = [token for part in reversed(parts) for token in part]
            after = None if at is None else at._place
            self._place = lm.place(ids, after=after, namespace=self._binding.adapter)
        return self._place

    # The path before it

    def get_prefix_tokens(self, exclude: int = 0) -> list[int]:
        """Return the token ids from the root to this node.

        exclude: number of nodes at the start of the path to leave out.
        """
        return [token for node in self._from(exclude) for token in node._tokens]

    def get_prefix_text(self, exclude: int = 0) -> str:
        """Return the text from the root to this node, including characters split over nodes.

        exclude: number of nodes at the start of the path to leave out.
        """
        nodes = self._from(exclude)
        if self._binding.lm is None:
            return "".join(node.text for node in nodes)
        ids = [token for node in nodes for token in node._tokens]
        return self._binding.lm.text.decode(ids, first=bool(nodes) and nodes[0]._is_root)

    def get_display_text(self, exclude: int = 0) -> str:
        """Return the joined `display_text()` of all nodes from the root to this one.

        exclude: number of nodes at the start of the path to leave out.
        """
        return "".join(node.display_text() for node in self._from(exclude))

    def _from(self, exclude: int) -> list[Heddle]:
        """Return the path from the root to this node, without its first `exclude` nodes."""
        return path_to(self)[check_int("exclude", exclude, 0) :]

    def crown(self) -> str:
        """Return the text of the path without the root, that is, without the prompt."""
        return self.get_prefix_text(1)

    def display_text(self) -> str:
        """Return the text to display for this node; subclasses may override it.

        An imported node returns the display text of its file until its own text changes.
        """
        shown = imported_display(self)
        return self.text if shown is None else shown

    # Edits

    def clip(self, token_limit: int) -> Self:
        """Keep the first `token_limit` tokens (negative: remove that many) and return the node.

        Does nothing if the node has no more tokens than that. Otherwise its children are removed,
        and the node is no longer terminal.
        """
        clip_tokens(self, token_limit)
        return self

    def trim(self, token_trim: int) -> Self:
        """Remove the last `token_trim` tokens, as `clip` does, and return the node."""
        if n := check_int("token_trim", token_trim, 0):
            clip_tokens(self, -n)
        return self

    def to_leaf(self) -> Self:
        """Remove all children and return the node.

        Each removed child becomes the root of its own path.
        """
        drop_children(self)
        return self

    def split(self, at: int) -> Heddle:
        """Split the node before token `at` (negative: from the end) and return the new lower node.

        This node keeps its position, id and first `at` tokens. The lower node gets the other
        tokens, the children, the score and the finish reason.
        """
        return split_node(self, at)

    def merge(self) -> Self:
        """Merge the node with its only child, the inverse of `split`, and return the node.

        The node keeps its position and id, and takes the child's tokens, statistics, children and
        finish reason.

        Raises:
            TreeError: the node does not have exactly one child.
            ConfigError: the node is a root, which is the prompt.
        """
        merge_child(self)
        return self

    def remove(self) -> Self:
        """Remove the node and all below it from the tree and return it; its path is then itself."""
        if self.parent is None:
            raise TreeError("a root cannot be removed; close the loom instead")
        detach_node(self)
        return self

    def remove_child(self, child: Heddle) -> Heddle:
        """Remove a child and all below it from the tree and return it, as `remove` does.

        Raises: NotAChild, a ValueError, for any other object.
        """
        if getattr(child, "parent", None) is not self:
            raise NotAChild(
                "only a node's own child can be removed from it; this is none of its children."
                " To remove any other node, call node.remove()",
                hint="call node.remove()",
            )
        return child.remove()

    def add_child(self, child: Heddle) -> Heddle:
        """Make `child` the last child of this node, with all nodes below it, and return it.

        The child is removed from its previous parent. KV of its tokens is computed for the new
        context when it is used. Statistics of its existing tokens stay.
        """
        adopt_node(self, child)
        return child

    def __repr__(self) -> str:
        text = " ".join(self.text.split())
        shown = text if len(text) <= 60 else text[:59] + "…"
        facts = [f"{len(self._tokens)} tokens"]
        if self._children:
            facts.append(f"{len(self._children)} children")
        if self.terminal or self.finish_reason:
            facts.append("ended" if self.terminal else f"finish {self.finish_reason}")
        if self.score is not None:
            facts.append(f"score {self.score:.3g}")
        return f"<{type(self).__name__} {self.id} {shown!r} {', '.join(facts)}>"


# Access to private state, for this package and for the store. Users call the methods above.


def lm_of(node: HeddleState) -> LM:
    """Return the LM that runs a node.

    Raises: ConfigError for a loom without a model; StaleHandle for a closed loom.
    """
    return node._binding.live_lm()


def is_chat(node: HeddleState) -> bool:
    """Return True if a chat template rendered the prompt of the node's loom."""
    return node._binding.is_chat


def rebind(node: HeddleState) -> ModelBinding:
    """Return a new binding to the same LM, for a copy of the loom."""
    binding = node._binding
    copy = ModelBinding(binding.lm, binding.model, binding.tokenizer, is_text=binding.is_text)
    copy.closed, copy.adapter, copy.is_chat = binding.closed, binding.adapter, binding.is_chat
    return copy


def encode_after(node: HeddleState, text: str, special: bool | None) -> list[int]:
    """Return a text's token ids as a continuation of the node. special: as for `Heddle.add`."""
    return node._encode(text, special)


def new_child(parent: HeddleState, token_ids: Sequence[int] = ()) -> Heddle:
    """Create a child with these tokens; the caller adds it to the list of children."""
    return parent._child(token_ids)


def child_list(parent: HeddleState) -> list[Heddle]:
    """Return the node's own list of children, without running deferred growth."""
    return parent._children


def add_text(parent: HeddleState, text: str, special: bool | None = None) -> Heddle:
    """Append a child with this text, and return it; see `Heddle.add`.

    In a loom of texts the child has no tokens.
    """
    if parent._binding.is_text:
        child = new_child(parent)
        set_text(child, text)
        parent.children.append(child)
        return child
    parent._binding.text_lm().check_length(text)
    return add_tokens(parent, encode_after(parent, text, special))


def add_tokens(parent: HeddleState, token_ids: Sequence[int]) -> Heddle:
    """Append a child with these tokens, and return it.

    Raises: ContextOverflow, before anything changes.
    """
    child = new_child(parent, token_ids)
    child._place = lm_of(parent).place(child._tokens, after=parent.place)
    parent.children.append(child)
    return child


def set_text(node: HeddleState, text: str) -> None:
    """Set a node's text without changing its tokens. For looms whose model is not loaded."""
    node._text = text


def set_run(node: HeddleState, result: RunResult) -> None:
    """Copy the tokens and statistics of a finished run into a node."""
    node._tokens, node._text = list(result.tokens), None
    node.logprobs, node.entropies = list(result.logprobs), list(result.entropies)
    node.legal_logmass = list(result.legal_logmass)


def set_tokens(node: HeddleState, token_ids: list[int]) -> None:
    """Set a node's tokens without checking them; the caller sets the statistics."""
    node._tokens, node._text = list(token_ids), None


def growing_lists(node: HeddleState) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the node's own lists: tokens, logprobs, entropies and legal_logmass.

    The caller appends to them while the node grows. The node's cached text is cleared.
    """
    node._text = None
    return node._tokens, node.logprobs, node.entropies, node.legal_logmass


def set_place(node: HeddleState, place: Place | None) -> None:
    """Set the node's place; None: compute it when it is used."""
    node._place = place


def is_place_known(node: HeddleState) -> bool:
    """Return True if the node's place is computed already."""
    return node._place is not None


def is_place_of(node: HeddleState, place: Place) -> bool:
    """Return True if `place` still is the node's place: nothing before the node has changed."""
    return node._place is place


def set_deferral(node: HeddleState, deferred: DeferredGrowth | None) -> None:
    """Make later growing calls on this node wait in `deferred`; None: run them at once."""
    node._defers_to = deferred


def set_pending_growth(node: HeddleState, deferred: DeferredGrowth | None) -> None:
    """Set the deferred growth that runs when the node's children are read; None: none."""
    node._pending_growth = deferred


def _number(name: str, value: float) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} is {value!r}; allowed is a number, or None")


def checked_ids(given: Sequence[int]) -> list[int]:
    """Return token ids as a new list of ints. Raises: ConfigError for other values."""
    try:
        return list(map(index, given))
    except TypeError as error:
        raise ConfigError(f"token ids must be integers; {error}") from error


def clear_places(top: HeddleState) -> None:
    """Clear the places of a node and of all nodes below it. Cost: O(nodes).

    Called when the tokens of the node, or of a node above it, have changed.
    """
    for node in preorder(top):
        node._place = None


def imported_display(node: HeddleState) -> str | None:
    """Return the display text that a node was imported with; None if it has none."""
    shown = node.meta.get(DISPLAY)
    return shown if isinstance(shown, str) else None


def clear_end(node: HeddleState) -> None:
    """Clear a node's finish reason, stop string, terminal flag, score and display text.

    Called when the node's tokens change.
    """
    node.meta.pop(DISPLAY, None)
    node.finish_reason = None
    node.stop_string = None
    node.terminal = False
    node.score = None
    node.meta.pop(HEAL, None)


@deferred_interrupt()
def replace_tokens(node: HeddleState, given: Sequence[int]) -> None:
    """Replace a node's tokens by `given`, and clear its statistics. On an error nothing changes."""
    lm, new = node._binding.live_lm(), checked_ids(given)
    # Raises for invalid ids and for a path that is too long, before anything changes.
    lm.place(new, after=None if node.parent is None else node.parent.place)
    node._tokens = new
    node._text = None
    node.logprobs, node.entropies, node.legal_logmass = [], [], []
    node.params, node.lineage = None, ()
    clear_end(node)
    clear_places(node)


@deferred_interrupt()
def clip_tokens(node: HeddleState, limit: int) -> None:
    """Keep a node's first `limit` tokens; see `HeddleState.clip`.

    A negative limit removes that many tokens at the end.
    """
    limit = check_int("the token limit", limit)
    length = len(node._tokens)
    keep = max(0, length + limit) if limit < 0 else limit
    if length <= keep:
        return
    if keep:
        node._binding.text_lm()
    drop_children(node)
    _truncate(node, keep)
    if not keep:
        node._text = ""
    clear_end(node)


def _truncate(node: HeddleState, keep: int) -> None:
    if node._place is not None:
        node._place = node._place.at(node._place.depth - len(node._tokens) + keep)
    for values in (node._tokens, node.logprobs, node.entropies, node.legal_logmass):
        del values[keep:]
    node._text = None


@deferred_interrupt()
def drop_children(node: HeddleState) -> None:
    for child in list(node.children):
        detach_node(child)


@deferred_interrupt()
def detach_node(node: HeddleState) -> None:
    """Remove a node from its parent's children. Cost: O(nodes below)."""
    if node.parent is not None:
        siblings = node.parent.children
        del siblings[next(i for i, each in enumerate(siblings) if each is node)]
    node._parent = None
    clear_places(node)


@deferred_interrupt()
def adopt_node(parent: HeddleState, child: Heddle) -> None:
    """Make `child` the last child of `parent`, and remove it from its previous parent."""
    if is_below(parent, child):
        raise TreeError("a node cannot become a child of itself or of a node below it")
    if child._is_root:
        raise TreeError("a loom is a root and cannot become a child; add its children, or its text")
    if child._binding.lm is not parent._binding.lm:
        raise TreeError("the node belongs to another model; add its text instead: add(node.text)")
    if child.parent is not None and any(each is child for each in child.parent.children):
        detach_node(child)
    for node in preorder(child):
        node._binding, node._place = parent._binding, None
    child._parent = cast("Heddle", parent)
    parent.children.append(child)


@deferred_interrupt()
def split_node(node: HeddleState, at: int) -> Heddle:
    """Split a node before token `at`; see `HeddleState.split`."""
    length = len(node._tokens)
    cut = at + length if at < 0 else at
    if not 0 < cut < length:
        allowed = f"1 to {length - 1}, or negative from the end" if length > 1 else "no split"
        raise ConfigError(f"cannot split before token {at!r} of {length}; allowed is {allowed}")
    node._binding.text_lm()
    lower = new_child(node, node._tokens[cut:])
    lower.logprobs, lower.entropies = node.logprobs[cut:], node.entropies[cut:]
    lower.legal_logmass = node.legal_logmass[cut:]
    lower.params, lower.lineage = node.params, node.lineage
    lower.finish_reason, lower.stop_string = node.finish_reason, node.stop_string
    lower.terminal, lower.score = node.terminal, node.score
    lower._place = node._place
    lower._children, moved = node.children, node.children
    for child in moved:
        child._parent = lower
    node._children = [lower]
    _truncate(node, cut)
    clear_end(node)
    return lower


@deferred_interrupt()
def merge_child(node: HeddleState) -> None:
    """Merge a node with its only child; see `HeddleState.merge`."""
    if node._is_root:
        raise ConfigError("the root is the prompt; it cannot be merged with its child")
    if len(node.children) != 1:
        n = len(node.children)
        raise TreeError(f"the node has {n} children; a node is merged with its only child")
    (child,) = node.children
    text = None if node._tokens or child._tokens else (node._text or "") + (child._text or "")
    node.meta.pop(DISPLAY, None)
    for name in ("logprobs", "entropies", "legal_logmass"):
        # Values of some tokens only would be attributed to the first tokens.
        upper, lower = getattr(node, name), getattr(child, name)
        # legal_logmass may have one more, for an end token.
        is_complete = len(upper) == len(node._tokens) and len(lower) >= len(child._tokens)
        setattr(node, name, [*upper, *lower] if is_complete else [])
    node._tokens, node._text = [*node._tokens, *child._tokens], text
    node._place = child._place
    if child.params is not None and node.params is not None:
        node.params, node.lineage = child.params, child.lineage
    node.finish_reason, node.stop_string = child.finish_reason, child.stop_string
    node.terminal, node.score = child.terminal, child.score
    node._children, child._children = child.children, []
    for below in node._children:
        below._parent = cast("Heddle", node)
    child._parent = None


def preorder(node: HeddleState) -> Iterator[Heddle]:
    """Yield the node and all below it, parents first.

    A node's children are read after it is yielded.
    """
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(top.children))


def leaves_below(node: HeddleState) -> list[Heddle]:
    """Return the leaves from a node down, in order; a childless node is its own leaf."""
    return [each for each in preorder(node) if not each.children]


def path_to(node: HeddleState) -> list[Heddle]:
    """Return the nodes from the root to this one, both included."""
    up = [cast("Heddle", node)]
    while (parent := up[-1].parent) is not None:
        up.append(parent)
    return up[::-1]


def is_below(node: HeddleState, top: HeddleState) -> bool:
    """Return True if `node` is `top` or below it."""
    at: HeddleState | None = node
    while at is not None:
        if at is top:
            return True
        at = at.parent
    return False


def preorder_by_call(node: HeddleState) -> Iterator[Heddle]:
    """Yield the node and all below it, parents first, children as `in_call_order` sorts them.

    Nodes get their numbers in this order.
    """
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(in_call_order(top.children)))


def in_call_order(children: Iterable[Heddle]) -> list[Heddle]:
    """Return children sorted by the call that generated them, then by branch number.

    The calls have the order of their first child in `children`. The order does not depend on which
    branch ended first.
    """
    kept = list(children)
    first: dict[object, int] = {}
    for place, child in enumerate(kept):
        first.setdefault(_call(child), place)
    return sorted(kept, key=lambda child: (first[_call(child)], child.lineage))


def _call(node: Heddle) -> object:
    """Return a key that the children of one call share."""
    return node.id if node.params is None else node.params.seed
