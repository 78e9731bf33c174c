"""Import formats, their recognition, and the call `read`.

An importer returns each tree of a file as a `Sketch`: a tree of texts, from which `import_tree`
builds a loom.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core import atomic_files
from ..._core.installation import entry_points
from ...errors import ConfigError, FormatError, WeftError
from ...loom import Heddle, Loom
from ..store import file as native
from ..store import sidecar
from . import chat_programs, chats, flat, nested, writing_programs
from .chat_turns import apply_template
from .import_tree import ImportedLoom, ImportLimits, Note, Sketch, build_loom, check_limits
from .writing_programs import PlainText, is_text_name

if TYPE_CHECKING:
    from ...lm.lm import LM

# Other packages add importers here: name = "module:function".
ENTRY_POINT_GROUP = "weft.importers"
NATIVE = "weft"
_LIMITS = ImportLimits()
_SURROGATES = Note(
    "lone surrogate was replaced by U+FFFD", "lone surrogates were replaced by U+FFFD"
)
Parser = Callable[[bytes], object]  # returns the content of a file as `Importer.matches` takes it
_CONTROL = re.compile(rb"[\x00-\x08]")  # bytes that no UTF-8 text has


class NotTextError(FormatError):
    """The file is not text in UTF-8; no format can read it."""


class Importer(NamedTuple):
    """An import format: how to recognize and read files of a program."""

    name: str
    about: str  # a description of a few words
    matches: Callable[[object], bool]  # returns True if a file's JSON has this format
    sketches: Callable[[Any], list[Sketch]]  # returns the trees in a file's JSON


def _is_plain_text(data: object) -> bool:
    return isinstance(data, PlainText)


# By name; a file has the first format that matches it.
IMPORTERS: Mapping[str, Importer] = {
    each.name: each
    for each in (
        Importer("loomsidian", "Loomsidian notes", flat.is_loomsidian, flat.loomsidian),
        Importer("conversations", "ChatGPT exports", chats.is_conversation, chats.conversations),
        Importer(
            "open-webui",
            "Open WebUI exports",
            chat_programs.is_open_webui,
            chat_programs.open_webui,
        ),
        Importer(
            "sillytavern",
            "SillyTavern chats",
            chat_programs.is_sillytavern,
            chat_programs.sillytavern,
        ),
        Importer(
            "textgen",
            "text-generation-webui histories",
            chat_programs.is_textgen,
            chat_programs.textgen,
        ),
        Importer(
            "mikupad", "mikupad sessions", writing_programs.is_mikupad, writing_programs.mikupad
        ),
        Importer("chat", "chat messages as JSON or JSON lines", chats.is_chat, chats.chats),
        Importer("basemode", "basemode-loom exports", flat.is_basemode, flat.basemode),
        Importer("python-loom", "Python loom files", nested.is_python_loom, nested.python_loom),
        Importer("n8loom", "N8Loom exports", nested.is_n8loom, nested.n8loom),
        Importer("nested", "other trees of texts in JSON", nested.is_nested, nested.nested),
        Importer("text", "plain text (.txt, .md)", _is_plain_text, writing_programs.plain_text),
    )
}


class ImportReport(NamedTuple):
    """The result of an import.

    Attributes:
        looms: the imported looms; each has `title`, `loom`, and `at`, the node that was selected in
            the program.
        recognised_as: name of the file's format.
        n_nodes: number of nodes of all looms, including their roots.
        dropped: descriptions of data that was left out or changed, one sentence each.
    """

    looms: tuple[ImportedLoom, ...]
    recognised_as: str
    n_nodes: int
    dropped: tuple[str, ...]


def formats() -> list[str]:
    """Return the names of all import formats, including those of other packages."""
    return [NATIVE, *IMPORTERS, *_other_importers()]


def recognise(data: object) -> str:
    """Return the name of the format of a file's parsed JSON.

    Raises: FormatError if it matches no format.
    """
    if isinstance(data, dict) and data.get("format") == native.FORMAT:
        return NATIVE
    for importer in IMPORTERS.values():
        if importer.matches(data):
            return importer.name
    for name in _other_importers():
        if _call_importer(name, data) is not None:
            return name
    raise FormatError(
        f"unknown file format. Supported: {supported_files()}",
        hint='any text can be imported as plain text: give the format "text"',
    )


def supported_files() -> str:
    """Return the names of all files that can be imported, as their users call them."""
    names = [importer.about for importer in IMPORTERS.values()]
    return ", ".join(["Weft looms (.loom.json)", *names, *_other_importers()])


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
    """Read the looms in a file of Weft or of another program.

    With an LM, texts without token ids are tokenized. A chat becomes a chat in the model's
    template, so that it can be continued; other texts never use a template. Without an LM, they
    become a loom of texts. Values without an equivalent in Weft are kept in `meta["imported"]`.

    Args:
        source: a path, a file's bytes, or its parsed JSON.
        lm: the model of the looms; None: looms without a model.
        format: a name of `formats()`; "auto" recognizes it.
        limits: maximum size of the import.
        force: as for `Loom.open`: accept token ids of another model.
        loom_class, heddle_class: classes of the roots, and of the nodes below.

    Returns: an ImportReport.

    Raises:
        FormatError: the file has no such format, is broken, or exceeds the limits.
        StoreError: the file cannot be read.
        ModelMismatch: another model saved the loom.
        ConfigError: an unknown format.
    """
    if format != "auto" and format not in formats():
        raise ConfigError(f"format is {format!r}; allowed are auto, {', '.join(formats())}")
    is_path = isinstance(source, str | os.PathLike)
    with atomic_files.with_filename(source) if is_path else nullcontext():  # type: ignore[arg-type]
        data = _parsed(source, limits, format)
        name = recognise(data) if format == "auto" else format
        classes = (loom_class, heddle_class or loom_class.heddle_class)
        if name == NATIVE:
            report = _read_native(data, lm, limits, force, *classes)
            if is_path and lm is not None:
                notice = sidecar.try_load(report.looms[0].loom, source)  # type: ignore[arg-type]
                report = report._replace(dropped=(*report.dropped, *([notice] if notice else [])))
            return report
        data, n_surrogates = _without_surrogates(data)
        sketches = _parse_trees(name, data)
        if n_surrogates:
            sketches[0].notes[_SURROGATES] += n_surrogates
        check_limits(sketches, limits)
        for sketch in sketches:
            sketch.lift()
            if lm is not None:
                apply_template(sketch, lm)
        looms = tuple(build_loom(sketch, lm, name, *classes) for sketch in sketches)
        n_nodes = sum(len(sketch.knots) for sketch in sketches)
        return ImportReport(looms, name, n_nodes, tuple(_describe_notes(sketches)))


def _parsed(source: object, limits: ImportLimits, format: str) -> object:
    parsers: dict[str, Parser] = {"auto": _json_or_text, "text": _decode}
    parse = parsers.get(format, _json)
    if isinstance(source, str | os.PathLike):
        if format == "auto":
            parse = _parser_of_name(os.fspath(source))
        source = atomic_files.read(source, max_bytes=limits.n_bytes)
    if isinstance(source, bytes | bytearray | memoryview):
        atomic_files.check_size(len(source), limits.n_bytes)
        source = parse(bytes(source))
    _check_serializable(source)
    return source


def _parser_of_name(name: str) -> Parser:
    if is_text_name(name):
        return _decode
    return _json if name.lower().endswith((".json", ".jsonl")) else _json_or_text


def _decode(data: bytes) -> PlainText:
    """Decode a text file: UTF-8, or UTF-16 with a byte order mark.

    Raises: NotTextError for other encodings, and for files that are not text.
    """
    is_utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    if not is_utf16 and _CONTROL.search(data):
        raise NotTextError(f"it is not a text file. Supported: {supported_files()}")
    try:
        return PlainText(data.decode(encoding))
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"it is not text in UTF-8: {error.reason} at byte {error.start}",
            hint="save the file with the encoding UTF-8",
        ) from error


def _json_or_text(data: bytes) -> object:
    """Parse a file's bytes as JSON or JSON lines; return other text as `PlainText`."""
    try:
        return _json(data)
    except FormatError:
        start = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        # These begin broken JSON, HTML and XML.
        if not start or start in b"{[<":
            raise
        return _decode(data)


def _json(data: bytes) -> object:
    """Parse a file's bytes as JSON, or as JSON lines, which give a list.

    Raises: FormatError if they are neither.
    """
    try:
        return atomic_files.parse_json(data)
    except ValueError as problem:
        if not _is_lines(data):
            raise FormatError(
                f"it is no JSON: {problem}",
                hint='any text can be imported as plain text: give the format "text"',
            ) from problem
        return [
            _line(line, number) for number, line in enumerate(data.splitlines(), 1) if line.strip()
        ]


def _is_lines(data: bytes) -> bool:
    """Return True if a file has several lines, and the first is a JSON object or list on its own.

    Called for a file that is not JSON. For a cut-off JSON text over several lines it returns
    False, so that the error of that text is reported.
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
    """Raise FormatError for data that cannot be written again: NaN, or nesting that is too deep."""
    try:
        json.dumps(data, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise FormatError(f"it cannot be saved as JSON: {error}") from error
    except RecursionError:
        raise FormatError("it is nested too deeply") from None


def _without_surrogates(data: object) -> tuple[object, int]:
    """Return JSON with lone surrogates replaced by U+FFFD, and their number.

    Programs that cut texts by UTF-16 units create them, and tokenizers reject them.
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
    title = data.get("title", "") if isinstance(data, dict) else ""
    imported = ImportedLoom(title if isinstance(title, str) else "", loom, loom)
    return ImportReport((imported,), NATIVE, len(nodes or ()), loom.dropped)


def _parse_trees(name: str, data: object) -> list[Sketch]:
    """Return the trees in a file's JSON. Any error of the importer becomes a FormatError.

    name: name of the format.
    """
    try:
        importer = IMPORTERS.get(name)
        sketches = _call_importer(name, data) if importer is None else importer.sketches(data)
    except WeftError:
        raise
    except atomic_files.PARSE_ERRORS as error:
        raise FormatError(f"this is no file of {name}, or it is broken: {error!r:.200}") from error
    if not sketches or not all(sketch.knots for sketch in sketches):
        raise FormatError(f"there are no trees of {name} in it")
    return sketches


def _describe_notes(sketches: Sequence[Sketch]) -> Iterator[str]:
    """Yield a line for each kind of omission or change, with its number in all trees."""
    notes: Counter[Note | str] = Counter()
    for sketch in sketches:
        notes += sketch.notes
    for note, n in notes.items():
        words = note if isinstance(note, str) else note.one if n == 1 else note.many
        yield f"{n} {words}"


def _other_importers() -> list[str]:
    return [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]


def _call_importer(name: str, data: object) -> list[Sketch] | None:
    """Return the trees that another package's importer reads from a file's JSON.

    Returns None if the file does not have its format.

    name: name of the importer, which is that of its format.
    """
    (point,) = (each for each in entry_points(group=ENTRY_POINT_GROUP) if each.name == name)
    sketches: list[Sketch] | None = point.load()(data)
    return sketches
