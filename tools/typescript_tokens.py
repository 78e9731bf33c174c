"""Split TypeScript and TSX into names, comments and strings, without a parser.

`make lint` runs without npm, so that TypeScript's own scanner is not available. Two guesses replace
the grammar: a `/` after an operator starts a regular expression, and text between two tags is JSX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["name", "comment", "string"]
# With at most one template and one pair of braces inside.
PLACEHOLDER = re.compile(r"\$\{(?:[^{}`]|`[^`]*`|\{[^{}]*\})*\}")
TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<comment>/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*)"
    r"|(?P<string>'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
    rf"|(?P<template>`(?:\\.|{PLACEHOLDER.pattern}|[^`\\])*`)"
    r"|(?P<name>[A-Za-z_$][\w$]*)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<operator>=>|\?\.|\.\.\.|.)",
    re.DOTALL,
)
REGEX = re.compile(r"/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/[a-z]*")
BEFORE_REGEX = frozenset("( , = : [ ! & | ? { } ; =>".split()) | {"return", ""}
# Text after `>` or `}` up to the next tag or expression. Code contains an excluded character.
JSX_TEXT = re.compile(r"(?! )[^<>{}()=:;]*[A-Za-z][^<>{}()=:;]*(?=[<{])")
KEYWORDS = re.compile(r"\b(?:class|const|else|enum|export|finally|function|interface|type)\b")
COMMENT_MARK = re.compile(r"^[ \t]*(?:/\*+|\*+/|\*|//+)[ \t]?|[ \t]*\*/$", re.MULTILINE)


class Token(NamedTuple):
    """line: of the first character, counted from 1. is_field: a name after a dot, not `this.`."""

    kind: Kind
    line: int
    text: str
    is_field: bool = False


def tokens(source: str, *, jsx: bool = False) -> Iterator[Token]:
    """Yield names, comments without their marks, and strings without quotes.

    The text between two JSX tags is a string.
    """
    at, line, counted = 0, 1, 0
    before = second = ""  # the two tokens before this one, without spaces and comments
    while at < len(source):
        line += source.count("\n", counted, at)
        counted = at
        if jsx and before in (">", "}") and (text := JSX_TEXT.match(source, at)):
            if not KEYWORDS.search(text[0]):
                yield Token("string", line, text[0])
                at, before, second = text.end(), "", before
                continue
        if before in BEFORE_REGEX and (regex := REGEX.match(source, at)):
            at, before, second = regex.end(), "/", before
            continue
        match = TOKEN.match(source, at)
        assert match is not None  # the last alternative matches any character
        at = match.end()
        yield from _token(match, line, is_field=before in (".", "?.") and second != "this")
        if match.lastgroup not in ("space", "comment"):
            before, second = match[0], before


def _token(match: re.Match[str], line: int, *, is_field: bool) -> Iterator[Token]:
    text = match[0]
    match match.lastgroup:
        case "name":
            yield Token("name", line, text, is_field)
        case "comment":
            yield Token("comment", line, COMMENT_MARK.sub("", text).rstrip())
        case "string":
            yield Token("string", line, text[1:-1])
        case "template":
            yield Token("string", line, PLACEHOLDER.sub("x", text[1:-1]))
            for placeholder in PLACEHOLDER.finditer(text):
                first = line + text.count("\n", 0, placeholder.start())
                for token in tokens(placeholder[0][2:-1]):
                    yield token._replace(line=first + token.line - 1)
