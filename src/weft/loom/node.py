"""The state of one node of a reasoning tree: tokens, figures, place, neighbours."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from ..checks import whole_number
from ..errors import ConfigError, TreeError
from . import constrained, edit, walk
from .home import Home

if TYPE_CHECKING:
    from ..kv.cursor import Place
    from ..lm import LM
    from ..sampling.params import SamplingParams
    from ..sched.work import FinishReason
    from .batch import Batch
    from .heddle import Heddle


class Node:
    """Reading and editing of a node; `Heddle` adds what runs the model. Never made alone.

    Tokens are the truth: text is a view of them, and the place in the token tree (where KV is
    found) is made when needed and dropped when anything before it changes.
    """

    logprobs: list[float]
    entropies: list[float]
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
        self._home = Home.of(model, tokenizer)
        self._tokens = self._encode(text) if isinstance(text, str) else edit.token_ids(text)
        self._text: str | None = None
        self._place: Place | None = None
        self._batch: Batch | None = None
        self._deferred: Batch | None = None
        self._children: list[Heddle] = []
        self.id = secrets.token_hex(6)
        self._parent = parent
        self.logprobs = []
        self.entropies = []
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
        return self._home.lm

    @property
    def model(self) -> Any:
        """The model object that the loom was made with (an LM, or the loaded model)."""
        return self._home.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer object that the loom was made with."""
        return self._home.tokenizer

    @property
    def children(self) -> list[Heddle]:
        """The children, oldest first; the node's own list: change it through the methods only."""
        if self._deferred is not None:
            self._deferred.flush()
        return self._children

    @property
    def tokens(self) -> list[int]:
        """The node's own token ids, a copy. Setting them resets what was recorded of the old."""
        return list(self._tokens)

    @tokens.setter
    def tokens(self, token_ids: Sequence[int]) -> None:
        edit.replace(self, token_ids)

    @property
    def text(self) -> str:
        """The node's own text. Setting it tokenises anew; what stands below keeps its tokens.

        Special tokens that are set in a root are read as such, in other nodes as `reads_special`
        says.
        """
        if self._text is None:
            lm = self._home.text_lm()
            self._text = lm.text.decode(self._tokens, first=self._is_root)
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        edit.replace(self, self._encode_own(text))

    @property
    def parsed(self) -> Any:
        """The object that the text stands for, by the constraint it was grown with.

        Of a JSON schema the data, of a Pydantic class its object, else the text. Raises: ValueError
        while the text is not finished, ConfigError for a node without a constraint.
        """
        return constrained.parsed(self)

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

    def _encode(self, text: str, special: bool | None = None) -> list[int]:
        special = self.reads_special if special is None else special
        return self._home.text_lm().text.continuation(text, special=special) if text else []

    def _encode_own(self, text: str) -> list[int]:
        return self._encode(text)

    # Around it

    @property
    def path(self) -> list[Heddle]:
        """The nodes from the root to this one, both included. Cost: O(depth)."""
        return walk.path(self)

    @property
    def leaves(self) -> list[Heddle]:
        """The childless nodes from here down; a childless node is its own leaf. Cost: O(nodes)."""
        return walk.leaves(self)

    def walk(self) -> Iterator[Heddle]:
        """Yield this node and all below it, parents first."""
        return walk.preorder(self)

    def find(self, node_id: str) -> Heddle:
        """Return the node with this id, from here down, or raise TreeError. Cost: O(nodes)."""
        for node in walk.preorder(self):
            if node.id == node_id:
                return node
        raise TreeError(f"no node has the id {node_id!r} from here down")

    def get_all_children(self, depth: int = 0) -> list[Heddle]:
        """Return all nodes below, parents first; this one too when `depth` is above 0."""
        nodes = list(walk.preorder(self))
        return nodes if depth > 0 else nodes[1:]

    def get_all_leaves(self) -> list[Heddle]:
        """Return `leaves`."""
        return walk.leaves(self)

    def count_children(self) -> int:
        """Return how many nodes there are from here down, this one included."""
        return sum(1 for _ in walk.preorder(self))

    def count_leaves(self) -> int:
        """Return how many leaves there are from here down; 1 for a childless node."""
        return len(walk.leaves(self))

    def apply_all_children(
        self, func: Callable[[Heddle], Any], apply_self: bool = False, leaves_only: bool = False
    ) -> list[Any]:
        """Call `func` on all nodes below, parents first, and return the results.

        The nodes are those there are at the call. A childless node is its own leaf, so with
        `leaves_only` it is called on.
        """
        if leaves_only:
            return [func(node) for node in walk.leaves(self)]
        return [func(node) for node in self.get_all_children(int(apply_self))]

    @property
    def place(self) -> Place:
        """Where the node ends in the token tree; `lm.kv` takes it."""
        return self._where()

    def _where(self) -> Place:
        """Return the node's place, made from the nearest ancestor that has one."""
        lm = self._home.live_lm()
        if self._place is None:
            parts: list[list[int]] = []
            at: Heddle | None = cast("Heddle", self)
            while at is not None and at._place is None:
                parts.append(at._tokens)
                at = at.parent
            ids = [token for part in reversed(parts) for token in part]
            after = None if at is None else at._place
            self._place = lm.place(ids, after=after, namespace=self._home.adapter)
        return self._place

    # What stands before it

    def get_prefix_tokens(self, exclude: int = 0) -> list[int]:
        """Return the token ids from the root to here, less those of the first `exclude` nodes."""
        return [token for node in self._from(exclude) for token in node._tokens]

    def get_prefix_text(self, exclude: int = 0) -> str:
        """Return the text from the root to here; a character split over nodes is whole in it."""
        nodes = self._from(exclude)
        if self._home.lm is None:
            return "".join(node.text for node in nodes)
        ids = [token for node in nodes for token in node._tokens]
        return self._home.lm.text.decode(ids, first=bool(nodes) and nodes[0]._is_root)

    def get_display_text(self, exclude: int = 0) -> str:
        """Return the `display_text()` of all nodes from the root to here, joined."""
        return "".join(node.display_text() for node in self._from(exclude))

    def _from(self, exclude: int) -> list[Heddle]:
        """Return the path from the root to here without its first nodes."""
        return walk.path(self)[whole_number("exclude", exclude, 0) :]

    def crown(self) -> str:
        """Return the text below the root, down to here."""
        return self.get_prefix_text(1)

    def display_text(self) -> str:
        """Return the text to show for this node; subclasses may override it."""
        return self.text

    # Changing it

    def clip(self, token_limit: int) -> Self:
        """Keep the first `token_limit` tokens (negative: drop so many) and return the node.

        Does nothing when there are no more than that. Otherwise children are dropped, and the
        node, no longer ended, grows on from its new end.
        """
        edit.clip(self, token_limit)
        return self

    def trim(self, token_trim: int) -> Self:
        """Take the last `token_trim` tokens away, as `clip` does; 0 takes none."""
        if whole_number("token_trim", token_trim, 0):
            edit.clip(self, -token_trim)
        return self

    def to_leaf(self) -> Self:
        """Drop all children. Each dropped child lives on with only itself as its path."""
        edit.drop_children(self)
        return self

    def split(self, at: int) -> Heddle:
        """Cut before token `at` (negative: from the end) and return the new lower node.

        This node keeps its place, id and first `at` tokens. The lower node takes the rest, the
        children, the score and how the branch ended.
        """
        return edit.split(self, at)

    def remove(self) -> Self:
        """Take the node and all below it out of the tree; its path is then only itself."""
        if self.parent is None:
            raise TreeError("a root cannot be removed; close the loom instead")
        edit.detach(self)
        return self

    def remove_child(self, child: Heddle) -> Heddle:
        """Take a child and all below it out of the tree and return it, as `remove` does."""
        if child.parent is not self:
            raise TreeError(
                "only a node's own child can be removed from it; this is none of its children"
            )
        return child.remove()

    def add_child(self, child: Heddle) -> Heddle:
        """Put a node (taken from its parent, if it has one) and all below it here and return it.

        From now on it continues this node: its next tokens are computed for the new context. What
        was recorded of its tokens stays as it was.
        """
        edit.adopt(self, child)
        return child

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} stands in a tree of one model and cannot be pickled or "
            "copied; save the loom and open it elsewhere: loom.save(path), Loom.open(path, lm)"
        )

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


def _number(name: str, value: float) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} is {value!r}; allowed is a number, or None")
