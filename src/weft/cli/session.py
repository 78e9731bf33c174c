"""An open loom as verbs use it: its name, node numbers, current node, and operations."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, StoreError, TreeError
from ..viz.terminal import TerminalWriter

if TYPE_CHECKING:
    from ..lm.results import Delta, Distribution
    from ..loom import Heddle, Loom
    from ..loom.author_note import AuthorNote
    from .backend import ModelHandle


@dataclass(slots=True)
class GenerationStream:
    """Branches that are being generated."""

    first: int  # number of the first branch; the others have the following numbers
    deltas: Generator[Delta, None, object]  # closing it stops the generation and saves
    branches: Callable[[], list[Heddle]]  # returns the branches once `deltas` is exhausted
    status: Callable[[], str]  # returns a text to display before the first token


@dataclass(slots=True)
class UndoResult:
    """The effect of an undo or redo on the tree."""

    kind: str  # kind of the operation that was undone or redone, such as "grow"
    added: list[Heddle]
    changed: list[Heddle]
    removed: list[int]  # numbers of nodes


class LoomSession(ABC):
    """An open loom, as verbs read, grow and edit it.

    model_handle: the model that grows the loom. None opens it without a model.

    Attributes:
        name: the loom's name; "" while the loom is not saved.
        at: the current node, that is, the node last read or grown.
    """

    def __init__(self, loom: Loom, name: str, model_handle: ModelHandle | None = None) -> None:
        self.loom = loom
        self.name = name
        self.at: Heddle = loom
        self.optional_handle = model_handle

    @property
    def model_handle(self) -> ModelHandle:
        """The model that grows the loom. Only for sessions that were opened with a model."""
        assert self.optional_handle is not None
        return self.optional_handle

    @property
    @abstractmethod
    def model(self) -> str:
        """The model that grows the loom, as -m takes it. It need not be loaded."""

    # Numbers

    @abstractmethod
    def numbers(self) -> Mapping[str, int]:
        """Return node numbers by node id. The prompt is 0. Numbers are never reused."""

    def number(self, node: Heddle) -> int:
        """Return a node's number."""
        return self.numbers()[node.id]

    def node(self, name: str | None) -> Heddle:
        """Return the node with this number or id; None means the current node.

        Raises: ConfigError if there is no such node.
        """
        if name is None:
            return self.at
        numbers = self.numbers()
        last = max(numbers.values())
        if not name.isdecimal() or len(name) > 9:
            try:
                return self.loom.find(name)
            except TreeError:
                raise ConfigError(
                    f"NODE is {name!r}; allowed is a number, 0 (the prompt) to {last}, or an id",
                    hint="weft tree shows the nodes",
                ) from None
        for node in self.loom.walk():
            if numbers[node.id] == int(name):
                return node
        if int(name) <= last:
            raise ConfigError(
                f"node {name} is not in the loom any more", hint="weft tree shows the nodes"
            )
        raise ConfigError(
            f"there is no node {name}; allowed is 0 (the prompt) to {last}",
            hint="weft tree shows the nodes",
        )

    def highest(self) -> int:
        """Return the highest number given to a node so far."""
        return max(self.numbers().values())

    # Growing

    @abstractmethod
    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Start to generate n branches at a node.

        Args:
            node: the node.
            n: number of branches.
            sampling: the sampling parameters that were given, by their Python names.
            force: also grow a node that has ended.

        Raises: like `Heddle.stream`.
        """

    @abstractmethod
    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add a text of the user below a node, and return the new node.

        Call `save` afterwards: a local session has not saved the node. A server saves it at once.

        chat: True adds it as a chat turn, False as plain text, None like the loom's prompt.
        special: parse special tokens in plain text. A chat turn cannot use it.
        """

    @abstractmethod
    def set_note(self, note: AuthorNote | None) -> None:
        """Set the author's note of the loom and save it; None removes the note."""

    @abstractmethod
    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the `top` likeliest next tokens at a node, with their probabilities."""

    @abstractmethod
    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each token of a node.

        A character that consists of several tokens belongs to the last of them.
        """

    @abstractmethod
    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Write a part of the loom to a file; see `interchange.write`.

        Args:
            node: end of the path, or top of the subtree.
            path: the file to write.
            format: name of the format.
            scope: the part: "path", "subtree" or "tree".
            kv: also write the KV cache.
            options: options of the format.
        """

    # Saving

    @abstractmethod
    def save(self) -> None:
        """Save changes, and merge what other processes have written."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the loom, without a way to restore it; ignore errors.

        Used for looms that are empty, and for looms that the user does not want to save.
        """

    @abstractmethod
    def remember(self) -> None:
        """Store this loom and its current node as the last ones of this terminal."""

    @abstractmethod
    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Remove nodes, with all nodes below them. `undo` brings them back."""

    @abstractmethod
    def undo(self) -> UndoResult:
        """Undo the last operation that is not undone yet."""

    @abstractmethod
    def redo(self) -> UndoResult:
        """Redo the operation that was undone last."""

    def try_save(self) -> bool:
        """Save changes; print a StoreError instead of raising it. Return True if saved."""
        try:
            self.save()
        except StoreError as error:
            warn_not_saved(error)
            if self.name:
                note = f"earlier nodes are saved as {self.name}"
                TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
            return False
        return True

    def try_remember(self) -> None:
        """Call `remember`; print a StoreError instead of raising it."""
        try:
            self.remember()
        except StoreError as error:
            warn_not_saved(error)


def warn_not_saved(error: StoreError) -> None:
    """Write to stderr that a result could not be saved, with the reason and the hint."""
    out = TerminalWriter.for_stream(sys.stderr)
    out.line(("not saved: ", "bold yellow"), str(error))
    if error.hint:
        out.line(("hint: ", "bold"), error.hint)


def likeliest(nodes: list[Heddle]) -> Heddle | None:
    """Return the branch with the highest mean logprob; None if there is none."""
    from ..loom.node import in_call_order

    return max(in_call_order(nodes), key=lambda node: node.mean_logprob, default=None)


def check_not_special(special: bool) -> None:
    """Raise ConfigError if `special` is set. Called before a text is added as a chat turn."""
    if special:
        raise ConfigError(
            "--special cannot be used in a chat: special tokens in messages are plain text",
            hint="--raw --special adds the text as it is",
        )
