"""The formats that are imported, which of them a file is, and the call that reads it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core import atomic_files
from ...errors import ConfigError, FormatError, WeftError
from ...loom import Heddle, Loom
from ..store import file as native
from ..store import sidecar
from . import chats, flat, nested
from .import_tree import ImportedLoom, ImportLimits, Sketch, build_loom, check_limits

if TYPE_CHECKING:
    from ...lm.lm import LM

# Third parties add importers here: name = "module:function".
ENTRY_POINT_GROUP = "weft.importers"
NATIVE = "weft"
_LIMITS = ImportLimits()


class Importer(NamedTuple):
    """A format. matches: whether a file's JSON is of it. sketches: the trees in it."""

    name: str
    about: str
    matches: Callable[[object], bool]
    sketches: Callable[[Any], list[Sketch]]


# By name; a file is the first of these that it looks like.
IMPORTERS: Mapping[str, Importer] = {
    each.name: each
    for each in (
        Importer("loomsidian", "the plugin's data.json", flat.is_loomsidian, flat.loomsidian),
        Importer(
            "conversations",
            "chats that branch, with a mapping",
            chats.is_conversation,
            chats.conversations,
        ),
        Importer("chat", "chat messages, JSON or JSON lines", chats.is_chat, chats.chats),
        Importer("basemode", "basemode-loom's export", flat.is_basemode, flat.basemode),
        Importer(
            "python-loom", "the Python loom's file", nested.is_python_loom, nested.python_loom
        ),
        Importer("n8loom", "N8Loom's export", nested.is_n8loom, nested.n8loom),
        Importer("nested", "nested text and children", nested.is_nested, nested.nested),
    )
}


class ImportReport(NamedTuple):
    """What was read. n_nodes: of all looms. dropped: what was left out or put otherwise, in words.

    looms: each with the title that the file gives it ("" for none), and the node where its reader
    stood.
    """

    looms: tuple[ImportedLoom, ...]
    recognised_as: str
    n_nodes: int
    dropped: tuple[str, ...]


def formats() -> list[str]:
    """Return the names of all formats that can be imported, those of other packages too."""
    return [NATIVE, *IMPORTERS, *_other_importers()]


def recognise(data: object) -> str:
    """Return which format a file's JSON is of. Raises: FormatError for none that is known."""
    if isinstance(data, dict) and data.get("format") == native.FORMAT:
        return NATIVE
    for each in IMPORTERS.values():
        if each.matches(data):
            return each.name
    for name in _other_importers():
        if _call_importer(name, data) is not None:
            return name
    raise FormatError(
        f"no format that is known here looks like this; known are {', '.join(formats())}",
        hint="a package can add one, by an entry point of weft.importers",
    )


def read(
    source: str | os.PathLike[str] | bytes | object,
    lm: LM | None = None,
    *,
    format: str = "auto",
    limits: ImportLimits = _LIMITS,
    force: bool = False,
    loom_class: type[Loom] = Loom,
    heddle_class: type[Heddle] | None = None,
) -> ImportReport:
    """Read the looms that a file of Weft's or of another program holds.

    Texts without token ids become tokens of the LM, the prompt as it is, never through a chat
    template; without an LM they are a loom of texts. What a file says and Weft has no word for is
    in `meta["imported"]`.

    Args:
        source: a path, a file's bytes, or the JSON that was in it.
        format: a name of `formats()`; "auto" recognises it.
        force: as for `Loom.open`: take token ids of another model.

    Raises: FormatError for what is no such file, is broken, or beyond the limits; StoreError when
    it cannot be read; ModelMismatch for a loom of another model; ConfigError for an unknown format.
    """
    if format != "auto" and format not in formats():
        raise ConfigError(f"format is {format!r}; allowed are auto, {', '.join(formats())}")
    is_path = isinstance(source, str | os.PathLike)
    with atomic_files.with_filename(source) if is_path else nullcontext():  # type: ignore[arg-type]
        data = _parsed(source, limits)
        name = recognise(data) if format == "auto" else format
        classes = (loom_class, heddle_class or loom_class.heddle_class)
        if name == NATIVE:
            found = _read_native(data, lm, limits, force, *classes)
            if is_path and lm is not None:
                notice = sidecar.try_load(found.looms[0].loom, source)  # type: ignore[arg-type]
                found = found._replace(dropped=(*found.dropped, *([notice] if notice else [])))
            return found
        data, n_halves = _without_surrogates(data)
        sketches = _parse_trees(name, data)
        if n_halves:
            sketches[0].notes["halves of characters are U+FFFD now"] += n_halves
        check_limits(sketches, limits)
        for sketch in sketches:
            sketch.lift()
        looms = tuple(build_loom(sketch, lm, name, *classes) for sketch in sketches)
        n_nodes = sum(len(sketch.knots) for sketch in sketches)
        return ImportReport(looms, name, n_nodes, tuple(_note_lines(sketches)))


def _parsed(source: object, limits: ImportLimits) -> object:
    if isinstance(source, str | os.PathLike):
        source = atomic_files.read(source, most=limits.n_bytes)
    if not isinstance(source, bytes | bytearray | memoryview):
        _check_serializable(source)
        return source
    atomic_files.check_size(len(source), limits.n_bytes)
    data = _json(bytes(source))
    _check_serializable(data)
    return data


def _json(data: bytes) -> object:
    """Return a file's JSON; of JSON lines a list."""
    try:
        return atomic_files.parse_json(data)
    except ValueError as problem:
        if not _is_lines(data):
            raise FormatError(
                f"it is no JSON: {problem}",
                hint="weft export loom.json writes what weft import reads again",
            ) from problem
        return [
            _line(line, number) for number, line in enumerate(data.splitlines(), 1) if line.strip()
        ]


def _is_lines(data: bytes) -> bool:
    """Whether what is no JSON as a whole is one a line: the first of them is an object or a list.

    Of one JSON over many lines, which breaks off, that is not so: its own break is told.
    """
    lines = [line for line in data.splitlines() if line.strip()]
    try:
        return len(lines) > 1 and isinstance(atomic_files.parse_json(lines[0]), dict | list)
    except ValueError:
        return False


def _line(line: bytes, number: int) -> object:
    try:
        return atomic_files.parse_json(line)
    except json.JSONDecodeError as problem:
        where = f"{problem.msg}, column {problem.colno}"
        raise FormatError(f"line {number} is no JSON: {where}") from problem
    except ValueError as problem:
        raise FormatError(f"line {number} is no JSON: {problem}") from problem


def _check_serializable(data: object) -> None:
    """Refuse what could be read, but not written again: numbers beyond floats, too deep a nest."""
    try:
        json.dumps(data, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise FormatError(f"it cannot be kept: {error}") from error
    except RecursionError:
        raise FormatError("it is nested too deeply") from None


def _without_surrogates(data: object) -> tuple[object, int]:
    """Return JSON without halves of characters, which no tokenizer takes, and how many there were.

    Programs that cut texts by UTF-16 leave such halves.
    """
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return json.loads(mended), sum("\ud800" <= each <= "\udfff" for each in text)
    return data, 0


def _read_native(
    data: object,
    lm: LM | None,
    limits: ImportLimits,
    force: bool,
    loom_class: type[Loom],
    heddle_class: type[Heddle],
) -> ImportReport:
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if isinstance(nodes, list) and len(nodes) > limits.n_nodes:
        raise FormatError(f"it has {len(nodes)} nodes; an import takes {limits.n_nodes} at most")
    loom = native.load_json(data, lm, force=force, loom_class=loom_class, heddle_class=heddle_class)
    return ImportReport((ImportedLoom("", loom, loom),), NATIVE, len(nodes or ()), loom.dropped)


def _parse_trees(name: str, data: object) -> list[Sketch]:
    """Return the trees in a file. What an importer cannot read is a FormatError, whatever it is."""
    try:
        found = IMPORTERS[name].sketches(data) if name in IMPORTERS else _call_importer(name, data)
    except WeftError:
        raise
    except atomic_files.PARSE_ERRORS as error:
        raise FormatError(f"this is no file of {name}, or it is broken: {error!r:.200}") from error
    if not found or not all(sketch.knots for sketch in found):
        raise FormatError(f"there are no trees of {name} in it")
    return found


def _note_lines(sketches: Sequence[Sketch]) -> Iterator[str]:
    notes: Counter[str] = Counter()
    for sketch in sketches:
        notes += sketch.notes
    for what, n in notes.items():
        yield f"{n} {what}"


def _other_importers() -> list[str]:
    return [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]


def _call_importer(name: str, data: object) -> list[Sketch] | None:
    """Return what another package's importer makes of it: None for what is none of its files."""
    (point,) = entry_points(group=ENTRY_POINT_GROUP, name=name)
    found: list[Sketch] | None = point.load()(data)
    return found
