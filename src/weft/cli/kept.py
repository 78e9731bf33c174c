"""An open loom of the shelf: its name, its numbers, where the reader stands, what he says."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..errors import ConfigError, ModelLoadError, ModelMismatch, StoreError, TreeError
from ..interchange.turns import SAID
from ..viz.out import Out
from .model import TINY, load_model
from .shelf import Seen, Shelf

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
        self._filed = ids_of(loom) if name else frozenset()

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

        stamp, seen = _stamp(shelf.path(name)), shelf.seen(name)
        kept = cls(shelf, Loom.open(shelf.path(name), lm, heddle_class=Spoken), name)
        kept._stamp = stamp
        if seen.numbers[:1] == [kept.loom.id]:
            kept.numbering = Numbering(seen.numbers)
            try:
                kept.at = kept.loom.find(seen.at)
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
        """Write the loom and the index. What another command wrote meanwhile is taken in first.

        Where both cannot be had, as when the node grown here was removed there, this one is kept
        apart, under another name.
        """
        with self.shelf.locked():
            target = self.name
            stamp = _stamp(self.shelf.path(target)) if target else None
            if stamp not in (self._stamp, None) and not self._take_in():
                note = f"{target} was changed by another command meanwhile; this is kept apart"
                Out.of(sys.stderr).line((note, "yellow"))
                target = ""
            if not target:
                target = self.shelf.fresh_name(self.name or self.loom.user_prompt)
            self._write(target)
            self.name, self._stamp = target, _stamp(self.shelf.path(target))
            self._filed = ids_of(self.loom)
            self.note()
        _log.info("kept %s", self.shelf.path(target))

    def _write(self, name: str) -> None:
        try:
            self.loom.save(self.shelf.path(name))
        except StoreError as error:
            error.hint = "set WEFT_HOME to a folder that you can write, or make room there"
            raise

    def _take_in(self) -> bool:
        """Put what another command has written meanwhile into this loom, if both can be had.

        Nodes are known by their ids: what is new there comes here, what was removed there goes. It
        cannot be where one side has grown what the other has removed.
        """
        from ..loom import Loom
        from .spoken import Spoken

        try:
            path = self.shelf.path(self.name)
            other = Loom.open(path, self.loom.lm, heddle_class=Spoken)
        except StoreError as error:
            _log.warning("what another command has written cannot be read: %s", error)
            return False
        if other.id != self.loom.id:
            return False
        here = {node.id: node for node in self.loom.walk()}
        there = {node.id: node for node in other.walk()}
        gone = [here[each] for each in self._filed - there.keys() if each in here]
        new = there.keys() - here.keys() - self._filed
        moved = [
            (node, node.parent.id)
            for node in there.values()
            if node.id in new and node.parent is not None and node.parent.id not in new
        ]
        lost = {node.id for each in gone for node in each.walk()} - self._filed
        if lost or any(parent not in here for _, parent in moved):
            return False
        for node, parent in moved:
            here[parent].add_child(node)
        for node in gone:
            if node.parent is not None:
                self.at = node.parent if node in self.at.path else self.at
                node.remove()
        return True

    def note(self) -> None:
        """Write the index: this is the loom drawn last."""
        self.numbers()
        self.numbering.ids = self.shelf.note(self.name, Seen(self.at.id, self.numbering.ids))

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


def chosen(shelf: Shelf, name: str | None) -> str:
    """Return the loom that a verb is about: the one named, else the one drawn last here.

    A terminal in which none was drawn gets the one drawn last in another, and is told so.
    """
    if name is not None:
        return shelf.known(name)
    if (own := shelf.own()) is not None:
        return own
    last = shelf.anybodys()
    note = f"this terminal has no loom of its own: taking {last}, drawn last elsewhere"
    Out.of(sys.stderr).line((f"{note}; --loom takes another", "dim"))
    return last


def opened(name: str | None = None) -> Kept:
    """Open a loom to read it: the one with this name, or the one drawn last."""
    shelf = Shelf()
    return Kept.open(shelf, chosen(shelf, name))


@contextmanager
def with_model(
    name: str | None, model: str | None, engine: str, kv_budget: str
) -> Iterator[tuple[LM, Kept]]:
    """Open a loom, as `opened`, with the model that it was made with, or the one that is given.

    The engine is the one that the loom remembers, unless it does not take the model.
    """
    from ..loading import fits

    shelf = Shelf()
    summary = shelf.summary(chosen(shelf, name))
    name = summary.name
    if engine == "auto" and summary.engine and fits(summary.engine, model or summary.model):
        engine = summary.engine
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
    from ..loading import is_url

    is_folder = model != TINY and Path(model).is_dir()
    loom.meta["model"] = str(Path(model).resolve()) if is_folder else model
    if loom.lm is not None and is_url(model):
        loom.meta["model"] = loom.lm.info.extra["address"]
    if engine != "auto":
        loom.meta["engine"] = engine
    else:
        loom.meta.pop("engine", None)  # of a model that was elsewhere, and in another form


def ids_of(loom: Loom) -> frozenset[str]:
    """Return the ids of all nodes of a loom."""
    return frozenset(node.id for node in loom.walk())


def best_of(nodes: list[Heddle]) -> Heddle | None:
    """Return the likeliest of some branches: where the reader goes on."""
    from ..loom.node import by_call

    return max(by_call(nodes), key=lambda node: node.mean_logprob, default=None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Numbering:
    """Ids by number; 0 is the root. A number whose node is gone is not given again."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self.ids = list(ids)

    @property
    def next(self) -> int:
        """The number that the next new node gets."""
        return len(self.ids)

    def by_id(self) -> dict[str, int]:
        """Return number by id."""
        return {node_id: number for number, node_id in enumerate(self.ids)}

    def extend(self, root: Heddle) -> dict[str, int]:
        """Number what has no number yet, as it is drawn; return number by id."""
        from ..loom.node import numbered

        known = self.by_id()
        for node in numbered(root):
            if node.id not in known:
                known[node.id] = len(self.ids)
                self.ids.append(node.id)
        return known

    def node(self, root: Heddle, given: str) -> Heddle:
        """Return the node with this number or id. Raises ConfigError for none such."""
        if not given.isdecimal() or len(given) > 9:
            try:
                return root.find(given)
            except TreeError:
                pass
            raise ConfigError(
                f"NODE is {given!r}; allowed is {self._allowed()}", hint="weft tree shows them"
            )
        if not self.ids:
            raise ConfigError(
                "no tree of this loom has been drawn yet, so its nodes have no numbers",
                hint="weft tree draws it",
            )
        number = int(given)
        if number >= len(self.ids):
            raise ConfigError(
                f"there is no node {number}; allowed is {self._allowed()}",
                hint="weft tree draws it again",
            )
        try:
            return root.find(self.ids[number])
        except TreeError:
            raise ConfigError(
                f"node {number} is not in the loom any more", hint="weft tree draws what is there"
            ) from None

    def _allowed(self) -> str:
        return f"a number of the last tree drawn: 0 (the prompt) to {max(len(self.ids) - 1, 0)}"


def say(
    lm: LM, node: Heddle, text: str, *, chat: bool | None = None, special: bool = False
) -> Heddle:
    """Add what the user says at a node.

    chat: as a turn, in which special tokens are letters; None: as the loom's prompt was given.
    special: read those of a text that is no turn.
    """
    loom = node.path[0]
    if not text:
        raise ConfigError("there is nothing to say: the text is empty")
    if not (getattr(loom, "chat_template_used", False) if chat is None else chat):
        return node.add(text, special=special)
    refuse_special(special)
    if lm.text.chat_template is None:
        raise ConfigError(
            "this model has no chat template: it continues text and does not answer",
            hint=template_hint(lm, "--raw adds the text as it is"),
        )
    said = node.add(lm.turn_delta([{"role": "user", "content": text}]))
    said.meta[SAID] = text
    return said


def template_hint(lm: LM, otherwise: str) -> str:
    """Return what to do without a chat template; a server's model may have one over there."""
    if lm.info.name != "remote":
        return otherwise
    address = lm.info.extra["address"].partition("#")[0]
    return f"-m '{address}?api=chat' or -m '{address}?tokenizer=./folder' may have one; {otherwise}"


def refuse_special(special: bool) -> None:
    """Refuse --special for what is said in a chat."""
    if special:
        raise ConfigError(
            "what is said in a chat is text, special tokens in it too",
            hint="--raw --special gives the text as it is",
        )
