"""An open loom of the shelf: its name, its numbers, where the reader stands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..errors import ModelLoadError, ModelMismatch, StoreError, TreeError
from .model import TINY, load_model
from .numbering import Numbering
from .out import Out
from .shelf import Index, Shelf

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle, Loom

_log = logging.getLogger(__name__)


class Kept:
    """A loom, and what the shelf knows of it. name: "" as long as it is not saved.

    numbering: as its nodes were drawn. at: the node last read or grown.
    """

    def __init__(
        self, shelf: Shelf, loom: Loom, name: str = "", numbering: Numbering | None = None
    ) -> None:
        self.shelf = shelf
        self.loom = loom
        self.name = name
        self.numbering = numbering or Numbering()
        self.at: Heddle = loom
        self._stamp = _stamp(shelf.path(name)) if name else None

    @classmethod
    def new(cls, loom: Loom, model: str, engine: str) -> Self:
        """Take a loom that is not saved yet; note what to load to grow it again."""
        note_model(loom, model, engine)
        return cls(Shelf(), loom)

    @classmethod
    def open(cls, shelf: Shelf, name: str, lm: LM | None = None) -> Self:
        """Open a loom of the shelf; without an LM it can be read only. Raises: as `Loom.open`."""
        from ..loom import Loom
        from .spoken import Spoken

        stamp, index = _stamp(shelf.path(name)), shelf.index()
        kept = cls(shelf, Loom.open(shelf.path(name), lm, heddle_class=Spoken), name)
        kept._stamp = stamp
        if index.loom == name:
            kept.numbering = Numbering(index.numbers)
            try:
                kept.at = kept.loom.find(index.at)
            except TreeError:
                _log.info("the node that was read last is not in %s any more", name)
        return kept

    def node(self, given: str | None) -> Heddle:
        """Return the node with this number or id; None: where the reader stands."""
        return self.at if given is None else self.numbering.node(self.loom, given)

    def numbers(self) -> dict[str, int]:
        """Return number by id, new nodes numbered."""
        return self.numbering.extend(self.loom)

    def number(self, node: Heddle) -> int:
        """Return a node's number."""
        return self.numbers()[node.id]

    def save(self) -> None:
        """Write the loom and the index. What another command wrote meanwhile is left alone."""
        target = self.name
        if self._stamp is not None and _stamp(self.shelf.path(target)) not in (self._stamp, None):
            Out.of(sys.stderr).line(
                (f"{target} was changed by another command meanwhile; this is kept apart", "yellow")
            )
            target = ""
        if not target:
            target = self.shelf.fresh_name(self.name or self.loom.user_prompt)
        self._write(target)
        self.name, self._stamp = target, _stamp(self.shelf.path(target))
        self.note()
        _log.info("kept %s", self.shelf.path(target))

    def _write(self, name: str) -> None:
        path = self.shelf.path(name)
        try:
            self.loom.save(path)
        except StoreError as error:
            error.hint = "set WEFT_HOME to a folder that you can write, or make room there"
            raise
        finally:
            if _stamp(path) is not None and path.stat().st_size == 0:
                path.unlink()  # the place held by `fresh_name`

    def note(self) -> None:
        """Write the index: this is the loom drawn last."""
        self.numbers()
        self.shelf.note(Index(self.name, self.at.id, list(self.numbering.ids)))

    def try_save(self) -> bool:
        """As `save`, where the result is worth showing even if it cannot be kept."""
        try:
            self.save()
        except StoreError as error:
            tell_unkept(error)
            return False
        return True

    def try_note(self) -> None:
        """As `note`, for verbs that only read."""
        try:
            self.note()
        except StoreError as error:
            tell_unkept(error)


def tell_unkept(error: StoreError) -> None:
    """Say that something was shown and not kept."""
    out = Out.of(sys.stderr)
    out.line(("not kept: ", "bold yellow"), str(error))
    if error.hint:
        out.line(("hint: ", "bold"), error.hint)


def opened(name: str | None = None) -> Kept:
    """Open a loom to read it: the one with this name, or the one drawn last."""
    shelf = Shelf()
    return Kept.open(shelf, shelf.last() if name is None else shelf.known(name))


@contextmanager
def with_model(model: str | None, engine: str, kv_budget: str) -> Iterator[tuple[LM, Kept]]:
    """Open the loom drawn last with the model that it was made with, or the one that is given."""
    shelf = Shelf()
    summary = shelf.summary(shelf.last())
    name = summary.name
    if engine == "auto":
        engine = summary.engine or engine
    try:
        lm = load_model(model or summary.model, engine, kv_budget)
    except ModelLoadError as error:
        if model is not None:
            raise
        raise ModelLoadError(
            f"the loom {name} was made with {summary.model}: {error}",
            hint="-m says where that model is now",
        ) from error
    with lm:
        try:
            kept = Kept.open(shelf, name, lm)
        except ModelMismatch as error:
            raise ModelMismatch(
                f"the loom {name} was made with another model than {model or summary.model}: "
                "its tokens would mean something else",
                hint=f"-m {summary.model}" if model else "fetch that version of the model again",
            ) from error
        if model is not None:
            note_model(kept.loom, model, engine)
        yield lm, kept


def note_model(loom: Loom, model: str, engine: str) -> None:
    """Note in a loom what to load to grow it again: a folder by its whole path."""
    is_folder = model != TINY and Path(model).is_dir()
    loom.meta["model"] = str(Path(model).resolve()) if is_folder else model
    if engine != "auto":
        loom.meta["engine"] = engine


def best_of(nodes: list[Heddle]) -> Heddle | None:
    """Return the likeliest of some branches: where the reader goes on."""
    from ..loom.walk import by_call

    return max(by_call(nodes), key=lambda node: node.mean_logprob, default=None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
