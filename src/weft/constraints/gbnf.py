"""GBNF, the BNF of llama.cpp: its parser, and its translation to llguidance's Lark.

llguidance cuts a text into lexemes, always the longest, and never takes one back; GBNF has none.
So a grammar without recursion becomes one regular expression. In a recursive grammar the largest
parts without recursion are lexemes, unless the longest match could be wrong; see `rules`.
"""

from __future__ import annotations

import string
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import GrammarError
from .rules import (
    MAX_DEPTH,
    Alternation,
    CharClass,
    Concat,
    Lexeme,
    Lexemes,
    Part,
    Range,
    Repeat,
    Rule,
    RuleRef,
    Shape,
    can_end,
    children,
    fixed_point,
    is_too_deep,
    parts_of,
)

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_MAX_NESTING = 100  # groups in groups
_NEST = 8  # parts in each other that a line of Lark has
_WORD = frozenset(string.ascii_letters + string.digits + "-_")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_HEX = {"x": 2, "u": 4, "U": 8}


def read(text: str) -> dict[str, Rule]:
    """Parse and validate a GBNF text; return its rules by name, `root` among them.

    Raises: GrammarError naming the line, also for a rule that matches no finite text, and for
        rules that are nested too deep.
    """
    rules = read_rules(text)
    endless = set(rules) - fixed_point(rules, can_end)
    if endless:
        first = min((rules[name] for name in endless), key=lambda rule: rule.line)
        raise line_error(
            first.line, f"rule {first.name!r} never ends: each of its texts needs another"
        )
    if is_too_deep(
        rules["root"].body,
        lambda part: [rules[part.name].body] if isinstance(part, RuleRef) else children(part),
    ):
        raise GrammarError(
            f"the GBNF has rules that lead to rules more than {MAX_DEPTH} levels deep"
        )
    return rules


def read_rules(text: str) -> dict[str, Rule]:
    """Parse a GBNF text; return its rules by name.

    Raises: GrammarError for a rule that is defined twice, or is missing.
    """
    rules: dict[str, Rule] = {}
    for rule in _GBNFReader(text).rules():
        before = rules.get(rule.name)
        if before is not None:
            raise line_error(
                rule.line, f"rule {rule.name!r} is there already, on line {before.line}"
            )
        rules[rule.name] = rule
    if "root" not in rules:
        raise GrammarError("the GBNF has no rule named root, where every text begins")
    for rule in rules.values():
        for ref in parts_of(rule.body, RuleRef):
            if ref.name not in rules:
                raise line_error(ref.line, f"there is no rule named {ref.name!r}")
    return rules


def line_error(line: int, message: str) -> GrammarError:
    """Return a GrammarError that names a line of a GBNF text.

    line: counted from 1.
    """
    return GrammarError(f"the GBNF is not valid: line {line}: {message}")


class _GBNFReader:
    """Recursive-descent parser of GBNF, as strict as llama.cpp's.

    Any character may follow a backslash. `at` is the position in the text; each method parses one
    construct there and moves `at` behind it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self._breaks = [at for at, char in enumerate(text) if char == "\n"]

    def rules(self) -> Iterator[Rule]:
        """Parse all rules."""
        self.skip(lines=True)
        while self.at < len(self.text):
            line = self.line
            name = self.name()
            if not name:
                raise self.error("expected the name of a rule")
            self.skip()
            if not self.take("::="):
                raise self.error(f"expected ::= after {name!r}")
            self.skip(lines=True)
            yield Rule(name, self.options(), line)
            if self.at < len(self.text) and self.next not in "\r\n":
                raise self.error("expected a new line, or a part of a rule")
            self.skip(lines=True)

    @property
    def line(self) -> int:
        """The line number at the position, from 1."""
        return bisect_left(self._breaks, self.at) + 1

    @property
    def next(self) -> str:
        """The character at the position; "" at the end."""
        return self.text[self.at : self.at + 1]

    def error(self, message: str) -> GrammarError:
        """Return an error with the line, and the text at the position."""
        rest = self.text[self.at : self.at + 20].split("\n")[0]
        return line_error(
            self.line, f"{message}, not {rest!r}" if rest else f"{message}, not its end"
        )

    def take(self, wanted: str) -> bool:
        """Skip `wanted` if it is next in the text; return True if it was."""
        is_next = self.text.startswith(wanted, self.at)
        self.at += len(wanted) * is_next
        return is_next

    def skip(self, *, lines: bool = False) -> None:
        """Skip spaces and comments, and with `lines` also line ends."""
        blank = " \t\r\n" if lines else " \t"
        while self.next and (self.next in blank or self.next == "#"):
            if self.next == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                self.at += 1

    def name(self) -> str:
        """Parse the name of a rule; "" if there is none."""
        start = self.at
        while self.next and self.next in _WORD:
            self.at += 1
        return self.text[start : self.at]

    def options(self) -> Part:
        """Parse options separated by "|"."""
        options = [self.chain()]
        while self.take_bar():
            self.skip(lines=True)
            options.append(self.chain())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def take_bar(self) -> bool:
        """Skip "|", also on a later line; return True if there was one."""
        before = self.at
        self.skip(lines=True)
        if self.take("|"):
            return True
        self.at = before if not self.depth else self.at
        return False

    def chain(self) -> Part:
        """Parse consecutive parts, up to "|", ")" or the end of the rule."""
        parts: list[Part] = []
        while True:
            self.skip(lines=self.depth > 0)
            part = self.part()
            if part is None:
                return parts[0] if len(parts) == 1 else Concat(tuple(parts))
            self.skip(lines=self.depth > 0)
            parts.append(self.repeated(part))

    def part(self) -> Part | None:
        """Parse one part without its repetition signs; None if there is none."""
        if self.take('"'):
            return self.literal()
        if self.take("["):
            return self.chars()
        if self.take("("):
            return self.group()
        if self.take("."):
            return CharClass(complement_ranges(()))
        if self.next in ("<", "!"):
            raise self.error(
                "tokens cannot be named in GBNF here: take Lark for that; expected text"
            )
        line, name = self.line, self.name()
        return RuleRef(name, line) if name else None

    def group(self) -> Part:
        """Parse a group after its "("."""
        line = self.line
        self.depth += 1
        if self.depth > _MAX_NESTING:
            raise line_error(
                line, f"groups stand in each other deeper than {_MAX_NESTING}; name some"
            )
        group = self.options()
        self.skip(lines=True)
        if not self.take(")"):
            raise self.error(f"expected ) of the group on line {line}")
        self.depth -= 1
        return group

    def literal(self) -> Part:
        """Parse a quoted text after its opening quote."""
        line, parts = self.line, []
        while not self.take('"'):
            if not self.next or self.next in "\r\n":
                raise line_error(line, 'a text ends with ", and this one does not')
            code = self.char()
            parts.append(CharClass(((code, code),)))
        return Concat(tuple(parts))

    def chars(self) -> Part:
        """Parse a character class after its "["."""
        line, is_not = self.line, self.take("^")
        listed: list[Range] = []
        while not self.take("]"):
            if not self.next or self.next in "\r\n":
                raise line_error(line, "a set of characters ends with ], and this one does not")
            low = high = self.char()
            if self.next == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self.char()
                if high < low:
                    raise line_error(line, f"the range from {chr(low)!r} to {chr(high)!r} is empty")
            listed.append((low, high))
        ranges = complement_ranges(listed) if is_not else merge_ranges(listed)
        if not ranges:
            raise line_error(line, "a set without characters matches nothing")
        return CharClass(ranges)

    def char(self) -> int:
        """Parse one character or escape; return its code point."""
        sign = self.next
        if not sign:
            raise self.error("expected a character")
        if sign != "\\":
            self.at += 1
            return self.validate_char(ord(sign))
        kind = self.text[self.at + 1 : self.at + 2]
        if kind in _HEX and kind:
            digits = self.text[self.at + 2 : self.at + 2 + _HEX[kind]]
            if len(digits) < _HEX[kind] or not set(digits) <= set(string.hexdigits):
                raise self.error(f"expected {_HEX[kind]} hexadecimal digits after \\{kind}")
            self.at += 2 + _HEX[kind]
            return self.validate_char(int(digits, 16))
        if not kind or not (kind in _ESCAPES or kind in string.punctuation):
            raise self.error("expected \\t \\r \\n \\x \\u \\U, or a sign after the \\")
        self.at += 2
        return ord(_ESCAPES.get(kind, kind))

    def validate_char(self, code: int) -> int:
        """Return a code point; raise GrammarError unless it is a Unicode character."""
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise line_error(self.line, f"{code:#x} is no Unicode character")
        return code

    def repeated(self, part: Part) -> Part:
        """Read the repetition signs (`*`, `+`, `?`, `{…}`) after a part; return the repeated part.

        Without a sign, that is `part` itself.
        """
        line, before = self.line, part
        while self.next and self.next in "*+?{":
            if part is not before and isinstance(part, Repeat) and part.part is not before:
                raise line_error(line, "a part has three repetition signs; put it in a group")
            if self.take("{"):
                min_count, max_count = self.times()
            else:
                sign = self.next
                self.at += 1
                min_count, max_count = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            part = Concat(()) if max_count == 0 else Repeat(part, min_count, max_count)
            self.skip(lines=self.depth > 0)
        return part

    def times(self) -> tuple[int, int | None]:
        """Parse "{3}", "{2,}" or "{2,5}" after its "{"; return (minimum, maximum or None)."""
        line = self.line
        self.skip(lines=True)
        min_count = self.number()
        self.skip(lines=True)
        max_count = min_count
        if self.take(","):
            self.skip(lines=True)
            max_count = self.number()
            self.skip(lines=True)
        if not self.take("}") or (min_count is None and max_count is None):
            raise line_error(line, "how often is written {3}, {2,} or {2,5}")
        min_count = min_count or 0
        if max_count is not None and max_count < min_count:
            raise line_error(line, f"{{{min_count},{max_count}}} is never")
        return min_count, max_count

    def number(self) -> int | None:
        """Parse a decimal number; None if there is none."""
        start = self.at
        while self.next and self.next in string.digits:
            self.at += 1
        if self.at - start > 6:
            raise line_error(self.line, "a part comes at most 999999 times")
        return int(self.text[start : self.at]) if self.at > start else None


def as_lark(text: str) -> tuple[str, list[int]]:
    """Translate a GBNF text to llguidance's Lark.

    Returns: the Lark, and for each of its lines the GBNF's line number.

    Raises: GrammarError naming the line.
    """
    rules = read(text)
    lexemes = Lexemes(rules)
    return _LarkWriter(rules, lexemes).text()


class _LarkWriter:
    """Translates GBNF rules to Lark.

    Names are numbers: r3 is a rule, T3 the terminal of a rule that is one regular expression. L4
    and g4 are parts with a name of their own.
    """

    def __init__(self, rules: Mapping[str, Rule], lexemes: Lexemes) -> None:
        self.rules = rules
        self.lexemes = lexemes
        self.numbers = {name: number for number, name in enumerate(rules)}
        self.terminals: dict[str, int] = {}  # wanted, with the line that wants them
        self.lines: list[tuple[str, int]] = []
        self.n_defined = 0

    def text(self) -> tuple[str, list[int]]:
        """Return the Lark of all rules, and for each of its lines the GBNF's line number."""
        root = self.rules["root"]
        self.add("start", self.lexemes.shape(RuleRef("root", root.line)), root.line)
        for name in self.lexemes.open_rules:
            rule = self.rules[name]
            self.add(f"r{self.numbers[name]}", self.lexemes.shape(rule.body), rule.line)
        done: set[str] = set()
        while left := [name for name in self.terminals if name not in done]:
            for name in left:
                rule = self.rules[name]
                self.lines.append(
                    (f"T{self.numbers[name]}: {self.terminal(rule.body, rule.line, 0)}", rule.line)
                )
            done.update(left)
        return "\n".join(line for line, _ in self.lines), [number for _, number in self.lines]

    def add(self, name: str, shape: Shape, line: int) -> None:
        """Append a rule to the Lark."""
        self.lines.append((f"{name}: {self.rule(shape, line, 0)}", line))

    def rule(self, shape: Shape, line: int, depth: int) -> str:
        """Return a part of a rule as Lark.

        Args:
            shape: the part with its lexemes marked.
            line: the GBNF's line.
            depth: how deep the part is nested in its line of Lark.
        """
        if isinstance(shape, Lexeme):
            return self.lexeme(shape, line)
        if isinstance(shape, RuleRef):
            return f"r{self.numbers[shape.name]}"
        parts = [self.rule(part, line, (depth + 1) % _NEST) for part in shape.parts]
        return self.named("g", _join_parts(shape.of, parts), line, depth)

    def lexeme(self, lexeme: Lexeme, line: int) -> str:
        """Return the terminal of a lexeme, for use in a rule; define it if necessary."""
        body = self.terminal(Concat(lexeme.parts), line, 1)
        if len(lexeme.parts) == 1 and isinstance(lexeme.parts[0], CharClass | RuleRef):
            return body
        return self.named("L", body, line, _NEST - 1)

    def terminal(self, part: Part, line: int, depth: int) -> str:
        """Return a part as the body of a terminal. line, depth: as for `rule`."""
        if isinstance(part, CharClass):
            return f"/{_class_pattern(part)}/"
        if isinstance(part, RuleRef):
            self.terminals.setdefault(part.name, part.line)
            return f"T{self.numbers[part.name]}"
        parts: list[str] = []
        run = ""  # adjacent characters become one expression
        for child in children(part):
            if isinstance(part, Concat) and isinstance(child, CharClass):
                run += _class_pattern(child)
                continue
            parts += [f"/{run}/"] * bool(run) + [self.terminal(child, line, (depth + 1) % _NEST)]
            run = ""
        return self.named("L", _join_parts(part, parts + [f"/{run}/"] * bool(run)), line, depth)

    def named(self, kind: str, body: str, line: int, depth: int) -> str:
        """Return the Lark of a part; below `_NEST` levels, define a rule and return its name.

        llguidance limits how deep parts may be nested in a line.

        kind: the prefix of the new name.
        """
        if depth < _NEST - 1 or " " not in body:
            return body
        self.n_defined += 1
        self.lines.append((f"{kind}{self.n_defined}: {body}", line))
        return f"{kind}{self.n_defined}"


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges of the same characters, sorted, without overlaps and surrogates."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    low, high = _SURROGATES
    pieces = [piece for a, b in merged for piece in ((a, min(b, low - 1)), (max(a, high + 1), b))]
    return tuple((a, b) for a, b in pieces if a <= b)


def complement_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return sorted ranges of all characters that are not in `ranges`."""
    left, start = [], 0
    for low, high in merge_ranges(ranges):
        left.append((start, low - 1))
        start = high + 1
    return merge_ranges((a, b) for a, b in [*left, (start, _LAST)] if a <= b)


def _join_parts(of: Part, parts: Sequence[str]) -> str:
    """Return the Lark of a part, given the Lark of its inner parts.

    of: the part; it decides whether it is a sequence, a choice or a repetition.
    """
    if isinstance(of, Repeat):
        max_count = "" if of.max_count is None else of.max_count
        return f"({parts[0]}){{{of.min_count},{max_count}}}"
    if len(parts) == 1:
        return parts[0]
    if isinstance(of, Alternation):
        return f"({' | '.join(parts)})"
    return f"({' '.join(parts)})" if parts else '""'


def _class_pattern(chars: CharClass) -> str:
    """Return a character class as a regular expression."""
    (low, high), *more = chars.ranges
    if low == high and not more:
        return _char_pattern(low)
    return f"[{''.join(f'{_char_pattern(a)}-{_char_pattern(b)}' for a, b in chars.ranges)}]"


def _char_pattern(code: int) -> str:
    """Return a character as a regular expression."""
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"
