"""A node of a reasoning tree: tokens, figures, place, neighbours; its edits, and walks.

Ctrl-C waits for the end of an edit: it is done whole or not at all.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Self, cast

from .._core.nopickle import Uncopied
from .._core.sched.driver import deferred_interrupt
from .._core.validation import whole_number
from ..errors import ConfigError, NotAChild, TreeError
from .constrained_text import HEAL, parsed_text
from .model_binding import ModelBinding

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from .._core.sampling.params import SamplingParams
    from .._core.sched.work import FinishReason, RunResult
    from ..lm.lm import LM
    from .grow import DeferredGrowth
    from .heddle import Heddle


DISPLAY = "display_text"  # in the meta of an imported node: the text to show instead of its own


class HeddleState(
    Uncopied, instead="save the loom and open it elsewhere: loom.save(path), Loom.open(path, lm)"
):
    """Reading and editing of a node; `Heddle` adds what runs the model. Never made alone.

    Tokens are the truth: text is a view of them, and the place in the token tree (where KV is
    found) is made when needed and dropped when anything before it changes.
    """

    logprobs: list[float]
    entropies: list[float]
    legal_logmass: list[float]
    params: SamplingParams | None
    finish_reason: FinishReason | None
    meta: dict[str, Any]
    # Whether special tokens that stand in given text are read as such, where a call does not say.
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
        """Make a node that is in no list of children yet; see `add` and `add_child`.

        Args:
            model: an LM, or a loaded model with its `tokenizer`.
            text: text that continues what stands before it, or token ids. Special tokens in it are
                read as such if the class says so, by `reads_special`.
            frags, trim_toks: accepted for known callers and not needed: KV is found by tokens, and
                what to trim from an encoding follows from the tokenizer.
        """
        self._binding = ModelBinding.of(model, tokenizer)
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

    # What it holds

    @property
    def parent(self) -> Heddle | None:
        """The node above, None for a root; `add_child` and `remove` change it."""
        return self._parent

    @property
    def lm(self) -> LM | None:
        """The LM that grows this node; None in a loom opened without a model."""
        return self._binding.lm

    @property
    def model(self) -> Any:
        """The model object that the loom was made with (an LM, or the loaded model)."""
        return self._binding.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer object that the loom was made with."""
        return self._binding.tokenizer

    @property
    def children(self) -> list[Heddle]:
        """The children, oldest first; the node's own list: change it through the methods only."""
        if self._pending_growth is not None:
            self._pending_growth.flush()
        return self._children

    @property
    def tokens(self) -> list[int]:
        """The node's own token ids, a copy. Setting them resets what was recorded of the old."""
        return list(self._tokens)

    @tokens.setter
    def tokens(self, token_ids: Sequence[int]) -> None:
        replace_tokens(self, token_ids)

    @property
    def text(self) -> str:
        """The node's own text. Setting it tokenises anew; what stands below keeps its tokens.

        Special tokens that are set in a root are read as such, in other nodes as `reads_special`
        says.
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
        """The object that the text stands for, by the constraint it was grown with.

        Of a JSON schema the data, of a Pydantic class its object, else the text. Raises:
        Unfinished, a ValueError, for JSON that breaks off, as at `max_tokens`; ConfigError for a
        node without a constraint.
        """
        return parsed_text(self)

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the sampled tokens; -inf for none, so that it never ranks first."""
        return math.fsum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    @property
    def mean_p(self) -> float:
        """The arithmetic mean of the sampled tokens' probabilities; 0.0 when there is none."""
        total = math.fsum(math.exp(logprob) for logprob in self.logprobs)
        return total / len(self.logprobs) if self.logprobs else 0.0

    @property
    def score(self) -> float | None:
        """Yours: what a search or a scorer thinks of the node. Takes anything that is a number."""
        return self._score

    @score.setter
    def score(self, score: float | None) -> None:
        self._score = None if score is None else _number("score", score)

    def _child(self, token_ids: Sequence[int]) -> Heddle:
        """Make a child that is in no list yet."""
        made: Any = getattr(self, "heddle_class", type(self))  # a root says what stands below it
        child: Heddle = made(self._binding, None, list(token_ids), None, None, self)
        return child

    def _encode(self, text: str, special: bool | None = None) -> list[int]:
        special = self.reads_special if special is None else special
        return self._binding.text_lm().text.continuation(text, special=special) if text else []

    def _encode_own(self, text: str) -> list[int]:
        return self._encode(text)

    # Around it

    @property
    def path(self) -> list[Heddle]:
        """The nodes from the root to this one, both included. Cost: O(depth)."""
        return path_to(self)

    @property
    def leaves(self) -> list[Heddle]:
        """The childless nodes from here down; a childless node is its own leaf. Cost: O(nodes)."""
        return leaves_below(self)

    def walk(self) -> Iterator[Heddle]:
        """Yield this node and all below it, parents first."""
        return preorder(self)

    def find(self, node_id: str) -> Heddle:
        """Return the node with this id, from here down, or raise TreeError. Cost: O(nodes)."""
        for node in preorder(self):
            if node.id == node_id:
                return node
        raise TreeError(f"no node has the id {node_id!r} from here down")

    def get_all_children(self, depth: int = 0) -> list[Heddle]:
        """Return all nodes below, parents first; this one too when `depth` is above 0."""
        nodes = list(preorder(self))
        return nodes if depth > 0 else nodes[1:]

    def get_all_leaves(self) -> list[Heddle]:
        """The known name of `leaves`."""
        return leaves_below(self)

    def count_children(self) -> int:
        """Return how many nodes there are from here down, this one included."""
        return sum(1 for _ in preorder(self))

    def count_leaves(self) -> int:
        """Return how many leaves there are from here down; 1 for a childless node."""
        return len(leaves_below(self))

    def apply_all_children(
        self, func: Callable[[Heddle], Any], apply_self: bool = False, leaves_only: bool = False
    ) -> list[Any]:
        """Call `func` on all nodes below, parents first, and return the results.

        The nodes are those there are at the call. A childless node is its own leaf, so with
        `leaves_only` it is called on.
        """
        if leaves_only:
            return [func(node) for node in leaves_below(self)]
        return [func(node) for node in self.get_all_children(int(apply_self))]

    @property
    def place(self) -> Place:
        """Where the node ends in the token tree; `lm.kv` takes it."""
        # Made from the nearest ancestor that has one.
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

    # What stands before it

    def get_prefix_tokens(self, exclude: int = 0) -> list[int]:
        """Return the token ids from the root to here, less those of the first `exclude` nodes."""
        return [token for node in self._from(exclude) for token in node._tokens]

    def get_prefix_text(self, exclude: int = 0) -> str:
        """Return the text from the root to here; a character split over nodes is whole in it."""
        nodes = self._from(exclude)
        if self._binding.lm is None:
            return "".join(node.text for node in nodes)
        ids = [token for node in nodes for token in node._tokens]
        return self._binding.lm.text.decode(ids, first=bool(nodes) and nodes[0]._is_root)

    def get_display_text(self, exclude: int = 0) -> str:
        """Return the `display_text()` of all nodes from the root to here, joined."""
        return "".join(node.display_text() for node in self._from(exclude))

    def _from(self, exclude: int) -> list[Heddle]:
        """Return the path from the root to here without its first nodes."""
        return path_to(self)[whole_number("exclude", exclude, 0) :]

    def crown(self) -> str:
        """Return the text below the root, down to here."""
        return self.get_prefix_text(1)

    def display_text(self) -> str:
        """Return the text to show for this node; subclasses may override it.

        An imported node returns the display text of its file until its own text changes.
        """
        shown = imported_display(self)
        return self.text if shown is None else shown

    # Changing it

    def clip(self, token_limit: int) -> Self:
        """Keep the first `token_limit` tokens (negative: drop so many) and return the node.

        Does nothing when there are no more than that. Otherwise children are dropped, and the
        node, no longer ended, grows on from its new end.
        """
        clip_tokens(self, token_limit)
        return self

    def trim(self, token_trim: int) -> Self:
        """Take the last `token_trim` tokens away, as `clip` does; 0 takes none."""
        if n := whole_number("token_trim", token_trim, 0):
            clip_tokens(self, -n)
        return self

    def to_leaf(self) -> Self:
        """Drop all children. Each dropped child lives on with only itself as its path."""
        drop_children(self)
        return self

    def split(self, at: int) -> Heddle:
        """Cut before token `at` (negative: from the end) and return the new lower node.

        This node keeps its place, id and first `at` tokens. The lower node takes the rest, the
        children, the score and how the branch ended.
        """
        return split_node(self, at)

    def merge(self) -> Self:
        """Join the node with its only child: what `split` did, taken back.

        The node keeps its place and id, and takes the child's tokens, figures, children and end.
        Raises: TreeError unless it has one child; ConfigError for a root, which is the prompt.
        """
        merge_child(self)
        return self

    def remove(self) -> Self:
        """Take the node and all below it out of the tree; its path is then only itself."""
        if self.parent is None:
            raise TreeError("a root cannot be removed; close the loom instead")
        detach_node(self)
        return self

    def remove_child(self, child: Heddle) -> Heddle:
        """Take a child and all below it out of the tree and return it, as `remove` does.

        Raises: NotAChild, a ValueError, for any other object.
        """
        if getattr(child, "parent", None) is not self:
            raise NotAChild(
                "only a node's own child can be removed from it; this is none of its children"
            )
        return child.remove()

    def add_child(self, child: Heddle) -> Heddle:
        """Put a node (taken from its parent, if it has one) and all below it here and return it.

        From now on it continues this node: its next tokens are computed for the new context. What
        was recorded of its tokens stays as it was.
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


# What a node is made of, for the files of this package and of the store: users have its methods.


def lm_of(node: HeddleState) -> LM:
    """Return the LM that runs a node. Raises: ConfigError without one, StaleHandle when closed."""
    return node._binding.live_lm()


def rebind(node: HeddleState) -> ModelBinding:
    """Return another home over the same LM, for a copy of the loom."""
    binding = node._binding
    copy = ModelBinding(binding.lm, binding.model, binding.tokenizer, is_text=binding.is_text)
    copy.closed, copy.adapter, copy.is_chat = binding.closed, binding.adapter, binding.is_chat
    return copy


def encode_after(node: HeddleState, text: str, special: bool | None) -> list[int]:
    """Return a text's token ids as what goes on after the node."""
    return node._encode(text, special)


def new_child(parent: HeddleState, token_ids: Sequence[int] = ()) -> Heddle:
    """Return a child that is in no list yet."""
    return parent._child(token_ids)


def child_list(parent: HeddleState) -> list[Heddle]:
    """Return the node's own list as it stands: nothing that was put off is made for it."""
    return parent._children


def add_text(parent: HeddleState, text: str, special: bool | None = None) -> Heddle:
    """Append a child with this text; in a loom without a model it has no tokens."""
    if parent._binding.is_text:
        child = new_child(parent)
        set_text(child, text)
        parent.children.append(child)
        return child
    parent._binding.text_lm().check_length(text)
    return add_tokens(parent, encode_after(parent, text, special))


def add_tokens(parent: HeddleState, token_ids: Sequence[int]) -> Heddle:
    """Append a child with these tokens. Raises: ContextOverflow, and nothing has changed."""
    child = new_child(parent, token_ids)
    child._place = lm_of(parent).place(child._tokens, after=parent.place)
    parent.children.append(child)
    return child


def set_text(node: HeddleState, text: str) -> None:
    """Say what a node's text is, where no tokenizer says it."""
    node._text = text


def set_run(node: HeddleState, result: RunResult) -> None:
    """Give a node the tokens and figures of a finished run."""
    node._tokens, node._text = list(result.tokens), None
    node.logprobs, node.entropies = list(result.logprobs), list(result.entropies)
    node.legal_logmass = list(result.legal_logmass)


def set_tokens(node: HeddleState, token_ids: list[int]) -> None:
    """Give a node tokens that were checked when they were made; its figures are the caller's."""
    node._tokens, node._text = list(token_ids), None


def growing_lists(node: HeddleState) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the node's own tokens, logprobs, entropies and legal_logmass, for appending."""
    node._text = None
    return node._tokens, node.logprobs, node.entropies, node.legal_logmass


def set_place(node: HeddleState, place: Place | None) -> None:
    """Say where a node ends; None: it is made anew when used."""
    node._place = place


def is_place_known(node: HeddleState) -> bool:
    """Whether a node's place is made already: asking for it costs nothing then."""
    return node._place is not None


def is_place_of(node: HeddleState, place: Place) -> bool:
    """Whether this very place still is the node's: nothing before it has changed."""
    return node._place is place


def set_deferral(node: HeddleState, deferred: DeferredGrowth | None) -> None:
    """Let the growing calls that are made on a node be put off, into a batch."""
    node._defers_to = deferred


def set_pending_growth(node: HeddleState, deferred: DeferredGrowth | None) -> None:
    """Say which batch a node's children are in until it is grown."""
    node._pending_growth = deferred


def _number(name: str, value: float) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} is {value!r}; allowed is a number, or None")


def checked_ids(given: Sequence[int]) -> list[int]:
    """Return the ids as a new list of ints; ConfigError for what is no whole number."""
    try:
        return [index(token) for token in given]
    except TypeError as error:
        raise ConfigError(f"token ids are whole numbers; {error}") from error


def clear_places(top: HeddleState) -> None:
    """Reset the places from here down: the context before them has changed. Cost: O(nodes)."""
    for node in preorder(top):
        node._place = None


def imported_display(node: HeddleState) -> str | None:
    """Return the display text that a node was imported with; None if it has none."""
    shown = node.meta.get(DISPLAY)
    return shown if isinstance(shown, str) else None


def clear_end(node: HeddleState) -> None:
    """The node no longer ends where it ended: what was said of its end goes."""
    node.meta.pop(DISPLAY, None)
    node.finish_reason = None
    node.stop_string = None
    node.terminal = False
    node.score = None
    node.meta.pop(HEAL, None)


@deferred_interrupt()
def replace_tokens(node: HeddleState, given: Sequence[int]) -> None:
    """Give the node other tokens. Nothing has changed if they are refused."""
    lm, new = node._binding.live_lm(), checked_ids(given)
    # Refuses what is no token or does not fit, before anything changes.
    lm.place(new, after=None if node.parent is None else node.parent.place)
    node._tokens = new
    node._text = None
    node.logprobs, node.entropies, node.legal_logmass = [], [], []
    node.params, node.lineage = None, ()
    clear_end(node)
    clear_places(node)


@deferred_interrupt()
def clip_tokens(node: HeddleState, limit: int) -> None:
    """Keep the first `limit` tokens; negative counts from the end and stops at none."""
    limit = whole_number("the token limit", limit)
    length = len(node._tokens)
    keep = max(0, length + limit) if limit < 0 else limit
    if length <= keep:
        return
    if keep:
        node._binding.text_lm()
    drop_children(node)
    _cut(node, keep)
    if not keep:
        node._text = ""
    clear_end(node)


def _cut(node: HeddleState, keep: int) -> None:
    if node._place is not None:
        node._place = node._place.at(node._place.depth - len(node._tokens) + keep)
    for values in (node._tokens, node.logprobs, node.entropies, node.legal_logmass):
        del values[keep:]
    node._text = None


@deferred_interrupt()
def drop_children(node: HeddleState) -> None:
    """Detach every child."""
    for child in list(node.children):
        detach_node(child)


@deferred_interrupt()
def detach_node(node: HeddleState) -> None:
    """Take a node out of its parent's children; its path is then itself. Cost: O(nodes below)."""
    if node.parent is not None:
        siblings = node.parent.children
        del siblings[next(i for i, each in enumerate(siblings) if each is node)]
    node._parent = None
    clear_places(node)


@deferred_interrupt()
def adopt_node(parent: HeddleState, child: Heddle) -> None:
    """Make `child` the last child of `parent`, wherever it was before."""
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
    """Cut before token `at`; see Node.split."""
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
    _cut(node, cut)
    clear_end(node)
    return lower


@deferred_interrupt()
def merge_child(node: HeddleState) -> None:
    """Join a node with its only child; see Node.merge."""
    if node._is_root:
        raise ConfigError("the root is the prompt; it cannot be joined with what follows it")
    if len(node.children) != 1:
        n = len(node.children)
        raise TreeError(f"the node has {n} children; it can be joined with one only child")
    (child,) = node.children
    text = None if node._tokens or child._tokens else (node._text or "") + (child._text or "")
    node.meta.pop(DISPLAY, None)
    for name in ("logprobs", "entropies", "legal_logmass"):
        # Figures of some tokens only would be taken for those of the first ones.
        upper, lower = getattr(node, name), getattr(child, name)
        # legal_logmass may have one more, for an end token.
        whole = len(upper) == len(node._tokens) and len(lower) >= len(child._tokens)
        setattr(node, name, [*upper, *lower] if whole else [])
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
    """Yield the node and all below it, parents first; children are read after their parent."""
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(top.children))


def leaves_below(node: HeddleState) -> list[Heddle]:
    """Return the childless nodes from here down, in order; a childless node is its own leaf."""
    return [each for each in preorder(node) if not each.children]


def path_to(node: HeddleState) -> list[Heddle]:
    """Return the nodes from the root to this one, both included."""
    up = [cast("Heddle", node)]
    while (parent := up[-1].parent) is not None:
        up.append(parent)
    return up[::-1]


def is_below(node: HeddleState, top: HeddleState) -> bool:
    """Whether `node` is `top` or below it."""
    at: HeddleState | None = node
    while at is not None:
        if at is top:
            return True
        at = at.parent
    return False


def preorder_by_call(node: HeddleState) -> Iterator[Heddle]:
    """Yield as `preorder`, children `in_call_order`: the order in which nodes get their numbers."""
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(in_call_order(top.children)))


def in_call_order(children: Iterable[Heddle]) -> list[Heddle]:
    """Return children as they were asked for, call by call, whichever ended first."""
    kept = list(children)
    first: dict[object, int] = {}
    for place, child in enumerate(kept):
        first.setdefault(_call(child), place)
    return sorted(kept, key=lambda child: (first[_call(child)], child.lineage))


def _call(node: Heddle) -> object:
    """What the children of one call share."""
    return node.id if node.params is None else node.params.seed
