"""Grammar rules of any syntax, and the choice of the parts that are matched as lexemes.

llguidance matches the longest text of a lexeme. That is wrong if the next character may also follow
the lexeme. Such lexemes are split, if necessary into single characters, which all have one length.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

Range = tuple[int, int]
T = TypeVar("T")

# Maximum nesting, rules in rules included. llguidance recurses: at a few thousand levels
# its stack overflows and the process crashes.
MAX_DEPTH = 600


@dataclass(frozen=True, slots=True, eq=False)
class CharClass:
    """One character of some ranges.

    ranges: (first, last) code points, sorted; both included.
    """

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Several parts in sequence."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternation:
    """One of several parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A part repeated `min_count` to `max_count` times; None means no maximum."""

    part: Part
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True, eq=False)
class RuleRef:
    """A reference to the rule `name`.

    line: where the reference is in the grammar's text.
    """

    name: str
    line: int


Part = CharClass | Concat | Alternation | Repeat | RuleRef


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of a grammar: its name, its right side, and the line where it starts."""

    name: str
    body: Part
    line: int


def children(part: Part) -> tuple[Part, ...]:
    """Return the parts directly inside a part; character classes and references have none."""
    if isinstance(part, Concat | Alternation):
        return part.parts
    return (part.part,) if isinstance(part, Repeat) else ()


def is_too_deep(start: T, inner: Callable[[T], Iterable[T]]) -> bool:
    """Return True if objects are nested deeper than MAX_DEPTH; each object is visited once.

    inner: returns the objects directly inside an object.
    """
    visited = {id(start)}
    path = [iter(inner(start))]
    while path:
        if len(path) > MAX_DEPTH:
            return True
        for child in path[-1]:
            if id(child) not in visited:
                visited.add(id(child))
                path.append(iter(inner(child)))
                break
        else:
            path.pop()
    return False


def parts_of(part: Part, kind: type[T]) -> Iterator[T]:
    """Yield all parts of class `kind` in a part, at any depth, the part itself included."""
    stack = [part]
    while stack:
        each = stack.pop()
        if isinstance(each, kind):
            yield each
        stack += children(each)


def fixed_point(
    rules: Mapping[str, Rule], test: Callable[[Part, Container[str]], bool]
) -> set[str]:
    """Return the names of rules that pass a test which depends on the results of other rules.

    test: called with a rule's body and the names of rules that have passed. It is called again
    when a rule to which the body refers has passed.
    """
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for ref in parts_of(rule.body, RuleRef):
            users[ref.name].append(rule.name)
    known: set[str] = set()
    stack = list(rules)
    while stack:
        name = stack.pop()
        if name not in known and test(rules[name].body, known):
            known.add(name)
            stack += users[name]
    return known


def can_end(part: Part, known: Container[str]) -> bool:
    """Return True if a part matches some finite text; a test for `fixed_point`.

    known: names of the rules that are known to match one.
    """
    if isinstance(part, RuleRef):
        return part.name in known
    if isinstance(part, Alternation):
        return any(can_end(each, known) for each in part.parts)
    if isinstance(part, Repeat) and not part.min_count:
        return True
    return all(can_end(each, known) for each in children(part))


def is_flat(part: Part, known: Container[str]) -> bool:
    """Return True if a part has no recursion; a test for `fixed_point`.

    known: names of the rules that are known to have none.
    """
    return all(ref.name in known for ref in parts_of(part, RuleRef))


_MAX_POSITIONS = 60_000  # maximum positions of a lexeme that is analysed; a larger one is split
_MAX_RULE_DEPTH = 60  # maximum nesting of rules in it
_MAX_COMPARED = 200_000  # maximum positions visited to compare two lexemes
_MAX_LEXEMES = 300  # maximum lexemes that are compared; if there are more, all are split


@dataclass(frozen=True, slots=True)
class Lexeme:
    """Consecutive parts that are matched together as one regular expression.

    of: the part that contains them.
    """

    parts: tuple[Part, ...]
    of: Part


@dataclass(frozen=True, slots=True, eq=False)
class Compound:
    """A Concat, Alternation or Repeat that is not one lexeme.

    of: that part.
    parts: its inner parts, with their lexemes marked.
    """

    of: Part
    parts: tuple[Compound | Lexeme | RuleRef, ...]


Shape = Compound | Lexeme | RuleRef


class Lexemes:
    """Divides a grammar into lexemes whose longest match is always right.

    open_rules: names of the rules that are not matched as regular expressions.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self._flat = fixed_point(rules, is_flat)
        self._split_ids: set[int] = set()  # ids of parts that were split into smaller lexemes
        self._char_masks = _char_masks(rules)
        self._automata: dict[Lexeme, _Automaton | None] = {}
        self.open_rules: list[str] = []
        self._shapes: dict[str, Shape] = {}
        while True:
            self._compute_shapes()
            ambiguous = self._ambiguous()
            if not ambiguous:
                break
            for lexeme in ambiguous:
                self._split(lexeme)

    def shape(self, part: Part) -> Shape:
        """Return a part with its lexemes marked; a part that is one lexeme becomes a Lexeme."""
        if self._is_lexeme(part):
            return Lexeme((part,), part)
        if isinstance(part, RuleRef):
            return part
        if not isinstance(part, Concat) or id(part) in self._split_ids:
            return Compound(part, tuple(self.shape(each) for each in children(part)))
        shapes: list[Shape] = []
        run: list[Part] = []
        for child in part.parts:
            if self._is_lexeme(child):
                run.append(child)
                continue
            shapes += [Lexeme(tuple(run), part)] * bool(run) + [self.shape(child)]
            run = []
        return Compound(part, tuple(shapes + [Lexeme(tuple(run), part)] * bool(run)))

    def _is_lexeme(self, part: Part) -> bool:
        """Return True if the part can be one regular expression and was not split."""
        return id(part) not in self._split_ids and is_flat(part, self._flat)

    def _split(self, lexeme: Lexeme) -> None:
        """Split a lexeme into smaller ones; rules that it refers to become open."""
        (part, *more) = lexeme.parts
        if more:
            self._split_ids.add(id(lexeme.of))
        elif isinstance(part, RuleRef):
            self._flat.discard(part.name)
        else:
            self._split_ids.add(id(part))

    def _compute_shapes(self) -> None:
        """Compute the shapes of everything reachable from the root."""
        root = RuleRef("root", self.rules["root"].line)
        self.open_rules, self._shapes = [], {"": self.shape(root)}
        stack = [self._shapes[""]]
        while stack:
            shape = stack.pop()
            if isinstance(shape, Compound):
                stack += shape.parts
            elif isinstance(shape, RuleRef) and shape.name not in self._shapes:
                self.open_rules.append(shape.name)
                self._shapes[shape.name] = self.shape(self.rules[shape.name].body)
                stack.append(self._shapes[shape.name])

    # Characters that may follow a lexeme ---------------------------------------------------------

    def _ambiguous(self) -> list[Lexeme]:
        """Return the lexemes whose longest match can be wrong; single characters never are."""
        if not self.open_rules:
            return []
        after = self._following_chars()
        large = [each for each in after if self._automaton(each) is None]
        if large or len(after) > _MAX_LEXEMES:
            return large or [each for each in after if _can_split(each)]
        ambiguous: dict[Lexeme, None] = {}
        for one, chars in after.items():
            for other in after:
                if self._can_mismatch(one, other, chars):
                    ambiguous |= dict.fromkeys(each for each in (one, other) if _can_split(each))
        return list(ambiguous)

    def _can_mismatch(self, one: Lexeme, other: Lexeme, after: int) -> bool:
        """Return True if the longest match of `other` can be wrong after a text of `one`.

        That is so if a text of `one` is a proper prefix of a text of `other`, and the next
        character may also follow `one`. Both automata read the same texts in parallel.

        after: the characters that may follow `one`, as bits.
        """
        short, long = self._automaton(one), self._automaton(other)
        assert short is not None
        assert long is not None
        stack = [(short.first, long.first)]
        visited = set[tuple[frozenset[int], frozenset[int]]]()
        work = 0
        while stack:
            state = stack.pop()
            if state in visited:
                continue
            visited.add(state)
            work += len(state[0]) + len(state[1])
            if work > _MAX_COMPARED:
                return True
            there = long.by_char(state[1])
            for char, p in short.by_char(state[0]).items():
                if char in there:
                    following = long.after(there[char])
                    if not p.isdisjoint(short.last) and long.mask(following) & after:
                        return True
                    stack.append((short.after(p), following))
        return False

    def _following_chars(self) -> dict[Lexeme, int]:
        """Return for each lexeme the characters that may follow it, as bits."""
        first = self._first_of_rules()
        after: dict[str, int] = dict.fromkeys(self._shapes, 0)
        following: dict[Lexeme, int] = {}

        def walk(shape: Shape, then: int) -> None:
            """Add `then`, the characters that may follow a part, to the lexemes and rules at its
            end.
            """
            if isinstance(shape, Lexeme):
                following[shape] = following.get(shape, 0) | then
            elif isinstance(shape, RuleRef):
                after[shape.name] |= then
            elif isinstance(shape.of, Concat):
                for part in reversed(shape.parts):
                    walk(part, then)
                    begins, is_empty = self._first_chars(part, first)
                    then = begins | then if is_empty else begins
            else:
                repeats = isinstance(shape.of, Repeat) and shape.of.max_count != 1
                for part in shape.parts:
                    walk(part, then | self._first_chars(part, first)[0] if repeats else then)

        before = None
        while before != (after, following):
            before = (dict(after), dict(following))
            for name, shape in self._shapes.items():
                walk(shape, after[name])
        return following

    def _first_of_rules(self) -> dict[str, tuple[int, bool]]:
        """Return for each open rule its possible first characters, and whether it may be empty."""
        first = dict.fromkeys(self._shapes, (0, False))
        before = None
        while before != first:
            before = dict(first)
            for name, shape in self._shapes.items():
                first[name] = self._first_chars(shape, first)
        return first

    def _first_chars(self, shape: Shape, known: Mapping[str, tuple[int, bool]]) -> tuple[int, bool]:
        """Return a part's possible first characters as bits, and whether it may be empty.

        known: the same of all open rules, as far as computed.
        """
        if isinstance(shape, Lexeme):
            automaton = self._automaton(shape)
            if automaton is None:
                return -1, True
            return automaton.mask(automaton.first), automaton.is_empty
        if isinstance(shape, RuleRef):
            return known[shape.name]
        parts = [self._first_chars(each, known) for each in shape.parts]
        chars = 0
        if isinstance(shape.of, Concat):
            for begins, is_empty in parts:
                chars |= begins
                if not is_empty:
                    return chars, False
            return chars, True
        for begins, _ in parts:
            chars |= begins
        is_empty = any(each for _, each in parts)
        return chars, is_empty or (isinstance(shape.of, Repeat) and not shape.of.min_count)

    def _automaton(self, lexeme: Lexeme) -> _Automaton | None:
        """Return the cached automaton of a lexeme; None if it is too large."""
        if lexeme not in self._automata:
            automaton: _Automaton | None = _Automaton(self.rules, self._char_masks)
            try:
                assert automaton is not None
                automaton.build(Concat(lexeme.parts))
            except _TooLargeError:
                automaton = None
            self._automata[lexeme] = automaton
        return self._automata[lexeme]


Ends = tuple[bool, frozenset[int], frozenset[int]]


class _TooLargeError(Exception):
    """The lexeme is too large for an automaton."""


class _Automaton:
    """The positions of a lexeme's characters, and which may follow which (Glushkov's construction).

    A repeated part counts as repeated any number of times, which finds no fewer ambiguities.
    """

    def __init__(self, rules: Mapping[str, Rule], masks: Mapping[CharClass, int]) -> None:
        self.rules = rules
        self.masks = masks
        self.chars: list[int] = []
        self.follow: list[list[frozenset[int]]] = []  # shared, as many places are followed by many
        self.first: frozenset[int] = frozenset()
        self.last: frozenset[int] = frozenset()
        self.is_empty = False

    def build(self, part: Part) -> None:
        """Build the automaton of a part. Raises: _TooLargeError."""
        self.is_empty, self.first, self.last = self._add(part, 0)

    def mask(self, positions: Iterable[int]) -> int:
        """Return the characters that match at any of these positions, as bits."""
        chars = 0
        for position in positions:
            chars |= self.chars[position]
        return chars

    def after(self, positions: Iterable[int]) -> frozenset[int]:
        """Return the positions that may follow any of these positions."""
        distinct = {id(each): each for position in positions for each in self.follow[position]}
        return frozenset().union(*distinct.values())

    def by_char(self, positions: Iterable[int]) -> dict[int, frozenset[int]]:
        """Group positions by the characters that match them."""
        matching: dict[int, set[int]] = {}
        for position in positions:
            for char in _bit_numbers(self.chars[position]):
                matching.setdefault(char, set()).add(position)
        return {char: frozenset(each) for char, each in matching.items()}

    def _add(self, part: Part, depth: int) -> Ends:
        """Add the positions of a part.

        depth: the nesting of rules above it.

        Returns: whether the part may be empty, its first positions, and its last positions.
        """
        if depth > _MAX_RULE_DEPTH or len(self.chars) > _MAX_POSITIONS:
            raise _TooLargeError
        if isinstance(part, CharClass):
            self.chars.append(self.masks[part])
            self.follow.append([])
            position = frozenset([len(self.chars) - 1])
            return False, position, position
        if isinstance(part, RuleRef):
            return self._add(self.rules[part.name].body, depth + 1)
        inner = [self._add(each, depth + 1) for each in children(part)]
        if isinstance(part, Alternation):
            first = frozenset[int]().union(*(first for _, first, _ in inner))
            last = frozenset[int]().union(*(last for _, _, last in inner))
            return any(is_empty for is_empty, _, _ in inner), first, last
        if isinstance(part, Repeat):
            ((is_empty, first, last),) = inner
            if part.max_count == 0:
                return True, frozenset(), frozenset()
            if part.max_count != 1:
                self._connect(last, first)
            return is_empty or not part.min_count, first, last
        return self._add_chain(inner)

    def _add_chain(self, inner: list[Ends]) -> Ends:
        """Connect parts in sequence; return the same of the sequence as `_add` of a part."""
        is_empty, first, last = True, frozenset[int](), frozenset[int]()
        for each_is_empty, each_first, each_last in inner:
            self._connect(last, each_first)
            if is_empty:
                first = first | each_first
            last = last | each_last if each_is_empty else each_last
            is_empty = is_empty and each_is_empty
        return is_empty, first, last

    def _connect(self, last: frozenset[int], first: frozenset[int]) -> None:
        """Let each position of `first` follow each position of `last`."""
        for position in last:
            self.follow[position].append(first)


@lru_cache(maxsize=4096)
def _bit_numbers(mask: int) -> tuple[int, ...]:
    """Return the indices of the bits that are set."""
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _can_split(lexeme: Lexeme) -> bool:
    """Return True unless the lexeme is a single character class."""
    return len(lexeme.parts) > 1 or not isinstance(lexeme.parts[0], CharClass)


def _char_masks(rules: Mapping[str, Rule]) -> dict[CharClass, int]:
    """Return the characters of each class as bits.

    Characters share a bit if every class has all of them or none.
    """
    positions = [each for rule in rules.values() for each in parts_of(rule.body, CharClass)]
    borders = sorted({code for each in positions for a, b in each.ranges for code in (a, b + 1)})
    at = {code: bit for bit, code in enumerate(borders)}
    return {
        each: sum((1 << at[b + 1]) - (1 << at[a]) for a, b in each.ranges) for each in positions
    }
