"""The tree of an imported file, and the loom that is built from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from ...loom import Heddle, Loom
from ...loom.author_note import AUTHOR_NOTE
from ...loom.loom import MESSAGES, Prompt, read_prompt
from ...loom.model_binding import ModelBinding
from ...loom.node import DISPLAY, child_list, encode_after, new_child, set_text
from ..store.file import NO_MODEL
from .preference_pairs import BOOKMARK
from .turns import ROLE
from .user_text import USER_TEXT_KEY

if TYPE_CHECKING:
    from ...lm.lm import LM

IMPORTED = "imported"  # key in meta: values of the file without an equivalent in Weft
L = TypeVar("L", bound=Loom)


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Maximum size of an import. A larger file raises FormatError."""

    n_bytes: int = 512 << 20  # size of the file
    n_nodes: int = 1_000_000  # nodes of all trees of the file
    height: int = 100_000  # nodes on a path


class Note(NamedTuple):
    """A kind of omission or change, as the end of a sentence that starts with a count.

    one: the words after the count 1: "message without text was left out".
    many: the words after other counts: "messages without text were left out".

    `Sketch.notes` takes a plain string, too, which then follows every count.
    """

    one: str
    many: str


@dataclass(slots=True)
class Knot:
    """A node of a `Sketch`: a text that continues the text of its parent."""

    text: str
    parent: int = -1  # index in `Sketch.knots` of the parent, which precedes it; -1 for the root
    terminal: bool = False  # the text ended with an end token
    score: float | None = None
    role: str | None = None  # of a chat message
    display_text: str | None = None  # shown instead of the text
    bookmark: str | None = None  # its label
    ids: list[int] | None = None  # token ids; None: the text is tokenized
    typed: str | None = None  # the message as the user typed it, if `ids` have a chat template
    imported: dict[str, Any] = field(default_factory=dict)  # other values of the file


@dataclass(slots=True)
class Sketch:
    """A tree of texts that an importer has read from a file; `build_loom` makes a loom of it.

    The nodes are in `knots`: the root at index 0, and parents before their children.
    """

    title: str = ""
    knots: list[Knot] = field(default_factory=list)
    at: int = 0  # index of the node that was selected in the program
    special: bool = False  # parse special tokens in the texts; a template or a model wrote them
    imported: dict[str, Any] = field(default_factory=dict)  # other values of the file
    notes: Counter[Note | str] = field(default_factory=Counter)  # omissions and changes: counts
    author_note: dict[str, Any] | None = None  # as `weft.loom.author_note` keeps it
    user_prompt: str | None = None  # the user's text, if the root's text is a rendered template
    messages: list[dict[str, Any]] | None = None  # the chat messages of a rendered prompt

    def add(self, knot: Knot) -> int:
        """Append a node and return its index."""
        self.knots.append(knot)
        return len(self.knots) - 1

    def lift(self) -> None:
        """Remove an empty root that has one child, so that this child's text is the prompt."""
        if self.knots[0].text or sum(knot.parent == 0 for knot in self.knots) != 1:
            return
        empty = self.knots.pop(0)
        self.at = max(self.at - 1, 0)
        for knot in self.knots:
            knot.parent -= 1
        if empty.imported:
            self.imported["root"] = empty.imported


class Entry(NamedTuple):
    """A node of a file whose nodes name their parents by id."""

    id: str
    parent: str | None  # id of the parent; None for a root
    knot: Knot  # the node's text and other values; its `parent` is not set yet


_ORPHAN = Note(
    "node without a parent in the file is at the top",
    "nodes without a parent in the file are at the top",
)
_LOOP = Note(
    "node that is its own ancestor was left out",
    "nodes that are their own ancestors were left out",
)
_ROOTS = Note("tree is below an empty prompt", "trees in one are below an empty prompt")
_CHANGED = Note(
    "text differs after tokenizing it for this model",
    "texts differ after tokenizing them for this model",
)


def linked(entries: Iterable[Entry], *, at: str | None = None, title: str = "") -> Sketch:
    """Return the tree of nodes that name their parents. Siblings keep their order.

    If there are several roots, an empty root is added above them.

    Args:
        entries: the nodes, in any order.
        at: id of the node that was selected in the program; None: none.
        title: title of the tree; "" for none.

    Raises: FormatError for a duplicate id.
    """
    by_id: dict[str, Entry] = {}
    for entry in entries:
        if entry.id in by_id:
            raise FormatError(f"two nodes have the id {repr_short(entry.id)}; the file is broken")
        by_id[entry.id] = entry
    sketch = Sketch(title)
    below: dict[str | None, list[Entry]] = {}
    for entry in by_id.values():
        parent = entry.parent
        if parent is not None and parent not in by_id:
            sketch.notes[_ORPHAN] += 1
            parent = None
        below.setdefault(parent, []).append(entry)
    roots = below.get(None, [])
    if len(roots) != 1:
        sketch.add(Knot(""))
        if roots:
            sketch.notes[_ROOTS] += len(roots)
    stack = [(root, len(sketch.knots) - 1) for root in reversed(roots)]
    n_reached = 0
    while stack:
        entry, above = stack.pop()
        n_reached += 1
        entry.knot.parent = above
        index = sketch.add(entry.knot)
        sketch.at = index if entry.id == at else sketch.at
        stack.extend((child, index) for child in reversed(below.get(entry.id, ())))
    if n_reached < len(by_id):
        sketch.notes[_LOOP] += len(by_id) - n_reached
    return sketch


class ImportedLoom(NamedTuple):
    """An imported loom.

    title: the loom's title in the file; "" for none. A chat that begins with an answer and has no
        title gets the user's first message.
    loom: the loom.
    at: the node that was selected in the program; the root if none was.
    """

    title: str
    loom: Loom
    at: Heddle


def check_limits(sketches: Sequence[Sketch], limits: ImportLimits) -> None:
    """Raise FormatError if the trees have too many nodes, in total or on one path."""
    n_nodes = sum(len(sketch.knots) for sketch in sketches)
    if n_nodes > limits.n_nodes:
        raise FormatError(f"it has {n_nodes} nodes; an import takes {limits.n_nodes} at most")
    for sketch in sketches:
        heights = [0] * len(sketch.knots)
        for index, knot in enumerate(sketch.knots[1:], 1):
            heights[index] = heights[knot.parent] + 1
        if max(heights, default=0) > limits.height:
            raise FormatError(
                f"it has {max(heights)} nodes one below another; an import takes {limits.height}"
            )


def build_loom(
    sketch: Sketch,
    lm: LM | None,
    recognised_as: str,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> ImportedLoom:
    """Build a loom from a tree of texts.

    Nodes without token ids are tokenized as continuations, without a chat template. Notes about
    changed data are added to the sketch.

    Args:
        sketch: the tree.
        lm: the model that tokenizes the texts; None: a loom of texts without tokens.
        recognised_as: name of the file's format, stored in the loom's meta.
        loom_class: class of the root.
        heddle_class: class of the nodes below.
    """
    root = sketch.knots[0]
    binding = ModelBinding(lm, lm, None if lm is None else lm.tokenizer, is_text=lm is None)
    is_templated = sketch.user_prompt is not None
    user_prompt = root.text if sketch.user_prompt is None else sketch.user_prompt
    prompt = Prompt([] if lm is None else _prompt_ids(sketch, lm), user_prompt, is_templated)
    loom = loom_class.restored(binding, prompt, heddle_class)
    loom.saved_by = NO_MODEL
    nodes: list[Heddle] = [loom]
    for knot in sketch.knots[1:]:
        nodes.append(_add_child(nodes[knot.parent], knot, sketch, lm))
    if lm is None:
        set_text(loom, root.text)
    for node, knot in zip(nodes, sketch.knots, strict=True):
        _copy_values(node, knot)
    loom.meta[IMPORTED] = {"format": recognised_as, **sketch.imported, **root.imported}
    if sketch.author_note is not None:
        loom.meta[AUTHOR_NOTE] = sketch.author_note
    if sketch.messages not in (None, [{"role": "user", "content": user_prompt}]):
        loom.meta[MESSAGES] = sketch.messages
    return ImportedLoom(sketch.title, loom, nodes[sketch.at])


def _prompt_ids(sketch: Sketch, lm: LM) -> list[int]:
    text, ids = sketch.knots[0].text, sketch.knots[0].ids
    if ids is not None:
        return ids
    if not text:
        return lm.text.encode("")  # the BOS token, if the tokenizer adds one
    return read_prompt(lm.text, text, template=False, special=sketch.special).ids


def _add_child(parent: Heddle, knot: Knot, sketch: Sketch, lm: LM | None) -> Heddle:
    """Append a child with a knot's tokens, or with its text in the tokens of the model.

    Counts texts that tokenizing changes in `sketch.notes`.

    lm: None: the child gets the text and no tokens.
    """
    text = knot.text
    if lm is None:
        node = new_child(parent)
        set_text(node, text)
    elif knot.ids is not None:
        node = new_child(parent, knot.ids)
    else:
        node = new_child(parent, encode_after(parent, text, sketch.special) if text else [])
        if node.text != text:
            sketch.notes[_CHANGED] += 1
    child_list(parent).append(node)
    return node


def _copy_values(node: Heddle, knot: Knot) -> None:
    """Copy the values of a knot, except its text and tokens, to a node."""
    node.terminal, node.score = knot.terminal, knot.score
    if knot.role is not None:
        node.meta[ROLE] = knot.role
    if knot.typed is not None:
        node.meta[USER_TEXT_KEY] = knot.typed
    if knot.display_text is not None:
        node.meta[DISPLAY] = knot.display_text
    if knot.bookmark is not None:
        node.meta[BOOKMARK] = knot.bookmark
    if knot.imported:
        node.meta[IMPORTED] = knot.imported
