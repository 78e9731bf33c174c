"""An open loom, as verbs see it: its name, its numbers, where the reader stands, how it grows."""

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
    from .backend import ModelHandle


@dataclass(slots=True)
class GenerationStream:
    """Branches on their way. first: the number of the first one, the others follow it.

    deltas: what comes; closing it keeps what came. made: the branches that there are, when it is
    over. waiting: what to say until something comes.
    """

    first: int
    deltas: Generator[Delta, None, object]
    made: Callable[[], list[Heddle]]
    waiting: Callable[[], str]


@dataclass(slots=True)
class UndoResult:
    """An operation that was undone, or done again. kind: of it. removed: numbers."""

    kind: str
    added: list[Heddle]
    changed: list[Heddle]
    removed: list[int]


class LoomSession(ABC):
    """An open loom. name: "" as long as it is not kept. at: the node last read or grown.

    Without a grower it can be read only.
    """

    def __init__(self, loom: Loom, name: str, model_handle: ModelHandle | None = None) -> None:
        self.loom = loom
        self.name = name
        self.at: Heddle = loom
        self.optional_handle = model_handle

    @property
    def model_handle(self) -> ModelHandle:
        """The model that grows it."""
        assert self.optional_handle is not None
        return self.optional_handle

    @property
    @abstractmethod
    def model(self) -> str:
        """What to load to grow it."""

    # Numbers

    @abstractmethod
    def numbers(self) -> Mapping[str, int]:
        """Return number by id; 0 is the prompt. A number is never given again."""

    def number(self, node: Heddle) -> int:
        """Return a node's number."""
        return self.numbers()[node.id]

    def node(self, given: str | None) -> Heddle:
        """Return the node with this number or id; None: where the reader stands."""
        if given is None:
            return self.at
        numbers = self.numbers()
        last = max(numbers.values())
        if not given.isdecimal() or len(given) > 9:
            try:
                return self.loom.find(given)
            except TreeError:
                raise ConfigError(
                    f"NODE is {given!r}; allowed is a number, 0 (the prompt) to {last}, or an id",
                    hint="weft tree shows them",
                ) from None
        for node in self.loom.walk():
            if numbers[node.id] == int(given):
                return node
        if int(given) <= last:
            raise ConfigError(
                f"node {given} is not in the loom any more", hint="weft tree draws what is there"
            )
        raise ConfigError(
            f"there is no node {given}; allowed is 0 (the prompt) to {last}",
            hint="weft tree draws it again",
        )

    def highest(self) -> int:
        """Return the highest number of a node that was here."""
        return max(self.numbers().values())

    # GenerationStream

    @abstractmethod
    def grow(
        self, node: Heddle, n: int, sampling: dict[str, Any], *, force: bool
    ) -> GenerationStream:
        """Begin to grow n branches at a node. Raises: as `Heddle.stream`."""

    @abstractmethod
    def add_user_text(
        self, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
    ) -> Heddle:
        """Add what the user says at a node, and return it.

        chat: as a turn, in which special tokens are letters; None: as the loom's prompt was given.
        special: read those of a text that is no turn.
        """

    @abstractmethod
    def next(self, node: Heddle, top: int = 10) -> Distribution:
        """Return the likeliest next tokens at a node."""

    @abstractmethod
    def pieces(self, node: Heddle) -> list[str]:
        """Return the text of each of a node's tokens.

        A character that several tokens make stands with the last of them.
        """

    @abstractmethod
    def export(
        self, node: Heddle, path: Path, format: str, scope: str, *, kv: bool, **options: Any
    ) -> None:
        """Write a part of the loom to a file; see `interchange.write`."""

    # Keeping

    @abstractmethod
    def save(self) -> None:
        """Keep what has changed; what others wrote meanwhile is taken in."""

    @abstractmethod
    def discard(self) -> None:
        """Forget a loom of which nothing came, or that was not to be kept."""

    @abstractmethod
    def note(self) -> None:
        """Remember that this is the loom drawn last in this terminal, and where one stands."""

    @abstractmethod
    def remove(self, nodes: Sequence[Heddle]) -> None:
        """Take nodes away, with all below them."""

    @abstractmethod
    def undo(self) -> UndoResult:
        """Undo the last change of this loom that is not undone."""

    @abstractmethod
    def redo(self) -> UndoResult:
        """Do again what was undone last."""

    def try_save(self) -> bool:
        """As `save`, where the result is worth showing even if it cannot be kept."""
        try:
            self.save()
        except StoreError as error:
            warn_not_saved(error)
            if self.name:
                note = f"what was written before that is kept as {self.name}"
                TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
            return False
        return True

    def try_note(self) -> None:
        """As `note`, for verbs that only read."""
        try:
            self.note()
        except StoreError as error:
            warn_not_saved(error)


def warn_not_saved(error: StoreError) -> None:
    """Say that something was shown and not kept."""
    out = TerminalWriter.for_stream(sys.stderr)
    out.line(("not kept: ", "bold yellow"), str(error))
    if error.hint:
        out.line(("hint: ", "bold"), error.hint)


def likeliest(nodes: list[Heddle]) -> Heddle | None:
    """Return the likeliest of some branches: where the reader goes on."""
    from ..loom.node import in_call_order

    return max(in_call_order(nodes), key=lambda node: node.mean_logprob, default=None)


def check_not_special(special: bool) -> None:
    """Refuse --special for what is said in a chat."""
    if special:
        raise ConfigError(
            "what is said in a chat is text, special tokens in it too",
            hint="--raw --special gives the text as it is",
        )
