"""A tree as another program's file has it, and the loom that it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt, read_prompt
from ...loom.model_binding import ModelBinding
from ...loom.node import DISPLAY, child_list, encode_after, new_child, set_text
from ..store.file import NO_MODEL
from .preference_pairs import BOOKMARK
from .turns import ROLE

if TYPE_CHECKING:
    from ...lm.lm import LM

IMPORTED = "imported"  # in meta: what of the file Weft has no word for
L = TypeVar("L", bound=Loom)


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """What an import may be at most: bytes, nodes of all its trees, and nodes on a path."""

    n_bytes: int = 512 << 20
    n_nodes: int = 1_000_000
    height: int = 100_000


@dataclass(slots=True)
class Knot:
    """A node of a sketch: a text that goes on after its parent's.

    parent: the index of one before it; -1 for the root. role: of a chat message.
    display_text: what is shown instead of the text. imported: what else the file says of it.
    """

    text: str
    parent: int = -1
    terminal: bool = False
    score: float | None = None
    role: str | None = None
    display_text: str | None = None
    bookmark: str | None = None
    imported: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Sketch:
    """A tree of texts: parents first, the root at 0. What an importer returns.

    at: the index of the node where its reader stood. special: special tokens in the texts were
    written by a model's template or by the model, and are read as such. notes: what was left out
    or put otherwise, each with how often. user_prompt: the user's text, if the root's text is a
    rendered chat template; None if the root's text is the prompt.
    """

    title: str = ""
    knots: list[Knot] = field(default_factory=list)
    at: int = 0
    special: bool = False
    imported: dict[str, Any] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    user_prompt: str | None = None

    def add(self, knot: Knot) -> int:
        """Append a node and return its index."""
        self.knots.append(knot)
        return len(self.knots) - 1

    def lift(self) -> None:
        """Make the one child of an empty root the root: it is what the tree begins with."""
        if self.knots[0].text or sum(knot.parent == 0 for knot in self.knots) != 1:
            return
        empty = self.knots.pop(0)
        self.at = max(self.at - 1, 0)
        for knot in self.knots:
            knot.parent -= 1
        if empty.imported:
            self.imported["root"] = empty.imported


class Entry(NamedTuple):
    """A node of a file that lists them with their parents' ids."""

    id: str
    parent: str | None
    knot: Knot


_ORPHAN = "nodes whose parent is not in the file stand at the top"
_LOOP = "nodes that are their own ancestors were left out"
_ROOTS = "trees in one are below an empty prompt"


def linked(entries: Iterable[Entry], *, at: str | None = None, title: str = "") -> Sketch:
    """Return a sketch of nodes that name their parents, in any order; siblings keep theirs.

    Several roots get an empty one above them. Raises: FormatError for an id that is given twice.
    """
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.id in found:
            raise FormatError(f"two nodes have the id {repr_short(entry.id)}; the file is broken")
        found[entry.id] = entry
    sketch = Sketch(title)
    below: dict[str | None, list[Entry]] = {}
    for entry in found.values():
        parent = entry.parent
        if parent is not None and parent not in found:
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
    if n_reached < len(found):
        sketch.notes[_LOOP] += len(found) - n_reached
    return sketch


class ImportedLoom(NamedTuple):
    """A loom that was imported. title: what the file calls it. at: where its reader stood."""

    title: str
    loom: Loom
    at: Heddle


def check_limits(sketches: Sequence[Sketch], limits: ImportLimits) -> None:
    """Refuse trees that are beyond the limits. Raises: FormatError."""
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
    """Return a sketch as a loom: with an LM of tokens, else of texts. Its notes get more.

    The prompt is taken as it is, never templated; the texts below as what goes on after it.
    """
    root = sketch.knots[0]
    binding = ModelBinding(lm, lm, None if lm is None else lm.tokenizer, is_text=lm is None)
    is_templated = sketch.user_prompt is not None
    asked = root.text if sketch.user_prompt is None else sketch.user_prompt
    made = Prompt([] if lm is None else _prompt_ids(sketch, lm), asked, is_templated)
    loom = loom_class.restored(binding, made, heddle_class)
    loom.saved_by = NO_MODEL
    nodes: list[Heddle] = [loom]
    for knot in sketch.knots[1:]:
        nodes.append(_child(nodes[knot.parent], knot.text, sketch, lm))
    if lm is None:
        set_text(loom, root.text)
    for node, knot in zip(nodes, sketch.knots, strict=True):
        _note(node, knot)
    loom.meta[IMPORTED] = {"format": recognised_as, **sketch.imported, **root.imported}
    return ImportedLoom(sketch.title, loom, nodes[sketch.at])


def _prompt_ids(sketch: Sketch, lm: LM) -> list[int]:
    text = sketch.knots[0].text
    if not text:
        return lm.text.encode("")  # a begin token, where the tokenizer writes one
    return read_prompt(lm.text, text, template=False, special=sketch.special).ids


def _child(parent: Heddle, text: str, sketch: Sketch, lm: LM | None) -> Heddle:
    if lm is None:
        node = new_child(parent)
        set_text(node, text)
    else:
        node = new_child(parent, encode_after(parent, text, sketch.special) if text else [])
        if node.text != text:
            sketch.notes["texts read otherwise in this model's tokens"] += 1
    child_list(parent).append(node)
    return node


def _note(node: Heddle, knot: Knot) -> None:
    node.terminal, node.score = knot.terminal, knot.score
    if knot.role is not None:
        node.meta[ROLE] = knot.role
    if knot.display_text is not None:
        node.meta[DISPLAY] = knot.display_text
    if knot.bookmark is not None:
        node.meta[BOOKMARK] = knot.bookmark
    if knot.imported:
        node.meta[IMPORTED] = knot.imported
