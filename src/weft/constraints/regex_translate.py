"""Translation of Python's compiled `re` patterns to llguidance's syntax, and to prefix patterns.

The meaning of a pattern depends on its flags and on Python's character classes. The translation
reads Python's own parse, so the result matches exactly the same texts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import GrammarError

Parsed = Sequence[tuple[Any, Any]]
_NAMES = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
    "FAILURE": "look-around",
    "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}
_CLASSES = {  # what str.isdecimal, isspace and isalnum say
    "DIGIT": r"\p{Nd}",
    "SPACE": r"\s\x1c-\x1f",
    "WORD": r"\p{L}\p{N}_",
}
_ASCII = {"DIGIT": "0-9", "SPACE": r" \t\n\r\f\v", "WORD": "0-9A-Za-z_"}


def as_regex(pattern: re.Pattern[str]) -> str:
    """Translate a compiled pattern to Rust's syntax, for texts that it fully matches.

    The flags of the pattern become a part of it. Raises: GrammarError naming the part that cannot
    be translated.
    """
    if not isinstance(pattern.pattern, str):
        raise GrammarError(f"the pattern {pattern.pattern!r} is of bytes; allowed is one of text")
    try:
        return _RustWriter().all(_parse(pattern), pattern.flags)
    except _Untranslatable as error:
        raise GrammarError(f"the pattern {pattern.pattern!r} has {error}; leave it out") from None


class PatternError(GrammarError):
    """A JSON schema's pattern has no equivalent regular expression in Rust's syntax."""


def search_regex(pattern: str) -> str:
    """Translate a JSON schema's pattern to Rust's syntax, for texts that contain a match.

    Raises: PatternError naming the part that cannot be translated.
    """
    flags = re.ASCII
    try:
        parsed = list(_parse(re.compile(pattern, flags)))
        is_branch = len(parsed) == 1 and str(parsed[0][0]) == "BRANCH"
        options = parsed[0][1][1] if is_branch else [parsed]
        return f"({'|'.join(_SearchWriter().all(list(option), flags) for option in options)})"
    except (re.error, _Untranslatable) as error:
        raise PatternError(f"the pattern {pattern!r} is not supported: {error}") from None


def prefix_pattern(pattern: re.Pattern[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the beginning of a match of `pattern` at the end of a text.

    `search` with it returns the longest end of the text that may be the start of a match. None if
    that cannot be decided, because of look-around or anchors.
    """
    try:
        begun = _PrefixWriter().all(_parse(pattern), pattern.flags)
    except _Untranslatable:
        return None
    return re.compile(rf"(?s:(?=.))(?:{begun})\Z")


def _parse(pattern: re.Pattern[str]) -> Parsed:
    """Return Python's own parse of a pattern: (operation, argument) pairs in order.

    NOTE: `re._parser` is not documented, and only this function uses it. A test lists all
    operations that it can return.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were given when it was compiled
        parsed: Parsed = re._parser.parse(pattern.pattern, pattern.flags)  # type: ignore[attr-defined]
    return parsed


class _Untranslatable(Exception):
    """Part of a pattern that cannot be translated; the message names it."""


class _PythonWriter:
    """Writes a parsed pattern in the syntax of Python's `re`, with local flags.

    Subclasses override single methods. `flags` are the flags that apply at this part.
    """

    def all(self, parsed: Parsed, flags: int) -> str:
        """Return the pattern of a sequence of operations."""
        return "".join(self.one(str(name), argument, flags) for name, argument in parsed)

    def one(self, name: str, argument: Any, flags: int) -> str:
        """Return the pattern of one operation, by its name in Python's parse."""
        if name == "BRANCH":
            return f"(?:{'|'.join(self.all(each, flags) for each in argument[1])})"
        if name == "SUBPATTERN":
            _, added, removed, inner = argument
            return f"(?:{self.all(inner, (flags | added) & ~removed)})"
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            min_count, max_count, inner = argument
            return self.repeated(min_count, max_count, inner, flags)
        if name == "AT":
            return self.anchor(str(argument), flags)
        if name == "ANY":
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        if name in ("LITERAL", "NOT_LITERAL", "IN"):
            return self.char(name, argument, flags)
        raise _Untranslatable(_NAMES.get(name, name))

    def repeated(self, min_count: int, max_count: int, inner: Parsed, flags: int) -> str:
        """Return the pattern of `inner`, repeated."""
        end = "" if max_count >= re._parser.MAXREPEAT else max_count  # type: ignore[attr-defined]
        return f"(?:{self.all(inner, flags)}){{{min_count},{end}}}"

    def anchor(self, name: str, flags: int) -> str:
        """Return the pattern of an anchor such as AT_END; here every anchor raises."""
        raise _Untranslatable(_NAMES.get(name, "^ or $"))

    def char(self, name: str, argument: Any, flags: int) -> str:
        """Return the pattern of a character or character class."""
        parts = argument if name == "IN" else [("LITERAL", argument)]
        is_not = name == "NOT_LITERAL" or str(parts[0][0]) == "NEGATE"
        inner = "".join(self.member(str(kind), value, flags) for kind, value in parts)
        char_class = f"[{'^' if is_not else ''}{inner}]"
        mode = self.mode(flags)
        return f"(?{mode}:{char_class})" if mode else char_class

    def mode(self, flags: int) -> str:
        """Return the flags to write before a character class, such as "i"."""
        return ("a" if flags & re.ASCII else "") + ("i" if flags & re.IGNORECASE else "")

    def member(self, kind: str, value: Any, flags: int) -> str:
        """Return one member of a character class."""
        if kind == "LITERAL":
            return escape_char(value)
        if kind == "RANGE":
            return f"{escape_char(value[0])}-{escape_char(value[1])}"
        return self.named(str(value), flags) if kind == "CATEGORY" else ""

    def named(self, name: str, flags: int) -> str:
        r"""Return a class such as `\\d` by its name in Python's parse."""
        kind = name.removeprefix("CATEGORY_").removeprefix("NOT_")
        char = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[kind]
        return "\\" + (char.upper() if "NOT_" in name else char)


class _RustWriter(_PythonWriter):
    """Writes a parsed pattern in Rust's syntax."""

    def anchor(self, name: str, flags: int) -> str:
        if name in ("AT_BEGINNING", "AT_END") and flags & re.MULTILINE:
            raise _Untranslatable("^ or $ at lines (re.MULTILINE)")
        if name.startswith("AT_BEGINNING"):
            return "^"
        return "$" if name.startswith("AT_END") else super().anchor(name, flags)

    def mode(self, flags: int) -> str:
        if flags & re.ASCII and flags & re.IGNORECASE:
            raise _Untranslatable("re.ASCII together with re.IGNORECASE")
        return "i" if flags & re.IGNORECASE else ""

    def named(self, name: str, flags: int) -> str:
        kind = name.removeprefix("CATEGORY_").removeprefix("NOT_")
        inner = (_ASCII if flags & re.ASCII else _CLASSES)[kind]
        return f"[^{inner}]" if "NOT_" in name else inner


class _SearchWriter(_RustWriter):
    """Writes one option of a parsed pattern so that it matches all texts that contain a match."""

    def all(self, parsed: Parsed, flags: int) -> str:
        parts = list(parsed)
        begin = end = "(?s:.*)"
        if parts and (str(parts[0][0]), str(parts[0][1])) == ("AT", "AT_BEGINNING"):
            begin, parts = "", parts[1:]
        if parts and (str(parts[-1][0]), str(parts[-1][1])) == ("AT", "AT_END"):
            end, parts = "", parts[:-1]
        return f"{begin}{_AnchorlessWriter().all(parts, flags)}{end}"


class _AnchorlessWriter(_RustWriter):
    """Writes a parsed pattern, and rejects anchors in its middle."""

    def anchor(self, name: str, flags: int) -> str:
        raise _Untranslatable("^ or $ in its middle")


class _PrefixWriter(_PythonWriter):
    """Writes a pattern of all prefixes of a match, from the empty to the complete one."""

    def all(self, parsed: Parsed, flags: int) -> str:
        prefixes = ""
        for name, argument in reversed(list(parsed)):
            complete = _PythonWriter().one(str(name), argument, flags)
            begun = self.one(str(name), argument, flags)
            prefixes = f"(?:{complete}{prefixes}|{begun})" if prefixes else begun
        return prefixes

    def repeated(self, min_count: int, max_count: int, inner: Parsed, flags: int) -> str:
        return f"{_PythonWriter().repeated(0, max_count, inner, flags)}(?:{self.all(inner, flags)})"

    def char(self, name: str, argument: Any, flags: int) -> str:
        return super().char(name, argument, flags) + "?"


def escape_char(code: int) -> str:
    """Return a character, by code point, in a form that all regular expression syntaxes accept."""
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
